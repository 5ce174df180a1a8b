"""fusednorm bench --suite models: whole models with fusednorm's norms against the same models with torch's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import get_args

import typer

from fusednorm.bench.memory import NotEnoughMemoryError
from fusednorm.bench.models.catalog import FULL, QUICK, Job, ModelDirection, jobs_of, named
from fusednorm.bench.models.measuring import OURS, compile_ahead, release, run_job, warm_compiler
from fusednorm.bench.models.rows import MODES, ModelReport, ModelRow, pairs_of
from fusednorm.bench.models.step import Mode
from fusednorm.bench.models.summary import contender_table, model_table
from fusednorm.bench.provenance import this_machine
from fusednorm.cli import output

# Pure bfloat16, weights and all, as diffusion models are run; a CPU is slow in it.
DTYPE = {"cpu": "float32", "cuda": "bfloat16"}
_DIRECTIONS: dict[str | None, tuple[ModelDirection, ...]] = {
    None: (),
    "forward": ("inference",),
    "forward_backward": ("training",),
    "both": get_args(ModelDirection),
}


def modes_of(names: Sequence[str]) -> list[Mode]:
    """The modes of these names, none given: torch.compile's default; ValueError for an unknown name."""
    unknown = [name for name in names if name not in (*MODES, "all")]
    if unknown:
        raise ValueError(f"mode: {', '.join(unknown)} unknown; expected one of {', '.join(MODES)}, all")
    wanted = names or ("default",)
    return [mode for mode in MODES if mode in wanted or "all" in wanted]


def model_jobs(
    names: Sequence[str], dtypes: Sequence[str], layouts: Sequence[str], direction: str | None, match: str, device: str
) -> list[Job]:
    """The jobs that the options leave: of the real sizes on a GPU, of quick ones on a CPU; ValueError for none."""
    if direction not in _DIRECTIONS:
        raise ValueError(f"--direction: {direction!r}; a model runs forward, or forward_backward as a training step")
    models = named(QUICK if device == "cpu" else FULL, names)
    jobs = jobs_of(models, dtypes or [DTYPE[device]], layouts, _DIRECTIONS[direction], match)
    if not jobs:
        raise ValueError("no model of suite 'models' is left by --model, --layout, --direction and --match")
    return jobs


def bench_models(
    jobs: Sequence[Job],
    modes: Sequence[Mode],
    device: str,
    seconds: float,
    limit: float | None,
    compile_jobs: int,
    revision: str,
    json_path: str,
    csv_path: str,
) -> None:
    """Runs every job in every mode; prints a table of each, and a table of all that says which keep the rule.

    The JSON file is written after each job, so that a run which is ended early leaves what it has measured. No job is
    started after ``limit`` seconds. With ``compile_jobs`` so many processes compile all jobs before.
    """
    to_stderr = "-" in (json_path, csv_path)
    rows: list[ModelRow] = []
    with output.destinations(json_path, csv_path) as (json_file, csv_file):
        machine = this_machine(device, revision)
        for measured in _measured(jobs, modes, device, seconds, limit, compile_jobs):
            rows += measured
            output.print_table(contender_table(pairs_of(measured)[0]), to_stderr)
            if json_file is not None and json_path != "-":
                json_file.write(ModelReport(machine, tuple(rows)).to_json())
        if rows and all(row.status == "skipped" for row in rows):
            raise NotEnoughMemoryError(rows[0].note)
        output.print_table(model_table(rows), to_stderr)
        report = ModelReport(machine, tuple(rows))
        if json_file is not None:
            json_file.write(report.to_json())
        if csv_file is not None:
            csv_file.write(report.to_csv())
    if any(row.contender == OURS and row.status in ("wrong", "failed") for row in rows):
        raise typer.Exit(output.CHECK_FAILED)


def _measured(
    jobs: Sequence[Job], modes: Sequence[Mode], device: str, seconds: float, limit: float | None, compile_jobs: int
) -> Iterator[list[ModelRow]]:
    """The rows of each job in each mode, as they are measured."""
    time_limit = output.TimeLimit(limit)
    with output.progress(len(jobs) * len(modes)) as show:
        if compile_jobs:
            compile_ahead(jobs, modes, compile_jobs, device, show, time_limit.half_left())
        if any(mode != "eager" for mode in modes):
            show("warming the compiler")
            warm_compiler(device, jobs[0].dtype)
        for place, (mode, job) in enumerate((mode, job) for mode in modes for job in jobs):
            if time_limit.leaves_out(f"{job.key} {mode}"):
                continue
            try:
                rows = run_job(
                    job, mode, device=device, seconds=seconds, ours_first=bool(place % 2), cold=not compile_jobs,
                    progress=show,
                )  # fmt: skip
            except Exception as error:
                error.add_note(f"while measuring {job.key} {mode}")
                raise
            show(advance=True)
            yield rows
        release(device)
