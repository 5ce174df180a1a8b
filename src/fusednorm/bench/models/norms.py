"""The norm layers that a model is built with: torch's or fusednorm's, under the same constructors and state_dicts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

import fusednorm

# In place where torch's users write it so: torchvision's ResNet and nnU-Net.
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "relu": partial(F.relu, inplace=True),
    "leaky_relu": partial(F.leaky_relu, inplace=True),
}


class _Activated(nn.Module):
    """A norm of torch with the activation as a second operation after it.

    In one module, so that a model has the same modules and state_dict with either library.
    """

    def __init__(self, *arguments: Any, activation: str | None = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.activation = None if activation is None else _ACTIVATIONS[activation]

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = super().forward(input)
        return output if self.activation is None else self.activation(output)


class _GroupNorm(_Activated, nn.GroupNorm):
    pass


class _InstanceNorm3d(_Activated, nn.InstanceNorm3d):
    pass


class _BatchNorm2d(_Activated, nn.BatchNorm2d):
    pass


@dataclass(frozen=True)
class Norms:
    """Constructors of norm layers; the first three take ``activation``, which follows the norm directly."""

    group_norm: Callable[..., nn.Module]
    instance_norm_3d: Callable[..., nn.Module]
    batch_norm_2d: Callable[..., nn.Module]
    layer_norm: Callable[..., nn.Module]
    rms_norm: Callable[..., nn.Module]


TORCH = Norms(_GroupNorm, _InstanceNorm3d, _BatchNorm2d, nn.LayerNorm, nn.RMSNorm)
OURS = Norms(
    fusednorm.nn.GroupNorm,
    fusednorm.nn.InstanceNorm3d,
    fusednorm.nn.BatchNorm2d,
    fusednorm.nn.LayerNorm,
    fusednorm.nn.RMSNorm,
)
