"""One run of a network: a forward without gradients, or a training step."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Mode = Literal["eager", "default", "reduce-overhead"]
# So small that the weights, and with them the work of every step, stay as they are.
LEARNING_RATE = 1e-9


class Step:
    """A call runs the network once; with a target it computes loss, backward and a step of SGD with momentum as well.

    The network is compiled at its first run, specialized to the shapes, and the loss and the optimizer are eager, as
    most programs have it. ``classes`` 0 makes the loss the mean square and otherwise the cross entropy.
    """

    def __init__(
        self, network: nn.Module, inputs: tuple[Tensor, ...], target: Tensor | None, classes: int, mode: Mode
    ) -> None:
        self.network = network.eval() if target is None else network.train()
        self.inputs, self.target, self.classes, self.mode = inputs, target, classes, mode
        self.run = network if mode == "eager" else torch.compile(network, mode=mode, fullgraph=True, dynamic=False)
        self.optimizer = torch.optim.SGD(network.parameters(), LEARNING_RATE, momentum=0.9, foreach=True)

    def __call__(self) -> None:
        self._begin()
        if self.target is None:
            with torch.no_grad():
                self.run(*self.inputs)
        else:
            self._differentiate(self.target)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def results(self) -> list[Tensor]:
        """The output, or the gradients of all parameters, in memory of their own; the weights stay as they are."""
        self._begin()
        if self.target is None:
            with torch.no_grad():
                return [self.run(*self.inputs).clone()]
        self._differentiate(self.target)
        found = [parameter.grad.clone() for parameter in self.network.parameters() if parameter.grad is not None]
        self.optimizer.zero_grad()
        return found

    def _begin(self) -> None:
        if self.mode == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()  # the outputs of the step before may be overwritten

    def _differentiate(self, target: Tensor) -> None:
        output = self.run(*self.inputs).float()
        loss = F.cross_entropy(output, target) if self.classes else F.mse_loss(output, target)
        loss.backward()
