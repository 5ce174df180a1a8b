"""Which instances can run a call, which of them does, and whether memory or arithmetic bounds it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

from fusednorm import choice, functional
from fusednorm.dtypes import dtype_name
from fusednorm.formats import Quantized
from fusednorm.instance import Candidate
from fusednorm.machine.limits import copy_bandwidth, peak_flops
from fusednorm.modulation import in_samples
from fusednorm.norm import FAMILIES, Family, norm_of
from fusednorm.operands import BackwardOperands, Operands, Sums
from fusednorm.problem import Direction, Problem
from fusednorm.problems import backward_problem, forward_problem, quantized_problem, sum_forward_problem
from fusednorm.text import printable

Asked = Literal["forward", "backward", "backward_data", "backward_gamma_beta"]
ASKED: tuple[Asked, ...] = get_args(Asked)


@dataclass(frozen=True)
class Rejected:
    """An instance that cannot run the problem, and why."""

    instance: str
    reason: str


@dataclass(frozen=True)
class Explanation:
    """The instance, cost and limits of a call; ``print`` it, or read the fields.

    ``instance`` runs the call in the configuration ``config``, which is None where there is nothing to choose.
    ``bytes`` are the fewest that the operation can move, ``flops`` its floating-point operations, ``intensity`` flops
    per byte. ``copy_bandwidth`` (bytes/s) and ``peak_flops`` (flops/s) were measured in this process by a plain copy of
    about as many bytes and by a matrix product; ``balance`` is peak_flops / copy_bandwidth. Memory bounds a call of a
    lower intensity, arithmetic any other. ``least_seconds`` is the time of a plain copy of ``bytes``. ``copies`` names
    the tensors whose strides force a copy first. ``composed`` is None, or says why the sums around the norm are torch's
    own operators before and after the instance.
    """

    problem: Problem
    instance: str
    config: Any
    reason: str
    bytes: int
    flops: int
    copy_bandwidth: float
    peak_flops: float
    copies: tuple[str, ...]
    rejected: tuple[Rejected, ...]
    composed: str | None = None

    @property
    def intensity(self) -> float:
        return self.problem.intensity

    @property
    def balance(self) -> float:
        return self.peak_flops / self.copy_bandwidth

    @property
    def bound(self) -> Literal["memory", "compute"]:
        return "memory" if self.intensity <= self.balance else "compute"

    @property
    def least_seconds(self) -> float:
        return self.bytes / self.copy_bandwidth

    def __str__(self) -> str:
        problem, norm, view = self.problem, self.problem.norm, self.problem.view
        activation = f" + {norm.activation.name}" if norm.activation else ""
        modulation = " + scale and shift" if problem.modulated else ""
        lines = [
            f"{norm.family}{modulation}{activation}, {problem.direction}, {problem.dtype}{_target(problem)}, "
            f"{problem.layout.order} "
            f"on {problem.device}",
            f"  view       N {view.samples}, G {view.groups}, D {view.group_channels}, S {view.spatial}; "
            f"{problem.num_statistics} statistics over {problem.reduced} elements each",
            f"  instance   {self.instance}" + (f"  {self.config}" if self.config is not None else ""),
            f"  because    {self.reason}",
            f"  moves      {_quantity(self.bytes, 'B')} at the least, {_quantity(self.flops, 'flop')}: "
            f"{self.intensity:.2f} flop/B",
            f"  bound by   {self.bound}: this machine does {self.balance:.1f} flop/B "
            f"({_quantity(self.peak_flops, 'flop/s')}, {_quantity(self.copy_bandwidth, 'B/s')} measured)",
            f"  at best    {self.least_seconds * 1e3:.4g} ms, the time of a plain copy of these bytes",
            "  copies     "
            + (
                f"{', '.join(self.copies)}: strides that fit neither channels_first nor channels_last"
                if self.copies
                else "none"
            ),
        ]
        if problem.added is not None:
            names = ", ".join(problem.added.names)
            why = f"{names} by torch's operators: {self.instance} {self.composed}"
            lines.append(f"  fused      {names}" if self.composed is None else f"  composed   {why}")
        lines += [f"  not        {one.instance}: {one.reason}" for one in self.rejected]
        return "\n".join(lines)


def _target(problem: Problem) -> str:
    quantized = problem.quantized
    if quantized is None:
        return ""
    return f" to {quantized.dtype} by {'row' if quantized.per_row else 'a given scale'}"


def _quantity(value: float, unit: str) -> str:
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def _family(function: Callable[..., Any]) -> Family:
    name = getattr(function, "__name__", "")
    if name not in FAMILIES or getattr(functional, name, None) is not function:
        known = ", ".join(f"fusednorm.{family}" for family in FAMILIES)
        raise TypeError(f"function: {name or function!r} is no normalization of fusednorm; expected one of {known}")
    return cast(Family, name)


def _check(function: Callable[..., Any], bound: inspect.BoundArguments) -> None:
    """Raises as the call itself would for its shapes, dtypes and names; on meta tensors it computes nothing."""

    def meta(value: Any) -> Any:
        return torch.empty_like(value, device="meta") if isinstance(value, Tensor) else value

    function(*map(meta, bound.args), **{name: meta(value) for name, value in bound.kwargs.items()})


def problem_of_call(function: Callable[..., Any], *args: Any, direction: Asked = "forward", **kwargs: Any) -> Problem:
    """The Problem of a public call; a backward is that of the norm alone, and its grad_output is taken to have the
    input's strides."""
    family = _family(function)
    if direction not in ASKED:
        raise ValueError(f"direction: {direction!r} is unknown; expected one of {', '.join(ASKED)}")
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    _check(function, bound)
    given = bound.arguments
    training = bool(given.get("training", given.get("use_input_stats", True)))
    if not training:
        family = "batch_norm"  # instance_norm with running statistics is batch_norm's evaluation
    groups_or_dims, channel_dim = given.get("num_groups", 0), given["channel_dim"]
    operands = Operands(given["input"], given["weight"], given.get("bias"), given["scale"], given["shift"])
    if "normalized_shape" in given:
        groups_or_dims = 0 if channel_dim == 1 else len(given["normalized_shape"])
        if groups_or_dims and (operands.scale is not None or operands.shift is not None):
            operands, groups_or_dims = in_samples(family, operands, groups_or_dims), 0
        else:
            channel_dim = 1
    norm = norm_of(family, int(groups_or_dims), channel_dim, 0.0, given["activation"], training)
    if direction == "forward":
        sums = Sums(given["pre_add"], given["pre_gate"], given["post_add"], given["return_sum"])
        if given.get("out_dtype") is not None:
            by_row = not isinstance(given["out_scale"], Tensor)
            quantized = Quantized(dtype_name(given["out_dtype"]), by_row)
            return quantized_problem(norm, operands, sums if sums.keywords() else None, quantized)
        if sums.keywords():
            return sum_forward_problem(norm, operands, sums, sums.return_sum)
        return forward_problem(norm, operands)
    o, none = operands, torch.empty(0)
    grad_output = torch.empty_like(o.input, device="meta")
    backward = BackwardOperands(grad_output, o.input, none, none, o.weight, o.bias, o.scale, o.shift)
    return backward_problem(norm, backward, cast(Direction, direction))


def instances(function: Callable[..., Any], *args: Any, direction: Asked = "forward", **kwargs: Any) -> list[Candidate]:
    """Every instance, and where it cannot run the call, the reason.

    Args:
        function: a public function, e.g. ``fusednorm.group_norm``.
        *args, **kwargs: the arguments of the call; nothing is computed.
        direction: "forward", "backward", "backward_data" or "backward_gamma_beta".

    Returns:
        Candidates with ``instance.name`` and ``reason``: None, or why it cannot run the call, or fuse the sums around
        it, which torch's operators then form. The configurations of an instance that can are
        ``instance.configs(problem)``, where the problem is the one that :func:`explain` returns.

    Raises:
        TypeError: ``function`` is not a public function of fusednorm.
        ValueError, RuntimeError: as the call itself would.

    >>> import fusednorm
    >>> found = fusednorm.instances(fusednorm.layer_norm, torch.randn(4, 8), (8,))
    >>> "reference" in [candidate.instance.name for candidate in found]
    True
    """
    return choice.instances(problem_of_call(function, *args, direction=direction, **kwargs))


def explain(function: Callable[..., Any], *args: Any, direction: Asked = "forward", **kwargs: Any) -> Explanation:
    """Which instance runs a call and why, the bytes and flops, what bounds it, and the least time it can take.

    The machine's limits are measured at the first use, in about a second, and kept for the process, device and number
    of threads.

    Args:
        function: a public function, e.g. ``fusednorm.group_norm``.
        *args, **kwargs: the arguments of the call; it is not run.
        direction: "forward", "backward", "backward_data" or "backward_gamma_beta".

    Raises:
        TypeError: ``function`` is not a public function of fusednorm.
        ValueError, RuntimeError: as the call itself would, also where use_instance names one that cannot run it.

    >>> import fusednorm
    >>> found = fusednorm.explain(fusednorm.group_norm, torch.randn(2, 8, 4, 4), 4, activation="silu")
    >>> found.bytes, found.copies
    (2112, ())
    """
    problem = problem_of_call(function, *args, direction=direction, **kwargs)
    forced = choice.forced()
    chosen = choice.choose(replace(problem, added=None), forced, alone=problem.added is None)
    summary = (inspect.getdoc(type(chosen.instance)) or "").partition("\n")[0]
    asked = "asked for by use_instance" if forced else "the default for this problem"
    if chosen.tuned is not None:
        asked = f"{f'{asked}, ' if forced else ''}tuned in {printable(str(chosen.tuned.path), keep='')}"
    return Explanation(
        problem=problem,
        instance=chosen.name,
        config=chosen.instance.configs(problem)[0] if chosen.config is None else chosen.config,
        reason=f"{asked}; {summary}" if summary else asked,
        bytes=problem.bytes,
        flops=problem.flops,
        copy_bandwidth=copy_bandwidth(problem.bytes // 2, problem.device),
        peak_flops=peak_flops(problem.compute_dtype, problem.device),
        copies=problem.copies,
        composed=None if problem.added is None else chosen.instance.supports(problem),
        rejected=tuple(
            Rejected(candidate.instance.name, candidate.reason)
            for candidate in choice.instances(problem)
            if candidate.reason is not None
        ),
    )
