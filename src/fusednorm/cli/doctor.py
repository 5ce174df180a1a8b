"""fusednorm doctor: versions and devices of this machine, and the backends that can run on it."""

from __future__ import annotations

from typing import Annotated

import torch
import typer

from fusednorm import choice, inductor
from fusednorm.bench.provenance import versions
from fusednorm.bench.tables import Table
from fusednorm.cli import output
from fusednorm.machine.description import available_cores, cpu_model, gpus


def doctor(as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout.")] = False) -> None:
    """Prints versions, devices, caches, tuned choices, and which backends can run and, for those that cannot, why."""
    backends = list(choice.backends())
    found = versions()
    devices = {"cpu": cpu_model(), "cores": str(available_cores()), "threads": str(torch.get_num_threads())}
    found_gpus = gpus()
    devices |= {
        f"cuda:{index}": "\n".join(f"{name}: {value}" for name, value in facts.items())
        for index, facts in enumerate(found_gpus)
    }
    if not found_gpus:
        devices["cuda"] = "none: torch.cuda.is_available() is False"
    tuned = _tuned(["cpu", "cuda"] if found_gpus else ["cpu"])
    compiled = {"torch.compile": inductor.described()}
    if as_json:
        output.print_json(
            {
                "versions": found,
                "tuned": tuned,
                "compiled": compiled,
                "devices": devices,
                "gpus": found_gpus,
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
    tables = (("versions", found), ("devices", devices), ("tuned choices", tuned), ("compiled graphs", compiled))
    for title, values in tables:
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


def _tuned(kinds: list[str]) -> dict[str, str]:
    """The active file of tuned choices, and what of it is used on each kind of device."""
    file = choice.tuned_file()
    if file is None:
        return {"file": "none: FUSEDNORM_TUNED is not set"}
    return {"file": str(file.path)} | {kind: file.describe(kind) for kind in kinds}
