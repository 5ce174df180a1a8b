"""Large outputs are ordinary tensors: resized, shared, copied and saved as torch's own."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cpu_support import fresh_process, needs_fork, same_bits
from memory_support import (
    BYTES,
    MB,
    SHAPE,
    allocate,
    given_back,
    normalized,
    nothing_kept,
)
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import fusednorm

__all__ = ["nothing_kept"]  # fixtures


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
    assert given_back(lambda: y.untyped_storage().resize_(0)) > 100 * MB


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
