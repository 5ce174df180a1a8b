"""The reference: plain torch, differentiable, on the logical (N, G, D, S) view. It defines correctness.

With K elements under one statistic, A = weight (1 + scale) and B = bias (1 + scale) + shift:

    forward   xhat = (x - mean) rstd          z = A xhat + B          y = phi(z)
    backward  dz = dy phi'(z)                 p = sum_S dz            q = sum_S dz xhat
              P = sum A p, Q = sum A q over the channels (and samples) under one statistic
              dx = rstd (A dz - (P + xhat Q) / K)

RMS: mean = 0 and P is left out. Given statistics (batch_norm inference) are constants: dx = rstd A dz. The compute
dtype is fp32, fp64 for fp64 input; ``compute_dtype=torch.float64`` makes the judge that the other backends are held to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import pi, sqrt
from typing import Any

import torch
from torch import Tensor

from fusednorm.activations import FORMULAS, Activation, bind
from fusednorm.dtypes import compute_dtype as default_compute_dtype
from fusednorm.problem import Family, Problem, View, view_of
from fusednorm.strides import empty_output

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def _where(condition: Tensor, value: Tensor | float, other: Tensor | float) -> Tensor:
    if not isinstance(value, Tensor) and not isinstance(other, Tensor):
        # torch.where makes fp32 of two Python numbers, which would round a slope of 0.01 under an fp64 z.
        value = torch.full_like(condition, value, dtype=torch.float64)
    return torch.where(condition, value, other)


PRIMITIVES: dict[str, Callable[..., Any]] = {
    "const": lambda value: value,
    "where": _where,
    "sigmoid": torch.sigmoid,
    "sigmoid_slope": lambda z: torch.sigmoid(z) * torch.sigmoid(-z),
    "tanh": torch.tanh,
    "normal_cdf": lambda z: 0.5 * torch.erfc(z * -sqrt(0.5)),
    "normal_pdf": lambda z: torch.exp(-0.5 * z * z) * (1.0 / sqrt(2.0 * pi)),
}
VALUES = {name: bind(formula.value, PRIMITIVES) for name, formula in FORMULAS.items()}
DERIVATIVES = {name: bind(formula.derivative, PRIMITIVES) for name, formula in FORMULAS.items()}


def to_view(tensor: Tensor, family: Family, view: View, channel_dim: int) -> Tensor:
    """A tensor of the input's shape as (N, G, D, S)."""
    if channel_dim == -1 and family not in ("layer_norm", "rms_norm"):
        tensor = tensor.movedim(-1, 1)
    return tensor.reshape(view.samples, view.groups, view.group_channels, view.spatial)


def from_view(tensor: Tensor, family: Family, shape: Sequence[int], channel_dim: int) -> Tensor:
    """The inverse of :func:`to_view`."""
    if channel_dim == -1 and family not in ("layer_norm", "rms_norm"):
        return tensor.reshape(shape[0], shape[-1], *shape[1:-1]).movedim(1, -1)
    return tensor.reshape(shape)


def statistics(x: Tensor, family: Family, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """mean, biased variance and rstd of a view, each (N or 1, G, 1, 1); a mean of 0 for rms_norm.

    Two passes, the second over centred elements: E[x²] - E[x]² loses everything where |mean| is far above std.
    """
    axes = (0, 2, 3) if family == "batch_norm" else (2, 3)
    if family == "rms_norm":
        var = x.square().mean(axes, keepdim=True)
        return torch.zeros_like(var), var, (var + eps).rsqrt()
    mean = x.mean(axes, keepdim=True)
    var = (x - mean).square().mean(axes, keepdim=True)
    return mean, var, (var + eps).rsqrt()


def _per_statistic(tensor: Tensor, family: Family, view: View, dtype: torch.dtype) -> Tensor:
    """A mean or rstd of [N, G] (batch_norm: [C]) as (N or 1, G, 1, 1)."""
    return tensor.to(dtype).reshape(1 if family == "batch_norm" else view.samples, view.groups, 1, 1)


def _per_channel(tensor: Tensor, samples: int, view: View, dtype: torch.dtype) -> Tensor:
    """A parameter of C elements (samples = 1) or a modulation of (N, C) as (1 or N, G, D, 1)."""
    return tensor.to(dtype).reshape(samples, view.groups, view.group_channels, 1)


def _factors(
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    view: View,
    dtype: torch.dtype,
) -> tuple[Tensor | float, Tensor | float, Tensor | float, Tensor | float]:
    """gamma, beta, 1 + s and t, broadcastable against the view; 1, 0, 1 and 0 where absent."""
    gamma = 1.0 if weight is None else _per_channel(weight, 1, view, dtype)
    beta = 0.0 if bias is None else _per_channel(bias, 1, view, dtype)
    factor = 1.0 if scale is None else 1.0 + _per_channel(scale, view.samples, view, dtype)
    offset = 0.0 if shift is None else _per_channel(shift, view.samples, view, dtype)
    return gamma, beta, factor, offset


def saved_statistics(
    input: Tensor, family: Family, num_groups: int, channel_dim: int, eps: float
) -> tuple[Tensor, Tensor]:
    """The mean and rstd that :func:`forward` returns, as differentiable functions of the input."""
    view = view_of(family, input.shape, num_groups, channel_dim)
    x = to_view(input, family, view, channel_dim).to(default_compute_dtype(input.dtype))
    mean, _, rstd = statistics(x, family, eps)
    return _as_saved(mean, rstd, family, view)


def _as_saved(mean: Tensor, rstd: Tensor, family: Family, view: View) -> tuple[Tensor, Tensor]:
    shape = (view.groups,) if family == "batch_norm" else (view.samples, view.groups)
    return mean.new_empty(0) if family == "rms_norm" else mean.reshape(shape), rstd.reshape(shape)


def forward(
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
    activation: Activation | None,
    *,
    compute_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """output, mean, rstd and var (biased; empty unless the family keeps running statistics).

    ``mean`` and ``var`` given, both [C], are the statistics of batch_norm in inference. The output has the input's
    dtype, or ``compute_dtype`` where that is given.
    """
    dtype = compute_dtype or default_compute_dtype(input.dtype)
    view = view_of(family, input.shape, num_groups, channel_dim)
    x = to_view(input, family, view, channel_dim).to(dtype)
    if mean is None or var is None:
        mean4, var4, rstd4 = statistics(x, family, eps)
    else:
        mean4 = _per_statistic(mean, family, view, dtype)
        var4 = _per_statistic(var, family, view, dtype)
        rstd4 = (var4 + eps).rsqrt()
    gamma, beta, factor, offset = _factors(weight, bias, scale, shift, view, dtype)
    z = (x - mean4) * rstd4 * (gamma * factor) + (beta * factor + offset)
    if activation is not None:
        z = VALUES[activation.name](z, activation.parameter)
    output = from_view(z, family, input.shape, channel_dim)
    saved_mean, saved_rstd = _as_saved(mean4, rstd4, family, view)
    if mean is not None:
        saved_mean = saved_mean.clone()  # an op's output may not share memory with its argument
    if mean is None and family == "batch_norm":
        saved_var = var4.reshape(view.channels)
    elif family == "instance_norm":
        saved_var = var4.reshape(view.samples, view.channels)
    else:
        saved_var = x.new_empty(0)
    return output if compute_dtype else output.to(input.dtype), saved_mean, saved_rstd, saved_var


def backward(
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
    activation: Activation | None,
    training: bool,
    *,
    compute_dtype: torch.dtype | None = None,
) -> Gradients:
    """The gradients of input, weight, bias, scale and shift; None for a parameter that is absent.

    ``mean`` and ``rstd`` are free inputs. ``training=False`` takes them as constants of the forward.
    """
    dtype = compute_dtype or default_compute_dtype(input.dtype)
    view = view_of(family, input.shape, num_groups, channel_dim)
    dy = to_view(grad_output, family, view, channel_dim).to(dtype)
    xhat = to_view(input, family, view, channel_dim).to(dtype)
    if family != "rms_norm":
        xhat = xhat - _per_statistic(mean, family, view, dtype)
    rstd4 = _per_statistic(rstd, family, view, dtype)
    xhat = xhat * rstd4
    gamma, beta, factor, offset = _factors(weight, bias, scale, shift, view, dtype)
    affine = gamma * factor
    dz = dy
    if activation is not None:
        z = xhat * affine + (beta * factor + offset)
        dz = dy * DERIVATIVES[activation.name](z, activation.parameter).to(dtype)
    p = dz.sum(3, keepdim=True)
    q = (dz * xhat).sum(3, keepdim=True)

    grad_input = affine * dz
    if training:
        axes = (0, 2) if family == "batch_norm" else (2,)
        count = max(view.group_channels * view.spatial * (view.samples if family == "batch_norm" else 1), 1)
        centre = xhat * (affine * q).sum(axes, keepdim=True)
        if family != "rms_norm":
            centre = centre + (affine * p).sum(axes, keepdim=True)
        grad_input = grad_input - centre / count
    grad_input = from_view(rstd4 * grad_input, family, input.shape, channel_dim)

    def finish(gradient: Tensor, like: Tensor) -> Tensor:
        return gradient.reshape(like.shape).to(compute_dtype or like.dtype)

    return (
        grad_input if compute_dtype else grad_input.to(input.dtype),
        None if weight is None else finish((factor * q).sum(0), weight),
        None if bias is None else finish((factor * p).sum(0), bias),
        None if scale is None else finish(gamma * q + beta * p, scale),
        None if shift is None else finish(p, shift),
    )


def run_forward(
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
    activation: Activation | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """:func:`forward` as an instance: the output has the strides of ``empty_output``, nothing aliases an argument."""
    output, saved_mean, saved_rstd, saved_var = forward(
        input, weight, bias, scale, shift, mean, var, family, num_groups, channel_dim, eps, activation
    )
    return empty_output(input, family, num_groups, channel_dim).copy_(output), saved_mean, saved_rstd, saved_var


def run_backward(
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
    activation: Activation | None,
    training: bool,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """:func:`backward` as an instance: the strides of ``empty_output``, and empty tensors for unwanted gradients."""
    gradients = backward(
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
        training,
    )
    wanted = [
        gradient if gradient is not None and want else input.new_empty(0)
        for gradient, want in zip(gradients, output_mask, strict=True)
    ]
    if output_mask[0]:
        wanted[0] = empty_output(input, family, num_groups, channel_dim).copy_(wanted[0])
    grad_input, grad_weight, grad_bias, grad_scale, grad_shift = (
        wanted[0],
        *(gradient.contiguous() for gradient in wanted[1:]),
    )
    return grad_input, grad_weight, grad_bias, grad_scale, grad_shift


class ReferenceInstance:
    """The reference as an instance: any problem on any device."""

    name = "reference"
    config = None

    def supports(self, problem: Problem) -> str | None:
        return None

    def plan(self, problem: Problem) -> Callable[..., tuple[Tensor, ...]]:
        family, num_groups, channel_dim = problem.family, problem.num_groups, problem.channel_dim

        def plan_forward(
            input: Tensor,
            weight: Tensor | None,
            bias: Tensor | None,
            scale: Tensor | None,
            shift: Tensor | None,
            mean: Tensor | None,
            var: Tensor | None,
            eps: float,
            out: Tensor | None = None,
            statistics: bool = True,
            saved_in: tuple[Tensor | None, Tensor | None] = (None, None),
        ) -> tuple[Tensor, ...]:
            output, *saved = run_forward(
                input, weight, bias, scale, shift, mean, var, family, num_groups, channel_dim, eps, problem.activation
            )
            for index, given in enumerate(saved_in):
                if given is not None:
                    saved[index] = given.copy_(saved[index].view(given.shape))
            return (output if out is None else out.copy_(output)), *saved

        def plan_backward(
            grad_output: Tensor,
            input: Tensor,
            mean: Tensor,
            rstd: Tensor,
            weight: Tensor | None,
            bias: Tensor | None,
            scale: Tensor | None,
            shift: Tensor | None,
            output_mask: Sequence[bool],
            out: Tensor | None = None,
        ) -> tuple[Tensor, ...]:
            grad_input, *grads = run_backward(
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
                problem.activation,
                problem.training,
                output_mask,
            )
            return (grad_input if out is None or not output_mask[0] else out.copy_(grad_input)), *grads

        return plan_backward if problem.backward else plan_forward


INSTANCE = ReferenceInstance()
