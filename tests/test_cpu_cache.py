"""The cache of compiled kernels: found by the next process, never stale, never damaged, never in the way."""

from __future__ import annotations

import json
import logging
import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cache_support import KERNEL, compiled, compiled_once, files, folder, forget_kernels, nothing_said
from cpu_support import fresh_process, process_environment

from fusednorm.backends.cpu import compiler
from fusednorm.backends.cpu.compiler import Kernel, cache_directory, load

__all__ = ["compiled", "compiled_once", "folder", "nothing_said"]  # fixtures

NORMALIZE = """
    import json, sys, time, torch, fusednorm
    x = torch.linspace(-1, 1, 360).reshape(2, 6, 30)
    start = time.perf_counter()
    y = fusednorm.group_norm(x, 3)
    first = time.perf_counter() - start
    start = time.perf_counter()
    fusednorm.group_norm(x, 3)
    warm = time.perf_counter() - start
    right = torch.allclose(y, torch.nn.functional.group_norm(x, 3), atol=1e-5)
    imported = sorted({"numba", "sympy"} & set(sys.modules))
    print(json.dumps({"right": right, "imported": imported, "seconds": first - warm}))
"""


# --- kept and found ---


def test_a_kernel_is_kept_under_its_name(folder: Path) -> None:
    load(KERNEL)
    assert files(folder) == [KERNEL.name] == ["slabs_backward-recall-float32-identity"]
    assert (cache_directory() / KERNEL.name).is_file()


def test_a_kept_kernel_is_not_compiled_again(
    folder: Path, compiled: list[Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    load(KERNEL)
    forget_kernels(monkeypatch)
    load(KERNEL)
    assert compiled == [KERNEL]


def test_fusednorm_cache_dir_is_honoured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FUSEDNORM_CACHE_DIR", str(tmp_path / "one"))
    assert cache_directory().parent == tmp_path / "one"
    monkeypatch.delenv("FUSEDNORM_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "two"))
    if sys.platform.startswith("linux"):
        assert cache_directory().parent == tmp_path / "two" / "fusednorm"


def test_the_second_process_does_not_import_numba(tmp_path: Path) -> None:
    """Nor sympy, which the first operator on a meta tensor imports: each takes 0.3 s."""
    first = fresh_process(NORMALIZE, FUSEDNORM_CACHE_DIR=tmp_path)
    second = fresh_process(NORMALIZE, FUSEDNORM_CACHE_DIR=tmp_path)
    assert "numba" in first["imported"]
    assert second["imported"] == []
    assert first["right"]
    assert second["right"]


def test_processes_that_compile_the_same_kernel_at_once(tmp_path: Path) -> None:
    environment = process_environment(FUSEDNORM_CACHE_DIR=tmp_path / "cache")
    code = f"""
import json, time
from pathlib import Path
from fusednorm.backends.cpu import compiler
Path({str(tmp_path)!r}, str(__import__("os").getpid())).touch()
while len([path for path in Path({str(tmp_path)!r}).iterdir() if path.name.isdigit()]) < 3:
    time.sleep(0.01)
compiler.load(compiler.Kernel("slabs_backward", "recall", "float32"))
print(json.dumps(len(compiler._loaded)))
"""
    command = [sys.executable, "-c", code]
    processes = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(3)
    ]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    assert [json.loads(out) for out, _ in outputs] == [1, 1, 1]
    assert files(tmp_path / "cache") == [KERNEL.name]


# --- damaged ---


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def overwritten(path: Path) -> None:
    path.write_bytes(os.urandom(4096))


def beheaded(path: Path) -> None:
    path.write_bytes(path.read_bytes().partition(b"\n")[2])


DAMAGES = [truncated, flipped, emptied, overwritten, beheaded]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_ignored_with_a_warning_and_written_again(
    damage: Callable[[Path], None],
    folder: Path,
    compiled: list[Kernel],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    load(KERNEL)
    path = cache_directory() / KERNEL.name
    damage(path)
    forget_kernels(monkeypatch)
    load(KERNEL)
    assert compiled == [KERNEL, KERNEL]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert str(path) in record.message
    assert files(folder) == [KERNEL.name]
    forget_kernels(monkeypatch)
    load(KERNEL)
    assert compiled == [KERNEL, KERNEL]


def test_a_directory_in_the_place_of_a_file_is_ignored_with_a_warning(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (cache_directory() / KERNEL.name).mkdir(parents=True)
    load(KERNEL)
    assert any(record.levelno == logging.WARNING and KERNEL.name in record.message for record in caplog.records)
    assert files(folder) == []  # no temporary file stays behind


# --- nowhere to keep it ---


def test_a_folder_that_cannot_be_made_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: list[Kernel]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FUSEDNORM_CACHE_DIR", str(tmp_path / "file"))
    forget_kernels(monkeypatch)
    load(KERNEL)
    assert compiled == [KERNEL]
    assert files(tmp_path) == ["file"]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_no_error(folder: Path, compiled: list[Kernel]) -> None:
    folder.chmod(0o500)
    load(KERNEL)
    assert compiled == [KERNEL]


def test_a_full_disk_is_no_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    load(KERNEL)
    assert files(folder) == []


def test_a_user_without_a_home_keeps_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compiled: list[Kernel]
) -> None:
    """Where neither HOME nor the password database names a home, "~" would be a folder of that name right here."""

    def unknown(_: int) -> None:
        raise KeyError("uid not found")

    for name in ("FUSEDNORM_CACHE_DIR", "HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.chdir(tmp_path)
    forget_kernels(monkeypatch)
    load(KERNEL)
    assert compiled == [KERNEL]
    assert list(tmp_path.iterdir()) == []


def test_an_unset_home_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FUSEDNORM_CACHE_DIR", "HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert cache_directory().is_absolute()


# --- never stale ---


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the sources that the digest is taken of."""
    package = Path(compiler.__file__).parent
    copy = tmp_path / "cpu"
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__"))
    activations = shutil.copy(compiler._ACTIVATIONS_FILE, tmp_path / "activations.py")
    monkeypatch.setattr(compiler, "__file__", str(copy / "compiler.py"))
    monkeypatch.setattr(compiler, "_ACTIVATIONS_FILE", str(activations))
    return tmp_path


def digest() -> str:
    return compiler._digest.__wrapped__()


def test_the_same_sources_elsewhere_have_the_same_digest(sources: Path) -> None:
    assert digest() == compiler._digest()


@pytest.mark.parametrize(
    "source",
    ["activations.py", "cpu/compiler.py", "cpu/geometry.py", "cpu/kernels/moments.py", "cpu/kernels/device.py"],
)
def test_a_changed_source_gives_another_digest(sources: Path, source: str) -> None:
    before = digest()
    path = sources / source
    path.write_text(path.read_text() + "\n# changed\n")
    assert digest() != before


def test_a_new_source_gives_another_digest(sources: Path) -> None:
    before = digest()
    (sources / "cpu" / "kernels" / "new.py").touch()
    assert digest() != before


@pytest.mark.parametrize("package", ["numba", "llvmlite"])
def test_another_version_of_the_compiler_gives_another_digest(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, version = digest(), compiler.version
    monkeypatch.setattr(compiler, "version", lambda name: "0.0" if name == package else version(name))
    assert digest() != before


@pytest.mark.parametrize("function", ["get_host_cpu_name", "get_host_cpu_features"])
def test_another_processor_gives_another_digest(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Features:
        def flatten(self) -> str:
            return "+none"

    before = digest()
    monkeypatch.setattr(compiler.llvm, function, lambda: "i486" if function.endswith("name") else Features())
    assert digest() != before


def test_each_kernel_has_its_own_name() -> None:
    kernels = [
        Kernel(module, function, dtype, activation)
        for module, function in [("planes", "forward"), ("planes", "backward"), ("rows", "forward")]
        for dtype in ("float32", "float16")
        for activation in (None, "silu")
    ]
    assert len({kernel.name for kernel in kernels}) == len(kernels)


# --- time ---


@pytest.mark.timing
def test_the_second_process_starts_a_kernel_in_a_quarter_of_the_time(tmp_path: Path) -> None:
    first = fresh_process(NORMALIZE, FUSEDNORM_CACHE_DIR=tmp_path)["seconds"]
    assert any(fresh_process(NORMALIZE, FUSEDNORM_CACHE_DIR=tmp_path)["seconds"] < first / 4 for _ in range(3))


@pytest.mark.timing
@pytest.mark.parametrize(
    ("module", "function", "activation"),
    [("planes", "backward", "gelu"), ("slabs", "moments", None), ("slabs_backward", "reduce", "gelu_tanh")],
)
def test_a_kernel_compiles_while_torch_is_imported_four_times(
    module: str, function: str, activation: str | None, tmp_path: Path
) -> None:
    """The largest kernels of each module, Numba imported before; the better of two, each with an empty cache."""
    code = f"""
        import json, time
        start = time.perf_counter()
        import torch
        imported = time.perf_counter() - start
        import fusednorm
        from fusednorm.backends.cpu import compiler, kernels
        start = time.perf_counter()
        compiler.load(compiler.Kernel({module!r}, {function!r}, "float32", {activation!r}))
        print(json.dumps((time.perf_counter() - start) / imported))
    """
    assert any(fresh_process(code, FUSEDNORM_CACHE_DIR=tmp_path / str(attempt)) < 4 for attempt in range(2))
