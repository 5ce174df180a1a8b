"""The ratios that rows amount to, and the tables made of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from fusednorm.bench.results import Report, Row
from fusednorm.bench.runner import COPY
from fusednorm.machine.limits import TRANSFERS
from fusednorm.text import printable

OURS, PREALLOCATED, EAGER, COMPILE = "fusednorm", "fusednorm out=", "eager", "compile"
# The contenders that fusednorm is compared with as "the fastest peer"; eager has its own column.
PEERS = (COMPILE, "jax", "onnxruntime", "openvino", "liger")
# From here a tensor is beyond any cache, and the targets of a GPU ask for a share of the memory's speed.
LARGE_BYTES = 64 * 10**6


@dataclass(frozen=True)
class Case:
    """One workload in one direction with all its contenders."""

    first: Row
    rows: dict[str, Row] = field(default_factory=dict)

    @property
    def group(self) -> tuple[str, str, str, str]:
        """What a geometric mean is taken over: the same operation, dtype, layout and direction in several shapes."""
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
        """Whether a device was measured that runs beside the host."""
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


@dataclass(frozen=True)
class Table:
    """A header and lines of text; the columns named in ``words`` are words, the others numbers."""

    title: str
    header: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    words: tuple[str, ...]

    def without_empty_columns(self) -> Table:
        """The table without the columns in which no line has anything, as on a machine that does not measure them."""
        kept = [place for place in range(len(self.header)) if any(line[place] for line in self.lines)]

        def cut(line: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(line[place] for place in kept)

        return replace(self, header=cut(self.header), lines=tuple(map(cut, self.lines)))

    def to_markdown(self) -> str:
        rule = ["---" if name in self.words else "---:" for name in self.header]
        lines = [self.header, tuple(rule), *self.lines]
        return "\n".join(
            "| " + " | ".join(printable(cell, keep="").replace("|", "\\|") for cell in line) + " |" for line in lines
        )


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}×"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _ms(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.1f}" if value >= 10 else f"{value:.3f}" if value >= 0.1 else f"{value:.4f}"


def _us(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


def contender_table(case: Case) -> Table:
    """Every contender of one workload: time, speed, ratio to eager and share of the copy's speed, or why not."""
    eager = case.ms(EAGER)
    lines = []
    for name, row in case.rows.items():
        speed = row.gigabytes_per_second
        lines.append(
            (
                name,
                _ms(row.ms),
                "" if speed is None else f"{speed:.1f}",
                _times(eager / row.ms if eager and row.ms else None),
                _percent(row.copy_fraction if name != COPY else None),
                _us(None if row.host_ms is None else row.host_ms * 1e3),
                _ms(row.call_ms),
                "" if row.peak_bytes is None else f"{row.peak_bytes / 1e6:.1f}",
                "" if row.status == "ok" else f"{row.status}: {row.note}",
                row.method if row.method == "events" else "",
            )
        )
    header = ("contender", "ms", "GB/s", "vs eager", "of copy", "host us", "call ms", "peak MB", "note", "timed by")
    words = ("contender", "note", "timed by")
    return Table(f"{case.first.workload} {case.first.direction}", header, tuple(lines), words).without_empty_columns()


def ratio_table(cases: Sequence[Case]) -> Table:
    """One line per workload: fusednorm's time and what it gains over eager, torch.compile and the fastest peer."""
    columns: dict[str, Callable[[Case], str]] = {
        "workload": lambda case: case.first.workload,
        "direction": lambda case: case.first.direction,
        "ms": lambda case: _ms(case.ms(OURS)),
        "vs eager": lambda case: _times(case.speedup(EAGER)),
        "vs compile": lambda case: _times(case.speedup(COMPILE)),
        "vs fastest peer": lambda case: (
            f"{_times(case.speedup_over_fastest_peer)} ({case.fastest_peer})" if case.speedup_over_fastest_peer else ""
        ),
        "of copy": lambda case: _percent(case.copy_fraction()),
        "of copy, out=": lambda case: _percent(case.copy_fraction(PREALLOCATED)),
        "host us": lambda case: _us(case.host_us),
        "calls vs eager": lambda case: _times(case.call_speedup),
        "peak memory": lambda case: _times(case.peak_fraction),
    }
    lines = tuple(tuple(write(case) for write in columns.values()) for case in cases)
    header = tuple(columns)
    return Table("fusednorm against the others", header, lines, header[:2]).without_empty_columns()


def _present(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _least(values: Iterable[float | None]) -> str:
    return _times(min(_present(values), default=None))


def _most(values: Iterable[float | None]) -> float | None:
    return max(_present(values), default=None)


# What is said of the shapes of one operation. Two columns are called "least": each belongs to the one before it.
_MEANS: tuple[tuple[str, Callable[[Sequence[Case]], str]], ...] = (
    ("shapes", lambda cases: str(len(cases))),
    ("vs eager", lambda cases: _times(geometric_mean(case.speedup(EAGER) for case in cases))),
    ("least", lambda cases: _least(case.speedup(EAGER) for case in cases)),
    ("vs compile", lambda cases: _times(geometric_mean(case.speedup(COMPILE) for case in cases))),
    ("vs fastest peer", lambda cases: _times(geometric_mean(case.speedup_over_fastest_peer for case in cases))),
    ("least", lambda cases: _least(case.speedup_over_fastest_peer for case in cases)),
    ("vs torch, least", lambda cases: _least(case.speedup_over_torch for case in cases if case.on_gpu)),
    ("of copy", lambda cases: _percent(geometric_mean(case.copy_fraction() for case in cases))),
    ("of copy, out=", lambda cases: _percent(geometric_mean(case.copy_fraction(PREALLOCATED) for case in cases))),
    (
        "of copy, 64 MB up, least",
        lambda cases: _percent(
            min(_present(case.copy_fraction() for case in cases if case.on_gpu and case.large), default=None)
        ),
    ),
    ("host us, most", lambda cases: _us(_most(case.host_us for case in cases))),
    ("calls vs eager, least", lambda cases: _least(case.call_speedup for case in cases)),
    ("peak memory, most", lambda cases: _times(_most(case.peak_fraction for case in cases))),
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


def report_markdown(reports: Sequence[Report], workloads: bool = False) -> str:
    """The tables of the README from saved reports: geometric means, on request each workload, and where from."""
    cases = [case for report in reports for case in cases_of(report.rows)]
    tables = [mean_table(cases), ratio_table(cases)] if workloads else [mean_table(cases)]
    sources: dict[str, list[str]] = {}
    for report in reports:
        machine = report.machine
        sources.setdefault(str(machine), []).append(f"- {machine.date}: `{machine.command}`")
    parts = [table.to_markdown() for table in tables]
    parts += [f"Measured on {machine}:\n\n" + "\n".join(commands) for machine, commands in sources.items()]
    return "\n\n".join(parts) + "\n"
