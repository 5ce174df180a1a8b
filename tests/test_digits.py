"""A network on real handwritten digits learns as well with fusednorm.nn as with torch.nn."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusednorm

EPOCHS, BATCH, GROUPS = 3, 32, 8


def torch_norm(channels: int) -> nn.Module:
    return nn.Sequential(nn.GroupNorm(GROUPS, channels), nn.SiLU())


def fused_norm(channels: int) -> nn.Module:
    # In a Sequential as above, so that the parameters of both networks have the same names.
    return nn.Sequential(fusednorm.nn.GroupNorm(GROUPS, channels, activation="silu"))


def network(fused: bool) -> nn.Module:
    norm = fused_norm if fused else torch_norm
    return nn.Sequential(
        nn.Upsample(scale_factor=2.0, mode="bilinear"),
        nn.Conv2d(1, 32, 3, padding=1, bias=False),
        norm(32),
        nn.Conv2d(32, 64, 3, padding=1, bias=False),
        norm(64),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1, bias=False),
        norm(64),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 10),
    )


def trained(model: nn.Module, images: Tensor, labels: Tensor) -> list[float]:
    """The mean loss of each epoch; every model sees the same batches."""
    steps = EPOCHS * -(-len(labels) // BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps)
    losses = []
    for epoch in range(EPOCHS):
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch)).split(BATCH)
        total = 0.0
        for chosen in order:
            loss = F.cross_entropy(model(images[chosen]), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item()
        losses.append(total / len(order))
    return losses


def test_digits_are_learned_as_well() -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    digits = datasets.load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(digits.target)
    torch.manual_seed(0)
    plain, fused = network(False), network(True)
    fused.load_state_dict(plain.state_dict())
    half = len(labels) // 2
    losses = [trained(model, images[:half], labels[:half]) for model in (plain, fused)]
    with torch.no_grad():
        right = [int((model(images[half:]).argmax(1) == labels[half:]).sum()) for model in (plain, fused)]
    tested = len(labels) - half
    assert min(right) > 0.9 * tested
    mean = sum(right) / 2 / tested
    assert abs(right[0] - right[1]) <= 3 * (2 * mean * (1 - mean) * tested) ** 0.5  # three standard errors
    assert losses[0][0] == pytest.approx(losses[1][0], rel=0.02)
