"""From the lean ops to Inductor's code: on a GPU the launches of the plan, elsewhere one call.

A plan is made for the sizes and strides that the tensors have in Inductor, which may differ from those of the trace: it
gives convolutions, and what lies between them, the memory order that suits them. The plan then runs on fake tensors,
and what it allocates, copies and launches becomes part of the graph.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.fx import GraphModule

from fusednorm.choice import Choice, choose, forced
from fusednorm.compiled import call_backward, call_forward, call_sum_forward, sum_of
from fusednorm.copies import copying
from fusednorm.inductor import formula, native
from fusednorm.inductor.neighbours import Neighbours, neighbours_of, ours_pay, transposed_behind
from fusednorm.norm import Norm, norm_of_text
from fusednorm.operands import BackwardOperands, Gradients, Operands, Results, Sums
from fusednorm.private.inductor_names import Nodes
from fusednorm.problem import Problem
from fusednorm.problems import backward_direction, backward_problem, forward_problem, sum_forward_problem
from fusednorm.strides import is_dense

logger = logging.getLogger(__name__)

Tensors = Sequence[Tensor | None]


#: Why a graph of torch before 2.13 holds no launches.
NO_LAUNCHES = (
    "torch forgets for a backward that cpp_wrapper is an option of torch.compile, and launches nothing from C++ then; "
    "torch._inductor.config.cpp_wrapper = True is not forgotten"
)


class NotInlinedError(Exception):
    """A call that Inductor's code cannot hold as launches; the message says why."""


class Direction(Protocol):
    """An op, and the function that Python code calls: how many tensors they take, which of them is the input, and what
    their last argument means."""

    op: str
    function: Callable[..., Any]
    tensors: int
    input: int

    def problem(self, norm: Norm, tensors: Tensors, last: Any) -> Problem: ...

    def run(self, plan: Any, tensors: Tensors, last: Any) -> Tensors: ...


class Differentiable(Direction, Protocol):
    """One of the two directions that graphs have before autograd is done with them, and its formulas."""

    def formula(self, norm: Norm, tensors: Tensors, output: Tensor | None) -> Tensors: ...

    def native(self, problem: Problem, tensors: Tensors, last: Any) -> Tensors: ...


class Forward:
    """compiled_forward(input, weight, bias, scale, shift, mean, var, norm, statistics)"""

    op, function, tensors, input = "compiled_forward", staticmethod(call_forward), 7, 0

    def problem(self, norm: Norm, tensors: Tensors, statistics: bool) -> Problem:
        return forward_problem(norm, Operands(*tensors))  # type: ignore[arg-type]

    def run(self, plan: Any, tensors: Tensors, statistics: bool) -> Tensors:
        return _in_order(plan(Operands(*tensors), statistics))  # type: ignore[arg-type]

    def formula(self, norm: Norm, tensors: Tensors, output: Tensor | None) -> Tensors:
        return _in_order(formula.forward(norm, Operands(*tensors)))  # type: ignore[arg-type]

    def native(self, problem: Problem, tensors: Tensors, statistics: bool) -> Tensors:
        return _in_order(native.run(problem, Operands(*tensors)))  # type: ignore[arg-type]


class Backward:
    """compiled_backward(grad_output, input, mean, rstd, weight, bias, scale, shift, norm, output_mask)"""

    op, function, tensors, input = "compiled_backward", staticmethod(call_backward), 8, 1

    def problem(self, norm: Norm, tensors: Tensors, wanted: Any) -> Problem:
        return backward_problem(norm, BackwardOperands(*tensors), backward_direction(wanted))  # type: ignore[arg-type]

    def run(self, plan: Any, tensors: Tensors, wanted: Any) -> Tensors:
        return _in_order(plan(BackwardOperands(*tensors), tuple(wanted)))  # type: ignore[arg-type]

    def formula(self, norm: Norm, tensors: Tensors, output: Tensor | None) -> Tensors:
        return _in_order(formula.backward(norm, BackwardOperands(*tensors), output))  # type: ignore[arg-type]

    def native(self, problem: Problem, tensors: Tensors, wanted: Any) -> Tensors:
        return _in_order(native.run_backward(problem, BackwardOperands(*tensors), wanted))  # type: ignore[arg-type]


class SumForward:
    """compiled_sum_forward(input, pre_add, pre_bias, weight, bias, scale, shift, norm, wanted). Here ``wanted`` says
    too whether the sum may take the place of the input."""

    op, function, tensors, input = "compiled_sum_forward", staticmethod(call_sum_forward), 7, 0

    def problem(self, norm: Norm, tensors: Tensors, wanted: Any) -> Problem:
        input, pre_add, pre_bias, *parameters = tensors
        sums = Sums(pre_add, pre_bias=pre_bias)
        return sum_forward_problem(norm, Operands(input, *parameters), sums, wanted[1])  # type: ignore[arg-type]

    def run(self, plan: Any, tensors: Tensors, wanted: Any) -> Tensors:
        input, pre_add, pre_bias, *parameters = tensors
        statistics, keeps_sum, in_place = wanted
        # A sum is dense.
        out = input if keeps_sum and in_place and is_dense(input) else None  # type: ignore[arg-type]
        sums = Sums(pre_add, pre_bias=pre_bias)
        found = plan(Operands(input, *parameters), sums, statistics, sum_out=out)  # type: ignore[arg-type]
        return *_in_order(found), found.sum


def _in_order(found: Results | Gradients) -> Tensors:
    """The results of an op in the order of its schema."""
    if isinstance(found, Results):
        return found.output, found.mean, found.rstd, found.var
    return found.input, found.weight, found.bias, found.scale, found.shift


DIRECTIONS: tuple[Differentiable, ...] = (Forward(), Backward())
SUMS = SumForward()


@cache
def register() -> None:
    """Tell Inductor how the lean ops become code. Where it lacks a name that this needs, it calls them."""
    try:
        nodes = Nodes()
    except ImportError as error:
        logger.info("compiled graphs call the ops: %s", error)
        return
    for direction, lowering in (*((one, Lowering) for one in DIRECTIONS), (SUMS, SumLowering)):
        op = getattr(torch.ops.fusednorm, direction.op).default
        nodes.register(op, direction.function, lowering(nodes, direction, op))


class Placed(NamedTuple):
    """The operands of a call as nodes in memory, None for an absent one, and the problem that they make."""

    operands: list[Any]
    problem: Problem


class Lowering:
    """What makes nodes of an op's arguments."""

    def __init__(self, nodes: Nodes, direction: Direction, op: Any) -> None:
        self.nodes, self.direction, self.op = nodes, direction, op

    def __call__(self, *arguments: Any) -> Any:
        count = self.direction.tensors
        operands: Sequence[Any] = arguments[:count]
        text, last = arguments[count:]
        norm = norm_of_text(text)
        try:
            return self.inlined(norm, operands, last)
        except NotInlinedError as reason:
            logger.info("%s is a call in the compiled graph: %s", self.direction.op, reason)
            operands = self.settled(norm, operands)
        except Exception as error:  # a release of torch in which Inductor's names mean something else
            if forced() is not None:  # an instance that the program asks for by name never falls back
                raise
            logger.warning("%s is a call in the compiled graph: %s", self.direction.op, error, exc_info=True)
        return self.nodes.call(self.op, (*operands, text, last))

    def inlined(self, norm: Norm, operands: Sequence[Any], last: Any) -> Any:
        """The launches of the plan, among the graph's nodes."""
        device = self.nodes.device(operands[self.direction.input])
        if device.type != "cuda":
            raise NotInlinedError(f"it runs on {device.type}")
        if not self.nodes.can_launch():
            raise NotInlinedError(NO_LAUNCHES)
        if not all(operand is None or self.nodes.is_static(operand) for operand in operands):
            raise NotInlinedError("a size is not known when it is compiled")
        return self.code(norm, operands, last, neighbours_of(self.nodes.current.graph.current_node))

    def code(self, norm: Norm, operands: Sequence[Any], last: Any, neighbours: Neighbours) -> Any:
        """The launches, or torch's own formula, among these neighbours."""
        torchs = self.natively(norm, operands, last, neighbours)
        return self.launched(norm, operands, last) if torchs is None else torchs

    def launched(self, norm: Norm, operands: Sequence[Any], last: Any) -> Any:
        placed = self.placed(norm, operands, last)
        if placed.problem.view.numel == 0:
            raise NotInlinedError("it has no elements")
        chosen = choose(placed.problem, forced(), alone=False)
        if not chosen.name.startswith("triton."):
            raise NotInlinedError(f"it runs on the instance {chosen.name}")
        return self.inline(self.graph(chosen, placed, last), placed.operands)

    def in_last(self, norm: Norm) -> bool:
        """Whether Inductor prefers the input of the call at hand in channels_last, and that has its channels there."""
        source = self.nodes.current.graph.current_node.args[self.direction.input]
        return norm.channel_dim == 1 and not norm.row_family and self.nodes.wants_last(source)

    def foreseen(self, norm: Norm, operands: Sequence[Any], last: Any) -> Problem:
        """The problem that the operands will make in memory."""
        fakes = self.nodes.fakes(operands)
        fakes[self.direction.input] = self.nodes.foreseen(operands[self.direction.input], self.in_last(norm))
        return self.direction.problem(norm, fakes, last)

    def beside(self, problem: Problem, neighbours: Neighbours) -> Neighbours:
        """The neighbours in the memory order that Inductor gives convolutions in the graph at hand."""
        return transposed_behind(problem, neighbours) if self.nodes.convolves_last() else neighbours

    def natively(self, norm: Norm, operands: Sequence[Any], last: Any, neighbours: Neighbours) -> Any:
        """torch's own formula, which Inductor fuses with its neighbours, where that is faster; None elsewhere. An
        instance that the program asks for by name is never replaced."""
        direction = self.direction
        if not isinstance(direction, Forward) or forced() is not None:
            return None
        problem = self.foreseen(norm, operands, last)
        if problem.view.numel == 0 or not native.has_formula(problem, last):
            return None
        neighbours = self.beside(problem, neighbours)
        if ours_pay(problem, neighbours, choose(problem, alone=False).name):
            return None

        graph = self.traced(lambda tensors: direction.native(problem, tensors, last), operands)
        return self.inline(graph, operands)

    def traced(self, function: Callable[[Tensors], Tensors], operands: Sequence[Any]) -> GraphModule:
        """What a function of these operands does, each of which may be absent, as may be each of its results."""

        def run(*present: Tensor) -> list[Tensor]:
            given = iter(present)
            found = function([None if operand is None else next(given) for operand in operands])
            return [present[0].new_empty(0) if tensor is None else tensor for tensor in found]

        return self.nodes.trace(run, [fake for fake in self.nodes.fakes(operands) if fake is not None])

    def inline(self, graph: GraphModule, operands: Sequence[Any]) -> Any:
        """The results of a graph of those operands that are present."""
        return self.nodes.inline(graph, [operand for operand in operands if operand is not None])

    def settled(self, norm: Norm, operands: Sequence[Any]) -> list[Any]:
        """The operands in strides that stay. The input comes first: a gradient whose strides are free takes its
        order."""
        input = self.nodes.settled(operands[self.direction.input], last=self.in_last(norm))
        settled = [None if operand is None else self.nodes.settled(operand, input) for operand in operands]
        settled[self.direction.input] = input
        return settled

    def placed(self, norm: Norm, operands: Sequence[Any], last: Any) -> Placed:
        """The operands in memory, in an order that kernels read."""
        nodes, direction = self.nodes, self.direction
        settled = self.settled(norm, operands)
        problem = direction.problem(norm, nodes.fakes(settled), last)
        if "input" in problem.copies:  # an input in no memory order that kernels read is computed in another one
            input = settled[direction.input]
            settled[direction.input] = nodes.ordered(input, range(len(input.get_size()) - 1, -1, -1))
            problem = direction.problem(norm, nodes.fakes(settled), last)
        if "grad_output" in problem.copies:  # one copy for all launches: each would ask for its own
            settled[0] = nodes.ordered(settled[0], nodes.stride_order(problem.output_strides))
            problem = direction.problem(norm, nodes.fakes(settled), last)
        return Placed(settled, problem)

    def graph(self, chosen: Choice, placed: Placed, last: Any) -> GraphModule:
        """What the plan allocates, copies and launches."""
        from fusednorm.backends.triton.inlined import entry
        from fusednorm.backends.triton.launch import Launch, recorded

        def launch(launch: Launch, tensors: tuple[Tensor | None, ...]) -> None:
            kernel, given = entry(launch, tensors)
            warps = launch.options["num_warps"]
            torch.library.wrap_triton(kernel)[(launch.programs, 1, 1)](**given, num_warps=warps)

        def planned(tensors: Tensors) -> Tensors:
            plan = copying(chosen.plan(placed.problem), placed.problem)
            return self.direction.run(plan, tensors, last)

        with recorded(launch):
            return self.traced(planned, placed.operands)


class SumLowering(Lowering):
    """The same for a sum before a forward: launches that make both, or the sum as Inductor makes it and a forward."""

    def code(self, norm: Norm, operands: Sequence[Any], last: Any, neighbours: Neighbours) -> Any:
        statistics, keeps_sum = last
        problem = self.foreseen(norm, operands, last)
        if problem.view.numel == 0:
            raise NotInlinedError("it has no elements")
        source = self.nodes.current.graph.current_node.args[0]
        # What only this call reads is free once it was read.
        own = source.target is torch.ops.aten.convolution.default and len(source.users) == 1
        chosen = choose(problem, forced(), alone=False)
        fuses = chosen.name.startswith("triton.") and chosen.instance.supports(problem) is None
        around = self.beside(problem, replace(neighbours, before=0))
        if fuses and (not native.has_formula(problem, statistics) or ours_pay(problem, around, chosen.name)):
            return self.launched(norm, operands, (*last, own))
        terms, parameters = operands[:3], operands[3:]
        graph = self.traced(lambda tensors: [sum_of(*tensors)], terms)  # type: ignore[arg-type]
        (total,) = self.inline(graph, terms)
        forward = Lowering(self.nodes, DIRECTIONS[0], None)
        around = replace(neighbours, before=1 if keeps_sum else 2)
        found = forward.code(norm, (total, *parameters, None, None), statistics, around)
        return *found, total
