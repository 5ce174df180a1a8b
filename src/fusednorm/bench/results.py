"""What was measured: rows and the machine they come from, as JSON and as CSV."""

from __future__ import annotations

import csv
import json
from dataclasses import asdict, dataclass, fields
from io import StringIO
from typing import Any, Literal

from fusednorm.bench.judging import Asked
from fusednorm.bench.limits import TRANSFERS
from fusednorm.bench.machine import Machine
from fusednorm.bench.workloads import Workload

Status = Literal["ok", "wrong", "skipped", "failed"]


@dataclass(frozen=True)
class Row:
    """One contender on one workload in one direction.

    ``ms`` is the median time of a call and ``copy_ms`` that of the plain operation with the same transfers, measured in
    the same turns; ``method`` says how, see :class:`~fusednorm.bench.timing.Timing`. A row that is not "ok" has a note
    and no time. On a GPU there are beside them

    - ``host_ms``, the host's time per call of the public function, to its return: in a forward with gradients off, in a
      backward that of the forward which records it, in forward_backward that of both;
    - ``call_ms``, where ``ms`` is the device's alone: a forward's time in calls one after the other, the host's part
      included;
    - ``peak_bytes``, the most memory that forward and backward hold beyond the inputs, and ``plain_peak_bytes``, the
      same of torch's norm without the activation.
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
    flops: int = 0
    error: float | None = None
    allowed: float | None = None
    method: str = ""
    call_ms: float | None = None
    peak_bytes: int | None = None
    plain_peak_bytes: int | None = None

    @property
    def copy_fraction(self) -> float | None:
        """How much of the plain copy's speed is reached; 1 is the limit."""
        return self.copy_ms / self.ms if self.ms and self.copy_ms else None

    @property
    def peak_fraction(self) -> float | None:
        """The peak memory as a multiple of that of torch's norm without the activation."""
        return self.peak_bytes / self.plain_peak_bytes if self.peak_bytes and self.plain_peak_bytes else None

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
