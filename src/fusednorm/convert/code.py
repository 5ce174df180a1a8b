"""What the code of a module's own class shows: a norm whose result goes into an activation and nowhere else.

Two forms of code show it, in whatever method they stand::

    self.act(self.norm(x))          F.silu(self.norm(x))          self.norm(x).relu()

    x = self.norm(y)                if condition:                 # every branch ends with the same norm
    x = self.act(x)                     x = self.norm(y)
    # or return self.act(x)         else:
                                        x = self.norm(z)
                                    x = self.act(x)

In both nothing else can see the norm's result. Every call of the norm in the class has to be of such a form. What is
read is the source that runs: its file is compiled, and compared with the code of the method.
"""

from __future__ import annotations

import ast
import inspect
import linecache
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from types import CodeType, FunctionType
from typing import Any

import torch

from fusednorm.activations import Activation
from fusednorm.equivalents import function_activation


@dataclass(frozen=True)
class Drop:
    """A call of an activation that a fused norm makes superfluous: its method, its place there and its text.

    The line counts from the method's first one, so that a change elsewhere in the file moves nothing.
    """

    method: str
    line: int
    column: int
    text: str


@dataclass(frozen=True)
class Found:
    """The activation behind a norm: a child of the block by its key, or what a function computes.

    ``alone`` says that the class mentions the child in this one call only.
    """

    child: str | None
    function: Activation | None
    drops: frozenset[Drop]
    alone: bool


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


# --- reading ---


def methods_of(kind: type) -> list[Method]:
    """Every method that a class and its bases define, up to torch's own classes, constructors left out."""
    found = []
    for base in kind.__mro__:
        if base is object or base.__module__.partition(".")[0] == torch.__name__:
            continue
        for name, value in vars(base).items():
            function = inspect.unwrap(value) if callable(value) else None
            if isinstance(function, FunctionType) and name != "__init__" and function.__code__.co_argcount:
                found.append(Method(name, function))
    return found


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


def drop_of(function: FunctionType, name: str, call: ast.Call) -> Drop:
    return Drop(name, call.lineno - function.__code__.co_firstlineno, call.col_offset, ast.unparse(call))


def mentions(code: CodeType, name: str) -> bool:
    return name in code.co_names or any(mentions(each, name) for each in code.co_consts if isinstance(each, CodeType))


# --- what follows a norm ---


def follower(kind: type, norm: str, is_identity: Callable[[str], bool], branch_is_known: bool) -> Found | str | None:
    """The activation behind the norm ``self.norm`` in the code of a class; why there is none, or None without a word.

    ``is_identity`` tells the children that change nothing, ``branch_is_known`` that only those branches run which end
    with the norm.
    """
    methods = methods_of(kind)
    relevant = [method for method in methods if mentions(method.function.__code__, norm)]
    if not relevant:
        return None
    if any(method.definition is None for method in relevant):
        return f"the source of {kind.__name__} is not at hand, or not what runs"
    calls: set[ast.Call] = set()
    matched: set[ast.Call] = set()
    drops: dict[Drop, tuple[Method, ast.Call]] = {}
    for method in relevant:
        assert method.definition is not None
        uses = list(_uses(method, norm))
        if None in uses:
            return None
        calls.update(use for use in uses if use is not None)
        for inner, others, outer in _matches(method, norm, is_identity):
            if _activation(method, outer) is not None and (not others or branch_is_known):
                matched.update(inner)
                drops[drop_of(method.function, method.name, outer)] = (method, outer)
    if not drops or not (calls <= matched or branch_is_known):
        return None
    kinds = {_activation(method, outer) for method, outer in drops.values()}
    if len(kinds) > 1:
        return "its calls are followed by different activations"
    activation = kinds.pop()
    if isinstance(activation, Activation):
        return Found(None, activation, frozenset(drops), False)
    assert isinstance(activation, str)
    return Found(activation, None, frozenset(drops), len(drops) == 1 and _mentioned_once(methods, activation))


def _uses(method: Method, name: str) -> Iterator[ast.Call | None]:
    """Every call of ``self.name``; None for each other use but reading an attribute of it and asking whether it is
    there."""
    assert method.definition is not None
    for node in ast.walk(method.definition):
        for child in ast.iter_child_nodes(node):
            if not method.is_self(child, name):
                continue
            if isinstance(node, ast.Call) and node.func is child:
                yield node
            elif not isinstance(node, (ast.Attribute, ast.If, ast.IfExp, ast.Compare, ast.BoolOp, ast.UnaryOp)):
                yield None


def _mentioned_once(methods: list[Method], name: str) -> bool:
    relevant = [method for method in methods if mentions(method.function.__code__, name)]
    return len(relevant) == 1 and len(list(_uses(relevant[0], name))) == 1


Match = tuple[list[ast.Call], bool, ast.Call]


def _matches(method: Method, norm: str, is_identity: Callable[[str], bool]) -> Iterator[Match]:
    """The calls of a norm, whether other branches lead there too, and the call that takes their result."""
    assert method.definition is not None
    for node in ast.walk(method.definition):
        if isinstance(node, ast.Call) and method.calls(argument(node), norm):
            inner = argument(node)
            assert isinstance(inner, ast.Call)
            yield [inner], False, node
        for name in ("body", "orelse", "finalbody"):
            statements = getattr(node, name, None)
            if isinstance(statements, list):
                yield from _in_block(method, statements, norm, is_identity)


def _in_block(
    method: Method, statements: list[ast.stmt], norm: str, is_identity: Callable[[str], bool]
) -> Iterator[Match]:
    for place, statement in enumerate(statements):
        variable, inner, others = _ending(method, statement, norm)
        if not inner:
            continue
        for following in statements[place + 1 :]:
            taker = _taker(method, following, variable)
            if taker is None:
                break
            if method.is_self(taker.func) and isinstance(taker.func, ast.Attribute) and is_identity(taker.func.attr):
                continue
            yield inner, others, taker
            break


def _taker(method: Method, statement: ast.stmt, variable: str | None) -> ast.Call | None:
    """The call that takes a variable in a statement after which the variable's value is gone."""
    name, value = _assignment(statement)
    if isinstance(statement, ast.Return):
        name, value = variable, statement.value
    if name is None or name != variable or value is None or name in method.function.__code__.co_cellvars:
        return None
    nodes = list(ast.walk(value))
    uses = [node for node in nodes if isinstance(node, ast.Name) and node.id == variable]
    takers = [node for node in nodes if isinstance(node, ast.Call) and argument(node) in uses]
    return takers[0] if len(uses) == len(takers) == 1 else None


def _ending(method: Method, statement: ast.stmt, norm: str) -> tuple[str | None, list[ast.Call], bool]:
    """The variable that a statement leaves a norm's result in, the calls of it, and whether it may leave another."""
    name, value = _assignment(statement)
    if name is not None and isinstance(value, ast.Call) and method.calls(value, norm):
        return name, [value], False
    if not isinstance(statement, ast.If):
        return None, [], True
    found: list[ast.Call] = []
    variables: set[str | None] = set()
    others = not statement.orelse
    for branch in filter(None, (statement.body, statement.orelse)):
        if isinstance(branch[-1], (ast.Raise, ast.Return)):
            continue
        variable, inner, more = _ending(method, branch[-1], norm)
        if inner:
            variables.add(variable)
        found += inner
        others = others or more
    return (variables.pop(), found, others) if len(variables) == 1 else (None, [], True)


def _assignment(statement: ast.stmt) -> tuple[str | None, ast.expr | None]:
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Name):
        return statement.targets[0].id, statement.value
    return None, None


def argument(call: ast.Call) -> ast.expr | None:
    """What a call of one tensor is about: the first argument, or the object of a method without arguments."""
    if call.args:
        return call.args[0]
    return call.func.value if isinstance(call.func, ast.Attribute) and not call.keywords else None


def _activation(method: Method, call: ast.Call) -> Activation | str | None:
    """What a call computes: an activation, the key of a child that it calls, or None."""
    if method.is_self(call.func):
        assert isinstance(call.func, ast.Attribute)
        return call.func.attr if len(call.args) == 1 and not call.keywords else None
    if not call.args:
        assert isinstance(call.func, ast.Attribute)
        return function_activation(getattr(torch.Tensor, call.func.attr, None), {})
    function = _global_value(method.function, call.func)
    try:
        names = list(inspect.signature(function).parameters)[1:] if len(call.args) > 1 else []
        options = {name: ast.literal_eval(value) for name, value in zip(names, call.args[1:], strict=False)}
        options |= {keyword.arg or "**": ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (TypeError, ValueError):  # no function, or an option that is no constant
        return None
    return function_activation(function, options) if len(names) >= len(call.args) - 1 else None


def _global_value(function: FunctionType, name: ast.expr) -> Any:
    """The value of a dotted name that starts at a global variable; None for anything else."""
    if isinstance(name, ast.Attribute):
        value = _global_value(function, name.value)
        return None if value is None else getattr(value, name.attr, None)
    code = function.__code__
    if not isinstance(name, ast.Name) or name.id in {*code.co_varnames, *code.co_cellvars, *code.co_freevars}:
        return None
    return function.__globals__.get(name.id)
