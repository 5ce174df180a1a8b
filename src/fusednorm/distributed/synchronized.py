"""Normalization by the statistics of an input that is spread over the ranks of a group: the forward and the backward.

With K elements under one statistic over all ranks, A and B the affine of a statistic's channel and dz = dy phi'(z):

    forward   x̂ = (x - mean) rstd          y = phi(A x̂ + B)
    backward  p = sum dz                    q = sum dz x̂             over this rank's elements of each (n, c)
              dx = rstd (A dz - (P + x̂ Q) / K)                       P = sum A p, Q = sum A q over unit and ranks

The statistics are given here (``moments.py`` merges them). A backward makes one exchange: of p and q of each (n, c)
where the ranks share a channel's parameters, whose gradients are the sums over the ranks; of P and Q of each unit
elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fusednorm.autograd import gradients, normalize
from fusednorm.choice import ranks
from fusednorm.distributed.collective import begin_sum, gather, sum_in_rank_order
from fusednorm.distributed.moments import Moments, Units, merge_in_order, moments_of
from fusednorm.functional import call_norm
from fusednorm.gate import writable
from fusednorm.instance import Ranks
from fusednorm.norm import Family, Norm
from fusednorm.op_arguments import check_backward
from fusednorm.operands import BackwardOperands, Operands, Statistics, Sums
from fusednorm.running import move_running, moved
from fusednorm.strides import empty_output
from fusednorm.sums import fused, straight


@dataclass(frozen=True, slots=True, eq=False)
class Exchange:
    """What the ranks of all ``groups`` exchange for one call.

    ``replicated`` says that all ranks have the same A and B of a channel, whose gradients are summed over them, and
    ``backward`` whether any gradient needs the other ranks. rms_norm is not ``centred``.
    """

    function: str
    groups: Sequence[Any]
    units: Units
    replicated: bool = False
    backward: bool = True
    centred: bool = True


@dataclass(slots=True, eq=False)
class Running:
    """Running statistics, which move towards those of the whole by ``share``; ``counter`` grows by 1 with them."""

    mean: Tensor
    var: Tensor
    share: float | Tensor
    counter: Tensor | None = None

    def takes_kernels(self, device: torch.device) -> bool:
        """Whether a kernel of the device may write to them."""
        written = (self.mean, self.var) if self.counter is None else (self.mean, self.var, self.counter)
        counts = self.counter is None or self.counter.dtype is torch.int64
        return counts and self.mean is not self.var and all(writable(each, device) for each in written)

    def move(self, mean: Tensor, var: Tensor, share: float | Tensor) -> None:
        """Towards a mean and an unbiased variance, by torch's operators."""
        move_running(self.mean, mean, share)
        move_running(self.var, var, share)


#: Looks at the moments of all ranks, a row each, before they are merged, and raises what is wrong with them. Returns
#: whether there are any elements, as far as the host knows.
Inspection = Callable[[Tensor], bool]


def gather_moments(exchange: Exchange, packed: Tensor, units: int, inspect: Inspection | None) -> tuple[Tensor, bool]:
    """The packed moments of so many ``units`` of all ranks, a row each; those of several groups are merged over the
    first ones. And whether there are any elements, as far as the host knows."""
    *others, last = exchange.groups
    for group in others:
        packed = merge_in_order(gather(exchange.function, packed, group), units).packed()
    parts = gather(exchange.function, packed, last)
    return parts, inspect is None or inspect(parts)


def exchange_statistics(
    exchange: Exchange,
    part: Moments,
    eps: float,
    dtype: torch.dtype,
    running: Running | None = None,
    inspect: Inspection | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """mean and biased variance of the whole, (N or 1, groups), in a dtype, from this rank's part, and their counts."""
    units, shape = part.mean.numel(), part.mean.shape
    parts, any_elements = gather_moments(exchange, part.packed(), units, inspect)
    kernels = None if _is_traced(parts) else ranks(parts.device.type)
    if kernels is not None:  # those of the ranks that have elements, so that all have the same bits
        found = merged_by_kernels(kernels, parts, tuple(shape), eps, dtype, running)
        return found.mean, found.var, found.count
    whole = merge_in_order(parts, units)
    mean, var = whole.mean.to(dtype), whole.var().to(dtype)
    if running is not None:
        if any_elements:
            running.move(mean, whole.unbiased_var().to(dtype), running.share)
        if running.counter is not None:
            running.counter.add_(1)
    count = whole.count.view(shape) if part.count.numel() > 1 else whole.count
    return mean.view(shape), var.view(shape), count


def merged_by_kernels(
    kernels: Ranks, parts: Tensor, shape: tuple[int, ...], eps: float, dtype: torch.dtype, running: Running | None
) -> Statistics:
    """The statistics of the whole, of this shape, and running ones that have moved."""
    if running is None:
        return kernels.merge_moments(parts, shape, eps, dtype)
    counter, share = running.counter, running.share
    if running.takes_kernels(parts.device):
        found = kernels.merge_moments(parts, shape, eps, dtype, running.mean, running.var, share, counter)
        moved(running.mean, running.var, counter)
        return found
    found = kernels.merge_moments(parts, shape, eps, dtype)
    unbiased = (found.var.flatten().double() * (found.count / (found.count - 1))).to(dtype)
    running.move(found.mean.flatten(), unbiased, (found.count > 0).to(dtype) * share)  # no elements: they stay
    if counter is not None:
        counter.add_(1)
    return found


def after(values: Tensor, source: Tensor) -> Tensor:
    """``values`` as a result of ``source``, to a compiler, where a rank has no elements.

    The values that such a rank sends are constants, and those that it gets go nowhere. A compiler would drop the
    exchange, or make it in another graph than the other ranks do, which would wait. One of the two tensors has no
    elements, so their sum has the values' numbers.
    """
    return values + source.sum() if _is_traced(values) else values


def _is_traced(tensor: Tensor) -> bool:
    """Whether a graph is made of what is computed here: of Dynamo's own frames, or, below an operator, of fake and
    functional tensors, where torch 2.11 does not say that it compiles."""
    return type(tensor) is not Tensor or torch.compiler.is_compiling()


def local_moments(input: Tensor, over_samples: bool = False, channel_dim: int = 1) -> Moments:
    """The moments of each (n, c) of this rank's input, or of each c, of shape (1, C); 0 where it is empty."""
    samples, channels = input.shape[0], input.shape[channel_dim]
    rows = 1 if over_samples else samples
    if input.numel() == 0:
        nothing = after(torch.zeros(rows, channels, dtype=torch.float64, device=input.device), input)
        return moments_of(0, nothing, nothing)
    family: Family = "batch_norm" if over_samples else "instance_norm"
    results = normalize(call_norm(family, 0, channel_dim, 1e-5, None), Operands(input.detach()))
    assert results.mean is not None and results.var is not None
    elements = input.numel() // (rows * channels)
    return moments_of(elements, results.mean.view(rows, channels), results.var.view(rows, channels))


def normalize_by(
    exchange: Exchange,
    norm: Norm,
    input: Tensor,
    factor: Tensor | None,
    offset: Tensor | None,
    mean: Tensor,
    var: Tensor,
    count: Tensor,
) -> Tensor:
    """phi(A x̂ + B) by the statistics of the whole, which the backward differentiates through.

    Args:
        norm: batch_norm's evaluation, with the eps, the activation and the channel_dim.
        input: (N, C, *), or (N, *, C) where ``mean`` has one row.
        factor, offset: A and B, of ``mean``'s shape and dtype, or None.
        mean, var: (N, C), or (1, C) for all samples, in the dtype of the computation.
        count: K of each statistic of the whole, (N or 1, groups), or one number.
    """
    output: Tensor = _Synchronized.apply(input, factor, offset, mean, var, count, norm, exchange)
    return output


class _Synchronized(torch.autograd.Function):
    """The normalization by the statistics of the whole, and its backward."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        factor: Tensor | None,
        offset: Tensor | None,
        mean: Tensor,
        var: Tensor,
        count: Tensor,
        norm: Norm,
        exchange: Exchange,
    ) -> Tensor:
        ctx.norm, ctx.exchange = norm, exchange
        if input.numel() == 0:
            ctx.save_for_backward(input, factor, offset, mean, var, var, count)
            return after(empty_output(norm, input), mean)
        parts = _parts(input, len(mean))
        rows = [_rows(tensor, len(parts)) for tensor in (factor, offset, mean, var)]
        results = [
            normalize(norm, Operands(part, a, b, mean=m, var=v)) for part, a, b, m, v in zip(parts, *rows, strict=True)
        ]
        rstd = _whole([found.rstd for found in results]).view(mean.shape)
        ctx.save_for_backward(input, factor, offset, mean, var, rstd, count)
        return _joined(norm, [found.output for found in results], input)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        input, factor, offset, mean, var, rstd, count = ctx.saved_tensors
        exchange: Exchange = ctx.exchange
        gamma = torch.ones_like(mean) if factor is None else factor
        beta = torch.zeros_like(mean) if offset is None else offset
        calls = []
        if input.numel():
            tensors = _parts(grad_output, len(mean), input), _parts(input, len(mean))
            rows = [_rows(tensor, len(tensors[0])) for tensor in (mean, rstd, gamma, beta)]
            calls = [BackwardOperands(*each) for each in zip(*tensors, *rows, strict=True)]
        function = f"the backward of {exchange.function}"
        sums = _sums(function, ctx.norm, calls, mean) if calls else after(mean.new_zeros(2, *mean.shape), grad_output)
        wants_input, wants_factor, wants_offset = ctx.needs_input_grad[:3]
        grad_input = None
        if exchange.backward:
            units, wide = exchange.units, sums.double()
            sent = wide if exchange.replicated else units.sums(gamma * wide)
            # P and Q of a unit lie side by side, as fused.py has them.
            arrive = begin_sum(function, sent if exchange.replicated else sent.movedim(0, -1), exchange.groups)
            # A pass over memory while the sums are on their way.
            wide_calls = [_widened(each) for each in calls] if wants_input else []
            direct = [_direct(ctx.norm, each) for each in wide_calls]
            totals = arrive()
            if exchange.replicated:
                sums = totals.to(mean.dtype)
                totals = units.sums(gamma * totals)
            else:
                totals = totals.movedim(-1, 0)
            if wants_input:
                means = units.spread(totals / count.clamp(min=1), mean.shape[1])
                lines = (-rstd * means).to(mean.dtype).expand(2, *mean.shape)
                grad_input = _grad_input(ctx.norm, exchange, wide_calls, direct, var, lines, input)
        return grad_input, sums[1] if wants_factor else None, sums[0] if wants_offset else None, *(None,) * 5


def _parts(tensor: Tensor, rows: int, like: Tensor | None = None) -> list[Tensor]:
    """(N, C, *) as the inputs of calls with given statistics, each of whose channels is one of the statistics.

    Statistics of one row serve all samples: the tensor is one part. Elsewhere a sample's channels follow the sample
    before in memory, and the whole is one sample of N C channels; or else each sample is a part. ``like`` has the
    strides that decide.
    """
    strides = tensor if like is None else like
    if rows == 1:
        return [tensor]
    if strides.stride(0) == strides.shape[1] * strides.stride(1):
        return [tensor.flatten(0, 1).unsqueeze(0)]
    return list(tensor.split(1))


def _rows(tensor: Tensor | None, parts: int) -> list[Any]:
    """A row of statistics or parameters for each part."""
    if tensor is None:
        return [None] * parts
    return [tensor.reshape(-1)] if parts == 1 else list(tensor.reshape(parts, -1).unbind())


def _joined(norm: Norm, outputs: list[Tensor], like: Tensor) -> Tensor:
    """The inverse of :func:`_parts`."""
    if len(outputs) > 1:
        joined = empty_output(norm, like)
        for place, output in zip(joined.split(1), outputs, strict=True):
            place.copy_(output)
        return joined
    (output,) = outputs
    if output.shape == like.shape:
        return output
    seen = output.squeeze(0).unflatten(0, like.shape[:2])
    if _is_traced(seen):
        return seen
    # A Function's output that is a view could not be changed in place.
    whole = torch.empty(0, dtype=seen.dtype, device=seen.device)
    return whole.set_(seen.untyped_storage(), seen.storage_offset(), seen.shape, seen.stride())


def _sums(function: str, norm: Norm, calls: list[BackwardOperands], mean: Tensor) -> Tensor:
    """p and q of this rank's elements, of shape (2, *mean.shape)."""
    found = []
    for operands in calls:
        if not torch.compiler.is_dynamo_compiling():
            # Hooks on saved tensors can give back other shapes, and a kernel would go past a tensor's end.
            check_backward(function, norm, operands)
        # A and B are in the dtype of the computation, so that their gradients, q and p, are not rounded to another.
        found.append(gradients(norm, operands, (False, True, True, False, False)))
    p, q = _whole([each.bias for each in found]), _whole([each.weight for each in found])
    return torch.stack((p, q)).view(2, *mean.shape)


def _whole(parts: list[Tensor | None]) -> Tensor:
    """What each part has, one after the other."""
    found = [part for part in parts if part is not None]
    return found[0] if len(found) == 1 else torch.cat(found)


def _widened(o: BackwardOperands) -> BackwardOperands:
    """The operands with input and gradient in the dtype of the computation."""
    assert o.mean is not None
    dtype = o.mean.dtype
    return BackwardOperands(o.grad_output.to(dtype), o.input.to(dtype), o.mean, o.rstd, o.weight, o.bias)


def _direct(norm: Norm, operands: BackwardOperands) -> Tensor:
    """rstd A dz, the gradient of the input by given statistics."""
    direct = gradients(norm, operands, (True, False, False, False, False)).input
    assert direct is not None
    return direct


def _grad_input(
    norm: Norm,
    exchange: Exchange,
    calls: list[BackwardOperands],
    direct: list[Tensor],
    var: Tensor,
    lines: Tensor,
    input: Tensor,
) -> Tensor:
    """dx = rstd A dz + (lines[0] + x̂ lines[1]), where lines are - rstd P / K and - rstd Q / K.

    No kernel takes given sums. The first term is ``direct``, the second a forward whose weight and bias are the
    coefficients of x̂ and 1. Both are float32 (float64), since rounding each to a 16-bit dtype would triple the error
    where they cancel; so 16-bit tensors are copied here.
    """
    if not calls:
        return after(torch.empty_like(input), lines)
    line = call_norm("batch_norm", 0, norm.channel_dim, norm.eps, None, False)
    offsets = lines[0] if exchange.centred else None
    rows = (_rows(each, len(calls)) for each in (var, offsets, lines[1]))
    found = []
    for o, term, v, b, a in zip(calls, direct, *rows, strict=True):
        found.append(_added(line, Operands(o.input, a, b, mean=o.mean, var=v), term).to(input.dtype))
    return _joined(norm, found, input)


def _added(norm: Norm, operands: Operands, term: Tensor) -> Tensor:
    """The norm's output and ``term``: in one pass where an instance adds behind given statistics, as on a GPU."""
    behind = Sums(post_add=term)
    results = fused(norm, operands, behind) if straight(operands, behind) else None
    return term.add_(normalize(norm, operands).output) if results is None else results.output


def sum_gradients(function: str, group: Any, parameters: list[Tensor]) -> list[Tensor]:
    """The same tensors, whose gradients are the sums over the ranks; one exchange for all of them in the backward."""
    return list(_Summed.apply(function, group, *parameters))


class _Summed(torch.autograd.Function):
    """The identity, whose backward sums the gradients over the ranks, in their order and in float64."""

    @staticmethod
    def forward(ctx: Any, function: str, group: Any, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.function, ctx.group = function, group
        return tuple(each.view_as(each) for each in parameters)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        local = torch.cat([grad.double().flatten() for grad in grads])
        total = sum_in_rank_order(gather(f"the backward of {ctx.function}", local, ctx.group))
        sums = total.split([grad.numel() for grad in grads])
        return None, None, *(part.view_as(grad).to(grad.dtype) for part, grad in zip(sums, grads, strict=True))
