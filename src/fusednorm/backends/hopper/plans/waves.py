"""What the plans share whose blocks work on chunks in waves."""

from __future__ import annotations

from typing import Any

from fusednorm.backends.hopper.config.resident import ResidentConfig, Waves, magic
from fusednorm.backends.hopper.plans.base import Together
from fusednorm.backends.triton.runs import power_of_two
from fusednorm.problem import Problem


class InWaves(Together):
    """A plan of ``units`` in waves, ``each`` of them to a sample or, where samples share statistics, to all of them."""

    def __init__(self, problem: Problem, config: ResidentConfig, place: Waves, each: int, pairs: int) -> None:
        Together.__init__(self, problem, place.blocks, pairs, config.warps, config.registers)
        self.config, self.chunks, self.each = config, place, each
        self.units = each * (1 if problem.norm.per_batch else problem.view.samples)

    @property
    def walk(self) -> tuple[int, ...]:
        """The kernel's numbers of units, parts and waves, and a block's step from chunk to chunk."""
        place = self.chunks
        return self.units, place.parts, place.waves, *divmod(place.blocks, place.parts), magic(self.each)

    @property
    def constants(self) -> dict[str, Any]:
        config, place = self.config, self.chunks
        return {
            "TILE": config.vectors, "TILES": config.tiles, "PARTS": power_of_two(place.parts), "LAG": place.lag,
            "AHEAD": place.ahead,
        }  # fmt: skip
