"""Inputs drawn for a graph, each by the port that reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fusednorm.graph.tensors import TensorAttributes, extent, overlaps_itself

if TYPE_CHECKING:
    from fusednorm.graph.graph import Graph

_POSITIVE = ("inv_variance", "variance", "prev_running_variance")


def draw(graph: Graph, seed: int = 0) -> dict[str, Tensor]:
    """A variant pack for a validated graph: inputs from a seeded generator, alike on every device, and empty outputs.

    Data is standard normal, a scale 1 ± 0.2, a bias and a mean 0 ± 0.2; a variance or its inverse root is positive,
    |1 ± 0.1| + 0.1.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    taken = {tensor: port for node in graph.nodes for port, tensor in node.inputs.items()}
    pack = {tensor.name: _filled(tensor, taken[tensor], generator, graph.device) for tensor in graph.inputs}
    return pack | {tensor.name: _empty(tensor, graph.device) for tensor in graph.outputs}


def _empty(tensor: TensorAttributes, device: torch.device) -> Tensor:
    assert tensor.dims is not None and tensor.strides is not None
    return torch.empty_strided(tensor.dims, tensor.strides, dtype=tensor.dtype, device=device)


def _filled(tensor: TensorAttributes, port: str, generator: torch.Generator, device: torch.device) -> Tensor:
    assert tensor.dims is not None and tensor.strides is not None and tensor.dtype is not None
    drawn = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    around, spread = _DISTRIBUTIONS.get(port, (0.0, 1.0))
    if overlaps_itself(tensor.dims, tensor.strides):  # an expanded input: every element of its memory once
        memory = torch.randn(extent(tensor.dims, tensor.strides), generator=generator, dtype=drawn, device="cpu")
        memory = (memory * spread + around).to(tensor.dtype).to(device)
        return memory.as_strided(tensor.dims, tensor.strides)
    values = torch.randn(tensor.dims, generator=generator, dtype=drawn, device="cpu") * spread + around
    if port in _POSITIVE:
        values = values.abs() + 0.1
    return _empty(tensor, device).copy_(values)


_DISTRIBUTIONS: Mapping[str, tuple[float, float]] = {
    "scale": (1.0, 0.2),
    "bias": (0.0, 0.2),
    "mean": (0.0, 0.2),
    "prev_running_mean": (0.0, 0.2),
    **dict.fromkeys(_POSITIVE, (1.0, 0.1)),
}
