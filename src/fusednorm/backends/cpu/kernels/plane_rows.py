"""Loops over one row of channels_first: its results, dz, the sums of a backward, and its gradient.

Rows that no activation enters, those of kept dz among them, are taken by vectors (lanes.py) from VECTOR elements on.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from fusednorm.backends.cpu.geometry import VECTOR, padded
from fusednorm.backends.cpu.kernels.affine import dz_of, normalized
from fusednorm.backends.cpu.kernels.device import exact, inlined, reassociated, span
from fusednorm.backends.cpu.kernels.elements import Element
from fusednorm.backends.cpu.kernels.lanes import lanes
from fusednorm.backends.cpu.kernels.mathematics import identity, identity_pullback, joined


@cache
def row_applier(element: Element, value):
    """y = value(A (x - mean) rstd + B) of one row."""
    load, store, T = element.load, element.store, element.compute
    vector = lanes(element.dtype)
    load_vector, store_vector, spread = vector.load, vector.store, vector.spread

    @exact
    def apply_vectors(x, i, y, j, n, mean, rstd, gain, offset, activation_parameter):
        centre, a, b = spread(T(mean)), spread(T(gain * rstd)), spread(T(offset))
        for start in range(0, n, VECTOR):
            k = min(start, n - VECTOR)
            store_vector(y, j + k, normalized(load_vector(x, i + k) - centre, a, b))

    @exact
    def apply_row(x, i, y, j, n, mean, rstd, gain, offset, activation_parameter):
        centre, a, b = T(mean), T(gain * rstd), T(offset)
        alpha = T(activation_parameter)
        for part in range(2):
            start, stop = span(part, n)
            for k in range(start, stop):
                store(y, j + k, value(normalized(load(x, i + k) - centre, a, b), alpha))

    @exact
    def apply_linear(x, i, y, j, n, mean, rstd, gain, offset, activation_parameter):
        if n < VECTOR:
            apply_row(x, i, y, j, n, mean, rstd, gain, offset, activation_parameter)
        else:
            apply_vectors(x, i, y, j, n, mean, rstd, gain, offset, activation_parameter)

    return apply_linear if value is identity else apply_row


#: Elements that are summed in the compute dtype. A processor with short vectors has few partial sums, each of which
#: rounds once for each of its elements: of 4096 AVX2's were beyond the bound.
SUMMED = 1024


@exact
def kept_place(start, k, n):
    """Where dz of a row's vector from ``k`` on is kept, ``start`` elements behind the vectors before it.

    The last vector of a short row does not overlap the vector before it here: a processor cannot load what two stores
    have just written before both have reached its cache.
    """
    return start if n <= SUMMED else k


kept_length = exact(padded)  # elements that the kept dz of a row takes


@cache
def row_keeper(element: Element, pullback, adds_behind: bool):
    load, keep, store, T = element.load, element.keep, element.store, element.compute
    at = joined(pullback)

    @inlined
    def keep_element(grad, g, x, i, kept, r, post, p, grad_post, o, centre, a, b, alpha):
        z = normalized(load(x, i) - centre, a, b)
        if adds_behind:
            z = at(z, load(post, p))
        dz = pullback(load(grad, g), z, alpha)
        keep(kept, r, dz)
        if adds_behind:
            store(grad_post, o, dz)

    @exact
    def keep_vector(grad, g, x, i, kept, r, post, p, grad_post, o, centre, a, b, alpha):
        for k in range(VECTOR):
            keep_element(grad, g + k, x, i + k, kept, r + k, post, p + k, grad_post, o + k, centre, a, b, alpha)

    @exact
    def keep_row(grad, g, x, i, kept, r, post, p, grad_post, o, n, centre, rstd, gain, offset, activation_parameter):
        """dz of one row, put into ``kept`` from r on: the sums of a row's last elements are scalar code, in which no
        exponential should be. With ``adds_behind`` z is z + post, and dz its gradient, which is stored too."""
        a, b, alpha = T(gain * np.float64(rstd)), T(offset), T(activation_parameter)
        if n < VECTOR:
            for k in range(n):
                keep_element(grad, g + k, x, i + k, kept, r + k, post, p + k, grad_post, o + k, centre, a, b, alpha)
            return
        for start in range(0, n, VECTOR):
            k = min(start, n - VECTOR)
            at_r = r + kept_place(start, k, n)
            keep_vector(grad, g + k, x, i + k, kept, at_r, post, p + k, grad_post, o + k, centre, a, b, alpha)

    return keep_row


@cache
def given_vector(element: Element, kept: bool):
    """A vector of dz that was kept, or is grad_output where there is no activation."""
    load, recall = lanes(element.dtype).load, lanes(element.dtype).recall

    @exact
    def given(grad, g, keep, r):
        return recall(keep, r) if kept else load(grad, g)

    return given


@cache
def row_summer(element: Element, pullback, kept: bool):
    """p = sum dz and q = sum dz xhat of one row, in float64."""
    load, make, T = element.load, dz_of(element, pullback, kept), element.compute
    given_dz = kept or pullback is identity_pullback
    given, vector = given_vector(element, kept), lanes(element.dtype)
    load_vector, spread, behind, totals = vector.load, vector.spread, vector.behind, vector.totals

    @exact
    def vector_sums(grad, g, x, i, keep, r, n, centre, rstd):
        centres, rstds = spread(centre), spread(rstd)
        p, q = spread(T(0)), spread(T(0))
        whole = n - n % VECTOR
        for k in range(0, whole, VECTOR):
            dz = given(grad, g + k, keep, r + k)
            p = p + dz
            q = q + dz * ((load_vector(x, i + k) - centres) * rstds)
        if n > whole:
            k = n - VECTOR
            dz = given(grad, g + k, keep, r + kept_place(whole, k, n))
            p = p + behind(dz, whole - k)
            q = q + behind(dz * ((load_vector(x, i + k) - centres) * rstds), whole - k)
        total_p, total_q = totals(p, q)
        return np.float64(total_p), np.float64(total_q)

    @reassociated
    def chunk_sums(grad, g, x, i, keep, r, n, centre, rstd, a, b, alpha):
        p, q = T(0), T(0)
        for k in range(n):
            deviation = load(x, i + k) - centre
            dz = make(grad, g + k, keep, r + k, normalized(deviation, a, b), alpha)
            p = p + dz
            q += dz * (deviation * rstd)
        return np.float64(p), np.float64(q)

    @exact
    def row_sums(grad, g, x, i, keep, r, n, centre, rstd, gain, offset, activation_parameter):
        if given_dz and VECTOR <= n <= SUMMED:
            return vector_sums(grad, g, x, i, keep, r, n, centre, rstd)
        p, q = 0.0, 0.0
        a, b, alpha = T(gain * np.float64(rstd)), T(offset), T(activation_parameter)
        for start in range(0, n, SUMMED):
            m = min(SUMMED, n - start)
            chunk_p, chunk_q = chunk_sums(grad, g + start, x, i + start, keep, r + start, m, centre, rstd, a, b, alpha)
            p += chunk_p
            q += chunk_q
        return p, q

    return row_sums


@cache
def gradient_maker(element: Element, pullback, kept: bool, adds_gradient: bool):
    """dx = rstd (A dz - (P + xhat Q) / K) of one row, as a dz + c2 xhat + c3. With ``adds_gradient`` dx gets the
    gradient of x itself, which lies as x does.

    With x - mean in place of xhat, c2 would hold rstd**2, which is beyond float32 for inputs of 1e19 and of 1e-20.
    Where the statistics were given, dx is a dz alone, since 0 xhat would be NaN where x is infinite.
    """
    load, store, make, T = element.load, element.store, dz_of(element, pullback, kept), element.compute
    given_dz, given, vector = kept or pullback is identity_pullback, given_vector(element, kept), lanes(element.dtype)
    load_vector, store_vector, spread = vector.load, vector.store, vector.spread

    @exact
    def gradient_vectors(grad, g, x, i, dx, o, keep, r, n, centre, rstd, a, c2, c3, training, grad_total):
        centres, rstds, a, c2, c3 = spread(centre), spread(rstd), spread(a), spread(c2), spread(c3)
        for start in range(0, n, VECTOR):
            k = min(start, n - VECTOR)
            gradient = a * given(grad, g + k, keep, r + kept_place(start, k, n))
            if training:
                gradient = gradient + (c2 * ((load_vector(x, i + k) - centres) * rstds) + c3)
            if adds_gradient:
                gradient = gradient + load_vector(grad_total, i + k)
            store_vector(dx, o + k, gradient)

    @exact
    def gradient_row(
        grad, g, x, i, dx, o, keep, r, n, centre, rstd, gain, offset, activation_parameter, mean_p, mean_q, training,
        grad_total,
    ):  # fmt: skip
        inverse = np.float64(rstd)
        a, b = T(gain * inverse), T(offset)
        c2, c3 = T(-inverse * mean_q), T(-inverse * mean_p)
        alpha = T(activation_parameter)
        if given_dz and n >= VECTOR:
            gradient_vectors(grad, g, x, i, dx, o, keep, r, n, centre, rstd, a, c2, c3, training, grad_total)
            return
        for part in range(2):
            start, stop = span(part, n)
            if training:
                for k in range(start, stop):
                    deviation = load(x, i + k) - centre
                    dz = make(grad, g + k, keep, r + k, normalized(deviation, a, b), alpha)
                    gradient = a * dz + (c2 * (deviation * rstd) + c3)
                    if adds_gradient:
                        gradient += load(grad_total, i + k)
                    store(dx, o + k, gradient)
            else:
                for k in range(start, stop):
                    z = normalized(load(x, i + k) - centre, a, b)
                    gradient = a * make(grad, g + k, keep, r + k, z, alpha)
                    if adds_gradient:
                        gradient += load(grad_total, i + k)
                    store(dx, o + k, gradient)

    return gradient_row
