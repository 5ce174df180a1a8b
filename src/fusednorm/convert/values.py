"""What the expressions of code may be, as far as modules of a model go."""

from __future__ import annotations

import ast
import inspect
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from fusednorm.convert.rewriting import origin
from fusednorm.convert.source import getter
from fusednorm.convert.tree import Tree, may_be_asked

Modules = dict[int, nn.Module]
#: What gives the children of a module, and what gives all that is below it.
CHILDREN = frozenset({"children", "named_children", "_modules", "__dict__", "__getattr__"})
BELOW = frozenset({"modules", "named_modules", "get_submodule"})
#: What gives these, or the elements of a collection of modules.
_VIEWS = CHILDREN | BELOW | {"values", "items", "get", "pop", "popleft", "copy"}
#: Methods of a module that return the module.
_SAME = frozenset(
    {"to", "type", "float", "double", "half", "bfloat16", "cpu", "cuda", "train", "eval", "requires_grad_", "apply"}
)
#: Methods of tensors, and of nothing that holds modules: what a function made of a module and tensors may be a tensor.
_OF_TENSORS = frozenset(
    {"to", "type", "type_as", "float", "double", "half", "bfloat16", "long", "int", "bool", "cpu", "cuda", "detach"}
    | {"view", "view_as", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "permute", "transpose", "movedim"}
    | {"chunk", "split", "unbind", "expand", "expand_as", "repeat", "contiguous", "clone", "size", "dim", "numel"}
)
#: Functions that return a collection of what they are given, or an element.
COLLECTING = frozenset(
    {"list", "tuple", "set", "frozenset", "dict", "enumerate", "zip", "reversed", "iter", "next", "sorted", "filter"}
)
_MOST_NESTED = 4  # collections and objects, one in the other, that are searched for modules


@dataclass
class Value:
    """The modules that an expression may be, those that it may hold, as a list or an iterator does, and those that were
    given to an unknown function whose result it is: a tensor in most cases."""

    modules: Modules = field(default_factory=dict)
    held: Modules = field(default_factory=dict)
    perhaps: Modules = field(default_factory=dict)

    def all(self) -> Modules:
        return self.modules | self.held | self.perhaps

    def any(self) -> bool:
        return bool(self.all())

    def collected(self) -> Value:
        """What a collection of such values is."""
        return Value(held=self.modules | self.held, perhaps=self.perhaps)

    def __or__(self, other: Value) -> Value:
        return Value(self.modules | other.modules, self.held | other.held, self.perhaps | other.perhaps)


@cache
def delegates(kind: type) -> bool:
    """Whether a class answers for attributes that it does not have."""
    return inspect.getattr_static(kind, "__getattr__", None) is not nn.Module.__getattr__


@cache
def _getter(kind: type, name: str) -> FunctionType | None:
    return getter(inspect.getattr_static(kind, name, None))


class Values(ABC):
    """What expressions may be where names are what ``names`` says."""

    def __init__(self, tree: Tree, names: dict[str, Value]) -> None:
        self.tree, self.names = tree, names

    @abstractmethod
    def returned_by(self, function: FunctionType, argument: Value) -> Value:
        """What a function of one argument may return."""

    def value(self, node: ast.AST) -> Value:
        match node:
            case ast.Name():
                return self.names.get(node.id, Value())
            case ast.Attribute():
                return self._attribute(self.value(node.value), node.attr)
            case ast.Subscript(slice=ast.Slice()):
                value = self.value(node.value)
                return Value(held=self.elements(value), perhaps=value.perhaps)
            case ast.Subscript():
                return self.iterated(self.value(node.value))
            case ast.NamedExpr():
                return self.value(node.value)
            case ast.Starred():
                return self.iterated(self.value(node.value))
            case ast.IfExp():
                return self.value(node.body) | self.value(node.orelse)
            case ast.BoolOp():
                return self.union(node.values)
            case ast.BinOp():
                return self.union((node.left, node.right)).collected()
            case ast.Tuple() | ast.List() | ast.Set():
                return self.union(node.elts).collected()
            case ast.Dict():
                return self.union(node.values).collected()
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp():
                return self.value(node.elt).collected()
            case ast.DictComp():
                return self.value(node.value).collected()
            case ast.Call():
                return self._result(node)
        return Value()

    def _result(self, call: ast.Call) -> Value:
        """What a call returns: of getattr an attribute, of a view its elements, of enumerate and the like what they
        take, and of any other function perhaps that."""
        if is_view(call):
            return self.value(call.func)
        if isinstance(call.func, ast.Attribute) and call.func.attr in _SAME:
            return Value(self.value(call.func.value).modules)
        taken = self.union(call.args)
        name = call.func.id if isinstance(call.func, ast.Name) else None
        if name == "getattr" and len(call.args) > 1:
            asked = call.args[1]
            if isinstance(asked, ast.Constant):
                return self._attribute(self.value(call.args[0]), str(asked.value)) | self.union(call.args[2:])
            asked_of = self.value(call.args[0])
            return Value(self.children(asked_of.modules)) | self.union(call.args[2:])
        all_given = taken.modules | self.elements(taken)
        if name in COLLECTING:
            return Value(held=all_given, perhaps=taken.perhaps)
        return Value(perhaps=all_given | taken.perhaps)

    def _attribute(self, value: Value, name: str) -> Value:
        if name in ("forward", "__call__"):
            return value
        if name in BELOW:
            return Value(held=value.held | self.below(value.modules), perhaps=value.perhaps)
        if name in _VIEWS:
            return Value(held=self.elements(value), perhaps=value.perhaps)
        found = Value() if name in _OF_TENSORS else Value(held=value.held, perhaps=value.perhaps)
        for module in value.modules.values():
            found = found | self._attribute_of(module, name)
        return found

    def _attribute_of(self, module: nn.Module, name: str) -> Value:
        child = self.tree.children(module).get(name)
        if child is not None:
            return Value({id(child): child})
        if name in vars(module):
            return Value(held={id(each): each for each in _modules_in(vars(module)[name])})
        kind = origin(type(module))[0]
        function = _getter(kind, name)
        if function is not None:
            return self.returned_by(function, Value({id(module): module}))
        if not delegates(kind) or hasattr(kind, name):
            return Value()
        below = [self.tree.children(each) for each in module.modules()]
        return Value({id(each[name]): each[name] for each in below if name in each})

    def below(self, modules: Modules) -> Modules:
        return {id(each): each for module in modules.values() for each in module.modules() if each is not module}

    def iterated(self, value: Value) -> Value:
        return Value(self.elements(value), value.held, value.perhaps)

    def elements(self, value: Value) -> Modules:
        return value.held | self.children(value.modules)

    def children(self, modules: Modules) -> Modules:
        return {id(child): child for each in modules.values() for child in self.tree.children(each).values()}

    def union(self, nodes: Iterable[ast.expr]) -> Value:
        found = Value()
        for node in nodes:
            found = found | self.value(node)
        return found


def is_view(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr in _VIEWS


def _modules_in(value: Any, most: int = _MOST_NESTED) -> list[nn.Module]:
    """The modules in a plain collection or object, which torch does not know."""
    if not may_be_asked(value):
        return []
    if isinstance(value, nn.Module):
        return [value]
    elements: Iterable[Any] = ()
    if isinstance(value, dict):
        elements = value.values()
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        elements = value
    elif not isinstance(value, (type, ModuleType, FunctionType, torch.Tensor)):
        elements = getattr(value, "__dict__", {}).values()
    return [module for each in elements for module in _modules_in(each, most - 1)] if most else []
