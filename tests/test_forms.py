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
from fusednorm.bench.forms.traffic import one_call_bytes, several_calls_bytes
from fusednorm.bench.markdown import report_markdown
from fusednorm.bench.provenance import this_machine
from fusednorm.bench.reading import read_report
from fusednorm.machine.timing import CpuTimer, Timing, timer_for

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


def case(composed: float, compiled: float, promise: float = 2.0, **fields: Any) -> dict[str, FormRow]:
    times = {EAGER: 3.0, COMPILE: compiled, COMPOSED: composed, FUSED: 1.0}
    rows = {name: row(name, ms, bytes=100, **fields) for name, ms in times.items()}
    return rows | {COMPOSED: replace(rows[COMPOSED], bytes=int(promise * 100))}


def test_the_rule() -> None:
    assert verdict(case(1.6, 1.0)) == "pass"
    assert verdict(case(1.4, 1.0)) == "saves too little"
    assert verdict(case(1.4, 0.9)) == "saves too little, slower than torch.compile"
    assert verdict(case(1.2, 1.0, promise=1.25)) == "pass"  # which is all that it saves
    assert verdict(case(1.1, 1.0, promise=1.25)) == "saves too little"
    assert verdict(case(1.0, 1.0, promise=1.0)) == "pass"
    assert verdict(case(1.0, 1.0, promise=0.0)) == "pass"  # nobody knows what it saves
    wrong = case(2.0, 2.0) | {FUSED: row(FUSED, None, status="wrong", note="error")}
    assert verdict(wrong) == "wrong"
    assert verdict({EAGER: row(EAGER, None, status="skipped")}) == ""


#: What several calls and one call move, in multiples of the input: forward, and with the backward.
TRANSFERS = {
    "rms_norm of x + h, and the sum": ((5, 4), (11, 8)),
    "layer_norm of x + h": ((5, 3), (8, 7)),
    "modulated layer_norm": ((6, 2), (16, 5)),
    "modulated layer_norm of x + gate h, and the sum": ((11, 4), (30, 10)),
    "rms_norm of queries and keys": ((4 / 3, 4 / 3), (5, 5)),
    "float8 rms_norm, and the scales of its rows": ((10.25, 1.25),),
    "int8 rms_norm of x + h, the scales of its rows, and the sum": ((15.25, 3.25),),
    "group_norm + silu of x + embedding": ((4, 2), (8, 5)),
    "group_norm + silu of x + h, and the sum": ((5, 4), (11, 8)),
    "relu of batch_norm + shortcut": ((7, 3), (13, 8)),
    "relu of group_norm + shortcut": ((7, 3), (13, 8)),
    "layer_norm over channels": ((2, 2), (5, 5)),
}


@pytest.mark.parametrize("form", [form for form in FORMS if form.layout == "nchw"], ids=lambda form: form.name)
def test_what_calls_move(form: Form) -> None:
    shape = form.shapes["cuda"]
    for backward, expected in zip((False, True), TRANSFERS[form.name], strict=False):
        for counted, transfers in zip((several_calls_bytes, one_call_bytes), expected, strict=True):
            found = counted(form, shape, "float32", backward) / (4 * math.prod(shape))
            assert found == pytest.approx(transfers, rel=0.02)
    assert len(TRANSFERS[form.name]) == 1 + form.differentiable


@pytest.mark.usefixtures("without_compiler")
def test_rows_of_a_device_beside_the_host_have_its_times_and_say_what_was_not_captured() -> None:
    class Beside(CpuTimer):
        def host_seconds(self, contenders: Any) -> dict[str, float]:
            return dict.fromkeys(contenders, 0.5)

        def measure(self, contenders: Any, whole: bool = False) -> dict[str, Timing]:
            captured = Timing((2.0,)) if whole else Timing((1.0,), "graph")
            return dict.fromkeys(contenders, captured) | ({} if whole else {EAGER: Timing((3.0,), "events", "waits")})

    form = next(form for form in FORMS if form.name == "layer_norm of x + h")
    job = FormJob(form, "float32", "forward_backward")
    rows = {one.contender: one for one in run_form(job, timer=Beside(asynchronous=True), device="cpu", shape=SMALL[3])}
    assert {(one.ms, one.method, one.call_ms, one.host_ms) for name, one in rows.items() if name != EAGER} == {
        (1000.0, "graph", 2000.0, 500.0)
    }
    assert (rows[EAGER].ms, rows[EAGER].method, rows[EAGER].note) == (3000.0, "events", "waits")
    assert rows[COMPOSED].bytes > rows[FUSED].bytes > rows[EAGER].bytes == 0
    table = form_table(rows.values())
    line = dict(zip(table.header, table.lines[0], strict=True))
    assert (line["one call, host ms"], line["note"]) == ("500.0", "torch eager: waits")


@pytest.mark.gpu
@pytest.mark.parametrize("direction", ["forward", "forward_backward"])
def test_a_form_on_a_gpu_is_timed_by_its_device(direction: FormDirection) -> None:
    form = next(form for form in FORMS if form.name == "relu of group_norm + shortcut" and form.layout == "nhwc")
    job = FormJob(form, "bfloat16", direction)
    rows = run_form(job, timer=timer_for("cuda", 0.0), device="cuda", shape=(2, 64, 40, 40))
    assert [(one.status, one.method, one.note) for one in rows] == [("ok", "graph", "")] * 4
    assert all(one.ms and one.call_ms and one.host_ms for one in rows)


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
    table = form_table(report.rows)
    line = dict(zip(table.header, table.lines[0], strict=True))
    assert (line["several calls"], line["promised"], line["rule"]) == ("1.60×", "2.00×", "pass")
    assert "one call, host ms" not in line


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
