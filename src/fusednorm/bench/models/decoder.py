"""A language model's decoder with RMSNorm, rotary positions and SwiGLU, as Llama: https://arxiv.org/abs/2302.13971."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusednorm.bench.models.norms import Norms

EPS = 1e-5


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads (B, H, L, D) turned by their positions, computed in float32 and returned in their dtype."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class Block(nn.Module):
    """Causal attention and a SwiGLU network, an RMSNorm before each."""

    def __init__(self, norms: Norms, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = norms.rms_norm(width, eps=EPS), norms.rms_norm(width, eps=EPS)
        self.project = nn.Linear(width, 3 * width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.gate, self.widen = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.narrow = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        projected = self.project(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = projected.transpose(1, 3).unbind(2)
        mixed = F.scaled_dot_product_attention(
            _rotated(query, cos, sin), _rotated(key, cos, sin), value, is_causal=True
        )
        x = x + self.output(mixed.transpose(1, 2).flatten(2))
        hidden = self.norm2(x)
        return x + self.narrow(F.silu(self.gate(hidden)) * self.widen(hidden))


class Decoder(nn.Module):
    """Logits (B L, vocabulary) of tokens (B, L)."""

    def __init__(
        self,
        norms: Norms,
        width: int = 2048,
        heads: int = 16,
        hidden: int = 5632,
        blocks: int = 8,
        vocabulary: int = 32000,
    ) -> None:
        super().__init__()
        self.pairs = width // heads // 2
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(norms, width, heads, hidden) for _ in range(blocks))
        self.norm = norms.rms_norm(width, eps=EPS)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        frequencies = 10000.0 ** (-torch.arange(self.pairs, device=tokens.device) / self.pairs)
        angles = torch.arange(tokens.shape[1], device=tokens.device)[:, None] * frequencies
        cos, sin = angles.cos(), angles.sin()
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x)).flatten(0, 1)
