"""The merges of moments at the ends of float32, in Triton's interpreter, in a process of its own."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from interpreter_support import interpreted

pytest.importorskip("triton")

CODE = """
import json, warnings
warnings.simplefilter("ignore")
import torch, triton, triton.language as tl
from fusednorm.backends.triton.kernels.moments import chan, held_moments, merge_lanes

@triton.jit
def call_lanes(mean, m2, count, out, N: tl.constexpr):
    i = tl.arange(0, N)
    found, spread = merge_lanes(tl.load(mean + i), tl.load(m2 + i), tl.load(count + i), 0)
    first, spread, total = chan(0.0 * found, 0.0 * spread, 0.0 * found, found, spread, tl.sum(tl.load(count + i), 0))
    tl.store(out, first)
    tl.store(out + 1, spread)
    tl.store(out + 2, total)

@triton.jit
def call_held(x, out, N: tl.constexpr, K: tl.constexpr):
    i = tl.arange(0, N)[None, :]
    mean, m2 = held_moments(tl.load(x + i, i < K, 0.0), i < K, None, None, K, True, True)
    tl.store(out + tl.arange(0, 1), mean)
    tl.store(out + 1 + tl.arange(0, 1), m2)

nan = float("nan")
results = {}
for name, mean, count in (
    ("empty", [3e30, 3e30, 0.0, 0.0], [5.0, 4.0, 0.0, 0.0]),
    ("one", [2e27, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]),
    ("two", [1.0, 4.0, 0.0, 0.0], [2.0, 1.0, 0.0, 0.0]),
):
    out = torch.full((3,), nan)
    call_lanes[(1,)](torch.tensor(mean), torch.zeros(4), torch.tensor(count), out, 4)
    results[name] = out.tolist()
for name, numbers in (
    ("equal", [3.3e30] * 7),
    ("equal and rounded", [0.1] * 11),
    ("equal, huge and rounded", [1.1e33] * 13),
    ("one differs", [1e7] * 12 + [1e7 + 1]),
    ("large", [3e18, -3e18]),
    ("huge", [1e25, 1e25 + 1e19]),
    ("infinite", [5e19, -5e19, 1e19]),
    ("nan", [1.0, nan, 2.0]),
):
    out = torch.full((2,), nan)
    call_held[(1,)](torch.tensor(numbers), out, 16, len(numbers))
    results[name] = out.tolist()
print(json.dumps(results))
"""


def test_merges_at_the_ends(tmp_path: Path) -> None:
    """An empty set beside a mean whose square float32 does not hold; equal numbers as large, and NaN."""
    script = tmp_path / "moments.py"  # Triton reads the kernels' source
    script.write_text(CODE)
    found = interpreted(f"import runpy; runpy.run_path({str(script)!r})")
    assert found["empty"] == pytest.approx([3e30, 0.0, 9.0])
    for name, number in (("equal", 3.3e30), ("equal and rounded", 0.1), ("equal, huge and rounded", 1.1e33)):
        mean, m2 = found[name]
        assert mean == float(torch.tensor(number))
        assert m2 == 0.0
    assert found["one differs"] == pytest.approx([1e7, 12 / 13], rel=1e-6)
    assert found["large"] == pytest.approx([0.0, 1.8e37], rel=1e-6)
    huge = torch.tensor([1e25, 1e25 + 1e19]).double()
    assert found["huge"] == pytest.approx([float(huge.mean()), float(huge.var(correction=0)) * 2], rel=1e-6)
    assert found["infinite"] == pytest.approx([1e19 / 3, math.inf], rel=1e-6)
    assert all(math.isnan(number) for number in found["nan"])
    assert found["one"] == pytest.approx([2e27, 0.0, 1.0])
    assert found["two"] == pytest.approx([2.0, 6.0, 3.0])
