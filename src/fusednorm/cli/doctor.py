"""fusednorm doctor: what this machine has and which backends can run on it."""

from __future__ import annotations

from typing import Annotated

import torch
import typer

from fusednorm import dispatch
from fusednorm.bench.results import available_cores, cpu_model, versions
from fusednorm.bench.summary import Table
from fusednorm.cli import output


def doctor(as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout.")] = False) -> None:
    """Prints versions, device, threads and caches, and which backends can run and, for those that cannot, why."""
    backends = list(dispatch.backends())
    found = versions()
    devices = {"cpu": cpu_model(), "cores": str(available_cores()), "threads": str(torch.get_num_threads())}
    if torch.cuda.is_available():
        devices |= {f"cuda:{index}": torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
    if as_json:
        output.print_json(
            {
                "versions": found,
                "devices": devices,
                "backends": [
                    {
                        "name": one.name,
                        "available": one.available is None,
                        "reason": one.available,
                        "details": one.details,
                    }
                    for one in backends
                ],
            }
        )
        return
    for title, values in (("versions", found), ("devices", devices)):
        output.print_table(Table(title, ("name", "value"), tuple(values.items()), ("name", "value")))
    lines = [
        (
            one.name,
            "no" if one.available else "yes",
            one.available or "",
            "\n".join(f"{name}: {value}" for name, value in one.details.items()),
        )
        for one in backends
    ]
    header = ("backend", "can run", "reason", "details")
    output.print_table(Table("backends", header, tuple(lines), header))
