"""A sweep draws the same shapes from the same seed, of every kind, and its summary names the worst of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

import fusednorm
from fusednorm import cli
from fusednorm.bench import sweep
from fusednorm.bench.contenders import Eager, FusedNorm
from fusednorm.bench.judging import Judge
from fusednorm.bench.markdown import report_markdown
from fusednorm.bench.provenance import Machine
from fusednorm.bench.results import Report, Row
from fusednorm.bench.runner import run_workload
from fusednorm.bench.summary import Case, cases_of
from fusednorm.bench.sweep import SWEEP, drawn_workloads
from fusednorm.bench.sweep_summary import sweep_tables
from fusednorm.bench.tables import Table
from fusednorm.bench.workloads import Workload, draw, narrowed
from fusednorm.machine.limits import TRANSFERS
from fusednorm.machine.timing import CpuTimer
from fusednorm.norm import FAMILIES, ROW_FAMILIES

MB = 10**6
FIRST = [
    "group_norm(32) 12x1024x176 bfloat16 nhwc",
    "instance_norm+silu 83x577x16 float32 nhwc",
    "layer_norm 4x4x1x1x4096 bfloat16",
    "rms_norm 1x11x19x1016 bfloat16",
    "batch_norm+modulated 3x6x8x5x11 bfloat16 nhwc",
    "group_norm(3)+gelu 107x87x5x5 bfloat16 nhwc",
]
MANY = drawn_workloads(0, 1000, 64 * MB)
MACHINE = Machine("a cpu", 2, 2, "Linux", "a cpu", {"torch": "2.13"}, "abc", "fusednorm bench", "2026-01-01")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments))


# --- drawing ---


def test_the_same_seed_draws_the_same_workloads_and_another_seed_others() -> None:
    assert drawn_workloads(0, 1000, 64 * MB) == MANY
    assert not {one.key for one in drawn_workloads(1, 100, 64 * MB)} & {one.key for one in MANY[:100]}


def test_the_draws_are_those_of_every_version_and_machine() -> None:
    assert [one.key for one in drawn_workloads(0, len(FIRST), 64 * MB)] == FIRST


def test_a_longer_sweep_begins_with_a_shorter_one() -> None:
    assert drawn_workloads(0, 30, 64 * MB) == MANY[:30]


def test_workloads_are_distinct_and_within_the_bytes() -> None:
    assert len({one.key for one in MANY}) == len(MANY)
    sizes = [one.bytes_per_transfer for one in MANY]
    assert min(sizes) >= 1000
    assert max(sizes) <= 64 * MB
    for edge in (10**4, 10**5, MB, 10 * MB):
        assert sum(edge / 10 < size <= edge for size in sizes) > len(MANY) / 10
    assert max(one.bytes_per_transfer for one in drawn_workloads(0, 300, 512 * MB)) > 256 * MB


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_has_a_fifth_in_every_dtype_rank_layout_and_activation(family: str) -> None:
    mine = [one for one in MANY if one.family == family]
    rows = family in ROW_FAMILIES
    assert len(mine) == len(MANY) / 5
    assert {one.dtype for one in mine} == {"float32", "float16", "bfloat16"}
    # The instances of a tensor (N, C) have one element each, which cannot be normalized.
    assert {len(one.shape) for one in mine} == ({3, 4, 5} if family == "instance_norm" else {2, 3, 4, 5})
    assert {one.layout for one in mine} == ({"rows"} if rows else {"nchw", "nhwc"})
    assert {None, "silu", "relu", "gelu"} <= {one.activation for one in mine}
    assert {one.modulated for one in mine} == ({False} if rows else {False, True})
    assert {one.training for one in mine} == ({False, True} if family == "batch_norm" else {True})


def test_images_have_odd_and_usual_channels_and_planes_and_up_to_128_samples() -> None:
    images = [one for one in MANY if not one.row_family and len(one.shape) > 2]
    assert {one.shape[0] for one in images} >= {1, 2, 3, 8}
    assert 64 < max(one.shape[0] for one in images) <= 128
    channels = {one.shape[1] for one in images}
    assert {64, 320, 1280} <= channels
    assert sum(count % 2 for count in channels) > 20
    positions = {size for one in images for size in one.shape[2:]}
    assert {8, 56, 64} <= positions
    assert sum(size % 2 for size in positions) > 20
    assert any(len(set(one.shape[2:])) > 1 for one in images)


def test_rows_are_short_and_long_few_and_many() -> None:
    rows = [one for one in MANY if one.row_family]
    lengths = [torch.Size(one.parameter_shape).numel() for one in rows]
    assert min(lengths) == 64
    assert max(lengths) == 65536
    counts = [torch.Size(one.shape).numel() // length for one, length in zip(rows, lengths, strict=True)]
    assert min(counts) == 1
    assert max(counts) > 10**5
    assert {one.groups for one in rows} == {1, 2}


def test_no_statistic_covers_a_single_element() -> None:
    for one in MANY:
        sample = torch.empty(one.shape, device="meta")
        if one.row_family:
            assert torch.Size(one.parameter_shape).numel() > 1
        elif one.family == "batch_norm":
            assert sample[:, 0].numel() > 1
        else:
            groups = one.groups if one.family == "group_norm" else one.shape[1]
            assert sample[0].numel() // groups > 1


def test_small_drawn_workloads_are_right_in_eager_and_here() -> None:
    small = [one for one in drawn_workloads(3, 60, 64 * MB) if one.bytes_per_transfer < 50_000]
    assert {one.family for one in small} == set(FAMILIES)
    for workload in small:
        inputs = draw(workload)
        judge = Judge(workload, inputs, "forward")
        for contender in (FusedNorm(), Eager()):
            if contender.name == "eager" and not workload.training and len(workload.shape) == 2:
                continue  # torch's batch_norm on a CPU takes no fp32 statistics beside 16-bit points
            prepared = contender.prepare(workload, inputs, "forward")
            assert judge.check(prepared.results(prepared.call()), contender.allowance).ok, workload.key


# --- the summary ---


def rows_of(
    shape: str, direction: str, megabytes: float, ms: float | None, eager: float, compiled: float | None = None
) -> list[Row]:
    """One case whose plain copy or sum takes 1 ms."""
    common = Row(
        f"batch_norm {shape} float32 nchw", "batch_norm", shape, 0, "float32", "nchw", "", direction, "fusednorm", "ok",
        copy_ms=1.0, bytes=int(TRANSFERS[direction] * megabytes * MB),
    )  # fmt: skip
    ours = replace(common, ms=ms) if ms else replace(common, status="wrong", note="output: error", copy_ms=None)
    found = [ours, replace(common, contender="eager", ms=eager)]
    if compiled:
        found.append(replace(common, contender="compile", ms=compiled))
    return [*found, replace(common, contender="copy", ms=1.0)]


ROWS = (
    *rows_of("1x1", "forward", 1, 2.0, 4.0, 1.0),  # half as fast as compile
    *rows_of("1x2", "forward", 8, 1.25, 5.0, 2.5),  # 80% of the copy
    *rows_of("1x3", "forward", 8, 5.0, 4.9, 10.0),  # 20% of the copy; slower than eager, within the margin
    *rows_of("1x4", "backward", 8, 4.0, 2.0, 8.0),  # half as fast as eager
    *rows_of("1x5", "backward", 8, None, 2.0, 8.0),
)


def tables(rows: tuple[Row, ...] = ROWS) -> dict[str, Table]:
    found = sweep_tables(cases_of(rows))
    return dict(zip(("shares", "copy", "torch worst", "copy worst", "untimed"), found, strict=False))


def column(table: Table, name: str) -> list[str]:
    return [line[table.header.index(name)] for line in table.lines]


def test_shares_count_what_is_slower_by_more_than_the_margin() -> None:
    shares = tables()["shares"]
    assert column(shares, "direction") == ["forward", "backward", "all"]
    assert column(shares, "cases") == ["3", "2", "5"]
    assert column(shares, "not timed") == ["0", "1", "1"]
    assert column(shares, "slower than eager") == ["0 of 3 (0.0%)", "1 of 1 (100.0%)", "1 of 4 (25.0%)"]
    assert column(shares, "slower than faster of torch") == ["1 of 3 (33.3%)", "1 of 1 (100.0%)", "2 of 4 (50.0%)"]
    assert column(shares, "vs eager")[1] == "0.50×"


def test_means_of_the_copy_leave_out_what_the_start_of_a_kernel_decides() -> None:
    copy = tables()["copy"]
    assert copy.lines == (
        ("batch_norm", "nchw", "backward", "1", "25%", "25%"),
        ("batch_norm", "nchw", "forward", "2", "40%", "20%"),  # the geometric mean of 80% and 20%
    )


def test_the_worst_come_first() -> None:
    found = tables()
    assert [key.split()[1] for key in column(found["torch worst"], "workload")] == ["1x1", "1x4", "1x3", "1x2"]
    assert column(found["torch worst"], "faster of torch") == ["compile", "eager", "eager", "compile"]
    assert column(found["torch worst"], "vs it") == ["0.50×", "0.50×", "0.98×", "2.00×"]
    assert [key.split()[1] for key in column(found["copy worst"], "workload")] == ["1x3", "1x4", "1x2"]
    assert found["untimed"].lines == (("batch_norm 1x5 float32 nchw", "backward", "wrong: output: error"),)


def test_twenty_are_named_at_most() -> None:
    many = [row for place in range(30) for row in rows_of(f"1x{place}", "forward", 8, 1.0 + place, 1.0)]
    found = tables(tuple(many))
    assert len(found["torch worst"].lines) == len(found["copy worst"].lines) == 20
    assert found["torch worst"].lines[0][0] == "batch_norm 1x29 float32 nchw"
    assert "untimed" not in found


def test_without_compile_eager_is_the_faster_of_torch() -> None:
    (case,) = cases_of(rows_of("1x1", "forward", 8, 2.0, 3.0))
    assert isinstance(case, Case)
    assert case.speedup_over_torch == 1.5
    assert column(tables(tuple(rows_of("1x1", "forward", 8, 2.0, 3.0)))["torch worst"], "faster of torch") == ["eager"]


def test_a_saved_sweep_is_reported_as_a_sweep_and_a_listed_suite_as_before() -> None:
    report = Report(MACHINE, ROWS, SWEEP)
    assert Report.from_json(report.to_json()) == report
    text = report_markdown([report])
    assert "the 20 worst against torch" in text
    assert "1 of 4 (25.0%)" in text
    assert "a cpu, 2 cores" in text
    listed = report_markdown([replace(report, suite="quick")])
    assert "worst" not in listed
    assert "| operation |" in listed
    both = report_markdown([report, replace(report, suite="quick")], workloads=True)
    assert both.count("| operation |") == both.count("the 20 worst against torch") == 1
    old = report.to_json().replace('"suite": "sweep"', '"other": ""')
    assert Report.from_json(old).suite == ""
    with pytest.raises(ValueError, match="suite is a int"):
        Report.from_json(report.to_json().replace('"suite": "sweep"', '"suite": 1'))


# --- the command ---


def test_a_workload_that_is_not_judged_is_timed_and_has_no_error() -> None:
    timer = CpuTimer(sample_seconds=0.0, seconds=0.0, minimum_samples=1)
    workload = Workload("group_norm", (2, 8, 5, 5), 4)
    rows = run_workload(workload, "backward", [FusedNorm(), Eager()], timer=timer, judged=False)
    assert [(row.status, row.error) for row in rows] == [("ok", None)] * 3
    assert all(row.ms for row in rows)
    checked = run_workload(workload, "backward", [FusedNorm()], timer=timer)
    assert checked[0].error is not None


SMALL = ["bench", "--suite", SWEEP, "--device", "cpu", "--contender", "fusednorm", "--contender", "eager"]


def test_sweep_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sweep.MOST_BYTES, "cpu", 20_000)
    path = tmp_path / "sweep.json"
    result = run(*SMALL, "--seed", "5", "--count", "3", "--seconds", "0", "--json", str(path))
    assert result.exit_code == 0, result.output
    report = Report.from_json(path.read_text())
    expected = [one.key for one in drawn_workloads(5, 3, 20_000)]
    assert [(row.workload, row.direction, row.contender) for row in report.rows] == [
        (key, direction, contender)
        for key in expected
        for direction in ("forward", "backward")
        for contender in ("fusednorm", "eager", "copy")
    ]
    assert {row.status for row in report.rows} == {"ok"}
    assert all(row.error is not None for row in report.rows if row.contender != "copy")
    printed = run("report", str(path)).stdout
    for table in sweep_tables(cases_of(report.rows)):
        assert table.to_markdown() in printed
        assert table.title.partition(",")[0] in result.stdout
    assert expected[0] in result.stdout


def test_large_workloads_of_a_sweep_are_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sweep.MOST_BYTES, "cpu", 20_000)
    monkeypatch.setattr(cli.bench, "JUDGED_BYTES", 0)
    monkeypatch.setattr(fusednorm, "group_norm", lambda *arguments, **named: arguments[0] + 1)
    result = run(*SMALL, "--count", "1", "--seconds", "0", "--direction", "forward", "--json", "-")
    assert result.exit_code == 0, result.output
    assert {row.error for row in Report.from_json(result.stdout).rows} == {None}
    monkeypatch.setattr(cli.bench, "JUDGED_BYTES", 20_000)
    assert run(*SMALL, "--count", "1", "--seconds", "0", "--direction", "forward").exit_code == 1


@pytest.mark.parametrize("suite", [(SWEEP, "--count", "2"), ("quick",)])
def test_no_workload_starts_after_the_limit(suite: tuple[str, ...]) -> None:
    result = run("bench", "--device", "cpu", "--limit", "0", "--json", "-", "--suite", *suite)
    assert result.exit_code == 0, result.output
    assert "not measured, as 0 s are over" in result.stderr
    assert Report.from_json(result.stdout).rows == ()


@pytest.mark.parametrize(("limit", "most"), [(None, None), (100.0, 50.0), (0.0, 0.0)])
def test_compiling_ahead_ends_before_the_limit(
    limit: float | None, most: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float | None] = []
    monkeypatch.setattr(cli.bench, "timer_for", lambda device, seconds, quick: None)
    monkeypatch.setattr(cli.bench, "precompile", lambda run, jobs, show, seconds: seen.append(seconds))
    monkeypatch.setattr(cli.bench, "compile_ahead", lambda jobs, device, show, seconds: seen.append(seconds))
    assert cli.bench._run([], [], "normal", "cuda", 0.0, limit, True, False, True) == ([], [])
    assert len(seen) == 2
    assert all(one is None if most is None else one is not None and one <= most for one in seen)


def test_a_sweep_is_narrowed_after_it_is_drawn() -> None:
    halves = narrowed(MANY, ["bfloat16"], ["nhwc"])
    assert {one.dtype for one in halves} == {"bfloat16"}
    assert {one.layout for one in halves} == {"nhwc", "rows"}
    assert set(halves) <= set(MANY)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--suite", "quick", "--seed", "1"], "--seed"),
        (["--suite", "quick", "--count", "2"], "--count"),
        (["--suite", "swoop"], "sweep"),
        (["--suite", "forms", "--limit", "1"], "--limit"),
        (["--suite", SWEEP, "--count", "0"], "count"),
        (["--suite", SWEEP, "--match", "no such workload"], "no workload"),
    ],
)
def test_wrong_usage(arguments: list[str], named: str) -> None:
    result = run("bench", "--device", "cpu", *arguments)
    assert result.exit_code == 2
    assert named in result.stderr
