"""Triton's interpreter with kernels that start by addresses, as compiled ones do, for the short forms of plans.

The interpreter compiles nothing, so a Launch keeps no start there. Here it keeps one that makes tensors of the
addresses and runs the kernel on them.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from fusednorm import repeats, sum_repeats
from fusednorm.backends.triton import launch, tape
from fusednorm.backends.triton.launch import Launch

#: Set to the text of an error, the next start raises it.
FAILURE: list[str] = []
STARTED: list[str] = []


def _at(address: int | None, like: Tensor | None) -> Tensor | None:
    if address is None or like is None:
        assert address is like is None
        return None
    assert address % 16 == 0 or like.data_ptr() % 16  # as it was compiled for
    memory = (ctypes.c_char * max(1, like.untyped_storage().nbytes())).from_address(address)
    return torch.frombuffer(memory, dtype=like.dtype)


def _compile(self: Launch, case: Any, tensors: tuple[Tensor | None, ...], addresses: list[int | None]) -> None:
    def run(*arguments: Tensor | None) -> None:
        if FAILURE:
            raise RuntimeError(FAILURE.pop())
        self.kernel[(self.programs, 1, 1)](*arguments, *self.scalars, **self.constants, **self.options)

    def start(stream: int, addresses: Any) -> None:
        run(*(_at(address, tensor) for address, tensor in zip(addresses, tensors, strict=True)))
        STARTED.append(self.kernel.fn.__name__)

    run(*tensors)
    self.starts[case] = start


def install() -> None:
    Launch.compile = _compile  # type: ignore[method-assign]
    tape.current_raw_stream = launch.current_raw_stream = lambda device: 0  # type: ignore[attr-defined]


def replayed(call: Any) -> tuple[Any, list[str]]:
    """The result of a call, and the kernels that were started for it by addresses that a replay had."""
    found: list[str] = []
    make = tape.Replay.__call__

    def counted(self: tape.Replay, *arguments: Any) -> None:
        before = len(STARTED)
        make(self, *arguments)
        found.extend(STARTED[before:])

    tape.Replay.__call__ = counted  # type: ignore[method-assign]
    try:
        return call(), found
    finally:
        tape.Replay.__call__ = make  # type: ignore[method-assign]


def forget() -> tuple[dict[Any, Any], dict[Any, Any]]:
    """What is known of calls, which is forgotten."""
    found = dict(repeats._calls), dict(sum_repeats._calls)
    repeats._calls.clear()
    sum_repeats._calls.clear()
    return found


def remember(calls: tuple[dict[Any, Any], dict[Any, Any]]) -> None:
    """What is known is what :func:`forget` gave."""
    forget()
    repeats._calls.update(calls[0])
    sum_repeats._calls.update(calls[1])
