"""Units in registers, triton.whole and triton.held: pure functions of the problem."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton_config_support import group_norms, problems_of

from fusednorm.activations import resolve
from fusednorm.backends.triton import instances
from fusednorm.backends.triton.config.held import held_for
from fusednorm.backends.triton.config.holding import holding_pays
from fusednorm.backends.triton.config.kinds import (
    ColumnsBackwardConfig,
    HeldConfig,
    PassConfig,
    RowsBackwardConfig,
    StepsConfig,
    TilesConfig,
    WholeConfig,
)
from fusednorm.backends.triton.config.units import MOST_HELD, held_units, pivots
from fusednorm.backends.triton.config.whole import whole_forward_for
from fusednorm.backends.triton.plans.whole import Units
from fusednorm.backends.triton.runs import (
    power_of_two,
)
from fusednorm.norm import Family, norm_of
from fusednorm.operands import BackwardOperands, Operands, Sums
from fusednorm.problems import backward_problem, forward_problem, sum_backward_problem, sum_forward_problem


@pytest.mark.parametrize(
    ("family", "groups", "last", "expected"),
    [  # samples, units of a sample, rows, columns, the axis of weight and bias, strides of sample, unit and row
        ("group_norm", 4, False, (6, 4, 3, 35, 1, (420, 105, 35))),
        ("group_norm", 4, True, (6, 4, 35, 3, 2, (420, 3, 12))),
        ("instance_norm", 0, False, (6, 12, 1, 35, 0, (420, 35, 0))),
        ("instance_norm", 0, True, (6, 12, 35, 1, 0, (420, 1, 12))),
        ("batch_norm", 0, False, (1, 12, 6, 35, 0, (0, 35, 420))),
        ("batch_norm", 0, True, (1, 12, 210, 1, 0, (420, 1, 12))),
    ],
)
def test_units_as_rows_of_columns(family: Family, groups: int, last: bool, expected: tuple[Any, ...]) -> None:
    for problem in problems_of(family, groups, (6, 12, 5, 7), last):
        seen = held_units(problem)
        assert seen is not None
        found = (seen.samples, seen.in_sample, seen.rows, seen.columns, seen.affine, seen.steps(seen.input))
        assert found == expected
        assert seen.units == problem.num_statistics
        assert seen.contiguous == (seen.columns == 1)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    ("family", "groups", "shape", "held"),
    [
        ("batch_norm", 0, (56, 16, 1, 1), True),
        ("batch_norm", 0, (32, 256, 8, 8), True),
        ("instance_norm", 0, (12, 2260, 7, 7), True),
        ("group_norm", 32, (8, 512, 16, 16), True),
        ("group_norm", 32, (64, 512, 8, 8), True),
        ("batch_norm", 0, (128, 2048, 7, 7), False),
        ("group_norm", 32, (2, 320, 128, 128), False),
    ],
)
def test_units_are_held_where_they_are_small(
    family: Family, groups: int, shape: tuple[int, ...], held: bool, last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instances, "_common", lambda problem: None)
    for problem in problems_of(family, groups, shape, last):
        chosen = instances.choose(problem)
        assert (chosen is not instances.TILES) == held or chosen is instances.WHOLE
        if chosen is instances.HELD:
            seen = held_units(problem)
            assert seen is not None
            config = held_for(problem, seen)
            assert config.units == power_of_two(config.units)
            assert config.units * seen.elements <= MOST_HELD
            assert 1 <= config.warps <= 16
            assert not (config.all_samples and problem.direction == "forward")


def test_batch_norm_is_not_held_where_its_statistics_are_given() -> None:
    given = forward_problem(norm_of("batch_norm", training=False), Operands(torch.empty(4, 8, 5, 5, device="meta")))
    assert instances.HELD.supports(given) is not None


def test_the_positions_of_channels_last_lie_apart_where_samples_differ_or_do_not_follow_one_another() -> None:
    x, scale = torch.empty(4, 8, 5, 6, device="meta"), torch.empty(4, 8, device="meta")
    last = x.contiguous(memory_format=torch.channels_last)
    seen = held_units(forward_problem(norm_of("batch_norm"), Operands(last, scale=scale)))
    assert (seen.apart, seen.contiguous, seen.affine, seen.rows, seen.columns) == (True, True, 3, 4, 30)
    assert seen.steps(seen.input) == (8, 1, 240)
    gaps = torch.empty(8, 8, 5, 6, device="meta").contiguous(memory_format=torch.channels_last)[::2]
    seen = held_units(forward_problem(norm_of("batch_norm"), Operands(gaps)))
    assert (seen.apart, seen.contiguous, seen.affine, seen.rows, seen.columns) == (True, True, 0, 4, 30)
    seen = held_units(forward_problem(norm_of("batch_norm"), Operands(last)))
    assert (seen.apart, seen.rows, seen.columns) == (False, 120, 1)


@pytest.mark.parametrize(
    ("shape", "dtype", "names", "units", "warps"),
    [
        ((2, 960, 5), torch.float16, ("held", "held"), 4, (1, 1)),
        ((4, 192, 3, 3), torch.float32, ("held", "held"), 4, (4, 4)),
        ((8, 512, 7, 7), torch.float16, ("held", "held"), 4, (4, 4)),
        ((64, 512, 4, 4), torch.float32, ("held", "held"), 8, (4, 8)),
        ((32, 128, 8, 8), torch.float32, ("tiles", "tiles"), 2, (8, 8)),
        ((7, 2, 16, 16), torch.bfloat16, ("held", "held"), 1, (8, 8)),
        ((12, 3, 8, 8), torch.float32, ("held", "held"), 1, (4, 4)),
        ((6, 64, 14, 14), torch.float16, ("held", "tiles"), 2, (8, 8)),
        ((16, 6, 16, 16), torch.bfloat16, ("tiles", "tiles"), 1, (8, 8)),
        ((64, 2048, 4, 4), torch.float16, ("tiles", "tiles"), 8, (4, 8)),
    ],
)
def test_channels_whose_positions_lie_apart_are_held_where_they_are_short(
    shape: tuple[int, ...], dtype: torch.dtype, names: tuple[str, str], units: int, warps: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(instances, "_common", lambda problem: None)
    x = torch.empty(shape, dtype=dtype, device="meta").movedim(1, -1).contiguous().movedim(-1, 1)
    scale, rstd = torch.empty(shape[:2], device="meta"), torch.empty(shape[1], device="meta")
    norm = norm_of("batch_norm")
    forward = forward_problem(norm, Operands(x, scale=scale))
    backward = backward_problem(norm, BackwardOperands(x, x, rstd, rstd, scale=scale))
    for problem, name, many in zip((forward, backward), names, warps, strict=True):
        assert instances.choose(problem).name == f"triton.{name}"
        config = held_for(problem, held_units(problem))
        assert (config.units, config.warps) == (units, many)


def test_the_samples_of_batch_norm_may_have_a_scale_of_their_own() -> None:
    for shape in ((4, 8, 5, 5), (4, 8)):
        x, scale = torch.empty(shape, device="meta"), torch.empty(4, 8, device="meta")
        seen = held_units(forward_problem(norm_of("batch_norm"), Operands(x, scale=scale)))
        assert seen is not None
        assert (seen.affine, seen.across, seen.units, seen.rows) == (3, "sample", 8, 4)


@pytest.mark.parametrize(
    ("family", "groups", "shape", "dtype", "last", "names"),
    [
        ("instance_norm", 0, (51, 19, 80, 128), torch.float32, False, ("whole", "held")),
        ("instance_norm", 0, (64, 512, 11, 11), torch.float16, False, ("whole", "held")),
        ("instance_norm", 0, (43, 64, 95, 95), torch.bfloat16, False, ("tiles", "tiles")),
        ("instance_norm", 0, (25, 64, 160, 160), torch.float32, False, ("whole", "rows")),
        ("instance_norm", 0, (119, 32, 56, 56), torch.float32, True, ("tiles", "tiles")),
        ("group_norm", 32, (16, 640, 13, 13), torch.bfloat16, False, ("whole", "tiles")),
        ("group_norm", 32, (57, 512, 32, 32), torch.bfloat16, False, ("held", "held")),
        ("group_norm", 32, (16, 640, 24, 24), torch.bfloat16, False, ("tiles", "tiles")),
        ("group_norm", 32, (29389, 192), torch.bfloat16, False, ("whole", "held")),
        ("batch_norm", 0, (16, 256, 28, 28), torch.bfloat16, False, ("held", "held")),
        ("batch_norm", 0, (3044, 2), torch.float16, False, ("held", "held")),
        ("batch_norm", 0, (13, 21, 29, 29), torch.bfloat16, False, ("held", "tiles")),
        ("batch_norm", 0, (76, 1, 9, 9), torch.float16, True, ("held", "held")),
        ("group_norm", 32, (43, 768, 3, 3), torch.bfloat16, False, ("whole", "held")),
        ("group_norm", 128, (12, 2048, 1, 3), torch.float32, False, ("held", "held")),
        ("layer_norm", 1, (20, 464), torch.bfloat16, False, ("whole", "held")),
        ("instance_norm", 0, (25, 64, 160, 160), torch.bfloat16, False, ("whole", "rows")),
        ("instance_norm", 0, (25, 64, 132, 132), torch.bfloat16, False, ("rows", "rows")),  # half of a block
        ("instance_norm", 0, (25, 64, 132, 132), torch.float32, False, ("whole", "rows")),
        ("instance_norm", 0, (25, 64, 106, 106), torch.bfloat16, False, ("whole", "rows")),
        ("instance_norm", 0, (25, 64, 48, 48), torch.bfloat16, False, ("whole", "held")),
        ("instance_norm", 0, (28, 619, 48, 87), torch.float16, False, ("whole", "held")),
        ("instance_norm", 0, (9, 43, 141, 143), torch.float32, False, ("rows", "rows")),
        ("instance_norm", 0, (9, 43, 141, 143), torch.float16, False, ("tiles", "tiles")),
        ("instance_norm", 0, (25, 64, 200, 200), torch.float16, False, ("tiles", "rows")),  # more than a block
        ("instance_norm", 0, (25, 64, 201, 202), torch.float32, False, ("tiles", "rows")),
        ("instance_norm", 0, (25, 64, 201, 202), torch.float16, False, ("tiles", "tiles")),  # loads of 4 bytes
        ("instance_norm", 0, (128, 384, 12, 12), torch.bfloat16, False, ("whole", "held")),
        ("instance_norm", 0, (128, 384, 12, 12), torch.bfloat16, True, ("held", "held")),
        ("instance_norm", 0, (20, 512, 17, 17), torch.float16, True, ("held", "held")),
        ("instance_norm", 0, (32, 512, 257, 1), torch.float16, True, ("held", "tiles")),
        ("group_norm", 14, (55, 1946, 32, 1), torch.float16, True, ("held", "held")),
        ("group_norm", 10, (20, 300, 17, 17), torch.bfloat16, True, ("held", "held")),
        ("group_norm", 10, (20, 310, 17, 17), torch.float32, True, ("held", "tiles")),
        ("group_norm", 32, (15, 128, 47, 56), torch.bfloat16, True, ("tiles", "tiles")),  # rows of 16 bytes
        ("group_norm", 32, (8, 128, 62, 64), torch.bfloat16, True, ("tiles", "tiles")),
        ("group_norm", 32, (20, 128, 40, 40), torch.bfloat16, True, ("held", "tiles")),
        ("group_norm", 32, (8, 64, 40, 40), torch.bfloat16, True, ("held", "held")),  # a small problem
        ("group_norm", 41, (3, 123, 50, 50), torch.float16, True, ("held", "tiles")),  # 3 channels of 4 lanes
        ("group_norm", 20, (6, 100, 30, 30), torch.float16, True, ("held", "tiles")),
        ("group_norm", 32, (16, 320, 32, 32), torch.bfloat16, True, ("tiles", "tiles")),  # 10 channels of 16 lanes
        ("group_norm", 2, (3, 534, 24, 1), torch.bfloat16, False, ("held", "tiles")),
        ("group_norm", 32, (24, 320, 20, 20), torch.bfloat16, True, ("tiles", "tiles")),
        ("group_norm", 32, (1, 960, 415, 1), torch.float16, False, ("tiles", "tiles")),
        ("group_norm", 32, (1, 1280, 160, 1), torch.float32, False, ("tiles", "tiles")),
        ("group_norm", 1, (1, 768, 3, 3), torch.float16, False, ("whole", "tiles")),
        ("group_norm", 4, (1, 32, 1023, 1), torch.float16, False, ("held", "tiles")),  # long planes
        ("instance_norm", 0, (1, 300, 48, 87), torch.float16, False, ("whole", "held")),  # one sample
        ("group_norm", 2, (2, 512, 5, 5), torch.bfloat16, False, ("whole", "tiles")),
        ("instance_norm", 0, (25, 64, 95, 95), torch.bfloat16, False, ("tiles", "tiles")),  # loads of one element
        ("instance_norm", 0, (1, 8, 150, 150), torch.float32, False, ("tiles", "tiles")),  # few planes
        ("instance_norm", 0, (4, 16, 132, 132), torch.bfloat16, False, ("tiles", "tiles")),
        ("instance_norm", 0, (25, 64, 512, 512), torch.bfloat16, False, ("tiles", "tiles")),  # long ones
    ],
)
def test_instances_of_units_of_middle_size(
    family: Family, groups: int, shape: tuple[int, ...], dtype: torch.dtype, last: bool, names: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(instances, "_common", lambda problem: None)
    memory = torch.channels_last if last else torch.contiguous_format
    x, norm = torch.empty(shape, dtype=dtype, device="meta", memory_format=memory), norm_of(family, groups)
    problems = forward_problem(norm, Operands(x)), backward_problem(norm, BackwardOperands(x, x, x, x))
    assert tuple(instances.choose(problem).name for problem in problems) == tuple(f"triton.{name}" for name in names)


@pytest.mark.parametrize(
    ("side", "activation", "name"),
    [(132, "silu", "rows"), (170, None, "whole"), (170, "relu", "whole"), (170, "silu", "tiles"), (200, None, "tiles")],
)
def test_instances_of_long_planes(
    side: int, activation: str | None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An activation that computes needs the registers in which a program would hold a plane."""
    monkeypatch.setattr(instances, "_common", lambda problem: None)
    x = torch.empty(25, 64, side, side, dtype=torch.bfloat16, device="meta")
    problem = forward_problem(norm_of("instance_norm", activation=activation), Operands(x))
    assert instances.choose(problem).name == f"triton.{name}"


@pytest.mark.parametrize(("shape", "groups"), [((137, 287), 1), ((2, 1024), 1), ((5, 76), 4), ((24, 2, 7), 1)])
def test_a_small_problem_has_few_elements_a_thread(shape: tuple[int, ...], groups: int) -> None:
    forward, backward = problems_of("group_norm", groups, shape)
    block, config = power_of_two(forward.reduced), whole_forward_for(forward)
    assert config.warps <= 8
    assert config.units * block <= 32 * config.warps * (16 if config.warps == 1 else 8)
    for problem in (forward, backward):
        seen = held_units(problem)
        assert seen is not None
        held = held_for(problem, seen)
        assert held.warps <= 8
        assert held.units * seen.elements <= 32 * held.warps * 16


@pytest.mark.parametrize(
    ("shape", "dtype", "units", "warps"),
    [
        ((200, 200), torch.float32, 1, 1),  # a warp to a row, whose sums then wait for no other warp
        ((2, 483), torch.float16, 1, 4),  # the narrow loads of few rows are spread
        ((4, 128), torch.bfloat16, 4, 4),
        ((43, 73), torch.bfloat16, 1, 1),
        ((1000, 128), torch.bfloat16, 4, 4),
        ((32768, 256), torch.bfloat16, 8, 2),  # full: two warps have wider runs of memory
        ((22790, 158), torch.float32, 4, 1),
        ((3, 1024), torch.float32, 1, 4),
        ((9, 5355), torch.bfloat16, 1, 8),
        ((14000, 75), torch.bfloat16, 8, 1),  # the lanes of two warps would lie along one row
    ],
)
def test_rows_of_a_program(shape: tuple[int, int], dtype: torch.dtype, units: int, warps: int) -> None:
    problem = forward_problem(norm_of("layer_norm", 1), Operands(torch.empty(shape, dtype=dtype, device="meta")))
    assert whole_forward_for(problem) == WholeConfig(units, warps)


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last], ids=str)
def test_samples_of_an_only_channel_are_one_row(memory: torch.memory_format) -> None:
    x = torch.empty(54, 1, 3, 3, device="meta").contiguous(memory_format=memory)
    for problem in (
        forward_problem(norm_of("batch_norm"), Operands(x)),
        backward_problem(norm_of("batch_norm"), BackwardOperands(x, x, x[0], x[0])),
    ):
        seen = held_units(problem)
        assert seen is not None
        assert (seen.rows, seen.columns) == (1, 486)


def test_large_channels_of_modulated_samples_are_not_held() -> None:
    for spatial, held in ((25, True), (175, False)):
        x, scale = torch.empty(38, 64, spatial, device="meta"), torch.empty(38, 64, device="meta")
        problem = forward_problem(norm_of("batch_norm"), Operands(x, scale=scale))
        seen = held_units(problem)
        assert seen is not None
        assert holding_pays(problem, seen) == held


def test_one_program_has_all_samples_of_a_small_channel() -> None:
    for samples, alone in ((5, True), (64, False)):
        _, problem = problems_of("instance_norm", 0, (samples, 24, 16, 16))
        seen = held_units(problem)
        assert seen is not None
        assert held_for(problem, seen).all_samples == alone


@pytest.mark.parametrize(
    ("family", "groups", "shape", "dtype", "config"),
    [
        ("group_norm", 32, (26, 2560, 1, 3), torch.float16, HeldConfig(2, 1)),  # a thread has a channel's positions
        ("group_norm", 32, (1, 512, 16, 16), torch.float32, HeldConfig(1, 4)),
        ("group_norm", 32, (64, 96, 6, 6), torch.float16, HeldConfig(4, 2)),
        ("group_norm", 8, (2, 64, 8, 8), torch.bfloat16, HeldConfig(2, 8, True)),  # one launch
        ("instance_norm", 0, (20, 756, 5, 5), torch.float32, HeldConfig(16, 1)),  # 64 bytes of each row
        ("instance_norm", 0, (2, 128, 16, 16), torch.bfloat16, HeldConfig(8, 4)),
        ("instance_norm", 0, (4, 64, 4, 4), torch.bfloat16, HeldConfig(4, 1, True)),
    ],
)
def test_the_backward_of_small_units_of_channels_last(
    family: Family, groups: int, shape: tuple[int, ...], dtype: torch.dtype, config: HeldConfig
) -> None:
    x = torch.empty(shape, dtype=dtype, device="meta").to(memory_format=torch.channels_last)
    problem = backward_problem(norm_of(family, groups), BackwardOperands(x, x, x, x))
    seen = held_units(problem)
    assert seen is not None
    assert held_for(problem, seen) == config


@pytest.mark.parametrize(
    ("shape", "dtype", "config"),
    [
        ((95, 320, 3, 3), torch.float16, HeldConfig(64, 1)),  # a thread sums its units alone
        ((92, 690, 32, 8), torch.float32, HeldConfig(32, 8)),  # 128 bytes of each row
    ],
)
def test_the_forward_of_many_units_of_channels_last(
    shape: tuple[int, ...], dtype: torch.dtype, config: HeldConfig
) -> None:
    problem, _ = problems_of("instance_norm", 0, shape, True, dtype)
    seen = held_units(problem)
    assert seen is not None
    assert held_for(problem, seen) == config


@pytest.mark.parametrize(
    ("shape", "activation", "config"),
    [
        ((25, 45, 71, 71), "relu", HeldConfig(1, 8)),
        ((25, 45, 71, 71), "silu", HeldConfig(1, 8)),
        ((21, 96, 7871), "silu", HeldConfig(1, 16)),
        ((35, 768, 9, 15), "relu", HeldConfig(4, 1)),
        ((3, 96, 23, 23, 23), None, None),
        ((16, 180, 12795), "relu", None),
    ],
)
def test_the_backward_of_odd_planes(shape: tuple[int, ...], activation: str | None, config: HeldConfig | None) -> None:
    """Up to 8192 elements are held, of few of which a thread has more; longer planes go in tiles."""
    x = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    norm = norm_of("instance_norm", activation=resolve(activation))
    problem = backward_problem(norm, BackwardOperands(x, x, x, x))
    seen = held_units(problem)
    assert seen is not None
    assert (held_for(problem, seen) if holding_pays(problem, seen) else None) == config


@pytest.mark.parametrize(
    ("norm", "groups", "shape", "dtype", "last", "activation", "modulated", "config"),
    [
        ("batch_norm", 0, (14, 569, 925), torch.bfloat16, False, "relu", False, None),
        ("batch_norm", 0, (107, 639, 117), torch.bfloat16, False, "relu", False, None),
        ("batch_norm", 0, (5, 2048, 15, 15), torch.bfloat16, False, None, False, HeldConfig(1, 2)),
        ("batch_norm", 0, (30, 2560, 99), torch.bfloat16, False, "silu", False, HeldConfig(1, 4)),
        ("group_norm", 32, (58, 128, 4019), torch.bfloat16, False, None, False, None),
        ("group_norm", 32, (63, 256, 1845), torch.float16, False, "silu", False, None),
        ("group_norm", 32, (155, 1024, 63), torch.bfloat16, False, "relu", False, HeldConfig(1, 4)),
        ("group_norm", 32, (77, 2048, 63), torch.bfloat16, False, None, True, None),
        ("group_norm", 32, (75, 1280, 3, 3, 3), torch.float16, False, "silu", False, HeldConfig(1, 4)),
        ("group_norm", 32, (26, 320, 11, 7, 5), torch.float32, False, None, True, HeldConfig(1, 8)),
        ("group_norm", 555, (28, 1665, 125, 1), torch.bfloat16, True, "gelu_tanh", False, HeldConfig(4, 4)),
        ("group_norm", 641, (20, 1282, 24, 24), torch.bfloat16, True, None, True, None),
        ("group_norm", 27, (83, 27, 112, 8), torch.float16, True, "silu", False, None),
    ],
)
def test_the_backward_of_units_that_were_measured(
    norm: Family, groups: int, shape: tuple[int, ...], dtype: torch.dtype, last: bool, activation: str | None,
    modulated: bool, config: HeldConfig | None,
) -> None:  # fmt: skip
    x = torch.empty(shape, dtype=dtype, device="meta")
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    scale = torch.empty(shape[:2], dtype=dtype, device="meta") if modulated else None
    weight = torch.empty(shape[1], dtype=dtype, device="meta")
    given = BackwardOperands(x, x, x, x, weight, weight, scale, scale)
    problem = backward_problem(norm_of(norm, groups, activation=resolve(activation)), given)
    seen = held_units(problem)
    assert seen is not None
    assert (held_for(problem, seen) if holding_pays(problem, seen) else None) == config


@pytest.mark.parametrize(
    ("shape", "config"), [((1, 1607, 11), HeldConfig(16, 4)), ((1, 400, 11, 11), HeldConfig(1, 1))]
)
def test_the_backward_of_small_units_of_one_sample(shape: tuple[int, ...], config: HeldConfig) -> None:
    _, problem = problems_of("instance_norm", 0, shape)
    seen = held_units(problem)
    assert seen is not None
    assert held_for(problem, seen) == config


@pytest.mark.parametrize(
    ("shape", "last", "forward", "backward"),
    [
        ((18, 700, 21, 21), False, True, True),
        ((24, 300, 25, 25), False, True, False),  # 16 elements of two tensors a thread
        ((64, 200, 15, 15), False, False, False),  # samples enough for tiles of spread planes
        ((128, 100, 11, 11), False, True, True),
        ((2, 6, 73, 73), True, False, False),  # a program would read all channels and keep one
        ((2, 60, 9, 9), True, True, True),
    ],
)
def test_batch_norms_of_odd_planes_are_held(shape: tuple[int, ...], last: bool, forward: bool, backward: bool) -> None:
    for problem, held in zip(problems_of("batch_norm", 0, shape, last), (forward, backward), strict=True):
        seen = held_units(problem)
        assert seen is not None
        assert holding_pays(problem, seen) == held


@pytest.mark.parametrize(
    ("family", "shape", "config"),
    [
        ("layer_norm", (50000, 1200), WholeConfig(1, 2)),
        ("rms_norm", (50000, 1200), WholeConfig(1, 4)),
        ("layer_norm", (50000, 1024), WholeConfig(1, 2)),
        ("layer_norm", (182913, 736), WholeConfig(1, 1)),
        ("layer_norm", (1105136, 228), WholeConfig(4, 1)),
        ("rms_norm", (1105136, 228), WholeConfig(8, 2)),
        ("layer_norm", (1105136, 232), WholeConfig(8, 2)),
    ],
)
def test_rows_with_a_mean_that_fill_no_tile_have_few_warps(
    family: Family, shape: tuple[int, int], config: WholeConfig
) -> None:
    problem, _ = problems_of(family, 1, shape)
    assert whole_forward_for(problem) == config


@pytest.mark.parametrize(
    ("shape", "groups", "steps"),
    [
        ((65536, 768), 32, 125),
        ((20000, 320), 32, 19),
        ((65536, 301), 7, 55),
        ((65536, 768, 2), 32, 1),
        ((500, 4096), 32, 1),
        ((3000, 64), 32, 1),
    ],
)
def test_a_backward_of_many_points_walks_over_them(shape: tuple[int, ...], groups: int, steps: int) -> None:
    _, problem = problems_of("group_norm", groups, shape)
    units = held_units(problem)
    assert units is not None
    config = held_for(problem, units)
    assert config.steps == steps
    if steps > 1:
        assert holding_pays(problem, units)
        listed = instances.HELD.configs(problem)
        assert config in listed
        assert {one.stages for one in listed if one.steps > 1} == {1, 3}
        assert len({(one.units, one.samples) for one in listed if one.steps > 1 and one.warps == 1}) > 3
        assert len({one.units for one in listed if one.steps > 1}) > 1  # rows of two lengths
        assert config.samples * config.steps * (-(-shape[0] // (config.samples * config.steps))) >= shape[0]


def test_groups_of_channels_last_with_more_than_their_input_are_fewer_in_a_program() -> None:
    """A thread has the elements of three tensors, or the scale and shift of each sample."""
    x = torch.empty(16, 128, 40, 40, dtype=torch.bfloat16, device="meta").contiguous(memory_format=torch.channels_last)
    norm = norm_of("group_norm", 32)
    for problem, units in (
        (forward_problem(norm, Operands(x)), 4),
        (sum_forward_problem(norm, Operands(x), Sums(x), False), 2),
        (forward_problem(norm, Operands(x, scale=x[:, :, 0, 0], shift=x[:, :, 0, 0])), 2),
    ):
        assert held_for(problem, held_units(problem)).units == units


def test_groups_whose_rows_are_short_because_of_their_scale_and_shift_go_in_tiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(instances, "_common", lambda problem: None)
    x = torch.empty(8, 256, 40, 44, dtype=torch.bfloat16, device="meta").contiguous(memory_format=torch.channels_last)
    norm, scale = norm_of("group_norm", 32), x[:, :, 0, 0]
    assert instances.choose(forward_problem(norm, Operands(x))) is instances.HELD
    assert instances.choose(forward_problem(norm, Operands(x, scale=scale, shift=scale))) is instances.TILES


@pytest.mark.parametrize(
    ("shape", "groups", "dtype", "modulated", "config"),
    [
        ((20000, 189), 9, torch.float32, False, HeldConfig(2, 1, samples=2, steps=12, stages=1)),  # a warp alone
        ((20000, 96), 32, torch.bfloat16, True, HeldConfig(8, 1, samples=2, steps=10, stages=1)),
        ((50000, 63), 7, torch.bfloat16, False, HeldConfig(1, 1, samples=4, steps=21, stages=1)),  # single elements
        ((40000, 63), 9, torch.bfloat16, False, HeldConfig(2, 1, samples=4, steps=12, stages=1)),
        ((30000, 75), 25, torch.bfloat16, False, HeldConfig(4, 1, samples=4, steps=13, stages=1)),
        ((30000, 33), 11, torch.float32, False, HeldConfig(4, 1, samples=4, steps=6, stages=1)),
        ((30000, 77), 7, torch.float32, False, HeldConfig(1, 1, samples=4, steps=13, stages=1)),
        ((20000, 65), 13, torch.bfloat16, True, HeldConfig(4, 1, samples=2, steps=10, stages=1)),
        ((40000, 120), 8, torch.float32, True, HeldConfig(1, 1, samples=4, steps=38, stages=1)),
        ((40000, 81), 9, torch.bfloat16, True, HeldConfig(4, 1, samples=1, steps=29, stages=1)),
        ((65536, 81), 9, torch.float32, True, HeldConfig(1, 1, samples=4, steps=71, stages=1)),
        ((6059, 578), 17, torch.bfloat16, True, HeldConfig(1, 1, samples=1, steps=25, stages=1)),  # pairs
        ((700, 4999), 1, torch.float32, True, HeldConfig(1, 16, samples=1, steps=6, stages=1)),  # on 4 warps spills
        ((700, 4999), 1, torch.bfloat16, True, HeldConfig(1, 16, samples=1, steps=11, stages=3)),
        ((20000, 300), 30, torch.bfloat16, False, HeldConfig(2, 1, samples=4, steps=18, stages=1)),
        ((65536, 64), 32, torch.float16, False, HeldConfig(32, 2, samples=16, steps=8, stages=3)),
        ((2000, 1000), 5, torch.float32, True, HeldConfig(1, 4, samples=4, steps=10, stages=3)),  # 62 % of four units
        ((9000, 308), 11, torch.float32, True, HeldConfig(4, 4, samples=8, steps=13, stages=3)),
    ],
)
def test_the_walks_that_were_measured(
    shape: tuple[int, ...], groups: int, dtype: torch.dtype, modulated: bool, config: HeldConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(instances, "_common", lambda problem: None)
    x = torch.empty(shape, dtype=dtype, device="meta")
    scale = x if modulated else None
    problem = backward_problem(norm_of("group_norm", groups), BackwardOperands(x, x, x, x, scale=scale, shift=scale))
    assert held_for(problem, held_units(problem)) == config
    assert instances.choose(problem) is instances.HELD


def test_large_units_of_narrow_loads_are_not_held() -> None:
    x = torch.empty(40, 591, 15, 3, dtype=torch.float16, device="meta")
    problem = forward_problem(norm_of("group_norm", 3), Operands(x, scale=x[:, :, 0, 0], shift=x[:, :, 0, 0]))
    units = held_units(problem)
    assert units is not None
    assert not holding_pays(problem, units)


def test_short_units_with_parameters_of_their_own_are_fewer_in_a_program() -> None:
    problem, _ = problems_of("instance_norm", 0, (200, 64, 9, 9))
    assert whole_forward_for(problem) == WholeConfig(4, 1)


@pytest.mark.parametrize(
    ("shape", "groups", "dtype", "units"),
    [
        ((24, 64, 21, 21), 32, torch.float16, 8),
        ((16, 128, 16, 16), 32, torch.bfloat16, 4),
        ((40, 64, 15, 15), 16, torch.float32, 2),
        ((2, 96, 32, 32), 32, torch.float16, 1),  # so few programs would each have much to do
        ((64, 105, 12, 12), 21, torch.float16, 1),  # 3 of 8 lanes have no channel
        ((16, 96, 14, 14), 32, torch.bfloat16, 4),
    ],
)
def test_groups_of_a_few_channels_are_together_in_channels_last(
    shape: tuple[int, ...], groups: int, dtype: torch.dtype, units: int
) -> None:
    problem, _ = group_norms(shape, groups, dtype, True)
    seen = held_units(problem)
    assert seen is not None
    assert holding_pays(problem, seen)
    assert held_for(problem, seen).units == units


@pytest.mark.parametrize(
    ("shape", "groups", "forward", "backward"),
    [
        ((2, 640, 17, 17), 40, True, True),
        ((17, 640, 13, 3), 4, True, False),  # a unit to a multiprocessor
        ((16, 640, 17, 17), 40, True, False),
        ((16, 480, 24, 24), 32, False, False),
        ((50, 48, 28, 28), 16, False, False),  # tiles have wide loads, groups of 3 channels have none
    ],
)
def test_units_of_few_lanes_are_held_even_where_they_do_not_fill_them(
    shape: tuple[int, ...], groups: int, forward: bool, backward: bool
) -> None:
    for problem, held in zip(group_norms(shape, groups, torch.bfloat16, True), (forward, backward), strict=True):
        seen = held_units(problem)
        assert seen is not None
        assert holding_pays(problem, seen) == held


def test_units_follow_one_another_only_where_every_stride_says_so() -> None:
    x, images = torch.empty(6, 48, device="meta"), torch.empty(6, 8, 12, device="meta")
    for given, groups, packed in (
        (x, 1, True), (x[:, :24], 1, False), (x[::2], 1, False), (x[:1, :24], 1, True),
        (images, 4, True), (images[:, :4], 2, False), (images[:1, :4], 2, True),
    ):  # fmt: skip
        problem = forward_problem(norm_of("group_norm", groups), Operands(given))
        assert Units(problem, WholeConfig(1, 1)).tile["PACKED"] == packed


@pytest.mark.parametrize(
    ("shape", "block"),
    [
        ((10, 64, 9, 9), (0, 1024)),
        ((8, 64, 5, 5), (8, 32)),  # as full with two axes
        ((10, 64, 9, 10), (16, 128)),  # two elements to a load
    ],
)
def test_rows_of_odd_lengths_lie_along_one_axis(shape: tuple[int, ...], block: tuple[int, int]) -> None:
    seen = held_units(forward_problem(norm_of("batch_norm"), Operands(torch.empty(shape, device="meta"))))
    assert seen is not None
    assert seen.block == block


@pytest.mark.parametrize(
    ("shape", "modulated", "held"),
    [
        ((10, 16, 45, 16), False, True),
        ((12, 640, 33, 20), False, False),  # half of a tile of a large problem would be empty
        ((8, 1280, 43, 15), True, True),
        ((16, 512, 30, 30), True, False),  # 32 elements a thread, and each sample's scale and shift
    ],
)
def test_channels_of_all_samples_are_held_where_they_fill_tiles(
    shape: tuple[int, ...], modulated: bool, held: bool
) -> None:
    x = torch.empty(shape, dtype=torch.float32, device="meta")
    scale = torch.empty(shape[:2], device="meta") if modulated else None
    problem = forward_problem(norm_of("batch_norm"), Operands(x, scale=scale, shift=scale))
    seen = held_units(problem)
    assert seen is not None
    assert holding_pays(problem, seen) == held


def test_points_of_few_channels_are_held_and_not_walked_over() -> None:
    for channels, walked in ((11, False), (24, False), (32, True), (768, True)):
        _, problem = problems_of("group_norm", 1, (65536, channels))
        seen = held_units(problem)
        assert seen is not None
        assert (held_for(problem, seen).steps > 1) == walked


@pytest.mark.parametrize(("channels", "dtype", "elements"), [(1280, torch.bfloat16, 16), (1280, torch.float32, 16)])
def test_odd_planes_by_single_elements_are_of_few_warps(channels: int, dtype: torch.dtype, elements: int) -> None:
    x = torch.empty(34, channels, 679, dtype=dtype, device="meta")
    problem = backward_problem(norm_of("instance_norm"), BackwardOperands(x, x, x, x))
    seen = held_units(problem)
    assert seen is not None
    config = held_for(problem, seen)
    assert config.units * seen.elements == 32 * config.warps * elements


@pytest.mark.parametrize(
    ("shape", "dtype", "name", "units", "warps"),
    [
        ((16, 100, 5, 5), torch.float32, "held", 8, 4), ((10, 325, 3, 3), torch.float32, "held", 16, 4),
        ((1, 512, 5, 5), torch.float16, "held", 8, 4), ((128, 320, 9), torch.bfloat16, "whole", 32, 1),
        ((100, 40, 2, 2), torch.float32, "whole", 128, 4),
    ],
)  # fmt: skip
def test_a_few_short_odd_planes_are_held_two_elements_to_a_thread(
    shape: tuple[int, ...], dtype: torch.dtype, name: str, units: int, warps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instances, "_common", lambda problem: None)
    x = torch.empty(shape, dtype=dtype, device="meta")
    problem = forward_problem(norm_of("instance_norm"), Operands(x))
    chosen = instances.choose(problem)
    config = chosen.configs(problem)[0]
    assert (chosen.name, config.units, config.warps) == (f"triton.{name}", units, warps)


@pytest.mark.parametrize(
    ("rows", "length", "dtype", "units"),
    [(581, 73, torch.bfloat16, 2), (3904, 75, torch.float16, 4), (300, 77, torch.float16, 1),
     (2000, 99, torch.float32, 2), (1000, 95, torch.float32, 2), (4000, 125, torch.float16, 4)],
)  # fmt: skip
def test_short_rows_of_single_elements_are_of_one_warp(rows: int, length: int, dtype: torch.dtype, units: int) -> None:
    x = torch.empty(rows, length, dtype=dtype, device="meta")
    config = whole_forward_for(forward_problem(norm_of("layer_norm", 1), Operands(x)))
    assert (config.units, config.warps) == (units, 1)


@pytest.mark.parametrize(
    ("shape", "dtype", "units", "warps"),
    [
        ((5, 768, 8, 8), torch.float16, 2, 4), ((8, 700, 6, 6), torch.bfloat16, 2, 4),
        ((7, 1000, 7, 7), torch.bfloat16, 1, 2), ((4, 640, 8, 8), torch.float32, 1, 1),
        ((2, 1177, 11), torch.float32, 8, 4), ((4, 900, 7), torch.bfloat16, 8, 2),
    ],
)  # fmt: skip
def test_the_units_of_a_small_batch_norm(shape: tuple[int, ...], dtype: torch.dtype, units: int, warps: int) -> None:
    problem = forward_problem(norm_of("batch_norm"), Operands(torch.empty(shape, dtype=dtype, device="meta")))
    seen = held_units(problem)
    assert seen is not None
    config = held_for(problem, seen)
    assert (config.units, config.warps) == (units, warps)


def test_the_shortest_units_in_fp32_are_two_elements_a_thread() -> None:
    config = whole_forward_for(problems_of("group_norm", 1800, (6, 1800, 1, 3, 3), dtype=torch.float32)[0])
    assert (config.units, config.warps) == (16, 4)


def test_a_smooth_activation_leaves_partials_of_each_sample_sooner() -> None:
    for activation, together in (("relu", True), ("silu", False)):
        x = torch.empty(20, 11, 61, dtype=torch.float16, device="meta")
        norm = norm_of("instance_norm", activation=resolve(activation))
        problem = backward_problem(norm, BackwardOperands(x, x, x, x))
        seen = held_units(problem)
        assert seen is not None
        assert held_for(problem, seen).all_samples == together


def test_long_planes_with_sums_around_their_backward_go_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instances, "_elsewhere", lambda problem: None)
    x = torch.empty(28, 64, 64, 87, dtype=torch.float16, device="meta")
    operands = BackwardOperands(x, x, x, x)
    norm = norm_of("instance_norm", activation=resolve("silu"))
    alone = backward_problem(norm, operands)
    assert instances.choose(alone) is instances.ROWS
    assert type(instances.ROWS.plan(alone)).__name__ == "PlaneRowsBackward"
    summed = sum_backward_problem(norm, operands, "backward", x, grad_sum=True)
    assert instances.ROWS.supports(summed) is None
    assert isinstance(instances.ROWS.configs(summed)[0], TilesConfig)
    assert type(instances.ROWS.plan(summed)).__name__ == "TilesSumBackward"


@pytest.mark.parametrize(
    ("shape", "dtype", "activation", "expected"),
    [
        ((8, 64, 130, 130), torch.bfloat16, None, StepsConfig(4096, 8)),
        ((8, 64, 101, 112), torch.bfloat16, None, StepsConfig(2048, 8)),
        ((28, 45, 59, 512), torch.float16, None, StepsConfig(8192, 8)),
        ((28, 45, 59, 512), torch.float32, None, StepsConfig(16384, 16)),
        ((28, 45, 59, 512), torch.float64, None, StepsConfig(2048, 8)),
        ((4, 200, 211, 212), torch.float16, None, StepsConfig(16384, 16)),
        ((9, 43, 141, 143), torch.float32, None, StepsConfig(4096, 8)),  # single loads
        ((16, 100, 100, 100), torch.float32, "silu", StepsConfig(4096, 16)),
        ((40, 100, 64, 80), torch.float32, "silu", StepsConfig(2048, 8)),
        ((40, 100, 64, 80), torch.float32, "relu", HeldConfig(1, 16)),
        ((8, 500, 79, 103), torch.float32, "silu", HeldConfig(1, 16)),  # single loads
        ((2, 100, 64, 80), torch.float32, "silu", HeldConfig(1, 16)),  # few planes
    ],
)
def test_the_backward_of_large_planes_reads_them_in_steps_that_the_l2_holds(
    shape: tuple[int, ...], dtype: torch.dtype, activation: str | None, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instances, "_common", lambda problem: None)
    x = torch.empty(shape, dtype=dtype, device="meta")
    norm = norm_of("instance_norm", activation=resolve(activation))
    problem = backward_problem(norm, BackwardOperands(x, x, x, x))
    assert instances.choose(problem).configs(problem)[0] == expected


@pytest.mark.parametrize(
    ("called", "shape", "dtype", "last", "direction", "expected"),
    [
        (("batch_norm", 0, None, False), (20, 1280, 3, 3), torch.float16, False, "forward", HeldConfig(4, 4)),
        (("batch_norm", 0, None, False), (16, 512, 5, 5), torch.bfloat16, False, "backward", HeldConfig(1, 1)),
        (("batch_norm", 0, None, True), (40, 1000, 4, 4), torch.float16, False, "forward", HeldConfig(2, 4)),
        (("batch_norm", 0, None, True), (40, 1000, 4, 4), torch.float16, False, "backward", HeldConfig(2, 8)),
        (("batch_norm", 0, None, True), (122, 384, 3, 5), torch.float16, False, "backward", HeldConfig(2, 8)),
        (("batch_norm", 0, None, True), (100, 500, 2, 4), torch.bfloat16, False, "backward", HeldConfig(4, 16)),
        (("batch_norm", 0, None, True), (30, 1000, 5, 5), torch.bfloat16, False, "backward", HeldConfig(4, 4)),
        (("batch_norm", 0, "silu", True), (16, 2000, 3, 5), torch.float16, False, "backward", HeldConfig(4, 8)),
        (("batch_norm", 0, None, True), (16, 1000, 2, 4), torch.float32, False, "backward", HeldConfig(4, 4)),
        (("batch_norm", 0, None, True), (84, 96, 5), torch.bfloat16, False, "backward", HeldConfig(1, 8)),
        (("batch_norm", 0, None, True), (250, 40, 4, 4), torch.bfloat16, False, "backward", HeldConfig(1, 8)),
        (("batch_norm", 0, "silu", True), (1, 196, 49, 13), torch.bfloat16, False, "backward", HeldConfig(1, 8)),
        (("batch_norm", 0, None, False), (128, 500, 2, 2), torch.bfloat16, False, "backward", HeldConfig(8, 8)),
        (("batch_norm", 0, "relu", False), (128, 500, 2, 2), torch.bfloat16, False, "forward", HeldConfig(8, 8)),
        (("batch_norm", 0, None, False), (40, 300, 2, 4), torch.float16, False, "backward", HeldConfig(4, 8)),
        (("batch_norm", 0, None, False), (100, 700, 4, 4), torch.bfloat16, False, "backward", HeldConfig(2, 8)),
        (("batch_norm", 0, None, False), (20, 500, 3, 3), torch.bfloat16, False, "backward", HeldConfig(2, 2)),
        (("batch_norm", 0, "silu", False), (105, 96, 1, 3), torch.bfloat16, False, "backward", HeldConfig(2, 4)),
        (("batch_norm", 0, None, False), (3, 1500, 45), torch.bfloat16, False, "backward", HeldConfig(1, 1)),
        (("batch_norm", 0, None, False), (4, 5000, 5, 9), torch.bfloat16, False, "backward", HeldConfig(2, 1)),
        (("batch_norm", 0, None, False), (2, 3000, 7, 9), torch.float16, False, "backward", HeldConfig(2, 1)),
        (("batch_norm", 0, "silu", False), (4, 1343, 5, 5), torch.float32, False, "backward", HeldConfig(8, 8)),
        (("instance_norm", 0, "silu", False), (30, 10, 9, 9), torch.bfloat16, False, "backward", HeldConfig(1, 1)),
        (("instance_norm", 0, "gelu", False), (10, 8, 19, 19), torch.float32, False, "backward", HeldConfig(1, 4)),
        (("instance_norm", 0, None, False), (40, 3, 11, 11), torch.float32, False, "backward", HeldConfig(1, 1)),
        (("instance_norm", 0, "gelu", False), (12, 24, 12, 12), torch.bfloat16, False, "backward", HeldConfig(1, 1)),
        (("instance_norm", 0, None, False), (126, 32, 8, 8), torch.float32, False, "backward", HeldConfig(4, 1)),
        (("instance_norm", 0, "gelu", False), (80, 40, 3, 9), torch.bfloat16, False, "backward", HeldConfig(4, 2)),
        (("batch_norm", 0, None, True), (98, 2560, 3, 3), torch.float16, False, "forward", HeldConfig(1, 4)),
        (("batch_norm", 0, "silu", False), (35, 45), torch.bfloat16, False, "backward", HeldConfig(2, 1)),
        (("instance_norm", 0, "relu", False), (13, 1280, 3, 3), torch.float32, True, "forward", HeldConfig(16, 1)),
        (("instance_norm", 0, None, False), (10, 512, 5, 5), torch.float16, True, "forward", HeldConfig(16, 1)),
        (("instance_norm", 0, "silu", False), (20, 512, 7, 7), torch.float32, True, "backward", HeldConfig(16, 4)),
        (("instance_norm", 0, "silu", False), (2, 2048, 3, 3), torch.float16, True, "backward", HeldConfig(8, 1)),
        (("instance_norm", 0, "silu", False), (4, 600, 3, 3), torch.bfloat16, True, "forward", HeldConfig(8, 1)),
        (("batch_norm", 0, None, False), (20, 5000), torch.float16, False, "backward", HeldConfig(32, 8)),
        (("batch_norm", 0, "silu", False), (200, 45), torch.bfloat16, False, "backward", HeldConfig(4, 4)),
        (("batch_norm", 0, "silu", False), (35, 65), torch.bfloat16, False, "backward", HeldConfig(4, 1)),
        (("layer_norm", 1, None, False), (50000, 25), torch.bfloat16, False, "forward", WholeConfig(16, 1)),
        (("instance_norm", 0, None, False), (3000, 3, 2, 2), torch.float16, True, "backward", HeldConfig(4, 1)),
        (("instance_norm", 0, "gelu", True), (8, 272, 707, 1), torch.float32, True, "forward", HeldConfig(8, 8)),
        (("instance_norm", 0, "silu", True), (15, 62, 688, 1), torch.float16, True, "backward", HeldConfig(8, 8)),
        (("instance_norm", 0, None, False), (50, 2560, 5, 5), torch.float16, False, "forward", WholeConfig(8, 1)),
        (("group_norm", 32, None, False), (4, 128, 24, 24), torch.bfloat16, True, "forward", HeldConfig(4, 16)),
        (("group_norm", 32, None, False), (16, 128, 40, 40), torch.bfloat16, True, "forward", HeldConfig(4, 16)),
        (("group_norm", 32, None, False), (10, 192, 30, 30), torch.bfloat16, True, "forward", HeldConfig(4, 16)),
        (("instance_norm", 0, None, False), (20, 1111, 5, 9), torch.float32, True, "forward", HeldConfig(16, 2)),
        (("instance_norm", 0, None, False), (20, 512, 12, 6), torch.bfloat16, True, "backward", HeldConfig(16, 2)),
        (("instance_norm", 0, None, False), (20, 512, 17, 17), torch.float16, True, "backward", HeldConfig(16, 4)),
        (("group_norm", 14, None, True), (55, 1946, 32, 1), torch.float16, True, "forward", HeldConfig(1, 4)),
        (("group_norm", 14, None, True), (55, 1946, 32, 1), torch.float16, True, "backward", HeldConfig(1, 8)),
        (("group_norm", 10, "gelu", False), (64, 100, 10, 10), torch.bfloat16, True, "backward", HeldConfig(1, 4)),
        (("group_norm", 10, None, False), (8, 310, 16, 29),
         torch.float32, True, "backward", TilesConfig(PassConfig(64, 8, 8, 2, stages=3), PassConfig(128, 16))),
        (("group_norm", 25, None, False), (30, 250, 11, 11), torch.float16, True, "forward", HeldConfig(1, 4)),
        (("group_norm", 32, None, True), (3, 960, 415, 1), torch.float16, False, "forward", HeldConfig(1, 8)),
        (("rms_norm", 1, "gelu", False), (6, 122), torch.bfloat16, False, "backward", HeldConfig(8, 8, True)),
        (("rms_norm", 1, "gelu", False), (8, 64), torch.bfloat16, False, "backward", HeldConfig(8, 4, True)),
        (("rms_norm", 1, None, False), (8, 64), torch.bfloat16, False, "backward", HeldConfig(8, 2, True)),
        (("rms_norm", 1, "gelu", False), (6, 250), torch.bfloat16, False, "backward", HeldConfig(8, 8, True)),
        (("layer_norm", 1, None, False), (21, 101), torch.float16, False, "backward", HeldConfig(1, 4)),
        (("instance_norm", 0, None, False), (69, 17, 19, 5), torch.bfloat16, False, "forward", WholeConfig(2, 1)),
        (("group_norm", 32, None, False), (40000, 96), torch.float16, False, "forward", WholeConfig(128, 4)),
        (("group_norm", 1, None, False), (1, 768, 3, 3), torch.float16, False, "forward", WholeConfig(1, 16)),
        (("rms_norm", 1, "silu", False), (13978, 763), torch.float32, False, "forward", WholeConfig(1, 4)),
        (("instance_norm", 0, "relu", False), (28, 99, 48, 87), torch.float16, False, "backward", StepsConfig(1024, 4)),
        (("instance_norm", 0, None, True), (1, 1804, 3, 3), torch.float32, False, "backward", HeldConfig(16, 8)),
        (("group_norm", 256, None, False), (33, 768, 16, 47), torch.bfloat16, False, "forward", HeldConfig(1, 4)),
        (("group_norm", 64, None, False), (60, 192, 24, 24), torch.bfloat16, False, "forward", HeldConfig(1, 2)),
        (("group_norm", 100, "silu", False), (30, 300, 33, 33), torch.bfloat16, False, "forward", HeldConfig(1, 4)),
        (("group_norm", 64, None, False), (50, 448, 7, 7), torch.float32, False, "forward", HeldConfig(1, 1)),
        (("group_norm", 64, None, False), (50, 448, 7, 7), torch.float32, False, "backward", HeldConfig(1, 1)),
        (("group_norm", 64, "relu", False), (30, 512, 7, 7), torch.float32, False, "backward", HeldConfig(1, 1)),
        (("group_norm", 160, None, False), (64, 640, 7, 7), torch.bfloat16, False, "forward", HeldConfig(2, 1)),
        (("group_norm", 128, None, False), (40, 512, 5, 5), torch.float32, False, "forward", HeldConfig(2, 1)),
        (("batch_norm", 0, None, True), (288, 43), torch.bfloat16, False, "backward", HeldConfig(1, 1)),
        (("batch_norm", 0, None, False), (1660, 384), torch.float16, False, "backward", HeldConfig(8, 8)),
        (("batch_norm", 0, None, False), (1000, 100), torch.float32, False, "forward", HeldConfig(2, 8)),
        (("batch_norm", 0, None, True), (1000, 128), torch.float16, False, "forward", HeldConfig(4, 8)),
        (("batch_norm", 0, None, False), (43, 170, 7, 1), torch.float32, True, "backward", HeldConfig(4, 8)),
        (("batch_norm", 0, None, False), (2, 2132, 5, 9), torch.bfloat16, False, "forward", HeldConfig(2, 1)),
        (("batch_norm", 0, "leaky_relu", False), (19, 16, 1, 3), torch.float32, False, "backward", HeldConfig(1, 1)),
        (("instance_norm", 0, "silu", False), (8, 640, 16, 16), torch.bfloat16, False, "forward", WholeConfig(4, 4)),
        (("layer_norm", 1, None, False), (3666, 768), torch.float16, False, "forward", WholeConfig(2, 2)),
        (("layer_norm", 1, "gelu", False), (20000, 768), torch.float32, False, "forward", WholeConfig(1, 2)),
        (("layer_norm", 1, "silu", False), (9000, 768), torch.float32, False, "forward", WholeConfig(1, 4)),
        (("layer_norm", 1, "gelu", False), (5000, 1024), torch.float32, False, "forward", WholeConfig(1, 4)),
        (("layer_norm", 1, "gelu", False), (12000, 768), torch.bfloat16, False, "forward", WholeConfig(1, 1)),
        (("group_norm", 4, None, False), (50, 1000, 19),
         torch.float16, False, "backward", TilesConfig(PassConfig(32, 32), PassConfig(64, 16, warps=2))),
        (("layer_norm", 1, "gelu_tanh", False), (15271, 713), torch.bfloat16, False, "forward", WholeConfig(1, 1)),
        (("layer_norm", 1, None, False), (5, 82), torch.float32, False, "forward", WholeConfig(1, 1)),
        (("group_norm", 103, "relu", False), (581, 206), torch.float16, False, "backward", HeldConfig(64, 2)),
        (("group_norm", 128, "gelu", False), (200, 640), torch.bfloat16, False, "backward", HeldConfig(16, 2)),
        (("group_norm", 40, None, False), (400, 200), torch.float16, False, "backward", HeldConfig(16, 2)),
        (("group_norm", 32, "silu", False), (479, 192), torch.bfloat16, False, "backward", HeldConfig(16, 2)),
        (("group_norm", 25, "silu", False), (333, 175), torch.float32, False, "backward", HeldConfig(16, 2)),
        (("group_norm", 16, "gelu", False), (259, 96), torch.float16, False, "backward", HeldConfig(16, 2)),
        (("layer_norm", 1, "relu", False), (140, 36864), torch.float32, False, "forward", StepsConfig(4096, 16)),
        (("instance_norm", 0, "silu", True), (47, 699, 3, 3), torch.float16, False, "backward", HeldConfig(16, 2)),
        (("group_norm", 16, None, True), (300, 144), torch.float16, False, "backward", HeldConfig(8, 2)),
        (("instance_norm", 0, None, False), (72, 768, 33, 33), torch.bfloat16, False, "backward", HeldConfig(1, 2)),
        (("group_norm", 16, None, False), (200, 336), torch.bfloat16, False, "backward", HeldConfig(4, 2)),
        (("instance_norm", 0, "silu", False), (10, 1280, 7, 7), torch.float16, False, "backward", HeldConfig(8, 1)),
        (("group_norm", 291, None, False), (45, 291, 16, 65), torch.float16, False, "backward", HeldConfig(1, 4)),
        (("instance_norm", 0, "silu", False), (37, 168, 560), torch.float16, False, "backward", HeldConfig(1, 2)),
        (("group_norm", 10, "silu", False), (299, 130), torch.bfloat16, False, "backward", HeldConfig(8, 2)),
        (("instance_norm", 0, "gelu_tanh", False), (60, 256, 17, 17),
         torch.bfloat16, False, "backward", HeldConfig(2, 2)),
        (("instance_norm", 0, "gelu", False), (9, 700, 521), torch.float16, False, "backward", HeldConfig(1, 2)),
        (("instance_norm", 0, "silu", False), (25, 700, 289), torch.float16, False, "backward", HeldConfig(2, 2)),
        (("layer_norm", 1, None, False), (300, 40000), torch.float32, False, "forward", StepsConfig(16384, 16)),
        (("batch_norm", 0, None, True), (5, 1280), torch.bfloat16, False, "backward", HeldConfig(4, 1)),
        (("instance_norm", 0, None, False), (93, 256, 17, 17), torch.float16, False, "backward", HeldConfig(2, 1)),
        (("instance_norm", 0, None, False), (40, 400, 271), torch.bfloat16, False, "backward", HeldConfig(2, 1)),
        (("instance_norm", 0, None, False), (20, 200, 2209), torch.float16, False, "backward", HeldConfig(1, 4)),
        (("instance_norm", 0, None, False), (15, 320, 1101), torch.float16, False, "backward", HeldConfig(1, 2)),
        (("layer_norm", 1, "silu", False), (8, 128), torch.float16, False, "backward", HeldConfig(2, 2)),
        (("batch_norm", 0, None, True), (17, 96), torch.float32, False, "backward", HeldConfig(2, 1)),
        (("instance_norm", 0, "relu", False), (12, 256, 49, 49), torch.bfloat16, False, "backward", HeldConfig(1, 8)),
        (("rms_norm", 1, None, False), (230, 28672), torch.float32, False, "forward", StepsConfig(8192, 16)),
        (("instance_norm", 0, None, True), (12, 2048, 3, 3), torch.float32, False, "backward", HeldConfig(16, 2)),
        (("instance_norm", 0, "gelu", False), (20, 1536, 3, 3),
         torch.bfloat16, False, "backward", HeldConfig(32, 4, True)),
        (("layer_norm", 1, None, False), (9000, 272), torch.float16, False, "forward", WholeConfig(4, 1)),
        (("batch_norm", 0, "gelu", False), (6, 96, 1, 5), torch.float32, False, "backward", HeldConfig(2, 1)),
        (("instance_norm", 0, None, False), (31, 589, 64, 95), torch.bfloat16, False, "backward", HeldConfig(1, 8)),
        (("rms_norm", 1, None, False), (250, 33000), torch.float32, False, "forward", StepsConfig(16384, 16)),
        (("layer_norm", 1, None, False), (150, 65536), torch.float32, False, "forward", StepsConfig(4096, 16)),
        (("instance_norm", 0, "silu", False), (8, 2000, 5, 5),
         torch.bfloat16, False, "backward", HeldConfig(8, 2, True)),
        (("rms_norm", 1, "silu", False), (100, 8192), torch.float32, False, "backward", RowsBackwardConfig(2, 16, 132)),
        (("instance_norm", 0, None, False), (9, 128, 67, 67), torch.float16, False, "backward", HeldConfig(1, 8)),
        (("batch_norm", 0, "silu", False), (5, 80, 3, 3), torch.bfloat16, False, "backward", HeldConfig(2, 1)),
        (("instance_norm", 0, "silu", False), (16, 150, 2101), torch.float16, False, "backward", HeldConfig(1, 8)),
        (("layer_norm", 1, "silu", False), (180, 50000), torch.float32, False, "forward", StepsConfig(4096, 16)),
        (("group_norm", 1, "gelu", False), (100, 33, 9), torch.bfloat16, False, "forward", WholeConfig(1, 4)),
        (("group_norm", 20, "silu", False), (100, 1100), torch.float16, False, "backward", HeldConfig(2, 2)),
        (("batch_norm", 0, None, True), (15, 384), torch.bfloat16, False, "backward", HeldConfig(2, 1)),
        (("rms_norm", 1, "silu", False), (2, 36, 463), torch.float16, False, "forward", WholeConfig(1, 4)),
        (("group_norm", 2, "silu", False), (20, 102, 3), torch.bfloat16, False, "forward", WholeConfig(1, 4)),
        (("batch_norm", 0, "leaky_relu", True), (2, 153), torch.float32, False, "backward", HeldConfig(4, 1)),
        (("instance_norm", 0, "leaky_relu", False), (28, 960, 29), torch.float16, False, "backward", HeldConfig(16, 2)),
        (("group_norm", 1, None, False), (34, 67, 3), torch.float32, False, "forward", WholeConfig(1, 1)),
        (("instance_norm", 0, None, True), (107, 320, 5), torch.bfloat16, False, "backward", HeldConfig(128, 8)),
        (("layer_norm", 1, "silu", False), (250, 65536), torch.float16, False, "forward", StepsConfig(8192, 16)),
        (("rms_norm", 1, None, False), (200, 8192),
         torch.float32, False, "backward", RowsBackwardConfig(1, 16, 132, stages=3)),
        (("instance_norm", 0, None, True), (13, 512, 144, 144), torch.float16, False, "forward", StepsConfig(2048, 8)),
        (("batch_norm", 0, "gelu", True), (32, 512), torch.float32, False, "backward", HeldConfig(8, 8)),
        (("layer_norm", 1, "silu", False), (120, 511), torch.float16, False, "forward", WholeConfig(1, 4)),
        (("layer_norm", 1, None, False), (6000, 384), torch.bfloat16, False, "forward", WholeConfig(2, 1)),
        (("rms_norm", 1, None, False), (200, 65536), torch.bfloat16, False, "forward", StepsConfig(16384, 16)),
        (("rms_norm", 1, None, False), (125, 8192), torch.float32, False, "backward", RowsBackwardConfig(2, 16, 132)),
        (("group_norm", 2, "gelu", False), (27, 14, 5, 5), torch.float32, False, "forward", WholeConfig(1, 4)),
        (("batch_norm", 0, "silu", True), (24, 256), torch.float32, False, "backward", HeldConfig(8, 8)),
        (("instance_norm", 0, None, False), (40, 1000, 3, 3), torch.bfloat16, False, "backward", HeldConfig(16, 2)),
        (("rms_norm", 1, None, False), (100, 8192), torch.bfloat16, False, "backward", RowsBackwardConfig(2, 16, 132)),
        (("layer_norm", 1, "gelu", False), (264, 60000), torch.float32, False, "forward", StepsConfig(16384, 16)),
        (("batch_norm", 0, "relu", False), (16, 110, 1, 3), torch.bfloat16, False, "backward", HeldConfig(2, 1)),
        (("layer_norm", 1, None, False), (200, 40960), torch.bfloat16, False, "forward", StepsConfig(8192, 16)),
        (("group_norm", 100, None, False), (505, 1300), torch.bfloat16, False, "backward", HeldConfig(16, 2)),
        (("batch_norm", 0, "silu", True), (8, 640), torch.float16, False, "backward", HeldConfig(4, 1)),
        (("instance_norm", 0, None, False), (16, 2560, 3, 3),
         torch.float32, False, "backward", HeldConfig(16, 2, True)),
        (("group_norm", 8, "silu", False), (16, 40, 5, 7), torch.float32, False, "forward", WholeConfig(1, 4)),
        (("layer_norm", 1, "silu", False), (400, 50000), torch.float32, False, "forward", StepsConfig(16384, 16)),
        (("instance_norm", 0, "silu", True), (18, 384, 9, 31), torch.bfloat16, False, "backward", HeldConfig(2, 2)),
        (("layer_norm", 1, "silu", False), (2, 256), torch.bfloat16, False, "forward", WholeConfig(1, 4)),
        (("rms_norm", 1, None, False), (100, 500), torch.float16, False, "forward", WholeConfig(1, 1)),
        (("rms_norm", 1, "leaky_relu", False), (58, 251), torch.bfloat16, False, "forward", WholeConfig(1, 1)),
        (("rms_norm", 1, "gelu", False), (11, 64), torch.float32, False, "backward", HeldConfig(16, 4, True)),
        (("group_norm", 8, "leaky_relu", False), (10, 512), torch.float32, False, "backward", HeldConfig(16, 4, True)),
        (("group_norm", 33, None, False), (71, 561, 35), torch.bfloat16, False, "forward", WholeConfig(1, 2)),
        (("instance_norm", 0, None, False), (10, 200, 11, 11), torch.float32, False, "forward", WholeConfig(2, 2)),
        (("instance_norm", 0, None, False), (20, 234, 3, 3), torch.float16, True, "forward", HeldConfig(16, 1)),
        (("rms_norm", 1, "leaky_relu", False), (445, 28672), torch.bfloat16, False, "forward", StepsConfig(4096, 8)),
        (("rms_norm", 1, None, False), (76, 7599),
         torch.float32, False, "backward", RowsBackwardConfig(1, 16, 132, stages=3)),
        (("layer_norm", 1, None, False), (5700, 377), torch.float16, False, "forward", WholeConfig(2, 1)),
        (("instance_norm", 0, "relu", False), (28, 619, 48, 87),
         torch.float16, False, "backward", StepsConfig(1024, 4)),
        (("instance_norm", 0, "relu", True), (3, 354, 64, 128), torch.float16, False, "backward", HeldConfig(1, 16)),
        (("instance_norm", 0, None, True), (14, 96, 16, 308), torch.float16, False, "backward", StepsConfig(1024, 4)),
        (("instance_norm", 0, None, False), (14, 96, 16, 308), torch.float16, False, "backward", HeldConfig(1, 4)),
        (("instance_norm", 0, "silu", False), (62, 279, 3, 3),
         torch.float32, False, "backward", HeldConfig(64, 8, True)),
        (("instance_norm", 0, "relu", False), (20, 128, 136, 136),
         torch.float16, False, "forward", StepsConfig(2048, 8)),
        (("instance_norm", 0, None, False), (16, 100, 176, 176), torch.bfloat16, False, "forward", WholeConfig(1, 16)),
        # On an H200:
        (("group_norm", 32, None, True), (14319, 2464), torch.bfloat16, False, "forward", WholeConfig(4, 1)),
        (("group_norm", 16, None, True), (9000, 720), torch.float16, False, "forward", WholeConfig(4, 1)),
        (("group_norm", 32, None, True), (8000, 2048), torch.bfloat16, False, "forward", WholeConfig(8, 1)),
        (("group_norm", 5, None, True), (4000, 2565), torch.bfloat16, False, "forward", WholeConfig(1, 2)),
        (("group_norm", 1, None, False), (55, 6, 24, 28), torch.bfloat16, True, "forward", HeldConfig(1, 16)),
        (("group_norm", 2, None, False), (30, 8, 20, 20), torch.float16, True, "forward", HeldConfig(2, 4)),
        (("instance_norm", 0, None, False), (10, 38, 3, 3), torch.float16, True, "forward", HeldConfig(8, 1)),
        (("instance_norm", 0, "leaky_relu", False), (1, 2560, 7, 5),
         torch.float32, False, "backward", HeldConfig(2, 1)),
        (("instance_norm", 0, None, False), (1, 2048, 10, 10), torch.float32, False, "backward", HeldConfig(2, 1)),
        (("batch_norm", 0, None, False), (16, 2132, 5, 3), torch.float16, False, "forward", HeldConfig(2, 1)),
        (("batch_norm", 0, "relu", False), (30, 1200, 3, 3), torch.float16, False, "forward", HeldConfig(1, 2)),
        (("batch_norm", 0, None, False), (70, 256, 16, 7), torch.bfloat16, False, "backward", HeldConfig(1, 16)),
        (("batch_norm", 0, "silu", False), (70, 256, 16, 7), torch.bfloat16, False, "backward", HeldConfig(1, 16)),
        (("batch_norm", 0, None, False), (40, 600, 10, 10), torch.float32, False, "backward", HeldConfig(1, 16)),
        (("layer_norm", 1, None, False), (65536, 30),
         torch.float32, False, "backward", RowsBackwardConfig(32, 4, 528)),
        (("batch_norm", 0, "relu", False), (9, 132, 272), torch.float32, False, "forward", HeldConfig(1, 8)),
        (("batch_norm", 0, "relu", False), (9, 132, 272), torch.float32, False, "backward", HeldConfig(1, 16)),
        (("batch_norm", 0, None, False), (18, 96, 18, 18), torch.float32, False, "forward", HeldConfig(1, 16)),
        (("batch_norm", 0, "relu", False), (17, 768, 13, 13), torch.float32, False, "backward", HeldConfig(1, 8)),
        (("batch_norm", 0, "silu", False), (25, 700, 11, 11), torch.float32, False, "backward", HeldConfig(1, 8)),
        (("batch_norm", 0, None, True), (89, 1024), torch.bfloat16, False, "backward", HeldConfig(16, 4)),
        (("batch_norm", 0, None, True), (300, 256), torch.bfloat16, False, "backward", HeldConfig(4, 4)),
        (("batch_norm", 0, "relu", True), (420, 128), torch.float16, False, "backward", HeldConfig(4, 4)),
        (("instance_norm", 0, None, False), (12, 2560, 515), torch.float32, False, "forward", WholeConfig(1, 1)),
        (("instance_norm", 0, "relu", False), (9, 256, 7, 3), torch.float32, False, "forward", HeldConfig(8, 4)),
        (("rms_norm", 1, None, False), (5356, 256), torch.float32, False, "forward", WholeConfig(2, 1)),
        (("rms_norm", 1, None, False), (2, 164), torch.float32, False, "backward", RowsBackwardConfig(2, 1, 1)),
        (("layer_norm", 1, None, False), (32768, 62),
         torch.float32, False, "backward", RowsBackwardConfig(32, 4, 528)),
        (("layer_norm", 1, None, False), (65536, 60),
         torch.bfloat16, False, "backward", RowsBackwardConfig(4, 1, 2112, stages=3)),
        (("batch_norm", 0, None, False), (8, 256, 3), torch.float32, False, "forward", HeldConfig(4, 1)),
        (("batch_norm", 0, None, False), (19, 32), torch.float32, False, "forward", HeldConfig(8, 4)),
        (("batch_norm", 0, "silu", False), (40, 1280, 3, 3), torch.bfloat16, False, "forward", HeldConfig(2, 4)),
        (("batch_norm", 0, "gelu_tanh", False), (4, 2560, 16, 17), torch.bfloat16, False, "forward", HeldConfig(1, 2)),
        (("batch_norm", 0, "leaky_relu", False), (5, 12, 32, 32),
         torch.float32, False, "backward", TilesConfig(PassConfig(1, 1024), PassConfig(1, 1024))),
        (("batch_norm", 0, "relu", True), (78, 1895, 5, 5),
         torch.bfloat16, False, "forward", TilesConfig(PassConfig(128, 32), PassConfig(128, 16))),
        (("batch_norm", 0, "relu", True), (78, 1895, 5, 5),
         torch.bfloat16, False, "backward", TilesConfig(PassConfig(32, 16, warps=1), PassConfig(64, 16, warps=2))),
        (("batch_norm", 0, None, True), (100, 768, 9, 9),
         torch.float16, False, "forward", TilesConfig(PassConfig(32, 128, warps=2), PassConfig(16, 128))),
        (("batch_norm", 0, None, True), (29, 2048, 25, 25),
         torch.float16, False, "forward", TilesConfig(PassConfig(4, 1024, warps=1), PassConfig(16, 128, 2))),
        (("batch_norm", 0, None, True), (75, 16, 2077),
         torch.float16, False, "backward", TilesConfig(PassConfig(8, 128, 8, stages=3), PassConfig(16, 128, 2))),
        (("batch_norm", 0, None, False), (41, 1400, 880),
         torch.float32, False, "backward", TilesConfig(PassConfig(1, 1024), PassConfig(1, 1024))),
        (("batch_norm", 0, None, False), (8, 2560, 77, 77),
         torch.float32, False, "forward", TilesConfig(PassConfig(1, 8192), PassConfig(1, 2048, warps=2))),
        (("batch_norm", 0, None, True), (15869, 154),
         torch.float16, False, "backward", TilesConfig(PassConfig(32, 16, 8, stages=3), PassConfig(128, 32, warps=2))),
        (("batch_norm", 0, "leaky_relu", True), (5493, 1910),
         torch.bfloat16, False, "backward", TilesConfig(PassConfig(64, 8, 20, 1, 3), PassConfig(128, 32))),
        (("group_norm", 64, "leaky_relu", False), (2, 768, 11, 1), torch.float32, True, "backward", HeldConfig(1, 1)),
        (("group_norm", 32, "leaky_relu", False), (2, 32, 128, 1), torch.float32, True, "forward", HeldConfig(2, 1)),
        (("group_norm", 3, "leaky_relu", False), (11, 3, 5, 5), torch.float32, False, "forward", WholeConfig(1, 1)),
        (("group_norm", 320, "relu", False), (28, 960, 71), torch.float16, False, "forward", WholeConfig(2, 1)),
        (("group_norm", 1, None, False), (65536, 50), torch.float32, False, "forward", WholeConfig(8, 2)),
        (("group_norm", 15, None, False), (11504, 105), torch.float16, False, "forward", WholeConfig(64, 4)),
        (("group_norm", 16, None, False), (5000, 240), torch.float16, False, "forward", WholeConfig(32, 4)),
        (("group_norm", 32, None, True), (14319, 2464),
         torch.bfloat16, False, "backward", HeldConfig(1, 1, samples=1, steps=109)),
        (("group_norm", 7, "silu", True), (65536, 392),
         torch.bfloat16, False, "backward", HeldConfig(2, 2, samples=8, steps=63)),
        (("group_norm", 32, None, True), (3000, 2560),
         torch.float16, False, "backward", HeldConfig(8, 4, steps=23, stages=3)),
        (("group_norm", 32, None, True), (1000, 640),
         torch.float16, False, "backward", HeldConfig(32, 4, steps=4, stages=3)),
        (("group_norm", 16, "relu", True), (67, 384, 125), torch.bfloat16, False, "forward", WholeConfig(1, 4)),
        (("group_norm", 32, "leaky_relu", True), (31, 2048, 5, 7), torch.float32, False, "forward", WholeConfig(1, 8)),
        (("group_norm", 32, None, True), (40, 1024, 7, 7), torch.float32, False, "forward", WholeConfig(1, 4)),
        (("group_norm", 32, None, False), (10, 960, 343),
         torch.bfloat16, False, "forward", TilesConfig(PassConfig(1, 4096), PassConfig(16, 128, 2))),
        (("group_norm", 3, None, False), (35, 3, 8, 629), torch.bfloat16, True, "forward", HeldConfig(1, 8)),
        (("instance_norm", 0, "gelu_tanh", False), (7, 320, 3), torch.bfloat16, False, "forward", HeldConfig(16, 1)),
        (("instance_norm", 0, "gelu", False), (1, 4, 32, 32), torch.bfloat16, True, "backward", HeldConfig(1, 8)),
        (("instance_norm", 0, None, False), (9, 1, 75, 169),
         torch.float16, True, "backward", TilesConfig(PassConfig(1, 2048), PassConfig(1, 1024, warps=2))),
        (("instance_norm", 0, None, True), (21, 1830, 17, 17),
         torch.float16, True, "backward", TilesConfig(PassConfig(32, 16, 5, 1, 3), PassConfig(128, 32))),
        (("instance_norm", 0, None, False), (1, 4, 224, 224),
         torch.bfloat16, False, "forward", TilesConfig(PassConfig(1, 4096), PassConfig(1, 2048, warps=2))),
        (("instance_norm", 0, "relu", False), (4, 768, 23, 23), torch.bfloat16, True, "forward", HeldConfig(8, 8)),
        (("instance_norm", 0, "gelu", True), (6, 1452, 7, 7), torch.bfloat16, False, "forward", WholeConfig(4, 1)),
        (("instance_norm", 0, "gelu", True), (6, 1452, 7, 7), torch.bfloat16, False, "backward", HeldConfig(4, 1)),
        (("instance_norm", 0, None, False), (73, 256, 27), torch.float16, False, "forward", WholeConfig(16, 4)),
        (("instance_norm", 0, None, False), (20, 384, 15443), torch.float16, False, "backward", StepsConfig(2048, 8)),
        (("instance_norm", 0, None, False), (81, 96, 3, 3), torch.float32, True, "forward", HeldConfig(16, 1)),
        (("instance_norm", 0, None, False), (85, 54, 32, 32), torch.float16, False, "forward", WholeConfig(2, 2)),
        (("layer_norm", 1, "gelu_tanh", False), (13032, 74), torch.bfloat16, False, "forward", WholeConfig(4, 1)),
        (("layer_norm", 1, None, False), (2048, 2048), torch.bfloat16, False, "forward", WholeConfig(1, 2)),
        (("layer_norm", 1, None, False), (8412, 948), torch.float16, False, "forward", WholeConfig(2, 2)),
        (("layer_norm", 1, None, False), (2, 7921),
         torch.float16, False, "backward", ColumnsBackwardConfig(2048, 8, 528, 512, 2, 4)),
        (("layer_norm", 1, None, False), (3150, 3119),
         torch.bfloat16, False, "backward", RowsBackwardConfig(1, 4, 264, 3)),
        (("rms_norm", 1, None, False), (4, 4096), torch.bfloat16, False, "forward", HeldConfig(1, 8)),
        (("rms_norm", 1, None, False), (1, 949), torch.float16, False, "forward", WholeConfig(1, 8)),
        (("rms_norm", 1, None, False), (957, 1024), torch.bfloat16, False, "forward", WholeConfig(1, 4)),
        (("rms_norm", 1, None, False), (2752, 1024), torch.float32, False, "forward", WholeConfig(1, 1)),
        (("rms_norm", 1, None, False), (3762, 512), torch.float32, False, "forward", WholeConfig(1, 1)),
        (("rms_norm", 1, None, False), (3, 2502),
         torch.bfloat16, False, "backward", RowsBackwardConfig(1, 8, 264, reload=True)),
        (("rms_norm", 1, "gelu", False), (924, 10199),
         torch.bfloat16, False, "backward", RowsBackwardConfig(1, 16, 132)),
        (("rms_norm", 1, None, False), (30, 11008), torch.float32, False, "backward", RowsBackwardConfig(1, 16, 132)),
        (("rms_norm", 1, None, False), (9, 11008), torch.float32, False, "backward", RowsBackwardConfig(1, 16, 132)),
        (("rms_norm", 1, None, False), (6, 16384),
         torch.float32, False, "backward", ColumnsBackwardConfig(2048, 8, 528, 512, 1, 4)),
        (("rms_norm", 1, "relu", False), (4, 8192),
         torch.float16, False, "backward", ColumnsBackwardConfig(2048, 8, 528, 512, 4, 4)),
        (("group_norm", 32, "relu", False), (1, 960, 1), torch.bfloat16, False, "forward", WholeConfig(16, 4)),
        (("layer_norm", 1, "silu", False), (1, 29662),
         torch.float16, False, "forward", TilesConfig(PassConfig(1, 4096), PassConfig(2048, 1, warps=8))),
        (("batch_norm", 0, "gelu", False), (6, 662, 9, 9), torch.float32, False, "backward", HeldConfig(1, 4)),
        (("batch_norm", 0, "gelu", True), (294, 768), torch.bfloat16, False, "backward", HeldConfig(8, 8)),
        (("batch_norm", 0, "silu", True), (4000, 1024),
         torch.bfloat16, False, "backward", TilesConfig(PassConfig(64, 16, 10, 2, 3), PassConfig(128, 32))),
        (("batch_norm", 0, None, True), (8000, 512),
         torch.float16, False, "backward", TilesConfig(PassConfig(64, 16, 10, 2, 3), PassConfig(128, 32))),
        (("batch_norm", 0, None, False), (1, 1280, 32, 32), torch.bfloat16, True, "forward", HeldConfig(16, 16)),
        (("batch_norm", 0, "relu", False), (2, 2048, 23, 23), torch.float16, True, "forward", HeldConfig(16, 16)),
        (("batch_norm", 0, None, False), (3, 700, 4557),
         torch.bfloat16, False, "forward", TilesConfig(PassConfig(1, 4096, warps=2), PassConfig(4, 512, 2))),
        (("batch_norm", 0, None, False), (3, 1441, 4557),
         torch.bfloat16, False, "forward", TilesConfig(PassConfig(1, 4096, warps=2), PassConfig(4, 512, 2))),
        (("batch_norm", 0, "silu", False), (4, 1343, 15, 15), torch.float16, True, "forward", HeldConfig(16, 16)),
        (("batch_norm", 0, None, False), (5, 1000, 2049),
         torch.bfloat16, False, "forward", TilesConfig(PassConfig(1, 4096, warps=2), PassConfig(16, 128, 2))),
        (("batch_norm", 0, None, False), (7, 1000, 1501),
         torch.float16, False, "forward", TilesConfig(PassConfig(2, 2048, warps=1), PassConfig(4, 512, 2))),
        (("batch_norm", 0, "gelu", False), (55, 768), torch.bfloat16, False, "forward", HeldConfig(8, 8)),
        (("batch_norm", 0, "silu", False), (72, 490, 1, 1), torch.float16, False, "forward", HeldConfig(8, 8)),
        (("group_norm", 406, "leaky_relu", False), (3, 406, 32, 32),
         torch.float32, True, "backward", TilesConfig(PassConfig(64, 8, 8, 2, 3), PassConfig(128, 16))),
        (("group_norm", 32, None, False), (5, 960, 13, 13),
         torch.float32, False, "backward", TilesConfig(PassConfig(2, 256, warps=2), PassConfig(2, 256, warps=2))),
        (("group_norm", 32, None, False), (10, 1280, 5, 5),
         torch.float32, False, "backward", TilesConfig(PassConfig(16, 32, warps=2), PassConfig(8, 32, warps=2))),
        (("group_norm", 20, None, False), (12, 320, 17, 17),
         torch.float32, False, "backward", TilesConfig(PassConfig(2, 512), PassConfig(2, 512, warps=2))),
        (("group_norm", 32, "relu", False), (12, 640, 11, 11),
         torch.float32, False, "backward", TilesConfig(PassConfig(4, 128, warps=2), PassConfig(4, 128, warps=2))),
        (("group_norm", 32, None, False), (12, 960, 21, 21),
         torch.float32, False, "backward", TilesConfig(PassConfig(2, 512), PassConfig(2, 512, warps=2))),
        (("group_norm", 3, "silu", False), (13, 18, 1024),
         torch.float32, False, "backward", TilesConfig(PassConfig(1, 1024), PassConfig(1, 1024))),
        (("group_norm", 32, None, False), (22, 1280, 5, 5),
         torch.float32, False, "backward", HeldConfig(1, 2)),
        (("group_norm", 16, None, False), (30, 640, 5, 5),
         torch.float32, False, "backward", HeldConfig(1, 2)),
        (("group_norm", 32, "silu", False), (30, 640, 8, 8), torch.float32, True, "backward", HeldConfig(1, 4)),
        (("group_norm", 32, None, False), (30, 1280, 7, 7),
         torch.float32, False, "backward", TilesConfig(PassConfig(8, 64, warps=2), PassConfig(8, 64, warps=2))),
        (("group_norm", 8, "silu", False), (40, 200, 9, 9),
         torch.float32, False, "backward", TilesConfig(PassConfig(4, 128, warps=2), PassConfig(8, 128, warps=2))),
        (("group_norm", 32, None, False), (40, 320, 10, 10), torch.float32, True, "backward", HeldConfig(1, 4)),
        (("group_norm", 32, "silu", False), (50, 1280, 5, 5),
         torch.float32, False, "backward", HeldConfig(1, 4)),
        (("group_norm", 32, None, False), (64, 960, 9, 9),
         torch.float32, False, "backward", TilesConfig(PassConfig(4, 128, warps=2), PassConfig(8, 128, warps=2))),
        (("group_norm", 20, None, False), (3, 320, 75, 75),
         torch.bfloat16, False, "forward", TilesConfig(PassConfig(1, 4096), PassConfig(1, 2048, warps=2))),
        (("group_norm", 3, "leaky_relu", False), (7, 3, 89, 89), torch.bfloat16, True, "forward", HeldConfig(1, 8)),
        (("group_norm", 2105, None, False), (7, 2105, 31, 31),
         torch.float32, True, "forward", TilesConfig(PassConfig(64, 8, 28, 1, 4), PassConfig(128, 16, 2, 2))),
        (("group_norm", 16, "relu", False), (12, 320, 15, 15),
         torch.float32, False, "forward", HeldConfig(1, 8)),
        (("group_norm", 32, "silu", False), (17, 960, 13, 13),
         torch.float32, False, "forward", HeldConfig(1, 8)),
        (("group_norm", 32, "relu", False), (30, 512, 11, 11), torch.float32, False, "forward", WholeConfig(1, 4)),
        (("group_norm", 32, "relu", False), (60, 512, 9, 9), torch.float32, False, "forward", WholeConfig(1, 4)),
        (("group_norm", 4, None, False), (80, 128, 13, 13),
         torch.float32, False, "forward", HeldConfig(1, 8)),
        (("instance_norm", 0, "silu", False), (1, 47, 85, 85), torch.float16, False, "backward", HeldConfig(1, 16)),
        (("group_norm", 1, "gelu", False), (7, 2, 120, 120),
         torch.bfloat16, False, "backward", TilesConfig(PassConfig(1, 1024, 2, stages=3), PassConfig(1, 2048))),
        (("instance_norm", 0, "silu", False), (25, 759, 9, 9), torch.float16, True, "backward", HeldConfig(16, 4)),
        (("instance_norm", 0, "relu", False), (25, 759, 9, 9), torch.bfloat16, True, "backward", HeldConfig(16, 4)),
        (("instance_norm", 0, "silu", False), (33, 71, 7, 7), torch.float16, True, "backward", HeldConfig(8, 4)),
        (("instance_norm", 0, "silu", True), (52, 19, 19, 8), torch.bfloat16, True, "backward", HeldConfig(8, 8)),
        (("instance_norm", 0, "gelu", False), (1, 1, 70160),
         torch.float16, False, "forward", TilesConfig(PassConfig(1, 4096), PassConfig(1, 2048))),
        (("instance_norm", 0, "gelu", False), (2, 148, 31, 13), torch.float32, False, "forward", WholeConfig(1, 4)),
        (("instance_norm", 0, None, False), (2, 1280, 24, 24), torch.float32, False, "forward", WholeConfig(1, 1)),
        (("instance_norm", 0, "relu", False), (2, 2560, 24, 24), torch.float32, False, "forward", WholeConfig(1, 1)),
        (("instance_norm", 0, None, False), (7, 960, 7, 7), torch.bfloat16, False, "forward", WholeConfig(4, 1)),
        (("instance_norm", 0, None, True), (8, 1000, 24, 24), torch.float32, False, "forward", WholeConfig(1, 1)),
        (("instance_norm", 0, "silu", False), (8, 1280, 24, 24), torch.float32, False, "forward", WholeConfig(1, 1)),
        (("instance_norm", 0, None, False), (9, 900, 24, 24), torch.float32, False, "forward", WholeConfig(1, 1)),
        (("instance_norm", 0, None, False), (30, 900, 5, 6), torch.float32, False, "forward", WholeConfig(16, 4)),
        (("instance_norm", 0, "relu", False), (40, 64, 11, 11), torch.float32, True, "forward", HeldConfig(16, 2)),
        (("instance_norm", 0, None, False), (83, 32, 5, 25), torch.float32, True, "forward", HeldConfig(16, 2)),
        (("layer_norm", 1, None, False), (1, 4697),
         torch.bfloat16, False, "backward", HeldConfig(1, 8)),
        (("layer_norm", 1, "silu", False), (2, 1, 2, 3598),
         torch.bfloat16, False, "backward", RowsBackwardConfig(1, 16, 132, reload=True)),
        (("layer_norm", 1, None, False), (2, 5001),
         torch.float16, False, "backward", ColumnsBackwardConfig(2048, 8, 528, 512, 2, 4)),
        (("layer_norm", 1, None, False), (4, 5000),
         torch.bfloat16, False, "backward", ColumnsBackwardConfig(2048, 8, 528, 512, 4, 4)),
        (("layer_norm", 1, "silu", False), (6, 3598),
         torch.bfloat16, False, "backward", RowsBackwardConfig(1, 16, 132, reload=True)),
        (("layer_norm", 1, "gelu_tanh", False), (6, 5575),
         torch.float16, False, "backward", ColumnsBackwardConfig(2048, 8, 528, 512, 1, 4)),
        (("layer_norm", 1, None, False), (7, 7311),
         torch.float32, False, "backward", ColumnsBackwardConfig(2048, 8, 528, 1024, 1, 8)),
        (("layer_norm", 1, "silu", False), (12, 3598),
         torch.bfloat16, False, "backward", RowsBackwardConfig(1, 16, 132, reload=True)),
        (("layer_norm", 1, "silu", False), (15, 53, 55, 4262),
         torch.bfloat16, False, "backward", RowsBackwardConfig(2, 16, 132)),
        (("layer_norm", 1, "silu", False), (40, 3598),
         torch.bfloat16, False, "backward", RowsBackwardConfig(1, 16, 132, reload=True)),
        (("layer_norm", 1, None, False), (393, 4606),
         torch.bfloat16, False, "backward", RowsBackwardConfig(2, 16, 132)),
        (("layer_norm", 1, "silu", False), (2000, 2048),
         torch.bfloat16, False, "backward", RowsBackwardConfig(1, 2, 264, 4)),
        (("layer_norm", 1, "silu", False), (3000, 4262),
         torch.bfloat16, False, "backward", RowsBackwardConfig(2, 16, 132)),
        (("layer_norm", 1, "silu", False), (20000, 4262),
         torch.bfloat16, False, "backward", RowsBackwardConfig(2, 16, 132)),
        (("layer_norm", 1, "gelu", False), (20000, 5602),
         torch.bfloat16, False, "backward", RowsBackwardConfig(2, 16, 132)),
        (("layer_norm", 1, None, False), (45, 89, 2, 262), torch.float16, False, "forward", WholeConfig(4, 1)),
        (("layer_norm", 1, "silu", False), (437, 8192), torch.float32, False, "forward", StepsConfig(2048, 16)),
        (("layer_norm", 1, None, False), (3000, 13001), torch.float16, False, "forward", StepsConfig(2048, 8)),
        (("rms_norm", 1, None, False), (2, 1, 7311),
         torch.float32, False, "backward", ColumnsBackwardConfig(2048, 8, 528, 512, 2, 4)),
        (("rms_norm", 1, None, False), (2, 8192),
         torch.float16, False, "backward", ColumnsBackwardConfig(2048, 8, 528, 512, 2, 4)),
        (("rms_norm", 1, None, False), (3, 5001),
         torch.bfloat16, False, "backward", ColumnsBackwardConfig(2048, 8, 528, 512, 3, 4)),
        (("rms_norm", 1, None, False), (3, 5120),
         torch.bfloat16, False, "backward", ColumnsBackwardConfig(2048, 8, 528, 512, 3, 4)),
        (("rms_norm", 1, None, False), (3, 7311),
         torch.float32, False, "backward", ColumnsBackwardConfig(2048, 8, 528, 512, 3, 4)),
        (("rms_norm", 1, "gelu", False), (5, 2700), torch.bfloat16, False, "backward", HeldConfig(1, 8)),
        (("rms_norm", 1, None, False), (54, 4558),
         torch.bfloat16, False, "backward", RowsBackwardConfig(1, 8, 132, reload=True)),
        (("rms_norm", 1, "silu", False), (165, 60892),
         torch.bfloat16, False, "backward", ColumnsBackwardConfig(2048, 8, 264, 1024, 8, 4, 3)),
        (("rms_norm", 1, "relu", False), (165, 60892),
         torch.bfloat16, False, "backward", ColumnsBackwardConfig(2048, 8, 264, 1024, 16, 4)),
        (("rms_norm", 1, "leaky_relu", False), (520, 3072),
         torch.float16, False, "backward", RowsBackwardConfig(2, 8, 264)),
        (("rms_norm", 1, None, False), (664, 10154), torch.bfloat16, False, "backward", RowsBackwardConfig(1, 16, 132)),
        (("rms_norm", 1, "silu", False), (3627, 2091),
         torch.bfloat16, False, "backward", RowsBackwardConfig(2, 8, 264)),
        (("rms_norm", 1, None, False), (60000, 308),
         torch.float32, False, "backward", RowsBackwardConfig(2, 2, 528, 4)),
        (("rms_norm", 2, "silu", False), (183, 14, 2048), torch.float16, False, "forward", StepsConfig(4096, 16)),
        (("rms_norm", 1, None, False), (2000, 3001), torch.float32, False, "forward", HeldConfig(1, 8)),
        (("rms_norm", 1, "silu", False), (3000, 3501), torch.float32, False, "forward", HeldConfig(1, 8)),
        (("rms_norm", 1, None, False), (3000, 15001), torch.float16, False, "forward", WholeConfig(1, 8)),
        (("rms_norm", 1, "relu", False), (4343, 1024), torch.bfloat16, False, "forward", WholeConfig(2, 2)),
        (("rms_norm", 1, None, False), (8845, 14997), torch.bfloat16, False, "forward", WholeConfig(1, 8)),
        (("group_norm", 32, "silu", False), (30, 960, 13, 13),
         torch.float32, False, "backward", TilesConfig(PassConfig(8, 64, warps=2), PassConfig(16, 32, 2, 2))),
        (("rms_norm", 1, "silu", False), (36, 15457),
         torch.bfloat16, False, "forward", TilesConfig(PassConfig(1, 4096), PassConfig(2048, 1))),
        (("group_norm", 1, "gelu_tanh", False), (29, 4, 191, 1), torch.float16, True, "backward", HeldConfig(1, 8)),
        (("group_norm", 32, None, False), (1, 768, 64, 48),
         torch.bfloat16, True, "forward", TilesConfig(PassConfig(64, 16, 4, 1, 3), PassConfig(128, 32, 2))),
        (("group_norm", 8, "gelu", True), (38, 960, 24, 20),
         torch.float16, True, "backward", TilesConfig(PassConfig(64, 16, 15, 2, 3), PassConfig(64, 32, warps=2))),
        (("batch_norm", 0, None, False), (68, 1280, 3, 3), torch.bfloat16, False, "backward", HeldConfig(2, 8)),
        (("batch_norm", 0, None, True), (4, 300, 23, 23), torch.float16, False, "backward", HeldConfig(1, 4)),
        (("batch_norm", 0, "relu", False), (3, 3000, 2501), torch.float32, False, "forward", HeldConfig(1, 8)),
        (("batch_norm", 0, "silu", False), (15, 128, 13), torch.bfloat16, False, "forward", HeldConfig(2, 8)),
        (("batch_norm", 0, "silu", False), (15, 128, 13), torch.bfloat16, False, "backward", HeldConfig(2, 8)),
        (("batch_norm", 0, None, False), (11, 96, 1, 1), torch.float16, True, "forward", HeldConfig(16, 4)),
        (("group_norm", 256, None, False), (12, 512, 19, 19), torch.bfloat16, False, "backward", HeldConfig(1, 2)),
        (("group_norm", 32, None, False), (16, 512, 31, 31),
         torch.float16, False, "backward", TilesConfig(PassConfig(1, 1024, warps=2), PassConfig(2, 1024, warps=2))),
        (("group_norm", 32, None, False), (20, 512, 17, 17), torch.float32, False, "forward", HeldConfig(1, 8)),
        (("group_norm", 32, None, False), (20, 512, 17, 17), torch.float32, False, "backward", HeldConfig(1, 8)),
        (("group_norm", 32, None, False), (2, 1024, 13, 9),
         torch.float32, False, "backward", TilesConfig(PassConfig(4, 128, warps=2), PassConfig(8, 128, warps=2))),
        (("group_norm", 32, None, False), (30, 1280, 11, 11), torch.float32, False, "forward", HeldConfig(1, 8)),
        (("group_norm", 32, None, False), (40, 256, 21, 21), torch.float32, False, "backward", HeldConfig(1, 4)),
        (("group_norm", 32, None, False), (65, 256, 17, 17), torch.float16, False, "backward", HeldConfig(1, 4)),
        (("group_norm", 32, "gelu", True), (16, 128, 31, 31), torch.bfloat16, False, "forward", HeldConfig(1, 4)),
        (("group_norm", 32, "relu", True), (4, 640, 13, 9),
         torch.float16, False, "backward", TilesConfig(PassConfig(8, 128), PassConfig(4, 128))),
        (("group_norm", 32, "silu", False), (4, 960, 9, 9), torch.float16, True, "backward", HeldConfig(1, 8)),
        (("group_norm", 320, "gelu", False), (30, 1280, 5, 25), torch.float16, False, "backward", HeldConfig(1, 1)),
        (("group_norm", 480, None, False), (2, 960, 25, 25), torch.bfloat16, False, "backward", HeldConfig(1, 2)),
        (("group_norm", 50, None, False), (64, 200, 15, 15), torch.float32, False, "backward", HeldConfig(1, 1)),
        (("group_norm", 16, "silu", False), (12, 1024, 7, 15), torch.float16, False, "forward", WholeConfig(1, 16)),
        (("group_norm", 16, "silu", False), (25, 384, 13, 13), torch.float16, False, "forward", WholeConfig(1, 8)),
        (("group_norm", 32, None, False), (25, 96, 8, 33), torch.float16, True, "forward", HeldConfig(4, 8)),
        (("group_norm", 192, "gelu", False), (12, 384, 301, 1), torch.bfloat16, True, "backward", HeldConfig(8, 8)),
        (("group_norm", 8, None, True), (1, 2048, 5, 5),
         torch.float32, False, "backward", TilesConfig(PassConfig(16, 32, warps=2), PassConfig(32, 32, warps=2))),
        (("instance_norm", 0, None, False), (15, 2048, 7, 49), torch.float16, False, "backward", HeldConfig(2, 1)),
        (("instance_norm", 0, None, False), (20, 768, 7, 49), torch.bfloat16, False, "backward", HeldConfig(2, 1)),
        (("instance_norm", 0, None, False), (25, 333, 9, 9), torch.bfloat16, True, "backward", HeldConfig(16, 4)),
        (("instance_norm", 0, None, False), (3, 2048, 145), torch.float32, False, "forward", WholeConfig(4, 1)),
        (("instance_norm", 0, None, False), (4, 2048, 3, 25), torch.bfloat16, False, "backward", HeldConfig(4, 1)),
        (("instance_norm", 0, None, True), (25, 759, 9, 9), torch.bfloat16, True, "backward", HeldConfig(16, 4)),
        (("instance_norm", 0, "relu", False), (36, 128, 11, 5), torch.float32, False, "forward", WholeConfig(4, 1)),
        (("instance_norm", 0, "silu", False), (1, 267, 112, 16), torch.float16, True, "forward", HeldConfig(4, 8)),
        (("instance_norm", 0, None, False), (22, 310, 3, 3), torch.float16, True, "forward", HeldConfig(16, 1)),
        (("rms_norm", 1, "gelu_tanh", False), (31482, 131), torch.float32, False, "forward", WholeConfig(4, 1)),
        (("rms_norm", 1, None, False), (1713, 256), torch.float16, False, "forward", WholeConfig(2, 1)),
        (("rms_norm", 1, None, False), (585480, 384),
         torch.bfloat16, False, "backward", RowsBackwardConfig(1, 1, 1056, stages=4)),
        (("rms_norm", 1, None, False), (5, 2782),
         torch.bfloat16, False, "backward", RowsBackwardConfig(1, 16, 132, reload=True)),
        (("rms_norm", 1, "leaky_relu", False), (79350, 64), torch.bfloat16, False, "forward", WholeConfig(16, 2)),
        (("batch_norm", 0, None, False), (4, 64, 8, 28), torch.float32, True, "backward", HeldConfig(2, 8)),
        (("group_norm", 2, "leaky_relu", False), (41, 2, 72, 33), torch.bfloat16, True, "backward", HeldConfig(1, 16)),
        (("group_norm", 376, None, False), (5, 1128, 23, 32), torch.float32, False, "backward", HeldConfig(1, 4)),
        (("batch_norm", 0, None, True), (2, 6, 32, 32), torch.bfloat16, False, "backward", HeldConfig(1, 16)),
        (("group_norm", 5, "gelu_tanh", True), (20, 5, 56, 56), torch.float16, True, "backward", HeldConfig(1, 16)),
        (("layer_norm", 1, "silu", False), (529, 2048),
         torch.float16, False, "backward", RowsBackwardConfig(2, 4, 528)),
        (("layer_norm", 1, None, False), (116, 3072),
         torch.bfloat16, False, "backward", RowsBackwardConfig(2, 16, 132)),
        (("batch_norm", 0, "gelu", False), (64, 384, 77),
         torch.float32, False, "forward",
         TilesConfig(PassConfig(64, 8, 8, 2, stages=4), PassConfig(128, 16, 2, 2))),
        (("group_norm", 4, "silu", False), (4393, 1708),
         torch.float32, False, "backward", HeldConfig(2, 2, samples=1, steps=17, stages=3)),
        (("batch_norm", 0, "silu", True), (235, 26), torch.float16, False, "backward", HeldConfig(2, 4)),
        (("instance_norm", 0, "leaky_relu", False), (19, 115, 5, 7),
         torch.float32, False, "backward", HeldConfig(2, 1)),
        (("batch_norm", 0, "leaky_relu", True), (2, 2048, 7, 3),
         torch.bfloat16, False, "forward", HeldConfig(8, 8)),
        (("group_norm", 2, None, False), (51, 1048, 3, 1), torch.bfloat16, False, "backward", HeldConfig(1, 16)),
        (("layer_norm", 1, "relu", False), (7574, 72),
         torch.float32, False, "backward", RowsBackwardConfig(8, 1, 1056)),
        (("batch_norm", 0, "silu", False), (53, 632, 11, 1), torch.float16, True, "backward", HeldConfig(8, 8)),
        (("group_norm", 2, "relu", False), (68, 8, 64, 64),
         torch.bfloat16, False, "backward",
         TilesConfig(PassConfig(1, 1024, 4, 2, stages=3), PassConfig(1, 2048, 2))),
        (("batch_norm", 0, "gelu", False), (9, 544, 8, 8), torch.bfloat16, True, "backward", HeldConfig(8, 8)),
        (("layer_norm", 1, "relu", False), (280, 573),
         torch.bfloat16, False, "backward", RowsBackwardConfig(2, 4, 528)),
        (("group_norm", 8, "gelu_tanh", False), (1, 192, 3, 3), torch.float32, True, "backward", HeldConfig(1, 8)),
        (("layer_norm", 1, None, False), (25676, 1322),
         torch.float16, False, "backward", RowsBackwardConfig(1, 2, 528, stages=3)),
        (("instance_norm", 0, None, False), (3, 57, 25, 5), torch.float32, True, "backward", HeldConfig(4, 4)),
        (("layer_norm", 1, "gelu_tanh", False), (22, 3771), torch.float16, False, "backward", HeldConfig(1, 8)),
        (("batch_norm", 0, "silu", True), (36, 122, 3, 3), torch.bfloat16, True, "backward", HeldConfig(2, 4)),
        (("group_norm", 1, None, False), (6, 2, 57, 57),
         torch.float16, False, "backward", TilesConfig(PassConfig(1, 1024), PassConfig(1, 1024, warps=2))),
        (("batch_norm", 0, None, False), (11, 3, 63, 63),
         torch.bfloat16, True, "forward", TilesConfig(PassConfig(4, 256, warps=2), PassConfig(4, 256))),
        (("layer_norm", 1, None, False), (6, 3207), torch.float16, False, "backward", HeldConfig(1, 8)),
        (("layer_norm", 1, None, False), (190, 42650),
         torch.float32, False, "forward", TilesConfig(PassConfig(1, 4096), PassConfig(2048, 1, warps=2))),
        (("rms_norm", 1, "gelu", False), (39494, 628), torch.float16, False, "forward", WholeConfig(2, 1)),
        (("batch_norm", 0, "silu", True), (3, 64, 7, 11), torch.bfloat16, True, "backward", HeldConfig(2, 4)),
        (("group_norm", 1, None, False), (6, 74, 11, 11),
         torch.float32, True, "forward", TilesConfig(PassConfig(1, 4096), PassConfig(128, 8))),
        (("group_norm", 1, None, False), (86, 3, 16, 7), torch.float32, True, "forward", HeldConfig(1, 4)),
        (("group_norm", 87, None, True), (14, 435, 11, 11, 11),
         torch.float32, False, "forward", TilesConfig(PassConfig(1, 4096, warps=2), PassConfig(1, 2048))),
        (("group_norm", 32, None, False), (34663, 320), torch.bfloat16, False, "forward", WholeConfig(64, 2)),
        (("instance_norm", 0, "relu", False), (11, 4, 98, 5), torch.float16, True, "backward", HeldConfig(1, 4)),
        (("batch_norm", 0, None, False), (16, 9, 11, 11), torch.bfloat16, True, "forward", HeldConfig(2, 8)),
        (("group_norm", 9, "leaky_relu", False), (30, 27, 8, 8), torch.float16, True, "backward", HeldConfig(2, 4)),
        (("layer_norm", 1, None, False), (2310, 107),
         torch.bfloat16, False, "backward", RowsBackwardConfig(8, 1, 1056)),
        (("batch_norm", 0, "silu", False), (2, 4, 7, 19), torch.float32, True, "backward", HeldConfig(1, 8)),
        (("layer_norm", 1, None, False), (4687, 741), torch.float16, False, "forward", WholeConfig(1, 1)),
        (("rms_norm", 1, "relu", False), (1, 1757), torch.bfloat16, False, "backward", HeldConfig(1, 8)),
        (("instance_norm", 0, "relu", True), (17, 384, 5, 5), torch.float32, True, "forward", HeldConfig(16, 1)),
        (("instance_norm", 0, "silu", False), (19, 96, 5, 9), torch.bfloat16, False, "backward", HeldConfig(2, 1)),
        (("group_norm", 32, "gelu_tanh", True), (1362, 512), torch.float32, False, "forward", WholeConfig(32, 4)),
        (("group_norm", 1090, "relu", True), (29, 1090, 32, 28),
         torch.float32, True, "backward", TilesConfig(PassConfig(64, 8, 56, 2, stages=3), PassConfig(128, 16))),
        (("batch_norm", 0, None, False), (8, 5, 56, 31),
         torch.bfloat16, True, "backward", TilesConfig(PassConfig(8, 128, warps=2), PassConfig(8, 128))),
        (("batch_norm", 0, None, False), (15, 3, 13637),
         torch.float16, False, "backward",
         TilesConfig(PassConfig(1, 2048, 3, stages=3), PassConfig(1, 1024, 2, 2))),
        (("group_norm", 16, None, True), (1, 1024, 1201),
         torch.float16, False, "forward", TilesConfig(PassConfig(1, 4096), PassConfig(2, 2048))),
        (("batch_norm", 0, "relu", True), (49, 320, 5, 3), torch.bfloat16, True, "forward", HeldConfig(4, 4)),
        (("layer_norm", 1, "silu", False), (2, 2048),
         torch.float16, False, "backward", RowsBackwardConfig(2, 8, 1)),
        (("batch_norm", 0, None, False), (107, 64, 3, 3), torch.bfloat16, True, "forward", HeldConfig(4, 8)),
        (("batch_norm", 0, None, False), (31, 2515, 5, 3), torch.float32, True, "backward", HeldConfig(8, 8)),
        (("batch_norm", 0, None, False), (10, 3, 3, 7), torch.float16, True, "backward", HeldConfig(1, 4)),
        (("batch_norm", 0, None, False), (49, 133, 5, 5),
         torch.float32, True, "backward", TilesConfig(PassConfig(64, 16, warps=2), PassConfig(128, 8))),
        (("instance_norm", 0, "relu", False), (16, 180, 12795),
         torch.float16, False, "backward",
         TilesConfig(PassConfig(1, 2048, 7, 2, stages=3), PassConfig(1, 1024, 2, 2))),
        (("rms_norm", 1, "relu", False), (2706, 263),
         torch.float16, False, "backward", RowsBackwardConfig(2, 4, 528, stages=4)),
        (("layer_norm", 1, None, False), (12, 13098),
         torch.float32, False, "forward", TilesConfig(PassConfig(1, 4096, warps=8), PassConfig(2048, 1, warps=8))),
        (("instance_norm", 0, None, True), (8, 515, 25, 25),
         torch.float32, True, "backward", TilesConfig(PassConfig(64, 8, 10, 2, stages=3), PassConfig(128, 16))),
        (("layer_norm", 1, None, False), (2866, 181),
         torch.bfloat16, False, "backward", RowsBackwardConfig(4, 2, 1056)),
        (("instance_norm", 0, "leaky_relu", False), (3, 256, 17, 5),
         torch.bfloat16, True, "backward", HeldConfig(16, 4)),
        (("rms_norm", 1, None, False), (1, 1539), torch.float16, False, "backward", HeldConfig(1, 8)),
        (("group_norm", 4, None, False), (1, 32, 1023),
         torch.float16, False, "backward", TilesConfig(PassConfig(1, 1024), PassConfig(1, 2048))),
        (("batch_norm", 0, "relu", False), (4, 1, 16, 14, 5),
         torch.float32, False, "backward", TilesConfig(PassConfig(1, 512, warps=2), PassConfig(1, 1024))),
        (("batch_norm", 0, "gelu", False), (7, 13, 1024, 1),
         torch.bfloat16, True, "backward", TilesConfig(PassConfig(16, 64, warps=2), PassConfig(16, 64))),
        (("batch_norm", 0, None, False), (45, 5, 11, 35),
         torch.float16, True, "backward", TilesConfig(PassConfig(8, 128, warps=2), PassConfig(8, 128))),
        (("layer_norm", 1, None, False), (300, 30000),
         torch.bfloat16, False, "forward", TilesConfig(PassConfig(1, 4096), PassConfig(2048, 1, warps=2))),
        (("layer_norm", 1, None, False), (2048, 1001),
         torch.bfloat16, False, "backward", RowsBackwardConfig(2, 4, 528)),
        (("group_norm", 22, None, True), (48, 22, 129, 87),
         torch.float32, True, "forward",
         TilesConfig(PassConfig(64, 8, 22, 1, stages=4), PassConfig(128, 16, 2, 2))),
        (("group_norm", 22, None, True), (48, 22, 129, 87),
         torch.float32, True, "backward", TilesConfig(PassConfig(512, 1, 47, 4, 4, long=True), PassConfig(128, 16))),
        (("instance_norm", 0, "silu", True), (6, 45, 77, 77),
         torch.float32, True, "backward", TilesConfig(PassConfig(512, 1, 17, 4, 4, long=True), PassConfig(128, 16))),
        (("instance_norm", 0, None, True), (40, 11, 90, 90),
         torch.float32, True, "forward", TilesConfig(PassConfig(64, 8, 8, 1, stages=4), PassConfig(128, 16, 2, 2))),
        (("instance_norm", 0, "silu", True), (6, 45, 77, 77),
         torch.float32, True, "forward", TilesConfig(PassConfig(64, 8, 6, 1, stages=4), PassConfig(128, 16, 2, 2))),
        (("batch_norm", 0, "gelu_tanh", False), (40, 2048, 8, 8),
         torch.bfloat16, False, "backward", HeldConfig(1, 8)),
        (("instance_norm", 0, "gelu_tanh", False), (1, 71, 289, 17),
         torch.float32, True, "forward", TilesConfig(PassConfig(64, 16, warps=1), PassConfig(128, 8, 2))),
        (("batch_norm", 0, None, False), (9, 10, 24, 14), torch.bfloat16, False, "forward", HeldConfig(1, 8)),
        (("group_norm", 5, None, False), (10, 10, 80, 80),
         torch.bfloat16, True, "forward", TilesConfig(PassConfig(16, 64, warps=1), PassConfig(16, 64, 2))),
        (("rms_norm", 1, "gelu", False), (1836, 573),
         torch.float16, False, "backward", RowsBackwardConfig(2, 4, 528, stages=3)),
        (("batch_norm", 0, "relu", False), (28, 2241, 256), torch.float16, False, "forward", HeldConfig(1, 8)),
        (("group_norm", 16, None, True), (1, 2048, 7, 7),
         torch.float16, False, "backward", TilesConfig(PassConfig(16, 64), PassConfig(32, 64))),
        (("batch_norm", 0, "relu", False), (28, 2031, 7, 7, 7),
         torch.bfloat16, False, "backward",
         TilesConfig(PassConfig(8, 128, 3, 2, stages=3), PassConfig(16, 128, 2))),
        (("batch_norm", 0, "silu", False), (5, 60, 40, 13), torch.bfloat16, False, "forward", HeldConfig(1, 8)),
        (("instance_norm", 0, "gelu", False), (1, 4, 11, 11), torch.float32, True, "backward", HeldConfig(1, 2)),
        (("batch_norm", 0, "gelu_tanh", False), (3, 45, 32, 31),
         torch.float32, True, "forward", TilesConfig(PassConfig(64, 16), PassConfig(64, 16))),
        (("batch_norm", 0, None, False), (20, 16, 17, 8), torch.float16, False, "forward", HeldConfig(1, 8)),
        (("layer_norm", 1, "silu", False), (1, 3447), torch.float16, False, "backward", HeldConfig(1, 8)),
        (("rms_norm", 1, "silu", False), (1, 3611), torch.float16, False, "backward", HeldConfig(1, 8)),
        (("instance_norm", 0, None, True), (50, 501, 1, 3), torch.float32, True, "forward", HeldConfig(32, 1)),
        (("group_norm", 1, "silu", False), (75, 11, 5, 9), torch.float16, True, "backward", HeldConfig(1, 8)),
        (("group_norm", 68, "silu", True), (23, 408, 25, 5), torch.float16, True, "backward", HeldConfig(2, 4)),
        (("instance_norm", 0, "gelu_tanh", False), (4, 22, 189, 64),
         torch.bfloat16, False, "backward", HeldConfig(1, 16)),
        (("group_norm", 5, None, False), (5, 155, 37, 8),
         torch.float16, True, "backward", TilesConfig(PassConfig(32, 128), PassConfig(128, 8))),
        (("batch_norm", 0, "silu", False), (1166, 1037), torch.bfloat16, False, "forward", HeldConfig(8, 16)),
        (("instance_norm", 0, None, True), (2, 224, 208, 8), torch.float16, True, "forward", HeldConfig(4, 8)),
        (("group_norm", 32, None, False), (34917, 960), torch.bfloat16, False, "forward", WholeConfig(16, 1)),
        (("instance_norm", 0, "silu", True), (11, 1024, 11, 5), torch.float16, True, "backward", HeldConfig(16, 1)),
        (("layer_norm", 1, "silu", False), (7994, 4096),
         torch.float32, False, "backward", RowsBackwardConfig(1, 8, 264, stages=3)),
        (("instance_norm", 0, None, False), (8, 2048, 49, 1), torch.float16, True, "backward", HeldConfig(16, 1)),
        (("group_norm", 1, "gelu", False), (552, 474),
         torch.float16, False, "backward", RowsBackwardConfig(2, 4, 528)),
        (("instance_norm", 0, "leaky_relu", False), (4, 3, 8, 31, 27),
         torch.float32, False, "backward", TilesConfig(PassConfig(1, 512, warps=2), PassConfig(1, 1024))),
        (("group_norm", 32, None, False), (4, 32, 16, 21, 25), torch.float16, False, "forward", WholeConfig(1, 16)),
        (("rms_norm", 1, "relu", False), (2, 1536), torch.float16, False, "backward", RowsBackwardConfig(2, 8, 1)),
        (("group_norm", 1, "leaky_relu", False), (6, 83, 25, 5),
         torch.bfloat16, True, "forward", TilesConfig(PassConfig(1, 4096), PassConfig(128, 8))),
        (("group_norm", 32, None, True), (22, 960, 31, 31),
         torch.bfloat16, False, "forward", TilesConfig(PassConfig(1, 4096), PassConfig(2, 1024))),
        (("group_norm", 32, None, False), (5, 96, 29, 16), torch.bfloat16, True, "forward", HeldConfig(2, 8)),
        (("layer_norm", 1, None, False), (1002, 361),
         torch.bfloat16, False, "backward", RowsBackwardConfig(4, 2, 528)),
        (("group_norm", 32, None, False), (48, 960, 8, 19), torch.bfloat16, False, "forward", HeldConfig(1, 8)),
        (("group_norm", 3, "relu", False), (37, 3, 263, 1), torch.bfloat16, True, "backward", HeldConfig(2, 4)),
        (("group_norm", 2, None, False), (2, 512, 5, 5),
         torch.bfloat16, False, "backward", TilesConfig(PassConfig(32, 32), PassConfig(64, 32))),
        (("layer_norm", 1, "gelu_tanh", False), (1325, 743),
         torch.float16, False, "backward", RowsBackwardConfig(2, 4, 528, stages=3)),
        (("group_norm", 1, "gelu", False), (6, 3, 15, 8), torch.bfloat16, True, "backward", HeldConfig(1, 8)),
        (("batch_norm", 0, None, False), (1, 1280, 2997), torch.float32, False, "backward", HeldConfig(1, 8)),
        (("layer_norm", 1, None, False), (1140, 97),
         torch.float16, False, "backward", RowsBackwardConfig(4, 1, 285)),
        (("instance_norm", 0, None, True), (12, 22, 64, 65),
         torch.float32, True, "forward", TilesConfig(PassConfig(64, 8, 5, 2, stages=4), PassConfig(128, 16, 2, 2))),
        (("batch_norm", 0, None, False), (25, 3, 31, 31),
         torch.float16, True, "forward", TilesConfig(PassConfig(4, 256, warps=2), PassConfig(4, 256))),
        (("layer_norm", 1, None, False), (2, 2969), torch.bfloat16, False, "backward", HeldConfig(1, 8)),
        (("instance_norm", 0, None, False), (12, 384, 11, 11), torch.float16, True, "forward", HeldConfig(16, 2)),
        (("group_norm", 256, None, False), (1, 1280, 21, 15), torch.float32, True, "backward", HeldConfig(1, 8)),
        (("group_norm", 5, None, False), (20, 10, 40, 40), torch.float16, True, "forward", HeldConfig(1, 8)),
        (("group_norm", 32, None, False), (14, 960, 3, 3), torch.bfloat16, True, "backward", HeldConfig(2, 2)),
        (("layer_norm", 1, None, False), (2, 2048), torch.bfloat16, False, "backward", RowsBackwardConfig(2, 8, 1)),
        (("batch_norm", 0, "silu", True), (69, 2560, 1, 1), torch.float16, True, "backward", HeldConfig(16, 4)),
        (("layer_norm", 1, "gelu", False), (900, 700),
         torch.bfloat16, False, "backward", RowsBackwardConfig(2, 4, 528)),
        (("rms_norm", 1, None, False), (30879, 1273),
         torch.bfloat16, False, "backward", RowsBackwardConfig(1, 2, 528, stages=3)),
        (("group_norm", 1, "gelu_tanh", False), (43, 38, 25, 7),
         torch.float32, True, "forward", TilesConfig(PassConfig(1, 4096), PassConfig(64, 16))),
        (("instance_norm", 0, None, False), (6, 5, 281, 1), torch.float16, True, "backward", HeldConfig(1, 4)),
        (("instance_norm", 0, "relu", False), (8, 960, 8, 8), torch.float16, True, "backward", HeldConfig(16, 1)),
        (("instance_norm", 0, None, False), (6, 320, 10761), torch.bfloat16, False, "forward", WholeConfig(1, 8)),
        (("group_norm", 5, None, False), (4, 1295, 7, 7),
         torch.bfloat16, False, "backward", TilesConfig(PassConfig(16, 64), PassConfig(1, 64, warps=2))),
        (("layer_norm", 1, "silu", False), (1, 1535), torch.bfloat16, False, "backward", HeldConfig(1, 8)),
        (("rms_norm", 1, "relu", False), (1, 1857), torch.float16, False, "backward", HeldConfig(1, 8)),
        (("rms_norm", 1, "silu", False), (792, 285),
         torch.float16, False, "backward", RowsBackwardConfig(2, 4, 528)),
        (("group_norm", 32, None, True), (6, 960, 17), torch.float16, False, "forward", WholeConfig(1, 4)),
        (("instance_norm", 0, None, False), (12, 3, 1313, 1), torch.bfloat16, True, "backward", HeldConfig(1, 8)),
        (("layer_norm", 1, None, False), (1, 1877), torch.float32, False, "backward", HeldConfig(1, 8)),
        (("layer_norm", 1, None, False), (1299, 66),
         torch.bfloat16, False, "backward", RowsBackwardConfig(4, 1, 325)),
        (("instance_norm", 0, "relu", False), (2, 23, 49, 7), torch.float32, True, "backward", HeldConfig(1, 4)),
        (("batch_norm", 0, None, False), (101, 101, 3, 3), torch.float32, True, "backward", HeldConfig(2, 8)),
        (("batch_norm", 0, None, False), (88, 960, 1, 5), torch.float32, False, "forward", HeldConfig(4, 8)),
        (("batch_norm", 0, None, False), (48, 1500, 3, 3), torch.float16, False, "forward", HeldConfig(4, 4)),
        (("batch_norm", 0, None, False), (40, 1000, 3, 3), torch.bfloat16, False, "backward", HeldConfig(2, 4)),
        (("batch_norm", 0, None, False), (100, 700, 5), torch.float32, False, "backward", HeldConfig(4, 8)),
        (("batch_norm", 0, None, False), (100, 700, 1, 3), torch.bfloat16, False, "forward", HeldConfig(4, 8)),
        (("batch_norm", 0, None, False), (22, 1024, 5, 5), torch.bfloat16, False, "forward", HeldConfig(1, 1)),
        (("batch_norm", 0, "silu", False), (30, 1500, 5, 5), torch.bfloat16, False, "backward", HeldConfig(1, 1)),
        (("batch_norm", 0, None, False), (10, 4096, 7, 7), torch.bfloat16, False, "backward", HeldConfig(1, 1)),
        (("batch_norm", 0, None, False), (14, 1280, 7, 7), torch.float32, False, "forward", HeldConfig(1, 2)),
        (("group_norm", 3, "relu", False), (1, 3, 73, 73, 73),
         torch.bfloat16, True, "forward", TilesConfig(PassConfig(64, 32, 4, 2, 3), PassConfig(128, 16, 2, 2))),
        (("batch_norm", 0, None, False), (16, 3, 224, 224),
         torch.float16, True, "forward", TilesConfig(PassConfig(64, 32, 4, 2, 3), PassConfig(128, 32, 2))),
        (("instance_norm", 0, None, False), (8, 3, 256, 256),
         torch.bfloat16, True, "forward", TilesConfig(PassConfig(64, 16, 4, 1, 3), PassConfig(128, 16, 2, 2))),
        (("batch_norm", 0, None, False), (65536, 18),
         torch.float32, False, "backward", TilesConfig(PassConfig(512, 1, 6, 4, 4, long=True), PassConfig(128, 16))),
        (("batch_norm", 0, None, True), (9, 2048, 1, 1), torch.float32, False, "backward", HeldConfig(16, 1)),
        (("batch_norm", 0, None, False), (16000, 31),
         torch.float32, False, "backward", TilesConfig(PassConfig(32, 32, warps=2), PassConfig(32, 32))),
        (("group_norm", 2, "silu", False), (4330, 358),
         torch.bfloat16, False, "backward", HeldConfig(1, 1, samples=1, steps=5)),
        (("batch_norm", 0, None, True), (110, 1693, 5, 5),
         torch.bfloat16, True, "backward", TilesConfig(PassConfig(64, 16, 2, stages=3), PassConfig(128, 8, 2))),
        (("group_norm", 13, "silu", False), (30661, 169), torch.bfloat16, False, "forward", WholeConfig(32, 4)),
        (("rms_norm", 1, None, False), (40150, 67), torch.float32, False, "forward", WholeConfig(8, 1)),
        (("group_norm", 17, "gelu", True), (93, 374, 3, 5, 5), torch.float16, True, "forward", HeldConfig(1, 8)),
        (("batch_norm", 0, "silu", True), (65536, 13),
         torch.bfloat16, False, "backward", TilesConfig(PassConfig(16, 128, warps=8), PassConfig(16, 64, warps=2))),
        (("rms_norm", 1, "silu", False), (765, 4323), torch.float16, False, "backward", RowsBackwardConfig(2, 16, 132)),
        (("group_norm", 47, "silu", False), (9978, 94),
         torch.float32, False, "backward", HeldConfig(64, 4, samples=8, steps=3)),
        (("group_norm", 32, None, True), (25550, 640),
         torch.float16, False, "backward", HeldConfig(32, 2, steps=49, stages=3)),
        (("group_norm", 512, None, False), (5, 2560, 32, 32),
         torch.float16, True, "forward", TilesConfig(PassConfig(64, 16, 8, 1, 3), PassConfig(128, 32, 2))),
        (("instance_norm", 0, None, False), (3, 640, 7, 7), torch.float16, False, "forward", WholeConfig(2, 1)),
        (("batch_norm", 0, "silu", True), (25, 10), torch.float32, False, "forward", HeldConfig(2, 1)),
        (("rms_norm", 1, "gelu", False), (220000, 94),
         torch.float32, False, "backward", RowsBackwardConfig(2, 1, 2112, stages=3)),
        (("rms_norm", 1, None, False), (15936, 768), torch.bfloat16, False, "forward", WholeConfig(2, 4)),
        (("rms_norm", 1, None, False), (8296, 768), torch.float16, False, "forward", WholeConfig(2, 2)),
        (("layer_norm", 1, "relu", False), (7021, 1024), torch.float16, False, "forward", WholeConfig(2, 4)),
        (("layer_norm", 1, None, False), (16000, 1024), torch.bfloat16, False, "forward", WholeConfig(2, 4)),
        (("batch_norm", 0, "leaky_relu", True), (23725, 33),
         torch.bfloat16, False, "backward", TilesConfig(PassConfig(32, 64), PassConfig(64, 16, warps=2))),
        (("group_norm", 32, None, True), (5378, 96),
         torch.float16, False, "backward", HeldConfig(8, 1, samples=2, steps=3)),
        (("group_norm", 32, None, True), (20000, 96),
         torch.float16, False, "backward", HeldConfig(8, 1, samples=2, steps=10)),
        (("group_norm", 5, "gelu", False), (4657, 960),
         torch.float16, False, "backward", HeldConfig(1, 4, samples=4, steps=23, stages=3)),
        (("instance_norm", 0, None, False), (2, 172, 3, 3), torch.float16, True, "forward", HeldConfig(4, 1)),
        (("layer_norm", 1, "silu", False), (2552, 5503),
         torch.float16, False, "backward", RowsBackwardConfig(1, 8, 132, 3)),
        (("instance_norm", 0, "relu", False), (4, 640, 9, 7), torch.float32, False, "forward", WholeConfig(4, 1)),
        (("instance_norm", 0, "silu", False), (62, 158, 15, 19), torch.float32, True, "backward", HeldConfig(8, 8)),
        (("rms_norm", 1, "gelu_tanh", False), (200000, 94),
         torch.bfloat16, False, "backward", RowsBackwardConfig(2, 1, 4224)),
        (("layer_norm", 1, None, False), (300000, 77),
         torch.bfloat16, False, "backward", RowsBackwardConfig(2, 1, 4224)),
        (("rms_norm", 1, None, False), (30000, 512), torch.float16, False, "forward", WholeConfig(2, 2)),
        (("layer_norm", 1, "silu", False), (12000, 640), torch.bfloat16, False, "forward", WholeConfig(1, 1)),
        (("group_norm", 32, "silu", False), (30, 1024, 13, 13),
         torch.bfloat16, False, "forward", TilesConfig(PassConfig(1, 4096), PassConfig(32, 128, 2, 8))),
        (("group_norm", 32, None, False), (30, 2048, 11, 11),
         torch.float16, False, "forward", TilesConfig(PassConfig(1, 4096), PassConfig(32, 128))),
        (("group_norm", 32, "silu", False), (10, 2048, 11, 11),
         torch.float16, False, "forward", TilesConfig(PassConfig(1, 4096), PassConfig(32, 128))),
        (("group_norm", 32, None, False), (10, 2048, 7, 7), torch.float16, False, "forward", WholeConfig(1, 4)),
        (("group_norm", 32, "silu", False), (30, 1024, 11, 11), torch.float16, False, "forward", WholeConfig(1, 4)),
        (("group_norm", 32, "silu", False), (30, 512, 13, 13), torch.float16, False, "forward", HeldConfig(1, 4)),
        (("group_norm", 32, "silu", False), (30, 512, 17, 17), torch.float16, False, "forward", HeldConfig(1, 4)),
        (("group_norm", 32, "silu", True), (30, 1024, 11, 11),
         torch.float16, False, "forward", TilesConfig(PassConfig(1, 4096), PassConfig(32, 128, warps=8))),
        (("group_norm", 32, "silu", False), (30, 512, 13, 13), torch.float32, False, "forward", HeldConfig(1, 4)),
        (("group_norm", 32, "silu", False), (30, 256, 17, 17), torch.float32, False, "forward", HeldConfig(1, 4)),
        (("group_norm", 32, None, False), (10, 1024, 7, 7),
         torch.float16, False, "backward", TilesConfig(PassConfig(16, 64), PassConfig(32, 64))),
        (("group_norm", 32, None, False), (1, 512, 11, 11), torch.float16, False, "backward", HeldConfig(1, 8)),
        (("group_norm", 32, None, False), (2, 512, 11, 11),
         torch.float16, False, "backward", TilesConfig(PassConfig(8, 128), PassConfig(16, 128))),
        (("group_norm", 32, "silu", False), (30, 1024, 11, 11),
         torch.float16, False, "backward", TilesConfig(PassConfig(8, 128, warps=2), PassConfig(16, 128))),
        (("group_norm", 32, None, False), (4, 1024, 13, 13),
         torch.float16, False, "backward", TilesConfig(PassConfig(4, 256), PassConfig(8, 256))),
        (("group_norm", 32, None, False), (30, 512, 15, 15),
         torch.float16, False, "backward", TilesConfig(PassConfig(4, 256, warps=2), PassConfig(8, 256))),
        (("group_norm", 32, "silu", False), (100, 512, 15, 15), torch.float16, False, "backward", HeldConfig(1, 4)),
        (("group_norm", 32, "silu", False), (100, 512, 7, 7), torch.float16, False, "backward", HeldConfig(1, 1)),
        (("group_norm", 32, None, False), (10, 256, 17, 17), torch.float16, False, "backward", HeldConfig(1, 4)),
        (("group_norm", 32, None, False), (30, 512, 7, 14), torch.bfloat16, False, "backward", HeldConfig(1, 2)),
        (("group_norm", 32, None, False), (10, 1024, 7, 14),
         torch.bfloat16, False, "backward", TilesConfig(PassConfig(8, 128, warps=2), PassConfig(16, 128))),
        (("group_norm", 32, "relu", False), (30, 320, 13, 13), torch.float16, False, "backward", HeldConfig(1, 4)),
        (("group_norm", 32, None, False), (10, 1024, 11, 11),
         torch.float32, False, "backward", TilesConfig(PassConfig(4, 128, warps=2), PassConfig(8, 128, warps=2))),
        (("group_norm", 32, None, False), (10, 512, 15, 15),
         torch.float32, False, "backward", TilesConfig(PassConfig(2, 256, warps=2), PassConfig(4, 256, warps=2))),
        (("group_norm", 32, None, False), (30, 512, 13, 13), torch.float32, False, "backward", HeldConfig(1, 4)),
        (("group_norm", 32, None, False), (30, 256, 17, 17), torch.float32, False, "backward", HeldConfig(1, 4)),
        (("group_norm", 32, None, False), (40, 640, 7, 7), torch.float32, False, "backward", HeldConfig(1, 2)),
        (("layer_norm", 1, "silu", False), (540, 4096),
         torch.bfloat16, False, "backward", RowsBackwardConfig(1, 4, 132, 3)),
        (("layer_norm", 1, "silu", False), (2000, 4096),
         torch.bfloat16, False, "backward", RowsBackwardConfig(1, 4, 264, 3)),
        (("layer_norm", 1, None, False), (540, 4096),
         torch.float16, False, "backward", RowsBackwardConfig(1, 8, 132, 3)),
        (("layer_norm", 1, "gelu", False), (1500, 2090),
         torch.bfloat16, False, "backward", RowsBackwardConfig(2, 8, 264)),
        (("layer_norm", 1, None, False), (16610, 108),
         torch.float32, False, "backward", RowsBackwardConfig(2, 1, 1056, stages=4)),
        (("rms_norm", 1, None, False), (16610, 108),
         torch.float32, False, "backward", RowsBackwardConfig(2, 1, 1056, stages=4)),
        (("layer_norm", 1, "relu", False), (714, 8192), torch.bfloat16, False, "forward", StepsConfig(2048, 8)),
        (("layer_norm", 1, None, False), (1000, 6144), torch.bfloat16, False, "forward", WholeConfig(1, 8)),
        (("group_norm", 32, "silu", False), (6, 1280, 14, 14), torch.float16, True, "forward", HeldConfig(1, 16)),
        (("group_norm", 32, "silu", False), (10, 2560, 5, 5, 5), torch.bfloat16, True, "forward", HeldConfig(1, 16)),
        (("group_norm", 2, None, True), (1, 158, 16, 16, 16),
         torch.bfloat16, True, "forward", TilesConfig(PassConfig(64, 16, 4, 2, 6), PassConfig(128, 8, 2, 4, 1))),
        (("group_norm", 1, None, False), (2, 229, 37, 37),
         torch.float32, True, "backward", TilesConfig(PassConfig(64, 16, 4, 2, 3), PassConfig(128, 8, 2, 4, 1))),
        (("batch_norm", 0, "silu", False), (91, 192, 8, 8),
         torch.float32, True, "backward", TilesConfig(PassConfig(64, 4, 8, 1, 3), PassConfig(64, 16, 2, 2, 1))),
        (("batch_norm", 0, "silu", False), (91, 192, 8, 8),
         torch.float32, True, "forward", TilesConfig(PassConfig(64, 4, 8, 1, 4), PassConfig(64, 32, 2, 4, 1))),
        (("batch_norm", 0, "relu", True), (57, 32, 24, 32),
         torch.float32, True, "forward", TilesConfig(PassConfig(32, 8, 8, 1, 4), PassConfig(32, 64, 2, 4, 1))),
        (("group_norm", 32, "gelu_tanh", False), (1, 1280, 56, 8),
         torch.float32, True, "backward", TilesConfig(PassConfig(64, 4, 4, 1, 3), PassConfig(128, 16, 1, 4, 1))),
        (("batch_norm", 0, None, False), (65536, 28),
         torch.float16, False, "forward", TilesConfig(PassConfig(64, 16, 4, 1, 3), PassConfig(64, 32, 2, 2, 1))),
        (("batch_norm", 0, None, True), (57, 3, 167, 167),
         torch.bfloat16, True, "forward", TilesConfig(PassConfig(64, 64, 7, 4, 3), PassConfig(128, 32, 2, 4, 1))),
        (("batch_norm", 0, None, False), (2, 2, 1024, 1096),
         torch.float16, True, "forward", TilesConfig(PassConfig(8, 128, 8, 1, 3), PassConfig(8, 256, 2, 2, 1))),
        (("batch_norm", 0, None, False), (71, 6, 16, 16, 16),
         torch.float32, True, "forward", TilesConfig(PassConfig(64, 16, 12, 2, 4), PassConfig(64, 32, 2, 4, 1))),
        (("batch_norm", 0, None, False), (3, 15, 7, 3), torch.float16, True, "forward", HeldConfig(2, 1)),
        (("batch_norm", 0, "relu", False), (2, 15, 6, 5), torch.float32, True, "forward", HeldConfig(2, 1)),
        (("batch_norm", 0, None, False), (45, 16, 1, 1), torch.float32, True, "forward", HeldConfig(2, 1)),
        (("group_norm", 1, None, True), (30000, 57), torch.bfloat16, False, "backward", HeldConfig(1, 1, steps=8)),
        (("group_norm", 2, "silu", False), (4, 512, 51, 48),
         torch.bfloat16, False, "forward", TilesConfig(PassConfig(1, 4096, 1, 4, 1), PassConfig(4, 512, 2, 2, 1))),
        (("group_norm", 15, None, False), (9, 660, 17, 17),
         torch.bfloat16, False, "forward", TilesConfig(PassConfig(1, 4096, 1, 4, 1), PassConfig(4, 512, 1, 2, 1))),
        (("group_norm", 1, "gelu", False), (20, 85, 99, 99),
         torch.bfloat16, False, "forward", TilesConfig(PassConfig(1, 4096, 1, 4, 1), PassConfig(1, 2048, 2, 2, 1))),
        (("batch_norm", 0, "gelu_tanh", False), (19, 8, 56, 64),
         torch.bfloat16, False, "forward", TilesConfig(PassConfig(1, 4096, 1, 4, 1), PassConfig(1, 2048, 2, 4, 1))),
        (("batch_norm", 0, None, True), (3, 3, 51, 221, 77),
         torch.float16, False, "forward", TilesConfig(PassConfig(1, 8192, 1, 4, 1), PassConfig(1, 2048, 2, 2, 1))),
        (("instance_norm", 0, None, False), (6, 1, 581, 581),
         torch.bfloat16, False, "forward", TilesConfig(PassConfig(1, 4096, 1, 4, 1), PassConfig(1, 2048, 2, 2, 1))),
        (("layer_norm", 1, "gelu", False), (1500, 18001),
         torch.float32, False, "forward", TilesConfig(PassConfig(1, 4096, 1, 4, 1), PassConfig(2048, 1, 1, 4, 1))),
        (("layer_norm", 1, None, False), (1837, 20601),
         torch.float32, False, "forward", TilesConfig(PassConfig(1, 4096, 1, 4, 1), PassConfig(2048, 1, 1, 2, 1))),
        (("layer_norm", 1, None, False), (1000, 26001),
         torch.float32, False, "forward", TilesConfig(PassConfig(1, 4096, 1, 4, 1), PassConfig(2048, 1, 1, 2, 1))),
        (("layer_norm", 1, None, False), (600, 24001),
         torch.float32, False, "forward", StepsConfig(elements=8192, warps=16)),
        (("instance_norm", 0, "gelu_tanh", False), (45, 2, 139, 139),
         torch.bfloat16, True, "backward",
         TilesConfig(PassConfig(1024, 1, 5, 4, 4, long=True), PassConfig(8, 256, 1, 2, 1))),
        (("group_norm", 4, "silu", False), (17, 16, 307, 128),
         torch.bfloat16, True, "backward",
         TilesConfig(PassConfig(1024, 1, 20, 4, 4, long=True), PassConfig(16, 128, 1, 2, 1))),
        (("batch_norm", 0, "silu", True), (65536, 53),
         torch.bfloat16, False, "backward", TilesConfig(PassConfig(32, 16, 8, 1, 3), PassConfig(64, 32, 1, 4, 1))),
        (("group_norm", 32, "silu", False), (26, 32, 48, 48),
         torch.float32, True, "forward", TilesConfig(PassConfig(32, 16, 8, 2, 4), PassConfig(32, 64, 2, 4, 1))),
        (("batch_norm", 0, None, False), (80, 960, 11, 9),
         torch.float32, True, "forward", TilesConfig(PassConfig(64, 8, 11, 1, 4), PassConfig(64, 32, 2, 4, 1))),
        (("group_norm", 2429, "gelu", False), (16, 2429, 16, 16), torch.bfloat16, True, "backward", HeldConfig(16, 8)),
        (("batch_norm", 0, None, False), (4, 33, 7, 3), torch.bfloat16, True, "forward", HeldConfig(4, 4)),
        (("batch_norm", 0, None, True), (1433, 256),
         torch.float16, False, "forward", TilesConfig(PassConfig(64, 16, 1, 1, 3), PassConfig(128, 16, 1, 2, 1))),
        (("batch_norm", 0, None, True), (700, 1949),
         torch.float16, False, "forward", TilesConfig(PassConfig(64, 16, 3, 1, 3), PassConfig(128, 16, 2, 2, 1))),
        (("batch_norm", 0, "relu", True), (1200, 97),
         torch.bfloat16, False, "forward", TilesConfig(PassConfig(64, 16, 1, 1, 1), PassConfig(128, 8, 1, 8, 1))),
        (("batch_norm", 0, None, True), (1898, 2048),
         torch.float16, False, "forward", TilesConfig(PassConfig(64, 16, 4, 1, 3), PassConfig(128, 32, 2, 4, 1))),
        (("batch_norm", 0, "silu", True), (1433, 1949),
         torch.float16, False, "backward", TilesConfig(PassConfig(32, 8, 6, 2, 3), PassConfig(128, 32, 1, 4, 1))),
        (("batch_norm", 0, "silu", True), (1433, 1949),
         torch.float32, False, "backward", TilesConfig(PassConfig(64, 4, 5, 2, 3), PassConfig(128, 16, 1, 4, 1))),
        (("batch_norm", 0, "relu", True), (2500, 701),
         torch.float16, False, "backward", TilesConfig(PassConfig(32, 8, 5, 2, 3), PassConfig(128, 32, 1, 4, 1))),
        (("group_norm", 261, "gelu", False), (8, 1305, 21, 21),
         torch.bfloat16, True, "forward", TilesConfig(PassConfig(64, 16, 4, 1, 3), PassConfig(128, 32, 2, 4, 1))),
        (("group_norm", 261, None, False), (8, 1305, 21, 21),
         torch.float16, True, "backward", TilesConfig(PassConfig(32, 16, 4, 1, 3), PassConfig(128, 32, 1, 4, 1))),
        (("group_norm", 230, None, False), (20, 690, 16, 16),
         torch.bfloat16, True, "backward", TilesConfig(PassConfig(32, 16, 4, 1, 3), PassConfig(128, 32, 1, 4, 1))),
        (("instance_norm", 0, None, False), (2, 256, 31, 64), torch.float32, True, "backward", HeldConfig(8, 16)),
        (("batch_norm", 0, None, False), (65536, 128),
         torch.bfloat16, False, "forward", TilesConfig(PassConfig(64, 16, 8, 1, 3), PassConfig(128, 32, 2, 4, 1))),
        (("group_norm", 32, None, False), (30000, 384),
         torch.float32, False, "backward", HeldConfig(32, 8, samples=2, steps=29, stages=1)),
        (("group_norm", 300, None, False), (2000, 600),
         torch.float32, False, "backward", HeldConfig(64, 4, samples=8, steps=5, stages=3)),
        (("group_norm", 32, None, False), (40000, 64),
         torch.bfloat16, False, "backward", HeldConfig(32, 4, samples=16, steps=10, stages=3)),
        # Channels of all samples whose tiles are half full.
        (("batch_norm", 0, "silu", False), (44, 640, 16, 5), torch.bfloat16, False, "forward", HeldConfig(1, 8)),
        (("batch_norm", 0, None, False), (44, 640, 16, 5), torch.bfloat16, False, "forward", HeldConfig(1, 4)),
        (("batch_norm", 0, "silu", False), (44, 640, 16, 5), torch.bfloat16, False, "backward", HeldConfig(1, 8)),
        (("batch_norm", 0, None, False), (32, 1280, 8, 8), torch.float16, False, "backward", HeldConfig(1, 4)),
        (("batch_norm", 0, "relu", False), (32, 1280, 8, 8), torch.float32, False, "backward", HeldConfig(1, 4)),
        (("batch_norm", 0, "relu", False), (80, 1024, 8, 4), torch.bfloat16, False, "backward", HeldConfig(1, 8)),
        (("batch_norm", 0, "silu", False), (33, 1024, 8, 8), torch.bfloat16, False, "backward", HeldConfig(1, 4)),
        (("batch_norm", 0, "silu", False), (33, 1024, 8, 8), torch.bfloat16, False, "forward", HeldConfig(1, 4)),
        (("batch_norm", 0, "relu", False), (24, 768, 12, 12), torch.bfloat16, False, "backward", HeldConfig(1, 8)),
        (("batch_norm", 0, "relu", False), (24, 768, 12, 12), torch.bfloat16, False, "forward", HeldConfig(1, 8)),
        (("batch_norm", 0, "silu", False), (20, 1200, 10, 12), torch.float16, False, "backward", HeldConfig(1, 4)),
        (("batch_norm", 0, "silu", False), (20, 1200, 10, 12), torch.float16, False, "forward", HeldConfig(1, 4)),
        (("batch_norm", 0, None, False), (48, 2048, 4, 6), torch.bfloat16, False, "backward", HeldConfig(1, 4)),
        (("batch_norm", 0, "silu", False), (70, 900, 4, 10), torch.bfloat16, False, "backward", HeldConfig(1, 8)),
        (("batch_norm", 0, None, False), (2, 842, 47, 47), torch.float32, False, "backward", HeldConfig(1, 16)),
        # Walks of a warp alone.
        (("group_norm", 7, None, False), (65536, 301),
         torch.bfloat16, False, "backward", HeldConfig(1, 1, samples=2, steps=55)),
        (("group_norm", 7, None, True), (30000, 301), torch.bfloat16, False, "backward", HeldConfig(1, 1, steps=50)),
        (("group_norm", 24, "gelu_tanh", True), (23318, 696),
         torch.float32, False, "backward", HeldConfig(2, 1, samples=2, steps=67)),
        (("group_norm", 9, "silu", False), (20000, 189),
         torch.float32, False, "backward", HeldConfig(1, 1, samples=2, steps=22)),
        (("group_norm", 6, None, False), (50000, 102),
         torch.float32, False, "backward", HeldConfig(2, 1, samples=2, steps=18)),
        (("group_norm", 3, None, False), (40000, 75),
         torch.bfloat16, False, "backward", HeldConfig(1, 1, samples=2, steps=15)),
        (("group_norm", 13, "gelu", False), (8000, 390),
         torch.float16, False, "backward", HeldConfig(1, 1, samples=2, steps=13)),
        (("group_norm", 32, "silu", True), (9000, 352),
         torch.bfloat16, False, "backward", HeldConfig(4, 1, steps=18)),
        (("group_norm", 4, "relu", False), (2500, 1004), torch.bfloat16, False, "backward", HeldConfig(1, 1, steps=5)),
        (("group_norm", 7, None, False), (20000, 609),
         torch.float16, False, "backward", HeldConfig(1, 1, samples=2, steps=17)),
        (("group_norm", 5, "silu", False), (10000, 435),
         torch.bfloat16, False, "backward", HeldConfig(1, 1, steps=12)),
        (("layer_norm", 1, "relu", False), (354, 14333),
         torch.bfloat16, False, "forward", TilesConfig(PassConfig(1, 4096), PassConfig(2048, 1))),
        (("layer_norm", 1, None, False), (1000, 12001), torch.bfloat16, False, "forward", StepsConfig(2048, 2)),
        (("layer_norm", 1, None, False), (354, 9001), torch.bfloat16, False, "forward", WholeConfig(1, 8)),
        (("layer_norm", 1, None, False), (138, 16384), torch.bfloat16, False, "forward", StepsConfig(4096, 16)),
        (("layer_norm", 1, None, False), (430, 9562), torch.float32, False, "forward", StepsConfig(2048, 4)),
        (("layer_norm", 1, None, False), (430, 10000), torch.float32, False, "forward", StepsConfig(2048, 16)),
        (("layer_norm", 1, None, False), (200, 12002), torch.float32, False, "forward", WholeConfig(1, 8)),
        (("rms_norm", 1, None, False), (95, 7143), torch.float16, False, "backward", RowsBackwardConfig(1, 8, 264, 1)),
        (("layer_norm", 1, None, False), (7, 2, 61297, 251),
         torch.float16, False, "backward", RowsBackwardConfig(1, 1, 4224)),
        (("layer_norm", 1, "silu", False), (51, 220, 5, 181),
         torch.float16, False, "backward", RowsBackwardConfig(2, 1, 4224, 4)),
        (("group_norm", 73, None, True), (93, 73, 16, 16, 16),
         torch.float32, True, "forward", TilesConfig(PassConfig(64, 8, 32, 1, 4), PassConfig(64, 32, 2, 4, 1))),
        (("group_norm", 73, None, True), (9, 73, 60, 60),
         torch.float32, True, "forward", TilesConfig(PassConfig(64, 8, 8, 1, 4), PassConfig(64, 32, 2, 4, 1))),
        (("group_norm", 73, None, True), (60, 73, 45, 45),
         torch.float32, True, "forward", TilesConfig(PassConfig(64, 8, 16, 1, 4), PassConfig(64, 32, 2, 4, 1))),
        (("group_norm", 4, None, False), (111, 4, 16, 16, 16), torch.bfloat16, True, "forward", HeldConfig(4, 16)),
        (("group_norm", 4, None, False), (111, 4, 16, 16, 16), torch.bfloat16, True, "backward", HeldConfig(4, 16)),
        (("group_norm", 6, None, False), (60, 6, 14, 14, 14), torch.bfloat16, True, "forward", HeldConfig(4, 16)),
        (("instance_norm", 0, None, False), (50, 8, 60, 60), torch.bfloat16, True, "backward", HeldConfig(4, 16)),
        (("group_norm", 2, "relu", False), (100, 2, 60, 60), torch.float16, True, "forward", HeldConfig(2, 8)),
        (("instance_norm", 0, "leaky_relu", False), (85, 21, 32, 32),
         torch.bfloat16, True, "forward", HeldConfig(8, 8)),
        (("instance_norm", 0, None, False), (60, 33, 30, 30), torch.float16, True, "forward", HeldConfig(8, 8)),
        (("instance_norm", 0, None, True), (62, 759, 9, 17), torch.float16, True, "forward", HeldConfig(16, 8)),
        (("instance_norm", 0, "relu", True), (30, 501, 12, 12), torch.bfloat16, True, "forward", HeldConfig(16, 8)),
        (("batch_norm", 0, None, False), (11, 320, 25, 25), torch.bfloat16, False, "forward", HeldConfig(1, 4)),
        (("batch_norm", 0, "silu", False), (18, 700, 21, 21), torch.bfloat16, False, "forward", HeldConfig(1, 4)),
        (("batch_norm", 0, "relu", False), (30, 400, 15, 15), torch.bfloat16, False, "forward", HeldConfig(1, 4)),
        (("group_norm", 2, None, False), (65536, 146),
         torch.float32, False, "backward", HeldConfig(2, 1, steps=16)),
        (("group_norm", 4, None, False), (40000, 300),
         torch.float32, False, "backward", HeldConfig(2, 1, steps=19)),
        (("layer_norm", 1, None, False), (59108, 64),
         torch.float32, False, "backward", RowsBackwardConfig(4, 1, 1056, stages=4)),
        (("layer_norm", 1, "silu", False), (59108, 64),
         torch.bfloat16, False, "backward", RowsBackwardConfig(4, 1, 1056, stages=4)),
        (("layer_norm", 1, None, False), (80000, 32),
         torch.float32, False, "backward", RowsBackwardConfig(16, 2, 528, 4)),
        (("layer_norm", 1, "gelu", False), (1500, 394),
         torch.float16, False, "backward", RowsBackwardConfig(4, 4, 528, 1)),
        (("layer_norm", 1, None, False), (2511, 394),
         torch.bfloat16, False, "backward", RowsBackwardConfig(4, 4, 528, 1)),
        (("layer_norm", 1, "gelu", False), (9, 279, 394),
         torch.float16, False, "backward", RowsBackwardConfig(2, 4, 264, 4)),
        (("layer_norm", 1, None, False), (462, 1536),
         torch.bfloat16, False, "backward", RowsBackwardConfig(2, 8, 264, 1)),
        (("rms_norm", 1, None, False), (496, 2048),
         torch.bfloat16, False, "backward", RowsBackwardConfig(2, 8, 264, 1)),
        (("rms_norm", 1, None, False), (35, 8, 4096),
         torch.float16, False, "backward", RowsBackwardConfig(1, 8, 132, 3)),
        (("rms_norm", 1, None, False), (400, 4096),
         torch.bfloat16, False, "backward", RowsBackwardConfig(1, 8, 132, 3)),
        (("layer_norm", 1, None, False), (1500, 4719),
         torch.bfloat16, False, "backward", RowsBackwardConfig(1, 8, 132, 3)),
        (("layer_norm", 1, "silu", False), (3000, 6001),
         torch.float16, False, "backward", RowsBackwardConfig(1, 8, 132, 3)),
        (("layer_norm", 1, "gelu", False), (6000, 6620),
         torch.bfloat16, False, "backward", RowsBackwardConfig(1, 16, 132, 1)),
        (("layer_norm", 1, "silu", False), (5000, 7168),
         torch.float16, False, "backward", RowsBackwardConfig(1, 8, 132, 3)),
        (("layer_norm", 1, "gelu", False), (8000, 5000),
         torch.float16, False, "backward", RowsBackwardConfig(1, 8, 132, 3)),
        (("rms_norm", 1, None, False), (2500, 9001),
         torch.bfloat16, False, "backward", RowsBackwardConfig(1, 16, 132, 1)),
        (("layer_norm", 1, None, False), (166, 11443),
         torch.float16, False, "backward", ColumnsBackwardConfig(2048, 8, 264, 1024, 4, 8, 1)),
        (("layer_norm", 1, "silu", False), (120, 14001),
         torch.bfloat16, False, "backward", ColumnsBackwardConfig(2048, 8, 528, 1024, 4, 8, 1)),
        (("instance_norm", 0, "silu", False), (4, 96, 300, 200),
         torch.float16, True, "backward",
         TilesConfig(PassConfig(2048, 1, 44, 8, 4, long=True), PassConfig(128, 32, 1, 4, 1))),
        (("group_norm", 32, "silu", False), (2, 320, 200, 200),
         torch.bfloat16, True, "backward", TilesConfig(PassConfig(64, 16, 24, 2, 3), PassConfig(64, 32, 1, 2, 1))),
        (("instance_norm", 0, "gelu", True), (3, 2048, 29, 241),
         torch.bfloat16, True, "backward", TilesConfig(PassConfig(64, 16, 40, 2, 3), PassConfig(128, 16, 1, 2, 1))),
        (("group_norm", 32, None, False), (65536, 192),
         torch.float16, False, "backward", HeldConfig(4, 1, samples=4, steps=32, stages=1)),
        (("group_norm", 2, None, False), (15952, 1052),
         torch.bfloat16, False, "backward", HeldConfig(1, 2, samples=1, steps=61, stages=3)),
        (("group_norm", 4, None, False), (5000, 7000),
         torch.bfloat16, False, "backward", HeldConfig(1, 4, samples=1, steps=76, stages=3)),
        (("group_norm", 2, "silu", False), (9000, 1500),
         torch.bfloat16, False, "backward", HeldConfig(1, 2, samples=1, steps=35, stages=3)),
        (("group_norm", 8, "silu", False), (2515, 7952),
         torch.float16, False, "backward", HeldConfig(1, 2, samples=1, steps=39, stages=3)),
        (("group_norm", 2, None, False), (12000, 1554),
         torch.bfloat16, False, "backward", HeldConfig(1, 2, samples=1, steps=23, stages=3)),
        (("group_norm", 2, "relu", False), (21897, 1370),
         torch.float16, False, "backward", HeldConfig(1, 2, samples=1, steps=42, stages=3)),
        (("layer_norm", 1, "silu", False), (20000, 1099),
         torch.bfloat16, False, "backward", RowsBackwardConfig(2, 4, 528, stages=4)),
        (("layer_norm", 1, None, False), (15000, 1099),
         torch.bfloat16, False, "backward", RowsBackwardConfig(2, 4, 528, stages=4)),
        (("layer_norm", 1, "silu", False), (15000, 1021),
         torch.bfloat16, False, "backward", RowsBackwardConfig(2, 4, 528, stages=4)),
        (("layer_norm", 1, "silu", False), (20000, 549),
         torch.bfloat16, False, "backward", RowsBackwardConfig(2, 2, 1056, stages=4)),
        (("rms_norm", 1, "gelu_tanh", False), (29040, 1099),
         torch.bfloat16, False, "backward", RowsBackwardConfig(2, 4, 528, stages=4)),
        (("rms_norm", 1, "gelu", False), (20000, 549),
         torch.float16, False, "backward", RowsBackwardConfig(2, 2, 1056, stages=4)),
        (("rms_norm", 1, "silu", False), (9000, 3501),
         torch.float16, False, "backward", RowsBackwardConfig(1, 4, 264, stages=3)),
        (("layer_norm", 1, None, False), (20000, 583),
         torch.bfloat16, False, "backward", RowsBackwardConfig(1, 1, 1056, stages=3)),
        (("group_norm", 32, None, False), (7, 640, 63, 63),
         torch.bfloat16, True, "backward", TilesConfig(PassConfig(64, 16, 23, 2, 3), PassConfig(128, 32, 1, 4, 1))),
        (("batch_norm", 0, "relu", False), (32, 256, 40, 40),
         torch.bfloat16, True, "backward", TilesConfig(PassConfig(64, 16, 20, 2, 3), PassConfig(128, 32, 1, 4, 1))),
        (("instance_norm", 0, "gelu", False), (16, 16, 128, 128),
         torch.bfloat16, True, "backward",
         TilesConfig(PassConfig(1024, 1, 8, 4, 4, long=True), PassConfig(16, 128, 1, 2, 1))),
        (("group_norm", 32, "gelu", True), (9, 96, 83, 56),
         torch.bfloat16, True, "backward",
         TilesConfig(PassConfig(2048, 1, 8, 8, 4, long=True), PassConfig(128, 16, 1, 2, 1))),
        (("group_norm", 1, "silu", False), (229, 16, 33, 33),
         torch.bfloat16, True, "backward",
         TilesConfig(PassConfig(1024, 1, 6, 4, 4, long=True), PassConfig(16, 128, 1, 2, 1))),
        (("layer_norm", 1, "silu", False), (166, 11443),
         torch.float16, False, "forward", TilesConfig(PassConfig(1, 4096, 1, 4, 1), PassConfig(2048, 1, 1, 4, 1))),
        (("layer_norm", 1, "relu", False), (150, 10001),
         torch.bfloat16, False, "forward", TilesConfig(PassConfig(1, 4096, 1, 4, 1), PassConfig(2048, 1, 1, 4, 1))),
        (("layer_norm", 1, None, False), (260, 9001), torch.bfloat16, False, "forward", WholeConfig(1, 8)),
        (("layer_norm", 1, None, False), (71435, 64), torch.bfloat16, False, "forward", WholeConfig(64, 4)),
        (("layer_norm", 1, None, False), (40000, 64), torch.float16, False, "forward", WholeConfig(32, 4)),
        (("layer_norm", 1, None, False), (60000, 32), torch.bfloat16, False, "forward", WholeConfig(32, 2)),
        (("layer_norm", 1, None, False), (12000, 256), torch.float16, False, "forward", WholeConfig(4, 1)),
        (("layer_norm", 1, None, False), (5000, 256), torch.bfloat16, False, "forward", WholeConfig(4, 4)),
        (("rms_norm", 1, None, False), (8365, 256), torch.bfloat16, False, "forward", WholeConfig(4, 4)),
        (("layer_norm", 1, "gelu", False), (17887, 1536), torch.bfloat16, False,
         "backward", RowsBackwardConfig(1, 2, 792, stages=4)),
        (("layer_norm", 1, None, False), (17887, 1536), torch.bfloat16, False,
         "backward", RowsBackwardConfig(1, 2, 528, stages=4)),
        (("layer_norm", 1, "silu", False), (4000, 1536), torch.bfloat16, False,
         "backward", RowsBackwardConfig(1, 2, 528, stages=4)),
        (("layer_norm", 1, "gelu", False), (20000, 768), torch.float16, False,
         "backward", RowsBackwardConfig(1, 1, 1056, stages=4)),
        (("rms_norm", 1, None, False), (30000, 1280), torch.float16, False,
         "backward", RowsBackwardConfig(1, 2, 528, stages=4)),
        (("layer_norm", 1, None, False), (40000, 640), torch.float16, False,
         "backward", RowsBackwardConfig(1, 1, 1056, stages=4)),
        (("layer_norm", 1, "silu", False), (20000, 1152), torch.bfloat16, False,
         "backward", RowsBackwardConfig(1, 1, 1056, stages=3)),
        (("layer_norm", 1, "silu", False), (35000, 1048), torch.float16, False,
         "backward", RowsBackwardConfig(1, 1, 1056, stages=3)),
        (("layer_norm", 1, None, False), (65536, 320), torch.bfloat16, False,
         "backward", RowsBackwardConfig(1, 1, 1584, stages=4)),
        (("rms_norm", 1, None, False), (50000, 192), torch.bfloat16, False,
         "backward", RowsBackwardConfig(2, 1, 1584, stages=4)),
        (("layer_norm", 1, None, False), (8000, 2560), torch.bfloat16, False,
         "backward", RowsBackwardConfig(1, 4, 264, stages=4)),
        (("layer_norm", 1, None, False), (13615, 3072), torch.bfloat16, False,
         "backward", RowsBackwardConfig(1, 4, 264, stages=4)),
        (("layer_norm", 1, None, False), (20000, 768), torch.float32, False,
         "backward", RowsBackwardConfig(1, 2, 528, stages=4)),
        (("group_norm", 1, None, True), (65536, 42), torch.bfloat16, False, "forward", WholeConfig(8, 1)),
        (("batch_norm", 0, "gelu", True), (389, 871), torch.bfloat16, False,
         "backward", TilesConfig(PassConfig(32, 64, 1, 4), PassConfig(128, 8, 1, 4))),
        (("instance_norm", 0, None, False), (58, 192, 24, 24), torch.float16, False, "forward", WholeConfig(2, 1)),
        (("instance_norm", 0, None, False), (58, 192, 24, 24), torch.float16, False, "backward", HeldConfig(2, 2)),
        (("rms_norm", 1, None, False), (1269, 512), torch.float16, False, "forward", WholeConfig(2, 2)),
        (("rms_norm", 1, None, False), (3000, 3300), torch.float32, False, "forward", StepsConfig(2048, 8)),
        (("layer_norm", 1, None, False), (20000, 3300), torch.float32, False, "forward", StepsConfig(2048, 4)),
        (("rms_norm", 1, None, False), (1500, 3300), torch.float32, False,
         "backward", RowsBackwardConfig(1, 8, 264)),
        (("layer_norm", 1, None, False), (20000, 3300), torch.float32, False,
         "backward", RowsBackwardConfig(1, 8, 264)),
        (("rms_norm", 1, None, False), (362, 47010), torch.float32, False,
         "backward", ColumnsBackwardConfig(2048, 8, 264, 1024, 16, 4)),
        (("rms_norm", 1, None, False), (1000, 18900), torch.bfloat16, False,
         "backward", ColumnsBackwardConfig(2048, 8, 264, 1024, 16, 4)),
        (("rms_norm", 1, None, False), (6000, 18900), torch.bfloat16, False,
         "backward", ColumnsBackwardConfig(2048, 8, 264, 1024, 32, 4, 3)),
        (("instance_norm", 0, None, False), (11, 3, 9), torch.float32, False, "forward", WholeConfig(2, 1)),
        (("instance_norm", 0, None, True), (11, 3, 9), torch.float32, False, "forward", HeldConfig(4, 1)),
        (("instance_norm", 0, None, False), (3, 5, 3, 3), torch.float32, False, "forward", WholeConfig(2, 1)),
        (("instance_norm", 0, None, False), (10, 50, 3, 3), torch.float32, False, "forward", WholeConfig(4, 1)),
        (("instance_norm", 0, None, False), (10, 53, 3, 3), torch.float32, False, "forward", HeldConfig(4, 1)),
        (("instance_norm", 0, "silu", False), (4, 42, 3, 3, 3), torch.float32, False, "forward", WholeConfig(1, 1)),
        (("instance_norm", 0, None, False), (1, 16, 341), torch.float32, False, "forward", WholeConfig(1, 1)),
        (("group_norm", 32, None, False), (22, 64), torch.float32, False, "forward", WholeConfig(64, 1)),
        (("group_norm", 32, "silu", False), (49, 192), torch.float32, False, "forward", WholeConfig(16, 1)),
        (("group_norm", 32, None, False), (64, 96), torch.bfloat16, False, "forward", WholeConfig(16, 1)),
        (("group_norm", 17, "silu", False), (20, 17, 8, 8), torch.bfloat16, True, "forward", HeldConfig(8, 4)),
        (("group_norm", 200, None, False), (1, 200, 7, 7), torch.bfloat16, True, "forward", HeldConfig(4, 1)),
        (("instance_norm", 0, None, False), (8, 16, 9, 9), torch.float32, True, "forward", HeldConfig(1, 1)),
        (("instance_norm", 0, None, False), (2, 40, 8, 8), torch.float32, True, "forward", HeldConfig(4, 1)),
        (("group_norm", 1, "silu", False), (28, 3, 7, 1), torch.float32, True, "forward", HeldConfig(2, 1)),
        (("batch_norm", 0, None, False), (3, 32, 3, 5), torch.bfloat16, False, "forward", HeldConfig(2, 1)),
        (("batch_norm", 0, "relu", False), (46, 3, 3, 5), torch.float16, True, "forward", HeldConfig(1, 4)),
        (("batch_norm", 0, None, False), (71, 2, 11, 11), torch.bfloat16, False,
         "forward", TilesConfig(PassConfig(2, 128, 1, 4), PassConfig(2, 128, 1, 4))),
        (("batch_norm", 0, None, False), (40, 3, 17, 17), torch.float16, False, "forward", HeldConfig(1, 16)),
        (("group_norm", 5, None, False), (5, 965, 7, 1), torch.bfloat16, False, "forward", WholeConfig(1, 8)),
        (("group_norm", 5, None, False), (10, 300, 5), torch.bfloat16, False, "forward", WholeConfig(1, 4)),
        (("rms_norm", 1, None, False), (4, 138), torch.bfloat16, False, "forward", WholeConfig(1, 1)),
        (("batch_norm", 0, "silu", False), (21, 1, 102985), torch.float32, False,
         "forward", TilesConfig(PassConfig(1, 4096, 1, 4), PassConfig(1, 2048, 2, 2))),
        (("batch_norm", 0, "silu", False), (31, 1, 102985), torch.float32, False,
         "forward", TilesConfig(PassConfig(1, 8192, 1, 4), PassConfig(1, 2048, 2, 2))),
        (("instance_norm", 0, None, False), (9, 16, 9, 9), torch.float32, True, "forward", HeldConfig(4, 2)),
        (("group_norm", 17, "silu", False), (80, 17, 8, 8), torch.bfloat16, True, "forward", HeldConfig(16, 4)),
        (("group_norm", 1, "silu", False), (140, 3, 7, 1), torch.float32, True, "forward", HeldConfig(8, 2)),
        (("batch_norm", 0, None, False), (3, 65, 3, 5), torch.bfloat16, False, "forward", HeldConfig(4, 2)),
        (("batch_norm", 0, "relu", False), (46, 4, 3, 5), torch.float16, True, "forward", HeldConfig(4, 8)),
        (("group_norm", 5, None, False), (30, 965, 7, 1), torch.bfloat16, False, "forward", HeldConfig(1, 16)),
        (("instance_norm", 0, None, True), (8, 16, 9, 9), torch.float32, True, "forward", HeldConfig(4, 2)),
        (("instance_norm", 0, None, False), (14, 10, 3, 3), torch.float32, False, "forward", WholeConfig(4, 1)),
        (("instance_norm", 0, None, False), (13, 10, 3, 3), torch.float32, False, "forward", WholeConfig(2, 1)),
        (("rms_norm", 1, None, False), (310, 28672), torch.float32, False, "forward", StepsConfig(4096, 16)),
        (("rms_norm", 1, None, False), (500, 28672), torch.float32, False, "forward", StepsConfig(8192, 16)),
        (("rms_norm", 1, "silu", False), (700, 26000), torch.float32, False, "forward", StepsConfig(8192, 16)),
        (("rms_norm", 1, None, False), (1050, 28672), torch.float32, False, "forward", StepsConfig(16384, 16)),
        (("rms_norm", 1, None, False), (1610, 5420), torch.float32, False, "forward", StepsConfig(4096, 16)),
        (("rms_norm", 1, None, False), (700, 5420), torch.float32, False, "forward", WholeConfig(1, 8)),
        (("layer_norm", 1, "relu", False), (3360, 8192), torch.float32, False, "forward", StepsConfig(4096, 8)),
        (("rms_norm", 1, None, False), (50, 28672), torch.float16, False, "forward", StepsConfig(4096, 16)),
        (("layer_norm", 1, None, False), (7000, 440), torch.float16, False, "forward", WholeConfig(2, 1)),
        (("rms_norm", 1, None, False), (25000, 384), torch.bfloat16, False, "forward", WholeConfig(2, 2)),
        (("rms_norm", 1, "silu", False), (12000, 448), torch.float16, False, "forward", WholeConfig(2, 2)),
        (("rms_norm", 1, None, False), (14907, 268), torch.bfloat16, False, "forward", WholeConfig(2, 1)),
        (("layer_norm", 1, None, False), (5000, 1536), torch.bfloat16, False, "forward", WholeConfig(1, 2)),
        (("layer_norm", 1, None, False), (2288, 1536), torch.float32, False, "forward", WholeConfig(2, 4)),
        (("batch_norm", 0, None, False), (4, 41, 3, 1), torch.float32, True, "forward", HeldConfig(8, 1)),
        (("instance_norm", 0, None, True), (6, 64, 5, 5, 5), torch.bfloat16, True, "forward", HeldConfig(4, 1)),
        (("instance_norm", 0, None, False), (6, 64, 11, 11), torch.bfloat16, True, "forward", HeldConfig(4, 1)),
        (
            ("batch_norm", 0, None, True),
            (33, 8, 27, 19),
            torch.float16,
            False,
            "forward",
            TilesConfig(PassConfig(4, 512, warps=2), PassConfig(4, 1024)),
        ),
        (
            ("batch_norm", 0, "relu", False),
            (24, 12, 27, 27),
            torch.bfloat16,
            False,
            "forward",
            TilesConfig(PassConfig(4, 512, warps=2), PassConfig(4, 1024)),
        ),
        (
            ("batch_norm", 0, None, False),
            (64, 10, 33, 33),
            torch.float16,
            False,
            "forward",
            TilesConfig(PassConfig(2, 2048), PassConfig(2, 2048)),
        ),
        (("batch_norm", 0, "silu", True), (16, 30, 19, 19), torch.bfloat16, False, "forward", HeldConfig(1, 8)),
        (("batch_norm", 0, None, True), (30, 20, 15, 15), torch.float32, False, "forward", HeldConfig(1, 8)),
        (("batch_norm", 0, "silu", False), (145, 32), torch.bfloat16, False, "forward", HeldConfig(2, 2)),
        (
            ("group_norm", 100, None, False),
            (3, 700, 30, 30),
            torch.bfloat16,
            True,
            "forward",
            TilesConfig(PassConfig(64, 16, warps=1), PassConfig(128, 8, tiles=2)),
        ),
        (("instance_norm", 0, None, False), (50, 2000, 75), torch.float16, False, "backward", HeldConfig(8, 1)),
        (("instance_norm", 0, None, False), (60, 1000, 15, 15), torch.bfloat16, False, "backward", HeldConfig(4, 1)),
        (("instance_norm", 0, None, False), (100, 1200, 7, 7), torch.float16, False, "backward", HeldConfig(8, 1)),
        (("group_norm", 320, None, False), (100, 640, 7, 7), torch.bfloat16, False, "backward", HeldConfig(4, 1)),
        (("group_norm", 256, "silu", False), (60, 1024, 5, 5), torch.float16, False, "backward", HeldConfig(4, 2)),
        (("group_norm", 64, None, False), (100, 256, 9, 9), torch.float16, False, "backward", HeldConfig(2, 1)),
        (
            ("instance_norm", 0, "gelu_tanh", False),
            (47, 1280, 3, 3),
            torch.float32,
            False,
            "backward",
            HeldConfig(32, 1),
        ),
        (
            ("batch_norm", 0, None, True),
            (25, 700, 7, 7),
            torch.bfloat16,
            False,
            "backward",
            TilesConfig(PassConfig(16, 64), PassConfig(32, 64)),
        ),
        (("batch_norm", 0, "relu", True), (50, 640, 3, 3, 3), torch.bfloat16, False, "backward", HeldConfig(1, 8)),
        (("batch_norm", 0, None, False), (27, 4, 3, 1), torch.float32, False, "backward", HeldConfig(1, 1)),
        (("batch_norm", 0, None, False), (12, 320, 3, 1), torch.float16, False, "backward", HeldConfig(2, 1)),
        (("batch_norm", 0, None, False), (14, 400, 4, 1), torch.bfloat16, False, "backward", HeldConfig(4, 2)),
        (("group_norm", 1, None, False), (1, 3, 519), torch.bfloat16, False, "backward", HeldConfig(1, 8)),
        (
            ("rms_norm", 1, None, False),
            (220, 2111),
            torch.float32,
            False,
            "backward",
            RowsBackwardConfig(2, 16, 132, stages=3),
        ),
        (
            ("rms_norm", 1, None, False),
            (400, 3072),
            torch.float16,
            False,
            "backward",
            RowsBackwardConfig(2, 16, 264, stages=3),
        ),
        (
            ("layer_norm", 1, None, False),
            (632, 144),
            torch.bfloat16,
            False,
            "backward",
            RowsBackwardConfig(4, 2, 264, stages=3),
        ),
        (
            ("layer_norm", 1, "leaky_relu", False),
            (1853, 128),
            torch.float16,
            False,
            "backward",
            RowsBackwardConfig(4, 1, 1056),
        ),
        (("batch_norm", 0, None, False), (56, 437), torch.float32, False, "forward", HeldConfig(8, 8)),
        (("batch_norm", 0, "relu", False), (33, 300), torch.float32, False, "forward", HeldConfig(4, 4)),
        (("layer_norm", 1, None, False), (82, 497), torch.bfloat16, False, "forward", WholeConfig(1, 4)),
        (("layer_norm", 1, None, False), (160, 497), torch.bfloat16, False, "forward", WholeConfig(1, 1)),
        (("batch_norm", 0, None, False), (60, 700), torch.float32, False, "forward", HeldConfig(8, 8)),
        (("batch_norm", 0, None, True), (28, 200, 8, 8, 8), torch.bfloat16, False, "forward", HeldConfig(1, 16)),
        (("batch_norm", 0, None, True), (28, 200, 8, 8, 8),
         torch.bfloat16, False, "backward", TilesConfig(PassConfig(2, 512, tiles=1, warps=2, stages=1),
                     PassConfig(4, 512, tiles=1, warps=4, stages=1))),
        (("batch_norm", 0, None, True), (60, 100, 14, 14), torch.bfloat16, False, "forward", HeldConfig(1, 16)),
        (("batch_norm", 0, None, True), (40, 64, 16, 16), torch.bfloat16, False, "backward", HeldConfig(1, 16)),
        (("batch_norm", 0, None, True), (28, 100, 8, 8, 8), torch.float32, False, "forward", HeldConfig(1, 16)),
        (("batch_norm", 0, "silu", True), (40, 32, 16, 16), torch.float16, False, "forward", HeldConfig(1, 16)),
        (("instance_norm", 0, None, False), (3, 768, 16, 9), torch.float16, True, "forward", HeldConfig(16, 4)),
        (("instance_norm", 0, None, False), (2, 640, 16, 16), torch.float32, True, "forward", HeldConfig(16, 4)),
        (("instance_norm", 0, "silu", False), (3, 384, 16, 16), torch.float16, True, "forward", HeldConfig(16, 4)),
        (("instance_norm", 0, None, False), (40, 320, 14, 14), torch.float16, True, "forward", HeldConfig(16, 2)),
        (("instance_norm", 0, None, False), (33, 6, 4352, 1), torch.float16, True, "forward", HeldConfig(2, 16)),
        (("batch_norm", 0, None, True), (33, 768, 11, 1), torch.float16, True, "backward", HeldConfig(8, 4)),
        (("batch_norm", 0, None, True), (20, 500, 15, 1), torch.float16, True, "forward", HeldConfig(8, 2)),
        (("batch_norm", 0, None, True), (20, 500, 15, 1), torch.float16, True, "backward", HeldConfig(8, 2)),
        (("batch_norm", 0, None, True), (60, 900, 7, 1), torch.bfloat16, True, "backward", HeldConfig(8, 4)),
        (("batch_norm", 0, None, True), (40, 600, 9, 1), torch.float16, True, "backward", HeldConfig(8, 4)),
        (("rms_norm", 1, None, False), (104, 20140), torch.float16, False, "forward", StepsConfig(4096, 16)),
        (("rms_norm", 1, None, False), (500, 21504), torch.bfloat16, False, "forward", StepsConfig(4096, 16)),
        (("rms_norm", 1, "relu", False), (600, 57344), torch.bfloat16, False, "forward", StepsConfig(8192, 16)),
        (("rms_norm", 1, None, False), (300, 40960), torch.bfloat16, False, "forward", StepsConfig(8192, 16)),
        (("rms_norm", 1, None, False), (500, 33000), torch.float16, False, "forward", StepsConfig(16384, 16)),
        (("layer_norm", 1, None, False), (2000, 1024),
         torch.bfloat16, False, "backward", RowsBackwardConfig(4, 4, 528, stages=1)),
        (("rms_norm", 1, "silu", False), (1400, 896),
         torch.bfloat16, False, "backward", RowsBackwardConfig(4, 4, 528, stages=1)),
        (("layer_norm", 1, None, False), (60000, 100),
         torch.bfloat16, False, "backward", RowsBackwardConfig(2, 1, 2112, stages=3)),
        (("layer_norm", 1, None, False), (20000, 84),
         torch.bfloat16, False, "backward", RowsBackwardConfig(2, 1, 1056, stages=3)),
        (("layer_norm", 1, None, False), (40000, 188),
         torch.bfloat16, False, "backward", RowsBackwardConfig(1, 1, 2112, stages=4)),
        (("rms_norm", 1, "silu", False), (80000, 220),
         torch.float16, False, "backward", RowsBackwardConfig(1, 1, 2112, stages=4)),
        (("layer_norm", 1, None, False), (771908, 84),
         torch.bfloat16, False, "backward", RowsBackwardConfig(2, 1, 2112, stages=3)),
        (("rms_norm", 1, None, False), (5, 3072), torch.bfloat16, False, "backward", HeldConfig(1, 8)),
        (("layer_norm", 1, None, False), (4, 3072), torch.float32, False, "backward", HeldConfig(1, 8)),
        (("rms_norm", 1, "gelu", False), (4, 4096), torch.bfloat16, False, "backward", HeldConfig(1, 8)),
        (("layer_norm", 1, None, False), (420, 3076),
         torch.bfloat16, False, "backward", RowsBackwardConfig(4, 8, 132, stages=3)),
        (("rms_norm", 1, None, False), (350, 3999),
         torch.bfloat16, False, "backward", RowsBackwardConfig(4, 8, 132, stages=3)),
        (("layer_norm", 1, None, False), (4500, 117), torch.float16, False, "forward", WholeConfig(4, 1)),
        (("layer_norm", 1, None, False), (12000, 107), torch.bfloat16, False, "forward", WholeConfig(8, 1)),
        (("layer_norm", 1, None, False), (8400, 71), torch.float16, False, "forward", WholeConfig(8, 1)),
        (("batch_norm", 0, "gelu", False), (32, 384, 8), torch.float32, False, "backward", HeldConfig(2, 8)),
        (("instance_norm", 0, None, False), (3, 2560, 24, 24), torch.float16, False, "backward", HeldConfig(2, 2)),
        (("batch_norm", 0, "silu", True), (82, 815, 11), torch.float32, False, "forward", HeldConfig(1, 4)),
        (("batch_norm", 0, "silu", True), (40, 1000, 31), torch.float32, False, "forward", HeldConfig(1, 2)),
        (("layer_norm", 1, None, False), (13, 8192), torch.float32, False, "forward", HeldConfig(1, 8)),
        (("layer_norm", 1, None, False), (30, 8192), torch.bfloat16, False, "forward", HeldConfig(1, 8)),
        (("rms_norm", 1, None, False), (3, 5120), torch.float32, False, "forward", WholeConfig(1, 8)),
        (("rms_norm", 1, "silu", False), (4, 5120), torch.bfloat16, False, "forward", WholeConfig(1, 8)),
        (("layer_norm", 1, "relu", False), (2, 5929), torch.float16, False, "forward", WholeConfig(1, 8)),
        (("batch_norm", 0, None, False), (12, 1024, 540), torch.float32, False, "backward", HeldConfig(1, 16)),
        (("batch_norm", 0, None, False), (16, 1500, 189), torch.float32, False, "backward", HeldConfig(1, 8)),
        (("batch_norm", 0, None, False), (16, 2048, 189), torch.float16, False, "backward", HeldConfig(1, 4)),
        (("batch_norm", 0, None, False), (16, 2048, 225), torch.bfloat16, False, "backward", HeldConfig(1, 4)),
        (("batch_norm", 0, None, False), (16, 2048, 7, 27), torch.float32, False, "backward", HeldConfig(1, 8)),
        (("batch_norm", 0, None, False), (16, 3000, 250), torch.bfloat16, False, "backward", HeldConfig(1, 4)),
        (("batch_norm", 0, None, False), (24, 1024, 225), torch.float32, False, "backward", HeldConfig(1, 8)),
        (("batch_norm", 0, None, False), (30, 1280, 225), torch.float16, False, "backward", HeldConfig(1, 8)),
        (("batch_norm", 0, None, False), (32, 1024, 105), torch.float32, False, "backward", HeldConfig(1, 8)),
        (("batch_norm", 0, None, False), (40, 2048, 98), torch.bfloat16, False, "backward", HeldConfig(1, 8)),
        (("batch_norm", 0, None, False), (48, 1024, 100), torch.float32, False, "backward", HeldConfig(1, 16)),
        (("batch_norm", 0, None, False), (60, 2048, 49), torch.float32, False, "backward", HeldConfig(1, 8)),
        (("batch_norm", 0, "gelu", False), (6, 1280, 351), torch.float16, False, "backward", HeldConfig(1, 8)),
        (("batch_norm", 0, "relu", False), (20, 2048, 200), torch.float32, False, "backward", HeldConfig(1, 16)),
        (("batch_norm", 0, "silu", False), (16, 2048, 130), torch.float32, False, "backward", HeldConfig(1, 8)),
        (("batch_norm", 0, "silu", False), (24, 1500, 187), torch.bfloat16, False, "backward", HeldConfig(1, 8)),
        (("batch_norm", 0, "silu", False), (24, 1500, 225), torch.float32, False, "backward", HeldConfig(1, 8)),
        (("batch_norm", 0, "silu", False), (32, 1024, 121), torch.float32, False, "backward", HeldConfig(1, 8)),
        (("group_norm", 100, None, False), (11, 600, 609), torch.float16, False, "backward", HeldConfig(1, 4)),
        (("group_norm", 100, None, False), (12, 500, 942), torch.float32, False, "backward", HeldConfig(1, 8)),
        (("group_norm", 100, None, False), (18, 2000, 396), torch.float32, False, "backward", HeldConfig(1, 16)),
        (("group_norm", 100, None, False), (51, 2000, 155), torch.float32, False, "backward", HeldConfig(1, 4)),
        (("group_norm", 100, None, False), (52, 4000, 114), torch.bfloat16, False, "backward", HeldConfig(1, 8)),
        (("group_norm", 100, None, False), (52, 400, 594), torch.float32, False, "backward", HeldConfig(1, 4)),
        (("group_norm", 100, None, False), (89, 400, 1189), torch.float16, False, "backward", HeldConfig(1, 4)),
        (("group_norm", 100, "gelu", False), (14, 2400, 184), torch.float16, False, "backward", HeldConfig(1, 8)),
        (("group_norm", 100, "gelu", False), (14, 400, 1862), torch.float16, False, "backward", HeldConfig(1, 8)),
        (("group_norm", 100, "gelu", False), (2, 400, 2749), torch.float16, False, "backward", HeldConfig(1, 8)),
        (("group_norm", 100, "relu", False), (13, 500, 871), torch.float16, False, "backward", HeldConfig(1, 4)),
        (("group_norm", 100, "silu", False), (39, 600, 43, 40), torch.float16, False, "backward", HeldConfig(1, 8)),
        (("group_norm", 100, "silu", False), (8, 2400, 68), torch.float32, False, "backward", HeldConfig(1, 4)),
        (("group_norm", 11, None, False), (42, 22, 64, 27), torch.float32, True, "backward", HeldConfig(4, 8)),
        (("group_norm", 16, None, False), (46, 192, 32, 32), torch.bfloat16, False, "backward", HeldConfig(1, 4)),
        (("group_norm", 16, None, False), (52, 320, 428), torch.float32, False, "backward", HeldConfig(1, 16)),
        (("group_norm", 16, "gelu", False), (199, 64, 1200), torch.float32, False, "backward", HeldConfig(1, 8)),
        (("group_norm", 16, "relu", False), (152, 160, 22, 16), torch.float16, False, "backward", HeldConfig(1, 8)),
        (("group_norm", 256, None, False), (32, 512, 64, 64), torch.bfloat16, False, "backward", HeldConfig(1, 16)),
        (("group_norm", 256, "relu", False), (32, 512, 48, 105), torch.bfloat16, False, "backward", HeldConfig(1, 4)),
        (("group_norm", 256, "relu", False), (60, 512, 48, 48), torch.bfloat16, False, "backward", HeldConfig(1, 16)),
        (("group_norm", 256, "relu", False), (8, 2560, 22, 16), torch.float32, False, "backward", HeldConfig(1, 8)),
        (("group_norm", 32, None, False), (121, 384, 336), torch.bfloat16, False, "backward", HeldConfig(1, 8)),
        (("group_norm", 32, None, False), (12, 320, 686), torch.float32, False, "backward", HeldConfig(1, 16)),
        (("group_norm", 32, None, False), (28, 128, 2801), torch.float32, False, "backward", HeldConfig(1, 8)),
        (("group_norm", 32, None, False), (44, 384, 31, 32), torch.float32, False, "backward", HeldConfig(1, 16)),
        (("group_norm", 32, None, False), (64, 512, 28, 28), torch.bfloat16, False, "backward", HeldConfig(1, 16)),
        (("group_norm", 32, None, False), (97, 192, 16, 63), torch.float16, False, "backward", HeldConfig(1, 8)),
        (("group_norm", 32, "gelu", False), (100, 192, 30, 36), torch.bfloat16, False, "backward", HeldConfig(1, 8)),
        (("group_norm", 32, "gelu", False), (71, 192, 1394), torch.float16, False, "backward", HeldConfig(1, 8)),
        (("group_norm", 32, "gelu", False), (8, 256, 1401), torch.float16, False, "backward", HeldConfig(1, 8)),
        (("group_norm", 32, "leaky_relu", False), (159, 128, 27, 24), torch.float16, False, "backward",
         HeldConfig(1, 4)),
        (("group_norm", 32, "relu", False), (128, 128, 28, 28), torch.float16, False, "backward", HeldConfig(1, 4)),
        (("group_norm", 32, "relu", False), (188, 768, 20, 21), torch.bfloat16, False, "backward", HeldConfig(1, 4)),
        (("group_norm", 32, "relu", False), (21, 64, 4322), torch.float32, False, "backward", HeldConfig(1, 16)),
        (("group_norm", 32, "relu", False), (47, 320, 838), torch.float16, False, "backward", HeldConfig(1, 4)),
        (("group_norm", 32, "relu", False), (64, 128, 28, 28), torch.bfloat16, False, "backward", HeldConfig(1, 4)),
        (("group_norm", 32, "relu", False), (97, 384, 912), torch.bfloat16, False, "backward", HeldConfig(1, 4)),
        (("group_norm", 32, "silu", False), (120, 1280, 15, 16), torch.float32, False, "backward", HeldConfig(1, 16)),
        (("group_norm", 32, "silu", False), (136, 640, 13, 8), torch.bfloat16, False, "backward", HeldConfig(1, 4)),
        (("group_norm", 32, "silu", False), (16, 1280, 16, 16), torch.bfloat16, False, "backward", HeldConfig(1, 8)),
        (("group_norm", 32, "silu", False), (16, 320, 32, 32), torch.bfloat16, False, "backward", HeldConfig(1, 8)),
        (("group_norm", 32, "silu", False), (16, 640, 16, 16), torch.bfloat16, False, "backward", HeldConfig(1, 8)),
        (("group_norm", 32, "silu", False), (32, 1280, 8, 8), torch.float16, False, "backward", HeldConfig(1, 4)),
        (("group_norm", 32, "silu", False), (64, 1280, 16, 16), torch.float32, False, "backward", HeldConfig(1, 16)),
        (("group_norm", 32, "silu", False), (64, 640, 16, 16), torch.float16, False, "backward", HeldConfig(1, 8)),
        (("group_norm", 32, "silu", False), (74, 1280, 60), torch.bfloat16, False, "backward", HeldConfig(1, 4)),
        (("group_norm", 32, "silu", False), (8, 320, 32, 32), torch.float32, False, "backward", HeldConfig(1, 16)),
        (("group_norm", 32, "silu", False), (92, 160, 492), torch.float32, False, "backward", HeldConfig(1, 4)),
        (("group_norm", 64, None, False), (100, 768, 27, 34), torch.float16, False, "backward", HeldConfig(1, 4)),
        (("group_norm", 64, None, False), (110, 1280, 11, 8), torch.float16, False, "backward", HeldConfig(1, 4)),
        (("group_norm", 64, None, False), (25, 1280, 200), torch.bfloat16, False, "backward", HeldConfig(1, 8)),
        (("group_norm", 64, None, False), (65, 640, 448), torch.float32, False, "backward", HeldConfig(1, 8)),
        (("group_norm", 64, None, False), (78, 320, 38, 39), torch.float32, False, "backward", HeldConfig(1, 16)),
        (("group_norm", 64, None, False), (8, 1920, 141), torch.float32, False, "backward", HeldConfig(1, 4)),
        (("group_norm", 64, None, False), (9, 1920, 164), torch.float16, False, "backward", HeldConfig(1, 8)),
        (("group_norm", 64, "gelu", False), (54, 1024, 13, 15), torch.float16, False, "backward", HeldConfig(1, 4)),
        (("group_norm", 64, "gelu", False), (6, 1920, 146), torch.float32, False, "backward", HeldConfig(1, 8)),
        (("group_norm", 64, "gelu", False), (6, 320, 1240), torch.bfloat16, False, "backward", HeldConfig(1, 8)),
        (("group_norm", 64, "gelu", False), (9, 1536, 220), torch.float16, False, "backward", HeldConfig(1, 8)),
        (("group_norm", 64, "silu", False), (100, 256, 48, 40), torch.float16, False, "backward", HeldConfig(1, 8)),
        (("group_norm", 8, "silu", False), (190, 80, 21, 23), torch.float32, False, "backward", HeldConfig(1, 8)),
        (("group_norm", 9, "relu", False), (42, 18, 64, 27), torch.float32, True, "backward", HeldConfig(4, 8)),
        (("instance_norm", 0, None, False), (100, 300, 100), torch.float32, False, "backward", HeldConfig(8, 8)),
        (("instance_norm", 0, None, False), (112, 256, 112), torch.float32, False, "backward", HeldConfig(8, 8)),
        (("instance_norm", 0, None, False), (112, 256, 11, 8), torch.float32, False, "backward", HeldConfig(8, 8)),
        (("group_norm", 32, "relu", False), (130, 96, 50, 48), torch.float16, False, "forward", HeldConfig(1, 4)),
        (("group_norm", 32, "silu", False), (134, 96, 52, 54), torch.float16, False, "forward", HeldConfig(1, 8)),
        (("batch_norm", 0, "relu", False), (40, 1024, 121), torch.bfloat16, False, "backward",
         TilesConfig(PassConfig(64, 16, tiles=3, warps=2, stages=3), PassConfig(128, 32, tiles=1, warps=4, stages=1))),
        (("group_norm", 32, "silu", False), (59, 320, 872), torch.float32, False, "forward", HeldConfig(1, 8)),
        (("group_norm", 32, "relu", False), (24, 128, 53, 48), torch.float32, False, "forward", HeldConfig(1, 16)),
        (("batch_norm", 0, None, False), (48, 1500, 225), torch.float32, False, "forward", HeldConfig(1, 8)),
        (("group_norm", 64, "gelu", False), (20, 256, 1343), torch.bfloat16, False, "forward", HeldConfig(1, 8)),
        (("group_norm", 64, "gelu", False), (186, 384, 24, 26), torch.float16, False, "forward", HeldConfig(1, 4)),
        (("group_norm", 32, "silu", False), (24, 768, 332), torch.bfloat16, False, "backward",
         TilesConfig(PassConfig(8, 128, tiles=3, warps=2, stages=3), PassConfig(16, 64, tiles=2, warps=2, stages=1))),
        (("group_norm", 32, "relu", False), (32, 512, 14, 14), torch.float32, False, "forward", HeldConfig(1, 8)),
        (("batch_norm", 0, "silu", False), (60, 2048, 121), torch.float16, False, "forward",
         TilesConfig(PassConfig(64, 16, tiles=4, warps=1, stages=3), PassConfig(128, 32, tiles=2, warps=4, stages=1))),
        (("batch_norm", 0, None, False), (100, 700, 121), torch.bfloat16, False, "forward",
         TilesConfig(PassConfig(64, 16, tiles=4, warps=1, stages=3), PassConfig(128, 32, tiles=2, warps=4, stages=1))),
        (("group_norm", 64, "relu", False), (23, 768, 22, 24), torch.float16, False, "forward",
         TilesConfig(PassConfig(1, 4096, tiles=1, warps=4, stages=1), PassConfig(32, 64, tiles=2, warps=4, stages=1))),
        (("batch_norm", 0, None, False), (64, 1024, 232), torch.float16, False, "forward", HeldConfig(1, 16)),
        (("group_norm", 32, "relu", False), (64, 64, 56, 56), torch.bfloat16, False, "backward", HeldConfig(1, 16)),
        (("group_norm", 100, "leaky_relu", False), (133, 800, 24, 24), torch.float16, False, "backward",
         TilesConfig(PassConfig(16, 64, tiles=9, warps=2, stages=3), PassConfig(32, 64, tiles=2, warps=4, stages=1))),
        (("group_norm", 128, None, True), (53, 1280, 32, 16), torch.float16, True, "forward",
         TilesConfig(PassConfig(64, 16, tiles=32, warps=1, stages=3), PassConfig(128, 32, tiles=2, warps=4, stages=1))),
        (("group_norm", 64, "silu", False), (60, 768, 16, 16), torch.bfloat16, True, "forward", HeldConfig(2, 4)),
        (("rms_norm", 1, "gelu", False), (40, 512), torch.bfloat16, False, "forward", WholeConfig(1, 4)),
        (("rms_norm", 1, None, False), (4000, 495), torch.bfloat16, False, "forward", WholeConfig(2, 2)),
        (("batch_norm", 0, "silu", False), (2, 1002, 150, 1), torch.float32, True, "forward", HeldConfig(8, 8)),
        (("batch_norm", 0, "silu", False), (2, 135, 600, 1), torch.float32, True, "forward", HeldConfig(2, 8)),
        (("batch_norm", 0, "silu", False), (2, 1818, 300, 1), torch.bfloat16, True, "forward", HeldConfig(16, 8)),
        (("batch_norm", 0, "silu", False), (2, 1818, 300, 1), torch.float32, True, "forward", HeldConfig(8, 8)),
        (("batch_norm", 0, "silu", False), (2, 1002, 150, 1), torch.bfloat16, True, "forward", HeldConfig(8, 8)),
        (("instance_norm", 0, "silu", False), (1, 670, 1200, 1), torch.bfloat16, True, "forward", HeldConfig(8, 8)),
        (("instance_norm", 0, "silu", False), (1, 271, 600, 1), torch.float32, True, "forward", HeldConfig(4, 8)),
        (("instance_norm", 0, "silu", False), (1, 3001, 300, 1), torch.float32, True, "forward", HeldConfig(8, 8)),
        (("batch_norm", 0, "silu", False), (2, 498, 750, 1), torch.bfloat16, True, "forward", HeldConfig(8, 8)),
        (("batch_norm", 0, None, False), (4, 670, 5, 9, 16), torch.float32, True, "forward",
         TilesConfig(PassConfig(64, 8, tiles=6, warps=1, stages=4), PassConfig(128, 16, tiles=2, warps=2, stages=1))),
        (("instance_norm", 0, None, False), (1, 1818, 2048, 1), torch.bfloat16, True, "forward",
         TilesConfig(PassConfig(64, 16, tiles=4, warps=1, stages=3), PassConfig(128, 32, tiles=2, warps=4, stages=1))),
        (("batch_norm", 0, "silu", False), (2, 1818, 600, 1), torch.bfloat16, True, "forward",
         TilesConfig(PassConfig(64, 16, tiles=4, warps=1, stages=3), PassConfig(128, 32, tiles=2, warps=4, stages=1))),
        (("group_norm", 1, None, False), (9, 1, 75, 169), torch.float16, False, "backward",
         TilesConfig(PassConfig(1, 2048, tiles=1, warps=4, stages=1), PassConfig(1, 1024, tiles=1, warps=2, stages=1))),
        (("group_norm", 30, None, False), (2, 90, 32, 32), torch.float16, True, "backward",
         TilesConfig(PassConfig(32, 128, tiles=1, warps=4, stages=1), PassConfig(128, 8, tiles=1, warps=4, stages=1))),
        (("group_norm", 7, "leaky_relu", False), (5, 1379, 3, 3, 3), torch.float32, True, "backward",
         TilesConfig(PassConfig(64, 16, tiles=1, warps=2, stages=1), PassConfig(128, 8, tiles=1, warps=4, stages=1))),
        (("batch_norm", 0, None, False), (68, 2224, 4, 4), torch.float32, False, "forward", HeldConfig(1, 4)),
        (("rms_norm", 1, "relu", False), (1500, 509), torch.float16, False, "forward", WholeConfig(2, 1)),
        (("rms_norm", 1, "leaky_relu", False), (2300, 511), torch.float16, False, "forward", WholeConfig(2, 2)),
        (("layer_norm", 1, None, False), (4500, 766), torch.float16, False, "forward", WholeConfig(2, 2)),
        (("layer_norm", 1, None, False), (4500, 640), torch.bfloat16, False, "forward", WholeConfig(2, 1)),
        (("instance_norm", 0, None, False), (32, 256, 96, 100), torch.float16, False, "forward", StepsConfig(1024, 4)),
        (("instance_norm", 0, "relu", False), (16, 256, 112, 112), torch.bfloat16, False, "backward",
         StepsConfig(2048, 8)),
        (("group_norm", 64, None, False), (145, 384, 371), torch.float32, False, "forward", HeldConfig(1, 4)),
        (("group_norm", 64, "silu", False), (111, 768, 21, 23), torch.float16, True, "forward",
         TilesConfig(PassConfig(64, 16, tiles=31, warps=1, stages=3), PassConfig(128, 32, tiles=2, warps=4, stages=1))),
        (("instance_norm", 0, None, False), (55, 909, 48, 105), torch.bfloat16, False, "backward", HeldConfig(1, 4)),
        (("batch_norm", 0, "silu", False), (1, 23, 137, 39), torch.float32, False, "backward", HeldConfig(1, 16)),
        (("group_norm", 6, None, False), (2955, 204),
         torch.float32, False, "backward", HeldConfig(2, 1, steps=3)),
        (("group_norm", 2, None, False), (8000, 60),
         torch.float32, False, "backward", HeldConfig(2, 1, samples=2, steps=2)),
        (("group_norm", 4, "silu", False), (6000, 128),
         torch.float32, False, "backward", HeldConfig(4, 1, steps=2)),
        (("group_norm", 8, "relu", False), (900, 384),
         torch.float32, False, "backward", HeldConfig(2, 1, steps=2)),
        (("group_norm", 100, "silu", False), (60, 800, 18, 18), torch.float16, True, "forward", HeldConfig(2, 8)),
        (("group_norm", 32, None, False), (111, 1280, 3, 7), torch.float16, False, "backward", HeldConfig(1, 4)),
        (("group_norm", 32, None, True), (90, 1280, 3, 7), torch.float16, False, "backward", HeldConfig(1, 2)),
        (("group_norm", 32, None, False), (150, 1120, 19), torch.float16, False, "backward", HeldConfig(1, 4)),
        (("group_norm", 32, "silu", False), (100, 1120, 19), torch.float32, False, "backward", HeldConfig(1, 4)),
        (("group_norm", 32, None, False), (80, 1280, 3, 7), torch.float32, False, "backward", HeldConfig(1, 4)),
        (("group_norm", 20, "silu", False), (128, 700, 3, 5), torch.float16, False, "backward", HeldConfig(1, 4)),
        (("group_norm", 32, "silu", False), (120, 576, 17), torch.float16, False, "backward", HeldConfig(1, 1)),
        (("group_norm", 32, "relu", False), (77, 2048, 63), torch.float16, False, "backward", HeldConfig(1, 8)),
        (("group_norm", 16, "relu", False), (60, 960, 45),
         torch.bfloat16, False, "backward", TilesConfig(PassConfig(16, 64, 1, 2), PassConfig(32, 64, 1, 4))),
        (("group_norm", 16, "silu", False), (90, 640, 3, 11),
         torch.bfloat16, False, "backward", TilesConfig(PassConfig(16, 64, 1, 2), PassConfig(8, 64, 1, 2))),
        (("group_norm", 8, None, False), (100, 320, 7, 7),
         torch.float16, False, "backward", TilesConfig(PassConfig(16, 64, 1, 2), PassConfig(8, 64, 1, 2))),
        (("group_norm", 2, None, False), (107, 128, 5, 5, 5),
         torch.float32, False, "backward", TilesConfig(PassConfig(4, 128, 1, 2), PassConfig(8, 128, 1, 2))),
        (("group_norm", 1, "relu", False), (90, 64, 125),
         torch.float32, False, "backward", TilesConfig(PassConfig(4, 128, 1, 2), PassConfig(8, 128, 1, 2))),
        (("instance_norm", 0, None, False), (57, 2560, 3, 3), torch.float16, False, "backward", HeldConfig(32, 4)),
        (("instance_norm", 0, "gelu", False), (57, 2560, 3, 3), torch.float16, False, "backward", HeldConfig(16, 2)),
        (("instance_norm", 0, "relu", False), (43, 406, 7, 27), torch.float16, True, "backward", HeldConfig(16, 8)),
        (("instance_norm", 0, "gelu_tanh", False), (20, 501, 15, 13),
         torch.bfloat16, True, "backward", HeldConfig(8, 8)),
    ],
)  # fmt: skip
def test_the_configurations_of_drawn_shapes_that_were_measured(
    called: tuple[Family, int, str | None, bool], shape: tuple[int, ...], dtype: torch.dtype, last: bool,
    direction: str, expected: Any, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(instances, "_common", lambda problem: None)
    assert _configuration(called, shape, dtype, last, direction) == expected


@pytest.mark.parametrize(
    ("called", "shape", "dtype", "last", "direction", "expected"),
    [
        # More units than two waves of registers.
        (("group_norm", 32, "silu", False), (20, 1280, 14, 14),
         torch.float16, True, "forward", TilesConfig(PassConfig(64, 16, 5, 1, 3), PassConfig(128, 32, 2, 4))),
        # Many partials of a unit, but few programs.
        (("group_norm", 1, None, False), (1, 229, 40, 40),
         torch.float32, True, "backward", TilesConfig(PassConfig(64, 16, 2, 2, 3), PassConfig(128, 8, 1, 4))),
        # No smooth activation.
        (("instance_norm", 0, None, False), (45, 2, 139, 139),
         torch.bfloat16, True, "backward",
         TilesConfig(PassConfig(1024, 1, 5, 4, 4, long=True), PassConfig(8, 256, 1, 2))),
        # 16 bits.
        (("layer_norm", 1, "silu", False), (300, 50001),
         torch.bfloat16, False, "forward", TilesConfig(PassConfig(1, 4096), PassConfig(2048, 1, warps=2))),
        # Many channels.
        (("batch_norm", 0, None, False), (2, 60, 8, 4), torch.float16, True, "forward", HeldConfig(4, 1)),
        # Fewer points, and wide loads of as many.
        (("batch_norm", 0, None, True), (500, 2048), torch.bfloat16, False, "forward", HeldConfig(16, 4)),
        (("batch_norm", 0, None, True), (1024, 512), torch.bfloat16, False, "forward", HeldConfig(8, 8)),
        # Few channels.
        (("batch_norm", 0, "silu", True), (5000, 301),
         torch.float16, False, "backward", TilesConfig(PassConfig(32, 16, 8, 4, 3), PassConfig(128, 32, 1, 2, 1))),
        # Groups of many channels, and short ones of a forward.
        (("group_norm", 58, None, False), (16, 1798, 9, 9), torch.bfloat16, True, "backward", HeldConfig(1, 8)),
        (("group_norm", 301, "relu", False), (8, 1505, 15, 15), torch.bfloat16, True, "forward", HeldConfig(1, 4)),
        # Units that are longer or fill their lanes.
        (("group_norm", 32, None, False), (65536, 256),
         torch.float32, False, "backward", HeldConfig(32, 2, samples=4, steps=32, stages=3)),
        (("group_norm", 8, "relu", False), (12000, 128),
         torch.float16, False, "backward", HeldConfig(8, 2, samples=8, steps=3, stages=3)),
        # Shorter rows, and no mean.
        (("layer_norm", 1, None, False), (100000, 141),
         torch.float16, False, "backward", RowsBackwardConfig(2, 1, 4224, 1)),
        (("rms_norm", 1, None, False), (100000, 231),
         torch.float16, False, "backward", RowsBackwardConfig(1, 1, 4224)),
        (("rms_norm", 1, None, False), (130, 6001),
         torch.float16, False, "backward", RowsBackwardConfig(2, 16, 132, 1)),
        (("layer_norm", 1, None, False), (404, 12288), torch.float32, False, "forward", StepsConfig(4096, 8)),
        (("layer_norm", 1, None, False), (800, 9562), torch.float32, False, "forward", WholeConfig(1, 16)),
        # Smooth.
        (("instance_norm", 0, "silu", False), (2, 256, 31, 64), torch.float32, True, "backward", HeldConfig(4, 8)),
        # Longer units.
        (("group_norm", 32, None, False), (8097, 640),
         torch.float32, False, "backward", HeldConfig(32, 2, samples=1, steps=16, stages=3)),
        # No mean.
        (("rms_norm", 1, None, False), (138, 16384), torch.bfloat16, False, "forward", WholeConfig(1, 16)),
        # Fewer rows.
        (("layer_norm", 1, None, False), (132, 9001), torch.bfloat16, False, "forward", WholeConfig(1, 16)),
        # Units of 1024 elements, and others than 256.
        (("instance_norm", 0, None, True), (8, 515, 25, 25), torch.float32, True, "forward", HeldConfig(8, 16)),
        (("instance_norm", 0, None, True), (62, 759, 15, 20), torch.float16, True, "forward", HeldConfig(16, 8)),
        # Fewer units than multiprocessors.
        (("instance_norm", 0, "leaky_relu", False), (41, 2, 9, 8, 33),
         torch.bfloat16, True, "forward", HeldConfig(1, 4)),
        # Full rows of units.
        (("instance_norm", 0, "relu", False), (120, 13, 32, 32), torch.bfloat16, True, "forward", HeldConfig(16, 16)),
        # 32 bits, and planes of samples with scale and shift.
        (("batch_norm", 0, "relu", False), (11, 320, 25, 25), torch.float32, False, "forward", HeldConfig(1, 8)),
        (("batch_norm", 0, None, True), (11, 320, 25, 25),
         torch.bfloat16, False, "forward", TilesConfig(PassConfig(4, 1024, 1, 4, 1), PassConfig(16, 128, 2, 4, 1))),
        # A smooth activation, and 16 bits.
        (("group_norm", 2, "silu", False), (65536, 146),
         torch.float32, False, "backward", HeldConfig(1, 1, steps=32)),
        (("group_norm", 2, None, False), (65536, 146),
         torch.bfloat16, False, "backward", HeldConfig(1, 1, samples=2, steps=16)),
        # Fewer elements, and shorter rows of 16 bits.
        (("layer_norm", 1, None, False), (9000, 64),
         torch.float32, False, "backward", RowsBackwardConfig(16, 1, 1056)),
        (("layer_norm", 1, None, False), (80000, 32),
         torch.bfloat16, False, "backward", RowsBackwardConfig(8, 1, 1056, stages=4)),
        # Single elements.
        (("layer_norm", 1, None, False), (2511, 393),
         torch.bfloat16, False, "backward", RowsBackwardConfig(2, 4, 528, 4)),
        # More rows, and longer ones.
        (("layer_norm", 1, None, False), (600, 2048),
         torch.bfloat16, False, "backward", RowsBackwardConfig(1, 2, 264, 4)),
        (("rms_norm", 1, None, False), (700, 4096),
         torch.bfloat16, False, "backward", RowsBackwardConfig(1, 8, 264, 3)),
        # An activation, fuller lanes, a smooth one.
        (("group_norm", 16, "relu", False), (65536, 96),
         torch.float16, False, "backward", HeldConfig(16, 4, samples=8, steps=16, stages=1)),
        (("group_norm", 32, "relu", False), (987, 30368),
         torch.float16, False, "backward", HeldConfig(1, 4, samples=1, steps=62, stages=1)),
        (("group_norm", 3, "silu", False), (6000, 5001),
         torch.bfloat16, False, "backward", HeldConfig(1, 8, samples=1, steps=69, stages=1)),
        (("group_norm", 2, "silu", False), (21897, 1370),
         torch.float16, False, "backward", HeldConfig(1, 4, samples=1, steps=83, stages=1)),
        # 32 bits.
        (("instance_norm", 0, "gelu", False), (16, 16, 128, 128),
         torch.float32, True, "backward",
         TilesConfig(PassConfig(512, 1, 16, 4, 4, long=True), PassConfig(16, 64, 2, 2, 1))),
        # Scale and shift, 32 bits, longer units.
        (("group_norm", 32, None, True), (65536, 192),
         torch.float16, False, "backward", HeldConfig(16, 4, samples=4, steps=63, stages=1)),
        (("group_norm", 2, None, False), (12000, 1554),
         torch.float32, False, "backward", HeldConfig(1, 4, samples=1, steps=46, stages=1)),
        (("group_norm", 3, None, False), (9000, 6003),
         torch.float16, False, "backward", HeldConfig(1, 8, samples=1, steps=103, stages=1)),
        # A dearer activation, longer rows, pairs, none, fewer rows.
        (("layer_norm", 1, "gelu", False), (15000, 1131),
         torch.bfloat16, False, "backward", RowsBackwardConfig(1, 2, 528, stages=3)),
        (("layer_norm", 1, "silu", False), (15000, 1217),
         torch.bfloat16, False, "backward", RowsBackwardConfig(1, 2, 528, stages=3)),
        (("layer_norm", 1, "silu", False), (20000, 1098),
         torch.bfloat16, False, "backward", RowsBackwardConfig(1, 2, 528, stages=3)),
        (("layer_norm", 1, "silu", False), (1500, 1099),
         torch.bfloat16, False, "backward", RowsBackwardConfig(1, 2, 264, stages=3)),
        (("rms_norm", 1, None, False), (15000, 1151),
         torch.float16, False, "backward", RowsBackwardConfig(1, 2, 528, stages=3)),
        (("layer_norm", 1, None, False), (20000, 549),
         torch.bfloat16, False, "backward", RowsBackwardConfig(1, 1, 1056, stages=3)),
        (("rms_norm", 1, "gelu", False), (9000, 2601),
         torch.bfloat16, False, "backward", RowsBackwardConfig(2, 8, 264, stages=1)),
        (("rms_norm", 1, "silu", False), (500, 3501),
         torch.float16, False, "backward", RowsBackwardConfig(2, 8, 264, stages=1)),
        (("layer_norm", 1, "relu", False), (4893, 613),
         torch.float16, False, "backward", RowsBackwardConfig(1, 1, 528, stages=3)),
        # No mean.
        (("rms_norm", 1, "gelu", False), (6000, 6620),
         torch.bfloat16, False, "backward", RowsBackwardConfig(1, 8, 132, 3)),
        # More rows, and pairs.
        (("layer_norm", 1, None, False), (300, 11443),
         torch.float16, False, "backward", ColumnsBackwardConfig(2048, 8, 264, 512, 4, 4, 1)),
        (("layer_norm", 1, None, False), (166, 11442),
         torch.float16, False, "backward", ColumnsBackwardConfig(2048, 8, 264, 1024, 4, 4, 1)),
        # No smooth activation.
        (("instance_norm", 0, None, False), (4, 96, 300, 200),
         torch.float16, True, "backward",
         TilesConfig(PassConfig(2048, 1, 44, 8, 4, long=True), PassConfig(128, 32, 1, 4, 1))),
        # No mean, and pairs.
        (("rms_norm", 1, None, False), (166, 11443), torch.float16, False, "forward", WholeConfig(1, 8)),
        (("layer_norm", 1, None, False), (166, 11442), torch.float16, False, "forward", WholeConfig(1, 16)),
        (("rms_norm", 1, None, False), (71435, 64), torch.bfloat16, False, "forward", WholeConfig(32, 2)),
        (("layer_norm", 1, None, False), (30000, 256), torch.float16, False, "forward", WholeConfig(8, 2)),
        (("layer_norm", 1, None, False), (1500, 512), torch.bfloat16, False, "forward", WholeConfig(1, 1)),
        (("rms_norm", 1, None, False), (700, 3300), torch.float32, False, "forward", WholeConfig(1, 4)),
        (("rms_norm", 1, "silu", False), (3000, 3300), torch.float32, False, "forward", WholeConfig(1, 4)),
        (("rms_norm", 1, "silu", False), (1000, 18900), torch.bfloat16, False,
         "backward", ColumnsBackwardConfig(2048, 8, 264, 1024, 32, 4, 3)),
        (("rms_norm", 1, None, False), (1000, 18904), torch.bfloat16, False,
         "backward", ColumnsBackwardConfig(2048, 8, 264, 1024, 32, 4, 3)),
        (("batch_norm", 0, None, True), (40, 64, 16, 16), torch.float64, False,
         "forward", TilesConfig(PassConfig(4, 256, tiles=1, warps=4, stages=1),
                                PassConfig(4, 256, tiles=1, warps=4, stages=1))),
        (("batch_norm", 0, None, True), (40, 31, 16, 16), torch.float16, False,
         "forward", TilesConfig(PassConfig(16, 256, tiles=1, warps=4, stages=1),
                                PassConfig(16, 256, tiles=1, warps=4, stages=1))),
        (("batch_norm", 0, None, True), (33, 768, 11, 1), torch.float64, True, "backward", HeldConfig(8, 8)),
        (("batch_norm", 0, "relu", False), (1, 23, 137, 39), torch.float32, False, "backward", HeldConfig(1, 8)),
        (("batch_norm", 0, "silu", False), (1, 23, 137, 39), torch.float16, False, "backward", HeldConfig(1, 8)),
        (("rms_norm", 1, None, False), (5, 3072), torch.float64, False,
         "backward", RowsBackwardConfig(1, 16, 132, reload=True)),
        (("layer_norm", 1, None, False), (13, 4096), torch.float64, False, "forward", WholeConfig(1, 16)),
        (("layer_norm", 1, None, False), (33, 8192), torch.bfloat16, False, "forward", WholeConfig(1, 8)),
        (("group_norm", 4, "silu", False), (6000, 128),
         torch.bfloat16, False, "backward", HeldConfig(4, 4, samples=8, steps=3, stages=3)),
        (("group_norm", 6, None, False), (3414, 204),
         torch.float32, False, "backward", HeldConfig(2, 2, samples=8, steps=3, stages=3)),
        (("group_norm", 6, None, True), (2955, 204),
         torch.float32, False, "backward", HeldConfig(2, 4, samples=8, steps=5, stages=3)),
        (("group_norm", 2, None, False), (3000, 256),
         torch.float32, False, "backward", HeldConfig(2, 2, samples=4, steps=2, stages=3)),
        (("group_norm", 4, None, False), (8000, 64),
         torch.float32, False, "backward", HeldConfig(4, 2, samples=16, steps=2, stages=3)),
    ],
)  # fmt: skip
def test_the_configurations_beside_those_that_were_measured(
    called: tuple[Family, int, str | None, bool], shape: tuple[int, ...], dtype: torch.dtype, last: bool,
    direction: str, expected: Any, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Where the rules that those gave end."""
    monkeypatch.setattr(instances, "_common", lambda problem: None)
    assert _configuration(called, shape, dtype, last, direction) == expected


def _configuration(
    called: tuple[Family, int, str | None, bool],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    last: bool,
    direction: str,
) -> Any:
    """What the heuristics choose: the first configuration of the chosen instance."""
    family, groups, activation, modulated = called
    order = torch.channels_last_3d if len(shape) == 5 else torch.channels_last
    memory = order if last else torch.contiguous_format
    x = torch.empty(shape, dtype=dtype, device="meta").contiguous(memory_format=memory)
    scale = torch.empty(shape[:2], dtype=dtype, device="meta") if modulated else None
    norm = norm_of(family, groups, activation=resolve(activation))
    if direction == "forward":
        problem = forward_problem(norm, Operands(x, scale=scale, shift=scale))
    else:
        problem = backward_problem(norm, BackwardOperands(x, x, x, x, scale=scale, shift=scale))
    return instances.choose(problem).configs(problem)[0]


def _rows_plan(rows: int, length: int, dtype: torch.dtype) -> dict[str, Any]:
    x = torch.empty((rows, length), dtype=dtype, device="meta")
    constants: dict[str, Any] = instances.WHOLE.plan(
        forward_problem(norm_of("layer_norm", 1), Operands(x))
    ).launch.constants
    return constants


@pytest.mark.parametrize(
    ("shape", "dtype", "pivot"),
    [
        ((8, 32, 7, 7), torch.float16, True),
        ((8, 32, 7, 7), torch.bfloat16, True),
        ((8, 32, 7, 7), torch.float32, False),  # it would cost accuracy
        ((8, 32, 45, 45), torch.float16, True),
        ((8, 32, 46, 46), torch.float16, False),
        ((256, 32, 8, 8), torch.float16, True),
        ((257, 32, 8, 8), torch.float16, False),
        ((64, 32, 7, 7), torch.float16, True),
        ((65, 32, 7, 7), torch.float16, False),
    ],
)
def test_few_short_units_of_16_bits_have_a_pivot(
    shape: tuple[int, ...], dtype: torch.dtype, pivot: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instances, "_common", lambda problem: None)
    x = torch.empty(shape, dtype=dtype, device="meta")
    problem = forward_problem(norm_of("instance_norm"), Operands(x))
    assert pivots(problem) is pivot
    for instance in (instances.WHOLE, instances.HELD):
        plan: Any = instance.plan(problem)
        assert plan.launch.constants["PIVOT"] is pivot


def test_rows_of_several_warps_load_their_parameters_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instances, "_common", lambda problem: None)
    for rows, length, dtype, ahead in (
        (4680, 1024, torch.float16, True),
        (1 << 16, 1024, torch.bfloat16, True),
        (4680, 1024, torch.float32, False),
        (800, 256, torch.float16, False),  # on one warp
    ):
        constants = _rows_plan(rows, length, dtype)
        assert constants["FIRST"] is ahead, (rows, length, dtype)
        assert constants["EARLY"] or not ahead
    x, added = (torch.empty((4680, 1024), dtype=torch.float16, device="meta") for _ in range(2))
    sums = Sums(pre_add=added)
    plan: Any = instances.WHOLE.plan(sum_forward_problem(norm_of("layer_norm", 1), Operands(x), sums, True))
    assert "FIRST" not in plan.launch.constants
