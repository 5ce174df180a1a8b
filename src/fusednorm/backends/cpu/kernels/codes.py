"""Outputs of 8 bits: the rounding of float32 to each format, in integers, and rows that are scaled and rounded.

A float32 is rounded to fewer bits of mantissa by an addition to its bits, ties to even; what is below the least normal
number, or is to be an int8, by the addition of a number whose last place is the unit. Magnitudes are compared by their
bits, of which those of NaN are the largest, so a maximum keeps NaN, and loops over it are vector code.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from fusednorm.backends.cpu.kernels.device import exact, span
from fusednorm.backends.cpu.kernels.elements import Element, from_bits, make_store
from fusednorm.formats import FORMATS, LEAST_AMAX, Format, float32_bits

_F32, _I8, _I32 = ir.FloatType(), ir.IntType(8), ir.IntType(32)
_MAGNITUDE, _INFINITY, _NAN_CODE = 0x7FFFFFFF, 0x7F800000, 0x7F


def _smaller(builder, a, b):
    return builder.select(builder.icmp_signed("<", a, b), a, b)


def _fixed(builder, size, form: Format):
    """A magnitude in units, rounded."""
    total = builder.fadd(builder.bitcast(size, _F32), ir.Constant(_F32, form.fixed))
    return builder.sub(builder.bitcast(total, _I32), _I32(float32_bits(form.fixed)))


def _float_code(builder, bits, size, form: Format):
    held = _smaller(builder, size, _I32(float32_bits(form.largest)))
    odd = builder.and_(builder.lshr(held, _I32(form.shift)), _I32(1))
    rounded = builder.lshr(builder.add(held, builder.add(odd, _I32((1 << form.shift - 1) - 1))), _I32(form.shift))
    normal = builder.icmp_signed(">=", held, _I32(form.least_normal))
    code = builder.select(normal, builder.sub(rounded, _I32(form.rebias)), _fixed(builder, held, form))
    code = builder.select(builder.icmp_signed(">", size, _I32(_INFINITY)), _I32(_NAN_CODE), code)
    return builder.or_(code, builder.and_(builder.lshr(bits, _I32(24)), _I32(0x80)))


def _integer_code(builder, bits, size, form: Format):
    negative = builder.icmp_signed("<", bits, _I32(0))
    largest = (_I32(float32_bits(each)) for each in (form.most_negative, form.largest))
    number = _fixed(builder, _smaller(builder, size, builder.select(negative, *largest)), form)
    number = builder.select(builder.icmp_signed(">", size, _I32(_INFINITY)), _I32(0), number)
    return builder.select(negative, builder.neg(number), number)


def narrowing(form: Format):
    """narrow(builder, value): the code of a float32."""
    make = _float_code if form.is_float else _integer_code

    def narrow(builder, value):
        bits = builder.bitcast(value, _I32)
        return builder.trunc(make(builder, bits, builder.and_(bits, _I32(_MAGNITUDE)), form), _I8)

    return narrow


@intrinsic
def larger(typing_context, top, v):
    """The larger of ``top``, the bits of a magnitude, and the magnitude of a float32."""

    def codegen(context, builder, signature, arguments):
        top, v = arguments
        size = builder.and_(builder.bitcast(v, _I32), _I32(_MAGNITUDE))
        return builder.select(builder.icmp_signed(">", size, top), size, top)

    return types.int32(types.int32, types.float32), codegen


@cache
def _amax_of(element: Element):
    recall = element.recall

    @exact
    def amax_of(kept, r, n):
        """The largest magnitude of a row, or NaN where it has one."""
        top = np.int32(0)
        for k in range(n):
            top = larger(top, np.float32(recall(kept, r + k)))
        return from_bits(top)

    return amax_of


@cache
def _put_code(element: Element, dtype: str):
    """put(codes, j, v, factor): the code of v factor."""
    store = make_store(types.uint8, types.float32, narrowing(FORMATS[dtype]))

    @exact
    def put_code(codes, j, v, factor):
        store(codes, j, np.float32(v) * factor)

    return put_code


def quantized_row(element: Element, make_row, dtype: str, per_row: bool):
    """What a quantizing forward does with a row; ``make_row(put)`` is its loop, which puts the numbers somewhere."""
    keep, recall, T = element.keep, element.recall, element.compute
    put_code, amax_of, form = _put_code(element, dtype), _amax_of(element), FORMATS[dtype]
    least, largest, one = np.float32(LEAST_AMAX), np.float32(form.largest), np.float32(1)

    @exact
    def put_kept(kept, r, v, factor):
        keep(kept, r, v)

    keep_row, code_row = make_row(put_kept), make_row(put_code)

    @exact
    def by_row(
        x, i, y, j, post, p, n, mean, rstd, weight, bias, first, alpha, codes, scales, row, kept, r
    ):  # fmt: skip
        """The row is kept until its amax is known."""
        keep_row(x, i, kept, r, post, p, n, mean, rstd, weight, bias, first, alpha, one)
        amax = amax_of(kept, r, n)
        scale = (least if amax < least else amax) / largest
        scales[row] = scale
        for part in range(2):
            start, stop = span(part, n)
            for k in range(start, stop):
                put_code(codes, j + k, T(recall(kept, r + k)), one / scale)

    @exact
    def by_tensor(
        x, i, y, j, post, p, n, mean, rstd, weight, bias, first, alpha, codes, scales, row, kept, r
    ):  # fmt: skip
        code_row(x, i, codes, j, post, p, n, mean, rstd, weight, bias, first, alpha, one / scales[0])

    return by_row if per_row else by_tensor
