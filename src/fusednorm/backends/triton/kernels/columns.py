"""channels_first where the channels of each position have statistics of their own.

A program takes BLOCK_S neighbouring positions of one sample: a tile of positions by BLOCK_C channels, contiguous along
the positions. It reads its elements once where the tile holds all K channels, and twice where it walks over them.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fusednorm.backends.triton.kernels.added import behind, load_sum
from fusednorm.backends.triton.kernels.addressing import aligned, divided
from fusednorm.backends.triton.kernels.aggregates import Added, AddedGradients, Channels, Numbers, Parameters
from fusednorm.backends.triton.kernels.moments import (
    add_pair,
    compute_dtype,
    held_moments,
    inverse_deviation,
    merge_lanes,
    saved_statistics,
)
from fusednorm.backends.triton.kernels.rows import store_sums
from fusednorm.backends.triton.kernels.tiles import affine, alpha_of, gradient_of, normalized


@triton.jit
def positions_of(S, blocks, by_blocks, ALIGN: tl.constexpr, BLOCK_S: tl.constexpr):
    """The sample of a program, its positions, which of them there are, and where their statistics are."""
    n, block = divided(tl.program_id(0), blocks, by_blocks)
    n = n.to(tl.int64)
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


@triton.jit
def offsets_of_positions(n, o_s, o_c, sample, channel, ALIGN: tl.constexpr):
    """The offsets of channels at positions."""
    return begin_of(n, o_s, sample, ALIGN) + step_to(o_c, channel, ALIGN)


@triton.jit
def behind_positions(added, n, o_s, o_c, mask, ALIGN: tl.constexpr):
    """post_add of channels at positions, or None."""
    b_behind = None
    if added.behind is not None:
        o_behind = offsets_of_positions(n, o_s, o_c, added.behind_sample, added.behind_channel, ALIGN)
        b_behind = tl.load(added.behind + o_behind, mask, 0.0)
    return b_behind


@triton.jit
def load_positions(p_x, added, n, o_s, o_c, m_s, x_channel, K: tl.constexpr, ALIGN: tl.constexpr, dtype: tl.constexpr):
    """s = x + gate pre_add of channels at positions."""
    m_c = o_c < K
    mask = m_s[:, None] & m_c
    p_before, b_gate = None, None
    if added.before is not None:
        o_before = offsets_of_positions(n, o_s, o_c, added.before_sample, added.before_channel, ALIGN)
        p_before = added.before + o_before
    if added.gate is not None:
        b_gate = tl.load(added.gate + n * K + o_c, m_c, 0.0).to(dtype)
    return load_sum(p_x + step_to(o_c, x_channel, ALIGN), p_before, Numbers(b_gate, None), mask, "", dtype)


@triton.jit
def normalize_positions(
    p_x, p_y, parameters, p_mean, p_rstd, added, S, x_sample, x_channel, y_sample, y_channel, blocks, by_blocks,
    eps, activation_parameter,
    OVERLAP: tl.constexpr, RMS: tl.constexpr, VALUE: tl.constexpr, ALPHA: tl.constexpr, K: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The statistics, stored where somebody wants them, and the output of BLOCK_S positions.

    s is stored where somebody wants it. A walk over the channels makes it again for the output, from x and pre_add in
    the L2: a program's own stores would need a barrier before it could read them.
    """
    if OVERLAP:
        gdc_wait()
    dtype: tl.constexpr = compute_dtype(p_x.dtype.element_ty)
    WIDE: tl.constexpr = p_x.dtype.element_ty.primitive_bitwidth > 16  # as in held_moments
    HELD: tl.constexpr = BLOCK_C >= K
    n, o_s, m_s, o_unit = positions_of(S, blocks, by_blocks, ALIGN, BLOCK_S)
    o_c = tl.arange(0, BLOCK_C)[None, :]
    p_in, p_out = p_x + begin_of(n, o_s, x_sample, ALIGN), p_y + begin_of(n, o_s, y_sample, ALIGN)
    count = tl.full((), K, dtype)
    if HELD:
        mask = m_s[:, None] & (o_c < K)
        b_s = load_positions(p_in, added, n, o_s, o_c, m_s, x_channel, K, ALIGN, dtype)
        if added.total is not None:
            tl.store(added.total + offsets_of_positions(n, o_s, o_c, y_sample, y_channel, ALIGN), b_s, mask)
        b_x = b_s.to(dtype)
        if RMS:
            m2 = tl.sum(b_x * b_x, 1)
            mean = tl.zeros_like(m2)
        else:
            mean, m2 = held_moments(b_x, mask, None, None, count, True, WIDE)
    else:
        mean = tl.zeros((BLOCK_S, BLOCK_C), dtype)
        m2 = tl.zeros((BLOCK_S, BLOCK_C), dtype)
        if not RMS:  # deviations from the first channel: (its distance from the mean)**2 is below K times the variance
            o_first = tl.zeros((1, 1), tl.int32)
            pivot = load_positions(p_in, added, n, o_s, o_first, m_s, x_channel, K, ALIGN, dtype).to(dtype)
        for c in tl.range(0, K, BLOCK_C):
            mask = m_s[:, None] & (o_c < K - c)
            b_s = load_positions(p_in, added, n, o_s, c + o_c, m_s, x_channel, K, ALIGN, dtype)
            if added.total is not None:
                tl.store(added.total + offsets_of_positions(n, o_s, c + o_c, y_sample, y_channel, ALIGN), b_s, mask)
            b_x = b_s.to(dtype)
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
            b_x = load_positions(p_in, added, n, o_s, c + o_c, m_s, x_channel, K, ALIGN, dtype).to(dtype)
        b_behind = behind_positions(added, n, o_s, c + o_c, mask, ALIGN)
        gain, offset = affine(parameters, n * K + c + o_c, c + o_c, m_c, dtype)
        b_y = VALUE(behind(normalized(b_x - mean[:, None], gain * rstd[:, None], offset), b_behind), alpha)
        tl.store(p_out + step_to(c + o_c, y_channel, ALIGN), b_y.to(p_y.dtype.element_ty), mask)


@triton.jit(
    do_not_specialize_on_alignment=["S", "x_sample", "x_channel", "y_sample", "y_channel", "blocks", "by_blocks"]
)
def positions_forward(
    p_x, p_y, p_weight, p_bias, p_scale, p_shift, p_mean, p_rstd, S, x_sample, x_channel, y_sample, y_channel, blocks,
    by_blocks: tl.int64,
    eps: tl.float64, activation_parameter: tl.float64,
    OVERLAP: tl.constexpr, RMS: tl.constexpr, VALUE: tl.constexpr, ALPHA: tl.constexpr, K: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """:func:`normalize_positions` with nothing around the norm."""
    normalize_positions(
        p_x, p_y, Parameters(p_weight, p_bias, p_scale, p_shift), p_mean, p_rstd,
        Added(None, None, None, None, None, 1, 1, 1, 1, 1, 1, 1, 1), S, x_sample, x_channel, y_sample, y_channel,
        blocks, by_blocks, eps, activation_parameter, OVERLAP, RMS, VALUE, ALPHA, K, ALIGN, BLOCK_S, BLOCK_C,
    )  # fmt: skip


@triton.jit
def gradient_at(
    grads, inputs, parameters, added, n, o_s, o_c, m_s, mean, rstd, alpha, dtype: tl.constexpr,
    DERIVATIVE: tl.constexpr, K: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """dz and xhat of a tile, the weight of its channels, and its mask."""
    m_c = o_c < K
    mask = m_s[:, None] & m_c
    b_dy = tl.load(grads.begin + step_to(o_c, grads.step, ALIGN), mask, 0.0)
    b_x = tl.load(inputs.begin + step_to(o_c, inputs.step, ALIGN), mask, 0.0)
    b_behind = behind_positions(added, n, o_s, o_c, mask, ALIGN)
    gain, offset = affine(parameters, n * K + o_c, o_c, m_c, dtype)
    inverse = rstd[:, None]
    dz, xhat = gradient_of(b_dy, b_x, b_behind, mean[:, None], inverse, gain * inverse, offset, alpha, DERIVATIVE)
    return dz, xhat, gain, mask


@triton.jit
def store_gradient(
    outputs, inputs, added, n, o_s, dz, xhat, gain, mask, o_c, x_sample, dx_sample, mean_p, mean_q, rstd,
    ALIGN: tl.constexpr,
):  # fmt: skip
    """dx, to which the gradient is added that the sum has got from elsewhere, and dz as the gradient of post_add."""
    b_dx = (tl.fma(dz, gain, xhat * -mean_q[:, None]) - mean_p[:, None]) * rstd[:, None]
    p_out = outputs.begin + step_to(o_c, outputs.step, ALIGN)
    b_more = None
    if added.grad_total is not None:
        o_more = offsets_of_positions(n, o_s, o_c, x_sample, inputs.step, ALIGN)
        b_more = tl.load(added.grad_total + o_more, mask, 0.0)
    tl.store(p_out, behind(b_dx, b_more).to(p_out.dtype.element_ty), mask)
    if added.grad_behind is not None:
        o_behind = offsets_of_positions(n, o_s, o_c, dx_sample, outputs.step, ALIGN)
        tl.store(added.grad_behind + o_behind, dz.to(p_out.dtype.element_ty), mask)


@triton.jit
def gradients_of_positions(
    p_dy, p_x, p_dx, parameters, p_mean, p_rstd, added, p_partials, p_grad_weight, p_grad_bias,
    S, dy_sample, dy_channel, x_sample, x_channel, dx_sample, dx_channel, blocks, by_blocks, activation_parameter,
    OVERLAP: tl.constexpr, DERIVATIVE: tl.constexpr, ALPHA: tl.constexpr, BIAS: tl.constexpr, K: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """grad_input of BLOCK_S positions, and the sums of p and q over these."""
    if OVERLAP:
        gdc_wait()
    dtype: tl.constexpr = p_rstd.dtype.element_ty
    HELD: tl.constexpr = BLOCK_C >= K
    SUMS: tl.constexpr = p_partials is not None or p_grad_weight is not None or p_grad_bias is not None
    n, o_s, m_s, o_unit = positions_of(S, blocks, by_blocks, ALIGN, BLOCK_S)
    share, shares = tl.program_id(0), tl.num_programs(0)
    o_lane = tl.arange(0, BLOCK_C)
    o_c = o_lane[None, :]
    grads = Channels(p_dy + begin_of(n, o_s, dy_sample, ALIGN), dy_channel)
    inputs = Channels(p_x + begin_of(n, o_s, x_sample, ALIGN), x_channel)
    alpha = alpha_of(activation_parameter, ALPHA, dtype)
    mean, rstd = saved_statistics(p_mean, p_rstd, o_unit, m_s)
    if HELD:
        dz, xhat, gain, mask = gradient_at(
            grads, inputs, parameters, added, n, o_s, o_c, m_s, mean, rstd, alpha, dtype, DERIVATIVE, K, ALIGN
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
                grads, inputs, parameters, added, n, o_s, c + o_c, m_s, mean, rstd, alpha, dtype, DERIVATIVE, K, ALIGN
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
            store_gradient(
                outputs, inputs, added, n, o_s, dz, xhat, gain, mask, o_c, x_sample, dx_sample, mean_p, mean_q, rstd,
                ALIGN,
            )  # fmt: skip
        else:
            for c in tl.range(0, K, BLOCK_C):
                b_dz, b_xhat, b_gain, b_mask = gradient_at(
                    grads, inputs, parameters, added, n, o_s, c + o_c, m_s, mean, rstd, alpha, dtype, DERIVATIVE, K,
                    ALIGN,
                )  # fmt: skip
                store_gradient(
                    outputs, inputs, added, n, o_s, b_dz, b_xhat, b_gain, b_mask, c + o_c, x_sample, dx_sample, mean_p,
                    mean_q, rstd, ALIGN,
                )  # fmt: skip


@triton.jit(
    do_not_specialize_on_alignment=[
        "S", "dy_sample", "dy_channel", "x_sample", "x_channel", "dx_sample", "dx_channel", "blocks", "by_blocks",
    ]
)  # fmt: skip
def positions_backward(
    p_dy, p_x, p_dx, p_weight, p_bias, p_scale, p_shift, p_mean, p_rstd, p_partials, p_grad_weight, p_grad_bias,
    S, dy_sample, dy_channel, x_sample, x_channel, dx_sample, dx_channel, blocks, by_blocks: tl.int64,
    activation_parameter: tl.float64,
    OVERLAP: tl.constexpr, DERIVATIVE: tl.constexpr, ALPHA: tl.constexpr, BIAS: tl.constexpr, K: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """:func:`gradients_of_positions` with nothing around the norm."""
    gradients_of_positions(
        p_dy, p_x, p_dx, Parameters(p_weight, p_bias, p_scale, p_shift), p_mean, p_rstd,
        AddedGradients(None, None, None, 1, 1, 1), p_partials, p_grad_weight, p_grad_bias,
        S, dy_sample, dy_channel, x_sample, x_channel, dx_sample, dx_channel, blocks, by_blocks, activation_parameter,
        OVERLAP, DERIVATIVE, ALPHA, BIAS, K, ALIGN, BLOCK_S, BLOCK_C,
    )  # fmt: skip
