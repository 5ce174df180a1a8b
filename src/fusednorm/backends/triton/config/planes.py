"""Large inputs whose units are several planes of channels_first: which of them a program holds, and on how many warps.

A program of triton.held has one unit, whose rows and columns are padded to powers of two. The lanes that stay empty
cost no memory, and tiles read each element twice: from some megabytes on even a tile that is a third full is faster.
How many warps share it decides by how much: many elements to a thread are many loads in flight, until the registers
spill. Pure functions of the problem.
"""

from __future__ import annotations

from fusednorm.backends.triton.config.device import CACHED_BYTES, PROCESSORS
from fusednorm.backends.triton.config.units import MOST_HELD, SHARING_HELD, SMALL_UNIT, HeldUnits
from fusednorm.backends.triton.runs import WIDE_LOAD, WIDEST_LOAD, load_bytes
from fusednorm.problem import DTYPE_BYTES, Problem

#: The least input, in bytes, of which these figures are, and the least that a gradient reads from memory twice.
LEAST_BYTES, LARGE_BYTES = 4 << 20, 1 << 24
#: The part of a tile that is full at least.
LEAST_FULL = 0.36
#: Positions of a plane up to which tiles of several channels have few of each, channels of a group that are many for
#: the program that holds them, and those up to which these rules decide.
SHORT_PLANE, MANY_PLANES, MOST_PLANES = 32, 16, 64
#: Units that are few for programs with such loads.
FEW_UNITS = 3 * PROCESSORS
#: Operations of an activation that need registers of their own.
DEAR = 17
#: As many warps as triton.held has for a unit of this size anyway.
BY_SIZE = 0


def warps_of_planes(problem: Problem, seen: HeldUnits) -> int | None:
    """The warps of a program that holds one such unit, or BY_SIZE; None for units that are no such planes, or about
    which other reasons decide."""
    size, several = DTYPE_BYTES[problem.dtype], seen.rows > 1 and seen.across in ("channel", "sample")
    if not several or seen.contiguous or seen.apart or problem.modulated or problem.added is not None or size > 4:
        return None
    if (
        size * problem.view.numel < LEAST_BYTES
        or seen.units <= PROCESSORS
        or not SMALL_UNIT <= seen.elements <= MOST_HELD
    ):
        return None
    if seen.full < LEAST_FULL:
        return None
    if seen.across == "sample":
        return (_channels_backward if problem.backward else _channels_forward)(problem, seen)
    if seen.columns <= SHORT_PLANE or seen.rows > MOST_PLANES:
        return None
    return (_groups_backward if problem.backward else _groups_forward)(problem, seen)


def _large(problem: Problem) -> bool:
    return DTYPE_BYTES[problem.dtype] * problem.view.numel >= LARGE_BYTES


def _short(problem: Problem) -> bool:
    """Whether elements have 16 bits."""
    return DTYPE_BYTES[problem.dtype] == 2


def _single(problem: Problem) -> bool:
    """Whether each load is of one element."""
    return load_bytes(problem) == DTYPE_BYTES[problem.dtype]


def _dear(problem: Problem) -> bool:
    """Whether an activation needs registers beside the elements."""
    return problem.norm.activation_flops >= DEAR


def _groups_forward(problem: Problem, seen: HeldUnits) -> int | None:
    """:func:`warps_of_planes` of the forward of groups. us held, and before in tiles, whole, on more warps or in one
    read of Hopper's: in fp16 (110, 500, 605) in 100 groups 39.8 and 49.7, (130, 96, 50, 48) in 32 with relu 37 and
    45, (120, 192, 30, 31) in 16 with silu 32 and 55, in bf16 (60, 512, 48, 48) in 256 with relu 83 and 139, (116, 640,
    303) in 64 with silu 32 and 62, in fp32 (145, 384, 371) in 64 43 and 71, (63, 640, 212) in 32 with gelu 23 and 30,
    (19, 1000, 872) in 100 with silu 36 and 53; (45, 640, 112) in 32 in fp16, 6 MB of input, 5.8 and 6.7."""
    full, large = seen.full, _large(problem)
    if _single(problem) and seen.rows > MANY_PLANES:
        return None  # (100, 1280, 9, 9) in 32 groups in bf16 takes 30 us held, and 25 whole
    if seen.elements == SMALL_UNIT:
        # (45, 640, 112) in 32 groups in fp16 takes 5.8 us on two, and 6.7 on four, but (33, 768, 16, 47) in 256 in
        # bf16 21.8 and 21.4, (105, 64, 39, 40) in 32 with gelu, 76 % full, 18.1 and 16.8.
        if not _short(problem):
            return BY_SIZE if full >= 0.7 else 4
        return 2 if not large and full < 0.6 and not _dear(problem) else 4
    if seen.elements == SHARING_HELD:
        # (123, 1920, 15, 16) in 64 groups in bf16 with gelu, 88 % full, takes 86 us on four, and 75 on 8, (64, 1024,
        # 14, 14) in 32 22 and 20, but (186, 384, 24, 26) in fp16, 46 % full, 78 and 87.
        light = full < 0.65 if _dear(problem) else full < 0.5 or seen.rows <= MANY_PLANES
        return 4 if _short(problem) and light else 8
    if _short(problem):
        # (23, 768, 22, 24) in 64 groups in fp16 with relu, 39 % full, takes 20.0 us held, and 18.2 in tiles.
        if load_bytes(problem) == WIDEST_LOAD and full < 0.42:
            return None
        return 4 if full < 0.47 else 8
    # (24, 128, 53, 48) in 32 groups with relu takes 19.8 us on 16, and 21.7 on 8, (16, 640, 912) in 64 23.4 and 22.3.
    return 8 if full < 0.5 or seen.units >= 8 * PROCESSORS else 16


def _groups_backward(problem: Problem, seen: HeldUnits) -> int | None:
    """:func:`warps_of_planes` of the backward of groups. us held, and before, as above: in fp32 (65, 640, 448) in 64
    groups 57 and 101, (78, 320, 38, 39) in 64 135 and 198, (8, 2560, 22, 16) in 256 with relu 31 and 38, in 16 bits
    (54, 1024, 13, 15) in 64 with gelu 42 and 60, (159, 128, 27, 24) in 32 with leaky_relu 34 and 43, (89, 400, 1189)
    in 100 78 and 116, (14, 2400, 184) in 100 with gelu 22 and 30, (39, 600, 43, 40) in 100 with silu 84 and 115, (97,
    384, 912) in 32 with relu 78 and 98."""
    single, many = _single(problem), seen.rows > MANY_PLANES
    full, large = seen.full, _large(problem)
    if single and seen.rows >= MANY_PLANES:
        # In fp16 (28, 1920, 225) in 64 groups takes 48 us held, and 40 in tiles, (30, 512, 15, 15) in 32 15 and 12,
        # in fp32 (10, 512, 15, 15) 8.8 and 7.9, (30, 960, 13, 13) with silu 40 and 32.
        if _short(problem):
            return 4 if large and not many and seen.elements == SMALL_UNIT else None
        if seen.units <= FEW_UNITS or not many or seen.elements != SHARING_HELD or problem.norm.smooth:
            return None
        return 4  # (8, 1920, 141) in 64 groups takes 17 us on four, and 24 on 8
    if seen.elements == SMALL_UNIT:
        # (32, 512, 14, 14) in 32 groups in fp32 with relu takes 16.3 us on 8, and 17.5 on four.
        return 4 if _short(problem) or full < 0.7 else BY_SIZE
    if seen.elements == SHARING_HELD:
        if single and _short(problem):
            return 4
        if _short(problem) and seen.rows == 2:
            return 16  # (64, 64, 56, 56) in 32 groups in bf16 with relu takes 27 us on 16, and 31 on 8
        # (133, 800, 24, 24) in 100 groups in fp16 with leaky_relu, 56 % full, takes 175 us held, and 156 in tiles.
        wide = _short(problem) and load_bytes(problem) == WIDEST_LOAD
        beyond = DTYPE_BYTES[problem.dtype] * problem.view.numel > CACHED_BYTES
        return None if wide and beyond and full < 0.6 else 8
    if not _short(problem):
        return 8 if single else 16  # (28, 128, 2801) in 32 groups takes 35 us on 8, and 44 on 16
    if single and not _dear(problem):
        # In 32 groups in bf16 (58, 128, 4019) takes 88 us held, 76 in tiles and 53 in one read, in fp16 (63, 256, 1845)
        # with silu 113, 87 and 69, (72, 128, 2147) 66, 62 and 66.
        return None
    if problem.norm.smooth:
        # (24, 768, 332) in 32 groups in bf16 with silu takes 34 us held, and 25 in tiles, but (16, 1280, 16, 16) 15.0
        # and 17.7.
        return None if many and load_bytes(problem) < WIDEST_LOAD else 8
    # (4, 1000, 828) in 100 groups in bf16 with relu, 7 MB, takes 13.0 us held, and 12.6 in tiles. (57, 512, 32, 32) in
    # 32 in bf16 takes 58 us on 16, and 67 on four, (12, 912) of 68 MB with relu 100 and 78.
    return None if not large or full < 0.5 else 16 if full > 0.75 else 4


def _channels_forward(problem: Problem, seen: HeldUnits) -> int | None:
    """:func:`warps_of_planes` of batch_norm's forward. us held, and before in tiles: (30, 1280, 225) in fp16 15.3 and
    20.0, (33, 2048, 120) in bf16 13.4 and 20.7, (64, 1024, 232) in fp16 with silu 24.4 and 28.5, (128, 1500, 28) in
    bf16 with leaky_relu 11.0 and 14.2, (48, 1500, 225) in fp32 50 and 69."""
    single, short = _single(problem), _short(problem)
    # (60, 2048, 121) in fp16 with silu takes 41 us held, and 29 in tiles, (100, 700, 121) in fp32 38 and 31.
    if single and seen.rows > (2 * MANY_PLANES if short else MOST_PLANES):
        return None
    if seen.elements <= SHARING_HELD:
        if not short:
            return None
        # (44, 640, 16, 5) in bf16 takes 5.4 us on four, and 6.6 on 8, (64, 1024, 100) in fp16 with relu 12.0 and 11.6.
        simple = problem.norm.activation is None and load_bytes(problem) == WIDEST_LOAD
        return 4 if single or simple or seen.elements == SMALL_UNIT else 8
    if short:
        if load_bytes(problem) < WIDE_LOAD or seen.full < 0.47:
            return None
        return 16 if seen.full > 0.75 else 8  # (64, 1024, 232) in fp16 takes 21.0 us on 16, and 23.7 on 8
    return 8 if single and seen.full >= 0.6 else None


def _channels_backward(problem: Problem, seen: HeldUnits) -> int | None:
    """:func:`warps_of_planes` of batch_norm's backward. us held, and before in tiles: (16, 2048, 7, 27) in fp32 21 and
    37, (24, 1024, 225) 21 and 31, (48, 1024, 100) 18.4 and 26.3, (20, 2048, 200) with relu 30 and 36, (12, 1024, 540)
    28 and 33, in 16 bits (16, 3000, 250) 21 and 49, (24, 1500, 187) with silu 25 and 43, (30, 1280, 225) 23 and 33."""
    single, short = _single(problem), _short(problem)
    if single and short and seen.rows > 2 * MANY_PLANES:
        return None  # (40, 1024, 121) in bf16 with relu takes 27 us held, and 23 in tiles
    if seen.elements == SHARING_HELD:
        # (24, 1024, 225) in fp32 takes 21 us on 8, and 33 on 16.
        return 8 if short or (single and seen.rows >= MANY_PLANES) else BY_SIZE
    if seen.elements == SMALL_UNIT:
        # (30, 2560, 99) in bf16 with silu takes 22.8 us on four, and 30.4 on 8, (25, 2560, 121) in fp16 19.1 and 26.2.
        return 4 if single and short and not _dear(problem) else BY_SIZE
    return BY_SIZE if not short and load_bytes(problem) == WIDEST_LOAD else None
