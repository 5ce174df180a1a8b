"""The gradients of a call with sums around its norm, from what a fused forward saved.

    s = input + pre_gate · pre_add        z = norm(s)        y = phi(z + post_add)

One kernel makes all of them or most, where the norm's instance has such a one; else torch's operators work around the
norm's own backward, as they do wherever something watches or differentiates a backward.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fusednorm import dispatch
from fusednorm.autograd import gradients, normalize
from fusednorm.backends import reference
from fusednorm.choice import Selection, as_selected, tuned_file
from fusednorm.dtypes import compute_dtype
from fusednorm.gate import batched, readable, straight_backward
from fusednorm.instance import SumBackwardPlan
from fusednorm.norm import Norm, norm_of, traced_norm
from fusednorm.operands import BackwardOperands, Gated, Gradients, Operands, SumGradients, Wanted
from fusednorm.private.torch_names import is_batched
from fusednorm.problem import gate_shape, spread_shape

#: Bytes from which on the sums of planes repay the several launches of a norm's backward. Not measured on a GPU.
LEAST_SUMMED = 1 << 21
#: Bytes from which on a GPU's backward makes the gradient of a pre_add (N, C) too.
LEAST_NUMBERED = 1 << 21

_is_compiling = torch.compiler.is_dynamo_compiling
_grad_enabled = torch.is_grad_enabled


def without_activation(norm: Norm) -> Norm:
    if norm.activation is None:
        return norm
    groups_or_dims = norm.num_groups or norm.num_dims
    make = traced_norm if _is_compiling() else norm_of
    return make(norm.family, groups_or_dims, norm.channel_dim, norm.eps, None, norm.training)


@dataclass(slots=True, eq=False)
class SumOperands:
    """The tensors of a backward beside those of the norm's own, whose input is s.

    ``behind`` is there where an activation meets z + post_add: post_add, or the output where that tells the
    activation's derivative; without an activation the gradient of post_add is grad_output. ``grad_sum`` is the gradient
    of s from elsewhere. ``pre_add`` is there where the gradient of the gate is needed.
    """

    behind: Tensor | None = None
    grad_sum: Tensor | None = None
    pre_gate: Tensor | None = None
    pre_add: Tensor | None = None


@dataclass(slots=True, eq=False)
class Needed:
    """Which gradients of a call are needed, and what its pre_add is, if there is one."""

    input: bool
    pre_add: bool
    pre_gate: bool
    post_add: bool
    parameters: tuple[bool, bool, bool, bool]
    pre_shape: torch.Size | None
    pre_dtype: torch.dtype | None

    @property
    def s(self) -> bool:
        """Whether the gradient of s is."""
        return self.input or self.pre_add or self.pre_gate

    @property
    def wanted(self) -> Wanted:
        """Of the norm's own backward."""
        return self.s, *self.parameters

    def gated(self, added: SumOperands) -> Gated | None:
        """The product before the norm, where a gradient of it is needed."""
        if added.pre_gate is None or not (self.pre_add or self.pre_gate):
            return None
        return Gated(added.pre_gate, added.pre_add, self.pre_add)


@dataclass(slots=True, eq=False)
class Way:
    """A plan that makes more than the norm's own backward, and the tensors that it takes, which are copies where it
    takes no other order of memory. ``grad_sum`` is None where the plan does not add it to ds."""

    plan: SumBackwardPlan
    operands: BackwardOperands
    asked: Wanted
    behind: Tensor | None
    grad_sum: Tensor | None
    product: Gated | None


def is_straight(operands: BackwardOperands, added: SumOperands) -> bool:
    """Whether a backward may go past torch's dispatcher, as in :mod:`fusednorm.gate`."""
    if _is_compiling() or _grad_enabled():  # compiled autograd traces the Function's backward
        return False
    each = added.behind, added.grad_sum, added.pre_gate, added.pre_add
    return (
        straight_backward(operands, profiled=True)
        and not batched(operands)
        and all(one is None or (readable(one) and not is_batched(one)) for one in each)
    )


def summed_gradients(
    norm: Norm, operands: BackwardOperands, added: SumOperands, needed: Needed, way: Way | None, straight: bool
) -> tuple[Gradients, SumGradients]:
    """The gradients of s and of the parameters, and those of what is around the norm: of post_add, and of what is
    before the norm where one kernel makes them too. ``way`` is that of a ``straight`` backward."""
    around = SumGradients()
    if way is not None:
        found, around = way.plan(way.operands, way.asked, way.behind, way.grad_sum, way.product)
    elif straight and added.behind is None:
        found = gradients(norm, operands, needed.wanted)
    else:
        return _composed_backward(norm, operands, added, needed)
    adds_sum = way is not None and way.grad_sum is not None
    add_rest(found, around, operands.grad_output, added.behind, None if adds_sum else added.grad_sum, needed)
    return found, around


def add_rest(
    found: Gradients,
    around: SumGradients,
    grad_output: Tensor,
    behind: Tensor | None,
    grad_sum: Tensor | None,
    needed: Needed,
) -> None:
    """Add what no kernel made: to ds the gradient of s from elsewhere, ``grad_sum``, and that of a post_add that no
    activation meets."""
    if grad_sum is not None and needed.s:
        assert found.input is not None
        found.input += grad_sum
    if behind is None or not needed.post_add:
        around.post_add = grad_output if needed.post_add else None


def fused_way(norm: Norm, operands: BackwardOperands, added: SumOperands, needed: Needed) -> Way | None:
    """The plan of one instance that makes as much of :func:`summed_gradients` as it can; None where that is no more
    than the norm's own backward."""
    s, native, behind, grad_sum = operands.input, operands, added.behind, added.grad_sum
    gated = needed.gated(added)
    numbers = needed.pre_add and added.pre_gate is None and needed.pre_shape != s.shape
    fits = grad_sum is not None and needed.s and grad_sum.stride() == s.stride()
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
    asked: Wanted = (True, *needed.parameters)
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
        return Way(plan, native, asked, behind, grad_sum if more else None, product)
    return None


def completed(
    norm: Norm, found: Gradients, around: SumGradients, added: SumOperands, needed: Needed
) -> tuple[Tensor | None, ...]:
    """The gradients of input, pre_add, pre_gate, post_add and the four parameters, where kernels made those of s, of
    the parameters, and some of what is around the norm."""
    ds = found.input if needed.s else None
    if ds is not None and around.pre_add is None and around.pre_gate is None:
        around.pre_add, around.pre_gate = _behind_sum(norm, ds, added, needed)
    if around.pre_add is not None:
        assert needed.pre_shape is not None
        around.pre_add = around.pre_add.reshape(needed.pre_shape).to(needed.pre_dtype)
    a, b, c, d = needed.parameters
    return (
        ds if needed.input else None,
        around.pre_add,
        around.pre_gate,
        around.post_add,
        found.weight if a else None,
        found.bias if b else None,
        found.scale if c else None,
        found.shift if d else None,
    )


def _composed_backward(
    norm: Norm, operands: BackwardOperands, added: SumOperands, needed: Needed
) -> tuple[Gradients, SumGradients]:
    """:func:`summed_gradients` by torch's operators and the norm's own backward, differentiable in every tensor."""
    o, grad_output, dtype, behind = operands, operands.grad_output, operands.input.dtype, added.behind
    if norm.training and _grad_enabled():
        # The saved statistics are constants to autograd, so the second derivative needs new ones.
        mean, rstd = reference.saved_statistics(norm, o.input)
        o = replace(o, mean=mean, rstd=rstd)
    if behind is not None:
        activation, norm, z = norm.activation, without_activation(norm), behind.to(compute_dtype(dtype))
        assert activation is not None
        if not activation.told:
            z = z + _saved_output(norm, o)
        grad_output = (grad_output * reference.DERIVATIVES[activation.name](z, activation.parameter)).to(dtype)
        o = replace(o, grad_output=grad_output)
    found = gradients(norm, o, needed.wanted)
    if added.grad_sum is not None and needed.s:
        assert found.input is not None
        found.input = found.input + added.grad_sum
    return found, SumGradients(post_add=grad_output if needed.post_add else None)


def _saved_output(norm: Norm, operands: BackwardOperands) -> Tensor:
    """z of a forward that has run."""
    if norm.training:
        return normalize(norm, Operands(operands.input, *operands.tensors()[4:]), False).output
    return reference.saved_output(norm, operands)


def _behind_sum(norm: Norm, ds: Tensor, added: SumOperands, needed: Needed) -> tuple[Tensor | None, Tensor | None]:
    """gate · ds and Σ pre_add · ds, each summed to the shape of its operand, in the compute dtype."""
    pre_gate, pre_add, pre_shape = added.pre_gate, added.pre_add, needed.pre_shape
    wants_added, wants_gate = needed.pre_add, needed.pre_gate
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
        factor = pre_add if pre_shape == ds.shape else pre_add.reshape(spread_shape(ds.shape, axis))
        alike = factor.dtype == ds.dtype and factor.shape == ds.shape
        if alike and _are_planes(ds, axis) and gate.shape == spread_shape(ds.shape, axis):
            return grad_pre_add, _gradient_of_planes(ds, factor, gate, axis % ds.dim()).reshape(pre_gate.shape)
        # A kernel that made ds took a gate of float64 beside an input of float64 alone.
        grad_pre_gate = (ds.to(dtype) * factor).sum_to_size(gate.shape).reshape(pre_gate.shape).to(pre_gate.dtype)
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
