"""How the statistics of a call update the running ones."""

from __future__ import annotations

import torch
from torch import Tensor


def update_running(
    running_mean: Tensor, running_var: Tensor, mean: Tensor, var: Tensor, elements: int, momentum: float | Tensor
) -> None:
    """Move running statistics towards the call's mean and unbiased variance by the share ``momentum``.

    ``var`` is biased, over ``elements`` elements for each statistic.
    """
    move_running(running_mean, mean, momentum)
    move_running(running_var, var * (elements / (elements - 1)), momentum)


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
