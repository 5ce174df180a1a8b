"""Large outputs from kept blocks: used again after their death and never before, and otherwise ordinary tensors."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_support import fresh_process, in_child, needs_fork, same_bits
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import fusednorm
from fusednorm.backends.cpu import memory

MB = 1 << 20
SHAPE = (2, 8, 262144)  # 16 MB of fp32, eight pages of 2 MB
BYTES = 16 * MB


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
        memory.limit.cache_clear()

    yield set_limit
    monkeypatch.undo()
    memory.limit.cache_clear()


def kept() -> int:
    """The bytes that wait for use."""
    return sum(len(block) for block in memory._free)


def normalized(seed: int = 0, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return fusednorm.group_norm(torch.randn(shape, generator=torch.Generator().manual_seed(seed)), 4)


def allocate(megabytes: float) -> Tensor:
    count = int(megabytes * MB) // 4
    return memory.empty_strided(torch.Size((count,)), (1,), torch.float32)


# --- used again ---


def test_the_next_output_takes_the_memory_of_a_dead_one() -> None:
    y = normalized()
    address = y.data_ptr()
    del y
    assert kept() == BYTES
    again = normalized(1)
    assert again.data_ptr() == address
    assert kept() == 0


def test_grad_input_comes_from_kept_blocks_too() -> None:
    x = torch.randn(SHAPE, requires_grad=True)
    fusednorm.group_norm(x, 4).sum().backward()
    assert x.grad is not None
    address = x.grad.data_ptr()
    x.grad = None
    assert address in {normalized().data_ptr(), normalized().data_ptr()}


def test_a_block_serves_requests_of_about_its_size() -> None:
    first = allocate(20)
    address = first.data_ptr()
    del first
    assert allocate(16.5).data_ptr() == address
    smaller = allocate(12)
    assert smaller.data_ptr() != address
    assert kept() == 20 * MB


def test_the_smallest_block_that_fits_is_taken() -> None:
    blocks = [allocate(size) for size in (20, 18, 19)]
    address = blocks[1].data_ptr()
    blocks.clear()
    assert allocate(17.5).data_ptr() == address


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
    "a DLPack importer": lambda y: torch.from_dlpack(y),
    "a view of a view in another dtype": lambda y: y.view(torch.int32)[0],
    "autograd's saved tensors": lambda y: torch.exp(y.requires_grad_().mul(2.0).mul(y)),
    "a closure in a reference cycle": lambda y: cycle(y),
}


def cycle(value: Tensor) -> list[Any]:
    held: list[Any] = [value]
    held.append(held)
    return held


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
def test_memory_is_not_used_again_while_anything_holds_it(hold: Callable[[Tensor], Any]) -> None:
    y = normalized()
    address = y.data_ptr()
    holder = hold(y)
    del y
    gc.collect()
    assert [other.data_ptr() for other in (normalized(1), normalized(2))].count(address) == 0
    held = kept()
    del holder
    gc.collect()
    assert kept() >= held + BYTES


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


def test_memory_that_dies_in_one_thread_serves_another() -> None:
    made: list[Tensor] = []
    maker = threading.Thread(target=lambda: made.append(allocate(16)))
    maker.start()
    maker.join()
    address = made[0].data_ptr()
    made.clear()
    assert allocate(16).data_ptr() == address


# --- bounds ---


def test_a_repeated_call_keeps_one_block() -> None:
    for _ in range(20):
        normalized()
    assert kept() == BYTES


def test_changing_shapes_stay_within_the_limit(limit: Callable[[int], None]) -> None:
    limit(64)
    for turn in range(60):
        allocate(5 + 7 * turn % 40)
        assert kept() <= 64 * MB


def test_the_oldest_blocks_go_first(limit: Callable[[int], None]) -> None:
    limit(40)
    blocks = [allocate(size) for size in (10, 14, 20)]
    newest = {block.data_ptr() for block in blocks[1:]}
    blocks.reverse()
    while blocks:
        blocks.pop()
    assert kept() == 34 * MB
    assert {allocate(14).data_ptr(), allocate(20).data_ptr()} == newest


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
    memory.limit.cache_clear()
    assert memory.limit() == 512 * MB


def resident() -> int:
    """The bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
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
def test_a_fork_amid_an_allocation_in_another_thread() -> None:
    """Whatever a thread holds while it looks through the kept blocks, the child can allocate."""
    inside, leave = threading.Event(), threading.Event()

    class Block:
        """Stops the thread that measures it, but the main one."""

        def __len__(self) -> int:
            if threading.current_thread() is not threading.main_thread():
                inside.set()
                leave.wait()
            return 1

    block: Any = Block()
    memory._free.append(block)
    other = threading.Thread(target=allocate, args=(16,))
    other.start()
    try:
        assert inside.wait(30)
        assert in_child(lambda: allocate(16).numel() > 0, seconds=20)
    finally:
        leave.set()
        other.join()
        memory._free.remove(block)


# --- ordinary tensors ---


def test_a_large_output_looks_like_any_other() -> None:
    y = normalized()
    assert (y.device.type, y.dtype, y.is_contiguous(), y.is_leaf) == ("cpu", torch.float32, True, True)
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


def test_share_memory_moves_the_values_and_frees_the_block() -> None:
    y = normalized()
    before = y.clone()
    y.share_memory_()
    assert y.is_shared()
    assert torch.equal(y, before)
    assert kept() == BYTES


@pytest.mark.parametrize("shape", [(2, 8, 1000), (4, 4, 262144), SHAPE], ids=str)
def test_resize_within_the_memory(shape: tuple[int, ...]) -> None:
    y = normalized()
    before = y.clone()
    y.resize_(shape)
    assert torch.equal(y.view(-1), before.view(-1)[: y.numel()])


@pytest.mark.xfail(reason="memory that torch did not allocate cannot grow in place", raises=RuntimeError, strict=True)
def test_resize_beyond_the_memory() -> None:
    y = normalized()
    y.resize_(2, 8, 300_000)


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


@pytest.mark.parametrize("megabytes", ["abc", "-1", ""])
def test_a_size_that_is_no_number_is_named(megabytes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDNORM_BUFFER_CACHE_MB", megabytes)
    memory.limit.cache_clear()
    try:
        with pytest.raises(ValueError, match=r"FUSEDNORM_BUFFER_CACHE_MB is .*megabytes"):
            memory.limit()
    finally:
        memory.limit.cache_clear()
