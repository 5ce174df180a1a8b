"""The configurations of the instances, and their choice: pure functions of the problem."""

from __future__ import annotations

from dataclasses import dataclass

from fusednorm.problem import Problem

#: 32 elements a thread of 4 warps: four 16-byte loads in flight.
TILE = 4096
#: Programs after which a longer chunk costs no parallelism: eight for each of 132 multiprocessors.
ENOUGH = 1056
#: Tiles to a chunk of channels_last, whose partials are many. A chunk's pivot is the mean of its first tile, which
#: costs the variance at most a factor of the tiles in precision.
MOST_TILES = 64
#: channels_last rows of 256 bytes of bf16 reach 93 % of a copy, 128 bytes 86, 64 bytes 52 to 71.
ROW_CHANNELS = 128


def power_of_two(number: int) -> int:
    """The least power of two that is not below a number."""
    return 1 << max(0, number - 1).bit_length()


@dataclass(frozen=True, slots=True)
class Tiles:
    """One pass's tiles, of so many channels and positions; how many to a chunk; warps to a program."""

    channels: int
    positions: int
    tiles: int = 1
    warps: int = 4


@dataclass(frozen=True, slots=True)
class Passes:
    """The tiles of the pass that reads and of the one that writes."""

    reduction: Tiles
    output: Tiles


@dataclass(frozen=True, slots=True)
class Whole:
    """Units to a program, warps, and the programs that share the rows of a backward."""

    units: int
    warps: int
    programs: int = 0


def passes_for(problem: Problem) -> Passes:
    if problem.layout.order == "channels_last":
        return _rows_of_channels(problem)
    view, elements = problem.view, TILE // (4 if problem.dtype == "float64" else 1)
    flat = not problem.backward and not problem.per_batch and problem.layout.channel == view.spatial
    if flat:
        reduction = Tiles(1, min(power_of_two(view.group_channels * view.spatial), 2 * elements), 1, 8)
    else:
        reduction = _planes(problem, elements)
    return Passes(reduction, _planes(problem, elements))


def _planes(problem: Problem, elements: int) -> Tiles:
    """channels_first: long in the positions, and so many small channels of one group as fit."""
    view = problem.view
    positions = min(power_of_two(view.spatial), elements)
    within = view.group_channels & -view.group_channels  # the largest power of two that divides it
    return Tiles(min(within, elements // positions), positions)


def _rows_of_channels(problem: Problem) -> Passes:
    view, elements = problem.view, TILE // (4 if problem.dtype == "float64" else 1)
    spatial = view.spatial * (view.samples if problem.per_batch and not problem.modulated else 1)
    channels = min(power_of_two(view.channels), ROW_CHANNELS)
    if view.channels % channels:
        channels = min(channels, 64)
    if problem.backward:
        elements //= 2
    positions = min(power_of_two(spatial), elements // channels)
    count = -(-view.numel // (channels * positions))
    tiles = max(1, min(MOST_TILES, count // ENOUGH, -(-spatial // positions)))
    return Passes(Tiles(channels, positions, tiles), Tiles(channels, positions, min(4, tiles)))


def whole_forward_for(problem: Problem) -> Whole:
    block = power_of_two(problem.reduced)
    units = max(1, min(2048 // block, power_of_two(problem.statistics)))
    return Whole(units, max(1, min(16, block * units // 1024)))


def rows_backward_for(problem: Problem) -> Whole:
    block = power_of_two(problem.view.channels)
    units = max(1, 2048 // block)
    warps = max(1, min(32, block * units // 512))
    return Whole(units, warps, programs=132 * max(1, 16 // warps))
