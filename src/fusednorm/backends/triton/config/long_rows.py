"""Long rows of channels_last, each with as many positions as fit: which backwards read them, and how.

Tiles of 64 channels and some positions are pieces of 128 bytes of as many rows, and where 64 does not divide the
channels lanes are empty, or rows of several positions leave partials of each. A long row is one piece of memory, of any
number of channels, and its program leaves one partial of each channel. On an H200 the backward of 156 drawn problems is
1.10 times as fast so in the geometric mean, at least 0.96 times and at most 1.72: in bf16 instance_norm of (4, 17, 71,
71) with scale, shift and silu takes 8.7 us, and 14.9 in tiles, of (1, 3, 1000, 1001) with silu 13.5 and 18.5,
batch_norm of (4, 33, 221, 222) 21.3 and 25.9, of (24, 12, 493, 494) with gelu 227 and 272, but in fp32 group_norm of
(4, 100, 295, 295) in 5 groups 189, and 181.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fusednorm.backends.triton.config.device import PROCESSORS, most_loaded
from fusednorm.backends.triton.config.kinds import PassConfig
from fusednorm.backends.triton.runs import READ_CHANNELS, WIDEST_LOAD, layouts_of, runs_of
from fusednorm.problem import DTYPE_BYTES, Problem

#: Channels up to which long rows are read. Where 64 divides more than 64 channels, tiles of 64 are as fast.
MOST_CHANNELS = 256
#: Bytes of an input from which on they are read: with a smooth activation, and without one of few and of more channels;
#: and of more channels than two tiles' with any. Below these bytes, launches decide: batch_norm of (1, 3, 341, 342) in
#: bf16 takes 5.7 us in tiles, and 6.7 in long rows.
SMOOTH_BYTES, FEW_BYTES, SOME_BYTES, MANY_BYTES = 1 << 18, 2 << 20, 4 << 20, 24 << 20
#: Bytes of an input up to which half as many programs read it, in short rows, and of one in 16 bits with a smooth
#: activation, whose arithmetic needs more.
SMALL_BYTES, SMALL_SMOOTH_BYTES = 9 << 20, 7 << 20
#: The share of a row's lanes that its positions fill at least. Rows of an odd number of channels in 16 bits hold eight
#: positions, or a multiple of eight: (65536, 67) in bf16 with gelu took 30.3 us in rows of 2 KB, which eight positions
#: fill by half, and 23.7 in tiles.
LEAST_FULL = 0.7
#: Channels up to which rows are of half the bytes on half the warps: (4, 6, 1707, 1709) in bf16 with silu takes 188 us
#: so, and 210 in rows of 4 KB, but (1, 33, 1456, 1458) 210, and 201.
FEW_CHANNELS = 32
#: Rows up to which a program takes two, at once.
FEW_ROWS = 5 * PROCESSORS
#: Rows of a sample below which one that is not full costs too much, and those that a program sums at most, in whose
#: sums of fp32 rounding else shows.
FEWEST_ROWS, MOST_ROWS = 8, 320
#: Rows on their way to shared memory.
STAGES = 4


@dataclass(frozen=True, slots=True)
class Row:
    """The bytes of a row, and the warps of the programs that read it."""

    bytes: int
    warps: int


SHORT, LONG = Row(2048, 4), Row(4096, 8)


def long_rows(problem: Problem) -> PassConfig | None:
    """The pass that reads long rows; None where tiles of channels and positions are faster, and where rows do not begin
    at 16 bytes."""
    size = DTYPE_BYTES[problem.dtype]
    many = size * problem.view.numel
    if many < _least_bytes(problem):
        return None
    small = many <= (SMALL_SMOOTH_BYTES if problem.norm.smooth and size == 2 else SMALL_BYTES)
    rows = (SHORT, LONG) if small or problem.view.channels <= FEW_CHANNELS else (LONG, SHORT)
    found = (_read(problem, row, (8 if small else 16) // row.warps) for row in rows)
    return next((one for one in found if one is not None), None)


def read_by_long_rows(problem: Problem) -> Iterator[PassConfig]:
    """The passes that tuning tries: both rows, by programs of 16 and of 8 warps to a multiprocessor."""
    for row in (SHORT, LONG):
        for warps in (16, 8):
            found = _read(problem, row, warps // row.warps)
            if found is not None:
                yield found


def _least_bytes(problem: Problem) -> float:
    """The bytes of an input from which on long rows are faster."""
    channels = problem.view.channels
    if channels > MOST_CHANNELS or (channels % READ_CHANNELS == 0 and channels > READ_CHANNELS):
        return float("inf")
    if channels > 2 * READ_CHANNELS:
        return MANY_BYTES
    if problem.norm.smooth:
        return SMOOTH_BYTES
    return FEW_BYTES if channels <= READ_CHANNELS else SOME_BYTES


def _read(problem: Problem, row: Row, programs: int) -> PassConfig | None:
    """The pass by about so many programs to a multiprocessor, which read few rows at once; None where a sample has few
    of such rows, or they are narrow or not full."""
    size, added = DTYPE_BYTES[problem.dtype], problem.added
    last = problem.layout.order == "channels_last" and problem.view.numel > 0
    if not (problem.backward and last) or problem.dtype == "float64":
        return None
    behind = () if added is None or added.post_layout is None else (added.post_layout,)
    lanes = row.bytes // size
    runs = runs_of(problem, problem.view, (*layouts_of(problem), *behind), lanes=lanes)
    full = runs.repeat * problem.view.channels >= LEAST_FULL * lanes
    if runs.repeat == 1 or runs.alignment * size < WIDEST_LOAD or runs.view.spatial < FEWEST_ROWS or not full:
        return None
    rows, samples = runs.view.spatial, problem.view.samples
    if rows * samples <= FEW_ROWS:
        return PassConfig(lanes, 2, 1, row.warps, long=True)
    return PassConfig(lanes, 1, _rows_of_a_program(rows, samples, programs), row.warps, STAGES, long=True)


def _rows_of_a_program(rows: int, samples: int, programs: int) -> int:
    """The rows of a program, for about so many programs to a multiprocessor, such that the multiprocessor with the most
    rows has few."""
    near = min(max(1, round(rows * samples / (programs * PROCESSORS))), rows, MOST_ROWS)
    choices = range(max(1, 3 * near // 4), min(5 * near // 4 + 1, rows, MOST_ROWS) + 1)
    return min(choices, key=lambda each: each * most_loaded(rows, samples, each))
