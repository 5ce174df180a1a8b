"""A kernel that stores the mask of kernels/addressing.py's ``within``, for test_triton_within.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fusednorm.backends.triton.kernels.addressing import within
from fusednorm.backends.triton.runs import leading_bits, power_of_two


@triton.jit
def mask_of_length(p_mask, length, BLOCK: tl.constexpr, LEADING: tl.constexpr, ALIGN: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(p_mask + o, within(o, length, BLOCK, LEADING, ALIGN).to(tl.int8))


def wrong_masks(most: int) -> list[tuple[int, ...]]:
    """The lengths up to ``most``, with their bits and alignment, that get another mask than their own."""
    found = []
    for length in range(1, most + 1):
        block = power_of_two(length)
        expected = torch.arange(block) < length
        for bits, align in ((0, 1), (1, 1), (2, 1), (3, 1), (0, length & -length)):
            mask = torch.full((block,), 2, dtype=torch.int8)
            leading = leading_bits(length, block, bits) if bits else 0
            mask_of_length[(1,)](mask, length, block, leading, align)
            if not torch.equal(mask, expected.to(torch.int8)):
                found.append((length, bits, align))
    return found
