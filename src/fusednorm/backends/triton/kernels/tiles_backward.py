"""The backward of tiles.py: p and q per channel and chunk, then the parameters' gradients and the input's gradient."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fusednorm.backends.triton.kernels.added import behind
from fusednorm.backends.triton.kernels.addressing import (
    bounds_of,
    channels_of_lanes,
    ends_of,
    has_whole_rows,
    lanes_of_whole_rows,
    locate,
    mask_of_tile,
    offsets_of_ends,
    offsets_of_tile,
    steps_of,
    tile_of,
    whole_steps,
    wide_of,
)
from fusednorm.backends.triton.kernels.aggregates import (
    AddedGradients,
    Groups,
    Parameters,
    Partials,
    Statistics,
)
from fusednorm.backends.triton.kernels.moments import add_pair, offsets_of_partials, partials_of
from fusednorm.backends.triton.kernels.tiles import (
    affine,
    affine_of_channels,
    alpha_of,
    gradient_of,
    statistics_of,
    units_of,
)


@triton.jit
def behind_tile(
    added, wide, o_lane, o_s, first, S,
    ALIGN: tl.constexpr, WINDOW: tl.constexpr, REPEAT: tl.constexpr, ACROSS: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """The strides of post_add, and pointers to its first tile."""
    steps = steps_of(added.behind_sample, added.behind_channel, added.behind_spatial, ALIGN, LAST)
    offsets = offsets_of_tile(wide, o_lane, o_s, first, S, steps, WINDOW, REPEAT, ACROSS, LAST)
    return steps, added.behind + offsets


@triton.jit
def sum_rows(
    p, q, r, p_grad, p_in, p_behind, p_dz, mask, row, dy_steps, x_steps, behind_steps, dx_steps,
    mean, inverse, gain, offset, alpha, DERIVATIVE: tl.constexpr, NUMBERS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """p, q and, with NUMBERS, r of lanes with a tile that begins ``row`` positions behind the pointers. EVEN: there are
    all positions of the tile; of lanes that there are not, nothing is stored."""
    wide = wide_of(row)
    b_dy = tl.load(p_grad + wide * dy_steps.spatial, mask, 0.0)
    b_x = tl.load(p_in + wide * x_steps.spatial, mask, 0.0)
    b_behind = None if p_behind is None else tl.load(p_behind + wide * behind_steps.spatial, mask, 0.0)
    dz, xhat = gradient_of(b_dy, b_x, b_behind, mean, inverse, gain, offset, alpha, DERIVATIVE)
    if p_dz is not None:
        tl.store(p_dz + wide * dx_steps.spatial, dz.to(b_dy.dtype), mask)
    if NUMBERS:
        r += xhat if EVEN else tl.where(mask, xhat, 0.0)
    return p + dz, tl.fma(dz, xhat, q), r


@triton.jit
def folded(b_lanes, C, REPEAT: tl.constexpr):
    """The sums over the positions of a row of several, by channels."""
    POSITIONS: tl.constexpr = triton.next_power_of_2(REPEAT)
    CHANNELS: tl.constexpr = triton.next_power_of_2(b_lanes.shape[0] // REPEAT)
    o_position, o_c = tl.arange(0, POSITIONS)[:, None], tl.arange(0, CHANNELS)[None, :]
    mask = (o_position < REPEAT) & (o_c < C)
    o_lane = tl.where(mask, o_position * C + o_c, 0).reshape(POSITIONS * CHANNELS)
    return tl.sum(tl.where(mask, tl.gather(b_lanes, o_lane, 0).reshape(POSITIONS, CHANNELS), 0.0), 0)


@triton.jit
def reduce_chunk(
    n, block, chunk, p_dy, p_x, parameters, p_mean, p_rstd, p_partials, added,
    G, D, C, S, dy_sample, dy_channel, dy_spatial, x_sample, x_channel, x_spatial, dx_sample, dx_channel, dx_spatial,
    chunks, total, tiles, activation_parameter,
    DERIVATIVE: tl.constexpr, ALPHA: tl.constexpr, SHARED: tl.constexpr,
    PER_BATCH: tl.constexpr, LAST: tl.constexpr, EVEN: tl.constexpr, ALIGN: tl.constexpr, WINDOW: tl.constexpr,
    REPEAT: tl.constexpr, ACROSS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, DEPTH: tl.constexpr,
    STAGES: tl.constexpr, FOLD: tl.constexpr, NUMBERS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """p = sum dz and q = sum dz xhat of each channel over one chunk, in steps of DEPTH times BLOCK_S positions. dz is
    stored where it is wanted, as the gradient of post_add, with the strides of dx. NUMBERS: and r = sum xhat. FOLD: the
    positions of a row, which is one block, are summed too."""
    ENDS: tl.constexpr = (WINDOW > 1 or ACROSS) and not WHOLE
    dtype: tl.constexpr = p_rstd.dtype.element_ty
    groups = Groups(G, D, C)
    dy_steps = steps_of(dy_sample, dy_channel, dy_spatial, ALIGN, LAST)
    x_steps = steps_of(x_sample, x_channel, x_spatial, ALIGN, LAST)
    span = BLOCK_S * DEPTH * tiles - WINDOW + 1
    first = chunk.to(tl.int64) * span
    o_lane, o_s = block * BLOCK_C + tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_S)
    o_c, m_c = channels_of_lanes(o_lane, C, REPEAT)
    wide = n.to(tl.int64)
    p_grad = p_dy + offsets_of_tile(wide, o_lane, o_s, first, S, dy_steps, WINDOW, REPEAT, ACROSS, LAST)
    p_in = p_x + offsets_of_tile(wide, o_lane, o_s, first, S, x_steps, WINDOW, REPEAT, ACROSS, LAST)
    p_behind, p_dz, behind_steps, dx_steps = None, None, x_steps, x_steps
    if added.behind is not None:
        behind_steps, p_behind = behind_tile(added, wide, o_lane, o_s, first, S, ALIGN, WINDOW, REPEAT, ACROSS, LAST)
    if added.grad_behind is not None:
        dx_steps = steps_of(dx_sample, dx_channel, dx_spatial, ALIGN, LAST)
        p_dz = added.grad_behind + offsets_of_tile(wide, o_lane, o_s, first, S, dx_steps, WINDOW, REPEAT, ACROSS, LAST)
    low, high = bounds_of(wide, o_c, first, span, C, S, x_steps, WINDOW, REPEAT, ACROSS)
    if ENDS:
        o_end, m_end = ends_of(o_lane, first, span, low, high, C, ALIGN, WINDOW, REPEAT, ACROSS)
        b_dy_end = tl.load(
            p_dy + offsets_of_ends(wide, o_lane, o_end, first, S, dy_steps, WINDOW, REPEAT, ACROSS), m_end, 0.0
        )
        b_x_end = tl.load(
            p_x + offsets_of_ends(wide, o_lane, o_end, first, S, x_steps, WINDOW, REPEAT, ACROSS), m_end, 0.0
        )
        b_behind_end = None
        if added.behind is not None:
            o_behind = offsets_of_ends(wide, o_lane, o_end, first, S, behind_steps, WINDOW, REPEAT, ACROSS)
            b_behind_end = tl.load(added.behind + o_behind, m_end, 0.0)
    b_mean, rstd = statistics_of(Statistics(p_mean, p_rstd), groups, n, o_c, m_c, PER_BATCH)
    b_gain, b_offset = affine_of_channels(parameters, wide * C, o_c, m_c, D, SHARED, ALIGN, LAST, dtype)
    mean, _ = tile_of(b_mean, o_s, LAST)
    inverse, _ = tile_of(rstd, o_s, LAST)
    gain, _ = tile_of(b_gain * rstd, o_s, LAST)
    offset, _ = tile_of(b_offset, o_s, LAST)
    alpha = alpha_of(activation_parameter, ALPHA, dtype)
    p = tl.zeros((BLOCK_S, BLOCK_C) if LAST else (BLOCK_C, BLOCK_S), dtype)
    q = tl.zeros_like(p)
    r = tl.zeros_like(p)
    head, whole = 0, 0
    if LAST:
        head, whole = whole_steps(first, low, high, C, S, tiles, BLOCK_S * DEPTH, EVEN or WHOLE, REPEAT, ACROSS)
        m_row = lanes_of_whole_rows(o_lane, C, ALIGN, REPEAT)
        for tile in tl.range(head, whole, num_stages=STAGES):
            for u in tl.static_range(DEPTH):
                row = (tile * DEPTH + u) * BLOCK_S
                p, q, r = sum_rows(
                    p, q, r, p_grad, p_in, p_behind, p_dz, m_row, row, dy_steps, x_steps, behind_steps, dx_steps,
                    mean, inverse, gain, offset, alpha, DERIVATIVE, NUMBERS, True,
                )  # fmt: skip
    if not ((LAST and EVEN) or WHOLE):
        for index in tl.range(0, tiles - (whole - head), num_stages=STAGES):
            tile = tl.where(index < head, index, index + (whole - head))
            for u in tl.static_range(DEPTH):
                row = (tile * DEPTH + u) * BLOCK_S
                mask = mask_of_tile(
                    o_lane, o_s + row, first, low, high, C, S, EVEN, ALIGN, WINDOW, REPEAT, ACROSS, LAST
                )
                p, q, r = sum_rows(
                    p, q, r, p_grad, p_in, p_behind, p_dz, mask, row, dy_steps, x_steps, behind_steps, dx_steps,
                    mean, inverse, gain, offset, alpha, DERIVATIVE, NUMBERS, EVEN,
                )  # fmt: skip
    sum_p, sum_q = tl.reduce((p, q), 0 if LAST else 1, add_pair)
    if ENDS:
        dz, xhat = gradient_of(b_dy_end, b_x_end, b_behind_end, mean, inverse, gain, offset, alpha, DERIVATIVE)
        if added.grad_behind is not None:
            o_dz = offsets_of_ends(wide, o_lane, o_end, first, S, dx_steps, WINDOW, REPEAT, ACROSS)
            tl.store(added.grad_behind + o_dz, dz.to(p_dy.dtype.element_ty), m_end)
        end_p, end_q = tl.reduce((dz, dz * xhat), 0 if ACROSS else 1, add_pair)
        sum_p += end_p
        sum_q += end_q
    if NUMBERS:
        sum_r = tl.sum(r, 0 if LAST else 1)
        if ENDS:
            sum_r += tl.sum(tl.where(m_end, xhat, 0.0), 0 if ACROSS else 1)
    o_sum, m_sum, lanes = o_lane, m_c, C * REPEAT
    if FOLD:
        sum_p, sum_q, lanes = folded(sum_p, C, REPEAT), folded(sum_q, C, REPEAT), C
        o_sum = tl.arange(0, sum_p.shape[0])
        m_sum = o_sum < C
        if NUMBERS:
            sum_r = folded(sum_r, C, REPEAT)
    o_partial = offsets_of_partials(wide, chunk, o_sum, lanes, chunks, LAST)
    tl.store(p_partials + o_partial, sum_p, m_sum)
    tl.store(p_partials + total + o_partial, sum_q, m_sum)
    if NUMBERS:
        tl.store(p_partials + 2 * total + o_partial, sum_r, m_sum)


@triton.jit
def reduce_tiles(
    p_dy, p_x, parameters, p_mean, p_rstd, p_partials, added,
    G, D, C, S, dy_sample, dy_channel, dy_spatial, x_sample, x_channel, x_spatial, dx_sample, dx_channel, dx_spatial,
    blocks, by_blocks, chunks, by_chunks, total, tiles, activation_parameter,
    OVERLAP: tl.constexpr, DERIVATIVE: tl.constexpr, ALPHA: tl.constexpr, SHARED: tl.constexpr,
    PER_BATCH: tl.constexpr, LAST: tl.constexpr, EVEN: tl.constexpr, ALIGN: tl.constexpr, WINDOW: tl.constexpr,
    REPEAT: tl.constexpr, ACROSS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, DEPTH: tl.constexpr,
    STAGES: tl.constexpr, FOLD: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    """:func:`reduce_chunk` of a program."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    n, block, chunk = locate(tl.program_id(0), blocks, by_blocks, chunks, by_chunks, LAST)
    if REPEAT > 1 and has_whole_rows(n, chunk, BLOCK_S * DEPTH * tiles, C, S, REPEAT, ACROSS):
        reduce_chunk(
            n, block, chunk, p_dy, p_x, parameters, p_mean, p_rstd, p_partials, added, G, D, C, S, dy_sample,
            dy_channel, dy_spatial, x_sample, x_channel, x_spatial, dx_sample, dx_channel, dx_spatial, chunks, total,
            tiles, activation_parameter, DERIVATIVE, ALPHA, SHARED, PER_BATCH, LAST, EVEN, ALIGN, WINDOW, REPEAT,
            ACROSS, BLOCK_C, BLOCK_S, DEPTH, STAGES, FOLD, NUMBERS, True,
        )  # fmt: skip
    else:
        reduce_chunk(
            n, block, chunk, p_dy, p_x, parameters, p_mean, p_rstd, p_partials, added, G, D, C, S, dy_sample,
            dy_channel, dy_spatial, x_sample, x_channel, x_spatial, dx_sample, dx_channel, dx_spatial, chunks, total,
            tiles, activation_parameter, DERIVATIVE, ALPHA, SHARED, PER_BATCH, LAST, EVEN, ALIGN, WINDOW, REPEAT,
            ACROSS, BLOCK_C, BLOCK_S, DEPTH, STAGES, FOLD, NUMBERS, False,
        )  # fmt: skip


@triton.jit(
    do_not_specialize_on_alignment=[
        "S", "dy_sample", "dy_channel", "dy_spatial", "x_sample", "x_channel", "x_spatial", "blocks", "by_blocks",
        "chunks", "by_chunks", "tiles",
    ],
)  # fmt: skip
def reduce(
    p_dy, p_x, p_weight, p_bias, p_scale, p_shift, p_mean, p_rstd, p_partials,
    G, D, C, S, dy_sample, dy_channel, dy_spatial, x_sample, x_channel, x_spatial, blocks, by_blocks: tl.int64,
    chunks, by_chunks: tl.int64,
    total, tiles, activation_parameter: tl.float64,
    OVERLAP: tl.constexpr, DERIVATIVE: tl.constexpr, ALPHA: tl.constexpr, SHARED: tl.constexpr,
    PER_BATCH: tl.constexpr, LAST: tl.constexpr, EVEN: tl.constexpr, ALIGN: tl.constexpr, WINDOW: tl.constexpr,
    REPEAT: tl.constexpr, ACROSS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, DEPTH: tl.constexpr,
    STAGES: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """:func:`reduce_tiles` with nothing behind the norm."""
    reduce_tiles(
        p_dy, p_x, Parameters(p_weight, p_bias, p_scale, p_shift), p_mean, p_rstd, p_partials,
        AddedGradients(None, None, None, 1, 1, 1), G, D, C, S,
        dy_sample, dy_channel, dy_spatial, x_sample, x_channel, x_spatial, 1, 1, 1, blocks, by_blocks, chunks,
        by_chunks, total, tiles,
        activation_parameter,
        OVERLAP, DERIVATIVE, ALPHA, SHARED, PER_BATCH, LAST, EVEN, ALIGN, WINDOW, REPEAT, ACROSS, BLOCK_C, BLOCK_S,
        DEPTH, STAGES, FOLD, False,
    )  # fmt: skip


@triton.jit
def unit_totals(
    partials, parameters, o_unit, m_unit,
    PER_BATCH: tl.constexpr, LAST: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """P = sum A p and Q = sum A q of units."""
    dtype: tl.constexpr = partials.pointer.dtype.element_ty
    total_p = tl.zeros((BLOCK_R * BLOCK_D, o_unit.shape[0]), dtype)
    total_q = tl.zeros((BLOCK_R * BLOCK_D, o_unit.shape[0]), dtype)
    for row in range(0, partials.rows, BLOCK_R):
        for d in range(0, partials.groups.D, BLOCK_D):
            o_partial, mask, _, n, o_c = partials_of(
                partials, o_unit, m_unit, row, d, PER_BATCH, LAST, BLOCK_R, BLOCK_D
            )
            b_p = tl.load(partials.pointer + o_partial, mask, 0.0)
            b_q = tl.load(partials.pointer + partials.total + o_partial, mask, 0.0)
            if parameters.weight is not None:
                weight = tl.load(parameters.weight + o_c, mask, 0.0).to(dtype)
                b_p *= weight
                b_q *= weight
            if parameters.scale is not None:
                factor = 1.0 + tl.load(parameters.scale + n * partials.groups.C + o_c, mask, 0.0).to(dtype)
                b_p *= factor
                b_q *= factor
            total_p += b_p
            total_q += b_q
    return tl.reduce((total_p, total_q), 0, add_pair)


@triton.jit
def parameter_sums(
    partials, p_scale, block, share, shares, N,
    P: tl.constexpr, Q: tl.constexpr, LAST: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The sums of p and q, with their weights 1 + scale, of a block of channels over every shares-th step of BLOCK_N of
    all samples' chunks, and the channels. P and Q: which of the two are wanted."""
    dtype: tl.constexpr = partials.pointer.dtype.element_ty
    C, chunks = partials.groups.C, partials.chunks
    o_c = block * BLOCK_C + tl.arange(0, BLOCK_C)
    p = tl.zeros((BLOCK_N, BLOCK_C), dtype)
    q = tl.zeros((BLOCK_N, BLOCK_C), dtype)
    for start in range(share * BLOCK_N, N * chunks, shares * BLOCK_N):
        j = start + tl.arange(0, BLOCK_N)
        n = (j // chunks).to(tl.int64)
        mask = (j < N * chunks)[:, None] & (o_c < C)[None, :]
        o_partial = offsets_of_partials(n[:, None], (j % chunks)[:, None], o_c[None, :], C, chunks, LAST)
        factor = 1.0
        if p_scale is not None:
            factor += tl.load(p_scale + n[:, None] * C + o_c[None, :], mask, 0.0).to(dtype)
        if P:
            p += tl.load(partials.pointer + o_partial, mask, 0.0) * factor
        if Q:
            q += tl.load(partials.pointer + partials.total + o_partial, mask, 0.0) * factor
    sum_p, sum_q = tl.reduce((p, q), 0, add_pair)
    return sum_p, sum_q, o_c


@triton.jit
def parameter_gradients(
    partials, parameters, grads, block, N, LAST: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr
):
    """The gradients of weight and bias for a block of channels."""
    P: tl.constexpr = grads.bias is not None
    Q: tl.constexpr = grads.weight is not None
    p, q, o_c = parameter_sums(partials, parameters.scale, block, 0, 1, N, P, Q, LAST, BLOCK_C, BLOCK_N)
    m_c = o_c < partials.groups.C
    if grads.bias is not None:
        tl.store(grads.bias + o_c, p.to(grads.bias.dtype.element_ty), m_c)
    if grads.weight is not None:
        tl.store(grads.weight + o_c, q.to(grads.weight.dtype.element_ty), m_c)


@triton.jit(do_not_specialize=["N"], do_not_specialize_on_alignment=["chunks", "shares"])
def fold(
    p_partials, p_scale, p_folded, C, N, total, chunks, shares,
    OVERLAP: tl.constexpr, LAST: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The sums of p and q, with their weights 1 + scale, of each share of all samples' chunks. Every shares-th step of
    BLOCK_N of them belongs to a share."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    block, share = tl.program_id(0) // shares, tl.program_id(0) % shares
    partials = Partials(p_partials, total, Groups(1, C, C), N * chunks, chunks)
    p, q, o_c = parameter_sums(partials, p_scale, block, share, shares, N, True, True, LAST, BLOCK_C, BLOCK_N)
    o_folded = share.to(tl.int64) * C + o_c
    tl.store(p_folded + o_folded, p, o_c < C)
    tl.store(p_folded + shares * C + o_folded, q, o_c < C)


@triton.jit
def modulation_gradients(
    partials, parameters, grads, n, block, LAST: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr
):
    """The gradients of one sample's scale and shift for a block of channels. A gradient of shift alone needs no q."""
    Q: tl.constexpr = grads.scale is not None
    dtype: tl.constexpr = partials.pointer.dtype.element_ty
    C, chunks = partials.groups.C, partials.chunks
    o_c = block * BLOCK_C + tl.arange(0, BLOCK_C)
    m_c = o_c < C
    p = tl.zeros((BLOCK_N, BLOCK_C), dtype)
    q = tl.zeros((BLOCK_N, BLOCK_C), dtype)
    for start in range(0, chunks, BLOCK_N):
        k = start + tl.arange(0, BLOCK_N)
        mask = (k < chunks)[:, None] & m_c[None, :]
        o_partial = offsets_of_partials(n, k[:, None], o_c[None, :], C, chunks, LAST)
        p += tl.load(partials.pointer + o_partial, mask, 0.0)
        if Q:
            q += tl.load(partials.pointer + partials.total + o_partial, mask, 0.0)
    sum_p, sum_q = tl.reduce((p, q), 0, add_pair)
    if grads.scale is not None:
        gain, offset = affine(Parameters(parameters.weight, parameters.bias, None, None), o_c, o_c, m_c, dtype)
        b_scale = gain * sum_q + offset * sum_p
        tl.store(grads.scale + n * C + o_c, b_scale.to(grads.scale.dtype.element_ty), m_c)
    if grads.shift is not None:
        tl.store(grads.shift + n * C + o_c, sum_p.to(grads.shift.dtype.element_ty), m_c)


@triton.jit
def parameter_program(
    pid, summed, summed_parameters, partials, parameters, grads, channel_programs, N,
    LAST: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A program takes a block of channels: the first ``channel_programs`` BLOCK_C for weight and bias, from the
    ``summed`` partials of N samples, the others BLOCK_M for scale and shift of one sample, BLOCK_K chunks at a time."""
    if pid < channel_programs:
        parameter_gradients(summed, summed_parameters, grads, pid, N, LAST, BLOCK_C, BLOCK_N)
    else:
        blocks = tl.cdiv(partials.groups.C, BLOCK_M)
        rest = pid - channel_programs
        n = (rest // blocks).to(tl.int64)
        modulation_gradients(partials, parameters, grads, n, rest % blocks, LAST, BLOCK_M, BLOCK_K)


@triton.jit(do_not_specialize=["S", "blocks"], do_not_specialize_on_alignment=["chunks"])
def gradients_of_numbers(
    p_partials, p_totals, p_weight, p_scale, p_rstd, p_grad_numbers, G, D, C, S, blocks, total, chunks,
    OVERLAP: tl.constexpr, LAST: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The gradient of a number that is added before the norm to a channel of a sample, for BLOCK_C channels of one
    sample: the sum of dx over the positions is rstd (A p - (S P + Q r) / K), with p = sum dz and r = sum xhat, which
    lies twice ``total`` behind p."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    dtype: tl.constexpr = p_partials.dtype.element_ty
    n, groups = (tl.program_id(0) // blocks).to(tl.int64), Groups(G, D, C)
    o_c = tl.program_id(0) % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    m_c = o_c < C
    p = tl.zeros((BLOCK_N, BLOCK_C), dtype)
    r = tl.zeros((BLOCK_N, BLOCK_C), dtype)
    for start in range(0, chunks, BLOCK_N):
        k = start + tl.arange(0, BLOCK_N)
        mask = (k < chunks)[:, None] & m_c[None, :]
        o_partial = offsets_of_partials(n, k[:, None], o_c[None, :], C, chunks, LAST)
        p += tl.load(p_partials + o_partial, mask, 0.0)
        r += tl.load(p_partials + 2 * total + o_partial, mask, 0.0)
    sum_p, sum_r = tl.reduce((p, r), 0, add_pair)
    gain, _ = affine(Parameters(p_weight, None, p_scale, None), n * C + o_c, o_c, m_c, dtype)
    o_unit = units_of(groups, n, o_c, False)
    mean_p, mean_q = tl.load(p_totals + 2 * o_unit, m_c, 0.0), tl.load(p_totals + 2 * o_unit + 1, m_c, 0.0)
    through = tl.fma(mean_q, sum_r, S.to(dtype) * mean_p)
    rstd = tl.load(p_rstd + o_unit, m_c, 0.0)
    tl.store(p_grad_numbers + n * C + o_c, rstd * tl.fma(gain, sum_p, -through), m_c)


@triton.jit(
    do_not_specialize=["units", "unit_programs", "K", "channel_programs", "N"],
    do_not_specialize_on_alignment=["rows", "chunks"],
)
def combine(
    p_partials, p_folded, p_weight, p_bias, p_scale, p_totals, p_grad_weight, p_grad_bias, p_grad_scale, p_grad_shift,
    G, D, C, units, unit_programs, K, channel_programs, N, total, rows, chunks,
    OVERLAP: tl.constexpr, RMS: tl.constexpr, SHARED: tl.constexpr, PER_BATCH: tl.constexpr, LAST: tl.constexpr,
    BLOCK_U: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The first ``unit_programs`` programs make P / K and Q / K of BLOCK_U units each, the others the parameters'
    gradients, those of weight and bias, and the units of all samples, from N samples' partials or from N shares that
    ``fold`` has left. SHARED: the gradients of weight and bias are a unit's sums of q and p."""
    pid = tl.program_id(0)
    partials = Partials(p_partials, total, Groups(G, D, C), rows, chunks)
    parameters = Parameters(p_weight, p_bias, p_scale, None)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    grads = Parameters(p_grad_weight, p_grad_bias, p_grad_scale, p_grad_shift)
    summed, summed_parameters = partials, parameters
    if p_folded is not None:
        summed = Partials(p_folded, N * C, Groups(G, D, C), N, 1)
        summed_parameters = Parameters(p_weight, p_bias, None, None)
    if pid < unit_programs:
        merged, merged_parameters = partials, parameters
        if PER_BATCH:
            merged, merged_parameters = summed, summed_parameters
        o_unit = pid * BLOCK_U + tl.arange(0, BLOCK_U)
        m_unit = o_unit < units
        if SHARED:
            bare = Parameters(None, None, None, None)
            total_p, total_q = unit_totals(merged, bare, o_unit, m_unit, PER_BATCH, LAST, BLOCK_R, BLOCK_D)
            if grads.bias is not None:
                tl.store(grads.bias + o_unit, total_p.to(grads.bias.dtype.element_ty), m_unit)
            if grads.weight is not None:
                tl.store(grads.weight + o_unit, total_q.to(grads.weight.dtype.element_ty), m_unit)
            if parameters.weight is not None:
                weight = tl.load(parameters.weight + o_unit, m_unit, 0.0).to(total_p.dtype)
                total_p *= weight
                total_q *= weight
        else:
            total_p, total_q = unit_totals(merged, merged_parameters, o_unit, m_unit, PER_BATCH, LAST, BLOCK_R, BLOCK_D)
        if p_totals is not None:
            if not RMS:
                tl.store(p_totals + 2 * o_unit, total_p / K, m_unit)
            tl.store(p_totals + 2 * o_unit + 1, total_q / K, m_unit)
    else:
        parameter_program(
            pid - unit_programs, summed, summed_parameters, partials, parameters, grads, channel_programs, N,
            LAST, BLOCK_C, BLOCK_N, BLOCK_M, BLOCK_K,
        )  # fmt: skip


@triton.jit
def through_statistics(dz, xhat, gain, scaled_p, scaled_q):
    """dx = rstd A dz - (rstd P / K + xhat rstd Q / K), without the statistics' part where there is no Q."""
    if scaled_q is None:
        return dz * gain
    else:
        # x - mean in place of xhat would take a factor rstd**2, beyond fp32 for inputs of 1e19. Numbers of a channel
        # are negated, here as in other kernels, because Triton 3.6 takes an addition for each element's sign.
        return tl.fma(dz, gain, tl.fma(xhat, -scaled_q, -scaled_p))


@triton.jit
def input_chunk(
    n, block, chunk, p_dy, p_x, p_dx, parameters, statistics, added, p_totals, partials,
    groups, S, dy_steps, x_steps, dx_steps, K, activation_parameter,
    OVERLAP: tl.constexpr, DERIVATIVE: tl.constexpr, ALPHA: tl.constexpr, SHARED: tl.constexpr,
    PER_BATCH: tl.constexpr, LAST: tl.constexpr, EVEN: tl.constexpr, ALIGN: tl.constexpr, WINDOW: tl.constexpr,
    REPEAT: tl.constexpr, ACROSS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, TILES: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """dx = rstd (A dz - (P + xhat Q) / K) of one chunk. P / K and Q / K are read from the totals, or merged from
    partials where a tile's channels belong to one unit. With neither totals nor partials, dx = rstd A dz. With sums
    around the norm the input is the sum, and dx includes the gradient that it has got from elsewhere."""
    dtype: tl.constexpr = statistics.rstd.dtype.element_ty
    ENDS: tl.constexpr = (WINDOW > 1 or ACROSS) and not WHOLE
    G, D, C = groups
    SPAN: tl.constexpr = BLOCK_S * TILES - WINDOW + 1
    first = chunk.to(tl.int64) * SPAN
    o_lane, o_s = block * BLOCK_C + tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_S)
    o_c, m_c = channels_of_lanes(o_lane, C, REPEAT)
    wide = n.to(tl.int64)
    p_grad = p_dy + offsets_of_tile(wide, o_lane, o_s, first, S, dy_steps, WINDOW, REPEAT, ACROSS, LAST)
    p_in = p_x + offsets_of_tile(wide, o_lane, o_s, first, S, x_steps, WINDOW, REPEAT, ACROSS, LAST)
    p_out = p_dx + offsets_of_tile(wide, o_lane, o_s, first, S, dx_steps, WINDOW, REPEAT, ACROSS, LAST)
    if added.behind is not None:
        behind_steps, p_behind = behind_tile(added, wide, o_lane, o_s, first, S, ALIGN, WINDOW, REPEAT, ACROSS, LAST)
    b_behind, b_more = None, None
    if added.grad_total is not None:
        p_more = added.grad_total + offsets_of_tile(wide, o_lane, o_s, first, S, x_steps, WINDOW, REPEAT, ACROSS, LAST)
    if added.grad_behind is not None:
        p_out_behind = added.grad_behind + offsets_of_tile(
            wide, o_lane, o_s, first, S, dx_steps, WINDOW, REPEAT, ACROSS, LAST
        )
    low, high = bounds_of(wide, o_c, first, SPAN, C, S, x_steps, WINDOW, REPEAT, ACROSS)
    if WHOLE:
        mask = lanes_of_whole_rows(o_lane, C, ALIGN, REPEAT)
    else:
        mask = mask_of_tile(o_lane, o_s, first, low, high, C, S, EVEN, ALIGN, WINDOW, REPEAT, ACROSS, LAST)
    b_dy = tl.load(p_grad, mask, 0.0, eviction_policy="evict_first")
    b_x = tl.load(p_in, mask, 0.0, eviction_policy="evict_first")
    if added.behind is not None:
        b_behind = tl.load(p_behind, mask, 0.0, eviction_policy="evict_first")
    if added.grad_total is not None:
        b_more = tl.load(p_more, mask, 0.0, eviction_policy="evict_first")
    if ENDS:
        o_end, m_end = ends_of(o_lane, first, SPAN, low, high, C, ALIGN, WINDOW, REPEAT, ACROSS)
        b_dy_end = tl.load(
            p_dy + offsets_of_ends(wide, o_lane, o_end, first, S, dy_steps, WINDOW, REPEAT, ACROSS), m_end, 0.0
        )
        b_x_end = tl.load(
            p_x + offsets_of_ends(wide, o_lane, o_end, first, S, x_steps, WINDOW, REPEAT, ACROSS), m_end, 0.0
        )
        b_behind_end, b_more_end = None, None
        if added.behind is not None:
            o_behind = offsets_of_ends(wide, o_lane, o_end, first, S, behind_steps, WINDOW, REPEAT, ACROSS)
            b_behind_end = tl.load(added.behind + o_behind, m_end, 0.0)
        if added.grad_total is not None:
            o_more = offsets_of_ends(wide, o_lane, o_end, first, S, x_steps, WINDOW, REPEAT, ACROSS)
            b_more_end = tl.load(added.grad_total + o_more, m_end, 0.0)
    b_mean, rstd = statistics_of(statistics, groups, n, o_c, m_c, PER_BATCH)
    b_gain, b_offset = affine_of_channels(parameters, wide * C, o_c, m_c, D, SHARED, ALIGN, LAST, dtype)
    mean, _ = tile_of(b_mean, o_s, LAST)
    inverse, _ = tile_of(rstd, o_s, LAST)
    gain, _ = tile_of(b_gain * rstd, o_s, LAST)
    offset, _ = tile_of(b_offset, o_s, LAST)
    if OVERLAP:
        gdc_wait()
    # rstd P / K and rstd Q / K
    if p_totals is not None:
        o_unit = units_of(groups, n, o_c, PER_BATCH)
        scaled_q, _ = tile_of(tl.load(p_totals + 2 * o_unit + 1, m_c, 0.0) * rstd, o_s, LAST)
        if statistics.mean is not None:
            scaled_p, _ = tile_of(tl.load(p_totals + 2 * o_unit, m_c, 0.0) * rstd, o_s, LAST)
        else:
            scaled_p = tl.zeros_like(scaled_q)
    elif partials.pointer is not None:
        unit = block * BLOCK_C // D if PER_BATCH else n * G + block * BLOCK_C // D
        o_unit = unit + tl.arange(0, 1)
        total_p, total_q = unit_totals(partials, parameters, o_unit, o_unit >= 0, PER_BATCH, LAST, BLOCK_R, BLOCK_D)
        scaled_q, _ = tile_of(rstd * (total_q / K), o_s, LAST)
        scaled_p, _ = tile_of(rstd * (total_p / K), o_s, LAST)
        if statistics.mean is None:
            scaled_p = tl.zeros_like(scaled_q)
    else:
        scaled_p, scaled_q = None, None
    alpha = alpha_of(activation_parameter, ALPHA, dtype)
    if ENDS:
        dz, xhat = gradient_of(b_dy_end, b_x_end, b_behind_end, mean, inverse, gain, offset, alpha, DERIVATIVE)
        p_end = p_dx + offsets_of_ends(wide, o_lane, o_end, first, S, dx_steps, WINDOW, REPEAT, ACROSS)
        b_dx = behind(through_statistics(dz, xhat, gain, scaled_p, scaled_q), b_more_end)
        tl.store(p_end, b_dx.to(p_dx.dtype.element_ty), m_end)
        if added.grad_behind is not None:
            o_grad = offsets_of_ends(wide, o_lane, o_end, first, S, dx_steps, WINDOW, REPEAT, ACROSS)
            tl.store(added.grad_behind + o_grad, dz.to(p_dx.dtype.element_ty), m_end)
    for tile in tl.static_range(TILES):
        dz, xhat = gradient_of(b_dy, b_x, b_behind, mean, inverse, gain, offset, alpha, DERIVATIVE)
        b_dx = behind(through_statistics(dz, xhat, gain, scaled_p, scaled_q), b_more)
        m_out = mask
        if tile + 1 < TILES:  # on its way while this one is stored
            p_grad += BLOCK_S * dy_steps.spatial
            p_in += BLOCK_S * x_steps.spatial
            o_s += BLOCK_S
            if not WHOLE:
                mask = mask_of_tile(o_lane, o_s, first, low, high, C, S, EVEN, ALIGN, WINDOW, REPEAT, ACROSS, LAST)
            b_dy = tl.load(p_grad, mask, 0.0, eviction_policy="evict_first")
            b_x = tl.load(p_in, mask, 0.0, eviction_policy="evict_first")
            if added.behind is not None:
                p_behind += BLOCK_S * behind_steps.spatial
                b_behind = tl.load(p_behind, mask, 0.0, eviction_policy="evict_first")
            if added.grad_total is not None:
                p_more += BLOCK_S * x_steps.spatial
                b_more = tl.load(p_more, mask, 0.0, eviction_policy="evict_first")
        tl.store(p_out, b_dx.to(p_dx.dtype.element_ty), m_out, eviction_policy="evict_first")
        p_out += BLOCK_S * dx_steps.spatial
        if added.grad_behind is not None:
            tl.store(p_out_behind, dz.to(p_dx.dtype.element_ty), m_out, eviction_policy="evict_first")
            p_out_behind += BLOCK_S * dx_steps.spatial


@triton.jit
def input_program(
    pid, p_dy, p_x, p_dx, parameters, statistics, added, p_totals, partials,
    groups, S, dy_steps, x_steps, dx_steps, blocks, by_blocks, chunks, by_chunks, K, activation_parameter,
    OVERLAP: tl.constexpr, DERIVATIVE: tl.constexpr, ALPHA: tl.constexpr, SHARED: tl.constexpr,
    PER_BATCH: tl.constexpr, LAST: tl.constexpr, EVEN: tl.constexpr, ALIGN: tl.constexpr, WINDOW: tl.constexpr,
    REPEAT: tl.constexpr, ACROSS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, TILES: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """:func:`input_chunk` of a program."""
    n, block, chunk = locate(pid, blocks, by_blocks, chunks, by_chunks, LAST)
    if REPEAT > 1 and has_whole_rows(n, chunk, BLOCK_S * TILES, groups.C, S, REPEAT, ACROSS):
        input_chunk(
            n, block, chunk, p_dy, p_x, p_dx, parameters, statistics, added, p_totals, partials, groups, S, dy_steps,
            x_steps, dx_steps, K, activation_parameter, OVERLAP, DERIVATIVE, ALPHA, SHARED, PER_BATCH, LAST, EVEN,
            ALIGN, WINDOW, REPEAT, ACROSS, BLOCK_C, BLOCK_S, TILES, BLOCK_R, BLOCK_D, True,
        )  # fmt: skip
    else:
        input_chunk(
            n, block, chunk, p_dy, p_x, p_dx, parameters, statistics, added, p_totals, partials, groups, S, dy_steps,
            x_steps, dx_steps, K, activation_parameter, OVERLAP, DERIVATIVE, ALPHA, SHARED, PER_BATCH, LAST, EVEN,
            ALIGN, WINDOW, REPEAT, ACROSS, BLOCK_C, BLOCK_S, TILES, BLOCK_R, BLOCK_D, False,
        )  # fmt: skip


@triton.jit
def gradients_of_tiles(
    p_dy, p_x, p_dx, parameters, p_mean, p_rstd, added, p_totals, p_partials, grads, parameter_programs, programs,
    channel_programs, N, G, D, C, S, dy_sample, dy_channel, dy_spatial, x_sample, x_channel, x_spatial,
    dx_sample, dx_channel, dx_spatial, blocks, by_blocks, chunks, by_chunks, total, partial_rows, partial_chunks, K,
    activation_parameter,
    OVERLAP: tl.constexpr, DERIVATIVE: tl.constexpr, ALPHA: tl.constexpr, SHARED: tl.constexpr,
    PER_BATCH: tl.constexpr, LAST: tl.constexpr, EVEN: tl.constexpr, ALIGN: tl.constexpr, WINDOW: tl.constexpr,
    REPEAT: tl.constexpr, ACROSS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, TILES: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
    CHANNELS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The input's gradient; the programs walk the tensor from its end, as in tiles.apply. With partials this kernel
    does the work of ``combine`` too: each of these programs merges its unit's partials, and ``parameter_programs``
    programs before them make the parameters' gradients. With neither totals nor partials it may be the first."""
    if OVERLAP and p_totals is None and p_partials is None:
        gdc_wait()
    pid = tl.program_id(0)
    groups = Groups(G, D, C)
    dy_steps = steps_of(dy_sample, dy_channel, dy_spatial, ALIGN, LAST)
    x_steps = steps_of(x_sample, x_channel, x_spatial, ALIGN, LAST)
    dx_steps = steps_of(dx_sample, dx_channel, dx_spatial, ALIGN, LAST)
    partials = Partials(p_partials, total, groups, partial_rows, partial_chunks)
    if p_partials is not None:  # noqa: SIM102 (one is known when compiling, the other is not)
        if pid < parameter_programs:
            if OVERLAP:
                gdc_wait()
            parameter_program(
                pid, partials, parameters, partials, parameters, grads, channel_programs, N, LAST, CHANNELS, BLOCK_N,
                CHANNELS, BLOCK_N,
            )  # fmt: skip
    if pid >= parameter_programs:
        input_program(
            programs - 1 - (pid - parameter_programs), p_dy, p_x, p_dx, parameters, Statistics(p_mean, p_rstd),
            added, p_totals, partials, groups, S, dy_steps, x_steps, dx_steps, blocks, by_blocks, chunks, by_chunks,
            K, activation_parameter,
            OVERLAP, DERIVATIVE, ALPHA, SHARED, PER_BATCH, LAST, EVEN, ALIGN, WINDOW, REPEAT, ACROSS, BLOCK_C,
            BLOCK_S, TILES, BLOCK_R, BLOCK_D,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=["parameter_programs", "programs", "channel_programs", "N", "K"],
    do_not_specialize_on_alignment=[
        "S", "dy_sample", "dy_channel", "dy_spatial", "x_sample", "x_channel", "x_spatial",
        "dx_sample", "dx_channel", "dx_spatial", "blocks", "by_blocks", "chunks", "by_chunks", "partial_rows",
        "partial_chunks",
    ],
)  # fmt: skip
def gradients(
    p_dy, p_x, p_dx, p_weight, p_bias, p_scale, p_shift, p_mean, p_rstd, p_totals, p_partials,
    p_grad_weight, p_grad_bias, p_grad_scale, p_grad_shift,
    parameter_programs, programs, channel_programs, N,
    G, D, C, S, dy_sample, dy_channel, dy_spatial, x_sample, x_channel, x_spatial, dx_sample, dx_channel, dx_spatial,
    blocks, by_blocks: tl.int64, chunks, by_chunks: tl.int64, total, partial_rows, partial_chunks, K,
    activation_parameter: tl.float64,
    OVERLAP: tl.constexpr, DERIVATIVE: tl.constexpr, ALPHA: tl.constexpr, SHARED: tl.constexpr,
    PER_BATCH: tl.constexpr, LAST: tl.constexpr, EVEN: tl.constexpr, ALIGN: tl.constexpr, WINDOW: tl.constexpr,
    REPEAT: tl.constexpr, ACROSS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, TILES: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
    CHANNELS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """:func:`gradients_of_tiles` with nothing around the norm."""
    gradients_of_tiles(
        p_dy, p_x, p_dx, Parameters(p_weight, p_bias, p_scale, p_shift), p_mean, p_rstd,
        AddedGradients(None, None, None, 1, 1, 1), p_totals, p_partials,
        Parameters(p_grad_weight, p_grad_bias, p_grad_scale, p_grad_shift), parameter_programs, programs,
        channel_programs, N, G, D, C, S, dy_sample, dy_channel, dy_spatial, x_sample, x_channel, x_spatial,
        dx_sample, dx_channel, dx_spatial, blocks, by_blocks, chunks, by_chunks, total, partial_rows, partial_chunks, K,
        activation_parameter,
        OVERLAP, DERIVATIVE, ALPHA, SHARED, PER_BATCH, LAST, EVEN, ALIGN, WINDOW, REPEAT, ACROSS, BLOCK_C, BLOCK_S,
        TILES, BLOCK_R, BLOCK_D, CHANNELS, BLOCK_N,
    )  # fmt: skip
