"""A norm's formula on a CPU, forward and backward, in as many loops as torch's own functions become there.

Inductor fuses the loops with their neighbours. torch's own decompositions are not used: its group_norm loses digits
where the mean is large, its functions round statistics to the input's dtype, and its batch_norm returns no variance.
The reference has the same formula, in more loops.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from fusednorm.backends.reference import DERIVATIVES, VALUES
from fusednorm.dtypes import compute_dtype
from fusednorm.norm import Norm
from fusednorm.operands import BackwardOperands, Gradients, Operands, Results
from fusednorm.problem import Problem, statistics_shape, view_of
from fusednorm.strides import packed_strides

Optional = Tensor | None


def has_formula(problem: Problem) -> bool:
    """Whether the formula is written here: there is none for a scale and shift, and for statistics of positions."""
    return not (problem.modulated or problem.called.per_position or problem.constant)


def has_right_gradients(problem: Problem) -> bool:
    """Whether Inductor's loops of the formula's forward and backward are right, whatever stands around them.

    Of rows with an activation they are not: where a tensor beside them lies in another order, as behind a
    transposition, torch 2.13 makes vectors across rows, and keeps dz, which all of them need, in a buffer for one row.
    torch's own functions of rows have gradients as wrong then.
    """
    return problem.norm.activation is None or not problem.norm.row_family


class Axes(NamedTuple):
    """How the input's dimensions belong together. ``grouped`` is its shape with the groups beside their channels, and
    ``channel`` the first of these two dimensions. Statistics run over the axes ``unit`` of that, and the sums of a
    parameter's gradient over its axes ``shared``. Each parameter has the shape ``parameter`` against it. ``positions``
    are the input's axes that both sums run over."""

    shape: tuple[int, ...]
    grouped: tuple[int, ...]
    channel: int
    parameter: tuple[int, ...]
    unit: tuple[int, ...]
    shared: tuple[int, ...]
    positions: tuple[int, ...]

    @property
    def beside(self) -> tuple[int, ...]:
        """The axes of a unit that a parameter does not share: those along which its sums are weighted."""
        return tuple(axis for axis in self.unit if axis not in self.shared)

    @property
    def of_parameters(self) -> tuple[int, ...]:
        """The axes that a parameter shares beyond those of a unit."""
        return tuple(axis for axis in self.shared if axis not in self.unit)

    @property
    def terms(self) -> int:
        """The number of elements of a unit."""
        return prod(self.grouped[axis] for axis in self.unit)

    def in_groups(self, tensor: Tensor) -> Tensor:
        """A tensor like the input, or with a number per channel of it, with the groups beside their channels."""
        if self.grouped == self.shape:
            return tensor
        sizes, groups = tensor.shape, self.grouped[self.channel : self.channel + 2]
        return tensor.reshape((*sizes[: self.channel], *groups, *sizes[self.channel + 1 :]))

    def of_channels(self, tensor: Tensor) -> Tensor:
        """A number per group or channel as one per sample and channel of the input, which lie side by side in memory,
        so that loops along channels read vectors: without it they gather a group's numbers."""
        if not self.beside:
            return tensor
        sizes = tuple(1 if axis in self.shared and axis > 0 else size for axis, size in enumerate(self.grouped))
        spread = tensor.expand(sizes).contiguous().as_strided(sizes, packed_strides(sizes))
        return spread.reshape(tuple(1 if axis in self.positions else size for axis, size in enumerate(self.shape)))


def axes_of(norm: Norm, shape: Sequence[int]) -> Axes:
    rank, shape = len(shape), tuple(shape)
    if norm.row_family:
        split = rank - norm.num_dims
        return Axes(shape, shape, 0, shape[split:], tuple(range(split, rank)), tuple(range(split)), ())
    channel = norm.channel_dim % rank
    grouped, kept = shape, {channel}
    if norm.family == "group_norm":
        view = view_of(norm, shape)
        grouped = (*shape[:channel], view.groups, view.group_channels, *shape[channel + 1 :])
        kept = {channel, channel + 1}
    parameter = tuple(size if axis in kept else 1 for axis, size in enumerate(grouped))
    shared = tuple(axis for axis in range(len(grouped)) if axis not in kept)
    apart = (channel,) if norm.per_batch else (0, channel)
    unit = tuple(axis for axis in range(len(grouped)) if axis not in apart)
    positions = tuple(axis for axis in range(rank) if axis not in apart)
    return Axes(shape, grouped, channel, parameter, unit, shared, positions)


class _Seen(NamedTuple):
    """The input and what belongs to it in the dtype of the computation: x - mean, what that is multiplied by and the
    bias in the input's dimensions, so that loops run as the input lies in memory; rstd and the weight in groups."""

    centred: Tensor
    rstd: Tensor
    factor: Optional
    weight: Optional
    bias: Optional

    @property
    def affine(self) -> Tensor:
        z = self.centred if self.factor is None else self.centred * self.factor
        return z if self.bias is None else z + self.bias


def _seen(norm: Norm, axes: Axes, x: Tensor, mean: Optional, rstd: Tensor, weight: Optional, bias: Optional) -> _Seen:
    weight, bias = (None if one is None else one.to(x.dtype).reshape(axes.parameter) for one in (weight, bias))
    if norm.row_family:  # xhat stands in the place of x - mean, since a factor of each element would be a tensor
        xhat = (x if mean is None else x - mean) * rstd
        return _Seen(xhat, rstd, weight, weight, bias)
    assert mean is not None
    factor = axes.of_channels(rstd if weight is None else rstd * weight)
    if bias is not None:
        bias = bias.reshape(tuple(size if axis == axes.channel else 1 for axis, size in enumerate(axes.shape)))
    return _Seen(x - axes.of_channels(mean), rstd, factor, weight, bias)


def forward(norm: Norm, operands: Operands) -> Results:
    """The results of a forward; those that nobody reads are left out as dead code."""
    input, mean, var = operands.input, operands.mean, operands.var
    axes = axes_of(norm, input.shape)
    x = input.to(compute_dtype(input.dtype))
    units = axes.in_groups(x)
    if mean is not None and var is not None:
        mean, var = _per_unit(axes, mean, x.dtype), _per_unit(axes, var, x.dtype)
    elif norm.has_mean:
        var, mean = torch.var_mean(units, axes.unit, correction=0, keepdim=True)
    else:
        var = units.square().mean(axes.unit, keepdim=True)
    rstd = (var + norm.eps).rsqrt()
    y = _seen(norm, axes, x, mean, rstd, operands.weight, operands.bias).affine
    if norm.activation is not None:
        y = VALUES[norm.activation.name](y, norm.activation.parameter)
    shape = statistics_shape(norm, view_of(norm, input.shape))
    return Results(
        y.to(input.dtype),
        None if mean is None else mean.reshape(shape),
        rstd.reshape(shape),
        var.reshape(shape) if norm.has_variance else None,
    )


def _per_unit(axes: Axes, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype).reshape(tuple(1 if axis in axes.unit else size for axis, size in enumerate(axes.grouped)))


def backward(norm: Norm, operands: BackwardOperands, output: Optional = None) -> Gradients:
    """The gradients of the input, weight and bias; those that nobody reads are left out as dead code.

    ``output`` is that of the forward. A relu's derivative is read from it, as torch does, and not from z: the loops
    then read two tensors, where the input and four numbers per channel would make Inductor write dz to memory.
    """
    input = operands.input
    axes, dtype = axes_of(norm, input.shape), compute_dtype(input.dtype)
    rstd = _per_unit(axes, operands.rstd, dtype)
    mean = _per_unit(axes, operands.mean, dtype) if norm.has_mean and operands.mean is not None else None
    x, dz = input.to(dtype), operands.grad_output.to(dtype)
    seen = _seen(norm, axes, x, mean, rstd, operands.weight, operands.bias)
    if norm.activation is not None:
        read = output is not None and norm.activation.name == "relu"
        z = output if read else seen.affine
        dz = dz * DERIVATIVES[norm.activation.name](z, norm.activation.parameter).to(dtype)
    p, q = (axes.in_groups(_sums(one, axes.positions)) for one in (dz, dz * seen.centred))
    if not norm.row_family:
        q = q * rstd
    grad_input = (_of_rows if norm.row_family else _of_planes)(norm, axes, seen, dz, p, q)
    weight, bias = (
        None if like is None else _sums(one, axes.of_parameters).reshape(like.shape).to(like.dtype)
        for one, like in ((q, operands.weight), (p, operands.bias))
    )
    return Gradients(grad_input.to(input.dtype), weight, bias, None, None)


def _shares(axes: Axes, seen: _Seen, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """P / K and Q / K of the units."""
    p, q = (
        _sums(one if seen.weight is None else one * seen.weight, axes.beside) * (1.0 / axes.terms) for one in (p, q)
    )
    return p, q


def _of_rows(norm: Norm, axes: Axes, seen: _Seen, dz: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """dx = rstd (A dz - P / K - xhat Q / K)"""
    p, q = _shares(axes, seen, p, q)
    dx = (dz if seen.weight is None else dz * seen.weight) - seen.centred * q
    return (dx - p if norm.has_mean else dx) * seen.rstd


def _of_planes(norm: Norm, axes: Axes, seen: _Seen, dz: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """dx = (rstd A) dz - rstd P / K - (x - mean) rstd² Q / K, each in brackets a number per sample and channel."""
    assert seen.factor is not None
    dx = dz * seen.factor
    if not norm.training:
        return dx
    p, q = _shares(axes, seen, p, q)
    return dx - seen.centred * axes.of_channels(seen.rstd * seen.rstd * q) - axes.of_channels(seen.rstd * p)


def _sums(tensor: Tensor, axes: tuple[int, ...]) -> Tensor:
    return tensor.sum(axes, keepdim=True) if axes else tensor
