"""Plans around kernels/tiles.py: both memory orders, any size."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fusednorm.backends.triton.config import Tiles, power_of_two
from fusednorm.backends.triton.kernels import tiles as forward_kernels
from fusednorm.backends.triton.kernels import tiles_backward as backward_kernels
from fusednorm.backends.triton.launch import Launch
from fusednorm.backends.triton.plans.base import BackwardPlan, ForwardPlan, folded
from fusednorm.problem import Layout, Problem

#: Partials of a unit that every program of the output can merge for itself; beyond that one more launch does it.
MERGED = 2048
#: Partials that one step of a merge takes.
MERGE_BLOCK = 1024


def _steps(layout: Layout | None) -> tuple[int, int, int]:
    assert layout is not None
    return layout.sample, layout.channel, layout.spatial


class Geometry:
    """A problem cut into tiles, in the integers and constants that the kernels take."""

    def __init__(self, problem: Problem, config: Tiles) -> None:
        view, self.config, self.problem = problem.view, config, problem
        self.samples, self.units = view.samples, problem.statistics
        self.groups, self.group_channels, self.spatial = view.groups, view.group_channels, view.spatial
        self.channels = view.channels
        self.last = problem.layout.order == "channels_last"
        self.blocks = -(-view.channels // config.channels)
        self.chunks, self.span = self.chunks_of(config.tiles), config.positions * config.tiles
        rows = view.samples if problem.per_batch else view.group_channels
        self.partials = rows * self.chunks
        self.total = view.samples * view.channels * self.chunks
        self.steps = (1, view.channels) if self.last else (self.chunks, 1)
        self.order = {"PER_BATCH": problem.per_batch, "LAST": self.last}

    def chunks_of(self, tiles: int) -> int:
        return -(-self.spatial // (self.config.positions * tiles))

    def block(self, tiles: int) -> dict[str, Any]:
        config = self.config
        even = self.spatial % (config.positions * tiles) == 0
        return {"EVEN": even, "BLOCK_C": config.channels, "BLOCK_S": config.positions, "TILES": tiles}

    @cached_property
    def merge_block(self) -> int:
        return min(power_of_two(self.partials), MERGE_BLOCK)


class TilesForward(ForwardPlan):
    """Statistics of all chunks, their merge, the output of all chunks."""

    def __init__(self, problem: Problem, config: Tiles) -> None:
        super().__init__(problem)
        self.problem = problem = folded(problem)
        self.geometry = geometry = Geometry(problem, config)
        self.given = problem.direction == "inference"
        self.merges = not self.given and config.channels == 1 and geometry.partials <= MERGED
        self.launches: dict[float, tuple[Launch, Launch, Launch]] = {}

    def prepare(self, eps: float) -> tuple[Launch, Launch, Launch]:
        problem, geometry = self.problem, self.geometry
        config, tiles = geometry.config, geometry.config.output_tiles
        chunks = geometry.chunks_of(tiles)
        sizes = (geometry.groups, geometry.group_channels, geometry.channels, geometry.spatial)
        moments = Launch(
            forward_kernels.moments,
            geometry.samples * geometry.blocks * geometry.chunks,
            (*sizes[2:], *_steps(problem.layout), geometry.blocks, geometry.chunks, *geometry.steps, geometry.total),
            {"RMS": self.rms, "LAST": geometry.last, **geometry.block(config.tiles)},
            config.warps,
        )
        finalize = Launch(
            forward_kernels.finalize,
            geometry.units,
            (geometry.partials, geometry.total, *sizes, geometry.chunks, geometry.span, *geometry.steps),
            {"EPS": eps, "RMS": self.rms, **geometry.order, "BLOCK_J": geometry.merge_block},
        )
        programs = geometry.samples * geometry.blocks * chunks
        apply = Launch(
            forward_kernels.apply,
            programs,
            (
                geometry.partials, geometry.total, *sizes, *_steps(problem.layout), *_steps(problem.output_layout),
                geometry.blocks, chunks, programs, geometry.chunks, geometry.span, *geometry.steps,
            ),
            {
                "EPS": eps, "RMS": self.rms, "VALUE": self.value, "PARAMETER": self.parameter, "MERGE": self.merges,
                **geometry.order, **geometry.block(tiles), "BLOCK_J": geometry.merge_block,
            },
            config.warps,
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
            partials = torch.empty(2 * self.geometry.total, dtype=self.compute, device=x.device)
            moments(x, partials)
            if not self.merges:
                finalize(partials, *saved)
        apply(x, y, *parameters, *saved, partials if self.merges else None)


class TilesBackward(BackwardPlan):
    """p and q of all chunks, what follows from them, the input's gradient of all chunks."""

    def __init__(self, problem: Problem, config: Tiles) -> None:
        super().__init__(problem)
        self.training = problem.training
        problem = folded(problem)
        self.geometry = geometry = Geometry(problem, config)
        tiles = config.output_tiles
        chunks = geometry.chunks_of(tiles)
        sizes = (geometry.groups, geometry.group_channels, geometry.channels, geometry.spatial)
        derivative = {"DERIVATIVE": self.derivative, "PARAMETER": self.parameter, **geometry.order}
        inputs = (*_steps(problem.grad_layout), *_steps(problem.layout))
        self.reduce = Launch(
            backward_kernels.reduce,
            geometry.samples * geometry.blocks * geometry.chunks,
            (geometry.total, *sizes, *inputs, geometry.blocks, geometry.chunks, *geometry.steps),
            {**derivative, **geometry.block(config.tiles)},
            config.warps,
        )
        programs = geometry.samples * geometry.blocks * chunks
        self.input_gradient = Launch(
            backward_kernels.input_gradient,
            programs,
            (*sizes, *inputs, *_steps(problem.output_layout), geometry.blocks, chunks, programs),
            {**derivative, **geometry.block(tiles)},
            config.warps,
        )
        self.units = geometry.units if self.wants_input and self.training else 0
        self.reduced = problem.reduced
        self.combines: dict[tuple[bool, bool], Launch] = {}

    def combine(self, parameters: bool, modulation: bool) -> Launch:
        return self.combines.setdefault(
            (parameters, modulation),
            combine_launch(self.geometry, self.units, self.reduced, self.rms, parameters, modulation),
        )

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
            partials = torch.empty(2 * self.geometry.total, dtype=self.compute, device=device)
            self.reduce(*data, *parameters, *saved, partials)
            if self.units:
                totals = torch.empty(2 * self.units, dtype=self.compute, device=device)
            combine = self.combines.get(wanted) or self.combine(*wanted)
            combine(partials, *parameters[:3], totals, *grads)
        if dx is not None:
            self.input_gradient(*data, dx, *parameters, *saved, totals)


def combine_launch(
    geometry: Any, units: int, reduced: int, rms: bool, parameters: bool = True, modulation: bool = False
) -> Launch:
    """The launch that turns p and q into P / K and Q / K of so many units and into the parameters' gradients."""
    channels, rows = geometry.channels, geometry.samples * geometry.chunks
    # Few partials a channel: many channels a program. Many: few channels, so that enough programs share them.
    block = min(power_of_two(channels), 16)
    depth = min(power_of_two(rows), 128)
    blocks = -(-channels // block)
    first = blocks if parameters else 0
    return Launch(
        backward_kernels.combine,
        units + first + (geometry.samples * blocks if modulation else 0),
        (
            units, geometry.partials, reduced, geometry.total, geometry.samples, geometry.groups,
            geometry.group_channels, channels, geometry.chunks, *geometry.steps, first,
        ),
        {
            "RMS": rms, **geometry.order, "BLOCK_J": geometry.merge_block, "BLOCK_C": block, "BLOCK_N": depth,
        },
    )  # fmt: skip
