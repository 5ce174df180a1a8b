"""Kernels compiled by several processes, before one process times them.

A GPU's kernels are compiled at their first call, one after another, and then kept on disk by Triton and by Inductor. A
suite of many shapes waits for compilers most of its time; here every core has one at work.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing import get_context
from typing import TypeVar

from fusednorm.bench.runner import Progress, silent
from fusednorm.private.torch_names import unkept_autotuning

T = TypeVar("T")

#: Tasks below which a process would spend more time on its start than on them.
LEAST_TASKS = 8


def processes_for(tasks: int) -> int:
    """Processes for so many tasks: one a core, the last core left to the caller."""
    return min(tasks // LEAST_TASKS, (os.cpu_count() or 1) - 1)


def precompile(
    run: Callable[[T], None],
    tasks: Sequence[T],
    progress: Progress = silent,
    processes: int | None = None,
    seconds: float | None = None,
) -> None:
    """Call ``run``, a picklable function, on each task in other processes, by default in :func:`processes_for`.

    A task that raises is passed over, since its timing will raise again; so are all that are left where a process dies,
    and those that none has begun after so many seconds.
    """
    last = math.inf if seconds is None else time.monotonic() + seconds
    if processes is None:
        processes = processes_for(len(tasks))
        if processes < 2:
            return
    threads = max(1, (os.cpu_count() or 1) // processes)
    pool = ProcessPoolExecutor(processes, get_context("spawn"), _limit_threads, (threads,))
    with suppress(BrokenProcessPool), pool:
        futures = [pool.submit(_attempt, run, task) for task in tasks]
        for done, _ in enumerate(as_completed(futures), 1):
            progress(f"compiling: {done} of {len(tasks)}")
            if time.monotonic() > last:
                pool.shutdown(cancel_futures=True)
                break


def _limit_threads(compilers: int) -> None:
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = str(compilers)  # or each process would start one for every core
    import torch

    torch.set_num_threads(1)


def _attempt(run: Callable[[T], None], task: T) -> None:
    """Runs a task. What Inductor measures beside other processes is not kept: who times the code measures it alone."""
    with suppress(Exception), unkept_autotuning():
        run(task)
