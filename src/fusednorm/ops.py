"""The kernels on their own: each family's forward with its saved statistics, and its backward whole or in parts.

x̂ = (x - mean) rstd, z = x̂ weight (1 + scale) + bias (1 + scale) + shift, y = phi(z). ``mean`` and ``rstd`` have the
shape [N, G] for group_norm, [N, C] for instance_norm, [C] for batch_norm and [rows, 1] for layer_norm and rms_norm, or
[N, positions] with ``channel_dim=1``, in float32 (float64 for float64 input). A backward takes any mean and rstd of
that shape, in any supported dtype. There are three: ``*_backward`` gives the gradients of input, weight and bias,
``*_backward_data`` that of the input alone, ``*_backward_gamma_beta`` those of weight and bias alone. The gradient of
an absent weight or bias is None. :func:`norm_backward` also gives the gradients of scale and shift.

Everything here is differentiable, runs under torch.compile, and checks its arguments as the public functions do.

>>> import torch
>>> x, weight, bias = torch.randn(2, 8, 4, 4), torch.ones(8), torch.zeros(8)
>>> y, mean, rstd = group_norm_forward(x, 4, weight, bias, 1e-5, activation="silu")
>>> grads = group_norm_backward(torch.ones_like(y), x, mean, rstd, 4, weight, bias, activation="silu")
>>> [tuple(grad.shape) for grad in grads]
[(2, 8, 4, 4), (8,), (8,)]
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fusednorm import arguments, strides
from fusednorm.activations import Activation
from fusednorm.autograd import normalize, normalize_backward
from fusednorm.functional import batch_norm_results, call_norm
from fusednorm.norm import Family, Norm, norm_of
from fusednorm.op_arguments import backward_norm, check_saved, forward_norm
from fusednorm.operands import BackwardOperands, Operands

__all__ = [
    "batch_norm_backward",
    "batch_norm_backward_data",
    "batch_norm_backward_gamma_beta",
    "batch_norm_inference",
    "batch_norm_training",
    "empty_output",
    "group_norm_backward",
    "group_norm_backward_data",
    "group_norm_backward_gamma_beta",
    "group_norm_forward",
    "instance_norm_backward",
    "instance_norm_backward_data",
    "instance_norm_backward_gamma_beta",
    "instance_norm_forward",
    "layer_norm_backward",
    "layer_norm_backward_data",
    "layer_norm_backward_gamma_beta",
    "layer_norm_forward",
    "norm_backward",
    "norm_forward",
    "rms_norm_backward",
    "rms_norm_backward_data",
    "rms_norm_backward_gamma_beta",
    "rms_norm_forward",
]

ActivationLike = str | Activation | None
Mask = tuple[bool, bool, bool, bool, bool]
_ALL: Mask = (True, True, True, False, False)
_DATA: Mask = (True, False, False, False, False)
_GAMMA_BETA: Mask = (False, True, True, False, False)
_SUFFIX = {_ALL: "", _DATA: "_data", _GAMMA_BETA: "_gamma_beta"}
OutputMeanRstd = tuple[Tensor, Tensor, Tensor]
Three = tuple[Tensor, Tensor | None, Tensor | None]


def _channel_forward(
    family: Family, num_groups: int, operands: Operands, eps: float, activation: ActivationLike, channel_dim: int
) -> OutputMeanRstd:
    function = f"{family}_forward"
    channels = arguments.check_channels(function, operands, eps, channel_dim)
    if family == "group_norm":
        arguments.check_groups(function, operands.input, channels, num_groups)
    else:
        arguments.check_positions(function, operands.input, channel_dim)
    results = normalize(call_norm(family, num_groups, channel_dim, eps, activation), operands)
    return results.output, _present(results.mean), _present(results.rstd)


def _present(statistic: Tensor | None) -> Tensor:
    assert statistic is not None
    return statistic


def _channel_backward(
    mask: Mask,
    family: Family,
    num_groups: int,
    operands: BackwardOperands,
    activation: ActivationLike,
    channel_dim: int,
    training: bool = True,
) -> Three:
    function, input = f"{family}_backward{_SUFFIX[mask]}", operands.input
    channels = arguments.check_channels(function, operands, 0.0, channel_dim)
    if family == "group_norm":
        arguments.check_groups(function, input, channels, num_groups)
    norm = call_norm(family, num_groups, channel_dim, 0.0, activation, bool(training))
    return _checked_backward(mask, function, norm, operands)


def _trailing_backward(
    mask: Mask,
    family: Family,
    normalized_shape: Sequence[int],
    operands: BackwardOperands,
    activation: ActivationLike,
    channel_dim: int,
) -> Three:
    function = f"{family}_backward{_SUFFIX[mask]}"
    num_dims = arguments.check_normalized(function, operands, normalized_shape, 0.0, channel_dim)
    return _checked_backward(mask, function, call_norm(family, num_dims, 1, 0.0, activation), operands)


def _checked_backward(mask: Mask, function: str, norm: Norm, operands: BackwardOperands) -> Three:
    check_saved(function, norm, operands)
    gradients = normalize_backward(norm, operands, mask)
    return (
        gradients[0],
        None if operands.weight is None else gradients[1],
        None if operands.bias is None else gradients[2],
    )


# One parameter a line, as the formatter would have it, makes 400 lines of these signatures.
# fmt: off
def empty_output(input: Tensor, family: Family, num_groups: int, channel_dim: int = 1) -> Tensor:
    """An unwritten output, or grad_input, with the strides that every backend returns for this input.

    num_groups is as in :func:`norm_forward`.
    """
    return strides.empty_output(norm_of(family, num_groups, channel_dim), input)


def norm_forward(
        input: Tensor, weight: Tensor | None, bias: Tensor | None, scale: Tensor | None, shift: Tensor | None,
        mean: Tensor | None, var: Tensor | None, family: Family, num_groups: int, channel_dim: int, eps: float,
        activation: str, parameter: float) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """(output, mean, rstd, var) of any family by the op's arguments, checked; a statistic it lacks is None or empty.

    num_groups is group_norm's number of groups, and for layer_norm and rms_norm the number of trailing dimensions, or 0
    for the channels of (N, C, *), and with channel_dim=-1 of (N, *, C), which alone take scale and shift, of (N, C).
    mean and var, of shape [C], are given for batch_norm in evaluation alone. activation is "" for none; parameter is
    its number, silu's beta or leaky_relu's slope.
    """
    operands = Operands(input, weight, bias, scale, shift, mean, var)
    norm = forward_norm("norm_forward", operands, family, num_groups, channel_dim, eps, activation, parameter)
    results = normalize(norm, operands)
    return results.output, results.mean, _present(results.rstd), results.var


def norm_backward(
        grad_output: Tensor, input: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor | None,
        bias: Tensor | None, scale: Tensor | None, shift: Tensor | None, family: Family, num_groups: int,
        channel_dim: int, activation: str, parameter: float, training: bool,
        output_mask: Sequence[bool]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of input, weight, bias, scale and shift, empty where unwanted or absent; arguments are checked.

    Differentiable in every tensor, mean and rstd included.
    """
    operands = BackwardOperands(grad_output, input, mean, rstd, weight, bias, scale, shift)
    norm = backward_norm("norm_backward", operands, family, num_groups, channel_dim, activation, parameter, training,
                         output_mask)
    return normalize_backward(norm, operands, output_mask)


def group_norm_forward(
        input: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, *,
        activation: ActivationLike = None, channel_dim: int = 1, scale: Tensor | None = None,
        shift: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(output, mean, rstd) of group normalization; mean and rstd of shape [N, G]."""
    operands = Operands(input, weight, bias, scale, shift)
    return _channel_forward("group_norm", num_groups, operands, eps, activation, channel_dim)


def group_norm_backward(
        grad_output: Tensor, input: Tensor, mean: Tensor, rstd: Tensor, num_groups: int, weight: Tensor | None,
        bias: Tensor | None, *, activation: ActivationLike = None, channel_dim: int = 1, scale: Tensor | None = None,
        shift: Tensor | None = None) -> Three:
    """(grad_input, grad_weight, grad_bias) of group normalization, from any mean and rstd of shape [N, G]."""
    operands = BackwardOperands(grad_output, input, mean, rstd, weight, bias, scale, shift)
    return _channel_backward(_ALL, "group_norm", num_groups, operands, activation, channel_dim)


def group_norm_backward_data(
        grad_output: Tensor, input: Tensor, mean: Tensor, rstd: Tensor, num_groups: int, weight: Tensor | None,
        bias: Tensor | None, *, activation: ActivationLike = None, channel_dim: int = 1, scale: Tensor | None = None,
        shift: Tensor | None = None) -> Tensor:
    """grad_input of group normalization, from any mean and rstd of shape [N, G]."""
    operands = BackwardOperands(grad_output, input, mean, rstd, weight, bias, scale, shift)
    return _channel_backward(_DATA, "group_norm", num_groups, operands, activation, channel_dim)[0]


def group_norm_backward_gamma_beta(
        grad_output: Tensor, input: Tensor, mean: Tensor, rstd: Tensor, num_groups: int, weight: Tensor | None,
        bias: Tensor | None, *, activation: ActivationLike = None, channel_dim: int = 1, scale: Tensor | None = None,
        shift: Tensor | None = None) -> tuple[Tensor | None, Tensor | None]:
    """(grad_weight, grad_bias) of group normalization, from any mean and rstd of shape [N, G]."""
    operands = BackwardOperands(grad_output, input, mean, rstd, weight, bias, scale, shift)
    return _channel_backward(_GAMMA_BETA, "group_norm", num_groups, operands, activation, channel_dim)[1:]


def instance_norm_forward(
        input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *, activation: ActivationLike = None,
        channel_dim: int = 1, scale: Tensor | None = None,
        shift: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(output, mean, rstd) of instance normalization; mean and rstd of shape [N, C]."""
    operands = Operands(input, weight, bias, scale, shift)
    return _channel_forward("instance_norm", 0, operands, eps, activation, channel_dim)


def instance_norm_backward(
        grad_output: Tensor, input: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None, *,
        activation: ActivationLike = None, channel_dim: int = 1, scale: Tensor | None = None,
        shift: Tensor | None = None) -> Three:
    """(grad_input, grad_weight, grad_bias) of instance normalization, from any mean and rstd of shape [N, C]."""
    operands = BackwardOperands(grad_output, input, mean, rstd, weight, bias, scale, shift)
    return _channel_backward(_ALL, "instance_norm", 0, operands, activation, channel_dim)


def instance_norm_backward_data(
        grad_output: Tensor, input: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None, *,
        activation: ActivationLike = None, channel_dim: int = 1, scale: Tensor | None = None,
        shift: Tensor | None = None) -> Tensor:
    """grad_input of instance normalization, from any mean and rstd of shape [N, C]."""
    operands = BackwardOperands(grad_output, input, mean, rstd, weight, bias, scale, shift)
    return _channel_backward(_DATA, "instance_norm", 0, operands, activation, channel_dim)[0]


def instance_norm_backward_gamma_beta(
        grad_output: Tensor, input: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None, *,
        activation: ActivationLike = None, channel_dim: int = 1, scale: Tensor | None = None,
        shift: Tensor | None = None) -> tuple[Tensor | None, Tensor | None]:
    """(grad_weight, grad_bias) of instance normalization, from any mean and rstd of shape [N, C]."""
    operands = BackwardOperands(grad_output, input, mean, rstd, weight, bias, scale, shift)
    return _channel_backward(_GAMMA_BETA, "instance_norm", 0, operands, activation, channel_dim)[1:]


def layer_norm_forward(
        input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float, *,
        activation: ActivationLike = None, channel_dim: int = -1) -> tuple[Tensor, Tensor, Tensor]:
    """(output, mean, rstd) of layer normalization; mean and rstd of shape [rows, 1]."""
    operands = Operands(input, weight, bias)
    num_dims = arguments.check_normalized("layer_norm_forward", operands, normalized_shape, eps, channel_dim)
    results = normalize(call_norm("layer_norm", num_dims, 1, eps, activation), operands)
    return results.output, _present(results.mean), _present(results.rstd)


def layer_norm_backward(
        grad_output: Tensor, input: Tensor, mean: Tensor, rstd: Tensor, normalized_shape: Sequence[int],
        weight: Tensor | None, bias: Tensor | None, *, activation: ActivationLike = None,
        channel_dim: int = -1) -> Three:
    """(grad_input, grad_weight, grad_bias) of layer normalization, from any mean and rstd of shape [rows, 1]."""
    operands = BackwardOperands(grad_output, input, mean, rstd, weight, bias)
    return _trailing_backward(_ALL, "layer_norm", normalized_shape, operands, activation, channel_dim)


def layer_norm_backward_data(
        grad_output: Tensor, input: Tensor, mean: Tensor, rstd: Tensor, normalized_shape: Sequence[int],
        weight: Tensor | None, bias: Tensor | None, *, activation: ActivationLike = None,
        channel_dim: int = -1) -> Tensor:
    """grad_input of layer normalization, from any mean and rstd of shape [rows, 1]."""
    operands = BackwardOperands(grad_output, input, mean, rstd, weight, bias)
    return _trailing_backward(_DATA, "layer_norm", normalized_shape, operands, activation, channel_dim)[0]


def layer_norm_backward_gamma_beta(
        grad_output: Tensor, input: Tensor, mean: Tensor, rstd: Tensor, normalized_shape: Sequence[int],
        weight: Tensor | None, bias: Tensor | None, *,
        activation: ActivationLike = None, channel_dim: int = -1) -> tuple[Tensor | None, Tensor | None]:
    """(grad_weight, grad_bias) of layer normalization, from any mean and rstd of shape [rows, 1]."""
    operands = BackwardOperands(grad_output, input, mean, rstd, weight, bias)
    return _trailing_backward(_GAMMA_BETA, "layer_norm", normalized_shape, operands, activation, channel_dim)[1:]


def rms_norm_forward(
        input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float | None, *,
        activation: ActivationLike = None, channel_dim: int = -1) -> tuple[Tensor, Tensor]:
    """(output, rstd) of RMS normalization; rstd of shape [rows, 1]; eps as in :func:`fusednorm.rms_norm`."""
    operands = Operands(input, weight)
    eps = arguments.rms_eps("rms_norm_forward", input, eps)
    num_dims = arguments.check_normalized("rms_norm_forward", operands, normalized_shape, eps, channel_dim)
    results = normalize(call_norm("rms_norm", num_dims, 1, eps, activation), operands)
    return results.output, _present(results.rstd)


def rms_norm_backward(
        grad_output: Tensor, input: Tensor, rstd: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, *,
        activation: ActivationLike = None, channel_dim: int = -1) -> tuple[Tensor, Tensor | None]:
    """(grad_input, grad_weight) of RMS normalization, from any rstd of shape [rows, 1]."""
    operands = BackwardOperands(grad_output, input, None, rstd, weight)
    return _trailing_backward(_ALL, "rms_norm", normalized_shape, operands, activation, channel_dim)[:2]


def rms_norm_backward_data(
        grad_output: Tensor, input: Tensor, rstd: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, *,
        activation: ActivationLike = None, channel_dim: int = -1) -> Tensor:
    """grad_input of RMS normalization, from any rstd of shape [rows, 1]."""
    operands = BackwardOperands(grad_output, input, None, rstd, weight)
    return _trailing_backward(_DATA, "rms_norm", normalized_shape, operands, activation, channel_dim)[0]


def rms_norm_backward_gamma_beta(
        grad_output: Tensor, input: Tensor, rstd: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, *,
        activation: ActivationLike = None, channel_dim: int = -1) -> Tensor | None:
    """grad_weight (there is no beta) of RMS normalization, from any rstd of shape [rows, 1]."""
    operands = BackwardOperands(grad_output, input, None, rstd, weight)
    return _trailing_backward(_GAMMA_BETA, "rms_norm", normalized_shape, operands, activation, channel_dim)[1]


def batch_norm_inference(
        input: Tensor, running_mean: Tensor, running_var: Tensor, weight: Tensor | None, bias: Tensor | None,
        eps: float, *, activation: ActivationLike = None, channel_dim: int = 1, scale: Tensor | None = None,
        shift: Tensor | None = None) -> Tensor:
    """The output of batch normalization with given statistics of shape [C]."""
    operands = Operands(input, weight, bias, scale, shift)
    return batch_norm_results(operands, running_mean, running_var, False, 0.0, eps, activation, channel_dim,
                              False).output


def batch_norm_training(
        input: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None,
        running_var: Tensor | None, momentum: float, eps: float, *, activation: ActivationLike = None,
        channel_dim: int = 1, scale: Tensor | None = None,
        shift: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(output, mean, rstd) of batch normalization; running statistics that are given are updated after it."""
    operands = Operands(input, weight, bias, scale, shift)
    results = batch_norm_results(operands, running_mean, running_var, True, momentum, eps, activation, channel_dim,
                                 True)
    return results.output, _present(results.mean), _present(results.rstd)


def batch_norm_backward(
        grad_output: Tensor, input: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None, *,
        activation: ActivationLike = None, channel_dim: int = 1, scale: Tensor | None = None,
        shift: Tensor | None = None, training: bool = True) -> Three:
    """(grad_input, grad_weight, grad_bias) of batch normalization; mean and rstd are constants unless training."""
    operands = BackwardOperands(grad_output, input, mean, rstd, weight, bias, scale, shift)
    return _channel_backward(_ALL, "batch_norm", 0, operands, activation, channel_dim, training)


def batch_norm_backward_data(
        grad_output: Tensor, input: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None, *,
        activation: ActivationLike = None, channel_dim: int = 1, scale: Tensor | None = None,
        shift: Tensor | None = None, training: bool = True) -> Tensor:
    """grad_input of batch normalization; mean and rstd are constants unless training."""
    operands = BackwardOperands(grad_output, input, mean, rstd, weight, bias, scale, shift)
    return _channel_backward(_DATA, "batch_norm", 0, operands, activation, channel_dim, training)[0]


def batch_norm_backward_gamma_beta(
        grad_output: Tensor, input: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None, *,
        activation: ActivationLike = None, channel_dim: int = 1, scale: Tensor | None = None,
        shift: Tensor | None = None, training: bool = True) -> tuple[Tensor | None, Tensor | None]:
    """(grad_weight, grad_bias) of batch normalization, from any mean and rstd of shape [C]."""
    operands = BackwardOperands(grad_output, input, mean, rstd, weight, bias, scale, shift)
    return _channel_backward(_GAMMA_BETA, "batch_norm", 0, operands, activation, channel_dim, training)[1:]
