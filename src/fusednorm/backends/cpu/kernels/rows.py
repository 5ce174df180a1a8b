"""Kernels for one position per channel: a sample is a contiguous row of G groups of D channels, the affine per element.

layer_norm and rms_norm are this case, and any norm of a 2-D input, without modulation. Loops run along weight and bias.
Operands of the compute dtype are read where they lie. Others are read from ``wide_weight`` and ``wide_bias``, where
``widen`` has put the converted numbers, or the plan ones and zeros for an absent operand. The forward takes each row
from its statistics to its output. The backward takes each row from its sums to its gradient, and sums the parameters'
gradients over fixed segments of rows. Few rows would make few segments: first the sums of all pieces of them are taken,
then, a block of channels at a time, all gradients.

With sums around the norm the forward first makes a row of s = x + gate pre_add, in ``total``, and then normalizes that
row while it lies in cache; it adds post_add to z. The backward, whose x is s, then keeps dz of each row and stores it
too, and adds the gradient of s to dx.
"""

from __future__ import annotations

from functools import cache, partial

import numpy as np

from fusednorm.backends.cpu.geometry import (
    BIAS_DTYPE,
    COLUMN_ROWS,
    COLUMNS,
    GATE_PER_ELEMENT,
    GATE_ROWS,
    GATE_STEP,
    GRAD_SAMPLE,
    GROUP_CHANNELS,
    GROUPS,
    INPUT_SAMPLE,
    OUTPUT_SAMPLE,
    PIECE,
    PIECES,
    POST_SAMPLE,
    PRE_SAMPLE,
    RMS,
    ROWS_FLUSHED,
    SAMPLES,
    TOTAL_SAMPLE,
    TOTAL_WORKER,
    WANT_INPUT_GRAD,
    WEIGHT_DTYPE,
)
from fusednorm.backends.cpu.kernels.affine import dz_of, normalized, reduced_count
from fusednorm.backends.cpu.kernels.device import exact, reassociated, span
from fusednorm.backends.cpu.kernels.elements import Element
from fusednorm.backends.cpu.kernels.moments import CHUNK, moments
from fusednorm.backends.cpu.kernels.operands import narrow, rounded_number, widened, widening
from fusednorm.backends.cpu.kernels.sums import add_row


@exact
def scaled(gain, inverse):
    """A rstd, with the bits of the other kernels: these round a float64 product, which is exact for two float32s."""
    return gain * inverse


def build_forward(element: Element, value, pullback, adds_before=False, adds_behind=False):
    """Rows start to stop; with ``adds_before`` of s, which ``total`` gets, and with ``adds_behind`` of z + post_add."""
    read, store, T, load_post = element.read, element.store, element.compute, element.load
    load = element.load_total if adds_before else element.load
    row_moments, as_read = moments(element._replace(load=load)), widened(element)
    add = add_row(element)

    @exact
    def apply_row(x, i, y, j, post, p, n, mean, rstd, weight, bias, first, activation_parameter):
        """y = value(weight xhat + bias + post)."""
        centre, inverse, alpha = T(mean), T(rstd), T(activation_parameter)
        for part in range(2):
            start, stop = span(part, n)
            for k in range(start, stop):
                z = normalized(load(x, i + k) - centre, scaled(read(weight, first + k), inverse), read(bias, first + k))
                if adds_behind:
                    z += load_post(post, p + k)
                store(y, j + k, value(z, alpha))

    def forward(
        x, y, mean, rstd, weight, bias, wide_weight, wide_bias, total, pre_add, pre_gate, post_add, geometry, eps,
        activation_parameter, worker, start, stop,
    ):  # fmt: skip
        gains = as_read(weight, geometry[WEIGHT_DTYPE], wide_weight)
        offsets = as_read(bias, geometry[BIAS_DTYPE], wide_bias)
        groups, length = geometry[GROUPS], geometry[GROUP_CHANNELS]
        for n in range(start, stop):
            for g in range(groups):
                i = n * geometry[INPUT_SAMPLE] + g * length
                p = n * geometry[POST_SAMPLE] + g * length
                source = x
                if adds_before:
                    t = n * geometry[TOTAL_SAMPLE] + worker * geometry[TOTAL_WORKER] + g * length
                    q = n // max(1, geometry[GATE_ROWS]) * geometry[GATE_STEP]
                    q += g * length if geometry[GATE_PER_ELEMENT] else 0
                    add(
                        x, i, pre_add, n * geometry[PRE_SAMPLE] + g * length, pre_gate, q, geometry[GATE_ROWS] > 0,
                        geometry[GATE_PER_ELEMENT], total, t, length,
                    )  # fmt: skip
                    source, i = total, t
                centre, m2 = row_moments(source, i, length, geometry[RMS])
                inverse = 1.0 / np.sqrt(m2 / reduced_count(geometry) + eps)
                rstd[n * groups + g] = T(inverse)
                if not geometry[RMS]:
                    mean[n * groups + g] = T(centre)
                j = n * geometry[OUTPUT_SAMPLE] + g * length
                apply_row(
                    source, i, y, j, post_add, p, length, centre, inverse, gains, offsets, g * length,
                    activation_parameter,
                )  # fmt: skip

    return forward


@cache
def _keep_group(element: Element, pullback, adds_behind: bool):
    load, read, keep, store = element.load, element.read, element.keep, element.store

    @exact
    def keep_group(grad, g, x, i, kept, r, post, p, grad_post, o, n, centre, inverse, weight, bias, first, alpha):
        """dz of one group of one row, put into ``kept`` from r on: the sums of its last elements are scalar code, in
        which no exponential should be. With ``adds_behind`` z is z + post, and dz its gradient, which is stored too."""
        for part in range(2):
            start, stop = span(part, n)
            for k in range(start, stop):
                gain = read(weight, first + k)
                z = normalized(load(x, i + k) - centre, scaled(gain, inverse), read(bias, first + k))
                if adds_behind:
                    z += load(post, p + k)
                dz = pullback(load(grad, g + k), z, alpha)
                keep(kept, r + k, dz)
                if adds_behind:
                    store(grad_post, o + k, dz)

    return keep_group


@cache
def _group_sums(element: Element, make, accumulate: bool):
    """P and Q of one group of one row; with ``accumulate`` the parameters' gradients are summed too."""
    load, read, T = element.load, element.read, element.compute
    add_first, add_second = element.add_first, element.add_second

    @reassociated
    def group_sums(grad, g, x, i, kept, r, n, centre, inverse, weight, bias, first, alpha, sums, ps, qs):
        total_p, total_q = T(0), T(0)
        for k in range(n):
            deviation, gain = load(x, i + k) - centre, read(weight, first + k)
            xhat, z = deviation * inverse, normalized(deviation, scaled(gain, inverse), read(bias, first + k))
            dz = make(grad, g + k, kept, r + k, z, alpha)
            if accumulate:
                add_first(sums, ps + first + k, dz)
                add_second(sums, qs + first + k, dz * xhat)
            total_p += gain * dz
            total_q += gain * dz * xhat
        return np.float64(total_p), np.float64(total_q)

    return group_sums


@cache
def _gradient_group(element: Element, make, accumulate: bool, adds_gradient: bool = False):
    load, read, store, T = element.load, element.read, element.store, element.compute
    add_first, add_second = element.add_first, element.add_second

    @exact
    def gradient_group(
        grad, g, x, i, dx, o, kept, r, n, centre, inverse, weight, bias, first, alpha, mean_p, mean_q, sums, ps, qs,
        grad_total,
    ):  # fmt: skip
        """dx = rstd (weight dz - (P + xhat Q) / K); with ``accumulate`` the parameters' gradients are summed too, and
        with ``adds_gradient`` dx gets the gradient of x itself, which lies as x does."""
        p, q = T(mean_p), T(mean_q)
        for k in range(n):
            deviation, gain = load(x, i + k) - centre, read(weight, first + k)
            xhat, z = deviation * inverse, normalized(deviation, scaled(gain, inverse), read(bias, first + k))
            dz = make(grad, g + k, kept, r + k, z, alpha)
            if accumulate:
                add_first(sums, ps + first + k, dz)
                add_second(sums, qs + first + k, dz * xhat)
            gradient = inverse * (gain * dz - (p + xhat * q))
            if adds_gradient:
                gradient += load(grad_total, i + k)
            store(dx, o + k, gradient)

    return gradient_group


def build_backward(
    element: Element, value, pullback, accumulate=True, keeps=False, adds_behind=False, adds_gradient=False
):
    """The input's gradient, and with ``accumulate`` the parameters' per segment, of segments of PIECE rows each.

    Where dz is kept, ``kept`` has room for a group per worker. With ``adds_behind`` it is the gradient of z + post_add,
    and is stored too; with ``adds_gradient`` dx gets ``grad_total``.
    """
    T, rounded, as_read = element.compute, rounded_number(element), widened(element)
    make, keep_group = dz_of(element, pullback, keeps), _keep_group(element, pullback, adds_behind)
    group_sums = _group_sums(element, make, accumulate)
    gradient_group = _gradient_group(element, make, False, adds_gradient)

    def backward(
        grad, x, dx, given_mean, given_mean_dtype, given_rstd, given_rstd_dtype, weight, bias, wide_weight, wide_bias,
        running, partials, kept, post_add, grad_total, grad_post_add, geometry, activation_parameter, worker, start,
        stop,
    ):  # fmt: skip
        gains = as_read(weight, geometry[WEIGHT_DTYPE], wide_weight)
        offsets = as_read(bias, geometry[BIAS_DTYPE], wide_bias)
        groups, length, count = geometry[GROUPS], geometry[GROUP_CHANNELS], reduced_count(geometry)
        channels, alpha, slot = groups * length, T(activation_parameter), worker * length if keeps else 0
        flushed = geometry[PIECE] > ROWS_FLUSHED
        for segment in range(start, stop):
            # ``running`` sums the segment's last rows in the compute dtype; ``partials`` all rows before them, if any.
            ps, qs = 2 * segment * channels, (2 * segment + 1) * channels
            last = min((segment + 1) * geometry[PIECE], geometry[SAMPLES])
            if accumulate:
                for c in range(2 * channels):
                    running[ps + c] = T(0)
                for c in range(2 * channels if flushed else 0):
                    partials[ps + c] = 0.0
            for n in range(segment * geometry[PIECE], last):
                for group in range(groups):
                    unit, first = n * groups + group, group * length
                    centre = T(0) if geometry[RMS] else T(rounded(given_mean, unit, given_mean_dtype))
                    inverse = T(rounded(given_rstd, unit, given_rstd_dtype))
                    i, g = n * geometry[INPUT_SAMPLE] + first, n * geometry[GRAD_SAMPLE] + first
                    total_p, total_q = 0.0, 0.0
                    if keeps:
                        keep_group(
                            grad, g, x, i, kept, slot, post_add, n * geometry[POST_SAMPLE] + first, grad_post_add,
                            n * geometry[OUTPUT_SAMPLE] + first, length, centre, inverse, gains, offsets, first, alpha,
                        )  # fmt: skip
                    for k in range(0, length, CHUNK):
                        chunk_p, chunk_q = group_sums(
                            grad, g + k, x, i + k, kept, slot + k, min(CHUNK, length - k), centre, inverse, gains,
                            offsets, first + k, alpha, running, ps, qs,
                        )  # fmt: skip
                        total_p += chunk_p
                        total_q += chunk_q
                    mean_p, mean_q = 0.0 if geometry[RMS] else total_p / count, total_q / count
                    # The last chunks first: they are still in cache.
                    chunks = (length + CHUNK - 1) // CHUNK if geometry[WANT_INPUT_GRAD] else 0
                    for chunk in range(chunks):
                        k = (chunks - 1 - chunk) * CHUNK
                        gradient_group(
                            grad, g + k, x, i + k, dx, n * geometry[OUTPUT_SAMPLE] + first + k, kept, slot + k,
                            min(CHUNK, length - k), centre, inverse, gains, offsets, first + k, alpha, mean_p, mean_q,
                            running, ps, qs, grad_total,
                        )  # fmt: skip
                if accumulate and flushed and ((n + 1) % ROWS_FLUSHED == 0 or n + 1 == last):
                    for c in range(2 * channels):
                        partials[ps + c] += np.float64(running[ps + c])
                        running[ps + c] = T(0)

    return backward


def build_reduce(element: Element, value, pullback):
    """P and Q of pieces start to stop, each of one group of one row."""
    T, rounded, as_read = element.compute, rounded_number(element), widened(element)
    group_sums = _group_sums(element, dz_of(element, pullback, kept=False), False)

    def reduce(
        grad, x, given_mean, given_mean_dtype, given_rstd, given_rstd_dtype, weight, bias, wide_weight, wide_bias,
        running, partials, geometry, activation_parameter, start, stop,
    ):  # fmt: skip
        gains = as_read(weight, geometry[WEIGHT_DTYPE], wide_weight)
        offsets = as_read(bias, geometry[BIAS_DTYPE], wide_bias)
        groups, length, pieces = geometry[GROUPS], geometry[GROUP_CHANNELS], geometry[PIECES]
        for task in range(start, stop):
            unit, k = task // pieces, task % pieces * geometry[PIECE]
            n, first = unit // groups, unit % groups * length + k
            centre = T(0) if geometry[RMS] else T(rounded(given_mean, unit, given_mean_dtype))
            inverse = T(rounded(given_rstd, unit, given_rstd_dtype))
            partials[2 * task], partials[2 * task + 1] = group_sums(
                grad, n * geometry[GRAD_SAMPLE] + first, x, n * geometry[INPUT_SAMPLE] + first, running, 0,
                min(geometry[PIECE], length - k), centre, inverse, gains, offsets, first, T(activation_parameter),
                running, 0, 0,
            )  # fmt: skip

    return reduce


def build_columns(element: Element, value, pullback, accumulate=True):
    """Blocks start to stop of COLUMNS channels in all rows: the input's gradient, and with ``accumulate`` the
    parameters'."""
    T, rounded, as_read = element.compute, rounded_number(element), widened(element)
    gradient_group = _gradient_group(element, dz_of(element, pullback, kept=False), accumulate)

    @exact
    def mean_of_pieces(partials, unit, pieces, count):
        total_p, total_q = 0.0, 0.0
        for task in range(unit * pieces, (unit + 1) * pieces):
            total_p += partials[2 * task]
            total_q += partials[2 * task + 1]
        return total_p / count, total_q / count

    @exact
    def flush(running, totals, first, last):
        for c in range(first, last):
            totals[c] += np.float64(running[c])
            running[c] = T(0)

    def columns(
        grad, x, dx, given_mean, given_mean_dtype, given_rstd, given_rstd_dtype, weight, bias, wide_weight, wide_bias,
        running, partials, totals, grad_weight, grad_bias, geometry, activation_parameter, start, stop,
    ):  # fmt: skip
        gains = as_read(weight, geometry[WEIGHT_DTYPE], wide_weight)
        offsets = as_read(bias, geometry[BIAS_DTYPE], wide_bias)
        groups, length, count = geometry[GROUPS], geometry[GROUP_CHANNELS], reduced_count(geometry)
        channels, alpha = groups * length, T(activation_parameter)
        for block in range(start, stop):
            first, last = block * COLUMNS, min((block + 1) * COLUMNS, channels)
            if accumulate:
                for c in range(first, last):
                    running[c] = running[channels + c] = T(0)
                    totals[c] = totals[channels + c] = 0.0
            for n in range(geometry[SAMPLES]):
                c = first
                while c < last:
                    unit = n * groups + c // length
                    width = min(last, (c // length + 1) * length) - c
                    centre = T(0) if geometry[RMS] else T(rounded(given_mean, unit, given_mean_dtype))
                    inverse = T(rounded(given_rstd, unit, given_rstd_dtype))
                    mean_p, mean_q = mean_of_pieces(partials, unit, geometry[PIECES], count)
                    gradient_group(
                        grad, n * geometry[GRAD_SAMPLE] + c, x, n * geometry[INPUT_SAMPLE] + c,
                        dx, n * geometry[OUTPUT_SAMPLE] + c, running, 0, width, centre, inverse, gains, offsets, c,
                        alpha, 0.0 if geometry[RMS] else mean_p, mean_q, running, 0, channels, dx,
                    )  # fmt: skip
                    c += width
                if accumulate and ((n + 1) % COLUMN_ROWS == 0 or n + 1 == geometry[SAMPLES]):
                    flush(running, totals, first, last)
                    flush(running, totals, channels + first, channels + last)
            if accumulate:
                narrow(totals, 0, grad_bias, geometry[BIAS_DTYPE], first, last)
                narrow(totals, channels, grad_weight, geometry[WEIGHT_DTYPE], first, last)

    return columns


def build_widen(element: Element, value, pullback):
    """Weight and bias of channels start to stop, converted to the compute dtype where they have another."""
    widen_operand = widening(element)

    def widen(weight, bias, wide_weight, wide_bias, geometry, start, stop):
        widen_operand(weight, geometry[WEIGHT_DTYPE], wide_weight, start, stop)
        widen_operand(bias, geometry[BIAS_DTYPE], wide_bias, start, stop)

    return widen


@cache
def _add_segment(element: Element):
    read = element.read

    @exact
    def add_segment(partials, first, running, other, start, stop, flushed):
        if flushed:
            for c in range(start, stop):
                partials[first + c] += partials[other + c]
        else:
            for c in range(start, stop):
                partials[first + c] += np.float64(read(running, other + c))

    return add_segment


def build_parameter_gradients(element: Element, value, pullback):
    """The gradients of weight and bias for channels start to stop, from the segments in order.

    Segments of few rows have left their sums in ``running``.
    """
    add_segment = _add_segment(element)

    def parameter_gradients(partials, running, grad_weight, grad_bias, geometry, start, stop):
        channels, flushed = geometry[GROUPS] * geometry[GROUP_CHANNELS], geometry[PIECE] > ROWS_FLUSHED
        for place in range(2):  # one loop for both: the code takes half as long to compile
            gradient, dtype = grad_bias, geometry[BIAS_DTYPE]
            if place == 1:
                gradient, dtype = grad_weight, geometry[WEIGHT_DTYPE]
            first = place * channels
            for c in range(start, start if flushed else stop):
                partials[first + c] = 0.0
            for segment in range(1 if flushed else 0, geometry[PIECES]):
                add_segment(partials, first, running, 2 * segment * channels + first, start, stop, flushed)
            narrow(partials, first, gradient, dtype, start, stop)

    return parameter_gradients


BUILDERS = {
    "forward": build_forward,
    "forward_before": partial(build_forward, adds_before=True),
    "forward_behind": partial(build_forward, adds_behind=True),
    "forward_before_behind": partial(build_forward, adds_before=True, adds_behind=True),
    "backward": build_backward,
    "backward_data": partial(build_backward, accumulate=False),
    "backward_kept": partial(build_backward, keeps=True),
    "backward_data_kept": partial(build_backward, accumulate=False, keeps=True),
    "backward_total": partial(build_backward, adds_gradient=True),
    "backward_data_total": partial(build_backward, accumulate=False, adds_gradient=True),
    "backward_kept_total": partial(build_backward, keeps=True, adds_gradient=True),
    "backward_data_kept_total": partial(build_backward, accumulate=False, keeps=True, adds_gradient=True),
    "backward_behind": partial(build_backward, keeps=True, adds_behind=True),
    "backward_data_behind": partial(build_backward, accumulate=False, keeps=True, adds_behind=True),
    "backward_behind_total": partial(build_backward, keeps=True, adds_behind=True, adds_gradient=True),
    "backward_data_behind_total": partial(
        build_backward, accumulate=False, keeps=True, adds_behind=True, adds_gradient=True
    ),
    "reduce": build_reduce,
    "columns": build_columns,
    "columns_data": partial(build_columns, accumulate=False),
    "widen": build_widen,
    "parameter_gradients": build_parameter_gradients,
}
