"""What follows a norm in a graph of torch's functions, as far as one call of ours computes it: first scale and shift,
x̂ (1 + scale) + shift, then an activation."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from fusednorm.activations import Activation
from fusednorm.arguments import check_modulation
from fusednorm.dtypes import DTYPES
from fusednorm.equivalents import function_activation

#: The parameters of activations after the input, as positions; gelu's has none.
POSITIONS = {
    "silu": ("inplace",),
    "relu": ("inplace",),
    "hardswish": ("inplace",),
    "leaky_relu": ("negative_slope", "inplace"),
}
PRODUCTS = (operator.mul, torch.mul, torch.multiply, "mul", "multiply")
SUMS = (operator.add, torch.add, "add")
#: torch's functions that normalize trailing dimensions.
ROW_NORMS = (F.layer_norm, F.rms_norm, torch.rms_norm)
#: Where the functions that a modulation's values come from live: none of them changes a tensor that it is given, but
#: for those whose name ends with an underscore, those in IN_PLACE, and ``out`` and ``inplace``.
MODULES = ("_operator", "torch", "torch.nn.functional", "math", "builtins")
IN_PLACE = (operator.setitem, operator.delitem, F.batch_norm, F.instance_norm)


@dataclass(frozen=True, slots=True)
class Chain:
    """What one call takes in: ``nodes`` from the norm on, each the only reader of the one before."""

    nodes: tuple[Node, ...]
    scale: Node | None = None
    shift: Node | None = None
    activation: Activation | None = None

    @property
    def modulated(self) -> bool:
        return self.scale is not None or self.shift is not None


def chain_of(norm: Node, input: Tensor) -> Chain:
    """The chain from a norm of ``input`` on."""
    nodes, factor, scale, shift = [norm], None, None, None
    product = _only_user(norm)
    if product is not None and _is(product, PRODUCTS):
        factor = _other(product, norm)
        scale = _added_to_one(factor)
        if scale is not None:
            nodes.append(product)
            total = _only_user(product)
            if total is not None and _is(total, SUMS):
                shift = _other(total, product)
                nodes += [total] if shift is not None else []
    values = [one for one in (scale, shift) if one is not None]
    if not _keep_dtype(nodes, input) or not all(_fits(norm, one, input) for one in values) or not _moves(nodes, factor):
        nodes, scale, shift = [norm], None, None
    taker, activation = _activation_of(nodes[-1])
    return Chain((*nodes, *([] if taker is None else [taker])), scale, shift, activation)


def of_samples(norm: Node) -> bool:
    """Whether scale and shift of a norm are (N, C); those of rows are any that broadcast."""
    return norm.target not in ROW_NORMS


def _only_user(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _is(node: Node, functions: tuple[Any, ...]) -> bool:
    """Whether a node is a call of one of these, of two arguments and nothing else."""
    called = node.op in ("call_function", "call_method") and node.target in functions
    return called and len(node.args) == 2 and not node.kwargs


def _other(node: Node, one: Node) -> Node | None:
    """The other argument of a call of two, if it is a tensor of the graph."""
    first, second = node.args
    found = second if first is one else first
    return found if isinstance(found, Node) and found is not one and _tensor(found) is not None else None


def _tensor(node: Node) -> Tensor | None:
    value = node.meta.get("example_value")
    return value if isinstance(value, Tensor) else None


def _added_to_one(node: Node | None) -> Node | None:
    """scale, of a node that is 1 + scale."""
    if node is None or not _is(node, SUMS):
        return None
    first, second = node.args
    one, scale = (first, second) if isinstance(second, Node) else (second, first)
    plain = isinstance(one, int | float) and one == 1
    return scale if plain and isinstance(scale, Node) and _tensor(scale) is not None else None


def _keep_dtype(nodes: list[Node], input: Tensor) -> bool:
    """Whether what comes after a norm keeps its dtype and shape, as the one call does."""
    values = [_tensor(node) for node in nodes[1:]]
    return all(value is not None and (value.dtype, value.shape) == (input.dtype, input.shape) for value in values)


def _fits(norm: Node, value: Node, input: Tensor) -> bool:
    """Whether our call takes a tensor that torch broadcasts against a norm's output, and means the same by it."""
    given = _tensor(value)
    if given is None or given.dtype not in DTYPES or given.dim() != input.dim():
        return False
    if of_samples(norm):
        return input.dim() >= 2 and given.shape == (*input.shape[:2], *(1,) * (input.dim() - 2))
    try:
        check_modulation("", "", given, input, 1)
    except (TypeError, ValueError):
        return False
    return True


def _moves(nodes: list[Node], factor: Node | None) -> bool:
    """Whether one call at the place of the last of these computes what they do.

    Nothing between the first and the last may change a tensor, nor anything from ``factor``, which is 1 + scale, on,
    since the call reads scale itself; and nothing may see the running statistics that the norm updates.
    """
    first, last = nodes[0], nodes[-1]
    earliest = first if factor is None or first < factor else factor
    between = [node for node in _between(earliest, last) if node not in nodes]
    seeing = _seeing_running(first)
    return all(_harmless(node) for node in between) and seeing.isdisjoint(
        {*_between(first, last), *(argument for node in nodes[1:] for argument in node.all_input_nodes)}
    )


def _seeing_running(norm: Node) -> set[Node]:
    """What a graph makes of the running statistics that a norm is given, apart from its output."""
    names = ("running_mean", "running_var") if norm.target in IN_PLACE else ()
    given = [
        norm.kwargs.get(name, norm.args[place] if len(norm.args) > place else None)
        for place, name in enumerate(names, 1)
    ]
    found, todo = set[Node](), [value for value in given if isinstance(value, Node)]
    while todo:
        new = {*todo.pop().users} - found - {norm}
        found |= new
        todo += new
    return found


def _between(first: Node, last: Node) -> Iterator[Node]:
    node = first
    while node is not last:
        node = node.next
        yield node


def _switches(node: Node) -> bool:
    """Whether a call has no result: it changes the mode in which the calls after it run, such as whether autograd
    records them."""
    return node.op in ("call_function", "call_method") and node.meta.get("example_value") is None


def _harmless(node: Node) -> bool:
    if node.op in ("placeholder", "get_attr", "output"):
        return True
    if _switches(node):
        return False
    if "out" in node.kwargs or node.kwargs.get("inplace") or any(argument is True for argument in node.args):
        return False
    if node.op == "call_method":
        return not str(node.target).endswith("_")
    name, home = getattr(node.target, "__name__", "_"), getattr(node.target, "__module__", None)
    known = home in MODULES or isinstance(node.target, type(torch.add))  # a function of torch's that is not Python
    return node.op == "call_function" and known and node.target not in IN_PLACE and not _changes(name)


def _changes(name: str) -> bool:
    """Whether a function of this name changes its first argument: torch's by an underscore, Python's by an i before."""
    return name.endswith("_") or (name.startswith("i") and hasattr(operator, name) and hasattr(operator, name[1:]))


def _activation_of(node: Node) -> tuple[Node | None, Activation | None]:
    """The activation that alone reads a node, and what it computes. It may work in place: nothing else sees the node's
    output."""
    user = _only_user(node)
    if user is None or user.op not in ("call_function", "call_method") or not user.args or user.args[0] is not node:
        return None, None
    if any(_switches(one) for one in _between(node, user)):
        return None, None
    function = user.target if user.op == "call_function" else getattr(Tensor, str(user.target), None)
    plain = function_activation(function, {})
    positions = () if plain is None else POSITIONS.get(plain.name, ())
    given: dict[str, Any] = {**dict(zip(positions, user.args[1:], strict=False)), **user.kwargs}
    if len(user.args) - 1 > len(positions) or any(isinstance(value, Node) for value in given.values()):
        return None, None
    activation = function_activation(function, given)
    return (None, None) if activation is None else (user, activation)
