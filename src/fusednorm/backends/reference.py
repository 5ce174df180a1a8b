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

from fusednorm.activations import FORMULAS, bind
from fusednorm.dtypes import compute_dtype as default_compute_dtype
from fusednorm.formats import LEAST_AMAX, Quantized
from fusednorm.norm import Norm
from fusednorm.operands import NOTHING_YET, BackwardOperands, Gradients, Operands, Results, Sums, Wanted
from fusednorm.problem import Problem, View, scale_shape, statistics_shape, view_of
from fusednorm.strides import empty_output


def _where(condition: Tensor, value: Tensor | float, other: Tensor | float) -> Tensor:
    if not isinstance(value, Tensor) and not isinstance(other, Tensor):
        # torch.where makes fp32 of two Python numbers, which would round a slope of 0.01 under an fp64 z.
        value = torch.full_like(condition, value, dtype=torch.float64)
    return torch.where(condition, value, other)


PRIMITIVES: dict[str, Callable[..., Any]] = {
    "const": lambda value: value,
    "where": _where,
    "fma": lambda a, b, c: a * b + c,
    "sigmoid": torch.sigmoid,
    "sigmoid_slope": lambda z: torch.sigmoid(z) * torch.sigmoid(-z),
    "gate": torch.sigmoid,
    "gate_slope": lambda z, gate: gate * torch.sigmoid(-z),
    "tanh": torch.tanh,
    "normal_cdf": lambda z: 0.5 * torch.erfc(z * -sqrt(0.5)),
    "normal_pdf": lambda z: torch.exp(-0.5 * z * z) * (1.0 / sqrt(2.0 * pi)),
}
VALUES = {name: bind(formula.value, PRIMITIVES) for name, formula in FORMULAS.items()}
DERIVATIVES = {name: bind(formula.derivative, PRIMITIVES) for name, formula in FORMULAS.items()}


def seen(norm: Norm, shape: Sequence[int]) -> View:
    """The norm's view of a shape; where each position has statistics of its own, that of rows, which they are."""
    view = view_of(norm, shape)
    return View(view.samples * view.spatial, 1, view.channels, 1) if norm.per_position else view


def to_view(norm: Norm, tensor: Tensor, view: View) -> Tensor:
    """A tensor of the input's shape as (N, G, D, S)."""
    if norm.per_position:
        tensor = tensor.movedim(norm.channel_dim, -1)
    elif norm.channel_dim == -1 and not norm.row_family:
        tensor = tensor.movedim(-1, 1)
    return tensor.reshape(view.samples, view.groups, view.group_channels, view.spatial)


def from_view(norm: Norm, tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """The inverse of :func:`to_view`."""
    if norm.per_position and norm.channel_dim == 1:
        return tensor.reshape(shape[0], *shape[2:], shape[1]).movedim(-1, 1)
    if norm.per_position:
        return tensor.reshape(shape)
    if norm.channel_dim == -1 and not norm.row_family:
        return tensor.reshape(shape[0], shape[-1], *shape[1:-1]).movedim(1, -1)
    return tensor.reshape(shape)


def own_statistics(norm: Norm, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """mean, biased variance and rstd of a view, each (N or 1, G, 1, 1); a mean of 0 for rms_norm.

    Two passes, the second over centred elements: E[x²] - E[x]² loses everything where |mean| is far above std.
    """
    axes = (0, 2, 3) if norm.per_batch else (2, 3)
    if not norm.has_mean:
        var = x.square().mean(axes, keepdim=True)
        return torch.zeros_like(var), var, (var + norm.eps).rsqrt()
    mean = x.mean(axes, keepdim=True)
    # The mean of the deviations corrects the rounding of the mean: the mean of equal numbers is then that number.
    mean = mean + (x - mean).mean(axes, keepdim=True).nan_to_num(0.0, 0.0, 0.0)
    var = (x - mean).square().mean(axes, keepdim=True)
    return mean, var, (var + norm.eps).rsqrt()


def _per_statistic(norm: Norm, tensor: Tensor, view: View, dtype: torch.dtype) -> Tensor:
    """A mean or rstd of [N, G] (batch_norm: [C]) as (N or 1, G, 1, 1)."""
    return tensor.to(dtype).reshape(1 if norm.per_batch else view.samples, view.groups, 1, 1)


def _per_channel(tensor: Tensor, view: View, dtype: torch.dtype) -> Tensor:
    """A parameter of C elements as (1, G, D, 1)."""
    return tensor.to(dtype).reshape(1, view.groups, view.group_channels, 1)


def _per_sample(tensor: Tensor, view: View, dtype: torch.dtype) -> Tensor:
    """A modulation of (N, C) as (N, G, D, 1), where positions are rows with a copy for each row."""
    samples = tensor.shape[0]
    rows = view.samples // samples if samples else 1
    repeated = tensor.to(dtype).unsqueeze(1).expand(samples, rows, tensor.shape[1])
    return repeated.reshape(view.samples, view.groups, view.group_channels, 1)


Factor = Tensor | float


def _factors(
    operands: Operands | BackwardOperands, view: View, dtype: torch.dtype
) -> tuple[Factor, Factor, Factor, Factor]:
    """gamma, beta, 1 + s and t, broadcastable against the view; 1, 0, 1 and 0 where absent."""
    weight, bias, scale, shift = operands.weight, operands.bias, operands.scale, operands.shift
    gamma = 1.0 if weight is None else _per_channel(weight, view, dtype)
    beta = 0.0 if bias is None else _per_channel(bias, view, dtype)
    factor = 1.0 if scale is None else 1.0 + _per_sample(scale, view, dtype)
    offset = 0.0 if shift is None else _per_sample(shift, view, dtype)
    return gamma, beta, factor, offset


def saved_statistics(norm: Norm, input: Tensor) -> tuple[Tensor | None, Tensor]:
    """The mean and rstd that :func:`forward` returns, as differentiable functions of the input."""
    view = seen(norm, input.shape)
    mean, _, rstd = own_statistics(norm, to_view(norm, input, view).to(default_compute_dtype(input.dtype)))
    shape = statistics_shape(norm, view_of(norm, input.shape))
    return mean.reshape(shape) if norm.has_mean else None, rstd.reshape(shape)


def forward(norm: Norm, operands: Operands, *, compute_dtype: torch.dtype | None = None) -> Results:
    """The results, the output in the input's dtype, or in ``compute_dtype`` where that is given.

    No result shares memory with an operand.
    """
    input = operands.input
    dtype = compute_dtype or default_compute_dtype(input.dtype)
    view = seen(norm, input.shape)
    x = to_view(norm, input, view).to(dtype)
    if operands.mean is None or operands.var is None:
        mean, var, rstd = own_statistics(norm, x)
    else:
        mean = _per_statistic(norm, operands.mean, view, dtype).clone()
        var = _per_statistic(norm, operands.var, view, dtype)
        rstd = (var + norm.eps).rsqrt()
    gamma, beta, factor, offset = _factors(operands, view, dtype)
    z = (x - mean) * rstd * (gamma * factor) + (beta * factor + offset)
    if norm.activation is not None:
        z = VALUES[norm.activation.name](z, norm.activation.parameter)
    output = from_view(norm, z, input.shape)
    shape = statistics_shape(norm, view_of(norm, input.shape))
    return Results(
        output if compute_dtype else output.to(input.dtype),
        mean.reshape(shape) if norm.has_mean else None,
        rstd.reshape(shape),
        var.reshape(shape) if norm.has_variance else None,
    )


def saved_output(norm: Norm, operands: BackwardOperands) -> Tensor:
    """z by the mean and rstd that a forward has saved, in the input's dtype, as a function of all other operands."""
    input = operands.input
    dtype, view = default_compute_dtype(input.dtype), seen(norm, input.shape)
    x = to_view(norm, input, view).to(dtype)
    if operands.mean is not None:
        x = x - _per_statistic(norm, operands.mean, view, dtype)
    gamma, beta, factor, offset = _factors(operands, view, dtype)
    z = x * _per_statistic(norm, operands.rstd, view, dtype) * (gamma * factor) + (beta * factor + offset)
    return from_view(norm, z, input.shape).to(input.dtype)


def quantized_forward(norm: Norm, operands: Operands, quantized: Quantized, out_scale: Tensor | None) -> Results:
    """q = saturate(round(y (1 / scale))) of a float32 y, with the scale that is given or with those of the rows."""
    dtype = default_compute_dtype(operands.input.dtype)
    return quantized_output(norm, forward(norm, operands, compute_dtype=dtype).output.float(), quantized, out_scale)


def quantized_output(norm: Norm, y: Tensor, quantized: Quantized, out_scale: Tensor | None) -> Results:
    """:func:`quantized_forward` of a float32 y."""
    if out_scale is not None:
        return Results(codes(y * out_scale.float().reshape(()).reciprocal(), quantized))
    scales = row_scales(norm, y, quantized)
    return Results(codes(y * scales.reciprocal(), quantized), scale=scales)


def row_scales(norm: Norm, y: Tensor, quantized: Quantized) -> Tensor:
    """amax / largest of each row of a float32 y; NaN for a row with a NaN."""
    shape = scale_shape(norm, y.shape)
    if y.numel() == 0:
        return y.new_full(shape, LEAST_AMAX / quantized.format.largest)
    amax = y.abs().amax(tuple(range(-(norm.num_dims or 1), 0)), keepdim=True)
    return amax.clamp(min=LEAST_AMAX) / quantized.format.largest


def codes(scaled: Tensor, quantized: Quantized) -> Tensor:
    """Scaled numbers in the dtype of the output: a float8 keeps NaN, of which int8 makes 0."""
    form, dtype = quantized.format, getattr(torch, quantized.dtype)
    if not form.is_float:
        scaled = scaled.round().nan_to_num(0.0)
    held: Tensor = scaled.clamp(-form.most_negative, form.largest).to(dtype)
    return held


def backward(norm: Norm, operands: BackwardOperands, *, compute_dtype: torch.dtype | None = None) -> Gradients:
    """The gradients of input, weight, bias, scale and shift; None for a parameter that is absent.

    ``mean`` and ``rstd`` are free inputs, and constants where the norm is not in training.
    """
    input = operands.input
    dtype = compute_dtype or default_compute_dtype(input.dtype)
    view = seen(norm, input.shape)
    dy = to_view(norm, operands.grad_output, view).to(dtype)
    xhat = to_view(norm, input, view).to(dtype)
    if norm.has_mean:
        assert operands.mean is not None
        xhat = xhat - _per_statistic(norm, operands.mean, view, dtype)
    rstd = _per_statistic(norm, operands.rstd, view, dtype)
    xhat = xhat * rstd
    gamma, beta, factor, offset = _factors(operands, view, dtype)
    if view.spatial == 0:  # a sum of no terms is 0, also where a parameter is NaN
        gamma, beta, factor = 1.0, 0.0, 1.0
    affine = gamma * factor
    dz = dy
    if norm.activation is not None:
        z = xhat * affine + (beta * factor + offset)
        dz = dy * DERIVATIVES[norm.activation.name](z, norm.activation.parameter).to(dtype)
    p = dz.sum(3, keepdim=True)
    q = (dz * xhat).sum(3, keepdim=True)

    grad_input = affine * dz
    if norm.training:
        axes = (0, 2) if norm.per_batch else (2,)
        count = max(view.group_channels * view.spatial * (view.samples if norm.per_batch else 1), 1)
        centre = xhat * (affine * q).sum(axes, keepdim=True)
        if norm.has_mean:
            centre = centre + (affine * p).sum(axes, keepdim=True)
        grad_input = grad_input - centre / count
    grad_input = from_view(norm, rstd * grad_input, input.shape)

    def finish(gradient: Tensor, like: Tensor | None) -> Tensor | None:
        return None if like is None else gradient.reshape(like.shape).to(compute_dtype or like.dtype)

    def per_sample(gradient: Tensor) -> Tensor:
        if not norm.per_position:
            return gradient
        seen = view_of(norm, input.shape)
        return gradient.reshape(seen.samples, seen.spatial, seen.channels).sum(1)

    return Gradients(
        grad_input if compute_dtype else grad_input.to(input.dtype),
        finish((factor * q).sum(0), operands.weight),
        finish((factor * p).sum(0), operands.bias),
        finish(per_sample(gamma * q + beta * p), operands.scale),
        finish(per_sample(p), operands.shift),
    )


class ReferenceForward:
    """:func:`forward` as a plan: the output has the strides of ``empty_output``."""

    def __init__(self, problem: Problem) -> None:
        self.norm = problem.called

    def __call__(
        self,
        operands: Operands,
        statistics: bool = True,
        out: Tensor | None = None,
        mean_out: Tensor | None = None,
        rstd_out: Tensor | None = None,
    ) -> Results:
        results = forward(self.norm, operands)
        results.output = (empty_output(self.norm, operands.input) if out is None else out).copy_(results.output)
        if mean_out is not None and results.mean is not None:
            results.mean = mean_out.copy_(results.mean.view(mean_out.shape))
        if rstd_out is not None and results.rstd is not None:
            results.rstd = rstd_out.copy_(results.rstd.view(rstd_out.shape))
        return results


class ReferenceQuantized:
    """:func:`quantized_forward` as a plan."""

    def __init__(self, problem: Problem) -> None:
        assert problem.quantized is not None
        self.norm, self.quantized = problem.called, problem.quantized

    def __call__(
        self, operands: Operands, sums: Sums | None, out_scale: Tensor | None, into: Results | None = None
    ) -> Results:
        results, into = quantized_forward(self.norm, operands, self.quantized, out_scale), into or NOTHING_YET
        output = into.output
        if output is None:
            output = empty_output(self.norm, operands.input, results.output.dtype)
        results.output = output.copy_(results.output)
        if results.scale is not None and into.scale is not None:
            results.scale = into.scale.copy_(results.scale)
        return results


class ReferenceBackward:
    """:func:`backward` as a plan: the strides of ``empty_output``, contiguous gradients of parameters."""

    def __init__(self, problem: Problem) -> None:
        self.norm = problem.called

    def __call__(self, operands: BackwardOperands, wanted: Wanted, out: Tensor | None = None) -> Gradients:
        found = backward(self.norm, operands)
        grad_input = None
        if wanted[0] and found.input is not None:
            grad_input = (empty_output(self.norm, operands.input) if out is None else out).copy_(found.input)
        weight, bias, scale, shift = (
            gradient.contiguous() if want and gradient is not None else None
            for gradient, want in zip((found.weight, found.bias, found.scale, found.shift), wanted[1:], strict=True)
        )
        return Gradients(grad_input, weight, bias, scale, shift)


class ReferenceInstance:
    """The reference as an instance: any problem on any device."""

    name = "reference"

    def supports(self, problem: Problem) -> str | None:
        return None if problem.added is None else "adds nothing before or behind the norm"

    def configs(self, problem: Problem) -> Sequence[None]:
        return (None,)

    def plan(self, problem: Problem, config: None = None) -> ReferenceForward | ReferenceQuantized | ReferenceBackward:
        if problem.quantized is not None:
            return ReferenceQuantized(problem)
        return ReferenceBackward(problem) if problem.backward else ReferenceForward(problem)


INSTANCE = ReferenceInstance()
