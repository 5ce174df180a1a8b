"""A diffusion U-Net as Stable Diffusion 1.5's: https://arxiv.org/abs/2112.10752."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusednorm.bench.models.blocks import Attention, ResBlock, Upsample, sinusoids
from fusednorm.bench.models.norms import Norms


class TransformerBlock(nn.Module):
    """Self-attention, attention to the text and a gated GELU network, a LayerNorm before each."""

    def __init__(self, norms: Norms, channels: int, heads: int, context: int) -> None:
        super().__init__()
        self.norm1, self.attend = norms.layer_norm(channels), Attention(channels, heads)
        self.norm2, self.attend_text = norms.layer_norm(channels), Attention(channels, heads, context)
        self.norm3, self.widen = norms.layer_norm(channels), nn.Linear(channels, 8 * channels)
        self.narrow = nn.Linear(4 * channels, channels)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        x = x + self.attend_text(self.norm2(x), context)
        hidden, gate = self.widen(self.norm3(x)).chunk(2, dim=-1)
        return x + self.narrow(hidden * F.gelu(gate))


class SpatialTransformer(nn.Module):
    """A transformer block over the pixels of an image."""

    def __init__(self, norms: Norms, channels: int, heads: int, context: int, groups: int) -> None:
        super().__init__()
        self.norm = norms.group_norm(groups, channels, eps=1e-6)
        self.proj_in = nn.Conv2d(channels, channels, 1)
        self.block = TransformerBlock(norms, channels, heads, context)
        self.proj_out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        height, width = x.shape[2:]
        tokens = self.proj_in(self.norm(x)).permute(0, 2, 3, 1).flatten(1, 2)
        tokens = self.block(tokens, context)
        return x + self.proj_out(tokens.unflatten(1, (height, width)).permute(0, 3, 1, 2).contiguous())


class Stage(nn.Module):
    """A residual block, and attention where the stage has some."""

    def __init__(self, block: ResBlock, attention: SpatialTransformer | None) -> None:
        super().__init__()
        self.block, self.attention = block, attention

    def forward(self, x: Tensor, embedded: Tensor, context: Tensor) -> Tensor:
        x = self.block(x, embedded)
        if self.attention is not None:
            x = self.attention(x, context)
        return x


class UNet(nn.Module):
    """Noise (N, 4, H, W) from latents, timesteps (N,) and text (N, L, context).

    Each level has one residual block and transformer down and two up, where Stable Diffusion has two and three: the
    same widths and kinds of work at half the time of compilation.
    """

    def __init__(
        self,
        norms: Norms,
        channels: tuple[int, ...] = (320, 640, 1280, 1280),
        heads: int = 8,
        context: int = 768,
        groups: int = 32,
    ) -> None:
        super().__init__()
        self.base = channels[0]
        embedding = 4 * self.base
        self.embed = nn.Sequential(nn.Linear(self.base, embedding), nn.SiLU(), nn.Linear(embedding, embedding))
        self.conv_in = nn.Conv2d(4, self.base, 3, padding=1)
        last = len(channels) - 1

        def stage(inputs: int, level: int) -> Stage:
            outputs = channels[level]
            block = ResBlock(norms, inputs, outputs, groups, embedding=embedding)
            # The last level, of the fewest pixels, has no attention but in the middle.
            return Stage(block, SpatialTransformer(norms, outputs, heads, context, groups) if level < last else None)

        self.down, self.smaller, skipped, inputs = nn.ModuleList(), nn.ModuleList(), [self.base], self.base
        for level, outputs in enumerate(channels):
            self.down.append(stage(inputs, level))
            skipped.append(outputs)
            if level < last:
                self.smaller.append(nn.Conv2d(outputs, outputs, 3, stride=2, padding=1))
                skipped.append(outputs)
            inputs = outputs
        self.middle1 = ResBlock(norms, inputs, inputs, groups, embedding=embedding)
        self.middle2 = SpatialTransformer(norms, inputs, heads, context, groups)
        self.middle3 = ResBlock(norms, inputs, inputs, groups, embedding=embedding)
        self.up, self.larger = nn.ModuleList(), nn.ModuleList()
        for level in reversed(range(len(channels))):
            for _ in range(2):
                self.up.append(stage(inputs + skipped.pop(), level))
                inputs = channels[level]
            if level:
                self.larger.append(Upsample(inputs))
        self.norm_out = norms.group_norm(groups, inputs, activation="silu")
        self.conv_out = nn.Conv2d(inputs, 4, 3, padding=1)

    def forward(self, latents: Tensor, steps: Tensor, context: Tensor) -> Tensor:
        embedded = self.embed(sinusoids(steps, self.base, latents.dtype))
        x = self.conv_in(latents)
        skipped = [x]
        for level, stage in enumerate(self.down):
            x = stage(x, embedded, context)
            skipped.append(x)
            if level < len(self.smaller):
                x = self.smaller[level](x)
                skipped.append(x)
        x = self.middle3(self.middle2(self.middle1(x, embedded), context), embedded)
        for place, stage in enumerate(self.up):
            x = stage(torch.cat([x, skipped.pop()], dim=1), embedded, context)
            level, second = divmod(place, 2)
            if second and level < len(self.larger):
                x = self.larger[level](x)
        return self.conv_out(self.norm_out(x))
