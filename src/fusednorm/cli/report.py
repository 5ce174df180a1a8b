"""fusednorm report: saved results as Markdown."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fusednorm.bench.results import Report
from fusednorm.bench.summary import report_markdown
from fusednorm.cli import output


def report(
    files: Annotated[
        list[Path], typer.Argument(help="Files written by fusednorm bench --json.", exists=True, dir_okay=False)
    ],
    workloads: Annotated[bool, typer.Option(help="A line for each workload too.")] = False,
) -> None:
    """Prints the tables of saved results as Markdown, as the README shows them."""
    with output.usage_errors():
        reports = [Report.from_json(path.read_text()) for path in files]
    typer.echo(report_markdown(reports, workloads), nl=False)
