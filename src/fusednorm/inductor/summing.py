"""Sums before a norm on a GPU that the norm's own kernels can make: the bias of the convolution that makes its input, a
number for each channel of a sample, or a tensor as large as the input.

Inductor adds what no reduction of its own takes in a pass of its own over the tensor.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fusednorm.inductor.biases import BIAS
from fusednorm.inductor.neighbours import is_pointwise
from fusednorm.norm import norm_of_text
from fusednorm.private.inductor_names import EXACT_ARGUMENTS, VALUE, traced

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Summed:
    """The input of a norm, ``total``, as a sum of a tensor in memory and of ``added``: one like it, or one of (N, C).

    ``without_bias`` is the convolution whose bias is part of ``added``, and is then computed without it."""

    total: Node
    base: Node
    added: tuple[Node, ...]
    without_bias: bool = False


def sum_before(norm: Node, text: str) -> Summed | None:
    """What is summed before a forward of the norm ``text``; None where our kernels cannot sum it, or where others read
    the sum before the norm does."""
    total = norm.args[0]
    assert isinstance(total, Node)
    value, called = total.meta.get(VALUE), norm_of_text(text)
    of_planes = called.training and called.channel_dim == 1 and not (called.row_family or called.per_position)
    if not of_planes or not isinstance(value, Tensor) or value.device.type != "cuda" or value.dim() < 3:
        return None
    if any(isinstance(size, torch.SymInt) for size in value.shape) or any(user < norm for user in total.users):
        return None
    if total.target is aten.convolution.default and total.args[BIAS] is not None:
        return Summed(total, total, (total.args[BIAS],), True)  # type: ignore[arg-type]
    if total.target is not aten.add.Tensor or total.kwargs:
        return None
    terms = [term for term in total.args if isinstance(term, Node) and isinstance(term.meta.get(VALUE), Tensor)]
    if len(terms) != 2 or terms[0] is terms[1]:
        return None
    large = [term for term in terms if _value(term).shape == value.shape]
    if any(_value(term).dtype != value.dtype for term in terms) or any(is_pointwise(term) for term in large):
        return None
    if len(large) == 2:
        biased = any(term.target is aten.convolution.default and term.args[BIAS] is not None for term in large)
        return None if biased else Summed(total, large[0], (large[1],))
    (base,) = large
    small = terms[1] if base is terms[0] else terms[0]
    of_channels = (value.shape[1], *(1,) * (value.dim() - 2))
    if tuple(_value(small).shape) not in {of_channels, (1, *of_channels), (value.shape[0], *of_channels)}:
        return None
    biased = base.target is aten.convolution.default and base.args[BIAS] is not None and len(base.users) == 1
    return Summed(total, base, (small, base.args[BIAS]) if biased else (small,), biased)  # type: ignore[arg-type]


def put_sum(graph: Graph, norm: Node, found: Summed, arguments: tuple[Any, ...]) -> None:
    """Replace a differentiable forward, whose lean op takes these arguments, and the sum before it by one op."""
    base, added = _terms(graph, found)
    _, *parameters, text, statistics = arguments
    total = found.total
    keeps_sum = len(total.users) > 1
    with graph.inserting_before(norm):
        lean = graph.call_function(
            torch.ops.fusednorm.compiled_sum_forward.default,
            (base, added, *parameters[:4], text, [statistics, keeps_sum]),
        )
        lean.meta = {key: value for key, value in norm.meta.items() if key not in (EXACT_ARGUMENTS, VALUE)}
        lean.meta[VALUE] = (*norm.meta[VALUE], total.meta[VALUE])
        if keeps_sum:
            kept = graph.call_function(operator.getitem, (lean, 4))
            kept.meta = dict(total.meta)
            total.replace_all_uses_with(kept, delete_user_cb=lambda user: user is not norm)
    norm.replace_all_uses_with(lean)
    graph.erase_node(norm)
    graph.erase_node(total)


def _terms(graph: Graph, found: Summed) -> tuple[Node, Node]:
    """The nodes of the tensor in memory and of what is added to it."""
    base = found.base
    if found.without_bias:
        arguments = [None if place == BIAS else argument for place, argument in enumerate(base.args)]
        with graph.inserting_before(base):
            bare = graph.call_function(aten.convolution.default, tuple(arguments))
        bare.meta = dict(base.meta)
        base = bare
    value = _value(found.total)
    if found.added and _value(found.added[0]).shape == value.shape:
        return base, found.added[0]
    return base, _numbers(graph, found, value)


def _numbers(graph: Graph, found: Summed, value: Tensor) -> Node:
    """What is added to each channel of a sample, (N, C)."""
    samples, channels = value.shape[:2]

    def numbers(*terms: Tensor) -> Tensor:
        total, *others = [term.reshape(-1, channels) for term in terms]
        for other in others:
            total = total.float() + other if total.dtype != torch.float64 else total + other
        return total.expand(samples, channels)

    fakes = [_value(term) for term in found.added]
    made = traced(numbers, fakes, value.fake_mode)  # type: ignore[attr-defined]
    placeholders, copies = iter(found.added), dict[Node, Node]()
    with graph.inserting_before(found.total):
        for one in made.graph.nodes:
            if one.op == "placeholder":
                copies[one] = next(placeholders)
            elif one.op == "output":
                return copies[one.args[0]]
            else:
                copies[one] = graph.node_copy(one, lambda old: copies[old])
    raise AssertionError("a traced graph has an output")


def _value(node: Any) -> Tensor:
    value: Tensor = node.meta[VALUE]
    return value
