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
