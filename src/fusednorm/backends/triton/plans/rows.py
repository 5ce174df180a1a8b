"""Plans around kernels/rows.py: units of one group and one position."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fusednorm.backends.triton.config import Columns, Rows, RowSteps, power_of_two
from fusednorm.backends.triton.kernels import rows
from fusednorm.backends.triton.launch import Launch
from fusednorm.backends.triton.plans.base import BackwardPlan, OneLaunchForward, Saved, stages
from fusednorm.backends.triton.plans.tiles import ParameterSums, Partials, combine_launch
from fusednorm.problem import Problem, View


class RowsForward(OneLaunchForward):
    """A row to a program."""

    def __init__(self, problem: Problem, config: RowSteps) -> None:
        assert problem.output_layout is not None
        scalars = (problem.layout.sample, problem.output_layout.sample)
        tile = {"K": problem.reduced, "BLOCK_K": config.elements}
        super().__init__(problem, rows.rows_forward, problem.view.samples, scalars, tile, config.warps)

    def run(self, x: Tensor, y: Tensor, parameters: Sequence[Tensor | None], saved: Saved, eps: float) -> None:
        self.launch(eps)(x, y, *parameters[:2], *saved[:2])


class RowsBackward(BackwardPlan):
    """Rows, each by one program, which sums p and q of its own rows; then the sums over the programs."""

    def __init__(self, problem: Problem, config: Rows) -> None:
        super().__init__(problem)
        view = problem.view
        assert problem.grad_layout is not None and problem.output_layout is not None
        steps = max(1, -(-view.samples // (config.units * config.programs)))
        programs = -(-view.samples // (config.units * steps))
        self.total = programs * view.channels
        self.backward = Launch(
            rows.rows_backward,
            programs,
            (view.samples, problem.grad_layout.sample, problem.layout.sample, problem.output_layout.sample, self.total),
            {
                **self.overlap, "DERIVATIVE": self.sum_derivative, "PARAMETER": self.parameter,
                "BIAS": problem.bias_dtype is not None, "K": view.channels, "BLOCK_U": config.units,
                "BLOCK_K": power_of_two(view.channels), "STEPS": steps, "STAGES": stages(config.stages),
                "RELOAD": config.reload,
            },
            config.warps,
        )  # fmt: skip
        # The programs' sums are laid out as the partials of so many samples of one chunk.
        partials = Partials(View(programs, 1, view.channels, 1), 1, last=True, per_batch=False)
        self.combine = combine_launch(partials, 0, 1, self.rms, ParameterSums(partials, True, False), self.overlap)

    def run(
        self,
        data: tuple[Tensor, Tensor],
        dx: Tensor | None,
        saved: tuple[Tensor | None, Tensor | None],
        parameters: Sequence[Tensor | None],
        grads: Sequence[Tensor | None],
    ) -> None:
        partials = None
        if grads[0] is not None or grads[1] is not None:
            partials = self.workspace(2 * self.total)
        self.backward(*data, dx, *parameters[:2], *saved, partials)
        if partials is not None:
            self.combine(partials, *parameters[:3], None, *grads)


class LongRowsBackward(BackwardPlan):
    """The totals of each row, then blocks of columns: rows of any length, in two reads."""

    def __init__(self, problem: Problem, config: Columns) -> None:
        super().__init__(problem)
        grad, output, samples = problem.grad_layout, problem.output_layout, problem.view.samples
        assert grad is not None and output is not None
        size, self.rows = problem.view.channels, samples
        blocks = -(-size // config.elements)
        steps = -(-samples // max(1, config.programs // blocks))
        shares = -(-samples // steps)
        self.total = shares * size
        common = {**self.overlap, "DERIVATIVE": self.derivative, "PARAMETER": self.parameter}
        self.totals = Launch(
            rows.row_totals,
            samples,
            (grad.sample, problem.layout.sample),
            {**common, "K": size, "BLOCK_K": config.row_elements},
            config.row_warps,
        )
        self.columns = Launch(
            rows.columns_backward,
            blocks * shares,
            (samples, blocks, grad.sample, problem.layout.sample, output.sample, self.total),
            {
                **common, "DERIVATIVE": self.sum_derivative, "BIAS": problem.bias_dtype is not None, "K": size,
                "BLOCK_K": config.elements, "STEPS": steps,
            },
            config.warps,
            follows=self.wants_input,
        )  # fmt: skip
        # The programs' sums are laid out as the partials of so many samples of one chunk.
        partials = Partials(View(shares, 1, size, 1), 1, last=True, per_batch=False)
        self.combine = combine_launch(partials, 0, 1, self.rms, ParameterSums(partials, True, False), self.overlap)

    def run(
        self,
        data: tuple[Tensor, Tensor],
        dx: Tensor | None,
        saved: tuple[Tensor | None, Tensor | None],
        parameters: Sequence[Tensor | None],
        grads: Sequence[Tensor | None],
    ) -> None:
        partials = totals = None
        if dx is not None:
            totals = self.workspace(2 * self.rows)
            self.totals(*data, *parameters[:2], *saved, totals)
        if grads[0] is not None or grads[1] is not None:
            partials = self.workspace(2 * self.total)
        self.columns(*data, dx, *parameters[:2], *saved, totals, partials)
        if partials is not None:
            self.combine(partials, *parameters[:3], None, *grads)
