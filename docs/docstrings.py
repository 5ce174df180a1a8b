"""mkdocstrings reads docstrings through this: roles such as :func:`name` become code, and examples become blocks."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):`~?([^`]+)`")
EXAMPLE = re.compile(r"^>>> .*?(?=\n\s*\n|\Z)", flags=re.MULTILINE | re.DOTALL)
FLAGS = re.compile(r" *# doctest: \+.*")


class Docstrings(Extension):
    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = ROLE.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = EXAMPLE.sub(lambda found: f"```pycon\n{FLAGS.sub('', found[0])}\n```", text)
