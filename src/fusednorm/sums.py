"""The sums around a norm: what is added to its input, and what is added before its activation.

    s = input + pre_gate · pre_add        z = norm(s)        y = phi(z + post_add)

s is rounded to the input's dtype, has its memory order, and is a tensor of its own.

Where the norm's instance fuses the sums, an eager call is one kernel forward and one backward, and z is never rounded.
A profiler sees that kernel, and on a CPU a record of the call, by the family's name.
Any other call is composed of torch's sums and of the norm's own call, so that whatever watches or transforms torch's
operators sees sums that it knows: compilers, exporters, torch.func, checkpoints, second derivatives. Composed, z is
rounded to the input's dtype before ``post_add`` meets it, and so is their sum before the activation, but under
torch.compile, which fuses the two.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import record_function as recorded

from fusednorm import dispatch
from fusednorm.activations import Activation
from fusednorm.arguments import check_sums
from fusednorm.autograd import normalize
from fusednorm.dtypes import compute_dtype
from fusednorm.equivalents import activated
from fusednorm.gate import batched, plain, straight_forward
from fusednorm.norm import Norm
from fusednorm.operands import Operands, Results, Sums
from fusednorm.private.torch_names import is_batched, profiled, saved_tensors_hooks, transformed, watched
from fusednorm.problem import gate_shape, spread_shape
from fusednorm.strides import output_order, reordered
from fusednorm.sum_autograd import differentiable
from fusednorm.sum_gradients import without_activation

_UNRECORDED: AbstractContextManager[Any] = nullcontext()
_is_compiling = torch.compiler.is_dynamo_compiling
_grad_enabled = torch.is_grad_enabled


def normalize_sums(
    function: str, norm: Norm, operands: Operands, sums: Sums, wants_statistics: bool = False
) -> Results:
    """The results of a forward of checked operands with sums around it, which are checked here; statistics as in
    :func:`fusednorm.autograd.normalize`."""
    check_sums(function, norm, operands.input, sums)
    if straight(operands, sums):
        results = fused(norm, operands, sums, wants_statistics)
        if results is not None:
            return results

    def run(norm: Norm, s: Tensor) -> Results:
        return normalize(norm, replace(operands, input=s), wants_statistics)

    return around(norm, operands.input, sums, run)


def fused(norm: Norm, operands: Operands, sums: Sums, wants_statistics: bool = False) -> Results | None:
    """The results of a forward of checked operands and sums that goes straight, where its instance fuses them."""
    differs = has_gradients(operands, sums)
    plan = dispatch.sum_forward_plan(norm, operands, sums, keeps_sum(sums, differs))
    if plan is None:
        return None
    with recorded(f"fusednorm::{norm.family}") if profiled() else _UNRECORDED:
        return differentiable(norm, operands, sums, plan) if differs else plan(operands, sums, wants_statistics)


def has_gradients(operands: Operands, sums: Sums) -> bool:
    tensors = (*operands.tensors(), sums.pre_add, sums.pre_gate, sums.post_add)
    return _grad_enabled() and any(each is not None and each.requires_grad for each in tensors)


def keeps_sum(sums: Sums, has_gradients: bool) -> bool:
    """Whether a forward keeps s: for the caller, or for its backward."""
    return sums.pre_add is not None and (sums.return_sum or has_gradients)


def straight(operands: Operands, sums: Sums) -> bool:
    """Whether a call may go past torch's dispatcher, as in :mod:`fusednorm.gate`; where hooks see what is saved it may
    not, since they would see other tensors under a mode."""
    if _is_compiling() or saved_tensors_hooks(False) is not None or not straight_forward(operands, profiled=True):
        return False
    added = [each for each in (sums.pre_add, sums.pre_gate, sums.post_add) if each is not None]
    return not transformed() and not batched(operands) and all(plain(each) and not is_batched(each) for each in added)


def around(norm: Norm, input: Tensor, sums: Sums, run: Callable[[Norm, Tensor], Results]) -> Results:
    """The results of ``run(norm, s)`` with checked sums around it."""
    pre_add, post_add = sums.pre_add, sums.post_add
    s = input if pre_add is None else before(norm, input, pre_add, sums.pre_gate)
    results = run(norm if post_add is None else without_activation(norm), s)
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
    """phi(z + post_add) in the dtype of z, a tensor that nobody else has, but a mode that watches: a selective
    checkpoint keeps it."""
    dtype = z.dtype
    if _is_compiling():
        total = z.to(compute_dtype(dtype)) + post_add
    elif torch.promote_types(dtype, post_add.dtype) == dtype and not transformed() and not watched():
        total = z.add_(post_add)
    else:
        total = z + post_add
    if activation is not None:
        total = activated(total, activation)
    return total.to(dtype)
