"""The plan of slabs of channels_last that are held on the chip."""

from __future__ import annotations

from torch import Tensor

from fusednorm.backends.hopper.config.resident import vector_of
from fusednorm.backends.hopper.config.slabs import SlabsConfig, span, spread
from fusednorm.backends.hopper.kernels.activations import activation
from fusednorm.backends.hopper.kernels.slabs import slabs_forward
from fusednorm.backends.hopper.plans.base import NarrowerForward, name_of, narrower_sum_forward
from fusednorm.backends.hopper.plans.chunks import InChunks
from fusednorm.backends.triton.plans.base import ForwardPlan, Given, Saved, Tensors
from fusednorm.backends.triton.plans.sums import SumForward
from fusednorm.backends.triton.runs import power_of_two
from fusednorm.problem import Added, Problem

#: Numbers that a thread of a leader reads at a time.
READ = 4


class SlabsForward(InChunks, NarrowerForward):
    """One launch, and one before it that fills the packets with zeros."""

    name = "hopper.slabs"

    def __init__(self, problem: Problem, config: SlabsConfig, processors: int) -> None:
        place = spread(problem, config, processors)
        assert place is not None
        ForwardPlan.__init__(self, problem)
        view, output, vector = problem.view, problem.output_layout, vector_of(problem)
        assert output is not None
        InChunks.__init__(self, problem, config, place, place.bands)
        groups = view.groups // place.bands
        added = problem.added or Added()
        layouts = problem.layout, output, added.pre_layout or output, added.post_layout or output
        steps = [step for layout in layouts for step in (layout.sample, layout.spatial)]
        scalars = (
            view.spatial, view.group_channels, view.channels, *(step // vector for step in steps), place.held, groups,
            place.bands, *self.walk, float(problem.reduced), self.eps, self.activation_parameter,
        )  # fmt: skip
        value, _ = activation(name_of(problem), problem.dtype)
        led = config.warps * 32 * READ // power_of_two(place.parts)
        constants = {
            "VALUE": value, **self.alpha, "EVEN": view.spatial % place.rows == 0, "FULL": place.held == place.lanes,
            "SPAN": span(problem), "LANES": place.lanes, "GROUPS": power_of_two(groups),
            "LED": max(1, min(led, config.warps, power_of_two(groups))), **self.constants,
        }  # fmt: skip
        self.launch = self.launch_of(slabs_forward, scalars, constants)

    def run(self, x: Tensor, y: Tensor, parameters: Tensors, given: Given, saved: Saved) -> None:
        self.launch(x, y, *parameters, *saved, self.packets(), None, None, None, None)


class SlabsSumForward(SumForward, SlabsForward):
    """The same with sums around the norm."""

    __call__ = narrower_sum_forward  # type: ignore[assignment]

    def add(self, x: Tensor, y: Tensor, parameters: Tensors, given: Given, saved: Saved, around: Tensors) -> None:
        before, numbers, _, behind, total = around
        self.launch(x, y, *parameters, *saved, self.packets(), before, numbers, behind, total)
