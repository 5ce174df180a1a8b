"""Units of any memory order in the registers of a program, triton.held: pure functions of the problem."""

from __future__ import annotations

from fusednorm.backends.triton.config.device import (
    PROCESSORS,
    SECTOR_BYTES,
    SMALL_HELD,
    program_elements,
    thread_elements,
)
from fusednorm.backends.triton.config.kinds import HeldConfig
from fusednorm.backends.triton.config.planes import LARGE_BYTES, MANY_PLANES, warps_of_planes
from fusednorm.backends.triton.config.units import MOST_HELD, SHARING_HELD, SMALL_UNIT, HeldUnits
from fusednorm.backends.triton.runs import WIDE_LOAD, WIDEST_LOAD, load_bytes, power_of_two
from fusednorm.problem import DTYPE_BYTES, Problem

#: Units that are neighbours in memory are read row by row, and in so many elements rows may be of any length.
FEW_CONTIGUOUS = 1 << 16
#: Elements of the units in one place of all samples that one program of a backward takes, which then needs no second
#: launch. In channels_last its rows are as short as a unit is wide, which pays in problems of few elements.
ALL_SAMPLES, ALL_SAMPLES_LAST = 2048, 1 << 14
#: Elements of a channel of samples whose positions lie apart, up to which it is faster held, and up to which one of a
#: few is: (7, 2, 16, 16) in bf16 with silu takes 2.6 us held, and 5.3 in tiles, (16, 6, 16, 16) 6.1 and 3.9.
MOST_APART, MOST_FEW_APART = 1024, 2048
#: Channels of samples that are many for the multiprocessors.
MANY_CHANNELS = 250
#: Short channels of samples that are many for the multiprocessors.
MANY_SHORT = 1000
#: Channels of samples whose short backward has two to a warp.
FEW_CHANNELS = 64
#: Rows that one program of a small backward takes, where their loads are narrow.
FEW_ROWS = 8
#: Bytes of neighbouring rows of short planes that a program reads together, the positions of such a plane at most, and
#: the elements of these units, of which there are to be programs.
ROW_BYTES, SHORT_ROW, MOST_SHORT_ROWS, FEWEST_SHARED = 64, 16, 4096, 48
#: Channels of channels_last up to which a program has those of a sample, or half of them.
MOST_NEIGHBOURS = 8
#: Channels of one sample of channels_last from which on programs share the rows of long ones.
MANY_LONG = 128
#: Channels of samples with scale and shift that are many enough to share programs.
MANY_MODULATED = 120
#: The samples, elements and channels from which on a backward of one position walks over the samples, in tiles of so
#: many lanes, and those of a sample in it where not all of its units are.
WALKED_SAMPLES, WALKED_ELEMENTS, WALKED_CHANNELS = 512, 1 << 18, 32
WALKED_TILE, WALKED_LANES = 1024, 128
#: Elements of a unit whose lanes no vector fills that are a warp's alone in such a walk, those of a unit of which each
#: load has one element, and the lanes of short ones.
FEWEST_ALONE, FEWEST_SINGLES, MOST_ALONE, WALKED_ALONE = 16, 4, 256, 64
#: The lanes of a unit of pairs of 16 bits that is shorter, of which a warp alone has some.
SHORT_ALONE = 8
#: Lanes of all units, of 32 bits, which such a walk takes in few steps.
FEW_WALKED = 5 << 18
#: Elements of a unit that is short to such a walk.
SHORT_WALKED = 2
#: Samples from which on programs of such a walk have many steps.
MANY_WALKED = 1 << 14
#: Programs with a row of units each, few of which are faster than more with shorter rows.
FEWEST_ROWS = 64
#: Programs that a backward of few long units in channels_last leaves at least.
FEWEST_SPREAD = 32
#: Lanes of all units up to which short ones are one warp's.
FEW_LANES = 1 << 14
#: Threads of a program in a small problem: 8 warps, beyond which the sums over warps cost more.
MOST_SMALL = 256


def held_for(problem: Problem, seen: HeldUnits) -> HeldConfig:
    """Units to a program: one long one, short ones until they make a program's work. Neighbours in memory are together
    for 32 or 64 bytes of each row: (25, 1597, 45) in bf16 takes 6.4 us in rows of 32 bytes, and 5.0 in rows of 64."""
    if of_many_points(problem, seen):
        return _walk(problem, seen)
    warps = warps_of_planes(problem, seen)
    if warps:
        return HeldConfig(1, warps)
    found = _across_samples(problem, seen) if seen.across == "sample" else _all_samples(problem, seen)
    return found or _short(problem, seen) or _by_size(problem, seen)


def _by_size(problem: Problem, seen: HeldUnits) -> HeldConfig:
    """As many units as make a program's work, with as many elements a thread as the problem has for its threads."""
    total, narrow = seen.units * seen.elements, seen.narrow(problem)
    least = _row_of_units(problem, seen, total)
    # (2, 2048, 7, 3) in bf16 with scale and shift takes 2.0 us with four units, and 2.8 with one.
    own = seen.affine == 3 and (problem.backward or seen.elements > 64)
    alone = seen.across == "sample" and not seen.contiguous and (own or seen.elements >= 256)
    if seen.elements == 512 and seen.units > 4 * PROCESSORS and not narrow and seen.affine != 3:
        alone = False  # (8, 700, 6, 6) in bf16 takes 2.5 us backward with two units to a program, and 2.8 with one
    sparse = seen.elements == 1024 and 8 * problem.reduced <= 5 * seen.elements and not narrow
    planes = seen.across == "channel" and problem.view.group_channels == 1 and problem.norm.activation is None
    if problem.backward and sparse and planes and DTYPE_BYTES[problem.dtype] == 2 and seen.units > 48 * PROCESSORS:
        return HeldConfig(2, 2)  # (58, 192, 24, 24) in fp16 takes 13.7 us so, and 15.9 with one unit
    units = max(least, 1 if alone else program_elements(total, 1024) // seen.elements)
    units = max(1, min(units, _fitting(seen), most_together(problem, seen)))
    thread = _held_thread(problem, seen, units * seen.elements, not seen.contiguous and least > 1)
    # (1, 960, 415) in fp16 with scale and shift takes 5.1 us on 8 warps, and 17.3 on 16, whose registers spill.
    most = 8 if narrow and problem.modulated and not problem.backward and not seen.contiguous else 16
    return HeldConfig(units, max(1, min(most, units * seen.elements // (32 * thread))))


def most_together(problem: Problem, seen: HeldUnits) -> int:
    """The units whose elements the registers of 16 warps hold: twice as many of 16 bits in channels_last, forward, with
    no tensor beside the input, and no scale and shift, which narrow loads leave 8 warps for."""
    alone = not problem.backward and problem.added is None and not problem.modulated
    twice = alone and seen.positions and DTYPE_BYTES[problem.dtype] == 2
    return (2 if twice else 1) * MOST_HELD // seen.elements


def _fitting(seen: HeldUnits) -> int:
    """The units that a program can take."""
    return power_of_two(seen.units if seen.spans else seen.in_sample)


def _across_samples(problem: Problem, seen: HeldUnits) -> HeldConfig | None:
    """The channels of several samples whose number is large for the multiprocessors, or whose positions lie apart; None
    for others."""
    total, narrow, size = seen.units * seen.elements, seen.narrow(problem), DTYPE_BYTES[problem.dtype]
    if seen.apart:
        if seen.elements > MOST_APART:  # (3, 4, 20, 20) in fp16 takes 2.2 us with a channel on 8 warps, 2.4 with two
            return HeldConfig(max(1, min(2, seen.in_sample // 8)), 8)
        # (8, 512, 7, 7) in fp16 with silu takes 4.5 us backward so, and 9.5 with 8 units on 8 warps.
        sparse = seen.affine == 3 and seen.elements >= 256 and 4 * seen.rows * seen.columns < 3 * seen.elements
        if sparse and seen.in_sample >= 2 * MANY_CHANNELS and size <= 4:
            # Lanes that hold nothing are no work: (33, 768, 11) in fp16 takes 5.2 us backward so, and 8.6 on 8 warps,
            # (20, 500, 15) forward 3.1, and 3.9 with four on four, backward 3.3, and 4.3.
            return HeldConfig(8, max(2, 8 * seen.elements // (32 * 64)) if problem.backward else 2)
        units = min(8 if total > SMALL_HELD else 4, power_of_two(seen.in_sample // 8))
        # With scale and shift (49, 320, 5, 3) in bf16 with relu takes 4.3 us with four, 5.2 with 8, (15, 36, 5, 5) in
        # fp32 with silu 2.7 with one, and 3.1 with four, the backward of (3, 64, 7, 11) in bf16 with silu 2.6 with two,
        # and 3.2 with four.
        programs = 64 if seen.elements >= 256 and not problem.backward else 32
        units = max(1, min(units, power_of_two(seen.in_sample // programs + 1) // 2))
        most = max(4, units * seen.elements // (32 * 32)) if problem.backward else 4
        return HeldConfig(units, max(1, min(most, units * seen.elements // 64)))
    if problem.backward and seen.affine == 3 and not seen.contiguous:
        found = _modulated_samples(problem, seen)
    else:
        found = _short_planes(problem, seen)
    if found is not None or seen.units < MANY_CHANNELS:
        return found
    if seen.affine == 3 and not seen.contiguous and 512 <= seen.elements <= 1024 and not narrow:
        return HeldConfig(2, 4)  # (40, 1000, 4, 4) in fp16 takes 3.2 us so, and 3.7 with a unit on two warps
    long = seen.elements == SHARING_HELD and seen.affine == 0
    if long and narrow and not problem.backward and size == 2:
        # (11, 320, 25, 25) in bf16 takes 7.4 us so, and 8.5 on 8 warps, (18, 700, 21, 21) with silu 15.1 and 15.8, (30,
        # 400, 15, 15) with relu 7.2 and 7.8.
        return HeldConfig(1, 4)
    if seen.affine == 0 and not narrow and size == 2 and seen.rows * seen.columns < 0.6 * seen.elements:
        # (33, 1024, 8, 8) in bf16 takes 6.7 us backward so, 52 % full, and 7.0 on 8 warps, (20, 1200, 10, 12) with silu
        # 8.8 and 10.4, but (80, 1024, 8, 4) with relu, 62 % full, 8.2 and 7.6. Forward (44, 640, 16, 5) takes 5.4 us
        # so, and 6.6 on 8 warps, but with silu 8.0 and 7.5.
        if problem.backward and 2 * seen.elements == SHARING_HELD:
            return HeldConfig(1, 4)
        if not problem.backward and seen.elements == SHARING_HELD and problem.norm.activation is None:
            return HeldConfig(1, 4)
    if seen.flat and not problem.backward and 64 <= seen.elements <= 256:
        return HeldConfig(4, 4)  # (20, 1280, 3, 3) in fp16 takes 2.6 us so, and 3.0 with a unit on two warps
    narrow_planes = seen.flat and seen.elements == 512 and seen.columns <= SHORT_ROW
    if narrow_planes and (problem.backward or not problem.norm.smooth):
        # Neighbouring planes are read together: (88, 960, 1, 5) in bf16 takes 3.3 us so, and 4.1 with one on two warps,
        # (40, 1000, 3, 3) in fp32 3.2 and 3.6, backward 3.6 and 4.0, the first with silu 4.1 and 5.5.
        units = 2 if problem.backward and size == 2 else 4
        return HeldConfig(units, 4 if size == 2 else 8)
    most = (6 if problem.backward else 0 if problem.norm.smooth else 4) * SMALL_HELD
    long_planes = narrow and seen.affine == 0 and seen.elements == 1024 and seen.columns > SHORT_ROW
    if long_planes and seen.units >= MANY_SHORT and total <= most:
        # (22, 1024, 5, 5) in bf16 takes 3.3 us so, and 3.5 on two warps, its backward 3.5 and 4.0, that of (30, 1500,
        # 5, 5) 4.8 and 5.6, but of (40, 2048, 5, 5) in fp16 8.6 and 8.0.
        return HeldConfig(1, 1)
    if seen.flat and not problem.backward and seen.elements == 512 and problem.norm.smooth:
        return HeldConfig(2, 4)  # (40, 1280, 3, 3) in bf16 with silu takes 3.3 us so, and 4.0 with one on a warp
    several = seen.affine == 0 and narrow and 128 <= seen.elements <= 256 and seen.units >= MANY_SHORT
    simple = seen.elements == 128 and not problem.norm.smooth
    if several and (simple or not problem.backward) and total <= 2 * SMALL_HELD:
        # (2, 2132, 5, 9) in bf16 takes 2.2 us so, and 2.8 with 8 units on 8 warps, the backward of (2, 3000, 7, 9) 2.8,
        # and 3.4.
        return HeldConfig(2, 1)
    odd = problem.backward and seen.flat and seen.columns <= SHORT_ROW
    if odd and seen.elements == 1024 and total > 4 * SMALL_HELD:
        return HeldConfig(2, 8)  # (68, 1280, 3, 3) in bf16 takes 4.4 us so, and 5.6 with one on two warps
    planes = problem.backward and seen.affine == 0 and narrow and seen.elements == 256 and seen.columns > SHORT_ROW
    if planes and not problem.norm.smooth and total <= 4 * SMALL_HELD:
        return HeldConfig(1, 1)  # (3, 1500, 45) in bf16 takes 2.6 us so, and 3.2 with two units on two warps
    most = (2 if problem.norm.smooth else 8) * SMALL_HELD
    if problem.backward and seen.affine == 0 and narrow and seen.elements == 512 and total <= most:
        # (16, 512, 5, 5) in bf16 takes 2.6 us on one warp, and 2.8 on more, (10, 4096, 7, 7) 7.1, and 8.1 with two on
        # two, (6, 662, 9, 9) in fp32 with gelu 4.7 and 3.2.
        return HeldConfig(1, 4 if problem.norm.smooth and size == 4 else 1)
    return None


def _row_of_planes(problem: Problem, seen: HeldUnits) -> int:
    """The channels of short planes whose rows make ROW_BYTES, where channels are many enough for that."""
    row = DTYPE_BYTES[problem.dtype] * power_of_two(seen.columns)
    return max(1, min(ROW_BYTES // row, power_of_two(seen.in_sample // FEWEST_SHARED + 1) // 2))


def _short_planes(problem: Problem, seen: HeldUnits) -> HeldConfig | None:
    """Channels of samples with short planes, several to a program, with 8 elements a thread; None for others. In bf16
    (128, 500, 2, 2) takes 2.5 us backward with 8 on 8 warps, and 4.0 with one on four, forward with relu 2.4 and 3.5,
    (64, 200, 4, 4) in fp16 2.4 with two on 8, and 2.7 with one, (20, 500, 3, 3) in bf16 2.4 with two on two, and 2.7.
    """
    if seen.contiguous or seen.affine == 3 or seen.columns == 1 or seen.rows == 1 or seen.elements < 256:
        return None
    if seen.flat and not (problem.backward and seen.elements == 256):
        return None
    units = _row_of_planes(problem, seen)
    if units == 1 or units * seen.elements > MOST_SHORT_ROWS:
        return None
    if seen.columns == 3 and seen.elements == 512:
        units = min(units, 4)  # (100, 700, 1, 3) in bf16 takes 2.8 us so, and 3.1 with 8, backward 3.2 and 3.6
    if not problem.backward and seen.units >= MANY_SHORT and seen.narrow(problem):
        # (16, 2132, 5, 3) in fp16 takes 2.9 us with two on one warp, and 3.7 on two, (30, 1200, 3, 3) with relu 3.1
        # with one on two, and 3.8 with two on four.
        return HeldConfig(2, 1) if seen.elements == 256 else HeldConfig(1, min(8, seen.elements // 256))
    # Of few channels a thread has two elements of narrow loads: in bf16 (15, 128, 13) with silu takes 2.0 us so, and
    # 2.8 with 8, its backward 2.0 and 2.7, in fp16 (14, 235, 15) with relu 2.0 and 2.9.
    few = seen.units < MANY_CHANNELS and seen.narrow(problem)
    # Of smooth backwards in fp32 too: (32, 384, 8) with gelu takes 2.1 us so, and 2.7 with 8.
    busy = problem.backward and problem.norm.smooth and problem.dtype == "float32"
    thread = 2 if seen.elements == 256 and (few or busy) else 8
    return HeldConfig(units, min(8, units * seen.elements // (32 * thread)))


def _modulated_samples(problem: Problem, seen: HeldUnits) -> HeldConfig | None:
    """The backward of channels of samples with scale and shift, whose four sums take registers; None for others.
    In fp16 (16, 2000, 3, 5) with silu takes 5.1 us with 4 elements a thread, and 11.4 with 8, (122, 384, 3, 5) 7.0
    with two units on 8 warps, and 9.5 with one, (100, 500, 2, 4) in bf16 3.9 with four on 16, and 4.7 with two on 4.
    Longer planes are many elements of a thread: (30, 1000, 5, 5) in bf16 takes 6.5 us with 32, and 9.3 with 16."""
    unit, short = seen.elements, seen.columns <= SHORT_ROW
    if unit == (2 * ALL_SAMPLES if short else ALL_SAMPLES) and seen.rows > 1 and seen.columns <= 4 * SHORT_ROW:
        return HeldConfig(1, 8)  # (50, 640, 3, 3, 3) in bf16 with relu takes 10.4 us so, and 11.5 on two warps
    if seen.rows == 1 or seen.in_sample < MANY_MODULATED or unit > ALL_SAMPLES:
        return None
    if unit <= 256:
        return HeldConfig(4, max(1, 4 * unit // (32 * 4))) if short else None
    if not short and unit >= 512:
        return HeldConfig(4, 4) if unit <= 1024 else None
    units = max(2, min(4096 // unit, _row_of_planes(problem, seen)))
    return HeldConfig(units, min(16, units * unit // (32 * (8 if unit <= 1024 else 16))))


def _short(problem: Problem, seen: HeldUnits) -> HeldConfig | None:
    """Short units that no rule of sizes suits; None for others."""
    return (_short_backward if problem.backward else _short_forward)(problem, seen)


def _short_forward(problem: Problem, seen: HeldUnits) -> HeldConfig | None:
    """Short units of a forward that no rule of sizes suits; None for others."""
    size, total = DTYPE_BYTES[problem.dtype], seen.units * seen.elements
    narrow, small = seen.narrow(problem), total <= SMALL_HELD
    few = problem.norm.per_batch and seen.units <= FEW_CHANNELS
    channels = seen.across == "sample" and seen.affine != 3 and not seen.contiguous
    if channels and not few and seen.elements <= 32 and total <= FEW_LANES:
        # (8, 256, 1, 3) in fp32 takes 1.7 us so, and 1.9 with 8 on two warps.
        return HeldConfig(max(1, min(128 // seen.elements, _fitting(seen))), 1)
    if channels and few and seen.elements == 64:
        return HeldConfig(2, 1)  # (3, 32, 3, 5) in bf16 takes 1.54 us so, and 1.62 with four on two warps
    few_channels = few and seen.contiguous and seen.positions
    if few_channels and seen.units <= 20 and 32 < seen.elements <= 64:
        # (3, 15, 21) in fp16 takes 1.46 us so, and 1.75 with four, (2, 15, 30) in fp32 with relu 1.63 and 1.75.
        return HeldConfig(2, 1)
    if few_channels and seen.elements == 128 and size == 2:
        return HeldConfig(4, 4)  # (4, 33, 21) in bf16 takes 1.56 us so, and 1.88 with two on a warp
    found = _few_neighbours(problem, seen)
    if found is not None:
        return found
    short = seen.contiguous and seen.positions and seen.elements == 128 and not problem.norm.per_batch
    if short and size == 2 and seen.units > 64 and total <= FEW_CONTIGUOUS:
        # (6, 64, 11, 11) in bf16 takes 2.17 us so, and 2.39 on two warps, (4, 64, 11, 11) in fp16 with scale and shift
        # 2.11 and 2.27.
        return HeldConfig(min(4, _fitting(seen)), 1)
    neighbours = seen.contiguous and seen.positions and not (problem.norm.per_batch or problem.modulated)
    if neighbours and seen.elements == 64 and size == 2 and total <= FEW_CONTIGUOUS and load_bytes(problem) < WIDE_LOAD:
        # (20, 17, 8, 8) in bf16 with silu takes 1.7 us so, and 2.0 with four on one warp, but (1, 200, 7, 7) 2.0, and
        # 1.8.
        return HeldConfig(min(8, _fitting(seen)), 4)
    if neighbours and 64 <= seen.elements <= 128 and size == 4 and seen.units <= PROCESSORS and seen.in_sample <= 16:
        # (8, 16, 9, 9) takes 2.0 us so, and 2.2 with four on two warps, (1, 15, 5, 7) with silu 1.6 and 1.8 with four
        # on one, but (2, 32, 128) with leaky_relu 2.3, and 2.0 with two.
        return HeldConfig(1, 1)
    if uneven(seen) and seen.positions and seen.elements <= 32 and seen.units <= PROCESSORS and not problem.modulated:
        # (28, 3, 7) in one group in fp32 with silu takes 1.51 us so, and 1.71 with 8 on two warps.
        return HeldConfig(min(2, _fitting(seen)), 1)
    shortest = 64 if problem.norm.per_batch and size == 4 else 32
    if seen.contiguous and seen.elements <= shortest and total <= FEW_CONTIGUOUS:
        # Rows of 32 bytes: batch_norm of (11, 96) in fp16 takes 1.6 us with 16 units of two elements to a thread, and
        # 1.9 on one warp, of (53, 16) in fp32 1.7 and 1.9, of (4, 2560) in bf16 with gelu 1.6, and 1.9 with 64 on four
        # warps, instance_norm of (52, 133, 3) with silu 1.7 on one warp, and 1.8, of (2, 172, 3, 3) in fp16 1.7 with 4
        # on one, and 2.2 with 8.
        some = seen.elements >= 16 and seen.in_sample >= 128 and seen.units <= MANY_SHORT
        most = 256 if problem.norm.per_batch else 64 if some else 128
        if seen.elements == 64 and seen.units > 3 * PROCESSORS:
            most = 512  # batch_norm of (56, 437) in fp32 takes 1.94 us so, and 2.04 with four, (60, 700) 2.01 and 2.11
        if seen.affine == 3 and seen.units <= 16 and seen.elements == 32 and size == 4:
            most = 64  # batch_norm of (25, 10) with scale and shift and silu takes 1.5 us so, and 2.0 with 8 on four
        units = max(1, min(32 // size, most // seen.elements, _fitting(seen)))
        # Of 128 lanes in fp32 (4, 41, 3) takes 1.44 us in batch_norm on one warp, and 1.64 on two.
        alone = not problem.norm.per_batch or (size == 4 and units * seen.elements <= 128)
        return HeldConfig(units, 1 if alone else max(1, units * seen.elements // 64))
    groups = seen.across == "channel" and seen.rows > 1 and seen.elements <= 512
    if narrow and not small and groups:
        # (50, 448, 7, 7) in 64 groups in fp32 takes 5.0 us so, and 12.1 with two units on two warps, (64, 640, 7, 7) in
        # 160 groups in bf16 6.3 with two on one, and 7.8 with four, (40, 512, 5, 5) in 128 groups in fp32 4.1 and 5.8.
        lanes = 512 if size == 2 else 256
        return HeldConfig(max(1, lanes // seen.elements), 1)
    if seen.positions and seen.columns == 3 and seen.elements == 2048 and not small:
        # (25, 96, 8, 33) in 32 groups in fp16: 4.5 us, and 6.6 with one, but (5, 96, 29, 16) in bf16 3.9 with two, and
        # 5.5 with four.
        return HeldConfig(min(4 if seen.units > 2 * PROCESSORS else 2, _fitting(seen)), 8)
    if sparse_rows(problem, seen) and seen.elements == SMALL_UNIT and size * problem.view.numel >= LARGE_BYTES:
        # Of 12 channels: (60, 768, 16, 16) in 64 groups in bf16 with silu takes 20.7 us so, and 29.5 with one.
        return HeldConfig(min(2, _fitting(seen)), 4)
    found = _narrow_neighbours(problem, seen)
    if found is not None:
        return found
    wide_row = seen.in_sample >= 64  # (53, 3, 32, 33) in bf16 with silu takes 2.6 us with one unit, and 3.6 with four
    if narrow and seen.contiguous and seen.elements == 2048 and size == 2 and wide_row:
        # (1, 267, 7, 16, 16) with silu takes 5.7 us with four, and 9.0 with two, (1166, 1037) in bf16 8.6, and 7.0 with
        # 8.
        units = 8 if problem.view.spatial == 1 else 4
        return HeldConfig(min(units, _fitting(seen)), 2 * units)
    shortest = seen.contiguous and seen.positions and seen.elements <= 32 and FEW_CONTIGUOUS < total <= SMALL_HELD
    if shortest:
        # A warp with rows of 64 bytes: (13, 1280, 3, 3) in fp32 takes 2.5 us so, and 5.4 with 64 units on 8 warps, and
        # of 32 for few programs: on an H100 (20, 234, 3, 3) in fp16 takes 1.8 us so, and 2.1 with rows of 64.
        # (81, 96, 3, 3) in fp32 takes 2.1 us with rows of 64, and 2.3 with rows of 32.
        # (22, 310, 3, 3) in fp16 takes 1.9 us with rows of 32, and 2.1 with rows of 64.
        row = 64 if 4 * total > 7 * FEW_CONTIGUOUS else 32
        # (17, 384, 5, 5) in fp32 with scale and shift and relu takes 2.3 us with 16, and 2.8 with 8.
        lanes = 512 if problem.modulated else 1024 // size
        # (50, 501, 3) in fp32 with scale and shift takes 1.9 us with 32, and 3.2 with 8.
        units = min(lanes // seen.elements, max(row // size, 128 // seen.elements))
        return HeldConfig(max(1, min(units, _fitting(seen))), 1)
    some_points = seen.contiguous and problem.view.spatial == 1 and problem.norm.per_batch and total <= FEW_CONTIGUOUS
    if some_points and problem.norm.smooth and 64 <= seen.elements <= 128:
        # (55, 768) in bf16 with gelu takes 2.0 us so, and 2.4 with 4 on a warp.
        return HeldConfig(min(8, _fitting(seen)), 8)
    rows_of_planes = seen.contiguous and seen.positions and size < 8 and seen.affine != 3 and not narrow
    rows_of_planes = rows_of_planes and total > 2 * FEW_CONTIGUOUS
    if rows_of_planes and seen.elements == 128:
        # (40, 64, 11, 11) in fp32 takes 3.1 us so, and 4.2 with 8 on 8 warps, (12, 384, 11, 11) in fp16 3.4, and 4.6.
        return HeldConfig(min(16, _fitting(seen)), 2)
    if rows_of_planes and seen.elements == 256 and total <= 4 * SMALL_HELD:
        # (3, 768, 16, 9) in fp16 takes 3.0 us so, and 5.7 with twice as many on 16, (2, 640, 16, 16) in fp32 2.7, and
        # 4.9 with 8 on 8.
        return HeldConfig(min(16, _fitting(seen)), 4)
    if small and seen.affine == 0 and seen.across != "sample" and seen.elements <= 512 and not seen.contiguous:
        if seen.samples == 1:  # and no second launch
            return _alone(problem, seen)
        # Few are a warp's: (7, 320, 3, 1) in bf16 with gelu_tanh takes 1.58 us so, and 1.66 on four.
        lanes = 64 if total <= FEW_LANES else 256
        units = max(1, min(lanes // seen.elements, _fitting(seen)))
        return HeldConfig(units, max(1, units * seen.elements // (32 * 2)))
    return None


def _narrow_neighbours(problem: Problem, seen: HeldUnits) -> HeldConfig | None:
    """The channels of one sample of channels_last that no widest load reads, 8 to a program, whose rows are what memory
    moves; fewer where that leaves multiprocessors idle; None for others. us so, and before: in bf16 (1, 670, 1200) 5.9
    and 7.1 with four, batch_norm of (2, 498, 750) 5.6 and 6.3, of (2, 670, 256) 3.3 and 3.5 with 16, (1, 1002, 1024)
    4.9 with 16 and 5.3, (1, 271, 600) 3.4 with four and 3.6, in fp32 3.4 and 4.0, (1, 270, 2048) with four 7.3 and 8.6,
    batch_norm of (2, 135, 600) with two 4.7 and 5.1, (1, 3001, 300) 5.8 and 6.3 with 16."""
    neighbours = seen.contiguous and seen.positions and seen.samples == 1 and problem.view.spatial > 1
    if not neighbours or problem.modulated or seen.load_bytes(problem) == WIDEST_LOAD or seen.in_sample < MANY_LONG:
        return None
    size = DTYPE_BYTES[problem.dtype]
    if size > 4 or not 256 <= seen.elements <= 2048 or seen.units * seen.elements <= SMALL_HELD:
        return None
    many = seen.units >= 7 * PROCESSORS
    if size == 2 and many and seen.elements == 1024:  # those of single elements are as many on 16 warps
        return HeldConfig(16, 8) if seen.load_bytes(problem) > size else None
    units = 8 if seen.units >= 3 * PROCESSORS else 4
    if size == 4 and seen.units < 3 * PROCESSORS // 2:
        units = 2
    long = size == 2 and seen.elements == 2048 and many
    return HeldConfig(units, 16 if long else 8)


def _short_backward(problem: Problem, seen: HeldUnits) -> HeldConfig | None:
    """Short units of a backward that no rule of sizes suits; None for others."""
    size, total = DTYPE_BYTES[problem.dtype], seen.units * seen.elements
    narrow, small = seen.narrow(problem), total <= SMALL_HELD
    few = problem.norm.per_batch and seen.units <= FEW_CHANNELS
    if few and seen.contiguous and seen.elements <= 128:
        return HeldConfig(2, 1)  # (35, 45) in bf16 with silu takes 1.7 us so, and 2.4 with 4 units on a warp
    channels = seen.across == "sample" and seen.affine != 3 and not seen.contiguous
    if channels and few and 32 <= seen.elements <= 256:
        # (19, 16, 1, 3) in fp32 with leaky_relu takes 1.6 us so, and 1.9 with 4 on two warps, (27, 4, 3) 1.53 and 1.84
        # with two, (20, 6, 5) 1.65 and 1.82.
        return HeldConfig(1, 1)
    if channels and 32 <= seen.elements <= 64 and seen.units <= 6 * FEW_CHANNELS:
        # On an H100 (6, 96, 1, 5) in fp32 with gelu takes 1.7 us so, and 2.1 with 8 on two, (12, 320, 3) in fp16 1.83,
        # and 2.10 with four on two.
        return HeldConfig(2, 1)
    found = _few_neighbours(problem, seen)
    if found is not None:
        return found
    odd = narrow and seen.contiguous and seen.positions and seen.samples > 1 and size == 2
    if odd and 128 <= seen.elements <= 256 and (seen.affine == 0 or seen.elements == 256):
        # Rows of 32 bytes: (25, 759, 9, 9) in bf16 with relu takes 7.3 us with 16 on four warps, and 9.0 with 8, (16,
        # 2429, 16, 16) with gelu 39.9 with 16 on 8, and 47.2 with 8, (43, 406, 7, 27) in fp16 with relu 11.7 and 15.8,
        # (24, 759, 13, 13) in bf16 13.4 and 16.6, (30, 650, 14, 14) with scale and shift 15.8 and 19.7, but (20, 501,
        # 15, 13) with gelu_tanh 11.7 and 11.1, (52, 19, 19, 8) with scale and shift and silu 5.3 on four warps and 4.2.
        most = 16 if total > (2 if seen.elements == 128 else 12) * SMALL_HELD else 8
        return HeldConfig(max(1, min(most, _fitting(seen))), seen.elements // 32)
    if odd and seen.elements == 64 and problem.norm.smooth and seen.affine == 0:
        # (33, 71, 7, 7) in fp16 with silu takes 3.6 us so, and 4.3 with 4 on a warp.
        return HeldConfig(max(1, min(8, _fitting(seen))), 4)
    points = seen.affine == 3 and seen.contiguous and total <= FEW_CONTIGUOUS // 4
    if points and seen.elements <= 32:
        return _few_points(problem, seen)
    if points and seen.elements == 256 and seen.units <= 32 and problem.view.spatial == 1:
        return HeldConfig(2, 4)  # (235, 26) in fp16 with silu takes 2.7 us so, and 3.9 with four on two warps
    if seen.positions and (not seen.contiguous or (seen.samples > 1 and total <= 4 * SMALL_HELD)):
        return _positions_backward(problem, seen)
    planes = seen.across == "channel" and seen.rows == 1 and seen.affine == 0 and not problem.modulated
    if planes and size == 4 and seen.elements == 128 and not narrow and total > 4 * SMALL_HELD:
        # (112, 256, 112) takes 12.6 us so, and 14.5 on two warps, (64, 512, 88) 12.2 and 13.7, with silu (112, 256, 88)
        # 11.9 and 12.7.
        return HeldConfig(min(8, _fitting(seen)), 8)
    if narrow and not small and 16 <= seen.elements <= 512 and not seen.contiguous:
        return _short_narrow(problem, seen, total)
    if small and seen.affine == 0 and seen.across != "sample" and seen.elements <= 512 and not seen.contiguous:
        if seen.samples == 1:  # and no second launch
            return _alone(problem, seen)
        return _few_planes_backward(problem, seen)
    if seen.affine == 3 and seen.contiguous and seen.elements >= 512:
        # Four sums: in bf16 (900, 1024) takes 13.7 us with 8 units to a program and 16 elements a thread, 35 with 16,
        # (288, 43) 3.7 with one, and 12.3 with 16.
        # (294, 768) with gelu takes 6.5 us with 8, and 7.5 with 16.
        most = power_of_two(max(1, 2 * seen.units // PROCESSORS) + 1) // 2
        if seen.units >= 96:  # (420, 128) in fp16 with relu takes 5.4 us so, and 11.6 with one on a warp
            most = max(4, most)
        units = max(1, min(SHARING_HELD // seen.elements, 32 // size, _fitting(seen), most))
        return HeldConfig(units, max(1, units * seen.elements // (32 * 16)))
    if narrow and _rows(seen) and seen.elements <= (256 if small else 16):
        if seen.units > 4 * PROCESSORS or not small:
            # Several short ones: on an H100 (479, 192) in 32 groups in bf16 with silu takes 4.6 us with 16 on two
            # warps, and 22 with one, (200, 336) in 16 groups 3.7 with 4, and 6.1, (490, 640) in 64 in fp16 5.6 with 16,
            # and 6.2 with 64.
            return HeldConfig(max(1, (128 if small else 256) // seen.elements), 2)
        # One element a thread: (21, 101) in fp16 takes 2.8 us so, and 3.2 with 2 rows to a program and 4 a thread.
        return HeldConfig(1, max(1, seen.elements // 32))
    return None


def _few_neighbours(problem: Problem, seen: HeldUnits) -> HeldConfig | None:
    """A few short units of one sample that are neighbours in memory; None for others."""
    if not (seen.contiguous and seen.samples == 1 and seen.positions) or seen.units * seen.elements > FEW_CONTIGUOUS:
        return None
    if 128 <= seen.elements <= 512 and seen.units <= 8:
        # (1, 4, 11, 11) in fp32 with gelu takes 1.6 us backward so, and 2.6 with four on two warps.
        return HeldConfig(1, seen.elements // 64)
    if problem.backward and seen.elements == 1024 and 16 < seen.units <= 64 and seen.affine != 3:
        return HeldConfig(2, 8)  # (4, 64, 8, 28) in fp32 takes 4.0 us so, and 4.4 with one on four warps
    return None


def _few_points(problem: Problem, seen: HeldUnits) -> HeldConfig:
    """The backward of few points with scale and shift, one element a thread: on an H100 (17, 96) in fp32 takes 1.8 us
    with two channels on a warp, and 2.3 with 8 on four, (5, 1280) in bf16 1.8 with four, and 2.4 with 32, but (32, 512)
    in fp32 with gelu 2.1 with 8 on 8 warps, and 2.4 with two on one."""
    if seen.elements == 32 and problem.norm.smooth:
        return HeldConfig(8, 8)
    return HeldConfig(max(2, min(4, 32 // seen.elements)), 1)


def _few_planes_backward(problem: Problem, seen: HeldUnits) -> HeldConfig:
    """Few units of one channel: a program has one of 128 elements or more, with 8 a thread, and 4 with a smooth
    activation, whose instructions are many. With silu (30, 10, 9, 9) in bf16 takes 3.0 us so, and 4.0 with two units to
    a warp, with gelu (10, 8, 19, 19) in fp32 3.1, and 4.1 on one warp. Shorter ones are several, of two elements a
    thread: (80, 40, 3, 3, 3) in bf16 with gelu takes 3.3 us with four on two warps, and 4.4 with eight on one."""
    smooth, load = problem.norm.smooth, seen.load_bytes(problem) // DTYPE_BYTES[problem.dtype]
    if smooth and seen.elements == 64 and seen.units > MANY_SHORT:
        # (19, 115, 5, 7) in fp32 with leaky_relu takes 3.3 us so, and 4.5 with one, (19, 96, 5, 9) in bf16 with silu
        # 3.4 and 4.2.
        return HeldConfig(2, 1)
    lanes, thread = (64, 4) if smooth else (256 if seen.elements == 64 else 128, 8)
    if seen.elements <= 32:
        lanes, thread, load = 128, 2, 1
    units = max(1, min(lanes // seen.elements, _fitting(seen)))
    return HeldConfig(units, max(1, units * seen.elements // (32 * max(thread, load))))


def fewest(unit: int, narrow: bool) -> int:
    """The elements of a thread in a small problem, whose time is that of one program from its first instruction to its
    last: fewer shorten the code, whose instructions come from memory too, and spread units over more warps."""
    return 2 if unit < 128 or (narrow and unit == 512) else 4


def of_many_points(problem: Problem, seen: HeldUnits) -> bool:
    """Whether a backward is one of many samples of one position, whose p and q would be more bytes than their elements:
    it walks over the samples. (65536, 768) in 32 groups in bf16 takes 111 us so, and 377 with p and q in memory, (8192,
    1024) in fp32 30 and 76, but (65536, 11) in one group with gelu 28 and 14. Of several positions a walk is no faster:
    (4096, 256, 3, 3) takes 58 us, and 53."""
    if not problem.backward or problem.added is not None or seen.across == "sample" or seen.affine == 3:
        return False
    many = seen.samples >= WALKED_SAMPLES and problem.view.numel > WALKED_ELEMENTS
    many = many and problem.view.channels >= WALKED_CHANNELS
    return problem.view.spatial == 1 and many and seen.elements <= SHARING_HELD


def _walk(problem: Problem, seen: HeldUnits) -> HeldConfig:
    """A row of units to a program; WALKED_LANES of it where loads are narrow or the last program would have few of its
    units. Narrow loads that leave lanes empty are not ahead of their use, but those of many warps."""
    size, full = DTYPE_BYTES[problem.dtype], seen.columns / seen.elements
    narrow, single = seen.narrow(problem), seen.load_bytes(problem) == size
    least = FEWEST_SINGLES if single and not (problem.modulated and size > 2) else FEWEST_ALONE
    if narrow and full < 1 and least <= seen.elements <= MOST_ALONE:
        return _walk_alone(problem, seen, single)
    if problem.modulated and single and size > 2 and full < 0.75 and seen.elements <= WALKED_LANES:
        return HeldConfig(max(1, WALKED_TILE // size // seen.elements), 4)
    simple = problem.norm.activation is None and not problem.modulated
    if narrow and seen.elements == SHORT_ALONE and simple:
        # Pairs: (65536, 192) in 32 groups in fp16 takes 42.6 us so, and 51 in rows of 16 units on four warps,
        # (26041, 384) in 64 34.1 and 40.9, but (65536, 96) in 16 with relu 31.5, and 28.9.
        return walk_of(seen, 4, WALKED_LANES, 4, 32, 1)
    units = max(1, min(power_of_two(seen.in_sample), WALKED_TILE // seen.elements))
    if narrow or 5 * seen.in_sample < 4 * units * -(-seen.in_sample // units):
        units = max(1, min(units, WALKED_LANES // seen.elements))
    if problem.modulated and single and size == 2 and seen.elements > 4:
        return walk_of(seen, max(1, units // 2), WALKED_TILE, 16, 8, 3)
    if problem.modulated and narrow and not single:
        return walk_of(seen, units, WALKED_TILE // 2, 4, 16, 1)
    if narrow and full < 1 and seen.elements == WALKED_TILE // 2 and not problem.modulated:
        # (4393, 1708) in 4 groups in fp32 with silu takes 32.8 us so, and 46.6 as below.
        return walk_of(seen, min(2, power_of_two(seen.in_sample)), WALKED_TILE, 16, 8, 3)
    if narrow and full < 1 and seen.elements >= WALKED_TILE:
        if not single:
            # Pairs: in bf16 (15952, 1052) in two groups takes 51.4 us so, and 78 as below, (9000, 1500) with silu 42.1
            # and 54.6, (5000, 7000) in 4 groups 74 and 118, (8000, 3000) in fp16 with relu 59.3 and 83.2, (2515, 7952)
            # in 8 with silu 47.5 and 66.9.
            return walk_of(seen, units, WALKED_TILE, 16, 8, 3)
        if size == 2 and not problem.norm.smooth and seen.elements == WALKED_TILE and (simple or 4 * full <= 3):
            # Single elements: (12000, 1554) in two groups in bf16 takes 46.6 us so, and 60.2 as below, (9000, 3003) in
            # three in fp16 57.8 and 72.0, (21897, 1370) in two with relu 74 and 112, but (987, 30368) in 32 with relu
            # 96, and 87, (6000, 5001) in three in bf16 with silu 118, and 109.
            return walk_of(seen, units, WALKED_TILE, 16, 16, 3)
    if narrow and full < 1:
        return walk_of(seen, units, WALKED_TILE, 8, 16, 1)
    if problem.modulated and size == 2 and full < 1:
        if seen.elements == WALKED_LANES and full < 0.75:
            # (3000, 2560) in 32 groups in fp16 takes 31.8 us so, and 36.2 on half the warps.
            return walk_of(seen, units, WALKED_TILE, 8, 16, 3)
        if seen.elements == WALKED_LANES // 2 and problem.norm.smooth:
            # (65536, 392) in 7 groups in bf16 with silu takes 176 us so, and 203 as below.
            return walk_of(seen, 2, WALKED_TILE, 16, 8, 1)
    # (4657, 960) in 5 groups in fp16 with gelu takes 18.5 us so, and 21.8 with 16 elements a thread, (65536, 140) in 70
    # with gelu_tanh 58, and 76, of short units (18006, 64) in 32 groups in bf16 9.4, and 12.8, (40000, 64) 13.1 and
    # 15.7, (2000, 600) in 300 in fp32 9.5 and 13.5.
    short = seen.elements <= SHORT_WALKED and seen.samples <= 3 * MANY_WALKED
    busy = problem.modulated or (size == 2 and problem.norm.smooth) or short
    if problem.modulated and seen.elements <= 32 and not problem.norm.smooth and seen.samples > MANY_WALKED:
        # (25550, 640) in 32 groups in fp16 takes 66 us so, and 76 with 8 elements a thread.
        busy = False
    if size == 4 and full < 1 and seen.elements == 16 and not busy and not problem.norm.smooth:
        # (65536, 384) in 32 groups takes 88 us so, and 105 with 16 elements a thread and three stages, (30000, 384)
        # 44.5 and 51.6.
        return walk_of(seen, units, WALKED_TILE, 4, 32, 1)
    if size == 4 and not problem.modulated and 32 <= seen.elements <= 64 and seen.units * seen.elements <= FEW_WALKED:
        # Few steps are not ahead of one another: (2955, 204) in 6 groups takes 8.7 us by warps alone, and 13.7 with
        # three steps of 1024 lanes in flight, (8000, 60) in two 7.7 and 9.8, (6000, 128) in 4 with silu 9.5 and 12.3,
        # (900, 384) in 8 with relu 6.6 and 7.1.
        units = min(power_of_two(seen.in_sample), WALKED_LANES // seen.elements)
        return walk_of(seen, units, WALKED_LANES, 4, 32, 1)
    if size == 4 and seen.load_bytes(problem) == WIDE_LOAD and problem.norm.smooth and seen.elements <= 4:
        # Loads of 8 bytes are slow ahead of their use: (9978, 94) in 47 groups with silu takes 10.3 us so, and 13.1.
        return walk_of(seen, units, WALKED_TILE, 8, 16, 1)
    return walk_of(seen, units, WALKED_TILE, 8 if busy else 16, 8, 3)


def _walk_alone(problem: Problem, seen: HeldUnits, single: bool) -> HeldConfig:
    """The walk of a warp alone, in tiles of 2 to 8 lanes a thread. Of loads that no vector takes, Triton lays the lanes
    of a unit over several warps where a program has them, whose sums then go through shared memory and barriers.
    (65536, 301) in 7 groups in bf16 takes 71 us so, and 158 on 4 warps, (30000, 301) with scale and shift 53 and 221,
    (65536, 146) in 2 groups in fp32 36 and 67, (2500, 1004) in 4 groups in bf16 with relu 11.6 and 15.9."""
    elements, busy = seen.elements, problem.modulated or problem.norm.smooth
    samples = max(1, WALKED_ALONE // elements)
    if single and elements <= FEWEST_ALONE and (elements < FEWEST_ALONE or not busy):
        # Two lanes a thread: (50000, 63) in 7 groups in bf16 takes 24.5 us so, and 40.1 with four lanes, (65536, 33) in
        # 3 in fp16 16.4 and 28.7, (40000, 63) in 9 17.0 and 21.6 on four warps, (30000, 33) in 11 in fp32 10.9 and
        # 15.5, (20000, 65) in 13 with scale and shift in bf16 18.8 and 24.5.
        samples = 2 if problem.modulated else 4
        units = min(WALKED_ALONE // (samples * elements), power_of_two(seen.in_sample))
        return walk_of(seen, units, WALKED_ALONE, 2, 32, 1)
    if DTYPE_BYTES[problem.dtype] == 4:
        # (50000, 102) in 6 groups takes 34.6 us with two, and 38.2 with one, (20000, 189) in 9 with silu 32 and 27.7.
        units = 1 if busy and (not problem.modulated or elements < 32) else 2
        warps = 16 if problem.modulated else 32
    else:
        # (20000, 300) in 30 groups in bf16 takes 25.8 us with two of 4 samples, and 27.4 with four of 2, (9000, 352) in
        # 32 with scale and shift and silu 27.6 with four of one.
        units, warps = (1 if elements >= 32 else 4 if busy else 2), 16 if elements == MOST_ALONE else 32
        if busy:
            samples = max(1, samples // units)
        elif elements < MOST_ALONE:
            samples = max(2, samples)
    units = min(units, power_of_two(seen.in_sample))
    lanes = units * samples * elements
    return walk_of(seen, units, lanes, lanes // 32, warps, 1)


def walk_of(seen: HeldUnits, units: int, lanes: int, thread: int, warps: int, stages: int) -> HeldConfig:
    """The walk with so many neighbouring units and ``lanes`` of a tile, elements of a thread, warps to a multiprocessor
    and stages."""
    samples = max(1, lanes // (units * seen.elements))
    program = max(1, min(16, units * samples * seen.elements // (32 * thread)))
    blocks = -(-seen.in_sample // units)
    chunks = max(1, PROCESSORS * warps // (program * blocks))
    steps = max(2, -(-seen.samples // (samples * chunks)))
    return HeldConfig(units, program, samples=samples, steps=steps, stages=stages)


def _rows(seen: HeldUnits) -> bool:
    """Whether units are rows with parameters along them."""
    return seen.affine == 2 and seen.rows == 1


def _all_samples(problem: Problem, seen: HeldUnits) -> HeldConfig | None:
    """The units in one place of all samples, where these are few; None where they are not."""
    total, rows, narrow = seen.units * seen.elements, _rows(seen), seen.narrow(problem)
    if not problem.backward or seen.samples == 1:
        return None
    small = total <= SMALL_HELD
    most = ALL_SAMPLES if small and not rows else ALL_SAMPLES // 2 if total <= 4 * SMALL_HELD else 0
    if seen.positions and total > ALL_SAMPLES_LAST:
        most = 0
    if rows and narrow and small and seen.samples <= FEW_ROWS:
        most = ALL_SAMPLES  # (6, 250) in bf16 with gelu takes 2.5 us so, and 3.0 with partials of each row
    elif narrow and problem.norm.smooth:
        # (20, 11, 61) in fp16 with silu takes 3.1 us so, and 2.7 with partials of each sample, with scale and shift 6.0
        # and 3.2.
        most = min(most, ALL_SAMPLES // 2)
    elif rows and problem.norm.smooth and problem.norm.has_mean and seen.in_sample == 1:
        # On an H100 (8, 128) in fp16 with silu takes 3.3 us so, and 2.6 with partials of each sample.
        most = min(most, ALL_SAMPLES // 4)
    samples = power_of_two(seen.samples)
    lanes = samples * seen.elements
    if lanes > (most if small else min(most, _most_sharing(problem, seen, narrow))):
        return None
    if rows:
        # Of wide loads a thread has one place of several rows; of narrow ones it has few elements: (6, 122) in bf16
        # with gelu takes 2.0 us on 8 warps, and 5.0 on 2, (8, 64) 1.8 on 4, and without an activation 1.8 on 2.
        warps = 8 if narrow else 4 if problem.norm.smooth else max(2, lanes // (32 * 16))
        return HeldConfig(samples, max(1, min(warps, lanes // 32)), all_samples=True)
    # On an H100 (8, 2000, 5, 5) in bf16 with silu takes 4.1 us with 4 elements a thread, and 4.9 with 8.
    thread = max(fewest(seen.elements, narrow), thread_elements(total, 4 if narrow else 8))
    return HeldConfig(samples, max(1, min(8, lanes // (32 * thread))), all_samples=True)


def _most_sharing(problem: Problem, seen: HeldUnits, narrow: bool) -> int:
    """Elements of the units in one place of all samples, of many places, up to which one program has them. On an H100
    (47, 699, 3, 3) in fp16 with scale and shift and silu takes 11 us so, and 5.7 with partials of each sample, (48,
    1280, 3, 3) in fp32 with silu 9.7 and 7.6, (10, 1280, 7, 7) in fp16 9.1 and 5.7, but (60, 300, 3, 5) in fp32 with
    relu 3.7 and 4.4, (62, 279, 3, 3) with silu 3.4 and 4.4, (30, 384, 27) with scale and shift 4.7 and 5.6."""
    if problem.modulated and (problem.norm.smooth or seen.elements <= SHORT_ROW):
        return 0
    # (40, 829, 3, 3) in fp32 takes 5.2 us in a program for all samples, and 4.6 with partials of each, (4, 2048, 3, 5,
    # 5) in bf16 5.9 and 4.3.
    total = seen.units * seen.elements
    share = 2 if not narrow or 8 * total <= 15 * SMALL_HELD else 4 if total <= 3 * SMALL_HELD else 8
    return ALL_SAMPLES // share


def _alone(problem: Problem, seen: HeldUnits) -> HeldConfig:
    """Few units of one sample: a warp to a unit, or to several where they are many; or short ones with 2 elements a
    thread, and 4 with scale and shift. In bf16 (1, 1607, 11) takes 1.6 us backward, and 2.1 with 8 a thread; in fp16
    (1, 400, 11, 11) 1.7, and 2.0 with two units and two warps, (1, 2048, 4, 4) with scale and shift 1.9, and 2.2 with
    2 a thread, in bf16 (1, 1024, 8, 8) 1.9, and 2.3 with a warp to a unit."""
    if seen.elements >= 64:
        # With an activation (1, 2560, 7, 5) in fp32 takes 2.2 us backward with two units, and 3.5 with four.
        lanes = 128 if problem.backward and seen.elements == 64 else 256
        return HeldConfig(max(1, min(lanes // seen.elements, power_of_two(seen.in_sample // 256 + 1) // 2)), 1)
    units = max(1, min(256 // seen.elements, _fitting(seen)))
    thread = fewest(seen.elements, seen.narrow(problem))
    if problem.modulated and problem.backward:  # (1, 1804, 3, 3) in fp32 takes 1.9 us with one, and 2.4 with 4
        thread = 4 if DTYPE_BYTES[problem.dtype] == 2 else 1
    return HeldConfig(units, max(1, units * seen.elements // (32 * thread)))


def _positions_backward(problem: Problem, seen: HeldUnits) -> HeldConfig:
    """Groups of channels_last make 1024 elements or more, with 32 to a thread: it then sums the positions of its
    channels alone. (26, 2560, 1, 3) in 32 groups in fp16 takes 4.4 us with two groups on one warp, and 13.7 on four.
    Units of one channel are together for 64 bytes: (20, 756, 5, 5) in fp32 takes 4.8 us in instance_norm, and 11.6
    where a program has a channel of all samples."""
    size = DTYPE_BYTES[problem.dtype]
    if seen.contiguous and seen.units * seen.elements <= 4 * SMALL_HELD and seen.elements <= 64:
        return _short_positions_backward(seen, size)
    if seen.contiguous:
        most = SHARING_HELD if seen.elements >= 1024 else SMALL_UNIT
        units, thread = min(64 // size, max(1, most // seen.elements)), 32
        simple = not problem.norm.smooth and not problem.modulated
        if size == 4 and seen.elements == 2048 and seen.units > 3 * PROCESSORS and simple:
            units = 8  # rows of 32 bytes: (2, 256, 31, 64) takes 8.3 us so, and 10.3 with four on 8 warps
        programs = power_of_two(seen.units // FEWEST_SPREAD + 1) // 2
        if seen.elements >= SMALL_UNIT and seen.units <= PROCESSORS:
            programs = 1  # (41, 2, 9, 8, 33) in bf16 with leaky_relu takes 4.2 us with one, and 5.3 with two
        if programs < units:
            # (3, 57, 5, 5, 5) in fp32 takes 3.1 us so, and 3.8 with 16 units on two warps, (12, 3, 1313) in bf16 3.3
            # with one on 8, and 4.2 with four.
            units = max(1, programs)
            lanes = units * seen.elements
            thread = 4 if lanes <= 512 else 16 if seen.elements <= 256 and lanes >= 2048 else 8
    else:
        # (64, 100, 10, 10) in 10 groups in bf16 with gelu takes 6.6 us with 16 elements a thread, and 8.1 with 32.
        short = load_bytes(problem) < WIDEST_LOAD and 2048 <= seen.elements <= 4096
        # Few groups are a program's each: (2, 768, 11) in 64 groups in fp32 takes 2.9 us so, and 4.7 with four.
        together = min(1024 // seen.elements, power_of_two(seen.units // PROCESSORS + 1) // 2)
        units = max(together, _row_of_groups(problem, seen))
        # (40, 320, 10, 10) in 32 groups in fp32 takes 9.7 us with 16, and 12.1 with 32.
        long = size == 4 and 1024 <= seen.elements <= 2048
        thread = 16 if uneven(seen) or short or long else 32
        small = seen.units * seen.elements <= 2 * FEW_CONTIGUOUS and seen.elements <= 512
        if seen.elements == 512 and size == 2 and seen.units * seen.elements <= SMALL_HELD:
            thread = 16  # (14, 960, 3, 3) in 32 groups in bf16 takes 3.4 us so, and 4.6 with 32
        if small and seen.elements == 512 and seen.units <= 16:
            thread = 2  # (1, 192, 3, 3) in 8 groups in fp32 with gelu_tanh takes 2.0 us so, and 2.5 with 16
        elif small and uneven(seen):
            # (30, 27, 8, 8) in 9 groups in fp16 with leaky_relu takes 3.2 us so, and 3.9 with four units on two warps.
            units, thread = min(units, together), 4
        if seen.elements == 4096 and seen.units <= PROCESSORS and size == 2:
            thread = 16  # (4, 960, 9, 9) in 32 groups in fp16 with silu takes 4.6 us so, and 5.8 with 32
        few = seen.units <= PROCESSORS // (1 if seen.in_sample == 1 else 4)
        if seen.elements == 1024 and few:
            # (29, 4, 191) in one group in fp16 with gelu_tanh takes 2.9 us so, and 4.4 with 32, (75, 11, 5, 9) in one
            # with silu 3.2 and 5.1.
            thread = 4
    if size == 4 and seen.columns == 2 and seen.elements == SMALL_UNIT and seen.units > 2 * PROCESSORS:
        # Rows of 32 bytes: (42, 22, 64, 27) in 11 groups takes 13.2 us so, and 17.8 with two.
        return HeldConfig(min(4, power_of_two(seen.in_sample)), 8)
    fits = size * seen.elements <= 2 * MOST_HELD  # the registers of 8 warps
    most = 8 if load_bytes(problem) < WIDEST_LOAD and not seen.contiguous and fits else 16
    units = max(1, min(units, power_of_two(seen.in_sample), 32 * 32 * most // seen.elements))
    return HeldConfig(units, max(1, min(most, units * seen.elements // (32 * thread))))


def _short_positions_backward(seen: HeldUnits, size: int) -> HeldConfig:
    """Short units of one channel of channels_last: about 640 programs, with 8 elements a thread of the longest of them
    and 16 of others. (20, 512, 7, 7) in fp32 with silu takes 5.8 us with 16 units on 4 warps, and 9.0 on one, (2, 2048,
    3, 3) in fp16 3.0 with 8 units on one warp, and 3.8 with 32."""
    lanes = power_of_two(seen.units * seen.elements // 640 + 1) // 2
    least, thread = (256, 8) if seen.elements == 64 else (128, 16)
    if size == 2 and seen.elements == 64 and lanes >= 512:
        # (8, 2048, 49) in fp16 takes 5.0 us so, and 7.7 on four warps, (8, 960, 8, 8) with relu 4.2, and 5.4 with 8
        # units on two.
        lanes, thread = 1024, 32
    units = max(1, min(max(least, min(1024, lanes)) // seen.elements, power_of_two(seen.in_sample)))
    return HeldConfig(units, max(1, units * seen.elements // (32 * thread)))


def _held_thread(problem: Problem, seen: HeldUnits, program: int, rows: bool) -> int:
    """The elements of a thread, where a program has ``program``: 2 to 8 of a small problem, a warp to a small unit;
    where there are many elements 8 or 16, and more of a forward of 16 bits, where units are neighbours in memory, and
    where programs have ``rows`` of several short units."""
    size, total, narrow = DTYPE_BYTES[problem.dtype], seen.units * seen.elements, seen.narrow(problem)
    if _padded(problem, seen):
        # (86, 3, 16, 7) in one group in fp32 takes 2.0 us with 4, and 2.4 with 16.
        return 4 if total <= FEW_CONTIGUOUS else 8 if seen.columns == 3 and seen.elements == 1024 else 16
    if rows:
        return 16 if program <= 2048 or (problem.backward and program <= 4096) else 32
    if total <= SMALL_HELD:
        return max(_small_thread(problem, seen, narrow), min(32, program // _most_small(problem, seen)))
    if seen.contiguous and problem.backward and seen.affine == 3 and seen.elements <= 128:
        return 16  # (69, 2560) in fp16 with scale and shift and silu takes 4.6 us so, and 6.2 with 4
    if seen.contiguous:
        if narrow and seen.elements == 256 and not problem.backward:
            # (62, 759, 153) in fp16 with scale and shift takes 20.0 us so, and 22.5 with 32, in bf16 19.7 and 20.4.
            return 16
        if narrow:  # (20, 1111, 5, 9) in fp32 takes 5.1 us with 16 elements a thread, and 5.7 with 32
            return 32 if size == 2 else 16
        busy = problem.backward and size == 4 and problem.norm.smooth and seen.elements >= 512
        thread = thread_elements(total, 64 if size == 2 and not problem.backward else 16 if busy else 32)
        if seen.elements <= 32 and not problem.backward:
            # A thread sums its units alone: (95, 320, 3, 3) in fp16 takes 2.5 us so, and 4.4 with 8 elements a thread.
            thread = max(thread, 32)
        # (2, 224, 13, 16, 8) in fp16 with scale and shift takes 6.5 us with 32, and 10.1 with 64.
        few = seen.elements == 1024 or (seen.elements == 2048 and not problem.backward)
        few = few and (program <= SHARING_HELD or seen.units <= 16 * PROCESSORS)
        few = few or (seen.elements == SMALL_UNIT and seen.in_sample <= MOST_NEIGHBOURS)
        return (32 if few else 64) if size == 2 and seen.elements >= 512 else thread
    if seen.affine == 3 and size == 2 and not problem.backward and seen.elements <= ALL_SAMPLES:
        return 16
    if seen.positions and not problem.backward and load_bytes(problem) < WIDEST_LOAD and seen.elements >= 2048:
        # In fp16 (30, 250, 11, 11) in 25 groups takes 4.6 us with 16, and 5.1 with 8, (55, 1946, 32) with scale and
        # shift in 14 groups 9.0 with 64, and 11.1 with 32.
        if seen.elements <= 4096:
            return 16
        return 64 if size == 2 and total > 4 * SMALL_HELD else 32
    groups = seen.across == "channel" and seen.rows > 1 and seen.units > 2 * PROCESSORS
    groups = groups and (size == 2 or not problem.norm.smooth)
    if problem.backward and narrow and groups and 1024 <= seen.elements <= 4096:
        # (64, 200, 15, 15) in 50 groups in fp32 takes 12.0 us so, and 13.1 on four warps, (22, 1280, 5, 5) in 32 7.4
        # and 8.8, (12, 512, 19, 19) in 256 groups in bf16 9.0, and 7.6 on two, in fp16 (100, 512, 15, 15) in 32 with
        # silu 38, and 59 with 16, (100, 512, 7, 7) 12.1 and 17.6, without it (10, 256, 17, 17) 5.6 and 6.5.
        # Of many channels 16 are faster: in 32 groups (75, 1280, 3, 3, 3) in fp16 with silu takes 15.5 us so, and 18.8,
        # (155, 1024, 63) in bf16 with relu 47 and 50.
        if seen.elements == 2048 and seen.rows >= 2 * MANY_PLANES and (size == 2 or seen.units > 16 * PROCESSORS):
            # (80, 1280, 3, 7) in fp32 takes 14.9 us so, and 17.0 with 32, but with scale and shift (90, 1280, 3, 7) in
            # fp16 23.5 and 18.7, (100, 320, 3, 7) in 8 groups in bf16 10.0 and 7.8.
            return 32 if problem.modulated else 16
        if size == 2 and seen.elements == 4096 and seen.rows > 2 * MANY_PLANES and seen.full >= 0.8:
            return 16  # (77, 2048, 63) in 32 groups in fp16 with relu takes 49 us so, and 57 with 32
        if size == 2 and seen.elements == 1024 and problem.norm.smooth and seen.rows > 2 * MANY_PLANES:
            # (128, 700, 3, 5) in 20 groups in fp16 with silu takes 9.7 us so, and 11.5 on one warp, but (120, 576, 17)
            # in 32 13.4 and 12.0.
            return 8
        return 32 if seen.elements > 1024 or seen.rows > 2 else 16
    light = not problem.backward or (size == 4 and problem.norm.activation is None)
    large = seen.elements == SHARING_HELD or (seen.elements == SMALL_UNIT and size == 4 and not problem.backward)
    if light and seen.across == "channel" and narrow and large:
        # (20, 512, 17, 17) in 32 groups in fp32 takes 10.1 us so, and 12.2 with 16, backward 18.5 and 24.2, (30, 256,
        # 17, 17) with silu 7.4 and 8.5, (4, 512, 21, 21) in fp16 with silu 4.0 and 4.6.
        return 32
    if problem.backward and seen.across == "sample" and size == 4 and seen.affine != 3 and seen.elements == 8192:
        return 16  # (40, 600, 10, 10) takes 10.7 us so, and 12.8 with 32
    if seen.affine == 3 and size == 4 and not problem.backward and narrow and seen.columns <= SHORT_ROW:
        # (82, 815, 11) with silu takes 6.3 us so, and 7.9 with 32, but (40, 1000, 31) 9.4, and 8.4.
        return 16
    if seen.affine == 3 or (seen.across == "sample" and seen.elements >= 8192):
        return 32 if total > 4 * SMALL_HELD else max(8, min(32, seen.elements // MOST_SMALL))
    if problem.backward and narrow and seen.affine == 0 and 1024 <= seen.elements <= 8192 and total > 4 * SMALL_HELD:
        # Loads of single elements, many to a thread: (34, 1280, 679) in bf16 takes 63 us with one warp, 76 with four;
        # on an H100 (126, 78, 781) in fp16 20.2 with two, and 22.7 with one, (20, 200, 2209) 24.6 with four, and 28.7
        # with 8, (9, 128, 67, 67) 16.8 with 8.
        # (7, 64, 8011) in bf16 with scale and shift and relu takes 11.2 us with 16, and 16.8 with 32, (21, 96, 7871)
        # with silu 40.7 and 44.6, but (25, 45, 71, 71) with silu, 62 % full, 19.7 and 16.5.
        simple = size == 2 and problem.norm.activation is None and seen.elements > 1024
        busy = (problem.norm.smooth or problem.modulated) and (size > 2 or seen.full >= 0.65)
        return 32 if simple or (seen.elements > SMALL_UNIT and not busy) else 16
    large = size == 2 and not narrow and seen.elements == SHARING_HELD and problem.added is None
    if problem.backward and large and problem.norm.activation is None and not problem.modulated:
        # On an H100 (14, 960, 4928) in bf16 takes 133 us so, and 147 with 16. (55, 909, 48, 105), 62 % full, takes
        # 375 us with 64, and 451 so.
        return 64 if 8 * problem.reduced <= 5 * seen.elements else 32
    few = problem.backward and narrow and seen.elements < 2048
    return thread_elements(total, 8 if few else 16 if problem.backward or size > 2 or seen.flat else 32)


def _small_thread(problem: Problem, seen: HeldUnits, narrow: bool) -> int:
    """The elements of a thread in a small problem."""
    if seen.contiguous:
        if seen.elements <= 32:
            if problem.backward and seen.affine == 3 and problem.view.spatial == 1 and not problem.norm.smooth:
                # Four sums: batch_norm of (9, 2048) in fp32 takes 2.0 us with 8, and 2.6 with 2, (30, 1024) 2.2, and
                # 2.7.
                return 8
            # (10, 38, 3, 3) in fp16 and channels_last takes 1.57 us with 8, and 1.72 with two.
            # batch_norm of (19, 32) in fp32 takes 1.6 us with 2, and 1.8 with 8.
            alone = problem.norm.per_batch and problem.dtype == "float32"
            return 8 if seen.positions and not problem.backward and not problem.norm.smooth and not alone else 2
        if problem.backward and seen.affine == 3:
            return 16
        # (1, 4, 32, 32) in bf16 with gelu takes 2.2 us backward so, and 3.1 with 8.
        return 2 if problem.backward and seen.units * seen.elements <= FEW_LANES and seen.elements >= 1024 else 8
    if seen.across == "sample":
        if seen.elements <= 32 and seen.rows < 4:  # (2, 1177, 11) in fp32 takes 1.8 us with 2, and 2.0 with 4
            return 2
        if seen.affine == 3 and seen.elements == 64 and not problem.backward:
            return 2  # (2, 2048, 7, 3) in bf16 with leaky_relu takes 2.0 us so, and 2.8 with 4
        return 8 if seen.elements == 256 and not narrow else 4
    return fewest(seen.elements, narrow)


def _most_small(problem: Problem, seen: HeldUnits) -> int:
    """The threads of a program in a small problem. A backward with scale and shift of each sample has four sums, and 32
    elements a thread are many for an exponential in 32 bits: batch_norm of (1, 23, 5343) with silu takes 3.2 us
    backward so, and 8.8 with half of them."""
    busy = DTYPE_BYTES[problem.dtype] == 4 and problem.norm.smooth and seen.elements == SHARING_HELD
    return 2 * MOST_SMALL if problem.backward and (seen.affine == 3 or busy) else MOST_SMALL


def _padded(problem: Problem, seen: HeldUnits) -> bool:
    """Whether lanes of a forward hold no channel beside the few of a group. Then a program has few groups, and a thread
    few elements: (64, 105, 12, 12) in 21 groups in fp16 and channels_last takes 7.4 us with one, and 10.8 with two."""
    return uneven(seen) and seen.positions and not problem.backward


def sparse_rows(problem: Problem, seen: HeldUnits) -> bool:
    """Whether a group of channels_last has most of what memory moves of a position, and not all: 24 bytes of 32."""
    row = DTYPE_BYTES[problem.dtype] * seen.columns
    return seen.positions and DTYPE_BYTES[problem.dtype] == 2 and SECTOR_BYTES // 2 < row < SECTOR_BYTES


def uneven(seen: HeldUnits) -> bool:
    """Whether groups have few channels, and no power of two."""
    return seen.columns < power_of_two(seen.columns) <= 8


def _row_of_units(problem: Problem, seen: HeldUnits, total: int) -> int:
    """The fewest units of a program whose rows lie side by side in memory. Short rows cost memory time, but a small
    problem has more programs with them."""
    size = DTYPE_BYTES[problem.dtype]
    if not seen.contiguous:
        return _row_of_groups(problem, seen)
    if total <= FEW_CONTIGUOUS:
        # (2, 32, 128) in fp32 with leaky_relu takes 2.1 us with two on a warp, and 2.6 with four on two.
        # batch_norm of (145, 32) in bf16 with silu takes 1.9 us with two, and 2.2 with four, of (3, 60, 7, 7) in fp32
        # 2.1 and 2.2.
        short = seen.elements == 128 or (problem.norm.per_batch and seen.elements == 256)
        few = seen.units <= 64 and short and not problem.backward
        # (107, 64, 3, 3) in bf16 in batch_norm takes 3.7 us with four, and 4.5 with one.
        most = 1024 if problem.backward or size > 2 else 4096
        if seen.units == 3 and not problem.backward:
            return 1  # batch_norm of (46, 3, 3, 5) in fp16 with relu takes 2.0 us so, and 2.4 with four
        return max(1, min(2 if few else 4, most // seen.elements))
    least = (64 if total > 4 * SMALL_HELD else 32) // size
    # The backward of (31, 2515, 5, 3) in fp32 in batch_norm takes 9.0 us with 8, and 10.6 with 16.
    busy = problem.backward and (problem.norm.per_batch or problem.norm.smooth)
    least_unit = 128 if size == 2 else 512 if busy else 1024
    if seen.elements >= least_unit:
        # (20, 512, 12, 6) in bf16 takes 5.9 us backward in rows of 32 bytes, and 7.7 in rows of 64, (8, 272, 707) in
        # fp32 with scale and shift and gelu 9.5 and 12.8, (62, 158, 15, 19) in fp32 with silu 17.4, and 25.8.
        least = 32 // size
    elif not problem.backward and total > 16 * SMALL_HELD and 2 * least * seen.elements <= SHARING_HELD:
        least *= 2  # (92, 690, 32, 8) in fp32 takes 47 us in rows of 128 bytes, and 59 in rows of 64
    # Rows of 32 bytes for all multiprocessors in one wave: (1, 1280, 32, 32) in batch_norm takes 5.3 us in these, and
    # 7.4 in halves.
    wave = 8 * PROCESSORS < seen.units <= least * PROCESSORS
    few = seen.units <= 2 * least * PROCESSORS and not wave
    one = not problem.backward or (problem.norm.per_batch and problem.norm.smooth)
    if one and seen.elements == 1024 and size == 2 and few:
        # (4, 768, 23, 23) in bf16 with relu takes 7.3 us so, and 8.7 in rows of 32 bytes, (2, 512, 31, 31) in fp16 with
        # silu 5.5 and 5.9, the backward of batch_norm of (9, 544, 8, 8) in bf16 with gelu 5.0 and 6.3.
        least //= 2
    blocks = -(-seen.in_sample // least)
    empty = 2 * blocks > -(-2 * seen.in_sample // least)  # half of the last row
    if one and seen.elements == 1024 and size == 2 and seen.narrow(problem) and least > 8 and empty:
        # (85, 21, 32, 32) in bf16 takes 7.2 us so, and 9.4 in rows of 32 bytes, (60, 33, 30, 30) in fp16 9.5 and 9.9.
        least //= 2
    if seen.units < least * PROCESSORS // 4:  # short rows on many multiprocessors, not long on few
        if seen.samples == 1 and problem.norm.per_batch and seen.affine != 3:
            # (1660, 384) in fp16 takes 6.5 us with 8, and 10.0 with 2, (1000, 100) in fp32 4.0 with 2, and 4.3 with 4.
            return max(2, power_of_two(-(-seen.units // FEWEST_ROWS)))
        few_channels = size == 2 and seen.positions and seen.in_sample <= MOST_NEIGHBOURS
        if few_channels and seen.elements == SMALL_UNIT and seen.units > PROCESSORS:
            # All of a sample, or half: (111, 4, 16, 16, 16) in bf16 takes 5.1 us with four, and 8.7 with one, backward
            # 7.0 and 11.5, (50, 8, 60, 60) 5.8 and 11.6, backward 7.6 and 14.1.
            return min(4, power_of_two(seen.in_sample))
        if few_channels and seen.elements == SHARING_HELD and seen.units > PROCESSORS and not problem.backward:
            return min(2, power_of_two(seen.in_sample))  # (33, 6, 4352) in fp16 takes 5.1 us so, and 6.9 with one
        # (1, 320, 16, 105) in fp16 takes 6.1 us with four, and 9.2 with two.
        large = not problem.backward and seen.units > PROCESSORS and seen.in_sample >= 64
        return max(1, min(4, (SHARING_HELD if large else SMALL_UNIT) // seen.elements))
    return least


def _row_of_groups(problem: Problem, seen: HeldUnits) -> int:
    """The groups of a few channels whose positions make 32 bytes: (24, 64, 21, 21) in 32 groups in fp16 and
    channels_last takes 8.3 us with a group to a program, and 3.5 with eight, (4, 128, 24, 24) in bf16 4.2 and 3.2 with
    four, (10, 192, 30, 30) 11.4 and 8.5."""
    size = DTYPE_BYTES[problem.dtype]
    if not seen.positions or seen.units * seen.elements <= FEW_CONTIGUOUS // 2:
        return 1
    if problem.backward:
        least = max(1, 32 // (size * power_of_two(seen.columns)))
        return min(least, power_of_two(max(1, 2 * seen.units // PROCESSORS, 2048 // seen.elements)))
    if size * problem.view.channels <= 32 and seen.units <= PROCESSORS and load_bytes(problem) < WIDEST_LOAD:
        return 1  # rows are those of all groups: (20, 10, 40, 40) in 5 in fp16 takes 3.4 us so, and 4.6 with four
    least = power_of_two(-(-32 // (size * seen.columns))) if seen.columns <= 8 else 1
    # Those of another sample lie elsewhere: (55, 6, 24, 28) in one group in bf16 takes 2.8 us with one, 6.6 with four.
    least = min(least, power_of_two(seen.in_sample + 1) // 2)
    if _padded(problem, seen) and (seen.columns % 2 == 1 or seen.elements < SMALL_UNIT):
        # Of three channels (16, 96, 14, 14) in 32 groups in bf16 takes 3.4 us with four, and 3.6 with two.
        return min(least, max(1, (SMALL_UNIT if seen.columns == 3 else 2048) // seen.elements))
    return min(least, power_of_two(max(1, 8 * seen.units // PROCESSORS, 2048 // seen.elements)))


def _short_narrow(problem: Problem, seen: HeldUnits, total: int) -> HeldConfig:
    """Short units of narrow loads in a backward: one warp with 16 elements a thread, or 32 of longer units. In bf16
    (22, 2048, 5, 5, 5) takes 16 us with four units on one warp, and 29 with eight on four. The shortest have two warps:
    (120, 700, 27) in fp16 takes 14.9 us with them, and 17.9 with one. So have the longest: (45, 256, 315) in fp32 takes
    14.4 us with them, and 17.5 with one, on an H100 (25, 700, 361) in bf16 with silu 22.7, and 25.2, and some that are
    not many, but (10, 1280, 7, 7) in fp16 with silu takes 5.9 us with one, and 8.3 with two."""
    unit, size, smooth = seen.elements, DTYPE_BYTES[problem.dtype], problem.norm.smooth
    if unit == 16 and size == 4 and not problem.modulated:
        return HeldConfig(32, 1)  # (47, 1280, 3, 3) with gelu_tanh takes 6.7 us so, and 7.5 with 16 on two warps
    planes = problem.view.spatial > 1 and total > 4 * SMALL_HELD
    if unit == 16 and size == 2 and planes and not (problem.modulated or smooth):
        # (57, 2560, 3, 3) in fp16 takes 11.4 us so, and 13.2 with 16 on two warps, (60, 2048, 3, 3) in bf16 10.1 and
        # 11.4, (100, 1280, 3, 3) in fp16 with relu 11.0 and 11.7, but (57, 2560, 3, 3) with gelu 14.1 and 13.6.
        return HeldConfig(32, 4)
    if unit == 16:  # on an H100 (48, 1280, 3, 3) in fp32 with silu takes 7.6 us so, and 8.3 with 32 on 8 warps
        return HeldConfig(16, 2)
    if unit == 64 and problem.modulated and smooth:
        return HeldConfig(4, 1)  # (6, 1452, 7, 7) in bf16 with gelu takes 5.2 us so, and 9.3 with 8
    if unit == 512 and seen.rows == 1 and size == 2 and not smooth and total > 4 * SMALL_HELD:
        return HeldConfig(2, 1)  # (15, 2048, 7, 7, 7) in fp16 takes 21.6 us so, and 24.2 on two warps
    if unit == 512 and 1 < seen.rows <= 8:
        # (50, 448, 7, 7) in 64 groups in fp32 takes 8.8 us so, and 11.0 with two on two, but (100, 256, 9, 9) in 64 in
        # fp16 8.7 with two on one, and 10.6.
        return HeldConfig(2 if size == 2 and not smooth else 1, 1)
    if 128 <= unit <= 256 and seen.rows == 1 and total > 12 * SMALL_HELD:
        # (50, 2000, 75) in fp16 takes 21.3 us so, and 34.2 with four on a warp, (60, 1500, 9, 9) in bf16 with relu 22.3
        # and 30.8, (40, 2048, 9, 9) in fp32 24.0 and 28.8, (60, 1000, 15, 15) in bf16 29.9, and 40.0 with two, (50,
        # 1000, 13, 13) in fp16 with gelu 25.6 and 33.8.
        return HeldConfig(1024 // unit, 1)
    if unit == 128 and size == 2 and seen.rows >= 4:
        # (60, 1024, 5, 5) in 256 groups in fp16 with silu takes 10.3 us so, and 12.5 on one warp, (200, 256, 3, 3) in
        # 32 in bf16 5.6 and 6.2.
        return HeldConfig(4, 2)
    # (4, 2048, 3, 5, 5) in bf16 takes 4.3 us as one of many, and 5.5.
    if unit <= 32 or not (total > 3 * SMALL_HELD or (smooth and unit == 64)):
        return HeldConfig(512 // unit, 2)
    if unit <= 256:
        return HeldConfig(512 // unit, 1)
    return HeldConfig(1024 // unit, 2)
