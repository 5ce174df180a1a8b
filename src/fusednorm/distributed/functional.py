"""The functions of :mod:`fusednorm.functional` over an input that is spread over the processes of a group.

Each process has a part of the input along the dimension ``shard_dim``, of any size, none included; the parts in the
order of the ranks are the whole. Statistics are those of the whole, and each process gets its part of the output:

    y = phi(z)        z = x̂ weight (1 + scale) + bias (1 + scale) + shift        x̂ = (x - mean) (var + eps)^(-1/2)

Every process makes the same calls in the same order, forward and backward. Without a process group, and in a group of
one process, they are the functions of :mod:`fusednorm.functional`, and ``shard_dim`` may be left out.

Parameters are this process's slices where they have the sharded dimension (weight and bias over channels or over a
normalized dimension, scale and shift over samples or channels), and the same on all processes elsewhere. There their
gradients are the sums over all processes, the same on each; but where samples are spread, the gradients of weight and
bias are those of this process's samples, as torch's own: DistributedDataParallel averages them. A wrapper that averages
gradients must leave out, or multiply by the number of processes, the gradients that are sums here.

Processes that refuse their arguments, or that do not make the same call, give an error on every one, where the call
exchanges anything on each: one that exchanges nothing, by its shard_dim, its mode or its parameters, cannot see it, and
the others have an error after the group's timeout. There is no double backward. The exchange of what must agree is read
by each process, so it breaks a compiled graph, and waits for the device where the group has no transport for tensors of
the CPU. There it is made at the first call of a kind alone, and a later disagreement is an error after the group's
timeout. Over channels and normalized dimensions a kind has one size of this process's part, and the others keep theirs
too.

Source of the merged statistics: Chan, Golub and LeVeque, Updating Formulae and a Pairwise Algorithm for Computing
Sample Variances, 1979.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from fusednorm import arguments, functional
from fusednorm.activations import Activation
from fusednorm.distributed.agreement import Facts
from fusednorm.distributed.collective import active_group, gather, sum_in_rank_order
from fusednorm.distributed.moments import Units
from fusednorm.distributed.repeats import Repeat
from fusednorm.distributed.rows import row_norm
from fusednorm.distributed.sharding import (
    agrees_once,
    axis_of,
    channel_part,
    check_axis,
    facts_of,
    refuse_one_element,
    refusing_one_element,
    together_once,
)
from fusednorm.distributed.synchronized import Running
from fusednorm.distributed.whole import learns, normalize_channels, with_summed_gradients
from fusednorm.dtypes import compute_dtype
from fusednorm.operands import Operands
from fusednorm.running import move_running


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: str | Activation | None = None,
    channel_dim: int = 1,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    group: Any = None,
    shard_dim: int | None = None,
) -> Tensor:
    """:func:`fusednorm.group_norm` of an input that is spread over the processes of ``group``.

    Over samples nothing is exchanged. Over positions one exchange forward, of count, mean and M2 for each sample and
    group, and one backward. Over channels the same where a process has a part of a group, and nothing where each has
    whole groups. A call over positions or channels first exchanges what must agree.

    Args:
        input: this process's part of (N, C, *), or of (N, *, C) with ``channel_dim=-1``; any dtype and strides that
            :func:`fusednorm.group_norm` takes.
        num_groups: the whole's, a divisor of its C.
        weight, bias: (C,) of this process's channels, or None.
        eps, activation, channel_dim: as in :func:`fusednorm.group_norm`.
        scale, shift: (N, C) of this process's samples and channels, or None.
        group: a torch.distributed ProcessGroup; None for the default one.
        shard_dim: the input's dimension that is spread; needed in a group of several processes.

    Raises:
        ValueError, TypeError: as :func:`fusednorm.group_norm`; no ``shard_dim``, or none of the input's dimensions;
            a process that is no member of ``group``.
        RuntimeError: another process refused its arguments, does not make the same call, or made no call within the
            group's timeout.

    Source: Wu and He, Group Normalization, 2018 (arXiv:1803.08494).

    >>> x = torch.randn(2, 8, 4, 6)
    >>> torch.equal(group_norm(x, 4, shard_dim=2), functional.group_norm(x, 4))  # in one process
    True
    """
    function = "distributed.group_norm"
    ranks = active_group(function, group)
    axis = 0 if ranks is None else axis_of(function, input, shard_dim)
    part = channel_part(input, axis, channel_dim)
    fused: dict[str, Any] = {"activation": activation, "channel_dim": channel_dim, "scale": scale, "shift": shift}
    if part == "samples":
        return functional.group_norm(input, num_groups, weight, bias, eps, **fused)
    operands = Operands(input, weight, bias, scale, shift)
    repeat = Repeat(ranks, (function, num_groups, eps, channel_dim, shard_dim), activation)
    output = repeat.output(operands)
    if output is not None:
        return output

    def check() -> Facts:
        check_axis(function, input, shard_dim)
        arguments.check_channels(function, operands, eps, channel_dim)
        arguments.check_integer(function, "num_groups", num_groups)
        return facts_of(operands, axis, eps, activation, channel_dim=channel_dim, num_groups=num_groups)

    shard = together_once(function, ranks, axis, input, check, sizes=part == "channels")
    channels = shard.whole if shard is not None and part == "channels" else input.shape[channel_dim]
    if num_groups <= 0 or channels % num_groups:
        raise ValueError(
            f"{function}: the {channels} channels of all processes cannot be divided into num_groups={num_groups} "
            f"equal groups; choose a divisor of {channels}; this process's input has shape {tuple(input.shape)}"
        )
    size, first = channels // num_groups, 0
    if shard is not None:
        elements = shard.elements(input)
        if elements == num_groups:
            refuse_one_element(function, "group")
        apart = part == "channels" and all(each % size == 0 for each in shard.sizes)
        if elements == 0 or apart:
            groups = max(input.shape[channel_dim] // size, 1) if apart and elements else 1
            return functional.group_norm(input, groups, weight, bias, eps, **fused)
        first = shard.first if part == "channels" else 0
    units = Units(channels, group_channels=size, first=first)
    inspect = refusing_one_element(function, "group", units, input, shard)
    kept = repeat if agrees_once(ranks) else None
    return normalize_channels(
        function, (ranks,), operands, units, part == "positions", eps, activation, channel_dim, None, inspect, kept
    ).output


def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    activation: str | Activation | None = None,
    channel_dim: int = 1,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    group: Any = None,
    shard_dim: int | None = None,
) -> Tensor:
    """:func:`fusednorm.instance_norm` of an input that is spread over the processes of ``group``.

    Over positions one exchange forward and one backward, as in :func:`group_norm`. Over samples the running statistics
    are exchanged, where there are any; over channels nothing is. With ``use_input_stats=False`` only the gradients of
    the parameters are exchanged, over positions. A call that exchanges anything first exchanges what must agree.

    Args:
        input: this process's part of (N, C, *), or of (N, *, C) with ``channel_dim=-1``.
        running_mean, running_var: (C,) buffers of this process's channels, or None; updated by the statistics of the
            whole, alike on all processes that have them.
        weight, bias, scale, shift, group, shard_dim: as in :func:`group_norm`.
        use_input_stats, momentum, eps, activation, channel_dim: as in :func:`fusednorm.instance_norm`.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`fusednorm.instance_norm` and :func:`group_norm`.

    Source: Ulyanov et al., Instance Normalization, 2016 (arXiv:1607.08022).

    >>> x = torch.randn(2, 8, 4, 6)
    >>> torch.equal(instance_norm(x, shard_dim=3), functional.instance_norm(x))  # in one process
    True
    """
    function = "distributed.instance_norm"
    ranks = active_group(function, group)
    axis = 0 if ranks is None else axis_of(function, input, shard_dim)
    part = channel_part(input, axis, channel_dim)
    own = bool(use_input_stats)
    moves = own and (running_mean is not None or running_var is not None)
    fused: dict[str, Any] = {"activation": activation, "channel_dim": channel_dim, "scale": scale, "shift": shift}
    operands = Operands(input, weight, bias, scale, shift)
    exchanges = {"samples": moves, "channels": False, "positions": own or learns(operands)}[part]
    if ranks is None or not exchanges:
        return functional.instance_norm(
            input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps, **fused
        )
    repeat = Repeat(ranks, (function, use_input_stats, eps, channel_dim, shard_dim), activation)
    if own and not moves:
        output = repeat.output(operands)
        if output is not None:
            return output

    def check() -> Facts:
        check_axis(function, input, shard_dim)
        channels = arguments.check_channels(function, operands, eps, channel_dim)
        arguments.check_running(function, input, running_mean, running_var, channels, own)
        arguments.check_momentum(function, momentum)
        return facts_of(
            operands, axis, eps, activation, channel_dim=channel_dim, use_input_stats=own, momentum=momentum,
            running_statistics=running_mean is not None,
        )  # fmt: skip

    shard = together_once(function, ranks, axis, input, check)
    if not own:
        weight, bias, scale, shift = with_summed_gradients(function, ranks, operands)
        return functional.instance_norm(
            input, running_mean, running_var, weight, bias, False, momentum, eps, activation=activation,
            channel_dim=channel_dim, scale=scale, shift=shift,
        )  # fmt: skip
    channels = input.shape[channel_dim]
    empty = shard is not None and shard.elements(input) == 0
    if empty or part == "samples":
        if not empty and prod(input.shape[1:]) == channels:
            refuse_one_element(function, "sample and channel")
        # What this process's samples alone would make of the running statistics at a momentum of 1.
        averages = torch.zeros(2, channels, dtype=torch.float64, device=input.device)
        output = functional.instance_norm(input, averages[0], averages[1], weight, bias, True, 1.0, eps, **fused)
        if running_mean is not None and running_var is not None and not empty:
            _move_by_samples(function, ranks, input, averages, running_mean, running_var, momentum)
        return output
    if shard is not None and shard.elements(input) == input.shape[0] * channels:
        refuse_one_element(function, "sample and channel")
    units = Units(channels)
    inspect = refusing_one_element(function, "sample and channel", units, input, shard)
    kept = repeat if not moves and agrees_once(ranks) else None
    found = normalize_channels(
        function, (ranks,), operands, units, True, eps, activation, channel_dim, None, inspect, kept
    )
    if running_mean is not None and running_var is not None:
        move_running(running_mean, found.mean.mean(0), momentum)
        move_running(running_var, found.unbiased_var().mean(0), momentum)
    return found.output


def _move_by_samples(
    function: str,
    group: Any,
    input: Tensor,
    averages: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
) -> None:
    """Move running statistics towards the mean and the unbiased variance of all ranks' samples, of which this rank has
    the ``averages`` of its own. Nothing is read on the host, not even whether there are any samples."""
    sent = torch.cat((averages.flatten() * len(input), averages.new_full((1,), len(input))))
    total = sum_in_rank_order(gather(function, sent, group))
    samples, share = total[-1], (total[-1] > 0).double() * momentum
    mean, var = (total[:-1] / samples.clamp(min=1)).view(2, -1).to(compute_dtype(input.dtype))
    move_running(running_mean, mean, share)
    move_running(running_var, var, share)


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    activation: str | Activation | None = None,
    channel_dim: int = 1,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    group: Any = None,
    shard_dim: int | None = None,
) -> Tensor:
    """:func:`fusednorm.batch_norm` of an input that is spread over the processes of ``group``.

    In training, over samples or positions, one exchange forward, of count, mean and M2 for each channel, and one
    backward; over channels nothing. In evaluation only the gradients of the parameters are exchanged, over positions.
    A call that exchanges anything first exchanges what must agree. :class:`fusednorm.nn.SyncBatchNorm` is the module
    for samples, and makes that check once.

    Args:
        input: this process's part of (N, C, *), or of (N, *, C) with ``channel_dim=-1``.
        running_mean, running_var: (C,) buffers of this process's channels, or None; updated by the statistics of the
            whole, alike on all processes that have them.
        weight, bias, scale, shift, group, shard_dim: as in :func:`group_norm`.
        training, momentum, eps, activation, channel_dim: as in :func:`fusednorm.batch_norm`.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`fusednorm.batch_norm` and :func:`group_norm`.

    Source: Ioffe and Szegedy, Batch Normalization, 2015 (arXiv:1502.03167).

    >>> x = torch.randn(2, 8, 4, 6)
    >>> y = batch_norm(x, None, None, training=True, shard_dim=0)
    >>> torch.equal(y, functional.batch_norm(x, None, None, training=True))  # in one process
    True
    """
    function = "distributed.batch_norm"
    ranks = active_group(function, group)
    axis = 0 if ranks is None else axis_of(function, input, shard_dim)
    part = channel_part(input, axis, channel_dim)
    own = bool(training)
    fused: dict[str, Any] = {"activation": activation, "channel_dim": channel_dim, "scale": scale, "shift": shift}
    operands = Operands(input, weight, bias, scale, shift)
    exchanges = {"samples": own, "channels": False, "positions": own or learns(operands)}[part]
    if ranks is None or not exchanges:
        return functional.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps, **fused)
    running = None
    if running_mean is not None and running_var is not None:
        running = Running(running_mean, running_var, momentum)
    repeat = Repeat(ranks, (function, training, momentum, eps, channel_dim, shard_dim), activation)
    if own and (running_mean is None) == (running_var is None):
        output = repeat.output(operands, running)
        if output is not None:
            return output

    def check() -> Facts:
        check_axis(function, input, shard_dim)
        channels = arguments.check_channels(function, operands, eps, channel_dim)
        arguments.check_running(function, input, running_mean, running_var, channels, own)
        arguments.check_momentum(function, momentum)
        arguments.check_batch_eps(float(eps), own)
        return facts_of(
            operands, axis, eps, activation, channel_dim=channel_dim, training=own, momentum=momentum,
            running_statistics=running_mean is not None,
        )  # fmt: skip

    shard = together_once(function, ranks, axis, input, check)
    if not own:
        weight, bias, scale, shift = with_summed_gradients(function, ranks, operands)
        return functional.batch_norm(
            input, running_mean, running_var, weight, bias, False, momentum, eps, activation=activation,
            channel_dim=channel_dim, scale=scale, shift=shift,
        )  # fmt: skip
    channels = input.shape[channel_dim]
    if shard is not None:
        elements = shard.elements(input)
        if elements == 0:
            return functional.batch_norm(input, running_mean, running_var, weight, bias, True, momentum, eps, **fused)
        if elements == channels:
            refuse_one_element(function, "channel")
    units = Units(channels, over_samples=True)
    inspect = refusing_one_element(function, "channel", units, input, shard)
    replicated, kept = part == "positions", repeat if agrees_once(ranks) else None
    return normalize_channels(
        function, (ranks,), operands, units, replicated, eps, activation, channel_dim, running, inspect, kept
    ).output


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: str | Activation | None = None,
    channel_dim: int = -1,
    group: Any = None,
    shard_dim: int | None = None,
) -> Tensor:
    """:func:`fusednorm.layer_norm` of an input that is spread over the processes of ``group``.

    Over a normalized dimension one exchange forward, of count, mean and M2 for each row, and one backward. Over the
    first dimension nothing is exchanged; over any other only the gradients of weight and bias. A call that exchanges
    anything first exchanges what must agree. Rows whose elements cannot be seen as one dimension are copied.

    Args:
        input: this process's part of (*, *normalized_shape), or of (N, C, *) with ``channel_dim=1``.
        normalized_shape: the whole's sizes of the trailing dimensions, as a tuple; (C,) with ``channel_dim=1``.
        weight, bias: of shape ``normalized_shape``, of this process's elements where they are spread; or None.
        eps, activation, channel_dim: as in :func:`fusednorm.layer_norm`.
        group, shard_dim: as in :func:`group_norm`.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`fusednorm.layer_norm` and :func:`group_norm`; sizes of all
            processes that do not make up ``normalized_shape``.

    Source: Ba et al., Layer Normalization, 2016 (arXiv:1607.06450).

    >>> x = torch.randn(2, 5, 8)
    >>> torch.equal(layer_norm(x, (8,), shard_dim=-1), functional.layer_norm(x, (8,)))  # in one process
    True
    """
    function = "distributed.layer_norm"
    ranks = active_group(function, group)
    if ranks is None:
        return functional.layer_norm(
            input, normalized_shape, weight, bias, eps, activation=activation, channel_dim=channel_dim
        )

    def plain(weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return functional.layer_norm(
            input, normalized_shape, weight, bias, eps, activation=activation, channel_dim=channel_dim
        )

    operands = Operands(input, weight, bias)
    return row_norm(function, ranks, operands, normalized_shape, eps, activation, channel_dim, shard_dim, True, plain)


def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    activation: str | Activation | None = None,
    channel_dim: int = -1,
    group: Any = None,
    shard_dim: int | None = None,
) -> Tensor:
    """:func:`fusednorm.rms_norm` of an input that is spread over the processes of ``group``.

    y = phi(x rstd weight), rstd = (mean(x²) + eps)^(-1/2) of the whole. What is exchanged is :func:`layer_norm`'s.

    Args:
        input, normalized_shape, weight, activation, channel_dim, group, shard_dim: as in :func:`layer_norm`.
        eps: None means the machine epsilon of the compute dtype: of float32, and of float64 for float64 input.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`layer_norm`.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019 (arXiv:1910.07467).

    >>> x = torch.randn(2, 5, 8)
    >>> torch.equal(rms_norm(x, (8,), shard_dim=-1), functional.rms_norm(x, (8,)))  # in one process
    True
    """
    function = "distributed.rms_norm"
    ranks = active_group(function, group)
    if ranks is None:
        return functional.rms_norm(input, normalized_shape, weight, eps, activation=activation, channel_dim=channel_dim)

    def plain(weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return functional.rms_norm(input, normalized_shape, weight, eps, activation=activation, channel_dim=channel_dim)

    operands = Operands(input, weight)
    return row_norm(function, ranks, operands, normalized_shape, eps, activation, channel_dim, shard_dim, False, plain)
