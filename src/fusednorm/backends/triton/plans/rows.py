"""Plans around kernels/rows.py: units of one group and one position, or positions with statistics of their own."""

from __future__ import annotations

from torch import Tensor

from fusednorm.backends.triton.config.kinds import ColumnsBackwardConfig, RowsBackwardConfig, StepsConfig
from fusednorm.backends.triton.kernels import plane_rows
from fusednorm.backends.triton.kernels import rows as kernels
from fusednorm.backends.triton.kernels import sums as sum_kernels
from fusednorm.backends.triton.launch import prepared
from fusednorm.backends.triton.plans.base import (
    BackwardPlan,
    Given,
    OneLaunchForward,
    Saved,
    Tensors,
    codes_of,
    stages,
    starts_early,
)
from fusednorm.backends.triton.plans.held import SummedUnitsBackward
from fusednorm.backends.triton.plans.sums import SumBackward
from fusednorm.backends.triton.plans.tiles import Combination, ParameterSums, PartialsShape
from fusednorm.backends.triton.runs import alignment, power_of_two, row_window
from fusednorm.problem import Gate, Layout, Problem, View


def steps_of(layout: Layout, positions: int) -> tuple[int, int]:
    """The strides of samples and of rows in them, 1 where a row is a sample: an argument of 1 is none."""
    return layout.sample, layout.spatial if positions > 1 else 1


class RowsForward(OneLaunchForward):
    """A row, or a channel of a sample, to a program."""

    def __init__(self, problem: Problem, config: StepsConfig) -> None:
        assert problem.output_layout is not None
        view, size, layouts = problem.view, problem.reduced, (problem.layout, problem.output_layout)
        row = view.spatial == 1 or problem.norm.per_position
        positions = max(1, view.spatial) if problem.norm.per_position else 1
        steps = [step for layout in layouts for step in (steps_of(layout, positions) if row else (layout.channel, 1))]
        tile = {
            "K": size if row else None,
            "EVEN": size % config.elements == 0,
            "ALIGN": alignment(problem.dtype, size, *(steps if positions > 1 else steps[::2])),
            "BLOCK_K": config.elements,
            **codes_of(problem),
        }
        programs = problem.num_statistics
        scalars = (view.channels, 1 if row else size, positions, *steps)
        super().__init__(problem, kernels.rows_forward, programs, scalars, tile, config.warps)

    def run(self, x: Tensor, y: Tensor, parameters: Tensors, given: Given, saved: Saved) -> None:
        self.launch(x, y, *parameters, *saved, None)


class PlaneRowsBackward(SummedUnitsBackward):
    """A channel of a sample to a program."""

    def __init__(self, problem: Problem, config: StepsConfig) -> None:
        view, size = problem.view, problem.reduced
        super().__init__(problem, view.samples == 1)
        assert problem.grad_layout is not None and problem.output_layout is not None
        steps = tuple(layout.channel for layout in (problem.grad_layout, problem.layout, problem.output_layout))
        self.backward = prepared(
            plane_rows.plane_rows_backward,
            problem.num_statistics,
            (view.channels, size, *steps, self.partials.total, self.activation_parameter),
            {
                **self.overlap, "DERIVATIVE": self.derivative, **self.alpha, "EVEN": size % config.elements == 0,
                "ALIGN": alignment(problem.dtype, size, *steps), "BLOCK_K": config.elements,
            },
            config.warps,
        )  # fmt: skip


class SummedRowsBackward(BackwardPlan):
    """The rows in so many shares: each share's kernel leaves its sums of p and q, which a last launch adds up. The sums
    of an only share are the gradients. With a scale or shift, each sample has so many shares."""

    def __init__(self, problem: Problem, shares: int) -> None:
        super().__init__(problem)
        self.modulated = problem.modulated
        # The sums of a share lie where the partials of a chunk would.
        samples, chunks = (problem.view.samples, shares) if self.modulated else (shares, 1)
        view = View(samples, 1, problem.view.channels, 1)
        partials = PartialsShape(view, chunks, 0, last=True, per_batch=False)
        self.total = partials.total
        self.combine: Combination | None = None
        if shares > 1 or self.modulated:
            self.combine = Combination(self, partials, 0, 1, ParameterSums(partials, True, self.modulated))

    @property
    def sums_first(self) -> bool:
        """Whether p is summed beside q, for the gradients of bias, scale or shift."""
        return self.modulated or self.gradients_of[1] is not None

    def run(self, data: Tensors, dx: Tensor | None, saved: Tensors, parameters: Tensors, grads: Tensors) -> None:
        operands = (*parameters, *saved)
        if self.combine is None or all(grad is None for grad in grads):
            self.gradients(data, dx, operands, (None, *grads[:2]))
        else:
            partials = self.workspace(2 * self.total)
            self.gradients(data, dx, operands, (partials, None, None))
            self.combine(partials, parameters, None, grads)

    def gradients(self, data: Tensors, dx: Tensor | None, operands: Tensors, sums: Tensors) -> None:
        """Compute grad_input and the sums of p and q. ``operands`` are weight, bias, scale, shift, mean and rstd, and
        ``sums`` the partials of the shares, or None and the gradients of weight and bias."""
        raise NotImplementedError


class Rows:
    """The rows of a backward: how many there are, and those that shares are of; ``positions`` rows make a sample, which
    is 1 where each row is one. ``summed`` rows have the same weight and bias, or scale and shift: a sample's or all.
    ``steps`` are the strides of samples and of rows of grad_output, input and output, ``behind`` those of post_add,
    where sums are around the norm, and of pre_add, where that has a gate."""

    def __init__(self, problem: Problem) -> None:
        grad, output, view = problem.grad_layout, problem.output_layout, problem.view
        assert grad is not None and output is not None
        self.positions = max(1, view.spatial) if problem.norm.per_position else 1
        self.samples, self.count = view.samples, view.samples * self.positions
        self.summed = self.positions if problem.modulated else self.count
        self.gate: Gate | None = None
        if problem.gated_backward:
            assert problem.added is not None
            self.gate = problem.added.gate
        self.shared = self.summed if self.gate is None else min(self.summed, self.gate.rows)
        #: Whether there are shares of each so many rows, and not of all.
        self.each = problem.modulated or self.shared < self.count
        layouts = grad, problem.layout, output
        self.steps = tuple(step for layout in layouts for step in steps_of(layout, self.positions))
        self.behind: tuple[int, ...] = ()
        if problem.added is not None:
            self.behind = steps_of(problem.added.post_layout or problem.layout, self.positions)
            if self.gate is not None:
                self.behind += steps_of(problem.added.pre_layout or problem.layout, self.positions)
        every = self.steps + self.behind
        steps = every if self.positions > 1 else every[::2]
        self.alignment = alignment(problem.dtype, view.channels, *steps)


class RowsBackward(SummedRowsBackward):
    """Each program takes a share, of whole rows."""

    kernel = kernels.rows_backward

    def __init__(self, problem: Problem, config: RowsBackwardConfig) -> None:
        view, rows = problem.view, Rows(problem)
        together = min(config.rows, power_of_two(rows.shared)) if rows.each else config.rows
        most = max(1, config.programs * rows.shared // max(1, rows.count))
        apart = rows.behind not in ((), rows.steps[2:4])
        whole = config.reload or together > 1 or problem.norm.per_position or apart
        window = 1 if whole else row_window(problem)
        if rows.shared > most:  # the rows of a step lie in their windows as those of the next
            most = max(window, most // window * window)
        steps = max(1, -(-rows.shared // (together * most)))
        shares = -(-rows.shared // (together * steps))
        if steps > 1:
            shares = -(-shares // window) * window
        super().__init__(problem, shares * (rows.summed // max(1, rows.shared)))
        self.rows, self.shares = rows, shares
        span: tuple[int, ...] = ()
        gate: tuple[int, ...] = ()
        product: dict[str, bool] = {}
        if rows.gate is not None:
            span, gate = (rows.shared,), (rows.gate.rows, rows.gate.step)
            product = {"EACH": rows.each, "PER_ELEMENT": rows.gate.per_element}
        self.backward = prepared(
            self.kernel,
            shares * (rows.count // max(1, rows.shared) if rows.each else 1),
            (
                rows.count, rows.positions, *span, shares if rows.each else 1, *rows.steps, *rows.behind, *gate, steps,
                self.activation_parameter,
            ),
            {
                **self.overlap, "DERIVATIVE": self.derivative, **self.alpha, "BIAS": self.sums_first,
                "K": view.channels, "ALIGN": rows.alignment, "WINDOW": window, "BLOCK_U": together,
                "BLOCK_K": power_of_two(view.channels + window - 1), "STAGES": stages(config.stages),
                "RELOAD": config.reload, **product,
            },
            config.warps,
            early=starts_early(problem, steps),
        )  # fmt: skip

    def gradients(self, data: Tensors, dx: Tensor | None, operands: Tensors, sums: Tensors) -> None:
        self.backward(*data, dx, *operands, *sums)


class RowsSumBackward(SumBackward, RowsBackward):
    """Each program takes a share, with sums around the norm."""

    kernel = sum_kernels.rows_sum_backward

    def gradients(self, data: Tensors, dx: Tensor | None, operands: Tensors, sums: Tensors) -> None:
        grad_output, input, *around = data
        self.backward(grad_output, input, dx, *operands, *around, *sums)


class RowsGatedBackward(RowsSumBackward):
    """Each program takes a share, with sums around the norm, of which the one before it is of a product. The shares of
    the rows of a gate leave sums for its gradient, which a last launch adds up, and an only share leaves the gradient.
    """

    kernel = sum_kernels.rows_gated_backward

    def __init__(self, problem: Problem, config: RowsBackwardConfig) -> None:
        super().__init__(problem, config)
        rows, gate = self.rows, self.rows.gate
        assert gate is not None
        shares = self.shares * (gate.rows // max(1, rows.shared))
        view = View(rows.count // max(1, gate.rows), 1, problem.view.channels if gate.per_element else 1, 1)
        partials = PartialsShape(view, shares, 0, last=True, per_batch=False)
        self.gate_sums = partials.total
        self.of_gate: Combination | None = None
        if shares > 1:
            self.of_gate = Combination(self, partials, 0, 1, ParameterSums(partials, False, True))

    def gradients(self, data: Tensors, dx: Tensor | None, operands: Tensors, sums: Tensors) -> None:
        *around, grad_gate = data
        if grad_gate is None or self.of_gate is None:
            super().gradients(data, dx, operands, sums)
        else:
            partials = self.workspace(self.gate_sums)
            super().gradients((*around, partials), dx, operands, sums)
            self.of_gate(partials, (None,) * 4, None, (None, None, None, grad_gate))


class LongRowsBackward(SummedRowsBackward):
    """Rows of any length, in two reads: the totals of each row, by chunks where rows are few, then blocks of columns of
    a share's rows."""

    def __init__(self, problem: Problem, config: ColumnsBackwardConfig) -> None:
        rows, size = Rows(problem), problem.view.channels
        self.rows = rows.count
        blocks = -(-size // config.elements)
        steps = max(1, min(rows.shared, config.steps))
        shares = -(-rows.shared // steps)
        super().__init__(problem, shares)
        self.chunks = min(-(-size // config.row_elements), max(1, -(-config.row_programs // max(1, self.rows))))
        common = {**self.overlap, "DERIVATIVE": self.derivative, **self.alpha}
        row = {"K": size, "ALIGN": rows.alignment}
        self.totals = prepared(
            kernels.row_totals,
            self.rows * self.chunks,
            (rows.positions, *rows.steps[:4], self.chunks, self.activation_parameter),
            {**common, **row, "BLOCK_K": config.row_elements},
            config.row_warps,
        )
        self.columns = prepared(
            kernels.columns_backward,
            blocks * shares * (rows.samples if problem.modulated else 1),
            (
                self.rows, rows.positions, shares if problem.modulated else 1, *rows.steps, steps, self.chunks,
                self.activation_parameter,
            ),
            {
                **common, "BIAS": self.sums_first, **row, "BLOCK_K": config.elements,
                "BLOCK_J": power_of_two(self.chunks), "STAGES": stages(config.stages),
            },
            config.warps,
        )  # fmt: skip

    def gradients(self, data: Tensors, dx: Tensor | None, operands: Tensors, sums: Tensors) -> None:
        totals = None
        if dx is not None:
            totals = self.workspace(2 * self.rows * self.chunks)
            self.totals(*data, *operands, totals)
        self.columns(*data, dx, *operands, totals, *sums)
