"""Memory for large outputs, without the page faults that fresh memory costs.

The C library returns a large block to the system when it is freed, so the next output of that size touches every page
for the first time again: 33 ms for 32 MB in pages of 4 KB, against 5 ms for the norm itself. Large outputs here come in
huge pages where the system allows them, and go back to a list when their tensor dies, for the next output to take.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections import deque
from functools import cache
from typing import Any

import numpy as np
import torch

SMALLEST = 1 << 22  # bytes: below this the C library keeps freed memory, and a kept block costs 10 us more
HUGE_PAGE = 1 << 21
SLACK = 1.25  # a kept block serves any request of at least 1/1.25 of its size

# Changed by atomic operations alone and under no lock, which a fork could leave locked for ever in the child.
_free: deque[mmap.mmap] = deque()


@cache
def limit() -> int:
    """Bytes kept for reuse at most: FUSEDNORM_BUFFER_CACHE_MB, 512 by default; 0 keeps none."""
    megabytes = os.environ.get("FUSEDNORM_BUFFER_CACHE_MB", "512")
    if not megabytes.isdecimal():
        raise ValueError(f"FUSEDNORM_BUFFER_CACHE_MB is {megabytes!r}; expected a number of megabytes, 0 to keep none")
    return int(megabytes) << 20


def empty_cache() -> None:
    """Give the kept blocks back to the system."""
    _free.clear()


def _release(block: mmap.mmap) -> None:
    # Runs whenever a tensor dies, also amid _take() in this very thread.
    _free.append(block)
    while sum(map(len, tuple(_free))) > limit():
        try:
            _free.popleft()
        except IndexError:
            return


def _take(size: int) -> mmap.mmap:
    size = -(-size // HUGE_PAGE) * HUGE_PAGE
    for block in sorted((block for block in tuple(_free) if size <= len(block) <= SLACK * size), key=len):
        try:
            _free.remove(block)
            return block
        except ValueError:  # taken by another thread, or trimmed by a release
            pass
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        block.madvise(mmap.MADV_HUGEPAGE)
    return block


def empty_strided(shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """torch.empty_strided for a dense tensor, from kept blocks where it is large."""
    size = shape.numel() * dtype.itemsize
    if size < SMALLEST or limit() == 0 or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
    block = _take(size)
    array = np.frombuffer(block, np.uint8, size)
    # The storage holds the array, and the array's end is the end of the tensor and of all its views.
    weakref.finalize(array, _release, block).atexit = False
    tensor = torch.empty(0, dtype=dtype, device="cpu").set_(
        torch.from_numpy(array).untyped_storage(), 0, shape, strides
    )
    deterministic: Any = torch.utils.deterministic  # a module whose attributes are properties
    if torch.are_deterministic_algorithms_enabled() and deterministic.fill_uninitialized_memory:
        tensor.fill_(torch.nan)
    return tensor
