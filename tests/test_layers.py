"""Who may import whom: the layers of ARCHITECTURE.md as data, held against every import in the sources.

An import inside a function counts as one at the top of a file: it is late for speed, and depends all the same.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src"

# From the top: a module imports of fusednorm what stands above it, and the rest of its own package. Modules of one line
# import nothing of each other.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("activations",),
    ("equivalents",),
    ("norm", "formats"),
    ("problem",),
    ("operands",),
    ("instance",),
    ("dtypes", "strides"),
    ("storage",),
    ("text",),
    ("private",),
    ("machine",),
    ("backends.reference", "backends.cpu", "backends.triton"),
    ("backends.hopper",),
    ("tuning",),
    ("choice",),
    ("problems", "copies"),
    ("dispatch",),
    ("op_results",),
    ("compiled",),
    ("inductor",),
    ("refusal",),
    ("arguments",),
    ("modulation",),
    ("op_arguments",),
    ("library",),
    ("gate",),
    ("transforms",),
    ("autograd",),
    ("running",),
    ("repeats",),
    ("sum_gradients",),
    ("sum_autograd",),
    ("sums",),
    ("sum_repeats",),
    ("quantization",),
    ("signatures",),
    ("functional",),
    ("interop", "chains", "tolerance"),
    ("rewriting",),
    ("fused_module",),
    ("distributed",),
    ("nn",),
    ("ops",),
    ("export",),
    ("convert",),
    ("inspection",),
    ("graph",),
    ("__init__",),
    ("bench",),
    ("cli",),
    ("__main__",),
)

# The layers that few may import, and who.
IMPORTERS: dict[str, set[str]] = {
    "backends.reference": {
        "choice",
        "dispatch",
        "inductor",
        "transforms",
        "autograd",
        "sum_gradients",
        "quantization",
        "export",
        "graph",
        "bench",
    },
    "backends.cpu": {"choice"},
    "backends.triton": {"backends.hopper", "choice", "inductor"},
    "backends.hopper": {"choice"},
    "tolerance": {"graph", "bench"},
    "export": {"__init__"},
    "convert": {"__init__"},
    "inspection": {"__init__"},
    "rewriting": {"__init__"},
    "graph": {"__init__", "cli"},
    "bench": {"cli"},
    "cli": {"__main__"},
}

# The packages that not every module may import, and who.
PACKAGES: dict[str, set[str]] = {
    "numba": {"backends.cpu", "private"},
    "llvmlite": {"backends.cpu", "private"},
    "triton": {"backends.triton", "backends.hopper", "private"},
    "matplotlib": {"bench"},
    "typer": {"cli"},
    "rich": {"cli"},
}
WITHOUT_TORCH = {"activations", "norm", "formats", "problem"}

# The version, which a file on disk names, is the one thing that every layer may take from the package itself.
VERSION = "__version__"

Imports = dict[str, set[str]]


def module_names() -> dict[str, Path]:
    """The file of each module, by its name within the package; that of the package itself is ``__init__``."""
    found = {}
    for path in (SOURCES / "fusednorm").rglob("*.py"):
        parts = list(path.relative_to(SOURCES / "fusednorm").with_suffix("").parts)
        if parts[-1] == "__init__" and len(parts) > 1:
            parts.pop()
        found[".".join(parts)] = path
    return found


def imports_of(source: str, modules: Mapping[str, Path]) -> set[str]:
    """The modules of fusednorm that a source imports, by their names in it; other packages as "package:" and a name."""

    def named(full: str) -> str:
        package, _, inner = full.partition(".")
        if package != "fusednorm":
            return f"package:{package}"
        while inner and inner not in modules:
            inner = inner.rpartition(".")[0]
        return inner or "__init__"

    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {named(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            wanted = [alias.name for alias in node.names if (node.module, alias.name) != ("fusednorm", VERSION)]
            found |= {named(f"{node.module}.{name}") for name in wanted}
    return found


def layer_of(module: str) -> str | None:
    """The layer that a module belongs to; None for a package that only holds layers, as ``backends`` does."""
    every = [layer for line in LAYERS for layer in line]
    fitting = [layer for layer in every if module == layer or module.startswith(f"{layer}.")]
    if not fitting:
        assert any(layer.startswith(f"{module}.") for layer in every), f"{module} stands in no layer"
        return None
    return fitting[0]


def faults(imports: Imports) -> Iterator[str]:
    """Every import that the layers forbid, in words."""
    place = {layer: number for number, line in enumerate(LAYERS) for layer in line}
    for module, targets in sorted(imports.items()):
        layer = layer_of(module)
        for target in sorted(targets):
            if target.startswith("package:"):
                package = target.removeprefix("package:")
                allowed = PACKAGES.get(package)
                if (allowed is not None and layer not in allowed) or (package == "torch" and layer in WITHOUT_TORCH):
                    yield f"{module} imports {package}"
                continue
            other = layer_of(target)
            if layer == other or layer is None or other is None:
                continue
            if place[other] >= place[layer]:
                yield f"{module} imports {target}, which stands below it or beside it"
            elif layer not in IMPORTERS.get(other, {layer}):
                yield f"{module} imports {target}, which is for {', '.join(sorted(IMPORTERS[other]))}"


def test_every_import_keeps_to_the_layers() -> None:
    modules = module_names()
    imports = {module: imports_of(path.read_text(), modules) for module, path in modules.items()}
    assert list(faults(imports)) == []


@pytest.mark.parametrize(
    ("module", "source", "fault"),
    [
        ("graph.tuning", "from fusednorm.bench.provenance import Machine", "below"),
        ("inspection", "def late():\n    from fusednorm.bench import runner", "below"),
        ("backends.cpu.threads", "import fusednorm.backends.triton.launch", "beside"),
        ("backends.triton.launch", "from fusednorm.backends import reference", "beside"),
        ("dispatch", "from fusednorm import library", "below"),
        ("graph.plans", "from fusednorm.backends.cpu import instances", "which is for choice"),
        ("functional", "import fusednorm", "below"),
        ("problem", "from torch import Tensor", "imports torch"),
        ("dispatch", "from triton import language", "imports triton"),
        ("bench.runner", "import typer", "imports typer"),
    ],
)
def test_an_import_against_the_layers_is_found(module: str, source: str, fault: str) -> None:
    (found,) = faults({module: imports_of(source, module_names())})
    assert found.startswith(f"{module} imports ")
    assert fault in found


def test_the_version_may_be_read_from_everywhere() -> None:
    assert imports_of("from fusednorm import __version__", module_names()) == set()


def test_a_module_without_a_layer_is_named() -> None:
    with pytest.raises(AssertionError, match="novelty stands in no layer"):
        layer_of("novelty")
    assert layer_of("backends") is None


def test_the_table_of_the_architecture_has_the_same_layers() -> None:
    section = (ROOT / "ARCHITECTURE.md").read_text().partition("## The layers")[2].partition("\n## ")[0]
    cells = "".join(line.split("|")[1] for line in section.splitlines() if line.startswith("| `"))
    written = [name.removesuffix(".py").strip("/").replace("/", ".") for name in re.findall(r"`([^`]+)`", cells)]
    assert written == [layer for line in LAYERS for layer in line]
