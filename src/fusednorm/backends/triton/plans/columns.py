"""Plans around kernels/columns.py: positions with statistics of their own."""

from __future__ import annotations

from torch import Tensor

from fusednorm.backends.triton.config.kinds import PositionsConfig
from fusednorm.backends.triton.kernels import columns, sums
from fusednorm.backends.triton.launch import prepared
from fusednorm.backends.triton.plans.base import Given, OneLaunchForward, Saved, Tensors
from fusednorm.backends.triton.plans.rows import SummedRowsBackward
from fusednorm.backends.triton.plans.sums import SumBackward, SumForward
from fusednorm.backends.triton.runs import alignment, divisor
from fusednorm.problem import Layout, Problem


def _tile(problem: Problem, config: PositionsConfig, layouts: tuple[Layout, ...]) -> dict[str, int | None]:
    steps = [step for layout in layouts for step in (layout.sample, layout.channel)]
    return {
        "K": problem.view.channels,
        "ALIGN": alignment(problem.dtype, problem.view.spatial, *steps),
        "BLOCK_S": config.positions,
        "BLOCK_C": config.channels,
    }


def _blocks(problem: Problem, config: PositionsConfig) -> int:
    return -(-problem.view.spatial // config.positions)


def _scalars(problem: Problem, config: PositionsConfig, layouts: tuple[Layout, ...]) -> tuple[int, ...]:
    steps = (step for layout in layouts for step in (layout.sample, layout.channel))
    return problem.view.spatial, *steps, *divisor(_blocks(problem, config))


class ColumnsForward(OneLaunchForward):
    """A block of positions to a program."""

    def __init__(self, problem: Problem, config: PositionsConfig) -> None:
        assert problem.output_layout is not None
        layouts = problem.layout, problem.output_layout
        programs = problem.view.samples * _blocks(problem, config)
        scalars, tile = _scalars(problem, config, layouts), _tile(problem, config, layouts)
        super().__init__(problem, columns.positions_forward, programs, scalars, tile, config.warps)

    def run(self, x: Tensor, y: Tensor, parameters: Tensors, given: Given, saved: Saved) -> None:
        self.launch(x, y, *parameters, *saved[:2])


class ColumnsSumForward(SumForward):
    """A block of positions to a program, with sums around the norm."""

    def __init__(self, problem: Problem, config: PositionsConfig) -> None:
        super().__init__(problem)
        assert problem.output_layout is not None
        input, added = problem.layout, self.added
        layouts = input, problem.output_layout, added.pre_layout or input, added.post_layout or input
        self.launch = prepared(
            sums.positions_sum_forward,
            problem.view.samples * _blocks(problem, config),
            (*_scalars(problem, config, layouts), self.eps, self.activation_parameter),
            {**self.overlap, "RMS": self.rms, "VALUE": self.value, **self.alpha, **_tile(problem, config, layouts)},
            config.warps,
        )

    def add(self, x: Tensor, y: Tensor, parameters: Tensors, given: Given, saved: Saved, around: Tensors) -> None:
        self.launch(x, y, *parameters, *saved[:2], *around[:2], *around[3:])


class ColumnsBackward(SummedRowsBackward):
    """Each program takes a block of positions, whose sums of p and q a last launch adds up."""

    def __init__(self, problem: Problem, config: PositionsConfig) -> None:
        grad, output = problem.grad_layout, problem.output_layout
        assert grad is not None and output is not None
        blocks = _blocks(problem, config)
        programs = problem.view.samples * blocks
        super().__init__(problem, blocks if problem.modulated else programs)
        layouts: tuple[Layout, ...] = grad, problem.layout, output
        if problem.added is not None:
            layouts = *layouts, problem.added.post_layout or problem.layout
        self.backward = prepared(
            columns.positions_backward if problem.added is None else sums.positions_sum_backward,
            programs,
            (*_scalars(problem, config, layouts), self.activation_parameter),
            {
                **self.overlap, "DERIVATIVE": self.derivative, **self.alpha,
                "BIAS": self.sums_first, **_tile(problem, config, layouts),
            },
            config.warps,
        )  # fmt: skip

    def gradients(self, data: Tensors, dx: Tensor | None, operands: Tensors, sums: Tensors) -> None:
        self.backward(*data, dx, *operands, *sums)


class ColumnsSumBackward(SumBackward, ColumnsBackward):
    """The same with sums around the norm."""

    def gradients(self, data: Tensors, dx: Tensor | None, operands: Tensors, sums: Tensors) -> None:
        grad_output, input, *around = data
        self.backward(grad_output, input, dx, *operands, *around, *sums)
