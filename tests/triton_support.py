"""What the tests that compile Triton kernels with no GPU present share: cases, the launches that they make, sources."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import triton
from triton import knobs
from triton._utils import find_paths_if, get_iterable_path
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.runtime.jit import create_function_from_signature

from fusednorm.activations import FORMULAS
from fusednorm.backends.triton import instances
from fusednorm.backends.triton.instances import COLUMNS, FLAT, HELD, ROWS, TILES, WHOLE
from fusednorm.backends.triton.launch import Launch
from fusednorm.backends.triton.plans import base
from fusednorm.backends.triton.plans.running import MoveRunning
from fusednorm.backends.triton.plans.spread import RankKernels
from fusednorm.instance import CutGroups
from fusednorm.norm import Family, Norm, activation_of, norm_of
from fusednorm.operands import BackwardOperands, Gated, Operands, Sums
from fusednorm.problem import Problem
from fusednorm.problems import (
    backward_direction,
    backward_problem,
    forward_problem,
    sum_backward_problem,
    sum_forward_problem,
)

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx90a": GPUTarget("hip", "gfx90a", 64),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
    "gfx1100": GPUTarget("hip", "gfx1100", 32),
}
KERNELS = {
    "moments_of_planes", "moments_of_rows", "finalize", "apply", "reduce", "fold", "combine", "gradients",
    "gradients_of_numbers",
    "whole_forward", "held_forward", "held_backward", "rows_forward", "rows_backward", "row_totals", "columns_backward",
    "positions_forward", "positions_backward", "whole_sum_forward", "rows_sum_backward", "rows_gated_backward",
    "held_sum_forward", "held_sum_backward", "sum_apply", "sum_reduce", "sum_gradients", "sum_moments_of_planes",
    "sum_moments_of_rows", "positions_sum_forward", "positions_sum_backward", "pack_moments", "merge_ranks",
    "sum_ranks", "pack_sums", "pack_group_moments", "pack_group_sums", "spread_groups", "row_moments", "row_results",
    "row_sums", "row_gradients", "points_apply", "points_reduce", "points_gradients",
    "held_samples_backward", "flat_forward", "plane_rows_backward",
    "move_statistics",
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A forward and its backward, on an instance or on the ones that the heuristic chooses."""

    family: Family
    groups: int
    shape: tuple[int, ...]
    dtype: torch.dtype = BF16
    activation: str = ""
    last: bool = False
    modulated: bool = False
    training: bool = True
    parameters: torch.dtype | None = None  # None for the input's own
    instance: Any = None
    eps: float = 1e-5
    statistics: torch.dtype | None = None  # of given ones; None for that of the saved ones
    activation_parameter: float = 1.0
    sums: tuple[str, ...] = ()  # around the norm; a gate is each sample's, of elements, or of channels as small_add is
    keeps_sum: bool = True  # which a backward needs
    ranks: int = 0  # the processes that the input is spread over
    running: bool = False  # whether running statistics move too
    wanted: tuple[bool, ...] = (True,) * 5  # of the gradients: the input's, weight's, bias's, scale's and shift's


ONLY_INPUT = (True, False, False, False, False)

#: Between them every kernel, and every kind of tile, dtype and branch.
CASES: tuple[Case, ...] = (
    Case("group_norm", 32, (2, 320, 64, 64), activation="silu", instance=TILES),
    Case("group_norm", 32, (2, 320, 128, 128), activation="silu", last=True, instance=TILES),
    Case("group_norm", 32, (1, 128, 1024, 1024), activation="silu", instance=TILES),
    Case("group_norm", 32, (1, 128, 1024, 1024), activation="silu", last=True, instance=TILES),
    Case("group_norm", 8, (2, 24, 33, 31), FP16, "gelu", modulated=True, instance=TILES),
    Case("group_norm", 8, (2, 24, 33, 31), FP32, "gelu_tanh", last=True, modulated=True, instance=TILES),
    Case("group_norm", 8, (2, 24, 33, 31), modulated=True, parameters=FP32, instance=TILES),
    Case("batch_norm", 0, (8, 32, 28, 28), FP32, "silu", instance=TILES, running=True),
    Case("batch_norm", 0, (8, 32, 28, 28), FP64, "tanh", last=True, instance=TILES),
    Case("batch_norm", 0, (8, 32, 28, 28), training=False, instance=TILES),
    Case("batch_norm", 0, (128, 64, 7, 7), activation="relu", instance=TILES),
    Case("batch_norm", 0, (10, 64, 9, 9), FP16, "relu", instance=HELD),
    Case("batch_norm", 0, (8, 32, 28, 28), FP32, last=True, training=False, statistics=FP64, instance=TILES),
    Case("batch_norm", 0, (8, 32, 28, 28), FP64, training=False, statistics=BF16, instance=TILES),
    Case("group_norm", 2, (4096, 8, 64), modulated=True, instance=TILES),
    Case("group_norm", 32, (65536, 768), activation="relu"),
    Case("group_norm", 32, (8192, 1024), FP32, modulated=True),
    Case("batch_norm", 0, (65536, 22), modulated=True, instance=TILES),
    Case("batch_norm", 0, (5000, 700), FP16, "silu", modulated=True, parameters=FP32, instance=TILES),
    Case("batch_norm", 0, (5000, 64), modulated=True, training=False, instance=TILES),
    Case("batch_norm", 0, (5000, 64), modulated=True, training=False, instance=TILES, wanted=ONLY_INPUT),
    Case("batch_norm", 0, (8, 32, 28, 28), training=False, instance=TILES, wanted=ONLY_INPUT),
    Case("layer_norm", 1, (40, 20000), activation="silu", instance=ROWS, wanted=(False, True, True, False, False)),
    Case("batch_norm", 0, (8, 32, 28, 28), activation="silu", training=False, modulated=True, instance=FLAT),
    Case("batch_norm", 0, (8, 30, 7, 7), FP16, training=False, parameters=FP32, instance=FLAT),
    Case("batch_norm", 0, (8, 32, 28, 28), FP32, last=True, training=False, statistics=FP64, instance=FLAT),
    Case("batch_norm", 0, (8, 33, 5, 4), FP64, last=True, training=False, modulated=True, instance=FLAT),
    Case("group_norm", 4, (5, 12), FP32, instance=TILES),
    Case("group_norm", 32, (8, 320, 51, 51), activation="silu", instance=TILES),
    Case("group_norm", 20, (16, 100, 48, 48), activation="silu", last=True, instance=TILES),
    Case("group_norm", 1, (3, 15, 503, 503), FP16, activation="silu", last=True, instance=TILES),
    Case("group_norm", 7, (3, 259, 101, 101), FP16, activation="silu", last=True, instance=TILES),
    Case("instance_norm", 0, (3, 67, 255, 255), FP32, last=True, modulated=True, instance=TILES),
    Case("batch_norm", 0, (8, 32, 7, 7), modulated=True, instance=HELD),
    Case("group_norm", 32, (8, 512, 8, 8), activation="silu", instance=HELD),
    Case("group_norm", 32, (8, 768, 7, 7), FP32, "gelu", last=True, modulated=True, instance=HELD),
    Case("batch_norm", 0, (32, 256, 12, 12), activation="relu", instance=HELD),
    Case("batch_norm", 0, (8, 32, 5, 5), FP64, last=True, instance=HELD),
    Case("batch_norm", 0, (8, 512, 7, 7), FP16, "silu", last=True, modulated=True, instance=HELD),
    Case("batch_norm", 0, (3, 50, 3, 3), FP64, last=True, modulated=True, instance=HELD),
    Case("instance_norm", 0, (4, 384, 7, 7), FP16, last=True, instance=HELD),
    Case("instance_norm", 0, (300, 384, 7, 7), FP16, last=True, instance=HELD),
    Case("group_norm", 4, (5, 24, 6, 6), last=True, modulated=True, instance=HELD),
    Case("layer_norm", 1, (131072, 128), instance=WHOLE),
    Case("layer_norm", 1, (8192, 8192), FP32, instance=WHOLE),
    Case("rms_norm", 1, (65536, 96), FP64, "tanh", instance=WHOLE),
    Case("layer_norm", 1, (131072, 128), instance=ROWS),
    Case("layer_norm", 1, (131072, 128), parameters=FP32, instance=ROWS),
    Case("rms_norm", 1, (4096, 1024), FP16, "silu", instance=ROWS),
    Case("layer_norm", 1, (16384, 4096), instance=ROWS),
    Case("layer_norm", 1, (8192, 8192), FP32, instance=ROWS),
    Case("layer_norm", 1, (8000, 1439), FP16, instance=ROWS),
    Case("layer_norm", 1, (4096, 16384), instance=ROWS),
    Case("layer_norm", 1, (4096, 20000), activation="silu", instance=ROWS),
    Case("instance_norm", 0, (4, 2030, 64, 133), modulated=True),
    Case("instance_norm", 0, (25, 64, 160, 160), FP16, "relu"),
    Case("instance_norm", 0, (9, 43, 20049), FP32, "silu", modulated=True, instance=ROWS),
    Case("instance_norm", 0, (1, 300, 81, 64), FP64, instance=ROWS),
    Case("rms_norm", 1, (32, 200704), FP64, instance=ROWS),
    Case("rms_norm", 1, (65536, 96), FP64, "tanh", instance=ROWS),
    Case("layer_norm", 0, (8, 96, 56, 56), activation="gelu", instance=COLUMNS),
    Case("layer_norm", 0, (2, 256, 64, 64), FP32, instance=COLUMNS),
    Case("rms_norm", 0, (1, 384, 16, 16, 16), activation="silu", parameters=FP32, instance=COLUMNS),
    Case("layer_norm", 0, (4, 2048, 7, 7), FP16, instance=COLUMNS),
    Case("rms_norm", 0, (2, 768, 31, 33), FP64, instance=COLUMNS),
    Case("layer_norm", 0, (1, 5, 3), FP32, instance=COLUMNS),
    Case("layer_norm", 0, (8, 96, 56, 56), activation="gelu", modulated=True, instance=COLUMNS),
    Case("rms_norm", 0, (2, 768, 31, 33), FP32, modulated=True, instance=COLUMNS),
    Case("layer_norm", 0, (8, 1152, 16, 16), last=True, modulated=True),
    Case("layer_norm", 0, (2, 3072, 64, 64), last=True, modulated=True, parameters=FP32),
    Case("rms_norm", 0, (4, 128, 64, 32), FP32, "silu", last=True, modulated=True, instance=ROWS),
    Case("layer_norm", 0, (2, 12288, 32, 32), last=True, modulated=True),
    Case("layer_norm", 0, (2, 20000, 8, 8), FP16, "silu", last=True, modulated=True),
    Case("rms_norm", 0, (3, 768, 7, 9), FP64, last=True, modulated=True, instance=ROWS),
    Case("rms_norm", 1, (16384, 4096), instance=ROWS, sums=("pre_add",)),
    Case("layer_norm", 1, (8, 1024, 768), FP32, "gelu", instance=ROWS, sums=("pre_add", "scalar_gate", "post_add")),
    Case("rms_norm", 1, (4096, 16384), instance=ROWS, sums=("pre_add",)),
    Case("layer_norm", 1, (8000, 1439), FP16, "silu", instance=ROWS, sums=("post_add",)),
    Case("layer_norm", 1, (9, 64), FP64, instance=ROWS, sums=("pre_add", "post_add")),
    Case("layer_norm", 1, (4000, 6000), instance=ROWS, parameters=FP32, sums=("pre_add", "pre_gate")),
    Case("layer_norm", 0, (8, 1152, 16, 16), last=True, modulated=True, instance=ROWS, sums=("pre_add", "pre_gate")),
    Case("batch_norm", 0, (32, 64, 56, 56), activation="relu", last=True, instance=TILES, sums=("post_add",)),
    Case("batch_norm", 0, (32, 64, 28, 28), FP32, "relu", instance=TILES, sums=("post_add",)),
    Case("batch_norm", 0, (128, 64, 7, 7), activation="relu", instance=TILES, sums=("post_add",)),
    Case("batch_norm", 0, (8, 32, 28, 28), activation="relu", training=False, instance=TILES, sums=("post_add",)),
    Case("group_norm", 32, (8, 320, 51, 51), activation="silu", instance=TILES, sums=("post_add",)),
    Case("group_norm", 20, (16, 100, 48, 48), activation="silu", last=True, instance=TILES, sums=("post_add",)),
    Case("group_norm", 1, (3, 15, 503, 503), FP16, "silu", last=True, instance=TILES, sums=("post_add",)),
    Case("group_norm", 32, (16, 320, 128, 128), activation="silu", instance=TILES, sums=("pre_add",)),
    Case("group_norm", 32, (16, 320, 128, 128), last=True, instance=TILES, sums=("pre_add", "post_add")),
    Case("group_norm", 32, (16, 320, 128, 128), activation="silu", last=True, instance=TILES, sums=("small_add",)),
    Case("group_norm", 32, (8, 320, 51, 51), activation="silu", instance=TILES, sums=("small_add",)),
    Case("group_norm", 32, (8, 320, 51, 51), instance=TILES, sums=("pre_add", "pre_gate"), keeps_sum=False),
    Case("group_norm", 20, (16, 100, 48, 48), FP32, last=True, instance=TILES, sums=("pre_add",), keeps_sum=False),
    Case("group_norm", 1, (3, 15, 503, 503), FP16, last=True, instance=TILES, sums=("pre_add", "pre_gate")),
    Case("batch_norm", 0, (8, 32, 28, 28), FP64, training=False, instance=TILES, sums=("pre_add",)),
    Case("batch_norm", 0, (8, 32, 28, 28), FP64, instance=TILES, sums=("small_add", "post_add")),
    Case("batch_norm", 0, (32, 256, 12, 12), instance=HELD, sums=("small_add",)),
    Case("batch_norm", 0, (8, 64, 5, 5), last=True, instance=HELD, sums=("small_add", "post_add")),
    Case("group_norm", 32, (1, 128, 512, 512), last=True, instance=TILES, sums=("pre_bias",), keeps_sum=False),
    Case("group_norm", 20, (16, 100, 48, 48), FP16, "silu", last=True, instance=TILES, sums=("pre_add", "pre_bias")),
    Case("group_norm", 32, (8, 320, 51, 51), activation="silu", instance=TILES, sums=("small_add", "pre_bias")),
    Case("group_norm", 32, (2, 320, 33, 32), FP32, instance=TILES, sums=("pre_add", "pre_bias")),
    Case("group_norm", 32, (2, 1280, 16, 16), last=True, instance=HELD, sums=("pre_add", "pre_bias")),
    Case("group_norm", 32, (2, 640, 9, 9), FP16, "silu", instance=HELD, sums=("small_add", "pre_bias")),
    Case("layer_norm", 0, (8, 96, 56, 56), activation="gelu", instance=COLUMNS, sums=("pre_add", "post_add")),
    Case("layer_norm", 0, (4, 2048, 7, 7), FP16, instance=COLUMNS, sums=("small_add",)),
    Case("rms_norm", 0, (2, 768, 31, 33), FP64, "silu", instance=COLUMNS, sums=("pre_add", "pre_gate", "post_add")),
    Case("batch_norm", 0, (32, 256, 12, 12), activation="relu", instance=HELD, sums=("pre_add", "post_add")),
    Case("group_norm", 32, (8, 768, 7, 7), FP32, "gelu", last=True, instance=HELD, sums=("pre_add", "post_add")),
    Case("group_norm", 32, (8, 512, 8, 8), activation="silu", instance=WHOLE, sums=("pre_add", "post_add")),
    Case("batch_norm", 0, (32, 256, 56, 56), activation="relu", parameters=FP32, ranks=2),
    Case("batch_norm", 0, (128, 64, 7, 7), activation="relu", ranks=2),
    Case("batch_norm", 0, (8, 32, 28, 28), FP64, last=True, ranks=2),
    Case("group_norm", 32, (2, 320, 64, 64), activation="silu", last=True, modulated=True, ranks=4),
    Case("layer_norm", 1, (8192, 2048), activation="gelu", ranks=2),
    Case("rms_norm", 1, (16, 20000), FP16, ranks=2),
    Case("layer_norm", 1, (70, 96), FP64, ranks=2),
    Case("layer_norm", 0, (2, 256, 32, 32), FP32, "silu", modulated=True, ranks=2),
    Case("rms_norm", 0, (2, 768, 16, 16), last=True, modulated=True, parameters=FP32, ranks=2),
    *(
        Case("group_norm", 4, (1, 8, 16, 16), dtype, name, instance=TILES)
        for name in FORMULAS
        for dtype in (BF16, FP32)
    ),
)
#: Shapes that between them make the heuristic choose each of its configurations: samples, channels, positions; rows.
SAMPLES, CHANNELS = (1, 2, 32), (3, 7, 32, 96, 320, 512, 1280)
POSITIONS = ((1, 1), (2, 2), (7, 7), (16, 16), (33, 31), (64, 64), (128, 128), (512, 512), (1024, 1024))
ROW_COUNTS = (1, 5, 128, 4096, 131072)
ROW_SIZES = (1, 5, 24, 64, 128, 300, 512, 768, 1024, 2048, 4096, 5000, 8192, 16384, 20000, 32768, 65536)
MOST_ELEMENTS = 1 << 29
#: What a kernel repeats: tiles of a chunk, and steps of rows. A loop of one turn is compiled as no loop.
LOOPS = ("TILES", "tiles", "steps")


def grid() -> Iterator[Case]:
    """What makes the heuristic choose each of its configurations."""
    families: tuple[tuple[Family, int], ...]
    families = (("group_norm", 1), ("group_norm", 32), ("batch_norm", 0), ("instance_norm", 0))
    for dtype in (BF16, FP32, FP64):
        for n, c, s, last in product(SAMPLES, CHANNELS, POSITIONS, (False, True)):
            if n * c * s[0] * s[1] <= MOST_ELEMENTS:
                for family, groups in families:
                    if not groups or c % groups == 0:
                        yield Case(family, groups, (n, c, *s), dtype, "silu", last)
                if not last:
                    yield Case("layer_norm", 0, (n, c, *s), dtype, "silu")
        for rows, size in product(ROW_COUNTS, ROW_SIZES):
            if rows * size <= MOST_ELEMENTS:
                yield Case("layer_norm", 1, (rows, size), dtype)
                yield Case("rms_norm", 1, (rows, size), dtype)


class Made(NamedTuple):
    """A launch, and tensors that it was called with."""

    launch: Launch
    tensors: tuple[torch.Tensor | None, ...]

    @property
    def kernel(self) -> str:
        return self.launch.kernel.fn.__name__

    @property
    def numbers(self) -> dict[str, Any]:
        """The kernel's numbers by their names, compiled in or not."""
        names = self.launch.kernel.arg_names[len(self.tensors) :]
        return {**dict(zip(names, self.launch.scalars, strict=False)), **self.launch.constants}

    @property
    def dtype(self) -> torch.dtype:
        """Of the data."""
        return next(tensor for tensor in self.tensors if tensor is not None).dtype


#: The launches of one call, in their order.
Operation = list[Made]


class Capabilities(NamedTuple):
    """What the plans ask of a GPU."""

    approximates: bool
    overlaps: bool


def capabilities(target: str) -> Capabilities:
    gpu = TARGETS[target]
    return Capabilities(gpu.backend == "cuda", gpu.backend == "cuda" and gpu.arch >= 90)


def operations(able: Capabilities, cases: Iterable[Case]) -> list[Operation]:
    """What all cases launch on GPUs that can do so much, nothing of it compiled."""
    made: list[Operation] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Launch, "__call__", lambda launch, *tensors: made[-1].append(Made(launch, tensors)))
        patch.setattr(base, "approximates", lambda: able.approximates)
        patch.setattr(base, "overlaps", lambda: able.overlaps)
        patch.setattr(instances, "_common", lambda problem: None)
        patch.setattr(instances, "_elsewhere", lambda problem: None)
        for case in cases:
            _run(case, made)
    return made


def _plan(instance: Any, problem: Problem) -> Any:
    return (instance or instances.choose(problem)).plan(problem)


def _run(case: Case, made: list[Operation]) -> None:
    memory = torch.channels_last if case.last else torch.contiguous_format
    x = torch.empty(case.shape, dtype=case.dtype, device="meta", memory_format=memory)
    rows, compute = case.family in ("layer_norm", "rms_norm"), FP64 if case.dtype is FP64 else FP32
    dtype = case.parameters or case.dtype
    weight = torch.empty(case.shape[-1 if rows and case.groups else 1], dtype=dtype, device="meta")
    scale = None if not case.modulated else torch.empty(case.shape[:2], dtype=dtype, device="meta")
    bias = None if case.family == "rms_norm" else weight
    given = None if case.training else torch.empty(case.shape[1], dtype=case.statistics or compute, device="meta")
    activation = activation_of(case.activation or "", case.activation_parameter)
    norm = norm_of(case.family, case.groups, 1, case.eps, activation, case.training)
    made.append([])
    operands = Operands(x, weight, bias, scale, scale, given, given)
    if case.sums:
        _run_sums(case, norm, operands, made)
        return
    if case.ranks:
        _run_ranks(case, norm, operands, compute, made)
        return
    results = _plan(case.instance, forward_problem(norm, operands))(operands)
    if case.running:
        _move_running(results.mean, results.var, made)
    if case.instance not in (WHOLE, FLAT):
        made.append([])
        gradient = BackwardOperands(x, x, results.mean, results.rstd, weight, bias, scale, scale)
        _plan(case.instance, backward_problem(norm, gradient, backward_direction(case.wanted)))(gradient, case.wanted)


def _move_running(mean: torch.Tensor, var: torch.Tensor, made: list[Operation]) -> None:
    """By a number and by a tensor, with and without a counter."""
    running, counter = torch.empty_like(mean), torch.empty((), dtype=torch.int64, device="meta")
    move, shares = MoveRunning(), (0.1, torch.empty((), device="meta"))
    for share, counted in product(shares, (counter, None)):
        made.append([])
        move(running, running, mean, var, 1.01, share, counted)


def _run_sums(case: Case, norm: Norm, operands: Operands, made: list[Operation]) -> None:
    o, added = operands, torch.empty_like(operands.input)
    numbers = torch.empty(case.shape[:2], dtype=case.dtype, device="meta")
    gate = numbers
    if case.family in ("layer_norm", "rms_norm") and case.groups:
        shape = (case.shape[0], *(1,) * (len(case.shape) - 2), case.shape[-1])
        gate = torch.empty(shape, dtype=case.dtype, device="meta")
    scalar = torch.empty((), dtype=FP32, device="meta")
    each = {"pre_add": added, "small_add": numbers, "pre_gate": gate, "scalar_gate": scalar, "post_add": added}
    each["pre_bias"] = numbers[0]
    sums = Sums(**{name.replace("small", "pre").replace("scalar", "pre"): each[name] for name in case.sums})
    keeps_sum = (sums.pre_add is not None or sums.pre_bias is not None) and case.keeps_sum
    results = _plan(case.instance, sum_forward_problem(norm, o, sums, keeps_sum))(o, sums)
    if case.instance is WHOLE or not case.training or not case.keeps_sum:
        return
    made.append([])
    post_add = sums.post_add if norm.activation else None
    gradient = BackwardOperands(o.input, o.input, results.mean, results.rstd, o.weight, o.bias, o.scale, o.shift)
    gated = None if sums.pre_gate is None or case.instance is not ROWS else Gated(sums.pre_gate, added, True)
    problem = sum_backward_problem(norm, gradient, "backward", post_add, sums.pre_add is not None, gated)
    _plan(case.instance, problem)(gradient, (True,) * 5, post_add, results.sum, gated)
    if "small_add" in case.sums and case.instance is TILES and case.family != "batch_norm":
        problem = sum_backward_problem(norm, gradient, "backward", post_add, False, grad_numbers=True)
        made.append([])
        _plan(case.instance, problem)(gradient, (True,) * 5, post_add, None)


def _run_ranks(case: Case, norm: Norm, operands: Operands, compute: torch.dtype, made: list[Operation]) -> None:
    """Both directions of one of so many processes. Float64 moves running statistics by a number in a tensor."""
    o, kernels, wanted = operands, RankKernels(), (True,) * 5
    plan: Any = TILES.spread(forward_problem(norm, o))
    packed = plan.local_moments(o.input)
    running = torch.empty(case.shape[1], device="meta") if case.family == "batch_norm" else None
    share = torch.empty((), device="meta") if case.dtype is FP64 else 0.1
    parts = packed.expand(case.ranks, -1)
    made.append([])
    counter = None if running is None else torch.empty((), dtype=torch.int64, device="meta")
    shape = (packed.numel() // 2,)
    found = kernels.merge_moments(parts, shape, case.eps, compute, running, running, share, counter)
    mean = found.mean if norm.has_mean else None
    plan.output(o, mean, found.rstd)
    made.append([])
    gradient = BackwardOperands(o.input, o.input, mean, found.rstd, o.weight, o.bias, o.scale, o.shift)
    plan = TILES.spread(backward_problem(norm, gradient))
    sums = plan.local_sums(gradient)
    totals, grads = plan.own_sums(gradient, sums, wanted)
    totals = totals.expand(case.ranks, -1)
    replicated = norm.family not in ("layer_norm", "rms_norm")
    parts = plan.packed_sums(sums).expand(case.ranks, -1) if replicated else packed
    made.append([])
    plan.finish(gradient, kernels.sum_over_ranks(totals, found.count, None, compute)[1], grads, wanted)
    if not replicated:
        return
    made.append([])
    summed, means = kernels.sum_over_ranks(parts, found.count, compute, compute)
    plan.parameters(gradient, summed, wanted)
    plan.totals_of_ranks(gradient, means)
    if norm.family == "group_norm":
        _run_cut(case, compute, made)


def _run_cut(case: Case, compute: torch.dtype, made: list[Operation]) -> None:
    """What is made of channels whose groups are cut, and of what all ranks sent about the groups."""
    kernels, cut = RankKernels(), CutGroups(case.shape[0], case.groups, case.shape[1] // case.groups, 17, 3)
    channels = torch.empty(2 * cut.samples * cut.channels + 1, dtype=FP64, device="meta")
    for packed in (kernels.group_moments(channels, cut), kernels.group_sums(channels[:-1], cut)):
        made.append([])
        parts = packed.expand(case.ranks, -1)
        if packed.numel() == 3 * cut.units:
            kernels.channel_statistics(kernels.merge_moments(parts, (cut.units,), case.eps, compute), cut)
        else:
            means = kernels.sum_over_ranks(parts, packed[:1], None, compute)[1]
            assert means is not None
            kernels.channel_means(means, cut)


def configuration(made: Made) -> tuple[Any, ...]:
    """What the heuristic chose of a launch: the tile, its warps and stages, and the branches that its code takes."""
    constants = made.launch.constants
    names = ["BLOCK_C", "BLOCK_S", "BLOCK_U", "BLOCK_K", "STAGES", "RELOAD", "LAST", "PER_BATCH", "MERGE"]
    loops = [made.numbers.get(name, 1) > 1 for name in LOOPS]
    merged = None
    if made.kernel in ("finalize", "combine"):  # elsewhere the size of a merge is no choice
        merged = constants["BLOCK_R"] * constants["BLOCK_D"]
    return made.kernel, made.dtype, made.launch.options["num_warps"], merged, *loops, *map(constants.get, names)


def first_of_each(operations: Iterable[Operation]) -> list[Made]:
    """One launch of each configuration."""
    found: dict[Any, Made] = {}
    for operation in operations:
        for made in operation:
            found.setdefault(configuration(made), made)
    return list(found.values())


@cache
def _cases_that_differ() -> list[Case]:
    """One case of the grid for each configuration that the heuristic chooses on one GPU; the others differ in flags."""
    found: dict[Any, Case] = {}
    for case in grid():
        for operation in operations(capabilities("sm_90"), [case]):
            for made in operation:
                found.setdefault(configuration(made), case)
    return list(dict.fromkeys(found.values()))


@cache
def configurations(able: Capabilities) -> list[Made]:
    """One launch of each configuration that the heuristic chooses."""
    return first_of_each(operations(able, _cases_that_differ()))


def branches(made: Made) -> set[Any]:
    """The ways that a launch takes through its kernel's code, by the constants and the tensors that decide them."""
    kernel, constants = made.kernel, made.launch.constants
    found: set[Any] = {kernel}
    for name, value in constants.items():
        if isinstance(value, bool):
            found.add((kernel, name, value))
        elif name == "STAGES" or name.startswith("BLOCK"):
            found.add((kernel, name, value > 1))
        elif name in ("VALUE", "DERIVATIVE"):
            found.add((name, str(value)))
    for name in LOOPS:
        if name in made.numbers:
            found.add((kernel, name, made.numbers[name] > 1))
    if "K" in constants and "BLOCK_K" in constants:
        found.add((kernel, "K", constants["K"] is not None and constants["K"] % constants["BLOCK_K"] == 0))
    for place, tensor in enumerate(made.tensors):
        found.add((kernel, place, None if tensor is None else tensor.dtype))
    return found


@cache
def spread(able: Capabilities) -> list[Made]:
    """Few launches that between them take every branch that any launch of the cases and of the grid takes."""
    known = [made for operation in operations(able, CASES) for made in operation] + configurations(able)
    pool = [(made, branches(made)) for made in known]
    missing = set().union(*(taken for _, taken in pool))
    chosen = []
    while missing:
        made, taken = max(pool, key=lambda entry: len(entry[1] & missing))
        chosen.append((made, taken))
        missing -= taken
    # Later ones may have between them all that an earlier one was chosen for.
    times = Counter(branch for _, taken in chosen for branch in taken)
    for entry in chosen.copy():
        if all(times[branch] > 1 for branch in entry[1]):
            chosen.remove(entry)
            times.subtract(entry[1])
    return [made for made, _ in chosen]


@cache
def _binder(kernel: Any) -> Any:
    """Triton's own function from a launch's arguments to what it compiles a kernel for."""
    return create_function_from_signature(kernel.signature, kernel.params, CUDABackend)


def specialization(made: Made) -> tuple[dict[str, Any], list[Any]]:
    """The arguments of a launch by their names, and what Triton compiles its kernel for, given aligned tensors."""
    launch, tensors = made
    arguments, found, _ = _binder(launch.kernel)(*tensors, *launch.scalars, **launch.constants)
    return arguments, found


def compile_key(made: Made) -> Any:
    """Launches of one key run one compiled kernel."""
    return made.kernel, str(specialization(made)[1]), str(made.launch.options)


def source(made: Made) -> ASTSource:
    """What Triton would compile for a launch, given aligned tensors."""
    arguments, found = specialization(made)
    values = list(arguments.values())
    types, attributes = [entry[0] for entry in found], [entry[1] for entry in found]
    constants = find_paths_if(types, lambda _, value: value == "constexpr")
    facts = find_paths_if(attributes, lambda _, value: isinstance(value, str))
    return ASTSource(
        made.launch.kernel,
        dict(zip(arguments, types, strict=True)),
        {path: get_iterable_path(values, path) for path in constants},
        {path: CUDABackend.parse_attr(get_iterable_path(attributes, path)) for path in facts},
    )


class _ReachedError(Exception):
    """The stage that was asked for has made its code, which this carries."""


def lowered(made: Made, stage: str) -> str:
    """A launch's code for sm_90 as a stage of Triton's compiler makes it, without the stages behind."""
    key = (stage, compile_key(made))
    if key not in _lowered:
        _lowered[key] = _lower(made, stage)
    return _lowered[key]


_lowered: dict[Any, str] = {}


def _lower(made: Made, stage: str) -> str:
    def end(backend: Any = None, stages: Any = None, *_: Any) -> tuple[str, str]:
        if stages is not None:
            make = stages[stage]

            def reach(code: Any, metadata: Any) -> None:
                raise _ReachedError(str(make(code, metadata)))

            stages[stage] = reach
        return stage, stage  # by which Triton's cache knows the stages

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(knobs.runtime, "add_stages_inspection_hook", end)
        try:
            triton.compile(source(made), target=TARGETS["sm_90"], options=made.launch.options)
        except _ReachedError as reached:
            return str(reached)
    raise AssertionError(f"Triton's compiler has no stage {stage}")
