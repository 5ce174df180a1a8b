"""The two ops that torch sees: schemas, kernels and fakes.

``torch.ops.fusednorm.norm_forward`` and ``norm_backward`` are what torch.compile, torch.export and every dispatch mode
see. Their arguments are a :class:`~fusednorm.norm.Norm` and its operands, flattened; the rest of the package passes the
two whole. Exported programs on disk have the schemas' names: ``num_groups`` is the package's ``groups_or_dims``, and
``parameter`` its ``activation_parameter``, silu's beta or leaky_relu's slope.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusednorm import dispatch
from fusednorm.dtypes import compute_dtype
from fusednorm.norm import Norm
from fusednorm.op_arguments import backward_norm, forward_norm
from fusednorm.operands import BackwardOperands, Gradients, Operands, Results
from fusednorm.problem import statistics_shape, view_of
from fusednorm.strides import empty_output

FORWARD, BACKWARD = "fusednorm::norm_forward", "fusednorm::norm_backward"

FourTensors = tuple[Tensor, Tensor, Tensor, Tensor]
FiveTensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]

library = torch.library.Library("fusednorm", "DEF")
# Outputs follow the input's strides, so a compiled graph must hand over the strides that the fake saw.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
library.define(
    "norm_forward(Tensor input, Tensor? weight, Tensor? bias, Tensor? scale, Tensor? shift, Tensor? mean, Tensor? var, "
    "str family, int num_groups, int channel_dim, float eps, str activation, float parameter) "
    "-> (Tensor output, Tensor mean, Tensor rstd, Tensor var)",
    tags=_TAGS,
)
library.define(
    "norm_backward(Tensor grad_output, Tensor input, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias, "
    "Tensor? scale, Tensor? shift, str family, int num_groups, int channel_dim, str activation, float parameter, "
    "bool training, bool[5] output_mask) "
    "-> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias, Tensor grad_scale, Tensor grad_shift)",
    tags=_TAGS,
)
_forward_op = torch.ops.fusednorm.norm_forward.default
_backward_op = torch.ops.fusednorm.norm_backward.default


def forward_op(norm: Norm, operands: Operands) -> Results:
    """norm_forward of a Norm and its operands; a result that the norm does not have is empty."""
    return Results(*_forward_op(*operands.tensors(), *norm.op_arguments))


def backward_op(norm: Norm, operands: BackwardOperands, wanted: Sequence[bool]) -> Gradients:
    """norm_backward of a Norm and its operands; a gradient that is absent or not wanted is empty."""
    o, (family, groups_or_dims, channel_dim, _, name, activation_parameter) = operands, norm.op_arguments
    mean = o.rstd.new_empty(0) if o.mean is None else o.mean
    return Gradients(
        *_backward_op(
            o.grad_output, o.input, mean, o.rstd, o.weight, o.bias, o.scale, o.shift, family, groups_or_dims,
            channel_dim, name, activation_parameter, norm.training, wanted,
        )
    )  # fmt: skip


def four_tensors(results: Results) -> FourTensors:
    """Results as norm_forward returns them: an empty tensor for None."""
    output, rstd = results.output, results.rstd
    assert rstd is not None
    mean, var = (rstd.new_empty(0) if tensor is None else tensor for tensor in (results.mean, results.var))
    return output, mean, rstd, var


def five_tensors(gradients: Gradients, like: Tensor) -> FiveTensors:
    """Gradients as norm_backward returns them: an empty tensor for None."""
    a, b, c, d, e = (
        like.new_empty(0) if gradient is None else gradient
        for gradient in (gradients.input, gradients.weight, gradients.bias, gradients.scale, gradients.shift)
    )
    return a, b, c, d, e


def _forward_kernel(*arguments: Any) -> FourTensors:
    operands = Operands(*arguments[:7])
    return four_tensors(dispatch.forward(forward_norm(FORWARD, operands, *arguments[7:]), operands))


def _backward_kernel(*arguments: Any) -> FiveTensors:
    operands, wanted = BackwardOperands(*arguments[:8]), arguments[-1]
    norm = backward_norm(BACKWARD, operands, *arguments[8:])
    return five_tensors(dispatch.backward(norm, operands, wanted), operands.input)


library.impl("norm_forward", _forward_kernel, "CompositeExplicitAutograd")
library.impl("norm_backward", _backward_kernel, "CompositeExplicitAutograd")


@torch.library.register_fake(FORWARD, lib=library)
def _forward_fake(*arguments: Any) -> FourTensors:
    operands = Operands(*arguments[:7])
    norm = forward_norm(FORWARD, operands, *arguments[7:])
    input = operands.input
    shape, dtype = statistics_shape(norm, view_of(norm, input.shape)), compute_dtype(input.dtype)
    mean = input.new_empty(shape if norm.has_mean else (0,), dtype=dtype)
    var = input.new_empty(shape if norm.has_variance else (0,), dtype=dtype)
    return empty_output(norm, input), mean, input.new_empty(shape, dtype=dtype), var


@torch.library.register_fake(BACKWARD, lib=library)
def _backward_fake(*arguments: Any) -> FiveTensors:
    operands, wanted = BackwardOperands(*arguments[:8]), arguments[-1]
    norm = backward_norm(BACKWARD, operands, *arguments[8:])
    input = operands.input
    parameters = (operands.weight, operands.bias, operands.scale, operands.shift)
    return five_tensors(
        Gradients(
            empty_output(norm, input) if wanted[0] else None,
            *(
                like.new_empty(like.shape) if like is not None and want else None
                for like, want in zip(parameters, wanted[1:], strict=True)
            ),
        ),
        input,
    )
