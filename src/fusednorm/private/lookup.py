"""The look-up of a private name: it gives the library's object or a substitute, or raises an ImportError."""

from __future__ import annotations

import logging
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from operator import attrgetter
from typing import Any

logger = logging.getLogger(__name__)

#: The versions of each library that ``make test-versions`` ran the tests with, oldest and newest.
TESTED = {"torch": ("2.11", "2.15"), "triton": ("3.6", "3.9"), "numba": ("0.63", "0.68"), "llvmlite": ("0.46", "0.50")}

_REQUIRED = object()


def find(module: str, name: str, substitute: Any = _REQUIRED) -> Any:
    """The object that ``name`` (dotted where it is an attribute of a class) has in ``module``, or the substitute.

    The library's own object is returned, so a call of it costs what it costs there. Raises ImportError where the
    library has no such name and there is no substitute.
    """
    try:
        return attrgetter(name)(import_module(module))
    except (ImportError, AttributeError) as error:
        if substitute is _REQUIRED:
            raise ImportError(missing(module, name)) from error
        logger.info("%s", missing(module, name))
        return substitute


def missing(module: str, name: str) -> str:
    """What is missing, in which version, and which versions have it."""
    library = module.partition(".")[0]
    try:
        installed = version(library)
    except PackageNotFoundError:
        installed = "(version unknown)"
    oldest, newest = TESTED[library]
    return (
        f"fusednorm uses {module}.{name}, which {library} {installed} does not have; fusednorm is tested with "
        f"{library} {oldest} to {newest}"
    )
