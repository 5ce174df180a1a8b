"""Plans around kernels/rows.py: units of one group and one position."""

from __future__ import annotations

from torch import Tensor

from fusednorm.backends.triton.config.kinds import ColumnsBackwardConfig, RowsBackwardConfig, RowsForwardConfig
from fusednorm.backends.triton.kernels import rows
from fusednorm.backends.triton.launch import prepared
from fusednorm.backends.triton.plans.base import (
    BackwardPlan,
    Given,
    OneLaunchForward,
    Saved,
    Tensors,
    stages,
)
from fusednorm.backends.triton.plans.tiles import Combination, ParameterSums, PartialsShape
from fusednorm.backends.triton.runs import alignment, power_of_two, row_window
from fusednorm.problem import Problem, View


class RowsForward(OneLaunchForward):
    """A row, or a channel of a sample, to a program."""

    def __init__(self, problem: Problem, config: RowsForwardConfig) -> None:
        assert problem.output_layout is not None
        view, size = problem.view, problem.reduced
        row = view.spatial == 1
        steps = [layout.sample if row else layout.channel for layout in (problem.layout, problem.output_layout)]
        tile = {
            "K": size if row else None,
            "EVEN": size % config.elements == 0,
            "ALIGN": alignment(problem.dtype, size, *steps),
            "BLOCK_K": config.elements,
        }
        programs = problem.num_statistics
        scalars = (view.channels, 1 if row else size, *steps)
        super().__init__(problem, rows.rows_forward, programs, scalars, tile, config.warps)

    def run(self, x: Tensor, y: Tensor, parameters: Tensors, given: Given, saved: Saved) -> None:
        self.launch(x, y, *parameters, *saved)


class SummedRowsBackward(BackwardPlan):
    """The rows in so many shares: each share's kernel leaves its sums of p and q, which a last launch adds up. The sums
    of an only share are the gradients."""

    def __init__(self, problem: Problem, shares: int) -> None:
        super().__init__(problem)
        # The sums of a share lie where the partials of a sample of one chunk would.
        partials = PartialsShape(View(shares, 1, problem.view.channels, 1), 1, 0, last=True, per_batch=False)
        self.total = partials.total
        self.combine: Combination | None = None
        if shares > 1:
            self.combine = Combination(self, partials, 0, 1, ParameterSums(partials, True, False))

    def run(self, data: Tensors, dx: Tensor | None, saved: Tensors, parameters: Tensors, grads: Tensors) -> None:
        operands = (*parameters[:2], *saved)
        if self.combine is None or (grads[0] is None and grads[1] is None):
            self.gradients(data, dx, operands, (None, *grads[:2]))
        else:
            partials = self.workspace(2 * self.total)
            self.gradients(data, dx, operands, (partials, None, None))
            self.combine(partials, parameters, None, grads)

    def gradients(self, data: Tensors, dx: Tensor | None, operands: Tensors, sums: Tensors) -> None:
        """Compute grad_input and the sums of p and q. ``operands`` are weight, bias, mean and rstd, and ``sums`` the
        partials of the shares, or None and the gradients of weight and bias."""
        raise NotImplementedError


class RowsBackward(SummedRowsBackward):
    """Each program takes a share, of whole rows."""

    def __init__(self, problem: Problem, config: RowsBackwardConfig) -> None:
        view, grad, output = problem.view, problem.grad_layout, problem.output_layout
        assert grad is not None and output is not None
        steps = max(1, -(-view.samples // (config.rows * config.programs)))
        programs = -(-view.samples // (config.rows * steps))
        window = 1 if config.reload or config.rows > 1 else row_window(problem)
        if window > 1 and steps > 1:  # the rows of a step lie in their windows as those of the next
            programs = -(-programs // window) * window
        super().__init__(problem, programs)
        samples = grad.sample, problem.layout.sample, output.sample
        self.backward = prepared(
            rows.rows_backward,
            programs,
            (view.samples, *samples, steps, self.activation_parameter),
            {
                **self.overlap, "DERIVATIVE": self.derivative, **self.alpha,
                "BIAS": problem.bias_dtype is not None, "K": view.channels,
                "ALIGN": alignment(problem.dtype, view.channels, *samples), "WINDOW": window, "BLOCK_U": config.rows,
                "BLOCK_K": power_of_two(view.channels + window - 1), "STAGES": stages(config.stages),
                "RELOAD": config.reload,
            },
            config.warps,
        )  # fmt: skip

    def gradients(self, data: Tensors, dx: Tensor | None, operands: Tensors, sums: Tensors) -> None:
        self.backward(*data, dx, *operands, *sums)


class LongRowsBackward(SummedRowsBackward):
    """Rows of any length, in two reads: the totals of each row, by chunks where rows are few, then blocks of columns of
    a share's rows."""

    def __init__(self, problem: Problem, config: ColumnsBackwardConfig) -> None:
        grad, output, self.rows = problem.grad_layout, problem.output_layout, problem.view.samples
        assert grad is not None and output is not None
        size = problem.view.channels
        blocks = -(-size // config.elements)
        steps = max(1, min(self.rows, config.steps))
        shares = -(-self.rows // steps)
        super().__init__(problem, shares)
        self.chunks = min(-(-size // config.row_elements), max(1, -(-config.row_programs // max(1, self.rows))))
        samples = grad.sample, problem.layout.sample, output.sample
        common = {**self.overlap, "DERIVATIVE": self.derivative, **self.alpha}
        row = {"K": size, "ALIGN": alignment(problem.dtype, size, *samples)}
        self.totals = prepared(
            rows.row_totals,
            self.rows * self.chunks,
            (grad.sample, problem.layout.sample, self.chunks, self.activation_parameter),
            {**common, **row, "BLOCK_K": config.row_elements},
            config.row_warps,
        )
        self.columns = prepared(
            rows.columns_backward,
            blocks * shares,
            (self.rows, *samples, steps, self.chunks, self.activation_parameter),
            {
                **common, "BIAS": problem.bias_dtype is not None, **row, "BLOCK_K": config.elements,
                "BLOCK_J": power_of_two(self.chunks), "STAGES": stages(config.stages),
            },
            config.warps,
            follows=self.wants_input,
        )  # fmt: skip

    def gradients(self, data: Tensors, dx: Tensor | None, operands: Tensors, sums: Tensors) -> None:
        totals = None
        if dx is not None:
            totals = self.workspace(2 * self.rows * self.chunks)
            self.totals(*data, *operands, totals)
        self.columns(*data, dx, *operands, totals, *sums)
