"""Plans for one position per channel, or statistics for each of channels_last, around kernels/rows.py."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fusednorm.backends.cpu.geometry import (
    COLUMNS,
    GAIN_DTYPE,
    GATE_SEGMENTS,
    KEPT_WORKER,
    OFFSET_DTYPE,
    PARTS,
    PIECE,
    PIECES,
    PLANE,
    PLANE_STEP,
    ROWS_FLUSHED,
    SEGMENTS,
    SUMMED,
    TOGETHER_ROWS,
    WIDE_WORKER,
    fit_vectors,
    in_vectors,
    padded,
    parameter_rows,
    summed_rows,
)
from fusednorm.backends.cpu.plans.base import CPU, BackwardPlan, ForwardPlan, Plan, in_lines
from fusednorm.backends.cpu.plans.sums import SumBackward, SumForward
from fusednorm.backends.cpu.threads import Loop
from fusednorm.problem import DTYPE_BYTES, Order, Problem, View

#: Short rows are cut into parts where their segments are too few for many threads: no more tasks than MOST_TASKS, of
#: TASK_ELEMENTS elements at least, and of so many channels.
MOST_TASKS, TASK_ELEMENTS, PART_CHANNELS = 64, 16384, 1024


def constant_operands(plan: Plan) -> list[Tensor]:
    """Ones and zeros that kernels read for an absent weight and bias."""
    problem, constants = plan.problem, []
    for name, dtype, value in (("weight", problem.weight_dtype, 1.0), ("bias", problem.bias_dtype, 0.0)):
        if dtype is None:
            constants.append(torch.full((plan.channels,), value, dtype=plan.compute, device=CPU))
            plan.constants[f"wide_{name}"] = constants[-1].data_ptr()
    return constants


def widen_parameters(plan: Plan) -> tuple[list[Loop], list[Tensor]]:
    """The loop, if any, that converts weight and bias to the compute dtype, or makes A and B of all samples of a
    modulated problem, and ones or zeros for an absent operand."""
    problem, channels = plan.problem, plan.channels
    if problem.modulated:
        count = plan.samples * channels
        room = -(-count * DTYPE_BYTES[problem.compute_dtype] // 8)
        plan.reserve(wide_weight=room, wide_bias=room)
        modulate = plan.kernel("modulate", activated=False, module="rows")
        return [plan.loop(modulate, plan.samples, 16 * count)], []
    return widen_shared(plan)


def widen_shared(plan: Plan) -> tuple[list[Loop], list[Tensor]]:
    """The same of weight and bias alone."""
    problem, channels, loops = plan.problem, plan.channels, list[Loop]()
    for name, dtype in (("weight", problem.weight_dtype), ("bias", problem.bias_dtype)):
        if dtype not in (None, problem.compute_dtype):
            plan.reserve(**{f"wide_{name}": -(-channels * DTYPE_BYTES[problem.compute_dtype] // 8)})
            widen = plan.kernel("widen", activated=False, module="rows")
            loops = [plan.loop(widen, channels, 8 * channels)]
    return loops, constant_operands(plan)


def widen_for_workers(plan: Plan, own: bool = True) -> tuple[list[Loop], int]:
    """The loop, if any, that makes the parameters as :func:`widen_parameters` does, and the kernel by which each worker
    converts them for itself before its first rows, or 0 where it does not or where ``own`` forbids it. They lie behind
    what each worker keeps; all room that workers share must have been reserved."""
    problem, size = plan.problem, DTYPE_BYTES[plan.problem.compute_dtype]
    dtypes = {"weight": problem.weight_dtype, "bias": problem.bias_dtype}
    converted = [name for name, dtype in dtypes.items() if dtype not in (None, problem.compute_dtype)]
    if not own or problem.modulated or not converted:
        widening, plan.constant_operands = widen_parameters(plan)
        return widening, 0
    plan.constant_operands = constant_operands(plan)
    apart, kept = in_lines(plan.channels * size), plan.room_per_thread
    for place, name in enumerate(converted):
        plan.workspace[f"wide_{name}"] = plan.room + kept + place * apart
    plan.keep_for_workers((kept + len(converted) * apart) // size)
    plan.geometry[WIDE_WORKER] = plan.geometry[KEPT_WORKER]
    return [], plan.kernel("widen_own", activated=False, module="rows")


def modulation_loops(plan: BackwardPlan, work_bytes: int) -> list[Loop]:
    """The loops that make the parameters' gradients of a modulated problem from the partial sums of its samples."""
    plan.reserve(sums=2 * plan.samples * plan.channels)
    sums = plan.kernel("modulation_sums", activated=False)
    return [plan.loop(sums, plan.samples, work_bytes), *plan.parameter_loops()]


def gate_loops(plan: BackwardPlan, segments: int) -> list[Loop]:
    """The loop, if any, that makes the gradient of a gate from the sums of so many segments of rows."""
    problem = plan.problem
    added, (rows, summed) = problem.added, summed_rows(problem)
    assert added is not None and added.gate is not None
    if added.pre_layout is None:
        return []
    plan.geometry[GATE_SEGMENTS] = added.gate.rows // max(1, summed) * int(plan.geometry[PIECES])
    count = segments * (plan.channels if added.gate.per_element else 1)
    plan.reserve(gate_sums=count, gate_running=count)
    finish = plan.kernel("gate_gradients", activated=False)
    return [plan.loop(finish, rows // max(1, added.gate.rows), 16 * count)]


class RowsForward(ForwardPlan):
    module = "rows"

    def loops(self) -> list[Loop]:
        widening, prepare = widen_for_workers(self)
        rows, _ = summed_rows(self.problem)
        return [*widening, self.loop(self.kernel("forward"), rows, self.work_bytes, prepare)]


class RowsBackward(BackwardPlan):
    module = "rows"

    def loops(self) -> list[Loop]:
        rows, summed = summed_rows(self.problem)
        self.geometry[SUMMED] = summed
        pieces = int(self.geometry[PIECES])
        segments = rows // max(1, summed) * pieces
        self.geometry[SEGMENTS] = parameter_rows(self.problem)[1] // max(1, summed) * pieces
        length = self.problem.view.group_channels
        keeps = self.keeps(length)
        gated = self.problem.gated_backward
        self.keep_for_workers(length if keeps or gated else 0)
        name = "backward" if self.sums_parameters else "backward_data"
        loops = list[Loop]()
        if self.sums_parameters:
            count = 2 * segments * self.channels
            flushed = self.geometry[PIECE] > ROWS_FLUSHED
            running = -(-count * DTYPE_BYTES[self.problem.compute_dtype] // 8)
            self.reserve(partials=count if flushed else 2 * self.channels, running=running)
            if self.problem.modulated:
                loops += modulation_loops(self, 8 * count)
            else:
                loops.append(self.finishing_loop(8 * count))
        if gated:
            loops += gate_loops(self, segments)
        widening, prepare = self.widen()
        self.reserve(kept=0)  # behind all else: each worker has its own
        return [*widening, self.rows_loop(name, keeps, segments, prepare), *loops]

    def widen(self) -> tuple[list[Loop], int]:
        """What makes the parameters for the kernels, as in :func:`widen_for_workers`."""
        return widen_for_workers(self, own=not self.in_vectors())

    def finishing_loop(self, work_bytes: int) -> Loop:
        """The loop that makes the gradients of weight and bias from the sums of all segments."""
        return self.loop(self.kernel("parameter_gradients", activated=False), self.channels, work_bytes)

    def in_vectors(self) -> bool:
        """Whether sixteen groups are taken together."""
        return in_vectors(self.problem)

    def rows_loop(self, name: str, keeps: bool, segments: int, prepare: int) -> Loop:
        """The loop over so many segments of rows."""
        if not self.in_vectors():
            return self.loop(self.kernel(name + self.variant(keeps)), segments, 2 * self.work_bytes, prepare)
        view = self.problem.view
        if self.problem.norm.activation is not None:
            self.keep_for_workers(TOGETHER_ROWS * padded(view.group_channels))
        most = min(MOST_TASKS, view.numel // TASK_ELEMENTS) // max(1, segments)
        parts = self.geometry[PARTS] = max(1, min(view.groups, view.channels // PART_CHANNELS, most))
        return self.loop(self.kernel(name, module="rows_together"), segments * parts, 2 * self.work_bytes)


def spread_parameters(plan: Plan, view: View, order: Order) -> list[Loop]:
    """The loop that makes weight and bias of each element of samples, which are rows to the plan's kernels."""
    plan.geometry[PLANE], plan.geometry[PLANE_STEP] = view.spatial, 1 if order == "channels_first" else view.channels
    plan.geometry[GAIN_DTYPE] = plan.geometry[OFFSET_DTYPE] = 0
    room = -(-plan.channels * DTYPE_BYTES[plan.problem.compute_dtype] // 8)
    operands = (("weight", plan.problem.weight_dtype), ("bias", plan.problem.bias_dtype))
    plan.reserve(**{f"wide_{name}": room for name, dtype in operands if dtype is not None})
    spread = plan.kernel("spread", activated=False, module="rows_together")
    plan.constant_operands = constant_operands(plan)
    return [plan.loop(spread, view.channels, 8 * plan.channels)]


class SampleRowsForward(ForwardPlan):
    """The same of short samples of one group in channels_last, whose elements are the channels of a row."""

    module = "rows"

    def __init__(self, problem: Problem, made_for: Problem) -> None:
        self.sample, self.order = made_for.view, made_for.layout.order
        super().__init__(problem, made_for=made_for)

    def loops(self) -> list[Loop]:
        spread = spread_parameters(self, self.sample, self.order)
        return [*spread, self.loop(self.kernel("forward"), self.samples, self.work_bytes)]


class SampleRowsBackward(RowsBackward):
    """The same of samples of channels_first with short units, and of short ones of channels_last with one."""

    def __init__(self, problem: Problem, pieces: int, piece: int, made_for: Problem) -> None:
        self.sample, self.order = made_for.view, made_for.layout.order
        super().__init__(problem, pieces, piece, made_for)

    def widen(self) -> tuple[list[Loop], int]:
        return spread_parameters(self, self.sample, self.order), 0

    def in_vectors(self) -> bool:
        return fit_vectors(self.problem)

    def finishing_loop(self, work_bytes: int) -> Loop:
        finish = self.kernel("plane_gradients", activated=False, module="rows_together")
        return self.loop(finish, self.sample.channels, work_bytes)


class ShortRowsForward(ForwardPlan):
    """The same by blocks of short groups, around kernels/short_rows.py."""

    module = "short_rows"

    def loops(self) -> list[Loop]:
        rows, _ = summed_rows(self.problem)
        return [self.loop(self.kernel("forward"), rows, self.work_bytes)]


class ShortRowsBackward(BackwardPlan):
    module = "short_rows"

    def loops(self) -> list[Loop]:
        rows, segments = parameter_rows(self.problem)[0], int(self.geometry[PIECES])
        self.geometry[SUMMED], self.geometry[SEGMENTS] = rows, segments
        kernel = self.kernel("backward" if self.sums_parameters else "backward_data")
        loops = [self.loop(kernel, segments, 2 * self.work_bytes)]
        if self.sums_parameters:
            count = 2 * segments * self.channels
            self.reserve(partials=count)
            finish = self.kernel("parameter_gradients", activated=False, module="rows")
            loops.append(self.loop(finish, self.channels, 8 * count))
        return loops


class PointRowsForward(ForwardPlan):
    """Rows each with a scale and shift of its own, around kernels/point_rows.py."""

    module = "point_rows"

    def loops(self) -> list[Loop]:
        widening, self.constant_operands = widen_shared(self)
        return [*widening, self.loop(self.kernel("forward"), self.samples, 2 * self.work_bytes)]


class PointRowsBackward(BackwardPlan):
    module = "point_rows"

    def loops(self) -> list[Loop]:
        segments, length = int(self.geometry[PIECES]), self.problem.view.group_channels
        self.geometry[SUMMED], self.geometry[SEGMENTS] = self.samples, segments
        loops, self.constant_operands = widen_shared(self)
        self.keep_for_workers(length)
        name = "backward" if self.sums_parameters else "backward_data"
        backward = self.kernel(name + self.variant(self.keeps(length)))
        loops.append(self.loop(backward, segments, 4 * self.work_bytes))
        if self.sums_parameters:
            count, flushed = 2 * segments * self.channels, self.geometry[PIECE] > ROWS_FLUSHED
            running = -(-count * DTYPE_BYTES[self.problem.compute_dtype] // 8)
            self.reserve(partials=count if flushed else 2 * self.channels, running=running)
            finish = self.kernel("parameter_gradients", activated=False, module="rows")
            loops.append(self.loop(finish, self.channels, 8 * count))
        self.reserve(kept=0)  # behind all else: each worker has its own
        return loops


class RowsSumForward(SumForward):
    module = "rows"

    def loops(self) -> list[Loop]:
        widening, prepare = widen_for_workers(self, own=self.keeps_sum or not self.adds_before)
        self.place_total(self.channels)
        rows, _ = summed_rows(self.problem)
        kernel = self.kernel("forward" + self.variant())
        return [*widening, self.loop(kernel, rows, 2 * self.work_bytes, prepare)]


class RowsSumBackward(SumBackward, RowsBackward):
    """Keeps dz where an activation meets z + post_add, adds the gradient of s to dx, and makes the gradients of a
    product before the norm."""


class FewRowsBackward(BackwardPlan):
    """P and Q of the pieces of all rows, then the gradients of all rows, a block of channels at a time."""

    module = "rows"

    def loops(self) -> list[Loop]:
        widening, self.constant_operands = widen_parameters(self)
        _, self.geometry[SUMMED] = summed_rows(self.problem)
        pieces, blocks = self.num_statistics * int(self.geometry[PIECES]), -(-self.channels // COLUMNS)
        self.reserve(partials=2 * pieces)
        reduce = self.kernel("reduce")
        columns = self.kernel("columns" if self.sums_parameters else "columns_data")
        # By as many threads as the rows, each of which then reads most of what it has converted.
        widening = [replace(loop, work_bytes=2 * self.work_bytes) for loop in widening]
        return [
            *widening,
            self.loop(reduce, pieces, 2 * self.work_bytes),
            self.loop(columns, blocks, 3 * self.work_bytes),
        ]
