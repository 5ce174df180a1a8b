"""The call of the library that a norm's operation is: its norm, operands and sums, of meta tensors or of real ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fusednorm.formats import Quantized
from fusednorm.graph.fusion import Operation
from fusednorm.graph.nodes import groups_or_dims_of
from fusednorm.graph.tensors import Dims, TensorAttributes
from fusednorm.modulation import in_samples, sums_in_samples
from fusednorm.norm import Norm, norm_of
from fusednorm.operands import Operands, Sums
from fusednorm.problem import Problem
from fusednorm.problems import forward_problem, quantized_problem, sum_forward_problem


@dataclass(frozen=True)
class Call:
    """A forward with what is around it; ``shape`` is that in which its kernels see the input."""

    norm: Norm
    operands: Operands
    sums: Sums | None
    shape: Dims

    def problem(self, keeps_sum: bool, quantized: Quantized | None = None) -> Problem:
        if quantized is not None:
            return quantized_problem(self.norm, self.operands, self.sums, quantized)
        if self.sums is None:
            return forward_problem(self.norm, self.operands)
        return sum_forward_problem(self.norm, self.operands, self.sums, keeps_sum)


def norm_of_forward(operation: Operation, dims: Dims) -> Norm:
    """The norm of a forward operation whose x has these dims."""
    kind, given = operation.node.kind, operation.operands
    assert kind.family is not None
    # The kernels take the variance, and a given rstd contains eps already.
    eps = 0.0 if "rstd" in given else float(operation.node.attributes["epsilon"])
    training = kind.operation != "inference" and "rstd" not in given
    groups_or_dims = groups_or_dims_of(replace(operation.node, inputs=dict(operation.inputs)), dims)
    return norm_of(kind.family, groups_or_dims, 1, eps, operation.activation, training)


def call_of(norm: Norm, operands: Operands, added: Mapping[str, Tensor]) -> Call:
    """The call of these operands with what the nodes around the norm bring, by the library's names."""
    shape = operands.input.shape
    named = {name: _per_plane(norm, shape, tensor) for name, tensor in added.items()}
    sums = Sums(named.get("pre_add"), named.get("pre_gate"), named.get("post_add"))
    around = sums if sums.keywords() else None
    scale, shift = named.get("scale"), named.get("shift")
    if scale is None and shift is None:
        return Call(norm, operands, around, tuple(shape))
    seen = replace(operands, scale=scale, shift=shift)
    if norm.row_family:
        seen = in_samples(norm.family, seen, norm.num_dims)
        around = around and sums_in_samples(around, shape, norm.num_dims, seen.input.shape)
        norm = norm_of(norm.family, 0, -1, norm.eps, norm.activation, norm.training)
    return Call(norm, seen, around, tuple(seen.input.shape))


def _per_plane(norm: Norm, shape: torch.Size, tensor: Tensor) -> Tensor:
    """A tensor of the dims (N, C, 1, ...) as (N, C), which the library takes; any other as it is."""
    planes = not norm.row_family and tensor.shape != shape
    return tensor.reshape(shape[:2]) if planes and tensor.numel() == shape[0] * shape[1] else tensor


def viewed(tensor: Tensor | None, shape: Dims) -> Tensor | None:
    """A tensor to write into, in the shape in which kernels see it."""
    return tensor if tensor is None or tensor.shape == shape else tensor.view(shape)


Meta = Callable[[TensorAttributes, torch.dtype | None], Tensor]


def meta_call(operation: Operation, dtype: torch.dtype, meta: Meta) -> Call:
    """The call of an operation on meta tensors; its data has ``dtype``, and the sums keep their own."""
    given = operation.operands
    x, weight, bias = given["input"], given.get("weight"), given.get("bias")
    assert x.dims is not None
    operands = Operands(
        meta(x, dtype), None if weight is None else meta(weight, None), None if bias is None else meta(bias, None)
    )
    added = {name: meta(tensor, None) for name, tensor in operation.added.items()}
    return call_of(norm_of_forward(operation, x.dims), operands, added)
