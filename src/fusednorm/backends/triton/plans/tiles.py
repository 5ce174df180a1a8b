"""Plans around kernels/tiles.py: both memory orders, any size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fusednorm.backends.triton.config import Passes, Tiles, power_of_two
from fusednorm.backends.triton.kernels import tiles as forward_kernels
from fusednorm.backends.triton.kernels import tiles_backward as backward_kernels
from fusednorm.backends.triton.launch import Launch
from fusednorm.backends.triton.plans.base import BackwardPlan, ForwardPlan, folded
from fusednorm.problem import Layout, Problem, View

#: Partials of a unit that every program of the output merges for itself; beyond that one more launch does it.
MERGED = 128
#: Partials that one step of a merge takes.
MERGE_BLOCK = 1024


def _steps(layout: Layout | None) -> tuple[int, int, int]:
    assert layout is not None
    return layout.sample, layout.channel, layout.spatial


class Pass:
    """One pass over a view: its programs, and the integers and constants by which they find their tiles."""

    def __init__(self, problem: Problem, view: View, config: Tiles) -> None:
        self.last = problem.layout.order == "channels_last"
        self.span = config.positions * config.tiles
        self.blocks, self.chunks = -(-view.channels // config.channels), -(-view.spatial // self.span)
        self.programs = view.samples * self.blocks * self.chunks
        self.warps = config.warps
        self.constants = {
            "LAST": self.last,
            "EVEN": view.spatial % self.span == 0,
            "BLOCK_C": config.channels,
            "BLOCK_S": config.positions,
            "TILES": config.tiles,
        }


class Partials:
    """The partials that a pass leaves: two planes of one number for each sample, channel and chunk."""

    def __init__(self, problem: Problem, view: View, source: Pass) -> None:
        self.total = view.samples * view.channels * source.chunks
        self.steps = (1, view.channels) if source.last else (source.chunks, 1)
        self.rows = source.chunks * (view.samples if problem.per_batch else 1)
        self.count = self.rows * view.group_channels
        columns = min(power_of_two(view.group_channels), MERGE_BLOCK)
        self.constants = {
            "PER_BATCH": problem.per_batch,
            "BLOCK_R": min(power_of_two(self.rows), MERGE_BLOCK // columns),
            "BLOCK_D": columns,
        }


def _grouped(problem: Problem) -> Problem:
    """A group as one channel of all its positions, where its elements follow one another."""
    view, layout = problem.view, problem.layout
    flat = layout.order == "channels_first" and layout.channel == view.spatial and not problem.per_batch
    if not flat or view.group_channels == 1:
        return problem
    one = View(view.samples, view.groups, 1, view.group_channels * view.spatial)
    return replace(problem, view=one, layout=replace(layout, channel=view.group_channels * layout.channel))


class TilesForward(ForwardPlan):
    """Statistics of all chunks, their merge, the output of all chunks."""

    def __init__(self, problem: Problem, config: Passes) -> None:
        super().__init__(problem)
        problem = folded(problem)
        source = _grouped(problem)
        view, seen = problem.view, source.view
        self.problem, self.source = problem, source
        self.statistics, self.results = Pass(source, seen, config.reduction), Pass(problem, view, config.output)
        self.partials = Partials(source, seen, self.statistics)
        self.given = problem.direction == "inference"
        within = view.group_channels % config.output.channels == 0
        self.merges = not self.given and within and self.partials.count <= MERGED
        self.launches: dict[float, tuple[Launch, Launch, Launch]] = {}

    def prepare(self, eps: float) -> tuple[Launch, Launch, Launch]:
        problem, view, seen = self.problem, self.problem.view, self.source.view
        statistics, results, partials = self.statistics, self.results, self.partials
        merged = (
            partials.total, seen.groups, seen.group_channels, seen.channels, seen.spatial, partials.rows,
            statistics.chunks, statistics.span, *partials.steps,
        )  # fmt: skip
        moments = Launch(
            forward_kernels.moments,
            statistics.programs,
            (
                seen.channels, seen.spatial, *_steps(self.source.layout), statistics.blocks, statistics.chunks,
                *partials.steps, partials.total,
            ),
            {"RMS": self.rms, **statistics.constants},
            statistics.warps,
        )  # fmt: skip
        finalize = Launch(
            forward_kernels.finalize,
            problem.statistics,
            merged,
            {"EPS": eps, "RMS": self.rms, **partials.constants},
        )
        apply = Launch(
            forward_kernels.apply,
            results.programs,
            (
                view.groups, view.group_channels, view.channels, view.spatial, *_steps(problem.layout),
                *_steps(problem.output_layout), results.blocks, results.chunks, results.programs, *merged,
            ),
            {
                "EPS": eps, "RMS": self.rms, "VALUE": self.value, "PARAMETER": self.parameter, "MERGE": self.merges,
                **results.constants, **partials.constants,
            },
            results.warps,
        )  # fmt: skip
        return self.launches.setdefault(eps, (moments, finalize, apply))

    def run(
        self,
        x: Tensor,
        y: Tensor,
        parameters: Sequence[Tensor | None],
        saved: tuple[Tensor | None, Tensor, Tensor | None],
        eps: float,
    ) -> None:
        moments, finalize, apply = self.launches.get(eps) or self.prepare(eps)
        partials = None
        if not self.given:
            partials = torch.empty(2 * self.partials.total, dtype=self.compute, device=x.device)
            moments(x, partials)
            if not self.merges:
                finalize(partials, *saved)
        apply(x, y, *parameters, *saved, partials if self.merges else None)


class TilesBackward(BackwardPlan):
    """p and q of all chunks, what follows from them, the input's gradient of all chunks."""

    def __init__(self, problem: Problem, config: Passes) -> None:
        super().__init__(problem)
        self.training = problem.training
        problem = folded(problem)
        view = problem.view
        reduction, results = Pass(problem, view, config.reduction), Pass(problem, view, config.output)
        self.view, self.chunks = view, reduction.chunks
        self.partials = partials = Partials(problem, view, reduction)
        sizes = (view.groups, view.group_channels, view.channels, view.spatial)
        inputs = (*_steps(problem.grad_layout), *_steps(problem.layout))
        per_batch = {"PER_BATCH": problem.per_batch}
        self.reduce = Launch(
            backward_kernels.reduce,
            reduction.programs,
            (*sizes, *inputs, reduction.blocks, reduction.chunks, partials.total, *partials.steps),
            {
                "DERIVATIVE": self.sum_derivative, "PARAMETER": self.parameter, **per_batch, **reduction.constants,
            },
            reduction.warps,
        )  # fmt: skip
        self.input_gradient = Launch(
            backward_kernels.input_gradient,
            results.programs,
            (*sizes, *inputs, *_steps(problem.output_layout), results.blocks, results.chunks, results.programs),
            {"DERIVATIVE": self.derivative, "PARAMETER": self.parameter, **per_batch, **results.constants},
            results.warps,
        )
        self.units = problem.statistics if self.wants_input and self.training else 0
        self.reduced = problem.reduced
        self.combines: dict[tuple[bool, bool], Launch] = {}

    def combine(self, parameters: bool, modulation: bool) -> Launch:
        launch = combine_launch(
            self.view, self.chunks, self.partials, self.units, self.reduced, self.rms, parameters, modulation
        )
        return self.combines.setdefault((parameters, modulation), launch)

    def run(
        self,
        data: tuple[Tensor, Tensor],
        dx: Tensor | None,
        saved: tuple[Tensor | None, Tensor | None],
        parameters: Sequence[Tensor | None],
        grads: Sequence[Tensor | None],
    ) -> None:
        totals, device = None, dx.device if dx is not None else data[1].device
        wanted = (grads[0] is not None or grads[1] is not None, grads[2] is not None or grads[3] is not None)
        if self.units or wanted[0] or wanted[1]:
            partials = torch.empty(2 * self.partials.total, dtype=self.compute, device=device)
            self.reduce(*data, *parameters, *saved, partials)
            if self.units:
                totals = torch.empty(2 * self.units, dtype=self.compute, device=device)
            combine = self.combines.get(wanted) or self.combine(*wanted)
            combine(partials, *parameters[:3], totals, *grads)
        if dx is not None:
            self.input_gradient(*data, dx, *parameters, *saved, totals)


def combine_launch(
    view: View,
    chunks: int,
    partials: Any,
    units: int,
    reduced: int,
    rms: bool,
    parameters: bool = True,
    modulation: bool = False,
) -> Launch:
    """The launch that turns p and q into P / K and Q / K of so many units and into the parameters' gradients."""
    channels, rows = view.channels, view.samples * chunks
    # Eight fp32 values are the least that memory moves; more rows at once than registers hold are a loop.
    block = min(power_of_two(channels), 8 if rows > 64 else 16)
    depth = min(power_of_two(rows), 256)
    blocks = -(-channels // block)
    first = blocks if parameters else 0
    return Launch(
        backward_kernels.combine,
        units + first + (view.samples * blocks if modulation else 0),
        (
            units, reduced, view.samples, view.groups, view.group_channels, channels, partials.total, partials.rows,
            chunks, *partials.steps, first,
        ),
        {"RMS": rms, **partials.constants, "BLOCK_C": block, "BLOCK_N": depth},
    )  # fmt: skip
