"""The configurations of the instances, and their choice: pure functions of the problem."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from fusednorm.backends.triton.runs import (
    FEW,
    READ_CHANNELS,
    WIDE_LOAD,
    WIDEST_LOAD,
    alignment,
    filled,
    grouped,
    layouts_of,
    length_of_runs,
    load_bytes,
    power_of_two,
    row_window,
    runs_of,
    unit_bytes,
)
from fusednorm.problem import DTYPE_BYTES, Layout, Problem

#: Elements of a tile of channels_first: 32 a thread of 4 warps, four 16-byte loads in flight. In the pass that writes a
#: program takes two tiles of half the size and loads the second while it stores the first: 100 us, not 105, on
#: (1, 256, 512, 512).
TILE = 4096
#: Where less than FULL of a plane's tiles is full, tiles of many channels have pieces of a plane, the longest that are
#: within FULL_ENOUGH of the fullest: (16, 640, 24, 24) in 32 groups with silu in bf16 takes 25 us backward in pieces of
#: 64 positions, 31 in planes of 1024.
FULL, FULL_ENOUGH, SHORTEST_PIECE = 0.8, 0.07, 64
#: From this size on a unit is read in tiles of twice the size, which keeps its partials few.
LARGE_UNIT = 1 << 20
#: The first pass of the backward reads dy and x in tiles of 2 KB, or of 8 KB where a plane has LARGE_PLANE positions,
#: with PLANE_STAGES tiles on their way to shared memory. A program takes a whole plane, but no more of a large one than
#: leaves PLANE_PROGRAMS programs; one pair of partials for a plane is what torch's backward has too. The second pass
#: reads tiles of 4 KB, two to a program. One tile of 8 KB to a program took 30.7 us, not 27.3, on (2, 320, 128, 128),
#: and 168, not 161, on (32, 512, 64, 64).
LARGE_PLANE, PLANE_PROGRAMS, PLANE_STAGES = 1 << 14, 256, 3
#: Every program of the pass that writes merges its unit's partials itself, up to so many; for more of them one more
#: launch does it, at 3 us. A backward merges them with their weights: 256 of them cost 5 us on (1, 512, 256, 256).
MERGED, MERGED_BACKWARD = 512, 64
#: Programs that start in the time of one more launch.
MOST_STARTS = 4096

#: channels_last: tiles are rows of 64 channels in a pass that reads, and of 128 in a pass that writes where 128 divides
#: the channels. Rows of 256 bytes of bf16 reach 93 % of a copy's speed and rows of 128 bytes 86 %, but a thread that
#: sums keeps a mean and an M2, or p and q, of each of its channels.
WRITE_CHANNELS = 128
#: Tiles that a reading pass over channels_last has on their way to shared memory. With few warps and deep stages these
#: passes took 36 us against 44 with unrolled loads on (16, 320, 64, 64), and 20 against 25 on (2, 320, 128, 128).
FORWARD_STAGES, BACKWARD_STAGES = 6, 4
#: Loads narrower than WIDE_LOAD are not in flight ahead of their use, or are as many as the elements. In channels_last
#: a thread then takes SCALAR_ELEMENTS, and more programs hide the time that memory takes: 59 us, not 137, for the
#: moments of (1, 3, 233, 233, 233) in fp16. But a unit is to have MOST_PARTIALS at most.
SCALAR_ELEMENTS, SCALAR_PROGRAMS, MOST_PARTIALS = 8, 4000, 16384
#: batch_norm's planes of so many bytes, or of narrow loads and so many, are spread over the samples. Each element of a
#: plane then has partials of its own, 8 bytes, so there must be some samples. A small input is as fast in planes.
SHORT_PLANE, LONG_PLANE, SPREAD_SAMPLES, SPREAD_ELEMENTS = 512, 4096, 16, 1 << 18
#: The elements of two rows at most that one program takes in one step, and those that many programs take in few steps.
ONE_PROGRAM, FEW_ELEMENTS = 2048, 1 << 20
#: Elements of a row in the registers of a backward's program, which holds four values an element.
MOST_ROW, LONG_ROW = 16384, 12288
#: Elements from which on a backward by columns has rows in flight.
LARGE_ROWS = 1 << 23
#: Multiprocessors of the device on which all of these figures were measured.
PROCESSORS = 132
#: Elements of a tile of whole units in the registers of 16 warps: 32 a thread. Units of LARGE_HELD elements keep their
#: multiprocessor busy even where their tiles are not full. Units that are neighbours in memory are read row by row, and
#: in FEW_CONTIGUOUS elements rows may be of any length.
MOST_HELD, LARGE_HELD, FEW_CONTIGUOUS = 16384, 4096, 1 << 16
#: Elements of a unit that one program finishes before a second launch would start.
SMALL_UNIT = 4096
#: Elements of a problem that all multiprocessors hold with 1024 to a program, and of the units in one place of all
#: samples that one program of a backward takes, which then needs no second launch.
SMALL_HELD, ALL_SAMPLES = 2 * PROCESSORS * 1024, 2048
#: Elements of an evaluation whose programs are short.
SMALL_EVALUATION = 1 << 20
#: Threads of a program in a small problem: 8 warps, beyond which the sums over warps cost more. Elements of a program
#: of short units.
MOST_SMALL, SHORT_UNITS = 256, 512
#: Warps that a multiprocessor holds.
MOST_WARPS = 64


@dataclass(frozen=True, slots=True)
class PassConfig:
    """A pass over tiles of so many channels and positions: tiles to a chunk, warps to a program, and how many tiles are
    in flight together."""

    channels: int
    positions: int
    tiles: int = 1
    warps: int = 4
    stages: int = 1


@dataclass(frozen=True, slots=True)
class TilesConfig:
    """The pass that reads, and the pass that writes."""

    reduction: PassConfig
    output: PassConfig


@dataclass(frozen=True, slots=True)
class WholeConfig:
    """Units to a program, and warps."""

    units: int
    warps: int


@dataclass(frozen=True, slots=True)
class HeldConfig:
    """Units to a program, warps, and whether these units are those in one place of all samples, in a backward."""

    units: int
    warps: int
    all_samples: bool = False


@dataclass(frozen=True, slots=True)
class RowsForwardConfig:
    """A forward of rows: elements of a row to a step, and warps."""

    elements: int
    warps: int


@dataclass(frozen=True, slots=True)
class RowsBackwardConfig:
    """A backward of rows: rows to a step, warps, programs that share the rows, steps that are in flight together, and
    whether a step loads its rows twice."""

    rows: int
    warps: int
    programs: int
    stages: int = 1
    reload: bool = False


@dataclass(frozen=True, slots=True)
class ColumnsBackwardConfig:
    """A backward of long rows. The pass for totals: elements to a step, warps, and about how many programs, at least a
    row to a program. The pass by columns: columns to a program, steps of a row each, warps, and how many steps are in
    flight together."""

    row_elements: int
    row_warps: int
    row_programs: int
    elements: int
    steps: int
    warps: int
    stages: int = 1


@dataclass(frozen=True, slots=True)
class HeldUnits:
    """A problem's units as ``rows`` of ``columns`` contiguous elements, see kernels/held.py: ``in_sample`` units in
    each of the samples, in batch_norm one sample. ``across`` is the stride of a layout from row to row; ``channels`` of
    each sample have partials of their own."""

    samples: int
    in_sample: int
    channels: int
    rows: int
    columns: int
    affine: int
    across: Literal["sample", "channel", "spatial"]
    input: Layout
    output: Layout | None
    grad: Layout | None

    @property
    def units(self) -> int:
        return self.samples * self.in_sample

    @property
    def elements(self) -> int:
        """Of a unit, as a tile holds it."""
        return power_of_two(self.rows) * power_of_two(self.columns)

    @property
    def contiguous(self) -> bool:
        """Whether neighbouring units are neighbours in memory, element by element."""
        layouts = self.input, self.output, self.grad
        return self.columns == 1 and all(layout is None or self.steps(layout)[1] == 1 for layout in layouts)

    def load_bytes(self, problem: Problem) -> int:
        """The widest load along the contiguous elements of units, 16 bytes at most."""
        if self.contiguous:
            return load_bytes(problem)
        return min(load_bytes(problem), alignment(problem.dtype, self.columns) * DTYPE_BYTES[problem.dtype])

    @property
    def spans(self) -> bool:
        """Whether units of several samples share a program: neighbours in memory are of one sample."""
        return self.columns > 1

    def steps(self, layout: Layout) -> tuple[int, int, int]:
        """The strides of samples, units and rows, 0 where there is no second one."""
        unit = layout.channel * (self.channels // self.in_sample) if self.in_sample > 1 else 0
        row = getattr(layout, self.across) if self.rows > 1 else 0
        return (0 if self.across == "sample" else layout.sample), unit, row


def held_units(problem: Problem) -> HeldUnits | None:
    """The units of a problem, or None where strides do not make them rows."""
    seen, per_batch = problem.folded, problem.norm.per_batch
    view, layouts = seen.view, (seen.layout, seen.output_layout, seen.grad_layout)
    last, D = seen.layout.order == "channels_last", view.group_channels
    if per_batch and last and view.samples > 1:
        if view.spatial > 1:
            return None
        last = False
    samples = 1 if per_batch else view.samples
    across: Literal["sample", "channel", "spatial"] = "spatial"
    if last:
        rows, columns = view.spatial, D
    else:
        across = "sample" if per_batch else "channel"
        rows, columns = view.samples if per_batch else D, view.spatial
    affine = 3 if across == "sample" and problem.modulated else 0 if D == 1 else 2 if last else 1
    if affine == 0 and all(layout is None or getattr(layout, across) == columns for layout in layouts):
        rows, columns = 1, rows * columns  # the samples of an only channel follow one another
    return HeldUnits(samples, view.groups, view.channels, rows, columns, affine, across, *layouts)


def tiled(problem: Problem) -> Problem:
    """The problem as tiles see it: batch_norm's samples folded, or spread where planes are short or loads narrow.

    A tile of short planes leaves lanes empty, and its programs start for little work: batch_norm of (128, 2048, 7, 7)
    in bf16 took 81 us in planes.
    """
    spread = problem.spread
    many = problem.view.samples >= SPREAD_SAMPLES and problem.view.numel >= SPREAD_ELEMENTS
    if spread is not None and many and load_bytes(spread) >= WIDE_LOAD:
        length = problem.view.spatial * DTYPE_BYTES[problem.dtype]
        if length <= SHORT_PLANE or (length <= LONG_PLANE and load_bytes(problem) < WIDE_LOAD):
            return spread
    return problem.folded


def passes_for(problem: Problem) -> TilesConfig:
    """The passes of a problem as tiles see it."""
    view = problem.view
    if view.spatial == view.groups == 1 and not problem.norm.per_batch and not problem.backward:
        return _long_rows(problem)
    return (_planes if problem.layout.order == "channels_first" else _rows_of_channels)(problem)


def _long_rows(problem: Problem) -> TilesConfig:
    """A forward of rows of one group: pieces of a row to a program."""
    share = 4 if problem.dtype == "float64" else 1
    row = power_of_two(problem.view.channels)
    return TilesConfig(PassConfig(1, min(row, TILE // share)), PassConfig(min(row, TILE // 2 // share), 1))


def merged(problem: Problem) -> int:
    """How many partials of a unit every program of the pass that writes merges itself, at most."""
    return MERGED_BACKWARD if problem.backward else MERGED


def _planes(problem: Problem) -> TilesConfig:
    """channels_first: tiles of many positions; where these are few, of as many channels of one group as fit."""
    if problem.backward:
        return _planes_backward(problem)
    share = 4 if problem.dtype == "float64" else 1
    # Other units that are small are not for tiles, and larger ones' tiles merge the partials of their unit.
    tile = _planes_across if problem.norm.per_batch else _plane
    reduction = _runs_of_groups(problem) or tile(problem, _most_read(problem))
    if _small_evaluation(problem):
        elements = _program_elements(problem.view.numel, 1024)
        return TilesConfig(reduction, _few_a_thread(problem, tile(problem, elements)))
    write = tile(problem, TILE // share // 2)
    if DTYPE_BYTES[problem.dtype] == 2 and wastes(problem, write.positions):
        return TilesConfig(reduction, replace(_in_pieces(problem, TILE // 2), tiles=2))
    if length_of_runs(problem) > write.positions:
        return TilesConfig(reduction, replace(write, tiles=2, warps=2))
    return TilesConfig(reduction, tile(problem, TILE // share))


def _most_read(problem: Problem) -> int:
    """Elements of a tile of a forward's pass that reads planes."""
    return TILE // (4 if problem.dtype == "float64" else 1) * (2 if problem.reduced >= LARGE_UNIT else 1)


def _runs_of_groups(problem: Problem) -> PassConfig | None:
    """Where a group's channels follow one another, the pass for the moments takes them for one channel of all its
    positions."""
    source = grouped(problem)
    if source.view == problem.view:
        return None
    return PassConfig(1, min(power_of_two(length_of_runs(source)), _most_read(problem)))


def _planes_backward(problem: Problem) -> TilesConfig:
    view, wide = problem.view, {"float32": 2, "float64": 4}.get(problem.dtype, 1)
    large = view.spatial >= LARGE_PLANE
    read = _planes_across(problem, (4096 if large else 1024) // wide)
    if wastes(problem, read.positions):
        read = _in_pieces(problem, 1024 // wide)
    length = length_of_runs(problem)
    count = -(-length // read.positions)
    total = view.samples * -(-view.channels // read.channels) * count
    tiles = _shares(count, total // PLANE_PROGRAMS if large else count)
    reduction = replace(read, tiles=tiles, warps=4 if large else 2, stages=PLANE_STAGES if tiles > 1 else 1)
    # Where a tile's channels belong to one unit, its program merges the unit's partials: one launch fewer.
    write = _plane(problem, 2048 // wide)
    if view.numel > MOST_STARTS * write.channels * write.positions:
        write = _planes_across(problem, 2048 // wide)
    if wastes(problem, write.positions):
        write = _in_pieces(problem, 2048 // wide)
    return TilesConfig(reduction, replace(write, tiles=2 if length > write.positions else 1))


def _plane(problem: Problem, elements: int) -> PassConfig:
    view = problem.view
    positions = min(power_of_two(length_of_runs(problem)), elements)
    within = view.group_channels & -view.group_channels  # the largest power of two that divides it, 0 for no channels
    return PassConfig(max(1, min(within, elements // positions)), positions)


def _planes_across(problem: Problem, elements: int) -> PassConfig:
    """A tile of one group's channels, or of several groups' where those fill no more than half of it.

    The programs of small tiles take longer to start than to run: batch_norm of (128, 2048, 7, 7) in bf16 took 940 us
    with a plane to a tile, and 78 with 64 planes.
    """
    tile = _plane(problem, elements)
    if 2 * tile.channels * tile.positions > elements:
        return tile
    return replace(tile, channels=min(power_of_two(problem.view.channels), elements // tile.positions))


def wastes(problem: Problem, positions: int) -> bool:
    """Whether planes waste much of tiles of so many positions, which could be in pieces; in a small problem another
    launch would cost more."""
    large = positions > SHORTEST_PIECE and problem.view.numel > FEW
    return large and filled(length_of_runs(problem), positions) < FULL


def _in_pieces(problem: Problem, elements: int) -> PassConfig:
    """A tile of many channels whose positions fill planes better, in rows of SHORTEST_PIECE at least."""
    length = length_of_runs(problem)
    longest = min(power_of_two(length), elements)
    pieces = [SHORTEST_PIECE << n for n in range((longest // SHORTEST_PIECE).bit_length())]
    best = max(filled(length, piece) for piece in pieces)
    positions = max(piece for piece in pieces if filled(length, piece) >= best - FULL_ENOUGH)
    return PassConfig(min(power_of_two(problem.view.channels), max(1, elements // positions)), positions)


def _rows_of_channels(problem: Problem) -> TilesConfig:
    """channels_last: tiles of whole rows of many channels."""
    share, runs = 4 if problem.dtype == "float64" else 1, runs_of(problem, problem.view, layouts_of(problem))
    view, wide = runs.view, runs.alignment * DTYPE_BYTES[problem.dtype] == WIDEST_LOAD
    read, write = _block_of_channels(view.channels, READ_CHANNELS), _block_of_channels(view.channels, WRITE_CHANNELS)
    if _small_evaluation(problem):
        # Rows as long as they are: values of channels then lie in the threads that need them.
        elements = _program_elements(view.numel, 1024)
        channels = min(power_of_two(view.channels), elements)
        return TilesConfig(PassConfig(read, 1), _few_a_thread(problem, PassConfig(channels, elements // channels)))
    by_runs = None if problem.backward else _runs_of_groups(problem)
    most, stages = (64, BACKWARD_STAGES) if problem.backward else (128, FORWARD_STAGES)
    blocks = view.samples * -(-view.channels // read)
    # A program merges a unit's partials at 4000 a microsecond.
    most_chunks = max(1, MOST_PARTIALS // max(1, view.group_channels))
    if not wide:
        positions = max(1, 2 * 32 * SCALAR_ELEMENTS // read)
        count = -(-view.spatial // positions)
        programs = SCALAR_PROGRAMS if runs.repeat == 1 else SCALAR_PROGRAMS // 2
        tiles = max(1, _shares(count, blocks * count // programs), -(-count // most_chunks))
        elements = 4 * 32 * SCALAR_ELEMENTS
        output = PassConfig(write, max(1, elements // write), 2, 4)
        return TilesConfig(by_runs or PassConfig(read, positions, tiles, 2, stages), output)
    positions = max(1, 512 // share // read)
    count = -(-view.spatial // positions)
    tiles = _tiles_of_a_program(count, blocks, most)
    if runs.repeat > 1:
        tiles = max(tiles, -(-count // most_chunks))
    reduction = PassConfig(read, positions, tiles, 1, stages)
    chunks = -(-count // tiles) * runs.repeat * (1 if problem.norm.per_batch else problem.view.group_channels)
    if tiles < 32 and (runs.repeat > 1 or (chunks >= MERGED and problem.view.group_channels <= READ_CHANNELS)):
        reduction = replace(reduction, positions=2 * positions, warps=2)
    elements = 2048 // share if write == WRITE_CHANNELS or not problem.backward else 1024 // share
    warps = max(1, elements * share // (512 if problem.backward else 1024))
    return TilesConfig(by_runs or reduction, PassConfig(write, max(1, elements // write), 2, warps))


def _small_evaluation(problem: Problem) -> bool:
    """Whether the pass that writes is the only launch of a small problem."""
    return problem.direction == "inference" and problem.view.numel <= SMALL_EVALUATION


def _few_a_thread(problem: Problem, tile: PassConfig) -> PassConfig:
    elements = 4 if problem.view.numel <= SMALL_HELD else 8
    return replace(tile, warps=max(1, tile.channels * tile.positions // (32 * elements)))


def _block_of_channels(channels: int, most: int) -> int:
    """Channels of a tile, at most so many: a power of two that divides the channels, if it makes rows of some length.
    Else long rows, although a part of the last block is empty: 72 channels in blocks of 16 took 21 us to write, and 11
    in blocks of 128, on (4, 72, 192, 192) in bf16."""
    whole = channels & -channels
    return min(whole if whole >= 32 else power_of_two(channels), most)


def _tiles_of_a_program(count: int, columns: int, most: int) -> int:
    """Tiles to a program, where the pass has ``columns`` times ``count``: few enough for 1000 programs, which fill the
    device, and at least 8, so that a program does more than wait for its first tiles."""
    return _shares(count, min(most, max(8, columns * count // 1000)))


def _shares(count: int, most: int) -> int:
    """The size of a share of ``count`` tiles, at most ``most``. Equal shares, where there are any of half that size,
    need no masks: 47 us against 57 on (16, 320, 64, 64)."""
    most = max(1, min(most, count))
    even = next(tiles for tiles in range(most, 0, -1) if count % tiles == 0)
    return even if 2 * even >= most else most


def _program_elements(total: int, most: int) -> int:
    """The elements of a program, from 256 to ``most``: few where the total is small, which then has programs on all
    multiprocessors."""
    return max(256, min(most, power_of_two(total // (2 * PROCESSORS))))


def whole_forward_for(problem: Problem) -> WholeConfig:
    """At most 16 elements a thread; 32 of long units, and 64 where these fill no tile: 8192 x 5120 in bf16 takes 44 us
    on 4 warps, 51 on 8 and 60 on 16, and 8192 x 8192 takes 68 on 8."""
    block, units = power_of_two(problem.reduced), problem.num_statistics
    narrow, size = unit_bytes(problem) < WIDE_LOAD, DTYPE_BYTES[problem.dtype]
    if block * units <= 2 * SMALL_HELD and block <= 8192:
        return _small_whole(block, units, narrow)
    if narrow and block <= 128:
        return _narrow_whole(block, size)
    if block <= 512:
        return _short_whole(problem, block, narrow)
    if 4096 <= block <= 8192 or (block == 16384 and narrow and size == 2):
        full = _fills(problem.reduced, block)
        thread = 64 if block > 4096 and units > 4 * PROCESSORS and size == 2 and not full else 32
    elif block > 8192:
        thread = 16
    else:
        thread = _thread_elements(block * units, 16, 32 if narrow else 16)
    return WholeConfig(1, max(1, min(16, block // (32 * thread))))


def _fills(length: int, block: int) -> bool:
    return 8 * length > 7 * block


def _short_whole(problem: Problem, block: int, narrow: bool) -> WholeConfig:
    """Many short units: one warp, with 32 elements a thread of 16 bits and 16 of 32. Where units fill their lanes two
    warps have wider runs of memory. In fp32 22790 x 158 takes 10.3 us on one warp and 15.1 on four, in bf16 32768 x 256
    takes 10.6 on two, 10.9 on one and 11.3 on four."""
    short, total = DTYPE_BYTES[problem.dtype] == 2, block * problem.num_statistics
    if total <= 4 * SMALL_HELD:
        return WholeConfig(SHORT_UNITS // block, 1)
    if _fills(problem.reduced, block) and not narrow and (block > 128 or problem.norm.activation is None):
        elements = 1024 if not short else 4096 if block == 512 else 2048
        return WholeConfig(elements // block, max(2, elements // 1024))
    if block <= 128 and short:
        return WholeConfig(1024 // block, 2)
    return WholeConfig((1024 if short or block == 512 else SHORT_UNITS) // block, 1)


def _narrow_whole(block: int, size: int) -> WholeConfig:
    """Many short units of narrow loads, whose lanes lie side by side: one warp, since two would share each unit.
    (200, 900, 3, 3) in bf16 takes 7.0 us on one warp with 32 units, and 9.7 on two with 16. In fp32 (95, 504, 5, 5)
    takes 7.0 us on two warps with 8 units, and 7.5 with 16."""
    if size > 2 and block < 64:
        return WholeConfig(SHORT_UNITS // 2 // block, 2)
    return WholeConfig(SHORT_UNITS // block, 1)


def _small_whole(block: int, units: int, narrow: bool) -> WholeConfig:
    """A warp to a unit, or several short units, as long as it fits: sums over warps wait for barriers. 200 x 200 in
    fp32 takes 1.66 us, and 1.81 with two warps. The many narrow loads of few units are spread over more."""
    if block <= 128:
        together = min(SHORT_UNITS // block, power_of_two(units // PROCESSORS if narrow else units))
        return WholeConfig(together, max(1, block * together // (32 * 4)))
    if block <= 512 and not ((narrow or block == 512) and units < PROCESSORS // 4):
        return WholeConfig(1, 1)
    return WholeConfig(1, 4 if block <= 1024 else 8)


def _thread_elements(total: int, most: int, warps: int = 16) -> int:
    """The elements of a thread, at most ``most``, with which so many in all have so many warps to a multiprocessor."""
    return min(most, power_of_two(total // (PROCESSORS * warps * 32)))


def fewest(unit: int, narrow: bool) -> int:
    """The elements of a thread in a small problem, whose time is that of one program from its first instruction to its
    last: fewer shorten the code, whose instructions come from memory too, and spread units over more warps."""
    return 2 if narrow and unit < 128 else 4


def early(programs: int, warps: int, elements: int) -> bool:
    """Whether parameters are loaded before the statistics of programs of so many elements, and wait for them in
    registers: where no program waits for another, the time of one access is saved."""
    return programs * warps <= PROCESSORS * MOST_WARPS and elements <= 32 * 32 * warps


def once(problem: Problem, config: WholeConfig, block: int) -> bool:
    """Whether the units of a program, which have the same parameters, share one load of them. Where a thread has few
    elements of each unit, each loads its own: no value then waits for another thread."""
    same = problem.view.groups == 1 and not problem.modulated
    return same and config.units > 1 and block * config.units > 32 * 8 * config.warps


def held_for(problem: Problem, seen: HeldUnits) -> HeldConfig:
    """2 or 4 elements a thread, a warp to a small unit of one channel; where there are many elements 8 or 16, and more
    of a forward of 16 bits and where units are neighbours in memory. Of such units enough for 32 or 64 bytes of each
    row: (25, 1597, 45) in bf16 takes 6.4 us in rows of 32 bytes, and 5.0 in rows of 64."""
    size, total = DTYPE_BYTES[problem.dtype], seen.units * seen.elements
    narrow, small = seen.load_bytes(problem) < WIDE_LOAD, total <= SMALL_HELD
    samples = power_of_two(seen.samples)
    rows = seen.affine == 2 and seen.rows == 1  # a thread has one place of several samples
    most = ALL_SAMPLES if small and not rows else ALL_SAMPLES // 2 if total <= 4 * SMALL_HELD else 0
    if problem.backward and seen.samples > 1 and samples * seen.elements <= most:
        thread = max(fewest(seen.elements, narrow), _thread_elements(total, 8))
        warps = max(1, min(8, samples * seen.elements // (32 * thread)))
        if rows:
            warps = max(2, samples * seen.elements // (32 * 16))
        return HeldConfig(samples, warps, all_samples=True)
    # Short rows cost memory time, but a small problem has more programs with them.
    row = 64 if total > 4 * SMALL_HELD else 32 if total > FEW_CONTIGUOUS else 0
    least = row // size if seen.contiguous else 1
    if seen.contiguous and seen.units < least * PROCESSORS // 4:  # short rows on many multiprocessors, not long on few
        least = max(1, min(4, SMALL_UNIT // seen.elements))
    units = max(least, _program_elements(total, 1024) // seen.elements)
    units = min(units, power_of_two(seen.units if seen.spans else seen.in_sample), MOST_HELD // seen.elements)
    if small:
        thread = 8 if seen.contiguous else 4 if seen.across == "sample" else fewest(seen.elements, narrow)
        if seen.affine == 0 and seen.across != "sample" and seen.elements <= 512 and not seen.contiguous:
            units, thread = max(1, min(units, 256 // seen.elements)), 16
        thread = max(thread, units * seen.elements // MOST_SMALL)
    elif narrow and problem.backward and 64 <= seen.elements <= 512 and not seen.contiguous:
        return _short_narrow(seen.elements, total > 4 * SMALL_HELD)
    elif seen.contiguous:
        thread = _thread_elements(total, 64 if size == 2 and not problem.backward else 32)
    else:
        few = problem.backward and narrow and seen.elements < 2048
        thread = _thread_elements(total, 8 if few else 16 if problem.backward or size > 2 else 32)
    return HeldConfig(max(1, units), max(1, min(16, units * seen.elements // (32 * thread))))


def _short_narrow(unit: int, many: bool) -> HeldConfig:
    """Short units of narrow loads in a backward: one warp with 16 elements a thread, or 32 of longer units. In bf16
    (22, 2048, 5, 5, 5) takes 16 us with four units on one warp, and 29 with eight on four."""
    if not many:
        return HeldConfig(512 // unit, 2)
    return HeldConfig((512 if unit <= 128 else 1024) // unit, 1)


def holding_pays(problem: Problem, seen: HeldUnits) -> bool:
    """Whether units in registers are faster than tiles: one launch, and one read, but whole units to a program.

    Where a tile is not full its lanes are wasted: (16, 640, 13, 13) in 32 groups in bf16 takes 14 us held, 41 % full,
    and 6 whole. Rows of a few neighbouring units are short for memory: (16, 256, 56, 56) in fp32 and channels_last
    takes 87 us held, 4 units to a row, and 43 in tiles.
    """
    size, small = DTYPE_BYTES[problem.dtype], problem.view.numel <= FEW
    full = seen.rows * seen.columns / seen.elements
    if seen.contiguous:
        together = MOST_HELD // seen.elements
        if together >= seen.in_sample or problem.view.numel <= FEW_CONTIGUOUS:
            return True
        if small:
            narrow = seen.load_bytes(problem) < WIDE_LOAD
            return size * together >= 16 and seen.elements <= (1024 if narrow else 2048)
        return size * together >= 64 and full >= 0.75
    if seen.across == "sample":
        return _holding_samples_pays(problem, seen, full)
    short = small and seen.elements <= LARGE_HELD
    if not problem.backward:
        return short or full >= 0.6
    if problem.view.group_channels == 1 and seen.input.order == "channels_first":
        return short or full >= 0.6 or size > 2
    return short or (full >= 0.75 and (size > 2 or load_bytes(problem) >= WIDE_LOAD))


def _holding_samples_pays(problem: Problem, seen: HeldUnits, full: float) -> bool:
    """:func:`holding_pays` of a channel of all samples: in bf16 (128, 2048, 7, 7) takes 53 us held, and 22 in tiles of
    spread planes. Few large channels leave multiprocessors idle: (13, 21, 29, 29) takes 5.4 us held backward, and 4.2
    in tiles. Each sample's scale and shift take registers: (38, 64, 5, 5, 7) took 58 us held backward, and 8 in tiles.
    """
    if problem.view.numel > FEW:
        return tiled(problem) is problem.folded
    if seen.affine == 3:
        return seen.elements <= (ALL_SAMPLES // 2 if problem.backward else ALL_SAMPLES)
    return seen.elements <= LARGE_HELD or (full >= 0.5 and (not problem.backward or seen.elements <= 8192))


def fuller_whole(problem: Problem, seen: HeldUnits) -> bool:
    """Whether a small unit fills a tile of one axis better than one of two: (43, 768, 3, 3) in 32 groups takes 2.5 us
    whole, 84 % full, and 3.5 held, 42 % full."""
    held, whole = problem.reduced / seen.elements, problem.reduced / power_of_two(problem.reduced)
    return problem.reduced <= SMALL_UNIT and held < 0.7 * whole


def whole_pays(problem: Problem) -> bool:
    """Whether units in one piece of memory are faster in the registers of one program than read twice.

    For a large unit of several channels an affine per element costs more than a second read: (32, 256, 56, 56) in
    bf16 took 86 us whole and 53 in tiles. A unit of one channel has one affine; of 16 bits (25, 64, 160, 160) takes
    75 us whole and 65 in tiles, of 32 bits 96 and 122.
    """
    view, size, block = problem.view, DTYPE_BYTES[problem.dtype], power_of_two(problem.reduced)
    if problem.reduced <= SMALL_UNIT or view.spatial == 1:
        return True
    if view.group_channels > 1:
        return False
    full = 4 * problem.reduced >= 3 * block
    return block <= 8192 or (block == 16384 and (full or size > 2)) or (full and size > 2)


def rows_forward_for(problem: Problem) -> RowsForwardConfig:
    """8 to 16 elements a thread, two steps or more: 65 us on 16384 x 4096 in bf16, where one step takes 68. Planes, of
    one weight each, in short steps: (4, 2030, 64, 133) in bf16 takes 89 us, and 157 in steps of 4096."""
    block = power_of_two(problem.reduced)
    if problem.view.spatial > 1:
        return RowsForwardConfig(1024, 4)
    return RowsForwardConfig(2048 if block <= 4096 else 4096, 4 if block <= 4096 else 8 if block <= 8192 else 16)


def rows_backward_for(problem: Problem) -> RowsBackwardConfig:
    """Short rows: small programs, 16 warps to a multiprocessor, each with 16 elements a thread and three steps in
    flight: 45 us, not 99, on 100000 x 256 in bf16 with silu. From rows of 1024 on, 32 elements and 8 warps. Narrow
    loads are not in flight ahead of their use: fewer elements and more warps.

    Long rows: 16 to 32 elements a thread, beside the sums of p and q, and 16 warps to a multiprocessor: 40673 x 3012 in
    bf16 takes 217 us with 4 warps, and 323 with 16 and two rows. Of rows beyond 4096 one program to a multiprocessor:
    4000 x 6000 in bf16 takes 50 us, and 56 with two. On 16384 x 4096 steps over neighbouring rows take 101 us, and
    programs with rows of their own 107.
    """
    view, size = problem.view, DTYPE_BYTES[problem.dtype]
    block = power_of_two(view.channels + row_window(problem) - 1)
    if problem.dtype == "float64":
        elements = max(block, 2048)
        warps = min(16, elements // 256)
        return RowsBackwardConfig(elements // block, warps, PROCESSORS * (16 // warps), reload=block > 2048)
    if block > 8192:
        # Of 16 bits, with p beside q, the rows do not fit: 2000 x 12288 in bf16 takes 76 us, and 61 loaded twice.
        return RowsBackwardConfig(1, 16, PROCESSORS, reload=problem.norm.has_mean and size == 2)
    if block >= 4096:
        full = 8 * view.channels > 7 * block
        if problem.dtype == "float32":
            return RowsBackwardConfig(1, block // 512, PROCESSORS * (8192 // block), stages=1 if full else 3)
        warps = 16 if full and block == 8192 and row_window(problem) == 1 else 8
        if block == 4096 and (problem.norm.activation or load_bytes(problem) < WIDEST_LOAD):
            warps = 4
        programs = PROCESSORS * (1 if block == 8192 and row_window(problem) == 1 else 16 // warps)
        return RowsBackwardConfig(1, warps, programs, stages=3)
    if _one_program(problem, block):  # whose sums are the gradients
        # A thread has both rows, whose sums then need no other thread.
        thread = max(block // MOST_SMALL, 4 if view.samples == 1 else max(2, load_bytes(problem) // size))
        return RowsBackwardConfig(max(1, view.samples), max(1, block // (32 * thread)), 1)
    wide, few = load_bytes(problem) >= WIDE_LOAD or row_window(problem) > 1, view.numel < FEW_ELEMENTS
    elements = 32 * (16 if few else 32 if block >= 1024 else 16 if wide else max(8, block // 16))
    warps, rows = max(1, block // elements), max(1, elements // block)
    resident = 8 if block >= 1024 else 16 if wide or block == 512 else 32
    # The sums of a program take 8 bytes an element, and are to be few beside its rows.
    programs = max(2 * PROCESSORS, min(PROCESSORS * resident // warps, 3 * size * view.samples // 32))
    return RowsBackwardConfig(rows, warps, programs, stages=3 if wide else 1)


def _one_program(problem: Problem, block: int) -> bool:
    return problem.view.samples <= 2 and problem.view.samples * block <= ONE_PROGRAM


def holding_rows_pays(problem: Problem, seen: HeldUnits) -> bool:
    """Whether a backward of rows is faster with partials of each row, which cost a large problem more than it gains:
    216 x 1024 in fp32 takes 4.3 us held, and 5.1 with the sums of rows in registers."""
    small = seen.units * seen.elements <= SMALL_HELD and seen.elements <= LARGE_HELD
    return small and not _one_program(problem, seen.elements)


def most_row(problem: Problem) -> int:
    """The longest row whose backward fits the registers of a program."""
    return MOST_ROW // 2 if problem.dtype == "float64" else MOST_ROW


def by_columns(problem: Problem) -> bool:
    """Whether a backward of rows goes by columns: where a row is long for the registers of a program, or rows are few
    for the multiprocessors, of narrow loads some more. 584 rows of 16384 in bf16 took 60 us by rows and 39 by columns.
    """
    few = problem.view.samples <= (4 if load_bytes(problem) >= WIDE_LOAD else 16) * PROCESSORS
    length = problem.reduced
    return length > most_row(problem) or length > LONG_ROW or (few and length > LONG_ROW * 2 // 3)


def columns_backward_for(problem: Problem) -> ColumnsBackwardConfig:
    """Each program leaves the sums of its rows: few programs with many rows move fewer bytes, many end sooner. All rows
    to a program where rows are few and so long that their columns have enough programs."""
    share, view = 4 if problem.dtype == "float64" else 1, problem.view
    elements = 1024 // share
    steps = max(2, min(32, power_of_two((view.numel >> 19) + 1) // 2))
    if view.samples <= 16 and view.channels > PROCESSORS * elements:
        steps = view.samples
    large = view.numel >= LARGE_ROWS and load_bytes(problem) >= WIDE_LOAD
    return ColumnsBackwardConfig(2048 // share, 8, 2 * PROCESSORS, elements, steps, 4, 3 if large else 1)
