"""The activations' formulas as Triton functions, over Triton's own primitives, and on NVIDIA over its instructions.

``ex2.approx`` and ``rcp.approx`` err by two units in the last place of float32 at most, so one form serves values and
sums of every 16-bit and fp32 problem. They flush subnormal numbers, which saves five instructions of Triton's own
exponential and division. ``tanh.approx`` errs by 2**-11 of its result. That vanishes in the rounding of a bf16 tanh,
but 0.5 + 0.5 tanh, a sigmoid, would lose its left tail, and sums of gradients would exceed the tolerance.
"""

from __future__ import annotations

import builtins
from functools import cache
from types import FunctionType
from typing import Any

import triton
import triton.language as tl

from fusednorm.activations import (
    FORMULAS,
    NORMAL_TAIL_16,
    NORMAL_TAIL_32,
    NORMAL_TAIL_64,
    TANH_32,
    TANH_64_BOTTOM,
    TANH_64_TOP,
    bind,
)
from fusednorm.problem import DTYPE_BYTES

_TAIL_16, _TAIL_32, _TAIL_64 = map(tl.constexpr, (NORMAL_TAIL_16, NORMAL_TAIL_32, NORMAL_TAIL_64))
_TANH_32 = tl.constexpr(TANH_32)
_TANH_TOP, _TANH_BOTTOM = tl.constexpr(TANH_64_TOP), tl.constexpr(TANH_64_BOTTOM)


@triton.constexpr_function
def const(value):
    return value


@triton.jit
def where(condition, a, b):
    return tl.where(condition, a, b)


@triton.constexpr_function
def degree(coefficients):
    return len(coefficients) - 1


@triton.constexpr_function
def coefficient(coefficients, k):
    return coefficients[k]


@triton.jit
def polynomial(x, COEFFICIENTS: tl.constexpr):
    """Horner's form, highest power first."""
    p = tl.full((), coefficient(COEFFICIENTS, 0), x.dtype)
    for k in tl.static_range(1, degree(COEFFICIENTS) + 1):
        p = tl.fma(p, x, tl.full((), coefficient(COEFFICIENTS, k), x.dtype))
    return p


@triton.jit
def like(value, x):
    """A constant in the dtype of x; a tensor is left as it is."""
    return value if isinstance(value, tl.tensor) else tl.full((), value, x.dtype)


@triton.jit
def fma(a, b, c):
    return tl.fma(a, like(b, a), like(c, a))


@triton.jit
def decay(y):
    """exp(-y)."""
    return tl.exp(-y)


@triton.jit
def gaussian(z):
    """exp(-z**2 / 2)."""
    return tl.exp(-0.5 * (z * z))


@triton.jit
def reciprocal(y):
    return 1.0 / y


@triton.jit
def power_nvidia(t):
    """2**t."""
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [t], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def decay_nvidia(y):
    return power_nvidia(y * -1.4426950408889634)


@triton.jit
def gaussian_nvidia(z):
    return power_nvidia(z * (z * -0.7213475204444817))


@triton.jit
def reciprocal_nvidia(y):
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [y], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def tanh_nvidia(z):
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [z], dtype=tl.float32, is_pure=True, pack=1)


def sigmoid_alone(z):
    """sigmoid for values: the exponential may be infinite."""
    return reciprocal(1.0 + decay(z))


def sigmoid(z):
    """sigmoid for derivatives, from exp(-|z|), which ``sigmoid_slope`` computes too."""
    e = decay(tl.abs(z))
    inverse = reciprocal(1.0 + e)
    return tl.where(z < 0.0, e * inverse, inverse)


def sigmoid_slope(z):
    e = decay(tl.abs(z))
    inverse = reciprocal(1.0 + e)
    return (e * inverse) * inverse


def gate_slope(z, gate):
    return sigmoid_slope(z)


def gate_slope_16(z, gate):
    """gate_slope under gradients of 16 bits: where it cancels, it errs by the last place of the gate."""
    return tl.fma(gate * -1.0, gate, gate)  # Triton 3.6 takes an addition for -gate


def tanh(z):
    """An odd function below 0.625, where 1 - 2 e / (1 + e) would cancel: a polynomial in fp32, a quotient in fp64."""
    size = tl.abs(z)
    square = z * z
    e = decay(tl.abs(2.0 * z))
    large = 1.0 - 2.0 * (e * reciprocal(1.0 + e))
    if z.dtype == tl.float64:
        small = size + size * square * polynomial(square, _TANH_TOP) / polynomial(square, _TANH_BOTTOM)
    else:
        small = size + size * square * polynomial(square, _TANH_32)
    magnitude = tl.where(size >= 0.625, large, small)
    return tl.where(z < 0.0, -magnitude, magnitude)


def normal_cdf(z):
    """The normal distribution function; the tail keeps its relative accuracy, where 1 + erf would cancel."""
    size = tl.abs(z)
    if z.dtype == tl.float64:
        held = tl.where(size > 39.0, 39.0, size)
        tail = gaussian(z) * polynomial((held - 6.0) / (held + 6.0), _TAIL_64) / (held + 2.0)
    else:
        one = tl.full((), 1.0, z.dtype)
        t = reciprocal(tl.fma(size, one * 0.21213203435596426, one))
        tail = gaussian(z) * (t * polynomial(t, _TAIL_32))
    return tl.where(z < 0.0, tail, 1.0 - tail)


def normal_cdf_16(z):
    """normal_cdf for values of 16 bits, by a shorter polynomial."""
    one = tl.full((), 1.0, z.dtype)
    t = reciprocal(tl.fma(tl.abs(z), one * 0.3747665940288702, one))
    tail = gaussian(z) * (t * polynomial(t, _TAIL_16))
    return tl.where(z < 0.0, tail, 1.0 - tail)


def normal_pdf(z):
    return 0.3989422804014327 * gaussian(z)


def _compiled(function: FunctionType) -> Any:
    function.__module__ = __name__  # Triton names a kernel's functions by their module
    return triton.jit(function)


@cache
def _primitives(nvidia: bool, derivative: bool, short: bool) -> dict[str, Any]:
    """The primitives, in fp32 over NVIDIA's instructions or else over what Triton makes of any dtype; ``short``: for
    tensors of 16 bits."""
    names = {
        "tl": tl,  # the interpreter looks for it in every function
        "polynomial": polynomial,
        "decay": decay_nvidia if nvidia else decay,
        "gaussian": gaussian_nvidia if nvidia else gaussian,
        "reciprocal": reciprocal_nvidia if nvidia else reciprocal,
        "_TAIL_16": _TAIL_16,
        "_TAIL_32": _TAIL_32,
        "_TAIL_64": _TAIL_64,
        "_TANH_32": _TANH_32,
        "_TANH_TOP": _TANH_TOP,
        "_TANH_BOTTOM": _TANH_BOTTOM,
    }
    primitives = {
        "sigmoid": sigmoid if derivative else sigmoid_alone,
        "sigmoid_slope": sigmoid_slope,
        "gate": sigmoid_alone if short else sigmoid,
        "gate_slope": gate_slope_16 if short else gate_slope,
        "tanh": tanh,
        "normal_cdf": normal_cdf_16 if short and not derivative else normal_cdf,
        "normal_pdf": normal_pdf,
    }
    found = {"const": const, "where": where, "fma": fma, "tl": tl}
    for name, function in primitives.items():
        scope = {"__builtins__": builtins, **names}
        found[name] = _compiled(FunctionType(function.__code__, scope, function.__name__))
        names[name] = found[name]  # for primitives made of others
    return found


@triton.jit
def identity(z, parameter):
    return z


@triton.jit
def one(z, parameter):
    return tl.full((), 1.0, z.dtype)


#: The name of each function that :func:`activation` returned, as an attribute of this module.
_names: dict[int, str] = {id(identity): "identity", id(one): "one"}


@triton.constexpr_function
def told(derivative):
    """Whether the value of an activation tells its derivative."""
    activation, _, _ = _names[id(derivative)].partition("__")
    return activation in FORMULAS and FORMULAS[activation].told


@cache
def activation(name: str | None, dtype: str, nvidia: bool) -> tuple[Any, Any]:
    """value(z, parameter) and derivative(z, parameter) for a problem of a dtype."""
    if name is None:
        return identity, one
    approximate = nvidia and dtype != "float64"
    short = DTYPE_BYTES[dtype] == 2
    values = _primitives(approximate, False, short)
    if approximate and dtype == "bfloat16":
        values = {**values, "tanh": tanh_nvidia}
    formula = FORMULAS[name]
    derivative = bind(formula.derivative, _primitives(approximate, True, short))
    functions = _compiled(bind(formula.value, values)), _compiled(derivative)
    for part, function in zip(("value", "derivative"), functions, strict=True):
        _names[id(function)] = f"{name}__{part}__{dtype}__{'nvidia' if nvidia else 'any'}"
    return functions


def name_of(function: Any) -> str:
    """The name under which this module has a function of :func:`activation`, for generated code."""
    return _names[id(function)]


def __getattr__(attribute: str) -> Any:
    """A function by its :func:`name_of`, in a process that has not asked for it yet."""
    try:
        name, part, dtype, device = attribute.split("__")
        return activation(name, dtype, device == "nvidia")[("value", "derivative").index(part)]
    except (ValueError, KeyError):
        raise AttributeError(f"module {__name__!r} has no attribute {attribute!r}") from None
