"""Threads that the library owns, for kernels that run without the interpreter lock.

Tasks are claimed in shares from one counter, so a slow thread holds nobody up; a task's result does not depend on who
ran it. Numba's own layers are not used: omp dies after fork, tbb is often not found, workqueue aborts when two threads
call it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

#: Below this many bytes of work a second thread costs more (20 to 40 us to wake it) than it saves.
SERIAL_BYTES = 1 << 18
SHARES = 8  # shares per thread

_pool: ThreadPoolExecutor | None = None
_size = 0


def _forget_pool() -> None:
    """A forked child has none of its parent's threads."""
    global _pool, _size
    _pool, _size = None, 0


os.register_at_fork(after_in_child=_forget_pool)


def _workers(count: int) -> ThreadPoolExecutor:
    global _pool, _size
    pool = _pool
    if pool is None or _size < count:
        # A pool that is replaced finishes what it was given and ends when its last user lets go of it.
        pool = _pool = ThreadPoolExecutor(count, thread_name_prefix="fusednorm")
        _size = count
    return pool


def parallel_for(kernel: Callable[..., None], arguments: tuple[Any, ...], tasks: int, work_bytes: int) -> None:
    """Run ``kernel(*arguments, start, stop)`` over all tasks, on torch.get_num_threads() threads at most."""
    threads = 1 if work_bytes < SERIAL_BYTES else min(torch.get_num_threads(), tasks)
    if threads <= 1:
        kernel(*arguments, 0, tasks)
        return
    share = max(1, -(-tasks // (threads * SHARES)))
    starts = iter(range(0, tasks, share))

    def claim() -> None:
        for start in starts:
            kernel(*arguments, start, min(start + share, tasks))

    helpers = [_workers(threads - 1).submit(claim) for _ in range(threads - 1)]
    claim()
    for helper in helpers:
        helper.result()
