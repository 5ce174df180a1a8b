"""Code in Triton's interpreter, in a process of its own, without work that the interpreter repeats."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from cpu_support import process_environment


def interpreted(code: str) -> Any:
    """The JSON that code prints last. It may import the tests' modules.

    TRITON_INTERPRET must be set before triton is imported, which another test of this process may have done.
    """
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with TemporaryDirectory() as folder:
        printed, errors = Path(folder, "printed"), Path(folder, "errors")
        server.stdin.write(json.dumps([textwrap.dedent(code), str(printed), str(errors)]) + "\n")
        server.stdin.flush()
        assert server.stdout.readline() == "0\n", errors.read_text()
        return json.loads(printed.read_text().splitlines()[-1])


@cache
def _server() -> subprocess.Popen[str]:
    """A process that has imported what all code imports, two seconds' work, and forks for each piece of code."""
    server = subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=process_environment(TRITON_INTERPRET="1"),
    )
    atexit.register(server.communicate)  # the end of its stdin is its end
    return server


def _serve() -> None:
    import triton.language  # noqa: F401

    import fusednorm  # noqa: F401

    hasten()
    for line in sys.stdin:
        code, *outputs = json.loads(line)
        child = os.fork()
        if child == 0:
            for stream, path in enumerate(outputs, 1):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream)
            exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})
            return
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def hasten() -> None:
    """Spare the interpreter work that takes two thirds of its time and changes no result.

    A release that does something in another way keeps its own way.
    """
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    places: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
        (interpreter, "_patch_lang", _patch_once),
        (interpreter, "_get_np_dtype", _remembered),
        (getattr(interpreter, "ReduceOps", None), "generic_reduce", lambda _: _reduce_by_slices),
        (TritonSemantic, "binary_op_sanitize_overflow_impl", _without_check),
        (tl.block_type, "__init__", _made_once),
        (tl.tensor, "__init__", _of_a_known_type),
    )
    for owner, name, faster in places:
        original = getattr(owner, name, None)
        if original is not None:
            setattr(owner, name, faster(original))


def _patch_once(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Functions that a kernel calls find triton.language as the kernel has patched it.

    The interpreter patches it at the start of a kernel and again at each call of a function, where it looks at every
    name of the language: half of the time of the tests.
    """
    import triton.language as tl

    def patch_what_is_not(function: Any) -> Any:
        languages = [value for value in function.__globals__.values() if value is tl or value is tl.core]
        return patch(function) if any(tl.core.is_builtin(one.load) for one in languages) else None

    return patch_what_is_not


def _remembered(numpy_dtype: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """numpy's dtype of a type by the type's name; the interpreter makes a table of all types at each question."""
    known: dict[str, Any] = {}

    def of(kind: Any) -> Any:
        scalar = kind.scalar
        found = known.get(scalar.name)
        if found is None:
            found = known[scalar.name] = numpy_dtype(scalar)
        return found

    return of


def _reduce_by_slices(self: Any, operands: tuple[Any, ...]) -> list[Any]:
    """A reduction by a function of ours: slice after slice of the axis, where the interpreter takes element after
    element. Each element of the result is the same sum in the same order."""
    operands, axis = self.unravel(operands, self.axis)
    slices = [np.moveaxis(one.handle.data, axis, 0) for one in operands]
    parts = [
        tuple(self.to_tensor(data[place], one.dtype) for data, one in zip(slices, operands, strict=True))
        for place in range(len(slices[0]))
    ]
    total = parts[0]
    for part in parts[1:]:
        total = self.combine_fn.fn(*total, *part)
        total = total if isinstance(total, tuple) else (total,)
    shape = operands[0].handle.data.shape
    kept = (1,) * len(shape) if self.axis is None else (*shape[:axis], 1, *shape[axis + 1 :])
    results = [one.handle.data.reshape(shape[:axis] + shape[axis + 1 :]) for one in total]
    if self.keep_dims:
        results = [data.reshape(kept) for data in results]
    return [
        self.to_tensor(data if data.shape else data.item(), one.dtype)
        for data, one in zip(results, operands, strict=True)
    ]


def _without_check(_: Callable[..., None]) -> Callable[..., None]:
    """The check for overflow takes ten operations for one, and its answer counts in the debug mode alone."""
    return lambda *_: None


def _made_once(make: Callable[..., None]) -> Callable[..., None]:
    """Blocks of one shape and scalar type have one type's attributes."""
    known: dict[Any, dict[str, Any]] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, tuple(getattr(size, "value", size) for size in shape))
        found = known.get(key)
        if found is None:
            make(self, element_ty, shape)
            if not element_ty.is_ptr():
                known[key] = vars(self).copy()
        else:
            vars(self).update(found)

    return init


def _of_a_known_type(make: Callable[..., None]) -> Callable[..., None]:
    """Tensors of one shape have one tuple of the language for it, which each would make for itself."""
    known: dict[str, dict[str, Any]] = {}

    def init(self: Any, handle: Any, type: Any) -> None:
        found = known.get(type.name)
        if found is None:
            make(self, handle, type)
            known[type.name] = vars(self).copy()
        else:
            vars(self).update(found, handle=handle, type=type, dtype=type.scalar)

    return init


if __name__ == "__main__":
    _serve()
