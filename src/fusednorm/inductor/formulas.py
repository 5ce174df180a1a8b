"""Formulas in the place of norms on a CPU whose calls do not pay, in a graph of forward and backward together.

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
from fusednorm.inductor.lowering import Direction
from fusednorm.inductor.neighbours import ALONE, Neighbours, calls_pay
from fusednorm.norm import norm_of_text
from fusednorm.private.inductor_names import VALUE, traced

#: Of the forwards that became formulas in a graph: from the node of rstd to that of the output.
Outputs = dict[Node, Node]


def expand(
    graph: Graph,
    node: Node,
    direction: Direction,
    arguments: tuple[Any, ...],
    outputs: Outputs,
    neighbours: Neighbours | None = None,
) -> bool:
    """Put the formula of a norm into the graph where that is faster than a call; whether it was.

    ``arguments`` are the lean op's, ``neighbours`` as :func:`calls_pay` takes them, None in a graph with a backward. An
    instance that the program asks for by name is never replaced.
    """
    *operands, text, last = arguments
    fakes = [None if operand is None else operand.meta.get(VALUE) for operand in operands]
    norm, present = norm_of_text(text), [fake for fake in fakes if fake is not None]
    if forced() is not None or len(present) != sum(operand is not None for operand in operands):
        return False
    if not all(_is_static(fake) and fake.device.type == "cpu" for fake in present):
        return False
    problem = direction.problem(norm, fakes, last)
    if problem.view.numel == 0 or not has_formula(problem) or calls_pay(problem, neighbours or ALONE):
        return False
    if neighbours is None and not has_right_gradients(problem):
        return False

    output = outputs.get(operands[3]) if problem.backward else None
    if output is not None:
        present.append(output.meta[VALUE])

    def formula(*present: Tensor) -> list[Tensor]:
        given = iter(present)
        tensors = [None if operand is None else next(given) for operand in operands]
        found = direction.formula(norm, tensors, next(given, None))
        return [present[0].new_empty(0) if tensor is None else tensor for tensor in found]

    made = traced(formula, present, present[0].fake_mode)
    nodes = [operand for operand in (*operands, output) if operand is not None]
    results = _splice(graph, node, made.graph, nodes)
    if not problem.backward:
        outputs[results[2]] = results[0]
    return True


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
