"""From a rank's operands to its part of the output, by the statistics of the whole: the families that have channels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusednorm.activations import Activation
from fusednorm.distributed.moments import Moments, Units
from fusednorm.distributed.synchronized import (
    Exchange,
    exchange_moments,
    local_moments,
    normalize_by,
    sum_gradients,
)
from fusednorm.dtypes import compute_dtype
from fusednorm.functional import call_norm
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


def normalize_channels(
    function: str,
    groups: Sequence[Any],
    operands: Operands,
    units: Units,
    replicated: bool,
    eps: float,
    activation: str | Activation | None,
    channel_dim: int,
) -> tuple[Tensor, Moments]:
    """This rank's part of the output, and the statistics of the whole, (N or 1, groups).

    ``replicated`` says that all ranks have the same parameters, whose gradients are summed over them.
    """
    input = operands.input.movedim(-1, 1) if channel_dim == -1 else operands.input
    learning = any(each is not None and each.requires_grad for each in _parameters(operands))
    exchange = Exchange(
        function, groups, units, replicated, backward=operands.input.requires_grad or (replicated and learning)
    )
    dtype, channels = compute_dtype(input.dtype), input.shape[1]
    with torch.no_grad():
        whole = exchange_moments(exchange, units.merge(local_moments(input, units.over_samples)))
        mean, var = (units.spread(each.to(dtype), channels) for each in (whole.mean, whole.var()))
    factor, offset = _affine(operands, dtype)
    # One row serves all samples of a batch_norm without a modulation.
    shape = torch.broadcast_shapes(*(each.shape for each in (mean, factor, offset) if each is not None))
    rows = [None if each is None else each.expand(shape) for each in (factor, offset)]
    norm = call_norm("batch_norm", 0, 1, eps, activation, False)
    output = normalize_by(exchange, norm, input, rows[0], rows[1], mean.expand(shape), var.expand(shape), whole.count)
    return output.movedim(1, -1) if channel_dim == -1 else output, whole


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
