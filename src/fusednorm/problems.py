"""From a call's Norm and tensors to its Problem, by which an instance is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fusednorm.dtypes import dtype_name
from fusednorm.formats import Quantized
from fusednorm.norm import Norm, norm_of
from fusednorm.operands import BackwardOperands, Gated, Operands, Sums, Wanted
from fusednorm.problem import (
    Added,
    Direction,
    Gate,
    Layout,
    Order,
    Problem,
    gate_of,
    gate_shape,
    layout_of,
    positions_follow,
    row_layout,
    rows_across,
    rows_in_samples,
    view_of,
)
from fusednorm.strides import empty_output, is_dense, packed_strides


def forward_problem(norm: Norm, operands: Operands) -> Problem:
    """The Problem of a forward."""
    return _problem(norm, operands, "forward" if norm.training else "inference")


def backward_problem(norm: Norm, operands: BackwardOperands, direction: Direction = "backward") -> Problem:
    """The Problem of a backward."""
    return _problem(norm, operands, direction, operands.grad_output)


def backward_direction(wanted: Wanted) -> Direction:
    """The direction that gives every wanted gradient in the fewest passes."""
    if not wanted[0]:
        return "backward_gamma_beta"
    return "backward" if wanted[1] or wanted[2] or wanted[3] or wanted[4] else "backward_data"


def _problem(
    norm: Norm, operands: Operands | BackwardOperands, direction: Direction, grad_output: Tensor | None = None
) -> Problem:
    input, copies = operands.input, []
    strides, output_strides = input.stride(), _output_strides(norm, input)
    grad_strides = None if grad_output is None else grad_output.stride()
    seen = _seen(norm, tuple(input.shape), strides, output_strides, grad_strides)
    layout, like = layout_of(seen.norm, seen.shape, seen.input, wanted=seen.order), seen.input
    if layout is None:
        copies.append("input")
        output_strides = packed_strides(input.shape)
        seen = _Seen(norm, tuple(input.shape), output_strides, output_strides, grad_strides)
        layout, like = layout_of(norm, seen.shape, seen.input), seen.input
        assert layout is not None
    # torch gives a tensor without elements any strides; they mean nothing.
    empty = 0 in seen.shape
    output_layout = layout if empty else layout_of(seen.norm, seen.shape, seen.output, like, layout.order)
    assert output_layout is not None
    grad_layout = None
    if grad_output is not None:
        if seen.grad is not None:
            grad_layout = layout if empty else layout_of(seen.norm, seen.shape, seen.grad, like, layout.order)
        if grad_layout is None:
            copies.append("grad_output")
            grad_layout = output_layout
    problem = Problem(
        norm=seen.norm,
        direction=direction,
        view=view_of(seen.norm, seen.shape),
        layout=layout,
        dtype=dtype_name(input.dtype),
        weight_dtype=_dtype_of(operands.weight),
        bias_dtype=_dtype_of(operands.bias),
        scale_dtype=_dtype_of(operands.scale),
        shift_dtype=_dtype_of(operands.shift),
        device=input.device.type,
        shape=tuple(input.shape),
        output_strides=output_strides,
        output_layout=output_layout,
        grad_layout=grad_layout,
        dense=output_strides == strides,
        copies=tuple(copies),
        made_of=None if seen.norm is norm else norm,
    )
    return problem.in_rows if problem.are_rows else problem


class _Seen(NamedTuple):
    """A call as kernels see it: the norm, the shape, and the strides of input, output and grad_output; None for those
    of a gradient that is to be copied. ``order`` is the memory order that all have, None where the input has one
    alone: where its rows overlap, it has both."""

    norm: Norm
    shape: tuple[int, ...]
    input: tuple[int, ...]
    output: tuple[int, ...]
    grad: tuple[int, ...] | None
    order: Order | None = None


def _seen(
    norm: Norm,
    shape: tuple[int, ...],
    input: tuple[int, ...],
    output: tuple[int, ...],
    grad: tuple[int, ...] | None,
) -> _Seen:
    """The call itself, or its rows as positions of samples: where these lie across the rows of memory, or where their
    strides are two."""
    if not norm.row_family or 0 in shape:
        return _Seen(norm, shape, input, output, grad)
    # A gradient whose strides do not fit is copied.
    several = [[input, output]] if grad is None else [[input, output, grad], [input, output]]
    for tensors in several:
        found = rows_across(norm, shape, tensors)
        if found is not None:
            return _seen_as(norm, 1, *found)
    for tensors in several:
        if all(layout_of(norm, shape, strides) is not None for strides in tensors):
            break
        found = rows_in_samples(norm, shape, tensors)
        if found is not None:
            return _seen_as(norm, -1, *found)
    return _Seen(norm, shape, input, output, grad)


def _seen_as(norm: Norm, channel_dim: int, shape: tuple[int, ...], strides: Sequence[tuple[int, ...]]) -> _Seen:
    """Rows as positions of samples, whose channels have this dimension."""
    seen = norm_of(norm.family, 0, channel_dim, norm.eps, norm.activation, norm.training)
    order: Order = "channels_first" if channel_dim == 1 else "channels_last"
    return _Seen(seen, shape, strides[0], strides[1], strides[2] if len(strides) > 2 else None, order)


#: The tensors that are added around a norm.
SUMMED = ("pre_add", "pre_gate", "pre_bias", "post_add")


def sum_forward_problem(norm: Norm, operands: Operands, sums: Sums, keeps_sum: bool) -> Problem:
    """The Problem of a forward with sums around it; ``keeps_sum`` where s is a result."""
    problem, input = forward_problem(norm, operands), operands.input
    gate, unfit = _gate(problem, norm, input, sums.pre_gate)
    obstacle = _obstacle(problem, input, pre_add=sums.pre_add, post_add=sums.post_add) or unfit
    added = Added(
        pre_layout=_added_layout(problem, input, sums.pre_add),
        gate=gate,
        post_layout=_added_layout(problem, input, sums.post_add),
        keeps_sum=keeps_sum,
        obstacle=obstacle,
        names=tuple(name for name in SUMMED if getattr(sums, name) is not None),
    )
    return replace(problem, added=added)


def quantized_problem(norm: Norm, operands: Operands, sums: Sums | None, quantized: Quantized) -> Problem:
    """The Problem of a forward whose output is quantized; a sum is always kept."""
    problem = forward_problem(norm, operands) if sums is None else sum_forward_problem(norm, operands, sums, True)
    return replace(problem, quantized=quantized)


def sum_backward_problem(
    norm: Norm,
    operands: BackwardOperands,
    direction: Direction,
    behind: Tensor | None,
    grad_sum: bool,
    gated: Gated | None = None,
    grad_numbers: bool = False,
) -> Problem:
    """The Problem of a backward whose input is s, with post_add, or the output in its place, ``behind`` a norm where an
    activation meets their sum, where ``grad_sum`` says so with the gradient of s, in the strides of s, with ``gated``
    where the gradients of a product before the norm are made, and with ``grad_numbers`` where that of a pre_add (N, C)
    is."""
    problem, input = backward_problem(norm, operands, direction), operands.input
    pre_add, pre_gate = (None, None) if gated is None else (gated.pre_add, gated.pre_gate)
    given = {"pre_add": pre_add, "pre_gate": pre_gate, "post_add": behind}
    gate, unfit = _gate(problem, norm, input, pre_gate)
    added = Added(
        pre_layout=_added_layout(problem, input, pre_add),
        gate=gate,
        post_layout=_added_layout(problem, input, behind),
        grad_sum=grad_sum,
        grad_pre_add=gated is not None and gated.wants_pre_add,
        grad_numbers=grad_numbers,
        obstacle=_obstacle(problem, input, pre_add=pre_add, post_add=behind) or unfit,
        names=tuple(name for name, tensor in given.items() if tensor is not None),
    )
    return replace(problem, added=added)


def _gate(problem: Problem, norm: Norm, input: Tensor, pre_gate: Tensor | None) -> tuple[Gate | None, str | None]:
    """How a gate lies against rows or planes, and why no kernel can read it, or None."""
    if pre_gate is None:
        return None, None
    shape = gate_shape(input.shape, norm.channel_axis, pre_gate.shape)
    gate = None if shape is None else gate_of(norm, input.shape, shape, problem.layout.order)
    if pre_gate.dtype == torch.float64 != input.dtype:
        return gate, "pre_gate is float64 and the input is not"
    return gate, None if gate else "pre_gate is not shared by rows that follow one another, nor by planes"


def _added_layout(problem: Problem, input: Tensor, added: Tensor | None) -> Layout | None:
    """The layout of what is added; None where nothing is, or where no kernel can add it."""
    if added is None or added.shape != input.shape or added.dtype != input.dtype:
        return None
    if input.numel() == 0:
        return problem.layout
    shape, strides, like = input.shape, added.stride(), input.stride()
    if problem.made_of is None:
        return layout_of(problem.norm, shape, strides, like, problem.layout.order)
    norm = problem.called
    if not norm.row_family:
        layout, view = layout_of(norm, shape, strides, like, problem.layout.order), view_of(norm, shape)
        return row_layout(layout, view) if layout and positions_follow(layout, view) else None
    found = rows_in_samples(norm, shape, (like, problem.output_strides, strides))
    if found is None or found[0][:2] != (problem.view.samples, problem.view.spatial):
        return None
    return layout_of(problem.norm, found[0], found[1][2], found[1][0], problem.layout.order)


def _obstacle(problem: Problem, input: Tensor, **added: Tensor | None) -> str | None:
    """Why no kernel can add these tensors, or None."""
    if problem.copies:
        return f"the strides of {' and '.join(problem.copies)} fit no memory order"
    for name, tensor in added.items():
        numbers = tensor is not None and name == "pre_add" and tensor.shape != input.shape
        if numbers and problem.view.spatial != 1 and not problem.of_positions:
            continue  # a number per sample and channel, in any dtype and order
        if tensor is not None and _added_layout(problem, input, tensor) is None:
            return f"{name} has not the input's shape, dtype and memory order"
    return None


def _dtype_of(operand: Tensor | None) -> str | None:
    return None if operand is None else dtype_name(operand.dtype)


def _output_strides(norm: Norm, input: Tensor) -> tuple[int, ...]:
    if input.numel() and is_dense(input):
        return input.stride()
    # input.to("meta") would give a tensor with holes other strides. A dense input returns above, since the first
    # operator on a meta tensor imports sympy, which takes 0.3 s.
    meta = torch.empty_strided(input.shape, input.stride(), dtype=input.dtype, device="meta")
    return empty_output(norm, meta).stride()
