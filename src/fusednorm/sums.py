"""The sums around a norm: what is added to its input, and what is added before its activation.

    s = input + pre_gate · pre_add        z = norm(s)        y = phi(z + post_add)

s is rounded to the input's dtype, has its memory order, and is a tensor of its own.

A call is composed of torch's sums and of the norm's own call, so that whatever watches or transforms torch's operators
sees sums that it knows: compilers, exporters, torch.func, autograd. Composed, z is rounded to the input's dtype before
``post_add`` meets it, and so is their sum before the activation; torch.compile, which fuses both, rounds neither.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from fusednorm.activations import Activation
from fusednorm.arguments import check_sums
from fusednorm.autograd import normalize
from fusednorm.dtypes import compute_dtype
from fusednorm.equivalents import activated
from fusednorm.norm import Norm, norm_of, traced_norm
from fusednorm.operands import Operands, Results, Sums
from fusednorm.private.torch_names import transformed
from fusednorm.problem import gate_shape, spread_shape
from fusednorm.strides import output_order, reordered

_is_compiling = torch.compiler.is_dynamo_compiling


def normalize_sums(
    function: str, norm: Norm, operands: Operands, sums: Sums, wants_statistics: bool = False
) -> Results:
    """The results of a forward of checked operands with sums around it, which are checked here; statistics as in
    :func:`fusednorm.autograd.normalize`."""
    check_sums(function, norm, operands.input, sums)
    return around(
        norm, operands.input, sums, lambda norm, s: normalize(norm, replace(operands, input=s), wants_statistics)
    )


def around(norm: Norm, input: Tensor, sums: Sums, run: Callable[[Norm, Tensor], Results]) -> Results:
    """The results of ``run(norm, s)`` with checked sums around it."""
    pre_add, post_add = sums.pre_add, sums.post_add
    s = input if pre_add is None else before(norm, input, pre_add, sums.pre_gate)
    results = run(norm if post_add is None else _without_activation(norm), s)
    if post_add is not None:
        results.output = after(results.output, post_add, norm.activation)
    results.sum = None if pre_add is None else s
    return results


def before(norm: Norm, input: Tensor, pre_add: Tensor, pre_gate: Tensor | None) -> Tensor:
    """s = input + pre_gate · pre_add, in the widest of the dtypes, then in the input's."""
    if pre_add.shape != input.shape:
        pre_add = pre_add.reshape(spread_shape(input.shape, norm.channel_axis))
    if pre_gate is None:
        total = input + pre_add
    else:
        shape = gate_shape(input.shape, norm.channel_axis, pre_gate.shape)
        assert shape is not None
        # With a dimension for each of the input's: a tensor of none would be rounded to the others' dtype.
        total = torch.addcmul(input, pre_gate.reshape(shape), pre_add)
    total = total.to(input.dtype)
    if _is_compiling() or total.stride() == input.stride() or transformed():
        return total
    return reordered(total, output_order(norm, input))


def after(z: Tensor, post_add: Tensor, activation: Activation | None) -> Tensor:
    """phi(z + post_add) in the dtype of z, a tensor that nobody else has."""
    dtype = z.dtype
    if _is_compiling():
        total = z.to(compute_dtype(dtype)) + post_add
    elif torch.promote_types(dtype, post_add.dtype) == dtype and not transformed():
        total = z.add_(post_add)
    else:
        total = z + post_add
    if activation is not None:
        total = activated(total, activation)
    return total.to(dtype)


def _without_activation(norm: Norm) -> Norm:
    if norm.activation is None:
        return norm
    groups_or_dims = norm.num_groups or norm.num_dims
    make = traced_norm if _is_compiling() else norm_of
    return make(norm.family, groups_or_dims, norm.channel_dim, norm.eps, None, norm.training)
