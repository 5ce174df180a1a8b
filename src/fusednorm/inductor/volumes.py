"""Convolutions of volumes in channels_last, as Inductor has those of images whatever the program has.

The matrix units of a GPU read 16-bit volumes in channels_last: cuDNN transposes any other before a convolution, and its
result behind it. Here a graph's convolutions get their tensors in that order, and all that is computed from the results
follows; a norm of ours, unlike most of Inductor's kernels, is as fast in one order as in the other. What the program
gets back keeps the strides that it had.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fusednorm.inductor.biases import DEVICE
from fusednorm.norm import norm_of_text
from fusednorm.private.inductor_names import NEW_SIZES, VALUE, orders_convolutions

logger = logging.getLogger(__name__)
aten = torch.ops.aten

LAST = torch.channels_last_3d
#: What the matrix units read that have one order alone.
DTYPES = (torch.float16, torch.bfloat16)
#: Ours that have an input of images, and its place.
NORMS = {
    torch.ops.fusednorm.compiled_forward.default: 0,
    torch.ops.fusednorm.compiled_sum_forward.default: 0,
    torch.ops.fusednorm.compiled_backward.default: 1,
}
#: The ops, and how many tensors each takes, of which the weight is the last, and the place of its number of groups.
TENSORS, GROUPS = {aten.convolution.default: 2, aten.convolution_backward.default: 3}, {2: 8, 3: 9}


class Step(NamedTuple):
    """An op on one tensor, with its other arguments."""

    op: Any
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]

    def of(self, value: Tensor) -> Tensor:
        result: Tensor = self.op(value, *self.arguments, **self.keywords)
        return result


def place_last(graph: Graph) -> None:
    """Let a graph's convolutions of volumes, with norms of ours among them, have channels_last, if it suits all."""
    if not orders_convolutions() or not any(_is_of_volumes(node) for node in graph.nodes):
        return
    convolutions = [node for op in TENSORS for node in graph.find_nodes(op="call_function", target=op)]
    found = [node for node in convolutions if _tensors(node)[-1].dim() in (0, 5)]  # an unknown one suits nothing
    if not found or not all(_suits(node) for node in found):
        return
    try:
        values, changes = _values(graph, found)
    except Exception as error:  # such as that of a view which other strides do not have
        logger.info("the convolutions of volumes keep their order of memory: %s", error)
        return
    for node, value in values.items():
        node.meta[VALUE] = value
    for node, place, step in changes:
        _put(graph, node, place, step)


def _is_of_volumes(node: Node) -> bool:
    """Whether a node is a norm of ours of volumes with their channels, or its backward."""
    if node.target not in NORMS:
        return False
    input, norm = _value(node.args[NORMS[node.target]]), norm_of_text(node.args[-2])  # type: ignore[arg-type]
    return bool(input.dim() == 5 and norm.channel_dim == 1 and not norm.row_family)


def _suits(node: Node) -> bool:
    """Whether a convolution takes volumes of 16 bits and known sizes, all channels of each, on a GPU."""
    tensors = _tensors(node)
    known = not any(isinstance(size, torch.SymInt) for tensor in tensors for size in tensor.shape)
    volumes = all(tensor.dtype in DTYPES and tensor.dim() == 5 for tensor in tensors)
    return bool(known and volumes and tensors[0].device.type == DEVICE and node.args[GROUPS[len(tensors)]] == 1)


def _tensors(node: Node) -> list[Tensor]:
    """What a convolution takes, the weight last."""
    return [_value(argument) for argument in node.args[: TENSORS[node.target]]]  # type: ignore[index]


def _value(node: Any) -> Tensor:
    """A node's value; a number, which is no volume, where none is known."""
    value = node.meta.get(VALUE)
    return value if isinstance(value, Tensor) else torch.empty((), device="meta")


def _values(graph: Graph, convolutions: list[Node]) -> tuple[dict[Node, Any], list[tuple[Node, int, Step]]]:
    """The values of the nodes that get others, and what changes the arguments of convolutions, each by its place."""
    values: dict[Node, Any] = {}
    changes: list[tuple[Node, int, Step]] = []

    def value(node: Node) -> Any:
        return values.get(node, node.meta.get(VALUE))

    with convolutions[0].args[0].meta[VALUE].fake_mode:  # type: ignore[union-attr]
        for node in graph.nodes:
            convolves = node in convolutions
            follows = any(source in values for source in node.all_input_nodes)
            if node.op != "call_function" or not (follows or convolves):
                continue
            if node.meta.get(NEW_SIZES):
                raise ValueError(f"{node} has sizes that its numbers say")
            arguments = list(map_arg(node.args, value))
            for place in range(TENSORS[node.target] if convolves else 0):
                step = _step(node, place, arguments[place])
                if step is not None:
                    changes.append((node, place, step))
                    arguments[place] = step.of(arguments[place])
            values[node] = node.target(*arguments, **map_arg(node.kwargs, value))
    return values, changes


def _step(node: Node, place: int, value: Tensor) -> Step | None:
    """What brings an argument into channels_last; None for one that is there.

    A volume of one channel lies in both orders. Its strides say in which of them the convolution makes its result, and
    a backward reads the gradient of that.
    """
    is_input = place == TENSORS[node.target] - 2  # type: ignore[index]
    if is_input and value.shape[1] == 1 and value.is_contiguous() and _is_no_view(node.args[place]):
        strides = torch.empty_like(value, memory_format=LAST).stride()
        return Step(aten.as_strided.default, ([*value.shape], [*strides]), {})
    return None if value.is_contiguous(memory_format=LAST) else Step(aten.clone.default, (), {"memory_format": LAST})


def _is_no_view(node: Any) -> bool:
    """Whether a tensor surely begins where its memory does: an input of the graph, or a conversion. Inductor of torch
    2.11 gives other strides to what a view looks at, from its beginning on, and takes away copies before it does so."""
    converts = node.target is torch.ops.prims.convert_element_type.default
    return node.op == "placeholder" or (converts and _value(node.args[0]).dtype != _value(node).dtype)


def _put(graph: Graph, node: Node, place: int, step: Step) -> None:
    """Change an argument of a convolution."""
    given = node.args[place]
    assert isinstance(given, Node)
    with graph.inserting_before(node):
        changed = graph.call_function(step.op, (given, *step.arguments), step.keywords)
    changed.meta = {VALUE: step.of(given.meta[VALUE])}
    node.update_arg(place, changed)
