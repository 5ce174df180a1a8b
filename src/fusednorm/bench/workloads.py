"""Workloads: what is normalized, in which shape, dtype and layout, for tests, verify and benchmarks alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import prod
from typing import Literal, get_args

import torch
from torch import Tensor

from fusednorm.activations import resolve
from fusednorm.norm import ROW_FAMILIES, Family, Norm, norm_of
from fusednorm.operands import BackwardOperands, Operands
from fusednorm.problem import DTYPE_BYTES
from fusednorm.strides import MOST_DIMS

LayoutName = Literal["nchw", "nhwc", "channel_dim=-1", "rows"]
Init = Literal["zeros", "uniform", "normal", "integer", "offset", "large"]

EPS = 1e-5
INITS: tuple[Init, ...] = get_args(Init)


@dataclass(frozen=True)
class Workload:
    """One normalization to measure or to verify.

    ``shape`` is in NCHW order whatever the layout. ``groups`` is the number of groups for group_norm, the number of
    trailing normalized dimensions for layer_norm and rms_norm, and unused otherwise. ``layout`` "nhwc" is torch's
    channels_last memory format, "channel_dim=-1" an NHWC-shaped tensor, and "rows" the only layout of the row families.
    ``modulated`` adds the scale and shift of shape (N, C), of row families with one normalized dimension (N, K), N the
    first one. ``training`` False is batch_norm with given statistics.
    """

    family: Family
    shape: tuple[int, ...]
    groups: int = 0
    dtype: str = "float32"
    layout: LayoutName = "nchw"
    activation: str | None = None
    modulated: bool = False
    training: bool = True
    weight_dtype: str | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype: {self.dtype!r} is unknown; expected one of {', '.join(DTYPE_BYTES)}")
        if any(size < 0 for size in self.shape):
            raise ValueError(f"shape: {self.shape} has a negative size; give sizes of zero or more")
        if len(self.shape) > MOST_DIMS:
            raise ValueError(f"shape: it has {len(self.shape)} dims; torch's operators take at most {MOST_DIMS}")
        resolve(self.activation)
        if self.family in ROW_FAMILIES:
            if not 1 <= self.groups <= len(self.shape):
                raise ValueError(
                    f"groups: {self.groups} trailing dimensions cannot be normalized in shape "
                    f"{self.shape}; give 1 to {len(self.shape)}"
                )
            if self.modulated and (self.groups != 1 or len(self.shape) < 2):
                raise ValueError(
                    f"modulated: {self.groups} trailing dimensions of shape {self.shape} have no scale and shift of "
                    "shape (N, K); give a shape N,*,K with one trailing dimension"
                )
            object.__setattr__(self, "layout", "rows")
            return
        if len(self.shape) < 2:
            raise ValueError(f"shape: {self.shape} has no channel dimension; give at least N,C")
        if self.family == "group_norm" and (self.groups < 1 or self.shape[1] % self.groups):
            raise ValueError(
                f"groups: {self.shape[1]} channels (shape {self.shape}) cannot be split into "
                f"{self.groups} groups; give a number of groups that divides the channels"
            )

    @property
    def channel_dim(self) -> int:
        return -1 if self.layout == "channel_dim=-1" else 1

    @property
    def norm(self) -> Norm:
        """What the workload computes; modulated rows are positions of samples, whose channels are normalized."""
        if self.row_family and self.modulated:
            return norm_of(self.family, 0, -1, EPS, self.activation)
        return norm_of(self.family, self.groups, self.channel_dim, EPS, self.activation, self.training)

    @property
    def row_family(self) -> bool:
        return self.family in ROW_FAMILIES

    @property
    def parameter_shape(self) -> tuple[int, ...]:
        return self.shape[len(self.shape) - self.groups :] if self.row_family else (self.shape[1],)

    @property
    def bytes_per_transfer(self) -> int:
        """The bytes of one pass over the input."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def key(self) -> str:
        """The name, such as ``group_norm(32)+silu 2x320x64x64 float32 nchw``."""
        name = f"group_norm({self.groups})" if self.family == "group_norm" else self.family
        parts = [name, "modulated" if self.modulated else None, self.activation, None if self.training else "inference"]
        words = ["+".join(part for part in parts if part), "x".join(map(str, self.shape)), self.dtype]
        if not self.row_family:
            words.append(self.layout)
        return " ".join(words)


@dataclass(frozen=True)
class Inputs:
    """The tensors of a workload; a tensor that it does not use is None."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    scale: Tensor | None
    shift: Tensor | None
    mean: Tensor | None
    var: Tensor | None
    grad_output: Tensor

    @property
    def operands(self) -> Operands:
        """The operands of a forward."""
        return Operands(self.input, self.weight, self.bias, self.scale, self.shift, self.mean, self.var)

    def backward_operands(self, mean: Tensor | None, rstd: Tensor) -> BackwardOperands:
        """The operands of a backward, with the statistics of its forward."""
        parameters = (self.weight, self.bias, self.scale, self.shift)
        return BackwardOperands(self.grad_output, self.input, mean, rstd, *parameters)

    @property
    def transferred(self) -> tuple[Tensor, Tensor]:
        """x and dy, the tensors as large as the input that a backward reads; a forward reads x alone."""
        return self.input.detach(), self.grad_output

    def named_leaves(self) -> dict[str, Tensor]:
        """The tensors that gradients are asked for, by the name of their gradient."""
        leaves = {
            "grad_input": self.input,
            "grad_weight": self.weight,
            "grad_bias": self.bias,
            "grad_scale": self.scale,
            "grad_shift": self.shift,
        }
        return {name: tensor for name, tensor in leaves.items() if tensor is not None}

    def requiring_grad(self) -> Inputs:
        """The same values as leaves that require gradients."""
        fresh = {
            name.removeprefix("grad_"): tensor.detach().clone(memory_format=torch.preserve_format).requires_grad_()
            for name, tensor in self.named_leaves().items()
        }
        return replace(self, **fresh)


def _values(init: Init, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Uniform is in [-1, 1), integers are -5 to 5, offset has a mean of 1000 standard deviations, large |x| to 1e4."""
    device = generator.device
    draw: dict[str, Callable[[], Tensor]] = {
        "zeros": lambda: torch.zeros(shape, dtype=dtype, device=device),
        "uniform": lambda: torch.rand(shape, generator=generator, dtype=dtype, device=device) * 2 - 1,
        "normal": lambda: torch.randn(shape, generator=generator, dtype=dtype, device=device),
        "integer": lambda: torch.randint(-5, 6, shape, generator=generator, device=device).to(dtype),
        "offset": lambda: torch.randn(shape, generator=generator, dtype=dtype, device=device) + 1000,
        "large": lambda: (torch.rand(shape, generator=generator, dtype=dtype, device=device) * 2 - 1) * 1e4,
    }
    return draw[init]()


def as_layout(tensor: Tensor, layout: LayoutName) -> Tensor:
    """An NCHW-shaped tensor put into a layout; "nhwc" keeps the shape and changes the strides."""
    if layout == "channel_dim=-1":
        return tensor.movedim(1, -1).contiguous()
    if layout == "nhwc":
        return tensor.movedim(1, -1).contiguous().movedim(-1, 1)
    return tensor


def draw(workload: Workload, init: Init = "normal", seed: int = 0, device: str = "cpu") -> Inputs:
    """Inputs drawn on the device from its own seeded generator: the same each time on the same kind of device."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype = getattr(torch, workload.dtype)
    drawn = torch.float64 if dtype == torch.float64 else torch.float32
    parameter_dtype = getattr(torch, workload.weight_dtype or workload.dtype)

    def normal(shape: tuple[int, ...], to: torch.dtype, around: float, spread: float) -> Tensor:
        return (torch.randn(shape, generator=generator, dtype=drawn, device=device) * spread + around).to(to)

    def tensor(kind: Init) -> Tensor:
        return as_layout(_values(kind, workload.shape, drawn, generator).to(dtype), workload.layout)

    channels = workload.parameter_shape
    modulation = (workload.shape[0], *channels) if workload.modulated else None
    given = workload.family == "batch_norm" and not workload.training
    return Inputs(
        input=tensor(init),
        weight=normal(channels, parameter_dtype, 1.0, 0.2),
        bias=None if workload.family == "rms_norm" else normal(channels, parameter_dtype, 0.0, 0.2),
        scale=None if modulation is None else normal(modulation, dtype, 0.0, 0.2),
        shift=None if modulation is None else normal(modulation, dtype, 0.0, 0.2),
        mean=normal(channels, drawn, 0.0, 0.2) if given else None,
        var=normal(channels, drawn, 1.0, 0.1).abs() if given else None,
        grad_output=tensor("normal"),
    )


def _product(base: Iterable[Workload], dtypes: Iterable[str], layouts: Iterable[LayoutName]) -> tuple[Workload, ...]:
    """Every base workload in every dtype and, where it has layouts, in every layout; no repeats."""
    found = {
        replace(workload, dtype=dtype, layout=layout): None
        for workload in base
        for dtype in dtypes
        for layout in layouts
    }
    return tuple(found)


def _group(*shape: int, groups: int = 32, activation: str | None = "silu", modulated: bool = False) -> Workload:
    return Workload("group_norm", shape, groups, activation=activation, modulated=modulated)


def _rows(*shape: int) -> list[Workload]:
    return [Workload("layer_norm", shape, 1), Workload("rms_norm", shape, 1)]


_TARGET_SHAPES = ((2, 320, 64, 64), (1, 128, 256, 256), (8, 256, 56, 56), (1, 512, 256, 256))
_GPU_SHAPES = (
    (2, 320, 128, 128),
    (2, 640, 64, 64),
    (2, 1280, 32, 32),
    (16, 320, 64, 64),
    (1, 512, 128, 128),
    (1, 512, 256, 256),
    (1, 256, 512, 512),
    (1, 128, 1024, 1024),
    (32, 256, 56, 56),
    (32, 512, 64, 64),
)
_GPU_ROWS = ((16384, 4096), (8192, 8192), (4096, 16384), (131072, 128))
_BATCH_NORM = Workload("batch_norm", (8, 256, 56, 56))
_INSTANCE_NORM_3D = Workload("instance_norm", (2, 32, 64, 64, 64))

SUITES: dict[str, tuple[Workload, ...]] = {
    # Stable Diffusion's U-Net at 512 and 1024 pixels, its VAE, and an adaptive GroupNorm (scale and shift from time).
    "diffusion": _product(
        [
            _group(2, 320, 64, 64),
            _group(2, 640, 32, 32),
            _group(2, 1280, 16, 16),
            _group(1, 512, 128, 128),
            _group(1, 256, 256, 256),
            _group(2, 320, 64, 64, modulated=True),
        ],
        ("float32", "bfloat16"),
        ("nchw", "nhwc"),
    ),
    # ResNet-50 stages with GroupNorm and with BatchNorm in training.
    "vision": _product(
        [
            _group(8, 256, 56, 56, activation="relu"),
            _group(8, 512, 28, 28, activation="relu"),
            replace(_BATCH_NORM, activation="relu"),
            Workload("batch_norm", (8, 512, 28, 28), activation="relu"),
            replace(_BATCH_NORM, activation="relu", training=False),
        ],
        ("float32", "bfloat16"),
        ("nchw", "nhwc"),
    ),
    # 3-D U-Nets: nnU-Net's InstanceNorm and leaky ReLU, and GroupNorm.
    "medical": _product(
        [
            replace(_INSTANCE_NORM_3D, activation="leaky_relu"),
            Workload("instance_norm", (2, 128, 16, 32, 32), activation="leaky_relu"),
            _group(1, 32, 64, 96, 96, groups=8, activation="relu"),
        ],
        ("float32", "float16"),
        ("nchw", "nhwc"),
    ),
    "transformer": _product(
        [*_rows(8192, 1024), *_rows(4096, 4096), *_rows(8, 197, 768)], ("float32", "bfloat16"), ("nchw",)
    ),
    "quick": (_group(2, 320, 64, 64), _group(1, 128, 256, 256), *_rows(4096, 1024)),
    # The shapes that the project's figures of CPUs name.
    "targets": (
        *_product([_group(*shape) for shape in _TARGET_SHAPES], ("float32", "bfloat16", "float16"), ("nchw", "nhwc")),
        *[_group(*shape, activation=None) for shape in _TARGET_SHAPES],
        # So small that the host's time per call is all of its time.
        _group(1, 32, 8, 8, groups=8),
        *_rows(8192, 1024),
        *_rows(2048, 4096),
        _BATCH_NORM,
        _INSTANCE_NORM_3D,
    ),
    # The shapes that the project's figures of GPUs name: diffusion's U-Nets and VAEs, ResNet's stages, rows of
    # transformers, a 3-D U-Net, and tensors below 1 MB, where the host's time per call decides.
    "gpu": (
        *_product([_group(*shape) for shape in _GPU_SHAPES], ("bfloat16",), ("nchw", "nhwc")),
        *_product([row for shape in _GPU_ROWS for row in _rows(*shape)], ("bfloat16",), ("nchw",)),
        # Mixed precision keeps batch_norm's parameters in fp32.
        *_product([Workload("batch_norm", (32, 256, 56, 56), weight_dtype="float32")], ("bfloat16",), ("nchw", "nhwc")),
        *_product(
            [
                Workload("instance_norm", (2, 32, 128, 128, 128)),
                _group(1, 320, 32, 32),
                _group(2, 64, 16, 16),
                *_rows(128, 1024),
            ],
            ("bfloat16",),
            ("nchw",),
        ),
    ),
}


def select(suite: str, dtypes: Iterable[str] = (), layouts: Iterable[str] = (), match: str = "") -> list[Workload]:
    """The workloads of a listed suite, narrowed."""
    if suite not in SUITES:
        raise ValueError(f"suite: {suite!r} is unknown; expected one of {', '.join(SUITES)}")
    return narrowed(SUITES[suite], dtypes, layouts, match)


def narrowed(
    workloads: Iterable[Workload], dtypes: Iterable[str] = (), layouts: Iterable[str] = (), match: str = ""
) -> list[Workload]:
    """The workloads in the given dtypes and layouts (none given: all) whose key contains ``match``."""
    dtypes, layouts = set(dtypes), set(layouts)
    return [
        workload
        for workload in workloads
        if (not dtypes or workload.dtype in dtypes)
        and (not layouts or workload.layout in layouts or workload.row_family)
        and match in workload.key
    ]
