"""The heuristics of the Triton backend are pure functions of the problem."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fusednorm import choice
from fusednorm.activations import resolve
from fusednorm.backends.triton import instances
from fusednorm.backends.triton.config.device import shares
from fusednorm.backends.triton.config.held import MOST_HELD, held_for
from fusednorm.backends.triton.config.holding import holding_pays
from fusednorm.backends.triton.config.kinds import HeldConfig, RowsForwardConfig, WholeConfig
from fusednorm.backends.triton.config.rows import (
    by_columns,
    columns_backward_for,
    holding_rows_pays,
    rows_backward_for,
    rows_forward_for,
)
from fusednorm.backends.triton.config.tiles import merged, of_points, passes_for, tiled
from fusednorm.backends.triton.config.units import held_units
from fusednorm.backends.triton.config.whole import whole_forward_for
from fusednorm.backends.triton.plans.tiles import ParameterSums, PartialsShape
from fusednorm.backends.triton.plans.whole import Units
from fusednorm.backends.triton.runs import (
    for_moments,
    layouts_of,
    load_bytes,
    power_of_two,
    row_window,
    runs_of,
    window_of,
)
from fusednorm.norm import Family, norm_of
from fusednorm.operands import BackwardOperands, Gated, Operands
from fusednorm.problem import Problem, View
from fusednorm.problems import backward_problem, forward_problem, sum_backward_problem


def _problems(shape: tuple[int, ...], groups: int, dtype: torch.dtype, last: bool) -> tuple[Problem, Problem]:
    memory = torch.channels_last if last else torch.contiguous_format
    x = torch.empty(shape, dtype=dtype, device="meta").contiguous(memory_format=memory)
    norm = norm_of("group_norm", groups)
    return forward_problem(norm, Operands(x)), backward_problem(norm, BackwardOperands(x, x, x, x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    ("shape", "groups"), [((2, 320, 128, 128), 32), ((1, 128, 1024, 1024), 32), ((3, 7, 5, 3), 7), ((2, 24, 33, 31), 8)]
)
def test_tiles(shape: tuple[int, ...], groups: int, last: bool, dtype: torch.dtype) -> None:
    for problem in _problems(shape, groups, dtype, last):
        for tiles in (passes_for(problem).reduction, passes_for(problem).output):
            for number in (tiles.channels, tiles.positions, tiles.warps):
                assert number == 1 << (number.bit_length() - 1)
            assert tiles.channels * tiles.positions <= 8192
            assert tiles.tiles >= 1
            assert tiles.stages >= 1
            within = problem.view.group_channels % tiles.channels == 0
            # A program's channels belong to one group, so that it can merge that group's partials. Only a backward's
            # tile that one group would leave half empty spans several.
            half = tiles.positions * (problem.view.group_channels & -problem.view.group_channels)
            assert last or within or (problem.backward and 2 * half <= tiles.channels * tiles.positions)


@pytest.mark.parametrize(("family", "groups"), [("batch_norm", 0), ("instance_norm", 0), ("group_norm", 4)])
@pytest.mark.parametrize("shape", [(128, 60, 7, 7), (256, 60, 12, 12)])
def test_tiles_of_small_planes_span_channels(family: Family, groups: int, shape: tuple[int, ...]) -> None:
    """A plane to a program would leave most of a tile empty."""
    x, norm = torch.empty(shape, dtype=torch.bfloat16, device="meta"), norm_of(family, groups)
    backward = passes_for(backward_problem(norm, BackwardOperands(x, x, x, x)))
    forward = passes_for(forward_problem(norm, Operands(x)))
    spanning = [backward.reduction, backward.output, forward.output]
    if family == "batch_norm":
        spanning.append(forward.reduction)
    for tile in spanning:
        assert tile.channels * tile.positions >= 1024


def test_few_small_planes_keep_their_tiles_within_a_unit() -> None:
    """Then the programs that write merge the unit's partials, and no launch between the passes does."""
    x = torch.empty(2, 64, 16, 16, dtype=torch.bfloat16, device="meta")
    backward = passes_for(backward_problem(norm_of("group_norm", 32), BackwardOperands(x, x, x, x)))
    assert backward.output.channels == 2


def test_planes_that_fill_a_tile_have_it_alone() -> None:
    x = torch.empty(8, 60, 64, 64, dtype=torch.bfloat16, device="meta")
    forward = passes_for(forward_problem(norm_of("batch_norm"), Operands(x)))
    assert (forward.reduction.channels, forward.reduction.positions) == (1, 4096)


@pytest.mark.parametrize(
    ("channels", "read", "write"),
    [(3, 4, 4), (20, 32, 32), (72, 64, 128), (96, 32, 32), (100, 64, 128), (320, 64, 64), (384, 64, 128)],
)
def test_blocks_of_channels_divide_them_or_are_long(channels: int, read: int, write: int) -> None:
    x = torch.empty(4, channels, 75, 75, device="meta").to(memory_format=torch.channels_last)
    passes = passes_for(forward_problem(norm_of("instance_norm"), Operands(x)))
    assert (passes.reduction.channels, passes.output.channels) == (read, write)


def test_shares_are_equal_where_they_can_be() -> None:
    assert shares(512, 40) == 32
    assert shares(392, 25) == 14
    assert shares(509, 40) == 40
    assert shares(3, 40) == 3


def test_one_program_per_unit_of_few_partials() -> None:
    forward, backward = _problems((2, 320, 128, 128), 32, torch.bfloat16, False)
    assert merged(forward) > merged(backward) > 0


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


# --- narrow loads ---


@pytest.mark.parametrize(
    ("shape", "dtype", "last", "found"),
    [
        ((2, 64, 8, 8), torch.bfloat16, False, 16),
        ((2, 100, 8, 8), torch.bfloat16, True, 8),
        ((2, 100, 8, 8), torch.float32, True, 16),
        ((2, 64, 7, 7), torch.float32, False, 4),
        ((2, 3, 8, 8), torch.float16, True, 2),
    ],
)
def test_load_bytes(shape: tuple[int, ...], dtype: torch.dtype, last: bool, found: int) -> None:
    x = torch.empty(shape, dtype=dtype, device="meta")
    if last:
        x = x.to(memory_format=torch.channels_last)
    assert load_bytes(forward_problem(norm_of("instance_norm"), Operands(x))) == found


@pytest.mark.parametrize(("channels", "least"), [(3, 3000), (17, 3000), (329, 3000), (320, 900)])
def test_a_pass_with_narrow_loads_has_many_programs(channels: int, least: int) -> None:
    x = torch.empty(8, channels, 500, 500, dtype=torch.bfloat16, device="meta").to(memory_format=torch.channels_last)
    tile = passes_for(forward_problem(norm_of("instance_norm"), Operands(x))).reduction
    assert 8 * -(-channels // tile.channels) * -(-250000 // (tile.positions * tile.tiles)) >= least


@pytest.mark.parametrize("size", [67, 128, 315, 320, 768, 1152, 2048])
def test_the_sums_of_a_backwards_programs_are_few_beside_its_rows(size: int) -> None:
    for samples in (128, 2048, 8000, 1 << 20):
        x = torch.empty(samples, size, dtype=torch.bfloat16, device="meta")
        norm = norm_of("layer_norm", 1)
        config = rows_backward_for(backward_problem(norm, BackwardOperands(x, x, x, x)))
        assert config.programs == 264 or 8 * config.programs <= 2 * 3 * samples / 4
        assert config.rows * power_of_two(size) in (256 * config.warps, 512 * config.warps, 1024 * config.warps)


def test_a_large_unit_has_no_more_partials_than_a_program_merges() -> None:
    x = torch.empty(2, 293, 31 * 31 * 31, 1, dtype=torch.float16, device="meta").to(memory_format=torch.channels_last)
    problem = forward_problem(norm_of("group_norm", 1), Operands(x))
    repeat = runs_of(problem, problem.view, layouts_of(problem)).repeat
    tile = passes_for(problem).reduction
    assert 293 * repeat * -(-(31**3) // (repeat * tile.positions * tile.tiles)) <= 16384


@pytest.mark.parametrize(
    ("samples", "size", "instance"),
    [
        (1, 2048, "rows"),
        (2, 768, "rows"),
        (2, 2048, "held"),
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


# --- units in registers ---


def _of(
    family: Family, groups: int, shape: tuple[int, ...], last: bool = False, dtype: torch.dtype = torch.bfloat16
) -> tuple[Problem, Problem]:
    x = torch.empty(shape, dtype=dtype, device="meta")
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    norm = norm_of(family, groups)
    return forward_problem(norm, Operands(x)), backward_problem(norm, BackwardOperands(x, x, x, x))


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
    for problem in _of(family, groups, (6, 12, 5, 7), last):
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
        ("instance_norm", 0, (128, 384, 12, 12), False),
        ("group_norm", 32, (2, 320, 128, 128), False),
    ],
)
def test_units_are_held_where_they_are_small(
    family: Family, groups: int, shape: tuple[int, ...], held: bool, last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instances, "_common", lambda problem: None)
    for problem in _of(family, groups, shape, last):
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


def test_batch_norm_is_not_held_where_its_samples_lie_apart_or_its_statistics_are_given() -> None:
    x, scale = torch.empty(4, 8, 5, 5, device="meta"), torch.empty(4, 8, device="meta")
    last = x.contiguous(memory_format=torch.channels_last)
    assert held_units(forward_problem(norm_of("batch_norm"), Operands(last, scale=scale))) is None
    apart = torch.empty(8, 8, 5, 5, device="meta").contiguous(memory_format=torch.channels_last)[::2]
    assert held_units(forward_problem(norm_of("batch_norm"), Operands(apart))) is None
    given = forward_problem(norm_of("batch_norm", training=False), Operands(x))
    assert instances.HELD.supports(given) is not None


def test_the_samples_of_batch_norm_may_have_a_scale_of_their_own() -> None:
    for shape in ((4, 8, 5, 5), (4, 8)):
        x, scale = torch.empty(shape, device="meta"), torch.empty(4, 8, device="meta")
        seen = held_units(forward_problem(norm_of("batch_norm"), Operands(x, scale=scale)))
        assert seen is not None
        assert (seen.affine, seen.across, seen.units, seen.rows) == (3, "sample", 8, 4)


# --- runs that are not aligned ---


@pytest.mark.parametrize(
    ("shape", "dtype", "last", "window"),
    [
        ((2, 8, 7, 7), torch.bfloat16, False, 8),
        ((2, 8, 6, 7), torch.float16, False, 8),  # loads of 4 bytes
        ((2, 8, 6, 6), torch.float16, False, 1),  # of 8 bytes
        ((2, 8, 7, 7), torch.float32, False, 1),
        ((2, 8, 7, 7), torch.bfloat16, True, 1),
        ((2, 8, 5, 5), torch.bfloat16, False, 1),  # too short
    ],
)
def test_windows(shape: tuple[int, ...], dtype: torch.dtype, last: bool, window: int) -> None:
    for problem in _problems(shape, 4, dtype, last):
        assert window_of(problem.dtype, problem.view, layouts_of(problem)) == window


def test_tensors_that_lie_otherwise_in_their_windows_have_none() -> None:
    problem, _ = _problems((2, 8, 7, 7), 4, torch.bfloat16, False)
    assert problem.output_layout is not None
    for apart, window in ((8, 8), (1, 1)):
        output = replace(problem.output_layout, sample=problem.layout.sample + apart)
        assert window_of(problem.dtype, problem.view, (problem.layout, output)) == window


@pytest.mark.parametrize(
    ("shape", "dtype", "repeat", "across"),
    [
        ((4, 100, 76, 75), torch.bfloat16, 6, False),  # 600 channels fill 94 % of ten blocks of 64
        ((64, 17, 56, 56), torch.float16, 24, False),
        ((2, 70, 333, 661), torch.float16, 8, True),  # no sample but the first begins at 16 bytes
        ((3, 67, 255, 255), torch.bfloat16, 8, True),
        ((36, 35, 147, 149), torch.float32, 12, True),
        ((1, 7, 5701, 5701), torch.bfloat16, 64, True),  # the only sample ends within 16 bytes
        ((8, 320, 128, 128), torch.bfloat16, 1, False),
        ((4, 96, 128, 128), torch.float32, 1, False),
        ((1, 33, 303, 160), torch.bfloat16, 16, False),
        ((4, 100, 40, 40), torch.bfloat16, 1, False),  # few elements
        ((8192, 100, 2, 2), torch.bfloat16, 1, False),  # few positions
    ],
)
def test_rows_of_several_positions(shape: tuple[int, ...], dtype: torch.dtype, repeat: int, across: bool) -> None:
    for problem in _problems(shape, 1, dtype, last=True):
        view = problem.view
        runs = runs_of(problem, view, layouts_of(problem))
        assert (runs.repeat, runs.across) == (repeat, across)
        rows, layouts, align = runs.view, runs.layouts, runs.alignment
        assert rows.channels == shape[1] * repeat
        positions = view.spatial + (repeat - 1 if across else 0)
        assert (rows.spatial - 1) * repeat < positions <= rows.spatial * repeat
        assert rows.channels % align == 0
        assert all(layout.spatial % align == 0 for layout in layouts)
        if not across:
            assert all(layout.sample % align == 0 for layout in layouts)
            assert view.channels * view.spatial % align == 0


def test_an_evaluation_leaves_no_partials_and_has_rows_of_several_positions_sooner() -> None:
    x = torch.empty(65536, 12, dtype=torch.bfloat16, device="meta")
    for training, repeat in ((True, 1), (False, 10)):
        problem = tiled(forward_problem(norm_of("batch_norm", training=training), Operands(x, mean=x[0], var=x[0])))
        assert runs_of(problem, problem.view, layouts_of(problem)).repeat == repeat


@pytest.mark.parametrize(("shape", "elements"), [((19, 377), 4), ((30, 35, 14), 2), ((6, 64, 15), 1), ((65536, 12), 8)])
def test_a_small_evaluation_has_one_tile_of_few_elements_a_thread(shape: tuple[int, ...], elements: int) -> None:
    x = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    given = torch.empty(shape[1], device="meta")
    problem = tiled(forward_problem(norm_of("batch_norm", training=False), Operands(x, mean=given, var=given)))
    output = passes_for(problem).output
    assert output.tiles == 1
    assert output.channels * output.positions == 32 * output.warps * elements


def test_tiles_of_a_large_evaluation_have_no_positions_beyond_a_sample_s() -> None:
    x, given = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((4253, 1024), (1024,)))
    norm = norm_of("batch_norm", training=False)
    problem = tiled(forward_problem(norm, Operands(x, scale=x, mean=given, var=given)))
    output = passes_for(problem).output
    assert (output.channels, output.positions, output.tiles) == (1024, 1, 1)
    few = replace(problem, view=replace(problem.view, spatial=3))
    assert (passes_for(few).output.channels, passes_for(few).output.positions) == (512, 4)


@pytest.mark.parametrize(
    ("size", "dtype", "warps"), [(22113, "bfloat16", 2), (22112, "bfloat16", 4), (22113, "float32", 4)]
)
def test_pieces_of_rows_by_narrow_loads_of_16_bits_are_of_few_warps(size: int, dtype: str, warps: int) -> None:
    x = torch.empty(40, size, dtype=getattr(torch, dtype), device="meta")
    assert passes_for(forward_problem(norm_of("layer_norm", 1), Operands(x))).output.warps == warps


def test_rows_do_not_run_across_samples_that_lie_apart() -> None:
    x = torch.empty(6, 255, 255, 67, dtype=torch.bfloat16, device="meta")[::2].permute(0, 3, 1, 2)
    problem = forward_problem(norm_of("instance_norm"), Operands(x))
    assert not runs_of(problem, problem.view, layouts_of(problem)).across


def test_a_tensor_with_gaps_between_its_positions_has_rows_of_one() -> None:
    x = torch.empty(8, 76, 75, 104, dtype=torch.bfloat16, device="meta")[..., :100].permute(0, 3, 1, 2)
    problem = forward_problem(norm_of("instance_norm"), Operands(x))
    assert runs_of(problem, problem.view, layouts_of(problem)).repeat == 1


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


def test_rows_at_one_address_have_no_windows() -> None:
    """Nothing but the end of the tensor follows them."""
    x = torch.empty(40, 1439, dtype=torch.float16, device="meta")
    problem = backward_problem(norm_of("layer_norm", 1), BackwardOperands(x, x, x, x))
    wide = replace(problem.layout, sample=1440)
    for sample, window in ((1448, 8), (0, 1)):
        grad = replace(wide, sample=sample)
        assert row_window(replace(problem, layout=wide, output_layout=wide, grad_layout=grad)) == window


@pytest.mark.parametrize(("side", "positions"), [(24, 64), (28, 128), (32, 1024), (56, 256)])
def test_planes_that_fill_no_tile_are_taken_in_pieces(side: int, positions: int) -> None:
    forward, backward = _problems((16, 640, side, side), 32, torch.bfloat16, False)
    assert passes_for(backward).reduction.positions == positions
    for tile in (passes_for(backward).reduction, passes_for(backward).output, passes_for(forward).output):
        assert tile.channels * tile.positions >= 1024


def test_odd_planes_are_written_in_longer_pieces() -> None:
    for problem in _problems((15, 640, 35, 11), 32, torch.bfloat16, False):
        output = passes_for(problem).output
        assert (output.channels, output.positions, output.tiles, output.warps) == (32, 128, 2, 8)
    assert passes_for(_problems((16, 640, 24, 24), 32, torch.bfloat16, False)[1]).output.positions == 64


@pytest.mark.parametrize(("side", "positions"), [(5, 32), (6, 64)])
def test_planes_shorter_than_a_piece_stay_whole(side: int, positions: int) -> None:
    for problem in _problems((512, 320, side, side), 32, torch.bfloat16, False):
        tiles = passes_for(problem).reduction if problem.backward else passes_for(problem).output
        assert tiles.positions == positions


def test_small_planes_stay_in_one_piece() -> None:
    """Pieces of many channels need a launch that merges the partials."""
    _, backward = _problems((2, 640, 24, 24), 32, torch.bfloat16, False)
    assert passes_for(backward).reduction.positions == 1024


@pytest.mark.parametrize(
    ("family", "groups", "shape", "dtype", "last", "names"),
    [
        ("instance_norm", 0, (51, 19, 80, 128), torch.float32, False, ("whole", "held")),
        ("instance_norm", 0, (64, 512, 11, 11), torch.float16, False, ("whole", "held")),
        ("instance_norm", 0, (43, 64, 95, 95), torch.bfloat16, False, ("tiles", "tiles")),
        ("instance_norm", 0, (25, 64, 160, 160), torch.float32, False, ("whole", "tiles")),
        ("instance_norm", 0, (119, 32, 56, 56), torch.float32, True, ("tiles", "tiles")),
        ("group_norm", 32, (16, 640, 13, 13), torch.bfloat16, False, ("whole", "tiles")),
        ("group_norm", 32, (32, 128, 60, 60), torch.bfloat16, False, ("held", "held")),
        ("group_norm", 32, (16, 640, 24, 24), torch.bfloat16, False, ("tiles", "tiles")),
        ("group_norm", 32, (29389, 192), torch.bfloat16, False, ("whole", "held")),
        ("batch_norm", 0, (16, 256, 28, 28), torch.bfloat16, False, ("held", "held")),
        ("batch_norm", 0, (3044, 2), torch.float16, False, ("held", "held")),
        ("batch_norm", 0, (13, 21, 29, 29), torch.bfloat16, False, ("held", "tiles")),
        ("batch_norm", 0, (76, 1, 9, 9), torch.float16, True, ("held", "held")),
        ("group_norm", 32, (43, 768, 3, 3), torch.bfloat16, False, ("whole", "held")),
        ("group_norm", 128, (12, 2048, 1, 3), torch.float32, False, ("held", "held")),
        ("layer_norm", 1, (20, 464), torch.bfloat16, False, ("whole", "held")),
        ("instance_norm", 0, (25, 64, 160, 160), torch.bfloat16, False, ("whole", "tiles")),
        ("instance_norm", 0, (25, 64, 132, 132), torch.bfloat16, False, ("rows", "tiles")),  # half of a block
        ("instance_norm", 0, (25, 64, 132, 132), torch.float32, False, ("whole", "tiles")),
        ("instance_norm", 0, (25, 64, 106, 106), torch.bfloat16, False, ("whole", "held")),
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


def test_steps_grow_with_a_plane() -> None:
    steps = [
        instances.rows_forward_for(_of("instance_norm", 0, (25, 64, side, side))[0]).elements for side in (92, 132)
    ]
    assert steps == [1024, 2048]


@pytest.mark.parametrize(("shape", "groups"), [((137, 287), 1), ((2, 1024), 1), ((5, 76), 4), ((24, 2, 7), 1)])
def test_a_small_problem_has_few_elements_a_thread(shape: tuple[int, ...], groups: int) -> None:
    forward, backward = _of("group_norm", groups, shape)
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
        ((22790, 158), torch.float32, 2, 1),
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
        _, problem = _of("instance_norm", 0, (samples, 24, 16, 16))
        seen = held_units(problem)
        assert seen is not None
        assert held_for(problem, seen).all_samples == alone


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
    ("family", "groups", "shape", "dtype", "config"),
    [
        ("group_norm", 32, (26, 2560, 1, 3), torch.float16, HeldConfig(2, 1)),  # a thread has a channel's positions
        ("group_norm", 32, (1, 512, 16, 16), torch.float32, HeldConfig(1, 4)),
        ("group_norm", 32, (64, 96, 6, 6), torch.float16, HeldConfig(4, 2)),
        ("group_norm", 8, (2, 64, 8, 8), torch.bfloat16, HeldConfig(2, 8, True)),  # one launch
        ("instance_norm", 0, (20, 756, 5, 5), torch.float32, HeldConfig(16, 1)),  # 64 bytes of each row
        ("instance_norm", 0, (2, 128, 16, 16), torch.bfloat16, HeldConfig(16, 4)),
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
    ("shape", "config"), [((1, 1607, 11), HeldConfig(16, 4)), ((1, 400, 11, 11), HeldConfig(1, 1))]
)
def test_the_backward_of_small_units_of_one_sample(shape: tuple[int, ...], config: HeldConfig) -> None:
    _, problem = _of("instance_norm", 0, shape)
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
    for problem, held in zip(_of("batch_norm", 0, shape, last), (forward, backward), strict=True):
        seen = held_units(problem)
        assert seen is not None
        assert holding_pays(problem, seen) == held


@pytest.mark.parametrize(
    ("shape", "last", "warps", "tiles"),
    [
        ((22, 1280, 18, 18), False, 1, 1),  # so many programs hide one another's loads
        ((64, 128, 14, 14), False, 4, 1),
        ((16, 12, 20, 20), True, 1, 2),  # and so few have little to do each
        ((8, 128, 64, 64), True, 2, 8),
    ],
)
def test_the_programs_that_read_a_batch(shape: tuple[int, ...], last: bool, warps: int, tiles: int) -> None:
    memory = torch.channels_last if last else torch.contiguous_format
    x = torch.empty(shape, device="meta").contiguous(memory_format=memory)
    found = passes_for(tiled(forward_problem(norm_of("batch_norm"), Operands(x)))).reduction
    assert (found.warps, found.tiles) == (warps, tiles)


@pytest.mark.parametrize(
    ("family", "shape", "positions", "warps"),
    [
        ("instance_norm", (49, 439, 32, 32), 8, 1),  # rows of several positions, of which a sample has 128
        ("batch_norm", (4, 100, 40, 40), 16, 2),  # narrow loads of a small problem
        ("batch_norm", (1, 100, 160, 260), 16, 2),  # wide ones: 8192 partials of a channel, not 16384
    ],
)
def test_the_programs_that_read_odd_channels_last(
    family: Family, shape: tuple[int, ...], positions: int, warps: int
) -> None:
    problem, _ = _of(family, 0, shape, True)
    found = passes_for(tiled(problem)).reduction
    assert (found.positions, found.warps) == (positions, warps)


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
    problem, _ = _of(family, 1, shape)
    assert whole_forward_for(problem) == config


@pytest.mark.parametrize(
    ("shape", "groups", "steps"),
    [
        ((65536, 768), 32, 125),
        ((20000, 320), 32, 19),
        ((65536, 768, 2), 32, 1),
        ((500, 4096), 32, 1),
        ((3000, 64), 32, 1),
    ],
)
def test_a_backward_of_many_points_walks_over_them(shape: tuple[int, ...], groups: int, steps: int) -> None:
    _, problem = _of("group_norm", groups, shape)
    units = held_units(problem)
    assert units is not None
    config = held_for(problem, units)
    assert config.steps == steps
    if steps > 1:
        assert holding_pays(problem, units)
        assert config in instances.HELD.configs(problem)
        assert config.samples * config.steps * (-(-shape[0] // (config.samples * config.steps))) >= shape[0]


def test_large_units_of_narrow_loads_are_not_held() -> None:
    x = torch.empty(40, 591, 15, 3, dtype=torch.float16, device="meta")
    problem = forward_problem(norm_of("group_norm", 3), Operands(x, scale=x[:, :, 0, 0], shift=x[:, :, 0, 0]))
    units = held_units(problem)
    assert units is not None
    assert not holding_pays(problem, units)


def test_short_units_with_parameters_of_their_own_are_fewer_in_a_program() -> None:
    problem, _ = _of("instance_norm", 0, (200, 64, 9, 9))
    assert whole_forward_for(problem) == WholeConfig(4, 1)


def test_the_units_of_many_samples_are_merged_from_shares() -> None:
    x, scale = torch.empty(38425, 320, 2, dtype=torch.float16, device="meta"), torch.empty(38425, 320, device="meta")
    operands = BackwardOperands(x, x, scale[0], scale[0], scale=scale, shift=scale)
    problem = replace(backward_problem(norm_of("batch_norm"), operands), device="cuda")
    combination, _ = instances.TILES.plan(problem).prepare(True, True)
    assert combination.fold is not None
    assert combination.combine.constants["BLOCK_R"] == 128  # of 76 shares of 512


@pytest.mark.parametrize(
    ("shape", "direction", "held"),
    [
        ((900, 1024), "forward", True),
        ((900, 1024), "backward", False),
        ((1000, 256), "backward", False),
        ((300, 64), "backward", True),
    ],
)
def test_many_points_with_scale_and_shift_are_one_sample(shape: tuple[int, int], direction: str, held: bool) -> None:
    x, norm = torch.empty(shape, dtype=torch.bfloat16, device="meta"), norm_of("batch_norm")
    backward = backward_problem(norm, BackwardOperands(x, x, x[0], x[0], scale=x, shift=x))
    problem = backward if direction == "backward" else forward_problem(norm, Operands(x, scale=x, shift=x))
    units = held_units(problem)
    assert units is not None
    assert holding_pays(problem, units) == held
    seen = of_points(problem)
    assert seen is not None
    assert (seen.view, seen.layout.order) == (View(1, shape[1], 1, shape[0]), "channels_last")


@pytest.mark.parametrize(("shape", "repeat"), [((65536, 22), 8), ((65535, 22), 1), ((65536, 24), 1)])
def test_rows_of_a_tile_have_several_points_where_these_divide_them(shape: tuple[int, int], repeat: int) -> None:
    x = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    problem = replace(forward_problem(norm_of("batch_norm"), Operands(x, scale=x, shift=x)), device="cuda")
    assert instances.TILES.plan(problem).apply.constants["REPEAT"] == repeat


def test_an_only_group_of_channels_last_is_one_run_where_its_channels_fill_the_positions() -> None:
    x = torch.empty(2, 8, 6, 6, device="meta").to(memory_format=torch.channels_last)
    wide = torch.empty(2, 12, 6, 6, device="meta").to(memory_format=torch.channels_last)
    for given, groups, channels in ((x, 1, 1), (x, 2, 4), (wide[:, :8], 1, 8)):
        problem = forward_problem(norm_of("group_norm", groups), Operands(given))
        assert problem.layout.order == "channels_last"
        assert for_moments(problem).view.group_channels == channels


@pytest.mark.parametrize(
    ("shape", "groups", "dtype", "units"),
    [
        ((24, 64, 21, 21), 32, torch.float16, 8),
        ((16, 128, 16, 16), 32, torch.bfloat16, 4),
        ((40, 64, 15, 15), 16, torch.float32, 2),
        ((2, 96, 32, 32), 32, torch.float16, 1),  # so few programs would each have much to do
        ((64, 105, 12, 12), 21, torch.float16, 1),  # 3 of 8 lanes have no channel
        ((16, 96, 14, 14), 32, torch.bfloat16, 2),
    ],
)
def test_groups_of_a_few_channels_are_together_in_channels_last(
    shape: tuple[int, ...], groups: int, dtype: torch.dtype, units: int
) -> None:
    problem, _ = _problems(shape, groups, dtype, True)
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
    for problem, held in zip(_problems(shape, groups, torch.bfloat16, True), (forward, backward), strict=True):
        seen = held_units(problem)
        assert seen is not None
        assert holding_pays(problem, seen) == held


def test_the_moments_of_a_modulated_batch_norm_are_read_as_those_of_one_without() -> None:
    x, scale = torch.empty(2844, 128, device="meta"), torch.empty(2844, 128, device="meta")
    problem, plain = (forward_problem(norm_of("batch_norm"), Operands(x, scale=given)) for given in (scale, None))
    assert for_moments(problem).view == plain.folded.view
    config = passes_for(tiled(problem))
    assert config.reduction == passes_for(tiled(plain)).reduction
    assert config.output.positions == 1


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


def test_a_program_for_the_modulation_of_few_chunks_has_many_channels() -> None:
    x, scale = torch.empty(5000, 700, device="meta"), torch.empty(5000, 700, device="meta")
    problem = backward_problem(norm_of("batch_norm"), BackwardOperands(x, x, x[0], x[0], scale=scale))
    partials = PartialsShape(problem.view, 1, 700, last=True, per_batch=True)
    sums = ParameterSums(partials, True, True)
    assert sums.modulated == (1024, 1)
    assert sums.programs == sums.channel_programs + 5000
    assert partials.together == 8  # neighbours in memory


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


# --- choices fitted to drawn shapes ---


def test_points_of_few_channels_are_held_and_not_walked_over() -> None:
    for channels, walked in ((11, False), (24, False), (32, True), (768, True)):
        _, problem = _of("group_norm", 1, (65536, channels))
        seen = held_units(problem)
        assert seen is not None
        assert (held_for(problem, seen).steps > 1) == walked


@pytest.mark.parametrize(
    ("family", "rows", "length", "dtype", "columns"),
    [
        ("rms_norm", 264, 16384, torch.bfloat16, True), ("rms_norm", 400, 12288, torch.bfloat16, False),
        ("rms_norm", 527, 16384, torch.float16, False), ("rms_norm", 300, 16000, torch.float32, False),
        ("layer_norm", 400, 16384, torch.bfloat16, True), ("layer_norm", 300, 16384, torch.float32, True),
        ("layer_norm", 24986, 9914, torch.bfloat16, True), ("rms_norm", 8000, 9914, torch.bfloat16, False),
    ],
)  # fmt: skip
def test_few_long_rows_go_by_columns_and_those_of_rms_norm_sooner_by_rows(
    family: Family, rows: int, length: int, dtype: torch.dtype, columns: bool
) -> None:
    x = torch.empty(rows, length, dtype=dtype, device="meta")
    problem = backward_problem(norm_of(family, 1), BackwardOperands(x, x, x, x))
    assert by_columns(problem) == columns
    if family == "rms_norm" and not columns:
        assert rows_backward_for(problem).reload == (length != 12288 and dtype != torch.float32)


@pytest.mark.parametrize(
    ("rows", "length", "steps"), [(36, 12288, 2), (200, 10240, 4), (264, 12288, 4), (112, 65536, 8)]
)
def test_the_steps_of_few_long_rows_leave_programs_for_the_device(rows: int, length: int, steps: int) -> None:
    x = torch.empty(rows, length, dtype=torch.bfloat16, device="meta")
    config = columns_backward_for(backward_problem(norm_of("layer_norm", 1), BackwardOperands(x, x, x, x)))
    assert (config.elements, config.warps, config.row_elements, config.row_warps) == (2048, 8, 4096, 16)
    assert config.steps == steps


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


@pytest.mark.parametrize(("channels", "dtype", "elements"), [(1280, torch.bfloat16, 32), (1280, torch.float32, 16)])
def test_odd_planes_by_single_elements_are_of_few_warps(channels: int, dtype: torch.dtype, elements: int) -> None:
    x = torch.empty(34, channels, 679, dtype=dtype, device="meta")
    problem = backward_problem(norm_of("instance_norm"), BackwardOperands(x, x, x, x))
    seen = held_units(problem)
    assert seen is not None
    config = held_for(problem, seen)
    assert config.units * seen.elements == 32 * config.warps * elements


def test_a_pass_that_writes_three_tiles_of_a_plane_has_one_to_a_program() -> None:
    for length, tiles in ((4337, 1), (8000, 2), (5000, 1)):
        x = torch.empty(4, 148, length, device="meta")
        assert passes_for(tiled(forward_problem(norm_of("group_norm", 74), Operands(x)))).output.tiles == tiles


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
     (2000, 99, torch.float32, 4)],
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


@pytest.mark.parametrize(
    ("rows", "length", "dtype", "programs", "stages"),
    [
        (7260, 473, torch.float16, 1056, 3),
        (30000, 1024, torch.float16, 528, 4),
        (40000, 512, torch.bfloat16, 1056, 3),
        (2500, 2048, torch.bfloat16, 264, 4),
        (9000, 384, torch.float32, 528, 4),
        (60000, 96, torch.float16, 2112, 3),
        (16108, 104, torch.bfloat16, 1056, 3),
        (368, 3072, torch.float32, 132, 3),
    ],
)
def test_programs_of_a_backward_have_enough_bytes_in_flight_and_few_sums(
    rows: int, length: int, dtype: torch.dtype, programs: int, stages: int
) -> None:
    config = rows_backward_for(_of("layer_norm", 1, (rows, length), dtype=dtype)[1])
    assert (config.programs, config.stages) == (programs, stages)


@pytest.mark.parametrize(
    ("family", "length", "dtype", "config"),
    [
        ("rms_norm", 20480, torch.float16, RowsForwardConfig(4096, 8)),
        ("rms_norm", 28672, torch.float16, RowsForwardConfig(8192, 16)),
        ("layer_norm", 28672, torch.bfloat16, RowsForwardConfig(4096, 16)),
        ("rms_norm", 65536, torch.float32, RowsForwardConfig(16384, 16)),
        ("rms_norm", 65536, torch.float64, RowsForwardConfig(4096, 8)),
        ("layer_norm", 65536, torch.float16, RowsForwardConfig(8192, 16)),
        ("layer_norm", 14001, torch.bfloat16, RowsForwardConfig(2048, 8)),
    ],
)
def test_steps_of_long_rows(family: Family, length: int, dtype: torch.dtype, config: RowsForwardConfig) -> None:
    assert rows_forward_for(_of(family, 1, (800, length), dtype=dtype)[0]) == config


def test_rows_of_single_elements_with_a_smooth_activation_go_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instances, "_common", lambda problem: None)
    for length, activation, stepped in ((14001, "silu", True), (14001, None, False), (9001, "silu", False)):
        x = torch.empty(3000, length, dtype=torch.bfloat16, device="meta")
        problem = forward_problem(norm_of("layer_norm", 1, activation=resolve(activation)), Operands(x))
        assert (instances.choose(problem) is instances.ROWS) == stepped


def test_hundreds_of_the_longest_rows_go_in_steps_and_few_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instances, "_common", lambda problem: None)
    for rows, chosen in ((500, instances.ROWS), (100, instances.TILES)):
        assert instances.choose(_of("rms_norm", 1, (rows, 65536), dtype=torch.float32)[0]) is chosen


def test_a_backward_by_columns_of_single_elements_has_few_a_thread() -> None:
    config = columns_backward_for(_of("rms_norm", 1, (341, 59741), dtype=torch.bfloat16)[1])
    assert (config.elements, config.steps, config.warps) == (512, 16, 4)


def test_the_shortest_units_in_fp32_are_two_elements_a_thread() -> None:
    config = whole_forward_for(_of("group_norm", 1800, (6, 1800, 1, 3, 3), dtype=torch.float32)[0])
    assert (config.units, config.warps) == (16, 4)


def test_a_smooth_activation_leaves_partials_of_each_sample_sooner() -> None:
    for activation, together in (("relu", True), ("silu", False)):
        x = torch.empty(20, 11, 61, dtype=torch.float16, device="meta")
        norm = norm_of("instance_norm", activation=resolve(activation))
        problem = backward_problem(norm, BackwardOperands(x, x, x, x))
        seen = held_units(problem)
        assert seen is not None
        assert held_for(problem, seen).all_samples == together


def test_a_smooth_activation_has_a_large_plane_read_in_shorter_tiles() -> None:
    for activation, positions, warps in (("relu", 4096, 4), ("silu", 2048, 2)):
        x = torch.empty(7, 32, 392, 973, dtype=torch.bfloat16, device="meta")
        norm = norm_of("batch_norm", activation=resolve(activation))
        reduction = passes_for(backward_problem(norm, BackwardOperands(x, x, x, x))).reduction
        assert (reduction.positions, reduction.warps, reduction.tiles) == (positions, warps, 47)


def test_the_tiles_of_a_program_that_reads_a_large_batch() -> None:
    reduction = passes_for(_of("batch_norm", 0, (39, 96, 112, 112), last=True)[1]).reduction
    assert (reduction.channels, reduction.tiles) == (32, 112)
