"""Kernels of the channels_first order with units that are planes of one vector or a few, or those of a channel.

A plane takes little time beside what begins and ends it, such as the sum over a vector's lanes, a root, the affine of a
channel: these are made of VECTOR planes at once. Where samples touch, planes of several are taken together. An
activation gets all of them in one loop, that is long enough for vector code: relu of 16 elements became scalar code.
"""

from __future__ import annotations

from functools import cache, partial

import numpy as np

from fusednorm.backends.cpu.geometry import (
    BIAS_DTYPE,
    GRAD_SAMPLE,
    GRAD_STEP,
    GROUP_CHANNELS,
    GROUPS,
    INPUT_SAMPLE,
    INPUT_STEP,
    KEPT_WORKER,
    OUTPUT_SAMPLE,
    OUTPUT_STEP,
    RMS,
    SAMPLES,
    SCRATCH,
    SPANS,
    SPATIAL,
    VECTOR,
    WANT_INPUT_GRAD,
    WANT_VARIANCE,
    WEIGHT_DTYPE,
)
from fusednorm.backends.cpu.kernels.affine import channel_affines, normalized, put, reduced_count
from fusednorm.backends.cpu.kernels.device import exact
from fusednorm.backends.cpu.kernels.elements import Element, prefetch
from fusednorm.backends.cpu.kernels.elements import element as accesses
from fusednorm.backends.cpu.kernels.lanes import lanes
from fusednorm.backends.cpu.kernels.mathematics import identity, identity_pullback
from fusednorm.backends.cpu.kernels.plane_rows import SUMMED, given_vector, kept_length
from fusednorm.backends.cpu.kernels.planes import saved_statistics
from fusednorm.backends.cpu.kernels.short_units import publish_short, publish_sums, statistics_of_vectors, widened


@exact
def units_together(geometry, unit, stop):
    """How many units are taken together from ``unit`` on: of one sample where samples do not touch."""
    units = min(VECTOR // geometry[GROUP_CHANNELS], stop - unit)
    return units if geometry[SPANS] else min(units, geometry[GROUPS] - unit % geometry[GROUPS])


@cache
def _short_output(element: Element, value):
    """The output of planes of one vector or a few, ``step`` apart."""
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
def _plane_products(element: Element, pullback):
    """keep_products: grad_output and z of a plane, in whole vectors of ``kept``; differentiate: dz in place of z, of
    all planes."""
    recall, keep, vector = element.recall, element.keep, lanes(element.dtype)
    load, keep_vector = vector.load, vector.keep

    @exact
    def keep_products(grad, g, x, i, length, mean, a, b, kept, grads, zs):
        for start in range(0, length, VECTOR):
            k = min(start, length - VECTOR)
            keep_vector(kept, zs + start, normalized(load(x, i + k) - mean, a, b))
            keep_vector(kept, grads + start, load(grad, g + k))

    @exact
    def differentiate(kept, grads, zs, n, alpha):
        for k in range(n):
            keep(kept, zs + k, pullback(recall(kept, grads + k), recall(kept, zs + k), alpha))

    return keep_products, differentiate


@cache
def _plane_gradients(element: Element, kept: bool, fetches: bool):
    """lane_sums: dz and dz xhat of a plane, lane by lane, added to p and q; gradient: dx = a dz + c2 xhat + c3. Each
    makes xhat in its loop, see plane_rows.py. dz was kept in whole vectors from r on, or is grad_output.

    ``fetches``: they fetch what the next planes need, whose first places are ``ahead`` of these: a processor's own
    window is too short for that, and memory would rest in the second pass. On an AMD processor (33, 960, 8, 12) in
    float32 takes 1.7 ms in one thread so, and 2.5."""
    vector, given = lanes(element.dtype), given_vector(element, kept)
    load, keep, store, behind = vector.load, vector.keep, vector.store, vector.behind

    @exact
    def lane_sums(grad, g, x, i, keeper, r, length, mean, inverse, p, q, ps, qs, place, ahead):
        whole = length - length % VECTOR
        for k in range(0, whole, VECTOR):
            if fetches:
                prefetch(x, i + ahead + k)
            dz = given(grad, g + k, keeper, r + k)
            p, q = p + dz, q + dz * ((load(x, i + k) - mean) * inverse)
        if length > whole:
            k, counted = length - VECTOR, VECTOR - (length - whole)
            dz = given(grad, g + k, keeper, r + whole)
            p = p + behind(dz, counted)
            q = q + behind(dz * ((load(x, i + k) - mean) * inverse), counted)
        keep(ps, place, p)
        keep(qs, place, q)

    @exact
    def gradient(grad, g, x, i, keeper, r, dx, o, length, mean, inverse, a, c2, c3, grad_ahead, ahead):
        for start in range(0, length, VECTOR):
            k = min(start, length - VECTOR)
            if fetches:
                prefetch(grad, g + grad_ahead + start)
                prefetch(dx, o + ahead + start)
            xhat = (load(x, i + k) - mean) * inverse
            store(dx, o + k, a * given(grad, g + k, keeper, r + start) + (c2 * xhat + c3))

    return lane_sums, gradient


def build_backward(element: Element, value, pullback, grouped=False):
    """Units start to stop: p and q of each plane, then the input's gradient. ``grouped``: of a few planes each. dz of
    an activation is kept in between: ``kept`` has room for grad_output and dz of VECTOR planes per worker."""
    keeps = pullback is not identity_pullback
    (keep_products, differentiate), vector = _plane_products(element, pullback), lanes(element.dtype)
    lane_sums, gradient = _plane_gradients(element, keeps, True)
    affines, saved = channel_affines(element), saved_statistics(element)
    scratch, wide_scratch, widen, T = element.scratch, accesses("float64").scratch, widened(element), element.compute
    keep_vector, spread, run_totals = vector.keep, vector.spread, vector.run_totals

    def backward(
        grad, x, dx, given_mean, given_mean_dtype, given_rstd, given_rstd_dtype, weight, bias, scale, shift, sums,
        kept, geometry, activation_parameter, worker, start, stop,
    ):  # fmt: skip
        p_lanes, q_lanes, totals = scratch(), scratch(), scratch()
        gains, offsets, scales, shifts = wide_scratch(), wide_scratch(), wide_scratch(), wide_scratch()
        means, rstds, ps, qs = wide_scratch(), wide_scratch(), wide_scratch(), wide_scratch()
        mean_ps, mean_qs = scales, shifts  # whose numbers the affines have by then
        groups, size, length = geometry[GROUPS], geometry[GROUP_CHANNELS] if grouped else 1, geometry[SPATIAL]
        input_step, grad_step, output_step = geometry[INPUT_STEP], geometry[GRAD_STEP], geometry[OUTPUT_STEP]
        grads, plane = worker * geometry[KEPT_WORKER], kept_length(length)
        zs = grads + VECTOR * plane
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
            for k in range(planes if keeps else 0):
                keep_products(
                    grad, g + k * grad_step, x, i + k * input_step, length, spread(T(means[k])),
                    spread(T(gains[k] * rstds[k])), spread(T(offsets[k])), kept, grads + k * plane, zs + k * plane,
                )  # fmt: skip
            if keeps:
                differentiate(kept, grads, zs, planes * plane, T(activation_parameter))
            for k in range(planes):
                lane_sums(
                    grad, g + k * grad_step, x, i + k * input_step, kept, zs + k * plane, length, spread(T(means[k])),
                    spread(T(rstds[k])), spread(T(0)), spread(T(0)), p_lanes, q_lanes, k * VECTOR, planes * input_step,
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
                    grad, g + k * grad_step, x, i + k * input_step, kept, zs + k * plane, dx, place, length,
                    spread(T(means[k])), spread(T(rstds[k])), spread(a), spread(c2), spread(c3),
                    planes * grad_step, planes * output_step,
                )  # fmt: skip
            unit += units

    return backward


@cache
def _batch_sums(element: Element):
    """begin: no sums; finish: the sums of the lanes of channels, added to ps and qs, and no sums again."""
    vector, recall, T = lanes(element.dtype), element.recall, element.compute
    keep_vector, spread, run_totals = vector.keep, vector.spread, vector.run_totals

    @exact
    def begin(p_lanes, q_lanes):
        for k in range(0, VECTOR * VECTOR, VECTOR):
            keep_vector(p_lanes, k, spread(T(0)))
            keep_vector(q_lanes, k, spread(T(0)))

    @exact
    def add(lane_sums, totals, units, sums):
        keep_vector(totals, 0, run_totals(lane_sums, 0, VECTOR, VECTOR))
        for k in range(units):
            sums[k] += recall(totals, k)

    @exact
    def finish(p_lanes, q_lanes, totals, units, ps, qs):
        add(p_lanes, totals, units, ps)
        add(q_lanes, totals, units, qs)
        begin(p_lanes, q_lanes)

    return begin, finish


def build_batch_backward(element: Element, value, pullback):
    """Channels start to stop of batch_norm: p and q, which are the gradients of bias and weight, then the input's. dz
    of an activation is kept in between: ``kept`` has room for grad_output of VECTOR planes per worker, and for dz of
    those of all samples."""
    keeps = pullback is not identity_pullback
    (keep_products, differentiate), vector = _plane_products(element, pullback), lanes(element.dtype)
    (lane_sums, gradient), (begin, finish) = _plane_gradients(element, keeps, False), _batch_sums(element)
    affines, saved = channel_affines(element), saved_statistics(element)
    scratch, wide_scratch, T = element.scratch, accesses("float64").scratch, element.compute
    recall_vector, spread = vector.recall, vector.spread

    def backward(
        grad, x, dx, given_mean, given_mean_dtype, given_rstd, given_rstd_dtype, weight, bias, scale, shift, kept,
        grad_weight, grad_bias, geometry, activation_parameter, worker, start, stop,
    ):  # fmt: skip
        p_lanes, q_lanes, totals = scratch(), scratch(), scratch()
        gains, offsets, scales, shifts = wide_scratch(), wide_scratch(), wide_scratch(), wide_scratch()
        means, rstds, ps, qs = wide_scratch(), wide_scratch(), wide_scratch(), wide_scratch()
        length, samples, plane = geometry[SPATIAL], geometry[SAMPLES], kept_length(geometry[SPATIAL])
        input_step, grad_step, output_step = geometry[INPUT_STEP], geometry[GRAD_STEP], geometry[OUTPUT_STEP]
        grads = worker * geometry[KEPT_WORKER]
        dzs = grads + VECTOR * plane
        share = 1.0 / reduced_count(geometry)
        for c in range(start, stop, VECTOR):
            units = min(VECTOR, stop - c)
            for k in range(units):
                means[k], rstds[k] = saved(given_mean, given_mean_dtype, given_rstd, given_rstd_dtype, geometry, c + k)
                ps[k], qs[k] = 0.0, 0.0
            affines(weight, bias, scale, shift, geometry, 0, c, units, gains, offsets, scales, shifts)
            begin(p_lanes, q_lanes)
            counted = 0
            for n in range(samples):
                i, g = n * geometry[INPUT_SAMPLE] + c * input_step, n * geometry[GRAD_SAMPLE] + c * grad_step
                r = dzs + n * VECTOR * plane
                for k in range(units if keeps else 0):
                    keep_products(
                        grad, g + k * grad_step, x, i + k * input_step, length, spread(T(means[k])),
                        spread(T(gains[k] * rstds[k])), spread(T(offsets[k])), kept, grads + k * plane, r + k * plane,
                    )  # fmt: skip
                if keeps:
                    differentiate(kept, grads, r, units * plane, T(activation_parameter))
                for k in range(units):
                    lane_sums(
                        grad, g + k * grad_step, x, i + k * input_step, kept, r + k * plane, length,
                        spread(T(means[k])), spread(T(rstds[k])), recall_vector(p_lanes, k * VECTOR),
                        recall_vector(q_lanes, k * VECTOR), p_lanes, q_lanes, k * VECTOR, 0,
                    )  # fmt: skip
                counted += plane
                if counted + plane > SUMMED:
                    finish(p_lanes, q_lanes, totals, units, ps, qs)
                    counted = 0
            finish(p_lanes, q_lanes, totals, units, ps, qs)
            put(grad_bias, c, geometry[BIAS_DTYPE], ps, 0, units)
            put(grad_weight, c, geometry[WEIGHT_DTYPE], qs, 0, units)
            for n in range(samples if geometry[WANT_INPUT_GRAD] else 0):
                i, g = n * geometry[INPUT_SAMPLE] + c * input_step, n * geometry[GRAD_SAMPLE] + c * grad_step
                o, r = n * geometry[OUTPUT_SAMPLE] + c * output_step, dzs + n * VECTOR * plane
                for k in range(units):
                    a, factor = gains[k] * rstds[k], -gains[k] * rstds[k] * share
                    gradient(
                        grad, g + k * grad_step, x, i + k * input_step, kept, r + k * plane, dx, o + k * output_step,
                        length, spread(T(means[k])), spread(T(rstds[k])), spread(T(a)), spread(T(factor * qs[k])),
                        spread(T(factor * ps[k])), 0, 0,
                    )  # fmt: skip

    return backward


BUILDERS = {
    "forward": build_forward,
    "backward": build_backward,
    "backward_grouped": partial(build_backward, grouped=True),
    "backward_batch": build_batch_backward,
}
