"""A table of text, and how its cells write times and ratios."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fusednorm.text import printable


@dataclass(frozen=True)
class Table:
    """A header and lines of text; the columns named in ``words`` are words, the others numbers."""

    title: str
    header: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    words: tuple[str, ...]

    def without_empty_columns(self) -> Table:
        """The table without the columns that are empty in every line, as on a machine that does not measure them."""
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


def in_times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}×"


def in_percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def in_ms(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.1f}" if value >= 10 else f"{value:.3f}" if value >= 0.1 else f"{value:.4f}"


def in_us(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"
