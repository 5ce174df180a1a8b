"""Whether an eager call may go straight to its backend, or something watches torch's dispatcher for the op."""

from __future__ import annotations

import sys

import torch
from torch import Tensor
from torch.nn import Parameter

from fusednorm.operands import BackwardOperands, Operands
from fusednorm.private.torch_names import is_batched, is_zerotensor, undisturbed, unseen


def batched(operands: Operands | BackwardOperands) -> bool:
    """True with a tensor of the vmap behind ``is_grads_batched``, which no mode announces and which has no memory.

    It costs 0.1 us a tensor, so it is asked only where the straight way is shut or has failed.
    """
    return any(tensor is not None and is_batched(tensor) for tensor in operands.tensors())


def is_dtensor(tensor: object) -> bool:
    """True for a DTensor. Its class takes half a second to load, and is loaded where there is one."""
    loaded = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return loaded is not None and isinstance(tensor, loaded)


def on_mesh(operands: Operands) -> bool:
    """True with a DTensor among the operands; asked only where the straight way is shut."""
    return any(map(is_dtensor, operands.tensors()))


def plain(tensor: Tensor) -> bool:
    """True for a tensor of no subclass whose memory holds its values; torch.conj(c).imag is negated lazily."""
    return (type(tensor) is Tensor or type(tensor) is Parameter) and not tensor.is_neg()


def writable(tensor: Tensor, device: torch.device) -> bool:
    """True where a kernel of the device may write to a tensor that autograd does not follow."""
    return (
        plain(tensor)
        and tensor.device == device
        and tensor.is_contiguous()
        and not tensor.requires_grad
        and not tensor.is_inference()
    )


def readable(gradient: Tensor) -> bool:
    """True for a plain tensor with memory; some derivatives of torch hand down zeros that have none."""
    return plain(gradient) and not is_zerotensor(gradient)


def all_plain(operands: Operands | BackwardOperands) -> bool:
    """True where input, weight, bias, scale and shift are :func:`plain`."""
    o = operands
    return (
        plain(o.input)
        and (o.weight is None or plain(o.weight))
        and (o.bias is None or plain(o.bias))
        and (o.scale is None or plain(o.scale))
        and (o.shift is None or plain(o.shift))
    )


def straight(operands: Operands | BackwardOperands, profiled: bool = False) -> bool:
    """True where input, weight, bias, scale and shift may go straight to the backend; while a profiler records, where
    ``profiled`` says so."""
    return all_plain(operands) and (unseen if profiled else undisturbed)(operands.input)


def straight_forward(operands: Operands, profiled: bool = False) -> bool:
    mean, var = operands.mean, operands.var
    return straight(operands, profiled) and (mean is None or (plain(mean) and var is not None and plain(var)))


def straight_backward(operands: BackwardOperands, profiled: bool = False) -> bool:
    mean, rstd = operands.mean, operands.rstd
    plain_statistics = plain(rstd) and (mean is None or plain(mean))
    return plain_statistics and readable(operands.grad_output) and straight(operands, profiled)
