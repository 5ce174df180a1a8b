"""Centred partials (mean, M2) of chunks, and their merge by Chan's formula in a fixed order.

A chunk takes its deviations from a pivot, the mean of its first tile rounded to the input's dtype: one read, no
cancellation. E[x**2] - E[x]**2 would lose everything where |mean| >> std.
"""

import triton
import triton.language as tl


@triton.jit
def partial_of(unit, j, G, D, C, chunks, partial_channel, partial_chunk, PER_BATCH: tl.constexpr, LAST: tl.constexpr):
    """(sample, channel, chunk, offset) of the j-th partial of a unit, in the order in which they lie in memory."""
    if PER_BATCH:
        n = j // chunks
        k = j % chunks
        c = unit + 0 * j
    elif LAST:
        n = unit // G + 0 * j
        k = j // D
        c = unit % G * D + j % D
    else:
        n = unit // G + 0 * j
        c = unit % G * D + j // chunks
        k = j % chunks
    return n, c, k, n.to(tl.int64) * C * chunks + c * partial_channel + k * partial_chunk


@triton.jit
def merge(
    p_partials, unit, J, total, G, D, C, S, chunks, span, partial_channel, partial_chunk,
    RMS: tl.constexpr, PER_BATCH: tl.constexpr, LAST: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """(mean, M2, count) of a unit from its J partials; the M2 of all lie ``total`` behind the means."""
    dtype: tl.constexpr = p_partials.dtype.element_ty
    mean = tl.full((), 0.0, dtype)
    m2 = tl.full((), 0.0, dtype)
    count = tl.full((), 0.0, dtype)
    for start in range(0, J, BLOCK_J):
        j = start + tl.arange(0, BLOCK_J)
        _, _, k, o_partial = partial_of(unit, j, G, D, C, chunks, partial_channel, partial_chunk, PER_BATCH, LAST)
        m_j = j < J
        b_m2 = tl.load(p_partials + total + o_partial, m_j, 0.0)
        if RMS:
            m2 += tl.sum(b_m2, 0)
            count += tl.sum(tl.where(m_j, tl.minimum(span, S - k * span).to(dtype), 0.0), 0)
        else:
            b_mean = tl.load(p_partials + o_partial, m_j, 0.0)
            b_count = tl.where(m_j, tl.minimum(span, S - k * span), 0).to(dtype)
            pivot = tl.sum(tl.where(j == start, b_mean, 0.0), 0)
            block_count = tl.sum(b_count, 0)
            block_mean = pivot + tl.sum(tl.where(m_j, b_count * (b_mean - pivot), 0.0), 0) / block_count
            deviation = tl.where(m_j, b_mean - block_mean, 0.0)
            block_m2 = tl.sum(b_m2, 0) + tl.sum(b_count * deviation * deviation, 0)
            merged = count + block_count
            delta = block_mean - mean
            m2 += block_m2 + delta * delta * count * (block_count / merged)
            mean += delta * (block_count / merged)
            count = merged
    return mean, m2, count


@triton.jit
def inverse_deviation(variance, EPS: tl.constexpr):
    return 1.0 / tl.sqrt(variance + EPS)
