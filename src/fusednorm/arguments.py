"""The checks of the public functions' arguments, made before anything is computed or allocated.

A check costs a few attribute reads; the words of an error are put together only once it is certain.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from numbers import Integral, Real
from typing import NoReturn

import torch
from torch import Tensor
from torch.masked import MaskedTensor

from fusednorm.dtypes import DTYPES, compute_dtype, dtype_name
from fusednorm.formats import FORMATS
from fusednorm.norm import ROW_FAMILIES, Norm
from fusednorm.operands import BackwardOperands, Operands, Sums
from fusednorm.problem import gate_shape
from fusednorm.refusal import refusal, sizes

_STRIDED = torch.strided
_DTYPE_NAMES = "float64, float32, float16 or bfloat16"


def check_input(function: str, input: Tensor, minimum_rank: int, name: str = "input") -> None:
    """``input`` is a dense torch tensor of a supported dtype and of at least ``minimum_rank`` dimensions."""
    if not isinstance(input, Tensor):
        raise refusal(f"{function}: {name} is a {type(input).__name__}; expected a torch.Tensor", TypeError)
    if not _supported(input):
        _refuse_storage(function, name, input)
    if input.dim() < minimum_rank:
        raise refusal(
            f"{function}: {name} has shape {sizes(input.shape)} of rank {input.dim()}; expected rank {minimum_rank} or "
            f"more, as (N, C) or (N, C, *); add the missing dimensions, e.g. input.unsqueeze(0)"
        )


def _supported(tensor: Tensor) -> bool:
    """Whether memory has a number of a supported dtype for each element."""
    return (
        tensor.dtype in DTYPES
        and tensor.layout is _STRIDED
        and not tensor.is_nested
        and not isinstance(tensor, MaskedTensor)
    )


def _refuse_storage(function: str, name: str, tensor: Tensor) -> NoReturn:
    if tensor.dtype not in DTYPES:
        if tensor.is_quantized:
            remedy = f"dequantize it, e.g. {name}.dequantize()"
        elif tensor.dtype.is_complex:
            remedy = f"take its real view, e.g. torch.view_as_real({name})"
        else:
            remedy = f"convert it, e.g. {name}.float()"
        raise refusal(f"{function}: {name} has dtype {tensor.dtype}; expected {_DTYPE_NAMES}; {remedy}", TypeError)
    if tensor.is_nested:
        remedy = "pad it with torch.nested.to_padded_tensor, or call once for each component"
        if tensor.layout is torch.jagged and function in ROW_FAMILIES and name == "input":
            remedy = (
                "call on the rows that it holds, e.g. "
                f"torch.nested.nested_tensor_from_jagged({function}(input.values(), ...), input.offsets()), {remedy}"
            )
        raise TypeError(f"{function}: {name} is a nested tensor; expected a dense one; {remedy}")
    if isinstance(tensor, MaskedTensor):
        raise TypeError(
            f"{function}: {name} is a MaskedTensor; expected a dense tensor, since statistics of what a mask leaves "
            f"are not supported; fill what is masked out, e.g. {name}.to_tensor(0.0)"
        )
    raise TypeError(
        f"{function}: {name} has layout {tensor.layout}; expected torch.strided; convert it, e.g. {name}.to_dense()"
    )


def check_parameter(
    function: str, name: str, value: Tensor | None, shape: Sequence[int], input: Tensor, meaning: str
) -> None:
    """``value`` is None or a dense floating tensor of ``shape`` on the input's device."""
    if value is None or _fits(value, shape, input.device):
        return
    _check_tensor(function, name, value)
    if value.shape != shape:
        raise refusal(
            f"{function}: {name} has shape {sizes(value.shape)}; expected {sizes(shape)}, {meaning} of an "
            f"input of shape {sizes(input.shape)}{_shape_remedy(name, value, shape)}"
        )
    _check_device(function, name, value, input)


def _check_tensor(function: str, name: str, value: object) -> None:
    """``value``, an operand beside the input, is a dense torch tensor of a supported dtype."""
    if not isinstance(value, Tensor):
        raise refusal(f"{function}: {name} is a {type(value).__name__}; expected a torch.Tensor or None", TypeError)
    if not _supported(value):
        _refuse_storage(function, name, value)


def _check_device(function: str, name: str, value: Tensor, input: Tensor) -> None:
    if value.device != input.device:
        raise refusal(
            f"{function}: {name} is on {value.device} and input on {input.device}; expected one device; "
            f"move one of them, e.g. {name}.to({str(input.device)!r})"
        )


def _fits(value: Tensor, shape: Sequence[int], device: torch.device) -> bool:
    return (
        isinstance(value, Tensor)
        and _supported(value)  # first: a nested tensor has no shape
        and value.shape == shape
        and value.device == device
    )


def _shape_remedy(name: str, value: Tensor, shape: Sequence[int]) -> str:
    if value.numel() == prod(shape):
        return f"; reshape it, e.g. {name}.reshape({sizes(shape)})"
    return "; build it for this number of channels" if len(shape) == 1 else ""


def check_channel_dim(function: str, channel_dim: int) -> None:
    check_integer(function, "channel_dim", channel_dim)
    if channel_dim != 1 and channel_dim != -1:
        raise refusal(f"{function}: channel_dim is {channel_dim!r}; expected 1 for (N, C, *) or -1 for (N, *, C)")


def check_eps(function: str, eps: object) -> None:
    """``eps`` is, as in torch, any number, NaN and negative ones included, or a tensor of no dimensions."""
    if isinstance(eps, Tensor) and eps.requires_grad:
        raise refusal(f"{function}: eps requires grad; expected a number such as 1e-5; pass eps.item()", TypeError)
    scalar = eps.item() if getattr(eps, "ndim", None) == 0 and hasattr(eps, "item") else eps
    if not isinstance(scalar, (Real, torch.SymFloat, torch.SymInt)):
        raise refusal(f"{function}: eps is a {type(eps).__name__}; expected a number such as 1e-5", TypeError)


def check_batch_eps(eps: float, training: bool) -> None:
    """batch_norm's eps is not negative, and in training not 0; NaN passes. All is as in torch."""
    if eps < 0.0 or (training and eps == 0.0):
        where, expected = ("training", "a positive number") if training else ("evaluation", "a number of at least 0")
        raise refusal(f"batch_norm: eps is {eps} in {where}; expected {expected} such as 1e-5")


def check_channels(function: str, operands: Operands | BackwardOperands, eps: float, channel_dim: int) -> int:
    """Checks what the families with a channel dimension share; returns the number of channels C."""
    input, weight, bias = operands.input, operands.weight, operands.bias
    check_input(function, input, 2)
    if type(channel_dim) is not int or channel_dim != 1:
        check_channel_dim(function, channel_dim)
    if type(eps) is not float:
        check_eps(function, eps)
    shape, device = input.shape, input.device
    channels = shape[channel_dim]
    if weight is not None and not _fits(weight, (channels,), device):
        check_parameter(function, "weight", weight, (channels,), input, "one element for each channel")
    if bias is not None and not _fits(bias, (channels,), device):
        check_parameter(function, "bias", bias, (channels,), input, "one element for each channel")
    check_modulation_of_samples(function, operands, channels)
    return channels


def check_modulation_of_samples(function: str, operands: Operands | BackwardOperands, channels: int) -> None:
    """scale and shift are (N, C), or None."""
    input = operands.input
    if operands.scale is not None:
        check_parameter(function, "scale", operands.scale, (input.shape[0], channels), input, "(N, C)")
    if operands.shift is not None:
        check_parameter(function, "shift", operands.shift, (input.shape[0], channels), input, "(N, C)")


def check_integer(function: str, name: str, value: object) -> None:
    """``value`` is an int of Python, numpy or a tracer; as in torch True is none, nor is 2.0."""
    if not isinstance(value, (Integral, torch.SymInt)) or isinstance(value, bool):
        raise refusal(f"{function}: {name} is a {type(value).__name__}; expected an int", TypeError)


def check_groups(function: str, input: Tensor, channels: int, num_groups: int) -> None:
    if type(num_groups) is not int:
        check_integer(function, "num_groups", num_groups)
    if num_groups <= 0 or channels % num_groups:
        check_divisor(function, input, channels, num_groups)
    if input.numel() == num_groups:
        refuse_one_element(function, input, "group")


def check_divisor(function: str, input: Tensor, channels: int, num_groups: int) -> None:
    if num_groups <= 0:
        raise refusal(f"{function}: num_groups is {num_groups}; expected at least 1")
    if channels % num_groups:
        raise refusal(
            f"{function}: the {channels} channels of an input of shape {sizes(input.shape)} cannot be divided into "
            f"num_groups={num_groups} equal groups; choose a divisor of {channels}"
            + (", and check channel_dim" if input.dim() > 2 else "")
        )


def check_positions(function: str, input: Tensor, channel_dim: int) -> int:
    """Returns the number of positions for each channel; refuses 1."""
    positions = prod(input.shape[2:] if channel_dim == 1 else input.shape[1:-1])
    if positions == 1:
        refuse_one_element(function, input, "sample and channel")
    return positions


def refuse_one_element(function: str, input: Tensor, what: str) -> NoReturn:
    raise refusal(
        f"{function}: input of shape {sizes(input.shape)} has 1 element for each {what}, so its variance is 0; "
        "expected more than 1; use more samples or a larger input, or evaluation mode where the family has one"
    )


def check_normalized(
    function: str,
    operands: Operands | BackwardOperands,
    normalized_shape: Sequence[int],
    eps: float,
    channel_dim: int = -1,
) -> int:
    """Checks what layer_norm and rms_norm share; returns the number of normalized trailing dimensions, 0 where
    dimension 1 is normalized."""
    input, weight, bias = operands.input, operands.weight, operands.bias
    check_input(function, input, 1 if channel_dim == -1 else 2)
    if type(channel_dim) is not int or channel_dim != -1:
        check_channel_dim(function, channel_dim)
    if not isinstance(normalized_shape, (tuple, list)):
        raise refusal(
            f"{function}: normalized_shape is a {type(normalized_shape).__name__}; expected a tuple of "
            f"ints such as ({input.shape[-1]},)",
            TypeError,
        )
    for place, size in enumerate(normalized_shape):
        if type(size) is not int and not isinstance(size, Tensor):  # torch.jit.trace has tensors for sizes
            check_integer(function, f"normalized_shape[{place}]", size)
    if type(eps) is not float:
        check_eps(function, eps)
    num_dims, shape, device = len(normalized_shape), tuple(normalized_shape), input.device
    if channel_dim == 1:
        num_dims = 0
        if shape != input.shape[1:2]:
            raise refusal(
                f"{function}: normalized_shape is {sizes(shape)} for an input of shape {sizes(input.shape)} with "
                f"channel_dim=1; expected the size of its dimension 1, ({input.shape[1]},)"
            )
    elif not num_dims or num_dims > input.dim() or input.shape[-num_dims:] != shape:
        raise refusal(
            f"{function}: normalized_shape is {sizes(shape)} for an input of shape {sizes(input.shape)}; expected the "
            f"sizes of its last dimensions, such as {sizes(input.shape[-max(num_dims, 1) :])}"
        )
    if weight is not None and not _fits(weight, shape, device):
        check_parameter(function, "weight", weight, shape, input, "the normalized_shape")
    if bias is not None and not _fits(bias, shape, device):
        check_parameter(function, "bias", bias, shape, input, "the normalized_shape")
    return num_dims


def check_modulation(function: str, name: str, value: Tensor, input: Tensor, leading: int) -> tuple[int, ...]:
    """The shape of a scale or shift in as many dimensions as the input, each 1 or the input's.

    ``leading`` is the number of dimensions that are not normalized: with any, (B, K) means (B, 1, ..., K).
    """
    _check_tensor(function, name, value)
    shape, rank = tuple(value.shape), input.dim()
    if len(shape) == 2 and leading:
        shape = shape[0], *(1,) * (rank - 2), shape[1]
    else:
        shape = *(1,) * (rank - len(shape)), *shape
    if len(shape) != rank or any(one != 1 and one != size for one, size in zip(shape, input.shape, strict=True)):
        raise refusal(
            f"{function}: {name} has shape {sizes(value.shape)}; expected one that broadcasts against an input of "
            f"shape {sizes(input.shape)}, of two dimensions the first and the last, such as "
            f"({input.shape[0]}, {input.shape[-1]})"
        )
    _check_device(function, name, value, input)
    return shape


def rms_eps(function: str, input: Tensor, eps: float | None) -> float:
    """eps; for None, as in torch, the machine epsilon of the compute dtype: of float32, float64 for float64 input."""
    if eps is not None:
        return eps
    check_input(function, input, 1)
    return torch.finfo(compute_dtype(input.dtype)).eps


def check_running(
    function: str, input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, channels: int, training: bool
) -> None:
    """Running statistics are both given or neither, of shape [C], and both where the input's own are not used."""
    if (running_mean is None) != (running_var is None):
        missing = "running_mean" if running_mean is None else "running_var"
        raise refusal(f"{function}: {missing} is None and the other is given; expected both or neither")
    if running_mean is None:
        if not training:
            raise refusal(
                f"{function}: running_mean and running_var are None; expected tensors of shape "
                f"({channels},) where the input's own statistics are not used"
            )
        return
    for name, value in (("running_mean", running_mean), ("running_var", running_var)):
        assert value is not None
        if not _fits(value, (channels,), input.device):
            check_parameter(function, name, value, (channels,), input, "one element for each channel")
        if value.requires_grad:
            raise refusal(
                f"{function}: {name} requires grad; expected a buffer; it is never differentiated, "
                f"so pass {name}.detach()"
            )
        if training and channels > 1 and value.stride(0) == 0:
            raise refusal(
                f"{function}: {name} is one number for all channels (its stride is 0); expected memory for each, which "
                f"the call can update; pass {name}.clone()"
            )


def check_momentum(function: str, momentum: float | Tensor) -> None:
    if not isinstance(momentum, (Real, torch.SymFloat, torch.SymInt, Tensor)):
        raise refusal(f"{function}: momentum is a {type(momentum).__name__}; expected a number such as 0.1", TypeError)


def check_gradient(function: str, grad_output: Tensor, input: Tensor) -> None:
    """``grad_output`` has the input's shape, dtype and device, whatever its strides."""
    check_input(function, grad_output, 1, "grad_output")
    check_parameter(function, "grad_output", grad_output, input.shape, input, "the shape")
    if grad_output.dtype != input.dtype:
        raise refusal(
            f"{function}: grad_output has dtype {grad_output.dtype}; expected the input's {input.dtype}; "
            "convert it, e.g. grad_output.to(input.dtype)",
            TypeError,
        )


def check_sums(function: str, norm: Norm, input: Tensor, sums: Sums) -> None:
    """The operands of the sums fit the checked input of a norm, and the sum that is asked for exists."""
    pre_add, gate, post_add = sums.pre_add, sums.pre_gate, sums.post_add
    if not isinstance(sums.return_sum, bool):
        raise refusal(f"{function}: return_sum is a {type(sums.return_sum).__name__}; expected a bool", TypeError)
    if pre_add is None and (gate is not None or sums.return_sum):
        what = "return_sum is True" if gate is None else "pre_gate is given"
        raise refusal(
            f"{function}: {what} and pre_add is None; expected pre_add too, since the sum is "
            "input + pre_gate · pre_add; pass the tensor that is added, or leave this argument out"
        )
    if pre_add is not None and not _fits(pre_add, input.shape, input.device):
        channels = (input.shape[0], input.shape[norm.channel_axis])
        _check_tensor(function, "pre_add", pre_add)
        small = not norm.row_family and pre_add.shape == channels
        if not (small and _fits(pre_add, channels, input.device)):
            meaning = "the shape"
            if not norm.row_family:
                meaning = f"the shape, or (N, C) = {sizes(channels)} for one number per channel,"
            check_parameter(function, "pre_add", pre_add, channels if small else input.shape, input, meaning)
    check_parameter(function, "post_add", post_add, input.shape, input, "the shape")
    if gate is not None:
        _check_gate(function, norm, input, gate)


def _check_gate(function: str, norm: Norm, input: Tensor, gate: Tensor) -> None:
    _check_tensor(function, "pre_gate", gate)
    if gate_shape(input.shape, norm.channel_axis, gate.shape) is None:
        pair = (input.shape[0], input.shape[norm.channel_axis])
        raise refusal(
            f"{function}: pre_gate has shape {sizes(gate.shape)}; expected {sizes(pair)}, a scalar tensor, or a shape "
            f"that broadcasts against the input's {sizes(input.shape)}"
        )
    check_parameter(function, "pre_gate", gate, gate.shape, input, "a gate")


def check_quantized(function: str, norm: Norm, out_dtype: object, out_scale: object) -> None:
    """``out_dtype`` is one to which the output of a norm of rows can be quantized."""
    if out_dtype is None and out_scale is not None:
        raise refusal(f"{function}: out_scale is given and out_dtype is None; expected both, or no out_scale")
    if not isinstance(out_dtype, torch.dtype) or dtype_name(out_dtype) not in FORMATS:
        known = ", ".join(f"torch.{name}" for name in FORMATS)
        kind = ValueError if isinstance(out_dtype, torch.dtype) else TypeError
        words = f"{function}: out_dtype is {out_dtype!r}; expected one of {known}, or None for the input's dtype"
        raise refusal(words, kind)
    if norm.family not in ROW_FAMILIES or (norm.num_dims == 0 and norm.channel_dim == 1):
        what = f"{norm.family} over channels in dimension 1" if norm.family in ROW_FAMILIES else norm.family
        raise refusal(
            f"{function}: out_dtype is given to {what}; layer_norm and rms_norm over trailing dimensions quantize "
            "their outputs; leave out_dtype out, and quantize behind the norm"
        )


def check_out_scale(function: str, input: Tensor, out_scale: object) -> None:
    """``out_scale`` is None or a floating tensor of one element, on the input's device."""
    if out_scale is None:
        return
    if not isinstance(out_scale, Tensor):
        raise refusal(
            f"{function}: out_scale is {out_scale!r}; expected a scalar tensor, such as torch.tensor(0.02), or 'row' "
            "for a scale of each row",
            TypeError,
        )
    if out_scale.numel() != 1:
        raise refusal(
            f"{function}: out_scale has shape {sizes(out_scale.shape)}; expected one element, the scale of the whole "
            "output, or 'row' for a scale of each row, which is returned"
        )
    check_parameter(function, "out_scale", out_scale, out_scale.shape, input, "one element")


def check_forward_only(function: str, tensors: Sequence[Tensor | None]) -> None:
    """No tensor wants a gradient, which an output of 8 bits does not have."""
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        raise refusal(
            f"{function}: out_dtype is given and a tensor requires grad; an 8-bit output has no backward; call under "
            "torch.no_grad() or torch.inference_mode(), or pass detached tensors",
            RuntimeError,
        )


def check_quantized_sums(function: str, sums: Sums) -> None:
    """What is quantized is the norm's own output."""
    if sums.post_add is not None:
        raise refusal(
            f"{function}: out_dtype and post_add are given; expected one of them; add, and quantize behind the norm"
        )
