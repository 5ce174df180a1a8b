"""ConvNeXt-T: https://arxiv.org/abs/2201.03545. LayerNorm over channels is written with permutes, as in torchvision."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusednorm.bench.models.norms import Norms

EPS = 1e-6


class ChannelNorm(nn.Module):
    """LayerNorm over dimension 1."""

    def __init__(self, norms: Norms, channels: int) -> None:
        super().__init__()
        self.norm = norms.layer_norm(channels, eps=EPS)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Block(nn.Module):
    """A depthwise convolution, then the norm and two linear layers over channels."""

    def __init__(self, norms: Norms, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = norms.layer_norm(channels, eps=EPS)
        self.widen, self.narrow = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)
        # Training starts from 1e-6, by which the blocks would hardly show in the result that is checked.
        self.scale = nn.Parameter(torch.full((channels, 1, 1), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.conv(x).permute(0, 2, 3, 1))
        hidden = self.narrow(F.gelu(self.widen(hidden))).permute(0, 3, 1, 2)
        return x + self.scale * hidden


class ConvNeXt(nn.Module):
    """Logits (N, classes) of images."""

    def __init__(
        self,
        norms: Norms,
        blocks: tuple[int, ...] = (3, 3, 9, 3),
        channels: tuple[int, ...] = (96, 192, 384, 768),
        classes: int = 1000,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, channels[0], 4, stride=4), ChannelNorm(norms, channels[0])]
        for level, count in enumerate(blocks):
            if level:
                before, after = channels[level - 1], channels[level]
                layers += [ChannelNorm(norms, before), nn.Conv2d(before, after, 2, stride=2)]
            layers += [Block(norms, channels[level]) for _ in range(count)]
        self.layers = nn.Sequential(*layers)
        self.norm = norms.layer_norm(channels[-1], eps=EPS)
        self.head = nn.Linear(channels[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.norm(self.layers(images).mean((2, 3))))
