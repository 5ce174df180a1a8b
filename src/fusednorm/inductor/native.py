"""torch's own formulas, in the ops that torch's functions decompose into.

Inductor makes of it what it makes of those functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusednorm.equivalents import activated
from fusednorm.operands import BackwardOperands, Gradients, Operands, Results
from fusednorm.private.inductor_names import batch_norm_of_given, rms_norm_backward, rms_norm_with_rstd
from fusednorm.problem import Problem

aten = torch.ops.aten


def has_formula(problem: Problem, statistics: bool) -> bool:
    """Whether torch has this forward as one function and an activation.

    torch rounds the statistics of group_norm to the input's dtype, and a backward needs them as they are.
    """
    norm, dtypes = problem.called, (problem.weight_dtype, problem.bias_dtype)
    if norm.per_position:
        return False
    if problem.backward or problem.modulated or any(dtype not in (None, problem.dtype, "float32") for dtype in dtypes):
        return False
    if norm.row_family:
        rms = rms_norm_with_rstd is not None and problem.bias_dtype is None
        return norm.family == "layer_norm" or rms
    if not norm.training and batch_norm_of_given is None:
        return False
    return norm.channel_dim == 1 and not statistics and not norm.has_variance


def is_differentiable(problem: Problem) -> bool:
    """Whether torch has both this forward and its backward as one function each: those of rows, of one dtype."""
    norm = problem.called
    if not norm.row_family or norm.activation is not None or problem.modulated or problem.constant:
        return False
    if any(dtype not in (None, problem.dtype) for dtype in (problem.weight_dtype, problem.bias_dtype)):
        return False
    both = rms_norm_with_rstd is not None and rms_norm_backward is not None and problem.bias_dtype is None
    return norm.family == "layer_norm" or both


def run(problem: Problem, operands: Operands) -> Results:
    """The results of a forward, as nodes of a trace."""
    norm, view, o = problem.called, problem.view, operands
    x = o.input
    mean = rstd = None
    if norm.family == "layer_norm":
        y, mean, rstd = aten.native_layer_norm.default(x, problem.parameter_shape, o.weight, o.bias, norm.eps)
    elif norm.family == "rms_norm":
        y, rstd = rms_norm_with_rstd(x, problem.parameter_shape, o.weight, norm.eps)
    elif not norm.training:
        assert o.mean is not None
        assert o.var is not None
        found: Any = batch_norm_of_given(x, o.weight, o.bias, o.mean, o.var, 0.0, norm.eps)
        y = found[0]
    else:
        y = aten.native_group_norm.default(
            x, o.weight, o.bias, view.samples, view.channels, view.spatial, view.groups, norm.eps
        )[0]
    shape = problem.statistics_shape
    used = norm.activation
    return Results(
        y if used is None else activated(y, used),
        None if mean is None else mean.reshape(shape),
        None if rstd is None else rstd.reshape(shape),
    )


def run_backward(problem: Problem, operands: BackwardOperands, wanted: Sequence[bool]) -> Gradients:
    """The gradients of rows, as nodes of a trace; those that nobody reads are left out as dead code."""
    shape, o = problem.parameter_shape, operands
    units = (*o.input.shape[: o.input.dim() - len(shape)], *(1 for _ in shape))
    rstd = o.rstd.reshape(units)
    if problem.norm.family == "rms_norm":
        mask = [wanted[0], o.weight is not None and wanted[1]]
        dx, dw = rms_norm_backward(o.grad_output, o.input, shape, rstd, o.weight, mask)
        return Gradients(dx, dw, None, None, None)
    assert o.mean is not None
    mask = [wanted[0], o.weight is not None and wanted[1], o.bias is not None and wanted[2]]
    dx, dw, db = aten.native_layer_norm_backward.default(
        o.grad_output, o.input, shape, o.mean.reshape(units), rstd, o.weight, o.bias, mask
    )
    return Gradients(dx, dw, db, None, None)
