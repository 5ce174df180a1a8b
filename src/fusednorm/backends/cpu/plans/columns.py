"""Plans of channels_first with statistics for each position, around kernels/columns.py."""

from __future__ import annotations

from fusednorm.backends.cpu.geometry import BLOCKS, PIECE, PIECES, SUMMED
from fusednorm.backends.cpu.plans.base import BackwardPlan, ForwardPlan
from fusednorm.backends.cpu.plans.rows import modulation_loops, widen_parameters
from fusednorm.backends.cpu.plans.sums import NumbersOfPlanes, SumBackward, SumForward
from fusednorm.backends.cpu.threads import Loop
from fusednorm.problem import Problem


class ColumnsForward(ForwardPlan):
    """Each block from its statistics to its output."""

    module = "columns"

    def loops(self) -> list[Loop]:
        self.geometry[BLOCKS] = 1
        loops, self.constant_operands = widen_parameters(self)
        return [*loops, self.loop(self.kernel("forward"), self.tasks, self.work_bytes)]


class ColumnsSumForward(NumbersOfPlanes, SumForward):
    """The same of s, a block of which is made first."""

    module = "columns"

    def loops(self) -> list[Loop]:
        self.geometry[BLOCKS] = 1
        loops, self.constant_operands = widen_parameters(self)
        width = int(self.geometry[PIECE])
        self.place_total(self.channels * width, width)
        return [*loops, self.loop(self.kernel("forward" + self.variant()), self.tasks, 2 * self.work_bytes)]


class ColumnsBackward(BackwardPlan):
    """Each block from its sums to its gradient, and the parameters' gradients from the sums of ``tasks`` at most."""

    module = "columns"

    def __init__(self, problem: Problem, pieces: int, piece: int, tasks: int) -> None:
        self.most_tasks, self.width = tasks, piece
        super().__init__(problem, pieces, piece)

    def loops(self) -> list[Loop]:
        summed = int(self.geometry[PIECES]) if self.problem.modulated else self.tasks
        together = min(max(1, -(-self.tasks // self.most_tasks)), max(1, summed))
        self.geometry[BLOCKS], self.geometry[SUMMED] = together, summed
        tasks = self.tasks // max(1, summed) * -(-summed // together)
        loops, self.constant_operands = widen_parameters(self)
        elements = self.channels * self.width
        keeps = self.keeps(elements)
        self.keep_for_workers(elements if keeps else 0)
        name = "backward" if self.sums_parameters else "backward_data"
        backward = self.kernel(name + self.variant(keeps))
        loops.append(self.loop(backward, tasks, 2 * self.work_bytes))
        if self.sums_parameters:
            self.reserve(partials=2 * tasks * self.channels)
            work = 16 * tasks * self.channels
            if self.problem.modulated:
                loops += modulation_loops(self, work)
            else:
                finish = self.kernel("parameter_gradients", activated=False)
                loops.append(self.loop(finish, self.channels, work))
        self.reserve(kept=0)  # behind all else: each worker has its own
        return loops


class ColumnsSumBackward(SumBackward, ColumnsBackward):
    """Keeps dz where an activation meets z + post_add, and adds the gradient of s to dx."""
