"""Threads for the kernels: torch's own OpenMP team, or threads of the library where there is none.

Tasks are claimed in shares from one counter by native code (DRIVER), so a slow thread holds nobody up; a task's result
does not depend on who ran it.

torch's threads are used because they are there: after an operator of torch they spin for a while in wait of the next,
and a thread beside them would share their cores (2 times slower on 2 cores). A team starts in 2 us, a Python thread in
40. OpenMP does not survive a fork, so a forked child uses threads of its own. Numba's layers are not used: omp dies
after fork, tbb is often not found, workqueue aborts when two threads call it.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from typing import Any

import torch

from fusednorm.backends.cpu.compiler import Function, assemble, link
from fusednorm.private.torch_names import openmp_libraries

#: Below this many bytes of work a second thread costs more than it saves.
SERIAL_BYTES = 1 << 17
SHARES = 8  # shares per thread

# Its data, eight bytes each: the next task, the next worker, share, tasks, stages, and per stage the kernel, its
# arguments and its factor.
DRIVER = """
define void @fusednorm_drive(ptr %data) {
entry:
  %p.workers = getelementptr i64, ptr %data, i64 1
  %p.share = getelementptr i64, ptr %data, i64 2
  %p.tasks = getelementptr i64, ptr %data, i64 3
  %p.stages = getelementptr i64, ptr %data, i64 4
  %worker = atomicrmw add ptr %p.workers, i64 1 monotonic
  %share = load i64, ptr %p.share
  %tasks = load i64, ptr %p.tasks
  %stages = load i64, ptr %p.stages
  br label %claim
claim:
  %start = atomicrmw add ptr %data, i64 %share monotonic
  %more = icmp slt i64 %start, %tasks
  br i1 %more, label %work, label %done
work:
  %end = add i64 %start, %share
  %past = icmp sgt i64 %end, %tasks
  %stop = select i1 %past, i64 %tasks, i64 %end
  br label %stage
stage:
  %i = phi i64 [ 0, %work ], [ %next, %stage ]
  %base = mul i64 %i, 3
  %o.run = add i64 %base, 5
  %o.arguments = add i64 %base, 6
  %o.factor = add i64 %base, 7
  %p.run = getelementptr i64, ptr %data, i64 %o.run
  %p.arguments = getelementptr i64, ptr %data, i64 %o.arguments
  %p.factor = getelementptr i64, ptr %data, i64 %o.factor
  %run = load ptr, ptr %p.run
  %arguments = load ptr, ptr %p.arguments
  %factor = load i64, ptr %p.factor
  %first = mul i64 %start, %factor
  %last = mul i64 %stop, %factor
  call void %run(ptr %arguments, i64 %first, i64 %last, i64 %worker)
  %next = add i64 %i, 1
  %again = icmp slt i64 %next, %stages
  br i1 %again, label %stage, label %claim
done:
  ret void
}
"""

#: A kernel, its packed arguments, and how many of its own tasks one task of the loop is.
Stage = tuple[Function, bytes, int]

_forked = False
_pool: ThreadPoolExecutor | None = None
_pool_size = 0


def _after_fork() -> None:
    global _forked, _pool, _pool_size
    _forked, _pool, _pool_size = True, None, 0


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork)


@cache
def _drive() -> tuple[Callable[[Any], None], int]:
    """The driver, callable and as an address."""
    address = link(assemble(DRIVER, "fusednorm_drive"), "fusednorm_drive", "driver")
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address), address


@cache
def openmp() -> tuple[str, Callable[..., None]] | None:
    """The OpenMP library that torch has loaded, and its entry for a parallel region; None where there is none.

    GCC's runtime and LLVM's both export GOMP_parallel(function, data, num_threads, flags).
    """
    for path in openmp_libraries():
        try:
            parallel = ctypes.CDLL(path).GOMP_parallel
        except (OSError, AttributeError):
            continue
        parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        parallel.restype = None
        return path, parallel
    return None


def _helpers(count: int) -> ThreadPoolExecutor:
    global _pool, _pool_size
    pool = _pool
    if pool is None or _pool_size < count:
        # A pool that is replaced finishes what it was given and ends when its last user lets go of it.
        pool = _pool = ThreadPoolExecutor(count, thread_name_prefix="fusednorm")
        _pool_size = count
    return pool


def workers(tasks: int, work_bytes: int) -> int:
    """How many workers share a loop over so many tasks that touch so many bytes."""
    return 1 if tasks < 2 or work_bytes < SERIAL_BYTES else torch.get_num_threads()


def parallel_for(kernel: Function, arguments: Sequence[Any], tasks: int, work_bytes: int = 0, threads: int = 0) -> None:
    """Run a kernel over its tasks: on so many threads, or on as many as the work is worth."""
    packed = kernel.pack(*arguments)
    threads = threads or workers(tasks, work_bytes)
    if threads == 1:
        kernel.run(packed, 0, tasks, 0)
    else:
        _parallel([(kernel, packed, 1)], tasks, max(1, -(-tasks // (threads * SHARES))), threads)


def parallel_stages(stages: Sequence[Stage], tasks: int, share: int, work_bytes: int) -> None:
    """Run several kernels one after the other on each share of the tasks."""
    threads = 1 if tasks <= share or work_bytes < SERIAL_BYTES else torch.get_num_threads()
    if threads > 1:
        _parallel(stages, tasks, share, threads)
        return
    for start in range(0, tasks, share):
        stop = min(start + share, tasks)
        for kernel, packed, factor in stages:
            kernel.run(packed, start * factor, stop * factor, 0)


def _parallel(stages: Sequence[Stage], tasks: int, share: int, threads: int) -> None:
    """Run the driver on a team as large as torch's: a smaller one would end threads that torch starts again."""
    fields = [0, 0, share, tasks, len(stages)]
    for kernel, packed, factor in stages:
        # The bytes are the caller's and outlive the call.
        fields += kernel.address, ctypes.cast(ctypes.c_char_p(packed), ctypes.c_void_p).value or 0, factor
    data = ctypes.create_string_buffer(struct.pack(f"{len(fields)}q", *fields))
    drive, address = _drive()
    team = None if _forked else openmp()
    if team is not None:
        team[1](address, ctypes.addressof(data), threads, 0)
        return
    helpers: list[Future[None]] = []
    try:
        for _ in range(threads - 1):
            helpers.append(_helpers(threads - 1).submit(_help, drive, data))
    except RuntimeError:  # the interpreter is shutting down, or the system has no more threads: do without
        pass
    try:
        drive(ctypes.addressof(data))
    finally:
        _join(helpers)


def _help(drive: Callable[[Any], None], data: Any) -> None:
    # Holds data, should a thread get to this after the others have finished.
    drive(ctypes.addressof(data))


def _join(helpers: Sequence[Future[None]]) -> None:
    """Wait for helpers whatever a signal's handler raises: they write to memory that the caller then frees."""
    interruption: BaseException | None = None
    for helper in helpers:
        while not helper.done():
            try:
                wait([helper])
            except BaseException as error:
                interruption = error
    if interruption is not None:
        raise interruption
