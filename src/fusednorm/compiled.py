"""The two ops that a compiled graph calls once autograd is done with it.

They have no kernel for autograd, check nothing, and take the norm as one word. Generated Python code calls the
functions here and not the ops: torch's dispatcher takes 7 us for so many arguments.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fusednorm import dispatch
from fusednorm.norm import norm_of_text
from fusednorm.op_results import FiveTensors, FourTensors, empty_gradients, empty_results, five_tensors, four_tensors
from fusednorm.operands import BackwardOperands, Operands

Optional = Tensor | None

library = torch.library.Library("fusednorm", "FRAGMENT")
# Where a lowering does not choose the strides of the arguments, they are those that the fakes saw.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
library.define(
    "compiled_forward(Tensor input, Tensor? weight, Tensor? bias, Tensor? scale, Tensor? shift, Tensor? mean, "
    "Tensor? var, str norm, bool statistics) -> (Tensor output, Tensor mean, Tensor rstd, Tensor var)",
    tags=_TAGS,
)
library.define(
    "compiled_backward(Tensor grad_output, Tensor input, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias, "
    "Tensor? scale, Tensor? shift, str norm, bool[5] output_mask) "
    "-> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias, Tensor grad_scale, Tensor grad_shift)",
    tags=_TAGS,
)


def compiled_forward(
    input: Tensor,
    weight: Optional,
    bias: Optional,
    scale: Optional,
    shift: Optional,
    mean: Optional,
    var: Optional,
    norm: str,
    statistics: bool,
) -> FourTensors:
    operands = Operands(input, weight, bias, scale, shift, mean, var)
    return four_tensors(dispatch.forward(norm_of_text(norm), operands, statistics))


def compiled_backward(
    grad_output: Tensor,
    input: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Optional,
    bias: Optional,
    scale: Optional,
    shift: Optional,
    norm: str,
    output_mask: Sequence[bool],
) -> FiveTensors:
    operands = BackwardOperands(grad_output, input, mean, rstd, weight, bias, scale, shift)
    a, b, c, d, e = output_mask
    return five_tensors(dispatch.backward(norm_of_text(norm), operands, (a, b, c, d, e)), input)


library.impl("compiled_forward", compiled_forward, "CompositeExplicitAutograd")
library.impl("compiled_backward", compiled_backward, "CompositeExplicitAutograd")


@torch.library.register_fake("fusednorm::compiled_forward", lib=library)
def _forward_fake(input: Tensor, *operands: Tensor | str | bool | None) -> FourTensors:
    norm = operands[6]
    assert isinstance(norm, str)
    return empty_results(norm_of_text(norm), input)


@torch.library.register_fake("fusednorm::compiled_backward", lib=library)
def _backward_fake(
    grad_output: Tensor,
    input: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Optional,
    bias: Optional,
    scale: Optional,
    shift: Optional,
    norm: str,
    output_mask: Sequence[bool],
) -> FiveTensors:
    operands = BackwardOperands(grad_output, input, mean, rstd, weight, bias, scale, shift)
    return empty_gradients(norm_of_text(norm), operands, output_mask)
