"""The example of an image that is cut by its rows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "image_rows.py"
# fusednorm's place taken by the formula that the example compares with.
AVERAGED = f"""
import runpy, sys
example = runpy.run_path({str(EXAMPLE)!r}, run_name="example")
example["NORMS"]["fusednorm"] = example["by_an_average"]
sys.argv = ["image_rows", "--processes", "2"]
example["typer"].run(example["main"])
"""


def test_rows_have_the_statistics_of_the_whole_and_an_average_has_not() -> None:
    pytest.importorskip("typer")
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--processes", "2"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    errors = re.findall(r"^ .* (\S+e-\d+) +(\S+)%$", done.stdout, flags=re.MULTILINE)
    assert len(errors) == 4
    assert all(float(ours) < 1e-5 and float(theirs) > 5 for ours, theirs in errors)


def test_the_example_fails_where_the_variance_between_parts_is_forgotten() -> None:
    pytest.importorskip("typer")
    done = subprocess.run([sys.executable, "-c", AVERAGED], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stderr
    assert done.stdout.count("%") == 4  # it ran to its end
