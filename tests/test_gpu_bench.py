"""Measuring on a GPU: what of it is arithmetic runs anywhere, the timer and the commands where there is a GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner, Result

import fusednorm
from fusednorm import cli
from fusednorm.bench import plot, summary, workloads
from fusednorm.bench.contenders import Compiled, Eager, FusedNorm, available
from fusednorm.bench.markdown import report_markdown
from fusednorm.bench.provenance import Machine
from fusednorm.bench.results import Report, Row
from fusednorm.bench.runner import run_workload
from fusednorm.bench.workloads import SUITES, Workload
from fusednorm.machine import description
from fusednorm.machine.description import gpu_facts
from fusednorm.machine.gpu_timing import MOST_SETS, GpuTimer, rounds_in_graph, sets_beyond
from fusednorm.machine.timing import CpuTimer, in_turns, timer_for, turns_within

MB = 10**6
WORKLOAD = Workload("group_norm", (2, 64, 40, 40), 8, "bfloat16", activation="silu")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments))


# --- anywhere ---


@pytest.mark.parametrize("megabytes", [0.7, 1, 7, 42, 100, 119, 120, 121, 268])
def test_between_two_uses_of_a_set_the_others_are_twice_the_l2(megabytes: float) -> None:
    l2, nbytes = 60 * MB, int(megabytes * MB)
    sets = sets_beyond(l2, nbytes)
    assert sets >= 2
    assert (sets - 1) * nbytes >= 2 * l2
    assert sets == 2 or (sets - 2) * nbytes < 2 * l2


def test_rotation_of_small_tensors_is_bounded_and_gone_through_once_after_the_flush() -> None:
    assert sets_beyond(60 * MB, 4096) == sets_beyond(60 * MB, 0) == MOST_SETS
    assert rounds_in_graph(MOST_SETS, 1e-6) == 1


def test_a_graph_is_long_against_its_start_and_whole_rounds_of_its_sets() -> None:
    assert rounds_in_graph(2, 1.0) == 4  # at least 8 calls
    assert rounds_in_graph(4, 10e-6) * 4 * 10e-6 >= 500e-6
    assert rounds_in_graph(100, 10e-6) == 1


def test_a_quick_timer_of_a_gpu_rotates_through_fewer_sets() -> None:
    quick = timer_for("cuda", seconds=0.05, quick=True)
    assert isinstance(quick, GpuTimer)
    assert quick.most_sets < MOST_SETS
    assert quick.maximum_samples < GpuTimer().maximum_samples
    assert sets_beyond(60 * MB, 4096, quick.most_sets) == quick.most_sets
    assert rounds_in_graph(quick.most_sets, 1e-6, quick.most_sets) == 1  # its small tensors stay in the L2 afterwards
    assert sets_beyond(60 * MB, 100 * MB, quick.most_sets) == sets_beyond(60 * MB, 100 * MB)
    assert timer_for("cpu", seconds=2.0, quick=True) == CpuTimer(seconds=2.0)


def test_turns() -> None:
    assert turns_within(1.0, 0.1, 5, 25) == 10
    assert turns_within(0.0, 0.1, 5, 25) == 5
    assert turns_within(1.0, 0.0, 5, 25) == 25
    assert "".join(in_turns({"a": 2, "b": 4})) == "bbabba"
    assert list(in_turns({})) == []


def test_each_device_has_its_timer() -> None:
    assert timer_for("cpu", seconds=2.0) == CpuTimer(seconds=2.0)
    assert timer_for("cuda", seconds=2.0) == GpuTimer(seconds=2.0)
    with pytest.raises(NotImplementedError, match="meta"):
        timer_for("meta")


def test_peers_are_offered_on_their_device_alone() -> None:
    found, missing = available([], "cuda")
    assert {"fusednorm", "eager", "compile"} <= {one.name for one in found}
    assert "fusednorm out=" not in {one.name for one in found}
    assert missing["jax"] == "measured on cpu only"
    _, missing = available(["liger"], "cpu")
    assert missing == {"liger": "measured on cuda only"}
    asked_for, _ = available(["fusednorm out="], "cuda")
    assert [one.name for one in asked_for] == ["fusednorm out="]


def test_backward_alone_is_checked_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    # What Inductor makes of it takes half a minute to compile, and is for the machines that measure.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    timer = CpuTimer(sample_seconds=0.0, seconds=0.0, minimum_samples=1)
    workload = replace(WORKLOAD, shape=(2, 16, 5, 5))
    rows = run_workload(workload, "backward", [FusedNorm(), Eager(), Compiled()], timer=timer)
    assert [(row.contender, row.status) for row in rows] == [
        ("fusednorm", "ok"),
        ("eager", "ok"),
        ("compile", "ok"),
        ("copy", "ok"),
    ]
    assert rows[0].bytes == 3 * 2 * 2 * 16 * 25
    assert rows[0].flops > 0


def test_gpu_suite_has_the_shapes_of_the_targets_in_both_orders() -> None:
    keys = [one.key for one in SUITES["gpu"]]
    assert {one.dtype for one in SUITES["gpu"]} == {"bfloat16"}
    for layout in ("nchw", "nhwc"):
        assert sum("group_norm(32)+silu" in key and key.endswith(layout) for key in keys) >= 10
        assert f"batch_norm 32x256x56x56 bfloat16 {layout}" in keys
    assert any(one.bytes_per_transfer < MB for one in SUITES["gpu"])


PROPERTIES = SimpleNamespace(
    name="a gpu",
    major=9,
    minor=0,
    gcnArchName="gfx942",
    multi_processor_count=132,
    total_memory=140 * 2**30,
    L2_cache_size=60 * 2**20,
)


def test_gpu_in_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    facts = gpu_facts(PROPERTIES, "580.1")
    assert facts == {
        "name": "a gpu",
        "capability": "9.0",
        "multiprocessors": "132",
        "memory": "140 GiB",
        "L2": "60 MiB",
        "driver": "580.1",
        "CUDA": "13.0",
    }
    monkeypatch.setattr(torch.version, "hip", "7.1")
    amd = gpu_facts(PROPERTIES, "")
    assert (amd["capability"], amd["HIP"]) == ("gfx942", "7.1")
    assert "driver" not in amd
    version = tmp_path / "version"
    version.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\n")
    assert description.driver_version([tmp_path / "missing", version]) == "580.159.04"
    assert description.driver_version([]) == ""


def test_doctor_tells_gpus_apart_and_says_what_was_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli.doctor, "gpus", lambda: [{"name": "a gpu", "L2": "60 MiB"}])
    found = json.loads(run("doctor", "--json").stdout)
    assert found["gpus"] == [{"name": "a gpu", "L2": "60 MiB"}]
    text = run("doctor").stdout
    assert "L2: 60 MiB" in text
    assert "AMD: compiled and interpreted in the tests, not run" in text
    monkeypatch.setattr(cli.doctor, "gpus", list)
    assert "none: torch.cuda.is_available() is False" in run("doctor").stdout


@pytest.mark.parametrize("command", [["profile", "groupnorm_fwd"], ["bench"], ["verify"]], ids=" ".join)
def test_a_gpu_that_is_not_there_is_wrong_usage(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = run(*command, "--device", "cuda")
    assert result.exit_code == 2
    assert "torch.cuda.is_available() is False" in result.stderr
    assert description.resolve_device("auto") == "cpu"


MACHINE = Machine("a cpu", 16, 16, "Linux", "a gpu", {"torch": "2"}, "abc", "-", "2026-01-01", {"L2": "60 MiB"}, 50e12)
# (contender, device ms, host ms, ms of calls one after the other)
TIMES = (("fusednorm", 0.1, 0.02, 0.11), ("eager", 0.4, 0.01, 0.44), ("compile", 0.2, 0.03, 0.3))


#: The last size that is not large, and the first that is.
LARGE = (64 * MB - 1, 64 * MB)


def gpu_report() -> Report:
    """One tensor of 67 MB; fusednorm takes twice the copy's time, a half of compile's and a quarter of eager's."""
    common = Row(
        "group_norm(32)+silu 1x512 bfloat16 nchw", "group_norm", "1x512", 32, "bfloat16", "nchw", "silu", "", "", "ok"
    )
    rows = []
    for direction, transfers in (("forward", 2), ("backward", 3), ("forward_backward", 5)):
        whole = direction == "forward_backward"
        method = "calls" if whole else "graph"
        of_direction = replace(common, direction=direction, bytes=transfers * 67 * MB, flops=10**9, method=method)
        for name, ms, host, call in TIMES:
            row = replace(of_direction, contender=name, ms=ms, copy_ms=0.05, host_ms=host)
            if direction == "forward":
                row = replace(row, call_ms=call)
            if whole:
                row = replace(row, peak_bytes=300, plain_peak_bytes=200)
            rows.append(row)
        rows.append(replace(of_direction, contender="copy", ms=0.05, copy_ms=0.05))
    return Report(MACHINE, tuple(rows))


def test_tables_of_a_gpu_have_its_columns() -> None:
    report = gpu_report()
    assert Report.from_json(report.to_json()) == report
    cases = summary.cases_of(report.rows)
    means = summary.mean_table(cases)
    by_name = dict(zip(means.header, means.lines[0], strict=True))
    assert by_name["vs torch, least"] == "2.00×"
    assert (by_name["of copy, 64 MB up, least"], by_name["host us, most"]) == ("50%", "20")
    assert by_name["calls vs eager, least"] == "4.00×"
    both = dict(zip(means.header, means.lines[2], strict=True))
    # Its times are those of whole calls already; a backward has no whole calls of its own.
    assert (both["peak memory, most"], both["calls vs eager, least"]) == ("1.50×", "4.00×")
    assert cases[1].call_speedup is None
    assert [replace(cases[0], first=replace(cases[0].first, bytes=2 * size)).large for size in LARGE] == [False, True]
    assert "of copy, out=" not in means.header
    text = report_markdown([report], workloads=True)
    assert "a gpu, L2 60 MiB; 16 cores" in text
    table = summary.contender_table(cases[0])
    ours = dict(zip(table.header, table.lines[0], strict=True))
    assert (ours["ms"], ours["host us"], ours["call ms"]) == ("0.100", "20", "0.110")


def test_roofline_of_a_report(tmp_path: Path) -> None:
    report = gpu_report()
    roofline = plot.roofline_of([report])
    assert roofline.bandwidth == pytest.approx(3 * 67 * MB / 0.05e-3)
    assert roofline.peak_flops == 50e12
    assert roofline.points["fusednorm", "forward"] == ((pytest.approx(1e9 / (134 * MB)), pytest.approx(1e13)),)
    assert not any(direction == "forward_backward" for _, direction in roofline.points)
    other = replace(report, machine=replace(MACHINE, device="another gpu"))
    with pytest.raises(ValueError, match="one device"):
        plot.roofline_of([report, other])
    with pytest.raises(ValueError, match="no row"):
        plot.roofline_of([replace(report, rows=())])
    pytest.importorskip("matplotlib")
    saved, picture = tmp_path / "gpu.json", tmp_path / "roofline.png"
    saved.write_text(report.to_json())
    assert run("report", str(saved), "--roofline", str(picture)).exit_code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


# --- on a GPU ---


@pytest.mark.gpu
def test_graph_time_of_a_copy_is_that_of_memory() -> None:
    timer = GpuTimer(seconds=0.2)
    nbytes = 256 * MB
    source = torch.ones(nbytes // 4, device="cuda")
    targets = [torch.empty_like(source) for _ in range(timer.input_sets(2 * nbytes))]

    def copy(target: torch.Tensor) -> torch.Tensor:
        return target.copy_(source)

    timings = timer.measure({"copy": [lambda target=target: copy(target) for target in targets]})
    assert timings["copy"].method == "graph"
    # No GPU with graphs moves less than 100 GB/s or more than 20 TB/s.
    assert 2 * nbytes / 20e12 < timings["copy"].median < 2 * nbytes / 100e9


@pytest.mark.gpu
def test_a_cold_l2_is_slower_than_a_warm_one() -> None:
    nbytes = 8 * MB
    timer = GpuTimer(seconds=0.1)
    sets = timer.input_sets(2 * nbytes)
    pairs = [(torch.ones(nbytes // 4, device="cuda"), torch.empty(nbytes // 4, device="cuda")) for _ in range(sets)]
    cold = [lambda one=one: one[1].copy_(one[0]) for one in pairs]
    timings = timer.measure({"cold": cold, "warm": [cold[0]] * sets})
    assert timings["cold"].median > timings["warm"].median


@pytest.mark.gpu
def test_what_cannot_be_captured_is_timed_by_events() -> None:
    x = torch.ones(1000, device="cuda")
    timings = GpuTimer(seconds=0.0).measure({"waits": [lambda: float(x.sum())] * 2, "plain": [lambda: x.sum()] * 2})
    assert (timings["waits"].method, timings["plain"].method) == ("events", "graph")
    assert timings["waits"].note.startswith("not captured: ")
    assert timings["waits"].median > 0


@pytest.mark.gpu
@pytest.mark.parametrize("asked", ["forward", "backward", "forward_backward"])
def test_rows_of_a_workload_on_a_gpu(asked: str) -> None:
    timer = GpuTimer(seconds=0.0)
    rows = run_workload(WORKLOAD, asked, [FusedNorm(), Eager(), Compiled()], timer=timer, device="cuda")  # type: ignore[arg-type]
    assert [(row.status, row.note) for row in rows] == [("ok", "")] * 4
    assert {row.method for row in rows} == {"calls" if asked == "forward_backward" else "graph"}
    ours = rows[0]
    assert ours.host_ms is not None
    assert (ours.call_ms is not None) == (asked == "forward")
    assert (ours.peak_fraction is not None) == (asked == "forward_backward")


@pytest.mark.gpu
def test_peak_memory_is_that_of_the_call_alone() -> None:
    timer, held = GpuTimer(), torch.empty(50 * MB, dtype=torch.uint8, device="cuda")
    peak = timer.peak_bytes(lambda: torch.empty(20 * MB, dtype=torch.uint8, device="cuda"))
    assert peak == pytest.approx(20 * MB, rel=0.1)
    del held


@pytest.mark.gpu
def test_explain_measures_the_gpu() -> None:
    x = torch.randn(2, 64, 256, 256, device="cuda")
    found = fusednorm.explain(fusednorm.group_norm, x, 8, activation="silu")
    assert found.problem.device == "cuda"
    assert found.copy_bandwidth > 100e9
    assert found.peak_flops > 1e12


@pytest.mark.gpu
def test_commands_on_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(workloads.SUITES, "quick", (WORKLOAD,))
    result = run("bench", "--device", "cuda", "--seconds", "0", "--revision", "abc", "--json", str(tmp_path / "a.json"))
    assert result.exit_code == 0, result.output
    report = Report.from_json((tmp_path / "a.json").read_text())
    assert report.machine.device == torch.cuda.get_device_name()
    assert report.machine.revision == "abc"
    assert report.machine.gpu["L2"]
    for operation in ("groupnorm_fwd", "groupnorm_bwd"):
        shape = ["--shape", "2,64,40,40", "--groups", "8", "--dtype", "bf16"]
        found = json.loads(run("profile", operation, *shape, "--device", "cuda", "--json").stdout)
        timed = [one for one in found["results"] if one["status"] == "ok"]
        assert {one["method"] for one in timed} <= {"graph", "events"}
        assert found["best"].startswith("triton")
    monkeypatch.setattr(cli.verify, "covering_workloads", lambda: [WORKLOAD])
    assert run("verify", "--device", "cuda").exit_code == 0
    facts = json.loads(run("doctor", "--json").stdout)["gpus"][0]
    assert facts["name"] == torch.cuda.get_device_name()
