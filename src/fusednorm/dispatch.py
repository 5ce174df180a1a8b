"""From a call to its plan, which is made once and kept under everything that it depends on."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache
from typing import Any

from torch import Tensor

from fusednorm.backends import reference
from fusednorm.choice import choose, forced, selection, spread
from fusednorm.copies import copying
from fusednorm.formats import Quantized
from fusednorm.instance import (
    CompilationError,
    QuantizedForwardPlan,
    SpreadBackwardPlan,
    SpreadForwardPlan,
    SumBackwardPlan,
    SumForwardPlan,
)
from fusednorm.norm import Norm
from fusednorm.operands import BackwardOperands, Gated, Gradients, Operands, Results, Sums, Wanted
from fusednorm.problem import Problem
from fusednorm.problems import (
    backward_direction,
    backward_problem,
    forward_problem,
    quantized_problem,
    sum_backward_problem,
    sum_forward_problem,
)

logger = logging.getLogger(__name__)

MOST_PLANS = 4096  # a program with more shapes than this pays for planning again

# Each value is a ForwardPlan or a BackwardPlan, as its key says; a cast would be one more call for every operation.
_plans: dict[tuple[object, ...], Any] = {}


@cache
def _warn_once(message: str) -> None:
    logger.warning("%s", message)


def make_plan(problem: Problem, name: str | None = None) -> Any:
    """A plan of the problem on the named instance, or on the tuned or default one; raises as :func:`choose` does.

    Where a kernel of an instance without a name cannot be compiled, the reference runs and a warning says why.
    """
    try:
        plan = choose(problem, name).plan(problem)
    except CompilationError as error:
        if name is not None:
            raise
        _warn_once(f"{error}; calls that need it run on the reference, in plain torch")
        plan = reference.INSTANCE.plan(problem)
    return copying(plan, problem)


def _keep(key: tuple[object, ...], problem: Problem) -> Any:
    return _kept(key, make_plan(problem, forced()))


def _kept(key: tuple[object, ...], plan: Any) -> Any:
    if len(_plans) >= MOST_PLANS:
        _plans.clear()
    _plans[key] = plan
    return plan


def forward_plan(norm: Norm, operands: Operands) -> Any:
    """The ForwardPlan of checked operands."""
    selected = selection()
    input, weight, bias, scale, shift = operands.input, operands.weight, operands.bias, operands.scale, operands.shift
    key = (
        norm, input.shape, input.stride(), input.dtype, input.device,
        None if weight is None else weight.dtype, None if bias is None else bias.dtype,
        None if scale is None else scale.dtype, None if shift is None else shift.dtype, selected,
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        plan = _keep(key, forward_problem(norm, operands))
    return plan


def forward(norm: Norm, operands: Operands, wants_statistics: bool = True) -> Results:
    """Run a forward of checked operands; without ``wants_statistics`` every result but the output may be None."""
    results: Results = forward_plan(norm, operands)(operands, wants_statistics)
    return results


def backward_plan(norm: Norm, operands: BackwardOperands, wanted: Wanted) -> Any:
    """The BackwardPlan of checked operands."""
    selected = selection()
    direction = backward_direction(wanted)
    input, weight, bias, scale, shift = operands.input, operands.weight, operands.bias, operands.scale, operands.shift
    key = (
        direction, norm, input.shape, input.stride(), operands.grad_output.stride(), input.dtype, input.device,
        None if weight is None else weight.dtype, None if bias is None else bias.dtype,
        None if scale is None else scale.dtype, None if shift is None else shift.dtype, selected,
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        plan = _keep(key, backward_problem(norm, operands, direction))
    return plan


def backward(norm: Norm, operands: BackwardOperands, wanted: Wanted) -> Gradients:
    """Run a backward of checked operands."""
    gradients: Gradients = backward_plan(norm, operands, wanted)(operands, wanted)
    return gradients


# --- inputs that are spread over processes ---


def spread_forward_plan(norm: Norm, operands: Operands) -> SpreadForwardPlan | None:
    """The plan of a forward of this process's part; None where no instance has one."""
    input = operands.input
    key = ("spread", norm, _described(input), input.device, *_parameter_dtypes(operands), forced())
    return _spread_plan(key, forward_problem, norm, operands)


def spread_backward_plan(norm: Norm, operands: BackwardOperands) -> SpreadBackwardPlan | None:
    """The plan of a backward of this process's part; None where no instance has one."""
    input, strides = operands.input, operands.grad_output.stride()
    key = ("spread", norm, strides, _described(input), input.device, *_parameter_dtypes(operands), forced())
    return _spread_plan(key, backward_problem, norm, operands)


def _spread_plan(key: tuple[object, ...], problem: Any, norm: Norm, operands: Any) -> Any:
    try:
        return _plans[key]
    except KeyError:
        return _kept(key, spread(problem(norm, operands), forced()))


# --- sums around a norm ---


def _sum_plan(key: tuple[object, ...], problem: Problem) -> Any:
    """The plan, kept, of the instance that the problem gets; None where that does not fuse its sums."""
    choice = choose(problem if problem.quantized is None else replace(problem, added=None), forced())
    plan = None
    if choice.instance.supports(problem) is None:
        try:
            plan = choice.plan(problem)
        except CompilationError as error:
            if forced() is not None:
                raise
            _warn_once(f"{error}; calls that need it are composed of torch's sums")
    return _kept(key, plan)


def _described(tensor: Tensor | None) -> object:
    return None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype)


def _parameter_dtypes(operands: Operands | BackwardOperands) -> tuple[object, ...]:
    parameters = (operands.weight, operands.bias, operands.scale, operands.shift)
    return tuple(None if tensor is None else tensor.dtype for tensor in parameters)


def sum_forward_plan(norm: Norm, operands: Operands, sums: Sums, keeps_sum: bool) -> SumForwardPlan | None:
    """The plan of a forward of checked operands with sums around it, which returns s where ``keeps_sum`` says so; None
    where nothing fuses them."""
    input = operands.input
    key = (
        "sums", norm, _described(input), input.device, *_parameter_dtypes(operands), _described(sums.pre_add),
        _described(sums.pre_gate), _described(sums.pre_bias), _described(sums.post_add), keeps_sum, selection(),
    )  # fmt: skip
    found: SumForwardPlan | None
    try:
        found = _plans[key]
    except KeyError:
        found = _sum_plan(key, sum_forward_problem(norm, operands, sums, keeps_sum))
    return found


def sum_backward_plan(
    norm: Norm,
    operands: BackwardOperands,
    wanted: Wanted,
    behind: Tensor | None,
    grad_sum: bool,
    gated: Gated | None = None,
    grad_numbers: bool = False,
) -> SumBackwardPlan | None:
    """The plan of a backward whose input is s, as :func:`fusednorm.problems.sum_backward_problem` says it."""
    input, direction, product = operands.input, backward_direction(wanted), None
    if gated is not None:
        product = _described(gated.pre_gate), _described(gated.pre_add), gated.wants_pre_add
    key = (
        "sums", direction, norm, _described(input), operands.grad_output.stride(), input.device,
        *_parameter_dtypes(operands), _described(behind), grad_sum, product, grad_numbers, selection(),
    )  # fmt: skip
    found: SumBackwardPlan | None
    try:
        found = _plans[key]
    except KeyError:
        problem = sum_backward_problem(norm, operands, direction, behind, grad_sum, gated, grad_numbers)
        found = _sum_plan(key, problem)
    return found


# --- quantized outputs ---


def quantized_plan(
    norm: Norm, operands: Operands, sums: Sums | None, quantized: Quantized
) -> QuantizedForwardPlan | None:
    """The plan of a forward of checked operands with a quantized output; None where nothing fuses the sums."""
    input = operands.input
    added = () if sums is None else (_described(sums.pre_add), _described(sums.pre_gate))
    key = (
        quantized, norm, _described(input), input.device, *_parameter_dtypes(operands), *added, selection(),
    )  # fmt: skip
    found: QuantizedForwardPlan | None
    try:
        found = _plans[key]
    except KeyError:
        problem = quantized_problem(norm, operands, sums, quantized)
        found = _keep(key, problem) if sums is None else _sum_plan(key, problem)
    return found


def quantized_forward(norm: Norm, operands: Operands, quantized: Quantized, out_scale: Tensor | None) -> Results:
    """Run a forward of checked operands with a quantized output."""
    plan = quantized_plan(norm, operands, None, quantized)
    assert plan is not None
    return plan(operands, None, out_scale)
