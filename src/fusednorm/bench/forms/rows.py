"""The rows of the suite of forms, and their report."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from fusednorm.bench.results import RowsReport, Status, by_contender

FORMS_SUITE = "forms"
FormDirection = Literal["forward", "forward_backward"]


@dataclass(frozen=True)
class FormRow:
    """One contender on one form: its median time, how that was taken, and its error as a part of the results' length.

    ``bytes`` is what fusednorm's calls move at the least, see :mod:`~fusednorm.bench.forms.traffic`. On a GPU ``ms`` is
    the device's time; an "ok" row has a note where the calls could not be captured, and the time is by events. Rows of
    a GPU also have ``call_ms``, the time of whole calls one after the other, and ``host_ms``, the host's from a call to
    its return. A row that is not "ok" has a note and no time.
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
    bytes: int = 0
    call_ms: float | None = None
    host_ms: float | None = None


_KNOWN = {"direction": get_args(FormDirection), "status": get_args(Status)}


@dataclass(frozen=True)
class FormReport(RowsReport[FormRow]):
    """A machine and the rows of the forms that it ran."""

    suite: str = FORMS_SUITE
    kind, known = FormRow, _KNOWN


def cases_of(rows: Iterable[FormRow]) -> list[dict[str, FormRow]]:
    """The rows by contender, for each form, dtype and direction, in the order in which they came."""
    return by_contender(rows, "form", "shape", "dtype", "layout", "direction")
