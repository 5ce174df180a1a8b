"""The backward of the channels_last order, with the slabs and coefficients of slabs.py."""

from __future__ import annotations

from functools import cache, partial

import numpy as np

from fusednorm.backends.cpu.geometry import (
    BIAS_DTYPE,
    COEFFICIENTS,
    GRAD_SAMPLE,
    GRAD_STEP,
    GROUP_CHANNELS,
    GROUPS,
    INPUT_SAMPLE,
    INPUT_STEP,
    KEPT_WORKER,
    OUTPUT_SAMPLE,
    OUTPUT_STEP,
    PER_BATCH,
    PIECES,
    REPEAT,
    RMS,
    SAMPLES,
    SCALE_DTYPE,
    SHARED,
    SLOTS,
    SPATIAL,
    TRAINING,
    WEIGHT_DTYPE,
)
from fusednorm.backends.cpu.kernels.affine import affine, normalized, reduced_count
from fusednorm.backends.cpu.kernels.device import exact, inlined, reassociated, span
from fusednorm.backends.cpu.kernels.elements import Element, advanced
from fusednorm.backends.cpu.kernels.elements import element as accesses
from fusednorm.backends.cpu.kernels.mathematics import cheap
from fusednorm.backends.cpu.kernels.operands import put_number, rounded_number, wanted
from fusednorm.backends.cpu.kernels.slabs import (
    FLUSH,
    TILE,
    TOGETHER,
    add_folded,
    channel_count,
    coefficients_from,
    locate,
    next_group,
    row_width,
    rows_of,
    takes_four,
    three_reader,
)


@exact
def kept_from(kept, geometry, worker, first):
    """The kept dz, as :func:`coefficients_from` has the coefficients."""
    if geometry[SLOTS] == 0:
        return kept
    return advanced(kept, worker * geometry[KEPT_WORKER] - first * geometry[SPATIAL] * channel_count(geometry))


@cache
def _slab_sums(element: Element, pullback, keeps: bool):
    """p and q per channel of one slab, written to the slab's place in the partials; ``keeps``: dz goes to ``kept``."""
    load, read, keep, T = element.load, element.read, element.keep, element.compute
    add_first, add_second, scratch = element.add_first, element.add_second, element.scratch
    read_three, four, wide_scratch = three_reader(element), cheap(pullback), accesses("float64").scratch

    @inlined
    def terms(grad, g, x, i, centre, a, b, rstd, alpha):
        """dz and dz xhat of an element."""
        deviation = load(x, i) - centre
        dz = pullback(load(grad, g), normalized(deviation, a, b), alpha)
        return dz, dz * (deviation * rstd)

    @reassociated
    def add_row(grad, g, x, i, kept, r, coefficients, k, plane, n, alpha, first, second):
        for c in range(n):
            centre, a, b = read_three(coefficients, k + c, plane)
            rstd = read(coefficients, k + 3 * plane + c)
            p, q = terms(grad, g + c, x, i + c, centre, a, b, rstd, alpha)
            if keeps:
                keep(kept, r + c, p)
            add_first(first, c, p)
            add_second(second, c, q)

    @reassociated
    def add_four(grad, g, grad_step, x, i, step, coefficients, k, plane, n, alpha, first, second):
        """The same of four rows, which quarters the traffic on the sums and the coefficients."""
        g1, g2, g3 = g + grad_step, g + 2 * grad_step, g + 3 * grad_step
        i1, i2, i3 = i + step, i + 2 * step, i + 3 * step
        for c in range(n):
            centre, a, b = read_three(coefficients, k + c, plane)
            rstd = read(coefficients, k + 3 * plane + c)
            p0, q0 = terms(grad, g + c, x, i + c, centre, a, b, rstd, alpha)
            p1, q1 = terms(grad, g1 + c, x, i1 + c, centre, a, b, rstd, alpha)
            p2, q2 = terms(grad, g2 + c, x, i2 + c, centre, a, b, rstd, alpha)
            p3, q3 = terms(grad, g3 + c, x, i3 + c, centre, a, b, rstd, alpha)
            add_first(first, c, (p0 + p1) + (p2 + p3))
            add_second(second, c, (q0 + q1) + (q2 + q3))

    @exact
    def slab_sums(grad, x, kept, coefficients, partials, geometry, activation_parameter, task):
        n, position, positions = locate(geometry, task)
        channels, plane, alpha = channel_count(geometry), row_width(geometry), T(activation_parameter)
        i = n * geometry[INPUT_SAMPLE] + position * geometry[INPUT_STEP]
        g = n * geometry[GRAD_SAMPLE] + position * geometry[GRAD_STEP]
        at = (n * geometry[SPATIAL] + position) * channels
        first, second = scratch(), scratch()
        wide = wide_scratch()
        together, takes = geometry[REPEAT], four and takes_four(geometry)
        for tile in range(0, channels, TILE):
            width = min(TILE, channels - tile)
            ps, qs = 2 * task * channels + tile, (2 * task + 1) * channels + tile
            for c in range(width):
                partials[ps + c] = partials[qs + c] = 0.0
            rows = rows_of(geometry, positions)
            for start in range(0, rows, FLUSH):
                for c in range(width * together):
                    first[c] = second[c] = T(0)
                last = min(start + FLUSH, rows)
                fours = (min(last, positions // together) - start) // 4 if takes else 0
                for row in range(start, start + 4 * fours, 4):
                    r = row * together
                    add_four(
                        grad, g + r * geometry[GRAD_STEP] + tile, together * geometry[GRAD_STEP],
                        x, i + r * geometry[INPUT_STEP] + tile, together * geometry[INPUT_STEP],
                        coefficients, n * COEFFICIENTS * plane + tile, plane, width * together, alpha, first, second,
                    )  # fmt: skip
                for row in range(start + 4 * fours, last):
                    r = row * together
                    add_row(
                        grad, g + r * geometry[GRAD_STEP] + tile, x, i + r * geometry[INPUT_STEP] + tile,
                        kept, at + r * channels + tile, coefficients, n * COEFFICIENTS * plane + tile, plane,
                        width * min(together, positions - r), alpha, first, second,
                    )  # fmt: skip
                add_folded(first, wide, width, together, partials, ps)
                add_folded(second, wide, width, together, partials, qs)

    return slab_sums


@exact
def _sample_sums(partials, sums, geometry, n):
    """p of each channel of a sample, then q, from its slabs in order."""
    width, pieces = 2 * channel_count(geometry), geometry[PIECES]
    for c in range(width):
        sums[n * width + c] = partials[n * pieces * width + c]
    for task in range(n * pieces + 1, (n + 1) * pieces):
        for c in range(width):
            sums[n * width + c] += partials[task * width + c]


@cache
def _weighted_sums(element: Element):
    rounded = rounded_number(element)

    @reassociated
    def weighted_sums(sums, p, q, weight, dtype, c, n):
        """P and Q of n channels from c on, whose p and q begin at these places."""
        total_p, total_q = 0.0, 0.0
        if dtype == 0:
            for k in range(n):
                total_p += sums[p + k]
                total_q += sums[q + k]
        else:
            for k in range(n):
                gain = rounded(weight, c + k, dtype)
                total_p += gain * sums[p + k]
                total_q += gain * sums[q + k]
        return total_p, total_q

    return weighted_sums


@cache
def _unit_gradient(element: Element):
    channel_affine, weighted_sums, T = affine(element), _weighted_sums(element), element.compute
    rounded = rounded_number(element)

    @exact
    def unit_gradient(sums, stats, coefficients, weight, bias, scale, shift, geometry, n, g):
        """c2 and c3 of each channel of a group, from P and Q."""
        channels, size = channel_count(geometry), geometry[GROUP_CHANNELS]
        unit, c0 = n * geometry[GROUPS] + g, g * size
        p, q = 2 * n * channels, (2 * n + 1) * channels
        total_p, total_q = 0.0, 0.0
        if geometry[SCALE_DTYPE]:
            for c in range(c0, c0 + size):
                gain, _ = channel_affine(weight, bias, scale, shift, geometry, n, c)
                total_p += gain * sums[p + c]
                total_q += gain * sums[q + c]
        else:
            dtype = 0 if geometry[SHARED] else geometry[WEIGHT_DTYPE]
            total_p, total_q = weighted_sums(sums, p + c0, q + c0, weight, dtype, c0, size)
        if geometry[SHARED] and geometry[WEIGHT_DTYPE]:
            gain = rounded(weight, unit, geometry[WEIGHT_DTYPE])
            total_p, total_q = gain * total_p, gain * total_q
        rstd, count = stats[2 * unit + 1], reduced_count(geometry)
        c2, c3 = -rstd * total_q / count, -rstd * total_p / count
        if geometry[RMS]:
            c3 = 0.0
        width = row_width(geometry)
        base = (n * COEFFICIENTS + 4) * width
        # One group's coefficients are the same all along the row.
        length, parts = (width, 1) if size == channels else (size, geometry[REPEAT])
        for k in range(parts):
            for i in range(base + k * channels + c0, base + k * channels + c0 + length):
                coefficients[i], coefficients[i + width] = T(c2), T(c3)

    return unit_gradient


@cache
def gradient_slab(
    element: Element, pullback, sample: int = GRAD_SAMPLE, step: int = GRAD_STEP, adds_gradient: bool = False,
    kept: bool = False,
):  # fmt: skip
    """dx of one slab. ``sample`` and ``step`` are the fields of the geometry that say where the gradient's samples and
    positions lie; ``kept``: it is dz, of numbers of the compute dtype, position by position. With ``adds_gradient`` dx
    gets the gradient of x itself, which lies as x does."""
    load, store, T = element.load, element.store, element.compute
    given = element.recall if kept else load
    read_three, four = three_reader(element), cheap(pullback)

    @inlined
    def put(grad, g, x, i, dx, o, grad_total, centre, a, b, rstd, c2, c3, training, alpha):
        deviation = load(x, i) - centre
        gradient = a * pullback(given(grad, g), normalized(deviation, a, b), alpha)
        if training:  # otherwise 0 times an infinite xhat would be NaN
            gradient += c2 * (deviation * rstd) + c3
        if adds_gradient:
            gradient += load(grad_total, i)
        store(dx, o, gradient)

    @exact
    def put_row(grad, g, x, i, dx, o, grad_total, coefficients, k, plane, width, training, alpha):
        for part in range(2):
            start, stop = span(part, width)
            for c in range(start, stop):
                centre, a, b = read_three(coefficients, k + c, plane)
                rstd, c2, c3 = read_three(coefficients, k + 3 * plane + c, plane)
                put(grad, g + c, x, i + c, dx, o + c, grad_total, centre, a, b, rstd, c2, c3, training, alpha)

    @exact
    def put_four(
        grad, g, grad_step, x, i, step, dx, o, dx_step, grad_total, coefficients, k, plane, width, training, alpha
    ):  # fmt: skip
        g1, g2, g3 = g + grad_step, g + 2 * grad_step, g + 3 * grad_step
        i1, i2, i3 = i + step, i + 2 * step, i + 3 * step
        o1, o2, o3 = o + dx_step, o + 2 * dx_step, o + 3 * dx_step
        for part in range(2):
            start, stop = span(part, width)
            for c in range(start, stop):
                centre, a, b = read_three(coefficients, k + c, plane)
                rstd, c2, c3 = read_three(coefficients, k + 3 * plane + c, plane)
                put(grad, g + c, x, i + c, dx, o + c, grad_total, centre, a, b, rstd, c2, c3, training, alpha)
                put(grad, g1 + c, x, i1 + c, dx, o1 + c, grad_total, centre, a, b, rstd, c2, c3, training, alpha)
                put(grad, g2 + c, x, i2 + c, dx, o2 + c, grad_total, centre, a, b, rstd, c2, c3, training, alpha)
                put(grad, g3 + c, x, i3 + c, dx, o3 + c, grad_total, centre, a, b, rstd, c2, c3, training, alpha)

    @exact
    def gradient_of_slab(grad, x, dx, coefficients, grad_total, geometry, activation_parameter, task):
        n, first, positions = locate(geometry, task)
        channels, plane, alpha = channel_count(geometry), row_width(geometry), T(activation_parameter)
        k, together, training = n * COEFFICIENTS * plane, geometry[REPEAT], geometry[TRAINING]
        grad_sample, grad_step = geometry[sample], geometry[step]
        if kept:
            grad_sample, grad_step = geometry[SPATIAL] * channels, channels
        fours = positions // together // 4 if four and takes_four(geometry) else 0
        for block in range(fours):
            r = first + 4 * block * together
            i = n * geometry[INPUT_SAMPLE] + r * geometry[INPUT_STEP]
            g = n * grad_sample + r * grad_step
            o = n * geometry[OUTPUT_SAMPLE] + r * geometry[OUTPUT_STEP]
            steps = together * grad_step, together * geometry[INPUT_STEP], together * geometry[OUTPUT_STEP]
            if training:
                put_four(
                    grad, g, steps[0], x, i, steps[1], dx, o, steps[2], grad_total, coefficients, k, plane, plane, True,
                    alpha,
                )  # fmt: skip
            else:
                put_four(
                    grad, g, steps[0], x, i, steps[1], dx, o, steps[2], grad_total, coefficients, k, plane, plane,
                    False, alpha,
                )  # fmt: skip
        for row in range(4 * fours, rows_of(geometry, positions)):
            r = first + row * together
            i = n * geometry[INPUT_SAMPLE] + r * geometry[INPUT_STEP]
            g = n * grad_sample + r * grad_step
            o = n * geometry[OUTPUT_SAMPLE] + r * geometry[OUTPUT_STEP]
            width = min(plane, (first + positions - r) * channels)
            if training:
                put_row(grad, g, x, i, dx, o, grad_total, coefficients, k, plane, width, True, alpha)
            else:
                put_row(grad, g, x, i, dx, o, grad_total, coefficients, k, plane, width, False, alpha)

    return gradient_of_slab


def build_recall(element: Element, value, pullback):
    """The saved mean and rstd of units start to stop, put into ``stats`` in float64."""
    rounded = rounded_number(element)

    def recall(given_mean, given_mean_dtype, given_rstd, given_rstd_dtype, stats, geometry, start, stop):
        if geometry[RMS]:
            for unit in range(start, stop):
                stats[2 * unit] = 0.0
        else:
            for unit in range(start, stop):
                stats[2 * unit] = rounded(given_mean, unit, given_mean_dtype)
        for unit in range(start, stop):
            stats[2 * unit + 1] = rounded(given_rstd, unit, given_rstd_dtype)

    return recall


def build_reduce(element: Element, value, pullback, keeps=False):
    """p and q of slabs start to stop; ``keeps``: and dz."""
    slab_sums = _slab_sums(element, pullback, keeps)

    def reduce(grad, x, kept, coefficients, partials, geometry, activation_parameter, worker, start, stop):
        first = start // geometry[PIECES]
        coefficients = coefficients_from(coefficients, geometry, worker, first)
        kept = kept_from(kept, geometry, worker, first)
        for task in range(start, stop):
            slab_sums(grad, x, kept, coefficients, partials, geometry, activation_parameter, task)

    return reduce


def build_combine(element: Element, value, pullback):
    """p and q of samples start to stop from their slabs."""

    def combine(partials, sums, geometry, start, stop):
        for n in range(start, stop):
            _sample_sums(partials, sums, geometry, n)

    return combine


def build_gradient_coefficients(element: Element, value, pullback):
    """c2 and c3 of units start to stop."""
    unit_gradient, T = _unit_gradient(element), element.compute

    @exact
    def add_channels(sums, p, q, stats, u, coefficients, a, n):
        """Add a p and a q of n channels, where a is A rstd, to the P and Q of their units."""
        for k in range(n):
            gain = np.float64(coefficients[a + k])
            stats[u + 2 * k] += gain * sums[p + k]
            stats[u + 2 * k + 1] += gain * sums[q + k]

    @exact
    def put_channels(stats, u, coefficients, c2s, width, n, count, rms):
        for k in range(n):
            coefficients[c2s + k] = T(-stats[u + 2 * k + 1] / count)
            coefficients[c2s + width + k] = T(0) if rms else T(-stats[u + 2 * k] / count)

    @exact
    def copy_channels(coefficients, c2s, further, width, n):
        for c in range(c2s, c2s + n):
            coefficients[further + c] = coefficients[c]
            coefficients[further + width + c] = coefficients[width + c]

    @exact
    def of_single_channels(sums, stats, coefficients, geometry, start, stop):
        """Of units of one channel each in one sample, or of batch_norm; ``stats``, read no more, take P and Q."""
        channels, width = channel_count(geometry), row_width(geometry)
        n0 = 0 if geometry[PER_BATCH] else start // channels
        n1 = geometry[SAMPLES] if geometry[PER_BATCH] else n0 + 1
        c, u = start % channels, 2 * start
        for k in range(u, 2 * stop):
            stats[k] = 0.0
        for n in range(n0, n1):
            p, q, a = 2 * n * channels + c, (2 * n + 1) * channels + c, (n * COEFFICIENTS + 1) * width + c
            add_channels(sums, p, q, stats, u, coefficients, a, stop - start)
        for n in range(n0, n1):
            c2s = (n * COEFFICIENTS + 4) * width + c
            put_channels(stats, u, coefficients, c2s, width, stop - start, reduced_count(geometry), geometry[RMS])
            for k in range(1, geometry[REPEAT]):
                copy_channels(coefficients, c2s, k * channels, width, stop - start)

    def gradient_coefficients(sums, stats, coefficients, weight, bias, scale, shift, geometry, worker, start, stop):
        coefficients = coefficients_from(coefficients, geometry, worker, start // geometry[GROUPS])
        unit = start
        if geometry[GROUP_CHANNELS] == 1:
            while unit < stop:
                last = min(unit + TOGETHER, stop, (unit // geometry[GROUPS] + 1) * geometry[GROUPS])
                of_single_channels(sums, stats, coefficients, geometry, unit, last)
                unit = last
        n, g = unit // geometry[GROUPS], unit % geometry[GROUPS]
        for _ in range(unit, stop):
            unit_gradient(sums, stats, coefficients, weight, bias, scale, shift, geometry, n, g)
            n, g = next_group(geometry, n, g)

    return gradient_coefficients


def build_shared_gradients(element: Element, value, pullback):
    """The gradients of weight and bias of units start to stop, whose channels share them."""
    weighted_sums = _weighted_sums(element)

    def shared_gradients(sums, weight, grad_weight, grad_bias, geometry, start, stop):
        size, channels = geometry[GROUP_CHANNELS], channel_count(geometry)
        for unit in range(start, stop):
            n, c = unit // geometry[GROUPS], unit % geometry[GROUPS] * size
            first = 2 * n * channels + c
            p, q = weighted_sums(sums, first, first + channels, weight, 0, 0, size)
            if wanted(grad_weight):
                put_number(grad_weight, unit, q, geometry[WEIGHT_DTYPE])
            if wanted(grad_bias):
                put_number(grad_bias, unit, p, geometry[BIAS_DTYPE])

    return shared_gradients


def build_input_gradient(element: Element, value, pullback, keeps=False, adds_gradient=False):
    """The input's gradient of slabs start to stop, with ``keeps`` from dz that was kept, by a kernel without an
    activation; with ``adds_gradient`` ``grad_total`` is added to it."""
    of_slab = gradient_slab(element, pullback, adds_gradient=adds_gradient, kept=keeps)

    def input_gradient(
        grad, x, dx, kept, coefficients, grad_total, geometry, activation_parameter, worker, start, stop
    ):
        first = start // geometry[PIECES]
        coefficients = coefficients_from(coefficients, geometry, worker, first)
        dz = kept_from(kept, geometry, worker, first) if keeps else grad
        for task in range(start, stop):
            of_slab(dz, x, dx, coefficients, grad_total, geometry, activation_parameter, task)

    return input_gradient


BUILDERS = {
    "recall": build_recall,
    "reduce": build_reduce,
    "reduce_kept": partial(build_reduce, keeps=True),
    "combine": build_combine,
    "gradient_coefficients": build_gradient_coefficients,
    "shared_gradients": build_shared_gradients,
    "input_gradient": build_input_gradient,
    "input_gradient_kept": partial(build_input_gradient, keeps=True),
    "input_gradient_total": partial(build_input_gradient, adds_gradient=True),
}
