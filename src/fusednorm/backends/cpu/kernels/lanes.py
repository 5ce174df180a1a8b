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
    the lanes of two vectors. ``run_totals(p, i, step, n)`` has in lane k the sum of the n elements from i + k step on,
    VECTOR at most, and ``run_total(p, i, n)`` is one such sum, to the bit. Both read VECTOR elements of each run.
    """

    load: object
    load_total: object
    read: object
    recall: object
    store: object
    keep: object
    add_first: object
    add_second: object
    spread: object
    behind: object
    totals: object
    run_totals: object
    run_total: object


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


def _leading(builder, count):
    """Which lanes are among the first so many."""
    i32 = ir.IntType(32)
    places = ir.Constant(ir.VectorType(i32, VECTOR), list(range(VECTOR)))
    return builder.icmp_signed("<", places, _spread(builder, builder.trunc(count, i32)))


def _zeros(value):
    return ir.Constant(value.type, [0.0] * VECTOR)


def _make_behind(kind):
    @intrinsic
    def behind(typing_context, v, n):
        def codegen(context, builder, signature, arguments):
            value, count = arguments
            return builder.select(_leading(builder, count), _zeros(value), value)

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


_WITHIN = [place for four in range(0, VECTOR, 4) for place in (four, four + 2, VECTOR + four, VECTOR + four + 2)]
#: Which lanes of two vectors of sums meet their neighbours when two runs, or twice as many, are put into one vector:
#: neighbours within 128 bits first, which processors move at once, then whole 128 bits.
_FOLDS = (
    (_WITHIN, 1),
    (_WITHIN, 1),
    ([*range(8), *range(VECTOR, VECTOR + 8)], 8),
    ([place for eight in (0, 8, VECTOR, VECTOR + 8) for place in range(eight, eight + 4)], 4),
)
#: The same neighbours of one run, which stays where it is.
_STEPS = (1, 2, 8, 4)


def _leading_elements(builder, p, i, counted):
    """The elements from i on in the lanes that count, and 0 in the others."""
    value = load_vector(builder, p, i, "kept")
    return builder.select(counted, value, _zeros(value))


def _make_run_totals(kind):
    @intrinsic
    def run_totals(typing_context, p, i, step, n):
        def codegen(context, builder, signature, arguments):
            p, i, step, n = arguments
            counted, runs = _leading(builder, n), []
            for _ in range(VECTOR):
                runs.append(_leading_elements(builder, p, i, counted))
                i = builder.add(i, step)
            for places, neighbour in _FOLDS:
                others = [place + neighbour for place in places]
                runs = [
                    builder.fadd(_chosen(builder, a, b, places), _chosen(builder, a, b, others))
                    for a, b in zip(runs[::2], runs[1::2], strict=True)
                ]
            return runs[0]

        return kind(types.CPointer(kind.compute), types.int64, types.int64, types.int64), codegen

    return run_totals


def _make_run_total(kind):
    @intrinsic
    def run_total(typing_context, p, i, n):
        def codegen(context, builder, signature, arguments):
            p, i, n = arguments
            run = _leading_elements(builder, p, i, _leading(builder, n))
            for step in _STEPS:
                run = builder.fadd(run, _chosen(builder, run, run, [place ^ step for place in range(VECTOR)]))
            return builder.extract_element(run, ir.IntType(32)(0))

        return kind.compute(types.CPointer(kind.compute), types.int64, types.int64), codegen

    return run_total


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
        keep=make_store(compute, kind, None, "kept", store=store_vector),
        add_first=make_add(compute, kind, "first", load=load_vector, store=store_vector),
        add_second=make_add(compute, kind, "second", load=load_vector, store=store_vector),
        spread=_make_spread(kind),
        behind=_make_behind(kind),
        totals=_make_totals(kind),
        run_totals=_make_run_totals(kind),
        run_total=_make_run_total(kind),
    )
