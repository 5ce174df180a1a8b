"""The ratios that rows amount to, and the tables made of them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fusednorm.bench.results import Report, Row
from fusednorm.bench.runner import COPY

OURS, PREALLOCATED, EAGER, COMPILE = "fusednorm", "fusednorm out=", "eager", "compile"
# The contenders that fusednorm is compared with as "the fastest peer"; eager has its own column.
PEERS = (COMPILE, "jax", "onnxruntime", "openvino")


@dataclass(frozen=True)
class Case:
    """One workload in one direction with all its contenders."""

    first: Row
    rows: dict[str, Row] = field(default_factory=dict)

    @property
    def group(self) -> tuple[str, str, str, str]:
        """What a geometric mean is taken over: the same operation, dtype, layout and direction in several shapes."""
        operation = self.first.workload.split()[0]
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

    def to_markdown(self) -> str:
        rule = ["---" if name in self.words else "---:" for name in self.header]
        lines = [self.header, tuple(rule), *self.lines]
        return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}×"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}" if value < 10 else f"{value:.1f}"


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
                "" if row.status == "ok" else f"{row.status}: {row.note}",
            )
        )
    header = ("contender", "ms", "GB/s", "vs eager", "of copy", "note")
    return Table(f"{case.first.workload} {case.first.direction}", header, tuple(lines), ("contender", "note"))


def ratio_table(cases: Sequence[Case]) -> Table:
    """One line per workload: fusednorm's time and what it gains over eager, torch.compile and the fastest peer."""
    lines = []
    for case in cases:
        peer = case.fastest_peer
        lines.append(
            (
                case.first.workload,
                case.first.direction,
                _ms(case.ms(OURS)),
                _times(case.speedup(EAGER)),
                _times(case.speedup(COMPILE)),
                f"{_times(case.speedup_over_fastest_peer)} ({peer})" if peer else "",
                _percent(case.copy_fraction()),
                _percent(case.copy_fraction(PREALLOCATED)),
            )
        )
    header = ("workload", "direction", "ms", "vs eager", "vs compile", "vs fastest peer", "of copy", "of copy, out=")
    return Table("fusednorm against the others", header, tuple(lines), header[:2])


def mean_table(cases: Sequence[Case]) -> Table:
    """Geometric means over the shapes of one operation, and the smallest ratio to eager and to the fastest peer."""
    groups: dict[tuple[str, str, str, str], list[Case]] = {}
    for case in cases:
        groups.setdefault(case.group, []).append(case)
    lines = []
    for group, members in groups.items():
        eager = [ratio for case in members if (ratio := case.speedup(EAGER))]
        fastest = [ratio for case in members if (ratio := case.speedup_over_fastest_peer)]
        lines.append(
            (
                *group,
                str(len(members)),
                _times(geometric_mean(eager)),
                _times(min(eager, default=None)),
                _times(geometric_mean(case.speedup(COMPILE) for case in members)),
                _times(geometric_mean(fastest)),
                _times(min(fastest, default=None)),
                _percent(geometric_mean(case.copy_fraction() for case in members)),
                _percent(geometric_mean(case.copy_fraction(PREALLOCATED) for case in members)),
            )
        )
    header = (
        "operation",
        "dtype",
        "layout",
        "direction",
        "shapes",
        "vs eager",
        "least",
        "vs compile",
        "vs fastest peer",
        "least",
        "of copy",
        "of copy, out=",
    )
    return Table("geometric means", header, tuple(lines), header[:4])


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
