"""Models for the tests of convert_: torch's own modules, and classes written as those of other packages are."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import rms_norm

import fusednorm

Kind = TypeVar("Kind", bound=type)


def named(name: str) -> Any:
    """Give a class the qualified name of another package's."""

    def rename(kind: Kind) -> Kind:
        kind.__module__, _, kind.__qualname__ = name.rpartition(".")
        kind.__name__ = kind.__qualname__
        return kind

    return rename


def results(model: nn.Module, *inputs: Tensor) -> tuple[Tensor, list[Tensor | None]]:
    """The output of a model, and the gradients of its inputs and parameters."""
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    model.zero_grad()
    output = model(*leaves)
    output.square().sum().backward()
    return output.detach(), [tensor.grad for tensor in (*leaves, *model.parameters())]


def converted(model: nn.Module, *inputs: Tensor, **options: Any) -> fusednorm.Report:
    """Convert a model, which computes what it did, in training and evaluation; and so does the model reverted."""
    before = copy.deepcopy(model)
    keys, parameters = list(model.state_dict()), list(model.parameters())
    report = fusednorm.convert_(model, **options)
    assert list(model.state_dict()) == keys
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    assert list(report.converted) or list(report.left)
    reverted = copy.deepcopy(model)
    fusednorm.revert_(reverted)
    assert [type(module) for module in reverted.modules()] == [type(module) for module in before.modules()]
    assert [vars(module).keys() for module in reverted.modules()] == [
        vars(module).keys() for module in before.modules()
    ]
    for training in (True, False):
        original = copy.deepcopy(before).train(training)
        expected = results(original, *inputs)
        for each in (copy.deepcopy(model), copy.deepcopy(reverted)):
            torch.testing.assert_close(results(each.train(training), *inputs), expected, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(each.state_dict(), original.state_dict(), rtol=1e-4, atol=1e-4)
    return report


def fused(report: fusednorm.Report) -> dict[str, str]:
    return {entry.path: entry.reason for entry in report.fused}


def summed(report: fusednorm.Report) -> dict[str, str]:
    return {entry.path: entry.reason for entry in report.summed}


def left(report: fusednorm.Report) -> dict[str, str]:
    return {entry.path: entry.reason for entry in report.left}


# --- blocks of no package ---


class Block(nn.Module):
    """A residual block with one ReLU for all, as torchvision writes it."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.conv1(x)
        out = self.bn1(out)
        out = self.relu(out)
        out = self.conv2(out)
        out = self.bn2(out)
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        out = self.relu(out)
        return out


class Functional(nn.Module):
    """Activations by functions, each in another form."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (nn.GroupNorm(4, 8) for _ in range(3))
        self.norm4, self.norm5 = nn.GroupNorm(4, 8), nn.GroupNorm(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.norm1(x))
        y = self.norm2(y).relu()
        y = self.norm3(y)
        y = F.leaky_relu(y, 0.2, inplace=True)
        y = y + torch.tanh(self.norm4(x))
        y = self.norm5(y)
        return F.gelu(y, approximate="tanh") * 2


class Seen(nn.Module):
    """Norms whose results something else sees too."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (nn.GroupNorm(4, 8) for _ in range(3))
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        z = self.act(y)
        x = self.norm2(y + z)
        x = self.act(x) * torch.sigmoid(x)
        y = x + self._twice(self.norm3)(x)
        return F.silu(self.norm3(y))

    def _twice(self, function: Any) -> Any:
        return lambda x: function(function(x))


class Sums(nn.Module):
    """Sums behind norms and before them, each in another form."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 1)
        self.norm1, self.norm2, self.norm3, self.norm4 = (nn.GroupNorm(4, 8) for _ in range(4))
        self.norm5, self.norm6, self.norm7 = nn.GroupNorm(4, 8), nn.BatchNorm2d(8), nn.GroupNorm(2, 8)
        self.norm8 = nn.GroupNorm(2, 8)

    def forward(self, x: Tensor, condition: bool = True) -> Tensor:
        y = self.norm1(self.conv(x))
        y += self.conv(x)
        y = F.relu(y)
        z = self.norm2(y)
        z = F.silu(x + z)
        z = torch.tanh(self.norm3(z) + x)
        y = self.norm4(y)
        y = y + z
        y = F.leaky_relu(y, 0.1)
        y = self.norm5(x + y)
        if condition:
            y = y + x[:, :, :1, :1]
        y = self.norm6(y)
        y = y.sigmoid() + 1.0
        y = y + 0.5
        y = self.norm7(y)
        y = y + z
        y = self.norm8(y)  # takes one of both sums
        y += x
        return F.relu(y)


class SumsApart(nn.Module):
    """Sums that stay beside their norms: something else sees what goes in or comes out, or may change it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.act = nn.Conv2d(8, 8, 1), nn.ReLU()
        self.norm1, self.norm2, self.norm3, self.norm4 = (nn.GroupNorm(4, 8) for _ in range(4))
        self.norm5, self.norm6, self.norm7 = (nn.GroupNorm(4, 8) for _ in range(3))
        self.norm8, self.norm9, self.norm10, self.norm11 = (nn.GroupNorm(4, 8) for _ in range(4))
        self.norm12, self.norm13, self.norm14 = (nn.GroupNorm(4, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        def seen() -> Tensor:
            return v

        v = self.norm14(self.conv(x))
        x = x + seen()
        v = F.relu(v + x)
        x = x + v
        z = self.norm1(x)
        x = self.act(self.conv(x))  # could change what norm1 has seen
        z += x
        z = F.silu(z)
        y = self.norm2(self.conv(z))
        z = z + y.mean()
        y += z
        y = F.relu(y)
        y = self.norm3(self.conv(y))
        if x.dim() == 2:
            return x
        y += x
        y = F.relu(y)
        z = self.conv(y)
        w = self.norm4(z)
        z = self.act(z)
        w += z
        w = F.relu(w)
        y = F.relu(self.norm5(y) + z) + F.silu(self.norm5(z))
        y = y + z
        w = self.norm6(y)
        z = 2 * y
        z += w  # in place
        z = self.norm7(z)
        w = self.norm8(y)
        w = self.conv(y) * F.relu(w + z)
        y = F.relu(self.conv(y) + self.norm9(self.conv(y)))
        w = self.norm10(self.act(y))  # which may hand its input on
        z = self.act(y)
        w += z
        w = F.relu(w)
        y = self.norm11(self.conv(y))
        y += y.mean()
        y = F.relu(y)
        w = self.norm12(w)
        w = F.relu(w + y) * w
        y = self.norm13(self.conv(y))
        if self.conv is not None:
            y = self.conv(y)
        y += w
        return F.relu(y)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 1)
        self.norm = nn.GroupNorm(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))


class Outer(nn.Module):
    """The activation stands in another module than the norm: only a trace shows it."""

    def __init__(self, act: nn.Module | None = None) -> None:
        super().__init__()
        self.body, self.act = Inner(), nn.SiLU() if act is None else act
        self.second, self.out = Inner(), nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor, extra: Tensor | None = None) -> Tensor:
        y = self.act(self.body(x))
        z = self.second(y)
        return self.out(z) + z.relu() if extra is None else z + extra


class Untraceable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.outer = Outer()

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(x) if x.sum() > 0 else self.outer(-x)


class OnlyInTraining(nn.Module):
    """A path that a trace in evaluation does not show."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.act = Inner(), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        return self.act(y) + y if self.training else self.act(y)


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act = nn.GroupNorm(4, 8), nn.SiLU()


class Acting(Parts):
    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(x))


# --- as in other packages ---


@named("diffusers.models.resnet.ResnetBlock2D")
class ResnetBlock2D(nn.Module):
    def __init__(self, time_embedding_norm: str = "default") -> None:
        super().__init__()
        self.time_embedding_norm = time_embedding_norm
        self.norm1 = nn.GroupNorm(4, 8)
        self.conv1 = nn.Conv2d(8, 8, 3, padding=1)
        self.time_emb_proj = nn.Linear(6, 8 if time_embedding_norm == "default" else 16)
        self.norm2 = nn.GroupNorm(4, 8)
        self.dropout = nn.Dropout(0.0)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.nonlinearity = nn.SiLU()

    def forward(self, input_tensor: Tensor, temb: Tensor) -> Tensor:
        hidden_states = input_tensor
        hidden_states = self.norm1(hidden_states)
        hidden_states = self.nonlinearity(hidden_states)
        hidden_states = self.conv1(hidden_states)
        temb = self.nonlinearity(temb)
        temb = self.time_emb_proj(temb)[:, :, None, None]
        if self.time_embedding_norm == "default":
            if temb is not None:
                hidden_states = hidden_states + temb
            hidden_states = self.norm2(hidden_states)
        elif self.time_embedding_norm == "scale_shift":
            time_scale, time_shift = torch.chunk(temb, 2, dim=1)
            hidden_states = self.norm2(hidden_states)
            hidden_states = hidden_states * (1 + time_scale) + time_shift
        else:
            hidden_states = self.norm2(hidden_states)
        hidden_states = self.nonlinearity(hidden_states)
        hidden_states = self.dropout(hidden_states)
        hidden_states = self.conv2(hidden_states)
        return input_tensor + hidden_states


@named("diffusers.models.autoencoders.vae.Decoder")
class Decoder(nn.Module):
    """The head of AutoencoderKL's decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_norm_out = nn.GroupNorm(4, 8)
        self.conv_act = nn.SiLU()
        self.conv_out = nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, sample: Tensor, latent_embeds: Tensor | None = None) -> Tensor:
        if latent_embeds is None:
            sample = self.conv_norm_out(sample)
        else:
            sample = self.conv_norm_out(sample, latent_embeds)
        sample = self.conv_act(sample)
        return self.conv_out(sample)


@named("timm.models.resnet.Bottleneck")
class Bottleneck(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.act1 = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.drop_block, self.act2 = nn.Identity(), nn.ReLU(inplace=True)
        self.conv3, self.bn3, self.act3 = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        self.se: nn.Module | None = None
        self.downsample = nn.Conv2d(8, 8, 1)

    def zero_init_last(self) -> None:
        if getattr(self.bn3, "weight", None) is not None:
            nn.init.zeros_(self.bn3.weight)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        x = self.conv1(x)
        x = self.bn1(x)
        x = self.act1(x)
        x = self.conv2(x)
        x = self.bn2(x)
        x = self.drop_block(x)
        x = self.act2(x)
        x = self.conv3(x)
        x = self.bn3(x)
        if self.se is not None:
            x = self.se(x)
        if self.downsample is not None:
            shortcut = self.downsample(shortcut)
        x += shortcut
        x = self.act3(x)
        return x


@named("timm.layers.norm_act.BatchNormAct2d")
class BatchNormAct2d(nn.BatchNorm2d):
    def __init__(self, num_features: int, act: nn.Module | None = None, drop: nn.Module | None = None) -> None:
        super().__init__(num_features)
        self.drop = nn.Identity() if drop is None else drop
        self.act = nn.ReLU(inplace=True) if act is None else act

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        x = F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training, self.momentum, self.eps
        )
        x = self.drop(x)
        return self.act(x)


@named("timm.layers.norm.LayerNorm")
class TimmLayerNorm(nn.LayerNorm):
    _fast_norm = False

    def __init__(self, num_channels: int, eps: float = 1e-6, affine: bool = True) -> None:
        super().__init__(num_channels, eps=eps, elementwise_affine=affine)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


@named("timm.layers.norm.LayerNormFp32")
class ChangedLayerNorm(nn.LayerNorm):
    """A class of that name whose forward computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps).clamp(-1, 1)


@named("torchvision.models.convnext.LayerNorm2d")
class LayerNorm2d(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


@named("timm.layers.norm.RmsNorm")
class TimmRmsNorm(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.normalized_shape, self.eps, self.elementwise_affine = (channels,), 1e-6, True
        self.weight = nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        x = rms_norm(x, self.normalized_shape, self.weight, self.eps)
        return x


@named("diffusers.models.normalization.FP32LayerNorm")
class FP32LayerNorm(nn.LayerNorm):
    def forward(self, inputs: Tensor) -> Tensor:
        origin_dtype = inputs.dtype
        return F.layer_norm(
            inputs.float(),
            self.normalized_shape,
            self.weight.float() if self.weight is not None else None,
            self.bias.float() if self.bias is not None else None,
            self.eps,
        ).to(origin_dtype)


@named("monai.networks.blocks.acti_norm.ADN")
class ADN(nn.Sequential):
    def __init__(self, ordering: str = "NA") -> None:
        super().__init__()
        layers = {"A": nn.LeakyReLU(0.1), "D": nn.Dropout(0.2), "N": nn.InstanceNorm2d(8)}
        for item in ordering:
            self.add_module(item, layers[item])


@named("monai.networks.blocks.dynunet_block.UnetResBlock")
class UnetResBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.conv3 = (nn.Sequential(nn.Conv2d(8, 8, 3, padding=1)) for _ in range(3))
        self.lrelu = nn.LeakyReLU(0.01, inplace=True)
        self.norm1, self.norm2, self.norm3 = (nn.InstanceNorm2d(8, affine=True) for _ in range(3))

    def forward(self, inp: Tensor) -> Tensor:
        residual = inp
        out = self.conv1(inp)
        out = self.norm1(out)
        out = self.lrelu(out)
        out = self.conv2(out)
        out = self.norm2(out)
        if hasattr(self, "conv3"):
            residual = self.conv3(residual)
        if hasattr(self, "norm3"):
            residual = self.norm3(residual)
        out += residual
        out = self.lrelu(out)
        return out


@named("monai.networks.blocks.dynunet_block.UnetBasicBlock")
class UnetBasicBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.lrelu = nn.LeakyReLU(0.01, inplace=True)
        self.norm1, self.norm2 = nn.InstanceNorm2d(8, affine=True), nn.InstanceNorm2d(8, affine=True)

    def forward(self, inp: Tensor) -> Tensor:
        out = self.conv1(inp)
        out = self.norm1(out)
        out = self.lrelu(out)
        out = self.conv2(out)
        out = self.norm2(out)
        out = self.lrelu(out)
        return out
