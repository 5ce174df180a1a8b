"""s = x + gate pre, a row at a time, for the forwards that add before they normalize; and planes with their sums.

The statistics of a plane are read from s of 32 and 64 bits while it is made. Where s is kept it goes to memory then,
and the output is read from there; where it is not, it is made again for the output. A row of s of 16 bits, which would
be rounded more than once, is made first, and a unit of it that is not kept lies in room of the worker's own.
"""

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
from fusednorm.backends.cpu.kernels.device import exact, inlined, span
from fusednorm.backends.cpu.kernels.elements import Element
from fusednorm.backends.cpu.kernels.moments import merge, moments
from fusednorm.backends.cpu.kernels.planes import locate, locate_piece, rows_per_unit
from fusednorm.backends.cpu.kernels.variants import keeping, summed
from fusednorm.problem import DTYPE_BYTES


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
def _making(element: Element, by_channel: bool, keeps: bool):
    """The element whose ``load`` makes a number of s from the parts that :func:`_source` gives; with ``keeps`` it goes
    to ``total`` too."""
    load, nearest, put = element.load, element.round, element.put_total

    @inlined
    def make(parts, k):
        x, i, pre, p, number, total, t = parts
        s = load(x, i + k) + (number if by_channel else number * load(pre, p + k))
        if keeps:
            put(total, t + k, s)
        return nearest(s)

    return element._replace(load=make)


def _element_of(element: Element, of: str, by_channel: bool):
    """How a pass reads what is normalized: "input", or s: "total" that is there, "made", or made and "kept"."""
    if of == "input":
        return element
    if of == "total":
        return element._replace(load=element.load_total)
    return _making(element, by_channel, of == "kept")


def _first_read(adds_before: bool, keeps: bool) -> str:
    return "input" if not adds_before else "kept" if keeps else "made"


@cache
def _source(element: Element, of: str, by_channel: bool):
    """source(...) -> (whole, k): what the load reads of a row of channel c of sample n from position ``first`` on, and
    its first number."""
    read, T = element.read, element.compute

    @exact
    def place_in_total(geometry, worker, row, n, c, first):
        return (
            worker * geometry[TOTAL_WORKER] + row * geometry[TOTAL_ROW] + n * geometry[TOTAL_SAMPLE]
            + c * geometry[TOTAL_STEP] + first
        )  # fmt: skip

    @exact
    def input_row(x, pre, numbers, total, geometry, worker, row, n, c, first):
        return x, n * geometry[INPUT_SAMPLE] + c * geometry[INPUT_STEP] + first

    @exact
    def total_row(x, pre, numbers, total, geometry, worker, row, n, c, first):
        return total, place_in_total(geometry, worker, row, n, c, first)

    @exact
    def parts(x, pre, numbers, total, geometry, worker, row, n, c, first):
        number = T(1)
        if by_channel or geometry[GATE_ROWS] > 0:
            number = T(read(numbers, n * geometry[GROUPS] * geometry[GROUP_CHANNELS] + c))
        i = n * geometry[INPUT_SAMPLE] + c * geometry[INPUT_STEP] + first
        p = n * geometry[PRE_SAMPLE] + c * geometry[PRE_STEP] + first
        return (x, i, pre, p, number, total, place_in_total(geometry, worker, row, n, c, first)), 0

    return {"input": input_row, "total": total_row}.get(of, parts)


@cache
def _moments(element: Element, of: str, by_channel: bool):
    """moments_of_row(...) -> (mean, M2) of so many elements of a row as a pass reads it. A row of 16 bits that is kept
    is made before: in float16 group_norm of (2, 3, 224, 224) takes 85 us so, and 89 with statistics of what is made."""
    before = of == "kept" and DTYPE_BYTES[element.dtype] == 2
    read = "total" if before else of
    source = _source(element, read, by_channel)
    row_moments = moments(_element_of(element, read, by_channel), vectors=read in ("input", "total"))
    place, sum_row = _source(element, "input", by_channel), sum_plane(element, by_channel)

    @exact
    def moments_of_row(x, pre, numbers, total, geometry, worker, row, n, c, first, length):
        whole, i = source(x, pre, numbers, total, geometry, worker, row, n, c, first)
        return row_moments(whole, i, length, geometry[RMS])

    @exact
    def moments_of_made_row(x, pre, numbers, total, geometry, worker, row, n, c, first, length):
        _, t = source(x, pre, numbers, total, geometry, worker, row, n, c, first)
        _, i = place(x, pre, numbers, total, geometry, worker, row, n, c, first)
        p = n * geometry[PRE_SAMPLE] + c * geometry[PRE_STEP] + first
        q = n * geometry[GROUPS] * geometry[GROUP_CHANNELS] + c
        sum_row(x, i, pre, p, numbers, q, geometry[GATE_ROWS] > 0, total, t, length)
        return row_moments(total, t, length, geometry[RMS])

    return moments_of_made_row if before else moments_of_row


@cache
def _apply_row(element: Element, load, value, adds_behind: bool):
    load_post, store, T = element.load, element.store, element.compute

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


def build_forward(
    element: Element, value, pullback, adds_before=False, adds_behind=False, by_channel=False, keeps=False
):
    """Units start to stop of channels_first, from statistics to output; with ``adds_before`` of s, which ``total`` gets
    where it ``keeps`` it, and with ``adds_behind`` of z + post_add. ``by_channel``: ``pre_gate`` has all that is added,
    a number for a plane."""
    read = _first_read(adds_before, keeps)
    apply = "total" if read == "kept" else read
    row_moments, source = _moments(element, read, by_channel), _source(element, apply, by_channel)
    apply_row = _apply_row(element, _element_of(element, apply, by_channel).load, value, adds_behind)
    keep, channel_affine = publish(element), affine(element)

    def forward(
        x, y, mean, rstd, variance, weight, bias, scale, shift, total, pre_add, pre_gate, post_add, geometry, eps,
        activation_parameter, worker, start, stop,
    ):  # fmt: skip
        length = geometry[SPATIAL]
        for unit in range(start, stop):
            count, centre, m2 = 0, 0.0, 0.0
            for row in range(rows_per_unit(geometry)):
                n, c = locate(geometry, unit, row)
                row_mean, row_m2 = row_moments(
                    x, pre_add, pre_gate, total, geometry, worker, row, n, c, 0, length
                )  # fmt: skip
                count, centre, m2 = merge(count, centre, m2, length, row_mean, row_m2)
            centre, inverse = keep(mean, rstd, variance, geometry, eps, unit, centre, m2)
            for row in range(rows_per_unit(geometry)):
                n, c = locate(geometry, unit, row)
                whole, i = source(x, pre_add, pre_gate, total, geometry, worker, row, n, c, 0)
                gain, offset = channel_affine(weight, bias, scale, shift, geometry, n, c)
                apply_row(
                    whole, i, y, n * geometry[OUTPUT_SAMPLE] + c * geometry[OUTPUT_STEP],
                    post_add, n * geometry[POST_SAMPLE] + c * geometry[POST_STEP],
                    length, centre, inverse, gain, offset, activation_parameter,
                )  # fmt: skip

    return forward


def build_moments(element: Element, value, pullback, by_channel=False, keeps=False):
    """The statistics (mean, M2) of pieces start to stop of s, which ``total`` gets where it ``keeps`` it."""
    piece_moments = _moments(element, _first_read(True, keeps), by_channel)

    def moments_of_pieces(x, total, pre_add, pre_gate, partials, geometry, start, stop):
        for task in range(start, stop):
            unit, row, first, length = locate_piece(geometry, task)
            n, c = locate(geometry, unit, row)
            partials[2 * task], partials[2 * task + 1] = piece_moments(
                x, pre_add, pre_gate, total, geometry, 0, 0, n, c, first, length
            )  # fmt: skip

    return moments_of_pieces


def build_apply(
    element: Element, value, pullback, adds_before=False, adds_behind=False, by_channel=False, keeps=False, of=None
):
    """The output of pieces start to stop of channels_first by finished statistics: from the input, with ``adds_before``
    from s, or ``of`` "total" from s that is there."""
    of = of or _first_read(adds_before, keeps)
    source, channel_affine = _source(element, of, by_channel), affine(element)
    apply_row = _apply_row(element, _element_of(element, of, by_channel).load, value, adds_behind)

    def apply(
        x, y, stats, weight, bias, scale, shift, total, pre_add, pre_gate, post_add, geometry, activation_parameter,
        start, stop,
    ):  # fmt: skip
        for task in range(start, stop):
            unit, row, first, length = locate_piece(geometry, task)
            n, c = locate(geometry, unit, row)
            whole, i = source(x, pre_add, pre_gate, total, geometry, 0, 0, n, c, first)
            gain, offset = channel_affine(weight, bias, scale, shift, geometry, n, c)
            apply_row(
                whole, i, y, n * geometry[OUTPUT_SAMPLE] + c * geometry[OUTPUT_STEP] + first,
                post_add, n * geometry[POST_SAMPLE] + c * geometry[POST_STEP] + first,
                length, stats[2 * unit], stats[2 * unit + 1], gain, offset, activation_parameter,
            )  # fmt: skip

    return apply


BUILDERS = {
    **keeping(summed("forward", build_forward)),
    **keeping({"moments_before": build_moments, "moments_by_channel": partial(build_moments, by_channel=True)}),
    **keeping(summed("apply", build_apply)),
    "apply_total": partial(build_apply, of="total"),
    "apply_total_behind": partial(build_apply, of="total", adds_behind=True),
}
