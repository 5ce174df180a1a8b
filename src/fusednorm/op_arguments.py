"""The checks of the registered ops, made before any operand is read.

The public functions check their arguments in the words of their own signatures. A program can call the ops without
them, by torch.ops or from an edited exported graph, and a kernel reads as many bytes as shapes and dtypes promise.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fusednorm import arguments
from fusednorm.norm import FAMILIES, ROW_FAMILIES, Family, Norm, activation_of, norm_of_op
from fusednorm.operands import BackwardOperands, Operands
from fusednorm.problem import statistics_shape, view_of


def forward_norm(
    function: str,
    operands: Operands,
    family: Family,
    groups_or_dims: int,
    channel_dim: int,
    eps: float,
    activation: str,
    activation_parameter: float,
) -> Norm:
    """The Norm of norm_forward's arguments; ValueError or TypeError where they do not fit each other."""
    _check_kind(function, family, groups_or_dims, channel_dim, activation, activation_parameter)
    if type(eps) is not float:
        arguments.check_eps(function, eps)
    input, mean, var = operands.input, operands.mean, operands.var
    given = mean is not None or var is not None
    norm = norm_of_op(family, int(groups_or_dims), channel_dim, eps, activation, activation_parameter, not given)
    _check_parameters(function, norm, operands)
    if not given:
        return norm
    if family != "batch_norm":
        raise ValueError(
            f"{function}: mean or var is given to {family}; expected None; given statistics are batch_norm's, "
            "which also serves instance_norm with running statistics"
        )
    channels = input.shape[channel_dim]
    for name, value in (("mean", mean), ("var", var)):
        if value is None:
            raise ValueError(f"{function}: {name} is None and the other statistic is given; expected both or neither")
        arguments.check_parameter(function, name, value, (channels,), input, "one element for each channel")
    return norm


def backward_norm(
    function: str,
    operands: BackwardOperands,
    family: Family,
    groups_or_dims: int,
    channel_dim: int,
    activation: str,
    activation_parameter: float,
    training: bool,
    output_mask: Sequence[bool],
) -> Norm:
    """The Norm of norm_backward's arguments, whose eps is 0; ValueError or TypeError where they do not fit each other.

    mean and rstd may have any of the supported dtypes.
    """
    _check_kind(function, family, groups_or_dims, channel_dim, activation, activation_parameter)
    norm = norm_of_op(family, int(groups_or_dims), channel_dim, 0.0, activation, activation_parameter, bool(training))
    check_backward(function, norm, operands)
    if not training and family != "batch_norm":
        raise ValueError(
            f"{function}: training is False for {family}; expected True; only batch_norm, which also serves "
            "instance_norm with running statistics, takes its statistics as constants"
        )
    if len(output_mask) != 5:
        raise ValueError(
            f"{function}: output_mask has {len(output_mask)} elements; expected 5, for the gradients of input, weight, "
            "bias, scale and shift"
        )
    return norm


def check_backward(function: str, norm: Norm, operands: BackwardOperands) -> None:
    """The operands of a backward fit each other, in shapes, dtypes and devices."""
    _check_parameters(function, norm, operands)
    check_saved(function, norm, operands)


def check_saved(function: str, norm: Norm, operands: BackwardOperands) -> None:
    """grad_output, mean and rstd have the shapes of the forward's; the mean of rms_norm is None, empty, or ignored."""
    input, mean = operands.input, operands.mean
    arguments.check_gradient(function, operands.grad_output, input)
    shape = statistics_shape(norm, view_of(norm, input.shape))
    if norm.has_mean:
        _check_given(function, "mean", mean, shape, input)
    elif mean is not None and tuple(mean.shape) not in ((0,), shape):
        raise ValueError(
            f"{function}: mean has shape {tuple(mean.shape)}; expected (0,), since rms_norm subtracts no mean"
        )
    _check_given(function, "rstd", operands.rstd, shape, input)


def _check_given(function: str, name: str, value: Tensor | None, shape: Sequence[int], input: Tensor) -> None:
    if value is None:
        raise ValueError(f"{function}: {name} is None; expected a tensor of shape {tuple(shape)}, as the forward made")
    arguments.check_parameter(function, name, value, shape, input, "one element for each statistic")


def _check_kind(
    function: str, family: Family, groups_or_dims: int, channel_dim: int, activation: str, activation_parameter: float
) -> None:
    if family not in FAMILIES:
        raise ValueError(f"{function}: family is {family!r}; expected one of {', '.join(FAMILIES)}")
    arguments.check_integer(function, "num_groups", groups_or_dims)
    arguments.check_channel_dim(function, channel_dim)
    if not isinstance(activation, str):
        raise TypeError(f"{function}: activation is a {type(activation).__name__}; expected a name, or '' for none")
    if activation_parameter is None:
        raise TypeError(f"{function}: parameter is None; expected a number, 0 where the activation has none")
    activation_of(activation, activation_parameter)


def _check_parameters(function: str, norm: Norm, operands: Operands | BackwardOperands) -> None:
    input = operands.input
    parameters = (("weight", operands.weight), ("bias", operands.bias))
    modulation = (("scale", operands.scale), ("shift", operands.shift))
    if norm.family in ROW_FAMILIES and norm.num_dims != 0:
        arguments.check_input(function, input, 1)
        _check_dims(function, norm, input)
        shape = tuple(input.shape[input.dim() - norm.num_dims :])
        for name, value in parameters:
            arguments.check_parameter(function, name, value, shape, input, "the normalized dimensions")
        _refuse_modulation(function, norm, modulation)
        return
    arguments.check_input(function, input, 2)
    channels = input.shape[norm.channel_dim]
    for name, value in parameters:
        arguments.check_parameter(function, name, value, (channels,), input, "one element for each channel")
    for name, value in modulation:
        arguments.check_parameter(function, name, value, (input.shape[0], channels), input, "(N, C)")
    if norm.family == "group_norm":
        arguments.check_divisor(function, input, channels, norm.num_groups)


def _refuse_modulation(function: str, norm: Norm, modulation: Sequence[tuple[str, Tensor | None]]) -> None:
    for name, value in modulation:
        if value is not None:
            raise ValueError(
                f"{function}: {name} is given to {norm.family} over {norm.num_dims} trailing dimensions; expected "
                "None, or num_groups=0, which takes the channels of (N, C, *), or of (N, *, C) with channel_dim=-1"
            )


def _check_dims(function: str, norm: Norm, input: Tensor) -> None:
    if not 1 <= norm.num_dims <= input.dim():
        raise ValueError(
            f"{function}: num_groups is {norm.num_dims} for {norm.family}; expected the number of trailing dimensions "
            f"that are normalized, from 1 to the {input.dim()} of an input of shape {tuple(input.shape)}"
        )
