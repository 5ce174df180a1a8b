"""A kernel with its grid, scalars and constants fixed: a call passes tensors and costs little."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

#: What a kernel gets by value: integers, and floats, which its signature says to be of float64.
Scalars = tuple[int | float, ...]
#: What a compiled kernel was specialized for: the device, and for each tensor None or its dtype, followed by UNALIGNED
#: where its address is no multiple of 16 bytes.
Case = tuple[Any, ...]
UNALIGNED = "unaligned"
#: Starts a compiled kernel on a stream with these addresses.
Start = Callable[[int, list[int | None]], Any]


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
        self.options: dict[str, Any] = {"num_warps": warps, "enable_fp_fusion": False}
        if follows and constants["OVERLAP"]:
            self.options["launch_pdl"] = True
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
            start(torch._C._cuda_getCurrentRawStream(device), addresses)

    def compile(self, case: Case, tensors: tuple[Tensor | None, ...], addresses: list[int | None]) -> None:
        """The first call of a case, by Triton's own launch."""
        launch = self.kernel[(self.programs, 1, 1)]
        compiled = launch(*tensors, *self.scalars, **self.constants, **self.options)
        if compiled is not None:  # the interpreter compiles nothing
            tail = (*self.scalars, *self.constants.values())
            self.starts[case] = _start(compiled, self.programs, addresses, tail)


def _start(compiled: Any, programs: int, addresses: list[int | None], tail: tuple[Any, ...]) -> Start:
    """The shortest way to start a compiled kernel.

    ``compiled.run`` is the documented one. It wraps a launcher in C, whose arguments it works out anew each time, in
    1 us. They are kept here wherever what it passes on has the form that Triton 3.6 to 3.9 give it.
    """
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    stream, arguments = object(), (*addresses, *tail)
    given = _passed_on(run, (programs, 1, 1, stream, function, metadata, None, None, None, *arguments))
    if given[:4] == (programs, 1, 1, stream):
        launch, end = run.launch, len(given) - len(arguments)
        if given[end:] == arguments:
            fixed = given[4:end]
            return lambda stream, addresses: launch(programs, 1, 1, stream, *fixed, *addresses, *tail)
        if given[-1] == arguments:
            fixed = given[4:-1]
            return lambda stream, addresses: launch(programs, 1, 1, stream, *fixed, (*addresses, *tail))
    return lambda stream, addresses: run(
        programs, 1, 1, stream, function, metadata, None, None, None, *addresses, *tail
    )


def _passed_on(run: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a kernel's launcher passes on to the one in C, which is not called; () where that is not to be seen.

    A kernel that needs scratch memory gets new memory each time, so nothing of it can be kept.
    """
    found: list[tuple[Any, ...]] = []
    if getattr(run, "global_scratch_size", 1) or getattr(run, "profile_scratch_size", 1):
        return ()
    recorder = copy.copy(run)
    recorder.launch = lambda *passed: found.append(passed)
    recorder(*arguments)
    return found[0] if len(found) == 1 else ()
