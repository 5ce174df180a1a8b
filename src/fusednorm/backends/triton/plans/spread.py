"""Plans of norms whose input is spread over processes: the passes of plans/tiles.py, between which processes exchange
what they found, and the launches that make one result of what all ranks sent (kernels/ranks.py).

The current device is that of the tensors.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from fusednorm.backends.triton.config.kinds import TilesConfig
from fusednorm.backends.triton.kernels import ranks as kernels
from fusednorm.backends.triton.launch import Launch, Scalars, prepared
from fusednorm.backends.triton.plans import base
from fusednorm.backends.triton.plans.base import BackwardPlan, Tensors, allocator
from fusednorm.backends.triton.plans.tiles import (
    Combination,
    ParameterSums,
    PartialsShape,
    TilesBackward,
    TilesForward,
)
from fusednorm.backends.triton.runs import power_of_two
from fusednorm.instance import CutGroups, Ranks
from fusednorm.operands import BackwardOperands, Gradients, Operands, Statistics, Wanted
from fusednorm.problem import Problem, View
from fusednorm.strides import contiguous, packed_strides

#: Numbers that a program merges over the ranks: a thread has two, and few programs start.
MERGED_NUMBERS, MERGING_WARPS = 256, 4
#: A program whose lengths or momenta change with every call pays for launches again.
MOST_LAUNCHES = 1024
_NONE = (None, None, None, None)


class SpreadForward(TilesForward):
    """A :class:`~fusednorm.instance.SpreadForwardPlan`."""

    may_merge = False

    def __init__(self, made_for: Problem, problem: Problem, config: TilesConfig) -> None:
        super().__init__(made_for, problem, config)
        self.units = made_for.num_statistics

    def merging(self, scalars: Scalars, constants: dict[str, Any]) -> Launch:
        partials = self.partials
        return prepared(kernels.pack_moments, partials.programs, scalars, constants, partials.warps)

    def local_moments(self, input: Tensor) -> Tensor:
        packed = self.allocate((2 * self.units + 1,), (1,), torch.float64)
        if self.empty:
            return packed.zero_()
        partials = self.workspace(2 * self.partials.total)
        self.moments(input, partials)
        self.finalize(partials, packed)
        return packed

    def output(self, operands: Operands, mean: Tensor | None, rstd: Tensor) -> Tensor:
        output = self.allocate(self.shape, self.strides, self.dtype)
        if not self.empty:
            self.apply(operands.input, output, *parameters_of(operands), mean, rstd, None, None, None, None)
        return output


class SpreadBackward(TilesBackward):
    """A :class:`~fusednorm.instance.ReplicatedBackwardPlan`."""

    may_merge = False

    def __init__(self, made_for: Problem, problem: Problem, config: TilesConfig) -> None:
        super().__init__(made_for, problem, config)
        self.copies = "grad_output" in made_for.copies
        self.last_pass = prepared(
            self.kernel,
            self.output.programs,
            (0, self.output.programs, 0, self.partials.view.samples, *self.arguments),
            {**self.constants, "CHANNELS": 1, "BLOCK_N": 1},
            self.output.warps,
        )
        view, self.by_sample = made_for.view, made_for.modulated or not made_for.norm.per_batch
        #: The samples, each of whose channels has a p and a q; one for all where no parameter differs by sample.
        self.rows = view.samples if self.by_sample else 1
        whole = View(self.rows, view.groups, view.group_channels, 1)
        self.of_chunks = _Sums(self, self.partials, self.units, self.shared)
        self.of_ranks = _Sums(
            self, PartialsShape(whole, 1, self.units, last=False, per_batch=made_for.norm.per_batch), self.units, False
        )

    def gradient(self, grad_output: Tensor) -> Tensor:
        return self.allocate(self.shape, self.strides, self.dtype).copy_(grad_output) if self.copies else grad_output

    def local_sums(self, operands: BackwardOperands) -> Tensor:
        o, partials = operands, self.workspace(2 * self.partials.total)
        if not self.empty:
            self.reduce(o.grad_output, o.input, *parameters_of(o), o.mean, o.rstd, partials)
        return partials

    def own_sums(self, operands: BackwardOperands, sums: Tensor, wanted: Wanted) -> tuple[Tensor, Gradients]:
        totals, grads = self.allocate((2 * self.units,), (1,), torch.float64), self.made(wanted)
        if self.empty:
            return totals.zero_(), Gradients(None, *(None if grad is None else grad.zero_() for grad in grads))
        self.of_chunks(sums, parameters_of(operands), totals, grads)
        return totals, Gradients(None, *grads)

    def packed_sums(self, sums: Tensor) -> Tensor:
        size = self.rows * self.of_ranks.channels
        packed = self.allocate((2 * size,), (1,), torch.float64)
        if self.empty:
            return packed.zero_()
        p, q = packed[:size], packed[size:]
        self.of_chunks(sums, _NONE, None, (None, None, q, p) if self.by_sample else (q, p, None, None))
        return packed

    def parameters(self, operands: BackwardOperands, summed: Tensor, wanted: Wanted) -> Gradients:
        grads = self.made(wanted)
        if any(grad is not None for grad in grads):
            self.of_ranks(summed, parameters_of(operands), None, grads)
        return Gradients(None, *grads)

    def made(self, wanted: Wanted) -> list[Tensor | None]:
        """Memory for the parameters' gradients."""
        return [
            self.allocate(*like) if like is not None and want else None
            for like, want in zip(self.gradients_of, wanted[1:], strict=True)
        ]

    def totals_of_ranks(self, operands: BackwardOperands, means: Tensor) -> Tensor:
        totals = self.workspace(2 * self.units)
        self.of_ranks(means, parameters_of(operands), totals, _NONE)
        return totals

    def finish(self, operands: BackwardOperands, totals: Tensor | None, found: Gradients, wanted: Wanted) -> None:
        o = operands
        if totals is None:
            return
        found.input = self.allocate(self.shape, self.strides, self.dtype)
        if not self.empty:
            self.last_pass(o.grad_output, o.input, found.input, *parameters_of(o), o.mean, o.rstd, totals, None, *_NONE)


class _Sums:
    """The launches that make sums of p and q: P and Q of units, the parameters' gradients, or both."""

    def __init__(self, plan: BackwardPlan, partials: PartialsShape, units: int, shared: bool) -> None:
        self.plan, self.partials, self.units, self.shared = plan, partials, units, shared
        self.channels = units if shared else partials.view.channels
        self.launches: dict[tuple[int, bool, bool], Combination] = {}

    def __call__(self, sums: Tensor, parameters: Tensors, totals: Tensor | None, grads: Tensors) -> None:
        units, weights, modulation = self.units, False, False
        if not self.shared:  # else the channels of a unit share its weight and bias
            units = 0 if totals is None else units
            weights = grads[0] is not None or grads[1] is not None
            modulation = grads[2] is not None or grads[3] is not None
        key = (units, weights, modulation)
        launch = self.launches.get(key)
        if launch is None:
            per_batch = units > 0 and self.partials.order["PER_BATCH"]
            made = ParameterSums(self.partials, weights, modulation, totals=per_batch)
            launch = self.launches[key] = Combination(self.plan, self.partials, units, 1, made, shared=self.shared)
        launch(sums, parameters, totals, grads)


def parameters_of(operands: Operands | BackwardOperands) -> Tensors:
    o = operands
    return contiguous(o.weight), contiguous(o.bias), contiguous(o.scale), contiguous(o.shift)


class RankKernels(Ranks):
    """What Triton's kernels make of the vectors of all ranks. A launch that takes these vectors is the first of an
    operation: what is before it in the stream is the transport's."""

    def __init__(self) -> None:
        self.overlap = {"OVERLAP": base.overlaps()}
        self.launches: dict[tuple[Any, ...], Launch] = {}

    def merge_moments(
        self,
        parts: Tensor,
        shape: tuple[int, ...],
        eps: float,
        dtype: torch.dtype,
        running_mean: Tensor | None = None,
        running_var: Tensor | None = None,
        share: float | Tensor = 0.0,
        counter: Tensor | None = None,
    ) -> Statistics:
        ranks, length = parts.shape
        empty, units, strides = allocator(parts.device.type), prod(shape), packed_strides(shape)
        mean, rstd, var = (empty(shape, strides, dtype) for _ in range(3))
        count = empty((1,), (1,), torch.float64)
        given = share.to(parts.device) if isinstance(share, Tensor) else None
        scalars = (units, ranks, float(eps), 0.0 if given is not None else float(share))
        launch = self._over(kernels.merge_ranks, units, scalars, COUNTS=length != 2 * units + 1)
        launch(parts, mean, rstd, var, count, running_mean, running_var, given, counter)
        return Statistics(mean, rstd, var, count)

    def sum_over_ranks(
        self, parts: Tensor, count: Tensor, sums: torch.dtype | None, means: torch.dtype | None
    ) -> tuple[Tensor | None, Tensor | None]:
        ranks, length = parts.shape
        empty = allocator(parts.device.type)
        total, mean = (None if dtype is None else empty((length,), (1,), dtype) for dtype in (sums, means))
        self._over(kernels.sum_ranks, length, (length, ranks))(parts, count, total, mean)
        return total, mean

    def group_moments(self, channels: Tensor, cut: CutGroups) -> Tensor:
        packed = allocator(channels.device.type)((3 * cut.units,), (1,), torch.float64)
        scalars = (cut.units, cut.samples * cut.channels, *_sizes(cut))
        self._over(kernels.pack_group_moments, cut.units, scalars)(channels, packed)
        return packed

    def group_sums(self, channels: Tensor, cut: CutGroups) -> Tensor:
        packed = allocator(channels.device.type)((2 * cut.units,), (1,), torch.float64)
        self._over(kernels.pack_group_sums, cut.units, (cut.units, *_sizes(cut)))(channels, packed)
        return packed

    def channel_statistics(self, found: Statistics, cut: CutGroups) -> tuple[Tensor, Tensor]:
        shape, empty = (cut.samples, cut.channels), allocator(found.mean.device.type)
        mean, rstd = (empty(shape, (cut.channels, 1), found.mean.dtype) for _ in range(2))
        self._spread(cut, 1, found.mean, found.rstd, mean, rstd)
        return mean, rstd

    def channel_means(self, means: Tensor, cut: CutGroups) -> Tensor:
        found = allocator(means.device.type)((2 * cut.samples * cut.channels,), (1,), means.dtype)
        self._spread(cut, 2, means, means, found, found)
        return found

    def _spread(self, cut: CutGroups, step: int, *tensors: Tensor) -> None:
        channels = cut.samples * cut.channels
        if channels:
            scalars = (channels, *_sizes(cut))
            self._over(kernels.spread_groups, channels, scalars, STEP=step)(*tensors)

    def _over(self, kernel: Any, numbers: int, scalars: Scalars, **constants: Any) -> Launch:
        """The launch whose programs take a block of so many numbers each, kept."""
        key = (kernel, scalars, *constants.values())
        launch = self.launches.get(key)
        if launch is None:
            if len(self.launches) >= MOST_LAUNCHES:
                self.launches.clear()
            block = min(power_of_two(numbers), MERGED_NUMBERS)
            constants = {**self.overlap, **constants, "BLOCK": block}
            launch = Launch(kernel, -(-numbers // block), scalars, constants, MERGING_WARPS)
            self.launches[key] = launch
        return launch


def _sizes(cut: CutGroups) -> tuple[int, int, int, int]:
    return cut.groups, cut.group_channels, cut.channels, cut.first
