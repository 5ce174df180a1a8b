"""What the suite of devices runs: workloads, and how each contender computes one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module, Parameter

import fusednorm
from fusednorm.bench.devices.rows import DeviceDirection, Scaling

OURS, DTENSOR, TORCH, APEX = "fusednorm", "fusednorm DTensor", "torch", "apex"
#: What bounds a contender: the norm of a device's own part, whose statistics are not those of the whole, and the
#: exchange with no norm around it.
ALONE, EXCHANGE = "no exchange", "exchange alone"
CONTENDERS = (OURS, DTENSOR, TORCH, APEX, ALONE, EXCHANGE)
#: These are not the norm of the whole, and are not judged.
LIMITS = (ALONE, EXCHANGE)
GPUS_ALONE = (TORCH, APEX)


def _same(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class Prepared:
    """A contender's call of a device's part. ``placed`` makes of such a part what the call takes and returns, and
    ``part`` is the inverse."""

    call: Callable[[Tensor], Tensor]
    parameters: tuple[Tensor, ...]
    placed: Callable[[Tensor], Tensor] = _same
    part: Callable[[Tensor], Tensor] = _same


@dataclass(frozen=True)
class Spread:
    """A norm and an activation of an input that is spread along ``axis``.

    ``shapes`` are by device type: one device's where the scaling is weak, else the whole's. ``reference`` is the whole
    in torch's operators, of input, weight and bias. ``exchanged`` is how many float64 values a device sends forward and
    backward, by the shape of its part.
    """

    name: str
    scaling: Scaling
    axis: int
    shapes: Mapping[str, tuple[int, ...]]
    small: tuple[int, ...]
    reference: Callable[[Tensor, Tensor, Tensor], Tensor]
    contenders: Mapping[str, Callable[[int, str], Prepared]] = field(hash=False)
    exchanged: Callable[[tuple[int, ...]], tuple[int, int]]

    def part(self, device: str, devices: int) -> tuple[int, ...]:
        """The shape of one device's part; ValueError where the devices do not divide the whole."""
        shape = list(self.shapes[device])
        if self.scaling == "strong":
            if shape[self.axis] % devices:
                raise ValueError(
                    f"{self.name}: {devices} devices do not divide the {shape[self.axis]} of {tuple(shape)}"
                )
            shape[self.axis] //= devices
        return tuple(shape)


@dataclass(frozen=True)
class DeviceJob:
    """A workload, by its place in :data:`SPREADS`, in a dtype, a layout and a direction: plain data for a process."""

    place: int
    dtype: str
    layout: str
    direction: DeviceDirection

    @property
    def spread(self) -> Spread:
        return SPREADS[self.place]


def _of_module(module: Module, device: str) -> Prepared:
    module = module.to(device)
    return Prepared(module, tuple(module.parameters()))


def _sync(channels: int, device: str) -> Prepared:
    return _of_module(fusednorm.nn.SyncBatchNorm(channels, activation="relu"), device)


def _torch_sync(channels: int, device: str) -> Prepared:
    return _of_module(torch.nn.Sequential(torch.nn.SyncBatchNorm(channels), torch.nn.ReLU()), device)


def _apex_sync(channels: int, device: str) -> Prepared:
    apex = import_module("apex.parallel")
    return _of_module(torch.nn.Sequential(apex.SyncBatchNorm(channels), torch.nn.ReLU()), device)


def _batch_alone(channels: int, device: str) -> Prepared:
    return _of_module(fusednorm.nn.BatchNorm2d(channels, activation="relu"), device)


_GROUPS = 32


def _group(norm: Callable[..., Any], **keywords: Any) -> Callable[[int, str], Prepared]:
    def prepare(channels: int, device: str) -> Prepared:
        weight, bias = (Parameter(fill(channels, device=device)) for fill in (torch.ones, torch.zeros))
        call: Callable[[Tensor], Tensor] = lambda x: norm(x, _GROUPS, weight, bias, activation="silu", **keywords)  # noqa: E731
        return Prepared(call, (weight, bias))

    return prepare


def _group_of_dtensors(channels: int, device: str) -> Prepared:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))

    def placed(part: Tensor) -> Tensor:
        found: Tensor = DTensor.from_local(part, mesh, [Shard(2)], run_check=False)
        return found

    weight, bias = (
        Parameter(DTensor.from_local(fill(channels, device=device), mesh, [Replicate()], run_check=False))
        for fill in (torch.ones, torch.zeros)
    )
    call: Callable[[Tensor], Any] = lambda x: fusednorm.group_norm(x, _GROUPS, weight, bias, activation="silu")  # noqa: E731
    return Prepared(call, (weight, bias), placed, lambda tensor: tensor.to_local())  # type: ignore[attr-defined]


def _rows(norm: Callable[..., Any], spread: bool) -> Callable[[int, str], Prepared]:
    """layer_norm of rows of which a device has so many elements; those alone where they are not spread."""

    def prepare(elements: int, device: str) -> Prepared:
        weight, bias = (Parameter(fill(elements, device=device)) for fill in (torch.ones, torch.zeros))
        size = elements * (torch.distributed.get_world_size() if spread and torch.distributed.is_initialized() else 1)
        keywords = {"shard_dim": 1} if spread else {}
        return Prepared(lambda x: norm(x, (size,), weight, bias, **keywords), (weight, bias))

    return prepare


_BATCH = {OURS: _sync, TORCH: _torch_sync, APEX: _apex_sync, ALONE: _batch_alone}
_IMAGE = {
    OURS: _group(fusednorm.distributed.group_norm, shard_dim=2),
    DTENSOR: _group_of_dtensors,
    ALONE: _group(fusednorm.group_norm),
}
_ROWS = {OURS: _rows(fusednorm.distributed.layer_norm, True), ALONE: _rows(fusednorm.layer_norm, False)}


def _batch_reference(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.relu(F.batch_norm(x, None, None, weight, bias, training=True))


def _group_reference(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.silu(F.group_norm(x, _GROUPS, weight, bias))


def _rows_reference(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[1:], weight, bias)


def _image(scaling: Scaling, rows: int, rows_of_cpu: int) -> Spread:
    return Spread(
        "group_norm+silu, an image by its rows", scaling, 2,
        {"cuda": (1, 128, rows, 2048), "cpu": (1, 32, rows_of_cpu, 256)}, (2, 64, 3, 5), _group_reference, _IMAGE,
        lambda shape: (3 * shape[0] * _GROUPS, 2 * shape[0] * shape[1]),
    )  # fmt: skip


SPREADS = (
    Spread(
        "SyncBatchNorm+relu", "weak", 0, {"cuda": (32, 256, 56, 56), "cpu": (8, 64, 28, 28)}, (3, 8, 5, 4),
        _batch_reference, _BATCH, lambda shape: (2 * shape[1] + 1, 2 * shape[1]),
    ),
    _image("strong", 2048, 256),
    _image("weak", 1024, 128),
    Spread(
        "layer_norm, rows by their elements", "strong", 1, {"cuda": (8192, 16384), "cpu": (512, 1024)}, (5, 24),
        _rows_reference, _ROWS, lambda shape: (2 * shape[0] + 1, 2 * shape[0]),
    ),
)  # fmt: skip
