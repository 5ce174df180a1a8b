"""What processes tell one another about their parts of an input, and what each makes of all that is told.

A process sends one float64 vector in each direction: forward the means of its units, their M2, and the number of
elements under each; backward sums over its elements. What arrives is a row for each rank, which every process takes in
the order of the ranks, so that all get the same bits.

Of a group of group_norm a process may have some channels, or none. It then sends moments and sums of all G groups of D
channels of the whole, made of those of its own C channels, which begin at the channel ``first`` of the whole.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fusednorm.backends.triton.kernels.aggregates import Groups, Partials
from fusednorm.backends.triton.kernels.moments import merge
from fusednorm.backends.triton.kernels.running import move_running


@triton.jit(do_not_specialize=["units", "S", "span"], do_not_specialize_on_alignment=["rows", "chunks"])
def pack_moments(
    p_partials, p_packed, G, D, C, units, total, S, rows, chunks, span,
    OVERLAP: tl.constexpr, RMS: tl.constexpr, PER_BATCH: tl.constexpr, LAST: tl.constexpr, REPEAT: tl.constexpr,
    ACROSS: tl.constexpr, BLOCK_U: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The moments of BLOCK_U units from their partials, as they are sent."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    o_unit = tl.program_id(0) * BLOCK_U + tl.arange(0, BLOCK_U)
    m_unit = o_unit < units
    partials = Partials(p_partials, total, Groups(G, D, C), rows, chunks)
    mean, m2, count = merge(partials, o_unit, m_unit, S, span, RMS, PER_BATCH, LAST, REPEAT, ACROSS, BLOCK_R, BLOCK_D)
    tl.store(p_packed + o_unit, mean.to(tl.float64), m_unit)
    tl.store(p_packed + units + o_unit, m2.to(tl.float64), m_unit)
    # Every unit of a process has as many elements as the first.
    tl.store(p_packed + 2 * units + o_unit, count.to(tl.float64), o_unit == 0)


@triton.jit(do_not_specialize=["units", "chunks", "total"])
def pack_sums(p_partials, p_packed, units, chunks, total, OVERLAP: tl.constexpr, BLOCK: tl.constexpr):
    """P and Q of units, side by side, from those of their chunks, as they are sent."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    o_unit = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_unit = o_unit < units
    p = tl.zeros((BLOCK,), tl.float64)
    q = tl.zeros((BLOCK,), tl.float64)
    for chunk in range(chunks):
        p_partial = p_partials + o_unit.to(tl.int64) * chunks + chunk
        p += tl.load(p_partial, m_unit, 0.0).to(tl.float64)
        q += tl.load(p_partial + total, m_unit, 0.0).to(tl.float64)
    tl.store(p_packed + 2 * o_unit, p, m_unit)
    tl.store(p_packed + 2 * o_unit + 1, q, m_unit)


@triton.jit
def channels_of_units(o_unit, m_unit, d, G, D, C, first):
    """The d-th channel of each unit among all of this process's samples, and which units have it here."""
    o_c = o_unit % G * D + d - first
    return o_unit // G * C + o_c, m_unit & (o_c >= 0) & (o_c < C)


@triton.jit(do_not_specialize=["units", "channels", "G", "D", "C", "first"])
def pack_group_moments(
    p_channels, p_packed, units, channels, G, D, C, first, OVERLAP: tl.constexpr, BLOCK: tl.constexpr
):
    """The moments of groups from those of the channels that this process has, as they are sent."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    o_unit = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_unit = o_unit < units
    each = tl.load(p_channels + 2 * channels)
    mean = tl.zeros((BLOCK,), tl.float64)
    m2 = tl.zeros((BLOCK,), tl.float64)
    total = tl.zeros((BLOCK,), tl.float64)
    for d in range(D):
        o_channel, held = channels_of_units(o_unit, m_unit, d, G, D, C, first)
        part_mean = tl.load(p_channels + o_channel, held, 0.0)
        part_m2 = tl.load(p_channels + channels + o_channel, held, 0.0)
        mean, m2, total = fold_part(mean, m2, total, part_mean, part_m2, tl.where(held, each, 0.0))
    tl.store(p_packed + o_unit, mean, m_unit)
    tl.store(p_packed + units + o_unit, m2, m_unit)
    tl.store(p_packed + 2 * units + o_unit, total, m_unit)


@triton.jit(do_not_specialize=["units", "G", "D", "C", "first"])
def pack_group_sums(p_channels, p_packed, units, G, D, C, first, OVERLAP: tl.constexpr, BLOCK: tl.constexpr):
    """P and Q of groups, side by side, from those of the channels that this process has, as they are sent."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    o_unit = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_unit = o_unit < units
    p = tl.zeros((BLOCK,), tl.float64)
    q = tl.zeros((BLOCK,), tl.float64)
    for d in range(D):
        o_channel, held = channels_of_units(o_unit, m_unit, d, G, D, C, first)
        p += tl.load(p_channels + 2 * o_channel, held, 0.0)
        q += tl.load(p_channels + 2 * o_channel + 1, held, 0.0)
    tl.store(p_packed + 2 * o_unit, p, m_unit)
    tl.store(p_packed + 2 * o_unit + 1, q, m_unit)


@triton.jit(do_not_specialize=["channels", "G", "D", "C", "first"])
def spread_groups(
    p_one, p_other, p_one_out, p_other_out, channels, G, D, C, first,
    OVERLAP: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Two numbers of each group as those of the channels that this process has. STEP is 2 where the two lie side by
    side."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    o_channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_channel = o_channel < channels
    o_unit = o_channel // C * G + (o_channel % C + first) // D
    tl.store(p_one_out + STEP * o_channel, tl.load(p_one + STEP * o_unit, m_channel, 0.0), m_channel)
    other = tl.load(p_other + STEP * o_unit + STEP - 1, m_channel, 0.0)
    tl.store(p_other_out + STEP * o_channel + STEP - 1, other, m_channel)


@triton.jit
def fold_part(mean, m2, total, part_mean, part_m2, count):
    """The moments of two sets together, by Chan's formula in float64; any of the two may be empty."""
    after = total + count
    share = count / tl.where(after == 0.0, tl.full((), 1.0, tl.float64), after)
    delta = part_mean - mean
    return mean + delta * share, m2 + part_m2 + delta * delta * (total * share), after


@triton.jit(do_not_specialize=["units", "ranks"])
def merge_ranks(
    p_parts, p_mean, p_rstd, p_var, p_count, p_running_mean, p_running_var, p_share, p_counter,
    units, ranks, eps: tl.float64, share: tl.float64, OVERLAP: tl.constexpr, COUNTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The statistics of the whole from the moments of all ranks, by Chan's formula in the order of the ranks; and the
    running statistics, which move by ``share``, or by the number in ``p_share`` where that is given, while ``counter``,
    a number of calls, grows by 1.

    COUNTS: a rank has told how many elements it has of each unit, and not one number for all. Any rank may have no
    elements. A count of NaN makes all statistics NaN. Where no rank has any element, the mean and the variance are 0,
    and running statistics stay.
    """
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    o_unit = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_unit = o_unit < units
    one = tl.full((), 1.0, tl.float64)
    o_count, length = 2 * units + o_unit * COUNTS, 2 * units + (units if COUNTS else 1)
    m_count = m_unit | (not COUNTS)
    total = tl.load(p_parts + o_count, m_count, 0.0)
    mean = tl.load(p_parts + o_unit, m_unit, 0.0)
    m2 = tl.load(p_parts + units + o_unit, m_unit, 0.0)
    for rank in range(1, ranks):
        p_part = p_parts + rank * length.to(tl.int64)
        count = tl.load(p_part + o_count, m_count, 0.0)
        part_mean = tl.load(p_part + o_unit, m_unit, 0.0)
        part_m2 = tl.load(p_part + units + o_unit, m_unit, 0.0)
        mean, m2, total = fold_part(mean, m2, total, part_mean, part_m2, count)
    var = m2 / tl.where(total == 0.0, one, total)
    dtype: tl.constexpr = p_mean.dtype.element_ty
    tl.store(p_mean + o_unit, mean.to(dtype), m_unit)
    tl.store(p_rstd + o_unit, (1.0 / tl.sqrt(var + eps)).to(dtype), m_unit)
    if p_var is not None:
        tl.store(p_var + o_unit, var.to(dtype), m_unit)
    tl.store(p_count + o_unit, total, o_unit == 0)  # every unit of the whole has as many elements
    if p_running_mean is not None:
        if p_share is not None:
            share = tl.load(p_share).to(tl.float64)
        moving = m_unit & (total != 0.0)
        move_running(p_running_mean, o_unit, moving, mean, share)
        move_running(p_running_var, o_unit, moving, m2 / (total - 1.0), share)
    if p_counter is not None:
        tl.store(p_counter, tl.load(p_counter) + 1, tl.program_id(0) == 0)


@triton.jit(do_not_specialize=["length", "ranks"])
def sum_ranks(p_parts, p_count, p_sums, p_means, length, ranks, OVERLAP: tl.constexpr, BLOCK: tl.constexpr):
    """The sums over the ranks, in their order, and the same over the number of elements under one statistic."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    o_sum = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_sum = o_sum < length
    total = tl.load(p_parts + o_sum, m_sum, 0.0)
    for rank in range(1, ranks):
        total += tl.load(p_parts + rank * length.to(tl.int64) + o_sum, m_sum, 0.0)
    if p_sums is not None:
        tl.store(p_sums + o_sum, total.to(p_sums.dtype.element_ty), m_sum)
    if p_means is not None:
        count = tl.load(p_count)
        mean = total / tl.where(count == 0.0, tl.full((), 1.0, tl.float64), count)
        tl.store(p_means + o_sum, mean.to(p_means.dtype.element_ty), m_sum)
