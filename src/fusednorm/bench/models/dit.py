"""The diffusion transformer DiT-XL/2, whose LayerNorms are modulated (adaLN): https://arxiv.org/abs/2212.09748."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from fusednorm.bench.models.blocks import Attention, sinusoids
from fusednorm.bench.models.norms import Norms

FREQUENCIES = 256


def _plain_norm(norms: Norms, width: int) -> nn.Module:
    return norms.layer_norm(width, elementwise_affine=False, eps=1e-6)


def _modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale[:, None]) + shift[:, None]


class Block(nn.Module):
    """Attention and a GELU network, each modulated before and gated after.

    DiT begins with gates of zero, behind which nothing of a block would show in the result that is checked; these are
    drawn as the other weights.
    """

    def __init__(self, norms: Norms, width: int, heads: int) -> None:
        super().__init__()
        self.modulation = nn.Linear(width, 6 * width)
        self.norm1, self.attend = _plain_norm(norms, width), Attention(width, heads, bias=True)
        self.norm2, self.widen = _plain_norm(norms, width), nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition).chunk(6, dim=1)
        x = x + gate1[:, None] * self.attend(_modulated(self.norm1(x), shift1, scale1))
        hidden = F.gelu(self.widen(_modulated(self.norm2(x), shift2, scale2)), approximate="tanh")
        return x + gate2[:, None] * self.narrow(hidden)


class DiT(nn.Module):
    """Noise (N, L, patches' values) from latents (N, 4, H, W), timesteps (N,) and classes (N,).

    8 blocks where DiT-XL has 28: all are alike, and each costs time to compile.
    """

    def __init__(self, norms: Norms, width: int = 1152, heads: int = 16, blocks: int = 8, classes: int = 1000) -> None:
        super().__init__()
        self.patches = nn.Conv2d(4, width, 2, stride=2)
        self.steps = nn.Sequential(nn.Linear(FREQUENCIES, width), nn.SiLU(), nn.Linear(width, width))
        self.classes = nn.Embedding(classes, width)
        self.blocks = nn.ModuleList(Block(norms, width, heads) for _ in range(blocks))
        self.modulation, self.norm = nn.Linear(width, 2 * width), _plain_norm(norms, width)
        self.head = nn.Linear(width, 2 * 2 * 4)

    def forward(self, latents: Tensor, steps: Tensor, labels: Tensor) -> Tensor:
        x = self.patches(latents).flatten(2).transpose(1, 2)
        condition = F.silu(self.steps(sinusoids(steps, FREQUENCIES, x.dtype)) + self.classes(labels))
        for block in self.blocks:
            x = block(x, condition)
        shift, scale = self.modulation(condition).chunk(2, dim=1)
        return self.head(_modulated(self.norm(x), shift, scale))
