"""The activations: names and parameters, formulas that any backend can bind, and how exact the CPU's functions are."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from activation_support import ours, torchs
from torch import Tensor

from fusednorm.activations import ALIASES, FORMULAS, PRIMITIVES, Activation, bind, resolve
from fusednorm.backends import reference
from fusednorm.tolerance import judge

# --- names and parameters ---


def test_a_name_an_alias_and_an_object_are_the_same() -> None:
    assert resolve("silu") == resolve("swish") == Activation("swish") == Activation("silu", 1.0) == Activation("silu")
    assert resolve(Activation("silu", 2.0)) == Activation("swish", 2.0)
    assert len({Activation("silu"), Activation("swish"), Activation("silu", 2.0)}) == 2
    assert resolve(None) is None


@pytest.mark.parametrize("name", [*FORMULAS, *ALIASES])
def test_every_name_resolves(name: str) -> None:
    activation = resolve(name)
    assert activation is not None
    assert activation.name == ALIASES.get(name, name)
    assert activation.parameter == FORMULAS[activation.name].default


@pytest.mark.parametrize(("name", "default"), [("silu", 1.0), ("leaky_relu", 0.01), ("relu", 0.0), ("gelu", 0.0)])
def test_default_parameter(name: str, default: float) -> None:
    assert Activation(name).parameter == default


def test_a_parameter_is_a_float() -> None:
    parameter = Activation("leaky_relu", 1).parameter
    assert isinstance(parameter, float)
    assert parameter == 1.0


def test_an_unknown_name_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"'mish' is unknown; expected None or one of gelu, gelu_tanh.*swish"):
        resolve("mish")


@pytest.mark.parametrize("name", [name for name in FORMULAS if FORMULAS[name].parameter is None])
def test_a_parameter_where_there_is_none_is_an_error(name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}' takes no parameter, got 2.0"):
        Activation(name, 2.0)


def test_a_tensor_is_no_parameter() -> None:
    with pytest.raises(ValueError, match=r"the parameter of 'silu' is tensor\(.*; expected a finite number"):
        Activation("silu", torch.ones(2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'relu' takes no parameter, got tensor\("):
        Activation("relu", torch.ones(2))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FORMULAS)
def test_an_activation_is_made_again_from_its_fields(name: str) -> None:
    one = Activation(name)
    assert Activation(one.name, one.parameter) == one


@pytest.mark.parametrize("value", ["a", math.nan, math.inf])
def test_a_parameter_is_a_finite_number(value: Any) -> None:
    with pytest.raises(ValueError, match=r"parameter of 'silu'.*finite number"):
        Activation("silu", value)


@pytest.mark.parametrize("value", [1, torch.nn.SiLU(), F.silu, ("silu", 1.0)], ids=lambda value: type(value).__name__)
def test_anything_else_is_a_type_error(value: Any) -> None:
    with pytest.raises(TypeError, match=f"got {type(value).__name__}"):
        resolve(value)


# --- formulas ---


@pytest.mark.parametrize("name", [name for name in FORMULAS if FORMULAS[name].told])
def test_a_value_tells_the_derivative(name: str) -> None:
    z = torch.tensor([-math.inf, -3.0, -1e-30, -0.0, 0.0, 1e-30, 3.0, math.inf, math.nan])
    derivative, value = (table[name] for table in (reference.DERIVATIVES, reference.VALUES))
    assert torch.equal(derivative(value(z, 0.0), 0.0), derivative(z, 0.0))


@pytest.mark.parametrize(
    "activation", [*map(Activation, FORMULAS), *(Activation("leaky_relu", slope) for slope in (1 / 16, 0.1))]
)
def test_which_gradients_hardly_round(activation: Activation) -> None:
    """A product with the derivative, rounded to bfloat16, errs by a sixteenth of the gradient's own unit at most."""
    z = torch.linspace(-5, 5, 1001, dtype=torch.float64)
    slopes = reference.DERIVATIVES[activation.name](z, activation.parameter)
    gradients = torch.linspace(1, 2, 129, dtype=torch.float64)[:, None]
    product = gradients * slopes
    error = ((product.bfloat16().double() - product) / gradients).abs().max().item()
    assert (error <= 2**-9 / 16) == activation.hardly_rounds


@pytest.mark.parametrize("name", FORMULAS)
def test_a_formula_uses_the_primitives_and_nothing_else(name: str) -> None:
    """Or some backend could not bind it."""
    for formula in (FORMULAS[name].value, FORMULAS[name].derivative):
        assert set(formula.__code__.co_names) <= set(PRIMITIVES)
        assert formula.__code__.co_freevars == ()
        assert formula.__code__.co_argcount == 2


@pytest.mark.parametrize("name", FORMULAS)
def test_flops_are_counted(name: str) -> None:
    assert Activation(name).flops > 0
    assert Activation(name).derivative_flops > 0


def test_bind_wants_every_primitive() -> None:
    with pytest.raises(
        TypeError,
        match="primitives fma, sigmoid, sigmoid_slope, gate, gate_slope, tanh, normal_cdf, normal_pdf are missing",
    ):
        bind(FORMULAS["relu"].value, {"const": float, "where": lambda *_: 0.0})


def test_bind_leaves_the_formula_as_it_was() -> None:
    before = dict(FORMULAS["silu"].value.__globals__)
    bound = bind(FORMULAS["silu"].value, dict.fromkeys(PRIMITIVES, lambda *_: 3.0))
    assert bound(2.0, 1.0) == 6.0
    assert FORMULAS["silu"].value.__globals__ == before


@pytest.mark.parametrize(
    ("name", "z", "derivative"),
    [("relu", 0.0, 0.0), ("leaky_relu", 0.0, 0.01), ("hardswish", -3.0, 0.0), ("hardswish", 3.0, 1.0)],
)
def test_derivatives_at_the_kinks_are_torchs(name: str, z: float, derivative: float) -> None:
    at = torch.tensor([z], dtype=torch.float64)
    right = torchs(at, name)[1].item()
    assert reference.DERIVATIVES[name](at, Activation(name).parameter).item() == right == derivative


# --- the CPU's functions ---

DTYPES = (torch.float32, torch.float64)

# Dense where functions bend, and out to where they have long been constant; the judge looks at each on its own, so that
# a large value in one does not hide an error in another.
SPANS = {
    "around zero": (-1e-3, 1e-3),
    "-1 to 1": (-1.0, 1.0),
    "1 to 3.5": (1.0, 3.5),
    "-3.5 to -1": (-3.5, -1.0),
    "3.5 to 12": (3.5, 12.0),
    "-6 to -3.5": (-6.0, -3.5),
    "-9 to -6": (-9.0, -6.0),
    "-12 to -9": (-12.0, -9.0),
    "12 to 200": (12.0, 200.0),
    "-200 to -12": (-200.0, -12.0),
    "200 to 1e6": (200.0, 1e6),
    "-1e6 to -200": (-1e6, -200.0),
}
POINTS = 20_001


def expected(z: Tensor, name: str) -> tuple[Tensor, Tensor]:
    parameter = Activation(name).parameter
    return reference.VALUES[name](z.double(), parameter), reference.DERIVATIVES[name](z.double(), parameter).double()


@pytest.mark.parametrize("span", SPANS)
@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_accuracy(dtype: torch.dtype, name: str, span: str) -> None:
    """At most twice the error of torch's own function, and a few units of 1, absolute where a value is small."""
    z = torch.linspace(*SPANS[span], POINTS, dtype=torch.float64).to(dtype)
    for got, right, plain in zip(ours(z, name), expected(z, name), torchs(z.float(), name), strict=True):
        verdict = judge(got, right, plain.double(), spread=1.0)
        assert verdict.ok, verdict.fault


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_derivatives_under_gradients_of_16_bits(dtype: torch.dtype, name: str) -> None:
    """They err by ten millionths of themselves at most, where they do not cross 0, and keep their limits."""
    z = torch.cat([torch.linspace(-100, 100, 200_001), torch.logspace(2, 38, 1000), -torch.logspace(2, 38, 1000)])
    got, right = ours(z, name, dtype=dtype)[1].double(), expected(z, name)[1]
    unit = torch.where(z.abs() < 3, right.abs().clamp(min=0.1), right.abs())
    assert bool(((got - right).abs() <= 1e-5 * unit + 2.0**-118).all())
    value, derivative = ours(torch.tensor([math.nan]), name, dtype=dtype)
    assert value.isnan().all()
    assert derivative.isnan().all() or name in ("relu", "leaky_relu")


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_stays_nan(dtype: torch.dtype, name: str) -> None:
    """Whatever its payload and its sign; but for derivatives that compare z alone, which are torch's."""
    integers = torch.int32 if dtype == torch.float32 else torch.int64
    top = 0x7F800000 if dtype == torch.float32 else 0x7FF0000000000000
    quiet = 0x400000 if dtype == torch.float32 else 0x8000000000000
    payloads = [0, 1, 2, 0x80, 0xFF, 0x100, 0x1FF, 0x3FF, 0x7FF, 0x3FFFFF]
    bits = [top | quiet | payload for payload in payloads] + [-1]
    z = torch.tensor(bits, dtype=integers).view(dtype)
    assert z.isnan().all()
    value, derivative = ours(z, name)
    assert value.isnan().all()
    if name in ("relu", "leaky_relu"):
        assert torch.equal(derivative, torchs(z, name)[1])
    else:
        assert derivative.isnan().all()


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_infinity(dtype: torch.dtype, name: str) -> None:
    """Wherever the formula has a finite limit that it reaches, or an infinite one, in fp64 with no rounding."""
    z = torch.tensor([math.inf, -math.inf], dtype=dtype)
    for got, right in zip(ours(z, name), expected(z, name), strict=True):
        known = ~right.isnan()  # 0 times infinity has no value
        assert torch.equal(got[known].isinf(), right[known].isinf())
        torch.testing.assert_close(got[known], right[known].to(dtype), rtol=0, atol=2 * torch.finfo(dtype).tiny)


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_smallest_numbers(dtype: torch.dtype, name: str) -> None:
    info = torch.finfo(dtype)
    z = torch.tensor([0.0, info.tiny, info.tiny * info.eps, 3 * info.tiny * info.eps, 1e-20], dtype=dtype)
    z = torch.cat([z, -z])
    for got, right in zip(ours(z, name), expected(z, name), strict=True):
        torch.testing.assert_close(got, right.to(dtype), rtol=2 * info.eps, atol=info.tiny * info.eps)


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "hardswish", "relu"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_negative_values_vanish(dtype: torch.dtype, name: str) -> None:
    """Relative to z: 2**-126 of it is what the exponential of the smallest argument leaves."""
    z = -torch.logspace(2, 18, 200, dtype=torch.float64).to(dtype)
    value, derivative = ours(z, name)
    assert bool((value.abs() <= 2.0**-125 * z.abs()).all())
    assert bool((derivative.abs() <= 2.0**-125 * z.abs()).all())


def test_silu_of_the_largest_negative_number_is_zero() -> None:
    value, derivative = ours(torch.tensor([-torch.finfo(torch.float32).max, -1e20, -90.0]), "silu")
    assert torch.equal(value, torch.zeros(3))
    assert torch.equal(derivative, torch.zeros(3))


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "hardswish", "relu", "leaky_relu"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_positive_values_pass(dtype: torch.dtype, name: str) -> None:
    z = torch.logspace(2, 18, 200, dtype=torch.float64).to(dtype)
    value, derivative = ours(z, name)
    assert torch.equal(value, z)
    assert torch.equal(derivative, torch.ones_like(z))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bounded_activations_stay_within_their_bounds(dtype: torch.dtype) -> None:
    positive = torch.linspace(0, 300, 50_001, dtype=torch.float64).to(dtype)
    z = torch.cat([positive, -positive])
    sigmoid, tanh = ours(z, "sigmoid")[0], ours(z, "tanh")[0]
    assert bool(((sigmoid >= 0) & (sigmoid <= 1)).all())
    assert bool((tanh.abs() <= 1).all())
    assert torch.equal(tanh[: len(positive)], -tanh[len(positive) :])
