"""What is added around a norm, in tiles of any kind: s = x + gate pre_add is normalized, and z + post_add activated.

Each function takes None for what a call has not, and then compiles to what it was without the sums.
"""

import triton
import triton.language as tl

from fusednorm.backends.triton.kernels.activations import told
from fusednorm.backends.triton.kernels.addressing import no_wider, tile_of


@triton.jit
def sum_of(b_x, b_before, numbers, mask, dtype: tl.constexpr, EXACT: tl.constexpr = False):
    """s of a tile, rounded to the dtype of x, or EXACT: x + gate pre_add, and without pre_add x + gate; the bias, and a
    gate that is added, where ``mask`` is."""
    b_s = b_x
    if numbers.bias is not None:
        b_s = b_s.to(dtype) + tl.where(mask, numbers.bias, 0.0)
    if b_before is None:
        if numbers.gate is not None:
            b_s = b_s.to(dtype) + tl.where(mask, numbers.gate, 0.0)
    else:
        if numbers.gate is None:
            b_s = b_s.to(dtype) + b_before.to(dtype)
        else:
            b_s = tl.fma(numbers.gate, b_before.to(dtype), b_s.to(dtype))
    if EXACT:
        return b_s
    else:
        return b_s.to(b_x.dtype)


@triton.jit
def load_sum(
    p_x, p_before, numbers, mask, EVICTION: tl.constexpr, dtype: tl.constexpr, EXACT: tl.constexpr = False
):  # fmt: skip
    """:func:`sum_of` of tiles in memory, whose place in the caches an eviction policy decides."""
    b_x, b_before = tl.load(p_x, mask, 0.0, eviction_policy=EVICTION), None
    if p_before is not None:
        b_before = tl.load(p_before, mask, 0.0, eviction_policy=EVICTION)
    return sum_of(b_x, b_before, numbers, mask, dtype, EXACT)


@triton.jit
def number_of_tile(p_numbers, first, o_c, m_c, o_s, ALIGN: tl.constexpr, LAST: tl.constexpr, dtype: tl.constexpr):
    """Numbers of channels, which lie from ``first`` on, along their axis of a tile; None where there are none."""
    b_numbers = None
    if p_numbers is not None:
        o_number = no_wider(o_c, ALIGN) if LAST else o_c
        b_numbers, _ = tile_of(tl.load(p_numbers + first + o_number, m_c, 0.0).to(dtype), o_s, LAST)
    return b_numbers


@triton.jit
def slope_of(b_z, b_added, alpha, DERIVATIVE: tl.constexpr):
    """The activation's derivative at z + post_add, which may be None, or where the output tells it at the output, which
    lies in the place of post_add."""
    if b_added is None:
        return DERIVATIVE(b_z, alpha)
    elif told(DERIVATIVE):
        return DERIVATIVE(b_added.to(b_z.dtype), alpha)
    else:
        return DERIVATIVE(behind(b_z, b_added), alpha)


@triton.jit
def behind(b_z, b_added):
    """z + post_add, which may be None."""
    if b_added is None:
        return b_z
    else:
        return b_z + b_added.to(b_z.dtype)
