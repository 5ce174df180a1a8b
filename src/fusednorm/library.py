"""The two ops: schemas, fakes, autograd, and the entries that Python code calls.

``torch.ops.fusednorm.norm_forward`` and ``norm_backward`` are what torch.compile, torch.export and every dispatch mode
see. A small eager call cannot afford them: of the 8 µs that torch's own group_norm and silu take on (1, 32, 8, 8), one
pass of thirteen arguments through the dispatcher costs 4.2, and a Python kernel at the Autograd key as much again. So
:func:`norm_forward` and :func:`norm_backward` below call the backend straight, or one autograd.Function, wherever
nothing that the dispatcher serves is in play (:func:`undisturbed`), and the op everywhere else. Both ways run the same
Function and the same backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from fusednorm import dispatch, operands
from fusednorm.arguments import activation_of
from fusednorm.backends import reference
from fusednorm.private.torch_names import (
    below_autograd,
    is_batched,
    is_zerotensor,
    short_apply,
    transformed,
    undisturbed,
)
from fusednorm.problem import Family, view_of
from fusednorm.tensors import compute_dtype, empty_output

Outputs = tuple[Tensor, Tensor, Tensor, Tensor]
Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]

# Bound once, because each name looked up in torch costs a call of 10 µs another 15 ns.
_grad_enabled = torch.is_grad_enabled

_library = torch.library.Library("fusednorm", "DEF")
# The strides of the outputs follow the input's, so a compiled graph must hand over the strides that the fake saw.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
_library.define(
    "norm_forward(Tensor input, Tensor? weight, Tensor? bias, Tensor? scale, Tensor? shift, Tensor? mean, Tensor? var, "
    "str family, int num_groups, int channel_dim, float eps, str activation, float parameter) "
    "-> (Tensor output, Tensor mean, Tensor rstd, Tensor var)",
    tags=_TAGS,
)
_library.define(
    "norm_backward(Tensor grad_output, Tensor input, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias, "
    "Tensor? scale, Tensor? shift, str family, int num_groups, int channel_dim, str activation, float parameter, "
    "bool training, bool[5] output_mask) "
    "-> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias, Tensor grad_scale, Tensor grad_shift)",
    tags=_TAGS,
)
_forward_op = torch.ops.fusednorm.norm_forward.default
_backward_op = torch.ops.fusednorm.norm_backward.default


def _forward_kernel(*arguments: Any) -> Outputs:
    operands.check_forward("fusednorm::norm_forward", *arguments)
    input = arguments[0]
    output, *statistics = dispatch.run_forward(*arguments)
    mean, rstd, var = (
        input.new_empty(0, dtype=compute_dtype(input.dtype)) if tensor is None else tensor for tensor in statistics
    )
    return output, mean, rstd, var


def _backward_kernel(*arguments: Any) -> Gradients:
    operands.check_backward("fusednorm::norm_backward", *arguments)
    return _filled(arguments[1], dispatch.run_backward(*arguments))


def _filled(input: Tensor, gradients: Sequence[Tensor | None]) -> Gradients:
    """Five tensors, as the op's schema wants them."""
    a, b, c, d, e = (input.new_empty(0) if gradient is None else gradient for gradient in gradients)
    return a, b, c, d, e


_library.impl("norm_forward", _forward_kernel, "CompositeExplicitAutograd")
_library.impl("norm_backward", _backward_kernel, "CompositeExplicitAutograd")


@torch.library.register_fake("fusednorm::norm_forward", lib=_library)
def _forward_fake(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    family: Family,
    num_groups: int,
    channel_dim: int,
    eps: float,
    activation: str,
    parameter: float,
) -> Outputs:
    operands.check_forward(
        "fusednorm::norm_forward", input, weight, bias, scale, shift, mean, var, family, num_groups, channel_dim, eps,
        activation, parameter,
    )  # fmt: skip
    view = view_of(family, input.shape, num_groups, channel_dim)
    dtype = compute_dtype(input.dtype)
    saved = (view.groups,) if family == "batch_norm" else (view.samples, view.groups)
    saved_mean = input.new_empty((0,) if family == "rms_norm" else saved, dtype=dtype)
    kept = family == "instance_norm" or (family == "batch_norm" and mean is None)
    saved_var = input.new_empty(saved if kept else (0,), dtype=dtype)
    output = empty_output(input, family, num_groups, channel_dim)
    return output, saved_mean, input.new_empty(saved, dtype=dtype), saved_var


@torch.library.register_fake("fusednorm::norm_backward", lib=_library)
def _backward_fake(
    grad_output: Tensor,
    input: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    family: Family,
    num_groups: int,
    channel_dim: int,
    activation: str,
    parameter: float,
    training: bool,
    output_mask: Sequence[bool],
) -> Gradients:
    operands.check_backward(
        "fusednorm::norm_backward", grad_output, input, mean, rstd, weight, bias, scale, shift, family, num_groups,
        channel_dim, activation, parameter, training, output_mask,
    )  # fmt: skip
    grad_input = empty_output(input, family, num_groups, channel_dim) if output_mask[0] else input.new_empty(0)
    grad_weight, grad_bias, grad_scale, grad_shift = (
        like.new_empty(like.shape) if like is not None and want else input.new_empty(0)
        for like, want in zip((weight, bias, scale, shift), output_mask[1:], strict=True)
    )
    return grad_input, grad_weight, grad_bias, grad_scale, grad_shift


class _Norm(torch.autograd.Function):
    """One Function for both ways. ``run`` computes, ``given`` holds what needs no gradient, ``statistics`` is filled.

    mean, rstd and var leave through that list: as outputs they would cost 3 µs of wrapping; they carry no gradient.
    Both ways save the same tensors, since a checkpoint may see the op in one pass and not in the other, and all that is
    kept passes through ``save_for_backward``, where its hooks see it. ``ctx.given`` therefore holds no tensor.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        scale: Tensor | None,
        shift: Tensor | None,
        run: Callable[..., tuple[Tensor, Any, Any, Any]],
        given: tuple[Any, ...],
        statistics: list[Tensor] | None,
    ) -> Tensor:
        output, mean, rstd, var = run(input, weight, bias, scale, shift, *given)
        ctx.training = given[0] is None
        ctx.given = given[2:]
        if given[2] == "rms_norm":
            mean = None  # empty where an op or the reference ran
        ctx.save_for_backward(input, weight, bias, scale, shift, mean, rstd)
        if statistics is not None:
            statistics[:] = mean, rstd, var
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, bias, scale, shift, mean, rstd = ctx.saved_tensors
        family, num_groups, channel_dim, eps, activation, parameter = ctx.given
        training = ctx.training
        if training and torch.is_grad_enabled():
            # create_graph: the saved statistics are constants to autograd, so the second derivative needs new ones.
            mean, rstd = reference.saved_statistics(input, family, num_groups, channel_dim, eps)
        mask = ctx.needs_input_grad[:5]
        grad_output = grad_outputs[0]
        direct = (
            not torch.compiler.is_dynamo_compiling()  # compiled autograd traces this
            and not _grad_enabled()
            and type(rstd) is Tensor
            and (mean is None or type(mean) is Tensor)
            and _readable(grad_output)
            and _straight(input, weight, bias, scale, shift)
        )
        run = _run_backward if direct else _gradients
        a, b, c, d, e = run(
            grad_output,
            input,
            mean,
            rstd,
            weight,
            bias,
            scale,
            shift,
            family,
            num_groups,
            channel_dim,
            activation,
            parameter,
            training,
            mask,
        )
        wants_a, wants_b, wants_c, wants_d, wants_e = mask
        return (
            a if wants_a else None,
            b if wants_b else None,
            c if wants_c else None,
            d if wants_d else None,
            e if wants_e else None,
            None,
            None,
            None,
        )


# Function.apply spends 2 of its 5 µs on torch.func, which never gets here, and on binding default arguments.
_apply = short_apply(_Norm)


def _differentiable(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    run: Callable[..., tuple[Tensor, Any, Any, Any]],
    given: tuple[Any, ...],
) -> Outputs:
    statistics: list[Tensor] = []
    output: Tensor = _apply(input, weight, bias, scale, shift, run, given, statistics)
    return output, *statistics  # type: ignore[return-value]


def _run_backward(*arguments: Any) -> Sequence[Tensor | None]:
    """dispatch.run_backward, and torch's ops where a tensor of torch's older vmap turns out to have no memory."""
    try:
        return dispatch.run_backward(*arguments)
    except RuntimeError:
        if not _batched(arguments[:8]):
            raise
        return _composite_backward(*arguments)


def _run_below_autograd(*arguments: Any) -> Outputs:
    with below_autograd():
        return _forward_op(*arguments)


def _forward_autograd(*arguments: Any) -> Outputs:
    if transformed():
        return _checked_composite_forward(*arguments)
    if not (torch.is_grad_enabled() and _any_requires_grad(arguments[:5])):
        return _run_below_autograd(*arguments)
    input, weight, bias, scale, shift, *given = arguments
    output, mean, rstd, var = _differentiable(input, weight, bias, scale, shift, _run_below_autograd, tuple(given))
    return output, rstd.new_empty(0) if mean is None else mean, rstd, var


def _backward_autograd(*arguments: Any) -> Gradients:
    if transformed() or (torch.is_grad_enabled() and _any_requires_grad(arguments[:8])):
        return _checked_composite_backward(*arguments)
    with below_autograd():
        return _backward_op(*arguments)


_library.impl("norm_forward", _forward_autograd, "Autograd")
_library.impl("norm_backward", _backward_autograd, "Autograd")


def _checked_composite_forward(*arguments: Any) -> Outputs:
    operands.check_forward("fusednorm::norm_forward", *arguments)
    return _composite_forward(*arguments)


def _checked_composite_backward(*arguments: Any) -> Gradients:
    operands.check_backward("fusednorm::norm_backward", *arguments)
    return _composite_backward(*arguments)


def _any_requires_grad(tensors: Sequence[Tensor | None]) -> bool:
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _composite_forward(*arguments: Any) -> Outputs:
    """norm_forward by differentiable torch ops."""
    *rest, activation, parameter = arguments
    forward: Callable[..., Outputs] = reference.forward
    return forward(*rest, activation_of(activation, parameter))


def _composite_backward(*arguments: Any) -> Gradients:
    """norm_backward by differentiable torch ops, with every tensor a free input."""
    *rest, activation, parameter, training, mask = arguments
    backward: Callable[..., reference.Gradients] = reference.backward
    gradients = backward(*rest, activation_of(activation, parameter), training)
    grad_input, grad_weight, grad_bias, grad_scale, grad_shift = (
        gradient if gradient is not None and want else rest[1].new_empty(0)
        for gradient, want in zip(gradients, mask, strict=True)
    )
    return grad_input, grad_weight, grad_bias, grad_scale, grad_shift


def _batched(tensors: Sequence[Tensor | None]) -> bool:
    """True with a tensor of the vmap behind ``is_grads_batched``, which no mode announces and which has no memory.

    Asked only where something is amiss, as it costs 0.1 us a tensor.
    """
    return any(tensor is not None and is_batched(tensor) for tensor in tensors)


def _plain(tensor: Tensor) -> bool:
    """True for a tensor that is no subclass and whose memory is what it seems: torch.conj(c).imag is negated lazily."""
    return type(tensor) is Parameter or (type(tensor) is Tensor and not tensor.is_neg())


def _readable(gradient: Tensor) -> bool:
    """True for a plain tensor with memory, which what some derivatives of torch hand down has not."""
    return _plain(gradient) and not is_zerotensor(gradient)


def _straight(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, scale: Tensor | None, shift: Tensor | None
) -> bool:
    """True where these may go straight to the backend."""
    return (
        _plain(input)
        and (weight is None or _plain(weight))
        and (bias is None or _plain(bias))
        and (scale is None or _plain(scale))
        and (shift is None or _plain(shift))
        and undisturbed(input)
    )


def norm_forward(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    family: Family,
    num_groups: int,
    channel_dim: int,
    eps: float,
    activation: str,
    parameter: float,
    statistics: bool = True,
) -> tuple[Tensor, Any, Any, Any]:
    """output, mean, rstd and var of arguments that have been checked; differentiable, and short in eager mode.

    What a family does not have is None or empty; without ``statistics`` all but the output may be.
    """
    given = (mean, var, family, num_groups, channel_dim, eps, activation, parameter)
    if torch.compiler.is_dynamo_compiling():
        return _forward_op(input, weight, bias, scale, shift, *given)
    direct = _straight(input, weight, bias, scale, shift)
    if not direct or (mean is not None and not (_plain(mean) and var is not None and _plain(var))):
        tensors = (input, weight, bias, scale, shift)
        run = _composite_forward if transformed() or _batched(tensors) else _forward_op
        return run(*tensors, *given)
    try:
        if _grad_enabled() and (
            input.requires_grad
            or (weight is not None and weight.requires_grad)
            or (bias is not None and bias.requires_grad)
            or (scale is not None and scale.requires_grad)
            or (shift is not None and shift.requires_grad)
        ):
            if not statistics:
                output = _apply(input, weight, bias, scale, shift, dispatch.run_forward, given, None)
                return output, None, None, None
            return _differentiable(input, weight, bias, scale, shift, dispatch.run_forward, given)
        return dispatch.run_forward(input, weight, bias, scale, shift, *given, statistics=statistics)
    except RuntimeError:
        if not _batched((input, weight, bias, scale, shift, mean, var)):
            raise
        return _composite_forward(input, weight, bias, scale, shift, *given)


def norm_backward(
    grad_output: Tensor,
    input: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    family: Family,
    num_groups: int,
    channel_dim: int,
    activation: str,
    parameter: float,
    training: bool,
    output_mask: Sequence[bool],
) -> Gradients:
    """The gradients of input, weight, bias, scale and shift, as checked arguments; an empty tensor where unwanted.

    Differentiable in every tensor, mean and rstd included.
    """
    arguments = (family, num_groups, channel_dim, activation, parameter, training, output_mask)
    return _filled(input, _gradients(grad_output, input, mean, rstd, weight, bias, scale, shift, *arguments))


def _gradients(
    grad_output: Tensor,
    input: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    *given: Any,
) -> Sequence[Tensor | None]:
    """norm_backward, where an unwanted gradient may be None."""
    if mean is None:
        mean = rstd.new_empty(0)
    tensors = (grad_output, input, mean, rstd, weight, bias, scale, shift)
    arguments = (*tensors, *given)
    if torch.compiler.is_dynamo_compiling():
        gradients: Gradients = _backward_op(*arguments)
        return gradients
    if (
        all(tensor is None or _plain(tensor) for tensor in tensors)
        and undisturbed(input)
        and _readable(grad_output)
        and not (torch.is_grad_enabled() and _any_requires_grad(tensors))
    ):
        return _run_backward(*arguments)
    if transformed() or _batched(tensors):
        return _composite_backward(*arguments)
    gradients = _backward_op(*arguments)
    return gradients
