"""Tuned choices: what is kept, for which problem, and which files a process uses."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_support import fresh_process, process_environment
from test_storage import FILE_CHANGES

import fusednorm
from fusednorm import choice, dispatch, inspection, storage, tuning
from fusednorm.backends.cpu.instances import Slabs
from fusednorm.norm import norm_of
from fusednorm.operands import Operands
from fusednorm.problem import Problem
from fusednorm.problems import forward_problem
from fusednorm.tuning import TunedChoice, TunedFile, UnusableError, described, keep, key_of, parsed

X = torch.randn(2, 8, 6, 5).to(memory_format=torch.channels_last)
TUNED = TunedChoice("cpu.slabs", {"elements": 32768}, 0.5, 1.0)


def problem(x: torch.Tensor = X, eps: float = 1e-5, activation: Any = "silu") -> Problem:
    return forward_problem(norm_of("group_norm", 4, 1, eps, activation), Operands(x))


def normalize() -> torch.Tensor:
    return fusednorm.group_norm(X, 4, activation="silu")


@pytest.fixture(autouse=True)
def no_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_plans", {})
    monkeypatch.setattr(inspection, "copy_bandwidth", lambda nbytes, device: 1e10)
    monkeypatch.setattr(inspection, "peak_flops", lambda dtype, device: 1e12)
    tuning._opened.cache_clear()


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file whose choice for ``problem()`` is none that the heuristics would make."""
    path = tmp_path / "tuned.json"
    slabs = next(one for one in choice.all_instances() if one.name == "cpu.slabs")
    monkeypatch.setattr(type(slabs), "configs", lambda instance, problem: (Slabs(131072), Slabs(32768)))
    keep(path, "cpu", {key_of(problem()): TUNED})
    return path


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno == logging.WARNING]


# --- the key ---


def test_a_choice_is_for_any_eps_and_any_number_of_an_activation() -> None:
    key = key_of(problem())
    assert key_of(problem(eps=0.5)) == key
    assert key_of(problem(activation=fusednorm.Activation("silu", 2.0))) == key


def test_a_choice_is_for_one_problem() -> None:
    others = [
        problem(X.contiguous()), problem(X.half()), problem(X[:1]), problem(activation="relu"),
        problem(activation=None), replace(problem(), direction="backward"), replace(problem(), device="cuda"),
        replace(problem(), weight_dtype="float32"), forward_problem(norm_of("instance_norm"), Operands(X)),
    ]  # fmt: skip
    assert len({key_of(one) for one in (problem(), *others)}) == 1 + len(others)


# --- a program that opts in ---


def test_nothing_is_read_where_nobody_asks(tmp_path: Path) -> None:
    code = """
        import json, sys
        opened = []
        sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
        import fusednorm, torch
        from fusednorm import choice
        asked = choice.selection()
        with fusednorm.use_instance("reference"):
            fusednorm.group_norm(torch.randn(2, 8, 4), 4)
        print(json.dumps([asked is None, [path for path in opened if "tuned.json" in path]]))
    """
    assert fresh_process(code, FUSEDNORM_TUNED="0", FUSEDNORM_CACHE_DIR=tmp_path) == [True, []]


@pytest.mark.parametrize(("value", "name"), [("", None), (" 0 ", None), ("1", "tuned.json"), ("{}/a.json", "a.json")])
def test_what_the_environment_asks_for(
    value: str, name: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSEDNORM_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("FUSEDNORM_TUNED", value.format(tmp_path))
    found = tuning.file_of_environment()
    assert (found and found.path) == (name and tmp_path / name)


def test_a_process_with_the_variable_uses_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    x = torch.randn(2, 8, 4)
    kept = forward_problem(norm_of("group_norm", 4), Operands(x))
    code = """
        import json
        import fusednorm, torch
        from fusednorm import choice, inspection
        inspection.copy_bandwidth = inspection.peak_flops = lambda *_: 1e9
        found = fusednorm.explain(fusednorm.group_norm, torch.randn(2, 8, 4), 4)
        print(json.dumps([found.instance, found.reason]))
    """
    keep(path, "cpu", {key_of(kept): TunedChoice("reference", None, 1.0, 2.0)})
    name, reason = fresh_process(code, FUSEDNORM_TUNED=path)
    assert name == "reference"
    assert f"tuned in {path}" in reason


def test_a_tuned_choice_runs_and_is_explained(file: Path) -> None:
    before, plain = fusednorm.explain(fusednorm.group_norm, X, 4, activation="silu"), normalize()
    with fusednorm.use_tuned(file):
        found, y = fusednorm.explain(fusednorm.group_norm, X, 4, activation="silu"), normalize()
        other = fusednorm.explain(fusednorm.group_norm, X, 4, activation="relu")
    assert (found.instance, found.config) == ("cpu.slabs", Slabs(32768))
    assert f"tuned in {file}" in found.reason
    assert before.config == Slabs(131072)
    assert "default" in before.reason
    assert "default" in other.reason
    assert torch.allclose(y, plain, atol=1e-6)


def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The configurations of the plans that are made."""
    found: list[Any] = []
    choose = choice.choose

    def spy(*arguments: Any) -> choice.Choice:
        chosen = choose(*arguments)
        found.append(chosen.config)
        return chosen

    monkeypatch.setattr(dispatch, "choose", spy)
    return found


def test_tuned_and_untuned_plans_are_apart(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs = made(monkeypatch)
    for _ in range(2):
        normalize()
        with fusednorm.use_tuned(file):
            normalize()
    assert configs == [None, Slabs(32768)]


def test_a_file_that_changes_is_read_anew_where_it_is_opened_again(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs = made(monkeypatch)
    with fusednorm.use_tuned(file):
        normalize()
        keep(file, "cpu", {key_of(problem()): replace(TUNED, config={"elements": 131072})})
        normalize()
    with fusednorm.use_tuned(file):
        normalize()
    assert configs == [Slabs(32768), Slabs(131072)]


def test_a_file_that_is_written_in_place_is_another_one_by_its_size_and_by_its_time(file: Path) -> None:
    before, status = tuning.opened(file), file.stat()
    file.write_bytes(file.read_bytes() + b"\n")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    longer = tuning.opened(file)
    os.utime(file, ns=(0, 0))
    later = tuning.opened(file)
    assert len({before, longer, later}) == 3
    assert tuning.opened(file) is later


@pytest.mark.parametrize("outer_is_tuned", [True, False])
def test_an_instance_that_is_asked_for_by_name_runs_in_a_tuned_context_too(file: Path, outer_is_tuned: bool) -> None:
    tuned, named = (lambda: fusednorm.use_tuned(file)), (lambda: fusednorm.use_instance("cpu.slabs_split"))
    first, second = (tuned, named) if outer_is_tuned else (named, tuned)
    with first():
        with second():
            found = choice.choose(problem(), choice.forced())
            assert (found.name, found.config, found.tuned) == ("cpu.slabs_split", None, None)
            assert choice.choose(problem()).name == "cpu.slabs"
        assert (choice.forced() is None) is outer_is_tuned
    assert choice.selection() is None


def test_the_instance_of_the_tuned_choice_has_its_configuration_also_by_name(file: Path) -> None:
    with fusednorm.use_tuned(file), fusednorm.use_instance("cpu.slabs"):
        found = fusednorm.explain(fusednorm.group_norm, X, 4, activation="silu")
    assert found.config == Slabs(32768)
    assert "asked for by use_instance, tuned in" in found.reason


def test_threads_have_their_own_contexts(file: Path) -> None:
    seen: list[str] = []

    def work(path: Path | None) -> None:
        if path is None:
            seen.append(choice.choose(problem()).name)
        else:
            with fusednorm.use_tuned(path):
                seen.append(choice.choose(problem()).name)

    with fusednorm.use_tuned(file):
        for path in (None, file):
            thread = threading.Thread(target=work, args=(path,))
            thread.start()
            thread.join()
    assert seen == [choice.default(problem()).name, "cpu.slabs"]


@pytest.mark.parametrize("around", [False, True])
def test_a_backward_in_another_thread_has_the_file_of_its_forward(
    around: bool, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As autograd's thread for a GPU, whose context is empty; a context around the backward itself comes first."""
    asked: list[tuple[str, bool, str | None]] = []
    make_plan = dispatch.make_plan

    def recorded(problem: Problem, name: str | None = None) -> Any:
        asked.append((problem.direction, choice.tuned_file() is not None, name))
        return make_plan(problem, name)

    monkeypatch.setattr(dispatch, "make_plan", recorded)
    monkeypatch.setattr(dispatch, "_plans", {})
    x = torch.randn(3, 8, 5, requires_grad=True)
    with fusednorm.use_tuned(file), fusednorm.use_instance("cpu.slabs"):
        y = fusednorm.group_norm(x.transpose(1, 2).contiguous().transpose(1, 2), 2)

    def backward() -> None:
        with fusednorm.use_instance("reference") if around else nullcontext():
            y.sum().backward()

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    assert x.grad is not None
    last = ("backward_data", False, "reference") if around else ("backward_data", True, None)
    assert asked == [("forward", True, "cpu.slabs"), last]


# --- files that are not used ---


def edited(change: Callable[[Any], object]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        data = json.loads(path.read_text())
        change(data)
        path.write_text(json.dumps(data))

    return apply


def section(**changes: Any) -> Callable[[Path], None]:
    return edited(lambda data: data["devices"][0].update(changes))


def of_choice(**changes: Any) -> Callable[[Path], None]:
    return edited(lambda data: data["devices"][0]["choices"][key_of(problem())].update(changes))


def text(content: str | bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(content if isinstance(content, bytes) else content.encode()) and None


def number(name: str, digits: str) -> Callable[[Path], None]:
    """Digits that json reads and does not write, such as those of a number that is infinite as a float."""
    pattern = rf'(?<="{name}": )[\d.]+'
    return lambda path: path.write_text(re.sub(pattern, digits, path.read_text())) and None


CHANGES = [
    *FILE_CHANGES,
    pytest.param(Path.unlink, "there is no such file", id="missing"),
    pytest.param(lambda path: os.truncate(path, 200), "damaged", id="truncated"),
    pytest.param(lambda path: os.truncate(path, storage._MOST_BYTES + 1), "bytes; remove it", id="endless"),
    pytest.param(text(""), "damaged", id="empty"),
    pytest.param(text("[" * 100_000), "damaged", id="nested lists"),
    pytest.param(text('{"format":' * 100_000), "damaged", id="nested objects"),
    pytest.param(text(b"\xff\xfe{}"), "damaged", id="no UTF-8"),
    pytest.param(text("[]"), "damaged", id="a list"),
    pytest.param(text('{"format": 1}'), "damaged", id="no devices"),
    pytest.param(text('{"format": 1, "devices": {}}'), "damaged", id="devices of a wrong type"),
    pytest.param(text('{"format": 1, "devices": [null]}'), "damaged", id="a device of a wrong type"),
    pytest.param(text('{"format": 2, "devices": []}'), "it has the format '2'", id="another format"),
    pytest.param(section(fusednorm="0.0.1"), "was tuned with fusednorm 0.0.1", id="another version"),
    pytest.param(section(compiler="numba 0.1"), "numba 0.1; this is", id="another compiler"),
    pytest.param(section(device="another\x1b[2J"), "choices for another\\x1b[2J, and none", id="another device"),
    pytest.param(section(kind="cuda"), "and none for", id="another kind of device"),
    pytest.param(section(choices=[]), "damaged", id="choices of a wrong type"),
    pytest.param(section(device=3), "damaged", id="a name of a wrong type"),
    pytest.param(of_choice(ms=float("nan")), "NaN is no number", id="NaN"),
    pytest.param(of_choice(ms=float("inf")), "Infinity is no number", id="infinity"),
    pytest.param(of_choice(ms=True), "damaged", id="a time of a wrong type"),
    pytest.param(of_choice(ms=-1.0), "times of", id="a negative time"),
    pytest.param(of_choice(default_ms=0.0), "times of", id="a default's time of nothing"),
    pytest.param(number("ms", "1e999"), "times of", id="a time beyond all numbers"),
    pytest.param(number("default_ms", "1e999"), "times of", id="a default's time beyond all numbers"),
    pytest.param(of_choice(config=[1]), "damaged", id="a configuration of a wrong type"),
    pytest.param(of_choice(config={"elements": 7}), "has no such configuration", id="unknown configuration"),
    pytest.param(of_choice(config={"elements": "32768"}), "has no such configuration", id="a text for a number"),
    pytest.param(of_choice(config=None), "has no such configuration", id="no configuration"),
    pytest.param(of_choice(instance="cpu.planes", config=None), "has no such configuration", id="cannot run it"),
    pytest.param(of_choice(instance="cpu.fast\n\x1b"), "cpu.fast\\n\\x1b has no such", id="unknown instance"),
]


@pytest.mark.parametrize(("change", "word"), CHANGES)
def test_a_file_that_cannot_be_used_is_ignored_with_one_warning(
    change: Callable[[Path], None], word: str, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change(file)
    with fusednorm.use_tuned(file):
        for x in (X, X.double(), X):
            assert choice.choose(problem(x)).name == choice.default(problem(x)).name
        assert normalize().shape == X.shape
    (message,) = warnings_of(caplog)
    assert word in message
    assert str(file) in message
    assert message.isprintable()


def test_one_warning_for_all_choices_that_an_instance_does_not_list(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unknown = replace(TUNED, config={"elements": 1})
    keep(file, "cpu", {key_of(problem(activation=name)): unknown for name in ("silu", "relu", None)})
    found = TunedFile(file)
    for name in ("silu", "relu", None):
        assert found.find(problem(activation=name), choice.all_instances()) is None
    assert len(warnings_of(caplog)) == 1


@pytest.mark.parametrize("path", ["/", ".", "..", "a\0b", "/dev/null", "/dev/zero", "~nobody-of-that-name/x", "\ud800"])
def test_paths_that_are_none(path: str, caplog: pytest.LogCaptureFixture) -> None:
    with fusednorm.use_tuned(path):
        assert normalize().shape == X.shape
    (warning,) = warnings_of(caplog)
    assert warning.isprintable()


def test_another_kind_of_device_has_no_tuned_choices(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert TunedFile(file).find(replace(problem(), device="mps"), choice.all_instances()) is None
    assert warnings_of(caplog) == []


def test_what_doctor_says(file: Path) -> None:
    assert TunedFile(file).describe("cpu").startswith("1 choices for ")
    assert TunedFile(file.with_name("none")).describe("cpu").startswith("not used: there is no such file")


# --- writing ---


def test_choices_for_other_problems_and_devices_stay(file: Path) -> None:
    section(device="another", kind="cuda")(file)
    keep(file, "cpu", {"one": TUNED})
    keep(file, "cpu", {"two": TUNED, "one": replace(TUNED, ms=0.25)})
    other, own = parsed(file.read_bytes())
    assert (other.device, set(other.choices)) == ("another", {key_of(problem())})
    assert {key: one.ms for key, one in own.choices.items()} == {"one": 0.25, "two": 0.5}


@pytest.mark.parametrize("change", [section(fusednorm="0.0.1"), section(compiler="numba 0.1")])
def test_choices_of_another_version_are_replaced(change: Callable[[Path], None], file: Path) -> None:
    change(file)
    keep(file, "cpu", {"one": TUNED})
    (own,) = parsed(file.read_bytes())
    assert set(own.choices) == {"one"}


def test_a_damaged_file_is_written_anew(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    file.write_text("{")
    keep(file, "cpu", {"one": TUNED})
    (own,) = parsed(file.read_bytes())
    assert set(own.choices) == {"one"}
    assert "written anew" in caplog.text


@pytest.mark.parametrize(("change", "word"), FILE_CHANGES)
def test_a_file_that_others_can_have_written_is_not_replaced(
    change: Callable[[Path], None], word: str, file: Path
) -> None:
    change(file)
    with pytest.raises(OSError, match=word):
        keep(file, "cpu", {"one": TUNED})


def test_a_write_that_fails_leaves_the_old_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = file.read_bytes()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        keep(file, "cpu", {"one": TUNED})
    assert file.read_bytes() == before
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_two_processes_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "tuned.json"
    code = (
        "import sys\nfrom pathlib import Path\nfrom fusednorm.tuning import TunedChoice, keep\n"
        "for n in range(15):\n"
        "    keep(Path(sys.argv[1]), 'cpu', {f'{sys.argv[2]}{n}': TunedChoice('reference', None, 1.0, 1.0)})\n"
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", code, str(path), name], env=process_environment()) for name in "ab"
    ]
    while any(writer.poll() is None for writer in writers):
        if path.exists():
            parsed(path.read_bytes())  # a reader never sees half a file
    assert [writer.returncode for writer in writers] == [0, 0]
    (own,) = parsed(path.read_bytes())
    assert set(own.choices) == {f"{name}{n}" for name in "ab" for n in range(15)}
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_lock_that_somebody_holds_for_ever_delays_and_no_more(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    monkeypatch.setattr(storage, "_LOCK_SECONDS", 0.0)
    holder = os.open(file.parent, os.O_RDONLY)
    try:
        fcntl.flock(holder, fcntl.LOCK_EX)
        keep(file, "cpu", {"one": TUNED})
    finally:
        os.close(holder)
    assert b'"one"' in file.read_bytes()


# --- what a file holds ---


def every_config() -> Iterator[tuple[Problem, Any, Any]]:
    for candidate in choice.instances(problem()):
        if candidate.reason is None:
            for config in candidate.instance.configs(problem()):
                yield problem(), candidate.instance, config


def test_every_configuration_is_found_again(tmp_path: Path) -> None:
    for place, (asked, instance, config) in enumerate(every_config()):
        path = tmp_path / f"{place}.json"
        keep(path, "cpu", {key_of(asked): TunedChoice(instance.name, described(config), 1.0, 1.0)})
        assert TunedFile(path).find(asked, choice.all_instances()) == (instance, config)


def test_a_refusal_is_words() -> None:
    with pytest.raises(UnusableError, match="nested too deeply"):
        parsed(b"[" * 100_000)
