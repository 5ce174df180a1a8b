"""The primitives of the activations as functions that LLVM turns into vector code.

float32: 2**t by range reduction and a polynomial, and the rest from it; absolute errors are a few units in the last
place of 1. float64: the exponential likewise, tanh and erfc from the C library (exact to an ulp, scalar).
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from fusednorm.activations import FORMULAS, bind
from fusednorm.backends.cpu.kernels.device import exact
from fusednorm.backends.cpu.kernels.elements import from_bits, to_bits

F = np.float32
_LOG2E = 1.4426950408889634
# log(2) in two parts, the first with low bits zero so that its product with the integer n is exact.
_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
# Adding one rounds to an integer n and leaves n plus the exponent's bias in the low bits: shifted up, they are 2**n.
_ROUND_32, _ROUND_64 = F(1.5 * 2**23 + 127), 1.5 * 2.0**52 + 1023

# A minimax fit of (2**f - 1) / f on [-1/2, 1/2] by Lawson's iteration, highest power first; 2**f is off by 9e-8.
_EXP2 = tuple(map(F, (0.001326472707, 0.009671512649, 0.05550733744, 0.2402224209, 0.6931469776)))


@exact
def exp2_32(t):
    """2**t, with t held to [-126, 126]; NaN stays NaN.

    The power is a factor and no sum of bits, which would make numbers of NaNs with a payload. Callers scale by log2(e)
    themselves: that error, t units in the last place, is absolute in their results.
    """
    t = F(-126.0) if t < F(-126.0) else t
    t = F(126.0) if t > F(126.0) else t
    shifted = t + _ROUND_32
    f = t - (shifted - _ROUND_32)
    p = _EXP2[0]
    for coefficient in _EXP2[1:]:
        p = p * f + coefficient
    p = p * f + F(1.0)
    return p * from_bits(np.int32(to_bits(shifted) << np.int32(23)))


_INVERSE_FACTORIALS = tuple(1.0 / math.factorial(k) for k in range(13, -1, -1))


@exact
def exp64(x):
    """exp(x), with x held to [-708, 709] where the result is a normal number."""
    x = -708.0 if x < -708.0 else x
    x = 709.0 if x > 709.0 else x
    shifted = x * _LOG2E + _ROUND_64
    n = shifted - _ROUND_64
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    p = _INVERSE_FACTORIALS[0]
    for coefficient in _INVERSE_FACTORIALS[1:]:
        p = p * r + coefficient
    return p * from_bits(np.int64(to_bits(shifted) << np.int64(52)))


@exact
def sigmoid32(z):
    return F(1.0) / (F(1.0) + exp2_32(z * F(-_LOG2E)))


@exact
def sigmoid64(z):
    return 1.0 / (1.0 + exp64(-z))


@exact
def tanh32(z):
    """An odd polynomial below 0.625, where 1 - 2/(exp(2|z|) + 1) would cancel (Cephes, tanhf)."""
    size = abs(z)
    s = z * z
    p = F(-5.70498872745e-3)
    p = p * s + F(2.06390887954e-2)
    p = p * s + F(-5.37397155531e-2)
    p = p * s + F(1.33314422036e-1)
    p = p * s + F(-3.33332819422e-1)
    small = p * s * z + z
    large = F(1.0) - F(2.0) / (exp2_32(size * F(2.0 * _LOG2E)) + F(1.0))
    large = -large if z < F(0.0) else large
    return large if size >= F(0.625) else small


# Minimax fits by Lawson's iteration, lowest power first: (cdf(z) - 1/2) / z in z**2 on [0, 1], error 7e-9, and
# erfcx(x) / t in t = 1 / (1 + 0.3 x) on 0 <= x <= 10, relative error 2e-8, where erfcx(x) = exp(x**2) erfc(x).
_CENTRE = tuple(map(F, (0.398942199, -0.06648873, 0.009964166814, -0.001165350759, 9.246838032e-05)))[::-1]
_TAIL = tuple(
    map(
        F,
        (
            0.169188006,
            0.1707152132,
            0.1483392718,
            0.2149256491,
            -0.09464973913,
            0.5477185676,
            -0.5122767862,
            0.4855625689,
            -0.1295227708,
        ),
    )
)[::-1]


@exact
def normal_cdf32(z):
    """The normal distribution function; the tail keeps its relative accuracy, where 1 + erf would cancel."""
    square = z * z
    p = _CENTRE[0]
    for coefficient in _CENTRE[1:]:
        p = p * square + coefficient
    centre = F(0.5) + z * p
    t = F(1.0) / (F(1.0) + F(0.3 * 0.7071067811865476) * abs(z))
    p = _TAIL[0]
    for coefficient in _TAIL[1:]:
        p = p * t + coefficient
    tail = F(0.5) * exp2_32(F(-0.5 * _LOG2E) * square) * (t * p)
    outer = tail if z < F(0.0) else F(1.0) - tail
    return centre if square < F(1.0) else outer


@exact
def normal_cdf64(z):
    return 0.5 * math.erfc(-0.7071067811865476 * z)


@exact
def normal_pdf32(z):
    return F(0.3989422804014327) * exp2_32(F(-0.5 * _LOG2E) * (z * z))


@exact
def normal_pdf64(z):
    return 0.3989422804014327 * exp64(-0.5 * z * z)


@exact
def tanh64(z):
    return math.tanh(z)


@exact
def where(condition, a, b):
    return a if condition else b


_PRIMITIVES = {
    "float32": {
        "const": np.float32,
        "where": where,
        "sigmoid": sigmoid32,
        "tanh": tanh32,
        "normal_cdf": normal_cdf32,
        "normal_pdf": normal_pdf32,
    },
    "float64": {
        "const": np.float64,
        "where": where,
        "sigmoid": sigmoid64,
        "tanh": tanh64,
        "normal_cdf": normal_cdf64,
        "normal_pdf": normal_pdf64,
    },
}


@exact
def _identity(z, unused):
    return z


@exact
def _identity_pullback(grad_output, z, unused):
    return grad_output


@cache
def activation(name: str | None, compute: str):
    """Compiled value(z, parameter) and pullback(grad_output, z, parameter) = grad_output * value'(z)."""
    if name is None:
        return _identity, _identity_pullback
    formula, primitives = FORMULAS[name], _PRIMITIVES[compute]
    derivative = exact(bind(formula.derivative, primitives))

    @exact
    def pullback(grad_output, z, parameter):
        return grad_output * derivative(z, parameter)

    return exact(bind(formula.value, primitives)), pullback
