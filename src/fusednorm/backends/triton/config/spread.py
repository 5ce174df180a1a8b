"""The choice for rows whose elements are spread over processes: a pure function of a process's part of them."""

from __future__ import annotations

from fusednorm.backends.triton.config.device import PROCESSORS, SMALL_HELD
from fusednorm.backends.triton.config.kinds import SpreadRowsConfig
from fusednorm.backends.triton.runs import power_of_two
from fusednorm.problem import DTYPE_BYTES, Problem

#: Elements of a tile of 4 warps, and of float64; the bytes of neighbours in memory that a tile across rows has.
TILE, WIDE_TILE, LINE_BYTES = 2048, 512, 128


def spread_rows_for(problem: Problem, rows: int, last: bool) -> SpreadRowsConfig:
    """Tiles of so many ``rows`` of a sample, whose elements are neighbours in memory, or else the rows; of a small
    problem half of it, so that there is work for each multiprocessor. Not measured."""
    tile = WIDE_TILE if problem.dtype == "float64" else TILE
    if problem.view.numel <= SMALL_HELD:
        tile //= 2
    if last:
        elements = min(power_of_two(problem.view.channels), tile)
        together = min(power_of_two(rows), tile // elements)
    else:
        together = min(power_of_two(rows), LINE_BYTES // DTYPE_BYTES[problem.dtype])
        elements = min(power_of_two(problem.view.channels), tile // together)
    return SpreadRowsConfig(together, elements, max(1, together * elements * 4 // tile))


def spread_rows_programs() -> int:
    """Programs that fill the device where each has several tiles."""
    return 4 * PROCESSORS
