"""What tuning measures, keeps and prints: the command tune, profile --configs and bench --against-tuned."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from cpu_support import same_bits
from typer.testing import CliRunner, Result

import fusednorm
from fusednorm import choice, cli, dispatch, tuning
from fusednorm.backends import reference
from fusednorm.backends.cpu.instances import SLABS, Slabs, SlabsInstance
from fusednorm.bench import autotune, profiling, workloads
from fusednorm.bench.autotune import Tuned, config_text, heuristics_tables, operations_of, summary_line, tune
from fusednorm.bench.profiling import FINALISTS, GROUP, InstanceResult, profile, run_once, trials_of
from fusednorm.bench.workloads import Workload, draw
from fusednorm.machine.timing import Calls, CpuTimer, Timing
from fusednorm.problem import Problem

WORKLOAD = Workload("group_norm", (2, 8, 6, 5), 4, layout="nhwc", activation="silu")
FORWARD, BACKWARD = operations_of(WORKLOAD)
SIZES = (131072, *(1 << power for power in range(4, 16)))  # more than are timed side by side
FAST, WRONG = Slabs(64), Slabs(32)


@dataclass(frozen=True)
class Recorded:
    """A timer that takes its times from a function of the contender's name, and notes who was timed with whom."""

    seconds_of: Callable[[str], float]
    rounds: list[list[str]] = field(default_factory=list)
    asynchronous: bool = False

    def input_sets(self, bytes_per_set: int) -> int:
        return 1

    def session(self) -> Any:
        return nullcontext()

    def measure(self, contenders: Mapping[str, Calls], whole: bool = False) -> dict[str, Timing]:
        self.rounds.append(list(contenders))
        for calls in contenders.values():
            calls[0]()
        return {name: Timing((self.seconds_of(name),)) for name in contenders}

    def host_seconds(self, contenders: Any) -> dict[str, float]:
        return {}

    def peak_bytes(self, call: Any) -> int | None:
        return None


def seconds_of(name: str) -> float:
    """The wrong configuration would be the fastest, then FAST, then the others; the default takes 4 ms."""
    for word, ms in ((f"={WRONG.elements})", 1), (f"={FAST.elements})", 2), ("=131072)", 4), ("cpu.slabs ", 3)):
        if word in name:
            return ms * 1e-3
    return 5e-3


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    """cpu.slabs, the choice of the heuristics, in many configurations, one of which gives wrong results."""
    right = SlabsInstance.plan

    def plan(instance: SlabsInstance, problem: Problem, config: Slabs | None = None) -> Any:
        made = right(instance, problem, config)
        if config != WRONG:
            return made

        def wrong(*arguments: Any) -> Any:
            results = made(*arguments)
            tensor = results.input if problem.backward else results.output
            tensor += 0.1
            return results

        return wrong

    monkeypatch.setattr(SlabsInstance, "configs", lambda instance, problem: tuple(map(Slabs, SIZES)))
    monkeypatch.setattr(SlabsInstance, "plan", plan)
    monkeypatch.setattr(choice, "all_instances", lambda: (SLABS, reference.INSTANCE))
    monkeypatch.setattr(dispatch, "_plans", {})


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("operation", [FORWARD, BACKWARD], ids=lambda one: one.direction)
def test_the_fastest_configuration_that_is_right_is_found(operation: Any) -> None:
    timer = Recorded(seconds_of)
    found = tune(operation, WORKLOAD, seconds=0.0, timer=timer)
    assert found.default is not None
    assert found.best is not None
    assert (found.default.instance, found.default.config) == ("cpu.slabs", {"elements": 131072})
    assert (found.best.instance, found.best.config) == ("cpu.slabs", {"elements": FAST.elements})
    assert found.gain == pytest.approx(2.0)
    assert [one.config for one in found.faulty] == [{"elements": WRONG.elements}]
    assert not any(f"={WRONG.elements})" in name for names in timer.rounds for name in names)


@pytest.mark.usefixtures("many")
def test_many_configurations_are_timed_in_groups_and_the_fastest_beside_the_default_and_the_copy() -> None:
    timer = Recorded(seconds_of)
    tune(FORWARD, WORKLOAD, seconds=0.0, timer=timer)
    *first, last = timer.rounds
    assert sum(map(len, first)) == len(SIZES)  # one is wrong, and there is the reference
    assert max(map(len, first)) == GROUP
    assert len(last) == FINALISTS + 2
    assert last[0] == "copy"
    assert {name for name in last if "=131072)" in name or f"={FAST.elements})" in name} == {
        f"cpu.slabs {Slabs(131072)}", f"cpu.slabs {FAST}",
    }  # fmt: skip


@pytest.mark.usefixtures("many")
def test_the_default_stays_where_nothing_is_faster_by_more_than_calls_differ() -> None:
    found = tune(FORWARD, WORKLOAD, seconds=0.0, timer=Recorded(lambda name: 1e-3 if "131072" in name else 0.99e-3))
    assert found.best is found.default
    assert found.gain == 1


def test_a_profile_without_configurations_is_as_it_was() -> None:
    found = profile(FORWARD, WORKLOAD, timer=Recorded(lambda name: 1e-3))
    names = [one.instance for one in found.results]
    assert len(set(names)) == len(names)
    assert found.default is not None
    assert found.default.instance == choice.default(trial_problem()).name


def trial_problem() -> Problem:
    return profiling.problem_of_workload("forward", WORKLOAD, draw(WORKLOAD))


@pytest.mark.parametrize(
    "workload",
    [
        WORKLOAD,
        Workload("rms_norm", (3, 20), 1),
        Workload("batch_norm", (2, 4, 3, 3), training=False),
    ],
    ids=lambda one: one.key,
)
def test_every_trial_can_be_tried_in_another_process(workload: Workload) -> None:
    for operation in operations_of(workload):
        trials = trials_of(operation, workload, "cpu")
        tried = profile(operation, workload, every_config=True, time=False).results
        assert [(one.instance, tuning.described(one.config)) for one in trials] == [
            (one.instance, one.config) for one in tried if one.status == "ok"
        ]
        for trial in trials:
            run_once(pickle.loads(pickle.dumps(trial)), "cpu")


def test_kernels_are_compiled_ahead_for_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, Any, float | None]] = []
    monkeypatch.setattr(
        autotune, "precompile", lambda run, tasks, progress, seconds: seen.append((run, tasks, seconds))
    )
    trials = trials_of(FORWARD, WORKLOAD, "cpu")
    monkeypatch.setattr(autotune, "trials_of", lambda operation, workload, device: trials)
    autotune.compile_ahead([(FORWARD, WORKLOAD)], "cpu")
    assert seen == []
    autotune.compile_ahead([(FORWARD, WORKLOAD)] * 2, "cuda", seconds=7.0)
    ((run_trial, tasks, seconds),) = seen
    assert (tasks, seconds) == (trials * 2, 7.0)
    assert (run_trial.func, run_trial.keywords) == (run_once, {"device": "cuda"})


def test_a_problem_is_kept_under_the_key_by_which_a_call_finds_it(tmp_path: Path) -> None:
    for operation in (FORWARD, BACKWARD):
        found = tune(operation, WORKLOAD, seconds=0.0, timer=Recorded(lambda name: 1e-3 if "reference" in name else 1))
        assert found.choice is not None
        tuning.keep(tmp_path / "tuned.json", "cpu", {found.problem: found.choice})
    inputs = draw(WORKLOAD)
    for tensor in inputs.named_leaves().values():
        tensor.requires_grad_()
    made: list[str] = []
    with pytest.MonkeyPatch.context() as patch, fusednorm.use_tuned(tmp_path / "tuned.json"):
        choose = choice.choose
        patch.setattr(dispatch, "_plans", {})
        patch.setattr(dispatch, "choose", lambda *arguments: made.append(choose(*arguments).name) or choose(*arguments))
        y = fusednorm.group_norm(inputs.input, 4, inputs.weight, inputs.bias, activation="silu")
        y.backward(inputs.grad_output)
    assert made == ["reference", "reference"]


# --- tables ---


def result(ms: float | None, name: str = "cpu.rows", config: Any = None, status: Any = "ok") -> InstanceResult:
    return InstanceResult(name, config, False, status, "" if status == "ok" else "no reason", ms=ms)


def case(default: float | None, best: float | None, **workload: Any) -> Tuned:
    first = result(default) if default else None
    second = first if best == default else result(best, "cpu.slabs", {"elements": 64}) if best else None
    one = Workload("layer_norm", workload.pop("shape", (4, 8)), 1, **workload)
    return Tuned(one, "forward", "key", first, second, ())


def test_tables_of_the_heuristics() -> None:
    cases = [case(1.0, 1.0), case(4.0, 1.0, shape=(5, 8)), case(None, None, shape=(6, 8)), case(2.0, 1.0, shape=(7, 8))]
    shares, worst = heuristics_tables(cases)
    assert shares.lines == (("layer_norm", "forward", "4", "1 of 3", "2.00×", "4.00×"),)
    assert [line[0] for line in worst.lines] == ["layer_norm 5x8 float32", "layer_norm 7x8 float32"]
    assert summary_line(cases) == ("gain: geometric mean 2.00×, most 4.00× (layer_norm 5x8 float32 forward), 3 cases")
    assert summary_line([case(None, None)]) == "no workload was timed"
    assert len(heuristics_tables([case(1.0, 1.0)])) == 1


def test_a_configuration_in_words() -> None:
    assert config_text(None) == ""
    assert (
        config_text({"reduction": {"channels": 64, "tiles": 2}, "rows": 1}) == "reduction(channels=64 tiles=2) rows=1"
    )


def test_no_choice_without_a_right_default() -> None:
    assert case(None, 1.0).choice is None
    assert case(None, 1.0).gain is None


# --- the commands ---


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for the default file; kernels are those that the process has loaded."""
    monkeypatch.setattr(tuning, "cache_root", lambda: tmp_path)
    return tmp_path


TUNE = ["tune", "--shape", "2,8,6,5", "--groups", "4", "--activation", "silu", "--seconds", "0", "--device", "cpu"]


def test_tune_keeps_what_a_program_then_uses(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_plans", {})
    found = run(*TUNE, "--layout", "nhwc", "--layout", "nchw")
    assert found.exit_code == 0, found.output
    assert found.stdout.count("group_norm(4)+silu 2x8x6x5 float32") >= 4
    assert "gain: geometric mean" in found.stdout
    assert f"kept in {cache / 'tuned.json'}" in found.stdout.replace("\n", "")
    (own,) = tuning.parsed((cache / "tuned.json").read_bytes())
    assert len(own.choices) == 4
    inputs = draw(WORKLOAD)
    called = (inputs.input, 4, inputs.weight, inputs.bias)
    plain = fusednorm.group_norm(*called, activation="silu")
    with fusednorm.use_tuned():
        kept = choice.choose(trial_problem())
        tuned = fusednorm.group_norm(*called, activation="silu")
    assert kept.tuned is not None
    assert same_bits(plain, tuned) or (plain - tuned).abs().max() < 1e-5


def test_tune_of_a_sweep_into_a_file_merges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        cli.tune, "drawn_workloads", lambda seed, count, most: [Workload("layer_norm", (seed, 20), 1)] * count
    )
    path = tmp_path / "new" / "mine.json"
    for seed, kept in ((3, 2), (4, 4)):
        arguments = ["--suite", "sweep", "--count", "1", "--seed", str(seed), "--seconds", "0", "--file", str(path)]
        found = run("tune", *arguments, "--device", "cpu")
        assert found.exit_code == 0, found.output
        assert len(tuning.parsed(path.read_bytes())[0].choices) == kept


@pytest.mark.usefixtures("many", "cache")
def test_tune_never_keeps_a_wrong_result_and_says_so(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(autotune, "timer_for", lambda *_, **__: Recorded(seconds_of))
    found = run(*TUNE, "--layout", "nhwc")
    assert found.exit_code == 1, found.output
    assert "1 wrong or failed: cpu.slabs elements=32" in found.stdout
    (own,) = tuning.parsed((cache / "tuned.json").read_bytes())
    assert [one.config for one in own.choices.values()] == [{"elements": FAST.elements}] * 2


@pytest.mark.usefixtures("many", "cache")
def test_tune_measures_for_as_long_as_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    monkeypatch.setattr(
        autotune, "timer_for", lambda device, seconds, quick: seen.append(seconds) or Recorded(seconds_of)
    )
    run(*TUNE, "--seconds", "0.5")
    assert seen == [0.5, 0.5 * autotune.SCREENING_SHARE] * 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["tune"],
        ["tune", "--suite", "quick", "--shape", "2,8,4"],
        ["tune", "--suite", "nothing"],
        ["tune", "--suite", "quick", "--match", "no such workload"],
        ["tune", "--shape", "2,8,a"],
        ["tune", "--shape", "2,8,4", "--groups", "3"],
        ["tune", "--shape", "0,8,4", "--groups", "4"],
        ["tune", "--shape", "2,8,4", "--groups", "4", "--family", "weight_norm"],
        ["tune", "--shape", "2,8,4", "--groups", "4", "--layout", "hwcn"],
        ["tune", "--shape", "2,8,4", "--groups", "4", "--dtype", "int8"],
        ["tune", "--shape", "2,8,4", "--groups", "4", "--file", "/dev/null/tuned.json"],
    ],
    ids=" ".join,
)
@pytest.mark.usefixtures("cache")
def test_wrong_usage(arguments: list[str]) -> None:
    found = run(*arguments, "--device", "cpu")
    assert found.exit_code == 2, found.output
    assert found.stdout == ""


def test_a_file_that_cannot_be_used_is_an_error_before_the_work(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cache / "tuned.json").symlink_to(cache / "elsewhere")
    monkeypatch.setattr(autotune, "tune", lambda *_, **__: pytest.fail("it measured"))
    found = run(*TUNE)
    assert found.exit_code == 2
    assert "no plain file" in found.stderr


def test_a_workload_that_the_memory_cannot_hold_is_passed_over(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(workloads.SUITES, "quick", (Workload("layer_norm", (1 << 30, 1 << 14), 1), WORKLOAD))
    found = run("tune", "--suite", "quick", "--seconds", "0", "--device", "cpu")
    assert found.exit_code == 0, found.output
    assert "needs about" in found.stderr
    (own,) = tuning.parsed((cache / "tuned.json").read_bytes())
    assert len(own.choices) == 2


def test_profile_of_all_configurations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "timer_for", lambda device: CpuTimer(seconds=0.0, minimum_samples=1))
    arguments = ["profile", "groupnorm_fwd", *TUNE[1:5], "--layout", "nhwc", "--device", "cpu", "--configs"]
    found = run(*arguments, "--json")
    assert found.exit_code == 0, found.output
    data = json.loads(found.stdout)
    listed = [(one["instance"], one["config"]) for one in data["results"] if one["status"] == "ok"]
    problem = trial_problem()
    assert listed == [
        (one.instance.name, tuning.described(config))
        for one in choice.instances(problem)
        if one.reason is None
        for config in one.instance.configs(problem)
    ]
    assert [one["default"] for one in data["results"]].count(True) == 1
    assert {"instance": data["best"], "config": data["best_config"]}.items() <= min(
        (one for one in data["results"] if one["ms"]), key=lambda one: one["ms"]
    ).items()
    text = run(*arguments).stdout
    assert "best: " in text
    assert "default" in text


def test_bench_against_the_fastest_configurations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli.bench, "drawn_workloads", lambda *_: [WORKLOAD])
    arguments = ["bench", "--suite", "sweep", "--seconds", "0", "--contender", "fusednorm", "--device", "cpu"]
    found = run(*arguments, "--against-tuned")
    assert found.exit_code == 0, found.output
    assert "time of the heuristics' choice over that of the fastest" in found.stdout
    assert "heuristics" not in run(*arguments).stdout


def test_doctor_names_the_file(cache: Path) -> None:
    assert json.loads(run("doctor", "--json").stdout)["tuned"] == {"file": "none: FUSEDNORM_TUNED is not set"}
    with fusednorm.use_tuned():
        data = json.loads(run("doctor", "--json").stdout)["tuned"]
        assert data["file"] == str(cache / "tuned.json")
        assert data["cpu"].startswith("not used: there is no such file")
        tuning.keep(cache / "tuned.json", "cpu", {})
    with fusednorm.use_tuned():
        assert "0 choices for" in run("doctor").stdout
