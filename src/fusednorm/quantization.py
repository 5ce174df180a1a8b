"""layer_norm and rms_norm with an 8-bit output: q = saturate(round(y (1 / scale))), ties to even, and the rows' scales.

y is the norm's float32 output, before it would be rounded to the input's dtype; a float64 y is rounded to float32. The
scale is given, one for all, or each row has amax / largest of its own.

There is no backward. A call goes straight to its plan, or through the op of this module, which torch.compile and
torch.export record. ``pre_add`` is fused where the instance fuses it, and else added first by torch's operators.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fusednorm import dispatch
from fusednorm.arguments import (
    check_forward_only,
    check_out_scale,
    check_quantized,
    check_quantized_sums,
    check_sums,
)
from fusednorm.backends import reference
from fusednorm.dtypes import dtype_name
from fusednorm.formats import Quantized
from fusednorm.gate import batched, plain, straight_forward
from fusednorm.inductor import prepare
from fusednorm.library import library
from fusednorm.modulation import in_samples, in_shape, sums_in_samples
from fusednorm.norm import Norm, norm_of, traced_norm
from fusednorm.op_arguments import forward_norm
from fusednorm.operands import Operands, Results, Sums
from fusednorm.private.torch_names import transformed
from fusednorm.problem import scale_shape
from fusednorm.strides import empty_output
from fusednorm.sums import before, straight

OP = "fusednorm::norm_quantized"
TwoTensors = tuple[Tensor, Tensor]

library.define(
    "norm_quantized(Tensor input, Tensor? weight, Tensor? bias, Tensor? scale, Tensor? shift, Tensor? out_scale, "
    "str family, int num_groups, int channel_dim, float eps, str activation, float parameter, str out_dtype) "
    "-> (Tensor output, Tensor row_scale)",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
)
QUANTIZED = torch.ops.fusednorm.norm_quantized.default


def quantized_outputs(
    function: str,
    norm: Norm,
    operands: Operands,
    sums: Sums | None,
    out_dtype: torch.dtype | None,
    out_scale: Tensor | str | None,
) -> Tensor | tuple[Tensor, ...]:
    """q, the scales of the rows and s, as far as they were asked for. The norm and its operands are checked but for
    scale and shift; everything else is checked here."""
    scale = None if isinstance(out_scale, str) and out_scale == "row" else out_scale
    check_quantized(function, norm, out_dtype, out_scale)
    check_out_scale(function, operands.input, scale)
    if sums is not None:
        check_sums(function, norm, operands.input, sums)
        check_quantized_sums(function, sums)
    added = () if sums is None else (sums.pre_add, sums.pre_gate)
    assert isinstance(out_dtype, torch.dtype) and not isinstance(scale, str)
    check_forward_only(function, (*operands.tensors(), *added, scale))
    quantized = Quantized(dtype_name(out_dtype), scale is None)
    if operands.scale is None and operands.shift is None:
        results = _summed(norm, operands, sums, quantized, scale)
    else:
        results = _modulated(norm, operands, sums, quantized, scale)
    s = results.sum if sums is not None and sums.return_sum else None
    found = tuple(each for each in (results.output, results.scale, s) if each is not None)
    return found if len(found) > 1 else found[0]


def _summed(
    norm: Norm, operands: Operands, sums: Sums | None, quantized: Quantized, out_scale: Tensor | None
) -> Results:
    if sums is None or sums.pre_add is None:
        return _quantize(norm, operands, quantized, out_scale)
    if straight(operands, sums) and (out_scale is None or plain(out_scale)):
        plan = dispatch.quantized_plan(norm, operands, sums, quantized)
        if plan is not None:
            return plan(operands, sums, out_scale)
    s = before(norm, operands.input, sums.pre_add, sums.pre_gate)
    results = _quantize(norm, replace(operands, input=s), quantized, out_scale)
    results.sum = s
    return results


def _modulated(
    norm: Norm, operands: Operands, sums: Sums | None, quantized: Quantized, out_scale: Tensor | None
) -> Results:
    """With a scale or a shift: as a norm over the channels of samples and positions."""
    input, num_dims = operands.input, norm.num_dims
    seen = in_samples(norm.family, operands, num_dims)
    around = sums and sums_in_samples(sums, input.shape, num_dims, seen.input.shape)
    make = traced_norm if torch.compiler.is_dynamo_compiling() else norm_of
    over = make(norm.family, 0, -1, norm.eps, norm.activation, True)
    results = _summed(over, seen, around, quantized, out_scale)
    results.output = in_shape(norm.family, results.output, input, num_dims)
    if results.sum is not None:
        results.sum = in_shape(norm.family, results.sum, input, num_dims)
    if results.scale is not None:
        results.scale = results.scale.view(scale_shape(norm, input.shape))
    return results


def _quantize(norm: Norm, operands: Operands, quantized: Quantized, out_scale: Tensor | None) -> Results:
    if not torch.compiler.is_dynamo_compiling():
        if straight_forward(operands) and (out_scale is None or plain(out_scale)):
            return dispatch.quantized_forward(norm, operands, quantized, out_scale)
        if transformed() or batched(operands):
            return reference.quantized_forward(norm, operands, quantized, out_scale)
    o = operands
    output, scale = QUANTIZED(
        o.input, o.weight, o.bias, o.scale, o.shift, out_scale, *norm.op_arguments, quantized.dtype
    )
    return Results(output, scale=scale if quantized.per_row else None)


# --- the op ---


def checked(arguments: tuple[Any, ...]) -> tuple[Norm, Operands, Quantized, Tensor | None]:
    """What the op's arguments mean; ValueError or TypeError where they do not fit each other."""
    *tensors, out_scale, family, num_groups, channel_dim, eps, activation, parameter, out_dtype = arguments
    operands = Operands(*tensors)
    norm = forward_norm(OP, operands, family, num_groups, channel_dim, eps, activation, parameter)
    check_quantized(OP, norm, getattr(torch, out_dtype, out_dtype), out_scale)
    check_out_scale(OP, operands.input, out_scale)
    return norm, operands, Quantized(out_dtype, out_scale is None), out_scale


def _kernel(*arguments: Any) -> TwoTensors:
    return two_tensors(dispatch.quantized_forward(*checked(arguments)))


def two_tensors(results: Results) -> TwoTensors:
    """Results as the op returns them."""
    return results.output, _or_empty(results.scale, results.output)


def _or_empty(scale: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0, dtype=torch.float32) if scale is None else scale


@torch.library.register_fake(OP, lib=library)
def quantized_fake(*arguments: Any) -> TwoTensors:
    prepare()
    norm, operands, quantized, _ = checked(arguments)
    input = operands.input
    shape = scale_shape(norm, input.shape) if quantized.per_row else (0,)
    return empty_output(norm, input, getattr(torch, quantized.dtype)), input.new_empty(shape, dtype=torch.float32)


library.impl("norm_quantized", _kernel, "CompositeExplicitAutograd")
