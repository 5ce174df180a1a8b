"""Gradients that are exact, on every pair of instances: masks at large means, given statistics, one element."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import fusednorm
from fusednorm import ops
from fusednorm.choice import all_instances, use_instance
from fusednorm.norm import Family

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
#: On the CPU z is formed alike for all dtypes, and each kernel that an activation enters takes a second to compile.
DTYPES = {"cpu": [torch.float32], "cuda": [torch.float32, torch.bfloat16]}
LAYOUTS = [torch.contiguous_format, torch.channels_last]


def names(device: str) -> list[str | None]:
    return [None, *(one.name for one in all_instances() if one.name.startswith("cpu" if device == "cpu" else "triton"))]


def forced(name: str | None) -> Any:
    return nullcontext() if name is None else use_instance(name)


def forward(family: Family, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if family == "batch_norm":
        return ops.batch_norm_training(x, weight, bias, None, None, 0.1, 1e-5, activation="relu")
    if family == "instance_norm":
        return ops.instance_norm_forward(x, weight, bias, 1e-5, activation="relu")
    if family == "layer_norm":
        return ops.layer_norm_forward(x, x.shape[-1:], weight, bias, 1e-5, activation="relu")
    return ops.group_norm_forward(x, 4, weight, bias, 1e-5, activation="relu")


def backward(
    family: Family, dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    if family == "batch_norm":
        return ops.batch_norm_backward(dy, x, mean, rstd, weight, bias, activation="relu")
    if family == "instance_norm":
        return ops.instance_norm_backward(dy, x, mean, rstd, weight, bias, activation="relu")
    if family == "layer_norm":
        return ops.layer_norm_backward(dy, x, mean, rstd, x.shape[-1:], weight, bias, activation="relu")
    return ops.group_norm_backward(dy, x, mean, rstd, 4, weight, bias, activation="relu")


def able(names: list[str | None], call: Any, *arguments: Any) -> Iterator[tuple[str | None, Any]]:
    """What each instance returns that can run the call."""
    for name in names:
        with forced(name):
            try:
                result = call(*arguments)
            except RuntimeError as error:
                assert "cannot run this problem" in str(error)  # noqa: PT017 (any other error is a defect)
                continue
        yield name, result


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("family", "shape", "layout"),
    [
        ("batch_norm", (8, 4, 64, 64), LAYOUTS[0]),
        ("batch_norm", (8, 4, 64, 64), LAYOUTS[1]),
        ("batch_norm", (33, 7), LAYOUTS[0]),
        ("group_norm", (3, 32, 19, 17), LAYOUTS[0]),
        ("group_norm", (3, 32, 19, 17), LAYOUTS[1]),
        ("group_norm", (9, 32), LAYOUTS[0]),
        ("group_norm", (2, 32, 2, 2), LAYOUTS[0]),
        ("instance_norm", (2, 5, 90, 91), LAYOUTS[0]),
        ("instance_norm", (2, 5, 9, 9), LAYOUTS[1]),
        ("layer_norm", (40, 300), LAYOUTS[0]),
        ("layer_norm", (3, 20000), LAYOUTS[0]),
    ],
)
def test_the_backward_has_the_forwards_mask(
    family: Family, shape: tuple[int, ...], layout: torch.memory_format, device: str
) -> None:
    """A derivative is taken where the output was, at a mean of 1e4 standard deviations and on any two instances.

    On a GPU several times: threads that differ in the last bit of a statistic differ in few values of z.
    """
    for dtype in DTYPES[device] * (1 if device == "cpu" else 4):
        spread, mean = (1.0, 1e4) if dtype == torch.float32 else (3.0, 100.0)
        x = (torch.randn(shape, device=device) * spread + mean).to(dtype)
        if len(shape) == 4:
            x = x.contiguous(memory_format=layout)
        axis = 1 if family != "layer_norm" else len(shape) - 1
        weight, bias = torch.randn(2, shape[axis], device=device)
        for one, (output, saved_mean, rstd) in able(names(device), forward, family, x, weight, bias):
            expected = (output > 0).movedim(axis, 0).flatten(1).sum(1).float()
            arguments = (family, torch.ones_like(output), x, saved_mean, rstd, weight, bias)
            for other, gradients in able(names(device), backward, *arguments):
                assert torch.equal(gradients[2], expected), (dtype, one, other)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("activation", [None, "relu", "silu"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("shape", [(3, 8, 6, 5), (1, 3, 130, 129)])
def test_with_given_statistics_dx_does_not_depend_on_x(
    shape: tuple[int, ...], layout: torch.memory_format, activation: str | None, device: str
) -> None:
    """dx = rstd A dz: finite where x is not, as torch's is."""
    x = torch.randn(shape, device=device).contiguous(memory_format=layout)
    channels = shape[1]
    x[0, 0, 1, 1], x[-1, 1, 2, 2], x[0, 2, 3, 3] = torch.inf, -torch.inf, torch.nan
    mean, var, weight, bias = torch.rand(4, channels, device=device) + 0.5
    dy = torch.randn(shape, device=device).contiguous(memory_format=layout)

    def gradient(normalize: Any) -> Tensor:
        leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
        (result,) = torch.autograd.grad(normalize(leaf), leaf, dy)
        return result

    def plain(leaf: Tensor) -> Tensor:
        z = (leaf - mean[:, None, None]) * ((var + 1e-5).rsqrt() * weight)[:, None, None] + bias[:, None, None]
        return z if activation is None else getattr(torch.nn.functional, activation)(z)

    def ours(leaf: Tensor) -> Tensor:
        return fusednorm.batch_norm(leaf, mean, var, weight, bias, activation=activation)

    def instances(leaf: Tensor) -> Tensor:
        return fusednorm.instance_norm(leaf, mean, var, weight, bias, use_input_stats=False, activation=activation)

    expected = gradient(plain)
    if activation != "silu":  # whose derivative at an infinite z is for the activations' tests to say
        assert bool(expected.isfinite().all())
    regular = x.isfinite()
    for call in (ours, instances):
        for name, got in able(names(device), gradient, call):
            where = regular if activation == "silu" else torch.ones_like(regular)
            torch.testing.assert_close(got[where], expected[where], rtol=1e-5, atol=1e-5, msg=str(name))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("eps", [1e-5, 1e-12])
def test_one_element_under_a_statistic(eps: float, dtype: torch.dtype, device: str) -> None:
    """The output is the bias whatever the input is, so dx is 0, not what two roundings leave of it."""
    x = torch.randn(7, 24, dtype=dtype, device=device, requires_grad=True)
    weight, bias = torch.randn(2, 24, device=device)
    scale = torch.randn(7, 24, device=device)
    rows = x.unsqueeze(-1)
    one = torch.randn(1, device=device)
    for name, y in (
        ("group_norm", fusednorm.group_norm(x, 24, weight, bias, eps, activation="tanh")),
        ("modulated", fusednorm.group_norm(x, 24, weight, bias, eps, scale=scale)),
        ("layer_norm", fusednorm.layer_norm(rows, (1,), one, one, eps)),
        ("ones", fusednorm.layer_norm(rows.expand(7, 24, 1)[..., :1], [1], None, None, eps, activation="silu")),
    ):
        (dx,) = torch.autograd.grad(y, x, torch.randn_like(y))
        assert int(torch.count_nonzero(dx)) == 0, name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(("size", "shape"), [(1e-18, (1, 8, 70, 65)), (1e-20, (3, 8, 6, 5)), (1e18, (3, 8, 6, 5))])
def test_inputs_whose_square_deviation_is_near_the_end_of_float32(
    size: float, shape: tuple[int, ...], layout: torch.memory_format, device: str
) -> None:
    """rstd**2 would be subnormal or infinite; each instance keeps dx's relative accuracy."""
    if device == "cuda" and size == 1e-20:
        pytest.skip("the variance itself is subnormal in float32, in which a GPU sums it")
    x = (torch.randn(shape, device=device) * size).contiguous(memory_format=layout)
    weight, bias = torch.randn(2, 8, device=device)
    dy = torch.randn(shape, device=device)
    exact = x.double().requires_grad_()
    groups = exact.reshape(shape[0], 4, -1)
    xhat = (groups - groups.mean(2, keepdim=True)) / groups.var(2, correction=0, keepdim=True).sqrt()
    z = xhat.reshape(shape) * weight.double()[:, None, None] + bias.double()[:, None, None]
    (expected,) = torch.autograd.grad(z, exact, dy.double())

    def gradient() -> Tensor:
        leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
        (result,) = torch.autograd.grad(fusednorm.group_norm(leaf, 4, weight, bias, 0.0), leaf, dy)
        return result

    for name, got in able(names(device), gradient):
        error = (got.double() - expected).norm() / expected.norm()
        assert float(error) < 2e-6, name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [2, 64, 5000])
def test_an_infinite_element_of_rms_norm_leaves_the_others_finite(size: int, device: str) -> None:
    """The mean square is infinite and rstd 0: 0 for finite elements, NaN for the infinite one, as the formula says."""
    x = torch.ones(3, size, device=device)
    x[1, 1] = -torch.inf
    for name, (output, rstd) in able(names(device), ops.rms_norm_forward, x, (size,), None, 1e-5):
        assert rstd[1] == 0, name
        assert bool(output[1, 1].isnan()), name
        assert int(output.isnan().sum()) == 1, name
        assert int(torch.count_nonzero(output[1])) == 1, name
