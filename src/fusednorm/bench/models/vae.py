"""The decoder of Stable Diffusion's VAE: https://arxiv.org/abs/2112.10752."""

from __future__ import annotations

from torch import Tensor, nn

from fusednorm.bench.models.blocks import Attention, ResBlock, Upsample
from fusednorm.bench.models.norms import Norms

EPS = 1e-6


class ImageAttention(nn.Module):
    """One head over all pixels; the norm sees (N, C, H W), as in diffusers."""

    def __init__(self, norms: Norms, channels: int, groups: int) -> None:
        super().__init__()
        self.norm = norms.group_norm(groups, channels, eps=EPS)
        self.attention = Attention(channels, heads=1, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x.flatten(2)).transpose(1, 2)
        return x + self.attention(tokens).transpose(1, 2).reshape(x.shape)


class VAEDecoder(nn.Module):
    """From latents (N, 4, H, W) to images, twice the size for each but the last of ``channels``."""

    def __init__(
        self, norms: Norms, channels: tuple[int, ...] = (512, 512, 256, 128), layers: int = 3, groups: int = 32
    ) -> None:
        super().__init__()
        widest = channels[0]
        self.conv_in = nn.Conv2d(4, widest, 3, padding=1)
        self.middle = nn.Sequential(
            ResBlock(norms, widest, widest, groups, EPS),
            ImageAttention(norms, widest, groups),
            ResBlock(norms, widest, widest, groups, EPS),
        )
        up: list[nn.Module] = []
        inputs = widest
        for place, outputs in enumerate(channels):
            for _ in range(layers):
                up.append(ResBlock(norms, inputs, outputs, groups, EPS))
                inputs = outputs
            if place + 1 < len(channels):
                up.append(Upsample(outputs))
        self.up = nn.Sequential(*up)
        self.norm_out = norms.group_norm(groups, inputs, eps=EPS, activation="silu")
        self.conv_out = nn.Conv2d(inputs, 3, 3, padding=1)

    def forward(self, latents: Tensor) -> Tensor:
        return self.conv_out(self.norm_out(self.up(self.middle(self.conv_in(latents)))))
