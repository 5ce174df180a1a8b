"""ResNet-50, of version 1.5 as torchvision's: https://arxiv.org/abs/1512.03385."""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from fusednorm.bench.models.norms import Norms


class Bottleneck(nn.Module):
    """Three convolutions, each followed by a norm; the last ReLU comes after the sum with the input."""

    def __init__(self, norm: partial[nn.Module], inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1, self.norm1 = nn.Conv2d(inputs, width, 1, bias=False), norm(width, activation="relu")
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.norm2 = norm(width, activation="relu")
        self.conv3, self.norm3 = nn.Conv2d(width, outputs, 1, bias=False), norm(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm3(self.conv3(self.norm2(self.conv2(self.norm1(self.conv1(x))))))
        return F.relu(hidden + self.shortcut(x), inplace=True)


class ResNet(nn.Module):
    """Logits (N, classes) of images, with the norm of ``kind`` after every convolution."""

    def __init__(
        self,
        norms: Norms,
        kind: Literal["group_norm", "batch_norm"],
        blocks: tuple[int, ...] = (3, 4, 6, 3),
        width: int = 64,
        groups: int = 32,
        classes: int = 1000,
    ) -> None:
        super().__init__()
        norm = partial(norms.group_norm, groups) if kind == "group_norm" else partial(norms.batch_norm_2d)
        self.conv = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.norm = norm(width, activation="relu")
        stages: list[nn.Module] = []
        inputs = width
        for level, count in enumerate(blocks):
            for place in range(count):
                stages.append(Bottleneck(norm, inputs, width << level, 2 if level and not place else 1))
                inputs = 4 * width << level
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(inputs, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = F.max_pool2d(self.norm(self.conv(images)), 3, stride=2, padding=1)
        return self.head(self.stages(x).mean((2, 3)))
