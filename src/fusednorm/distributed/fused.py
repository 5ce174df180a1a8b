"""The engine of synchronized.py by the kernels of a device: two passes over memory forward and two backward.

    forward   moments of the units of this rank      exchanged      mean, rstd, running statistics      y
    backward  p and q of this rank                   exchanged      P / K and Q / K of the whole         dx

The ranks exchange what synchronized.py's do, in the same order, so that a rank with no elements, or with tensors that
no kernel takes, meets them there. Nothing reads a value of the device.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fusednorm import dispatch
from fusednorm.autograd import gradients
from fusednorm.choice import as_selected, ranks, selection
from fusednorm.distributed.collective import begin_gather, gather
from fusednorm.distributed.synchronized import Exchange, Inspection, Running, gather_moments
from fusednorm.dtypes import compute_dtype
from fusednorm.gate import readable, straight_forward
from fusednorm.instance import CutGroups, Ranks, ReplicatedBackwardPlan, SpreadBackwardPlan, SpreadForwardPlan
from fusednorm.norm import Norm
from fusednorm.op_arguments import check_backward
from fusednorm.operands import BackwardOperands, Gradients, Operands, Statistics, Wanted
from fusednorm.private.torch_names import saved_tensors_hooks, short_apply
from fusednorm.problem import statistics_shape, view_of


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """A forward that kernels run: of this rank's ``norm``, or of its channels where groups are ``cut``."""

    norm: Norm
    exchange: Exchange
    plan: SpreadForwardPlan
    kernels: Ranks
    running: Running | None
    inspect: Inspection | None
    cut: CutGroups | None

    def run(self, operands: Operands) -> tuple[Tensor, Tensor | None, Tensor, Statistics]:
        """The output, the mean, None for rms_norm, and rstd, and the statistics of the whole."""
        input, kernels, cut = operands.input, self.kernels, self.cut
        packed = self.plan.local_moments(input)
        units = packed.numel() // 2
        if cut is not None:
            packed, units = kernels.group_moments(packed, cut), cut.units
        parts, _ = gather_moments(self.exchange, packed, units, self.inspect)
        moved = () if self.running is None else (self.running.mean, self.running.var, self.running.share)
        found = kernels.merge_moments(parts, units, self.norm.eps, compute_dtype(input.dtype), *moved)
        mean, rstd = (found.mean, found.rstd) if cut is None else kernels.channel_statistics(found, cut)
        shape = statistics_shape(self.norm, view_of(self.norm, input.shape))
        own_mean, rstd = mean.view(shape) if self.norm.has_mean else None, rstd.view(shape)
        return self.plan.output(operands, own_mean, rstd), own_mean, rstd, found


def normalize_fused(
    exchange: Exchange,
    norm: Norm,
    operands: Operands,
    running: Running | None = None,
    inspect: Inspection | None = None,
    cut: CutGroups | None = None,
) -> tuple[Tensor, Statistics] | None:
    """This rank's part of the output, and the statistics of the whole, as vectors; None where no kernels run the call.

    ``norm`` is that of this rank's units. Where groups are ``cut``, it is instance_norm.
    """
    if torch.compiler.is_compiling() or not straight_forward(operands):
        return None
    kernels = ranks(operands.input.device.type)
    plan = None if kernels is None else dispatch.spread_forward_plan(norm, operands)
    if kernels is None or plan is None:
        return None
    call, o = _Call(norm, exchange, plan, kernels, running, inspect, cut), operands
    kept: list[Statistics] = []
    with _on(o.input):
        output = _apply(o.input, o.weight, o.bias, o.scale, o.shift, operands, call, kept)
    return output, kept[0]


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
        call: _Call,
        kept: list[Statistics],
    ) -> Tensor:
        output, mean, rstd, found = call.run(operands)
        kept.append(found)
        ctx.call, ctx.selected = call, selection()
        ctx.hooked = saved_tensors_hooks(False) is not None
        ctx.save_for_backward(input, weight, bias, scale, shift, mean, rstd, found.count)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, bias, scale, shift, mean, rstd, count = ctx.saved_tensors
        call: _Call = ctx.call
        if not readable(grad_output):
            grad_output = torch.empty_like(grad_output).copy_(grad_output)
        operands = BackwardOperands(grad_output, input, mean, rstd, weight, bias, scale, shift)
        if ctx.hooked:
            # Hooks can give back other shapes than were saved, and a kernel would go past a tensor's end.
            check_backward(f"the backward of {call.exchange.function}", call.norm, operands)
        with as_selected(ctx.selected):
            found = _gradients(call, operands, count, ctx.needs_input_grad[:5])
        return found.input, found.weight, found.bias, found.scale, found.shift, None, None, None


_apply = short_apply(_Fused)


def _gradients(call: _Call, o: BackwardOperands, count: Tensor, wanted: Wanted) -> Gradients:
    exchange = call.exchange
    if not exchange.backward:
        return gradients(call.norm, o, (False, *wanted[1:]))
    plan = dispatch.spread_backward_plan(call.norm, o)
    assert plan is not None  # the forward's tensors, of which a kernel takes any gradient
    o.grad_output = plan.gradient(o.grad_output)
    if exchange.replicated:
        found, totals = _replicated(call, cast("ReplicatedBackwardPlan", plan), o, count, wanted)
    else:
        found, totals = _own(call, plan, o, count, wanted)
    plan.finish(o, totals, found, wanted)
    return found


def _replicated(
    call: _Call, plan: ReplicatedBackwardPlan, o: BackwardOperands, count: Tensor, wanted: Wanted
) -> tuple[Gradients, Tensor | None]:
    """The gradients of parameters that all ranks have alike, and P / K and Q / K."""
    kernels, dtype = call.kernels, o.rstd.dtype
    parts = _begin(call.exchange, plan.packed_sums(plan.local_sums(o)), kernels, count)()
    summed, means = kernels.sum_over_ranks(parts, count, dtype, dtype if wanted[0] else None)
    found = plan.parameters(o, summed, wanted, True)
    return found, None if means is None else plan.totals_of_ranks(o, means)


def _own(
    call: _Call, plan: SpreadBackwardPlan, o: BackwardOperands, count: Tensor, wanted: Wanted
) -> tuple[Gradients, Tensor | None]:
    """The gradients of this rank's own parameters, and P / K and Q / K."""
    kernels, cut = call.kernels, call.cut
    sums = plan.local_sums(o)
    packed = plan.packed_totals(o, sums)
    arrive = _begin(call.exchange, packed if cut is None else kernels.group_sums(packed, cut), kernels, count)
    found = plan.parameters(o, sums, wanted, False)  # while the sums are on their way
    totals = kernels.sum_over_ranks(arrive(), count, None, o.rstd.dtype if wanted[0] else None)[1]
    return found, totals if totals is None or cut is None else kernels.channel_means(totals, cut)


def _begin(exchange: Exchange, packed: Tensor, kernels: Ranks, count: Tensor) -> Callable[[], Tensor]:
    """Start to exchange sums; the result waits for those of all ranks of the last group, which are sums over the
    others."""
    function = f"the backward of {exchange.function}"
    first, *others = exchange.groups
    arrive = begin_gather(function, packed, first, overlaps=not exchange.replicated)

    def finish() -> Tensor:
        parts = arrive()
        for group in others:
            total, _ = kernels.sum_over_ranks(parts, count, torch.float64, None)
            parts = gather(function, total, group)
        return parts

    return finish
