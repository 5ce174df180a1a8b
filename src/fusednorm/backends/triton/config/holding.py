"""Which units are faster in the registers of a program than in tiles: pure functions of the problem."""

from __future__ import annotations

from fusednorm.backends.triton.config.device import CACHED_BYTES, PROCESSORS, SECTOR_BYTES, SMALL_HELD
from fusednorm.backends.triton.config.held import (
    ALL_SAMPLES,
    FEW_CONTIGUOUS,
    MOST_APART,
    MOST_FEW_APART,
    ROW_BYTES,
    SHORT_ROW,
    most_together,
    of_many_points,
    sparse_rows,
    uneven,
)
from fusednorm.backends.triton.config.planes import MANY_PLANES, SHORT_PLANE, warps_of_planes
from fusednorm.backends.triton.config.tiles import of_points, tiled
from fusednorm.backends.triton.config.units import MOST_HELD, SHARING_HELD, SMALL_UNIT, HeldUnits
from fusednorm.backends.triton.config.whole import FEW_UNITS
from fusednorm.backends.triton.runs import (
    FEW,
    WIDE_LOAD,
    WIDEST_LOAD,
    load_bytes,
    power_of_two,
    single_floats,
    unit_bytes,
)
from fusednorm.problem import DTYPE_BYTES, Problem

#: Elements of a unit that keeps its multiprocessor busy even where its tile is not full.
LARGE_HELD = 4096
#: Bytes that one program may read of SECTOR_BYTES of which a unit of one channel of channels_last has its own element:
#: batch_norm of (2, 6, 73, 73) in bf16 takes 5.9 us held, and 4.5 in tiles.
MOST_SECTORS = 1 << 16
#: Elements of points with scale and shift whose backward is as fast held: (1000, 128) in fp16 takes 9.0 us held, and
#: 6.9 in tiles, (288, 43) in bf16 3.7 and 6.9.
FEW_POINTS = 1 << 16
#: Elements of points of at most so many samples whose backward is faster held: (100, 2048) in fp32 takes 4.1 us held,
#: and 6.5 in tiles, (300, 256) in bf16 4.5 and 6.4, (60, 1280) 2.8 and 6.7.
SOME_POINTS, SHORT_POINTS = 1 << 18, 512
#: Elements of a short unit of narrow loads, few of which are faster whole.
SHORT_WHOLE = 512
#: Positions of an odd plane from which on planes are long enough for tiles.
MOST_WHOLE_PLANE = 512
#: Positions of a plane that lies along one axis with those of other samples, or that narrow loads read, beyond which it
#: fills tiles.
LONG_FLAT_PLANE = 1024
#: Samples from which on batch_norm's spread planes fill tiles.
SPREAD_PAYS = 32


def holding_pays(problem: Problem, seen: HeldUnits) -> bool:
    """Whether units in registers are faster than tiles: one launch, and one read, but whole units to a program.

    Where a tile is not full its lanes are wasted: (16, 640, 13, 13) in 32 groups in bf16 takes 14 us held, 41 % full,
    and 6 whole. Rows of a few neighbouring units are short for memory: (16, 256, 56, 56) in fp32 and channels_last
    takes 87 us held, 4 units to a row, and 43 in tiles. Where lanes are few one launch is faster, full or not: in fp16
    and channels_last (2, 640, 17, 17) in 40 groups takes 3.6 us held, 56 % full, and 6.8 in tiles, (17, 640, 13, 3) in
    4 groups 4.6, 38 % full, and 7.2; (16, 480, 24, 24) in 32 groups 19.4, 53 % full, and 13.3. A large unit
    of narrow loads is not: (40, 591, 15, 3) in 3 groups takes 18 us held, and 8 in tiles. Loads of few channels
    are short where tiles have wide ones: (50, 48, 28, 28) in 16 groups takes 13.5 us held, and 8.8 in tiles.
    """
    size = DTYPE_BYTES[problem.dtype]
    full = seen.full
    if of_points(problem) is not None and _many_points(problem, seen):
        return False
    if of_many_points(problem, seen) or warps_of_planes(problem, seen) is not None:
        return True
    if problem.backward and _few_large(problem, seen):
        return False
    if seen.apart:
        # (64, 512, 4, 4) in fp32 takes 4.8 us held, and 7.1 in tiles, (32, 128, 8, 8) 7.5 and 6.1.
        if seen.elements > MOST_APART:
            # (6, 64, 14, 14) in fp16 takes 4.7 us held and 5.1 in tiles, backward 5.6 and 5.4.
            # (101, 101, 3, 3) in fp32 takes 4.1 us backward held, and 5.3 in tiles.
            most = FEW_CONTIGUOUS if problem.backward and size == 2 else 2 * FEW_CONTIGUOUS
            return seen.elements <= MOST_FEW_APART and problem.view.numel <= most
        return problem.view.numel <= 4 * SMALL_HELD
    if seen.contiguous:
        return _holding_neighbours_pays(problem, seen, full)
    if seen.across == "sample":
        return _holding_samples_pays(problem, seen, full)
    found = _of_positions(problem, seen, full) if seen.positions else None
    if found is not None:
        return found
    if not problem.backward:
        return _holding_forward_pays(problem, seen, full)
    if problem.view.group_channels == 1 and seen.input.order == "channels_first":
        return _holding_planes_pays(problem, seen, full)
    return _holding_groups_pays(problem, seen, full)


def _many_points(problem: Problem, seen: HeldUnits) -> bool:
    """Whether points with scale and shift are many for programs that hold those of some channels. Of a forward these
    are then short rows of three tensors: (1433, 256) in fp16 takes 7.1 us held, and 6.1 in tiles, (1898, 2048) 23.4 and
    14.6, of narrow loads (700, 1949) 29.3 and 12.8, (1200, 97) in bf16 with relu 24.8 and 4.9, but (1024, 512) 6.2 and
    6.5, (500, 2048) 6.0 and 6.5."""
    if problem.backward:
        return problem.view.numel > (SOME_POINTS if seen.elements <= SHORT_POINTS else FEW_POINTS)
    return seen.elements >= (1024 if seen.narrow(problem) else 2048)


def _is_small(problem: Problem) -> bool:
    """Whether one launch is faster than two, where other reasons do not count more."""
    return problem.view.numel <= FEW


def _has_wide_rows(problem: Problem, seen: HeldUnits) -> bool:
    """Whether the loads of held units are as wide as those of tiles."""
    size = DTYPE_BYTES[problem.dtype]
    return seen.columns * size >= WIDEST_LOAD or load_bytes(problem) < WIDEST_LOAD or seen.across != "spatial"


def _are_short(problem: Problem, seen: HeldUnits) -> bool:
    """Whether units of a small problem are short, and their loads wide or few."""
    few = _has_wide_rows(problem, seen) or seen.units * seen.elements <= FEW // 2
    return _is_small(problem) and seen.elements <= LARGE_HELD and few


def _holding_neighbours_pays(problem: Problem, seen: HeldUnits, full: float) -> bool:
    """:func:`holding_pays` of units that are neighbours in memory, element by element."""
    size, small = DTYPE_BYTES[problem.dtype], _is_small(problem)
    together = MOST_HELD // seen.elements
    # (35, 3, 8, 37, 17) in bf16 takes 4.0 us held, and 8.6 in tiles, (7, 3, 89, 89) 4.0 and 8.5.
    # (20, 5, 56, 56) in fp16 with scale and shift and gelu_tanh takes 5.8 us backward held, and 8.7 in tiles.
    few = small and size * seen.in_sample <= SECTOR_BYTES and seen.units >= PROCESSORS // 8
    few = few and (not problem.backward or seen.elements <= LARGE_HELD)
    if problem.view.numel <= FEW_CONTIGUOUS or few:
        return seen.rows * min(SECTOR_BYTES, size * seen.in_sample) <= MOST_SECTORS
    if not problem.backward and not problem.modulated and seen.positions and _are_many_neighbours(problem, seen):
        return False
    if size == 4 and seen.elements >= 1024 and seen.load_bytes(problem) < WIDEST_LOAD:
        # (7, 2105, 31, 31) takes 66 us held, and 51 in tiles, (6, 1001, 30, 30) with relu 25.4 and 21.7, the
        # backward of (3, 406, 32, 32) with leaky_relu 17.8 and 11.5.
        # With scale and shift (20, 35, 31, 31) takes 6.0 us held, and 7.7 in tiles, (8, 515, 25, 25) 12.9 and 14.6,
        # backward 19.0 and 18.7, but (40, 11, 90, 90) 35.0 and 16.7, the backward of (3, 130, 43, 43) 9.8 and 8.5,
        # without them (2, 53, 19, 19, 19) 18.7 and 7.5, batch_norm of (3, 45, 32, 31) with gelu_tanh 8.1 and 4.7.
        # (36, 10, 2151) takes 7.2 us held, and 9.3 in tiles.
        most = 1024 if problem.backward else 4096 if seen.units >= 2 * PROCESSORS else 2048
        if seen.elements > most:
            return False
        # Of few elements a second launch costs more: batch_norm of (101, 101, 3, 3) takes 4.1 us backward held, and
        # 5.3 in tiles.
        few = problem.view.numel <= 2 * FEW_CONTIGUOUS
        # With scale and shift (9, 73, 60, 60) takes 24.4 us held, and 13.7 in tiles, (60, 73, 45, 45) 46.9 and 35.9.
        modulated = problem.modulated and seen.elements == 1024
        return (small and problem.modulated) or few if problem.backward else small or modulated
    points = problem.view.spatial == 1 and seen.elements == 2048 and not problem.backward
    slow = problem.norm.smooth or problem.modulated
    many = problem.view.numel > FEW // 2 and seen.elements in (512, 1024) and full < 0.95
    if problem.backward and slow and many and seen.narrow(problem):
        # (20, 777, 20, 20) in fp16 with gelu takes 43.5 us held, and 35.5 in tiles, (21, 1830, 17, 17) with scale
        # and shift 62 and 43, (83, 27, 7, 16, 8) with silu 16.3 and 12.6, but (64, 55, 1021) in bf16 with gelu 20.1 and
        # 24.2.
        return False
    if small and not points:  # (1166, 1037) in bf16 with silu takes 7.0 us held, and 11.1 in tiles
        # (3, 146, 1851) in bf16 with scale and shift and relu takes 6.3 us held, and 9.1 in tiles.
        most = 1024 if seen.narrow(problem) and problem.view.numel > FEW // 2 else 2048
        return size * together >= 16 and seen.elements <= most
    if size == 2 and not problem.backward and seen.elements <= 2048 and seen.units <= 16 * PROCESSORS:
        return full >= 0.5  # (2, 2048, 23, 23) in fp16 in batch_norm takes 7.4 us held, and 8.8 in tiles
    # (20, 512, 17, 17) in bf16 with silu takes 8.9 us held, 56 % full, and 11.2 in tiles; the backward of (32, 512,
    # 257) in fp16 22.6, 50 % full, and 20.8.
    least = 0.75 if seen.elements > 512 else 0.55 if problem.backward else 0.5
    return size * together >= 64 and full >= least


def _are_many_neighbours(problem: Problem, seen: HeldUnits) -> bool:
    """Whether channels of one sample of channels_last that no widest load reads are many and long: (1, 1818, 2048) in
    bf16 takes 23 us held, 15 with twice as many to a program, and 11 in tiles, in fp32 batch_norm of (4, 670, 5, 9, 16)
    20, 14 and 11, of (2, 1003, 1024) 13 and 12, but (1, 670, 1200) in bf16 5.9, and 7.4, in fp32 7.7, and 7.8."""
    if seen.samples > 1 or seen.load_bytes(problem) >= WIDEST_LOAD or seen.elements < 2048:
        return False
    size = DTYPE_BYTES[problem.dtype]
    return problem.view.numel > (FEW if size == 2 else FEW // 2) and (size == 4 or seen.narrow(problem))


def _of_positions(problem: Problem, seen: HeldUnits, full: float) -> bool | None:
    """:func:`holding_pays` of groups of channels_last that no other reason decides; None for those that one does."""
    size, small = DTYPE_BYTES[problem.dtype], _is_small(problem)
    if problem.backward and uneven(seen) and seen.elements > LARGE_HELD:
        # (3, 123, 50, 50) in 41 groups in fp16 takes 15.4 us held, and 8.3 in tiles, but (7, 3, 32, 32) in one group in
        # bf16 with silu 4.0 and 5.7, (2, 133, 31, 16) in 19 in fp16 4.6 and 5.2, (1, 1280, 21, 15) in 256 in fp32 5.1
        # and 6.8.
        return False
    many = seen.units > 8 * PROCESSORS and size == 2 and load_bytes(problem) < WIDE_LOAD
    if many and uneven(seen) and seen.elements > (SHORT_WHOLE if problem.backward else LARGE_HELD - 1):
        # A position's channels of a group are fewer bytes than memory moves: (8, 1305, 21, 21) in 261 groups in bf16
        # with gelu takes 24.1 us held, and 20.1 in tiles, backward 44 and 29, in fp16 34.6 and 18.7, (20, 690, 16, 16)
        # in 230 in bf16 18.6 and 14.2, (8, 1505, 15, 15) in 301 with relu 20.9 and 17.1, forward 13.5, and 14.4. Short
        # groups are read once all the same: the backward of (28, 1665, 125) in 555 in bf16 with gelu_tanh takes 25.8 us
        # held, and 62 in tiles, of (1481, 81, 125) in 27 in fp16 with scale and shift 58 and 117.
        return False
    if problem.backward and size == 2 and seen.columns == 2 and seen.elements >= 2048 and full < 0.6 and not small:
        return False  # (20, 1282, 24, 24) in 641 groups in bf16 with scale and shift takes 66 us held, and 46 in tiles
    wide = load_bytes(problem) == WIDEST_LOAD
    large = seen.elements == SHARING_HELD and seen.units > 2 * PROCESSORS
    if not (problem.backward or wide) and uneven(seen) and large:
        return False  # (3, 700, 30, 30) in 100 groups in bf16 takes 11.4 us held, and 8.9 in tiles
    if not problem.backward and wide and not small and uneven(seen) and seen.elements >= LARGE_HELD:
        return False  # (5, 2560, 32, 32) in 512 groups in fp16 takes 67 us held, and 23 in tiles
    if problem.backward and seen.columns == 3 and seen.elements == LARGE_HELD and seen.in_sample > 2:
        return size > 2  # (2, 90, 32, 32) in 30 groups in fp16 takes 5.9 us held, and 4.7 in tiles
    sparse = sparse_rows(problem, seen) and seen.elements > LARGE_HELD and not problem.backward
    if sparse and size * problem.view.numel > CACHED_BYTES:
        # In fp16 (111, 768, 21, 23) in 64 groups with silu takes 95 us held, and 67 in tiles, (53, 1280, 32, 16) in 128
        # with scale and shift 86 and 56.
        return False
    if seen.elements == MOST_HELD and _fills_few_waves(problem, seen):
        return True
    if seen.elements == MOST_HELD and _fills_registers(problem, seen):
        return False
    # (5, 64, 61, 61) in 32 groups in fp16 takes 9.9 us held, and 6.9 in tiles.
    many = not small or (wide and seen.elements >= SHARING_HELD and seen.columns <= 4)
    if many and _short_rows(problem, seen, full):
        return False
    if not problem.backward and small and uneven(seen) and seen.elements <= 2048:
        return True  # (25, 96, 8, 33) in 32 groups in fp16 takes 4.5 us held, and 6.1 in tiles
    registers = size == 2 or (size == 4 and (seen.elements <= SHARING_HELD or not problem.backward))
    idle = problem.backward and seen.elements == SHARING_HELD and seen.units <= PROCESSORS // 2
    if idle and load_bytes(problem) < WIDEST_LOAD:
        return False  # (5, 1379, 3, 3, 3) in 7 groups in fp32 with leaky_relu takes 7.3 us held, and 5.4 in tiles
    if problem.backward and seen.elements <= (2048 if size == 4 else 1024) and full >= 0.6:
        # (67, 320, 8, 16) in 32 groups in fp32 with silu takes 15.8 us held, and 18.7 in tiles, (23, 408, 5, 5, 5) in
        # 68 in fp16 with scale and shift and silu 6.9 and 11.6.
        return True
    if load_bytes(problem) < WIDEST_LOAD and full >= (0.45 if problem.backward else 0.4) and registers:
        # (55, 1946, 32) in 14 groups in fp16 takes 9.0 us held, 54 % full, and 24.7 in tiles, backward 16 and 33, (93,
        # 374, 75) in 17 with scale and shift and gelu 12.3, 40 % full, and 20.4.
        return True
    return None


def _holding_forward_pays(problem: Problem, seen: HeldUnits, full: float) -> bool:
    """:func:`holding_pays` of the forward of groups, and of the units of planes."""
    size, small = DTYPE_BYTES[problem.dtype], _is_small(problem)
    idle = not seen.positions and seen.elements == MOST_HELD and seen.units <= PROCESSORS // 4
    if idle and (size > 2 or load_bytes(problem) < WIDE_LOAD):
        # (1, 1280, 160) in 32 groups in fp32 with silu takes 4.6 us held, and 3.9 in tiles, but (3, 534, 24) in 2
        # groups in bf16 3.0 and 4.9.
        return False
    single = size == 2 and load_bytes(problem) == size
    if single and problem.modulated and seen.elements >= LARGE_HELD and not small:
        # (67, 384, 5, 5, 5) in 16 groups in bf16 takes 18.3 us held, and 14.9 in tiles, (19, 1280, 5, 5, 5) in 32
        # with leaky_relu 20.8 whole, and 12.2.
        return seen.positions
    several = seen.across == "channel" and seen.rows > 1
    single = single and several
    many = seen.units > 2 * PROCESSORS and seen.rows > MANY_PLANES
    if single and many and problem.reduced > LARGE_HELD and seen.elements == SHARING_HELD:
        # In 32 groups in bf16 (30, 1024, 13, 13) with silu takes 30 us whole, and 14.0 in tiles, in fp16 (30, 2048, 11,
        # 11) 28.9 held, and 15.4, but (30, 512, 17, 17) with silu 12.1 held, and 14.4.
        return False
    if single and seen.elements == MOST_HELD and seen.units > PROCESSORS:
        return False  # (10, 960, 7, 7, 7) in 32 groups in bf16 takes 14.2 us held, 63 % full, and 10.0 in tiles
    lanes, shared = seen.units * seen.elements, seen.elements <= SHARING_HELD
    few = lanes <= FEW and (shared or load_bytes(problem) >= WIDE_LOAD)
    wide = _has_wide_rows(problem, seen)
    return (
        _are_short(problem, seen) or full >= 0.6 or (wide and (few or (shared and full >= 0.5 and lanes <= 16 * FEW)))
    )


def _holding_planes_pays(problem: Problem, seen: HeldUnits, full: float) -> bool:
    """:func:`holding_pays` of the backward of channels of samples."""
    size = DTYPE_BYTES[problem.dtype]
    if size == 2 and seen.elements == MOST_HELD and seen.units > PROCESSORS and load_bytes(problem) < WIDE_LOAD:
        # (16, 180, 12795) in fp16 with relu takes 115 us held, and 97 in tiles, (3, 96, 23, 23, 23) 14.0 and 10.5, but
        # (1, 47, 85, 85) in bf16 with silu 3.9 and 5.6, (21, 96, 7871) 40.7 and 46.7, (15, 32, 4837) in fp16 with scale
        # and shift and gelu 10.6 and 13.9.
        return False
    if size == 2 and load_bytes(problem) >= WIDE_LOAD and seen.elements >= LARGE_HELD:
        # (64, 96, 48, 48) in bf16 with silu takes 41 us held, and 44 in steps, (4, 512, 100, 100) with gelu 79, and
        # 67, on an H100 (14, 960, 4928) without an activation 133, and 146, (28, 619, 48, 87) in fp16 with relu
        # 183, and 158.
        # (16, 256, 112, 112) in bf16 with relu, 77 % full, takes 111 us held, and 100 in steps, (16, 256, 14400), 88 %,
        # 118, and 121.
        simple = seen.elements == SHARING_HELD and problem.norm.activation is None and not problem.modulated
        # Few planes leave multiprocessors idle: (4, 22, 189, 64) in bf16 with gelu_tanh takes 6.3 us held, 74 %
        # full, and 10.0 in tiles.
        least = 0.7 if seen.units <= PROCESSORS else 0.75
        if seen.elements == MOST_HELD and seen.units > PROCESSORS and not problem.modulated:
            least = 0.85
        return seen.elements == LARGE_HELD or simple or full >= least
    many = seen.elements >= SHARING_HELD and seen.units >= 2 * PROCESSORS
    if size == 4 and problem.norm.smooth and many and load_bytes(problem) >= WIDE_LOAD:
        return False  # (16, 100, 100, 100) in fp32 with silu takes 100 us held, and 81 in steps
    # (80, 1697, 16, 9) in fp16 with silu takes 55 us held, 56 % full, and 83 in tiles, on an H100 (25, 700, 289)
    # 21, and 28, (20, 300, 555) in bf16 11.3, and 15.9, (20, 200, 2209) in fp16 24.6, and 31.6.
    odd = 512 <= seen.elements <= SHARING_HELD
    # (55, 604, 14, 5) in fp16 takes 9.4 us held, 55 % full, and 14.4 in tiles, (35, 768, 9, 15) with relu 12.1, 53 %
    # full, and 18.1.
    least = 0.5 if seen.elements <= 256 else 0.6
    return _are_short(problem, seen) or odd or full >= least or size > 2


def _holding_groups_pays(problem: Problem, seen: HeldUnits, full: float) -> bool:
    """:func:`holding_pays` of the backward of groups of several channels."""
    size, lanes = DTYPE_BYTES[problem.dtype], seen.units * seen.elements
    if seen.across == "channel" and seen.rows > 1 and size == 2 and seen.elements == MOST_HELD:
        return False  # (68, 8, 64, 64) in two groups in bf16 with relu takes 10.1 us held, and 7.7 in tiles
    if seen.across == "channel" and size < 8 and seen.elements <= LARGE_HELD and load_bytes(problem) < WIDE_LOAD:
        return _narrow_groups_pay(problem, seen, full)
    if size == 2 and seen.elements == SHARING_HELD and fills_tiles(problem, seen):
        return False  # (4, 1024, 13, 13) in 32 groups in fp16 takes 8.0 us held, and 5.1 in tiles
    large = seen.elements == SHARING_HELD and _singles(problem)
    if large and seen.units > 4 * PROCESSORS and problem.norm.activation is None:
        # (20, 512, 17, 17) in 32 groups takes 18.5 us held, and 24 in tiles, (26, 320, 11, 7, 5) with scale and shift
        # 20.2, 47 % full, and 27.
        return True
    if large and seen.rows > 2 * MANY_PLANES:
        # In two groups (107, 128, 5, 5, 5) takes 14.9 us held, and 11.3 in tiles, with silu 15.6 and 11.9, with scale
        # and shift (60, 256, 5, 5, 5) in 4 19.6 and 13.6, in one group (90, 64, 125) with relu 8.4 and 6.3.
        return False
    if _singles(problem) and problem.view.numel > SMALL_HELD and (full < 0.6 or seen.elements == MOST_HELD):
        return False  # (12, 960, 21, 21) in 32 groups in fp32 takes 36 us held, and 24 in tiles
    pairs = _is_small(problem) and seen.positions and size == 2 and seen.columns in (2, 4)
    if pairs and seen.elements <= LARGE_HELD and lanes <= 2 * FEW:
        # (12, 384, 301) in 192 groups in bf16 with gelu takes 10.7 us held, and 13.0 in tiles, (16, 384, 7, 7, 7) in 96
        # in fp16 9.6 and 11.0.
        return True
    shared = seen.elements <= SHARING_HELD and _has_wide_rows(problem, seen) and lanes <= FEW // 2
    return shared or _are_short(problem, seen) or (full >= 0.75 and (size > 2 or load_bytes(problem) >= WIDE_LOAD))


def _fills_few_waves(problem: Problem, seen: HeldUnits) -> bool:
    """Whether the forward of groups of channels_last that fill the registers is faster held: one to three to a
    multiprocessor, in rows of 64 bytes that wide loads read. In 32 groups in fp16 (6, 1280, 14, 14) with silu takes
    6.4 us held, and 8.3 in tiles, in bf16 (10, 2560, 5, 5, 5) 8.9, and 11.0."""
    size = DTYPE_BYTES[problem.dtype]
    rows = size == 2 and seen.columns * size >= ROW_BYTES and load_bytes(problem) == WIDEST_LOAD
    return not problem.backward and rows and PROCESSORS <= seen.units <= 3 * PROCESSORS


def _fills_registers(problem: Problem, seen: HeldUnits) -> bool:
    """Whether groups of channels_last whose tiles fill the registers are faster in tiles: a backward, and a forward of
    many, or of few that narrow loads read. In fp32 the backward of (51, 1024, 24) in two groups with silu takes 12.1 us
    held, and 10.7 in tiles, in fp16 of (4, 1280, 8, 8, 8) in 40 12.7 and 10.5, the forward of (63, 96, 32, 32) in 6
    with leaky_relu 15.4 and 14.1, in bf16 of (10, 10, 80, 80) in 5 10.2 and 5.4, of (6, 83, 5, 5, 5) in one with
    leaky_relu 5.1 and 3.6, but in fp16 of (4, 384, 23, 23) in 32 with gelu 6.2 and 7.3."""
    narrow = load_bytes(problem) < WIDEST_LOAD
    if problem.backward:  # (20, 300, 17, 17) in 10 groups in bf16 takes 10.9 us held, and 11.6 in tiles
        return not narrow or seen.units <= PROCESSORS or DTYPE_BYTES[problem.dtype] > 2
    return (narrow and seen.units <= PROCESSORS // 2) or seen.units > 2 * PROCESSORS


def _narrow_groups_pay(problem: Problem, seen: HeldUnits, full: float) -> bool:
    """:func:`holding_pays` of the backward of groups of planes that narrow loads read. In fp16 (30, 1280, 5, 5, 5) in
    320 groups with gelu takes 14.4 us held, and 34 in tiles, in bf16 (12, 512, 19, 19) in 256 7.6 and 10.7, in fp32
    (22, 1280, 5, 5) in 32 7.4 and 8.8. Of larger groups it does where they are many, and in 32 bits fill their lanes:
    (65, 256, 17, 17) in 32 groups in fp16 takes 15.3 us held, and 18.5 in tiles, (4, 640, 13, 9) with scale and shift
    and relu 5.9 and 4.2, in fp32 (40, 256, 21, 21) 18.5 and 21.6, (64, 960, 9, 9) 40 and 32.
    Groups of many channels are faster in tiles. In 32 groups in fp16 (10, 1024, 7, 7) takes 7.2 us held, and 4.4 in
    tiles, (30, 1024, 11, 11) with silu 24.8 and 16.9, (30, 512, 15, 15) 15.2 and 11.7, (2, 512, 11, 11) 3.8 and 3.0,
    but (1, 512, 11, 11) 2.8 and 3.0, (100, 512, 15, 15) with silu, whose second read does not come from the L2, 38 and
    46. In fp32 (10, 1024, 11, 11) takes 10.9 and 8.5, (10, 512, 15, 15) 8.8 and 7.9, but (30, 512, 13, 13) 16.7 and
    20.1, (30, 512, 11, 11) 9.8 and 11.1, (30, 256, 17, 17) 12.3 and 21.9."""
    short = DTYPE_BYTES[problem.dtype] == 2
    if _has_odd_rows(seen) and seen.elements == LARGE_HELD // 2:
        # Even where most lanes hold nothing: in 32 groups (111, 1280, 3, 7) in fp16 takes 18.3 us held, and 27.1 in
        # tiles, (90, 1280, 3, 7) with scale and shift 18.7 and 23.3, (150, 1120, 19) 23.3 and 31.8, (100, 1280, 3, 7)
        # in bf16 with silu 19.4 and 27.8, in fp32 (80, 1280, 3, 7) 14.9 and 23.9, (100, 1120, 19) with silu 19.3 and
        # 31.6.
        return True
    sparse = short and load_bytes(problem) == 2 and seen.elements == LARGE_HELD and full < 0.8
    if sparse and seen.rows > 2 * MANY_PLANES and seen.units > 4 * PROCESSORS:
        # In 16 groups in bf16 (60, 960, 45) with relu takes 25.6 us held, and 15.9 in tiles, in fp16 (120, 640, 37)
        # 23.9 and 18.2, (90, 640, 3, 11) in bf16 with silu 22.0 and 17.9.
        return False
    if seen.elements >= LARGE_HELD // 2 and fills_tiles(problem, seen):
        if short and seen.units <= PROCESSORS // 4:
            return seen.elements < LARGE_HELD
        read_twice = 2 * DTYPE_BYTES[problem.dtype] * problem.view.numel > CACHED_BYTES
        if short:
            # (155, 1024, 63) in bf16 with relu takes 47 us held, and 64 in tiles, (77, 2048, 63) in fp16 49 and 62, in
            # bf16 with scale and shift 74 and 69.
            if seen.rows > MANY_PLANES and (problem.norm.smooth or problem.modulated):
                return False
            # Many channels are faster in tiles where these find both tensors in the L2 a second time.
            some = 8 if seen.elements < LARGE_HELD else 4
            many = seen.rows > MANY_PLANES and some * DTYPE_BYTES[problem.dtype] * problem.view.numel > CACHED_BYTES
            return (read_twice or many) and full >= 0.8
        if seen.rows > MANY_PLANES or seen.units <= 3 * PROCESSORS:
            return False
    many = seen.units > 4 * PROCESSORS and not problem.modulated
    if not short and many and seen.elements == LARGE_HELD and seen.rows <= MANY_PLANES:
        return True
    if seen.units == 1 and seen.elements == LARGE_HELD:
        return True  # (1, 3, 519) in one group in bf16 takes 2.0 us held, and 3.2 in tiles
    if seen.elements == LARGE_HELD:
        # Of few elements too: (51, 1048, 3) in two groups in bf16 takes 4.3 us held, and 5.8 in tiles.
        some = PROCESSORS if problem.view.numel > SMALL_HELD else PROCESSORS // 2
        return seen.units > some and (short or full >= 0.8)
    if not short and seen.units <= 3 * PROCESSORS and problem.view.numel > SMALL_HELD:
        return full >= 0.6  # (10, 1280, 5, 5) in 32 groups in fp32 takes 5.8 us held, and 5.4 in tiles
    return problem.view.numel <= FEW or full >= 0.45


def _has_odd_rows(seen: HeldUnits) -> bool:
    """Whether groups have many channels, no power of two, of short planes: tiles of channels waste lanes too."""
    many = seen.across == "channel" and seen.rows > 2 * MANY_PLANES and seen.units > 4 * PROCESSORS
    return many and seen.columns <= SHORT_PLANE and seen.rows != power_of_two(seen.rows)


def fills_tiles(problem: Problem, seen: HeldUnits) -> bool:
    """Whether groups have so many channels of planes of some length that narrow loads read that tiles of 8 channels are
    full, where those of whole groups leave lanes empty, or wait for sums over many channels. In fp16 (30, 320, 13, 13)
    in 32 groups with relu takes 12.4 us backward held, and 15.9 in tiles, in bf16 (30, 512, 7, 14), whose loads are
    pairs, 7.7 and 8.6, (10, 1024, 7, 14) 8.1 and 7.1."""
    size, load = DTYPE_BYTES[problem.dtype], load_bytes(problem)
    many = seen.rows >= MANY_PLANES and (load == size or seen.rows > MANY_PLANES)
    planes = seen.across == "channel" and seen.rows % 8 == 0 and seen.columns > SHORT_PLANE
    return planes and many and load < WIDE_LOAD


def _singles(problem: Problem) -> bool:
    """Whether the planes of several channels have single loads of 32 bits."""
    several = problem.view.group_channels > 1 and problem.layout.order == "channels_first"
    return several and single_floats(problem)


def full_of_singles(problem: Problem) -> bool:
    """Whether the backward of channels of samples that fill a program's registers has single loads of 16 bits and no
    other arithmetic: (20, 384, 15443) in fp16 takes 256 us in steps, and 295 held."""
    fills = 7 * MOST_HELD < 8 * problem.reduced <= 8 * MOST_HELD
    simple = problem.norm.activation is None and not problem.modulated
    return fills and simple and load_bytes(problem) == DTYPE_BYTES[problem.dtype] == 2


def _short_rows(problem: Problem, seen: HeldUnits, full: float) -> bool:
    """Whether the groups of channels_last that a program can hold make less than SECTOR_BYTES of each position, or few
    channels fill the lanes of a large one: in bf16 with silu (15, 128, 47, 56) in 32 groups takes 15 us in tiles, and
    33 held, (16, 320, 32, 32) 14.7 and 23.3, the backward of (20, 128, 40, 40) in bf16 with scale and shift 18 and 23,
    of (60, 100, 30, 30) in 20 groups in fp16 22 and 58."""
    row = DTYPE_BYTES[problem.dtype] * seen.columns * max(1, most_together(problem, seen))
    return row < SECTOR_BYTES or (seen.elements == MOST_HELD and full < 0.7)


def _few_large(problem: Problem, seen: HeldUnits) -> bool:
    """Whether a few units keep few multiprocessors busy with narrow loads and a smooth activation or scale and shift:
    (1, 640, 5, 5, 5) in 32 groups with gelu in bf16 takes 6.5 us held, and 3.9 in tiles, (13, 18, 1024) in 3 with silu
    in fp32 5.5, and 4.0, (1, 2048, 7, 7) in 16 with scale and shift in fp16 8.9, and 4.7. So do the longest without
    these: (4, 3, 8, 31, 27) with leaky_relu in fp32 4.5, and 3.0, (6, 2, 57, 57) in one group in fp16 3.6, and 2.9."""
    if seen.positions or seen.elements < LARGE_HELD or seen.across == "sample":
        return False
    narrow, long = seen.narrow(problem), seen.elements >= SHARING_HELD
    if long and 1 < seen.units <= PROCESSORS // 8 and seen.rows * seen.columns < MOST_HELD:
        return True
    slow = narrow or (problem.dtype == "float32" and long)
    busy = problem.norm.smooth or (problem.modulated and long)
    return busy and seen.units < PROCESSORS // 2 and problem.view.group_channels > 1 and slow


def _holding_samples_pays(problem: Problem, seen: HeldUnits, full: float) -> bool:
    """:func:`holding_pays` of a channel of all samples: in bf16 (128, 2048, 7, 7) takes 53 us held, and 22 in tiles of
    spread planes. Few large channels leave multiprocessors idle: (13, 21, 29, 29) takes 5.4 us held backward, and 4.2
    in tiles. Each sample's scale and shift take registers: (38, 64, 5, 5, 7) took 58 us held backward, and 8 in tiles,
    and the forward of few such channels, (63, 8, 9, 9), takes 4.4 us held and 3.6 in tiles.
    Planes of some size, of channels that are not too many, are faster held: (16, 512, 19, 19) in bf16 takes 8.6 us, and
    11.3 in tiles, backward 10.1 and 13.8; but with relu the backward of (32, 512, 13, 13) takes 17.9 and 13.0. Odd
    planes that lie along one axis are faster held, unless many samples fill tiles of spread planes: (18, 700, 21, 21)
    takes 23.7 us, and 38.3 in tiles, (64, 200, 15, 15) 11.6 and 10.9, the backward of (128, 100, 11, 11) 8.5 and 11.4.
    """
    size = DTYPE_BYTES[problem.dtype]
    even = seen.affine != 3 and seen.load_bytes(problem) >= WIDE_LOAD and seen.elements <= MOST_HELD
    filled = seen.elements == MOST_HELD and full >= 0.55 and seen.load_bytes(problem) >= WIDE_LOAD
    if seen.affine == 3 and filled and size <= 4:
        # In bf16 (60, 100, 14, 14) takes 4.1 us held, and 8.9 in tiles, (28, 200, 8, 8, 8) 7.9 and 9.7, in fp32 (28,
        # 100, 8, 8, 8) 7.0 and 9.3, backward in bf16 (40, 64, 16, 16) 4.3 and 6.6, but (28, 200, 8, 8, 8) 11.1, and
        # 10.7.
        return 32 <= seen.units <= (1 if problem.backward else 2) * PROCESSORS
    if problem.backward and even and size > 2 and seen.elements > LARGE_HELD and seen.units <= PROCESSORS // 8:
        return False  # (5, 12, 32, 32) in fp32 with leaky_relu takes 4.1 us held, and 2.9 in tiles
    if even and problem.view.numel <= 2 * FEW and seen.units >= PROCESSORS and full >= 0.33:
        # In bf16 (33, 1024, 8, 8) takes 6.7 us backward held, 52 % full, and 13.1 in tiles, with silu 8.0 and 15.4,
        # (24, 768, 12, 12) with relu 10.1, 42 % full, and 16.4, (70, 900, 4, 10) with silu 13.0, 34 % full, and 16.6,
        # (32, 1280, 8, 8) in fp32 with relu 9.7 and 16.5; forward (33, 1024, 8, 8) with silu 6.1 and 10.0, (44, 640,
        # 16, 5) 5.4 and 8.5. Larger ones gain less: the backward of (18, 512, 20, 24) with relu takes 15.0 and 15.2.
        return True
    if problem.view.numel > FEW:
        if not problem.backward and seen.affine == 3 and seen.elements <= ALL_SAMPLES:
            return True  # (98, 2560, 3, 3) in fp16 takes 13.7 us held, 43 % full, and 19.1 in tiles
        some = not problem.backward and problem.view.numel <= 2 * FEW
        if some and full >= 0.6 and seen.elements <= SHARING_HELD and seen.affine != 3:
            return True
        long = seen.affine == 3 and seen.elements > 8192
        # (17, 768, 13, 13) in fp32 with relu takes 11.6 us backward held, 70 % full, and 18.4 in tiles, (17, 768, 17,
        # 17) 24.1, 60 % full, and 27.9, (25, 700, 11, 11) with silu, whose rows lie along an axis, 11.6 and 17.7.
        wide = problem.backward and problem.dtype == "float32" and problem.view.numel <= 2 * FEW
        large = problem.backward or seen.elements > SHARING_HELD  # (3, 3000, 2501) in fp32 takes 64 us held, and 83
        large = large and (seen.elements > LARGE_HELD or size == 2)  # (1, 1280, 2997) in fp32: 13.2 us, and 19.1
        if seen.columns > LONG_FLAT_PLANE and large and (seen.flat or seen.narrow(problem)):
            return False  # (3, 1441, 4557) in bf16 takes 56 us held, and 37 in tiles, (7, 1000, 1501) in fp16 28 and 22
        if (seen.flat or wide) and full >= (0.58 if wide else 0.75) and seen.rows < SPREAD_PAYS and not long:
            return seen.elements <= SHARING_HELD or not problem.backward
        if problem.backward and size == 2 and seen.elements > SHARING_HELD and (full < 0.6 or seen.narrow(problem)):
            # (28, 2031, 7, 7, 7) in bf16 with relu takes 121 us held, and 68 in tiles, (14, 569, 925) 27 and 21,
            # (107, 639, 117) 39 and 28, (12, 777, 857) 26.3 and 21.5, (28, 1278, 447) 48 and 45.
            return False
        # (5, 2048, 15, 15) in bf16 takes 6.5 us backward held, 55 % full, and 9.6 in tiles.
        least = 0.5 if problem.backward and seen.elements <= 2048 else 0.55
        return full >= least and not long and tiled(problem) is problem.folded
    # (9, 132, 272) in fp32 with relu takes 3.2 us held, 30 % full, and 6.1 in tiles, backward 3.5 and 4.9, (18, 96, 18,
    # 18) 4.3, 36 % full, and 6.5, backward 4.6 and 6.4.
    # (9, 10, 24, 14) in bf16 takes 2.3 us forward held, 37 % full, and 4.3 in tiles.
    if even and full >= 0.28 and (seen.units >= 48 or (not problem.backward and seen.elements <= SHARING_HELD)):
        return True
    if not problem.backward:
        if seen.units <= 2 and seen.elements == MOST_HELD and seen.narrow(problem):
            return False  # (71, 2, 11, 11) in bf16 takes 5.1 us held, and 4.6 in tiles, (40, 3, 17, 17) 4.6, and 5.2
        spread = tiled(problem) is not problem.folded
        if spread and problem.norm.smooth and size == 4 and seen.narrow(problem) and seen.elements > LARGE_HELD:
            return False  # (64, 384, 77) in fp32 with gelu takes 16.2 us held, and 11.0 in tiles
        # (16, 30, 19, 19) in bf16 with silu takes 3.4 us held, and 6.0 in tiles, (30, 20, 15, 15) in fp32 4.0 and
        # 7.3.
        few_modulated = seen.elements <= SHARING_HELD and seen.units >= 16
        return seen.elements <= LARGE_HELD or (full >= 0.4 and (seen.affine != 3 or few_modulated))
    if seen.affine == 3:
        # (250, 40, 4, 4) in bf16 takes 3.6 us held, and 5.4 in tiles, but (60, 256, 7, 7) 9.4 and 8.0.
        # (4, 300, 23, 23) in fp16 takes 4.3 us held, and 4.9 in tiles.
        most = ALL_SAMPLES * (2 if seen.columns <= SHORT_ROW or seen.rows <= 4 else 1)
        # (2, 6, 32, 32) in bf16 takes 2.4 us held, and 3.2 in tiles.
        few = ALL_SAMPLES // (1 if problem.view.numel <= SMALL_HELD // 16 else 2)
        if seen.units > 4 * PROCESSORS and seen.columns > SHORT_PLANE:
            most //= 2  # (25, 700, 7, 7) in bf16 takes 11.3 us held, and 7.9 in tiles
        return seen.elements <= (most if seen.units >= 32 else few)
    if seen.columns % 2 == 1 and full >= 0.75 and seen.units >= 64:
        return True
    return seen.elements <= LARGE_HELD or (full >= 0.5 and seen.elements <= 8192)


def fuller_whole(problem: Problem, seen: HeldUnits) -> bool:
    """Whether a small unit fills a tile of one axis better than one of two: (43, 768, 3, 3) in 32 groups takes 2.5 us
    whole, 84 % full, and 3.5 held, 42 % full."""
    if warps_of_planes(problem, seen) is not None:
        return False
    held, whole = problem.reduced / seen.elements, problem.reduced / power_of_two(problem.reduced)
    short = SHORT_WHOLE // 4 < problem.reduced <= SHORT_WHOLE and unit_bytes(problem) < WIDE_LOAD
    slow = problem.modulated and not problem.backward and seen.load_bytes(problem) == DTYPE_BYTES[problem.dtype]
    least = 0.9 * whole if DTYPE_BYTES[problem.dtype] == 2 and seen.elements == LARGE_HELD else whole
    if slow and seen.across == "channel" and SHORT_WHOLE < problem.reduced <= SMALL_UNIT and held <= least:
        # (31, 2048, 5, 7) in 32 groups in fp32 takes 12.7 us whole, and 23.8 held, but (16, 128, 31, 31) in bf16 with
        # gelu 8.0 and 6.0.
        return True
    some = seen.elements < LARGE_HELD or seen.rows > MANY_PLANES
    if _singles(problem) and SMALL_UNIT // 4 < problem.reduced <= SMALL_UNIT and some and not problem.backward:
        # (30, 512, 11, 11) in 32 groups in fp32 takes 6.3 us whole, and 7.1 held, but with silu (30, 512, 13, 13) 10.7,
        # and 9.2, (30, 256, 17, 17) 10.2, and 7.4.
        return True
    planes = seen.across == "channel" and seen.columns <= SHORT_PLANE // 4 and seen.rows > MANY_PLANES
    few = problem.num_statistics <= PROCESSORS and not problem.modulated and not problem.backward
    if planes and few and SHORT_WHOLE < problem.reduced <= SMALL_UNIT and held <= whole:
        return True  # (5, 965, 7, 1) in 5 groups in bf16 takes 2.0 us whole, and 2.5 held
    if short and problem.num_statistics <= PROCESSORS:
        return True  # on an H100 (20, 102, 3) in two groups in bf16 with silu takes 1.8 us whole, and 2.0 held
    odd = seen.across == "channel" and DTYPE_BYTES[problem.dtype] == 2 and load_bytes(problem) < WIDE_LOAD
    single = odd and load_bytes(problem) == DTYPE_BYTES[problem.dtype] and seen.columns > SHORT_PLANE
    if single and seen.rows > MANY_PLANES and problem.reduced <= SMALL_UNIT and not problem.modulated:
        # In 32 groups in fp16 (10, 2048, 7, 7) takes 4.3 us whole, and 6.3 held, (30, 1024, 11, 11) with silu 9.3 and
        # 10.4, but (30, 512, 13, 13) 8.7 and 7.3.
        return not problem.backward
    slow = odd and problem.norm.smooth and not problem.backward and seen.rows > MANY_PLANES
    if slow and seen.elements == SHARING_HELD and seen.units > PROCESSORS and not problem.modulated:
        # (12, 1024, 7, 15) in 16 groups in fp16 with silu takes 6.2 us whole, and 8.1 held, but (30, 512, 21, 21) in 32
        # 18.8, and 13.9.
        return True
    # (20, 320, 13, 13) in 32 groups in fp32 takes 4.6 us held, 41 % full, and 5.1 whole, 83 % full.
    least = 0.45 if seen.columns > 128 and not problem.backward else 0.7
    return (problem.reduced <= SMALL_UNIT and held < least * whole) or few_odd_planes(problem)


def wider_held(problem: Problem, seen: HeldUnits) -> bool:
    """Whether the forward of a small unit reads its channels by the widest loads, each of one channel, where the
    elements of the whole unit look up their channels one by one: (33, 768, 16, 47) in 256 groups in bf16 takes 27 us
    held, and 57 whole, both 55 % full, (60, 192, 24, 24) in 64 12.1, 42 % full, and 15.5, 84 % full."""
    wide = seen.load_bytes(problem) == WIDEST_LOAD and not seen.contiguous
    return wide and not problem.backward and 3 * seen.rows * seen.columns >= seen.elements


def holding_short_pays(problem: Problem) -> bool:
    """Whether the forward of few short units of one channel and narrow loads is faster held, with 2 elements a thread:
    its statistics lie where its elements do. (16, 100, 5, 5) in fp32 takes 1.7 us held, and 2.1 whole, (10, 325, 3, 3)
    with scale and shift 1.8 and 2.3, but (48, 192, 3, 3, 3) in bf16 2.4 both ways, and (128, 320, 9) less whole."""
    view, block = problem.view, power_of_two(problem.reduced)
    short = view.group_channels == 1 and view.spatial > 1 and block <= 32 and unit_bytes(problem) < WIDE_LOAD
    # Few of 32 bits: (11, 3, 9) takes 1.31 us whole, and 1.52 held, (4, 42, 3, 3, 3) with silu 1.45 and 1.55, (10, 50,
    # 3, 3) 1.54 and 1.64.
    few = problem.num_statistics <= FEW_UNITS and problem.dtype == "float32" and not problem.modulated
    return short and not few and not problem.backward and block * problem.num_statistics <= SMALL_HELD // 3


def whole_pays(problem: Problem) -> bool:
    """Whether units in one piece of memory are faster in the registers of one program than read twice.

    For a large unit of several channels an affine per element costs more than a second read: (32, 256, 56, 56) in
    bf16 took 86 us whole and 53 in tiles. A unit of one channel has one affine, and pays where it fills its block, in
    32 bits everywhere: (12, 64, 142, 142) takes 42 us whole and 50 in tiles. Of more than 16384 elements units must be
    many, and in 16 bits no activation needs registers too: (32, 24, 170, 170) takes 34 us whole and 39 in tiles, (36,
    24, 160, 160) with silu 46 and 37.
    """
    view, size, block = problem.view, DTYPE_BYTES[problem.dtype], power_of_two(problem.reduced)
    if problem.reduced <= SMALL_UNIT or view.spatial == 1:
        # (30, 1024, 11, 11) in 32 groups with scale and shift and silu in fp16 takes 13.2 us whole, and 10.5 in tiles.
        single = load_bytes(problem) == size == 2 and view.group_channels > MANY_PLANES and view.spatial > SHORT_PLANE
        large = problem.reduced > LARGE_HELD // 2 and problem.num_statistics > 4 * PROCESSORS
        return not (single and large and problem.modulated and problem.norm.smooth)
    if view.group_channels > 1:
        return few_odd_planes(problem)
    if block <= 8192:
        return True
    fills, wide = fills_block(problem), load_bytes(problem) >= WIDE_LOAD
    if block == 16384:  # (4, 32, 16, 21, 25) in fp16 takes 3.6 us whole, and 5.2 in tiles
        return size > 2 or fills or (wide and problem.num_statistics <= 2 * PROCESSORS)
    pays = (wide or fills) if size > 2 else (wide and fills and not problem.norm.smooth)
    return pays and 2 * problem.num_statistics >= PROCESSORS


def few_odd_planes(problem: Problem) -> bool:
    """Whether a program takes one of a few groups of planes that no wide load reads, unlike the whole group: in fp16
    (1, 768, 3, 3) in one group takes 3.2 us whole, and 3.9 in tiles, (2, 515, 9) in fp32 with scale and shift 3.8, and
    5.2, but (1, 1100, 5) with silu 3.7, and 3.2."""
    few = problem.reduced <= 2 * SMALL_UNIT and problem.num_statistics <= PROCESSORS // 2
    odd = (
        load_bytes(problem) < WIDE_LOAD and unit_bytes(problem) >= WIDE_LOAD and problem.view.spatial < MOST_WHOLE_PLANE
    )
    return few and odd and (DTYPE_BYTES[problem.dtype] == 2 or problem.modulated)


def fills_block(problem: Problem) -> bool:
    """Whether a long unit of one channel has elements for most lanes of a program that holds it: (111, 24, 106, 106) in
    bf16 takes 40 us whole and 45 in steps, (8, 300, 100, 100) 37 and 40, (53, 24, 132, 132) 40 and 34. Lanes that load
    single elements take longer: (138, 24, 95, 95) takes 83 us whole and 58 in tiles, and so do the 64 elements of a
    thread: on an H100 (20, 128, 136, 136) in fp16 with relu takes 86 us whole and 75 in steps, (8, 256, 168, 168) 88
    and 103."""
    lanes, block = 16 * problem.reduced, power_of_two(problem.reduced)
    if load_bytes(problem) < WIDE_LOAD:
        return lanes >= 10 * block  # (6, 320, 10761) in bf16 takes 27.8 us whole, and 36 in tiles
    if DTYPE_BYTES[problem.dtype] == 2 and block == 16384:
        return 2 * lanes >= 19 * block  # (32, 256, 96, 100) in fp16 takes 100 us whole, and 94 in steps
    return lanes >= (11 if block > 16384 and DTYPE_BYTES[problem.dtype] == 2 else 9) * block
