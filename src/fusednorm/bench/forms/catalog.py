"""The forms in which models use norms, each as one expression of several calls and as one call of fusednorm's.

The expressions are those of their models: the residual stream of a decoder (LLaMA) and of a vision transformer, the
modulated blocks of DiT and Wan, the time embedding and the residual of a diffusion U-Net, the shortcut of a ResNet, the
LayerNorm2d of ConvNeXt, the normalized queries and keys of a diffusion transformer, the quantized input of a decoder's
products.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

import fusednorm
from fusednorm.activations import Activation
from fusednorm.dtypes import compute_dtype
from fusednorm.equivalents import activated

Shape = tuple[int, ...]
Tensors = Mapping[str, Tensor]
Outputs = tuple[Tensor, ...]


class NormCall(Protocol):
    """A norm of either library: torch.nn.functional's arguments, and an activation."""

    def __call__(self, family: str, *arguments: Any, activation: str | None = None, **keywords: Any) -> Tensor: ...


def torch_norm(family: str, *arguments: Any, activation: str | None = None, **keywords: Any) -> Tensor:
    output: Tensor = getattr(F, family)(*arguments, **keywords)
    return output if activation is None else activated(output, Activation(activation))


def our_norm(family: str, *arguments: Any, activation: str | None = None, **keywords: Any) -> Tensor:
    output: Tensor = getattr(fusednorm, family)(*arguments, activation=activation, **keywords)
    return output


@dataclass(frozen=True)
class Form:
    """A norm with what is around it.

    ``shapes`` has the input's shape on each type of device, of 16 MB and more; ``operands`` names the tensors and their
    shapes for it, as the arguments of the one call, and "x" for its input. ``expression`` computes it by either
    library's norm, and ``fused`` by one call; None where there is nothing around the norm. Results of 8 bits are
    ``judged`` as numbers, and have no backward.
    """

    name: str
    shapes: Mapping[str, Shape]
    operands: Callable[[Shape], dict[str, Shape]]
    expression: Callable[[NormCall, Tensors], Outputs]
    fused: Callable[[Tensors], Outputs] | None
    layout: str = "nchw"
    judged: Callable[[Outputs], Outputs] = tuple
    differentiable: bool = True

    def composed(self, tensors: Tensors) -> Outputs:
        """By fusednorm's norm, and torch for the rest."""
        return self.expression(our_norm, tensors)

    def one_call(self, tensors: Tensors) -> Outputs:
        """By fusednorm alone, as far as one call computes it."""
        return (self.fused or self.composed)(tensors)

    def torch(self, tensors: Tensors) -> Outputs:
        """By torch alone."""
        return self.expression(torch_norm, tensors)


_TOKENS = {"cpu": (2, 1024, 2048), "cuda": (4, 4096, 3072)}
_IMAGES = {"cpu": (4, 320, 64, 64), "cuda": (16, 320, 128, 128)}


def _row_parameters(shape: Shape, *names: str) -> dict[str, Shape]:
    return dict.fromkeys(names, shape[-1:])


def _channel_parameters(shape: Shape) -> dict[str, Shape]:
    return {"weight": shape[1:2], "bias": shape[1:2]}


def _residual_stream(norm: NormCall, t: Tensors) -> Outputs:
    total = t["x"] + t["pre_add"]
    return norm("rms_norm", total, total.shape[-1:], t["weight"], 1e-6), total


def _post_norm(norm: NormCall, t: Tensors) -> Outputs:
    total = t["x"] + t["pre_add"]
    return (norm("layer_norm", total, total.shape[-1:], t["weight"], t["bias"]),)


def _modulated(norm: NormCall, t: Tensors) -> Outputs:
    x = t["x"]
    return (norm("layer_norm", x, x.shape[-1:], None, None, 1e-6) * (1 + t["scale"][:, None]) + t["shift"][:, None],)


def _gated(norm: NormCall, t: Tensors) -> Outputs:
    total = t["x"] + t["pre_gate"][:, None] * t["pre_add"]
    normalized = norm("layer_norm", total, total.shape[-1:], None, None, 1e-6)
    return normalized * (1 + t["scale"][:, None]) + t["shift"][:, None], total


def _time_embedding(norm: NormCall, t: Tensors) -> Outputs:
    x = t["x"] + t["pre_add"][:, :, None, None]
    return (norm("group_norm", x, 32, t["weight"], t["bias"], activation="silu"),)


def _residual_image(norm: NormCall, t: Tensors) -> Outputs:
    total = t["x"] + t["pre_add"]
    return norm("group_norm", total, 32, t["weight"], t["bias"], activation="silu"), total


def _shortcut(norm: NormCall, t: Tensors) -> Outputs:
    return (F.relu(norm("batch_norm", t["x"], None, None, t["weight"], t["bias"], True) + t["post_add"]),)


def _group_shortcut(norm: NormCall, t: Tensors) -> Outputs:
    return (F.relu(norm("group_norm", t["x"], 32, t["weight"], t["bias"]) + t["post_add"]),)


def _by_rows(y: Tensor, dtype: torch.dtype, largest: float) -> Outputs:
    """q and the scales of the rows."""
    y = y.to(compute_dtype(y.dtype))
    scale = y.abs().amax(-1, keepdim=True) / largest
    scaled = y / scale
    rounded = scaled if dtype.is_floating_point else scaled.round()
    return rounded.clamp(-largest, largest).to(dtype), scale


def _numbers(outputs: Outputs) -> Outputs:
    q, scale, *rest = outputs
    return q.to(scale.dtype) * scale, *rest


def _float8(norm: NormCall, t: Tensors) -> Outputs:
    x = t["x"]
    return _by_rows(norm("rms_norm", x, x.shape[-1:], t["weight"], 1e-6), torch.float8_e4m3fn, 448.0)


def _int8_residual_stream(norm: NormCall, t: Tensors) -> Outputs:
    y, total = _residual_stream(norm, t)
    return *_by_rows(y, torch.int8, 127.0), total


def _over_channels(norm: NormCall, t: Tensors) -> Outputs:
    moved = t["x"].movedim(1, -1)
    return (norm("layer_norm", moved, moved.shape[-1:], t["weight"], t["bias"]).movedim(-1, 1),)


def _queries_and_keys(norm: NormCall, t: Tensors) -> Outputs:
    queries, keys, _ = t["packed"].unbind(2)
    return tuple(
        norm("rms_norm", one, one.shape[-1:], t[name], 1e-6) for one, name in ((queries, "query"), (keys, "key"))
    )


def _catalog(layout: str) -> list[Form]:
    """The forms of images, in one memory order."""
    return [
        Form(
            "group_norm + silu of x + embedding", _IMAGES,
            lambda shape: {"x": shape, "pre_add": shape[:2], **_channel_parameters(shape)},
            _time_embedding,
            lambda t: (fusednorm.group_norm(
                t["x"], 32, t["weight"], t["bias"], activation="silu", pre_add=t["pre_add"]),),
            layout,
        ),
        Form(
            "group_norm + silu of x + h, and the sum", _IMAGES,
            lambda shape: {"x": shape, "pre_add": shape, **_channel_parameters(shape)},
            _residual_image,
            lambda t: fusednorm.group_norm(
                t["x"], 32, t["weight"], t["bias"], activation="silu", pre_add=t["pre_add"], return_sum=True),
            layout,
        ),
        Form(
            "relu of batch_norm + shortcut", _IMAGES,
            lambda shape: {"x": shape, "post_add": shape, **_channel_parameters(shape)},
            _shortcut,
            lambda t: (fusednorm.batch_norm(
                t["x"], None, None, t["weight"], t["bias"], True, activation="relu", post_add=t["post_add"]),),
            layout,
        ),
        Form(
            "relu of group_norm + shortcut", _IMAGES,
            lambda shape: {"x": shape, "post_add": shape, **_channel_parameters(shape)},
            _group_shortcut,
            lambda t: (fusednorm.group_norm(
                t["x"], 32, t["weight"], t["bias"], activation="relu", post_add=t["post_add"]),),
            layout,
        ),
        Form(
            "layer_norm over channels", _IMAGES,
            lambda shape: {"x": shape, **_channel_parameters(shape)},
            _over_channels,
            lambda t: (fusednorm.layer_norm(t["x"], t["weight"].shape, t["weight"], t["bias"], channel_dim=1),),
            layout,
        ),
    ]  # fmt: skip


FORMS: tuple[Form, ...] = (
    Form(
        "rms_norm of x + h, and the sum", _TOKENS,
        lambda shape: {"x": shape, "pre_add": shape, **_row_parameters(shape, "weight")},
        _residual_stream,
        lambda t: fusednorm.rms_norm(
            t["x"], t["weight"].shape, t["weight"], 1e-6, pre_add=t["pre_add"], return_sum=True),
    ),
    Form(
        "layer_norm of x + h", _TOKENS,
        lambda shape: {"x": shape, "pre_add": shape, **_row_parameters(shape, "weight", "bias")},
        _post_norm,
        lambda t: (fusednorm.layer_norm(t["x"], t["weight"].shape, t["weight"], t["bias"], pre_add=t["pre_add"]),),
    ),
    Form(
        "modulated layer_norm", _TOKENS,
        lambda shape: {"x": shape, "scale": (shape[0], shape[-1]), "shift": (shape[0], shape[-1])},
        _modulated,
        lambda t: (fusednorm.layer_norm(
            t["x"], t["x"].shape[-1:], None, None, 1e-6, scale=t["scale"], shift=t["shift"]),),
    ),
    Form(
        "modulated layer_norm of x + gate h, and the sum", _TOKENS,
        lambda shape: {
            "x": shape, "pre_add": shape, **dict.fromkeys(("pre_gate", "scale", "shift"), (shape[0], shape[-1]))
        },
        _gated,
        lambda t: fusednorm.layer_norm(
            t["x"], t["x"].shape[-1:], None, None, 1e-6, scale=t["scale"], shift=t["shift"], pre_add=t["pre_add"],
            pre_gate=t["pre_gate"], return_sum=True),
    ),
    Form(
        "rms_norm of queries and keys", {"cpu": (2, 1024, 3, 16, 128), "cuda": (4, 4096, 3, 24, 128)},
        lambda shape: {"packed": shape, **_row_parameters(shape, "query", "key")},
        _queries_and_keys,
        None,
    ),
    Form(
        "float8 rms_norm, and the scales of its rows", _TOKENS,
        lambda shape: {"x": shape, **_row_parameters(shape, "weight")},
        _float8,
        lambda t: fusednorm.rms_norm(
            t["x"], t["weight"].shape, t["weight"], 1e-6, out_dtype=torch.float8_e4m3fn),
        judged=_numbers,
        differentiable=False,
    ),
    Form(
        "int8 rms_norm of x + h, the scales of its rows, and the sum", _TOKENS,
        lambda shape: {"x": shape, "pre_add": shape, **_row_parameters(shape, "weight")},
        _int8_residual_stream,
        lambda t: fusednorm.rms_norm(
            t["x"], t["weight"].shape, t["weight"], 1e-6, pre_add=t["pre_add"], return_sum=True, out_dtype=torch.int8),
        judged=_numbers,
        differentiable=False,
    ),
    *_catalog("nchw"),
    *_catalog("nhwc"),
)  # fmt: skip
