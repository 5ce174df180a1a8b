"""The merges of moments at the ends of float32, in Triton's interpreter, in a process of its own."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from cpu_support import fresh_process

pytest.importorskip("triton")

CODE = """
import json, warnings
warnings.simplefilter("ignore")
import torch, triton, triton.language as tl
from fusednorm.backends.triton.kernels.moments import chan, merge_lanes, moved

@triton.jit
def call_moved(m2, rest, count, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, moved(tl.load(m2 + i), tl.load(rest + i), tl.load(count + i)))

@triton.jit
def call_lanes(mean, m2, count, out, N: tl.constexpr):
    i = tl.arange(0, N)
    found, spread = merge_lanes(tl.load(mean + i), tl.load(m2 + i), tl.load(count + i), 0)
    first, spread, total = chan(0.0 * found, 0.0 * spread, 0.0 * found, found, spread, tl.sum(tl.load(count + i), 0))
    tl.store(out, first)
    tl.store(out + 1, spread)
    tl.store(out + 2, total)

inf, nan = float("inf"), float("nan")
results = {}
# rest**2 * count, a rounding to either side of it, what is left of real numbers, an infinity and a NaN.
m2 = torch.tensor([12.0, 12.0 * (1 - 1e-7), 12.0 * (1 + 1e-7), 13.0, inf, inf, nan, 0.0])
rest = torch.tensor([2.0, 2.0, 2.0, 2.0, 2.0, 1e30, 2.0, 0.0])
out = torch.full((8,), nan)
call_moved[(1,)](m2, rest, torch.full((8,), 3.0), out, 8)
results["moved"] = out.tolist()
for name, mean, count in (
    ("huge", [3e25, 3e25, 0.0, 0.0], [5.0, 4.0, 0.0, 0.0]),
    ("one", [2e27, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]),
    ("two", [1.0, 4.0, 0.0, 0.0], [2.0, 1.0, 0.0, 0.0]),
):
    out = torch.full((3,), nan)
    call_lanes[(1,)](torch.tensor(mean), torch.zeros(4), torch.tensor(count), out, 4)
    results[name] = out.tolist()
print(json.dumps(results))
"""


def test_merges_at_the_ends(tmp_path: Path) -> None:
    """An empty set beside a mean whose square float32 does not hold; equal numbers; infinities and NaN."""
    script = tmp_path / "moments.py"  # Triton reads the kernels' source
    script.write_text(CODE)
    found = fresh_process(f"import runpy; runpy.run_path({str(script)!r})", TRITON_INTERPRET="1")
    assert found["moved"][:6] == [0.0, 0.0, 0.0, 1.0, math.inf, math.inf]
    assert math.isnan(found["moved"][6])
    assert found["moved"][7] == 0.0
    assert found["huge"] == pytest.approx([3e25, 0.0, 9.0])
    assert found["one"] == pytest.approx([2e27, 0.0, 1.0])
    assert found["two"] == pytest.approx([2.0, 6.0, 3.0])
