"""Code in Triton's interpreter, in a process of its own, without work that the interpreter repeats."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from cpu_support import fresh_process

_START = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import interpreter_support
interpreter_support.patch_once()
"""


def interpreted(code: str) -> Any:
    """The JSON that code prints last. It may import the tests' modules.

    TRITON_INTERPRET must be set before triton is imported, which another test of this process may have done.
    """
    return fresh_process(_START + textwrap.dedent(code), TRITON_INTERPRET="1")


def patch_once() -> None:
    """Let functions that a kernel calls find triton.language as the kernel has patched it.

    The interpreter patches it at the start of a kernel and again at each call of a function, where it looks at every
    name of the language: half of the time of the tests.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch: Any = getattr(interpreter, "_patch_lang", None)
    if patch is None:  # another release has another way
        return

    def patch_what_is_not(function: Any) -> Any:
        languages = [value for value in function.__globals__.values() if value is tl or value is tl.core]
        return patch(function) if any(tl.core.is_builtin(one.load) for one in languages) else None

    interpreter._patch_lang = patch_what_is_not
