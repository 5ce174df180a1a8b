"""What the plans with sums around a norm share: what a call writes into a frame beyond that of the norm alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusednorm.backends.cpu.frame import writer
from fusednorm.backends.cpu.geometry import TOTAL_ROW, TOTAL_SAMPLE, TOTAL_STEP, TOTAL_WORKER
from fusednorm.backends.cpu.plans.base import (
    BACKWARD,
    BACKWARD_PLACE,
    CODES,
    FORWARD,
    FORWARD_PLACE,
    KEPT_ELEMENTS,
    NOTHING,
    BackwardPlan,
    ForwardPlan,
    in_lines,
    put_given,
)
from fusednorm.operands import (
    BackwardOperands,
    Gated,
    Gradients,
    Operands,
    Results,
    SumGradients,
    Sums,
    Wanted,
    no_memory,
)
from fusednorm.problem import DTYPE_BYTES, Problem
from fusednorm.strides import contiguous

TOTAL, TOTAL_PLACE = writer("total", "total")
ADDED, ADDED_PLACE = writer("pre_add", "post_add")
GRADIENTS, GRADIENTS_PLACE = writer("post_add", "grad_post_add")
PRODUCT, PRODUCT_PLACE = writer("grad_pre_add", "grad_pre_gate_dtype")
CONTIGUOUS: dict[str, Any] = {"memory_format": torch.contiguous_format}


def address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr() or no_memory(tensor)


def gate_numbers(sums: Sums, compute: torch.dtype) -> Tensor | None:
    """The gate as kernels read it."""
    return None if sums.pre_gate is None else sums.pre_gate.to(compute).contiguous()


class NumbersOfPlanes:
    """The gate of images, whose kernels read a number for each sample and channel."""

    problem: Problem
    compute: torch.dtype

    def numbers(self, sums: Sums) -> Tensor | None:
        """The gate, or the gate times what is added per channel."""
        return sums.numbers(self.problem.shape, self.problem.norm.channel_axis, self.compute)


def place_sum(plan: ForwardPlan) -> None:
    """s that is kept lies as the output does."""
    layout = plan.problem.output_layout
    assert layout is not None
    step = layout.channel if layout.order == "channels_first" else layout.spatial
    plan.geometry[TOTAL_SAMPLE], plan.geometry[TOTAL_STEP] = layout.sample, step


def makes_twice(problem: Problem) -> bool:
    """Whether s that nobody keeps is made again where it is read again: of 16 bits it would be rounded again. In
    float32 group_norm of (4, 320, 64, 64) with a number for each plane and silu takes 1.0 ms so on an AMD processor,
    and 1.5 with s in cache, in bfloat16 2.1 and 1.6."""
    return problem.dtype == problem.compute_dtype


class SumForward(ForwardPlan):
    """A :class:`~fusednorm.instance.SumForwardPlan`."""

    def __init__(self, problem: Problem, *order: Any) -> None:
        assert problem.added is not None
        self.added = problem.added
        self.adds_before = "pre_add" in problem.added.names
        self.keeps_sum = self.added.keeps_sum or (self.adds_before and self.always_keeps(problem))
        super().__init__(problem, *order)

    def always_keeps(self, problem: Problem) -> bool:
        """Whether s has no place but memory."""
        return False

    def variant(self) -> str:
        """What is behind the name of the kernel."""
        by_channel = self.adds_before and self.added.pre_layout is None
        before = "_by_channel" if by_channel else "_before" if self.adds_before else ""
        return before + ("_behind" if "post_add" in self.added.names else "")

    def kept(self) -> str:
        """What is behind the variant of a kernel that makes s once, and writes it."""
        return "_kept" if self.adds_before and (self.keeps_sum or not makes_twice(self.problem)) else ""

    def place_total(self, elements: int, row: int | None = None) -> None:
        """Where s lies: as the output does, or, where nobody keeps it, in so many elements of each worker's own, in
        rows of planes, or of so many elements."""
        if self.keeps_sum:
            place_sum(self)
        elif self.adds_before:
            size = DTYPE_BYTES[self.problem.dtype]
            self.room_per_thread = in_lines(elements * size)
            self.geometry[TOTAL_WORKER] = self.room_per_thread // size
            self.geometry[TOTAL_ROW] = self.problem.view.spatial if row is None else row
            self.reserve(total=0)  # behind all else

    def numbers(self, sums: Sums) -> Tensor | None:
        """What kernels read as the gate."""
        return gate_numbers(sums, self.compute)

    def __call__(  # type: ignore[override]
        self,
        operands: Operands,
        sums: Sums,
        statistics: bool = True,
        out: Tensor | None = None,
        sum_out: Tensor | None = None,
    ) -> Results:
        input, pre_add, post_add = operands.input, sums.pre_add, sums.post_add
        output = self.output(input) if out is None else out
        total = self.output(input) if sum_out is None and self.keeps_sum else sum_out
        mean = rstd = variance = None
        saved = self.discard
        if statistics or not self.few:
            rstd, mean = self.statistic(), self.statistic() if self.has_mean else None
            variance = self.statistic() if self.has_variance else None
            saved = (
                0 if mean is None else mean.data_ptr(), rstd.data_ptr(), 0 if variance is None else variance.data_ptr(),
            )  # fmt: skip
        if self.empty:
            for tensor in (mean, rstd, variance):
                if tensor is not None:
                    tensor.zero_()
            return Results(output, mean, rstd, variance, total)
        # Operands are held until the kernels are done.
        weight, bias = contiguous(operands.weight), contiguous(operands.bias)
        scale, shift, gate = contiguous(operands.scale), contiguous(operands.shift), self.numbers(sums)
        threads = self.program.threads()
        frame = self.frame(threads)
        FORWARD(
            frame.words, FORWARD_PLACE, output.data_ptr(), *saved, self.eps,
            *map(address, (input, weight, bias, scale, shift)),
        )  # fmt: skip
        ADDED(frame.words, ADDED_PLACE, *map(address, (pre_add, gate, post_add)))
        if total is not None:
            TOTAL(frame.words, TOTAL_PLACE, total.data_ptr())
        if self.given:
            _held = put_given(frame, operands)
        self.program.run(frame, threads)
        self.release(frame)
        return Results(output, mean, rstd, variance, total)

    def short(self, operands: Operands) -> None:
        """No call with sums takes the short way."""


class SumBackward(BackwardPlan):
    """A :class:`~fusednorm.instance.SumBackwardPlan`."""

    def __init__(self, problem: Problem, *order: Any) -> None:
        assert problem.added is not None
        self.added = problem.added
        super().__init__(problem, *order)

    def keeps(self, elements: int, most: int = KEPT_ELEMENTS) -> bool:
        return self.added.post_layout is not None or super().keeps(elements, most)

    def variant(self, keeps: bool) -> str:
        kept = "_behind" if self.added.post_layout is not None else super().variant(keeps)
        gated = "_gated" if self.problem.gated_backward else ""
        return kept + ("_total" if self.added.grad_sum else "") + gated

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
        input, grad_output, wants = operands.input, operands.grad_output, wanted if self.sums_parameters else NOTHING
        grad_input = self.output(input) if out is None and self.wants_input else out
        grad_post_add = self.output(input) if post_out is None and behind is not None else post_out
        # Operands are held until the kernels are done.
        parameters = [contiguous(each) for each in (operands.weight, operands.bias, operands.scale, operands.shift)]
        grads: list[Any] = [
            torch.empty_like(each) if each is not None and want else None
            for each, want in zip(parameters, wants[1:], strict=True)
        ]
        gradients, around = Gradients(grad_input, *grads), SumGradients(post_add=grad_post_add)
        if gated is not None:
            around.pre_add = self.output(input) if gated.wants_pre_add else None
            around.pre_gate = None if gated.pre_add is None else torch.empty_like(gated.pre_gate, **CONTIGUOUS)
        if self.tensor_bytes == 0:
            for grad in (*grads, around.pre_gate):
                if grad is not None:
                    grad.zero_()
            return gradients, around
        mean = contiguous(operands.mean) if self.problem.norm.has_mean else None
        rstd = operands.rstd.contiguous()
        threads = self.program.threads()
        frame = self.frame(threads)
        BACKWARD(
            frame.words, BACKWARD_PLACE, *map(address, (input, *parameters)),
            address(mean), 0 if mean is None else CODES[mean.dtype], rstd.data_ptr(), CODES[rstd.dtype],
            *map(address, (grad_output, grad_input, *grads)),
        )  # fmt: skip
        GRADIENTS(frame.words, GRADIENTS_PLACE, *map(address, (behind, grad_sum, grad_post_add)))
        if gated is not None:
            gate = gated.pre_gate.to(self.compute).contiguous()
            code = 0 if around.pre_gate is None else CODES[around.pre_gate.dtype]
            ADDED(frame.words, ADDED_PLACE, *map(address, (gated.pre_add, gate, behind)))
            PRODUCT(frame.words, PRODUCT_PLACE, *map(address, (around.pre_add, around.pre_gate)), code)
        self.program.run(frame, threads)
        self.release(frame)
        return gradients, around
