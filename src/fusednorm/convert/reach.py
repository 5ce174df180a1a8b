"""Code that reaches a norm, or the activation behind it, past the forward of its parent.

``self.norm(x)`` in the class of its parent, and the forward of an nn.Sequential, are what a fold is judged by. Any
other call gets the norm's result too::

    for layer in self.features:          self.features[:2](x)          self.block.norm(x)          self.norm.forward(x)
        x = layer(x)                     getattr(self, f"norm{i}")(x)  tapped(self.features, x)    self.first(x)

So the methods of every class in the model, as far as a forward leads to them, are read for which modules an expression
may be; with them the properties that they ask, and the functions that they give modules to, where their source is at
hand.
"""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Iterator
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType
from typing import NamedTuple

import torch
from torch import nn

from fusednorm.convert.reading import COLLECTIONS, Reader, is_readable
from fusednorm.convert.rewriting import origin
from fusednorm.convert.source import Method, mentions, methods_of
from fusednorm.convert.tree import Tree, may_be_asked
from fusednorm.convert.values import BELOW, CHILDREN, Modules, delegates


class Caller(NamedTuple):
    """The method of a module's class that calls a norm or an activation, or the attribute that may."""

    module: nn.Module
    method: str


class Reached(NamedTuple):
    """By the ids of modules, who calls them in another way than those that a fold is judged by, and who looks at them:
    asks for their class, or for what not every module has."""

    callers: dict[int, list[Caller]]
    lookers: dict[int, Caller]


def reached(tree: Tree, wanted: Modules) -> Reached:
    """Who reaches norms and activations, see :class:`Reached`."""
    owners = [(owner, origin(type(owner))[0]) for owner in tree.modules()]
    bound = {name for owner, _ in owners for value in _attributes(owner).values() for name in _bound_in(value)}
    bound |= {name for kind in {kind for _, kind in owners} for name in _in_tables(kind)}
    live = _part_of_forward({kind for _, kind in owners}, bound)
    found: dict[int, list[Caller]] = {}
    lookers: dict[int, Caller] = {}
    for owner, kind in owners:
        names = {*tree.children(owner), *CHILDREN, *BELOW, "getattr"}
        for method in _with_wrapped(methods_of(kind)):
            code = method.function.__code__
            if (live is not None and method.name not in live) or not (
                delegates(kind) or _helpers(method) or any(mentions(code, name) for name in names)
            ):
                continue
            if method.definition is None:
                called, looked = {id(each): each for each in owner.modules()}, {}
            else:
                reader = Reader.of_method(tree, owner, method)
                called, looked = reader.called(), reader.looked_at()
            for key in wanted.keys() & called:
                found.setdefault(key, []).append(Caller(owner, method.name))
            for key in wanted.keys() & looked:
                lookers.setdefault(key, Caller(owner, method.name))
        for name, value in _attributes(owner).items():
            for key in wanted.keys() & _held(tree, value):
                found.setdefault(key, []).append(Caller(owner, name))
    return Reached(found, lookers)


#: What torch keeps of a module in its attributes that is none of what its code does.
_TORCHS = frozenset({"_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"})
_MOST_NESTED, _MOST_HELD = 3, 1000  # collections in collections, and elements of one, that are searched


def _attributes(owner: nn.Module) -> dict[str, object]:
    return {name: value for name, value in vars(owner).items() if name not in _TORCHS and may_be_asked(value)}


def _elements(value: object) -> list[object]:
    """The elements of a plain collection, if it is one of some size."""
    if not isinstance(value, (list, tuple, set, frozenset, deque, dict)) or len(value) > _MOST_HELD:
        return []
    return [each for each in (value.values() if isinstance(value, dict) else value) if may_be_asked(each)]


def _bound_in(value: object, most: int = _MOST_NESTED) -> Iterator[str]:
    """The names of the methods that an attribute holds."""
    if isinstance(value, MethodType):
        yield value.__name__
    elif isinstance(value, partial):
        yield from _bound_in(value.func, most)
    elif most:
        for each in _elements(value):
            yield from _bound_in(each, most - 1)


def _helpers(method: Method) -> dict[str, FunctionType]:
    """The global functions that a method names, but torch's."""
    function = method.function
    named = {name: function.__globals__.get(name) for name in function.__code__.co_names}
    return {name: value for name, value in named.items() if is_readable(value)}


def _in_tables(kind: type) -> Iterator[str]:
    """The names of the functions in the collections that a class has."""
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] != torch.__name__:
            for value in vars(base).values():
                yield from (each.__name__ for each in _elements(value) if isinstance(each, FunctionType))


def _held(tree: Tree, value: object, most: int = _MOST_NESTED) -> Modules:
    """What an attribute that is no module may call of the modules that it holds: a function of those around which it
    was made, a functools.partial of its arguments, a collection of its elements and what is below them, any other
    object of those in its attributes."""
    if most and (elements := _elements(value)):
        held = [each.modules() for each in elements if isinstance(each, nn.Module)]
        found = {id(module): module for modules in held for module in modules}
        for each in elements:
            found |= _held(tree, each, most - 1)
        return found
    if isinstance(value, partial):
        given = (*value.args, *value.keywords.values())
        modules = {id(each): each for each in given if isinstance(each, nn.Module)}
        return modules | _held(tree, value.func)
    if isinstance(value, FunctionType):
        holds: list[object] = [_content(cell) for cell in value.__closure__ or ()]
        codes = [value.__code__]
    elif isinstance(value, (nn.Module, torch.Tensor, MethodType, type)) or not hasattr(value, "__dict__"):
        return {}
    else:
        holds = [each for each in vars(value).values() if may_be_asked(each)]
        codes = [method.function.__code__ for method in methods_of(type(value))]
    modules = {id(each): each for each in holds if isinstance(each, nn.Module)}
    below = [child for each in modules.values() for inner in each.modules() for child in tree.children(inner).items()]
    named = {id(child): child for name, child in below if any(mentions(code, name) for code in codes)}
    collections = [each for each in named.values() if isinstance(each, COLLECTIONS)]
    return modules | named | {id(inner): inner for each in collections for inner in each.modules()}


def _with_wrapped(methods: list[Method]) -> Iterator[Method]:
    """Methods, and the functions that a decorator keeps behind one without saying so."""
    for method in methods:
        yield method
        for cell in method.function.__closure__ or ():
            inner = _content(cell)
            if is_readable(inner) and inner.__code__.co_argcount:
                yield Method(method.name, inner)


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents if may_be_asked(cell.cell_contents) else None
    except ValueError:  # still empty
        return None


def _part_of_forward(kinds: set[type], bound: set[str]) -> set[str] | None:
    """The names of methods that the forward of any of these classes mentions, or a bound method in an attribute, and of
    those that they mention; None where one of them asks for a method by a name that is made when it runs."""
    mentioned: dict[str, set[str]] = {}
    asking: set[str] = set()
    for kind in kinds:
        for method in _with_wrapped(methods_of(kind)):
            helpers = [(name, function.__code__) for name, function in _helpers(method).items()]
            for name, code in [(method.name, method.function.__code__), *helpers]:
                mentioned.setdefault(name, set()).update(_names_in(code))
            if mentions(method.function.__code__, "getattr") and _asks_itself(method):
                asking.add(method.name)
    found: set[str] = set()
    waiting = {"forward", "__call__", *bound}
    while waiting:
        found |= waiting
        waiting = {name for each in waiting for name in mentioned.get(each, ())} - found
    return None if found & asking else found


def _asks_itself(method: Method) -> bool:
    """Whether a method has ``getattr(self, name)`` with a name that is no constant."""
    calls = [node for node in ast.walk(method.definition or ast.Module([], [])) if isinstance(node, ast.Call)]
    me = method.function.__code__.co_varnames[0]
    return any(
        ast.unparse(call.func) == "getattr"
        and len(call.args) > 1
        and ast.unparse(call.args[0]) == me
        and not isinstance(call.args[1], ast.Constant)
        for call in calls
    )


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _names_in(each)
