"""The calls of DTensors that test_dtensor.py makes in processes (dtensor_worker.py) and judges in one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fusednorm

EPS = 1e-5
MOMENTUM = 0.3
AFFINE = ("weight", "bias")
ALL = ("weight", "bias", "scale", "shift")


@dataclass(frozen=True)
class Case:
    """One call. A placement is a dimension that is sharded, None for Replicate, or "partial"; ``placed`` has those of
    parameters that do not lie as the call needs them, which is Replicate where it says nothing."""

    mesh: tuple[int, ...]
    placements: tuple[int | str | None, ...]
    family: str
    shape: tuple[int, ...]
    groups_or_dims: int = 0
    operands: tuple[str, ...] = AFFINE
    activation: str | None = None
    channel_dim: int = 1
    channels_last: bool = False
    dtype: torch.dtype = torch.float32
    running: bool = False
    training: bool = True
    placed: tuple[tuple[str, int], ...] = ()
    expected: tuple[int | None, ...] | None = None  # the output's placements; None for the input's

    def axes(self, name: str) -> list[int]:
        """The dimensions of the input that an operand has."""
        rank = len(self.shape)
        if self.family in ("layer_norm", "rms_norm") and self.groups_or_dims:
            return list(range(rank - self.groups_or_dims, rank))
        channel = self.channel_dim % rank
        return [0, channel] if name in ("scale", "shift") else [channel]


_IMAGE = (2, 12, 7, 5)
_ROWS = (4, 5, 12)
CASES: dict[str, Case] = {
    "group, samples": Case((3,), (0,), "group_norm", (4, 6, 3, 4), 3, ALL, "relu"),
    "group, rows": Case((3,), (2,), "group_norm", _IMAGE, 4, ALL, "silu"),
    "group, rows, no parameters": Case((3,), (2,), "group_norm", _IMAGE, 4, ()),
    "group, rows, NHWC": Case((3,), (2,), "group_norm", _IMAGE, 4, channels_last=True),
    "group, cut": Case((3,), (1,), "group_norm", _IMAGE, 4, ALL, placed=(("weight", 0), ("scale", 1))),
    "group, whole": Case((3,), (1,), "group_norm", _IMAGE, 6, ALL, placed=(("bias", 0),)),
    "group, last": Case((3,), (-1,), "group_norm", (2, 4, 5, 12), 4, ALL, "gelu", channel_dim=-1),
    "group, partial": Case((3,), ("partial",), "group_norm", _IMAGE, 4, expected=(None,)),
    "group, weight in parts": Case((3,), (2,), "group_norm", _IMAGE, 4, placed=(("weight", 0),)),
    "group, one for each": Case((3,), (None,), "group_norm", _IMAGE, 4),
    "group, bfloat16": Case((3,), (3,), "group_norm", _IMAGE, 4, activation="silu", dtype=torch.bfloat16),
    "instance, columns": Case((3,), (3,), "instance_norm", _IMAGE, running=True),
    "instance, samples": Case((3,), (0,), "instance_norm", (4, 3, 5), running=True),
    "batch, samples": Case((3,), (0,), "batch_norm", (4, 6, 3), activation="relu", running=True),
    "batch, channels": Case((3,), (1,), "batch_norm", (4, 7, 3), operands=ALL, running=True),
    "batch, given": Case((3,), (0,), "batch_norm", (4, 6, 3), running=True, training=False),
    "layer, width": Case((3,), (2,), "layer_norm", _ROWS, 1, activation="gelu"),
    "layer, tokens": Case((3,), (1,), "layer_norm", _ROWS, 1),
    "layer, two": Case((3,), (1,), "layer_norm", _ROWS, 2, placed=(("weight", 0), ("bias", 1))),
    "layer, channels": Case((3,), (1,), "layer_norm", _IMAGE, 0, ALL, "silu"),
    "layer, channels last": Case((3,), (-1,), "layer_norm", _ROWS, 0, ALL, channel_dim=-1),
    "rms, width": Case((3,), (-1,), "rms_norm", _ROWS, 1, ("weight",)),
    "rms, rows of channels": Case((3,), (2,), "rms_norm", _IMAGE, 0, ("weight",)),
    "mesh: samples and rows": Case((2, 2), (0, 2), "group_norm", (3, 6, 5, 4), 3, ALL, "silu"),
    "mesh: rows and columns": Case((2, 2), (2, 3), "group_norm", _IMAGE, 4),
    "mesh: rows twice": Case((2, 2), (2, 2), "group_norm", _IMAGE, 4),
    "mesh: channels and rows": Case((2, 2), (1, 2), "group_norm", (2, 9, 5, 3), 3, ALL),
    "mesh: channels twice": Case((2, 2), (1, 1), "group_norm", (2, 9, 5, 3), 3),
    "mesh: nothing and channels": Case((2, 2), (None, 1), "group_norm", _IMAGE, 2, placed=(("weight", 0),)),
    "mesh: batch": Case((2, 2), (0, 2), "batch_norm", (3, 4, 5), running=True),
    "mesh: layer": Case((2, 2), (0, 1), "layer_norm", _ROWS, 1),
    "mesh: rms": Case((2, 2), (0, 2), "rms_norm", _ROWS, 2, ("weight",), "silu"),
}


def drawn(case: Case) -> dict[str, Tensor]:
    """The whole's tensors, the same on every rank. Mean and scale change along every dimension of the input."""
    generator = torch.Generator().manual_seed(len(case.shape) + sum(case.shape))

    def normal(shape: Any) -> Tensor:
        return torch.randn(shape, generator=generator)

    ramps = torch.meshgrid([torch.linspace(0, 1, size) for size in case.shape], indexing="ij")
    ramp = torch.stack([(place + 1) * each for place, each in enumerate(ramps)]).sum(0)
    found = {"input": (normal(case.shape) * (1 + ramp) + 3 * ramp).to(case.dtype)}
    found["grad"] = normal(case.shape).to(case.dtype)
    if case.channels_last:
        found = {name: value.contiguous(memory_format=torch.channels_last) for name, value in found.items()}
    for name in case.operands:
        found[name] = normal([case.shape[axis] for axis in case.axes(name)]) * 0.3 + (name == "weight")
    if case.running:
        channels = case.shape[case.channel_dim]
        found["running_mean"], found["running_var"] = normal(channels), normal(channels).square() + 0.5
    return found


def call(case: Case, tensors: dict[str, Tensor]) -> Tensor:
    """The public function of the case."""
    keywords: dict[str, Any] = {name: tensors[name] for name in case.operands}
    keywords |= {"eps": EPS, "activation": case.activation, "channel_dim": case.channel_dim}
    input = tensors["input"]
    if case.family in ("layer_norm", "rms_norm"):
        dims = case.groups_or_dims
        shape = case.shape[-dims:] if dims else (case.shape[case.channel_dim],)
        keywords["channel_dim"] = -1 if dims else case.channel_dim
        function: Any = getattr(fusednorm, case.family)
        return function(input, shape, **keywords)  # type: ignore[no-any-return]
    if case.family == "group_norm":
        return fusednorm.group_norm(input, case.groups_or_dims, **keywords)  # type: ignore[no-any-return]
    statistics = [tensors.get(name) for name in ("running_mean", "running_var")]
    if case.family == "batch_norm":
        return fusednorm.batch_norm(input, *statistics, training=case.training, momentum=MOMENTUM, **keywords)  # type: ignore[no-any-return]
    return fusednorm.instance_norm(input, *statistics, momentum=MOMENTUM, **keywords)  # type: ignore[no-any-return]


def results(case: Case, tensors: dict[str, Tensor], run: Callable[..., Tensor] = call) -> dict[str, Tensor]:
    """The output, the gradients and the running statistics of one call; the tensors may be DTensors."""
    leaves = ("input", *case.operands)
    for name in leaves:
        tensors[name].requires_grad_()
    output = run(case, tensors)
    gradients = torch.autograd.grad(output, [tensors[name] for name in leaves], tensors["grad"])
    found = {"output": output.detach(), **dict(zip(leaves, gradients, strict=True))}
    return found | {name: tensors[name] for name in ("running_mean", "running_var") if case.running}
