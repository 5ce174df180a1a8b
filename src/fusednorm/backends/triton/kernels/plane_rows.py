"""The backward of channels of samples that follow one another in memory, one to a program, in steps.

A program reads its channel from memory for the sums p and q, and from the L1 or the L2 for the gradient of the input:
the channels in work at a time are few enough for that.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fusednorm.backends.triton.kernels.addressing import aligned
from fusednorm.backends.triton.kernels.aggregates import Parameters
from fusednorm.backends.triton.kernels.held import store_sums_of_samples, times_scale
from fusednorm.backends.triton.kernels.moments import add_pair
from fusednorm.backends.triton.kernels.tiles import affine, alpha_of, gradient_of


@triton.jit(do_not_specialize=["length"], do_not_specialize_on_alignment=["C", "dy_channel", "x_channel", "dx_channel"])
def plane_rows_backward(
    p_dy, p_x, p_dx, p_weight, p_bias, p_scale, p_shift, p_mean, p_rstd, p_partials,
    p_grad_weight, p_grad_bias, p_grad_scale, p_grad_shift, C, length, dy_channel, x_channel, dx_channel, sums,
    activation_parameter: tl.float64,
    OVERLAP: tl.constexpr, DERIVATIVE: tl.constexpr, ALPHA: tl.constexpr, EVEN: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The input's gradient of one channel, the gradients of its scale and shift, and those of weight and bias, or their
    partials p and q where there are several samples. EVEN: BLOCK_K divides ``length``."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    dtype: tl.constexpr = p_rstd.dtype.element_ty
    parameters = Parameters(p_weight, p_bias, p_scale, p_shift)
    size = aligned(length, ALIGN)
    o_unit = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)[:, None]
    o_c, m_c = o_unit % C, o_unit >= 0
    o_k = tl.arange(0, BLOCK_K)[None, :]
    p_grad = p_dy + o_unit * aligned(dy_channel, ALIGN) + o_k
    p_in = p_x + o_unit * aligned(x_channel, ALIGN) + o_k
    rstd, mean = tl.load(p_rstd + o_unit), tl.load(p_mean + o_unit)
    gain, offset = affine(parameters, o_unit, o_c, m_c, dtype)
    alpha = alpha_of(activation_parameter, ALPHA, dtype)
    p = tl.zeros((1, BLOCK_K), dtype)
    q = tl.zeros((1, BLOCK_K), dtype)
    for k in tl.range(0, size, BLOCK_K):
        mask = tl.full((1, BLOCK_K), True, tl.int1) if EVEN else o_k < size - k
        b_dy = tl.load(p_grad + k, mask, 0.0, eviction_policy="evict_last")
        b_x = tl.load(p_in + k, mask, 0.0, eviction_policy="evict_last")
        dz, xhat = gradient_of(b_dy, b_x, None, mean, rstd, gain * rstd, offset, alpha, DERIVATIVE)
        p += dz
        q = tl.fma(dz, xhat, q)
    total_p, total_q = tl.reduce((p, q), 1, add_pair, keep_dims=True)
    store_sums_of_samples(
        total_p, total_q, parameters, p_partials, p_grad_scale, p_grad_shift, sums, o_c, o_unit, m_c, dtype
    )
    if p_grad_weight is not None or p_grad_bias is not None:
        b_p, b_q = times_scale(total_p, total_q, parameters, o_unit, m_c, dtype)
        if p_grad_weight is not None:
            tl.store(p_grad_weight + o_c, b_q.to(p_grad_weight.dtype.element_ty), m_c)
        if p_grad_bias is not None:
            tl.store(p_grad_bias + o_c, b_p.to(p_grad_bias.dtype.element_ty), m_c)
    if p_dx is not None:
        p_out = p_dx + o_unit * aligned(dx_channel, ALIGN) + o_k
        total_p, total_q = total_p * gain / size, total_q * gain / size
        for k in tl.range(0, size, BLOCK_K):
            mask = tl.full((1, BLOCK_K), True, tl.int1) if EVEN else o_k < size - k
            b_dy = tl.load(p_grad + k, mask, 0.0, eviction_policy="evict_first")
            b_x = tl.load(p_in + k, mask, 0.0, eviction_policy="evict_first")
            dz, xhat = gradient_of(b_dy, b_x, None, mean, rstd, gain * rstd, offset, alpha, DERIVATIVE)
            b_dx = (tl.fma(dz, gain, xhat * -total_q) - total_p) * rstd
            tl.store(p_out + k, b_dx.to(p_dx.dtype.element_ty), mask, eviction_policy="evict_first")
