"""The memory that a measurement needs and the memory that is free, to refuse a shape that is too large.

Linux hands out more memory than there is and kills the process that uses it, so a successful allocation says nothing.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import torch

from fusednorm.bench.workloads import Workload
from fusednorm.problem import DTYPE_BYTES

_CGROUPS = Path("/sys/fs/cgroup")


class NotEnoughMemoryError(MemoryError):
    """The request needs more memory than is free."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on the host or on a device."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    # torch's allocator on the CPU raises no type of its own.
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def require(needed: int, device: str, what: str, remedy: str = "") -> None:
    """Raises :class:`NotEnoughMemoryError` where ``needed`` bytes are more than the device has free."""
    free = available_bytes(device)
    if free is not None and needed > free:
        raise NotEnoughMemoryError(
            f"{what} needs about {_size(needed)} and {device} has {_size(free)} free; "
            + (remedy or "give a smaller shape")
        )


def workload_bytes(workload: Workload, *, sets: int, contenders: int, backward: bool, judged: bool) -> int:
    """About the most that a measurement of a workload holds at once, fitted to the peaks of both devices' benches.

    Inputs are drawn in float32 or float64 whatever the dtype. The judge holds each result in float64 and in plain
    torch, and the reference's intermediates. Each contender adds its inputs and results on each set.
    """
    size = DTYPE_BYTES[workload.dtype]
    least = 24 + 2 * size + (12 if backward else 0)
    one = max(least, 60 + 6 * size) if judged else least
    return (workload.bytes_per_transfer // size) * (one + (sets * contenders - 1) * 3 * size)


def available_bytes(device: str = "cpu") -> int | None:
    """The bytes that this process may still take on a device; None where the system does not say."""
    if torch.device(device).type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    found = [one for one in (_system(), _address_space(), *_cgroup_limits()) if one is not None]
    return max(0, min(found)) if found else None


def _system() -> int | None:
    """The bytes that the system can give without swapping."""
    for name, value in _fields(Path("/proc/meminfo")):
        if name == "MemAvailable:":
            return value << 10
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def _address_space() -> int | None:
    """The bytes that ``ulimit -v`` leaves."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    try:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        used = 0
    return limit - used


def _cgroup_limits(root: Path = _CGROUPS, membership: Path = Path("/proc/self/cgroup")) -> Iterator[int]:
    """The bytes that each control group around this process leaves, from the files of versions 1 and 2.

    Inactive file pages count as free, as they do for the kernel.
    """
    try:
        lines = membership.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            mount, limit, usage, inactive = root, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            mount = root / "memory"
            limit, usage, inactive = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        group = PurePosixPath(path)
        for inner in (group, *group.parents):
            folder = mount / str(inner).lstrip("/")
            most, used = _number(folder / limit), _number(folder / usage)
            if most is not None and used is not None:
                yield most - used + dict(_fields(folder / "memory.stat")).get(inactive, 0)


def _number(path: Path) -> int | None:
    """The number in a file; None for the word "max", and where there is no such file."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _fields(path: Path) -> Iterator[tuple[str, int]]:
    """The lines "name number" of a file of the kernel."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        words = line.split()
        if len(words) >= 2 and words[1].isdecimal():
            yield words[0], int(words[1])


def _size(nbytes: int) -> str:
    for power, unit in ((40, "TiB"), (30, "GiB")):
        if nbytes >= 1 << power:
            return f"{nbytes / 2**power:.4g} {unit}" if nbytes < 2**70 else f"2**{nbytes.bit_length() - 1} bytes"
    return f"{nbytes / 2**20:.3g} MiB"
