"""Batch normalization in training, with the statistics of all ranks of a group: what SyncBatchNorm calls.

One exchange forward, of (2 C + 1) float64 values for each rank, and one backward, of 2 C. The gradients of weight and
bias are this rank's, as torch.nn.SyncBatchNorm's are: DistributedDataParallel averages them.
"""

from __future__ import annotations

from math import isnan
from typing import Any

import torch
from torch import Tensor

from fusednorm import arguments
from fusednorm.activations import Activation
from fusednorm.distributed.agreement import refuse_peers
from fusednorm.distributed.collective import gather
from fusednorm.distributed.moments import Units
from fusednorm.distributed.repeats import Repeat
from fusednorm.distributed.synchronized import Running
from fusednorm.distributed.whole import normalize_channels
from fusednorm.operands import Operands


def check(
    function: str,
    channels: int,
    operands: Operands,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    eps: float,
    channel_dim: int,
) -> None:
    """This rank's arguments fit each other and the module's ``channels``; ValueError or TypeError where they do not."""
    input = operands.input
    arguments.check_input(function, input, 2)
    arguments.check_channel_dim(function, channel_dim)
    if input.shape[channel_dim] != channels:
        raise ValueError(
            f"{function}: input of shape {tuple(input.shape)} has {input.shape[channel_dim]} channels in dimension "
            f"{channel_dim}; expected num_features={channels}; build the module for {input.shape[channel_dim]} "
            "channels, or check channel_dim"
        )
    arguments.check_channels(function, operands, eps, channel_dim)
    arguments.check_running(function, input, running_mean, running_var, channels, True)
    arguments.check_batch_eps(float(eps), True)


def take_part_in_vain(function: str, channels: int, device: torch.device, group: Any) -> None:
    """The forward's exchange of a rank that refuses its arguments: a count of NaN, so that no other rank waits for it
    or takes its values."""
    gather(function, torch.full((2 * channels + 1,), torch.nan, dtype=torch.float64, device=device), group)


def synchronized_batch_norm(
    function: str,
    operands: Operands,
    running: Running | None,
    eps: float,
    activation: Activation | None,
    channel_dim: int,
    group: Any,
    repeat: Repeat,
) -> Tensor:
    """Batch normalization of checked operands in training, by the statistics of all ranks of ``group``."""
    input = operands.input
    channels = input.shape[channel_dim]

    def inspect(parts: Tensor) -> bool:
        return _read_count(function, input, parts) > 0

    reads = _reads_counts(input, channels)
    units = Units(channels, over_samples=True)
    return normalize_channels(
        function, (group,), operands, units, False, eps, activation, channel_dim, running, inspect if reads else None,
        repeat,
    ).output  # fmt: skip


def _reads_counts(input: Tensor, channels: int) -> bool:
    """Whether this rank reads how many elements the ranks have.

    That waits for a GPU and breaks a compiled graph; unread, a NaN in them makes all results NaN. A rank with more than
    one element knows that the whole has a variance. Where the whole has one element, every rank has one or none, so
    every rank reads and raises.
    """
    waits = input.device.type != "cpu" or torch.compiler.is_compiling()
    return not waits or input.numel() // max(channels, 1) <= 1


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
