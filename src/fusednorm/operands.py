"""The tensors of a call and of its results, by name."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


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
    asked for it."""

    output: Tensor
    mean: Tensor | None = None
    rstd: Tensor | None = None
    var: Tensor | None = None


@dataclass(slots=True, eq=False)
class Gradients:
    """The gradients of a backward's operands; None where an operand is absent or its gradient not wanted."""

    input: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    scale: Tensor | None = None
    shift: Tensor | None = None


#: Whether the gradients of input, weight, bias, scale and shift are wanted.
Wanted = tuple[bool, bool, bool, bool, bool]
