"""Strides of torch tensors: contiguous strides, dense strides, and an output's strides."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusednorm.norm import Norm
from fusednorm.problem import layout_of

MOST_DIMS = 64  # torch's operators take no more


def packed_strides(dims: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(dims):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def contiguous(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """An operand as kernels read it; asked first, since ``contiguous()`` costs a call of torch's dispatcher."""
    return tensor if tensor is None or tensor.is_contiguous() else tensor.contiguous()


def rows_lie_apart(tensor: torch.Tensor) -> bool:
    """Whether the numbers of a row lie apart in memory, as those of an image's tokens do that were flattened and
    transposed without a copy."""
    if tensor.is_nested:
        return False
    return not tensor.is_contiguous() and tensor.dim() > 0 and tensor.stride(-1) > 1 and tensor.shape[-1] > 1


def keeps_torch_order(input: torch.Tensor, rows: bool) -> bool:
    """Whether torch's norms keep an input's order of memory, as ours do: contiguous, and channels_last of images, but
    not that of ``rows``."""
    if input.is_contiguous():
        return True
    axes = [axis for axis, size in enumerate(input.shape) if size != 1]
    order = slowest_first(input.stride(), axes)
    last = tuple(axis for axis in (0, *range(2, input.dim()), 1) if axis in axes)
    return order == tuple(axes) or (not rows and input.dim() in (4, 5) and order == last)


def is_dense(tensor: torch.Tensor) -> bool:
    """True where the elements fill one range of memory without a hole and without sharing."""
    if tensor.is_contiguous():
        return True
    # By strides alone: vmap does not answer for memory formats.
    shape, strides = tensor.shape, tensor.stride()
    expected = 1
    for axis in reversed(slowest_first(strides, [axis for axis, size in enumerate(shape) if size != 1])):
        if strides[axis] != expected:
            return False
        expected *= shape[axis]
    return True


def slowest_first(strides: Sequence[int], axes: Sequence[int]) -> tuple[int, ...]:
    """The dimensions by falling strides; by comparisons alone, since Dynamo does not sort symbols."""
    order: list[int] = []
    for axis in axes:
        place = len(order)
        while place and strides[order[place - 1]] < strides[axis]:
            place -= 1
        order.insert(place, axis)
    return tuple(order)


def _memory_order(input: torch.Tensor, order: str, channel_dim: int) -> tuple[int, ...]:
    """The dimensions from the slowest to the fastest in a memory order, the positions in the input's order."""
    rank, strides = input.dim(), input.stride()
    channel = 1 if channel_dim == 1 else rank - 1
    positions = slowest_first(strides, [axis for axis in range(1, rank) if axis != channel])
    return (0, channel, *positions) if order == "channels_first" else (0, *positions, channel)


def _empty_in_order(input: torch.Tensor, order: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An unwritten tensor of its own, not a view, which autograd would not let anyone change in place."""
    packed = packed_strides([input.shape[axis] for axis in order])
    strides = [packed[order.index(axis)] for axis in range(input.dim())]
    return torch.empty_strided(input.shape, strides, dtype=dtype, device=input.device)


def empty_output(norm: Norm, input: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """An unwritten output, or grad_input, with the strides that every backend returns for this input; in its dtype, or
    in the ``dtype`` of a quantized output.

    A dense input gives its own strides. Any other input (sliced, expanded) gives dense ones: in the memory order that
    :func:`fusednorm.problem.layout_of` finds, with the positions in the input's order, or contiguous where it finds
    none. Fake and meta tensors get the same strides as real ones.
    """
    if is_dense(input):
        # Not empty_like: of a fake tensor it has other strides along dimensions of one element.
        return torch.empty_strided(input.shape, input.stride(), dtype=dtype or input.dtype, device=input.device)
    return _empty_in_order(input, output_order(norm, input), dtype or input.dtype)


def output_order(norm: Norm, input: torch.Tensor) -> tuple[int, ...]:
    """The dimensions of an output from the slowest to the fastest, as :func:`empty_output` has them."""
    axes = range(input.dim())
    if is_dense(input):
        return slowest_first(input.stride(), axes)
    layout = None if norm.row_family else layout_of(norm, input.shape, input.stride())
    return tuple(axes) if layout is None else _memory_order(input, layout.order, norm.channel_dim)


def reordered(tensor: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """The tensor with its dimensions in this order of memory: itself where they are in it, or else a copy."""
    permuted = tensor.permute(*order)
    if permuted.is_contiguous():
        return tensor
    return permuted.contiguous().permute([order.index(axis) for axis in range(tensor.dim())])
