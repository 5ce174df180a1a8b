"""Sums and statistics of many short units that follow one another in memory: in loops over all elements of a block of
units, and over its units, in place of a loop over the elements of each unit."""

from __future__ import annotations

from functools import cache

import numpy as np

from fusednorm.backends.cpu.geometry import VECTOR
from fusednorm.backends.cpu.kernels.device import exact, pivot_or, reassociated
from fusednorm.backends.cpu.kernels.elements import FILLED, Element
from fusednorm.backends.cpu.kernels.lanes import lanes


@exact
def publish_short(saved, unit, units, numbers):
    """Store a number of each of so many units from ``unit`` on."""
    for u in range(units):
        saved[unit + u] = numbers[u]


@exact
def publish_sums(sums, channels, n, c, planes, ps, qs):
    """Store p and q of planes from channel c of sample n on, which may be those of several samples."""
    start = 0
    while start < planes:
        count, i = min(planes - start, channels - c), 2 * n * channels + c
        for k in range(count):
            sums[i + k], sums[i + channels + k] = ps[start + k], qs[start + k]
        start, n, c = start + count, n + 1, 0


@cache
def widened(element: Element):
    recall = element.recall

    @exact
    def widen(numbers, n, wide):
        """n numbers of the compute dtype in float64."""
        for k in range(n):
            wide[k] = np.float64(recall(numbers, k))

    return widen


@cache
def of_units(element: Element):
    """unit_sums and spread_units: a number per unit from its elements, and a number of each element from its unit."""
    recall, keep, fill, T = element.recall, element.keep, element.fill, element.compute
    vector = lanes(element.dtype)
    run_totals, run_total, keep_vector = vector.run_totals, vector.run_total, vector.keep

    @reassociated
    def total(values, first, n):
        found = T(0)
        for k in range(first, first + n):
            found += recall(values, k)
        return found

    @exact
    def unit_sums(values, first, length, units, sums):
        """The sums of units. Those shorter than a vector are summed in VECTOR lanes, which read behind the last one:
        instance_norm of (34, 1280, 3, 5) in float16 takes 0.25 ms so on two threads, and 0.44 unit by unit."""
        if length >= VECTOR:
            for u in range(units):
                keep(sums, u, total(values, first + u * length, length))
            return
        whole = units - units % VECTOR
        for u in range(0, whole, VECTOR):
            keep_vector(sums, u, run_totals(values, first + u * length, length, length))
        for u in range(whole, units):
            keep(sums, u, run_total(values, first + u * length, length))

    @exact
    def spread_units(numbers, length, units, elements):
        if length <= FILLED:
            for u in range(units):
                fill(elements, u * length, recall(numbers, u))
            return
        k = 0
        for u in range(units):
            number = recall(numbers, u)
            for start in range(0, length, FILLED):
                fill(elements, k + start, number)
            k += length

    return unit_sums, spread_units


@cache
def _finishing(element: Element):
    """The pivots of units from the sums of their elements, and mean and rstd from the sums of deviations."""
    load, recall, keep, nearest, T = element.load, element.recall, element.keep, element.round, element.compute

    @exact
    def divide(x, i, step, sums, units, length):
        for u in range(units):
            keep(sums, u, pivot_or(nearest(recall(sums, u) / T(length)), load(x, i + u * step)))

    @exact
    def finish(pivots, first, second, units, length, eps, means, rstds):
        for u in range(units):
            total = np.float64(recall(first, u))
            shift = total / length
            m2 = np.float64(recall(second, u)) - total * shift
            variance = 0.0 if m2 < 0.0 else m2 / length
            keep(means, u, T(np.float64(recall(pivots, u)) + shift))
            keep(rstds, u, T(1.0 / np.sqrt(variance + eps)))
            keep(second, u, T(variance))

    @exact
    def finish_rms(second, units, length, eps, means, rstds):
        for u in range(units):
            keep(means, u, T(0))
            keep(rstds, u, T(1.0 / np.sqrt(np.float64(recall(second, u)) / length + eps)))

    return divide, finish, finish_rms


@cache
def statistics_of_vectors(element: Element):
    """statistics: mean and rstd of VECTOR units at most, each of one vector or a few, ``step`` apart."""
    (divide, finish, _), recall, vector = _finishing(element), element.recall, lanes(element.dtype)
    load, keep, spread, behind, run_totals = vector.load, vector.keep, vector.spread, vector.behind, vector.run_totals

    @exact
    def head(x, i, step, units, sums):
        for u in range(units):
            keep(sums, u * VECTOR, load(x, i + u * step))

    @exact
    def ends(x, i, step, units, length, sums):
        for u in range(units):
            at = i + u * step
            keep(sums, u * VECTOR, load(x, at) + load(x, at + length - VECTOR))

    @exact
    def deviate(x, i, step, units, length, pivots, sums, squares):
        whole = length - length % VECTOR
        for u in range(units):
            pivot, at = spread(recall(pivots, u)), i + u * step
            deviation = load(x, at) - pivot
            total, square = deviation, deviation * deviation
            for k in range(VECTOR, whole, VECTOR):
                deviation = load(x, at + k) - pivot
                total, square = total + deviation, square + deviation * deviation
            if length > whole:
                deviation = behind(load(x, at + length - VECTOR) - pivot, VECTOR - (length - whole))
                total, square = total + deviation, square + deviation * deviation
            keep(sums, u * VECTOR, total)
            keep(squares, u * VECTOR, square)

    @exact
    def statistics(x, i, step, units, length, eps, sums, squares, pivots, first, second, means, rstds):
        """``second`` gets the variances. The pivot of a unit is the mean of its first vector and, where that is less
        than a quarter of it, of its last: a sixteenth of it at least, as moments.py asks."""
        long = length > 4 * VECTOR
        if long:
            ends(x, i, step, units, length, sums)
        else:
            head(x, i, step, units, sums)
        keep(pivots, 0, run_totals(sums, 0, VECTOR, VECTOR))
        divide(x, i, step, pivots, units, 2 * VECTOR if long else VECTOR)
        deviate(x, i, step, units, length, pivots, sums, squares)
        keep(first, 0, run_totals(sums, 0, VECTOR, VECTOR))
        keep(second, 0, run_totals(squares, 0, VECTOR, VECTOR))
        finish(pivots, first, second, units, length, eps, means, rstds)

    return statistics


@cache
def statistics_of_units(element: Element):
    """statistics: mean and rstd of units, as of rows and planes."""
    load, read, keep = element.load, element.read, element.keep
    (unit_sums, spread_units), (divide, finish, finish_rms) = of_units(element), _finishing(element)

    @exact
    def widen(x, i, n, values):
        for k in range(n):
            keep(values, k, load(x, i + k))

    @exact
    def deviate(x, i, pivots, n, values, squares):
        for k in range(n):
            deviation = load(x, i + k) - read(pivots, k)
            keep(values, k, deviation)
            keep(squares, k, deviation * deviation)

    @exact
    def square(x, i, n, squares):
        for k in range(n):
            value = load(x, i + k)
            keep(squares, k, value * value)

    @exact
    def statistics(x, i, units, length, rms, eps, pivots, spread, values, squares, first, second, means, rstds):
        """mean and rstd of units, as rows.py rounds them, with a unit's mean as its pivot;
        ``second`` gets the variances."""
        n = units * length
        if rms:
            square(x, i, n, squares)
            unit_sums(squares, 0, length, units, second)
            finish_rms(second, units, length, eps, means, rstds)
            return
        widen(x, i, n, values)
        unit_sums(values, 0, length, units, pivots)
        divide(x, i, length, pivots, units, length)
        spread_units(pivots, length, units, spread)
        deviate(x, i, spread, n, values, squares)
        unit_sums(values, 0, length, units, first)
        unit_sums(squares, 0, length, units, second)
        finish(pivots, first, second, units, length, eps, means, rstds)

    return statistics
