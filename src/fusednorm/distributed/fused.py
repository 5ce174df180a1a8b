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
from typing import Any

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
from fusednorm.instance import Ranks, SpreadForwardPlan
from fusednorm.norm import Norm
from fusednorm.op_arguments import check_backward
from fusednorm.operands import BackwardOperands, Gradients, Operands, Statistics, Wanted
from fusednorm.private.torch_names import saved_tensors_hooks, short_apply


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """A forward that kernels run."""

    norm: Norm
    exchange: Exchange
    plan: SpreadForwardPlan
    kernels: Ranks
    running: Running | None
    inspect: Inspection | None

    def run(self, operands: Operands) -> tuple[Tensor, Statistics]:
        packed = self.plan.local_moments(operands.input)
        parts, _ = gather_moments(self.exchange, packed, packed.numel() // 2, self.inspect)
        moved = () if self.running is None else (self.running.mean, self.running.var, self.running.share)
        dtype = compute_dtype(operands.input.dtype)
        found = self.kernels.merge_moments(parts, self.norm.eps, dtype, *moved)
        if not self.norm.per_batch:
            shape = operands.input.shape[0], -1
            found = Statistics(found.mean.view(shape), found.rstd.view(shape), found.var.view(shape), found.count)
        return self.plan.output(operands, found.mean, found.rstd), found


def normalize_fused(
    exchange: Exchange,
    norm: Norm,
    operands: Operands,
    running: Running | None = None,
    inspect: Inspection | None = None,
) -> tuple[Tensor, Statistics] | None:
    """This rank's part of the output, and the statistics of the whole, (N, groups), in batch_norm (C,); None where no
    kernels run the call.

    ``norm`` is that of this rank's units, all of whose channels the rank has.
    """
    if torch.compiler.is_compiling() or not straight_forward(operands):
        return None
    kernels = ranks(operands.input.device.type)
    plan = None if kernels is None else dispatch.spread_forward_plan(norm, operands)
    if kernels is None or plan is None:
        return None
    call, o = _Call(norm, exchange, plan, kernels, running, inspect), operands
    kept: list[Statistics] = []
    with _on(o.input):
        output = _apply(o.input, o.weight, o.bias, o.scale, o.shift, operands, call, kept)
    return output, kept[0]


def _on(tensor: Tensor) -> Any:
    """The tensor's device as the current one."""
    apart = tensor.is_cuda and tensor.get_device() != torch.cuda.current_device()
    return torch.cuda.device(tensor.device) if apart else nullcontext()


class _Fused(torch.autograd.Function):
    """The call, and its backward; the list ``kept`` gets the statistics."""

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
        output, found = call.run(operands)
        kept.append(found)
        ctx.call, ctx.selected = call, selection()
        ctx.hooked = saved_tensors_hooks(False) is not None
        ctx.save_for_backward(input, weight, bias, scale, shift, found.mean, found.rstd, found.count)
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
    exchange, kernels = call.exchange, call.kernels
    if not exchange.backward:
        return gradients(call.norm, o, (False, *wanted[1:]))
    plan = dispatch.spread_backward_plan(call.norm, o)
    assert plan is not None  # the forward's tensors, of which a kernel takes any gradient
    o.grad_output = plan.gradient(o.grad_output)
    sums, dtype = plan.local_sums(o), o.rstd.dtype
    if exchange.replicated:
        parts = _begin(exchange, plan.packed_sums(sums), kernels, count)()
        summed, means = kernels.sum_over_ranks(parts, count, dtype, dtype if wanted[0] else None)
        found = plan.parameters(o, summed, wanted, True)
        totals = None if means is None else plan.totals_of_ranks(o, means)
    else:
        arrive = _begin(exchange, plan.packed_totals(o, sums), kernels, count)
        found = plan.parameters(o, sums, wanted, False)  # while the sums are on their way
        totals = kernels.sum_over_ranks(arrive(), count, None, dtype if wanted[0] else None)[1]
    if totals is not None:
        found.input = plan.grad_input(o, totals)
    return found


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
