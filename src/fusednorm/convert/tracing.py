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
import pickle
import random
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from fusednorm.convert.source import Method, definition_of, mentions, methods_of
from fusednorm.convert.tree import Tree, may_be_asked
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

        #: Under which modes of autograd and autocast each leaf is called, which a graph does not say.
        self.modes: dict[fx.Node, tuple[bool, ...]] = {}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return self._is_leaf(m) or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        result = super().call_module(m, forward, args, kwargs)
        if isinstance(result, fx.Proxy):
            cast = (torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))
            self.modes[result.node] = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *cast)
        return result


class _Unchanging(TorchFunctionMode):
    """Refuses what a trace must not do, or cannot show: to change the tensors of a model, and to ask for the value of a
    tensor once torch has drawn random numbers."""

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self._before = torch.random.get_rng_state()
        attributes = (value for module in root.modules() for value in vars(module).values())
        tensors = (
            *root.parameters(),
            *root.buffers(),
            *(each for each in attributes if issubclass(type(each), Tensor)),
        )
        self._kept = {_storage_of(tensor) for tensor in tensors}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ASKING and not torch.equal(self._before, torch.random.get_rng_state()):
            raise RuntimeError("a forward decides by random numbers")
        written = (args[0], (kwargs or {}).get("out")) if args else ()
        if _writes(func, kwargs) and any(type(each) in _PLAIN and _storage_of(each) in self._kept for each in written):
            raise RuntimeError("a forward changes a tensor of the model")
        return func(*args, **(kwargs or {}))


_PLAIN = (Tensor, nn.Parameter)


def _storage_of(tensor: Any) -> int:
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (NotImplementedError, RuntimeError):  # sparse and uninitialized tensors have none
        return id(tensor)


def _writes(func: Any, kwargs: Any) -> bool:
    """Whether a function of torch's changes a tensor that it gets: one in place, an assignment, or one with ``out``."""
    name = getattr(func, "__name__", "")
    inplace = (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")
    return inplace or name in ("__set__", "__setitem__") or (kwargs or {}).get("out") is not None


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
    if any(mentions(method.function.__code__, name) for method in _methods(root) for name in _MODES):
        return None
    common: dict[int, nn.Module] | None = None
    for options in _optional_arguments(root):
        for training in (True, False):
            with _quietly(root, training):
                for module in filter(is_leaf, root.modules()):
                    module.forward = _past_its_call
                chance, tracer = _Chance(root), _Tracer(is_leaf)
                try:
                    with _Unchanging(root):
                        graph = tracer.trace(root, options)
                    if chance.was_taken():
                        return None
                except Exception:  # whatever the user's code raises when a Proxy comes in
                    return None
                finally:
                    chance.restore()
                kept = {node for module in root.modules() for value in vars(module).values() for node in _nodes(value)}
            pairs = _pairs(root, graph, kept, tracer.modes)
            common = pairs if common is None else {key: act for key, act in common.items() if pairs.get(key) is act}
    return common


#: What asks for a mode in which a trace does not run.
_MODES = ("is_grad_enabled", "is_inference_mode_enabled", "is_inference_mode", "is_autocast_enabled")


def _methods(root: nn.Module) -> list[Method]:
    return [method for kind in {type(module) for module in root.modules()} for method in methods_of(kind)]


class _Chance:
    """The states of the generators of random numbers that a forward may ask beside torch's own."""

    def __init__(self, root: nn.Module) -> None:
        values = {id(value): value for module in root.modules() for value in vars(module).values()}
        self._own = [(each, each.get_state()) for each in values.values() if type(each) is torch.Generator]
        self._random, self._numpy = random.getstate(), np.random.get_state()

    def was_taken(self) -> bool:
        own = any(not torch.equal(each.get_state(), before) for each, before in self._own)
        now = random.getstate(), pickle.dumps(np.random.get_state())
        return own or now != (self._random, pickle.dumps(self._numpy))

    def restore(self) -> None:
        random.setstate(self._random)
        np.random.set_state(self._numpy)
        for each, before in self._own:
            each.set_state(before)


def _past_its_call(*arguments: Any, **keywords: Any) -> None:
    """The forward of a leaf, which is one call in a trace: code that runs the forward itself would not show there."""
    raise RuntimeError("the forward of a leaf was called")


def _optional_arguments(root: nn.Module) -> list[dict[str, Any]]:
    parameters = inspect.signature(root.forward).parameters.values()
    defaults = {each.name: each.default for each in parameters if each.default is not each.empty}
    some = defaults if 1 < len(defaults) <= _MOST_ALONE else {}
    alone = [{name: value for name, value in defaults.items() if name != given} for given in some]
    left = [{name: value} for name, value in some.items()] if len(some) > 2 else []
    return [{}, defaults, *alone, *left] if defaults else [{}]


_MOST_ALONE = 3  # optional arguments of which each is given alone, and each alone left out


@contextmanager
def _quietly(root: nn.Module, training: bool) -> Iterator[None]:
    """A module in one of its modes, and afterwards all attributes, what their collections and objects held, the mode of
    autograd and the random state as they were: a forward may keep what it computed."""
    states, gradients = [_State(module) for module in root.modules()], torch.is_grad_enabled()
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for module in root.modules():
                module.training = training
            yield
    finally:
        torch.set_grad_enabled(gradients)
        for state in states:
            state.restore()


_COLLECTIONS = (list, deque, dict, OrderedDict, defaultdict, Counter, set)  # a subclass may refuse what restores it
#: Collections and objects in each other that are kept, and how many of these, and elements of one.
_MOST_NESTED, _MOST_HELD = 4, 10000


class _State:
    """The attributes of a module, and what those that are collections or plain objects hold, also in each other."""

    def __init__(self, module: nn.Module) -> None:
        self.attributes = vars(module)
        self.values = dict(self.attributes)
        self.held: list[tuple[Any, Any]] = []
        self._seen: set[int] = set()
        for value in self.values.values():
            self._keep(value, _MOST_NESTED)

    def _keep(self, value: object, most: int) -> None:
        kept = value if type(value) in _COLLECTIONS else _members(value)
        if most and kept is not None and id(kept) not in self._seen and len(self._seen) < _MOST_HELD:
            self._seen.add(id(kept))
            self.held.append((kept, copy.copy(kept)))
            for each in _within(kept):
                self._keep(each, most - 1)

    def restore(self) -> None:
        self.attributes.clear()
        self.attributes.update(self.values)
        for collection, held in self.held:
            collection.clear()
            collection.extend(held) if isinstance(collection, (list, deque)) else collection.update(held)


def _members(value: object) -> dict[str, object] | None:
    """The attributes of a plain object."""
    if not may_be_asked(value) or isinstance(value, _NOT_PLAIN):
        return None
    members = getattr(value, "__dict__", None)
    return members if type(members) is dict else None


_NOT_PLAIN = (nn.Module, Tensor, type, FunctionType, MethodType, ModuleType, fx.Proxy)


def _within(value: object) -> list[object]:
    """The elements of a collection of some size, or what a plain object holds."""
    if not may_be_asked(value):
        return []
    if isinstance(value, (list, tuple, set, deque, dict)):
        elements = value.values() if isinstance(value, dict) else value
        return list(elements) if len(value) <= _MOST_HELD else []
    return list((_members(value) or {}).values())


def _nodes(value: object, most: int = _MOST_NESTED) -> Iterator[fx.Node]:
    """The nodes of a trace that an attribute holds, and those in its collections and objects."""
    if may_be_asked(value) and isinstance(value, fx.Proxy):
        yield value.node
    elif most:
        for each in _within(value):
            yield from _nodes(each, most - 1)


def _asks_for_kinds(root: nn.Module) -> bool:
    """Whether a forward asks for the type of an argument, or whether something that it looks up in one is None: a trace
    has none that a user may give."""
    forward = inspect.unwrap(type(root).forward)
    if not isinstance(forward, FunctionType):
        return False
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    given, optional = {each.name for each in parameters}, {each.name for each in parameters if _may_miss(each)}
    definition = definition_of(forward)
    if definition is None:
        return False
    nodes = list(ast.walk(definition))
    made = {
        target.id: node.value
        for node in nodes
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }

    def looks_up(asked: ast.expr) -> bool:
        value = made.get(asked.id, asked) if isinstance(asked, ast.Name) else asked
        required = isinstance(value, ast.Name) and value.id in given - optional
        found = isinstance(value, (ast.Call, ast.Subscript)) and _is_of(value, given)
        return required or found

    return any(
        (isinstance(node, ast.Call) and ast.unparse(node.func) in _KINDS and _names(node.args) & given)
        or (isinstance(node, ast.Call) and ast.unparse(node.func) in _SIZES and _names(node.args) & optional)
        or (isinstance(node, ast.Compare) and _asks_for_none(node) and looks_up(node.left))
        for node in nodes
    )


_KINDS, _SIZES = ("isinstance", "type", "torch.is_tensor", "callable"), ("len",)


def _may_miss(parameter: inspect.Parameter) -> bool:
    return parameter.default is not parameter.empty


def _names(nodes: list[ast.expr]) -> set[str]:
    return {each.id for each in nodes if isinstance(each, ast.Name)}


def _asks_for_none(node: ast.Compare) -> bool:
    return isinstance(node.ops[0], (ast.Is, ast.IsNot)) and ast.unparse(node.comparators[0]) == "None"


def _is_of(node: ast.expr, names: set[str]) -> bool:
    """Whether an expression is an element, or the result of a method, of one of these names."""
    while isinstance(node, (ast.Call, ast.Subscript, ast.Attribute)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return isinstance(node, ast.Name) and node.id in names


def _pairs(
    root: nn.Module, graph: fx.Graph, kept: set[fx.Node], modes: dict[fx.Node, tuple[bool, ...]]
) -> dict[int, nn.Module]:
    """The modules that are called once, on the result of another that is called once and goes nowhere else, into no
    attribute either, under the same modes of autograd and autocast."""
    calls: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            calls.setdefault(id(root.get_submodule(str(node.target))), []).append(node)
    pairs = {}
    for key, nodes in calls.items():
        users = list(nodes[0].users)
        if len(nodes) != 1 or len(users) != 1 or users[0].op != "call_module" or nodes[0] in kept:
            continue
        if modes.get(nodes[0]) != modes.get(users[0]):
            continue
        act = root.get_submodule(str(users[0].target))
        if len(calls[id(act)]) == 1 and users[0].args == (nodes[0],) and not users[0].kwargs:
            pairs[key] = act
    return pairs
