"""Plans around kernels/whole.py: units that fit the registers of one program."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fusednorm.backends.triton.config.kinds import WholeConfig
from fusednorm.backends.triton.config.units import early, once
from fusednorm.backends.triton.kernels import whole
from fusednorm.backends.triton.plans.base import Given, OneLaunchForward, Saved, Tensors, converts, out_of
from fusednorm.backends.triton.runs import alignment, power_of_two
from fusednorm.problem import Layout, Problem


class WholeForward(OneLaunchForward):
    """So many units to a program."""

    def __init__(self, problem: Problem, config: WholeConfig) -> None:
        view, output = problem.view, problem.output_layout
        assert output is not None

        single = problem.norm.per_position  # each position of a sample is a unit
        positions, spatial = (max(1, view.spatial), 1) if single else (1, view.spatial)

        def unit(layout: Layout) -> tuple[int, int]:
            return layout.sample, layout.spatial if single else view.group_channels * layout.channel

        programs, block = -(-problem.num_statistics // config.units), power_of_two(problem.reduced)
        compiled = spatial if spatial == power_of_two(spatial) else None
        length, reciprocal = (1, 1) if compiled else (problem.reduced, -(-(1 << 31) // max(1, spatial)))
        steps = *unit(problem.layout), *unit(output)
        scalars = (problem.num_statistics, length, reciprocal, positions, *steps)
        tile: dict[str, Any] = {
            "G": view.groups,
            "D": view.group_channels,
            "S": compiled,
            "EVEN": problem.reduced == block,
            "EARLY": early(programs, config.warps, block * config.units),
            "ONCE": once(problem, config, block),
            "ALIGN": alignment(problem.dtype, problem.reduced, *steps),
            "BLOCK_U": config.units,
            "BLOCK_K": block,
            "OUT": out_of(problem),
            "BY_ROW": problem.quantized is not None and problem.quantized.per_row,
            "NATIVE": problem.quantized is not None and converts(),
        }
        super().__init__(problem, whole.whole_forward, programs, scalars, tile, config.warps)

    def run(self, x: Tensor, y: Tensor, parameters: Tensors, given: Given, saved: Saved) -> None:
        self.launch(x, y, *parameters, *saved, None)
