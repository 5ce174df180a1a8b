"""Running statistics, which move towards those of a call."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait


@triton.jit
def move_running(p_running, o_unit, m_unit, statistic, share):
    """Move a running statistic towards this one, from the nearer end, so that a share of 1 gives the statistic."""
    running = tl.load(p_running + o_unit, m_unit, 0.0).to(tl.float64)
    step = statistic - running
    moved = tl.where(share < 0.5, running + share * step, statistic - (1.0 - share) * step)
    if p_running.dtype.element_ty.primitive_bitwidth == 16:
        moved = moved.to(tl.float32)  # on the way to bfloat16, of which Triton's interpreter knows no shorter one
    tl.store(p_running + o_unit, moved.to(p_running.dtype.element_ty), m_unit)


@triton.jit(do_not_specialize=["channels"])
def move_statistics(
    p_mean, p_var, p_running_mean, p_running_var, p_counter, p_share, channels, factor: tl.float64, share: tl.float64,
    OVERLAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The running mean and variance of channels move towards ``mean`` and ``factor var`` by ``share``, or by the number
    in ``p_share`` where that is given; ``counter``, a number of calls, grows by 1."""
    if OVERLAP:
        gdc_wait()
    o_c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_c = o_c < channels
    if p_share is not None:
        share = tl.load(p_share).to(tl.float64)
    mean = tl.load(p_mean + o_c, m_c, 0.0).to(tl.float64)
    var = tl.load(p_var + o_c, m_c, 0.0).to(tl.float64)
    move_running(p_running_mean, o_c, m_c, mean, share)
    move_running(p_running_var, o_c, m_c, var * factor, share)
    if p_counter is not None:
        tl.store(p_counter, tl.load(p_counter) + 1, tl.program_id(0) == 0)
