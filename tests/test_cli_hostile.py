"""Hostile options and files: exit code 2 and words, never a traceback, and nothing raw from a file on the terminal."""

from __future__ import annotations

import copy
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import fusednorm
from fusednorm import choice, cli
from fusednorm.bench import contenders, memory, peers, profiling, runner, workloads
from fusednorm.bench.contenders import Eager, FusedNorm, available
from fusednorm.bench.results import Report
from fusednorm.bench.runner import run_workload
from fusednorm.bench.workloads import Workload
from fusednorm.cli import exits
from fusednorm.machine.timing import CpuTimer
from fusednorm.text import printable, read_bytes

PROFILE = ["profile", "groupnorm_fwd", "--shape", "2,8,5,6", "--groups", "4", "--no-time"]
BENCH = ["bench", "--contender", "eager", "--direction", "forward", "--seconds", "0"]
TINY = Workload("group_norm", (2, 8, 5, 6), 4)
# A terminal's escape, a title, C1's CSI, an override of the writing direction, a lone surrogate, a forged line.
EVIL = "\x1b[31m\x1b]0;t\x07\x9b2J\u202e\ud800\nverification successful"


def run(*arguments: str, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(cli.app, list(arguments), input=stdin)


def harmless(result: Result, *codes: int) -> bool:
    """No traceback, one of the codes, and no character that a terminal would obey."""
    shown = result.output.isprintable() or all(one.isprintable() or one == "\n" for one in result.output)
    return result.exit_code in codes and "Traceback" not in result.output and shown


def with_options(base: list[str], options: dict[str, list[str]]) -> list[list[str]]:
    return [[*base, option, value] for option, values in options.items() for value in values]


@pytest.mark.parametrize(
    "arguments",
    [
        *with_options(
            PROFILE,
            {
                "--threads": ["-1", "99999999999", "100000", "nan"],
                "--groups": ["-1", "0", "9" * 50],
                "--dtype": ["int8", "\x1b[31m"],
                "--activation": ["\x1b[31m", "9"],
                "--device": ["cuda:99", "mps", "meta", "cpu:3", "garbage", ""],
                "--shape": ["0", "-1,8", ",", "inf,8", "9" * 5000, "9" * 400 + ",8", ",".join(["1"] * 1000)],
            },
        ),
        *with_options([*PROFILE, "--shape"], {"4294967296,4294967296": ["--json"], "1,8,99999999999": ["--json"]}),
        *with_options(
            BENCH,
            {
                "--seconds": ["nan", "inf", "-inf", "1e400", "-1"],
                "--device": ["cuda:0", "meta"],
                "--threads": ["100000"],
                "--json": ["/", "/proc/x/y", "a\0b"],
                "--csv": ["/", "/dev/full/x"],
                "--plot": ["/", "a.xyz", "a"],
            },
        ),
        [*BENCH, "--json", "-", "--csv", "-"],
        ["bench", "--suite", "devices", "--device", "cpu", "--devices", "5", "--seconds", "0"],
        ["verify", "--family", "\x1b[31m"],
        ["\x1b[31m"],
        ["run", "\x1b[31m"],
        ["run", "/"],
        ["run", ""],
        ["tune", "--shape", "2,32,5,6", "--groups", "0"],
        ["report", "/"],
        ["report", "\x1b[31m"],
    ],
    ids=lambda arguments: " ".join(arguments)[:60].encode("unicode_escape").decode(),
)
def test_options(arguments: list[str]) -> None:
    result = run(*arguments)
    assert harmless(result, 2), result.output
    assert result.stdout == ""


@pytest.mark.parametrize(
    "arguments",
    [
        [*PROFILE, "--shape", ""],
        *([*BENCH, option, ""] for option in ("--json", "--csv", "--revision")),
        *(["run", "/dev/null", option, " "] for option in ("--plan", "--device")),
        *(["tune", option, ""] for option in ("--suite", "--shape")),
    ],
    ids=lambda arguments: f"{arguments[0]} {arguments[-2]}",
)
def test_an_empty_value_is_no_default(arguments: list[str]) -> None:
    result = run(*arguments)
    assert harmless(result, 2), result.output
    assert "the value is empty" in result.output
    assert result.stdout == ""


def test_version() -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"fusednorm {fusednorm.__version__}\n")


# --- files ---


def a_graph() -> dict[str, Any]:
    graph = fusednorm.graph.Graph(torch.float32, name="g")
    z, _, _ = graph.groupnorm(graph.tensor((2, 8, 4, 4), name="x"), num_groups=4, phase="inference")
    graph.pointwise("silu", z).set_output().set_name("y")
    described: dict[str, Any] = json.loads(graph.to_json())
    return described


def a_report() -> dict[str, Any]:
    machine = {"cpu": "c", "cores": 1, "threads": 1, "system": "s", "device": "$\\frac{$", "versions": {"a": "1"}}
    machine |= {"revision": "r", "command": "c", "date": "d", "gpu": {}, "peak_flops": 1.0}
    row = {"workload": "w $\\x{$", "family": "f", "shape": "s", "groups": 1, "dtype": "d", "layout": "l"}
    row |= {"activation": "", "direction": "forward", "status": "ok", "ms": 1.0, "copy_ms": 1.0, "bytes": 10**9}
    row |= {"flops": 10, "error": 0.1, "allowed": 1.0}
    return {"machine": machine, "rows": [row | {"contender": name} for name in ("fusednorm", "eager", "copy")]}


def a_report_of_models() -> dict[str, Any]:
    row = {"model": "m", "direction": "training", "dtype": "d", "layout": "l", "mode": "eager", "status": "ok"}
    row |= {"note": "n", "ms": 1.0, "host_ms": 1.0, "peak_bytes": 10**9, "compile_s": 1.0, "error": 0.1, "allowed": 1}
    rows = [row | {"contender": name} for name in ("torch", "fusednorm")]
    return {"machine": a_report()["machine"], "rows": rows, "suite": "models"}


VALUES: list[Any] = [None, True, -1, 10**30, 10**400, 1e308, "", EVIL, [], [[]], {}, [0, 10**30, 4, 4], [1] * 1000]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*path, key))
    elif isinstance(value, list) and value:
        yield from places(value[0], (*path, 0))


def mutations(document: dict[str, Any]) -> Iterator[str]:
    """The document with each of its places taken by every third of the values."""
    for place, path in enumerate(places(document)):
        for value in VALUES[place % 3 :: 3]:
            changed = copy.deepcopy(document)
            if not path:
                yield json.dumps(value)
                continue
            at = changed
            for key in path[:-1]:
                at = at[key]
            at[path[-1]] = value
            yield json.dumps(changed)


@pytest.mark.parametrize(
    "document", [a_graph(), a_report(), a_report_of_models()], ids=["run", "report", "report of models"]
)
def test_a_file_with_any_value_in_any_place(document: dict[str, Any], tmp_path: Path) -> None:
    command = ["run"] if "nodes" in document else ["report", "--workloads"]
    path = tmp_path / "file.json"
    for text in mutations(document):
        path.write_text(text)
        result = run(*command, str(path))
        assert harmless(result, 0, 2), (text, result.output)


@pytest.mark.parametrize(
    "content",
    [b"", bytes(range(256)), b"[" * 100_000, b'{"a":' * 100_000, b"NaN", b"1" * 10_000, '{"a"'.encode("utf-16")],
    ids=["empty", "binary", "deep", "deep objects", "nan", "digits", "utf-16"],
)
def test_a_file_that_is_something_else(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(content)
    for arguments in (["run", str(path)], ["report", str(path)]):
        assert harmless(run(*arguments), 2)
    assert harmless(run("run", "-", stdin=content), 2)


def test_a_pipe_without_a_writer_is_empty_and_an_endless_file_is_not_read_to_its_end(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert read_bytes(pipe) == b""
    for path in (str(pipe), "/dev/zero"):
        assert harmless(run("run", path), 2)
        assert harmless(run("report", path), 2)
    with pytest.raises(fusednorm.graph.GraphError, match="no JSON"):
        fusednorm.graph.Graph.load(pipe)


def test_names_are_escaped_wherever_people_read_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    document = a_graph() | {"name": EVIL}
    document["tensors"][0]["name"] = EVIL + "x"
    document["tensors"][2]["name"] = EVIL + "y"
    document["nodes"][0]["name"] = EVIL + "node"
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(document))
    with caplog.at_level(logging.DEBUG, "fusednorm"):
        result = run("run", str(path))
        assert harmless(result, 0), result.output
        graph = fusednorm.graph.Graph.load(path).build()
        with pytest.raises(fusednorm.graph.GraphError) as raised:
            graph.execute({})
    texts = [str(graph.explain()), str(raised.value), graph.to_mermaid(), *map(str, graph.plans), *caplog.messages]
    for text in (result.stdout, *texts):
        assert all(one.isprintable() or one == "\n" for one in text), text
        assert not any(line.startswith("verification successful") for line in text.splitlines()[:-1]), text
    document["nodes"][0]["attributes"]["epsilon"] = EVIL
    path.write_text(json.dumps(document))
    assert harmless(run("run", str(path)), 2)
    assert fusednorm.graph.Graph.from_json(graph.to_json()).name == EVIL  # what is saved is the name itself


def test_printable() -> None:
    assert printable("x̂ − μ 数\n") == "x̂ − μ 数\n"
    assert printable(EVIL, keep="") == r"\x1b[31m\x1b]0;t\x07\x9b2J\u202e\ud800\nverification successful"


@pytest.mark.parametrize("device", ["meta", "mps", "xla", "cpu:3", "cuda:x", "garbage", "cuda:99", "cuda:99999999999"])
def test_run_on_a_device_that_cannot_be_used(device: str, tmp_path: Path) -> None:
    (tmp_path / "graph.json").write_text(json.dumps(a_graph()))
    assert harmless(run("run", str(tmp_path / "graph.json"), "--device", device), 2)


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1, 10**30, "nan"])
def test_run_with_a_seed_that_torch_does_not_take(seed: object, tmp_path: Path) -> None:
    (tmp_path / "graph.json").write_text(json.dumps(a_graph()))
    assert harmless(run("run", str(tmp_path / "graph.json"), "--seed", str(seed)), 2)


@pytest.mark.parametrize("seed", [2**64 - 1, -(2**63)])
def test_run_with_the_outermost_seeds(seed: int, tmp_path: Path) -> None:
    """Other inputs are drawn, whose results have other errors."""
    (tmp_path / "graph.json").write_text(json.dumps(a_graph()))
    command = ["run", str(tmp_path / "graph.json"), "--json"]
    found, other = (run(*command, "--seed", str(one)) for one in (seed, 1))  # torch's generator takes 32 bits
    assert found.exit_code == 0
    assert json.loads(found.stdout)["outputs"] != json.loads(other.stdout)["outputs"]


# --- what cannot be written ---


def test_a_result_that_cannot_be_written_is_told_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(workloads.SUITES, "quick", (TINY,))
    monkeypatch.setattr(cli.bench, "run_workload", lambda *_, **__: pytest.fail("it was measured"))
    for option in ("--json", "--csv"):
        result = run(*BENCH, option, "/proc/none/result")
        assert harmless(result, 2)
        assert "cannot be written" in result.stderr


def test_an_old_result_stays_until_there_is_a_new_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(workloads.SUITES, "quick", (TINY,))
    path = tmp_path / "result.json"
    path.write_text("old " * 10_000)
    with monkeypatch.context() as patched:
        patched.setattr(cli.bench, "run_workload", lambda *_, **__: 1 / 0)
        failed = run(*BENCH, "--json", str(path), "--csv", str(tmp_path / "new.csv"))
        assert failed.exit_code == exits.DEFECT
        assert f"while measuring {TINY.key} forward" in failed.stderr
    assert path.read_text() == "old " * 10_000
    assert not (tmp_path / "new.csv").exists()
    assert run(*BENCH, "--json", str(path), "--csv", "/dev/null").exit_code == 0
    assert Report.from_json(path.read_text()).rows
    full = run(*BENCH, "--json", "/dev/full")
    assert harmless(full, 2)
    assert "No space left" in full.stderr


# --- how a command ends ---


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeyboardInterrupt(), 130),
        (MemoryError(), 2),
        (torch.OutOfMemoryError("CUDA out of memory"), 2),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 2),
        (OSError(13, "Permission denied", "x"), 2),
        (ModuleNotFoundError("no rich", name="rich.table"), 2),
        (ModuleNotFoundError("ours", name="fusednorm.nothing"), 70),
        (RecursionError(), 70),
        (ZeroDivisionError(), 70),
    ],
)
def test_every_exception_has_its_exit_code(error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(cli.doctor, "versions", fails)
    result = run("doctor")
    assert result.exit_code == code
    assert ("Traceback" in result.stderr) == (code == 70)


# --- memory ---


def test_memory_is_asked_before_it_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(workloads.SUITES, "quick", (TINY,))
    monkeypatch.setattr(memory, "available_bytes", lambda device: 1000)
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(a_graph()))
    for arguments in (PROFILE, BENCH, ["verify"], ["run", str(path)]):
        result = run(*arguments)
        assert harmless(result, 2), result.output
        assert "cpu has 0.000954 MiB free" in result.stderr


def test_a_suite_goes_on_without_the_workload_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    large = Workload("layer_norm", (1 << 20, 1 << 20), 1)
    monkeypatch.setitem(workloads.SUITES, "quick", (large, TINY))
    result = run(*BENCH, "--json", "-")
    assert result.exit_code == 0, result.output
    rows = Report.from_json(result.stdout).rows
    assert [row.status for row in rows] == ["skipped", "skipped", "ok", "ok"]
    assert "needs about 84 TiB" in rows[0].note


def test_an_instance_without_memory_is_skipped_and_alone_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> Any:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")

    monkeypatch.setattr(profiling, "_run", fails)
    result = run(*PROFILE)
    assert harmless(result, 2)
    assert "no instance ran" in result.stderr


def test_what_a_workload_needs_grows_with_all_that_holds_memory() -> None:
    def needs(workload: Workload = TINY, sets: int = 1, contenders: int = 1, backward: bool = False) -> int:
        return memory.workload_bytes(workload, sets=sets, contenders=contenders, backward=backward, judged=False)

    assert (
        needs() < needs(backward=True) < memory.workload_bytes(TINY, sets=1, contenders=1, backward=True, judged=True)
    )
    assert needs() < needs(sets=2) == needs(contenders=2)
    huge = Workload("layer_norm", (10**200, 10**200), 1)
    with pytest.raises(memory.NotEnoughMemoryError, match=r"2\*\*13\d\d bytes"):
        memory.require(needs(huge), "cpu", "it")


@pytest.mark.parametrize("version", [1, 2])
def test_the_limits_of_control_groups(version: int, tmp_path: Path) -> None:
    membership, root = tmp_path / "cgroup", tmp_path / "fs"
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    mount = root / "memory"
    membership.write_text("4:cpu,memory:/a/b\n3:cpu:/\n")
    if version == 2:
        names, mount = ("memory.max", "memory.current", "inactive_file"), root
        membership.write_text("0::/a/b\n")
    for folder, limit, used, inactive in (("a/b", "max", 5, 0), ("a", "100", 30, 20), ("", "1000", 50, 0)):
        (mount / folder).mkdir(parents=True, exist_ok=True)
        (mount / folder / names[0]).write_text(f"{limit}\n")
        (mount / folder / names[1]).write_text(f"{used}\n")
        (mount / folder / "memory.stat").write_text(f"file 1\n{names[2]} {inactive}\n")
    assert list(memory._cgroup_limits(root, membership)) == [90, 950]
    assert list(memory._cgroup_limits(root, tmp_path / "none")) == []


def test_the_memory_of_this_machine_is_some() -> None:
    free = memory.available_bytes("cpu")
    assert free is not None
    assert 0 < free < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


# --- contenders that fail ---


class Broken(Eager):
    """Right when it is checked, and broken afterwards."""

    def __init__(self, name: str, error: Exception, calls: int) -> None:
        self.name, self.error, self.calls = name, error, calls

    def refusal(self, workload: Workload, asked: Any) -> str | None:
        if not self.calls:
            raise self.error
        return None

    def prepare(self, workload: Workload, inputs: Any, asked: Any) -> contenders.Prepared:
        right = super().prepare(workload, inputs, asked)
        left = [self.calls]

        def call() -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise self.error
            return right.call()

        return contenders.Prepared(call, right.results)


def test_a_contender_that_fails_at_any_time_leaves_the_others_their_times() -> None:
    timer = CpuTimer(sample_seconds=0.0, seconds=0.0, minimum_samples=1)
    no_memory = RuntimeError("can't allocate memory")
    broken = [Broken("at once", ValueError("no"), 0), Broken("later", KeyError("k"), 3), Broken("full", no_memory, 3)]
    rows = run_workload(TINY, "forward", [FusedNorm(), *broken, Eager()], timer=timer)
    assert [(row.contender, row.status) for row in rows] == [
        ("fusednorm", "ok"),
        ("at once", "failed"),
        ("later", "failed"),
        ("full", "skipped"),
        ("eager", "ok"),
        ("copy", "ok"),
    ]
    assert rows[1].note == "no"
    assert all(row.ms for row in rows if row.status == "ok")


def test_a_limit_that_fails_is_nobodys_failure_but_ours() -> None:
    def copy() -> None:
        raise KeyError("k")

    with pytest.raises(KeyError):
        runner.measure_those_that_run(CpuTimer(seconds=0.0, minimum_samples=1), {runner.COPY: [copy]})


def test_an_instance_that_fails_while_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = choice.named(workloads_problem(), "reference")

    class Fails:
        name = "fails"

        def configs(self, problem: Any) -> tuple[None]:
            return (None,)

        def plan(self, problem: Any, config: None = None) -> Any:
            plan, left = reference.plan(problem), [2]

            def call(*arguments: Any) -> Any:
                left[0] -= 1
                if left[0] < 0:
                    raise ValueError("once too often")
                return plan(*arguments)

            return call

    found = choice.instances(workloads_problem())
    candidate = type(found[0])
    monkeypatch.setattr(choice, "instances", lambda problem: [candidate(Fails(), None), candidate(reference, None)])
    result = run(*PROFILE[:-1], "--json")
    assert result.exit_code == 1, result.output
    broken, good = json.loads(result.stdout)["results"]
    assert (broken["status"], broken["note"], broken["ms"]) == ("failed", "once too often", None)
    assert good["ms"] is not None


def workloads_problem() -> Any:
    from fusednorm.bench.operations import problem_of_workload

    return problem_of_workload("forward", TINY, workloads.draw(TINY))


def test_a_peer_that_cannot_be_imported_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> Any:
        raise AttributeError("module 'numpy' has no attribute 'bool'")

    monkeypatch.setitem(peers.PEERS, "jax", peers.Peer("cpu", fails))
    found, missing = available(["jax", "eager"], "cpu")
    assert [one.name for one in found] == ["eager"]
    assert missing["jax"] == "cannot be imported (AttributeError: module 'numpy' has no attribute 'bool')"


def test_the_memory_of_a_gpu_is_what_is_free_and_what_torch_keeps_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 50)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 20)
    assert memory.available_bytes("cuda:0") == 130


def test_more_dims_than_torch_takes(tmp_path: Path) -> None:
    document = a_graph()
    document["tensors"][0] |= {"dims": [2, 8, *[1] * 61, 6], "strides": None}
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(document))
    assert run("run", str(path)).exit_code == 0
    document["tensors"][0]["dims"] = [2, 8, *[1] * 997, 6]
    path.write_text(json.dumps(document))
    profiled = run(*PROFILE, "--shape", "2,8" + ",1" * 62 + ",6")
    for result in (run("run", str(path)), profiled):
        assert harmless(result, 2), result.output
        assert "at most 64" in result.stderr
