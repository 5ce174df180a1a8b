"""How a block keeps rows: the configurations, and which one a problem gets."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from fusednorm.backends.hopper.config.resident import DRIVER_BYTES, SHARED_BYTES, VECTOR_BYTES, vector_of
from fusednorm.problem import DTYPE_BYTES, Problem

#: Rows in shared memory: one is stored, one summed, the others come.
SLOTS = (3, 4)
#: Warps of a block, the default first: fewer have more registers each, more hide each other's waits.
WARPS = (16, 32, 8)
#: Elements of rows with a mean up to which 8 warps are faster, and up to which a fourth slot is.
FEWER_WARPS, MORE_SLOTS = 12288, 10240
#: Elements that a thread has of a row, times the warps, at most: two sums of each are in registers.
MOST_ELEMENTS = 512
#: Sums of the warps over a row: of p and of q, of the row that is summed and of the one that is stored.
TOTALS = 4


@dataclass(frozen=True, slots=True)
class RowsConfig:
    """Warps to a block, rows in its shared memory, and whether the weight is there too."""

    warps: int
    slots: int
    held: bool


def row_vectors(problem: Problem) -> int:
    """Vectors of 16 bytes in a row."""
    return problem.view.channels // vector_of(problem)


def _elements(problem: Problem, config: RowsConfig) -> int:
    """The elements that a thread has of a row."""
    return -(-row_vectors(problem) // (32 * config.warps)) * vector_of(problem)


def shared_bytes(problem: Problem, config: RowsConfig) -> int:
    """What a block takes of a multiprocessor's shared memory."""
    threads, elements = 32 * config.warps, _elements(problem, config)
    row = 2 * elements // vector_of(problem) * VECTOR_BYTES
    weight = elements * DTYPE_BYTES[problem.weight_dtype or problem.dtype] if config.held else 0
    return threads * (config.slots * row + weight) + 4 * TOTALS * config.warps + DRIVER_BYTES


def _fits(problem: Problem, config: RowsConfig) -> bool:
    few = _elements(problem, config) * config.warps <= MOST_ELEMENTS
    return few and shared_bytes(problem, config) <= SHARED_BYTES


def configs(problem: Problem) -> list[RowsConfig]:
    """The configurations that suit a problem, the default first. Of rows with a mean layer_norm of 6000 x 9216 in bf16
    takes 106 us on 8 warps, and 122 on 16, 6335 x 12288 129 and 145, of 4000 x 10240 85 with 4 slots, and more than 94
    with 3."""
    held = (True, False) if problem.weight_dtype else (False,)
    few = problem.norm.has_mean and problem.view.channels <= FEWER_WARPS
    more = few and problem.view.channels <= MORE_SLOTS
    sizes = product(WARPS[::-1] if few else WARPS, SLOTS[::-1] if more else SLOTS, held)
    return [one for one in (RowsConfig(*each) for each in sizes) if _fits(problem, one)]


def rows_for(problem: Problem) -> RowsConfig | None:
    """The default, or None where a row does not fit: 4096 x 16384 in bf16 takes 133 us with 16 warps and the weight in
    shared memory, 145 without it there, and 143 with 32 warps."""
    return next(iter(configs(problem)), None)
