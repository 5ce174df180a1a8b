"""batch_norm of points, (N, C), with a scale or a shift of their own, on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cpu_support import backward, faults, forward, run, same_bits

from fusednorm.backends.cpu.instances import SLABS_SPLIT
from fusednorm.backends.cpu.plans.slabs import PointsBackward, PointsForward
from fusednorm.bench.workloads import EPS, Workload, draw
from fusednorm.operands import BackwardOperands, Operands
from fusednorm.problems import backward_problem, forward_problem

#: Rows of several points, two tiles of channels, several slabs; samples of few positions, which slabs do not part, even
#: where equal slabs would.
SHAPES = ((70, 5), (21, 600), (300, 33), (2, 4), (9, 600, 3, 1), (170, 33, 7), (1001, 33, 7))


@pytest.mark.parametrize(
    ("dtype", "activation", "parameter_dtype"),
    [("float32", None, None), ("float16", "silu", "float32"), ("bfloat16", None, None), ("float64", None, None)],
)
def test_points(dtype: str, activation: str | None, parameter_dtype: str | None) -> None:
    for shape in SHAPES:
        workload = Workload(
            "batch_norm", shape, 0, dtype, "nchw" if len(shape) == 2 else "nhwc", activation, modulated=True,
            weight_dtype=parameter_dtype,
        )  # fmt: skip
        inputs = draw(workload)
        assert faults(workload, inputs, run(workload, inputs, "cpu.slabs_split")) == []


@pytest.mark.parametrize("absent", [("scale",), ("shift",), ("weight", "bias"), ("weight", "bias", "shift")])
def test_absent_parameters(absent: tuple[str, ...]) -> None:
    workload = Workload("batch_norm", (70, 33), 0, modulated=True)
    inputs = replace(draw(workload), **dict.fromkeys(absent))
    assert faults(workload, inputs, run(workload, inputs, "cpu.slabs_split")) == []


def test_given_statistics() -> None:
    workload = Workload("batch_norm", (70, 33), 0, modulated=True, training=False)
    inputs = draw(workload)
    assert faults(workload, inputs, forward(workload, inputs, "cpu.slabs_split"), "inference") == []
    assert inputs.mean is not None
    assert inputs.var is not None
    results: Any = {"mean": inputs.mean, "rstd": (inputs.var + EPS).rsqrt()}
    results |= backward(workload, inputs, results["mean"], results["rstd"], "cpu.slabs_split")
    assert faults(workload, inputs, results, "backward") == []


def test_threads_change_nothing() -> None:
    workload = Workload("batch_norm", (9000, 70), 0, modulated=True)
    inputs, found, threads = draw(workload), [], torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(run(workload, inputs, "cpu.slabs_split"))
    finally:
        torch.set_num_threads(threads)
    assert all(same_bits(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize(
    ("shape", "points"),
    [((20, 8), True), ((20, 8, 1), True), ((20, 8, 2), False), ((20, 17, 2), True), ((3, 17, 65), False)],
)
def test_which_problems_are_points(shape: tuple[int, ...], points: bool) -> None:
    x, scale = torch.empty(shape).contiguous(), torch.empty(shape[:2])
    if len(shape) == 3:
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    norm = Workload("batch_norm", shape, 0).norm
    ahead = forward_problem(norm, Operands(x, scale=scale))
    back = backward_problem(norm, BackwardOperands(x, x, scale[0], scale[0], scale=scale))
    assert isinstance(SLABS_SPLIT.plan(ahead), PointsForward) == points
    assert isinstance(SLABS_SPLIT.plan(back), PointsBackward) == points
