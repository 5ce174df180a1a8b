"""Centred moments (mean, M2, count) and their merge by Chan's formula in a fixed order.

E[x**2] - E[x]**2 would lose everything where |mean| >> std.
"""

import triton
import triton.language as tl


@triton.constexpr_function
def compute_dtype(dtype):
    """The dtype of sums and statistics of an input."""
    return tl.float64 if dtype == tl.float64 else tl.float32


@triton.jit
def add_pair(a, b, c, d):
    return a + c, b + d


@triton.jit
def saved_statistics(p_mean, p_rstd, o_unit, m_unit):
    """mean and rstd of units. Where there is no unit both are 1, since x is 0 there: of x - mean = 0 and an infinite
    weight z would be NaN, which dy = 0 does not keep out of the sums over units."""
    rstd = tl.load(p_rstd + o_unit, m_unit, 1.0)
    mean = tl.load(p_mean + o_unit, m_unit, 1.0) if p_mean is not None else (m_unit == 0).to(rstd.dtype)
    return mean, rstd


@triton.jit
def chan(mean_a, m2_a, count_a, mean_b, m2_b, count_b):
    """The moments of two sets together; either may be empty."""
    # delta's square, and its product with a count, may be infinite. An empty first set has count 0, so delta is
    # multiplied by that count first.
    count = count_a + count_b
    delta = tl.where(count_b > 0.0, mean_b - mean_a, 0.0)
    step = delta * (count_b / tl.maximum(count, 1.0))
    mean = tl.where(count_a > 0.0, mean_a + step, mean_b)  # a quotient of equals may be off by a rounding
    return mean, m2_a + m2_b + (delta * count_a) * step, count


@triton.jit
def unit_of(mean):
    """The power of two in which deviations are counted, and its inverse: the deviations of numbers as large would else
    have infinite squares."""
    LARGE: tl.constexpr = 2.0**512 if mean.dtype == tl.float64 else 2.0**64
    large, one = tl.abs(mean) > LARGE, tl.full((), 1.0, mean.dtype)
    return tl.where(large, LARGE * one, one), tl.where(large, one / LARGE, one)


@triton.jit
def mean_of(total, count):
    """The mean of ``count`` numbers. Their quotient is rounded once, so that the mean of equal numbers of 16 bits is
    that number: ``/`` of float32 is off by two roundings, and (x - mean) rstd of a constant -1000 was 0.025, not 0."""
    if total.dtype == tl.float64:
        return total / count
    else:
        return tl.div_rn(total, tl.zeros_like(total) + count)


@triton.jit
def corrected(centre, unit, total, squares, share):
    """mean and M2 from the sums of deviations, and of their squares, about a mean that was rounded; ``share`` is the
    inverse of their count.

    Of equal numbers the deviations are that rounding, and their M2 is 0. A quarter of a million numbers of which one
    differs have more than ROUNDING of the squares.
    """
    ROUNDING: tl.constexpr = 2.0**-47 if centre.dtype == tl.float64 else 2.0**-18
    step = total * share
    m2 = squares - total * step
    m2 = tl.where(m2 < squares * ROUNDING, 0.0, m2)  # a NaN stays, and an infinite M2
    return centre + step * unit, m2 * unit * unit


@triton.jit
def place_of(i: tl.constexpr, length, BLOCK: tl.constexpr):
    """``i``, 1 or 2, where so many elements have it, or the last place. BLOCK: the power of two that holds them."""
    return i if BLOCK >= 4 else tl.minimum(length - 1, i)


@triton.jit
def pivot_of(p_unit, second, third, m_unit, dtype: tl.constexpr):
    """The element of each unit that its others are counted from: the middle one of its first and those at two offsets,
    so that it is no outlier among them, or 0 where the others' distance from it could be infinite."""
    a = tl.load(p_unit, m_unit, 0.0).to(dtype)
    b = tl.load(p_unit + second, m_unit, 0.0).to(dtype)
    c = tl.load(p_unit + third, m_unit, 0.0).to(dtype)
    middle = tl.maximum(tl.minimum(a, b), tl.minimum(tl.maximum(a, b), c))
    return tl.where(tl.abs(middle) < 2.0**126, middle, 0.0)


@triton.jit
def pivoted(b_x, pivot, mask, MASKED: tl.constexpr):
    """The deviations of units from their pivots. Their sums and those of their squares cross the threads together,
    which for 16-bit elements takes half the time of held_moments' two sums."""
    deviation = b_x - pivot
    return tl.where(mask, deviation, 0.0) if MASKED else deviation


@triton.jit
def pivoted_moments(pivot, total, squares, count):
    """mean and M2 from the sums of deviations from an element, and of their squares. The element's squared distance
    from the mean is at most M2, and what is subtracted ``count`` times that, so M2's relative error is some ``count``
    roundings of float32 at most, and few where the element is no outlier. Of equal numbers the deviations are 0, and
    their mean is that number."""
    inverse = 1.0 / count
    step = total * inverse
    m2 = squares - total * step
    m2 = tl.where(m2 < 0.0, 0.0, m2)  # a NaN stays
    beyond = (squares == float("inf")) & (tl.abs(total) < float("inf"))  # of finite elements
    return pivot + step, tl.where(beyond, squares, m2)


@triton.jit
def held_moments(b_x, mask, b_end, m_end, count, MASKED: tl.constexpr, WIDE: tl.constexpr):
    """mean and M2 of a tile's rows, in registers, and of their ends, or None, which only rows of 16-bit elements have.
    WIDE, for elements of more bits: the mean of the deviations corrects the rounding of the mean, which then is the sum
    times the inverse of the count. A quotient takes fifty instructions."""
    total = tl.sum(b_x, 1)
    if WIDE:
        share = tl.full((), 1.0, b_x.dtype) / count
        mean = total * share
        unit, inverse = unit_of(mean)
        deviation = deviation_from(b_x, mean, mask, MASKED) * inverse[:, None]
        total, squares = tl.reduce((deviation, deviation * deviation), 1, add_pair)
        return corrected(mean, unit, total, squares, share)
    if b_end is not None:
        total += tl.sum(b_end, 1)
    mean = mean_of(total, count)
    deviation = deviation_from(b_x, mean, mask, MASKED)
    m2 = tl.sum(deviation * deviation, 1)
    if b_end is not None:
        deviation = deviation_from(b_end, mean, m_end, True)
        m2 += tl.sum(deviation * deviation, 1)
    return mean, m2


@triton.jit
def deviation_from(b_x, mean, mask, MASKED: tl.constexpr):
    deviation = b_x - mean[:, None]
    if MASKED:
        deviation = tl.where(mask, deviation, 0.0)
    return deviation


@triton.jit
def merge_lanes(mean, m2, count, AXIS: tl.constexpr):
    """The moments of all lanes along an axis. The mean of the deviations corrects the rounding of the mean: the mean of
    equal numbers is then that number, and their M2 is 0."""
    share = count / tl.expand_dims(tl.maximum(tl.sum(count, AXIS), 1.0), AXIS)
    centre = tl.sum(mean * share, AXIS)
    centre += tl.sum((mean - tl.expand_dims(centre, AXIS)) * share, AXIS)
    delta = mean - tl.expand_dims(centre, AXIS)
    return centre, tl.sum(m2 + delta * (delta * count), AXIS)


@triton.jit
def with_ends(mean, m2, count, b_end, m_end, RMS: tl.constexpr):
    """The moments of lanes with two more rows, of which few elements are there. A lane may have none at all."""
    if RMS:
        return mean, m2 + tl.sum(b_end * b_end, 0)
    else:
        count_end = tl.sum(m_end.to(mean.dtype), 0)
        mean_end = tl.sum(b_end * (1.0 / tl.maximum(count_end, 1.0))[None, :], 0)  # of two, whose sum may be infinite
        deviation = tl.where(m_end, b_end - mean_end[None, :], 0.0)
        mean, m2, _ = chan(mean, m2, count, mean_end, tl.sum(deviation * deviation, 0), count_end)
        return mean, m2


@triton.jit
def merge(
    partials, o_unit, m_unit, S, span,
    RMS: tl.constexpr, PER_BATCH: tl.constexpr, LAST: tl.constexpr, REPEAT: tl.constexpr, ACROSS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """(mean, M2, count) of units from the partials of their channels and chunks, with PER_BATCH of all samples.

    Each chunk but the last has ``span`` of a channel's S positions. REPEAT chunks lie side by side, and each has every
    REPEAT-th position, with ACROSS counted from the first sample of all. The first number of a partial is the mean, the
    second M2.
    """
    dtype: tl.constexpr = partials.pointer.dtype.element_ty
    mean = tl.zeros((BLOCK_R * BLOCK_D, o_unit.shape[0]), dtype)
    m2 = tl.zeros((BLOCK_R * BLOCK_D, o_unit.shape[0]), dtype)
    count = tl.zeros((BLOCK_R * BLOCK_D, o_unit.shape[0]), dtype)
    for row in range(0, partials.rows, BLOCK_R):
        for d in range(0, partials.groups.D, BLOCK_D):
            o_partial, mask, k, n, _ = partials_of(partials, o_unit, m_unit, row, d, PER_BATCH, LAST, BLOCK_R, BLOCK_D)
            b_m2 = tl.load(partials.pointer + partials.total + o_partial, mask, 0.0)
            b_mean = tl.zeros_like(b_m2) if RMS else tl.load(partials.pointer + o_partial, mask, 0.0)
            before = n * S % REPEAT if ACROSS else 0  # positions of the sample before, in the first row
            left = (before + S + REPEAT - 1 - k % REPEAT) // REPEAT - (k // REPEAT).to(tl.int64) * span
            held = tl.minimum(span, left)
            if ACROSS:
                held = tl.maximum(held, 0) - (k < before).to(tl.int64)
            b_count = tl.where(mask, held, 0).to(dtype)
            if row + d == 0:
                mean, m2, count = b_mean, b_m2, b_count
            else:  # of each lane, so that lanes wait for each other once
                mean, m2, count = chan(mean, m2, count, b_mean, b_m2, b_count)
    mean, m2 = merge_lanes(mean, m2, count, 0)
    return mean, m2, tl.sum(count, 0)


@triton.jit
def offsets_of_partials(n, k, o_c, C, chunks, LAST: tl.constexpr):
    """The offsets of the partials of samples, chunks and channels, in the memory order of the tensor."""
    if LAST:
        return n * C * chunks + k * C + o_c
    else:
        return n * C * chunks + k + o_c * chunks


@triton.jit
def partials_of(
    partials, o_unit, m_unit, row, d,
    PER_BATCH: tl.constexpr, LAST: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """(offsets, mask, chunks, samples, channels) of BLOCK_R rows of BLOCK_D channels' partials, a unit to a column."""
    G, D, C = partials.groups
    rows, chunks = partials.rows, partials.chunks
    lane = tl.arange(0, BLOCK_R * BLOCK_D)[:, None]
    unit = o_unit[None, :]
    j = row + lane // BLOCK_D
    o_d = d + lane % BLOCK_D
    if PER_BATCH:
        n = (j // chunks).to(tl.int64)
        k = j % chunks
        o_c = unit * D + o_d
    else:
        n = (unit // G).to(tl.int64)
        k = j
        o_c = unit % G * D + o_d
    return offsets_of_partials(n, k, o_c, C, chunks, LAST), (j < rows) & (o_d < D) & m_unit[None, :], k, n, o_c


@triton.jit
def inverse_deviation(variance, eps):
    return tl.rsqrt(variance + tl.full((), eps, variance.dtype))


@triton.jit
def inverse_deviation_given(b_variance, eps, dtype: tl.constexpr):
    """The inverse deviation in ``dtype`` of a variance in any dtype. A float64 variance may be beyond float32, so it is
    rounded only after the root. ``rsqrt`` takes a subnormal float32 for zero, so such a one is enlarged by 2^24."""
    if b_variance.dtype == tl.float64 or dtype == tl.float64:
        wide = b_variance.to(tl.float64)
        return (1.0 / tl.sqrt(wide + tl.full((), eps, tl.float64))).to(dtype)
    else:
        least: tl.constexpr = 2.0**-126
        shifted = b_variance.to(dtype) + tl.full((), eps, dtype)
        factor = tl.where(shifted < least, 2.0**12, 1.0)
        return tl.rsqrt(shifted * factor * factor) * factor
