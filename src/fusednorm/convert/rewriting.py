"""A class whose methods leave some activations out, since the norms before them compute them.

It is a subclass with the same name, made when it is needed. A copy or a pickle of a module names the original class and
what is left out, and makes the class again, in another process from the source that it finds there.
"""

from __future__ import annotations

import ast
import inspect
from functools import cache
from types import FunctionType
from typing import Any

from torch import nn

from fusednorm.convert.code import Drop, argument, code_in, definition_of, drop_of, lines_of

_ORIGIN = "_fusednorm_origin"


def origin(kind: type) -> tuple[type, frozenset[Drop]]:
    """The class that a class was made from, and what it leaves out; itself and nothing for any other class."""
    made: tuple[type, frozenset[Drop]] = vars(kind).get(_ORIGIN, (kind, frozenset()))
    return made


def is_made(kind: type) -> bool:
    """Whether :func:`without` made a class."""
    return _ORIGIN in vars(kind)


class CannotRewriteError(RuntimeError):
    """Why a class cannot be made."""


@cache
def without(kind: type, drops: frozenset[Drop]) -> type[nn.Module]:
    """The class made from ``kind`` that leaves these calls out; CannotRewriteError where it cannot be made."""
    if any(name in vars(base) for base in kind.__mro__[:-1] for name in ("__reduce__", "__reduce_ex__")):
        raise CannotRewriteError(f"{kind.__name__} has a way of its own to be pickled")
    for drop in drops:
        function = inspect.getattr_static(kind, drop.method, None)
        if not isinstance(function, FunctionType) or definition_of(function) is None:
            raise CannotRewriteError(f"{kind.__name__}.{drop.method} is decorated, or its source is not at hand")
        calls = [node for node in ast.walk(_definition(function)) if isinstance(node, ast.Call)]
        if drop not in [drop_of(function, drop.method, call) for call in calls]:
            raise CannotRewriteError(f"{kind.__name__}.{drop.method} has no {drop.text} at its place")
    names = {drop.method for drop in drops}
    members: dict[str, Any] = {name: _rewritten(inspect.getattr_static(kind, name), name, drops) for name in names}
    members |= {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    try:
        made: type[nn.Module] = type(kind)(
            kind.__name__, (kind,), {**members, "__reduce_ex__": _reduce, _ORIGIN: (kind, drops)}
        )
    except Exception as error:  # whatever the class does when it is subclassed
        raise CannotRewriteError(f"{kind.__name__} cannot be subclassed: {error}") from error
    return made


def _reduce(module: nn.Module, protocol: Any) -> tuple[Any, ...]:
    plain: Any = object.__reduce_ex__(module, protocol)
    return _make, origin(type(module)), *plain[2:]


def _make(kind: type, drops: frozenset[Drop]) -> Any:
    try:
        made = without(kind, drops)
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


class _Leaver(ast.NodeTransformer):
    """Puts the argument in the place of each call that is left out."""

    def __init__(self, function: FunctionType, name: str, drops: frozenset[Drop]) -> None:
        self.function, self.name, self.drops = function, name, drops

    def visit_Call(self, node: ast.Call) -> ast.AST:
        left_out = drop_of(self.function, self.name, node) in self.drops
        self.generic_visit(node)
        taken = argument(node)
        return taken if left_out and taken is not None else node


def _rewritten(function: FunctionType, name: str, drops: frozenset[Drop]) -> FunctionType:
    tree = _Leaver(function, name, drops).visit(ast.parse("".join(lines_of(function))))
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
