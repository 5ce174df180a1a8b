"""Plans of the channels_first order, around kernels/planes.py."""

from __future__ import annotations

from collections.abc import Sequence

from fusednorm.backends.cpu.plans.base import BackwardPlan, ForwardPlan
from fusednorm.backends.cpu.threads import parallel_for
from fusednorm.problem import Problem


class PlanesForward(ForwardPlan):
    module = "planes"

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.forward = self.kernel("forward")

    def run(self, data: Sequence[int], saved: Sequence[int], parameters: Sequence[int], eps: float) -> None:
        arguments = (*data, *saved, *parameters, self.address, eps, self.parameter)
        parallel_for(self.forward, arguments, self.statistics, self.tensor_bytes)


class PlanesSplitForward(ForwardPlan):
    module = "planes"

    def __init__(self, problem: Problem, pieces: int, piece: int) -> None:
        super().__init__(problem, pieces, piece)
        self.tasks = problem.view.samples * problem.view.channels * pieces
        if self.given is None:
            self.moments = self.kernel("moments", activated=False)
            self.finalize = self.kernel("statistics", activated=False)
        self.apply_pieces = self.kernel("apply")

    def run(self, data: Sequence[int], saved: Sequence[int], parameters: Sequence[int], eps: float) -> None:
        block, (partials, stats) = self.workspace(2 * self.tasks, 2 * self.statistics)
        parallel_for(self.moments, (data[0], partials, self.address), self.tasks, self.tensor_bytes)
        arguments = (partials, stats, *saved, self.address, eps)
        parallel_for(self.finalize, arguments, self.statistics, 16 * self.tasks)
        self.apply(data, stats, parameters)

    def apply(self, data: Sequence[int], stats: int, parameters: Sequence[int]) -> None:
        arguments = (*data, stats, *parameters, self.address, self.parameter)
        parallel_for(self.apply_pieces, arguments, self.tasks, 2 * self.tensor_bytes)


class PlanesBackward(BackwardPlan):
    module = "planes"

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.backward = self.kernel("backward")

    def run(
        self,
        data: Sequence[int],
        saved: Sequence[int],
        parameters: Sequence[int],
        grads: list[int],
        wanted: list[int],
    ) -> None:
        block, (sums,) = self.workspace(2 * self.samples * self.channels)
        arguments = (*data, *saved, *parameters, sums, self.address, self.parameter)
        parallel_for(self.backward, arguments, self.statistics, 2 * self.tensor_bytes)
        self.finish(sums, parameters, grads, wanted)


class PlanesSplitBackward(BackwardPlan):
    module = "planes"

    def __init__(self, problem: Problem, pieces: int, piece: int) -> None:
        super().__init__(problem, pieces, piece)
        self.tasks = problem.view.samples * problem.view.channels * pieces
        self.reduce, self.input_gradient = self.kernel("reduce"), self.kernel("input_gradient")
        self.combine = self.kernel("combine", activated=False)

    def run(
        self,
        data: Sequence[int],
        saved: Sequence[int],
        parameters: Sequence[int],
        grads: list[int],
        wanted: list[int],
    ) -> None:
        counts = (2 * self.tasks, 2 * self.samples * self.channels, 2 * self.statistics)
        block, (partials, sums, totals) = self.workspace(*counts)
        tail = (self.address, self.parameter)
        parallel_for(self.reduce, (*data[:2], *saved, *parameters, partials, *tail), self.tasks, 2 * self.tensor_bytes)
        combine = (partials, *parameters, sums, totals, self.address)
        parallel_for(self.combine, combine, self.statistics, 16 * self.tasks)
        if self.wants_input:
            gradient = (*data, *saved, *parameters, totals, *tail)
            parallel_for(self.input_gradient, gradient, self.tasks, 2 * self.tensor_bytes)
        self.finish(sums, parameters, grads, wanted)
