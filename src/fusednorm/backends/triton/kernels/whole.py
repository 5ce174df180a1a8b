"""Units that fit the registers of one program: one read of the input, one launch.

A unit's K = D S elements lie in one contiguous run, so element i belongs to the channel i // S of its group. S is
compiled in where it is a power of two: there are few powers, S = 1 (rows) among them, and the elements of a thread then
share their channel's parameters. Any other S is an argument, since each image or recording may have another length.

Where each position of channels_last has statistics of its own, the units of a sample are its ``positions``, which share
its parameters.
"""

import triton
import triton.language as tl

from fusednorm.backends.triton.kernels.aggregates import Parameters
from fusednorm.backends.triton.kernels.codes import store_codes
from fusednorm.backends.triton.kernels.moments import compute_dtype, held_moments, inverse_deviation
from fusednorm.backends.triton.kernels.tiles import affine, aligned, alpha_of, no_wider, normalized


@triton.jit
def channel_of(o_k, reciprocal, S: tl.constexpr):
    """o_k // S. Where S is not compiled in, o_k is multiplied by ``reciprocal``, 2**31 / S rounded up: exact for o_k
    below 32768 and S up to 32768."""
    if S is not None:
        return o_k // S
    else:
        return tl.umulhi(2 * o_k, reciprocal)


@triton.jit
def affine_of_units(
    parameters, o_u, m_u, n, g, o_k, m_k, mask, reciprocal,
    G: tl.constexpr, D: tl.constexpr, S: tl.constexpr, ONCE: tl.constexpr, ALIGN: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """A and B of the elements of units, as far as they differ between them."""
    o_d = no_wider(channel_of(o_k, reciprocal, S), ALIGN)
    if D == 1:
        gain, offset = affine(parameters, o_u[:, None], g[:, None], m_u[:, None], dtype)
    elif ONCE:
        gain, offset = affine(parameters, o_d, o_d, m_k, dtype)
        gain, offset = gain[None, :], offset[None, :]
    else:
        o_c = (g * D)[:, None] + o_d[None, :]
        gain, offset = affine(parameters, n[:, None] * (G * D) + o_c, o_c, mask, dtype)
    return gain, offset


@triton.jit(
    do_not_specialize=["units", "reciprocal"],
    do_not_specialize_on_alignment=["length", "positions", "x_sample", "x_unit", "y_sample", "y_unit"],
)
def whole_forward(
    p_x, p_y, p_weight, p_bias, p_scale, p_shift, p_mean, p_rstd, p_var, p_out_scale, units, length,
    reciprocal, positions, x_sample, x_unit, y_sample, y_unit, eps: tl.float64, activation_parameter: tl.float64,
    RMS: tl.constexpr, VALUE: tl.constexpr, ALPHA: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    S: tl.constexpr, EVEN: tl.constexpr, EARLY: tl.constexpr, ONCE: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_U: tl.constexpr, BLOCK_K: tl.constexpr, OUT: tl.constexpr, BY_ROW: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """The statistics, stored where somebody wants them, and the output of BLOCK_U units.

    K is ``length`` where S is None. EVEN: K = BLOCK_K. EARLY: the parameters are loaded beside the input, and wait in
    registers for the statistics; where a thread holds few elements, that saves the time of one access. ONCE: the units
    of a program have the same parameters, which are loaded once, and then move to the threads that need them.
    OUT: the 8-bit format of the output (codes.py), or None.
    """
    dtype: tl.constexpr = compute_dtype(p_x.dtype.element_ty)
    o_u = tl.program_id(0) * BLOCK_U + tl.arange(0, BLOCK_U)
    o_k = tl.arange(0, BLOCK_K)
    m_u = o_u < units
    K = aligned(length, ALIGN) if S is None else D * S
    m_k = o_k < K
    mask = m_u[:, None] if EVEN else m_u[:, None] & m_k[None, :]
    n = (o_u // (G * positions)).to(tl.int64)
    place = o_u % (G * positions)
    g = o_u % G
    p_in = p_x + (n * aligned(x_sample, ALIGN) + place * aligned(x_unit, ALIGN))[:, None] + o_k[None, :]
    b_x = tl.load(p_in, mask, 0.0).to(dtype)
    parameters = Parameters(p_weight, p_bias, p_scale, p_shift)
    if EARLY:
        gain, offset = affine_of_units(
            parameters, o_u // positions, m_u, n, g, o_k, m_k, mask, reciprocal, G, D, S, ONCE, ALIGN, dtype
        )
    if RMS:
        variance = tl.sum(b_x * b_x, 1) / K
        mean = tl.zeros_like(variance)
    else:
        mean, m2 = held_moments(b_x, mask, None, None, K, not EVEN, p_x.dtype.element_ty.primitive_bitwidth > 16)
        variance = m2 / K
        if p_mean is not None:
            tl.store(p_mean + o_u, mean, m_u)
    rstd = inverse_deviation(variance, eps)
    if p_rstd is not None:
        tl.store(p_rstd + o_u, rstd, m_u)
    if p_var is not None:
        tl.store(p_var + o_u, variance, m_u)
    if not EARLY:
        gain, offset = affine_of_units(
            parameters, o_u // positions, m_u, n, g, o_k, m_k, mask, reciprocal, G, D, S, ONCE, ALIGN, dtype
        )
    b_z = normalized(b_x - mean[:, None], gain * rstd[:, None], offset)
    b_y = VALUE(b_z, alpha_of(activation_parameter, ALPHA, dtype))
    p_out = p_y + (n * aligned(y_sample, ALIGN) + place * aligned(y_unit, ALIGN))[:, None] + o_k[None, :]
    if OUT is None:
        tl.store(p_out, b_y.to(p_y.dtype.element_ty), mask)
    else:
        store_codes(p_out, b_y, mask, p_out_scale, o_u, m_u, OUT, BY_ROW, NATIVE)
