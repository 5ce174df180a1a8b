"""The keyword arguments that all overloads of the public functions take; on the others depends what a call returns."""

from __future__ import annotations

from typing import TypedDict

from torch import Tensor

from fusednorm.activations import Activation


class Parts(TypedDict, total=False):
    """What every function takes beside the arguments of torch's own, and what does not change what it returns."""

    activation: str | Activation | None
    channel_dim: int
    scale: Tensor | None
    shift: Tensor | None
    pre_add: Tensor | None
    pre_gate: Tensor | None
    post_add: Tensor | None
