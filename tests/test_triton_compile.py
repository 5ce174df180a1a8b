"""Kernels that the heuristic chooses compile ahead of time for NVIDIA and AMD, with no GPU present."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import pytest
import torch

from fusednorm.arguments import activation_of
from fusednorm.dispatch import backward_problem, forward_problem
from fusednorm.problem import Problem

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from fusednorm.backends.triton import instances  # noqa: E402
from fusednorm.backends.triton.instances import ROWS, TILES, WHOLE  # noqa: E402
from fusednorm.backends.triton.launch import Launch  # noqa: E402
from fusednorm.backends.triton.plans import base  # noqa: E402

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx90a": GPUTarget("hip", "gfx90a", 64),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
    "gfx1100": GPUTarget("hip", "gfx1100", 32),
}
#: (instance, None for the one that the heuristic chooses, family, groups, shape, dtype, activation, NHWC, modulated).
Case = tuple[Any, Any, int, tuple[int, ...], torch.dtype, str, bool, bool]
#: Between them every kernel, and every kind of tile, dtype and branch.
CASES: tuple[Case, ...] = (
    (TILES, "group_norm", 32, (2, 320, 64, 64), torch.bfloat16, "silu", False, False),
    (TILES, "group_norm", 32, (2, 320, 128, 128), torch.bfloat16, "silu", True, False),
    (TILES, "group_norm", 32, (1, 128, 1024, 1024), torch.bfloat16, "silu", False, False),
    (TILES, "group_norm", 32, (1, 128, 1024, 1024), torch.bfloat16, "silu", True, False),
    (TILES, "group_norm", 8, (2, 24, 33, 31), torch.float16, "gelu", False, True),
    (TILES, "group_norm", 8, (2, 24, 33, 31), torch.float32, "gelu_tanh", True, True),
    (TILES, "batch_norm", 0, (8, 32, 28, 28), torch.float32, "silu", False, False),
    (TILES, "batch_norm", 0, (8, 32, 28, 28), torch.float64, "tanh", True, False),
    (WHOLE, "layer_norm", 1, (131072, 128), torch.bfloat16, "", False, False),
    (WHOLE, "layer_norm", 1, (8192, 8192), torch.float32, "", False, False),
    (WHOLE, "rms_norm", 1, (65536, 96), torch.float64, "tanh", False, False),
    (ROWS, "layer_norm", 1, (131072, 128), torch.bfloat16, "", False, False),
    (ROWS, "rms_norm", 1, (4096, 1024), torch.float16, "silu", False, False),
    (ROWS, "layer_norm", 1, (16384, 4096), torch.bfloat16, "", False, False),
    (ROWS, "layer_norm", 1, (8192, 8192), torch.float32, "", False, False),
    (ROWS, "layer_norm", 1, (4096, 16384), torch.bfloat16, "", False, False),
    (ROWS, "layer_norm", 1, (4096, 20000), torch.bfloat16, "silu", False, False),
    (ROWS, "rms_norm", 1, (32, 200704), torch.float64, "", False, False),
    (ROWS, "rms_norm", 1, (65536, 96), torch.float64, "tanh", False, False),
)
#: Shapes that between them make the heuristic choose each of its configurations: samples, channels, positions; rows.
SAMPLES, CHANNELS = (1, 2, 32), (3, 7, 32, 96, 320, 512, 1280)
POSITIONS = ((1, 1), (2, 2), (7, 7), (16, 16), (33, 31), (64, 64), (128, 128), (512, 512), (1024, 1024))
ROW_COUNTS = (1, 5, 128, 4096, 131072)
ROW_SIZES = (1, 5, 24, 64, 128, 300, 512, 768, 1024, 2048, 4096, 5000, 8192, 16384, 20000, 32768, 65536)
MOST_ELEMENTS = 1 << 29
#: Bytes that a thread may spill: up to 78 registers of float32 rows of 16384 elements, and 24 of bfloat16 ones: still
#: faster than through triton.tiles, and as fast as with twice the warps, which AMD's GPUs do not have.
MOST_SPILLED = 320
#: A multiprocessor's shared memory for one program, and a unit's LDS on AMD.
MOST_SHARED = {"cuda": 99 << 10, "hip": 64 << 10}


class _Recorder:
    """Stands in for a launch and keeps what would have been compiled."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[tuple[Launch, tuple[torch.Tensor | None, ...]]] = []
        found = self.found
        monkeypatch.setattr(Launch, "__call__", lambda launch, *tensors: found.append((launch, tensors)))


def _plan(instance: Any, problem: Problem) -> Any:
    return (instance or instances.choose(problem)).plan(problem)


def _run(case: Case) -> None:
    instance, family, groups, shape, dtype, activation, last, modulated = case
    memory = torch.channels_last if last else torch.contiguous_format
    x = torch.empty(shape, dtype=dtype, device="meta", memory_format=memory)
    rows = family in ("layer_norm", "rms_norm")
    weight = torch.empty(shape[-1] if rows else shape[1], dtype=dtype, device="meta")
    scale = None if not modulated else torch.empty(shape[:2], dtype=dtype, device="meta")
    bias = None if family == "rms_norm" else weight
    common = (weight, bias, scale, scale, family, groups, 1, activation_of(activation, 1.0) if activation else None)
    forward = _plan(instance, forward_problem(x, *common))
    _, mean, rstd, _ = forward(x, weight, bias, scale, scale, None, None, 1e-5)
    if instance is not WHOLE:
        backward = _plan(instance, backward_problem(x, x, *common))
        backward(x, x, mean, rstd, weight, bias, scale, scale, (True,) * 5)


def _grid() -> Iterator[Case]:
    """What makes the heuristic choose each of its configurations."""
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        for n, c, s, last in product(SAMPLES, CHANNELS, POSITIONS, (False, True)):
            if n * c * s[0] * s[1] <= MOST_ELEMENTS:
                for family, groups in (("group_norm", 1), ("group_norm", 32), ("batch_norm", 0), ("instance_norm", 0)):
                    if not groups or c % groups == 0:
                        yield None, family, groups, (n, c, *s), dtype, "silu", last, False
        for rows, size in product(ROW_COUNTS, ROW_SIZES):
            if rows * size <= MOST_ELEMENTS:
                for family in ("layer_norm", "rms_norm"):
                    yield None, family, 1, (rows, size), dtype, "", False, False


def _recorded(monkeypatch: pytest.MonkeyPatch, gpu: GPUTarget, cases: Iterable[Case]) -> list[Any]:
    """The launches of all cases as this GPU would get them, with their tensors."""
    recorder = _Recorder(monkeypatch)
    monkeypatch.setattr(base, "approximates", lambda: gpu.backend == "cuda")
    monkeypatch.setattr(base, "overlaps", lambda: gpu.backend == "cuda" and gpu.arch >= 90)
    monkeypatch.setattr(instances, "_common", lambda problem: None)
    for case in cases:
        _run(case)
    return recorder.found


def _configuration(launch: Launch, tensors: tuple[torch.Tensor | None, ...]) -> tuple[Any, ...]:
    """What the heuristic chose of a launch: the tile, its warps and stages, and the branches that its code takes."""
    names = ["BLOCK_C", "BLOCK_S", "BLOCK_U", "BLOCK_K", "STAGES", "RELOAD", "LAST", "PER_BATCH", "MERGE"]
    loops = [launch.constants.get(name, 1) > 1 for name in ("TILES", "STEPS")]
    first = next(tensor for tensor in tensors if tensor is not None)
    kernel, merged = launch.kernel.fn.__name__, None
    if kernel in ("finalize", "combine"):  # elsewhere the size of a merge is no choice
        merged = launch.constants["BLOCK_R"] * launch.constants["BLOCK_D"]
    return kernel, first.dtype, launch.options["num_warps"], merged, *loops, *map(launch.constants.get, names)


def _configurations(monkeypatch: pytest.MonkeyPatch, target: str) -> list[Any]:
    found: dict[Any, Any] = {}
    for launch, tensors in _recorded(monkeypatch, TARGETS[target], _grid()):
        found.setdefault(_configuration(launch, tensors), (launch, tensors))
    return list(found.values())


def _source(launch: Launch, tensors: tuple[torch.Tensor | None, ...]) -> Any:
    short = {torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
    names = launch.kernel.arg_names
    values: list[Any] = [*tensors, *launch.scalars]
    signature, constants, attributes = {}, {}, {}
    for place, name in enumerate(names):
        value = values[place] if place < len(values) else launch.constants[name]
        if isinstance(value, torch.Tensor):
            signature[name] = "*" + short[value.dtype]
            attributes[(place,)] = [["tt.divisibility", 16]]
        elif place < len(values) and value is not None and value != 1:
            signature[name] = "i32"
            if value % 16 == 0:
                attributes[(place,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "constexpr"
            constants[(place,)] = value
    return ASTSource(launch.kernel, signature, constants, attributes)


def _resources(compiled: Any, target: GPUTarget) -> tuple[int, int]:
    """Registers of a thread, and bytes that it spills to memory."""
    if target.backend == "hip":
        text = compiled.asm["amdgcn"]
        registers, spills = (int(re.findall(rf"\.vgpr_{name}: +(\d+)", text)[0]) for name in ("count", "spill_count"))
        return registers, 4 * spills
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.findall(rf"{name}:(\d+)", text)[0]) for name in ("REG", "STACK"))
    return registers, stack


def _compile(launch: Launch, tensors: tuple[torch.Tensor | None, ...], target: str) -> tuple[str, str, bool]:
    """Compiles a launch; what it is, what it needs, and whether that is little enough."""
    gpu = TARGETS[target]
    compiled = triton.compile(_source(launch, tensors), target=gpu, options=launch.options)
    shared, (registers, spilled) = compiled.metadata.shared, _resources(compiled, gpu)
    first = next(tensor for tensor in tensors if tensor is not None)
    name = f"{target} {launch.kernel.fn.__name__} {launch.options['num_warps']} warps {first.dtype}"
    report = f"{registers} registers, {spilled} bytes spilled, {shared} bytes of shared memory"
    print(name, report)
    return name, report, shared <= MOST_SHARED[gpu.backend] and spilled <= MOST_SPILLED


def _excessive(launches: Iterable[Any], target: str, record: Callable[..., None] | None = None) -> list[Any]:
    """The launches that need more than a GPU has, of those that all compile."""
    found = []
    for launch, tensors in launches:
        name, report, fits = _compile(launch, tensors, target)
        if record is not None:
            record(name, report)
        if not fits:
            found.append((name, report, launch.constants))
    return found


@pytest.mark.parametrize("target", TARGETS)
def test_compiles(target: str, monkeypatch: pytest.MonkeyPatch, record_property: Any) -> None:
    found = _recorded(monkeypatch, TARGETS[target], CASES)
    assert {launch.kernel.fn.__name__ for launch, _ in found} == {
        "moments_of_planes", "moments_of_rows", "finalize", "apply", "reduce", "combine", "gradients", "whole_forward",
        "rows_forward", "rows_backward", "row_totals", "columns_backward",
    }  # fmt: skip
    assert _excessive(found, target, record_property) == []


@pytest.mark.parametrize("target", TARGETS)
def test_each_configuration_compiles_for_one_target(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, count = list(TARGETS).index(target), len(TARGETS)
    assert _excessive(_configurations(monkeypatch, target)[place::count], target) == []


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("target", TARGETS)
def test_each_configuration_compiles_for_each_target(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _excessive(_configurations(monkeypatch, target), target) == []
