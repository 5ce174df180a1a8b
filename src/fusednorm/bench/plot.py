"""A picture of a report: each contender's speed as a share of the plain copy's."""

from __future__ import annotations

from pathlib import Path

from fusednorm.bench.results import Report
from fusednorm.bench.runner import COPY
from fusednorm.bench.summary import cases_of


def save_plot(report: Report, path: Path) -> None:
    """Horizontal bars per workload, written to ``path``; needs matplotlib (pip install 'fusednorm[bench]')."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError("plot: matplotlib is not installed; pip install matplotlib, or leave --plot out") from error
    cases = cases_of(report.rows)
    names = list(dict.fromkeys(row.contender for row in report.rows if row.ms and row.contender != COPY))
    height = 0.8 / max(1, len(names))
    figure = Figure(figsize=(9, max(3.0, 0.28 * len(cases) * max(1, len(names)) + 1)), layout="constrained")
    axes = figure.add_subplot()
    for index, name in enumerate(names):
        shares = [100 * (case.copy_fraction(name) or 0) for case in cases]
        axes.barh([place + index * height for place in range(len(cases))], shares, height, label=name)
    axes.set_yticks([place + 0.4 - height / 2 for place in range(len(cases))],
                    [f"{case.first.workload}\n{case.first.direction}" for case in cases], fontsize=7)
    axes.invert_yaxis()
    axes.axvline(100, color="black", linewidth=0.8)
    axes.set_xlabel("% of the speed of a plain copy of the same bytes")
    axes.set_title(f"{report.machine.device}, {report.machine.threads} threads", fontsize=9)
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=150)
