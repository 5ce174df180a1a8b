"""The primitives of the activations as functions that LLVM turns into vector code.

float32: 2**t by range reduction and a polynomial, and the rest from it; absolute errors are a few units in the last
place of 1. float64: the exponential likewise, tanh and erfc from the C library (exact to an ulp, scalar).
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from fusednorm.activations import FORMULAS, bind
from fusednorm.backends.cpu.kernels.device import exact, rewritten
from fusednorm.backends.cpu.kernels.elements import from_bits, to_bits

F = np.float32
_LOG2E = 1.4426950408889634
# log(2) in two parts, the first with low bits zero so that its product with the integer n is exact.
_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
# Adding one rounds to an integer n and leaves n plus the exponent's bias in the low bits: shifted up, they are 2**n.
_ROUND_32, _ROUND_64 = F(1.5 * 2**23 + 127), 1.5 * 2.0**52 + 1023

# Minimax fits of (2**f - 1) / f on [-1/2, 1/2] by Lawson's iteration, highest power first. 2**f is off by 9e-8, 3e-6 or
# 1e-4; where a result is rounded to the 11 or 8 bits of a dtype, the last two are 1/80 and 1/20 of that rounding.
_EXP2 = {
    "float32": (0.001326472707, 0.009671512649, 0.05550733744, 0.2402224209, 0.6931469776),
    "float16": (0.009582852994, 0.05590642474, 0.2402409861, 0.6931241934),
    "bfloat16": (0.05500893, 0.2422109596, 0.6932829273),
}


def _power_of_two(coefficients):
    leading, *others = map(F, coefficients)
    others = tuple(others)

    @exact
    def exp2(t):
        """2**t for t in [-126, 128.5), infinity from 127.5; NaN stays NaN.

        The power is a factor and no sum of bits, which would make numbers of NaNs with a payload. Callers scale by
        log2(e) themselves: that error, t units in the last place, is absolute in their results.
        """
        shifted = t + _ROUND_32
        f = t - (shifted - _ROUND_32)
        p = leading
        for coefficient in others:
            p = p * f + coefficient
        p = p * f + F(1.0)
        return p * from_bits(np.int32(to_bits(shifted) << np.int32(23)))

    return exp2


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


@rewritten
def sigmoid64(z):
    return 1.0 / (1.0 + exp64(-z))


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
def normal_cdf64(z):
    return 0.5 * math.erfc(-0.7071067811865476 * z)


@exact
def normal_pdf64(z):
    return 0.3989422804014327 * exp64(-0.5 * z * z)


@exact
def tanh64(z):
    return math.tanh(z)


@exact
def where(condition, a, b):
    return a if condition else b


def _primitives_32(precision):
    """The primitives in float32, for results that a dtype of this precision holds."""
    exp2 = _power_of_two(_EXP2[precision])

    @exact
    def at_least(bound, t):
        """One instruction on x86, NaN included; both bounds of one number would become three."""
        return bound if t < bound else t

    @rewritten
    def sigmoid(z):
        t = at_least(F(-89.0), z) * F(-_LOG2E)  # at most 128.4: a sigmoid of 0
        return F(1.0) / (F(1.0) + exp2(at_least(F(-126.0), t)))

    @exact
    def tanh(z):
        """An odd polynomial below 0.625, where 1 - 2/(exp(2|z|) + 1) would cancel (Cephes, tanhf)."""
        size = abs(z)
        s = z * z
        p = F(-5.70498872745e-3)
        p = p * s + F(2.06390887954e-2)
        p = p * s + F(-5.37397155531e-2)
        p = p * s + F(1.33314422036e-1)
        p = p * s + F(-3.33332819422e-1)
        small = p * s * z + z
        t = at_least(F(-43.0), -size) * F(-2.0 * _LOG2E)
        large = F(1.0) - F(2.0) / (exp2(t) + F(1.0))
        large = -large if z < F(0.0) else large
        return large if size >= F(0.625) else small

    @exact
    def normal_cdf(z):
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
        tail = F(0.5) * exp2(at_least(F(-126.0), F(-0.5 * _LOG2E) * square)) * (t * p)
        outer = tail if z < F(0.0) else F(1.0) - tail
        return centre if square < F(1.0) else outer

    @exact
    def normal_pdf(z):
        return F(0.3989422804014327) * exp2(at_least(F(-126.0), F(-0.5 * _LOG2E) * (z * z)))

    return {
        "const": np.float32,
        "where": where,
        "sigmoid": sigmoid,
        "tanh": tanh,
        "normal_cdf": normal_cdf,
        "normal_pdf": normal_pdf,
    }


_PRIMITIVES_64 = {
    "const": np.float64,
    "where": where,
    "sigmoid": sigmoid64,
    "tanh": tanh64,
    "normal_cdf": normal_cdf64,
    "normal_pdf": normal_pdf64,
}


@cache
def _primitives(precision):
    return _PRIMITIVES_64 if precision == "float64" else _primitives_32(precision)


@exact
def _identity(z, unused):
    return z


@exact
def _identity_pullback(grad_output, z, unused):
    return grad_output


@cache
def activation(name: str | None, dtype: str, parametric: bool = True):
    """Compiled value(z, parameter) and pullback(grad_output, z, parameter) = grad_output * value'(z).

    Values are as precise as the dtype that they are rounded to; gradients, which are summed, as float32.
    """
    if name is None:
        return _identity, _identity_pullback
    formula = FORMULAS[name]
    value = rewritten(bind(formula.value, _primitives(dtype)))
    derivative = rewritten(bind(formula.derivative, _primitives("float64" if dtype == "float64" else "float32")))
    if parametric:

        @exact
        def pullback(grad_output, z, parameter):
            return grad_output * derivative(z, parameter)

        return value, pullback
    default = (np.float64 if dtype == "float64" else F)(formula.default)

    @exact
    def default_value(z, unused):
        return value(z, default)

    @exact
    def default_pullback(grad_output, z, unused):
        return grad_output * derivative(z, default)

    return default_value, default_pullback
