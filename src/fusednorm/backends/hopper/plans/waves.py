"""What the plans share whose blocks work on chunks in waves, and wait for one another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusednorm.backends.hopper.config.resident import ResidentConfig, Waves, magic
from fusednorm.backends.hopper.plans.base import Narrower, T
from fusednorm.backends.triton.launch import Launch
from fusednorm.backends.triton.plans.base import Plan
from fusednorm.backends.triton.runs import power_of_two
from fusednorm.private.triton_names import REGISTERS, TOO_MANY_BLOCKS
from fusednorm.problem import Problem


class InWaves(Narrower, Plan):
    """A plan of ``units`` in waves, ``each`` of them to a sample or, where samples share statistics, to all of them. A
    call whose blocks cannot all run at the same time, since other programs share the GPU, runs on the other instance
    too."""

    def __init__(self, problem: Problem, config: ResidentConfig, place: Waves, each: int, pairs: int) -> None:
        Narrower.__init__(self, problem)
        self.config, self.chunks, self.each, self.refused = config, place, each, False
        self.units, self.pairs = each * (1 if problem.norm.per_batch else problem.view.samples), 2 * pairs

    def packets(self) -> Tensor:
        """Packets that nobody has written."""
        return self.workspace(self.pairs, torch.int64, zeroed=True)

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

    def launch_of(self, kernel: Any, scalars: tuple[int | float, ...], constants: dict[str, Any]) -> Launch:
        launch = Launch(kernel, self.chunks.blocks, scalars, constants, self.config.warps, together=True)
        launch.options[REGISTERS] = self.config.registers
        return launch

    def runs(self, call: Callable[[], T], *tensors: Tensor | None) -> T | None:
        if self.refused:
            return None
        try:
            return super().runs(call, *tensors)
        except RuntimeError as error:
            if TOO_MANY_BLOCKS not in str(error):
                raise
        self.refused = True
        self.passes_on(f"{self.chunks.blocks} blocks cannot run at the same time here")
        return None
