"""The configurations of the instances, and their choice: pure functions of the problem."""

from __future__ import annotations

from dataclasses import dataclass

from fusednorm.problem import Problem

#: 32 elements a thread of 4 warps: four 16-byte loads in flight beside two fp32 sums an element, without a spill.
TILE = 4096
#: The backward of channels_last takes half of it and rows of 256 bytes: 237 us against 294 on (1, 256, 512, 512) bf16.
TILE_BACKWARD_LAST = 2048
#: Programs after which a longer chunk costs no parallelism: eight for each of 132 multiprocessors.
ENOUGH = 1056
#: Tiles to a chunk. channels_first: 4 beat 16 by 8 to 13 % on (1, 256, 512, 512). A chunk's pivot is the mean of its
#: first tile, so that 16 still leave it a sixteenth of the chunk.
MOST_TILES_FIRST, MOST_TILES_LAST = 4, 16
#: channels_last rows of 128 bytes reach 86 % of a copy, 64 bytes 52 to 71.
ROW_CHANNELS, ROW_CHANNELS_BACKWARD = 64, 128


def power_of_two(number: int) -> int:
    """The least power of two that is not below a number."""
    return 1 << max(0, number - 1).bit_length()


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of so many channels and positions; tiles to a chunk in the statistics' and in the output's pass."""

    channels: int
    positions: int
    tiles: int
    output_tiles: int
    warps: int = 4


@dataclass(frozen=True, slots=True)
class Whole:
    """Units to a program, warps, and the programs that share the rows of a backward."""

    units: int
    warps: int
    programs: int = 0


def tiles_for(problem: Problem) -> Tiles:
    view, backward = problem.view, problem.backward
    first = problem.layout.order == "channels_first"
    elements = TILE_BACKWARD_LAST if backward and not first else TILE
    if problem.dtype == "float64":
        elements //= 4
    spatial = view.spatial
    if first:
        positions = min(power_of_two(spatial), elements)
        channels = min(power_of_two(view.channels), elements // positions)
    else:
        spatial *= view.samples if problem.per_batch and not problem.modulated else 1
        channels = min(power_of_two(view.channels), ROW_CHANNELS_BACKWARD if backward else ROW_CHANNELS)
        positions = min(power_of_two(spatial), elements // channels)
        channels = min(power_of_two(view.channels), elements // positions)
    count = -(-view.numel // (channels * positions))
    most = MOST_TILES_FIRST if first else MOST_TILES_LAST
    tiles = max(1, min(most, count // ENOUGH, -(-spatial // positions)))
    return Tiles(channels, positions, tiles, 1 if first or backward else min(4, tiles))


def whole_forward_for(problem: Problem) -> Whole:
    block = power_of_two(problem.reduced)
    units = max(1, min(2048 // block, power_of_two(problem.statistics)))
    return Whole(units, max(1, min(16, block * units // 1024)))


def rows_backward_for(problem: Problem) -> Whole:
    block = power_of_two(problem.view.channels)
    units = max(1, 2048 // block)
    warps = max(1, min(32, block * units // 512))
    return Whole(units, warps, programs=132 * max(1, 16 // warps))
