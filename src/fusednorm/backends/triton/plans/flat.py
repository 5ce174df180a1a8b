"""The plan around kernels/flat.py: evaluations of dense tensors."""

from __future__ import annotations

from torch import Tensor

from fusednorm.backends.triton.config.flat import inner_elements
from fusednorm.backends.triton.config.kinds import FlatConfig
from fusednorm.backends.triton.kernels.flat import flat_forward
from fusednorm.backends.triton.launch import prepared
from fusednorm.backends.triton.plans.base import ForwardPlan, Given, Saved, Tensors
from fusednorm.problem import Problem


def divisor(number: int) -> tuple[int, int, int]:
    """A number with the factor and the shift by which the kernel divides by it."""
    shift = (number - 1).bit_length()
    return number, -(-(1 << (31 + shift)) // number), shift


class FlatForward(ForwardPlan):
    """So many vectors to a program."""

    keeps_statistics = False

    def __init__(self, problem: Problem, config: FlatConfig) -> None:
        super().__init__(problem)
        view, last = problem.view, problem.layout.order == "channels_last"
        inner, vectors = inner_elements(problem), view.numel // config.width
        each = inner % config.width != 0
        outer = view.spatial if last else view.channels
        divisors = (*divisor(max(1, inner if each else inner // config.width)), *divisor(max(1, outer)))
        self.launch = prepared(
            flat_forward,
            -(-vectors // config.vectors),
            (vectors, *divisors, self.eps, self.activation_parameter),
            {
                **self.overlap, "VALUE": self.value, **self.alpha, "LAST": last, "EACH": each, "WIDTH": config.width,
                "BLOCK_V": config.vectors,
            },
            config.warps,
        )  # fmt: skip

    def run(self, x: Tensor, y: Tensor, parameters: Tensors, given: Given, saved: Saved) -> None:
        self.launch(x, y, *parameters, *saved[:2], *given)
