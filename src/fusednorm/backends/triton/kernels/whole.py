"""Units that fit the registers of one program: one read of the input, one launch.

A unit's K elements lie in one contiguous run, so element i belongs to the channel i // S of its group.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from fusednorm.backends.triton.kernels.moments import add_pair, compute_dtype, inverse_deviation
from fusednorm.backends.triton.kernels.tiles import affine


@triton.jit
def forward(
    p_x, p_y, p_weight, p_bias, p_scale, p_shift, p_mean, p_rstd, p_var, units, x_sample, x_group, y_sample, y_group,
    EPS: tl.constexpr, RMS: tl.constexpr, VALUE: tl.constexpr, PARAMETER: tl.constexpr, G: tl.constexpr,
    S: tl.constexpr, K: tl.constexpr, BLOCK_U: tl.constexpr, BLOCK_K: tl.constexpr,
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
    b_x = tl.load(p_in, mask, 0.0, eviction_policy="evict_first").to(dtype)
    if RMS:
        variance = tl.sum(b_x * b_x, 1) / K
    else:
        mean = tl.sum(b_x, 1) / K
        b_x -= mean[:, None]
        if K != BLOCK_K:
            b_x = tl.where(mask, b_x, 0.0)
        if p_x.dtype.element_ty.primitive_bitwidth > 16:
            # The mean is used in full: what one sum rounded away a second one over the deviations finds.
            rest, square = tl.reduce((b_x, b_x * b_x), 1, add_pair)
            rest /= K
            mean += rest
            variance = square / K - rest * rest
            b_x -= rest[:, None]
        else:
            variance = tl.sum(b_x * b_x, 1) / K
        if p_mean is not None:
            tl.store(p_mean + o_u, mean, m_u)
    rstd = inverse_deviation(variance, EPS)
    if p_rstd is not None:
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
    tl.store(p_out, b_y.to(p_y.dtype.element_ty), mask, eviction_policy="evict_first")


@triton.jit
def row_gradient(b_dy, b_x, mean, rstd, gain, offset, parameter, DERIVATIVE: tl.constexpr):
    """dz and xhat of rows."""
    xhat = (b_x.to(rstd.dtype) - mean) * rstd
    return b_dy.to(rstd.dtype) * DERIVATIVE(xhat * gain + offset, parameter), xhat


@triton.jit
def rows_backward(
    p_dy, p_x, p_dx, p_weight, p_bias, p_mean, p_rstd, p_partials, rows, dy_sample, x_sample, dx_sample, total,
    OVERLAP: tl.constexpr, DERIVATIVE: tl.constexpr, PARAMETER: tl.constexpr, BIAS: tl.constexpr, K: tl.constexpr,
    BLOCK_U: tl.constexpr, BLOCK_K: tl.constexpr, STEPS: tl.constexpr, PREFETCH: tl.constexpr, RELOAD: tl.constexpr,
):  # fmt: skip
    """Rows of one group and one position: STEPS times BLOCK_U rows, and the sums over them of p and q per element.

    PREFETCH: the next rows are on their way while these are computed. RELOAD: the sums over the rows fill the
    registers, so that a row is read again, from the L1, once P and Q are known.
    """
    dtype: tl.constexpr = p_rstd.dtype.element_ty
    pid = tl.program_id(0)
    if OVERLAP:
        gdc_launch_dependents()
    o_k = tl.arange(0, BLOCK_K)[None, :]
    m_k = o_k < K
    parameter = tl.full((), PARAMETER, dtype)
    p = tl.zeros((BLOCK_U, BLOCK_K), dtype)
    q = tl.zeros((BLOCK_U, BLOCK_K), dtype)
    o_u = (pid * STEPS * BLOCK_U + tl.arange(0, BLOCK_U))[:, None]
    mask = (o_u < rows) & m_k
    n = o_u.to(tl.int64)
    if PREFETCH:
        next_dy = tl.load(p_dy + n * dy_sample + o_k, mask, 0.0)
        next_x = tl.load(p_x + n * x_sample + o_k, mask, 0.0)
    if not RELOAD:
        gain, offset = affine(p_weight, p_bias, None, None, o_k, o_k, m_k, dtype)
    for step in range(STEPS):
        p_grad, p_in, o_out = p_dy + n * dy_sample + o_k, p_x + n * x_sample + o_k, n * dx_sample + o_k
        rstd = tl.load(p_rstd + n, n < rows, 0.0)
        mean = tl.load(p_mean + n, n < rows, 0.0) if p_mean is not None else tl.zeros_like(rstd)
        m_out = mask
        n += BLOCK_U
        mask = (n < rows) & m_k
        if PREFETCH:
            b_dy, b_x = next_dy, next_x
            m_next = mask & (step + 1 < STEPS)
            next_dy = tl.load(p_dy + n * dy_sample + o_k, m_next, 0.0)
            next_x = tl.load(p_x + n * x_sample + o_k, m_next, 0.0)
        else:
            b_dy = tl.load(p_grad, m_out, 0.0)
            b_x = tl.load(p_in, m_out, 0.0)
        if RELOAD:
            gain, offset = affine(p_weight, p_bias, None, None, o_k, o_k, m_k, dtype)
        dz, xhat = row_gradient(b_dy, b_x, mean, rstd, gain, offset, parameter, DERIVATIVE)
        if p_dx is not None:
            level, slope = tl.reduce((dz * gain, dz * gain * xhat), 1, add_pair)
            if RELOAD:
                b_dy = tl.load(p_grad, m_out, 0.0, eviction_policy="evict_first")
                b_x = tl.load(p_in, m_out, 0.0, eviction_policy="evict_first")
                gain, offset = affine(p_weight, p_bias, None, None, o_k, o_k, m_k, dtype)
                dz, xhat = row_gradient(b_dy, b_x, mean, rstd, gain, offset, parameter, DERIVATIVE)
            b_dx = dz * gain - xhat * (slope / K)[:, None]
            if p_mean is not None:
                b_dx -= (level / K)[:, None]
            tl.store(p_dx + o_out, (b_dx * rstd).to(p_dx.dtype.element_ty), m_out)
        if p_partials is not None:
            q += dz * xhat
            if BIAS:
                p += dz
    if p_partials is not None:
        o_partial = pid.to(tl.int64) * K + tl.arange(0, BLOCK_K)
        m_partial = tl.arange(0, BLOCK_K) < K
        tl.store(p_partials + total + o_partial, tl.sum(q, 0), m_partial)
        if BIAS:
            tl.store(p_partials + o_partial, tl.sum(p, 0), m_partial)
