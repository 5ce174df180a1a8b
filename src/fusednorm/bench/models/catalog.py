"""The models of the suite, each in its real size and in a quick one for a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from fusednorm.bench.models.convnext import ConvNeXt
from fusednorm.bench.models.decoder import Decoder
from fusednorm.bench.models.dit import DiT
from fusednorm.bench.models.norms import Norms
from fusednorm.bench.models.resnet import ResNet
from fusednorm.bench.models.unet import UNet
from fusednorm.bench.models.unet3d import UNet3d
from fusednorm.bench.models.vae import VAEDecoder

MODELS = "models"
ModelLayout = Literal["nchw", "nhwc", "rows"]
ModelDirection = Literal["inference", "training"]
_MEMORY_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


@dataclass(frozen=True)
class Input:
    """An input of normal numbers, or of whole numbers below ``below``."""

    shape: tuple[int, ...]
    below: int = 0

    def draw(self, generator: torch.Generator) -> Tensor:
        if self.below:
            return torch.randint(self.below, self.shape, generator=generator, device=generator.device)
        return torch.randn(self.shape, generator=generator, device=generator.device)


@dataclass(frozen=True)
class Model:
    """A network, its inputs and its loss: cross entropy over ``classes``, or the mean square where there are none.

    ``direction`` is what the model is mostly run for, and measured in unless another direction is asked for. A model
    without ``images`` has tokens, whose only layout is "rows".
    """

    name: str
    network: Callable[[Norms], nn.Module]
    inputs: tuple[Input, ...]
    direction: ModelDirection
    classes: int = 0
    images: bool = True
    trained: bool = True

    @property
    def layouts(self) -> tuple[ModelLayout, ...]:
        return ("nchw", "nhwc") if self.images else ("rows",)

    def memory_format(self, layout: ModelLayout) -> torch.memory_format:
        """The format of weights and images in a layout."""
        return _MEMORY_FORMATS[len(self.inputs[0].shape)] if layout == "nhwc" else torch.contiguous_format


def _images(*shape: int) -> tuple[Input, ...]:
    return (Input(shape),)


def _vae(pixels: int) -> Model:
    return Model(
        f"vae-decoder-{pixels}", VAEDecoder, _images(1, 4, pixels // 8, pixels // 8), "inference", trained=False
    )


def _resnet(name: str, kind: Literal["group_norm", "batch_norm"]) -> Model:
    return Model(name, partial(ResNet, kind=kind), _images(32, 3, 224, 224), "training", classes=1000)


FULL: tuple[Model, ...] = (
    _vae(512),
    _vae(1024),
    Model("unet", UNet, (Input((2, 4, 64, 64)), Input((2,), 1000), Input((2, 77, 768))), "inference"),
    _resnet("resnet50-gn", "group_norm"),
    _resnet("resnet50-bn", "batch_norm"),
    Model("convnext", ConvNeXt, _images(32, 3, 224, 224), "training", classes=1000),
    Model("unet-3d", UNet3d, _images(2, 1, 128, 128, 128), "training", classes=3),
    Model("dit", DiT, (Input((32, 4, 32, 32)), Input((32,), 1000), Input((32,), 1000)), "training", images=False),
    Model("llm", Decoder, (Input((4, 2048), 32000),), "training", classes=32000, images=False),
)


def _quick_resnet(name: str, kind: Literal["group_norm", "batch_norm"]) -> Model:
    network = partial(ResNet, kind=kind, blocks=(1, 1), width=16, groups=4, classes=10)
    return Model(name, network, _images(4, 3, 64, 64), "training", classes=10)


QUICK: tuple[Model, ...] = (
    Model(
        "vae-decoder",
        partial(VAEDecoder, channels=(64, 32), layers=1, groups=8),
        _images(1, 4, 32, 32),
        "inference",
        trained=False,
    ),
    Model(
        "unet",
        partial(UNet, channels=(32, 64), heads=4, context=32, groups=8),
        (Input((2, 4, 16, 16)), Input((2,), 1000), Input((2, 7, 32))),
        "inference",
    ),
    _quick_resnet("resnet-gn", "group_norm"),
    _quick_resnet("resnet-bn", "batch_norm"),
    Model(
        "convnext",
        partial(ConvNeXt, blocks=(1, 1), channels=(32, 64), classes=10),
        _images(4, 3, 64, 64),
        "training",
        classes=10,
    ),
    Model("unet-3d", partial(UNet3d, channels=(8, 16)), _images(1, 1, 16, 16, 16), "training", classes=3),
    Model(
        "dit",
        partial(DiT, width=64, heads=4, blocks=2, classes=10),
        (Input((2, 4, 16, 16)), Input((2,), 1000), Input((2,), 10)),
        "training",
        images=False,
    ),
    Model(
        "llm",
        partial(Decoder, width=64, heads=4, hidden=128, blocks=2, vocabulary=100),
        (Input((2, 64), 100),),
        "training",
        classes=100,
        images=False,
    ),
)


@dataclass(frozen=True)
class Job:
    """A model to run in one dtype, layout and direction."""

    model: Model
    dtype: str
    layout: ModelLayout
    direction: ModelDirection

    @property
    def key(self) -> str:
        """The name, such as ``resnet50-gn training bfloat16 nhwc``."""
        return f"{self.model.name} {self.direction} {self.dtype} {self.layout}"


def named(models: Sequence[Model], names: Sequence[str]) -> list[Model]:
    """The models of these names, none given: all; ValueError for an unknown name."""
    known = [model.name for model in models]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"model: {', '.join(unknown)} unknown; expected one of {', '.join(known)}")
    return [model for model in models if not names or model.name in names]


def jobs_of(
    models: Iterable[Model],
    dtypes: Iterable[str],
    layouts: Iterable[str] = (),
    directions: Iterable[ModelDirection] = (),
    match: str = "",
) -> list[Job]:
    """The jobs in the given dtypes, layouts (none given: all) and directions (none given: each model's own).

    Tokens have no other layout, so that ``layouts`` leaves them in; ``match`` is a part of a job's key.
    """
    layouts, directions = set(layouts), tuple(directions)
    jobs = [
        Job(model, dtype, layout, direction)
        for model in models
        for dtype in dtypes
        for layout in model.layouts
        for direction in directions or (model.direction,)
        if (not layouts or layout in layouts or not model.images) and (model.trained or direction == "inference")
    ]
    return [job for job in jobs if match in job.key]
