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
    """How the input's dimensions belong together. ``shape`` has the groups beside their channels; each parameter has
    the shape ``parameter`` against it. Statistics run over the axes ``unit``, the sums of a parameter's gradient over
    ``shared``."""

    shape: tuple[int, ...]
    parameter: tuple[int, ...]
    unit: tuple[int, ...]
    shared: tuple[int, ...]

    @property
    def inner(self) -> tuple[int, ...]:
        """What both sums run over."""
        return tuple(axis for axis in self.unit if axis in self.shared)

    def beyond_inner(self, axes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(axis for axis in axes if axis not in self.inner)

    @property
    def terms(self) -> int:
        """The number of elements of a unit."""
        return prod(self.shape[axis] for axis in self.unit)


def axes_of(norm: Norm, shape: Sequence[int]) -> Axes:
    rank, shape = len(shape), tuple(shape)
    if norm.row_family:
        split = rank - norm.num_dims
        return Axes(shape, shape[split:], tuple(range(split, rank)), tuple(range(split)))
    channel = norm.channel_dim % rank
    kept: tuple[int, ...] = (channel,)
    if norm.family == "group_norm":
        view = view_of(norm, shape)
        shape = (*shape[:channel], view.groups, view.group_channels, *shape[channel + 1 :])
        kept, rank = (channel, channel + 1), rank + 1
    parameter = tuple(size if axis in kept else 1 for axis, size in enumerate(shape))
    shared = tuple(axis for axis in range(rank) if axis not in kept)
    apart = (channel,) if norm.per_batch else (0, channel)
    return Axes(shape, parameter, tuple(axis for axis in range(rank) if axis not in apart), shared)


class _Seen(NamedTuple):
    """The input and what belongs to it in the dtype of the computation, against one another: x - mean, rstd, and what
    x - mean is multiplied by."""

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
    factor = rstd if weight is None else rstd * weight
    return _Seen(x - _spread(axes, mean), rstd, _spread(axes, factor), weight, bias)


def _spread(axes: Axes, tensor: Tensor) -> Tensor:
    """A number per group as one per sample and channel in memory, so that loops along channels read vectors: without it
    they gather a group's numbers. A number per channel stays as it is, and costs no loop of its own."""
    if not axes.beyond_inner(axes.unit):
        return tensor
    shape = tuple(size if axis not in axes.inner else 1 for axis, size in enumerate(axes.shape))
    return tensor.expand(shape).contiguous().as_strided(shape, packed_strides(shape))


def forward(norm: Norm, operands: Operands) -> Results:
    """The results of a forward; those that nobody reads are left out as dead code."""
    input, mean, var = operands.input, operands.mean, operands.var
    axes = axes_of(norm, input.shape)
    x = input.reshape(axes.shape).to(compute_dtype(input.dtype))
    if mean is not None and var is not None:
        mean, var = _per_unit(axes, mean, x.dtype), _per_unit(axes, var, x.dtype)
    elif norm.has_mean:
        var, mean = torch.var_mean(x, axes.unit, correction=0, keepdim=True)
    else:
        var = x.square().mean(axes.unit, keepdim=True)
    rstd = (var + norm.eps).rsqrt()
    y = _seen(norm, axes, x, mean, rstd, operands.weight, operands.bias).affine
    if norm.activation is not None:
        y = VALUES[norm.activation.name](y, norm.activation.parameter)
    shape = statistics_shape(norm, view_of(norm, input.shape))
    return Results(
        y.to(input.dtype).reshape(input.shape),
        None if mean is None else mean.reshape(shape),
        rstd.reshape(shape),
        var.reshape(shape) if norm.has_variance else None,
    )


def _per_unit(axes: Axes, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype).reshape(tuple(1 if axis in axes.unit else size for axis, size in enumerate(axes.shape)))


def backward(norm: Norm, operands: BackwardOperands, output: Optional = None) -> Gradients:
    """The gradients of the input, weight and bias; those that nobody reads are left out as dead code.

    ``output`` is that of the forward. A relu's derivative is read from it, as torch does, and not from z: the loops
    then read two tensors, where the input and four numbers per channel would make Inductor write dz to memory.
    """
    input = operands.input
    axes, dtype = axes_of(norm, input.shape), compute_dtype(input.dtype)
    rstd = _per_unit(axes, operands.rstd, dtype)
    mean = _per_unit(axes, operands.mean, dtype) if norm.has_mean and operands.mean is not None else None
    x, dz = (tensor.reshape(axes.shape).to(dtype) for tensor in (input, operands.grad_output))
    seen = _seen(norm, axes, x, mean, rstd, operands.weight, operands.bias)
    if norm.activation is not None:
        read = output is not None and norm.activation.name == "relu"
        z = output.reshape(axes.shape) if read else seen.affine  # type: ignore[union-attr]
        dz = dz * DERIVATIVES[norm.activation.name](z, norm.activation.parameter).to(dtype)
    p, q = _sums(dz, axes.inner), _sums(dz * seen.centred, axes.inner)
    if not norm.row_family:
        q = q * rstd
    grad_input = (_of_rows if norm.row_family else _of_planes)(norm, axes, seen, dz, p, q)
    of_parameters = axes.beyond_inner(axes.shared)
    weight, bias = (
        None if like is None else _sums(one, of_parameters).reshape(like.shape).to(like.dtype)
        for one, like in ((q, operands.weight), (p, operands.bias))
    )
    return Gradients(grad_input.to(input.dtype).reshape(input.shape), weight, bias, None, None)


def _shares(axes: Axes, seen: _Seen, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """P / K and Q / K of the units."""
    of_units = axes.beyond_inner(axes.unit)
    p, q = (_sums(one if seen.weight is None else one * seen.weight, of_units) * (1.0 / axes.terms) for one in (p, q))
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
    return dx - seen.centred * _spread(axes, seen.rstd * seen.rstd * q) - _spread(axes, seen.rstd * p)


def _sums(tensor: Tensor, axes: tuple[int, ...]) -> Tensor:
    return tensor.sum(axes, keepdim=True) if axes else tensor
