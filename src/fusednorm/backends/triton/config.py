"""The configurations of the instances, and their choice: pure functions of the problem."""

from __future__ import annotations

from dataclasses import dataclass

from fusednorm.problem import Problem

#: Elements of a tile of channels_first: 32 a thread of 4 warps, four 16-byte loads in flight.
TILE = 4096
#: The gradient of the input reads two tensors and writes one; half a tile hides more: 191 us against 198 on
#: (1, 128, 1024, 1024) bf16. Where each program merges its unit's partials first, a whole one pays for that.
GRADIENT_TILE = 2048
#: A unit so large is read in tiles of twice the size, since its partials should stay few.
LARGE_UNIT = 1 << 20
#: Partials of a unit that every program of the pass that writes merges for itself; beyond that one more launch does it,
#: at 3 us. The backward's are merged with their weights: 256 of them cost 5 us on (1, 512, 256, 256).
MERGED, MERGED_BACKWARD = 512, 64

#: channels_last: the tiles of the passes that read are rows of 64 channels, and of those that write of 128. 256 bytes of
#: bf16 reach 93 % of a copy and 128 bytes 86, but a thread that sums keeps a mean and an M2 for each of its channels.
READ_CHANNELS, WRITE_CHANNELS = 64, 128
#: Programs of each pass that the device runs at once: 8 of the statistics and 6 of the backward's sums on each of 132
#: multiprocessors.
STATISTICS_SLOTS, SUMS_SLOTS = 1056, 792
#: Tiles of one program at most; elements from which a pass over channels_last is bound by memory alone.
MOST_TILES, MANY_ELEMENTS = 256, 1 << 26


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
    return (_planes if problem.layout.order == "channels_first" else _rows_of_channels)(problem)


def merged(problem: Problem) -> int:
    """Partials of a unit that every program of the pass that writes merges for itself."""
    return MERGED_BACKWARD if problem.backward else MERGED


def _planes(problem: Problem) -> Passes:
    """channels_first: tiles long in the positions, of so many small channels of one group as fit."""
    view, share = problem.view, 4 if problem.dtype == "float64" else 1
    read = TILE // share * (2 if problem.reduced >= LARGE_UNIT else 1)
    if problem.backward or problem.per_batch or problem.layout.channel != view.spatial:
        reduction = _plane(problem, read)
        partials = view.group_channels * -(-view.spatial // reduction.positions)
    else:  # a group's channels follow one another: one channel of all its positions
        reduction = Tiles(1, min(power_of_two(view.group_channels * view.spatial), read))
        partials = 0
    write = GRADIENT_TILE if problem.backward and partials > MERGED_BACKWARD else TILE
    return Passes(reduction, _plane(problem, write // share))


def _plane(problem: Problem, elements: int) -> Tiles:
    view = problem.view
    positions = min(power_of_two(view.spatial), elements)
    within = view.group_channels & -view.group_channels  # the largest power of two that divides it
    return Tiles(min(within, elements // positions), positions)


def _rows_of_channels(problem: Problem) -> Passes:
    """channels_last: tiles of whole rows of many channels; the programs that read keep to one wave of the device."""
    view, share = problem.view, 4 if problem.dtype == "float64" else 1
    many = view.numel >= MANY_ELEMENTS
    samples, spatial = view.samples, view.spatial
    if problem.per_batch and not problem.modulated:
        samples, spatial = 1, samples * spatial
    read = min(power_of_two(view.channels), READ_CHANNELS)
    write = min(power_of_two(view.channels), WRITE_CHANNELS)
    if problem.backward:
        positions, warps, slots = 2048 // share // read, 4, SUMS_SLOTS
    else:
        warps = 4 if many else 2
        positions, slots = 256 * warps // read, STATISTICS_SLOTS
    tiles = _tiles(-(-spatial // positions), samples * -(-view.channels // read), slots)
    output = Tiles(write, 2048 // share // write, 1 if many or not problem.backward else 2)
    return Passes(Tiles(read, positions, tiles, warps), output)


def _tiles(count: int, columns: int, slots: int) -> int:
    """Tiles of each program that read ``columns`` times ``count`` of them soonest, a program starting in the time of
    one, where so many run at once."""

    def waves(tiles: int) -> int:
        return -(-columns * -(-count // tiles) // slots)

    return min(range(1, min(count, MOST_TILES) + 1), key=lambda tiles: (waves(tiles) * (tiles + 1), tiles))


def whole_forward_for(problem: Problem) -> Whole:
    block = power_of_two(problem.reduced)
    units = max(1, min(2048 // block, power_of_two(problem.statistics)))
    return Whole(units, max(1, min(16, block * units // 1024)))


def rows_backward_for(problem: Problem) -> Whole:
    block = power_of_two(problem.view.channels)
    units = max(1, 2048 // block)
    warps = max(1, min(32, block * units // 512))
    return Whole(units, warps, programs=132 * max(1, 16 // warps))
