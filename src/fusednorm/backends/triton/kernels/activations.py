"""The activations' formulas as Triton functions, over Triton's own primitives."""

from __future__ import annotations

from functools import cache
from typing import Any

import triton
import triton.language as tl

from fusednorm.activations import FORMULAS, bind


@triton.constexpr_function
def const(value):
    return value


@triton.jit
def where(condition, a, b):
    return tl.where(condition, a, b)


@triton.jit
def sigmoid(z):
    return 1.0 / (1.0 + tl.exp(-z))


@triton.jit
def tanh(z):
    """An odd polynomial below 0.625, where 1 - 2 / (exp(2|z|) + 1) would cancel (Cephes, tanhf); fp64 without it."""
    size = tl.abs(z)
    large = 1.0 - 2.0 / (tl.exp(2.0 * size) + 1.0)
    large = tl.where(z < 0.0, -large, large)
    if z.dtype == tl.float64:
        return large
    else:
        s = z * z
        p = -5.70498872745e-3 * s + 2.06390887954e-2
        p = p * s - 5.37397155531e-2
        p = p * s + 1.33314422036e-1
        p = p * s - 3.33332819422e-1
        return tl.where(size >= 0.625, large, p * s * z + z)


@triton.jit
def normal_cdf(z):
    return 0.5 + 0.5 * tl.erf(z * 0.7071067811865476)


@triton.jit
def normal_pdf(z):
    return 0.3989422804014327 * tl.exp(-0.5 * z * z)


_PRIMITIVES = {
    "const": const,
    "where": where,
    "sigmoid": sigmoid,
    "tanh": tanh,
    "normal_cdf": normal_cdf,
    "normal_pdf": normal_pdf,
    "tl": tl,  # the interpreter looks for it in every function
}


@triton.jit
def identity(z, parameter):
    return z


@triton.jit
def one(z, parameter):
    return tl.full((), 1.0, z.dtype)


def _compiled(formula: Any) -> Any:
    function = bind(formula, _PRIMITIVES)
    function.__module__ = __name__  # Triton names a kernel's functions by their module
    return triton.jit(function)


@cache
def activation(name: str | None) -> tuple[Any, Any]:
    """value(z, parameter) and derivative(z, parameter)."""
    if name is None:
        return identity, one
    return _compiled(FORMULAS[name].value), _compiled(FORMULAS[name].derivative)
