"""What the plans with sums around the norm share: the calls of the contract, beside those of the norm alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusednorm.backends.triton.plans.base import BackwardPlan, ForwardPlan, Given, Saved, Tensors, contiguous_in
from fusednorm.operands import (
    BackwardOperands,
    Gated,
    Gradients,
    Operands,
    Results,
    SumGradients,
    Sums,
    Wanted,
)
from fusednorm.problem import Added, Problem
from fusednorm.strides import contiguous, packed_strides


def added_of(problem: Problem) -> Added:
    assert problem.added is not None
    return problem.added


class SumForward(ForwardPlan):
    """A :class:`~fusednorm.instance.SumForwardPlan`."""

    keeps_statistics = False

    def __init__(self, problem: Problem, *others: Any) -> None:
        super().__init__(problem, *others)
        self.added, self.channel_axis = added_of(problem), problem.norm.channel_axis
        self.by_channel = problem.numbered

    def __call__(  # type: ignore[override]
        self,
        operands: Operands,
        sums: Sums,
        statistics: bool = True,
        out: Tensor | None = None,
        sum_out: Tensor | None = None,
    ) -> Results:
        o = operands
        if self.elsewhere(o.input):
            with torch.cuda.device(o.input.device):
                return self(operands, sums, statistics, out, sum_out)
        output = self.allocate(self.shape, self.strides, self.dtype) if out is None else out
        total = sum_out
        if total is None and self.added.keeps_sum:
            total = self.allocate(self.shape, self.strides, self.dtype)
        mean = rstd = variance = None
        if statistics or self.keeps_statistics:
            rstd, mean = self.saved(), None if self.rms else self.saved()
            variance = self.saved() if self.has_variance else None
        saved = mean, rstd, variance
        if not self.empty:
            parameters = contiguous(o.weight), contiguous(o.bias), contiguous(o.scale), contiguous(o.shift)
            given = contiguous(o.mean), contiguous(o.var)
            pre_add = None if self.added.pre_layout is None else sums.pre_add
            around = pre_add, self.gate(sums), contiguous(sums.pre_bias), sums.post_add, total
            self.add(o.input, output, parameters, given, saved, around)
        else:
            for tensor in saved:
                if tensor is not None:
                    tensor.zero_()
        return Results(output, mean, rstd, variance, total)

    def gate(self, sums: Sums) -> Tensor | None:
        """The gate of rows, or the number for each sample and channel, as the kernels read it."""
        if self.by_channel and sums.pre_gate is None:
            return None if self.added.pre_layout is not None else contiguous(sums.pre_add)  # kernels widen it
        if self.by_channel:
            return sums.numbers(self.shape, self.channel_axis, self.compute)
        return contiguous(sums.pre_gate)

    def add(self, x: Tensor, y: Tensor, parameters: Tensors, given: Given, saved: Saved, around: Tensors) -> None:
        """Launch the kernels; pre_add, its gate, the bias, post_add and the sum lie ``around`` the norm."""
        raise NotImplementedError


class SumBackward(BackwardPlan):
    """A :class:`~fusednorm.instance.SumBackwardPlan`. To the data that it runs on belong, behind grad_output and the
    input, post_add, the gradient of the sum, and the tensor for the gradient of post_add, and where there is a gate
    that gate, pre_add, and the tensors for the gradients of pre_add and of the gate; each None where there is none.
    Where the gradient of a pre_add of numbers is made, the tensor for it is the last one."""

    #: The launch that makes the gradient of a pre_add of a number for each sample and channel, where it is made.
    of_numbers: Any = None

    def __call__(  # type: ignore[override]
        self,
        operands: BackwardOperands,
        wanted: Wanted,
        behind: Tensor | None,
        grad_sum: Tensor | None,
        gated: Gated | None = None,
        out: Tensor | None = None,
        post_out: Tensor | None = None,
    ) -> tuple[Gradients, SumGradients]:
        o = operands
        if self.elsewhere(o.input):
            with torch.cuda.device(o.input.device):
                return self(operands, wanted, behind, grad_sum, gated, out, post_out)
        grad_input, grad_post_add = out, post_out
        if grad_input is None and self.wants_input:
            grad_input = self.allocate(self.shape, self.strides, self.dtype)
        if grad_post_add is None and behind is not None:
            grad_post_add = self.allocate(self.shape, self.strides, self.dtype)
        grads = [
            self.allocate(*like) if like is not None and want else None
            for like, want in zip(self.gradients_of, wanted[1:], strict=True)
        ]
        around = SumGradients(post_add=grad_post_add)
        product = () if gated is None else self.product(gated, around)
        if self.of_numbers is not None:
            shape = self.of_numbers.shape
            around.pre_add = self.allocate(shape, packed_strides(shape), self.compute)
            product = (around.pre_add,)
        if not self.empty:
            parameters = contiguous(o.weight), contiguous(o.bias), contiguous(o.scale), contiguous(o.shift)
            saved = None if self.rms else contiguous_in(o.mean, self.compute), contiguous_in(o.rstd, self.compute)
            data = o.grad_output, o.input, behind, grad_sum, grad_post_add, *product
            self.run(data, grad_input, saved, parameters, grads)
        else:
            for grad in (*grads, around.pre_add, around.pre_gate):
                if grad is not None:
                    grad.zero_()
        return Gradients(grad_input, *grads), around

    def product(self, gated: Gated, around: SumGradients) -> Tensors:
        """The gate, pre_add, and the tensors for their gradients, which are put into ``around``."""
        gate, pre_add = contiguous(gated.pre_gate), gated.pre_add
        assert gate is not None
        if gated.wants_pre_add:
            around.pre_add = self.allocate(self.shape, self.strides, self.dtype)
        if pre_add is not None:
            shape = tuple(gate.shape)
            around.pre_gate = self.allocate(shape, packed_strides(shape), gate.dtype)
        return gate, pre_add, around.pre_add, around.pre_gate
