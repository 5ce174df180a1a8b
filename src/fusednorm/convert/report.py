"""What a conversion did, as data and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """One module of the model: its path, and what was done with it or why nothing was."""

    path: str
    reason: str


@dataclass(frozen=True)
class Report:
    """What :func:`fusednorm.convert_` converted, fused and left, each with the module's path and the reason.

    ``converted`` has every norm that became fusednorm's; ``fused`` every one of them that took an activation in;
    ``summed`` every sum before a norm, or between a norm and its activation, that the norm took in; ``left`` every norm
    that stays what it was, and every activation that was seen behind a norm and stays there. ``str`` gives a table.
    """

    converted: tuple[Entry, ...] = ()
    fused: tuple[Entry, ...] = ()
    left: tuple[Entry, ...] = ()
    summed: tuple[Entry, ...] = ()

    def __str__(self) -> str:
        sums = f" and {len(self.summed)} sums" if self.summed else ""
        counts = (
            f"{len(self.converted)} norms converted, {len(self.fused)} activations{sums} fused, {len(self.left)} left"
        )
        rows = [(what, entry.path or "(the model)", entry.reason) for what, entry in self._entries()]
        return "\n".join([counts, *_table(("", "module", "what, or why not"), rows)]) if rows else counts

    def _entries(self) -> list[tuple[str, Entry]]:
        kinds = (("converted", self.converted), ("fused", self.fused), ("fused", self.summed), ("left", self.left))
        return [(what, entry) for what, entries in kinds for entry in entries]


def _table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(cell) for cell in column) for column in zip(heads, *rows, strict=True)]
    lines = [heads, tuple("-" * width for width in widths), *rows]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
