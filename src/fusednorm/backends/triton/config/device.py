"""The device on which the figures of these heuristics were measured, and shares of work that fill it."""

from __future__ import annotations

from fusednorm.backends.triton.runs import power_of_two

#: Multiprocessors of the device on which all of these figures were measured.
PROCESSORS = 132
#: Bytes that memory moves at least.
SECTOR_BYTES = 32
#: Bytes that the L2 holds from one read to the next, beside what is written.
CACHED_BYTES = 40 << 20
#: Elements of a problem that all multiprocessors hold with 1024 to a program.
SMALL_HELD = 2 * PROCESSORS * 1024
#: Warps that a multiprocessor holds.
MOST_WARPS = 64


def shares(count: int, most: int) -> int:
    """The size of a share of ``count`` tiles, at most ``most``. Equal shares, where there are any of more than half
    that size, need no masks: 47 us against 57 on (16, 320, 64, 64). Those of half the size would be twice as many:
    group_norm of (44, 128, 23, 23) in 32 groups with gelu in bf16 and channels_last takes 12.3 us with 4 of 34 tiles,
    and 13.5 with 2."""
    most = max(1, min(most, count))
    even = next(tiles for tiles in range(most, 0, -1) if count % tiles == 0)
    return even if 2 * even > most else most


def most_loaded(count: int, columns: int, tiles: int) -> int:
    """The programs of the multiprocessor that has the most, where a program takes so many of ``columns`` times
    ``count`` tiles."""
    return -(-columns * -(-count // tiles) // PROCESSORS)


def program_elements(total: int, most: int) -> int:
    """The elements of a program, from 256 to ``most``: few where the total is small, which then has programs on all
    multiprocessors."""
    return max(256, min(most, power_of_two(total // (2 * PROCESSORS))))


def thread_elements(total: int, most: int, warps: int = 16) -> int:
    """The elements of a thread, at most ``most``, with which so many in all have so many warps to a multiprocessor."""
    return min(most, power_of_two(total // (PROCESSORS * warps * 32)))
