"""The autograd Function of calls with fused sums around the norm, and its backwards that repeat (repeats.py)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from fusednorm import dispatch
from fusednorm.choice import Selection, as_selected, lost, selection, tuned_file
from fusednorm.norm import Norm
from fusednorm.operands import BackwardOperands, Gradients, Operands, Results, SumGradients, Sums
from fusednorm.private.torch_names import short_apply, short_backward, watched
from fusednorm.repeats import MOST_GUARDS, Guarded
from fusednorm.sum_gradients import (
    Needed,
    SumOperands,
    Way,
    add_rest,
    completed,
    fused_way,
    is_straight,
    summed_gradients,
)

_grad_enabled = torch.is_grad_enabled
_is_compiling = torch.compiler.is_dynamo_compiling

Optional = Tensor | None
#: mean, rstd and the biased variance.
Statistics = tuple[Optional, Tensor, Optional]
#: The output, s where it is kept, and the statistics where they are wanted.
Made = tuple[Optional, ...]


class Summed:
    """A call with fused sums, without its tensors. ``backwards`` are its backwards that repeat, by the gradients that
    are needed and by whether s has one from elsewhere; None for a call that is not kept."""

    __slots__ = ("backwards", "norm", "pre_dtype", "pre_shape", "selected", "tuned")

    def __init__(self, norm: Norm, pre_add: Optional, repeats: bool) -> None:
        self.norm, self.selected, self.tuned = norm, selection(), tuned_file()
        self.pre_shape = None if pre_add is None else pre_add.shape
        self.pre_dtype = None if pre_add is None else pre_add.dtype
        self.backwards: dict[tuple[object, ...], tuple[SummedBackward, ...]] | None = {} if repeats else None

    def needed(self, needs: tuple[bool, ...]) -> Needed:
        """By an autograd Function's ``needs_input_grad``."""
        input, pre_add, pre_gate, post_add, a, b, c, d, *_ = needs
        return Needed(input, pre_add, pre_gate, post_add, (a, b, c, d), self.pre_shape, self.pre_dtype)

    def keep_backward(
        self, key: tuple[object, ...], operands: BackwardOperands, added: SumOperands, needed: Needed, way: Way | None
    ) -> None:
        """Keep a backward that went straight to its backend, if nothing was copied for it."""
        if self.backwards is None:
            return
        known = self.backwards.get(key, ())
        if len(known) < MOST_GUARDS and selection() == self.selected:
            run = _backward_of(self.norm, operands, added, needed, way)
            if run is not None:
                self.backwards[key] = (*known, SummedBackward(operands, added, run))


class SummedBackward(Guarded):
    """A backward that was made before: ``run`` gives the gradients as the Function returns them.

    The guard leaves out mean and rstd, which come from the forward and which nobody else sees.
    """

    __slots__ = ("run",)

    def __init__(
        self, operands: BackwardOperands, added: SumOperands, run: Callable[..., tuple[Optional, ...]]
    ) -> None:
        o, a = operands, added
        super().__init__(
            (o.grad_output, o.input, o.weight, o.bias, o.scale, o.shift, a.behind, a.grad_sum, a.pre_gate, a.pre_add)
        )
        self.run = run


def _backward_of(
    norm: Norm, operands: BackwardOperands, added: SumOperands, needed: Needed, way: Way | None
) -> Callable[..., tuple[Optional, ...]] | None:
    """``run(*tensors, statistics)`` for tensors in the guard's order; None where torch's operators or copies take
    part."""
    fuses = way is not None  # what runs later holds none of the way's tensors
    plan: Any
    if way is None:
        if added.behind is not None:
            return None
        wanted, adds_sum, gives_product = needed.wanted, False, False
        plan = dispatch.backward_plan(norm, operands, wanted)
    else:
        plan, wanted, adds_sum, gives_product = way.plan, way.asked, way.grad_sum is not None, way.product is not None
        copied = adds_sum and way.grad_sum is not added.grad_sum
        if copied or way.operands is not operands or way.behind is not added.behind:
            return None

    def gradients(
        grad_output: Tensor, s: Tensor, weight: Optional, bias: Optional, scale: Optional, shift: Optional,
        behind: Optional, grad_sum: Optional, pre_gate: Optional, pre_add: Optional, mean: Optional, rstd: Tensor,
    ) -> Made:  # fmt: skip
        given = BackwardOperands(grad_output, s, mean, rstd, weight, bias, scale, shift)
        if fuses:
            gated = needed.gated(SumOperands(pre_gate=pre_gate, pre_add=pre_add)) if gives_product else None
            found, around = plan(given, wanted, behind, grad_sum if adds_sum else None, gated)
        else:
            found, around = plan(given, wanted), SumGradients()
        return (
            found.input, found.weight, found.bias, found.scale, found.shift, around.pre_add, around.pre_gate,
            around.post_add,
        )  # fmt: skip

    make: Callable[..., Made] = plan.taped(gradients, operands.input) if hasattr(plan, "taped") else gradients

    def run(*tensors: Any) -> tuple[Optional, ...]:
        grad_output, *_, behind, grad_sum, pre_gate, pre_add, (mean, rstd, _) = tensors
        *own, grad_pre_add, grad_pre_gate, grad_post_add = make(*tensors[:-1], mean, rstd)
        found, around = Gradients(*own), SumGradients(grad_pre_add, grad_pre_gate, grad_post_add)
        add_rest(found, around, grad_output, behind, None if adds_sum else grad_sum, needed)
        return (*completed(norm, found, around, SumOperands(None, None, pre_gate, pre_add), needed), *_NO_GRADIENTS)

    return run


class SummedNormalization(torch.autograd.Function):
    """y and, where it is kept, s.

    ``run(input, weight, bias, scale, shift, pre_add, pre_gate, post_add, *others)`` computes; the list ``kept``, if
    there is one, gets the statistics, which lie in ``ctx`` itself: no hook ever sees what such a call saves.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        pre_add: Optional,
        pre_gate: Optional,
        post_add: Optional,
        weight: Optional,
        bias: Optional,
        scale: Optional,
        shift: Optional,
        call: Summed,
        run: Callable[..., Made],
        others: tuple[Any, ...],
        kept: list[Statistics] | None,
    ) -> tuple[Optional, Optional]:
        output, total, *statistics = run(input, weight, bias, scale, shift, pre_add, pre_gate, post_add, *others)
        ctx.set_materialize_grads(False)
        ctx.call, ctx.statistics = call, statistics
        behind, activation = None, call.norm.activation
        if post_add is not None and activation is not None:
            # Autograd keeps the output for other operators anyway, and a post_add that nobody else keeps is freed.
            behind = output if activation.told else post_add
        needs = ctx.needs_input_grad
        gated = pre_gate is not None and needs[2]
        s = input if total is None else total
        ctx.save_for_backward(s, weight, bias, scale, shift, behind, pre_gate, pre_add if gated else None)
        if kept is not None:
            mean, rstd, var = statistics
            assert rstd is not None
            kept.append((mean, rstd, var))
        if total is not None and not any(needs[:3]):
            ctx.mark_non_differentiable(total)
        return output, total

    @staticmethod
    def backward(ctx: Any, grad_output: Optional, grad_sum: Optional) -> tuple[Optional, ...]:
        s, weight, bias, scale, shift, behind, pre_gate, pre_add = ctx.saved_tensors
        call: Summed = ctx.call
        needs, statistics = ctx.needs_input_grad, ctx.statistics
        key = needs, grad_sum is None
        straight = not _is_compiling() and not _grad_enabled()
        if straight and call.backwards and grad_output is not None:
            known = call.backwards.get(key)
            nested = grad_output.is_nested or (grad_sum is not None and grad_sum.is_nested)
            if known and not nested and not watched() and selection() == call.selected:
                tensors = (grad_output, s, weight, bias, scale, shift, behind, grad_sum, pre_gate, pre_add)
                for backward in known:
                    if backward.check(*backward.select(tensors)):
                        return backward.run(*tensors, statistics)
        needed, found, around = call.needed(needs), Gradients(input=grad_sum), SumGradients()
        added = SumOperands(behind, grad_sum, pre_gate, pre_add)
        if grad_output is not None:
            mean, rstd, _ = statistics
            operands = BackwardOperands(grad_output, s, mean, rstd, weight, bias, scale, shift)
            straight = is_straight(operands, added)
            tuned = Selection(None, call.tuned) if lost(call.tuned) and not _is_compiling() else None
            with nullcontext() if tuned is None else as_selected(tuned):
                way = fused_way(call.norm, operands, added, needed) if straight else None
                found, around = summed_gradients(call.norm, operands, added, needed, way, straight)
            if straight:
                call.keep_backward(key, operands, added, needed, way)
        return (*completed(call.norm, found, around, added, needed), *_NO_GRADIENTS)


#: Of the Function's arguments that are no tensors.
_NO_GRADIENTS = (None, None, None, None)

apply_summed = short_apply(SummedNormalization)
short_backward(SummedNormalization)


def differentiable(norm: Norm, operands: Operands, sums: Sums, plan: Any) -> Results:
    """The results of a call that is made for the first time, by a plan that fuses its sums."""
    o = operands

    def run(*tensors: Any) -> Made:
        return by_plan(plan, sums.return_sum, True, *tensors)

    kept: list[Statistics] = []
    y, s = apply_summed(
        o.input, sums.pre_add, sums.pre_gate, sums.post_add, o.weight, o.bias, o.scale, o.shift,
        Summed(norm, sums.pre_add, False), run, (o.mean, o.var), kept,
    )  # fmt: skip
    return Results(y, *kept[0], s)


def by_plan(
    plan: Any,
    return_sum: bool,
    statistics: bool,
    input: Tensor,
    weight: Optional,
    bias: Optional,
    scale: Optional,
    shift: Optional,
    pre_add: Optional,
    pre_gate: Optional,
    post_add: Optional,
    mean: Optional,
    var: Optional,
) -> Made:
    """A forward by a plan, with tensors in the order in which the Function gives them."""
    sums = Sums(pre_add, pre_gate, post_add, return_sum)
    found: Results = plan(Operands(input, weight, bias, scale, shift, mean, var), sums, statistics)
    return found.output, found.sum, found.mean, found.rstd, found.var
