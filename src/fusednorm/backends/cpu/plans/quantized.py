"""Plans of rows whose output is quantized, with a sum before the norm or without, around kernels/codes.py."""

from __future__ import annotations

import torch
from torch import Tensor

from fusednorm.backends.cpu.frame import writer
from fusednorm.backends.cpu.geometry import summed_rows
from fusednorm.backends.cpu.memory import empty_strided
from fusednorm.backends.cpu.plans.base import CPU, FORWARD, FORWARD_PLACE, ForwardPlan
from fusednorm.backends.cpu.plans.rows import widen_for_workers
from fusednorm.backends.cpu.plans.sums import ADDED, ADDED_PLACE, TOTAL, TOTAL_PLACE, address, gate_numbers, place_sum
from fusednorm.backends.cpu.threads import Loop
from fusednorm.formats import LEAST_AMAX
from fusednorm.operands import NOTHING_YET, Operands, Results, Sums
from fusednorm.problem import Problem, scale_shape
from fusednorm.strides import contiguous

CODES, CODES_PLACE = writer("codes", "out_scale")


class RowsQuantizedForward(ForwardPlan):
    """A :class:`~fusednorm.instance.QuantizedForwardPlan`. A row that makes its own scale is kept until it has it."""

    module = "rows"

    def __init__(self, problem: Problem) -> None:
        assert problem.quantized is not None
        self.quantized, self.codes = problem.quantized, getattr(torch, problem.quantized.dtype)
        self.scales = scale_shape(problem.called, problem.shape)
        super().__init__(problem)

    def loops(self) -> list[Loop]:
        problem, quantized = self.problem, self.quantized
        if problem.added is not None:
            place_sum(self)
        if quantized.per_row:
            self.keep_for_workers(self.channels)
        widening, prepare = widen_for_workers(self)
        self.reserve(kept=0)  # behind all else
        before, by_row = "_before" if problem.added else "", "_by_row" if quantized.per_row else ""
        kernel = self.kernel(f"forward{before}_{quantized.dtype}{by_row}")
        return [*widening, self.loop(kernel, summed_rows(problem)[0], self.work_bytes, prepare)]

    def __call__(  # type: ignore[override]
        self, operands: Operands, sums: Sums | None, out_scale: Tensor | None, into: Results | None = None
    ) -> Results:
        input, into = operands.input, into or NOTHING_YET
        output, scales, total = into.output, into.scale, into.sum
        if output is None:
            output = empty_strided(self.shape, self.strides, self.codes)
        if scales is None and out_scale is None:
            scales = torch.empty(self.scales, dtype=torch.float32, device=CPU)
        if total is None and sums is not None:
            total = self.output(input)
        results = Results(output, sum=total, scale=scales)
        if self.tensor_bytes == 0:
            if scales is not None:
                scales.fill_(LEAST_AMAX / self.quantized.format.largest)
            return results
        # Operands are held until the kernels are done.
        parameters = [contiguous(each) for each in (operands.weight, operands.bias, operands.scale, operands.shift)]
        given = scales if out_scale is None else out_scale.float()
        statistics = None if self.few else (self.statistic(), self.statistic())
        saved = self.discard if statistics is None else (*map(address, statistics), 0)
        threads = self.program.threads()
        frame = self.frame(threads)
        FORWARD(frame.words, FORWARD_PLACE, 0, *saved, self.eps, *map(address, (input, *parameters)))
        CODES(frame.words, CODES_PLACE, output.data_ptr(), address(given))
        if sums is not None:
            gate = gate_numbers(sums, self.compute)
            ADDED(frame.words, ADDED_PLACE, *map(address, (sums.pre_add, gate, None)))
            TOTAL(frame.words, TOTAL_PLACE, address(total))
        self.program.run(frame, threads)
        self.release(frame)
        return results

    def short(self, operands: Operands) -> None:
        """No call with a quantized output takes the short way."""
