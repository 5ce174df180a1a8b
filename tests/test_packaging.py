"""The files around the code agree with each other and with what gets installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pins(text: str) -> dict[str, set[str]]:
    """The exact versions that a text asks for, by package name: {"ruff": {"0.17.5"}}."""
    found: dict[str, set[str]] = {}
    for name, version in re.findall(r"([A-Za-z0-9][\w.-]*)==([\w.+]+)", text):
        found.setdefault(name.lower(), set()).add(version)
    return found


def constraints() -> dict[str, set[str]]:
    return pins((ROOT / "constraints.txt").read_text())


def requirement_names(requirements: list[str]) -> set[str]:
    return {re.match(r"[\w.-]+", requirement).group().lower() for requirement in requirements}


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


@pytest.mark.parametrize("tool", ["ruff", "mypy"])
def test_one_version_of_each_linter(tool: str) -> None:
    pinned = constraints()[tool]
    assert pins("\n".join(PROJECT["optional-dependencies"]["lint"]))[tool] == pinned
    assert pins((ROOT / ".pre-commit-config.yaml").read_text())[tool] == pinned


def test_each_direct_dependency_is_constrained() -> None:
    extras = PROJECT["optional-dependencies"]
    direct = requirement_names([*PROJECT["dependencies"], *(each for extra in extras.values() for each in extra)])
    named = {name.lower() for name in re.findall(r"^([\w.-]+)[=<>]", (ROOT / "constraints.txt").read_text(), re.M)}
    assert direct - {"fusednorm"} - {name.replace("_", "-") for name in named} == set()


def test_dev_takes_every_extra_but_what_make_mutants_and_make_docs_install() -> None:
    extras = PROJECT["optional-dependencies"]
    (dev,) = extras["dev"]
    assert set(dev.removeprefix("fusednorm[").removesuffix("]").split(",")) == set(extras) - {"dev", "mutants", "docs"}


def test_torch_has_a_lower_bound_and_no_upper_one() -> None:
    (bound,) = [each for each in PROJECT["dependencies"] if each.startswith("torch")]
    assert re.fullmatch(r"torch>=[\d.]+", bound)


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_commands_in_documents_exist(document: str) -> None:
    named = set(re.findall(r"\bmake ([a-z]+)\b", " ".join(code_of(ROOT / document))))
    assert named
    assert named <= make_targets()


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_links_in_documents_lead_somewhere(document: str) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", (ROOT / document).read_text())
    assert [link for link in links if not (ROOT / link).exists()] == []


def code_of(document: Path) -> list[str]:
    """The fenced blocks and the inline code of a Markdown file."""
    text = document.read_text()
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    return fenced + re.findall(r"`([^`\n]+)`", text)


def test_wheel_holds_the_package_and_nothing_else(tmp_path: Path) -> None:
    fusednorm = pytest.importorskip("fusednorm")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"fusednorm-{fusednorm.__version__}-py3-none-any.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    info = f"fusednorm-{fusednorm.__version__}.dist-info"
    assert {name.split("/")[0] for name in names} == {"fusednorm", info}
    sources = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*.py")}
    assert sources | {"fusednorm/py.typed", f"{info}/licenses/LICENSE"} <= names
    assert b"fusednorm = fusednorm.cli:main" in zipfile.ZipFile(wheel).read(f"{info}/entry_points.txt")


def test_console_script_exists() -> None:
    from fusednorm.cli import main

    assert callable(main)


def test_empty_memory_is_poisoned() -> None:
    like = torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)
    made = [
        torch.empty(5),
        torch.empty_like(like, dtype=torch.bfloat16),
        like.new_empty(5, dtype=torch.float16),
        torch.empty_strided((3, 2), (1, 3), dtype=torch.float64),
    ]
    assert all(tensor.isnan().all() for tensor in made)


@pytest.mark.timing
def test_import_adds_a_twentieth_to_that_of_torch() -> None:
    program = """
import time
start = time.perf_counter()
import torch
middle = time.perf_counter()
import fusednorm
print((time.perf_counter() - middle) / (middle - start))
"""

    # The first run leaves bytecode for the others, as the installation of torch did.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

    def share() -> float:
        command = [sys.executable, "-c", program]
        return float(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)

    # The machine may be slow, or busy: the import is as fast as its fastest run, beside torch's own.
    assert any(share() < 0.05 for _ in range(5))
