"""The example that ``make run`` ends with."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import fusednorm

FOLDER = Path(__file__).parents[1] / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.delitem(sys.modules, "photo_unet", raising=False)
    import photo_unet

    found: ModuleType = photo_unet
    return found


def test_every_norm_and_its_activation_is_converted(example: ModuleType) -> None:
    report = fusednorm.convert_(example.UNet())
    assert len(report.converted) == len(report.fused) == 10
    assert not report.left


def test_the_kept_part_is_in_no_crop(example: ModuleType) -> None:
    photograph = example.Photograph.load()
    learned, kept = photograph.learned.shape, photograph.kept.shape
    assert kept[2] == example.KEPT
    assert learned[2] + kept[2] == 640
    assert example.UNet()(photograph.kept[None, :, :16, :16]).shape == (1, 3, 16, 16)


def test_both_trainings_take_the_same_way(example: ModuleType) -> None:
    photograph, generator = example.Photograph.load(), torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    plain, fused = example.UNet((4, 4, 8)), example.UNet((4, 4, 8))
    fused.load_state_dict(plain.state_dict())
    fusednorm.convert_(fused)
    trainings = [example.Training(name, network, "cpu") for name, network in (("torch.nn", plain), ("ours", fused))]
    for _ in range(3):
        target = photograph.crops(generator)[:2]
        images = example.degraded(target, generator)
        for one in trainings:
            one.timed_step(images, target)
    losses = [one.losses for one in trainings]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_a_curve_falls_with_the_losses(example: ModuleType) -> None:
    bars = example.curve([1.0, 0.9, 0.5, 0.3, 0.1, 0.0], 3)
    assert len(bars) == 3
    assert [example.BARS.index(bar) for bar in bars] == sorted((example.BARS.index(bar) for bar in bars), reverse=True)
    assert example.curve([], 3) == ""


def test_a_picture_of_all_panels(example: ModuleType, tmp_path: Path) -> None:
    example.picture(tmp_path / "out.png", {"input": torch.rand(3, 8, 4), "result": torch.rand(3, 8, 4)})
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
