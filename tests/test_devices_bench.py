"""The suite of devices: the command in two processes, and what its rows amount to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fusednorm import cli
from fusednorm.bench.devices import measuring
from fusednorm.bench.devices.catalog import ALONE, APEX, CONTENDERS, EXCHANGE, OURS, SPREADS, TORCH, DeviceJob
from fusednorm.bench.devices.rows import DeviceReport, DeviceRow
from fusednorm.bench.devices.summary import device_table
from fusednorm.bench.markdown import report_markdown
from fusednorm.bench.provenance import this_machine
from fusednorm.bench.reading import read_report

BENCH = ["bench", "--suite", "devices", "--device", "cpu"]


def test_the_command_in_two_processes(tmp_path: Path) -> None:
    path = tmp_path / "devices.json"
    options = ["--devices", "2", "--match", "SyncBatch", "--seconds", "0", "--json", str(path)]
    done = CliRunner().invoke(cli.app, [*BENCH, *options])
    assert done.exit_code == 0, done.output
    report = read_report(path.read_text())
    assert isinstance(report, DeviceReport)
    rows = {row.contender: row for row in report.rows}
    assert list(rows) == [OURS, TORCH, APEX, ALONE, EXCHANGE]
    for name in (OURS, ALONE, EXCHANGE):
        assert rows[name].status == "ok"
        assert rows[name].devices == 2
        assert rows[name].ms is not None
    assert rows[OURS].error is not None
    assert rows[TORCH].status == rows[APEX].status == "skipped"


@pytest.mark.parametrize("place", range(len(SPREADS)))
@pytest.mark.parametrize("direction", ["forward", "forward_backward"])
def test_statistics_of_a_part_alone_are_wrong(place: int, direction: Any) -> None:
    job = DeviceJob(place, "float32", "nchw", direction)
    assert measuring._check(job, OURS, 0, 1, "cpu").keys() == {"error", "allowed"}
    assert measuring._check(job, OURS, 0, 2, "cpu")["status"] == "wrong"  # no group: they are the part's own


@pytest.mark.parametrize(
    "options",
    [
        ["--match", "none such"],
        ["--direction", "backward"],
        ["--layout", "wide"],
        ["--contender", "x"],
        ["--seed", "1"],
    ],
)
def test_options_that_leave_nothing_to_run(options: list[str]) -> None:
    assert CliRunner().invoke(cli.app, [*BENCH, *options]).exit_code == 2


def test_only_this_suite_runs_on_several_devices() -> None:
    done = CliRunner().invoke(cli.app, ["bench", "--suite", "quick", "--devices", "2"])
    assert done.exit_code == 2


def test_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    assert measuring.counts_of((), "cuda") == [1, 2]
    assert measuring.counts_of((3, 1, 3), "cuda") == [1, 3]
    assert measuring.counts_of((8,), "cpu") == [8]
    with pytest.raises(ValueError, match="4 is more than the 3 GPUs"):
        measuring.counts_of((4,), "cuda")


def test_the_whole_is_cut_where_the_scaling_is_strong() -> None:
    weak, strong = SPREADS[0], SPREADS[1]
    assert weak.part("cuda", 4) == (32, 256, 56, 56)
    assert strong.part("cuda", 4) == (1, 128, 512, 2048)
    with pytest.raises(ValueError, match="3 devices do not divide"):
        strong.part("cuda", 3)


def test_a_table_has_the_scaling_and_the_ratios() -> None:
    row = DeviceRow("norm", "strong", 1, "2x3", "float32", "nchw", "forward", OURS, "ok", ms=4.0)
    two = replace(row, devices=2, ms=2.5, replay_ms=1.0)
    rows = (replace(row, replay_ms=1.9), two, replace(two, contender=TORCH, ms=5.0, replay_ms=3.0))
    table = device_table(rows)
    header, lines = table.header, table.lines
    assert [line[header.index("timed by")] for line in lines] == ["calls", "replays"] * 2
    assert [line[header.index("one device")] for line in lines] == ["1.00×", "1.00×", "1.60×", "1.90×"]
    assert [line[header.index(TORCH)] for line in lines] == ["", "", "2.00×", "3.00×"]
    report = DeviceReport(this_machine("cpu"), rows)
    assert read_report(report.to_json()) == report
    assert report.to_csv().count("\n") == 4
    assert "| workload |" in report_markdown([report])
    assert set(CONTENDERS) >= {one for spread in SPREADS for one in spread.contenders}
