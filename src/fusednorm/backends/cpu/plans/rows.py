"""Plans for one position per channel, around kernels/rows.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusednorm.backends.cpu.plans.base import CPU, BackwardPlan, ForwardPlan, Plan
from fusednorm.backends.cpu.threads import parallel_for
from fusednorm.problem import Problem


def _constants(plan: Plan) -> tuple[Tensor, Tensor]:
    """The weight and the bias of a problem that has none: the row kernels always read both."""
    ones = torch.ones(plan.channels, dtype=plan.compute, device=CPU)
    return ones, torch.zeros_like(ones)


class RowsForward(ForwardPlan):
    module = "rows"

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.forward, self.constants = self.kernel("forward"), _constants(self)
        self.ones, self.zeros = (tensor.data_ptr() for tensor in self.constants)

    def run(self, data: Sequence[int], saved: Sequence[int], parameters: Sequence[int], eps: float) -> None:
        weight, bias = parameters[0] or self.ones, parameters[1] or self.zeros
        arguments = (*data, *saved[:2], weight, bias, self.address, eps, self.parameter)
        parallel_for(self.forward, arguments, self.samples, self.tensor_bytes)


class RowsBackward(BackwardPlan):
    module = "rows"

    def __init__(self, problem: Problem, segments: int, rows: int) -> None:
        super().__init__(problem, segments, rows)
        self.segments, self.constants = segments, _constants(self)
        self.ones, self.zeros = (tensor.data_ptr() for tensor in self.constants)
        self.full, self.data_only = self.kernel("backward"), self.kernel("backward_data")

    def load_gradients(self) -> None:
        self.parameter_gradients = self.kernel("parameter_gradients", activated=False)

    def run(
        self,
        data: Sequence[int],
        saved: Sequence[int],
        parameters: Sequence[int],
        grads: list[int],
        wanted: list[int],
    ) -> None:
        weight, bias = parameters[0] or self.ones, parameters[1] or self.zeros
        summing = any(wanted)
        count = 2 * self.segments * self.channels if summing else 0
        block, (sums, partials) = self.workspace(count, count)
        arguments: tuple[Any, ...] = (*data, *saved, weight, bias, sums, partials, self.address, self.parameter)
        backward = self.full if summing else self.data_only
        parallel_for(backward, arguments, self.segments, 2 * self.tensor_bytes)
        if summing:
            arguments = (partials, *grads[:2], self.address, *wanted[:2], self.segments)
            parallel_for(self.parameter_gradients, arguments, self.channels, 8 * count)
