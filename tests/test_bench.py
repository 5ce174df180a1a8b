"""The judge refuses what is wrong, the runner times only what is right, and results survive the way to disk."""

from __future__ import annotations

import csv
import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from io import StringIO
from math import log2, sqrt
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fusednorm.backends import reference
from fusednorm.bench import judging, precompile, summary
from fusednorm.bench import peers as peer_modules
from fusednorm.bench.contenders import Compiled, Eager, FusedNorm, FusedNormPreallocated, Prepared
from fusednorm.bench.judging import Asked, Judge, compute_saved_statistics
from fusednorm.bench.markdown import report_markdown
from fusednorm.bench.plot import draw_plot, picture_format
from fusednorm.bench.provenance import Machine, this_machine
from fusednorm.bench.results import Report, Row
from fusednorm.bench.runner import call_once, run_workload
from fusednorm.bench.workloads import EPS, SUITES, Inputs, Workload, draw, select
from fusednorm.cli.output import TimeLimit
from fusednorm.machine import limits
from fusednorm.machine.timing import Call, Calls, CpuTimer, Timing
from fusednorm.tolerance import PEER, Verdict

GROUP = Workload("group_norm", (3, 16, 9, 7), 4, activation="silu")


class FakeTimer:
    """Says 1 ms for the first contender, 2 ms for the second, and so on, and notes whom it was asked to time."""

    def __init__(self) -> None:
        self.timed: list[str] = []

    asynchronous = False

    def input_sets(self, bytes_per_set: int) -> int:
        return 2

    def session(self) -> AbstractContextManager[None]:
        return nullcontext()

    def measure(self, contenders: Mapping[str, Calls], whole: bool = False) -> dict[str, Timing]:
        self.timed += contenders
        assert all(len(calls) == 2 for calls in contenders.values())
        return {name: Timing((1e-3 * place,)) for place, name in enumerate(contenders, 1)}

    def host_seconds(self, contenders: Mapping[str, Call]) -> dict[str, float]:
        return {}

    def peak_bytes(self, call: Call) -> int | None:
        return None


def reference_results(workload: Workload, inputs: Inputs, asked: Asked = "forward_backward") -> dict[str, Tensor]:
    prepared = Eager().prepare(workload, inputs, asked)
    return prepared.results(prepared.call())


# Each takes right results and returns wrong ones.
MISTAKES: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
    "a relative error of 1e-4": lambda right: {**right, "output": right["output"] * 1.0001},
    "one value": lambda right: {**right, "output": right["output"].index_fill(0, torch.tensor([0]), 0.0)},
    "a NaN": lambda right: {**right, "grad_input": right["grad_input"] / 0.0},
    "a transposed gradient": lambda right: {**right, "grad_input": right["grad_input"].flip(0)},
    "a missing gradient": lambda right: {name: value for name, value in right.items() if name != "grad_bias"},
    "a wrong shape": lambda right: {**right, "grad_weight": right["grad_weight"][None]},
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_judge_refuses_a_mistake(mistake: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    inputs = draw(GROUP)
    judge = Judge(GROUP, inputs, "forward_backward")
    right = reference_results(GROUP, inputs)
    assert judge.check(right, PEER).ok
    assert not judge.check(mistake(right), PEER).ok


@pytest.mark.parametrize("init", ["normal", "offset", "zeros"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_judge_accepts_plain_torch_with_fp32_statistics(dtype: str, init: str) -> None:
    workload = replace(GROUP, dtype=dtype)
    inputs = draw(workload, init)  # type: ignore[arg-type]
    workload = replace(workload, activation=None)
    found = reference.forward(workload.norm, inputs.operands)
    assert found.mean is not None
    assert found.rstd is not None
    judge = Judge(workload, inputs, "forward", wants_statistics=True)
    assert judge.check({"output": found.output, "mean": found.mean, "rstd": found.rstd}).ok


def test_a_sum_near_zero_may_be_off_by_roundings_of_its_terms() -> None:
    """The only channel's gradient of weight can be near zero by chance, and the plain computation's error smaller."""
    workload = Workload("instance_norm", (4, 1, 32, 32), 0, "float32")
    judge = Judge(workload, draw(workload), "forward_backward")
    results = {name: value.float() for name, value in judge.expected.items()}
    terms = 4 * 32 * 32
    allowed = 2**-24 * (1 + judge.offset + log2(terms)) * judge.term * sqrt(terms)
    for name in ("grad_weight", "grad_bias"):
        judge.expected[name] = judge.plain[name] = torch.full((1,), 1e-5, dtype=torch.float64)
        for share, ok in ((0.9, True), (1.1, False)):
            assert judge.verdicts(results | {name: torch.full((1,), 1e-5 + share * allowed)})[name].ok is ok
    assert judge.term == pytest.approx(1.0, abs=0.1)


def test_a_fault_is_worse_than_any_error() -> None:
    found = judging.worst([Verdict(0.9, 1.0, 0.0, None), Verdict(0.5, 1.0, 0.0, "root mean square")])
    assert not found.ok


def test_peer_may_round_intermediates_to_the_inputs_dtype_and_ours_may_not() -> None:
    workload = replace(GROUP, dtype="bfloat16", weight_dtype="float32")
    inputs = draw(workload)
    judge = Judge(workload, inputs, "forward_backward")
    rounded = {name: value.float() for name, value in judge.expected.items() if name.startswith("grad_")}
    rounded |= {"output": judge.expected["output"].bfloat16(), "grad_input": rounded["grad_input"].bfloat16()}
    rounded["grad_weight"] = rounded["grad_weight"] * (1 + 2**-9)
    assert judge.check(rounded, PEER).ok
    assert "grad_weight" in str(judge.check(rounded).fault)


def test_judge_refuses_a_variance_from_the_mean_of_squares() -> None:
    workload = replace(GROUP, activation=None)
    inputs = draw(workload, "offset")
    x = inputs.input.reshape(3, 4, -1)
    mean = x.mean(-1, keepdim=True)
    var = (x.square().mean(-1, keepdim=True) - mean.square()).clamp_min(0)
    normalized = ((x - mean) * (var + EPS).rsqrt()).reshape(inputs.input.shape)
    assert inputs.bias is not None
    output = normalized * inputs.weight[:, None, None] + inputs.bias[:, None, None]
    assert not Judge(workload, inputs, "forward").check({"output": output}, PEER).ok


SLICED = [GROUP, Workload("layer_norm", (6, 5, 12), 1), Workload("rms_norm", (6, 5, 12), 2)]


@pytest.mark.parametrize("workload", SLICED, ids=lambda workload: workload.family)
def test_judging_in_slices_is_judging_at_once(workload: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = draw(workload)
    mean, rstd = compute_saved_statistics(workload, inputs)
    whole = [Judge(workload, inputs, "forward_backward"), Judge(workload, inputs, "backward", mean, rstd)]
    monkeypatch.setattr(judging, "_SLICE_ELEMENTS", 1)
    sliced = [Judge(workload, inputs, "forward_backward"), Judge(workload, inputs, "backward", mean, rstd)]
    for one, other in zip(whole, sliced, strict=True):
        assert one.expected.keys() == other.expected.keys()
        for name, expected in one.expected.items():
            torch.testing.assert_close(other.expected[name], expected, rtol=1e-12, atol=1e-12)


class Wrong(FusedNorm):
    name = "wrong one"
    calls = 0

    def prepare(self, workload: Workload, inputs: Inputs, asked: Asked) -> Prepared:
        right = super().prepare(workload, inputs, asked)

        def call() -> Tensor:
            self.calls += 1
            result: Tensor = right.call()
            return result + 0.01

        return replace(right, call=call)


class Broken(FusedNorm):
    name = "broken one"

    def prepare(self, workload: Workload, inputs: Inputs, asked: Asked) -> Prepared:
        raise RuntimeError("no such kernel\nand more")


def test_wrong_and_broken_contenders_are_reported_and_never_timed() -> None:
    timer, wrong = FakeTimer(), Wrong()
    rows = run_workload(GROUP, "forward", [FusedNorm(), wrong, Broken(), Eager()], timer=timer)
    found = {row.contender: row for row in rows}
    assert list(found) == ["fusednorm", "wrong one", "broken one", "eager", "copy"]
    assert timer.timed == ["fusednorm", "eager", "copy"]
    assert wrong.calls == 1
    assert found["wrong one"].status == "wrong"
    assert found["wrong one"].ms is None
    assert "output: error" in found["wrong one"].note
    assert (found["broken one"].status, found["broken one"].note) == ("failed", "no such kernel")
    assert found["eager"].copy_fraction == pytest.approx(1.5)


def test_preallocated_output_is_written_and_refused_with_a_backward() -> None:
    rows = run_workload(GROUP, "forward", [FusedNormPreallocated()], timer=FakeTimer())
    assert rows[0].status == "ok"
    refused = run_workload(GROUP, "forward_backward", [FusedNormPreallocated()], timer=FakeTimer())
    assert refused[0].status == "skipped"


PEER_WORKLOADS = [
    GROUP,
    replace(GROUP, layout="nhwc", modulated=True),
    replace(GROUP, dtype="bfloat16", activation="gelu_tanh"),
    Workload("batch_norm", (4, 8, 5, 6), dtype="float16", activation="relu"),
    Workload("batch_norm", (4, 8, 5, 6), layout="nhwc", activation="hardswish", training=False),
    Workload("instance_norm", (2, 8, 3, 4, 5), activation="leaky_relu"),
    Workload("layer_norm", (6, 5, 12), 2),
    Workload("rms_norm", (6, 12), 1),
]


@pytest.mark.filterwarnings("ignore")  # other libraries' own deprecations
@pytest.mark.parametrize("peer", peer_modules.PEERS)
def test_installed_peers_are_right(peer: str) -> None:
    try:
        contender = peer_modules.PEERS[peer].load()
    except ImportError as error:
        pytest.skip(f"{peer} is not installed: {error}")
    if peer_modules.PEERS[peer].device != "cpu":
        pytest.skip(f"{peer} runs on a GPU")
    for workload in PEER_WORKLOADS:
        row, _ = run_workload(workload, "forward", [contender], timer=FakeTimer())
        assert (row.status, row.note) == ("ok", ""), workload.key
    both, _ = run_workload(GROUP, "forward_backward", [contender], timer=FakeTimer())
    assert both.status == ("ok" if peer == "jax" else "skipped")


def test_timer_takes_turns() -> None:
    order: list[str] = []
    timer = CpuTimer(sample_seconds=0.0, seconds=0.0, minimum_samples=3, pause_seconds=0.0)
    timings = timer.measure({"a": [lambda: order.append("a")], "b": [lambda: order.append("b")]})
    assert "".join(order[-6:]) == "abbaab"
    assert {name: len(timing.samples) for name, timing in timings.items()} == {"a": 3, "b": 3}
    assert Timing((3.0, 1.0, 2.0)).ms == 2000


def test_slow_contender_takes_fewer_turns_spread_over_the_others() -> None:
    order: list[str] = []

    def slow() -> None:
        order.append("s")
        time.sleep(0.02)

    timer = CpuTimer(sample_seconds=0.0, seconds=0.05, minimum_samples=2, maximum_samples=6, pause_seconds=0.0)
    timings = timer.measure({"fast": [lambda: order.append("f")], "slow": [slow]})
    assert (len(timings["fast"].samples), len(timings["slow"].samples)) == (6, 2)
    assert [half.count("s") for half in ("".join(order[-8:-4]), "".join(order[-4:]))] == [1, 1]


def test_copy_bandwidth_is_measured_once_per_size_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    limits._copy_bandwidth.cache_clear()
    timer = FakeTimer()
    monkeypatch.setattr(limits, "timer_for", lambda device: timer)
    # FakeTimer says 1 ms, so 2 x 1 MB moved are 2 GB/s; everything up to 1 MB shares one measurement.
    assert limits.copy_bandwidth(100) == limits.copy_bandwidth(1 << 20) == pytest.approx(2 * 2**20 * 1e3)
    assert timer.timed == ["copy"]
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    limits.copy_bandwidth(100)
    assert timer.timed == ["copy", "copy"]
    limits._copy_bandwidth.cache_clear()


MACHINE = Machine("a cpu", 2, 2, "Linux", "a cpu", {"torch": "2.13"}, "abc", "fusednorm bench", "2026-01-01")


def example_report() -> Report:
    def row(shape: str, contender: str, ms: float | None, note: str = "") -> Row:
        return Row(
            f"group_norm(32)+silu {shape} float32 nchw",
            "group_norm",
            shape,
            32,
            "float32",
            "nchw",
            "silu",
            "forward",
            contender,
            "ok" if ms else "skipped",
            note,
            ms,
            1.0,
            bytes=10**9,
        )

    return Report(
        MACHINE,
        (
            row("1x32", "fusednorm", 2.0),
            row("1x32", "eager", 8.0),
            row("1x32", "compile", 6.0),
            row("1x32", "jax", 3.0),
            row("2x32", "fusednorm", 4.0),
            row("2x32", "eager", 4.0),
            row("2x32", "jax", None, "no | such layout"),
        ),
    )


def test_ratios_and_geometric_means() -> None:
    first, second = summary.cases_of(example_report().rows)
    assert (first.speedup("eager"), first.fastest_peer, first.speedup_over_fastest_peer) == (4.0, "jax", 1.5)
    assert (second.speedup("eager"), second.fastest_peer, second.speedup_over_fastest_peer) == (1.0, None, None)
    assert first.copy_fraction() == 0.5
    line = summary.mean_table([first, second]).lines[0]
    assert line[:7] == ("group_norm(32)+silu", "float32", "nchw", "forward", "2", "2.00×", "1.00×")


def test_report_survives_json_and_csv() -> None:
    report = example_report()
    assert Report.from_json(report.to_json()) == report
    lines = list(csv.DictReader(StringIO(report.to_csv())))
    assert [line["contender"] for line in lines] == [row.contender for row in report.rows]
    assert set(lines[0]) == {field.name for field in fields(Row)}
    assert (lines[0]["ms"], lines[-1]["ms"]) == ("2.0", "")
    with pytest.raises(ValueError, match="not a report"):
        Report.from_json("{}")


def test_markdown_tables_are_whole() -> None:
    text = report_markdown([example_report()], workloads=True)
    assert "a cpu, 2 cores, 2 threads" in text
    assert "1.50× (jax)" in text
    tables = [block for block in text.split("\n\n") if block.startswith("|")]
    assert len(tables) == 2
    for table in tables:
        assert len({line.count(" |") for line in table.splitlines()}) == 1
    contenders = summary.contender_table(summary.cases_of(example_report().rows)[1]).to_markdown()
    assert "no \\| such layout" in contenders


def test_a_plot_has_the_format_of_its_suffix() -> None:
    pytest.importorskip("matplotlib")
    assert draw_plot(example_report(), picture_format(Path("report.png"))).startswith(b"\x89PNG")


def test_this_machine_is_described() -> None:
    machine = this_machine()
    assert machine.cpu
    assert machine.threads == torch.get_num_threads()
    assert machine.versions["torch"] == torch.__version__


def test_suites_hold_distinct_workloads_and_can_be_narrowed() -> None:
    for workloads in SUITES.values():
        assert len({workload.key for workload in workloads}) == len(workloads)
    chosen = select("targets", ["bfloat16"], ["nhwc"])
    assert {(one.dtype, one.layout) for one in chosen} == {("bfloat16", "nhwc")}
    assert len(chosen) == 4
    with pytest.raises(ValueError, match="suite"):
        select("nothing")


def test_inputs_are_seeded_and_laid_out() -> None:
    nhwc = replace(GROUP, layout="nhwc")
    first, second = draw(GROUP, seed=3), draw(nhwc, seed=3)
    assert torch.equal(first.input, second.input)
    assert second.input.is_contiguous(memory_format=torch.channels_last)
    assert draw(replace(GROUP, layout="channel_dim=-1")).input.shape == (3, 9, 7, 16)
    assert not torch.equal(first.input, draw(GROUP, seed=4).input)
    offset = draw(GROUP, "offset").input
    assert offset.mean() / offset.std() == pytest.approx(1000, rel=0.1)
    assert draw(GROUP, "integer").input.unique().tolist() == list(range(-5, 6))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"groups": 5}, "groups"),
        ({"dtype": "int8"}, "dtype"),
        ({"shape": (4,)}, "shape"),
        ({"activation": "sulu"}, "activation"),
        ({"family": "layer_norm", "groups": 9}, "groups"),
    ],
)
def test_a_workload_that_cannot_be_is_refused(arguments: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        replace(GROUP, **arguments)


# --- compiling ahead ---


@pytest.fixture
def two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precompile, "processes_for", lambda tasks: 2)


def test_every_task_is_called_ahead_though_some_raise(tmp_path: Path, two_processes: None) -> None:
    paths = [tmp_path / name for name in ("none/a", "b", "none/c", "d", "e")]
    said: list[str] = []
    precompile.precompile(Path.touch, paths, said.append)
    assert [path.exists() for path in paths] == [False, True, False, True, True]
    assert said[-1] == "compiling: 5 of 5"


def test_a_process_that_dies_ends_no_suite(two_processes: None) -> None:
    precompile.precompile(os._exit, [3, 3, 3])


def test_compiling_ahead_may_take_half_of_what_is_left() -> None:
    assert TimeLimit(None).half_left() is None
    assert TimeLimit(0.0).half_left() == 0.0
    half = TimeLimit(100.0).half_left()
    assert half is not None
    assert 45.0 < half <= 50.0


def test_compiling_ahead_ends_when_its_time_is_over(tmp_path: Path) -> None:
    paths = [tmp_path / str(n) for n in range(5000)]
    precompile.precompile(Path.touch, paths, processes=2, seconds=0.0)
    assert 1 <= sum(path.exists() for path in paths) < 5000


@pytest.mark.parametrize(("tasks", "cores", "processes"), [(7, 16, 0), (16, 16, 2), (1000, 16, 15), (1000, 1, 0)])
def test_processes_leave_a_core_and_have_tasks(
    monkeypatch: pytest.MonkeyPatch, tasks: int, cores: int, processes: int
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert precompile.processes_for(tasks) == processes


def test_each_contender_is_called_once_though_some_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []

    def prepare(contender: object, *_: object) -> Prepared:
        called.append(type(contender).__name__)
        if isinstance(contender, FusedNorm):
            raise RuntimeError
        return Prepared(lambda: called.append("a call"), lambda result: {})

    for contender in (FusedNorm, Eager):
        monkeypatch.setattr(contender, "prepare", prepare)
    workload = Workload("layer_norm", (4, 8), 1)
    call_once((workload, "backward"), ["fusednorm", "eager"], "cpu")
    assert called == ["FusedNorm", "Eager", "a call"]


def test_a_backward_is_that_of_a_forward_which_repeats() -> None:
    workload = Workload("layer_norm", (3, 8), 1)
    prepared = FusedNorm().prepare(workload, draw(workload), "backward")
    assert prepared.public is not None
    forward = prepared.call.__closure__
    assert forward is not None
    outputs = [cell.cell_contents for cell in forward if isinstance(cell.cell_contents, Tensor)]
    assert [type(output.grad_fn).__name__ for output in outputs] == ["KnownNormalizationBackward"]


# --- a peer that would write past its memory ---


@pytest.mark.parametrize(
    ("shape", "dims", "asked", "refused"),
    [
        ((65537, 8, 4), 2, "backward", True),
        ((65537, 8, 4), 2, "forward_backward", True),
        ((65537, 8, 4), 2, "forward", False),
        ((65536, 8, 4), 2, "backward", False),
        ((65537, 32), 1, "backward", False),
    ],
)
def test_torchs_backward_that_writes_out_of_bounds_is_not_run(
    shape: tuple[int, ...], dims: int, asked: Asked, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = Workload("layer_norm", shape, dims)
    assert Eager().refusal(workload, asked) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert (Eager().refusal(workload, asked) is not None) is refused
    assert Compiled().refusal(workload, asked) is None


def test_a_compiled_backward_from_a_cache_runs_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that was compiled where it ran once on its saved tensors."""
    import torch._functorch.config as config

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    workload = Workload("group_norm", (2, 8, 6, 6), 4, activation="silu")
    inputs = draw(workload, "normal")
    with config.patch(donated_buffer=True):  # restores what was there before, which monkeypatch does not
        for asked in ("forward_backward", "backward", "backward"):
            call = Compiled().prepare(workload, inputs, asked).call
            call()
            call()
