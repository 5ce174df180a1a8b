"""Measured rows and their machine, as JSON and as CSV."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from io import StringIO
from operator import attrgetter
from typing import Any, ClassVar, Generic, Literal, Self, TypeVar, get_args, get_origin, get_type_hints

from fusednorm.bench.judging import Asked
from fusednorm.bench.provenance import Machine
from fusednorm.bench.workloads import Workload
from fusednorm.machine.limits import TRANSFERS

Status = Literal["ok", "wrong", "skipped", "failed"]
T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """One contender on one workload in one direction.

    ``ms`` is the median time of a call, ``copy_ms`` the time of the plain operation with the same transfers in the same
    turns; ``method`` says how they were taken, see :class:`~fusednorm.machine.timing.Timing`. A row that is not "ok"
    has a note and no time; an "ok" row without ``error`` was not checked. Rows of a GPU also have

    - ``host_ms``, the host's time per call of the public function, to its return: for a forward with gradients off, for
      a backward the forward that records it, for forward_backward both;
    - ``call_ms``, where ``ms`` is the device's time alone: a forward's time in whole calls one after the other;
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
        """The peak memory as a multiple of the peak of torch's norm without the activation."""
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


_KNOWN = {"direction": tuple(TRANSFERS), "status": get_args(Status)}
_MOST = 1 << 63  # of any count; a much larger one would overflow a float


def _as(kind: type[Any], value: Any, where: str) -> Any:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"{where} is a {type(value).__name__}, not a {kind.__name__}")
    return value


def _read(kind: type[T], entry: Any, known: Mapping[str, tuple[str, ...]]) -> T:
    """A row or machine from a file; raises TypeError or ValueError for a value that is not of its field's type."""
    entry = _as(dict, entry, kind.__name__.lower())
    hints = get_type_hints(kind)
    for name, value in entry.items():
        if name not in hints:
            raise ValueError(f"{kind.__name__.lower()} has no {name}")
        wanted = hints[name]
        optional = type(None) in get_args(wanted)
        if optional and value is None:
            continue
        types = {one for one in get_args(wanted) if one is not type(None)} if optional else {wanted}
        if types & {int, float}:
            _check_number(name, value, whole=float not in types)
        elif dict in {get_origin(one) for one in types}:
            for key, inner in _as(dict, value, name).items():
                _as(str, inner, f"{name}.{key}")
        else:
            _as(str, value, name)
        if name in known and value not in known[name]:
            raise ValueError(f"{name} is {value!r}; expected one of {', '.join(known[name])}")
    return kind(**entry)


def _check_number(name: str, value: Any, whole: bool) -> None:
    """Times and counts are finite and not negative; ``error`` and ``allowed`` may be any number that a float holds."""
    _as(int if whole or isinstance(value, int) else float, value, name)
    if isinstance(value, int) and abs(value) >= _MOST:
        raise ValueError(f"{name} is a number of {value.bit_length()} bits; expected at most 63")
    if name not in ("error", "allowed") and not 0 <= value < (_MOST if isinstance(value, int) else math.inf):
        raise ValueError(f"{name} is {value!r}; expected a number of at least 0")


def report_parts(text: str, kind: type[T], known: Mapping[str, tuple[str, ...]]) -> tuple[Machine, tuple[T, ...], str]:
    """The machine, the rows and the suite of a report in JSON, whose fields in ``known`` have one of those values.

    Raises ValueError where the text is no report of such rows.
    """
    try:
        data = json.loads(text)
        rows = tuple(_read(kind, row, known) for row in _as(list, data["rows"], "rows"))
        return _read(Machine, data["machine"], {}), rows, _as(str, data.get("suite", ""), "suite")
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"not a report written by fusednorm bench --json: {error}") from None


def rows_as_csv(kind: type[Any], rows: Iterable[Any]) -> str:
    """One line per row, under the names of its fields."""
    text = StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(kind)], lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: "" if value is None else value for name, value in asdict(row).items()} for row in rows)
    return text.getvalue()


@dataclass(frozen=True)
class RowsReport(Generic[T]):
    """A machine, the rows of one ``kind`` that it measured, and their suite. Fields of a row in ``known`` have one of
    those values."""

    machine: Machine
    rows: tuple[T, ...]
    suite: str = ""
    kind: ClassVar[type[Any]]
    known: ClassVar[Mapping[str, tuple[str, ...]]]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The inverse of :meth:`to_json`; ValueError where the text is no such report."""
        return cls(*report_parts(text, cls.kind, cls.known))

    def to_csv(self) -> str:
        """One line per row, under the names of its fields."""
        return rows_as_csv(self.kind, self.rows)


def by_contender(rows: Iterable[T], *names: str) -> list[dict[str, T]]:
    """The rows by contender, for each combination of the fields ``names``, in the order in which they came."""
    found: dict[Any, dict[str, T]] = {}
    for row in rows:
        found.setdefault(attrgetter(*names)(row), {})[row.contender] = row  # type: ignore[attr-defined]
    return list(found.values())


@dataclass(frozen=True)
class Report(RowsReport[Row]):
    """A machine, its rows and their suite, which is "" in a report from before suites were recorded."""

    kind, known = Row, _KNOWN
