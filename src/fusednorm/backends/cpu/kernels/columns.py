"""Kernels of channels_first where the channels of each position have statistics of their own.

The positions of a sample are cut into blocks, a channel of which is a row of contiguous elements; a block of all
channels lies in the L2 cache. Every loop runs along the positions of one channel, whose weight and bias are numbers,
while the statistics and the sums of the positions are arrays. With a scale or shift, weight and bias are those of a
sample, made as in rows.py. A block goes from its statistics to its output, or from its sums to its gradient. The
parameters' gradients are summed over tasks of a few blocks, and these in their order.

With sums around the norm a block of s goes to ``total`` first, and is normalized from there. The backward, whose x is
s, keeps dz where an activation meets post_add, stores it too, and adds the gradient of s to dx.
"""

from __future__ import annotations

from functools import cache, partial

import numpy as np

from fusednorm.backends.cpu.geometry import (
    BIAS_DTYPE,
    BLOCKS,
    GAIN_DTYPE,
    GATE_ROWS,
    GRAD_SAMPLE,
    GRAD_STEP,
    GROUP_CHANNELS,
    INPUT_SAMPLE,
    INPUT_STEP,
    KEPT_WORKER,
    MODULATION,
    OFFSET_DTYPE,
    OUTPUT_SAMPLE,
    OUTPUT_STEP,
    PIECE,
    PIECES,
    POST_SAMPLE,
    POST_STEP,
    PRE_SAMPLE,
    PRE_STEP,
    RMS,
    SAMPLES,
    SPATIAL,
    SUMMED,
    TOTAL_ROW,
    TOTAL_SAMPLE,
    TOTAL_STEP,
    TOTAL_WORKER,
    WANT_INPUT_GRAD,
    WEIGHT_DTYPE,
)
from fusednorm.backends.cpu.kernels.affine import add_numbers, dz_of, normalized
from fusednorm.backends.cpu.kernels.device import exact, reassociated, span
from fusednorm.backends.cpu.kernels.elements import Element, element
from fusednorm.backends.cpu.kernels.mathematics import joined
from fusednorm.backends.cpu.kernels.operands import narrow, number, widened
from fusednorm.backends.cpu.kernels.rows import scaled
from fusednorm.backends.cpu.kernels.slabs import FLUSH, locate, pivot_finder, row_adder
from fusednorm.backends.cpu.kernels.sums import sum_plane
from fusednorm.backends.cpu.kernels.variants import backwards, summed

wide_scratch = element("float64").scratch


@cache
def _flush(element: Element):
    T = element.compute

    @exact
    def flush(sums, totals, n):
        """Add sums to their float64 totals, and start them anew."""
        for k in range(n):
            totals[k] += np.float64(sums[k])
            sums[k] = T(0)

    return flush


@exact
def _clear(first, second, n):
    for k in range(n):
        first[k] = second[k] = 0.0


@cache
def _block_statistics(element: Element):
    add_rows, find_pivot, flush = row_adder(element), pivot_finder(element), _flush(element)
    scratch, T = element.scratch, element.compute

    @exact
    def statistics_of(pivot, means, m2s, centre, inverse, n, count, rms, eps):
        for k in range(n):
            shift = means[k] / count
            m2 = m2s[k] if rms else m2s[k] - means[k] * shift
            centre[k] = T(0) if rms else T(np.float64(pivot[k]) + shift)
            inverse[k] = T(1.0 / np.sqrt((0.0 if m2 < 0.0 else m2) / count + eps))

    @exact
    def block_statistics(x, i, step, channels, n, rms, eps, centre, inverse):
        """mean and rstd of n positions, as they are saved."""
        pivot, first, second = scratch(), scratch(), scratch()
        means, m2s = wide_scratch(), wide_scratch()
        find_pivot(x, i, step, 0 if rms else channels, n, 1, pivot)
        _clear(first, second, n)
        _clear(means, m2s, n)
        for c in range(0, channels, FLUSH):
            add_rows(x, i + c * step, step, min(FLUSH, channels - c), True, n, pivot, first, second)
            flush(first, means, n)
            flush(second, m2s, n)
        statistics_of(pivot, means, m2s, centre, inverse, n, channels, rms, eps)

    return block_statistics


@cache
def _apply_channel(element: Element, value, adds_before: bool, adds_behind: bool):
    load, load_post, read, store, T = element.load, element.load, element.read, element.store, element.compute
    if adds_before:
        load = element.load_total

    @exact
    def apply_channel(x, i, y, j, post, p, n, centre, inverse, gain, offset, activation_parameter):
        """y = value(weight xhat + bias + post)."""
        alpha = T(activation_parameter)
        for part in range(2):
            start, stop = span(part, n)
            for k in range(start, stop):
                z = normalized(load(x, i + k) - read(centre, k), scaled(gain, read(inverse, k)), offset)
                if adds_behind:
                    z += load_post(post, p + k)
                store(y, j + k, value(z, alpha))

    return apply_channel


def build_forward(element: Element, value, pullback, adds_before=False, adds_behind=False, by_channel=False):
    """Tasks start to stop; with ``adds_before`` of s, which ``total`` gets, and with ``adds_behind`` of z + post_add.
    ``by_channel``: ``pre_gate`` has all that is added, a number for each channel of a sample."""
    source = element._replace(load=element.load_total) if adds_before else element
    block_statistics, as_read, scratch = _block_statistics(source), widened(element), element.scratch
    apply_channel, sum_row = _apply_channel(element, value, adds_before, adds_behind), sum_plane(element, by_channel)
    read = element.read

    @exact
    def publish(mean, rstd, unit, centre, inverse, n, rms):
        for k in range(n):
            rstd[unit + k] = inverse[k]
        if not rms:
            for k in range(n):
                mean[unit + k] = centre[k]

    def forward(
        x, y, mean, rstd, weight, bias, wide_weight, wide_bias, total, pre_add, pre_gate, post_add, geometry, eps,
        activation_parameter, worker, start, stop,
    ):  # fmt: skip
        gains = as_read(weight, geometry[GAIN_DTYPE], wide_weight)
        offsets = as_read(bias, geometry[OFFSET_DTYPE], wide_bias)
        channels, centre, inverse = geometry[GROUP_CHANNELS], scratch(), scratch()
        last = min(stop * geometry[BLOCKS], geometry[SAMPLES] * geometry[PIECES])
        for block in range(start * geometry[BLOCKS], last):
            n, first, width = locate(geometry, block)
            place = n * geometry[MODULATION]
            whole, i, step = x, n * geometry[INPUT_SAMPLE] + first, geometry[INPUT_STEP]
            j = n * geometry[OUTPUT_SAMPLE] + first
            p = n * geometry[POST_SAMPLE] + first
            if adds_before:
                # A block that nobody keeps lies in the worker's own room, in rows of TOTAL_ROW.
                t = worker * geometry[TOTAL_WORKER] if geometry[TOTAL_ROW] else n * geometry[TOTAL_SAMPLE] + first
                row = geometry[TOTAL_ROW] + geometry[TOTAL_STEP]
                pre = n * geometry[PRE_SAMPLE] + first
                for c in range(channels):
                    sum_row(
                        x, i + c * step, pre_add, pre + c * geometry[PRE_STEP], pre_gate, n * channels + c,
                        geometry[GATE_ROWS] > 0, total, t + c * row, width,
                    )  # fmt: skip
                whole, i, step = total, t, row
            block_statistics(whole, i, step, channels, width, geometry[RMS], eps, centre, inverse)
            publish(mean, rstd, n * geometry[SPATIAL] + first, centre, inverse, width, geometry[RMS])
            for back in range(channels):  # the last channels first: they are still in the L1 cache
                c = channels - 1 - back
                apply_channel(
                    whole, i + c * step, y, j + c * geometry[OUTPUT_STEP], post_add, p + c * geometry[POST_STEP],
                    width, centre, inverse, read(gains, place + c), read(offsets, place + c), activation_parameter,
                )  # fmt: skip

    return forward


@cache
def _keep_channel(element: Element, pullback, adds_behind: bool):
    load, read, keep, store = element.load, element.read, element.keep, element.store
    at = joined(pullback)

    @exact
    def keep_channel(grad, g, x, i, kept, r, post, p, grad_post, o, n, centre, inverse, gain, offset, alpha):
        """dz of one channel, put into ``kept`` from r on: the sums of its last positions are scalar code, in which no
        exponential should be. With ``adds_behind`` z is z + post, and dz its gradient, which is stored too."""
        for part in range(2):
            start, stop = span(part, n)
            for k in range(start, stop):
                z = normalized(load(x, i + k) - read(centre, k), scaled(gain, read(inverse, k)), offset)
                if adds_behind:
                    z = at(z, load(post, p + k))
                dz = pullback(load(grad, g + k), z, alpha)
                keep(kept, r + k, dz)
                if adds_behind:
                    store(grad_post, o + k, dz)

    return keep_channel


@cache
def _channel_sums(element: Element, make):
    """p and q of a channel, and what it adds to P and Q of each position."""
    load, read, T = element.load, element.read, element.compute
    add_first, add_second = element.add_first, element.add_second

    @reassociated
    def channel_sums(grad, g, x, i, kept, r, n, centre, inverse, gain, offset, alpha, first, second):
        p, q = T(0), T(0)
        for k in range(n):
            deviation, rstd = load(x, i + k) - read(centre, k), read(inverse, k)
            xhat, z = deviation * rstd, normalized(deviation, scaled(gain, rstd), offset)
            dz = make(grad, g + k, kept, r + k, z, alpha)
            p += dz
            q += dz * xhat
            add_first(first, k, gain * dz)
            add_second(second, k, gain * dz * xhat)
        return np.float64(p), np.float64(q)

    return channel_sums


@cache
def _gradient_channel(element: Element, make, adds_gradient: bool):
    load, read, store = element.load, element.read, element.store

    @exact
    def gradient_channel(
        grad, g, x, i, dx, o, kept, r, n, centre, inverse, gain, offset, alpha, mean_p, mean_q, grad_total
    ):
        """dx = rstd (weight dz - (P + xhat Q) / C), and with ``adds_gradient`` the gradient of x itself, which lies as
        x does."""
        for part in range(2):
            start, stop = span(part, n)
            for k in range(start, stop):
                deviation, rstd = load(x, i + k) - read(centre, k), read(inverse, k)
                xhat, z = deviation * rstd, normalized(deviation, scaled(gain, rstd), offset)
                dz = make(grad, g + k, kept, r + k, z, alpha)
                gradient = rstd * (gain * dz - (read(mean_p, k) + xhat * read(mean_q, k)))
                if adds_gradient:
                    gradient += load(grad_total, i + k)
                store(dx, o + k, gradient)

    return gradient_channel


@exact
def tasks_together(geometry):
    """The tasks of the blocks that are summed together."""
    return (geometry[SUMMED] + geometry[BLOCKS] - 1) // geometry[BLOCKS]


@exact
def blocks_of(geometry, task):
    """The first block of a backward's task, and the one behind its last."""
    tasks = tasks_together(geometry)
    together, part = task // tasks, task % tasks
    begin = together * geometry[SUMMED] + part * geometry[BLOCKS]
    return begin, min(begin + geometry[BLOCKS], (together + 1) * geometry[SUMMED])


def build_backward(
    element: Element, value, pullback, accumulate=True, keeps=False, adds_behind=False, adds_gradient=False
):
    """The input's gradient, and with ``accumulate`` the sums of the parameters' in ``partials``, of tasks.

    Where dz is kept, ``kept`` has room for a block per worker. With ``adds_behind`` it is the gradient of z + post_add,
    and is stored too; with ``adds_gradient`` dx gets ``grad_total``.
    """
    T, read, scratch, as_read = element.compute, element.read, element.scratch, widened(element)
    make, flush = dz_of(element, pullback, keeps), _flush(element)
    keep_channel, channel_sums = _keep_channel(element, pullback, adds_behind), _channel_sums(element, make)
    gradient_channel = _gradient_channel(element, make, adds_gradient)

    @exact
    def recall(operand, dtype, unit, n, values):
        for k in range(n):
            values[k] = T(number(operand, unit + k, dtype))

    @exact
    def means_of(totals, n, count, absent, means):
        for k in range(n):
            means[k] = T(0) if absent else T(totals[k] / count)

    def backward(
        grad, x, dx, given_mean, given_mean_dtype, given_rstd, given_rstd_dtype, weight, bias, wide_weight, wide_bias,
        partials, kept, post_add, grad_total, grad_post_add, geometry, activation_parameter, worker, start, stop,
    ):  # fmt: skip
        gains = as_read(weight, geometry[GAIN_DTYPE], wide_weight)
        offsets = as_read(bias, geometry[OFFSET_DTYPE], wide_bias)
        channels, alpha = geometry[GROUP_CHANNELS], T(activation_parameter)
        centre, inverse, first, second = scratch(), scratch(), scratch(), scratch()
        total_p, total_q = wide_scratch(), wide_scratch()
        slot, room = (worker * geometry[KEPT_WORKER], geometry[PIECE]) if keeps else (0, 0)
        for task in range(start, stop):
            ps, qs = 2 * task * channels, (2 * task + 1) * channels
            if accumulate:
                for c in range(2 * channels):
                    partials[ps + c] = 0.0
            begin, last = blocks_of(geometry, task)
            for block in range(begin, last):
                n, position, width = locate(geometry, block)
                place = n * geometry[MODULATION]
                unit = n * geometry[SPATIAL] + position
                i, g = n * geometry[INPUT_SAMPLE] + position, n * geometry[GRAD_SAMPLE] + position
                o, behind = n * geometry[OUTPUT_SAMPLE] + position, n * geometry[POST_SAMPLE] + position
                if geometry[RMS]:
                    for k in range(width):
                        centre[k] = T(0)
                else:
                    recall(given_mean, given_mean_dtype, unit, width, centre)
                recall(given_rstd, given_rstd_dtype, unit, width, inverse)
                _clear(first, second, width)
                _clear(total_p, total_q, width)
                for c in range(channels):
                    gain, offset = read(gains, place + c), read(offsets, place + c)
                    at_x, at_grad, r = i + c * geometry[INPUT_STEP], g + c * geometry[GRAD_STEP], slot + c * room
                    if keeps:
                        keep_channel(
                            grad, at_grad, x, at_x, kept, r, post_add, behind + c * geometry[POST_STEP],
                            grad_post_add, o + c * geometry[OUTPUT_STEP], width, centre, inverse, gain, offset, alpha,
                        )  # fmt: skip
                    p, q = channel_sums(
                        grad, at_grad, x, at_x, kept, r, width, centre, inverse, gain, offset, alpha, first, second
                    )
                    if accumulate:
                        partials[ps + c] += p
                        partials[qs + c] += q
                    if (c + 1) % FLUSH == 0 or c + 1 == channels:
                        flush(first, total_p, width)
                        flush(second, total_q, width)
                means_of(total_p, width, channels, geometry[RMS] != 0, first)
                means_of(total_q, width, channels, False, second)
                for back in range(channels if geometry[WANT_INPUT_GRAD] else 0):
                    c = channels - 1 - back
                    gradient_channel(
                        grad, g + c * geometry[GRAD_STEP], x, i + c * geometry[INPUT_STEP],
                        dx, o + c * geometry[OUTPUT_STEP], kept, slot + c * room, width, centre, inverse,
                        read(gains, place + c), read(offsets, place + c), alpha, first, second, grad_total,
                    )  # fmt: skip

    return backward


def build_parameter_gradients(element: Element, value, pullback):
    """The gradients of weight and bias for channels start to stop, from the tasks in order."""

    def parameter_gradients(partials, grad_weight, grad_bias, geometry, start, stop):
        channels = geometry[GROUP_CHANNELS]
        for task in range(1, tasks_together(geometry)):
            for first in (start, start + channels):  # of p, and of q
                add_numbers(partials, first, partials, 2 * task * channels + first, stop - start)
        narrow(partials, 0, grad_bias, geometry[BIAS_DTYPE], start, stop)
        narrow(partials, channels, grad_weight, geometry[WEIGHT_DTYPE], start, stop)

    return parameter_gradients


def build_modulation_sums(element: Element, value, pullback):
    """p and q per (n, c) of samples start to stop, from the tasks of each in order."""

    def modulation_sums(partials, sums, geometry, start, stop):
        width, tasks = 2 * geometry[GROUP_CHANNELS], tasks_together(geometry)
        for n in range(start, stop):
            for c in range(n * width, (n + 1) * width):
                sums[c] = 0.0
            for task in range(n * tasks, (n + 1) * tasks):
                add_numbers(sums, n * width, partials, task * width, width)

    return modulation_sums


BUILDERS = {
    "forward": build_forward,
    **summed("forward", build_forward),
    **backwards(build_backward),
    **backwards(partial(build_backward, accumulate=False), "backward_data"),
    "modulation_sums": build_modulation_sums,
    "parameter_gradients": build_parameter_gradients,
}
