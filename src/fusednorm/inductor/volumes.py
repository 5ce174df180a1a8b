"""Convolutions of volumes in channels_last, as Inductor has those of images whatever the program has.

The matrix units of a GPU read 16-bit volumes in channels_last: cuDNN transposes any other before a convolution, and its
result behind it. Here a graph's convolutions get their tensors in that order, and all that is computed from the results
follows; a norm of ours, unlike most of Inductor's kernels, is as fast in one order as in the other. What the program
gets back keeps the strides that it had.
"""

from __future__ import annotations

import logging
from typing import Any

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


def place_last(graph: Graph) -> None:
    """Let a graph's convolutions of volumes, with norms of ours among them, have channels_last, if it suits all."""
    if not orders_convolutions() or not any(_is_of_volumes(node) for node in graph.nodes):
        return
    convolutions = [node for op in TENSORS for node in graph.find_nodes(op="call_function", target=op)]
    found = [node for node in convolutions if _tensors(node)[-1].dim() in (0, 5)]  # an unknown one suits nothing
    if not found or not all(_suits(node) for node in found):
        return
    try:
        values, copied = _values(graph, found)
    except Exception as error:  # such as that of a view which other strides do not have
        logger.info("the convolutions of volumes keep their order of memory: %s", error)
        return
    for node, value in values.items():
        node.meta[VALUE] = value
    for node, places in copied.items():
        for place, value in places.items():
            _put_copy(graph, node, place, value)


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


def _values(graph: Graph, convolutions: list[Node]) -> tuple[dict[Node, Any], dict[Node, dict[int, Tensor]]]:
    """The values of the nodes that get others, and the arguments, by their places, that convolutions get others of."""
    values: dict[Node, Any] = {}
    copied: dict[Node, dict[int, Tensor]] = {node: {} for node in convolutions}

    def value(node: Node) -> Any:
        return values.get(node, node.meta.get(VALUE))

    with convolutions[0].args[0].meta[VALUE].fake_mode:  # type: ignore[union-attr]
        for node in graph.nodes:
            follows = any(source in values for source in node.all_input_nodes)
            if node.op != "call_function" or not (follows or node in copied):
                continue
            if node.meta.get(NEW_SIZES):
                raise ValueError(f"{node} has sizes that its numbers say")
            arguments = list(map_arg(node.args, value))
            for place in range(TENSORS[node.target] if node in copied else 0):
                given = arguments[place]
                if _differs_in_strides(node, place, given):
                    strides = torch.empty_like(given, memory_format=LAST).stride()
                    copied[node][place] = given.as_strided(given.shape, strides)
                elif not given.is_contiguous(memory_format=LAST):
                    copied[node][place] = given.contiguous(memory_format=LAST)
                arguments[place] = copied[node].get(place, given)
            values[node] = node.target(*arguments, **map_arg(node.kwargs, value))
    return values, copied


def _differs_in_strides(node: Node, place: int, value: Tensor) -> bool:
    """Whether an argument is a volume of one channel: it lies in both orders, and its strides say in which of them the
    convolution makes its result, and a backward reads its gradient."""
    is_input = place == TENSORS[node.target] - 2  # type: ignore[index]
    return is_input and value.shape[1] == 1 and value.is_contiguous()


def _put_copy(graph: Graph, node: Node, place: int, value: Tensor) -> None:
    """Give a convolution an argument with this value."""
    given = node.args[place]
    assert isinstance(given, Node)
    with graph.inserting_before(node):
        if _differs_in_strides(node, place, given.meta[VALUE]):
            copy = graph.call_function(aten.as_strided.default, (given, list(value.shape), list(value.stride())))
        else:
            copy = graph.call_function(aten.clone.default, (given,), {"memory_format": LAST})
    copy.meta = {VALUE: value}
    node.update_arg(place, copy)
