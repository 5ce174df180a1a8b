"""Plans of the channels_last order, around kernels/slabs.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusednorm.backends.cpu.geometry import COEFFICIENTS
from fusednorm.backends.cpu.plans.base import BackwardPlan, ForwardPlan, Plan
from fusednorm.backends.cpu.threads import parallel_for, parallel_stages
from fusednorm.problem import Problem

#: A step of the whole-sample order takes samples of about this many bytes, so that its calls cost little.
STEP_BYTES = 1 << 18


class SlabsForward(ForwardPlan):
    """Statistics, coefficients and output: each of all samples, or ``whole`` all of a few samples at a time."""

    module = "slabs"

    def __init__(self, problem: Problem, pieces: int, piece: int, whole: bool) -> None:
        super().__init__(problem, pieces, piece)
        self.pieces, self.whole = pieces, whole
        self.apply_slabs = self.kernel("apply")
        if self.given is None:
            self.moments = self.kernel("moments", activated=False)
            self.finalize = self.kernel("statistics", activated=False)
        self.coefficients = self.kernel("coefficients", activated=False)

    def run(self, data: Sequence[int], saved: Sequence[int], parameters: Sequence[int], eps: float) -> None:
        channels, count = self.channels, self.samples * self.channels
        block, workspace = self.workspace(2 * self.tasks * channels, 2 * self.statistics, COEFFICIENTS * count)
        partials, stats, coefficients = workspace
        moments = (data[0], partials, self.address)
        finalize = (partials, stats, *saved, self.address, eps)
        prepare = (stats, coefficients, *parameters, self.address)
        apply = (*data, coefficients, self.address, self.parameter)
        if self.whole:
            stages = (
                (self.moments, self.moments.pack(*moments), self.pieces),
                (self.finalize, self.finalize.pack(*finalize), self.statistics // self.samples),
                (self.coefficients, self.coefficients.pack(*prepare), 1),
                (self.apply_slabs, self.apply_slabs.pack(*apply), self.pieces),
            )
            parallel_stages(stages, self.samples, _samples_per_step(self), self.tensor_bytes)
        else:
            parallel_for(self.moments, moments, self.tasks, self.tensor_bytes)
            parallel_for(self.finalize, finalize, self.statistics, 16 * self.tasks * channels)
            self.apply_statistics(prepare, apply)

    def apply(self, data: Sequence[int], stats: int, parameters: Sequence[int]) -> None:
        block, (coefficients,) = self.workspace(COEFFICIENTS * self.samples * self.channels)
        prepare = (stats, coefficients, *parameters, self.address)
        self.apply_statistics(prepare, (*data, coefficients, self.address, self.parameter))

    def apply_statistics(self, prepare: Sequence[Any], apply: Sequence[Any]) -> None:
        parallel_for(self.coefficients, prepare, self.samples, 32 * self.samples * self.channels)
        parallel_for(self.apply_slabs, apply, self.tasks, 2 * self.tensor_bytes)


def _samples_per_step(plan: Plan) -> int:
    return max(1, STEP_BYTES * plan.samples // plan.tensor_bytes)


class SlabsBackward(BackwardPlan):
    """p and q, coefficients and grad_input: each of all samples, or ``whole`` all of a few samples at a time."""

    module = "slabs_backward"

    def __init__(self, problem: Problem, pieces: int, piece: int, whole: bool) -> None:
        super().__init__(problem, pieces, piece)
        self.pieces, self.whole = pieces, whole
        self.recall = self.kernel("recall", activated=False)
        self.coefficients = self.kernel("coefficients", activated=False, module="slabs")
        self.reduce, self.input_gradient = self.kernel("reduce"), self.kernel("input_gradient")
        self.combine = self.kernel("combine", activated=False)
        self.gradient_coefficients = self.kernel("gradient_coefficients", activated=False)

    def run(
        self,
        data: Sequence[int],
        saved: Sequence[int],
        parameters: Sequence[int],
        grads: list[int],
        wanted: list[int],
    ) -> None:
        count, units = self.samples * self.channels, self.statistics
        counts = (2 * self.tasks * self.channels, 2 * units, 2 * count, COEFFICIENTS * count)
        block, (partials, stats, sums, coefficients) = self.workspace(*counts)
        tail = (self.address, self.parameter)
        recall = (*saved, stats, self.address)
        prepare = (stats, coefficients, *parameters, self.address)
        reduce = (*data[:2], coefficients, partials, *tail)
        combine = (partials, sums, self.address)
        finalize = (sums, stats, coefficients, *parameters, self.address)
        gradient = (*data, coefficients, *tail)
        parallel_for(self.recall, recall, units, 16 * units)
        parallel_for(self.coefficients, prepare, self.samples, 32 * count)
        if self.whole:
            stages = [
                (self.reduce, self.reduce.pack(*reduce), self.pieces),
                (self.combine, self.combine.pack(*combine), 1),
            ]
            if self.wants_input:
                groups = units // self.samples
                stages += (
                    (self.gradient_coefficients, self.gradient_coefficients.pack(*finalize), groups),
                    (self.input_gradient, self.input_gradient.pack(*gradient), self.pieces),
                )
            parallel_stages(stages, self.samples, _samples_per_step(self), 2 * self.tensor_bytes)
        else:
            parallel_for(self.reduce, reduce, self.tasks, 2 * self.tensor_bytes)
            parallel_for(self.combine, combine, self.samples, 16 * self.tasks * self.channels)
            if self.wants_input:
                parallel_for(self.gradient_coefficients, finalize, units, 16 * count)
                parallel_for(self.input_gradient, gradient, self.tasks, 2 * self.tensor_bytes)
        self.finish(sums, parameters, grads, wanted)
