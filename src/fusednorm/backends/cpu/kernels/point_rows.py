"""Kernels for rows each with a scale and shift of its own: 2-D inputs of any norm but batch_norm, with modulation.

They are those of rows.py, but A = weight (1 + scale) and B = bias (1 + scale) + shift are as many as the elements: each
is made where it is needed. The gradients of shift and scale are dz and weight dz xhat + bias dz of the element itself,
and those of bias and weight are sums of (1 + scale) dz and (1 + scale) dz xhat.

A backward keeps A dz of a group between the pass that sums and the pass that writes; an activation with an exponential
gets a pass of its own before both (``keeps``), since sums end in scalar code.
"""

from __future__ import annotations

from functools import cache, partial

import numpy as np

from fusednorm.backends.cpu.geometry import (
    BIAS_DTYPE,
    DTYPE_CODES,
    GRAD_SAMPLE,
    GROUP_CHANNELS,
    GROUPS,
    INPUT_SAMPLE,
    KEPT_WORKER,
    OUTPUT_SAMPLE,
    PIECE,
    RMS,
    ROWS_FLUSHED,
    SCALE_DTYPE,
    SCRATCH,
    SHIFT_DTYPE,
    SUMMED,
    WANT_INPUT_GRAD,
    WEIGHT_DTYPE,
)
from fusednorm.backends.cpu.kernels.affine import normalized
from fusednorm.backends.cpu.kernels.device import exact, reassociated, span
from fusednorm.backends.cpu.kernels.elements import Element
from fusednorm.backends.cpu.kernels.elements import element as accesses
from fusednorm.backends.cpu.kernels.moments import moments
from fusednorm.backends.cpu.kernels.operands import (
    converting,
    factor_of,
    modulated,
    narrow,
    own,
    rounded_number,
    wanted,
    widened,
)
from fusednorm.backends.cpu.kernels.rows import scaled

TILE = SCRATCH  # elements of a row whose scale and shift are converted at a time


@cache
def _z_of(element: Element, modulation):
    """z_of(x, i, weight, bias, c, scale, shift, m, centre, inverse): A, xhat and z of an element; ``modulation`` reads
    scale and shift."""
    load, read = element.load, element.read

    @exact
    def z_of(x, i, weight, bias, c, scale, shift, m, centre, inverse):
        a, b = modulated(read(weight, c), read(bias, c), modulation(scale, m), modulation(shift, m))
        deviation = load(x, i) - centre
        return a, deviation * inverse, normalized(deviation, scaled(a, inverse), b)

    return z_of


@cache
def _output(element: Element, value, modulation):
    z_of, store = _z_of(element, modulation), element.store

    @exact
    def output(x, i, y, j, weight, bias, c, scale, shift, m, n, centre, inverse, alpha):
        for part in range(2):
            start, stop = span(part, n)
            for k in range(start, stop):
                _, _, z = z_of(x, i + k, weight, bias, c + k, scale, shift, m + k, centre, inverse)
                store(y, j + k, value(z, alpha))

    return output


def build_forward(element: Element, value, pullback):
    """Rows start to stop."""
    T, row_moments, as_read, convert = element.compute, moments(element), widened(element), converting(element)
    own_output, output = _output(element, value, element.load), _output(element, value, element.read)
    in_place, code, scratch = own(element), DTYPE_CODES[element.dtype], element.scratch

    def forward(
        x, y, mean, rstd, weight, bias, wide_weight, wide_bias, scale, shift, geometry, eps, activation_parameter,
        start, stop,
    ):  # fmt: skip
        gains, offsets = (
            as_read(weight, geometry[WEIGHT_DTYPE], wide_weight), as_read(bias, geometry[BIAS_DTYPE], wide_bias)
        )  # fmt: skip
        groups, length, rms, alpha = geometry[GROUPS], geometry[GROUP_CHANNELS], geometry[RMS], T(activation_parameter)
        scale_dtype, shift_dtype = geometry[SCALE_DTYPE], geometry[SHIFT_DTYPE]
        scales, shifts, at_once = scratch(), scratch(), scale_dtype == code and shift_dtype == code
        for n in range(start, stop):
            i, j, m = n * geometry[INPUT_SAMPLE], n * geometry[OUTPUT_SAMPLE], n * groups * length
            for group in range(groups):
                unit, c = n * groups + group, group * length
                centre, m2 = row_moments(x, i + c, length, rms)
                inverse = 1.0 / np.sqrt(m2 / length + eps)
                rstd[unit] = T(inverse)
                if not rms:
                    mean[unit] = T(centre)
                if at_once:
                    own_output(
                        x, i + c, y, j + c, gains, offsets, c, in_place(scale), in_place(shift), m + c, length,
                        T(centre), T(inverse), alpha,
                    )  # fmt: skip
                    continue
                for k in range(c, c + length, TILE):
                    width = min(TILE, c + length - k)
                    convert(scale, m + k, scale_dtype, T(0), scales, 0, width)
                    convert(shift, m + k, shift_dtype, T(-0.0), shifts, 0, width)  # to add -0 changes nothing
                    output(
                        x, i + k, y, j + k, gains, offsets, k, scales, shifts, 0, width, T(centre), T(inverse), alpha
                    )

    return forward


@cache
def _group_sums(element: Element, pullback, keeps: bool, accumulate: bool, modulation, put):
    """P and Q of n elements of a row, with A dz in ``kept``; with ``accumulate`` the gradients of scale and shift too,
    put where ``put`` puts them, and the sums for those of weight and bias. ``modulation`` reads scale and shift."""
    load, read, keep, recall, T = element.load, element.read, element.keep, element.recall, element.compute
    add_first, add_second, z_of = element.add_first, element.add_second, _z_of(element, modulation)

    @exact
    def keep_dz(grad, g, x, i, kept, r, weight, bias, c, scale, shift, m, n, centre, inverse, alpha):
        for part in range(2):
            start, stop = span(part, n)
            for k in range(start, stop):
                _, _, z = z_of(x, i + k, weight, bias, c + k, scale, shift, m + k, centre, inverse)
                keep(kept, r + k, pullback(load(grad, g + k), z, alpha))

    @reassociated
    def sums(
        grad, g, x, i, kept, r, weight, bias, c, scale, shift, m, n, centre, inverse, alpha, running, ps, qs,
        grad_scale, grad_shift,
    ):  # fmt: skip
        total_p, total_q = T(0), T(0)
        for k in range(n):
            a, xhat, z = z_of(x, i + k, weight, bias, c + k, scale, shift, m + k, centre, inverse)
            dz = recall(kept, r + k) if keeps else pullback(load(grad, g + k), z, alpha)
            if accumulate:
                factor = factor_of(modulation(scale, m + k))
                add_first(running, ps + k, factor * dz)
                add_second(running, qs + k, factor * (dz * xhat))
                put(grad_scale, m + k, read(weight, c + k) * (dz * xhat) + read(bias, c + k) * dz)
                put(grad_shift, m + k, dz)
            weighted = a * dz
            keep(kept, r + k, weighted)
            total_p += weighted
            total_q += weighted * xhat
        return np.float64(total_p), np.float64(total_q)

    @exact
    def group_sums(
        grad, g, x, i, kept, r, weight, bias, c, scale, shift, m, n, centre, inverse, alpha, running, ps, qs,
        grad_scale, grad_shift,
    ):  # fmt: skip
        if keeps:
            keep_dz(grad, g, x, i, kept, r, weight, bias, c, scale, shift, m, n, centre, inverse, alpha)
        return sums(
            grad, g, x, i, kept, r, weight, bias, c, scale, shift, m, n, centre, inverse, alpha, running, ps, qs,
            grad_scale, grad_shift,
        )  # fmt: skip

    return group_sums


def build_backward(element: Element, value, pullback, accumulate=True, keeps=False):
    """The input's gradient, and with ``accumulate`` the others: of weight and bias the sums of segments of PIECE rows.
    ``kept`` has room for a group per worker."""
    T, rounded, as_read, convert = element.compute, rounded_number(element), widened(element), converting(element)
    load, store, recall, scratch = element.load, element.store, element.recall, element.scratch
    in_place, code = own(element), DTYPE_CODES[element.dtype]
    own_sums = _group_sums(element, pullback, keeps, accumulate, element.load, element.store)
    group_sums = _group_sums(element, pullback, keeps, accumulate, element.read, accesses(T.__name__).store)

    @exact
    def gradient(x, i, dx, o, kept, r, n, centre, inverse, p, q):
        for part in range(2):
            start, stop = span(part, n)
            for k in range(start, stop):
                xhat = (load(x, i + k) - centre) * inverse
                store(dx, o + k, inverse * (recall(kept, r + k) - (p + xhat * q)))

    def backward(
        grad, x, dx, given_mean, given_mean_dtype, given_rstd, given_rstd_dtype, weight, bias, wide_weight, wide_bias,
        scale, shift, grad_scale, grad_shift, running, partials, kept, geometry, activation_parameter, worker, start,
        stop,
    ):  # fmt: skip
        gains, offsets = (
            as_read(weight, geometry[WEIGHT_DTYPE], wide_weight), as_read(bias, geometry[BIAS_DTYPE], wide_bias)
        )  # fmt: skip
        groups, length, rms, alpha = geometry[GROUPS], geometry[GROUP_CHANNELS], geometry[RMS], T(activation_parameter)
        channels, slot, flushed = groups * length, worker * geometry[KEPT_WORKER], geometry[PIECE] > ROWS_FLUSHED
        scale_dtype, shift_dtype = geometry[SCALE_DTYPE], geometry[SHIFT_DTYPE]
        at_once = scale_dtype == code and shift_dtype == code
        if accumulate:
            at_once = at_once and wanted(grad_scale) and wanted(grad_shift)
        scales, shifts, scale_gradients, shift_gradients = scratch(), scratch(), scratch(), scratch()
        for segment in range(start, stop):
            ps, qs = 2 * segment * channels, (2 * segment + 1) * channels
            begin = segment * geometry[PIECE]
            last = min(begin + geometry[PIECE], geometry[SUMMED])
            if accumulate:
                for c in range(ps, ps + 2 * channels):
                    running[c] = T(0)
                for c in range(ps, ps + (2 * channels if flushed else 0)):
                    partials[c] = 0.0
            for n in range(begin, last):
                i, g, o, m = (
                    n * geometry[INPUT_SAMPLE], n * geometry[GRAD_SAMPLE], n * geometry[OUTPUT_SAMPLE], n * channels
                )  # fmt: skip
                for group in range(groups):
                    unit, c, total_p, total_q = n * groups + group, group * length, 0.0, 0.0
                    centre = T(0) if rms else T(rounded(given_mean, unit, given_mean_dtype))
                    inverse = T(rounded(given_rstd, unit, given_rstd_dtype))
                    for k in range(c, c + length, TILE):
                        width = min(TILE, c + length - k)
                        if at_once:
                            p, q = own_sums(
                                grad, g + k, x, i + k, kept, slot + k - c, gains, offsets, k, in_place(scale),
                                in_place(shift), m + k, width, centre, inverse, alpha, running, ps + k, qs + k,
                                in_place(grad_scale), in_place(grad_shift),
                            )  # fmt: skip
                        else:
                            convert(scale, m + k, scale_dtype, T(0), scales, 0, width)
                            convert(shift, m + k, shift_dtype, T(-0.0), shifts, 0, width)
                            p, q = group_sums(
                                grad, g + k, x, i + k, kept, slot + k - c, gains, offsets, k, scales, shifts, 0, width,
                                centre, inverse, alpha, running, ps + k, qs + k, scale_gradients, shift_gradients,
                            )  # fmt: skip
                            if accumulate:
                                narrow(scale_gradients, -m - k, grad_scale, scale_dtype, m + k, m + k + width)
                                narrow(shift_gradients, -m - k, grad_shift, shift_dtype, m + k, m + k + width)
                        total_p += p
                        total_q += q
                    if geometry[WANT_INPUT_GRAD]:
                        mean_p, mean_q = T(0) if rms else T(total_p / length), T(total_q / length)
                        gradient(x, i + c, dx, o + c, kept, slot, length, centre, inverse, mean_p, mean_q)
                if accumulate and flushed and ((n + 1 - begin) % ROWS_FLUSHED == 0 or n + 1 == last):
                    for c in range(ps, ps + 2 * channels):
                        partials[c] += np.float64(running[c])
                        running[c] = T(0)

    return backward


BUILDERS = {
    "forward": build_forward,
    **{
        name + kept: partial(build_backward, accumulate=name == "backward", keeps=bool(kept))
        for name in ("backward", "backward_data")
        for kept in ("", "_kept")
    },
}
