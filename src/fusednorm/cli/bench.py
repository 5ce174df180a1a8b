"""fusednorm bench: fusednorm against torch and the peers that are installed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from fusednorm.bench.contenders import Contender, available
from fusednorm.bench.judging import Asked
from fusednorm.bench.memory import NotEnoughMemoryError
from fusednorm.bench.plot import draw_plot, picture_format
from fusednorm.bench.provenance import this_machine
from fusednorm.bench.results import Report, Row
from fusednorm.bench.runner import COPY, run_workload
from fusednorm.bench.summary import OURS, PREALLOCATED, cases_of, contender_table, mean_table, ratio_table
from fusednorm.bench.workloads import SUITES, Init, Workload, select
from fusednorm.cli import output
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


def bench(
    suite: Annotated[str, typer.Option(help="One of " + ", ".join(SUITES) + ".")] = "quick",
    dtype: Annotated[list[str] | None, typer.Option(help="Only this dtype; may be repeated.")] = None,
    layout: Annotated[list[str] | None, typer.Option(help="Only this layout, nchw or nhwc; may be repeated.")] = None,
    match: Annotated[str, typer.Option(help="Only workloads whose name contains this.")] = "",
    device: output.DeviceOption = "auto",
    direction: Annotated[
        DirectionChoice | None,
        typer.Option(
            help="forward_backward is both in one call, and both stands for forward and forward_backward.  "
            "[default: both on a CPU, all on a GPU]",
            show_default=False,
        ),
    ] = None,
    contender: Annotated[list[str] | None, typer.Option(help="Only this contender; may be repeated.")] = None,
    init: Annotated[Init, typer.Option(help="Input values, as for profile.")] = "normal",
    seconds: Annotated[
        float, typer.Option(help="Time to spend on the slowest contender of a workload.", min=0, callback=output.finite)
    ] = 1.0,
    threads: Annotated[int, typer.Option(help="torch's number of threads; 0 leaves it.", min=0)] = 0,
    revision: Annotated[str, typer.Option(help="The revision to record, for sources that git does not know.")] = "",
    json_path: Annotated[str, typer.Option("--json", help="Write JSON to this file, or - for stdout.")] = "",
    csv_path: Annotated[str, typer.Option("--csv", help="Write CSV to this file, or - for stdout.")] = "",
    plot: Annotated[Path | None, typer.Option(help="Write a picture to this file.")] = None,
) -> None:
    """Times fusednorm, torch eager, torch.compile and the installed peers side by side, each checked first."""
    output.set_threads(threads)
    with output.usage_errors():
        if suite not in SUITES:
            raise ValueError(f"suite: {suite!r} is unknown; expected one of {', '.join(SUITES)}")
        workloads = select(suite, [output.parse_dtype(one) for one in dtype or ()], layout or (), match)
        if not workloads:
            raise ValueError(f"no workload of suite {suite!r} is left by --dtype, --layout and --match")
        where = output.chosen_device(device)
        chosen = _contenders(contender or [], where)
        picture = picture_format(plot) if plot is not None else ""
    wanted = _DIRECTIONS[direction or ("both" if where == "cpu" else "all")]
    jobs = [(workload, asked) for workload in workloads for asked in wanted if workload.training or asked == "forward"]
    to_stderr = "-" in (json_path, csv_path)
    with output.destinations(json_path, csv_path, plot) as (json_file, csv_file, plot_file):
        rows = _run(jobs, chosen, init, where, seconds, to_stderr)
        if not any(row.status == "ok" for row in rows if row.contender == COPY):
            raise NotEnoughMemoryError(rows[0].note)
        peak = 0.0 if where == "cpu" else peak_flops("float32", where)
        result = Report(this_machine(where, revision, peak), tuple(rows))
        cases = cases_of(rows)
        output.print_table(ratio_table(cases), to_stderr)
        output.print_table(mean_table(cases), to_stderr)
        if json_file is not None:
            json_file.write(result.to_json())
        if csv_file is not None:
            csv_file.write(result.to_csv())
        if plot_file is not None:
            plot_file.write(draw_plot(result, picture))
    if any(row.contender in (OURS, PREALLOCATED) and row.status in ("wrong", "failed") for row in rows):
        raise typer.Exit(output.CHECK_FAILED)


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
    to_stderr: bool,
) -> list[Row]:
    rows: list[Row] = []
    timer = timer_for(device, seconds)
    with output.progress(len(jobs)) as show:
        for workload, asked in jobs:
            measured = run_workload(workload, asked, chosen, init=init, timer=timer, device=device, progress=show)
            rows += measured
            show(advance=True)
            output.print_table(contender_table(cases_of(measured)[0]), to_stderr)
    return rows
