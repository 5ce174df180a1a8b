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
from fusednorm.backends.triton.kernels import moments
from fusednorm.backends.triton.kernels.moments import add_pair, chan, held_moments, merge_lanes, pivoted

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

@triton.jit
def call_pivoted(x, out, N: tl.constexpr, K: tl.constexpr):
    i = tl.arange(0, N)[None, :]
    pivot = moments.pivot_of(x + tl.arange(0, 1), 1, 2, tl.full((1,), True, tl.int1), tl.float32)
    deviation = pivoted(tl.load(x + i, i < K, 0.0).to(tl.float32), pivot[:, None], i < K, True)
    total, squares = tl.reduce((deviation, deviation * deviation), 1, add_pair)
    mean, m2 = moments.pivoted_moments(pivot, total, squares, K)
    tl.store(out + tl.arange(0, 1), mean)
    tl.store(out + 1 + tl.arange(0, 1), m2)

nan = float("nan")
results = {}
for name, numbers in (
    ("pivoted, equal", [-1000.0] * 11),
    ("pivoted, an outlier first", [60000.0] + [1.0, -1.0] * 1000),
    ("pivoted, an outlier second", [1.0, 60000.0] + [-1.0, 1.0] * 1000),
    ("pivoted, an outlier third", [1.0, -1.0, 60000.0] + [-1.0, 1.0] * 1000),
    ("pivoted, far from 0", [4096.0 + (i % 7) for i in range(1500)]),
    ("pivoted, infinite", [3e38, -3e38, 3e38]),
    ("pivoted, nan", [1.0, nan, 2.0]),
    ("pivoted, an infinity", [1.0, float("inf"), 2.0]),
    ("pivoted, an infinity first", [float("-inf"), 1.0, 2.0]),
):
    out, x = torch.full((2,), nan), torch.tensor(numbers, dtype=torch.bfloat16)
    call_pivoted[(1,)](x, out, 2048, len(numbers))
    wide = x.double()
    results[name] = [out.tolist(), [wide.mean().item(), wide.var(correction=0).item() * len(numbers)]]
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
    assert found["pivoted, equal"][0] == [-1000.0, 0.0]
    for name in ("an outlier first", "an outlier second", "an outlier third", "far from 0"):
        given, expected = found[f"pivoted, {name}"]
        assert given == pytest.approx(expected, rel=32 * 2**-24)
    assert found["pivoted, infinite"][0] == pytest.approx([1e38, math.inf], rel=1e-2)
    assert all(math.isnan(number) for number in found["pivoted, nan"][0])
    for name in ("an infinity", "an infinity first"):  # M2 is no number, as of torch, though the squares are infinite
        assert math.isnan(found[f"pivoted, {name}"][0][1])


PIVOTS = """
import json, warnings
warnings.simplefilter("ignore")
import torch
from fusednorm.backends.triton import instances
from fusednorm.norm import norm_of
from fusednorm.operands import Operands
from fusednorm.problems import forward_problem

def units(shape, over, outlier):
    # Each unit at a distance of a thousand of its deviations from the one before it and the one behind it, or with an
    # outlier among its first three elements.
    x = 4 * torch.randn(shape, generator=torch.Generator().manual_seed(1))
    n, c = (torch.arange(size).view(-1, *(1,) * (len(shape) - 1 - axis)) for axis, size in enumerate(shape[:2]))
    if outlier is not None:
        one = "sample" in over
        along = x.transpose(0, 1).flatten(1) if one else x.flatten(2)
        along[..., outlier] += 4000
        x = along.unflatten(1, (shape[0], *shape[2:])).transpose(0, 1) if one else along.unflatten(2, shape[2:])
        return x.contiguous()
    if "sample" in over:
        return x + 4000 * (1 - 2 * (c % 2))
    return x + 4000 * (1 - 2 * ((n + c) % 2))

found = []
CASES = (
    ("WHOLE", "instance_norm", (3, 6, 4, 10), "packed"), ("WHOLE", "instance_norm", (3, 6, 4, 10), "apart"),
    ("HELD", "instance_norm", (3, 6, 4, 10), "packed"), ("HELD", "instance_norm", (3, 6, 4, 10), "apart"),
    ("HELD", "instance_norm", (3, 6, 4, 10), "last"), ("HELD", "batch_norm", (3, 6, 4, 10), "packed"),
    ("HELD", "batch_norm", (3, 6, 4, 10), "last"), ("HELD", "batch_norm", (40, 6, 1, 1), "packed"),
    ("HELD", "batch_norm", (40, 6, 1, 1), "last"), ("WHOLE", "instance_norm", (3, 6, 1, 2), "packed"),
    ("HELD", "batch_norm", (2, 6, 1, 1), "packed"), ("HELD", "instance_norm", (3, 6, 1, 2), "last"),
    ("HELD", "batch_norm", (200, 6, 1, 2), "packed"), ("HELD", "batch_norm", (150, 6, 1, 3), "packed"),
)
for name, family, shape, memory in CASES:
    for outlier in (None, 0, 1, 2):
        if outlier == 2 and 2 in (shape[2] * shape[3], shape[0] * shape[2] * shape[3]):
            continue  # a unit, or its row, has two elements
        x = units(shape, "sample" if family == "batch_norm" else "", outlier).half()
        if memory == "apart":
            whole = torch.zeros(shape[0], 2 * shape[1], *shape[2:], dtype=x.dtype)
            whole[:, ::2] = x
            x = whole[:, ::2]
        elif memory == "last":
            x = x.contiguous(memory_format=torch.channels_last)
        scale = torch.zeros(shape[:2], dtype=x.dtype) if memory == "last" and family == "batch_norm" else None
        operands = Operands(x, scale=scale)
        plan = getattr(instances, name).plan(forward_problem(norm_of(family), operands))
        results = plan(operands)
        over = (0, 2, 3) if family == "batch_norm" else (2, 3)
        variance = x.double().var(over, correction=0).flatten()
        error = (results.rstd.flatten() * (variance + 1e-5).sqrt() - 1).abs().max().item()
        found.append((name, family, shape, memory, outlier, plan.launch.constants["PIVOT"], error))
print(json.dumps(found))
"""


def test_a_pivot_is_the_units_own(tmp_path: Path) -> None:
    """In every memory order: that of another unit, a thousand deviations away, would cost percents, and an outlier
    would cost a rounding for each element."""
    script = tmp_path / "pivots.py"
    script.write_text(PIVOTS)
    for *case, pivot, error in interpreted(f"import runpy; runpy.run_path({str(script)!r})"):
        assert pivot, case
        assert error < 5e-7, case


DIVISIONS = """
import warnings
warnings.simplefilter("ignore")
import random
import torch, triton, triton.language as tl
from fusednorm.backends.triton.kernels.addressing import divided
from fusednorm.backends.triton.runs import divisor

@triton.jit
def divide(n, quotient, remainder, number, inverse: tl.int64, N: tl.constexpr):
    i = tl.arange(0, N)
    q, r = divided(tl.load(n + i), number, inverse)
    tl.store(quotient + i, q)
    tl.store(remainder + i, r)

numbers, last = random.Random(1), 2**31 - 1
divisors = [1, 2, 3, 7, 255, 256, 257, 65535, 65536, 65537, 2**30, last - 1, last]
divisors += [numbers.randrange(1, 2 ** numbers.randrange(1, 32)) for _ in range(100)]
for number in divisors:
    multiples = [number * numbers.randrange(last // number + 1) for _ in range(8)]
    places = [0, 1, last - 1, last, *multiples, *(max(0, one - 1) for one in multiples), numbers.randrange(last)]
    n = torch.tensor((places * 2)[:32], dtype=torch.int32)
    quotient, remainder = torch.empty_like(n), torch.empty_like(n)
    divide[(1,)](n, quotient, remainder, *divisor(number), 32)
    assert torch.equal(quotient, n // number), number
    assert torch.equal(remainder, n % number), number
assert divisor(0) == divisor(1)  # of an empty input
print("true")
"""


def test_divisions_by_an_inverse(tmp_path: Path) -> None:
    """Of all dividends near the multiples of a divisor, and at the ends."""
    script = tmp_path / "divisions.py"
    script.write_text(DIVISIONS)
    assert interpreted(f"import runpy; runpy.run_path({str(script)!r})")


STEPS = """
import json, warnings
warnings.simplefilter("ignore")
import torch
from fusednorm.backends.triton import instances, runs
from fusednorm.backends.triton.plans import tiles
from fusednorm.backends.triton.config.kinds import PassConfig, TilesConfig
from fusednorm.activations import resolve
from fusednorm.norm import norm_of
from fusednorm.operands import BackwardOperands, Operands
from fusednorm.problems import backward_problem, forward_problem

runs.REPEATED = 0, 0  # elements from which on rows are of several positions
tiles.MERGE_BLOCK = 4  # partials of a step of a merge, which then takes several

def drawn(kind, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    if kind == "equal":
        x = torch.full(shape, 0.1)
    elif kind == "equal and huge":
        x = torch.full(shape, 3.3e38)
    elif kind == "one differs":
        x = torch.full(shape, 3.3)
        x[:, :, 0, 0] = 1e3
    elif kind == "outlier":
        x[:, :, 0, 0] = 1e4
    elif kind == "trend":
        x = 1e-3 * x + torch.linspace(0, 100, shape[2] * shape[3]).view(shape[2:])
    elif kind == "infinite":
        x = 1e19 * x
    return x.contiguous(memory_format=torch.channels_last)

found = []
for family, shape, dtype in {shapes}:
    for kind in ("normal", "equal", "equal and huge", "one differs", "outlier", "trend", "infinite"):
        x = drawn(kind, shape).to(getattr(torch, dtype))
        problem = forward_problem(norm_of(family), Operands(x))
        output = instances.TILES.configs(problem)[0].output
        config = TilesConfig(PassConfig(64, 32, 2, 1), output)
        plan = instances.TILES.plan(problem, config)
        results = plan(Operands(x))
        wide = x.double()
        over = (0, 2, 3) if family == "batch_norm" else (2, 3)
        mean, variance = wide.mean(over).flatten(), wide.var(over, correction=0).flatten()
        of_mean = (results.mean.flatten() - mean).abs() / torch.maximum(mean.abs(), variance.sqrt())
        rstd = torch.zeros(1).double() if kind == "infinite" else (variance + 1e-5).rsqrt()
        of_rstd = (results.rstd.flatten() - rstd).abs() / rstd.clamp_min(1e-30)
        constants = plan.moments.constants
        how = [constants["DEPTH"] > 1, constants["REPEAT"] > 1, constants["ACROSS"]]
        found.append((kind, how, of_mean.max().item(), of_rstd.max().item()))

norm, weight = norm_of("group_norm", 2, activation=resolve("silu")), torch.linspace(0.5, 2, 6)
x, dy = (drawn("normal", (2, 6, 5, 7)) + shift for shift in (0, 1))
wide = x.double().requires_grad_()
groups = wide.contiguous().view(2, 2, -1)
mean, variance = groups.mean(2, keepdim=True), groups.var(2, keepdim=True, correction=0)
z = ((groups - mean) * (variance + 1e-5).rsqrt()).view(wide.shape) * weight.view(6, 1, 1)
(expected,) = torch.autograd.grad(torch.nn.functional.silu(z), wide, dy.double())
saved = mean.detach().float()[..., 0], (variance + 1e-5).rsqrt().detach().float()[..., 0]
problem = backward_problem(norm, BackwardOperands(dy, x, *saved, weight))
config = TilesConfig(PassConfig(64, 8, 1, 1), instances.TILES.configs(problem)[0].output)
plan = instances.TILES.plan(problem, config)
partials = [plan.partials.rows, plan.partials.block["BLOCK_R"]]
gradient = plan(BackwardOperands(dy, x, *saved, weight), (True, False, False, False, False)).input
print(json.dumps([found, partials, (gradient - expected).abs().max().item()]))
"""

# Rows of one position, of several positions, and of several that lie across samples: with two ends in one lane, too.
SHAPES = [
    ("instance_norm", (2, 64, 9, 9), "float32"),
    ("batch_norm", (1, 3, 64, 65), "float32"),
    ("instance_norm", (3, 3, 31, 67), "float32"),
    ("instance_norm", (3, 3, 1, 65), "bfloat16"),
]
HOW = [[True, False, False], [True, True, False], [True, True, True], [True, True, True]]


def test_the_moments_of_steps(tmp_path: Path) -> None:
    """Deviations from the mean so far cancel by an eighth at most, whatever the first numbers are."""
    script = tmp_path / "steps.py"
    script.write_text(STEPS.replace("{shapes}", repr(SHAPES)))
    found, (partials, step), error = interpreted(f"import runpy; runpy.run_path({str(script)!r})")
    assert partials > step
    assert error < 3e-6
    assert [how for _, how, *_ in found] == [how for how in HOW for _ in range(7)]
    for kind, _, of_mean, of_rstd in found:
        assert of_mean <= (0.0 if "equal" in kind else 2e-7), kind
        assert of_rstd <= 2e-6, kind
