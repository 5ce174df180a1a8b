"""Plans of the channels_first order, around kernels/planes.py."""

from __future__ import annotations

from fusednorm.backends.cpu.geometry import TILE_UNITS, in_tiles
from fusednorm.backends.cpu.plans.base import BackwardPlan, ForwardPlan
from fusednorm.backends.cpu.plans.sums import NumbersOfPlanes, SumBackward, SumForward
from fusednorm.backends.cpu.threads import Loop
from fusednorm.problem import DTYPE_BYTES, Problem


def _module(problem: Problem) -> str:
    """The module whose kernels take whole units."""
    return "tiles" if in_tiles(problem) else "planes"


class PlanesForward(ForwardPlan):
    module = "planes"

    def loops(self) -> list[Loop]:
        kernel = self.kernel("forward", module=_module(self.problem))
        return [self.loop(kernel, self.num_statistics, self.tensor_bytes)]


class PlanesSumForward(NumbersOfPlanes, SumForward):
    module = "sums"

    def loops(self) -> list[Loop]:
        self.place_total(self.problem.view.numel // max(1, self.num_statistics))
        kernel = self.kernel("forward" + self.variant())
        return [self.loop(kernel, self.num_statistics, 2 * self.tensor_bytes)]


class PlanesSumGiven(NumbersOfPlanes, SumForward):
    """By given statistics, in pieces."""

    module = "sums"
    always_keeps = True

    def loops(self) -> list[Loop]:
        self.place_total(0)
        kernel = self.kernel("given" + self.variant())
        return [self.loop(kernel, self.tasks * self.channels, 2 * self.tensor_bytes)]


class PlanesSumBackward(SumBackward):
    """Keeps dz of each unit, which is the gradient of z + post_add."""

    module = "planes"

    def loops(self) -> list[Loop]:
        together = self.problem.view.numel // max(1, self.num_statistics)
        self.reserve(sums=2 * self.samples * self.channels, totals=2 * self.num_statistics, kept=0)
        self.room_per_thread = DTYPE_BYTES[self.problem.compute_dtype] * together
        kernel = self.kernel("backward_behind")
        return [self.loop(kernel, self.num_statistics, 2 * self.tensor_bytes), *self.parameter_loops()]


class PlanesSplitForward(ForwardPlan):
    module = "planes"

    def loops(self) -> list[Loop]:
        tasks = self.tasks * self.channels
        apply = self.loop(self.kernel("apply"), tasks, 2 * self.tensor_bytes)
        if self.given:
            return [apply]
        self.reserve(partials=2 * tasks, stats=2 * self.num_statistics)
        return [
            self.loop(self.kernel("moments", activated=False), tasks, self.tensor_bytes),
            self.loop(self.kernel("statistics", activated=False), self.num_statistics, 16 * tasks),
            apply,
        ]


class PlanesBackward(BackwardPlan):
    module = "planes"

    def loops(self) -> list[Loop]:
        together = self.problem.view.numel // max(1, self.num_statistics) * int(self.geometry[TILE_UNITS])
        module = _module(self.problem)
        keeps = self.wants_input and self.keeps(together)
        self.reserve(sums=2 * self.samples * self.channels, totals=2 * self.num_statistics, kept=0)
        self.room_per_thread = DTYPE_BYTES[self.problem.compute_dtype] * together if keeps else 0
        kernel = self.kernel("backward_kept" if keeps else "backward", module=module)
        return [self.loop(kernel, self.num_statistics, 2 * self.tensor_bytes), *self.parameter_loops()]


class PlanesSplitBackward(BackwardPlan):
    module = "planes"

    def loops(self) -> list[Loop]:
        tasks = self.tasks * self.channels
        self.reserve(partials=2 * tasks, sums=2 * self.samples * self.channels, totals=2 * self.num_statistics)
        loops = [
            self.loop(self.kernel("reduce"), tasks, 2 * self.tensor_bytes),
            self.loop(self.kernel("combine", activated=False), self.num_statistics, 16 * tasks),
        ]
        if self.wants_input:
            loops.append(self.loop(self.kernel("input_gradient"), tasks, 2 * self.tensor_bytes))
        return [*loops, *self.parameter_loops()]
