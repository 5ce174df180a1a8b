"""What a call saves for its backward: the same tensors however it runs, and all of them through the hooks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import fusednorm
from fusednorm import nn, ops


class Listener(TorchDispatchMode):
    """Sees every operator and changes none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


MODES: dict[str, Callable[[], Any]] = {
    "nothing": contextlib.nullcontext,
    "flops": lambda: FlopCounterMode(display=False),
    "profiler": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True),
    "dispatch mode": Listener,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "device mode": lambda: torch.device("cpu"),
    "reference": lambda: fusednorm.use_instance("reference"),
}

torch.manual_seed(0)
X, MEAN, VAR = torch.randn(2, 8, 3, 4), torch.randn(8), torch.rand(8) + 0.5
PER_CHANNEL, MODULATION, ROW = [torch.randn(8), torch.randn(8)], [torch.randn(2, 8), torch.randn(2, 8)], torch.randn(4)


def total(results: tuple[Tensor, ...]) -> Tensor:
    return torch.stack([result.sum() for result in results]).sum()


# A call as a function of the input and parameters, and the parameters.
CALLS: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
    "group_norm": (lambda x, w, b: fusednorm.group_norm(x, 4, w, b, activation="silu"), PER_CHANNEL),
    "group_norm bare": (lambda x: fusednorm.group_norm(x, 4), []),
    "group_norm modulated": (lambda x, s, t: fusednorm.group_norm(x, 4, scale=s, shift=t), MODULATION),
    "group_norm between sums": (
        lambda x, w, b: fusednorm.group_norm(x, 4, w, b, activation="silu", pre_add=X, post_add=X), PER_CHANNEL),
    "instance_norm": (lambda x, w, b: fusednorm.instance_norm(x, weight=w, bias=b), PER_CHANNEL),
    "instance_norm given": (lambda x: fusednorm.instance_norm(x, MEAN, VAR, use_input_stats=False), []),
    "layer_norm": (lambda x, w: fusednorm.layer_norm(x, (4,), w), [ROW]),
    "layer_norm bare": (lambda x: fusednorm.layer_norm(x, (3, 4)), []),
    "rms_norm": (lambda x, w: fusednorm.rms_norm(x, (4,), w), [ROW]),
    "rms_norm bare": (lambda x: fusednorm.rms_norm(x, (4,)), []),
    "batch_norm": (lambda x, w, b: fusednorm.batch_norm(x, None, None, w, b, True), PER_CHANNEL),
    "batch_norm given": (lambda x, w, b: fusednorm.batch_norm(x, MEAN, VAR, w, b, activation="relu"), PER_CHANNEL),
    "module": (lambda x: nn.BatchNorm2d(8, activation="gelu")(x), []),
    "group_norm_forward": (lambda x, w, b: total(ops.group_norm_forward(x, 4, w, b, 1e-5)), PER_CHANNEL),
    "rms_norm_forward": (lambda x, w: total(ops.rms_norm_forward(x, (4,), w, 1e-5)), [ROW]),
    "batch_norm_training": (
        lambda x, w, b: total(ops.batch_norm_training(x, w, b, None, None, 0.1, 1e-5)), PER_CHANNEL),
    "batch_norm_inference": (lambda x, w, b: ops.batch_norm_inference(x, MEAN, VAR, w, b, 1e-5), PER_CHANNEL),
}  # fmt: skip


def leaves(name: str) -> list[Tensor]:
    return [tensor.clone().requires_grad_() for tensor in (X, *CALLS[name][1])]


def between(name: str) -> Callable[..., Tensor]:
    """The call between two others, so that its output is saved as well."""
    call = CALLS[name][0]
    return lambda x, *parameters: call(x.sin(), *parameters).sin()


@pytest.mark.parametrize("mode", [name for name in MODES if name != "nothing"])
@pytest.mark.parametrize("name", CALLS)
def test_a_mode_in_one_pass_of_a_checkpoint(name: str, mode: str) -> None:
    for first, second in ((mode, "nothing"), ("nothing", mode)):
        tensors = leaves(name)
        with MODES[first]():
            y = checkpoint(between(name), *tensors, use_reentrant=False)
        with MODES[second]():
            got = torch.autograd.grad(y.sum(), tensors)
        expected = torch.autograd.grad(between(name)(*tensors).sum(), tensors)
        tolerance = 0.1 if mode == "autocast" else 1e-4
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("saves", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_selective_checkpointing(name: str, saves: bool) -> None:
    def policy(context: Any, op: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if saves and "fusednorm" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE

    tensors = leaves(name)
    contexts = lambda: create_selective_checkpoint_contexts(policy)  # noqa: E731
    y = checkpoint(between(name), *tensors, use_reentrant=False, context_fn=contexts)
    got = torch.autograd.grad(y.sum(), tensors)
    torch.testing.assert_close(got, torch.autograd.grad(between(name)(*tensors).sum(), tensors))


@pytest.mark.parametrize("name", CALLS)
def test_every_way_saves_the_same(name: str) -> None:
    found = {}
    for mode in ("nothing", "dispatch mode", "profiler", "reference"):
        packed: list[Tensor] = []

        def pack(tensor: Tensor, packed: list[Tensor] = packed) -> Tensor:
            packed.append(tensor)
            return tensor

        with MODES[mode](), saved_tensors_hooks(pack, lambda tensor: tensor):
            output = CALLS[name][0](*leaves(name))
        assert output.requires_grad
        found[mode] = [(tensor.shape, tensor.dtype, tensor.device) for tensor in packed]
    assert all(each == found["nothing"] for each in found.values()), found


@pytest.mark.parametrize("name", CALLS)
def test_all_that_is_kept_passes_through_the_hooks(name: str) -> None:
    """With everything packed away, the graph holds no tensor of its own but the parameters and the given statistics."""
    tensors = leaves(name)
    expected = torch.autograd.grad(between(name)(*tensors).sum(), tensors)
    with save_on_cpu():
        output = between(name)(*tensors)
    torch.testing.assert_close(torch.autograd.grad(output.sum(), tensors), expected)
    with saved_tensors_hooks(lambda tensor: None, lambda _: pytest.fail("unpacked")):
        output = CALLS[name][0](*tensors)
    seen, nodes = set(), [output.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]
        kept = list(vars(node).values()) if hasattr(node, "__dict__") else []
        flat = [each for value in kept for each in (value if isinstance(value, (tuple, list)) else (value,))]
        assert not any(isinstance(each, Tensor) for each in flat), flat
    assert any("Normalization" in type(node).__name__ for node in seen)


@pytest.mark.parametrize("name", CALLS)
def test_other_tensors_than_were_saved_are_refused(name: str) -> None:
    """A kernel would read and write past them."""

    def gradients(unpack: Callable[[Tensor], Tensor]) -> None:
        tensors = leaves(name)
        with saved_tensors_hooks(lambda tensor: tensor, unpack):
            output = CALLS[name][0](*tensors)
        torch.autograd.grad(output.sum(), tensors)

    with pytest.raises(TypeError, match=r"backward of \w+ under saved_tensors_hooks: grad_output has dtype"):
        gradients(lambda tensor: tensor.half())
    with pytest.raises(ValueError, match=r"backward of \w+ under saved_tensors_hooks: \w+ has shape .*; expected"):
        gradients(lambda tensor: tensor[:1])


@pytest.mark.parametrize("followed", [True, False])
def test_how_often_a_checkpoint_moves_running_statistics(followed: bool) -> None:
    """The second pass moves them again, as torch's does. It ends where all that the backward needs has come back, and
    so before them where the norm is last; torch's norm moves them itself, before it gives anything back."""
    steps, found = 3, []
    for library in (torch.nn, nn):
        norm = library.BatchNorm2d(8)
        block = torch.nn.Sequential(torch.nn.Tanh(), norm, *([torch.nn.Tanh()] if followed else []))
        for _ in range(steps):  # calls that repeat run differently
            checkpoint(block, X.clone().requires_grad_(), use_reentrant=False).sum().backward()
        found.append(norm.state_dict())
    theirs, ours = found
    assert theirs["num_batches_tracked"] == 2 * steps
    if followed:
        torch.testing.assert_close(ours, theirs)
    else:
        alone = nn.BatchNorm2d(8)
        for _ in range(steps):
            alone(X.tanh())
        torch.testing.assert_close(ours, alone.state_dict())
