"""Device time by graph replay with a cold L2, and the host's time per call, for every GPU that torch calls "cuda".

AMD's GPUs have that name too: torch's ROCm builds answer to torch.cuda, and its graphs there are HIP's.

**Device time.** A graph holds calls on all sets of inputs in turn, each into an output of its own, so that between two
uses of a set the other sets move at least twice the L2. Where the most sets allowed move less, a graph goes through
them once. Before each replay a buffer larger than the L2 is read: it leaves the L2 clean and full of other data, and
the host queues the replay meanwhile.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch

from fusednorm.machine.timing import Call, Calls, Timing, in_turns, turns_within

# Beyond this many sets a graph of a slow contender has thousands of kernels.
MOST_SETS = 256
# For hundreds of workloads one after the other: to draw and capture a set takes longer than to time it.
FEW_SETS, FEW_SAMPLES = 64, 11
# A graph takes a few microseconds to start; these make that less than a hundredth.
GRAPH_SECONDS = 500e-6
FEWEST_CALLS = 8
# One call's kernels times this stay below the depth of a launch queue (1024), where the host would wait for the device.
HOST_CALLS = 20


def sets_beyond(l2_bytes: int, bytes_per_set: int, most_sets: int = MOST_SETS) -> int:
    """The fewest sets, up to ``most_sets``, with twice the L2's bytes in the others between two uses of a set."""
    return min(most_sets, 1 + max(1, math.ceil(2 * l2_bytes / max(1, bytes_per_set))))


def rounds_in_graph(sets: int, seconds_per_call: float, most_sets: int = MOST_SETS) -> int:
    """How often one graph goes through all sets.

    Once where there are ``most_sets``: these may fit the L2, and then only the first round after the flush is cold.
    """
    if sets >= most_sets:
        return 1
    calls = max(FEWEST_CALLS, GRAPH_SECONDS / max(seconds_per_call, 1e-9))
    return max(1, math.ceil(calls / sets))


@cache
def _stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


@cache
def _flush_buffer(nbytes: int) -> torch.Tensor:
    return torch.ones(nbytes // 4, device="cuda")


def l2_bytes() -> int:
    """The L2 of the current GPU, in bytes."""
    return int(torch.cuda.get_device_properties().L2_cache_size)


@dataclass(frozen=True)
class GpuTimer:
    """Medians of interleaved samples; ``seconds`` bounds the time per contender, as far as ``minimum_samples`` allow.

    Prepare calls in :meth:`session`: autograd runs a backward on the stream of its forward, and only work on the
    session's stream is captured.
    """

    seconds: float = 1.0
    minimum_samples: int = 5
    maximum_samples: int = 25
    most_sets: int = MOST_SETS
    asynchronous: bool = True

    def input_sets(self, bytes_per_set: int) -> int:
        return sets_beyond(l2_bytes(), bytes_per_set, self.most_sets)

    @contextmanager
    def session(self) -> Iterator[None]:
        if torch.cuda.current_stream() == _stream():
            yield
            return
        torch.cuda.synchronize()
        with torch.cuda.stream(_stream()):
            yield
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # Triton loads kernels into memory that torch does not hold

    def measure(self, contenders: Mapping[str, Calls], whole: bool = False) -> dict[str, Timing]:
        with self.session():
            per_call = {name: _warm_up(calls) for name, calls in contenders.items()}
            make = _whole_calls if whole else partial(_device_runs, most_sets=self.most_sets)
            runs = {name: make(calls, per_call[name]) for name, calls in contenders.items()}
            samples: dict[str, list[float]] = {name: [] for name in runs}
            for name in in_turns({name: self._turns(run, per_call[name]) for name, run in runs.items()}):
                samples[name].append(runs[name].sample())
        return {name: Timing(tuple(values), runs[name].method, runs[name].note) for name, values in samples.items()}

    def host_seconds(self, contenders: Mapping[str, Call]) -> dict[str, float]:
        found: dict[str, list[float]] = {name: [] for name in contenders}
        with self.session():
            for call in contenders.values():
                call()
            for name in in_turns(dict.fromkeys(contenders, self.minimum_samples)):
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(HOST_CALLS):
                    contenders[name]()
                found[name].append((time.perf_counter() - start) / HOST_CALLS)
            torch.cuda.synchronize()
        return {name: statistics.median(values) for name, values in found.items()}

    def peak_bytes(self, call: Call) -> int | None:
        with self.session():
            call()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            call()
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated() - before

    def _turns(self, run: Run, seconds_per_call: float) -> int:
        return turns_within(self.seconds, run.calls * seconds_per_call, self.minimum_samples, self.maximum_samples)


@dataclass(frozen=True)
class Run:
    """``enqueue`` starts that many ``calls`` at once; ``kept`` holds the memory that they write."""

    enqueue: Callable[[], Any]
    calls: int
    method: str
    kept: Any = None
    note: str = ""

    def sample(self) -> float:
        """Seconds per call."""
        if self.method == "calls":
            torch.cuda.synchronize()
        else:
            _flush_buffer(8 * l2_bytes()).sum()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        self.enqueue()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e-3 / self.calls


def _warm_up(calls: Calls) -> float:
    """Seconds per call, after each has run once: compiled, loaded, and its memory allocated."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    some = calls[: max(1, HOST_CALLS // 4)]
    start = time.perf_counter()
    for call in some:
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / len(some)


def _whole_calls(calls: Calls, seconds_per_call: float) -> Run:
    count = max(HOST_CALLS, min(200, int(2e-3 / max(seconds_per_call, 1e-9))))

    def enqueue() -> None:
        for index in range(count):
            calls[index % len(calls)]()

    return Run(enqueue, count, "calls")


def _device_runs(calls: Calls, seconds_per_call: float, most_sets: int) -> Run:
    """A graph of calls, or the calls themselves where they cannot be captured."""
    try:
        once = captured(calls, 1)
        once.enqueue()
        device = min(once.sample() for _ in range(2))
        rounds = rounds_in_graph(len(calls), device, most_sets)
        run = once if rounds == 1 else captured(calls, rounds)
        run.enqueue()  # the first replay uploads the graph
        torch.cuda.synchronize()
        return run
    except RuntimeError as error:
        torch.cuda.synchronize()
        note = f"not captured: {(str(error).splitlines() or [''])[0][:200]}"
        return replace(_whole_calls(calls, seconds_per_call), method="events", note=note)


def captured(calls: Calls, rounds: int) -> Run:
    """A graph of all calls, ``rounds`` times; each set's last output is kept, so that no two share memory.

    Not by torch.cuda.graph, which first collects garbage and empties the allocator's cache: with hundreds of graphs
    that is most of a benchmark's time.
    """
    graph, kept = torch.cuda.CUDAGraph(), deque[Any](maxlen=len(calls))
    torch.cuda.synchronize()
    collecting = gc.isenabled()
    gc.disable()  # a tensor or graph that is freed during a capture can end it
    try:
        # Other threads may allocate meanwhile. Autograd's threads launch into the captured stream and are captured too.
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for _ in range(rounds):
                for call in calls:
                    kept.append(call())
        finally:
            graph.capture_end()
    finally:
        if collecting:
            gc.enable()
    return Run(graph.replay, rounds * len(calls), "graph", kept)
