"""What a backend with its own threads, cache and memory can get wrong: races, forks, stale files, shared blocks."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import fusednorm
from fusednorm import dispatch
from fusednorm.backends.cpu import compiler, memory, threads
from fusednorm.backends.cpu.instances import choose
from fusednorm.problem import Layout, Problem, View

SHAPE = (3, 32, 70, 33)  # 887 KB: beyond what one thread takes alone


@pytest.fixture
def restore_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def forward_and_gradients(x: Tensor, norm: Callable[..., Tensor]) -> list[Tensor]:
    x = x.detach().requires_grad_()
    weight = torch.linspace(0.5, 1.5, SHAPE[1], requires_grad=True)
    bias = torch.linspace(-1.0, 1.0, SHAPE[1], requires_grad=True)
    y = norm(x, weight, bias)
    return [y.detach(), *torch.autograd.grad(y, (x, weight, bias), torch.cos(torch.arange(y.numel())).view_as(y))]


def group(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return fusednorm.group_norm(x, 4, weight, bias, activation="silu")


def batch(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return fusednorm.batch_norm(x, None, None, weight, bias, training=True)


# --- threads ---


@pytest.mark.usefixtures("restore_threads")
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("norm", [group, batch])
@pytest.mark.parametrize("openmp", [True, False])
def test_the_number_of_threads_does_not_change_a_bit(
    layout: torch.memory_format, norm: Callable[..., Tensor], openmp: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not openmp:
        monkeypatch.setattr(threads, "_forked", True)  # what a forked child uses
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).contiguous(memory_format=layout)
    results = []
    for count in (1, 2, 3, 5):
        torch.set_num_threads(count)
        results.append(forward_and_gradients(x, norm))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.usefixtures("restore_threads")
def test_python_threads_may_call_at_once() -> None:
    torch.set_num_threads(2)
    inputs = [torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    expected = [forward_and_gradients(x, group) for x in inputs]
    failures: list[int] = []

    def work(i: int) -> None:
        for _ in range(5):
            got = forward_and_gradients(inputs[i], group)
            if not all(torch.equal(a, b) for a, b in zip(got, expected[i], strict=True)):
                failures.append(i)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert failures == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_computes_the_same_bits() -> None:
    # In a process of its own: a fork beside JAX's or pytest's threads is not what is tested here.
    code = """
import os, torch, fusednorm
torch.set_num_threads(2)
x = torch.randn(3, 32, 70, 33)
expected = fusednorm.group_norm(x, 4, activation="silu")
child = os.fork()
if child == 0:
    y = fusednorm.group_norm(x, 4, activation="silu")
    os._exit(0 if y.numpy().tobytes() == expected.numpy().tobytes() else 3)  # torch.equal would enter OpenMP, and hang
_, status = os.waitpid(child, 0)
assert torch.equal(fusednorm.group_norm(x, 4, activation="silu"), expected)
raise SystemExit(os.waitstatus_to_exitcode(status))
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


class _Normalized(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> Tensor:
        x = torch.full((1, 8, 64, 64), float(i)) + torch.arange(64.0)
        return fusednorm.group_norm(x, 2)[0]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_data_loader_workers() -> None:
    expected = torch.stack([_Normalized()[i] for i in range(4)])
    loader = torch.utils.data.DataLoader(_Normalized(), batch_size=2, num_workers=2)
    assert torch.equal(torch.cat(list(loader)), expected)


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
    assert first_call(str(tmp_path))[1] < 2.0
    assert min(first_call(str(tmp_path))[1] for _ in range(3)) < 0.2


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


def test_kept_blocks_stay_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    memory.empty_cache()
    monkeypatch.setattr(memory, "limit", lambda: 50 << 20)
    tensors = [memory.empty_strided(LARGE, (1 << 20, 1), torch.float32) for _ in range(5)]
    del tensors
    assert 0 < sum(map(len, memory._free)) <= 50 << 20
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
