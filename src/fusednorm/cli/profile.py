"""fusednorm profile: every instance of one operation."""

from __future__ import annotations

from dataclasses import asdict
from math import prod
from typing import Annotated, Literal

import typer

from fusednorm.bench import profiling
from fusednorm.bench.autotune import config_text
from fusednorm.bench.memory import NotEnoughMemoryError
from fusednorm.bench.operations import OPERATIONS
from fusednorm.bench.tables import Table
from fusednorm.bench.workloads import Init, Workload
from fusednorm.cli import output
from fusednorm.norm import ROW_FAMILIES

# Composable Kernel's example: N 32, H 16, W 16, 64 groups of 128 channels.
DEFAULT_SHAPE, DEFAULT_GROUPS = (32, 8192, 16, 16), 64
DEFAULT_ROWS = (4096, 1024)


def profile(
    operation: Annotated[str, typer.Argument(help="One of " + ", ".join(OPERATIONS), metavar="OPERATION")],
    shape: Annotated[
        str,
        typer.Option(
            help="Sizes in NCHW order, whatever the layout.  [default: 32,8192,16,16; "
            "4096,1024 for layernorm and rmsnorm]",
            callback=output.not_empty,
        ),
    ] = "",
    groups: Annotated[
        int | None,
        typer.Option(
            help="Groups of groupnorm (default 64); for layernorm and rmsnorm the number "
            "of trailing dimensions (default 1).",
            min=1,
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(parser=output.parse_dtype, metavar="fp32|bf16|fp16|fp64")] = "float32",
    layout: Annotated[Literal["nchw", "nhwc"], typer.Option(help="nhwc is torch's channels_last.")] = "nchw",
    activation: Annotated[str, typer.Option(help="silu, relu, gelu, ...; none by default.")] = "",
    init: Annotated[
        Init,
        typer.Option(
            help="Input values: uniform in [-1, 1), standard normal, integers -5 to 5, "
            "offset: a mean of 1000 standard deviations, large: |x| up to 1e4."
        ),
    ] = "normal",
    device: output.DeviceOption = "auto",
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Check against fp64.")] = True,
    time: Annotated[bool, typer.Option("--time/--no-time", help="Time beside a plain copy.")] = True,
    configs: Annotated[
        bool, typer.Option("--configs", help="Every configuration of every instance, not only the default one.")
    ] = False,
    threads: Annotated[int, typer.Option(help="torch's number of threads; 0 leaves it.", min=0)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout.")] = False,
) -> None:
    """Tries every instance of OPERATION on one problem: error, time, bandwidth, and the best."""
    if operation not in OPERATIONS:
        raise typer.BadParameter(f"OPERATION: {operation!r} is unknown; expected one of {', '.join(OPERATIONS)}")
    chosen = OPERATIONS[operation]
    output.set_threads(threads)
    rows = chosen.family in ROW_FAMILIES
    sizes = output.parse_shape(shape) if shape else DEFAULT_ROWS if rows else DEFAULT_SHAPE
    groups_or_dims = groups or (1 if rows else DEFAULT_GROUPS if chosen.family == "group_norm" else 0)
    with output.usage_errors():
        training = chosen.direction != "inference"
        workload = Workload(chosen.family, sizes, groups_or_dims, dtype, layout, activation or None, training=training)
        if prod(sizes) == 0:
            raise ValueError(f"shape: {sizes} has no elements to profile")
    where = output.chosen_device(device)
    with output.progress(1) as show:
        result = profiling.profile(
            chosen, workload, init=init, verify=verify, time=time, every_config=configs, device=where, progress=show
        )
    if not any(one.status != "skipped" for one in result.results):
        reasons = "".join(f"\n  {one.instance}: {one.note}" for one in result.results)
        raise NotEnoughMemoryError(f"no instance ran {result.workload}:{reasons}")
    if as_json:
        best = result.best
        named = {"best": best.instance, "best_config": best.config} if best else {"best": None, "best_config": None}
        output.print_json(asdict(result) | named)
    else:
        _print(result)
    if not result.ok:
        raise typer.Exit(output.CHECK_FAILED)


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _print(result: profiling.Profile) -> None:
    lines = [
        (
            one.instance,
            "*" if one.default else "",
            config_text(one.config),
            _cell(one.error, ".2e"),
            _cell(one.ms, ".4f"),
            _cell(one.gigabytes_per_second, ".1f"),
            _cell(one.copy_fraction, ".0%"),
            _cell(None if one.host_ms is None else one.host_ms * 1e3, ".0f"),
            one.note if one.status in ("ok", "skipped") else f"{one.status.upper()}: {one.note}",
        )
        for one in result.results
    ]
    header = ("instance", "default", "config", "error vs fp64", "ms", "GB/s", "of copy", "host us", "note")
    title = f"{result.operation}: {result.workload}, {result.bytes / 1e6:.1f} MB, {result.flops / 1e9:.2f} Gflop"
    table = Table(title, header, tuple(lines), ("instance", "default", "config", "note"))
    output.print_table(table.without_empty_columns())
    if result.copy_ms is not None:
        output.emit(f"copy limit: {result.copy_ms:.4f} ms")
    if result.best is not None:
        best = result.best
        words = f"{best.instance} {config_text(best.config)}".rstrip()
        output.emit(f"best: {words}, {best.ms:.3f} ms, {best.copy_fraction:.0%} of the copy")
