"""Plans around kernels/whole.py: units that fit the registers of one program."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fusednorm.backends.triton.config import Whole, power_of_two
from fusednorm.backends.triton.kernels import whole
from fusednorm.backends.triton.launch import Launch
from fusednorm.backends.triton.plans.base import ForwardPlan, Saved
from fusednorm.problem import Layout, Problem


class WholeForward(ForwardPlan):
    """One launch."""

    def __init__(self, problem: Problem, config: Whole) -> None:
        super().__init__(problem)
        view, output = problem.view, problem.output_layout
        assert output is not None
        self.launches: dict[float, Launch] = {}
        self.keeps_statistics = False

        def group(layout: Layout) -> tuple[int, int]:
            return layout.sample, view.group_channels * layout.channel

        self.programs = -(-problem.statistics // config.units)
        self.scalars = (problem.statistics, *group(problem.layout), *group(output))
        self.warps = config.warps
        self.constants = {
            "RMS": self.rms,
            "VALUE": self.value,
            "PARAMETER": self.parameter,
            "G": view.groups,
            "S": view.spatial,
            "K": problem.reduced,
            "BLOCK_U": config.units,
            "BLOCK_K": power_of_two(problem.reduced),
        }

    def run(
        self,
        x: Tensor,
        y: Tensor,
        parameters: Sequence[Tensor | None],
        saved: Saved,
        eps: float,
    ) -> None:
        launch = self.launches.get(eps)
        if launch is None:
            constants = {"EPS": eps, **self.constants}
            launch = self.launches[eps] = Launch(
                whole.whole_forward, self.programs, self.scalars, constants, self.warps
            )
        launch(x, y, *parameters, *saved)
