"""Whether an eager call may go straight to its backend, or something waits for torch's dispatcher to see the op."""

from __future__ import annotations

from torch import Tensor
from torch.nn import Parameter

from fusednorm.operands import BackwardOperands, Operands
from fusednorm.private.torch_names import is_batched, is_zerotensor, undisturbed


def batched(*tensors: Tensor | None) -> bool:
    """True with a tensor of the vmap behind ``is_grads_batched``, which no mode announces and which has no memory.

    Asked only where something is amiss, as it costs 0.1 us a tensor.
    """
    return any(tensor is not None and is_batched(tensor) for tensor in tensors)


def plain(tensor: Tensor) -> bool:
    """True for a tensor that is no subclass and whose memory is what it seems: torch.conj(c).imag is negated lazily."""
    return (type(tensor) is Tensor or type(tensor) is Parameter) and not tensor.is_neg()


def readable(gradient: Tensor) -> bool:
    """True for a plain tensor with memory, which what some derivatives of torch hand down has not."""
    return plain(gradient) and not is_zerotensor(gradient)


def straight(operands: Operands | BackwardOperands) -> bool:
    """True where the input and its parameters may go straight to the backend."""
    o = operands
    return (
        plain(o.input)
        and (o.weight is None or plain(o.weight))
        and (o.bias is None or plain(o.bias))
        and (o.scale is None or plain(o.scale))
        and (o.shift is None or plain(o.shift))
        and undisturbed(o.input)
    )


def straight_forward(operands: Operands) -> bool:
    mean, var = operands.mean, operands.var
    return straight(operands) and (mean is None or (plain(mean) and var is not None and plain(var)))


def straight_backward(operands: BackwardOperands) -> bool:
    mean, rstd = operands.mean, operands.rstd
    statistics = plain(rstd) and (mean is None or plain(mean))
    return statistics and readable(operands.grad_output) and straight(operands)
