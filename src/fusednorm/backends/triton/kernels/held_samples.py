"""The backward of held.py in a walk over the samples, whose p and q a program sums in registers.

held.py leaves p and q of each sample and channel in memory, which for few positions are more bytes than the tensors.
A tile has BLOCK_N samples of BLOCK_U units along its first axis.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fusednorm.backends.triton.kernels.addressing import divided
from fusednorm.backends.triton.kernels.aggregates import Parameters, Steps
from fusednorm.backends.triton.kernels.held import (
    channels_of,
    of_channels,
    of_units,
    offsets_of_units,
    rows_and_columns,
    totals,
)
from fusednorm.backends.triton.kernels.moments import add_pair, saved_statistics
from fusednorm.backends.triton.kernels.points import affine_of_points
from fusednorm.backends.triton.kernels.tiles import affine, alpha_of, gradient_of


@triton.jit(
    do_not_specialize=["N", "rows", "steps"],
    do_not_specialize_on_alignment=[
        "columns", "dy_sample", "dy_unit", "dy_row", "x_sample", "x_unit", "x_row", "dx_sample", "dx_unit", "dx_row",
        "blocks", "by_blocks", "chunks",
    ],
)  # fmt: skip
def held_samples_backward(
    p_dy, p_x, p_dx, p_weight, p_bias, p_scale, p_shift, p_mean, p_rstd, p_partials, p_grad_scale, p_grad_shift,
    N, G, C, rows, columns, dy_sample, dy_unit, dy_row, x_sample, x_unit, x_row, dx_sample, dx_unit, dx_row,
    sums, blocks, by_blocks: tl.int64, chunks, steps, activation_parameter: tl.float64,
    OVERLAP: tl.constexpr, DERIVATIVE: tl.constexpr, ALPHA: tl.constexpr, AFFINE: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_U: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    LEADING_R: tl.constexpr, LEADING_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The input's gradient and the gradients of scale and shift of every chunks-th BLOCK_N samples of BLOCK_U units,
    and their p and q times 1 + scale, summed over the steps."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    dtype: tl.constexpr = p_rstd.dtype.element_ty
    ROW: tl.constexpr = AFFINE == 2 and BLOCK_R == 1
    chunk, block = divided(tl.program_id(0), blocks, by_blocks)
    o_u = tl.arange(0, BLOCK_N * BLOCK_U)
    o_n, g = (chunk * BLOCK_N + o_u // BLOCK_U).to(tl.int64), block * BLOCK_U + o_u % BLOCK_U
    m_g = g < G
    dy_steps, x_steps = Steps(dy_sample, dy_unit, dy_row), Steps(x_sample, x_unit, x_row)
    dx_steps = Steps(dx_sample, dx_unit, dx_row)
    o_c, o_partial, m_c = channels_of(
        o_n, g, m_g, rows, columns, C, AFFINE, ALIGN, BLOCK_R, BLOCK_K, LEADING_R, LEADING_K
    )
    parameters = Parameters(p_weight, p_bias, p_scale, p_shift)
    weight, bias = affine(Parameters(p_weight, p_bias, None, None), o_c, o_c, m_c, dtype)
    alpha, count = alpha_of(activation_parameter, ALPHA, dtype), (rows * columns).to(dtype)
    sum_p, sum_q = tl.zeros(o_c.shape, dtype), tl.zeros(o_c.shape, dtype)
    n = o_n
    for _ in tl.range(0, steps, num_stages=STAGES):
        m_u = m_g & (n < N)
        o_r, o_k, mask = rows_and_columns(m_u, rows, columns, False, ALIGN, BLOCK_R, BLOCK_K, LEADING_R, LEADING_K)
        b_dy = tl.load(p_dy + offsets_of_units(n, g, o_r, o_k, dy_steps, False, ALIGN), mask, 0.0)
        b_x = tl.load(p_x + offsets_of_units(n, g, o_r, o_k, x_steps, False, ALIGN), mask, 0.0)
        o_unit = n * G + g
        mean, rstd = saved_statistics(p_mean, p_rstd, o_unit, m_u)
        _, o_modulation, m_modulation = channels_of(
            n, g, m_u, rows, columns, C, AFFINE, ALIGN, BLOCK_R, BLOCK_K, LEADING_R, LEADING_K
        )
        b_gain, b_offset, factor = affine_of_points(parameters, o_modulation, m_modulation, weight, bias, dtype)
        gain, offset, inverse = of_channels(b_gain, AFFINE), of_channels(b_offset, AFFINE), of_units(rstd)
        dz, xhat = gradient_of(b_dy, b_x, None, of_units(mean), inverse, gain * inverse, offset, alpha, DERIVATIVE)
        if AFFINE == 0:
            p, q = totals((dz, dz * xhat))
            total_p, total_q = p * b_gain, q * b_gain
        elif ROW:
            p, q = dz, dz * xhat
            total_p, total_q = totals((p * b_gain, q * b_gain))
        else:
            p, q = tl.reduce((dz, dz * xhat), 1 if AFFINE == 2 else 2, add_pair)
            total_p, total_q = tl.reduce((p * b_gain, q * b_gain), 1, add_pair)
        if p_grad_scale is not None:
            tl.store(
                p_grad_scale + o_modulation, (weight * q + bias * p).to(p_grad_scale.dtype.element_ty), m_modulation
            )
        if p_grad_shift is not None:
            tl.store(p_grad_shift + o_modulation, p.to(p_grad_shift.dtype.element_ty), m_modulation)
        sum_p = tl.fma(p, factor, sum_p)
        sum_q = tl.fma(q, factor, sum_q)
        if p_dx is not None:
            b_dx = tl.fma(dz, gain, xhat * -of_units(total_q / count))
            if p_mean is not None:
                b_dx -= of_units(total_p / count)
            p_out = p_dx + offsets_of_units(n, g, o_r, o_k, dx_steps, False, ALIGN)
            tl.store(p_out, (b_dx * inverse).to(p_dx.dtype.element_ty), mask)
        n += chunks * BLOCK_N
    tl.store(p_partials + o_partial, sum_p, m_c)
    tl.store(p_partials + sums + o_partial, sum_q, m_c)
