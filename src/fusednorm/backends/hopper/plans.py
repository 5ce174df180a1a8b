"""Plans of the kernels that hold data on the chip."""

from __future__ import annotations

import logging
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fusednorm.backends.hopper.config import ResidentConfig, channel_vectors, spread
from fusednorm.backends.hopper.kernels import resident
from fusednorm.backends.hopper.kernels.activations import value_of
from fusednorm.backends.triton import instances as triton
from fusednorm.backends.triton.launch import Launch
from fusednorm.backends.triton.plans.base import ForwardPlan, Given, Saved, Tensors
from fusednorm.operands import Operands, Results
from fusednorm.private.triton_names import REGISTERS, TOO_MANY_BLOCKS
from fusednorm.problem import DTYPE_BYTES, Problem

logger = logging.getLogger(__name__)


def magic(divisor: int) -> int:
    """ceil(2^31 / divisor), by which the kernel divides."""
    return -(-(1 << 31) // divisor)


class ResidentForward(ForwardPlan):
    """One launch, and one before it that fills the packets with zeros.

    A call whose tensors do not begin at 16 bytes, or whose blocks cannot all run at the same time, since other programs
    share the GPU, runs on the Triton instance that the problem would have without this backend.
    """

    keeps_statistics = False

    def __init__(self, problem: Problem, config: ResidentConfig, processors: int) -> None:
        super().__init__(problem)
        place = spread(problem, config, processors)
        assert place is not None
        self.problem = problem
        view, output = problem.view, problem.output_layout
        assert output is not None
        each = 16 // DTYPE_BYTES[problem.dtype]
        parts, blocks = place.parts, place.blocks
        channel = channel_vectors(problem)
        in_channel = channel % config.vectors == 0
        scalars = (
            place.vectors, view.group_channels, view.groups, problem.layout.sample // each, output.sample // each,
            view.samples * view.groups, parts, place.waves, blocks // parts, blocks % parts, magic(view.groups),
            channel, magic(channel // config.vectors if in_channel else channel), 1.0 / problem.reduced, self.eps,
            self.activation_parameter,
        )  # fmt: skip
        name = None if problem.norm.activation is None else problem.norm.activation.name
        constants = {
            "VALUE": value_of(name, problem.dtype),
            **self.alpha,
            "EVEN": place.even,
            "IN_CHANNEL": in_channel,
            "SHORT": not in_channel and channel < config.vectors,
            "TILE": config.vectors,
            "TILES": config.tiles,
            "PARTS": 1 << (parts - 1).bit_length(),
            "LAG": place.lag,
            "AHEAD": place.ahead,
        }
        kernel = resident.resident_forward
        self.launch = Launch(kernel, blocks, scalars, constants, config.warps, together=True)
        self.launch.options[REGISTERS] = config.registers
        self.packets = (resident.PLACES.value * blocks * 2,)
        self.refused, self.instance = False, triton.choose(problem)

    @cached_property
    def other(self) -> Any:
        return self.instance.plan(self.problem)

    def __call__(
        self,
        operands: Operands,
        statistics: bool = True,
        out: Tensor | None = None,
        mean_out: Tensor | None = None,
        rstd_out: Tensor | None = None,
    ) -> Results:
        aligned = not ((operands.input.data_ptr() | (0 if out is None else out.data_ptr())) & 15)
        if aligned and not self.refused:
            try:
                return super().__call__(operands, statistics, out, mean_out, rstd_out)
            except RuntimeError as error:
                if TOO_MANY_BLOCKS not in str(error):
                    raise
                self.refused = True
                logger.warning(
                    "%d blocks cannot run at the same time here; %s runs", self.launch.programs, self.instance.name
                )
        results: Results = self.other(operands, statistics, out, mean_out, rstd_out)
        return results

    def run(self, x: Tensor, y: Tensor, parameters: Tensors, given: Given, saved: Saved) -> None:
        packets = self.allocate(self.packets, (1,), torch.int64).zero_()
        self.launch(x, y, *parameters, *saved, packets)
