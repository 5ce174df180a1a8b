"""Rows: units of one group and one position, with weight and bias along the row.

Where each position of channels_last has statistics of its own, a row is a position, and ``positions`` rows make a
sample, which may have a scale and a shift. A tensor then has a stride of samples and one of rows; with one position a
row is a sample.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fusednorm.backends.triton.kernels.added import behind
from fusednorm.backends.triton.kernels.addressing import aligned, no_wider
from fusednorm.backends.triton.kernels.aggregates import AddedGradients, GatedGradients, Parameters
from fusednorm.backends.triton.kernels.codes import store_codes
from fusednorm.backends.triton.kernels.moments import (
    add_pair,
    compute_dtype,
    inverse_deviation,
    merge_lanes,
    saved_statistics,
)
from fusednorm.backends.triton.kernels.tiles import affine, alpha_of, gradient_of, normalized


@triton.jit
def begin_of_rows(n, positions, sample, row, ALIGN: tl.constexpr):
    """The offsets of rows."""
    return n // positions * aligned(sample, ALIGN) + n % positions * aligned(row, ALIGN)


@triton.jit(
    do_not_specialize=["C", "length"],
    do_not_specialize_on_alignment=["positions", "x_sample", "x_row", "y_sample", "y_row"],
)
def rows_forward(
    p_x, p_y, p_weight, p_bias, p_scale, p_shift, p_mean, p_rstd, p_var, p_out_scale, C, length, positions,
    x_sample, x_row, y_sample, y_row, eps: tl.float64, activation_parameter: tl.float64,
    OVERLAP: tl.constexpr, RMS: tl.constexpr, VALUE: tl.constexpr, ALPHA: tl.constexpr, K: tl.constexpr,
    EVEN: tl.constexpr, ALIGN: tl.constexpr, BLOCK_K: tl.constexpr, OUT: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """One row in steps of BLOCK_K, read from memory for its statistics and from the L1 for its output.

    With a whole row in registers a multiprocessor would hold fewer programs, with fewer bytes on their way.

    K is None where the row is one of a sample's C channels, with one weight and bias: its ``length`` is an argument,
    since each image may have another one. EVEN: BLOCK_K divides it. OUT: the 8-bit format of an output with a given
    scale (codes.py), or None.
    """
    if OVERLAP:
        gdc_wait()
    dtype: tl.constexpr = compute_dtype(p_x.dtype.element_ty)
    parameters = Parameters(p_weight, p_bias, p_scale, p_shift)
    n = tl.program_id(0).to(tl.int64)
    size = aligned(length, ALIGN) if K is None else K
    o_k = tl.arange(0, BLOCK_K)[None, :]
    p_in = p_x + begin_of_rows(n, positions, x_sample, x_row, ALIGN) + o_k
    p_out = p_y + begin_of_rows(n, positions, y_sample, y_row, ALIGN) + o_k
    mean = tl.zeros((1, BLOCK_K), dtype)
    m2 = tl.zeros((1, BLOCK_K), dtype)
    for k in tl.range(0, size, BLOCK_K):
        mask = tl.full((1, BLOCK_K), True, tl.int1) if EVEN else o_k < size - k
        b_x = tl.load(p_in + k, mask, 0.0, eviction_policy="evict_last").to(dtype)
        if RMS:
            m2 = tl.fma(b_x, b_x, m2)
        else:
            delta = tl.where(mask, b_x - mean, 0.0)
            mean = tl.fma(delta, tl.full((), 1.0, dtype) / (k // BLOCK_K + 1), mean)
            m2 = tl.fma(delta, b_x - mean, m2)
    if RMS:
        variance = tl.sum(m2, 1) / size
        mean = tl.zeros_like(variance)
    else:
        count = (size - o_k + BLOCK_K - 1) // BLOCK_K
        mean, m2 = merge_lanes(mean, m2, count.to(dtype), 1)
        variance = m2 / size
        if p_mean is not None:
            tl.store(p_mean + n + tl.arange(0, 1), mean)
    rstd = inverse_deviation(variance, eps)
    if p_rstd is not None:
        tl.store(p_rstd + n + tl.arange(0, 1), rstd)
    if p_var is not None:
        tl.store(p_var + n + tl.arange(0, 1), variance)
    if K is None:
        unit = n + tl.arange(0, 1)[None, :]
        gain, offset = affine(parameters, unit, unit % C, unit >= 0, dtype)
    for k in tl.range(0, size, BLOCK_K):
        mask = tl.full((1, BLOCK_K), True, tl.int1) if EVEN else o_k < size - k
        b_x = tl.load(p_in + k, mask, 0.0, eviction_policy="evict_first").to(dtype)
        if K is not None:
            o_c = no_wider(k + o_k, ALIGN)
            gain, offset = affine(parameters, n // positions * K + o_c, o_c, mask, dtype)
        b_z = normalized(b_x - mean[:, None], gain * rstd[:, None], offset)
        b_y = VALUE(b_z, alpha_of(activation_parameter, ALPHA, dtype))
        if OUT is None:
            tl.store(p_out + k, b_y.to(p_y.dtype.element_ty), mask, eviction_policy="evict_first")
        else:
            store_codes(p_out + k, b_y, mask, p_out_scale, n, True, OUT, False, NATIVE)


@triton.jit
def store_sums(p_partials, p_grad_weight, p_grad_bias, b_p, b_q, share, shares, o_k, K, BIAS: tl.constexpr):
    """The sums of p and q over a share of the rows: partials, or of the only share the parameters' gradients."""
    m_k = (o_k >= 0) & (o_k < K)
    if p_partials is not None:
        o_partial = share.to(tl.int64) * K + o_k
        tl.store(p_partials + shares.to(tl.int64) * K + o_partial, b_q, m_k)
        if BIAS:
            tl.store(p_partials + o_partial, b_p, m_k)
    if p_grad_weight is not None:
        tl.store(p_grad_weight + o_k, b_q.to(p_grad_weight.dtype.element_ty), m_k)
    if p_grad_bias is not None:
        tl.store(p_grad_bias + o_k, b_p.to(p_grad_bias.dtype.element_ty), m_k)


@triton.jit
def lanes_of_rows(n, sample, rows, K: tl.constexpr, WINDOW: tl.constexpr, BLOCK_K: tl.constexpr):
    """The lanes that hold elements of rows, those to load and those to store by whole windows.

    A row's windows begin at the last aligned address before it. They may hold elements of the rows before and after it,
    but no memory beyond the last row.
    """
    o_lane = tl.arange(0, BLOCK_K)[None, :]
    if WINDOW == 1:
        held = (o_lane < K) & (n < rows)
        return held, held, held
    else:
        low, window = (n * sample % WINDOW).to(tl.int32), aligned(o_lane, WINDOW)
        held = (o_lane >= low) & (o_lane < low + K) & (n < rows)
        ends = window + WINDOW <= low + K
        loaded = (window < low + K) & ((n < rows - 1) | (ends & (n < rows)))
        return held, loaded, (window >= low) & ends & (n < rows)


@triton.jit
def load_rows(p_rows, held, loaded, last, dtype: tl.constexpr, K: tl.constexpr, WINDOW: tl.constexpr):
    """Rows of a tile, 0 where there is none. ``last``: whether the last row may be among them, whose last window is
    loaded by an element.

    Zeros that come with the row, from where it waits, are data to the compiler. Those made here are not: of lanes that
    are empty in all rows it keeps nothing in registers, and computes nothing.
    """
    b = tl.load(p_rows, loaded, 0.0)
    if WINDOW > 1:
        if last:
            b = tl.load(p_rows, held & (loaded == 0), b)
        return tl.where(held, b, 0.0)
    else:
        return tl.where(tl.arange(0, b.shape[1])[None, :] < K, b.to(dtype), 0.0)


@triton.jit
def rows_of_share(share, rows, span, shares, EACH: tl.constexpr):
    """The rows of a share: its place among the shares of these, how many shares they have, the first row and the one
    behind the last, and which span it is. EACH: so many shares are of one span of rows, and otherwise all of all rows.
    """
    if EACH:
        place = (share // shares).to(tl.int64)
        return share % shares, shares, place * span, (place + 1) * span, place
    else:
        return share, tl.num_programs(0), 0, rows, 0


@triton.jit
def store_rows(p_rows, b, held, stored, WINDOW: tl.constexpr):
    """Rows of a tile, whole windows first."""
    tl.store(p_rows, b, stored)
    if WINDOW > 1:
        tl.store(p_rows, b, held & (stored == 0))


@triton.jit
def behind_rows(
    added, n, positions, o_lane, held, loaded, last, dtype: tl.constexpr, ALIGN: tl.constexpr, K: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """post_add of rows, or None."""
    b_behind = None
    if added.behind is not None:
        o_row = begin_of_lanes(n, positions, added.behind_sample, added.behind_spatial, ALIGN, WINDOW)
        b_behind = load_rows(added.behind + o_row + o_lane, held, loaded, last, dtype, K, WINDOW)
    return b_behind


@triton.jit
def gate_of_rows(gated, n, o_k, m_column, dtype: tl.constexpr, PER_ELEMENT: tl.constexpr):
    """The gate of the span of rows that begins with row n: a number for each element, or one for all."""
    p_gate = gated.gate + n // gated.rows * gated.step
    if PER_ELEMENT:
        return tl.load(p_gate + o_k, m_column, 0.0).to(dtype)
    else:
        return tl.load(p_gate).to(dtype)


@triton.jit
def store_gate_sums(p_sums, b_g, share, o_k, K: tl.constexpr, PER_ELEMENT: tl.constexpr):
    """The sums of pre_add ds over a share of the rows, for each element, or over the elements too."""
    if PER_ELEMENT:
        tl.store(p_sums + share.to(tl.int64) * K + o_k, b_g.to(p_sums.dtype.element_ty), o_k < K)
    else:
        tl.store(p_sums + share, tl.sum(b_g, 0).to(p_sums.dtype.element_ty))


@triton.jit
def first_pair(a, b, c, d):
    """A reduction of pairs that are alike."""
    return a, b


@triton.jit
def affine_of_rows(
    parameters, first, o_k, m_column, dtype: tl.constexpr,
    WINDOW: tl.constexpr, BLOCK_U: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A and B of the columns of a tile, whose scale and shift begin at ``first``.

    Each row loads them, and those of the first one are kept: one row alone, which has fewer elements than the threads
    load of the tile, would have another layout, and the compiler would compute in both: layer_norm's backward of (N,
    112) in bf16 had 675 instructions in a step, and has 435, of (N, 32) 991 and 378.
    """
    if WINDOW > 1:
        return affine(parameters, first + o_k, o_k, m_column, dtype)
    else:
        o_tile = tl.broadcast_to(o_k, (BLOCK_U, BLOCK_K))
        return tl.reduce(affine(parameters, first + o_tile, o_tile, m_column, dtype), 0, first_pair, keep_dims=True)


@triton.jit
def gradients_of_rows(
    p_dy, p_x, p_dx, parameters, p_mean, p_rstd, added, gated, p_partials, p_grad_weight, p_grad_bias,
    rows, positions, span, shares, dy_sample, dy_row, x_sample, x_row, dx_sample, dx_row, steps, activation_parameter,
    OVERLAP: tl.constexpr, DERIVATIVE: tl.constexpr, ALPHA: tl.constexpr, BIAS: tl.constexpr, K: tl.constexpr,
    ALIGN: tl.constexpr, WINDOW: tl.constexpr, BLOCK_U: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    RELOAD: tl.constexpr, EACH: tl.constexpr, PER_ELEMENT: tl.constexpr,
):  # fmt: skip
    """grad_input of BLOCK_U rows in each of ``steps`` steps, and the sums of p and q over these rows. In each step the
    rows of all programs, or with EACH of the programs of a span of rows, are neighbours. A sample that has a scale or
    shift is a span or several.

    RELOAD: the sums fill the registers, so a program reads a row again, from the L1, once it knows P and Q. The rows of
    a program follow one another.

    With windows BLOCK_U is 1, and a lane has one column in all steps, since the rows of a program lie alike in their
    windows.

    With sums around the norm the input is the sum, and grad_input includes the gradient that the sum has got from
    elsewhere. Of a product before the norm the gradients of both factors are made, where they are wanted: a span of
    rows has one gate, and the sums of pre_add times grad_input over these rows are stored too.
    """
    if OVERLAP:
        gdc_wait()
    dtype: tl.constexpr = p_rstd.dtype.element_ty
    SUMS: tl.constexpr = p_partials is not None or p_grad_weight is not None or p_grad_bias is not None
    pid = tl.program_id(0)
    share, together, begin, end, sample = rows_of_share(pid, rows, span, shares, EACH)
    if gated.gate is not None:
        sample = begin // positions
    o_lane = tl.arange(0, BLOCK_K)[None, :]
    alpha = alpha_of(activation_parameter, ALPHA, dtype)
    p = tl.zeros((BLOCK_U, BLOCK_K), dtype)
    q = tl.zeros((BLOCK_U, BLOCK_K), dtype)
    g = tl.zeros((BLOCK_U, BLOCK_K), dtype)
    if RELOAD:
        first, stride = share * steps, 1
    else:
        first, stride = share, together
    n = begin + (first * BLOCK_U + tl.arange(0, BLOCK_U))[:, None].to(tl.int64)
    o_k = no_wider(o_lane, ALIGN)
    if WINDOW > 1:
        o_k = o_lane - (n * x_sample % WINDOW).to(tl.int32)
    m_column = o_lane < K if WINDOW == 1 else (o_k >= 0) & (o_k < K)
    if not RELOAD:
        gain, offset = affine_of_rows(parameters, sample * K, o_k, m_column, dtype, WINDOW, BLOCK_U, BLOCK_K)
    for step in tl.range(0, steps, num_stages=STAGES):
        m_n = n < end
        mask, loaded, stored = lanes_of_rows(n, x_sample, end, K, WINDOW, BLOCK_K)
        last = (first + step * stride + 1) * BLOCK_U >= rows
        p_grad = p_dy + begin_of_lanes(n, positions, dy_sample, dy_row, ALIGN, WINDOW) + o_lane
        p_in = p_x + begin_of_lanes(n, positions, x_sample, x_row, ALIGN, WINDOW) + o_lane
        b_dy = load_rows(p_grad, mask, loaded, last, dtype, K, WINDOW)
        b_x = load_rows(p_in, mask, loaded, last, dtype, K, WINDOW)
        b_behind = behind_rows(added, n, positions, o_lane, mask, loaded, last, dtype, ALIGN, K, WINDOW)
        b_more = None  # of the gradient of the sum
        if added.grad_total is not None:
            p_more = added.grad_total + begin_of_lanes(n, positions, x_sample, x_row, ALIGN, WINDOW) + o_lane
            b_more = load_rows(p_more, mask, loaded, last, dtype, K, WINDOW)
        if gated.before is not None:
            o_before = begin_of_lanes(n, positions, gated.before_sample, gated.before_row, ALIGN, WINDOW) + o_lane
            b_before = load_rows(gated.before + o_before, mask, loaded, last, dtype, K, WINDOW)
        mean, rstd = saved_statistics(p_mean, p_rstd, n, m_n)
        if RELOAD:
            gain, offset = affine(parameters, sample * K + o_k, o_k, m_column, dtype)
        dz, xhat = gradient_of(b_dy, b_x, b_behind, mean, rstd, gain * rstd, offset, alpha, DERIVATIVE)
        if p_dx is not None:
            if p_mean is not None:
                total_p, total_q = tl.reduce((dz * gain, dz * gain * xhat), 1, add_pair)
            else:
                total_q = tl.sum(dz * gain * xhat, 1)
            if RELOAD:
                b_dy = tl.load(p_grad, mask, 0.0, eviction_policy="evict_first")
                b_x = tl.load(p_in, mask, 0.0, eviction_policy="evict_first")
                b_behind = behind_rows(added, n, positions, o_lane, mask, loaded, last, dtype, ALIGN, K, WINDOW)
                gain, offset = affine(parameters, sample * K + o_k, o_k, m_column, dtype)
                dz, xhat = gradient_of(b_dy, b_x, b_behind, mean, rstd, gain * rstd, offset, alpha, DERIVATIVE)
            b_dx = tl.fma(dz, gain, xhat * -(total_q / K)[:, None])
            if p_mean is not None:
                b_dx -= (total_p / K)[:, None]
            b_dx = behind(b_dx * rstd, b_more)
            o_out = begin_of_lanes(n, positions, dx_sample, dx_row, ALIGN, WINDOW) + o_lane
            store_rows(p_dx + o_out, b_dx.to(p_dx.dtype.element_ty), mask, stored, WINDOW)
            if added.grad_behind is not None:
                store_rows(added.grad_behind + o_out, dz.to(p_dx.dtype.element_ty), mask, stored, WINDOW)
            if gated.grad_before is not None:
                b_gate = gate_of_rows(gated, begin, o_k, m_column, dtype, PER_ELEMENT)
                store_rows(gated.grad_before + o_out, (b_dx * b_gate).to(p_dx.dtype.element_ty), mask, stored, WINDOW)
            if gated.before is not None:
                g = tl.fma(b_dx, b_before.to(dtype), g)
        if SUMS:
            q = tl.fma(dz, xhat, q)
            if BIAS:
                p += dz
        n += BLOCK_U * stride
    if OVERLAP:
        gdc_launch_dependents()
    if gated.sums is not None:
        store_gate_sums(gated.sums, tl.sum(g, 0), pid, tl.arange(0, BLOCK_K), K, PER_ELEMENT)
    if SUMS:
        programs, o_c = tl.num_programs(0), tl.arange(0, BLOCK_K)
        if WINDOW > 1:
            o_c -= (pid.to(tl.int64) * x_sample % WINDOW).to(tl.int32)
        store_sums(p_partials, p_grad_weight, p_grad_bias, tl.sum(p, 0), tl.sum(q, 0), pid, programs, o_c, K, BIAS)


@triton.jit(
    do_not_specialize=["rows"],
    do_not_specialize_on_alignment=[
        "positions", "shares", "dy_sample", "dy_row", "x_sample", "x_row", "dx_sample", "dx_row", "steps",
    ],
)  # fmt: skip
def rows_backward(
    p_dy, p_x, p_dx, p_weight, p_bias, p_scale, p_shift, p_mean, p_rstd, p_partials, p_grad_weight, p_grad_bias,
    rows, positions, shares, dy_sample, dy_row, x_sample, x_row, dx_sample, dx_row, steps,
    activation_parameter: tl.float64,
    OVERLAP: tl.constexpr, DERIVATIVE: tl.constexpr, ALPHA: tl.constexpr, BIAS: tl.constexpr, K: tl.constexpr,
    ALIGN: tl.constexpr, WINDOW: tl.constexpr, BLOCK_U: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    RELOAD: tl.constexpr,
):  # fmt: skip
    """:func:`gradients_of_rows` with nothing around the norm."""
    EACH: tl.constexpr = p_scale is not None or p_shift is not None
    gradients_of_rows(
        p_dy, p_x, p_dx, Parameters(p_weight, p_bias, p_scale, p_shift), p_mean, p_rstd,
        AddedGradients(None, None, None, 1, 1, 1), GatedGradients(None, None, None, None, 1, 1, 1, 1), p_partials,
        p_grad_weight, p_grad_bias, rows, positions, positions, shares, dy_sample, dy_row, x_sample, x_row, dx_sample,
        dx_row, steps, activation_parameter, OVERLAP, DERIVATIVE, ALPHA, BIAS, K, ALIGN, WINDOW, BLOCK_U, BLOCK_K,
        STAGES, RELOAD, EACH, False,
    )  # fmt: skip


@triton.jit
def begin_of_lanes(n, positions, sample, row, ALIGN: tl.constexpr, WINDOW: tl.constexpr):
    """The offsets of rows, or of the windows in which they begin, each row a sample."""
    if WINDOW == 1:
        return begin_of_rows(n, positions, sample, row, ALIGN)
    else:
        return aligned(n * sample, WINDOW)


@triton.jit(do_not_specialize_on_alignment=["positions", "dy_sample", "dy_row", "x_sample", "x_row", "chunks"])
def row_totals(
    p_dy, p_x, p_weight, p_bias, p_scale, p_shift, p_mean, p_rstd, p_totals, positions, dy_sample, dy_row, x_sample,
    x_row, chunks,
    activation_parameter: tl.float64,
    OVERLAP: tl.constexpr, DERIVATIVE: tl.constexpr, ALPHA: tl.constexpr, K: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """P / K and Q / K of every chunk-th step of one row, in steps of BLOCK_K."""
    dtype: tl.constexpr = p_rstd.dtype.element_ty
    parameters = Parameters(p_weight, p_bias, p_scale, p_shift)
    n, chunk = (tl.program_id(0) // chunks).to(tl.int64), tl.program_id(0) % chunks
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    o_k = tl.arange(0, BLOCK_K)
    alpha = alpha_of(activation_parameter, ALPHA, dtype)
    rstd = tl.load(p_rstd + n)
    mean = tl.load(p_mean + n) if p_mean is not None else tl.zeros_like(rstd)
    p = tl.zeros((BLOCK_K,), dtype)
    q = tl.zeros((BLOCK_K,), dtype)
    p_grad = p_dy + begin_of_rows(n, positions, dy_sample, dy_row, ALIGN)
    p_in = p_x + begin_of_rows(n, positions, x_sample, x_row, ALIGN)
    for k in tl.range(chunk * BLOCK_K, K, chunks * BLOCK_K):
        mask = o_k < K - k
        b_dy, b_x = tl.load(p_grad + k + o_k, mask, 0.0), tl.load(p_in + k + o_k, mask, 0.0)
        o_c = no_wider(k + o_k, ALIGN)
        gain, offset = affine(parameters, n // positions * K + o_c, o_c, mask, dtype)
        dz, xhat = gradient_of(b_dy, b_x, None, mean, rstd, gain * rstd, offset, alpha, DERIVATIVE)
        p = tl.fma(dz, gain, p)
        q = tl.fma(dz * gain, xhat, q)
    o_total = 2 * (n * chunks + chunk)
    tl.store(p_totals + o_total, tl.sum(p, 0) / K)
    tl.store(p_totals + o_total + 1, tl.sum(q, 0) / K)


@triton.jit(
    do_not_specialize=["rows"],
    do_not_specialize_on_alignment=[
        "positions", "shares", "dy_sample", "dy_row", "x_sample", "x_row", "dx_sample", "dx_row", "steps", "chunks",
    ],
)  # fmt: skip
def columns_backward(
    p_dy, p_x, p_dx, p_weight, p_bias, p_scale, p_shift, p_mean, p_rstd, p_totals, p_partials, p_grad_weight,
    p_grad_bias, rows, positions, shares, dy_sample, dy_row, x_sample, x_row, dx_sample, dx_row, steps, chunks,
    activation_parameter: tl.float64,
    OVERLAP: tl.constexpr, DERIVATIVE: tl.constexpr, ALPHA: tl.constexpr, BIAS: tl.constexpr, K: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_J: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """grad_input of BLOCK_K columns of ``steps`` rows from P / K and Q / K of the rows' chunks, and the sums of p and
    q. Without P and Q this kernel is the first."""
    if OVERLAP and p_totals is None:
        gdc_wait()
    dtype: tl.constexpr = p_rstd.dtype.element_ty
    SUMS: tl.constexpr = p_partials is not None or p_grad_weight is not None or p_grad_bias is not None
    MODULATED: tl.constexpr = p_scale is not None or p_shift is not None
    parameters = Parameters(p_weight, p_bias, p_scale, p_shift)
    blocks: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    block, part = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    share, _, begin, end, sample = rows_of_share(part, rows, positions, shares, MODULATED)
    o_k = block * BLOCK_K + tl.arange(0, BLOCK_K)
    m_k = o_k < K
    alpha = alpha_of(activation_parameter, ALPHA, dtype)
    o_c = no_wider(o_k, ALIGN)
    gain, offset = affine(parameters, sample * K + o_c, o_c, m_k, dtype)
    p = tl.zeros((BLOCK_K,), dtype)
    q = tl.zeros((BLOCK_K,), dtype)
    if OVERLAP:
        gdc_wait()
    n = begin + (share * steps + tl.arange(0, 1)).to(tl.int64)
    for _step in tl.range(0, steps, num_stages=STAGES):
        m_n = n < end
        mask = m_n & m_k
        b_dy = tl.load(p_dy + begin_of_rows(n, positions, dy_sample, dy_row, ALIGN) + o_k, mask, 0.0)
        b_x = tl.load(p_x + begin_of_rows(n, positions, x_sample, x_row, ALIGN) + o_k, mask, 0.0)
        mean, rstd = saved_statistics(p_mean, p_rstd, n, m_n)
        dz, xhat = gradient_of(b_dy, b_x, None, mean, rstd, gain * rstd, offset, alpha, DERIVATIVE)
        if p_dx is not None:
            o_j = tl.arange(0, BLOCK_J)
            p_total, m_j = p_totals + 2 * (n * chunks + o_j), m_n & (o_j < chunks)
            b_dx = tl.fma(dz, gain, xhat * -tl.sum(tl.load(p_total + 1, m_j, 0.0), 0))
            if p_mean is not None:
                b_dx -= tl.sum(tl.load(p_total, m_j, 0.0), 0)
            p_out = p_dx + begin_of_rows(n, positions, dx_sample, dx_row, ALIGN) + o_k
            tl.store(p_out, (b_dx * rstd).to(p_dx.dtype.element_ty), mask)
        if SUMS:
            q = tl.fma(dz, xhat, q)
            if BIAS:
                p += dz
        n += 1
    if OVERLAP:
        gdc_launch_dependents()
    if SUMS:
        parts = tl.num_programs(0) // blocks
        store_sums(p_partials, p_grad_weight, p_grad_bias, p, q, part, parts, o_k, K, BIAS)
