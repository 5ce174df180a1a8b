"""The choice for triton.flat: pure functions of the problem."""

from __future__ import annotations

from fusednorm.backends.triton.config.device import SMALL_HELD
from fusednorm.backends.triton.config.kinds import FlatConfig
from fusednorm.backends.triton.runs import READ_CHANNELS, WIDE_LOAD, WIDEST_LOAD, alignment
from fusednorm.problem import DTYPE_BYTES, Layout, Problem, dense_layout

#: Elements up to which an evaluation is as fast with two elements to a thread as with more, and those up to which one
#: goes in the order of memory.
TINY, MOST_SMALL = 1 << 15, 5 << 18
#: Positions of a plane that fills tiles.
LONG_PLANE = 512
#: Positions that are few for a tile of each sample's scale and shift.
SHORT_PLANE = 64


def is_dense(problem: Problem) -> bool:
    """Whether input and output have their elements in the same order in one piece of memory."""
    view = problem.view
    expected = dense_layout(view, problem.layout.order)

    def dense(layout: Layout | None) -> bool:
        return layout is not None and all(
            size <= 1 or getattr(layout, axis) == getattr(expected, axis)
            for axis, size in (("sample", view.samples), ("channel", view.channels), ("spatial", view.spatial))
        )

    return dense(problem.layout) and dense(problem.output_layout)


def inner_elements(problem: Problem) -> int:
    """The neighbouring elements of a channel, or in channels_last of a position."""
    return problem.view.channels if problem.layout.order == "channels_last" else problem.view.spatial


def of_channels(problem: Problem) -> bool:
    """Whether neighbouring elements have channels of their own."""
    return problem.view.spatial == 1 or problem.layout.order == "channels_last"


def most_width(problem: Problem) -> int:
    """The elements of the widest vectors that make up the tensor."""
    return alignment(problem.dtype, problem.view.numel)


def one_channel_width(problem: Problem) -> int:
    """The elements of the widest vectors that divide every plane, or every position's channels; 1 where these would
    have loads of less than WIDE_LOAD."""
    width = alignment(problem.dtype, inner_elements(problem))
    return width if width * DTYPE_BYTES[problem.dtype] >= WIDE_LOAD else 1


def flat_pays(problem: Problem) -> bool:
    """Whether the order of memory is faster than tiles. On an H100, in small evaluations: (10, 171, 29, 8) with scale
    and shift in fp16 and channels_last takes 2.6 us, and 3.5 in tiles, (64, 77) in bf16 1.5 and 2.6, on an H200 (65536,
    14) in fp16 2.8 and 3.7, (62, 66, 17, 17) in bf16 and channels_last 3.2 and 4.1. In large ones where a vector has
    one channel: (16, 256, 56, 56) in bf16 takes 18.6 us, and 19.5 in tiles, (30000, 500) with scale and shift 40 and
    43, but (32, 512, 28, 28) in channels_last with gelu 24 and 20. Or where vectors have few elements: (20, 300, 45,
    45) in fp32 takes 34 us, and 40 in tiles, (17, 2414, 27) with scale and shift 4.9 and 7.3, but (100, 2048, 7, 7) in
    bf16 24 and 16."""
    view, one_channel = problem.view, one_channel_width(problem) > 1
    odd_channels = alignment(problem.dtype, view.channels) == 1 and view.channels >= READ_CHANNELS
    odd_channels = odd_channels and of_channels(problem)
    if view.numel <= MOST_SMALL:
        # Of longer rows (2306, 537) in fp16 with gelu takes 5.1 us, and 4.1 in tiles, (128, 129, 64) in channels_last
        # 4.2 and 3.0.
        # Long planes of single elements: (59, 23, 27, 27) in fp16 with gelu_tanh takes 4.8 us, and 3.3 in tiles, (8,
        # 64, 11, 11, 11) 3.3 and 2.5.
        odd = problem.layout.order == "channels_first" and alignment(problem.dtype, view.spatial) == 1
        odd = odd and (DTYPE_BYTES[problem.dtype] == 2 or most_width(problem) == 1)
        if odd and view.spatial >= LONG_PLANE and view.numel > 2 * SMALL_HELD:
            return False
        # In fp32 and channels_last (64, 129, 91) takes 3.9 us so, and 5.9 in tiles, (12, 301, 15, 15) with scale and
        # shift 5.3 and 7.1.
        floats = problem.dtype == "float32" and view.spatial > 1
        return view.numel <= 2 * SMALL_HELD or floats or not odd_channels
    if one_channel and (problem.layout.order == "channels_first" or (problem.modulated and view.spatial == 1)):
        return True
    if view.spatial == 1 and not one_channel:
        # (25103, 79) in fp32 with silu takes 7.6 us so, and 6.0 in tiles, but (65536, 29) with scale and shift and silu
        # 8.6, and 11.9.
        return problem.dtype == "float32" and problem.modulated and view.channels < READ_CHANNELS
    if most_width(problem) == 1:
        return False  # (3, 1, 217, 217, 217) in fp32 takes 102 us so, and 64 in tiles
    if odd_channels:
        return False  # (3, 229, 56, 56) in fp32 and channels_last takes 7.8 us so, and 6.3 in tiles
    return problem.dtype == "float32" and (not problem.modulated or view.spatial < SHORT_PLANE)


def flat_for(problem: Problem) -> FlatConfig:
    """One load or two to a thread, and 4 warps or 8. Vectors of several channels are short, since each element then has
    a load for each of its numbers: (16, 100, 9, 9) in fp16 takes 1.8 us with two elements to a vector, and 2.0 with
    four, (30000, 500) with scale and shift in bf16 40 with four of one channel, and 64 with eight of two."""
    width, total = one_channel_width(problem), problem.view.numel
    several = width == 1
    if several:
        width = min(most_width(problem), 4 if problem.dtype == "float32" and total > SMALL_HELD else 2)
    elif total <= SMALL_HELD:
        # (6, 24, 5, 5) with scale and shift and gelu in channels_last takes 1.47 us with one, and 1.75 with two.
        busy = problem.dtype == "float32" and problem.norm.smooth and problem.modulated
        width = min(width, (1 if busy else 2) if total <= TINY else 4)
    elif DTYPE_BYTES[problem.dtype] == 2 and width == 8 and of_channels(problem):
        # Each element has a channel of its own: (2000, 384) in fp16 with silu takes 2.4 us so, and 2.7 with eight.
        return FlatConfig(128, 4, 4)
    points = problem.dtype == "float32" and problem.modulated and problem.view.spatial == 1
    if points and (TINY < total <= SMALL_HELD or (several and total > MOST_SMALL)):
        # (2000, 128) takes 2.6 us so, and 2.9 with four, (65536, 29) with silu 8.6, and 9.3 in longer programs.
        return FlatConfig(128, min(width, 2), 4)
    floats = problem.dtype == "float32" and several and of_channels(problem) and problem.view.spatial > 1
    if floats and SMALL_HELD < total <= MOST_SMALL:
        # (64, 129, 40) takes 2.1 us so, and 2.5 with vectors of four, (20, 333, 100) 3.6, and 4.9 in tiles.
        return FlatConfig(256, min(width, 2), 4)
    warps = 4 if total <= TINY or width * DTYPE_BYTES[problem.dtype] == WIDEST_LOAD else 8
    if several and most_width(problem) == 8 and of_channels(problem) and total > SMALL_HELD:
        return FlatConfig(128, 8, 4)  # (65536, 5) in fp16 takes 2.1 us so, and 2.3 with two
    if not several and SMALL_HELD < total <= 2 * SMALL_HELD and DTYPE_BYTES[problem.dtype] == 2 and width == 4:
        # (20, 500, 35) in bf16 with relu takes 2.1 us so, and 2.3 with 256 vectors.
        return FlatConfig(128, 4, 4)
    if total > SMALL_HELD and DTYPE_BYTES[problem.dtype] == 2 and width * 2 < WIDEST_LOAD:
        # Several loads to a thread: on an H200 (65536, 14) in fp16 takes 2.8 us with four, and 2.9 with two, (30, 100,
        # 20, 20) with scale and shift in channels_last 3.1 with two on four warps, and 3.5 with one on 8.
        # Of planes (4, 64, 33, 33) in fp16 with silu takes 2.15 us on 8 warps, and 2.38 on two.
        return FlatConfig(256, width, 4 if not several else 2 if of_channels(problem) else 8)
    each = 2 if several and width <= 2 and total > SMALL_HELD else 1
    return FlatConfig(32 * warps * each, width, warps)
