"""The configurations that tuning tries on a problem: pure functions of the problem and of its default configuration.

Each list begins with the default, which the heuristics beside it choose, and goes on with configurations near it:
registers and shared memory bound the programs that a GPU can take, and the default fits both. Every listed
configuration gives right results; they differ in speed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product
from typing import TypeVar

from fusednorm.backends.triton.config.device import PROCESSORS
from fusednorm.backends.triton.config.held import WALKED_LANES, WALKED_TILE, walk_of
from fusednorm.backends.triton.config.kinds import (
    ColumnsBackwardConfig,
    FlatConfig,
    HeldConfig,
    PassConfig,
    PositionsConfig,
    RowsBackwardConfig,
    StepsConfig,
    TilesConfig,
    WholeConfig,
)
from fusednorm.backends.triton.config.rows import SHORT_ROW
from fusednorm.backends.triton.config.units import MOST_HELD, HeldUnits
from fusednorm.backends.triton.runs import for_moments, layouts_of, power_of_two, runs_of
from fusednorm.problem import DTYPE_BYTES, Problem

T = TypeVar("T")

MOST_CONFIGS = 40  # of one instance for one problem
MOST_PASSES = 6  # of the pass that reads, and of the pass that writes: 36 pairs
WARPS = (1, 2, 4, 8, 16)
MOST_ELEMENTS = 32768  # of a program's tile
#: Shared memory of a program on the smallest GPU of interest, which tiles on their way fill.
SHARED_BYTES = 99 << 10
PROGRAMS = (PROCESSORS, 2 * PROCESSORS, 4 * PROCESSORS)


def _limited(default: T, others: Iterable[T]) -> tuple[T, ...]:
    """The default and the first others, each once."""
    return tuple(dict.fromkeys((default, *others)))[:MOST_CONFIGS]


def _thread_elements(problem: Problem, elements: int, warps: int) -> int:
    """The 32-bit registers that an element of each thread takes, of a tile of so many elements."""
    return elements // (32 * warps) * (2 if problem.dtype == "float64" else 1)


def _powers(least: int, most: int) -> tuple[int, ...]:
    """The powers of two from ``least`` to ``most``."""
    return tuple(1 << power for power in range(max(1, least).bit_length() - 1, max(1, most).bit_length()))


# --- evaluations ---


def flat_forwards(default: FlatConfig, most_width: int) -> tuple[FlatConfig, ...]:
    """Vectors of up to the widest load, and 1 to 8 of them to a thread."""
    found = (
        FlatConfig(32 * warps * each, width, warps)
        for width, each, warps in product(reversed(_powers(1, most_width)), (1, 2, 4, 8), WARPS)
        if each * width <= 16 and warps <= 8
    )
    return _limited(default, found)


# --- units and rows in one program ---


def whole_forwards(problem: Problem, default: WholeConfig) -> tuple[WholeConfig, ...]:
    """Units to a program and warps with 4 to 64 elements a thread, those with 16 first."""
    block = power_of_two(problem.reduced)
    most = min(power_of_two(problem.num_statistics), max(1, MOST_ELEMENTS // block))
    found = [
        (abs(held.bit_length() - 5), units, warps)
        for units, warps in product(_powers(1, most), WARPS)
        if 4 <= (held := _thread_elements(problem, block * units, warps)) <= 64
    ]
    return _limited(default, (WholeConfig(units, warps) for _, units, warps in sorted(found)))


def held(problem: Problem, seen: HeldUnits, default: HeldConfig) -> tuple[HeldConfig, ...]:
    """Units to a program and warps with 2 to 32 elements a thread, or 64 of a forward of 16 bits, those near the
    default's number of units first."""
    largest = 64 if not problem.backward and DTYPE_BYTES[problem.dtype] == 2 else 32
    most = power_of_two(seen.units if seen.spans else seen.in_sample)
    found = [
        (abs(units.bit_length() - default.units.bit_length()), units, warps)
        for units, warps in product(_powers(1, min(most, MOST_HELD // seen.elements)), WARPS)
        if 2 <= _thread_elements(problem, seen.elements * units, warps) <= largest
    ]
    others = [HeldConfig(units, warps) for _, units, warps in sorted(found)]
    if default.steps > 1:
        others = [*_walks(problem, seen), *others]
    return _limited(default, others)


def _walks(problem: Problem, seen: HeldUnits) -> Iterator[HeldConfig]:
    """Walks over the samples, in rows of two lengths, with 4 to 16 elements a thread, 8 to 32 warps to a
    multiprocessor, and one stage or three; and those of a warp alone, with 2 to 8 elements a thread."""
    units = power_of_two(seen.in_sample)
    for lanes, row, warps in product((64, 128, 256), (1, 2, 4), (16, 32)):
        if row <= units and row * seen.elements <= lanes:
            yield walk_of(seen, row, lanes, lanes // 32, warps, 1)
    rows = WALKED_LANES, WALKED_TILE
    for lanes, row, thread, warps, stages in product((1024, 2048), rows, (4, 8, 16), (8, 16, 32), (1, 3)):
        yield walk_of(seen, max(1, min(units, row // seen.elements)), lanes, thread, warps, stages)


def positions_configs(problem: Problem, default: PositionsConfig) -> tuple[PositionsConfig, ...]:
    """All channels to a tile, or steps over them, with 8 to 32 elements a thread."""
    channels, positions = power_of_two(problem.view.channels), power_of_two(problem.view.spatial)
    found = (
        PositionsConfig(width, depth, warps)
        for depth in dict.fromkeys((default.channels, min(64, channels), min(32, channels), channels))
        for width, warps in product(_powers(min(8, positions), min(128, positions)), WARPS)
        if width * depth <= MOST_ELEMENTS // 2 and 8 <= _thread_elements(problem, width * depth, warps) <= 32
    )
    return _limited(default, found)


def steps_configs(problem: Problem, default: StepsConfig) -> tuple[StepsConfig, ...]:
    """Steps of up to a row, and warps with 4 to 32 elements a thread."""
    row = power_of_two(problem.reduced)
    sizes = _powers(min(512, row), min(16384, row))
    return _limited(
        default,
        (
            StepsConfig(elements, warps)
            for elements, warps in product(sizes, WARPS)
            if 4 <= _thread_elements(problem, elements, warps) <= 32
        ),
    )


def rows_backwards(problem: Problem, default: RowsBackwardConfig) -> tuple[RowsBackwardConfig, ...]:
    """The default with other numbers of programs; short rows in one step, with 16 and 32 elements a thread on one to
    four warps; then tiles of half to twice the default's size and 8 to 32 elements a thread, or up to 40 of 64 lanes,
    on programs that fill a multiprocessor with 16 warps. Each plain, with steps in flight, and with rows loaded
    twice."""
    block, count = power_of_two(problem.view.channels), problem.view.samples

    def fits(rows: int, warps: int) -> bool:
        lanes = _thread_elements(problem, rows * block, warps)
        return 8 <= lanes <= 32 or (lanes == 64 and lanes * problem.view.channels <= 40 * block)

    def modes(tile: RowsBackwardConfig) -> Iterator[RowsBackwardConfig]:
        """The tile plain, with steps in flight, and loaded twice, as far as there are several steps and long rows."""
        yield replace(tile, stages=1, reload=False)
        step_bytes = 2 * tile.rows * block * DTYPE_BYTES[problem.dtype]
        for stages in (4, 3, 2):
            if count > tile.rows * tile.programs and stages * step_bytes <= SHARED_BYTES:
                yield replace(tile, stages=stages, reload=False)
                break
        if block >= 2048:
            yield replace(tile, stages=1, reload=True)

    def in_one_step() -> Iterator[RowsBackwardConfig]:
        for thread, warps in product((32, 16), (1, 2, 4)):
            rows = max(1, 32 * thread * warps // block)
            programs = -(-count // rows)
            if block <= SHORT_ROW and programs <= 16 * PROCESSORS:
                yield RowsBackwardConfig(rows, warps, programs)

    def listed() -> Iterator[RowsBackwardConfig]:
        yield from modes(default)
        for programs in PROGRAMS:
            if programs == PROCESSORS or programs < count:
                yield replace(default, programs=programs)
        yield from in_one_step()
        for rows in _powers(max(1, default.rows // 2), min(2 * default.rows, power_of_two(count))):
            for warps in WARPS:
                if fits(rows, warps):
                    programs = PROCESSORS * max(1, 16 // warps)
                    yield from modes(RowsBackwardConfig(rows, warps, programs))

    return _limited(default, listed())


def columns_backwards(problem: Problem, default: ColumnsBackwardConfig) -> tuple[ColumnsBackwardConfig, ...]:
    """Two steps of totals; half to four times the columns and the steps, in flight or not."""
    count = problem.view.samples
    rows = (default.row_elements, default.row_warps)
    other = (rows[0] // 2, rows[1] // 2) if 2 * rows[1] > WARPS[-1] else (2 * rows[0], 2 * rows[1])
    found = (
        replace(
            default,
            row_elements=row[0],
            row_warps=row[1],
            elements=int(default.elements * block),
            warps=int(default.warps * block),
            steps=max(1, int(default.steps * share)),
            stages=stages,
        )
        for row, block, share, stages in product((rows, other), (1, 2, 4, 0.5), (1, 0.5, 2, 4), (default.stages, 1))
        if (share <= 1 or default.steps < count) and default.warps * block <= WARPS[-1]
    )
    return _limited(default, found)


# --- tiles ---


def passes(problem: Problem, default: TilesConfig, reading: Iterable[PassConfig] = ()) -> tuple[TilesConfig, ...]:
    """Every pair of up to six passes that read and six passes that write; ``problem`` is folded. ``reading``: passes
    that read which are tried before those near the default.

    A pass that a direction leaves out is the default's.
    """
    reductions, outputs = [default.reduction], [default.output]
    if problem.direction != "inference":
        read = _in_runs(replace(problem, output_layout=None) if problem.backward else for_moments(problem))
        reductions = _passes(read, default.reduction, reading, _read_passes(read, default.reduction))
    if problem.direction != "backward_gamma_beta":
        written = _in_runs(problem)
        outputs = _passes(written, default.output, (), _written_passes(written, default.output))
    return _limited(default, (TilesConfig(*pair) for pair in product(reductions, outputs)))


def _in_runs(problem: Problem) -> Problem:
    """The problem with the view of the runs that its tiles hold."""
    return replace(problem, view=runs_of(problem, problem.view, layouts_of(problem)).view)


def _passes(
    problem: Problem, default: PassConfig, others: Iterable[PassConfig], near: Iterable[PassConfig]
) -> list[PassConfig]:
    """The default, the others, and the first near the default that fit a program."""
    fitting = (one for one in near if _fits(problem, one))
    return list(dict.fromkeys((default, *others, *fitting)))[:MOST_PASSES]


def _fits(problem: Problem, one: PassConfig) -> bool:
    """Whether a pass has at least one element a thread, at most 64, and tiles within the view and shared memory."""
    elements, view = one.channels * one.positions, problem.view
    if min(one.channels, one.positions, one.warps, one.tiles) < 1 or one.warps > WARPS[-1]:
        return False
    if not 1 <= _thread_elements(problem, elements, one.warps) <= 64 or one.channels > power_of_two(view.channels):
        return False
    if one.tiles > 1 and one.positions * (one.tiles - 1) >= view.spatial:
        return False
    on_the_way = one.stages * elements * DTYPE_BYTES[problem.dtype] * (2 if problem.backward else 1)
    return one.stages == 1 or on_the_way <= SHARED_BYTES


def _read_passes(problem: Problem, default: PassConfig) -> Iterator[PassConfig]:
    """The passes that read, near the default."""
    if problem.layout.order == "channels_first" and not problem.backward:
        # One tile a program, which may cover all positions of a group.
        length = problem.reduced if default.channels == 1 else problem.view.spatial
        yield _larger(default, length, 2)
        yield _smaller(default, 2)
        yield replace(default, warps=2 * default.warps)
        yield replace(default, warps=default.warps // 2)
        yield _larger(default, length, 1)
        yield _smaller(default, 1)
        return
    yield replace(default, tiles=2 * default.tiles)
    yield replace(default, tiles=default.tiles // 2)
    yield _larger(default, problem.view.spatial, 2)
    yield _smaller(default, 2)
    yield replace(default, warps=2 * default.warps)
    yield replace(default, stages=2 if default.stages > 2 else 4)
    yield replace(default, channels=2 * default.channels, positions=default.positions // 2)
    yield replace(default, channels=default.channels // 2, positions=2 * default.positions)


def _written_passes(problem: Problem, default: PassConfig) -> Iterator[PassConfig]:
    """The passes that write, near the default."""
    yield _larger(default, problem.view.spatial, 2)
    yield _smaller(default, 2)
    yield replace(default, tiles=1 if default.tiles > 1 else 2)
    yield replace(default, warps=2 * default.warps)
    yield replace(default, warps=default.warps // 2)
    yield replace(default, tiles=4)


def _larger(default: PassConfig, length: int, warps: int) -> PassConfig:
    """Tiles of twice the positions, or, where these would be more than ``length``, of twice the channels."""
    if default.positions < length:
        tiles = min(default.tiles, -(-length // (2 * default.positions)))
        return replace(default, positions=2 * default.positions, tiles=tiles, warps=warps * default.warps)
    return replace(default, channels=2 * default.channels, warps=warps * default.warps)


def _smaller(default: PassConfig, warps: int) -> PassConfig:
    """Tiles of half the positions."""
    return replace(default, positions=default.positions // 2, warps=default.warps // warps)
