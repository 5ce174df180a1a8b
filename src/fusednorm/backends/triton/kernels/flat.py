"""Evaluations of dense tensors with given statistics: the elements in the order of memory, whatever their dimensions.

A program takes BLOCK_V vectors of WIDTH neighbouring elements. The elements of a vector are of one channel in
channels_first and of one position in channels_last (LAST); with EACH they may be of several, and each has numbers of
its own. A thread loads the numbers of its own elements, so nothing moves between threads, and all loads of a program
are on their way together.

``inner`` is the number of vectors, or with EACH of elements, of a channel of a sample in channels_first and of a
position in channels_last; ``outer`` is the number of channels, or of positions. A quotient by either is a product and a
shift, see :func:`quotient`.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from fusednorm.backends.triton.kernels.aggregates import Parameters
from fusednorm.backends.triton.kernels.moments import compute_dtype, inverse_deviation_given
from fusednorm.backends.triton.kernels.tiles import affine, alpha_of, normalized


@triton.jit
def quotient(number, factor, shift):
    """number // d for numbers below 2**31, with the factor 2**(31 + shift) / d rounded up, and d <= 2**shift."""
    return (tl.umulhi(2 * number.to(tl.uint32), factor.to(tl.uint32)) >> shift).to(tl.int32)


@triton.jit(
    do_not_specialize=["vectors", "inner", "inner_factor", "inner_shift", "outer", "outer_factor", "outer_shift"]
)
def flat_forward(
    p_x, p_y, p_weight, p_bias, p_scale, p_shift, p_mean, p_rstd, p_given_mean, p_given_var, vectors,
    inner, inner_factor: tl.int64, inner_shift, outer, outer_factor: tl.int64, outer_shift,
    eps: tl.float64, activation_parameter: tl.float64,
    OVERLAP: tl.constexpr, VALUE: tl.constexpr, ALPHA: tl.constexpr, LAST: tl.constexpr, EACH: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The output of BLOCK_V vectors. The programs of the first sample store the statistics where somebody wants
    them."""
    if OVERLAP:
        gdc_wait()
    dtype: tl.constexpr = compute_dtype(p_x.dtype.element_ty)
    o_v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    o_lane = tl.arange(0, WIDTH)[None, :]
    m_v = (o_v < vectors)[:, None]
    mask = m_v & (o_lane < WIDTH)
    o_element = (o_v.to(tl.int64) * WIDTH)[:, None] + o_lane
    b_x = tl.load(p_x + o_element, mask, 0.0)
    o_first = o_v[:, None]
    STEP: tl.constexpr = 1 if EACH else WIDTH
    if EACH:
        o_first = o_first * WIDTH + o_lane
    major = quotient(o_first, inner_factor, inner_shift)  # the position, or the channel of a sample
    minor = (o_first - major * inner) * STEP
    above = quotient(major, outer_factor, outer_shift)
    if LAST:
        o_c = minor if EACH else minor + o_lane
        o_modulation = above * (inner * STEP) + o_c
        m_c, leads = mask, mask & (major == 0)
    else:
        o_c, o_modulation = major - above * outer, major
        m_c = mask if EACH else m_v
        leads = m_c & (above == 0) & (minor == 0)
    b_mean = tl.load(p_given_mean + o_c, m_c, 0.0)
    b_variance = tl.load(p_given_var + o_c, m_c, 1.0)
    gain, offset = affine(Parameters(p_weight, p_bias, p_scale, p_shift), o_modulation, o_c, m_c, dtype)
    b_mean, rstd = b_mean.to(dtype), inverse_deviation_given(b_variance, eps, dtype)
    if p_mean is not None:
        tl.store(p_mean + o_c, b_mean, leads)
    if p_rstd is not None:
        tl.store(p_rstd + o_c, rstd, leads)
    b_z = normalized(b_x.to(dtype) - b_mean, gain * rstd, offset)
    b_y = VALUE(b_z, alpha_of(activation_parameter, ALPHA, dtype))
    tl.store(p_y + o_element, b_y.to(p_y.dtype.element_ty), mask)
