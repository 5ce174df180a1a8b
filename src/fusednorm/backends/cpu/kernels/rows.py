"""Kernels for one position per channel: a sample is a contiguous row of G groups of D channels, the affine per element.

layer_norm and rms_norm are this case, and any norm of a 2-D input but batch_norm. Where each position has statistics of
its own, a row is a position, and a sample has SPATIAL rows. Loops run along weight and bias. Operands of
the compute dtype are read where they lie. Others are read from ``wide_weight`` and ``wide_bias``, where ``widen`` has
put the converted numbers, or the plan ones and zeros for an absent operand. With a scale or shift, ``modulate`` puts
A = weight (1 + scale) and B = bias (1 + scale) + shift of all samples there, and the other kernels read these.

The forward takes each row, or a few short ones, from the statistics to the output. The backward takes each row from its
sums to its gradient, and sums the parameters' gradients over fixed segments of rows, with a scale or shift of rows of
one sample. Few rows would make few segments: first the sums of all pieces of them are taken, then, a block of channels
at a time, all gradients.

With sums around the norm the forward first makes a row of s = x + gate pre_add, in ``total``, and then normalizes that
row while it lies in cache; it adds post_add to z. The backward, whose x is s, then keeps dz of each row and stores it
too, and adds the gradient of s to dx. Of a product before the norm it keeps ds of a piece of a row, and makes gate · ds
and the sums of pre_add · ds of it, over segments of rows that share a gate.

A quantizing forward writes ``codes`` (codes.py) in place of y.
"""

from __future__ import annotations

from functools import cache, partial

import numpy as np

from fusednorm.backends.cpu.geometry import (
    BIAS_DTYPE,
    COLUMNS,
    GAIN_DTYPE,
    GATE_PER_ELEMENT,
    GATE_ROWS,
    GATE_SEGMENTS,
    GATE_STEP,
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
    PIECE,
    PIECES,
    POST_SAMPLE,
    POST_STEP,
    PRE_SAMPLE,
    PRE_STEP,
    RMS,
    ROWS_FLUSHED,
    SCALE_DTYPE,
    SCRATCH,
    SEGMENTS,
    SHIFT_DTYPE,
    SPATIAL,
    SUMMED,
    TOTAL_SAMPLE,
    TOTAL_STEP,
    TOTAL_WORKER,
    WANT_GATE_GRAD,
    WANT_INPUT_GRAD,
    WANT_PRE_GRAD,
    WEIGHT_DTYPE,
    WIDE_WORKER,
)
from fusednorm.backends.cpu.kernels.affine import dz_of, normalized
from fusednorm.backends.cpu.kernels.codes import quantized_row
from fusednorm.backends.cpu.kernels.device import exact, reassociated, span, uncontracted
from fusednorm.backends.cpu.kernels.elements import Element, advanced
from fusednorm.backends.cpu.kernels.elements import element as accesses
from fusednorm.backends.cpu.kernels.mathematics import joined
from fusednorm.backends.cpu.kernels.moments import CHUNK, moments, units_together
from fusednorm.backends.cpu.kernels.operands import converting, narrow, rounded_number, widened, widening
from fusednorm.backends.cpu.kernels.sums import add_row
from fusednorm.backends.cpu.kernels.variants import backwards, summed
from fusednorm.formats import FORMATS

#: Elements of a group at least whose rows are taken in pairs, with the sums for the parameters' gradients in the L2
#: cache. On an AMD EPYC pairs of 8192 bfloat16 took 0.81 of the time of single rows, of 2048 0.82, of 1024 1.2.
PAIRED = 2048


@exact
def scaled(gain, inverse):
    """A rstd, with the bits of the other kernels: these round a float64 product, which is exact for two float32s."""
    return gain * inverse


@exact
def begin_of(positions, n, sample, step):
    """Where row n of a tensor begins."""
    return n * sample if positions == 1 else n // positions * sample + n % positions * step


@exact
def begins_of(geometry, n, channel):
    """Where a channel of a row begins in the input, in grad_output and in grad_input."""
    return (
        begin_of(geometry[SPATIAL], n, geometry[INPUT_SAMPLE], geometry[INPUT_STEP]) + channel,
        begin_of(geometry[SPATIAL], n, geometry[GRAD_SAMPLE], geometry[GRAD_STEP]) + channel,
        begin_of(geometry[SPATIAL], n, geometry[OUTPUT_SAMPLE], geometry[OUTPUT_STEP]) + channel,
    )


@exact
def parameters_of(positions, modulation, n):
    """Where weight and bias of row n begin."""
    return n // positions * modulation if modulation else 0


def _row_loop(element: Element, load, value, adds_behind: bool, put):
    """A row of value(weight xhat + bias + post), put where ``put`` puts it."""
    read, load_post, T = element.read, element.load, element.compute

    @exact
    def row_loop(x, i, out, j, post, p, n, mean, rstd, weight, bias, first, activation_parameter, factor):
        centre, inverse, alpha = T(mean), T(rstd), T(activation_parameter)
        for part in range(2):
            start, stop = span(part, n)
            for k in range(start, stop):
                z = normalized(load(x, i + k) - centre, scaled(read(weight, first + k), inverse), read(bias, first + k))
                if adds_behind:
                    z += load_post(post, p + k)
                put(out, j + k, value(z, alpha), factor)

    return row_loop


def _plain_row(element: Element, make_row):
    """What a forward does with a row whose output has the input's dtype."""
    store = element.store

    @exact
    def put(y, j, v, factor):
        store(y, j, v)

    row_loop = make_row(put)

    @exact
    def plain_row(x, i, y, j, post, p, n, mean, rstd, weight, bias, first, alpha, codes, scales, row, kept, r):
        row_loop(x, i, y, j, post, p, n, mean, rstd, weight, bias, first, alpha, alpha)

    return plain_row


@exact
def of_worker(wide, dtype, own):
    """Where a worker's own converted numbers lie; the ones or zeros in place of an absent operand are everybody's."""
    return advanced(wide, own if dtype != 0 else 0)


def build_forward(element: Element, value, pullback, adds_before=False, adds_behind=False, quantized=None):
    """Rows start to stop; with ``adds_before`` of s, which ``total`` gets, and with ``adds_behind`` of z + post_add.

    ``quantized`` is None, or the dtype of ``codes`` and whether each row has a scale of its own.
    """
    T = element.compute
    load = element.load_total if adds_before else element.load
    row_moments, as_read = moments(element._replace(load=load)), widened(element)
    add, make_row = add_row(element), partial(_row_loop, element, load, value, adds_behind)
    wide_scratch, at_once = accesses("float64").scratch, units_together(element)
    apply_row = quantized_row(element, make_row, *quantized) if quantized else _plain_row(element, make_row)

    def forward(
        x, y, mean, rstd, weight, bias, wide_weight, wide_bias, total, pre_add, pre_gate, post_add, codes, out_scale,
        kept, geometry, eps, activation_parameter, worker, start, stop,
    ):  # fmt: skip
        own = worker * geometry[WIDE_WORKER]
        gains = as_read(weight, geometry[GAIN_DTYPE], of_worker(wide_weight, geometry[GAIN_DTYPE], own))
        offsets = as_read(bias, geometry[OFFSET_DTYPE], of_worker(wide_bias, geometry[OFFSET_DTYPE], own))
        groups, length, rms = geometry[GROUPS], geometry[GROUP_CHANNELS], geometry[RMS]
        # Read once: for all that the compiler knows, a row's store could change them.
        positions, modulation = geometry[SPATIAL], geometry[MODULATION]
        input_sample, input_step = geometry[INPUT_SAMPLE], geometry[INPUT_STEP]
        output_sample, output_step = geometry[OUTPUT_SAMPLE], geometry[OUTPUT_STEP]
        post_sample, post_step = geometry[POST_SAMPLE], geometry[POST_STEP]
        centres, inverses = wide_scratch(), wide_scratch()
        together = 1 if adds_before else at_once(length)
        # Loops over the groups of several rows: for one within another LLVM prepares a pointer per tensor at each row.
        n, k, i = start, 0, 0  # the row and the channel whose statistics are made, and where the row begins
        m, c, h, p, j, place = start, 0, 0, 0, 0, 0  # those whose output is made
        for first in range(start * groups, stop * groups, together):
            units = min(together, stop * groups - first)
            source, s = x, 0
            for u in range(units):
                if k == 0:
                    i = begin_of(positions, n, input_sample, input_step)
                s = i + k
                if adds_before:
                    t = begin_of(positions, n, geometry[TOTAL_SAMPLE], geometry[TOTAL_STEP]) + k
                    t += worker * geometry[TOTAL_WORKER]
                    pre = begin_of(positions, n, geometry[PRE_SAMPLE], geometry[PRE_STEP]) + k
                    q = n // max(1, geometry[GATE_ROWS]) * geometry[GATE_STEP]
                    q += k if geometry[GATE_PER_ELEMENT] else 0
                    add(
                        x, s, pre_add, pre, pre_gate, q, geometry[GATE_ROWS] > 0, geometry[GATE_PER_ELEMENT], total, t,
                        length,
                    )  # fmt: skip
                    source, s = total, t
                centres[u], inverses[u] = row_moments(source, s, length, rms)
                n, k = (n, k + length) if k + length < groups * length else (n + 1, 0)
            for u in range(units):
                inverses[u] = 1.0 / np.sqrt(inverses[u] / length + eps)
            for u in range(units):
                rstd[first + u] = T(inverses[u])
            for u in range(0 if rms else units):
                mean[first + u] = T(centres[u])
            for u in range(units):
                if c == 0:
                    h = begin_of(positions, m, input_sample, input_step)
                    p = begin_of(positions, m, post_sample, post_step)
                    j = begin_of(positions, m, output_sample, output_step)
                    place = parameters_of(positions, modulation, m)
                apply_row(
                    source, s if adds_before else h + c, y, j + c, post_add, p + c, length, centres[u], inverses[u],
                    gains, offsets, place + c, activation_parameter, codes, out_scale, m, kept,
                    worker * geometry[KEPT_WORKER],
                )  # fmt: skip
                m, c = (m, c + length) if c + length < groups * length else (m + 1, 0)

    return forward


@cache
def _keep_group(element: Element, pullback, adds_behind: bool):
    load, read, keep, store = element.load, element.read, element.keep, element.store
    at = joined(pullback)

    @exact
    def keep_group(grad, g, x, i, kept, r, post, p, grad_post, o, n, centre, inverse, weight, bias, first, alpha):
        """dz of one group of one row, put into ``kept`` from r on: the sums of its last elements are scalar code, in
        which no exponential should be. With ``adds_behind`` z is z + post, and dz its gradient, which is stored too."""
        for part in range(2):
            start, stop = span(part, n)
            for k in range(start, stop):
                gain = read(weight, first + k)
                z = normalized(load(x, i + k) - centre, scaled(gain, inverse), read(bias, first + k))
                if adds_behind:
                    z = at(z, load(post, p + k))
                dz = pullback(load(grad, g + k), z, alpha)
                keep(kept, r + k, dz)
                if adds_behind:
                    store(grad_post, o + k, dz)

    return keep_group


@cache
def _group_sums(element: Element, make, accumulate: bool):
    """P and Q of one group of one row; with ``accumulate`` the parameters' gradients are summed too."""
    load, read, T = element.load, element.read, element.compute
    add_first, add_second = element.add_first, element.add_second

    @reassociated
    def group_sums(grad, g, x, i, kept, r, n, centre, inverse, weight, bias, first, alpha, sums, ps, qs):
        total_p, total_q = T(0), T(0)
        for k in range(n):
            deviation, gain = load(x, i + k) - centre, read(weight, first + k)
            xhat, z = deviation * inverse, normalized(deviation, scaled(gain, inverse), read(bias, first + k))
            dz = make(grad, g + k, kept, r + k, z, alpha)
            if accumulate:
                add_first(sums, ps + first + k, dz)
                add_second(sums, qs + first + k, dz * xhat)
            total_p += gain * dz
            total_q += gain * dz * xhat
        return np.float64(total_p), np.float64(total_q)

    return group_sums


@cache
def _pair_sums(element: Element, make):
    load, read, T = element.load, element.read, element.compute
    add_first, add_second = element.add_first, element.add_second

    @reassociated
    def pair_sums(
        grad, g, h, x, i, j, kept, n, centre, inverse, other_centre, other_inverse, weight, bias, first, alpha, sums,
        ps, qs,
    ):  # fmt: skip
        """P and Q of a group of two rows, the second of which begins at h in ``grad`` and at j in ``x``. The sums for
        the parameters' gradients, as long as a row, are read and written once for both."""
        total_p, total_q, other_p, other_q = T(0), T(0), T(0), T(0)
        for k in range(n):
            gain, offset = read(weight, first + k), read(bias, first + k)
            deviation, other = load(x, i + k) - centre, load(x, j + k) - other_centre
            dz = make(grad, g + k, kept, 0, normalized(deviation, scaled(gain, inverse), offset), alpha)
            other_dz = make(grad, h + k, kept, 0, normalized(other, scaled(gain, other_inverse), offset), alpha)
            product, other_product = dz * (deviation * inverse), other_dz * (other * other_inverse)
            add_first(sums, ps + first + k, dz + other_dz)
            add_second(sums, qs + first + k, product + other_product)
            total_p += gain * dz
            total_q += gain * product
            other_p += gain * other_dz
            other_q += gain * other_product
        return np.float64(total_p), np.float64(total_q), np.float64(other_p), np.float64(other_q)

    return pair_sums


@cache
def _gradient_group(element: Element, make, accumulate: bool, adds_gradient: bool = False, keeps_gradient=False):
    load, read, keep, store, T = element.load, element.read, element.keep, element.store, element.compute
    add_first, add_second = element.add_first, element.add_second

    @exact
    def gradient_group(
        grad, g, x, i, dx, o, kept, r, n, centre, inverse, weight, bias, first, alpha, mean_p, mean_q, ps, qs, s,
        grad_total,
    ):  # fmt: skip
        """dx = rstd (weight dz - (P + xhat Q) / K); with ``accumulate`` dz and dz xhat are added to ``ps`` and ``qs``
        too, and with ``adds_gradient`` dx gets the gradient of x itself, which lies as x does. With ``keeps_gradient``
        dx is put into ``kept`` too, in the place of dz."""
        p, q = T(mean_p), T(mean_q)
        for k in range(n):
            deviation, gain = load(x, i + k) - centre, read(weight, first + k)
            xhat, z = deviation * inverse, normalized(deviation, scaled(gain, inverse), read(bias, first + k))
            dz = make(grad, g + k, kept, r + k, z, alpha)
            if accumulate:
                add_first(ps, s + k, dz)
                add_second(qs, s + k, dz * xhat)
            gradient = inverse * (gain * dz - (p + xhat * q))
            if adds_gradient:
                gradient += load(grad_total, i + k)
            store(dx, o + k, gradient)
            if keeps_gradient:
                keep(kept, r + k, gradient)

    return gradient_group


@cache
def _product_group(element: Element):
    load, read, recall, store, T = element.load, element.read, element.recall, element.store, element.compute
    add_first = element.add_first

    @exact
    def scale(kept, r, gates, q, per_element, grad_pre, o, n):
        gate = read(gates, q)
        if per_element:
            for k in range(n):
                store(grad_pre, o + k, read(gates, q + k) * recall(kept, r + k))
        else:
            for k in range(n):
                store(grad_pre, o + k, gate * recall(kept, r + k))

    @exact
    def add_products(kept, r, pre, p, n, sums, s):
        for k in range(n):
            add_first(sums, s + k, load(pre, p + k) * recall(kept, r + k))

    @reassociated
    def sum_products(kept, r, pre, p, n):
        total = T(0)
        for k in range(n):
            total += load(pre, p + k) * recall(kept, r + k)
        return total

    @exact
    def product_group(kept, r, pre, p, gates, q, grad_pre, o, n, running, totals, s, geometry):
        """The gradients of a product, from ds of n elements of a row in ``kept``: gate ds, and pre ds, which is added
        to the sums of a segment, of each element or of all."""
        per_element = geometry[GATE_PER_ELEMENT] > 0
        if geometry[WANT_PRE_GRAD]:
            scale(kept, r, gates, q, per_element, grad_pre, o, n)
        if geometry[WANT_GATE_GRAD]:
            if per_element:
                add_products(kept, r, pre, p, n, running, s)
            else:
                totals[s] += np.float64(sum_products(kept, r, pre, p, n))

    return product_group


def build_backward(
    element: Element, value, pullback, accumulate=True, keeps=False, adds_behind=False, adds_gradient=False, gated=False
):
    """The input's gradient, and with ``accumulate`` the parameters' of segments of PIECE rows; PIECES segments make the
    SUMMED rows.

    Where dz is kept, ``kept`` has room for a group per worker. With ``adds_behind`` it is the gradient of z + post_add,
    and is stored too; with ``adds_gradient`` dx gets ``grad_total``. With ``gated`` the gradients of a product before
    the norm are made too, and the rows of a segment have one gate. Where nothing is kept, long rows are taken in pairs.
    """
    T, rounded, as_read = element.compute, rounded_number(element), widened(element)
    make, keep_group = dz_of(element, pullback, keeps), _keep_group(element, pullback, adds_behind)
    group_sums, pair_sums = _group_sums(element, make, accumulate), _pair_sums(element, make)
    pairs = accumulate and not (keeps or gated)
    gradient_group = _gradient_group(element, make, False, adds_gradient, gated)
    product_group, (open_sums, flush_sums) = _product_group(element), _gate_sums(element)

    @exact
    def statistics_of(given_mean, given_mean_dtype, given_rstd, given_rstd_dtype, unit, geometry):
        centre = T(0) if geometry[RMS] else T(rounded(given_mean, unit, given_mean_dtype))
        return centre, T(rounded(given_rstd, unit, given_rstd_dtype))

    def backward(
        grad, x, dx, given_mean, given_mean_dtype, given_rstd, given_rstd_dtype, weight, bias, wide_weight, wide_bias,
        running, partials, kept, pre_add, pre_gate, post_add, grad_total, grad_post_add, grad_pre_add, gate_running,
        gate_sums, geometry, activation_parameter, worker, start, stop,
    ):  # fmt: skip
        own = worker * geometry[WIDE_WORKER]
        gains = as_read(weight, geometry[GAIN_DTYPE], of_worker(wide_weight, geometry[GAIN_DTYPE], own))
        offsets = as_read(bias, geometry[OFFSET_DTYPE], of_worker(wide_bias, geometry[OFFSET_DTYPE], own))
        groups, length = geometry[GROUPS], geometry[GROUP_CHANNELS]
        channels, alpha = groups * length, T(activation_parameter)
        slot = worker * geometry[KEPT_WORKER]
        flushed = geometry[PIECE] > ROWS_FLUSHED
        for segment in range(start, stop):
            # ``running`` sums the segment's last rows in the compute dtype; ``partials`` all rows before them, if any.
            ps, qs = 2 * segment * channels, (2 * segment + 1) * channels
            together, piece = segment // geometry[PIECES], segment % geometry[PIECES]
            begin = together * geometry[SUMMED] + piece * geometry[PIECE]
            last = min(begin + geometry[PIECE], (together + 1) * geometry[SUMMED])
            if accumulate:
                for c in range(2 * channels):
                    running[ps + c] = T(0)
                for c in range(2 * channels if flushed else 0):
                    partials[ps + c] = 0.0
            if gated:
                open_sums(gate_running, gate_sums, geometry, segment)
            n = begin
            while n < last:
                rows = 2 if pairs and length >= PAIRED and n + 1 < last else 1
                place = parameters_of(geometry[SPATIAL], geometry[MODULATION], n)
                for group in range(groups):
                    unit, channel = n * groups + group, group * length
                    centre, inverse = statistics_of(
                        given_mean, given_mean_dtype, given_rstd, given_rstd_dtype, unit, geometry
                    )
                    i, g, o = begins_of(geometry, n, channel)
                    first, total_p, total_q = place + channel, 0.0, 0.0
                    other_centre, other_inverse, other_p, other_q, j, h, other_o = centre, inverse, 0.0, 0.0, i, g, o
                    if pairs and rows == 2:
                        other_centre, other_inverse = statistics_of(
                            given_mean, given_mean_dtype, given_rstd, given_rstd_dtype, unit + groups, geometry
                        )
                        j, h, other_o = begins_of(geometry, n + 1, channel)
                    if keeps:
                        p = begin_of(geometry[SPATIAL], n, geometry[POST_SAMPLE], geometry[POST_STEP]) + channel
                        keep_group(
                            grad, g, x, i, kept, slot, post_add, p, grad_post_add, o, length, centre, inverse, gains,
                            offsets, first, alpha,
                        )  # fmt: skip
                    for k in range(0, length, CHUNK):
                        if pairs and rows == 2:
                            chunk_p, chunk_q, more_p, more_q = pair_sums(
                                grad, g + k, h + k, x, i + k, j + k, kept, min(CHUNK, length - k), centre, inverse,
                                other_centre, other_inverse, gains, offsets, first + k, alpha, running, ps - place,
                                qs - place,
                            )  # fmt: skip
                            other_p += more_p
                            other_q += more_q
                        else:
                            chunk_p, chunk_q = group_sums(
                                grad, g + k, x, i + k, kept, slot + k, min(CHUNK, length - k), centre, inverse, gains,
                                offsets, first + k, alpha, running, ps - place, qs - place,
                            )  # fmt: skip
                        total_p += chunk_p
                        total_q += chunk_q
                    for _ in range(rows):
                        mean_p, mean_q = 0.0 if geometry[RMS] else total_p / length, total_q / length
                        # The last chunks first: they are still in cache.
                        chunks = (length + CHUNK - 1) // CHUNK if geometry[WANT_INPUT_GRAD] else 0
                        for chunk in range(chunks):
                            k = (chunks - 1 - chunk) * CHUNK
                            gradient_group(
                                grad, g + k, x, i + k, dx, o + k, kept, slot + k, min(CHUNK, length - k), centre,
                                inverse, gains, offsets, first + k, alpha, mean_p, mean_q, running, running, 0,
                                grad_total,
                            )  # fmt: skip
                            if gated:
                                at_pre = begin_of(geometry[SPATIAL], n, geometry[PRE_SAMPLE], geometry[PRE_STEP])
                                at_pre += channel
                                q, at = n // geometry[GATE_ROWS] * geometry[GATE_STEP], segment
                                if geometry[GATE_PER_ELEMENT]:
                                    q, at = q + channel + k, segment * channels + channel + k
                                product_group(
                                    kept, slot + k, pre_add, at_pre + k, pre_gate, q, grad_pre_add, o + k,
                                    min(CHUNK, length - k), gate_running, gate_sums, at, geometry,
                                )  # fmt: skip
                        i, g, o, centre, inverse = j, h, other_o, other_centre, other_inverse
                        total_p, total_q = other_p, other_q
                n += rows
                if gated and (n % ROWS_FLUSHED == 0 or n == last):
                    flush_sums(gate_running, gate_sums, geometry, segment)
                if accumulate and flushed and (n % ROWS_FLUSHED < rows or n == last):
                    for c in range(2 * channels):
                        partials[ps + c] += np.float64(running[ps + c])
                        running[ps + c] = T(0)

    return backward


@cache
def _gate_sums(element: Element):
    """The sums for a gate of a segment of rows, ``gate_sums``; ``gate_running`` has those of its last rows where a gate
    has a number for each element."""
    T = element.compute

    @exact
    def width_of(geometry):
        if not geometry[WANT_GATE_GRAD]:
            return 0
        return geometry[GROUPS] * geometry[GROUP_CHANNELS] if geometry[GATE_PER_ELEMENT] else 1

    @exact
    def open_sums(gate_running, gate_sums, geometry, segment):
        width = width_of(geometry)
        for c in range(segment * width, (segment + 1) * width):
            gate_running[c], gate_sums[c] = T(0), 0.0

    @exact
    def flush_sums(gate_running, gate_sums, geometry, segment):
        width = width_of(geometry)
        for c in range(segment * width, (segment + 1) * width):
            gate_sums[c] += np.float64(gate_running[c])
            gate_running[c] = T(0)

    return open_sums, flush_sums


def build_gate_gradients(element: Element, value, pullback):
    """The gradients of gates start to stop, from the segments of each in order."""

    def gate_gradients(gate_sums, grad_pre_gate, grad_pre_gate_dtype, geometry, start, stop):
        width = geometry[GROUPS] * geometry[GROUP_CHANNELS] if geometry[GATE_PER_ELEMENT] else 1
        for gate in range(start, stop):
            first = gate * geometry[GATE_SEGMENTS] * width
            for segment in range(1, geometry[GATE_SEGMENTS]):
                for c in range(width):
                    gate_sums[first + c] += gate_sums[first + segment * width + c]
            begin = gate * width
            narrow(gate_sums, first - begin, grad_pre_gate, grad_pre_gate_dtype, begin, begin + width)

    return gate_gradients


def build_reduce(element: Element, value, pullback):
    """P and Q of pieces start to stop, each of one group of one row. The pieces of all rows that have the same channels
    follow one another, so that the thread that takes them has these channels in :func:`build_columns` too."""
    T, rounded, as_read = element.compute, rounded_number(element), widened(element)
    group_sums = _group_sums(element, dz_of(element, pullback, kept=False), False)

    def reduce(
        grad, x, given_mean, given_mean_dtype, given_rstd, given_rstd_dtype, weight, bias, wide_weight, wide_bias,
        running, partials, geometry, activation_parameter, start, stop,
    ):  # fmt: skip
        gains = as_read(weight, geometry[GAIN_DTYPE], wide_weight)
        offsets = as_read(bias, geometry[OFFSET_DTYPE], wide_bias)
        groups, length, pieces, rows = geometry[GROUPS], geometry[GROUP_CHANNELS], geometry[PIECES], geometry[SUMMED]
        for task in range(start, stop):
            n, group, piece = task % rows, task // rows // pieces, task // rows % pieces
            unit, k = n * groups + group, piece * geometry[PIECE]
            place, channel = 2 * (unit * pieces + piece), group * length + k
            centre = T(0) if geometry[RMS] else T(rounded(given_mean, unit, given_mean_dtype))
            inverse = T(rounded(given_rstd, unit, given_rstd_dtype))
            i = begin_of(geometry[SPATIAL], n, geometry[INPUT_SAMPLE], geometry[INPUT_STEP]) + channel
            g = begin_of(geometry[SPATIAL], n, geometry[GRAD_SAMPLE], geometry[GRAD_STEP]) + channel
            partials[place], partials[place + 1] = group_sums(
                grad, g, x, i, running, 0, min(geometry[PIECE], length - k), centre, inverse, gains, offsets, channel,
                T(activation_parameter), running, 0, 0,
            )  # fmt: skip

    return reduce


def build_columns(element: Element, value, pullback, accumulate=True):
    """Blocks start to stop of COLUMNS channels in all rows: the input's gradient, and with ``accumulate`` the
    parameters'."""
    T, rounded, as_read = element.compute, rounded_number(element), widened(element)
    make, scratch, wide_scratch = dz_of(element, pullback, kept=False), element.scratch, accesses("float64").scratch
    gradient_group = _gradient_group(element, make, accumulate)

    @exact
    def mean_of_pieces(partials, unit, pieces, count):
        total_p, total_q = 0.0, 0.0
        for task in range(unit * pieces, (unit + 1) * pieces):
            total_p += partials[2 * task]
            total_q += partials[2 * task + 1]
        return total_p / count, total_q / count

    @exact
    def clear(sums, totals, n):
        for c in range(n):
            sums[c] = T(0)
        for c in range(n):
            totals[c] = 0.0

    @exact
    def flush(sums, totals, n):
        for c in range(n):
            totals[c] += np.float64(sums[c])
            sums[c] = T(0)

    def columns(
        grad, x, dx, given_mean, given_mean_dtype, given_rstd, given_rstd_dtype, weight, bias, wide_weight, wide_bias,
        partials, grad_weight, grad_bias, geometry, activation_parameter, start, stop,
    ):  # fmt: skip
        gains = as_read(weight, geometry[GAIN_DTYPE], wide_weight)
        offsets = as_read(bias, geometry[OFFSET_DTYPE], wide_bias)
        groups, length, rows = geometry[GROUPS], geometry[GROUP_CHANNELS], geometry[SUMMED]
        channels, alpha = groups * length, T(activation_parameter)
        ps, qs, total_ps, total_qs = scratch(), scratch(), wide_scratch(), wide_scratch()
        for block in range(start, stop):
            first, last = block * COLUMNS, min((block + 1) * COLUMNS, channels)
            clear(ps, total_ps, last - first)
            clear(qs, total_qs, last - first)
            for n in range(rows):
                i = begin_of(geometry[SPATIAL], n, geometry[INPUT_SAMPLE], geometry[INPUT_STEP])
                g = begin_of(geometry[SPATIAL], n, geometry[GRAD_SAMPLE], geometry[GRAD_STEP])
                o = begin_of(geometry[SPATIAL], n, geometry[OUTPUT_SAMPLE], geometry[OUTPUT_STEP])
                c = first
                while c < last:
                    unit = n * groups + c // length
                    width = min(last, (c // length + 1) * length) - c
                    centre = T(0) if geometry[RMS] else T(rounded(given_mean, unit, given_mean_dtype))
                    inverse = T(rounded(given_rstd, unit, given_rstd_dtype))
                    mean_p, mean_q = mean_of_pieces(partials, unit, geometry[PIECES], length)
                    gradient_group(
                        grad, g + c, x, i + c, dx, o + c, ps, 0, width, centre, inverse, gains, offsets, c, alpha,
                        0.0 if geometry[RMS] else mean_p, mean_q, ps, qs, c - first, dx,
                    )  # fmt: skip
                    c += width
                if accumulate and ((n + 1) % ROWS_FLUSHED == 0 or n + 1 == rows):
                    flush(ps, total_ps, last - first)
                    flush(qs, total_qs, last - first)
            if accumulate:
                narrow(total_ps, -first, grad_bias, geometry[BIAS_DTYPE], first, last)
                narrow(total_qs, -first, grad_weight, geometry[WEIGHT_DTYPE], first, last)

    return columns


def build_widen(element: Element, value, pullback):
    """Weight and bias of channels start to stop, converted to the compute dtype where they have another."""
    widen_operand = widening(element)

    def widen(weight, bias, wide_weight, wide_bias, geometry, start, stop):
        widen_operand(weight, geometry[WEIGHT_DTYPE], wide_weight, start, stop)
        widen_operand(bias, geometry[BIAS_DTYPE], wide_bias, start, stop)

    return widen


def build_widen_own(element: Element, value, pullback):
    """The same of all channels, for one worker alone: numbers that another core has written take it 30 ns for each 64
    bytes, and to convert them 2. layer_norm of 4 x 65536 in bfloat16 took two cores 162 us, and 41 with parameters in
    float32."""
    widen_operand = widening(element)

    def widen_own(weight, bias, wide_weight, wide_bias, geometry, worker, start, stop):
        channels, own = geometry[GROUPS] * geometry[GROUP_CHANNELS], worker * geometry[WIDE_WORKER]
        weight_dtype, bias_dtype = geometry[WEIGHT_DTYPE], geometry[BIAS_DTYPE]
        widen_operand(weight, weight_dtype, of_worker(wide_weight, weight_dtype, own), 0, channels)
        widen_operand(bias, bias_dtype, of_worker(wide_bias, bias_dtype, own), 0, channels)

    return widen_own


@cache
def combining(element: Element):
    """combine(gain, offset, gains, offsets, i, n): A = weight (1 + scale) and B = bias (1 + scale) + shift, each
    rounded once, in the place of scale and shift."""
    T = element.compute

    @uncontracted
    def combine(gain, offset, gains, offsets, i, n):
        for k in range(n):
            factor, shift = 1.0 + np.float64(gains[i + k]), np.float64(offsets[i + k])
            gains[i + k] = T(np.float64(gain[k]) * factor)
            offsets[i + k] = T(np.float64(offset[k]) * factor + shift)

    return combine


def build_modulate(element: Element, value, pullback):
    """A and B of samples start to stop."""
    convert, combine, scratch = converting(element), combining(element), element.scratch

    def modulate(weight, bias, scale, shift, wide_weight, wide_bias, geometry, start, stop):
        channels, gain, offset = geometry[GROUPS] * geometry[GROUP_CHANNELS], scratch(), scratch()
        for n in range(start, stop):
            for c in range(0, channels, SCRATCH):
                i, width = n * channels + c, min(SCRATCH, channels - c)
                convert(weight, c, geometry[WEIGHT_DTYPE], 1.0, gain, 0, width)
                convert(bias, c, geometry[BIAS_DTYPE], 0.0, offset, 0, width)
                convert(scale, i, geometry[SCALE_DTYPE], 0.0, wide_weight, i, width)
                convert(shift, i, geometry[SHIFT_DTYPE], 0.0, wide_bias, i, width)
                combine(gain, offset, wide_weight, wide_bias, i, width)

    return modulate


@cache
def segment_summer(element: Element):
    read = element.read

    @exact
    def add_segment(partials, first, running, other, start, stop, flushed):
        if flushed:
            for c in range(start, stop):
                partials[first + c] += partials[other + c]
        else:
            for c in range(start, stop):
                partials[first + c] += np.float64(read(running, other + c))

    @exact
    def sum_segments(partials, running, first, geometry, start, stop):
        """The sums of channels start to stop of all segments, in order, put into ``partials`` from ``first`` on.

        Segments of few rows have left theirs in ``running``."""
        channels, flushed = geometry[GROUPS] * geometry[GROUP_CHANNELS], geometry[PIECE] > ROWS_FLUSHED
        for c in range(start, start if flushed else stop):
            partials[first + c] = 0.0
        for segment in range(1 if flushed else 0, geometry[SEGMENTS]):
            add_segment(partials, first, running, 2 * segment * channels + first, start, stop, flushed)

    return sum_segments


def build_parameter_gradients(element: Element, value, pullback):
    """The gradients of weight and bias for channels start to stop, from the segments in order."""
    sum_segments = segment_summer(element)

    def parameter_gradients(partials, running, grad_weight, grad_bias, geometry, start, stop):
        channels = geometry[GROUPS] * geometry[GROUP_CHANNELS]
        for place in range(2):  # one loop for both: the code takes half as long to compile
            gradient, dtype = grad_bias, geometry[BIAS_DTYPE]
            if place == 1:
                gradient, dtype = grad_weight, geometry[WEIGHT_DTYPE]
            first = place * channels
            sum_segments(partials, running, first, geometry, start, stop)
            narrow(partials, first, gradient, dtype, start, stop)

    return parameter_gradients


def build_modulation_sums(element: Element, value, pullback):
    """p and q per (n, c) of samples start to stop, from the segments of each in order."""
    read = element.read

    @exact
    def add_segment(sums, first, running, partials, start, n, flushed):
        """Add n numbers of a segment, the p of its channels and then their q."""
        if flushed:
            for c in range(n):
                sums[first + c] += partials[start + c]
        else:
            for c in range(n):
                sums[first + c] += np.float64(read(running, start + c))

    def modulation_sums(partials, running, sums, geometry, start, stop):
        width, segments = 2 * geometry[GROUPS] * geometry[GROUP_CHANNELS], geometry[SEGMENTS]
        flushed = geometry[PIECE] > ROWS_FLUSHED
        for n in range(start, stop):
            for c in range(n * width, (n + 1) * width):
                sums[c] = 0.0
            for segment in range(n * segments, (n + 1) * segments):
                add_segment(sums, n * width, running, partials, segment * width, width, flushed)

    return modulation_sums


QUANTIZING = {
    f"forward{added}_{dtype}{by}": partial(build_forward, adds_before=bool(added), quantized=(dtype, bool(by)))
    for added in ("", "_before") for dtype in FORMATS for by in ("", "_by_row")
}  # fmt: skip
BUILDERS = {
    **QUANTIZING,
    "forward": build_forward,
    **summed("forward", build_forward, by_channel=False),
    **backwards(build_backward, gates=True),
    **backwards(partial(build_backward, accumulate=False), "backward_data", gates=True),
    "gate_gradients": build_gate_gradients,
    "reduce": build_reduce,
    "columns": build_columns,
    "columns_data": partial(build_columns, accumulate=False),
    "widen": build_widen,
    "widen_own": build_widen_own,
    "modulate": build_modulate,
    "modulation_sums": build_modulation_sums,
    "parameter_gradients": build_parameter_gradients,
}
