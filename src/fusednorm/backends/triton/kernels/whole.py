"""Units that fit the registers of one program: one read of the input, one launch.

A unit's K = D S elements lie in one contiguous run, so element i belongs to the channel i // S of its group. S is
compiled in where it is a power of two: there are few powers, S = 1 (rows) among them, and the elements of a thread then
share their channel's parameters. Any other S is an argument, since each image or recording may have another length.

Where each position of channels_last has statistics of its own, the units of a sample are its ``positions``, which share
its parameters.

With sums around the norm, s = x + gate pre_add is what a program holds: it is stored where somebody wants it, and its
statistics are those of its rounded elements; post_add meets z in registers.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from fusednorm.backends.triton.kernels.added import behind, sum_of
from fusednorm.backends.triton.kernels.addressing import aligned, no_wider, within
from fusednorm.backends.triton.kernels.aggregates import Added, Numbers, Parameters
from fusednorm.backends.triton.kernels.codes import store_codes
from fusednorm.backends.triton.kernels.moments import (
    add_pair,
    compute_dtype,
    held_moments,
    inverse_deviation,
    pivot_of,
    pivoted,
    pivoted_moments,
    place_of,
)
from fusednorm.backends.triton.kernels.tiles import affine, alpha_of, normalized


@triton.jit
def channel_of(o_k, reciprocal, S: tl.constexpr):
    """o_k // S. Where S is not compiled in, o_k is multiplied by ``reciprocal``, 2**31 / S rounded up: exact for o_k
    below 32768 and S up to 32768."""
    if S is not None:
        return o_k // S
    else:
        return tl.umulhi(2 * o_k, reciprocal)


@triton.jit
def affine_of_units(
    parameters, o_u, m_u, n, g, o_k, m_k, mask, reciprocal,
    G: tl.constexpr, D: tl.constexpr, S: tl.constexpr, ONCE: tl.constexpr, ALIGN: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """A and B of the elements of units, as far as they differ between them."""
    o_d = no_wider(channel_of(o_k, reciprocal, S), ALIGN)
    if D == 1:
        gain, offset = affine(parameters, o_u[:, None], g[:, None], m_u[:, None], dtype)
    elif ONCE:
        gain, offset = affine(parameters, o_d, o_d, m_k, dtype)
        gain, offset = gain[None, :], offset[None, :]
    else:
        o_c = (g * D)[:, None] + o_d[None, :]
        gain, offset = affine(parameters, n[:, None] * (G * D) + o_c, o_c, mask, dtype)
    return gain, offset


@triton.jit
def begin_of_units(o_u, n, place, sample, unit, K, PACKED: tl.constexpr, ALIGN: tl.constexpr):
    """The offsets of the first elements of units; ALIGN divides the strides of samples and units. PACKED: units follow
    one another in memory."""
    if PACKED:
        return o_u.to(tl.int64) * K
    else:
        return n * aligned(sample, ALIGN) + place * aligned(unit, ALIGN)


@triton.jit
def pointers_of_units(p, o_u, n, place, sample, unit, K, o_k, PACKED: tl.constexpr, ALIGN: tl.constexpr):
    """Pointers to the elements of units."""
    return p + begin_of_units(o_u, n, place, sample, unit, K, PACKED, ALIGN)[:, None] + o_k[None, :]


@triton.jit
def gate_of_units(added, o_u, m_u, o_k, mask, PER_ELEMENT: tl.constexpr, ALIGN: tl.constexpr, dtype: tl.constexpr):
    """The gate of units, a number for each of them, or with PER_ELEMENT one for each of their elements."""
    o_gate = (o_u // added.gate_rows).to(tl.int64)
    if PER_ELEMENT:
        p_gate = added.gate + (o_gate * aligned(added.gate_step, ALIGN))[:, None] + no_wider(o_k, ALIGN)[None, :]
        return tl.load(p_gate, mask, 0.0).to(dtype)
    else:
        return tl.load(added.gate + o_gate * added.gate_step, m_u, 0.0).to(dtype)[:, None]


@triton.jit
def number_of_channels(
    added, o_u, m_u, n, g, o_k, mask, reciprocal,
    G: tl.constexpr, D: tl.constexpr, S: tl.constexpr, ALIGN: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """The numbers of the samples' channels, which lie in place of the gate."""
    if D == 1:
        return tl.load(added.gate + o_u, m_u, 0.0).to(dtype)[:, None]
    else:
        o_d = no_wider(channel_of(o_k, reciprocal, S), ALIGN)
        return tl.load(added.gate + (n * (G * D) + g * D)[:, None] + o_d[None, :], mask, 0.0).to(dtype)


@triton.jit
def added_before(
    b_x, b_gate, added, o_u, n, place, K, o_k, mask, PACKED: tl.constexpr, ALIGN: tl.constexpr, dtype: tl.constexpr
):
    """s of units, as :func:`sum_of` makes it."""
    b_before = None
    if added.before is not None:
        p_before = pointers_of_units(
            added.before, o_u, n, place, added.before_sample, added.before_channel, K, o_k, PACKED, ALIGN
        )
        b_before = tl.load(p_before, mask, 0.0)
    return sum_of(b_x, b_before, Numbers(b_gate, None), mask, dtype)


@triton.jit
def added_behind(added, o_u, n, place, K, o_k, mask, PACKED: tl.constexpr, ALIGN: tl.constexpr):
    """post_add of units, or None."""
    b_behind = None
    if added.behind is not None:
        p_behind = pointers_of_units(
            added.behind, o_u, n, place, added.behind_sample, added.behind_channel, K, o_k, PACKED, ALIGN
        )
        b_behind = tl.load(p_behind, mask, 0.0)
    return b_behind


@triton.jit
def units_forward(
    p_x, p_y, parameters, p_mean, p_rstd, p_var, added, units, length, reciprocal, positions,
    x_sample, x_unit, y_sample, y_unit, eps, activation_parameter,
    OVERLAP: tl.constexpr, RMS: tl.constexpr, VALUE: tl.constexpr, ALPHA: tl.constexpr, G: tl.constexpr,
    D: tl.constexpr, S: tl.constexpr, EVEN: tl.constexpr, EARLY: tl.constexpr, ONCE: tl.constexpr, PACKED: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK_U: tl.constexpr, BLOCK_K: tl.constexpr, LEADING: tl.constexpr,
    PER_ELEMENT: tl.constexpr, BY_CHANNEL: tl.constexpr, p_out_scale, OUT: tl.constexpr, BY_ROW: tl.constexpr,
    NATIVE: tl.constexpr, PIVOT: tl.constexpr = False, FIRST: tl.constexpr = False,
):  # fmt: skip
    """The statistics, stored where somebody wants them, and the output of BLOCK_U units.

    K is ``length`` where S is None. EVEN: K = BLOCK_K. LEADING: see :func:`within`. EARLY: the parameters and post_add
    are loaded beside the input, and wait in registers for the statistics; where a thread holds few elements, that saves
    the time of one access. ONCE: the units of a program have the same parameters, which are loaded once, and then move
    to the threads that need them. OUT: the 8-bit format of the output (codes.py), or None. PIVOT: the statistics are
    counted from an element of each unit. FIRST: the parameters are loaded before the input, with a barrier between the
    two. Without it NVIDIA's assembler moves their loads behind the first use of the input, for which they then wait.

    A mask of rows is known when compiling, and of units that are no rows not. So only rows have one for their units:
    where the last program has fewer others it takes the last one again, and stores the same.
    """
    if OVERLAP:
        gdc_wait()
    dtype: tl.constexpr = compute_dtype(p_x.dtype.element_ty)
    o_u, o_k = tl.program_id(0) * BLOCK_U + tl.arange(0, BLOCK_U), tl.arange(0, BLOCK_K)
    if S == 1:
        m_u = o_u < units
    else:
        o_u, m_u = tl.minimum(o_u, units - 1), tl.full((BLOCK_U,), True, tl.int1)
    K = aligned(length, ALIGN) if S is None else D * S
    m_k = within(o_k, K, BLOCK_K, LEADING, ALIGN)
    mask = m_u[:, None] if EVEN else m_u[:, None] & m_k[None, :]
    n = (o_u // (G * positions)).to(tl.int64)
    place = o_u % (G * positions)
    g = o_u % G
    if FIRST:
        gain, offset = affine_of_units(
            parameters, o_u // positions, m_u, n, g, o_k, m_k, mask, reciprocal, G, D, S, ONCE, ALIGN, dtype
        )
        tl.debug_barrier()
    b_x = tl.load(pointers_of_units(p_x, o_u, n, place, x_sample, x_unit, K, o_k, PACKED, ALIGN), mask, 0.0)
    if added.before is not None or BY_CHANNEL:
        b_gate = None
        if BY_CHANNEL:
            b_gate = number_of_channels(added, o_u, m_u, n, g, o_k, mask, reciprocal, G, D, S, ALIGN, dtype)
        elif added.gate is not None:
            b_gate = gate_of_units(added, o_u, m_u, o_k, mask, PER_ELEMENT, ALIGN, dtype)
        b_x = added_before(b_x, b_gate, added, o_u, n, place, K, o_k, mask, PACKED, ALIGN, dtype)
    if added.total is not None:
        tl.store(pointers_of_units(added.total, o_u, n, place, y_sample, y_unit, K, o_k, PACKED, ALIGN), b_x, mask)
    b_x = b_x.to(dtype)
    if EARLY:
        b_behind = added_behind(added, o_u, n, place, K, o_k, mask, PACKED, ALIGN)
        if not FIRST:
            gain, offset = affine_of_units(
                parameters, o_u // positions, m_u, n, g, o_k, m_k, mask, reciprocal, G, D, S, ONCE, ALIGN, dtype
            )
    if RMS:
        variance = tl.sum(b_x * b_x, 1) / K
        mean = tl.zeros_like(variance)
    else:
        if PIVOT:
            p_unit = p_x + begin_of_units(o_u, n, place, x_sample, x_unit, K, PACKED, ALIGN)
            pivot = pivot_of(p_unit, place_of(1, K, BLOCK_K), place_of(2, K, BLOCK_K), m_u, dtype)
            deviation = pivoted(b_x, pivot[:, None], mask, not EVEN)
            b_total, b_squares = tl.reduce((deviation, deviation * deviation), 1, add_pair)
            mean, m2 = pivoted_moments(pivot, b_total, b_squares, K)
        else:
            mean, m2 = held_moments(b_x, mask, None, None, K, not EVEN, p_x.dtype.element_ty.primitive_bitwidth > 16)
        variance = m2 / K
        if p_mean is not None:
            tl.store(p_mean + o_u, mean, m_u)
    rstd = inverse_deviation(variance, eps)
    if p_rstd is not None:
        tl.store(p_rstd + o_u, rstd, m_u)
    if p_var is not None:
        tl.store(p_var + o_u, variance, m_u)
    if not EARLY:
        b_behind = added_behind(added, o_u, n, place, K, o_k, mask, PACKED, ALIGN)
        gain, offset = affine_of_units(
            parameters, o_u // positions, m_u, n, g, o_k, m_k, mask, reciprocal, G, D, S, ONCE, ALIGN, dtype
        )
    b_z = behind(normalized(b_x - mean[:, None], gain * rstd[:, None], offset), b_behind)
    b_y = VALUE(b_z, alpha_of(activation_parameter, ALPHA, dtype))
    p_out = pointers_of_units(p_y, o_u, n, place, y_sample, y_unit, K, o_k, PACKED, ALIGN)
    if OUT is None:
        tl.store(p_out, b_y.to(p_y.dtype.element_ty), mask)
    else:
        store_codes(p_out, b_y, mask, p_out_scale, o_u, m_u, OUT, BY_ROW, NATIVE)


@triton.jit(
    do_not_specialize=["units", "reciprocal"],
    do_not_specialize_on_alignment=["length", "positions", "x_sample", "x_unit", "y_sample", "y_unit"],
)
def whole_forward(
    p_x, p_y, p_weight, p_bias, p_scale, p_shift, p_mean, p_rstd, p_var, p_out_scale, units, length,
    reciprocal, positions, x_sample, x_unit, y_sample, y_unit, eps: tl.float64, activation_parameter: tl.float64,
    OVERLAP: tl.constexpr, RMS: tl.constexpr, VALUE: tl.constexpr, ALPHA: tl.constexpr, G: tl.constexpr,
    D: tl.constexpr, S: tl.constexpr, EVEN: tl.constexpr, EARLY: tl.constexpr, ONCE: tl.constexpr, PACKED: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK_U: tl.constexpr, BLOCK_K: tl.constexpr, LEADING: tl.constexpr, PIVOT: tl.constexpr,
    FIRST: tl.constexpr, OUT: tl.constexpr, BY_ROW: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """:func:`units_forward` with nothing around the norm."""
    nothing = Added(None, None, None, None, None, 1, 1, 1, 1, 1, 1, 1, 1)
    units_forward(
        p_x, p_y, Parameters(p_weight, p_bias, p_scale, p_shift), p_mean, p_rstd, p_var, nothing, units, length,
        reciprocal, positions, x_sample, x_unit, y_sample, y_unit, eps, activation_parameter,
        OVERLAP, RMS, VALUE, ALPHA, G, D, S, EVEN, EARLY, ONCE, PACKED, ALIGN, BLOCK_U, BLOCK_K, LEADING, False,
        False, p_out_scale, OUT, BY_ROW, NATIVE, PIVOT, FIRST,
    )  # fmt: skip
