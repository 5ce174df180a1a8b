"""The differentiable calls that everything public makes: normalize and normalize_backward.

A small eager call cannot afford torch's dispatcher: of the 8 µs that torch's own group_norm and silu take on
(1, 32, 8, 8), one pass of thirteen arguments through it costs 4.2, and a Python kernel at the Autograd key as much
again. So both functions go straight to the backend, or to one autograd.Function, where nothing watches the dispatcher
(gate.py), and through the op everywhere else. Both ways run the same Function and the same backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusednorm import dispatch, transforms
from fusednorm.backends import reference
from fusednorm.choice import Selection, as_selected, lost, tuned_file
from fusednorm.gate import batched, on_mesh, straight_backward, straight_forward
from fusednorm.library import BACKWARD, FORWARD, backward_op, forward_op, library
from fusednorm.norm import ROW_FAMILIES, Norm, norm_of_op
from fusednorm.op_arguments import backward_norm, check_backward, forward_norm
from fusednorm.op_results import FiveTensors, FourTensors, five_tensors, four_tensors
from fusednorm.operands import BackwardOperands, Gradients, Operands, Results, Wanted
from fusednorm.private.torch_names import below_autograd, saved_tensors_hooks, short_apply, transformed
from fusednorm.tuning import TunedFile

_grad_enabled = torch.is_grad_enabled


def _without_distributed(norm: Norm, operands: Operands, wants_statistics: bool) -> Results:
    raise RuntimeError(f"{norm.family}: DTensors need fusednorm.distributed, which was not imported")


#: The forward of DTensors. :mod:`fusednorm.distributed`, which stands on this module, sets it.
forward_on_mesh: Callable[[Norm, Operands, bool], Results] = _without_distributed


class Normalization(torch.autograd.Function):
    """One Function for the straight way and the op's. ``run`` computes; the list ``kept``, if given, gets the results.
    Calls that repeat have a Function of their own (repeats.py).

    mean, rstd and var leave through ``kept``: they carry no gradient, and as outputs would cost 3 µs of wrapping. Both
    ways save the same tensors, since a checkpoint may see the op in one pass and not in the other. Every tensor is
    saved by ``save_for_backward``, whose hooks see it; ``ctx.norm`` holds none.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        scale: Tensor | None,
        shift: Tensor | None,
        norm: Norm,
        operands: Operands,
        run: Callable[[Norm, Operands], Results],
        kept: list[Results] | None,
    ) -> Tensor:
        results = run(norm, operands)
        ctx.norm, ctx.tuned = norm, tuned_file()
        ctx.hooked = saved_tensors_hooks(False) is not None
        # The op returns an empty mean for rms_norm, which has none.
        mean = results.mean if norm.has_mean else None
        ctx.save_for_backward(input, weight, bias, scale, shift, mean, results.rstd)
        if kept is not None:
            kept.append(results)
        return results.output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, bias, scale, shift, mean, rstd = ctx.saved_tensors
        norm: Norm = ctx.norm
        operands = BackwardOperands(grad_outputs[0], input, mean, rstd, weight, bias, scale, shift)
        if ctx.hooked and not torch.compiler.is_dynamo_compiling():  # under which the op's fake checks
            # Hooks can give back other shapes and dtypes than were saved, and a kernel would go past a tensor's end.
            check_backward(f"the backward of {norm.family} under saved_tensors_hooks", norm, operands)
        return (*saved_backward(norm, ctx.tuned, operands, ctx.needs_input_grad[:5]), None, None, None, None)


def saved_backward(
    norm: Norm, tuned: TunedFile | None, operands: BackwardOperands, wanted: Wanted
) -> tuple[Tensor | None, ...]:
    """The gradients of five operands for autograd, from what a forward under ``tuned`` saved; None where unwanted."""
    if norm.training and _grad_enabled():
        # create_graph: the saved statistics are constants to autograd, so the second derivative needs new ones.
        operands.mean, operands.rstd = reference.saved_statistics(norm, operands.input)
    if lost(tuned) and not torch.compiler.is_dynamo_compiling():
        with as_selected(Selection(None, tuned)):
            found = gradients(norm, operands, wanted)
    else:
        found = gradients(norm, operands, wanted)
    a, b, c, d, e = wanted
    return (
        found.input if a else None,
        found.weight if b else None,
        found.bias if c else None,
        found.scale if d else None,
        found.shift if e else None,
    )


# Function.apply spends 2 of its 5 µs on torch.func, whose calls the gate keeps out, and on binding default arguments.
_apply = short_apply(Normalization)


def normalize(norm: Norm, operands: Operands, wants_statistics: bool = True) -> Results:
    """The results of a forward of checked operands.

    A statistic that the norm does not have is None or empty; without ``wants_statistics`` every one may be.
    """
    if torch.compiler.is_dynamo_compiling():
        return forward_op(norm, operands)
    if not straight_forward(operands):
        if on_mesh(operands):
            return forward_on_mesh(norm, operands, wants_statistics)
        if transformed():
            return transforms.forward(norm, operands)
        return reference.forward(norm, operands) if batched(operands) else forward_op(norm, operands)
    try:
        if _grad_enabled() and _requires_grad(operands):
            return _differentiable(norm, operands, dispatch.forward, wants_statistics)
        return dispatch.forward(norm, operands, wants_statistics)
    except RuntimeError:  # a tensor of torch's older vmap turned out to have no memory
        if not batched(operands):
            raise
        return reference.forward(norm, operands)


def _requires_grad(operands: Operands | BackwardOperands) -> bool:
    o = operands
    return (
        o.input.requires_grad
        or (o.weight is not None and o.weight.requires_grad)
        or (o.bias is not None and o.bias.requires_grad)
        or (o.scale is not None and o.scale.requires_grad)
        or (o.shift is not None and o.shift.requires_grad)
    )


def _differentiable(
    norm: Norm, operands: Operands, run: Callable[[Norm, Operands], Results], wants_statistics: bool = True
) -> Results:
    o = operands
    kept: list[Results] | None = [] if wants_statistics else None
    output = _apply(o.input, o.weight, o.bias, o.scale, o.shift, norm, operands, run, kept)
    if not kept:
        return Results(output)
    (results,) = kept
    results.output = output
    return results


def normalize_backward(norm: Norm, operands: BackwardOperands, wanted: Sequence[bool]) -> FiveTensors:
    """The gradients of input, weight, bias, scale and shift, of checked operands; an empty tensor where unwanted.

    Differentiable in every tensor, mean and rstd included.
    """
    a, b, c, d, e = wanted
    return five_tensors(gradients(norm, operands, (a, b, c, d, e)), operands.input)


def gradients(norm: Norm, operands: BackwardOperands, wanted: Wanted) -> Gradients:
    """:func:`normalize_backward`, where an unwanted gradient may be None."""
    if torch.compiler.is_dynamo_compiling():  # compiled autograd traces the Function's backward
        return backward_op(norm, operands, wanted)
    if not straight_backward(operands) or (_grad_enabled() and _any_requires_grad(operands)):
        if transformed() or batched(operands):
            return _composite_backward(norm, operands, wanted)
        return backward_op(norm, operands, wanted)
    try:
        return dispatch.backward(norm, operands, wanted)
    except RuntimeError:  # a tensor of torch's older vmap turned out to have no memory
        if not batched(operands):
            raise
        return _composite_backward(norm, operands, wanted)


def _any_requires_grad(operands: BackwardOperands) -> bool:
    mean = operands.mean
    return (
        operands.grad_output.requires_grad
        or operands.rstd.requires_grad
        or (mean is not None and mean.requires_grad)
        or _requires_grad(operands)
    )


def _composite_backward(norm: Norm, operands: BackwardOperands, wanted: Sequence[bool]) -> Gradients:
    """The wanted gradients by torch's operators, differentiable in every tensor."""
    found = reference.backward(norm, operands)
    all_five = (found.input, found.weight, found.bias, found.scale, found.shift)
    return Gradients(*(gradient if want else None for gradient, want in zip(all_five, wanted, strict=True)))


# --- the ops at the Autograd key ---


def _below_autograd(norm: Norm, operands: Operands) -> Results:
    with below_autograd():
        return forward_op(norm, operands)


def _forward_autograd(*arguments: Any) -> FourTensors:
    operands = Operands(*arguments[:7])
    if transformed():
        return four_tensors(reference.forward(forward_norm(FORWARD, operands, *arguments[7:]), operands))
    family, groups_or_dims, channel_dim, eps, name, activation_parameter = arguments[7:]  # the kernel checks them
    norm = norm_of_op(family, groups_or_dims, channel_dim, eps, name, activation_parameter, operands.mean is None)
    if on_mesh(operands):
        return four_tensors(forward_on_mesh(norm, operands, norm.family not in ROW_FAMILIES))
    if not (_grad_enabled() and _requires_grad(operands)):
        return four_tensors(_below_autograd(norm, operands))
    return four_tensors(_differentiable(norm, operands, _below_autograd))


def _backward_autograd(*arguments: Any) -> FiveTensors:
    operands, wanted = BackwardOperands(*arguments[:8]), arguments[-1]
    if transformed() or (_grad_enabled() and _any_requires_grad(operands)):
        norm = backward_norm(BACKWARD, operands, *arguments[8:])
        return five_tensors(_composite_backward(norm, operands, wanted), operands.input)
    with below_autograd():
        found: FiveTensors = torch.ops.fusednorm.norm_backward.default(*arguments)
        return found


library.impl("norm_forward", _forward_autograd, "Autograd")
library.impl("norm_backward", _backward_autograd, "Autograd")
