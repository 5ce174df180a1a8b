"""What the rows of forms amount to: what one call saves, and the rule that a form has to keep."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fusednorm.bench.forms.measuring import COMPILE, COMPOSED, CONTENDERS, EAGER, FUSED
from fusednorm.bench.forms.rows import FormRow, cases_of
from fusednorm.bench.tables import Table, in_ms, in_times

#: One call is to be so much faster than several of fusednorm's, and as fast as torch.compile's, but for noise.
LEAST_SAVING, LEAST_OF_COMPILE = 1.5, 0.98

Case = Mapping[str, FormRow]


def ratio(case: Case, name: str) -> float | None:
    """A contender's time as a multiple of one call's; None where one of them was not measured."""
    theirs, ours = (case[one].ms if one in case else None for one in (name, FUSED))
    return theirs / ours if theirs and ours else None


def verdict(case: Case) -> str:
    """ "pass", what breaks the rule, or nothing where there is no time to compare."""
    if FUSED in case and case[FUSED].status in ("wrong", "failed"):
        return case[FUSED].status
    saved, compiled = ratio(case, COMPOSED), ratio(case, COMPILE)
    least = LEAST_SAVING if FUSED in case and case[FUSED].saves == "yes" else 0.0
    broken = ["saves too little"] if saved is not None and saved < least else []
    if compiled is not None and compiled < LEAST_OF_COMPILE:
        broken.append("slower than torch.compile")
    return ", ".join(broken) or ("pass" if saved is not None else "")


def form_table(rows: Iterable[FormRow]) -> Table:
    """A line for each form: the time of one call, and those of the others as multiples of it."""
    keys = ("form", "shape", "dtype", "layout", "direction")
    others = (EAGER, COMPILE, COMPOSED)
    lines = []
    for case in cases_of(rows):
        first = next(iter(case.values()))
        notes = (f"{name}: {case[name].note}" for name in CONTENDERS if name in case and case[name].note)
        times = [in_times(ratio(case, name)) for name in others]
        own = in_ms(case[FUSED].ms) if FUSED in case else ""
        lines.append((*(getattr(first, key) for key in keys), own, *times, verdict(case), "; ".join(notes)))
    title = "forms in one call; the times of the others are multiples of its own"
    header = (*keys, f"{FUSED}, ms", *others, "rule", "note")
    return Table(title, header, tuple(lines), (*keys, "rule", "note")).without_empty_columns()
