"""Kernels of the channels_last order, where each position of each sample is a contiguous row of C channels.

The work is cut into slabs of whole rows. A slab's statistics are kept per channel, so that every loop runs along
contiguous channels whatever the number of channels per group; groups are formed when slabs are combined. Where the
channels are few, REPEAT positions make a row, whose coefficients and sums are those of its channels, repeated. Each
kernel is called for all samples, or, where samples are small, all kernels for a few samples while these lie in cache.

batch_norm without modulation is one sample of N * S positions where the strides permit it (Problem.folded). Its short
planes are groups of channels that share their parameters, with the samples as positions (Problem.spread_over).
"""

from __future__ import annotations

from functools import cache

import numpy as np

from fusednorm.backends.cpu.geometry import (
    BIAS_DTYPE,
    COEFFICIENTS,
    GROUP_CHANNELS,
    GROUPS,
    INPUT_SAMPLE,
    INPUT_STEP,
    KEPT_WORKER,
    OUTPUT_SAMPLE,
    OUTPUT_STEP,
    PER_BATCH,
    PIECE,
    PIECES,
    REPEAT,
    RMS,
    RUN,
    SAMPLES,
    SCALE_DTYPE,
    SCRATCH,
    SHARED,
    SHIFT_DTYPE,
    SLOTS,
    SPATIAL,
    VECTOR,
    WEIGHT_DTYPE,
)
from fusednorm.backends.cpu.kernels.affine import normalized, publish_units, reduced_count
from fusednorm.backends.cpu.kernels.device import exact, inlined, pivot_or, reassociated, span, uncontracted
from fusednorm.backends.cpu.kernels.elements import Element, advanced
from fusednorm.backends.cpu.kernels.elements import element as accesses
from fusednorm.backends.cpu.kernels.lanes import lanes
from fusednorm.backends.cpu.kernels.mathematics import cheap
from fusednorm.backends.cpu.kernels.moments import ENDS, merge, moments
from fusednorm.backends.cpu.kernels.operands import converting, rounded_number
from fusednorm.problem import DTYPE_BYTES

TILE = SCRATCH  # channels summed at a time
FEWEST_POSITIONS = 16  # a channel's pivot is the mean of at least so many positions, or of all
#: Rows that a first-level cache holds at least, where they lie a multiple of so many bytes apart.
CACHE_WAYS, WAY_BYTES = 8, 4096
#: Elements of a tensor that lies in cache, and of a row that is long. On an AMD processor the forward of (32, 64, 56,
#: 56) in float32 takes 3.9 ms in fours and 2.7 in single rows, the backward of (64, 256, 28, 28) in bfloat16 8.7 and
#: 4.0, but of (44, 1280, 8, 8) in float32 2.2 and 2.8, and the evaluation of (4, 256, 14, 14) 22 us and 26.
CACHED, LONG_ROW = 1 << 19, 1024
#: Bytes of a tensor at most whose statistics, which write nothing, are made of four rows at a time. On an AMD EPYC with
#: 32 MB of L3 cache group_norm(32) of (4, 256, 64, 64) in float16, 8 MB, takes 0.46 ms so and 0.51 in single rows, of
#: (16, 256, 56, 56) in bfloat16, 25 MB, 2.6 and 2.3; between 10 and 17 MB neither is faster throughout.
SUMMED_BYTES = 8 << 20
FLUSH = 64  # rows summed in the compute dtype before the sums go to float64
SUMMED_CHANNELS = 512  # channels of a group whose M2 is one sum; of longer groups the roundings would show in float64
TOGETHER = 256  # single channels whose statistics are merged together: 4 KB of ``stats``


@exact
def piece_size(geometry, piece):
    """The positions of a sample's piece, which is a slab."""
    return min(geometry[PIECE], geometry[SPATIAL] - piece * geometry[PIECE])


@exact
def locate(geometry, task):
    """The sample, first position and number of positions of a slab."""
    n, piece = task // geometry[PIECES], task % geometry[PIECES]
    return n, piece * geometry[PIECE], piece_size(geometry, piece)


@exact
def channel_count(geometry):
    return geometry[GROUPS] * geometry[GROUP_CHANNELS]


@exact
def row_width(geometry):
    """The elements of a row of REPEAT positions."""
    return channel_count(geometry) * geometry[REPEAT]


@exact
def takes_four(geometry, most=CACHED):
    """Whether four rows are taken together, which read the numbers of channels once: rows of a tensor that lies in
    cache, of ``most`` elements, or long ones. Memory reads and writes four short pieces more slowly than one long one.
    """
    return geometry[SAMPLES] * geometry[SPATIAL] * channel_count(geometry) <= most or row_width(geometry) >= LONG_ROW


@exact
def rows_of(geometry, positions):
    """The rows of REPEAT positions, of which the last may have fewer."""
    return (positions + geometry[REPEAT] - 1) // geometry[REPEAT]


@exact
def coefficients_from(coefficients, geometry, worker, first):
    """The coefficients, from which those of sample n are n places further, where a worker begins with sample ``first``:
    those of all samples, or of the few that the worker keeps in its cache."""
    if geometry[SLOTS] == 0:
        return coefficients
    return advanced(coefficients, worker * geometry[KEPT_WORKER] - first * COEFFICIENTS * row_width(geometry))


@exact
def statistic_unit(geometry, n, c):
    return c if geometry[PER_BATCH] else n * geometry[GROUPS] + c // geometry[GROUP_CHANNELS]


@exact
def next_group(geometry, n, g):
    """The sample and group of the next unit; to divide a unit's number takes as long as a small unit."""
    return (n, g + 1) if g + 1 < geometry[GROUPS] else (n + 1, 0)


@exact
def fold(sums, n, together):
    """The sums of n columns that ``together`` positions of a row have, in the place of the first position's."""
    while together > 1:
        half = (together + 1) // 2
        for c in range((together - half) * n):
            sums[c] += sums[half * n + c]
        together = half


@exact
def add_folded(sums, wide, n, together, partials, first):
    """Add these sums to n partials from ``first`` on, in float64; ``wide`` has room for them."""
    for c in range(n * together):
        wide[c] = np.float64(sums[c])
    fold(wide, n, together)
    for c in range(n):
        partials[first + c] += wide[c]


@exact
def repeated(values, first, n, total):
    """n numbers from ``first`` on, again and again up to ``total``."""
    while n < total:
        for c in range(first, first + min(n, total - n)):
            values[n + c] = values[c]
        n *= 2


@cache
def by_column(element: Element):
    """load(x, i, c): element i of x, which is in column c."""
    load = element.load

    @inlined
    def at(x, i, c):
        return load(x, i)

    return at


@cache
def row_adder(element: Element, load_at=None):
    """add_rows(x, i, step, rows, fours, n, pivot, first, second): the deviations of n columns of so many rows from
    their pivots, and the squares of these, added by four rows where ``fours``, which quarters the traffic on the sums.
    ``load_at(x, i, c)`` gives element i of column c of whatever x is; such loads differ, and the sums of what they give
    are to have the same bits.
    """
    at, add_first, add_second = load_at or by_column(element), element.add_first, element.add_second

    @(exact if load_at else reassociated)
    def add_rows(x, i, step, rows, fours, n, pivot, first, second):
        quads = rows - rows % 4 if fours else 0
        for r in range(0, quads, 4):
            i0 = i + r * step
            i1, i2, i3 = i0 + step, i0 + 2 * step, i0 + 3 * step
            for c in range(n):
                p = pivot[c]
                d0, d1, d2, d3 = at(x, i0 + c, c) - p, at(x, i1 + c, c) - p, at(x, i2 + c, c) - p, at(x, i3 + c, c) - p
                add_first(first, c, (d0 + d1) + (d2 + d3))
                add_second(second, c, (d0 * d0 + d1 * d1) + (d2 * d2 + d3 * d3))
        for r in range(quads, rows):
            i0 = i + r * step
            for c in range(n):
                d0 = at(x, i0 + c, c) - pivot[c]
                add_first(first, c, d0)
                add_second(second, c, d0 * d0)

    return add_rows


@cache
def pivot_finder(element: Element, load_at=None):
    """find_pivot(x, i, step, rows, n, together, pivot): the means of n columns over some rows, half of them the first
    and half the last, whose elements are ``together`` positions, repeated. ``load_at`` as there."""
    at, nearest, add_first, T = load_at or by_column(element), element.round, element.add_first, element.compute

    @exact
    def find_pivot(x, i, step, rows, n, together, pivot):
        for c in range(n * together):
            pivot[c] = T(0)
        if rows == 0:
            return
        some = max(rows // ENDS, min(rows, (FEWEST_POSITIONS + together - 1) // together))
        half = some // 2
        pairs, apart = half - half % 2, (rows - half) * step
        for r in range(0, pairs, 2):
            i0 = i + r * step
            i1, i2, i3 = i0 + step, i0 + apart, i0 + apart + step
            for c in range(n * together):
                add_first(pivot, c, (at(x, i0 + c, c) + at(x, i1 + c, c)) + (at(x, i2 + c, c) + at(x, i3 + c, c)))
        for r in range(pairs, half):
            for c in range(n * together):
                add_first(pivot, c, at(x, i + r * step + c, c) + at(x, i + r * step + apart + c, c))
        for r in range(half, some - half):
            for c in range(n * together):
                add_first(pivot, c, at(x, i + r * step + c, c))
        fold(pivot, n, together)
        for c in range(n):
            pivot[c] = pivot_or(nearest(pivot[c] / T(some * together)), at(x, i + c, c))
        repeated(pivot, 0, n, n * together)

    return find_pivot


@cache
def moments_of_few(element: Element):
    """of_few(x, i, step, rows, n, rms, pivot, first, second, partials, means, m2s): (mean, M2) of n columns, VECTOR of
    them at least, of so few rows that a column's pivot is the mean of all of them; its sums stay in registers. The
    forward of group_norm(32) of (10, 2048, 3, 1) takes 47 us so in one thread, and 64 row by row."""
    vector, nearest, T = lanes(element.dtype), element.round, element.compute
    load, read, keep, spread, load_element = vector.load, vector.read, vector.keep, vector.spread, element.load

    @exact
    def add(x, i, step, rows, sums, c):
        total = load(x, i + c)
        for r in range(1, rows):
            total = total + load(x, i + r * step + c)
        keep(sums, c, total)

    @exact
    def deviate(x, i, step, rows, pivot, first, second, c):
        p, d = read(pivot, c), spread(T(0))
        squares = d
        for r in range(rows):
            deviation = load(x, i + r * step + c) - p
            d = d + deviation
            squares = squares + deviation * deviation
        keep(first, c, d)
        keep(second, c, squares)

    @exact
    def of_few(x, i, step, rows, n, rms, pivot, first, second, partials, means, m2s):
        if rms:
            for c in range(n):
                pivot[c] = T(0)
        else:
            for c in range(0, n, VECTOR):  # the last vector overlaps the one before it
                add(x, i, step, rows, pivot, min(c, n - VECTOR))
            for c in range(n):
                pivot[c] = pivot_or(nearest(pivot[c] / T(rows)), load_element(x, i + c))
        for c in range(0, n, VECTOR):
            deviate(x, i, step, rows, pivot, first, second, min(c, n - VECTOR))
        share = 1.0 / rows
        for c in range(n):
            total, squares = np.float64(first[c]), np.float64(second[c])
            shift = total * share
            m2 = squares - total * shift
            if rms:
                partials[means + c], partials[m2s + c] = 0.0, squares
            else:
                partials[means + c], partials[m2s + c] = np.float64(pivot[c]) + shift, 0.0 if m2 < 0.0 else m2

    return of_few


@cache
def slab_moments(element: Element, sample: int = INPUT_SAMPLE, row_step: int = INPUT_STEP, load_at=None):
    """(mean, M2) per channel of one slab, written to the slab's place in the partials; rms: (0, sum of squares). Those
    of a run of one group's elements stand in the place of its first channel.
    ``sample`` and ``row_step`` are the fields of the geometry that say where samples and positions lie; ``load_at`` is
    as that of :func:`row_adder`, for no runs and at most TILE channels."""
    scratch, wide_scratch, T = element.scratch, accesses("float64").scratch, element.compute
    add_rows, find_pivot, run_moments = row_adder(element, load_at), pivot_finder(element, load_at), moments(element)
    of_few, runs = moments_of_few(element), load_at is None
    size = DTYPE_BYTES[element.dtype]
    most = SUMMED_BYTES // size

    @exact
    def moments_of_slab(x, partials, geometry, task):
        n, position, positions = locate(geometry, task)
        channels, step = channel_count(geometry), geometry[row_step]
        origin = n * geometry[sample] + position * step
        if runs and geometry[RUN]:
            mean, m2 = run_moments(x, origin, positions * channels, geometry[RMS])
            partials[2 * task * channels], partials[(2 * task + 1) * channels] = mean, m2
            return
        pivot, first, second, wide = scratch(), scratch(), scratch(), wide_scratch()
        rms, fours = geometry[RMS], takes_four(geometry, most)
        together = min(geometry[REPEAT], positions)
        rows, rest = positions // max(1, together), positions % max(1, together)
        for tile in range(0, channels, TILE):
            width = min(TILE, channels - tile)
            means, m2s = 2 * task * channels + tile, (2 * task + 1) * channels + tile
            few = CACHE_WAYS if step * size % WAY_BYTES == 0 else FEWEST_POSITIONS
            if runs and together == 1 and positions <= few and width >= VECTOR:
                of_few(x, origin + tile, step, positions, width, rms, pivot, first, second, partials, means, m2s)
                continue
            find_pivot(x, origin + tile, step * together, 0 if rms else rows, width, together, pivot)
            for c in range(width * together):
                first[c] = second[c] = T(0)
            for c in range(width):
                partials[means + c] = partials[m2s + c] = 0.0
            for r in range(0, rows + (rest > 0), FLUSH):
                i, count = origin + tile + r * step * together, min(FLUSH, rows - r)
                add_rows(x, i, step * together, count, fours, width * together, pivot, first, second)
                if rest > 0 and r + FLUSH > rows:
                    add_rows(x, i + count * step * together, step, 1, False, width * rest, pivot, first, second)
                add_folded(first, wide, width, together, partials, means)
                add_folded(second, wide, width, together, partials, m2s)
                for c in range(width * together):
                    first[c] = second[c] = T(0)
            for c in range(width):
                shift = partials[means + c] / positions
                m2 = partials[m2s + c] - partials[means + c] * shift
                if rms:
                    partials[means + c] = 0.0
                else:
                    partials[means + c], partials[m2s + c] = np.float64(pivot[c]) + shift, 0.0 if m2 < 0.0 else m2

    return moments_of_slab


@reassociated
def _total(partials, first, n):
    total = 0.0
    for c in range(first, first + n):
        total += partials[c]
    return total


@reassociated
def _total_distance(partials, first, n, centre):
    total = 0.0
    for c in range(first, first + n):
        total += partials[c] - centre
    return total


@reassociated
def _total_m2(partials, means, m2s, n, rows, centre):
    """The sum of n channels' M2 about the common mean, ``centre``."""
    m2, spread = 0.0, 0.0
    for c in range(n):
        delta = partials[means + c] - centre
        m2 += partials[m2s + c]
        spread += delta * delta
    return m2 + rows * spread


@exact
def _unit_moments(partials, stats, geometry, n, g, wide):
    """Combine the channels and slabs under the statistic of a group: the mean of means, then M2 about it. ``wide``: the
    input has float64, so the roundings of a sum of many means show, and those of their distances from it do not."""
    channels, pieces, width = channel_count(geometry), geometry[PIECES], geometry[GROUP_CHANNELS]
    unit, slabs, stride = n * geometry[GROUPS] + g, 2 * n * pieces * channels + g * width, 2 * channels
    if geometry[RUN]:
        count, centre, m2 = 0, 0.0, 0.0
        for piece in range(pieces):
            i, length = slabs + piece * stride, piece_size(geometry, piece) * channels
            count, centre, m2 = merge(count, centre, m2, length, partials[i], partials[i + channels])
        stats[2 * unit], stats[2 * unit + 1] = centre, m2
        return
    total = 0.0
    for piece in range(pieces):
        total += piece_size(geometry, piece) * _total(partials, slabs + piece * stride, width)
    # About zero, M2 is the sum of squares.
    centre = 0.0 if geometry[RMS] else total / reduced_count(geometry)
    if wide and not geometry[RMS]:
        rest = 0.0
        for piece in range(pieces):
            rest += piece_size(geometry, piece) * _total_distance(partials, slabs + piece * stride, width, centre)
        rest /= reduced_count(geometry)
        centre += rest if rest - rest == 0.0 else 0.0  # finite
    m2, lost = 0.0, 0.0
    for piece in range(pieces):
        means, rows = slabs + piece * stride, piece_size(geometry, piece)
        for block in range(0, width, SUMMED_CHANNELS):
            length = min(SUMMED_CHANNELS, width - block)
            term = _total_m2(partials, means + block, means + channels + block, length, rows, centre)
            larger = m2 + term
            grown = larger - m2
            lost += (m2 - (larger - grown)) + (term - grown)  # what the sum's rounding has lost
            m2 = larger
    stats[2 * unit], stats[2 * unit + 1] = centre, m2 + (lost if lost - lost == 0.0 else 0.0)


@exact
def _start_sums(stats, i, partials, means, channels, n):
    for k in range(n):
        stats[i + 2 * k], stats[i + 2 * k + 1] = partials[means + k], partials[means + channels + k]


@exact
def _add_means(stats, i, partials, means, n, rows):
    for k in range(n):
        stats[i + 2 * k] += rows * partials[means + k]


@exact
def _add_distances(stats, i, partials, means, n, rows):
    for k in range(n):
        stats[i + 2 * k + 1] += rows * (partials[means + k] - stats[i + 2 * k])


@exact
def _add_m2(stats, i, partials, means, channels, n, rows):
    for k in range(n):
        delta = partials[means + k] - stats[i + 2 * k]
        stats[i + 2 * k + 1] += partials[means + channels + k] + rows * (delta * delta)


@cache
def _channel_statistics(element: Element):
    keep, wide = publish_units(element), element.compute is np.float64

    @exact
    def channel_statistics(partials, stats, mean, rstd, variance, geometry, eps, start, stop):
        """The same where a statistic has one channel, of units of one sample: loops along channels, not along slabs."""
        channels, pieces, rms, count = channel_count(geometry), geometry[PIECES], geometry[RMS], reduced_count(geometry)
        first = 0 if geometry[PER_BATCH] else start // channels * pieces
        last = geometry[SAMPLES] * pieces if geometry[PER_BATCH] else first + pieces
        i, c, n = 2 * start, start % channels, stop - start
        if last - first == 1:
            _start_sums(stats, i, partials, 2 * first * channels + c, channels, n)
        else:
            for k in range(i, i + 2 * n):
                stats[k] = 0.0
            for task in range(first, first if rms else last):
                _, _, rows = locate(geometry, task)
                _add_means(stats, i, partials, 2 * task * channels + c, n, rows)
            for k in range(n):
                stats[i + 2 * k] /= count
            if wide and not rms:
                # The sum's roundings grow with the number of slabs; those of the distances from a centre nearby do not.
                for task in range(first, last):
                    _, _, rows = locate(geometry, task)
                    _add_distances(stats, i, partials, 2 * task * channels + c, n, rows)
                for k in range(n):
                    rest = stats[i + 2 * k + 1] / count
                    stats[i + 2 * k] += rest if rest - rest == 0.0 else 0.0  # finite
                    stats[i + 2 * k + 1] = 0.0
            for task in range(first, last):
                _, _, rows = locate(geometry, task)
                _add_m2(stats, i, partials, 2 * task * channels + c, channels, n, rows)
        keep(stats, mean, rstd, variance, geometry, eps, start, stop)

    return channel_statistics


@cache
def _sample_coefficients(element: Element):
    convert, rounded, T = converting(element), rounded_number(element), element.compute

    @exact
    def of_shared(stats, coefficients, weight, bias, geometry, unit, i, width):
        rstd, n, gain, offset = stats[2 * unit + 1], geometry[GROUP_CHANNELS], 1.0, 0.0
        if geometry[WEIGHT_DTYPE]:
            gain = rounded(weight, unit, geometry[WEIGHT_DTYPE])
        if geometry[BIAS_DTYPE]:
            offset = rounded(bias, unit, geometry[BIAS_DTYPE])
        mean, a, b, inverse = T(stats[2 * unit]), T(gain * rstd), T(offset), T(rstd)
        for c in range(i, i + n):
            coefficients[c], coefficients[c + width] = mean, a
            coefficients[c + 2 * width], coefficients[c + 3 * width] = b, inverse

    @exact
    def of_unit(coefficients, mean, rstd, i, width, n):
        for c in range(i, i + n):
            coefficients[c] = T(mean)
            coefficients[c + width] = T(np.float64(coefficients[c + width]) * rstd)
            coefficients[c + 3 * width] = T(rstd)

    @exact
    def of_single_channels(stats, first, coefficients, i, width, n):
        for c in range(n):
            rstd = stats[2 * (first + c) + 1]
            coefficients[i + c] = T(stats[2 * (first + c)])
            coefficients[i + width + c] = T(np.float64(coefficients[i + width + c]) * rstd)
            coefficients[i + 3 * width + c] = T(rstd)

    @uncontracted
    def modulate(coefficients, i, width, rstd, c):
        """a and b of a channel, as :func:`affine` rounds them, from weight, bias, scale and shift in their places."""
        factor = 1.0 + np.float64(coefficients[i + c])
        gain, offset = np.float64(coefficients[i + width + c]), np.float64(coefficients[i + 2 * width + c])
        coefficients[i + width + c] = T(gain * factor * rstd)
        coefficients[i + 2 * width + c] = T(offset * factor + np.float64(coefficients[i + 3 * width + c]))

    @uncontracted
    def modulate_unit(coefficients, rstd, i, width, n):
        for c in range(n):
            modulate(coefficients, i, width, rstd, c)

    @uncontracted
    def modulate_single_channels(stats, first, coefficients, i, width, n):
        for c in range(n):
            modulate(coefficients, i, width, stats[2 * (first + c) + 1], c)

    @exact
    def of_modulated(stats, coefficients, weight, bias, scale, shift, geometry, n, i, width):
        channels, size, first = channel_count(geometry), geometry[GROUP_CHANNELS], statistic_unit(geometry, n, 0)
        convert(scale, n * channels, geometry[SCALE_DTYPE], T(0), coefficients, i, channels)
        # To add -0 changes nothing, a bias of -0 included.
        convert(shift, n * channels, geometry[SHIFT_DTYPE], T(-0.0), coefficients, i + 3 * width, channels)
        if size == 1:
            modulate_single_channels(stats, first, coefficients, i, width, channels)
            for c in range(channels):
                coefficients[i + c] = T(stats[2 * (first + c)])
                coefficients[i + 3 * width + c] = T(stats[2 * (first + c) + 1])
        else:
            for g in range(geometry[GROUPS]):
                mean, rstd, k = stats[2 * (first + g)], stats[2 * (first + g) + 1], i + g * size
                modulate_unit(coefficients, rstd, k, width, size)
                for c in range(k, k + size):
                    coefficients[c], coefficients[c + 3 * width] = T(mean), T(rstd)

    @exact
    def sample_coefficients(stats, coefficients, weight, bias, scale, shift, geometry, n):
        """mean, a, b and rstd of each channel of a sample."""
        channels, width = channel_count(geometry), row_width(geometry)
        base = n * COEFFICIENTS * width
        if geometry[SHARED]:
            for g in range(geometry[GROUPS]):
                i = base + g * geometry[GROUP_CHANNELS]
                of_shared(stats, coefficients, weight, bias, geometry, n * geometry[GROUPS] + g, i, width)
        else:
            convert(weight, 0, geometry[WEIGHT_DTYPE], T(1), coefficients, base + width, channels)
            convert(bias, 0, geometry[BIAS_DTYPE], T(0), coefficients, base + 2 * width, channels)
            first, size = statistic_unit(geometry, n, 0), geometry[GROUP_CHANNELS]
            if geometry[SCALE_DTYPE] or geometry[SHIFT_DTYPE]:
                of_modulated(stats, coefficients, weight, bias, scale, shift, geometry, n, base, width)
            elif size == 1:
                of_single_channels(stats, first, coefficients, base, width, channels)
            else:
                for g in range(geometry[GROUPS]):
                    unit = first + g
                    of_unit(coefficients, stats[2 * unit], stats[2 * unit + 1], base + g * size, width, size)
        for plane in range(4):
            repeated(coefficients, base + plane * width, channels, width)

    return sample_coefficients


@cache
def three_reader(element: Element):
    """read_three(coefficients, i, plane): the numbers of one element in three neighbouring planes, from place i on."""
    read = element.read

    @exact
    def read_three(coefficients, i, plane):
        return read(coefficients, i), read(coefficients, i + plane), read(coefficients, i + 2 * plane)

    return read_three


@cache
def _apply_slab(element: Element, value):
    load, store, T = element.load, element.store, element.compute
    read_three, four = three_reader(element), cheap(value)

    @inlined
    def put(x, i, y, j, centre, a, b, alpha):
        store(y, j, value(normalized(load(x, i) - centre, a, b), alpha))

    @exact
    def apply_row(x, i, y, j, coefficients, k, plane, width, alpha):
        for part in range(2):
            start, stop = span(part, width)
            for c in range(start, stop):
                centre, a, b = read_three(coefficients, k + c, plane)
                put(x, i + c, y, j + c, centre, a, b, alpha)

    @exact
    def apply_four(x, i, step, y, j, output_step, coefficients, k, plane, width, alpha):
        """Four rows, which read the coefficients once."""
        i1, i2, i3 = i + step, i + 2 * step, i + 3 * step
        j1, j2, j3 = j + output_step, j + 2 * output_step, j + 3 * output_step
        for part in range(2):
            start, stop = span(part, width)
            for c in range(start, stop):
                centre, a, b = read_three(coefficients, k + c, plane)
                put(x, i + c, y, j + c, centre, a, b, alpha)
                put(x, i1 + c, y, j1 + c, centre, a, b, alpha)
                put(x, i2 + c, y, j2 + c, centre, a, b, alpha)
                put(x, i3 + c, y, j3 + c, centre, a, b, alpha)

    @exact
    def apply_slab(x, y, coefficients, geometry, activation_parameter, task):
        n, first, positions = locate(geometry, task)
        channels, width, alpha = channel_count(geometry), row_width(geometry), T(activation_parameter)
        k, together = n * COEFFICIENTS * width, geometry[REPEAT]
        fours = positions // together // 4 if four and takes_four(geometry) else 0
        for block in range(fours):
            r = first + 4 * block * together
            apply_four(
                x, n * geometry[INPUT_SAMPLE] + r * geometry[INPUT_STEP], together * geometry[INPUT_STEP],
                y, n * geometry[OUTPUT_SAMPLE] + r * geometry[OUTPUT_STEP], together * geometry[OUTPUT_STEP],
                coefficients, k, width, width, alpha,
            )  # fmt: skip
        for row in range(4 * fours, rows_of(geometry, positions)):
            r = first + row * together
            i = n * geometry[INPUT_SAMPLE] + r * geometry[INPUT_STEP]
            j = n * geometry[OUTPUT_SAMPLE] + r * geometry[OUTPUT_STEP]
            apply_row(x, i, y, j, coefficients, k, width, min(width, (first + positions - r) * channels), alpha)

    return apply_slab


def build_moments(element: Element, value, pullback):
    """The statistics of slabs start to stop."""
    moments_of_slab = slab_moments(element)

    def moments_of_slabs(x, partials, geometry, start, stop):
        for task in range(start, stop):
            moments_of_slab(x, partials, geometry, task)

    return moments_of_slabs


def build_statistics(element: Element, value, pullback):
    """The statistics of units start to stop from those of the slabs."""
    channel_statistics, keep = _channel_statistics(element), publish_units(element)
    wide = element.compute is np.float64

    def statistics(partials, stats, mean, rstd, variance, geometry, eps, start, stop):
        unit = start
        if geometry[GROUP_CHANNELS] == 1:
            while unit < stop:
                last = min(unit + TOGETHER, stop, (unit // geometry[GROUPS] + 1) * geometry[GROUPS])
                channel_statistics(partials, stats, mean, rstd, variance, geometry, eps, unit, last)
                unit = last
        n, g = unit // geometry[GROUPS], unit % geometry[GROUPS]
        for _ in range(unit, stop):
            _unit_moments(partials, stats, geometry, n, g, wide)
            n, g = next_group(geometry, n, g)
        keep(stats, mean, rstd, variance, geometry, eps, unit, stop)

    return statistics


def build_coefficients(element: Element, value, pullback):
    """The coefficients of samples start to stop."""
    sample_coefficients = _sample_coefficients(element)

    def coefficients_of_samples(stats, coefficients, weight, bias, scale, shift, geometry, worker, start, stop):
        coefficients = coefficients_from(coefficients, geometry, worker, start)
        for n in range(start, stop):
            sample_coefficients(stats, coefficients, weight, bias, scale, shift, geometry, n)

    return coefficients_of_samples


def build_apply(element: Element, value, pullback):
    """The output of slabs start to stop."""
    apply_slab = _apply_slab(element, value)

    def apply(x, y, coefficients, geometry, activation_parameter, worker, start, stop):
        coefficients = coefficients_from(coefficients, geometry, worker, start // geometry[PIECES])
        for task in range(start, stop):
            apply_slab(x, y, coefficients, geometry, activation_parameter, task)

    return apply


BUILDERS = {
    "moments": build_moments,
    "statistics": build_statistics,
    "coefficients": build_coefficients,
    "apply": build_apply,
}
