"""The network that test_training.py and its processes train, and one step of its training."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusednorm import nn

SAMPLES, CHANNELS, CLASSES, STEPS = 4, 8, 3, 3


def network(fused: bool = True, seed: int = 0) -> torch.nn.Sequential:
    """Every family whose statistics no other sample changes, of fusednorm or of torch.nn, of equal weights."""
    torch.manual_seed(seed)
    blocks: list[torch.nn.Module] = [torch.nn.Conv2d(3, CHANNELS, 3, padding=1, bias=False)]
    if fused:
        blocks += [nn.GroupNorm(4, CHANNELS, activation="silu")]
    else:
        blocks += [torch.nn.GroupNorm(4, CHANNELS), torch.nn.SiLU()]
    blocks += [torch.nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False)]
    if fused:
        blocks += [nn.InstanceNorm2d(CHANNELS, affine=True, activation="relu")]
    else:
        blocks += [torch.nn.InstanceNorm2d(CHANNELS, affine=True), torch.nn.ReLU()]
    blocks += [torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten(), torch.nn.Linear(4 * CHANNELS, CHANNELS)]
    library: Any = nn if fused else torch.nn
    blocks += [library.LayerNorm(CHANNELS), torch.nn.Linear(CHANNELS, CHANNELS), library.RMSNorm(CHANNELS)]
    blocks += [torch.nn.Linear(CHANNELS, CLASSES)]
    return torch.nn.Sequential(*blocks)


def batch(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + count)
    images = 2 * torch.randn(SAMPLES, 3, 6, 5, generator=generator) + 1
    return images, torch.randint(CLASSES, (SAMPLES,), generator=generator)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, targets: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(images), targets)
    loss.backward()
    optimizer.step()
    return loss.detach()


def trained(model: torch.nn.Module) -> list[Tensor]:
    """The parameters after STEPS steps in one process."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for count in range(STEPS):
        step(model, optimizer, *batch(count))
    return [parameter.detach() for parameter in model.parameters()]
