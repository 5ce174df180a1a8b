"""Plans around kernels/columns.py: positions with statistics of their own."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fusednorm.backends.hopper.config.columns import ColumnsConfig
from fusednorm.backends.hopper.config.resident import channel_vectors, vector_of
from fusednorm.backends.hopper.kernels import columns
from fusednorm.backends.hopper.kernels.activations import activation
from fusednorm.backends.hopper.plans.base import Narrower, NarrowerBackward, NarrowerForward, name_of
from fusednorm.backends.triton.launch import Launch
from fusednorm.backends.triton.plans.base import ForwardPlan, Given, Saved, Tensors
from fusednorm.backends.triton.plans.rows import SummedRowsBackward
from fusednorm.problem import Layout, Problem


def _blocks(problem: Problem, config: ColumnsConfig) -> int:
    """The blocks of a sample."""
    return -(-channel_vectors(problem) // config.lanes)


def _launch(
    kernel: Any,
    problem: Problem,
    config: ColumnsConfig,
    layouts: tuple[Layout | None, ...],
    scalars: tuple[float, ...],
    constants: dict[str, Any],
) -> Launch:
    each, blocks = vector_of(problem), _blocks(problem, config)
    strides = (stride // each for layout in layouts if layout for stride in (layout.sample, layout.channel))
    numbers = (channel_vectors(problem), *strides, blocks, 1.0 / problem.view.channels, *scalars)
    tile = {"K": problem.view.channels, "ROWS": config.rows, "LANES": config.lanes}
    return Launch(kernel, problem.view.samples * blocks, numbers, {**constants, **tile}, config.warps)


class ColumnsForward(NarrowerForward):
    """A block of positions to a program."""

    name = "hopper.columns"

    def __init__(self, problem: Problem, config: ColumnsConfig) -> None:
        ForwardPlan.__init__(self, problem)
        Narrower.__init__(self, problem)
        value, _ = activation(name_of(problem), problem.dtype)
        constants = {"RMS": self.rms, "VALUE": value, **self.alpha}
        layouts, scalars = (problem.layout, problem.output_layout), (self.eps, self.activation_parameter)
        self.launch = _launch(columns.columns_forward, problem, config, layouts, scalars, constants)

    def run(self, x: Tensor, y: Tensor, parameters: Tensors, given: Given, saved: Saved) -> None:
        self.launch(x, y, *parameters, *saved[:2])


class ColumnsBackward(NarrowerBackward, SummedRowsBackward):
    """Each block takes some positions, whose sums of p and q a last launch adds up."""

    name = "hopper.columns"

    def __init__(self, problem: Problem, config: ColumnsConfig) -> None:
        blocks = _blocks(problem, config)
        SummedRowsBackward.__init__(self, problem, blocks if problem.modulated else problem.view.samples * blocks)
        Narrower.__init__(self, problem)
        _, derivative = activation(name_of(problem), problem.dtype)
        whole = channel_vectors(problem) % config.lanes == problem.view.channels % config.rows == 0
        constants = {"DERIVATIVE": derivative, **self.alpha, "BIAS": self.sums_first, "WHOLE": whole}
        layouts = problem.grad_layout, problem.layout, problem.output_layout
        scalars = (self.activation_parameter,)
        self.launch = _launch(columns.columns_backward, problem, config, layouts, scalars, constants)

    def gradients(self, data: Tensors, dx: Tensor | None, operands: Tensors, sums: Tensors) -> None:
        self.launch(*data, dx, *operands, *sums)
