"""Units of any memory order that fit the registers of one program: one read of each tensor, one launch.

A unit is ``rows`` rows of ``columns`` elements, which follow one another in memory:

- a group of channels_first: its channels by their positions,
- a group of channels_last: the positions by the group's channels,
- a channel of batch_norm: the samples by the positions, in channels_last all positions by one element; or, with APART,
  where samples have a scale and shift of their own, the samples by the positions, which lie apart there.

A tile has three axes: BLOCK_U units, BLOCK_R rows and BLOCK_K columns. BLOCK_R is 0 where the rows of units of one
channel follow one another along the columns' axis, which they fill better. AFFINE is the axis along which the weight
and bias of a unit differ, 0 where a unit is one channel, and 3 where the rows of a channel, batch_norm's samples, have
a scale and shift of their own. A program's units are neighbours in one sample; with SPAN they are any neighbours, and
with ALL_SAMPLES those in one place of all samples, of which it can sum the parameters' gradients. No load of the data
waits for a division by the units of a sample where there is but ONE sample, or where units are PACKED: the next sample
begins where another unit would.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fusednorm.backends.triton.kernels.added import behind, sum_of
from fusednorm.backends.triton.kernels.addressing import again, aligned, divided, no_wider, within
from fusednorm.backends.triton.kernels.aggregates import Added, AddedGradients, Numbers, Parameters, Steps
from fusednorm.backends.triton.kernels.moments import (
    add_pair,
    compute_dtype,
    corrected,
    inverse_deviation,
    mean_of,
    pivot_of,
    pivoted,
    pivoted_moments,
    place_of,
    saved_statistics,
    unit_of,
)
from fusednorm.backends.triton.kernels.tiles import affine, alpha_of, gradient_of, normalized


@triton.jit
def total(b):
    """The sum of each unit of a tile."""
    if b.shape[0] == 1:
        return tl.full((1,), tl.sum(b), b.dtype)
    else:
        return tl.sum(tl.sum(b, 2), 1)


@triton.jit
def totals(pair):
    """The sums of each unit of two tiles."""
    a, b = pair
    if a.shape[0] == 1:
        flat: tl.constexpr = (1, a.shape[1] * a.shape[2])
        return tl.reduce((tl.reshape(a, flat), tl.reshape(b, flat)), 1, add_pair)
    else:
        return tl.reduce(tl.reduce((a, b), 2, add_pair), 1, add_pair)


@triton.jit
def units_of_program(
    units, G, inverse,
    ONE: tl.constexpr, SPAN: tl.constexpr, ALL_SAMPLES: tl.constexpr, NEIGHBOURS: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_U: tl.constexpr,
):  # fmt: skip
    """The units of a program, their samples, their places in these, and which of them there are. Units that are no
    NEIGHBOURS in memory need no mask: where a program has fewer it takes the last one again, and stores the same."""
    pid = tl.program_id(0)
    if ALL_SAMPLES:
        n = tl.arange(0, BLOCK_U).to(tl.int64)
        o_unit = n * G + pid
        return o_unit, n, pid + tl.zeros_like(tl.arange(0, BLOCK_U)), o_unit < units
    elif ONE or SPAN:
        o_unit = pid * BLOCK_U + tl.arange(0, BLOCK_U)
        m_u = o_unit < aligned(units, ALIGN)
        if not NEIGHBOURS:
            o_unit, m_u = tl.minimum(o_unit, units - 1), tl.full((BLOCK_U,), True, tl.int1)
        if ONE:
            return o_unit, tl.zeros_like(o_unit).to(tl.int64), o_unit, m_u
        else:
            n, g = divided(o_unit, G, inverse)
            return o_unit, n.to(tl.int64), g, m_u
    else:
        n, block = divided(pid, tl.cdiv(G, BLOCK_U), inverse)
        n, g = n.to(tl.int64), block * BLOCK_U + tl.arange(0, BLOCK_U)
        return n * G + g, n + tl.zeros_like(g), g, g < aligned(G, ALIGN)


@triton.jit
def of_units(b):
    """Values of units, along their axis of a tile."""
    return b[:, None, None]


@triton.jit
def rows_and_columns_of_lanes(o_lane, m_u, rows, columns, LEADING: tl.constexpr):
    """The rows and columns of a tile whose rows lie along one axis, and its mask."""
    o_lane = o_lane[None, None, :]
    o_r = tl.umulhi(2 * o_lane, 2147483647 // columns + 1)  # by 2**31 / columns, rounded up, as in channel_of
    return o_r, o_lane - o_r * columns, of_units(m_u) & within(o_lane, rows * columns, o_lane.shape[2], LEADING, 1)


@triton.jit
def rows_and_columns(
    m_u, rows, columns, APART: tl.constexpr, ALIGN: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    LEADING_R: tl.constexpr, LEADING_K: tl.constexpr,
):  # fmt: skip
    """The rows and columns of a tile, and its mask."""
    if BLOCK_R == 0:
        return rows_and_columns_of_lanes(tl.arange(0, BLOCK_K), m_u, rows, columns, LEADING_K)
    else:
        o_r, o_k = tl.arange(0, BLOCK_R)[None, :, None], tl.arange(0, BLOCK_K)[None, None, :]
        m_k = within(o_k, columns, BLOCK_K, LEADING_K, 1 if BLOCK_K == 1 or APART else ALIGN)
        return o_r, o_k, of_units(m_u) & within(o_r, rows, BLOCK_R, LEADING_R, 1) & m_k


@triton.jit
def of_channels(b, AFFINE: tl.constexpr):
    """Values of the channels of units, along their axes of a tile."""
    if AFFINE == 0:
        return b[:, None, None]
    elif len(b.shape) == 3:
        return b
    elif AFFINE == 2:
        return b[:, None, :]
    else:
        return b[:, :, None]


@triton.jit
def channels_of(
    n, g, m_u, rows, columns, C, AFFINE: tl.constexpr, ALIGN: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr, LEADING_R: tl.constexpr, LEADING_K: tl.constexpr,
):  # fmt: skip
    """The channels of units, their places among the channels of all samples, and which of them there are.

    With rows of channels they have the form of the tile, so that their values lie in threads as the tile does.
    """
    if AFFINE == 2 and BLOCK_R == 1:
        o_d = tl.arange(0, BLOCK_K)[None, None, :]
        o_c = of_units(g) * aligned(columns, ALIGN) + no_wider(o_d, ALIGN)
        return o_c, of_units(n) * C + o_c, of_units(m_u) & within(o_d, columns, BLOCK_K, LEADING_K, ALIGN)
    elif AFFINE == 0:
        return g, n * C + g, m_u
    elif AFFINE == 3:
        o_r = tl.arange(0, BLOCK_R)[None, :]
        o_c = g[:, None] + tl.zeros_like(o_r)
        return o_c, o_r.to(tl.int64) * C + o_c, m_u[:, None] & within(o_r, rows, BLOCK_R, LEADING_R, 1)
    else:
        size = rows if AFFINE == 1 else aligned(columns, ALIGN)
        o_d = tl.arange(0, BLOCK_R if AFFINE == 1 else BLOCK_K)[None, :]
        o_c = g[:, None] * size + o_d
        if AFFINE == 1:
            m_d = within(o_d, rows, BLOCK_R, LEADING_R, 1)
        else:
            m_d = within(o_d, columns, BLOCK_K, LEADING_K, ALIGN)
        return o_c, n[:, None] * C + o_c, m_u[:, None] & m_d


@triton.jit
def origin_of_units(o_unit, n, g, PACKED: tl.constexpr):
    """The samples and places that the offsets of units are counted from."""
    if PACKED:
        return tl.zeros_like(n), o_unit.to(tl.int64)
    else:
        return n, g


@triton.jit
def begin_of_units(n, g, steps, NEIGHBOURS: tl.constexpr, APART: tl.constexpr, ALIGN: tl.constexpr):
    """The offsets of units' first elements; ``steps`` are the strides of samples, or with APART of columns, of units
    and of rows. ALIGN divides all but the 1 of units that are NEIGHBOURS."""
    unit = steps.channel if NEIGHBOURS else aligned(steps.channel, ALIGN)
    return g.to(tl.int64) * unit if APART else n * aligned(steps.sample, ALIGN) + g * unit


@triton.jit
def beside_first(rows, row, column, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr):
    """The offsets of a unit's second and third element in steps of ``row`` and ``column``; behind two columns the next
    row's first one. Rows that lie along one axis have three columns or more."""
    one = tl.full((), 1, tl.int64)
    if BLOCK_K == 1:
        return one * row * place_of(1, rows, BLOCK_R), one * row * place_of(2, rows, BLOCK_R)
    elif BLOCK_K == 2:
        return one * column, one * row * place_of(1, rows, BLOCK_R)
    else:
        return one * column, one * column * 2


@triton.jit
def offsets_of_units(n, g, o_r, o_k, steps, APART: tl.constexpr, ALIGN: tl.constexpr):
    """The offsets of tiles."""
    begin = begin_of_units(n, g, steps, o_k.shape[2] == 1 or APART, APART, ALIGN)
    o_row = of_units(begin) + o_r.to(tl.int64) * aligned(steps.spatial, ALIGN)
    return o_row + (o_k.to(tl.int64) * aligned(steps.sample, ALIGN) if APART else o_k)


@triton.jit
def held_units_forward(
    p_x, p_y, parameters, p_mean, p_rstd, p_var, added, units, G, inverse, C, rows, columns,
    x_sample, x_unit, x_row, y_sample, y_unit, y_row, eps, activation_parameter,
    OVERLAP: tl.constexpr, RMS: tl.constexpr, VALUE: tl.constexpr, ALPHA: tl.constexpr, AFFINE: tl.constexpr,
    ONE: tl.constexpr, PACKED: tl.constexpr, SPAN: tl.constexpr, APART: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_U: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    LEADING_R: tl.constexpr, LEADING_K: tl.constexpr, EXACT: tl.constexpr = False, PIVOT: tl.constexpr = False,
):  # fmt: skip
    """The statistics, stored where somebody wants them, and the output of BLOCK_U units. PIVOT: the statistics are
    counted from an element of each unit."""
    if OVERLAP:
        gdc_wait()
    dtype: tl.constexpr = compute_dtype(p_x.dtype.element_ty)
    NEIGHBOURS: tl.constexpr = BLOCK_K == 1 or APART
    o_unit, n, g, m_u = units_of_program(
        units, G, inverse, ONE, SPAN, False, NEIGHBOURS, ALIGN if NEIGHBOURS else 1, BLOCK_U
    )
    o_n, o_place = origin_of_units(o_unit, n, g, PACKED)
    o_r, o_k, mask = rows_and_columns(m_u, rows, columns, APART, ALIGN, BLOCK_R, BLOCK_K, LEADING_R, LEADING_K)
    x_steps, y_steps = Steps(x_sample, x_unit, x_row), Steps(y_sample, y_unit, y_row)
    b_x = tl.load(p_x + offsets_of_units(o_n, o_place, o_r, o_k, x_steps, APART, ALIGN), mask, 0.0)
    b_behind = None
    if added.before is not None or added.gate is not None or added.bias is not None:
        b_before, b_gate, b_bias = None, None, None
        if added.before is not None:
            steps = Steps(added.before_sample, added.before_channel, added.before_spatial)
            b_before = tl.load(added.before + offsets_of_units(o_n, o_place, o_r, o_k, steps, APART, ALIGN), mask, 0.0)
        if added.gate is not None or added.bias is not None:
            o_channel, o_number, m_number = channels_of(
                n, g, m_u, rows, columns, C, AFFINE, ALIGN, BLOCK_R, BLOCK_K, LEADING_R, LEADING_K
            )
            if added.gate is not None:
                b_gate = of_channels(tl.load(added.gate + o_number, m_number, 0.0).to(dtype), AFFINE)
            if added.bias is not None:
                b_bias = of_channels(tl.load(added.bias + o_channel, m_number, 0.0).to(dtype), AFFINE)
        b_x = sum_of(b_x, b_before, Numbers(b_gate, b_bias), mask, dtype, EXACT)
    if added.total is not None:
        tl.store(added.total + offsets_of_units(o_n, o_place, o_r, o_k, y_steps, APART, ALIGN), b_x, mask)
    if added.behind is not None:
        steps = Steps(added.behind_sample, added.behind_channel, added.behind_spatial)
        b_behind = tl.load(added.behind + offsets_of_units(o_n, o_place, o_r, o_k, steps, APART, ALIGN), mask, 0.0)
    b_x = b_x.to(dtype)
    o_c, o_modulation, m_c = channels_of(
        n, g, m_u, rows, columns, C, AFFINE, ALIGN, BLOCK_R, BLOCK_K, LEADING_R, LEADING_K
    )
    b_gain, b_offset = affine(parameters, o_modulation, o_c, m_c, dtype)
    gain, offset = of_channels(b_gain, AFFINE), of_channels(b_offset, AFFINE)
    count = (rows * columns).to(dtype)
    if RMS:
        variance = total(b_x * b_x) / count
        mean = tl.zeros_like(variance)
    elif PIVOT:
        p_unit = p_x + begin_of_units(o_n, o_place, x_steps, NEIGHBOURS, APART, ALIGN)
        second, third = beside_first(rows, x_row, x_sample if APART else 1, BLOCK_R, BLOCK_K)
        pivot = pivot_of(p_unit, second, third, m_u, dtype)
        deviation = pivoted(b_x, of_units(pivot), mask, True)
        b_total, b_squares = totals((deviation, deviation * deviation))
        mean, m2 = pivoted_moments(pivot, b_total, b_squares, count)
        variance = m2 / count
    elif p_x.dtype.element_ty.primitive_bitwidth > 16:  # as in held_moments
        share = tl.full((), 1.0, dtype) / count
        mean = total(b_x) * share
        unit, inverse = unit_of(mean)
        deviation = tl.where(mask, b_x - of_units(mean), 0.0) * of_units(inverse)
        b_total, b_squares = totals((deviation, deviation * deviation))
        mean, m2 = corrected(mean, unit, b_total, b_squares, share)
        variance = m2 * share
    else:
        mean = mean_of(total(b_x), count)
        deviation = tl.where(mask, b_x - of_units(mean), 0.0)
        variance = total(deviation * deviation) / count
    rstd = inverse_deviation(variance, eps)
    b_z = behind(normalized(b_x - of_units(mean), gain * of_units(rstd), offset), b_behind)
    b_y = VALUE(b_z, alpha_of(activation_parameter, ALPHA, dtype))
    if BLOCK_R == 0:
        o_r, o_k, mask = rows_and_columns_of_lanes(again(tl.arange(0, BLOCK_K)), m_u, rows, columns, LEADING_K)
    tl.store(p_y + offsets_of_units(o_n, o_place, o_r, o_k, y_steps, APART, ALIGN), b_y.to(p_y.dtype.element_ty), mask)
    # The statistics move to other threads for these stores, for which the output would wait.
    if p_mean is not None:
        tl.store(p_mean + o_unit, mean, m_u)
    if p_rstd is not None:
        tl.store(p_rstd + o_unit, rstd, m_u)
    if p_var is not None:
        tl.store(p_var + o_unit, variance, m_u)


@triton.jit(
    do_not_specialize=["units", "rows"],
    do_not_specialize_on_alignment=["inverse", "columns", "x_sample", "x_unit", "x_row", "y_sample", "y_unit", "y_row"],
)
def held_forward(
    p_x, p_y, p_weight, p_bias, p_scale, p_shift, p_mean, p_rstd, p_var, units, G, inverse: tl.int64, C, rows, columns,
    x_sample, x_unit, x_row, y_sample, y_unit, y_row, eps: tl.float64, activation_parameter: tl.float64,
    OVERLAP: tl.constexpr, RMS: tl.constexpr, VALUE: tl.constexpr, ALPHA: tl.constexpr, AFFINE: tl.constexpr,
    ONE: tl.constexpr, PACKED: tl.constexpr, SPAN: tl.constexpr, APART: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_U: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    LEADING_R: tl.constexpr, LEADING_K: tl.constexpr, PIVOT: tl.constexpr,
):  # fmt: skip
    """:func:`held_units_forward` with nothing around the norm."""
    held_units_forward(
        p_x, p_y, Parameters(p_weight, p_bias, p_scale, p_shift), p_mean, p_rstd, p_var,
        Added(None, None, None, None, None, 1, 1, 1, 1, 1, 1, 1, 1), units, G, inverse, C, rows, columns,
        x_sample, x_unit, x_row, y_sample, y_unit, y_row, eps, activation_parameter,
        OVERLAP, RMS, VALUE, ALPHA, AFFINE, ONE, PACKED, SPAN, APART, ALIGN, BLOCK_U, BLOCK_R, BLOCK_K, LEADING_R,
        LEADING_K, False, PIVOT,
    )  # fmt: skip


@triton.jit
def store_sums_of_samples(
    p, q, parameters, p_partials, p_grad_scale, p_grad_shift, sums, o_c, o_modulation, m_c, dtype: tl.constexpr
):
    """The sums p and q of the channels of samples: as partials, and as the gradients of their scale and shift."""
    if p_partials is not None:
        tl.store(p_partials + o_modulation, p, m_c)
        tl.store(p_partials + sums + o_modulation, q, m_c)
    if p_grad_scale is not None:
        b_weight, b_bias = affine(Parameters(parameters.weight, parameters.bias, None, None), o_c, o_c, m_c, dtype)
        b_scale = b_weight * q + b_bias * p
        tl.store(p_grad_scale + o_modulation, b_scale.to(p_grad_scale.dtype.element_ty), m_c)
    if p_grad_shift is not None:
        tl.store(p_grad_shift + o_modulation, p.to(p_grad_shift.dtype.element_ty), m_c)


@triton.jit
def times_scale(p, q, parameters, o_modulation, m_c, dtype: tl.constexpr):
    """What the sums p and q of the channels of samples add to the gradients of bias and weight."""
    if parameters.scale is not None:
        factor = 1.0 + tl.load(parameters.scale + o_modulation, m_c, 0.0).to(dtype)
        p *= factor
        q *= factor
    return p, q


@triton.jit
def held_units_backward(
    p_dy, p_x, p_dx, parameters, p_mean, p_rstd, added, p_partials,
    p_grad_weight, p_grad_bias, p_grad_scale, p_grad_shift, units, G, inverse, C, rows, columns,
    dy_sample, dy_unit, dy_row, x_sample, x_unit, x_row, dx_sample, dx_unit, dx_row, sums, activation_parameter,
    OVERLAP: tl.constexpr, DERIVATIVE: tl.constexpr, ALPHA: tl.constexpr, AFFINE: tl.constexpr, ONE: tl.constexpr,
    PACKED: tl.constexpr, SPAN: tl.constexpr, APART: tl.constexpr, ALL_SAMPLES: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_U: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    LEADING_R: tl.constexpr, LEADING_K: tl.constexpr,
):  # fmt: skip
    """The input's gradient of BLOCK_U units, the gradients of scale and shift, and those of weight and bias, or their
    partials p and q for each sample and channel where a program has not all of a channel."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    dtype: tl.constexpr = p_rstd.dtype.element_ty
    ROW: tl.constexpr = AFFINE == 2 and BLOCK_R == 1
    NEIGHBOURS: tl.constexpr = BLOCK_K == 1 or APART
    o_unit, n, g, m_u = units_of_program(
        units, G, inverse, ONE, SPAN, ALL_SAMPLES, NEIGHBOURS, ALIGN if NEIGHBOURS else 1, BLOCK_U
    )
    o_n, o_place = origin_of_units(o_unit, n, g, PACKED)
    o_r, o_k, mask = rows_and_columns(m_u, rows, columns, APART, ALIGN, BLOCK_R, BLOCK_K, LEADING_R, LEADING_K)
    dy_steps, x_steps = Steps(dy_sample, dy_unit, dy_row), Steps(x_sample, x_unit, x_row)
    b_dy = tl.load(p_dy + offsets_of_units(o_n, o_place, o_r, o_k, dy_steps, APART, ALIGN), mask, 0.0)
    b_x = tl.load(p_x + offsets_of_units(o_n, o_place, o_r, o_k, x_steps, APART, ALIGN), mask, 0.0)
    b_behind, b_more = None, None
    if added.behind is not None:
        steps = Steps(added.behind_sample, added.behind_channel, added.behind_spatial)
        b_behind = tl.load(added.behind + offsets_of_units(o_n, o_place, o_r, o_k, steps, APART, ALIGN), mask, 0.0)
    if added.grad_total is not None:
        b_more = tl.load(added.grad_total + offsets_of_units(o_n, o_place, o_r, o_k, x_steps, APART, ALIGN), mask, 0.0)
    mean, rstd = saved_statistics(p_mean, p_rstd, o_unit, m_u)
    o_c, o_modulation, m_c = channels_of(
        n, g, m_u, rows, columns, C, AFFINE, ALIGN, BLOCK_R, BLOCK_K, LEADING_R, LEADING_K
    )
    b_gain, b_offset = affine(parameters, o_modulation, o_c, m_c, dtype)
    gain, offset = of_channels(b_gain, AFFINE), of_channels(b_offset, AFFINE)
    inverse, alpha = of_units(rstd), alpha_of(activation_parameter, ALPHA, dtype)
    dz, xhat = gradient_of(b_dy, b_x, b_behind, of_units(mean), inverse, gain * inverse, offset, alpha, DERIVATIVE)
    if AFFINE == 0:
        p, q = totals((dz, dz * xhat))
        total_p, total_q = p * b_gain, q * b_gain
    elif ROW:
        p, q = dz, dz * xhat
        if p_mean is not None:
            total_p, total_q = totals((p * b_gain, q * b_gain))
        else:
            total_q = total(q * b_gain)
    else:
        p, q = tl.reduce((dz, dz * xhat), 1 if AFFINE == 2 else 2, add_pair)
        total_p, total_q = tl.reduce((p * b_gain, q * b_gain), 1, add_pair)
    store_sums_of_samples(p, q, parameters, p_partials, p_grad_scale, p_grad_shift, sums, o_c, o_modulation, m_c, dtype)
    if p_grad_weight is not None or p_grad_bias is not None:
        p, q = times_scale(p, q, parameters, o_modulation, m_c, dtype)
        if AFFINE == 3:
            p, q = tl.reduce((p, q), 1, add_pair)
            o_c, m_c = g, m_u
        elif ALL_SAMPLES:
            p, q = tl.reduce((p, q), 0, add_pair)
            BLOCK_D: tl.constexpr = 1 if AFFINE == 0 else BLOCK_R if AFFINE == 1 else BLOCK_K
            size = 1 if AFFINE == 0 else rows if AFFINE == 1 else columns
            o_d = tl.arange(0, BLOCK_D)
            if ROW:
                o_d = o_d[None, :]
            o_c, m_c = tl.program_id(0) * size + o_d, o_d < size
            p, q = p + tl.zeros(o_d.shape, dtype), q + tl.zeros(o_d.shape, dtype)
        if p_grad_weight is not None:
            tl.store(p_grad_weight + o_c, q.to(p_grad_weight.dtype.element_ty), m_c)
        if p_grad_bias is not None:
            tl.store(p_grad_bias + o_c, p.to(p_grad_bias.dtype.element_ty), m_c)
    if p_dx is not None:
        dx_steps = Steps(dx_sample, dx_unit, dx_row)
        count = (rows * columns).to(dtype)
        b_dx = tl.fma(dz, gain, xhat * -of_units(total_q / count))
        if p_mean is not None:
            b_dx -= of_units(total_p / count)
        if BLOCK_R == 0:
            o_r, o_k, mask = rows_and_columns_of_lanes(again(tl.arange(0, BLOCK_K)), m_u, rows, columns, LEADING_K)
        p_out = p_dx + offsets_of_units(o_n, o_place, o_r, o_k, dx_steps, APART, ALIGN)
        tl.store(p_out, behind(b_dx * inverse, b_more).to(p_dx.dtype.element_ty), mask)
        if added.grad_behind is not None:
            p_out = added.grad_behind + offsets_of_units(o_n, o_place, o_r, o_k, dx_steps, APART, ALIGN)
            tl.store(p_out, dz.to(p_dx.dtype.element_ty), mask)


@triton.jit(
    do_not_specialize=["units", "rows"],
    do_not_specialize_on_alignment=[
        "inverse", "columns", "dy_sample", "dy_unit", "dy_row", "x_sample", "x_unit", "x_row", "dx_sample", "dx_unit",
        "dx_row",
    ],
)  # fmt: skip
def held_backward(
    p_dy, p_x, p_dx, p_weight, p_bias, p_scale, p_shift, p_mean, p_rstd, p_partials,
    p_grad_weight, p_grad_bias, p_grad_scale, p_grad_shift, units, G, inverse: tl.int64, C, rows, columns,
    dy_sample, dy_unit, dy_row, x_sample, x_unit, x_row, dx_sample, dx_unit, dx_row, sums,
    activation_parameter: tl.float64,
    OVERLAP: tl.constexpr, DERIVATIVE: tl.constexpr, ALPHA: tl.constexpr, AFFINE: tl.constexpr, ONE: tl.constexpr,
    PACKED: tl.constexpr, SPAN: tl.constexpr, APART: tl.constexpr, ALL_SAMPLES: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_U: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    LEADING_R: tl.constexpr, LEADING_K: tl.constexpr,
):  # fmt: skip
    """:func:`held_units_backward` with nothing around the norm."""
    held_units_backward(
        p_dy, p_x, p_dx, Parameters(p_weight, p_bias, p_scale, p_shift), p_mean, p_rstd,
        AddedGradients(None, None, None, 1, 1, 1), p_partials,
        p_grad_weight, p_grad_bias, p_grad_scale, p_grad_shift, units, G, inverse, C, rows, columns,
        dy_sample, dy_unit, dy_row, x_sample, x_unit, x_row, dx_sample, dx_unit, dx_row, sums, activation_parameter,
        OVERLAP, DERIVATIVE, ALPHA, AFFINE, ONE, PACKED, SPAN, APART, ALL_SAMPLES, ALIGN, BLOCK_U, BLOCK_R, BLOCK_K,
        LEADING_R, LEADING_K,
    )  # fmt: skip
