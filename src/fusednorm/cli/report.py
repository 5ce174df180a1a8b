"""fusednorm report: saved results as Markdown, and as pictures."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from fusednorm.bench.markdown import report_markdown
from fusednorm.bench.models.rows import ModelReport
from fusednorm.bench.plot import draw_roofline, draw_speedups, picture_format, roofline_of
from fusednorm.bench.reading import read_report
from fusednorm.bench.results import Report
from fusednorm.bench.speedups import speedups_of
from fusednorm.cli import output
from fusednorm.text import MOST_BYTES, read_bytes


def report(
    files: Annotated[
        list[Path], typer.Argument(help="Files written by fusednorm bench --json.", exists=True, dir_okay=False)
    ],
    workloads: Annotated[bool, typer.Option(help="A line for each workload too.")] = False,
    roofline: Annotated[
        Path | None, typer.Option(help="Write a roofline of these results, of one device, to this picture.")
    ] = None,
    speedups: Annotated[
        Path | None,
        typer.Option(help="Write the speedups of these models and norms, of one device, over torch to this picture."),
    ] = None,
) -> None:
    """Prints the tables of saved results as Markdown, as benchmarks/README.md shows them."""
    with output.usage_errors():
        reports = [read_report(_read(path)) for path in files]
        pictures: dict[Path, Callable[[], bytes]] = {}
        if roofline is not None:
            norms = [one for one in reports if isinstance(one, Report)]
            pictures[roofline] = partial(draw_roofline, roofline_of(norms), picture_format(roofline))
        if speedups is not None:
            compared = [one for one in reports if isinstance(one, (Report, ModelReport))]
            pictures[speedups] = partial(draw_speedups, speedups_of(compared), picture_format(speedups))
    paths = roofline, speedups
    with output.destinations(*paths) as destinations:
        for path, destination in zip(paths, destinations, strict=True):
            if path is not None and destination is not None:
                destination.write(pictures[path]())
    output.emit(report_markdown(reports, workloads).rstrip("\n"))


def _read(path: Path) -> str:
    content = read_bytes(path)
    if len(content) > MOST_BYTES:
        raise ValueError(f"{path}: it has more than {MOST_BYTES} bytes; expected a report of fusednorm bench --json")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: it is no UTF-8 text ({error}); expected a report") from None
