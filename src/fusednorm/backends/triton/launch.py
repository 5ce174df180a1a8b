"""A kernel with its grid, scalars and constants fixed: a call passes tensors and costs little."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Scalars = tuple[int, ...]


class Launch:
    """A kernel whose parameters are, in this order, pointers, integers and constants.

    Triton's own launch binds and specializes every argument each time. Here only the alignment of the tensors, and
    which of them are None, can differ between two calls, so each such case's compiled kernel is kept and started
    directly, with addresses in place of tensors: Triton asks the driver about each tensor's memory, and believes an
    address. A kernel whose constants say OVERLAP and that ``follows`` another one starts before that has ended.
    """

    def __init__(
        self,
        kernel: Any,
        programs: int,
        scalars: Scalars,
        constants: dict[str, Any],
        warps: int = 4,
        follows: bool = False,
    ) -> None:
        self.kernel, self.programs, self.scalars, self.constants = kernel, programs, scalars, constants
        self.options: dict[str, Any] = {"num_warps": warps, "enable_fp_fusion": True}
        if follows and constants["OVERLAP"]:
            self.options["launch_pdl"] = True
        self.tail = (*scalars, *constants.values())
        self.compiled: dict[int, tuple[Any, ...]] = {}

    def __call__(self, *tensors: Tensor | None) -> None:
        addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        case = 0
        for address in addresses:
            case = case << 2 | (2 if address is None else address & 15 != 0)
        ready = self.compiled.get(case)
        if ready is None:
            self.compile(case, tensors)
            return
        run, function, metadata = ready
        stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
        run(self.programs, 1, 1, stream, function, metadata, None, None, None, *addresses, *self.tail)

    def compile(self, case: int, tensors: tuple[Tensor | None, ...]) -> None:
        """The first call of a case, by Triton's own launch."""
        launch = self.kernel[(self.programs, 1, 1)]
        compiled = launch(*tensors, *self.scalars, **self.constants, **self.options)
        if compiled is not None:  # the interpreter compiles nothing
            self.compiled[case] = compiled.run, compiled.function, compiled.packed_metadata
