"""fusednorm report: saved results as Markdown, and as a roofline."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fusednorm.bench.plot import require_matplotlib, roofline_of, save_roofline
from fusednorm.bench.results import Report
from fusednorm.bench.summary import report_markdown
from fusednorm.cli import output


def report(
    files: Annotated[
        list[Path], typer.Argument(help="Files written by fusednorm bench --json.", exists=True, dir_okay=False)
    ],
    workloads: Annotated[bool, typer.Option(help="A line for each workload too.")] = False,
    roofline: Annotated[
        Path | None, typer.Option(help="Write a roofline of these results, of one device, to this picture.")
    ] = None,
) -> None:
    """Prints the tables of saved results as Markdown, as the README shows them."""
    with output.usage_errors():
        reports = [Report.from_json(path.read_text()) for path in files]
        if roofline is not None:
            require_matplotlib()
            save_roofline(roofline_of(reports), roofline)
    typer.echo(report_markdown(reports, workloads), nl=False)
