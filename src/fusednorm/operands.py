"""The tensors of a call by name, and of its results."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True, eq=False)
class Operands:
    """The tensors of a forward. ``mean`` and ``var``, of shape (C,), are given where the call does not take its own
    statistics: they are what a Norm without ``training`` normalizes by."""

    input: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None
    scale: Tensor | None = None
    shift: Tensor | None = None
    mean: Tensor | None = None
    var: Tensor | None = None


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


@dataclass(slots=True, eq=False)
class Results:
    """What a forward returns: the output; mean, rstd and the biased variance, each None where the family has none or
    nobody asked for it."""

    output: Tensor
    mean: Tensor | None = None
    rstd: Tensor | None = None
    var: Tensor | None = None


@dataclass(slots=True, eq=False)
class Gradients:
    """What a backward returns: the gradient of each operand that has one, None where it is absent or not wanted."""

    input: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    scale: Tensor | None = None
    shift: Tensor | None = None


#: Whether the gradients of input, weight, bias, scale and shift are wanted.
Wanted = tuple[bool, bool, bool, bool, bool]
