"""Kernels that the heuristic chooses compile ahead of time for NVIDIA and AMD, with no GPU present."""

from __future__ import annotations

import math
import re
import subprocess
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from triton_support import (  # noqa: E402
    BF16,
    CASES,
    FP32,
    KERNELS,
    TARGETS,
    Capabilities,
    Case,
    Made,
    branches,
    capabilities,
    configurations,
    first_of_each,
    grid,
    lowered,
    operations,
    source,
    spread,
)

from fusednorm.backends.triton.instances import HELD, WHOLE  # noqa: E402
from fusednorm.norm import Family  # noqa: E402

#: Bytes that a thread may spill: up to 78 registers of float32 rows of 16384 elements, and 24 of bfloat16 ones: still
#: faster than through triton.tiles, and as fast as with twice the warps, which AMD's GPUs do not have.
MOST_SPILLED = 320
#: A multiprocessor's shared memory for one program, and a unit's LDS on AMD.
MOST_SHARED = {"cuda": 99 << 10, "hip": 64 << 10}


def _launches(target: str, cases: Iterable[Case]) -> list[Made]:
    return [made for operation in operations(capabilities(target), cases) for made in operation]


@cache
def _branches_of_all(able: Capabilities) -> set[Any]:
    launches = [made for operation in operations(able, CASES) for made in operation]
    return set().union(*map(branches, [*launches, *configurations(able)]))


def _alike(target: str) -> list[str]:
    """The targets of a target's vendor: one compiler reads their kernels, and one spread is shared among them."""
    return [name for name in TARGETS if TARGETS[name].backend == TARGETS[target].backend]


def _share(target: str) -> list[Made]:
    """A target's share of its spread."""
    alike = _alike(target)
    return spread(capabilities(target))[alike.index(target) :: len(alike)]


@cache
def _between(alike: tuple[str, ...]) -> dict[str, list[Made]]:
    """What is in no share, by targets that can run it: the spreads of targets that can do different things have not the
    same order."""
    taken = set().union(*(branches(made) for name in alike for made in _share(name)))
    found: dict[str, list[Made]] = {name: [] for name in alike}
    for name in alike:
        for made in spread(capabilities(name)):
            if not branches(made) <= taken:
                found[name].append(made)
                taken |= branches(made)
    return found


def _sample(target: str) -> list[Made]:
    """A target's share of the spread, its part of what is in no share, and each kernel that these are without."""
    share = [*_share(target), *_between(tuple(_alike(target)))[target]]
    known = {made.kernel for made in share}
    others = {made.kernel: made for made in reversed(spread(capabilities(target))) if made.kernel not in known}
    return [*share, *others.values()]


def _resources(compiled: Any, target: str) -> tuple[int, int]:
    """Registers of a thread, and bytes that it spills to memory."""
    if TARGETS[target].backend == "hip":
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


def _instructions(compiled: Any) -> list[str]:
    """The machine instructions of a kernel for NVIDIA, in their order."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True).stdout
    return re.findall(r"/\*[0-9a-f]+\*/\s+(?:@!?\w+\s+)?([A-Z]\S*)", text)


def _compile(made: Made, target: str) -> tuple[str, str, bool]:
    """Compiles a launch; what it is, what it needs, and whether that is little enough."""
    options = made.launch.options
    compiled = triton.compile(source(made), target=TARGETS[target], options=options)
    shared, (registers, spilled) = compiled.metadata.shared, _resources(compiled, target)
    name = f"{target} {made.kernel} {options['num_warps']} warps {made.dtype}"
    report = f"{registers} registers, {spilled} bytes spilled, {shared} bytes of shared memory"
    print(name, report)
    return name, report, shared <= MOST_SHARED[TARGETS[target].backend] and spilled <= MOST_SPILLED


def _excessive(launches: Iterable[Made], target: str, record: Callable[..., None] | None = None) -> list[Any]:
    """The launches that need more than a GPU has, of those that all compile."""
    found = []
    for made in launches:
        name, report, fits = _compile(made, target)
        if record is not None:
            record(name, report)
        if not fits:
            found.append((name, report, made.launch.constants))
    return found


def test_cases_launch_every_kernel() -> None:
    assert {made.kernel for made in _launches("sm_90", CASES)} == KERNELS


@pytest.mark.parametrize("target", TARGETS)
def test_samples_take_every_branch(target: str) -> None:
    """A vendor's targets take between them every branch that all launches take, and each target has every kernel."""
    every, taken = set(), set()
    for name in _alike(target):
        every |= _branches_of_all(capabilities(name))
        taken.update(*map(branches, _sample(name)))
    assert taken == every
    assert {made.kernel for made in _sample(target)} == KERNELS


@pytest.mark.parametrize("target", TARGETS)
def test_compiles(target: str, record_property: Any) -> None:
    assert _excessive(_sample(target), target, record_property) == []


@pytest.mark.parametrize(
    "case",
    [
        Case("rms_norm", 1, (2, 1024), torch.float16, instance=WHOLE),
        Case("layer_norm", 1, (1, 1001), torch.float16, instance=WHOLE),
        Case("layer_norm", 1, (1, 257), torch.float32, instance=WHOLE),
        Case("batch_norm", 0, (56, 16), torch.float16, "gelu", instance=HELD),
    ],
)
def test_a_small_forward_loads_before_warps_wait_for_one_another(case: Case) -> None:
    """Parameters that are loaded first are under way before threads wait for one another, too."""
    made = next(made for made in _launches("sm_90", [case]) if made.kernel.endswith("forward"))
    found = _instructions(triton.compile(source(made), target=TARGETS["sm_90"], options=made.launch.options))
    loads = [place for place, name in enumerate(found) if name.startswith("LDG")]
    sums = [place for place, name in enumerate(found) if name.startswith("SHFL")]
    waits = [place for place, name in enumerate(found) if name.startswith("BAR") and place > min(sums)]
    assert len(loads) >= 2
    assert not waits or max(loads) < min(waits)
    assert not made.launch.constants.get("FIRST") or max(loads) < min(sums)


@pytest.mark.parametrize("dtypes", [(BF16, BF16), (BF16, FP32), (FP32, BF16), (FP32, FP32)], ids=str)
@pytest.mark.parametrize("length", [64, 139, 333, 512, 1001, 1024, 6296, 8331])
def test_parameters_of_rows_are_loaded_by_the_threads_that_use_them(
    length: int, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    """The gain of a row and its data have one layout, whatever the width of their loads. (``rows_backward`` loads
    parameters once for many rows.)"""
    data, parameters = dtypes
    for rows in (2, 700):
        for made in _launches("sm_90", [Case("layer_norm", 1, (rows, length), data, parameters=parameters)]):
            if made.kernel not in ("combine", "rows_backward"):
                assert [values for values in _moved(made) if values >= length] == [], made.kernel


def _moved(made: Made) -> list[int]:
    """The numbers of values that a kernel moves between threads by way of shared memory."""
    shapes = re.findall(r"ttg.convert_layout .*-> tensor<([0-9x]+)x", lowered(made, "ttgir"))
    return [math.prod(map(int, shape.split("x"))) for shape in shapes]


@pytest.mark.parametrize("family", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize(("rows", "length", "dtype"), [(625003, 24, BF16), (781253, 32, BF16), (281253, 96, BF16),
                                                       (281253, 128, BF16), (156253, 96, FP32)])  # fmt: skip
def test_short_rows_have_one_layout(family: Family, rows: int, length: int, dtype: torch.dtype) -> None:
    """A step reads what was copied for it once, and computes it once."""
    made = _launches("sm_90", [Case(family, 1, (rows, length), dtype, parameters=dtype)])
    backward = next(each for each in made if each.kernel == "rows_backward")
    assert backward.numbers["STAGES"] > 1
    read = re.findall(r"ttg\.local_load (%\S+)", lowered(backward, "ttgir"))
    assert read
    assert len(read) == len(set(read))
    assert [values for values in _moved(backward) if values > backward.numbers["BLOCK_K"]] == []


@pytest.mark.parametrize(("sums", "moved"), [(("pre_add",), (2, 2)), (("post_add",), (2, 1)), ((), (1, 1))])
def test_sums_move_each_tensor_once(sums: tuple[str, ...], moved: tuple[int, int]) -> None:
    """Rows of s = x + h and their norm: x and h are read, s and y written, once each; so is post_add read."""
    made = _launches("sm_90", [Case("rms_norm", 1, (16384, 4096), activation="silu", instance=WHOLE, sums=sums)])[0]
    code = lowered(made, "ttgir")
    weights = 1
    found = (len(re.findall(rf"tt\.{access} .*4096x!tt\.ptr<bf16>", code)) for access in ("load", "store"))
    assert tuple(found) == (moved[0] + weights, moved[1])


def test_odd_planes_find_their_places_again_behind_the_statistics() -> None:
    """Each division by the length of a plane is made for the loads, and again for the stores; in between no register
    keeps what it gave."""
    for made in _launches("sm_90", [Case("batch_norm", 0, (11, 320, 25, 25), FP32, "relu", instance=HELD)]):
        assert made.numbers["BLOCK_R"] == 0
        thread = made.numbers["BLOCK_K"] // (32 * made.launch.options["num_warps"])
        assert len(re.findall(r"mul\.hi", lowered(made, "ptx"))) == 2 * thread


def test_the_backward_of_rows_computes_nothing_in_lanes_that_no_row_fills() -> None:
    """A quarter of the lanes of rows of 1536. An exponential and a reciprocal of zero may be left, outside the loop."""

    def special(size: int) -> int:
        backward = operations(capabilities("sm_90"), [Case("layer_norm", 1, (20000, size), activation="silu")])[1][0]
        options = {**backward.launch.options, "num_warps": 2}
        compiled = triton.compile(source(backward), target=TARGETS["sm_90"], options=options)
        return sum(name.startswith("MUFU") for name in _instructions(compiled))

    assert special(1536) <= 3 * special(2048) // 4 + 2


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("target", TARGETS)
def test_each_case_compiles_for_each_target(target: str) -> None:
    assert _excessive(_launches(target, CASES), target) == []


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("target", TARGETS)
def test_each_configuration_compiles_for_each_target(target: str) -> None:
    assert _excessive(first_of_each(operations(capabilities(target), grid())), target) == []
