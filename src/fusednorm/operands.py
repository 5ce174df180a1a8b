"""What the registered ops check of their operands before anything is read.

The public functions check their arguments in the words of their own signatures. The ops can be called past them, by
torch.ops or from an edited exported graph, and a kernel reads as many bytes as shapes and dtypes promise.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import NoReturn

from torch import Tensor

from fusednorm import arguments
from fusednorm.problem import FAMILIES, Family

_TRAILING = ("layer_norm", "rms_norm")


def check_forward(
    function: str,
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
) -> None:
    """The arguments of norm_forward fit each other; ValueError or TypeError where they do not."""
    groups = _check_problem(
        function, input, weight, bias, scale, shift, family, num_groups, channel_dim, activation, parameter
    )
    if type(eps) is not float:
        arguments.check_eps(function, eps)
    if mean is None and var is None:
        return
    if family != "batch_norm":
        raise ValueError(
            f"{function}: mean or var is given to {family}; expected None; given statistics are batch_norm's, "
            "which also serves instance_norm with running statistics"
        )
    for name, value in (("mean", mean), ("var", var)):
        if value is None:
            raise ValueError(f"{function}: {name} is None and the other statistic is given; expected both or neither")
        arguments.check_parameter(function, name, value, (groups,), input, "one element for each channel")


def check_backward(
    function: str,
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
) -> None:
    """The arguments of norm_backward fit each other; ValueError or TypeError where they do not.

    mean and rstd may have any of the supported dtypes. mean is None or empty for rms_norm, which has none.
    """
    groups = _check_problem(
        function, input, weight, bias, scale, shift, family, num_groups, channel_dim, activation, parameter
    )
    arguments.check_gradient(function, grad_output, input)
    if family == "batch_norm":
        statistics: tuple[int, ...] = (groups,)
    elif family in _TRAILING:
        statistics = (_rows(input, num_groups), 1)
    else:
        statistics = (input.shape[0], groups)
    if family == "rms_norm":
        if mean is not None and tuple(mean.shape) not in ((0,), statistics):
            _refuse_mean(function, mean)
    else:
        _check_given(function, "mean", mean, statistics, input)
    _check_given(function, "rstd", rstd, statistics, input)
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


def _check_given(function: str, name: str, value: Tensor | None, shape: Sequence[int], input: Tensor) -> None:
    if value is None:
        raise ValueError(f"{function}: {name} is None; expected a tensor of shape {tuple(shape)}, as the forward made")
    arguments.check_parameter(function, name, value, shape, input, "one element for each statistic")


def _refuse_mean(function: str, mean: Tensor) -> NoReturn:
    raise ValueError(f"{function}: mean has shape {tuple(mean.shape)}; expected (0,), since rms_norm subtracts no mean")


def _rows(input: Tensor, trailing: int) -> int:
    rows = 1
    for size in input.shape[: input.dim() - trailing]:
        rows *= size
    return rows


def _check_problem(
    function: str,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    family: Family,
    num_groups: int,
    channel_dim: int,
    activation: str,
    parameter: float,
) -> int:
    """What both directions share; the number of groups of the view."""
    if family not in FAMILIES:
        raise ValueError(f"{function}: family is {family!r}; expected one of {', '.join(FAMILIES)}")
    if not isinstance(num_groups, Integral) or isinstance(num_groups, bool):
        raise TypeError(f"{function}: num_groups is a {type(num_groups).__name__}; expected an int")
    arguments.check_channel_dim(function, channel_dim)
    if not isinstance(activation, str):
        raise TypeError(f"{function}: activation is a {type(activation).__name__}; expected a name, or '' for none")
    arguments.activation_of(activation, parameter)
    if family in _TRAILING:
        arguments.check_input(function, input, 1)
        _check_trailing(function, input, weight, bias, scale, shift, family, num_groups)
        return 1
    arguments.check_input(function, input, 2)
    channels = input.shape[channel_dim]
    for name, value in (("weight", weight), ("bias", bias)):
        arguments.check_parameter(function, name, value, (channels,), input, "one element for each channel")
    for name, value in (("scale", scale), ("shift", shift)):
        arguments.check_parameter(function, name, value, (input.shape[0], channels), input, "(N, C)")
    if family != "group_norm":
        return channels
    arguments.check_divisor(function, input, channels, num_groups)
    return num_groups


def _check_trailing(
    function: str,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    family: Family,
    trailing: int,
) -> None:
    if not 1 <= trailing <= input.dim():
        raise ValueError(
            f"{function}: num_groups is {trailing} for {family}; expected the number of trailing dimensions that are "
            f"normalized, from 1 to the {input.dim()} of an input of shape {tuple(input.shape)}"
        )
    shape = tuple(input.shape[input.dim() - trailing :])
    for name, value in (("weight", weight), ("bias", bias)):
        arguments.check_parameter(function, name, value, shape, input, "the normalized dimensions")
    for name, value in (("scale", scale), ("shift", shift)):
        if value is not None:
            raise ValueError(f"{function}: {name} is given to {family}; expected None, since {family} has no channels")
