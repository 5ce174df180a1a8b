"""How a kernel reads and writes elements: loads that widen to the compute dtype, stores that round.

Each access tells LLVM which memory it cannot overlap (LangRef, "noalias and alias.scope metadata"): inputs never
overlap anything that a kernel writes, and each accumulator has a scope of its own. Without these marks the run-time
overlap checks of a loop over six pointers exceed LLVM's limit and the loop stays scalar.
"""

from __future__ import annotations

import platform
from functools import cache
from typing import NamedTuple

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from fusednorm.backends.cpu.geometry import SCRATCH, VECTOR
from fusednorm.private.numba_names import bfloat, ir_type, void_value

WRITTEN = ("output", "first", "second", "kept", "total")
FILLED = 16  # elements that one ``fill`` writes
POINTEE = {
    "float64": types.float64,
    "float32": types.float32,
    "float16": types.uint16,
    "bfloat16": types.uint16,
}
_BITS = {64: (ir.DoubleType(), ir.IntType(64)), 32: (ir.FloatType(), ir.IntType(32))}


class Element(NamedTuple):
    """The accesses of one dtype, all of them compiled functions.

    ``load(p, i)`` and ``store(p, i, v)`` move elements of the input's dtype, ``read(p, i)`` those of the compute dtype;
    ``round(v)`` gives the nearest number that the input's dtype holds. ``add_first(p, i, v)`` and
    ``add_second(p, i, v)`` accumulate into arrays of the compute dtype; ``scratch()`` is an array of SCRATCH elements
    on the stack with room behind it, since ``fill(p, i, v)`` writes v to FILLED elements. ``keep(p, i, v)`` and
    ``recall(p, i)`` write and read an array of the compute dtype that overlaps none of the others, ``put_total(p, i,
    v)`` and ``load_total(p, i)`` one of the input's dtype.
    """

    dtype: str
    compute: type
    load: object
    read: object
    store: object
    round: object
    add_first: object
    add_second: object
    scratch: object
    fill: object
    keep: object
    recall: object
    put_total: object
    load_total: object


def _scopes(builder, names):
    module = builder.module
    domain = module.add_metadata(["fusednorm"])
    return module.add_metadata([module.add_metadata([f"fusednorm.{name}", domain]) for name in names])


def _mark(builder, instruction, scope=None):
    """Say that an access touches no written memory but ``scope`` (None: memory that is only read)."""
    if scope is not None:
        instruction.set_metadata("alias.scope", _scopes(builder, [scope]))
    instruction.set_metadata("noalias", _scopes(builder, [name for name in WRITTEN if name != scope]))
    return instruction


def load_marked(builder, pointer, index, scope=None):
    return _mark(builder, builder.load(builder.gep(pointer, [index])), scope)


def store_marked(builder, pointer, index, value, scope):
    _mark(builder, builder.store(value, builder.gep(pointer, [index])), scope)


def _vector_place(builder, pointer, index):
    """Where VECTOR elements begin, and how an element is aligned."""
    place, kind = builder.gep(pointer, [index]), pointer.type.pointee
    size = 2 if kind == ir.IntType(16) else 8 if kind == ir.DoubleType() else 4
    return builder.bitcast(place, ir.VectorType(kind, VECTOR).as_pointer()), size


def load_vector(builder, pointer, index, scope=None):
    place, size = _vector_place(builder, pointer, index)
    return _mark(builder, builder.load(place, align=size), scope)


def store_vector(builder, pointer, index, value, scope):
    place, size = _vector_place(builder, pointer, index)
    _mark(builder, builder.store(value, place, align=size), scope)


def _kind(scalar, like):
    """The type of a value, or of a vector as long as ``like``."""
    return ir.VectorType(scalar, like.type.count) if isinstance(like.type, ir.VectorType) else scalar


def _number(scalar, like, number):
    """A constant of such a type, in every lane of a vector."""
    kind = _kind(scalar, like)
    return ir.Constant(kind, number if kind is scalar else [number] * kind.count)


def _half_to_float(builder, bits):
    return builder.fpext(builder.bitcast(bits, _kind(ir.HalfType(), bits)), _kind(ir.FloatType(), bits))


def _float_to_half(builder, value):
    half = builder.fptrunc(value, _kind(ir.HalfType(), value))
    return builder.bitcast(half, _kind(ir.IntType(16), value))


def _bfloat_to_float(builder, bits):
    i32 = ir.IntType(32)
    wide = builder.shl(builder.zext(bits, _kind(i32, bits)), _number(i32, bits, 16))
    return builder.bitcast(wide, _kind(ir.FloatType(), bits))


def _float_to_bfloat_native(builder, value):
    """AVX512-BF16's instruction flushes subnormal numbers to zero. Adding and subtracting ``large``, whose last place
    is the least subnormal bfloat16, rounds these numbers to the bits of every other processor."""
    i16, i32 = ir.IntType(16), ir.IntType(32)
    bits = builder.bitcast(value, _kind(i32, value))
    large = _number(ir.FloatType(), value, 1.5 * 2.0**-110)
    rounded = builder.bitcast(builder.fsub(builder.fadd(value, large), large), bits.type)
    signed = builder.or_(rounded, builder.and_(bits, _number(i32, value, -(2**31))))
    small = builder.trunc(builder.lshr(signed, _number(i32, value, 16)), _kind(i16, value))
    native = builder.bitcast(builder.fptrunc(value, _kind(bfloat(), value)), small.type)
    exponent = builder.and_(bits, _number(i32, value, 0x7F800000))
    return builder.select(builder.icmp_signed("==", exponent, _number(i32, value, 0)), small, native)


def _float_to_bfloat(builder, value):
    """Round to nearest, ties to even; a NaN stays a NaN, which the rounding could carry into infinity."""
    i32 = ir.IntType(32)
    bits, high = builder.bitcast(value, _kind(i32, value)), _number(i32, value, 16)
    odd = builder.and_(builder.lshr(bits, high), _number(i32, value, 1))
    rounded = builder.add(bits, builder.add(odd, _number(i32, value, 0x7FFF)))
    quiet = builder.or_(bits, _number(i32, value, 0x400000))
    chosen = builder.select(builder.fcmp_unordered("uno", value, value), quiet, rounded)
    return builder.trunc(builder.lshr(chosen, high), _kind(ir.IntType(16), value))


_HAS_BFLOAT = llvm.get_host_cpu_features().get("avx512bf16", False) if platform.machine() == "x86_64" else False
CONVERSIONS = {
    "float64": (None, None),
    "float32": (None, None),
    "float16": (_half_to_float, _float_to_half),
    "bfloat16": (_bfloat_to_float, _float_to_bfloat_native if _HAS_BFLOAT else _float_to_bfloat),
}


def make_load(pointee, compute, widen, scope=None, load=load_marked):
    """load(p, i) of a pointer's elements in the type ``compute``, one by one or with ``load_vector`` by vectors."""
    pointer = types.CPointer(pointee)

    @intrinsic
    def loaded(typing_context, p, i):
        def codegen(context, builder, signature, arguments):
            value = load(builder, *arguments, scope)
            return widen(builder, value) if widen else value

        return compute(pointer, types.int64), codegen

    return loaded


def make_store(pointee, compute, narrow, scope="output", store=store_marked):
    """store(p, i, v), as :func:`make_load` loads."""
    pointer = types.CPointer(pointee)

    @intrinsic
    def stored(typing_context, p, i, v):
        def codegen(context, builder, signature, arguments):
            p, i, v = arguments
            store(builder, p, i, narrow(builder, v) if narrow else v, scope)
            return void_value(context)

        return types.void(pointer, types.int64, compute), codegen

    return stored


def _make_round(compute, widen, narrow):
    @intrinsic
    def round(typing_context, v):
        def codegen(context, builder, signature, arguments):
            return widen(builder, narrow(builder, arguments[0])) if narrow else arguments[0]

        return compute(compute), codegen

    return round


def make_add(pointee, compute, scope, load=load_marked, store=store_marked):
    """add(p, i, v) to a pointer's elements, as :func:`make_load` loads."""
    pointer = types.CPointer(pointee)

    @intrinsic
    def add(typing_context, p, i, v):
        def codegen(context, builder, signature, arguments):
            p, i, v = arguments
            store(builder, p, i, builder.fadd(load(builder, p, i, scope), v), scope)
            return void_value(context)

        return types.void(pointer, types.int64, compute), codegen

    return add


def _make_scratch(compute):
    pointer = types.CPointer(compute)

    @intrinsic
    def scratch(typing_context):
        def codegen(context, builder, signature, arguments):
            array = ir.ArrayType(ir_type(context, compute), SCRATCH + FILLED)
            with builder.goto_entry_block():
                memory = builder.alloca(array)
                memory.align = 64
            return builder.bitcast(memory, ir_type(context, pointer))

        return pointer(), codegen

    return scratch


def _make_fill(compute):
    pointer = types.CPointer(compute)

    @intrinsic
    def fill(typing_context, p, i, v):
        def codegen(context, builder, signature, arguments):
            p, i, v = arguments
            vector = ir.VectorType(ir_type(context, compute), FILLED)
            lanes = ir.Constant(ir.VectorType(ir.IntType(32), FILLED), [0] * FILLED)
            single = builder.insert_element(ir.Constant(vector, ir.Undefined), v, ir.IntType(32)(0))
            place = builder.bitcast(builder.gep(p, [i]), vector.as_pointer())
            builder.store(builder.shuffle_vector(single, single, lanes), place, align=compute.bitwidth // 8)
            return void_value(context)

        return types.void(pointer, types.int64, compute), codegen

    return fill


places = _make_scratch(types.int64)  # an array of places in tensors


@cache
def element(dtype: str) -> Element:
    """The accesses for an input's dtype."""
    pointee = POINTEE[dtype]
    widen, narrow = CONVERSIONS[dtype]
    compute = types.float64 if dtype == "float64" else types.float32
    return Element(
        dtype=dtype,
        compute=np.float64 if dtype == "float64" else np.float32,
        load=make_load(pointee, compute, widen),
        read=make_load(compute, compute, None),
        store=make_store(pointee, compute, narrow),
        round=_make_round(compute, widen, narrow),
        add_first=make_add(compute, compute, "first"),
        add_second=make_add(compute, compute, "second"),
        scratch=_make_scratch(compute),
        fill=_make_fill(compute),
        keep=make_store(compute, compute, None, "kept"),
        recall=make_load(compute, compute, None, "kept"),
        put_total=make_store(pointee, compute, narrow, "total"),
        load_total=make_load(pointee, compute, widen, "total"),
    )


@intrinsic
def advanced(typing_context, p, n):
    """A pointer so many elements further."""
    return p(p, types.int64), lambda context, builder, signature, arguments: builder.gep(arguments[0], [arguments[1]])


@intrinsic
def prefetch(typing_context, p, i):
    """Fetch the cache line of an element that will be needed, which may lie behind the end of its array."""

    def codegen(context, builder, signature, arguments):
        place = builder.gep(arguments[0], [arguments[1]])
        integer = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [place.type, integer, integer, integer])
        function = builder.module.declare_intrinsic("llvm.prefetch", [place.type], kind)
        builder.call(function, [place, integer(0), integer(2), integer(1)])  # into the L2
        return void_value(context)

    return types.void(p, types.int64), codegen


@intrinsic
def to_bits(typing_context, value):
    """The bits of a float as a signed integer of its width."""
    floating, integer = _BITS[value.bitwidth]
    integer_type = types.int64 if value.bitwidth == 64 else types.int32
    return integer_type(value), lambda context, builder, signature, arguments: builder.bitcast(arguments[0], integer)


@intrinsic
def from_bits(typing_context, value):
    """The float whose bits are a signed integer's."""
    floating, integer = _BITS[value.bitwidth]
    float_type = types.float64 if value.bitwidth == 64 else types.float32
    return float_type(value), lambda context, builder, signature, arguments: builder.bitcast(arguments[0], floating)
