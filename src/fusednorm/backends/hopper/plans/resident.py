"""Plans of the kernels that hold data on the chip."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusednorm.backends.hopper.config.resident import ResidentConfig, channel_vectors, spread
from fusednorm.backends.hopper.kernels import resident, resident_backward
from fusednorm.backends.hopper.kernels.activations import activation
from fusednorm.backends.hopper.plans.base import Narrower, NarrowerBackward, NarrowerForward, T, name_of
from fusednorm.backends.triton.launch import Launch
from fusednorm.backends.triton.plans.base import BackwardPlan, ForwardPlan, Given, Saved, Tensors
from fusednorm.backends.triton.plans.sums import SumBackward
from fusednorm.backends.triton.plans.tiles import Combination, ParameterSums, PartialsShape
from fusednorm.operands import BackwardOperands, Gated, Gradients, SumGradients, Wanted
from fusednorm.private.triton_names import REGISTERS, TOO_MANY_BLOCKS
from fusednorm.problem import DTYPE_BYTES, Problem


def magic(divisor: int) -> int:
    """ceil(2^31 / divisor), by which the kernel divides."""
    return -(-(1 << 31) // divisor)


class Resident(Narrower):
    """What both directions share: the kernel's constants. A call whose blocks cannot all run at the same time, since
    other programs share the GPU, runs on the other instance too."""

    name = "hopper.resident"

    def __init__(self, problem: Problem, config: ResidentConfig, processors: int) -> None:
        place = spread(problem, config, processors)
        assert place is not None
        super().__init__(problem)
        self.config, self.place, self.refused = config, place, False
        self.packets = (2 * place.waves * place.blocks,)  # a pair for each chunk
        self.each = 16 // DTYPE_BYTES[problem.dtype]

    @property
    def walk(self) -> tuple[int, ...]:
        """The kernel's numbers of units, parts and waves, and a block's step from chunk to chunk."""
        view, place = self.problem.view, self.place
        steps = divmod(place.blocks, place.parts)
        return view.samples * view.groups, place.parts, place.waves, *steps, magic(view.groups)

    @property
    def constants(self) -> dict[str, Any]:
        place = self.place
        parts = 1 << (place.parts - 1).bit_length()
        return {
            "TILE": self.config.vectors, "TILES": self.config.tiles, "PARTS": parts, "LAG": place.lag,
            "AHEAD": place.ahead,
        }  # fmt: skip

    def launch_of(self, kernel: Any, scalars: tuple[int | float, ...], constants: dict[str, Any]) -> Launch:
        launch = Launch(kernel, self.place.blocks, scalars, constants, self.config.warps, together=True)
        launch.options[REGISTERS] = self.config.registers
        return launch

    def runs(self, call: Callable[[], T], *tensors: Tensor | None) -> T | None:
        if self.refused:
            return None
        try:
            return super().runs(call, *tensors)
        except RuntimeError as error:
            if TOO_MANY_BLOCKS not in str(error):
                raise
        self.refused = True
        self.passes_on(f"{self.place.blocks} blocks cannot run at the same time here")
        return None


class ResidentForward(Resident, NarrowerForward):
    """One launch, and one before it that fills the packets with zeros."""

    def __init__(self, problem: Problem, config: ResidentConfig, processors: int) -> None:
        ForwardPlan.__init__(self, problem)
        Resident.__init__(self, problem, config, processors)
        view, output = problem.view, problem.output_layout
        assert output is not None
        channel = channel_vectors(problem)
        in_channel = channel % config.vectors == 0
        scalars = (
            self.place.vectors, view.group_channels, view.groups, problem.layout.sample // self.each,
            output.sample // self.each, *self.walk, channel,
            magic(channel // config.vectors if in_channel else channel), 1.0 / problem.reduced, self.eps,
            self.activation_parameter,
        )  # fmt: skip
        value, _ = activation(name_of(problem), problem.dtype)
        constants = {
            "VALUE": value, **self.alpha, "EVEN": self.place.even, "IN_CHANNEL": in_channel,
            "SHORT": not in_channel and channel < config.vectors, **self.constants,
        }  # fmt: skip
        self.launch = self.launch_of(resident.resident_forward, scalars, constants)

    def run(self, x: Tensor, y: Tensor, parameters: Tensors, given: Given, saved: Saved) -> None:
        packets = self.allocate(self.packets, (1,), torch.int64).zero_()
        self.launch(x, y, *parameters, *saved, packets)


class ResidentBackward(Resident, NarrowerBackward):
    """One launch, one before it that fills the packets with zeros, and one behind it that makes the parameters'
    gradients of p and q."""

    def __init__(self, problem: Problem, config: ResidentConfig, processors: int) -> None:
        BackwardPlan.__init__(self, problem)
        Resident.__init__(self, problem, config, processors)
        view, output, grad = problem.view, problem.output_layout, problem.grad_layout
        assert output is not None and grad is not None
        tiles = channel_vectors(problem) // config.vectors
        self.partials = PartialsShape(view, tiles, 0, last=False, per_batch=False)
        samples = (layout.sample // self.each for layout in (problem.layout, grad, output))
        scalars = (
            self.place.vectors, view.group_channels, view.groups, *samples, *self.walk, magic(tiles), tiles,
            self.partials.total, 1.0 / problem.reduced, self.activation_parameter,
        )  # fmt: skip
        _, derivative = activation(name_of(problem), problem.dtype)
        constants = {"DERIVATIVE": derivative, **self.alpha, "EVEN": self.place.even, **self.constants}
        self.launch = self.launch_of(resident_backward.resident_backward, scalars, constants)
        self.combinations: dict[tuple[bool, bool], Combination] = {}

    def combination(self, parameters: bool, modulation: bool) -> Combination:
        """The launch that makes the gradients of weight and bias, of scale and shift, or of all four."""
        sums = ParameterSums(self.partials, parameters, modulation)
        made = Combination(self, self.partials, 0, self.problem.reduced, sums)
        return self.combinations.setdefault((parameters, modulation), made)

    def run(self, data: Tensors, dx: Tensor | None, saved: Tensors, parameters: Tensors, grads: Tensors) -> None:
        wanted = (grads[0] is not None or grads[1] is not None, grads[2] is not None or grads[3] is not None)
        partials = self.workspace(2 * self.partials.total) if any(wanted) else None
        packets = self.allocate(self.packets, (1,), torch.int64).zero_()
        grad_output, input, *around = data
        grad_sum = around[1] if around else None
        self.launch(grad_output, input, dx, *parameters, *saved, partials, packets, grad_sum)
        if partials is not None:
            combine = self.combinations.get(wanted) or self.combination(*wanted)
            combine(partials, parameters, None, grads)


class ResidentSumBackward(SumBackward, ResidentBackward):
    """The same where the input is a sum, which has a gradient from elsewhere."""

    def __call__(  # type: ignore[override]
        self,
        operands: BackwardOperands,
        wanted: Wanted,
        post_add: Tensor | None,
        grad_sum: Tensor | None,
        gated: Gated | None = None,
        out: Tensor | None = None,
        post_out: Tensor | None = None,
    ) -> tuple[Gradients, SumGradients]:
        arguments = operands, wanted, post_add, grad_sum, gated, out, post_out
        tensors = operands.input, operands.grad_output, grad_sum, out
        found = self.runs(lambda: SumBackward.__call__(self, *arguments), *tensors)
        gradients: tuple[Gradients, SumGradients] = self.other(*arguments) if found is None else found
        return gradients
