"""Kernels of the channels_first order, where each channel of each sample is a contiguous row of S elements.

A unit is what one statistic covers: the D rows of a group, or for batch_norm the N rows of a channel. With enough units
one kernel takes each unit from its statistics to its result while the unit lies in cache. With few units rows are cut
into pieces, and the statistics of all pieces are combined before the second pass.
"""

from __future__ import annotations

from functools import cache, partial

import numpy as np

from fusednorm.backends.cpu.geometry import (
    GRAD_SAMPLE,
    GRAD_STEP,
    GROUP_CHANNELS,
    GROUPS,
    INPUT_SAMPLE,
    INPUT_STEP,
    OUTPUT_SAMPLE,
    OUTPUT_STEP,
    PER_BATCH,
    PIECE,
    PIECES,
    POST_SAMPLE,
    POST_STEP,
    RMS,
    SAMPLES,
    SPATIAL,
    TRAINING,
    WANT_INPUT_GRAD,
)
from fusednorm.backends.cpu.kernels.affine import affine, dz_of, normalized, publish, reduced_count
from fusednorm.backends.cpu.kernels.device import exact, reassociated, span
from fusednorm.backends.cpu.kernels.elements import Element
from fusednorm.backends.cpu.kernels.mathematics import joined
from fusednorm.backends.cpu.kernels.moments import merge, moments, strided_moments
from fusednorm.backends.cpu.kernels.operands import rounded_number
from fusednorm.backends.cpu.kernels.variants import backwards


@exact
def rows_per_unit(geometry):
    return geometry[SAMPLES] if geometry[PER_BATCH] else geometry[GROUP_CHANNELS]


@exact
def locate(geometry, unit, row):
    """The sample and the channel of a unit's row."""
    if geometry[PER_BATCH]:
        return row, unit
    return unit // geometry[GROUPS], (unit % geometry[GROUPS]) * geometry[GROUP_CHANNELS] + row


@exact
def locate_piece(geometry, task):
    """The unit, row, first position and length of a piece."""
    row, piece = task // geometry[PIECES], task % geometry[PIECES]
    rows = rows_per_unit(geometry)
    first = piece * geometry[PIECE]
    return row // rows, row % rows, first, min(geometry[PIECE], geometry[SPATIAL] - first)


@cache
def _apply_row(element: Element, value):
    """y = value(A (x - mean) rstd + B) of one row."""
    load, store, T = element.load, element.store, element.compute

    @exact
    def apply_row(x, i, y, j, n, mean, rstd, gain, offset, activation_parameter):
        centre, a, b = T(mean), T(gain * rstd), T(offset)
        alpha = T(activation_parameter)
        for part in range(2):
            start, stop = span(part, n)
            for k in range(start, stop):
                store(y, j + k, value(normalized(load(x, i + k) - centre, a, b), alpha))

    return apply_row


@cache
def _keep_row(element: Element, pullback, adds_behind: bool):
    load, keep, store, T = element.load, element.keep, element.store, element.compute
    at = joined(pullback)

    @exact
    def keep_row(grad, g, x, i, kept, r, post, p, grad_post, o, n, centre, rstd, gain, offset, activation_parameter):
        """dz of one row, put into ``kept`` from r on: the sums of a row's last elements are scalar code, in which no
        exponential should be. With ``adds_behind`` z is z + post, and dz its gradient, which is stored too."""
        a, b, alpha = T(gain * np.float64(rstd)), T(offset), T(activation_parameter)
        for part in range(2):
            start, stop = span(part, n)
            for k in range(start, stop):
                z = normalized(load(x, i + k) - centre, a, b)
                if adds_behind:
                    z = at(z, load(post, p + k))
                dz = pullback(load(grad, g + k), z, alpha)
                keep(kept, r + k, dz)
                if adds_behind:
                    store(grad_post, o + k, dz)

    return keep_row


#: Elements that are summed in the compute dtype. A processor with short vectors has few partial sums, each of which
#: rounds once for each of its elements: of 4096 AVX2's were beyond the bound.
SUMMED = 1024


@cache
def _row_sums(element: Element, make):
    """p = sum dz and q = sum dz xhat of one row, in float64."""
    load, T = element.load, element.compute

    @reassociated
    def chunk_sums(grad, g, x, i, keep, r, n, centre, rstd, a, b, alpha):
        p, q = T(0), T(0)
        for k in range(n):
            deviation = load(x, i + k) - centre
            dz = make(grad, g + k, keep, r + k, normalized(deviation, a, b), alpha)
            p += dz
            q += dz * (deviation * rstd)
        return np.float64(p), np.float64(q)

    @exact
    def row_sums(grad, g, x, i, keep, r, n, centre, rstd, gain, offset, activation_parameter):
        p, q = 0.0, 0.0
        a, b, alpha = T(gain * np.float64(rstd)), T(offset), T(activation_parameter)
        for start in range(0, n, SUMMED):
            m = min(SUMMED, n - start)
            chunk_p, chunk_q = chunk_sums(grad, g + start, x, i + start, keep, r + start, m, centre, rstd, a, b, alpha)
            p += chunk_p
            q += chunk_q
        return p, q

    return row_sums


@cache
def _gradient_row(element: Element, make, adds_gradient: bool):
    """dx = rstd (A dz - (P + xhat Q) / K) of one row, as a dz + c2 xhat + c3. With ``adds_gradient`` dx gets the
    gradient of x itself, which lies as x does.

    With x - mean in place of xhat, c2 would hold rstd**2, which is beyond float32 for inputs of 1e19 and of 1e-20.
    Where the statistics were given, dx is a dz alone, since 0 xhat would be NaN where x is infinite.
    """
    load, store, T = element.load, element.store, element.compute

    @exact
    def gradient_row(
        grad, g, x, i, dx, o, keep, r, n, centre, rstd, gain, offset, activation_parameter, mean_p, mean_q, training,
        grad_total,
    ):  # fmt: skip
        inverse = np.float64(rstd)
        a, b = T(gain * inverse), T(offset)
        c2, c3 = T(-inverse * mean_q), T(-inverse * mean_p)
        alpha = T(activation_parameter)
        for part in range(2):
            start, stop = span(part, n)
            if training:
                for k in range(start, stop):
                    deviation = load(x, i + k) - centre
                    dz = make(grad, g + k, keep, r + k, normalized(deviation, a, b), alpha)
                    gradient = a * dz + (c2 * (deviation * rstd) + c3)
                    if adds_gradient:
                        gradient += load(grad_total, i + k)
                    store(dx, o + k, gradient)
            else:
                for k in range(start, stop):
                    z = normalized(load(x, i + k) - centre, a, b)
                    gradient = a * make(grad, g + k, keep, r + k, z, alpha)
                    if adds_gradient:
                        gradient += load(grad_total, i + k)
                    store(dx, o + k, gradient)

    return gradient_row


@cache
def saved_statistics(element: Element):
    rounded, T = rounded_number(element), element.compute

    @exact
    def saved(given_mean, given_mean_dtype, given_rstd, given_rstd_dtype, geometry, unit):
        """The mean and rstd that a unit's forward has saved, in the compute dtype."""
        centre = 0.0 if geometry[RMS] else rounded(given_mean, unit, given_mean_dtype)
        return T(centre), T(rounded(given_rstd, unit, given_rstd_dtype))

    return saved


@cache
def moments_of_units(element: Element):
    row_moments, column_moments = moments(element), strided_moments(element)

    @exact
    def unit_moments(x, origin, sample, step, geometry, unit):
        """Mean and M2 of a unit of a tensor with these strides between samples and channels; rows that touch are read
        as one, and rows of one element each at their step."""
        rows, length, rms = rows_per_unit(geometry), geometry[SPATIAL], geometry[RMS]
        if length == 1 and rows > 1:
            n, c = locate(geometry, unit, 0)
            return column_moments(x, origin + n * sample + c * step, sample if geometry[PER_BATCH] else step, rows, rms)
        if not geometry[PER_BATCH] and step == length:
            rows, length = 1, rows * length
        count, mean, m2 = 0, 0.0, 0.0
        for row in range(rows):
            n, c = locate(geometry, unit, row)
            row_mean, row_m2 = row_moments(x, origin + n * sample + c * step, length, rms)
            count, mean, m2 = merge(count, mean, m2, length, row_mean, row_m2)
        return mean, m2

    return unit_moments


def build_forward(element: Element, value, pullback):
    """Units start to stop, from statistics to output."""
    unit_moments, keep, apply_row = moments_of_units(element), publish(element), _apply_row(element, value)
    channel_affine = affine(element)

    def forward(
        x, y, mean, rstd, variance, weight, bias, scale, shift, geometry, eps, activation_parameter, start, stop
    ):
        for unit in range(start, stop):
            centre, m2 = unit_moments(x, 0, geometry[INPUT_SAMPLE], geometry[INPUT_STEP], geometry, unit)
            centre, inverse = keep(mean, rstd, variance, geometry, eps, unit, centre, m2)
            for row in range(rows_per_unit(geometry)):
                n, c = locate(geometry, unit, row)
                gain, offset = channel_affine(weight, bias, scale, shift, geometry, n, c)
                apply_row(
                    x, n * geometry[INPUT_SAMPLE] + c * geometry[INPUT_STEP],
                    y, n * geometry[OUTPUT_SAMPLE] + c * geometry[OUTPUT_STEP],
                    geometry[SPATIAL], centre, inverse, gain, offset, activation_parameter,
                )  # fmt: skip

    return forward


def build_moments(element: Element, value, pullback):
    """The statistics (mean, M2) of pieces start to stop."""
    piece_moments = moments(element)

    def moments_of_pieces(x, partials, geometry, start, stop):
        for task in range(start, stop):
            unit, row, first, length = locate_piece(geometry, task)
            n, c = locate(geometry, unit, row)
            i = n * geometry[INPUT_SAMPLE] + c * geometry[INPUT_STEP] + first
            partials[2 * task], partials[2 * task + 1] = piece_moments(x, i, length, geometry[RMS])

    return moments_of_pieces


def build_statistics(element: Element, value, pullback):
    """The statistics of units start to stop from their pieces' statistics, merged in order."""
    keep = publish(element)

    def statistics(partials, stats, mean, rstd, variance, geometry, eps, start, stop):
        tasks = rows_per_unit(geometry) * geometry[PIECES]
        for unit in range(start, stop):
            count, centre, m2 = 0, 0.0, 0.0
            for task in range(unit * tasks, (unit + 1) * tasks):
                _, _, _, length = locate_piece(geometry, task)
                count, centre, m2 = merge(count, centre, m2, length, partials[2 * task], partials[2 * task + 1])
            stats[2 * unit], stats[2 * unit + 1] = keep(mean, rstd, variance, geometry, eps, unit, centre, m2)

    return statistics


def build_apply(element: Element, value, pullback):
    """The output of pieces start to stop from finished statistics."""
    apply_row, channel_affine = _apply_row(element, value), affine(element)

    def apply(x, y, stats, weight, bias, scale, shift, geometry, activation_parameter, start, stop):
        for task in range(start, stop):
            unit, row, first, length = locate_piece(geometry, task)
            n, c = locate(geometry, unit, row)
            gain, offset = channel_affine(weight, bias, scale, shift, geometry, n, c)
            apply_row(
                x, n * geometry[INPUT_SAMPLE] + c * geometry[INPUT_STEP] + first,
                y, n * geometry[OUTPUT_SAMPLE] + c * geometry[OUTPUT_STEP] + first,
                length, stats[2 * unit], stats[2 * unit + 1], gain, offset, activation_parameter,
            )  # fmt: skip

    return apply


def build_backward(element: Element, value, pullback, keeps=False, adds_behind=False, adds_gradient=False):
    """Units start to stop: p and q of each row, then the input's gradient.

    Where dz is kept, ``kept`` has room for a unit per worker. With ``adds_behind`` it is the gradient of z + post_add,
    and is stored too; with ``adds_gradient`` dx gets ``grad_total``.
    """
    make, keep_row = dz_of(element, pullback, keeps), _keep_row(element, pullback, adds_behind)
    row_sums, gradient_row = _row_sums(element, make), _gradient_row(element, make, adds_gradient)
    channel_affine, saved = affine(element), saved_statistics(element)

    def backward(
        grad, x, dx, given_mean, given_mean_dtype, given_rstd, given_rstd_dtype, weight, bias, scale, shift, sums,
        kept, post_add, grad_total, grad_post_add, geometry, activation_parameter, worker, start, stop,
    ):  # fmt: skip
        channels, length = geometry[GROUPS] * geometry[GROUP_CHANNELS], geometry[SPATIAL]
        slot = worker * rows_per_unit(geometry) * length
        for unit in range(start, stop):
            centre, inverse = saved(given_mean, given_mean_dtype, given_rstd, given_rstd_dtype, geometry, unit)
            total_p, total_q = 0.0, 0.0
            for row in range(rows_per_unit(geometry)):
                n, c = locate(geometry, unit, row)
                gain, offset = channel_affine(weight, bias, scale, shift, geometry, n, c)
                g = n * geometry[GRAD_SAMPLE] + c * geometry[GRAD_STEP]
                i = n * geometry[INPUT_SAMPLE] + c * geometry[INPUT_STEP]
                r = slot + row * length
                if keeps:
                    keep_row(
                        grad, g, x, i, kept, r, post_add, n * geometry[POST_SAMPLE] + c * geometry[POST_STEP],
                        grad_post_add, n * geometry[OUTPUT_SAMPLE] + c * geometry[OUTPUT_STEP], length, centre,
                        inverse, gain, offset, activation_parameter,
                    )  # fmt: skip
                p, q = row_sums(
                    grad, g, x, i, kept, r, length, centre, inverse, gain, offset, activation_parameter
                )  # fmt: skip
                s = 2 * (n * channels + c)
                sums[s], sums[s + 1] = p, q
                total_p += gain * p
                total_q += gain * q
            if not geometry[WANT_INPUT_GRAD]:
                continue
            count = reduced_count(geometry)
            mean_p = 0.0 if geometry[RMS] else total_p / count
            for row in range(rows_per_unit(geometry)):
                n, c = locate(geometry, unit, row)
                gain, offset = channel_affine(weight, bias, scale, shift, geometry, n, c)
                gradient_row(
                    grad, n * geometry[GRAD_SAMPLE] + c * geometry[GRAD_STEP],
                    x, n * geometry[INPUT_SAMPLE] + c * geometry[INPUT_STEP],
                    dx, n * geometry[OUTPUT_SAMPLE] + c * geometry[OUTPUT_STEP],
                    kept, slot + row * length,
                    length, centre, inverse, gain, offset, activation_parameter, mean_p, total_q / count,
                    geometry[TRAINING], grad_total,
                )  # fmt: skip

    return backward


def build_reduce(element: Element, value, pullback, adds_behind=False):
    """p and q of pieces start to stop. With ``adds_behind`` dz is the gradient of z + post_add and is stored too, and
    ``kept`` has room for a piece per worker."""
    make, keep_row = dz_of(element, pullback, kept=adds_behind), _keep_row(element, pullback, True)
    row_sums, channel_affine, saved = _row_sums(element, make), affine(element), saved_statistics(element)

    def reduce(
        grad, x, given_mean, given_mean_dtype, given_rstd, given_rstd_dtype, weight, bias, scale, shift, partials,
        kept, post_add, grad_post_add, geometry, activation_parameter, worker, start, stop,
    ):  # fmt: skip
        slot = worker * geometry[PIECE] if adds_behind else 0
        for task in range(start, stop):
            unit, row, first, length = locate_piece(geometry, task)
            n, c = locate(geometry, unit, row)
            centre, inverse = saved(given_mean, given_mean_dtype, given_rstd, given_rstd_dtype, geometry, unit)
            gain, offset = channel_affine(weight, bias, scale, shift, geometry, n, c)
            g = n * geometry[GRAD_SAMPLE] + c * geometry[GRAD_STEP] + first
            i = n * geometry[INPUT_SAMPLE] + c * geometry[INPUT_STEP] + first
            if adds_behind:
                keep_row(
                    grad, g, x, i, kept, slot, post_add, n * geometry[POST_SAMPLE] + c * geometry[POST_STEP] + first,
                    grad_post_add, n * geometry[OUTPUT_SAMPLE] + c * geometry[OUTPUT_STEP] + first, length, centre,
                    inverse, gain, offset, activation_parameter,
                )  # fmt: skip
            partials[2 * task], partials[2 * task + 1] = row_sums(
                grad, g, x, i, kept, slot, length, centre, inverse, gain, offset, activation_parameter
            )

    return reduce


def build_combine(element: Element, value, pullback):
    """p and q of each row, and P / K and Q / K of units start to stop, from the pieces in order."""
    channel_affine = affine(element)

    def combine(partials, weight, bias, scale, shift, sums, totals, geometry, start, stop):
        channels, pieces = geometry[GROUPS] * geometry[GROUP_CHANNELS], geometry[PIECES]
        rows, count = rows_per_unit(geometry), reduced_count(geometry)
        for unit in range(start, stop):
            total_p, total_q = 0.0, 0.0
            for row in range(rows):
                n, c = locate(geometry, unit, row)
                p, q = 0.0, 0.0
                for task in range((unit * rows + row) * pieces, (unit * rows + row + 1) * pieces):
                    p += partials[2 * task]
                    q += partials[2 * task + 1]
                i = 2 * (n * channels + c)
                sums[i], sums[i + 1] = p, q
                gain, _ = channel_affine(weight, bias, scale, shift, geometry, n, c)
                total_p += gain * p
                total_q += gain * q
            totals[2 * unit], totals[2 * unit + 1] = 0.0 if geometry[RMS] else total_p / count, total_q / count

    return combine


def build_input_gradient(element: Element, value, pullback, adds_behind=False, adds_gradient=False):
    """The input's gradient of pieces start to stop. With ``adds_behind``, for a kernel without an activation, dz is
    there as the gradient of z + post_add; with ``adds_gradient`` dx gets ``grad_total``."""
    gradient_row = _gradient_row(element, dz_of(element, pullback, kept=False), adds_gradient)
    channel_affine, saved = affine(element), saved_statistics(element)
    sample, step = (OUTPUT_SAMPLE, OUTPUT_STEP) if adds_behind else (GRAD_SAMPLE, GRAD_STEP)

    def input_gradient(
        grad, x, dx, given_mean, given_mean_dtype, given_rstd, given_rstd_dtype, weight, bias, scale, shift, totals,
        kept, grad_total, grad_post_add, geometry, activation_parameter, start, stop,
    ):  # fmt: skip
        dz = grad_post_add if adds_behind else grad
        for task in range(start, stop):
            unit, row, first, length = locate_piece(geometry, task)
            n, c = locate(geometry, unit, row)
            centre, inverse = saved(given_mean, given_mean_dtype, given_rstd, given_rstd_dtype, geometry, unit)
            gain, offset = channel_affine(weight, bias, scale, shift, geometry, n, c)
            gradient_row(
                dz, n * geometry[sample] + c * geometry[step] + first,
                x, n * geometry[INPUT_SAMPLE] + c * geometry[INPUT_STEP] + first,
                dx, n * geometry[OUTPUT_SAMPLE] + c * geometry[OUTPUT_STEP] + first,
                kept, 0, length, centre, inverse, gain, offset, activation_parameter,
                totals[2 * unit], totals[2 * unit + 1], geometry[TRAINING], grad_total,
            )  # fmt: skip

    return input_gradient


BUILDERS = {
    "forward": build_forward,
    "moments": build_moments,
    "statistics": build_statistics,
    "apply": build_apply,
    **backwards(build_backward),
    "reduce": build_reduce,
    "reduce_behind": partial(build_reduce, adds_behind=True),
    "combine": build_combine,
    "input_gradient": build_input_gradient,
    "input_gradient_behind": partial(build_input_gradient, adds_behind=True),
    "input_gradient_total": partial(build_input_gradient, adds_gradient=True),
    "input_gradient_behind_total": partial(build_input_gradient, adds_behind=True, adds_gradient=True),
}
