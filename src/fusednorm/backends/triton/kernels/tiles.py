"""Both memory orders, any size: statistics of all tiles, then the results of all tiles.

A tile is BLOCK_C channels by BLOCK_S positions of one sample. In channels_first a tile is long in the positions, which
are contiguous. In channels_last (LAST) a tile holds rows of many channels, which are contiguous, and its axes are
swapped, so that the last axis is the contiguous one. A chunk is the ``tiles`` tiles that one program takes in a pass.
Moments are kept per channel and chunk; merging these partials makes the statistics of groups.

WINDOW, for channels_first in 16 bits where planes do not begin at 16 bytes: a tile begins at the last aligned address
before its channel's first position, so that wide loads and stores move its whole windows of 8 elements. At most 7
positions at either end of a chunk, its ends, move one by one. Lanes are counted from the beginning of the tile.

REPEAT, for channels_last: a row of a tile holds the channels of so many neighbouring positions, in as many lanes for
each. Such rows fill a tile and begin at 16 bytes where those of one position would not. The partials of each of these
positions are those of a chunk. FOLD, in a backward: a program takes whole rows, and leaves the sums of all their
positions.

ACROSS, with REPEAT: the rows are those of the whole tensor, so that all of them begin at 16 bytes where the samples do
not. A sample's first row then begins with positions of the sample before it, and its last row ends with positions of
the next one. Wide loads and stores move windows of ALIGN elements that belong to the sample alone; what is left of it
at either end, fewer than ALIGN elements, moves one by one.

OVERLAP, on NVIDIA from Hopper on: a kernel starts while the one before it on the stream ends (programmatic dependent
launch), which saves 0.2 us where that is the last one of another call, and a microsecond where it is one of the same
call. The first kernel of a call waits for what is before it, which may make any of its arguments, and only then lets
the next one start. So the others wait only for what the kernel before them makes, and load their arguments before that.

The numbers of chunks, tiles and units change with the length of an input, so no kernel is compiled for their values,
except for the value 1 where it makes the code shorter. Sizes and strides are compiled for divisibility by 16, on which
the width of loads depends. Arguments come in this order: pointers; the sizes of the view; the strides of each tensor;
the blocks of channels and the chunks of the pass; the partials; numbers; constants.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fusednorm.backends.triton.kernels.added import behind, load_sum, number_of_tile, slope_of
from fusednorm.backends.triton.kernels.addressing import (
    aligned,
    bounds_of,
    channels_of_lanes,
    ends_of,
    has_whole_rows,
    lanes_of_whole_rows,
    locate,
    mask_of_tile,
    no_wider,
    offsets_of_ends,
    offsets_of_lanes,
    offsets_of_tile,
    steps_of,
    tile_of,
    whole_steps,
    wide_of,
)
from fusednorm.backends.triton.kernels.aggregates import (
    Added,
    Groups,
    Numbers,
    Parameters,
    Partials,
    Statistics,
)
from fusednorm.backends.triton.kernels.moments import (
    compute_dtype,
    held_moments,
    inverse_deviation,
    inverse_deviation_given,
    merge,
    merge_lanes,
    offsets_of_partials,
    with_ends,
)


@triton.jit
def affine(parameters, o_modulation, o_c, m_c, dtype: tl.constexpr):
    """A = weight (1 + scale) and B = bias (1 + scale) + shift of channels."""
    gain = tl.full(o_c.shape, 1.0, dtype)
    offset = tl.full(o_c.shape, 0.0, dtype)
    if parameters.weight is not None:
        gain = tl.load(parameters.weight + o_c, m_c, 0.0).to(dtype)
    if parameters.bias is not None:
        offset = tl.load(parameters.bias + o_c, m_c, 0.0).to(dtype)
    if parameters.scale is not None:
        factor = 1.0 + tl.load(parameters.scale + o_modulation, m_c, 0.0).to(dtype)
        gain *= factor
        offset *= factor
    if parameters.shift is not None:
        offset += tl.load(parameters.shift + o_modulation, m_c, 0.0).to(dtype)
    return gain, offset


@triton.jit
def affine_of_channels(
    parameters, first, o_c, m_c, D, SHARED: tl.constexpr, ALIGN: tl.constexpr, LAST: tl.constexpr, dtype: tl.constexpr
):
    """A and B of the channels of a tile, whose scale and shift begin at ``first``. SHARED: a group's channels share
    their weight and bias."""
    if LAST:
        o_c = no_wider(o_c, ALIGN)
    return affine(parameters, first + o_c, o_c // D if SHARED else o_c, m_c, dtype)


@triton.jit
def normalized(centred, gain, offset):
    """z of x - mean, with gain = A rstd and offset = B.

    Every forward and backward calls this function with the mean and rstd that the forward stores. So the backward has
    the forward's z to the bit, and takes the activation's derivative at the z of the output which the user saw.
    """
    return tl.fma(centred, gain, offset)


@triton.jit
def gradient_of(b_dy, b_x, b_added, mean, rstd, gain, offset, alpha, DERIVATIVE: tl.constexpr):
    """dz and xhat, with gain = A rstd, offset = B, and what is added to z, or the output, or None."""
    centred = b_x.to(rstd.dtype) - mean
    slope = slope_of(normalized(centred, gain, offset), b_added, alpha, DERIVATIVE)
    return b_dy.to(rstd.dtype) * slope, centred * rstd


@triton.jit
def alpha_of(activation_parameter, ALPHA: tl.constexpr, dtype: tl.constexpr):
    """The activation's parameter: ALPHA, its default, is compiled in; where ALPHA is None, it is an argument."""
    return tl.full((), activation_parameter if ALPHA is None else ALPHA, dtype)


@triton.jit
def units_of(groups, n, o_c, PER_BATCH: tl.constexpr):
    """The units to which channels of a sample belong."""
    if PER_BATCH:
        return o_c
    else:
        return n.to(tl.int64) * groups.G + o_c // groups.D


@triton.jit
def statistics_of(statistics, groups, n, o_c, m_c, PER_BATCH: tl.constexpr):
    """mean and rstd of the units of channels."""
    o_unit = units_of(groups, n, o_c, PER_BATCH)
    rstd = tl.load(statistics.rstd + o_unit, m_c, 0.0)
    if statistics.mean is not None:
        mean = tl.load(statistics.mean + o_unit, m_c, 0.0)
    else:
        mean = tl.zeros_like(rstd)
    return mean, rstd


@triton.jit
def planes_moments(
    p_x, p_partials, added, C, S, x_sample, x_channel, x_spatial, s_sample, s_channel, s_spatial, blocks, by_blocks,
    chunks, by_chunks, total,
    OVERLAP: tl.constexpr, RMS: tl.constexpr, EVEN: tl.constexpr, ALIGN: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, EXACT: tl.constexpr = False,
):  # fmt: skip
    """mean and M2 of each channel over one chunk: one tile, which stays in registers from the mean to M2.

    With pre_add they are those of s, which is stored where somebody wants it; the pass that follows then reads s alone.
    """
    if OVERLAP:
        gdc_wait()
    EVICTION: tl.constexpr = "" if added.total is None else "evict_first"
    dtype: tl.constexpr = p_partials.dtype.element_ty
    x_steps = steps_of(x_sample, x_channel, x_spatial, ALIGN, False)
    n, block, chunk = locate(tl.program_id(0), blocks, by_blocks, chunks, by_chunks, False)
    n = n.to(tl.int64)
    SPAN: tl.constexpr = BLOCK_S - WINDOW + 1
    first = chunk.to(tl.int64) * SPAN
    o_c, o_s = block * BLOCK_C + tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_S)
    low, high = bounds_of(n, o_c, first, SPAN, C, S, x_steps, WINDOW, 1, False)
    mask = mask_of_tile(o_c, o_s, first, low, high, C, S, EVEN, ALIGN, WINDOW, 1, False, False)
    p_in = p_x + offsets_of_tile(n, o_c, o_s, first, S, x_steps, WINDOW, 1, False, False)
    p_before, p_before_end, b_end, m_end = None, None, None, None
    numbers = Numbers(
        number_of_tile(added.gate, n * C, o_c, o_c < C, o_s, ALIGN, False, dtype),
        number_of_tile(added.bias, 0, o_c, o_c < C, o_s, ALIGN, False, dtype),
    )
    if added.before is not None:
        before_steps = steps_of(added.before_sample, added.before_channel, added.before_spatial, ALIGN, False)
        p_before = added.before + offsets_of_tile(n, o_c, o_s, first, S, before_steps, WINDOW, 1, False, False)
    b_s = load_sum(p_in, p_before, numbers, mask, EVICTION, dtype, EXACT)
    if added.total is not None:
        s_steps = steps_of(s_sample, s_channel, s_spatial, ALIGN, False)
        p_out = added.total + offsets_of_tile(n, o_c, o_s, first, S, s_steps, WINDOW, 1, False, False)
        tl.store(p_out, b_s, mask)
    b_x = b_s.to(dtype)
    if WINDOW > 1:
        o_end, m_end = ends_of(o_c, first, SPAN, low, high, C, ALIGN, WINDOW, 1, False)
        if added.before is not None:
            p_before_end = added.before + offsets_of_lanes(n, o_c, o_end, first, before_steps, WINDOW)
        p_end = p_x + offsets_of_lanes(n, o_c, o_end, first, x_steps, WINDOW)
        b_s_end = load_sum(p_end, p_before_end, numbers, m_end, "", dtype, EXACT)
        if added.total is not None:
            tl.store(added.total + offsets_of_lanes(n, o_c, o_end, first, s_steps, WINDOW), b_s_end, m_end)
        b_end = b_s_end.to(dtype)
    if OVERLAP:
        gdc_launch_dependents()
    o_partial = offsets_of_partials(n, chunk, o_c, C, chunks, False)
    if RMS:
        m2 = tl.sum(b_x * b_x, 1)
        if b_end is not None:
            m2 += tl.sum(b_end * b_end, 1)
    else:
        count = tl.minimum(S - first, SPAN).to(dtype)
        mean, m2 = held_moments(b_x, mask, b_end, m_end, count, True, p_x.dtype.element_ty.primitive_bitwidth > 16)
        tl.store(p_partials + o_partial, mean, o_c < C)
    tl.store(p_partials + total + o_partial, m2, o_c < C)


@triton.jit(
    do_not_specialize_on_alignment=[
        "S", "x_sample", "x_channel", "x_spatial", "blocks", "by_blocks", "chunks", "by_chunks", "total",
    ],
)  # fmt: skip
def moments_of_planes(
    p_x, p_partials, C, S, x_sample, x_channel, x_spatial, blocks, by_blocks: tl.int64, chunks, by_chunks: tl.int64,
    total,
    OVERLAP: tl.constexpr, RMS: tl.constexpr, EVEN: tl.constexpr, ALIGN: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """:func:`planes_moments` with nothing before the norm."""
    planes_moments(
        p_x, p_partials, Added(None, None, None, None, None, 1, 1, 1, 1, 1, 1, 1, 1), C, S, x_sample, x_channel,
        x_spatial, 1, 1, 1, blocks, by_blocks, chunks, by_chunks, total, OVERLAP, RMS, EVEN, ALIGN, WINDOW, BLOCK_C,
        BLOCK_S,
    )  # fmt: skip


@triton.jit
def sum_at(
    p_tile, p_before, p_out, numbers, x_spatial, before_spatial, s_spatial, mask, row, EVICTION: tl.constexpr,
    dtype: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """s of a tile that begins ``row`` positions behind the pointers, which is stored where somebody wants it."""
    wide = wide_of(row)
    p_added = None if p_before is None else p_before + wide * before_spatial
    b_s = load_sum(p_tile + wide * x_spatial, p_added, numbers, mask, EVICTION, dtype, EXACT)
    if p_out is not None:
        tl.store(p_out + wide * s_spatial, b_s, mask)
    return b_s.to(dtype)


@triton.jit
def welford_rows(
    mean, m2, p_tile, p_before, p_out, numbers, x_spatial, before_spatial, s_spatial, late, tile,
    o_lane, o_s, first, low, high, C, S, EVICTION: tl.constexpr, RMS: tl.constexpr, EVEN: tl.constexpr,
    ALIGN: tl.constexpr, REPEAT: tl.constexpr, ACROSS: tl.constexpr, DEPTH: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """The moments of lanes with the rows of a step, some of which, or parts of some, are not there: Welford's updates,
    a row at a time."""
    dtype: tl.constexpr = m2.dtype
    BLOCK_S: tl.constexpr = o_s.shape[0]
    for u in tl.static_range(DEPTH):
        row = tile * DEPTH + u
        mask = mask_of_tile(o_lane, o_s + row * BLOCK_S, first, low, high, C, S, EVEN, ALIGN, 1, REPEAT, ACROSS, True)
        b_x = sum_at(
            p_tile, p_before, p_out, numbers, x_spatial, before_spatial, s_spatial, mask, row * BLOCK_S, EVICTION,
            dtype, EXACT,
        )  # fmt: skip
        if RMS:
            m2 = tl.fma(b_x, b_x, m2)
        else:
            delta = tl.where(mask, b_x - mean, 0.0)
            share = tl.full((), 1.0, dtype) / (row + 1)
            if ACROSS:
                share = tl.where(late, tl.full((), 1.0, dtype) / tl.maximum(row, 1), share)
            mean = tl.fma(delta, share, mean)
            m2 = tl.fma(delta, b_x - mean, m2)
    return mean, m2


@triton.jit
def chunk_moments(
    n, block, chunk, p_x, p_partials, added, C, S, x_sample, x_channel, x_spatial, s_sample, s_channel, s_spatial,
    chunks, total, tiles,
    OVERLAP: tl.constexpr, RMS: tl.constexpr, EVEN: tl.constexpr, ALIGN: tl.constexpr, REPEAT: tl.constexpr,
    ACROSS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
    EXACT: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """mean and M2 of each channel over one chunk, down the rows of channels, DEPTH times BLOCK_S in a step; with
    pre_add those of s, as in :func:`planes_moments`.

    A lane's mean begins as its first element. A step sums a lane's deviations d from its mean so far, of n elements:
    the mean moves by sum d / (n + DEPTH), and M2 grows by sum d**2 - (sum d)**2 / (n + DEPTH). The difference is an
    eighth of sum d**2 at least in a first step of 8, where one deviation is 0, and half of it later.
    """
    ENDS: tl.constexpr = ACROSS and not WHOLE
    EVICTION: tl.constexpr = "" if added.total is None else "evict_first"
    dtype: tl.constexpr = p_partials.dtype.element_ty
    LARGEST: tl.constexpr = 1.7e308 if dtype == tl.float64 else 3.4e38
    x_steps = steps_of(x_sample, x_channel, x_spatial, ALIGN, True)
    n = n.to(tl.int64)
    o_lane, o_s = block * BLOCK_C + tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_S)
    first = chunk.to(tl.int64) * (BLOCK_S * DEPTH * tiles)
    p_tile = p_x + offsets_of_tile(n, o_lane, o_s, first, S, x_steps, 1, REPEAT, ACROSS, True)
    low, high = bounds_of(n, o_lane, first, 0, C, S, x_steps, 1, REPEAT, ACROSS)
    p_before, p_before_end, p_out = None, None, None
    before_spatial, sum_spatial = 0, 0
    o_c, m_c = channels_of_lanes(o_lane, C, REPEAT)
    numbers = Numbers(
        number_of_tile(added.gate, n * C, o_c, m_c, o_s, ALIGN, True, dtype),
        number_of_tile(added.bias, 0, o_c, m_c, o_s, ALIGN, True, dtype),
    )
    if added.before is not None:
        before_steps = steps_of(added.before_sample, added.before_channel, added.before_spatial, ALIGN, True)
        p_before = added.before + offsets_of_tile(n, o_lane, o_s, first, S, before_steps, 1, REPEAT, ACROSS, True)
        before_spatial = before_steps.spatial
    if added.total is not None:
        s_steps = steps_of(s_sample, s_channel, s_spatial, ALIGN, True)
        p_out = added.total + offsets_of_tile(n, o_lane, o_s, first, S, s_steps, 1, REPEAT, ACROSS, True)
        sum_spatial = s_steps.spatial
    late = None
    if ENDS:
        o_end, m_end = ends_of(o_lane, first, BLOCK_S * DEPTH * tiles, low, high, C, ALIGN, 1, REPEAT, True)
        if added.before is not None:
            o_before = offsets_of_ends(n, o_lane, o_end, first, S, before_steps, 1, REPEAT, True)
            p_before_end = added.before + o_before
        p_end = p_x + offsets_of_ends(n, o_lane, o_end, first, S, x_steps, 1, REPEAT, True)
        b_end = load_sum(p_end, p_before_end, numbers, m_end, "", dtype, EXACT)
        if added.total is not None:
            o_out = offsets_of_ends(n, o_lane, o_end, first, S, s_steps, 1, REPEAT, True)
            tl.store(added.total + o_out, b_end, m_end)
        window = aligned(o_lane, ALIGN)
        late = ((first + o_s) == 0)[:, None] & (window < low)[None, :]
    if OVERLAP:
        gdc_launch_dependents()
    mean = tl.zeros((BLOCK_S, BLOCK_C), dtype)
    m2 = tl.zeros((BLOCK_S, BLOCK_C), dtype)
    if not RMS:
        begin = 0
        if WHOLE:
            mask = lanes_of_whole_rows(o_lane, C, ALIGN, REPEAT)
        else:
            mask = mask_of_tile(o_lane, o_s, first, low, high, C, S, EVEN, ALIGN, 1, REPEAT, ACROSS, True)
        if ENDS:
            below = mask_of_tile(o_lane, o_s + BLOCK_S, first, low, high, C, S, EVEN, ALIGN, 1, REPEAT, ACROSS, True)
            mask, begin = tl.where(late, below, mask), tl.where(late, BLOCK_S, 0)
        mean += sum_at(
            p_tile,
            p_before,
            None,
            numbers,
            x_steps.spatial,
            before_spatial,
            sum_spatial,
            mask,
            begin,
            EVICTION,
            dtype,
            EXACT,
        )
    head, whole = whole_steps(first, low, high, C, S, tiles, BLOCK_S * DEPTH, EVEN or WHOLE, REPEAT, ACROSS)
    m_row = lanes_of_whole_rows(o_lane, C, ALIGN, REPEAT)
    if ENDS:  # noqa: SIM102 (one is known when compiling, the other is not)
        if head > 0:
            mean, m2 = welford_rows(
                mean, m2, p_tile, p_before, p_out, numbers, x_steps.spatial, before_spatial, sum_spatial, late,
                head - 1, o_lane, o_s, first, low, high, C, S, EVICTION, RMS, EVEN, ALIGN, REPEAT, ACROSS, DEPTH, EXACT,
            )  # fmt: skip
    for tile in tl.range(head, whole, num_stages=STAGES):
        total_d = tl.zeros((BLOCK_S, BLOCK_C), dtype)
        for u in tl.static_range(DEPTH):
            b_x = sum_at(
                p_tile, p_before, p_out, numbers, x_steps.spatial, before_spatial, sum_spatial, m_row,
                (tile * DEPTH + u) * BLOCK_S, EVICTION, dtype, EXACT,
            )  # fmt: skip
            if RMS:
                m2 = tl.fma(b_x, b_x, m2)
            else:
                deviation = b_x - mean
                total_d += deviation
                m2 = tl.fma(deviation, deviation, m2)
        if not RMS:
            count = (tile + 1) * DEPTH
            share = tl.full((), 1.0, dtype) / count
            if ENDS:
                share = tl.where(late, tl.full((), 1.0, dtype) / tl.maximum(count - 1, 1), share)
            step = total_d * share
            mean += step
            m2 -= tl.minimum(total_d * step, LARGEST)  # of infinite squares M2 stays infinite
    if not (EVEN or WHOLE):  # noqa: SIM102
        if whole < tiles:
            mean, m2 = welford_rows(
                mean, m2, p_tile, p_before, p_out, numbers, x_steps.spatial, before_spatial, sum_spatial, late, whole,
                o_lane, o_s, first, low, high, C, S, EVICTION, RMS, EVEN, ALIGN, REPEAT, ACROSS, DEPTH, EXACT,
            )  # fmt: skip
    if WHOLE:
        count = tl.zeros_like(mean) + tiles * DEPTH
    else:
        rows = S + tl.zeros_like(o_lane).to(tl.int64)  # of each lane
        if ACROSS:
            rows = (high - window - ALIGN + C * REPEAT) // (C * REPEAT)
        elif REPEAT > 1:
            rows = (rows * C - o_lane + C * REPEAT - 1) // (C * REPEAT)
        held = (rows[None, :] - (first + o_s)[:, None] + BLOCK_S - 1) // BLOCK_S
        held = tl.minimum(tl.maximum(held, 0), tiles * DEPTH)
        if ACROSS:
            held -= (late & (held > 0)).to(held.dtype)
        count = held.to(dtype)
    mean, m2 = merge_lanes(mean, m2, count, 0)
    if ENDS:
        mean, m2 = with_ends(mean, m2, tl.sum(count, 0), b_end.to(dtype), m_end, RMS)
    o_partial = offsets_of_partials(n, chunk, o_lane, C * REPEAT, chunks, True)
    if not RMS:
        tl.store(p_partials + o_partial, mean, o_lane < C * REPEAT)
    tl.store(p_partials + total + o_partial, m2, o_lane < C * REPEAT)


@triton.jit
def rows_moments(
    p_x, p_partials, added, C, S, x_sample, x_channel, x_spatial, s_sample, s_channel, s_spatial, blocks, by_blocks,
    chunks, by_chunks, total,
    tiles,
    OVERLAP: tl.constexpr, RMS: tl.constexpr, EVEN: tl.constexpr, ALIGN: tl.constexpr, REPEAT: tl.constexpr,
    ACROSS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
    EXACT: tl.constexpr = False,
):  # fmt: skip
    """:func:`chunk_moments` of a program."""
    if OVERLAP:
        gdc_wait()
    n, block, chunk = locate(tl.program_id(0), blocks, by_blocks, chunks, by_chunks, True)
    if REPEAT > 1 and has_whole_rows(n, chunk, BLOCK_S * DEPTH * tiles, C, S, REPEAT, ACROSS):
        chunk_moments(
            n, block, chunk, p_x, p_partials, added, C, S, x_sample, x_channel, x_spatial, s_sample, s_channel,
            s_spatial, chunks, total, tiles, OVERLAP, RMS, EVEN, ALIGN, REPEAT, ACROSS, BLOCK_C, BLOCK_S, DEPTH, STAGES,
            EXACT, True,
        )  # fmt: skip
    else:
        chunk_moments(
            n, block, chunk, p_x, p_partials, added, C, S, x_sample, x_channel, x_spatial, s_sample, s_channel,
            s_spatial, chunks, total, tiles, OVERLAP, RMS, EVEN, ALIGN, REPEAT, ACROSS, BLOCK_C, BLOCK_S, DEPTH, STAGES,
            EXACT, False,
        )  # fmt: skip


@triton.jit(
    do_not_specialize_on_alignment=[
        "S", "x_sample", "x_channel", "x_spatial", "blocks", "by_blocks", "chunks", "by_chunks", "tiles",
    ],
)  # fmt: skip
def moments_of_rows(
    p_x, p_partials, C, S, x_sample, x_channel, x_spatial, blocks, by_blocks: tl.int64, chunks, by_chunks: tl.int64,
    total, tiles,
    OVERLAP: tl.constexpr, RMS: tl.constexpr, EVEN: tl.constexpr, ALIGN: tl.constexpr, REPEAT: tl.constexpr,
    ACROSS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """:func:`rows_moments` with nothing before the norm."""
    rows_moments(
        p_x, p_partials, Added(None, None, None, None, None, 1, 1, 1, 1, 1, 1, 1, 1), C, S, x_sample, x_channel,
        x_spatial, 1, 1, 1, blocks, by_blocks, chunks, by_chunks, total, tiles, OVERLAP, RMS, EVEN, ALIGN, REPEAT,
        ACROSS, BLOCK_C, BLOCK_S,
        DEPTH, STAGES,
    )  # fmt: skip


@triton.jit(do_not_specialize=["units", "S", "span"], do_not_specialize_on_alignment=["rows", "chunks"])
def finalize(
    p_partials, p_mean, p_rstd, p_var, G, D, C, units, total, S, rows, chunks, span, eps: tl.float64,
    OVERLAP: tl.constexpr, RMS: tl.constexpr, PER_BATCH: tl.constexpr, LAST: tl.constexpr, REPEAT: tl.constexpr,
    ACROSS: tl.constexpr, BLOCK_U: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The statistics of BLOCK_U units from their partials."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    o_unit = tl.program_id(0) * BLOCK_U + tl.arange(0, BLOCK_U)
    m_unit = o_unit < units
    partials = Partials(p_partials, total, Groups(G, D, C), rows, chunks)
    mean, m2, count = merge(partials, o_unit, m_unit, S, span, RMS, PER_BATCH, LAST, REPEAT, ACROSS, BLOCK_R, BLOCK_D)
    tl.store(p_rstd + o_unit, inverse_deviation(m2 / count, eps), m_unit)
    if p_mean is not None:
        tl.store(p_mean + o_unit, mean, m_unit)
    if p_var is not None:
        tl.store(p_var + o_unit, m2 / count, m_unit)


@triton.jit
def apply_chunk(
    n, block, chunk, p_x, p_y, parameters, p_mean, p_rstd, p_var, p_partials, p_given_mean, p_given_var, added,
    G, D, C, S, x_sample, x_channel, x_spatial, y_sample, y_channel, y_spatial, total, partial_spatial, partial_rows,
    partial_chunks, partial_span, eps, activation_parameter,
    OVERLAP: tl.constexpr, RMS: tl.constexpr, VALUE: tl.constexpr,
    ALPHA: tl.constexpr, MERGE: tl.constexpr, GROUPED: tl.constexpr, SHARED: tl.constexpr,
    PER_BATCH: tl.constexpr, LAST: tl.constexpr, EVEN: tl.constexpr, ALIGN: tl.constexpr,
    WINDOW: tl.constexpr, REPEAT: tl.constexpr, ACROSS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
    TILES: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, EXACT: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The output of one chunk of TILES tiles.

    MERGE, where a tile's channels belong to one unit: each program merges the unit's partials while its first tile is
    on the way. GROUPED: the pass that left the partials took each group for one channel of D S positions. SHARED: the
    channels of a group share their weight and bias. The mean and
    variance of each unit may be given instead, as in batch_norm's evaluation. In both cases the first program of a unit
    stores the unit's statistics where somebody wants them. s is made here again where the pass for the moments has not
    stored it, and stored where somebody wants it.
    """
    ENDS: tl.constexpr = (WINDOW > 1 or ACROSS) and not WHOLE
    dtype: tl.constexpr = compute_dtype(p_x.dtype.element_ty)
    groups = Groups(G, D, C)
    x_steps = steps_of(x_sample, x_channel, x_spatial, ALIGN, LAST)
    y_steps = steps_of(y_sample, y_channel, y_spatial, ALIGN, LAST)
    SPAN: tl.constexpr = BLOCK_S * TILES - WINDOW + 1
    first = chunk.to(tl.int64) * SPAN
    o_lane, o_s = block * BLOCK_C + tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_S)
    o_c, m_c = channels_of_lanes(o_lane, C, REPEAT)
    wide = n.to(tl.int64)
    p_in = p_x + offsets_of_tile(wide, o_lane, o_s, first, S, x_steps, WINDOW, REPEAT, ACROSS, LAST)
    p_out = p_y + offsets_of_tile(wide, o_lane, o_s, first, S, y_steps, WINDOW, REPEAT, ACROSS, LAST)
    low, high = bounds_of(wide, o_c, first, SPAN, C, S, x_steps, WINDOW, REPEAT, ACROSS)
    if WHOLE:
        mask = lanes_of_whole_rows(o_lane, C, ALIGN, REPEAT)
    else:
        mask = mask_of_tile(o_lane, o_s, first, low, high, C, S, EVEN, ALIGN, WINDOW, REPEAT, ACROSS, LAST)
    p_before, p_before_end, b_behind, b_behind_end = None, None, None, None
    numbers = Numbers(
        number_of_tile(added.gate, wide * C, o_c, m_c, o_s, ALIGN, LAST, dtype),
        number_of_tile(added.bias, 0, o_c, m_c, o_s, ALIGN, LAST, dtype),
    )
    if added.before is not None:
        before_steps = steps_of(added.before_sample, added.before_channel, added.before_spatial, ALIGN, LAST)
        o_before = offsets_of_tile(wide, o_lane, o_s, first, S, before_steps, WINDOW, REPEAT, ACROSS, LAST)
        p_before = added.before + o_before
    b_x = load_sum(p_in, p_before, numbers, mask, "evict_first", dtype, EXACT).to(dtype)
    if added.behind is not None:
        behind_steps = steps_of(added.behind_sample, added.behind_channel, added.behind_spatial, ALIGN, LAST)
        o_behind = offsets_of_tile(wide, o_lane, o_s, first, S, behind_steps, WINDOW, REPEAT, ACROSS, LAST)
        p_behind = added.behind + o_behind
        b_behind = tl.load(p_behind, mask, 0.0, eviction_policy="evict_first")
    if added.total is not None:
        p_total = added.total + offsets_of_tile(wide, o_lane, o_s, first, S, y_steps, WINDOW, REPEAT, ACROSS, LAST)
    if ENDS:
        o_end, m_end = ends_of(o_lane, first, SPAN, low, high, C, ALIGN, WINDOW, REPEAT, ACROSS)
        if added.before is not None:
            o_before = offsets_of_ends(wide, o_lane, o_end, first, S, before_steps, WINDOW, REPEAT, ACROSS)
            p_before_end = added.before + o_before
        p_end = p_x + offsets_of_ends(wide, o_lane, o_end, first, S, x_steps, WINDOW, REPEAT, ACROSS)
        b_end = load_sum(p_end, p_before_end, numbers, m_end, "", dtype, EXACT).to(dtype)
        if added.behind is not None:
            o_behind = offsets_of_ends(wide, o_lane, o_end, first, S, behind_steps, WINDOW, REPEAT, ACROSS)
            b_behind_end = tl.load(added.behind + o_behind, m_end, 0.0)
    gain, offset = affine_of_channels(parameters, wide * C, o_c, m_c, D, SHARED, ALIGN, LAST, dtype)
    if OVERLAP:
        gdc_wait()
    if MERGE:
        unit = block * BLOCK_C // D if PER_BATCH else n * G + block * BLOCK_C // D
        summed = Groups(G, 1, G) if GROUPED else groups
        partials = Partials(p_partials, total, summed, partial_rows, partial_chunks)
        o_unit = unit + tl.arange(0, 1)
        m_unit = o_unit >= 0
        b_mean, m2, count = merge(
            partials, o_unit, m_unit, partial_spatial, partial_span, RMS, PER_BATCH, LAST, 1, False, BLOCK_R, BLOCK_D
        )
        rstd = inverse_deviation(m2 / count, eps)
        leading = (chunk == 0) & (block * BLOCK_C % D == 0)
        if PER_BATCH:
            leading &= n == 0
        leads = tl.arange(0, 1) < tl.where(leading, 1, 0)  # for Triton 3.9's interpreter, as below
        if p_rstd is not None:
            tl.store(p_rstd + o_unit, rstd, leads)
        if p_mean is not None:
            tl.store(p_mean + o_unit, b_mean, leads)
        if p_var is not None:
            tl.store(p_var + o_unit, m2 / count, leads)
        mean = b_mean[:, None]
        gain *= rstd
    elif p_given_var is not None:
        o_unit = units_of(groups, n, o_c, PER_BATCH)
        b_mean = tl.load(p_given_mean + o_unit, m_c, 0.0).to(dtype)
        rstd = inverse_deviation_given(tl.load(p_given_var + o_unit, m_c, 1.0), eps, dtype)
        leading = chunk == 0
        if PER_BATCH:
            leading &= n == 0
        # Triton 3.9's interpreter takes no mask that `&` made of an array's and a number's comparison.
        leads = (o_lane % groups.D == 0) & (o_lane < tl.where(leading, C, 0))
        if p_rstd is not None:
            tl.store(p_rstd + o_unit, rstd, leads)
        if p_mean is not None:
            tl.store(p_mean + o_unit, b_mean, leads)
        mean, _ = tile_of(b_mean, o_s, LAST)
        gain *= rstd
    else:
        b_mean, rstd = statistics_of(Statistics(p_mean, p_rstd), groups, n, o_c, m_c, PER_BATCH)
        mean, _ = tile_of(b_mean, o_s, LAST)
        gain *= rstd
    gain, _ = tile_of(gain, o_s, LAST)
    offset, _ = tile_of(offset, o_s, LAST)
    alpha = alpha_of(activation_parameter, ALPHA, dtype)
    if ENDS:
        b_y = VALUE(behind(normalized(b_end - mean, gain, offset), b_behind_end), alpha).to(p_y.dtype.element_ty)
        o_out = offsets_of_ends(wide, o_lane, o_end, first, S, y_steps, WINDOW, REPEAT, ACROSS)
        tl.store(p_y + o_out, b_y, m_end)
        if added.total is not None:
            tl.store(added.total + o_out, b_end.to(p_y.dtype.element_ty), m_end)
    for tile in tl.static_range(TILES):
        b_y = VALUE(behind(normalized(b_x - mean, gain, offset), b_behind), alpha).to(p_y.dtype.element_ty)
        m_out = mask
        if added.total is not None:
            tl.store(p_total, b_x.to(p_y.dtype.element_ty), mask, eviction_policy="evict_first")
            p_total += BLOCK_S * y_steps.spatial
        if tile + 1 < TILES:  # on its way while this one is stored
            p_in += BLOCK_S * x_steps.spatial
            o_s += BLOCK_S
            if not WHOLE:
                mask = mask_of_tile(o_lane, o_s, first, low, high, C, S, EVEN, ALIGN, WINDOW, REPEAT, ACROSS, LAST)
            if added.before is not None:
                p_before += BLOCK_S * before_steps.spatial
            b_x = load_sum(p_in, p_before, numbers, mask, "evict_first", dtype, EXACT).to(dtype)
            if added.behind is not None:
                p_behind += BLOCK_S * behind_steps.spatial
                b_behind = tl.load(p_behind, mask, 0.0, eviction_policy="evict_first")
        tl.store(p_out, b_y, m_out, eviction_policy="evict_first")
        p_out += BLOCK_S * y_steps.spatial


@triton.jit
def apply_tiles(
    p_x, p_y, parameters, p_mean, p_rstd, p_var, p_partials, p_given_mean, p_given_var, added,
    G, D, C, S, x_sample, x_channel, x_spatial, y_sample, y_channel, y_spatial, blocks, by_blocks, chunks, by_chunks,
    programs,
    total, partial_spatial, partial_rows, partial_chunks, partial_span, eps, activation_parameter,
    OVERLAP: tl.constexpr, RMS: tl.constexpr, VALUE: tl.constexpr,
    ALPHA: tl.constexpr, MERGE: tl.constexpr, GROUPED: tl.constexpr, SHARED: tl.constexpr,
    PER_BATCH: tl.constexpr, LAST: tl.constexpr, EVEN: tl.constexpr, ALIGN: tl.constexpr,
    WINDOW: tl.constexpr, REPEAT: tl.constexpr, ACROSS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
    TILES: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
    EXACT: tl.constexpr = False,
):  # fmt: skip
    """:func:`apply_chunk` of a program. The programs walk the tensor from its end, which the pass for the moments has
    read last and left in the L2. Where the statistics are given there is none."""
    if OVERLAP and p_given_var is not None:
        gdc_wait()
    n, block, chunk = locate(programs - 1 - tl.program_id(0), blocks, by_blocks, chunks, by_chunks, LAST)
    if REPEAT > 1 and has_whole_rows(n, chunk, BLOCK_S * TILES, C, S, REPEAT, ACROSS):
        apply_chunk(
            n, block, chunk, p_x, p_y, parameters, p_mean, p_rstd, p_var, p_partials, p_given_mean, p_given_var, added,
            G, D, C, S, x_sample, x_channel, x_spatial, y_sample, y_channel, y_spatial, total, partial_spatial,
            partial_rows, partial_chunks, partial_span, eps, activation_parameter, OVERLAP, RMS, VALUE, ALPHA, MERGE,
            GROUPED, SHARED, PER_BATCH, LAST, EVEN, ALIGN, WINDOW, REPEAT, ACROSS, BLOCK_C, BLOCK_S, TILES, BLOCK_R,
            BLOCK_D, EXACT, True,
        )  # fmt: skip
    else:
        apply_chunk(
            n, block, chunk, p_x, p_y, parameters, p_mean, p_rstd, p_var, p_partials, p_given_mean, p_given_var, added,
            G, D, C, S, x_sample, x_channel, x_spatial, y_sample, y_channel, y_spatial, total, partial_spatial,
            partial_rows, partial_chunks, partial_span, eps, activation_parameter, OVERLAP, RMS, VALUE, ALPHA, MERGE,
            GROUPED, SHARED, PER_BATCH, LAST, EVEN, ALIGN, WINDOW, REPEAT, ACROSS, BLOCK_C, BLOCK_S, TILES, BLOCK_R,
            BLOCK_D, EXACT, False,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=["programs", "partial_spatial", "partial_span"],
    do_not_specialize_on_alignment=[
        "S", "x_sample", "x_channel", "x_spatial", "y_sample", "y_channel", "y_spatial", "blocks", "by_blocks",
        "chunks", "by_chunks",
        "partial_rows", "partial_chunks",
    ],
)  # fmt: skip
def apply(
    p_x, p_y, p_weight, p_bias, p_scale, p_shift, p_mean, p_rstd, p_var, p_partials, p_given_mean, p_given_var,
    G, D, C, S, x_sample, x_channel, x_spatial, y_sample, y_channel, y_spatial, blocks, by_blocks: tl.int64, chunks,
    by_chunks: tl.int64, programs,
    total, partial_spatial, partial_rows, partial_chunks, partial_span, eps: tl.float64,
    activation_parameter: tl.float64, OVERLAP: tl.constexpr, RMS: tl.constexpr, VALUE: tl.constexpr,
    ALPHA: tl.constexpr, MERGE: tl.constexpr, GROUPED: tl.constexpr, SHARED: tl.constexpr,
    PER_BATCH: tl.constexpr, LAST: tl.constexpr, EVEN: tl.constexpr, ALIGN: tl.constexpr,
    WINDOW: tl.constexpr, REPEAT: tl.constexpr, ACROSS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
    TILES: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """:func:`apply_tiles` with nothing around the norm."""
    apply_tiles(
        p_x, p_y, Parameters(p_weight, p_bias, p_scale, p_shift), p_mean, p_rstd, p_var, p_partials, p_given_mean,
        p_given_var, Added(None, None, None, None, None, 1, 1, 1, 1, 1, 1, 1, 1), G, D, C, S,
        x_sample, x_channel, x_spatial, y_sample, y_channel, y_spatial, blocks, by_blocks, chunks, by_chunks,
        programs, total,
        partial_spatial, partial_rows, partial_chunks, partial_span, eps, activation_parameter,
        OVERLAP, RMS, VALUE, ALPHA, MERGE, GROUPED, SHARED, PER_BATCH, LAST, EVEN, ALIGN, WINDOW, REPEAT, ACROSS,
        BLOCK_C, BLOCK_S, TILES, BLOCK_R, BLOCK_D,
    )  # fmt: skip
