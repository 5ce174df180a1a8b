"""What a trace of torch.fx shows: a norm whose only user is an activation module.

It sees through modules, which the code of one class does not, and nothing that depends on values. A relation counts
where every trace shows it: in training and in evaluation, with the optional arguments given and left out. A module with
hooks is one call in the trace of what is around it, since its hooks shall not see what a trace passes, and is traced by
itself.
"""

from __future__ import annotations

import ast
import copy
import inspect
import random
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from fusednorm.convert.source import definition_of
from fusednorm.convert.tree import Tree
from fusednorm.private.torch_names import has_own_hooks


@dataclass(frozen=True)
class Follower:
    """The activation behind a norm, and the ids of the modules that the trace went over."""

    activation: nn.Module
    traced: frozenset[int]


class _Tracer(fx.Tracer):
    """Takes norms and activations for leaves, and records what happens to buffers instead of doing it."""

    proxy_buffer_attributes = True

    def __init__(self, is_leaf: Callable[[nn.Module], bool]) -> None:
        super().__init__()
        self._is_leaf = is_leaf

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return self._is_leaf(m) or super().is_leaf_module(m, module_qualified_name)


class _NoChance(TorchFunctionMode):
    """Refuses to ask for the value of a tensor once torch has drawn random numbers: what a forward would do with
    others, no trace shows."""

    def __init__(self) -> None:
        super().__init__()
        self._before = torch.random.get_rng_state()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ASKING and not torch.equal(self._before, torch.random.get_rng_state()):
            raise RuntimeError("a forward decides by random numbers")
        return func(*args, **(kwargs or {}))


_ASKING = (
    torch.Tensor.__bool__,
    torch.Tensor.__int__,
    torch.Tensor.__float__,
    torch.Tensor.__index__,
    torch.Tensor.item,
    torch.Tensor.tolist,
)


def followers(
    tree: Tree, norms: dict[int, nn.Module], is_activation: Callable[[nn.Module], bool]
) -> dict[int, Follower]:
    """What stands behind each of these norms, by the norm's id, in the largest modules that can be traced."""
    found: dict[int, Follower] = {}
    _follow(tree.model, norms, is_activation, found)
    return found


def _follow(
    root: nn.Module,
    norms: dict[int, nn.Module],
    is_activation: Callable[[nn.Module], bool],
    found: dict[int, Follower],
) -> None:
    inside = list(root.modules())
    wanted = {id(module) for module in inside if id(module) in norms}
    if not wanted or not any(map(is_activation, inside)) or id(root) in norms:
        return
    leaves = {id(module) for module in inside if id(module) in wanted or is_activation(module)}
    hooked = [module for module in inside[1:] if id(module) not in leaves and has_own_hooks(module)]
    behind = {id(module) for each in hooked for module in each.modules() if module is not each}
    pairs = _traced_pairs(root, lambda module: id(module) in leaves or any(module is each for each in hooked))
    traced = frozenset(map(id, inside)) - behind - set(map(id, hooked))
    if pairs is not None:
        shown = {norm: act for norm, act in pairs.items() if norm in wanted & traced and is_activation(act)}
        found.update({norm: Follower(act, traced) for norm, act in shown.items()})
    for child in root.children() if pairs is None else hooked:
        if pairs is None or id(child) not in behind:
            _follow(child, norms, is_activation, found)


def _traced_pairs(root: nn.Module, is_leaf: Callable[[nn.Module], bool]) -> dict[int, nn.Module] | None:
    """Pairs that all traces of a module show; None where one fails, and the module is then no graph."""
    # A trace begins at the forward of the class.
    if type(root).__call__ is not nn.Module.__call__ or "forward" in vars(root) or _asks_for_kinds(root):
        return None
    common: dict[int, nn.Module] | None = None
    for options in _optional_arguments(root):
        for training in (True, False):
            with _quietly(root, training):
                for module in filter(is_leaf, root.modules()):
                    module.forward = _past_its_call
                before = random.getstate()
                try:
                    with _NoChance():
                        graph = _Tracer(is_leaf).trace(root, options)
                    if random.getstate() != before:
                        return None
                except Exception:  # whatever the user's code raises when a Proxy comes in
                    return None
                finally:
                    random.setstate(before)
                kept = {node for module in root.modules() for value in vars(module).values() for node in _nodes(value)}
            pairs = _pairs(root, graph, kept)
            common = pairs if common is None else {key: act for key, act in common.items() if pairs.get(key) is act}
    return common


def _past_its_call(*arguments: Any, **keywords: Any) -> None:
    """The forward of a leaf, which is one call in a trace: code that runs the forward itself would not show there."""
    raise RuntimeError("the forward of a leaf was called")


def _optional_arguments(root: nn.Module) -> list[dict[str, Any]]:
    parameters = inspect.signature(root.forward).parameters.values()
    defaults = {each.name: each.default for each in parameters if each.default is not each.empty}
    return [{}, defaults] if defaults else [{}]


@contextmanager
def _quietly(root: nn.Module, training: bool) -> Iterator[None]:
    """A module in one of its modes, and afterwards all attributes, what their lists and dicts held, and the random
    state as they were: a forward may keep what it computed."""
    states = [_State(module) for module in root.modules()]
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for module in root.modules():
                module.training = training
            yield
    finally:
        for state in states:
            state.restore()


_COLLECTIONS = (list, deque, dict, OrderedDict, defaultdict, set)  # a subclass may refuse what restores it


class _State:
    """The attributes of a module, and what those that are collections hold."""

    def __init__(self, module: nn.Module) -> None:
        self.attributes = vars(module)
        self.values = dict(self.attributes)
        collections = [value for value in self.values.values() if type(value) in _COLLECTIONS]
        self.held = [(collection, copy.copy(collection)) for collection in collections]

    def restore(self) -> None:
        self.attributes.clear()
        self.attributes.update(self.values)
        for collection, held in self.held:
            collection.clear()
            collection.extend(held) if isinstance(collection, (list, deque)) else collection.update(held)


def _nodes(value: object) -> Iterator[fx.Node]:
    """The nodes of a trace that an attribute holds, and those in its collections."""
    if isinstance(value, fx.Proxy):
        yield value.node
    elif isinstance(value, (list, tuple, set, deque)):
        for each in value:
            yield from _nodes(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _nodes(each)


def _asks_for_kinds(root: nn.Module) -> bool:
    """Whether a forward asks for the type of an optional argument: a trace has none that a user may give."""
    forward = inspect.unwrap(type(root).forward)
    if not isinstance(forward, FunctionType):
        return False
    optional = {each.name for each in inspect.signature(forward).parameters.values() if each.default is not each.empty}
    definition = definition_of(forward) if optional else None
    return definition is not None and any(
        isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("isinstance", "type", "len", "torch.is_tensor", "callable")
        and any(isinstance(each, ast.Name) and each.id in optional for each in node.args)
        for node in ast.walk(definition)
    )


def _pairs(root: nn.Module, graph: fx.Graph, kept: set[fx.Node]) -> dict[int, nn.Module]:
    """The modules that are called once, on the result of another that is called once and goes nowhere else, into no
    attribute either."""
    calls: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            calls.setdefault(id(root.get_submodule(str(node.target))), []).append(node)
    pairs = {}
    for key, nodes in calls.items():
        users = list(nodes[0].users)
        if len(nodes) != 1 or len(users) != 1 or users[0].op != "call_module" or nodes[0] in kept:
            continue
        act = root.get_submodule(str(users[0].target))
        if len(calls[id(act)]) == 1 and users[0].args == (nodes[0],) and not users[0].kwargs:
            pairs[key] = act
    return pairs
