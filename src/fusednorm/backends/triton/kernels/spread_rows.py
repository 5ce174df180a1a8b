"""Rows whose elements are spread over processes: what a process does with its part of each row.

A row is a position of a sample, and lies in memory along its elements (LAST) or across them. A tile is BLOCK_S rows of
one sample by BLOCK_K elements. A chunk of a row is ``steps`` tiles, and leaves partial moments, or partial sums, which
ranks.py merges. K is the number of elements that this process has of a row. ALIGN divides every stride but that of
neighbours in memory, and how many of these there are.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fusednorm.backends.triton.kernels.addressing import aligned, no_wider
from fusednorm.backends.triton.kernels.aggregates import Parameters, Steps
from fusednorm.backends.triton.kernels.moments import compute_dtype, merge_lanes, saved_statistics
from fusednorm.backends.triton.kernels.rows import store_sums
from fusednorm.backends.triton.kernels.tiles import affine, alpha_of, gradient_of, normalized


@triton.jit
def steps_of_rows(sample, row, element, ALIGN: tl.constexpr, LAST: tl.constexpr):
    """The strides of a tensor: of samples, of a row's elements, and of rows."""
    if LAST:
        return Steps(aligned(sample, ALIGN), 1, aligned(row, ALIGN))
    else:
        return Steps(aligned(sample, ALIGN), aligned(element, ALIGN), row)


@triton.jit
def offsets_of_rows(n, o_s, o_k, steps):
    return n * steps.sample + o_s[:, None] * steps.spatial + o_k[None, :].to(tl.int64) * steps.channel


@triton.jit
def mask_of_rows(o_s, o_k, end, K: tl.constexpr, ALIGN: tl.constexpr, LAST: tl.constexpr):
    """Which rows before the one at ``end`` and which elements there are in a tile."""
    return (o_s < (end if LAST else aligned(end, ALIGN)))[:, None] & (o_k < K)[None, :]


@triton.jit
def affine_of_elements(parameters, n, o_k, K: tl.constexpr, ALIGN: tl.constexpr, dtype: tl.constexpr):
    """A and B of the elements of a sample's rows, each as a row."""
    o_c = no_wider(o_k, ALIGN)
    gain, offset = affine(parameters, n * K + o_c, o_c, o_k < K, dtype)
    return gain[None, :], offset[None, :]


@triton.jit
def locate_rows(pid, blocks, parts, BLOCK_S: tl.constexpr):
    """The part of a program's rows, the sample, and the rows; neighbouring programs take neighbouring parts."""
    part, block = pid % parts, pid // parts
    return part, (block // blocks).to(tl.int64), (block % blocks).to(tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S)


@triton.jit(
    do_not_specialize=["positions", "total"],
    do_not_specialize_on_alignment=["x_sample", "x_row", "x_element", "blocks", "chunks", "steps"],
)
def row_moments(
    p_x, p_partials, positions, x_sample, x_row, x_element, blocks, chunks, steps, total,
    OVERLAP: tl.constexpr, RMS: tl.constexpr, K: tl.constexpr, LAST: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """mean and M2 of one chunk of BLOCK_S rows."""
    dtype: tl.constexpr = p_partials.dtype.element_ty
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    chunk, n, o_s = locate_rows(tl.program_id(0), blocks, chunks, BLOCK_S)
    x_steps, first = steps_of_rows(x_sample, x_row, x_element, ALIGN, LAST), chunk * steps * BLOCK_K
    o_lane = tl.arange(0, BLOCK_K)
    mean = tl.zeros((BLOCK_S, BLOCK_K), dtype)
    m2 = tl.zeros((BLOCK_S, BLOCK_K), dtype)
    for step in tl.range(0, steps):
        o_k = first + step * BLOCK_K + o_lane
        mask = mask_of_rows(o_s, o_k, positions, K, ALIGN, LAST)
        b_x = tl.load(p_x + offsets_of_rows(n, o_s, o_k, x_steps), mask, 0.0).to(dtype)
        if RMS:
            m2 = tl.fma(b_x, b_x, m2)
        else:
            delta = tl.where(mask, b_x - mean, 0.0)
            mean = tl.fma(delta, tl.full((), 1.0, dtype) / (step + 1), mean)
            m2 = tl.fma(delta, b_x - mean, m2)
    o_partial, m_s = (n * positions + o_s) * chunks + chunk, o_s < positions
    if RMS:
        m2 = tl.sum(m2, 1)
    else:
        held = tl.minimum(tl.maximum((K - first - o_lane + BLOCK_K - 1) // BLOCK_K, 0), steps)
        mean, m2 = merge_lanes(mean, m2, held.to(dtype)[None, :] + tl.zeros_like(mean), 1)
        tl.store(p_partials + o_partial, mean, m_s)
    tl.store(p_partials + total + o_partial, m2, m_s)


@triton.jit(
    do_not_specialize=["positions"],
    do_not_specialize_on_alignment=["x_sample", "x_row", "x_element", "y_sample", "y_row", "y_element", "blocks"],
)
def row_results(
    p_x, p_y, p_weight, p_bias, p_scale, p_shift, p_mean, p_rstd,
    positions, x_sample, x_row, x_element, y_sample, y_row, y_element, blocks, activation_parameter: tl.float64,
    OVERLAP: tl.constexpr, VALUE: tl.constexpr, ALPHA: tl.constexpr, K: tl.constexpr, LAST: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The output of a tile."""
    dtype: tl.constexpr = compute_dtype(p_x.dtype.element_ty)
    column, n, o_s = locate_rows(tl.program_id(0), blocks, tl.cdiv(K, BLOCK_K), BLOCK_S)
    x_steps = steps_of_rows(x_sample, x_row, x_element, ALIGN, LAST)
    y_steps = steps_of_rows(y_sample, y_row, y_element, ALIGN, LAST)
    o_k = column * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = mask_of_rows(o_s, o_k, positions, K, ALIGN, LAST)
    b_x = tl.load(p_x + offsets_of_rows(n, o_s, o_k, x_steps), mask, 0.0).to(dtype)
    gain, offset = affine_of_elements(Parameters(p_weight, p_bias, p_scale, p_shift), n, o_k, K, ALIGN, dtype)
    if OVERLAP:
        gdc_wait()
    mean, rstd = saved_statistics(p_mean, p_rstd, (n * positions + o_s)[:, None], (o_s < positions)[:, None])
    b_y = VALUE(normalized(b_x - mean, gain * rstd, offset), alpha_of(activation_parameter, ALPHA, dtype))
    tl.store(p_y + offsets_of_rows(n, o_s, o_k, y_steps), b_y.to(p_y.dtype.element_ty), mask)


@triton.jit(
    do_not_specialize=["positions", "total"],
    do_not_specialize_on_alignment=[
        "dy_sample", "dy_row", "dy_element", "x_sample", "x_row", "x_element", "blocks", "chunks", "steps",
    ],
)  # fmt: skip
def row_sums(
    p_dy, p_x, p_weight, p_bias, p_scale, p_shift, p_mean, p_rstd, p_partials,
    positions, dy_sample, dy_row, dy_element, x_sample, x_row, x_element, blocks, chunks, steps, total,
    activation_parameter: tl.float64,
    OVERLAP: tl.constexpr, DERIVATIVE: tl.constexpr, ALPHA: tl.constexpr, K: tl.constexpr, LAST: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """P = sum A dz and Q = sum A dz xhat of one chunk of BLOCK_S rows."""
    dtype: tl.constexpr = p_rstd.dtype.element_ty
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    chunk, n, o_s = locate_rows(tl.program_id(0), blocks, chunks, BLOCK_S)
    dy_steps = steps_of_rows(dy_sample, dy_row, dy_element, ALIGN, LAST)
    x_steps = steps_of_rows(x_sample, x_row, x_element, ALIGN, LAST)
    parameters, alpha = Parameters(p_weight, p_bias, p_scale, p_shift), alpha_of(activation_parameter, ALPHA, dtype)
    mean, rstd = saved_statistics(p_mean, p_rstd, (n * positions + o_s)[:, None], (o_s < positions)[:, None])
    p = tl.zeros((BLOCK_S, BLOCK_K), dtype)
    q = tl.zeros((BLOCK_S, BLOCK_K), dtype)
    for step in tl.range(0, steps):
        o_k = (chunk * steps + step) * BLOCK_K + tl.arange(0, BLOCK_K)
        mask = mask_of_rows(o_s, o_k, positions, K, ALIGN, LAST)
        b_dy = tl.load(p_dy + offsets_of_rows(n, o_s, o_k, dy_steps), mask, 0.0)
        b_x = tl.load(p_x + offsets_of_rows(n, o_s, o_k, x_steps), mask, 0.0)
        gain, offset = affine_of_elements(parameters, n, o_k, K, ALIGN, dtype)
        dz, xhat = gradient_of(b_dy, b_x, None, mean, rstd, gain * rstd, offset, alpha, DERIVATIVE)
        p = tl.fma(dz, gain + tl.zeros_like(dz), p)
        q = tl.fma(dz * gain, xhat, q)
    o_partial, m_s = (n * positions + o_s) * chunks + chunk, o_s < positions
    tl.store(p_partials + o_partial, tl.sum(p, 1), m_s)
    tl.store(p_partials + total + o_partial, tl.sum(q, 1), m_s)


@triton.jit(
    do_not_specialize=["positions"],
    do_not_specialize_on_alignment=[
        "dy_sample", "dy_row", "dy_element", "x_sample", "x_row", "x_element", "dx_sample", "dx_row", "dx_element",
        "shares", "steps",
    ],
)  # fmt: skip
def row_gradients(
    p_dy, p_x, p_totals, p_dx, p_weight, p_bias, p_scale, p_shift, p_mean, p_rstd, p_partials, p_grad_weight,
    p_grad_bias, positions, dy_sample, dy_row, dy_element, x_sample, x_row, x_element, dx_sample, dx_row, dx_element,
    shares, steps, activation_parameter: tl.float64,
    OVERLAP: tl.constexpr, DERIVATIVE: tl.constexpr, ALPHA: tl.constexpr, BIAS: tl.constexpr, K: tl.constexpr,
    LAST: tl.constexpr, ALIGN: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """grad_input of BLOCK_K elements of ``steps`` times BLOCK_S rows, from P / K and Q / K of whole rows, and the sums
    of p and q over these rows. A sample has so many ``shares`` of its rows."""
    dtype: tl.constexpr = p_rstd.dtype.element_ty
    SUMS: tl.constexpr = p_partials is not None or p_grad_weight is not None or p_grad_bias is not None
    columns: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    column, share = tl.program_id(0) % columns, tl.program_id(0) // columns
    n, first = (share // shares).to(tl.int64), (share % shares).to(tl.int64) * steps * BLOCK_S
    dy_steps = steps_of_rows(dy_sample, dy_row, dy_element, ALIGN, LAST)
    x_steps = steps_of_rows(x_sample, x_row, x_element, ALIGN, LAST)
    dx_steps = steps_of_rows(dx_sample, dx_row, dx_element, ALIGN, LAST)
    alpha, o_k = alpha_of(activation_parameter, ALPHA, dtype), column * BLOCK_K + tl.arange(0, BLOCK_K)
    gain, offset = affine_of_elements(Parameters(p_weight, p_bias, p_scale, p_shift), n, o_k, K, ALIGN, dtype)
    p = tl.zeros((BLOCK_S, BLOCK_K), dtype)
    q = tl.zeros((BLOCK_S, BLOCK_K), dtype)
    if OVERLAP:
        gdc_wait()
    for step in tl.range(0, steps):
        o_s = first + step * BLOCK_S + tl.arange(0, BLOCK_S)
        mask, m_s = mask_of_rows(o_s, o_k, positions, K, ALIGN, LAST), o_s < positions
        b_dy = tl.load(p_dy + offsets_of_rows(n, o_s, o_k, dy_steps), mask, 0.0)
        b_x = tl.load(p_x + offsets_of_rows(n, o_s, o_k, x_steps), mask, 0.0)
        mean, rstd = saved_statistics(p_mean, p_rstd, (n * positions + o_s)[:, None], m_s[:, None])
        dz, xhat = gradient_of(b_dy, b_x, None, mean, rstd, gain * rstd, offset, alpha, DERIVATIVE)
        if p_dx is not None:
            p_total = p_totals + 2 * (n * positions + o_s)
            b_dx = tl.fma(dz, gain + tl.zeros_like(dz), xhat * -tl.load(p_total + 1, m_s, 0.0)[:, None])
            if p_mean is not None:
                b_dx -= tl.load(p_total, m_s, 0.0)[:, None]
            tl.store(p_dx + offsets_of_rows(n, o_s, o_k, dx_steps), (b_dx * rstd).to(p_dx.dtype.element_ty), mask)
        if SUMS:
            q = tl.fma(dz, xhat, q)
            if BIAS:
                p += dz
    if OVERLAP:
        gdc_launch_dependents()
    if SUMS:
        parts = tl.num_programs(0) // columns
        store_sums(p_partials, p_grad_weight, p_grad_bias, tl.sum(p, 0), tl.sum(q, 0), share, parts, o_k, K, BIAS)
