"""What is added around a norm, in tiles of any kind: s = x + gate pre_add is normalized, and z + post_add activated.

Each function takes None for what a call has not, and then compiles to what it was without the sums.
"""

import triton
import triton.language as tl

from fusednorm.backends.triton.kernels.activations import told
from fusednorm.backends.triton.kernels.addressing import no_wider, tile_of


@triton.jit
def sum_of(b_x, b_before, b_gate, mask, dtype: tl.constexpr):
    """s of a tile, rounded to the dtype of x: x + gate pre_add, and without pre_add x + gate where ``mask`` is."""
    if b_before is None:
        if b_gate is None:
            return b_x
        else:
            return (b_x.to(dtype) + tl.where(mask, b_gate, 0.0)).to(b_x.dtype)
    else:
        if b_gate is None:
            return (b_x.to(dtype) + b_before.to(dtype)).to(b_x.dtype)
        else:
            return tl.fma(b_gate, b_before.to(dtype), b_x.to(dtype)).to(b_x.dtype)


@triton.jit
def load_sum(p_x, p_before, b_gate, mask, EVICTION: tl.constexpr, dtype: tl.constexpr):
    """:func:`sum_of` of tiles in memory, whose place in the caches an eviction policy decides."""
    b_x, b_before = tl.load(p_x, mask, 0.0, eviction_policy=EVICTION), None
    if p_before is not None:
        b_before = tl.load(p_before, mask, 0.0, eviction_policy=EVICTION)
    return sum_of(b_x, b_before, b_gate, mask, dtype)


@triton.jit
def numbers_of_tile(added, first, o_c, m_c, o_s, ALIGN: tl.constexpr, LAST: tl.constexpr, dtype: tl.constexpr):
    """The numbers of a sample's channels, which lie in place of the gate from ``first`` on, along their axis of a tile;
    None where there are none."""
    b_numbers = None
    if added.gate is not None:
        o_number = no_wider(o_c, ALIGN) if LAST else o_c
        b_numbers, _ = tile_of(tl.load(added.gate + first + o_number, m_c, 0.0).to(dtype), o_s, LAST)
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
