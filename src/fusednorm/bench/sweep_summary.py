"""The tables of a sweep: how often torch is faster, the share of the plain copy's or sum's speed, the worst cases."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from fusednorm.bench.summary import COMPILE, EAGER, OURS, Case, geometric_mean
from fusednorm.bench.tables import Table, in_ms, in_percent, in_times
from fusednorm.machine.limits import TRANSFERS

WORST = 20
# Two equal calls differ by less, as clocks and machine vary.
MARGIN = 1.05
# Below this size the start of a kernel takes as long as the transfers.
MEASURED_BY_COPY_BYTES = 4 * 10**6


def _beyond_start(case: Case) -> bool:
    return case.first.bytes // TRANSFERS[case.first.direction] > MEASURED_BY_COPY_BYTES


def _faster_of_torch(case: Case) -> str:
    times = {name: ms for name in (EAGER, COMPILE) if (ms := case.ms(name)) is not None}
    return min(times, key=lambda name: times[name]) if times else ""


def _share_slower(speedups: Iterable[float | None]) -> str:
    """How many of the speedups that exist are below 1 by more than the margin."""
    present = [speedup for speedup in speedups if speedup is not None]
    if not present:
        return ""
    slower = sum(speedup * MARGIN < 1 for speedup in present)
    return f"{slower} of {len(present)} ({slower / len(present):.1%})"


_SHARES: tuple[tuple[str, Callable[[Sequence[Case]], str]], ...] = (
    ("cases", lambda cases: str(len(cases))),
    ("not timed", lambda cases: str(sum(case.ms(OURS) is None for case in cases))),
    ("vs eager", lambda cases: in_times(geometric_mean(case.speedup(EAGER) for case in cases))),
    ("slower than eager", lambda cases: _share_slower(case.speedup(EAGER) for case in cases)),
    ("vs faster of torch", lambda cases: in_times(geometric_mean(case.speedup_over_torch for case in cases))),
    ("slower than faster of torch", lambda cases: _share_slower(case.speedup_over_torch for case in cases)),
    ("whole calls slower than eager's", lambda cases: _share_slower(case.call_speedup for case in cases)),
)


def share_table(cases: Sequence[Case]) -> Table:
    """How often eager, and the faster of eager and compile, wins by more than the margin, by direction and in all."""
    groups: dict[str, list[Case]] = {}
    for case in cases:
        groups.setdefault(case.first.direction, []).append(case)
    if len(groups) != 1:
        groups["all"] = list(cases)
    lines = tuple((name, *(write(members) for _, write in _SHARES)) for name, members in groups.items())
    title = f"fusednorm against torch; slower: by more than {MARGIN - 1:.0%}"
    return Table(title, ("direction", *(name for name, _ in _SHARES)), lines, ("direction",)).without_empty_columns()


def copy_table(cases: Sequence[Case]) -> Table:
    """The share of the copy's or sum's speed by family, layout and direction, above 4 MB, and its least."""
    groups: dict[tuple[str, str, str], list[float]] = {}
    for case in cases:
        fraction = case.copy_fraction()
        if fraction is not None and _beyond_start(case):
            groups.setdefault((case.first.family, case.first.layout, case.first.direction), []).append(fraction)
    lines = tuple(
        (*group, str(len(found)), in_percent(geometric_mean(found)), in_percent(min(found)))
        for group, found in sorted(groups.items())
    )
    keys = ("family", "layout", "direction")
    title = "of the speed of a plain copy (forward) or sum (backward), inputs above 4 MB"
    return Table(title, (*keys, "cases", "geometric mean", "least"), lines, keys)


def _worst_table(title: str, cases: Iterable[Case], rank: Callable[[Case], float | None]) -> Table:
    """The cases of the lowest rank, each beside torch and the plain operation; a case without a rank is left out."""
    ranked = [(value, place, case) for place, case in enumerate(cases) if (value := rank(case)) is not None]
    columns: dict[str, Callable[[Case], str]] = {
        "workload": lambda case: case.first.workload,
        "groups": lambda case: str(case.first.groups or ""),
        "direction": lambda case: case.first.direction,
        "ms": lambda case: in_ms(case.ms(OURS)),
        "faster of torch": _faster_of_torch,
        "its ms": lambda case: in_ms(case.ms(_faster_of_torch(case))),
        "vs it": lambda case: in_times(case.speedup_over_torch),
        "of copy": lambda case: in_percent(case.copy_fraction()),
    }
    lines = tuple(tuple(write(case) for write in columns.values()) for _, _, case in sorted(ranked)[:WORST])
    return Table(title, tuple(columns), lines, ("workload", "direction", "faster of torch"))


def _untimed_table(cases: Sequence[Case]) -> Table:
    """The cases that fusednorm has no time for, and why."""
    header = ("workload", "direction", "not timed")
    untimed = [(case, case.rows[OURS]) for case in cases if OURS in case.rows and case.ms(OURS) is None]
    lines = tuple((case.first.workload, case.first.direction, f"{row.status}: {row.note}") for case, row in untimed)
    return Table("not timed", header, lines, header)


def sweep_tables(cases: Sequence[Case]) -> tuple[Table, ...]:
    """Shares against torch, means against the plain operation, the worst cases against either, and the untimed cases.

    A table without a line is left out.
    """
    tables = (
        share_table(cases),
        copy_table(cases),
        _worst_table(f"the {WORST} worst against torch", cases, lambda case: case.speedup_over_torch),
        _worst_table(
            f"the {WORST} worst against the plain copy or sum, inputs above 4 MB",
            filter(_beyond_start, cases),
            lambda case: case.copy_fraction(),
        ),
        _untimed_table(cases),
    )
    return tuple(table for table in tables if table.lines)
