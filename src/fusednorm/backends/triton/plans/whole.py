"""Plans around kernels/whole.py: units that fit the registers of one program."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fusednorm.backends.triton.config import Whole, power_of_two
from fusednorm.backends.triton.kernels import whole
from fusednorm.backends.triton.plans.base import OneLaunchForward, Saved
from fusednorm.problem import Layout, Problem


class WholeForward(OneLaunchForward):
    """So many units to a program."""

    def __init__(self, problem: Problem, config: Whole) -> None:
        view, output = problem.view, problem.output_layout
        assert output is not None

        def group(layout: Layout) -> tuple[int, int]:
            return layout.sample, view.group_channels * layout.channel

        programs = -(-problem.statistics // config.units)
        scalars = (problem.statistics, *group(problem.layout), *group(output))
        tile = {
            "G": view.groups,
            "S": view.spatial,
            "K": problem.reduced,
            "BLOCK_U": config.units,
            "BLOCK_K": power_of_two(problem.reduced),
        }
        super().__init__(problem, whole.whole_forward, programs, scalars, tile, config.warps)

    def run(self, x: Tensor, y: Tensor, parameters: Sequence[Tensor | None], saved: Saved, eps: float) -> None:
        (launch,) = self.launches(eps)
        launch(x, y, *parameters, *saved)
