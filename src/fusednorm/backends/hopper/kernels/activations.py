"""The activations' Triton functions as Gluon functions: the same code, with Gluon's language in place of Triton's."""

from __future__ import annotations

from functools import cache
from types import FunctionType
from typing import Any

import triton.language as tl
from triton import JITFunction

from fusednorm.backends.triton.kernels import activations
from fusednorm.private.gluon_names import gl, gluon


@cache
def _translated(function: Any) -> Any:
    source = function.fn
    # The names in its code are those of attributes too, so a function that calls tl.where seems to call itself.
    names = {"__builtins__", *source.__code__.co_names} & source.__globals__.keys() - {source.__name__}
    scope = {name: _in_gluon(source.__globals__[name]) for name in names}
    copy = FunctionType(source.__code__, scope, source.__name__)
    copy.__module__ = __name__  # Triton names a kernel's functions by their module
    return gluon.jit(copy)


def _in_gluon(value: Any) -> Any:
    if value is tl:
        return gl
    return _translated(value) if isinstance(value, JITFunction) else value


def activation(name: str | None, dtype: str) -> tuple[Any, Any]:
    """value(z, parameter) and derivative(z, parameter) for a problem of a dtype."""
    value, derivative = activations.activation(name, dtype, True)
    return _translated(value), _translated(derivative)
