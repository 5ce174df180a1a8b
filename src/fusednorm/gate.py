"""Whether an eager call may go straight to its backend, or something waits for torch's dispatcher to see the op.

Each test costs 40 to 70 ns of a call that takes 10 us in all.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler
from torch.nn import Parameter

from fusednorm.operands import BackwardOperands, Operands

# Bound once, because each name looked up in torch costs another 15 ns.
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._is_torch_function_mode_enabled
_transforms_active = torch._C._are_functorch_transforms_active
_tracing_state = torch._C._get_tracing_state
_is_batched = torch._C._functorch.is_legacy_batchedtensor


def transformed() -> bool:
    """True under torch.func's transforms and forward-mode AD, which work on the reference's torch ops."""
    return _transforms_active() or forward_ad._current_level >= 0


def batched(*tensors: Tensor | None) -> bool:
    """True with a tensor of the vmap behind ``is_grads_batched``, which no mode announces and which has no memory.

    Asked only where something is amiss, as it costs 0.1 us a tensor.
    """
    return any(tensor is not None and _is_batched(tensor) for tensor in tensors)


def plain(tensor: Tensor) -> bool:
    """True for a tensor that is no subclass and whose memory is what it seems: torch.conj(c).imag is negated lazily."""
    return type(tensor) is Parameter or (type(tensor) is Tensor and not tensor.is_neg())


def readable(gradient: Tensor) -> bool:
    """True for a plain tensor with memory, which what some derivatives of torch hand down has not."""
    return plain(gradient) and not gradient._is_zerotensor()


def direct(tensor: Tensor) -> bool:
    """True where no mode, transform, trace or profiler waits for a dispatcher call."""
    return (
        (tensor.is_cpu or tensor.is_cuda)
        and not _dispatch_modes()
        and not _function_modes()
        and not _transforms_active()
        and not _tracing_state()
        and forward_ad._current_level < 0
        and not profiler._is_profiler_enabled
    )


def straight(operands: Operands | BackwardOperands) -> bool:
    """True where the input and its parameters may go straight to the backend."""
    o = operands
    return (
        plain(o.input)
        and (o.weight is None or plain(o.weight))
        and (o.bias is None or plain(o.bias))
        and (o.scale is None or plain(o.scale))
        and (o.shift is None or plain(o.shift))
        and direct(o.input)
    )


def straight_forward(operands: Operands) -> bool:
    mean, var = operands.mean, operands.var
    return straight(operands) and (mean is None or (plain(mean) and var is not None and plain(var)))


def straight_backward(operands: BackwardOperands) -> bool:
    mean, rstd = operands.mean, operands.rstd
    statistics = type(rstd) is Tensor and (mean is None or type(mean) is Tensor)
    return statistics and readable(operands.grad_output) and straight(operands)
