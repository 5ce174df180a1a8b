"""Kernels of the channels_first order with units that are planes of one vector or a few.

A plane takes little time beside what begins and ends it, such as the sum over a vector's lanes, a root, the affine of a
channel: these are made of VECTOR planes at once. Where samples touch, planes of several are taken together.
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
    RMS,
    SCRATCH,
    SPANS,
    SPATIAL,
    VECTOR,
    WANT_INPUT_GRAD,
    WANT_VARIANCE,
)
from fusednorm.backends.cpu.kernels.affine import channel_affines, normalized, reduced_count
from fusednorm.backends.cpu.kernels.device import exact
from fusednorm.backends.cpu.kernels.elements import Element
from fusednorm.backends.cpu.kernels.elements import element as accesses
from fusednorm.backends.cpu.kernels.lanes import lanes
from fusednorm.backends.cpu.kernels.mathematics import identity
from fusednorm.backends.cpu.kernels.planes import saved_statistics
from fusednorm.backends.cpu.kernels.short_units import publish_short, publish_sums, statistics_of_vectors, widened


@exact
def units_together(geometry, unit, stop):
    """How many units are taken together from ``unit`` on: of one sample where samples do not touch."""
    units = min(VECTOR // geometry[GROUP_CHANNELS], stop - unit)
    return units if geometry[SPANS] else min(units, geometry[GROUPS] - unit % geometry[GROUPS])


@cache
def _short_output(element: Element, value):
    """The output of planes of one vector or a few, ``step`` apart. An activation gets z of them all, in a loop that is
    long enough for vector code: relu of 16 elements became scalar code."""
    recall, keep, store, T = element.recall, element.keep, element.store, element.compute
    vector, put = lanes(element.dtype), value is identity
    load, store_vector, keep_vector, spread = vector.load, vector.store, vector.keep, vector.spread

    @exact
    def of_units(gains, offsets, rstds, units, products, sums):
        for u in range(units):
            keep(products, u, T(gains[u] * np.float64(recall(rstds, u))))
            keep(sums, u, T(offsets[u]))

    @exact
    def normalize(x, i, y, j, zs, r, length, mean, a, b):
        for start in range(0, length, VECTOR):
            k = min(start, length - VECTOR)
            z = normalized(load(x, i + k) - mean, a, b)
            if put:
                store_vector(y, j + k, z)
            else:
                keep_vector(zs, r + k, z)

    @exact
    def activate(zs, r, y, j, n, alpha):
        for k in range(n):
            store(y, j + k, value(recall(zs, r + k), alpha))

    @exact
    def output(
        x, i, input_step, y, j, output_step, units, length, means, rstds, gains, offsets, products, sums, zs, alpha
    ):  # fmt: skip
        of_units(gains, offsets, rstds, units, products, sums)
        first = 0
        while first < units:
            last = min(first + SCRATCH // length, units)
            for u in range(first, last):
                mean, a, b = spread(recall(means, u)), spread(recall(products, u)), spread(recall(sums, u))
                r = (u - first) * length
                normalize(x, i + u * input_step, y, j + u * output_step, zs, r, length, mean, a, b)
            if not put and output_step == length:
                activate(zs, 0, y, j + first * length, (last - first) * length, alpha)
            elif not put:
                for u in range(first, last):
                    activate(zs, (u - first) * length, y, j + u * output_step, length, alpha)
            first = last

    return output


def build_forward(element: Element, value, pullback):
    """Units start to stop from statistics to output. In one thread (42, 2111, 24) in bfloat16 with relu takes 13 ns a
    plane so, 21 in tiles and 45 plane by plane."""
    statistics, output, affines = (
        statistics_of_vectors(element),
        _short_output(element, value),
        channel_affines(element),
    )
    scratch, wide_scratch, T = element.scratch, accesses("float64").scratch, element.compute

    def forward(
        x, y, mean, rstd, variance, weight, bias, scale, shift, geometry, eps, activation_parameter, start, stop
    ):
        sums, squares, pivots, first, second = scratch(), scratch(), scratch(), scratch(), scratch()
        means, rstds, zs = scratch(), scratch(), scratch()
        gains, offsets, scales, shifts = wide_scratch(), wide_scratch(), wide_scratch(), wide_scratch()
        groups, length, alpha = geometry[GROUPS], geometry[SPATIAL], T(activation_parameter)
        input_sample, input_step = geometry[INPUT_SAMPLE], geometry[INPUT_STEP]
        output_sample, output_step = geometry[OUTPUT_SAMPLE], geometry[OUTPUT_STEP]
        unit = start
        while unit < stop:
            n, c = unit // groups, unit % groups
            units = units_together(geometry, unit, stop)
            i, j = n * input_sample + c * input_step, n * output_sample + c * output_step
            statistics(
                x, i, input_step, units, length, eps, sums, squares, pivots, first, second, means, rstds
            )  # fmt: skip
            publish_short(rstd, unit, units, rstds)
            publish_short(mean, unit, units, means)
            if geometry[WANT_VARIANCE]:
                publish_short(variance, unit, units, second)
            affines(weight, bias, scale, shift, geometry, n, c, units, gains, offsets, scales, shifts)
            output(
                x, i, input_step, y, j, output_step, units, length, means, rstds, gains, offsets, pivots, first, zs,
                alpha,
            )  # fmt: skip
            unit += units

    return forward


@cache
def _plane_gradients(element: Element):
    """lane_sums: dz and dz xhat of a plane, lane by lane; gradient: dx = a dz + c2 xhat + c3. Each makes xhat in its
    loop, see plane_rows.py."""
    vector = lanes(element.dtype)
    load, keep, store, behind = vector.load, vector.keep, vector.store, vector.behind

    @exact
    def lane_sums(grad, g, x, i, length, mean, inverse, ps, qs, place):
        whole = length - length % VECTOR
        dz = load(grad, g)
        p, q = dz, dz * ((load(x, i) - mean) * inverse)
        for k in range(VECTOR, whole, VECTOR):
            dz = load(grad, g + k)
            p, q = p + dz, q + dz * ((load(x, i + k) - mean) * inverse)
        if length > whole:
            k, counted = length - VECTOR, VECTOR - (length - whole)
            dz = load(grad, g + k)
            p = p + behind(dz, counted)
            q = q + behind(dz * ((load(x, i + k) - mean) * inverse), counted)
        keep(ps, place, p)
        keep(qs, place, q)

    @exact
    def gradient(grad, g, x, i, dx, o, length, mean, inverse, a, c2, c3):
        for start in range(0, length, VECTOR):
            k = min(start, length - VECTOR)
            xhat = (load(x, i + k) - mean) * inverse
            store(dx, o + k, a * load(grad, g + k) + (c2 * xhat + c3))

    return lane_sums, gradient


def build_backward(element: Element, value, pullback, grouped=False):
    """Units start to stop without an activation: p and q of each plane, then the input's gradient. ``grouped``: of a
    few planes each."""
    (lane_sums, gradient), vector = _plane_gradients(element), lanes(element.dtype)
    affines, saved = channel_affines(element), saved_statistics(element)
    scratch, wide_scratch, widen, T = element.scratch, accesses("float64").scratch, widened(element), element.compute
    keep_vector, spread, run_totals = vector.keep, vector.spread, vector.run_totals

    def backward(
        grad, x, dx, given_mean, given_mean_dtype, given_rstd, given_rstd_dtype, weight, bias, scale, shift, sums,
        geometry, start, stop,
    ):  # fmt: skip
        p_lanes, q_lanes, totals = scratch(), scratch(), scratch()
        gains, offsets, scales, shifts = wide_scratch(), wide_scratch(), wide_scratch(), wide_scratch()
        means, rstds, ps, qs = wide_scratch(), wide_scratch(), wide_scratch(), wide_scratch()
        mean_ps, mean_qs = scales, shifts  # whose numbers the affines have by then
        groups, size, length = geometry[GROUPS], geometry[GROUP_CHANNELS] if grouped else 1, geometry[SPATIAL]
        input_step, grad_step, output_step = geometry[INPUT_STEP], geometry[GRAD_STEP], geometry[OUTPUT_STEP]
        share = 1.0 / reduced_count(geometry)
        unit = start
        while unit < stop:
            n, c, units = unit // groups, unit % groups * size, units_together(geometry, unit, stop)
            planes = units * size
            i = n * geometry[INPUT_SAMPLE] + c * input_step
            g = n * geometry[GRAD_SAMPLE] + c * grad_step
            o = n * geometry[OUTPUT_SAMPLE] + c * output_step
            for u in range(units):
                mean, inverse = saved(given_mean, given_mean_dtype, given_rstd, given_rstd_dtype, geometry, unit + u)
                for k in range(u * size, u * size + size):
                    means[k], rstds[k] = mean, inverse
            affines(weight, bias, scale, shift, geometry, n, c, planes, gains, offsets, scales, shifts)
            for k in range(planes):
                lane_sums(
                    grad, g + k * grad_step, x, i + k * input_step, length, spread(T(means[k])), spread(T(rstds[k])),
                    p_lanes, q_lanes, k * VECTOR,
                )  # fmt: skip
            keep_vector(totals, 0, run_totals(p_lanes, 0, VECTOR, VECTOR))
            widen(totals, planes, ps)
            keep_vector(totals, 0, run_totals(q_lanes, 0, VECTOR, VECTOR))
            widen(totals, planes, qs)
            publish_sums(sums, groups * size, n, c, planes, ps, qs)
            for k in range(planes):
                mean_ps[k], mean_qs[k] = gains[k] * ps[k], gains[k] * qs[k]
            for u in range(units if grouped else 0):
                total_p, total_q = 0.0, 0.0
                for k in range(u * size, u * size + size):
                    total_p, total_q = total_p + mean_ps[k], total_q + mean_qs[k]
                for k in range(u * size, u * size + size):
                    mean_ps[k], mean_qs[k] = total_p, total_q
            for k in range(planes if geometry[WANT_INPUT_GRAD] else 0):
                a, place = T(gains[k] * rstds[k]), o + k * output_step
                factor = -rstds[k] * share
                c2, c3 = T(factor * mean_qs[k]), T(0.0 if geometry[RMS] else factor * mean_ps[k])
                gradient(
                    grad, g + k * grad_step, x, i + k * input_step, dx, place, length, spread(T(means[k])),
                    spread(T(rstds[k])), spread(a), spread(c2), spread(c3),
                )  # fmt: skip
            unit += units

    return backward


BUILDERS = {
    "forward": build_forward,
    "backward": build_backward,
    "backward_grouped": partial(build_backward, grouped=True),
}
