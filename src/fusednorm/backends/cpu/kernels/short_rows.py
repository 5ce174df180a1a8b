"""Kernels for rows of short groups, which rows.py would take one by one: 2-D inputs of group_norm above all.

Blocks of whole groups that follow one another in memory, of up to SCRATCH elements, go through loops over all elements
of a block, and through loops over its groups, which sum and spread: 65536 rows of 2 groups of 2 elements take 290 us
backward, not 778. A block is several rows, or a part of a long one.
Where each row has a scale or shift of its own, A and B are made block by block, and the gradients of scale and shift
are those of the rows.
"""

from __future__ import annotations

from functools import cache, partial

import numpy as np

from fusednorm.backends.cpu.geometry import (
    BIAS_DTYPE,
    GROUP_CHANNELS,
    GROUPS,
    PIECE,
    RMS,
    SCALE_DTYPE,
    SCRATCH,
    SHIFT_DTYPE,
    SUMMED,
    WANT_INPUT_GRAD,
    WEIGHT_DTYPE,
)
from fusednorm.backends.cpu.kernels.affine import normalized
from fusednorm.backends.cpu.kernels.device import exact, span
from fusednorm.backends.cpu.kernels.elements import Element
from fusednorm.backends.cpu.kernels.operands import converting, factor_of, narrow, rounded_number, wanted
from fusednorm.backends.cpu.kernels.rows import combining, scaled
from fusednorm.backends.cpu.kernels.short_units import of_units, statistics_of_units

FLUSH = 64  # blocks summed in the compute dtype before the sums go to float64
STEP = 16  # rows of several blocks that are taken together, a block of each at a time


@exact
def block_of(geometry):
    """The channels of a block, and how many rows it takes."""
    channels, length = geometry[GROUPS] * geometry[GROUP_CHANNELS], geometry[GROUP_CHANNELS]
    if channels <= SCRATCH:
        return channels, SCRATCH // channels
    return SCRATCH // length * length, 1


@exact
def steps_of(parts, blocks):
    """How many blocks of one part of the channels follow one another: of several parts those of a few rows, whose
    other parts lie behind them in memory."""
    return max(1, blocks if parts == 1 else STEP)


@cache
def _parameters(element: Element):
    """The affine of a block's elements."""
    convert, combine = converting(element), combining(element)

    @exact
    def repeat(values, width, n):
        for k in range(width, n):
            values[k] = values[k - width]

    @exact
    def shared(weight, bias, geometry, tile, width, n, gains, offsets):
        """weight and bias of ``width`` channels, again and again up to n elements."""
        convert(weight, tile, geometry[WEIGHT_DTYPE], 1.0, gains, 0, width)
        convert(bias, tile, geometry[BIAS_DTYPE], 0.0, offsets, 0, width)
        repeat(gains, width, n)
        repeat(offsets, width, n)

    @exact
    def modulated(scale, shift, geometry, i, n, weights, biases, gains, offsets):
        """A and B of n elements with a scale and shift of their own, which begin at i."""
        convert(scale, i, geometry[SCALE_DTYPE], 0.0, gains, 0, n)
        convert(shift, i, geometry[SHIFT_DTYPE], 0.0, offsets, 0, n)
        combine(weights, biases, gains, offsets, 0, n)

    return shared, modulated


def build_forward(element: Element, value, pullback):
    """Rows start to stop."""
    load, read, recall, store, scratch, T = (
        element.load, element.read, element.recall, element.store, element.scratch, element.compute
    )  # fmt: skip
    statistics, (_, spread_units), (shared, modulated) = (
        statistics_of_units(element),
        of_units(element),
        _parameters(element),
    )

    @exact
    def apply(x, y, i, n, means, rstds, gains, offsets, alpha):
        for part in range(2):
            start, stop = span(part, n)
            for k in range(start, stop):
                a = scaled(read(gains, k), read(rstds, k))
                z = normalized(load(x, i + k) - read(means, k), a, read(offsets, k))
                store(y, i + k, value(z, alpha))

    @exact
    def publish(saved, unit, units, numbers):
        for u in range(units):
            saved[unit + u] = recall(numbers, u)

    def forward(
        x, y, mean, rstd, weight, bias, scale, shift, geometry, eps, activation_parameter, start, stop
    ):  # fmt: skip
        weights, biases, gains, offsets = scratch(), scratch(), scratch(), scratch()
        values, squares, first, second, pivots = scratch(), scratch(), scratch(), scratch(), scratch()
        unit_means, unit_rstds, means, rstds = scratch(), scratch(), scratch(), scratch()
        length, groups, rms, alpha = geometry[GROUP_CHANNELS], geometry[GROUPS], geometry[RMS], T(activation_parameter)
        channels, modulates = groups * length, geometry[SCALE_DTYPE] + geometry[SHIFT_DTYPE] > 0
        most, together = block_of(geometry)
        # A step that is no constant could be 0, for which a range would raise.
        parts, blocks = (channels + most - 1) // most, (stop - start + together - 1) // together
        at_once = steps_of(parts, blocks)
        for turn in range(parts * ((blocks + at_once - 1) // at_once)):
            lead, tile = turn // parts * at_once, turn % parts * most
            width = min(most, channels - tile)
            shared(weight, bias, geometry, tile, width, width * min(together, stop - start), weights, biases)
            for block in range(lead, min(lead + at_once, blocks)):
                row = start + block * together
                i, n = row * channels + tile, width * min(together, stop - row)
                unit, units = i // length, n // length
                statistics(
                    x, i, units, length, rms, eps, pivots, means, values, squares, first, second, unit_means, unit_rstds
                )
                publish(rstd, unit, units, unit_rstds)
                if not rms:
                    publish(mean, unit, units, unit_means)
                spread_units(unit_means, length, units, means)
                spread_units(unit_rstds, length, units, rstds)
                if modulates:
                    modulated(scale, shift, geometry, i, n, weights, biases, gains, offsets)
                    apply(x, y, i, n, means, rstds, gains, offsets, alpha)
                else:
                    apply(x, y, i, n, means, rstds, weights, biases, alpha)

    return forward


def build_backward(element: Element, value, pullback, accumulate=True):
    """The input's gradient, and with ``accumulate`` the parameters' of segments of PIECE rows."""
    load, read, recall, keep, store = element.load, element.read, element.recall, element.keep, element.store
    add_first, add_second, scratch, T = element.add_first, element.add_second, element.scratch, element.compute
    (unit_sums, spread_units), (shared, modulated) = of_units(element), _parameters(element)
    convert, rounded = converting(element), rounded_number(element)

    @exact
    def recall_units(saved, dtype, unit, units, numbers):
        for u in range(units):
            keep(numbers, u, T(rounded(saved, unit + u, dtype)))

    @exact
    def products(grad, x, i, n, means, rstds, gains, offsets, alpha, dzs, qs):
        for part in range(2):
            start, stop = span(part, n)
            for k in range(start, stop):
                deviation, inverse = load(x, i + k) - read(means, k), read(rstds, k)
                z = normalized(deviation, scaled(read(gains, k), inverse), read(offsets, k))
                dz = pullback(load(grad, i + k), z, alpha)
                keep(dzs, k, dz)
                keep(qs, k, dz * (deviation * inverse))

    @exact
    def add(dzs, qs, n, first, second):
        for k in range(n):
            add_first(first, k, recall(dzs, k))
            add_second(second, k, recall(qs, k))

    @exact
    def add_scaled(dzs, qs, factors, n, first, second):
        for k in range(n):
            factor = factor_of(read(factors, k))
            add_first(first, k, factor * recall(dzs, k))
            add_second(second, k, factor * recall(qs, k))

    @exact
    def scale_gradients(dzs, qs, weights, biases, n, values):
        for k in range(n):
            values[k] = weights[k] * recall(qs, k) + biases[k] * recall(dzs, k)

    @exact
    def weigh(dzs, qs, gains, n):
        for k in range(n):
            keep(dzs, k, read(gains, k) * recall(dzs, k))
            keep(qs, k, read(gains, k) * recall(qs, k))

    @exact
    def divide(sums, units, length):
        for u in range(units):
            keep(sums, u, recall(sums, u) / T(length))

    @exact
    def gradient(x, dx, i, n, means, rstds, dzs, ps, qs):
        for part in range(2):
            start, stop = span(part, n)
            for k in range(start, stop):
                inverse = read(rstds, k)
                xhat = (load(x, i + k) - read(means, k)) * inverse
                store(dx, i + k, inverse * (recall(dzs, k) - (read(ps, k) + xhat * read(qs, k))))

    @exact
    def clear(first, second, n):
        for k in range(n):
            first[k] = second[k] = T(0)

    @exact
    def flush(first, second, partials, ps, qs, width, rows):
        for row in range(rows):
            for c in range(width):
                partials[ps + c] += np.float64(first[row * width + c])
                partials[qs + c] += np.float64(second[row * width + c])
        clear(first, second, width * rows)

    def backward(
        grad, x, dx, given_mean, given_mean_dtype, given_rstd, given_rstd_dtype, weight, bias, scale, shift,
        grad_scale, grad_shift, partials, geometry, activation_parameter, start, stop,
    ):  # fmt: skip
        weights, biases, gains, offsets, factors = scratch(), scratch(), scratch(), scratch(), scratch()
        dzs, qs, first, second = scratch(), scratch(), scratch(), scratch()
        of_units, more_of_units, means, rstds, mean_ps, mean_qs = (
            scratch(), scratch(), scratch(), scratch(), scratch(), scratch()
        )  # fmt: skip
        length, groups, rms, alpha = geometry[GROUP_CHANNELS], geometry[GROUPS], geometry[RMS], T(activation_parameter)
        channels, modulates = groups * length, geometry[SCALE_DTYPE] + geometry[SHIFT_DTYPE] > 0
        most, together = block_of(geometry)
        for segment in range(start, stop):
            begin = segment * geometry[PIECE]
            last = min(begin + geometry[PIECE], geometry[SUMMED])
            parts, blocks = (channels + most - 1) // most, (last - begin + together - 1) // together
            at_once = steps_of(parts, blocks)
            for c in range(2 * segment * channels, (2 * segment + 2) * channels if accumulate else 0):
                partials[c] = 0.0
            for turn in range(parts * ((blocks + at_once - 1) // at_once)):
                lead, tile = turn // parts * at_once, turn % parts * most
                width = min(most, channels - tile)
                rows = min(together, last - begin)
                shared(weight, bias, geometry, tile, width, width * rows, weights, biases)
                p, q = 2 * segment * channels + tile, (2 * segment + 1) * channels + tile
                if accumulate:
                    clear(first, second, width * rows)
                end = min(lead + at_once, blocks)
                for block in range(lead, end):
                    row = begin + block * together
                    i, n = row * channels + tile, width * min(together, last - row)
                    unit, units = i // length, n // length
                    if rms:
                        for k in range(n):
                            means[k] = T(0)
                    else:
                        recall_units(given_mean, given_mean_dtype, unit, units, of_units)
                        spread_units(of_units, length, units, means)
                    recall_units(given_rstd, given_rstd_dtype, unit, units, of_units)
                    spread_units(of_units, length, units, rstds)
                    if modulates:
                        modulated(scale, shift, geometry, i, n, weights, biases, gains, offsets)
                        products(grad, x, i, n, means, rstds, gains, offsets, alpha, dzs, qs)
                    else:
                        products(grad, x, i, n, means, rstds, weights, biases, alpha, dzs, qs)
                    if accumulate:
                        if modulates:
                            convert(scale, i, geometry[SCALE_DTYPE], 0.0, factors, 0, n)
                            add_scaled(dzs, qs, factors, n, first, second)
                            if wanted(grad_scale):
                                scale_gradients(dzs, qs, weights, biases, n, factors)
                                narrow(factors, -i, grad_scale, geometry[SCALE_DTYPE], i, i + n)
                            narrow(dzs, -i, grad_shift, geometry[SHIFT_DTYPE], i, i + n)
                        else:
                            add(dzs, qs, n, first, second)
                        if block % FLUSH == FLUSH - 1 or block == end - 1:
                            flush(first, second, partials, p, q, width, rows)
                    if geometry[WANT_INPUT_GRAD]:
                        if modulates:
                            weigh(dzs, qs, gains, n)
                        else:
                            weigh(dzs, qs, weights, n)
                        unit_sums(dzs, 0, length, units, of_units)
                        unit_sums(qs, 0, length, units, more_of_units)
                        divide(of_units, 0 if rms else units, length)
                        divide(more_of_units, units, length)
                        spread_units(of_units, length, units, mean_ps)
                        spread_units(more_of_units, length, units, mean_qs)
                        if rms:
                            for k in range(n):
                                mean_ps[k] = T(0)
                        gradient(x, dx, i, n, means, rstds, dzs, mean_ps, mean_qs)

    return backward


BUILDERS = {
    "forward": build_forward,
    "backward": build_backward,
    "backward_data": partial(build_backward, accumulate=False),
}
