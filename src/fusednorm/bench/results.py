"""What was measured: rows and the machine they come from, as JSON and as CSV."""

from __future__ import annotations

import csv
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from importlib import metadata
from io import StringIO
from pathlib import Path
from typing import Any, Literal

import torch

import fusednorm
from fusednorm.bench.judging import Asked
from fusednorm.bench.limits import TRANSFERS
from fusednorm.bench.workloads import Workload

Status = Literal["ok", "wrong", "skipped", "failed"]
PACKAGES = ("torch", "numba", "llvmlite", "numpy", "triton", "jax", "onnxruntime", "openvino")


@dataclass(frozen=True)
class Row:
    """One contender on one workload in one direction.

    ``ms`` is the median time of a call and ``copy_ms`` that of the plain operation with the same transfers, measured in
    the same turns. ``host_ms`` is the host's time beside a device's. A row that is not "ok" has a note and no time.
    """

    workload: str
    family: str
    shape: str
    groups: int
    dtype: str
    layout: str
    activation: str
    direction: str
    contender: str
    status: Status
    note: str = ""
    ms: float | None = None
    copy_ms: float | None = None
    host_ms: float | None = None
    bytes: int = 0
    error: float | None = None
    allowed: float | None = None

    @property
    def copy_fraction(self) -> float | None:
        """How much of the plain copy's speed is reached; 1 is the limit."""
        return self.copy_ms / self.ms if self.ms and self.copy_ms else None

    @property
    def gigabytes_per_second(self) -> float | None:
        return self.bytes / self.ms / 1e6 if self.ms else None


def row_of(workload: Workload, asked: Asked, contender: str, status: Status, **measured: Any) -> Row:
    """A row that describes its workload."""
    return Row(
        workload=workload.key,
        family=workload.family,
        shape="x".join(map(str, workload.shape)),
        groups=workload.groups,
        dtype=workload.dtype,
        layout=workload.layout,
        activation=workload.activation or "",
        direction=asked,
        contender=contender,
        status=status,
        bytes=TRANSFERS[asked] * workload.bytes_per_transfer,
        **measured,
    )


@dataclass(frozen=True)
class Machine:
    """Where, with what and how the rows were measured."""

    cpu: str
    cores: int
    threads: int
    system: str
    device: str
    versions: dict[str, str]
    revision: str
    command: str
    date: str

    def __str__(self) -> str:
        packages = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return f"{self.device}, {self.cores} cores, {self.threads} threads; {packages}; revision {self.revision}"


@dataclass(frozen=True)
class Report:
    """A machine and its rows."""

    machine: Machine
    rows: tuple[Row, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """The inverse of :meth:`to_json`; ValueError where the text is no report."""
        try:
            data = json.loads(text)
            return cls(Machine(**data["machine"]), tuple(Row(**row) for row in data["rows"]))
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"not a report written by fusednorm bench --json: {error}") from error

    def to_csv(self) -> str:
        """One line per row, under the names of its fields."""
        text = StringIO()
        writer = csv.DictWriter(text, [field.name for field in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(
            {name: "" if value is None else value for name, value in asdict(row).items()} for row in self.rows
        )
        return text.getvalue()


def cpu_model() -> str:
    """The processor's name as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def available_cores() -> int:
    """The cores that this process may use, which a container or taskset can make fewer than the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """The versions of fusednorm, of Python, and of the packages that are installed."""
    found = {"fusednorm": fusednorm.__version__, "python": platform.python_version()}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _revision() -> str:
    """The git revision of the source tree, with a + where it has changes; "unknown" for an installed package."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10, check=True
        )
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)  # not the repository that an environment lies in
        revision = git("rev-parse", "--short", "HEAD")
        return f"{revision}+" if git("status", "--porcelain", "--untracked-files=no") else revision
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def this_machine(device: str = "cpu") -> Machine:
    """The description of the machine and process that measure."""
    cpu = cpu_model()
    command = " ".join(["fusednorm", *sys.argv[1:]])
    name = cpu if device == "cpu" else torch.cuda.get_device_name(device)
    return Machine(
        cpu=cpu,
        cores=available_cores(),
        threads=torch.get_num_threads(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        device=name,
        versions=versions(),
        revision=_revision(),
        command=command,
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )
