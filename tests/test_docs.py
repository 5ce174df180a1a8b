"""README.md and the pages under docs/: their code runs, their links lead somewhere, and they name every public name.

A block that begins with ```python runs, after those above it on its page, and prints exactly what a block ```text right
behind it shows. A comment ``<!-- not run: why -->`` right before a block leaves it out.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest
import support_table
import torch

import fusednorm
from fusednorm.bench.markdown import report_markdown
from fusednorm.bench.reading import read_report
from fusednorm.bench.results import Report
from fusednorm.bench.summary import cases_of
from fusednorm.bench.sweep_summary import sweep_tables

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *DOCS]
BLOCK = re.compile(
    r"^(?P<out><!-- not run: \S.*? -->\n+)?```python\n(?P<code>.*?)^```$(?:\n\n```text\n(?P<shown>.*?)^```$)?",
    flags=re.MULTILINE | re.DOTALL,
)

pytestmark = pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.:FutureWarning")  # of torch's own


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_code_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if page.stem == "accuracy" and not torch.__version__.startswith("2.13."):
        pytest.skip("the page says what torch 2.13 does")
    if page.stem == "export":
        pytest.importorskip("onnxscript")
    text = page.read_text()
    blocks = [block for block in BLOCK.finditer(text) if block["out"] is None]
    # The page's code at the page's lines: convert_ reads the sources of classes, and a traceback names the line.
    source = tmp_path / f"{page.stem}.py"
    source.write_text(in_place(text, *blocks))
    monkeypatch.chdir(tmp_path)
    for limit in ("copy_bandwidth", "peak_flops"):  # seconds of measuring, which tests/test_inspection.py has
        monkeypatch.setattr(f"fusednorm.inspection.{limit}", lambda *_: 1e10)
    torch.manual_seed(0)
    threads, namespace = torch.get_num_threads(), {"__name__": page.stem}
    try:
        for block in blocks:
            exec(compile(in_place(text, block), str(source), "exec", dont_inherit=True), namespace)
            printed = capsys.readouterr().out
            if block["shown"] is not None:
                assert stripped(printed) == stripped(block["shown"])
    finally:
        torch.set_num_threads(threads)


def in_place(text: str, *blocks: re.Match[str]) -> str:
    """The code of blocks at the lines that it has in the text, all else blank."""
    code = ["\n"] * (text.count("\n") + 1)
    for block in blocks:
        first = text.count("\n", 0, block.start("code"))
        lines = block["code"].splitlines(keepends=True)
        code[first : first + len(lines)] = lines
    return "".join(code)


def stripped(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip("\n").splitlines()]


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_block_of_python_is_seen(page: Path) -> None:
    text = page.read_text()
    assert len(BLOCK.findall(text)) == len(re.findall(r"^\s*```\s*\{?\.?python", text, flags=re.MULTILINE))


def test_what_a_block_prints_is_held_against_the_page() -> None:
    (block,) = BLOCK.finditer("```python\nprint(1)\n```\n\n```text\n2\n```\n")
    assert (block["code"], block["shown"], block["out"]) == ("print(1)\n", "2\n", None)
    (block,) = BLOCK.finditer("<!-- not run: needs a GPU -->\n```python\n1\n```\n\nwords\n\n```text\n2\n```\n")
    assert (block["out"] is None, block["shown"]) == (False, None)


def anchors(page: Path) -> set[str]:
    """What headings are called in links, as Markdown's toc names them; the names of api.md have their own."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    heads = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    plain = [unicodedata.normalize("NFKD", head).encode("ascii", "ignore").decode() for head in heads]
    slugs = {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", head).strip().lower()) for head in plain}
    return slugs | set(re.findall(r"^::: (\S+)$", text, flags=re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    dead = []
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
        # The site has the pages of docs/ alone.
        if page in DOCS and target.exists() and target.parent != page.parent:
            dead.append(link)
    assert dead == []


def test_the_site_shows_every_page() -> None:
    shown = re.findall(r": (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)
    assert sorted(shown) == [page.name for page in DOCS]


def public_names() -> Iterator[str]:
    yield from fusednorm.__all__
    for module in (fusednorm.ops, fusednorm.graph, fusednorm.distributed):
        yield from module.__all__
    for name, value in vars(fusednorm.nn).items():
        if inspect.isclass(value) and value.__module__ == "fusednorm.nn" and not name.startswith("_"):
            yield name


def test_every_public_name_is_documented() -> None:
    text = "\n".join(page.read_text() for page in DOCS)
    code = re.findall(r"^```.*?^```$|`[^`\n]+`|^::: [^\n]+|^ +members: [^\n]+", text, re.MULTILINE | re.DOTALL)
    words = set(re.findall(r"\w+", "\n".join(code)))
    assert sorted(set(public_names()) - words) == []


def test_every_command_and_option_is_documented() -> None:
    from typer.main import get_command

    from fusednorm.cli.commands import app

    _, *parts = re.split(r"^## fusednorm ", (ROOT / "docs" / "cli.md").read_text(), flags=re.MULTILINE)
    sections = {part.split(maxsplit=1)[0]: set(re.findall(r"--[a-z][a-z-]*", part)) for part in parts}
    commands = get_command(app).commands
    options = {
        name: {option for parameter in command.params for option in parameter.opts + parameter.secondary_opts}
        for name, command in commands.items()
    }
    assert list(sections) == list(commands)
    for name, documented in sections.items():
        assert documented == {option for option in options[name] if option.startswith("--")}, name


def test_every_environment_variable_is_documented() -> None:
    sources = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    text = "\n".join(page.read_text() for page in DOCS)
    assert sorted(set(re.findall(r"FUSEDNORM_[A-Z_]+", sources)) - set(re.findall(r"FUSEDNORM_[A-Z_]+", text))) == []


def test_the_table_of_what_runs_where_is_current() -> None:
    page = ROOT / "docs" / "support.md"
    assert support_table.renewed(page.read_text()) == page.read_text(), "run python tests/support_table.py"


@pytest.mark.parametrize("kind", ["cpu", "gpu", "models", "devices", "forms"])
def test_figures_are_those_of_the_kept_results(kind: str) -> None:
    files = sorted((ROOT / "benchmarks" / "results").glob(f"{kind}-*.json"))
    tables = report_markdown([read_report(path.read_text()) for path in files])
    assert tables.rstrip() in (ROOT / "benchmarks" / "README.md").read_text()


@pytest.mark.parametrize("machine", ["h100", "h200", "cpu-intel", "cpu-amd"])
def test_figures_of_drawn_shapes_are_those_of_the_kept_results(machine: str) -> None:
    text = (ROOT / "benchmarks" / "README.md").read_text()
    paths = sorted((ROOT / "benchmarks" / "results").glob(f"sweep-{machine}*"))
    reports = [Report.from_json(path.read_text()) for path in paths]
    rows = [row for report in reversed(reports) for row in report.rows]
    for table in sweep_tables(cases_of(rows))[:2]:
        assert table.to_markdown().strip() in text
    assert reports[-1].machine.command in text
    assert all(f"revision {report.machine.revision};" in text for report in reports)


def test_figures_of_other_packages_models_are_those_of_the_kept_results() -> None:
    spec = importlib.util.spec_from_file_location("packages", ROOT / "benchmarks" / "packages.py")
    assert spec is not None
    assert spec.loader is not None
    packages = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = packages  # its dataclasses look for their module
    spec.loader.exec_module(packages)
    kept = json.loads((ROOT / "benchmarks" / "results" / "packages-cpu.json").read_text())
    table = packages.table_of([packages.Row(**row) for row in kept["rows"]], "").to_markdown()
    text = (ROOT / "benchmarks" / "README.md").read_text()
    assert table.strip() in text
    assert kept["machine"]["command"] in text
