"""Plans around kernels/points.py: batch_norm of points with a scale or shift of their own.

A plan allocates for the problem of the points. Its kernels work on that problem as one sample without scale and shift
(:func:`config.tiles.of_points`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fusednorm.backends.triton.config.kinds import PassConfig, TilesConfig
from fusednorm.backends.triton.kernels import points as kernels
from fusednorm.backends.triton.launch import Launch, prepared
from fusednorm.backends.triton.plans.base import BackwardPlan, Given, Saved, Tensors
from fusednorm.backends.triton.plans.tiles import (
    Combination,
    ParameterSums,
    PartialsShape,
    Pass,
    TilesForward,
    gradient_layouts,
    summed_layouts,
    written_layouts,
)
from fusednorm.problem import Layout, Problem


class PointsPass(Pass):
    """One pass over points, which reads their scale and shift too, or writes the gradients of these. ``rows`` are the
    strides of the other tensors from row to row."""

    def __init__(self, problem: Problem, config: PassConfig, layouts: tuple[Layout, ...]) -> None:
        dense = Layout("channels_last", problem.view.numel, 1, problem.view.channels)
        super().__init__(problem, problem.view, config, (*layouts, dense), across=False)
        self.rows = self.steps[2:-3:3]
        self.constants = {**self.tile, "REPEAT": self.repeat}


class PointsForward(TilesForward):
    """Statistics of all chunks, their merge, the output of all chunks."""

    may_merge = False

    def writing(self, problem: Problem, config: PassConfig) -> PointsPass:
        return PointsPass(problem, config, written_layouts(problem))

    def applying(self, problem: Problem, output: Pass, units: dict[str, Any], numbers: tuple[int, ...]) -> Launch:
        assert isinstance(output, PointsPass)
        return prepared(
            kernels.points_apply,
            output.programs,
            (
                problem.view.channels, problem.view.spatial, *output.rows, *output.grid,
                output.programs, self.eps, self.activation_parameter,
            ),
            {
                **self.overlap, "VALUE": self.value, **self.alpha, **output.constants, "TILES": output.tiles,
            },
            output.warps,
        )  # fmt: skip

    def run(self, x: Tensor, y: Tensor, parameters: Tensors, given: Given, saved: Saved) -> None:
        self.statistics(saved, x)
        self.apply(x, y, *parameters, *saved, *given)


class PointsBackward(BackwardPlan):
    """p and q of all chunks, with the gradients of scale and shift; the units' totals and the gradients of weight and
    bias; the input's gradient of all chunks."""

    def __init__(self, made_for: Problem, problem: Problem, config: TilesConfig) -> None:
        super().__init__(made_for)
        view = problem.view
        reduction = PointsPass(problem, config.reduction, summed_layouts(problem))
        output = PointsPass(problem, config.output, gradient_layouts(problem))
        self.units = problem.num_statistics if self.wants_input and problem.norm.training else 0
        self.partials = PartialsShape(view, reduction.partials, self.units, last=True, per_batch=True)
        self.reduced = problem.reduced
        sizes = view.channels, view.spatial
        self.reduce = prepared(
            kernels.points_reduce,
            reduction.programs,
            (
                *sizes, *reduction.rows, *reduction.grid, self.partials.total, reduction.tiles,
                self.activation_parameter,
            ),
            {**self.overlap, "DERIVATIVE": self.derivative, **self.alpha, **reduction.constants, **reduction.staged},
            reduction.warps,
        )  # fmt: skip
        self.gradients = prepared(
            kernels.points_gradients,
            output.programs,
            (*sizes, *output.rows, *output.grid, output.programs, self.activation_parameter),
            {
                **self.overlap, "DERIVATIVE": self.derivative, **self.alpha, **output.constants, "TILES": output.tiles,
            },
            output.warps,
        )  # fmt: skip
        self.combinations: dict[bool, Combination] = {}

    def combination(self, parameters: bool) -> Combination:
        """What makes the units' totals, and with ``parameters`` the gradients of weight and bias."""
        if parameters not in self.combinations:
            sums = ParameterSums(self.partials, parameters, modulation=False, totals=self.units > 0)
            self.combinations[parameters] = Combination(self, self.partials, self.units, self.reduced, sums)
        return self.combinations[parameters]

    def run(self, data: Tensors, dx: Tensor | None, saved: Tensors, parameters: Tensors, grads: Tensors) -> None:
        totals = None
        summed = grads[0] is not None or grads[1] is not None
        if self.units or any(grad is not None for grad in grads):
            partials = self.workspace(2 * self.partials.total)
            self.reduce(*data, *parameters, *saved, partials, *grads[2:])
            if self.units or summed:
                totals = self.workspace(2 * self.units) if self.units else None
                self.combination(summed)(partials, (*parameters[:2], None, None), totals, (*grads[:2], None, None))
        if dx is not None:
            self.gradients(*data, dx, *parameters, *saved, totals)
