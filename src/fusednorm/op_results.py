"""The results of the registered ops: tensors alone, since a schema has no optional result, and empty ones for fakes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fusednorm.dtypes import compute_dtype
from fusednorm.norm import Norm
from fusednorm.operands import BackwardOperands, Gradients, Results
from fusednorm.problem import statistics_shape, view_of
from fusednorm.strides import empty_output

FourTensors = tuple[Tensor, Tensor, Tensor, Tensor]
FiveTensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def four_tensors(results: Results) -> FourTensors:
    """Results as an op returns them: an empty tensor for None, in the dtype of the statistics where there are some."""
    output, like = results.output, results.output if results.rstd is None else results.rstd
    mean, rstd, var = (
        like.new_empty(0) if tensor is None else tensor for tensor in (results.mean, results.rstd, results.var)
    )
    return output, mean, rstd, var


def five_tensors(gradients: Gradients, like: Tensor) -> FiveTensors:
    """Gradients as an op returns them: an empty tensor for None."""
    a, b, c, d, e = (
        like.new_empty(0) if gradient is None else gradient
        for gradient in (gradients.input, gradients.weight, gradients.bias, gradients.scale, gradients.shift)
    )
    return a, b, c, d, e


def empty_results(norm: Norm, input: Tensor) -> FourTensors:
    """What a forward returns, not computed."""
    shape, dtype = statistics_shape(norm, view_of(norm, input.shape)), compute_dtype(input.dtype)
    mean = input.new_empty(shape if norm.has_mean else (0,), dtype=dtype)
    var = input.new_empty(shape if norm.has_variance else (0,), dtype=dtype)
    return empty_output(norm, input), mean, input.new_empty(shape, dtype=dtype), var


def empty_gradients(norm: Norm, operands: BackwardOperands, wanted: Sequence[bool]) -> FiveTensors:
    """What a backward returns, not computed."""
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
