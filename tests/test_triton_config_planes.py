"""The choice for units of several planes, config/planes.py: which problems it decides about."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fusednorm.activations import resolve
from fusednorm.backends.hopper import instances as hopper
from fusednorm.backends.triton import instances
from fusednorm.backends.triton.config.planes import BY_SIZE, warps_of_planes
from fusednorm.backends.triton.config.units import held_units
from fusednorm.norm import norm_of
from fusednorm.operands import BackwardOperands, Operands, Sums
from fusednorm.problem import Problem
from fusednorm.problems import backward_problem, forward_problem, sum_forward_problem


def _input(*shape: int, dtype: torch.dtype = torch.bfloat16, last: bool = False) -> torch.Tensor:
    order = torch.channels_last if last else torch.contiguous_format
    return torch.empty(shape, dtype=dtype, device="meta").contiguous(memory_format=order)


def _groups(x: torch.Tensor, groups: int, activation: str | None = None, *, backward: bool = False) -> Problem:
    norm = norm_of("group_norm", groups, activation=resolve(activation))
    return backward_problem(norm, BackwardOperands(x, x, x, x)) if backward else forward_problem(norm, Operands(x))


def _warps(problem: Problem) -> int | None:
    return warps_of_planes(problem, held_units(problem))


@pytest.mark.parametrize("backward", [False, True])
def test_large_groups_of_planes_are_held_though_a_third_of_their_lanes_is_full(
    backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instances, "_common", lambda problem: None)
    problem = _groups(_input(50, 640, 16, 20, dtype=torch.float32), 32, backward=backward)
    seen = held_units(problem)
    assert seen.rows * seen.columns < 0.8 * seen.elements
    assert instances.choose(problem) is instances.HELD
    assert instances.HELD.configs(problem)[0].warps == _warps(problem)


def test_other_rules_decide_about_other_units() -> None:
    large = _input(50, 640, 16, 16)
    assert _warps(_groups(large, 32)) is not None
    assert _warps(_groups(_input(5, 640, 16, 16), 32)) is None, "few bytes"
    assert _warps(_groups(large.double(), 32)) is None, "float64, which was never measured"
    assert _warps(_groups(_input(50, 640, 16, 16, last=True), 32)) is None, "channels_last"
    assert _warps(_groups(_input(50, 640, 4, 5), 32)) is None, "short planes"
    assert _warps(_groups(_input(50, 1600, 8, 8), 16)) is None, "more planes than rows of a tile"
    assert _warps(_groups(_input(50, 640, 16, 17), 32)) is None, "lanes of which two thirds are empty"
    assert _warps(_groups(_input(64, 32, 200, 200), 16)) is None, "units beyond the registers"
    scale = torch.empty(50, 640, device="meta")
    assert _warps(forward_problem(norm_of("group_norm", 32), Operands(large, scale=scale, shift=scale))) is None


def test_sums_around_a_norm_keep_the_choice_that_was_measured_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """(60, 512, 48, 48) alone is held; with a residual, about which these rules do not decide, read once by Hopper."""
    monkeypatch.setattr(instances, "_common", lambda problem: None)
    monkeypatch.setattr(hopper, "unavailable", lambda: None)
    monkeypatch.setattr(hopper, "_elsewhere", lambda problem: None)
    norm, x = norm_of("group_norm", 256, activation=resolve("relu")), _input(60, 512, 48, 48)
    plain = forward_problem(norm, Operands(x))
    added = sum_forward_problem(norm, Operands(x), Sums(pre_add=x), keeps_sum=False)
    assert hopper.choose(plain) is None
    assert instances.choose(plain) is instances.HELD
    assert _warps(added) is None
    assert hopper.choose(added) is hopper.RESIDENT
    assert _warps(replace(added, added=None)) == _warps(plain)


@pytest.mark.parametrize(
    ("shape", "groups", "dtype", "activation", "backward", "expected"),
    [
        ((50, 640, 13, 17), 32, torch.bfloat16, None, False, None),  # loads of one element, of more than 16 planes
        ((50, 384, 13, 17), 32, torch.bfloat16, None, False, 4),
        ((50, 640, 13, 17), 32, torch.bfloat16, None, True, None),
        ((50, 640, 13, 17), 32, torch.float32, None, True, 4),
        ((50, 640, 13, 17), 32, torch.float32, "silu", True, None),
        ((32, 512, 14, 14), 32, torch.float32, "relu", True, BY_SIZE),  # a tile that is three quarters full
        ((133, 800, 24, 24), 100, torch.float16, "leaky_relu", True, None),  # 56 % full, and beyond the L2
        ((64, 768, 22, 24), 64, torch.float16, "relu", False, None),  # 39 % full of 16-byte loads
        ((16, 1280, 16, 16), 32, torch.bfloat16, "silu", True, 8),
        ((64, 512, 28, 28), 32, torch.bfloat16, None, True, 16),
        ((97, 384, 24, 38), 32, torch.bfloat16, "relu", True, 4),
    ],
)
def test_warps_follow_how_loads_and_registers_are_used(
    shape: tuple[int, ...],
    groups: int,
    dtype: torch.dtype,
    activation: str | None,
    backward: bool,
    expected: int | None,
) -> None:
    assert _warps(_groups(_input(*shape, dtype=dtype), groups, activation, backward=backward)) == expected
