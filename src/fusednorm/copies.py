"""Plans around plans: tensors whose strides fit neither memory order are copied into one that does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusednorm.instance import BackwardPlan, ForwardPlan
from fusednorm.operands import BackwardOperands, Gradients, Operands, Results, Wanted
from fusednorm.problem import Problem
from fusednorm.strides import empty_output


def copying(plan: Any, problem: Problem) -> Any:
    """A plan that first copies what ``problem.copies`` names; the plan itself where that is nothing."""
    if not problem.copies:
        return plan
    return CopyingBackward(plan, problem) if problem.backward else CopyingForward(plan, problem)


class CopyingForward:
    """A forward on a contiguous copy of its input."""

    def __init__(self, plan: ForwardPlan, problem: Problem) -> None:
        self.plan, self.norm = plan, problem.norm

    def __call__(
        self,
        operands: Operands,
        statistics: bool = True,
        out: Tensor | None = None,
        mean_out: Tensor | None = None,
        rstd_out: Tensor | None = None,
    ) -> Results:
        input, o = operands.input, operands
        native = Operands(input.contiguous(), o.weight, o.bias, o.scale, o.shift, o.mean, o.var)
        results = self.plan(native, statistics, None, mean_out, rstd_out)
        results.output = (empty_output(self.norm, input) if out is None else out).copy_(results.output)
        return results


class CopyingBackward:
    """A backward on copies of input and grad_output in one order."""

    def __init__(self, plan: BackwardPlan, problem: Problem) -> None:
        self.plan, self.problem = plan, problem

    def __call__(self, operands: BackwardOperands, wanted: Wanted, out: Tensor | None = None) -> Gradients:
        problem, o = self.problem, operands
        grad_output, input = o.grad_output, o.input
        copied = "input" in problem.copies
        if copied:
            input = input.contiguous()
        if "grad_output" in problem.copies:
            dense = torch.empty_strided(
                problem.shape, problem.output_strides, dtype=grad_output.dtype, device=grad_output.device
            )
            grad_output = dense.copy_(grad_output)
        native = BackwardOperands(grad_output, input, o.mean, o.rstd, o.weight, o.bias, o.scale, o.shift)
        gradients = self.plan(native, wanted, None if copied else out)
        if copied and gradients.input is not None:
            target = empty_output(problem.norm, o.input) if out is None else out
            gradients.input = target.copy_(gradients.input)
        return gradients
