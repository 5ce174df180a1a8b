"""The cache on disk, the kept blocks of memory and the choice of instance; threads have test_cpu_threads.py."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from memory_support import needs_kept

import fusednorm
from fusednorm import dispatch
from fusednorm.backends.cpu import compiler, memory
from fusednorm.backends.cpu.instances import choose
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


def first_call(cache: str) -> tuple[bool, float]:
    environment = {**os.environ, "FUSEDNORM_CACHE_DIR": cache}
    done = subprocess.run(
        [sys.executable, "-c", FIRST_CALL], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    compiled, seconds = done.stdout.split()
    return compiled == "1", float(seconds)


def test_the_second_process_compiles_nothing(tmp_path: Path) -> None:
    assert first_call(str(tmp_path))[0]
    assert not first_call(str(tmp_path))[0]


@pytest.mark.timing
def test_first_calls_are_quick(tmp_path: Path) -> None:
    assert min(first_call(str(tmp_path / str(attempt)))[1] for attempt in range(2)) < 2.0
    assert min(first_call(str(tmp_path / "0"))[1] for _ in range(3)) < 0.2


@pytest.mark.parametrize("damage", [lambda content: content[:-7], lambda content: b"", lambda content: b"\0" + content])
def test_a_damaged_file_is_not_used(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    first_call(str(tmp_path))
    files = [file for file in tmp_path.rglob("planes-*") if file.is_file()]
    assert files
    for file in files:
        file.write_bytes(damage(file.read_bytes()))
    assert first_call(str(tmp_path))[0]  # compiled again, and right
    assert not first_call(str(tmp_path))[0]  # and written again


def test_a_damaged_file_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FUSEDNORM_CACHE_DIR", str(tmp_path))
    kernel = compiler.Kernel("planes", "forward", "float32", "silu")
    compiler.cache_directory().mkdir(parents=True)
    (compiler.cache_directory() / kernel.name).write_bytes(b"nonsense")
    with caplog.at_level(logging.WARNING):
        assert compiler._read(kernel) is None
    assert "damaged" in caplog.text


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way of a directory")
    assert first_call(str(tmp_path / "file"))[0]


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


def problem(view: View, order: str, **changes: object) -> Problem:
    channels_first = order == "channels_first"
    layout = Layout(
        "channels_first" if channels_first else "channels_last",
        view.channels * view.spatial,
        view.spatial if channels_first else 1,
        1 if channels_first else view.channels,
    )
    made = Problem("group_norm", "forward", view, layout, "float32", output_layout=layout)
    return replace(made, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("view", "order", "changes", "name"),
    [
        (View(2, 32, 10, 4096), "channels_first", {}, "cpu.planes"),
        (View(1, 1, 64, 65536), "channels_first", {}, "cpu.planes_split"),
        (View(1, 1, 4, 64), "channels_first", {}, "cpu.planes"),
        (View(8, 32, 8, 3136), "channels_last", {}, "cpu.slabs"),
        (View(1, 32, 4, 65536), "channels_last", {}, "cpu.slabs_split"),
        (View(8, 256, 1, 3136), "channels_last", {"family": "batch_norm"}, "cpu.slabs_split"),
        (View(8, 256, 1, 3136), "channels_first", {"family": "batch_norm"}, "cpu.planes"),
        (
            View(8, 256, 1, 3136),
            "channels_first",
            {"family": "batch_norm", "direction": "inference"},
            "cpu.planes_split",
        ),
        (View(64, 1, 1024, 1), "channels_last", {"family": "layer_norm"}, "cpu.rows"),
    ],
)
def test_the_default_is_a_function_of_the_problem(
    view: View, order: str, changes: dict[str, object], name: str
) -> None:
    asked = problem(view, order, **changes)
    assert choose(asked).name == name
    assert choose(asked).supports(asked) is None


def test_an_instance_by_name_never_falls_back() -> None:
    x = torch.randn(2, 8, 4, 4)
    with fusednorm.use_instance("cpu.slabs"), pytest.raises(RuntimeError, match="channels_first"):
        fusednorm.group_norm(x, 4)
    assert dispatch.choose(problem(View(2, 4, 2, 16), "channels_first")).name == "cpu.planes"
    with pytest.raises(ValueError, match="does not exist"), fusednorm.use_instance("cpu.nothing"):
        pass


def test_the_plans_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "MOST_PLANS", 8)
    for positions in range(2, 30):
        fusednorm.group_norm(torch.randn(1, 4, positions), 2)
    assert len(dispatch._plans) <= 8
