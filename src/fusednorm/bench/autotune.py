"""The fastest configuration of a workload beside the choice of the heuristics, and the tables of both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from fusednorm.bench.memory import NotEnoughMemoryError
from fusednorm.bench.operations import Operation
from fusednorm.bench.precompile import precompile
from fusednorm.bench.profiling import InstanceResult, Trial, profile, run_once, trials_of
from fusednorm.bench.runner import Progress, silent
from fusednorm.bench.summary import geometric_mean
from fusednorm.bench.tables import Table, in_ms, in_times
from fusednorm.bench.workloads import Init, Workload
from fusednorm.machine.timing import Timer, timer_for
from fusednorm.problem import Direction
from fusednorm.tuning import TunedChoice

WORST = 20
#: A configuration takes the default's place where it is faster by more than two equal calls differ.
MARGIN = 1.02
#: The share of the time that the first round spends on each configuration.
SCREENING_SHARE = 0.2


def operations_of(workload: Workload) -> list[Operation]:
    """The forward of a workload and, where its statistics are its own, its backward."""
    directions: list[Direction] = ["forward", "backward"] if workload.training else ["inference"]
    return [Operation(f"{workload.family} {direction}", workload.family, direction) for direction in directions]


@dataclass(frozen=True)
class Tuned:
    """A workload in one direction: the default and the best result, None where none was right and timed.

    ``problem`` is the text under which the choice is kept, and ``faulty`` are the results that were wrong or failed.
    """

    workload: Workload
    direction: Direction
    problem: str
    default: InstanceResult | None
    best: InstanceResult | None
    faulty: tuple[InstanceResult, ...]

    @property
    def gain(self) -> float | None:
        """How many times faster the best is than the default."""
        if self.default is None or self.best is None or not self.default.ms or not self.best.ms:
            return None
        return self.default.ms / self.best.ms

    @property
    def choice(self) -> TunedChoice | None:
        """What a file of tuned choices keeps."""
        if self.best is None or self.default is None or not self.best.ms or not self.default.ms:
            return None
        return TunedChoice(self.best.instance, self.best.config, self.best.ms, self.default.ms)


def compile_ahead(
    jobs: Iterable[tuple[Operation, Workload]], device: str, progress: Progress = silent, seconds: float | None = None
) -> None:
    """Compile the kernels of all configurations in several processes, where the device has kernels to compile for, or
    as many as are begun within so many seconds."""
    if device == "cpu":
        return
    trials: list[Trial] = []
    for operation, workload in jobs:
        with suppress(NotEnoughMemoryError):  # tuning it says so
            trials += trials_of(operation, workload, device)
    precompile(partial(run_once, device=device), trials, progress, seconds=seconds)


def tune(
    operation: Operation,
    workload: Workload,
    *,
    seconds: float,
    init: Init = "normal",
    device: str = "cpu",
    timer: Timer | None = None,
    progress: Progress = silent,
) -> Tuned:
    """Measures all configurations of every instance that supports a workload, each checked first.

    Those that are right are timed; the fastest and the default are then timed side by side for about ``seconds`` each.
    """
    found = profile(
        operation,
        workload,
        init=init,
        every_config=True,
        device=device,
        timer=timer or timer_for(device, seconds, quick=True),
        screening=timer or timer_for(device, seconds * SCREENING_SHARE, quick=True),
        progress=progress,
    )
    default = found.default if found.default is not None and found.default.ms is not None else None
    best = found.best
    if default is not None and best is not None and (default.ms or 0.0) <= MARGIN * (best.ms or 0.0):
        best = default
    faulty = tuple(one for one in found.results if one.status in ("wrong", "failed"))
    return Tuned(workload, operation.direction, found.problem, default, best, faulty)


# --- tables ---


def config_text(config: dict[str, Any] | None) -> str:
    """A configuration in one line, such as ``reduction(channels=64 positions=8) output(channels=64 positions=32)``."""
    return " ".join(
        f"{name}({config_text(value)})" if isinstance(value, dict) else f"{name}={value}"
        for name, value in (config or {}).items()
    )


def _name(result: InstanceResult | None) -> str:
    return "" if result is None else result.instance


def _ms(result: InstanceResult | None) -> str:
    return "" if result is None else in_ms(result.ms)


def _note(case: Tuned) -> str:
    if not case.faulty:
        return ""
    first = case.faulty[0]
    return f"{len(case.faulty)} wrong or failed: {first.instance} {config_text(first.config)}: {first.note}"


_COLUMNS: dict[str, Callable[[Tuned], str]] = {
    "workload": lambda case: case.workload.key,
    "direction": lambda case: case.direction,
    "default": lambda case: _name(case.default),
    "ms": lambda case: _ms(case.default),
    "best": lambda case: _name(case.best),
    "config": lambda case: "" if case.best is None else config_text(case.best.config),
    "its ms": lambda case: _ms(case.best),
    "gain": lambda case: in_times(case.gain),
    "note": _note,
}
_WORDS = ("workload", "direction", "default", "best", "config", "note")


def _table(title: str, cases: Iterable[Tuned]) -> Table:
    lines = tuple(tuple(write(case) for write in _COLUMNS.values()) for case in cases)
    return Table(title, tuple(_COLUMNS), lines, _WORDS).without_empty_columns()


def tuned_table(cases: Sequence[Tuned]) -> Table:
    """The default and the best of every workload."""
    return _table("the choice of the heuristics and the fastest configuration", cases)


def heuristics_tables(cases: Sequence[Tuned]) -> tuple[Table, ...]:
    """How far the heuristics are from the fastest configuration: by family and direction, and the worst workloads."""
    groups: dict[tuple[str, str], list[Tuned]] = {}
    for case in cases:
        groups.setdefault((case.workload.family, case.direction), []).append(case)
    if len(groups) > 1:
        groups["all", ""] = list(cases)
    lines = tuple((*group, *_shares(members)) for group, members in groups.items())
    header = ("family", "direction", "cases", "default is best", "geometric mean", "worst")
    title = "time of the heuristics' choice over that of the fastest configuration"
    off = sorted((case for case in cases if (case.gain or 1.0) > 1.0), key=lambda case: -(case.gain or 1.0))
    worst = _table(f"the {WORST} worst choices of the heuristics", off[:WORST])
    return (Table(title, header, lines, header[:2]), *([worst] if off else []))


def _shares(cases: Sequence[Tuned]) -> tuple[str, str, str, str]:
    gains = [case.gain for case in cases if case.gain is not None]
    best = sum(case.best is case.default for case in cases if case.gain is not None)
    return (
        str(len(cases)),
        f"{best} of {len(gains)}",
        in_times(geometric_mean(gains)),
        in_times(max(gains, default=None)),
    )


def summary_line(cases: Sequence[Tuned]) -> str:
    """The geometric mean of the gains and the largest, in words."""
    ranked = sorted((case.gain, case.workload.key, case.direction) for case in cases if case.gain is not None)
    if not ranked:
        return "no workload was timed"
    gain, workload, direction = ranked[-1]
    mean = geometric_mean(gain for gain, _, _ in ranked)
    return f"gain: geometric mean {in_times(mean)}, most {in_times(gain)} ({workload} {direction}), {len(ranked)} cases"
