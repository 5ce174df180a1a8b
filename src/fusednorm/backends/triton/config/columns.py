"""The choice for triton.columns, positions with statistics of their own: pure functions of the problem."""

from __future__ import annotations

from fusednorm.backends.triton.config.device import MOST_WARPS, PROCESSORS
from fusednorm.backends.triton.config.kinds import PositionsConfig
from fusednorm.backends.triton.runs import power_of_two
from fusednorm.problem import DTYPE_BYTES, Problem

#: Positions that a program reads together; the bytes of fewer, wider ones; and the fewest, in bytes.
POSITIONS, LINE_BYTES, LEAST_BYTES = 32, 128, 32
#: Channels to a step, and how much longer than the channels all steps together may be.
STEPS, LONGER = (64, 32, 16), 1.15
#: Elements of a thread: of a problem with programs enough, and the fewest.
THREAD_ELEMENTS, LEAST_ELEMENTS = 16, 8


def columns_for(problem: Problem) -> PositionsConfig:
    """Steps of 64 channels by 32 positions on 4 warps, which walk twice. The second walk reads from the L1 or the L2.

    A tile that holds all channels in registers reads once, but such a program fills a multiprocessor, and nothing
    overlaps: (16, 320, 128, 128) in bf16 took 329 us, 132 in steps; backward 634 and 268. Small problems have fewer
    positions to a program, and more warps, so that there is work for each multiprocessor.
    """
    view, size = problem.view, DTYPE_BYTES[problem.dtype]
    words = 2 if problem.dtype == "float64" else 1
    positions = min(POSITIONS, LINE_BYTES // size, power_of_two(view.spatial))
    while positions * size > LEAST_BYTES and _programs(problem, positions) < PROCESSORS:
        positions //= 2
    channels = _step(view.channels, words)
    elements = positions * channels * words
    warps = max(1, elements // (32 * THREAD_ELEMENTS))
    most = max(1, elements // (32 * LEAST_ELEMENTS))
    while 2 * warps <= most and _programs(problem, positions) * warps < PROCESSORS * MOST_WARPS // 4:
        warps *= 2
    return PositionsConfig(positions, channels, warps)


def _programs(problem: Problem, positions: int) -> int:
    return problem.view.samples * -(-problem.view.spatial // positions)


def _step(channels: int, words: int) -> int:
    """Channels to a step: as many as waste few lanes of the last one."""
    for step in STEPS:
        step = min(step // words, power_of_two(channels))
        if -(-channels // step) * step <= LONGER * channels:
            return step
    return min(STEPS[-1] // words, power_of_two(channels))
