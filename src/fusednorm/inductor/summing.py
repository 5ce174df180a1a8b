"""Sums before a norm on a GPU that the norm's own kernels can make: of a tensor with the bias of the convolution that
made it, with a number for each channel of a sample, and with a tensor like it.

Inductor adds what no reduction of its own takes in a pass of its own over the tensor.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fusednorm.inductor.biases import BIAS, planes_of
from fusednorm.inductor.neighbours import is_pointwise
from fusednorm.norm import norm_of_text
from fusednorm.private.inductor_names import EXACT_ARGUMENTS, VALUE

aten = torch.ops.aten

#: What gives the numbers of one tensor another shape.
VIEWS = (aten.view.default, aten.reshape.default, aten.permute.default, aten.transpose.int, aten.unsqueeze.default)
#: The place of the sum among the results of a forward that makes one.
SUM = 4


@dataclass(frozen=True, slots=True)
class Summed:
    """The input of a norm, ``total``: a tensor in memory, ``base``, and ``added`` to it another one, or a number for
    each channel of a sample. ``biased`` are the convolutions among these whose biases the norm adds."""

    total: Node
    base: Node
    added: Node | None = None
    biased: tuple[Node, ...] = ()


def sum_before(norm: Node, text: str) -> Summed | None:
    """What is summed before a forward of the norm ``text``; None where our kernels cannot sum it, or where others read
    the sum before the norm does."""
    total = norm.args[0]
    assert isinstance(total, Node)
    value = planes_of(norm_of_text(text), total)
    if value is None or value.dim() < 3:
        return None
    if any(isinstance(size, torch.SymInt) for size in value.shape) or any(user < norm for user in total.users):
        return None
    if _has_bias(total):
        return Summed(total, total, biased=(total,))
    if total.target is not aten.add.Tensor or total.kwargs:
        return None
    terms = [term for term in total.args if isinstance(term, Node) and isinstance(term.meta.get(VALUE), Tensor)]
    if len(terms) != 2 or terms[0] is terms[1] or any(_value(term).dtype != value.dtype for term in terms):
        return None
    large = [term for term in terms if _value(term).shape == value.shape]
    # What Inductor computes with the sum need not be in memory at all.
    if not large or any(_is_computed(term) for term in large):
        return None
    biased = tuple(term for term in large if _has_bias(term))
    if any(len(term.users) > 1 for term in biased):
        return None
    base = (*biased, *large)[0]
    added = terms[1] if base is terms[0] else terms[0]
    of_channels = (value.shape[1], *(1,) * (value.dim() - 2))
    shapes = {tuple(value.shape), of_channels, (1, *of_channels), (value.shape[0], *of_channels)}
    return Summed(total, base, added, biased) if tuple(_value(added).shape) in shapes else None


def put_sum(graph: Graph, norm: Node, found: Summed, arguments: tuple[Any, ...]) -> None:
    """Replace a differentiable forward, whose lean op takes these arguments, and the sum before it by one op."""
    _, *parameters, text, statistics = arguments
    total = found.total
    keeps_sum = len(total.users) > 1
    bare = {convolution: _without_bias(graph, convolution) for convolution in found.biased}
    base, added, bias = bare.get(found.base, found.base), _added(graph, found, bare), _bias(graph, found)
    with graph.inserting_before(norm):
        lean = graph.call_function(
            torch.ops.fusednorm.compiled_sum_forward.default,
            (base, added, bias, *parameters[:4], text, [statistics, keeps_sum]),
        )
        lean.meta = {key: value for key, value in norm.meta.items() if key not in (EXACT_ARGUMENTS, VALUE)}
        lean.meta[VALUE] = (*norm.meta[VALUE], total.meta[VALUE])
        if keeps_sum:
            kept = graph.call_function(operator.getitem, (lean, SUM))
            kept.meta = dict(total.meta)
            total.replace_all_uses_with(kept, delete_user_cb=lambda user: user is not norm)
    norm.replace_all_uses_with(lean)
    graph.erase_node(norm)
    graph.erase_node(total)
    for convolution in found.biased:
        if convolution is not total:
            graph.erase_node(convolution)


def _without_bias(graph: Graph, convolution: Node) -> Node:
    """The same convolution without its bias."""
    arguments = [None if place == BIAS else argument for place, argument in enumerate(convolution.args)]
    with graph.inserting_before(convolution):
        bare = graph.call_function(aten.convolution.default, tuple(arguments))
    bare.meta = dict(convolution.meta)
    return bare


def _bias(graph: Graph, found: Summed) -> Node | None:
    """The sum of the convolutions' biases, in float32 where it is narrower."""
    biases: list[Any] = [convolution.args[BIAS] for convolution in found.biased]
    if len(biases) < 2:
        return biases[0] if biases else None
    one, other = biases
    with graph.inserting_before(found.total):
        if _value(one).dtype.itemsize < 4:
            value = _value(one).float()
            one = graph.call_function(torch.ops.prims.convert_element_type.default, (one, torch.float32))
            one.meta[VALUE] = value
        bias = graph.call_function(aten.add.Tensor, (one, other))
        bias.meta[VALUE] = _value(one) + _value(other)
    return bias


def _added(graph: Graph, found: Summed, bare: dict[Node, Node]) -> Node | None:
    """What is added, as large as the input or (N, C)."""
    added = found.added
    shape = _value(found.total).shape
    if added is None:
        return None
    if _value(added).shape == shape:
        return bare.get(added, added)
    with graph.inserting_before(found.total):
        for target, sizes in ((aten.reshape.default, [-1, shape[1]]), (aten.expand.default, [shape[0], shape[1]])):
            value = target(added.meta[VALUE], sizes)
            added = graph.call_function(target, (added, sizes))
            added.meta[VALUE] = value
    return added


def _is_computed(node: Node) -> bool:
    """Whether Inductor computes a term together with its sum, as what nothing else reads of it."""
    while node.target in VIEWS and len(node.users) == 1:
        node = node.args[0]  # type: ignore[assignment]
    return is_pointwise(node) and len(node.users) == 1


def _has_bias(node: Node) -> bool:
    return node.target is aten.convolution.default and node.args[BIAS] is not None


def _value(node: Node) -> Tensor:
    value: Tensor = node.meta[VALUE]
    return value
