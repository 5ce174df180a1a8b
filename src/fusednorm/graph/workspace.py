"""The workspace: where each virtual tensor lies in one block of memory, and its view of a given block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusednorm.dtypes import dtype_name
from fusednorm.graph.errors import VariantPackError
from fusednorm.graph.tensors import Dims, extent

ALIGNMENT = 256  # bytes; as CUDA's allocator aligns, and more than any vector load needs


@dataclass
class Scratch:
    """A tensor in the workspace, and the steps between which it holds something."""

    slot: int
    dims: Dims
    strides: Dims
    dtype: torch.dtype
    first: int = -1
    last: int = -1
    offset: int = 0

    @property
    def bytes(self) -> int:
        return extent(self.dims, self.strides) * self.dtype.itemsize


def place(scratch: Sequence[Scratch]) -> int:
    """Sets the offsets, which tensors never alive at once may share; returns the bytes of the workspace."""
    placed: list[Scratch] = []
    for one in sorted(scratch, key=lambda one: -one.bytes):
        one.offset = 0
        alive = [other for other in placed if other.first <= one.last and one.first <= other.last]
        for other in sorted(alive, key=lambda other: other.offset):
            if one.offset + one.bytes <= other.offset:
                break
            end = other.offset + other.bytes
            one.offset = max(one.offset, -(-end // ALIGNMENT) * ALIGNMENT)
        placed.append(one)
    return max((one.offset + one.bytes for one in scratch), default=0)


class Workspace:
    """The virtual tensors of a program as views of one block of memory, and behind them its ``constants``."""

    def __init__(
        self, graph: str, scratch: Sequence[Scratch], size: int, device: torch.device, constants: Sequence[Tensor]
    ) -> None:
        self.graph, self.scratch, self.size, self.device = graph, scratch, size, device
        self.behind = [*constants, None]
        self.last: tuple[Tensor | None, int, list[Any]] = (None, 0, [])

    def views(self, workspace: Tensor | None) -> list[Any]:
        """The virtual tensors by slot, the constants, then None for an absent tensor."""
        if not self.scratch:
            return self.behind
        kept, address, views = self.last
        if workspace is not None and workspace is kept and workspace.data_ptr() == address:
            return views
        own = workspace is None
        if workspace is None:
            workspace = torch.empty(self.size + ALIGNMENT, dtype=torch.uint8, device=self.device)
        self.check(workspace)
        views = [self.view(workspace, one) for one in self.scratch] + self.behind
        if not own:
            self.last = (workspace, workspace.data_ptr(), views)
        return views

    def view(self, workspace: Tensor, one: Scratch) -> Tensor:
        block = workspace[one.offset : one.offset + one.bytes].view(one.dtype)
        return block.as_strided(one.dims, one.strides, block.storage_offset())

    def check(self, workspace: Tensor) -> None:
        needed = self.size
        good = isinstance(workspace, Tensor) and workspace.is_contiguous() and workspace.dtype is torch.uint8
        if not good or workspace.dim() != 1 or workspace.device != self.device or workspace.numel() < needed:
            came = type(workspace).__name__
            if isinstance(workspace, Tensor):
                came = f"{dtype_name(workspace.dtype)} of shape {tuple(workspace.shape)} on {workspace.device}"
            raise VariantPackError(
                f"graph {self.graph!r}: the workspace is {came}; expected at least {needed} bytes, e.g. "
                f"torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device={str(self.device)!r})"
            )
        if workspace.data_ptr() % 16:
            raise VariantPackError(
                f"graph {self.graph!r}: the workspace is not aligned; expected a multiple of 16 bytes"
            )
