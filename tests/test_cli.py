"""The command line: data on stdout, words on stderr, exit codes 0, 1 and 2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import fusednorm
from fusednorm import choice, cli
from fusednorm.bench import checks, workloads
from fusednorm.bench.operations import OPERATIONS
from fusednorm.bench.results import Report
from fusednorm.bench.workloads import Workload
from fusednorm.instance import Candidate
from fusednorm.problem import Problem

TINY = ["--shape", "2,8,5,6", "--groups", "4"]
ROWS = ["--shape", "6,20"]
TINY_WORKLOAD = Workload("group_norm", (2, 8, 5, 6), 4, activation="silu")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments))


@dataclass(frozen=True)
class WrongInstance:
    """The reference with a mistake, under a name of its own."""

    name: str = "wrong"

    def supports(self, problem: Problem) -> str | None:
        return None

    def configs(self, problem: Problem) -> tuple[None]:
        return (None,)

    def plan(self, problem: Problem, config: None = None) -> Any:
        right = choice.choose(problem, "reference").plan(problem)

        def call(*arguments: Any) -> Any:
            results = right(*arguments)
            if problem.backward:
                return replace(results, input=results.input + 0.01)
            return replace(results, output=results.output + 0.01)

        return call


def wrong_norm(input: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
    return torch.nn.functional.group_norm(input, 4) + 0.01


@pytest.mark.parametrize("operation", OPERATIONS)
def test_profile_verifies_every_operation(operation: str) -> None:
    shape = ROWS if operation.startswith(("layernorm", "rmsnorm")) else TINY
    result = run("profile", operation, *shape, "--no-time", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    right = [one for one in found["results"] if one["status"] == "ok"]
    assert right
    assert all(one["error"] <= one["allowed"] for one in right)
    assert all(one["note"] for one in found["results"] if one["status"] == "skipped")


def test_profile_draws_the_values_that_are_asked_for() -> None:
    found = [run("profile", "groupnorm_fwd", *TINY, "--init", init, "--no-time", "--json") for init in checks.INITS]
    assert len({result.stdout for result in found}) == len(checks.INITS)


def test_profile_prints_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(
        "profile",
        "groupnorm_fwd",
        *TINY,
        "--layout",
        "nhwc",
        "--dtype",
        "bf16",
        "--activation",
        "silu",
        "--init",
        "offset",
        "--no-verify",
    )
    assert result.exit_code == 0, result.output
    assert "copy limit" in result.stdout
    assert "best: " in result.stdout
    assert "reference" in result.stdout


def test_profile_fails_on_a_wrong_instance_and_does_not_time_it(monkeypatch: pytest.MonkeyPatch) -> None:
    right = choice.instances

    def with_a_wrong_one(problem: Problem) -> list[Candidate]:
        return [Candidate(WrongInstance(), None), *right(problem)]

    monkeypatch.setattr(choice, "instances", with_a_wrong_one)
    result = run("profile", "groupnorm_fwd", *TINY, "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert (found["results"][0]["instance"], found["results"][0]["status"]) == ("wrong", "wrong")
    assert found["results"][0]["ms"] is None
    assert found["best"] not in (None, "wrong")


@pytest.mark.parametrize(
    "arguments",
    [
        ["profile", "groupnorm"],
        ["profile", "groupnorm_fwd", "--shape", "2,8,5,6", "--groups", "3"],
        ["profile", "groupnorm_fwd", "--shape", "2,8,a"],
        ["profile", "groupnorm_fwd", *TINY, "--dtype", "int8"],
        ["profile", "groupnorm_fwd", *TINY, "--layout", "nwhc"],
        ["profile", "groupnorm_fwd", *TINY, "--activation", "sulu"],
        ["profile", "groupnorm_fwd", "--shape", "0,8,5,6", "--groups", "4"],
        ["bench", "--suite", "nothing"],
        ["bench", "--match", "no such workload"],
        ["bench", "--contender", "nobody"],
        ["verify", "--family", "weight_norm"],
        ["report", "no such file"],
    ],
    ids=" ".join,
)
def test_wrong_usage(arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""


@pytest.fixture
def tiny_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(workloads.SUITES, "quick", (TINY_WORKLOAD,))


BENCH = ["bench", "--contender", "fusednorm", "--contender", "eager", "--seconds", "0"]


@pytest.mark.usefixtures("tiny_suite")
def test_bench_writes_json_csv_and_a_plot_and_report_reads_it(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    json_path, csv_path, plot = tmp_path / "new" / "a.json", tmp_path / "a.csv", tmp_path / "a.png"
    result = run(*BENCH, "--json", str(json_path), "--csv", str(csv_path), "--plot", str(plot))
    assert result.exit_code == 0, result.output
    assert "geometric means" in result.stdout
    rows = Report.from_json(json_path.read_text()).rows
    assert [(row.direction, row.contender, row.status) for row in rows] == [
        (direction, contender, "ok")
        for direction in ("forward", "forward_backward")
        for contender in ("fusednorm", "eager", "copy")
    ]
    assert len(csv_path.read_text().splitlines()) == 1 + len(rows)
    assert plot.stat().st_size > 0
    markdown = run("report", "--workloads", str(json_path))
    assert markdown.exit_code == 0
    assert markdown.stdout.count(TINY_WORKLOAD.key) == 2
    csv_path.write_text("{}")
    assert run("report", str(csv_path)).exit_code == 2


@pytest.mark.usefixtures("tiny_suite")
def test_bench_json_on_stdout_is_alone_there() -> None:
    result = run(*BENCH, "--direction", "forward", "--json", "-")
    assert result.exit_code == 0, result.output
    assert len(Report.from_json(result.stdout).rows) == 3
    assert "geometric means" in result.stderr


@pytest.mark.usefixtures("tiny_suite")
def test_bench_fails_where_fusednorm_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusednorm, "group_norm", wrong_norm)
    result = run(*BENCH, "--direction", "forward")
    assert result.exit_code == 1
    assert "wrong: output" in result.stdout


def test_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli.verify, "covering_workloads", lambda: [TINY_WORKLOAD])
    result = run("verify")
    assert result.exit_code == 0, result.output
    assert "3 checks, 0 wrong" in result.stdout
    monkeypatch.setattr(fusednorm, "group_norm", wrong_norm)
    result = run("verify", "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["wrong"] == 3
    assert not any(check["ok"] for check in found["checks"])


def test_verify_of_one_family_draws_values_of_every_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Workload("rms_norm", (6, 20), 1)
    monkeypatch.setattr(cli.verify, "covering_workloads", lambda: [TINY_WORKLOAD, rows])
    found = json.loads(run("verify", "--family", "rms_norm", "--json").stdout)
    assert {check["workload"] for check in found["checks"]} == {rows.key}
    assert len({check["forward"]["allowed"] for check in found["checks"]}) == len(checks.INITS)


def test_verify_covers_every_value_with_every_family() -> None:
    seen: dict[str, set[tuple[str, object]]] = {}
    for one in checks.covering_workloads():
        values = {
            ("dtype", one.dtype),
            ("layout", one.layout),
            ("activation", one.activation),
            ("modulated", one.modulated),
        }
        seen.setdefault(one.family, set()).update(values)
    every = {("dtype", dtype) for dtype in checks.DTYPE_BYTES}
    every |= {("activation", activation) for activation in checks.ACTIVATIONS}
    image = {("layout", layout) for layout in checks.IMAGE_LAYOUTS} | {("modulated", True), ("modulated", False)}
    for family, values in seen.items():
        assert every | (set() if family in workloads.ROW_FAMILIES else image) <= values, family
    assert set(seen) == set(checks.FAMILIES)


def test_doctor() -> None:
    found = json.loads(run("doctor", "--json").stdout)
    assert found["versions"]["torch"] == torch.__version__  # with the build, which the metadata of a wheel may not name
    backends = {one["name"]: one for one in found["backends"]}
    assert backends["reference"]["available"]
    compiled = found["compiled"]["torch.compile"]
    assert compiled.startswith("launches in the generated code on GPUs, calls of functions elsewhere")
    text = run("doctor")
    assert text.exit_code == 0
    assert "kernel cache" in text.stdout


def test_package_runs_as_a_module() -> None:
    source = str(Path(fusednorm.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-m", "fusednorm", "--help"],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": source},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "profile" in done.stdout
