"""The primitives of the activations as functions that LLVM turns into vector code.

Everything stands on exp(x) for x <= 0, by range reduction and a polynomial: nothing overflows, no tail cancels, and no
result depends on the C library, whose scalar functions differ by processor. Exponentials below the normal numbers are
0, so that a value or a derivative of a huge z is its limit.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from fusednorm.activations import (
    FORMULAS,
    NORMAL_CENTRE_32,
    NORMAL_TAIL_32,
    NORMAL_TAIL_64,
    TANH_32,
    TANH_64_BOTTOM,
    TANH_64_TOP,
    bind,
)
from fusednorm.backends.cpu.kernels.device import exact
from fusednorm.backends.cpu.kernels.elements import from_bits, to_bits

F = np.float32
_SQRT_HALF, _PDF_AT_0 = math.sqrt(0.5), 1.0 / math.sqrt(2.0 * math.pi)
_LOG2E = 1.4426950408889634
# log2(e) in float32, what it lacks, and its neighbour, for the product that is rounded anyway: LLVM would share a product
# of the same two numbers between both its uses, and then contract neither into an fma.
_LOG2E_HIGH, _LOG2E_LOW, _LOG2E_NEAR = F(1.442695), F(1.925963e-08), F(1.4426951)
# log(2) in two parts, the first with low bits zero so that its product with the integer n is exact.
_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
# A sum with one rounds to an integer n and leaves n plus the exponent's bias in the low bits: shifted up, they are 2**n,
# and 0 for the least n, at which exponentials are held.
_ROUND_32, _ROUND_64 = F(1.5 * 2**23 + 127), 1.5 * 2.0**52 + 1023
_LEAST_32, _LEAST_64 = F(-127 * math.log(2.0)), -1023 * math.log(2.0)

# Minimax fits of (2**f - 1) / f on [-1/2, 1/2] by Lawson's iteration, highest power first. 2**f is off by 9e-9, 3e-6 or
# 1e-4; where a result is rounded to the 11 or 8 bits of a dtype, the last two are 1/80 and 1/20 of that rounding.
_EXP2 = {
    "float32": (0.0001545316295, 0.001339086336, 0.009618082557, 0.05550357114, 0.2402265076, 0.693147188),
    "float16": (0.009582852994, 0.05590642474, 0.2402409861, 0.6931241934),
    "bfloat16": (0.05500893, 0.2422109596, 0.6932829273),
}
_INVERSE_FACTORIALS = tuple(1.0 / math.factorial(k) for k in range(13, -1, -1))


@exact
def at_least(bound, x):
    """One instruction on x86, NaN included; both bounds of one number would become three."""
    return bound if x < bound else x


@exact
def where(condition, a, b):
    return a if condition else b


def _polynomial(coefficients, number):
    """A polynomial in Horner's form, highest power first."""
    leading, *others = map(number, coefficients)
    others = tuple(others)

    @exact
    def polynomial(x):
        p = leading
        for coefficient in others:
            p = p * x + coefficient
        return p

    return polynomial


def _exponential_32(precision):
    polynomial = _polynomial((*_EXP2[precision], 1.0), F)
    fine = precision == "float32"

    @exact
    def exponential(x):
        """exp(x) for x <= 0, a few units in its last place; 0 below -87.7; NaN stays NaN.

        The power of two is a factor and no sum of bits, which would make numbers of NaNs with a payload.
        """
        x = at_least(_LEAST_32, x)
        shifted = x * _LOG2E_NEAR + _ROUND_32
        f = x * _LOG2E_HIGH - (shifted - _ROUND_32)
        if fine:
            f = x * _LOG2E_LOW + f
        return polynomial(f) * from_bits(np.int32(to_bits(shifted) << np.int32(23)))

    return exponential


_taylor = _polynomial(_INVERSE_FACTORIALS, float)


@exact
def _exponential_64(x):
    """exp(x) for x <= 0, a unit in its last place; 0 below -708.8; NaN stays NaN."""
    x = at_least(_LEAST_64, x)
    shifted = x * _LOG2E + _ROUND_64
    n = shifted - _ROUND_64
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    return _taylor(r) * from_bits(np.int64(to_bits(shifted) << np.int64(52)))


def _logistic(exponential, number):
    """The sigmoid and its slope, from exp(-|z|) and one division, which the two share where a formula has both."""
    one = number(1.0)

    @exact
    def sigmoid(z):
        e = exponential(-abs(z))
        return (e if z < number(0.0) else one) * (one / (one + e))

    @exact
    def sigmoid_slope(z):
        e = exponential(-abs(z))
        inverse = one / (one + e)
        return (e * inverse) * inverse

    return sigmoid, sigmoid_slope


def _tanh_32(exponential):
    polynomial = _polynomial(TANH_32, F)
    sign = np.int32(-(2**31))

    @exact
    def tanh(z):
        """An odd polynomial below 0.625, where 1 - 2 e / (1 + e) would cancel (Cephes, tanhf)."""
        size = abs(z)
        square = z * z
        e = exponential(-abs(F(2.0) * z))  # as the slope of 2 z in the derivative has it: LLVM then computes it once
        large = F(1.0) - F(2.0) * (e * (F(1.0) / (F(1.0) + e)))
        small = polynomial(square) * square * size + size
        return from_bits(np.int32(to_bits(large if size >= F(0.625) else small) | (to_bits(z) & sign)))

    return tanh


_tanh_top, _tanh_bottom = _polynomial(TANH_64_TOP, float), _polynomial(TANH_64_BOTTOM, float)


@exact
def _tanh_64(z):
    """The same with a rational function (Cephes, tanh), and one division for both."""
    size = abs(z)
    square = z * z
    e = _exponential_64(-abs(2.0 * z))
    outer = size >= 0.625
    start = 1.0 if outer else size
    top = -2.0 * e if outer else size * square * _tanh_top(square)
    bottom = 1.0 + e if outer else _tanh_bottom(square)
    magnitude = start + top / bottom
    return from_bits(np.int64(to_bits(magnitude) | (to_bits(z) & np.int64(-(2**63)))))


def _normal_32(exponential):
    centre, scaled_tail = _polynomial(NORMAL_CENTRE_32, F), _polynomial(NORMAL_TAIL_32, F)

    @exact
    def cdf(z):
        """The normal distribution function; the tail keeps its relative accuracy, where 1 + erf would cancel."""
        square = z * z
        middle = F(0.5) + z * centre(square)
        t = F(1.0) / (F(1.0) + F(0.3 * _SQRT_HALF) * abs(z))
        tail = F(0.5) * exponential(F(-0.5) * square) * (t * scaled_tail(t))
        outer = tail if z < F(0.0) else F(1.0) - tail
        return middle if square < F(1.0) else outer

    @exact
    def pdf(z):
        return F(_PDF_AT_0) * exponential(F(-0.5) * (z * z))

    return cdf, pdf


_scaled_tail = _polynomial(NORMAL_TAIL_64, float)


@exact
def _gaussian_64(z):
    """exp(-z**2 / 2), from a high part of z whose square is exact: a rounded square costs 700 units at z = -38."""
    high = from_bits(np.int64(to_bits(z) & np.int64(-(2**27))))
    rest = (high - z) * (high + z) * 0.5
    return _exponential_64(-0.5 * high * high) * (1.0 + rest * (1.0 + 0.5 * rest))


@exact
def _normal_cdf_64(z):
    size = abs(z)
    size = 39.0 if size > 39.0 else size
    q = (size - 6.0) / (size + 6.0)
    tail = _gaussian_64(size) * (_scaled_tail(q) / (size + 2.0))
    return tail if z < 0.0 else 1.0 - tail


@exact
def _normal_pdf_64(z):
    size = abs(z)
    return _PDF_AT_0 * _gaussian_64(39.0 if size > 39.0 else size)


@cache
def _primitives(precision):
    """The primitives in the compute dtype, for results that a dtype of this precision holds."""
    if precision == "float64":
        number, exponential = np.float64, _exponential_64
        tanh, normal = _tanh_64, (_normal_cdf_64, _normal_pdf_64)
    else:
        number, exponential = F, _exponential_32(precision)
        tanh, normal = _tanh_32(exponential), _normal_32(exponential)
    sigmoid, sigmoid_slope = _logistic(exponential, number)
    return {
        "const": number,
        "where": where,
        "sigmoid": sigmoid,
        "sigmoid_slope": sigmoid_slope,
        "tanh": tanh,
        "normal_cdf": normal[0],
        "normal_pdf": normal[1],
    }


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
    value = exact(bind(formula.value, _primitives(dtype)))
    derivative = exact(bind(formula.derivative, _primitives("float64" if dtype == "float64" else "float32")))
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
