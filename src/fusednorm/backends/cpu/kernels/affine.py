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
    SHIFT_DTYPE,
    SPATIAL,
    WANT_VARIANCE,
    WEIGHT_DTYPE,
)
from fusednorm.backends.cpu.kernels.device import exact, uncontracted
from fusednorm.backends.cpu.kernels.elements import Element
from fusednorm.backends.cpu.kernels.operands import number, put_number, rounded_number, wanted


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

    @exact
    def made(grad, g, kept, r, z, alpha):
        return pullback(load(grad, g), z, alpha)

    @exact
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
def _sums_of_four(sums, c, channels, samples):
    """p and q of four channels over all samples: the numbers that a cache line holds."""
    p0, p1, p2, p3 = 0.0, 0.0, 0.0, 0.0
    q0, q1, q2, q3 = 0.0, 0.0, 0.0, 0.0
    for n in range(samples):
        i = 2 * (n * channels + c)
        p0 += sums[i]
        q0 += sums[i + 1]
        p1 += sums[i + 2]
        q1 += sums[i + 3]
        p2 += sums[i + 4]
        q2 += sums[i + 5]
        p3 += sums[i + 6]
        q3 += sums[i + 7]
    return p0, p1, p2, p3, q0, q1, q2, q3


@exact
def _put_parameter_gradients(grad_weight, grad_bias, geometry, c, p, q):
    if wanted(grad_weight):
        put_number(grad_weight, c, q, geometry[WEIGHT_DTYPE])
    if wanted(grad_bias):
        put_number(grad_bias, c, p, geometry[BIAS_DTYPE])


def build_parameter_gradients(element: Element, value, pullback):
    """The gradients of the parameters from p and q per (n, c).

    grad_bias = sum_n (1 + s) p, grad_weight = sum_n (1 + s) q, grad_shift = p, grad_scale = weight q + bias p.
    """
    rounded = rounded_number(element)

    def parameter_gradients(
        sums, weight, bias, scale, grad_weight, grad_bias, grad_scale, grad_shift, geometry, start, stop
    ):
        channels = geometry[GROUPS] * geometry[GROUP_CHANNELS]
        quads = 0 if geometry[SCALE_DTYPE] or geometry[SHIFT_DTYPE] else (stop - start) // 4
        for quad in range(quads):
            c = start + 4 * quad
            p0, p1, p2, p3, q0, q1, q2, q3 = _sums_of_four(sums, c, channels, geometry[SAMPLES])
            _put_parameter_gradients(grad_weight, grad_bias, geometry, c, p0, q0)
            _put_parameter_gradients(grad_weight, grad_bias, geometry, c + 1, p1, q1)
            _put_parameter_gradients(grad_weight, grad_bias, geometry, c + 2, p2, q2)
            _put_parameter_gradients(grad_weight, grad_bias, geometry, c + 3, p3, q3)
        for c in range(start + 4 * quads, stop):
            total_p, total_q = 0.0, 0.0
            gain, offset = 1.0, 0.0
            if geometry[WEIGHT_DTYPE]:
                gain = rounded(weight, c, geometry[WEIGHT_DTYPE])
            if geometry[BIAS_DTYPE]:
                offset = rounded(bias, c, geometry[BIAS_DTYPE])
            for n in range(geometry[SAMPLES]):
                i = n * channels + c
                p, q = sums[2 * i], sums[2 * i + 1]
                factor = 1.0
                if geometry[SCALE_DTYPE]:
                    factor += rounded(scale, i, geometry[SCALE_DTYPE])
                total_p += factor * p
                total_q += factor * q
                if wanted(grad_scale):
                    put_number(grad_scale, i, gain * q + offset * p, geometry[SCALE_DTYPE])
                if wanted(grad_shift):
                    put_number(grad_shift, i, p, geometry[SHIFT_DTYPE])
            _put_parameter_gradients(grad_weight, grad_bias, geometry, c, total_p, total_q)

    return parameter_gradients


BUILDERS = {"given": build_given, "parameter_gradients": build_parameter_gradients}
