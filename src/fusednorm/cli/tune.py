"""fusednorm tune: the fastest configurations of this machine, measured and kept."""

from __future__ import annotations

from itertools import product
from math import prod
from pathlib import Path
from typing import Annotated

import typer

from fusednorm import tuning
from fusednorm.bench import autotune
from fusednorm.bench.memory import NotEnoughMemoryError
from fusednorm.bench.sweep import COUNT, MOST_BYTES, MOST_COUNT, SWEEP, drawn_workloads
from fusednorm.bench.workloads import SUITES, Init, LayoutName, Workload, narrowed, select
from fusednorm.cli import output
from fusednorm.norm import FAMILIES, ROW_FAMILIES, Family
from fusednorm.storage import absolute

DEFAULT_GROUPS = 32


def tune(
    suite: Annotated[
        str,
        typer.Option(
            help="One of " + ", ".join(SUITES) + f", or {SWEEP}, whose shapes are drawn.", callback=output.not_empty
        ),
    ] = "",
    seed: Annotated[int, typer.Option(help=f"Of a {SWEEP}'s shapes.", min=0)] = 0,
    count: Annotated[int, typer.Option(help=f"How many workloads a {SWEEP} draws.", min=1, max=MOST_COUNT)] = COUNT,
    match: Annotated[str, typer.Option(help="Only workloads of the suite whose name contains this.")] = "",
    shape: Annotated[
        str,
        typer.Option(
            help="Instead of a suite: sizes in NCHW order, whatever the layout, as 2,320,64,64.",
            callback=output.not_empty,
        ),
    ] = "",
    family: Annotated[str, typer.Option(help="With --shape: one of " + ", ".join(FAMILIES) + ".")] = "group_norm",
    groups: Annotated[
        int | None,
        typer.Option(
            help=f"With --shape: groups of group_norm (default {DEFAULT_GROUPS}); for layer_norm and rms_norm the "
            "number of trailing dimensions (default 1).",
            min=1,
        ),
    ] = None,
    activation: Annotated[str, typer.Option(help="With --shape: silu, relu, gelu, ...; none by default.")] = "",
    dtype: Annotated[
        list[str] | None, typer.Option(help="Only this dtype; with --shape, float32 by default. May be repeated.")
    ] = None,
    layout: Annotated[
        list[str] | None, typer.Option(help="Only this layout, nchw or nhwc; with --shape, nchw by default.")
    ] = None,
    init: Annotated[Init, typer.Option(help="Input values, as for profile.")] = "normal",
    seconds: Annotated[
        float, typer.Option(help="Time to spend on each of the fastest configurations.", min=0, callback=output.finite)
    ] = 0.2,
    file: Annotated[
        Path | None, typer.Option(help="Where the choices are kept.  [default: tuned.json in the cache's folder]")
    ] = None,
    device: output.DeviceOption = "auto",
    threads: Annotated[int, typer.Option(help="torch's number of threads; 0 leaves it.", min=0)] = 0,
) -> None:
    """Measures every configuration of every instance, each checked first, and keeps the fastest of each problem.

    A program uses what is kept under FUSEDNORM_TUNED=1 (or the file's path) or fusednorm.use_tuned().
    """
    output.set_threads(threads)
    with output.usage_errors():
        dtypes = [output.parse_dtype(one) for one in dtype or ()]
        if bool(suite) == bool(shape):
            raise ValueError("give either --suite or --shape")
        where = output.chosen_device(device)
        if shape:
            workloads = _of_shape(shape, family, groups, activation, dtypes, layout or [])
        elif suite == SWEEP:
            workloads = narrowed(drawn_workloads(seed, count, MOST_BYTES[where]), dtypes, layout or (), match)
        else:
            workloads = select(suite, dtypes, layout or (), match)
        if not workloads:
            raise ValueError(f"no workload of suite {suite!r} is left by --dtype, --layout and --match")
    path = tuning.default_path() if file is None else absolute(str(file))
    tuning.keep(path, where, {})  # a file that cannot be written is an error before the work
    cases = _measured(workloads, init, where, seconds, path)
    if not cases:
        raise NotEnoughMemoryError("no workload fits the memory")
    output.print_table(autotune.tuned_table(cases))
    output.emit(autotune.summary_line(cases))
    output.emit(f"kept in {path}")
    if any(case.faulty for case in cases):
        raise typer.Exit(output.CHECK_FAILED)


def _of_shape(
    shape: str, family: str, groups: int | None, activation: str, dtypes: list[str], layouts: list[str]
) -> list[Workload]:
    """The workloads of one shape in all the dtypes and layouts that were asked for."""
    known: dict[str, Family] = {one: one for one in FAMILIES}
    orders: dict[str, LayoutName] = {"nchw": "nchw", "nhwc": "nhwc"}
    if family not in known:
        raise ValueError(f"family: {family!r} is unknown; expected one of {', '.join(FAMILIES)}")
    if unknown := set(layouts) - set(orders):
        raise ValueError(f"layout: {', '.join(sorted(unknown))} unknown; expected nchw or nhwc")
    sizes = output.parse_shape(shape)
    groups = groups or (1 if family in ROW_FAMILIES else DEFAULT_GROUPS if family == "group_norm" else 0)
    found = [
        Workload(known[family], sizes, groups, dtype, orders[layout], activation or None)
        for dtype, layout in product(dtypes or ["float32"], layouts or ["nchw"])
    ]
    if prod(sizes) == 0:
        raise ValueError(f"shape: {sizes} has no elements to measure")
    return list(dict.fromkeys(found))


def _measured(workloads: list[Workload], init: Init, device: str, seconds: float, path: Path) -> list[autotune.Tuned]:
    """Every workload measured, and its choice kept as soon as it is known."""
    jobs = [(operation, workload) for workload in workloads for operation in autotune.operations_of(workload)]
    cases: list[autotune.Tuned] = []
    with output.progress(len(jobs)) as show:
        autotune.compile_ahead(jobs, device, show)
        for operation, workload in jobs:
            show(f"{workload.key} {operation.direction}")
            try:
                case = autotune.tune(operation, workload, seconds=seconds, init=init, device=device)
            except NotEnoughMemoryError as error:  # The other workloads may fit.
                output.say(str(error))
            else:
                cases.append(case)
                if case.choice is not None:
                    tuning.keep(path, device, {case.problem: case.choice})
            show(advance=True)
    return cases
