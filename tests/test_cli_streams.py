"""What a process may be started with: streams that are closed, full or broken, narrow encodings, an interrupt."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_cli_hostile import a_report

import fusednorm

SOURCES = str(Path(fusednorm.__file__).parents[1])
COMMAND = f"{sys.executable} -m fusednorm"


def shell(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A line of sh, in which F stands for the command."""
    return subprocess.run(
        ["sh", "-c", line.replace("F ", COMMAND + " ")],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": SOURCES, **environment},
        check=False,
    )


@pytest.fixture
def report(tmp_path: Path) -> str:
    """A file that a command prints in the time of its imports; ``doctor`` imports torch's compiler too."""
    path = tmp_path / "report.json"
    path.write_text(json.dumps(a_report()))
    return str(path)


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("F --version >&-", 2, "stdout is closed"),
        ("F report $REPORT >/dev/full", 2, "stdout cannot be written: No space left"),
        ("F --help >/dev/full", 2, "stdout cannot be written: No space left"),
        ("F run - <&-", 2, "no JSON"),
    ],
)
def test_a_stream_that_cannot_be_used_is_said_without_a_traceback(
    line: str, code: int, words: str, report: str
) -> None:
    done = shell(line, REPORT=report)
    assert (done.returncode, done.stdout) == (code, "")
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize("arguments", ["report $REPORT", "--help"])
def test_a_reader_that_left_ends_the_command_as_its_signal_would(arguments: str, report: str) -> None:
    done = shell(f"{{ F {arguments} 2>&3; echo code $? >&3; }} 3>&2 | true", REPORT=report)
    assert done.stderr == "code 141\n"


def test_what_torch_logs_reaches_stderr() -> None:
    code = "import torch; from fusednorm.cli import streams; streams.install(); import logging; "
    code += "logging.getLogger('torch.multiprocessing.spawn').warning('a process ends')"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert "a process ends" in result.stderr
    assert "Traceback" not in result.stderr


def test_closed_stderr_changes_neither_the_result_nor_the_code(report: str) -> None:
    done = shell("F report $REPORT 2>&-", REPORT=report)
    assert done.returncode == 0
    assert done.stdout.startswith("| operation")
    assert shell("F profile nothing 2>&-").returncode == 2


def test_an_encoding_without_the_characters_of_a_table(tmp_path: Path) -> None:
    graph = fusednorm.graph.Graph("float32", name="x̂ − μ")
    graph.pointwise("relu", graph.tensor((2, 3), name="x̂")).set_output().set_name("μ")
    graph.save(tmp_path / "graph.json")
    done = shell(f"F run {tmp_path / 'graph.json'}", PYTHONIOENCODING="ascii", LC_ALL="C", COLUMNS="1", TERM="dumb")
    assert done.returncode == 0, done.stderr
    assert r"graph x\u0302 \u2212 \u03bc" in done.stdout


def test_an_interrupt_is_130_without_a_traceback(tmp_path: Path) -> None:
    arguments = ["bench", "--contender", "fusednorm", "--seconds", "1000", "--json", str(tmp_path / "result.json")]
    process = subprocess.Popen(
        [sys.executable, "-m", "fusednorm", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": SOURCES},
        # A process that was started in the background ignores the signal.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    while not (tmp_path / "result.json").exists():  # opened before anything is measured
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=120)
    assert (process.returncode, stdout) == (130, "")
    assert "Traceback" not in stderr
    assert not (tmp_path / "result.json").exists()
