"""channels_first where the channels of each position have statistics of their own.

A program takes BLOCK_S neighbouring positions of one sample: a tile of positions by BLOCK_C channels, contiguous along
the positions. It reads its elements once where the tile holds all K channels, and twice where it walks over them.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from fusednorm.backends.triton.kernels.addressing import aligned
from fusednorm.backends.triton.kernels.aggregates import Channels, Parameters
from fusednorm.backends.triton.kernels.moments import (
    add_pair,
    compute_dtype,
    held_moments,
    inverse_deviation,
    merge_lanes,
)
from fusednorm.backends.triton.kernels.rows import store_sums
from fusednorm.backends.triton.kernels.tiles import affine, alpha_of, gradient_of, normalized


@triton.jit
def positions_of(S, blocks, ALIGN: tl.constexpr, BLOCK_S: tl.constexpr):
    """The sample of a program, its positions, which of them there are, and where their statistics are."""
    n, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    o_s = block * BLOCK_S + tl.arange(0, BLOCK_S)
    return n, o_s, o_s < aligned(S, ALIGN), n * S + o_s


@triton.jit
def begin_of(n, o_s, sample, ALIGN: tl.constexpr):
    """The offsets of positions in the first channel."""
    return n * aligned(sample, ALIGN) + o_s[:, None]


@triton.jit
def step_to(o_c, channel, ALIGN: tl.constexpr):
    """The offsets of channels."""
    return o_c.to(tl.int64) * aligned(channel, ALIGN)


@triton.jit(do_not_specialize_on_alignment=["S", "x_sample", "x_channel", "y_sample", "y_channel", "blocks"])
def positions_forward(
    p_x, p_y, p_weight, p_bias, p_scale, p_shift, p_mean, p_rstd, S, x_sample, x_channel, y_sample, y_channel, blocks,
    eps: tl.float64, activation_parameter: tl.float64,
    RMS: tl.constexpr, VALUE: tl.constexpr, ALPHA: tl.constexpr, K: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The statistics, stored where somebody wants them, and the output of BLOCK_S positions."""
    dtype: tl.constexpr = compute_dtype(p_x.dtype.element_ty)
    WIDE: tl.constexpr = p_x.dtype.element_ty.primitive_bitwidth > 16  # as in held_moments
    HELD: tl.constexpr = BLOCK_C >= K
    parameters = Parameters(p_weight, p_bias, p_scale, p_shift)
    n, o_s, m_s, o_unit = positions_of(S, blocks, ALIGN, BLOCK_S)
    o_c = tl.arange(0, BLOCK_C)[None, :]
    p_in, p_out = p_x + begin_of(n, o_s, x_sample, ALIGN), p_y + begin_of(n, o_s, y_sample, ALIGN)
    count = tl.full((), K, dtype)
    if HELD:
        mask = m_s[:, None] & (o_c < K)
        b_x = tl.load(p_in + step_to(o_c, x_channel, ALIGN), mask, 0.0).to(dtype)
        if RMS:
            m2 = tl.sum(b_x * b_x, 1)
            mean = tl.zeros_like(m2)
        else:
            mean, m2 = held_moments(b_x, mask, None, None, count, True, WIDE)
    else:
        mean = tl.zeros((BLOCK_S, BLOCK_C), dtype)
        m2 = tl.zeros((BLOCK_S, BLOCK_C), dtype)
        if not RMS:  # deviations from the first channel: (its distance from the mean)**2 is below K times the variance
            pivot = tl.load(p_in, m_s[:, None], 0.0).to(dtype)
        for c in tl.range(0, K, BLOCK_C):
            mask = m_s[:, None] & (o_c < K - c)
            b_x = tl.load(p_in + step_to(c + o_c, x_channel, ALIGN), mask, 0.0).to(dtype)
            if RMS:
                m2 = tl.fma(b_x, b_x, m2)
            else:
                b_x -= pivot
                delta = tl.where(mask, b_x - mean, 0.0)
                mean = tl.fma(delta, tl.full((), 1.0, dtype) / (c // BLOCK_C + 1), mean)
                m2 = tl.fma(delta, b_x - mean, m2)
        if RMS:
            m2 = tl.sum(m2, 1)
            mean = tl.zeros_like(m2)
        else:
            held = ((K - o_c + BLOCK_C - 1) // BLOCK_C).to(dtype)
            mean, m2 = merge_lanes(mean, m2, held + tl.zeros_like(mean), 1)
            mean += tl.sum(pivot, 1)
    rstd = inverse_deviation(m2 / count, eps)
    if p_mean is not None:
        tl.store(p_mean + o_unit, mean, m_s)
    if p_rstd is not None:
        tl.store(p_rstd + o_unit, rstd, m_s)
    alpha = alpha_of(activation_parameter, ALPHA, dtype)
    for c in tl.range(0, K, BLOCK_C):
        m_c = o_c < K - c
        mask = m_s[:, None] & m_c
        if not HELD:
            b_x = tl.load(p_in + step_to(c + o_c, x_channel, ALIGN), mask, 0.0).to(dtype)
        gain, offset = affine(parameters, n * K + c + o_c, c + o_c, m_c, dtype)
        b_y = VALUE(normalized(b_x - mean[:, None], gain * rstd[:, None], offset), alpha)
        tl.store(p_out + step_to(c + o_c, y_channel, ALIGN), b_y.to(p_y.dtype.element_ty), mask)


@triton.jit
def gradient_at(
    grads, inputs, parameters, n, o_c, m_s, mean, rstd, alpha, dtype: tl.constexpr,
    DERIVATIVE: tl.constexpr, K: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """dz and xhat of a tile, the weight of its channels, and its mask."""
    m_c = o_c < K
    mask = m_s[:, None] & m_c
    b_dy = tl.load(grads.begin + step_to(o_c, grads.step, ALIGN), mask, 0.0)
    b_x = tl.load(inputs.begin + step_to(o_c, inputs.step, ALIGN), mask, 0.0)
    gain, offset = affine(parameters, n * K + o_c, o_c, m_c, dtype)
    inverse = rstd[:, None]
    dz, xhat = gradient_of(b_dy, b_x, None, mean[:, None], inverse, gain * inverse, offset, alpha, DERIVATIVE)
    return dz, xhat, gain, mask


@triton.jit
def store_gradient(outputs, dz, xhat, gain, mask, o_c, mean_p, mean_q, rstd, ALIGN: tl.constexpr):
    b_dx = (tl.fma(dz, gain, -xhat * mean_q[:, None]) - mean_p[:, None]) * rstd[:, None]
    p_out = outputs.begin + step_to(o_c, outputs.step, ALIGN)
    tl.store(p_out, b_dx.to(p_out.dtype.element_ty), mask)


@triton.jit(
    do_not_specialize_on_alignment=[
        "S", "dy_sample", "dy_channel", "x_sample", "x_channel", "dx_sample", "dx_channel", "blocks",
    ]
)  # fmt: skip
def positions_backward(
    p_dy, p_x, p_dx, p_weight, p_bias, p_scale, p_shift, p_mean, p_rstd, p_partials, p_grad_weight, p_grad_bias,
    S, dy_sample, dy_channel, x_sample, x_channel, dx_sample, dx_channel, blocks, activation_parameter: tl.float64,
    OVERLAP: tl.constexpr, DERIVATIVE: tl.constexpr, ALPHA: tl.constexpr, BIAS: tl.constexpr, K: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """grad_input of BLOCK_S positions, and the sums of p and q over these."""
    dtype: tl.constexpr = p_rstd.dtype.element_ty
    HELD: tl.constexpr = BLOCK_C >= K
    SUMS: tl.constexpr = p_partials is not None or p_grad_weight is not None or p_grad_bias is not None
    parameters = Parameters(p_weight, p_bias, p_scale, p_shift)
    n, o_s, m_s, o_unit = positions_of(S, blocks, ALIGN, BLOCK_S)
    share, shares = tl.program_id(0), tl.num_programs(0)
    o_lane = tl.arange(0, BLOCK_C)
    o_c = o_lane[None, :]
    grads = Channels(p_dy + begin_of(n, o_s, dy_sample, ALIGN), dy_channel)
    inputs = Channels(p_x + begin_of(n, o_s, x_sample, ALIGN), x_channel)
    alpha = alpha_of(activation_parameter, ALPHA, dtype)
    rstd = tl.load(p_rstd + o_unit, m_s, 0.0)
    mean = tl.load(p_mean + o_unit, m_s, 0.0) if p_mean is not None else tl.zeros_like(rstd)
    if HELD:
        dz, xhat, gain, mask = gradient_at(
            grads, inputs, parameters, n, o_c, m_s, mean, rstd, alpha, dtype, DERIVATIVE, K, ALIGN
        )
        if SUMS:
            p, q = tl.reduce((dz, dz * xhat), 0, add_pair)
            store_sums(p_partials, p_grad_weight, p_grad_bias, p, q, share, shares, o_lane, K, BIAS)
        total_p, total_q = dz * gain, dz * gain * xhat
    else:
        total_p = tl.zeros((BLOCK_S, BLOCK_C), dtype)
        total_q = tl.zeros((BLOCK_S, BLOCK_C), dtype)
        for c in tl.range(0, K, BLOCK_C):
            b_dz, b_xhat, b_gain, _ = gradient_at(
                grads, inputs, parameters, n, c + o_c, m_s, mean, rstd, alpha, dtype, DERIVATIVE, K, ALIGN
            )
            total_p = tl.fma(b_dz, b_gain, total_p)
            total_q = tl.fma(b_dz * b_gain, b_xhat, total_q)
            if SUMS:
                p, q = tl.reduce((b_dz, b_dz * b_xhat), 0, add_pair)
                store_sums(p_partials, p_grad_weight, p_grad_bias, p, q, share, shares, c + o_lane, K, BIAS)
    if OVERLAP:
        gdc_launch_dependents()
    if p_dx is not None:
        outputs = Channels(p_dx + begin_of(n, o_s, dx_sample, ALIGN), dx_channel)
        sum_p, sum_q = tl.reduce((total_p, total_q), 1, add_pair)
        mean_p, mean_q = sum_p / K, sum_q / K
        if p_mean is None:
            mean_p = tl.zeros_like(mean_q)
        if HELD:
            store_gradient(outputs, dz, xhat, gain, mask, o_c, mean_p, mean_q, rstd, ALIGN)
        else:
            for c in tl.range(0, K, BLOCK_C):
                b_dz, b_xhat, b_gain, b_mask = gradient_at(
                    grads, inputs, parameters, n, c + o_c, m_s, mean, rstd, alpha, dtype, DERIVATIVE, K, ALIGN
                )
                store_gradient(outputs, b_dz, b_xhat, b_gain, b_mask, c + o_c, mean_p, mean_q, rstd, ALIGN)
