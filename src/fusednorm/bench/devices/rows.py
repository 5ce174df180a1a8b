"""The rows of the suite of devices, and their report."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Literal, get_args

from fusednorm.bench.provenance import Machine
from fusednorm.bench.results import Status, report_parts, rows_as_csv

DEVICES_SUITE = "devices"
Scaling = Literal["strong", "weak"]
DeviceDirection = Literal["forward", "forward_backward"]


@dataclass(frozen=True)
class DeviceRow:
    """One contender on so many devices.

    ``shape`` is the input's on one device, of a whole that is the same for any number of them where the scaling is
    strong. ``ms`` is the median time of a call, each sample that of the slowest device. ``error`` is a part of the
    results' length. A row that is not "ok" has a note and no time; an "ok" row without ``error`` was not checked.
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
    method: str = ""
    error: float | None = None
    allowed: float | None = None


_KNOWN = {"scaling": get_args(Scaling), "direction": get_args(DeviceDirection), "status": get_args(Status)}


@dataclass(frozen=True)
class DeviceReport:
    """A machine and the rows of its devices."""

    machine: Machine
    rows: tuple[DeviceRow, ...]
    suite: str = field(default=DEVICES_SUITE)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> DeviceReport:
        """The inverse of :meth:`to_json`; ValueError where the text is no such report."""
        return cls(*report_parts(text, DeviceRow, _KNOWN))

    def to_csv(self) -> str:
        """One line per row, under the names of its fields."""
        return rows_as_csv(DeviceRow, self.rows)


def cases_of(rows: Iterable[DeviceRow]) -> list[dict[str, DeviceRow]]:
    """The rows by contender, for each workload, number of devices and direction, in the order in which they came."""
    found: dict[tuple[object, ...], dict[str, DeviceRow]] = {}
    for row in rows:
        key = (row.workload, row.scaling, row.devices, row.dtype, row.layout, row.direction)
        found.setdefault(key, {})[row.contender] = row
    return list(found.values())
