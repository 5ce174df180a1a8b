"""Plans around kernels/held.py: units of any memory order that fit the registers of one program."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from fusednorm.backends.triton.config.kinds import HeldConfig
from fusednorm.backends.triton.config.units import HeldUnits, pivots
from fusednorm.backends.triton.kernels import held, held_samples, sums
from fusednorm.backends.triton.launch import Launch, prepared
from fusednorm.backends.triton.plans.base import BackwardPlan, Given, OneLaunchForward, Saved, Tensors, starts_early
from fusednorm.backends.triton.plans.sums import SumBackward, SumForward
from fusednorm.backends.triton.plans.tiles import Combination, ParameterSums, PartialsShape
from fusednorm.backends.triton.runs import WIDE_LOAD, alignment, divisor, leading_bits
from fusednorm.problem import DTYPE_BYTES, Layout, Problem


def _programs(seen: HeldUnits, config: HeldConfig) -> int:
    if config.all_samples:
        return seen.in_sample
    if seen.spans:
        return -(-seen.units // config.units)
    return seen.samples * -(-seen.in_sample // config.units)


def _sizes(seen: HeldUnits, config: HeldConfig) -> tuple[int, ...]:
    _, inverse = divisor(seen.in_sample if seen.spans else -(-seen.in_sample // config.units))
    return seen.units, seen.in_sample, inverse, seen.channels, seen.rows, seen.columns


def _tile(problem: Problem, seen: HeldUnits, config: HeldConfig, layouts: tuple[Layout, ...]) -> dict[str, int | None]:
    steps = [seen.steps(layout) for layout in layouts]
    if seen.contiguous:  # loads run along units
        align = alignment(problem.dtype, seen.in_sample, *(step for sample, _, row in steps for step in (sample, row)))
    else:
        align = alignment(problem.dtype, seen.columns, *(number for three in steps for number in three))
    rows, columns = seen.block
    return {
        "AFFINE": seen.affine,
        "ONE": seen.samples == 1,
        "PACKED": not seen.apart and all(sample == seen.in_sample * unit for sample, unit, _ in steps),
        "SPAN": seen.spans,
        "APART": seen.apart,
        "ALIGN": align,
        "BLOCK_U": config.units,
        "BLOCK_R": rows,
        "BLOCK_K": columns,
        **_leading(problem, seen, align),
    }


def _leading(problem: Problem, seen: HeldUnits, align: int) -> dict[str, int]:
    """What is known of the last row, and of the last column where narrow loads have a mask for each. More bits are more
    kernels, so one is known of a number of samples or positions, two of a length, and three of a number of channels.

    On an H200 the backward of (15, 2048, 7, 7, 7) in fp16 takes 21.6 us so, and 29 where nothing is known, but
    batch_norm of (4, 1343, 15, 15) in fp16 and channels_last with silu 7.4 and 6.1."""
    rows, columns = seen.block
    if seen.flat:
        return {"LEADING_R": 0, "LEADING_K": leading_bits(seen.rows * seen.columns, columns, 2)}
    narrow = align * DTYPE_BYTES[problem.dtype] < WIDE_LOAD
    slow = narrow and seen.contiguous and not problem.backward and problem.norm.smooth
    return {
        "LEADING_R": 0 if slow else leading_bits(seen.rows, rows, 3 if seen.across == "channel" else 1),
        "LEADING_K": leading_bits(seen.columns, columns, 2) if align == 1 else 0,
    }


class HeldForward(OneLaunchForward):
    """So many units to a program."""

    def __init__(self, problem: Problem, seen: HeldUnits, config: HeldConfig) -> None:
        assert seen.output is not None
        programs = _programs(seen, config)
        super().__init__(
            problem,
            held.held_forward,
            programs,
            (*_sizes(seen, config), *seen.steps(seen.input), *seen.steps(seen.output)),
            {**_tile(problem, seen, config, (seen.input, seen.output)), "PIVOT": pivots(problem)},
            config.warps,
        )

    def run(self, x: Tensor, y: Tensor, parameters: Tensors, given: Given, saved: Saved) -> None:
        self.launch(x, y, *parameters, *saved)


class HeldSumForward(SumForward):
    """So many units to a program, with sums around the norm."""

    def __init__(self, problem: Problem, seen: HeldUnits, config: HeldConfig) -> None:
        super().__init__(problem)
        assert seen.output is not None
        layouts = seen.input, seen.output, seen.before or seen.input, seen.behind or seen.input
        self.launch = prepared(
            sums.held_sum_forward,
            _programs(seen, config),
            (
                *_sizes(seen, config), *(step for layout in layouts for step in seen.steps(layout)), self.eps,
                self.activation_parameter,
            ),
            {
                **self.overlap, "RMS": self.rms, "VALUE": self.value, **self.alpha,
                **_tile(problem, seen, config, layouts), "EXACT": self.added.exact,
            },
            config.warps,
        )  # fmt: skip

    def add(self, x: Tensor, y: Tensor, parameters: Tensors, given: Given, saved: Saved, around: Tensors) -> None:
        self.launch(x, y, *parameters, *saved, *around)


class SummedUnitsBackward(BackwardPlan):
    """One launch; a last one sums the partials of samples into the gradients of weight and bias, unless a program has
    all of a channel ``alone``."""

    #: The first launch.
    backward: Launch

    def __init__(self, problem: Problem, alone: bool) -> None:
        super().__init__(problem)
        self.partials = PartialsShape(problem.view, 1, 0, last=True, per_batch=False)
        self.sums: Combination | None = None
        if not alone:
            self.sums = Combination(self, self.partials, 0, 1, ParameterSums(self.partials, True, False))

    def run(self, data: Tensors, dx: Tensor | None, saved: Tensors, parameters: Tensors, grads: Tensors) -> None:
        if self.sums is None or (grads[0] is None and grads[1] is None):
            self.backward(*data, dx, *parameters, *saved, None, *grads)
        else:
            partials = self.workspace(2 * self.partials.total)
            self.backward(*data, dx, *parameters, *saved, partials, None, None, *grads[2:])
            self.sums(partials, parameters, None, (*grads[:2], None, None))


class HeldBackward(SummedUnitsBackward):
    """So many units to a program."""

    def __init__(self, problem: Problem, seen: HeldUnits, config: HeldConfig) -> None:
        super().__init__(problem, seen.samples == 1 or config.all_samples)
        assert seen.grad is not None and seen.output is not None
        layouts: tuple[Layout, ...] = seen.grad, seen.input, seen.output
        if problem.added is not None:
            layouts = *layouts, seen.behind or seen.input
        self.backward = prepared(
            held.held_backward if problem.added is None else sums.held_sum_backward,
            _programs(seen, config),
            (
                *_sizes(seen, config), *(step for layout in layouts for step in seen.steps(layout)),
                self.partials.total, self.activation_parameter,
            ),
            {
                **self.overlap, "DERIVATIVE": self.derivative, **self.alpha,
                **_tile(problem, seen, config, layouts), "ALL_SAMPLES": config.all_samples,
            },
            config.warps,
        )  # fmt: skip


class HeldSamplesBackward(BackwardPlan):
    """So many units of so many samples to a step of a program; a last launch sums what the programs summed."""

    def __init__(self, problem: Problem, seen: HeldUnits, config: HeldConfig) -> None:
        super().__init__(problem)
        assert seen.grad is not None and seen.output is not None
        blocks = -(-seen.in_sample // config.units)
        chunks = -(-seen.samples // (config.samples * config.steps))
        layouts = seen.grad, seen.input, seen.output
        rows = replace(problem.view, samples=chunks * config.samples)
        self.partials = PartialsShape(rows, 1, 0, last=True, per_batch=False)
        tile = _tile(problem, seen, config, layouts)
        for name in ("ONE", "PACKED", "SPAN", "APART"):
            del tile[name]
        self.backward = prepared(
            held_samples.held_samples_backward,
            blocks * chunks,
            (
                seen.samples, seen.in_sample, seen.channels, seen.rows, seen.columns,
                *(step for layout in layouts for step in seen.steps(layout)),
                self.partials.total, *divisor(blocks), chunks, config.steps, self.activation_parameter,
            ),
            {
                **self.overlap, "DERIVATIVE": self.derivative, **self.alpha, **tile, "BLOCK_N": config.samples,
                "STAGES": config.stages,
            },
            config.warps,
            early=starts_early(problem, config.steps),
        )  # fmt: skip
        self.sums = Combination(self, self.partials, 0, 1, ParameterSums(self.partials, True, False))

    def run(self, data: Tensors, dx: Tensor | None, saved: Tensors, parameters: Tensors, grads: Tensors) -> None:
        partials = self.workspace(2 * self.partials.total)
        self.backward(*data, dx, *parameters, *saved, partials, *grads[2:])
        if grads[0] is not None or grads[1] is not None:
            self.sums(partials, (*parameters[:2], None, None), None, (*grads[:2], None, None))


class HeldSumBackward(HeldBackward, SumBackward):
    """The same with sums around the norm."""

    def run(self, data: Tensors, dx: Tensor | None, saved: Tensors, parameters: Tensors, grads: Tensors) -> None:
        super().run(data[:2], dx, (*saved, *data[2:]), parameters, grads)
