"""The samples under examples/graph in every dtype and layout, and ``fusednorm run``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch
from graph_support import described
from typer.testing import CliRunner

from fusednorm.cli import app
from fusednorm.graph import Graph

FOLDER = Path(__file__).parents[1] / "examples" / "graph"
SAMPLES = (
    "bn_inference", "bn_training", "bn_backward", "groupnorm_swish_fwd", "groupnorm_bwd_data",
    "groupnorm_bwd_gamma_beta",
)  # fmt: skip


@pytest.fixture(autouse=True)
def samples_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


def _run(name: str, *arguments: str) -> int:
    sample, module = import_module("sample"), import_module(name)
    code: int = sample.run(module.TITLE, module.describe, module.DIMS, getattr(module, "GROUPS", 0), arguments)
    return code


@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_verifies_in_every_dtype_and_layout(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(name, "--dims", "2,64,5,6") == 0
    text = capsys.readouterr().out
    for dtype in ("fp32", "fp16", "bf16"):
        for layout in ("nchw", "nhwc"):
            assert f"{dtype}, {layout}, dims (2, 64, 5, 6)" in text
    assert text.count("verification successful") == 6
    stages = ("validated", "operation graph built", "execution plans created", "support checked", "plan built")
    for stage in (*stages, "executed", "first values of"):
        assert text.count(stage) >= 6
    assert "verified." in text


@pytest.mark.gpu
@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_verifies_on_a_gpu(name: str) -> None:
    assert _run(name, "--device", "cuda", "--time") == 0


def test_options(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--dims", "1,32,4,4", "--groups", "8", "--dtype", "bf16", "--layout", "nhwc", "--time", "--no-verify")
    assert _run("groupnorm_swish_fwd", *arguments) == 0
    text = capsys.readouterr().out
    assert text.count("Running") == 1
    assert " ms" in text
    assert "verif" not in text
    for wrong in (("--dims", "a,b"), ("--dims", "2,5,3,3"), ("--dtype", "int8")):
        with pytest.raises(SystemExit) as error:
            _run("groupnorm_swish_fwd", *wrong)
        assert error.value.code == 2


def _wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every execution leaves one wrong value in each output."""
    right = Graph.execute

    def execute(self: Graph, pack: dict[str, torch.Tensor], workspace: torch.Tensor | None = None) -> None:
        right(self, pack, workspace)
        for tensor in self.outputs:
            pack[tensor.name][(0,) * pack[tensor.name].dim()] += 1

    monkeypatch.setattr(Graph, "execute", execute)


def test_a_wrong_result_exits_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    _wrong_result(monkeypatch)
    assert _run("bn_inference", "--dims", "2,8,4,4", "--dtype", "fp32", "--layout", "nchw") == 1
    assert "verification failed: y WRONG" in capsys.readouterr().out


def test_a_sample_is_a_script() -> None:
    arguments = [sys.executable, str(FOLDER / "bn_backward.py"), "--dims", "2,8,4,4", "--dtype", "fp32"]
    source = str(FOLDER.parents[1] / "src")
    environment = {**os.environ, "PYTHONPATH": source}
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert "bn_inference + relu_backward + bn_backward" in done.stdout


def test_the_samples_are_all_there() -> None:
    found = {path.stem for path in FOLDER.glob("*.py")} - {"sample"}
    assert found == set(SAMPLES)
    assert isinstance(import_module("sample"), ModuleType)


# --- fusednorm run ---


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    graph = described("batchnorm_chain", torch.bfloat16, "nhwc").build()
    graph.save(tmp_path / "graph.json")
    return tmp_path / "graph.json"


def test_run_executes_and_verifies_a_saved_graph(saved: Path) -> None:
    done = CliRunner().invoke(app, ["run", str(saved), "--time"])
    assert done.exit_code == 0, done.output
    assert "verification successful: dx ok" in done.output
    assert " ms" in done.output
    done = CliRunner().invoke(app, ["run", "-", "--json", "--plan", "fused:reference"], input=saved.read_text())
    result = json.loads(done.stdout)
    assert (result["ok"], result["plan"], set(result["outputs"])) == (
        True,
        "fused:reference",
        {"dx", "dscale", "dbias"},
    )


def test_run_tunes(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusednorm.graph.tuning.cache_directory", lambda: tmp_path / "plans")
    monkeypatch.setattr("fusednorm.graph.tuning.SECONDS", 1e-4)
    done = CliRunner().invoke(app, ["run", str(saved), "--tune", "--json"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result["plan"] == next(iter(result["tuned"]))


def test_run_exits_1_for_a_wrong_result_and_2_for_wrong_usage(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text("{}")
    missing, wrong = [str(tmp_path / "none.json")], [["--plan", "best"], ["--device", "moon"]]
    for arguments in ([str(broken)], missing, *([str(saved), *options] for options in wrong)):
        done = CliRunner().invoke(app, ["run", *arguments])
        assert done.exit_code == 2, done.output
    _wrong_result(monkeypatch)
    assert CliRunner().invoke(app, ["run", str(saved)]).exit_code == 1
