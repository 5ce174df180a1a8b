"""The example that decodes a photograph."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import fusednorm

FOLDER = Path(__file__).parents[1] / "examples"
WIDTHS = (64, 32)


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.delitem(sys.modules, "vae_decode", raising=False)
    import vae_decode

    found: ModuleType = vae_decode
    return found


def test_every_norm_is_converted_and_every_activation_fused(example: ModuleType) -> None:
    report = fusednorm.convert_(example.Decoder(example.WIDTHS["cpu"]))
    assert len(report.converted) == 30
    assert len(report.fused) == 29  # attention has a norm without one
    assert not report.left


def test_latents_are_uncorrelated(example: ModuleType) -> None:
    image = example.photograph()
    assert image.shape == (3, 424, 640)
    latents = example.encoded(image)
    assert latents.shape == (1, 4, 53, 80)
    torch.testing.assert_close(torch.corrcoef(latents[0].flatten(1)), torch.eye(4), atol=1e-4, rtol=0)


def test_the_fitted_decoder_shows_the_picture_before_and_after_conversion(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(example.WIDTHS, "cpu", WIDTHS)
    torch.manual_seed(0)
    image = torch.nn.functional.avg_pool2d(example.photograph()[:, :128, :128], 4)
    latents = torch.nn.functional.interpolate(example.encoded(example.photograph()[:, :128, :128]), (16, 16))
    network = example.Decoder(WIDTHS).eval()
    network.fit(latents, image)
    plain, converted = (
        example.decode(network.state_dict(), latents, "cpu", convert, runs=1, threads=0) for convert in (False, True)
    )
    assert torch.nn.functional.mse_loss(plain.image, image) < 0.5 * image.var()
    torch.testing.assert_close(plain.image, converted.image, atol=1e-4, rtol=0)
    assert "norms converted" in converted.report
    assert not plain.report
    assert plain.seconds > 0


def test_a_picture_of_all_panels(example: ModuleType, tmp_path: Path) -> None:
    example.picture(
        tmp_path / "out.png", {"one": torch.rand(3, 8, 4), "two": torch.rand(3, 8, 4), "three": torch.rand(3, 8, 4)}
    )
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
