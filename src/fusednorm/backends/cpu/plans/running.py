"""The call that moves running statistics (kernels/running.py)."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from fusednorm.backends.cpu.compiler import Kernel, load
from fusednorm.backends.cpu.frame import Frame, template, writer
from fusednorm.backends.cpu.plans.base import CODES
from fusednorm.backends.cpu.threads import Loop, Program

RUNNING, RUNNING_PLACE = writer("running_mean", "counts")
STATISTICS, STATISTICS_PLACE = writer("mean", "variance")


class MoveRunning:
    """A :class:`~fusednorm.instance.MoveRunning` by statistics of a dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.kernel = load(Kernel("running", "move", str(dtype).removeprefix("torch.")))
        self.program = lru_cache(self._program)  # of so many channels
        self.idle: list[Frame] = []

    def _program(self, channels: int) -> Program:
        return Program([Loop(((self.kernel, 1),), channels, 0)])

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
        try:
            frame = self.idle.pop()
        except IndexError:
            frame = Frame(template({}))
        STATISTICS(frame.words, STATISTICS_PLACE, mean.data_ptr(), 0, var.data_ptr())
        RUNNING(
            frame.words, RUNNING_PLACE, running_mean.data_ptr(), CODES[running_mean.dtype], running_var.data_ptr(),
            CODES[running_var.dtype], factor, float(share), 0 if counter is None else counter.data_ptr(),
            counter is not None,
        )  # fmt: skip
        self.program(mean.numel()).run(frame, 1)
        self.idle.append(frame)
