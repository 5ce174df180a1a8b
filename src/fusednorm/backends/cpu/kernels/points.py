"""batch_norm of points, (N, C), each with a scale and shift of its own, as one sample of N positions of channels_last,
and of samples of few positions, which share theirs (TOGETHER), as one sample of all positions.

The statistics, and the coefficients that follow from them, are those of batch_norm without modulation (slabs.py and
slabs_backward.py). The kernels here make A rstd and B of a row from these and from the row's scale and shift, each time
that they need them: coefficients of N samples would be read from memory, 24 bytes an element. Slabs end where samples
do.
"""

from __future__ import annotations

from functools import cache

from fusednorm.backends.cpu.geometry import (
    BIAS_DTYPE,
    GRAD_STEP,
    INPUT_STEP,
    OUTPUT_STEP,
    POINT_SCALE_DTYPE,
    POINT_SHIFT_DTYPE,
    REPEAT,
    TOGETHER,
    TRAINING,
    WEIGHT_DTYPE,
)
from fusednorm.backends.cpu.kernels.affine import normalized
from fusednorm.backends.cpu.kernels.device import exact, reassociated, span, uncontracted
from fusednorm.backends.cpu.kernels.elements import Element
from fusednorm.backends.cpu.kernels.elements import element as accesses
from fusednorm.backends.cpu.kernels.operands import narrow, wanted
from fusednorm.backends.cpu.kernels.slabs import (
    FLUSH,
    TILE,
    add_folded,
    channel_count,
    locate,
    parameter_row,
    row_width,
    rows_of,
)


@cache
def _row_affine(element: Element):
    """row_affine(scale, shift, geometry, i, coefficients, k, gains, offsets, factors, n): 1 + scale of n elements of a
    row, and with it A rstd and B. ``k`` is the place of the first element's mean in the coefficients."""
    of_row, T = parameter_row(element), element.compute

    @uncontracted
    def combine(coefficients, a, b, gains, offsets, factors, n):
        for c in range(n):
            factors[c] += T(1)
            gains[c] = coefficients[a + c] * factors[c]
            offsets[c] += coefficients[b + c] * factors[c]

    @exact
    def row_affine(scale, shift, geometry, i, coefficients, k, gains, offsets, factors, n):
        plane = row_width(geometry)
        of_row(scale, geometry[POINT_SCALE_DTYPE], i, T(0), factors, 0, n)
        # To add -0 changes nothing, a bias of -0 included.
        of_row(shift, geometry[POINT_SHIFT_DTYPE], i, T(-0.0), offsets, 0, n)
        combine(coefficients, k + plane, k + 2 * plane, gains, offsets, factors, n)

    return row_affine


def build_apply(element: Element, value, pullback):
    """The output of slabs start to stop."""
    load, read, store, T, scratch = element.load, element.read, element.store, element.compute, element.scratch
    row_affine = _row_affine(element)

    @exact
    def apply_row(x, i, y, j, coefficients, k, gains, offsets, n, alpha):
        for part in range(2):
            start, stop = span(part, n)
            for c in range(start, stop):
                deviation = load(x, i + c) - read(coefficients, k + c)
                store(y, j + c, value(normalized(deviation, read(gains, c), read(offsets, c)), alpha))

    def apply(x, y, scale, shift, coefficients, geometry, activation_parameter, start, stop):
        channels, alpha, together = channel_count(geometry), T(activation_parameter), geometry[TOGETHER]
        gains, offsets, factors = scratch(), scratch(), scratch()
        for task in range(start, stop):
            _, first, positions = locate(geometry, task)
            for tile in range(0, row_width(geometry), TILE):
                for row in range(rows_of(geometry, positions)):
                    r = first + row * geometry[REPEAT]
                    n = min(TILE, min(row_width(geometry), (first + positions - r) * channels) - tile)
                    if row % together == 0:
                        m = r // together * channels + tile
                        row_affine(scale, shift, geometry, m, coefficients, tile, gains, offsets, factors, n)
                    i, j = r * geometry[INPUT_STEP] + tile, r * geometry[OUTPUT_STEP] + tile
                    apply_row(x, i, y, j, coefficients, tile, gains, offsets, n, alpha)

    return apply


@cache
def _row_sums(element: Element, pullback):
    """The parts of :func:`build_reduce` that run along a row."""
    load, read, add_first, add_second = element.load, element.read, element.add_first, element.add_second

    @exact
    def products_of_row(grad, g, x, i, coefficients, k, plane, gains, offsets, ps, qs, n, alpha, adds):
        """dz and dz xhat of a row, put into ``ps`` and ``qs`` or added to what these have."""
        if adds:
            for c in range(n):
                deviation = load(x, i + c) - read(coefficients, k + c)
                dz = pullback(load(grad, g + c), normalized(deviation, read(gains, c), read(offsets, c)), alpha)
                add_first(ps, c, dz)
                add_second(qs, c, dz * (deviation * read(coefficients, k + 3 * plane + c)))
        else:
            for c in range(n):
                deviation = load(x, i + c) - read(coefficients, k + c)
                dz = pullback(load(grad, g + c), normalized(deviation, read(gains, c), read(offsets, c)), alpha)
                ps[c], qs[c] = dz, dz * (deviation * read(coefficients, k + 3 * plane + c))

    @exact
    def scale_gradients(ps, qs, weights, biases, values, n):
        for c in range(n):
            values[c] = weights[c] * qs[c] + biases[c] * ps[c]

    @reassociated
    def add_weighted(ps, qs, factors, first, second, n):
        for c in range(n):
            factor = read(factors, c)
            add_first(first, c, factor * read(ps, c))
            add_second(second, c, factor * read(qs, c))

    return products_of_row, scale_gradients, add_weighted


def build_reduce(element: Element, value, pullback):
    """p and q of slabs start to stop, weighted by 1 + scale, and the gradients of scale and shift of their rows."""
    row_affine, of_row, scratch, T = _row_affine(element), parameter_row(element), element.scratch, element.compute
    products_of_row, scale_gradients, add_weighted = _row_sums(element, pullback)
    wide_scratch = accesses("float64").scratch

    @exact
    def reduce_slab(
        grad, x, weight, bias, scale, shift, grad_scale, grad_shift, coefficients, partials, geometry, alpha, task
    ):
        _, position, positions = locate(geometry, task)
        channels, plane, repeated, together = (
            channel_count(geometry), row_width(geometry), geometry[REPEAT], geometry[TOGETHER]
        )  # fmt: skip
        gains, offsets, factors, p_of, q_of = scratch(), scratch(), scratch(), scratch(), scratch()
        weights, biases, first, second = scratch(), scratch(), scratch(), scratch()
        wide = wide_scratch()
        for tile in range(0, channels, TILE):
            width = min(TILE, channels - tile)
            ps, qs = 2 * task * channels + tile, (2 * task + 1) * channels + tile
            for k in range(repeated):
                of_row(weight, geometry[WEIGHT_DTYPE], tile, T(1), weights, k * width, width)
                of_row(bias, geometry[BIAS_DTYPE], tile, T(0), biases, k * width, width)
            for c in range(width):
                partials[ps + c] = partials[qs + c] = 0.0
            samples = rows_of(geometry, positions) // together
            for start in range(0, samples, FLUSH):
                for c in range(width * repeated):
                    first[c] = second[c] = T(0)
                for sample in range(start, min(start + FLUSH, samples)):
                    r = position + sample * together * repeated
                    n, m = width * min(repeated, position + positions - r), r // together * channels + tile
                    row_affine(scale, shift, geometry, m, coefficients, tile, gains, offsets, factors, n)
                    for row in range(r, r + together):
                        g, i = row * geometry[GRAD_STEP] + tile, row * geometry[INPUT_STEP] + tile
                        products_of_row(
                            grad, g, x, i, coefficients, tile, plane, gains, offsets, p_of, q_of, n, alpha, row > r
                        )
                    add_weighted(p_of, q_of, factors, first, second, n)
                    if wanted(grad_scale):
                        scale_gradients(p_of, q_of, weights, biases, gains, n)
                        narrow(gains, -m, grad_scale, geometry[POINT_SCALE_DTYPE], m, m + n)
                    narrow(p_of, -m, grad_shift, geometry[POINT_SHIFT_DTYPE], m, m + n)
                add_folded(first, wide, width, repeated, partials, ps)
                add_folded(second, wide, width, repeated, partials, qs)

    def reduce(
        grad, x, weight, bias, scale, shift, grad_scale, grad_shift, coefficients, partials, geometry,
        activation_parameter, start, stop,
    ):  # fmt: skip
        for task in range(start, stop):
            reduce_slab(
                grad, x, weight, bias, scale, shift, grad_scale, grad_shift, coefficients, partials, geometry,
                T(activation_parameter), task,
            )  # fmt: skip

    return reduce


def build_input_gradient(element: Element, value, pullback):
    """The input's gradient of slabs start to stop."""
    load, read, store, T, scratch = element.load, element.read, element.store, element.compute, element.scratch
    row_affine = _row_affine(element)

    @exact
    def gradient_of_row(grad, g, x, i, dx, o, coefficients, k, plane, gains, offsets, n, alpha, training):
        for part in range(2):
            start, stop = span(part, n)
            if training:
                for c in range(start, stop):
                    deviation = load(x, i + c) - read(coefficients, k + c)
                    dz = pullback(load(grad, g + c), normalized(deviation, read(gains, c), read(offsets, c)), alpha)
                    xhat = deviation * read(coefficients, k + 3 * plane + c)
                    c2, c3 = read(coefficients, k + 4 * plane + c), read(coefficients, k + 5 * plane + c)
                    store(dx, o + c, read(gains, c) * dz + (c2 * xhat + c3))
            else:  # 0 times an infinite xhat would be NaN
                for c in range(start, stop):
                    deviation = load(x, i + c) - read(coefficients, k + c)
                    dz = pullback(load(grad, g + c), normalized(deviation, read(gains, c), read(offsets, c)), alpha)
                    store(dx, o + c, read(gains, c) * dz)

    def input_gradient(grad, x, scale, shift, dx, coefficients, geometry, activation_parameter, start, stop):
        channels, plane, alpha = channel_count(geometry), row_width(geometry), T(activation_parameter)
        gains, offsets, factors, together = scratch(), scratch(), scratch(), geometry[TOGETHER]
        for task in range(start, stop):
            _, first, positions = locate(geometry, task)
            for tile in range(0, plane, TILE):
                for row in range(rows_of(geometry, positions)):
                    r = first + row * geometry[REPEAT]
                    n = min(TILE, min(plane, (first + positions - r) * channels) - tile)
                    if row % together == 0:
                        m = r // together * channels + tile
                        row_affine(scale, shift, geometry, m, coefficients, tile, gains, offsets, factors, n)
                    g, i = r * geometry[GRAD_STEP] + tile, r * geometry[INPUT_STEP] + tile
                    o = r * geometry[OUTPUT_STEP] + tile
                    gradient_of_row(
                        grad, g, x, i, dx, o, coefficients, tile, plane, gains, offsets, n, alpha, geometry[TRAINING]
                    )

    return input_gradient


BUILDERS = {"apply": build_apply, "reduce": build_reduce, "input_gradient": build_input_gradient}
