"""Saved reports as Markdown, as benchmarks/README.md shows them."""

from __future__ import annotations

from collections.abc import Sequence

from fusednorm.bench.devices.rows import DeviceReport
from fusednorm.bench.devices.summary import device_table
from fusednorm.bench.forms.rows import FormReport
from fusednorm.bench.forms.summary import form_table
from fusednorm.bench.models.rows import ModelReport
from fusednorm.bench.models.summary import model_table
from fusednorm.bench.reading import AnyReport
from fusednorm.bench.results import Report
from fusednorm.bench.summary import cases_of, mean_table, ratio_table
from fusednorm.bench.sweep import SWEEP
from fusednorm.bench.sweep_summary import sweep_tables


def report_markdown(reports: Sequence[AnyReport], workloads: bool = False) -> str:
    """Geometric means, on request a line for each workload, and the provenance of all.

    A sweep and the suites of models, of forms and of devices have tables of their own.
    """
    norms = [report for report in reports if isinstance(report, Report)]
    models = [row for report in reports if isinstance(report, ModelReport) for row in report.rows]
    forms = [row for report in reports if isinstance(report, FormReport) for row in report.rows]
    devices = [row for report in reports if isinstance(report, DeviceReport) for row in report.rows]
    drawn = [case for report in norms if report.suite == SWEEP for case in cases_of(report.rows)]
    listed = [case for report in norms if report.suite != SWEEP for case in cases_of(report.rows)]
    tables = [mean_table(listed)] if listed or not (drawn or models or forms or devices) else []
    titled = [*(sweep_tables(drawn) if drawn else ()), *([model_table(models)] if models else ())]
    titled += [form_table(forms)] if forms else []
    titled += [device_table(devices)] if devices else []
    if workloads and norms:
        tables.append(ratio_table([*listed, *drawn]))
    sources: dict[str, list[str]] = {}
    for report in reports:
        machine = report.machine
        sources.setdefault(str(machine), []).append(f"- {machine.date}: `{machine.command}`")
    parts = [table.to_markdown() for table in tables]
    parts[:0] = [f"{table.title}:\n\n{table.to_markdown()}" for table in titled]
    parts += [f"Measured on {machine}:\n\n" + "\n".join(commands) for machine, commands in sources.items()]
    return "\n\n".join(parts) + "\n"
