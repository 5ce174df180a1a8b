"""Both memory orders, any size: statistics of all tiles, then the results of all tiles.

A tile is BLOCK_C channels by BLOCK_S positions of one sample. Where the positions are contiguous (channels_first) it is
long in them, where the channels are (channels_last) it holds whole rows of many channels. Statistics are kept per
channel and chunk, a chunk being TILES tiles; groups form when the partials merge.
"""

import triton
import triton.language as tl

from fusednorm.backends.triton.kernels.moments import inverse_deviation, merge


@triton.jit
def locate(pid, blocks, chunks, LAST: tl.constexpr):
    """The sample, the block of channels and the chunk of a program, neighbours in memory next to each other."""
    if LAST:
        return pid // blocks // chunks, pid % blocks, pid // blocks % chunks
    else:
        return pid // chunks // blocks, pid // chunks % blocks, pid % chunks


@triton.jit
def affine(p_weight, p_bias, p_scale, p_shift, o_modulation, o_c, m_c, dtype: tl.constexpr):
    """A = weight (1 + scale) and B = bias (1 + scale) + shift of channels."""
    gain = tl.full(o_c.shape, 1.0, dtype)
    offset = tl.full(o_c.shape, 0.0, dtype)
    if p_weight is not None:
        gain = tl.load(p_weight + o_c, m_c, 0.0).to(dtype)
    if p_bias is not None:
        offset = tl.load(p_bias + o_c, m_c, 0.0).to(dtype)
    if p_scale is not None:
        factor = 1.0 + tl.load(p_scale + o_modulation, m_c, 0.0).to(dtype)
        gain *= factor
        offset *= factor
    if p_shift is not None:
        offset += tl.load(p_shift + o_modulation, m_c, 0.0).to(dtype)
    return gain, offset


@triton.jit
def statistics_of(p_mean, p_rstd, n, o_c, m_c, G, D, PER_BATCH: tl.constexpr):
    """mean and rstd of the units of channels."""
    if PER_BATCH:
        o_unit = o_c
    else:
        o_unit = n.to(tl.int64) * G + o_c // D
    rstd = tl.load(p_rstd + o_unit, m_c, 0.0)
    if p_mean is not None:
        mean = tl.load(p_mean + o_unit, m_c, 0.0)
    else:
        mean = tl.zeros_like(rstd)
    return mean, rstd


@triton.jit
def moments(
    p_x, p_partials, C, S, x_sample, x_channel, x_spatial, blocks, chunks, partial_channel, partial_chunk, total,
    RMS: tl.constexpr, LAST: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """mean and M2 of each channel over one chunk."""
    dtype: tl.constexpr = p_partials.dtype.element_ty
    n, block, chunk = locate(tl.program_id(0), blocks, chunks, LAST)
    n = n.to(tl.int64)
    o_c = block * BLOCK_C + tl.arange(0, BLOCK_C)
    first = chunk.to(tl.int64) * (BLOCK_S * TILES)
    o_s = first + tl.arange(0, BLOCK_S)
    m_c = o_c < C
    p_tile = p_x + n * x_sample + o_c.to(tl.int64)[:, None] * x_channel + o_s[None, :] * x_spatial
    mask = m_c[:, None] if EVEN else m_c[:, None] & (o_s < S)[None, :]
    b_x = tl.load(p_tile, mask, 0.0).to(dtype)
    count = tl.minimum(S - first, BLOCK_S * TILES).to(dtype)
    if RMS:
        second = b_x * b_x
        for tile in range(1, TILES):
            mask = m_c[:, None] if EVEN else m_c[:, None] & (o_s + tile * BLOCK_S < S)[None, :]
            p_tile += BLOCK_S * x_spatial
            b_x = tl.load(p_tile, mask, 0.0).to(dtype)
            second += b_x * b_x
        mean = tl.zeros((BLOCK_C,), dtype)
        m2 = tl.sum(second, 1)
    else:
        pivot = tl.sum(b_x, 1) / tl.minimum(S - first, BLOCK_S).to(dtype)
        pivot = pivot.to(p_x.dtype.element_ty).to(dtype)
        one = tl.where(mask, b_x - pivot[:, None], 0.0)
        two = one * one
        for tile in range(1, TILES):
            mask = m_c[:, None] if EVEN else m_c[:, None] & (o_s + tile * BLOCK_S < S)[None, :]
            p_tile += BLOCK_S * x_spatial
            b_x = tl.load(p_tile, mask, 0.0).to(dtype)
            deviation = tl.where(mask, b_x - pivot[:, None], 0.0)
            one += deviation
            two += deviation * deviation
        shift = tl.sum(one, 1) / count
        mean = pivot + shift
        m2 = tl.sum(two, 1) - shift * shift * count
        m2 = tl.where(m2 < 0.0, 0.0, m2)  # a NaN stays
    o_partial = n * C * chunks + o_c * partial_channel + chunk * partial_chunk
    if not RMS:
        tl.store(p_partials + o_partial, mean, m_c)
    tl.store(p_partials + total + o_partial, m2, m_c)


@triton.jit
def finalize(
    p_partials, p_mean, p_rstd, p_var, J, total, G, D, C, S, chunks, span, partial_channel, partial_chunk,
    EPS: tl.constexpr, RMS: tl.constexpr, PER_BATCH: tl.constexpr, LAST: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """The statistics of one unit from its partials."""
    unit = tl.program_id(0)
    mean, m2, count = merge(
        p_partials, unit, J, total, G, D, C, S, chunks, span, partial_channel, partial_chunk,
        RMS, PER_BATCH, LAST, BLOCK_J,
    )  # fmt: skip
    tl.store(p_rstd + unit, inverse_deviation(m2 / count, EPS))
    if p_mean is not None:
        tl.store(p_mean + unit, mean)
    if p_var is not None:
        tl.store(p_var + unit, m2 / count)


@triton.jit
def apply(
    p_x, p_y, p_weight, p_bias, p_scale, p_shift, p_mean, p_rstd, p_var, p_partials,
    J, total, G, D, C, S, x_sample, x_channel, x_spatial, y_sample, y_channel, y_spatial, blocks, chunks, programs,
    partial_chunks, partial_span, partial_channel, partial_chunk,
    EPS: tl.constexpr, RMS: tl.constexpr, VALUE: tl.constexpr, PARAMETER: tl.constexpr, MERGE: tl.constexpr,
    PER_BATCH: tl.constexpr, LAST: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, TILES: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """The output of one chunk. The programs run from the end, which the statistics' pass has left in the L2.

    MERGE, for tiles of one channel: each program merges its unit's partials, and the unit's first keeps the result.
    """
    dtype: tl.constexpr = p_rstd.dtype.element_ty
    n, block, chunk = locate(programs - 1 - tl.program_id(0), blocks, chunks, LAST)
    o_c = block * BLOCK_C + tl.arange(0, BLOCK_C)
    o_s = chunk.to(tl.int64) * (BLOCK_S * TILES) + tl.arange(0, BLOCK_S)
    m_c = o_c < C
    gain, offset = affine(p_weight, p_bias, p_scale, p_shift, n.to(tl.int64) * C + o_c, o_c, m_c, dtype)
    if MERGE:
        unit = block if PER_BATCH else n * G + block // D
        mean, m2, count = merge(
            p_partials, unit, J, total, G, D, C, S, partial_chunks, partial_span, partial_channel, partial_chunk,
            RMS, PER_BATCH, LAST, BLOCK_J,
        )  # fmt: skip
        rstd = inverse_deviation(m2 / count, EPS)
        leads = (chunk == 0) & ((n == 0) if PER_BATCH else (block % D == 0))
        tl.store(p_rstd + unit, rstd, leads)
        if p_mean is not None:
            tl.store(p_mean + unit, mean, leads)
        if p_var is not None:
            tl.store(p_var + unit, m2 / count, leads)
        gain *= rstd
    else:
        b_mean, rstd = statistics_of(p_mean, p_rstd, n, o_c, m_c, G, D, PER_BATCH)
        mean = b_mean[:, None]
        gain *= rstd
    n = n.to(tl.int64)
    p_in = p_x + n * x_sample + o_c.to(tl.int64)[:, None] * x_channel + o_s[None, :] * x_spatial
    p_out = p_y + n * y_sample + o_c.to(tl.int64)[:, None] * y_channel + o_s[None, :] * y_spatial
    parameter = tl.full((), PARAMETER, dtype)
    for tile in range(TILES):
        mask = m_c[:, None] if EVEN else m_c[:, None] & (o_s + tile * BLOCK_S < S)[None, :]
        b_x = tl.load(p_in, mask, 0.0).to(dtype)
        b_y = VALUE((b_x - mean) * gain[:, None] + offset[:, None], parameter)
        tl.store(p_out, b_y.to(p_y.dtype.element_ty), mask)
        p_in += BLOCK_S * x_spatial
        p_out += BLOCK_S * y_spatial
