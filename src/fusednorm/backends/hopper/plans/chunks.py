"""What the plans share whose blocks claim chunks of units."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fusednorm.backends.hopper.config.resident import Chunks, ResidentConfig, magic
from fusednorm.backends.hopper.plans.base import NarrowerBackward, Together
from fusednorm.backends.triton.plans.base import Tensors
from fusednorm.backends.triton.plans.tiles import Combination, ParameterSums, PartialsShape
from fusednorm.backends.triton.runs import power_of_two
from fusednorm.problem import Problem


class InChunks(Together):
    """A plan of ``units`` in chunks, ``each`` units to a sample or, where samples share statistics, to all of them."""

    def __init__(self, problem: Problem, config: ResidentConfig, place: Chunks, each: int) -> None:
        # A packet for each chunk of a statistic, one for each statistic, whose leader publishes it, and the number of
        # chunks that have been claimed.
        words = problem.num_statistics * (place.parts + 1) + 1
        Together.__init__(self, problem, place.blocks, words, config.warps, config.registers)
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


class SummedBackward(NarrowerBackward):
    """A backward that leaves partials of p and q, of which another launch makes the parameters' gradients; ``numbered``
    are the units of which that launch makes P and Q."""

    def __init__(self, partials: PartialsShape, numbered: int = 0) -> None:
        self.partials, self.numbered = partials, numbered
        self.combinations: dict[tuple[bool, bool], Combination] = {}

    @staticmethod
    def wanted(grads: Tensors) -> tuple[bool, bool]:
        """Whether gradients of weight or bias, and of scale or shift, are wanted."""
        return grads[0] is not None or grads[1] is not None, grads[2] is not None or grads[3] is not None

    def combine(self, partials: Tensor, parameters: Tensors, totals: Tensor | None, grads: Tensors) -> None:
        """Make the gradients of weight and bias, of scale and shift, or of all four."""
        wanted = self.wanted(grads)
        launch = self.combinations.get(wanted)
        if launch is None:
            sums = ParameterSums(self.partials, *wanted)
            launch = Combination(self, self.partials, self.numbered, self.problem.reduced, sums)
            self.combinations[wanted] = launch
        launch(partials, parameters, totals, grads)
