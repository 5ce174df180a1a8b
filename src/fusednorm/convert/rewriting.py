"""A class whose methods leave some activations and sums to the norms beside them.

It is a subclass with the same name, made when it is needed. A copy or a pickle of a module names the original class and
the edits of its code, and makes the class again, in another process from the source that it finds there.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

from torch import nn

from fusednorm.convert import sums
from fusednorm.convert.source import (
    Edit,
    Place,
    argument,
    asks_for_its_class,
    code_in,
    definition_of,
    first_line,
    lines_of,
    methods_of,
    place_of,
)

_ORIGIN = "_fusednorm_origin"
#: What the edited code calls, as members of the class.
_HELPERS = {"_fusednorm_sum_behind": sums.sum_behind, "_fusednorm_sum_before": sums.sum_before}


def origin(kind: type) -> tuple[type, frozenset[Edit]]:
    """The class that a class was made from, and the edits; itself and nothing for any other class."""
    made: tuple[type, frozenset[Edit]] = vars(kind).get(_ORIGIN, (kind, frozenset()))
    return made


def is_made(kind: type) -> bool:
    """Whether :func:`edited` made a class."""
    return _ORIGIN in vars(kind)


class CannotRewriteError(RuntimeError):
    """Why a class cannot be made."""


@cache
def edited(kind: type, edits: frozenset[Edit]) -> type[nn.Module]:
    """The class made from ``kind`` by these edits; CannotRewriteError where it cannot be made."""
    own = ("__reduce__", "__reduce_ex__", "__getnewargs__", "__getnewargs_ex__")
    if any(name in vars(base) for base in kind.__mro__[:-1] for name in own):
        raise CannotRewriteError(f"{kind.__name__} has a way of its own to be pickled")
    asking = next((method.name for method in methods_of(kind) if asks_for_its_class(method)), None)
    if asking is not None:
        raise CannotRewriteError(f"{kind.__name__}.{asking} asks for the class that it is in")
    for place in {edit.place for edit in edits}:
        function = inspect.getattr_static(kind, place.method, None)
        if not isinstance(function, FunctionType) or definition_of(function) is None:
            raise CannotRewriteError(f"{kind.__name__}.{place.method} is decorated, or its source is not at hand")
        if not any(_stands_at(function, node, place) for node in ast.walk(_definition(function))):
            raise CannotRewriteError(f"{kind.__name__}.{place.method} has no {first_line(place.text)} at its place")
    names = {edit.place.method for edit in edits}
    members: dict[str, Any] = {name: _edited(inspect.getattr_static(kind, name), name, edits) for name in names}
    members |= {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    members |= {name: staticmethod(helper) for name, helper in _HELPERS.items()}
    try:
        made: type[nn.Module] = _metaclass(type(kind))(
            kind.__name__, (kind,), {**members, "__reduce_ex__": _reduce, _ORIGIN: (kind, edits)}
        )
    except Exception as error:  # whatever the class does when it is subclassed
        raise CannotRewriteError(f"{kind.__name__} cannot be subclassed: {error}") from error
    return made


@cache
def _metaclass(meta: type) -> type:
    """The metaclass of a made class, whose calls make modules of the original one: a new module's norms take nothing
    in, as those of ``type(model)()``."""

    def call(cls: type, *arguments: Any, **keywords: Any) -> Any:
        return meta.__call__(origin(cls)[0], *arguments, **keywords)

    return type(meta)(meta.__name__, (meta,), {"__call__": call, "__module__": meta.__module__})


def _stands_at(function: FunctionType, node: ast.AST, place: Place) -> bool:
    if not isinstance(node, (ast.expr, ast.stmt)) or isinstance(node, ast.Expr):  # the text of an Expr is its value's
        return False
    line = node.lineno - function.__code__.co_firstlineno
    return (line, node.col_offset) == (place.line, place.column) and place_of(function, place.method, node) == place


def _reduce(module: nn.Module, protocol: Any) -> tuple[Any, ...]:
    plain: Any = object.__reduce_ex__(module, protocol)
    return _make, origin(type(module)), *plain[2:]


def _make(kind: type, edits: frozenset[Edit]) -> Any:
    try:
        made = edited(kind, edits)
    except CannotRewriteError as error:
        raise RuntimeError(
            f"fusednorm: a converted module cannot be loaded, since its source is another one now: {error}; load the "
            "state_dict into the unconverted model, and convert that"
        ) from None
    return made.__new__(made)


def _definition(function: FunctionType) -> ast.FunctionDef:
    definition = definition_of(function)
    assert definition is not None
    return definition


class _Editor(ast.NodeTransformer):
    """Makes each edit of a method in the tree of its file."""

    def __init__(self, function: FunctionType, name: str, edits: frozenset[Edit]) -> None:
        self.function = function
        self.me = function.__code__.co_varnames[0]
        self.edits = [edit for edit in edits if edit.place.method == name]

    def visit(self, node: ast.AST) -> Any:
        found = [edit for edit in self.edits if _stands_at(self.function, node, edit.place)]
        node = super().visit(node)
        for edit in found:
            made = _EDITS[edit.kind](node, edit, self.me)
            for each in ast.walk(made):
                if not hasattr(each, "lineno"):
                    ast.copy_location(each, node)
            node = made
        return node


def _left_out(call: Any, edit: Edit, me: str) -> ast.AST:
    taken = argument(call)
    return call if taken is None else taken


def _sum(total: Any, edit: Edit, me: str) -> ast.AST:
    helper = "_fusednorm_" + edit.kind.replace(" ", "_")
    if isinstance(total, ast.AugAssign):
        target = ast.unparse(total.target)
        return _parsed(f"{target} = {me}.{helper}({me}.{edit.norm}, {target}, {ast.unparse(total.value)}, True)")
    terms = [ast.unparse(term) for term in (total.left, total.right)]
    input, term = terms[edit.input_is], terms[1 - edit.input_is]
    statement: Any = _parsed(f"{me}.{helper}({me}.{edit.norm}, {input}, {term})")
    value: ast.AST = statement.value
    return value


def _otherwise(branch: ast.If, edit: Edit, me: str) -> ast.AST:
    assert isinstance(branch.body[0], ast.Assign)
    target = ast.unparse(branch.body[0].targets[0])
    branch.orelse = [_parsed(f"{target} = {me}.{edit.norm}({target})")]
    return branch


def _never(branch: ast.If, edit: Edit, me: str) -> ast.AST:
    assert isinstance(branch.test, ast.Compare)
    what = ast.unparse(branch.test.left)
    message = f"fusednorm: {what} was None when the model was converted; revert_ the model and convert_ it anew"
    branch.body = [_parsed(f"raise RuntimeError({message!r})")]
    return branch


def _parsed(statement: str) -> ast.stmt:
    """A statement without places in a file."""
    (parsed,) = ast.parse(statement).body
    for node in ast.walk(parsed):
        for name in ("lineno", "col_offset", "end_lineno", "end_col_offset"):
            if hasattr(node, name):
                delattr(node, name)
    return parsed


_EDITS: dict[str, Callable[..., ast.AST]] = {
    "leave out": _left_out,
    "sum behind": _sum,
    "sum before": _sum,
    "otherwise": _otherwise,
    "never": _never,
}


def _edited(function: FunctionType, name: str, edits: frozenset[Edit]) -> FunctionType:
    tree = _Editor(function, name, edits).visit(ast.parse("".join(lines_of(function))))
    code = code_in(tree, function)
    assert code is not None
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    closure = tuple(cells[each] for each in code.co_freevars)
    made = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
    made.__kwdefaults__ = function.__kwdefaults__
    made.__dict__.update(function.__dict__)
    for attribute in ("__annotations__", "__doc__", "__qualname__", "__module__"):
        setattr(made, attribute, getattr(function, attribute))
    return made
