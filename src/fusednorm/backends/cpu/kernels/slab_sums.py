"""The sums around norms of channels_last, on the slabs of slabs.py and slabs_backward.py.

A slab of s goes to memory while it is made, and is read from cache; or its statistics are read from s while it is
made, which then goes to memory where it is kept, and else is made again for the output. dz of a slab goes to memory as
the gradient of z + post_add, from where the input's gradient reads it.
"""

from __future__ import annotations

from functools import cache, partial

from fusednorm.backends.cpu.geometry import (
    COEFFICIENTS,
    GATE_ROWS,
    GRAD_SAMPLE,
    GRAD_STEP,
    INPUT_SAMPLE,
    INPUT_STEP,
    OUTPUT_SAMPLE,
    OUTPUT_STEP,
    POST_SAMPLE,
    POST_STEP,
    PRE_SAMPLE,
    PRE_STEP,
    REPEAT,
    TOTAL_SAMPLE,
    TOTAL_STEP,
)
from fusednorm.backends.cpu.kernels.affine import normalized
from fusednorm.backends.cpu.kernels.device import exact, inlined, reassociated, span
from fusednorm.backends.cpu.kernels.elements import Element
from fusednorm.backends.cpu.kernels.elements import element as accesses
from fusednorm.backends.cpu.kernels.mathematics import joined
from fusednorm.backends.cpu.kernels.slabs import (
    FLUSH,
    TILE,
    add_folded,
    by_column,
    channel_count,
    locate,
    repeated,
    row_width,
    rows_of,
    slab_moments,
)
from fusednorm.backends.cpu.kernels.slabs_backward import gradient_slab
from fusednorm.backends.cpu.kernels.sums import add_row
from fusednorm.backends.cpu.kernels.variants import keeping, summed


@cache
def _sum_slab(element: Element, by_channel: bool):
    """s of one slab, rounded to the input's dtype. ``by_channel``: ``pre_gate`` has all that is added, a number for
    each channel of a sample."""
    load, read, put, add = element.load, element.read, element.put_total, add_row(element)

    @exact
    def shift_channels(x, i, numbers, q, total, t, n):
        for part in range(2):
            start, stop = span(part, n)
            for c in range(start, stop):
                put(total, t + c, load(x, i + c) + read(numbers, q + c))

    @exact
    def sum_slab(x, pre_add, pre_gate, total, geometry, task):
        n, first, positions = locate(geometry, task)
        channels, gated = channel_count(geometry), geometry[GATE_ROWS] > 0
        for r in range(first, first + positions):
            i = n * geometry[INPUT_SAMPLE] + r * geometry[INPUT_STEP]
            t = n * geometry[TOTAL_SAMPLE] + r * geometry[TOTAL_STEP]
            if by_channel:
                shift_channels(x, i, pre_gate, n * channels, total, t, channels)
            else:
                p = n * geometry[PRE_SAMPLE] + r * geometry[PRE_STEP]
                add(x, i, pre_add, p, pre_gate, n * channels, gated, gated, total, t, channels)

    return sum_slab


@cache
def _making_at(element: Element, by_channel: bool, keeps: bool):
    """load_at(parts, i, c), which makes element i of s, in column c, of the parts that :func:`_parts` gives; with
    ``keeps`` it goes to ``total`` too. All tensors have the input's strides."""
    load, read, nearest, put = element.load, element.read, element.round, element.put_total

    @inlined
    def at(parts, i, c):
        x, pre, numbers, q, total = parts
        s = load(x, i) + (read(numbers, q + c) if by_channel else load(pre, i))
        if keeps:
            put(total, i, s)
        return nearest(s)

    return at


@cache
def _parts(by_channel: bool):
    @exact
    def parts(x, pre, numbers, total, geometry, task, together):
        """What s of a slab's sample is made of; the numbers of channels as often as a row has positions, in
        ``together``."""
        n, _, _ = locate(geometry, task)
        channels = channel_count(geometry)
        if by_channel and geometry[REPEAT] > 1:
            for c in range(channels):
                together[c] = numbers[n * channels + c]
            repeated(together, 0, channels, row_width(geometry))
            return x, pre, together, 0, total
        return x, pre, numbers, n * channels, total

    return parts


@cache
def _apply_slab(element: Element, value, adds_before: bool, adds_behind: bool, load_at=None):
    load_post, read, store, T = element.load, element.read, element.store, element.compute
    at, sample, step = load_at or by_column(element), INPUT_SAMPLE, INPUT_STEP
    if adds_before:
        at = by_column(element._replace(load=element.load_total))
        sample, step = TOTAL_SAMPLE, TOTAL_STEP

    @exact
    def apply_slab(x, y, post, coefficients, geometry, activation_parameter, task):
        """y = value(A (x - mean) rstd + B + post) of one slab, where x is the input, s, or what that is made of."""
        n, first, positions = locate(geometry, task)
        channels, width, alpha = channel_count(geometry), row_width(geometry), T(activation_parameter)
        centre = n * COEFFICIENTS * width
        a, b = centre + width, centre + 2 * width
        for row in range(rows_of(geometry, positions)):
            r = first + row * geometry[REPEAT]
            i = n * geometry[sample] + r * geometry[step]
            j = n * geometry[OUTPUT_SAMPLE] + r * geometry[OUTPUT_STEP]
            p = n * geometry[POST_SAMPLE] + r * geometry[POST_STEP]
            for part in range(2):
                start, stop = span(part, min(width, (first + positions - r) * channels))
                for c in range(start, stop):
                    deviation = at(x, i + c, c) - read(coefficients, centre + c)
                    z = normalized(deviation, read(coefficients, a + c), read(coefficients, b + c))
                    if adds_behind:
                        z += load_post(post, p + c)
                    store(y, j + c, value(z, alpha))

    return apply_slab


def build_moments(element: Element, value, pullback, by_channel=False):
    """s of slabs start to stop, and their statistics."""
    sum_slab = _sum_slab(element, by_channel)
    moments_of_slab = slab_moments(element._replace(load=element.load_total), TOTAL_SAMPLE, TOTAL_STEP)

    def moments(x, pre_add, pre_gate, total, partials, geometry, start, stop):
        for task in range(start, stop):
            sum_slab(x, pre_add, pre_gate, total, geometry, task)
            moments_of_slab(total, partials, geometry, task)

    return moments


def build_made_moments(element: Element, value, pullback, by_channel=False, keeps=False):
    """The statistics of slabs start to stop of s while it is made, in the order of the input."""
    moments_of_slab = slab_moments(element, load_at=_making_at(element, by_channel, keeps))
    parts, scratch = _parts(by_channel), element.scratch

    def moments(x, pre_add, pre_gate, total, partials, geometry, start, stop):
        together = scratch()
        for task in range(start, stop):
            whole = parts(x, pre_add, pre_gate, total, geometry, task, together)
            moments_of_slab(whole, partials, geometry, task)

    return moments


def build_made_apply(element: Element, value, pullback, by_channel=False, adds_behind=False):
    """The output of slabs start to stop from s that is made again."""
    load_at = _making_at(element, by_channel, False)
    apply_slab = _apply_slab(element, value, False, adds_behind, load_at)
    parts, scratch = _parts(by_channel), element.scratch

    def apply(
        x, y, pre_add, pre_gate, total, post_add, coefficients, geometry, activation_parameter, start, stop
    ):  # fmt: skip
        together = scratch()
        for task in range(start, stop):
            whole = parts(x, pre_add, pre_gate, total, geometry, task, together)
            apply_slab(whole, y, post_add, coefficients, geometry, activation_parameter, task)

    return apply


def build_apply(element: Element, value, pullback, adds_before=False, adds_behind=False):
    """The output of slabs start to stop; with ``adds_before`` from s, which is there."""
    apply_slab = _apply_slab(element, value, adds_before, adds_behind)

    def apply(x, y, total, post_add, coefficients, geometry, activation_parameter, start, stop):
        for task in range(start, stop):
            whole = total if adds_before else x
            apply_slab(whole, y, post_add, coefficients, geometry, activation_parameter, task)

    return apply


def build_given(element: Element, value, pullback, adds_behind=False, by_channel=False):
    """s and the output of slabs start to stop, by statistics that were given."""
    sum_slab, apply_slab = _sum_slab(element, by_channel), _apply_slab(element, value, True, adds_behind)

    def given(
        x, y, pre_add, pre_gate, total, post_add, coefficients, geometry, activation_parameter, start, stop
    ):  # fmt: skip
        for task in range(start, stop):
            sum_slab(x, pre_add, pre_gate, total, geometry, task)
            apply_slab(total, y, post_add, coefficients, geometry, activation_parameter, task)

    return given


@cache
def _slab_sums(element: Element, pullback):
    """dz of one slab, and its p and q per channel, written to the slab's place in the partials."""
    load, read, store, T = element.load, element.read, element.store, element.compute
    add_first, add_second, scratch = element.add_first, element.add_second, element.scratch
    at, wide_scratch = joined(pullback), accesses("float64").scratch

    @reassociated
    def add_row_of_dz(
        grad, g, x, i, post, p, grad_post, o, coefficients, k, plane, n, alpha, first, second
    ):  # fmt: skip
        for c in range(n):
            deviation = load(x, i + c) - read(coefficients, k + c)
            a, b = read(coefficients, k + plane + c), read(coefficients, k + 2 * plane + c)
            dz = pullback(load(grad, g + c), at(normalized(deviation, a, b), load(post, p + c)), alpha)
            store(grad_post, o + c, dz)
            add_first(first, c, dz)
            add_second(second, c, dz * (deviation * read(coefficients, k + 3 * plane + c)))

    @exact
    def slab_sums(grad, x, post, grad_post, coefficients, partials, geometry, activation_parameter, task):
        n, position, positions = locate(geometry, task)
        channels, plane, alpha = channel_count(geometry), row_width(geometry), T(activation_parameter)
        first, second, together = scratch(), scratch(), geometry[REPEAT]
        wide = wide_scratch()
        for tile in range(0, channels, TILE):
            width = min(TILE, channels - tile)
            ps, qs = 2 * task * channels + tile, (2 * task + 1) * channels + tile
            for c in range(width):
                partials[ps + c] = partials[qs + c] = 0.0
            rows = rows_of(geometry, positions)
            for start in range(0, rows, FLUSH):
                for c in range(width * together):
                    first[c] = second[c] = T(0)
                for row in range(start, min(start + FLUSH, rows)):
                    r = position + row * together
                    add_row_of_dz(
                        grad, n * geometry[GRAD_SAMPLE] + r * geometry[GRAD_STEP] + tile,
                        x, n * geometry[INPUT_SAMPLE] + r * geometry[INPUT_STEP] + tile,
                        post, n * geometry[POST_SAMPLE] + r * geometry[POST_STEP] + tile,
                        grad_post, n * geometry[OUTPUT_SAMPLE] + r * geometry[OUTPUT_STEP] + tile,
                        coefficients, n * COEFFICIENTS * plane + tile, plane,
                        width * min(together, position + positions - r), alpha, first, second,
                    )  # fmt: skip
                add_folded(first, wide, width, together, partials, ps)
                add_folded(second, wide, width, together, partials, qs)

    return slab_sums


def build_reduce(element: Element, value, pullback):
    """dz, p and q of slabs start to stop."""
    slab_sums = _slab_sums(element, pullback)

    def reduce(
        grad, x, post_add, grad_post_add, coefficients, partials, geometry, activation_parameter, start, stop
    ):  # fmt: skip
        for task in range(start, stop):
            slab_sums(grad, x, post_add, grad_post_add, coefficients, partials, geometry, activation_parameter, task)

    return reduce


def build_input_gradient(element: Element, value, pullback, adds_gradient=False):
    """The input's gradient of slabs start to stop, from dz; for a kernel without an activation. With ``adds_gradient``
    ``grad_total`` is added to it."""
    of_slab = gradient_slab(element, pullback, OUTPUT_SAMPLE, OUTPUT_STEP, adds_gradient)

    def input_gradient(grad_post_add, x, dx, coefficients, grad_total, geometry, activation_parameter, start, stop):
        for task in range(start, stop):
            of_slab(grad_post_add, x, dx, coefficients, grad_total, geometry, activation_parameter, task)

    return input_gradient


BUILDERS = {
    "moments_before": build_moments,
    "moments_by_channel": partial(build_moments, by_channel=True),
    **keeping(
        {
            "moments_made_before": build_made_moments,
            "moments_made_by_channel": partial(build_made_moments, by_channel=True),
        }
    ),
    **summed("apply", build_apply, by_channel=False),
    "apply_made_before": build_made_apply,
    "apply_made_before_behind": partial(build_made_apply, adds_behind=True),
    "apply_made_by_channel": partial(build_made_apply, by_channel=True),
    "apply_made_by_channel_behind": partial(build_made_apply, by_channel=True, adds_behind=True),
    "given_before": build_given,
    "given_before_behind": partial(build_given, adds_behind=True),
    "given_by_channel": partial(build_given, by_channel=True),
    "given_by_channel_behind": partial(build_given, adds_behind=True, by_channel=True),
    "reduce": build_reduce,
    "input_gradient": build_input_gradient,
    "input_gradient_total": partial(build_input_gradient, adds_gradient=True),
}
