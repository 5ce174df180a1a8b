"""fusednorm verify: the public functions against fp64 on this machine."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from fusednorm.bench.checks import (
    INITS,
    Check,
    all_workloads,
    check,
    check_tables,
    covering_workloads,
)
from fusednorm.cli import output
from fusednorm.norm import FAMILIES


def verify(
    family: Annotated[list[str] | None, typer.Option(help="Only this family; may be repeated.")] = None,
    device: output.DeviceOption = "auto",
    full: Annotated[
        bool, typer.Option("--full", help="Every combination, not only every value with each family.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout.")] = False,
) -> None:
    """Checks every family, dtype, layout, direction and activation against fp64; exit code 1 if one is wrong."""
    unknown = set(family or ()) - set(FAMILIES)
    if unknown:
        raise typer.BadParameter(f"family: {', '.join(sorted(unknown))} unknown; expected one of {', '.join(FAMILIES)}")
    workloads = [
        workload
        for workload in (all_workloads() if full else covering_workloads())
        if not family or workload.family in family
    ]
    where = output.chosen_device(device)
    checks: list[Check] = []
    with output.progress(len(workloads)) as show:
        for workload in workloads:
            show(workload.key)
            checks += [check(workload, init, where) for init in INITS]
            show(workload.key, advance=True)
    wrong = [one for one in checks if one.fault]
    if as_json:
        output.print_json({"checks": [_plain(one) for one in checks], "wrong": len(wrong)})
    else:
        for table in check_tables(checks):
            output.print_table(table)
        output.emit(f"{len(checks)} checks, {len(wrong)} wrong")
        for one in wrong[:20]:
            output.say(f"{one.workload.key}, {one.init}: {one.fault}")
    if wrong:
        raise typer.Exit(output.CHECK_FAILED)


def _plain(one: Check) -> dict[str, object]:
    return {
        "workload": one.workload.key,
        "init": one.init,
        "ok": one.fault is None,
        "forward": asdict(one.forward),
        "backward": asdict(one.backward) if one.backward else None,
    }
