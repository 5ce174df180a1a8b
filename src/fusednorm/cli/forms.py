"""fusednorm bench --suite forms: norms with the work around them, in one call and in several."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import get_args

import typer

from fusednorm.bench.forms.catalog import FORMS
from fusednorm.bench.forms.measuring import FUSED, FormJob, call_form_once, run_form
from fusednorm.bench.forms.rows import FormDirection, FormReport, FormRow
from fusednorm.bench.forms.summary import form_table
from fusednorm.bench.precompile import precompile
from fusednorm.bench.provenance import this_machine
from fusednorm.cli import output
from fusednorm.machine.timing import timer_for

DTYPE = {"cpu": "float32", "cuda": "bfloat16"}
_DIRECTIONS: dict[str | None, tuple[FormDirection, ...]] = {
    None: get_args(FormDirection),
    "both": get_args(FormDirection),
    "forward": ("forward",),
    "forward_backward": ("forward_backward",),
}


def form_jobs(
    dtypes: Sequence[str], layouts: Sequence[str], direction: str | None, match: str, device: str
) -> list[FormJob]:
    """The jobs that the options leave; ValueError for none."""
    if direction not in _DIRECTIONS:
        raise ValueError(f"--direction: {direction!r}; a form runs forward, or forward_backward")
    jobs = [
        FormJob(form, dtype, one)
        for form in FORMS
        for dtype in dtypes or [DTYPE[device]]
        for one in _DIRECTIONS[direction]
        if match in form.name and (not layouts or form.layout in layouts)
        if one == "forward" or form.differentiable
    ]
    if not jobs:
        raise ValueError("no form is left by --layout and --match")
    return jobs


def bench_forms(
    jobs: Sequence[FormJob], device: str, seconds: float, revision: str, json_path: str, csv_path: str
) -> None:
    """Runs every job; prints a table that says which keep the rule.

    The JSON file is written after each job, so that a run which is ended early leaves what it has measured.
    """
    rows: list[FormRow] = []
    timer = timer_for(device, seconds)
    with output.destinations(json_path, csv_path) as (json_file, csv_file):
        machine = this_machine(device, revision)
        with output.progress(len(jobs)) as show:
            if device != "cpu":
                places = [(FORMS.index(job.form), job.dtype, job.direction) for job in jobs]
                precompile(partial(call_form_once, device=device), places, show)
            for job in jobs:
                try:
                    rows += run_form(job, timer=timer, device=device, progress=show)
                except Exception as error:
                    error.add_note(f"while measuring {job.key}")
                    raise
                show(advance=True)
                if json_file is not None and json_path != "-":
                    json_file.write(FormReport(machine, tuple(rows)).to_json())
        report = FormReport(machine, tuple(rows))
        output.print_table(form_table(rows), "-" in (json_path, csv_path))
        if json_file is not None:
            json_file.write(report.to_json())
        if csv_file is not None:
            csv_file.write(report.to_csv())
    if any(row.contender == FUSED and row.status in ("wrong", "failed") for row in rows):
        raise typer.Exit(output.CHECK_FAILED)
