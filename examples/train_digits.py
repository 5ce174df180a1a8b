"""Train a small GroupNorm + SiLU network on real handwritten digits: once with torch.nn, once with fusednorm.nn.

Both start from the same weights and see the same batches in the same order, so that their loss curves should lie on one
another; only the time may differ. The digits are the 1797 images of 8 x 8 pixels that scikit-learn carries.

    python examples/train_digits.py --epochs 10

It ends with exit code 1 if either network stays at or below 97 % on the images that it was not trained on, or if the
two accuracies differ by more than chance explains.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

import fusednorm

GROUPS = 8
BATCH_SIZE = 32
REQUIRED_ACCURACY = 0.97


def torch_norm(channels: int) -> nn.Module:
    return nn.Sequential(nn.GroupNorm(GROUPS, channels), nn.SiLU())


def fused_norm(channels: int) -> nn.Module:
    # In a Sequential as above, so that the parameters of both networks have the same names.
    return nn.Sequential(fusednorm.nn.GroupNorm(GROUPS, channels, activation="silu"))


class Network(nn.Module):
    """Three convolutions, each followed by GroupNorm and SiLU, then a linear layer."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        norm = fused_norm if fused else torch_norm
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1, bias=False),
            norm(32),
            nn.Conv2d(32, 64, 3, padding=1, bias=False),
            norm(64),
            nn.MaxPool2d(2),
            nn.Conv2d(64, 64, 3, padding=1, bias=False),
            norm(64),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        self.classify = nn.Linear(64 * 4 * 4, 10)

    def forward(self, images: Tensor) -> Tensor:
        # Twice the size in each direction: 8 x 8 is so small that a network of this depth sees only edges.
        features = self.features(F.interpolate(images, scale_factor=2.0, mode="bilinear"))
        logits: Tensor = self.classify(features)
        return logits


@dataclass
class Data:
    images: Tensor
    labels: Tensor

    def batches(self, seed: int) -> list[tuple[Tensor, Tensor]]:
        """The data in batches, in an order that depends on the seed alone."""
        order = torch.randperm(len(self.labels), generator=torch.Generator().manual_seed(seed))
        return [(self.images[chosen], self.labels[chosen]) for chosen in order.split(BATCH_SIZE)]


def load(seed: int) -> tuple[Data, Data]:
    """Training and test data, half of the images each; pixels scaled from 0..16 to 0..1."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    training, testing = train_test_split(range(len(labels)), test_size=0.5, random_state=seed, stratify=labels)
    return Data(images[training], labels[training]), Data(images[testing], labels[testing])


@dataclass
class Run:
    """A network in training, and what it has shown so far."""

    name: str
    network: Network
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def train_epoch(self, batches: list[tuple[Tensor, Tensor]]) -> None:
        start = time.perf_counter()
        total = 0.0
        for images, labels in batches:
            loss = F.cross_entropy(self.network(images), labels)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            total += loss.item()
        self.seconds += time.perf_counter() - start
        self.losses.append(total / len(batches))

    @torch.no_grad()
    def accuracy(self, data: Data) -> float:
        return (self.network(data.images).argmax(dim=1) == data.labels).double().mean().item()


def start(name: str, fused: bool, initial: dict[str, Tensor], steps: int) -> Run:
    network = Network(fused)
    network.load_state_dict(initial)
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps)
    return Run(name, network, optimizer, schedule)


def warm_up(fused: bool, batches: list[tuple[Tensor, Tensor]]) -> float:
    """Seconds of the first steps of a network that is thrown away: kernels are compiled or loaded in them."""
    begin = time.perf_counter()
    network = Network(fused)
    # The last batch is a smaller one, which may take other kernels.
    for images, labels in (batches[0], batches[-1]):
        F.cross_entropy(network(images), labels).backward()
    return time.perf_counter() - begin


def expected_difference(accuracies: list[float], count: int) -> float:
    """Two standard errors of the difference of two accuracies measured on `count` images."""
    mean = sum(accuracies) / len(accuracies)
    return 2 * (2 * mean * (1 - mean) / count) ** 0.5


def main(
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training images.")] = 10,
    seed: Annotated[int, typer.Option(help="Of the weights, the split and the order of the batches.")] = 0,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0 leaves torch's choice.")] = 0,
) -> None:
    """Train a GroupNorm + SiLU network on handwritten digits with torch.nn and with fusednorm.nn, and compare."""
    if threads:
        torch.set_num_threads(threads)
    console = Console()
    training, testing = load(seed)
    torch.manual_seed(seed)
    initial = Network(fused=False).state_dict()
    steps = epochs * len(training.batches(seed))
    runs = [start("torch.nn", False, initial, steps), start("fusednorm.nn", True, initial, steps)]
    first = [warm_up(fused, training.batches(seed)) for fused in (False, True)]
    counts = f"{len(training.labels)} images to train on, {len(testing.labels)} to test on"
    console.print(f"{counts}, {torch.get_num_threads()} threads")

    curve = Table("epoch", *(f"loss, {run.name}" for run in runs), "difference", title="Training loss")
    for epoch in range(epochs):
        batches = training.batches(seed + epoch)
        # One epoch of each in turn: whatever else this machine does then slows both alike.
        for run in runs:
            run.train_epoch(batches)
        losses = [run.losses[-1] for run in runs]
        curve.add_row(str(epoch + 1), *(f"{loss:.4f}" for loss in losses), f"{losses[1] - losses[0]:+.4f}")
    console.print(curve)

    accuracies = [run.accuracy(testing) for run in runs]
    summary = Table("", "test accuracy", "training, s", "first two steps, s", title="Result")
    for run, accuracy, seconds in zip(runs, accuracies, first, strict=True):
        summary.add_row(run.name, f"{accuracy:.2%}", f"{run.seconds:.2f}", f"{seconds:.2f}")
    console.print(summary)
    console.print(f"The whole training runs {runs[0].seconds / runs[1].seconds:.2f} times as fast with fusednorm.nn.")

    allowed = expected_difference(accuracies, len(testing.labels))
    difference = abs(accuracies[0] - accuracies[1])
    if min(accuracies) <= REQUIRED_ACCURACY:
        console.print(f"FAILED: {min(accuracies):.2%} on the test images; over {REQUIRED_ACCURACY:.0%} is expected.")
        raise typer.Exit(1)
    if difference > allowed:
        console.print(f"FAILED: the accuracies differ by {difference:.2%}; chance explains {allowed:.2%}.")
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
