"""The plan around kernels/row_parts.py: rows of any length, whose backward reads once."""

from __future__ import annotations

from torch import Tensor

from fusednorm.backends.hopper.config.row_parts import RowPartsConfig, chunk, shifted, steps
from fusednorm.backends.hopper.kernels import row_parts
from fusednorm.backends.hopper.kernels.activations import activation
from fusednorm.backends.hopper.plans.base import NarrowerBackward, Together, name_of
from fusednorm.backends.triton.plans.base import Tensors
from fusednorm.backends.triton.plans.rows import SummedRowsBackward
from fusednorm.backends.triton.runs import power_of_two
from fusednorm.problem import Problem


class RowPartsBackward(Together, NarrowerBackward, SummedRowsBackward):
    """One launch, one before it that fills the packets with zeros, and one behind it that adds up the teams' sums."""

    name = "hopper.row_parts"

    def __init__(self, problem: Problem, config: RowPartsConfig) -> None:
        SummedRowsBackward.__init__(self, problem, config.teams)
        rows, size = problem.view.samples, problem.view.channels
        blocks = config.teams * config.parts
        Together.__init__(self, problem, blocks, rows * config.parts, config.warps, config.registers)
        _, derivative = activation(name_of(problem), problem.dtype)
        strides = (layout.sample for layout in (problem.grad_layout, problem.layout, problem.output_layout) if layout)
        self.launch = self.launch_of(
            row_parts.row_parts_backward,
            (
                rows, *strides, config.parts, config.teams, chunk(problem, config), 1.0 / size,
                self.activation_parameter,
            ),
            {
                "DERIVATIVE": derivative, **self.alpha, "BIAS": self.sums_first, "K": size,
                "SHIFTED": shifted(problem), "PARTS": power_of_two(config.parts), "STEPS": steps(problem, config),
            },
        )  # fmt: skip

    def gradients(self, data: Tensors, dx: Tensor | None, operands: Tensors, sums: Tensors) -> None:
        weight, bias, _, _, *saved = operands
        bias = None if self.problem.norm.activation is None else bias  # z is not asked for
        self.launch(*data, dx, weight, bias, *saved, *sums, self.packets())
