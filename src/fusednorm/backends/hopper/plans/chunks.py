"""What the plans share whose blocks claim chunks of units."""

from __future__ import annotations

from typing import Any

from fusednorm.backends.hopper.config.resident import Chunks, ResidentConfig, magic
from fusednorm.backends.hopper.plans.base import Together
from fusednorm.backends.triton.runs import power_of_two
from fusednorm.problem import Problem


class InChunks(Together):
    """A plan of ``units`` in chunks, ``each`` units to a sample or, where samples share statistics, to all of them."""

    def __init__(self, problem: Problem, config: ResidentConfig, place: Chunks, each: int) -> None:
        # A pair for each chunk of a statistic, one for each statistic, whose leader publishes it, and a number beside
        # one that nobody reads: how many chunks have been claimed.
        pairs = problem.num_statistics * (place.parts + 1) + 1
        Together.__init__(self, problem, place.blocks, pairs, config.warps, config.registers)
        self.config, self.chunks, self.each = config, place, each
        self.units = each * (1 if problem.norm.per_batch else problem.view.samples)

    @property
    def walk(self) -> tuple[int, ...]:
        """The kernel's numbers of units and of a unit's chunks, and by what it divides by the units of a sample."""
        return self.units, self.chunks.parts, magic(self.each)

    @property
    def constants(self) -> dict[str, Any]:
        config, place = self.config, self.chunks
        return {
            "TILE": config.vectors, "TILES": config.tiles, "PARTS": power_of_two(place.parts), "LAG": place.lag,
            "MORE": place.waves > 1,
        }  # fmt: skip
