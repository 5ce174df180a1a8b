"""Operands of any dtype: weight, bias, scale, shift and given statistics, and the gradients of the first four.

A kernel is not compiled for their dtypes: codes in its geometry name the dtypes, and each access branches on a code,
which is cheap for one number per channel. Where a loop runs along the operands, :func:`widening` first converts them
once for all rows, and :func:`narrow` rounds the gradients last; LLVM makes vector code of both, a loop per dtype.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from fusednorm.backends.cpu.geometry import BFLOAT16, DTYPE_CODES, FLOAT16, FLOAT32, FLOAT64
from fusednorm.backends.cpu.kernels.device import exact, uncontracted
from fusednorm.backends.cpu.kernels.elements import CONVERSIONS, POINTEE, Element, load_marked, store_marked

OPERAND = types.CPointer(types.uint8)
_F64, _F32, _I32 = ir.DoubleType(), ir.FloatType(), ir.IntType(32)
_STORED = {"float32": _F32, "float64": _F64, "float16": ir.IntType(16), "bfloat16": ir.IntType(16)}


def _round_to_odd(builder, value):
    """The float32 of a float64 that any narrower dtype rounds as it would round the float64 itself.

    An inexact number goes to the neighbour with an odd last bit, so that it is never a tie of the second rounding.
    """
    nearest = builder.fptrunc(value, _F32)
    back = builder.fpext(nearest, _F64)
    bits = builder.bitcast(nearest, _I32)
    size, back_size = (
        builder.and_(builder.bitcast(one, ir.IntType(64)), ir.IntType(64)(2**63 - 1)) for one in (value, back)
    )
    beyond = builder.icmp_unsigned(">", back_size, size)
    toward_zero = builder.select(beyond, builder.sub(bits, _I32(1)), bits)
    odd = builder.bitcast(builder.or_(toward_zero, _I32(1)), _F32)
    return builder.select(builder.fcmp_ordered("one", back, value), odd, nearest)


def _make_load(dtype, compute=types.float64):
    """load(p, i) of an operand's element in the type ``compute``, rounded to it if need be."""
    widen = CONVERSIONS[dtype][0]

    @intrinsic
    def load(typing_context, p, i):
        def codegen(context, builder, signature, arguments):
            pointer = builder.bitcast(arguments[0], _STORED[dtype].as_pointer())
            value = load_marked(builder, pointer, arguments[1])
            value = widen(builder, value) if widen else value
            if compute is types.float64:
                return value if dtype == "float64" else builder.fpext(value, _F64)
            return builder.fptrunc(value, _F32) if dtype == "float64" else value

        return compute(OPERAND, types.int64), codegen

    return load


def _make_store(dtype):
    """store(p, i, v) of a number in float64 or float32, rounded once."""
    narrow = CONVERSIONS[dtype][1]

    @intrinsic
    def store(typing_context, p, i, v):
        def codegen(context, builder, signature, arguments):
            value, wide = arguments[2], v.bitwidth == 64
            if narrow:
                value = narrow(builder, _round_to_odd(builder, value) if wide else value)
            elif dtype == "float32" and wide:
                value = builder.fptrunc(value, _F32)
            elif dtype == "float64" and not wide:
                value = builder.fpext(value, _F64)
            pointer = builder.bitcast(arguments[0], _STORED[dtype].as_pointer())
            store_marked(builder, pointer, arguments[1], value, "output")
            return context.get_dummy_value()

        return types.void(OPERAND, types.int64, v), codegen

    return store


_load_float32, _load_float64, _load_float16, _load_bfloat16 = map(_make_load, _STORED)
_store_float32, _store_float64, _store_float16, _store_bfloat16 = map(_make_store, _STORED)


@intrinsic
def wanted(typing_context, p):
    """Whether a gradient is wanted: its address is not 0."""

    def codegen(context, builder, signature, arguments):
        return builder.icmp_unsigned("!=", builder.ptrtoint(arguments[0], ir.IntType(64)), ir.IntType(64)(0))

    return types.boolean(OPERAND), codegen


@exact
def number(operand, i, dtype):
    """Element i in float64 of an operand whose dtype has this code."""
    if dtype == FLOAT32:
        return _load_float32(operand, i)
    if dtype == FLOAT64:
        return _load_float64(operand, i)
    if dtype == FLOAT16:
        return _load_float16(operand, i)
    return _load_bfloat16(operand, i)


@exact
def put_number(gradient, i, value, dtype):
    """Store a float64, rounded once, to the dtype with this code."""
    if dtype == FLOAT32:
        _store_float32(gradient, i, value)
    elif dtype == FLOAT64:
        _store_float64(gradient, i, value)
    elif dtype == FLOAT16:
        _store_float16(gradient, i, value)
    elif dtype == BFLOAT16:
        _store_bfloat16(gradient, i, value)


@cache
def rounded_number(element: Element):
    """number(operand, i, dtype), rounded to the compute dtype."""
    T = element.compute

    @exact
    def rounded(operand, i, dtype):
        return np.float64(T(number(operand, i, dtype)))

    return rounded


@cache
def converting(element: Element):
    """convert(operand, i, dtype, absent, values, j, n): n elements of an operand from i on, put into ``values`` from j
    on in the compute dtype; ``absent`` where there is no operand."""
    T = element.compute
    compute = types.float64 if T is np.float64 else types.float32
    from_float32, from_float64, from_float16, from_bfloat16 = (_make_load(dtype, compute) for dtype in _STORED)

    @exact
    def convert(operand, i, dtype, absent, values, j, n):
        # A loop for each dtype: of one with a branch in it LLVM makes slow code.
        if dtype == 0:
            for k in range(n):
                values[j + k] = T(absent)
        elif dtype == FLOAT32:
            for k in range(n):
                values[j + k] = from_float32(operand, i + k)
        elif dtype == FLOAT64:
            for k in range(n):
                values[j + k] = from_float64(operand, i + k)
        elif dtype == FLOAT16:
            for k in range(n):
                values[j + k] = from_float16(operand, i + k)
        else:
            for k in range(n):
                values[j + k] = from_bfloat16(operand, i + k)

    return convert


@cache
def widening(element: Element):
    """widen(operand, dtype, wide, start, stop) converts elements of an operand to the compute dtype, if need be."""
    convert, T, code = converting(element), element.compute, DTYPE_CODES[element.compute.__name__]

    @exact
    def widen(operand, dtype, wide, start, stop):
        if dtype not in (0, code):
            convert(operand, start, dtype, T(0), wide, start, stop - start)

    return widen


@cache
def widened(element: Element):
    """widened(operand, dtype, wide): the operand where it has the compute dtype, and otherwise ``wide``."""
    compute = types.float64 if element.compute is np.float64 else types.float32
    code = DTYPE_CODES[element.compute.__name__]
    pointer = types.CPointer(compute)

    @intrinsic
    def choose(typing_context, operand, dtype, wide):
        def codegen(context, builder, signature, arguments):
            own = builder.bitcast(arguments[0], context.get_value_type(pointer))
            has_compute = builder.icmp_signed("==", arguments[1], ir.IntType(64)(code))
            return builder.select(has_compute, own, arguments[2])

        return pointer(OPERAND, types.int64, pointer), codegen

    return choose


@cache
def own(element: Element):
    """own(operand): an operand that has the input's dtype, as pointer to elements of it."""
    pointer = types.CPointer(POINTEE[element.dtype])

    @intrinsic
    def of_input(typing_context, operand):
        def codegen(context, builder, signature, arguments):
            return builder.bitcast(arguments[0], context.get_value_type(pointer))

        return pointer(OPERAND), codegen

    return of_input


@exact
def factor_of(scale):
    return scale + np.float32(1)


@uncontracted
def modulated(gain, offset, scale, shift):
    """gain (1 + scale) and offset (1 + scale) + shift of an element. Kernels of both directions call this function, and
    so have the same z."""
    factor = factor_of(scale)
    return gain * factor, offset * factor + shift


@exact
def narrow(totals, first, gradient, dtype, start, stop):
    """Round elements start to stop of a gradient once, from wide or compute totals; element 0 is totals[first]."""
    if not wanted(gradient):
        return
    if dtype == FLOAT32:
        for c in range(start, stop):
            _store_float32(gradient, c, totals[first + c])
    elif dtype == FLOAT64:
        for c in range(start, stop):
            _store_float64(gradient, c, totals[first + c])
    elif dtype == FLOAT16:
        for c in range(start, stop):
            _store_float16(gradient, c, totals[first + c])
    elif dtype == BFLOAT16:
        for c in range(start, stop):
            _store_bfloat16(gradient, c, totals[first + c])
