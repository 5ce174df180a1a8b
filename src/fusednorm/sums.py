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
from fusednorm.autograd import gradients, normalize
from fusednorm.backends import reference
from fusednorm.choice import Selection, as_selected, lost, tuned_file
from fusednorm.dtypes import compute_dtype
from fusednorm.equivalents import activated
from fusednorm.gate import batched, plain, readable, straight_backward, straight_forward
from fusednorm.instance import SumForwardPlan
from fusednorm.norm import Norm, norm_of, traced_norm
from fusednorm.operands import (
    BackwardOperands,
    Gated,
    Gradients,
    Operands,
    Results,
    SumGradients,
    Sums,
    Wanted,
)
from fusednorm.private.torch_names import (
    is_batched,
    profiled,
    saved_tensors_hooks,
    short_apply,
    transformed,
    watched,
)
from fusednorm.problem import gate_shape, spread_shape
from fusednorm.strides import output_order, reordered

#: Bytes from which on the sums of planes repay the several launches of a norm's backward. Not measured on a GPU.
LEAST_SUMMED = 1 << 21
#: Bytes from which on a GPU's backward makes the gradient of a pre_add (N, C) too.
LEAST_NUMBERED = 1 << 21

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
    tensors = (*operands.tensors(), sums.pre_add, sums.pre_gate, sums.post_add)
    differentiable = _grad_enabled() and any(each is not None and each.requires_grad for each in tensors)
    keeps_sum = sums.pre_add is not None and (sums.return_sum or differentiable)
    plan = dispatch.sum_forward_plan(norm, operands, sums, keeps_sum)
    if plan is None:
        return None
    with recorded(f"fusednorm::{norm.family}") if profiled() else _UNRECORDED:
        if differentiable:
            return _differentiable(norm, operands, sums, plan)
        return plan(operands, sums, wants_statistics)


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


def _without_activation(norm: Norm) -> Norm:
    if norm.activation is None:
        return norm
    groups_or_dims = norm.num_groups or norm.num_dims
    make = traced_norm if _is_compiling() else norm_of
    return make(norm.family, groups_or_dims, norm.channel_dim, norm.eps, None, norm.training)


# --- fused, with gradients ---


class SummedNormalization(torch.autograd.Function):
    """y and, with a pre_add, s. ``plan`` computes; the list ``kept`` gets its results."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        pre_add: Tensor | None,
        pre_gate: Tensor | None,
        post_add: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        scale: Tensor | None,
        shift: Tensor | None,
        norm: Norm,
        operands: Operands,
        sums: Sums,
        plan: SumForwardPlan,
        kept: list[Results],
    ) -> tuple[Tensor, Tensor | None]:
        results = plan(operands, sums, True)
        ctx.set_materialize_grads(False)
        ctx.norm, ctx.tuned = norm, tuned_file()
        s = input if results.sum is None else results.sum
        behind = None
        if post_add is not None and norm.activation is not None:
            # Autograd keeps the output for other operators anyway, and a post_add that nobody else keeps is freed.
            behind = results.output if norm.activation.told else post_add
        gated = pre_gate is not None and ctx.needs_input_grad[2]
        ctx.pre_shape, ctx.pre_dtype = (None, None) if pre_add is None else (pre_add.shape, pre_add.dtype)
        ctx.save_for_backward(
            s, weight, bias, scale, shift, behind, results.mean, results.rstd, pre_gate, pre_add if gated else None
        )
        kept.append(results)
        if results.sum is not None and not any(ctx.needs_input_grad[:3]):
            ctx.mark_non_differentiable(results.sum)
        return results.output, results.sum

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        s, weight, bias, scale, shift, behind, mean, rstd, pre_gate, pre_add = ctx.saved_tensors
        norm: Norm = ctx.norm
        grad_output, grad_sum = grads
        needs = ctx.needs_input_grad
        wants_s = needs[0] or needs[1] or needs[2]
        found, around = Gradients(input=grad_sum), SumGradients()
        if grad_output is not None:
            wanted = (wants_s, *needs[4:8])
            operands = BackwardOperands(grad_output, s, mean, rstd, weight, bias, scale, shift)
            gated = None if pre_gate is None or not (needs[1] or needs[2]) else Gated(pre_gate, pre_add, needs[1])
            numbers = needs[1] and pre_gate is None and ctx.pre_shape != s.shape
            arguments = (norm, operands, wanted, behind, needs[3], grad_sum, gated, numbers)
            if lost(ctx.tuned) and not _is_compiling():
                with as_selected(Selection(None, ctx.tuned)):
                    found, around = _backward(*arguments)
            else:
                found, around = _backward(*arguments)
        ds = found.input if wants_s else None
        if ds is not None and around.pre_add is None and around.pre_gate is None:
            around.pre_add, around.pre_gate = _behind_sum(
                norm, ds, pre_gate, pre_add, ctx.pre_shape, needs[1], needs[2]
            )
        if around.pre_add is not None:
            around.pre_add = around.pre_add.reshape(ctx.pre_shape).to(ctx.pre_dtype)
        return (
            ds if needs[0] else None,
            around.pre_add,
            around.pre_gate,
            around.post_add,
            found.weight if needs[4] else None,
            found.bias if needs[5] else None,
            found.scale if needs[6] else None,
            found.shift if needs[7] else None,
            None, None, None, None, None,
        )  # fmt: skip


def _behind_sum(
    norm: Norm,
    ds: Tensor,
    pre_gate: Tensor | None,
    pre_add: Tensor | None,
    pre_shape: torch.Size | None,
    wants_added: bool,
    wants_gate: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """gate · ds and Σ pre_add · ds, each summed to the shape of its operand, in the compute dtype."""
    if pre_gate is None and pre_shape == ds.shape:
        return ds if wants_added else None, None
    grad_pre_add = grad_pre_gate = gate = None
    axis, dtype = norm.channel_axis, compute_dtype(ds.dtype)
    if pre_gate is not None:
        shape = gate_shape(ds.shape, axis, pre_gate.shape)
        assert shape is not None
        gate = pre_gate.reshape(shape)
    if wants_added:
        if pre_shape == ds.shape:
            assert gate is not None
            grad_pre_add = (ds * gate).to(ds.dtype)
        else:
            assert pre_shape is not None
            planes = spread_shape(ds.shape, axis)
            axes = [place for place, size in enumerate(planes) if size != ds.shape[place]]
            # 4x320x64x64 in bfloat16 takes a CPU 0.36 ms by the norm's kernels, and 1.0 by torch, which widens it.
            wide_sum = ds.is_cuda or ds.dtype != dtype
            if axes and wide_sum and ds.nbytes >= LEAST_SUMMED and _are_planes(ds, axis):
                total = _sums_of_planes(ds, axis % ds.dim()).reshape(planes)
            else:
                total = ds.sum(axes, keepdim=True, dtype=dtype) if axes else ds.to(dtype)
            grad_pre_add = (total if gate is None else total * gate).reshape(pre_shape)
    if wants_gate:
        assert pre_gate is not None and pre_add is not None and gate is not None
        added = pre_add if pre_shape == ds.shape else pre_add.reshape(spread_shape(ds.shape, axis))
        alike = added.dtype == ds.dtype and added.shape == ds.shape
        if alike and _are_planes(ds, axis) and gate.shape == spread_shape(ds.shape, axis):
            return grad_pre_add, _gradient_of_planes(ds, added, gate, axis % ds.dim()).reshape(pre_gate.shape)
        # A kernel that made ds took a gate of float64 beside an input of float64 alone.
        grad_pre_gate = (ds.to(dtype) * added).sum_to_size(gate.shape).reshape(pre_gate.shape).to(pre_gate.dtype)
    return grad_pre_add, grad_pre_gate


def _are_planes(ds: Tensor, axis: int) -> bool:
    """Whether a norm's kernels may sum over the positions of each sample and channel."""
    return ds.dim() > 2 and axis % ds.dim() in (1, ds.dim() - 1) and not (_grad_enabled() or _is_compiling())


def _gradient_of_planes(ds: Tensor, pre_add: Tensor, gate: Tensor, axis: int) -> Tensor:
    """Σ pre_add · ds over the positions of each sample and channel, for a gate (N, 1, ..., C, ..., 1), in one read: the
    gradient of the scale of a norm by the statistics 0 and 1."""
    found = _unscaled_backward(ds, pre_add, axis, gate.reshape(len(ds), ds.shape[axis]), None).scale
    assert found is not None
    return found


def _sums_of_planes(ds: Tensor, axis: int) -> Tensor:
    """Σ ds over the positions of each sample and channel, (N, C) in the compute dtype: the gradient of the shift of a
    norm by the statistics 0 and 1, whose second tensor is in the cache."""
    shift = torch.zeros((len(ds), ds.shape[axis]), dtype=compute_dtype(ds.dtype), device=ds.device)
    found = _unscaled_backward(ds, ds, axis, None, shift).shift
    assert found is not None
    return found


def _unscaled_backward(ds: Tensor, input: Tensor, axis: int, scale: Tensor | None, shift: Tensor | None) -> Gradients:
    """The gradients of scale and shift of a norm of images by the statistics 0 and 1."""
    mean = torch.zeros(ds.shape[axis], dtype=compute_dtype(ds.dtype), device=ds.device)
    given = norm_of("batch_norm", 0, 1 if axis == 1 else -1, 0.0, None, False)
    operands = BackwardOperands(ds, input, mean, torch.ones_like(mean), scale=scale, shift=shift)
    with as_selected(Selection(None, tuned_file())):  # an instance that is asked for runs the call's own norm
        return gradients(given, operands, (False, False, False, scale is not None, shift is not None))


_apply = short_apply(SummedNormalization)


def _differentiable(norm: Norm, operands: Operands, sums: Sums, plan: SumForwardPlan) -> Results:
    kept: list[Results] = []
    o = operands
    y, s = _apply(
        o.input, sums.pre_add, sums.pre_gate, sums.post_add, o.weight, o.bias, o.scale, o.shift, norm, operands, sums,
        plan, kept,
    )  # fmt: skip
    (results,) = kept
    results.output, results.sum = y, s
    return results


def _backward(
    norm: Norm,
    operands: BackwardOperands,
    wanted: Wanted,
    behind: Tensor | None,
    wants_post: bool,
    grad_sum: Tensor | None,
    gated: Gated | None,
    numbers: bool,
) -> tuple[Gradients, SumGradients]:
    """The gradients of s and of the parameters, and those of what is around the norm: that of post_add, and those of a
    product before the norm where one kernel makes them too. ``behind`` is post_add, or the output where that tells the
    activation's derivative; without an activation it is None, and the gradient of post_add is grad_output. ``numbers``:
    pre_add is a number for each sample and channel, and its gradient is wanted."""
    o = operands
    added = [behind, grad_sum] if gated is None else [behind, grad_sum, gated.pre_gate, gated.pre_add]
    if _is_compiling():  # compiled autograd traces the Function's backward
        straight = False
    else:
        straight = not _grad_enabled() and straight_backward(o, profiled=True) and not batched(o)
    straight = straight and all(each is None or (readable(each) and not is_batched(each)) for each in added)
    if straight:
        results = _fused_backward(norm, o, wanted, behind, grad_sum, gated, numbers)
        if results is not None:
            if behind is None and wants_post:
                results[1].post_add = o.grad_output
            if not wants_post:
                results[1].post_add = None
            return results
    if not straight or behind is not None:
        return _composed_backward(norm, o, wanted, behind, wants_post, grad_sum)
    found = gradients(norm, o, wanted)
    if grad_sum is not None and found.input is not None:
        found.input = found.input + grad_sum
    return found, SumGradients(post_add=o.grad_output if wants_post else None)


def _fused_backward(
    norm: Norm,
    operands: BackwardOperands,
    wanted: Wanted,
    behind: Tensor | None,
    grad_sum: Tensor | None,
    gated: Gated | None,
    numbers: bool,
) -> tuple[Gradients, SumGradients] | None:
    """:func:`_backward` by one instance, that makes as much of it as it can; None where that is no more than the norm's
    own backward."""
    s, native = operands.input, operands
    fits = grad_sum is not None and wanted[0] and grad_sum.stride() == s.stride()
    # What one plan may take beside what is behind, the most first: the product, the gradient of s, and the numbers.
    attempts: list[tuple[Gated | None, bool, bool]] = [] if gated is None else [(gated, grad_sum is not None, False)]
    if numbers and grad_sum is None and s.nbytes >= LEAST_NUMBERED:
        attempts.append((None, False, True))
    if behind is not None or fits:
        attempts.append((None, fits, False))
    if behind is not None and fits:
        attempts.append((None, False, False))
    if attempts and operands.grad_output.stride() != s.stride():  # to be filled where there is a plan
        native = replace(operands, grad_output=torch.empty_like(s))
    # With something behind the norm, or before it, every kernel makes the gradient of s too.
    asked: Wanted = (True, *wanted[1:])
    for product, more, sums_numbers in attempts:
        plan = dispatch.sum_backward_plan(norm, native, asked, behind, more, product, sums_numbers)
        if plan is None and behind is not None and behind.stride() != s.stride():
            behind = torch.empty_like(s).copy_(behind)  # s is dense where the input and post_add were not
            plan = dispatch.sum_backward_plan(norm, native, asked, behind, more, product, sums_numbers)
        if plan is None:
            continue
        if native is not operands:
            native.grad_output.copy_(operands.grad_output)
        if more and not fits:
            assert grad_sum is not None
            grad_sum = torch.empty_like(s).copy_(grad_sum)
        found, around = plan(native, asked, behind, grad_sum if more else None, product)
        if grad_sum is not None and not more and wanted[0]:
            assert found.input is not None
            found.input += grad_sum
        return found, around
    return None


def _composed_backward(
    norm: Norm,
    operands: BackwardOperands,
    wanted: Wanted,
    behind: Tensor | None,
    wants_post: bool,
    grad_sum: Tensor | None,
) -> tuple[Gradients, SumGradients]:
    """:func:`_backward` by torch's operators and the norm's own backward, differentiable in every tensor."""
    o, grad_output, dtype = operands, operands.grad_output, operands.input.dtype
    if norm.training and _grad_enabled():
        # The saved statistics are constants to autograd, so the second derivative needs new ones.
        mean, rstd = reference.saved_statistics(norm, o.input)
        o = replace(o, mean=mean, rstd=rstd)
    if behind is not None:
        activation, norm, z = norm.activation, _without_activation(norm), behind.to(compute_dtype(dtype))
        assert activation is not None
        if not activation.told:
            z = z + _saved_output(norm, o)
        grad_output = (grad_output * reference.DERIVATIVES[activation.name](z, activation.parameter)).to(dtype)
        o = replace(o, grad_output=grad_output)
    found = gradients(norm, o, wanted)
    if grad_sum is not None and wanted[0]:
        assert found.input is not None
        found.input = found.input + grad_sum
    return found, SumGradients(post_add=grad_output if wants_post else None)


def _saved_output(norm: Norm, operands: BackwardOperands) -> Tensor:
    """z of a forward that has run."""
    if norm.training:
        return normalize(norm, Operands(operands.input, *operands.tensors()[4:]), False).output
    return reference.saved_output(norm, operands)
