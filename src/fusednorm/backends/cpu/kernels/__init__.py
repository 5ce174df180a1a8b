"""The kernels, written for Numba: from a Kernel to the Python function to compile and its signature.

Only the compiler imports this package, and only to compile: it imports Numba.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from numba import types

from fusednorm.backends.cpu.compiler import Kernel
from fusednorm.backends.cpu.frame import ARGUMENTS
from fusednorm.backends.cpu.kernels import (
    affine,
    columns,
    planes,
    point_rows,
    points,
    rows,
    rows_together,
    running,
    short_planes,
    short_rows,
    slab_sums,
    slabs,
    slabs_backward,
    sums,
    tiles,
)
from fusednorm.backends.cpu.kernels.elements import POINTEE, element
from fusednorm.backends.cpu.kernels.mathematics import activation
from fusednorm.backends.cpu.kernels.operands import OPERAND

MODULES = {
    "affine": affine,
    "planes": planes,
    "short_planes": short_planes,
    "slabs": slabs,
    "slabs_backward": slabs_backward,
    "points": points,
    "point_rows": point_rows,
    "rows": rows,
    "rows_together": rows_together,
    "short_rows": short_rows,
    "columns": columns,
    "tiles": tiles,
    "sums": sums,
    "slab_sums": slab_sums,
    "running": running,
}
FASTMATH = {"contract"}


def build(kernel: Kernel) -> tuple[Callable[..., None], tuple[str, ...]]:
    """The function of a kernel and the names of its parameters."""
    functions = activation(kernel.activation, kernel.dtype, kernel.parametric)
    function = MODULES[kernel.module].BUILDERS[kernel.function](element(kernel.dtype), *functions)
    return function, tuple(inspect.signature(function).parameters)


def numba_signature(names: tuple[str, ...], dtype: str) -> Any:
    """The Numba signature of parameters with these names: :data:`frame.ARGUMENTS`, worker, start and stop."""
    kinds = {
        "element": types.CPointer(POINTEE[dtype]),
        "compute": types.CPointer(types.float64 if dtype == "float64" else types.float32),
        "operand": OPERAND,
        "single": types.CPointer(types.float32),
        "double": types.CPointer(types.float64),
        "geometry": types.CPointer(types.int64),
        "float": types.float64,
        "integer": types.int64,
    }
    return types.void(*(kinds[ARGUMENTS.get(name, "integer")] for name in names))
