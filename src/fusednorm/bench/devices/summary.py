"""What the rows of the devices amount to: how time scales, and how it compares with torch's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import product
from typing import Literal, get_args

from fusednorm.bench.devices.catalog import ALONE, APEX, CONTENDERS, DTENSOR, EXCHANGE, OURS, TORCH
from fusednorm.bench.devices.rows import DeviceRow, cases_of
from fusednorm.bench.tables import Table, in_ms, in_times

Case = Mapping[str, DeviceRow]
Time = Literal["ms", "replay_ms"]


def ratio(case: Case, name: str, time: Time = "ms") -> float | None:
    """A contender's time as a multiple of fusednorm's; None where one of them was not measured."""
    theirs, ours = (getattr(case[one], time) if one in case else None for one in (name, OURS))
    return theirs / ours if theirs and ours else None


def scaled(case: Case, alone: Case | None, time: Time = "ms") -> float | None:
    """How much faster than one device: its time over this one's. With weak scaling the same time, 1, is the best."""
    ours, theirs = (None if one is None or OURS not in one else getattr(one[OURS], time) for one in (case, alone))
    return theirs / ours if theirs and ours else None


def _of_one_device(case: Case, cases: Iterable[Case]) -> Case | None:
    keys = ("workload", "scaling", "dtype", "layout", "direction")
    first = next(iter(case.values()))
    for other in cases:
        found = next(iter(other.values()))
        if found.devices == 1 and all(getattr(found, key) == getattr(first, key) for key in keys):
            return other
    return None


def device_table(rows: Iterable[DeviceRow]) -> Table:
    """A line for each workload, direction, number of devices and way to time: calls, and replays of a graph."""
    keys = ("workload", "scaling", "devices", "shape", "dtype", "layout", "direction")
    others = (DTENSOR, TORCH, APEX, ALONE)
    cases = cases_of(rows)
    lines = []
    for case, time in product(cases, get_args(Time)):
        first = next(iter(case.values()))
        own, exchange = (getattr(case[name], time) if name in case else None for name in (OURS, EXCHANGE))
        if own is None and time == "replay_ms":
            continue
        notes = (f"{name}: {case[name].note}" for name in CONTENDERS if name in case and case[name].note)
        times = (in_times(ratio(case, name, time)) for name in others)
        speed = in_times(scaled(case, _of_one_device(case, cases), time))
        way = "calls" if time == "ms" else "replays"
        facts = (*(str(getattr(first, key)) for key in keys), way)
        lines.append((*facts, in_ms(own), speed, *times, in_ms(exchange), "; ".join(notes)))
    title = f"norms over devices; the times of the others are multiples of {OURS}'s"
    header = (*keys, "timed by", f"{OURS}, ms", "one device", *others, f"{EXCHANGE}, ms", "note")
    words = ("workload", "scaling", "shape", "dtype", "layout", "direction", "timed by", "note")
    return Table(title, header, tuple(lines), words).without_empty_columns()
