"""The 3-D U-Net of nnU-Net and MONAI's DynUNet: https://doi.org/10.1038/s41592-020-01008-z."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fusednorm.bench.models.norms import Norms


def _convolutions(norms: Norms, inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    """Two convolutions, each followed by InstanceNorm and leaky ReLU."""
    layers: list[nn.Module] = []
    for place in range(2):
        step = 1 if place else stride
        layers.append(nn.Conv3d(outputs if place else inputs, outputs, 3, stride=step, padding=1))
        layers.append(norms.instance_norm_3d(outputs, affine=True, activation="leaky_relu"))
    return nn.Sequential(*layers)


class UNet3d(nn.Module):
    """Logits (N, classes, D, H, W) of volumes of one channel."""

    def __init__(
        self, norms: Norms, channels: tuple[int, ...] = (32, 64, 128, 256, 320, 320), classes: int = 3
    ) -> None:
        super().__init__()
        self.down = nn.ModuleList()
        inputs = 1
        for level, outputs in enumerate(channels):
            self.down.append(_convolutions(norms, inputs, outputs, 2 if level else 1))
            inputs = outputs
        self.larger, self.up = nn.ModuleList(), nn.ModuleList()
        for outputs in reversed(channels[:-1]):
            self.larger.append(nn.ConvTranspose3d(inputs, outputs, 2, stride=2))
            self.up.append(_convolutions(norms, 2 * outputs, outputs))
            inputs = outputs
        self.head = nn.Conv3d(inputs, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skipped = []
        for stage in self.down:
            x = stage(x)
            skipped.append(x)
        skipped.pop()
        for larger, stage in zip(self.larger, self.up, strict=True):
            x = stage(torch.cat([larger(x), skipped.pop()], dim=1))
        return self.head(x)
