"""What the code of a module's own class shows: a norm whose result goes into an activation and nowhere else.

Two forms of code show it, in whatever method they stand::

    self.act(self.norm(x))          F.silu(self.norm(x))          self.norm(x).relu()

    x = self.norm(y)                if condition:                 # every branch ends with the same norm
    x = self.act(x)                     x = self.norm(y)
    # or return self.act(x)         else:
                                        x = self.norm(z)
                                    x = self.act(x)

In both nothing else can see the norm's result. A sum may stand between norm and activation, in the forms of
:mod:`fusednorm.convert.sum_code`. Every call of the norm in the class has to be of such a form.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fusednorm.activations import Activation
from fusednorm.convert.source import (
    Edit,
    Facts,
    Method,
    argument,
    assignment,
    blocks_in,
    global_value,
    mentions,
    methods_of,
    running_methods,
    taker_of,
)
from fusednorm.convert.sum_code import sums_before, sums_behind
from fusednorm.convert.values import BELOW, CHILDREN
from fusednorm.equivalents import function_activation


@dataclass(frozen=True)
class Found:
    """The activation behind a norm: a child of the block by its key, or what a function computes.

    ``alone`` says that the class mentions the child in this one call only, and ``sums`` has the text of each sum that
    stands between norm and activation.
    """

    child: str | None
    function: Activation | None
    edits: frozenset[Edit]
    alone: bool
    sums: tuple[str, ...] = ()


@dataclass(frozen=True)
class Match:
    """The calls of a norm, whether other branches lead there too, and the call that takes their result or its sum."""

    inner: tuple[ast.Call, ...]
    others: bool
    taker: ast.Call
    edits: frozenset[Edit] = frozenset()
    sum: str | None = None


def follower(kind: type, norm: str, facts: Facts) -> Found | str | None:
    """The activation behind the norm ``self.norm`` in the code of a class; why there is none, or None."""
    methods = running_methods(kind)
    relevant = [method for method in methods if mentions(method.function.__code__, norm)]
    if not relevant:
        return None
    if any(method.definition is None for method in relevant):
        return f"the source of {kind.__name__} is not at hand, or not what runs"
    names = [method.name for method in relevant]
    if len({*names}) < len(names):
        return None  # the method of a base, which nothing edits, runs too
    if any(_wrapped_by_others(kind, method, norm) or _ends_otherwise(method, norm) for method in relevant):
        return None
    calls: set[ast.Call] = set()
    found: list[tuple[Method, Match]] = []
    for method in relevant:
        assert method.definition is not None
        uses = list(_uses(method, norm))
        if None in uses:
            return None
        calls.update(use for use in uses if use is not None)
        found += [
            (method, match)
            for match in _matches(method, norm, facts)
            if _activation(method, match.taker) is not None and (not match.others or facts.branch_is_known)
        ]
    if not found or not (facts.branch_is_known or calls <= {call for _, match in found for call in match.inner}):
        return None
    kinds = {_activation(method, match.taker) for method, match in found}
    if len(kinds) > 1:
        return "its calls are followed by different activations"
    activation = kinds.pop()
    takers = {method.edit("leave out", match.taker) for method, match in found}
    edits = takers.union(*(match.edits for _, match in found))
    sums = tuple(match.sum for _, match in found if match.sum is not None)
    if isinstance(activation, Activation):
        return Found(None, activation, frozenset(edits), False, sums)
    assert isinstance(activation, str)
    alone = len(takers) == 1 and not sums and _mentioned_once(methods, activation)
    alone = alone and not is_looked_at(kind, activation)
    return Found(activation, None, frozenset(edits), alone, sums)


def _wrapped_by_others(kind: type, method: Method, child: str) -> bool:
    """Whether a decorator that is not torch's stands around a method, and mentions a child or what gives children."""
    values = [vars(base)[method.name] for base in kind.__mro__ if method.name in vars(base)]
    wrapper = next((value for value in values if inspect.unwrap(value) is method.function), method.function)
    while wrapper is not method.function:
        package = str(getattr(wrapper, "__globals__", {}).get("__name__", "")).partition(".")[0]
        code = getattr(wrapper, "__code__", None)
        alien = package not in (torch.__name__, "contextlib")
        if alien and (code is None or any(mentions(code, name) for name in (child, "getattr", *CHILDREN, *BELOW))):
            return True
        wrapper = getattr(wrapper, "__wrapped__", method.function)
    return False


def _ends_otherwise(method: Method, norm: str) -> bool:
    """Whether a norm is called in a ``try``, whose other parts see what it left too."""
    assert method.definition is not None
    return any(
        method.is_self(inner, norm)
        for node in ast.walk(method.definition)
        if isinstance(node, ast.Try)
        for statement in node.body
        for inner in ast.walk(statement)
    )


def is_looked_at(kind: type, name: str) -> bool:
    """Whether the code of a class reads an attribute of ``self.name``, or asks for its class."""
    return any(
        _reads_attribute(method, node, child, _LOOKING)
        for method in methods_of(kind)
        if mentions(method.function.__code__, name) and method.definition is not None
        for node in ast.walk(method.definition)
        for child in ast.iter_child_nodes(node)
        if method.is_self(child, name)
    )


def is_changed(kind: type, name: str) -> bool:
    """Whether the code of a class, but its constructor, puts something in place of ``self.name``, or of an attribute of
    it."""
    return any(
        isinstance(node, ast.Attribute)
        and isinstance(node.ctx, (ast.Store, ast.Del))
        and (method.is_self(node, name) or method.is_self(node.value, name))
        for method in methods_of(kind)
        if mentions(method.function.__code__, name) and method.definition is not None
        for node in ast.walk(method.definition)
    )


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
            elif not (isinstance(node, _ASKING) or _reads_attribute(method, node, child)):
                yield None


_ASKING = (ast.If, ast.IfExp, ast.Compare, ast.BoolOp, ast.UnaryOp)
_READING = ("getattr", "hasattr")
_LOOKING = (*_READING, "isinstance", "type")


def _reads_attribute(method: Method, node: ast.AST, module: ast.AST, functions: tuple[str, ...] = _READING) -> bool:
    """Whether a node is ``module.name``, or a call of one of these builtin functions with the module."""
    return isinstance(node, ast.Attribute) or (
        isinstance(node, ast.Call)
        and node.args[:1] == [module]
        and isinstance(node.func, ast.Name)
        and node.func.id in functions
        and global_value(method.function, node.func) is None
    )


def _mentioned_once(methods: list[Method], name: str) -> bool:
    relevant = [method for method in methods if mentions(method.function.__code__, name)]
    return len(relevant) == 1 and len(list(_uses(relevant[0], name))) == 1


def _matches(method: Method, norm: str, facts: Facts) -> Iterator[Match]:
    assert method.definition is not None
    for node in ast.walk(method.definition):
        if isinstance(node, ast.Call) and method.calls(argument(node), norm):
            inner = argument(node)
            assert isinstance(inner, ast.Call)
            yield Match((inner,), False, node)
        for statements in blocks_in(node):
            yield from _in_block(method, statements, norm, facts)
    for each in sums_behind(method, norm, facts):
        yield Match((each.call,), False, each.taker, each.edits, each.text)


def _in_block(method: Method, statements: list[ast.stmt], norm: str, facts: Facts) -> Iterator[Match]:
    for place, statement in enumerate(statements):
        variable, inner, others = _ending(method, statement, norm)
        if not inner:
            continue
        for following in statements[place + 1 :]:
            taker = taker_of(method, following, variable)
            if taker is None:
                break
            child = _child(method, taker)
            if child is not None and facts.is_identity(child):
                continue
            yield Match(tuple(inner), others, taker)
            break


def _ending(method: Method, statement: ast.stmt, norm: str) -> tuple[str | None, list[ast.Call], bool]:
    """The variable that a statement leaves a norm's result in, the calls of it, and whether it may leave another."""
    name, value = assignment(statement)
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


def _child(method: Method, call: ast.Call) -> str | None:
    """The key of the child that a call calls, or None."""
    return call.func.attr if method.is_self(call.func) and isinstance(call.func, ast.Attribute) else None


def _activation(method: Method, call: ast.Call) -> Activation | str | None:
    """What a call computes: an activation, the key of a child that it calls, or None."""
    child = _child(method, call)
    if child is not None:
        return child if len(call.args) == 1 and not call.keywords else None
    if not call.args:
        assert isinstance(call.func, ast.Attribute)
        return function_activation(getattr(torch.Tensor, call.func.attr, None), {})
    function = global_value(method.function, call.func)
    try:
        names = list(inspect.signature(function).parameters)[1:] if len(call.args) > 1 else []
        options = {name: ast.literal_eval(value) for name, value in zip(names, call.args[1:], strict=False)}
        options |= {keyword.arg or "**": ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (TypeError, ValueError):  # no function, or an option that is no constant
        return None
    return function_activation(function, options) if len(names) >= len(call.args) - 1 else None


def sums_into(kind: type, norm: str) -> list[tuple[str, frozenset[Edit]]]:
    """The sums that go into the norm ``self.norm`` and nowhere else, in the code of a class, and their edits."""
    relevant = [method for method in running_methods(kind) if mentions(method.function.__code__, norm)]
    return [found for method in relevant if method.definition is not None for found in sums_before(method, norm)]
