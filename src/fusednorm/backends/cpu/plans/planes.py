"""Plans of the channels_first order, around kernels/planes.py."""

from __future__ import annotations

from fusednorm.backends.cpu.geometry import PIECE, TILE_UNITS, VECTOR, by_vectors, in_tiles, padded
from fusednorm.backends.cpu.plans.base import KEPT_ELEMENTS, MOST_KEPT, BackwardPlan, ForwardPlan, Plan
from fusednorm.backends.cpu.plans.sums import NumbersOfPlanes, SumBackward, SumForward, makes_twice
from fusednorm.backends.cpu.threads import Loop
from fusednorm.problem import DTYPE_BYTES, Problem


def _module(problem: Problem) -> str:
    """The module whose kernels take whole units."""
    return "tiles" if in_tiles(problem) else "planes"


class PlanesForward(ForwardPlan):
    module = "planes"

    def loops(self) -> list[Loop]:
        if by_vectors(self.problem):
            kernel = self.kernel("forward", module="short_planes")
        else:
            kernel = self.kernel("forward", module=_module(self.problem))
        return [self.loop(kernel, self.num_statistics, self.work_bytes)]


def _together(plan: Plan) -> int:
    """The elements of the units that a kernel takes together, with sums no more than what lies in cache."""
    unit = plan.problem.view.numel // max(1, plan.num_statistics)
    if plan.problem.added is not None:
        plan.geometry[TILE_UNITS] = max(1, min(int(plan.geometry[TILE_UNITS]), KEPT_ELEMENTS // max(1, unit)))
    return unit * int(plan.geometry[TILE_UNITS])


class PlanesSumForward(NumbersOfPlanes, SumForward):
    """The same of s, which is made while it is read, or of a tile of short planes before."""

    module = "sums"

    def loops(self) -> list[Loop]:
        if in_tiles(self.problem):
            self.place_total(_together(self))
            kernel = self.kernel("forward" + self.variant(), module="tiles")
        else:
            self.place_total(0 if makes_twice(self.problem) else _together(self))
            kernel = self.kernel("forward" + self.variant() + self.kept())
        return [self.loop(kernel, self.num_statistics, 2 * self.work_bytes)]


class PlanesSplitForward(ForwardPlan):
    module = "planes"

    def loops(self) -> list[Loop]:
        tasks = self.tasks * self.channels
        apply = self.loop(self.apply(), tasks, self.work_bytes)
        if self.given:
            return [apply]
        self.reserve(partials=2 * tasks, stats=2 * self.num_statistics)
        return [
            self.loop(self.moments(), tasks, self.work_bytes),
            self.loop(self.kernel("statistics", activated=False), self.num_statistics, 16 * tasks),
            apply,
        ]

    def moments(self) -> int:
        return self.kernel("moments", activated=False)

    def apply(self) -> int:
        return self.kernel("apply")


class PlanesSplitSumForward(NumbersOfPlanes, SumForward, PlanesSplitForward):
    """The same with sums; s that is not made twice goes to memory with its statistics, or with the output where these
    are given."""

    def always_keeps(self, problem: Problem) -> bool:
        return not makes_twice(problem)

    def loops(self) -> list[Loop]:
        self.place_total(0)
        return super().loops()

    def moments(self) -> int:
        if not self.adds_before:
            return super().moments()
        name = "moments" + self.variant().removesuffix("_behind") + self.kept()
        return self.kernel(name, activated=False, module="sums")

    def apply(self) -> int:
        if self.keeps_sum and not self.given:
            behind = "_behind" if "post_add" in self.added.names else ""
            return self.kernel("apply_total" + behind, module="sums")
        return self.kernel("apply" + self.variant() + self.kept(), module="sums")


class PlanesBackward(BackwardPlan):
    module = "planes"

    def loops(self) -> list[Loop]:
        if by_vectors(self.problem):
            return self.loops_by_vectors()
        together, module = _together(self), _module(self.problem)
        keeps = self.wants_input and self.keeps(together)
        self.reserve(sums=2 * self.samples * self.channels, totals=2 * self.num_statistics, kept=0)
        length = self.problem.view.spatial
        # Tiles are summed by vectors, the last of which may reach behind the units.
        room = together + VECTOR if module == "tiles" else together // max(1, length) * padded(length)
        self.keep_for_workers(room if keeps else 0)
        kernel = self.kernel("backward" + self.variant(keeps), module=module)
        return [self.loop(kernel, self.num_statistics, 2 * self.work_bytes), *self.parameter_loops()]

    def loops_by_vectors(self) -> list[Loop]:
        view, per_batch = self.problem.view, self.problem.norm.per_batch
        if not per_batch:
            self.reserve(sums=2 * self.samples * self.channels)
        if self.problem.norm.activation is not None:
            self.reserve(kept=0)  # behind all else
            planes = VECTOR * (1 + (view.samples if per_batch else 1))
            self.keep_for_workers(planes * padded(view.spatial))
        name = "backward_batch" if per_batch else "backward" if view.group_channels == 1 else "backward_grouped"
        loop = self.loop(self.kernel(name, module="short_planes"), self.num_statistics, 2 * self.work_bytes)
        return [loop] if per_batch else [loop, *self.parameter_loops()]


class PlanesSumBackward(SumBackward, PlanesBackward):
    """Keeps dz of each unit where an activation meets z + post_add, and adds the gradient of s to dx."""


class PlanesSplitBackward(BackwardPlan):
    module = "planes"

    def loops(self) -> list[Loop]:
        tasks, keeps = self.tasks * self.channels, self.wants_input and self.keeps_dz()
        self.reserve(partials=2 * tasks, sums=2 * self.samples * self.channels, totals=2 * self.num_statistics)
        if keeps:
            self.reserve(kept=tasks * padded(int(self.geometry[PIECE])))
        loops = [
            self.loop(self.reduce(keeps), tasks, 2 * self.work_bytes),
            self.loop(self.kernel("combine", activated=False), self.num_statistics, 16 * tasks),
        ]
        if self.wants_input:
            loops.append(self.loop(self.input_gradient(keeps), tasks, 2 * self.work_bytes))
        return [*loops, *self.parameter_loops()]

    def keeps_dz(self) -> bool:
        """Whether dz of an activation with an exponential is kept between the two passes, in the compute dtype."""
        return self.keeps(self.problem.view.numel, MOST_KEPT[DTYPE_BYTES[self.problem.dtype]])

    def reduce(self, keeps: bool) -> int:
        return self.kernel("reduce" + self.variant(keeps))

    def input_gradient(self, keeps: bool) -> int:
        return self.kernel("input_gradient" + self.variant(keeps), activated=not keeps)


class PlanesSplitSumBackward(SumBackward, PlanesSplitBackward):
    """The same where an activation meets z + post_add: dz goes to memory as its gradient, and is read from there; and
    with the gradient of s."""

    def loops(self) -> list[Loop]:
        loops = super().loops()
        self.reserve(kept=0)  # behind all else
        if self.added.post_layout is not None:
            self.keep_for_workers(padded(int(self.geometry[PIECE])))
        return loops

    def keeps_dz(self) -> bool:
        return False

    def reduce(self, keeps: bool) -> int:
        return self.kernel("reduce" if self.added.post_layout is None else "reduce_behind")

    def input_gradient(self, keeps: bool) -> int:
        return self.kernel("input_gradient" + self.variant(keeps=False), activated=self.added.post_layout is None)
