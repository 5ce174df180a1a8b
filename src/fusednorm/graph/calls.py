"""The call of the library that a norm's operation is: its norm, operands and sums, of meta tensors or of real ones; and
the problem of that call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor

from fusednorm.formats import Quantized
from fusednorm.graph.fusion import Operation
from fusednorm.graph.nodes import groups_or_dims_of
from fusednorm.graph.tensors import Dims, TensorAttributes, same_strides
from fusednorm.modulation import in_samples, sums_in_samples
from fusednorm.norm import Norm, norm_of
from fusednorm.operands import BackwardOperands, Operands, Sums, Wanted
from fusednorm.problem import Problem
from fusednorm.problems import (
    backward_direction,
    backward_problem,
    forward_problem,
    quantized_problem,
    sum_backward_problem,
    sum_forward_problem,
)


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


def meta_call(operation: Operation, dtype: torch.dtype) -> Call:
    """The call of an operation on meta tensors; its data has ``dtype``, and what is added its own."""
    given = operation.operands
    x = given["input"]
    assert x.dims is not None
    operands = Operands(meta_of(x, dtype), _meta(given.get("weight")), _meta(given.get("bias")))
    added = {name: meta_of(tensor, None) for name, tensor in operation.added.items()}
    return call_of(norm_of_forward(operation, x.dims), operands, added)


@dataclass(frozen=True)
class NormProblem:
    """The problem of a norm operation, the dtype in which it runs, the shape in which kernels see x, and the gradients
    that are wanted."""

    problem: Problem
    dtype: torch.dtype
    shape: Dims
    wanted: Wanted = (False, False, False, False, False)


def meta_of(tensor: TensorAttributes, dtype: torch.dtype | None) -> Tensor:
    assert tensor.dims is not None and tensor.strides is not None
    converted = dtype is not None and dtype != tensor.dtype
    strides = converted_strides(tensor) if converted else tensor.strides
    return torch.empty_strided(tensor.dims, strides, dtype=dtype or tensor.dtype, device="meta")


def _meta(tensor: TensorAttributes | None, dtype: torch.dtype | None = None) -> Tensor | None:
    return None if tensor is None else meta_of(tensor, dtype)


def converted_strides(tensor: TensorAttributes) -> Dims:
    """The strides of a converted copy: the tensor's own where it is dense."""
    assert tensor.dims is not None and tensor.strides is not None
    strides: Dims = torch.empty_like(torch.empty_strided(tensor.dims, tensor.strides, device="meta")).stride()
    return strides


def widest(tensors: Sequence[TensorAttributes | None]) -> torch.dtype:
    dtypes = [tensor.dtype for tensor in tensors if tensor is not None and tensor.dtype is not None]
    return reduce(torch.promote_types, dtypes)


def problem_of_operation(operation: Operation, device: torch.device) -> NormProblem:
    """The Problem of a norm operation, by which its instances are found."""
    given, results, kind = operation.operands, operation.outputs, operation.node.kind
    x, weight, bias = given["input"], given.get("weight"), given.get("bias")
    assert kind.family is not None and x.dims is not None
    if kind.operation != "backward":
        quantize = operation.quantize
        dtype = widest([x, results.get("y") if quantize is None else None])
        call = meta_call(operation, dtype)
        problem = call.problem("sum" in results, None if quantize is None else quantize.quantized)
        return NormProblem(replace(problem, device=device.type), dtype, call.shape)
    groups_or_dims = groups_or_dims_of(operation.node, x.dims)
    grad_output = given["grad_output"]
    dtype = widest([grad_output, x, results.get("dx")])
    post_add = operation.added.get("post_add")
    # With post_add every kernel makes dx too.
    wanted = ("dx" in results or post_add is not None, "dscale" in results, "dbias" in results, False, False)
    dscale, dbias = results.get("dscale"), results.get("dbias")
    meta_weight = _meta(weight, None if dscale is None else widest([weight, dscale]))
    meta_bias = _meta(dbias) if bias is None else _meta(bias, None if dbias is None else widest([bias, dbias]))
    norm, none = norm_of(kind.family, groups_or_dims, 1, 0.0, operation.activation), torch.empty(0, device="meta")
    operands = BackwardOperands(meta_of(grad_output, dtype), meta_of(x, dtype), none, none, meta_weight, meta_bias)
    direction = backward_direction(wanted)
    if post_add is None:
        problem = backward_problem(norm, operands, direction)
    else:
        problem = sum_backward_problem(norm, operands, direction, meta_of(post_add, None), False)
    return NormProblem(replace(problem, device=device.type), dtype, x.dims, wanted)


def fits(operation: Operation, found: NormProblem) -> bool:
    """Whether the kernels of an operation with something around it write its results as they lie: s always, and y where
    it is quantized or kernels see x in another shape."""
    x, dy = operation.operands["input"], operation.operands.get("grad_output")
    if dy is not None and meta_of(dy, found.dtype).stride() != meta_of(x, found.dtype).stride():
        return False
    written = [operation.outputs.get(port) for port in ("sum", "dz")]
    if found.shape != x.dims or operation.quantize is not None:
        written.append(operation.outputs.get("y"))
    return all(tensor is None or lies(tensor, found) for tensor in written)


def lies(tensor: TensorAttributes, found: NormProblem) -> bool:
    """Whether a result lies as kernels write it, in their dtype or in 8 bits."""
    try:
        seen = viewed(meta_of(tensor, None), found.shape)
    except RuntimeError:  # the strides have no such view
        return False
    assert seen is not None
    right = seen.dtype == found.dtype or seen.dtype.itemsize == 1
    return right and same_strides(found.shape, seen.stride(), found.problem.output_strides)
