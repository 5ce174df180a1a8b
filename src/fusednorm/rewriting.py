"""torch's own norms in a model that torch.compile compiles become fusednorm's, without touching the model."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node

from fusednorm import functional, inductor
from fusednorm.activations import Activation
from fusednorm.chains import Chain, chain_of, of_samples
from fusednorm.dtypes import DTYPES
from fusednorm.inductor.passes import build, uuid_of
from fusednorm.private.inductor_names import ENTER_AUTOCAST, ENTER_DUAL, graph_pass
from fusednorm.strides import keeps_torch_order

#: torch's functions, and ours with the same parameters in the same order.
NORMS: dict[Any, Callable[..., Tensor]] = {
    F.group_norm: functional.group_norm,
    F.instance_norm: functional.instance_norm,
    F.batch_norm: functional.batch_norm,
    F.layer_norm: functional.layer_norm,
    F.rms_norm: functional.rms_norm,
    torch.rms_norm: functional.rms_norm,  # what Dynamo makes of F.rms_norm
}


#: Methods that need a view of a tensor, and those that take a copy where there is none.
RESHAPES = {"view": "reshape", "view_as": "reshape_as"}
#: Functions and methods that tell the order of memory, those whose result is a view in one order and a copy in another,
#: and those whose result is a view in any.
TELLING = {"as_strided", "view_as_complex", "stride"}
ORDERED = {*RESHAPES, *RESHAPES.values(), "flatten", "ravel", "contiguous"}
VIEWS = {
    "getitem", "__getitem__", "unflatten", "squeeze", "unsqueeze", "transpose", "swapaxes", "swapdims", "permute", "t",
    "movedim", "moveaxis", "expand", "expand_as", "narrow", "select", "chunk", "split", "unbind", "detach", "alias",
    "diagonal", "unfold", "view_as_real", "tensor_split", "broadcast_to", "to", "type", "type_as", "float", "half",
    "bfloat16", "double",
}  # fmt: skip
#: Functions of two operands that change the first; the names of others end with "_".
IN_PLACE = {
    operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod,
    operator.ipow, operator.iand, operator.ior, operator.ixor,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rewritten:
    """What became of one of torch's norms: ``reason`` is None where it was rewritten, with the activation after it and,
    where ``modulated``, with the scale and shift between them, or says why it was left."""

    node: str
    function: str
    activation: str | None
    reason: str | None
    modulated: bool = False


class Pass(Protocol):
    """What torch's option ``pre_grad_custom_pass`` takes, and what it did so far."""

    report: list[Rewritten]

    def __call__(self, graph: Graph) -> None: ...
    def uuid(self) -> Any: ...


def compile_pass(before: Any = None, *, devices: Collection[str] = ("cuda",)) -> Pass:
    """A pass for torch.compile's default backend that puts fusednorm's norms in the place of torch's.

    group_norm, instance_norm, batch_norm, layer_norm and rms_norm are taken, as functions or as modules, each with what
    alone reads it: ``y * (1 + scale) + shift``, with or without the shift, where scale and shift have a value for each
    sample and channel and the result has the norm's dtype; and an activation: silu, relu, gelu, sigmoid, tanh,
    hardswish or leaky_relu. An addition before a norm stays torch's, which the compiler fuses with what makes its
    terms. Running statistics are updated as torch updates them. Left alone are norms under autocast, which promotes
    torch's, in graphs with forward-mode differentiation, and those of other devices and dtypes.

    Args:
        before: a pass of the program's own, run first.
        devices: the kinds of devices whose tensors are taken.

    ``report`` of the pass lists what it did to the graphs that were compiled since its making, as :class:`Rewritten`;
    torch runs passes over some graphs twice. A graph that comes from torch's caches is in no report.

    >>> import fusednorm, torch
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 32, 3), torch.nn.GroupNorm(8, 32), torch.nn.SiLU())
    >>> rewrite = fusednorm.compile_pass()
    >>> compiled = torch.compile(model, options={"pre_grad_custom_pass": rewrite})
    """

    class Rewriting(graph_pass()):  # type: ignore[misc]
        def __init__(self) -> None:
            self.report: list[Rewritten] = []

        def __call__(self, graph: Graph) -> None:
            if before is not None:
                before(graph)
            self.report += rewrite(graph, devices)

        def uuid(self) -> Any:
            return uuid_of(("fusednorm.compile_pass", build(), tuple(sorted(devices))), before)

    made: Pass = Rewriting()
    inductor.prepare()
    return made


def rewrite(graph: Graph, devices: Collection[str]) -> list[Rewritten]:
    """Rewrite a graph of torch's functions in place."""
    names = {getattr(node.target, "__name__", "") for node in graph.nodes}
    found = []
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in NORMS:
            continue
        reason = _why_not(node, devices, names)
        if reason is not None:
            found.append(Rewritten(node.name, node.target.__name__, None, reason))
            continue
        chain = chain_of(node, _value_of(node))
        found.append(_named(node, chain))
        _reshape_behind(chain.nodes[-1])
        _replace(graph, chain)
    return found


def _named(norm: Node, chain: Chain) -> Rewritten:
    activation = None if chain.activation is None else chain.activation.name
    return Rewritten(norm.name, norm.target.__name__, activation, None, chain.modulated)  # type: ignore[union-attr]


def _reshape_behind(last: Node) -> None:
    """Each view of what is computed from a chain becomes a reshape, which copies where there is no view: the output of
    channels_last is in that order, and torch's may be contiguous."""
    seen, left = {last}, [last]
    while left:
        for user in left.pop().users:
            if user not in seen:
                seen.add(user)
                left.append(user)
    for node in seen:
        if node.op == "call_method" and node.target in RESHAPES and not _of_dtype(node):
            node.target = RESHAPES[node.target]


def _of_dtype(view: Node) -> bool:
    """Whether a view sees the bits of its tensor as another dtype's."""
    return any(isinstance(one, torch.dtype) for one in (*view.args, *view.kwargs.values()))


def _copy_input(graph: Graph, norm: Node, last: Node) -> None:
    """Give a norm a contiguous copy of an input in whose order of memory torch's output is not, and where the order
    matters: that of one that is neither contiguous nor channels_last is often contiguous, and so is instance_norm's of
    channels_last, which convolutions then had to turn; this one is copied only where something sees its order."""
    input, value, result = _input_of(norm), _value_of(norm), norm.meta["example_value"]
    if not isinstance(input, Node) or result.stride() == value.stride():
        return
    rows = norm.target in (F.layer_norm, F.rms_norm, torch.rms_norm)
    if keeps_torch_order(value, rows) and not (norm.target is F.instance_norm and _order_is_seen(last)):
        return
    norm.replace_input_with(input, graph.call_method("contiguous", (input,)))


def _order_is_seen(last: Node) -> bool:
    """Whether the order of a result's memory can be seen: by what leaves the graph, by functions that ask for it, and
    by a change in place of what is a view in one order and a copy in another."""
    seen, left = {last}, [(last, False)]
    while left:
        node, ordered = left.pop()
        for user in node.users:
            name = user.target if isinstance(user.target, str) else getattr(user.target, "__name__", "")
            if user.op == "output" or name in TELLING or (name == "view" and _of_dtype(user)):
                return True
            if ordered and _changes(user, name):
                return True
            if (name in ORDERED or name in VIEWS) and user not in seen:
                seen.add(user)
                left.append((user, ordered or name in ORDERED))
    return False


def _changes(user: Node, name: str) -> bool:
    """Whether a call may change an argument in place."""
    in_place = user.target in IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    return in_place or True in user.args or bool(user.kwargs.get("inplace")) or "out" in user.kwargs


def _replace(graph: Graph, chain: Chain) -> None:
    """One call for a chain: at the norm's place, or, modulated, where scale and shift are there."""
    norm = chain.nodes[0]
    place = norm if not chain.modulated else chain.nodes[2 if chain.shift is not None else 1]
    with graph.inserting_before(place):
        keywords: dict[str, Any] = {}
        if chain.activation is not None:
            keywords["activation"] = _activation(graph, chain.activation)
        for name, value in (("scale", chain.scale), ("shift", chain.shift)):
            if value is not None:
                keywords[name] = graph.call_method("flatten", (value, 1)) if of_samples(norm) else value
        _copy_input(graph, norm, chain.nodes[-1])
        new = graph.call_function(NORMS[norm.target], norm.args, {**norm.kwargs, **keywords})
    new.meta = dict(norm.meta)
    chain.nodes[-1].replace_all_uses_with(new)
    for old in reversed(chain.nodes):
        graph.erase_node(old)


def _activation(graph: Graph, activation: Activation) -> str | Node:
    """An activation as the code of a graph can have it, which torch.cond and others make: its name, or, with a
    parameter of its own, the call that makes it."""
    if activation == Activation(activation.name):
        return activation.name
    return graph.call_function(Activation, (activation.name, activation.parameter))


def _input_of(norm: Node) -> Any:
    return norm.args[0] if norm.args else norm.kwargs.get("input")


def _value_of(norm: Node) -> Any:
    """What a norm's input is an example of."""
    input = _input_of(norm)
    return input.meta.get("example_value") if isinstance(input, Node) else None


def _why_not(node: Node, devices: Collection[str], names: Collection[str]) -> str | None:
    """None, or why a norm is left to torch in a graph with functions of these names."""
    value = _value_of(node)
    if not isinstance(value, Tensor):
        return "its input's device and dtype are not known"
    if value.device.type not in devices:
        return f"it runs on {value.device.type}, and the pass is for {', '.join(sorted(devices))}"
    if value.dtype not in DTYPES:
        return f"its dtype is {value.dtype}"
    if ENTER_AUTOCAST in names or torch.is_autocast_enabled(value.device.type):
        return "autocast promotes torch's norm, and would not promote this one"
    if ENTER_DUAL in names:
        return "a graph with forward-mode differentiation differentiates torch's norm, and would not this one"
    result = node.meta.get("example_value")  # of a checkpoint's graph within a region of autocast, for one
    if not isinstance(result, Tensor) or result.dtype != value.dtype:
        return f"torch's result is no tensor of its input's dtype, {value.dtype}"
    return None
