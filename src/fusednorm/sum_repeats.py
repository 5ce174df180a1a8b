"""Calls with fused sums around the norm that repeat, as :mod:`fusednorm.repeats` says it of the others.

Such a call is kept when it is made for the second time, if it went straight to its backend. The key of a call says
whether gradients are switched on, since without them nobody keeps s for a backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusednorm import dispatch
from fusednorm.activations import Activation
from fusednorm.choice import selection
from fusednorm.dtypes import compute_dtype
from fusednorm.instance import Move
from fusednorm.norm import Norm
from fusednorm.operands import Operands, Results, Sums
from fusednorm.private.torch_names import saved_tensors_hooks, watched
from fusednorm.repeats import Guarded, remember
from fusednorm.running import moved, mover, update_running
from fusednorm.sum_autograd import Made, Optional, Summed, apply_summed, by_plan
from fusednorm.sums import has_gradients, keeps_sum, straight

_grad_enabled = torch.is_grad_enabled


class SummedForward(Guarded):
    """A forward with sums that was made before. ``activation`` keeps alive what the call's key names by its identity.

    mean and var are given, or are the running ones of a norm in training: ``moves``. Then ``run`` moves them too, by
    ``move``, a kernel for them, or by torch's operators.
    """

    __slots__ = ("activation", "call", "differentiable", "elements", "make", "move", "moves")

    def __init__(
        self,
        norm: Norm,
        operands: Operands,
        sums: Sums,
        plan: Any,
        activation: str | Activation | None,
        counter: Optional,
        share: float | Tensor,
    ) -> None:
        super().__init__((*operands.tensors(), sums.pre_add, sums.pre_gate, sums.post_add, counter))
        self.activation, self.call = activation, Summed(norm, sums.pre_add, True)
        self.differentiable = has_gradients(operands, sums)
        input, mean, var = operands.input, operands.mean, operands.var
        self.moves = norm.training and mean is not None
        self.elements = 0
        self.move: Move | None = None
        if self.moves:
            assert mean is not None and var is not None
            self.elements = input.numel() // input.shape[norm.channel_dim]
            if not isinstance(share, Tensor):
                dtype = compute_dtype(input.dtype)
                self.move = mover(mean, var, self.elements, share, counter, input.device, dtype)
        make = self._maker(plan, sums.return_sum)
        self.make: Callable[..., Made] = plan.taped(make, input) if hasattr(plan, "taped") else make

    def _maker(self, plan: Any, return_sum: bool) -> Callable[..., Made]:
        move, moves, saves = self.move, self.moves, self.differentiable or self.moves

        def make(*tensors: Any) -> Made:
            *others, mean, var, counter = tensors
            given = (None, None) if moves else (mean, var)
            made = by_plan(plan, return_sum, saves, *others, *given)
            if move is not None:
                _, _, new_mean, _, new_var = made
                assert new_mean is not None and new_var is not None
                move(mean, var, new_mean, new_var, counter)
            return made

        return make

    def run(self, *tensors: Any) -> Made:
        """The output, s and the statistics; running ones have moved by the share, which comes last."""
        *_, mean, var, counter, share = tensors
        made = self.make(*tensors[:-1])
        if self.move is not None:
            moved(mean, var, counter)
        elif self.moves:
            _, _, new_mean, _, new_var = made
            assert new_mean is not None and new_var is not None
            update_running(mean, var, new_mean, new_var, self.elements, share, counter)
        elif counter is not None:
            counter.add_(1)
        return made


# No guard of a call that was made once.
_calls: dict[tuple[object, ...], tuple[SummedForward, ...]] = {}


def repeated_sums(
    call: tuple[object, ...],
    activation: str | Activation | None,
    sums: Sums,
    operands: Operands,
    counter: Optional = None,
    share: float | Tensor = 0.0,
) -> Results | None:
    """The output, and s where the caller asked for it, of a call, which Dynamo does not trace, with arguments and
    tensors like those of an earlier one; None where there was none, or where something watches this one.

    The arguments are those of :func:`fusednorm.repeats.repeated`.
    """
    if type(operands.input) is not Tensor or watched():  # first: a function mode sees the reads below
        return None
    try:
        forwards = _calls.get(_key(call, activation, sums, operands, counter))
    except (TypeError, AttributeError, RuntimeError):  # unhashable, not a tensor, or nested: the checks have the words
        return None
    if not forwards:
        return None
    o = operands
    own, around = (o.input, o.weight, o.bias, o.scale, o.shift), (sums.pre_add, sums.pre_gate, sums.post_add)
    tensors = (*own, o.mean, o.var, *around, counter)
    for forward in forwards:
        if forward.check(*forward.select(tensors)):
            if saved_tensors_hooks(False) is not None:
                return None
            others = o.mean, o.var, counter, share
            if forward.differentiable:
                y, s = apply_summed(o.input, *around, *own[1:], forward.call, forward.run, others, None)
            else:
                y, s, *_ = forward.run(*own, *around, *others)
            return Results(y, sum=s)
    return None


def keep_sums(
    call: tuple[object, ...],
    activation: str | Activation | None,
    norm: Norm,
    sums: Sums,
    operands: Operands,
    counter: Optional = None,
    share: float | Tensor = 0.0,
) -> None:
    """Keep a call that was made, and not traced by Dynamo: its key the first time, its plan the second time."""
    o = operands
    if type(o.input) is not Tensor or watched() or not straight(operands, sums):
        return
    if any(isinstance(each, Tensor) for each in call):  # an eps, which may hold another value the next time
        return
    tensors = (*o.tensors(), sums.pre_add, sums.pre_gate, sums.post_add, counter)

    def make() -> SummedForward | None:
        plan = dispatch.sum_forward_plan(norm, operands, sums, keeps_sum(sums, has_gradients(operands, sums)))
        return None if plan is None else SummedForward(norm, operands, sums, plan, activation, counter, share)

    remember(_calls, _key(call, activation, sums, operands, counter), tensors, make)


def _key(
    call: tuple[object, ...], activation: str | Activation | None, sums: Sums, operands: Operands, counter: Optional
) -> tuple[object, ...]:
    o = operands
    return (
        call, id(activation), o.input.shape, selection(), _grad_enabled(), sums.return_sum,
        None if o.weight is None else o.weight.is_nested, None if o.bias is None else o.bias.is_nested,
        None if o.scale is None else o.scale.is_nested, None if o.shift is None else o.shift.is_nested,
        None if o.mean is None else o.mean.is_nested, None if o.var is None else o.var.is_nested,
        None if sums.pre_add is None else sums.pre_add.is_nested,
        None if sums.pre_gate is None else sums.pre_gate.is_nested,
        None if sums.post_add is None else sums.post_add.is_nested, None if counter is None else counter.is_nested,
    )  # fmt: skip
