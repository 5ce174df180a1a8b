"""One function of a model's code, read for the modules that it calls or hands on."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from types import FunctionType
from typing import TypeGuard

import torch
from torch import nn

from fusednorm.convert.rewriting import origin
from fusednorm.convert.source import Method, global_value
from fusednorm.convert.tree import Tree, has_attribute
from fusednorm.convert.values import COLLECTING, Modules, Value, Values, is_view

#: Methods of modules that give modules, and those that give pairs of a name and a module.
_BY_THEMSELVES, _IN_PAIRS = frozenset({"children", "modules"}), frozenset({"named_children", "named_modules"})
#: Functions that only look at modules.
_LOOKING = frozenset({"isinstance", "issubclass", "hasattr", "callable", "len", "id", "type", "repr", "str", "print"})
COLLECTIONS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
#: What calls a function for each element, where others hand over what they got.
_EACH = frozenset({"map", "filter", "reduce", "starmap"})
_MOST_SPREAD = 8  # parameters that the elements of a collection of arguments may go to


def is_readable(function: object) -> TypeGuard[FunctionType]:
    return isinstance(function, FunctionType) and function.__module__.partition(".")[0] != torch.__name__


def _keeps_what_it_gets(function: object) -> bool:
    """Whether a function is a class of the user's, whose objects may call what is below the modules that they get."""
    return (
        isinstance(function, type)
        and not issubclass(function, nn.Module)
        and function.__module__.partition(".")[0] not in (torch.__name__, "builtins", "collections")
    )


class Reader(Values):
    """What the names in one function may be, whatever the order of its statements. ``names`` are those of its
    arguments, ``owner`` is the module whose method it is, and ``around`` are the functions that are being read."""

    def __init__(
        self,
        tree: Tree,
        method: Method,
        names: dict[str, Value],
        owner: nn.Module | None = None,
        around: tuple[FunctionType, ...] = (),
    ) -> None:
        super().__init__(tree, names)
        self.method, self.owner = method, owner
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
            if isinstance(node, ast.Call) and not is_view(node) and not self._is_plain(node):
                found |= self.value(node.func).all()
                for reader in self._given_modules(node):
                    found |= reader.called()
        return found

    def looked_at(self) -> Modules:
        """The modules that the function may ask for their class, or for an attribute that not every module has."""
        found: Modules = {}
        for node in self.nodes:
            match node:
                case ast.Call(func=ast.Name(id="isinstance"), args=[ast.expr() as asked, ast.expr() as kinds]):
                    found |= {key: each for key, each in self.value(asked).modules.items() if self._shows(each, kinds)}
                case ast.Call(func=ast.Name(id="type"), args=[asked]):
                    found |= self.value(asked).modules
                case (
                    ast.Attribute(value=asked, attr=str() as name)
                    | ast.Call(
                        func=ast.Name(id="hasattr" | "getattr"), args=[asked, ast.Constant(value=str() as name), *_]
                    )
                ) if not hasattr(nn.Identity, name) and name != "training":
                    found |= {key: each for key, each in self.value(asked).modules.items() if has_attribute(each, name)}
            if isinstance(node, ast.Call) and not is_view(node):
                for reader in self._given_modules(node):
                    found |= reader.looked_at()
        return found

    def _shows(self, module: nn.Module, kinds: ast.expr) -> bool:
        """Whether a question for these classes may have another answer for a module than for an Identity."""
        nodes = kinds.elts if isinstance(kinds, ast.Tuple) else [kinds]
        asked = [global_value(self.method.function, node) for node in nodes]
        known = [kind for kind in asked if isinstance(kind, type)]
        return len(known) < len(asked) or isinstance(module, tuple(known)) or issubclass(nn.Identity, tuple(known))

    @classmethod
    def of_method(cls, tree: Tree, owner: nn.Module, method: Method) -> Reader:
        return cls(tree, method, {method.function.__code__.co_varnames[0]: Value({id(owner): owner})}, owner)

    def returned(self) -> Value:
        return self.union(node.value for node in self.nodes if isinstance(node, ast.Return) and node.value)

    def returned_by(self, function: FunctionType, argument: Value) -> Value:
        return next((reader.returned() for reader in self._reader(function, [argument], {})), Value())

    def _is_plain(self, call: ast.Call) -> bool:
        """Whether a call is ``self.child(...)``, and not in a class whose forward is nn.Sequential's."""
        if self.owner is None or type(self.owner).forward is nn.Sequential.forward:
            return False
        return any(self.method.is_self(call.func, name) for name in self.tree.children(self.owner))

    # --- modules that leave what is read ---

    def _leaving(self, node: ast.AST) -> Iterator[Modules]:
        """The modules that a statement or an expression hands to code that this reader does not follow."""
        match node:
            case ast.Call() if not is_view(node):
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
            yield self._within(call.func.value) | self.below(self.value(call.func.value).modules)
        if isinstance(call.func, ast.Name) and name in _LOOKING | COLLECTING | {"getattr"}:
            return
        if any(Method(name, function).definition is not None for function, _ in self._functions(call.func)):
            return  # _given_modules reads it
        if _keeps_what_it_gets(global_value(self.method.function, call.func)):
            for argument in (*call.args, *(each.value for each in call.keywords)):
                yield self.below(self.value(argument).modules)
        bound = isinstance(call.func, ast.Name) and name in self.inner  # by _bind_arguments
        for value in [*([] if bound else call.args), *(each.value for each in call.keywords)]:
            given = self.value(value)
            # A checkpoint calls what it gets as a whole.
            yield given.modules | given.held if "checkpoint" in name else self._within(value)

    def _within(self, node: ast.expr) -> Modules:
        """What an expression may be and hold, with the elements of collections; a block's children are its own."""
        value = self.value(node)
        collections: Modules = {key: each for key, each in value.modules.items() if isinstance(each, COLLECTIONS)}
        return value.modules | value.held | self.children(collections)

    # --- functions that get modules ---

    def _given_modules(self, call: ast.Call) -> Iterator[Reader]:
        """The functions that get modules by a call: the one that is called, and those that are among its arguments."""
        given = [
            self.value(each) for each in call.args for _ in range(_MOST_SPREAD if isinstance(each, ast.Starred) else 1)
        ]
        named = {each.arg: self.value(each.value) for each in call.keywords}
        if not any(value.any() for value in (*given, *named.values())):
            return
        for function, first in self._functions(call.func):
            yield from self._reader(function, [*first, *given], named)
        for place, argument in enumerate(call.args):
            for function, first in self._functions(argument):
                yield from self._reader(function, [*first, *self._handed(call, place)], named)

    def _handed(self, call: ast.Call, place: int) -> list[Value]:
        """What a function gets that is itself an argument of a call."""
        values = [self.value(each) for each in call.args[place + 1 :]]
        if ast.unparse(call.func).rpartition(".")[2] not in _EACH:
            return values
        return [self.iterated(self.union(call.args[place + 1 :]))] * _MOST_SPREAD

    def _functions(self, node: ast.expr) -> Iterator[tuple[FunctionType, list[Value]]]:
        """The functions that an expression may be, with the arguments that they have already."""
        function = global_value(self.method.function, node)
        if is_readable(function):
            yield function, []
        if not isinstance(node, ast.Attribute):
            return
        for module in self.value(node.value).modules.values():
            found = inspect.getattr_static(origin(type(module))[0], node.attr, None)
            first = [Value({id(module): module})]
            if isinstance(found, (staticmethod, classmethod)):
                first, found = [Value()] if isinstance(found, classmethod) else [], found.__func__
            if is_readable(found):
                yield found, first

    def _reader(self, function: FunctionType, given: list[Value], named: dict[str | None, Value]) -> Iterator[Reader]:
        method, code = Method(function.__name__, function), function.__code__
        if function in self.around or method.definition is None:
            return
        positional, rest = code.co_varnames[: code.co_argcount], Value()
        for value in (*given[len(positional) :], *(value for name, value in named.items() if name is None)):
            rest = rest | value
        names = dict(zip(positional, given, strict=False)) | {name: value for name, value in named.items() if name}
        both = code.co_varnames[code.co_argcount + code.co_kwonlyargcount :][:2]  # *args and **kwargs, if any
        yield Reader(self.tree, method, {**{name: rest.collected() for name in both}, **names}, None, self.around)

    def _bind(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._bind_target(target, self.value(node.value))
        elif isinstance(node, (ast.NamedExpr, ast.AnnAssign, ast.AugAssign)) and node.value is not None:
            self._bind_target(node.target, self.value(node.value))
        elif isinstance(node, (ast.For, ast.comprehension)):
            value = self.value(node.iter)
            if self._yields_modules(node):
                value = Value(self.elements(value), perhaps=value.perhaps)
                self._bind_target(node.target, value, {})
            else:
                self._bind_target(node.target, self.iterated(value), self.children(self.children(value.modules)))
        elif isinstance(node, ast.Call):
            self._bind_arguments(node.func, [self.value(each) for each in node.args])
            for place, argument in enumerate(node.args):
                self._bind_arguments(argument, self._handed(node, place))
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda):
            self.inner |= {each.id: node.value.args for each in node.targets if isinstance(each, ast.Name)}

    def _bind_arguments(self, function: ast.expr, values: list[Value]) -> None:
        """Bind the arguments of a function that stands in this one."""
        arguments = function.args if isinstance(function, ast.Lambda) else None
        if isinstance(function, ast.Name):
            arguments = self.inner.get(function.id)
        for argument, value in zip(arguments.args if arguments else (), values, strict=False):
            self.names[argument.arg] = self.names.get(argument.arg, Value()) | value

    def _bind_target(self, target: ast.expr, value: Value, elements: Modules | None = None) -> None:
        """Bind the names of a target; those of a tuple may be the elements of the value."""
        if isinstance(target, (ast.Tuple, ast.List)):
            value = value | Value(self.elements(value) if elements is None else elements)
        for node in ast.walk(target):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self.names[node.id] = self.names.get(node.id, Value()) | value

    def _yields_modules(self, loop: ast.For | ast.comprehension) -> bool:
        """Whether what a loop binds to names are modules, and nothing that holds others: it runs over the modules of
        modules, or over names and modules and takes each pair apart."""
        view = loop.iter
        if not (isinstance(view, ast.Call) and isinstance(view.func, ast.Attribute)) or view.args or view.keywords:
            return False
        attributes = _IN_PAIRS if isinstance(loop.target, ast.Tuple) else _BY_THEMSELVES
        return view.func.attr in attributes and not self.value(view.func.value).held
