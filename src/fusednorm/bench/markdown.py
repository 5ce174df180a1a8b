"""Saved reports as Markdown, as the README shows them."""

from __future__ import annotations

from collections.abc import Sequence

from fusednorm.bench.results import Report
from fusednorm.bench.summary import cases_of, mean_table, ratio_table
from fusednorm.bench.sweep import SWEEP
from fusednorm.bench.sweep_summary import sweep_tables


def report_markdown(reports: Sequence[Report], workloads: bool = False) -> str:
    """Geometric means, for a sweep its own tables, on request a line for each workload, and the provenance of all."""
    drawn = [case for report in reports if report.suite == SWEEP for case in cases_of(report.rows)]
    listed = [case for report in reports if report.suite != SWEEP for case in cases_of(report.rows)]
    tables = [mean_table(listed)] if listed or not drawn else []
    titled = sweep_tables(drawn) if drawn else ()
    if workloads:
        tables.append(ratio_table([*listed, *drawn]))
    sources: dict[str, list[str]] = {}
    for report in reports:
        machine = report.machine
        sources.setdefault(str(machine), []).append(f"- {machine.date}: `{machine.command}`")
    parts = [table.to_markdown() for table in tables]
    parts[:0] = [f"{table.title}:\n\n{table.to_markdown()}" for table in titled]
    parts += [f"Measured on {machine}:\n\n" + "\n".join(commands) for machine, commands in sources.items()]
    return "\n\n".join(parts) + "\n"
