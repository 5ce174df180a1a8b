"""What the tests of the kernel cache share: an empty cache, and which kernels were compiled."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fusednorm import dispatch, storage
from fusednorm.backends.cpu import compiler
from fusednorm.backends.cpu.compiler import Kernel

KERNEL = Kernel("slabs_backward", "recall", "float32")  # the quickest to compile
#: A kernel's object is the same each time, and what these tests are about is where it is kept.
_compile_once = cache(compiler._compile)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, in a process that has loaded no kernel."""
    monkeypatch.setenv("FUSEDNORM_CACHE_DIR", str(tmp_path))
    forget_kernels(monkeypatch)
    return tmp_path


def forget_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_loaded", {})
    monkeypatch.setattr(compiler, "_failed", {})


@pytest.fixture(autouse=True)
def compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_compile", _compile_once)


@pytest.fixture(autouse=True)
def nothing_said() -> None:
    """A warning that comes once comes in each test anew."""
    storage._warn_once.cache_clear()
    dispatch._warn_once.cache_clear()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Kernel]:
    """The kernels that get compiled."""
    kernels: list[Kernel] = []

    def spy(kernel: Kernel) -> Any:
        kernels.append(kernel)
        return _compile_once(kernel)

    monkeypatch.setattr(compiler, "_compile", spy)
    return kernels


def files(folder: Path) -> list[str]:
    """The names of all files below a folder."""
    return sorted(path.name for path in folder.rglob("*") if path.is_file())
