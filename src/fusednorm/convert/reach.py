"""Code that reaches a norm past the forward of the norm's parent.

``self.norm(x)`` in the class of its parent, and the forward of an nn.Sequential, are what a fold is judged by. Any
other call gets the norm's result too::

    for layer in self.features:          self.features[:2](x)          self.block.norm(x)          self.norm.forward(x)
        x = layer(x)                     getattr(self, f"norm{i}")(x)  tapped(self.features, x)    self.first(x)

So the methods of every class in the model, as far as a forward leads to them, are read for which modules an expression
may be; with them the properties that they ask, and the functions that they give modules to, where their source is at
hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import CellType, CodeType, FunctionType
from typing import NamedTuple

from torch import nn

from fusednorm.convert.reading import Reader, is_readable
from fusednorm.convert.rewriting import origin
from fusednorm.convert.source import Method, mentions, methods_of
from fusednorm.convert.tree import Tree
from fusednorm.convert.values import BELOW, CHILDREN, Modules, delegates


class Caller(NamedTuple):
    """The method of a module's class that calls a norm."""

    module: nn.Module
    method: str


def callers_of(tree: Tree, norms: Modules) -> dict[int, list[Caller]]:
    """By the norms' ids, who calls them in another way than those that a fold is judged by."""
    owners = [(owner, origin(type(owner))[0]) for owner in tree.modules()]
    live = _part_of_forward({kind for _, kind in owners})
    found: dict[int, list[Caller]] = {}
    for owner, kind in owners:
        names = {*tree.children(owner), *CHILDREN, *BELOW}
        if any(id(child) in norms for child in tree.children(owner).values()):
            names.add("getattr")
        for method in methods_of(kind):
            code = method.function.__code__
            if method.name not in live or not (
                delegates(kind) or _helpers(method) or any(mentions(code, name) for name in names)
            ):
                continue
            for key in norms.keys() & Reader.of_method(tree, owner, method).called() if method.definition else ():
                found.setdefault(key, []).append(Caller(owner, method.name))
        for name, function in vars(owner).items():
            for key in norms.keys() & _around(tree, function):
                found.setdefault(key, []).append(Caller(owner, name))
    return found


def _helpers(method: Method) -> dict[str, FunctionType]:
    """The global functions that a method names, but torch's."""
    function = method.function
    named = {name: function.__globals__.get(name) for name in function.__code__.co_names}
    return {name: value for name, value in named.items() if is_readable(value)}


def _around(tree: Tree, function: object) -> Modules:
    """What a function in an attribute names of the modules around which it was made."""
    if not isinstance(function, FunctionType):
        return {}
    modules = [module for module in map(_content, function.__closure__ or ()) if module is not None]
    children = [tree.children(each) for module in modules for each in module.modules()]
    named = [child for each in children for name, child in each.items() if mentions(function.__code__, name)]
    return {id(child): child for child in named}


def _content(cell: CellType) -> nn.Module | None:
    try:
        return cell.cell_contents if isinstance(cell.cell_contents, nn.Module) else None
    except ValueError:  # still empty
        return None


def _part_of_forward(kinds: set[type]) -> set[str]:
    """The names of methods that the forward of any of these classes mentions, and of those that they mention."""
    mentioned: dict[str, set[str]] = {}
    for kind in kinds:
        for method in methods_of(kind):
            helpers = [(name, function.__code__) for name, function in _helpers(method).items()]
            for name, code in [(method.name, method.function.__code__), *helpers]:
                mentioned.setdefault(name, set()).update(_names_in(code))
    found: set[str] = set()
    waiting = {"forward", "__call__"}
    while waiting:
        found |= waiting
        waiting = {name for each in waiting for name in mentioned.get(each, ())} - found
    return found


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _names_in(each)
