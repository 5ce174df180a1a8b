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

import ast
import inspect
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import nn

from fusednorm.convert.rewriting import origin
from fusednorm.convert.source import Method, getter, global_value, mentions, methods_of
from fusednorm.convert.tree import Tree

Modules = dict[int, nn.Module]
#: What gives the children of a module, and what gives all that is below it.
_CHILDREN = frozenset({"children", "named_children", "_modules", "__dict__", "__getattr__"})
_BELOW = frozenset({"modules", "named_modules", "get_submodule"})
#: What gives these, or the elements of a collection of modules.
_VIEWS = _CHILDREN | _BELOW | {"values", "items", "get", "pop", "popleft", "copy"}
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
#: Methods of modules that give modules, and those that give pairs of a name and a module.
_BY_THEMSELVES, _IN_PAIRS = frozenset({"children", "modules"}), frozenset({"named_children", "named_modules"})
#: Functions that only look at modules, and those that return a collection of what they are given, or an element.
_LOOKING = frozenset({"isinstance", "issubclass", "hasattr", "callable", "len", "id", "type", "repr", "str", "print"})
_COLLECTING = frozenset(
    {"list", "tuple", "set", "frozenset", "dict", "enumerate", "zip", "reversed", "iter", "next", "sorted", "filter"}
)
_COLLECTIONS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
#: What calls a function for each element, where others hand over what they got.
_EACH = frozenset({"map", "filter", "reduce", "starmap"})
_MOST_SPREAD = 8  # parameters that the elements of a collection of arguments may go to
_MOST_NESTED = 4  # collections and objects, one in the other, that are searched for modules


class Caller(NamedTuple):
    """The method of a module's class that calls a norm."""

    module: nn.Module
    method: str


@dataclass
class _Value:
    """The modules that an expression may be, those that it may hold, as a list or an iterator does, and those that were
    given to an unknown function whose result it is: a tensor in most cases."""

    modules: Modules = field(default_factory=dict)
    held: Modules = field(default_factory=dict)
    perhaps: Modules = field(default_factory=dict)

    def all(self) -> Modules:
        return self.modules | self.held | self.perhaps

    def any(self) -> bool:
        return bool(self.all())

    def collected(self) -> _Value:
        """What a collection of such values is."""
        return _Value(held=self.modules | self.held, perhaps=self.perhaps)

    def __or__(self, other: _Value) -> _Value:
        return _Value(self.modules | other.modules, self.held | other.held, self.perhaps | other.perhaps)


def callers_of(tree: Tree, norms: Modules) -> dict[int, list[Caller]]:
    """By the norms' ids, who calls them in another way than those that a fold is judged by."""
    owners = [(owner, origin(type(owner))[0]) for owner in tree.modules()]
    live = _part_of_forward({kind for _, kind in owners})
    found: dict[int, list[Caller]] = {}
    for owner, kind in owners:
        names = {*tree.children(owner), *_CHILDREN, *_BELOW}
        if any(id(child) in norms for child in tree.children(owner).values()):
            names.add("getattr")
        for method in methods_of(kind):
            code = method.function.__code__
            if method.name not in live or not (
                _delegates(kind) or _helpers(method) or any(mentions(code, name) for name in names)
            ):
                continue
            for key in norms.keys() & _of_method(tree, owner, method).called() if method.definition else ():
                found.setdefault(key, []).append(Caller(owner, method.name))
        for name, function in vars(owner).items():
            for key in norms.keys() & _around(tree, function):
                found.setdefault(key, []).append(Caller(owner, name))
    return found


def _helpers(method: Method) -> dict[str, FunctionType]:
    """The global functions that a method names, but torch's."""
    function = method.function
    named = {name: function.__globals__.get(name) for name in function.__code__.co_names}
    return {name: value for name, value in named.items() if _is_readable(value)}


def _is_readable(function: object) -> TypeGuard[FunctionType]:
    return isinstance(function, FunctionType) and function.__module__.partition(".")[0] != torch.__name__


@cache
def _delegates(kind: type) -> bool:
    """Whether a class answers for attributes that it does not have."""
    return inspect.getattr_static(kind, "__getattr__", None) is not nn.Module.__getattr__


@cache
def _getter(kind: type, name: str) -> FunctionType | None:
    return getter(inspect.getattr_static(kind, name, None))


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


def _of_method(tree: Tree, owner: nn.Module, method: Method) -> _Reader:
    return _Reader(tree, method, {method.function.__code__.co_varnames[0]: _Value({id(owner): owner})}, owner)


class _Reader:
    """What the names in one function may be, whatever the order of its statements. ``names`` are those of its
    arguments, ``owner`` is the module whose method it is, and ``around`` are the functions that are being read."""

    def __init__(
        self,
        tree: Tree,
        method: Method,
        names: dict[str, _Value],
        owner: nn.Module | None = None,
        around: tuple[FunctionType, ...] = (),
    ) -> None:
        self.tree, self.method, self.names, self.owner = tree, method, names, owner
        self.around = (*around, method.function)
        assert method.definition is not None
        self.nodes = list(ast.walk(method.definition))
        self.inner = {node.name: node.args for node in self.nodes[1:] if isinstance(node, ast.FunctionDef)}
        for _ in range(2):  # a loop may use above what it binds below
            for node in self.nodes:
                self._bind(node)

    def called(self) -> Modules:
        """The modules that the function may call or give to code that is not read, without those that a method calls
        as ``self.child(...)``."""
        found: Modules = {}
        for node in self.nodes:
            for left in self._leaving(node):
                found |= left
            if isinstance(node, ast.Call) and not _is_view(node) and not self._is_plain(node):
                found |= self._value(node.func).all()
                for reader in self._given_modules(node):
                    found |= reader.called()
        return found

    def returned(self) -> _Value:
        return self._union(node.value for node in self.nodes if isinstance(node, ast.Return) and node.value)

    def _is_plain(self, call: ast.Call) -> bool:
        """Whether a call is ``self.child(...)``, and not in a class whose forward is nn.Sequential's."""
        if self.owner is None or type(self.owner).forward is nn.Sequential.forward:
            return False
        return any(self.method.is_self(call.func, name) for name in self.tree.children(self.owner))

    # --- modules that leave what is read ---

    def _leaving(self, node: ast.AST) -> Iterator[Modules]:
        """The modules that a statement or an expression hands to code that this reader does not follow."""
        match node:
            case ast.Call() if not _is_view(node):
                yield from self._given_away(node)
            case ast.Return(value=ast.expr() as value) | ast.Yield(value=ast.expr() as value):
                yield self._within(value)
            case ast.YieldFrom(value=value) | ast.Match(subject=value) | ast.Lambda(body=value):
                yield self._within(value)
            case ast.Assign() if any(isinstance(each, (ast.Subscript, ast.Attribute)) for each in node.targets):
                yield self._within(node.value)
            case ast.arguments():
                for default in (*node.defaults, *node.kw_defaults):
                    yield self._within(default) if default is not None else {}

    def _given_away(self, call: ast.Call) -> Iterator[Modules]:
        name = ast.unparse(call.func).rpartition(".")[2]
        if isinstance(call.func, ast.Attribute) and (name == "apply" or name.startswith("register_")):
            yield self._within(call.func.value) | self._below(self._value(call.func.value).modules)
        if isinstance(call.func, ast.Name) and name in _LOOKING | _COLLECTING | {"getattr"}:
            return
        if any(Method(name, function).definition is not None for function, _ in self._functions(call.func)):
            return  # _given_modules reads it
        bound = isinstance(call.func, ast.Name) and name in self.inner  # by _bind_arguments
        for value in [*([] if bound else call.args), *(each.value for each in call.keywords)]:
            given = self._value(value)
            # A checkpoint calls what it gets as a whole.
            yield given.modules | given.held if "checkpoint" in name else self._within(value)

    def _within(self, node: ast.expr) -> Modules:
        """What an expression may be and hold, with the elements of collections; a block's children are its own."""
        value = self._value(node)
        collections: Modules = {key: each for key, each in value.modules.items() if isinstance(each, _COLLECTIONS)}
        return value.modules | value.held | self._children(collections)

    # --- functions that get modules ---

    def _given_modules(self, call: ast.Call) -> Iterator[_Reader]:
        """The functions that get modules by a call: the one that is called, and those that are among its arguments."""
        given = [
            self._value(each) for each in call.args for _ in range(_MOST_SPREAD if isinstance(each, ast.Starred) else 1)
        ]
        named = {each.arg: self._value(each.value) for each in call.keywords}
        if not any(value.any() for value in (*given, *named.values())):
            return
        for function, first in self._functions(call.func):
            yield from self._reader(function, [*first, *given], named)
        for place, argument in enumerate(call.args):
            for function, first in self._functions(argument):
                yield from self._reader(function, [*first, *self._handed(call, place)], named)

    def _handed(self, call: ast.Call, place: int) -> list[_Value]:
        """What a function gets that is itself an argument of a call."""
        values = [self._value(each) for each in call.args[place + 1 :]]
        if ast.unparse(call.func).rpartition(".")[2] not in _EACH:
            return values
        return [self._iterated(self._union(call.args[place + 1 :]))] * _MOST_SPREAD

    def _functions(self, node: ast.expr) -> Iterator[tuple[FunctionType, list[_Value]]]:
        """The functions that an expression may be, with the arguments that they have already."""
        function = global_value(self.method.function, node)
        if _is_readable(function):
            yield function, []
        if not isinstance(node, ast.Attribute):
            return
        for module in self._value(node.value).modules.values():
            found = inspect.getattr_static(origin(type(module))[0], node.attr, None)
            first = [_Value({id(module): module})]
            if isinstance(found, (staticmethod, classmethod)):
                first, found = [_Value()] if isinstance(found, classmethod) else [], found.__func__
            if _is_readable(found):
                yield found, first

    def _reader(
        self, function: FunctionType, given: list[_Value], named: dict[str | None, _Value]
    ) -> Iterator[_Reader]:
        method, code = Method(function.__name__, function), function.__code__
        if function in self.around or method.definition is None:
            return
        positional, rest = code.co_varnames[: code.co_argcount], _Value()
        for value in (*given[len(positional) :], *(value for name, value in named.items() if name is None)):
            rest = rest | value
        names = dict(zip(positional, given, strict=False)) | {name: value for name, value in named.items() if name}
        both = code.co_varnames[code.co_argcount + code.co_kwonlyargcount :][:2]  # *args and **kwargs, if any
        yield _Reader(self.tree, method, {**{name: rest.collected() for name in both}, **names}, None, self.around)

    def _bind(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._bind_target(target, self._value(node.value))
        elif isinstance(node, (ast.NamedExpr, ast.AnnAssign, ast.AugAssign)) and node.value is not None:
            self._bind_target(node.target, self._value(node.value))
        elif isinstance(node, (ast.For, ast.comprehension)):
            value = self._value(node.iter)
            if self._yields_modules(node):
                value = _Value(self._elements(value), perhaps=value.perhaps)
                self._bind_target(node.target, value, {})
            else:
                self._bind_target(node.target, self._iterated(value), self._children(self._children(value.modules)))
        elif isinstance(node, ast.Call):
            self._bind_arguments(node.func, [self._value(each) for each in node.args])
            for place, argument in enumerate(node.args):
                self._bind_arguments(argument, self._handed(node, place))
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda):
            self.inner |= {each.id: node.value.args for each in node.targets if isinstance(each, ast.Name)}

    def _bind_arguments(self, function: ast.expr, values: list[_Value]) -> None:
        """Bind the arguments of a function that stands in this one."""
        arguments = function.args if isinstance(function, ast.Lambda) else None
        if isinstance(function, ast.Name):
            arguments = self.inner.get(function.id)
        for argument, value in zip(arguments.args if arguments else (), values, strict=False):
            self.names[argument.arg] = self.names.get(argument.arg, _Value()) | value

    def _bind_target(self, target: ast.expr, value: _Value, elements: Modules | None = None) -> None:
        """Bind the names of a target; those of a tuple may be the elements of the value."""
        if isinstance(target, (ast.Tuple, ast.List)):
            value = value | _Value(self._elements(value) if elements is None else elements)
        for node in ast.walk(target):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self.names[node.id] = self.names.get(node.id, _Value()) | value

    def _yields_modules(self, loop: ast.For | ast.comprehension) -> bool:
        """Whether what a loop binds to names are modules, and nothing that holds others: it runs over the modules of
        modules, or over names and modules and takes each pair apart."""
        view = loop.iter
        if not (isinstance(view, ast.Call) and isinstance(view.func, ast.Attribute)) or view.args or view.keywords:
            return False
        attributes = _IN_PAIRS if isinstance(loop.target, ast.Tuple) else _BY_THEMSELVES
        return view.func.attr in attributes and not self._value(view.func.value).held

    def _value(self, node: ast.AST) -> _Value:
        match node:
            case ast.Name():
                return self.names.get(node.id, _Value())
            case ast.Attribute():
                return self._attribute(self._value(node.value), node.attr)
            case ast.Subscript(slice=ast.Slice()):
                value = self._value(node.value)
                return _Value(held=self._elements(value), perhaps=value.perhaps)
            case ast.Subscript():
                return self._iterated(self._value(node.value))
            case ast.NamedExpr():
                return self._value(node.value)
            case ast.Starred():
                return self._iterated(self._value(node.value))
            case ast.IfExp():
                return self._value(node.body) | self._value(node.orelse)
            case ast.BoolOp():
                return self._union(node.values)
            case ast.BinOp():
                return self._union((node.left, node.right)).collected()
            case ast.Tuple() | ast.List() | ast.Set():
                return self._union(node.elts).collected()
            case ast.Dict():
                return self._union(node.values).collected()
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp():
                return self._value(node.elt).collected()
            case ast.DictComp():
                return self._value(node.value).collected()
            case ast.Call():
                return self._result(node)
        return _Value()

    def _result(self, call: ast.Call) -> _Value:
        """What a call returns: of getattr an attribute, of a view its elements, of enumerate and the like what they
        take, and of any other function perhaps that."""
        if _is_view(call):
            return self._value(call.func)
        if isinstance(call.func, ast.Attribute) and call.func.attr in _SAME:
            return _Value(self._value(call.func.value).modules)
        taken = self._union(call.args)
        name = call.func.id if isinstance(call.func, ast.Name) else None
        if name == "getattr" and len(call.args) > 1:
            asked = call.args[1]
            if isinstance(asked, ast.Constant):
                return self._attribute(self._value(call.args[0]), str(asked.value)) | self._union(call.args[2:])
            return _Value(perhaps=self._children(taken.modules))
        all_given = taken.modules | self._elements(taken)
        if name in _COLLECTING:
            return _Value(held=all_given, perhaps=taken.perhaps)
        return _Value(perhaps=all_given | taken.perhaps)

    def _attribute(self, value: _Value, name: str) -> _Value:
        if name in ("forward", "__call__"):
            return value
        if name in _BELOW:
            return _Value(held=value.held | self._below(value.modules), perhaps=value.perhaps)
        if name in _VIEWS:
            return _Value(held=self._elements(value), perhaps=value.perhaps)
        found = _Value() if name in _OF_TENSORS else _Value(held=value.held, perhaps=value.perhaps)
        for module in value.modules.values():
            found = found | self._attribute_of(module, name)
        return found

    def _attribute_of(self, module: nn.Module, name: str) -> _Value:
        child = self.tree.children(module).get(name)
        if child is not None:
            return _Value({id(child): child})
        if name in vars(module):
            return _Value(held={id(each): each for each in _modules_in(vars(module)[name])})
        kind = origin(type(module))[0]
        function = _getter(kind, name)
        if function is not None:
            readers = self._reader(function, [_Value({id(module): module})], {})
            return next((reader.returned() for reader in readers), _Value())
        if not _delegates(kind) or hasattr(kind, name):
            return _Value()
        below = [self.tree.children(each) for each in module.modules()]
        return _Value({id(each[name]): each[name] for each in below if name in each})

    def _below(self, modules: Modules) -> Modules:
        return {id(each): each for module in modules.values() for each in module.modules() if each is not module}

    def _iterated(self, value: _Value) -> _Value:
        return _Value(self._elements(value), value.held, value.perhaps)

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


def _modules_in(value: Any, most: int = _MOST_NESTED) -> list[nn.Module]:
    """The modules in a plain collection or object, which torch does not know."""
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
