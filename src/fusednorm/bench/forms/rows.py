"""The rows of the suite of forms, and their report."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Literal, get_args

from fusednorm.bench.provenance import Machine
from fusednorm.bench.results import Status, report_parts, rows_as_csv

FORMS_SUITE = "forms"
FormDirection = Literal["forward", "forward_backward"]


@dataclass(frozen=True)
class FormRow:
    """One contender on one form: its median time, how that was taken, and its error as a part of the results' length.

    ``saves`` says whether one call is to pass over memory fewer times than several. A row that is not "ok" has a note
    and no time.
    """

    form: str
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
    saves: str = "yes"


_KNOWN = {"saves": ("yes", "no"), "direction": get_args(FormDirection), "status": get_args(Status)}


@dataclass(frozen=True)
class FormReport:
    """A machine and the rows of the forms that it ran."""

    machine: Machine
    rows: tuple[FormRow, ...]
    suite: str = field(default=FORMS_SUITE)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> FormReport:
        """The inverse of :meth:`to_json`; ValueError where the text is no such report."""
        return cls(*report_parts(text, FormRow, _KNOWN))

    def to_csv(self) -> str:
        """One line per row, under the names of its fields."""
        return rows_as_csv(FormRow, self.rows)


def cases_of(rows: Iterable[FormRow]) -> list[dict[str, FormRow]]:
    """The rows by contender, for each form, dtype and direction, in the order in which they came."""
    found: dict[tuple[str, ...], dict[str, FormRow]] = {}
    for row in rows:
        key = (row.form, row.shape, row.dtype, row.layout, row.direction)
        found.setdefault(key, {})[row.contender] = row
    return list(found.values())
