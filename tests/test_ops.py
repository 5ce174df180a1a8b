"""The registered ops: opcheck, fakes with the strides of the real thing, and the kernels of `fusednorm.ops`."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusednorm
from fusednorm import ops
from fusednorm.norm import FAMILIES, Family

forward_op = torch.ops.fusednorm.norm_forward.default
backward_op = torch.ops.fusednorm.norm_backward.default

# Inputs whose memory order differs; all of shape (2, 8, 4, 6), or (2, 4, 6, 8) for channel_dim=-1.
LAYOUTS: dict[str, tuple[Callable[[], Tensor], int]] = {
    "contiguous": (lambda: torch.randn(2, 8, 4, 6), 1),
    "channels_last": (lambda: torch.randn(2, 8, 4, 6).to(memory_format=torch.channels_last), 1),
    "nhwc": (lambda: torch.randn(2, 4, 6, 8), -1),
    "nhwc of channels first": (lambda: torch.randn(2, 8, 4, 6).movedim(1, -1), -1),
    "channels sliced": (lambda: torch.randn(2, 16, 4, 6)[:, 4:12], 1),
    "channels_last sliced": (lambda: torch.randn(2, 4, 6, 16)[..., :8].movedim(-1, 1), 1),
    "nhwc sliced": (lambda: torch.randn(2, 4, 6, 16)[..., :8], -1),
    "width sliced": (lambda: torch.randn(2, 8, 4, 12)[..., ::2], 1),
    "samples last": (lambda: torch.randn(8, 4, 6, 2).movedim(-1, 0), 1),
    "transposed": (lambda: torch.randn(2, 8, 6, 4).transpose(2, 3), 1),
    "expanded samples": (lambda: torch.randn(1, 8, 4, 6).expand(2, -1, -1, -1), 1),
    "expanded channels": (lambda: torch.randn(2, 1, 4, 6).expand(-1, 8, -1, -1), 1),
}


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def groups(family: Family) -> int:
    return {"group_norm": 4, "layer_norm": 2, "rms_norm": 1}.get(family, 0)


def parameters(family: Family, modulated: bool = False) -> list[Tensor | None]:
    """weight, bias, scale and shift for an input of shape (2, 8, 4, 6)."""
    shape = {"layer_norm": (4, 6), "rms_norm": (6,)}.get(family, (8,))
    modulation = [torch.randn(2, 8) if modulated else None for _ in range(2)]
    return [torch.randn(shape), None if family == "rms_norm" else torch.randn(shape), *modulation]


def arguments(family: Family, x: Tensor, activation: str = "silu", modulated: bool = False) -> tuple[Any, ...]:
    call = (family, groups(family), 1, 1e-5, activation, 1.0 if activation else 0.0)
    return x, *parameters(family, modulated), None, None, *call


def requiring_grad(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(value.requires_grad_() if isinstance(value, Tensor) else value for value in values)


@pytest.mark.parametrize("family", FAMILIES)
def test_opcheck_forward(family: Family) -> None:
    modulated = family not in ("layer_norm", "rms_norm")
    torch.library.opcheck(forward_op, requiring_grad(arguments(family, torch.randn(2, 8, 4, 6), modulated=modulated)))


def test_opcheck_forward_of_channels_last_and_inference() -> None:
    x = torch.randn(2, 8, 4, 6).to(memory_format=torch.channels_last)
    torch.library.opcheck(forward_op, requiring_grad(arguments("instance_norm", x, activation="")))
    given = (torch.zeros(8), torch.ones(8), "batch_norm", 0, 1, 1e-5, "", 0.0)
    torch.library.opcheck(forward_op, (x, None, None, None, None, *given))


@pytest.mark.parametrize("mask", [[True] * 5, [True, False, True, False, False], [False, True, False, True, True]])
def test_opcheck_backward(mask: list[bool]) -> None:
    x, *rest = arguments("group_norm", torch.randn(2, 8, 4, 6), modulated=True)
    output, mean, rstd, _ = forward_op(x, *rest)
    call = ("group_norm", 4, 1, "silu", 1.0, True, mask)
    torch.library.opcheck(backward_op, (torch.randn_like(output), x, mean, rstd, *rest[:4], *call))


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("family", ["group_norm", "batch_norm"])
def test_output_and_gradient_strides_are_those_of_the_fakes(family: Family, name: str) -> None:
    make, channel_dim = LAYOUTS[name]
    x = make()
    call = (family, 4 if family == "group_norm" else 0, channel_dim)
    real = forward_op(x, None, None, None, None, None, None, *call, 1e-5, "relu", 0.0)
    meta = torch.empty_strided(x.shape, x.stride(), device="meta")
    fake = forward_op(meta, None, None, None, None, None, None, *call, 1e-5, "relu", 0.0)
    empty = ops.empty_output(x, *call)
    mask = [True, False, False, False, False]
    tail = (None, None, None, None, *call, "relu", 0.0, True, mask)
    real_grad = backward_op(torch.ones(x.shape), x, real[1], real[2], *tail)[0]
    fake_grad = backward_op(torch.ones(x.shape, device="meta"), meta, fake[1], fake[2], *tail)[0]
    assert [tensor.shape for tensor in real] == [tensor.shape for tensor in fake]
    for tensor in (real[0], fake[0], real_grad, fake_grad):
        assert tensor.stride() == empty.stride()
    assert sorted(zip(empty.stride(), empty.shape, strict=True))[0][0] == 1
    assert empty.untyped_storage().size() == empty.numel() * 4, "dense"


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_gives_the_values_of_the_contiguous_one(name: str) -> None:
    make, channel_dim = LAYOUTS[name]
    x, weight, bias = make(), torch.randn(8), torch.randn(8)
    first = x.movedim(-1, 1) if channel_dim == -1 else x
    dy = torch.randn(x.shape)
    expected = F.silu(F.group_norm(first.contiguous(), 4, weight, bias))
    output, mean, rstd = ops.group_norm_forward(x, 4, weight, bias, 1e-5, activation="silu", channel_dim=channel_dim)
    torch.testing.assert_close(output.movedim(-1, 1) if channel_dim == -1 else output, expected)
    got = ops.group_norm_backward(dy, x, mean, rstd, 4, weight, bias, activation="silu", channel_dim=channel_dim)
    first_dy = dy.movedim(-1, 1) if channel_dim == -1 else dy
    wanted = ops.group_norm_backward(
        first_dy.contiguous(), first.contiguous(), mean, rstd, 4, weight, bias, activation="silu"
    )
    torch.testing.assert_close(got[0].movedim(-1, 1) if channel_dim == -1 else got[0], wanted[0])
    torch.testing.assert_close(got[1:], wanted[1:], rtol=1e-5, atol=1e-5)


def test_channels_last_output_is_channels_last() -> None:
    x = torch.randn(2, 8, 4, 6).to(memory_format=torch.channels_last)
    assert fusednorm.group_norm(x, 4).is_contiguous(memory_format=torch.channels_last)
    volume = torch.randn(2, 8, 3, 4, 5).to(memory_format=torch.channels_last_3d)
    assert fusednorm.instance_norm(volume).is_contiguous(memory_format=torch.channels_last_3d)


def test_group_norm_forward_saves_what_torch_saves() -> None:
    x, weight, bias = torch.randn(2, 8, 4, 6), torch.randn(8), torch.randn(8)
    output, mean, rstd = ops.group_norm_forward(x, 4, weight, bias, 1e-5)
    expected = torch.ops.aten.native_group_norm(x, weight, bias, 2, 8, 24, 4, 1e-5)
    torch.testing.assert_close((output, mean, rstd), expected)


def split_calls() -> dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any], tuple[Any, ...]]]:
    """For each family its three backwards and their arguments."""
    x, dy, weight, bias = torch.randn(2, 8, 4, 6), torch.randn(2, 8, 4, 6), torch.randn(8), torch.randn(8)
    _, mean, rstd = ops.group_norm_forward(x, 4, weight, bias, 1e-5)
    group = (dy, x, mean, rstd, 4, weight, bias)
    _, mean, rstd = ops.instance_norm_forward(x, weight, bias, 1e-5)
    instance = (dy, x, mean, rstd, weight, bias)
    _, mean, rstd = ops.batch_norm_training(x, weight, bias, None, None, 0.1, 1e-5)
    batch = (dy, x, mean, rstd, weight, bias)
    weight, bias = torch.randn(4, 6), torch.randn(4, 6)
    _, mean, rstd = ops.layer_norm_forward(x, (4, 6), weight, bias, 1e-5)
    layer = (dy, x, mean, rstd, (4, 6), weight, bias)
    _, rstd = ops.rms_norm_forward(x, (4, 6), weight, 1e-5)
    rms = (dy, x, rstd, (4, 6), weight)
    calls = {"group_norm": group, "instance_norm": instance, "batch_norm": batch, "layer_norm": layer, "rms_norm": rms}
    return {
        family: (
            getattr(ops, f"{family}_backward"),
            getattr(ops, f"{family}_backward_data"),
            getattr(ops, f"{family}_backward_gamma_beta"),
            call,
        )
        for family, call in calls.items()
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_the_parts_of_a_backward_are_the_whole_and_torchs(family: str) -> None:
    whole, data, gamma_beta, call = split_calls()[family]
    gradients = whole(*call)
    dy, x = call[:2]
    weight, bias = (call[-1], None) if family == "rms_norm" else call[-2:]
    leaves = [tensor.detach().requires_grad_() for tensor in (x, weight, bias) if tensor is not None]
    torch_function = getattr(F, family)
    if family in ("instance_norm", "batch_norm"):
        extra = {"training": True} if family == "batch_norm" else {}
        y = torch_function(leaves[0], None, None, *leaves[1:], **extra)
    else:
        y = torch_function(leaves[0], 4 if family == "group_norm" else (4, 6), *leaves[1:], eps=1e-5)
    expected = torch.autograd.grad(y, leaves, dy)
    torch.testing.assert_close(tuple(gradients), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(data(*call), gradients[0])
    parts = gamma_beta(*call)
    torch.testing.assert_close((parts,) if family == "rms_norm" else parts, tuple(gradients[1:]))


def test_the_gradient_of_an_absent_parameter_is_none() -> None:
    x = torch.randn(2, 8, 4)
    y, mean, rstd = ops.group_norm_forward(x, 4, None, None, 1e-5)
    assert ops.group_norm_backward(y, x, mean, rstd, 4, None, None)[1:] == (None, None)
    assert ops.group_norm_backward_gamma_beta(y, x, mean, rstd, 4, None, torch.ones(8))[0] is None
    _, rstd = ops.rms_norm_forward(x, (4,), None, None)
    assert ops.rms_norm_backward(y, x, rstd, (4,), None)[1] is None


def test_unwanted_gradients_are_empty_and_wanted_ones_have_their_parameters_dtype() -> None:
    x, weight, bias = torch.randn(2, 8, 4).bfloat16(), torch.randn(8), torch.randn(8).half()
    scale, shift = torch.randn(2, 8).double(), torch.randn(2, 8)
    _, mean, rstd, _ = ops.norm_forward(x, weight, bias, scale, shift, None, None, "group_norm", 4, 1, 1e-5, "", 0.0)
    operands = (torch.ones_like(x), x, mean, rstd, weight, bias, scale, shift)
    for wanted in range(5):
        mask = [index == wanted for index in range(5)]
        gradients = ops.norm_backward(*operands, "group_norm", 4, 1, "", 0.0, True, mask)
        expected = (x, weight, bias, scale, shift)[wanted]
        assert [gradient.numel() for gradient in gradients] == [expected.numel() if flag else 0 for flag in mask]
        assert (gradients[wanted].dtype, gradients[wanted].shape) == (expected.dtype, expected.shape)


def test_batch_norm_inference_is_torchs_and_its_statistics_are_constants() -> None:
    x, weight, bias = torch.randn(2, 8, 4, requires_grad=True), torch.randn(8), torch.randn(8)
    mean, var = torch.randn(8), torch.rand(8) + 0.5
    y = ops.batch_norm_inference(x, mean, var, weight, bias, 1e-5, activation="relu")
    expected = F.relu(F.batch_norm(x, mean, var, weight, bias))
    torch.testing.assert_close(y, expected)
    dy = torch.randn_like(y)
    torch.testing.assert_close(torch.autograd.grad(y, x, dy), torch.autograd.grad(expected, x, dy))
    rstd = (var + 1e-5).rsqrt()
    got = ops.batch_norm_backward(dy, x.detach(), mean, rstd, weight, bias, activation="relu", training=False)
    torch.testing.assert_close(got[0], torch.autograd.grad(F.relu(F.batch_norm(x, mean, var, weight, bias)), x, dy)[0])


@pytest.mark.parametrize("instance", [contextlib.nullcontext(), fusednorm.use_instance("reference")])
def test_the_statistics_of_inference_do_not_share_memory_with_the_buffers(instance: Any) -> None:
    x, mean, var = torch.randn(2, 8, 4), torch.zeros(8), torch.ones(8)
    with instance:
        _, saved, _, _ = forward_op(x, None, None, None, None, mean, var, "batch_norm", 0, 1, 1e-5, "", 0.0)
    assert saved.data_ptr() != mean.data_ptr()
    assert torch.equal(saved, mean)


def test_batch_norm_training_updates_the_running_statistics() -> None:
    x = torch.randn(4, 8, 5)
    ours, theirs = (torch.zeros(8), torch.ones(8)), (torch.zeros(8), torch.ones(8))
    y, mean, rstd = ops.batch_norm_training(x, None, None, *ours, 0.3, 1e-5)
    torch.testing.assert_close(y, F.batch_norm(x, *theirs, training=True, momentum=0.3))
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(mean, x.mean((0, 2)))
    torch.testing.assert_close(rstd, (x.var((0, 2), unbiased=False) + 1e-5).rsqrt())


CONTRACT = {
    "group_norm_forward": "input num_groups weight bias eps * activation channel_dim",
    "group_norm_backward": "grad_output input mean rstd num_groups weight bias * activation channel_dim",
    "group_norm_backward_data": "grad_output input mean rstd num_groups weight bias * activation channel_dim",
    "group_norm_backward_gamma_beta": "grad_output input mean rstd num_groups weight bias * activation channel_dim",
    "instance_norm_forward": "input weight bias eps * activation channel_dim",
    "layer_norm_backward": "grad_output input mean rstd normalized_shape weight bias * activation",
    "rms_norm_forward": "input normalized_shape weight eps * activation",
    "rms_norm_backward": "grad_output input rstd normalized_shape weight * activation",
    "batch_norm_inference": "input running_mean running_var weight bias eps * activation channel_dim",
    "batch_norm_training": "input weight bias running_mean running_var momentum eps * activation channel_dim",
    "batch_norm_backward": "grad_output input mean rstd weight bias * activation channel_dim",
}


@pytest.mark.parametrize("name", CONTRACT)
def test_signature(name: str) -> None:
    positional, keyword = (part.split() for part in CONTRACT[name].split("*"))
    found = inspect.signature(getattr(ops, name)).parameters.values()
    assert [each.name for each in found if each.kind is each.POSITIONAL_OR_KEYWORD] == positional
    assert [each.name for each in found if each.kind is each.KEYWORD_ONLY][: len(keyword)] == keyword


def test_the_op_and_the_direct_call_give_the_same_bits() -> None:
    x = torch.randn(2, 8, 4, 6, requires_grad=True)
    call = arguments("group_norm", x, modulated=True)
    direct, through_op = ops.norm_forward(*call), forward_op(*call)
    for ours, theirs in zip(direct, through_op, strict=True):
        if ours is None:  # what the family does not have; an op can only return an empty tensor
            assert theirs.numel() == 0
        else:
            assert torch.equal(ours, theirs)
            assert ours.requires_grad == theirs.requires_grad
    dy = torch.randn_like(x)
    assert torch.equal(*(torch.autograd.grad(each[0], x, dy)[0] for each in (direct, through_op)))
