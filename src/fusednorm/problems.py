"""From a call's Norm and tensors to its Problem, by which an instance is chosen."""

from __future__ import annotations

import torch
from torch import Tensor

from fusednorm.dtypes import dtype_name
from fusednorm.norm import Norm
from fusednorm.operands import BackwardOperands, Operands, Wanted
from fusednorm.problem import Direction, Layout, Problem, layout_of, view_of
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
    shape, like = tuple(input.shape), input.stride()
    layout, output_strides = _strides(norm, input)
    if layout is None:
        copies.append("input")
        like = output_strides = packed_strides(shape)
        layout = layout_of(norm, shape, like)
        assert layout is not None
    # torch gives a tensor without elements any strides; they mean nothing.
    output_layout = layout if 0 in shape else layout_of(norm, shape, output_strides, like, layout.order)
    assert output_layout is not None
    grad_layout = None
    if grad_output is not None:
        grad_layout = layout if 0 in shape else layout_of(norm, shape, grad_output.stride(), like, layout.order)
        if grad_layout is None:
            copies.append("grad_output")
            grad_layout = output_layout
    problem = Problem(
        norm=norm,
        direction=direction,
        view=view_of(norm, shape),
        layout=layout,
        dtype=dtype_name(input.dtype),
        weight_dtype=_dtype_of(operands.weight),
        bias_dtype=_dtype_of(operands.bias),
        scale_dtype=_dtype_of(operands.scale),
        shift_dtype=_dtype_of(operands.shift),
        device=input.device.type,
        shape=shape,
        output_strides=output_strides,
        output_layout=output_layout,
        grad_layout=grad_layout,
        dense=output_strides == input.stride(),
        copies=tuple(copies),
    )
    return problem.in_rows if norm.per_position and layout.order == "channels_last" else problem


def _dtype_of(operand: Tensor | None) -> str | None:
    return None if operand is None else dtype_name(operand.dtype)


def _strides(norm: Norm, input: Tensor) -> tuple[Layout | None, tuple[int, ...]]:
    """The input's native layout and the output's strides."""
    layout = layout_of(norm, input.shape, input.stride())
    if input.numel() and is_dense(input):
        return layout, input.stride()
    # input.to("meta") would give a tensor with holes other strides. A dense input returns above, since the first
    # operator on a meta tensor imports sympy, which takes 0.3 s.
    meta = torch.empty_strided(input.shape, input.stride(), dtype=input.dtype, device="meta")
    return layout, empty_output(norm, meta).stride()
