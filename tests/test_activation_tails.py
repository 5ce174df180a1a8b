"""Every activation and derivative against 50 digits, out to the largest numbers; torch's at the special ones; sums."""

from __future__ import annotations

import math
from functools import cache, lru_cache

import numpy as np
import pytest
import torch
from activation_support import errors, ours, torchs
from cpu_support import backward, faults, forward
from torch import Tensor

from fusednorm.activations import FORMULAS
from fusednorm.backends import reference
from fusednorm.bench.workloads import Workload, draw
from fusednorm.tolerance import judge

FLOAT32, FLOAT64 = torch.float32, torch.float64
#: The largest errors of a value and a derivative that the CPU's functions may have, in machine epsilons, relative in
#: all tails (activation_support.errors says where not). In the tails of gelu and gelu_tanh a rounding of z**2 / 2 or of
#: 2 u counts up to 87 times in float32 and 700 times in float64; float64's gelu splits z.
BOUNDS = {
    "silu": {FLOAT32: (2.5, 2.5), FLOAT64: (2.0, 3.0)},
    "relu": {FLOAT32: (0.0, 0.0), FLOAT64: (0.0, 0.0)},
    "gelu": {FLOAT32: (50.0, 50.0), FLOAT64: (40.0, 40.0)},
    "gelu_tanh": {FLOAT32: (130.0, 130.0), FLOAT64: (1000.0, 1000.0)},
    "sigmoid": {FLOAT32: (2.5, 2.5), FLOAT64: (2.0, 2.5)},
    "tanh": {FLOAT32: (1.5, 2.5), FLOAT64: (1.0, 2.5)},
    "hardswish": {FLOAT32: (1.5, 1.0), FLOAT64: (1.5, 1.0)},
    "leaky_relu": {FLOAT32: (0.5, 0.0), FLOAT64: (0.5, 0.0)},
}
#: Exponentials below the normal numbers are 0, which times z leaves this.
TINY = {FLOAT32: 3e-36, FLOAT64: 1e-303}
DTYPES = pytest.mark.parametrize("dtype", [FLOAT32, FLOAT64], ids=str)
NAMES = pytest.mark.parametrize("name", FORMULAS)


@cache
def grid(dtype: torch.dtype) -> Tensor:
    """Both signs: subnormal to near the largest, the tails, and where functions bend or change their form."""
    lowest, highest = (-45, 38) if dtype == FLOAT32 else (-323, 307)
    parts = [
        torch.logspace(lowest, highest, 200, dtype=FLOAT64),
        torch.linspace(0.001, 4.5, 300, dtype=FLOAT64),
        torch.linspace(4.5, 45, 300, dtype=FLOAT64),
        torch.linspace(45, 800, 80, dtype=FLOAT64),
        torch.tensor([0.6249999, 0.625, 1 - 1e-7, 1.0, 3 - 1e-6, 3.0, 3 + 1e-6, 1e5], dtype=FLOAT64),
    ]
    z = torch.cat(parts)
    return torch.cat([z, -z]).to(dtype).unique()


@NAMES
@DTYPES
def test_tails(dtype: torch.dtype, name: str) -> None:
    z = grid(dtype)
    parameter = torch.tensor(FORMULAS[name].default, dtype=dtype).item()
    found = errors(z, ours(z, name, parameter), name, parameter, TINY[dtype])
    for error, bound in zip(found, BOUNDS[name][dtype], strict=True):
        assert error.max() <= bound, f"{error.max()} at {z[error.argmax()]}"


@NAMES
def test_tails_of_the_reference(name: str) -> None:
    """The judge in float64, by torch's functions: a thousandth of a unit of float32 in every tail."""
    z, parameter = grid(FLOAT64), FORMULAS[name].default
    got = reference.VALUES[name](z, parameter), reference.DERIVATIVES[name](z, parameter).to(FLOAT64)
    for error in errors(z, got, name, parameter, TINY[FLOAT64]):
        assert error.max() <= 1000, f"{error.max()} at {z[error.argmax()]}"


@NAMES
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_tails_of_16_bit_values(dtype: torch.dtype, name: str) -> None:
    """Shorter polynomials, but relative all the same: a fifteenth of an epsilon, an eighth of the rounding to come."""
    z, parameter = grid(FLOAT32), torch.tensor(FORMULAS[name].default, dtype=FLOAT32).item()
    value, _ = errors(z, ours(z, name, parameter, dtype), name, parameter, TINY[FLOAT32])
    units = value * torch.finfo(FLOAT32).eps / torch.finfo(dtype).eps
    assert units.max() <= 1 / 15, f"{units.max()} at {z[units.argmax()]}"


@pytest.mark.parametrize(
    ("name", "parameter"),
    [("silu", beta) for beta in (0.0, -1.5, 1.702, 1e-3, 1e30)]
    + [("leaky_relu", slope) for slope in (0.0, -0.5, 2.0, 1e-30)],
)
@DTYPES
def test_parameters(dtype: torch.dtype, name: str, parameter: float) -> None:
    """In the tails of silu a rounding of beta z counts 87 or 700 times; an infinite beta z does no harm."""
    z = grid(dtype)
    if name == "leaky_relu":
        z = z[z.abs() < torch.finfo(dtype).max / 4]
    parameter = torch.tensor(parameter, dtype=dtype).item()
    tiny = TINY[dtype] / (1e-3 if parameter == torch.tensor(1e-3, dtype=dtype).item() else 1.0)
    for error in errors(z, ours(z, name, parameter), name, parameter, tiny):
        assert error.max() <= (50 if dtype == FLOAT32 else 400), f"{error.max()} at {z[error.argmax()]}"


# --- what torch gives ---

SPECIAL = (math.inf, -math.inf, 0.0, -0.0, 3.0, -3.0)
#: torch's vectorized gelu has no value at infinity, where its formula and its GPU's function have infinity.
GROWING = ("silu", "relu", "gelu", "gelu_tanh", "hardswish", "leaky_relu")


@NAMES
@DTYPES
def test_special_numbers_are_torchs(dtype: torch.dtype, name: str) -> None:
    """Infinities (silu at -inf is NaN, its derivative at both, as -inf * 0 is), signed zeros, and the kinks."""
    z = torch.tensor(SPECIAL, dtype=dtype)
    (value, derivative), (right, slope) = ours(z, name), torchs(z, name)
    if name in GROWING:
        right[0] = math.inf
    tolerance = 2000 * torch.finfo(dtype).eps  # torch's gelu at -3
    torch.testing.assert_close(value, right, rtol=tolerance, atol=0, equal_nan=True)
    torch.testing.assert_close(derivative, slope, rtol=tolerance, atol=0, equal_nan=True)
    zeros = torch.cat([torchs(zero, name)[0] for zero in z[2:4].split(1)])  # torch's AVX2 gelu of several has one zero
    assert torch.equal(value[2:4].signbit(), zeros.signbit())
    held = reference.VALUES[name](z, FORMULAS[name].default), reference.DERIVATIVES[name](z, FORMULAS[name].default)
    for ours_, references in zip((value, derivative), held, strict=True):
        assert torch.equal(ours_.isnan(), references.isnan())


@pytest.mark.parametrize("slope", [0.0, -0.5, 2.0, 0.01])
@DTYPES
def test_leaky_relu_is_torchs(dtype: torch.dtype, slope: float) -> None:
    """A slope is the derivative at 0 and at NaN; zeros keep torch's sign, and 0 * -inf is NaN."""
    z = torch.tensor([*SPECIAL, math.nan, 1.5, -1.5], dtype=dtype)
    for got, right in zip(ours(z, "leaky_relu", slope), torchs(z, "leaky_relu", slope), strict=True):
        torch.testing.assert_close(got, right, rtol=0, atol=0, equal_nan=True)
        finite = ~right.isnan()
        assert torch.equal(got[finite].signbit(), right[finite].signbit())
    derivative = reference.DERIVATIVES["leaky_relu"](z, slope).to(dtype)
    assert torch.equal(derivative, torchs(z, "leaky_relu", slope)[1])


# --- sums ---


@lru_cache(maxsize=1)  # the test's parameters come in the order of the cases
def xhat_and_factors(channels: int, terms: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Normalized numbers of a dtype, and (channels, 6, terms) that their derivatives are multiplied with.

    Those are gradients of one, of noise and of one sign, for the bias and, times xhat, for the weight.
    """
    generator = torch.Generator().manual_seed(terms)
    xhat = torch.randn(channels, terms, generator=generator).to(dtype).float()
    noise = torch.randn(channels, terms, generator=generator).to(dtype).double()
    gradients = (torch.ones_like(noise), noise, 1e-4 * noise.abs())
    return xhat, torch.stack([factor for grad in gradients for factor in (grad, grad * xhat)], 1)


@NAMES
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("channels", "terms"), [(6, 165_000), (2, 1_000_000)])
def test_sums_of_derivatives(channels: int, terms: int, dtype: torch.dtype, name: str) -> None:
    """A bias of the derivative's functions adds up over the terms of a parameter's gradient, while noise does not."""
    xhat, factors = xhat_and_factors(channels, terms, dtype)
    z = xhat * 1.5 + 0.25
    derivative = ours(z.view(-1), name, dtype=dtype)[1].view(z.shape)
    exact = reference.DERIVATIVES[name](z.double(), FORMULAS[name].default)
    plain = reference.DERIVATIVES[name](z, FORMULAS[name].default)
    error = derivative.double() - exact
    assert abs(error.mean()) <= (4e-9 if name == "hardswish" else 1.5e-9)  # a third is rounded in hardswish
    assert error.square().mean().sqrt() <= 5e-8
    parts = torch.stack([part.double() for part in (derivative, exact, plain)], 2)
    for got, right, torchs_ in (factors @ parts).permute(1, 2, 0):
        verdict = judge(got.float(), right, torchs_, terms=terms)
        assert verdict.ok, verdict.fault


@pytest.mark.parametrize("activation", ["silu", "tanh"])
@pytest.mark.parametrize("weight_dtype", [None, "float32"])
def test_gradients_over_165_000_terms(activation: str, weight_dtype: str | None) -> None:
    workload = Workload(
        "batch_norm", (10, 4, 127, 130), dtype="float16", activation=activation, weight_dtype=weight_dtype
    )
    inputs = draw(workload)
    results = forward(workload, inputs)
    results |= backward(workload, inputs, results["mean"], results["rstd"])
    assert faults(workload, inputs, results) == []
    assert np.isfinite(results["grad_weight"].double().numpy()).all()
