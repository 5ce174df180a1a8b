"""The backward of rows of short groups, up to TOGETHER of them at a time, and of short planes seen as such rows.

rows.py takes each group of each row from its sums to its gradient, which waits for the sums and their divisions. Here
the sums of sixteen groups are made before their gradients, and loops run by vectors (lanes.py), but for those that make
an activation's dz, which is kept: group_norm(32) of (273, 1280) in float32 takes 200 us in one thread, not 308.

Of channels_first a row is a sample, and each of its elements a channel: ``spread`` gives all elements of a plane its
weight and bias, and ``plane_gradients`` sums what the backward has made for them.
"""

from __future__ import annotations

from functools import cache, partial

import numpy as np

from fusednorm.backends.cpu.geometry import (
    BIAS_DTYPE,
    GAIN_DTYPE,
    GRAD_SAMPLE,
    GRAD_STEP,
    GROUP_CHANNELS,
    GROUPS,
    INPUT_SAMPLE,
    INPUT_STEP,
    KEPT_WORKER,
    MODULATION,
    OFFSET_DTYPE,
    OUTPUT_SAMPLE,
    OUTPUT_STEP,
    PARTS,
    PIECE,
    PIECES,
    PLANE,
    PLANE_STEP,
    RMS,
    ROWS_FLUSHED,
    SCRATCH,
    SPATIAL,
    SUMMED,
    VECTOR,
    WANT_INPUT_GRAD,
    WEIGHT_DTYPE,
)
from fusednorm.backends.cpu.kernels.affine import normalized
from fusednorm.backends.cpu.kernels.device import exact
from fusednorm.backends.cpu.kernels.elements import Element, places
from fusednorm.backends.cpu.kernels.elements import element as accesses
from fusednorm.backends.cpu.kernels.lanes import lanes
from fusednorm.backends.cpu.kernels.mathematics import identity_pullback
from fusednorm.backends.cpu.kernels.moments import TOGETHER
from fusednorm.backends.cpu.kernels.operands import narrow, number, rounded_number, widened
from fusednorm.backends.cpu.kernels.plane_rows import given_vector, kept_length, kept_place
from fusednorm.backends.cpu.kernels.rows import begin_of, parameters_of, scaled, segment_summer

IN_CACHE = 1024  # elements of the groups that are taken together at most, so that the L1 cache has them twice


@cache
def _row_keeper(element: Element, pullback):
    load, read, keep = element.load, element.read, element.keep

    @exact
    def keep_vector(grad, g, x, i, kept, r, centre, inverse, gains, offsets, c, alpha):
        for k in range(VECTOR):
            a = scaled(read(gains, c + k), inverse)
            z = normalized(load(x, i + k) - centre, a, read(offsets, c + k))
            keep(kept, r + k, pullback(load(grad, g + k), z, alpha))

    @exact
    def keep_row(grad, g, x, i, kept, r, n, centre, inverse, gains, offsets, c, alpha):
        """dz of one group of one row, put into ``kept`` from r on."""
        for start in range(0, n, VECTOR):
            k = min(start, n - VECTOR)
            at = r + kept_place(start, k, n)
            keep_vector(grad, g + k, x, i + k, kept, at, centre, inverse, gains, offsets, c + k, alpha)

    return keep_row


@cache
def _group_sums(element: Element, kept: bool, accumulate: bool):
    given, vector, T = given_vector(element, kept), lanes(element.dtype), element.compute
    load, read, spread, behind, totals = vector.load, vector.read, vector.spread, vector.behind, vector.totals
    add_first, add_second = vector.add_first, vector.add_second

    @exact
    def group_sums(grad, g, x, i, keep, r, n, centre, inverse, gains, c, sums, ps, qs):
        """P = sum A dz and Q = sum A dz xhat of one group of one row; with ``accumulate`` dz and dz xhat are added to
        ``sums`` too, from ``ps`` and ``qs`` on."""
        centres, inverses = spread(centre), spread(inverse)
        p, q = spread(T(0)), spread(T(0))
        whole = n - n % VECTOR
        if n > whole:
            k = n - VECTOR
            dz = behind(given(grad, g + k, keep, r + kept_place(whole, k, n)), whole - k)
            product = behind(dz * ((load(x, i + k) - centres) * inverses), whole - k)
            if accumulate:
                add_first(sums, ps + k, dz)
                add_second(sums, qs + k, product)
            gain = read(gains, c + k)
            p, q = gain * dz, gain * product
        for k in range(0, whole, VECTOR):
            dz = given(grad, g + k, keep, r + k)
            product = dz * ((load(x, i + k) - centres) * inverses)
            if accumulate:
                add_first(sums, ps + k, dz)
                add_second(sums, qs + k, product)
            gain = read(gains, c + k)
            p = p + gain * dz
            q = q + gain * product
        return totals(p, q)

    return group_sums


@cache
def _gradient_row(element: Element, kept: bool):
    given, vector = given_vector(element, kept), lanes(element.dtype)
    load, read, store, spread = vector.load, vector.read, vector.store, vector.spread

    @exact
    def gradient_row(grad, g, x, i, dx, o, keep, r, n, centre, inverse, gains, c, mean_p, mean_q):
        """dx = rstd (A dz - (P + xhat Q) / K) of one group of one row."""
        centres, inverses, p, q = spread(centre), spread(inverse), spread(mean_p), spread(mean_q)
        for start in range(0, n, VECTOR):
            k = min(start, n - VECTOR)
            dz = given(grad, g + k, keep, r + kept_place(start, k, n))
            xhat = (load(x, i + k) - centres) * inverses
            store(dx, o + k, inverses * (read(gains, c + k) * dz - (p + xhat * q)))

    return gradient_row


def build_backward(element: Element, value, pullback, accumulate=True):
    """The input's gradient, and with ``accumulate`` the parameters' of segments of PIECE rows, as rows.py makes them. A
    task is one of the PARTS of a segment, whole groups of all its rows."""
    T, rounded, as_read, scratch = element.compute, rounded_number(element), widened(element), element.scratch
    keeps = pullback is not identity_pullback
    keep_row, group_sums = _row_keeper(element, pullback), _group_sums(element, keeps, accumulate)
    gradient_row = _gradient_row(element, keeps)

    @exact
    def clear(running, partials, first, stop, flushed):
        for c in range(first, stop):
            running[c] = T(0)
        for c in range(first, stop if flushed else first):
            partials[c] = 0.0

    @exact
    def flush(running, partials, first, stop):
        for c in range(first, stop):
            partials[c] += np.float64(running[c])
            running[c] = T(0)

    def backward(
        grad, x, dx, given_mean, given_mean_dtype, given_rstd, given_rstd_dtype, weight, bias, wide_weight, wide_bias,
        running, partials, kept, geometry, activation_parameter, worker, start, stop,
    ):  # fmt: skip
        gains = as_read(weight, geometry[GAIN_DTYPE], wide_weight)
        offsets = as_read(bias, geometry[OFFSET_DTYPE], wide_bias)
        groups, length = geometry[GROUPS], geometry[GROUP_CHANNELS]
        parts, positions = geometry[PARTS], geometry[SPATIAL]
        # Read once: for all that the compiler knows, a store could change them.
        input_sample, input_step = geometry[INPUT_SAMPLE], geometry[INPUT_STEP]
        output_sample, output_step = geometry[OUTPUT_SAMPLE], geometry[OUTPUT_STEP]
        grad_sample, grad_step = geometry[GRAD_SAMPLE], geometry[GRAD_STEP]
        channels, rms, alpha, kept_step = groups * length, geometry[RMS], T(activation_parameter), kept_length(length)
        most = min(TOGETHER, max(1, IN_CACHE // length))
        slot, flushed = worker * geometry[KEPT_WORKER], geometry[PIECE] > ROWS_FLUSHED
        centres, inverses, mean_ps, mean_qs = scratch(), scratch(), scratch(), scratch()
        gs, xs, os, cs = places(), places(), places(), places()
        for task in range(start, stop):
            segment, part = task // parts, task % parts
            # ``running`` sums the segment's last rows in the compute dtype; ``partials`` all rows before them, if any.
            ps, qs = 2 * segment * channels, (2 * segment + 1) * channels
            together, piece = segment // geometry[PIECES], segment % geometry[PIECES]
            begin = together * geometry[SUMMED] + piece * geometry[PIECE]
            last = min(begin + geometry[PIECE], (together + 1) * geometry[SUMMED])
            first_group, groups_of_part = part * groups // parts, (part + 1) * groups // parts - part * groups // parts
            c0, c1 = first_group * length, (first_group + groups_of_part) * length
            if accumulate:
                clear(running, partials, ps + c0, ps + c1, flushed)
                clear(running, partials, qs + c0, qs + c1, flushed)
            place = parameters_of(positions, geometry[MODULATION], begin)  # that of all rows of the segment
            n, c, g, i, o, unit = begin, c0, 0, 0, 0, 0
            for block in range(0, (last - begin) * groups_of_part, most):
                units = min(most, (last - begin) * groups_of_part - block)
                for u in range(units):
                    if c == c0:
                        g = begin_of(positions, n, grad_sample, grad_step)
                        i = begin_of(positions, n, input_sample, input_step)
                        o = begin_of(positions, n, output_sample, output_step)
                        unit = n * groups + first_group
                    gs[u], xs[u], os[u], cs[u] = g + c, i + c, o + c, c
                    centres[u] = T(0) if rms else T(rounded(given_mean, unit, given_mean_dtype))
                    inverses[u] = T(rounded(given_rstd, unit, given_rstd_dtype))
                    if keeps:
                        keep_row(
                            grad, g + c, x, i + c, kept, slot + u * kept_step, length, centres[u], inverses[u], gains,
                            offsets, place + c, alpha,
                        )  # fmt: skip
                    mean_ps[u], mean_qs[u] = group_sums(
                        grad, g + c, x, i + c, kept, slot + u * kept_step, length, centres[u], inverses[u], gains,
                        place + c, running, ps + c, qs + c,
                    )  # fmt: skip
                    unit, c = unit + 1, c + length
                    if c == c1:
                        n, c = n + 1, c0
                        if accumulate and flushed and ((n - begin) % ROWS_FLUSHED == 0 or n == last):
                            flush(running, partials, ps + c0, ps + c1)
                            flush(running, partials, qs + c0, qs + c1)
                for u in range(units):
                    mean_ps[u] = T(0) if rms else mean_ps[u] / T(length)
                    mean_qs[u] = mean_qs[u] / T(length)
                for u in range(units if geometry[WANT_INPUT_GRAD] else 0):
                    gradient_row(
                        grad, gs[u], x, xs[u], dx, os[u], kept, slot + u * kept_step, length, centres[u], inverses[u],
                        gains, place + cs[u], mean_ps[u], mean_qs[u],
                    )  # fmt: skip

    return backward


@exact
def first_of_plane(geometry, c):
    """The place of a plane's first element in a row."""
    return c * geometry[PLANE] if geometry[PLANE_STEP] == 1 else c


def build_spread(element: Element, value, pullback):
    """Weight and bias of planes start to stop for each element, in the compute dtype."""
    T = element.compute

    @exact
    def spread_operand(operand, dtype, wide, geometry, start, stop):
        length, step = geometry[PLANE], geometry[PLANE_STEP]
        for c in range(start, stop if dtype else start):
            spread_number, first = T(number(operand, c, dtype)), first_of_plane(geometry, c)
            for k in range(length):
                wide[first + k * step] = spread_number

    def spread(weight, bias, wide_weight, wide_bias, geometry, start, stop):
        spread_operand(weight, geometry[WEIGHT_DTYPE], wide_weight, geometry, start, stop)
        spread_operand(bias, geometry[BIAS_DTYPE], wide_bias, geometry, start, stop)

    return spread


def build_plane_gradients(element: Element, value, pullback):
    """The gradients of weight and bias of planes start to stop, from those of their elements."""
    sum_segments, scratch = segment_summer(element), accesses("float64").scratch

    def plane_gradients(partials, running, grad_weight, grad_bias, geometry, start, stop):
        channels, totals = geometry[GROUPS] * geometry[GROUP_CHANNELS], scratch()
        length, step = geometry[PLANE], geometry[PLANE_STEP]
        for place in range(2):  # one loop for both: the code takes half as long to compile
            gradient, dtype = grad_bias, geometry[BIAS_DTYPE]
            if place == 1:
                gradient, dtype = grad_weight, geometry[WEIGHT_DTYPE]
            if step == 1:
                sum_segments(partials, running, place * channels, geometry, start * length, stop * length)
            for k in range(0 if step == 1 else length):
                sum_segments(partials, running, place * channels, geometry, k * step + start, k * step + stop)
            for begin in range(start, stop, SCRATCH):
                width = min(SCRATCH, stop - begin)
                for c in range(width):
                    first, totals[c] = place * channels + first_of_plane(geometry, begin + c), 0.0
                    for k in range(length):
                        totals[c] += partials[first + k * step]
                narrow(totals, -begin, gradient, dtype, begin, begin + width)

    return plane_gradients


BUILDERS = {
    "backward": build_backward,
    "backward_data": partial(build_backward, accumulate=False),
    "spread": build_spread,
    "plane_gradients": build_plane_gradients,
}
