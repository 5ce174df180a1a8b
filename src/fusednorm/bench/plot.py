"""Pictures of reports: each contender's speed as a share of the plain copy's, the roofline, and the speedups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

from fusednorm.bench.results import Report
from fusednorm.bench.runner import COPY
from fusednorm.bench.speedups import Speedups, device_of
from fusednorm.bench.summary import COMPILE, EAGER, OURS, cases_of
from fusednorm.text import printable


def require_matplotlib() -> None:
    """Raises ValueError where matplotlib is missing, before anything is measured for the picture."""
    if find_spec("matplotlib") is None:
        raise ValueError("plot: matplotlib is not installed; pip install 'fusednorm[plot]', or ask for no picture")


def picture_format(path: Path) -> str:
    """The format of a picture, from its suffix; ValueError for an unknown one, before anything is measured."""
    require_matplotlib()
    from matplotlib.figure import Figure

    known = sorted(Figure().canvas.get_supported_filetypes())
    suffix = path.suffix.removeprefix(".").lower()
    if suffix not in known:
        raise ValueError(f"plot: {str(path)!r} has no suffix of a picture; expected one of {', '.join(known)}")
    return suffix


def _saved(figure: Any, picture: str, dpi: int) -> bytes:
    content = BytesIO()
    figure.savefig(content, dpi=dpi, format=picture)
    return content.getvalue()


def draw_plot(report: Report, picture: str) -> bytes:
    """Horizontal bars per workload, as a picture of this format."""
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
    names = [printable(f"{case.first.workload}\n{case.first.direction}") for case in cases]
    axes.set_yticks(ticks, names, fontsize=7, parse_math=False)
    axes.margins(y=0.01)
    axes.invert_yaxis()
    axes.axvline(100, color="black", linewidth=0.8)
    axes.set_xlabel("% of the speed of a plain copy of the same bytes")
    title = printable(f"{report.machine.device}, {report.machine.threads} threads")
    axes.set_title(title, fontsize=9, parse_math=False)
    axes.legend(fontsize=7)
    return _saved(figure, picture, 150)


@dataclass(frozen=True)
class Roofline:
    """Points (flops per byte, flops/s) by contender and direction, under the measured roofs of one device.

    ``bandwidth``, in bytes/s, is the speed of the fastest plain copy or sum beyond the caches; ``peak_flops``, in
    flops/s, the speed of an fp32 matrix product.
    """

    device: str
    bandwidth: float
    peak_flops: float
    points: dict[tuple[str, str], tuple[tuple[float, float], ...]]


def roofline_of(reports: Sequence[Report]) -> Roofline:
    """The roofline of reports of one device, from rows that have flops and an input of 64 MB or more.

    Raises ValueError where the reports are of several devices, or no row can be drawn.
    """
    device = device_of("roofline", (report.machine for report in reports))
    cases = [case for report in reports for case in cases_of(report.rows) if case.large and case.ms(COPY)]
    cases = [case for case in cases if case.first.direction != "forward_backward"]
    points: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for case in cases:
        for name in (OURS, EAGER, COMPILE):
            row = case.rows.get(name)
            if row is not None and row.ms and row.bytes and row.flops:
                point = row.flops / row.bytes, row.flops / row.ms * 1e3
                points.setdefault((name, row.direction), []).append(point)
    if not points:
        raise ValueError("roofline: no row of 64 MB or more has a time and its floating-point operations")
    return Roofline(
        device,
        max(case.first.bytes / ms * 1e3 for case in cases if (ms := case.ms(COPY))),
        max(report.machine.peak_flops for report in reports),
        {key: tuple(found) for key, found in points.items()},
    )


# The two that everything is compared with have the same colours in every picture.
_COLOURS = {OURS: "tab:blue", EAGER: "tab:red", COMPILE: "tab:orange"}


def draw_roofline(roofline: Roofline, picture: str) -> bytes:
    """Speed against arithmetic intensity, both logarithmic, as a picture of this format."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    intensities = [x for found in roofline.points.values() for x, _ in found]
    low, high = min(intensities) / 2, max(intensities) * 4
    roof = [min(x * roofline.bandwidth, roofline.peak_flops or float("inf")) / 1e12 for x in (low, high)]
    edges = [low, high]
    if roofline.peak_flops and low < (ridge := roofline.peak_flops / roofline.bandwidth) < high:
        edges.insert(1, ridge)
        roof.insert(1, roofline.peak_flops / 1e12)
    axes.plot(edges, roof, color="black", linewidth=1, label=f"{roofline.bandwidth / 1e12:.2f} TB/s measured")
    marks = {"forward": "o", "backward": "^"}
    for (name, direction), found in roofline.points.items():
        xs, ys = zip(*found, strict=True)
        axes.scatter(
            xs,
            [y / 1e12 for y in ys],
            s=18,
            color=_COLOURS[name],
            marker=marks[direction],
            label=f"{name}, {direction}",
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("floating-point operations per byte that must move")
    axes.set_ylabel("Tflop/s")
    axes.set_title(printable(f"{roofline.device}, tensors of 64 MB and more"), fontsize=9, parse_math=False)
    axes.legend(fontsize=7)
    return _saved(figure, picture, 110)


def draw_speedups(speedups: Speedups, picture: str) -> bytes:
    """Horizontal bars, models on the left and norms on the right, as a picture of this format."""
    from matplotlib.figure import Figure

    panels = {"whole models": speedups.models, "norms": speedups.norms}
    panels = {title: figures for title, figures in panels.items() if figures}
    most = max(map(len, panels.values()))
    figure = Figure(figsize=(5.5 * len(panels), max(2.5, 0.3 * most + 1.4)), layout="constrained")
    for axes, (title, figures) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        _draw_bars(axes, figures)
        axes.set_title(title, fontsize=10)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    figure.suptitle(printable(f"times as fast as torch, {speedups.device}"), fontsize=10, parse_math=False)
    return _saved(figure, picture, 130)


def _draw_bars(axes: Any, figures: dict[str, dict[str, float | None]]) -> None:
    """Two bars for each name, from 1, where both are equally fast, with the figure at the end."""
    names = {EAGER: "torch eager", COMPILE: "torch.compile"}
    for offset, (over, label) in zip((-0.2, 0.2), names.items(), strict=True):
        bars = [(place, value) for place, each in enumerate(figures.values()) if (value := each[over])]
        places, values = [place + offset for place, _ in bars], [value for _, value in bars]
        drawn = axes.barh(
            places, [value - 1 for value in values], 0.38, left=1, color=_COLOURS[over], label=f"against {label}"
        )
        axes.bar_label(drawn, [f"{value:.2f}" for value in values], padding=2, fontsize=7)
    axes.set_yticks(range(len(figures)), [printable(name) for name in figures], fontsize=8, parse_math=False)
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=0.8)
    axes.margins(x=0.12, y=0.02)
    axes.spines[["top", "right"]].set_visible(False)
