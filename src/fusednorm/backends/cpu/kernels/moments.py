"""Centred partial statistics (mean, M2) and their merge.

M2 is the sum of squared deviations from the mean. A chunk takes its deviations from a pivot, the mean of a sixteenth of
it, half from its beginning and half from its end: one read, and no cancellation. With a fraction f of a chunk under the
pivot, (pivot - mean)**2 is at most (1 - f) / f = 15 times the variance of the chunk whatever the data, so M2 keeps all
but four bits. Of data that drift steadily it keeps all: from a pivot of their beginning alone the results were four
times as far from fp64. E[x**2] - E[x]**2 would lose everything where |mean| >> std. The pivot is rounded to the input's
dtype, which makes the deviations of 16-bit inputs exact. Partials merge by Chan's formula (Chan, Golub, LeVeque 1983).
"""

from __future__ import annotations

from functools import cache

import numpy as np

from fusednorm.backends.cpu.geometry import VECTOR
from fusednorm.backends.cpu.kernels.device import exact, pivot_or, reassociated
from fusednorm.backends.cpu.kernels.elements import Element
from fusednorm.backends.cpu.kernels.lanes import lanes

CHUNK = 4096  # elements: 16 KB of float32, half of the L1 cache
ENDS = 16  # a chunk's pivot is the mean of 1/16 of it, half of it at each end
#: Rows of so many elements at most are taken vector by vector, without the ends of LLVM's own loops, and of 16 bits,
#: each of whose vectors is little work, longer ones: on an Intel Xeon rms_norm of (9360, 371) in fp16 takes 0.80 ms so,
#: and 1.10.
SHORT, SHORT_16 = 256, 1024
#: Short units whose statistics are made before their outputs: the root and the divisions of one then do not wait for
#: those of another. layer_norm of (43456, 67) in bf16 takes 0.49 ms so, and 0.85 row by row. So few of the longer ones
#: stay in the L1 cache.
TOGETHER, FEW_TOGETHER = 16, 4
FEWEST = 64  # and of at least so many elements: with fewer, the typical (pivot - mean)**2 comes near the worst


@exact
def merge(count, mean, m2, other_count, other_mean, other_m2):
    """Chan's merge of two partial statistics; the first may be empty."""
    total = count + other_count
    delta = other_mean - mean
    weight = other_count / total
    return total, mean + delta * weight, m2 + other_m2 + (delta * count) * (delta * weight)


def longest_short(element: Element) -> int:
    """The elements up to which a row of a dtype is short."""
    return SHORT_16 if element.dtype in ("float16", "bfloat16") else SHORT


@cache
def units_together(element: Element):
    """units_together(n): how many units of n elements are taken together."""
    short = longest_short(element)

    @exact
    def units_together(n):
        return TOGETHER if n <= SHORT else FEW_TOGETHER if n <= short else 1

    return units_together


@cache
def moments(element: Element, vectors: bool = True):
    """moments(x, offset, n, rms) -> (mean, M2) in float64 of n contiguous elements; rms: (0, sum of squares). Without
    ``vectors`` the element's load takes one at a time, of whatever x is."""
    load, nearest, T, short = element.load, element.round, element.compute, longest_short(element)
    vector = lanes(element.dtype)
    load_vector = vector.load_total if load is element.load_total else vector.load
    spread, behind, totals = vector.spread, vector.behind, vector.totals

    @exact
    def short_moments(x, offset, n, rms):
        pivot = T(0)
        if not rms:
            half, mean = max(VECTOR, min(n, FEWEST) // (2 * VECTOR) * VECTOR), spread(T(0))
            for i in range(0, half, VECTOR):
                mean = mean + (load_vector(x, offset + i) + load_vector(x, offset + n - half + i))
            pivot = pivot_or(nearest(totals(mean, mean)[0] / T(2 * half)), load(x, offset))
        pivots, first, second = spread(pivot), spread(T(0)), spread(T(0))
        whole, quads = n - n % VECTOR, n - n % (4 * VECTOR)
        for i in range(0, quads, 4 * VECTOR):  # one sum waits for another once in four vectors
            d0, d1 = load_vector(x, offset + i) - pivots, load_vector(x, offset + i + VECTOR) - pivots
            d2 = load_vector(x, offset + i + 2 * VECTOR) - pivots
            d3 = load_vector(x, offset + i + 3 * VECTOR) - pivots
            first = first + ((d0 + d1) + (d2 + d3))
            second = second + ((d0 * d0 + d1 * d1) + (d2 * d2 + d3 * d3))
        for i in range(quads, whole, VECTOR):
            deviation = load_vector(x, offset + i) - pivots
            first = first + deviation
            second = second + deviation * deviation
        if n > whole:
            deviation = behind(load_vector(x, offset + n - VECTOR) - pivots, VECTOR - (n - whole))
            first = first + deviation
            second = second + deviation * deviation
        total, square = totals(first, second)
        if rms:
            return 0.0, np.float64(square)
        shift = np.float64(total) / n
        m2 = np.float64(square) - np.float64(total) * shift
        return np.float64(pivot) + shift, 0.0 if m2 < 0.0 else m2

    @reassociated
    def chunk_moments(x, offset, n, rms):
        pivot = T(0)
        if not rms:
            half = (max(n // ENDS, min(n, FEWEST)) + 1) // 2
            for i in range(offset, offset + half):
                pivot += load(x, i) + load(x, i + (n - half))
            pivot = pivot_or(nearest(pivot / T(2 * half)), load(x, offset))
        first, second = T(0), T(0)
        for i in range(n):
            deviation = load(x, offset + i) - pivot
            first += deviation
            second += deviation * deviation
        if rms:
            return 0.0, np.float64(second)
        shift = np.float64(first) / n
        m2 = np.float64(second) - np.float64(first) * shift
        return np.float64(pivot) + shift, 0.0 if m2 < 0.0 else m2

    @exact
    def moments(x, offset, n, rms):
        if vectors and VECTOR <= n <= short:
            return short_moments(x, offset, n, rms)
        mean, m2 = chunk_moments(x, offset, min(n, CHUNK), rms)
        for start in range(CHUNK, n, CHUNK):
            length = min(CHUNK, n - start)
            chunk_mean, chunk_m2 = chunk_moments(x, offset + start, length, rms)
            _, mean, m2 = merge(start, mean, m2, length, chunk_mean, chunk_m2)
        return mean, m2

    return moments


@cache
def strided_moments(element: Element):
    """strided_moments(x, offset, step, n, rms): the moments of elements ``step`` apart, summed in float64."""
    load = element.load

    @exact
    def chunk_moments(x, offset, step, n, rms):
        pivot = 0.0
        if not rms:
            head = min(n, FEWEST)
            for i in range(head):
                pivot += np.float64(load(x, offset + i * step)) / head
        first, second = 0.0, 0.0
        for i in range(n):
            deviation = np.float64(load(x, offset + i * step)) - pivot
            first += deviation
            second += deviation * deviation
        if rms:
            return 0.0, second
        m2 = second - first * (first / n)
        return pivot + first / n, 0.0 if m2 < 0.0 else m2

    @exact
    def strided_moments(x, offset, step, n, rms):
        count, mean, m2 = 0, 0.0, 0.0
        for start in range(0, n, CHUNK):
            length = min(CHUNK, n - start)
            chunk_mean, chunk_m2 = chunk_moments(x, offset + start * step, step, length, rms)
            count, mean, m2 = merge(count, mean, m2, length, chunk_mean, chunk_m2)
        return mean, m2

    return strided_moments
