"""Which instance runs a problem, and the plans that have been made.

``run_forward`` and ``run_backward`` are what the operators call: they turn tensors into a Problem, the Problem into a
plan, and remember the plan by everything that it depends on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fusednorm.activations import Activation
from fusednorm.arguments import activation_of
from fusednorm.backends import reference
from fusednorm.instance import Backend, Candidate, CompilationError, Instance
from fusednorm.problem import Direction, Family, Layout, Problem, layout_of, view_of
from fusednorm.strides import empty_output, is_dense

logger = logging.getLogger(__name__)

Plan = Callable[..., tuple[Any, ...]]

MOST_PLANS = 4096  # a program with more shapes than this pays for planning again

_forced: ContextVar[str | None] = ContextVar("fusednorm_instance", default=None)
_plans: dict[Any, Plan] = {}


# --- instances ---


def all_instances() -> tuple[Instance, ...]:
    """Every instance of every backend, the fastest backends first."""
    from fusednorm.backends.cpu.instances import INSTANCES
    from fusednorm.backends.triton.instances import INSTANCES as TRITON

    return (*TRITON, *INSTANCES, reference.INSTANCE)


def instances(problem: Problem) -> list[Candidate]:
    """Every instance, each with None or the reason why it cannot run the problem."""
    return [Candidate(instance, instance.supports(problem)) for instance in all_instances()]


def choose(problem: Problem, name: str | None = None) -> Instance:
    """The instance that runs a problem: the named one, or the default, a pure function of the problem.

    Raises ValueError for a name that does not exist and RuntimeError where the named instance cannot run the problem.
    """
    if name is not None:
        for instance in all_instances():
            if instance.name == name:
                reason = instance.supports(problem)
                if reason is not None:
                    raise RuntimeError(f"the instance {name!r} cannot run this problem: {reason}")
                return instance
        known = ", ".join(instance.name for instance in all_instances())
        raise ValueError(f"instance: {name!r} does not exist; expected one of {known}")
    if problem.constant:
        return reference.INSTANCE
    if problem.device == "cpu":
        from fusednorm.backends.cpu import instances as cpu

        if cpu.unavailable() is None:
            chosen: Instance = cpu.choose(problem)
            return chosen
    elif problem.device == "cuda":
        from fusednorm.backends.triton import instances as triton

        if triton.unavailable() is None:
            chosen = triton.choose(problem)
            return chosen
    return reference.INSTANCE


@contextmanager
def use_instance(name: str) -> Iterator[None]:
    """Run every call inside on the instance of this name; a call that it cannot run raises, nothing falls back.

    >>> import fusednorm, torch
    >>> with fusednorm.use_instance("reference"):
    ...     y = fusednorm.group_norm(torch.randn(2, 8, 4), 4)
    """
    known = [instance.name for instance in all_instances()]
    if name not in known:
        raise ValueError(f"use_instance: {name!r} does not exist; expected one of {', '.join(known)}")
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


def backends() -> list[Backend]:
    """Every backend, whether it can run here, and what it found."""
    from fusednorm.backends.cpu import instances as cpu

    reason = cpu.unavailable()
    details = {}
    if reason is None:
        from fusednorm.backends.cpu import compiler, memory

        details = compiler.describe_caches() | {"buffer cache": memory.describe()}
    from fusednorm.backends.triton import instances as triton

    return [
        Backend("triton", triton.unavailable(), {"AMD": "compiled and interpreted in the tests, not run"}),
        Backend("cpu", reason, details),
        Backend("reference", None, {"runs": "any device, in plain torch"}),
    ]


# --- problems ---


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype_name(operand: Tensor | None) -> str | None:
    return None if operand is None else _name(operand.dtype)


def _strides(input: Tensor, family: Family, num_groups: int, channel_dim: int) -> tuple[Layout | None, tuple[int, ...]]:
    """The input's native layout and the output's strides."""
    layout = layout_of(family, input.shape, input.stride(), num_groups, channel_dim)
    if input.numel() and is_dense(input):
        return layout, input.stride()
    # Not input.to("meta"), which gives a tensor with holes other strides. The first operator on a meta tensor imports
    # sympy, 0.3 s, which is why a dense input does without.
    meta = torch.empty_strided(input.shape, input.stride(), dtype=input.dtype, device="meta")
    return layout, empty_output(meta, family, num_groups, channel_dim).stride()


def _problem(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    family: Family,
    num_groups: int,
    channel_dim: int,
    activation: Activation | None,
    direction: Direction,
    training: bool = True,
    grad_output: Tensor | None = None,
) -> Problem:
    shape, copies = tuple(input.shape), []
    layout, output_strides = _strides(input, family, num_groups, channel_dim)
    like = input.stride()
    if layout is None:
        copies.append("input")
        dense = torch.empty(shape, device="meta", dtype=input.dtype)
        layout, output_strides = _strides(dense, family, num_groups, channel_dim)
        like = dense.stride()
        assert layout is not None
    view = (num_groups, channel_dim, like, layout.order)
    # Without elements no stride means anything, and torch gives any.
    output_layout = layout if 0 in shape else layout_of(family, shape, output_strides, *view)
    assert output_layout is not None
    grad_layout = None
    if grad_output is not None:
        grad_layout = layout if 0 in shape else layout_of(family, shape, grad_output.stride(), *view)
        if grad_layout is None:
            copies.append("grad_output")
            grad_layout = output_layout
    return Problem(
        family=family,
        direction=direction,
        view=view_of(family, shape, num_groups, channel_dim),
        layout=layout,
        dtype=_name(input.dtype),
        activation=activation,
        weight_dtype=_dtype_name(weight),
        bias_dtype=_dtype_name(bias),
        scale_dtype=_dtype_name(scale),
        shift_dtype=_dtype_name(shift),
        training=training,
        device=input.device.type,
        num_groups=num_groups,
        channel_dim=channel_dim,
        shape=shape,
        output_strides=output_strides,
        output_layout=output_layout,
        grad_layout=grad_layout,
        dense=output_strides == input.stride(),
        copies=tuple(copies),
    )


def forward_problem(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    family: Family,
    num_groups: int,
    channel_dim: int,
    activation: Activation | None,
    inference: bool = False,
) -> Problem:
    """The Problem of a forward call; ``inference`` where mean and variance are given."""
    direction: Direction = "inference" if inference else "forward"
    return _problem(input, weight, bias, scale, shift, family, num_groups, channel_dim, activation, direction)


def backward_problem(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    family: Family,
    num_groups: int,
    channel_dim: int,
    activation: Activation | None,
    training: bool = True,
    direction: Direction = "backward",
) -> Problem:
    """The Problem of a backward call."""
    return _problem(
        input, weight, bias, scale, shift, family, num_groups, channel_dim, activation, direction, training, grad_output
    )


# --- plans ---


@cache
def _warn_once(message: str) -> None:
    logger.warning("%s", message)


def make_plan(problem: Problem, name: str | None = None) -> Plan:
    """A plan of the problem on the named instance, or on the default one; raises as :func:`choose` does.

    Where a kernel of the default instance cannot be compiled, the reference runs and a warning says why.
    """
    try:
        plan = choose(problem, name).plan(problem)
    except CompilationError as error:
        if name is not None:
            raise
        _warn_once(f"{error}; calls that need it run on the reference, in plain torch")
        plan = reference.INSTANCE.plan(problem)
    if not problem.copies:
        return plan
    native = _native_backward if problem.backward else _native_forward
    return native(plan, problem)


def _native_forward(plan: Plan, problem: Problem) -> Plan:
    """A forward plan for an input whose strides fit neither memory order: it runs on a contiguous copy."""

    def run(input: Tensor, *arguments: Any, saved_in: Any = (None, None)) -> tuple[Any, ...]:
        *parameters, out, statistics = arguments
        output, *saved = plan(input.contiguous(), *parameters, None, statistics, saved_in)
        if out is None:
            out = empty_output(input, problem.family, problem.num_groups, problem.channel_dim)
        return out.copy_(output), *saved

    return run


def _native_backward(plan: Plan, problem: Problem) -> Plan:
    """A backward plan that first copies the tensors that `problem.copies` names into the order of the others."""

    def run(grad_output: Tensor, input: Tensor, *arguments: Any, out: Tensor | None = None) -> tuple[Any, ...]:
        original = input
        if "input" in problem.copies:
            input = input.contiguous()
        if "grad_output" in problem.copies:
            dense = torch.empty_strided(
                problem.shape, problem.output_strides, dtype=grad_output.dtype, device=grad_output.device
            )
            grad_output = dense.copy_(grad_output)
        copied = "input" in problem.copies
        grad_input, *grads = plan(grad_output, input, *arguments, out=None if copied else out)
        if copied and grad_input is not None and problem.direction != "backward_gamma_beta":
            if out is None:
                out = empty_output(original, problem.family, problem.num_groups, problem.channel_dim)
            grad_input = out.copy_(grad_input)
        return grad_input, *grads

    return run


def _remember(key: Any, plan: Plan) -> Plan:
    if len(_plans) >= MOST_PLANS:
        _plans.clear()
    _plans[key] = plan
    return plan


def run_forward(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    family: Family,
    num_groups: int,
    channel_dim: int,
    eps: float,
    activation: str,
    parameter: float,
    out: Tensor | None = None,
    statistics: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """(output, mean, rstd, var) of a forward whose arguments were checked; ``out`` receives the output.

    mean is None for rms_norm, var but for the training of batch_norm and instance_norm, and without ``statistics`` all
    three may be.
    """
    forced = _forced.get()
    key = (
        family, input.shape, input.stride(), input.dtype, input.device, num_groups, channel_dim, activation, parameter,
        None if weight is None else weight.dtype, None if bias is None else bias.dtype,
        None if scale is None else scale.dtype, None if shift is None else shift.dtype, mean is None, forced,
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        problem = forward_problem(
            input, weight, bias, scale, shift, family, num_groups, channel_dim, activation_of(activation, parameter),
            mean is not None,
        )  # fmt: skip
        plan = _remember(key, make_plan(problem, forced))
    return plan(input, weight, bias, scale, shift, mean, var, eps, out, statistics)


def run_backward(
    grad_output: Tensor,
    input: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    family: Family,
    num_groups: int,
    channel_dim: int,
    activation: str,
    parameter: float,
    training: bool,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of input, weight, bias, scale and shift that output_mask asks for, the others empty or None."""
    forced = _forced.get()
    wants_parameters = output_mask[1] or output_mask[2] or output_mask[3] or output_mask[4]
    direction: Direction = "backward"
    if not output_mask[0]:
        direction = "backward_gamma_beta"
    elif not wants_parameters:
        direction = "backward_data"
    key = (
        direction, family, input.shape, input.stride(), grad_output.stride(), input.dtype, input.device, num_groups,
        channel_dim, activation, parameter, training, None if weight is None else weight.dtype,
        None if bias is None else bias.dtype, None if scale is None else scale.dtype,
        None if shift is None else shift.dtype, forced,
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        problem = backward_problem(
            grad_output, input, weight, bias, scale, shift, family, num_groups, channel_dim,
            activation_of(activation, parameter), training, direction,
        )  # fmt: skip
        plan = _remember(key, make_plan(problem, forced))
    return plan(grad_output, input, mean, rstd, weight, bias, scale, shift, output_mask)
