"""A Triton kernel that rounds numbers as quantizing kernels do; in a file, since Triton reads its source."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusednorm.backends.triton.kernels.codes import codes_of

BLOCK = 1024


@triton.jit
def round_kernel(p_values, p_codes, count, OUT: tl.constexpr, NATIVE: tl.constexpr, SIZE: tl.constexpr):
    place = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    values = tl.load(p_values + place, place < count, 0.0)
    tl.store(p_codes + place, codes_of(values, OUT, NATIVE), place < count)


def codes(values: Tensor, name: str, native: bool) -> Tensor:
    """The bytes to which the kernels round float32 numbers."""
    found = torch.empty(values.shape, dtype=torch.int8 if name == "int8" else torch.uint8, device=values.device)
    round_kernel[(-(-values.numel() // BLOCK),)](values, found, values.numel(), name, native, BLOCK)
    return found.view(torch.uint8)
