"""The speedups of models and norms over torch, of saved reports, and their picture."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fusednorm import cli
from fusednorm.bench.models.measuring import OURS, TORCH
from fusednorm.bench.models.rows import ModelReport, ModelRow
from fusednorm.bench.provenance import Machine
from fusednorm.bench.results import Report, Row
from fusednorm.bench.speedups import speedups_of

MACHINE = Machine("a cpu", 2, 2, "Linux", "a gpu", {"torch": "2.13"}, "abc", "fusednorm bench", "2026-01-01")


def models() -> ModelReport:
    """A model that is 1.5 times as fast eager and 1.2 compiled, by CUDA graphs too; and one whose results are wrong."""
    rows = []
    for mode, ms in (("eager", 20.0), ("default", 25.0), ("reduce-overhead", 1.0)):
        row = ModelRow("unet", "inference", "bfloat16", "nhwc", mode, TORCH, "ok", ms=30.0)
        rows += [row, replace(row, contender=OURS, ms=ms)]
    wrong = replace(rows[0], model="dit", layout="rows")
    return ModelReport(MACHINE, (*rows, wrong, replace(wrong, contender=OURS, status="wrong", ms=None)))


def norms() -> Report:
    """Two shapes of one operation, 2 and 8 times as fast as eager; torch.compile failed on one of them."""
    rows = []
    for shape, eager in (("2x8x4", 2.0), ("4x8x4", 8.0)):
        row = Row(f"group_norm(4)+silu {shape} float32 nchw", "group_norm", shape, 4, "float32", "nchw", "silu",
                  "forward_backward", "fusednorm", "ok", ms=1.0)  # fmt: skip
        rows += [row, replace(row, contender="eager", ms=eager)]
    rows += [replace(rows[0], contender="compile", ms=1.5)]
    rows += [replace(rows[2], contender="compile", status="failed", ms=None)]
    return Report(MACHINE, tuple(rows))


def test_speedups_of_models_and_norms() -> None:
    speedups = speedups_of([models(), norms()])
    assert speedups.device == "a gpu"
    assert speedups.models == {"unet inference nhwc": pytest.approx({"eager": 1.5, "compile": 1.2})}
    assert speedups.norms == {"group_norm(4)+silu forward + backward": pytest.approx({"eager": 4.0, "compile": 1.5})}


def test_both_directions_together_give_way_to_the_backward_alone() -> None:
    report = norms()
    backward = replace(report, rows=tuple(replace(row, direction="backward") for row in report.rows))
    assert list(speedups_of([report, backward]).norms) == ["group_norm(4)+silu backward"]


def test_reports_that_give_no_speedups() -> None:
    elsewhere = replace(norms(), machine=replace(MACHINE, device="another gpu"))
    with pytest.raises(ValueError, match="one device, these are of a gpu, another gpu"):
        speedups_of([models(), elsewhere])
    with pytest.raises(ValueError, match="one device, these are of none"):
        speedups_of([])
    with pytest.raises(ValueError, match="no model and no norm has a time"):
        speedups_of([replace(models(), rows=models().rows[-2:])])


@pytest.mark.parametrize("kinds", [["models", "norms"], ["norms"]])
def test_the_picture(kinds: list[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name, report in (("models", models()), ("norms", norms())):
        (tmp_path / name).write_text(report.to_json())
    picture = tmp_path / "speedups.svg"
    result = CliRunner().invoke(
        cli.app, ["report", *(str(tmp_path / kind) for kind in kinds), "--speedups", str(picture)]
    )
    assert result.exit_code == 0
    labels = picture.read_text()
    assert ("<!-- unet inference nhwc -->" in labels) == ("models" in kinds)
    assert "<!-- group_norm(4)+silu forward + backward -->" in labels
    assert "<!-- 4.00 -->" in labels
    assert "<!-- times as fast as torch, a gpu -->" in labels
