"""The kernels, written for Numba: from a Kernel to the Python function to compile and its signature.

Only the compiler imports this package, and only to compile: it imports Numba.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import types

from fusednorm.backends.cpu.compiler import Kernel
from fusednorm.backends.cpu.kernels import affine, planes, rows, slabs, slabs_backward
from fusednorm.backends.cpu.kernels.elements import POINTEE, element
from fusednorm.backends.cpu.kernels.mathematics import activation

MODULES = {"affine": affine, "planes": planes, "slabs": slabs, "slabs_backward": slabs_backward, "rows": rows}
FASTMATH = {"contract"}


def build(kernel: Kernel) -> tuple[Callable[..., None], str]:
    """The function of a kernel and the letters of its signature."""
    module = MODULES[kernel.module]
    functions = activation(kernel.activation, kernel.dtype, kernel.parametric)
    function = module.BUILDERS[kernel.function](element(kernel.dtype), *functions)
    return function, module.SIGNATURES[kernel.function]


def numba_signature(letters: str, dtype: str) -> Any:
    """The Numba signature of a kernel's letters (compiler.PARAMETERS)."""
    compute = types.float64 if dtype == "float64" else types.float32
    kinds = {
        "x": types.CPointer(POINTEE[dtype]),
        "w": types.CPointer(compute),
        "d": types.CPointer(types.float64),
        "g": types.CPointer(types.int64),
        "f": types.float64,
        "i": types.int64,
        "t": types.int64,
    }
    return types.void(*(kinds[letter] for letter in letters), types.int64, types.int64)
