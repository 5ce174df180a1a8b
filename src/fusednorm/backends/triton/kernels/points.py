"""batch_norm of points, (N, C), each with a scale and shift of its own, as one sample of N positions of channels_last.

The moments are those of tiles.py. The kernels here load the scale and shift of each element beside the element, so that
a program takes many points: a sample to a program would be a point. The backward stores the gradients of scale and
shift, which are not sums, in its first pass, and sums p and q with their weights 1 + scale.

Rows of a tile hold REPEAT points, and arguments have the order, as tiles.py says.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fusednorm.backends.triton.kernels.addressing import (
    channels_of_lanes,
    locate,
    mask_of_tile,
    offsets_of,
    steps_of,
)
from fusednorm.backends.triton.kernels.aggregates import Groups, Parameters, Statistics
from fusednorm.backends.triton.kernels.moments import (
    add_pair,
    compute_dtype,
    inverse_deviation_given,
    offsets_of_partials,
)
from fusednorm.backends.triton.kernels.tiles import affine, alpha_of, gradient_of, normalized, statistics_of
from fusednorm.backends.triton.kernels.tiles_backward import through_statistics


@triton.jit
def offsets_of_rows(o_lane, rows, spatial, ALIGN: tl.constexpr):
    return offsets_of(o_lane, rows, steps_of(ALIGN, 1, spatial, ALIGN, True), True)


@triton.jit
def affine_of_points(parameters, o_dense, mask, gain, offset, dtype: tl.constexpr):
    """A = weight (1 + scale) and B = bias (1 + scale) + shift of points, from weight and bias, and 1 + scale."""
    factor = tl.full(mask.shape, 1.0, dtype)
    if parameters.scale is not None:
        factor += tl.load(parameters.scale + o_dense, mask, 0.0).to(dtype)
    offset *= factor
    if parameters.shift is not None:
        offset += tl.load(parameters.shift + o_dense, mask, 0.0).to(dtype)
    return gain * factor, offset, factor


@triton.jit(
    do_not_specialize_on_alignment=[
        "S", "x_spatial", "y_spatial", "blocks", "by_blocks", "chunks", "by_chunks", "programs",
    ],
)  # fmt: skip
def points_apply(
    p_x, p_y, p_weight, p_bias, p_scale, p_shift, p_mean, p_rstd, p_var, p_given_mean, p_given_var,
    C, S, x_spatial, y_spatial, blocks, by_blocks: tl.int64, chunks, by_chunks: tl.int64, programs, eps: tl.float64,
    activation_parameter: tl.float64,
    OVERLAP: tl.constexpr, VALUE: tl.constexpr, ALPHA: tl.constexpr, EVEN: tl.constexpr, ALIGN: tl.constexpr,
    REPEAT: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """The output of one chunk, from its end on, which the pass for the moments has read last. Where the statistics are
    given there is none."""
    if OVERLAP and p_given_var is not None:
        gdc_wait()
    dtype: tl.constexpr = compute_dtype(p_x.dtype.element_ty)
    _, block, chunk = locate(programs - 1 - tl.program_id(0), blocks, by_blocks, chunks, by_chunks, True)
    first = chunk.to(tl.int64) * BLOCK_S * TILES
    o_lane, o_s = block * BLOCK_C + tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_S)
    o_c, m_c = channels_of_lanes(o_lane, C, REPEAT)
    parameters = Parameters(p_weight, p_bias, p_scale, p_shift)
    weight, bias = affine(Parameters(p_weight, p_bias, None, None), o_c, o_c, m_c, dtype)
    if OVERLAP:
        gdc_wait()
    if p_given_var is not None:
        mean = tl.load(p_given_mean + o_c, m_c, 0.0).to(dtype)
        rstd = inverse_deviation_given(tl.load(p_given_var + o_c, m_c, 1.0), eps, dtype)
        leads = o_lane < tl.where(chunk == 0, C, 0)
        if p_rstd is not None:
            tl.store(p_rstd + o_c, rstd, leads)
        if p_mean is not None:
            tl.store(p_mean + o_c, mean, leads)
    else:
        mean, rstd = statistics_of(Statistics(p_mean, p_rstd), Groups(C, 1, C), 0, o_c, m_c, True)
    alpha = alpha_of(activation_parameter, ALPHA, dtype)
    for tile in tl.static_range(TILES):
        rows = first + tile * BLOCK_S + o_s
        mask = mask_of_tile(o_lane, rows, 0, o_lane, o_lane, C, S, EVEN, ALIGN, 1, REPEAT, False, True)
        b_x = tl.load(p_x + offsets_of_rows(o_lane, rows, x_spatial, ALIGN), mask, 0.0).to(dtype)
        o_dense = offsets_of_rows(o_lane, rows, C * REPEAT, ALIGN)
        gain, offset, _ = affine_of_points(parameters, o_dense, mask, weight[None, :], bias[None, :], dtype)
        b_y = VALUE(normalized(b_x - mean[None, :], gain * rstd[None, :], offset), alpha)
        tl.store(p_y + offsets_of_rows(o_lane, rows, y_spatial, ALIGN), b_y.to(p_y.dtype.element_ty), mask)


@triton.jit(
    do_not_specialize_on_alignment=[
        "S", "dy_spatial", "x_spatial", "blocks", "by_blocks", "chunks", "by_chunks", "tiles",
    ],
)  # fmt: skip
def points_reduce(
    p_dy, p_x, p_weight, p_bias, p_scale, p_shift, p_mean, p_rstd, p_partials, p_grad_scale, p_grad_shift,
    C, S, dy_spatial, x_spatial, blocks, by_blocks: tl.int64, chunks, by_chunks: tl.int64, total, tiles,
    activation_parameter: tl.float64,
    OVERLAP: tl.constexpr, DERIVATIVE: tl.constexpr, ALPHA: tl.constexpr, EVEN: tl.constexpr, ALIGN: tl.constexpr,
    REPEAT: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """p = sum (1 + scale) dz and q = sum (1 + scale) dz xhat of each lane over one chunk; the gradients of its points'
    scale, weight dz xhat + bias dz, and shift, dz."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    dtype: tl.constexpr = p_rstd.dtype.element_ty
    _, block, chunk = locate(tl.program_id(0), blocks, by_blocks, chunks, by_chunks, True)
    first = chunk.to(tl.int64) * BLOCK_S * tiles
    o_lane, o_s = block * BLOCK_C + tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_S)
    o_c, m_c = channels_of_lanes(o_lane, C, REPEAT)
    parameters = Parameters(p_weight, p_bias, p_scale, p_shift)
    b_weight, b_bias = affine(Parameters(p_weight, p_bias, None, None), o_c, o_c, m_c, dtype)
    b_mean, b_rstd = statistics_of(Statistics(p_mean, p_rstd), Groups(C, 1, C), 0, o_c, m_c, True)
    weight, bias, mean, rstd = b_weight[None, :], b_bias[None, :], b_mean[None, :], b_rstd[None, :]
    alpha = alpha_of(activation_parameter, ALPHA, dtype)
    p = tl.zeros((BLOCK_S, BLOCK_C), dtype)
    q = tl.zeros_like(p)
    for tile in tl.range(0, tiles, num_stages=STAGES):
        rows = first + tile * BLOCK_S + o_s
        mask = mask_of_tile(o_lane, rows, 0, o_lane, o_lane, C, S, EVEN, ALIGN, 1, REPEAT, False, True)
        b_dy = tl.load(p_dy + offsets_of_rows(o_lane, rows, dy_spatial, ALIGN), mask, 0.0)
        b_x = tl.load(p_x + offsets_of_rows(o_lane, rows, x_spatial, ALIGN), mask, 0.0)
        o_dense = offsets_of_rows(o_lane, rows, C * REPEAT, ALIGN)
        gain, offset, factor = affine_of_points(parameters, o_dense, mask, weight, bias, dtype)
        dz, xhat = gradient_of(b_dy, b_x, None, mean, rstd, gain * rstd, offset, alpha, DERIVATIVE)
        if p_grad_scale is not None:
            b_scale = tl.fma(weight, dz * xhat, bias * dz)  # where dz is 0, it is 0, however large the weight is
            tl.store(p_grad_scale + o_dense, b_scale.to(p_grad_scale.dtype.element_ty), mask)
        if p_grad_shift is not None:
            tl.store(p_grad_shift + o_dense, dz.to(p_grad_shift.dtype.element_ty), mask)
        weighted = factor * dz
        p += weighted
        q = tl.fma(weighted, xhat, q)
    sum_p, sum_q = tl.reduce((p, q), 0, add_pair)
    o_partial = offsets_of_partials(0, chunk, o_lane, C * REPEAT, chunks, True)
    tl.store(p_partials + o_partial, sum_p, m_c)
    tl.store(p_partials + total + o_partial, sum_q, m_c)


@triton.jit(
    do_not_specialize_on_alignment=[
        "S", "dy_spatial", "x_spatial", "dx_spatial", "blocks", "by_blocks", "chunks", "by_chunks", "programs",
    ],
)  # fmt: skip
def points_gradients(
    p_dy, p_x, p_dx, p_weight, p_bias, p_scale, p_shift, p_mean, p_rstd, p_totals,
    C, S, dy_spatial, x_spatial, dx_spatial, blocks, by_blocks: tl.int64, chunks, by_chunks: tl.int64, programs,
    activation_parameter: tl.float64,
    OVERLAP: tl.constexpr, DERIVATIVE: tl.constexpr, ALPHA: tl.constexpr, EVEN: tl.constexpr, ALIGN: tl.constexpr,
    REPEAT: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """dx = rstd (A dz - (P + xhat Q) / K) of one chunk, from P / K and Q / K; without them dx = rstd A dz, and this
    kernel may be the first."""
    if OVERLAP and p_totals is None:
        gdc_wait()
    dtype: tl.constexpr = p_rstd.dtype.element_ty
    _, block, chunk = locate(programs - 1 - tl.program_id(0), blocks, by_blocks, chunks, by_chunks, True)
    first = chunk.to(tl.int64) * BLOCK_S * TILES
    o_lane, o_s = block * BLOCK_C + tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_S)
    o_c, m_c = channels_of_lanes(o_lane, C, REPEAT)
    parameters = Parameters(p_weight, p_bias, p_scale, p_shift)
    weight, bias = affine(Parameters(p_weight, p_bias, None, None), o_c, o_c, m_c, dtype)
    b_mean, b_rstd = statistics_of(Statistics(p_mean, p_rstd), Groups(C, 1, C), 0, o_c, m_c, True)
    mean, rstd = b_mean[None, :], b_rstd[None, :]
    scaled_p, scaled_q = None, None
    if OVERLAP:
        gdc_wait()
    if p_totals is not None:
        scaled_p = rstd * tl.load(p_totals + 2 * o_c, m_c, 0.0)[None, :]
        scaled_q = rstd * tl.load(p_totals + 2 * o_c + 1, m_c, 0.0)[None, :]
    alpha = alpha_of(activation_parameter, ALPHA, dtype)
    for tile in tl.static_range(TILES):
        rows = first + tile * BLOCK_S + o_s
        mask = mask_of_tile(o_lane, rows, 0, o_lane, o_lane, C, S, EVEN, ALIGN, 1, REPEAT, False, True)
        b_dy = tl.load(p_dy + offsets_of_rows(o_lane, rows, dy_spatial, ALIGN), mask, 0.0)
        b_x = tl.load(p_x + offsets_of_rows(o_lane, rows, x_spatial, ALIGN), mask, 0.0)
        o_dense = offsets_of_rows(o_lane, rows, C * REPEAT, ALIGN)
        gain, offset, _ = affine_of_points(parameters, o_dense, mask, weight[None, :], bias[None, :], dtype)
        gain *= rstd
        dz, xhat = gradient_of(b_dy, b_x, None, mean, rstd, gain, offset, alpha, DERIVATIVE)
        b_dx = through_statistics(dz, xhat, gain, scaled_p, scaled_q)
        tl.store(p_dx + offsets_of_rows(o_lane, rows, dx_spatial, ALIGN), b_dx.to(p_dx.dtype.element_ty), mask)
