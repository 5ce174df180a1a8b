"""A kernel with its grid, scalars and constants fixed: a call passes tensors and costs little."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Scalars = tuple[int, ...]


class Launch:
    """A kernel whose parameters are, in this order, pointers, integers and constants.

    Triton's own launch binds and specializes every argument each time. Here only the alignment of the tensors can
    differ between two calls, so each alignment's compiled kernel is kept and started directly.
    """

    def __init__(self, kernel: Any, programs: int, scalars: Scalars, constants: dict[str, Any], warps: int = 4) -> None:
        self.kernel, self.programs, self.scalars = kernel, programs, scalars
        self.constants, self.warps = constants, warps
        self.tail = (*scalars, *constants.values())
        self.compiled: dict[int, Any] = {}

    def __call__(self, *tensors: Tensor | None) -> None:
        unaligned = 0
        for place, tensor in enumerate(tensors):
            if tensor is not None and tensor.data_ptr() % 16:
                unaligned |= 1 << place
        compiled = self.compiled.get(unaligned)
        if compiled is None:
            launcher = self.kernel[(self.programs, 1, 1)]
            compiled = launcher(*tensors, *self.scalars, **self.constants, num_warps=self.warps, enable_fp_fusion=True)
            if compiled is not None:  # the interpreter compiles nothing
                self.compiled[unaligned] = compiled
            return
        stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
        compiled.run(
            self.programs, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None,
            *tensors, *self.tail,
        )  # fmt: skip
