"""Rows each with a scale and a shift of its own, (N, C) of group_norm and its siblings, on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cpu_support import faults, run, same_bits

import fusednorm
from fusednorm.backends.cpu.instances import ROWS
from fusednorm.backends.cpu.plans.rows import PointRowsBackward, PointRowsForward
from fusednorm.bench.workloads import Workload, draw
from fusednorm.operands import BackwardOperands, Operands
from fusednorm.problems import backward_problem, forward_problem

#: Groups and shapes: a row of a few groups; of two tiles and a part of one; of one group; segments of more rows than
#: are summed in the compute dtype; one row.
SHAPES = ((3, (70, 99)), (1, (21, 1100)), (2, (9, 1040)), (1, (5000, 33)), (1, (1, 40)))


@pytest.mark.parametrize(
    ("dtype", "activation", "parameter_dtype"),
    [
        ("float32", None, None),
        ("float32", "gelu", "bfloat16"),
        ("float16", "silu", "float32"),
        ("bfloat16", None, None),
        ("bfloat16", "silu", None),
        ("float64", "relu", None),
    ],
)
def test_point_rows(dtype: str, activation: str | None, parameter_dtype: str | None) -> None:
    for groups, shape in SHAPES:
        workload = Workload(
            "group_norm", shape, groups, dtype, activation=activation, modulated=True, weight_dtype=parameter_dtype
        )
        inputs = draw(workload)
        assert faults(workload, inputs, run(workload, inputs, "cpu.rows")) == []


@pytest.mark.parametrize("absent", [("scale",), ("shift",), ("weight", "bias"), ("weight", "bias", "shift")])
def test_absent_parameters(absent: tuple[str, ...]) -> None:
    workload = Workload("group_norm", (70, 600), 1, "bfloat16", "nchw", "silu", modulated=True)
    inputs = replace(draw(workload), **dict.fromkeys(absent))
    assert faults(workload, inputs, run(workload, inputs, "cpu.rows")) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["layer_norm", "rms_norm"])
def test_each_gradient_alone_is_that_of_all(dtype: torch.dtype, family: str) -> None:
    """A gradient that nobody wants changes the way that the others are made."""
    generator = torch.Generator().manual_seed(0)
    x, scale, shift = (torch.randn(37, 700, generator=generator).to(dtype) for _ in range(3))
    weight = torch.randn(700, generator=generator).to(dtype)
    grad = torch.randn(37, 700, generator=generator).to(dtype)
    norm: Any = getattr(fusednorm, family)

    def gradients(wanted: tuple[str, ...]) -> dict[str, torch.Tensor]:
        tensors = {"x": x, "weight": weight, "scale": scale, "shift": shift}
        given = {name: tensor.clone().requires_grad_(name in wanted) for name, tensor in tensors.items()}
        y = norm(given["x"], (700,), given["weight"], eps=1e-5, scale=given["scale"], shift=given["shift"])
        return dict(zip(wanted, torch.autograd.grad(y, [given[name] for name in wanted], grad), strict=True))

    together = gradients(("x", "weight", "scale", "shift"))
    own: Any = getattr(torch.nn.functional, family)
    wide = [tensor.double().requires_grad_() for tensor in (x, weight, scale, shift)]
    y = own(wide[0], (700,), wide[1], eps=1e-5) * (1 + wide[2]) + wide[3]
    for expected, (name, gradient) in zip(torch.autograd.grad(y, wide, grad.double()), together.items(), strict=True):
        torch.testing.assert_close(gradient, expected.to(dtype), msg=name)
    for name, gradient in together.items():
        torch.testing.assert_close(gradients((name,))[name], gradient, msg=name)


def test_rows_that_lie_apart() -> None:
    generator = torch.Generator().manual_seed(0)
    room = torch.randn(40, 900, generator=generator)
    x, scale = room[:, 100:800], torch.randn(40, 700, generator=generator)
    found = fusednorm.layer_norm(x, (700,), scale=scale, activation="silu")
    assert same_bits(found, fusednorm.layer_norm(x.contiguous(), (700,), scale=scale, activation="silu"))


def test_threads_change_nothing() -> None:
    workload = Workload("group_norm", (3000, 160), 4, activation="silu", modulated=True)
    inputs, found, threads = draw(workload), [], torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(run(workload, inputs, "cpu.rows"))
    finally:
        torch.set_num_threads(threads)
    assert all(same_bits(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize(("shape", "groups", "points"), [((20, 64), 1, True), ((20, 64), 32, False)])
def test_which_problems_are_rows_of_points(shape: tuple[int, ...], groups: int, points: bool) -> None:
    """Not short groups, which are taken by blocks."""
    x, scale = torch.empty(shape), torch.empty(20, 64)
    norm = Workload("group_norm", shape, groups).norm
    ahead = forward_problem(norm, Operands(x, scale=scale))
    back = backward_problem(norm, BackwardOperands(x, x, scale[0], scale[0], scale=scale))
    assert isinstance(ROWS.plan(ahead), PointRowsForward) == points
    assert isinstance(ROWS.plan(back), PointRowsBackward) == points


def test_rows_that_share_a_scale() -> None:
    """Are no points: of four positions each the gradient of scale sums four rows."""
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(20, 4, 64, generator=generator) for _ in range(2))
    scale = torch.randn(20, 1, 64, generator=generator).requires_grad_()
    expected = torch.nn.functional.layer_norm(x, (64,)) * grad
    (found,) = torch.autograd.grad(fusednorm.layer_norm(x, (64,), scale=scale), scale, grad)
    torch.testing.assert_close(found, expected.sum(1, keepdim=True))
