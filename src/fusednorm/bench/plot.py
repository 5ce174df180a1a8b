"""A picture of a report: each contender's speed as a share of the plain copy's."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from fusednorm.bench.results import Report
from fusednorm.bench.runner import COPY
from fusednorm.bench.summary import cases_of


def require_matplotlib() -> None:
    """Raises ValueError where matplotlib is missing, before anything is measured for the picture."""
    if find_spec("matplotlib") is None:
        raise ValueError("plot: matplotlib is not installed; pip install 'fusednorm[plot]', or leave --plot out")


def save_plot(report: Report, path: Path) -> None:
    """Horizontal bars per workload, written to ``path`` in the format of its suffix."""
    from matplotlib.figure import Figure

    cases = cases_of(report.rows)
    bars: dict[str, list[tuple[int, float]]] = {}
    ticks: list[float] = []
    place = 0
    for case in cases:
        shares = {name: row.copy_fraction for name, row in case.rows.items() if name != COPY and row.copy_fraction}
        ticks.append(place + (len(shares) - 1) / 2)
        for name, share in shares.items():
            bars.setdefault(name, []).append((place, 100 * share))
            place += 1
        place += 1
    figure = Figure(figsize=(9, max(3.0, 0.14 * place + 1)), layout="constrained")
    axes = figure.add_subplot()
    for name, found in bars.items():
        axes.barh([where for where, _ in found], [share for _, share in found], 0.9, label=name)
    axes.set_yticks(ticks, [f"{case.first.workload}\n{case.first.direction}" for case in cases], fontsize=7)
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.axvline(100, color="black", linewidth=0.8)
    axes.set_xlabel("% of the speed of a plain copy of the same bytes")
    axes.set_title(f"{report.machine.device}, {report.machine.threads} threads", fontsize=9)
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=150)
