"""How the statistics of a call update the running ones: by one kernel where the device has one, else by torch's
operators."""

from __future__ import annotations

import torch
from torch import Tensor

from fusednorm.choice import moving
from fusednorm.gate import writable
from fusednorm.instance import Move
from fusednorm.private.torch_names import unseen

_is_compiling = torch.compiler.is_dynamo_compiling
_increment_version = torch.autograd.graph.increment_version


def update_running(
    running_mean: Tensor,
    running_var: Tensor,
    mean: Tensor,
    var: Tensor,
    elements: int,
    momentum: float | Tensor,
    counter: Tensor | None = None,
) -> None:
    """Move running statistics towards the call's mean and unbiased variance by the share ``momentum``, and add one to
    ``counter``.

    ``var`` is biased, over ``elements`` elements for each statistic.
    """
    move = None
    if not _is_compiling() and unseen(mean) and writable(mean, mean.device) and writable(var, mean.device):
        move = mover(running_mean, running_var, elements, momentum, counter, mean.device, mean.dtype)
    if move is not None:
        move(running_mean, running_var, mean, var, counter)
        moved(running_mean, running_var, counter)
        return
    move_running(running_mean, mean, momentum)
    move_running(running_var, var * (elements / (elements - 1)), momentum)
    if counter is not None:
        counter.add_(1)


def mover(
    running_mean: Tensor,
    running_var: Tensor,
    elements: int,
    momentum: float | Tensor,
    counter: Tensor | None,
    device: torch.device,
    dtype: torch.dtype,
) -> Move | None:
    """The kernel that moves running statistics with the metadata of these by statistics of a dtype, where the device
    has one that may write to their memory; ``moved`` says afterwards that they were."""
    kernel = moving(device.type, dtype)
    if (
        kernel is None
        or running_mean is running_var
        or not all(writable(each, device) for each in (running_mean, running_var))
        or not (counter is None or (writable(counter, device) and counter.dtype is torch.int64))
        or not (not isinstance(momentum, Tensor) or (writable(momentum, device) and momentum.is_floating_point()))
    ):
        return None
    factor = elements / (elements - 1)

    def move(running_mean: Tensor, running_var: Tensor, mean: Tensor, var: Tensor, counter: Tensor | None) -> None:
        kernel(running_mean, running_var, mean, var, factor, momentum, counter)

    return move


def moved(running_mean: Tensor, running_var: Tensor, counter: Tensor | None) -> None:
    """Tell autograd of what a kernel has written to."""
    _increment_version((running_mean, running_var) if counter is None else (running_mean, running_var, counter))


def move_running(running: Tensor, statistic: Tensor, momentum: float | Tensor) -> None:
    if isinstance(momentum, Tensor):
        momentum = momentum.to(statistic.dtype)
    if running.dtype == statistic.dtype:
        running.lerp_(statistic, momentum)
    else:
        # The wider dtype carries the sum, so that a half-precision buffer is rounded once, as in torch.
        wide = torch.promote_types(running.dtype, statistic.dtype)
        weight = momentum.to(wide) if isinstance(momentum, Tensor) else momentum
        running.copy_(torch.lerp(running.to(wide), statistic.to(wide), weight))
