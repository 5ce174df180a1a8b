"""Kernels for one position per channel: a sample is a contiguous row of G groups of D channels, the affine per element.

layer_norm and rms_norm are this case, and any norm of a 2-D input, without modulation. Loops run along weight and bias,
so these are read where they lie if they have the compute dtype, and otherwise from ``wide_weight`` and ``wide_bias``:
``widen`` has converted them, or the plan holds ones and zeros there for those that the user did not give. The forward
takes each row from its statistics to its output; the backward does so too and sums the gradients of the parameters
over fixed segments of rows.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from fusednorm.backends.cpu.geometry import (
    BIAS_DTYPE,
    GRAD_SAMPLE,
    GROUP_CHANNELS,
    GROUPS,
    INPUT_SAMPLE,
    OUTPUT_SAMPLE,
    PIECE,
    PIECES,
    RMS,
    SAMPLES,
    WANT_INPUT_GRAD,
    WEIGHT_DTYPE,
)
from fusednorm.backends.cpu.kernels.affine import normalized, reduced_count
from fusednorm.backends.cpu.kernels.device import exact, reassociated
from fusednorm.backends.cpu.kernels.elements import Element
from fusednorm.backends.cpu.kernels.moments import CHUNK, moments
from fusednorm.backends.cpu.kernels.operands import narrow, rounded_number, widened, widening

FLUSH = 64  # rows summed in the compute dtype before the sums go to float64


@exact
def scaled(gain, inverse):
    """A rstd, to the bit what the other kernels have from float64: the product of two floats is exact there."""
    return gain * inverse


def build_forward(element: Element, value, pullback):
    """Rows start to stop."""
    load, read, store, T = element.load, element.read, element.store, element.compute
    row_moments, as_read = moments(element), widened(element)

    @exact
    def apply_row(x, i, y, j, n, mean, rstd, weight, bias, first, parameter):
        """y = value(weight xhat + bias)."""
        centre, inverse, p = T(mean), T(rstd), T(parameter)
        for k in range(n):
            z = normalized(load(x, i + k) - centre, scaled(read(weight, first + k), inverse), read(bias, first + k))
            store(y, j + k, value(z, p))

    def forward(
        x, y, mean, rstd, weight, bias, wide_weight, wide_bias, geometry, eps, activation_parameter, start, stop
    ):
        gains = as_read(weight, geometry[WEIGHT_DTYPE], wide_weight)
        offsets = as_read(bias, geometry[BIAS_DTYPE], wide_bias)
        groups, length = geometry[GROUPS], geometry[GROUP_CHANNELS]
        for n in range(start, stop):
            for g in range(groups):
                i = n * geometry[INPUT_SAMPLE] + g * length
                centre, m2 = row_moments(x, i, length, geometry[RMS])
                inverse = 1.0 / np.sqrt(m2 / reduced_count(geometry) + eps)
                rstd[n * groups + g] = T(inverse)
                if not geometry[RMS]:
                    mean[n * groups + g] = T(centre)
                j = n * geometry[OUTPUT_SAMPLE] + g * length
                apply_row(x, i, y, j, length, centre, inverse, gains, offsets, g * length, activation_parameter)

    return forward


@cache
def _group_sums(element: Element, pullback, accumulate: bool):
    """P and Q of one group of one row; with accumulate, the gradients of the parameters are summed on the way."""
    load, read, T = element.load, element.read, element.compute
    add_first, add_second = element.add_first, element.add_second

    @reassociated
    def group_sums(grad, g, x, i, n, centre, inverse, weight, bias, first, parameter, sums, ps, qs):
        total_p, total_q = T(0), T(0)
        for k in range(n):
            deviation, gain = load(x, i + k) - centre, read(weight, first + k)
            xhat, z = deviation * inverse, normalized(deviation, scaled(gain, inverse), read(bias, first + k))
            dz = pullback(load(grad, g + k), z, parameter)
            if accumulate:
                add_first(sums, ps + first + k, dz)
                add_second(sums, qs + first + k, dz * xhat)
            total_p += gain * dz
            total_q += gain * dz * xhat
        return np.float64(total_p), np.float64(total_q)

    return group_sums


@cache
def _gradient_group(element: Element, pullback):
    load, read, store, T = element.load, element.read, element.store, element.compute

    @exact
    def gradient_group(grad, g, x, i, dx, o, n, centre, inverse, weight, bias, first, parameter, mean_p, mean_q):
        """dx = rstd (weight dz - (P + xhat Q) / K)."""
        p, q = T(mean_p), T(mean_q)
        for k in range(n):
            deviation, gain = load(x, i + k) - centre, read(weight, first + k)
            xhat, z = deviation * inverse, normalized(deviation, scaled(gain, inverse), read(bias, first + k))
            dz = pullback(load(grad, g + k), z, parameter)
            store(dx, o + k, inverse * (gain * dz - (p + xhat * q)))

    return gradient_group


@cache
def _build_backward(element: Element, pullback, accumulate: bool):
    """Segments start to stop of PIECE rows each."""
    T, rounded, as_read = element.compute, rounded_number(element), widened(element)
    group_sums, gradient_group = _group_sums(element, pullback, accumulate), _gradient_group(element, pullback)

    def backward(
        grad, x, dx, given_mean, given_mean_dtype, given_rstd, given_rstd_dtype, weight, bias, wide_weight, wide_bias,
        running, partials, geometry, activation_parameter, start, stop,
    ):  # fmt: skip
        gains = as_read(weight, geometry[WEIGHT_DTYPE], wide_weight)
        offsets = as_read(bias, geometry[BIAS_DTYPE], wide_bias)
        groups, length, count = geometry[GROUPS], geometry[GROUP_CHANNELS], reduced_count(geometry)
        channels, p = groups * length, T(activation_parameter)
        for segment in range(start, stop):
            # The segment's running sums in the compute dtype, and what was flushed from them.
            ps, qs = 2 * segment * channels, (2 * segment + 1) * channels
            last = min((segment + 1) * geometry[PIECE], geometry[SAMPLES])
            if accumulate:
                for c in range(2 * channels):
                    partials[ps + c], running[ps + c] = 0.0, T(0)
            for n in range(segment * geometry[PIECE], last):
                for group in range(groups):
                    unit, first = n * groups + group, group * length
                    centre = T(0) if geometry[RMS] else T(rounded(given_mean, unit, given_mean_dtype))
                    inverse = T(rounded(given_rstd, unit, given_rstd_dtype))
                    i, g = n * geometry[INPUT_SAMPLE] + first, n * geometry[GRAD_SAMPLE] + first
                    total_p, total_q = 0.0, 0.0
                    for k in range(0, length, CHUNK):
                        chunk_p, chunk_q = group_sums(
                            grad, g + k, x, i + k, min(CHUNK, length - k), centre, inverse, gains, offsets,
                            first + k, p, running, ps, qs,
                        )  # fmt: skip
                        total_p += chunk_p
                        total_q += chunk_q
                    if geometry[WANT_INPUT_GRAD]:
                        mean_p, mean_q = 0.0 if geometry[RMS] else total_p / count, total_q / count
                        gradient_group(
                            grad, g, x, i, dx, n * geometry[OUTPUT_SAMPLE] + first, length, centre, inverse, gains,
                            offsets, first, p, mean_p, mean_q,
                        )  # fmt: skip
                if accumulate and ((n + 1) % FLUSH == 0 or n + 1 == last):
                    for c in range(2 * channels):
                        partials[ps + c] += np.float64(running[ps + c])
                        running[ps + c] = T(0)

    return backward


def build_backward(element: Element, value, pullback):
    """The input's gradient, and the parameters' per segment."""
    return _build_backward(element, pullback, True)


def build_backward_data(element: Element, value, pullback):
    """The input's gradient alone."""
    return _build_backward(element, pullback, False)


def build_widen(element: Element, value, pullback):
    """Weight and bias of channels start to stop in the compute dtype, where they have another."""
    widen_operand = widening(element)

    def widen(weight, bias, wide_weight, wide_bias, geometry, start, stop):
        widen_operand(weight, geometry[WEIGHT_DTYPE], wide_weight, start, stop)
        widen_operand(bias, geometry[BIAS_DTYPE], wide_bias, start, stop)

    return widen


@exact
def _add_segment(partials, segment, start, stop):
    for c in range(start, stop):
        partials[c] += partials[segment + c]


def build_parameter_gradients(element: Element, value, pullback):
    """The gradients of weight and bias for channels start to stop, from the segments in order."""

    def parameter_gradients(partials, grad_weight, grad_bias, geometry, start, stop):
        channels = geometry[GROUPS] * geometry[GROUP_CHANNELS]
        for segment in range(1, geometry[PIECES]):
            _add_segment(partials, 2 * segment * channels, start, stop)
            _add_segment(partials, 2 * segment * channels, channels + start, channels + stop)
        narrow(partials, channels, grad_weight, geometry[WEIGHT_DTYPE], start, stop)
        narrow(partials, 0, grad_bias, geometry[BIAS_DTYPE], start, stop)

    return parameter_gradients


BUILDERS = {
    "forward": build_forward,
    "backward": build_backward,
    "backward_data": build_backward_data,
    "widen": build_widen,
    "parameter_gradients": build_parameter_gradients,
}
