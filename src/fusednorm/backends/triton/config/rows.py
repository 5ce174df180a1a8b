"""Rows in steps and rows' backwards, triton.rows: pure functions of the problem."""

from __future__ import annotations

from dataclasses import replace

from fusednorm.backends.triton.config.device import PROCESSORS, SMALL_HELD
from fusednorm.backends.triton.config.held import MOST_SMALL
from fusednorm.backends.triton.config.holding import LARGE_HELD
from fusednorm.backends.triton.config.kinds import ColumnsBackwardConfig, RowsBackwardConfig, StepsConfig
from fusednorm.backends.triton.config.planes import DEAR
from fusednorm.backends.triton.config.units import HeldUnits
from fusednorm.backends.triton.runs import (
    PAIR_LOAD,
    WIDE_LOAD,
    WIDEST_LOAD,
    load_bytes,
    power_of_two,
    row_window,
    single_floats,
)
from fusednorm.problem import DTYPE_BYTES, Problem

#: The elements of two rows at most that one program takes in one step, those that it does with 16 warps, and those that
#: many programs take in few steps.
ONE_PROGRAM, LARGE_PROGRAM, FEW_ELEMENTS = 2048, 1 << 14, 1 << 20
#: Rows that programs of 16 warps, two to a multiprocessor, take in two waves, the second of which is nearly empty.
FEW_IN_WAVES = 8 * PROCESSORS // 3
#: Bytes of a row that is long for one multiprocessor where others have none: layer_norm of (68, 8192) in fp32 with relu
#: takes 8.3 us by columns, and 10.5 by rows.
LONG_BYTES = 1 << 15
#: Bytes of a plane of which a multiprocessor has two in work so that their second read comes from the L2, and one.
MOST_PLANE_BYTES, LARGE_PLANE_BYTES = 48 << 10, 72 << 10
#: Elements of a row in the registers of a backward's program, which holds four values an element.
MOST_ROW, LONG_ROW = 16384, 12288
#: Elements of a row of 32 bits with a mean up to which its steps are short.
SHORT_STEPPED = 10240
#: Rows from which on partials of each cost more than they gain: layer_norm of (9728, 3) in fp16 takes 3.3 us by rows,
#: and 15.1 held, (700, 64) with gelu 3.8 and 4.3, but (400, 128) in bf16 3.4 both ways. Without a mean, or of
#: longer rows of narrow loads, they are three times as many: rms_norm of (2000, 32) takes 3.4 us by rows, and 4.3 held.
MANY_ROWS = 448
#: Rows of LARGE_HELD elements, loaded in pairs, from which on their backward is faster held.
FEW_LONG = 8
#: Rows of 32 bits and 4096 lanes, not all of them full, that are too many for steps in flight.
MANY_SPARSE_ROWS = 8 * PROCESSORS
#: Bytes of the steps of all programs of a multiprocessor in a backward of short rows. Beyond these more programs leave
#: more sums. On an H100 (7260, 473) in fp16 takes 14.6 us with 1056 programs, and 18.0 with 1361, (30000, 1024) 68 with
#: 528 and 72 with 1056, (40000, 512) in bf16 46 with 1056 and 52 with 2112.
PROCESSOR_BYTES = 8 << 10
#: Rows of a program from which on more programs of the shortest rows pay.
LEAST_SUMMED = 24
#: Bytes of the steps in flight of a program with sums around the norm, in shared memory.
STEPS_BYTES = 96 << 10
#: Programs of the pass by columns that steps of several rows leave, and those steps: (50, 46293) in fp16 takes 16.5
#: us with 4 steps, and 18.6 with 16, (64, 65536) in fp32 with silu 29 and 39, but (392, 56736) in fp16 with
#: silu 81 with 16 steps, and more with fewer. On an H100 (71, 65536) in fp16 takes 23 us with 8, and 31 with 4.
COLUMN_PROGRAMS, MOST_STEPS = 500, 32
#: Steps of single loads, and the steps in all from which on a program has twice as many, and with a smooth activation
#: four times that: rms_norm of (273, 17373) in bf16 takes 27.5 us with 4, and 37.6 with 16, (234, 64341) with gelu 84
#: with 8, and 92 with 16, but layer_norm of (322, 34301) in fp16 69 with 8, and 65 with 16, (14124, 8721) with silu 750
#: and 690.
MOST_SINGLE_STEPS, MANY_SINGLE = 8, 1 << 14
#: Pieces of rows, of loads of 8 bytes, from which on sums that move fewer bytes gain more than loads at their use.
MANY_PAIRS = 1 << 15
#: Rows that are one program's steps, whose sums are the gradients: (4, 12288) in bf16 takes 4.1 us so, and 5.3 with two
#: shares.
ONE_SHARE = 4
#: Lanes of a row that is short, those of all rows that small programs take in one step, and from which on they do so:
#: rms_norm of (1044, 192) in bf16 with silu takes 4.1 us so, and 5.1 held.
SHORT_ROW, STEP_LANES, LEAST_STEP = 256, 8 * PROCESSORS * 1024, 3 << 16
#: Rows of 16 bits, and elements of each beyond which so few go by columns.
FEW_ROWS, LONG_SHORT_ROW = 8, 6144
#: Rows of single elements that are few, half as many of fewer elements and of 32 bits.
SOME_ROWS = 64
#: Programs of one row each up to which a second row takes longer than to merge twice as many sums.
FEWEST_STEPPED = 256
#: Those that steps of four rows leave at least: (150, 10000) in bf16 takes 11.2 us with 190 programs and 12.4 with 750,
#: (36, 12288) in fp16 with gelu 9.5 with 216 and 11.9 with half.
FEWEST_PROGRAMS = 200
#: Steps of a program by columns from which on some are in flight, with a smooth activation and without: layer_norm of
#: (68, 8192) in fp32 with relu takes 8.3 us with 4 steps, and 12.5 with these in flight, (385, 25690) with silu 71 with
#: 16, and 61 with some in flight, but (200, 24576) in bf16 20.8 with 8, and 22.5 with some in flight.
FLYING_STEPS, FLYING_SIMPLE_STEPS = 8, 32


def rows_forward_for(problem: Problem) -> StepsConfig:
    """8 to 16 elements a thread, two steps or more: 65 us on 16384 x 4096 in bf16, where one step takes 68. Planes, of
    one weight each, in short steps: (4, 2030, 64, 133) in bf16 takes 89 us, and 157 in steps of 4096, (119, 24, 132,
    132) takes 83 us in steps of 1024, 66 of 2048 and 79 of 4096."""
    block = power_of_two(problem.reduced)
    if problem.view.spatial > 1:
        if block <= 16384:
            return StepsConfig(1024, 4)
        if single_floats(problem):
            return StepsConfig(4096, 16)  # on an H100 (10, 100, 20001) takes 69 us so, and 82 on 8 warps
        # On an H100 (13, 512, 144, 144) in fp16 takes 206 us on 8 warps, and 212 on 4.
        return StepsConfig(2048, 8 if DTYPE_BYTES[problem.dtype] == 2 else 4)
    if block <= 4096:
        # On 8 warps rms_norm of (3000, 3300) in fp32 takes 21.0 us; layer_norm of (20000, 3300) takes 126 us on 4, and
        # 127 on 8.
        return StepsConfig(2048, 8 if problem.dtype == "float32" and not problem.norm.has_mean else 4)
    if load_bytes(problem) < PAIR_LOAD:
        # (3000, 14001) in bf16 with silu takes 94 us so, and 136 in steps of 4096, but layer_norm of (1000, 12001) 24
        # on two warps, and 27, of (354, 14333) with relu 18.7 and 21.3.
        few = problem.view.samples <= 16 * PROCESSORS and problem.norm.has_mean and not problem.norm.smooth
        return StepsConfig(2048, 2 if few else 8)
    longest = 2 * MOST_ROW if load_bytes(problem) >= WIDE_LOAD else 5 * MOST_ROW // 4
    if problem.dtype == "float32" and load_bytes(problem) < WIDEST_LOAD and problem.reduced > longest:
        # rms_norm of (700, 40001) with silu takes 116 us so, and 477 in steps of 16384, of (700, 40002) 107 and 113,
        # layer_norm of (600, 24001) 54, and 60 of 4096.
        return StepsConfig(8192, 16)
    narrow = load_bytes(problem) < WIDEST_LOAD and not problem.norm.has_mean
    if problem.dtype == "float32" and narrow and block == 2 * MOST_ROW:
        return StepsConfig(4096, 8)  # rms_norm of (1785, 16991) takes 77 us so, and 89 on 16 warps
    if block > 2 * MOST_ROW and problem.dtype != "float64":
        # (752, 65536) in bf16 takes 61 us in steps of 16384, and 84 in steps of 4096.
        if problem.dtype == "float32":
            return StepsConfig(_long_step(problem), 16)
        # rms_norm of (300, 40960) in bf16 takes 15.8 us so, and 19.3 in steps of 16384, of (600, 57344) with relu 44.8
        # and 55.3, but (500, 33000) in fp16, whose last step is short, 24.2, and 22.1.
        half = 2048 < problem.reduced % 16384 <= 8192
        return StepsConfig(8192 if problem.norm.has_mean or half else 16384, 16)
    if problem.reduced > 3 * MOST_ROW // 2 and not problem.norm.has_mean and problem.dtype != "float64":
        # (700, 28672) in fp16 takes 29 us so, and 34 in steps of 4096; (1050, 28672) in fp32 64 us, and 70 in 8192, but
        # (700, 26000) with silu 48, and 43, (500, 28672) 34.4, and 33.1, on an H100 (230, 28672) 22.8, and 21.0.
        few, some = problem.view.samples <= 2 * PROCESSORS, problem.view.samples <= 6 * PROCESSORS
        if problem.dtype == "float32" and 2 * PROCESSORS < problem.view.samples <= 3 * PROCESSORS:
            return StepsConfig(4096, 16)  # (310, 28672) takes 22.5 us so, and 25.4 in steps of 8192
        if few and DTYPE_BYTES[problem.dtype] == 2:
            return StepsConfig(4096, 16)  # (183, 28672) in fp16 with silu takes 9.5 us so, and 12.9 on 8 warps
        if DTYPE_BYTES[problem.dtype] == 2 and problem.view.samples <= 4 * PROCESSORS:
            return StepsConfig(4096, 8)  # (445, 28672) in bf16 with leaky_relu takes 20.5 us so, and 23.4 in 8192
        return StepsConfig(8192 if DTYPE_BYTES[problem.dtype] == 2 or some else 16384, 16)
    mean = problem.norm.has_mean
    if problem.dtype == "float32" and mean and problem.reduced == block == 8192:
        # (437, 8192) with silu takes 9.7 us so, and 10.8 on 8 warps, but (3360, 8192) with relu 57.3, and 55.3 in steps
        # of 4096 on 8.
        return StepsConfig(2048, 16) if problem.view.samples <= 4 * PROCESSORS else StepsConfig(4096, 8)
    if problem.dtype == "float32" and block == 8192:
        return StepsConfig(4096, 16)  # rms_norm of (1610, 5420) takes 19.5 us so, and 20.1 on 8 warps
    if problem.dtype == "float32" and mean and 8192 < problem.reduced <= SHORT_STEPPED:
        # (430, 10000) takes 13.1 us so, and 16.2 in steps of 4096 on 8 warps, (430, 9562) 13.5 and 16.7.
        return StepsConfig(2048, 16 if load_bytes(problem) >= WIDEST_LOAD else 4)
    if DTYPE_BYTES[problem.dtype] == 2 and mean and block == 8192:
        return StepsConfig(2048, 8)  # (714, 8192) in bf16 takes 8.8 us so, and 9.4 whole
    if DTYPE_BYTES[problem.dtype] == 2 and mean and block == 2 * MOST_ROW:
        # (500, 20480) in bf16 takes 14.2 us in steps of 2048, and 16.6 of 4096, but in fp16 (456, 25704), whose last
        # step is not full, 21.0 and 18.2, and in bf16 (800, 28672) 33.3 and 31.0.
        even = problem.reduced % 2048 == 0 and problem.view.samples <= 4 * PROCESSORS
        return StepsConfig(2048, 16) if even else StepsConfig(4096, 8)
    if DTYPE_BYTES[problem.dtype] == 2 and not mean and load_bytes(problem) < WIDE_LOAD:
        return StepsConfig(2048, 16)  # rms_norm of (470, 14310) in bf16 takes 10.1 us so, and 12.4 in steps of 4096
    # Of 600 x 20480 in fp16 rms_norm takes 14.6 us with 8 warps, and 16.4 with 16.
    if problem.dtype == "float32":
        long = block > 16384 or (block == 16384 and not mean)
    else:
        # (200, 17000) in bf16 takes 6.7 us so, and 8.4 on 8 warps.
        long = block > 8192 and (mean or block == 16384 or problem.view.samples <= 4 * PROCESSORS)
    if problem.dtype == "float32" and 2 * PROCESSORS < problem.view.samples <= FEW_IN_WAVES and mean:
        long = False  # one wave: layer_norm of (300, 30000) takes 34.7 us so, and 44.2 in programs of 16 warps
    return StepsConfig(4096, 16 if long else 8)


def _long_step(problem: Problem) -> int:
    """The step of rows of more than 32768 elements in fp32: the longest where most multiprocessors have two rows or
    more. On an H100 layer_norm of (207, 39560) takes 31 us in steps of 16384, 33 of 4096 and 41 of 8192, (140, 36864)
    with relu 26, 20 and 39, rms_norm of (250, 33000) 26.4, 28.6 and 28.7, (150, 65536) 39, 37.5 and 34.8."""
    if 2 * problem.view.samples > 3 * PROCESSORS:
        return 16384
    return 4096 if problem.norm.has_mean else 8192


def plane_rows_backward_for(problem: Problem) -> StepsConfig:
    """The channels of samples in steps, on an H100: (28, 619, 48, 87) in fp16 with relu takes 164 us in steps of 1024,
    and 173 of 2048, (8, 64, 130, 130) in bf16 31 and 27, (40, 100, 64, 80) in fp32 with silu 91 of 2048, and 102 of
    4096, (16, 100, 100, 100) 81 of 4096, and 94 of 2048.
    The second read of large planes comes from the L2 where few are in work at a time, each by a program with many
    registers: (28, 45, 30208) in fp32 takes 170 us in steps of 16384, and 247 of 4096 on 8 warps, in fp16 86 of 8192,
    and 117 of 2048."""
    size, block = DTYPE_BYTES[problem.dtype], power_of_two(problem.reduced)
    if block <= LARGE_HELD or (block == 2 * LARGE_HELD and size != 4):
        return StepsConfig(min(1024, block), 4)
    if single_floats(problem):  # (9, 43, 20049) takes 49 us so, 57 of 1024, and 83 of 16384
        return StepsConfig(4096, 8)
    if block == 2 * LARGE_HELD or size == 8:
        return StepsConfig(2048, 8)
    if size * problem.reduced > LARGE_PLANE_BYTES:
        return StepsConfig(16384, 16)
    if block > 4 * LARGE_HELD and size * problem.reduced > MOST_PLANE_BYTES:
        return StepsConfig(8192, 8)
    if size == 4:
        return StepsConfig(4096, 16)
    # (9, 128, 136, 136) in bf16 with relu takes 55 us in steps of 4096, and 66 of 2048.
    return StepsConfig(4096 if block > 4 * LARGE_HELD else 2048, 8)


def rows_backward_for(problem: Problem) -> RowsBackwardConfig:
    """Two steps are one with twice as many rows on twice as many warps: layer_norm of (632, 144) in bf16 takes 4.75 us
    so, and 5.5 in two, rms_norm of (220, 2111) in fp32 5.0 and 6.4, of (400, 3072) in fp16 7.6 and 8.6."""
    config = _rows_in_steps(problem)
    step, few = config.rows * config.programs, 1 < config.programs <= 2 * PROCESSORS
    if step < problem.view.samples <= 2 * step and config.warps <= 8 and few:
        return replace(config, rows=2 * config.rows, warps=2 * config.warps)
    return config


def _rows_in_steps(problem: Problem) -> RowsBackwardConfig:
    """Some rows of up to 256 lanes are :func:`_short_rows`. Others of up to 2048 have small programs, each with 16
    elements a thread and three steps in flight, or four of long steps, and from 1024 lanes on 32 elements. Narrow loads
    are not in flight ahead of their use: fewer elements and more warps.

    Long rows: 16 to 32 elements a thread, beside the sums of p and q, and 16 warps to a multiprocessor: 40673 x 3012 in
    bf16 takes 217 us with 4 warps, and 323 with 16 and two rows. Few rows that fill little more than half of their
    lanes are two to a program: 368 x 2078 takes 5.7 us so, and 6.9 with one on 4 warps. Of rows beyond 4096 one program
    to a multiprocessor: 4000 x 6000 in bf16 takes 50 us, and 56 with two. On 16384 x 4096 steps over neighbouring rows
    take 101 us, and programs with rows of their own 107.
    """
    view = problem.view
    block = power_of_two(view.channels + row_window(problem) - 1)
    if problem.dtype == "float64":
        elements = max(block, 2048)
        warps = min(16, elements // 256)
        return RowsBackwardConfig(elements // block, warps, PROCESSORS * (16 // warps), reload=block > 2048)
    if _one_large_program(problem, block):
        # rms_norm of (2, 1536) in fp16 with relu takes 1.9 us on 8 warps, and 4.2 on 16.
        return RowsBackwardConfig(view.samples, 8 if view.samples * block == LARGE_HELD else 16, 1)
    if block > 8192:
        return _long_row_backward(problem)
    if block >= 4096:
        return _rows_of_many_lanes(problem, block)
    if _one_program(problem, block):
        return _steps_of_one_program(problem, block)
    specials = _short_rows, _sparse_backward, _narrow_rows_of_16_bits, _few_rows_of_16_bits, _short_singles
    for special in specials:
        found = special(problem, block)
        if found is not None:
            return found
    return _wide_rows(problem, block) if _has_wide_loads(problem) else _narrow_rows(problem, block)


def _has_wide_loads(problem: Problem) -> bool:
    """Whether a thread loads 8 bytes of a row or more at a time."""
    return load_bytes(problem) >= WIDE_LOAD or row_window(problem) > 1


def _has_empty_lanes(problem: Problem, block: int) -> bool:
    """Whether an eighth of the lanes is empty."""
    return 8 * problem.view.channels <= 7 * block


def _is_sparse(problem: Problem, block: int) -> bool:
    """Whether an eighth of the lanes of rows of the widest loads is empty, which the kernel knows when it is compiled:
    it has no registers and no instructions for these."""
    return load_bytes(problem) == WIDEST_LOAD and block >= 256 and _has_empty_lanes(problem, block)


def _are_many_sparse(problem: Problem, block: int) -> bool:
    return problem.view.numel >= FEW_ELEMENTS and problem.added is None and _is_sparse(problem, block)


def _steps_of_one_program(problem: Problem, block: int) -> RowsBackwardConfig:
    """One or two rows, whose sums are the gradients. A thread has both, and their sums need no other thread."""
    samples, size = problem.view.samples, DTYPE_BYTES[problem.dtype]
    threads = MOST_SMALL if size == 2 and not problem.norm.smooth else 2 * MOST_SMALL
    thread = max(block // threads, 4 if samples == 1 else max(2, load_bytes(problem) // size))
    if block <= 256 and size == 4:  # rms_norm of (2, 164) takes 1.5 us on one warp, and 2.3 on two
        thread = max(thread, 8)
    return RowsBackwardConfig(max(1, samples), max(1, block // (32 * thread)), 1)


def _sparse_backward(problem: Problem, block: int) -> RowsBackwardConfig | None:
    """Rows with empty lanes that are not taken as full ones are; None for others."""
    norm, size = problem.norm, DTYPE_BYTES[problem.dtype]
    if size == 4 and _has_wide_loads(problem) and _has_empty_lanes(problem, block):
        return _sparse_floats(problem, block)
    if size == 2 and block == 2048 and norm.smooth and norm.has_mean and _are_many_sparse(problem, block):
        return _sparse_smooth_backward(problem, block)
    return None


def _sparse_floats(problem: Problem, block: int) -> RowsBackwardConfig | None:
    norm = problem.norm
    if problem.view.numel < FEW_ELEMENTS:
        return None
    if block == 512 and not norm.has_mean:
        # rms_norm of (60000, 308) takes 61 us so, and 70 with one row.
        return RowsBackwardConfig(2, 2, 4 * PROCESSORS, stages=4)
    if block == 1024 and norm.has_mean and not norm.smooth and _are_many_sparse(problem, block):
        # (20000, 768) takes 48.7 us so, and 52.2 on one warp with half as many programs.
        return RowsBackwardConfig(1, 2, 4 * PROCESSORS, stages=4)
    return None


def _sparse_smooth_backward(problem: Problem, block: int) -> RowsBackwardConfig:
    """Rows of 16 bits and 2048 lanes that are not full, with a smooth activation, on as few warps as have registers for
    the lanes that there are: of (20000, 1152) in bf16 with silu a thread has 40 of 64, which takes 46.6 us, and 62 on
    two warps, (35000, 1048) in fp16 75 and 102. Of (17887, 1536) with gelu it has 24 of 32, and six programs fit a
    multiprocessor: 59.3 us, and 62.9 with four."""
    most = 3 * problem.view.samples // (16 * PROCESSORS)  # whose sums are few beside the rows
    if 8 * problem.view.channels <= 5 * block:
        return RowsBackwardConfig(1, 1, max(2, min(8, most)) * PROCESSORS, stages=3)
    return RowsBackwardConfig(1, 2, (6 if most >= 6 else max(2, min(4, most))) * PROCESSORS, stages=4)


def _short_rows(problem: Problem, block: int) -> RowsBackwardConfig | None:
    """Rows of 16 to 256 lanes, of narrow loads from 32 on, where there are some; None for others.

    A warp takes 256 elements a step, 8 a thread, with three steps in flight. Some 48 KB of a multiprocessor are on
    their way then, of 16 bits with 16 programs, of 32 with 8: layer_norm of (117190, 256) in bf16 takes 51.1 us so, and
    55.0 with 8 programs and twice as many elements, with silu 53.7 and 61.9, of (187503, 160) 81 and 100. Fewer steps
    have half as many: (19534, 128) takes 10.8 us with 8, and 12.2 with 16. Lanes that are empty move nothing, so more
    programs have them: in fp32 (156253, 96) with silu takes 50.2 us with 16, and 63.1 with 8.

    Narrow loads are slow ahead of their use, in fp32 those of 8 bytes: (127121, 118) takes 55 us with 16 elements a
    thread and none in flight, and 67 with three.
    """
    view, size, load, smooth = problem.view, DTYPE_BYTES[problem.dtype], load_bytes(problem), problem.norm.smooth
    lanes = view.samples * block
    if not (16 if load >= WIDE_LOAD else 32) <= block <= SHORT_ROW or lanes < LEAST_STEP:
        return None
    if lanes <= STEP_LANES:
        return _one_step(problem, block)
    if load < WIDE_LOAD:
        if block < SHORT_ROW or 8 * view.channels <= 5 * block or view.numel < 12 * FEW_ELEMENTS:
            return None
        # In bf16 (117187, 250) takes 54.2 us so, and 59.8 in steps of two rows, three in flight, rms_norm of (117187,
        # 251) with silu 62.0 and 67.9 of two rows.
        return RowsBackwardConfig(1, 1, 32 * PROCESSORS)
    if load == WIDE_LOAD and block <= (64 if size == 4 else 32):
        # On one warp (65536, 30) in fp32 takes 22 us, and 12.2 so, (32768, 62) 10.9, and 13.1 with half of its rows.
        rows = (2048 if size == 4 and block == 64 and not smooth else 1024) // block
        return RowsBackwardConfig(rows, 4, 4 * PROCESSORS, stages=1 if size == 4 else 4)
    if size == 4 and block <= 32:  # (80000, 32) in fp32 takes 12.5 us so, and 20.2 with all of it on one warp
        return RowsBackwardConfig(512 // block, 2, 4 * PROCESSORS, stages=4) if block == 32 else None
    if size == 4 and load == WIDE_LOAD and not smooth:
        return RowsBackwardConfig(512 // block, 1, 16 * PROCESSORS)
    sparse = _has_empty_lanes(problem, block)
    # In bf16 (41669, 60) takes 11.3 us with 16 programs, and 12.0 with 8, but (20164, 124) 13.5 and 12.2.
    least = 2 if load == WIDE_LOAD and block == 64 else 4 if load == WIDE_LOAD or sparse else 6
    many = view.numel >= least * FEW_ELEMENTS
    plain = load == WIDEST_LOAD and block == SHORT_ROW and not smooth
    if plain and size == 4 and not sparse:
        # (145891, 244) takes 114 us so, and 119 with half of it and twice the programs.
        return RowsBackwardConfig(2, 1, 4 * PROCESSORS, stages=4)
    if plain and not problem.norm.has_mean and (size == 2 or many):
        # rms_norm of (50000, 192) in bf16 takes 20.1 us so, and 21.4 in half of it, (78128, 192) in fp32 47.7 and 49.7.
        deep = size == 2 and many
        return RowsBackwardConfig(2, 1, (12 if deep else 8) * PROCESSORS, stages=4 if deep else 3)
    if size == 4:
        few = load == WIDEST_LOAD and not (many and sparse)
        return RowsBackwardConfig(256 // block, 1, (8 if few else 16) * PROCESSORS, stages=4 if few else 3)
    deep = load == WIDEST_LOAD or block == SHORT_ROW
    return RowsBackwardConfig(256 // block, 1, (16 if many else 8) * PROCESSORS, stages=4 if deep else 3)


def _one_step(problem: Problem, block: int) -> RowsBackwardConfig:
    """Short rows in one step, of 32 elements a thread on one warp, since few programs leave few sums: layer_norm of
    (4690, 128) in bf16 takes 5.4 us so, and 7.4 in two steps, in fp32 6.4 and 8.0. Half as many elements are 16 a
    thread with a smooth activation, or of narrow loads in the shortest rows: rms_norm of (1565, 128) in bf16 with silu
    takes 3.9 us so, and 4.7 with 32, (3906, 57) 4.6 and 5.2. Otherwise narrow loads are two warps', single ones without
    a smooth activation where rows are long: rms_norm of (2343, 251) with silu takes 5.6 us so, and 6.3 on one,
    layer_norm of (9375, 58) 6.4 and 7.4, but (9375, 57) 7.7, and 7.2."""
    load, smooth = load_bytes(problem), problem.norm.smooth
    narrow = load < WIDE_LOAD
    if 2 * problem.view.samples * block <= STEP_LANES and (smooth or (narrow and block <= 64)):
        return RowsBackwardConfig(512 // block, 1, 8 * PROCESSORS)
    pairs = load == PAIR_LOAD and DTYPE_BYTES[problem.dtype] == 2
    warps = 2 if narrow and (smooth or pairs or block == SHORT_ROW) else 1
    return RowsBackwardConfig(1024 // block, warps, 8 * PROCESSORS)


def _narrow_rows_of_16_bits(problem: Problem, block: int) -> RowsBackwardConfig | None:
    """Rows of pairs of 256 to 1024 lanes, and few rows of narrow loads of 256 or 512; None for others."""
    view, load = problem.view, load_bytes(problem)
    if DTYPE_BYTES[problem.dtype] != 2 or load >= WIDE_LOAD or not 256 <= block <= 1024:
        return None
    if view.numel >= FEW_ELEMENTS:
        if load != PAIR_LOAD:
            return None
        # Pairs go ahead of their use without windows: 7085 x 822 in fp16 takes 16.0 us so, and 18.4 in windows.
        rows, warps, programs = (2, 2, 4) if block == 1024 else (512 // block, 1, 8)
        return RowsBackwardConfig(rows, warps, programs * PROCESSORS, stages=3)
    if block == 1024:
        return None
    # (2706, 263) in fp16 with relu takes 7.3 us so, and 8.6 with one row on one warp, rms_norm of (792, 285) with silu
    # 4.8 and 6.2. Twice as many rows take one step: (2048, 315) takes 6.3 us so, and 7.0 in two, (1002, 361) 4.9 and
    # 5.5. Of pairs (552, 474) in fp16 with gelu takes 5.0 us with two, and 7.7 with one.
    programs = 4 * PROCESSORS
    if block == 512 and load == PAIR_LOAD and 2 * programs < view.samples:
        if problem.norm.smooth and view.samples > 4 * programs:
            return RowsBackwardConfig(2, 4, programs // 2, stages=4)  # (2511, 394) in fp16 with gelu: 8.8 us, 9.0
        # (2511, 394) in bf16 takes 7.3 us so, and 8.5 with two rows, (1500, 394) in fp16 with gelu 6.5 and 7.2.
        return RowsBackwardConfig(4, 4, programs)
    if block == 512 and not problem.norm.smooth and view.samples <= 4 * programs:
        return RowsBackwardConfig(4, 2, programs)
    return RowsBackwardConfig(2, block // 128, programs, stages=4 if view.samples > 2 * programs else 1)


def _few_rows_of_16_bits(problem: Problem, block: int) -> RowsBackwardConfig | None:
    """Rows of 1024 and 2048 lanes in a few steps; None for others."""
    view, norm = problem.view, problem.norm
    if DTYPE_BYTES[problem.dtype] != 2:
        return None
    if view.numel < 2 * FEW_ELEMENTS and block == 1024 and view.samples > PROCESSORS:
        # (900, 700) in bf16 with gelu takes 6.6 us so, and 8.7 with one row on two warps, (280, 573) with relu 4.4 and
        # 5.6, (1325, 743) in fp16 7.8 on two warps, and 8.5 with one row, (2048, 1001) in bf16 10.0 and 11.5.
        programs = 4 * PROCESSORS
        several = view.samples > 2 * programs  # steps
        if several and load_bytes(problem) >= WIDE_LOAD and view.samples <= 4 * programs:
            # (2000, 1024) in bf16 takes 9.3 us so, and 10.0 with two, rms_norm of (1200, 1024) in fp16 6.5 and 7.3,
            # layer_norm of (1800, 768) with silu 8.5 and 9.7.
            return RowsBackwardConfig(4, 4, programs)
        warps = 2 if norm.activation is None and not several else 4
        return RowsBackwardConfig(2, warps, programs, stages=3 if several and norm.smooth else 1)
    if block != 2048 or not _has_wide_loads(problem):
        return None
    if 2 * PROCESSORS < view.samples <= 4 * PROCESSORS:
        # (462, 1536) in bf16 takes 6.0 us so, and 6.8 with a row on four warps, rms_norm of (496, 2048) 5.9 and 6.3.
        return RowsBackwardConfig(2, 8, 2 * PROCESSORS)
    several = 4 * PROCESSORS < view.samples <= 8 * PROCESSORS and not _has_empty_lanes(problem, block)
    if norm.smooth and several:
        # (529, 2048) in fp16 with silu takes 7.5 us so, and 8.2 with one row on two warps, but (2000, 2048) in bf16
        # 13.3 with one.
        return RowsBackwardConfig(2, 4, 4 * PROCESSORS)
    return None


def _short_singles(problem: Problem, block: int) -> RowsBackwardConfig | None:
    """Many rows of single elements of 16 bits that take 9 of 16 steps of one element a thread, where windows of 8
    elements take three of four; None for others. Two rows without windows have 128 registers a thread at most, with
    which four programs of 128 threads fit a multiprocessor, but layer_norm's with gelu have 166.

    layer_norm of (20000, 1099) in bf16 with silu takes 56.5 us so, and 69.6 in windows, without it (15000, 1099) 40.0
    and 44.0, with relu (27100, 1107) 70 and 80, with silu (20000, 549) 32.9 and 38.9, rms_norm of (29040, 1099) with
    gelu_tanh 87 and 121, of (20000, 549) in fp16 with gelu 38.4 and 45.4, but layer_norm of (15000, 1131) in bf16 with
    gelu 78, and 69, rms_norm of (15000, 1151) in fp16 40.6, and 38.9. With sums around the norm none was timed."""
    norm, view = problem.norm, problem.view
    if block not in (1024, 2048) or load_bytes(problem) >= PAIR_LOAD or problem.added is not None:
        return None
    pays = norm.smooth
    if norm.has_mean:
        pays = norm.activation_flops < DEAR and (pays or block == 2048)
    if view.numel < 2 * FEW_ELEMENTS or 16 * view.channels > 9 * block or not pays:
        return None
    return RowsBackwardConfig(2, block // 512, 8192 // block * PROCESSORS, stages=4)


def _rows_and_warps(block: int, thread: int) -> tuple[int, int]:
    """Rows to a step and warps, with so many elements of a step to a thread."""
    return max(1, 32 * thread // block), max(1, block // (32 * thread))


def _most_programs(problem: Problem) -> int:
    """The sums of a program take 8 bytes an element, and are to be few beside its rows."""
    return 3 * DTYPE_BYTES[problem.dtype] * problem.view.samples // 32


def _narrow_rows(problem: Problem, block: int) -> RowsBackwardConfig:
    view, size, few = problem.view, DTYPE_BYTES[problem.dtype], problem.view.numel < FEW_ELEMENTS
    # (3000, 30) in fp16 takes 3.9 us with 8 elements a thread, and 4.2 with 16, (9728, 3) 3.3 and 3.6, but (19474, 13)
    # in bf16 with leaky_relu 7.6 and 6.6.
    least = 8 if block <= 64 and view.numel <= FEW_ELEMENTS // 8 else 16
    rows, warps = _rows_and_warps(block, least if few else 32 if block >= 1024 else max(8, block // 16))
    most = _most_programs(problem)
    if few and size == 2 and block == 128:
        if view.samples > FEW_ELEMENTS // (2 * block):
            return RowsBackwardConfig(8, 1, 4 * PROCESSORS)  # (8000, 67) in bf16 takes 8.0 us so, and 9.7 with 4
        most = -(-view.samples // rows)  # steps: (1140, 97) in fp16 takes 6.4 us in two, (1054, 109) 4.8 in one
    resident = 8 if block >= 1024 else 16 if block == 512 else 32
    programs = max(2 * PROCESSORS, min(PROCESSORS * resident // warps, most))
    # (56100, 181) in fp16 with silu takes 34.1 us so, and 38.0 with no step in flight, but (100000, 141) 40.5 and 36.1.
    flying = block == 256 and size == 2 and problem.norm.has_mean and 8 * view.channels > 5 * block and not few
    return RowsBackwardConfig(rows, warps, programs, stages=4 if flying else 1)


def _wide_rows(problem: Problem, block: int) -> RowsBackwardConfig:
    view, norm, size = problem.view, problem.norm, DTYPE_BYTES[problem.dtype]
    thread = 32 if block >= 1024 and view.numel >= FEW_ELEMENTS else 16
    rows, warps = _rows_and_warps(block, thread)
    step, most = rows * block * size, _most_programs(problem)
    # Sparse rows move fewer bytes: (17887, 1536) in bf16 takes 46.9 us with 528, and 50.1 with 264, rms_norm of (30000,
    # 1280) in fp16 60.3 and 71.0, (40000, 640) 43.4 with 1056, and 47.9 with 528, (65536, 320) in bf16 39.0 with 1584,
    # and 45.6 with 1056.
    sparse = size == 2 and _are_many_sparse(problem, block)
    # (25676, 1322) in fp16 takes 70 us with 528, and 86 with 264, (20000, 583) in bf16 29.4 with 1056, and 34.7 with
    # 528, but (4893, 613) with relu 15.9 with 792, and 14.6.
    many = block == 1024 and most >= 7 * PROCESSORS and problem.added is None
    busy = norm.smooth or (load_bytes(problem) < WIDE_LOAD and (block == 2048 or many)) or sparse
    programs = PROCESSORS * max(2, PROCESSOR_BYTES * (2 if busy else 1) // step)
    if sparse:
        each = 12 if rows > 1 or norm.has_mean else 8
        programs = min(programs, each * PROCESSORS, most // (2 * PROCESSORS) * 2 * PROCESSORS)
    if block <= 128:
        programs = max(programs, min(16 * PROCESSORS, view.samples // LEAST_SUMMED))
    # An even number to a multiprocessor: (2000, 2048) in bf16 with silu takes 13.3 us with 264, and 15.2 with 375.
    programs = max(1, round(min(programs, most) / (2 * PROCESSORS))) * 2 * PROCESSORS
    # Steps of one row without a mean: rms_norm of (585480, 384) in bf16 takes 331 us with four, and 383 with three,
    # (26671, 512) in fp16 24.1 and 25.7.
    light = rows == 1 and block == 512 and not norm.has_mean and not norm.smooth
    deep = (step >= 2048 or light or sparse) and row_window(problem) == 1
    return RowsBackwardConfig(rows, warps, programs, stages=4 if deep else 3)


def _rows_of_many_lanes(problem: Problem, block: int) -> RowsBackwardConfig:
    """Rows of 4096 and 8192 lanes, one or two of which take the registers of a program."""
    view, size = problem.view, DTYPE_BYTES[problem.dtype]
    full = 8 * view.channels > 7 * block
    short = view.channels <= 5 * block // 8 and block == 4096 and size == 2
    if short and view.numel < FEW_ELEMENTS:
        # rms_norm of 3 x 2502 in bf16 takes 3.5 us loaded twice, and 4.2 once.
        rows = 2 if view.samples > PROCESSORS else 1
        return RowsBackwardConfig(rows, 8, 2 * PROCESSORS, reload=view.samples <= 16 and not problem.norm.smooth)
    simple = problem.norm.has_mean or not problem.norm.smooth
    if block == 4096 and size == 2 and load_bytes(problem) < WIDE_LOAD and view.samples <= 8 and simple:
        # rms_norm of (5, 2782) in bf16 takes 3.4 us so, and 4.6 once on four warps.
        return RowsBackwardConfig(1, 16, PROCESSORS, reload=True)
    if block == 8192 and size == 2 and load_bytes(problem) < WIDE_LOAD and view.samples <= PROCESSORS // 2:
        # rms_norm of (54, 4558) in bf16 takes 4.5 us so, and 5.5 once.
        return RowsBackwardConfig(1, 8, PROCESSORS, reload=True)
    found = _pairs_backward(problem, block)
    if found is not None:
        return found
    most = PROCESSORS * (2 if not full else 1 if load_bytes(problem) == WIDEST_LOAD else 0)
    if block == 8192 and PROCESSORS // 2 < view.samples <= PROCESSORS and _long_singles(problem):
        # rms_norm of (95, 7143) in fp16 takes 6.5 us so, and 7.8 with two rows on 16 warps, layer_norm 8.3 and 8.9, but
        # rms_norm of (130, 6001) 7.2 both ways.
        return RowsBackwardConfig(1, 8, 2 * PROCESSORS)
    if block == 8192 and PROCESSORS // 2 < view.samples <= most:
        # Half as many sums: 100 x 5120 in fp32 takes 6.5 us so, and 8.5 with one row to a program, on an H100 100 x
        # 8192 in bf16 8.6, and 10.3, rms_norm of 76 x 7599 in fp32 8.9, and 8.4.
        return RowsBackwardConfig(2, 16, PROCESSORS)
    waves = 2 * PROCESSORS < view.samples <= 4 * PROCESSORS
    if block == 4096 and size == 2 and load_bytes(problem) < WIDEST_LOAD and waves:
        # A quarter of the sums: (300, 3585) in bf16 takes 8.1 us so, and 9.7 with two rows, rms_norm of (350, 3999) 8.6
        # and 9.3.
        return RowsBackwardConfig(4, 8, PROCESSORS, stages=3)
    some = PROCESSORS // 2 < view.samples <= PROCESSORS and load_bytes(problem) == WIDEST_LOAD
    if block == 4096 and size == 2 and some and problem.norm.activation is None:
        return RowsBackwardConfig(2, 16, PROCESSORS)  # (116, 3072) in bf16 takes 4.9 us so, and 5.4 with one row
    if problem.dtype == "float32":
        if block == 4096 and view.samples <= 4 * PROCESSORS:
            # (368, 3072) takes 8.5 us so, and 10.3 with twice as many sums.
            return RowsBackwardConfig(1, 8, PROCESSORS, stages=3)
        # On an H100 rms_norm of (200, 8192) takes 12.4 us with three stages, and 13.9 with one.
        # (7994, 4096) with silu takes 105 us with three, and 161 with one.
        # Of sparse ones (20000, 3300) takes 198 us with one, and 225 with three, rms_norm of (1500, 3300) 20.0 and
        # 22.2, of (4000, 2500) 37.5 both ways.
        sparse = block == 4096 and view.samples > MANY_SPARSE_ROWS
        many = (full or sparse) and view.samples > 2 * PROCESSORS and not (problem.norm.smooth and block == 4096)
        return RowsBackwardConfig(1, block // 512, PROCESSORS * (8192 // block), stages=1 if many else 3)
    busy = problem.norm.smooth and problem.norm.has_mean and load_bytes(problem) == WIDE_LOAD
    if block == 8192 and size == 2 and busy and view.channels > LONG_SHORT_ROW and not full:
        # (6000, 6620) in bf16 with gelu takes 123 us so, and 134 on 8 warps.
        return RowsBackwardConfig(1, 16, PROCESSORS)
    warps = 16 if full and block == 8192 and row_window(problem) == 1 else 8
    if block == 4096 and (problem.norm.activation or load_bytes(problem) < WIDEST_LOAD):
        # 3000 x 2070 in fp16 takes 23.2 us with 2, and 25.3 with 4; an activation's registers would spill.
        warps = 2 if short and problem.norm.activation is None else 4
    # Of single elements layer_norm of 3150 x 3119 in bf16 takes 26.3 us so, and 32.3 with twice as many sums.
    single = load_bytes(problem) < PAIR_LOAD and block == 4096 and not short and problem.norm.has_mean
    most = 2 if single and problem.norm.activation is None else 4
    if block == 4096 and problem.norm.has_mean and (warps == 8 or problem.norm.activation):
        # Fewer sums: with silu (540, 4096) in bf16 takes 10.8 us with one program to a multiprocessor, 12.5 with two,
        # and 14.7 with four, (1100, 4096) 15.2, 16.1 and 19.0, (2000, 4096) 22.9, 21.4 and 26.7, (16384, 3072) in fp16
        # 125, 100 and 104, without an activation (540, 4096) 9.6 and 10.8, (1100, 4096) 13.6 and 13.8.
        least = (12 if problem.norm.activation else 8) * PROCESSORS
        most = 1 if load_bytes(problem) == WIDEST_LOAD and not short and view.samples <= least else min(most, 2)
    elif block == 4096 and warps == 8 and full and 2 * PROCESSORS < view.samples <= 4 * PROCESSORS:
        most = 1  # rms_norm of (280, 4096) in fp16 takes 7.0 us so, and 8.0 with two
    if block == 4096 and warps == 8 and not full and problem.norm.has_mean and view.samples > least:
        # (13615, 3072) in bf16 takes 67.0 us so, and 74.6 on 8 warps, (8000, 2560) 36.3 and 45.7.
        return RowsBackwardConfig(1, 4, 2 * PROCESSORS, stages=4)
    # Windows take all registers: (1500, 4719) in bf16 takes 24.6 us so, and 29.1 with twice as many, rms_norm of (2299,
    # 4719) in fp16 29.4 and 32.1.
    programs = PROCESSORS * (1 if block == 8192 else min(most, 16 // warps))
    return RowsBackwardConfig(1, warps, programs, stages=3)


def _long_singles(problem: Problem) -> bool:
    """Whether rows of 8192 lanes are single elements of 16 bits, more than three quarters full, without a smooth
    activation."""
    single = load_bytes(problem) < PAIR_LOAD and not problem.norm.smooth
    return single and problem.view.channels > LONG_SHORT_ROW


def _pairs_backward(problem: Problem, block: int) -> RowsBackwardConfig | None:
    """Rows of 4096 and 8192 lanes of which a program has two, or one on 16 warps, mostly for the registers of their
    activation; None for others."""
    view, norm, load = problem.view, problem.norm, load_bytes(problem)
    if block == 4096 and norm.smooth and load < WIDEST_LOAD and view.samples <= PROCESSORS:
        # (12, 3598) in bf16 with silu takes 4.6 us so, and 6.7 on 4 warps, rms_norm of (5, 2700) with gelu 3.7 and 4.3.
        return RowsBackwardConfig(1, 16, PROCESSORS, reload=norm.has_mean)
    if DTYPE_BYTES[problem.dtype] != 2:
        return None
    if block == 4096 and norm.smooth and norm.has_mean and load == PAIR_LOAD and 8 * view.channels <= 5 * block:
        # (1500, 2090) in bf16 with gelu takes 17.0 us so, and 23.4 with a row to a program, (10000, 2090) 79 and 96.
        return RowsBackwardConfig(2, 8, 2 * PROCESSORS)
    few = view.samples <= 4 * PROCESSORS
    if block == 4096 and norm.activation is not None and not norm.has_mean and (few or load < PAIR_LOAD):
        if not few and 16 * view.channels > 11 * block and problem.added is None:
            # rms_norm of (9000, 3501) in fp16 with silu takes 64.8 us so, and 109 with two rows on 8 warps, of (6000,
            # 2999) in bf16 with relu 38.9 and 39.8, but of (9000, 2601) with gelu 85, and 73.
            return RowsBackwardConfig(1, 4, 2 * PROCESSORS, stages=3)
        # rms_norm of (3627, 2091) in bf16 with silu takes 25.8 us so, and 32.1 with a row to a program, of (520, 3072)
        # in fp16 with leaky_relu 7.8 and 9.1.
        return RowsBackwardConfig(2, 8, 2 * PROCESSORS)
    if block == 8192 and load < PAIR_LOAD and norm.smooth and not norm.has_mean and view.samples <= 8 * PROCESSORS:
        # rms_norm of (765, 4323) in fp16 with silu takes 15.4 us so, and 20.7 with a row on 8 warps.
        return RowsBackwardConfig(2, 16, PROCESSORS) if 10 * view.channels <= 7 * block else None
    some = load == PAIR_LOAD and norm.has_mean and (few or norm.smooth)
    if block == 8192 and some and 10 * view.channels <= 7 * block:
        # (20000, 4262) in bf16 with silu takes 256 us so, and 343 on 8 warps, (20000, 5602) with gelu 348 and 390, but
        # (3000, 7002) 82 on 8, (393, 4606) in bf16 10.7, and 17.9.
        return RowsBackwardConfig(2, 16, PROCESSORS)
    return None


def _long_row_backward(problem: Problem) -> RowsBackwardConfig:
    """Rows of more than 8192 elements, one program to a multiprocessor. Of 16 bits, with p beside q, they do not fit:
    2000 x 12288 in bf16 takes 76 us, and 61 loaded twice. Nor do the longest, and those of narrow loads, without p:
    rms_norm of 8000 x 9914 takes 349 us, and 182 so, but 300 x 9001 14.9, and 24.9, 664 x 10154 24.4 and 29.6. An
    activation takes longer twice: 1038 x 16384 with leaky_relu on an H100 takes 55 us, and 75 loaded twice, 3000 x 9914
    with silu 116 and 140. So do single elements: rms_norm of 999 x 11251 in fp16 takes 38 us, and 89 loaded twice. A
    second program to a multiprocessor would wait for its registers: rms_norm of 2500 x 9001 in bf16 takes 66 us, and 70
    with two, of 1500 x 10001 with silu 57 and 62, of 8000 x 11251 197 and 193."""
    view, load = problem.view, load_bytes(problem)
    if DTYPE_BYTES[problem.dtype] != 2:
        return RowsBackwardConfig(1, 16, PROCESSORS)
    if load < PAIR_LOAD or (load < WIDE_LOAD and problem.norm.smooth):
        return RowsBackwardConfig(1, 16, PROCESSORS)
    narrow = load < WIDE_LOAD and view.samples > 8 * PROCESSORS
    longest = view.channels > LONG_ROW and problem.norm.activation is None
    return RowsBackwardConfig(1, 16, PROCESSORS, reload=problem.norm.has_mean or longest or narrow)


def _sum_stages(problem: Problem, rows: int, block: int, most: int) -> int:
    """Steps of so many rows, at most ``most``: one that is worked on, and as many in flight as STEPS_BYTES hold. One
    step in flight is slower than none: rms_norm of (700, 8192) in bf16 took 23.5 us so, 21.8 without, 17.5 with two."""
    added = problem.added
    assert added is not None
    read = 2 + added.grad_sum + (added.post_layout is not None) + (added.pre_layout is not None)
    flying = STEPS_BYTES // (read * rows * block * DTYPE_BYTES[problem.dtype])
    return min(most, flying + 1) if flying > 1 else 1


def rows_sum_backward_for(problem: Problem) -> RowsBackwardConfig:
    """:func:`rows_backward_for` of a problem with sums around the norm, of which each step has more tensors; with 16
    elements a thread at most where there is post_add: with 32 the registers of AMD's RDNA spill. With a gradient of the
    sum rms_norm of (16384, 3072) in bf16 takes 102 us with three steps in flight, and 126 with one, of (16384, 768) 29
    and 43, of (8192, 8192) 133 with two, and 169 with one."""
    config, block, added = rows_backward_for(problem), power_of_two(problem.view.channels), problem.added
    assert added is not None
    size, has_mean, warps = DTYPE_BYTES[problem.dtype], problem.norm.has_mean, config.warps
    if added.post_layout is not None:
        warps = max(warps, min(16, config.rows * block // (32 * 16)))
    if size == 4 and block == 4096 and problem.view.samples > 4 * PROCESSORS:
        # layer_norm of (4096, 4096) takes 69 us so, and 83 on 8 warps without a step in flight.
        return RowsBackwardConfig(1, 16, PROCESSORS, stages=_sum_stages(problem, 1, block, 4))
    # rms_norm of (4096, 12288) in bf16 takes 107 us, and 116 loaded twice; others are not measured.
    reload = config.reload or (block > 8192 and (has_mean or size != 2))
    stages = 1 if config.stages == 1 else _sum_stages(problem, config.rows, block, 4)
    programs = config.programs
    if size == 2 and block == 4096 and 8 * problem.view.channels > 5 * block and warps == 8:
        # Half as many sums: layer_norm of (4096, 4096) in bf16 takes 38 us so, and 43, of (16384, 3072) 105 and 111.
        programs = min(programs, PROCESSORS)
    return replace(config, warps=warps, programs=programs, stages=stages, reload=reload)


def rows_gated_backward_for(problem: Problem) -> RowsBackwardConfig:
    """:func:`rows_sum_backward_for` of a problem that makes the gradients of a product: with a third sum beside p and q
    8 elements a thread, which take 100 registers, 16 warps to a multiprocessor, and two steps in flight. 2048 and 4096
    lanes of 16 bits have 16 elements a thread, of which 8 warps of 200 registers fit, and leave half as many sums:
    layer_norm of (2, 4096, 1152) with scale and shift in bf16 takes 48 us so, and 54, rms_norm of (4, 4096, 3072) 160
    and 184."""
    config, block = rows_sum_backward_for(problem), power_of_two(problem.view.channels)
    size = DTYPE_BYTES[problem.dtype]
    if size == 8 or config.programs == 1:
        return config
    wide = size == 2 and block in (2048, 4096)
    warps = min(16, max(1, block // (512 if wide else 256)))
    rows = max(1, 256 * warps // block)
    programs = max(PROCESSORS, min(PROCESSORS * (8 if wide else 16) // warps, 3 * size * problem.view.samples // 32))
    return RowsBackwardConfig(rows, warps, programs, stages=_sum_stages(problem, rows, block, 3))


def _one_program(problem: Problem, block: int) -> bool:
    return problem.view.samples <= 2 and problem.view.samples * block <= ONE_PROGRAM


def _one_large_program(problem: Problem, block: int) -> bool:
    """Whether one program of 16 warps is faster than two launches: in bf16 (2, 4096) takes 2.6 us so, and 3.9 held, (2,
    5120) 3.6, and 4.2 with a row to a program; or of an only row than one of 8: (1, 4096) in fp32 with gelu takes 2.6
    us, and 3.4 with 8 warps."""
    if problem.view.samples > 2 or problem.dtype == "float64":
        return False
    if problem.view.samples == 1 and problem.dtype != "float32" and not problem.norm.smooth:
        return False
    return problem.view.samples * block > ONE_PROGRAM and block <= LARGE_PROGRAM // 2


def holding_rows_pays(problem: Problem, seen: HeldUnits) -> bool:
    """Whether a backward of rows is faster with partials of each row, which cost a large problem more than it gains:
    216 x 1024 in fp32 takes 4.3 us held, and 5.1 with the sums of rows in registers."""
    if seen.units == 1:
        # (1, 2409) in fp16 takes 2.6 us held, and 3.5 by rows, (1, 3447) with silu 2.9 and 5.0, (1, 1877) in fp32 2.0
        # and 2.6.
        most = 2 * LARGE_HELD if DTYPE_BYTES[problem.dtype] == 2 and not problem.norm.smooth else LARGE_HELD
        return seen.elements <= most and not _are_few(problem)
    single = load_bytes(problem) < PAIR_LOAD
    if seen.units == 2 and seen.elements >= LARGE_HELD // 2:
        # (2, 2969) in bf16 takes 3.6 us held, and 4.9 by rows, but (2, 1536) with relu in fp16 2.8, and 1.9.
        return seen.elements == LARGE_HELD and single
    if seen.elements <= SHORT_ROW and seen.units * seen.elements >= LEAST_STEP and problem.dtype != "float64":
        return False
    windows = problem.norm.smooth and row_window(problem) > 1 and not single
    # (6, 3207) in fp16 takes 3.8 us held, and 4.7 by rows.
    pairs = PAIR_LOAD <= load_bytes(problem) < WIDE_LOAD or problem.dtype == "float64"
    if seen.elements == LARGE_HELD and ((seen.units < FEW_LONG and pairs) or windows):
        # (3, 2399) in bf16 with silu takes 4.2 us by rows, and 7.4 held, (12, 3598) 4.7, and 5.8, but of single
        # elements (22, 3771) in fp16 with gelu_tanh 6.4, and 5.1.
        return False
    small = seen.units * seen.elements <= SMALL_HELD and seen.elements <= LARGE_HELD
    long = seen.elements > 128 and load_bytes(problem) < WIDE_LOAD
    small = small and seen.units < (3 if long or not problem.norm.has_mean else 1) * MANY_ROWS
    return small and not _one_program(problem, seen.elements)


def most_row(problem: Problem) -> int:
    """The longest row whose backward fits the registers of a program."""
    return MOST_ROW // 2 if problem.dtype == "float64" else MOST_ROW


def most_summed_row(problem: Problem) -> int:
    """:func:`most_row` with sums around the norm: beyond 8192 elements the registers of 16 warps hold a row of 16 bits
    and the gradient of the sum beside it, and neither post_add, the sums of a gate nor elements of 32 bits without many
    spills."""
    assert problem.added is not None
    if problem.gated_backward and problem.dtype == "float64":
        return most_row(problem) // 4
    short = DTYPE_BYTES[problem.dtype] == 2 and problem.added.post_layout is None and not problem.gated_backward
    return most_row(problem) if short else most_row(problem) // 2


def by_columns(problem: Problem) -> bool:
    """Whether a backward of rows goes by columns: where a row is long for the registers of a program, or rows are few
    for the multiprocessors, of narrow loads some more, without a mean less. layer_norm of (264, 12288) in fp16 takes 16
    us by columns, rms_norm of (400, 12288) in bf16 18.8, and 18.5 by rows, (527, 16384) 28.7 and 27.4.
    Rows that are loaded twice would compute a smooth activation's derivative with too few registers: 8220 x 10240 in
    fp16 with gelu took 465 us by rows and 307 by columns, but in rms_norm 223 and 261, 4096 x 16384 181 and 213, and
    900 x 9669 in fp32 49 and 68. So are those of narrow loads: layer_norm of 24986 x 9914 in bf16 takes 796 us by
    columns, and 904 by rows.
    """
    narrow, mean = load_bytes(problem) < WIDE_LOAD, problem.norm.has_mean
    few = problem.view.samples <= (2 if not mean else 16 if narrow else 4) * PROCESSORS
    length = problem.reduced
    # Without a mean (32, 8192) in fp32 with silu takes 7.7 us by columns, and 6.7 by rows, but (2, 8192) 4.6 and 5.8,
    # on an H100 (100, 8192) with silu 10.9 and 9.2.
    if not mean and problem.view.samples != 2 and problem.dtype == "float32" and 4 * length == LONG_BYTES:
        return False
    # (30, 11008) in fp32 takes 6.3 us by rows, and 6.7 by columns, (9, 11008) 5.4 and 5.6.
    simple = not mean and not narrow and not problem.norm.smooth and problem.dtype == "float32"
    if few and simple and LONG_BYTES < 4 * length <= 4 * LONG_ROW:
        return False
    if problem.view.samples <= PROCESSORS and length * DTYPE_BYTES[problem.dtype] >= LONG_BYTES:
        return True
    # Of single elements (2, 7921) in fp16 takes 3.7 us by columns, and 10.8 by rows, (5, 7001) in bf16 4.8, and 6.0.
    # rms_norm of (4, 8192) in fp16 with relu takes 3.8 us by columns, and 4.5 by rows.
    short = DTYPE_BYTES[problem.dtype] == 2 and problem.view.samples <= FEW_ROWS and length > LONG_SHORT_ROW
    if short and ((mean and load_bytes(problem) < PAIR_LOAD) or (not narrow and problem.view.samples > 2)):
        return True
    if _are_few(problem):
        return True
    if length > most_row(problem) or (few and length > LONG_ROW * 2 // 3):
        return True
    if mean and DTYPE_BYTES[problem.dtype] == 2 and (narrow or problem.norm.smooth):
        return length > MOST_ROW // 2
    return mean and length > LONG_ROW


def _are_few(problem: Problem) -> bool:
    """Whether rows are so few that the sums of their columns are little work: (4, 5000) in bf16 takes 3.7 us by
    columns, and 4.3 by rows, rms_norm of (2, 8192) 3.0 and 3.5, layer_norm of (1, 8192) with relu 2.8, and 3.2 held. Of
    single elements in 32 bits rms_norm of (2, 7311) takes 3.6 and 6.7, layer_norm of (7, 7311) 4.9 and 6.3, of (1,
    4869) 3.1 and 5.6, in 16 of (6, 5575) with gelu_tanh 5.4 and 7.3, of (2, 4697) 3.8 and 6.9, of (10, 7227) with relu
    5.2 and 7.4, but of (1, 4697) 3.3, and 3.0 held. So are some more of single elements: on an H200 rms_norm of (17,
    6605) in bf16 takes 5.0 us, and 5.8 by rows, layer_norm of (32, 4537) in fp16 5.3 and 6.4, of (20, 7003) in fp32 5.4
    and 6.1, rms_norm of (64, 7001) in fp16, in single steps, 6.7 and 7.2, but of (90, 4501) in bf16 6.3, and 5.3."""
    rows, length, load = problem.view.samples, problem.reduced, load_bytes(problem)
    if rows <= 2 and problem.norm.smooth and length > MOST_ROW // 4 and problem.dtype != "float64":
        # (1, 6012) in fp32 with gelu takes 3.9 us so, and 4.8 by rows, rms_norm of (2, 5120) in bf16 with silu 3.5 and
        # 4.3.
        return True
    if problem.dtype == "float32":
        return load < WIDE_LOAD and rows <= SOME_ROWS // 2 and length > (LONG_SHORT_ROW if rows > 2 else MOST_ROW // 4)
    if DTYPE_BYTES[problem.dtype] != 2 or length <= MOST_ROW // 4:
        return False
    if load < PAIR_LOAD:
        return 1 < rows <= (SOME_ROWS if length > LONG_SHORT_ROW else SOME_ROWS // 2)
    if rows <= 2:
        return load >= WIDE_LOAD and length > (LONG_SHORT_ROW if rows == 2 else 7 * MOST_ROW // 16)
    return load >= WIDE_LOAD and rows <= ONE_SHARE


def columns_backward_for(problem: Problem) -> ColumnsBackwardConfig:
    """Each program leaves the sums of its rows: few programs with many rows move fewer bytes, many end sooner. All rows
    to a program where rows are few and so long that their columns have enough programs."""
    share, view = 4 if problem.dtype == "float64" else 1, problem.view
    single, few = DTYPE_BYTES[problem.dtype] == 2 and load_bytes(problem) < PAIR_LOAD, view.samples < PROCESSORS
    # Few elements a thread of single loads: (341, 59741) in bf16 with gelu takes 110 us so, and 182 with 2048 columns
    # to a program.
    elements = 512 if single else 1024 // share
    short = not single and view.samples * -(-view.channels // elements) < 2 * PROCESSORS
    if short:
        elements //= 2
    blocks = -(-view.channels // elements)
    if view.samples <= ONE_SHARE or (view.samples <= 16 and view.channels > 2 * PROCESSORS * elements):
        steps = view.samples
    else:
        rows = view.samples * blocks
        most, least = MOST_STEPS, 4 if rows // 4 >= FEWEST_PROGRAMS else 2
        if load_bytes(problem) == WIDE_LOAD and not problem.norm.smooth and rows < MANY_PAIRS:
            # Loads of 8 bytes are slow ahead of their use: rms_norm of (362, 47010) in fp32 takes 93 us so, and 146 in
            # 32 steps with some in flight, of (1000, 18900) in bf16 57 and 69, but of (6000, 18900) 308, and 297.
            most //= 2
        if problem.norm.smooth and view.samples <= 2 * PROCESSORS:
            most = FLYING_STEPS  # rms_norm of (165, 60892) in bf16 with silu takes 39.6 us so, and 49.7 with 16
        if single:
            many = rows >= (4 if problem.norm.smooth else 1) * MANY_SINGLE
            most, least = (2 if many else 1) * MOST_SINGLE_STEPS, 2
        enough = COLUMN_PROGRAMS * (2 if single else 1)
        steps = max(least, min(most, power_of_two(rows // enough + 1) // 2))
        if rows <= FEWEST_STEPPED and (single or (problem.dtype == "float32" and not problem.norm.has_mean)):
            steps = 1  # rms_norm of (6, 16384) in fp32 takes 5.4 us so, and 6.2 with two
        elif short:
            elements, steps = 2 * elements, 1  # (14, 11008) in bf16 takes 4.8 us so, and 5.2 in two steps of 512
        elif single and 2 * enough <= rows < 4 * enough:
            # (166, 11443) in fp16 takes 13.8 us so, and 15.5 in two steps of 512, (120, 14001) in bf16 with silu 15.3
            # and 16.8.
            elements, steps = 2 * elements, 4
    # (50, 11122) in fp16 with gelu takes 8.2 us with 128 elements to a warp, and 9.3 with 256, of wide loads (88,
    # 12288) in bf16 with silu 11.4 and 13.7, but of pairs (87, 13902) 9.8 and 9.2, and in 8 steps (72, 65536) 25.0 and
    # 23.5.
    wide = DTYPE_BYTES[problem.dtype] == 2 and load_bytes(problem) >= WIDE_LOAD
    dense = single or 2 * view.samples < PROCESSORS or (few and wide and steps <= 4)
    warps = max(1, elements * share // (128 if dense else 256))
    flying = FLYING_STEPS if problem.norm.smooth else FLYING_SIMPLE_STEPS
    stages = 1 if single or steps < flying else 3
    return ColumnsBackwardConfig(2048 // share, 8, PROCESSORS * (4 if few else 2), elements, steps, warps, stages)
