"""Blocks that several architectures share."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusednorm.bench.models.norms import Norms


class ResBlock(nn.Module):
    """The residual block of latent diffusion, GroupNorm and SiLU before each convolution; ``embedding`` for a U-Net."""

    def __init__(
        self, norms: Norms, inputs: int, outputs: int, groups: int, eps: float = 1e-5, embedding: int = 0
    ) -> None:
        super().__init__()
        self.norm1 = norms.group_norm(groups, inputs, eps=eps, activation="silu")
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.embedding = nn.Linear(embedding, outputs) if embedding else None
        self.norm2 = norms.group_norm(groups, outputs, eps=eps, activation="silu")
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, embedded: Tensor | None = None) -> Tensor:
        hidden = self.conv1(self.norm1(x))
        if self.embedding is not None and embedded is not None:
            hidden = hidden + self.embedding(F.silu(embedded))[:, :, None, None]
        return self.shortcut(x) + self.conv2(self.norm2(hidden))


class Upsample(nn.Module):
    """Twice the size by the nearest pixel, then a convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class Attention(nn.Module):
    """Attention of tokens (B, L, C) to themselves, or to ``context``."""

    def __init__(self, channels: int, heads: int, context: int = 0, bias: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(channels, channels, bias=bias)
        self.key = nn.Linear(context or channels, channels, bias=bias)
        self.value = nn.Linear(context or channels, channels, bias=bias)
        self.output = nn.Linear(channels, channels)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        source = x if context is None else context
        query, key, value = (
            projected.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for projected in (self.query(x), self.key(source), self.value(source))
        )
        mixed = F.scaled_dot_product_attention(query, key, value)
        return self.output(mixed.transpose(1, 2).flatten(2))


def sinusoids(steps: Tensor, channels: int, dtype: torch.dtype) -> Tensor:
    """The embedding (B, channels) of timesteps (B,), computed in float32."""
    half = channels // 2
    frequencies = torch.exp(-math.log(10000) * torch.arange(half, device=steps.device) / half)
    angles = steps[:, None].float() * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=1).to(dtype)
