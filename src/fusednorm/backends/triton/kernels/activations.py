"""The activations' formulas as Triton functions, over Triton's own primitives, and for 16-bit results over tanh.approx.

The approximation errs by 2**-11 at most, which a bf16 or fp16 result hides: measured on an H200, the exact sigmoid's
two special functions and division cost up to 11 points of the memory's speed.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import triton
import triton.language as tl

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

_CENTRE_32, _TAIL_32 = tl.constexpr(NORMAL_CENTRE_32), tl.constexpr(NORMAL_TAIL_32)
_TAIL_64, _TANH_32 = tl.constexpr(NORMAL_TAIL_64), tl.constexpr(TANH_32)
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
    p = coefficient(COEFFICIENTS, 0) * x + coefficient(COEFFICIENTS, 1)
    for k in tl.static_range(2, degree(COEFFICIENTS) + 1):
        p = p * x + coefficient(COEFFICIENTS, k)
    return p


@triton.jit
def sigmoid(z):
    """From exp(-|z|), which cannot overflow."""
    e = tl.exp(-tl.abs(z))
    return tl.where(z < 0.0, e, 1.0) * (1.0 / (1.0 + e))


@triton.jit
def sigmoid_slope(z):
    e = tl.exp(-tl.abs(z))
    inverse = 1.0 / (1.0 + e)
    return (e * inverse) * inverse


@triton.jit
def tanh(z):
    """An odd function below 0.625, where 1 - 2 e / (1 + e) would cancel: a polynomial in fp32, a quotient in fp64."""
    size = tl.abs(z)
    square = z * z
    e = tl.exp(-tl.abs(2.0 * z))
    large = 1.0 - 2.0 * (e * (1.0 / (1.0 + e)))
    if z.dtype == tl.float64:
        small = size + size * square * polynomial(square, _TANH_TOP) / polynomial(square, _TANH_BOTTOM)
    else:
        small = size + size * square * polynomial(square, _TANH_32)
    magnitude = tl.where(size >= 0.625, large, small)
    return tl.where(z < 0.0, -magnitude, magnitude)


@triton.jit
def normal_cdf(z):
    """The normal distribution function; the tail keeps its relative accuracy, where 1 + erf would cancel."""
    size = tl.abs(z)
    gaussian = tl.exp(-0.5 * z * z)
    if z.dtype == tl.float64:
        held = tl.where(size > 39.0, 39.0, size)
        tail = gaussian * polynomial((held - 6.0) / (held + 6.0), _TAIL_64) / (held + 2.0)
        return tl.where(z < 0.0, tail, 1.0 - tail)
    else:
        t = 1.0 / (1.0 + 0.21213203435596426 * size)
        tail = 0.5 * gaussian * (t * polynomial(t, _TAIL_32))
        centre = 0.5 + z * polynomial(z * z, _CENTRE_32)
        return tl.where(size < 1.0, centre, tl.where(z < 0.0, tail, 1.0 - tail))


@triton.jit
def normal_pdf(z):
    return 0.3989422804014327 * tl.exp(-0.5 * z * z)


@triton.jit
def tanh_approximate(z):
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [z], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def sigmoid_approximate(z):
    return 0.5 + 0.5 * tanh_approximate(0.5 * z)


_PRIMITIVES = {
    "const": const,
    "where": where,
    "sigmoid": sigmoid,
    "sigmoid_slope": sigmoid_slope,
    "tanh": tanh,
    "normal_cdf": normal_cdf,
    "normal_pdf": normal_pdf,
    "tl": tl,  # the interpreter looks for it in every function
}


_APPROXIMATE = {**_PRIMITIVES, "sigmoid": sigmoid_approximate, "tanh": tanh_approximate}


@triton.jit
def identity(z, parameter):
    return z


@triton.jit
def one(z, parameter):
    return tl.full((), 1.0, z.dtype)


def _compiled(formula: Any, primitives: Mapping[str, Any]) -> Any:
    function = bind(formula, primitives)
    function.__module__ = __name__  # Triton names a kernel's functions by their module
    return triton.jit(function)


@cache
def activation(name: str | None, approximate: bool = False) -> tuple[Any, Any]:
    """value(z, parameter) and derivative(z, parameter); ``approximate`` needs an NVIDIA GPU."""
    if name is None:
        return identity, one
    primitives = _APPROXIMATE if approximate else _PRIMITIVES
    return _compiled(FORMULAS[name].value, primitives), _compiled(FORMULAS[name].derivative, primitives)
