"""The primitives of the activations as functions that LLVM turns into vector code.

Everything stands on exp(-y) by range reduction and a polynomial: nothing overflows, no tail cancels, and no result
depends on the C library, whose scalar functions differ by processor. An exponential below the normal numbers is 0, so
that a value or a derivative of a huge z is its limit.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from fusednorm.activations import (
    FORMULAS,
    NORMAL_CENTRE_32,
    NORMAL_TAIL_16,
    NORMAL_TAIL_32,
    NORMAL_TAIL_64,
    TANH_32,
    TANH_64_BOTTOM,
    TANH_64_TOP,
    bind,
)
from fusednorm.backends.cpu.kernels.device import inlined, rewritten
from fusednorm.backends.cpu.kernels.elements import from_bits, to_bits

F = np.float32
_SQRT_HALF, _PDF_AT_0 = math.sqrt(0.5), 1.0 / math.sqrt(2.0 * math.pi)
_LOG2E = 1.4426950408889634
# log2(e) in float32, the rest of log2(e), and the neighbouring float32. The neighbour serves the product that is
# rounded to an integer anyway: LLVM would share one product between two uses, and then contract neither into an fma.
_LOG2E_HIGH, _LOG2E_LOW, _LOG2E_NEAR = F(1.442695), F(1.925963e-08), F(1.4426951)
# log(2) in two parts, the first with low bits zero so that its product with the integer n is exact.
_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
# Adding such a number rounds to an integer n and leaves n plus the exponent's bias in the low bits. Shifted up, these
# bits are 2**n, and 0 for the least n, below which no exponent goes (_MOST_32, _MOST_64).
_ROUND_32, _ROUND_64 = F(1.5 * 2**23 + 127), 1.5 * 2.0**52 + 1023
_MOST_32, _MOST_64 = F(127 * math.log(2.0)), 1023 * math.log(2.0)

# Minimax fits of (2**f - 1) / f on [-1/2, 1/2] by Lawson's iteration, highest power first. 2**f is off by 9e-9, 9e-8,
# 3e-6 or 1e-4. A bias adds up where terms are summed, so derivatives take the first fit. The errors of the last two are
# 1/80 and 1/20 of the rounding to the 11 and 8 bits of fp16 and bf16.
_EXP2 = {
    "derivative": (0.0001545316295, 0.001339086336, 0.009618082557, 0.05550357114, 0.2402265076, 0.693147188),
    "float32": (0.001326472707, 0.009671512649, 0.05550733744, 0.2402224209, 0.6931469776),
    "float16": (0.009582852994, 0.05590642474, 0.2402409861, 0.6931241934),
    "bfloat16": (0.05500893, 0.2422109596, 0.6932829273),
}
_INVERSE_FACTORIALS = tuple(1.0 / math.factorial(k) for k in range(13, -1, -1))


@inlined
def at_least(bound, x):
    """One instruction on x86, NaN included; with both bounds on one number LLVM makes three."""
    return bound if x < bound else x


@inlined
def at_most(bound, x):
    return bound if x > bound else x


@inlined
def where(condition, a, b):
    return a if condition else b


@inlined
def fma(a, b, c):
    return a * b + c


def _polynomial(coefficients, number):
    """A polynomial in Horner's form, highest power first.

    It is written out, because a loop over many coefficients stays one, and then nothing around it becomes vector code.
    """
    constants = {f"c{place}": number(coefficient) for place, coefficient in enumerate(coefficients)}
    first, *others = constants
    lines = ["def polynomial(x):", f"    p = {first}", *(f"    p = p * x + {name}" for name in others), "    return p"]
    exec("\n".join(lines), constants)
    return inlined(constants["polynomial"])


def _decay_32(precision):
    polynomial = _polynomial((*_EXP2[precision], 1.0), F)
    fine = precision in ("float32", "derivative")

    @inlined
    def decay(y):
        """exp(-y) for y >= -89, a few units in its last place; 0 above 87.7, infinity below -88.4; NaN stays NaN.

        The power of two is a factor: adding n to the exponent's bits would make numbers of NaNs with a payload.
        """
        y = at_most(_MOST_32, y)
        shifted = _ROUND_32 - y * _LOG2E_NEAR
        f = (_ROUND_32 - shifted) - y * _LOG2E_HIGH
        if fine:
            f = f - y * _LOG2E_LOW
        return polynomial(f) * from_bits(np.int32(to_bits(shifted) << np.int32(23)))

    return decay


_taylor = _polynomial(_INVERSE_FACTORIALS, float)


@inlined
def _decay_64(y):
    """exp(-y) for y >= -710, a unit in its last place; 0 above 708.8, infinity below -709.5; NaN stays NaN."""
    y = at_most(_MOST_64, y)
    shifted = _ROUND_64 - y * _LOG2E
    n = shifted - _ROUND_64
    r = (-y - n * _LN2_HIGH) - n * _LN2_LOW
    return _taylor(r) * from_bits(np.int64(to_bits(shifted) << np.int64(52)))


def _sigmoid(decay, number):
    one, least = number(1.0), number(-89.0 if number is F else -710.0)

    @rewritten
    def sigmoid(z):
        """sigmoid in the fewest operations; the exponential may be infinite."""
        return one / (one + decay(at_least(least, z)))

    return sigmoid


def _sigmoid_and_slope(decay, number):
    """sigmoid and its slope from exp(-|z|) and 1 / (1 + exp(-|z|)), which LLVM computes once for both."""
    zero, one = number(0.0), number(1.0)

    @inlined
    def sigmoid(z):
        e = decay(abs(z))
        inverse = one / (one + e)
        return e * inverse if z < zero else inverse

    @inlined
    def sigmoid_slope(z):
        e = decay(abs(z))
        inverse = one / (one + e)
        return (e * inverse) * inverse

    @inlined
    def gate_slope(z, unused):
        return sigmoid_slope(z)

    return sigmoid, sigmoid_slope, gate_slope


@inlined
def _gate_slope_16(unused, gate):
    """gate_slope under gradients of 16 bits: where it cancels, it errs by the last place of the gate."""
    return gate - gate * gate


def _tanh_32(decay):
    polynomial = _polynomial(TANH_32, F)
    sign = np.int32(-(2**31))

    @inlined
    def tanh(z):
        """An odd polynomial below 0.625, where 1 - 2 e / (1 + e) would cancel (Cephes, tanhf)."""
        size = abs(z)
        square = z * z
        e = decay(abs(F(2.0) * z))  # a derivative's slope of 2 z has the same: LLVM computes it once
        large = F(1.0) - F(2.0) * (e * (F(1.0) / (F(1.0) + e)))
        small = polynomial(square) * square * size + size
        return from_bits(np.int32(to_bits(large if size >= F(0.625) else small) | (to_bits(z) & sign)))

    return tanh


_tanh_top, _tanh_bottom = _polynomial(TANH_64_TOP, float), _polynomial(TANH_64_BOTTOM, float)


@inlined
def _tanh_64(z):
    """tanh with a rational function below 0.625 (Cephes, tanh), and one division for both ranges."""
    size = abs(z)
    square = z * z
    e = _decay_64(abs(2.0 * z))
    outer = size >= 0.625
    top, bottom = size * square * _tanh_top(square), _tanh_bottom(square)
    quotient = (-2.0 * e if outer else top) / (1.0 + e if outer else bottom)
    magnitude = (1.0 if outer else size) + quotient
    return from_bits(np.int64(to_bits(magnitude) | (to_bits(z) & np.int64(-(2**63)))))


def _normal_32(decay):
    centre, scaled_tail = _polynomial(NORMAL_CENTRE_32, F), _polynomial(NORMAL_TAIL_32, F)

    @inlined
    def cdf(z):
        """The normal distribution function; the tail keeps its relative accuracy, where 1 + erf would cancel."""
        square = z * z
        middle = F(0.5) + z * centre(square)
        t = F(1.0) / (F(1.0) + F(0.3 * _SQRT_HALF) * abs(z))
        tail = decay(F(0.5) * square) * (t * scaled_tail(t))
        outer = tail if z < F(0.0) else F(1.0) - tail
        return middle if square < F(1.0) else outer

    @inlined
    def pdf(z):
        return F(_PDF_AT_0) * decay(F(0.5) * (z * z))

    return cdf, pdf


def _normal_cdf_16(decay):
    """The distribution function for values of 16 bits: a shorter polynomial, and none of its own around zero."""
    scaled_tail = _polynomial(NORMAL_TAIL_16, F)

    @inlined
    def cdf(z):
        t = F(1.0) / (F(1.0) + F(0.53 * _SQRT_HALF) * abs(z))
        tail = decay(F(0.5) * (z * z)) * (t * scaled_tail(t))
        return tail if z < F(0.0) else F(1.0) - tail

    return cdf


_scaled_tail = _polynomial(NORMAL_TAIL_64, float)


@inlined
def _gaussian_64(z):
    """exp(-z**2 / 2), from a high part of z whose square is exact: a rounded square costs 700 units at z = -38."""
    high = from_bits(np.int64(to_bits(z) & np.int64(-(2**27))))
    rest = (high - z) * (high + z) * 0.5
    return _decay_64(0.5 * high * high) * (1.0 + rest * (1.0 + 0.5 * rest))


@inlined
def _normal_cdf_64(z):
    size = at_most(39.0, abs(z))
    tail = _gaussian_64(size) * (_scaled_tail((size - 6.0) / (size + 6.0)) / (size + 2.0))
    return tail if z < 0.0 else 1.0 - tail


@inlined
def _normal_pdf_64(z):
    return _PDF_AT_0 * _gaussian_64(at_most(39.0, abs(z)))


@cache
def _primitives(dtype, derivative):
    """The primitives in the compute dtype, for values that a dtype holds or for derivatives, which are summed."""
    short = dtype in ("float16", "bfloat16")
    if dtype == "float64":
        number, decay = np.float64, _decay_64
        tanh, normal = _tanh_64, (_normal_cdf_64, _normal_pdf_64)
    else:
        number, decay = F, _decay_32("derivative" if derivative else dtype)
        tanh, normal = _tanh_32(decay), _normal_32(decay)
    sigmoid, sigmoid_slope, gate_slope = _sigmoid_and_slope(decay, number)
    alone = _sigmoid(decay, number)
    return {
        "const": number,
        "where": where,
        "fma": fma,
        "sigmoid": sigmoid if derivative else alone,
        "sigmoid_slope": sigmoid_slope,
        "gate": alone if short else sigmoid,
        "gate_slope": _gate_slope_16 if short else gate_slope,
        "tanh": tanh,
        "normal_cdf": _normal_cdf_16(decay) if short and not derivative else normal[0],
        "normal_pdf": normal[1],
    }


@inlined
def identity(z, unused):
    return z


@inlined
def identity_pullback(grad_output, z, unused):
    return grad_output


#: The pullbacks of activations whose value tells the derivative.
_told: set[object] = set()
#: The values and pullbacks of few operations, of which a loop may have several.
_cheap: set[object] = {identity, identity_pullback}
CHEAP_FLOPS = 5


def cheap(function):
    """Whether a value or a pullback is cheap: no exponential is in it."""
    return function in _cheap


@inlined
def _sum(z, post):
    return z + post


@inlined
def _output(z, output):
    return output


def joined(pullback):
    """``joined(z, post)``, where a pullback takes the derivative: at z + post_add, or where the value tells it at the
    output, which lies in the place of post_add."""
    return _output if pullback in _told else _sum


@cache
def activation(name: str | None, dtype: str, parametric: bool = True):
    """:func:`_functions` of an activation, or of none."""
    if name is None:
        return identity, identity_pullback
    value, pullback = _functions(name, dtype, parametric)
    if FORMULAS[name].told:
        _told.add(pullback)
    if max(FORMULAS[name].flops, FORMULAS[name].derivative_flops) <= CHEAP_FLOPS:
        _cheap.update((value, pullback))
    return value, pullback


def _functions(name: str, dtype: str, parametric: bool):
    """Compiled value(z, parameter) and pullback(grad_output, z, parameter) = grad_output * value'(z).

    Values are as precise as the dtype that they are rounded to; gradients, which are summed, as float32.
    """
    formula = FORMULAS[name]
    value = rewritten(bind(formula.value, _primitives(dtype, False)))
    derivative = inlined(bind(formula.derivative, _primitives(dtype, True)))
    if parametric:

        @inlined
        def pullback(grad_output, z, parameter):
            return grad_output * derivative(z, parameter)

        return value, pullback
    default = (np.float64 if dtype == "float64" else F)(formula.default)

    @inlined
    def default_value(z, unused):
        return value(z, default)

    @inlined
    def default_pullback(grad_output, z, unused):
        return grad_output * derivative(z, default)

    return default_value, default_pullback
