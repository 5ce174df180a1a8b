"""fusednorm bench --suite devices: norms whose statistics are spread over processes, on 1, 2 and 4 devices."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import get_args

import typer

from fusednorm.bench.devices.catalog import DTENSOR, OURS, SPREADS, DeviceJob
from fusednorm.bench.devices.measuring import run_devices
from fusednorm.bench.devices.rows import DeviceDirection, DeviceReport, DeviceRow
from fusednorm.bench.devices.summary import device_table
from fusednorm.bench.provenance import this_machine
from fusednorm.cli import output

DTYPE = {"cpu": "float32", "cuda": "bfloat16"}
_DIRECTIONS: dict[str | None, tuple[DeviceDirection, ...]] = {
    None: ("forward_backward",),
    "both": get_args(DeviceDirection),
    "forward": ("forward",),
    "forward_backward": ("forward_backward",),
}


def device_jobs(
    dtypes: Sequence[str], layouts: Sequence[str], direction: str | None, match: str, device: str
) -> list[DeviceJob]:
    """The jobs that the options leave; ValueError for none."""
    if direction not in _DIRECTIONS:
        raise ValueError(f"--direction: {direction!r}; the devices run forward, or forward_backward")
    strange = sorted(set(layouts) - {"nchw", "nhwc"})
    if strange:
        raise ValueError(f"--layout: {strange[0]!r} is unknown; expected nchw or nhwc")
    jobs = [
        DeviceJob(place, dtype, layout, one)
        for place, spread in enumerate(SPREADS)
        for dtype in dtypes or [DTYPE[device]]
        for layout in layouts or ["nchw"]
        for one in _DIRECTIONS[direction]
        if match in f"{spread.name} {spread.scaling}"
    ]
    if not jobs:
        raise ValueError("no workload of the devices is left by --match")
    return jobs


def check_parts(jobs: Sequence[DeviceJob], counts: Sequence[int], device: str) -> None:
    """ValueError where so many devices do not divide a job's whole: before a process starts, which could only fail."""
    for job, count in product(jobs, counts):
        job.spread.part(device, count)


def bench_devices(
    jobs: Sequence[DeviceJob],
    counts: Sequence[int],
    device: str,
    seconds: float,
    revision: str,
    json_path: str,
    csv_path: str,
) -> None:
    """Runs every job on every number of devices, each number in processes of its own."""
    rows: list[DeviceRow] = []
    with output.destinations(json_path, csv_path) as (json_file, csv_file):
        machine = this_machine(device, revision)
        with output.progress(len(counts)) as show:
            for count in counts:
                show(f"{count} devices")
                rows += run_devices(jobs, count, device, seconds)
                show(advance=True)
        report = DeviceReport(machine, tuple(rows))
        output.print_table(device_table(rows), "-" in (json_path, csv_path))
        if json_file is not None:
            json_file.write(report.to_json())
        if csv_file is not None:
            csv_file.write(report.to_csv())
    if any(row.contender in (OURS, DTENSOR) and row.status in ("wrong", "failed") for row in rows):
        raise typer.Exit(output.CHECK_FAILED)
