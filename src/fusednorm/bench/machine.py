"""The machine that measures: its processor or GPU, versions, and the revision of the sources."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch

import fusednorm

DeviceChoice = Literal["auto", "cpu", "cuda"]
PACKAGES = ("torch", "numba", "llvmlite", "numpy", "triton", "liger_kernel", "jax", "onnxruntime", "openvino")
# What a driver of each vendor says of itself.
_DRIVER_FILES = (Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version"))


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
    gpu: dict[str, str] = field(default_factory=dict)
    peak_flops: float = 0.0  # of an fp32 matrix product on the device, measured; 0 where it was not

    def __str__(self) -> str:
        packages = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        where = ", ".join(f"{name} {value}" for name, value in self.gpu.items() if name != "name")
        return (
            f"{self.device}, {f'{where}; ' if where else ''}{self.cores} cores, {self.threads} threads; "
            f"{packages}; revision {self.revision}"
        )


def cpu_model() -> str:
    """The processor's name as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
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


def resolve_device(choice: DeviceChoice) -> str:
    """ "cpu" or "cuda"; "auto" is the GPU where torch has one. Raises ValueError for a GPU that is not there."""
    present = torch.cuda.is_available()
    if choice == "cuda" and not present:
        raise ValueError("device: torch.cuda.is_available() is False; use the cpu, or install torch for this GPU")
    return "cuda" if present and choice != "cpu" else "cpu"


def driver_version(files: Iterable[Path] = _DRIVER_FILES) -> str:
    """The version of the GPU's driver as the system gives it; empty where it does not."""
    for path in files:
        try:
            found = re.search(r"\d+(\.\d+)+", path.read_text(encoding="utf-8", errors="replace"))
        except OSError:
            continue
        if found:
            return found[0]
    return ""


def gpu_facts(properties: Any, driver: str) -> dict[str, str]:
    """A GPU in words, from what torch.cuda.get_device_properties says of it."""
    hip = torch.version.hip
    facts = {
        "name": properties.name,
        "capability": properties.gcnArchName if hip else f"{properties.major}.{properties.minor}",
        "multiprocessors": str(properties.multi_processor_count),
        "memory": f"{properties.total_memory / 2**30:.0f} GiB",
        "L2": f"{properties.L2_cache_size / 2**20:.0f} MiB",
        "driver": driver,
        "HIP" if hip else "CUDA": hip or torch.version.cuda or "",
    }
    return {name: value for name, value in facts.items() if value}


def gpus() -> list[dict[str, str]]:
    """The facts of every GPU that torch has."""
    if not torch.cuda.is_available():
        return []
    driver = driver_version()
    return [gpu_facts(torch.cuda.get_device_properties(index), driver) for index in range(torch.cuda.device_count())]


def name_of(device: str) -> str:
    """The name of the processor or of the current GPU."""
    return cpu_model() if device == "cpu" else str(torch.cuda.get_device_name())


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
