"""layer_norm and rms_norm of an input that is spread over the ranks of a group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from fusednorm import arguments
from fusednorm.activations import Activation
from fusednorm.autograd import normalize
from fusednorm.distributed.agreement import Facts
from fusednorm.distributed.fused import normalize_fused
from fusednorm.distributed.moments import Moments, Units
from fusednorm.distributed.repeats import Repeat
from fusednorm.distributed.sharding import agrees_once, axis_of, check_axis, facts_of, row_part, together_once
from fusednorm.distributed.synchronized import Exchange, exchange_statistics, local_moments, normalize_by
from fusednorm.distributed.whole import learns, with_summed_gradients
from fusednorm.dtypes import compute_dtype
from fusednorm.functional import call_norm
from fusednorm.operands import Operands


def row_norm(
    function: str,
    group: Any,
    operands: Operands,
    normalized_shape: Sequence[int],
    eps: float | None,
    activation: str | Activation | None,
    channel_dim: int,
    shard_dim: int | None,
    centred: bool,
    plain: Callable[[Tensor | None, Tensor | None], Tensor],
) -> Tensor:
    """The call over a group; ``plain`` is the same in one process, of a weight and a bias. rms_norm is not centred."""
    input, weight, bias = operands.input, operands.weight, operands.bias
    axis = axis_of(function, input, shard_dim)
    part = row_part(input, axis, normalized_shape, channel_dim)
    sizes = normalized_shape if isinstance(normalized_shape, tuple) else ()
    repeat = Repeat(group, (function, normalized_shape, *sizes, eps, channel_dim, shard_dim), activation)
    output = repeat.output(operands)
    if output is not None:
        return output
    if part == "samples" or (part == "rows" and not learns(operands)):
        return plain(weight, bias)

    def check() -> Facts:
        number = arguments.rms_eps(function, input, eps)
        check_axis(function, input, shard_dim)
        shape = normalized_shape
        if part == "normalized" and isinstance(shape, (tuple, list)):
            # This rank's own sizes; the sum of all ranks' is checked when it is known.
            place = axis - (1 if channel_dim == 1 else input.dim() - len(shape))
            shape = tuple(input.shape[axis] if each == place else size for each, size in enumerate(shape))
        arguments.check_normalized(function, operands, shape, number, channel_dim)
        wanted = tuple(normalized_shape)
        return facts_of(operands, axis, number, activation, channel_dim=channel_dim, normalized_shape=wanted)

    if part == "rows":
        together_once(function, group, axis, input, check)
        weight, bias, _, _ = with_summed_gradients(function, group, operands)
        return plain(weight, bias)
    shard = together_once(function, group, axis, input, check, sizes=True)
    assert shard is not None
    expected = normalized_shape[0 if channel_dim == 1 else axis - input.dim()]
    if shard.whole != expected:
        raise ValueError(
            f"{function}: the sizes of all processes along dimension {axis} are {shard.sizes}, together {shard.whole}; "
            f"expected the {expected} of normalized_shape={tuple(normalized_shape)}, which is the whole's"
        )
    if shard.elements(input) == 0:
        return input.clone()
    number = arguments.rms_eps(function, input, eps)
    dims = 0 if channel_dim == 1 else len(normalized_shape)
    kept = repeat if agrees_once(group) else None
    return normalize_rows(function, (group,), operands, dims, number, activation, centred, kept)


def normalize_rows(
    function: str,
    groups: Sequence[Any],
    operands: Operands,
    num_dims: int,
    eps: float,
    activation: str | Activation | None,
    centred: bool,
    repeat: Repeat | None = None,
) -> Tensor:
    """Normalization of rows whose elements are spread over the ranks of all ``groups``.

    Rows are ``num_dims`` trailing dimensions, or with 0 the channels of (N, C, *), which may have scale and shift.
    ``repeat`` keeps the call where kernels run it.
    """
    input = operands.input
    rows = prod(input.shape[: input.dim() - num_dims] if num_dims else input.shape[2:])
    exchange = Exchange(function, groups, Units(rows), backward=input.requires_grad, centred=centred)
    norm = call_norm("layer_norm" if centred else "rms_norm", num_dims, 1, eps, activation)
    found = normalize_fused(exchange, norm, operands, repeat=repeat)
    return _composed(exchange, operands, num_dims, eps, activation) if found is None else found[0]


def _composed(
    exchange: Exchange, operands: Operands, num_dims: int, eps: float, activation: str | Activation | None
) -> Tensor:
    """:func:`normalize_rows` by plans that know nothing of other processes.

    weight and bias belong to the elements of a row, while the engine has an affine per row. So where there are any, it
    leaves x̂ in the dtype of the computation, and a second call makes the affine and the activation.
    """
    input = operands.input
    dtype = compute_dtype(input.dtype)
    affine = any(each is not None for each in operands.tensors()[1:])
    with torch.no_grad():
        part = local_moments(_as_units(input, num_dims))
        if not exchange.centred:
            part = Moments(part.count, torch.zeros_like(part.mean), part.m2 + part.count * part.mean.square())
        mean, var, count = exchange_statistics(exchange, part, eps, dtype)
    norm = call_norm("batch_norm", 0, 1, eps, None if affine else activation, False)
    wide = input.to(dtype) if affine else input
    units = normalize_by(exchange, norm, _as_units(wide, num_dims), None, None, mean, var, count)
    if not affine:
        return _from_units(units, input.shape, num_dims)
    # An element of a row is a channel here: (R, K), or (N, C, *).
    rows = units[0] if num_dims else _from_units(units, input.shape, num_dims)
    elements = rows.shape[1]
    zeros, ones = rows.new_zeros(elements), rows.new_ones(elements)
    line = call_norm("batch_norm", 0, 1, 0.0, activation, False)
    flat = [None if each is None else each.flatten() for each in (operands.weight, operands.bias)]
    spread = Operands(rows, flat[0], flat[1], operands.scale, operands.shift, zeros, ones)
    output = normalize(line, spread, False).output
    return output.reshape(input.shape).to(input.dtype)


def _as_units(input: Tensor, num_dims: int) -> Tensor:
    """The rows as the channels of one sample, (1, R, K), or of each sample's positions, (N, S, C)."""
    if num_dims:
        split = input.dim() - num_dims
        return input.reshape(1, prod(input.shape[:split]), prod(input.shape[split:]))
    return (input.unsqueeze(2) if input.dim() == 2 else input.flatten(2)).transpose(1, 2)


def _from_units(units: Tensor, shape: torch.Size, num_dims: int) -> Tensor:
    return (units if num_dims else units.transpose(1, 2)).reshape(shape)
