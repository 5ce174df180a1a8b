"""The op of exported programs by torch's own functions, where fusednorm is not installed or another runtime computes.

A program of ``torch.export`` holds ``fusednorm::norm_forward``. :func:`decompositions` says what that is in torch's
group_norm, instance_norm, layer_norm, rms_norm and batch_norm and in its activations. ``torch.onnx.export`` finds the
same decomposition by itself, and makes ONNX's standard nodes of torch's functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusednorm.backends import reference
from fusednorm.dtypes import compute_dtype
from fusednorm.equivalents import TORCH_FUNCTIONS
from fusednorm.library import FORWARD, forward_fake
from fusednorm.norm import Norm
from fusednorm.op_arguments import forward_norm
from fusednorm.op_results import FourTensors, four_tensors
from fusednorm.operands import Operands, Results
from fusednorm.private.inductor_names import batch_norm_of_given
from fusednorm.private.torch_names import offer_decomposition
from fusednorm.problem import statistics_shape, view_of
from fusednorm.quantization import QUANTIZED, TwoTensors, checked, quantized_fake, two_tensors
from fusednorm.strides import output_order, reordered

_OP = torch.ops.fusednorm.norm_forward.default


def decompositions() -> dict[Any, Callable[..., Any]]:
    """What ``ExportedProgram.run_decompositions`` needs to leave no op of fusednorm in a program.

    y = phi(z), z = x̂ weight (1 + scale) + bias (1 + scale) + shift, by torch's norm of the family, a product and a sum,
    and torch's activation. 16-bit tensors are rounded between these, and statistics are float32. Where dtypes differ,
    and for the own statistics of instance_norm and batch_norm, all of it is computed in float32 and rounded once.

    A program then runs in a process without fusednorm, at the speed of torch's functions. The table holds two ops, the
    second for quantized outputs, which are computed in float32; to decompose torch's own ops too, put it into
    ``torch.export.default_decompositions()`` by ``update``.

    >>> import fusednorm, torch
    >>> model = torch.nn.Sequential(fusednorm.nn.GroupNorm(4, 8, activation="silu")).eval()
    >>> program = torch.export.export(model, (torch.randn(2, 8, 4, 4),))
    >>> plain = program.run_decompositions(fusednorm.decompositions())
    >>> [node.target.name() for node in plain.graph.nodes if node.op == "call_function"]
    ['aten::group_norm', 'aten::silu']
    """
    return {_OP: _decomposed, QUANTIZED: _decomposed_quantized}


def _decomposed(*arguments: Any) -> FourTensors:
    """The results of norm_forward, with its dtypes, shapes and order of memory."""
    operands = Operands(*arguments[:7])
    norm = forward_norm(FORWARD, operands, *arguments[7:])
    results = _statistics(norm, operands)
    results.output = reordered(_output(norm, operands, results), output_order(norm, operands.input))
    # As the op's own, the statistics beside the output have no gradients: running statistics are moved by them.
    beside = (None if each is None else each.detach() for each in (results.mean, results.rstd, results.var))
    return four_tensors(Results(results.output, *beside))


def _decomposed_quantized(*arguments: Any) -> TwoTensors:
    """The results of norm_quantized, from a norm in float32, or in the input's float64."""
    norm, operands, quantized, out_scale = checked(arguments)
    dtype = compute_dtype(operands.input.dtype)
    wide = Operands(*(None if tensor is None else tensor.to(dtype) for tensor in operands.tensors()))  # type: ignore[arg-type]
    y = reordered(_output(norm, wide, Results(wide.input)).float(), output_order(norm, operands.input))
    return two_tensors(reference.quantized_output(norm, y, quantized, out_scale))


def _statistics(norm: Norm, operands: Operands) -> Results:
    """Everything but the output; what a program does not use of it, is left out of the graph."""
    input, dtype = operands.input, compute_dtype(operands.input.dtype)
    view = reference.seen(norm, input.shape)
    if operands.mean is None or operands.var is None:
        x = reference.to_view(norm, input, view).to(dtype)
        axes = (0, 2, 3) if norm.per_batch else (2, 3)
        var, mean = torch.var_mean(x, axes, correction=0) if norm.has_mean else (x.square().mean(axes), None)
    else:
        mean, var = operands.mean.to(dtype, copy=True), operands.var.to(dtype)
    shape = statistics_shape(norm, view_of(norm, input.shape))
    return Results(
        input,
        None if mean is None else mean.reshape(shape),
        (var + norm.eps).rsqrt().reshape(shape),
        var.reshape(shape) if norm.has_variance else None,
    )


def _work_dtype(norm: Norm, operands: Operands) -> torch.dtype:
    """The input's dtype where all operands have it and torch's function computes statistics in float32, in every
    runtime: ONNX says so of the nodes of group_norm, layer_norm and rms_norm alone."""
    dtypes = {tensor.dtype for tensor in operands.tensors() if tensor is not None}
    own = norm.training and norm.family in ("instance_norm", "batch_norm")
    return compute_dtype(operands.input.dtype) if own or len(dtypes) > 1 else operands.input.dtype


def _output(norm: Norm, operands: Operands, statistics: Results) -> Tensor:
    dtype = _work_dtype(norm, operands)
    x, weight, bias, scale, shift, mean, var = (
        None if tensor is None else tensor.to(dtype) for tensor in operands.tensors()
    )
    assert x is not None
    # torch's functions want channels in dimension 1, but layer_norm's and rms_norm's last.
    own, wanted = norm.channel_dim, -1 if norm.per_position else 1
    moved = own != wanted and not norm.row_family
    if moved:
        x = x.movedim(own, wanted)
    if norm.training and norm.per_batch:
        mean, var = statistics.mean, statistics.var
    z = _normalized(norm, x, weight, bias, mean, var)
    ones = [1] * (z.dim() - 2)

    def across(modulation: Tensor) -> Tensor:
        samples, channels = modulation.shape
        return modulation.reshape([samples, *ones, channels] if norm.per_position else [samples, channels, *ones])

    if scale is not None:
        z = z * across(1 + scale)
    if shift is not None:
        z = z + across(shift)
    if norm.activation is not None:
        name = norm.activation.name
        z = TORCH_FUNCTIONS.get(name, reference.VALUES[name])(z, norm.activation_parameter)
    z = z.to(operands.input.dtype)
    return z.movedim(wanted, own) if moved else z


def _normalized(
    norm: Norm, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, var: Tensor | None
) -> Tensor:
    """The normalization itself, of (N, C, *) or of trailing dimensions, by one function of torch.

    These are the functions behind torch.nn.functional's, which check shapes once more.
    """
    trailing = x.shape[x.dim() - (norm.num_dims or 1) :]
    if norm.family == "layer_norm":
        return torch.layer_norm(x, trailing, weight, bias, norm.eps)
    if norm.family == "rms_norm":
        if weight is None and torch.onnx.is_in_onnx_export():  # which would make one of the input's size
            weight = x.new_ones(trailing)
        if _may_be_channels_last(x):  # to which torch.rms_norm adds eps in place, and programs have no mutations
            x = x.clone(memory_format=torch.contiguous_format)
        z = torch.rms_norm(x, trailing, weight, norm.eps)
        return z if bias is None else z + bias
    if norm.family == "instance_norm":
        return torch.instance_norm(x, weight, bias, None, None, True, 0.0, norm.eps, False)
    if norm.family == "batch_norm":
        assert mean is not None and var is not None
        if norm.training and not torch.onnx.is_in_onnx_export():  # given statistics would have no gradients
            return _affine(norm, x, weight, bias, mean, var)
        if batch_norm_of_given is None:
            return torch.batch_norm(x, weight, bias, mean, var, False, 0.0, norm.eps, False)
        found: tuple[Tensor, ...] = batch_norm_of_given(x, weight, bias, mean, var, 0.0, norm.eps)
        return found[0]
    if x.dim() == 2:  # ONNX's node wants positions
        return torch.group_norm(x.unsqueeze(-1), norm.num_groups, weight, bias, norm.eps).squeeze(-1)
    return torch.group_norm(x, norm.num_groups, weight, bias, norm.eps)


def _affine(norm: Norm, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor) -> Tensor:
    """(x - mean) rstd weight + bias of channels in dimension 1."""

    def across(channels: Tensor) -> Tensor:
        return channels.reshape([1, -1, *[1] * (x.dim() - 2)])

    z = (x - across(mean)) * across((var + norm.eps).rsqrt())
    z = z if weight is None else z * across(weight)
    return z if bias is None else z + across(bias)


def _may_be_channels_last(x: Tensor) -> bool:
    """Whether torch may take the strides for channels_last, also of slices, and of channels or positions of size 1."""
    return x.dim() in (4, 5) and bool(x.stride(1) <= x.stride(-1))


offer_decomposition(_OP, _decomposed, forward_fake)
offer_decomposition(QUANTIZED, _decomposed_quantized, quantized_fake)
