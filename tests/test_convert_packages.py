"""convert_ on models of other packages, where these are installed: random weights, small sizes, float64."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusednorm
from fusednorm.convert import sums

CHANNELS = {"block_out_channels": (32, 64), "norm_num_groups": 8, "layers_per_block": 1}


@pytest.fixture(autouse=True)
def reference(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.manual_seed(0)
    monkeypatch.setattr(sums, "LEAST_BYTES", 0)
    with fusednorm.use_instance("reference"):
        yield


def output_of(result: Any) -> Tensor:
    return result if isinstance(result, Tensor) else result[0]


def check(model: nn.Module, *inputs: Tensor, norms: int, activations: int, added: int = 0, left: int = 0) -> None:
    """As many norms, activations and sums as these are taken, and outputs and gradients stay."""
    model = model.double()
    before = copy.deepcopy(model)
    report = fusednorm.convert_(model)
    found = [len(each) for each in (report.converted, report.fused, report.summed, report.left)]
    assert found == [norms, activations, added, left], str(report)
    assert list(model.state_dict()) == list(before.state_dict())
    results = []
    for each in (before, model, pickle.loads(pickle.dumps(model))):
        output = output_of(each(*inputs))
        output.square().mean().backward()
        results.append((output, [parameter.grad for parameter in each.parameters()]))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-6, atol=1e-8)
    fusednorm.revert_(model)
    assert [type(module) for module in model.modules()] == [type(module) for module in before.modules()]


@pytest.mark.parametrize(
    ("name", "norms", "activations", "added"),
    [("resnet50", 53, 49, 16), ("resnet50_gn", 53, 49, 16), ("resnetv2_50", 49, 49, 0), ("convnext_tiny", 23, 0, 0)],
)
def test_timm(name: str, norms: int, activations: int, added: int) -> None:
    timm = pytest.importorskip("timm", exc_type=ImportError)
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    check(timm.create_model(name), x, norms=norms, activations=activations, added=added)


@pytest.mark.parametrize(
    ("name", "norms", "activations", "added"),
    [("resnet18", 20, 17, 8), ("mobilenet_v3_small", 34, 23, 0), ("densenet121", 121, 120, 0)],
)
def test_torchvision(name: str, norms: int, activations: int, added: int) -> None:
    models = pytest.importorskip("torchvision.models", exc_type=ImportError)
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    check(getattr(models, name)(weights=None).eval(), x, norms=norms, activations=activations, added=added)


@pytest.mark.parametrize(("kind", "activations", "added"), [("default", 17, 8), ("scale_shift", 9, 0)])
def test_diffusers_unet(kind: str, activations: int, added: int) -> None:
    diffusers = pytest.importorskip("diffusers", exc_type=ImportError)
    model = diffusers.UNet2DConditionModel(
        sample_size=16,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=4,
        resnet_time_scale_shift=kind,
        **CHANNELS,
    )
    inputs = torch.randn(1, 4, 16, 16).double(), torch.tensor([3]), torch.randn(1, 5, 16).double()
    check(_Returning(model), *inputs, norms=33, activations=activations, added=added)


class _Returning(nn.Module):
    """A model of diffusers that returns a tuple."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return self.model(*inputs, return_dict=False)


def test_diffusers_autoencoder() -> None:
    diffusers = pytest.importorskip("diffusers", exc_type=ImportError)
    model = diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, **CHANNELS
    )
    check(_Returning(model), torch.randn(1, 3, 32, 32).double(), norms=24, activations=18, added=0)


@pytest.mark.parametrize(("residual", "norms", "activations", "added"), [(False, 10, 10, 0), (True, 13, 10, 3)])
def test_monai(residual: bool, norms: int, activations: int, added: int) -> None:
    nets = pytest.importorskip("monai.networks.nets", exc_type=ImportError)
    model = nets.DynUNet(3, 1, 2, [3, 3, 3], [1, 2, 2], [2, 2], res_block=residual)
    check(model, torch.randn(1, 1, 16, 16, 16).double(), norms=norms, activations=activations, added=added)
