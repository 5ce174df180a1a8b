"""What works where a package is missing, and what says which one to install; each case in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCES = str(Path(__file__).parents[1] / "src")


def without(packages: list[str], program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A program in a process in which these packages cannot be imported."""
    blocked = f"import sys\nfor name in {packages}: sys.modules[name] = None\n"
    return subprocess.run(
        [sys.executable, "-c", blocked + program],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": SOURCES, **environment},
        check=False,
    )


PATHS = "import os; os.environ.pop('FUSEDNORM_CACHE_DIR', None); from fusednorm.storage import cache_root as root\n"


def test_the_cache_lies_at_the_same_place_without_platformdirs(tmp_path: Path) -> None:
    program = (
        PATHS
        + """
places = []
for home, base in (("/home/a", None), ("/home/a", "/b"), ("/home/a", "relative"), ("/home/a", "")):
    os.environ["HOME"] = home
    os.environ.pop("XDG_CACHE_HOME", None)
    if base is not None:
        os.environ["XDG_CACHE_HOME"] = base
    places.append(str(root()))
print(places)
"""
    )
    done = without(["platformdirs"], program)
    assert done.stdout.split("\n")[0] == str(
        ["/home/a/.cache/fusednorm", "/b/fusednorm", "/home/a/.cache/fusednorm", "/home/a/.cache/fusednorm"]
    ), done.stderr
    pytest.importorskip("platformdirs")
    with_it = without([], PATHS + "print(root())", HOME="/home/a", XDG_CACHE_HOME="/b")
    assert with_it.stdout.strip() == "/b/fusednorm"


LIBRARY = """
import torch, fusednorm
x = torch.randn(2, 8, 5, 6, requires_grad=True)
fusednorm.group_norm(x, 4, activation="silu").sum().backward()
assert x.grad is not None
for candidate in fusednorm.instances(fusednorm.group_norm, x, 4):
    print(candidate.instance.name, candidate.reason)
"""


@pytest.mark.parametrize("package", ["llvmlite", "numba"])
def test_the_library_computes_without_its_compilers_and_says_which_is_missing(package: str) -> None:
    done = without([package, "triton", "matplotlib", "platformdirs", "typer", "rich"], LIBRARY)
    assert done.returncode == 0, done.stderr
    assert "reference None" in done.stdout
    assert any(line.startswith("cpu.") and package in line for line in done.stdout.splitlines())


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_the_command_line_says_what_to_install(package: str) -> None:
    done = without([package], "sys.argv = ['fusednorm', 'doctor']; from fusednorm.cli import main; main()")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"pip install {package}" in done.stderr
    assert "Traceback" not in done.stderr


def test_doctor_runs_without_what_only_calls_need() -> None:
    program = "sys.argv = ['fusednorm', 'doctor', '--json']; from fusednorm.cli import main; main()"
    done = without(["llvmlite", "numba", "triton", "platformdirs", "matplotlib"], program)
    assert done.returncode == 0, done.stderr
    assert "llvmlite cannot be imported" in done.stdout
    assert "triton is not installed" in done.stdout
