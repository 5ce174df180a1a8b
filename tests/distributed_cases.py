"""The calls that test_distributed.py makes in processes (distributed_worker.py) and judges in one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CHANNELS = 6

#: The samples of each rank, by the number of ranks: all different, and with an empty rank.
UNEVEN = {2: (4, 1), 3: (3, 1, 2), 4: (2, 5, 1, 3)}
WITH_EMPTY = {2: (3, 0), 3: (0, 3, 1), 4: (2, 0, 0, 4)}


@dataclass(frozen=True)
class Case:
    """One training of ``steps`` steps."""

    dtype: torch.dtype = torch.float32
    parameter_dtype: torch.dtype = torch.float32
    layout: str = "contiguous"  # or channels_last, or channel_dim
    activation: str | None = None
    affine: bool = True
    momentum: float | None = 0.1
    empty: bool = False
    steps: int = 1
    subgroup: bool = False  # the ranks of the same parity
    offset: float = 3.0  # how far the ranks' means are apart
    mean: float = 0.0  # what is added to all of them
    frozen: bool = False  # the input requires no grad
    modulated: bool = False  # by a scale and a shift of each rank's samples

    def samples(self, world_size: int) -> tuple[int, ...]:
        return (WITH_EMPTY if self.empty else UNEVEN)[world_size]

    def members(self, rank: int, world_size: int) -> list[int]:
        """The ranks that share statistics with ``rank``."""
        return [each for each in range(world_size) if not self.subgroup or each % 2 == rank % 2]


CASES = {
    "plain": Case(),
    "relu": Case(activation="relu", steps=2),
    "silu_empty": Case(activation="silu", empty=True, steps=2),
    "channels_last": Case(layout="channels_last", activation="relu", empty=True),
    "channel_dim": Case(layout="channel_dim", activation="gelu"),
    "double": Case(dtype=torch.float64, activation="silu"),
    "bfloat16": Case(dtype=torch.bfloat16, activation="silu", layout="channels_last"),
    "float16": Case(dtype=torch.float16, parameter_dtype=torch.float16, offset=1.0, empty=True),
    "bfloat16_parameters": Case(parameter_dtype=torch.bfloat16),
    "no_affine": Case(affine=False, activation="relu"),
    "cumulative": Case(momentum=None, steps=3, empty=True),
    "subgroup": Case(subgroup=True, activation="relu", momentum=1.0),
    "far": Case(mean=3000.0, momentum=1.0),
    "far_relu": Case(mean=3000.0, activation="relu"),
    "frozen": Case(frozen=True, activation="relu"),
    "modulated": Case(modulated=True, activation="silu", empty=True),
    "modulated_nhwc": Case(modulated=True, activation="relu", layout="channel_dim"),
}


def parameters(case: Case) -> tuple[Tensor, Tensor]:
    """weight and bias, alike on all ranks."""
    generator = torch.Generator().manual_seed(1)
    weight, bias = torch.randn(2, CHANNELS, generator=generator).to(case.parameter_dtype)
    return weight, bias


def modulation(case: Case, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    """A rank's scale and shift."""
    generator = torch.Generator().manual_seed(500 + rank)
    scale, shift = torch.randn(2, case.samples(world_size)[rank], CHANNELS, generator=generator)
    return scale, shift


def draw(case: Case, rank: int, world_size: int, step: int) -> tuple[Tensor, Tensor]:
    """A rank's input and the gradient of its output: each rank has another mean, scale and number of samples."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    shape = (case.samples(world_size)[rank], CHANNELS, 3, 5)
    input = torch.randn(shape, generator=generator) * (1.0 + rank) + case.offset * (rank + 1) + case.mean
    # A common part, so that the sums over all ranks matter in the gradient.
    grad = torch.randn(shape, generator=generator) + 0.5 * (rank + 1)
    return laid_out(case, input.to(case.dtype)), laid_out(case, grad.to(case.dtype))


def laid_out(case: Case, tensor: Tensor) -> Tensor:
    """(N, C, H, W) in the case's layout."""
    if case.layout == "channels_last":
        return tensor.contiguous(memory_format=torch.channels_last)
    return tensor.movedim(1, -1).contiguous() if case.layout == "channel_dim" else tensor


def plain(case: Case, tensor: Tensor) -> Tensor:
    """The inverse of :func:`laid_out`."""
    return tensor.movedim(-1, 1) if case.layout == "channel_dim" else tensor
