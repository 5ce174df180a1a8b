"""What the tests of large outputs share: allocations, the limit, and what waits for use."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

import fusednorm
from fusednorm.backends.cpu import memory

MB = 1 << 20
SHAPE = (2, 8, 262144)  # 16 MB of fp32, eight pages of 2 MB
BYTES = 16 * MB

needs_kept = pytest.mark.skipif(
    memory._idle_counts() is None, reason="before 2.12 torch cannot move memory from one storage to another"
)


@cache
def settle() -> None:
    """The compiler and the kernels live until the end: the tests' collections need not look through them."""
    normalized()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    settle()
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


def resident() -> int:
    """The bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def given_back(free: Callable[[], object]) -> int:
    """The bytes that the system gets back where the C library is asked to give it what it holds.

    Where tests before have left a large hole in its heap, the C library takes the next block from there instead of the
    system, and keeps the memory for itself when the block is freed.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda kept: None)  # glibc's
    trim(0)
    before = resident()
    free()
    trim(0)
    return before - resident()
