"""The contract of a backend: its instances, each a way to run a problem, and their plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from fusednorm.operands import (
    BackwardOperands,
    Gated,
    Gradients,
    Operands,
    Results,
    Statistics,
    SumGradients,
    Sums,
    Wanted,
)
from fusednorm.problem import Problem


class CompilationError(RuntimeError):
    """An instance's kernel cannot be compiled here; the message says why."""


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

        ``statistics`` says whether they are wanted; without it every result but the output may be None. The results are
        written into ``out``, which has the problem's output strides, and into ``mean_out`` and ``rstd_out``, dense and
        in the compute dtype, where these are given. mean and var among the operands may have any supported dtype.
        """


class BackwardPlan(Protocol):
    """A backward that is ready to run on tensors of one problem."""

    def __call__(self, operands: BackwardOperands, wanted: Wanted, out: Tensor | None = None) -> Gradients:
        """Run it. grad_input is written into ``out``, which has the problem's output strides, where that is given.
        mean and rstd may have any supported dtype. ``wanted`` asks for no gradient that the problem's direction leaves
        out."""


class SumForwardPlan(Protocol):
    """A forward of a problem with ``added``, on tensors that fit its description."""

    def __call__(
        self,
        operands: Operands,
        sums: Sums,
        statistics: bool = True,
        out: Tensor | None = None,
        sum_out: Tensor | None = None,
    ) -> Results:
        """Run it. The results have the sum where ``added.keeps_sum`` says so; statistics as above. The output and the
        sum are written into ``out`` and ``sum_out``, which have the problem's output strides, where these are given."""


class QuantizedForwardPlan(Protocol):
    """A forward of a problem whose output is quantized, on tensors that fit its description."""

    def __call__(
        self, operands: Operands, sums: Sums | None, out_scale: Tensor | None, into: Results | None = None
    ) -> Results:
        """Run it. ``out_scale`` is a tensor of one element, or None where each row has its own; the results then have
        the scales. They have the sum where ``added.keeps_sum`` says so, and no statistics. The results are written into
        those tensors of ``into`` that are there, an output in the problem's output strides."""


class SumBackwardPlan(Protocol):
    """A backward of a problem with ``added``, whose input is s."""

    def __call__(
        self,
        operands: BackwardOperands,
        wanted: Wanted,
        behind: Tensor | None,
        grad_sum: Tensor | None,
        gated: Gated | None = None,
        out: Tensor | None = None,
        post_out: Tensor | None = None,
    ) -> tuple[Gradients, SumGradients]:
        """Run it. grad_input is ds, the gradient of s, to which ``grad_sum`` is added, whose strides are those of s.

        ``behind`` is given where an activation meets z + post_add, and the gradient of post_add is made then: post_add
        itself, or the output where that tells the activation's derivative (``Activation.told``).

        Where the problem has a gate, ``gated`` is given, and the plan makes gate · ds, the gradient of pre_add, and
        Σ pre_add · ds in the gate's shape and dtype, in an order of its own that is always the same. A plan makes each
        of the two where it is wanted, and neither reads nor writes anything for the other. Where the problem says
        ``grad_numbers``, the plan makes the gradient of a pre_add (N, C): the sum of ds over positions, without
        ``grad_sum``, in the compute dtype. An instance that cannot do one of these says so in ``supports``. No plan
        makes the gradient of a pre_add of the input's shape without a gate, since it is ds.

        grad_input and the gradient of post_add are written into ``out`` and ``post_out``, which have the problem's
        output strides, where these are given; that of pre_add has these strides too."""


class SpreadForwardPlan(Protocol):
    """A forward of one process's part of an input that is spread over several, in two steps. The current device is that
    of the tensors, as for all plans of such inputs."""

    def local_moments(self, input: Tensor) -> Tensor:
        """A float64 vector: the means of this part's units, their M2, and the number of elements under each."""

    def output(self, operands: Operands, mean: Tensor | None, rstd: Tensor) -> Tensor:
        """The output by the statistics of the whole, in the dtype of the computation; rms_norm has no mean."""


class SpreadBackwardPlan(Protocol):
    """The backward of one process's part.

    P and Q of a unit lie side by side. p and q are of each sample and channel, or of each channel where no parameter
    differs by sample, all p before all q.
    """

    def gradient(self, grad_output: Tensor) -> Tensor:
        """What the other methods take for grad_output: itself, or a copy where its strides fit no memory order."""

    def local_sums(self, operands: BackwardOperands) -> Tensor:
        """p and q, or P and Q, of this part, in pieces that other methods take; one pass over grad_output and input."""

    def own_sums(self, operands: BackwardOperands, sums: Tensor, wanted: Wanted) -> tuple[Tensor, Gradients]:
        """P and Q of this part, in float64, and the gradients of this process's own parameters; none where another pass
        over memory would make them, which ``finish`` does."""

    def finish(self, operands: BackwardOperands, totals: Tensor | None, found: Gradients, wanted: Wanted) -> None:
        """Put into ``found`` the input's gradient, from P / K and Q / K of the whole, and those of the parameters that
        ``own_sums`` has left to the same pass. Without ``totals`` nobody wants the input's."""


class ReplicatedBackwardPlan(SpreadBackwardPlan, Protocol):
    """The backward where all processes may have the same parameters, which they have but for rows in parts."""

    def packed_sums(self, sums: Tensor) -> Tensor:
        """p and q of this part, in float64."""

    def parameters(self, operands: BackwardOperands, summed: Tensor, wanted: Wanted) -> Gradients:
        """The parameters' gradients alone, from p and q that were summed over the ranks."""

    def totals_of_ranks(self, operands: BackwardOperands, means: Tensor) -> Tensor:
        """P / K and Q / K of the whole, from p / K and q / K that were summed over the ranks."""


@dataclass(frozen=True, slots=True)
class CutGroups:
    """Groups of group_norm of which a process has parts: of the whole's ``groups``, of so many channels each, the
    process has those of so many ``channels`` from the ``first`` on."""

    samples: int
    groups: int
    group_channels: int
    channels: int
    first: int

    @property
    def units(self) -> int:
        return self.samples * self.groups


class Ranks(Protocol):
    """What a device makes of the float64 vectors of all ranks, ``parts`` of shape (ranks, length), in their order."""

    def merge_moments(
        self,
        parts: Tensor,
        shape: tuple[int, ...],
        eps: float,
        dtype: Any,
        running_mean: Tensor | None = None,
        running_var: Tensor | None = None,
        share: float | Tensor = 0.0,
        counter: Tensor | None = None,
    ) -> Statistics:
        """The statistics of the units of the whole, of this shape, from vectors as
        :meth:`SpreadForwardPlan.local_moments` or :meth:`group_moments` makes them, of which any may have no elements.
        Running statistics, which are contiguous, move towards them by ``share``, unless there are no elements at all;
        ``counter`` grows by 1 with them."""

    def sum_over_ranks(self, parts: Tensor, count: Tensor, sums: Any, means: Any) -> tuple[Any, Any]:
        """The sums over the ranks, and the same over ``count``, each in a dtype, or None where that is None."""

    def group_moments(self, channels: Tensor, cut: CutGroups) -> Tensor:
        """The means, the M2 and the numbers of elements of groups, from the moments of this process's channels."""

    def group_sums(self, channels: Tensor, cut: CutGroups) -> Tensor:
        """P and Q of groups, from those of this process's channels."""

    def channel_statistics(self, found: Statistics, cut: CutGroups) -> tuple[Tensor, Tensor]:
        """mean and rstd of the group of each sample and channel of this process."""

    def channel_means(self, means: Tensor, cut: CutGroups) -> Tensor:
        """P / K and Q / K of the group of each sample and channel of this process."""


class MoveRunning(Protocol):
    """The kernel of a device that moves running statistics."""

    def __call__(
        self,
        running_mean: Tensor,
        running_var: Tensor,
        mean: Tensor,
        var: Tensor,
        factor: float,
        share: float | Tensor,
        counter: Tensor | None,
    ) -> None:
        """The running statistics of channels move towards ``mean`` and ``factor var`` by ``share``; ``counter`` grows
        by 1. All tensors are contiguous."""


#: A :class:`MoveRunning` of one factor and share: ``move(running_mean, running_var, mean, var, counter)``.
Move = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], None]

Plan = ForwardPlan | BackwardPlan | SumForwardPlan | SumBackwardPlan | QuantizedForwardPlan


class Instance(Protocol):
    """One way to run a problem: a kernel with its order of work, in one of several configurations.

    The word is the field's, as in Composable Kernel's instance factory, and has nothing to do with instance_norm.
    """

    @property
    def name(self) -> str: ...

    def supports(self, problem: Problem) -> str | None:
        """None, or why this instance cannot run the problem."""

    def configs(self, problem: Problem) -> Sequence[Any]:
        """The configurations, frozen dataclasses, in which this instance can run a problem that it supports.

        The first is the default, the choice of the heuristics. An instance with nothing to choose has None alone.
        """

    def plan(self, problem: Problem, config: Any = None) -> Plan:
        """A :class:`ForwardPlan`, or a :class:`BackwardPlan` where the problem is a backward; their kin with sums where
        something is added around the norm, and a :class:`QuantizedForwardPlan` where the output is quantized.

        Without ``config`` it has the default configuration.
        """


@dataclass(frozen=True, slots=True)
class Candidate:
    """An instance and, where it cannot run the problem at hand, why not."""

    instance: Instance
    reason: str | None


@dataclass(frozen=True, slots=True)
class Backend:
    """A kernel language: ``available`` is None, or why it cannot run here; ``details`` say what it found."""

    name: str
    available: str | None
    details: dict[str, str] = field(default_factory=dict)
