"""Plans around kernels/tiles.py: both memory orders, any size.

A plan allocates for its problem, and its kernels work on the problem as tiles see it (:func:`config.tiled`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from fusednorm.backends.triton.config.kinds import PassConfig, TilesConfig
from fusednorm.backends.triton.config.tiles import merged
from fusednorm.backends.triton.kernels import sums as sum_kernels
from fusednorm.backends.triton.kernels import tiles as forward_kernels
from fusednorm.backends.triton.kernels import tiles_backward as backward_kernels
from fusednorm.backends.triton.kernels.activations import one
from fusednorm.backends.triton.launch import Launch, Scalars, prepared
from fusednorm.backends.triton.plans.base import BackwardPlan, ForwardPlan, Given, Saved, Tensors, stages
from fusednorm.backends.triton.plans.sums import SumBackward, SumForward, added_of
from fusednorm.backends.triton.runs import (
    divisor,
    for_moments,
    power_of_two,
    runs_of,
    stores_dz,
    stores_sum_first,
    window_of,
)
from fusednorm.problem import Layout, Problem, View

#: The partials that one step of a merge takes, in a launch that only merges 8 by each thread, and the programs between
#: which such a launch shares many units. Where neighbouring units' partials are neighbours in memory, a program takes
#: MERGE_RUN of them: 49152 units of channels_last took 63 us with a unit to a program.
MERGE_BLOCK, MERGE_PROGRAMS, MERGE_RUN = 4096, 264, 8
#: Partials of a channel that one program sums for the parameters' gradients, at most; of more, programs sum shares of
#: FOLDED first. (65536, 12) in 3 groups took 242 us in two programs.
MOST_SUMMED, FOLDED = 2048, 512
#: Elements of a program that makes the gradients of a sample's scale and shift, where chunks leave that many.
MODULATED = 1024
#: Elements of a program that makes the gradients of numbers before the norm, and the partials of one that it takes at a
#: time at most.
NUMBERED, NUMBERED_CHUNKS = 1024, 512
#: Programs that the parameters' gradients take about at most.
SUM_PROGRAMS = 1024
#: Rows of channels_last that a thread sums in one step, at most: loads that are in flight together.
MOST_DEPTH = 8
#: An argument, and constants, that a kernel does not use: the same for all problems, so that they share the kernel.
UNUSED, NO_BLOCK = (1,), {"BLOCK_R": 1, "BLOCK_D": 1}
#: The kernel that makes a forward's moments: by rows of channels or by planes, with sums before the norm or without.
MOMENTS = {
    (False, False): forward_kernels.moments_of_planes,
    (False, True): sum_kernels.sum_moments_of_planes,
    (True, False): forward_kernels.moments_of_rows,
    (True, True): sum_kernels.sum_moments_of_rows,
}


def _sizes(view: View) -> tuple[int, int, int, int]:
    return view.groups, view.group_channels, view.channels, view.spatial


def _depth(config: PassConfig, vector: int) -> int:
    """How many rows of channels a thread has in a step, where a load has so many elements of a row."""
    together = max(1, 32 * config.warps * vector // config.channels)
    return max(1, min(MOST_DEPTH, config.positions // together))


class Pass:
    """One pass over a view: its programs, and the integers and constants by which they find their tiles.

    ``layouts`` are those of the tensors that it reads and writes. A pass that only ``reads`` channels_last takes DEPTH
    times BLOCK_S rows in a step.
    """

    def __init__(
        self,
        problem: Problem,
        view: View,
        config: PassConfig,
        layouts: Sequence[Layout],
        *,
        across: bool = True,
        reads: bool = False,
    ) -> None:
        self.last = problem.layout.order == "channels_last"
        runs = runs_of(problem, view, layouts, across=across, lanes=config.channels if config.long else 0)
        self.repeat, seen = runs.repeat, runs.view
        window = window_of(problem.dtype, seen, runs.layouts)
        self.span = config.positions * config.tiles - window + 1
        blocks, self.chunks = -(-seen.channels // config.channels), -(-seen.spatial // self.span)
        self.programs = view.samples * blocks * self.chunks
        self.grid = *divisor(blocks), *divisor(self.chunks)
        folds = config.long and self.repeat > 1
        #: The partials that the pass leaves for each channel of a sample, where it leaves any.
        self.partials = self.chunks if folds else self.chunks * self.repeat
        self.fold = {"FOLD": folds}
        self.warps = config.warps
        depth = _depth(config, runs.alignment) if reads and self.last else 1
        self.tile = {
            "EVEN": window == self.repeat == 1 and view.spatial % self.span == 0,
            "ALIGN": runs.alignment,
            "BLOCK_C": config.channels,
            "BLOCK_S": config.positions // depth,
        }
        self.depth = {"DEPTH": depth}
        self.window = {"WINDOW": window}
        self.tiles = config.tiles
        self.staged = {"STAGES": stages(config.stages)}
        self.repeats = {"REPEAT": self.repeat, "ACROSS": runs.across}
        #: The strides of each tensor from sample to sample, from channel to channel, and from row to row.
        self.steps = tuple(step for layout in runs.layouts for step in (layout.sample, layout.channel, layout.spatial))
        self.order = {"PER_BATCH": problem.norm.per_batch, "LAST": self.last}


def behind_layout(problem: Problem) -> tuple[Layout, ...]:
    """The layout of post_add where sums are around the norm, the input's where there is none."""
    return () if problem.added is None else (problem.added.post_layout or problem.layout,)


def adds_before(problem: Problem) -> bool:
    return problem.added is not None and problem.added.before


def read_layouts(problem: Problem) -> tuple[Layout, ...]:
    """Of what a forward's pass for the moments takes: the input, and where sums are before the norm pre_add and s, or
    the input's for what is not there."""
    input, added = problem.layout, problem.added
    if added is None or not adds_before(problem):
        return (input,)
    return input, added.pre_layout or input, problem.output_layout or input


def written_layouts(problem: Problem) -> tuple[Layout, ...]:
    """Of what a forward's pass for the output takes: the input, or s that the pass for the moments has stored, the
    output, and where sums are around the norm pre_add and post_add, or the input's for what is not there."""
    input, output, added = problem.layout, problem.output_layout, problem.added
    assert output is not None
    if added is None:
        return input, output
    if stores_sum_first(problem):
        return output, output, output, added.post_layout or output
    return input, output, added.pre_layout or input, added.post_layout or input


def summed_layouts(problem: Problem) -> tuple[Layout, ...]:
    """Of what a backward's pass for p and q takes: grad_output, the input, and where sums are around the norm dz, or
    the input's for a dz that it does not store, and post_add."""
    grad, input = problem.grad_layout, problem.layout
    assert grad is not None and problem.output_layout is not None
    if problem.added is None:
        return grad, input
    return grad, input, problem.output_layout if stores_dz(problem) else input, *behind_layout(problem)


def gradient_layouts(problem: Problem) -> tuple[Layout, ...]:
    """Of what a backward's pass for grad_input takes: grad_output, the input, grad_input, and where sums are around the
    norm post_add; or dz in place of grad_output, and the input's for post_add."""
    grad, input, output = problem.grad_layout, problem.layout, problem.output_layout
    assert grad is not None and output is not None
    if stores_dz(problem):
        return output, input, output, input
    return grad, input, output, *behind_layout(problem)


def shares_parameters(made_for: Problem, problem: Problem) -> bool:
    """Whether the channels of a group share its weight and bias: batch_norm's positions, seen as channels."""
    return made_for.norm.per_batch and not problem.norm.per_batch


class PartialsShape:
    """The shape of the partials that a pass leaves: two planes of one number for each sample, channel and chunk.

    A unit has ``count`` of them, in ``rows`` of its channels, and a merge takes them by ``block``. A launch that only
    merges takes ``together`` units to a program.
    """

    def __init__(self, view: View, chunks: int, units: int, *, last: bool, per_batch: bool) -> None:
        self.view, self.chunks = view, chunks
        #: Of each channel.
        self.summed = view.samples * chunks
        self.order = {"PER_BATCH": per_batch, "LAST": last}
        self.total = view.samples * view.channels * chunks
        self.rows = chunks * (view.samples if per_batch else 1)
        self.count = self.rows * view.group_channels
        columns = min(power_of_two(view.group_channels), MERGE_BLOCK)
        rows = min(power_of_two(self.rows), MERGE_BLOCK // columns)
        share = power_of_two(-(-units // MERGE_PROGRAMS))
        if last and share > 1:
            share = max(share, MERGE_RUN // columns)
            if rows == MERGE_BLOCK:  # rows of one unit, 4 bytes of each, would be read from memory by 32
                rows //= MERGE_RUN
        self.block = {"BLOCK_R": rows, "BLOCK_D": columns}
        self.together = min(share, power_of_two(units), MERGE_BLOCK // (rows * columns))
        self.programs = -(-units // self.together)
        self.warps = max(1, rows * columns * self.together // (32 * 8))


class TilesForward(ForwardPlan):
    """Statistics of all chunks, their merge, the output of all chunks."""

    #: Whether the pass for the output may merge partials itself.
    may_merge = True

    def __init__(self, made_for: Problem, problem: Problem, config: TilesConfig) -> None:
        super().__init__(made_for)
        source = for_moments(problem)
        view, seen = problem.view, source.view
        reduction = Pass(source, seen, config.reduction, read_layouts(source), reads=True)
        output = self.writing(problem, config.output)
        rows, before = reduction.last, adds_before(problem)
        self.partials = partials = PartialsShape(
            seen, reduction.partials, problem.num_statistics, last=rows, per_batch=problem.norm.per_batch
        )
        self.given = problem.direction == "inference"
        within = view.groups == 1 or view.group_channels % config.output.channels == 0
        within = within and reduction.repeat == output.repeat == 1
        self.merges = self.may_merge and not self.given and within and partials.count <= merged(problem)
        self.keeps_statistics = not (self.merges or self.given)
        numbers = (partials.total, seen.spatial, partials.rows, partials.chunks, reduction.span)
        extra = {**reduction.repeats, **reduction.depth, **reduction.staged} if rows else reduction.window
        if before:
            extra["EXACT"] = added_of(problem).exact
        self.moments = prepared(
            MOMENTS[rows, before],
            reduction.programs,
            (
                seen.channels, seen.spatial, *reduction.steps, *reduction.grid,
                partials.total, *((reduction.tiles,) if rows else ()),
            ),
            {**self.overlap, "RMS": self.rms, **reduction.tile, **extra},
            reduction.warps,
        )  # fmt: skip
        self.finalize = self.merging(
            (*_sizes(seen)[:3], problem.num_statistics, *numbers),
            {
                **self.overlap, "RMS": self.rms, **partials.order, **reduction.repeats,
                "BLOCK_U": partials.together, **partials.block,
            },
        )  # fmt: skip
        shared, grouped = shares_parameters(made_for, problem), self.merges and seen.channels != view.channels
        self.apply = self.applying(problem, output, {"SHARED": shared, "GROUPED": grouped}, numbers)

    def writing(self, problem: Problem, config: PassConfig) -> Pass:
        """The pass that writes the output."""
        return Pass(problem, problem.view, config, written_layouts(problem))

    def applying(self, problem: Problem, output: Pass, units: dict[str, Any], numbers: tuple[int, ...]) -> Launch:
        """The launch of that pass: how channels belong to units, and the ``numbers`` by which it finds partials."""
        stored = {}
        if problem.added is not None:
            stored = {"STORED": stores_sum_first(problem), "EXACT": problem.added.exact}
        return prepared(
            forward_kernels.apply if problem.added is None else sum_kernels.sum_apply,
            output.programs,
            (
                *_sizes(problem.view), *output.steps,
                *output.grid, output.programs,
                *(numbers if self.merges else UNUSED * len(numbers)), self.eps, self.activation_parameter,
            ),
            {
                **self.overlap, "RMS": self.rms, "VALUE": self.value, **self.alpha, "MERGE": self.merges, **units,
                **output.order, **output.tile, **output.window, **output.repeats, "TILES": output.tiles,
                **(self.partials.block if self.merges else NO_BLOCK), **stored,
            },
            output.warps,
        )  # fmt: skip

    def merging(self, scalars: Scalars, constants: dict[str, Any]) -> Launch:
        """The launch that merges the partials of units."""
        partials, scalars = self.partials, (*scalars, self.eps)
        return prepared(forward_kernels.finalize, partials.programs, scalars, constants, partials.warps)

    def run(self, x: Tensor, y: Tensor, parameters: Tensors, given: Given, saved: Saved) -> None:
        self.apply(x, y, *parameters, *saved, self.statistics(saved, x), *given)

    def statistics(self, saved: Saved, x: Tensor, *before: Tensor | None) -> Tensor | None:
        """Make the statistics, in ``saved`` or as the partials that the pass for the output merges."""
        if self.given:
            return None
        partials = self.workspace(2 * self.partials.total)
        self.moments(x, partials, *before)
        if self.merges:
            return partials
        self.finalize(partials, *saved)
        return None


class TilesSumForward(TilesForward, SumForward):
    """Statistics of all chunks, their merge, and the output of all chunks, with sums around the norm."""

    def __init__(self, made_for: Problem, problem: Problem, config: TilesConfig) -> None:
        super().__init__(made_for, problem, config)
        self.adds_before, self.reads_sum = adds_before(problem), stores_sum_first(problem)

    def add(self, x: Tensor, y: Tensor, parameters: Tensors, given: Given, saved: Saved, around: Tensors) -> None:
        *before, post_add, total = around
        first = (*before, total if self.reads_sum else None) if self.adds_before else ()
        partials = self.statistics(saved, x, *first)
        if self.reads_sum:
            assert total is not None
            x, around = total, (None, None, None, post_add, None)
        self.apply(x, y, *parameters, *saved, partials, *given, *around)


class TilesBackward(BackwardPlan):
    """p and q of all chunks; the units' totals and the parameters' gradients; the input's gradient of all chunks."""

    #: Whether the pass for the input's gradient may merge partials itself.
    may_merge = True

    def __init__(self, made_for: Problem, problem: Problem, config: TilesConfig) -> None:
        super().__init__(made_for)
        view, shared = problem.view, shares_parameters(made_for, problem)
        numbers = problem.added is not None and problem.added.grad_numbers
        self.stores_dz = stores_dz(problem)
        reduction = Pass(problem, view, config.reduction, summed_layouts(problem), reads=True)
        output = Pass(problem, view, config.output, gradient_layouts(problem))
        self.kernel = backward_kernels.gradients if problem.added is None else sum_kernels.sum_gradients
        per_batch = problem.norm.per_batch
        self.totals = self.wants_input and problem.norm.training
        self.units = problem.num_statistics if self.totals or shared else 0
        self.partials = partials = PartialsShape(
            view, reduction.partials, self.units, last=reduction.last, per_batch=per_batch
        )
        self.reduce = prepared(
            backward_kernels.reduce if problem.added is None else sum_kernels.sum_reduce,
            reduction.programs,
            (
                *_sizes(view), *reduction.steps, *reduction.grid, partials.total, reduction.tiles,
                self.activation_parameter,
            ),
            {
                **self.overlap, "DERIVATIVE": self.derivative, **self.alpha, "SHARED": shared, **reduction.order,
                **reduction.tile, **reduction.window, **reduction.repeats, **reduction.depth, **reduction.staged,
                **reduction.fold, **({} if problem.added is None else {"NUMBERS": numbers}),
            },
            reduction.warps,
        )  # fmt: skip
        #: The launch that makes the gradient of numbers before the norm.
        self.of_numbers = NumbersGradient(self, partials) if numbers else None
        within = view.group_channels % config.output.channels == 0 and reduction.repeat == output.repeat == 1
        few = partials.count <= merged(problem) and partials.summed <= MOST_SUMMED
        self.merges = self.may_merge and self.totals and within and not shared and few and not numbers
        self.arguments = (
            *_sizes(view), *output.steps, *output.grid,
            *((partials.total, partials.rows, reduction.chunks) if self.merges else UNUSED * 3),
            problem.reduced, self.activation_parameter,
        )  # fmt: skip
        self.constants = {
            **self.overlap, "DERIVATIVE": one if self.stores_dz else self.derivative, **self.alpha, "SHARED": shared,
            **output.order, **output.tile, **output.window, **output.repeats, "TILES": output.tiles,
            **(partials.block if self.merges else NO_BLOCK),
            **({} if problem.added is None else {"STORED": self.stores_dz}),
        }  # fmt: skip
        self.output, self.reduced, self.shared = output, problem.reduced, shared
        self.launches: dict[tuple[bool, bool], tuple[Combination, Launch]] = {}

    def prepare(self, parameters: bool, modulation: bool) -> tuple[Combination, Launch]:
        """What makes totals, and the launch of ``gradients``: with the gradients of weight or bias, of scale or
        shift."""
        totals = self.units > 0 and self.partials.order["PER_BATCH"]
        sums = ParameterSums(self.partials, parameters and not self.shared, modulation, self.merges, totals)
        programs = sums.programs if self.merges else 0
        combine = Combination(self, self.partials, self.units, self.reduced, sums, shared=self.shared)
        gradients = prepared(
            self.kernel,
            self.output.programs + programs,
            (programs, self.output.programs, sums.channel_programs, self.partials.view.samples, *self.arguments),
            {**self.constants, "CHANNELS": sums.channels if programs else 1, "BLOCK_N": sums.rows if programs else 1},
            self.output.warps,
        )
        return self.launches.setdefault((parameters, modulation), (combine, gradients))

    def run(self, data: Tensors, dx: Tensor | None, saved: Tensors, parameters: Tensors, grads: Tensors) -> None:
        wanted = (grads[0] is not None or grads[1] is not None, grads[2] is not None or grads[3] is not None)
        combine, gradients = self.launches.get(wanted) or self.prepare(*wanted)
        partials = totals = None
        (first, around_first), (second, around_second) = self.operands(data, saved)
        if self.totals or wanted[0] or wanted[1]:
            partials = self.workspace((2 if self.of_numbers is None else 3) * self.partials.total)
            self.reduce(*first, *parameters, *around_first, partials)
            if not self.merges:
                totals = self.workspace(2 * self.units) if self.totals else None
                combine(partials, parameters, totals, grads)
            if self.of_numbers is not None:
                self.of_numbers(partials, totals, parameters, saved, data)
        if dx is not None:
            merging = partials if self.merges else None
            gradients(*second, dx, *parameters, *around_second, totals, merging, *grads)

    def operands(self, data: Tensors, saved: Tensors) -> tuple[tuple[Tensors, Tensors], tuple[Tensors, Tensors]]:
        """For each of the two passes a gradient and the input, and what follows the parameters."""
        return (data, saved), (data, saved)


class TilesSumBackward(TilesBackward, SumBackward):
    """The same with sums around the norm."""

    def operands(self, data: Tensors, saved: Tensors) -> tuple[tuple[Tensors, Tensors], tuple[Tensors, Tensors]]:
        grad_output, input, post_add, grad_sum, dz = data[:5]
        given = grad_output, input
        if self.stores_dz:
            return (given, (*saved, post_add, dz)), ((dz, input), (*saved, None, grad_sum, None))
        return (given, (*saved, post_add, None)), (given, (*saved, post_add, grad_sum, dz))


class NumbersGradient:
    """The launch that makes the gradient of a number for each sample and channel before the norm, of p, of the sums of
    xhat behind q, and of P / K and Q / K."""

    def __init__(self, plan: BackwardPlan, partials: PartialsShape) -> None:
        view = partials.view
        chunks = min(power_of_two(partials.chunks), NUMBERED_CHUNKS)
        channels = min(power_of_two(view.channels), max(8, NUMBERED // chunks))
        blocks = -(-view.channels // channels)
        self.shape = view.samples, view.channels
        self.launch = prepared(
            backward_kernels.gradients_of_numbers,
            view.samples * blocks,
            (*_sizes(view), blocks, partials.total, partials.chunks),
            {**plan.overlap, "LAST": partials.order["LAST"], "BLOCK_C": channels, "BLOCK_N": chunks},
            max(1, channels * chunks // (32 * 8)),
        )

    def __call__(
        self, partials: Tensor, totals: Tensor | None, parameters: Tensors, saved: Tensors, data: Tensors
    ) -> None:
        weight, _, scale, _ = parameters
        self.launch(partials, totals, weight, scale, saved[1], data[-1])


class ParameterSums:
    """The programs that sum p and q into the parameters' gradients, by blocks of channels; ``shares`` of the partials
    are summed first where there is more than one. ``merging``: they are programs of the pass for the input's gradient,
    which has one block for all. ``totals``: the sums of all samples are a unit's, too."""

    def __init__(
        self, partials: PartialsShape, parameters: bool, modulation: bool, merging: bool = False, totals: bool = False
    ) -> None:
        view, rows = partials.view, partials.summed
        self.shares = -(-rows // FOLDED) if (parameters or totals) and rows > MOST_SUMMED else 1
        rows = rows if self.shares == 1 else self.shares
        #: The samples, or shares, whose partials the gradients of weight and bias are summed from.
        self.samples = view.samples if self.shares == 1 else self.shares
        # Memory moves eight fp32 values at least. A program loops over more rows than its registers hold.
        few = rows > 64 and view.channels < 2048
        least = power_of_two(view.channels // SUM_PROGRAMS) if view.channels else 1
        self.channels = min(power_of_two(view.channels), max(8 if few else 16, least))
        most, chunks = max(1, MERGE_BLOCK // max(8, self.channels)), power_of_two(max(1, partials.chunks))
        self.rows = min(power_of_two(rows), most)
        #: The channels, and the chunks at a time, of a program for the modulation of one sample. (900, 1024) in
        #: batch_norm, with one chunk to a sample, took 400 us in programs of 8 channels.
        self.modulated = max(self.channels, min(power_of_two(view.channels), MODULATED // chunks)), min(chunks, most)
        if merging and modulation:
            self.rows = min(max(16, chunks), most)
            self.modulated = self.channels, self.rows
        elements = max(self.channels * self.rows, self.modulated[0] * self.modulated[1] if modulation else 1)
        self.warps = max(1, elements // (32 * 8)) if parameters or modulation else 1
        blocks = -(-view.channels // self.channels)
        self.channel_programs = blocks if parameters else 0
        self.programs = self.channel_programs
        if modulation:
            self.programs += view.samples * -(-view.channels // self.modulated[0])

    @property
    def block(self) -> dict[str, int]:
        channels, chunks = self.modulated
        return {"BLOCK_C": self.channels, "BLOCK_N": self.rows, "BLOCK_M": channels, "BLOCK_K": chunks}


class Combination:
    """The launch that makes P / K and Q / K of so many units, and the parameters' gradients, from p and q; before it,
    where a channel has many partials, one that sums shares of them, from which batch_norm's units are merged too: the
    backward of (38425, 320) with scale and shift in fp16 took 1222 us with units merged from all samples. Where the
    channels of a unit share their parameters, the programs of the units make these gradients too."""

    def __init__(
        self,
        plan: BackwardPlan,
        partials: PartialsShape,
        units: int,
        reduced: int,
        sums: ParameterSums,
        *,
        shared: bool = False,
    ) -> None:
        view, merged, last, per_batch = partials.view, partials, partials.order["LAST"], partials.order["PER_BATCH"]
        if sums.shares > 1 and units and per_batch:
            merged = PartialsShape(replace(view, samples=sums.shares), 1, units, last=last, per_batch=True)
        programs = merged.programs if units else 0
        merge = {"BLOCK_U": merged.together, **merged.block} if units else {"BLOCK_U": 1, **NO_BLOCK}
        self.workspace, self.folded = plan.workspace, 2 * sums.shares * view.channels
        self.fold: Launch | None = None
        if sums.shares > 1:
            channels = min(power_of_two(view.channels), 8)
            self.fold = prepared(
                backward_kernels.fold,
                -(-view.channels // channels) * sums.shares,
                (view.channels, view.samples, partials.total, partials.chunks, sums.shares),
                {**plan.overlap, "LAST": last, "BLOCK_C": channels, "BLOCK_N": FOLDED},
                max(1, channels * FOLDED // (32 * 8)),
            )
        self.combine = prepared(
            backward_kernels.combine,
            programs + sums.programs,
            (
                *_sizes(view)[:3], units, programs, reduced, sums.channel_programs, sums.samples, partials.total,
                partials.rows, partials.chunks,
            ),
            {
                **plan.overlap, "RMS": plan.rms, "SHARED": shared, **partials.order, **merge,
                **sums.block,
            },
            max(merged.warps if units else 1, sums.warps),
        )  # fmt: skip

    def __call__(self, partials: Tensor, parameters: Tensors, totals: Tensor | None, grads: Tensors) -> None:
        folded = None
        if self.fold is not None:
            folded = self.workspace(self.folded)
            self.fold(partials, parameters[2], folded)
        self.combine(partials, folded, *parameters[:3], totals, *grads)
