"""Decode a photograph with the decoder of Stable Diffusion's VAE, as written with torch.nn and after convert_.

No trained weights are needed. The latents are the photograph's own: four principal components of each patch of 8 x 8
pixels. The decoder has random weights but for its last convolution, which a linear fit to the photograph gives; both
networks have the same one. What is compared is what conversion changes: time, memory, and the picture's last digits.

    python examples/vae_decode.py --output vae_decode.png

Each network decodes in a process of its own, whose peak of memory is then its own too. On a GPU the decoder has its
real widths and computes in bfloat16 and channels_last; on a CPU it is narrower. It ends with exit code 1 if the two
pictures differ by more than rounding explains.
"""

from __future__ import annotations

import multiprocessing
import resource
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import matplotlib as mpl
import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_sample_image
from torch import Tensor, nn

import fusednorm

PHOTOGRAPH = "china.jpg"
PATCH, LATENTS = 8, 4
#: The channels of the four resolutions, coarse to fine: Stable Diffusion's, and those for a CPU.
WIDTHS = {"cuda": (512, 512, 256, 128), "cpu": (128, 128, 64, 32)}
GROUPS = 32
#: How much the blocks of random weights add to what they pass on: more of it would be noise in the picture.
BRANCH = 0.1
#: The largest mean difference of pixels from 0 to 1 that rounding explains, in bfloat16 and in float32.
MOST_DIFFERENCE = {"cuda": 2e-2, "cpu": 1e-4}


def passing_on(convolution: nn.Conv2d) -> nn.Conv2d:
    """A convolution that hands on its first channels as they are."""
    nn.init.dirac_(convolution.weight)
    return convolution


class ResBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(GROUPS, inputs, eps=1e-6)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm2 = nn.GroupNorm(GROUPS, outputs, eps=1e-6)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.shortcut = passing_on(nn.Conv2d(inputs, outputs, 1)) if inputs != outputs else nn.Identity()
        with torch.no_grad():
            self.conv2.weight.mul_(BRANCH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.conv1(F.silu(self.norm1(x)))
        return self.shortcut(x) + self.conv2(F.silu(self.norm2(hidden)))


class Attention(nn.Module):
    """One head over all positions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(GROUPS, channels, eps=1e-6)
        self.qkv, self.output = nn.Conv2d(channels, 3 * channels, 1), nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.flatten(2).transpose(1, 2).unsqueeze(1) for part in self.qkv(self.norm(x)).chunk(3, 1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value)
        return x + self.output(mixed.squeeze(1).transpose(1, 2).reshape(x.shape))


class Decoder(nn.Module):
    """Images, eight times as high and wide as their latents."""

    def __init__(self, widths: tuple[int, ...], layers: int = 3) -> None:
        super().__init__()
        widest = widths[0]
        blocks: list[nn.Module] = [
            nn.Conv2d(LATENTS, widest, 3, padding=1),
            ResBlock(widest, widest),
            Attention(widest),
            ResBlock(widest, widest),
        ]
        for place, width in enumerate(widths):
            before = widths[max(place - 1, 0)]
            if place:
                blocks += [nn.Upsample(scale_factor=2.0), passing_on(nn.Conv2d(before, before, 3, padding=1))]
            blocks += [ResBlock(width if one else before, width) for one in range(layers)]
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Sequential(nn.GroupNorm(GROUPS, widths[-1], eps=1e-6), nn.SiLU())
        self.last = nn.Conv2d(widths[-1], 3, 3, padding=1)

    def features(self, latents: Tensor) -> Tensor:
        """What the last convolution sees."""
        output: Tensor = self.head(self.blocks(latents))
        return output

    def forward(self, latents: Tensor) -> Tensor:
        output: Tensor = self.last(self.features(latents))
        return output

    @torch.no_grad()
    def fit(self, latents: Tensor, image: Tensor) -> None:
        """Give the last convolution the weights that come closest to the image, by ridge regression."""
        columns = F.unfold(self.features(latents), 3, padding=1)[0].double()
        columns = torch.cat((columns, torch.ones_like(columns[:1])))
        gram = columns @ columns.T
        gram.diagonal().add_(1e-6 * gram.diagonal().mean())
        solved = torch.linalg.solve(gram, columns @ image.flatten(1).T.double()).float()
        self.last.weight.copy_(solved[:-1].T.reshape(self.last.weight.shape))
        self.last.bias.copy_(solved[-1])  # type: ignore[union-attr]


def photograph() -> Tensor:
    """(3, height, width), pixels from 0 to 1, both sizes multiples of the patch's."""
    pixels = torch.tensor(load_sample_image(PHOTOGRAPH)).permute(2, 0, 1).float() / 255
    height, width = (size // PATCH * PATCH for size in pixels.shape[1:])
    return pixels[:, :height, :width]


def encoded(image: Tensor) -> Tensor:
    """The principal components of an image's patches, (1, LATENTS, height / PATCH, width / PATCH), of unit variance."""
    patches = F.unfold(image[None], PATCH, stride=PATCH)[0].T
    patches = patches - patches.mean(0)
    _, vectors = torch.linalg.eigh(patches.T @ patches)  # in the order of growing variance
    components = patches @ vectors[:, -LATENTS:]
    components = components / components.std(0)
    return components.T.reshape(1, LATENTS, image.shape[1] // PATCH, image.shape[2] // PATCH)


@dataclass
class Decoded:
    """An image, the least time of decoding it, and the peak of the memory beyond weights and latents."""

    image: Tensor
    seconds: float
    megabytes: float
    report: str = ""


def decode(state: dict[str, Tensor], latents: Tensor, device: str, convert: bool, runs: int, threads: int) -> Decoded:
    """Build, convert and run the decoder; for a process of its own."""
    if threads:
        torch.set_num_threads(threads)
    network = Decoder(WIDTHS[device]).eval()
    network.load_state_dict(state)
    report = str(fusednorm.convert_(network)) if convert else ""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    network = network.to(device, dtype).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    latents = latents.to(device, dtype, memory_format=torch.channels_last)
    seconds = []
    with torch.inference_mode():
        before = held_megabytes(device)
        for _ in range(1 + runs):  # the first compiles or loads kernels
            begin = time.perf_counter()
            image = network(latents)
            if device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
    return Decoded(image[0].float().cpu(), min(seconds[1:]), peak_megabytes(device) - before, report)


def held_megabytes(device: str) -> float:
    if device == "cuda":
        return torch.cuda.memory_allocated() / 1e6
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def peak_megabytes(device: str) -> float:
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def picture(path: Path, panels: dict[str, Tensor]) -> None:
    """A PNG of images below one another, each with its title."""
    mpl.use("agg")
    from matplotlib import pyplot

    rows = -(-len(panels) // 2)
    figure, axes = pyplot.subplots(rows, 2, figsize=(11, 3.9 * rows), layout="constrained")
    for axis in axes.flat:
        axis.axis("off")
    for axis, (title, image) in zip(axes.flat, panels.items(), strict=False):
        axis.imshow(image.clamp(0, 1).permute(1, 2, 0).numpy())
        axis.set_title(title, fontsize=10)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main(
    seed: Annotated[int, typer.Option(help="Of the decoder's weights.")] = 0,
    runs: Annotated[int, typer.Option(min=1, help="Decodings of each network, of which the fastest counts.")] = 5,
    output: Annotated[Path, typer.Option(help="Where to write the picture.")] = Path("vae_decode.png"),
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU where torch has one.")] = "auto",
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0 leaves torch's choice.")] = 0,
) -> None:
    """Decode a photograph by a VAE's decoder, as written and after convert_, and compare."""
    if threads:
        torch.set_num_threads(threads)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    console = Console()
    image = photograph()
    latents = encoded(image)
    torch.manual_seed(seed)
    network = Decoder(WIDTHS[device]).eval()
    network.to(device).fit(latents.to(device), image.to(device))
    state = {name: tensor.cpu() for name, tensor in network.state_dict().items()}

    found: dict[str, Decoded] = {}
    for name, convert in (("torch.nn", False), ("fusednorm", True)):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            found[name] = process.submit(decode, state, latents, device, convert, runs, threads).result()
    plain, converted = found.values()
    print(converted.report)

    table = Table("", "ms", "peak MB", title=f"{PHOTOGRAPH}, {image.shape[2]} x {image.shape[1]}, decoded on {device}")
    for name, one in found.items():
        table.add_row(name, f"{1e3 * one.seconds:.1f}", f"{one.megabytes:.0f}")
    console.print(table)
    difference = (plain.image - converted.image).abs()
    panels = {"the photograph": image}
    panels |= {f"{name}: {1e3 * one.seconds:.0f} ms, {one.megabytes:.0f} MB": one.image for name, one in found.items()}
    magnified = 0.25 / max(float(difference.max()), 1e-12)
    panels[f"their difference, {magnified:.0f} times"] = magnified * difference
    picture(output, panels)
    mean = float(difference.mean())
    console.print(f"{output} shows both pictures, which differ by {mean:.1e} in the mean of pixels from 0 to 1.")
    console.print(
        f"After fusednorm.convert_(model) the decoder runs {plain.seconds / converted.seconds:.2f} times as fast, with "
        f"{converted.megabytes / plain.megabytes:.2f} of the memory."
    )
    if not mean <= MOST_DIFFERENCE[device]:
        console.print(f"FAILED: expected a mean difference of at most {MOST_DIFFERENCE[device]:.0e}.")
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
