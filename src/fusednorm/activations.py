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

# Minimax fits for the primitives of several backends, highest power first.
# (tanh(z) / z - 1) / z**2 in z**2 for |z| < 0.625: in float32, and as a quotient in float64 (Cephes).
TANH_32 = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
TANH_64_TOP = (-9.64399179425052238628e-1, -9.92877231001918586564e1, -1.61468768441708447952e3)
TANH_64_BOTTOM = (1.0, 1.12811678491632931402e2, 2.23548839060100448583e3, 4.84406305325125486048e3)
# (cdf(z) - 1/2) / z in z**2 on [0, 1], error 7e-9, and half of erfcx(x) / t in t = 1 / (1 + 0.3 x) on 0 <= x <= 10,
# relative error 2e-8, where erfcx(x) = exp(x**2) erfc(x).
NORMAL_CENTRE_32 = (9.246838032e-05, -0.001165350759, 0.009964166814, -0.06648873, 0.398942199)
NORMAL_TAIL_32 = (
    -0.0647613854, 0.24278128445, -0.2561383931, 0.2738592838, -0.047324869565, 0.10746282455,
    0.0741696359, 0.0853576066, 0.084594003,
)  # fmt: skip
# The same for values of 16 bits, in t = 1 / (1 + 0.53 x) on 0 <= x <= 9.5, relative error 3e-5.
NORMAL_TAIL_16 = (-0.0909822856, 0.20150992115, 0.0826204517, 0.15790543495, 0.1489409464)
# exp(a**2 / 2) cdf(-a) (a + 2) in (a - 6) / (a + 6) on 0 <= a <= 38.7, relative error 2e-17.
NORMAL_TAIL_64 = (
    1.4309166054977116e-09, 3.3969880582406426e-09, -1.2532021986137647e-08, -2.4872238354259926e-08,
    1.0778178733616866e-07, 6.200118989035889e-08, -8.857385134237014e-07, 1.0669365546842003e-06,
    4.889214179657139e-06, -2.0867531123815523e-05, 1.7285533213695116e-05, 0.00013186379298008377,
    -0.0006886217346391231, 0.0019222033745711598, -0.003641891407508819, 0.00440042822147207, -0.0007788002423174563,
    -0.012462072762659506, 0.04068163530257979, -0.08627942657879305, 0.14564291801290047, -0.2082220957627897,
    0.5182345145955748,
)  # fmt: skip

PRIMITIVES = (
    "const", "where", "fma", "sigmoid", "sigmoid_slope", "gate", "gate_slope", "tanh", "normal_cdf", "normal_pdf",
)  # fmt: skip

# The backends replace these names; here they let mypy and readers follow the formulas below.
const: Any
where: Any
fma: Any  # a * b + c, with one rounding where a backend can; b and c may be constants
sigmoid: Any
sigmoid_slope: Any  # sigmoid(z) * sigmoid(-z), the derivative: s * (1 - s) would cancel where s is near 1
gate: Any  # sigmoid, and its slope from z and gate(z), where the gate is added to z times the slope, which may cancel
gate_slope: Any
tanh: Any
normal_cdf: Any
normal_pdf: Any


def silu(z, beta):
    return z * sigmoid(beta * z)


def silu_derivative(z, beta):
    u = beta * z
    s = gate(u)
    return fma(z, beta * gate_slope(u, s), s)  # slope first: 0 * (z * beta) is NaN where z * beta overflows


def relu(z, unused):
    return where(z < const(0.0), const(0.0), z)


def relu_derivative(z, unused):
    return where(z <= const(0.0), const(0.0), const(1.0))


def gelu(z, unused):
    return z * normal_cdf(z)


def gelu_derivative(z, unused):
    below = normal_cdf(z)
    return fma(z, normal_pdf(z), below)


# gelu_tanh is 0.5 z (1 + tanh(u)) = z sigmoid(2 u); 1 + tanh(u) would cancel below zero. The square of z is
# capped at 1e4, where 2 u is beyond 7000 and the sigmoid constant: an infinite square would meet a slope of 0.
def gelu_tanh(z, unused):
    square = where(z * z < const(1e4), z * z, const(1e4))
    return z * sigmoid(z * fma(square, const(0.07135481627260025), const(1.5957691216057308)))


def gelu_tanh_derivative(z, unused):
    square = where(z * z < const(1e4), z * z, const(1e4))
    u = z * fma(square, const(0.07135481627260025), const(1.5957691216057308))
    inner = fma(square, const(0.21406444881780075), const(1.5957691216057308))
    return fma(z * sigmoid_slope(u), inner, sigmoid(u))


def sigmoid_value(z, unused):
    return sigmoid(z)


def sigmoid_derivative(z, unused):
    return sigmoid_slope(z)


def tanh_value(z, unused):
    return tanh(z)


# 1 - tanh(z)**2 = 4 sigmoid_slope(2 z). The left form cancels in the tails; the right form has more roundings around
# zero, which would show in the sums of gradients.
def tanh_derivative(z, unused):
    square = tanh(z) * tanh(z)
    return where(square < const(0.5), const(1.0) - square, const(4.0) * sigmoid_slope(const(2.0) * z))


def hardswish(z, unused):
    inside = z * (z + const(3.0)) * const(1.0 / 6.0)
    return where(z <= const(-3.0), z * const(0.0), where(z >= const(3.0), z, inside))


def hardswish_derivative(z, unused):
    inside = z * const(1.0 / 3.0) + const(0.5)
    return where(z <= const(-3.0), const(0.0), where(z >= const(3.0), const(1.0), inside))


def leaky_relu(z, negative_slope):
    return where(z > const(0.0), z, z * negative_slope)


def leaky_relu_derivative(z, negative_slope):
    return where(z > const(0.0), const(1.0), negative_slope)


@dataclass(frozen=True, slots=True)
class Formula:
    """An activation's value and derivative, the operations each takes, and the name and default of its parameter.
    ``told`` says that the value tells the derivative, which is the same at z and at the value of z."""

    value: Callable[[Any, Any], Any]
    derivative: Callable[[Any, Any], Any]
    flops: int
    derivative_flops: int
    parameter: str | None = None
    default: float = 0.0
    told: bool = False


# As the float32 primitives compute them: an exponential is counted as 12 operations, a division as 1.
FORMULAS: dict[str, Formula] = {
    "silu": Formula(silu, silu_derivative, 16, 20, "beta", 1.0),
    "relu": Formula(relu, relu_derivative, 1, 1, told=True),
    "gelu": Formula(gelu, gelu_derivative, 38, 40),
    "gelu_tanh": Formula(gelu_tanh, gelu_tanh_derivative, 19, 25),
    "sigmoid": Formula(sigmoid_value, sigmoid_derivative, 14, 16),
    "tanh": Formula(tanh_value, tanh_derivative, 30, 34),
    "hardswish": Formula(hardswish, hardswish_derivative, 5, 4),
    "leaky_relu": Formula(leaky_relu, leaky_relu_derivative, 2, 1, "negative_slope", 0.01),
}
ALIASES = {"swish": "silu"}
#: A product with a slope of so much leaves a sixteenth of a gradient's own rounding.
SMALL_SLOPE = 1 / 16


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
        # torch.fx writes every field of an activation into a graph's code: 0.0 where there is no parameter.
        left_out = self.parameter is None or (isinstance(self.parameter, Real) and self.parameter == formula.default)
        if formula.parameter is None and not left_out:
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
    def told(self) -> bool:
        return FORMULAS[self.name].told

    @property
    def hardly_rounds(self) -> bool:
        """Whether a gradient of 16 bits times the derivative is that gradient, 0, or so small a part of it that its
        rounding does not count."""
        return self.name == "relu" or (self.name == "leaky_relu" and abs(self.parameter or 0.0) <= SMALL_SLOPE)

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
    # C code below a primitive, such as torch's dispatch modes, imports through the frame's __builtins__.
    return FunctionType(formula.__code__, {"__builtins__": builtins, **primitives}, formula.__name__)
