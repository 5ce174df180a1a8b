"""The example of a volume that is spread over processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "volume_unet.py"


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=300)


AS_IT_IS = f"import runpy; runpy.run_path({str(EXAMPLE)!r}, run_name='__main__')"
# Each slab by its own statistics, as a norm that knows nothing of the others takes them.
BY_SLAB = f"""
import fusednorm, runpy

def plain(*arguments, shard_dim, **keywords):
    return fusednorm.group_norm(*arguments, **keywords)

fusednorm.distributed.group_norm = plain
runpy.run_path({str(EXAMPLE)!r}, run_name='__main__')
"""


# A second step shows the gradients of the first. Statistics of slabs show in the first loss.
@pytest.mark.parametrize(
    ("program", "steps", "code"), [(AS_IT_IS, "2", 0), (BY_SLAB, "1", 1)], ids=["as it is", "by slab"]
)
def test_a_volume_in_slabs_trains_as_in_one_process(program: str, steps: str, code: int) -> None:
    pytest.importorskip("typer")
    done = run(program, "--processes", "2", "--steps", steps)
    assert done.returncode == code, done.stderr
    assert "largest difference" in done.stdout
