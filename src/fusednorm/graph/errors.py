"""GraphError and its kinds: each message says where, what came, what was expected and how to mend it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusednorm.text import printable


class GraphError(RuntimeError):
    """Any error of the graph API: one line or several, with unprintable characters of names escaped."""

    def __init__(self, *lines: str) -> None:
        super().__init__("\n  ".join(printable(line, keep="") for line in lines))


@dataclass(frozen=True, slots=True)
class Mistake:
    """One mistake in a graph: where (node and port, or tensor), the value, what was expected, and the remedy."""

    where: str
    value: str
    expected: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.where}: {self.value}; expected {self.expected}; {self.remedy}"


class InvalidGraphError(GraphError, ValueError):
    """The graph is wrong; ``mistakes`` holds each one."""

    def __init__(self, graph: str, mistakes: Sequence[Mistake]) -> None:
        self.mistakes = tuple(mistakes)
        count = f"{len(self.mistakes)} mistakes" if len(self.mistakes) > 1 else "one mistake"
        super().__init__(f"graph {graph!r} has {count}:", *map(str, self.mistakes))


class StageError(GraphError):
    """A stage was asked for before the stage that it needs."""


class UnsupportedGraphError(GraphError):
    """No plan can run the graph, or the plan that was asked for by name cannot."""


class UnknownPlanError(GraphError, ValueError):
    """There is no plan of this name."""


class VariantPackError(GraphError, ValueError):
    """A graph was built for other tensors, or another workspace, than it was given."""


class GraphFormatError(GraphError, ValueError):
    """A saved graph is damaged, or was written by a newer version."""
