"""s = x + gate pre, a row at a time, for the forwards that add before they normalize; and planes with their sums."""

from __future__ import annotations

from functools import cache, partial

from fusednorm.backends.cpu.geometry import (
    GATE_ROWS,
    GROUP_CHANNELS,
    GROUPS,
    INPUT_SAMPLE,
    INPUT_STEP,
    OUTPUT_SAMPLE,
    OUTPUT_STEP,
    POST_SAMPLE,
    POST_STEP,
    PRE_SAMPLE,
    PRE_STEP,
    RMS,
    SPATIAL,
    TOTAL_ROW,
    TOTAL_SAMPLE,
    TOTAL_STEP,
    TOTAL_WORKER,
)
from fusednorm.backends.cpu.kernels.affine import affine, normalized, publish
from fusednorm.backends.cpu.kernels.device import exact, span
from fusednorm.backends.cpu.kernels.elements import Element
from fusednorm.backends.cpu.kernels.moments import merge, moments
from fusednorm.backends.cpu.kernels.planes import locate, locate_piece, rows_per_unit
from fusednorm.backends.cpu.kernels.variants import summed


@cache
def add_row(element: Element):
    load, read, put, T = element.load, element.read, element.put_total, element.compute

    @exact
    def add(x, i, pre, p, gates, q, gated, per_element, total, t, n):
        """total = x + gate pre, rounded to the input's dtype."""
        gate = read(gates, q) if gated else T(1)
        for part in range(2):
            start, stop = span(part, n)
            if per_element:
                for k in range(start, stop):
                    put(total, t + k, load(x, i + k) + read(gates, q + k) * load(pre, p + k))
            else:
                for k in range(start, stop):
                    put(total, t + k, load(x, i + k) + gate * load(pre, p + k))

    return add


@cache
def sum_plane(element: Element, by_channel: bool):
    """s of a row of one channel of one sample, whose gate is number q. ``by_channel``: that number is what is added."""
    load, read, put, T, add = element.load, element.read, element.put_total, element.compute, add_row(element)

    @exact
    def shift(x, i, pre, p, numbers, q, gated, total, t, n):
        number = T(read(numbers, q))
        for part in range(2):
            start, stop = span(part, n)
            for k in range(start, stop):
                put(total, t + k, load(x, i + k) + number)

    @exact
    def gate(x, i, pre, p, gates, q, gated, total, t, n):
        add(x, i, pre, p, gates, q, gated, False, total, t, n)

    return shift if by_channel else gate


@cache
def _apply_row(element: Element, value, adds_before: bool, adds_behind: bool):
    load, load_post, store, T = element.load, element.load, element.store, element.compute
    if adds_before:
        load = element.load_total

    @exact
    def apply_row(x, i, y, j, post, p, n, mean, rstd, gain, offset, activation_parameter):
        """y = value(A (x - mean) rstd + B + post) of one row."""
        centre, a, b = T(mean), T(gain * rstd), T(offset)
        alpha = T(activation_parameter)
        for part in range(2):
            start, stop = span(part, n)
            for k in range(start, stop):
                z = normalized(load(x, i + k) - centre, a, b)
                if adds_behind:
                    z += load_post(post, p + k)
                store(y, j + k, value(z, alpha))

    return apply_row


def build_forward(element: Element, value, pullback, adds_before=False, adds_behind=False, by_channel=False):
    """Units start to stop of channels_first, from statistics to output; with ``adds_before`` of s, which ``total``
    gets, and with ``adds_behind`` of z + post_add. ``by_channel``: ``pre_gate`` has all that is added, a number for a
    plane."""
    source = element._replace(load=element.load_total) if adds_before else element
    row_moments, keep, channel_affine = moments(source), publish(element), affine(element)
    sum_row = sum_plane(element, by_channel)
    apply_row = _apply_row(element, value, adds_before, adds_behind)

    def forward(
        x, y, mean, rstd, variance, weight, bias, scale, shift, total, pre_add, pre_gate, post_add, geometry, eps,
        activation_parameter, worker, start, stop,
    ):  # fmt: skip
        length, channels = geometry[SPATIAL], geometry[GROUPS] * geometry[GROUP_CHANNELS]
        first = worker * geometry[TOTAL_WORKER]
        for unit in range(start, stop):
            count, centre, m2 = 0, 0.0, 0.0
            for row in range(rows_per_unit(geometry)):
                n, c = locate(geometry, unit, row)
                whole, i = x, n * geometry[INPUT_SAMPLE] + c * geometry[INPUT_STEP]
                if adds_before:
                    t = first + row * geometry[TOTAL_ROW] + n * geometry[TOTAL_SAMPLE] + c * geometry[TOTAL_STEP]
                    p = n * geometry[PRE_SAMPLE] + c * geometry[PRE_STEP]
                    sum_row(x, i, pre_add, p, pre_gate, n * channels + c, geometry[GATE_ROWS] > 0, total, t, length)
                    whole, i = total, t
                row_mean, row_m2 = row_moments(whole, i, length, geometry[RMS])
                count, centre, m2 = merge(count, centre, m2, length, row_mean, row_m2)
            centre, inverse = keep(mean, rstd, variance, geometry, eps, unit, centre, m2)
            for row in range(rows_per_unit(geometry)):
                n, c = locate(geometry, unit, row)
                whole, i = x, n * geometry[INPUT_SAMPLE] + c * geometry[INPUT_STEP]
                if adds_before:
                    t = first + row * geometry[TOTAL_ROW] + n * geometry[TOTAL_SAMPLE] + c * geometry[TOTAL_STEP]
                    whole, i = total, t
                gain, offset = channel_affine(weight, bias, scale, shift, geometry, n, c)
                apply_row(
                    whole, i, y, n * geometry[OUTPUT_SAMPLE] + c * geometry[OUTPUT_STEP],
                    post_add, n * geometry[POST_SAMPLE] + c * geometry[POST_STEP],
                    length, centre, inverse, gain, offset, activation_parameter,
                )  # fmt: skip

    return forward


def build_moments(element: Element, value, pullback, by_channel=False):
    """s of pieces start to stop, and their statistics (mean, M2)."""
    piece_moments = moments(element._replace(load=element.load_total))
    sum_row = sum_plane(element, by_channel)

    def moments_of_pieces(x, total, pre_add, pre_gate, partials, geometry, start, stop):
        channels = geometry[GROUPS] * geometry[GROUP_CHANNELS]
        for task in range(start, stop):
            unit, row, first, length = locate_piece(geometry, task)
            n, c = locate(geometry, unit, row)
            i = n * geometry[INPUT_SAMPLE] + c * geometry[INPUT_STEP] + first
            p = n * geometry[PRE_SAMPLE] + c * geometry[PRE_STEP] + first
            t = n * geometry[TOTAL_SAMPLE] + c * geometry[TOTAL_STEP] + first
            sum_row(x, i, pre_add, p, pre_gate, n * channels + c, geometry[GATE_ROWS] > 0, total, t, length)
            partials[2 * task], partials[2 * task + 1] = piece_moments(total, t, length, geometry[RMS])

    return moments_of_pieces


def build_apply(
    element: Element, value, pullback, adds_before=False, adds_behind=False, by_channel=False, makes_sum=False
):
    """The output of pieces start to stop of channels_first by finished statistics; with ``makes_sum`` of s that is made
    first, as in a forward."""
    sum_row, channel_affine = sum_plane(element, by_channel), affine(element)
    apply_row = _apply_row(element, value, adds_before, adds_behind)

    def apply(
        x, y, stats, weight, bias, scale, shift, total, pre_add, pre_gate, post_add, geometry, activation_parameter,
        start, stop,
    ):  # fmt: skip
        channels = geometry[GROUPS] * geometry[GROUP_CHANNELS]
        for task in range(start, stop):
            unit, row, first, length = locate_piece(geometry, task)
            n, c = locate(geometry, unit, row)
            whole, i = x, n * geometry[INPUT_SAMPLE] + c * geometry[INPUT_STEP] + first
            if adds_before:
                t = n * geometry[TOTAL_SAMPLE] + c * geometry[TOTAL_STEP] + first
                if makes_sum:
                    p = n * geometry[PRE_SAMPLE] + c * geometry[PRE_STEP] + first
                    sum_row(x, i, pre_add, p, pre_gate, n * channels + c, geometry[GATE_ROWS] > 0, total, t, length)
                whole, i = total, t
            gain, offset = channel_affine(weight, bias, scale, shift, geometry, n, c)
            apply_row(
                whole, i, y, n * geometry[OUTPUT_SAMPLE] + c * geometry[OUTPUT_STEP] + first,
                post_add, n * geometry[POST_SAMPLE] + c * geometry[POST_STEP] + first,
                length, stats[2 * unit], stats[2 * unit + 1], gain, offset, activation_parameter,
            )  # fmt: skip

    return apply


BUILDERS = {
    **summed("forward", build_forward),
    "moments_before": build_moments,
    "moments_by_channel": partial(build_moments, by_channel=True),
    **summed("apply", build_apply, by_channel=False),
    **summed("given", partial(build_apply, makes_sum=True)),
}
