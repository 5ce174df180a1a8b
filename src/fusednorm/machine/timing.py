"""Side-by-side timing: contenders take turns, so that drift of the machine meets all of them alike.

A timer measures named :class:`Calls`. It alone knows its device: how many sets of inputs to rotate through
(:meth:`Timer.input_sets`), how to repeat a call, and how to read time. The timer of GPUs is in
:mod:`fusednorm.machine.gpu_timing`.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

Call = Callable[[], Any]
Calls = Sequence[Call]


@dataclass(frozen=True)
class Timing:
    """Seconds per call of each sample, and how they were taken.

    ``method`` is "graph" (device time by graph replay, L2-cold), "events" (device events around calls, for what cannot
    be captured, L2-cold), or "calls" (whole calls one after the other, the host's part included). ``note`` says what
    kept calls from being captured.
    """

    samples: tuple[float, ...]
    method: str = "calls"
    note: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def ms(self) -> float:
        return self.median * 1e3


class Timer(Protocol):
    """Measures contenders of one problem side by side."""

    @property
    def asynchronous(self) -> bool:
        """Whether the device runs beside the host, so that a call has a host's time and a device's time."""

    def input_sets(self, bytes_per_set: int) -> int:
        """How many sets of inputs each contender should be prepared on; its calls rotate through them."""

    def session(self) -> AbstractContextManager[Any]:
        """The context in which to prepare calls, and all that they start, so that their device time can be measured."""

    def measure(self, contenders: Mapping[str, Calls], whole: bool = False) -> dict[str, Timing]:
        """The time of each contender, whose calls differ in the set of inputs alone.

        It is an asynchronous device's own time, or with ``whole`` the time of whole calls one after the other.
        """

    def host_seconds(self, contenders: Mapping[str, Call]) -> dict[str, float]:
        """The host's seconds per call, from the call to its return; empty where the device is the host."""

    def peak_bytes(self, call: Call) -> int | None:
        """The most bytes that a call holds beyond those held before it; None where nothing tells."""


def turns_within(seconds: float, seconds_per_sample: float, least: int, most: int) -> int:
    """How many samples fit into the time for one contender, within the two bounds."""
    return int(min(most, max(least, seconds / max(seconds_per_sample, 1e-9))))


def in_turns(turns: Mapping[str, int]) -> Iterator[str]:
    """Names in the order to sample them: it rotates, and a name with fewer turns has them spread over the others'."""
    taken = dict.fromkeys(turns, 0)
    rounds = max(turns.values(), default=0)
    order = list(turns)
    for turn in range(1, rounds + 1):
        for name in order:
            if taken[name] == turn * turns[name] // rounds:
                continue
            taken[name] += 1
            yield name
        order.append(order.pop(0))


@dataclass(frozen=True)
class CpuTimer:
    """perf_counter around enough calls to make a sample; one set of inputs, which stays in the cache if it fits.

    ``seconds`` bounds the time spent on one contender, as far as ``minimum_samples`` allow. A slow contender takes its
    fewer turns spread evenly over the others' turns.
    """

    sample_seconds: float = 0.01
    seconds: float = 1.0
    minimum_samples: int = 5
    maximum_samples: int = 41
    # Threads of other runtimes (OpenMP, ONNX Runtime) spin for about a millisecond after their last call.
    pause_seconds: float = 0.002
    asynchronous: bool = False

    def input_sets(self, bytes_per_set: int) -> int:
        return 1

    def session(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def measure(self, contenders: Mapping[str, Calls], whole: bool = False) -> dict[str, Timing]:
        calls = {name: sets[0] for name, sets in contenders.items()}
        per_call = {name: _warm_up(call) for name, call in calls.items()}
        iterations = {
            name: max(1, math.ceil(self.sample_seconds / max(seconds, 1e-9))) for name, seconds in per_call.items()
        }
        turns = {
            name: turns_within(self.seconds, iterations[name] * seconds, self.minimum_samples, self.maximum_samples)
            for name, seconds in per_call.items()
        }
        samples: dict[str, list[float]] = {name: [] for name in calls}
        for name in in_turns(turns):
            time.sleep(self.pause_seconds)
            samples[name].append(_sample(calls[name], iterations[name]))
        return {name: Timing(tuple(values)) for name, values in samples.items()}

    def host_seconds(self, contenders: Mapping[str, Call]) -> dict[str, float]:
        return {}

    def peak_bytes(self, call: Call) -> int | None:
        return None


def _warm_up(call: Call) -> float:
    """Seconds per call after the first one, which compiles, allocates and starts threads."""
    call()
    seconds = _sample(call, 1)
    return seconds if seconds > 1e-3 else _sample(call, 20)


def _sample(call: Call, iterations: int) -> float:
    """Seconds per call; a short call first runs once untimed, since the last contender left its data in the cache."""
    if iterations > 1:
        call()
    start = time.perf_counter()
    for _ in range(iterations):
        call()
    return (time.perf_counter() - start) / iterations


def timer_for(device: str, seconds: float = 1.0, quick: bool = False) -> Timer:
    """The timer of a device type, "cpu" or "cuda"; ``seconds`` bounds the time spent on one contender.

    ``quick`` is for hundreds of workloads: where a timer rotates through sets of inputs, it takes fewer.
    """
    if device == "cpu":
        return CpuTimer(seconds=seconds)
    if device == "cuda":
        from fusednorm.machine.gpu_timing import FEW_SAMPLES, FEW_SETS, GpuTimer

        if quick:
            return GpuTimer(seconds=seconds, maximum_samples=FEW_SAMPLES, most_sets=FEW_SETS)
        return GpuTimer(seconds=seconds)
    raise NotImplementedError(f"timing: device {device!r} has no timer; measure on cpu or cuda")
