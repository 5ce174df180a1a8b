"""What the plans of this backend share: calls that another instance has to run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from fusednorm.backends.triton import instances as triton
from fusednorm.backends.triton.launch import Launch
from fusednorm.backends.triton.plans.base import BackwardPlan, ForwardPlan, Plan
from fusednorm.backends.triton.plans.sums import SumForward
from fusednorm.operands import BackwardOperands, Gradients, Operands, Results, Sums, Wanted
from fusednorm.private.triton_names import REGISTERS, TOO_MANY_BLOCKS
from fusednorm.problem import Problem

logger = logging.getLogger(__name__)

T = TypeVar("T")


def name_of(problem: Problem) -> str | None:
    """The name of the activation, or None."""
    return None if problem.norm.activation is None else problem.norm.activation.name


class Narrower:
    """A plan that takes fewer calls than its problem has: a call whose tensors do not begin at 16 bytes runs on the
    Triton instance that the problem would have without this backend."""

    name: str

    def __init__(self, problem: Problem) -> None:
        self.problem, self.instance = problem, triton.choose(replace(problem, added=None))
        self.reasons: set[str] = set()

    @cached_property
    def other(self) -> Any:
        return self.instance.plan(self.problem)

    def runs(self, call: Callable[[], T], *tensors: Tensor | None) -> T | None:
        """The result of a call on these tensors, or None where the other instance has to run it."""
        together = 0
        for tensor in tensors:
            together |= 0 if tensor is None else tensor.data_ptr()
        if together & 15:
            self.passes_on("tensors do not begin at 16 bytes")
            return None
        return call()

    def passes_on(self, reason: str) -> None:
        """Say why another instance runs, once for each reason."""
        if reason not in self.reasons:
            self.reasons.add(reason)
            logger.warning("%s: %s; %s runs", self.name, reason, self.instance.name)


class Together(Narrower, Plan):
    """A plan whose blocks, of so many warps and registers a thread, wait for one another, and tell each other numbers
    in so many words of 8 bytes. A call whose blocks cannot all run at the same time, since other programs share the
    GPU, runs on the other instance too."""

    def __init__(self, problem: Problem, blocks: int, words: int, warps: int, registers: int) -> None:
        Narrower.__init__(self, problem)
        self.blocks, self.words, self.warps, self.registers = blocks, words, warps, registers
        self.refused = False

    def packets(self) -> Tensor:
        """Packets that nobody has written."""
        return self.workspace(self.words, torch.int64, zeroed=True)

    def launch_of(self, kernel: Any, scalars: tuple[int | float, ...], constants: dict[str, Any]) -> Launch:
        launch = Launch(kernel, self.blocks, scalars, constants, self.warps, together=True)
        launch.options[REGISTERS] = self.registers
        return launch

    def runs(self, call: Callable[[], T], *tensors: Tensor | None) -> T | None:
        if self.refused:
            return None
        try:
            return super().runs(call, *tensors)
        except RuntimeError as error:
            if TOO_MANY_BLOCKS not in str(error):
                raise
        self.refused = True
        self.passes_on(f"{self.blocks} blocks cannot run at the same time here")
        return None


class NarrowerForward(Narrower, ForwardPlan):
    """A forward that takes fewer calls."""

    keeps_statistics = False

    def __call__(
        self,
        operands: Operands,
        statistics: bool = True,
        out: Tensor | None = None,
        mean_out: Tensor | None = None,
        rstd_out: Tensor | None = None,
    ) -> Results:
        arguments = operands, statistics, out, mean_out, rstd_out
        found = self.runs(lambda: ForwardPlan.__call__(self, *arguments), operands.input, out)
        results: Results = self.other(*arguments) if found is None else found
        return results


def narrower_sum_forward(
    self: Any,
    operands: Operands,
    sums: Sums,
    statistics: bool = True,
    out: Tensor | None = None,
    sum_out: Tensor | None = None,
) -> Results:
    """The ``__call__`` of a narrower plan with sums around the norm."""
    arguments = operands, sums, statistics, out, sum_out
    tensors = operands.input, None if self.added.pre_layout is None else sums.pre_add, sums.post_add, out, sum_out
    found = self.runs(lambda: SumForward.__call__(self, *arguments), *tensors)
    results: Results = self.other(*arguments) if found is None else found
    return results


class NarrowerBackward(Narrower, BackwardPlan):
    """A backward that takes fewer calls."""

    def __call__(self, operands: BackwardOperands, wanted: Wanted, out: Tensor | None = None) -> Gradients:
        tensors = operands.input, operands.grad_output, out
        found = self.runs(lambda: BackwardPlan.__call__(self, operands, wanted, out), *tensors)
        gradients: Gradients = self.other(operands, wanted, out) if found is None else found
        return gradients
