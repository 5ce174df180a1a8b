"""The engine of synchronized.py by the kernels of a device: two passes over memory forward and two backward.

    forward   moments of the units of this rank      exchanged      mean, rstd, running statistics      y
    backward  p and q of this rank                   exchanged      P / K and Q / K of the whole         dx

The ranks exchange what synchronized.py's do, in the same order, so that a rank with no elements, or with tensors that
no kernel takes, meets them there. Nothing reads a value of the device.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fusednorm import dispatch
from fusednorm.autograd import gradients
from fusednorm.choice import as_selected, ranks, selection
from fusednorm.distributed.collective import gather
from fusednorm.distributed.synchronized import Exchange, Inspection, Running, gather_moments, merged_by_kernels
from fusednorm.dtypes import compute_dtype
from fusednorm.gate import all_plain, readable
from fusednorm.instance import CutGroups, Ranks, ReplicatedBackwardPlan, SpreadBackwardPlan, SpreadForwardPlan
from fusednorm.norm import Norm
from fusednorm.op_arguments import check_backward
from fusednorm.operands import BackwardOperands, Gradients, Operands, Statistics, Wanted
from fusednorm.private.torch_names import saved_tensors_hooks, short_apply, unseen
from fusednorm.problem import statistics_shape, view_of

if TYPE_CHECKING:
    from fusednorm.distributed.repeats import Repeat

#: Plans of the backward that a call keeps, by the strides of grad_output.
MOST_BACKWARDS = 8

_grad_enabled = torch.is_grad_enabled


@dataclass(slots=True, eq=False)
class Call:
    """Forwards that kernels run: of this rank's ``norm``, or of its channels where groups are ``cut``.

    ``shape`` is that of the statistics of the whole. ``backwards`` are the plans of the backward, by the strides of
    grad_output.
    """

    norm: Norm
    plan: SpreadForwardPlan
    kernels: Ranks
    cut: CutGroups | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    backwards: dict[tuple[int, ...], SpreadBackwardPlan] = field(default_factory=dict)

    def __call__(
        self, exchange: Exchange, operands: Operands, running: Running | None, inspect: Inspection | None
    ) -> tuple[Tensor, Statistics]:
        """This rank's part of the output, and the statistics of the whole."""
        o = operands
        with _on(o.input):
            if not _grad_enabled() or not _differentiable(o):
                output, _, _, found = self.run(exchange, o, running, inspect)
                return output, found
            kept: list[Statistics] = []
            output = _apply(o.input, o.weight, o.bias, o.scale, o.shift, o, self, exchange, (running, inspect), kept)
            return output, kept[0]

    def run(
        self, exchange: Exchange, operands: Operands, running: Running | None, inspect: Inspection | None
    ) -> tuple[Tensor, Tensor | None, Tensor, Statistics]:
        """The output, the mean, None for rms_norm, and rstd, and the statistics of the whole."""
        kernels, cut = self.kernels, self.cut
        packed = self.plan.local_moments(operands.input)
        if cut is not None:
            packed = kernels.group_moments(packed, cut)
        parts, _ = gather_moments(exchange, packed, prod(self.shape), inspect)
        found = merged_by_kernels(kernels, parts, self.shape, self.norm.eps, self.dtype, running)
        mean, rstd = (found.mean, found.rstd) if cut is None else kernels.channel_statistics(found, cut)
        own_mean = mean if self.norm.has_mean else None
        return self.plan.output(operands, own_mean, rstd), own_mean, rstd, found

    def backward_plan(self, operands: BackwardOperands) -> Any:
        strides = operands.grad_output.stride()
        plan = self.backwards.get(strides)
        if plan is None:
            plan = dispatch.spread_backward_plan(self.norm, operands)
            assert plan is not None  # the forward's tensors, of which a kernel takes any gradient
            if len(self.backwards) >= MOST_BACKWARDS:
                self.backwards.clear()
            self.backwards[strides] = plan
        return plan


def _differentiable(o: Operands) -> bool:
    return any(each is not None and each.requires_grad for each in (o.input, o.weight, o.bias, o.scale, o.shift))


def normalize_fused(
    exchange: Exchange,
    norm: Norm,
    operands: Operands,
    running: Running | None = None,
    inspect: Inspection | None = None,
    cut: CutGroups | None = None,
    repeat: Repeat | None = None,
) -> tuple[Tensor, Statistics] | None:
    """This rank's part of the output, and the statistics of the whole; None where no kernels run the call.

    ``norm`` is that of this rank's units. Where groups are ``cut``, it is instance_norm. ``repeat`` keeps the call.
    """
    if torch.compiler.is_compiling() or not (all_plain(operands) and unseen(operands.input)):
        return None
    kernels = ranks(operands.input.device.type)
    plan = None if kernels is None else dispatch.spread_forward_plan(norm, operands)
    if kernels is None or plan is None:
        return None
    shape = statistics_shape(norm, view_of(norm, operands.input.shape)) if cut is None else (cut.units,)
    call = Call(norm, plan, kernels, cut, tuple(shape), compute_dtype(operands.input.dtype))
    found = call(exchange, operands, running, inspect)
    if repeat is not None and inspect is None:
        repeat.keep(call, exchange, operands, running)
    return found


def _on(tensor: Tensor) -> Any:
    """The tensor's device as the current one."""
    apart = tensor.is_cuda and tensor.get_device() != torch.cuda.current_device()
    return torch.cuda.device(tensor.device) if apart else nullcontext()


class _Fused(torch.autograd.Function):
    """The call, and its backward; the list ``kept`` gets the statistics of the whole."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        scale: Tensor | None,
        shift: Tensor | None,
        operands: Operands,
        call: Call,
        exchange: Exchange,
        seen: tuple[Running | None, Inspection | None],
        kept: list[Statistics],
    ) -> Tensor:
        output, mean, rstd, found = call.run(exchange, operands, *seen)
        kept.append(found)
        ctx.call, ctx.exchange, ctx.selected = call, exchange, selection()
        ctx.hooked = saved_tensors_hooks(False) is not None
        ctx.save_for_backward(input, weight, bias, scale, shift, mean, rstd, found.count)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, bias, scale, shift, mean, rstd, count = ctx.saved_tensors
        call: Call = ctx.call
        if not readable(grad_output):
            grad_output = torch.empty_like(grad_output).copy_(grad_output)
        operands = BackwardOperands(grad_output, input, mean, rstd, weight, bias, scale, shift)
        if ctx.hooked:
            # Hooks can give back other shapes and strides than were saved, and a kernel would go past a tensor's end.
            check_backward(f"the backward of {ctx.exchange.function}", call.norm, operands)
            call = replace(call, backwards={})
        with as_selected(ctx.selected):
            found = _gradients(call, ctx.exchange, operands, count, ctx.needs_input_grad[:5])
        return found.input, found.weight, found.bias, found.scale, found.shift, *(None,) * 5


_apply = short_apply(_Fused)


def _gradients(call: Call, exchange: Exchange, o: BackwardOperands, count: Tensor, wanted: Wanted) -> Gradients:
    if not exchange.backward:
        return gradients(call.norm, o, (False, *wanted[1:]))
    plan = call.backward_plan(o)
    o.grad_output = plan.gradient(o.grad_output)
    if exchange.replicated:
        found, totals = _replicated(call, exchange, plan, o, count, wanted)
    else:
        found, totals = _own(call, exchange, plan, o, count, wanted)
    plan.finish(o, totals, found, wanted)
    return found


def _replicated(
    call: Call,
    exchange: Exchange,
    plan: ReplicatedBackwardPlan,
    o: BackwardOperands,
    count: Tensor,
    wanted: Wanted,
) -> tuple[Gradients, Tensor | None]:
    """The gradients of parameters that all ranks have alike, and P / K and Q / K."""
    kernels, dtype = call.kernels, o.rstd.dtype
    parts = _gathered(exchange, plan.packed_sums(plan.local_sums(o)), kernels, count)
    summed, means = kernels.sum_over_ranks(parts, count, dtype, dtype if wanted[0] else None)
    found = plan.parameters(o, summed, wanted)
    return found, None if means is None else plan.totals_of_ranks(o, means)


def _own(
    call: Call, exchange: Exchange, plan: SpreadBackwardPlan, o: BackwardOperands, count: Tensor, wanted: Wanted
) -> tuple[Gradients, Tensor | None]:
    """The gradients of this rank's own parameters, and P / K and Q / K."""
    kernels, cut = call.kernels, call.cut
    packed, found = plan.own_sums(o, plan.local_sums(o), wanted)
    parts = _gathered(exchange, packed if cut is None else kernels.group_sums(packed, cut), kernels, count)
    totals = kernels.sum_over_ranks(parts, count, None, o.rstd.dtype if wanted[0] else None)[1]
    return found, totals if totals is None or cut is None else kernels.channel_means(totals, cut)


def _gathered(exchange: Exchange, packed: Tensor, kernels: Ranks, count: Tensor) -> Tensor:
    """The sums of all ranks of the last group, which are sums over the others.

    The device waits for them. What needs none of them, the gradients of this rank's own parameters, comes from the
    launch that makes what is sent: on a stream of its own the exchange would take longer than that launch.
    """
    function = f"the backward of {exchange.function}"
    first, *others = exchange.groups
    parts = gather(function, packed, first)
    for group in others:
        total, _ = kernels.sum_over_ranks(parts, count, torch.float64, None)
        parts = gather(function, total, group)
    return parts
