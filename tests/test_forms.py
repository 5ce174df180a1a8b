"""The suite of forms: every form is right in one call and in several, and what the command writes."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fusednorm import cli
from fusednorm.bench.forms.catalog import FORMS, Form
from fusednorm.bench.forms.measuring import (
    COMPILE,
    COMPOSED,
    CONTENDERS,
    EAGER,
    FUSED,
    FormJob,
    relative_error,
    run_form,
)
from fusednorm.bench.forms.rows import FormDirection, FormReport, FormRow, cases_of
from fusednorm.bench.forms.summary import form_table, verdict
from fusednorm.bench.markdown import report_markdown
from fusednorm.bench.provenance import this_machine
from fusednorm.bench.reading import read_report
from fusednorm.machine.timing import CpuTimer

TIMER = CpuTimer(sample_seconds=0.0, seconds=0.0, minimum_samples=1, maximum_samples=1, pause_seconds=0.0)
SMALL = {3: (2, 5, 48), 4: (2, 64, 3, 4), 5: (2, 5, 3, 2, 16)}


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilation takes seconds for each form, and is torch's to get right."""
    monkeypatch.setattr(torch, "compile", lambda call, **options: call)


@pytest.mark.usefixtures("without_compiler")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("form", "direction"),
    [
        pytest.param(form, direction, id=f"{form.name} {form.layout} {direction}")
        for form in FORMS
        for direction in ("forward", "forward_backward")
        if direction == "forward" or form.differentiable
    ],
)
def test_every_form_is_right(form: Form, dtype: str, direction: FormDirection) -> None:
    shape = SMALL[len(form.shapes["cpu"])]
    rows = run_form(FormJob(form, dtype, direction), timer=TIMER, device="cpu", shape=shape)
    assert [row.contender for row in rows] == list(CONTENDERS)
    for row in rows:
        assert row.status == "ok", row
        assert row.ms is not None


def test_forms_are_of_at_least_16_megabytes() -> None:
    for form in FORMS:
        for device, size in (("cpu", 4), ("cuda", 2)):
            assert math.prod(form.shapes[device]) * size >= 16e6


def row(contender: str, ms: float | None, **fields: Any) -> FormRow:
    return replace(FormRow("form", "2x3", "float32", "nchw", "forward", contender, "ok", ms=ms), **fields)


def case(composed: float, compiled: float, **fields: Any) -> dict[str, FormRow]:
    times = {EAGER: 3.0, COMPILE: compiled, COMPOSED: composed, FUSED: 1.0}
    return {name: row(name, ms, **fields) for name, ms in times.items()}


def test_the_rule() -> None:
    assert verdict(case(1.6, 1.0)) == "pass"
    assert verdict(case(1.4, 1.0)) == "saves too little"
    assert verdict(case(1.4, 0.9)) == "saves too little, slower than torch.compile"
    assert verdict(case(1.0, 1.0, saves="no")) == "pass"
    wrong = case(2.0, 2.0) | {FUSED: row(FUSED, None, status="wrong", note="error")}
    assert verdict(wrong) == "wrong"
    assert verdict({EAGER: row(EAGER, None, status="skipped")}) == ""


def test_an_error_is_of_the_worst_result() -> None:
    one = torch.ones(4)
    assert relative_error([one, 2 * one], [one, one]) == pytest.approx(1.0)
    assert relative_error([one], [one, one]) == math.inf
    assert relative_error([one * math.nan], [one]) == math.inf


def test_a_contender_that_fails_or_is_wrong_is_not_timed(
    without_compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(tensors: Any) -> Any:
        raise RuntimeError("no such kernel")

    shape = {"cpu": (2, 3)}
    parts = (lambda shape: {"x": shape}, lambda norm, t: (t["x"] + 1,))
    for fused, status in ((fails, "failed"), (lambda t: (t["x"] + 2,), "wrong")):
        rows = run_form(FormJob(Form("one", shape, *parts, fused), "float32", "forward"), timer=TIMER, device="cpu")
        assert [one.status for one in rows] == ["ok", "ok", "ok", status]
        assert rows[-1].note
        assert rows[-1].ms is None


def test_a_report_is_read_as_it_was_written() -> None:
    report = FormReport(this_machine("cpu"), tuple(case(1.6, 1.0).values()))
    assert read_report(report.to_json()) == report
    assert report.to_csv().count("\n") == 5
    assert "| form |" in report_markdown([report])
    assert len(cases_of(report.rows)) == 1
    assert form_table(report.rows).lines[0][-1] == "pass"


@pytest.mark.usefixtures("without_compiler")
def test_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    form = next(one for one in FORMS if one.name == "layer_norm over channels")
    monkeypatch.setattr("fusednorm.cli.forms.FORMS", (replace(form, shapes={"cpu": (2, 8, 3, 3)}),))
    path = tmp_path / "forms.json"
    options = ["--suite", "forms", "--device", "cpu", "--seconds", "0", "--direction", "forward", "--json", str(path)]
    done = CliRunner().invoke(cli.app, ["bench", *options])
    assert done.exit_code == 0, done.output
    assert json.loads(path.read_text())["suite"] == "forms"
    assert len(FormReport.from_json(path.read_text()).rows) == len(CONTENDERS)
    for wrong in (["--match", "no such form"], ["--direction", "backward"], ["--mode", "eager"], ["--contender", "x"]):
        done = CliRunner().invoke(cli.app, ["bench", "--suite", "forms", "--device", "cpu", *wrong])
        assert done.exit_code == 2, wrong
