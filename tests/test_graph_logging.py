"""FUSEDNORM_LOG_LEVEL and FUSEDNORM_LOG_FILE, each in a process of its own, and what the graph logs."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from graph_support import described

from fusednorm.graph import InvalidGraphError, draw

SOURCES = str(Path(__file__).parents[1] / "src")
PROGRAM = """
import torch, fusednorm
graph = fusednorm.graph.Graph(torch.float32, name="logged")
z, _, _ = graph.groupnorm(graph.tensor((2, 8, 4, 4), name="x"), num_groups=4, phase="inference")
graph.pointwise("silu", z).set_output().set_name("y")
graph.build("unfused:reference")
graph.execute(fusednorm.graph.draw(graph))
try:
    graph.build_plans("unfused:best")
except fusednorm.graph.GraphError:
    pass
broken = fusednorm.graph.Graph(torch.float32, name="broken")
try:
    broken.validate()
except fusednorm.graph.GraphError:
    pass
"""


def _run(level: str | None, file: Path | None = None) -> tuple[str, str]:
    """stderr, and what is in the file."""
    environment = {**os.environ, "PYTHONPATH": SOURCES}
    for name, value in (("FUSEDNORM_LOG_LEVEL", level), ("FUSEDNORM_LOG_FILE", file)):
        environment.pop(name, None)
        if value is not None:
            environment[name] = str(value)
    arguments = [sys.executable, "-W", "error::UserWarning", "-c", PROGRAM]
    done = subprocess.run(arguments, capture_output=True, text=True, env=environment, check=True)
    assert not done.stdout
    return done.stderr, file.read_text() if file is not None and file.exists() else ""


def test_each_level_says_what_it_should(tmp_path: Path) -> None:
    _, info = _run("info", tmp_path / "info.log")
    for stage in ("validate", "build_operation_graph", "create_execution_plans", "check_support", "build_plans"):
        assert f"graph logged: {stage}: " in info
    assert "build_plans: plan unfused:reference" in info
    assert "launch" not in info
    stderr, debug = _run("debug", tmp_path / "debug.log")
    assert "graph logged: launch 1 of 2: groupnorm on reference" in debug
    assert "graph logged: launch 2 of 2: silu in torch" in debug
    assert not stderr
    stderr, _ = _run("error")
    assert "ERROR fusednorm.graph.graph: graph broken: validate" in stderr
    assert "INFO" not in stderr


def test_off_and_unset() -> None:
    assert _run("off") == ("", "")


def test_an_unknown_level_is_ignored_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    from fusednorm.graph import logs

    monkeypatch.setenv("FUSEDNORM_LOG_LEVEL", "loud")
    with pytest.warns(UserWarning, match="'loud'; expected one of off, error, warning, info, debug"):
        logs.configure()


def test_a_file_that_cannot_be_written_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fusednorm.graph import logs

    monkeypatch.setenv("FUSEDNORM_LOG_LEVEL", "error")
    monkeypatch.setenv("FUSEDNORM_LOG_FILE", str(tmp_path / "missing" / "file.log"))
    logger = logging.getLogger("fusednorm")
    before = (logger.level, logger.propagate, list(logger.handlers))
    try:
        with pytest.warns(UserWarning, match="cannot be written"):
            logs.configure()
    finally:
        logger.level, logger.propagate, logger.handlers[:] = before[0], before[1], before[2]


def test_the_standard_logger_decides_without_the_variables(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "fusednorm.graph"):
        graph = described("norm_activation").build()
        graph.execute(draw(graph))
        graph.nodes[0].attributes["num_groups"] = 3
        with pytest.raises(InvalidGraphError):
            graph.validate()
    messages = [record.getMessage() for record in caplog.records]
    assert any("launch 1 of 1: groupnorm + silu on cpu.planes" in message for message in messages)
    assert any("validate: 1 mistakes" in message for message in messages)
