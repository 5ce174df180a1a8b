"""How many times faster than torch eager and torch.compile whole models and single norms are, over several reports."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from fusednorm.bench.models.rows import ModelReport, ModelRow, pairs_of
from fusednorm.bench.models.step import Mode
from fusednorm.bench.models.summary import ratio
from fusednorm.bench.provenance import Machine
from fusednorm.bench.results import Report
from fusednorm.bench.summary import COMPILE, EAGER, Case, cases_of, geometric_mean

T = TypeVar("T")
#: The mode of a model's rows in which torch's model is what a contender of single norms is called.
_MODES: dict[str, Mode] = {EAGER: "eager", COMPILE: "default"}


@dataclass(frozen=True)
class Speedups:
    """Of one device: for each model and each norm, how many times faster fusednorm is than eager and torch.compile.

    A model with fusednorm's norms stands against the same model with torch's, both eager or both compiled. A model's
    figure is the geometric mean over dtypes, a norm's over shapes, dtypes and layouts; a norm whose backward was
    measured alone has no figure for both directions together. A figure that was not measured is None.
    """

    device: str
    models: dict[str, dict[str, float | None]]
    norms: dict[str, dict[str, float | None]]


def device_of(what: str, machines: Iterable[Machine]) -> str:
    """The device that all results are of; ValueError where they are of several."""
    devices = sorted({machine.device for machine in machines})
    if len(devices) != 1:
        raise ValueError(f"{what}: takes reports of one device, these are of {', '.join(devices) or 'none'}")
    return devices[0]


def speedups_of(reports: Sequence[Report | ModelReport]) -> Speedups:
    """The speedups of reports of one device; ValueError where they are of several, or hold no time to compare."""
    device = device_of("speedups", (report.machine for report in reports))
    pairs = pairs_of(row for report in reports if isinstance(report, ModelReport) for row in report.rows)
    cases = [case for report in reports if isinstance(report, Report) for case in cases_of(report.rows)]
    models = _grouped(pairs, _model_name, _over_torch)
    apart = {case.group[0] for case in cases if case.group[-1] == "backward"}
    cases = [case for case in cases if case.group[0] not in apart or case.group[-1] != "forward_backward"]
    norms = _grouped(cases, _norm_name, lambda case, name: case.speedup(name))
    if not models and not norms:
        raise ValueError("speedups: no model and no norm has a time of fusednorm's and one of torch's")
    return Speedups(device, models, norms)


def _grouped(
    members: Iterable[T], name_of: Callable[[T], str], speedup: Callable[[T, str], float | None]
) -> dict[str, dict[str, float | None]]:
    groups: dict[str, list[T]] = {}
    for member in members:
        groups.setdefault(name_of(member), []).append(member)
    found = {
        name: {over: geometric_mean(speedup(each, over) for each in group) for over in (EAGER, COMPILE)}
        for name, group in groups.items()
    }
    return {name: figures for name, figures in found.items() if any(figures.values())}


def _model_name(pair: dict[str, ModelRow]) -> str:
    first = next(iter(pair.values()))
    return " ".join(part for part in (first.model, first.direction, first.layout) if part != "rows")


def _over_torch(pair: dict[str, ModelRow], over: str) -> float | None:
    return ratio(pair, "ms") if next(iter(pair.values())).mode == _MODES[over] else None


def _norm_name(case: Case) -> str:
    operation, *_, direction = case.group
    return f"{operation} {direction.replace('_', ' + ')}"
