"""The reference against torch in float64, against finite differences, and against the traps of DESIGN's mathematics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusednorm.activations import FORMULAS, Activation
from fusednorm.backends import reference
from fusednorm.norm import FAMILIES, Family, norm_of
from fusednorm.operands import BackwardOperands, Operands

TORCH_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "hardswish": F.hardswish,
    "leaky_relu": F.leaky_relu,
}
SHAPE = (3, 4, 2, 3)
EPS = 1e-3


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def torch_norm(family: Family, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if family == "group_norm":
        return F.group_norm(x, 2, weight, bias, EPS)
    if family == "instance_norm":
        return F.instance_norm(x, weight=weight, bias=bias, eps=EPS)
    if family == "batch_norm":
        return F.batch_norm(x, None, None, weight, bias, True, eps=EPS)
    if family == "layer_norm":
        return F.layer_norm(x, x.shape[-2:], weight, bias, EPS)
    return F.rms_norm(x, x.shape[-2:], weight, EPS)


def groups(family: Family) -> int:
    """num_groups as the ops take it: two groups, or two trailing dimensions."""
    return 2 if family in ("group_norm", "layer_norm", "rms_norm") else 0


def operands(family: Family, modulated: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    trailing = family in ("layer_norm", "rms_norm")
    shape = SHAPE[-2:] if trailing else SHAPE[1:2]
    weight, bias = random(*shape, seed=1) + 1, None if family == "rms_norm" else random(*shape, seed=2)
    if not modulated:
        return random(*SHAPE), weight, bias, None, None
    return random(*SHAPE), weight, bias, random(3, 4, seed=3), random(3, 4, seed=4)


def run(family: Family, channel_dim: int, activation: Activation | None, *tensors: Tensor | None) -> tuple[Any, ...]:
    x, weight, bias, scale, shift = tensors
    norm = norm_of(family, groups(family), channel_dim, EPS, activation)
    results = reference.forward(norm, Operands(x, weight, bias, scale, shift))
    return results.output, results.mean, results.rstd, results.var


def run_backward(
    family: Family, channel_dim: int, activation: Activation | None, dy: Tensor, mean: Tensor, rstd: Tensor,
    *tensors: Tensor | None, training: bool = True,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    x, weight, bias, scale, shift = tensors
    norm = norm_of(family, groups(family), channel_dim, EPS, activation, training)
    found = reference.backward(norm, BackwardOperands(dy, x, mean, rstd, weight, bias, scale, shift))
    return found.input, found.weight, found.bias, found.scale, found.shift


@pytest.mark.parametrize("family", FAMILIES)
def test_forward_is_torchs(family: Family) -> None:
    tensors = operands(family, modulated=False)
    output, mean, rstd, var = run(family, 1, None, *tensors)
    torch.testing.assert_close(output, torch_norm(family, *tensors[:3]))
    statistics = {"group_norm": (3, 2), "instance_norm": (3, 4), "batch_norm": (4,)}.get(family, (12, 1))
    assert rstd.shape == statistics
    assert mean is None if family == "rms_norm" else mean.shape == statistics
    assert var.shape == statistics if family in ("instance_norm", "batch_norm") else var is None


@pytest.mark.parametrize("name", FORMULAS)
def test_activation_is_torchs_and_its_derivative_is_autograds(name: str) -> None:
    z = torch.linspace(-8, 8, 1001, dtype=torch.float64, requires_grad=True)
    activation = Activation(name)
    value = reference.VALUES[name](z, activation.parameter)
    torch.testing.assert_close(value, TORCH_ACTIVATIONS[name](z))
    (expected,) = torch.autograd.grad(TORCH_ACTIVATIONS[name](z).sum(), z)
    derivative = reference.DERIVATIVES[name](z.detach(), activation.parameter).double()
    torch.testing.assert_close(derivative, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", FORMULAS)
def test_nan_passes_through_every_activation(name: str) -> None:
    z = torch.tensor([float("nan"), 1.0])
    assert reference.VALUES[name](z, Activation(name).parameter).isnan().tolist() == [True, False]


def test_parameter_of_an_activation() -> None:
    z = torch.linspace(-3, 3, 101, dtype=torch.float64)
    torch.testing.assert_close(reference.VALUES["silu"](z, 1.702), z * torch.sigmoid(1.702 * z))
    torch.testing.assert_close(reference.VALUES["leaky_relu"](z, 0.3), F.leaky_relu(z, 0.3))


@pytest.mark.parametrize("modulated", [False, True])
@pytest.mark.parametrize("channel_dim", [1, -1])
@pytest.mark.parametrize("family", ["group_norm", "instance_norm", "batch_norm"])
def test_modulation_and_channel_dim(family: Family, channel_dim: int, modulated: bool) -> None:
    x, weight, bias, scale, shift = operands(family, modulated)
    expected = torch_norm(family, x, weight, bias)
    if modulated:
        assert scale is not None
        assert shift is not None
        expected = expected * (1 + scale[..., None, None]) + shift[..., None, None]
    given = x.movedim(1, -1).contiguous() if channel_dim == -1 else x
    output = run(family, channel_dim, Activation("silu"), given, weight, bias, scale, shift)[0]
    torch.testing.assert_close(output.movedim(-1, 1) if channel_dim == -1 else output, F.silu(expected))


def finite_difference(loss: Callable[[], Tensor], tensor: Tensor, step: float = 1e-5) -> Tensor:
    """The gradient of a loss by central differences, over tensor's elements in place."""
    gradient = torch.empty_like(tensor)
    flat, out = tensor.view(-1), gradient.view(-1)
    for index in range(flat.numel()):
        value = flat[index].item()
        flat[index] = value + step
        above = loss()
        flat[index] = value - step
        out[index] = (above - loss()) / (2 * step)
        flat[index] = value
    return gradient


@pytest.mark.parametrize("family", FAMILIES)
def test_backward_is_the_finite_difference(family: Family) -> None:
    tensors = operands(family, modulated=family not in ("layer_norm", "rms_norm"))
    dy, activation = random(*SHAPE, seed=5), Activation("silu")
    _, mean, rstd, _ = run(family, 1, activation, *tensors)
    gradients = run_backward(family, 1, activation, dy, mean, rstd, *tensors)
    for tensor, gradient in zip(tensors, gradients, strict=True):
        if tensor is not None:
            assert gradient is not None
            expected = finite_difference(lambda: (run(family, 1, activation, *tensors)[0] * dy).sum(), tensor)
            torch.testing.assert_close(gradient, expected, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("name", FORMULAS)
def test_backward_is_torchs_for_every_activation(name: str) -> None:
    x, weight, bias, _, _ = operands("group_norm", modulated=False)
    leaves = [tensor.requires_grad_() for tensor in (x, weight, bias) if tensor is not None]
    dy = random(*SHAPE, seed=5)
    expected = torch.autograd.grad(TORCH_ACTIVATIONS[name](torch_norm("group_norm", x, weight, bias)), leaves, dy)
    with torch.no_grad():
        _, mean, rstd, _ = run("group_norm", 1, None, x, weight, bias, None, None)
        gradients = run_backward("group_norm", 1, Activation(name), dy, mean, rstd, x, weight, bias, None, None)
    torch.testing.assert_close(gradients[:3], expected)


def test_the_formula_with_batch_summed_parameter_gradients_is_wrong() -> None:
    """The often-copied dx pulls gamma out and uses d_beta, d_gamma already summed over the samples."""
    x, weight, bias, _, _ = operands("group_norm", modulated=False)
    dy = random(*SHAPE, seed=5)
    _, mean, rstd, _ = run("group_norm", 1, None, x, weight, bias, None, None)
    right, d_gamma, d_beta, _, _ = run_backward("group_norm", 1, None, dy, mean, rstd, x, weight, bias, None, None)
    expected = finite_difference(lambda: (run("group_norm", 1, None, x, weight, bias, None, None)[0] * dy).sum(), x)
    assert right is not None
    assert d_gamma is not None
    assert d_beta is not None
    view, count = (3, 2, 2, 6), 12
    xhat = (x.view(view) - mean[:, :, None, None]) * rstd[:, :, None, None]
    sums = d_beta.view(1, 2, 2).sum(2)[..., None, None] + xhat * d_gamma.view(1, 2, 2).sum(2)[..., None, None]
    copied = weight.view(1, 2, 2, 1) * rstd[:, :, None, None] * (dy.view(view) - sums / count)
    assert (right - expected).abs().max() < 1e-7
    assert (copied.view(SHAPE) - expected).abs().max() > 0.1


def test_mean_and_rstd_are_free_inputs_of_the_backward() -> None:
    x, weight, bias, _, _ = operands("group_norm", modulated=False)
    dy, mean, rstd = random(*SHAPE, seed=5), random(3, 2, seed=6), random(3, 2, seed=7).abs() + 0.5
    leaves = [tensor.requires_grad_() for tensor in (x, weight, bias) if tensor is not None]
    xhat = (x.view(3, 2, -1) - mean[..., None]) * rstd[..., None]
    y = F.silu(xhat.view(SHAPE) * weight.view(4, 1, 1) + bias.view(4, 1, 1))  # type: ignore[union-attr]
    expected = torch.autograd.grad(y, leaves, dy)
    with torch.no_grad():
        arguments: Any = ("group_norm", 1, Activation("silu"), dy, mean, rstd, x, weight, bias, None, None)
        constants = run_backward(*arguments, training=False)
        trained = run_backward(*arguments)
    torch.testing.assert_close(constants[:3], expected)
    torch.testing.assert_close(trained[1:3], expected[1:])
    assert not torch.allclose(trained[0], expected[0])  # type: ignore[arg-type]


def test_a_mean_of_1000_standard_deviations() -> None:
    x = (random(4, 8, 64) + 1000).float()
    output = reference.forward(norm_of("group_norm", 4), Operands(x)).output
    expected = F.group_norm(x.double(), 4)
    grouped = x.view(4, 4, -1)
    mean = grouped.mean(2, keepdim=True)
    variance = grouped.square().mean(2, keepdim=True) - mean.square()
    uncentred = (grouped - mean) * (variance + 1e-5).rsqrt()
    assert (output - expected).abs().max() < 1e-3
    error = (uncentred.view_as(x) - expected).abs().nan_to_num(nan=1.0).max()
    assert error > 0.01, "the naive variance passes, so this test shows nothing"


def test_a_constant_group_has_an_rstd_of_eps_to_the_minus_one_half() -> None:
    x = torch.full((2, 4, 8), 3.0)
    results = reference.forward(norm_of("group_norm", 2, eps=1e-4), Operands(x))
    output, mean, rstd = results.output, results.mean, results.rstd
    assert output.abs().max() == 0
    torch.testing.assert_close(rstd, torch.full((2, 2), 100.0))
    torch.testing.assert_close(mean, torch.full((2, 2), 3.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_compute_dtype(dtype: torch.dtype) -> None:
    x = random(2, 4, 8).to(dtype)
    norm = norm_of("batch_norm")
    results = reference.forward(norm, Operands(x))
    found = (results.output, results.mean, results.rstd, results.var)
    assert [tensor.dtype for tensor in found if tensor is not None] == [dtype] + [torch.float32] * 3
    results = reference.forward(norm, Operands(x), compute_dtype=torch.float64)
    found = (results.output, results.mean, results.rstd, results.var)
    assert [tensor.dtype for tensor in found if tensor is not None] == [torch.float64] * 4
