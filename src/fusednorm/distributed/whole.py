"""From a rank's operands to its part of the output, by the statistics of the whole: the families that have channels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusednorm.activations import Activation
from fusednorm.distributed.fused import normalize_fused
from fusednorm.distributed.moments import Units
from fusednorm.distributed.repeats import Repeat
from fusednorm.distributed.synchronized import (
    Exchange,
    Inspection,
    Running,
    exchange_statistics,
    local_moments,
    normalize_by,
    sum_gradients,
)
from fusednorm.dtypes import compute_dtype
from fusednorm.functional import call_norm
from fusednorm.instance import CutGroups
from fusednorm.norm import Family
from fusednorm.operands import Operands

Parameters = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def learns(operands: Operands) -> bool:
    """Whether a parameter could want a gradient. It asks for no parameter's ``requires_grad``, in which ranks may
    differ by mistake: those that exchange nothing would leave the others waiting."""
    return torch.is_grad_enabled() and any(each is not None for each in _parameters(operands))


def with_summed_gradients(function: str, group: Any, operands: Operands) -> Parameters:
    """weight, bias, scale and shift, which all ranks have alike; their gradients are the sums over the ranks.

    Those that require a gradient are in the dtype of the computation, in which a gradient is summed before it is
    rounded to the parameter's.
    """
    parameters = _parameters(operands)
    dtype = compute_dtype(operands.input.dtype)
    wanted = [each.to(dtype) for each in parameters if each is not None and each.requires_grad]
    if not wanted or not torch.is_grad_enabled():
        return parameters
    summed = iter(sum_gradients(function, group, wanted))
    a, b, c, d = (next(summed) if each is not None and each.requires_grad else each for each in parameters)
    return a, b, c, d


def _parameters(operands: Operands) -> Parameters:
    return operands.weight, operands.bias, operands.scale, operands.shift


@dataclass(slots=True, eq=False)
class Whole:
    """This rank's part of the output, and mean and biased variance of the whole, (N or 1, groups), in the dtype of the
    computation, with the elements under each, or under all, in float64."""

    output: Tensor
    mean: Tensor
    var: Tensor
    count: Tensor

    def unbiased_var(self) -> Tensor:
        """The unbiased variance, of which torch's running variance is an average."""
        return (self.var.double() * (self.count / (self.count - 1))).to(self.var.dtype)


def normalize_channels(
    function: str,
    groups: Sequence[Any],
    operands: Operands,
    units: Units,
    replicated: bool,
    eps: float,
    activation: str | Activation | None,
    channel_dim: int,
    running: Running | None = None,
    inspect: Inspection | None = None,
    repeat: Repeat | None = None,
) -> Whole:
    """The norm by the statistics of the whole. ``repeat`` keeps the call where kernels run it.

    ``replicated`` says that all ranks have the same parameters, whose gradients are summed over them. ``running``
    statistics, one for each statistic of the whole, move towards its mean and unbiased variance.
    """
    input = operands.input
    channels = input.shape[channel_dim]
    learning = any(each is not None and each.requires_grad for each in _parameters(operands))
    exchange = Exchange(function, groups, units, replicated, backward=input.requires_grad or (replicated and learning))
    samples = 1 if units.over_samples else input.shape[0]
    if samples:
        cut = _cut(units, samples, channels)
        norm = call_norm(*_family(units, cut), channel_dim, eps, activation)
        found = normalize_fused(exchange, norm, operands, running, inspect, cut, repeat)
        if found is not None:
            output, statistics = found
            mean, var = (each.view(samples, -1) for each in (statistics.mean, statistics.var))
            return Whole(output, mean, var, statistics.count)
    return _composed(exchange, operands, eps, activation, channel_dim, running, inspect)


def _cut(units: Units, samples: int, channels: int) -> CutGroups | None:
    """The groups of which a rank has so many ``channels``; None where it has all."""
    if units.first == 0 and channels == units.channels:
        return None
    return CutGroups(samples, units.channels // units.group_channels, units.group_channels, channels, units.first)


def _family(units: Units, cut: CutGroups | None) -> tuple[Family, int]:
    """The norm of a rank's units, or of its channels, and its number of groups."""
    if units.over_samples:
        return "batch_norm", 0
    groups = units.channels // units.group_channels
    return ("instance_norm", 0) if cut is not None or units.group_channels == 1 else ("group_norm", groups)


def _composed(
    exchange: Exchange,
    operands: Operands,
    eps: float,
    activation: str | Activation | None,
    channel_dim: int,
    running: Running | None,
    inspect: Inspection | None,
) -> Whole:
    """:func:`normalize_channels` by plans that know nothing of other processes, and torch's operators."""
    units, modulated = exchange.units, operands.scale is not None or operands.shift is not None
    # One row of statistics and parameters serves all samples of a batch_norm, in either order.
    moves = channel_dim == -1 and (modulated or not units.over_samples)
    input = operands.input.movedim(-1, 1) if moves else operands.input
    axis = 1 if moves else channel_dim
    dtype = compute_dtype(input.dtype)
    with torch.no_grad():
        part = units.merge(local_moments(input, units.over_samples, axis))
        whole_mean, whole_var, count = exchange_statistics(exchange, part, eps, dtype, running, inspect)
        mean, var = (units.spread(each, input.shape[axis]) for each in (whole_mean, whole_var))
    factor, offset = _affine(operands, dtype)
    # A row for each sample, of which there may be none, where anything differs by sample.
    rows = next((len(each) for each in (mean, factor, offset) if each is not None and len(each) != 1), 1)
    mean, var = (each.expand(rows, -1) for each in (mean, var))
    factor, offset = (None if each is None else each.expand(rows, -1) for each in (factor, offset))
    norm = call_norm("batch_norm", 0, axis, eps, activation, False)
    output = normalize_by(exchange, norm, input, factor, offset, mean, var, count)
    return Whole(output.movedim(1, -1) if moves else output, whole_mean, whole_var, count)


def _affine(operands: Operands, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """A = weight (1 + scale) and B = bias (1 + scale) + shift, of shape (N or 1, C), by torch's operators, through
    which autograd finds the gradients of the four."""
    weight, bias, scale, shift = (None if each is None else each.to(dtype) for each in _parameters(operands))
    factor = None if weight is None else weight[None]
    offset = None if bias is None else bias[None]
    if scale is not None:
        factor = 1 + scale if factor is None else factor * (1 + scale)
        offset = None if offset is None else offset * (1 + scale)
    if shift is not None:
        offset = shift if offset is None else offset + shift
    return factor, offset
