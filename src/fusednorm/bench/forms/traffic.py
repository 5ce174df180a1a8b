"""The bytes that a form moves at the least, in several calls and in one: what one call promises to save.

Both are found on meta tensors, which have shapes and no memory. Several calls move what their operators read and write,
those of autograd included, each tensor of an operator once. One call's statistics are left out, a number or two a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod
from typing import Any

import torch
from torch import Tensor

from fusednorm.bench.forms.catalog import Form, Outputs, Shape, Tensors
from fusednorm.private.torch_names import watch_operators


def several_calls_bytes(form: Form, shape: Shape, dtype: str, backward: bool) -> int:
    """The bytes that fusednorm's norm and torch's operators around it move; 0 where nothing tells them."""
    moved = 0

    def count(function: Any, arguments: Iterable[Any], results: Any) -> None:
        nonlocal moved
        if not function.is_view:
            moved += _bytes_of(arguments) + _bytes_of((results,))

    tensors = _drawn(form, shape, dtype, backward)
    outputs = _outputs(form.composed, tensors, backward)
    grads = [torch.empty_like(output) for output in outputs]
    with watch_operators(count):
        outputs = _outputs(form.composed, tensors, backward)
        if backward:
            torch.autograd.grad(outputs, list(tensors.values()), grads)
    return moved


def one_call_bytes(form: Form, shape: Shape, dtype: str, backward: bool) -> int:
    """The fewest bytes: one kernel reads all operands and writes the outputs, and another makes all gradients.

    The backward reads the gradients of the outputs and the operands. It reads the sum s where that is an output, in
    place of what it is made of, of which only a gate's gradient needs the added tensor as well. What is added without
    a gate has the gradient of x, one tensor for both.
    """
    if form.fused is None:
        return several_calls_bytes(form, shape, dtype, backward)
    tensors = _drawn(form, shape, dtype, False)
    operands = _bytes_of(tensors.values())
    outputs = _outputs(form.torch, tensors, False)
    results = _bytes_of(outputs)
    if not backward:
        return operands + results
    added = _bytes_of([tensors[name] for name in ("pre_add",) if name in tensors and "pre_gate" not in tensors])
    returned = added if len(outputs) > 1 else 0
    shared = added if added == _bytes_of([tensors["x"]]) else 0
    return (operands + results) + (results + operands - returned) + (operands - shared)


def _drawn(form: Form, shape: Shape, dtype: str, backward: bool) -> dict[str, Tensor]:
    return {
        name: torch.empty(one, dtype=getattr(torch, dtype), device="meta", requires_grad=backward)
        for name, one in form.operands(shape).items()
    }


def _outputs(call: Callable[[Tensors], Outputs], tensors: Tensors, backward: bool) -> Outputs:
    with torch.set_grad_enabled(backward):
        return call(tensors)


def _bytes_of(values: Iterable[Any]) -> int:
    """The bytes of all tensors among values and lists of values, each once, without what an expanded one repeats."""
    found: dict[int, Tensor] = {}
    for value in values:
        for one in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(one, Tensor):
                found[id(one)] = one
    return sum(
        one.element_size() * prod(size for size, stride in zip(one.shape, one.stride(), strict=True) if stride)
        for one in found.values()
    )
