"""The passes over graphs that Inductor makes code of: formulas or leaner ops in the place of differentiable ones."""

from __future__ import annotations

import hashlib
import logging
import operator
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from torch.fx import Graph, Node

from fusednorm import __version__
from fusednorm.choice import selection
from fusednorm.inductor.biases import drop_bias
from fusednorm.inductor.formulas import Outputs, expand
from fusednorm.inductor.gradients import make_dense
from fusednorm.inductor.lowering import DIRECTIONS, Differentiable, register
from fusednorm.inductor.summing import put_sum, sum_before
from fusednorm.inductor.volumes import place_last
from fusednorm.norm import Norm, norm_of_op
from fusednorm.private.inductor_names import EXACT_ARGUMENTS, JOINT_SLOT, PASS_SLOT, graph_pass

logger = logging.getLogger(__name__)

Arguments = tuple[Any, ...]


@cache
def build() -> str:
    """The version and a digest of the sources, which generated code calls: it must not outlive a change of them."""
    digest = hashlib.sha256(__version__.encode())
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


class Pass(graph_pass()):  # type: ignore[misc]
    """A change of a graph, after the program's own pass, ``before``, which was in its place."""

    def __init__(self, before: Any = None) -> None:
        self.before = before

    def __call__(self, graph: Graph) -> None:
        for own in self.before if isinstance(self.before, (list, tuple)) else (self.before,):
            if own is not None:
                own(graph)
        self.change(graph)

    def change(self, graph: Graph) -> None:
        raise NotImplementedError

    def uuid(self) -> Any:
        """What the key of a cached graph holds: the sources, and the instances that the program asked for. None, which
        keeps graphs from the cache, where the program's own pass has none."""
        asked = selection()
        mine = ("fusednorm", build(), asked and (asked.instance, asked.tuned and asked.tuned.digest))
        return uuid_of(mine, self.before)


class Formulas(Pass):
    """Puts formulas in the place of norms, where they pay, in a graph of forward and backward together, and takes away
    biases that norms take away."""

    def change(self, graph: Graph) -> None:
        outputs: Outputs = {}
        trains = bool(graph.find_nodes(op="call_function", target=torch.ops.fusednorm.norm_backward.default))
        for node, direction, arguments in differentiable(graph):  # forwards first
            if not expand(graph, node, direction, arguments, outputs, trains):
                drop_bias(graph, node, arguments[-2])


class LeanOps(Pass):
    """Replaces norm_forward and norm_backward in a graph that autograd is done with."""

    def change(self, graph: Graph) -> None:
        register()
        if replace(graph):
            make_dense(graph)
            place_last(graph)


def uuid_of(mine: tuple[Any, ...], before: Any) -> Any:
    """The identity of a pass that runs another one first; None where that has none."""
    if before is None:
        return mine
    own = getattr(before, "uuid", lambda: None)()
    return None if own is None else (mine, own)


#: The places of passes in Inductor's configuration, and the passes.
SLOTS: dict[str, type[Pass]] = {JOINT_SLOT: Formulas, PASS_SLOT: LeanOps}
#: The places that had our pass; another one may have taken it since.
_installed: set[str] = set()


def install(config: Any) -> None:
    """Put the passes into Inductor's configuration, behind the program's own ones that are there.

    One that takes a place later, such as an option of torch.compile, keeps it, and graphs then hold the differentiable
    ops, or calls in the place of formulas: torch has looked into its caches by then, without our identity in the key.
    """
    for slot, kind in SLOTS.items():
        found = getattr(config, slot, config)
        if found is config or isinstance(found, kind):
            continue
        if found is not None and slot in _installed:
            logger.info("compiled graphs do without %s: %s has another pass, set later", kind.__name__, slot)
            continue
        _installed.add(slot)
        setattr(config, slot, kind(found))


def differentiable(graph: Graph) -> Iterator[tuple[Node, Differentiable, Arguments]]:
    """The differentiable ops of a graph with the arguments of their lean ones.

    One with an argument that is a symbol, such as a dynamic eps, is left out, and one of which an empty result is used.
    """
    ops = torch.ops.fusednorm
    forward, backward = DIRECTIONS
    kinds: tuple[tuple[Any, Differentiable, Callable[[Node], Arguments | None]], ...] = (
        (ops.norm_forward.default, forward, _forward_arguments),
        (ops.norm_backward.default, backward, _backward_arguments),
    )
    for op, direction, arguments_of in kinds:
        for node in graph.find_nodes(op="call_function", target=op):
            taken_apart = all(user.target is operator.getitem for user in node.users)
            arguments = arguments_of(node) if taken_apart and not node.kwargs else None
            if arguments is not None:
                yield node, direction, arguments


def replace(graph: Graph) -> int:
    """Replace the differentiable ops by lean ones; how many there were."""
    count = 0
    for node, direction, arguments in differentiable(graph):
        count += 1
        found = sum_before(node, arguments[-2]) if node.target is torch.ops.fusednorm.norm_forward.default else None
        if found is not None:
            put_sum(graph, node, found, arguments)
            continue
        with graph.inserting_before(node):
            lean = graph.call_function(getattr(torch.ops.fusednorm, direction.op).default, arguments)
        # The strides of the arguments are the lowering's to choose.
        lean.meta = {key: value for key, value in node.meta.items() if key != EXACT_ARGUMENTS}
        node.replace_all_uses_with(lean)
        graph.erase_node(node)
    return count


def _norm(*arguments: Any) -> Norm | None:
    return None if any(isinstance(argument, Node) for argument in arguments) else norm_of_op(*arguments)


def _used(node: Node) -> set[int]:
    """The places of the results that a graph uses."""
    return {cast(int, user.args[1]) for user in node.users}


def _forward_arguments(node: Node) -> Arguments | None:
    norm, used = _norm(*node.args[7:], node.args[5] is None), _used(node)
    if norm is None or (3 in used and not norm.has_variance):
        return None
    return *node.args[:7], norm.text, used != {0}


def _backward_arguments(node: Node) -> Arguments | None:
    arguments: Arguments = node.args
    *operands, family, groups_or_dims, channel_dim, name, parameter, training, wanted = arguments
    norm = _norm(family, groups_or_dims, channel_dim, 0.0, name, parameter, training)
    present = [True, *(operand is not None for operand in operands[4:])]
    if norm is None or not all(present[place] and wanted[place] for place in _used(node)):
        return None
    return *operands, norm.text, wanted
