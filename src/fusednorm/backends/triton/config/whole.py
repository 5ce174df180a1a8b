"""Whole units in the registers of a program, triton.whole: pure functions of the problem."""

from __future__ import annotations

from fusednorm.backends.triton.config.device import MOST_WARPS, PROCESSORS, SMALL_HELD, thread_elements
from fusednorm.backends.triton.config.kinds import WholeConfig
from fusednorm.backends.triton.runs import PAIR_LOAD, WIDE_LOAD, WIDEST_LOAD, load_bytes, power_of_two, unit_bytes
from fusednorm.problem import DTYPE_BYTES, Problem

#: Elements of a program of short units.
SHORT_UNITS = 512
#: Operations of an activation that is slow.
SLOW = 14
#: Short units of narrow loads up to which a warp has one, and two; so many are few for the multiprocessors.
FEW_UNITS, MANY_UNITS = 4 * PROCESSORS, 20 * PROCESSORS
#: Units of 32 lanes up to which twice as many on four warps are faster.
SOME_UNITS = 200 * PROCESSORS
#: Rows up to which a warp has four with a mean that fill little more than half of their 512 lanes.
MANY_ROWS = 80 * PROCESSORS
#: Programs of a row each, of which some multiprocessors have two and most of them one.
MORE_THAN_A_WAVE = 8 * PROCESSORS // 5


def whole_forward_for(problem: Problem) -> WholeConfig:
    """At most 16 elements a thread; 32 of long units, and 64 where these fill no tile: 8192 x 5120 in bf16 takes 44 us
    on 4 warps, 51 on 8 and 60 on 16, and 8192 x 8192 takes 68 on 8. Units with a mean have 32 too where they fill no
    tile: layer_norm of 50000 x 1200 takes 63 us on 2 warps and 77 on 4, 182913 x 736 takes 132 on one and 146 on 2."""
    block, units = power_of_two(problem.reduced), problem.num_statistics
    narrow, size = unit_bytes(problem) < WIDE_LOAD, DTYPE_BYTES[problem.dtype]
    if block * units <= 2 * SMALL_HELD and block <= 8192:
        if block == 8192 and problem.view.group_channels > 1 and problem.view.spatial > 1:
            return WholeConfig(1, 16)  # (2, 320, 19, 19) in 16 groups in fp16 takes 3.7 us so, and 4.0 on 8 warps
        return _small_whole(problem, block, units, narrow)
    if narrow and block <= 128:
        if problem.modulated and problem.view.spatial == 1:
            # (65536, 11) in bf16 takes 5.2 us on four warps, 7.2 on one. Of longer ones two warps would share a unit:
            # (14319, 2464) in 32 groups takes 107 us so, and 232 on four, (9000, 720) in 16 in fp16 27 and 40, (8000,
            # 2464) in 32 in fp32 83 and 159.
            # (65536, 42) in one group in bf16 takes 9.9 us with 8 units, and 12.1 with 4.
            eight = block == 64 and size == 2 and problem.view.groups == 1
            return WholeConfig(SHORT_UNITS // block, 4) if block <= 32 else WholeConfig(8 if eight else 4, 1)
        return _narrow_whole(problem, block)
    if block <= 512:
        return _short_whole(problem, block, narrow)
    if 4096 <= block <= 8192 or (block == 16384 and narrow and size == 2):
        full = _fills(problem.reduced, block)
        # layer_norm of (1000, 6144) in bf16 takes 9.4 us with 32, and 11.8 with 64, but (714, 5120) with relu 7.6, and
        # 6.7.
        long = block == 8192 and 8 * problem.reduced > 5 * block and problem.view.spatial == 1
        least = (16 if long and problem.norm.has_mean else 4) * PROCESSORS
        thread = 64 if block > 4096 and units > least and size == 2 and not full else 32
        if block == 16384 and units > (MORE_THAN_A_WAVE if problem.norm.has_mean else PROCESSORS):
            # rms_norm of (3000, 15001) in fp16 takes 64 us so, and 96 with 32, layer_norm of (354, 9001) in bf16 9.2,
            # and 11.5, of (260, 9001) 6.9, and 8.7.
            thread = 64
        odd = load_bytes(problem) < WIDE_LOAD and _several(problem) and problem.view.group_channels >= 16
        if size == 2 and odd and problem.norm.smooth and block <= 8192 and units * block <= 2 * PROCESSORS * 8192:
            # (25, 384, 13, 13) in 16 groups in fp16 with silu takes 5.6 us so, and 6.4 with 32, but (30, 1024, 11, 11)
            # in 32 10.4, and 9.3, of longer ones (10, 2048, 11, 11) 10.7 and 8.8.
            thread = 16
        if block == 4096 and problem.modulated and _several(problem) and problem.dtype == "float32":
            thread = 16  # (31, 2048, 5, 7) in 32 groups takes 12.7 us so, and 15.7 with 32
    elif block > 8192:
        # Two to a multiprocessor: layer_norm of (200, 12002) in fp32 takes 9.0 us so, and 10.1 on 16 warps.
        two = problem.dtype == "float32" and problem.norm.has_mean and 4 * problem.reduced <= 3 * block
        thread = 64 if two and block == 16384 and PROCESSORS < units <= 2 * PROCESSORS else 16
    else:
        # On an H100 (71, 561, 35) in 33 groups in bf16 takes 5.3 us on two warps, and 6.4 on one.
        sparse = problem.norm.has_mean and size == 2 and not _fills(problem.reduced, block) and not _several(problem)
        # (9000, 763) in fp32 takes 21.1 us on 4 warps, and 22.9 on 2.
        few = units <= 64 * PROCESSORS and problem.view.spatial == 1 and problem.norm.activation is None
        if sparse and block == 1024 and few:
            # (3666, 768) in fp16 takes 5.6 us so, and 6.1 with one on a warp, but (4687, 741) 8.2 and 6.7.
            # (4500, 766) in fp16 takes 6.0 us so, and 7.3 with one on a warp, (4500, 640) in bf16 5.5 with two on one,
            # and 6.3.
            if unit_bytes(problem) < PAIR_LOAD:
                return WholeConfig(1, 1)
            return WholeConfig(2, 1 if 8 * problem.reduced <= 5 * block and not narrow else 2)
        row = size == 2 and not narrow and problem.view.spatial == 1 and not (problem.norm.smooth or problem.modulated)
        some = 50 * PROCESSORS < units <= 150 * PROCESSORS and (not _some(problem) or problem.norm.activation)
        if row and some and 4 * problem.reduced >= 3 * block == 3 * 1024:
            # rms_norm of (15936, 768) in bf16 takes 13.6 us so, and 14.7 on one warp, layer_norm of (7021, 1024) in
            # fp16 with relu 9.7, and 10.2 with one on two, of (16000, 1024) in bf16 18.3 and 18.8.
            return WholeConfig(2, 4)
        light = not problem.norm.has_mean and size == 2 and not narrow and not _fills(problem.reduced, block)
        if light and block == 1024 and units > 64 * PROCESSORS:
            return WholeConfig(2, 1)  # rms_norm of (39494, 628) in fp16 with gelu takes 27.7 us so, and 34.0 with one
        slow = problem.norm.has_mean and problem.view.spatial == 1 and problem.norm.activation_flops >= 2 * SLOW
        if slow and size == 4 and block == 1024 and 4 * problem.reduced <= 3 * block and units > 50 * PROCESSORS:
            # layer_norm of (20000, 768) with gelu takes 32.5 us so, and 37.5 on four warps, (30000, 640) 41.0 and 53.6,
            # (7668, 768) 14.9 and 16.2.
            return WholeConfig(1, 2)
        plane = problem.dtype == "float32" and problem.view.spatial > 1
        if plane and block == 1024 and problem.view.group_channels == 1:
            return WholeConfig(1, 1)  # (8, 1280, 24, 24) takes 13.9 us so, and 15.9 on four warps
        if plane and narrow and 5 * problem.reduced <= 3 * block:
            # (12, 2560, 515) takes 36 us so, and 45 on four warps, (10, 1000, 1025) 24.4, and 26.2.
            return WholeConfig(1, block // 1024)
        if not problem.norm.has_mean and block == 1024 and problem.dtype == "float32" and _some(problem):
            return WholeConfig(1, 1)  # (2752, 1024) takes 6.8 us so, and 7.6 on four warps
        simple = problem.norm.activation is None and not problem.modulated
        if simple and problem.norm.has_mean and size == 2 and not narrow and not _several(problem) and _some(problem):
            # layer_norm of (8412, 948) in fp16 takes 10.7 us with two, and 11.8 with one, instance_norm of (85, 54, 32,
            # 32) 6.3 and 7.2. Longer ones are alone: layer_norm of (5000, 1536) in bf16 takes 10.0 us so, and 11.6 with
            # two on four warps, (2500, 1280) in fp16 5.8 and 6.5, (4000, 2048) 10.1 and 10.2.
            return WholeConfig(2, 2) if block == 1024 else WholeConfig(1, 2)
        planes = simple and problem.norm.has_mean and size == 2 and not narrow and _is_sparse_plane(problem)
        if planes and block == 1024 and units > 64 * PROCESSORS:
            return WholeConfig(2, 1)  # instance_norm of (58, 192, 24, 24) in fp16 takes 8.8 us so, and 9.3 with one
        if not problem.norm.has_mean and block == 1024 and size == 2 and not narrow and _some(problem):
            return WholeConfig(2, 2)  # rms_norm of (4343, 1024) in bf16 with relu takes 6.4 us so, and 7.3 with one
        if problem.dtype == "float32" and block == 2048 and not plane and _some(problem) and simple and not narrow:
            # layer_norm of (2288, 1536) takes 9.9 us so, and 11.2 with one, rms_norm of (5389, 1536) 18.0 and 18.4.
            return WholeConfig(2, 4)
        most = 32 if sparse else 8 if problem.dtype == "float32" and block == 1024 else 16
        if not problem.norm.has_mean and block == 1024 and size == 2 and units <= 8 * PROCESSORS:
            most = 8  # rms_norm of 957 x 1024 in bf16 takes 2.6 us so, and 2.7 with 16
        if problem.modulated and problem.view.spatial == 1:
            most = 16  # (4000, 2565) in 5 groups in bf16 takes 27.1 us with 16 elements a thread, and 38.4 with 32
        thread = thread_elements(block * units, most, 32 if narrow else 16)
    return WholeConfig(1, max(1, min(16, block // (32 * thread))))


def whole_sum_for(problem: Problem) -> WholeConfig:
    """:func:`whole_forward_for` of a problem with sums around the norm, with 32 elements a thread at most, since two or
    three tensors are on their way to it. rms_norm of x + h with the sum kept is within 2 % of the best configuration
    in bf16 from (512, 768) to (4096, 16384), and of four transfers at the speed of a copy."""
    config, block = whole_forward_for(problem), power_of_two(problem.reduced)
    return WholeConfig(config.units, min(16, max(config.warps, block * config.units // (32 * 32))))


def _fills(length: int, block: int) -> bool:
    return 8 * length > 7 * block


def _short_whole(problem: Problem, block: int, narrow: bool) -> WholeConfig:
    """Many short units: one warp, with 32 elements a thread of 16 bits and 16 of 32. Where units fill their lanes two
    warps have wider runs of memory. In fp32 22790 x 158 takes 10.3 us on one warp and 15.1 on four, 7650 x 158
    4.3 with four units and 5.2 with two, in bf16 32768 x 256 takes 10.6 on two, 10.9 on one and 11.3 on four, 17826
    x 512 12.1 on two with two rows, 13.4 on four with eight, but 18972 x 64 takes 2.6 on four with 16 rows, and 2.8
    on two with 32.
    With a mean, loads of less than 16 bytes are for one: layer_norm of 1105136 x 228 in fp16 takes 249 us on one, 280
    on two."""
    short, total = DTYPE_BYTES[problem.dtype] == 2, block * problem.num_statistics
    if problem.modulated and problem.view.spatial == 1:
        # (8000, 2048) in 32 groups in bf16 takes 31.8 us so, and 35.8 with 32 units on two warps, (8000, 1500) in 10
        # 28.4 and 29.9 with four on one, but (1362, 512) in 32 in fp32 with gelu_tanh 4.4 on four, and 5.3 on one.
        return WholeConfig(SHORT_UNITS // block, 1 if short or narrow or not problem.norm.smooth else 4)
    plane = problem.view.group_channels == 1 and problem.view.spatial > 1
    if not short and block == 32 and unit_bytes(problem) == WIDE_LOAD and plane:
        return WholeConfig(16, 4)  # (30, 900, 5, 6) takes 3.7 us so, and 6.0 on one warp
    if not short and block == 256 and narrow and 5 * problem.reduced <= 3 * block:
        # rms_norm of (31482, 131) with gelu_tanh takes 11.1 us so, and 12.6 with two, instance_norm of (3, 2048, 145)
        # 3.9 and 4.2.
        return WholeConfig(4, 1)
    if total <= (4 if short else 6) * SMALL_HELD:
        if short and block == 512 and not (narrow or problem.norm.has_mean):
            return WholeConfig(2, 2)  # rms_norm of (1269, 512) in fp16 takes 2.2 us so, and 2.4 with one on one warp
        odd = short and block == 512 and narrow and not problem.norm.has_mean and problem.view.spatial == 1
        if odd and total > 2 * SMALL_HELD and _fills(problem.reduced, block) and not _is_slow(problem):
            return WholeConfig(2, 1)  # rms_norm of (1500, 509) in fp16 with relu takes 2.4 us so, and 2.8 with one
        return WholeConfig(SHORT_UNITS // block, 1)
    wide = not narrow and (not problem.norm.has_mean or unit_bytes(problem) >= WIDEST_LOAD)
    # rms_norm of (79350, 64) in bf16 with leaky_relu takes 6.6 us with 32 on two warps, and 7.2 with 16.
    cheap = problem.norm.activation is None or not (problem.norm.has_mean or problem.norm.smooth)
    if _fills(problem.reduced, block) and wide and (block > 128 or cheap):
        if short and problem.norm.has_mean and block == 256 and 6 * SMALL_HELD < total <= 12 * SMALL_HELD:
            return WholeConfig(4, 1)  # layer_norm of (12000, 256) in fp16 takes 4.8 us so, and 5.4 with 8 on two
        if short and problem.norm.has_mean and block == 64:
            # layer_norm of (71435, 64) in fp16 takes 6.1 us so, and 7.3 with 32 on two, (40000, 64) 4.0 with 32 on
            # four, and 4.8.
            return WholeConfig(64 if total > 12 * SMALL_HELD else 32, 4)
        if short and problem.norm.has_mean and block == 32 and total > 6 * SMALL_HELD:
            return WholeConfig(32, 2)  # layer_norm of (60000, 32) in bf16 takes 3.4 us so, and 3.8 on four
        if short and total <= 8 * SMALL_HELD and block <= 256:
            # On an H100 (8, 640, 16, 16) in bf16 with silu takes 3.7 us so, and 4.1 in twice as many on two.
            return WholeConfig(1024 // block, 4)
        if problem.dtype == "float32" and block == 512 and not problem.norm.has_mean and _some(problem):
            return WholeConfig(1, 1)  # (3762, 512) takes 5.1 us so, and 5.4 with two on two
        elements = 2048 if short and block < 512 else 1024
        return WholeConfig(elements // block, max(2, elements // 1024))
    if block <= 128 and short:
        return WholeConfig(1024 // block, 2)
    if short and block == 256 and narrow and _several(problem):
        return WholeConfig(2, 1)  # (28, 960, 71) in 320 groups in fp16 with relu takes 6.2 us so, and 7.8 with four
    if not short and block == 64 and unit_bytes(problem) == WIDE_LOAD and problem.view.spatial == 1:
        return WholeConfig(8, 2)  # (65536, 50) takes 10.7 us so, and 12.5 on one warp
    simple = problem.norm.has_mean and problem.norm.activation is None and problem.view.spatial == 1
    sparse = unit_bytes(problem) >= PAIR_LOAD and 8 * problem.reduced <= 5 * block
    if short and block == 512 and simple and sparse and problem.num_statistics <= MANY_ROWS:
        # 8010 x 262 in fp16 takes 4.7 us so, and 5.3 with two, but 6000 x 384 5.6 and 4.9, 7000 x 440 6.4 and 6.0.
        return WholeConfig(4, 1)
    if short and block == 512 and not (narrow or problem.norm.has_mean) and 4 * problem.reduced >= 3 * block:
        # rms_norm of (12000, 448) in fp16 with silu takes 7.4 us so, and 8.1 on one warp, (25000, 384) in bf16 11.3 and
        # 12.0.
        return WholeConfig(2, 2)
    odd = short and block == 512 and narrow and not problem.norm.has_mean and _fills(problem.reduced, block)
    if odd and problem.view.spatial == problem.view.groups == 1 and not _is_slow(problem) and _some(problem):
        # rms_norm of (4000, 495) in bf16 takes 4.5 us so, and 4.8 on one warp, of (2300, 511) in fp16 with leaky_relu
        # 2.95 and 3.23.
        return WholeConfig(2, 2)
    return WholeConfig((1024 if short or (block >= 256 and not narrow) else SHORT_UNITS) // block, 1)


def _narrow_whole(problem: Problem, block: int) -> WholeConfig:
    """Many short units of narrow loads, whose lanes lie side by side: one warp, since two would share each unit.
    (200, 900, 3, 3) in bf16 takes 7.0 us on one warp with 32 units, and 9.7 on two with 16. In fp32 (95, 504, 5, 5)
    takes 7.0 us on two warps with 8 units, and 7.5 with 16. Longer ones of 16 bits, whose parameters are ``shared``,
    are twice as many: 30000 x 77 in bf16 takes 5.7 us with 8, and 6.7 with 4."""
    size, smooth, point = DTYPE_BYTES[problem.dtype], problem.norm.smooth, problem.view.spatial == 1
    shared = point and problem.view.groups == 1
    if size > 2 and block < 64:
        return WholeConfig(SHORT_UNITS // 2 // block, 2)
    if size == 2 and block == 16 and point and not shared and problem.num_statistics > 10 * SOME_UNITS and not smooth:
        # (34663, 320) in 32 groups in bf16 takes 26.5 us so, and 32.4 with 32 units on 4, but (30661, 169) in 13 with
        # silu 24.0, and 21.5.
        return WholeConfig(1024 // block, 2)
    if not shared and (block == 4 or (point and 4 < block <= 16)):
        # (40000, 96) in 32 groups in fp16 takes 13.0 us so, and 15.6 on one warp, (11504, 105) in 15 5.4 and 5.9.
        return WholeConfig(SHORT_UNITS // block, 4)
    if size == 2 and block == 32 and not shared:
        if problem.num_statistics <= SOME_UNITS:  # (73, 256, 3, 3, 3) in fp16 takes 3.3 us so, and 3.6 with 8 on one
            return WholeConfig(SHORT_UNITS // block, 4)
        # On an H100 (50, 2560, 5, 5) in fp16 takes 13.7 us so, and 16.3 with 16 units, but (34917, 960) in 32 groups in
        # bf16 86 and 56.
        return WholeConfig(SHORT_UNITS // (1 if point and _fills(problem.reduced, block) else 2) // block, 1)
    if block == 64 and problem.modulated and smooth:
        return WholeConfig(4, 1)  # (6, 1452, 7, 7) in bf16 with gelu takes 3.2 us so, and 3.7 with 8
    # With gelu_tanh (13032, 74) in bf16 takes 4.3 us with 4, and 5.0 with 8.
    # rms_norm of (40150, 67) in fp32 takes 7.3 us with 8, and 8.9 with 4.
    light = size == 2 or not problem.norm.has_mean
    twice = light and block == 128 and shared and not smooth
    some = (64 if 8 * problem.reduced > 5 * block else 48) * PROCESSORS
    if twice and problem.norm.has_mean and problem.norm.activation is None and problem.num_statistics <= some:
        # (8000, 107) in fp16 takes 3.2 us with 4, and 5.3 with 8, but (12000, 107) in bf16 4.1, and 3.8, (8400, 71) in
        # fp16 3.2 and 3.1.
        twice = False
    return WholeConfig((2 if twice else 1) * SHORT_UNITS // block, 1)


def _is_slow(problem: Problem) -> bool:
    """Whether an activation takes about as long as the sums of a row."""
    return problem.norm.activation_flops >= SLOW


def _some(problem: Problem) -> bool:
    """Whether units are several waves of programs, and not many."""
    return 12 * PROCESSORS < problem.num_statistics <= 64 * PROCESSORS


def _is_sparse_plane(problem: Problem) -> bool:
    """Whether units are planes of one channel, which leave three eighths of their lanes empty."""
    plane = problem.view.group_channels == 1 and problem.view.spatial > 1
    return plane and 8 * problem.reduced <= 5 * power_of_two(problem.reduced)


def _several(problem: Problem) -> bool:
    """Whether the elements of a unit have the parameters of several channels, each along its positions."""
    return problem.view.group_channels > 1 and problem.view.spatial > 1


def _small_whole(problem: Problem, block: int, units: int, narrow: bool) -> WholeConfig:
    """A warp to a unit, or several short units, as long as it fits: sums over warps wait for barriers. 200 x 200 in
    fp32 takes 1.66 us, and 1.81 with two warps. The many narrow loads of few units are spread over more, but those of
    short units are a warp's, which waits for no other: 3904 x 75 in fp16 takes 2.4 us with four units on one warp, and
    3.1 on four, 581 x 73 in bf16 1.7 with two on one, and 1.9 with four on four. The shortest in fp32 are two elements
    a thread: (6, 1800, 3, 3) takes 2.1 us with 16 units on four warps, and 2.8 with 32."""
    size = DTYPE_BYTES[problem.dtype]
    if block == 128 and narrow and size > 2 and FEW_UNITS < units <= MANY_UNITS and problem.view.spatial > 1:
        return WholeConfig(2, 2)  # on an H100 (10, 200, 11, 11) in fp32 takes 2.7 us so, and 3.0 on one warp
    if block == 128 and (narrow or (size > 2 and units <= PROCESSORS // 4)):
        # (1000, 95) in fp32 with silu takes 2.1 us with two units on a warp, and 3.0 with four, on an H100 (5, 82) 1.6
        # with one, and 2.1 with four on four.
        return WholeConfig(1 if units <= FEW_UNITS else 2 if units <= MANY_UNITS else 4, 1)
    if block == 64 and narrow and problem.view.spatial > 1 and units > FEW_UNITS:
        # (7, 960, 7, 7) in bf16 takes 2.6 us so, and 3.3 with 8 on four warps, (36, 128, 11, 5) in fp32 2.6 and 3.3,
        # (4, 640, 9, 7) with relu 2.2 and 2.75, (3, 640, 7, 7) in fp16 1.8 with two, 1.9 with four and 2.1 with 8.
        return WholeConfig(4 if 5 * units > 4 * MANY_UNITS else 2, 1)
    alone = size == 4 and block <= 32 and block * units <= 96 * PROCESSORS  # a warp to a multiprocessor
    if alone and narrow and problem.view.spatial > 1 and not _several(problem):
        # (11, 3, 9) takes 1.31 us with two, and 1.54 with 8.
        lanes = 32 if units <= PROCESSORS or block == 32 else 64
        return WholeConfig(max(1, lanes // block), 1)
    if narrow and block <= 32 and units <= 32 and not problem.modulated:
        return WholeConfig(16, 4)  # (1, 960) in 32 groups in bf16 with relu takes 1.57 us so, and 1.77 with one on one
    if alone:
        # (22, 64) in 32 groups takes 1.42 us so, and 1.59 with 256 on four warps, (49, 192) with silu 1.57 and 1.70
        # with 64, but (100, 40, 2, 2) 1.53, and 1.49 with 128, in bf16 (64, 96) in 32 groups 1.70, and 1.55.
        return WholeConfig(128 // block, 1)
    if block <= 128:
        together = min(SHORT_UNITS // block, power_of_two(units // PROCESSORS if narrow else units))
        if problem.modulated and not narrow and block == 64 and units < 4 * PROCESSORS:
            return WholeConfig(2, 1)  # (25, 9, 8, 8) in fp32 takes 1.7 us so, and 2.0 with 8 on four warps
        together = max(together, 32 // block)  # values that lanes have in common move through shared memory
        warps = max(1, block * together // (32 * 4))
        return WholeConfig(together // 2 if narrow and size > 2 and block <= 16 and warps >= 4 else together, warps)
    # Where elements take more instructions, more units are spread: on an H100 72 x 463 in fp16 with silu takes 1.8 us
    # on four warps, and 2.1 on one.
    busy = problem.norm.smooth and (problem.norm.has_mean or (narrow and block == 512))
    if busy and narrow and size > 2 and block == 512 and problem.view.spatial > 1 and units <= 3 * PROCESSORS:
        return WholeConfig(1, 4)  # (2, 148, 31, 13) in fp32 with gelu takes 2.2 us so, and 2.7 on one warp
    # Others are a warp's each: rms_norm of (4, 138) in bf16 takes 1.32 us so, and 1.37 on four, in fp32 (1, 16, 341) in
    # instance_norm 1.43 and 1.52, (34, 67, 3) in one group 1.72 and 1.79, but layer_norm of (2, 483) in fp16 1.82, and
    # 1.59, (82, 497) in bf16 1.99 and 1.83, (10, 300, 5) in 5 groups in bf16 1.92, and 1.71.
    single, rows = block == 512 and narrow and size == 2, problem.view.spatial == problem.view.groups == 1
    if rows and block == 512 and size == 2 and _is_slow(problem) and units <= PROCESSORS // 2:
        return WholeConfig(1, 4)  # rms_norm of (40, 512) in bf16 with gelu takes 1.63 us so, and 1.73 on one warp
    if busy or (block == 512 and _several(problem)) or (single and rows and problem.norm.has_mean):
        few = PROCESSORS
    else:
        few = PROCESSORS // 4 - 1 if single else 0
    if block == 512 and narrow and problem.modulated and _several(problem) and units <= 2 * PROCESSORS:
        return WholeConfig(1, 4)  # (6, 960, 17) in 32 groups in fp16 takes 2.0 us so, and 2.6 on one warp
    if block == 256 and units > 8 * PROCESSORS and not narrow:
        return WholeConfig(2, 1)  # rms_norm of (1713, 256) in fp16 takes 2.0 us so, and 2.3 with one
    if block <= 512 and units > few:
        return WholeConfig(1, 1)
    # rms_norm of (4, 4096) in bf16 takes 1.76 us on 16 warps, and 1.84 on 8, of (1, 949) in fp16 1.60 on 8, 1.67 on 4.
    if block == 4096 and units <= PROCESSORS // 8:
        return WholeConfig(1, 16)
    spread = block == 1024 and size == 2 and units <= PROCESSORS
    return WholeConfig(1, 8 if block > 1024 or spread else 4)


def early(programs: int, warps: int, elements: int) -> bool:
    """Whether parameters are loaded before the statistics of programs of so many elements, and wait for them in
    registers: where no program waits for another, the time of one access is saved."""
    return programs * warps <= PROCESSORS * MOST_WARPS and elements <= 32 * 32 * warps


def first(problem: Problem, config: WholeConfig) -> bool:
    """Whether parameters are loaded before the input: in rows of 16 bits that several warps sum, where the wait for the
    sum is long. layer_norm of (4680, 1024) in fp16 takes 6.4 us so, and 7.8 where the loads come behind the input, of
    (8192, 2048) 17.8 and 19.3, of (7, 768) in bf16 1.65 and 1.79, but rms_norm of (2, 256), on one warp, 1.36 and 1.32.
    """
    rows = problem.view.spatial == 1 or problem.norm.per_position
    return rows and DTYPE_BYTES[problem.dtype] == 2 and config.units <= 2 <= config.warps


def once(problem: Problem, config: WholeConfig, block: int) -> bool:
    """Whether the units of a program, which have the same parameters, share one load of them. Where a thread has few
    elements of each unit, each loads its own: no value then waits for another thread."""
    same = problem.view.groups == 1 and not problem.modulated
    return same and config.units > 1 and block * config.units > 32 * 8 * config.warps
