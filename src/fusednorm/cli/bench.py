"""fusednorm bench: fusednorm against torch and the peers that are installed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from fusednorm.bench.autotune import Tuned, compile_ahead, heuristics_tables, operations_of
from fusednorm.bench.autotune import tune as tune_workload
from fusednorm.bench.contenders import Contender, available
from fusednorm.bench.devices.measuring import counts_of
from fusednorm.bench.devices.rows import DEVICES_SUITE
from fusednorm.bench.forms.rows import FORMS_SUITE
from fusednorm.bench.judging import Asked
from fusednorm.bench.memory import NotEnoughMemoryError
from fusednorm.bench.models.rows import MODELS, MODES
from fusednorm.bench.operations import Operation
from fusednorm.bench.plot import draw_plot, picture_format
from fusednorm.bench.precompile import precompile
from fusednorm.bench.provenance import this_machine
from fusednorm.bench.results import Report, Row
from fusednorm.bench.runner import COPY, call_once, run_workload
from fusednorm.bench.summary import (
    COMPILE,
    EAGER,
    OURS,
    PREALLOCATED,
    cases_of,
    contender_table,
    mean_table,
    ratio_table,
)
from fusednorm.bench.sweep import COUNT, JUDGED_BYTES, MOST_BYTES, MOST_COUNT, SWEEP, drawn_workloads
from fusednorm.bench.sweep_summary import sweep_tables
from fusednorm.bench.workloads import SUITES, Init, Workload, narrowed, select
from fusednorm.cli import output
from fusednorm.cli.devices import bench_devices, check_parts, device_jobs
from fusednorm.cli.forms import bench_forms, form_jobs
from fusednorm.cli.models import bench_models, model_jobs, modes_of
from fusednorm.machine.limits import peak_flops
from fusednorm.machine.timing import timer_for

DirectionChoice = Literal["forward", "backward", "forward_backward", "both", "all"]
_DIRECTIONS: dict[DirectionChoice, tuple[Asked, ...]] = {
    "forward": ("forward",),
    "backward": ("backward",),
    "forward_backward": ("forward_backward",),
    "both": ("forward", "forward_backward"),
    "all": ("forward", "backward", "forward_backward"),
}
# A sweep is measured against torch alone, unless contenders are named.
_AGAINST_TORCH = [OURS, EAGER, COMPILE]


def bench(
    suite: Annotated[
        str,
        typer.Option(
            help="One of "
            + ", ".join(SUITES)
            + f", or {SWEEP}, whose shapes are drawn, or {MODELS}: whole networks, or "
            f"{FORMS_SUITE}: norms with the work around them in one call, or {DEVICES_SUITE}: norms over processes."
        ),
    ] = "quick",
    mode: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Only for {MODELS}, of which a mode compiles all: {', '.join(MODES)} or all; may be repeated.  "
            "[default: default]",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option(help=f"Only this of {MODELS}; may be repeated.", show_default=False)
    ] = None,
    compile_jobs: Annotated[
        int | None,
        typer.Option(
            help=f"Compile {MODELS} in so many processes first; the time to compile is not measured then.",
            show_default=False,
            min=1,
        ),
    ] = None,
    limit: Annotated[
        float | None,
        typer.Option(
            help="Start no measurement after so many seconds; compiling ahead takes half of what is left.",
            show_default=False,
            min=0,
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help=f"Of a {SWEEP}'s shapes.  [default: 0]", min=0)] = None,
    count: Annotated[
        int | None,
        typer.Option(help=f"How many workloads a {SWEEP} draws.  [default: {COUNT}]", min=1, max=MOST_COUNT),
    ] = None,
    devices: Annotated[
        list[int] | None,
        typer.Option(
            help=f"So many for {DEVICES_SUITE}; may be repeated.  [default: 1, 2 and 4, as far as there are]",
            show_default=False,
            min=1,
        ),
    ] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="Only this dtype; may be repeated.")] = None,
    layout: Annotated[list[str] | None, typer.Option(help="Only this layout, nchw or nhwc; may be repeated.")] = None,
    match: Annotated[str, typer.Option(help="Only workloads whose name contains this.")] = "",
    device: output.DeviceOption = "auto",
    direction: Annotated[
        DirectionChoice | None,
        typer.Option(
            help="forward_backward is both in one call, and both stands for forward and forward_backward.  "
            f"[default: both on a CPU, all on a GPU; forward and backward in a {SWEEP}; of {MODELS} what each is "
            "mostly run for]",
            show_default=False,
        ),
    ] = None,
    contender: Annotated[list[str] | None, typer.Option(help="Only this contender; may be repeated.")] = None,
    init: Annotated[
        Init | None, typer.Option(help="Input values, as for profile.  [default: normal]", show_default=False)
    ] = None,
    seconds: Annotated[
        float, typer.Option(help="Time to spend on the slowest contender of a workload.", min=0, callback=output.finite)
    ] = 1.0,
    against_tuned: Annotated[
        bool,
        typer.Option(
            "--against-tuned",
            help="Measure every configuration too: how far the heuristics' choices are from the fastest.",
        ),
    ] = False,
    threads: Annotated[int, typer.Option(help="torch's number of threads; 0 leaves it.", min=0)] = 0,
    revision: Annotated[
        str, typer.Option(help="The revision to record, for sources that git does not know.", callback=output.not_empty)
    ] = "",
    json_path: Annotated[
        str, typer.Option("--json", help="Write JSON to this file, or - for stdout.", callback=output.not_empty)
    ] = "",
    csv_path: Annotated[
        str, typer.Option("--csv", help="Write CSV to this file, or - for stdout.", callback=output.not_empty)
    ] = "",
    plot: Annotated[Path | None, typer.Option(help="Write a picture to this file.")] = None,
) -> None:
    """Times fusednorm, torch eager, torch.compile and the installed peers side by side, each checked first."""
    output.set_threads(threads)
    with output.usage_errors():
        dtypes = [output.parse_dtype(one) for one in dtype or ()]
        given = {"--contender": contender, "--init": init, "--against-tuned": against_tuned, "--plot": plot}
        of_models = {"--mode": mode, "--model": model, "--compile-jobs": compile_jobs}
        asked, refused = ([name for name, value in one.items() if value] for one in (of_models, given))
        _check_suite(suite, seed, count, devices or (), asked, refused)
        if suite in (FORMS_SUITE, DEVICES_SUITE) and limit is not None:
            raise ValueError(f"--limit: {suite!r} is measured whole")
        where = output.chosen_device(device)
        if suite == MODELS:
            modes = modes_of(mode or ())
            model_work = model_jobs(model or (), dtypes, layout or (), direction, match, where)
        if suite == FORMS_SUITE:
            form_work = form_jobs(dtypes, layout or (), direction, match, where)
        if suite == DEVICES_SUITE:
            counts = counts_of(devices or (), where)
            device_work = device_jobs(dtypes, layout or (), direction, match, where)
            check_parts(device_work, counts, where)
    if suite == DEVICES_SUITE:
        bench_devices(device_work, counts, where, seconds, revision, json_path, csv_path)
        return
    if suite == FORMS_SUITE:
        bench_forms(form_work, where, seconds, revision, json_path, csv_path)
        return
    if suite == MODELS:
        bench_models(model_work, modes, where, seconds, limit, compile_jobs or 0, revision, json_path, csv_path)
        return
    with output.usage_errors():
        drawn = suite == SWEEP
        if drawn:
            workloads = narrowed(
                drawn_workloads(seed or 0, count or COUNT, MOST_BYTES[where]), dtypes, layout or (), match
            )
        else:
            workloads = select(suite, dtypes, layout or (), match)
        if not workloads:
            raise ValueError(f"no workload of suite {suite!r} is left by --dtype, --layout and --match")
        chosen = _contenders(contender or (_AGAINST_TORCH if drawn else []), where)
        picture = picture_format(plot) if plot is not None else ""
    wanted = _directions(direction, where, drawn)
    jobs = [(workload, asked) for workload in workloads for asked in wanted if workload.training or asked == "forward"]
    to_stderr = "-" in (json_path, csv_path)
    with output.destinations(json_path, csv_path, plot) as (json_file, csv_file, plot_file):
        rows, tuned = _run(jobs, chosen, init or "normal", where, seconds, limit, drawn, to_stderr, against_tuned)
        if rows and not any(row.status == "ok" for row in rows if row.contender == COPY):
            raise NotEnoughMemoryError(rows[0].note)
        peak = 0.0 if where == "cpu" else peak_flops("float32", where)
        result = Report(this_machine(where, revision, peak), tuple(rows), suite)
        cases = cases_of(rows)
        tables = sweep_tables(cases) if drawn else (ratio_table(cases), mean_table(cases))
        for table in (*tables, *(heuristics_tables(tuned) if against_tuned else ())):
            output.print_table(table, to_stderr)
        if json_file is not None:
            json_file.write(result.to_json())
        if csv_file is not None:
            csv_file.write(result.to_csv())
        if plot_file is not None:
            plot_file.write(draw_plot(result, picture))
    wrong = any(row.contender in (OURS, PREALLOCATED) and row.status in ("wrong", "failed") for row in rows)
    if wrong or any(case.faulty for case in tuned):
        raise typer.Exit(output.CHECK_FAILED)


def _check_suite(
    suite: str,
    seed: int | None,
    count: int | None,
    devices: Sequence[int],
    of_models: Sequence[str],
    given: Sequence[str],
) -> None:
    """Raises ValueError for an unknown suite, and for options that do not apply to it.

    ``of_models`` has the given options that only models take, ``given`` those that models, forms and devices do not.
    """
    known = (*SUITES, SWEEP, MODELS, FORMS_SUITE, DEVICES_SUITE)
    if suite not in known:
        raise ValueError(f"suite: {suite!r} is unknown; expected one of {', '.join(known)}")
    if suite != SWEEP and not seed is count is None:
        raise ValueError(f"--seed and --count: the workloads of {suite!r} are listed; only --suite {SWEEP} draws them")
    if suite != MODELS and of_models:
        raise ValueError(f"{', '.join(of_models)}: not for {suite!r}; only --suite {MODELS} runs models in a mode")
    if suite != DEVICES_SUITE and devices:
        raise ValueError(f"--devices: {suite!r} runs on one; only --suite {DEVICES_SUITE} runs on several")
    if suite in (MODELS, FORMS_SUITE, DEVICES_SUITE) and given:
        raise ValueError(
            f"{', '.join(given)}: not for --suite {suite}, which runs torch and fusednorm on normal numbers"
        )


def _directions(choice: DirectionChoice | None, device: str, drawn: bool) -> tuple[Asked, ...]:
    if choice is None and drawn:
        return "forward", "backward"
    return _DIRECTIONS[choice or ("both" if device == "cpu" else "all")]


def _contenders(names: list[str], device: str) -> list[Contender]:
    found, missing = available(names, device)
    for name, reason in missing.items():
        output.say(f"{name}: {reason}")
    return found


def _run(
    jobs: list[tuple[Workload, Asked]],
    chosen: list[Contender],
    init: Init,
    device: str,
    seconds: float,
    limit: float | None,
    drawn: bool,
    to_stderr: bool,
    against_tuned: bool,
) -> tuple[list[Row], list[Tuned]]:
    """The rows of all jobs, and with ``against_tuned`` the fastest configurations of those that a file can keep.

    Of a drawn suite only small jobs are judged, and no job has a table of its own.
    """
    rows: list[Row] = []
    tuned: list[Tuned] = []
    timer = timer_for(device, seconds, quick=drawn)
    time_limit = output.TimeLimit(limit)
    with output.progress(len(jobs)) as show:
        if device != "cpu":
            names = [one.name for one in chosen]
            run = partial(call_once, names=names, device=device)
            precompile(run, jobs, show, seconds=time_limit.half_left())
        if against_tuned:
            kept = [(one, job[0]) for job in jobs if (one := _operation(*job)) is not None]
            compile_ahead(kept, device, show, time_limit.half_left())
        for workload, asked in jobs:
            if time_limit.leaves_out(f"{workload.key} {asked}"):
                continue
            judged = not drawn or workload.bytes_per_transfer <= JUDGED_BYTES
            try:
                measured = run_workload(
                    workload, asked, chosen, init=init, timer=timer, device=device, progress=show, judged=judged
                )
            except Exception as error:
                error.add_note(f"while measuring {workload.key} {asked}")
                raise
            rows += measured
            operation = _operation(workload, asked) if against_tuned else None
            if operation is not None:
                with suppress(NotEnoughMemoryError):  # the rows say so
                    tuned.append(tune_workload(operation, workload, seconds=seconds, init=init, device=device))
            show(advance=True)
            if not drawn:
                output.print_table(contender_table(cases_of(measured)[0]), to_stderr)
    return rows, tuned


def _operation(workload: Workload, asked: Asked) -> Operation | None:
    """What a file of tuned choices can keep of a job: its forward or its backward."""
    return dict(zip(("forward", "backward"), operations_of(workload), strict=False)).get(asked)
