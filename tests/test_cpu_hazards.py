"""The cache on disk, the kept blocks of memory and the choice of instance; threads have test_cpu_threads.py."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cpu_support import process_environment
from memory_support import needs_kept

import fusednorm
from fusednorm import choice, dispatch
from fusednorm.activations import resolve
from fusednorm.backends.cpu import compiler, memory
from fusednorm.backends.cpu.instances import choose
from fusednorm.norm import Family, norm_of
from fusednorm.problem import Layout, Problem, View

# --- the cache on disk ---

FIRST_CALL = """
import sys, time, torch, fusednorm
x = torch.randn(2, 8, 16, 16)
start = time.perf_counter()
y = fusednorm.group_norm(x, 4, activation="silu")
first = time.perf_counter() - start
start = time.perf_counter()
fusednorm.group_norm(x, 4, activation="silu")
print(int("numba" in sys.modules), first - (time.perf_counter() - start))
"""


def first_call(cache: Path) -> tuple[bool, float]:
    """Whether a process with this cache compiled anything for its first call, and the seconds beyond a second one's."""
    done = subprocess.run(
        [sys.executable, "-c", FIRST_CALL],
        env=process_environment(FUSEDNORM_CACHE_DIR=cache),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    compiled, seconds = done.stdout.split()
    return compiled == "1", float(seconds)


@pytest.fixture(scope="module")
def first_process(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """The cache that a first process has left, and the seconds of its first call."""
    cache = tmp_path_factory.mktemp("cache")
    compiled, seconds = first_call(cache)
    assert compiled
    return cache, seconds


def test_the_second_process_compiles_nothing(first_process: tuple[Path, float]) -> None:
    assert not first_call(first_process[0])[0]


@pytest.mark.timing
def test_a_cached_first_call_takes_a_quarter_of_a_compiled_one(first_process: tuple[Path, float]) -> None:
    cache, compiled = first_process
    assert any(first_call(cache)[1] < compiled / 4 for _ in range(3))


def test_a_damaged_file_is_not_used(first_process: tuple[Path, float], tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    shutil.copytree(first_process[0], cache)
    files = [file for file in cache.rglob("planes-*") if file.is_file()]
    assert files
    for file in files:
        file.write_bytes(file.read_bytes()[:-7])
    assert first_call(cache)[0]  # compiled again, and right
    assert not first_call(cache)[0]  # and written again


@pytest.mark.parametrize("damage", [lambda content: content[:-7], lambda content: b"", lambda content: b"\0" + content])
def test_a_damaged_file_is_reported(
    damage: Callable[[bytes], bytes],
    first_process: tuple[Path, float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache, kernel = tmp_path / "cache", compiler.Kernel("planes", "forward", "float32", "silu")
    shutil.copytree(first_process[0], cache)
    monkeypatch.setenv("FUSEDNORM_CACHE_DIR", str(cache))
    with caplog.at_level(logging.WARNING):
        assert compiler._read(kernel) is not None
        assert not caplog.text
        file = compiler.cache_directory() / kernel.name
        file.write_bytes(damage(file.read_bytes()))
        assert compiler._read(kernel) is None
    assert "damaged" in caplog.text


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way of a directory")
    assert first_call(tmp_path / "file")[0]


def test_a_changed_source_finds_no_old_object(monkeypatch: pytest.MonkeyPatch) -> None:
    before = compiler.cache_directory()
    original = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda self: original(self) + b"#")
    compiler._digest.cache_clear()
    try:
        assert compiler.cache_directory() != before
    finally:
        compiler._digest.cache_clear()


# --- memory ---

LARGE = torch.Size((5, 1 << 20))  # 20 MB of float32


@needs_kept
def test_a_freed_block_is_used_again_and_a_live_one_is_not() -> None:
    memory.empty_cache()
    first = memory.empty_strided(LARGE, (1 << 20, 1), torch.float32)
    view, address = first[2], first.data_ptr()
    del first
    second = memory.empty_strided(LARGE, (1 << 20, 1), torch.float32)
    assert second.data_ptr() != address  # a view keeps the block
    view.fill_(1.0)
    second.fill_(2.0)
    assert view.eq(1.0).all()
    del view
    third = memory.empty_strided(LARGE, (1 << 20, 1), torch.float32)
    assert third.data_ptr() == address


@needs_kept
def test_kept_blocks_stay_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    memory.empty_cache()
    monkeypatch.setattr(memory, "limit", lambda: 50 << 20)
    tensors = [memory.empty_strided(LARGE, (1 << 20, 1), torch.float32) for _ in range(5)]
    del tensors
    assert 0 < sum(block.size for block in memory._blocks) <= 50 << 20
    memory.empty_cache()


def test_a_large_output_is_an_ordinary_tensor() -> None:
    x = torch.randn(2, 16, 256, 256)
    y = fusednorm.group_norm(x, 4)
    expected = torch.nn.functional.group_norm(x, 4)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(y.numpy(), expected.numpy(), rtol=1e-5, atol=1e-5)
    y.add_(1.0)
    assert torch.equal(y.clone(), y)
    assert not y._is_view()


@pytest.mark.timing
def test_a_second_large_output_costs_no_page_faults() -> None:
    resource = pytest.importorskip("resource")
    x = torch.randn(1, 64, 512, 512)
    for _ in range(3):
        fusednorm.group_norm(x, 32)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        fusednorm.group_norm(x, 32)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 400  # 65,536 where fresh memory is touched


# --- the choice ---


def problem(
    view: View, order: str, family: Family = "group_norm", activation: str | None = None, **changes: object
) -> Problem:
    channels_first = order == "channels_first"
    layout = Layout(
        "channels_first" if channels_first else "channels_last",
        view.channels * view.spatial,
        view.spatial if channels_first else 1,
        1 if channels_first else view.channels,
    )
    made = Problem(
        norm_of(family, 1, activation=resolve(activation)), "forward", view, layout, "float32", output_layout=layout
    )
    return replace(made, **changes)  # type: ignore[arg-type]


EVALUATION: dict[str, object] = {"family": "batch_norm", "direction": "inference"}
BATCH: dict[str, object] = {"family": "batch_norm"}
BATCH_BACKWARD: dict[str, object] = {"family": "batch_norm", "direction": "backward"}
HALF: dict[str, object] = {"dtype": "bfloat16"}
SILU: dict[str, object] = {"activation": "silu"}


@pytest.mark.parametrize(
    ("view", "order", "changes", "name"),
    [
        (View(2, 32, 10, 4096), "channels_first", {}, "cpu.planes"),
        (View(1, 1, 64, 65536), "channels_first", {}, "cpu.planes_split"),
        (View(1, 1, 4, 64), "channels_first", {}, "cpu.planes"),
        (View(8, 32, 8, 3136), "channels_last", {}, "cpu.slabs"),
        (View(1, 32, 4, 65536), "channels_last", {}, "cpu.slabs_split"),
        (View(4, 32, 32, 30), "channels_last", {}, "cpu.slabs"),  # few samples of up to 128 KB each, as measured
        (View(4, 32, 32, 33), "channels_last", {}, "cpu.slabs_split"),
        (View(3, 32, 32, 30), "channels_last", {}, "cpu.slabs_split"),
        (View(8, 256, 1, 3136), "channels_last", {"family": "batch_norm"}, "cpu.slabs_split"),
        (View(8, 256, 1, 3136), "channels_first", {"family": "batch_norm"}, "cpu.planes"),
        (
            View(8, 256, 1, 3136),
            "channels_first",
            {"family": "batch_norm", "direction": "inference"},
            "cpu.planes_split",
        ),
        (View(8, 512, 1, 9), "channels_first", EVALUATION, "cpu.slabs_split"),  # short planes of many samples
        (View(4, 512, 1, 9), "channels_first", EVALUATION, "cpu.planes_split"),
        (View(84, 1024, 1, 20), "channels_first", EVALUATION, "cpu.slabs_split"),
        (View(8, 96, 1, 20), "channels_first", EVALUATION, "cpu.planes_split"),
        (View(40, 512, 1, 49), "channels_first", EVALUATION, "cpu.planes_split"),
        (View(84, 1024, 1, 25), "channels_first", EVALUATION | HALF, "cpu.slabs_split"),
        (View(40, 256, 1, 49), "channels_first", EVALUATION | HALF, "cpu.slabs_split"),
        (View(16, 1024, 1, 49), "channels_first", EVALUATION | HALF, "cpu.planes_split"),
        (View(64, 256, 1, 100), "channels_first", EVALUATION | HALF | SILU, "cpu.slabs_split"),
        (View(64, 256, 1, 144), "channels_first", EVALUATION | HALF | SILU, "cpu.planes_split"),
        (View(4, 256, 1, 100), "channels_first", EVALUATION | HALF | SILU, "cpu.planes_split"),
        (View(64, 256, 1, 25), "channels_first", EVALUATION | SILU, "cpu.slabs_split"),
        (View(64, 256, 1, 49), "channels_first", EVALUATION | SILU, "cpu.planes_split"),
        (View(64, 1, 1024, 1), "channels_last", {"family": "layer_norm"}, "cpu.rows"),
        # Short planes of batch_norm, as measured (instances._few_for_slabs).
        (View(4, 2048, 1, 64), "channels_first", BATCH, "cpu.planes"),
        (View(6, 1624, 1, 55), "channels_first", BATCH, "cpu.planes"),
        (View(16, 2048, 1, 16), "channels_first", BATCH, "cpu.slabs"),
        (View(16, 512, 1, 64), "channels_first", BATCH, "cpu.planes"),
        (View(16, 512, 1, 64), "channels_first", BATCH | HALF, "cpu.slabs"),
        (View(4, 2048, 1, 64), "channels_first", BATCH | HALF, "cpu.planes"),
        (View(16, 910, 1, 36), "channels_first", BATCH, "cpu.planes"),
        (View(128, 113, 1, 36), "channels_first", BATCH, "cpu.slabs"),
        (View(32, 136, 1, 120), "channels_first", BATCH, "cpu.planes"),
        (View(48, 143, 1, 81), "channels_first", BATCH, "cpu.slabs"),
        (View(48, 143, 1, 121), "channels_first", BATCH, "cpu.planes"),
        (View(48, 143, 1, 144), "channels_first", BATCH, "cpu.slabs"),
        (View(112, 256, 1, 256), "channels_first", BATCH, "cpu.planes"),
        (View(112, 143, 1, 144), "channels_first", BATCH | HALF, "cpu.slabs"),
        (View(40, 256, 1, 256), "channels_first", BATCH | HALF, "cpu.planes"),
        (View(32, 1820, 1, 9), "channels_first", BATCH, "cpu.planes"),
        (View(64, 8192, 1, 2), "channels_first", BATCH, "cpu.slabs"),
        (View(6, 1624, 1, 55), "channels_first", BATCH_BACKWARD, "cpu.planes"),
        (View(16, 3640, 1, 9), "channels_first", BATCH_BACKWARD, "cpu.slabs"),
        (View(8, 4096, 1, 16), "channels_first", BATCH_BACKWARD, "cpu.planes"),
        (View(64, 143, 1, 25), "channels_first", BATCH_BACKWARD, "cpu.planes"),
        (View(4, 8192, 1, 16), "channels_first", BATCH_BACKWARD, "cpu.planes"),
        (View(32, 256, 1, 64), "channels_first", BATCH_BACKWARD, "cpu.planes"),
        (View(32, 256, 1, 64), "channels_first", BATCH_BACKWARD | HALF, "cpu.planes"),
        (View(64, 143, 1, 20), "channels_first", BATCH_BACKWARD | HALF, "cpu.slabs"),
        (View(64, 143, 1, 28), "channels_first", BATCH_BACKWARD | HALF, "cpu.planes"),
        (View(8, 1024, 1, 64), "channels_first", BATCH_BACKWARD | HALF, "cpu.planes"),
        (View(52, 639, 1, 72), "channels_first", BATCH_BACKWARD | SILU, "cpu.slabs"),
        (View(52, 639, 1, 72), "channels_first", BATCH_BACKWARD, "cpu.planes"),
        (View(24, 143, 1, 72), "channels_first", BATCH_BACKWARD | SILU, "cpu.slabs"),
        (View(16, 143, 1, 81), "channels_first", BATCH_BACKWARD | SILU, "cpu.planes"),
        (View(32, 143, 1, 144), "channels_first", BATCH_BACKWARD | SILU, "cpu.slabs"),
        (View(64, 512, 1, 169), "channels_first", BATCH_BACKWARD | SILU, "cpu.slabs"),
        (View(128, 143, 1, 169), "channels_first", BATCH_BACKWARD | SILU, "cpu.planes"),
        (View(64, 143, 1, 64), "channels_first", BATCH_BACKWARD | SILU, "cpu.planes"),
    ],
)
def test_the_default_is_a_function_of_the_problem(
    view: View, order: str, changes: dict[str, object], name: str
) -> None:
    asked = problem(view, order, **changes)  # type: ignore[arg-type]
    assert choose(asked).name == name
    assert choose(asked).supports(asked) is None


def test_an_instance_by_name_never_falls_back() -> None:
    x = torch.randn(2, 8, 4, 4)
    with fusednorm.use_instance("cpu.slabs"), pytest.raises(RuntimeError, match="channels_first"):
        fusednorm.group_norm(x, 4)
    assert choice.choose(problem(View(2, 4, 2, 16), "channels_first")).name == "cpu.planes"
    with pytest.raises(ValueError, match="does not exist"), fusednorm.use_instance("cpu.nothing"):
        pass


def test_the_plans_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "MOST_PLANS", 8)
    for positions in range(2, 30):
        fusednorm.group_norm(torch.randn(1, 4, positions), 2)
    assert len(dispatch._plans) <= 8
