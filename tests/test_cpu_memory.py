"""Large outputs from kept blocks: used again after their death and never before, and otherwise ordinary tensors."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_support import fresh_process, in_child, needs_fork, same_bits
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.data import DataLoader, Dataset

import fusednorm
from fusednorm import dispatch
from fusednorm.backends.cpu import memory

MB = 1 << 20
SHAPE = (2, 8, 262144)  # 16 MB of fp32, eight pages of 2 MB
BYTES = 16 * MB

needs_kept = pytest.mark.skipif(
    memory._idle_counts() is None, reason="before 2.12 torch cannot move memory from one storage to another"
)


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    gc.collect()
    memory.empty_cache()
    yield
    memory.empty_cache()


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Sets FUSEDNORM_BUFFER_CACHE_MB, which a process reads once."""

    def set_limit(megabytes: int) -> None:
        monkeypatch.setenv("FUSEDNORM_BUFFER_CACHE_MB", str(megabytes))
        memory._setting.cache_clear()

    yield set_limit
    monkeypatch.undo()
    memory._setting.cache_clear()


def kept() -> int:
    """The bytes that wait for use."""
    return sum(block.size for block in tuple(memory._blocks) if is_idle(block) and block.unchanged())


def is_idle(block: memory.Block) -> bool:
    return block.counts() == memory._idle_counts()


def normalized(seed: int = 0, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return fusednorm.group_norm(torch.randn(shape, generator=torch.Generator().manual_seed(seed)), 4)


def allocate(megabytes: float) -> Tensor:
    count = int(megabytes * MB) // 4
    return memory.empty_strided(torch.Size((count,)), (1,), torch.float32)


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
    first = allocate(20)
    address = first.data_ptr()
    del first
    smaller = allocate(19)
    assert smaller.untyped_storage().nbytes() == 19 * MB
    assert kept() == 20 * MB
    assert allocate(20).data_ptr() == address


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
    assert sorted(block.size for block in memory._blocks) == [6 * MB, 6 * MB, 16 * MB, 16 * MB, 16 * MB]


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


def resident() -> int:
    """The bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
@needs_kept
def test_empty_cache_gives_memory_back_to_the_system() -> None:
    tensor = allocate(128).fill_(1.0)
    del tensor
    before = resident()
    memory.empty_cache()
    assert before - resident() > 100 * MB


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


# --- ordinary tensors ---


def test_a_large_output_looks_like_any_other() -> None:
    y = normalized()
    assert (y.device.type, y.dtype, y.is_contiguous(), y.is_leaf) == ("cpu", torch.float32, True, True)
    assert y.untyped_storage().resizable()
    assert not y._is_view()
    assert y.storage_offset() == 0
    assert y.untyped_storage().nbytes() == BYTES
    assert y.data_ptr() % 64 == 0


def test_in_place_operations() -> None:
    y = normalized()
    expected, version = y.clone().mul_(2.0).add_(1.0), y._version
    assert torch.equal(y.mul_(2.0).add_(1.0), expected)
    assert y._version == version + 2


def test_autograd_through_a_large_output_and_in_place_upon_it() -> None:
    x = torch.randn(SHAPE, requires_grad=True)
    fusednorm.group_norm(x, 4).mul_(2.0).sum().backward()
    doubled = x.grad
    x.grad = None
    (2.0 * fusednorm.group_norm(x, 4)).sum().backward()
    assert same_bits(doubled, x.grad)


def test_numpy_shares_the_memory() -> None:
    y = normalized()
    array = y.numpy()
    array[0, 0, 0] = 7.0
    assert y[0, 0, 0] == 7.0


def saved(y: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(y, file)
    file.seek(0)
    loaded: Tensor = torch.load(file)
    return loaded


COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "pickle": lambda y: pickle.loads(pickle.dumps(y)),
    "torch.save": saved,
    "deepcopy": copy.deepcopy,
    "clone": torch.clone,
}


@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)
def test_a_copy_has_memory_of_its_own(duplicate: Callable[[Tensor], Tensor]) -> None:
    y = normalized()
    before, other = y.clone(), duplicate(y)
    y.zero_()
    assert torch.equal(other, before)


def saved_bytes(y: Tensor) -> int:
    file = io.BytesIO()
    torch.save(y, file)
    return file.tell()


def test_an_output_is_saved_in_as_many_bytes_as_torchs_own() -> None:
    normalized()
    y = normalized(1)
    assert saved_bytes(y) == saved_bytes(torch.empty(SHAPE))
    assert len(pickle.dumps(y)) == len(pickle.dumps(torch.empty(SHAPE)))


def test_share_memory_moves_the_values() -> None:
    y = normalized()
    before = y.clone()
    assert not y.is_shared()
    y.share_memory_()
    assert y.is_shared()
    assert torch.equal(y, before)
    del y
    again = normalized(1)
    assert not again.is_shared()
    assert again.untyped_storage().resizable()


def grow_by_out(y: Tensor) -> None:
    torch.add(torch.arange(6.0 * MB).view(2, 3, -1), 1.0, out=y.resize_(0))


def free_and_fill(y: Tensor) -> None:
    size = y.untyped_storage().nbytes()
    y.untyped_storage().resize_(0)
    y.untyped_storage().resize_(size)
    y.fill_(3.0)


RESIZES: dict[str, Callable[[Tensor], Any]] = {
    "resize_ to less": lambda y: y.resize_(2, 8, 1000),
    "resize_ to another shape": lambda y: y.resize_(4, 4, 262144),
    "resize_ to more": lambda y: y.resize_(2, 8, 300_000)[1, 7, 262144:].fill_(1.0),
    "resize_as_": lambda y: y.resize_as_(torch.empty(3 * MB)).view(-1)[2 * MB :].fill_(1.0),
    "resize_ to nothing": lambda y: y.resize_(0),
    "out=": grow_by_out,
    "storage to nothing": lambda y: y.untyped_storage().resize_(0),
    "storage to nothing and back": free_and_fill,
    "storage to less": lambda y: y.resize_(10).untyped_storage().resize_(4000),
    "storage to more": lambda y: y.untyped_storage().resize_(2 * BYTES),
    "set_ to another": lambda y: y.set_(torch.arange(5.0)),
    "data of another": lambda y: setattr(y, "data", torch.arange(5.0)),
}


@pytest.mark.parametrize("reused", [False, True], ids=["fresh", "reused"])
@pytest.mark.parametrize("resize", RESIZES.values(), ids=RESIZES)
def test_an_output_is_resized_as_torchs_own(resize: Callable[[Tensor], Any], reused: bool) -> None:
    if reused:
        normalized(1)
    ours = normalized()
    torchs = ours.clone()
    for tensor in (ours, torchs):
        resize(tensor)
    assert (ours.shape, ours.stride(), ours.storage_offset()) == (torchs.shape, torchs.stride(), 0)
    assert ours.untyped_storage().nbytes() == torchs.untyped_storage().nbytes()
    if ours.untyped_storage().nbytes():
        written = min(ours.numel(), 2 * 8 * 262144) if resize is not grow_by_out else ours.numel()
        assert torch.equal(ours.reshape(-1)[:written], torchs.reshape(-1)[:written])
    del ours
    again = normalized(2)
    assert again.untyped_storage().nbytes() == BYTES
    assert same_bits(again, normalized(2))


def test_a_freed_storage_gives_its_memory_back_at_once() -> None:
    y = allocate(128).fill_(1.0)
    before = resident()
    y.untyped_storage().resize_(0)
    assert before - resident() > 100 * MB


def test_memory_that_numpy_saw_does_not_come_back() -> None:
    """torch forbids resizing from then on, and the next output must be resizable."""
    y = normalized()
    y.numpy()
    del y
    assert normalized(1).untyped_storage().resizable()


@pytest.mark.parametrize("missing", ["_storage_Use_Count", "_swap_data_ptr_"])
def test_without_torchs_private_functions_nothing_is_kept(missing: str) -> None:
    found = fresh_process(
        f"""
        import json, torch
        from fusednorm.backends.cpu import memory
        class Storage:
            "What the module asks of torch, without the one function."
            def __init__(self, storage): self.storage = storage
            def __getattr__(self, name):
                if name == {missing!r}: raise AttributeError(name)
                return getattr(self.storage, name)
        if {missing!r} == "_storage_Use_Count":
            memory._COUNTERS = (None, memory._COUNTERS[1])
        else:
            memory._move = lambda storage: Storage(storage)._swap_data_ptr_
        tensors = [memory.empty_strided(torch.Size((1 << 22,)), (1,), torch.float32).fill_(1.0) for _ in range(3)]
        print(json.dumps([len(memory._blocks), memory.describe(), all(one.sum() == 1 << 22 for one in tensors)]))
        """
    )
    assert found[0] == 0
    assert found[1].startswith("none: this torch cannot")
    assert found[2]


def test_a_default_device_does_not_reach_the_output() -> None:
    x = torch.randn(SHAPE)
    expected = fusednorm.group_norm(x, 4)
    with torch.device("meta"):
        within = fusednorm.group_norm(x, 4)
    assert within.device.type == "cpu"
    assert same_bits(within, expected)


class Large(Dataset[Tensor]):
    """Outputs that a worker hands over through shared memory."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Tensor:
        torch.utils.deterministic.fill_uninitialized_memory = False
        return fusednorm.group_norm(torch.arange(2 * MB, dtype=torch.float32).add(index).sin().view(1, 8, -1), 4)


@needs_fork
def test_data_loader_workers_return_large_outputs() -> None:
    large = Large()
    expected = [large[index] for index in range(3)]
    loader = DataLoader(large, batch_size=None, num_workers=1, multiprocessing_context="fork")
    assert all(same_bits(got, one) for got, one in zip(loader, expected, strict=True))


def test_a_process_ends_in_peace_with_live_and_dead_outputs() -> None:
    found = fresh_process(
        """
        import json, torch, fusednorm
        x = torch.randn(2, 8, 262144)
        y, z = fusednorm.group_norm(x, 4), fusednorm.group_norm(x, 4)
        del y
        cycle = [z]
        cycle.append(cycle)
        print(json.dumps("end"))
        """
    )
    assert found == "end"


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
    (detail,) = [one.details["buffer cache"] for one in dispatch.backends() if one.name == "cpu"]
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
