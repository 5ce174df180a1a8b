"""Plans around kernels/whole.py: units that fit the registers of one program."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fusednorm.backends.triton.config.kinds import WholeConfig
from fusednorm.backends.triton.config.units import pivots
from fusednorm.backends.triton.config.whole import early, first, once
from fusednorm.backends.triton.kernels import sums, whole
from fusednorm.backends.triton.launch import Scalars, prepared
from fusednorm.backends.triton.plans.base import Given, OneLaunchForward, Saved, Tensors, codes_of
from fusednorm.backends.triton.plans.sums import SumForward
from fusednorm.backends.triton.runs import alignment, leading_bits, power_of_two
from fusednorm.problem import Layout, Problem


class Units:
    """So many units to a program: their programs, and the integers and constants by which a program finds them."""

    def __init__(self, problem: Problem, config: WholeConfig) -> None:
        view, output, added = problem.view, problem.output_layout, problem.added
        assert output is not None

        single = problem.norm.per_position  # each position of a sample is a unit
        positions, spatial = (max(1, view.spatial), 1) if single else (1, view.spatial)

        def steps_of(layout: Layout | None) -> tuple[int, int]:
            if layout is None:  # a kernel is compiled for an argument of 1, and has none
                return 1, 1
            return layout.sample, layout.spatial if single else view.group_channels * layout.channel

        def packed(layout: Layout) -> bool:
            sample, unit = steps_of(layout)
            units = view.groups * positions
            alone = view.samples == 1 or sample == units * problem.reduced
            return alone and (units == 1 or unit == problem.reduced)

        self.programs, block = -(-problem.num_statistics // config.units), power_of_two(problem.reduced)
        compiled = spatial if spatial == power_of_two(spatial) else None
        length, reciprocal = (1, 1) if compiled else (problem.reduced, -(-(1 << 31) // max(1, spatial)))
        around = () if added is None else (added.pre_layout, added.post_layout)
        layouts = problem.layout, output, *around
        steps = [step for layout in layouts for step in steps_of(layout)]
        known = [step for layout in layouts if layout for step in steps_of(layout)]
        align = alignment(problem.dtype, problem.reduced, *known)
        ahead = problem.added is None and first(problem, config)
        self.scalars: Scalars = (problem.num_statistics, length, reciprocal, positions, *steps)
        self.tile: dict[str, Any] = {
            "G": view.groups,
            "D": view.group_channels,
            "S": compiled,
            "EVEN": problem.reduced == block,
            "EARLY": early(self.programs, config.warps, block * config.units) or ahead,
            "ONCE": once(problem, config, block),
            "PACKED": all(packed(layout) for layout in layouts if layout),
            "ALIGN": align,
            "BLOCK_U": config.units,
            "BLOCK_K": block,
            "LEADING": leading_bits(problem.reduced, block, 3) if compiled is None and align == 1 else 0,
        }
        #: Of units with nothing around the norm: whether their statistics are counted from an element of each, and
        #: whether their parameters are loaded before the input.
        self.alone = {"PIVOT": pivots(problem), "FIRST": ahead}


def by_row(problem: Problem) -> dict[str, bool]:
    """Whether each row of an output of 8 bits has a scale of its own."""
    return {"BY_ROW": problem.quantized is not None and problem.quantized.per_row}


class WholeForward(OneLaunchForward):
    """So many units to a program."""

    def __init__(self, problem: Problem, config: WholeConfig) -> None:
        units = Units(problem, config)
        tile = {**units.tile, **units.alone, **codes_of(problem), **by_row(problem)}
        super().__init__(problem, whole.whole_forward, units.programs, units.scalars, tile, config.warps)

    def run(self, x: Tensor, y: Tensor, parameters: Tensors, given: Given, saved: Saved) -> None:
        self.launch(x, y, *parameters, *saved, None)


class WholeSumForward(SumForward):
    """So many units to a program, with sums around the norm."""

    def __init__(self, problem: Problem, config: WholeConfig) -> None:
        super().__init__(problem)
        units, gate = Units(problem, config), self.added.gate
        numbers = (1, 1) if gate is None else (gate.rows, gate.step)
        self.launch = prepared(
            sums.whole_sum_forward,
            units.programs,
            (*units.scalars, *numbers, self.eps, self.activation_parameter),
            {
                **self.overlap, "RMS": self.rms, "VALUE": self.value, **self.alpha, **units.tile,
                "PER_ELEMENT": gate is not None and gate.per_element, "BY_CHANNEL": self.by_channel,
                **codes_of(problem), **by_row(problem),
            },
            config.warps,
        )  # fmt: skip

    def add(self, x: Tensor, y: Tensor, parameters: Tensors, given: Given, saved: Saved, around: Tensors) -> None:
        self.launch(x, y, *parameters, *saved, None, *around[:2], *around[3:])
