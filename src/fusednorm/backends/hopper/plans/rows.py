"""The plan around kernels/rows.py: rows whose backward reads once."""

from __future__ import annotations

from torch import Tensor

from fusednorm.backends.hopper.config.resident import vector_of
from fusednorm.backends.hopper.config.rows import RowsConfig, row_vectors
from fusednorm.backends.hopper.kernels import rows
from fusednorm.backends.hopper.kernels.activations import activation
from fusednorm.backends.hopper.plans.base import Narrower, NarrowerBackward, name_of
from fusednorm.backends.triton.launch import Launch
from fusednorm.backends.triton.plans.base import Tensors
from fusednorm.backends.triton.plans.rows import SummedRowsBackward
from fusednorm.problem import Problem


class RowsBackward(NarrowerBackward, SummedRowsBackward):
    """A block to a multiprocessor, whose sums of p and q over its rows a last launch adds up."""

    name = "hopper.rows"

    def __init__(self, problem: Problem, config: RowsConfig, processors: int) -> None:
        blocks, each = min(processors, problem.view.samples), vector_of(problem)
        SummedRowsBackward.__init__(self, problem, blocks)
        Narrower.__init__(self, problem)
        _, derivative = activation(name_of(problem), problem.dtype)
        layouts = problem.grad_layout, problem.layout, problem.output_layout
        strides = (layout.sample // each for layout in layouts if layout)
        self.launch = Launch(
            rows.rows_backward,
            blocks,
            (problem.view.samples, *strides, 1.0 / problem.view.channels, self.activation_parameter),
            {
                "DERIVATIVE": derivative, **self.alpha, "BIAS": self.sums_first, "K": row_vectors(problem),
                "SLOTS": config.slots, "HELD": config.held,
            },
            config.warps,
        )  # fmt: skip

    def gradients(self, data: Tensors, dx: Tensor | None, operands: Tensors, sums: Tensors) -> None:
        weight, bias, _, _, *saved = operands
        self.launch(*data, dx, weight, bias, *saved, *sums)
