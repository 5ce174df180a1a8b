"""Side-by-side timing: contenders take turns, so that drift of the machine meets all of them alike.

A timer measures named :class:`Calls`. What differs between devices stays inside the timer: how many sets of inputs it
wants to rotate through (:meth:`Timer.input_sets`), how a call is repeated, and how time is read.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Call = Callable[[], Any]
Calls = Sequence[Call]


@dataclass(frozen=True)
class Timing:
    """Seconds per call of each sample, and the host's seconds per call where the device runs beside it."""

    samples: tuple[float, ...]
    host: float | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def ms(self) -> float:
        return self.median * 1e3


class Timer(Protocol):
    """Measures contenders of one problem side by side."""

    def input_sets(self, bytes_per_set: int) -> int:
        """How many sets of inputs each contender should be prepared on; its calls rotate through them."""

    def measure(self, contenders: Mapping[str, Calls]) -> dict[str, Timing]:
        """The time of each contender; its calls are equal but for the set of inputs."""


@dataclass(frozen=True)
class CpuTimer:
    """perf_counter around enough calls to make a sample; one set of inputs, so what fits the cache stays in it.

    ``seconds`` bounds the time spent on one contender, as far as ``minimum_samples`` allow. A slow contender takes its
    fewer turns spread evenly over those of the others.
    """

    sample_seconds: float = 0.01
    seconds: float = 1.0
    minimum_samples: int = 5
    maximum_samples: int = 41
    # Threads of other runtimes (OpenMP, ONNX Runtime) spin for about a millisecond after their last call.
    pause_seconds: float = 0.002

    def input_sets(self, bytes_per_set: int) -> int:
        return 1

    def measure(self, contenders: Mapping[str, Calls]) -> dict[str, Timing]:
        calls = {name: sets[0] for name, sets in contenders.items()}
        per_call = {name: _warm_up(call) for name, call in calls.items()}
        iterations = {
            name: max(1, math.ceil(self.sample_seconds / max(seconds, 1e-9))) for name, seconds in per_call.items()
        }
        turns = {
            name: min(
                self.maximum_samples,
                max(self.minimum_samples, int(self.seconds / (iterations[name] * max(seconds, 1e-9)))),
            )
            for name, seconds in per_call.items()
        }
        rounds = max(turns.values(), default=0)
        samples: dict[str, list[float]] = {name: [] for name in calls}
        order = list(calls)
        for turn in range(1, rounds + 1):
            for name in order:
                if len(samples[name]) == turn * turns[name] // rounds:
                    continue
                time.sleep(self.pause_seconds)
                samples[name].append(_sample(calls[name], iterations[name]))
            order.append(order.pop(0))
        return {name: Timing(tuple(values)) for name, values in samples.items()}


def _warm_up(call: Call) -> float:
    """Seconds per call after the first one, which compiles, allocates and starts threads."""
    call()
    seconds = _sample(call, 1)
    return seconds if seconds > 1e-3 else _sample(call, 20)


def _sample(call: Call, iterations: int) -> float:
    """Seconds per call; a short call runs once untimed, since the contender before left its own data in the cache."""
    if iterations > 1:
        call()
    start = time.perf_counter()
    for _ in range(iterations):
        call()
    return (time.perf_counter() - start) / iterations


def timer_for(device: str) -> Timer:
    """The timer of a device type."""
    if device == "cpu":
        return CpuTimer()
    raise NotImplementedError(f"timing: device {device!r} has no timer yet; measure on the cpu")
