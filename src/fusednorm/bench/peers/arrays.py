"""The 4-D view of a workload for libraries of plain arrays, in which channels_last is an NHWC-shaped array."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from torch import Tensor

from fusednorm.bench.workloads import Workload


@dataclass(frozen=True)
class ArrayView:
    """The shape of the view, the axes of the statistics, and the shape in which a parameter broadcasts against it."""

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    parameter: tuple[int, ...]


def view_of_array(workload: Workload) -> ArrayView:
    """(N, G, D, S), or (N, S, G, D) for channels_last."""
    shape = workload.shape
    if workload.row_family:
        width = prod(workload.parameter_shape)
        rows = prod(shape) // max(1, width)
        samples = shape[0] if workload.modulated else rows
        return ArrayView((samples, rows // max(1, samples), width, 1), (2, 3), (1, 1, width, 1))
    channels, spatial = shape[1], prod(shape[2:])
    groups = workload.groups if workload.family == "group_norm" else channels
    depth, batch = channels // groups, workload.family == "batch_norm"
    if workload.layout == "nhwc":
        return ArrayView((shape[0], spatial, groups, depth), (0, 1) if batch else (1, 3), (1, 1, groups, depth))
    return ArrayView((shape[0], groups, depth, spatial), (0, 3) if batch else (2, 3), (1, groups, depth, 1))


def to_array_order(tensor: Tensor, workload: Workload) -> Tensor:
    """A tensor of the input's shape as the contiguous tensor that the library gets."""
    return (tensor.movedim(1, -1) if workload.layout == "nhwc" else tensor).contiguous()


def from_array_order(tensor: Tensor, workload: Workload) -> Tensor:
    """The inverse of :func:`to_array_order`, without a copy."""
    return tensor.movedim(-1, 1) if workload.layout == "nhwc" else tensor
