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
from fusednorm.backends.cpu.kernels.device import exact
from fusednorm.backends.cpu.kernels.elements import CONVERSIONS, Element, load_marked, store_marked

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


def _make_load(dtype):
    widen = CONVERSIONS[dtype][0]

    @intrinsic
    def load(typing_context, p, i):
        def codegen(context, builder, signature, arguments):
            pointer = builder.bitcast(arguments[0], _STORED[dtype].as_pointer())
            value = load_marked(builder, pointer, arguments[1])
            value = widen(builder, value) if widen else value
            return value if dtype == "float64" else builder.fpext(value, _F64)

        return types.float64(OPERAND, types.int64), codegen

    return load


def _make_store(dtype):
    narrow = CONVERSIONS[dtype][1]

    @intrinsic
    def store(typing_context, p, i, v):
        def codegen(context, builder, signature, arguments):
            value = arguments[2]
            if narrow:
                value = narrow(builder, _round_to_odd(builder, value))
            elif dtype == "float32":
                value = builder.fptrunc(value, _F32)
            pointer = builder.bitcast(arguments[0], _STORED[dtype].as_pointer())
            store_marked(builder, pointer, arguments[1], value, "output")
            return context.get_dummy_value()

        return types.void(OPERAND, types.int64, types.float64), codegen

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
def widening(element: Element):
    """widen(operand, dtype, wide, start, stop) converts elements of an operand to the compute dtype, if need be."""
    T, code = element.compute, DTYPE_CODES[element.compute.__name__]

    @exact
    def widen(operand, dtype, wide, start, stop):
        if dtype in (0, code):
            return
        for c in range(start, stop):
            wide[c] = T(number(operand, c, dtype))

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


@exact
def narrow(totals, first, gradient, dtype, start, stop):
    """Round elements start to stop of a gradient once, from wide or compute totals; element 0 is totals[first]."""
    if not wanted(gradient):
        return
    for c in range(start, stop):
        put_number(gradient, c, np.float64(totals[first + c]), dtype)
