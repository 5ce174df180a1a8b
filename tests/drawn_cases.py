"""Drawn cases: a pure function of (seed, index) to a call with its operands, their dtypes, memory and values.

A case's geometry (family, shape, dtype, activation, the input's memory), its operands (dtypes, memory, what is asked
for) and its values are drawn apart. On a GPU, where each geometry and each set of operands compiles kernels, they come
from pools; the values, eps, offsets in memory and checks are each case's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from random import Random
from typing import TypeVar

import torch
from drawn_formulas import KINKS, ROW_FAMILIES, Spec

FAMILIES = ("group_norm", "instance_norm", "layer_norm", "rms_norm", "batch_norm")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ENTRIES = ("functional", "autograd", "module", "ops_forward", "ops_backward")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "sigmoid", "tanh", "leaky_relu", "hardswish")
PARAMETERS = {"silu": (1.702, 0.5, -1.0, 0.0, 3.0), "leaky_relu": (0.2, 0.0, -0.5, 1.0)}
DEFAULTS = {"silu": 1.0, "leaky_relu": 0.01}
INSTANCES = {
    "cpu": ("cpu.planes", "cpu.planes_split", "cpu.slabs", "cpu.slabs_split", "cpu.rows", "cpu.columns", "reference"),
    "cuda": (
        "triton.tiles",
        "triton.whole",
        "triton.held",
        "triton.rows",
        "triton.columns",
        "triton.flat",
        "hopper.resident",
        "hopper.slabs",
        "hopper.columns",
        "hopper.rows",
        "hopper.row_parts",
        "reference",
    ),
    "interpreter": ("triton.tiles", "triton.whole", "triton.held", "triton.rows", "triton.columns", "triton.flat"),
}
_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 96, 127, 128, 129, 257)
_GRADIENTS = ("input", "weight", "bias", "scale", "shift")
T = TypeVar("T")


@dataclass(frozen=True)
class Placement:
    """Where a tensor's elements lie in a larger block of NaN.

    Dimensions from the slowest to the fastest; every so-many-th element (0 expands the dimension); elements left out
    before and after each; elements before the first. ``overlap`` walks windows that share elements.
    """

    order: tuple[int, ...]
    steps: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    offset: int = 0
    overlap: bool = False

    @property
    def shared(self) -> bool:
        return self.overlap or 0 in self.steps


def plain_placement(rank: int, offset: int = 0) -> Placement:
    return Placement(tuple(range(rank)), (1,) * rank, (0,) * rank, (0,) * rank, offset)


@dataclass(frozen=True)
class Operand:
    """A tensor to make: its values are of a form, times a scale, ``offset`` scales away from 0."""

    dtype: torch.dtype
    placement: Placement
    form: str = "normal"
    scale: float = 1.0
    offset: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Case:
    """One call, what is asked of it, and what is checked besides."""

    seed: int
    index: int
    spec: Spec
    entry: str
    operands: dict[str, Operand]
    wanted: tuple[str, ...]
    instances: tuple[str, ...]
    momentum: float | None
    threads: int
    checks: frozenset[str]
    form: str
    extra: dict[str, Operand] = field(default_factory=dict)  # other operands of the same call, run in between
    extra_eps: float = 1e-5

    @property
    def dtype(self) -> torch.dtype:
        return self.operands["input"].dtype

    @property
    def direction(self) -> str:
        if self.entry in ("functional", "ops_forward"):
            return "forward" if self.spec.training else "inference"
        return self.form if self.entry == "ops_backward" else "backward"

    def describe(self) -> str:
        spec = self.spec
        parts = [spec.family, self.entry, self.direction, f"{spec.shape}/{spec.groups}", short(self.dtype)]
        parts += [f"channel_dim={spec.channel_dim}"] if spec.channel_dim != 1 else []
        parts += [] if spec.training else ["evaluation"]
        if spec.activation:
            parts.append(f"{spec.activation}({spec.parameter:g})")
        parts.append(f"eps={spec.eps:g}")
        for name, operand in self.operands.items():
            parts.append(f"{name}:{short(operand.dtype)}:{operand.form}*{operand.scale:.0e}+{operand.offset:g}")
        return " ".join(parts)


def short(dtype: torch.dtype) -> str:
    return {"float32": "f32", "float64": "f64", "float16": "f16", "bfloat16": "bf16"}[str(dtype).split(".")[1]]


class Draw(Random):
    """Choices by weight."""

    def among(self, weighted: dict[T, float]) -> T:
        return self.choices(list(weighted), list(weighted.values()))[0]

    def chance(self, share: float) -> bool:
        return self.random() < share


def draw_case(seed: int, index: int, device: str = "cpu", pool: int = 0, sets: int = 2) -> Case:
    """The case of an index; ``pool`` geometries with so many ``sets`` of operands each, 0 for new ones each time."""
    place, turn = (index % pool, index // pool % sets) if pool else (index, 0)
    spec, dtype, memory = _geometry(Draw(f"{seed}/{place}/geometry"), device)
    own = Draw(f"{seed}/{index}/values")
    dtypes = DTYPES
    if device == "interpreter":  # which truncates where it should round to bfloat16
        dtypes = tuple(one for one in DTYPES if one != torch.bfloat16)
        dtype = torch.float16 if dtype == torch.bfloat16 else dtype
    eps = _eps(own, spec)
    spec = replace(spec, eps=eps)
    choice = Draw(f"{seed}/{place}/{turn}/operands")
    entry = choice.among({"functional": 20, "autograd": 30, "module": 10, "ops_forward": 15, "ops_backward": 25})
    if entry == "module" and not _has_module(spec):
        entry = "autograd"
    operands = _operands(choice, spec, dtype, memory, entry, dtypes)
    offered = tuple(name for name in _GRADIENTS if name in operands)
    wanted = tuple(name for name in offered if choice.chance(0.75)) or ("input",)
    forms = {"backward": 40, "backward_data": 20, "backward_gamma_beta": 20, "norm_backward": 20}
    if spec.family == "instance_norm" and not spec.training:
        forms = {"norm_backward": 1}
    form = choice.among(forms)
    instances: tuple[str, ...] = ()
    if choice.chance(0.45) or device == "interpreter":
        names = list(INSTANCES[device])
        choice.shuffle(names)
        # The reference takes everything, so what stands after it is never asked.
        instances = ("reference",) if names[0] == "reference" else tuple(name for name in names if name != "reference")
    operands = {name: _valued(own, name, operand, spec, device) for name, operand in operands.items()}
    checks = {check for check, share in _CHECKS.items() if own.chance(share)}
    if instances == ("reference",):
        checks.discard("threads")  # torch's own sums depend on them
    if operands["input"].placement.shared:
        checks.discard("contain")
    extra: dict[str, Operand] = {}
    if "between" in checks:
        other = Draw(f"{seed}/{place}/{1 - turn if pool else 1}/operands")
        other.random()
        drawn = _operands(other, spec, dtype, memory, entry, dtypes)
        extra = {name: _valued(own, name, operand, spec, device) for name, operand in drawn.items()}
    momentum = own.choice([0.1, 0.1, 0.5, 1.0, 0.0] + ([None] if entry == "module" else []))
    return Case(
        seed, index, spec, entry, operands, wanted, instances, momentum, own.choice([1, 1, 1, 2]), frozenset(checks),
        form, extra, _eps(own, spec),
    )  # fmt: skip


_CHECKS = {"repeat": 0.1, "threads": 0.1, "between": 0.2, "contain": 0.12}


# --- geometry ---


def _geometry(draw: Draw, device: str) -> tuple[Spec, torch.dtype, Placement]:
    family = draw.choice(FAMILIES)
    rows = family in ROW_FAMILIES
    shape = _shape(draw, rows, device)
    rank = len(shape)
    channel_dim = 1 if rows or draw.chance(0.7) else -1
    training = family not in ("batch_norm", "instance_norm") or draw.chance(0.75)
    groups = 0
    if rows:
        groups = draw.among({0: 5 if rank > 1 else 0, 1: 6, 2: 2, 3: 1, rank: 1})
        groups = min(groups, rank)
        channel_dim = -1 if groups == 0 and draw.chance(0.4) else 1
    elif family == "group_norm":
        channels = shape[1 if channel_dim == 1 else -1]
        groups = draw.choice([count for count in range(1, max(channels, 1) + 1) if channels % count == 0])
    activation, parameter = None, 0.0
    if draw.chance(0.65):
        activation = draw.choice(ACTIVATIONS)
        parameter = DEFAULTS.get(activation, 0.0)
        if activation in PARAMETERS and draw.chance(0.3):
            parameter = draw.choice(PARAMETERS[activation])
    dtype = draw.among({torch.float32: 40, torch.bfloat16: 20, torch.float16: 20, torch.float64: 20})
    spec = Spec(family, shape, groups, channel_dim, training, 1e-5, activation, parameter)
    return spec, dtype, _placement(draw, shape, spec.channel_axis if _has_channels(spec) and rank > 2 else None)


def _shape(draw: Draw, rows: bool, device: str) -> tuple[int, ...]:
    kind = draw.among({"small": 900, "empty": 15, "long": 8, "many": 8, "large": 12 if device == "cpu" else 40})
    if device == "interpreter":
        kind = "small"
    if kind == "long":
        return draw.choice([1, 2, 3]), draw.choice([99_991, 65_537, 131_072, 40_000])
    if kind == "many":
        return draw.choice([20_011, 32_768, 9_999]), draw.choice([1, 2, 3, 5, 8, 17])
    if kind == "large":
        most = 10 ** draw.uniform(5, 6)
    else:
        most = 10 ** draw.among({draw.uniform(0.3, 3.5): 12, draw.uniform(3.5, 4.5): 1})
        most = min(most, 400) if device == "interpreter" else most
    rank = draw.among({1: 2 if rows else 0, 2: 5, 3: 5, 4: 8, 5: 3, 6: 1})
    shape = [1] * rank
    axes = list(range(rank))
    draw.shuffle(axes)
    for axis in axes:
        left = most / prod(shape)
        fitting = [size for size in _SIZES if size <= left] or [1]
        shape[axis] = draw.choice(fitting)
    if kind == "large":
        axis = draw.randrange(rank)
        shape[axis] = max(1, int(shape[axis] * most / prod(shape)))
    if kind == "empty":
        shape[draw.randrange(rank)] = 0
    return tuple(shape)


def _placement(draw: Draw, shape: Sequence[int], channel: int | None) -> Placement:
    rank = len(shape)
    order, ones = list(range(rank)), [1] * rank
    steps, before, after = list(ones), [0] * rank, [0] * rank
    overlap = False
    kind = draw.among(
        {"dense": 40, "channels_last": 25, "permuted": 10, "sliced": 12, "stepped": 8, "expanded": 5, "overlap": 3}
    )
    if kind == "channels_last" or (kind in ("sliced", "stepped") and draw.chance(0.4)):
        if channel is not None:
            order.remove(channel)
            order.append(channel)
    elif kind == "permuted":
        draw.shuffle(order)
    if kind in ("sliced", "stepped", "expanded"):
        for axis in range(rank):
            if draw.chance(0.5):
                if kind == "sliced":
                    before[axis], after[axis] = draw.randrange(3), draw.randrange(3)
                else:
                    steps[axis] = draw.choice([2, 3]) if kind == "stepped" else 0
    if kind == "overlap":
        overlap = True
        steps = [draw.choice([1, 1, 2, 3]) for _ in range(rank)]
    offset = draw.among({0: 6, draw.randint(1, 7): 4})
    return Placement(tuple(order), tuple(steps), tuple(before), tuple(after), offset, overlap)


def _has_channels(spec: Spec) -> bool:
    return not spec.rows or spec.per_position


def _has_module(spec: Spec) -> bool:
    if spec.rows or spec.family == "group_norm":
        return True
    return 3 <= len(spec.shape) <= 5 or (len(spec.shape) == 2 and spec.family == "batch_norm")


# --- operands ---


def _operands(
    draw: Draw, spec: Spec, dtype: torch.dtype, memory: Placement, entry: str, dtypes: Sequence[torch.dtype]
) -> dict[str, Operand]:
    """The operands' dtypes and memory; no values yet."""

    def other() -> torch.dtype:
        return draw.among({dtype: 45, torch.float32: 25, draw.choice(dtypes): 30})

    def parameter(shape: Sequence[int]) -> Operand:
        chosen = _placement(draw, shape, None) if draw.chance(0.4) else plain_placement(len(shape))
        # A parameter that overlaps itself takes gradients as any other, but nobody has one.
        return Operand(other(), replace(chosen, overlap=False))

    operands = {"input": Operand(dtype, memory)}
    if entry not in ("functional", "ops_forward"):
        gradient = draw.among({"same": 45, "any": 30, "dense": 15, "scalar": 10})
        placement = memory
        if gradient == "any":
            placement = _placement(draw, spec.shape, spec.channel_axis if _has_channels(spec) else None)
        elif gradient != "same":
            placement = plain_placement(len(spec.shape))
        if gradient == "scalar":
            placement = replace(placement, steps=(0,) * len(spec.shape))
        if placement.shared and spec.activation in KINKS and not shows(spec, dtype, entry):
            placement = plain_placement(len(spec.shape))
        operands["grad_output"] = Operand(dtype, placement)
    weighted = draw.chance(0.75)
    biased = weighted if entry == "module" or draw.chance(0.7) else not weighted
    if weighted:
        operands["weight"] = parameter(spec.parameter_shape)
    if biased and spec.family != "rms_norm":
        operands["bias"] = parameter(spec.parameter_shape)
    if _has_channels(spec) and (entry != "module" or spec.per_position):
        for name in ("scale", "shift"):
            if draw.chance(0.3):
                operands[name] = parameter(spec.modulation_shape)
    if entry == "ops_backward":
        names = ("rstd",) if spec.family == "rms_norm" else ("mean", "rstd")
        statistics = spec.statistics_shape if spec.training else spec.parameter_shape
        compute = torch.float64 if dtype == torch.float64 else torch.float32
        for name in names:
            made = parameter(statistics)
            operands[name] = made if draw.chance(0.3) else replace(made, dtype=compute)
    elif not spec.training or (spec.family in ("batch_norm", "instance_norm") and draw.chance(0.5)):
        if spec.training and entry == "ops_forward" and spec.family == "instance_norm":
            return operands
        operands["running_mean"] = unshared(parameter(spec.parameter_shape), spec)
        operands["running_var"] = unshared(parameter(spec.parameter_shape), spec)
    return operands


def unshared(operand: Operand, spec: Spec) -> Operand:
    """Running statistics are written, which expanded memory cannot be."""
    if operand.placement.shared:
        return replace(operand, placement=plain_placement(len(spec.parameter_shape)))
    return operand


def shows(spec: Spec, dtype: torch.dtype, entry: str) -> bool:
    """Whether the output that the user saw says on which side of the kink each element was."""
    if entry == "ops_backward":
        return False
    return spec.activation == "relu" or (spec.activation == "leaky_relu" and spec.parameter > 0)


def _eps(draw: Draw, spec: Spec) -> float:
    eps = draw.among({1e-5: 50, 1e-6: 10, 1e-12: 8, 1e-3: 8, 0.0: 6, 1.0: 8, -0.5: 3})
    if eps <= 0 and spec.family in ("batch_norm", "instance_norm"):
        return 1e-5
    return eps


# --- values ---

_EXPONENTS = {torch.float32: (-45, 38), torch.float64: (-45, 38), torch.bfloat16: (-40, 38), torch.float16: (-8, 4)}


def _valued(draw: Draw, name: str, operand: Operand, spec: Spec, device: str) -> Operand:
    """The operand with a form of values, a scale, and alignment of its own."""
    low, high = _EXPONENTS[operand.dtype]
    mild = 10.0 ** draw.uniform(-3, 3)
    wild = 10.0 ** draw.uniform(low, high)
    offset = 0.0
    if name == "input":
        form = draw.among(
            {"normal": 50, "uniform": 8, "units": 8, "constant": 4, "some_constant": 4, "few": 6, "spike": 6,
             "trend": 4, "poison": 5, "zeros": 1, "largest": 1}
        )  # fmt: skip
        scale = draw.among({1.0: 60, mild: 15, wild: 20})
        far = [10.0, 1e3, -1e3, 1e5] if operand.dtype != torch.float16 else [10.0, -100.0, 1e3]
        offset = draw.among({0.0: 60, draw.choice(far): 30})
        if operand.dtype == torch.float16 and scale * abs(offset) > 3e4:
            scale = 1.0
    elif name == "grad_output":
        form = draw.among({"normal": 70, "ones": 15, "zeros": 2, "few": 5, "spike": 3, "poison": 2})
        scale = draw.among({1.0: 80, mild: 8, wild: 8})
    elif name in ("rstd", "running_var"):
        form, scale = "positive", draw.among({1.0: 80, mild: 10, wild if name != "rstd" else 1e3: 6})
        form = draw.among({"positive": 60, "saved": 40 if name == "rstd" else 0})
    elif name in ("mean", "running_mean"):
        form = draw.among({"normal": 50, "saved": 50 if name == "mean" else 0})
        scale, offset = draw.among({1.0: 85, 1e3: 8}), 0.0
    else:
        form = draw.among(
            {"normal": 80, "ones": 6, "zeros": 4, "few": 4, "poison": 2, "tail": 6 if name == "bias" else 1}
        )
        scale = draw.among({1.0: 84, mild: 8, wild: 8})
        if name == "scale":
            scale *= 0.3
    align = operand.placement
    if draw.chance(0.3):
        align = replace(align, offset=draw.randint(0, 7))
    return replace(operand, form=form, scale=scale, offset=offset, seed=draw.getrandbits(60), placement=align)
