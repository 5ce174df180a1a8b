"""torch's own norms in a model that torch.compile compiles become fusednorm's, without touching the model."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node

from fusednorm import functional, inductor
from fusednorm.activations import Activation
from fusednorm.dtypes import DTYPES
from fusednorm.equivalents import function_activation
from fusednorm.inductor.passes import build, uuid_of
from fusednorm.private.inductor_names import ENTER_AUTOCAST, graph_pass

#: torch's functions, and ours with the same parameters in the same order.
NORMS: dict[Any, Callable[..., Tensor]] = {
    F.group_norm: functional.group_norm,
    F.instance_norm: functional.instance_norm,
    F.batch_norm: functional.batch_norm,
    F.layer_norm: functional.layer_norm,
    F.rms_norm: functional.rms_norm,
    torch.rms_norm: functional.rms_norm,  # what Dynamo makes of F.rms_norm
}
#: The parameters of activations after the input, as positions; gelu's has none.
POSITIONS = {
    "silu": ("inplace",),
    "relu": ("inplace",),
    "hardswish": ("inplace",),
    "leaky_relu": ("negative_slope", "inplace"),
}


@dataclass(frozen=True, slots=True)
class Rewritten:
    """What became of one of torch's norms: ``reason`` is None where it was rewritten, with the activation after it, or
    says why it was left."""

    node: str
    function: str
    activation: str | None
    reason: str | None


def compile_pass(before: Any = None, *, devices: Collection[str] = ("cuda",)) -> Any:
    """A pass for torch.compile's default backend that puts fusednorm's norms in the place of torch's.

    group_norm, instance_norm, batch_norm, layer_norm and rms_norm are taken, as functions or as modules, each with the
    activation that alone reads it: silu, relu, gelu, sigmoid, tanh, hardswish or leaky_relu. Running statistics are
    updated as torch updates them. Left alone are norms under autocast, which promotes torch's, and those of other
    devices and dtypes.

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

    made = Rewriting()
    inductor.prepare()
    return made


def rewrite(graph: Graph, devices: Collection[str]) -> list[Rewritten]:
    """Rewrite a graph of torch's functions in place."""
    cast = any(getattr(node.target, "__name__", "") == ENTER_AUTOCAST for node in graph.nodes)
    found = []
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in NORMS:
            continue
        reason = _why_not(node, devices, cast)
        name, activation = node.target.__name__, None
        if reason is None:
            taker, activation = _activation_of(node)
            with graph.inserting_before(node):
                keywords = {**node.kwargs, **({"activation": activation} if activation else {})}
                new = graph.call_function(NORMS[node.target], node.args, keywords)
            new.meta = dict(node.meta)
            for old in (taker, node) if taker is not None else (node,):
                old.replace_all_uses_with(new)
                graph.erase_node(old)
        found.append(Rewritten(node.name, name, activation.name if activation else None, reason))
    return found


def _why_not(node: Node, devices: Collection[str], cast: bool) -> str | None:
    """None, or why a norm is left to torch."""
    input = node.args[0] if node.args else node.kwargs.get("input")
    value = input.meta.get("example_value") if isinstance(input, Node) else None
    if not isinstance(value, Tensor):
        return "its input's device and dtype are not known"
    if value.device.type not in devices:
        return f"it runs on {value.device.type}, and the pass is for {', '.join(sorted(devices))}"
    if value.dtype not in DTYPES:
        return f"its dtype is {value.dtype}"
    if cast or torch.is_autocast_enabled(value.device.type):
        return "autocast promotes torch's norm, and would not promote this one"
    return None


def _activation_of(norm: Node) -> tuple[Node | None, Activation | None]:
    """The activation that alone reads a norm, and what it computes. It may work in place: nothing else sees the norm's
    output."""
    if len(norm.users) != 1:
        return None, None
    (user,) = norm.users
    if user.op not in ("call_function", "call_method") or not user.args or user.args[0] is not norm:
        return None, None
    function = user.target if user.op == "call_function" else getattr(Tensor, str(user.target), None)
    plain = function_activation(function, {})
    positions = () if plain is None else POSITIONS.get(plain.name, ())
    given: dict[str, Any] = {**dict(zip(positions, user.args[1:], strict=False)), **user.kwargs}
    if len(user.args) - 1 > len(positions) or any(isinstance(value, Node) for value in given.values()):
        return None, None
    activation = function_activation(function, given)
    return (None, None) if activation is None else (user, activation)
