"""Long rows on the CPU, which the backward takes in pairs: odd numbers of rows, and pairs beside the ends of sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cpu_support import faults, run, same_bits
from torch import Tensor

import fusednorm
from fusednorm.backends.cpu.geometry import PIECE, ROWS_FLUSHED
from fusednorm.backends.cpu.instances import ROWS, Segments
from fusednorm.bench.workloads import Workload, draw
from fusednorm.norm import norm_of
from fusednorm.operands import BackwardOperands
from fusednorm.problems import backward_problem

#: (family, shape, groups): rows as many and one more than the sums take at a time, rows of two groups, of samples with
#: their own scale and shift, and fewer elements than pairs have.
CASES: tuple[tuple[Any, tuple[int, ...], int], ...] = (
    ("layer_norm", (2 * ROWS_FLUSHED + 1, 2051), 1),
    ("layer_norm", (3 * ROWS_FLUSHED, 2048), 1),
    ("rms_norm", (ROWS_FLUSHED - 1, 2049), 1),
    ("layer_norm", (301, 2047), 1),
    ("group_norm", (2 * ROWS_FLUSHED + 3, 4100), 2),
)


@pytest.mark.parametrize(
    ("dtype", "activation"), [("float32", None), ("bfloat16", None), ("float32", "relu"), ("float64", None)]
)
@pytest.mark.parametrize("case", CASES)
def test_pairs(case: tuple[Any, tuple[int, ...], int], dtype: str, activation: str | None) -> None:
    family, shape, groups = case
    for modulated in (False, True) if family == "group_norm" else (False,):
        workload = Workload(family, shape, groups, dtype, activation=activation, modulated=modulated)
        inputs = draw(workload)
        assert faults(workload, inputs, run(workload, inputs, "cpu.rows")) == []


def _gradients(x: Tensor, weight: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    leaves = [each.clone().requires_grad_() for each in (x, weight, torch.zeros_like(weight))]
    return torch.autograd.grad(fusednorm.layer_norm(leaves[0], (x.shape[1],), *leaves[1:]), leaves, dy)


@pytest.mark.parametrize("rows", [2 * ROWS_FLUSHED + 9, 72 * ROWS_FLUSHED + 1])  # the second many to a segment
def test_the_sums_of_both_rows_are_whole(rows: int) -> None:
    """By numbers that make every sum exact: rows of 1 and -1, whose deviation is 1, and gradients of whole numbers."""
    length = 2048
    signs = torch.where(torch.arange(length) % 2 == 0, 1.0, -1.0)
    x, dy = signs.repeat(rows, 1), torch.randint(-8, 8, (rows, length)).float()
    exact = fusednorm.ops.layer_norm_backward(
        dy, x, torch.zeros(rows, 1), torch.ones(rows, 1), (length,), torch.ones(length), torch.zeros(length)
    )
    assert torch.equal(exact[1], (dy * signs).sum(0))
    assert torch.equal(exact[2], dy.sum(0))
    wide = dy.double()
    p, q = wide.mean(1, keepdim=True), (wide * signs).mean(1, keepdim=True)
    torch.testing.assert_close(exact[0].double(), wide - p - signs * q, rtol=0.0, atol=1e-5)


def test_a_segment_that_begins_with_an_odd_row_is_summed_a_few_rows_at_a_time() -> None:
    """Ones are lost in float32 beside 2^26, which the first of so many rows has."""
    rows, length, large = 2 * (3 * ROWS_FLUSHED + 1), 2048, 2.0**26
    dy, weight = torch.ones(rows, length), torch.ones(length)
    dy[rows // 2] = large
    x, mean, rstd = torch.randn(rows, length), torch.zeros(rows, 1), torch.ones(rows, 1)
    operands = BackwardOperands(dy, x, mean, rstd, weight, torch.zeros(length))
    plan: Any = ROWS.plan(backward_problem(norm_of("layer_norm", 1), operands), Segments(2))
    assert plan.geometry[PIECE] == rows // 2
    found = plan(operands, (False, False, True, False, False)).bias
    assert (found - large >= rows - ROWS_FLUSHED - 8).all()  # float32 has a number in 8 there


@pytest.mark.parametrize("row", [0, 1, ROWS_FLUSHED, 2 * ROWS_FLUSHED + 8])
def test_a_nan_stays_in_its_row(row: int) -> None:
    torch.manual_seed(0)
    x, dy = torch.randn(2 * ROWS_FLUSHED + 9, 2048), torch.randn(2 * ROWS_FLUSHED + 9, 2048)
    weight = torch.ones(2048)
    broken = x.clone()
    broken[row, 7] = float("nan")
    whole, found = _gradients(x, weight, dy)[0], _gradients(broken, weight, dy)[0]
    assert found[row].isnan().all()
    others = torch.arange(len(x)) != row
    assert torch.equal(found[others], whole[others])


def test_threads_change_nothing() -> None:
    workload = Workload("layer_norm", (3 * ROWS_FLUSHED + 1, 2051), 1)
    inputs, threads, found = draw(workload), torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(run(workload, inputs, "cpu.rows"))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(same_bits(found[0][name], other[name]) for name in found[0])
