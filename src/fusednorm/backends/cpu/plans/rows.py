"""Plans for one position per channel, or statistics for each of channels_last, around kernels/rows.py."""

from __future__ import annotations

import torch
from torch import Tensor

from fusednorm.backends.cpu.frame import writer
from fusednorm.backends.cpu.geometry import (
    COLUMNS,
    PIECE,
    PIECES,
    ROWS_FLUSHED,
    SUMMED,
    TOTAL_SAMPLE,
    TOTAL_WORKER,
    summed_rows,
)
from fusednorm.backends.cpu.plans.base import (
    BACKWARD,
    BACKWARD_PLACE,
    CODES,
    CPU,
    FORWARD,
    FORWARD_PLACE,
    NOTHING,
    BackwardPlan,
    ForwardPlan,
    Plan,
)
from fusednorm.backends.cpu.threads import Loop
from fusednorm.operands import BackwardOperands, Gradients, Operands, Results, Sums, Wanted
from fusednorm.problem import DTYPE_BYTES, Problem
from fusednorm.strides import contiguous

TOTAL, TOTAL_PLACE = writer("total", "total")
ADDED, ADDED_PLACE = writer("pre_add", "post_add")
GRADIENTS, GRADIENTS_PLACE = writer("post_add", "grad_post_add")


def widen_parameters(plan: Plan) -> tuple[list[Loop], list[Tensor]]:
    """The loop, if any, that converts weight and bias to the compute dtype, or makes A and B of all samples of a
    modulated problem, and ones or zeros for an absent operand."""
    problem, channels = plan.problem, plan.channels
    constants: list[Tensor] = []
    loops: list[Loop] = []
    if problem.modulated:
        count = plan.samples * channels
        room = -(-count * DTYPE_BYTES[problem.compute_dtype] // 8)
        plan.reserve(wide_weight=room, wide_bias=room)
        modulate = plan.kernel("modulate", activated=False, module="rows")
        return [plan.loop(modulate, plan.samples, 16 * count)], constants
    for name, dtype, value in (("weight", problem.weight_dtype, 1.0), ("bias", problem.bias_dtype, 0.0)):
        if dtype is None:
            constants.append(torch.full((channels,), value, dtype=plan.compute, device=CPU))
            plan.constants[f"wide_{name}"] = constants[-1].data_ptr()
        elif dtype != problem.compute_dtype:
            plan.reserve(**{f"wide_{name}": channels})
            widen = plan.kernel("widen", activated=False, module="rows")
            loops = [plan.loop(widen, channels, 8 * channels)]
    return loops, constants


def modulation_loops(plan: BackwardPlan, work_bytes: int) -> list[Loop]:
    """The loops that make the parameters' gradients of a modulated problem from the partial sums of its samples."""
    plan.reserve(sums=2 * plan.samples * plan.channels)
    sums = plan.kernel("modulation_sums", activated=False)
    return [plan.loop(sums, plan.samples, work_bytes), *plan.parameter_loops()]


class RowsForward(ForwardPlan):
    module = "rows"

    def loops(self) -> list[Loop]:
        widening, self.constant_operands = widen_parameters(self)
        rows, _ = summed_rows(self.problem)
        return [*widening, self.loop(self.kernel("forward"), rows, self.tensor_bytes)]


class RowsBackward(BackwardPlan):
    module = "rows"

    def variant(self, keeps: bool) -> str:
        """What is behind the name of the kernel."""
        return "_kept" if keeps else ""

    def loops(self) -> list[Loop]:
        rows, summed = summed_rows(self.problem)
        self.geometry[SUMMED] = summed
        segments = rows // max(1, summed) * int(self.geometry[PIECES])
        widening, self.constant_operands = widen_parameters(self)
        length = self.problem.view.group_channels
        keeps = self.keeps(length)
        self.room_per_thread = DTYPE_BYTES[self.problem.compute_dtype] * length if keeps else 0
        name = "backward" if self.sums_parameters else "backward_data"
        backward = self.kernel(name + self.variant(keeps))
        loops = [*widening, self.loop(backward, segments, 2 * self.tensor_bytes)]
        if self.sums_parameters:
            count = 2 * segments * self.channels
            flushed = self.geometry[PIECE] > ROWS_FLUSHED
            running = -(-count * DTYPE_BYTES[self.problem.compute_dtype] // 8)
            self.reserve(partials=count if flushed else 2 * self.channels, running=running)
            if self.problem.modulated:
                loops += modulation_loops(self, 8 * count)
            else:
                finish = self.kernel("parameter_gradients", activated=False)
                loops.append(self.loop(finish, self.channels, 8 * count))
        self.reserve(kept=0)  # behind all else: each worker has its own
        return loops


class RowsSumForward(ForwardPlan):
    """A forward with sums around it, of operands that ``problem.added`` describes."""

    module = "rows"

    def __init__(self, problem: Problem) -> None:
        assert problem.added is not None
        self.added = problem.added
        super().__init__(problem)

    def loops(self) -> list[Loop]:
        widening, self.constant_operands = widen_parameters(self)
        before, behind = self.added.pre_layout is not None, self.added.post_layout is not None
        name = "forward" + ("_before" if before else "") + ("_behind" if behind else "")
        if before and self.added.keeps_sum:
            assert self.problem.output_layout is not None
            self.geometry[TOTAL_SAMPLE] = self.problem.output_layout.sample
        elif before:  # a row of each worker's own, behind all else
            words = -(-self.channels * DTYPE_BYTES[self.problem.dtype] // 8)
            self.geometry[TOTAL_WORKER] = 8 * words // DTYPE_BYTES[self.problem.dtype]
            self.room_per_thread = 8 * words
            self.reserve(total=0)
        return [*widening, self.loop(self.kernel(name), self.samples, 2 * self.tensor_bytes)]

    def __call__(self, operands: Operands, sums: Sums, statistics: bool = True) -> Results:  # type: ignore[override]
        input, pre_add, gate, post_add = operands.input, sums.pre_add, sums.pre_gate, sums.post_add
        output = self.output(input)
        total = self.output(input) if self.added.keeps_sum and pre_add is not None else None
        mean = rstd = None
        saved = self.discard
        if statistics or not self.few:
            rstd, mean = self.statistic(), self.statistic() if self.has_mean else None
            saved = (0 if mean is None else mean.data_ptr(), rstd.data_ptr(), 0)
        if self.empty:
            for tensor in (mean, rstd):
                if tensor is not None:
                    tensor.zero_()
            return Results(output, mean, rstd, None, total)
        # Operands are held until the kernels are done.
        weight, bias = contiguous(operands.weight), contiguous(operands.bias)
        gate = None if gate is None else gate.to(self.compute).contiguous()
        threads = self.program.threads()
        frame = self.frame(threads)
        FORWARD(
            frame.words, FORWARD_PLACE, output.data_ptr(), *saved, self.eps, input.data_ptr(),
            0 if weight is None else weight.data_ptr(), 0 if bias is None else bias.data_ptr(), 0, 0,
        )  # fmt: skip
        ADDED(
            frame.words, ADDED_PLACE, 0 if pre_add is None else pre_add.data_ptr(),
            0 if gate is None else gate.data_ptr(), 0 if post_add is None else post_add.data_ptr(),
        )  # fmt: skip
        if total is not None:
            TOTAL(frame.words, TOTAL_PLACE, total.data_ptr())
        self.program.run(frame, threads)
        self.release(frame)
        return Results(output, mean, rstd, None, total)

    def short(self, operands: Operands) -> None:
        """No call with sums takes the short way."""


class RowsSumBackward(RowsBackward):
    """A backward whose input is s: grad_input gets the gradient of s, and where an activation meets z + post_add, the
    gradient of that sum is a result too."""

    def __init__(self, problem: Problem, pieces: int, piece: int) -> None:
        assert problem.added is not None
        self.added = problem.added
        super().__init__(problem, pieces, piece)

    def keeps(self, elements: int) -> bool:
        return self.added.post_layout is not None or super().keeps(elements)

    def variant(self, keeps: bool) -> str:
        kept = "_behind" if self.added.post_layout is not None else super().variant(keeps)
        return kept + ("_total" if self.added.grad_sum else "")

    def __call__(  # type: ignore[override]
        self, operands: BackwardOperands, wanted: Wanted, post_add: Tensor | None, grad_sum: Tensor | None
    ) -> tuple[Gradients, Tensor | None]:
        """The gradients, and that of post_add where that is among the operands."""
        input, grad_output, wants = operands.input, operands.grad_output, wanted if self.sums_parameters else NOTHING
        grad_input = self.output(input) if self.wants_input else None
        grad_post_add = self.output(input) if post_add is not None else None
        # Operands are held until the kernels are done.
        weight, bias = contiguous(operands.weight), contiguous(operands.bias)
        grad_weight = torch.empty_like(weight) if weight is not None and wants[1] else None
        grad_bias = torch.empty_like(bias) if bias is not None and wants[2] else None
        gradients = Gradients(grad_input, grad_weight, grad_bias)
        if self.tensor_bytes == 0:
            for grad in (grad_weight, grad_bias):
                if grad is not None:
                    grad.zero_()
            return gradients, grad_post_add
        mean = contiguous(operands.mean) if self.problem.norm.has_mean else None
        rstd = operands.rstd.contiguous()
        threads = self.program.threads()
        frame = self.frame(threads)
        BACKWARD(
            frame.words, BACKWARD_PLACE, input.data_ptr(),
            0 if weight is None else weight.data_ptr(), 0 if bias is None else bias.data_ptr(), 0, 0,
            0 if mean is None else mean.data_ptr(), 0 if mean is None else CODES[mean.dtype], rstd.data_ptr(),
            CODES[rstd.dtype], grad_output.data_ptr(), 0 if grad_input is None else grad_input.data_ptr(),
            0 if grad_weight is None else grad_weight.data_ptr(), 0 if grad_bias is None else grad_bias.data_ptr(),
            0, 0,
        )  # fmt: skip
        GRADIENTS(
            frame.words, GRADIENTS_PLACE, 0 if post_add is None else post_add.data_ptr(),
            0 if grad_sum is None else grad_sum.data_ptr(), 0 if grad_post_add is None else grad_post_add.data_ptr(),
        )  # fmt: skip
        self.program.run(frame, threads)
        self.release(frame)
        return gradients, grad_post_add


class FewRowsBackward(BackwardPlan):
    """P and Q of the pieces of all rows, then the gradients of all rows, a block of channels at a time."""

    module = "rows"

    def loops(self) -> list[Loop]:
        widening, self.constant_operands = widen_parameters(self)
        _, self.geometry[SUMMED] = summed_rows(self.problem)
        pieces, blocks = self.num_statistics * int(self.geometry[PIECES]), -(-self.channels // COLUMNS)
        self.reserve(partials=2 * pieces, running=2 * self.channels, totals=2 * self.channels)
        reduce = self.kernel("reduce")
        columns = self.kernel("columns" if self.sums_parameters else "columns_data")
        return [
            *widening,
            self.loop(reduce, pieces, 2 * self.tensor_bytes),
            self.loop(columns, blocks, 3 * self.tensor_bytes),
        ]
