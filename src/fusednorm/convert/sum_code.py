"""Sums before and behind a norm in the code of a class::

    out = self.norm(self.conv(out))         # or out = self.conv(out), out = self.norm(out)
    if self.downsample is not None:         # statements that do not touch out
        identity = self.downsample(x)
    out += identity                         # or out = out + identity, or act(out + identity)
    out = self.act(out)

    return self.act(self.norm(x) + y)

    self.norm(x + y)                        if y is not None:
                                                x = x + y
                                            x = self.norm(x)

A norm takes the sum in where nothing else can see the norm's result, or the sum. A norm before a sum then runs where
the sum stood. So what runs in between must not change the norm's input, which is sure where the input is the result of
a convolution or a linear layer: nothing else holds it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeGuard

from fusednorm.convert.source import Edit, Facts, Method, argument, assignment, blocks_in, left_in, taker_of

_LEAVING = (ast.Return, ast.Raise, ast.Break, ast.Continue, ast.Yield, ast.YieldFrom, ast.Await)


@dataclass(frozen=True)
class Behind:
    """A call of a norm, the sum behind it, and the call that takes the sum."""

    call: ast.Call
    text: str
    taker: ast.Call
    edits: frozenset[Edit]


def sums_behind(method: Method, norm: str, facts: Facts) -> Iterator[Behind]:
    assert method.definition is not None
    for node in ast.walk(method.definition):
        if isinstance(node, ast.Call):
            yield from _in_expression(method, node, norm, facts)
        for statements in blocks_in(node):
            yield from _in_statements(method, statements, norm, facts)


def _in_expression(method: Method, taker: ast.Call, norm: str, facts: Facts) -> Iterator[Behind]:
    total = argument(taker)
    if not _is_sum(total):
        return
    for place, (call, term) in enumerate(((total.left, total.right), (total.right, total.left))):
        if not method.applies(call, norm) or _uses(method, term, norm):
            continue
        assert isinstance(call, ast.Call)
        # The norm's argument is evaluated before the term, whichever comes first in the sum.
        if isinstance(term, ast.Name) or (place == 0 and _makes_new(method, call.args[0], facts)):
            edits = {method.edit("leave out", call), method.edit("sum behind", total, norm, place)}
            yield Behind(call, ast.unparse(total), taker, frozenset(edits))


def _in_statements(method: Method, statements: list[ast.stmt], norm: str, facts: Facts) -> Iterator[Behind]:
    for place, statement in enumerate(statements):
        variable, call = assignment(statement)
        if variable is None or not method.applies(call, norm) or variable in method.function.__code__.co_cellvars:
            continue
        assert isinstance(call, ast.Call)
        found, passed = _next_sum(statements[place + 1 :], variable)
        if found is None or _uses(method, found.term, norm):
            continue
        never = [each for each in passed if _touches(each, variable) or _uses(method, each, norm)]
        if not all(_never_runs(method, each, facts) for each in never):
            continue
        if (passed or not found.at_once) and not _is_new(method, statements[: place + 1], facts):
            continue
        after = statements[place + len(passed) + 2 :]
        taker = found.taker or (taker_of(method, after[0], variable) if after else None)
        if taker is not None:
            edits = {method.edit("leave out", call), method.edit("sum behind", found.node, norm, found.input_is)}
            edits |= {method.edit("never", each) for each in never}
            yield Behind(call, ast.unparse(found.node), taker, frozenset(edits))


@dataclass(frozen=True)
class Sum:
    """A sum of a variable whose value is gone then: its other term, the variable's place in it, the call in the same
    statement that takes it, and whether it is made before anything else in its statement is evaluated."""

    node: ast.BinOp | ast.AugAssign
    term: ast.expr
    input_is: int
    taker: ast.Call | None
    at_once: bool


def _next_sum(statements: list[ast.stmt], variable: str) -> tuple[Sum | None, list[ast.stmt]]:
    """The first sum that a statement makes of a variable, and the statements before."""
    for place, statement in enumerate(statements):
        found = _sum_of(statement, variable)
        if found is not None:
            return found, statements[:place]
    return None, []


def _sum_of(statement: ast.stmt, variable: str) -> Sum | None:
    if isinstance(statement, ast.AugAssign):
        if not isinstance(statement.op, ast.Add) or not _is_name(statement.target, variable):
            return None
        term = statement.value
        return None if _names(term, variable) else Sum(statement, term, 0, None, isinstance(term, ast.Name))
    name, value = left_in(statement, variable)
    if name != variable or value is None or len(_names(value, variable)) != 1:
        return None
    for node in ast.walk(value):
        if not _is_sum(node) or not (_is_name(node.left, variable) or _is_name(node.right, variable)):
            continue
        place = int(_is_name(node.right, variable))
        term = (node.right, node.left)[place]
        taker = next((each for each in ast.walk(value) if isinstance(each, ast.Call) and argument(each) is node), None)
        if taker is not None or (node is value and not isinstance(statement, ast.Return)):
            return Sum(node, term, place, taker, value in (node, taker) and isinstance(term, ast.Name))
    return None


def _is_new(method: Method, statements: list[ast.stmt], facts: Facts) -> bool:
    """Whether nothing else holds what a norm takes: the last statement calls the norm, of a module's result or of the
    variable that the statement before leaves one in and that the norm's result replaces."""
    variable, call = assignment(statements[-1])
    assert isinstance(call, ast.Call)
    value: ast.expr | None = call.args[0]
    if isinstance(value, ast.Name) and len(statements) > 1:
        name, made = assignment(statements[-2])
        value = made if name == value.id == variable else None
    return _makes_new(method, value, facts)


def _makes_new(method: Method, value: ast.expr | None, facts: Facts) -> bool:
    if not isinstance(value, ast.Call) or not method.is_self(value.func):
        return False
    assert isinstance(value.func, ast.Attribute)
    return facts.makes_new(value.func.attr)


def _never_runs(method: Method, statement: ast.stmt, facts: Facts) -> bool:
    """Whether a statement is ``if self.name is not None`` for an attribute that is None."""
    test = statement.test if isinstance(statement, ast.If) and not statement.orelse else None
    return (
        isinstance(test, ast.Compare)
        and isinstance(test.ops[0], ast.IsNot)
        and ast.unparse(test.comparators[0]) == "None"
        and isinstance(test.left, ast.Attribute)
        and method.is_self(test.left)
        and facts.is_none(test.left.attr)
    )


def _touches(statement: ast.stmt, variable: str) -> bool:
    """Whether a statement uses a variable, or may leave the block that it stands in."""
    return bool(_names(statement, variable)) or any(isinstance(node, _LEAVING) for node in ast.walk(statement))


def _uses(method: Method, node: ast.AST | None, norm: str) -> bool:
    return node is not None and any(method.is_self(each, norm) for each in ast.walk(node))


def _names(node: ast.AST, variable: str) -> list[ast.AST]:
    return [each for each in ast.walk(node) if _is_name(each, variable)]


def _is_name(node: ast.AST, variable: str) -> bool:
    return isinstance(node, ast.Name) and node.id == variable


def _is_sum(node: ast.AST | None) -> TypeGuard[ast.BinOp]:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)


# --- before a norm ---


def sums_before(method: Method, norm: str) -> Iterator[tuple[str, frozenset[Edit]]]:
    """The text of each sum that goes into a norm and nowhere else, and the edits by which the norm takes it in."""
    assert method.definition is not None
    for node in ast.walk(method.definition):
        if method.applies(node, norm) and isinstance(node, ast.Call) and _is_sum(node.args[0]):
            total = node.args[0]
            yield (
                ast.unparse(total),
                frozenset({method.edit("leave out", node), method.edit("sum before", total, norm)}),
            )
        for statements in blocks_in(node):
            for before, statement in pairwise(statements):
                yield from _in_two_statements(method, before, statement, norm)


def _in_two_statements(
    method: Method, before: ast.stmt, statement: ast.stmt, norm: str
) -> Iterator[tuple[str, frozenset[Edit]]]:
    variable, call = assignment(statement)
    if variable is None or not method.applies(call, norm) or variable in method.function.__code__.co_cellvars:
        return
    assert isinstance(call, ast.Call)
    if not _is_name(call.args[0], variable):
        return
    edits = {method.edit("leave out", call)}
    if isinstance(before, ast.If) and len(before.body) == 1 and not before.orelse:
        edits.add(method.edit("otherwise", before, norm))
        before = before.body[0]
    name, total = assignment(before)
    if name == variable and _is_sum(total):
        edits.add(method.edit("sum before", total, norm))
        yield ast.unparse(total), frozenset(edits)
