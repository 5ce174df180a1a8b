"""Batch normalization in training, with the statistics of all ranks of a group.

With K elements under one statistic over all ranks, A = weight and dz = dy phi'(z):

    forward   x̂ = (x - mean) rstd          y = phi(A x̂ + bias)
    backward  p = sum dz                    q = sum dz x̂             over this rank's elements
              dx = rstd (A dz - (P + x̂ Q) / K)                       P = A sum p, Q = A sum q over the ranks

One exchange forward, of (2 C + 1) float64 values for each rank, and one backward, of 2 C. The gradients of weight and
bias are q and p of this rank, as torch.nn.SyncBatchNorm's are: DistributedDataParallel averages them.
"""

from __future__ import annotations

from math import isnan
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fusednorm import arguments
from fusednorm.activations import Activation
from fusednorm.autograd import gradients, normalize
from fusednorm.distributed.agreement import refuse_peers
from fusednorm.distributed.collective import gather, sum_in_rank_order
from fusednorm.distributed.moments import merge_in_order, pack
from fusednorm.dtypes import compute_dtype
from fusednorm.functional import call_norm
from fusednorm.norm import Norm
from fusednorm.op_arguments import check_backward
from fusednorm.operands import BackwardOperands, Operands
from fusednorm.running import move_running


def check(
    function: str,
    channels: int,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    channel_dim: int,
) -> None:
    """This rank's arguments fit each other and the module's ``channels``; ValueError or TypeError where they do not."""
    arguments.check_input(function, input, 2)
    if input.shape[channel_dim] != channels:
        raise ValueError(
            f"{function}: input of shape {tuple(input.shape)} has {input.shape[channel_dim]} channels in dimension "
            f"{channel_dim}; expected num_features={channels}; build the module for {input.shape[channel_dim]} "
            "channels, or check channel_dim"
        )
    arguments.check_channels(function, Operands(input, weight, bias), eps, channel_dim)
    arguments.check_running(function, input, running_mean, running_var, channels, True)
    arguments.check_batch_eps(float(eps), True)


def take_part_in_vain(function: str, channels: int, device: torch.device, group: Any) -> None:
    """The forward's exchange of a rank that refuses its arguments: a count of NaN, so that no other rank waits for it
    or takes its values."""
    gather(function, torch.full((2 * channels + 1,), torch.nan, dtype=torch.float64, device=device), group)


def synchronized_batch_norm(
    function: str,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float | Tensor,
    eps: float,
    activation: Activation | None,
    channel_dim: int,
    group: Any,
) -> Tensor:
    """Batch normalization of checked arguments in training, by the statistics of all ranks of ``group``.

    Running statistics move towards the mean and the unbiased variance of the whole.
    """
    count = input.numel() // max(input.shape[channel_dim], 1)
    dtype = compute_dtype(input.dtype)
    with torch.no_grad():
        local = normalize(call_norm("batch_norm", 0, channel_dim, eps, None), Operands(input.detach()))
        assert local.mean is not None and local.var is not None
        parts = gather(function, pack(count, local.mean, local.var), group)
        # Reading the counts waits for a GPU and breaks a compiled graph; unread, a NaN in them makes all results NaN.
        # A rank with more than one element knows that the whole has a variance. Where the whole has one element, every
        # rank has one or none, so every rank reads and raises.
        elements = count
        if count <= 1 or (parts.device.type == "cpu" and not torch.compiler.is_compiling()):
            elements = _read_count(function, input, parts)
        whole = merge_in_order(parts)
        mean, var = whole.mean.to(dtype), whole.var().to(dtype)
        if running_mean is not None and running_var is not None and elements > 0:
            move_running(running_mean, mean, momentum)
            move_running(running_var, whole.unbiased_var().to(dtype), momentum)
    norm = call_norm("batch_norm", 0, channel_dim, eps, activation, False)
    output: Tensor = _Synchronized.apply(input, weight, bias, mean, var, whole.count, norm, function, group)
    return output


def _read_count(function: str, input: Tensor, parts: Tensor) -> int:
    """The elements for each channel of the whole, 0 or more than 1; an error where a rank refused its arguments."""
    counts = parts[:, -1].tolist()
    refusing = [rank for rank, count in enumerate(counts) if isnan(count)]
    if refusing:
        refuse_peers(function, refusing)
    elements = int(sum(counts))
    if elements == 1:
        raise ValueError(
            f"{function}: the inputs of all ranks have 1 element for each channel together, so its variance is 0; this "
            f"rank's has shape {tuple(input.shape)}; expected more than 1; use more samples, or evaluation mode"
        )
    return elements


class _Synchronized(torch.autograd.Function):
    """The normalization by the statistics of the whole, and its backward."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        var: Tensor,
        count: Tensor,
        norm: Norm,
        function: str,
        group: Any,
    ) -> Tensor:
        results = normalize(norm, Operands(input, weight, bias, mean=mean, var=var))
        ctx.norm, ctx.function, ctx.group = norm, function, group
        ctx.save_for_backward(input, weight, bias, mean, var, results.rstd, count)
        return results.output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, bias, mean, var, rstd, count = ctx.saved_tensors
        gamma, beta = _wide(weight, mean, 1.0), _wide(bias, mean, 0.0)
        operands = BackwardOperands(grad_output, input, mean, rstd, gamma, beta)
        if not torch.compiler.is_dynamo_compiling():
            # Hooks on saved tensors can give back other shapes, and a kernel would go past a tensor's end.
            check_backward(f"the backward of {ctx.function}", ctx.norm, operands)
        found = gradients(ctx.norm, operands, (False, True, True, False, False))
        q, p = found.weight, found.bias
        assert q is not None and p is not None
        wants_input, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_input = None
        if wants_input:
            sums = sum_in_rank_order(gather(ctx.function, torch.cat((p, q)).double(), ctx.group))
            sums /= count.clamp(min=1)
            grad_input = _grad_input(ctx.norm, operands, var, *sums.chunk(2))
        return (
            grad_input,
            q.to(weight.dtype) if wants_weight else None,
            p.to(bias.dtype) if wants_bias else None,
            *(None,) * 6,
        )


def _wide(parameter: Tensor | None, like: Tensor, absent: float) -> Tensor:
    """A parameter in the dtype of the computation, so that its gradient, which is p or q, is not rounded to its own."""
    return torch.full_like(like, absent) if parameter is None else parameter.to(like.dtype)


def _grad_input(norm: Norm, operands: BackwardOperands, var: Tensor, mean_dz: Tensor, mean_dz_xhat: Tensor) -> Tensor:
    """dx = rstd A dz - rstd A (mean_dz + x̂ mean_dz_xhat), with the means over all ranks.

    No kernel takes given sums. The first term is the backward with given statistics, the second a forward whose weight
    and bias are the coefficients of x̂ and 1. Both are float32 (float64), since rounding each to a 16-bit dtype would
    triple the error where they cancel; so 16-bit tensors are copied here.
    """
    input, mean, rstd, gamma = operands.input, operands.mean, operands.rstd, operands.weight
    assert mean is not None and gamma is not None
    wide, scale = input.to(mean.dtype), -(rstd * gamma)
    direct = gradients(
        norm,
        BackwardOperands(operands.grad_output.to(mean.dtype), wide, mean, rstd, gamma, operands.bias),
        (True, False, False, False, False),
    ).input
    assert direct is not None
    line = call_norm("batch_norm", 0, norm.channel_dim, norm.eps, None, False)
    through_statistics = normalize(
        line,
        Operands(wide, (scale * mean_dz_xhat).to(mean.dtype), (scale * mean_dz).to(mean.dtype), mean=mean, var=var),
    ).output
    return direct.add_(through_statistics).to(input.dtype)
