"""The choice for triton.columns, positions with statistics of their own: pure functions of the problem.

The numbers follow from registers and from the width of loads; they have not been measured.
"""

from __future__ import annotations

from fusednorm.backends.triton.config.device import PROCESSORS
from fusednorm.backends.triton.config.kinds import PositionsConfig
from fusednorm.backends.triton.runs import power_of_two
from fusednorm.problem import DTYPE_BYTES, Problem

#: Bytes of the positions of a channel that a program reads together: a line of the cache, and the fewest of them.
LINE_BYTES, LEAST_BYTES = 128, 32
#: 32-bit elements of a tile that holds all channels, with up to 32 to a thread: of a forward, and of a backward, which
#: has dz and xhat beside two sums. And those of a tile that walks over the channels.
HELD_FORWARD, HELD_BACKWARD, WALKED = 16384, 8192, 4096


def columns_for(problem: Problem) -> PositionsConfig:
    """All channels to a tile where they fit the registers beside so many positions as make whole sectors of memory;
    fewer positions of a small problem, so that there is a program for each multiprocessor."""
    view, size = problem.view, DTYPE_BYTES[problem.dtype]
    words = 2 if problem.dtype == "float64" else 1
    most = (HELD_BACKWARD if problem.backward else HELD_FORWARD) // words
    channels, least = power_of_two(view.channels), LEAST_BYTES // size
    positions = min(LINE_BYTES // size, power_of_two(view.spatial))
    while positions > least and (positions * channels > most or view.samples * view.spatial < PROCESSORS * positions):
        positions //= 2
    if positions * channels > most:
        positions = min(LINE_BYTES // size, power_of_two(view.spatial))
        channels = max(1, WALKED // words // positions)
    return PositionsConfig(positions, channels, warps_of(positions * channels * words))


def warps_of(elements: int) -> int:
    """Warps of 16 elements a thread, or of 32 where 16 warps have no fewer."""
    return max(1, min(16, elements // 512))
