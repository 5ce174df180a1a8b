"""The kernels on their own: each family's forward with its saved statistics, and its backward whole or in parts.

x̂ = (x - mean) rstd, z = x̂ weight (1 + scale) + bias (1 + scale) + shift, y = phi(z). ``mean`` and ``rstd`` have the
shape [N, G] for group_norm, [N, C] for instance_norm, [C] for batch_norm and [rows, 1] for layer_norm and rms_norm, in
fp32 (fp64 for float64 input), and are free inputs of the backwards. The backwards come in three forms:
``*_backward`` for all gradients, ``*_backward_data`` for the input's alone, ``*_backward_gamma_beta`` for the
parameters' alone. The gradient of an absent weight or bias is None. :func:`norm_backward` also gives the gradients of
scale and shift.

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

from fusednorm import arguments, library, operands
from fusednorm.activations import Activation
from fusednorm.functional import batch_norm_with_statistics
from fusednorm.problem import Family, view_of
from fusednorm.strides import empty_output

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
Three = tuple[Tensor, Tensor | None, Tensor | None]


def _channel_forward(
    family: Family,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: ActivationLike,
    channel_dim: int,
    scale: Tensor | None,
    shift: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    function = f"{family}_forward"
    name, parameter = arguments.activation_arguments(activation)
    channels = arguments.check_channels(function, input, weight, bias, scale, shift, eps, channel_dim)
    if family == "group_norm":
        arguments.check_groups(function, input, channels, num_groups)
    else:
        arguments.check_positions(function, input, channel_dim)
    return library.norm_forward(
        input, weight, bias, scale, shift, None, None, family, int(num_groups), channel_dim, float(eps), name, parameter
    )[:3]


def _channel_backward(
    mask: Mask,
    family: Family,
    grad_output: Tensor,
    input: Tensor,
    mean: Tensor,
    rstd: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: ActivationLike,
    channel_dim: int,
    scale: Tensor | None,
    shift: Tensor | None,
    training: bool = True,
) -> Three:
    function = f"{family}_backward{_SUFFIX[mask]}"
    name, parameter = arguments.activation_arguments(activation)
    channels = arguments.check_channels(function, input, weight, bias, scale, shift, 0.0, channel_dim)
    if family == "group_norm":
        arguments.check_groups(function, input, channels, num_groups)
    arguments.check_gradient(function, grad_output, input)
    samples = () if family == "batch_norm" else (input.shape[0],)
    arguments.check_statistics(function, input, mean, rstd, (*samples, num_groups or channels))
    gradients = library.norm_backward(
        grad_output,
        input,
        mean,
        rstd,
        weight,
        bias,
        scale,
        shift,
        family,
        int(num_groups),
        channel_dim,
        name,
        parameter,
        training,
        mask,
    )
    return _present(weight, bias, gradients)


def _trailing_backward(
    mask: Mask,
    family: Family,
    grad_output: Tensor,
    input: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    activation: ActivationLike,
) -> Three:
    function = f"{family}_backward{_SUFFIX[mask]}"
    name, parameter = arguments.activation_arguments(activation)
    count = arguments.check_trailing(function, input, normalized_shape, weight, bias, 0.0)
    arguments.check_gradient(function, grad_output, input)
    arguments.check_statistics(function, input, mean, rstd, (view_of(family, input.shape, count).samples, 1))
    gradients = library.norm_backward(
        grad_output,
        input,
        rstd.new_empty(0) if mean is None else mean,
        rstd,
        weight,
        bias,
        None,
        None,
        family,
        count,
        1,
        name,
        parameter,
        True,
        mask,
    )
    return _present(weight, bias, gradients)


def _present(weight: Tensor | None, bias: Tensor | None, gradients: tuple[Tensor, ...]) -> Three:
    return gradients[0], None if weight is None else gradients[1], None if bias is None else gradients[2]


# One parameter a line, as the formatter would have it, makes 400 lines of these signatures.
# fmt: off
def norm_forward(
        input: Tensor, weight: Tensor | None, bias: Tensor | None, scale: Tensor | None, shift: Tensor | None,
        mean: Tensor | None, var: Tensor | None, family: Family, num_groups: int, channel_dim: int, eps: float,
        activation: str, parameter: float) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """(output, mean, rstd, var) of any family, None or empty where it has none; the op's arguments, checked.

    num_groups is group_norm's, and for layer_norm and rms_norm the number of trailing dimensions. mean and var of shape
    [C] are the statistics of batch_norm in evaluation, else None. activation is "" for none.
    """
    given = (mean, var, family, num_groups, channel_dim, eps, activation, parameter)
    operands.check_forward("norm_forward", input, weight, bias, scale, shift, *given)
    return library.norm_forward(input, weight, bias, scale, shift, mean, var, family, int(num_groups), channel_dim,
                                float(eps), activation, float(parameter))


def norm_backward(
        grad_output: Tensor, input: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor | None,
        bias: Tensor | None, scale: Tensor | None, shift: Tensor | None, family: Family, num_groups: int,
        channel_dim: int, activation: str, parameter: float, training: bool,
        output_mask: Sequence[bool]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of input, weight, bias, scale and shift, empty where unwanted or absent; arguments are checked.

    Differentiable in every tensor, mean and rstd included.
    """
    given = (family, num_groups, channel_dim, activation, parameter, training, output_mask)
    operands.check_backward("norm_backward", grad_output, input, mean, rstd, weight, bias, scale, shift, *given)
    return library.norm_backward(grad_output, input, mean, rstd, weight, bias, scale, shift, family, int(num_groups),
                                 channel_dim, activation, float(parameter), training, output_mask)


def group_norm_forward(
        input: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, *,
        activation: ActivationLike = None, channel_dim: int = 1, scale: Tensor | None = None,
        shift: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(output, mean, rstd) of group normalization; mean and rstd of shape [N, G]."""
    return _channel_forward("group_norm", input, num_groups, weight, bias, eps, activation, channel_dim, scale, shift)


def group_norm_backward(
        grad_output: Tensor, input: Tensor, mean: Tensor, rstd: Tensor, num_groups: int, weight: Tensor | None,
        bias: Tensor | None, *, activation: ActivationLike = None, channel_dim: int = 1, scale: Tensor | None = None,
        shift: Tensor | None = None) -> Three:
    """(grad_input, grad_weight, grad_bias) of group normalization, from any mean and rstd of shape [N, G]."""
    return _channel_backward(_ALL, "group_norm", grad_output, input, mean, rstd, num_groups, weight, bias, activation,
                             channel_dim, scale, shift)


def group_norm_backward_data(
        grad_output: Tensor, input: Tensor, mean: Tensor, rstd: Tensor, num_groups: int, weight: Tensor | None,
        bias: Tensor | None, *, activation: ActivationLike = None, channel_dim: int = 1, scale: Tensor | None = None,
        shift: Tensor | None = None) -> Tensor:
    """grad_input of group normalization, from any mean and rstd of shape [N, G]."""
    return _channel_backward(_DATA, "group_norm", grad_output, input, mean, rstd, num_groups, weight, bias, activation,
                             channel_dim, scale, shift)[0]


def group_norm_backward_gamma_beta(
        grad_output: Tensor, input: Tensor, mean: Tensor, rstd: Tensor, num_groups: int, weight: Tensor | None,
        bias: Tensor | None, *, activation: ActivationLike = None, channel_dim: int = 1, scale: Tensor | None = None,
        shift: Tensor | None = None) -> tuple[Tensor | None, Tensor | None]:
    """(grad_weight, grad_bias) of group normalization, from any mean and rstd of shape [N, G]."""
    return _channel_backward(_GAMMA_BETA, "group_norm", grad_output, input, mean, rstd, num_groups, weight, bias,
                             activation, channel_dim, scale, shift)[1:]


def instance_norm_forward(
        input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *, activation: ActivationLike = None,
        channel_dim: int = 1, scale: Tensor | None = None,
        shift: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(output, mean, rstd) of instance normalization; mean and rstd of shape [N, C]."""
    return _channel_forward("instance_norm", input, 0, weight, bias, eps, activation, channel_dim, scale, shift)


def instance_norm_backward(
        grad_output: Tensor, input: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None, *,
        activation: ActivationLike = None, channel_dim: int = 1, scale: Tensor | None = None,
        shift: Tensor | None = None) -> Three:
    """(grad_input, grad_weight, grad_bias) of instance normalization, from any mean and rstd of shape [N, C]."""
    return _channel_backward(_ALL, "instance_norm", grad_output, input, mean, rstd, 0, weight, bias, activation,
                             channel_dim, scale, shift)


def instance_norm_backward_data(
        grad_output: Tensor, input: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None, *,
        activation: ActivationLike = None, channel_dim: int = 1, scale: Tensor | None = None,
        shift: Tensor | None = None) -> Tensor:
    """grad_input of instance normalization, from any mean and rstd of shape [N, C]."""
    return _channel_backward(_DATA, "instance_norm", grad_output, input, mean, rstd, 0, weight, bias, activation,
                             channel_dim, scale, shift)[0]


def instance_norm_backward_gamma_beta(
        grad_output: Tensor, input: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None, *,
        activation: ActivationLike = None, channel_dim: int = 1, scale: Tensor | None = None,
        shift: Tensor | None = None) -> tuple[Tensor | None, Tensor | None]:
    """(grad_weight, grad_bias) of instance normalization, from any mean and rstd of shape [N, C]."""
    return _channel_backward(_GAMMA_BETA, "instance_norm", grad_output, input, mean, rstd, 0, weight, bias, activation,
                             channel_dim, scale, shift)[1:]


def layer_norm_forward(
        input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float, *,
        activation: ActivationLike = None) -> tuple[Tensor, Tensor, Tensor]:
    """(output, mean, rstd) of layer normalization; mean and rstd of shape [rows, 1]."""
    name, parameter = arguments.activation_arguments(activation)
    count = arguments.check_trailing("layer_norm_forward", input, normalized_shape, weight, bias, eps)
    return library.norm_forward(input, weight, bias, None, None, None, None, "layer_norm", count, 1, float(eps), name,
                                parameter)[:3]


def layer_norm_backward(
        grad_output: Tensor, input: Tensor, mean: Tensor, rstd: Tensor, normalized_shape: Sequence[int],
        weight: Tensor | None, bias: Tensor | None, *, activation: ActivationLike = None) -> Three:
    """(grad_input, grad_weight, grad_bias) of layer normalization, from any mean and rstd of shape [rows, 1]."""
    return _trailing_backward(_ALL, "layer_norm", grad_output, input, mean, rstd, normalized_shape, weight, bias,
                              activation)


def layer_norm_backward_data(
        grad_output: Tensor, input: Tensor, mean: Tensor, rstd: Tensor, normalized_shape: Sequence[int],
        weight: Tensor | None, bias: Tensor | None, *, activation: ActivationLike = None) -> Tensor:
    """grad_input of layer normalization, from any mean and rstd of shape [rows, 1]."""
    return _trailing_backward(_DATA, "layer_norm", grad_output, input, mean, rstd, normalized_shape, weight, bias,
                              activation)[0]


def layer_norm_backward_gamma_beta(
        grad_output: Tensor, input: Tensor, mean: Tensor, rstd: Tensor, normalized_shape: Sequence[int],
        weight: Tensor | None, bias: Tensor | None, *,
        activation: ActivationLike = None) -> tuple[Tensor | None, Tensor | None]:
    """(grad_weight, grad_bias) of layer normalization, from any mean and rstd of shape [rows, 1]."""
    return _trailing_backward(_GAMMA_BETA, "layer_norm", grad_output, input, mean, rstd, normalized_shape, weight, bias,
                              activation)[1:]


def rms_norm_forward(
        input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float | None, *,
        activation: ActivationLike = None) -> tuple[Tensor, Tensor]:
    """(output, rstd) of RMS normalization; rstd of shape [rows, 1]; eps as in :func:`fusednorm.rms_norm`."""
    name, parameter = arguments.activation_arguments(activation)
    eps = arguments.rms_eps("rms_norm_forward", input, eps)
    count = arguments.check_trailing("rms_norm_forward", input, normalized_shape, weight, None, eps)
    output, _, rstd, _ = library.norm_forward(input, weight, None, None, None, None, None, "rms_norm", count, 1,
                                              float(eps), name, parameter)
    return output, rstd


def rms_norm_backward(
        grad_output: Tensor, input: Tensor, rstd: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, *,
        activation: ActivationLike = None) -> tuple[Tensor, Tensor | None]:
    """(grad_input, grad_weight) of RMS normalization, from any rstd of shape [rows, 1]."""
    return _trailing_backward(_ALL, "rms_norm", grad_output, input, None, rstd, normalized_shape, weight, None,
                              activation)[:2]


def rms_norm_backward_data(
        grad_output: Tensor, input: Tensor, rstd: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, *,
        activation: ActivationLike = None) -> Tensor:
    """grad_input of RMS normalization, from any rstd of shape [rows, 1]."""
    return _trailing_backward(_DATA, "rms_norm", grad_output, input, None, rstd, normalized_shape, weight, None,
                              activation)[0]


def rms_norm_backward_gamma_beta(
        grad_output: Tensor, input: Tensor, rstd: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, *,
        activation: ActivationLike = None) -> Tensor | None:
    """grad_weight (there is no beta) of RMS normalization, from any rstd of shape [rows, 1]."""
    return _trailing_backward(_GAMMA_BETA, "rms_norm", grad_output, input, None, rstd, normalized_shape, weight, None,
                              activation)[1]


def batch_norm_inference(
        input: Tensor, running_mean: Tensor, running_var: Tensor, weight: Tensor | None, bias: Tensor | None,
        eps: float, *, activation: ActivationLike = None, channel_dim: int = 1, scale: Tensor | None = None,
        shift: Tensor | None = None) -> Tensor:
    """The output of batch normalization with given statistics of shape [C]."""
    return batch_norm_with_statistics(input, running_mean, running_var, weight, bias, False, 0.0, eps, activation,
                                      channel_dim, scale, shift)[0]


def batch_norm_training(
        input: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None,
        running_var: Tensor | None, momentum: float, eps: float, *, activation: ActivationLike = None,
        channel_dim: int = 1, scale: Tensor | None = None,
        shift: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(output, mean, rstd) of batch normalization; running statistics that are given are updated after it."""
    return batch_norm_with_statistics(input, running_mean, running_var, weight, bias, True, momentum, eps, activation,
                                      channel_dim, scale, shift)


def batch_norm_backward(
        grad_output: Tensor, input: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None, *,
        activation: ActivationLike = None, channel_dim: int = 1, scale: Tensor | None = None,
        shift: Tensor | None = None, training: bool = True) -> Three:
    """(grad_input, grad_weight, grad_bias) of batch normalization; mean and rstd are constants unless training."""
    return _channel_backward(_ALL, "batch_norm", grad_output, input, mean, rstd, 0, weight, bias, activation,
                             channel_dim, scale, shift, training)


def batch_norm_backward_data(
        grad_output: Tensor, input: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None, *,
        activation: ActivationLike = None, channel_dim: int = 1, scale: Tensor | None = None,
        shift: Tensor | None = None, training: bool = True) -> Tensor:
    """grad_input of batch normalization; mean and rstd are constants unless training."""
    return _channel_backward(_DATA, "batch_norm", grad_output, input, mean, rstd, 0, weight, bias, activation,
                             channel_dim, scale, shift, training)[0]


def batch_norm_backward_gamma_beta(
        grad_output: Tensor, input: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None, *,
        activation: ActivationLike = None, channel_dim: int = 1, scale: Tensor | None = None,
        shift: Tensor | None = None, training: bool = True) -> tuple[Tensor | None, Tensor | None]:
    """(grad_weight, grad_bias) of batch normalization, from any mean and rstd of shape [C]."""
    return _channel_backward(_GAMMA_BETA, "batch_norm", grad_output, input, mean, rstd, 0, weight, bias, activation,
                             channel_dim, scale, shift, training)[1:]
