"""What a backend offers: instances, each one way to run a problem."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from fusednorm.operands import BackwardOperands, Gradients, Operands, Results, Wanted
from fusednorm.problem import Problem


class CompilationError(RuntimeError):
    """A kernel that an instance needs cannot be compiled here; says why."""


class ForwardPlan(Protocol):
    """A forward that is ready to run on tensors of one problem."""

    def __call__(
        self,
        operands: Operands,
        statistics: bool = True,
        out: Tensor | None = None,
        mean_out: Tensor | None = None,
        rstd_out: Tensor | None = None,
    ) -> Results:
        """Run it.

        Without ``statistics`` all results but the output may be None. ``out``, with the problem's output strides, and
        ``mean_out`` and ``rstd_out``, dense and in the compute dtype, receive the results where they are given. The
        dtypes of given statistics are free.
        """


class BackwardPlan(Protocol):
    """A backward that is ready to run on tensors of one problem."""

    def __call__(self, operands: BackwardOperands, wanted: Wanted, out: Tensor | None = None) -> Gradients:
        """Run it. ``out``, with the problem's output strides, receives grad_input where it is given; the dtypes of mean
        and rstd are free."""


Plan = ForwardPlan | BackwardPlan


class Instance(Protocol):
    """One way to run a problem: a kernel with its order of work and its configuration.

    Instance is the field's word, as in Composable Kernel's instance factory. It has nothing to do with instance_norm.
    """

    @property
    def name(self) -> str: ...

    @property
    def config(self) -> Any:
        """The configuration, a frozen dataclass, or None."""

    def supports(self, problem: Problem) -> str | None:
        """None, or why this instance cannot run the problem."""

    def plan(self, problem: Problem) -> Plan:
        """A :class:`ForwardPlan`, or a :class:`BackwardPlan` where the problem is a backward."""


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
