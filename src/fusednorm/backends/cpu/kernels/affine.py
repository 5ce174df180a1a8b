"""What every memory order shares: the affine of a channel, the inverse deviation, the gradients of the parameters."""

from __future__ import annotations

from functools import cache

import numpy as np

from fusednorm.backends.cpu.geometry import (
    GROUP_CHANNELS,
    GROUPS,
    HAS_BIAS,
    HAS_SCALE,
    HAS_SHIFT,
    HAS_WEIGHT,
    PER_BATCH,
    RMS,
    SAMPLES,
    SPATIAL,
    WANT_VARIANCE,
)
from fusednorm.backends.cpu.kernels.device import exact
from fusednorm.backends.cpu.kernels.elements import Element


@exact
def reduced_count(geometry):
    """K, the number of elements under one statistic."""
    outer = geometry[SAMPLES] if geometry[PER_BATCH] else geometry[GROUP_CHANNELS]
    return outer * geometry[SPATIAL]


@exact
def affine(weight, bias, scale, shift, geometry, n, c):
    """A = weight (1 + scale) and B = bias (1 + scale) + shift of channel c in sample n, in float64."""
    gain, offset = 1.0, 0.0
    if geometry[HAS_WEIGHT]:
        gain = np.float64(weight[c])
    if geometry[HAS_BIAS]:
        offset = np.float64(bias[c])
    modulation = n * geometry[GROUPS] * geometry[GROUP_CHANNELS] + c
    if geometry[HAS_SCALE]:
        factor = 1.0 + np.float64(scale[modulation])
        gain, offset = gain * factor, offset * factor
    if geometry[HAS_SHIFT]:
        offset += np.float64(shift[modulation])
    return gain, offset


@exact
def normalized(deviation, a, b):
    """z of x - mean, with a = A rstd and b = B.

    Every forward and backward calls this one function, with the mean and rstd that the forward saves: the backward then
    has the forward's z to the bit, and its derivative of the activation is that of the output which the user saw.
    """
    return deviation * a + b


@cache
def publish(element: Element):
    """publish(mean, rstd, variance, geometry, eps, unit, centre, M2) keeps a statistic, and returns both as kept."""
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


def build_given(element: Element, value, pullback):
    """Statistics that were given, in the compute dtype or as ``given_wide`` in float64: rstd from the variance."""
    T = element.compute

    def given(given_mean, given_variance, stats, mean, rstd, geometry, eps, start, stop):
        for c in range(start, stop):
            mean[c] = T(given_mean[c])
            rstd[c] = T(1.0 / np.sqrt(np.float64(given_variance[c]) + eps))
            stats[2 * c], stats[2 * c + 1] = np.float64(mean[c]), np.float64(rstd[c])

    return given


def build_parameter_gradients(element: Element, value, pullback):
    """The gradients of the parameters from p and q per (n, c); a null pointer's gradient is not wanted.

    grad_bias = sum_n (1 + s) p, grad_weight = sum_n (1 + s) q, grad_shift = p, grad_scale = weight q + bias p.
    """
    T = element.compute

    def parameter_gradients(
        sums,
        weight,
        bias,
        scale,
        grad_weight,
        grad_bias,
        grad_scale,
        grad_shift,
        geometry,
        want_weight,
        want_bias,
        want_scale,
        want_shift,
        start,
        stop,
    ):
        channels = geometry[GROUPS] * geometry[GROUP_CHANNELS]
        for c in range(start, stop):
            total_p, total_q = 0.0, 0.0
            gain = np.float64(weight[c]) if geometry[HAS_WEIGHT] else 1.0
            offset = np.float64(bias[c]) if geometry[HAS_BIAS] else 0.0
            for n in range(geometry[SAMPLES]):
                i = n * channels + c
                p, q = sums[2 * i], sums[2 * i + 1]
                factor = 1.0 + np.float64(scale[i]) if geometry[HAS_SCALE] else 1.0
                total_p += factor * p
                total_q += factor * q
                if want_scale:
                    grad_scale[i] = T(gain * q + offset * p)
                if want_shift:
                    grad_shift[i] = T(p)
            if want_weight:
                grad_weight[c] = T(total_q)
            if want_bias:
                grad_bias[c] = T(total_p)

    return parameter_gradients


SIGNATURES = {"given": "wwdwwgf", "given_wide": "dddwwgf", "parameter_gradients": "dwwwwwwwgiiii"}
BUILDERS = {"given": build_given, "given_wide": build_given, "parameter_gradients": build_parameter_gradients}
