"""The machine: its processor, cores and GPUs, and the device that a user's choice means."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch

DeviceChoice = Literal["auto", "cpu", "cuda"]
# Where the driver of each vendor gives its version.
_DRIVER_FILES = (Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version"))


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
    """A GPU in words, from torch.cuda.get_device_properties and its driver's version."""
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
