"""How rows go through triton.rows, triton.whole and triton.held: pure functions of the problem."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from triton_config_support import problems_of

from fusednorm import choice
from fusednorm.activations import resolve
from fusednorm.backends.triton import instances
from fusednorm.backends.triton.config.held import held_for
from fusednorm.backends.triton.config.kinds import ColumnsBackwardConfig, RowsBackwardConfig, StepsConfig, WholeConfig
from fusednorm.backends.triton.config.rows import (
    by_columns,
    columns_backward_for,
    holding_rows_pays,
    rows_backward_for,
    rows_forward_for,
    rows_gated_backward_for,
    rows_sum_backward_for,
)
from fusednorm.backends.triton.config.units import held_units
from fusednorm.backends.triton.config.whole import whole_forward_for
from fusednorm.backends.triton.runs import (
    power_of_two,
    row_window,
)
from fusednorm.norm import Family, norm_of
from fusednorm.operands import BackwardOperands, Gated, Operands
from fusednorm.problems import backward_problem, forward_problem, sum_backward_problem

TILES = instances.TILES


def test_rows() -> None:
    x = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    problem = backward_problem(norm_of("layer_norm", 1), BackwardOperands(x, x, x, x))
    assert rows_backward_for(problem).stages == 3
    wide = replace(problem, dtype="float32")
    assert rows_backward_for(wide).stages == 1
    assert whole_forward_for(replace(problem, direction="forward")).warps == 4


@pytest.mark.parametrize(
    ("shape", "dims", "forward", "backward"),
    [
        ((16384, 1024), 1, "triton.whole", "triton.rows"),
        ((16384, 8192), 1, "triton.whole", "triton.rows"),
        ((16384, 16384), 1, "triton.rows", "triton.rows"),
        ((60, 16384), 1, "triton.whole", "triton.rows"),
        ((4096, 20000), 1, "triton.rows", "triton.rows"),
        ((3021, 22114), 1, "triton.rows", "triton.rows"),
        ((3021, 22113), 1, "triton.tiles", "triton.rows"),
        ((1875, 50654), 1, "triton.tiles", "triton.rows"),
        ((250, 22114), 1, "triton.tiles", "triton.rows"),
        ((32, 64, 56, 56), 3, "triton.tiles", "triton.rows"),
        ((5, 5120), 1, "triton.whole", "triton.rows"),
        ((2, 300), 1, "triton.whole", "triton.rows"),
        ((4, 1 << 20), 1, "triton.tiles", "triton.rows"),
        ((1, 1 << 22), 1, "triton.tiles", "triton.rows"),
    ],
)
def test_rows_get_the_instance_of_their_length(
    shape: tuple[int, ...], dims: int, forward: str, backward: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instances, "_common", lambda problem: None)
    x = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    norm = norm_of("layer_norm", dims)
    assert instances.choose(forward_problem(norm, Operands(x))).name == forward
    assert instances.choose(backward_problem(norm, BackwardOperands(x, x, x, x))).name == backward


@pytest.mark.parametrize("size", [67, 128, 315, 320, 768, 1152, 2048])
def test_the_sums_of_a_backwards_programs_are_few_beside_its_rows(size: int) -> None:
    for samples in (128, 2048, 8000, 1 << 20):
        x = torch.empty(samples, size, dtype=torch.bfloat16, device="meta")
        norm = norm_of("layer_norm", 1)
        config = rows_backward_for(backward_problem(norm, BackwardOperands(x, x, x, x)))
        two_steps = 2 * config.rows * config.programs >= samples  # at most, of few rows
        assert config.programs == 264 or 8 * config.programs <= 2 * 3 * samples / 4 or two_steps
        assert config.rows * power_of_two(size) in (256 * config.warps, 512 * config.warps, 1024 * config.warps)


@pytest.mark.parametrize(("size", "listed"), [(1024, True), (1152, True), (1280, True), (1288, False), (2048, False)])
def test_tuning_tries_rows_of_few_of_64_lanes_a_thread(size: int, listed: bool) -> None:
    """1024 elements fill 32 of a thread of one warp."""
    x = torch.empty(20000, size, dtype=torch.bfloat16, device="meta")
    problem = backward_problem(norm_of("layer_norm", 1), BackwardOperands(x, x, x, x))
    configs = instances.ROWS.configs(problem)
    assert any(config.rows == config.warps == 1 for config in configs) is listed


@pytest.mark.parametrize(
    ("samples", "size", "instance"),
    [
        (1, 2048, "held"),
        (2, 768, "rows"),
        (2, 2048, "rows"),
        (9, 256, "held"),
        (216, 1024, "held"),
        (594, 1072, "rows"),
    ],
)  # fmt: skip
def test_few_short_rows_leave_partials_and_two_of_them_none(samples: int, size: int, instance: str) -> None:
    x = torch.empty(samples, size, dtype=torch.bfloat16, device="meta")
    problem = backward_problem(norm_of("layer_norm", 1), BackwardOperands(x, x, x, x))
    seen = held_units(problem)
    assert seen is not None
    assert holding_rows_pays(problem, seen) == (instance == "held")
    if instance == "held":
        config = held_for(problem, seen)
        assert config.warps <= 8
        assert config.units * seen.elements <= 32 * config.warps * 16
    elif samples <= 2:
        rows = rows_backward_for(problem)
        assert (rows.rows, rows.programs) == (samples, 1)


def test_few_rows_are_shared_by_many_programs() -> None:
    x = torch.empty(462, 768, dtype=torch.float16, device="meta")
    config = rows_backward_for(backward_problem(norm_of("rms_norm", 1), BackwardOperands(x, x, x, x)))
    assert config.rows * config.programs >= 256


@pytest.mark.parametrize(
    ("shape", "dtype", "window"),
    [
        ((8000, 1439), torch.float16, 8), ((8000, 1438), torch.bfloat16, 8), ((8000, 1436), torch.float16, 1),
        ((8000, 1439), torch.float32, 1), ((33363, 77), torch.float16, 1), ((1, 1439), torch.float16, 1),
    ],
)  # fmt: skip
def test_windows_of_rows(shape: tuple[int, int], dtype: torch.dtype, window: int) -> None:
    x = torch.empty(shape, dtype=dtype, device="meta")
    problem = backward_problem(norm_of("layer_norm", 1), BackwardOperands(x, x, x, x))
    assert row_window(problem) == window
    if window > 1:
        config = rows_backward_for(problem)
        plan = instances.ROWS.plan(problem, config)
        assert config.rows == 1
        assert plan.backward.constants["WINDOW"] == window
        # The rows of a program lie alike in their windows.
        assert plan.backward.programs % window == 0


@pytest.mark.parametrize("rows", [131, 133, 924, 1500, 2299, 3000, 8000])
def test_programs_of_windows_are_no_more_than_asked_for(rows: int) -> None:
    """Another one would run alone, once those that fill the multiprocessors have ended."""
    x = torch.empty(rows, 6001, dtype=torch.float16, device="meta")
    problem = backward_problem(norm_of("layer_norm", 1), BackwardOperands(x, x, x, x))
    for programs in (1, 132, 264):
        backward = instances.ROWS.plan(problem, RowsBackwardConfig(1, 8, programs, stages=3)).backward
        assert backward.constants["WINDOW"] == 8
        steps = backward.scalars[-2]
        assert backward.programs * steps >= rows
        assert backward.programs <= max(programs, 8)
        assert steps == 1 or backward.programs % 8 == 0


def test_rows_at_one_address_have_no_windows() -> None:
    """Nothing but the end of the tensor follows them."""
    x = torch.empty(40, 1439, dtype=torch.float16, device="meta")
    problem = backward_problem(norm_of("layer_norm", 1), BackwardOperands(x, x, x, x))
    wide = replace(problem.layout, sample=1440)
    for sample, window in ((1448, 8), (0, 1)):
        grad = replace(wide, sample=sample)
        assert row_window(replace(problem, layout=wide, output_layout=wide, grad_layout=grad)) == window


def test_steps_grow_with_a_plane() -> None:
    planes = (problems_of("instance_norm", 0, (25, 64, side, side))[0] for side in (92, 132))
    assert [rows_forward_for(plane).elements for plane in planes] == [1024, 2048]


@pytest.mark.parametrize(
    ("rows", "length", "dtype", "columns"),
    [
        (600, 8192, torch.bfloat16, False), (600, 8867, torch.bfloat16, True), (60, 12288, torch.bfloat16, True),
        (4096, 12288, torch.bfloat16, False), (4096, 16384, torch.bfloat16, True), (2, 150528, torch.float32, True),
    ],
)  # fmt: skip
def test_a_backward_of_long_rows_goes_by_columns(rows: int, length: int, dtype: torch.dtype, columns: bool) -> None:
    x = torch.empty(rows, length, dtype=dtype, device="meta")
    problem = backward_problem(norm_of("layer_norm", 1), BackwardOperands(x, x, x, x))
    assert by_columns(problem) == columns
    if columns:
        config = columns_backward_for(problem)
        assert 1 <= config.steps <= 32
        assert config.stages in (1, 3)


def test_long_rows_with_a_smooth_activation_go_by_columns_where_they_would_be_loaded_twice() -> None:
    x = torch.empty(8220, 10240, dtype=torch.float16, device="meta")
    for family, activation, columns in (
        ("layer_norm", "gelu", True),
        ("layer_norm", "relu", False),
        ("layer_norm", None, False),
        ("rms_norm", "gelu", False),
    ):
        problem = backward_problem(norm_of(family, 1, activation=resolve(activation)), BackwardOperands(x, x, x, x))
        assert by_columns(problem) == columns


@pytest.mark.parametrize(
    ("gate", "shape", "dtype", "makes"),
    [
        ((8, 1, 64), (8, 4, 64), torch.float32, True),  # which triton.held would take without a gate
        ((8, 1, 64), (8, 3, 64), torch.float32, False),
        ((4, 1, 8192), (4, 64, 8192), torch.bfloat16, True),
        ((4, 1, 9000), (4, 64, 9000), torch.bfloat16, False),
        ((4, 1, 4096), (4, 64, 4096), torch.float64, False),
        ((16, 1, 1, 1), (16, 4, 9, 9), torch.float32, False),
    ],
)
def test_what_makes_the_gradients_of_a_gated_sum(
    gate: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype, makes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instances, "_common", lambda problem: None)
    x, weight = torch.empty(shape, dtype=dtype, device="meta"), torch.empty(shape[-1], device="meta")
    if len(shape) == 3:
        norm, operands = norm_of("layer_norm", 1), BackwardOperands(x, x, x, x, weight)
    else:
        norm, operands = norm_of("group_norm", 2), BackwardOperands(x, x, x, x)
    gated = Gated(torch.empty(gate, dtype=dtype, device="meta"), x, True)
    problem = replace(sum_backward_problem(norm, operands, "backward", None, False, gated), device="cuda")
    assert (instances.ROWS.supports(problem) is None) == makes
    assert (choice.default(problem) is instances.ROWS) >= makes
    assert not any(one.supports(problem) is None for one in instances.INSTANCES if one is not instances.ROWS)
    assert problem.bytes - replace(problem, added=None).bytes == 2 * x.nbytes


@pytest.mark.parametrize(
    ("family", "rows", "length", "dtype", "columns"),
    [
        ("rms_norm", 264, 16384, torch.bfloat16, True), ("rms_norm", 400, 12288, torch.bfloat16, False),
        ("rms_norm", 527, 16384, torch.float16, False), ("rms_norm", 300, 16000, torch.float32, False),
        ("layer_norm", 400, 16384, torch.bfloat16, True), ("layer_norm", 300, 16384, torch.float32, True),
        ("layer_norm", 24986, 9914, torch.bfloat16, True), ("rms_norm", 8000, 9914, torch.bfloat16, False),
        # Some shorter ones of single elements, more than one.
        ("rms_norm", 1, 7001, torch.float16, False), ("layer_norm", 1, 5001, torch.bfloat16, False),
        ("rms_norm", 17, 6605, torch.bfloat16, True), ("rms_norm", 64, 7001, torch.float16, True),
        ("rms_norm", 65, 7001, torch.float16, False), ("rms_norm", 64, 6143, torch.float16, False),
        ("layer_norm", 32, 4537, torch.float16, True), ("rms_norm", 33, 4537, torch.float16, False),
        ("rms_norm", 90, 4501, torch.bfloat16, False), ("rms_norm", 20, 4095, torch.bfloat16, False),
        ("layer_norm", 20, 7003, torch.float32, True), ("layer_norm", 32, 7003, torch.float32, True),
        ("layer_norm", 33, 7003, torch.float32, False), ("layer_norm", 20, 6143, torch.float32, False),
    ],
)  # fmt: skip
def test_few_long_rows_go_by_columns_and_those_of_rms_norm_sooner_by_rows(
    family: Family, rows: int, length: int, dtype: torch.dtype, columns: bool
) -> None:
    x = torch.empty(rows, length, dtype=dtype, device="meta")
    problem = backward_problem(norm_of(family, 1), BackwardOperands(x, x, x, x))
    assert by_columns(problem) == columns
    if family == "rms_norm" and not columns and length > 8192:
        assert rows_backward_for(problem).reload == (length != 12288 and dtype != torch.float32)


@pytest.mark.parametrize(
    ("rows", "length", "elements", "steps", "stages"),
    [(17, 9536, 1024, 1, 1), (36, 12288, 1024, 2, 1), (30, 12288, 1024, 2, 1), (6, 65536, 1024, 2, 1),
     (18, 12288, 1024, 1, 1), (20, 16384, 1024, 2, 1), (200, 10240, 1024, 4, 1), (264, 12288, 1024, 4, 1),
     (112, 65536, 1024, 8, 1), (71, 65536, 1024, 8, 1), (200, 24576, 1024, 8, 1), (132, 16384, 1024, 4, 1),
     (88, 12288, 1024, 4, 1),
     (6335, 12288, 1024, 32, 3), (341, 59741, 512, 16, 1), (4, 12288, 512, 4, 1), (3, 20000, 512, 3, 1)],
)  # fmt: skip
def test_the_steps_of_few_long_rows_leave_programs_for_the_device(
    rows: int, length: int, elements: int, steps: int, stages: int
) -> None:
    x = torch.empty(rows, length, dtype=torch.bfloat16, device="meta")
    config = columns_backward_for(backward_problem(norm_of("layer_norm", 1), BackwardOperands(x, x, x, x)))
    assert (config.elements, config.steps, config.stages) == (elements, steps, stages)
    assert (config.row_elements, config.row_warps, config.row_programs) == (2048, 8, 528 if rows < 132 else 264)
    dense = rows < 66 or elements == 512 or (rows < 132 and steps <= 4)
    assert config.warps == elements // (128 if dense else 256)


def test_the_steps_of_a_smooth_activation_are_in_flight_sooner() -> None:
    x = torch.empty(112, 65536, dtype=torch.bfloat16, device="meta")
    for activation, stages in (("silu", 3), ("relu", 1), (None, 1)):
        norm = norm_of("layer_norm", 1, activation=resolve(activation))
        config = columns_backward_for(backward_problem(norm, BackwardOperands(x, x, x, x)))
        assert (config.steps, config.stages) == (8, stages)


@pytest.mark.parametrize(
    ("length", "dtype", "activation", "instance", "warps"),
    [
        (2409, torch.float16, None, "held", 8),
        (7000, torch.bfloat16, None, "held", 8),
        (2409, torch.float32, None, "held", 8),
        (4096, torch.bfloat16, "gelu", "held", 8),
        (1500, torch.float32, "gelu", "held", 8),
        (1500, torch.float16, None, "held", 8),
        (6000, torch.float32, None, "rows", 16),
    ],
)
def test_the_backward_of_an_only_row_is_one_launch(
    length: int, dtype: torch.dtype, activation: str | None, instance: str, warps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instances, "_common", lambda problem: None)
    x = torch.empty(1, length, dtype=dtype, device="meta")
    norm = norm_of("layer_norm", 1, activation=resolve(activation))
    problem = backward_problem(norm, BackwardOperands(x, x, x, x))
    chosen = instances.choose(problem)
    assert chosen.name == f"triton.{instance}"
    config = chosen.configs(problem)[0]
    assert config.warps == warps
    assert getattr(config, "programs", 1) == getattr(config, "units", getattr(config, "rows", 0)) == 1


@pytest.mark.parametrize(
    ("shape", "dtype", "activation"),
    [
        ((1, 8000), torch.bfloat16, "relu"),
        ((1, 4869), torch.float32, None),
        ((1, 6012), torch.float32, "gelu"),
        ((2, 5965), torch.float32, None),
        ((10, 7227), torch.float16, "relu"),
    ],
)
def test_the_backward_of_the_longest_of_few_rows_goes_by_columns(
    shape: tuple[int, int], dtype: torch.dtype, activation: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instances, "_common", lambda problem: None)
    x = torch.empty(shape, dtype=dtype, device="meta")
    problem = backward_problem(norm_of("layer_norm", 1, activation=resolve(activation)), BackwardOperands(x, x, x, x))
    assert isinstance(instances.choose(problem).configs(problem)[0], ColumnsBackwardConfig)


@pytest.mark.parametrize(
    ("rows", "length", "dtype", "together", "warps", "programs"),
    [(2, 4096, torch.bfloat16, 2, 16, 1), (3, 2399, torch.bfloat16, 1, 8, 264), (368, 2078, torch.bfloat16, 2, 8, 264),
     (60000, 96, torch.float32, 2, 1, 2112), (30000, 192, torch.float32, 1, 1, 2112),
     (7085, 822, torch.float16, 2, 2, 528), (30000, 330, torch.bfloat16, 1, 1, 1056),
     (3000, 2070, torch.float16, 1, 2, 528)],
)  # fmt: skip
def test_the_rows_of_a_backward_s_program(
    rows: int, length: int, dtype: torch.dtype, together: int, warps: int, programs: int
) -> None:
    x = torch.empty(rows, length, dtype=dtype, device="meta")
    config = rows_backward_for(backward_problem(norm_of("layer_norm", 1), BackwardOperands(x, x, x, x)))
    assert (config.rows, config.warps, config.programs) == (together, warps, programs)


def test_an_activation_has_twice_the_warps_of_a_row_that_fills_half_of_its_lanes() -> None:
    x = torch.empty(3000, 2070, dtype=torch.float16, device="meta")
    norm = norm_of("layer_norm", 1, activation=resolve("relu"))
    assert rows_backward_for(backward_problem(norm, BackwardOperands(x, x, x, x))).warps == 4


def test_long_rows_of_32_bits_without_a_mean_go_in_longer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instances, "_common", lambda problem: None)
    for length, name in ((28672, "triton.rows"), (32768, "triton.whole"), (24000, "triton.whole")):
        x = torch.empty(1050, length, device="meta")
        problem = forward_problem(norm_of("rms_norm", 1), Operands(x))
        assert instances.choose(problem).name == name
        if name == "triton.rows":
            assert rows_forward_for(problem) == StepsConfig(16384, 16)


@pytest.mark.parametrize(
    ("rows", "length", "activation", "programs", "reload"),
    [
        (300, 9914, None, 132, False), (8000, 9914, None, 132, True), (8000, 9914, "relu", 132, True),
        (3000, 9914, "silu", 132, False), (999, 11251, None, 132, False), (8000, 11251, None, 132, False),
        (3000, 15001, "relu", 132, False), (1038, 16384, "gelu", 132, False), (1038, 16384, None, 132, True),
    ],
)  # fmt: skip
def test_long_rows_are_loaded_twice_where_their_loads_are_not_narrow(
    rows: int, length: int, activation: str | None, programs: int, reload: bool
) -> None:
    x = torch.empty(rows, length, dtype=torch.bfloat16, device="meta")
    norm = norm_of("rms_norm", 1, activation=resolve(activation))
    config = rows_backward_for(backward_problem(norm, BackwardOperands(x, x, x, x)))
    assert (config.rows, config.warps, config.programs, config.reload) == (1, 16, programs, reload)


@pytest.mark.parametrize(
    ("family", "rows", "columns"),
    [("rms_norm", 32, False), ("rms_norm", 2, True), ("rms_norm", 132, False),
     ("layer_norm", 24, True)],
)  # fmt: skip
def test_few_rows_of_32_kilobytes_without_a_mean_go_by_rows(family: Family, rows: int, columns: bool) -> None:
    assert by_columns(problems_of(family, 1, (rows, 8192), dtype=torch.float32)[1]) == columns
    assert by_columns(problems_of(family, 1, (rows, 4096), dtype=torch.float64)[1])


@pytest.mark.parametrize(
    ("family", "activation", "rows", "length", "expected"),
    [
        ("layer_norm", "silu", 288, 16967, TILES), ("layer_norm", None, 400, 20001, TILES),
        ("layer_norm", None, 1000, 20001, WholeConfig(1, 16)), ("layer_norm", None, 600, 24001, StepsConfig(8192, 16)),
        ("layer_norm", None, 1000, 50001, TILES), ("layer_norm", "silu", 300, 16390, TILES),
        ("layer_norm", None, 500, 17002, StepsConfig(4096, 16)), ("layer_norm", None, 300, 30000, StepsConfig(4096, 8)),
        ("layer_norm", None, 400, 24576, StepsConfig(4096, 16)),
        ("layer_norm", None, 264, 24576, StepsConfig(4096, 16)),
        ("rms_norm", None, 300, 26001, TILES), ("rms_norm", "silu", 700, 40001, StepsConfig(8192, 16)),
        ("rms_norm", None, 200, 60001, TILES), ("rms_norm", None, 300, 30002, WholeConfig(1, 16)),
        ("rms_norm", "silu", 700, 40002, StepsConfig(8192, 16)),
        ("rms_norm", "silu", 384, 16384, StepsConfig(4096, 16)),
        ("rms_norm", "silu", 600, 16384, WholeConfig(1, 16)), ("rms_norm", "silu", 384, 12288, WholeConfig(1, 16)),
        ("rms_norm", "silu", 700, 40000, StepsConfig(16384, 16)),
    ],
)  # fmt: skip
def test_long_rows_of_32_bits(
    family: Family, activation: str | None, rows: int, length: int, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instances, "_common", lambda problem: None)
    x = torch.empty(rows, length, device="meta")
    problem = forward_problem(norm_of(family, 1, activation=resolve(activation)), Operands(x))
    chosen = instances.choose(problem)
    assert (chosen if expected is TILES else chosen.configs(problem)[0]) == expected


@pytest.mark.parametrize(
    ("rows", "length", "activation", "held"),
    [(6, 3207, None, True), (3, 3000, None, True), (216, 1024, None, True), (11, 2369, "silu", True),
     (12, 3598, "silu", False), (11, 2369, "relu", True), (11, 2368, "silu", True)],
)  # fmt: skip
def test_few_long_rows_of_a_backward_are_not_held(rows: int, length: int, activation: str | None, held: bool) -> None:
    x = torch.empty(rows, length, dtype=torch.bfloat16, device="meta")
    norm = norm_of("rms_norm", 1, activation=resolve(activation))
    problem = backward_problem(norm, BackwardOperands(x, x, x, x))
    seen = held_units(problem)
    assert seen is not None
    assert holding_rows_pays(problem, seen) == held


@pytest.mark.parametrize(
    ("rows", "dtype", "name"),
    [(404, torch.float32, "rows"), (300, torch.float32, "rows"), (2000, torch.float32, "whole"),
     (64, torch.float32, "whole"), (404, torch.bfloat16, "rows")],
)  # fmt: skip
def test_a_few_waves_of_long_rows_go_in_steps(
    rows: int, dtype: torch.dtype, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instances, "_common", lambda problem: None)
    x = torch.empty(rows, 12288, dtype=dtype, device="meta")
    assert instances.choose(forward_problem(norm_of("layer_norm", 1), Operands(x))).name == f"triton.{name}"


@pytest.mark.parametrize(
    ("rows", "length", "dtype", "programs", "stages"),
    [
        (7260, 473, torch.float16, 1056, 3),
        (30000, 1024, torch.float16, 528, 4),
        (40000, 512, torch.bfloat16, 1056, 3),
        (2500, 2048, torch.bfloat16, 264, 4),
        (9000, 384, torch.float32, 528, 4),
        (60000, 96, torch.float16, 2112, 4),
        (16108, 104, torch.bfloat16, 1056, 4),
        (368, 3072, torch.float32, 132, 3),
    ],
)
def test_programs_of_a_backward_have_enough_bytes_in_flight_and_few_sums(
    rows: int, length: int, dtype: torch.dtype, programs: int, stages: int
) -> None:
    config = rows_backward_for(problems_of("layer_norm", 1, (rows, length), dtype=dtype)[1])
    assert (config.programs, config.stages) == (programs, stages)


@pytest.mark.parametrize(
    ("family", "length", "dtype", "config"),
    [
        ("rms_norm", 20480, torch.float16, StepsConfig(4096, 8)),
        ("rms_norm", 28672, torch.float16, StepsConfig(8192, 16)),
        ("layer_norm", 28672, torch.bfloat16, StepsConfig(4096, 8)),
        ("rms_norm", 65536, torch.float32, StepsConfig(16384, 16)),
        ("rms_norm", 65536, torch.float64, StepsConfig(4096, 8)),
        ("layer_norm", 65536, torch.float16, StepsConfig(8192, 16)),
        ("layer_norm", 14001, torch.bfloat16, StepsConfig(2048, 2)),
    ],
)
def test_steps_of_long_rows(family: Family, length: int, dtype: torch.dtype, config: StepsConfig) -> None:
    assert rows_forward_for(problems_of(family, 1, (800, length), dtype=dtype)[0]) == config


@pytest.mark.parametrize(
    ("family", "shape", "dtype", "config"),
    [
        ("layer_norm", (500, 20480), torch.bfloat16, StepsConfig(2048, 16)),
        ("layer_norm", (456, 25704), torch.float16, StepsConfig(4096, 8)),  # whose last step is not full
        ("rms_norm", (470, 14310), torch.bfloat16, StepsConfig(2048, 16)),
        ("rms_norm", (1785, 16991), torch.float32, StepsConfig(4096, 8)),
    ],
)
def test_steps_of_rows_in_a_few_waves(
    family: Family, shape: tuple[int, int], dtype: torch.dtype, config: StepsConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instances, "_common", lambda problem: None)
    problem, _ = problems_of(family, 1, shape, dtype=dtype)
    chosen = instances.choose(problem)
    assert chosen.name == "triton.rows"
    assert chosen.configs(problem)[0] == config


@pytest.mark.parametrize(("activation", "reload"), [(None, True), ("leaky_relu", False), ("gelu", False)])
def test_the_longest_rows_with_an_activation_are_loaded_once(activation: str | None, reload: bool) -> None:
    x = torch.empty(1038, 16384, dtype=torch.float16, device="meta")
    norm = norm_of("rms_norm", 1, activation=resolve(activation))
    assert rows_backward_for(backward_problem(norm, BackwardOperands(x, x, x, x))).reload == reload


@pytest.mark.parametrize("rows", [267, 528, 529, 2299])
def test_long_rows_of_narrow_loads_leave_few_sums(rows: int) -> None:
    for length in (6294, 4719):
        config = rows_backward_for(problems_of("rms_norm", 1, (rows, length), dtype=torch.bfloat16)[1])
        assert (config.rows, config.warps, config.programs, config.stages) == (1, 8, 132, 3)


@pytest.mark.parametrize(
    ("family", "rows", "length", "stepped"),
    [("rms_norm", 1377, 59918, True), ("layer_norm", 1377, 59918, False), ("rms_norm", 1377, 65538, False)],
)
def test_long_rows_of_pairs_go_in_steps(
    family: Family, rows: int, length: int, stepped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instances, "_common", lambda problem: None)
    problem = problems_of(family, 1, (rows, length), dtype=torch.bfloat16)[0]
    assert instances.choose(problem) is (instances.ROWS if stepped else instances.TILES)


@pytest.mark.parametrize(
    ("shape", "dtype", "name"),
    [((10, 100, 20001), torch.float32, "rows"), ((8, 300, 17001), torch.bfloat16, "tiles"),
     ((2, 64, 50001), torch.float32, "tiles"), ((1, 64, 20001), torch.float32, "tiles")],
)  # fmt: skip
def test_odd_planes_of_32_bits_go_in_steps(
    shape: tuple[int, ...], dtype: torch.dtype, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instances, "_common", lambda problem: None)
    problem = problems_of("instance_norm", 0, shape, dtype=dtype)[0]
    assert instances.choose(problem).name == f"triton.{name}"
    if name == "rows":
        assert rows_forward_for(problem) == StepsConfig(4096, 16)
    shorter = problems_of("instance_norm", 0, (10, 100, 15001), dtype=torch.float32)[0]
    assert rows_forward_for(shorter) == StepsConfig(1024, 4)


def test_long_rows_of_single_elements_with_a_mean_go_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instances, "_common", lambda problem: None)
    for length, activation, stepped in ((14001, "silu", True), (14001, None, True), (9001, "silu", False)):
        x = torch.empty(3000, length, dtype=torch.bfloat16, device="meta")
        problem = forward_problem(norm_of("layer_norm", 1, activation=resolve(activation)), Operands(x))
        assert (instances.choose(problem) is instances.ROWS) == stepped


def test_hundreds_of_the_longest_rows_go_in_steps_and_few_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instances, "_common", lambda problem: None)
    for rows, chosen in ((500, instances.ROWS), (100, instances.TILES)):
        assert instances.choose(problems_of("rms_norm", 1, (rows, 65536), dtype=torch.float32)[0]) is chosen


def test_a_backward_by_columns_of_single_elements_has_few_a_thread() -> None:
    config = columns_backward_for(problems_of("rms_norm", 1, (341, 59741), dtype=torch.bfloat16)[1])
    assert (config.elements, config.steps, config.warps) == (512, 16, 4)
    few = columns_backward_for(problems_of("rms_norm", 1, (33, 24863), dtype=torch.float16)[1])
    assert (few.elements, few.steps, few.warps) == (512, 2, 4)


@pytest.mark.parametrize(
    ("rows", "length", "activation", "steps"),
    [(273, 17373, "leaky_relu", 8), (234, 64341, "gelu", 8), (322, 34301, None, 16), (14124, 8721, "silu", 16)],
)
def test_the_steps_of_single_elements(rows: int, length: int, activation: str | None, steps: int) -> None:
    x = torch.empty(rows, length, dtype=torch.float16, device="meta")
    norm = norm_of("layer_norm", 1, activation=resolve(activation))
    assert columns_backward_for(backward_problem(norm, BackwardOperands(x, x, x, x))).steps == steps


@pytest.mark.parametrize(
    ("family", "shape", "dtype", "held"),
    [
        ("layer_norm", (400, 128), torch.bfloat16, True), ("layer_norm", (700, 64), torch.bfloat16, False),
        ("rms_norm", (700, 64), torch.bfloat16, True), ("rms_norm", (2000, 32), torch.bfloat16, False),
        ("layer_norm", (760, 222), torch.bfloat16, True), ("layer_norm", (1680, 67), torch.float16, False),
        ("layer_norm", (504, 512), torch.bfloat16, False), ("layer_norm", (1000, 150), torch.bfloat16, False),
    ],
)  # fmt: skip
def test_many_short_rows_leave_no_partials_of_each(
    family: Family, shape: tuple[int, int], dtype: torch.dtype, held: bool
) -> None:
    problem = problems_of(family, 1, shape, dtype=dtype)[1]
    assert holding_rows_pays(problem, held_units(problem)) == held


def test_a_program_of_few_narrow_rows_has_eight_elements_a_thread() -> None:
    for shape, rows in (((3000, 30), 8), ((9728, 3), 64), ((19474, 13), 32), ((700, 64), 8)):
        assert rows_backward_for(problems_of("layer_norm", 1, shape, dtype=torch.float16)[1]).rows == rows


@pytest.mark.parametrize(
    ("shape", "dtype", "behind", "expected"),
    [
        ((16384, 768), torch.bfloat16, False, RowsBackwardConfig(1, 1, 528, stages=4)),
        ((16384, 3072), torch.bfloat16, False, RowsBackwardConfig(1, 8, 132, stages=4)),
        ((8192, 2560), torch.bfloat16, False, RowsBackwardConfig(1, 8, 264, stages=4)),
        ((8192, 8192), torch.bfloat16, False, RowsBackwardConfig(1, 16, 132, stages=3)),
        ((8192, 8192), torch.bfloat16, True, RowsBackwardConfig(1, 16, 132, stages=1)),
        ((4096, 12288), torch.bfloat16, False, RowsBackwardConfig(1, 16, 132, stages=1)),
        ((4096, 12288), torch.float32, False, RowsBackwardConfig(1, 16, 132, stages=1, reload=True)),
        ((8192, 2048), torch.float32, False, RowsBackwardConfig(1, 2, 264, stages=4)),
        ((4096, 4096), torch.float32, False, RowsBackwardConfig(1, 16, 132, stages=3)),
        ((512, 768), torch.bfloat16, False, RowsBackwardConfig(2, 2, 528, stages=1)),
    ],
)
def test_a_gradient_of_the_sum_is_loaded_ahead_too(
    shape: tuple[int, int], dtype: torch.dtype, behind: bool, expected: RowsBackwardConfig
) -> None:
    """But not with one step in flight, which is slower than none."""
    x = torch.empty(shape, dtype=dtype, device="meta")
    operands = BackwardOperands(x, x, None, torch.empty(shape[0], 1, device="meta"), x[0])
    norm = norm_of("rms_norm", 1, activation=resolve("relu") if behind else None)
    problem = sum_backward_problem(norm, operands, "backward", x if behind else None, grad_sum=True)
    assert rows_sum_backward_for(problem) == expected


@pytest.mark.parametrize(
    ("family", "activation", "shape", "expected"),
    [
        ("layer_norm", "silu", (20000, 1099), RowsBackwardConfig(1, 2, 528, stages=4)),
        ("layer_norm", None, (20000, 583), RowsBackwardConfig(1, 1, 528, stages=4)),
        ("rms_norm", "silu", (9000, 3501), RowsBackwardConfig(2, 8, 132, stages=1)),
        ("rms_norm", "gelu", (20000, 549), RowsBackwardConfig(1, 1, 1056, stages=4)),
    ],
)
def test_single_elements_with_a_gradient_of_the_sum_keep_their_steps(
    family: Family, activation: str | None, shape: tuple[int, int], expected: RowsBackwardConfig
) -> None:
    """What is faster without it was not timed with it."""
    x, statistics = torch.empty(shape, dtype=torch.bfloat16, device="meta"), torch.empty(shape[0], 1, device="meta")
    mean = statistics if family == "layer_norm" else None
    norm = norm_of(family, 1, activation=resolve(activation) if activation else None)
    operands = BackwardOperands(x, x, mean, statistics, x[0])
    problem = sum_backward_problem(norm, operands, "backward", None, grad_sum=True)
    assert rows_sum_backward_for(problem) == expected


@pytest.mark.parametrize(
    ("channels", "dtype", "warps", "programs", "stages"),
    [
        (768, torch.bfloat16, 4, 528, 3),
        (1152, torch.bfloat16, 4, 264, 3),
        (3072, torch.bfloat16, 8, 132, 3),
        (8192, torch.bfloat16, 16, 132, 1),
        (2048, torch.float32, 8, 264, 3),
    ],
)
def test_programs_that_make_the_gradients_of_a_product(
    channels: int, dtype: torch.dtype, warps: int, programs: int, stages: int
) -> None:
    """Two steps in flight where they fit, and threads of 16 elements where 8 warps have the registers for them."""
    x, gate = (torch.empty(4, size, channels, dtype=dtype, device="meta") for size in (4096, 1))
    operands = BackwardOperands(x, x, None, torch.empty(4, 4096, 1, device="meta"), x[0, 0])
    problem = sum_backward_problem(norm_of("rms_norm", 1), operands, "backward", None, True, Gated(gate, x, True))
    assert rows_gated_backward_for(problem) == RowsBackwardConfig(1, warps, programs, stages=stages)
