"""What the rows of forms amount to: what one call saves, and the rule that a form has to keep."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fusednorm.bench.forms.measuring import COMPILE, COMPOSED, CONTENDERS, EAGER, FUSED
from fusednorm.bench.forms.rows import FormRow, cases_of
from fusednorm.bench.tables import Table, in_ms, in_times

#: One call is to be so much faster than several of fusednorm's, where it saves so many of their bytes and else as much
#: faster as it saves, but for noise; and as fast as torch.compile's.
LEAST_SAVING, LEAST_OF_PROMISE, LEAST_OF_COMPILE = 1.5, 0.95, 0.98

Case = Mapping[str, FormRow]


def ratio(case: Case, name: str) -> float | None:
    """A contender's time as a multiple of one call's; None where one of them was not measured."""
    theirs, ours = (case[one].ms if one in case else None for one in (name, FUSED))
    return theirs / ours if theirs and ours else None


def promised(case: Case) -> float | None:
    """The bytes of several calls as a multiple of those of one; None where they are not known."""
    several, one = (case[name].bytes if name in case else 0 for name in (COMPOSED, FUSED))
    return several / one if several and one else None


def verdict(case: Case) -> str:
    """ "pass", what breaks the rule, or nothing where there is no time to compare."""
    if FUSED in case and case[FUSED].status in ("wrong", "failed"):
        return case[FUSED].status
    saved, compiled = ratio(case, COMPOSED), ratio(case, COMPILE)
    least = min(LEAST_SAVING, LEAST_OF_PROMISE * (promised(case) or 0.0))
    broken = ["saves too little"] if saved is not None and saved < least else []
    if compiled is not None and compiled < LEAST_OF_COMPILE:
        broken.append("slower than torch.compile")
    return ", ".join(broken) or ("pass" if saved is not None else "")


def form_table(rows: Iterable[FormRow]) -> Table:
    """A line for each form: the time of one call, and those of the others as multiples of it.

    "promised" is what several calls move at the least, as a multiple of what one call does: what their time would be if
    all of them were as fast as memory.
    """
    keys = ("form", "shape", "dtype", "layout", "direction")
    others = (EAGER, COMPILE, COMPOSED)
    lines = []
    for case in cases_of(rows):
        first = next(iter(case.values()))
        notes = (f"{name}: {case[name].note}" for name in CONTENDERS if name in case and case[name].note)
        times = [in_times(ratio(case, name)) for name in others]
        own = in_ms(case[FUSED].ms) if FUSED in case else ""
        host = [in_ms(case[name].host_ms) if name in case else "" for name in (FUSED, COMPOSED)]
        figures = own, *times, in_times(promised(case)), *host
        lines.append((*(getattr(first, key) for key in keys), *figures, verdict(case), "; ".join(notes)))
    title = "forms in one call; the times of the others are multiples of its own"
    hosts = (f"{name}, host ms" for name in (FUSED, COMPOSED))
    header = (*keys, f"{FUSED}, ms", *others, "promised", *hosts, "rule", "note")
    return Table(title, header, tuple(lines), (*keys, "rule", "note")).without_empty_columns()
