"""The rows of the suite of devices, and their report."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from fusednorm.bench.results import RowsReport, Status, by_contender

DEVICES_SUITE = "devices"
Scaling = Literal["strong", "weak"]
DeviceDirection = Literal["forward", "forward_backward"]


@dataclass(frozen=True)
class DeviceRow:
    """One contender on so many devices.

    ``shape`` is the input's on one device, of a whole that is the same for any number of them where the scaling is
    strong. ``ms`` is the median time of calls one after the other, the host's part included, and on GPUs ``replay_ms``
    that of a call in a replayed graph; each sample is that of the slowest device. ``error`` is a part of the results'
    length. A row that is not "ok" has a note and no time; an "ok" row without ``error`` was not checked.
    """

    workload: str
    scaling: Scaling
    devices: int
    shape: str
    dtype: str
    layout: str
    direction: str
    contender: str
    status: Status
    note: str = ""
    ms: float | None = None
    replay_ms: float | None = None
    method: str = ""
    error: float | None = None
    allowed: float | None = None


_KNOWN = {"scaling": get_args(Scaling), "direction": get_args(DeviceDirection), "status": get_args(Status)}


@dataclass(frozen=True)
class DeviceReport(RowsReport[DeviceRow]):
    """A machine and the rows of its devices."""

    suite: str = DEVICES_SUITE
    kind, known = DeviceRow, _KNOWN


def cases_of(rows: Iterable[DeviceRow]) -> list[dict[str, DeviceRow]]:
    """The rows by contender, for each workload, number of devices and direction, in the order in which they came."""
    return by_contender(rows, "workload", "scaling", "devices", "dtype", "layout", "direction")
