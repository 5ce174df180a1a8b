"""Large outputs in the memory of dead ones: used again after their death and never before, and within the limit."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_support import in_child, needs_fork
from memory_support import (
    BYTES,
    MB,
    SHAPE,
    allocate,
    given_back,
    is_idle,
    kept,
    limit,
    needs_kept,
    normalized,
    nothing_kept,
    resident,
)
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import fusednorm
from fusednorm import choice
from fusednorm.backends.cpu import memory

__all__ = ["limit", "nothing_kept"]  # fixtures

# --- used again ---


def test_memory_is_kept_from_torch_2_12_on() -> None:
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    assert (memory._idle_counts() is not None) is (version >= (2, 12))


@needs_kept
def test_the_next_output_takes_the_memory_of_a_dead_one() -> None:
    y = normalized()
    address = y.data_ptr()
    del y
    assert kept() == BYTES
    again = normalized(1)
    assert again.data_ptr() == address
    assert kept() == 0


@needs_kept
def test_grad_input_comes_from_kept_blocks_too() -> None:
    x = torch.randn(SHAPE, requires_grad=True)
    fusednorm.group_norm(x, 4).sum().backward()
    assert x.grad is not None
    address = x.grad.data_ptr()
    x.grad = None
    assert address in {normalized().data_ptr(), normalized().data_ptr()}


@needs_kept
def test_a_block_serves_its_exact_size_alone() -> None:
    """torch.save writes the whole storage, so a larger one is no output as torch's own."""
    allocate(20)
    smaller = allocate(19)
    assert smaller.untyped_storage().nbytes() == 19 * MB
    assert [block.size for block in memory._blocks] == [19 * MB]


@needs_kept
def test_the_block_that_was_lent_last_is_taken() -> None:
    blocks = [allocate(20) for _ in range(3)]
    address = blocks[2].data_ptr()
    blocks.clear()
    assert allocate(20).data_ptr() == address


def test_small_outputs_do_not_come_from_blocks() -> None:
    y = normalized(shape=(2, 8, 50_000))  # 3.2 MB
    del y
    assert kept() == 0


HOLDERS: dict[str, Callable[[Tensor], Any]] = {
    "a view": lambda y: y[1, 3:],
    "one element": lambda y: y[1, 7, -1],
    "its transpose": lambda y: y.mT,
    "its detached self": lambda y: y.detach(),
    "a numpy array": lambda y: y.numpy(),
    "its storage": lambda y: y.untyped_storage(),
    "its storage of a dtype": lambda y: y._typed_storage(),
    "a tensor on its storage": lambda y: torch.empty(0).set_(y.untyped_storage()),
    "its storage from a weak reference": lambda y: weakref.ref(y.untyped_storage())(),
    "its storage from torch's weak reference": lambda y: from_weak_pointer(y),
    "a DLPack importer": lambda y: torch.from_dlpack(y),
    "a DLPack capsule": lambda y: y.__dlpack__(),
    "a memoryview": lambda y: memoryview(y.numpy()),
    "a parameter": lambda y: torch.nn.Parameter(y),
    "a view of a view in another dtype": lambda y: y.view(torch.int32)[0],
    "autograd's saved tensors": lambda y: torch.exp(y.requires_grad_().mul(2.0).mul(y)),
    "a closure in a reference cycle": lambda y: cycle(y),
}


def from_weak_pointer(y: Tensor) -> Any:
    storage: Any = torch.UntypedStorage
    return storage._new_with_weak_ptr(StorageWeakRef(y.untyped_storage()).cdata)


def cycle(value: Tensor) -> list[Any]:
    held: list[Any] = [value]
    held.append(held)
    return held


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
@needs_kept
def test_memory_is_not_used_again_while_anything_holds_it(hold: Callable[[Tensor], Any]) -> None:
    y = normalized()
    address = y.data_ptr()
    holder = hold(y)
    del y
    gc.collect()
    assert [other.data_ptr() for other in (normalized(1), normalized(2))].count(address) == 0
    assert not all(is_idle(block) for block in memory._blocks)
    del holder
    gc.collect()
    assert all(is_idle(block) for block in memory._blocks)


def test_memory_is_not_used_again_while_a_lazy_clone_reads_it() -> None:
    y = normalized()
    clone = torch._lazy_clone(y)
    before = y.clone()
    del y
    for seed in (1, 2):
        normalized(seed).fill_(7.0)
    assert torch.equal(clone, before)


def test_a_reference_that_changes_its_kind_is_seen() -> None:
    """Another thread holds the memory by a tensor, by its storage, and by a tensor again."""
    held, stop, intact = [allocate(4).fill_(1.0)], threading.Event(), []

    def change() -> None:
        tensor = held.pop()
        while not stop.is_set():
            storage = tensor.untyped_storage()
            del tensor
            tensor = torch.empty(0).set_(storage)
            del storage
        intact.append(bool((tensor == 1.0).all()))

    thread = threading.Thread(target=change)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            allocate(4)[::1024].fill_(2.0)
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join()
    assert intact == [True]


@needs_kept
def test_what_knew_a_dead_output_does_not_know_the_next() -> None:
    """A reference that only watches a storage must not take the next output's for it."""
    y = normalized()
    address, weak = y.data_ptr(), StorageWeakRef(y.untyped_storage())
    y.untyped_storage().mark = "the first"  # type: ignore[attr-defined]
    del y
    again = normalized(1)
    assert again.data_ptr() == address
    assert weak.cdata != again.untyped_storage()._cdata
    assert not hasattr(again.untyped_storage(), "mark")


def test_no_python_code_runs_when_an_output_dies() -> None:
    """A Ctrl-C that arrives in a finalizer is printed and lost."""
    y, events = normalized(), []
    sys.setprofile(lambda frame, event, argument: events.append((event, frame.f_code.co_name)))
    try:
        del y
    finally:
        sys.setprofile(None)
    assert [name for event, name in events if event == "call"] == []


def test_live_tensors_never_share_memory_across_threads() -> None:
    """Each thread fills what it gets with its own number and finds nothing else there later."""

    def work(number: int) -> bool:
        right, alive = True, []
        for turn in range(30):
            tensor = allocate(4 + (turn + number) % 5)
            tensor[::1024].fill_(number)
            alive.append(tensor)
            if len(alive) > 2:
                right &= all(bool((one[::1024] == number).all()) for one in alive)
                alive.pop((turn + number) % 3)
        return right

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(work, range(6)))


@needs_kept
def test_memory_that_dies_in_one_thread_serves_another() -> None:
    made: list[Tensor] = []
    maker = threading.Thread(target=lambda: made.append(allocate(16)))
    maker.start()
    maker.join()
    address = made[0].data_ptr()
    made.clear()
    assert allocate(16).data_ptr() == address


# --- bounds ---


@needs_kept
def test_a_repeated_call_keeps_one_block() -> None:
    for _ in range(20):
        normalized()
    assert kept() == BYTES


def test_changing_shapes_stay_within_the_limit(limit: Callable[[int], None]) -> None:
    limit(64)
    for turn in range(60):
        allocate(5 + 7 * turn % 40)
        assert kept() <= 64 * MB


@needs_kept
def test_what_lives_at_once_and_dies_stays_within_the_limit(limit: Callable[[int], None]) -> None:
    limit(64)
    alive = [allocate(size) for size in (5, 8, 13) for _ in range(6)]
    alive.clear()
    assert 64 * MB - 13 * MB < kept() <= 64 * MB


@needs_kept
def test_the_oldest_blocks_go_first(limit: Callable[[int], None]) -> None:
    limit(40)
    blocks = [allocate(size) for size in (10, 14, 20)]
    newest = {block.data_ptr() for block in blocks[1:]}
    blocks.reverse()
    while blocks:
        blocks.pop()
    assert kept() == 34 * MB
    assert {allocate(14).data_ptr(), allocate(20).data_ptr()} == newest


@needs_kept
def test_the_blocks_of_a_size_that_is_not_asked_for_any_more_go(limit: Callable[[int], None]) -> None:
    limit(64)
    del (alive := [allocate(6) for _ in range(10)])[:]
    alive += [allocate(16) for _ in range(3)]
    alive.clear()
    assert [block.size for block in memory._blocks] == [6 * MB, 16 * MB, 16 * MB, 16 * MB]


@needs_kept
def test_fresh_memory_is_taken_in_exchange_for_as_much_dead_memory() -> None:
    dead = [allocate(size) for size in (6, 10, 20)]
    living = allocate(14)
    dead.clear()
    allocate(8)
    assert [block.size for block in memory._blocks] == [20 * MB, 14 * MB, 8 * MB]
    del living


def test_a_block_beyond_the_limit_is_not_kept(limit: Callable[[int], None]) -> None:
    limit(8)
    allocate(16)
    assert kept() == 0


def test_a_limit_of_zero_keeps_nothing(limit: Callable[[int], None]) -> None:
    limit(0)
    y = normalized()
    assert y.untyped_storage().resizable()  # torch's own memory
    del y
    assert kept() == 0


def test_the_limit_is_512_mb_by_default(limit: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    limit(1)
    monkeypatch.delenv("FUSEDNORM_BUFFER_CACHE_MB")
    memory._setting.cache_clear()
    assert memory.limit() == 512 * MB


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
@needs_kept
def test_empty_cache_gives_memory_back_to_the_system() -> None:
    tensor = allocate(128).fill_(1.0)
    del tensor
    assert given_back(memory.empty_cache) > 100 * MB


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
def test_repeated_calls_do_not_grow() -> None:
    x = torch.randn(SHAPE, requires_grad=True)

    def step() -> None:
        fusednorm.group_norm(x, 4).sum().backward()
        x.grad = None

    for _ in range(3):
        step()
    before = resident()
    for _ in range(40):
        step()
    assert resident() - before < 10 * BYTES  # the C library keeps a few blocks now and then


@needs_kept
def test_a_second_call_costs_few_page_faults() -> None:
    resource = pytest.importorskip("resource")
    x = torch.randn(1, 64, 512, 512)  # 64 MB: 16,384 pages, and more than the C library ever keeps
    fusednorm.group_norm(x, 32)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    fusednorm.group_norm(x, 32)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 500


def test_unwritten_memory_holds_nan_where_torchs_does() -> None:
    """Or the tests could not see an unwritten element in a large output."""
    tensor = allocate(8)
    assert torch.are_deterministic_algorithms_enabled()
    assert tensor.isnan().all()
    tensor.fill_(1.0)
    del tensor
    assert allocate(8).isnan().all()
    torch.utils.deterministic.fill_uninitialized_memory = False
    assert not allocate(8).fill_(2.0).isnan().any()
    assert not allocate(8).isnan().any()


# --- forks ---


@needs_fork
def test_a_child_writes_to_memory_of_its_own() -> None:
    y = normalized()
    before = y.clone()

    def work() -> bool:
        y.numpy()[:] = 1.0
        other = allocate(16)
        other.numpy()[:] = 2.0
        return bool((y.numpy() == 1.0).all())

    assert in_child(work)
    assert torch.equal(y, before)


@needs_fork
@needs_kept
def test_a_fork_amid_an_allocation_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a thread holds while it looks through the kept blocks, the child can allocate."""
    inside, leave = threading.Event(), threading.Event()
    look = memory.Block.unchanged

    def stop(block: memory.Block) -> bool:
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            leave.wait()
        return look(block)

    allocate(16)
    monkeypatch.setattr(memory.Block, "unchanged", stop)
    other = threading.Thread(target=allocate, args=(16,))
    other.start()
    try:
        assert inside.wait(30)
        assert in_child(lambda: allocate(16).numel() > 0, seconds=20)
    finally:
        leave.set()
        other.join()


# --- FUSEDNORM_BUFFER_CACHE_MB ---

WRONG = ["-1", "1e3", "abc", "12.5", "0x10", "²", "9" * 5000, str(1 << 60)]


@pytest.mark.parametrize("megabytes", WRONG)
@needs_kept
def test_a_wrong_limit_is_named_once_and_the_default_taken(
    megabytes: str, monkeypatch: pytest.MonkeyPatch, limit: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    limit(1)
    monkeypatch.setenv("FUSEDNORM_BUFFER_CACHE_MB", megabytes)
    memory._setting.cache_clear()
    allocate(16)
    allocate(16)
    assert memory.limit() == 512 * MB
    (record,) = caplog.records
    assert "FUSEDNORM_BUFFER_CACHE_MB" in record.message
    assert megabytes[:40] in record.message
    (detail,) = [one.details["buffer cache"] for one in choice.backends() if one.name == "cpu"]
    assert detail.startswith("512 MB at most (FUSEDNORM_BUFFER_CACHE_MB is ")
    assert len(caplog.records) == 1


@pytest.mark.parametrize(("value", "megabytes"), [("", 512), (" ", 512), (" 64 ", 64), ("007", 7), ("0", 0)])
@needs_kept
def test_an_empty_limit_is_the_default(
    value: str,
    megabytes: int,
    monkeypatch: pytest.MonkeyPatch,
    limit: Callable[[int], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    limit(1)
    monkeypatch.setenv("FUSEDNORM_BUFFER_CACHE_MB", value)
    memory._setting.cache_clear()
    assert memory.limit() == megabytes * MB
    assert memory.describe() == f"{megabytes} MB at most"
    assert caplog.records == []


FREED: dict[str, Callable[[Tensor], Any]] = {
    "input": lambda freed: fusednorm.layer_norm(freed, (8,)),
    "statistics": lambda freed: fusednorm.batch_norm(torch.randn(2, 8), freed, freed),
    "pre_add": lambda freed: fusednorm.layer_norm(torch.randn(8), (8,), pre_add=freed),
    "quantized": lambda freed: fusednorm.layer_norm(freed, (8,), out_dtype=torch.int8, out_scale="row"),
}


@pytest.mark.parametrize("name", FREED)
def test_freed_memory_is_an_error(name: str) -> None:
    freed = torch.randn(8)
    freed.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"a tensor of shape \(8,\) has no memory"):
        FREED[name](freed)


def test_parameters_that_are_freed_between_calls() -> None:
    """As FSDP frees them: a parameter at address 0 would be taken for none."""
    x, weight = torch.randn(2, 8, requires_grad=True), torch.randn(8)
    outputs = [fusednorm.layer_norm(x, (8,), weight) for _ in range(3)]
    weight.untyped_storage().resize_(0)
    for output in outputs:
        with pytest.raises(RuntimeError, match="has no memory"):
            output.sum().backward()
    with pytest.raises(RuntimeError, match="has no memory"):
        fusednorm.layer_norm(x, (8,), weight)
