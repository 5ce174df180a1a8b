"""The backward of tiles.py: p and q per channel and chunk, what follows from them, then the input's gradient."""

import triton
import triton.language as tl

from fusednorm.backends.triton.kernels.moments import partial_of
from fusednorm.backends.triton.kernels.tiles import affine, locate, statistics_of


@triton.jit
def reduce(
    p_dy, p_x, p_weight, p_bias, p_scale, p_shift, p_mean, p_rstd, p_partials,
    total, G, D, C, S, dy_sample, dy_channel, dy_spatial, x_sample, x_channel, x_spatial, blocks, chunks,
    partial_channel, partial_chunk,
    DERIVATIVE: tl.constexpr, PARAMETER: tl.constexpr, PER_BATCH: tl.constexpr, LAST: tl.constexpr,
    EVEN: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """p = sum dz and q = sum dz xhat of each channel over one chunk."""
    dtype: tl.constexpr = p_rstd.dtype.element_ty
    n, block, chunk = locate(tl.program_id(0), blocks, chunks, LAST)
    o_c = block * BLOCK_C + tl.arange(0, BLOCK_C)
    o_s = chunk.to(tl.int64) * (BLOCK_S * TILES) + tl.arange(0, BLOCK_S)
    m_c = o_c < C
    mean, rstd = statistics_of(p_mean, p_rstd, n, o_c, m_c, G, D, PER_BATCH)
    n = n.to(tl.int64)
    gain, offset = affine(p_weight, p_bias, p_scale, p_shift, n * C + o_c, o_c, m_c, dtype)
    p_grad = p_dy + n * dy_sample + o_c.to(tl.int64)[:, None] * dy_channel + o_s[None, :] * dy_spatial
    p_in = p_x + n * x_sample + o_c.to(tl.int64)[:, None] * x_channel + o_s[None, :] * x_spatial
    parameter = tl.full((), PARAMETER, dtype)
    p = tl.zeros((BLOCK_C, BLOCK_S), dtype)
    q = tl.zeros((BLOCK_C, BLOCK_S), dtype)
    for tile in range(TILES):
        mask = m_c[:, None] if EVEN else m_c[:, None] & (o_s + tile * BLOCK_S < S)[None, :]
        b_dy = tl.load(p_grad, mask, 0.0).to(dtype)
        b_x = tl.load(p_in, mask, 0.0).to(dtype)
        xhat = (b_x - mean[:, None]) * rstd[:, None]
        dz = b_dy * DERIVATIVE(xhat * gain[:, None] + offset[:, None], parameter)
        p += dz
        q += dz * xhat
        p_grad += BLOCK_S * dy_spatial
        p_in += BLOCK_S * x_spatial
    o_partial = n * C * chunks + o_c * partial_channel + chunk * partial_chunk
    tl.store(p_partials + o_partial, tl.sum(p, 1), m_c)
    tl.store(p_partials + total + o_partial, tl.sum(q, 1), m_c)


@triton.jit
def combine(
    p_partials, p_weight, p_bias, p_scale, p_totals, p_grad_weight, p_grad_bias, p_grad_scale, p_grad_shift,
    units, J, K, total, N, G, D, C, chunks, partial_channel, partial_chunk, channel_programs,
    RMS: tl.constexpr, PER_BATCH: tl.constexpr, LAST: tl.constexpr,
    BLOCK_J: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """What follows from p and q. The first programs take a unit each, the next a block of channels, the last one
    sample's block of channels: P / K and Q / K, the gradients of weight and bias, those of scale and shift."""
    dtype: tl.constexpr = p_partials.dtype.element_ty
    pid = tl.program_id(0)
    if pid < units:
        b_p = tl.zeros((BLOCK_J,), dtype)
        b_q = tl.zeros((BLOCK_J,), dtype)
        for start in range(0, J, BLOCK_J):
            j = start + tl.arange(0, BLOCK_J)
            n, c, _, o_partial = partial_of(pid, j, G, D, C, chunks, partial_channel, partial_chunk, PER_BATCH, LAST)
            m_j = j < J
            gain, _ = affine(p_weight, None, p_scale, None, n.to(tl.int64) * C + c, c, m_j, dtype)
            b_p += gain * tl.load(p_partials + o_partial, m_j, 0.0)
            b_q += gain * tl.load(p_partials + total + o_partial, m_j, 0.0)
        if p_totals is not None:
            if not RMS:
                tl.store(p_totals + 2 * pid, tl.sum(b_p, 0) / K)
            tl.store(p_totals + 2 * pid + 1, tl.sum(b_q, 0) / K)
    elif pid < units + channel_programs:
        o_c = (pid - units) * BLOCK_C + tl.arange(0, BLOCK_C)
        m_c = o_c < C
        p = tl.zeros((BLOCK_N, BLOCK_C), dtype)
        q = tl.zeros((BLOCK_N, BLOCK_C), dtype)
        for start in range(0, N * chunks, BLOCK_N):
            j = start + tl.arange(0, BLOCK_N)
            n = (j // chunks).to(tl.int64)
            mask = (j < N * chunks)[:, None] & m_c[None, :]
            o_partial = (n * C * chunks + j % chunks * partial_chunk)[:, None] + o_c[None, :] * partial_channel
            b_p = tl.load(p_partials + o_partial, mask, 0.0)
            b_q = tl.load(p_partials + total + o_partial, mask, 0.0)
            if p_scale is not None:
                factor = 1.0 + tl.load(p_scale + n[:, None] * C + o_c[None, :], mask, 0.0).to(dtype)
                b_p *= factor
                b_q *= factor
            p += b_p
            q += b_q
        if p_grad_weight is not None:
            tl.store(p_grad_weight + o_c, tl.sum(q, 0).to(p_grad_weight.dtype.element_ty), m_c)
        if p_grad_bias is not None:
            tl.store(p_grad_bias + o_c, tl.sum(p, 0).to(p_grad_bias.dtype.element_ty), m_c)
    else:
        blocks = tl.cdiv(C, BLOCK_C)
        n = ((pid - units - channel_programs) // blocks).to(tl.int64)
        o_c = (pid - units - channel_programs) % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
        m_c = o_c < C
        p = tl.zeros((BLOCK_N, BLOCK_C), dtype)
        q = tl.zeros((BLOCK_N, BLOCK_C), dtype)
        for start in range(0, chunks, BLOCK_N):
            k = start + tl.arange(0, BLOCK_N)
            mask = (k < chunks)[:, None] & m_c[None, :]
            o_partial = n * C * chunks + (k * partial_chunk)[:, None] + o_c[None, :] * partial_channel
            p += tl.load(p_partials + o_partial, mask, 0.0)
            q += tl.load(p_partials + total + o_partial, mask, 0.0)
        b_p = tl.sum(p, 0)
        b_q = tl.sum(q, 0)
        if p_grad_scale is not None:
            gain, offset = affine(p_weight, p_bias, None, None, o_c, o_c, m_c, dtype)
            b_scale = gain * b_q + offset * b_p
            tl.store(p_grad_scale + n * C + o_c, b_scale.to(p_grad_scale.dtype.element_ty), m_c)
        if p_grad_shift is not None:
            tl.store(p_grad_shift + n * C + o_c, b_p.to(p_grad_shift.dtype.element_ty), m_c)


@triton.jit
def input_gradient(
    p_dy, p_x, p_dx, p_weight, p_bias, p_scale, p_shift, p_mean, p_rstd, p_totals,
    G, D, C, S, dy_sample, dy_channel, dy_spatial, x_sample, x_channel, x_spatial, dx_sample, dx_channel, dx_spatial,
    blocks, chunks, programs,
    DERIVATIVE: tl.constexpr, PARAMETER: tl.constexpr, PER_BATCH: tl.constexpr, LAST: tl.constexpr,
    EVEN: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """dx = rstd (A dz - (P + xhat Q) / K) of one chunk, from the end as in tiles.apply; totals None: rstd A dz."""
    dtype: tl.constexpr = p_rstd.dtype.element_ty
    n, block, chunk = locate(programs - 1 - tl.program_id(0), blocks, chunks, LAST)
    o_c = block * BLOCK_C + tl.arange(0, BLOCK_C)
    o_s = chunk.to(tl.int64) * (BLOCK_S * TILES) + tl.arange(0, BLOCK_S)
    m_c = o_c < C
    mean, rstd = statistics_of(p_mean, p_rstd, n, o_c, m_c, G, D, PER_BATCH)
    n = n.to(tl.int64)
    gain, offset = affine(p_weight, p_bias, p_scale, p_shift, n * C + o_c, o_c, m_c, dtype)
    if p_totals is not None:
        o_unit = o_c if PER_BATCH else n * G + o_c // D
        total_q = tl.load(p_totals + 2 * o_unit + 1, m_c, 0.0)
        if p_mean is not None:
            total_p = tl.load(p_totals + 2 * o_unit, m_c, 0.0)
        else:
            total_p = tl.zeros_like(total_q)
    p_grad = p_dy + n * dy_sample + o_c.to(tl.int64)[:, None] * dy_channel + o_s[None, :] * dy_spatial
    p_in = p_x + n * x_sample + o_c.to(tl.int64)[:, None] * x_channel + o_s[None, :] * x_spatial
    p_out = p_dx + n * dx_sample + o_c.to(tl.int64)[:, None] * dx_channel + o_s[None, :] * dx_spatial
    parameter = tl.full((), PARAMETER, dtype)
    for tile in range(TILES):
        mask = m_c[:, None] if EVEN else m_c[:, None] & (o_s + tile * BLOCK_S < S)[None, :]
        b_dy = tl.load(p_grad, mask, 0.0).to(dtype)
        b_x = tl.load(p_in, mask, 0.0).to(dtype)
        xhat = (b_x - mean[:, None]) * rstd[:, None]
        b_dx = b_dy * DERIVATIVE(xhat * gain[:, None] + offset[:, None], parameter) * gain[:, None]
        if p_totals is not None:
            b_dx -= total_p[:, None] + xhat * total_q[:, None]
        tl.store(p_out, (b_dx * rstd[:, None]).to(p_dx.dtype.element_ty), mask)
        p_grad += BLOCK_S * dy_spatial
        p_in += BLOCK_S * x_spatial
        p_out += BLOCK_S * dx_spatial
