"""The rows of the suite of models, and their report."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import get_args

from fusednorm.bench.models.catalog import Job, ModelDirection
from fusednorm.bench.models.step import Mode
from fusednorm.bench.results import RowsReport, Status, by_contender

MODELS = "models"
MODES: tuple[Mode, ...] = get_args(Mode)


@dataclass(frozen=True)
class ModelRow:
    """One contender, torch or fusednorm, running one model in one mode.

    - ``ms``: the median time of a step, one after the other, the host's part included;
    - ``host_ms``, on a GPU: the host's time of a step that starts on an idle device, to its return;
    - ``peak_bytes``, on a GPU: the most memory that a step holds beyond weights and inputs;
    - ``compile_s``: the seconds of the first step of a compiled network, with an empty cache; None where the
      network was compiled ahead;
    - ``error``: of the output, or of all gradients together, as a part of their length; ``allowed`` says how much.

    A row that is not "ok" has a note and no time.
    """

    model: str
    direction: str
    dtype: str
    layout: str
    mode: str
    contender: str
    status: Status
    note: str = ""
    ms: float | None = None
    host_ms: float | None = None
    peak_bytes: int | None = None
    compile_s: float | None = None
    error: float | None = None
    allowed: float | None = None


_KNOWN = {"direction": get_args(ModelDirection), "mode": MODES, "status": get_args(Status)}


def model_row(job: Job, mode: Mode, contender: str, status: Status, note: str = "") -> ModelRow:
    """A row that describes its job, and has no measurements."""
    return ModelRow(job.model.name, job.direction, job.dtype, job.layout, mode, contender, status, note)


@dataclass(frozen=True)
class ModelReport(RowsReport[ModelRow]):
    """A machine and the rows of the models that it ran."""

    suite: str = MODELS
    kind, known = ModelRow, _KNOWN


def pairs_of(rows: Iterable[ModelRow]) -> list[dict[str, ModelRow]]:
    """The rows by contender, for each job and mode, in the order in which they came."""
    return by_contender(rows, "model", "direction", "dtype", "layout", "mode")
