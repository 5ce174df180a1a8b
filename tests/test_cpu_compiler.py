"""Numba's settings do not reach the kernels, and where none can be compiled the reference runs."""

from __future__ import annotations

import gc
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cache_support import folder, nothing_said
from cpu_support import fresh_process

import fusednorm
from fusednorm import dispatch
from fusednorm.backends.cpu import compiler
from fusednorm.backends.cpu.compiler import Kernel

__all__ = ["folder", "nothing_said"]  # fixtures

BITS = """
    import hashlib, json, torch, fusednorm
    x = torch.randn(2, 8, 1000, generator=torch.Generator().manual_seed(0)).half()
    before = {name: value for name, value in vars(__import__("numba").core.config).items() if name.isupper()}
    with fusednorm.use_instance("cpu.planes"):
        y = fusednorm.group_norm(x, 2)
    after = {name: vars(__import__("numba").core.config)[name] for name in before}
    assert before == after
    print(json.dumps(hashlib.sha256(y.view(torch.int16).numpy().tobytes()).hexdigest()))
"""
SETTINGS = {
    "NUMBA_BOUNDSCHECK": "1", "NUMBA_DEBUGINFO": "1", "NUMBA_ENABLE_AVX": "0", "NUMBA_CPU_NAME": "generic",
    "NUMBA_LOOP_VECTORIZE": "0", "NUMBA_LLVM_REFPRUNE_PASS": "0", "NUMBA_EXTEND_VARIABLE_LIFETIMES": "1",
    "NUMBA_DEBUG": "1", "NUMBA_OPT": "max",
}  # fmt: skip


@pytest.fixture(scope="module")
def ordinary_bits(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return fresh_process(BITS, FUSEDNORM_CACHE_DIR=tmp_path_factory.mktemp("ordinary"))


# With DISABLE_JIT no kernel would be compiled at all, and the others change the code.
@pytest.mark.parametrize(
    "settings", [{"NUMBA_OPT": "0", "NUMBA_DISABLE_JIT": "1"}, SETTINGS], ids=["OPT and DISABLE_JIT", "others"]
)
def test_numbas_settings_do_not_reach_the_kernels(settings: dict[str, str], ordinary_bits: Any, tmp_path: Path) -> None:
    """They are for the program's own functions, and what is kept serves processes without them."""
    assert fresh_process(BITS, FUSEDNORM_CACHE_DIR=tmp_path, **settings) == ordinary_bits


@pytest.mark.parametrize("first", [0, 700, 10**6])
def test_the_garbage_collector_is_as_it_was(first: int) -> None:
    """Meanwhile it looks more rarely; where it is switched off or looks even more rarely, that stays."""
    found = gc.get_threshold()
    gc.set_threshold(first, *found[1:])
    try:
        with compiler._rare_collections():
            assert gc.get_threshold()[0] == (compiler.COLLECTED if first == 700 else first)
        assert gc.get_threshold()[0] == first
    finally:
        gc.set_threshold(*found)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[Kernel]:
    """Nothing can be compiled; the kernels that were tried."""
    tried: list[Kernel] = []

    def fail(kernel: Kernel) -> None:
        tried.append(kernel)
        raise ImportError("Numba needs NumPy 1.0 or less\nand more")

    monkeypatch.setattr(compiler, "_compile", fail)
    monkeypatch.setattr(dispatch, "_plans", {})
    return tried


def test_where_nothing_compiles_the_reference_runs_and_one_warning_says_why(
    broken: list[Kernel], caplog: pytest.LogCaptureFixture
) -> None:
    for size in (5, 6):
        x = torch.randn(2, 4, size, requires_grad=True)
        y = fusednorm.group_norm(x, 2)
        torch.testing.assert_close(y, torch.nn.functional.group_norm(x, 2))
        y.sum().backward()
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == len(set(warnings)) == len(set(broken)) == len(broken)
    for word in ("cannot be compiled (ImportError: Numba needs NumPy 1.0 or less)", "numba ", "reference"):
        assert word in warnings[0]


def test_a_named_instance_that_cannot_be_compiled_is_an_error(broken: list[Kernel]) -> None:
    with (
        pytest.raises(RuntimeError, match=r"tiles.*cannot be compiled \(ImportError: Numba needs"),
        fusednorm.use_instance("cpu.planes"),
    ):
        fusednorm.group_norm(torch.randn(2, 4, 5), 2)


def test_a_kernel_whose_linking_was_interrupted_is_linked_by_the_next_call(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = compiler.llvm.JITLibraryBuilder.link

    def interrupted(*arguments: Any) -> None:
        link(*arguments)
        raise KeyboardInterrupt  # a Ctrl-C that came while LLVM linked

    monkeypatch.setattr(dispatch, "_plans", {})
    name = Kernel("tiles", "forward", "float32", "gelu").name
    monkeypatch.delitem(compiler._libraries, name, raising=False)
    x = torch.randn(2, 4, 5)
    with monkeypatch.context() as patch:
        patch.setattr(compiler.llvm.JITLibraryBuilder, "link", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fusednorm.group_norm(x, 2, activation="gelu")
    expected = torch.nn.functional.gelu(torch.nn.functional.group_norm(x, 2))
    torch.testing.assert_close(fusednorm.group_norm(x, 2, activation="gelu"), expected)
    assert name in compiler._libraries


SCATTERED = """
    import json, mmap, torch, fusednorm
    from fusednorm.backends.cpu import compiler
    x = torch.randn(2, 4, 50)
    fusednorm.rms_norm(x, (50,))  # LLVM is ready
    def reserved(size):
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0)
    kept = [reserved(pages * mmap.PAGESIZE) for pages in (1, 8) for _ in range(2000)]  # no gap is left
    comb = [reserved(mmap.PAGESIZE) for _ in range(2000)]
    kept.append(reserved(6 << 30))
    for page in comb[::2]:
        page.close()  # room for a page of constants here, and for code only far below
    close = []
    for name in ("gelu", "gelu_tanh", "tanh", "sigmoid"):
        for dtype in (torch.float32, torch.float64):
            case = x.to(dtype)
            y = fusednorm.group_norm(case, 2, activation=name)
            with fusednorm.use_instance("reference"):
                expected = fusednorm.group_norm(case, 2, activation=name)
            close.append(torch.allclose(y, expected, atol=1e-5))
    print(json.dumps(close))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mmap's flags are Linux's")
def test_code_is_linked_where_free_memory_is_scattered() -> None:
    """As in long processes with many threads: constants must not end up further from their code than 2 GB."""
    assert fresh_process(SCATTERED) == [True] * 8
