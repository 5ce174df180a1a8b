"""Plans of the channels_first order, around kernels/planes.py."""

from __future__ import annotations

from collections.abc import Sequence

from fusednorm.backends.cpu.plans.base import BackwardPlan, ForwardPlan
from fusednorm.backends.cpu.threads import parallel_for, workers
from fusednorm.problem import DTYPE_BYTES, Problem

#: A unit of so many elements at most keeps dz between its two passes.
KEPT_ELEMENTS = 1 << 20


def _keeping_pays(problem: Problem) -> bool:
    """Whether to keep dz rather than make it again.

    Making it again takes 20 vector operations where the derivative holds an exponential; keeping it moves 8 bytes per
    element in cache. The backward is 1.15 to 1.3 times faster where dy and x take 2 bytes each, no faster with 4.
    """
    activation = problem.norm.activation
    return activation is not None and activation.derivative_flops > 8 and DTYPE_BYTES[problem.dtype] == 2


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
        self.unit = problem.view.numel // max(1, self.statistics)
        self.keeps = self.wants_input and self.unit <= KEPT_ELEMENTS and _keeping_pays(problem)
        self.backward = self.kernel("backward_kept" if self.keeps else "backward")

    def run(
        self,
        data: Sequence[int],
        saved: Sequence[int],
        parameters: Sequence[int],
        grads: list[int],
        wanted: list[int],
    ) -> None:
        threads = workers(self.statistics, 2 * self.tensor_bytes)
        room = -(-self.unit * threads // 2) if self.keeps else 0  # float32 in a block of float64
        block, (sums, kept) = self.workspace(2 * self.samples * self.channels, room)
        arguments = (*data, *saved, *parameters, sums, kept, self.address, self.parameter)
        parallel_for(self.backward, arguments, self.statistics, threads=threads)
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
