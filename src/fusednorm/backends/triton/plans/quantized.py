"""Plans of rows whose output is quantized: the forwards of plans/whole.py and rows.py, with bytes for an output, and
with pre_add before the norm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusednorm.backends.triton.plans.base import ForwardPlan
from fusednorm.backends.triton.plans.rows import RowsForward
from fusednorm.backends.triton.plans.whole import WholeForward, WholeSumForward
from fusednorm.formats import LEAST_AMAX
from fusednorm.operands import NOTHING_YET, Operands, Results, Sums
from fusednorm.problem import Problem, scale_shape
from fusednorm.strides import contiguous, packed_strides


class QuantizedForward(ForwardPlan):
    """A :class:`~fusednorm.instance.QuantizedForwardPlan` around a forward of one launch.

    Kernels store a float8 as a byte, since a GPU may not know the type.
    """

    launch: Any

    def __init__(self, problem: Problem, config: Any) -> None:
        super().__init__(problem, config)  # type: ignore[call-arg]
        assert problem.quantized is not None
        self.keeps_sum = problem.added is not None and problem.added.keeps_sum
        self.quantized, shape = problem.quantized, scale_shape(problem.called, problem.shape)
        self.codes: torch.dtype = getattr(torch, problem.quantized.dtype)
        self.bytes = torch.uint8 if problem.quantized.format.is_float else self.codes
        self.scales = shape, packed_strides(shape), torch.float32

    def __call__(  # type: ignore[override]
        self, operands: Operands, sums: Sums | None, out_scale: Tensor | None, into: Results | None = None
    ) -> Results:
        o, into = operands, into or NOTHING_YET
        if self.elsewhere(o.input):
            with torch.cuda.device(o.input.device):
                return self(operands, sums, out_scale, into)
        scales, total = into.scale, into.sum
        if into.output is None:
            output = self.allocate(self.shape, self.strides, self.bytes)
        else:
            output = into.output.view(self.bytes)
        if scales is None and out_scale is None:
            scales = self.allocate(*self.scales)
        if total is None and self.keeps_sum:
            total = self.allocate(self.shape, self.strides, self.dtype)
        if not self.empty:
            parameters = contiguous(o.weight), contiguous(o.bias), contiguous(o.scale), contiguous(o.shift)
            given = scales if out_scale is None else out_scale.float()
            self.launch(o.input, output, *parameters, None, None, None, given, *self.around(sums, total))
        elif scales is not None:
            scales.fill_(LEAST_AMAX / self.quantized.format.largest)
        return Results(output.view(self.codes), scale=scales, sum=total)

    def around(self, sums: Sums | None, total: Tensor | None) -> tuple[Tensor | None, ...]:
        """The tensors around the norm, behind the other arguments of its kernel."""
        return ()


class QuantizedWhole(QuantizedForward, WholeForward):
    """Rows in registers, with a given scale or with scales of their own."""


class QuantizedSumWhole(QuantizedForward, WholeSumForward):  # type: ignore[misc]
    """The same of rows with pre_add."""

    def around(self, sums: Sums | None, total: Tensor | None) -> tuple[Tensor | None, ...]:
        assert sums is not None
        return sums.pre_add, contiguous(sums.pre_gate), None, total


class QuantizedRows(QuantizedForward, RowsForward):
    """Rows in steps, with a given scale."""
