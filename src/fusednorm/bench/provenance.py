"""The provenance of rows: machine, versions, and the revision of the sources."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch

import fusednorm
from fusednorm.machine.description import available_cores, cpu_model, gpus, name_of

PACKAGES = ("torch", "numba", "llvmlite", "numpy", "triton", "liger_kernel", "jax", "onnxruntime", "openvino")


@dataclass(frozen=True)
class Machine:
    """The machine, versions and command by which rows were measured."""

    cpu: str
    cores: int
    threads: int
    system: str
    device: str
    versions: dict[str, str]
    revision: str
    command: str
    date: str
    gpu: dict[str, str] = field(default_factory=dict)
    peak_flops: float = 0.0  # flops/s measured of an fp32 matrix product on the device; 0 where not measured

    def __str__(self) -> str:
        packages = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        where = ", ".join(f"{name} {value}" for name, value in self.gpu.items() if name != "name")
        return (
            f"{self.device}, {f'{where}; ' if where else ''}{self.cores} cores, {self.threads} threads; "
            f"{packages}; revision {self.revision}"
        )


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """The versions of fusednorm, of Python, and of the packages that are installed; torch's says for what it was built,
    which its package's may not."""
    found = {"fusednorm": fusednorm.__version__, "python": platform.python_version()}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if "torch" in found:
        found["torch"] = str(torch.__version__)
    return found


def _revision() -> str:
    """The git revision of the source tree, with a + where it has changes; "unknown" for an installed package."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10, check=True
        )
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)  # an installed package may lie in another repository
        revision = git("rev-parse", "--short", "HEAD")
        return f"{revision}+" if git("status", "--porcelain", "--untracked-files=no") else revision
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def this_machine(device: str = "cpu", revision: str = "", peak_flops: float = 0.0) -> Machine:
    """The machine and process that measure; ``revision`` is for sources that git does not know."""
    return Machine(
        cpu=cpu_model(),
        cores=available_cores(),
        threads=torch.get_num_threads(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        device=name_of(device),
        versions=versions(),
        revision=revision or _revision(),
        command=" ".join(["fusednorm", *sys.argv[1:]]),
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        gpu={} if device == "cpu" else gpus()[torch.cuda.current_device()],
        peak_flops=peak_flops,
    )
