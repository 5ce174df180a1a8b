"""The ratios between rows, and tables of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from fusednorm.bench.results import Row
from fusednorm.bench.runner import COPY
from fusednorm.bench.tables import Table, in_ms, in_percent, in_times, in_us
from fusednorm.machine.limits import TRANSFERS

OURS, PREALLOCATED, EAGER, COMPILE = "fusednorm", "fusednorm out=", "eager", "compile"
# The contenders that fusednorm is compared with as "the fastest peer"; eager has its own column.
PEERS = (COMPILE, "jax", "onnxruntime", "openvino", "liger")
# From this size a tensor is beyond any cache, and a GPU's targets ask for a share of the memory's speed.
LARGE_BYTES = 64 * 10**6


@dataclass(frozen=True)
class Case:
    """One workload in one direction with all its contenders."""

    first: Row
    rows: dict[str, Row] = field(default_factory=dict)

    @property
    def group(self) -> tuple[str, str, str, str]:
        """Operation, dtype, layout and direction: a geometric mean is taken over the shapes that share them."""
        operation = self.first.workload.partition(" ")[0]
        return operation, self.first.dtype, self.first.layout, self.first.direction

    def ms(self, contender: str) -> float | None:
        row = self.rows.get(contender)
        return row.ms if row else None

    def speedup(self, over: str) -> float | None:
        """How many times faster fusednorm is than a contender."""
        mine, other = self.ms(OURS), self.ms(over)
        return other / mine if mine and other else None

    @property
    def fastest_peer(self) -> str | None:
        timed = {name: ms for name in PEERS if (ms := self.ms(name)) is not None}
        return min(timed, key=lambda name: timed[name]) if timed else None

    @property
    def speedup_over_fastest_peer(self) -> float | None:
        peer = self.fastest_peer
        return self.speedup(peer) if peer else None

    @property
    def on_gpu(self) -> bool:
        """Whether the device runs beside the host."""
        return any(row.host_ms is not None for row in self.rows.values())

    @property
    def speedup_over_torch(self) -> float | None:
        """How many times faster fusednorm is than the faster of eager and torch.compile."""
        return min((ratio for name in (EAGER, COMPILE) if (ratio := self.speedup(name))), default=None)

    @property
    def call_speedup(self) -> float | None:
        """How many times faster than eager's the whole calls are, the host's part included."""
        mine, other = self.rows.get(OURS), self.rows.get(EAGER)
        if mine is None or other is None or mine.host_ms is None:
            return None
        if mine.method == "calls":
            return self.speedup(EAGER)
        return other.call_ms / mine.call_ms if mine.call_ms and other.call_ms else None

    @property
    def host_us(self) -> float | None:
        row = self.rows.get(OURS)
        return row.host_ms * 1e3 if row and row.host_ms is not None else None

    @property
    def peak_fraction(self) -> float | None:
        row = self.rows.get(OURS)
        return row.peak_fraction if row else None

    @property
    def large(self) -> bool:
        """Whether the input has 64 MB or more."""
        return self.first.bytes // TRANSFERS[self.first.direction] >= LARGE_BYTES

    def copy_fraction(self, contender: str = OURS) -> float | None:
        row = self.rows.get(contender)
        return row.copy_fraction if row else None


def cases_of(rows: Iterable[Row]) -> list[Case]:
    """The rows gathered by workload and direction, in the order in which they came."""
    found: dict[tuple[str, str], Case] = {}
    for row in rows:
        case = found.setdefault((row.workload, row.direction), Case(row))
        case.rows[row.contender] = row
    return list(found.values())


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """The geometric mean of the values that exist."""
    present = [value for value in values if value]
    return statistics.geometric_mean(present) if present else None


def contender_table(case: Case) -> Table:
    """Every contender of one workload: time, speed, ratio to eager and share of the copy's speed, or why not."""
    eager = case.ms(EAGER)
    lines = []
    for name, row in case.rows.items():
        speed = row.gigabytes_per_second
        lines.append(
            (
                name,
                in_ms(row.ms),
                "" if speed is None else f"{speed:.1f}",
                in_times(eager / row.ms if eager and row.ms else None),
                in_percent(row.copy_fraction if name != COPY else None),
                in_us(None if row.host_ms is None else row.host_ms * 1e3),
                in_ms(row.call_ms),
                "" if row.peak_bytes is None else f"{row.peak_bytes / 1e6:.1f}",
                "" if row.status == "ok" else f"{row.status}: {row.note}",
                row.method if row.method == "events" else "",
            )
        )
    header = ("contender", "ms", "GB/s", "vs eager", "of copy", "host us", "call ms", "peak MB", "note", "timed by")
    words = ("contender", "note", "timed by")
    return Table(f"{case.first.workload} {case.first.direction}", header, tuple(lines), words).without_empty_columns()


def _over_fastest_peer(case: Case) -> str:
    speedup = case.speedup_over_fastest_peer
    return f"{in_times(speedup)} ({case.fastest_peer})" if speedup else ""


def ratio_table(cases: Sequence[Case]) -> Table:
    """One line per workload: fusednorm's time and its speedups over eager, torch.compile and the fastest peer."""
    columns: dict[str, Callable[[Case], str]] = {
        "workload": lambda case: case.first.workload,
        "direction": lambda case: case.first.direction,
        "ms": lambda case: in_ms(case.ms(OURS)),
        "vs eager": lambda case: in_times(case.speedup(EAGER)),
        "vs compile": lambda case: in_times(case.speedup(COMPILE)),
        "vs fastest peer": _over_fastest_peer,
        "of copy": lambda case: in_percent(case.copy_fraction()),
        "of copy, out=": lambda case: in_percent(case.copy_fraction(PREALLOCATED)),
        "host us": lambda case: in_us(case.host_us),
        "calls vs eager": lambda case: in_times(case.call_speedup),
        "peak memory": lambda case: in_times(case.peak_fraction),
    }
    lines = tuple(tuple(write(case) for write in columns.values()) for case in cases)
    header = tuple(columns)
    return Table("fusednorm against the others", header, lines, header[:2]).without_empty_columns()


def _present(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _least(values: Iterable[float | None]) -> str:
    return in_times(min(_present(values), default=None))


def _most(values: Iterable[float | None]) -> float | None:
    return max(_present(values), default=None)


# The columns over the shapes of one operation. Each of the two columns "least" belongs to the column before it.
_MEANS: tuple[tuple[str, Callable[[Sequence[Case]], str]], ...] = (
    ("shapes", lambda cases: str(len(cases))),
    ("vs eager", lambda cases: in_times(geometric_mean(case.speedup(EAGER) for case in cases))),
    ("least", lambda cases: _least(case.speedup(EAGER) for case in cases)),
    ("vs compile", lambda cases: in_times(geometric_mean(case.speedup(COMPILE) for case in cases))),
    ("vs fastest peer", lambda cases: in_times(geometric_mean(case.speedup_over_fastest_peer for case in cases))),
    ("least", lambda cases: _least(case.speedup_over_fastest_peer for case in cases)),
    ("vs torch, least", lambda cases: _least(case.speedup_over_torch for case in cases if case.on_gpu)),
    ("of copy", lambda cases: in_percent(geometric_mean(case.copy_fraction() for case in cases))),
    ("of copy, out=", lambda cases: in_percent(geometric_mean(case.copy_fraction(PREALLOCATED) for case in cases))),
    (
        "of copy, 64 MB up, least",
        lambda cases: in_percent(
            min(_present(case.copy_fraction() for case in cases if case.on_gpu and case.large), default=None)
        ),
    ),
    ("host us, most", lambda cases: in_us(_most(case.host_us for case in cases))),
    ("calls vs eager, least", lambda cases: _least(case.call_speedup for case in cases)),
    ("peak memory, most", lambda cases: in_times(_most(case.peak_fraction for case in cases))),
)


def mean_table(cases: Sequence[Case]) -> Table:
    """Geometric means over the shapes of one operation, and the smallest ratio to eager and to the fastest peer."""
    groups: dict[tuple[str, str, str, str], list[Case]] = {}
    for case in cases:
        groups.setdefault(case.group, []).append(case)
    keys = ("operation", "dtype", "layout", "direction")
    lines = tuple((*group, *(write(members) for _, write in _MEANS)) for group, members in groups.items())
    header = (*keys, *(name for name, _ in _MEANS))
    return Table("geometric means", header, lines, keys).without_empty_columns()
