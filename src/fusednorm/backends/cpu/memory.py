"""Memory for large outputs, without the page faults that fresh memory costs.

The C library returns a large block to the system when it is freed, so the next output of that size touches every page
for the first time again: 33 ms for 32 MB in pages of 4 KB, against 5 ms for the norm itself. Large outputs here come in
huge pages where the system allows them, and the next output of the same size takes the memory of a dead one.

All memory is torch's own, so an output grows, shrinks and moves to shared memory as any tensor does. The library holds
a reference to the storage of each output beside the user's references. The next request of the same size looks at the
counts of references to see whether the user's are gone; a finalizer cannot tell, since a Ctrl-C that arrives in a
finalizer is lost. A block serves its exact size alone, because torch.save writes whole storages and torch cannot shrink
a storage in place.

Fresh memory is taken in exchange for dead blocks of other sizes. So the blocks together hold about as much as the
outputs that lived at one time. A decoder of images of 256 by 256 then keeps 33 MB instead of 126 MB, and takes 5 of its
19 large outputs from fresh memory; training steps of ResNet-50 and of a U-Net of volumes take none from there.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import operator
import os
import sys
from collections import deque
from functools import cache
from typing import Any

import torch

from fusednorm.private.torch_names import storage_handle, storage_use_count, swap_memory

logger = logging.getLogger(__name__)

SMALLEST = 1 << 22  # bytes: below this the C library keeps freed memory, and a kept block costs 10 us more
HUGE_PAGE = 1 << 21
DEFAULT_MEGABYTES = 512


class Block:
    """A storage that was lent, with the address and size of its memory at that time."""

    __slots__ = ("address", "size", "storage")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage
        self.address = storage.data_ptr()
        self.size = storage.nbytes()

    def counts(self) -> tuple[int, int]:
        """The number of references to the storage, and to the Python object that stands for the storage.

        No bytecode runs between the two readings, and the second allocates nothing that could start the garbage
        collector. So no other thread can turn one kind of reference into the other between them, by taking a tensor's
        storage and dropping the tensor.
        """
        first, second = map(operator.call, _COUNTERS, (storage_handle(self.storage), self.storage))
        return first, second

    def unchanged(self) -> bool:
        """False after resize_, share_memory_ and numpy(), which forbids resizing for good."""
        storage = self.storage
        return storage.data_ptr() == self.address and storage.nbytes() == self.size and storage.resizable()


_COUNTERS: Any = (storage_use_count, sys.getrefcount)

# Changed by atomic operations alone, since a fork could leave a lock locked for ever in the child. The block that was
# lent first comes first.
_blocks: deque[Block] = deque()


@cache
def _setting() -> tuple[int, str | None]:
    """The limit in bytes, and what is wrong with FUSEDNORM_BUFFER_CACHE_MB."""
    value = os.environ.get("FUSEDNORM_BUFFER_CACHE_MB", "").strip()
    if not value:
        return DEFAULT_MEGABYTES << 20, None
    # A number of more digits is beyond any memory, and int() refuses the longest.
    if value.isdecimal() and len(value) <= 18 and int(value) << 20 <= sys.maxsize:
        return int(value) << 20, None
    problem = (
        f"FUSEDNORM_BUFFER_CACHE_MB is {value[:40]!r}, which is no number of megabytes; the default of "
        f"{DEFAULT_MEGABYTES} is used, 0 keeps none"
    )
    logger.warning("%s", problem)
    return DEFAULT_MEGABYTES << 20, problem


def limit() -> int:
    """Bytes of the blocks that are looked after: FUSEDNORM_BUFFER_CACHE_MB, 512 by default; 0 keeps none."""
    return _setting()[0]


def describe() -> str:
    """The limit in words, for ``fusednorm doctor``."""
    size, problem = _setting()
    text = f"{size >> 20} MB at most"
    if size and _idle_counts() is None:
        text = "none: this torch cannot tell whether a storage is in use, or cannot move its memory to another"
    return f"{text} ({problem})" if problem else text


def empty_cache() -> None:
    """Free the memory of dead outputs. The C library gives it back to the system, except for what lay in its heap."""
    for block in tuple(_blocks):
        if block.counts() == _idle_counts():
            _forget(block)


@cache
def _idle_counts() -> tuple[int, int] | None:
    """The counts of a block that nothing else holds; None where a trial shows that counts or moves do not work here.

    The counts come from private functions of torch, and memory moves from one storage to another from torch 2.12 on.
    """
    try:
        tensor = torch.empty(64, dtype=torch.uint8, device="cpu")
        address = tensor.data_ptr()
        block = Block(tensor.untyped_storage())
        lent = block.counts()
        del tensor
        idle = block.counts()
        holder = block.storage
        held = block.counts()
        moved = _move(holder)
        able = (
            lent[0] == idle[0] + 1
            and held[1] == idle[1] + 1
            and (moved.data_ptr(), moved.nbytes(), moved.resizable(), holder.nbytes()) == (address, 64, True, 0)
        )
    except (AttributeError, RuntimeError, TypeError):
        return None
    return idle if able else None


def _move(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """A new storage that takes the memory of an old one.

    A weak reference to the old storage never finds the new one, which has none of the old one's attributes either.
    """
    new = torch.empty(0, dtype=torch.uint8, device="cpu").untyped_storage()
    swap_memory(new, storage)
    return new


def _forget(block: Block) -> bool:
    """Whether the block was still there: of two threads that want it one gets it."""
    try:
        _blocks.remove(block)
    except ValueError:
        return False
    return True


def _take(size: int) -> torch.UntypedStorage | None:
    """The memory of a dead output of this size, the last one lent if there are several."""
    idle = _idle_counts()
    for block in reversed(tuple(_blocks)):
        if block.size != size or block.counts() != idle or not _forget(block):
            continue
        # Only a weak reference can still lead to the storage, hence the second look at the counts.
        if block.unchanged() and block.counts() == idle:
            return _move(block.storage)
    return None


def _make_room(size: int) -> None:
    """Free the memory of dead outputs of other sizes, the oldest first, before fresh memory of this size is taken."""
    idle = _idle_counts()
    for block in tuple(_blocks):
        if size <= 0:
            return
        if block.counts() == idle and _forget(block):
            size -= block.size


def _keep(storage: torch.UntypedStorage) -> None:
    _blocks.append(Block(storage))
    while sum(block.size for block in tuple(_blocks)) > limit():
        try:
            _blocks.popleft()  # torch frees it with the last tensor that uses it
        except IndexError:
            return


@cache
def _madvise() -> Any:
    """The system's madvise, None where it knows no huge pages."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    try:
        function = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


def _ask_for_huge_pages(address: int, size: int) -> None:
    madvise = _madvise()
    first, end = -(-address // HUGE_PAGE) * HUGE_PAGE, (address + size) // HUGE_PAGE * HUGE_PAGE
    if madvise is not None and first < end:
        madvise(first, end - first, mmap.MADV_HUGEPAGE)


def empty_strided(shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """torch.empty_strided for a dense tensor, in the memory of a dead one where it is large."""
    size = shape.numel() * dtype.itemsize
    if size < SMALLEST or limit() == 0:
        return torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
    keeps = size <= limit() and _idle_counts() is not None
    storage = _take(size) if keeps else None
    if storage is None:
        _make_room(size)
        tensor = torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
        _ask_for_huge_pages(tensor.data_ptr(), size)
    else:
        tensor = torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, shape, strides)
        deterministic: Any = torch.utils.deterministic  # a module whose attributes are properties
        if torch.are_deterministic_algorithms_enabled() and deterministic.fill_uninitialized_memory:
            tensor.fill_(torch.nan)
    if keeps:
        _keep(tensor.untyped_storage())
    return tensor
