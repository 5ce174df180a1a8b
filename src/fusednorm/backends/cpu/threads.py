"""Threads for the kernels: torch's own OpenMP team, or threads of the library where there is none.

Each thread of a team begins with a range of the tasks, as torch's own loops do, and claims it in shares by native code
(DRIVER); then it claims what the others have left, so a slow thread holds nobody up. A core that takes the same range
in every loop has its memory in cache: what another core has written costs it 30 ns for 64 bytes. On two cores the
backward of layer_norm of (48, 8000) in float32 takes 75 us so, and 174 where all threads claim from one range. A task's
result does not depend on who ran it.

After an operator torch's threads spin for a while in wait of the next one, so other threads would have to share cores
with them (2 times slower on 2 cores). A team of torch's starts in 2 us, a Python thread in 40. OpenMP does not survive
a fork, so a forked child uses threads of its own. Numba's layers are not used: omp dies after fork, tbb is often not
found, workqueue aborts when two threads call it.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from fusednorm.backends.cpu.compiler import assemble, link
from fusednorm.backends.cpu.frame import CLAIM, HEAD, Frame
from fusednorm.private.torch_names import openmp_libraries

#: Below this many bytes of work a second thread costs more than it saves: on an Intel Xeon an evaluation of batch_norm
#: of (4, 64, 16, 16) takes 14 us on one thread and 17 on two, of (8, 64, 16, 16) 26 and 21, layer_norm of (96, 512)
#: 15.5 and 17.1, of (192, 512) 28 and 26, its backward of (96, 512) 26 and 34, of (192, 512) 55 and 40.
SERIAL_BYTES = 5 << 16
#: Shares of each thread's range, and bytes of work below which it is one: what a thread takes from another's range
#: costs a small loop more than it waits. On that Xeon layer_norm of (16, 4096) in float32 takes 12.2 us so, and 13.7.
SHARES, SHARED_BYTES = 4, 1 << 20

# Each thread of a team runs fusednorm_drive(frame). The head of a frame holds the address of the claims, the next
# worker, the share, the loop's address, the number of threads, and the function that gives a thread's number in its
# team, or 0: then workers are numbered as they come. The claims are how many tasks of each thread's range have been
# claimed, CLAIM words apart; a thread looks at another's before it claims, which would take that line from its owner. A
# loop is its tasks, stages and preparation, then per stage the kernel and its factor.
# fusednorm_serial(frame, loops) runs several loops one after the other in one thread. ``loops`` is their number, then
# per loop its address and its share. All numbers take eight bytes.
DRIVER = """
define void @fusednorm_drive(ptr %frame) {
entry:
  %p.workers = getelementptr i64, ptr %frame, i64 1
  %p.share = getelementptr i64, ptr %frame, i64 2
  %p.loop = getelementptr i64, ptr %frame, i64 3
  %p.threads = getelementptr i64, ptr %frame, i64 4
  %p.number = getelementptr i64, ptr %frame, i64 5
  %claims = load ptr, ptr %frame
  %share = load i64, ptr %p.share
  %loop = load ptr, ptr %p.loop
  %threads = load i64, ptr %p.threads
  %number = load ptr, ptr %p.number
  %p.stages = getelementptr i64, ptr %loop, i64 1
  %p.prepare = getelementptr i64, ptr %loop, i64 2
  %tasks = load i64, ptr %loop
  %stages = load i64, ptr %p.stages
  %prepare = load ptr, ptr %p.prepare
  %prepares = icmp ne ptr %prepare, null
  %numbered = icmp ne ptr %number, null
  br i1 %numbered, label %ask, label %count
ask:
  %asked = call i32 %number()
  %given = zext i32 %asked to i64
  br label %known
count:
  %counted = atomicrmw add ptr %p.workers, i64 1 monotonic
  br label %known
known:
  %worker = phi i64 [ %given, %ask ], [ %counted, %count ]
  br label %range
range:
  %k = phi i64 [ 0, %known ], [ %k.next, %over ]
  %unprepared.range = phi i1 [ %prepares, %known ], [ %unprepared, %over ]
  %place = add i64 %worker, %k
  %owner = urem i64 %place, %threads
  %owner.next = add i64 %owner, 1
  %from.product = mul i64 %owner, %tasks
  %to.product = mul i64 %owner.next, %tasks
  %from = udiv i64 %from.product, %threads
  %to = udiv i64 %to.product, %threads
  %o.claim = mul i64 %owner, CLAIM
  %p.claim = getelementptr i64, ptr %claims, i64 %o.claim
  br label %look
look:
  %unprepared = phi i1 [ %unprepared.range, %range ], [ false, %stage ]
  %seen = load atomic i64, ptr %p.claim monotonic, align 8
  %first.seen = add i64 %from, %seen
  %some = icmp slt i64 %first.seen, %to
  br i1 %some, label %claim, label %over
claim:
  %claimed = atomicrmw add ptr %p.claim, i64 %share monotonic
  %start = add i64 %from, %claimed
  %more = icmp slt i64 %start, %to
  br i1 %more, label %work, label %over
work:
  %end = add i64 %start, %share
  %past = icmp sgt i64 %end, %to
  %stop = select i1 %past, i64 %to, i64 %end
  br i1 %unprepared, label %begin, label %stage
begin:
  call void %prepare(ptr %frame, i64 0, i64 0, i64 %worker)
  br label %stage
stage:
  %i = phi i64 [ 0, %work ], [ 0, %begin ], [ %next, %stage ]
  %base = mul i64 %i, 2
  %o.run = add i64 %base, 3
  %o.factor = add i64 %base, 4
  %p.run = getelementptr i64, ptr %loop, i64 %o.run
  %p.factor = getelementptr i64, ptr %loop, i64 %o.factor
  %run = load ptr, ptr %p.run
  %factor = load i64, ptr %p.factor
  %first = mul i64 %start, %factor
  %last = mul i64 %stop, %factor
  call void %run(ptr %frame, i64 %first, i64 %last, i64 %worker)
  %next = add i64 %i, 1
  %again = icmp slt i64 %next, %stages
  br i1 %again, label %stage, label %look
over:
  %k.next = add i64 %k, 1
  %others = icmp slt i64 %k.next, %threads
  br i1 %others, label %range, label %done
done:
  ret void
}

define void @fusednorm_serial(ptr %frame, ptr %loops) {
entry:
  %p.claim = alloca i64
  %p.workers = getelementptr i64, ptr %frame, i64 1
  %p.share = getelementptr i64, ptr %frame, i64 2
  %p.loop = getelementptr i64, ptr %frame, i64 3
  %p.threads = getelementptr i64, ptr %frame, i64 4
  %p.number = getelementptr i64, ptr %frame, i64 5
  store ptr %p.claim, ptr %frame
  store i64 1, ptr %p.threads
  store ptr null, ptr %p.number
  %count = load i64, ptr %loops
  br label %each
each:
  %i = phi i64 [ 0, %entry ], [ %next, %each ]
  %base = mul i64 %i, 2
  %o.loop = add i64 %base, 1
  %o.share = add i64 %base, 2
  %q.loop = getelementptr i64, ptr %loops, i64 %o.loop
  %q.share = getelementptr i64, ptr %loops, i64 %o.share
  %loop = load ptr, ptr %q.loop
  %share = load i64, ptr %q.share
  store i64 0, ptr %p.claim
  store i64 0, ptr %p.workers
  store i64 %share, ptr %p.share
  store ptr %loop, ptr %p.loop
  call void @fusednorm_drive(ptr %frame)
  %next = add i64 %i, 1
  %again = icmp slt i64 %next, %count
  br i1 %again, label %each, label %done
done:
  ret void
}
""".replace("CLAIM", str(CLAIM))


@dataclass(frozen=True, slots=True)
class Loop:
    """Kernels that run one after the other on each share of the tasks.

    Each stage is a kernel's address and how many of its own tasks one task of the loop is. With a ``share`` of 0 each
    thread gets a few shares, or one of a small loop. ``work_bytes`` is what the whole loop touches. ``prepare`` is the
    address of a kernel that each worker runs before its first task, or 0.
    """

    stages: Sequence[tuple[int, int]]
    tasks: int
    work_bytes: int
    share: int = 0
    prepare: int = 0

    @property
    def serial(self) -> bool:
        """True where one thread does the loop whatever torch's number of threads."""
        return self.tasks <= max(1, self.share) or self.work_bytes < SERIAL_BYTES


class Program:
    """Loops to run one after the other, in the form that the driver reads."""

    def __init__(self, loops: Sequence[Loop]) -> None:
        self.loops = [loop for loop in loops if loop.tasks]
        self.arrays = [
            np.array([loop.tasks, len(loop.stages), loop.prepare, *chain.from_iterable(loop.stages)], np.int64)
            for loop in self.loops
        ]
        self.addresses = [array.ctypes.data for array in self.arrays]
        self.whole = self._in_order(range(len(self.loops)))
        self.whole_address = self.whole.ctypes.data
        self.parts = [self._in_order([index]) for index in range(len(self.loops))]
        self.part_addresses = [part.ctypes.data for part in self.parts]
        self.serial = all(loop.serial for loop in self.loops)
        self.run_serially = _serially()

    def _in_order(self, chosen: Sequence[int]) -> np.ndarray:
        words = [len(chosen)]
        for index in chosen:
            words += self.addresses[index], self.loops[index].share or self.loops[index].tasks
        return np.array(words, np.int64)

    def threads(self) -> int:
        """How many threads a run takes now."""
        return 1 if self.serial else torch.get_num_threads()

    def run(self, frame: Frame, threads: int) -> None:
        """Run the loops on a frame; so many threads share each loop that is large enough."""
        if threads == 1:
            self.run_serially(frame.address, self.whole_address)
            return
        for loop, address, part in zip(self.loops, self.addresses, self.part_addresses, strict=True):
            if loop.serial:
                self.run_serially(frame.address, part)
            else:
                shares = threads * (SHARES if loop.work_bytes >= SHARED_BYTES else 1)
                share = loop.share or max(1, -(-loop.tasks // shares))
                _parallel(frame, threads, share, address)


_HEAD = struct.Struct("6q")
assert _HEAD.size == 8 * HEAD
_forked = False
_pool: ThreadPoolExecutor | None = None
_pool_size = 0


def _after_fork() -> None:
    global _forked, _pool, _pool_size
    _forked, _pool, _pool_size = True, None, 0


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork)


@cache
def _drive() -> tuple[Callable[[int], None], int]:
    """The driver, callable and as an address."""
    address = link(assemble(DRIVER, "fusednorm_drive"), "fusednorm_drive", "driver")
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address), address


@cache
def _serially() -> Callable[[int, int], None]:
    """The driver of several loops in one thread."""
    address = link(assemble(DRIVER, "fusednorm_serial"), "fusednorm_serial", "serial driver")
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(address)


class OpenMP(NamedTuple):
    """An OpenMP library: GCC's runtime and LLVM's both export GOMP_parallel(function, data, num_threads, flags)."""

    path: str
    parallel: Callable[[int, int, int, int], None]
    thread_number: int  # the address of omp_get_thread_num


@cache
def openmp() -> OpenMP | None:
    """The OpenMP library that torch has loaded; None where there is none."""
    for path in openmp_libraries():
        try:
            library = ctypes.CDLL(path)
            parallel, number = library.GOMP_parallel, ctypes.cast(library.omp_get_thread_num, ctypes.c_void_p)
        except (OSError, AttributeError):
            continue
        parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        parallel.restype = None
        return OpenMP(path, parallel, number.value or 0)
    return None


def _helpers(count: int) -> ThreadPoolExecutor:
    global _pool, _pool_size
    pool = _pool
    if pool is None or _pool_size < count:
        # A pool that is replaced finishes its tasks, and ends when its last user drops it.
        pool = _pool = ThreadPoolExecutor(count, thread_name_prefix="fusednorm")
        _pool_size = count
    return pool


def _parallel(frame: Frame, threads: int, share: int, loop: int) -> None:
    """Run a loop on a team as large as torch's: a smaller one would end threads that torch starts again."""
    drive, address = _drive()
    team, claims = None if _forked else openmp(), frame.clear_claims(threads)
    if team is not None:
        _HEAD.pack_into(frame.words, 0, claims, 0, share, loop, threads, team.thread_number)
        team.parallel(address, frame.address, threads, 0)
        return
    _HEAD.pack_into(frame.words, 0, claims, 0, share, loop, threads, 0)
    helpers: list[Future[None]] = []
    try:
        with suppress(RuntimeError):  # the interpreter is shutting down, or the system has no more threads: do without
            for _ in range(threads - 1):
                helpers.append(_helpers(threads - 1).submit(_help, drive, frame))
        drive(frame.address)
    finally:
        _join(helpers)


def _help(drive: Callable[[int], None], frame: Frame) -> None:
    drive(frame.address)


def _join(helpers: Sequence[Future[None]]) -> None:
    """Wait for the threads whatever a signal's handler raises: they write to memory that the caller then frees."""
    interruption: BaseException | None = None
    for helper in helpers:
        while not helper.done():
            try:
                wait([helper])
            except BaseException as error:
                interruption = error
    if interruption is not None:
        raise interruption
