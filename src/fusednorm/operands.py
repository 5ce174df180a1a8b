"""The tensors of a call and of its results, by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusednorm.problem import gate_shape, spread_shape


def no_memory(tensor: Tensor) -> int:
    """The address 0 of a tensor without elements; RuntimeError where the tensor's memory was freed, as FSDP frees that
    of parameters: a kernel would read from address 0, or take the operand for absent."""
    if tensor.numel():
        raise RuntimeError(
            f"fusednorm: a tensor of shape {tuple(tensor.shape)} has no memory; expected one whose storage was not "
            "freed; call inside of the wrapper that gathers parameters"
        )
    return 0


@dataclass(slots=True, eq=False)
class Operands:
    """The tensors of a forward. A Norm without ``training`` normalizes by ``mean`` and ``var``, of shape (C,), which
    are None otherwise."""

    input: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None
    scale: Tensor | None = None
    shift: Tensor | None = None
    mean: Tensor | None = None
    var: Tensor | None = None

    def tensors(self) -> tuple[Tensor | None, ...]:
        """All of them, in the order of the op's schema."""
        return self.input, self.weight, self.bias, self.scale, self.shift, self.mean, self.var


@dataclass(slots=True, eq=False)
class Sums:
    """The sums around a norm: it normalizes s = input + pre_bias + pre_gate · pre_add, and gives phi(z + post_add).

    ``pre_add`` has the input's shape, or (N, C) where there are channels; ``post_add`` has the input's shape;
    ``pre_gate`` broadcasts against the input. ``return_sum`` says that the caller takes s too. ``pre_bias``, (C,), is
    the bias of a convolution before a norm of planes, which compiled graphs alone leave to the norm.
    """

    pre_add: Tensor | None = None
    pre_gate: Tensor | None = None
    post_add: Tensor | None = None
    return_sum: bool = False
    pre_bias: Tensor | None = None

    def numbers(self, shape: Sequence[int], axis: int, dtype: torch.dtype) -> Tensor | None:
        """A number for each sample and channel of an input of this shape with channels in ``axis``: the gate, a
        pre_add of (N, C), or their product; None where there is neither."""
        gate, pre_add = self.pre_gate, self.pre_add
        if gate is not None:
            aligned = gate_shape(shape, axis, gate.shape)
            assert aligned is not None
            planes = spread_shape(shape, axis)
            gate = gate.to(dtype).reshape(aligned).expand(planes).reshape(shape[0], shape[axis])
        if pre_add is not None and pre_add.shape != shape:
            gate = pre_add.to(dtype) if gate is None else pre_add.to(dtype) * gate
        return None if gate is None else gate.contiguous()

    def keywords(self) -> dict[str, Any]:
        """The keyword arguments of a public function that were given."""
        every = {"pre_add": self.pre_add, "pre_gate": self.pre_gate, "post_add": self.post_add}
        given: dict[str, Any] = {name: tensor for name, tensor in every.items() if tensor is not None}
        if self.return_sum:
            given["return_sum"] = self.return_sum
        return given


@dataclass(slots=True, eq=False)
class BackwardOperands:
    """The tensors of a backward. ``mean`` is None for rms_norm; mean and rstd may have any of the supported dtypes."""

    grad_output: Tensor
    input: Tensor
    mean: Tensor | None
    rstd: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None
    scale: Tensor | None = None
    shift: Tensor | None = None

    def tensors(self) -> tuple[Tensor | None, ...]:
        """All of them, in the order of the op's schema."""
        parameters = self.weight, self.bias, self.scale, self.shift
        return self.grad_output, self.input, self.mean, self.rstd, *parameters


@dataclass(slots=True, eq=False)
class Results:
    """The results of a forward; ``var`` is the biased variance. A statistic is None where the family has none or nobody
    asked for it. ``sum`` is the s of :class:`Sums`, None without a ``pre_add``. ``scale`` has the scales of the rows of
    an output that is quantized by them."""

    output: Tensor
    mean: Tensor | None = None
    rstd: Tensor | None = None
    var: Tensor | None = None
    sum: Tensor | None = None
    scale: Tensor | None = None


#: Results of which nothing is there yet, for a plan to allocate.
NOTHING_YET = Results(None)  # type: ignore[arg-type]


@dataclass(slots=True, eq=False)
class Gated:
    """What the gradients of a product before a norm, in s = input + pre_gate · pre_add, are made of: the gate, pre_add
    where the gradient of the gate is wanted and None elsewhere, and whether that of pre_add is wanted."""

    pre_gate: Tensor
    pre_add: Tensor | None
    wants_pre_add: bool


@dataclass(slots=True, eq=False)
class Gradients:
    """The gradients of a backward's operands; None where an operand is absent or its gradient not wanted."""

    input: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    scale: Tensor | None = None
    shift: Tensor | None = None


@dataclass(slots=True, eq=False)
class SumGradients:
    """The gradients of what is added around a norm; None where something is absent or its gradient not wanted."""

    pre_add: Tensor | None = None
    pre_gate: Tensor | None = None
    post_add: Tensor | None = None


#: Whether the gradients of input, weight, bias, scale and shift are wanted.
Wanted = tuple[bool, bool, bool, bool, bool]


@dataclass(slots=True, eq=False)
class Statistics:
    """The statistics of an input that is spread over processes: mean, rstd and the biased variance of each unit, in the
    dtype of the computation, and the elements under one of them, in float64."""

    mean: Tensor
    rstd: Tensor
    var: Tensor
    count: Tensor
