"""What the rows of models amount to: torch's figures beside fusednorm's, and the rule that a model has to keep."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from fusednorm.bench.models.measuring import OURS, TORCH
from fusednorm.bench.models.rows import ModelRow, pairs_of
from fusednorm.bench.tables import Table, in_ms, in_times

# Two equal programs differ by as much.
LEAST_SPEEDUP = 0.98
# Workspaces of some kilobytes are no memory to speak of.
MOST_MEMORY = 1.001
MOST_COMPILE_TIME = 1.15

Pair = Mapping[str, ModelRow]


def ratio(pair: Pair, name: str) -> float | None:
    """Torch's figure as a multiple of fusednorm's; None where one of them was not measured."""
    theirs, ours = (getattr(pair[one], name) if one in pair else None for one in (TORCH, OURS))
    return theirs / ours if theirs and ours else None


def broken_rules(pair: Pair) -> list[str]:
    """What fusednorm does worse than the rule allows, of what was measured.

    The rule: at least 0.98 of torch's speed, at most its memory, at most 1.15 times its time to compile, right results.
    """
    ours = pair.get(OURS)
    if ours is not None and ours.status in ("wrong", "failed"):
        return [ours.status]
    limits = {"ms": ("slower", LEAST_SPEEDUP), "peak_bytes": ("memory", 1 / MOST_MEMORY)}
    limits["compile_s"] = "compile time", 1 / MOST_COMPILE_TIME
    return [
        word for name, (word, least) in limits.items() if (found := ratio(pair, name)) is not None and found < least
    ]


def verdict(pair: Pair) -> str:
    """ "pass", what breaks the rule, or nothing where there is no time to compare."""
    return ", ".join(broken_rules(pair)) or ("pass" if ratio(pair, "ms") is not None else "")


def _in_scale(value: float | None, scale: float, form: str) -> str:
    return "" if value is None else format(value / scale, form)


_FIGURES: dict[str, Callable[[ModelRow], str]] = {
    "ms": lambda row: in_ms(row.ms),
    "host ms": lambda row: in_ms(row.host_ms),
    "peak MB": lambda row: _in_scale(row.peak_bytes, 1e6, ".1f"),
    "compile s": lambda row: _in_scale(row.compile_s, 1, ".1f"),
    "error": lambda row: _in_scale(row.error, 1, ".1e"),
}
_FIELDS = {"ms": "ms", "peak MB": "peak_bytes", "compile s": "compile_s"}
_KEYS = ("model", "direction", "dtype", "layout", "mode")


def contender_table(pair: Pair) -> Table:
    """The figures of torch and of fusednorm on one job."""
    lines = tuple(
        (
            name,
            *(write(row) for write in _FIGURES.values()),
            "" if row.status == "ok" else f"{row.status}: {row.note}",
        )
        for name, row in pair.items()
    )
    title = " ".join(getattr(next(iter(pair.values())), name) for name in _KEYS)
    return Table(title, ("contender", *_FIGURES, "note"), lines, ("contender", "note")).without_empty_columns()


def model_table(rows: Iterable[ModelRow]) -> Table:
    """A line per job and mode: fusednorm's figures, torch's as multiples of them, and whether the rule is kept."""
    lines = []
    for pair in pairs_of(rows):
        first = next(iter(pair.values()))
        line = [getattr(first, name) for name in _KEYS]
        for name, write in _FIGURES.items():
            line += [write(pair[one]) if one in pair else "" for one in (TORCH, OURS)]
            if name in _FIELDS:
                line.append(in_times(ratio(pair, _FIELDS[name])))
        notes = (f"{name}: {row.note}" for name, row in pair.items() if row.note)
        lines.append((*line, verdict(pair), "; ".join(notes)))
    header = list(_KEYS)
    for name in _FIGURES:
        header += [f"{name}, torch", f"{name}, ours"]
        if name in _FIELDS:
            header.append("ratio")
    title = "models with torch's norms and with fusednorm's; a ratio above 1 is in fusednorm's favour"
    return Table(title, (*header, "rule", "note"), tuple(lines), (*_KEYS, "rule", "note")).without_empty_columns()
