"""The decorators of the functions that kernels are made of.

Such a function is only ever inlined into a kernel, so it gets no wrappers to be called from Python or C: they would
double the time to compile it. LLVM simplifies it alone, and optimizes it as a part of each kernel (compiler.py).
Divisions follow IEEE, and products are contracted with sums into fma.

A function that several kernels share is built once (``cache``): Numba then compiles it once, and the later kernels of a
process take half the time.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numba import njit

from fusednorm.backends.cpu.geometry import VECTOR
from fusednorm.private.numba_names import INLINED, UNWRAPPED, pipeline

_compile = partial(njit, error_model="numpy", pipeline_class=pipeline(), **UNWRAPPED)

#: For element-wise work: what is written is what is computed.
exact = _compile(fastmath={"contract"})

#: The same for the functions of activations and those of one element that call them, always inlined: a call would end
#: all vector code around it. LLVM left a gradient with gelu a call, and it took ten times as long, where its limit of
#: what is inlined was a little lower.
inlined = _compile(fastmath={"contract"}, **INLINED)

#: For the coefficients of channels, which several kernels make and all must round alike: nothing is contracted.
uncontracted = _compile()

#: For the values of activations, which are well conditioned: z * (1 / d) becomes z / d.
rewritten = _compile(fastmath={"reassoc", "arcp", "contract"}, **INLINED)

#: For sums: they may be reassociated, which is what makes vector code of them. NaN and Inf stay exact.
reassociated = _compile(fastmath={"reassoc", "contract", "nsz"})


@exact
def pivot_or(pivot, element):
    """A pivot, or where it is beyond the largest number, since a sum of large elements was, one of these elements."""
    return pivot if abs(pivot) < np.inf else element


@exact
def span(part, n):
    """The bounds of the two parts in which element-wise loops take a row of n elements: all whole vectors, and the last
    vector, some of whose elements come twice. The rest of a row in scalar code took longer than the row."""
    if part == 0:
        return 0, n - n % VECTOR
    return (max(n - VECTOR, 0) if n % VECTOR else n), n
