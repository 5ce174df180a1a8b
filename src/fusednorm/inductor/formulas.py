"""Formulas in the place of norms that ours do not make faster, in a graph of forward and backward together.

torch then decides, as for its own functions, what of a formula the backward reads from the forward.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fusednorm.choice import forced
from fusednorm.inductor.formula import has_formula, has_right_gradients
from fusednorm.inductor.lowering import Differentiable
from fusednorm.inductor.native import is_differentiable
from fusednorm.inductor.neighbours import ALONE, calls_pay, neighbours_of, training_pays
from fusednorm.norm import norm_of_text
from fusednorm.private.inductor_names import VALUE, traced
from fusednorm.problem import Problem

#: Of the forwards that became formulas in a graph: from the node of rstd to that of the output.
Outputs = dict[Node, Node]


def expand(
    graph: Graph, node: Node, direction: Differentiable, arguments: tuple[Any, ...], outputs: Outputs, trains: bool
) -> bool:
    """Put the formula of a norm into the graph where that is faster than our kernels; whether it was.

    ``arguments`` are the lean op's; ``trains`` says that the graph holds backwards. An instance that the program asks
    for by name is never replaced.
    """
    *operands, text, last = arguments
    fakes = [None if operand is None else operand.meta.get(VALUE) for operand in operands]
    norm, present = norm_of_text(text), [fake for fake in fakes if fake is not None]
    if forced() is not None or len(present) != sum(operand is not None for operand in operands):
        return False
    device = present[0].device
    if not all(_is_static(fake) and fake.device == device for fake in present):
        return False
    problem = direction.problem(norm, fakes, last)
    if problem.view.numel == 0:
        return False
    if device.type == "cpu" and _calls_lose(problem, node, trains):
        output = outputs.get(operands[3]) if problem.backward else None
    elif device.type == "cuda" and _launches_lose(problem, operands[direction.input], trains):
        output = None
    else:
        return False
    if output is not None:
        present.append(output.meta[VALUE])

    def formula(*present: Tensor) -> list[Tensor]:
        given = iter(present)
        tensors = [None if operand is None else next(given) for operand in operands]
        if device.type == "cpu":
            found = direction.formula(norm, tensors, next(given, None))
        else:
            found = direction.native(problem, tensors, last)
        return [present[0].new_empty(0) if tensor is None else tensor for tensor in found]

    made = traced(formula, present, present[0].fake_mode)
    nodes = [operand for operand in (*operands, output) if operand is not None]
    results = _splice(graph, node, made.graph, nodes)
    if not problem.backward:
        outputs[results[2]] = results[0]
    return True


def _calls_lose(problem: Problem, node: Node, trains: bool) -> bool:
    """Whether the formula is faster on a CPU, and right; forward and backward agree, which both depend on the problem
    alone."""
    if not has_formula(problem) or (trains and not has_right_gradients(problem)):
        return False
    return not calls_pay(problem, ALONE if trains else neighbours_of(node))


def _launches_lose(problem: Problem, input: Node, trains: bool) -> bool:
    """Whether torch's formula is faster on a GPU. Without a backward each forward is decided in its lowering."""
    return trains and is_differentiable(problem) and not training_pays(problem, input)


def _is_static(fake: Tensor) -> bool:
    return not any(isinstance(number, torch.SymInt) for number in (*fake.shape, *fake.stride()))


def _splice(graph: Graph, node: Node, made: Graph, operands: list[Node]) -> list[Node]:
    """Replace a node that is taken apart by a graph of its operands; the nodes of its results."""
    placeholders = iter(operands)
    copies: dict[Node, Node] = {}
    results: list[Node] = []
    with graph.inserting_before(node):
        for one in made.nodes:
            if one.op == "placeholder":
                copies[one] = next(placeholders)
            elif one.op == "output":
                results = [copies[result] for result in one.args[0]]
            else:
                copies[one] = graph.node_copy(one, lambda old: copies[old])
                copies[one].meta = {**node.meta, **one.meta}
    for user in list(node.users):
        assert user.target is operator.getitem
        result = results[user.args[1]]  # type: ignore[index]
        if result not in operands:
            result.meta[VALUE] = user.meta[VALUE]  # the strides that the rest of the graph was traced with
        user.replace_all_uses_with(result)
        graph.erase_node(user)
    graph.erase_node(node)
    return results
