"""Calls over processes that repeat: one look at their tensors in place of checks, as in :mod:`fusednorm.repeats`.

A call is kept where kernels ran it, where the ranks of its group have agreed about it and do not again, and where the
host reads nothing of what they send. It is kept as long as its group lives.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fusednorm.activations import Activation
from fusednorm.choice import selection
from fusednorm.distributed.fused import Call
from fusednorm.distributed.synchronized import Exchange, Running
from fusednorm.operands import Operands
from fusednorm.private.torch_names import watched
from fusednorm.repeats import Guarded, remember

_grad_enabled = torch.is_grad_enabled
_is_compiling = torch.compiler.is_dynamo_compiling


class _Known(Guarded):
    """A call that was made before. The exchange has no group, which would live for its sake. ``activation`` keeps alive
    what the key names by its identity."""

    __slots__ = ("activation", "call", "exchange")

    def __init__(
        self, tensors: tuple[Tensor | None, ...], call: Call, exchange: Exchange, activation: str | Activation | None
    ) -> None:
        super().__init__(tensors)
        self.call, self.activation = call, activation
        self.exchange = replace(exchange, groups=())


_calls: WeakKeyDictionary[Any, dict[tuple[Any, ...], tuple[_Known, ...]]] = WeakKeyDictionary()


class Repeat:
    """A call over ``group`` that may repeat.

    ``call`` is the function's name and all arguments that are neither tensors nor the activation, whose identity is
    cheaper to hash than its value.
    """

    __slots__ = ("activation", "call", "group")

    def __init__(self, group: Any, call: tuple[Any, ...], activation: str | Activation | None) -> None:
        self.group, self.activation = group, activation
        self.call = (*call, *map(type, call))  # True is equal to 1, and 4.0 to 4

    def output(self, operands: Operands, running: Running | None = None) -> Tensor | None:
        """The output, where a call with arguments and tensors like these was made before and nothing watches this
        one."""
        calls = _calls.get(self.group)
        if calls is None or _is_compiling() or type(operands.input) is not Tensor or watched():
            return None
        tensors = _tensors(operands, running)
        try:
            known = calls.get(self._key(tensors))
        except (TypeError, AttributeError, RuntimeError):  # unhashable, not a tensor, or nested: the checks say so
            return None
        if not known:
            return None
        for one in known:
            if one.check(*one.select(tensors)):
                return one.call(replace(one.exchange, groups=(self.group,)), operands, running, None)[0]
        return None

    def keep(self, call: Call, exchange: Exchange, operands: Operands, running: Running | None) -> None:
        """Keep a call that was made: its key the first time, the call the second time."""
        shared = running is not None and not running.takes_kernels(operands.input.device)
        if len(exchange.groups) > 1 or shared or watched() or any(isinstance(each, Tensor) for each in self.call):
            return
        tensors = _tensors(operands, running)
        calls = _calls.setdefault(self.group, {})
        remember(calls, self._key(tensors), tensors, lambda: _Known(tensors, call, exchange, self.activation))

    def _key(self, tensors: tuple[Any, ...]) -> tuple[Any, ...]:
        input, *others = tensors
        nested = (None if each is None else each.is_nested for each in others)
        return (self.call, id(self.activation), input.shape, selection(), _grad_enabled(), *nested)


def _tensors(o: Operands, running: Running | None) -> tuple[Tensor | None, ...]:
    moved = (None, None, None) if running is None else (running.mean, running.var, running.counter)
    return (o.input, o.weight, o.bias, o.scale, o.shift, *moved)
