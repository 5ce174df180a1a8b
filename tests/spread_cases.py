"""The calls that test_spread.py makes in processes (spread_worker.py) and judges in one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: The sizes of the ranks along the sharded dimension, by the number of ranks.
Sizes = dict[int, tuple[int, ...]]
UNEVEN: Sizes = {2: (4, 1), 3: (3, 1, 2), 4: (2, 5, 1, 3)}
WITH_EMPTY: Sizes = {2: (3, 0), 3: (0, 3, 1), 4: (2, 0, 0, 4)}
#: Six channels, or elements of a row, which in groups of two or three are cut anywhere, and which are cut in pairs.
CUT: Sizes = {2: (5, 1), 3: (3, 1, 2), 4: (1, 0, 3, 2)}
PAIRS: Sizes = {2: (4, 2), 3: (2, 0, 4), 4: (2, 2, 0, 2)}
PARAMETERS = ("weight", "bias", "scale", "shift")
AFFINE = ("weight", "bias")


@dataclass(frozen=True)
class Case:
    """One call; ``shape`` is the whole's, but for the size along ``shard_dim``."""

    family: str
    shape: tuple[int, ...]
    shard_dim: int
    sizes: Sizes
    dtype: torch.dtype = torch.float32
    parameter_dtype: torch.dtype = torch.float32
    layout: str = "contiguous"  # or channels_last
    channel_dim: int = 1
    num_groups: int = 0
    num_dims: int = 0  # of normalized trailing dimensions
    operands: tuple[str, ...] = AFFINE
    activation: str | None = None
    running: bool = False
    training: bool = True
    offset: float = 3.0  # how far the ranks' means are apart
    mean: float = 0.0  # what is added to all of them
    frozen: tuple[str, ...] = ()  # what requires no grad

    @property
    def axis(self) -> int:
        return self.shard_dim % len(self.shape)

    @property
    def channel_axis(self) -> int:
        return self.channel_dim % len(self.shape)

    def whole(self, world_size: int) -> tuple[int, ...]:
        return (*self.shape[: self.axis], sum(self.sizes[world_size]), *self.shape[self.axis + 1 :])

    def axes(self, name: str) -> list[int]:
        """The dimensions of the input that a parameter has."""
        if name in ("scale", "shift"):
            return [0, self.channel_axis]
        dims = len(self.shape)
        return list(range(dims - self.num_dims, dims)) if self.num_dims else [self.channel_axis]

    @property
    def reduced(self) -> list[int]:
        """The dimensions that a statistic covers, but that group_norm's covers the channels of a group too."""
        dims = range(len(self.shape))
        if self.num_dims:
            return list(dims)[-self.num_dims :]
        if self.family in ("layer_norm", "rms_norm"):
            return [1]
        kept = {self.channel_axis} if self.family == "batch_norm" else {0, self.channel_axis}
        return [dim for dim in dims if dim not in kept]


GROUP = {"num_groups": 2}
MODULATED = ("weight", "bias", "scale", "shift")
CASES = {
    "group, height": Case("group_norm", (2, 6, 0, 5), 2, UNEVEN, **GROUP, operands=MODULATED, activation="silu"),
    "group, depth": Case(
        "group_norm", (1, 6, 0, 3, 2), -3, WITH_EMPTY, **GROUP, activation="relu", layout="channels_last"
    ),
    "group, NHWC": Case("group_norm", (2, 0, 4, 6), 1, UNEVEN, num_groups=3, channel_dim=-1, activation="gelu"),
    "group, width, channels_last": Case(
        "group_norm", (2, 6, 3, 0), 3, WITH_EMPTY, **GROUP, operands=MODULATED, activation="relu",
        layout="channels_last",
    ),
    "group, cut": Case("group_norm", (2, 0, 3, 4), 1, CUT, **GROUP, operands=MODULATED, activation="silu"),
    "group, cut, NHWC": Case("group_norm", (2, 3, 4, 0), -1, CUT, num_groups=3, channel_dim=-1, activation="relu"),
    "group, cut, no parameters": Case("group_norm", (1, 0, 3, 4), 1, CUT, num_groups=1, operands=()),
    "group, whole groups": Case("group_norm", (2, 0, 3, 4), 1, PAIRS, num_groups=3, operands=MODULATED),
    "group, samples": Case("group_norm", (0, 6, 3, 4), 0, WITH_EMPTY, **GROUP, operands=MODULATED, activation="relu"),
    "group, one position each": Case("group_norm", (3, 6, 0), 2, {2: (1, 1), 3: (1, 0, 1), 4: (1,) * 4}, **GROUP),
    "group, bfloat16": Case(
        "group_norm", (2, 6, 0, 5), 2, WITH_EMPTY, **GROUP, operands=MODULATED, activation="silu",
        dtype=torch.bfloat16, layout="channels_last",
    ),
    "group, float16": Case(
        "group_norm", (2, 6, 0, 5), 2, UNEVEN, **GROUP, dtype=torch.float16, parameter_dtype=torch.float16, offset=1.0
    ),
    "group, bfloat16 parameters": Case(
        "group_norm", (2, 6, 0, 5), 2, UNEVEN, **GROUP, operands=MODULATED, parameter_dtype=torch.bfloat16
    ),
    "group, double": Case(
        "group_norm", (2, 6, 0, 5), 2, UNEVEN, **GROUP, operands=("weight", "shift"), dtype=torch.float64,
        activation="silu",
    ),
    "group, far": Case("group_norm", (2, 6, 0, 5), 2, UNEVEN, **GROUP, mean=3000.0, activation="relu"),
    "group, cut, far": Case("group_norm", (2, 0, 3, 4), 1, CUT, **GROUP, mean=3000.0),
    "group, input alone": Case("group_norm", (2, 6, 0, 5), 2, UNEVEN, **GROUP, operands=(), activation="silu"),
    "group, frozen input": Case("group_norm", (2, 6, 0, 5), 2, WITH_EMPTY, **GROUP, frozen=("input",)),
    "group, cut, frozen input": Case("group_norm", (2, 0, 3, 4), 1, CUT, **GROUP, frozen=("input", "bias")),
    "group, frozen parameters": Case("group_norm", (2, 6, 0, 5), 2, UNEVEN, **GROUP, frozen=AFFINE),
    "instance, height": Case(
        "instance_norm", (2, 6, 0, 5), 2, WITH_EMPTY, operands=MODULATED, running=True, activation="relu"
    ),
    "instance, NHWC": Case("instance_norm", (3, 4, 0, 6), 2, UNEVEN, channel_dim=-1, running=True),
    "instance, samples": Case("instance_norm", (0, 6, 5), 0, WITH_EMPTY, running=True, operands=MODULATED),
    "instance, samples, not running": Case("instance_norm", (0, 6, 5), 0, WITH_EMPTY),
    "instance, channels": Case("instance_norm", (2, 0, 5), 1, PAIRS, running=True, operands=MODULATED),
    "instance, given": Case("instance_norm", (2, 6, 0, 5), 2, UNEVEN, running=True, training=False, activation="silu"),
    "batch, height": Case("batch_norm", (2, 6, 0, 5), 2, WITH_EMPTY, running=True, activation="relu"),
    "batch, height, modulated": Case(
        "batch_norm", (2, 6, 0, 5), 2, UNEVEN, running=True, operands=MODULATED, activation="silu"
    ),
    "batch, samples": Case("batch_norm", (0, 6, 3, 5), 0, WITH_EMPTY, running=True, activation="silu"),
    "batch, samples, modulated": Case(
        "batch_norm", (0, 6, 3, 5), 0, UNEVEN, operands=MODULATED, layout="channels_last"
    ),
    "batch, channels": Case("batch_norm", (2, 0, 5), 1, PAIRS, running=True, operands=MODULATED),
    "batch, NHWC, bfloat16": Case(
        "batch_norm", (2, 0, 4, 6), 1, UNEVEN, channel_dim=-1, dtype=torch.bfloat16, activation="relu"
    ),
    "batch, given": Case(
        "batch_norm", (2, 6, 0, 5), 2, WITH_EMPTY, running=True, training=False, operands=MODULATED, activation="relu"
    ),
    "layer, elements": Case("layer_norm", (2, 3, 0), -1, CUT, num_dims=1, activation="gelu"),
    "layer, two dims": Case("layer_norm", (3, 0, 4), 1, WITH_EMPTY, num_dims=2),
    "layer, one row": Case("layer_norm", (0,), 0, UNEVEN, num_dims=1, operands=("bias",)),
    "layer, no parameters": Case("layer_norm", (2, 3, 0), -1, CUT, num_dims=1, operands=(), activation="silu"),
    "layer, tokens": Case("layer_norm", (2, 0, 6), 1, WITH_EMPTY, num_dims=1, activation="relu"),
    "layer, samples": Case("layer_norm", (0, 3, 6), 0, WITH_EMPTY, num_dims=1),
    "layer, bfloat16": Case("layer_norm", (2, 3, 0), -1, UNEVEN, num_dims=1, dtype=torch.bfloat16, activation="silu"),
    "layer, far": Case("layer_norm", (2, 3, 0), -1, UNEVEN, num_dims=1, mean=3000.0),
    "layer, channels": Case("layer_norm", (2, 0, 3, 4), 1, CUT, activation="gelu"),
    "layer, channels, channels_last": Case("layer_norm", (2, 0, 3, 4), 1, CUT, layout="channels_last"),
    "layer, channels, no parameters": Case("layer_norm", (2, 0, 3), 1, CUT, operands=(), activation="relu"),
    "layer, channels of no position": Case("layer_norm", (3, 0), 1, CUT),
    "layer, height": Case("layer_norm", (2, 6, 0, 4), 2, WITH_EMPTY, activation="relu"),
    "rms, elements": Case("rms_norm", (2, 3, 0), -1, CUT, num_dims=1, operands=("weight",), activation="silu"),
    "rms, double": Case("rms_norm", (2, 3, 0), -1, UNEVEN, num_dims=1, operands=(), dtype=torch.float64),
    "rms, float16": Case("rms_norm", (2, 3, 0), -1, CUT, num_dims=1, operands=("weight",), dtype=torch.float16),
    "rms, tokens": Case(
        "rms_norm", (2, 0, 6), -2, UNEVEN, num_dims=1, operands=("weight",), parameter_dtype=torch.bfloat16
    ),
    "rms, channels": Case("rms_norm", (2, 0, 3, 4), 1, CUT, operands=("weight",)),
}  # fmt: skip


def parameters(case: Case, world_size: int) -> dict[str, Tensor]:
    """The whole's parameters, by name."""
    generator = torch.Generator().manual_seed(1)
    whole, found = case.whole(world_size), {}
    for name in PARAMETERS:
        values = torch.randn([whole[axis] for axis in case.axes(name)], generator=generator)
        if name in case.operands:
            found[name] = values.to(case.parameter_dtype)
    return found


def own(case: Case, tensor: Tensor, axes: list[int], rank: int, world_size: int) -> Tensor:
    """A rank's slice of a tensor of the whole that has these dimensions of the input."""
    if case.axis not in axes:
        return tensor
    return tensor.split(case.sizes[world_size], axes.index(case.axis))[rank]


def running(case: Case, world_size: int) -> tuple[Tensor, Tensor] | None:
    """The whole's running statistics before the call."""
    channels = case.whole(world_size)[case.channel_axis]
    return (torch.linspace(-1, 4, channels), torch.linspace(0.5, 9, channels)) if case.running else None


def draw(case: Case, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    """A rank's input and the gradient of its output: each rank has another mean, scale and size."""
    generator = torch.Generator().manual_seed(1000 + rank)
    shape = list(case.shape)
    shape[case.axis] = case.sizes[world_size][rank]
    input = torch.randn(shape, generator=generator) * (1.0 + rank) + case.offset * (rank + 1) + case.mean
    # A common part, so that the sums over all ranks matter in the gradient.
    grad = torch.randn(shape, generator=generator) + 0.5 * (rank + 1)
    return laid_out(case, input.to(case.dtype)), laid_out(case, grad.to(case.dtype))


def laid_out(case: Case, tensor: Tensor) -> Tensor:
    if case.layout == "contiguous":
        return tensor
    return tensor.contiguous(memory_format=torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d)
