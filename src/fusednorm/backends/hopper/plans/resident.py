"""Plans of the kernels that hold data on the chip."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from fusednorm.backends.hopper.config.resident import (
    ResidentConfig,
    channel_vectors,
    magic,
    shifted,
    spread,
    unit_tiles,
    vector_of,
)
from fusednorm.backends.hopper.kernels import resident, resident_backward
from fusednorm.backends.hopper.kernels.activations import activation
from fusednorm.backends.hopper.plans.base import NarrowerForward, name_of, narrower_sum_forward
from fusednorm.backends.hopper.plans.chunks import InChunks, SummedBackward
from fusednorm.backends.triton.plans.base import BackwardPlan, ForwardPlan, Given, Saved, Tensors
from fusednorm.backends.triton.plans.sums import SumBackward, SumForward
from fusednorm.backends.triton.plans.tiles import NumbersGradient, PartialsShape, behind_layout
from fusednorm.operands import (
    BackwardOperands,
    Gated,
    Gradients,
    SumGradients,
    Wanted,
)
from fusednorm.problem import Added, Problem


class Resident(InChunks):
    """What both directions share: the spread of units, the kernel's constants."""

    name = "hopper.resident"

    def __init__(self, problem: Problem, config: ResidentConfig, processors: int) -> None:
        place = spread(problem, config, processors)
        assert place is not None
        super().__init__(problem, config, place, problem.view.groups)
        self.place, self.vector, self.across = place, vector_of(problem), problem.norm.per_batch

    @property
    def constants(self) -> dict[str, Any]:
        place = self.place
        return {"EVEN": place.even, "LEAD": place.leads, "ACROSS": self.across, **super().constants}


class ResidentForward(Resident, NarrowerForward):
    """One launch, and one before it that fills the packets with zeros."""

    def __init__(self, problem: Problem, config: ResidentConfig, processors: int) -> None:
        ForwardPlan.__init__(self, problem)
        Resident.__init__(self, problem, config, processors)
        view, output = problem.view, problem.output_layout
        assert output is not None
        channel = channel_vectors(problem)
        within = channel % config.vectors == 0
        added = problem.added or Added()
        around = added.pre_layout or output, added.post_layout or output
        samples = (layout.sample // self.vector for layout in (problem.layout, output, *around))
        scalars = (
            self.place.vectors, view.group_channels, view.groups, *samples, *self.walk, channel,
            magic(channel // config.vectors if within and not self.across else channel), float(problem.reduced),
            self.eps, self.activation_parameter,
        )  # fmt: skip
        value, _ = activation(name_of(problem), problem.dtype)
        constants = {
            "VALUE": value, **self.alpha, "IN_CHANNEL": within or self.across,
            "SHORT": not within and channel < config.vectors, **self.constants,
        }  # fmt: skip
        self.launch = self.launch_of(resident.resident_forward, scalars, constants)

    def run(self, x: Tensor, y: Tensor, parameters: Tensors, given: Given, saved: Saved) -> None:
        self.launch(x, y, *parameters, *saved, self.packets(), None, None, None, None)


class ResidentSumForward(SumForward, ResidentForward):
    """The same with sums around the norm."""

    __call__ = narrower_sum_forward  # type: ignore[assignment]

    def add(self, x: Tensor, y: Tensor, parameters: Tensors, given: Given, saved: Saved, around: Tensors) -> None:
        before, numbers, _, behind, total = around
        self.launch(x, y, *parameters, *saved, self.packets(), before, numbers, behind, total)


class ResidentBackward(Resident, SummedBackward):
    """One launch, one before it that fills the packets with zeros, and one behind it that makes the parameters'
    gradients of p and q."""

    def __init__(self, problem: Problem, config: ResidentConfig, processors: int) -> None:
        BackwardPlan.__init__(self, problem)
        Resident.__init__(self, problem, config, processors)
        view, output, grad = problem.view, problem.output_layout, problem.grad_layout
        assert output is not None and grad is not None
        channel, moved = channel_vectors(problem), shifted(problem)
        # Of a channel, of all samples where these share statistics, and of one of a sample.
        tiles = unit_tiles(problem, config.vectors) // view.group_channels
        plane_tiles = -(-channel // config.vectors)
        if self.across:  # the partials of a channel are those of one sample
            view = replace(view, samples=1)
        numbers = problem.added is not None and problem.added.grad_numbers
        # The gradient of numbers before the norm needs P and Q.
        numbered = problem.num_statistics if numbers else 0
        SummedBackward.__init__(self, PartialsShape(view, tiles, numbered, last=False, per_batch=False), numbered)
        #: The launch that makes this gradient.
        self.of_numbers = NumbersGradient(self, self.partials) if numbers else None
        used = problem.norm.activation
        (behind,) = behind_layout(problem) or (output,)
        samples = (layout.sample // self.vector for layout in (problem.layout, grad, output, behind))
        scalars = (
            self.place.vectors, view.group_channels, view.groups, *samples, *self.walk,
            problem.view.spatial if moved else channel, magic(channel if self.across and not moved else plane_tiles),
            tiles, plane_tiles, self.partials.total, 1.0 / problem.reduced, self.activation_parameter,
        )  # fmt: skip
        _, derivative = activation(name_of(problem), problem.dtype)
        told = used is not None and used.told
        full = (self.place.vectors if self.across else channel) % config.vectors == 0
        constants = {
            "DERIVATIVE": derivative, **self.alpha, **self.constants, "EVEN": self.place.even and not moved,
            "FULL": full and not moved, "SHIFTED": moved, "SMOOTH": problem.norm.smooth, "TOLD": told,
            "NUMBERS": numbers,
        }  # fmt: skip
        self.launch = self.launch_of(resident_backward.resident_backward, scalars, constants)

    def run(self, data: Tensors, dx: Tensor | None, saved: Tensors, parameters: Tensors, grads: Tensors) -> None:
        partials = totals = None
        if self.of_numbers is not None:
            partials, totals = self.workspace(3 * self.partials.total), self.workspace(2 * self.numbered)
        elif any(self.wanted(grads)):
            partials = self.workspace(2 * self.partials.total)
        grad_output, input, *around = data
        behind, grad_sum, grad_behind = around[:3] or (None, None, None)
        added = grad_sum, behind, grad_behind
        self.launch(grad_output, input, dx, *parameters, *saved, partials, self.packets(), *added)
        if partials is not None:
            self.combine(partials, parameters, totals, grads)
            if self.of_numbers is not None:
                self.of_numbers(partials, totals, parameters, saved, data)


class ResidentSumBackward(SumBackward, ResidentBackward):
    """The same where the input is a sum, which has a gradient from elsewhere, or numbers of which the gradient is made,
    and where post_add is behind the norm."""

    def __call__(  # type: ignore[override]
        self,
        operands: BackwardOperands,
        wanted: Wanted,
        behind: Tensor | None,
        grad_sum: Tensor | None,
        gated: Gated | None = None,
        out: Tensor | None = None,
        post_out: Tensor | None = None,
    ) -> tuple[Gradients, SumGradients]:
        arguments = operands, wanted, behind, grad_sum, gated, out, post_out
        tensors = operands.input, operands.grad_output, behind, grad_sum, out, post_out
        found = self.runs(lambda: SumBackward.__call__(self, *arguments), *tensors)
        gradients: tuple[Gradients, SumGradients] = self.other(*arguments) if found is None else found
        return gradients
