"""The two differentiable ops that torch sees: schemas, kernels and fakes. A third one raises an error.

``torch.ops.fusednorm.norm_forward`` and ``norm_backward`` are what torch.compile, torch.export and every dispatch mode
see. Their arguments are a :class:`~fusednorm.norm.Norm` and its operands, flattened; the rest of the package passes the
two whole. Exported programs on disk have the schemas' names: ``num_groups`` is the package's ``groups_or_dims``, and
``parameter`` its ``activation_parameter``, silu's beta or leaky_relu's slope. Once autograd is done with a graph,
torch.compile's default backend replaces them (``inductor``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusednorm import dispatch
from fusednorm.inductor import prepare
from fusednorm.norm import Norm
from fusednorm.op_arguments import backward_norm, forward_norm
from fusednorm.op_results import FiveTensors, FourTensors, empty_gradients, empty_results, five_tensors, four_tensors
from fusednorm.operands import BackwardOperands, Gradients, Operands, Results
from fusednorm.refusal import KINDS

FORWARD, BACKWARD = "fusednorm::norm_forward", "fusednorm::norm_backward"

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
library.define("refuse(str kind, str words) -> ()", tags=(torch.Tag.pt2_compliant_tag,))
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


def _forward_kernel(*arguments: Any) -> FourTensors:
    operands = Operands(*arguments[:7])
    return four_tensors(dispatch.forward(forward_norm(FORWARD, operands, *arguments[7:]), operands))


def _backward_kernel(*arguments: Any) -> FiveTensors:
    operands, wanted = BackwardOperands(*arguments[:8]), arguments[-1]
    norm = backward_norm(BACKWARD, operands, *arguments[8:])
    return five_tensors(dispatch.backward(norm, operands, wanted), operands.input)


def _refuse(kind: str, words: str) -> None:
    """Raise the error of a call that is compiled, see ``refusal``."""
    raise KINDS[kind](words)


library.impl("norm_forward", _forward_kernel, "CompositeExplicitAutograd")
library.impl("norm_backward", _backward_kernel, "CompositeExplicitAutograd")
library.impl("refuse", _refuse, "CompositeExplicitAutograd")
torch.library.register_fake("fusednorm::refuse", _refuse, lib=library)


@torch.library.register_fake(FORWARD, lib=library)
def forward_fake(*arguments: Any) -> FourTensors:
    prepare()
    operands = Operands(*arguments[:7])
    return empty_results(forward_norm(FORWARD, operands, *arguments[7:]), operands.input)


@torch.library.register_fake(BACKWARD, lib=library)
def _backward_fake(*arguments: Any) -> FiveTensors:
    prepare()
    operands = BackwardOperands(*arguments[:8])
    return empty_gradients(backward_norm(BACKWARD, operands, *arguments[8:]), operands, arguments[-1])
