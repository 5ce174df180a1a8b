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
        if isinstance(term, ast.Name) or _is_new(method, call.args[0], None, facts):
            edits = {method.edit("leave out", call), method.edit("sum behind", total, norm, place)}
            yield Behind(call, ast.unparse(total), taker, frozenset(edits))


def _in_statements(method: Method, statements: list[ast.stmt], norm: str, facts: Facts) -> Iterator[Behind]:
    for place, statement in enumerate(statements):
        variable, call = assignment(statement)
        if variable is None or not method.applies(call, norm) or variable in method.function.__code__.co_cellvars:
            continue
        assert isinstance(call, ast.Call)
        is_new = _is_new(method, call.args[0], statements[place - 1] if place else None, facts)
        never: list[ast.stmt] = []
        for position in range(place + 1, len(statements)):
            following = statements[position]
            total, term, input_is, taker = _sum_of(following, variable)
            if total is not None:
                if taker is None and position + 1 < len(statements):
                    taker = taker_of(method, statements[position + 1], variable)
                waits = position > place + 1 or not isinstance(term, ast.Name)
                if taker is not None and not _uses(method, term, norm) and (is_new or not waits):
                    edits = {method.edit("leave out", call), method.edit("sum behind", total, norm, input_is)}
                    edits |= {method.edit("never", each) for each in never}
                    yield Behind(call, ast.unparse(total), taker, frozenset(edits))
                break
            if _touches(following, variable) or _uses(method, following, norm):
                if not _never_runs(method, following, facts):
                    break
                never.append(following)


Sum = tuple[ast.BinOp | ast.AugAssign | None, ast.expr | None, int, ast.Call | None]


def _sum_of(statement: ast.stmt, variable: str) -> Sum:
    """The sum that a statement makes of a variable whose value is gone then: the sum, its other term, the place of the
    variable in it, and the call in this statement that takes the sum."""
    if isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.Add):
        if _is_name(statement.target, variable) and not _names(statement.value, variable):
            return statement, statement.value, 0, None
        return None, None, 0, None
    name, value = left_in(statement, variable)
    if name == variable and value is not None and len(_names(value, variable)) == 1:
        for node in ast.walk(value):
            if not _is_sum(node) or not (_is_name(node.left, variable) or _is_name(node.right, variable)):
                continue
            takers = [each for each in ast.walk(value) if isinstance(each, ast.Call) and argument(each) is node]
            if takers or (node is value and not isinstance(statement, ast.Return)):
                place = int(_is_name(node.right, variable))
                return node, (node.right, node.left)[place], place, takers[0] if takers else None
    return None, None, 0, None


def _is_new(method: Method, value: ast.expr, before: ast.stmt | None, facts: Facts) -> bool:
    """Whether a value is the result of a module that makes tensors, directly or by the statement before."""
    if isinstance(value, ast.Name) and before is not None:
        name, made = assignment(before)
        if name != value.id or made is None:
            return False
        value = made
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
    total, _, place, taker = _sum_of(before, variable)
    if isinstance(total, ast.BinOp) and taker is None:
        yield ast.unparse(total), frozenset({*edits, method.edit("sum before", total, norm, place)})
