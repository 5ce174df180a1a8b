"""Leaders: blocks that merge what all blocks of a unit, or of a slab, have published, and publish what comes of it.

Where a unit has hundreds of chunks, or a slab many groups, all blocks would read all of that. A leader reads it for
them: in the wave in which the results of its own chunk are due, before anything else, when the last numbers have been
published one wave ago. The others wait for its numbers behind the sums of that wave.

The numbers of chunk k of statistic s are packet ``s parts + k``, the leader's are final s.
"""

import triton

from fusednorm.backends.hopper.kernels.exchange import peek, publish, settle
from fusednorm.backends.hopper.kernels.moments import add_pairs, inverse_deviation, merge_chunks, store_moments
from fusednorm.private.gluon_names import gl, gluon


@triton.constexpr_function
def leaders_layout(led, warps):
    """The layout of (statistics, chunks) that a leader merges at a time."""
    return gl.BlockedLayout([1, 1], [1, 32], [led, warps // led], [1, 0])


@gluon.jit
def read_all(p_packets, o_statistic, o_part, parts):
    """The numbers of all chunks of some statistics; of chunks beyond the last one, those of the first."""
    o_part = gl.where(o_part < parts, o_part, 0)
    p_all = p_packets + o_statistic[:, None] * parts + o_part[None, :]
    return settle(peek(p_all), p_all)


@gluon.jit
def lead_moments(
    p_packets, p_finals, p_mean, p_rstd, p_var, first, count, share, shares, parts, length, each, elements,
    epsilon, CHUNK: gl.constexpr, PARTS: gl.constexpr, LED: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Merge the means and M2 of the chunks of this block's share of ``count`` statistics from ``first`` on; publish
    and store the mean and the inverse deviation.

    There are ``length`` vectors or positions, CHUNK to a chunk, of ``each`` elements of a statistic, which has so many
    ``elements``.
    """
    o_part = gl.arange(0, PARTS, gl.SliceLayout(0, LAYOUT))
    c_part = (gl.minimum(gl.maximum(length - o_part * CHUNK, 0), CHUNK) * each).to(gl.float32)[None, :]
    for begin in range(share * LED, count, shares * LED):
        o_led = begin + gl.arange(0, LED, gl.SliceLayout(1, LAYOUT))
        m_led = o_led < count
        o_led = first + gl.minimum(o_led, count - 1)
        b_mean, b_m2 = read_all(p_packets, o_led, o_part, parts)
        mean, variance = merge_chunks(b_mean, b_m2, c_part, elements, 1)
        rstd = inverse_deviation(variance, epsilon)
        publish(p_finals + o_led, mean, rstd, m_led)
        store_moments(p_mean, p_rstd, p_var, o_led, mean, rstd, variance, m_led)


@gluon.jit
def lead_sums(
    p_packets, p_finals, first, count, share, shares, parts, inverse_count,
    PARTS: gl.constexpr, LED: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Add the sums of the chunks of this block's share of ``count`` statistics from ``first`` on, publish their shares
    of an element: P / K and Q / K."""
    o_part = gl.arange(0, PARTS, gl.SliceLayout(0, LAYOUT))
    m_part = (o_part < parts)[None, :]
    for begin in range(share * LED, count, shares * LED):
        o_led = begin + gl.arange(0, LED, gl.SliceLayout(1, LAYOUT))
        m_led = o_led < count
        o_led = first + gl.minimum(o_led, count - 1)
        b_p, b_q = read_all(p_packets, o_led, o_part, parts)
        p, q = gl.reduce((gl.where(m_part, b_p, 0.0), gl.where(m_part, b_q, 0.0)), 1, add_pairs)
        publish(p_finals + o_led, p * inverse_count, q * inverse_count, m_led)
