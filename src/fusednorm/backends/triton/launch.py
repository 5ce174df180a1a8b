"""A kernel with its grid, scalars and constants fixed: a call passes tensors and costs little."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fusednorm.private.torch_names import current_raw_stream
from fusednorm.private.triton_names import DEPENDENT_LAUNCH, FP_FUSION, Start, start_of

#: What a kernel gets by value: integers, and floats, which its signature says to be of float64.
Scalars = tuple[int | float, ...]
#: What a compiled kernel was specialized for: the device, and for each tensor None or its dtype, followed by UNALIGNED
#: where its address is no multiple of 16 bytes.
Case = tuple[Any, ...]
UNALIGNED = "unaligned"


class Launch:
    """A kernel whose parameters are, in this order, pointers, the first of them never None, scalars and constants.

    Triton's own launch binds and specializes every argument each time. Here two calls can differ by their device and,
    for each tensor, by whether it is None, its dtype and its alignment. A case is all of that, whatever the plan above
    knows of it, and each case's compiled kernel is kept and started directly, with addresses in place of tensors:
    Triton asks the driver about each tensor's memory, and believes an address. A kernel whose constants say OVERLAP and
    that ``follows`` another one starts before that has ended.

    Products and sums are fused where a kernel says tl.fma and nowhere else. A compiler that chooses for itself fuses a
    product into the exchange between the threads of a sum, and then each thread has another last bit of it.
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
        self.options: dict[str, Any] = {"num_warps": warps, FP_FUSION: False}
        if follows and constants["OVERLAP"]:
            self.options[DEPENDENT_LAUNCH] = True
        self.starts: dict[Case, Start] = {}

    def __call__(self, *tensors: Tensor | None) -> None:
        first = tensors[0]
        assert first is not None
        device = first.get_device()
        addresses: list[int | None] = []
        facts: list[Any] = [device]
        for tensor in tensors:
            if tensor is None:
                addresses.append(None)
                facts.append(None)
            else:
                address = tensor.data_ptr()
                addresses.append(address)
                facts.append(tensor.dtype)
                if address & 15:
                    facts.append(UNALIGNED)
        case = tuple(facts)
        start = self.starts.get(case)
        if start is None:
            self.compile(case, tensors, addresses)
        else:
            start(current_raw_stream(device), addresses)

    def compile(self, case: Case, tensors: tuple[Tensor | None, ...], addresses: list[int | None]) -> None:
        """The first call of a case, by Triton's own launch."""
        launch = self.kernel[(self.programs, 1, 1)]
        compiled = launch(*tensors, *self.scalars, **self.constants, **self.options)
        if compiled is not None:  # the interpreter compiles nothing
            tail = (*self.scalars, *self.constants.values())
            start = start_of(compiled, self.programs, addresses, tail)
            if start is not None:
                self.starts[case] = start
