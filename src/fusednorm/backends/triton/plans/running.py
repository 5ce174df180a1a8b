"""The launch that moves running statistics (kernels/running.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from fusednorm.backends.triton.kernels.running import move_statistics
from fusednorm.backends.triton.launch import Launch, Scalars
from fusednorm.backends.triton.plans import base
from fusednorm.backends.triton.runs import power_of_two
from fusednorm.private.torch_names import current_device

#: Channels of a program, of which a thread has two.
CHANNELS, WARPS = 256, 4
#: A program whose batches or momenta change with every call pays for launches again.
MOST_LAUNCHES = 1024


class MoveRunning:
    """A :class:`~fusednorm.instance.MoveRunning`."""

    def __init__(self) -> None:
        self.launches: dict[Scalars, Launch] = {}

    def __call__(
        self,
        running_mean: Tensor,
        running_var: Tensor,
        mean: Tensor,
        var: Tensor,
        factor: float,
        share: float | Tensor,
        counter: Tensor | None,
    ) -> None:
        if mean.is_cuda and mean.get_device() != current_device():
            with torch.cuda.device(mean.device):
                return self(running_mean, running_var, mean, var, factor, share, counter)
        given = share if isinstance(share, Tensor) else None
        scalars = (mean.numel(), factor, 0.0 if isinstance(share, Tensor) else float(share))
        launch = self.launches.get(scalars)
        if launch is None:
            launch = self._keep(scalars)
        launch(mean, var, running_mean, running_var, counter, given)
        return None

    def _keep(self, scalars: Scalars) -> Launch:
        if len(self.launches) >= MOST_LAUNCHES:
            self.launches.clear()
        channels = int(scalars[0])
        block = min(power_of_two(channels), CHANNELS)
        constants = {"OVERLAP": base.overlaps(), "BLOCK": block}
        self.launches[scalars] = Launch(move_statistics, -(-channels // block), scalars, constants, WARPS)
        return self.launches[scalars]
