"""The pass over a graph that Inductor is about to make code of: leaner ops in the place of the differentiable ones."""

from __future__ import annotations

import hashlib
import logging
import operator
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from torch.fx import Graph, Node

from fusednorm import __version__
from fusednorm.choice import selection
from fusednorm.inductor.lowering import register
from fusednorm.norm import Norm, norm_of_op
from fusednorm.private.inductor_names import EXACT_ARGUMENTS, PASS_SLOT, graph_pass

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


class LeanOps(graph_pass()):  # type: ignore[misc]
    """Replaces norm_forward and norm_backward in a graph that autograd is done with, after the program's own pass,
    ``before``, which was in its place."""

    def __init__(self, before: Any = None) -> None:
        self.before = before

    def __call__(self, graph: Graph) -> None:
        for own in self.before if isinstance(self.before, (list, tuple)) else (self.before,):
            if own is not None:
                own(graph)
        register()
        replace(graph)

    def uuid(self) -> Any:
        """What the key of a cached graph holds: the sources, and the instances that the program asked for. None, which
        keeps graphs from the cache, where the program's own pass has none."""
        asked = selection()
        mine = ("fusednorm", build(), asked and (asked.instance, asked.tuned and asked.tuned.digest))
        return uuid_of(mine, self.before)


def uuid_of(mine: tuple[Any, ...], before: Any) -> Any:
    """The identity of a pass that runs another one first; None where that has none."""
    if before is None:
        return mine
    own = getattr(before, "uuid", lambda: None)()
    return None if own is None else (mine, own)


#: The passes that were put into the configuration; the last one may have been replaced since.
_installed: list[LeanOps] = []


def install(config: Any) -> None:
    """Put the pass into Inductor's configuration, behind the program's own one that is there.

    One that takes the place later, such as an option of torch.compile, keeps it, and graphs hold the differentiable
    ops: torch has looked into its caches by then, without our identity in the key.
    """
    found = getattr(config, PASS_SLOT)
    if isinstance(found, LeanOps):
        return
    if found is not None and _installed:
        logger.info("compiled graphs call the operators: %s has another pass, set after fusednorm's", PASS_SLOT)
        return
    _installed.append(LeanOps(found))
    setattr(config, PASS_SLOT, _installed[-1])


def replace(graph: Graph) -> None:
    """Replace the differentiable ops. One with an argument that is a symbol, such as a dynamic eps, stays, and one of
    which an empty result is used."""
    ops = torch.ops.fusednorm
    replacements: tuple[tuple[Any, Any, Callable[[Node], Arguments | None]], ...] = (
        (ops.norm_forward.default, ops.compiled_forward.default, _forward_arguments),
        (ops.norm_backward.default, ops.compiled_backward.default, _backward_arguments),
    )
    for old, new, arguments_of in replacements:
        for node in graph.find_nodes(op="call_function", target=old):
            taken_apart = all(user.target is operator.getitem for user in node.users)
            arguments = arguments_of(node) if taken_apart and not node.kwargs else None
            if arguments is None:
                continue
            with graph.inserting_before(node):
                lean = graph.call_function(new, arguments)
            # The strides of the arguments are the lowering's to choose.
            lean.meta = {key: value for key, value in node.meta.items() if key != EXACT_ARGUMENTS}
            node.replace_all_uses_with(lean)
            graph.erase_node(node)


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
