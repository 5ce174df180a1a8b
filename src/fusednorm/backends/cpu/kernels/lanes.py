"""Sixteen elements as one value, for loops over rows of few vectors.

LLVM makes vector code of a loop over elements, with several vectors to a step, and tests before and behind it; a row of
27 or 100 elements spends most of its time there. Written in whole vectors such a loop has one step for each vector. The
last vector overlaps the one before it (``behind`` leaves out what was counted), so rows have VECTOR elements at least.

Sums have VECTOR partial sums on every processor, whatever the length of its vectors.
"""

from __future__ import annotations

import operator
from functools import cache
from typing import NamedTuple

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, lower_builtin, models, register_model, type_callable

from fusednorm.backends.cpu.geometry import VECTOR
from fusednorm.backends.cpu.kernels.elements import (
    CONVERSIONS,
    POINTEE,
    load_vector,
    make_add,
    make_load,
    make_store,
    store_vector,
)


class LanesType(types.Type):
    """VECTOR numbers of a compute dtype."""

    def __init__(self, compute):
        self.compute = compute
        super().__init__(name=f"Lanes({compute})")


@register_model(LanesType)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager, kind):
        floating = ir.DoubleType() if kind.compute == types.float64 else ir.FloatType()
        super().__init__(manager, kind, ir.VectorType(floating, VECTOR))


def _arithmetic(operation, build):
    @type_callable(operation)
    def type_of(context):
        def typer(a, b):
            return a if isinstance(a, LanesType) and a == b else None

        return typer

    @lower_builtin(operation, LanesType, LanesType)
    def lower(context, builder, signature, arguments):
        return build(builder)(*arguments)


_arithmetic(operator.add, lambda builder: builder.fadd)
_arithmetic(operator.sub, lambda builder: builder.fsub)
_arithmetic(operator.mul, lambda builder: builder.fmul)


class Lanes(NamedTuple):
    """The accesses of one dtype by vectors, as :class:`Element` has them by elements, and what makes and ends vectors.

    ``spread(v)`` has a number in every lane, ``behind(v, n)`` 0 in the first n lanes; ``totals(v, w)`` are the sums of
    the lanes of two vectors.
    """

    load: object
    load_total: object
    read: object
    recall: object
    store: object
    add_first: object
    add_second: object
    spread: object
    behind: object
    totals: object


def _spread(builder, number):
    vector = ir.VectorType(number.type, VECTOR)
    lanes = ir.Constant(ir.VectorType(ir.IntType(32), VECTOR), [0] * VECTOR)
    single = builder.insert_element(ir.Constant(vector, ir.Undefined), number, ir.IntType(32)(0))
    return builder.shuffle_vector(single, single, lanes)


def _make_spread(kind):
    @intrinsic
    def spread(typing_context, v):
        return kind(kind.compute), lambda context, builder, signature, arguments: _spread(builder, arguments[0])

    return spread


def _make_behind(kind):
    @intrinsic
    def behind(typing_context, v, n):
        def codegen(context, builder, signature, arguments):
            value, count = arguments
            i32 = ir.IntType(32)
            places = ir.Constant(ir.VectorType(i32, VECTOR), list(range(VECTOR)))
            counted = builder.icmp_signed("<", places, _spread(builder, builder.trunc(count, i32)))
            return builder.select(counted, ir.Constant(value.type, [0.0] * VECTOR), value)

        return kind(kind, types.int64), codegen

    return behind


def _chosen(builder, a, b, places):
    """Lanes of two vectors, those of the second numbered from VECTOR on."""
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(ir.IntType(32), VECTOR), places))


def _make_totals(kind):
    half = VECTOR // 2

    @intrinsic
    def totals(typing_context, a, b):
        result = types.UniTuple(kind.compute, 2)

        def codegen(context, builder, signature, arguments):
            a, b = arguments
            low = [*range(half), *range(VECTOR, VECTOR + half)]
            sums = builder.fadd(
                _chosen(builder, a, b, low), _chosen(builder, a, b, [place + half for place in low])
            )  # those of a in one half, those of b in the other
            step = half // 2
            while step:
                others = [place ^ step for place in range(VECTOR)]
                sums = builder.fadd(sums, _chosen(builder, sums, sums, others))
                step //= 2
            ends = [builder.extract_element(sums, ir.IntType(32)(place)) for place in (0, half)]
            return context.make_tuple(builder, result, ends)

        return result(kind, kind), codegen

    return totals


@cache
def lanes(dtype: str) -> Lanes:
    """The accesses by vectors of a dtype."""
    pointee, (widen, narrow) = POINTEE[dtype], CONVERSIONS[dtype]
    compute = types.float64 if dtype == "float64" else types.float32
    kind = LanesType(compute)
    return Lanes(
        load=make_load(pointee, kind, widen, load=load_vector),
        load_total=make_load(pointee, kind, widen, "total", load=load_vector),
        read=make_load(compute, kind, None, load=load_vector),
        recall=make_load(compute, kind, None, "kept", load=load_vector),
        store=make_store(pointee, kind, narrow, store=store_vector),
        add_first=make_add(compute, kind, "first", load=load_vector, store=store_vector),
        add_second=make_add(compute, kind, "second", load=load_vector, store=store_vector),
        spread=_make_spread(kind),
        behind=_make_behind(kind),
        totals=_make_totals(kind),
    )
