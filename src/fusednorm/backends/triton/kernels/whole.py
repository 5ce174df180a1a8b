"""Units that fit the registers of one program: one read of the input, one launch.

A unit's K elements lie in one contiguous run, so element i belongs to the channel i // S of its group.
"""

import triton
import triton.language as tl

from fusednorm.backends.triton.kernels.moments import compute_dtype, held_moments, inverse_deviation
from fusednorm.backends.triton.kernels.tiles import affine, normalized, parameter_of


@triton.jit
def whole_forward(
    p_x, p_y, p_weight, p_bias, p_scale, p_shift, p_mean, p_rstd, p_var, units, x_sample, x_group, y_sample, y_group,
    eps: tl.float64, given_parameter: tl.float64,
    RMS: tl.constexpr, VALUE: tl.constexpr, PARAMETER: tl.constexpr, G: tl.constexpr, S: tl.constexpr,
    K: tl.constexpr, BLOCK_U: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """BLOCK_U units from their statistics to their output; the statistics are stored where somebody wants them."""
    dtype: tl.constexpr = compute_dtype(p_x.dtype.element_ty)
    o_u = tl.program_id(0) * BLOCK_U + tl.arange(0, BLOCK_U)
    o_k = tl.arange(0, BLOCK_K)
    m_u = o_u < units
    mask = m_u[:, None] if K == BLOCK_K else m_u[:, None] & (o_k < K)[None, :]
    n = (o_u // G).to(tl.int64)
    g = o_u % G
    p_in = p_x + (n * x_sample + g * x_group)[:, None] + o_k[None, :]
    b_x = tl.load(p_in, mask, 0.0).to(dtype)
    if RMS:
        variance = tl.sum(b_x * b_x, 1) / K
        mean = tl.zeros_like(variance)
    else:
        mean, m2 = held_moments(b_x, mask, K, K != BLOCK_K, p_x.dtype.element_ty.primitive_bitwidth > 16)
        variance = m2 / K
        if p_mean is not None:
            tl.store(p_mean + o_u, mean, m_u)
    rstd = inverse_deviation(variance, eps)
    if p_rstd is not None:
        tl.store(p_rstd + o_u, rstd, m_u)
    if p_var is not None:
        tl.store(p_var + o_u, variance, m_u)
    if G == 1 and p_scale is None and p_shift is None:
        gain, offset = affine(p_weight, p_bias, None, None, o_k // S, o_k // S, o_k < K, dtype)
        gain, offset = gain[None, :], offset[None, :]
    else:
        o_c = (g * (K // S))[:, None] + (o_k // S)[None, :]
        o_modulation = n[:, None] * (G * (K // S)) + o_c
        gain, offset = affine(p_weight, p_bias, p_scale, p_shift, o_modulation, o_c, mask, dtype)
    b_z = normalized(b_x - mean[:, None], gain * rstd[:, None], offset)
    b_y = VALUE(b_z, parameter_of(given_parameter, PARAMETER, dtype))
    p_out = p_y + (n * y_sample + g * y_group)[:, None] + o_k[None, :]
    tl.store(p_out, b_y.to(p_y.dtype.element_ty), mask)
