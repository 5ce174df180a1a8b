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
from typing import Any, TypeVar

import torch
from torch import Tensor

from fusednorm import dispatch
from fusednorm.activations import Activation
from fusednorm.autograd import saved_backward
from fusednorm.choice import selection, tuned_file
from fusednorm.dtypes import compute_dtype
from fusednorm.gate import batched, straight_backward, straight_forward
from fusednorm.instance import Move
from fusednorm.norm import Norm
from fusednorm.operands import BackwardOperands, Operands, Wanted
from fusednorm.private.torch_names import guard, saved_tensors_hooks, short_apply, short_backward, watched
from fusednorm.running import moved, mover, update_running

MOST_CALLS = 4096  # so many calls are kept, and then forgotten together
MOST_GUARDS = 8  # kept of one call: with and without gradients, of several strides and dtypes

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


AnyGuarded = TypeVar("AnyGuarded", bound=Guarded)


def _never(*tensors: Tensor) -> bool:
    return False


class Forward(Guarded):
    """A forward that was made before.

    ``run(*operands)`` gives the output, and with ``saves=True`` the output and the statistics, in a form that ``split``
    and ``moments`` read. ``backwards`` are the backwards of such forwards, by the gradients that are
    needed. ``activation`` keeps alive what the call's key names by its identity.

    mean and var are given, or are the running ones of a norm in training, which ``moves``: ``run`` moves them too where
    it ``moves_alone``, otherwise ``move`` does, a kernel for them, if there is one.
    """

    __slots__ = (
        "activation", "backwards", "differentiable", "elements", "move", "moves", "moves_alone", "norm", "run",
        "selected", "short", "tuned",
    )  # fmt: skip

    def __init__(
        self,
        norm: Norm,
        operands: Operands,
        activation: str | Activation | None,
        counter: Tensor | None,
        share: float | Tensor,
    ) -> None:
        tensors = operands.tensors()
        super().__init__((*tensors, counter))
        self.norm, self.activation, self.selected, self.tuned = norm, activation, selection(), tuned_file()
        self.differentiable = any(tensor is not None and tensor.requires_grad for tensor in tensors)
        self.backwards: dict[tuple[bool, ...], tuple[Backward, ...]] = {}
        self.moves, self.moves_alone, self.elements = norm.training and operands.mean is not None, False, 0
        self.move: Move | None = None
        plan, input, mean, var = dispatch.forward_plan(norm, operands), operands.input, operands.mean, operands.var
        short = None
        if self.moves:
            assert mean is not None and var is not None
            self.elements = input.numel() // input.shape[norm.channel_dim]
            if not isinstance(share, Tensor):
                dtype = compute_dtype(input.dtype)
                self.move = mover(mean, var, self.elements, share, counter, input.device, dtype)
            if self.move is not None and hasattr(plan, "short_moving"):
                short = plan.short_moving(operands, self.move)
            self.moves_alone = short is not None
        if short is None and hasattr(plan, "short"):
            short = plan.short(operands)
        self.short = short is not None
        self.run: Callable[..., Any] = short or _forward_of(plan, norm.has_mean)

    def results(
        self,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        scale: Tensor | None,
        shift: Tensor | None,
        mean: Tensor | None,
        var: Tensor | None,
        counter: Tensor | None,
        share: float | Tensor,
    ) -> tuple[Tensor, Any]:
        """The output and the statistics; running ones have moved."""
        output: Tensor
        if not self.moves:
            output, statistics = self.run(input, weight, bias, scale, shift, mean, var, saves=True)
            if counter is not None:
                counter.add_(1)
            return output, statistics
        assert mean is not None and var is not None
        if self.moves_alone:
            output, statistics = self.run(input, weight, bias, scale, shift, mean, var, saves=True, counter=counter)
            moved(mean, var, counter)
        else:
            output, statistics = self.run(input, weight, bias, scale, shift, None, None, saves=True)
            if self.move is None:
                update_running(mean, var, *self.moments(statistics), self.elements, share, counter)
            else:
                self.move(mean, var, *self.moments(statistics), counter)
                moved(mean, var, counter)
        return output, statistics

    def split(self, statistics: Any) -> tuple[Tensor | None, Tensor]:
        """mean and rstd."""
        if not self.short:
            mean, rstd, _ = statistics
            return mean, rstd
        return (statistics[0], statistics[1]) if self.norm.has_mean else (None, statistics[0])

    def moments(self, statistics: Any) -> tuple[Tensor, Tensor]:
        """mean and variance, of a norm that has both."""
        return statistics[0], statistics[2]

    def keep_backward(self, needed: tuple[bool, ...], operands: BackwardOperands) -> None:
        """Keep a backward that was made, if it went straight to its backend."""
        known = self.backwards.get(needed, ())
        if len(known) >= MOST_GUARDS or selection() != self.selected:
            return
        if straight_backward(operands) and not batched(operands):
            self.backwards[needed] = (*known, Backward(self, operands, needed))


def _forward_of(plan: Any, has_mean: bool) -> Callable[..., Any]:
    def run(*tensors: Any, saves: bool = False) -> Any:
        results = plan(Operands(*tensors), saves)
        if not saves:
            return results.output
        return results.output, (results.mean if has_mean else None, results.rstd, results.var)

    return run


class Backward(Guarded):
    """A backward that was made before: ``run`` gives the gradients as the Function returns them.

    The guard leaves out mean and rstd, which come from the forward and which nobody else sees.
    """

    __slots__ = ("run",)

    def __init__(self, forward: Forward, operands: BackwardOperands, needed: tuple[bool, ...]) -> None:
        o = operands
        super().__init__((o.grad_output, o.input, o.weight, o.bias, o.scale, o.shift))
        a, b, c, d, e, *_ = needed
        plan = dispatch.backward_plan(forward.norm, operands, (a, b, c, d, e))
        short = plan.short(operands, (a, b, c, d, e)) if forward.short and hasattr(plan, "short") else None
        self.run: Callable[..., tuple[Tensor | None, ...]] = short or _backward_of(plan, forward, (a, b, c, d, e))


def _backward_of(plan: Any, forward: Forward, wanted: Wanted) -> Callable[..., tuple[Tensor | None, ...]]:
    a, b, c, d, e = wanted

    def run(grad_output: Tensor, input: Tensor, *tensors: Any) -> tuple[Tensor | None, ...]:
        *parameters, statistics = tensors
        found = plan(BackwardOperands(grad_output, input, *forward.split(statistics), *parameters), wanted)
        return (
            found.input if a else None, found.weight if b else None, found.bias if c else None,
            found.scale if d else None, found.shift if e else None, None,
        )  # fmt: skip

    return run


class KnownNormalization(torch.autograd.Function):
    """The Function of a forward that was made before, where no hook sees what is saved. ``known`` is the forward, or it
    with mean, var, counter and share.

    The statistics lie in ``ctx`` itself: to save a tensor and to have it back takes 0.6 us. They live as long as the
    graph, and a hook or a checkpoint never sees them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        scale: Tensor | None,
        shift: Tensor | None,
        known: Forward | tuple[Forward, Tensor | None, Tensor | None, Tensor | None, float | Tensor],
    ) -> Tensor:
        output: Tensor
        if isinstance(known, tuple):
            known, mean, var, counter, share = known
            output, ctx.statistics = known.results(input, weight, bias, scale, shift, mean, var, counter, share)
        else:
            output, ctx.statistics = known.run(input, weight, bias, scale, shift, None, None, saves=True)
        ctx.known = known
        if scale is None and shift is None:  # to save None and to have it back takes 0.2 us
            ctx.save_for_backward(input, weight, bias)
        else:
            ctx.save_for_backward(input, weight, bias, scale, shift)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, bias, *modulation = ctx.saved_tensors
        scale, shift = modulation or (None, None)
        known: Forward = ctx.known
        needed, statistics = ctx.needs_input_grad, ctx.statistics
        straight = not _is_compiling() and not _grad_enabled()
        if straight:
            backwards = known.backwards.get(needed)
            if backwards and not watched() and not grad_output.is_nested and selection() == known.selected:
                tensors = (grad_output, input, weight, bias, scale, shift)
                for backward in backwards:
                    if backward.check(*backward.select(tensors)):
                        return backward.run(grad_output, input, weight, bias, scale, shift, statistics)
        mean, rstd = known.split(statistics)
        operands = BackwardOperands(grad_output, input, mean, rstd, weight, bias, scale, shift)
        found = saved_backward(known.norm, known.tuned, operands, needed[:5])
        if straight:
            known.keep_backward(needed, operands)
        return (*found, None)


_apply = short_apply(KnownNormalization)
short_backward(KnownNormalization)

# No guard of a call that was made once.
_calls: dict[tuple[object, ...], tuple[Forward, ...]] = {}


def repeated(
    call: tuple[object, ...],
    activation: str | Activation | None,
    input: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    mean: Tensor | None = None,
    var: Tensor | None = None,
    counter: Tensor | None = None,
    share: float | Tensor = 0.0,
) -> Tensor | None:
    """The output of a call, which Dynamo does not trace, with arguments and tensors like those of an earlier one; None
    where there was none, or where something watches this one.

    ``call`` is the function's name and all arguments that are neither tensors nor the activation, whose identity is
    cheaper to hash than its value. ``mean`` and ``var`` are given, or are the running ones of a norm in training, which
    move by ``share``; ``counter``, if there is one, then grows by 1.
    """
    if type(input) is not Tensor or watched():  # first: a function mode sees the reads below
        return None
    try:
        forwards = _calls.get(
            (
                call, id(activation), input.shape, selection(),
                None if weight is None else weight.is_nested, None if bias is None else bias.is_nested,
                None if scale is None else scale.is_nested, None if shift is None else shift.is_nested,
                None if mean is None else mean.is_nested, None if var is None else var.is_nested,
                None if counter is None else counter.is_nested,
            )
        )  # fmt: skip
    except (TypeError, AttributeError, RuntimeError):  # unhashable, not a tensor, or nested: the checks have the words
        return None
    if not forwards:
        return None
    tensors = (input, weight, bias, scale, shift, mean, var, counter)
    for forward in forwards:
        if forward.check(*forward.select(tensors)):
            alone = mean is None and counter is None
            if not (forward.differentiable and _grad_enabled()):
                if not forward.moves and counter is None:
                    return forward.run(input, weight, bias, scale, shift, mean, var)
                return forward.results(*tensors, share)[0]
            if saved_tensors_hooks(False) is not None:
                return None
            known = forward if alone else (forward, mean, var, counter, share)
            return _apply(input, weight, bias, scale, shift, known)
    return None


def keep(
    call: tuple[object, ...],
    activation: str | Activation | None,
    norm: Norm,
    operands: Operands,
    counter: Tensor | None = None,
    share: float | Tensor = 0.0,
) -> None:
    """Keep a call that was made, and not traced by Dynamo: its key the first time, its plan the second time."""
    o = operands
    if type(o.input) is not Tensor or watched():
        return
    if any(isinstance(each, Tensor) for each in call):  # an eps, which may hold another value the next time
        return
    tensors = (*o.tensors(), counter)
    nested = tuple(None if each is None else each.is_nested for each in tensors[1:])
    key = (call, id(activation), o.input.shape, selection(), *nested)

    def make() -> Forward | None:
        straight = straight_forward(operands) and not batched(operands)
        return Forward(norm, operands, activation, counter, share) if straight else None

    remember(_calls, key, tensors, make)


def remember(
    calls: dict[tuple[object, ...], tuple[AnyGuarded, ...]],
    key: tuple[object, ...],
    tensors: tuple[Tensor | None, ...],
    make: Callable[[], AnyGuarded | None],
) -> None:
    """Keep a call that was made: its key the first time, then ``make()`` where no guard takes its tensors yet, as one
    does of a call that hooks saw."""
    try:
        known = calls.get(key)
    except TypeError:  # unhashable
        return
    if known is None:
        if len(calls) >= MOST_CALLS:
            calls.clear()
        calls[key] = ()
    elif len(known) < MOST_GUARDS and not any(one.check(*one.select(tensors)) for one in known):
        made = make()
        if made is not None:
            calls[key] = (*known, made)
