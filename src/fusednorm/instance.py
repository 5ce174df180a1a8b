"""What a backend offers: instances, each one way to run a problem."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from fusednorm.problem import Problem


class CompilationError(RuntimeError):
    """A kernel that an instance needs cannot be compiled here; says why."""


class Instance(Protocol):
    """One way to run a problem.

    A forward plan is called with (input, weight, bias, scale, shift, mean, var, eps, out, statistics, saved_in) and
    returns (output, mean, rstd, var), None for what the family does not have; without ``statistics`` the last three may
    be None. ``out`` and the mean and rstd of ``saved_in``, dense and in the compute dtype, are written where they are
    not None. A backward plan is called with (grad_output, input, mean, rstd, weight, bias, scale, shift, output_mask,
    out) and returns five gradients, those that are not wanted empty or None; ``out`` receives the input's.
    """

    @property
    def name(self) -> str: ...

    @property
    def config(self) -> Any:
        """The configuration, a frozen dataclass, or None."""

    def supports(self, problem: Problem) -> str | None:
        """None, or why this instance cannot run the problem."""

    def plan(self, problem: Problem) -> Callable[..., tuple[Any, ...]]: ...


@dataclass(frozen=True, slots=True)
class Candidate:
    """An instance and, where it cannot run the problem at hand, why not."""

    instance: Instance
    reason: str | None


@dataclass(frozen=True, slots=True)
class Backend:
    """A kernel language: whether it can run here, and what it found."""

    name: str
    available: str | None
    details: dict[str, str] = field(default_factory=dict)
