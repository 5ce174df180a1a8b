"""Biases of convolutions on a GPU, where a norm of single channels takes them away again.

All elements under one mean have the same bias b then, so norm(x + b) = norm(x), and the gradient of b, which sums that
of x + b over each channel, is 0. Inductor adds a bias, and sums its gradient, in a pass over the tensor each.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fusednorm.norm import Norm, norm_of_text
from fusednorm.private.inductor_names import VALUE
from fusednorm.problem import view_of

aten = torch.ops.aten

#: On a CPU a convolution adds its bias itself.
DEVICE = "cuda"
#: The place of the bias in aten.convolution's arguments, and of the mean among the results of a forward.
BIAS, MEAN = 2, 1


def drop_bias(graph: Graph, node: Node, text: str) -> None:
    """Take the bias, or its gradient, from around a differentiable forward or backward of the norm ``text``."""
    norm = norm_of_text(text)
    if node.target is torch.ops.fusednorm.norm_backward.default:
        if _centers_channels(norm, node.args[1]):
            _drop_gradients(graph, node)
    elif _centers_channels(norm, node.args[0]):
        _drop_from_forward(graph, node, norm)


def planes_of(norm: Norm, source: object) -> Tensor | None:
    """The value of the input of a norm over the positions of channels, of which it makes the statistics, where that is
    on a GPU; None elsewhere."""
    value = source.meta.get(VALUE) if isinstance(source, Node) else None
    if not isinstance(value, Tensor) or value.device.type != DEVICE or not norm.training:
        return None
    return None if norm.row_family or norm.per_position or norm.channel_dim != 1 else value


def _centers_channels(norm: Norm, source: object) -> bool:
    """Whether a norm takes from each element of a tensor on a GPU the mean of elements of its channel alone."""
    value = planes_of(norm, source)
    if value is None or not norm.has_mean or isinstance(value.shape[1], torch.SymInt):
        return False
    return view_of(norm, value.shape).group_channels == 1


def _drop_from_forward(graph: Graph, forward: Node, norm: Norm) -> None:
    """Take the bias from the convolution that makes a forward's input, where nobody else reads that but the forward's
    own backward. batch_norm's mean, which moves the running one, gets the bias instead."""
    source = forward.args[0]
    assert isinstance(source, Node)
    if source.target is not aten.convolution.default or source.args[BIAS] is None:
        return
    bias, means = source.args[BIAS], [user for user in forward.users if user.args[1] == MEAN]
    backwards = [user for user in source.users if user is not forward]
    if not all(_is_backward(user, source, means) for user in backwards):
        return
    others = [(mean, user) for mean in means for user in mean.users if user not in backwards]
    if others and norm.family != "batch_norm":
        return
    source.update_arg(BIAS, None)
    for mean, user in others:
        with graph.inserting_after(mean):
            moved = graph.call_function(aten.add.Tensor, (mean, bias))
        moved.meta = dict(mean.meta)
        user.replace_input_with(mean, moved)


def _is_backward(node: Node, source: Node, means: list[Node]) -> bool:
    """Whether a node reads ``source`` as the input of a backward alone, with one of these means."""
    if node.target is not torch.ops.fusednorm.norm_backward.default or node.args[2] not in means:
        return False
    return [place for place, operand in enumerate(node.args) if operand is source] == [1]


def _drop_gradients(graph: Graph, backward: Node) -> None:
    """Put zeros in the place of the sums, over each channel, of the gradient that a backward gives to its input."""
    gradients = [user for user in backward.users if user.args[1] == 0]
    for total in [user for gradient in gradients for user in gradient.users]:
        dims = [0, *range(2, gradients[0].meta[VALUE].dim())]
        if total.target is aten.sum.dim_IntList and total.args[1:] == (dims,) and not total.kwargs:
            value = total.meta[VALUE]
            keywords = {"dtype": value.dtype, "layout": torch.strided, "device": value.device, "pin_memory": False}
            with graph.inserting_before(total):
                zeros = graph.call_function(aten.full.default, (list(value.shape), 0.0), keywords)
            zeros.meta = dict(total.meta)
            total.replace_all_uses_with(zeros)
            graph.erase_node(total)
