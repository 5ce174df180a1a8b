"""Units that fit the registers of one program: one read of the input, one launch.

A unit's K elements lie in one contiguous run, so element i belongs to the channel i // S of its group.
"""

import triton
import triton.language as tl

from fusednorm.backends.triton.kernels.moments import add_pair, inverse_deviation
from fusednorm.backends.triton.kernels.tiles import affine


@triton.jit
def forward(
    p_x, p_y, p_weight, p_bias, p_scale, p_shift, p_mean, p_rstd, p_var, units, x_sample, x_group, y_sample, y_group,
    EPS: tl.constexpr, VALUE: tl.constexpr, PARAMETER: tl.constexpr, G: tl.constexpr, S: tl.constexpr,
    K: tl.constexpr, BLOCK_U: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """BLOCK_U units from their statistics to their output."""
    dtype: tl.constexpr = p_rstd.dtype.element_ty
    o_u = tl.program_id(0) * BLOCK_U + tl.arange(0, BLOCK_U)
    o_k = tl.arange(0, BLOCK_K)
    m_u = o_u < units
    mask = m_u[:, None] & (o_k < K)[None, :]
    n = (o_u // G).to(tl.int64)
    g = o_u % G
    p_in = p_x + (n * x_sample + g * x_group)[:, None] + o_k[None, :]
    b_x = tl.load(p_in, mask, 0.0).to(dtype)
    if p_mean is not None:
        # The mean is used in full: what one sum rounded away a second one over the deviations finds.
        mean = tl.sum(b_x, 1) / K
        b_x = tl.where(mask, b_x - mean[:, None], 0.0)
        rest, square = tl.reduce((b_x, b_x * b_x), 1, add_pair)
        rest /= K
        variance = square / K - rest * rest
        b_x -= rest[:, None]
        tl.store(p_mean + o_u, mean + rest, m_u)
    else:
        variance = tl.sum(b_x * b_x, 1) / K
    rstd = inverse_deviation(variance, EPS)
    tl.store(p_rstd + o_u, rstd, m_u)
    if p_var is not None:
        tl.store(p_var + o_u, variance, m_u)
    if G == 1 and p_scale is None and p_shift is None:
        o_c = (o_k // S)[None, :]
        gain, offset = affine(p_weight, p_bias, None, None, o_c, o_c, (o_k < K)[None, :], dtype)
    else:
        o_c = (g * (K // S))[:, None] + (o_k // S)[None, :]
        o_modulation = n[:, None] * (G * (K // S)) + o_c
        gain, offset = affine(p_weight, p_bias, p_scale, p_shift, o_modulation, o_c, mask, dtype)
    b_y = VALUE(b_x * rstd[:, None] * gain + offset, tl.full((), PARAMETER, dtype))
    p_out = p_y + (n * y_sample + g * y_group)[:, None] + o_k[None, :]
    tl.store(p_out, b_y.to(p_y.dtype.element_ty), mask)


@triton.jit
def rows_backward(
    p_dy, p_x, p_dx, p_weight, p_bias, p_mean, p_rstd, p_partials, rows, dy_sample, x_sample, dx_sample, total,
    DERIVATIVE: tl.constexpr, PARAMETER: tl.constexpr, BIAS: tl.constexpr, K: tl.constexpr,
    BLOCK_U: tl.constexpr, BLOCK_K: tl.constexpr, STEPS: tl.constexpr, PREFETCH: tl.constexpr, RELOAD: tl.constexpr,
):  # fmt: skip
    """Rows of one group and one position: STEPS times BLOCK_U rows, and the sums over them of p and q per element."""
    dtype: tl.constexpr = p_rstd.dtype.element_ty
    pid = tl.program_id(0)
    o_k = tl.arange(0, BLOCK_K)
    m_k = o_k < K
    parameter = tl.full((), PARAMETER, dtype)
    p = tl.zeros((BLOCK_U, BLOCK_K), dtype)
    q = tl.zeros((BLOCK_U, BLOCK_K), dtype)
    o_u = pid * STEPS * BLOCK_U + tl.arange(0, BLOCK_U)
    if not RELOAD:
        gain, offset = affine(p_weight, p_bias, None, None, o_k, o_k, m_k, dtype)
    if PREFETCH:
        mask = (o_u < rows)[:, None] & m_k[None, :]
        n = o_u.to(tl.int64)[:, None]
        n_dy = tl.load(p_dy + n * dy_sample + o_k[None, :], mask, 0.0)
        n_x = tl.load(p_x + n * x_sample + o_k[None, :], mask, 0.0)
    for step in range(STEPS):
        m_u = o_u < rows
        mask = m_u[:, None] & m_k[None, :]
        n = o_u.to(tl.int64)[:, None]
        rstd = tl.load(p_rstd + o_u, m_u, 0.0)[:, None]
        if p_mean is not None:
            mean = tl.load(p_mean + o_u, m_u, 0.0)[:, None]
        if PREFETCH:
            b_dy = n_dy
            b_x = n_x
            o_v = o_u + BLOCK_U
            m_v = ((o_v < rows) & (step + 1 < STEPS))[:, None] & m_k[None, :]
            v = o_v.to(tl.int64)[:, None]
            n_dy = tl.load(p_dy + v * dy_sample + o_k[None, :], m_v, 0.0)
            n_x = tl.load(p_x + v * x_sample + o_k[None, :], m_v, 0.0)
        else:
            b_dy = tl.load(p_dy + n * dy_sample + o_k[None, :], mask, 0.0)
            b_x = tl.load(p_x + n * x_sample + o_k[None, :], mask, 0.0)
        if RELOAD:
            gain, offset = affine(p_weight, p_bias, None, None, o_k, o_k, m_k, dtype)
        b_x = b_x.to(dtype)
        if p_mean is not None:
            b_x -= mean
        xhat = tl.where(mask, b_x * rstd, 0.0)
        dz = b_dy.to(dtype) * DERIVATIVE(xhat * gain[None, :] + offset[None, :], parameter)
        if p_dx is not None:
            adz = dz * gain[None, :]
            if p_mean is not None:
                sum_p, sum_q = tl.reduce((adz, adz * xhat), 1, add_pair)
            else:
                sum_q = tl.sum(adz * xhat, 1)
            if RELOAD:
                b_dy = tl.load(p_dy + n * dy_sample + o_k[None, :], mask, 0.0, eviction_policy="evict_first")
                b_x = tl.load(p_x + n * x_sample + o_k[None, :], mask, 0.0, eviction_policy="evict_first").to(dtype)
                if p_mean is not None:
                    b_x -= mean
                xhat = tl.where(mask, b_x * rstd, 0.0)
                gain, offset = affine(p_weight, p_bias, None, None, o_k, o_k, m_k, dtype)
                dz = b_dy.to(dtype) * DERIVATIVE(xhat * gain[None, :] + offset[None, :], parameter)
                adz = dz * gain[None, :]
            b_dx = adz - xhat * (sum_q / K)[:, None]
            if p_mean is not None:
                b_dx -= (sum_p / K)[:, None]
            tl.store(p_dx + n * dx_sample + o_k[None, :], (b_dx * rstd).to(p_dx.dtype.element_ty), mask)
        if p_partials is not None:
            q += dz * xhat
            if BIAS:
                p += dz
        o_u += BLOCK_U
    if p_partials is not None:
        o_partial = pid.to(tl.int64) * K + o_k
        tl.store(p_partials + total + o_partial, tl.sum(q, 0), m_k)
        if BIAS:
            tl.store(p_partials + o_partial, tl.sum(p, 0), m_k)
