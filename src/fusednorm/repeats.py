"""Calls that repeat: the plan of a call like an earlier one, found by one look at its tensors.

Most calls of a program have been made before, with other values. Checks of arguments, the gate and the key of a plan
ask each tensor for its class, shape, strides, dtype and device, which takes longer than the kernel of a small call. A
guard (``torch_names.guard``) compares all of these in one call, and the thread's dispatch keys with them. A call is
kept when it is made for the second time, if it went straight to its backend.

Guards see, by dispatch keys, whatever changes how the tensors are to be read: lazy negation, zeros without memory, vmap
and the other transforms, traces, inference mode, autocast. They do not see the modes of torch's compiler, function
modes, forward-mode AD and profilers, so ``watched`` is asked in each call. They abort the process for a nested tensor,
so ``is_nested`` is asked before them, and is a part of the key.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from fusednorm import dispatch
from fusednorm.activations import Activation
from fusednorm.choice import selection, tuned_file
from fusednorm.gate import batched, straight_backward, straight_forward
from fusednorm.norm import Norm
from fusednorm.operands import BackwardOperands, Operands, Wanted
from fusednorm.private.torch_names import guard, watched

MOST_CALLS = 4096  # so many calls are kept, and then forgotten together
MOST_GUARDS = 8  # kept of one call: with and without gradients, of several strides and dtypes

#: The output of a forward's seven operands; the output, mean, rstd and variance; the gradients of a backward's eight.
Run = Callable[..., Tensor]
Save = Callable[..., tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]]
Differentiate = Callable[..., tuple[Tensor | None, ...]]

_grad_enabled = torch.is_grad_enabled
_is_compiling = torch.compiler.is_dynamo_compiling


class Guarded:
    """A guard of the tensors that are present among a call's operands."""

    __slots__ = ("check", "select")

    def __init__(self, tensors: tuple[Tensor | None, ...]) -> None:
        present = [place for place, tensor in enumerate(tensors) if tensor is not None]
        # itemgetter gives a tuple for two places and more, or for a slice.
        self.select: Any = itemgetter(*present) if len(present) > 1 else itemgetter(slice(0, 1))
        self.check: Callable[..., bool] = guard(self.select(tensors)) or _never


def _never(*tensors: Tensor) -> bool:
    return False


class Backward(Guarded):
    """A backward that was made before: ``run`` gives the gradients as autograd's Function returns them."""

    __slots__ = ("run",)

    def __init__(self, norm: Norm, operands: BackwardOperands, wanted: Wanted) -> None:
        super().__init__(operands.tensors())
        plan = dispatch.backward_plan(norm, operands, wanted)
        short = getattr(plan, "short", None)
        self.run: Differentiate = (short and short(operands, wanted)) or _gradients_of(plan, wanted)


def _gradients_of(plan: Any, wanted: Wanted) -> Differentiate:
    a, b, c, d, e = wanted

    def run(*tensors: Any) -> tuple[Tensor | None, ...]:
        found = plan(BackwardOperands(*tensors), wanted)
        return (
            found.input if a else None, found.weight if b else None, found.bias if c else None,
            found.scale if d else None, found.shift if e else None, None,
        )  # fmt: skip

    return run


class Forward(Guarded):
    """A forward that was made before.

    ``run`` gives the output, ``save`` the statistics too. ``activation`` keeps alive what the call's key names by its
    identity. ``backwards`` are the backwards of such forwards, by the gradients that are wanted.
    """

    __slots__ = ("activation", "backwards", "differentiable", "norm", "run", "save", "selected", "tuned")

    def __init__(self, norm: Norm, operands: Operands, activation: str | Activation | None) -> None:
        tensors = operands.tensors()
        super().__init__(tensors)
        self.norm, self.activation, self.selected, self.tuned = norm, activation, selection(), tuned_file()
        self.differentiable = any(tensor is not None and tensor.requires_grad for tensor in tensors)
        self.backwards: dict[tuple[bool, ...], tuple[Backward, ...]] = {}
        plan = dispatch.forward_plan(norm, operands)
        short = getattr(plan, "short", None)
        runs: tuple[Run, Save] = (short and short(operands)) or _results_of(plan, norm.has_mean)
        self.run, self.save = runs

    def backward(
        self,
        needed: tuple[bool, ...],
        grad_output: Tensor,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        scale: Tensor | None,
        shift: Tensor | None,
        mean: Tensor | None,
        rstd: Tensor,
    ) -> tuple[Tensor | None, ...] | None:
        """The needed gradients, or None where no such backward was made before or something watches this one."""
        known = self.backwards.get(needed)
        if known is None or _grad_enabled() or watched() or grad_output.is_nested or selection() != self.selected:
            return None
        tensors = (grad_output, input, mean, rstd, weight, bias, scale, shift)
        for backward in known:
            if backward.check(*backward.select(tensors)):
                return backward.run(*tensors)
        return None

    def keep_backward(self, needed: tuple[bool, ...], operands: BackwardOperands) -> None:
        """Keep a backward that was made, if it went straight to its backend."""
        known = self.backwards.get(needed, ())
        if len(known) < MOST_GUARDS and selection() == self.selected and _straight(straight_backward, operands):
            a, b, c, d, e, *_ = needed
            self.backwards[needed] = (*known, Backward(self.norm, operands, (a, b, c, d, e)))


def _results_of(plan: Any, has_mean: bool) -> tuple[Run, Save]:
    def run(*tensors: Any) -> Tensor:
        output: Tensor = plan(Operands(*tensors), False).output
        return output

    def save(*tensors: Any) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        results = plan(Operands(*tensors))
        return results.output, results.mean if has_mean else None, results.rstd, results.var

    return run, save


def _straight(gate: Callable[[Any], bool], operands: Any) -> bool:
    return gate(operands) and not batched(operands)


# No guard of a call that was made once.
_calls: dict[tuple[object, ...], tuple[Forward, ...]] = {}


def find(
    call: tuple[object, ...],
    activation: str | Activation | None,
    input: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    mean: Tensor | None = None,
    var: Tensor | None = None,
) -> Forward | None:
    """The forward of an earlier call with equal arguments and tensors like these, where nothing watches this one.

    ``call`` is the function's name and all arguments that are neither tensors nor the activation, whose identity is
    cheaper to hash than its value.
    """
    if _is_compiling() or type(input) is not Tensor:
        return None
    try:
        known = _calls.get(_key(call, activation, input, weight, bias, scale, shift, mean, var))
    except (TypeError, AttributeError, RuntimeError):  # unhashable, not a tensor, or nested: the checks have the words
        return None
    if not known or watched():
        return None
    tensors = (input, weight, bias, scale, shift, mean, var)
    for forward in known:
        if forward.check(*forward.select(tensors)):
            return forward
    return None


def _key(
    call: tuple[object, ...],
    activation: object,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
) -> tuple[object, ...]:
    return (
        call, id(activation), input.shape, selection(),
        None if weight is None else weight.is_nested, None if bias is None else bias.is_nested,
        None if scale is None else scale.is_nested, None if shift is None else shift.is_nested,
        None if mean is None else mean.is_nested, None if var is None else var.is_nested,
    )  # fmt: skip


def keep(call: tuple[object, ...], activation: str | Activation | None, norm: Norm, operands: Operands) -> None:
    """Keep a call that was made: its key the first time, its plan the second time."""
    o = operands
    if _is_compiling() or type(o.input) is not Tensor or any(isinstance(each, Tensor) for each in call):
        return  # an eps that is a tensor may hold another value the next time
    try:
        key = _key(call, activation, o.input, o.weight, o.bias, o.scale, o.shift, o.mean, o.var)
        known = _calls.get(key)
    except (TypeError, AttributeError, RuntimeError):
        return
    if known is None:
        if len(_calls) >= MOST_CALLS:
            _calls.clear()
        _calls[key] = ()
    elif len(known) < MOST_GUARDS and _straight(straight_forward, operands):
        _calls[key] = (*known, Forward(norm, operands, activation))
