"""The short way to start a kernel, through Triton's own launcher in Python and in C, down to a driver that records."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

TESTS = Path(__file__).parent
DEPENDENT = [6, 1]  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, allowed


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each launch of some operations asked the driver for, see driver_support.compare."""
    if shutil.which(os.environ.get("CC", "gcc")) is None:
        pytest.skip("Triton builds its launcher with a C compiler, and there is none")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        pytest.skip("Triton builds its launcher with Python's headers, and there are none")
    folder = tmp_path_factory.mktemp("driver")
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent / "src"), "TRITON_CACHE_DIR": str(folder / "cache")}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, str(TESTS / "driver_support.py"), str(folder)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_kernels_of_several_kinds_were_started(launches: list[dict[str, Any]]) -> None:
    assert {launch["name"] for launch in launches} >= {"moments_of_planes", "apply", "reduce", "whole_forward"}
    assert {launch["dependent"] for launch in launches} == {False, True}
    assert all(len(started) == 1 for launch in launches for way in ("short", "triton's") for started in launch[way])


def test_the_driver_is_asked_for_the_same_as_by_triton(launches: list[dict[str, Any]]) -> None:
    assert [launch["short"] for launch in launches] == [launch["triton's"] for launch in launches]


def test_the_driver_is_asked_for_what_the_launch_says(launches: list[dict[str, Any]]) -> None:
    for launch in launches:
        for (start,), parameters in zip(launch["short"], launch["parameters"], strict=True):
            assert start["grid"] == [launch["programs"], 1, 1]
            assert start["block"] == [32 * launch["warps"], 1, 1]
            assert start["stream"] == 0x5000
            assert (DEPENDENT in start["attributes"]) is launch["dependent"]
            assert start["parameters"] == [*parameters, 0, 0]  # no scratch memory
        assert launch["parameters"][0] != launch["parameters"][1]


def test_what_triton_works_out_for_a_launch_is_kept(launches: list[dict[str, Any]]) -> None:
    """Fails where Triton's launcher has a form that fusednorm does not know: each start then costs 1 us more."""
    assert [(launch["kept"], launch["worked out again"]) for launch in launches] == [(1, [])] * len(launches)
