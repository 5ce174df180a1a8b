"""Calls that repeat, done again without their plan: what a call allocated and launched, with other addresses.

A plan works out anew in each call which tensors its launches take and for which of them the kernels were compiled. A
call with tensors of the same metadata, none of them given twice, ends in the same launches: they are taped once. The
guard of a call that repeats vouches for both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from fusednorm.private.torch_names import current_raw_stream
from fusednorm.private.triton_names import Start

#: Where workspaces begin in the memory that a call has for all of them.
ALIGNMENT = 256

Allocate = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]


_tape: ContextVar[Tape | None] = ContextVar("fusednorm_tape", default=None)
#: The tape of this context, or None.
taping = _tape.get


@contextmanager
def on_tape(tape: Tape) -> Iterator[None]:
    """The workspaces and launches inside are put on the tape; they are made all the same."""
    token = _tape.set(tape)
    try:
        yield
    finally:
        _tape.reset(token)


class Tape:
    """The workspaces and the launches of a call that runs."""

    def __init__(self) -> None:
        self.workspaces: list[tuple[Tensor, bool]] = []
        self.launches: list[tuple[Start | None, tuple[Tensor | None, ...]]] = []

    def allocated(self, workspace: Tensor, zeroed: bool) -> None:
        self.workspaces.append((workspace, zeroed))

    def launched(self, start: Start | None, tensors: tuple[Tensor | None, ...]) -> None:
        self.launches.append((start, tensors))

    def replay(self, tensors: Sequence[Tensor | None], allocate: Allocate) -> Replay | None:
        """The launches, of these tensors and of workspaces; None where they took another tensor, such as a copy, or
        cannot be started by addresses, as in the interpreter."""
        dirty = [workspace for workspace, zeroed in self.workspaces if not zeroed]
        clean = [workspace for workspace, zeroed in self.workspaces if zeroed]
        places: dict[int, int] = {}
        for place, tensor in enumerate((*tensors, *dirty, *clean), 1):
            if tensor is not None:
                places[id(tensor)] = place
        starts: list[tuple[Start, Any]] = []
        for start, taken in self.launches:
            found = [0 if tensor is None else places.get(id(tensor), -1) for tensor in taken]
            if start is None or -1 in found:
                return None
            starts.append((start, itemgetter(*found)))
        return Replay(starts, [each.nbytes for each in dirty], [each.nbytes for each in clean], allocate)


class Replay:
    """The launches of a call, to be made again. Workspaces of so many bytes lie in one tensor; those that begin as
    zeros have a tensor each."""

    __slots__ = ("allocate", "offsets", "room", "starts", "zeroed")

    def __init__(
        self, starts: list[tuple[Start, Any]], sizes: Sequence[int], zeroed: Sequence[int], allocate: Allocate
    ) -> None:
        self.starts, self.zeroed, self.allocate = starts, zeroed, allocate
        self.offsets: list[int] = []
        self.room = 0
        for size in sizes:
            self.offsets.append(self.room)
            self.room += -(-size // ALIGNMENT) * ALIGNMENT

    def __call__(self, device: int, addresses: list[int | None]) -> None:
        """``addresses``, behind a None, are those of the tensors that the replay was made for."""
        held = []
        if self.room:
            memory = self.allocate((self.room,), (1,), torch.uint8)
            first = memory.data_ptr()
            addresses += [first + offset for offset in self.offsets]
        for size in self.zeroed:
            held.append(self.allocate((size,), (1,), torch.uint8).zero_())
            addresses.append(held[-1].data_ptr())
        stream = current_raw_stream(device)
        for start, pick in self.starts:
            start(stream, pick(addresses))
