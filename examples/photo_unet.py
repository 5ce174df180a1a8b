"""Restore a photograph with a small GroupNorm + SiLU U-Net: once as written with torch.nn, once after convert_.

The network learns to undo noise and a loss of resolution on crops of a photograph that scikit-learn carries, and then
restores a part of it that no crop has shown. Both trainings start from the same weights and see the same crops, so that
their loss curves lie on one another; only the time differs. The second network is the first one after one line,
``fusednorm.convert_(model)``.

    python examples/photo_unet.py --steps 300 --output photo_unet.png

It computes in channels_last, on a GPU in bfloat16. It ends with exit code 1 if either network does not restore the
photograph, or if the two restore it differently well.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import matplotlib as mpl
import torch
import torch.nn.functional as F
import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text
from sklearn.datasets import load_sample_image
from torch import Tensor, nn

import fusednorm

PHOTOGRAPH = "flower.jpg"
BATCH, CROP = 8, 96
#: The width of the photograph that is restored at the end, and left out of the crops.
KEPT = 192
#: Standard deviation of the noise, of pixels from 0 to 1, and the factor by which resolution is lost.
NOISE, FACTOR = 0.1, 2
WARM_UP = 3
#: Decibels by which a network must improve on its input, and by which two restorations may differ: rounding alone takes
#: two trainings apart.
LEAST_GAIN, MOST_DIFFERENCE = 2.0, 0.5
BARS = " ▁▂▃▄▅▆▇█"


def block(inputs: int, outputs: int) -> nn.Module:
    """A separable convolution, each of its two parts with a norm and an activation."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 1, bias=False),
        nn.GroupNorm(4, outputs),
        nn.SiLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1, groups=outputs, bias=False),
        nn.GroupNorm(4, outputs),
        nn.SiLU(),
    )


class UNet(nn.Module):
    """Three resolutions, the finer ones added to what comes back from the coarser ones; it predicts a correction."""

    def __init__(self, widths: tuple[int, int, int] = (16, 32, 64)) -> None:
        super().__init__()
        first, second, third = widths
        self.down = nn.ModuleList([block(3, first), block(first, second), block(second, third)])
        self.up = nn.ModuleList([block(third, second), block(second, first)])
        self.last = nn.Conv2d(first, 3, 3, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        fine = self.down[0](images)
        middle = self.down[1](F.avg_pool2d(fine, 2))
        coarse = self.down[2](F.avg_pool2d(middle, 2))
        middle = self.up[0](F.interpolate(coarse, scale_factor=2.0)) + middle
        fine = self.up[1](F.interpolate(middle, scale_factor=2.0)) + fine
        return images + self.last(fine)


@dataclass
class Photograph:
    """The part to learn from, and the part that is restored at the end; (3, height, width), pixels from 0 to 1."""

    learned: Tensor
    kept: Tensor

    @classmethod
    def load(cls) -> Photograph:
        pixels = torch.tensor(load_sample_image(PHOTOGRAPH)).permute(2, 0, 1).float() / 255
        height = pixels.shape[1] // 4 * 4
        middle = (pixels.shape[2] - KEPT) // 2
        kept = pixels[:, :height, middle : middle + KEPT]
        return cls(torch.cat((pixels[:, :, :middle], pixels[:, :, middle + KEPT :]), 2), kept)

    def crops(self, generator: torch.Generator) -> Tensor:
        """Random squares of the part to learn from."""
        height, width = self.learned.shape[1:]
        tops = torch.randint(height - CROP, (BATCH,), generator=generator).tolist()
        lefts = torch.randint(width - CROP, (BATCH,), generator=generator).tolist()
        squares = [self.learned[:, top : top + CROP, left : left + CROP] for top, left in zip(tops, lefts, strict=True)]
        return torch.stack(squares)


def degraded(images: Tensor, generator: torch.Generator) -> Tensor:
    """The images at half the resolution, enlarged again, with noise."""
    small = F.avg_pool2d(images, FACTOR)
    blurred = F.interpolate(small, scale_factor=float(FACTOR), mode="bilinear")
    return blurred + NOISE * torch.randn(blurred.shape, generator=generator)


def decibels(images: Tensor, target: Tensor) -> float:
    """The peak signal-to-noise ratio."""
    return -10 * float(F.mse_loss(images.float().clamp(0, 1), target).log10())


@dataclass
class Training:
    """A network in training, and what it has shown so far."""

    name: str
    network: nn.Module
    device: str
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=2e-3)

    def forward(self, images: Tensor) -> Tensor:
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            output: Tensor = self.network(images.to(self.device, memory_format=torch.channels_last))
        return output

    def step(self, images: Tensor, target: Tensor) -> float:
        """One step, and its loss."""
        loss = F.l1_loss(self.forward(images).float(), target.to(self.device))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def timed_step(self, images: Tensor, target: Tensor) -> None:
        begin = time.perf_counter()
        self.losses.append(self.step(images, target))  # item() waits for a GPU
        self.seconds += time.perf_counter() - begin

    @torch.no_grad()
    def restored(self, images: Tensor) -> Tensor:
        return self.forward(images).float().cpu()


def curve(losses: list[float], width: int) -> str:
    """The losses as bars, the mean of a few steps each, between 0 and the first."""
    if not losses:
        return ""
    share = max(1, -(-len(losses) // width))
    means = [sum(part) / len(part) for part in (losses[at : at + share] for at in range(0, len(losses), share))]
    return "".join(BARS[min(len(BARS) - 1, round(mean / max(means) * (len(BARS) - 1)))] for mean in means)


def progress(trainings: list[Training], steps: int) -> Group:
    table = Table("", "step", "loss", "ms a step", "seconds", title=f"Restoring {PHOTOGRAPH}")
    for one in trainings:
        done = len(one.losses)
        last = one.losses[-10:]
        pace = f"{1e3 * one.seconds / done:.1f}" if done else ""
        loss = f"{sum(last) / len(last):.4f}" if last else ""
        table.add_row(one.name, f"{done} of {steps}", loss, pace, f"{one.seconds:.1f}")
    curves = [Text(f"{one.name:>13} {curve(one.losses, 60)}") for one in trainings]
    return Group(table, *curves, Text())


def picture(path: Path, panels: dict[str, Tensor]) -> None:
    """A PNG of images side by side, each with its title."""
    mpl.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(panels), figsize=(3.2 * len(panels), 7.6), layout="constrained")
    for axis, (title, image) in zip(axes, panels.items(), strict=True):
        axis.imshow(image.clamp(0, 1).permute(1, 2, 0).numpy())
        axis.set_title(title, fontsize=10)
        axis.axis("off")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(
    steps: Annotated[int, typer.Option(min=1, help="Steps of each training.")] = 300,
    seed: Annotated[int, typer.Option(help="Of the weights, the crops and the noise.")] = 0,
    output: Annotated[Path, typer.Option(help="Where to write the picture.")] = Path("photo_unet.png"),
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU where torch has one.")] = "auto",
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0 leaves torch's choice.")] = 0,
) -> None:
    """Train a GroupNorm + SiLU U-Net to restore a photograph, as written and after convert_, and compare."""
    if threads:
        torch.set_num_threads(threads)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    console = Console()
    photograph = Photograph.load()

    def network() -> nn.Module:
        torch.manual_seed(seed)
        return UNet().to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    plain, converted = network(), network()
    print(fusednorm.convert_(converted))
    trainings = [Training("torch.nn", plain, device), Training("fusednorm", converted, device)]

    def batches(count: int, first: int) -> list[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(first)
        targets = [photograph.crops(generator) for _ in range(count)]
        return [(degraded(target, generator), target) for target in targets]

    begin = time.perf_counter()
    for one in trainings:  # in networks that are thrown away: kernels are compiled or loaded in the first steps
        spare = Training(one.name, network(), device)
        if one.network is converted:
            fusednorm.convert_(spare.network)
        for images, target in batches(WARM_UP, seed):
            spare.step(images, target)
    console.print(f"First steps of both, which compile or load kernels: {time.perf_counter() - begin:.1f} s")

    with Live(progress(trainings, steps), console=console, refresh_per_second=4) as live:
        for images, target in batches(steps, seed + 1):
            for one in trainings:  # in turn: whatever else this machine does slows both alike
                one.timed_step(images, target)
            live.update(progress(trainings, steps))

    target = photograph.kept[None]
    images = degraded(target, torch.Generator().manual_seed(seed))
    before = decibels(images, target)
    results = [one.restored(images) for one in trainings]
    after = [decibels(result, target) for result in results]
    difference = (results[0] - results[1]).abs()
    panels = {f"input, {before:.1f} dB": images[0]}
    panels |= {
        f"{one.name}, {db:.1f} dB, {one.seconds:.1f} s": result[0]
        for one, db, result in zip(trainings, after, results, strict=True)
    }
    panels["their difference, 20 times"] = 20 * difference[0]
    picture(output, panels)
    console.print(
        f"{output} shows the input ({before:.2f} dB), both results ({after[0]:.2f} and {after[1]:.2f} dB) and their "
        f"difference, {difference.mean():.4f} in the mean of pixels from 0 to 1."
    )
    ratio = trainings[0].seconds / trainings[1].seconds
    console.print(f"The whole training step runs {ratio:.2f} times as fast after fusednorm.convert_(model).")
    if min(after) < before + LEAST_GAIN or abs(after[0] - after[1]) > MOST_DIFFERENCE:
        console.print(
            f"FAILED: expected at least {before + LEAST_GAIN:.1f} dB of both, and no more than {MOST_DIFFERENCE} dB "
            "between them."
        )
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
