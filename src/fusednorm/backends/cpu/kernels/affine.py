"""What every memory order shares: the affine of a channel, storing statistics, the gradients of the parameters."""

from __future__ import annotations

from functools import cache

import numpy as np

from fusednorm.backends.cpu.geometry import (
    BIAS_DTYPE,
    GROUP_CHANNELS,
    GROUPS,
    PER_BATCH,
    RMS,
    SAMPLES,
    SCALE_DTYPE,
    SCRATCH,
    SHIFT_DTYPE,
    SPATIAL,
    WANT_VARIANCE,
    WEIGHT_DTYPE,
)
from fusednorm.backends.cpu.kernels.device import exact, inlined, uncontracted
from fusednorm.backends.cpu.kernels.elements import Element
from fusednorm.backends.cpu.kernels.elements import element as accesses
from fusednorm.backends.cpu.kernels.operands import converting, narrow, number, rounded_number, wanted


@exact
def reduced_count(geometry):
    """K, the number of elements under one statistic."""
    outer = geometry[SAMPLES] if geometry[PER_BATCH] else geometry[GROUP_CHANNELS]
    return outer * geometry[SPATIAL]


@cache
def affine(element: Element):
    """affine(weight, bias, scale, shift, geometry, n, c): A = weight (1 + scale) and B = bias (1 + scale) + shift of
    channel c in sample n, in float64, from operands rounded to the compute dtype."""
    rounded = rounded_number(element)

    @uncontracted
    def affine(weight, bias, scale, shift, geometry, n, c):
        gain, offset = 1.0, 0.0
        if geometry[WEIGHT_DTYPE]:
            gain = rounded(weight, c, geometry[WEIGHT_DTYPE])
        if geometry[BIAS_DTYPE]:
            offset = rounded(bias, c, geometry[BIAS_DTYPE])
        modulation = n * geometry[GROUPS] * geometry[GROUP_CHANNELS] + c
        if geometry[SCALE_DTYPE]:
            factor = 1.0 + rounded(scale, modulation, geometry[SCALE_DTYPE])
            gain, offset = gain * factor, offset * factor
        if geometry[SHIFT_DTYPE]:
            offset += rounded(shift, modulation, geometry[SHIFT_DTYPE])
        return gain, offset

    return affine


@exact
def normalized(deviation, a, b):
    """z of x - mean, with a = A rstd and b = B.

    Every forward and backward calls this function with the mean and rstd that the forward saves. So the backward has
    the forward's z to the bit, and takes the activation's derivative at the z of the output which the user saw.
    """
    return deviation * a + b


@cache
def dz_of(element: Element, pullback, kept: bool):
    """dz of an element: computed from grad_output and z, or what was ``kept`` of it."""
    load, recall = element.load, element.recall

    @inlined
    def made(grad, g, kept, r, z, alpha):
        return pullback(load(grad, g), z, alpha)

    @inlined
    def recalled(grad, g, kept, r, z, alpha):
        return recall(kept, r)

    return recalled if kept else made


@cache
def publish(element: Element):
    """publish(mean, rstd, variance, geometry, eps, unit, centre, M2) stores a unit's statistics, and returns mean and
    rstd as stored."""
    T = element.compute

    @exact
    def publish(mean, rstd, variance, geometry, eps, unit, centre, m2):
        spread = m2 / reduced_count(geometry)
        kept_mean, kept_rstd = T(centre), T(1.0 / np.sqrt(spread + eps))
        rstd[unit] = kept_rstd
        if not geometry[RMS]:
            mean[unit] = kept_mean
        if geometry[WANT_VARIANCE]:
            variance[unit] = T(spread)
        return np.float64(kept_mean), np.float64(kept_rstd)

    return publish


@cache
def publish_units(element: Element):
    """publish_units(stats, mean, rstd, variance, geometry, eps, start, stop) publishes the statistics of units, whose
    mean and M2 ``stats`` holds, and puts mean and rstd as stored in their place. A loop for each makes vector code."""
    T = element.compute

    @exact
    def publish_units(stats, mean, rstd, variance, geometry, eps, start, stop):
        count, rms, wants_variance = reduced_count(geometry), geometry[RMS], geometry[WANT_VARIANCE]
        if wants_variance:
            for unit in range(start, stop):
                variance[unit] = T(stats[2 * unit + 1] / count)
        for unit in range(start, stop):
            kept_rstd = T(1.0 / np.sqrt(stats[2 * unit + 1] / count + eps))
            rstd[unit] = kept_rstd
            stats[2 * unit + 1] = np.float64(kept_rstd)
        if not rms:
            for unit in range(start, stop):
                kept_mean = T(stats[2 * unit])
                mean[unit] = kept_mean
                stats[2 * unit] = np.float64(kept_mean)

    return publish_units


def build_given(element: Element, value, pullback):
    """mean and rstd from given mean and variance.

    The variance is not rounded before its root: a float64 variance could be 0 or infinite in float32.
    """
    T = element.compute

    def given(
        given_mean,
        given_mean_dtype,
        given_variance,
        given_variance_dtype,
        stats,
        mean,
        rstd,
        geometry,
        eps,
        start,
        stop,
    ):
        for unit in range(start, stop):
            centre = T(number(given_mean, unit, given_mean_dtype))
            inverse = T(1.0 / np.sqrt(number(given_variance, unit, given_variance_dtype) + eps))
            mean[unit], rstd[unit] = centre, inverse
            stats[2 * unit], stats[2 * unit + 1] = np.float64(centre), np.float64(inverse)

    return given


@exact
def add_numbers(totals, t, sums, i, n):
    """Add n numbers from place i on to those from t on."""
    for k in range(n):
        totals[t + k] += sums[i + k]


@cache
def channel_affines(element: Element):
    """channel_affines(weight, bias, scale, shift, geometry, n, c, channels, gains, offsets, scales, shifts): A and B in
    float64 of so many channels from c on, to the bit those of :func:`affine`. Behind the last channel come those of the
    next samples. The last two arrays are for its own use."""
    convert = converting(element)

    @exact
    def place(numbers, c, all_channels, dtype, default, places, channels):
        count = min(channels, all_channels - c)
        convert(numbers, c, dtype, default, places, 0, count)
        if channels > count:
            convert(numbers, 0, dtype, default, places, count, min(channels, all_channels) - count)
            for k in range(all_channels, channels):
                places[k] = places[k - all_channels]

    @uncontracted
    def multiply(gains, offsets, scales, n):
        for k in range(n):
            factor = 1.0 + scales[k]
            gains[k] *= factor
            offsets[k] *= factor

    @exact
    def channel_affines(weight, bias, scale, shift, geometry, n, c, channels, gains, offsets, scales, shifts):
        all_channels = geometry[GROUPS] * geometry[GROUP_CHANNELS]
        place(weight, c, all_channels, geometry[WEIGHT_DTYPE], 1.0, gains, channels)
        place(bias, c, all_channels, geometry[BIAS_DTYPE], 0.0, offsets, channels)
        modulation = n * all_channels + c
        if geometry[SCALE_DTYPE]:
            convert(scale, modulation, geometry[SCALE_DTYPE], 0.0, scales, 0, channels)
            multiply(gains, offsets, scales, channels)
        if geometry[SHIFT_DTYPE]:
            convert(shift, modulation, geometry[SHIFT_DTYPE], 0.0, shifts, 0, channels)
            add_numbers(offsets, 0, shifts, 0, channels)

    return channel_affines


@cache
def _modulated_channels(element: Element):
    rounded = rounded_number(element)

    @exact
    def add_scaled(totals, t, sums, i, scale, first, dtype, n):
        for k in range(n):
            totals[t + k] += (1.0 + rounded(scale, first + k, dtype)) * sums[i + k]

    @exact
    def scale_gradients(sums, p, q, gains, offsets, values, n):
        for k in range(n):
            values[k] = gains[k] * sums[q + k] + offsets[k] * sums[p + k]

    return add_scaled, scale_gradients


@exact
def put(gradient, first, dtype, numbers, i, n):
    """Store n numbers, which begin at i, from place ``first`` of a gradient on, if it is wanted."""
    narrow(numbers, i - first, gradient, dtype, first, first + n)


def build_parameter_gradients(element: Element, value, pullback):
    """The gradients of the parameters from p and q per (n, c): a sample has p of its channels, and then q.

    grad_bias = sum_n (1 + s) p, grad_weight = sum_n (1 + s) q, grad_shift = p, grad_scale = weight q + bias p.
    """
    scratch, convert = accesses("float64").scratch, converting(element)
    add_scaled, scale_gradients = _modulated_channels(element)

    def parameter_gradients(
        sums, weight, bias, scale, grad_weight, grad_bias, grad_scale, grad_shift, geometry, start, stop
    ):
        channels, scale_dtype = geometry[GROUPS] * geometry[GROUP_CHANNELS], geometry[SCALE_DTYPE]
        weight_dtype, bias_dtype, shift_dtype = geometry[WEIGHT_DTYPE], geometry[BIAS_DTYPE], geometry[SHIFT_DTYPE]
        totals, gains, offsets, values = scratch(), scratch(), scratch(), scratch()
        # Several samples of few channels, which touch, are summed as one, for longer loops.
        alone = scale_dtype or wanted(grad_scale) or wanted(grad_shift) or stop - start < channels
        together = 1 if alone else max(1, SCRATCH // 2 // max(1, channels))
        for first in range(start, stop, SCRATCH // 2):
            width = min(SCRATCH // 2, stop - first)
            for k in range(2 * width * together):
                totals[k] = 0.0
            if wanted(grad_scale):
                convert(weight, first, weight_dtype, 1.0, gains, 0, width)
                convert(bias, first, bias_dtype, 0.0, offsets, 0, width)
            for step in range((geometry[SAMPLES] + together - 1) // together):
                n = step * together
                p, q, place = 2 * n * channels + first, (2 * n + 1) * channels + first, n * channels + first
                if scale_dtype:
                    add_scaled(totals, 0, sums, p, scale, place, scale_dtype, width)
                    add_scaled(totals, width, sums, q, scale, place, scale_dtype, width)
                elif width == channels:
                    add_numbers(totals, 0, sums, p, 2 * width * min(together, geometry[SAMPLES] - n))
                else:
                    add_numbers(totals, 0, sums, p, width)
                    add_numbers(totals, width, sums, q, width)
                if wanted(grad_scale):
                    scale_gradients(sums, p, q, gains, offsets, values, width)
                    put(grad_scale, place, scale_dtype, values, 0, width)
                put(grad_shift, place, shift_dtype, sums, p, width)
            for k in range(1, together):
                add_numbers(totals, 0, totals, 2 * width * k, 2 * width)
            put(grad_bias, first, bias_dtype, totals, 0, width)
            put(grad_weight, first, weight_dtype, totals, width, width)

    return parameter_gradients


BUILDERS = {"given": build_given, "parameter_gradients": build_parameter_gradients}
