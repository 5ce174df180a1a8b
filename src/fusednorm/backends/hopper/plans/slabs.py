"""Plans of slabs of channels_last that are held on the chip."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fusednorm.backends.hopper.config.resident import vector_of
from fusednorm.backends.hopper.config.slabs import SlabsConfig, span, spread
from fusednorm.backends.hopper.kernels.activations import activation
from fusednorm.backends.hopper.kernels.slabs import slabs_forward
from fusednorm.backends.hopper.kernels.slabs_backward import slabs_backward
from fusednorm.backends.hopper.plans.base import NarrowerForward, name_of, narrower_sum_forward
from fusednorm.backends.hopper.plans.chunks import InChunks, SummedBackward
from fusednorm.backends.triton.plans.base import BackwardPlan, ForwardPlan, Given, Saved, Tensors
from fusednorm.backends.triton.plans.sums import SumForward
from fusednorm.backends.triton.plans.tiles import PartialsShape
from fusednorm.backends.triton.runs import power_of_two
from fusednorm.problem import Added, Layout, Problem

#: Numbers that a thread of a leader reads at a time.
READ = 4


class Slabs(InChunks):
    """What both directions share: the spread of slabs, the kernel's numbers and constants."""

    name = "hopper.slabs"

    def __init__(self, problem: Problem, config: SlabsConfig, processors: int) -> None:
        place = spread(problem, config, processors)
        assert place is not None
        super().__init__(problem, config, place, place.bands)
        self.place = place

    def numbers(self, *layouts: Layout) -> tuple[int, ...]:
        """Sizes, strides of tensors with these layouts, and where slabs are."""
        view, vector = self.problem.view, vector_of(self.problem)
        steps = (step // vector for layout in layouts for step in (layout.sample, layout.spatial))
        place = self.place
        return (
            view.spatial, view.group_channels, view.channels, *steps, place.held, place.groups, place.bands, *self.walk,
        )  # fmt: skip

    @property
    def constants(self) -> dict[str, Any]:
        place, view, warps = self.place, self.problem.view, self.config.warps
        groups = power_of_two(place.groups)
        led = warps * 32 * READ // power_of_two(place.parts)
        return {
            "EVEN": view.spatial % place.rows == 0, "FULL": place.held == place.lanes, "SPAN": span(self.problem),
            "LANES": place.lanes, "GROUPS": groups, "ALONE": span(self.problem) == view.group_channels,
            "LEAD": place.leads, "LED": max(1, min(led, warps, groups)), **super().constants,
        }  # fmt: skip


class SlabsForward(Slabs, NarrowerForward):
    """One launch, and one before it that fills the packets with zeros."""

    def __init__(self, problem: Problem, config: SlabsConfig, processors: int) -> None:
        ForwardPlan.__init__(self, problem)
        Slabs.__init__(self, problem, config, processors)
        output, added = problem.output_layout, problem.added or Added()
        assert output is not None
        layouts = problem.layout, output, added.pre_layout or output, added.post_layout or output
        scalars = *self.numbers(*layouts), float(problem.reduced), self.eps, self.activation_parameter
        value, _ = activation(name_of(problem), problem.dtype)
        self.launch = self.launch_of(slabs_forward, scalars, {"VALUE": value, **self.alpha, **self.constants})

    def run(self, x: Tensor, y: Tensor, parameters: Tensors, given: Given, saved: Saved) -> None:
        self.launch(x, y, *parameters, *saved, self.packets(), None, None, None, None)


class SlabsSumForward(SumForward, SlabsForward):
    """The same with sums around the norm."""

    __call__ = narrower_sum_forward  # type: ignore[assignment]

    def add(self, x: Tensor, y: Tensor, parameters: Tensors, given: Given, saved: Saved, around: Tensors) -> None:
        before, numbers, _, behind, total = around
        self.launch(x, y, *parameters, *saved, self.packets(), before, numbers, behind, total)


class SlabsBackward(Slabs, SummedBackward):
    """One launch, one before it that fills the packets with zeros, and one behind it that makes the parameters'
    gradients of p and q."""

    def __init__(self, problem: Problem, config: SlabsConfig, processors: int) -> None:
        BackwardPlan.__init__(self, problem)
        Slabs.__init__(self, problem, config, processors)
        output, grad = problem.output_layout, problem.grad_layout
        assert output is not None and grad is not None
        SummedBackward.__init__(self, PartialsShape(problem.view, self.place.parts, 0, last=True, per_batch=False))
        scalars = (
            *self.numbers(problem.layout, grad, output), self.partials.total, 1.0 / problem.reduced,
            self.activation_parameter,
        )  # fmt: skip
        _, derivative = activation(name_of(problem), problem.dtype)
        constants = {
            "DERIVATIVE": derivative, **self.alpha, **self.constants, "SMOOTH": problem.norm.smooth,
        }  # fmt: skip
        self.launch = self.launch_of(slabs_backward, scalars, constants)

    def run(self, data: Tensors, dx: Tensor | None, saved: Tensors, parameters: Tensors, grads: Tensors) -> None:
        partials = self.workspace(2 * self.partials.total) if any(self.wanted(grads)) else None
        grad_output, input = data
        self.launch(grad_output, input, dx, *parameters, *saved, partials, self.packets())
        if partials is not None:
            self.combine(partials, parameters, None, grads)
