"""What processes tell one another about their parts of an input, and what each makes of all that is told.

A process sends one float64 vector in each direction: forward the means of its units, their M2, and the number of
elements under each; backward sums over its elements. What arrives is a row for each rank, which every process takes in
the order of the ranks, so that all get the same bits.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fusednorm.backends.triton.kernels.aggregates import Groups, Partials
from fusednorm.backends.triton.kernels.moments import merge


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


@triton.jit
def move_running(p_running, o_unit, m_unit, statistic, share):
    """Move a running statistic towards this one, from the nearer end, so that a share of 1 gives the statistic."""
    running = tl.load(p_running + o_unit, m_unit, 0.0).to(tl.float64)
    step = statistic - running
    moved = tl.where(share < 0.5, running + share * step, statistic - (1.0 - share) * step)
    tl.store(p_running + o_unit, moved.to(p_running.dtype.element_ty), m_unit)


@triton.jit(do_not_specialize=["units", "ranks"])
def merge_ranks(
    p_parts, p_mean, p_rstd, p_var, p_count, p_running_mean, p_running_var, p_share,
    units, ranks, eps: tl.float64, share: tl.float64, OVERLAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The statistics of the whole from the moments of all ranks, by Chan's formula in the order of the ranks; and the
    running statistics, which move by ``share``, or by the number in ``p_share`` where that is given.

    Any rank may have no elements. A count of NaN makes all statistics NaN. Where no rank has any element, the mean and
    the variance are 0, and running statistics stay.
    """
    if OVERLAP:
        gdc_launch_dependents()
    o_unit = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_unit = o_unit < units
    one = tl.full((), 1.0, tl.float64)
    total = tl.load(p_parts + 2 * units)
    mean = tl.load(p_parts + o_unit, m_unit, 0.0)
    m2 = tl.load(p_parts + units + o_unit, m_unit, 0.0)
    for rank in range(1, ranks):
        p_part = p_parts + rank * (2 * units + 1).to(tl.int64)
        count = tl.load(p_part + 2 * units)
        before = total
        total = before + count
        weight = count / tl.where(total == 0.0, one, total)
        delta = tl.load(p_part + o_unit, m_unit, 0.0) - mean
        mean += delta * weight
        m2 = m2 + tl.load(p_part + units + o_unit, m_unit, 0.0) + delta * delta * (before * weight)
    var = m2 / tl.where(total == 0.0, one, total)
    dtype: tl.constexpr = p_mean.dtype.element_ty
    tl.store(p_mean + o_unit, mean.to(dtype), m_unit)
    tl.store(p_rstd + o_unit, (1.0 / tl.sqrt(var + eps)).to(dtype), m_unit)
    if p_var is not None:
        tl.store(p_var + o_unit, var.to(dtype), m_unit)
    if tl.program_id(0) == 0:
        tl.store(p_count, total)
    if p_running_mean is not None:
        if p_share is not None:
            share = tl.load(p_share).to(tl.float64)
        # Triton 3.9's interpreter takes no mask that `&` made of an array's and a number's comparison.
        moving = o_unit < tl.where(total == 0.0, 0, units)
        move_running(p_running_mean, o_unit, moving, mean, share)
        move_running(p_running_var, o_unit, moving, m2 / (total - 1.0), share)


@triton.jit(do_not_specialize=["length", "ranks"])
def sum_ranks(p_parts, p_count, p_sums, p_means, length, ranks, OVERLAP: tl.constexpr, BLOCK: tl.constexpr):
    """The sums over the ranks, in their order, and the same over the number of elements under one statistic."""
    if OVERLAP:
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
