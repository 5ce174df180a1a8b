"""The source of a module's class, and the places in it that are edited.

What is read is the source that runs: its file is compiled, and compared with the code of the method.
"""

from __future__ import annotations

import ast
import inspect
import linecache
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from types import CodeType, FunctionType
from typing import Any, Literal

import torch

Kind = Literal["leave out", "sum behind", "sum before", "otherwise", "never"]


@dataclass(frozen=True)
class Place:
    """A part of a method's code. The line counts from the method's first one, so that a change elsewhere in the file
    moves nothing."""

    method: str
    line: int
    column: int
    text: str


def first_line(text: str) -> str:
    return text.partition("\n")[0]


@dataclass(frozen=True)
class Edit:
    """What becomes of a part of a method's code, since a norm computes more than it did.

    "leave out": of a call remains its argument. "sum behind", "sum before": a sum becomes one call with the norm, whose
    input is the operand ``input_is``. "otherwise": an ``if`` gets an ``else`` that calls the norm. "never": a branch
    that the block did not take when it was converted raises.
    """

    place: Place
    kind: Kind
    norm: str = ""
    input_is: int = 0


@dataclass(frozen=True)
class Method:
    name: str
    function: FunctionType

    @property
    def definition(self) -> ast.FunctionDef | None:
        """As :func:`definition_of`, which reads a whole file: only a method that matters is asked for it."""
        return definition_of(self.function)

    def is_self(self, node: ast.AST | None, name: str | None = None) -> bool:
        """Whether a node is ``self.name``, or ``self.`` and any name."""
        return (
            isinstance(node, ast.Attribute)
            and (name is None or node.attr == name)
            and isinstance(node.value, ast.Name)
            and node.value.id == self.function.__code__.co_varnames[0]
        )

    def calls(self, node: ast.AST | None, name: str) -> bool:
        return isinstance(node, ast.Call) and self.is_self(node.func, name)

    def applies(self, node: ast.AST | None, name: str) -> bool:
        """Whether a node is ``self.name(x)``, with one argument."""
        return self.calls(node, name) and isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords

    def edit(self, kind: Kind, node: ast.expr | ast.stmt, norm: str = "", input_is: int = 0) -> Edit:
        return Edit(place_of(self.function, self.name, node), kind, norm, input_is)


def methods_of(kind: type) -> list[Method]:
    """Every method and property that a class and its bases define, up to torch's own classes, constructors left out."""
    found = []
    for base in kind.__mro__:
        if base is object or base.__module__.partition(".")[0] == torch.__name__:
            continue
        for name, value in vars(base).items():
            function = inspect.unwrap(value) if callable(value) else getter(value)
            if isinstance(function, FunctionType) and name != "__init__" and function.__code__.co_argcount:
                found.append(Method(name, function))
    return found


def running_methods(kind: type) -> list[Method]:
    """The methods of a class, without those of its bases that other ones stand in for and that nothing calls."""
    methods = methods_of(kind)
    bases = ("super", *(base.__name__ for base in kind.__mro__[1:]))
    if any(mentions(method.function.__code__, name) for method in methods for name in bases):
        return methods
    nearest: dict[str, Method] = {}
    for method in methods:
        nearest.setdefault(method.name, method)
    return list(nearest.values())


def asks_for_its_class(method: Method) -> bool:
    """Whether a method compares its object's class with another one, or keeps something in it."""
    code = method.function.__code__
    if not (mentions(code, "type") or mentions(code, "__class__")) or method.definition is None:
        return False

    def is_class(node: ast.expr) -> bool:
        called = isinstance(node, ast.Call) and ast.unparse(node) == f"type({code.co_varnames[0]})"
        return called or method.is_self(node, "__class__")

    for node in ast.walk(method.definition):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)) and is_class(node.value):
            return True
        if isinstance(node, ast.Compare) and any(map(is_class, (node.left, *node.comparators))):
            return True
    return False


def getter(attribute: object) -> FunctionType | None:
    """The function that gives the value of a property."""
    function = attribute.func if isinstance(attribute, cached_property) else getattr(attribute, "fget", None)
    return function if isinstance(function, FunctionType) else None


@cache
def definition_of(function: FunctionType) -> ast.FunctionDef | None:
    """The source of a function, or None where it is not at hand or not what runs."""
    try:
        tree = ast.parse("".join(lines_of(function)))
        code = code_in(tree, function)
    except (OSError, SyntaxError, ValueError):
        return None
    place = function.__code__.co_firstlineno
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == function.__name__ and _first_line(node) == place:
            return node if code == function.__code__ else None
    return None


def lines_of(function: FunctionType) -> list[str]:
    """The whole file of a function: methods mean other code outside of their class and module."""
    linecache.checkcache(function.__code__.co_filename)
    return linecache.getlines(function.__code__.co_filename, function.__globals__)


def code_in(tree: ast.Module, function: FunctionType) -> CodeType | None:
    """The code that a function has in the source of its file."""
    wanted = (function.__code__.co_qualname, function.__code__.co_firstlineno)
    waiting = [compile(tree, function.__code__.co_filename, "exec", dont_inherit=True)]
    while waiting:
        code = waiting.pop()
        if (code.co_qualname, code.co_firstlineno) == wanted:
            return code
        waiting += [each for each in code.co_consts if isinstance(each, CodeType)]
    return None


def _first_line(node: ast.FunctionDef) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def place_of(function: FunctionType, name: str, node: ast.expr | ast.stmt) -> Place:
    """Where a node stands in the method ``name``."""
    return Place(name, node.lineno - function.__code__.co_firstlineno, node.col_offset, ast.unparse(node))


@dataclass(frozen=True)
class Facts:
    """What a block's children say beside its class's code: which keys are modules that change nothing, attributes that
    are None, and modules whose result is a tensor that nothing else holds; and whether an adapter knows that only those
    branches run which end with the norm."""

    is_identity: Callable[[str], bool] = lambda name: False
    is_none: Callable[[str], bool] = lambda name: False
    makes_new: Callable[[str], bool] = lambda name: False
    branch_is_known: bool = False


def mentions(code: CodeType, name: str) -> bool:
    return name in code.co_names or any(mentions(each, name) for each in code.co_consts if isinstance(each, CodeType))


def assignment(statement: ast.stmt) -> tuple[str | None, ast.expr | None]:
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Name):
        return statement.targets[0].id, statement.value
    return None, None


def argument(call: ast.Call) -> ast.expr | None:
    """What a call of one tensor is about: the first argument, or the object of a method without arguments."""
    if call.args:
        return call.args[0]
    return call.func.value if isinstance(call.func, ast.Attribute) and not call.keywords else None


def taker_of(method: Method, statement: ast.stmt, variable: str | None) -> ast.Call | None:
    """The call that takes a variable in a statement after which the variable's value is gone."""
    name, value = left_in(statement, variable)
    if name is None or name != variable or value is None or name in method.function.__code__.co_cellvars:
        return None
    nodes = list(ast.walk(value))
    uses = [node for node in nodes if isinstance(node, ast.Name) and node.id == variable]
    takers = [node for node in nodes if isinstance(node, ast.Call) and argument(node) in uses]
    return takers[0] if len(uses) == len(takers) == 1 else None


def left_in(statement: ast.stmt, variable: str | None) -> tuple[str | None, ast.expr | None]:
    """An assignment, or a return as if it assigned the variable: after it nobody reads the value that it had."""
    return (variable, statement.value) if isinstance(statement, ast.Return) else assignment(statement)


def blocks_in(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """The lists of statements that a node holds."""
    for name in ("body", "orelse", "finalbody"):
        statements = getattr(node, name, None)
        if isinstance(statements, list):
            yield statements


def global_value(function: FunctionType, name: ast.expr) -> Any:
    """The value of a dotted name in a function that starts at a global variable; None for anything else."""
    if isinstance(name, ast.Attribute):
        value = global_value(function, name.value)
        return None if value is None else getattr(value, name.attr, None)
    code = function.__code__
    if not isinstance(name, ast.Name) or name.id in {*code.co_varnames, *code.co_cellvars, *code.co_freevars}:
        return None
    return function.__globals__.get(name.id)
