"""A kernel with its grid, scalars and constants fixed: a call passes tensors and costs little."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from fusednorm.backends.triton.tape import taping
from fusednorm.operands import no_memory
from fusednorm.private.torch_names import current_raw_stream
from fusednorm.private.triton_names import COOPERATIVE_LAUNCH, DEPENDENT_LAUNCH, FP_FUSION, Start, start_of

#: The numbers that a kernel gets by value: integers, and floats, which its signature declares as float64.
Scalars = tuple[int | float, ...]
#: What a compiled kernel was specialized for: the device, and for each tensor None or its dtype, followed by UNALIGNED
#: where its address is no multiple of 16 bytes.
Case = tuple[Any, ...]
UNALIGNED = "unaligned"
#: Takes a launch and its tensors, in place of the device.
Recorder = Callable[["Launch", tuple[Tensor | None, ...]], None]

_recorder: ContextVar[Recorder | None] = ContextVar("fusednorm_recorder", default=None)


class Launch:
    """A kernel takes pointers, of which the first is never None, then scalars, then constants.

    Triton's own launch binds and specializes every argument at every call. Two calls of a Launch differ by their case
    alone: the device and, for each tensor, whether it is None, its dtype and its alignment. The compiled kernel of each
    case is kept and started with addresses in place of tensors, since Triton asks the driver about each tensor's
    memory, and about no address. A kernel that has OVERLAP among its constants starts before the one before it on the
    stream has ended, whose ever that is, and waits for its end before it reads or stores anything that it could have
    made; one that is not to start ``early`` still lets the next one do so. The programs of a kernel that runs
    ``together`` run at the same time, all of them.

    Products and sums are fused where a kernel says tl.fma and nowhere else. A compiler that chose for itself would fuse
    a product into the exchange between the threads of a sum, and the threads would differ in the sum's last bit.
    """

    def __init__(
        self,
        kernel: Any,
        programs: int,
        scalars: Scalars,
        constants: dict[str, Any],
        warps: int,
        together: bool = False,
        early: bool = True,
    ) -> None:
        self.kernel, self.programs, self.scalars, self.constants = kernel, programs, scalars, constants
        self.options: dict[str, Any] = {"num_warps": warps, FP_FUSION: False}
        if early and constants.get("OVERLAP"):
            self.options[DEPENDENT_LAUNCH] = True
        if together:
            self.options[COOPERATIVE_LAUNCH] = True
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
                elif not address:
                    no_memory(tensor)
        case = tuple(facts)
        start = self.starts.get(case)
        if start is None:
            self.compile(case, tensors, addresses)
        else:
            start(current_raw_stream(device), addresses)
        tape = taping()
        if tape is not None:
            tape.launched(self.starts.get(case), tensors)

    def compile(self, case: Case, tensors: tuple[Tensor | None, ...], addresses: list[int | None]) -> None:
        """The first call of a case, by Triton's own launch."""
        launch = self.kernel[(self.programs, 1, 1)]
        compiled = launch(*tensors, *self.scalars, **self.constants, **self.options)
        tail = (*self.scalars, *self.constants.values())
        start = start_of(compiled, self.programs, addresses, tail)
        if start is not None:  # the interpreter compiles nothing
            self.starts[case] = start


class RecordedLaunch(Launch):
    """A Launch of a plan that a compiler reads: its calls go to a recorder."""

    def __call__(self, *tensors: Tensor | None) -> None:
        recorder = _recorder.get()
        assert recorder is not None, "a plan that was made to be recorded runs under recorded()"
        recorder(self, tensors)


@contextmanager
def recorded(recorder: Recorder) -> Iterator[None]:
    """Plans that are made inside launch nothing: they hand each launch to ``recorder``, and allocate as torch does.

    Such a plan runs on fake tensors, so that a compiler learns what it allocates and launches. No launch of it starts
    before the launch before it has ended: only our own launches can ask for that.
    """
    token = _recorder.set(recorder)
    try:
        yield
    finally:
        _recorder.reset(token)


def recording() -> bool:
    """Whether plans are made to be recorded here."""
    return _recorder.get() is not None


def prepared(
    kernel: Any, programs: int, scalars: Scalars, constants: dict[str, Any], warps: int, *, early: bool = True
) -> Launch:
    """The :class:`Launch` of a plan, or a recorded one."""
    return (RecordedLaunch if recording() else Launch)(kernel, programs, scalars, constants, warps, early=early)
