"""Rows of short groups on the CPU, which blocks of groups take: those of 2-D inputs, and of layer_norm."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cpu_support import faults, run, same_bits

import fusednorm
from fusednorm.backends.cpu.instances import ROWS
from fusednorm.backends.cpu.plans.rows import ShortRowsBackward, ShortRowsForward
from fusednorm.bench.operations import problem_of_workload
from fusednorm.bench.workloads import Workload, draw
from fusednorm.operands import Operands
from fusednorm.problems import forward_problem

#: Of (family, shape, groups): a block of several rows, the last of fewer; rows of several blocks; groups of more than a
#: vector; several segments of more than FLUSH blocks; more rows of several blocks than are taken together.
CASES: tuple[tuple[Any, tuple[int, ...], int], ...] = (
    ("group_norm", (70, 6), 2),
    ("group_norm", (5, 1400), 175),
    ("group_norm", (9, 1020), 51),
    ("group_norm", (70000, 3), 1),
    ("group_norm", (75, 800), 100),
    ("layer_norm", (300, 5), 1),
    ("rms_norm", (300, 7), 1),
    ("group_norm", (1, 4), 2),
)


@pytest.mark.parametrize(
    ("dtype", "activation", "parameter_dtype"),
    [("float32", None, None), ("float16", "silu", "float32"), ("bfloat16", None, None), ("float64", "relu", None)],
)
def test_short_groups(dtype: str, activation: str | None, parameter_dtype: str | None) -> None:
    for family, shape, groups in CASES:
        for modulated in (False, True) if family == "group_norm" else (False,):
            workload = Workload(
                family, shape, groups, dtype, activation=activation, modulated=modulated, weight_dtype=parameter_dtype
            )
            inputs = draw(workload)
            assert faults(workload, inputs, run(workload, inputs, "cpu.rows")) == []


@pytest.mark.parametrize("init", ["offset", "large", "zeros"])
def test_values(init: Any) -> None:
    workload = Workload("group_norm", (500, 21), 7)
    inputs = draw(workload, init)
    assert faults(workload, inputs, run(workload, inputs, "cpu.rows")) == []


@pytest.mark.parametrize("absent", [("scale",), ("shift",), ("weight", "bias"), ("weight", "bias", "shift")])
def test_absent_parameters(absent: tuple[str, ...]) -> None:
    workload = Workload("group_norm", (70, 33), 11, modulated=True)
    inputs = replace(draw(workload), **dict.fromkeys(absent))
    assert faults(workload, inputs, run(workload, inputs, "cpu.rows")) == []


@pytest.mark.parametrize("modulated", [False, True])
def test_threads_change_nothing(modulated: bool) -> None:
    workload = Workload("group_norm", (9000, 70), 7, modulated=modulated)
    inputs, found, threads = draw(workload), [], torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(run(workload, inputs, "cpu.rows"))
    finally:
        torch.set_num_threads(threads)
    assert all(same_bits(found[0][name], found[1][name]) for name in found[0])


def test_a_group_with_nan_and_infinity_leaves_the_others_alone() -> None:
    x = torch.randn(40, 12)
    expected = torch.nn.functional.group_norm(x, 4)
    x[3, 4], x[8, 0] = float("nan"), float("inf")
    found = fusednorm.group_norm(x, 4)
    bad = torch.zeros(40, 4, 3, dtype=torch.bool)
    bad[3, 1] = bad[8, 0] = True
    assert found.reshape(40, 4, 3)[bad].isnan().all()
    torch.testing.assert_close(found.reshape(40, 4, 3)[~bad], expected.reshape(40, 4, 3)[~bad])


@pytest.mark.parametrize(
    ("shape", "groups", "activation", "short"),
    [
        ((50, 40), 2, None, True),
        ((50, 42), 2, None, False),
        ((50, 62), 2, "relu", False),
        ((50, 62), 2, "silu", True),
        ((50, 64), 2, "silu", False),
    ],
)
def test_which_groups_are_short(shape: tuple[int, ...], groups: int, activation: str | None, short: bool) -> None:
    workload = Workload("group_norm", shape, groups, activation=activation)
    inputs = draw(workload)
    assert isinstance(ROWS.plan(problem_of_workload("forward", workload, inputs)), ShortRowsForward) == short
    assert isinstance(ROWS.plan(problem_of_workload("backward", workload, inputs)), ShortRowsBackward) == short


def test_rows_with_gaps_are_taken_one_by_one() -> None:
    norm, x = Workload("group_norm", (50, 6), 2).norm, torch.randn(50, 8)[:, :6]
    assert not isinstance(ROWS.plan(forward_problem(norm, Operands(x))), ShortRowsForward)
    torch.testing.assert_close(fusednorm.group_norm(x, 2), torch.nn.functional.group_norm(x, 2))
