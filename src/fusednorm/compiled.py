"""The ops that a compiled graph calls once autograd is done with it.

They have no kernel for autograd, check nothing, and take the norm as one word. Generated Python code calls the
functions here and not the ops: torch's dispatcher takes 7 us for so many arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fusednorm import dispatch
from fusednorm.norm import norm_of_text
from fusednorm.op_results import FiveTensors, FourTensors, empty_gradients, empty_results, five_tensors, four_tensors
from fusednorm.operands import BackwardOperands, Gradients, Operands, Results, Sums
from fusednorm.problem import spread_shape
from fusednorm.strides import empty_output

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
    "compiled_sum_forward(Tensor input, Tensor? pre_add, Tensor? pre_bias, Tensor? weight, Tensor? bias, "
    "Tensor? scale, Tensor? shift, "
    "str norm, bool[2] wanted) -> (Tensor output, Tensor mean, Tensor rstd, Tensor var, Tensor sum)",
    tags=_TAGS,
)
library.define(
    "compiled_backward(Tensor grad_output, Tensor input, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias, "
    "Tensor? scale, Tensor? shift, str norm, bool[5] output_mask) "
    "-> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias, Tensor grad_scale, Tensor grad_shift)",
    tags=_TAGS,
)


def call_forward(
    input: Tensor,
    weight: Optional,
    bias: Optional,
    scale: Optional,
    shift: Optional,
    mean: Optional,
    var: Optional,
    norm: str,
    statistics: bool,
) -> tuple[Tensor, Optional, Optional, Optional]:
    """The results of a forward as generated Python code reads them, None for one that it does not."""
    operands = Operands(input, weight, bias, scale, shift, mean, var)
    results = dispatch.forward(norm_of_text(norm), operands, statistics)
    mean, rstd = results.mean, results.rstd
    if statistics and mean is None and rstd is not None:
        mean = rstd.new_empty(0)  # rms_norm's, which its backward takes
    return results.output, mean, rstd, results.var


def call_sum_forward(
    input: Tensor,
    pre_add: Optional,
    pre_bias: Optional,
    weight: Optional,
    bias: Optional,
    scale: Optional,
    shift: Optional,
    norm: str,
    wanted: Sequence[bool],
) -> tuple[Tensor, Optional, Optional, Optional, Optional]:
    """The results of a forward of s = input + pre_add + pre_bias, as generated Python code reads them; ``wanted`` says
    whether it reads statistics, and s."""
    statistics, keeps_sum = wanted
    called, operands = norm_of_text(norm), Operands(input, weight, bias, scale, shift)
    sums = Sums(pre_add, pre_bias=pre_bias)
    plan = dispatch.sum_forward_plan(called, operands, sums, keeps_sum)
    if plan is not None:
        results = plan(operands, sums, statistics)
    else:
        total = sum_of(input, pre_add, pre_bias)
        results = dispatch.forward(called, replace(operands, input=total), statistics)
        results.sum = total
    return results.output, results.mean, results.rstd, results.var, results.sum


def sum_of(input: Tensor, pre_add: Optional, pre_bias: Optional) -> Tensor:
    """input + pre_add + pre_bias, in the input's dtype and rounded to it after each sum, as torch's sums are; the
    channels are the second dimension, ``pre_add`` has the input's shape or is (N, C)."""
    total = input
    if pre_bias is not None:
        total = (total + pre_bias.reshape(-1, *(1,) * (input.dim() - 2))).to(input.dtype)
    if pre_add is not None:
        if pre_add.shape != input.shape:
            pre_add = pre_add.reshape(spread_shape(input.shape, 1))
        total = (total + pre_add).to(input.dtype)
    return total


def call_backward(
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
) -> tuple[Optional, Optional, Optional, Optional, Optional]:
    """The gradients as generated Python code reads them, None for one that it does not."""
    operands = BackwardOperands(grad_output, input, mean, rstd, weight, bias, scale, shift)
    a, b, c, d, e = output_mask
    found = dispatch.backward(norm_of_text(norm), operands, (a, b, c, d, e))
    return found.input, found.weight, found.bias, found.scale, found.shift


def _forward_kernel(*arguments: Any) -> FourTensors:
    return four_tensors(Results(*call_forward(*arguments)))


def _sum_forward_kernel(*arguments: Any) -> FiveTensors:
    output, mean, rstd, var, total = call_sum_forward(*arguments)
    results = four_tensors(Results(output, mean, rstd, var))
    return *results, arguments[0].new_empty(0) if total is None else total


def _backward_kernel(*arguments: Any) -> FiveTensors:
    return five_tensors(Gradients(*call_backward(*arguments)), arguments[1])


library.impl("compiled_forward", _forward_kernel, "CompositeExplicitAutograd")
library.impl("compiled_sum_forward", _sum_forward_kernel, "CompositeExplicitAutograd")
library.impl("compiled_backward", _backward_kernel, "CompositeExplicitAutograd")


@torch.library.register_fake("fusednorm::compiled_forward", lib=library)
def _forward_fake(*arguments: Any) -> FourTensors:
    return empty_results(norm_of_text(arguments[7]), arguments[0])


@torch.library.register_fake("fusednorm::compiled_sum_forward", lib=library)
def _sum_forward_fake(*arguments: Any) -> FiveTensors:
    input, norm, (_, keeps_sum) = arguments[0], norm_of_text(arguments[7]), arguments[8]
    return *empty_results(norm, input), empty_output(norm, input) if keeps_sum else input.new_empty(0)


@torch.library.register_fake("fusednorm::compiled_backward", lib=library)
def _backward_fake(*arguments: Any) -> FiveTensors:
    *operands, norm, output_mask = arguments
    return empty_gradients(norm_of_text(norm), BackwardOperands(*operands), output_mask)
