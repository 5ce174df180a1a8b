"""Each activation once: name, formula, derivative.

A formula is a plain Python function of z and one parameter, written in the primitives named in :data:`PRIMITIVES`.
Every backend compiles these same functions with its own primitives (:func:`bind`): the reference with torch's, the CPU
with Numba's, a GPU with Triton's. To add an activation, write its two formulas and its line in :data:`FORMULAS`.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from numbers import Real
from types import FunctionType
from typing import Any

PRIMITIVES = ("const", "where", "sigmoid", "tanh", "normal_cdf", "normal_pdf")

# The backends replace these names; here they only let the formulas below be read and checked.
const: Any
where: Any
sigmoid: Any
tanh: Any
normal_cdf: Any
normal_pdf: Any


def silu(z, beta):
    return z * sigmoid(beta * z)


def silu_derivative(z, beta):
    s = sigmoid(beta * z)
    return s + beta * z * s * (const(1.0) - s)


def relu(z, unused):
    return where(z < const(0.0), const(0.0), z)


def relu_derivative(z, unused):
    return where(z <= const(0.0), const(0.0), const(1.0))


def gelu(z, unused):
    return z * normal_cdf(z)


def gelu_derivative(z, unused):
    return normal_cdf(z) + z * normal_pdf(z)


def gelu_tanh(z, unused):
    inner = const(0.7978845608028654) * (z + const(0.044715) * z * z * z)
    return const(0.5) * z * (const(1.0) + tanh(inner))


def gelu_tanh_derivative(z, unused):
    t = tanh(const(0.7978845608028654) * (z + const(0.044715) * z * z * z))
    slope = const(0.7978845608028654) * (const(1.0) + const(0.134145) * z * z)
    return const(0.5) * (const(1.0) + t) + const(0.5) * z * (const(1.0) - t * t) * slope


def sigmoid_value(z, unused):
    return sigmoid(z)


def sigmoid_derivative(z, unused):
    s = sigmoid(z)
    return s * (const(1.0) - s)


def tanh_value(z, unused):
    return tanh(z)


def tanh_derivative(z, unused):
    t = tanh(z)
    return const(1.0) - t * t


def hardswish(z, unused):
    inside = z * (z + const(3.0)) * const(1.0 / 6.0)
    return where(z <= const(-3.0), const(0.0), where(z >= const(3.0), z, inside))


def hardswish_derivative(z, unused):
    inside = z * const(1.0 / 3.0) + const(0.5)
    return where(z <= const(-3.0), const(0.0), where(z >= const(3.0), const(1.0), inside))


def leaky_relu(z, negative_slope):
    return where(z < const(0.0), z * negative_slope, z)


def leaky_relu_derivative(z, negative_slope):
    return where(z <= const(0.0), negative_slope, const(1.0))


@dataclass(frozen=True, slots=True)
class Formula:
    """An activation's value and derivative, the operations each takes, and the default of its parameter."""

    value: Callable[[Any, Any], Any]
    derivative: Callable[[Any, Any], Any]
    flops: int
    derivative_flops: int
    parameter: str | None = None
    default: float = 0.0


# An exponential is counted as 12 operations, a division as 1.
FORMULAS: dict[str, Formula] = {
    "silu": Formula(silu, silu_derivative, 16, 20, "beta", 1.0),
    "relu": Formula(relu, relu_derivative, 1, 1),
    "gelu": Formula(gelu, gelu_derivative, 24, 28),
    "gelu_tanh": Formula(gelu_tanh, gelu_tanh_derivative, 22, 30),
    "sigmoid": Formula(sigmoid_value, sigmoid_derivative, 14, 16),
    "tanh": Formula(tanh_value, tanh_derivative, 15, 17),
    "hardswish": Formula(hardswish, hardswish_derivative, 5, 4),
    "leaky_relu": Formula(leaky_relu, leaky_relu_derivative, 2, 1, "negative_slope", 0.01),
}
ALIASES = {"swish": "silu"}


@dataclass(frozen=True, slots=True)
class Activation:
    """An activation by name with its parameter, e.g. ``Activation("silu", 1.702)`` for x * sigmoid(1.702 x).

    The parameter is beta for "silu" (default 1) and negative_slope for "leaky_relu" (default 0.01); the others have
    none. The name "swish" is an alias of "silu".
    """

    name: str
    parameter: float | None = None

    def __post_init__(self) -> None:
        name = ALIASES.get(self.name, self.name)
        formula = FORMULAS.get(name)
        if formula is None:
            known = ", ".join(sorted([*FORMULAS, *ALIASES]))
            raise ValueError(f"activation: {self.name!r} is unknown; expected None or one of {known}")
        if self.parameter is not None and formula.parameter is None:
            raise ValueError(f"activation: {name!r} takes no parameter, got {self.parameter!r}; leave it out")
        parameter = formula.default if self.parameter is None else self.parameter
        if not isinstance(parameter, Real) or not isfinite(parameter):
            raise ValueError(f"activation: the parameter of {name!r} is {parameter!r}; expected a finite number")
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "parameter", float(parameter))

    @property
    def flops(self) -> int:
        return FORMULAS[self.name].flops

    @property
    def derivative_flops(self) -> int:
        return FORMULAS[self.name].derivative_flops


_BY_NAME = {name: Activation(name) for name in [*FORMULAS, *ALIASES]}


def resolve(activation: str | Activation | None) -> Activation | None:
    """The Activation that a user's argument means; None for None."""
    if activation is None or isinstance(activation, Activation):
        return activation
    if not isinstance(activation, str):
        raise TypeError(f"activation: expected None, a name or fusednorm.Activation, got {type(activation).__name__}")
    found = _BY_NAME.get(activation)
    return Activation(activation) if found is None else found


def bind(formula: Callable[[Any, Any], Any], primitives: Mapping[str, Callable[..., Any]]) -> FunctionType:
    """A copy of a formula whose primitives are a backend's own."""
    missing = [name for name in PRIMITIVES if name not in primitives]
    if missing:
        raise TypeError(f"bind: the primitives {', '.join(missing)} are missing")
    # C code that a primitive calls imports through the frame's __builtins__, as torch's dispatch modes do.
    return FunctionType(formula.__code__, {"__builtins__": builtins, **primitives}, formula.__name__)
