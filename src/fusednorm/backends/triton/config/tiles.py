"""The passes of triton.tiles: pure functions of the problem, as tiles see it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from fusednorm.backends.triton.config.device import PROCESSORS, SMALL_HELD, most_loaded, program_elements, shares
from fusednorm.backends.triton.config.kinds import PassConfig, TilesConfig
from fusednorm.backends.triton.config.long_rows import long_rows, read_by_long_rows
from fusednorm.backends.triton.runs import (
    FEW,
    READ_CHANNELS,
    WIDE_LOAD,
    WIDEST_LOAD,
    filled,
    for_moments,
    layouts_of,
    length_of_runs,
    load_bytes,
    power_of_two,
    runs_of,
    single_floats,
)
from fusednorm.problem import DTYPE_BYTES, Problem, View

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
#: The first pass of the backward reads dy and x in tiles of 2 KB, with PLANE_STAGES of them on their way to shared
#: memory. A program takes a whole plane, but no more of one of LARGE_PLANE positions than leaves PLANE_PROGRAMS
#: programs, of one warp each, which hide each other's arithmetic: (1, 320, 440, 440) in bf16 with gelu_tanh reads in 70
#: us so, and in 108 with 640 programs of two warps. One pair of partials for a plane is what torch's backward has too.
#: The second pass reads tiles of 4 KB, two to a program. One tile of 8 KB to a program took 30.7 us, not 27.3, on
#: (2, 320, 128, 128), and 168, not 161, on (32, 512, 64, 64).
LARGE_PLANE, PLANE_PROGRAMS, PLANE_STAGES = 1 << 14, 2500, 3
#: Odd planes of so many positions are read in tiles of twice the size, by ODD_PROGRAMS programs at least.
LONG_ODD_PLANE, ODD_PROGRAMS = 1 << 13, 600
#: Positions of a plane of single loads of 32 bits beyond which its tiles are a program's each.
LONG_SINGLE_PLANE = 2048
#: Positions of a tile of short planes.
MOST_SHORT_PLANE = 256
#: Odd planes of more positions than this, and of less than twice as many, are written in pieces of so many.
NARROW_PLANE = 16
#: Pieces of a plane of single loads of 32 bits up to which each is a program's.
FEW_PIECES = 3
#: Programs that few tiles of planes are spread over.
FEW_TILES = 100
#: Tiles of a plane from which on two programs share it where planes are fewer than multiprocessors.
SHARED_PLANE = 6
#: Every program of the pass that writes merges its unit's partials itself, up to so many; for more of them one more
#: launch does it, at 3 us. A backward merges them with their weights: 256 of them cost 5 us on (1, 512, 256, 256).
MERGED, MERGED_BACKWARD = 512, 64
#: Programs that start in the time of one more launch.
MOST_STARTS = 4096
#: Programs of a forward's pass that reads planes of several channels from which on they have one warp, whose threads
#: then have many loads in flight: batch_norm of (22, 1280, 18, 18) in bf16 takes 21.7 us, and 28.3 with four warps.
MANY_READS = 1500
#: Programs of a forward's pass that writes, and elements of their tiles within a unit, for which tiles of several units
#: are faster: (6, 1000, 9, 9) in 4 groups in bf16 takes 5.7 us in tiles of 16 channels, 9.5 in tiles of 2.
MANY_WRITES, SMALL_WRITE = 2000, 1024
#: channels_last: tiles are rows of 64 channels in a pass that reads, and of 128 in a pass that writes where 128 divides
#: the channels. Rows of 256 bytes of bf16 reach 93 % of a copy's speed and rows of 128 bytes 86 %, but a thread that
#: sums keeps a mean and an M2, or p and q, of each of its channels.
WRITE_CHANNELS = 128
#: Tiles that a reading pass over channels_last has on their way to shared memory, and the bytes of one. With few warps
#: and deep stages these passes took 36 us against 44 with unrolled loads on (16, 320, 64, 64), and 20 against 25 on
#: (2, 320, 128, 128). A backward's tiles are on two warps: (32, 512, 64, 64) in bf16 with silu takes 191 us so, and 214
#: on one. Narrow loads are not ahead of their use.
FORWARD_STAGES, BACKWARD_STAGES, TILE_BYTES, NARROW_STAGES = 4, 3, 2048, 6
#: Bytes of a row of channels in a forward, whose next row then is on another page: batch_norm of (115, 2521, 256) in
#: fp16, spread, takes 160 us in tiles of 256 bytes by 32 rows, and 125 where its output is in tiles of 1024 by 8.
LONG_ROW_BYTES = 1 << 20
#: Elements that one program of such a pass takes at least and at most, and about how many programs there are of a
#: forward, of a backward of channels that repeat, and with a smooth activation, of 32 bits or with scale and shift: the
#: backward of (2, 307, 256, 363) in one group in fp16 with silu takes 190 us so, and 197 with twice as many.
FEWEST_READ, MOST_READ, FORWARD_PROGRAMS, BACKWARD_PROGRAMS, SMOOTH_PROGRAMS = 1 << 12, 1 << 16, 1000, 500, 800
#: Programs to a multiprocessor of a backward whose channels do not repeat, with a smooth activation of 32 bits, and of
#: 16 bits: instance_norm of (1, 640, 24, 32, 19) with silu takes 63 us with 6, and 67 with 4, (4, 96, 300, 200) in fp16
#: with silu 77 with 8, and 87 with 5, (2, 320, 200, 200) in bf16 74 and 82, (3, 2048, 6989) with scale and shift and
#: gelu 137, and 153 with 6. In fp16 batch_norm of (121, 1280, 3, 8) takes 16.1 us with 4, and 19.7 with 14.
LOADED, LOADED_SLOW, LOADED_SMOOTH = 5, 6, 8
#: Programs of a backward's pass that reads points with scale and shift.
POINT_PROGRAMS = 300
#: Channels of points with scale and shift that are many.
LONG_POINTS = 512
#: Loads narrower than WIDE_LOAD are not in flight ahead of their use, or are as many as the elements. In channels_last
#: a thread then takes SCALAR_ELEMENTS, and more programs hide the time that memory takes: 59 us, not 137, for the
#: moments of (1, 3, 233, 233, 233) in fp16. But a unit is to have MOST_PARTIALS at most.
SCALAR_ELEMENTS, SCALAR_PROGRAMS, MOST_PARTIALS = 8, 4000, 16384
#: Rows of channels_last that are few for a sample, of one position each and of several.
MOST_FEW_ROWS, MOST_FEW_LONG_ROWS = 32, 64
#: Tiles of rows of several positions that one program of a backward takes at least, how many such programs leave so
#: many partials that larger tiles pay, and the most programs of one warp.
REPEATED_TILES, MANY_REPEATED, REPEATED_PROGRAMS = 8, 64, 1800
#: Partials of a channel that repeats in a forward's rows of several positions, times an element's bytes, beyond which
#: programs take twice as much.
REPEATED_BYTES = 8192
#: batch_norm's planes of so many bytes, or of narrow loads and so many, are spread over the samples. Each element of a
#: plane then has partials of its own, 8 bytes, so there must be some samples. A small input is as fast in planes.
SHORT_PLANE, LONG_PLANE, SPREAD_SAMPLES, SPREAD_ELEMENTS = 512, 4096, 16, 1 << 18
#: Elements of an evaluation whose programs are short.
SMALL_EVALUATION = 1 << 20
#: Elements beyond which few programs of one warp do not keep memory busy.
MANY = 1 << 20


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


def of_points(problem: Problem) -> Problem | None:
    """batch_norm of points with a scale or shift of their own as one sample without these; None for other problems."""
    if not (problem.norm.per_batch and problem.modulated and problem.view.spatial == 1 and problem.added is None):
        return None
    whole = replace(problem, scale_dtype=None, shift_dtype=None).folded
    return None if problem.view.samples == 1 or whole.view.samples > 1 else whole


def points_passes_for(sample: Problem) -> TilesConfig:
    """The passes of points, see :func:`of_points`. The one that writes an output by narrow loads has a scale and a
    shift for each element: on an H100 (6000, 30) in bf16 takes 6.2 us on 8 warps, and 7.3 on 4."""
    found = _passes_for(sample)
    if sample.backward and load_bytes(sample) == WIDEST_LOAD:
        # (8000, 512) in fp16 takes 22.6 us so, and 33.1 with 5 tiles to a program.
        read = found.reduction
        count, blocks = -(-sample.view.spatial // read.positions), -(-sample.view.channels // read.channels)
        tiles = max(read.tiles, shares(count, blocks * count // POINT_PROGRAMS))
        found = replace(found, reduction=replace(read, tiles=tiles))
    if load_bytes(sample) >= WIDE_LOAD:
        return found
    if sample.backward and DTYPE_BYTES[sample.dtype] == 2 and sample.norm.smooth and found.output.warps == 2:
        # (65536, 53) in bf16 with silu takes 27.6 us so, and 31.0 on two warps.
        return replace(found, output=replace(found.output, warps=4))
    if found.output.warps != 4:
        return found
    if sample.direction == "inference":
        return found  # (65536, 45) in fp16 with gelu_tanh takes 8.8 us so, and 12.6 on 8
    if not sample.backward:
        return replace(found, output=replace(found.output, warps=8))
    if sample.view.numel > 2 * FEW:
        return found
    read, output = found.reduction, replace(found.output, warps=2)
    if sample.view.channels > LONG_POINTS:
        # In halves: (1433, 1949) with silu takes 31.0 us in fp16 and 40.5 in fp32 so, and 68 and 62 as below, (2500,
        # 701) with relu in fp16 19.3 and 42.7, but (5000, 301) with silu 18, and 17.4. Few programs have more warps:
        # (389, 871) in bf16 with gelu takes 9.3 us so, and 16.1 on two.
        read = replace(read, positions=max(1, read.positions // 2))
        few = _one_tile_programs(sample.view, read) <= 2 * PROCESSORS
        return TilesConfig(replace(read, warps=4 if few else 2), found.output)
    # (15869, 154) in fp16 takes 18.4 us so, and 21.0 with the warps the other way round. Of large tiles in halves
    # (23725, 33) in bf16 with leaky_relu takes 14.9 us, whole 19.1 on 8, and 26.3 on 4.
    if DTYPE_BYTES[sample.dtype] == 2 and read.channels * read.positions > 2048:
        return TilesConfig(replace(read, positions=read.positions // 2), replace(output, tiles=1))
    if DTYPE_BYTES[sample.dtype] == 2 and read.channels == 16:
        # (65536, 13) in bf16 with silu takes 11.9 us so, and 14.4 in two tiles of half the lanes on four warps.
        return TilesConfig(replace(read, positions=2 * read.positions, warps=8), replace(output, tiles=1))
    return TilesConfig(replace(read, warps=max(4, read.warps)), output)


def passes_for(problem: Problem) -> TilesConfig:
    """The passes of a problem as tiles see it."""
    found, long = _passes_for(problem), long_rows(problem)
    return found if long is None else replace(found, reduction=long)


def other_reads(problem: Problem, default: TilesConfig) -> Iterator[PassConfig]:
    """The passes that read in another form than the default, for tuning: tiles, and long rows, of which two are tried
    where the default is in tiles."""
    if default.reduction.long:
        yield _passes_for(problem).reduction
        yield from read_by_long_rows(problem)
    else:
        yield from islice(read_by_long_rows(problem), 0, None, 2)


def _passes_for(problem: Problem) -> TilesConfig:
    """The passes in tiles of channels and positions."""
    view = problem.view
    if view.spatial == view.groups == 1 and not problem.norm.per_batch and not problem.backward:
        return _pieces_of_rows(problem)
    return (_planes if problem.layout.order == "channels_first" else _rows_of_channels)(problem)


def _pieces_of_rows(problem: Problem) -> TilesConfig:
    """A forward of rows of one group: pieces of a row to a program. Few programs have many warps, and many few: in fp16
    rms_norm of 20 x 14001 with silu writes in 4.0 us on 8 warps, and 4.3 on 4, 48 x 65536 in bf16 takes 7.7 us on 4,
    and 7.5 on 2, 400 x 50002 40 and 35. Wide loads are read by 8 warps where there is no mean, or few programs: 48 x
    65536 takes 7.2 us so, and 7.5 on 4, layer_norm of 12 x 13098 in fp32 3.7 and 3.8, but 300 x 30000 in bf16 15.7, and
    15.5."""
    share = 4 if problem.dtype == "float64" else 1
    row, length, count = power_of_two(problem.view.channels), problem.view.channels, problem.view.samples
    written = count * -(-length // (TILE // 2))
    # (1500, 18001) in fp32 with gelu takes 92 us so, and 98 with two.
    some = written <= 4 * PROCESSORS or (problem.norm.smooth and single_floats(problem))
    if load_bytes(problem) == 2:
        # (354, 14333) in bf16 with relu takes 14.7 us so, and 15.9 on two, (300, 15001) in fp16 with gelu 15.9 and 17.
        some = written <= 20 * PROCESSORS
    warps = 8 if 4 * written <= 5 * PROCESSORS else 4 if some else 2
    wide = load_bytes(problem) >= WIDE_LOAD or DTYPE_BYTES[problem.dtype] > 2
    read = 8 if wide and (not problem.norm.has_mean or count * -(-length // TILE) <= PROCESSORS) else 4
    output = PassConfig(min(row, TILE // 2 // share), 1, warps=warps)
    return TilesConfig(PassConfig(1, min(row, TILE // share), warps=read), output)


def merged(problem: Problem) -> int:
    """How many partials of a unit every program of the pass that writes merges itself, at most."""
    return MERGED_BACKWARD if problem.backward else MERGED


def _planes(problem: Problem) -> TilesConfig:
    """channels_first: tiles of many positions; where these are few, of as many channels of one group as fit."""
    if problem.backward:
        return _planes_backward(problem)
    share = 4 if problem.dtype == "float64" else 1
    per_batch = problem.norm.per_batch
    tile = _planes_across if per_batch else _plane
    reduction = _for_moments(problem) or tile(problem, _most_read(problem))
    narrow = load_bytes(problem) < WIDE_LOAD
    odd = single_floats(problem)
    if per_batch and odd and TILE < length_of_runs(problem) <= 2 * TILE:
        reduction = PassConfig(1, 2 * TILE)  # (8, 2560, 77, 77) takes 400 us so, and 522 in two tiles
    elif per_batch and odd and reduction == PassConfig(1, 2 * TILE) and _programs(problem, reduction) <= 3 * PROCESSORS:
        reduction = PassConfig(1, TILE)  # (21, 1, 102985) with silu takes 11.3 us so, and 13.6 in tiles of twice that
    elif per_batch and narrow and DTYPE_BYTES[problem.dtype] == 2 and reduction == PassConfig(1, TILE):
        reduction = PassConfig(1, TILE, warps=2)  # (3, 1441, 4557) in bf16 takes 37.5 us so, and 42.8 with 4
    if per_batch and reduction.channels > 1 and _programs(problem, reduction) > MANY_READS:
        # Short planes are two: (100, 768, 9, 9) in fp16 takes 19.2 us so, and 22.1 with one.
        reduction = replace(reduction, warps=2 if reduction.positions <= 128 else 1)
    small = problem.view.numel <= SMALL_HELD and _programs(problem, reduction) <= PROCESSORS
    if per_batch and narrow and small and DTYPE_BYTES[problem.dtype] == 2 and reduction == PassConfig(4, 1024):
        # (33, 8, 27, 19) in fp16 with scale and shift takes 4.7 us so, and 5.6, (24, 12, 27, 27) in bf16 with relu 5.6
        # and 6.5.
        reduction = PassConfig(4, 512, warps=2)
    if _small_evaluation(problem):
        elements = program_elements(problem.view.numel, 1024)
        return TilesConfig(reduction, _few_a_thread(problem, tile(problem, elements)))
    # Tiles within a unit merge its partials, which does not pay where they are small and many.
    within = _plane(problem, TILE // share)
    if within.channels * within.positions <= SMALL_WRITE and _programs(problem, within) > MANY_WRITES:
        tile = _planes_across
    write = tile(problem, TILE // share // 2)
    size, length = DTYPE_BYTES[problem.dtype], length_of_runs(problem)
    if size == 2 and wastes(problem, write.positions):
        # Of one piece a second tile would be empty: (100, 768, 9, 9) with scale and shift in fp16 takes 22.1 us with
        # one, and 24.2 with two.
        output = _written_in_pieces(problem, TILE // 2)
        if output.positions == 512 and output.warps == 4 and not narrow:
            output = replace(output, warps=2)  # (4, 512, 51, 48) in 2 groups in bf16 takes 12.1 us so, and 13.1
        return TilesConfig(reduction, replace(output, tiles=2 if length > output.positions else 1))
    if length > write.positions:
        # Of three tiles a second program would have one: (4, 148, 4337) in fp32 takes 14.6 us with one, 18.8 with two.
        # So would few programs be half as many: instance_norm of (1, 4, 224, 224) in bf16 takes 3.6 us so, and 4.1.
        few = _programs(problem, write) <= 2 * PROCESSORS
        tiles = 1 if few or -(-length // write.positions) == 3 else 2
        # (3, 320, 75, 75) in 20 groups in bf16 takes 10.6 us with two warps, and 12.7 with four, (20, 85, 99, 99) in
        # one with gelu 35.8 and 39.6, but of few programs instance_norm of (1, 1, 70160) in fp16 with gelu 4.0 and 3.5,
        # batch_norm of (19, 8, 56, 64) in bf16 with gelu_tanh 5.3 and 4.5.
        most = 2 * PROCESSORS * tiles if size == 2 and (narrow or tiles == 2) else PROCESSORS // 3
        warps = 4 if _programs(problem, write) <= most else 2
        return TilesConfig(reduction, replace(write, tiles=tiles, warps=warps))
    output = tile(problem, TILE // share)
    # Scale and shift take registers: (40, 591, 15, 3) in fp16 takes 8.3 us with 8 warps, and 9.7 with 4, but (22, 960,
    # 31, 31) in 32 groups in bf16 64 and 42.
    warps = 8 if narrow and problem.modulated and output.positions <= MOST_SHORT_PLANE else 4
    if odd and not problem.modulated and problem.view.group_channels > 1:
        warps = 2  # (12, 320, 15, 15) in 16 groups takes 5.9 us so, and 6.2 with 4
    elif size == 2 and narrow and not problem.modulated and output.channels == 4 and output.positions == 512:
        warps = 2  # (9, 660, 17, 17) in 15 groups in bf16 takes 6.6 us so, and 7.6 with 4
    if warps == 8 and per_batch and output.positions == 32 and problem.view.numel > 2 * MANY:
        # Short planes in halves: (78, 1895, 5, 5) in bf16 with relu takes 21.7 us so, and 31.9 whole on 8 warps.
        output, warps = replace(output, positions=16), 4
    return TilesConfig(reduction, replace(output, warps=warps))


def _most_read(problem: Problem) -> int:
    """Elements of a tile of a forward's pass that reads planes."""
    return TILE // (4 if problem.dtype == "float64" else 1) * (2 if problem.reduced >= LARGE_UNIT else 1)


def _for_moments(problem: Problem) -> PassConfig | None:
    """The pass for the moments where it sees a forward otherwise than the pass that writes: batch_norm's samples as
    one, or a group's channels, which follow one another, as one channel of all its positions."""
    source = for_moments(problem)
    if source.view == problem.view:
        return None
    if source.norm.per_batch:
        return passes_for(source).reduction
    warps = 2 if single_floats(problem) else 4
    return PassConfig(1, min(power_of_two(length_of_runs(source)), _most_read(problem)), warps=warps)


def _planes_backward(problem: Problem) -> TilesConfig:
    view, wide = problem.view, {"float32": 2, "float64": 4}.get(problem.dtype, 1)
    large = view.spatial >= LARGE_PLANE
    read, warps = _planes_across(problem, 1024 // wide), 2
    length, narrow = length_of_runs(problem), load_bytes(problem) < WIDE_LOAD
    odd, alone = narrow and wide == 1, narrow and wide == 2 and length > LONG_SINGLE_PLANE
    if alone:
        # Narrow loads are not ahead of their use: (10, 192, 97, 97) in fp32 takes 123 us with a tile to a program, and
        # 142 with 19 of 512 positions.
        full = filled(length, 2048) >= FULL
        read, warps = PassConfig(1, 2048 if full else 1024), 8 if full else 4
    elif wastes(problem, read.positions):
        read = _in_pieces(problem, 1024 // wide)
    elif odd and view.spatial >= LONG_ODD_PLANE:
        # Half as many windows that are not whole: (13, 33, 127, 127) in bf16 with silu takes 22 us so, and 25 in tiles
        # of 1024.
        read = _planes_across(problem, 2048)
    elif large:
        read, warps = replace(read, positions=1024), wide
    elif wide == 2 and read == PassConfig(1, 512) and 512 < length <= 1024:
        # (41, 1400, 880) takes 241 us so, and 299 with two tiles of half the size on two warps.
        read, warps = PassConfig(1, 1024), 4
    singles = single_floats(problem) and view.group_channels > 1
    if singles and read == PassConfig(1, 512):  # (12, 320, 17, 17) in 20 groups takes 8.2 us so, and 9.1 with one
        read, warps = PassConfig(2, 512), 4
    count = -(-length // read.positions)
    programs = _programs(problem, read)
    if odd:
        # (4, 836, 39, 53) in 11 groups in bf16 takes 21.3 us with 8 tiles to a program, and 22.6 with 17.
        most = count // 2 if programs < 2 * ODD_PROGRAMS * count and count > 8 else count
        tiles = shares(count, programs // ODD_PROGRAMS if large else most)
        warps = 4 if programs // tiles < 2 * ODD_PROGRAMS else 2
    elif alone or (singles and count <= FEW_PIECES):
        tiles = 1  # (30, 960, 13, 13) in 32 groups in fp32 with silu takes 45.6 us so, and 57 with three
    else:
        tiles = shares(count, max(min(8, programs // 1000), programs // PLANE_PROGRAMS) if large else count)
    some = (3 if wide == 1 else 2) * PROCESSORS
    if tiles == count >= 2 * SHARED_PLANE and wide <= 2 and not odd and programs // tiles < some:
        # (2, 1280, 40, 40) in 32 groups in fp16 takes 13.3 us so, and 14.8 by planes, (17, 8, 24, 24, 24) in 4 in fp32
        # with relu 12.6 and 16.4.
        tiles = shares(count, count // 2)
    merges = not problem.norm.per_batch and 2 * view.group_channels <= MERGED_BACKWARD
    if programs < PROCESSORS * count and count >= SHARED_PLANE and tiles == count and merges:
        tiles = shares(count, count // 2)  # (9, 7, 95, 107) in fp32 in one group takes 9.2 us so, and 12.1 by planes
    if problem.norm.per_batch and 1 < count == tiles and programs < 2 * PROCESSORS * count:
        # (15, 3, 13637) in fp16 takes 5.0 us with three tiles to a program, and 6.2 with 7, (68, 2, 8437) with
        # gelu_tanh 9.8 with two, and 11.6 with 5, (4, 1, 16, 14, 5) in fp32 with relu 2.6 with one, and 3.1 with three.
        tiles = shares(count, max(1, count // 2))
    if programs <= 2 * PROCESSORS and (merges or problem.norm.per_batch):
        # (2, 5, 24, 24, 24) in fp16 with relu takes 3.0 us with one tile to a program, and 4.7 with 7, (3, 8, 100, 100)
        # in bf16 with silu 4.7 with 2, and 6.3 with 5.
        tiles = min(tiles, max(1, programs // FEW_TILES))
    if programs // tiles <= 2 * PROCESSORS and read.channels * read.positions >= 1024:
        warps = max(warps, 4)  # batch_norm of (65536, 1) in fp32 takes 2.9 us so, and 3.8 on two warps
    reduction = replace(read, tiles=tiles, warps=warps, stages=PLANE_STAGES if tiles > 1 else 1)
    # Where a tile's channels belong to one unit, its program merges the unit's partials: one launch fewer.
    write = _plane(problem, 2048 // wide)
    if view.numel > MOST_STARTS * write.channels * write.positions:
        write = _planes_across(problem, 2048 // wide)
    pieces = wastes(problem, write.positions)
    if pieces:
        write = _written_in_pieces(problem, 2048 // wide)
    elif odd and write.positions == 2048 < length:  # (25, 45, 71, 71) in bf16 with silu takes 19.6 us so, and 21.6
        write = replace(write, positions=1024, warps=2)
    halves = problem.norm.per_batch and problem.modulated and narrow and view.numel > 2 * MANY
    if halves and read.positions == write.positions == 32 and tiles == 1:
        # As in the forward: (78, 1895, 5, 5) in bf16 with relu takes 33.8 us so, and 45.1 whole on twice the warps.
        return TilesConfig(replace(reduction, positions=16, warps=1), replace(write, positions=16, warps=2))
    narrow_plane = NARROW_PLANE < length < 2 * NARROW_PLANE and not problem.norm.per_batch
    if odd and narrow_plane and programs > 8 * PROCESSORS:
        # In us so and with half the warps and whole planes on twice: (64, 1600, 5, 5) in 8 groups in bf16 with relu
        # 21.4 and 27.8, (117, 1172, 21) in 4 with silu 33.3 and 42.8, (90, 1800, 17) in 5 31.6 and 39.6, (50, 1000, 19)
        # in 4 in fp16 12.7 and 15.7.
        return TilesConfig(replace(reduction, warps=4), replace(write, positions=NARROW_PLANE, warps=2))
    pieces = pieces and write.positions < length
    eights = wide == 1 and write.channels == 8 and load_bytes(problem) < WIDEST_LOAD
    if write.channels * write.positions <= (2 if eights else 1) * MOST_SHORT_PLANE:
        # (4, 1295, 7, 7) in 5 groups in bf16 takes 7.3 us so, and 9.5 on four warps, tiles of 8 channels of (90, 640,
        # 3, 11) in 16 groups with silu 17.9 and 23.2, of (100, 320, 7, 7) in 8 in fp16 9.4 and 12.0.
        write = replace(write, warps=2)
    if singles or (pieces and wide == 1 and not odd and write.positions > SHORTEST_PIECE):
        # Twice as many elements to a thread of whole planes, or half as many to a program of pieces: (64, 960, 9, 9) in
        # 32 groups in fp32 takes 35.8 us so, and 45.3, (1, 2560, 64, 40) in bf16 18.8, and 20.9.
        write = replace(write, positions=write.positions // (2 if pieces else 1), warps=2)
    elif odd and not pieces and write.channels > 1 and write.positions >= 1024 and view.numel > FEW:
        # (16, 512, 31, 31) in 32 groups in fp16 takes 19.5 us so, and 22.7 with four warps.
        write = replace(write, warps=2)
    # Few programs would be half as many: (9, 1, 75, 169) in fp16 takes 3.8 us with one tile, and 4.1 with two.
    few = 2 * _programs(problem, write) <= 3 * PROCESSORS
    return TilesConfig(reduction, replace(write, tiles=2 if length > write.positions and not few else 1))


def _programs(problem: Problem, tile: PassConfig) -> int:
    """The programs of a pass over planes with one such tile each."""
    view, length = problem.view, length_of_runs(problem)
    return view.samples * -(-view.channels // tile.channels) * -(-length // tile.positions)


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


def _written_in_pieces(problem: Problem, elements: int) -> PassConfig:
    """:func:`_in_pieces` of a pass that writes. The shortest pieces of odd planes in 16 bits are twice as long, on
    twice as many warps, which makes half as many programs: (92, 640, 19, 7) with scale and shift in 10 groups in bf16
    takes 19.8 us forward and 37 backward so, and 21.9 and 40.5 in pieces of 64, (15, 640, 35, 11) with silu in 32
    groups 18.9 backward, and 19.6."""
    tile = _in_pieces(problem, elements)
    odd = DTYPE_BYTES[problem.dtype] == 2 and load_bytes(problem) < WIDE_LOAD
    if odd and tile.positions == SHORTEST_PIECE < length_of_runs(problem):
        return replace(tile, positions=2 * tile.positions, warps=8)
    return tile


def _rows_of_channels(problem: Problem) -> TilesConfig:
    """channels_last: tiles of whole rows of many channels."""
    share, runs = 4 if problem.dtype == "float64" else 1, runs_of(problem, problem.view, layouts_of(problem))
    size = DTYPE_BYTES[problem.dtype]
    view, wide = runs.view, runs.alignment * size == WIDEST_LOAD
    read, write = _block_of_channels(view.channels, READ_CHANNELS), _written_channels(problem, view.channels)
    if _small_evaluation(problem):
        # Rows as long as they are: values of channels then lie in the threads that need them.
        elements = program_elements(view.numel, 1024)
        channels = min(power_of_two(view.channels), elements)
        return TilesConfig(PassConfig(read, 1), _few_a_thread(problem, PassConfig(channels, elements // channels)))
    moments = None if problem.backward else _for_moments(problem)
    blocks = view.samples * -(-view.channels // read)
    # A program merges a unit's partials at 4000 a microsecond.
    most_chunks = max(1, MOST_PARTIALS // max(1, view.group_channels))
    if not wide:
        # In a small problem fewer partials are worth more than more programs.
        positions = max(1, 2 * 32 * SCALAR_ELEMENTS * (2 if view.numel <= FEW else 1) // read)
        if problem.backward and size == 4 and positions // 2 < view.spatial <= 3 * positions // 4:
            # In one tile (67, 1973, 3, 3) in one group in fp32 with gelu takes 23.1 us, and 13.8 in two of half of it.
            positions //= 2
        count = -(-view.spatial // positions)
        programs = SCALAR_PROGRAMS if runs.repeat == 1 else SCALAR_PROGRAMS // 2
        tiles = max(1, shares(count, blocks * count // programs), -(-count // most_chunks))
        partials = -(-count // tiles) * view.group_channels
        if 2 * partials > MOST_PARTIALS and blocks * count >= 2 * tiles * PROCESSORS:
            # (1, 158, 16, 16, 16) in 2 groups in bf16 with scale and shift takes 9.5 us so, and 12.0, the backward of
            # (2, 229, 37, 37) in one in fp32 10.5, and 12.0.
            tiles *= 2
        elements = 4 * 32 * SCALAR_ELEMENTS
        output = _spread(view, PassConfig(write, max(1, elements // write), 2, 4))
        warps = 4 if count == 1 and not problem.backward else 2
        stages = BACKWARD_STAGES if problem.backward else NARROW_STAGES
        if tiles == 1 < count and problem.backward and size == 2 and view.channels > 16:
            # (40000, 25) in fp16 takes 9.1 us so, and 11.8 with one warp to 64 x 16 elements.
            return _with_positions(problem, view, moments, PassConfig(32, 128, 1, 4), output)
        if tiles == 1 < count:
            # Rows of 4 and few of 8 channels are two warps': (25, 3, 31, 31) in fp16 takes 5.4 us so, and 7.3 on one,
            # but (65536, 6) in bf16 6.8 and 5.2, (44, 2, 64, 64) in fp32 with silu 8.3 and 5.5. So are few of others in
            # a backward: (49, 133, 5, 5) in fp32 takes 5.0 us so, and 6.0 on one, (7, 13, 1024) in bf16 with gelu 5.3
            # and 6.2.
            short = read == 4 or (read == 8 and blocks * count <= 2 * PROCESSORS)
            # Some of 32 bits too: (23725, 18) with scale and shift takes 8.8 us so, and 9.4 on one, (16000, 31) 6.6 and
            # 7.1.
            few = view.numel <= SMALL_HELD * (2 if size == 4 and read == READ_CHANNELS // 2 else 1)
            alone = 2 if short or (problem.backward and few) else 1
            warps, stages = (4 if _few_singles(problem, runs.alignment, blocks * count, read) else alone), 1
            if view.channels <= read == READ_CHANNELS and size == 2 and not problem.backward:
                # On an H100 (10, 50, 30, 30) in bf16 takes 6.2 us so, and 6.9 in rows of 64 channels.
                read, positions = READ_CHANNELS // 2, 2 * positions
        elif problem.backward and problem.modulated and size == 2 and positions < view.spatial <= 4 * positions:
            # All positions of a sample: batch_norm of (110, 1693, 5, 5) in bf16 takes 27.4 us so, and 38.1 in halves.
            positions, tiles, warps = 2 * positions, 2, 4
        return _with_positions(problem, view, moments, PassConfig(read, positions, tiles, warps, stages), output)
    # (1, 128, 169, 169) in fp32 takes 28.2 us backward in tiles of 2 KB, and 30.9 in tiles of 4.
    positions = max(1, TILE_BYTES // size // read)
    count = -(-view.spatial // positions)
    slow = problem.norm.smooth and (size > 2 or problem.modulated)
    short = size == 2 and problem.norm.smooth and read <= 16
    if problem.backward and runs.repeat == 1:
        each = LOADED_SMOOTH if problem.norm.smooth and size == 2 else LOADED_SLOW if slow else LOADED
        # Half as many of twice the warps: in bf16 (16, 16, 128, 128) with gelu takes 19.4 us so, and 21.1, (229, 16,
        # 33, 33) in one group with silu 16.9 and 20.0.
        each = each // 2 if short else each
        tiles = _tiles_of_a_load(count, blocks, positions * read, each)
    else:
        programs = FORWARD_PROGRAMS if not problem.backward else SMOOTH_PROGRAMS if slow else BACKWARD_PROGRAMS
        tiles = _tiles_of_a_program(count, blocks, positions * read, programs)
    if runs.repeat > 1:
        tiles = max(tiles, -(-count // most_chunks))
    if not problem.backward and view.channels * size >= LONG_ROW_BYTES:
        reduction, output = PassConfig(256, 8, 4 if size == 2 else 2, 1, BACKWARD_STAGES), PassConfig(512, 8, 1, 4)
        return _with_positions(problem, view, moments, reduction, output)
    if problem.backward:
        reduction = PassConfig(read, positions, tiles, 2, BACKWARD_STAGES)
        of_few_rows = _of_few_rows(problem, view, runs.repeat)
        if of_few_rows is not None:
            reduction = of_few_rows
        elif runs.repeat > 1 and size == 2:
            reduction = _repeated(problem, reduction, view)
        elif runs.repeat == 1 and size == 4 and tiles >= 4 and blocks * -(-count // tiles) <= 300:
            # (91, 192, 64) with silu takes 10.8 us so, and 12.2, (1, 1280, 56, 8) with gelu_tanh 8.3 and 9.0.
            reduction = replace(reduction, positions=positions // 2, warps=1)
        if short and reduction.warps == 2:
            # (45, 2, 139, 139) in bf16 with gelu_tanh takes 14.8 us so, and 18.1 on two warps, (17, 16, 307, 128) in 4
            # groups with silu 34.8 and 36.8.
            reduction = replace(reduction, warps=4)
        return _with_positions(problem, view, None, reduction, _spread(view, _gradients_of_channels(problem, write)))
    reduction = PassConfig(read, positions, tiles, 1, BACKWARD_STAGES if size == 2 else FORWARD_STAGES)
    chunks = -(-count // tiles) * runs.repeat * (1 if problem.norm.per_batch else problem.view.group_channels)
    # Of channels that repeat (1, 3, 73, 73, 73) in 3 groups in fp16 takes 12.3 us so, and 13.9 on one warp, batch_norm
    # of (16, 3, 224, 224) 14.2 and 17.5, but instance_norm of (8, 3, 256, 256) 9.7, and 8.9, batch_norm of (65536, 28)
    # 10.1, and 9.6.
    least = MERGED if runs.repeat == 1 else 4 * MERGED
    some = view.samples > 1 or view.numel > 3 * MANY or runs.repeat > 1
    # batch_norm of (65536, 128) in bf16, whose chunks are as many, takes 16.9 us so, and 18.2 with twice the positions.
    many = chunks > least or (chunks == least and not (size == 2 and problem.norm.per_batch and runs.repeat == 1))
    if tiles * positions < 256 and many and some and problem.view.group_channels <= READ_CHANNELS:
        reduction = replace(reduction, positions=2 * positions, warps=2)
    elif problem.dtype == "float32" and view.numel > MANY and blocks * -(-count // tiles) <= 3 * PROCESSORS:
        # (91, 192, 64) with silu takes 8.8 us so, and 9.1 with twice the positions on two warps, (57, 32, 24, 32) with
        # scale and shift and relu 9.6 and 10.0.
        reduction = replace(reduction, positions=max(1, positions // 2))
    elif problem.dtype == "float32" and view.numel > MANY and blocks * -(-count // tiles) <= 4 * PROCESSORS:
        # (1, 1263, 35, 35) takes 13.6 us forward with 2 warps, and 15.2 with one.
        reduction = replace(reduction, warps=2)
    count = -(-view.spatial // (tiles * reduction.positions))
    least = (5 if size == 2 else 4) * PROCESSORS // 2
    if problem.norm.per_batch and runs.repeat * count * size > REPEATED_BYTES and blocks * count >= least:
        # In bf16 (57, 3, 167, 167) with scale and shift takes 19.5 us so, and 21.9, in fp16 (2, 2, 1024, 1096) 14.4,
        # and 16.2, in fp32 (71, 6, 16, 16, 16) 12.1, and 12.5.
        if size == 2 and reduction.warps == 2:
            reduction = replace(reduction, positions=2 * reduction.positions, warps=4)
        else:
            reduction = replace(reduction, tiles=2 * tiles)
    elements = 2048 // share
    # Evaluations of some size end sooner: on an H200 (40000, 50) in bf16 takes 4.1 us with one tile, and 4.5 with two,
    # (100, 512, 7, 7) 4.4 and 4.8.
    two = problem.direction != "inference" or view.numel > 4 * FEW
    # (4000, 384) in bf16 with silu takes 3.6 us on four warps, and 3.9 on two, in fp32 (26, 32, 48, 48) in 32 groups
    # with silu 10.0 and 10.6.
    few = size == 4 if write < WRITE_CHANNELS else not two
    warps = max(1, elements * share // (512 if few else 1024))
    output = PassConfig(write, max(1, elements // write), 2 if two else 1, warps)
    large = _one_tile_programs(view, output) > 8 * PROCESSORS and problem.direction != "inference"
    if size == 2 and write == WRITE_CHANNELS and large:
        # batch_norm of (61, 1024, 16, 17) in fp16 with gelu_tanh takes 30.8 us so, and 32.2 in half of it on half.
        output = replace(output, positions=2 * output.positions, warps=2 * output.warps)
    return _with_positions(problem, view, moments, reduction, _spread(view, output))


def _few_singles(problem: Problem, alignment: int, programs: int, channels: int) -> bool:
    """Whether a forward's pass over channels_last has so few programs of narrow loads that more warps hide the time
    that memory takes: on an H100 batch_norm of (9781, 13) in fp32 with silu takes 5.5 us so, and 10.5 on one warp,
    (30000, 11) in fp16 with relu 6.0 and 7.9, but (4000, 27) 5.4 and 4.5, (65536, 5) 5.9 and 5.3."""
    size = DTYPE_BYTES[problem.dtype]
    most = 4 if alignment == 1 and (size > 2 or channels == 16) else 2
    few = programs <= most * PROCESSORS and alignment * size < WIDE_LOAD
    return not problem.backward and few and (size > 2 or 4 < channels < 32)


def _repeated(problem: Problem, reduction: PassConfig, view: View) -> PassConfig:
    """A backward's pass that reads rows of several positions in 16 bits, each with partials of its own: few of these.
    On an H100 (12, 203, 64, 64) in bf16 takes 39.5 us so, and 41.5 with 4 tiles to a program, (9, 75, 80, 80) in fp16
    with relu 19.8 and 22.1, (80000, 20) in bf16 10.9 in larger tiles, and 13.6. Few rows are better in tiles of half
    the lanes on one warp: (62, 1275, 9, 9) in one group in fp16 with relu takes 51 us so, and 65, on an H200 batch_norm
    of (122, 90, 231) with silu 14.9 and 15.9. More of them are better in tiles of half the rows on one warp, by up to
    REPEATED_PROGRAMS: there (24, 65, 157, 111) in 5 groups in bf16 takes 83.9 us so, and 87.3, (31, 6, 29739) in 6
    groups with silu 25.9 and 27.7, and (17, 539, 137, 41) in 539 in fp16 145, 155 by 2312 programs and 140 by 1156."""
    count = -(-view.spatial // reduction.positions)
    many = count > MANY_REPEATED * REPEATED_TILES and reduction.tiles <= 2 * REPEATED_TILES
    if many and not problem.norm.smooth:
        return replace(reduction, positions=4 * reduction.positions, tiles=REPEATED_TILES // 2, warps=4)
    tiles = max(reduction.tiles, shares(count, REPEATED_TILES))
    if reduction.channels != READ_CHANNELS or reduction.positions == 1:
        return replace(reduction, tiles=tiles)
    if tiles <= REPEATED_TILES:
        return replace(reduction, channels=READ_CHANNELS // 2, tiles=tiles, warps=1)
    programs = view.samples * -(-view.channels // READ_CHANNELS) * -(-2 * count // tiles)
    return replace(
        reduction,
        positions=reduction.positions // 2,
        tiles=2 * tiles if programs > REPEATED_PROGRAMS else tiles,
        warps=1,
    )


def _of_few_rows(problem: Problem, view: View, repeat: int) -> PassConfig | None:
    """A backward's pass that reads samples of few rows of 16 bits: all of them to a program of one warp, so that what a
    thread reads of its channels is for as many elements as can be. None for others, and where programs would be few. Of
    rows of several positions batch_norm of (121, 1131, 17, 8) in bf16 with scale and shift and silu takes 98 us so, and
    124 in tiles of 32 channels by 16 rows, (52, 2167, 209) in 11 groups in bf16 88 and 102, (100, 475, 12, 12) in 5
    with relu 32.6 and 39.3, (60, 333, 11, 11) in fp16 with silu 16.5 and 19.0, (77, 305, 1331), of 168 rows, 95 and 99;
    of others (34, 2048, 3, 3, 3) with scale and shift and gelu 15.5 and 17.6, (58, 1280, 7, 7) in 32 groups in fp16
    with silu 18.4 and 18.9, but batch_norm of (60, 1024, 14, 14) in bf16 with scale and shift 35.7 and 34.3."""
    lanes, rows = 2 * READ_CHANNELS, 4
    few = view.spatial <= (MOST_FEW_ROWS if repeat == 1 else MOST_FEW_LONG_ROWS) and view.channels > READ_CHANNELS
    if DTYPE_BYTES[problem.dtype] > 2 or not few or view.spatial < rows:
        return None
    # (8, 1305, 21, 21) in 261 groups in fp16, 656 such programs, takes 19.6 us so, and 19.4 in tiles of 32 by 16.
    if view.samples * -(-view.channels // lanes) < (4 if repeat == 1 else 6) * PROCESSORS:
        return None
    return PassConfig(lanes, rows, -(-view.spatial // rows), 1, BACKWARD_STAGES)


def _gradients_of_channels(problem: Problem, write: int) -> PassConfig:
    """The pass of a backward that writes, with 32 elements a thread of 16 bits in one tile, and 16 of 32 bits: (14,
    320, 111, 111) in bf16 with silu takes 158 us so, and 171 in two tiles of half the size, (8, 320, 64, 64) in fp32
    72, and 74. With scale and shift and a smooth activation they are half as many: (60, 1280, 8, 5) in fp16 takes 21.8
    us so, and 23.1."""
    if DTYPE_BYTES[problem.dtype] == 2:
        elements = 2048 if write < WRITE_CHANNELS or (problem.modulated and problem.norm.smooth) else 4096
        return PassConfig(write, elements // write, 1, elements // 1024)
    if write < WRITE_CHANNELS or problem.dtype == "float64":
        share = 4 if problem.dtype == "float64" else 1
        return PassConfig(write, max(1, 1024 // share // write), 2, 2)
    return PassConfig(write, 2048 // write, 1, 4)


def _one_tile_programs(view: View, tile: PassConfig) -> int:
    """The programs of a pass with one such tile each."""
    return view.samples * -(-view.channels // tile.channels) * -(-view.spatial // tile.positions)


def _spread(view: View, tile: PassConfig) -> PassConfig:
    """The pass that writes with one tile to a program where there would be few programs."""
    return tile if _one_tile_programs(view, tile) > 4 * PROCESSORS else replace(tile, tiles=1)


def _with_positions(
    problem: Problem, view: View, moments: PassConfig | None, reduction: PassConfig, output: PassConfig
) -> TilesConfig:
    """The passes with tiles of positions that there are; ``moments``: a forward's first pass where it has its own."""
    if problem.backward:
        reduction = _of_positions_that_there_are(view, reduction)
    return TilesConfig(moments or reduction, _of_positions_that_there_are(view, output))


def _of_positions_that_there_are(view: View, tile: PassConfig) -> PassConfig:
    """The tile with more channels in place of positions that a sample has not: with scale and shift, which each sample
    has of its own, (4253, 1024) in bf16 took 22 us in tiles of 16 positions, of which 1 is there."""
    positions = min(tile.positions, power_of_two(view.spatial))
    channels = max(tile.channels, min(power_of_two(view.channels), tile.channels * tile.positions // positions))
    tiles = max(1, min(tile.tiles, -(-view.spatial // positions)))
    return replace(tile, channels=channels, positions=positions, tiles=tiles)


def _small_evaluation(problem: Problem) -> bool:
    """Whether the pass that writes is the only launch of a small problem."""
    return problem.direction == "inference" and problem.view.numel <= SMALL_EVALUATION


def _few_a_thread(problem: Problem, tile: PassConfig) -> PassConfig:
    """The tile with so many warps that a thread has few elements, and of short planes those of one load, so that a
    thread needs the values of one channel."""
    elements, load = 4 if problem.view.numel <= SMALL_HELD else 8, load_bytes(problem)
    if problem.layout.order == "channels_first" and load < WIDE_LOAD:
        elements = min(elements, max(load // DTYPE_BYTES[problem.dtype], tile.positions // 32))
        if load == DTYPE_BYTES[problem.dtype] == 2 and tile.positions == 1024:
            elements = 16  # (8, 64, 11, 11, 11) in fp16 takes 2.5 us so, and 3.0 with 8
    elif DTYPE_BYTES[problem.dtype] == 2 and tile.channels <= 128 and tile.channels * tile.positions <= 256:
        elements = 8  # (391, 128) in bf16 takes 1.7 us on one warp, and 2.0 on two
    return replace(tile, warps=max(1, tile.channels * tile.positions // (32 * elements)))


def _block_of_channels(channels: int, most: int) -> int:
    """Channels of a tile, at most so many: a power of two that divides the channels, if it makes rows of some length.
    Else long rows, although a part of the last block is empty: 72 channels in blocks of 16 took 21 us to write, and 11
    in blocks of 128, on (4, 72, 192, 192) in bf16, and 96 in blocks of 32 and of 128 took 145 and 127 us backward."""
    whole = channels & -channels
    return min(whole if whole >= READ_CHANNELS else power_of_two(channels), most)


def _written_channels(problem: Problem, channels: int) -> int:
    """Channels of a tile of the pass that writes. Half as many where that leaves clearly fewer lanes of the last block
    empty: 304 channels in fp16 take 26.8 us backward in blocks of 64, and 28.7 in blocks of 128."""
    block = _block_of_channels(channels, WRITE_CHANNELS)
    if block < WRITE_CHANNELS:
        return block
    half = WRITE_CHANNELS // 2
    lanes, fewer = -(-channels // block) * block, -(-channels // half) * half
    return half if channels > 2 * block and 8 * lanes > 9 * fewer else block


def _tiles_of_a_load(count: int, columns: int, elements: int, each: int) -> int:
    """:func:`_tiles_of_a_program` for about ``each`` programs to a multiprocessor, or up to a quarter more, such that
    the multiprocessor with the most tiles has few: (7, 640, 63, 63) in bf16 takes 48.0 us backward with 770 programs,
    and 50.6 with 560, 5 of 34 tiles on some multiprocessors and 4 on others, (32, 256, 40, 40) in batch_norm with relu
    37.4 with 640, and 39.0 with 512, (9, 96, 83, 56) with scale and shift and gelu in 32 groups 25.0 with 882, and 27.6
    with 1746."""
    most = max(1, min(count, MOST_READ // elements))
    least = min(most, _fewest_tiles(count, columns, elements))
    chunks = max(each * PROCESSORS // max(1, columns), -(-count // most), 1)
    largest, smallest = (max(least, -(-count // some)) for some in (chunks, max(chunks + 1, 5 * chunks // 4)))
    choices = range(largest, smallest - 1, -1)
    return min(choices, key=lambda tiles: tiles * most_loaded(count, columns, tiles))


def _fewest_tiles(count: int, columns: int, elements: int) -> int:
    fewest = 1 if columns * count <= 3 * PROCESSORS else 2
    return max(fewest, min(FEWEST_READ // elements, columns * count // (2 * PROCESSORS)))


def _tiles_of_a_program(count: int, columns: int, elements: int, programs: int) -> int:
    """Tiles of so many elements to a program, where the pass has ``columns`` times ``count``: few enough for so many
    programs, which fill the device, and at least FEWEST_READ elements, so that a program does more than wait for its
    first tiles; but 2 where there would be few programs: batch_norm of (16, 12, 20, 20) in fp32 takes 4.8 us with 2
    tiles to a program, and 5.6 with 8; and 1 of the fewest: (3, 16, 7, 32, 8) in fp16 takes 4.2 us so, and 4.8 with
    2."""
    least = _fewest_tiles(count, columns, elements)
    return shares(count, min(max(1, MOST_READ // elements), max(least, columns * count // programs)))
