"""Kernels of the channels_first order with short planes.

A loop over each plane would start for little work, and leave most of its elements to scalar code. Here every loop over
elements runs over a tile: many planes that touch, whose coefficients are first spread over arrays, an entry per
element. So vector code runs across the ends of planes. Units shorter than a tile are taken together. The sums around a
norm are made tile by tile too: s of the units that are taken together goes to ``total`` before their statistics.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from fusednorm.backends.cpu.geometry import (
    GATE_ROWS,
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
    POST_SAMPLE,
    POST_STEP,
    PRE_SAMPLE,
    PRE_STEP,
    RMS,
    SAMPLES,
    SPANS,
    SPATIAL,
    TILE_PLANES,
    TILE_UNITS,
    TOTAL_SAMPLE,
    TOTAL_STEP,
    TOTAL_WORKER,
    TRAINING,
    VECTOR,
    WANT_INPUT_GRAD,
    WANT_VARIANCE,
)
from fusednorm.backends.cpu.kernels.affine import channel_affines, dz_of, normalized, publish, reduced_count
from fusednorm.backends.cpu.kernels.device import exact, reassociated
from fusednorm.backends.cpu.kernels.elements import FILLED, Element
from fusednorm.backends.cpu.kernels.elements import element as accesses
from fusednorm.backends.cpu.kernels.mathematics import joined
from fusednorm.backends.cpu.kernels.moments import FEWEST
from fusednorm.backends.cpu.kernels.planes import locate, moments_of_units, saved_statistics
from fusednorm.backends.cpu.kernels.short_units import (
    of_units,
    publish_short,
    publish_sums,
    statistics_of_units,
    widened,
)
from fusednorm.backends.cpu.kernels.slabs import FLUSH, pivot_finder, row_adder
from fusednorm.backends.cpu.kernels.variants import backwards, summed


@exact
def last_unit(geometry, unit, stop):
    """The end of the units that are taken together from ``unit`` on: of one sample where samples do not touch."""
    last = min(unit + geometry[TILE_UNITS], stop)
    if geometry[PER_BATCH] or geometry[SPANS]:
        return last
    return min(last, (unit // geometry[GROUPS] + 1) * geometry[GROUPS])


@exact
def samples_of(geometry, unit):
    """The first sample of a unit, and the end of its samples."""
    if geometry[PER_BATCH]:
        return 0, geometry[SAMPLES]
    return unit // geometry[GROUPS], unit // geometry[GROUPS] + 1


@exact
def channels_of(geometry, unit, last):
    """The first channel of the units from ``unit`` to ``last``, and the end of their channels, which go on in the next
    samples."""
    _, first = locate(geometry, unit, 0)
    return first, first + (last - unit) * geometry[GROUP_CHANNELS]


@cache
def _moments_over_samples(element: Element):
    """The statistics of batch_norm's channels whose planes make a tile: those of each element over all samples, in
    vector code, and then of a plane's elements together."""
    add_rows, find_pivot, T = row_adder(element), pivot_finder(element), element.compute
    plane_sums, spread_planes = of_units(accesses("float64"))
    rounds = element.dtype == "float64"  # sums of means of other dtypes are exact, or nearly so

    @exact
    def add_wide(sums, totals, n):
        for k in range(n):
            totals[k] += np.float64(sums[k])
            sums[k] = T(0)

    @exact
    def finish(pivots, totals, squares, samples, n):
        """Mean and M2 of each element, in the place of its sums."""
        for k in range(n):
            shift = totals[k] / samples
            m2 = squares[k] - totals[k] * shift
            totals[k], squares[k] = np.float64(pivots[k]) + shift, 0.0 if m2 < 0.0 else m2

    @exact
    def divide(sums, planes, length):
        for plane in range(planes):
            sums[plane] /= length

    @exact
    def take(means, centres, n):
        for k in range(n):
            centres[k] = means[k] - centres[k]

    @exact
    def add_shifts(plane_means, shifts, planes):
        for plane in range(planes):
            if np.isfinite(shifts[plane]):  # the mean of an infinite element is infinite, and its distance none
                plane_means[plane] += shifts[plane]

    @exact
    def add_distances(means, centres, samples, squares, n):
        for k in range(n):
            delta = means[k] - centres[k]
            squares[k] += samples * (delta * delta)

    @exact
    def moments_over_samples(
        x, i, sample, geometry, planes, pivots, first, second, totals, squares, centres, plane_means, plane_m2s
    ):
        """Mean and M2 of so many channels, the first of which begins at i in the first sample."""
        samples, length = geometry[SAMPLES], geometry[SPATIAL]
        n = planes * length
        find_pivot(x, i, sample, samples, n, 1, pivots)
        for k in range(n):
            first[k] = second[k] = T(0)
            totals[k] = squares[k] = 0.0
        for row in range(0, samples, FLUSH):
            add_rows(x, i + row * sample, sample, min(FLUSH, samples - row), True, n, pivots, first, second)
            add_wide(first, totals, n)
            add_wide(second, squares, n)
        finish(pivots, totals, squares, samples, n)
        plane_sums(totals, 0, length, planes, plane_means)
        divide(plane_means, planes, length)
        spread_planes(plane_means, length, planes, centres)
        if rounds:  # the distances make up for what the sums lost: equal elements have a variance of 0
            take(totals, centres, n)
            plane_sums(centres, 0, length, planes, plane_m2s)
            divide(plane_m2s, planes, length)
            add_shifts(plane_means, plane_m2s, planes)
            spread_planes(plane_means, length, planes, centres)
        add_distances(totals, centres, samples, squares, n)
        plane_sums(squares, 0, length, planes, plane_m2s)

    return moments_over_samples


@cache
def _spread(element: Element):
    fill = element.fill

    @exact
    def spread(array, first, n, number):
        """Put a number into n elements from ``first`` on, and into as many behind them as fills write."""
        for k in range(first, first + n, FILLED):
            fill(array, k, number)

    return spread


@cache
def _tile_coefficients(element: Element):
    """spread_units and spread_affines: a number of units, such as mean, for each element of a tile, and a = A rstd and
    B."""
    T, spread, keep = element.compute, _spread(element), element.keep
    _, spread_planes = of_units(element)

    @exact
    def scale(affines, inverse, start, stop, numbers):
        for plane in range(start, stop):
            keep(numbers, plane, T(affines[plane] * inverse))

    @exact
    def scale_each(affines, inverses, first, planes, numbers):
        for plane in range(planes):
            keep(numbers, plane, T(affines[plane] * np.float64(inverses[first + plane])))

    @exact
    def place(values, first, n, numbers):
        for k in range(n):
            keep(numbers, k, T(values[first + k]))

    @exact
    def spread_units(values, geometry, planes, numbers, elements):
        """Of units with so many planes, or of one that several tiles have."""
        length, size = geometry[SPATIAL], geometry[GROUP_CHANNELS]
        if size == 1:  # each plane is a row of a unit of its own
            place(values, 0, planes, numbers)
            spread_planes(numbers, length, planes, elements)
            return
        for unit in range((planes + size - 1) // size):
            start = unit * size
            spread(elements, start * length, min(size, planes - start) * length, values[unit])

    @exact
    def spread_affines(unit_rstds, gain_of, offset_of, geometry, planes, first, numbers, gains, offsets):
        """Of planes with their A and B in ``gain_of`` and ``offset_of``; the first is row ``first`` of the units."""
        length, size = geometry[SPATIAL], geometry[GROUP_CHANNELS]
        if size == 1:
            scale_each(gain_of, unit_rstds, first, planes, numbers)
        else:
            unit, row = first // size, first % size
            start = 0
            while start < planes:
                stop = min(start + size - row, planes)
                scale(gain_of, np.float64(unit_rstds[unit]), start, stop, numbers)
                start, unit, row = stop, unit + 1, 0
        spread_planes(numbers, length, planes, gains)
        place(offset_of, 0, planes, numbers)
        spread_planes(numbers, length, planes, offsets)

    return spread_units, spread_affines


@cache
def _two_sums(element: Element):
    recall, T = element.recall, element.compute

    @reassociated
    def two_sums(ones, i, others, j, n):
        """The sums of n elements of two arrays, in float64."""
        first, second = T(0), T(0)
        for k in range(n):
            first += recall(ones, i + k)
            second += recall(others, j + k)
        return np.float64(first), np.float64(second)

    return two_sums


@cache
def _sum_tile(element: Element, by_channel: bool):
    """s of a tile, rounded to the input's dtype. ``by_channel``: the gate has all that is added, a number for each
    plane."""
    load, read, put, T, spread = element.load, element.read, element.put_total, element.compute, _spread(element)

    @exact
    def sum_tile(x, i, pre, p, gates, q, gated, total, t, planes, length, numbers):
        for plane in range(planes if gated else 0):
            spread(numbers, plane * length, length, T(gates[q + plane]))
        if by_channel:
            for k in range(planes * length):
                put(total, t + k, load(x, i + k) + read(numbers, k))
        elif gated:
            for k in range(planes * length):
                put(total, t + k, load(x, i + k) + read(numbers, k) * load(pre, p + k))
        else:
            for k in range(planes * length):
                put(total, t + k, load(x, i + k) + load(pre, p + k))

    return sum_tile


@cache
def _apply_tile(element: Element, value, adds_before: bool, adds_behind: bool):
    load, load_post, read, store = element.load, element.load, element.read, element.store
    if adds_before:
        load = element.load_total

    @exact
    def apply_tile(x, i, y, j, post, p, n, means, gains, offsets, alpha):
        """y = value(A (x - mean) rstd + B + post)."""
        for k in range(n):
            z = normalized(load(x, i + k) - read(means, k), read(gains, k), read(offsets, k))
            if adds_behind:
                z += load_post(post, p + k)
            store(y, j + k, value(z, alpha))

    return apply_tile


@cache
def _tile_products(element: Element, pullback, adds_behind: bool):
    load, read, keep, store = element.load, element.read, element.keep, element.store
    at = joined(pullback)

    @exact
    def tile_products(
        grad, g, x, i, post, p, grad_post, o, n, means, gains, offsets, rstds, dzs, r, products, alpha
    ):  # fmt: skip
        """dz, put into ``dzs`` from r on, and dz xhat. With ``adds_behind`` z is z + post, and dz its gradient, which
        is stored too."""
        for k in range(n):
            deviation = load(x, i + k) - read(means, k)
            z = normalized(deviation, read(gains, k), read(offsets, k))
            if adds_behind:
                z = at(z, load(post, p + k))
            dz = pullback(load(grad, g + k), z, alpha)
            keep(dzs, r + k, dz)
            keep(products, k, dz * (deviation * read(rstds, k)))
            if adds_behind:
                store(grad_post, o + k, dz)

    return tile_products


@cache
def _gradient_tile(element: Element, pullback, keeps: bool, adds_gradient: bool):
    """dx = rstd (A dz - (P + xhat Q) / K), as a dz + c2 xhat + c3; dz is computed again, or what was kept of it. With
    ``adds_gradient`` dx gets the gradient of x itself, which lies as x does.

    With x - mean in place of xhat, c2 would hold rstd**2, which is beyond float32 for inputs of 1e19 and of 1e-20.
    Where the statistics were given, dx is a dz alone, since 0 xhat would be NaN where x is infinite.
    """
    load, read, store, make = element.load, element.read, element.store, dz_of(element, pullback, keeps)

    @exact
    def gradient_tile(
        grad, g, x, i, dx, o, n, means, gains, offsets, rstds, c2s, c3s, dzs, r, alpha, training, grad_total
    ):  # fmt: skip
        if training:
            for k in range(n):
                deviation, a = load(x, i + k) - read(means, k), read(gains, k)
                dz = make(grad, g + k, dzs, r + k, normalized(deviation, a, read(offsets, k)), alpha)
                gradient = a * dz + (read(c2s, k) * (deviation * read(rstds, k)) + read(c3s, k))
                if adds_gradient:
                    gradient += load(grad_total, i + k)
                store(dx, o + k, gradient)
        else:
            for k in range(n):
                a = read(gains, k)
                z = normalized(load(x, i + k) - read(means, k), a, read(offsets, k))
                gradient = a * make(grad, g + k, dzs, r + k, z, alpha)
                if adds_gradient:
                    gradient += load(grad_total, i + k)
                store(dx, o + k, gradient)

    return gradient_tile


def build_forward(element: Element, value, pullback, adds_before=False, adds_behind=False, by_channel=False):
    """Units start to stop, from statistics to output; with ``adds_before`` of s, and with ``adds_behind`` of z +
    post_add. ``by_channel``: ``pre_gate`` has all that is added before, a number for a plane."""
    source = element._replace(load=element.load_total) if adds_before else element
    unit_moments, keep = moments_of_units(source), publish(element)
    sum_tile, apply_tile = _sum_tile(element, by_channel), _apply_tile(element, value, adds_before, adds_behind)
    (spread_units, spread_affines), scratch, T = _tile_coefficients(element), element.scratch, element.compute
    plane_affines, short_statistics, moments_over_samples, wide_scratch = (
        channel_affines(element), statistics_of_units(source), _moments_over_samples(source),
        accesses("float64").scratch,
    )  # fmt: skip

    def forward(
        x, y, mean, rstd, variance, weight, bias, scale, shift, total, pre_add, pre_gate, post_add, geometry, eps,
        activation_parameter, worker, start, stop,
    ):  # fmt: skip
        unit_means, unit_rstds, numbers, work = scratch(), scratch(), scratch(), scratch()
        means, gains, offsets, rstds = scratch(), scratch(), scratch(), scratch()
        gain_of, offset_of, scale_of, shift_of = wide_scratch(), wide_scratch(), wide_scratch(), wide_scratch()
        centres, m2s = wide_scratch(), wide_scratch()
        length, most, alpha = geometry[SPATIAL], geometry[TILE_PLANES], T(activation_parameter)
        tiled = geometry[PER_BATCH] and most > 1
        size = geometry[GROUP_CHANNELS] * length
        short = not geometry[PER_BATCH] and geometry[TILE_UNITS] > 1 and size <= FEWEST
        channels = geometry[GROUPS] * geometry[GROUP_CHANNELS]
        whole, origin, sample, step = x, 0, geometry[INPUT_SAMPLE], geometry[INPUT_STEP]
        unit = start
        while unit < stop:
            last = last_unit(geometry, unit, stop)
            c0, c1 = channels_of(geometry, unit, last)
            n0, n1 = samples_of(geometry, unit)
            tiles = (c1 - c0 + most - 1) // most
            if adds_before:
                whole, sample, step = total, geometry[TOTAL_SAMPLE], geometry[TOTAL_STEP]
                if geometry[TOTAL_WORKER]:  # nobody keeps s: the units lie in the worker's own room
                    sample, step = (c1 - c0) * length, length
                    origin = worker * geometry[TOTAL_WORKER] - n0 * sample - c0 * step
                for n in range(n0, n1):
                    for tile in range(tiles):
                        c = c0 + tile * most
                        sum_tile(
                            x, n * geometry[INPUT_SAMPLE] + c * geometry[INPUT_STEP],
                            pre_add, n * geometry[PRE_SAMPLE] + c * geometry[PRE_STEP], pre_gate, n * channels + c,
                            by_channel or geometry[GATE_ROWS] > 0, total, origin + n * sample + c * step,
                            min(most, c1 - c), length, means,
                        )  # fmt: skip
            i = origin + n0 * sample + c0 * step
            if short:
                short_statistics(
                    whole, i, last - unit, size, geometry[RMS], eps, numbers, means, gains, offsets, work, rstds,
                    unit_means, unit_rstds,
                )  # fmt: skip
                publish_short(rstd, unit, last - unit, unit_rstds)
                if not geometry[RMS]:
                    publish_short(mean, unit, last - unit, unit_means)
                if geometry[WANT_VARIANCE]:
                    publish_short(variance, unit, last - unit, rstds)
            if tiled:
                moments_over_samples(
                    whole, i, sample, geometry, last - unit, means, gains, offsets, gain_of, offset_of, scale_of,
                    centres, m2s,
                )  # fmt: skip
            for u in range(last if short else unit, last):
                if tiled:
                    centre, m2 = centres[u - unit], m2s[u - unit]
                else:
                    centre, m2 = unit_moments(whole, origin, sample, step, geometry, u)
                centre, inverse = keep(mean, rstd, variance, geometry, eps, u, centre, m2)
                unit_means[u - unit], unit_rstds[u - unit] = T(centre), T(inverse)
            spread_units(unit_means, geometry, min(most, c1 - c0), numbers, means)
            for tile in range(tiles):
                c = c0 + tile * most
                planes = min(most, c1 - c)
                for n in range(n0, n1):
                    plane_affines(
                        weight, bias, scale, shift, geometry, n, c, planes, gain_of, offset_of, scale_of, shift_of
                    )
                    spread_affines(unit_rstds, gain_of, offset_of, geometry, planes, c - c0, numbers, gains, offsets)
                    j = n * geometry[OUTPUT_SAMPLE] + c * geometry[OUTPUT_STEP]
                    p = n * geometry[POST_SAMPLE] + c * geometry[POST_STEP]
                    apply_tile(
                        whole, origin + n * sample + c * step, y, j, post_add, p, planes * length, means, gains,
                        offsets, alpha,
                    )  # fmt: skip
            unit = last

    return forward


def build_backward(element: Element, value, pullback, keeps=False, adds_behind=False, adds_gradient=False):
    """Units start to stop: p and q of each plane, then the input's gradient.

    Where dz is kept, ``kept`` has room for the units of a tile per worker. With ``adds_behind`` it is the gradient of
    z + post_add, and is stored too; with ``adds_gradient`` dx gets ``grad_total``.
    """
    tile_products = _tile_products(element, pullback, adds_behind)
    gradient_tile = _gradient_tile(element, pullback, keeps, adds_gradient)
    two_sums, saved, (spread_units, spread_affines) = (
        _two_sums(element), saved_statistics(element), _tile_coefficients(element)
    )  # fmt: skip
    plane_affines, scratch, T = channel_affines(element), element.scratch, element.compute
    (plane_sums, _), wide_scratch, widen = of_units(element), accesses("float64").scratch, widened(element)

    @exact
    def tile_sums(length, planes, dzs, r, products, ps, qs, numbers):
        """p and q of each plane of a tile."""
        if length < VECTOR:
            plane_sums(dzs, r, length, planes, numbers)
            widen(numbers, planes, ps)
            plane_sums(products, 0, length, planes, numbers)
            widen(numbers, planes, qs)
            return
        for plane in range(planes):
            ps[plane], qs[plane] = two_sums(dzs, r + plane * length, products, plane * length, length)

    @exact
    def add_totals(ps, qs, totals, gain_of, geometry, planes, first, unit):
        """Add A p and A q of the planes of a tile, the first of which is row ``first`` of the units, to the totals of
        their units."""
        size = geometry[GROUP_CHANNELS]
        if size == 1:
            j = 2 * (unit + first)
            for plane in range(planes):
                totals[j + 2 * plane] += gain_of[plane] * ps[plane]
                totals[j + 2 * plane + 1] += gain_of[plane] * qs[plane]
            return
        u, row = unit + first // size, first % size
        start = 0
        while start < planes:
            stop = min(start + size - row, planes)
            total_p, total_q = totals[2 * u], totals[2 * u + 1]
            for plane in range(start, stop):
                total_p += gain_of[plane] * ps[plane]
                total_q += gain_of[plane] * qs[plane]
            totals[2 * u], totals[2 * u + 1] = total_p, total_q
            start, u, row = stop, u + 1, 0

    @exact
    def unit_coefficients(totals, unit_rstds, geometry, unit, units, unit_c2s, unit_c3s):
        """c2 = -rstd Q / K and c3 = -rstd P / K of so many units from ``unit`` on."""
        rms, count = geometry[RMS], reduced_count(geometry)
        for u in range(units):
            inverse, total = np.float64(unit_rstds[u]), 2 * (unit + u)
            mean_p = 0.0 if rms else totals[total] / count
            unit_c2s[u], unit_c3s[u] = T(-inverse * (totals[total + 1] / count)), T(-inverse * mean_p)

    def backward(
        grad, x, dx, given_mean, given_mean_dtype, given_rstd, given_rstd_dtype, weight, bias, scale, shift, sums,
        totals, kept, post_add, grad_total, grad_post_add, geometry, activation_parameter, worker, start, stop,
    ):  # fmt: skip
        unit_means, unit_rstds, first_work, second_work = scratch(), scratch(), scratch(), scratch()
        numbers, unit_c2s, unit_c3s = scratch(), scratch(), scratch()
        gain_of, offset_of, scale_of, shift_of = wide_scratch(), wide_scratch(), wide_scratch(), wide_scratch()
        ps, qs = scale_of, shift_of  # whose numbers the affines have by then
        means, gains, offsets, rstds = scratch(), scratch(), scratch(), scratch()
        length, most, alpha = geometry[SPATIAL], geometry[TILE_PLANES], T(activation_parameter)
        slot, channels = worker * geometry[KEPT_WORKER], geometry[GROUPS] * geometry[GROUP_CHANNELS]
        dzs = kept if keeps else first_work
        unit = start
        while unit < stop:
            last = last_unit(geometry, unit, stop)
            for u in range(unit, last):
                unit_means[u - unit], unit_rstds[u - unit] = saved(
                    given_mean, given_mean_dtype, given_rstd, given_rstd_dtype, geometry, u
                )
                totals[2 * u] = totals[2 * u + 1] = 0.0
            c0, c1 = channels_of(geometry, unit, last)
            n0, n1 = samples_of(geometry, unit)
            tiles = (c1 - c0 + most - 1) // most
            spread_units(unit_means, geometry, min(most, c1 - c0), numbers, means)
            spread_units(unit_rstds, geometry, min(most, c1 - c0), numbers, rstds)
            for tile in range(tiles):
                c = c0 + tile * most
                planes = min(most, c1 - c)
                for n in range(n0, n1):
                    plane_affines(
                        weight, bias, scale, shift, geometry, n, c, planes, gain_of, offset_of, scale_of, shift_of
                    )
                    spread_affines(unit_rstds, gain_of, offset_of, geometry, planes, c - c0, numbers, gains, offsets)
                    g = n * geometry[GRAD_SAMPLE] + c * geometry[GRAD_STEP]
                    i = n * geometry[INPUT_SAMPLE] + c * geometry[INPUT_STEP]
                    r = slot + ((n - n0) * (c1 - c0) + c - c0) * length if keeps else 0
                    tile_products(
                        grad, g, x, i, post_add, n * geometry[POST_SAMPLE] + c * geometry[POST_STEP], grad_post_add,
                        n * geometry[OUTPUT_SAMPLE] + c * geometry[OUTPUT_STEP], planes * length, means, gains, offsets,
                        rstds, dzs, r, second_work, alpha,
                    )  # fmt: skip
                    tile_sums(length, planes, dzs, r, second_work, ps, qs, numbers)
                    publish_sums(sums, channels, n, c, planes, ps, qs)
                    add_totals(ps, qs, totals, gain_of, geometry, planes, c - c0, unit)
            unit_coefficients(totals, unit_rstds, geometry, unit, last - unit, unit_c2s, unit_c3s)
            spread_units(unit_c2s, geometry, min(most, c1 - c0), numbers, first_work)
            spread_units(unit_c3s, geometry, min(most, c1 - c0), numbers, second_work)
            for tile in range(tiles if geometry[WANT_INPUT_GRAD] else 0):
                c = c0 + tile * most
                planes = min(most, c1 - c)
                for n in range(n0, n1):
                    if tiles > 1 or n1 - n0 > 1:
                        plane_affines(
                            weight, bias, scale, shift, geometry, n, c, planes, gain_of, offset_of, scale_of, shift_of
                        )
                        spread_affines(
                            unit_rstds, gain_of, offset_of, geometry, planes, c - c0, numbers, gains, offsets
                        )
                    g = n * geometry[GRAD_SAMPLE] + c * geometry[GRAD_STEP]
                    i = n * geometry[INPUT_SAMPLE] + c * geometry[INPUT_STEP]
                    o = n * geometry[OUTPUT_SAMPLE] + c * geometry[OUTPUT_STEP]
                    r = slot + ((n - n0) * (c1 - c0) + c - c0) * length
                    gradient_tile(
                        grad, g, x, i, dx, o, planes * length, means, gains, offsets, rstds, first_work, second_work,
                        kept, r, alpha, geometry[TRAINING], grad_total,
                    )  # fmt: skip
            unit = last

    return backward


BUILDERS = {
    "forward": build_forward,
    **summed("forward", build_forward),
    **backwards(build_backward),
}
