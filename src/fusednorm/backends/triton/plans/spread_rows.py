"""Plans around kernels/spread_rows.py: norms of rows whose elements are spread over processes.

The current device is that of the tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusednorm.backends.triton.config.spread import spread_rows_for, spread_rows_programs
from fusednorm.backends.triton.kernels import ranks
from fusednorm.backends.triton.kernels import spread_rows as kernels
from fusednorm.backends.triton.launch import prepared
from fusednorm.backends.triton.plans.base import Plan, Tensors
from fusednorm.backends.triton.plans.rows import SummedRowsBackward
from fusednorm.backends.triton.plans.spread import MERGED_NUMBERS, MERGING_WARPS, parameters_of
from fusednorm.backends.triton.plans.tiles import PartialsShape
from fusednorm.backends.triton.runs import alignment, power_of_two
from fusednorm.operands import BackwardOperands, Gradients, Operands, Wanted
from fusednorm.problem import Layout, Problem, View


class _SpreadRows:
    """The rows of a problem as positions of samples, and the tiles of a pass over them.

    Rows of which each is a sample are the positions of one sample. ``chunks`` of a row leave partials, each of so many
    ``steps``; ``shares`` of a sample's rows leave sums, each of so many ``share_steps``.
    """

    def __init__(self, problem: Problem) -> None:
        view, output = problem.view, problem.output_layout
        assert output is not None
        self.apart = problem.norm.per_position
        self.samples, self.positions = (view.samples, view.spatial) if self.apart else (1, view.samples)
        self.count, self.elements = self.samples * self.positions, view.channels
        self.last = problem.layout.order == "channels_last"
        self.input, self.output = self.steps_of(problem.layout), self.steps_of(output)
        self.grad = self.input if problem.grad_layout is None else self.steps_of(problem.grad_layout)
        config = spread_rows_for(problem, self.positions, self.last)
        blocks, columns = -(-self.positions // config.rows), -(-self.elements // config.elements)
        self.blocks, self.columns, programs = max(1, blocks), max(1, columns), spread_rows_programs()
        tiles = self.samples * self.blocks
        self.steps = -(-self.columns // min(self.columns, max(1, programs // max(1, tiles))))
        self.chunks = -(-self.columns // self.steps)
        self.share_steps = -(-self.blocks // min(self.blocks, max(1, programs // max(1, self.columns * self.samples))))
        self.shares = -(-self.blocks // self.share_steps)
        self.tiles, self.span = tiles, self.steps * config.elements
        steps = [each for one in (self.input, self.output, self.grad) for each in one]
        neighbours = self.elements if self.last else self.positions
        apart = [each for place, each in enumerate(steps) if place % 3 != (2 if self.last else 1)]
        self.tile = {
            "K": self.elements,
            "LAST": self.last,
            "ALIGN": alignment(problem.dtype, neighbours, *apart),
            "BLOCK_S": config.rows,
            "BLOCK_K": config.elements,
        }
        self.warps = config.warps

    def steps_of(self, layout: Layout) -> tuple[int, int, int]:
        """The strides of samples, of rows and of a row's elements."""
        return (layout.sample, layout.spatial, layout.channel) if self.apart else (0, layout.sample, layout.channel)


class SpreadRowsForward(Plan):
    """A :class:`~fusednorm.instance.SpreadForwardPlan`."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.rows = rows = _SpreadRows(problem)
        self.total = rows.count * rows.chunks
        self.moments = prepared(
            kernels.row_moments,
            rows.tiles * rows.chunks,
            (rows.positions, *rows.input, rows.blocks, rows.chunks, rows.steps, self.total),
            {**self.overlap, "RMS": self.rms, **rows.tile},
            rows.warps,
        )
        partials = PartialsShape(View(rows.count, 1, 1, 1), rows.chunks, rows.count, last=False, per_batch=False)
        self.pack = prepared(
            ranks.pack_moments,
            partials.programs,
            (1, 1, 1, rows.count, self.total, rows.elements, rows.chunks, rows.chunks, rows.span),
            {
                **self.overlap, "RMS": self.rms, **partials.order, "REPEAT": 1, "ACROSS": False,
                "BLOCK_U": partials.together, **partials.block,
            },
            partials.warps,
        )  # fmt: skip
        self.results = prepared(
            kernels.row_results,
            rows.tiles * rows.columns,
            (rows.positions, *rows.input, *rows.output, rows.blocks, self.activation_parameter),
            {**self.overlap, "VALUE": self.value, **self.alpha, **rows.tile},
            rows.warps,
        )

    def local_moments(self, input: Tensor) -> Tensor:
        packed = self.allocate((2 * self.rows.count + 1,), (1,), torch.float64)
        if self.empty:
            return packed.zero_()
        partials = self.workspace(2 * self.total)
        self.moments(input, partials)
        self.pack(partials, packed)
        return packed

    def output(self, operands: Operands, mean: Tensor | None, rstd: Tensor) -> Tensor:
        output = self.allocate(self.shape, self.strides, self.dtype)
        if not self.empty:
            self.results(operands.input, output, *parameters_of(operands), mean, rstd)
        return output


class SpreadRowsBackward(SummedRowsBackward):
    """A :class:`~fusednorm.instance.SpreadBackwardPlan`. The parameters' gradients come from the pass for the input's:
    a pass of their own would read x and dy once more."""

    def __init__(self, problem: Problem) -> None:
        rows = _SpreadRows(problem)
        super().__init__(problem, rows.shares * (1 if problem.modulated else rows.samples))
        self.rows, self.copies = rows, "grad_output" in problem.copies
        self.chunk_total = rows.count * rows.chunks
        common = {**self.overlap, "DERIVATIVE": self.derivative, **self.alpha}
        self.sums = prepared(
            kernels.row_sums,
            rows.tiles * rows.chunks,
            (
                rows.positions, *rows.grad, *rows.input, rows.blocks, rows.chunks, rows.steps, self.chunk_total,
                self.activation_parameter,
            ),
            {**common, **rows.tile},
            rows.warps,
        )  # fmt: skip
        block = min(power_of_two(rows.count), MERGED_NUMBERS)
        self.pack = prepared(
            ranks.pack_sums,
            -(-rows.count // block),
            (rows.count, rows.chunks, self.chunk_total),
            {**self.overlap, "BLOCK": block},
            MERGING_WARPS,
        )
        self.last_pass = prepared(
            kernels.row_gradients,
            rows.columns * rows.samples * rows.shares,
            (
                rows.positions, *rows.grad, *rows.input, *rows.output, rows.shares, rows.share_steps,
                self.activation_parameter,
            ),
            {**common, "BIAS": self.sums_first, **rows.tile},
            rows.warps,
        )  # fmt: skip

    def gradient(self, grad_output: Tensor) -> Tensor:
        return self.allocate(self.shape, self.strides, self.dtype).copy_(grad_output) if self.copies else grad_output

    def local_sums(self, operands: BackwardOperands) -> Tensor:
        o, partials = operands, self.workspace(2 * self.chunk_total)
        if not self.empty:
            self.sums(o.grad_output, o.input, *parameters_of(o), o.mean, o.rstd, partials)
        return partials

    def own_sums(self, operands: BackwardOperands, sums: Tensor, wanted: Wanted) -> tuple[Tensor, Gradients]:
        totals = self.allocate((2 * self.rows.count,), (1,), torch.float64)
        if self.empty:
            return totals.zero_(), Gradients()
        self.pack(sums, totals)
        return totals, Gradients()

    def finish(self, operands: BackwardOperands, totals: Tensor | None, found: Gradients, wanted: Wanted) -> None:
        o, dx = operands, None if totals is None else self.allocate(self.shape, self.strides, self.dtype)
        grads = [
            self.allocate(*like) if like is not None and want else None
            for like, want in zip(self.gradients_of, wanted[1:], strict=True)
        ]
        if not self.empty:
            self.run((o.grad_output, o.input, totals), dx, (o.mean, o.rstd), parameters_of(o), grads)
        else:
            for grad in grads:
                if grad is not None:
                    grad.zero_()
        found.input, found.weight, found.bias, found.scale, found.shift = dx, *grads

    def gradients(self, data: Tensors, dx: Tensor | None, operands: Tensors, sums: Tensors) -> None:
        if dx is not None or any(each is not None for each in sums):
            self.last_pass(*data, dx, *operands, *sums)
