"""How the statistics of a call update the running ones: by one kernel where the device has one, else by torch's
operators."""

from __future__ import annotations

import torch
from torch import Tensor

from fusednorm.choice import moving
from fusednorm.gate import writable
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
    factor = elements / (elements - 1)
    if not _is_compiling() and _straight(running_mean, running_var, mean, var, momentum, counter):
        move = moving(mean.device.type)
        if move is not None:
            move(running_mean, running_var, mean, var, factor, momentum, counter)
            _increment_version((running_mean, running_var) if counter is None else (running_mean, running_var, counter))
            return
    move_running(running_mean, mean, momentum)
    move_running(running_var, var * factor, momentum)
    if counter is not None:
        counter.add_(1)


def _straight(
    running_mean: Tensor,
    running_var: Tensor,
    mean: Tensor,
    var: Tensor,
    momentum: float | Tensor,
    counter: Tensor | None,
) -> bool:
    """Whether a kernel may read and write the memory of these tensors, and nothing waits for a dispatcher call."""
    device = mean.device
    return (
        unseen(mean)
        and running_mean is not running_var
        and all(writable(each, device) for each in (running_mean, running_var, mean, var))
        and (counter is None or (writable(counter, device) and counter.dtype is torch.int64))
        and (not isinstance(momentum, Tensor) or (writable(momentum, device) and momentum.is_floating_point()))
    )


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
