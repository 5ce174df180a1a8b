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
    DTYPE_CODES,
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
from fusednorm.backends.cpu.kernels.device import exact, inlined, span
from fusednorm.backends.cpu.kernels.elements import Element, advanced
from fusednorm.backends.cpu.kernels.elements import element as accesses
from fusednorm.backends.cpu.kernels.operands import converting, factor_of, modulated, narrow, own, wanted, widened
from fusednorm.backends.cpu.kernels.slabs import (
    TILE,
    add_folded,
    channel_count,
    locate,
    row_width,
    rows_of,
    three_reader,
)

FLUSHED = 16  # samples summed in the compute dtype before the sums go to float64


@cache
def _row_operand(element: Element):
    """row_operand(operand, dtype, i, absent, room, n): n elements of a row's scale or shift in the compute dtype, where
    they lie or in ``room``."""
    convert, in_place, code = converting(element), widened(element), DTYPE_CODES[element.compute.__name__]

    @exact
    def row_operand(operand, dtype, i, absent, room, n):
        if dtype == code:
            return advanced(in_place(operand, dtype, room), i)
        convert(operand, i, dtype, absent, room, 0, n)
        return room

    return row_operand


@cache
def _row_modulation(element: Element):
    """row_modulation(scale, shift, geometry, i, scale_room, shift_room, n): scale and shift of n elements of a row."""
    row_operand, T = _row_operand(element), element.compute

    @exact
    def row_modulation(scale, shift, geometry, i, scale_room, shift_room, n):
        # To add -0 changes nothing, a bias of -0 included.
        return (
            row_operand(scale, geometry[POINT_SCALE_DTYPE], i, T(0), scale_room, n),
            row_operand(shift, geometry[POINT_SHIFT_DTYPE], i, T(-0.0), shift_room, n),
        )

    return row_modulation


@cache
def _row_z(element: Element):
    """row_z(x, i, coefficients, k, plane, c, scale, shift): A rstd, x - mean and z of an element."""
    load, read_three = element.load, three_reader(element)

    @exact
    def row_z(x, i, coefficients, k, plane, c, scale, shift):
        centre, a, b = read_three(coefficients, k + c, plane)
        gain, offset = modulated(a, b, scale, shift)
        deviation = load(x, i + c) - centre
        return gain, deviation, normalized(deviation, gain, offset)

    return row_z


def build_apply(element: Element, value, pullback):
    """The output of slabs start to stop."""
    read, store, T, scratch = element.read, element.store, element.compute, element.scratch
    row_modulation, row_z = _row_modulation(element), _row_z(element)

    @exact
    def apply_row(x, i, y, j, coefficients, k, plane, scales, shifts, n, alpha):
        for part in range(2):
            start, stop = span(part, n)
            for c in range(start, stop):
                _, _, z = row_z(x, i, coefficients, k, plane, c, read(scales, c), read(shifts, c))
                store(y, j + c, value(z, alpha))

    def apply(x, y, scale, shift, coefficients, geometry, activation_parameter, start, stop):
        channels, plane, alpha = channel_count(geometry), row_width(geometry), T(activation_parameter)
        together, scale_room, shift_room = geometry[TOGETHER], scratch(), scratch()
        for task in range(start, stop):
            _, first, positions = locate(geometry, task)
            for sample in range(rows_of(geometry, positions) // together):
                r = first + sample * together * geometry[REPEAT]
                width = min(plane, (first + positions - r) * channels)
                for tile in range(0, width, TILE):
                    n, m = min(TILE, width - tile), r // together * channels + tile
                    scales, shifts = row_modulation(scale, shift, geometry, m, scale_room, shift_room, n)
                    for row in range(r, r + together):
                        i, j = row * geometry[INPUT_STEP] + tile, row * geometry[OUTPUT_STEP] + tile
                        apply_row(x, i, y, j, coefficients, tile, plane, scales, shifts, n, alpha)

    return apply


@cache
def _row_sums(element: Element, pullback):
    """The parts of :func:`build_reduce` that run along a row."""
    load, read, store, row_z, T = element.load, element.read, element.store, _row_z(element), element.compute
    add_first, add_second, keep, recall = element.add_first, element.add_second, element.keep, element.recall
    wide = accesses(T.__name__)
    put, put_total, load_total = wide.store, wide.put_total, wide.load_total

    @inlined
    def products(grad, g, x, i, coefficients, k, plane, c, scale, shift, alpha):
        """dz and dz xhat of an element."""
        _, deviation, z = row_z(x, i, coefficients, k, plane, c, scale, shift)
        dz = pullback(load(grad, g + c), z, alpha)
        return dz, dz * (deviation * read(coefficients, k + 3 * plane + c))

    @exact
    def all_of_row(
        grad, g, x, i, coefficients, k, plane, scale, shift, grad_scale, grad_shift, m, weights, biases, first, second,
        n, alpha,
    ):  # fmt: skip
        """The sums and the gradients of scale and shift, all of the input's dtype, in one loop: of one for each, memory
        would be read and written a piece at a time."""
        for c in range(n):
            s = load(scale, m + c)
            p, q = products(grad, g, x, i, coefficients, k, plane, c, s, load(shift, m + c), alpha)
            factor = factor_of(s)
            add_first(first, c, factor * p)
            add_second(second, c, factor * q)
            store(grad_scale, m + c, read(weights, c) * q + read(biases, c) * p)
            store(grad_shift, m + c, p)

    @exact
    def products_of_row(grad, g, x, i, coefficients, k, plane, scales, shifts, ps, qs, n, alpha, adds):
        """dz and dz xhat of a row, put into ``ps`` and ``qs`` or added to what these have."""
        for c in range(n):
            p, q = products(grad, g, x, i, coefficients, k, plane, c, read(scales, c), read(shifts, c), alpha)
            if adds:
                p, q = recall(ps, c) + p, load_total(qs, c) + q
            keep(ps, c, p)
            put_total(qs, c, q)

    @exact
    def add_weighted(ps, qs, scales, first, second, n):
        for c in range(n):
            factor = factor_of(read(scales, c))
            add_first(first, c, factor * recall(ps, c))
            add_second(second, c, factor * load_total(qs, c))

    @exact
    def scale_gradients(ps, qs, weights, biases, values, n):
        for c in range(n):
            put(values, c, read(weights, c) * load_total(qs, c) + read(biases, c) * recall(ps, c))

    return all_of_row, products_of_row, add_weighted, scale_gradients


def build_reduce(element: Element, value, pullback):
    """p and q of slabs start to stop, weighted by 1 + scale, and the gradients of scale and shift of their rows."""
    row_modulation, convert, scratch, T = (
        _row_modulation(element), converting(element), element.scratch, element.compute
    )  # fmt: skip
    all_of_row, products_of_row, add_weighted, scale_gradients = _row_sums(element, pullback)
    in_place, code = own(element), DTYPE_CODES[element.dtype]
    wide_scratch = accesses("float64").scratch

    @exact
    def reduce_slab(
        grad, x, weight, bias, scale, shift, grad_scale, grad_shift, coefficients, partials, geometry, alpha, task
    ):
        _, position, positions = locate(geometry, task)
        channels, plane, repeated, together = (
            channel_count(geometry), row_width(geometry), geometry[REPEAT], geometry[TOGETHER]
        )  # fmt: skip
        scale_room, shift_room, p_of, q_of, values = scratch(), scratch(), scratch(), scratch(), scratch()
        weights, biases, first, second = scratch(), scratch(), scratch(), scratch()
        wide = wide_scratch()
        at_once = together == 1 and geometry[POINT_SCALE_DTYPE] == code and geometry[POINT_SHIFT_DTYPE] == code
        at_once = at_once and wanted(grad_scale) and wanted(grad_shift)
        for c in range(2 * task * channels, 2 * (task + 1) * channels):
            partials[c] = 0.0
        samples = rows_of(geometry, positions) // together
        # A few rows at a time, all tiles of these: whole rows follow one another in memory.
        for start in range(0, samples, FLUSHED):
            for tile in range(0, channels, TILE):
                width = min(TILE, channels - tile)
                ps, qs = 2 * task * channels + tile, (2 * task + 1) * channels + tile
                for k in range(repeated):
                    convert(weight, tile, geometry[WEIGHT_DTYPE], T(1), weights, k * width, width)
                    convert(bias, tile, geometry[BIAS_DTYPE], T(0), biases, k * width, width)
                for c in range(width * repeated):
                    first[c] = second[c] = T(0)
                for sample in range(start, min(start + FLUSHED, samples)):
                    r = position + sample * together * repeated
                    n, m = width * min(repeated, position + positions - r), r // together * channels + tile
                    if at_once:
                        all_of_row(
                            grad, r * geometry[GRAD_STEP] + tile, x, r * geometry[INPUT_STEP] + tile, coefficients,
                            tile, plane, in_place(scale), in_place(shift), in_place(grad_scale),
                            in_place(grad_shift), m, weights, biases, first, second, n, alpha,
                        )  # fmt: skip
                        continue
                    scales, shifts = row_modulation(scale, shift, geometry, m, scale_room, shift_room, n)
                    for row in range(r, r + together):
                        g, i = row * geometry[GRAD_STEP] + tile, row * geometry[INPUT_STEP] + tile
                        if row == r:
                            products_of_row(
                                grad, g, x, i, coefficients, tile, plane, scales, shifts, p_of, q_of, n, alpha, False
                            )
                        else:
                            products_of_row(
                                grad, g, x, i, coefficients, tile, plane, scales, shifts, p_of, q_of, n, alpha, True
                            )
                    add_weighted(p_of, q_of, scales, first, second, n)
                    if wanted(grad_scale):
                        scale_gradients(p_of, q_of, weights, biases, values, n)
                        narrow(values, -m, grad_scale, geometry[POINT_SCALE_DTYPE], m, m + n)
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
    row_modulation, row_z, read_three = _row_modulation(element), _row_z(element), three_reader(element)

    @exact
    def gradient_of_row(grad, g, x, i, dx, o, coefficients, k, plane, scales, shifts, n, alpha, training):
        for part in range(2):
            start, stop = span(part, n)
            for c in range(start, stop):
                gain, deviation, z = row_z(x, i, coefficients, k, plane, c, read(scales, c), read(shifts, c))
                gradient = gain * pullback(load(grad, g + c), z, alpha)
                if training:  # otherwise 0 times an infinite xhat would be NaN
                    rstd, c2, c3 = read_three(coefficients, k + 3 * plane + c, plane)
                    gradient += c2 * (deviation * rstd) + c3
                store(dx, o + c, gradient)

    def input_gradient(grad, x, scale, shift, dx, coefficients, geometry, activation_parameter, start, stop):
        channels, plane, alpha = channel_count(geometry), row_width(geometry), T(activation_parameter)
        together, training = geometry[TOGETHER], geometry[TRAINING]
        scale_room, shift_room = scratch(), scratch()
        for task in range(start, stop):
            _, first, positions = locate(geometry, task)
            for sample in range(rows_of(geometry, positions) // together):
                r = first + sample * together * geometry[REPEAT]
                width = min(plane, (first + positions - r) * channels)
                for tile in range(0, width, TILE):
                    n, m = min(TILE, width - tile), r // together * channels + tile
                    scales, shifts = row_modulation(scale, shift, geometry, m, scale_room, shift_room, n)
                    for row in range(r, r + together):
                        g, i = row * geometry[GRAD_STEP] + tile, row * geometry[INPUT_STEP] + tile
                        o = row * geometry[OUTPUT_STEP] + tile
                        if training:
                            gradient_of_row(
                                grad, g, x, i, dx, o, coefficients, tile, plane, scales, shifts, n, alpha, True
                            )
                        else:
                            gradient_of_row(
                                grad, g, x, i, dx, o, coefficients, tile, plane, scales, shifts, n, alpha, False
                            )

    return input_gradient


BUILDERS = {"apply": build_apply, "reduce": build_reduce, "input_gradient": build_input_gradient}
