"""Running statistics, which move towards those of a call."""

from __future__ import annotations

import numpy as np

from fusednorm.backends.cpu.kernels.device import exact
from fusednorm.backends.cpu.kernels.elements import Element
from fusednorm.backends.cpu.kernels.operands import number, put_number


@exact
def move_to(running, c, dtype, statistic, share):
    """Move a running statistic towards this one, from the nearer end, so that a share of 1 gives the statistic."""
    before = number(running, c, dtype)
    step = statistic - before
    moved = before + share * step if share < 0.5 else statistic - (1.0 - share) * step
    put_number(running, c, moved, dtype)


def build_move(element: Element, value, pullback):
    """The running statistics of channels start to stop, all of which are one task of a thread."""

    def move(
        mean, variance, running_mean, running_mean_dtype, running_variance, running_variance_dtype, factor, share,
        counter, counts, start, stop,
    ):  # fmt: skip
        for c in range(start, stop):
            move_to(running_mean, c, running_mean_dtype, np.float64(mean[c]), share)
            move_to(running_variance, c, running_variance_dtype, np.float64(variance[c]) * factor, share)
        if counts and start == 0:
            counter[0] += 1

    return move


BUILDERS = {"move": build_move}
