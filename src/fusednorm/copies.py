"""Plans around plans: they first copy tensors whose strides fit neither memory order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fusednorm.instance import BackwardPlan, ForwardPlan, QuantizedForwardPlan
from fusednorm.operands import NOTHING_YET, BackwardOperands, Gradients, Operands, Results, Sums, Wanted
from fusednorm.problem import Problem
from fusednorm.strides import empty_output


def copying(plan: Any, problem: Problem) -> Any:
    """The plan, with copies of the tensors that ``problem.copies`` names made before it."""
    if not problem.copies:
        return plan
    if problem.quantized is not None:
        return CopyingQuantized(plan, problem)
    return CopyingBackward(plan, problem) if problem.backward else CopyingForward(plan, problem)


class CopyingForward:
    """A forward on a contiguous copy of its input."""

    def __init__(self, plan: ForwardPlan, problem: Problem) -> None:
        self.plan, self.norm = plan, problem.called

    def __call__(
        self,
        operands: Operands,
        statistics: bool = True,
        out: Tensor | None = None,
        mean_out: Tensor | None = None,
        rstd_out: Tensor | None = None,
    ) -> Results:
        input = operands.input
        results = self.plan(replace(operands, input=input.contiguous()), statistics, None, mean_out, rstd_out)
        results.output = (empty_output(self.norm, input) if out is None else out).copy_(results.output)
        return results


class CopyingQuantized:
    """A forward with a quantized output on a contiguous copy of its input."""

    def __init__(self, plan: QuantizedForwardPlan, problem: Problem) -> None:
        self.plan, self.norm = plan, problem.called

    def __call__(
        self, operands: Operands, sums: Sums | None, out_scale: Tensor | None, into: Results | None = None
    ) -> Results:
        input, into = operands.input, into or NOTHING_YET
        results = self.plan(
            replace(operands, input=input.contiguous()), sums, out_scale, replace(into, output=NOTHING_YET.output)
        )
        output = empty_output(self.norm, input, results.output.dtype) if into.output is None else into.output
        results.output = output.copy_(results.output)
        return results


class CopyingBackward:
    """A backward on copies of input and grad_output in one order."""

    def __init__(self, plan: BackwardPlan, problem: Problem) -> None:
        self.plan, self.problem = plan, problem

    def __call__(self, operands: BackwardOperands, wanted: Wanted, out: Tensor | None = None) -> Gradients:
        problem, grad_output, input = self.problem, operands.grad_output, operands.input
        copied = "input" in problem.copies
        if copied:
            input = input.contiguous()
        if "grad_output" in problem.copies:
            dense = torch.empty_strided(
                problem.shape, problem.output_strides, dtype=grad_output.dtype, device=grad_output.device
            )
            grad_output = dense.copy_(grad_output)
        native = replace(operands, grad_output=grad_output, input=input)
        gradients = self.plan(native, wanted, None if copied else out)
        if copied and gradients.input is not None:
            target = empty_output(problem.called, operands.input) if out is None else out
            gradients.input = target.copy_(gradients.input)
        return gradients
