"""Code that reaches a norm past the forward of the norm's parent.

``self.norm(x)`` in the class of its parent, and the forward of an nn.Sequential, are what a fold is judged by. Any
other call gets the norm's result too::

    for layer in self.features:          self.features[:2](x)          self.block.norm(x)          self.norm.forward(x)
        x = layer(x)                     getattr(self, f"norm{i}")(x)

So the methods of every class in the model, as far as a forward leads to them, are read for which modules an expression
may be. What comes into a method as an argument is not followed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, NamedTuple

from torch import nn

from fusednorm.convert.rewriting import origin
from fusednorm.convert.source import Method, mentions, methods_of
from fusednorm.convert.tree import Tree

Modules = dict[int, nn.Module]
#: What gives the children of a module, or the elements of a collection of modules.
_VIEWS = frozenset({"children", "named_children", "_modules", "values", "items", "get"})


class Caller(NamedTuple):
    """The method of a module's class that calls a norm."""

    module: nn.Module
    method: str


@dataclass
class _Value:
    """The modules that an expression may be, and those that it may hold, as a list or an iterator does."""

    modules: Modules = field(default_factory=dict)
    held: Modules = field(default_factory=dict)

    def all(self) -> Modules:
        return self.modules | self.held

    def __or__(self, other: _Value) -> _Value:
        return _Value(self.modules | other.modules, self.held | other.held)


def callers_of(tree: Tree, norms: Modules) -> dict[int, list[Caller]]:
    """By the norms' ids, who calls them in another way than those that a fold is judged by."""
    owners = [(owner, origin(type(owner))[0]) for owner in tree.modules()]
    live = _part_of_forward({kind for _, kind in owners})
    found: dict[int, list[Caller]] = {}
    for owner, kind in owners:
        names = {*tree.children(owner), "children", "named_children", "_modules"}
        if any(id(child) in norms for child in tree.children(owner).values()):
            names.add("getattr")
        for method in methods_of(kind):
            code = method.function.__code__
            if method.name not in live or not any(mentions(code, name) for name in names):
                continue
            for key in norms.keys() & _Reader(tree, owner, method).called() if method.definition else ():
                found.setdefault(key, []).append(Caller(owner, method.name))
    return found


def _part_of_forward(kinds: set[type]) -> set[str]:
    """The names of methods that the forward of any of these classes mentions, and of those that they mention."""
    mentioned: dict[str, set[str]] = {}
    for kind in kinds:
        for method in methods_of(kind):
            mentioned.setdefault(method.name, set()).update(_names_in(method.function.__code__))
    found: set[str] = set()
    waiting = {"forward"}
    while waiting:
        found |= waiting
        waiting = {name for each in waiting for name in mentioned.get(each, ())} - found
    return found


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _names_in(each)


class _Reader:
    """What the names in one method of one module may be, whatever the order of its statements."""

    def __init__(self, tree: Tree, owner: nn.Module, method: Method) -> None:
        self.tree, self.method = tree, method
        self.in_sequence = type(owner).forward is nn.Sequential.forward
        self.names = {method.function.__code__.co_varnames[0]: _Value({id(owner): owner})}

    def called(self) -> Modules:
        """The modules that the method may call, without those it calls as ``self.child(...)``."""
        assert self.method.definition is not None
        nodes = list(ast.walk(self.method.definition))
        for _ in range(2):  # a loop may use above what it binds below
            for node in nodes:
                self._bind(node)
        found: Modules = {}
        for node in nodes:
            if isinstance(node, ast.Call) and not _is_view(node) and not self._is_plain(node):
                found |= self._value(node.func).all()
        return found

    def _is_plain(self, call: ast.Call) -> bool:
        """Whether a call is ``self.child(...)``, and not in a class whose forward is nn.Sequential's."""
        return self.method.is_self(call.func) and not self.in_sequence

    def _bind(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._bind_target(target, self._value(node.value))
        elif isinstance(node, (ast.NamedExpr, ast.AnnAssign, ast.AugAssign)) and node.value is not None:
            self._bind_target(node.target, self._value(node.value))
        elif isinstance(node, (ast.For, ast.comprehension)):
            value = self._value(node.iter)
            self._bind_target(node.target, self._iterated(value), self._children(self._children(value.modules)))

    def _bind_target(self, target: ast.expr, value: _Value, elements: Modules | None = None) -> None:
        """Bind the names of a target; those of a tuple may be the elements of the value."""
        if isinstance(target, (ast.Tuple, ast.List)):
            value = value | _Value(self._elements(value) if elements is None else elements)
        for node in ast.walk(target):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self.names[node.id] = self.names.get(node.id, _Value()) | value

    def _value(self, node: ast.AST) -> _Value:
        match node:
            case ast.Name():
                return self.names.get(node.id, _Value())
            case ast.Attribute():
                return self._attribute(self._value(node.value), node.attr)
            case ast.Subscript(slice=ast.Slice()):
                return _Value(held=self._elements(self._value(node.value)))
            case ast.Subscript():
                return self._iterated(self._value(node.value))
            case ast.NamedExpr() | ast.Starred():
                return self._value(node.value)
            case ast.IfExp():
                return self._value(node.body) | self._value(node.orelse)
            case ast.BoolOp():
                return self._union(node.values)
            case ast.Tuple() | ast.List() | ast.Set():
                return _Value(held=self._union(node.elts).all())
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp():
                return _Value(held=self._value(node.elt).all())
            case ast.Call():
                return self._result(node)
        return _Value()

    def _result(self, call: ast.Call) -> _Value:
        """What a call returns: of getattr a child, of a view its elements, of enumerate and the like what they take."""
        if _is_view(call):
            return self._value(call.func)
        taken = self._union(call.args)
        if isinstance(call.func, ast.Name) and call.func.id == "getattr":
            return _Value(self._children(taken.modules))
        return _Value(held=taken.modules | self._elements(taken))

    def _attribute(self, value: _Value, name: str) -> _Value:
        if name in ("forward", "__call__"):
            return value
        if name in _VIEWS:
            return _Value(held=self._elements(value))
        children = [self.tree.children(module) for module in value.modules.values()]
        lists = [_modules_in(vars(module).get(name)) for module in value.modules.values()]
        return _Value(
            {id(each[name]): each[name] for each in children if name in each},
            {id(module): module for modules in lists for module in modules},
        )

    def _iterated(self, value: _Value) -> _Value:
        return _Value(self._elements(value), value.held)

    def _elements(self, value: _Value) -> Modules:
        return value.held | self._children(value.modules)

    def _children(self, modules: Modules) -> Modules:
        return {id(child): child for each in modules.values() for child in self.tree.children(each).values()}

    def _union(self, nodes: Iterable[ast.expr]) -> _Value:
        found = _Value()
        for node in nodes:
            found = found | self._value(node)
        return found


def _is_view(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr in _VIEWS


def _modules_in(value: Any) -> list[nn.Module]:
    """The modules in a plain list, tuple or dict, which torch does not know."""
    elements = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [each for each in elements if isinstance(each, nn.Module)]
