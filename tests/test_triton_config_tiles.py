"""The passes of triton.tiles, and the runs that they take: pure functions of the problem."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from triton_config_support import group_norms, problems_of

from fusednorm import choice
from fusednorm.activations import resolve
from fusednorm.backends.triton import instances
from fusednorm.backends.triton.config.device import shares
from fusednorm.backends.triton.config.holding import holding_pays
from fusednorm.backends.triton.config.kinds import PassConfig
from fusednorm.backends.triton.config.tiles import merged, of_points, passes_for, tiled
from fusednorm.backends.triton.config.units import held_units
from fusednorm.backends.triton.plans.tiles import ParameterSums, PartialsShape
from fusednorm.backends.triton.runs import (
    for_moments,
    layouts_of,
    load_bytes,
    runs_of,
    window_of,
)
from fusednorm.instance import Instance
from fusednorm.norm import Family, norm_of
from fusednorm.operands import BackwardOperands, Operands, Sums
from fusednorm.problem import Problem, View
from fusednorm.problems import backward_problem, forward_problem, sum_forward_problem


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    ("shape", "groups"), [((2, 320, 128, 128), 32), ((1, 128, 1024, 1024), 32), ((3, 7, 5, 3), 7), ((2, 24, 33, 31), 8)]
)
def test_tiles(shape: tuple[int, ...], groups: int, last: bool, dtype: torch.dtype) -> None:
    for problem in group_norms(shape, groups, dtype, last):
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
    [
        (3, 4, 4),
        (20, 32, 32),
        (72, 64, 128),
        (96, 64, 128),
        (100, 64, 128),
        (304, 64, 64),
        (320, 64, 64),
        (384, 64, 128),
    ],
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
    forward, backward = group_norms((2, 320, 128, 128), 32, torch.bfloat16, False)
    assert merged(forward) > merged(backward) > 0


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


def test_a_large_unit_has_no_more_partials_than_a_program_merges() -> None:
    x = torch.empty(2, 293, 31 * 31 * 31, 1, dtype=torch.float16, device="meta").to(memory_format=torch.channels_last)
    problem = forward_problem(norm_of("group_norm", 1), Operands(x))
    repeat = runs_of(problem, problem.view, layouts_of(problem)).repeat
    tile = passes_for(problem).reduction
    assert 293 * repeat * -(-(31**3) // (repeat * tile.positions * tile.tiles)) <= 16384


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
    for problem in group_norms(shape, 4, dtype, last):
        assert window_of(problem.dtype, problem.view, layouts_of(problem)) == window


def test_tensors_that_lie_otherwise_in_their_windows_have_none() -> None:
    problem, _ = group_norms((2, 8, 7, 7), 4, torch.bfloat16, False)
    assert problem.output_layout is not None
    for sample, channel, window in ((8, 0, 8), (1, 0, 1), (8, 8, 8), (8, 1, 1)):
        layout = problem.layout
        output = replace(problem.output_layout, sample=layout.sample + sample, channel=layout.channel + channel)
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
    for problem in group_norms(shape, 1, dtype, last=True):
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
    ("family", "shape", "dtype", "read", "written"),
    [
        ("layer_norm", (400, 22113), torch.bfloat16, 4, 2),
        ("layer_norm", (66, 14001), torch.bfloat16, 4, 4),
        ("rms_norm", (20, 14001), torch.bfloat16, 4, 8),
        ("layer_norm", (12, 13098), torch.float32, 8, 8),
        ("rms_norm", (48, 65536), torch.bfloat16, 8, 2),
        ("layer_norm", (300, 30000), torch.bfloat16, 4, 2),
    ],
)
def test_few_pieces_of_rows_have_many_warps(
    family: Family, shape: tuple[int, int], dtype: torch.dtype, read: int, written: int
) -> None:
    x = torch.empty(shape, dtype=dtype, device="meta")
    found = passes_for(forward_problem(norm_of(family, 1), Operands(x)))
    assert (found.reduction.warps, found.output.warps) == (read, written)


def test_rows_do_not_run_across_samples_that_lie_apart() -> None:
    x = torch.empty(6, 255, 255, 67, dtype=torch.bfloat16, device="meta")[::2].permute(0, 3, 1, 2)
    problem = forward_problem(norm_of("instance_norm"), Operands(x))
    assert not runs_of(problem, problem.view, layouts_of(problem)).across


def test_a_tensor_with_gaps_between_its_positions_has_rows_of_one() -> None:
    x = torch.empty(8, 76, 75, 104, dtype=torch.bfloat16, device="meta")[..., :100].permute(0, 3, 1, 2)
    problem = forward_problem(norm_of("instance_norm"), Operands(x))
    assert runs_of(problem, problem.view, layouts_of(problem)).repeat == 1


@pytest.mark.parametrize(("side", "positions"), [(24, 64), (28, 128), (32, 1024), (56, 256)])
def test_planes_that_fill_no_tile_are_taken_in_pieces(side: int, positions: int) -> None:
    forward, backward = group_norms((16, 640, side, side), 32, torch.bfloat16, False)
    assert passes_for(backward).reduction.positions == positions
    for tile in (passes_for(backward).reduction, passes_for(backward).output, passes_for(forward).output):
        assert tile.channels * tile.positions >= 1024


def test_odd_planes_are_written_in_longer_pieces() -> None:
    for problem in group_norms((15, 640, 35, 11), 32, torch.bfloat16, False):
        output = passes_for(problem).output
        assert (output.channels, output.positions, output.tiles, output.warps) == (32, 128, 2, 8)
    assert passes_for(group_norms((16, 640, 24, 24), 32, torch.bfloat16, False)[1]).output.positions == 64


@pytest.mark.parametrize(("side", "positions"), [(5, 32), (6, 64)])
def test_planes_shorter_than_a_piece_stay_whole(side: int, positions: int) -> None:
    for problem in group_norms((512, 320, side, side), 32, torch.bfloat16, False):
        tiles = passes_for(problem).reduction if problem.backward else passes_for(problem).output
        assert tiles.positions == positions


def test_odd_planes_of_less_than_32_positions_are_written_in_pieces_of_16() -> None:
    """Of many groups in 16 bits."""
    for shape, groups, dtype, positions in (
        ((117, 1172, 21), 4, torch.bfloat16, 16),
        ((90, 1800, 17), 5, torch.bfloat16, 16),
        ((60, 900, 35), 4, torch.bfloat16, 64),
        ((117, 1172, 21), 4, torch.float32, 32),
        ((4, 1000, 19), 4, torch.float16, 32),
    ):
        assert passes_for(group_norms(shape, groups, dtype, False)[1]).output.positions == positions, (shape, dtype)
    assert passes_for(problems_of("batch_norm", 0, (117, 1172, 21))[1]).output.positions == 32


def test_small_planes_stay_in_one_piece() -> None:
    """Pieces of many channels need a launch that merges the partials."""
    _, backward = group_norms((2, 640, 24, 24), 32, torch.bfloat16, False)
    assert passes_for(backward).reduction.positions == 1024


@pytest.mark.parametrize(
    ("shape", "last", "warps", "tiles"),
    [
        ((22, 1280, 18, 18), False, 1, 1),  # so many programs hide one another's loads
        ((64, 128, 14, 14), False, 4, 1),
        ((16, 12, 20, 20), True, 1, 1),  # and so few have one tile each
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
        ("instance_norm", (49, 439, 32, 32), 16, 1),  # rows of several positions, of which a sample has 128
        ("batch_norm", (4, 100, 40, 40), 16, 1),  # narrow loads of a small problem, one tile to a program
        ("batch_norm", (1, 100, 160, 260), 16, 1),  # wide ones: 700 partials of a channel
        ("batch_norm", (16, 3, 224, 224), 32, 2),  # 6000 of them, not 12000
        ("batch_norm", (57, 3, 167, 167), 64, 4),  # 4000 of them, not 8000
    ],
)
def test_the_programs_that_read_odd_channels_last(
    family: Family, shape: tuple[int, ...], positions: int, warps: int
) -> None:
    problem, _ = problems_of(family, 0, shape, True)
    found = passes_for(tiled(problem)).reduction
    assert (found.positions, found.warps) == (positions, warps)


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


@pytest.mark.parametrize(
    ("family", "groups", "shape", "dtype", "activation", "direction", "repeated"),
    [
        ("group_norm", 25, (46, 25, 45, 27), torch.float16, None, "forward", False),
        ("group_norm", 25, (46, 25, 45, 27), torch.float16, None, "backward", False),
        ("group_norm", 25, (46, 25, 45, 27), torch.float32, None, "forward", True),
        ("group_norm", 1, (40, 45, 31, 31), torch.float16, None, "forward", True),
        ("instance_norm", 0, (30, 42, 33, 33), torch.bfloat16, "silu", "forward", False),
        ("instance_norm", 0, (30, 42, 33, 33), torch.bfloat16, "silu", "backward", True),
        ("instance_norm", 0, (8, 3, 256, 256), torch.bfloat16, None, "forward", True),
        ("group_norm", 5, (64, 45, 38, 38), torch.bfloat16, None, "forward", True),
        ("batch_norm", 0, (46, 25, 45, 27), torch.float16, None, "backward", True),
        ("group_norm", 25, (15, 75, 40, 40), torch.float16, None, "forward", True),  # 59 % of 128 lanes
    ],
)
def test_where_rows_of_channels_last_have_several_positions(
    family: Family,
    groups: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    activation: str | None,
    direction: str,
    repeated: bool,
) -> None:
    x = torch.empty(shape, dtype=dtype, device="meta").to(memory_format=torch.channels_last)
    norm = norm_of(family, groups, activation=resolve(activation))
    backward = backward_problem(norm, BackwardOperands(x, x, x, x))
    problem = backward if direction == "backward" else forward_problem(norm, Operands(x))
    plan: Any = instances.TILES.plan(replace(problem, device="cuda"))
    output = plan.apply.constants if direction == "forward" else plan.constants
    assert (output["REPEAT"] > 1) is repeated


def test_an_only_group_of_channels_last_is_one_run_where_its_channels_fill_the_positions() -> None:
    x = torch.empty(2, 8, 6, 6, device="meta").to(memory_format=torch.channels_last)
    wide = torch.empty(2, 12, 6, 6, device="meta").to(memory_format=torch.channels_last)
    for given, groups, channels in ((x, 1, 1), (x, 2, 4), (wide[:, :8], 1, 8)):
        problem = forward_problem(norm_of("group_norm", groups), Operands(given))
        assert problem.layout.order == "channels_last"
        assert for_moments(problem).view.group_channels == channels


def test_the_moments_of_a_modulated_batch_norm_are_read_as_those_of_one_without() -> None:
    x, scale = torch.empty(2844, 128, device="meta"), torch.empty(2844, 128, device="meta")
    problem, plain = (forward_problem(norm_of("batch_norm"), Operands(x, scale=given)) for given in (scale, None))
    assert for_moments(problem).view == plain.folded.view
    config = passes_for(tiled(problem))
    assert config.reduction == passes_for(tiled(plain)).reduction
    assert config.output.positions == 1


def test_a_program_for_the_modulation_of_few_chunks_has_many_channels() -> None:
    x, scale = torch.empty(5000, 700, device="meta"), torch.empty(5000, 700, device="meta")
    problem = backward_problem(norm_of("batch_norm"), BackwardOperands(x, x, x[0], x[0], scale=scale))
    partials = PartialsShape(problem.view, 1, 700, last=True, per_batch=True)
    sums = ParameterSums(partials, True, True)
    assert sums.modulated == (1024, 1)
    assert sums.programs == sums.channel_programs + 5000
    assert partials.together == 8  # neighbours in memory


def test_a_pass_that_writes_three_tiles_of_a_plane_has_one_to_a_program() -> None:
    for length, tiles in ((4337, 1), (8000, 2), (5000, 1)):
        x = torch.empty(4, 148, length, device="meta")
        assert passes_for(tiled(forward_problem(norm_of("group_norm", 74), Operands(x)))).output.tiles == tiles


@pytest.mark.parametrize(
    ("shape", "positions", "tiles", "warps"),
    [
        ((7, 32, 392, 973), 1024, 33, 1),
        ((2, 320, 128, 128), 1024, 8, 1),
        ((61, 30, 181, 181), 2048, 16, 2),
        ((13, 33, 127, 127), 2048, 8, 4),
        ((6, 8, 255, 255), 2048, 2, 4),
    ],
)
def test_the_programs_of_a_backward_that_read_large_planes(
    shape: tuple[int, ...], positions: int, tiles: int, warps: int
) -> None:
    x = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    norm = norm_of("instance_norm", activation=resolve("silu"))
    reduction = passes_for(backward_problem(norm, BackwardOperands(x, x, x, x))).reduction
    assert (reduction.positions, reduction.tiles, reduction.warps) == (positions, tiles, warps)


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        ("batch_norm", (2, 1, 439, 256)),  # by 4 programs it took 13.1 us in fp16, by 8 8.2
        ("batch_norm", (1, 3, 400, 400)),
        ("instance_norm", (1, 8, 224, 224)),
        ("instance_norm", (3, 1, 512, 256)),
    ],
)
def test_a_few_large_planes_are_read_by_as_many_programs_as_they_have_tiles(
    family: Family, shape: tuple[int, ...]
) -> None:
    reduction = passes_for(tiled(problems_of(family, 0, shape)[1])).reduction
    programs = shape[0] * shape[1] * -(-shape[2] * shape[3] // (reduction.positions * reduction.tiles))
    assert programs >= 100, reduction


def test_odd_planes_are_written_in_short_tiles() -> None:
    for width, tile in ((71, (1024, 2)), (72, (2048, 4))):
        output = passes_for(problems_of("instance_norm", 0, (25, 45, 71, width))[1]).output
        assert (output.positions, output.warps) == tile


@pytest.mark.parametrize(
    ("channels", "dtype", "read", "write"),
    [
        (320, torch.bfloat16, (64, 16, 2, 3), (64, 32, 1, 2)),
        (512, torch.bfloat16, (64, 16, 2, 3), (128, 32, 1, 4)),
        (512, torch.float32, (64, 8, 2, 3), (128, 16, 1, 4)),
        (192, torch.float32, (64, 8, 2, 3), (64, 16, 2, 2)),
        (512, torch.float64, (64, 4, 2, 3), (128, 2, 2, 2)),
    ],
)
def test_the_passes_of_a_backward_of_channels_last(
    channels: int, dtype: torch.dtype, read: tuple[int, ...], write: tuple[int, ...]
) -> None:
    problem = problems_of("instance_norm", 0, (16, channels, 64, 64), last=True, dtype=dtype)[1]
    passes = passes_for(problem)
    reduction, output = passes.reduction, passes.output
    assert (reduction.channels, reduction.positions, reduction.warps, reduction.stages) == read
    assert (output.channels, output.positions, output.tiles, output.warps) == write


@pytest.mark.parametrize(
    ("count", "most", "share"), [(256, 6, 4), (34, 4, 4), (182, 7, 7), (57, 5, 3), (7, 12, 7), (400, 6, 5)]
)
def test_shares_of_a_program_are_equal_where_these_are_more_than_half_as_large(
    count: int, most: int, share: int
) -> None:
    assert shares(count, most) == share


def test_an_only_tile_of_a_program_is_not_in_flight_ahead_of_its_use() -> None:
    for shape, dtype, few in (
        ((65536, 6), torch.bfloat16, False),
        ((16384, 5), torch.float16, True),
        ((20000, 7), torch.float32, True),
    ):
        for problem in problems_of("batch_norm", 0, shape, dtype=dtype):
            reduction = passes_for(tiled(problem)).reduction
            # Few programs of single loads hide no time of memory.
            warps = (2 if problem.backward else 4) if few else 1
            assert (reduction.tiles, reduction.warps, reduction.stages) == (1, warps, 1)


@pytest.mark.parametrize(
    ("shape", "dtype", "tile"),
    [
        ((9781, 13), torch.float32, (16, 64, 4)),
        ((60000, 5), torch.float32, (8, 128, 4)),
        ((30000, 11), torch.float16, (16, 64, 4)),
        ((7021, 5), torch.float16, (8, 128, 4)),
        ((12000, 10), torch.bfloat16, (16, 64, 4)),  # pairs
        ((40000, 12), torch.float16, (16, 64, 1)),  # many pairs
        ((65536, 5), torch.float16, (8, 128, 1)),
        ((4000, 27), torch.float16, (32, 32, 1)),
        ((20000, 31), torch.float32, (32, 32, 1)),
        ((9000, 50), torch.bfloat16, (32, 32, 1)),
    ],
)
def test_few_programs_that_read_odd_channels_have_more_warps(
    shape: tuple[int, int], dtype: torch.dtype, tile: tuple[int, int, int]
) -> None:
    problem, _ = problems_of("batch_norm", 0, shape, dtype=dtype)
    reduction = passes_for(tiled(problem)).reduction
    assert (reduction.channels, reduction.positions, reduction.warps) == tile


@pytest.mark.parametrize(("channels", "warps"), [(30, 8), (32, 2)])
def test_points_of_narrow_loads_are_written_on_more_warps(channels: int, warps: int) -> None:
    x = torch.empty(6000, channels, dtype=torch.bfloat16, device="meta")
    problem = forward_problem(norm_of("batch_norm"), Operands(x, scale=x, shift=x))
    assert instances.TILES.configs(problem)[0].output.warps == warps


@pytest.mark.parametrize(("shape", "channels", "positions"), [((115, 2521, 256), 512, 8), ((128, 640, 144), 128, 32)])
def test_the_output_of_long_rows_of_channels_is_written_in_long_tiles(
    shape: tuple[int, ...], channels: int, positions: int
) -> None:
    x = torch.empty(shape, dtype=torch.float16, device="meta")
    output = passes_for(tiled(forward_problem(norm_of("batch_norm"), Operands(x)))).output
    assert (output.channels, output.positions) == (channels, positions)


def test_the_tiles_of_a_program_that_reads_a_large_batch() -> None:
    reduction = passes_for(problems_of("batch_norm", 0, (39, 192, 112, 112), last=True)[1]).reduction
    assert (reduction.channels, reduction.positions, reduction.tiles, reduction.warps) == (64, 16, 56, 2)


@pytest.mark.parametrize(
    ("called", "shape", "dtype", "last", "reduction"),
    [
        (("instance_norm", 0, None), (12, 203, 64, 64), torch.bfloat16, True, PassConfig(64, 8, 16, 1, 3)),
        (("batch_norm", 0, None), (40000, 25), torch.float16, False, PassConfig(32, 128, 1, 4)),
        (("batch_norm", 0, None), (40000, 10), torch.float16, False, PassConfig(16, 64, 1, 1)),
        (("group_norm", 1, None), (9, 7, 95, 107), torch.float32, False, PassConfig(1, 2048, 1, 8)),
        (("group_norm", 1, None), (90, 7, 95, 107), torch.float32, False, PassConfig(1, 2048, 1, 8)),
        (("group_norm", 1, None), (1, 40, 95, 107), torch.float32, False, PassConfig(1, 2048, 1, 8)),
        (("group_norm", 19, None), (100, 247, 49, 49), torch.float32, False, PassConfig(1, 1024, 1, 4)),  # fuller
        (("batch_norm", 0, None), (16, 100, 45, 45), torch.float32, False, PassConfig(1, 512, 4, 2, 3)),  # short
        (("batch_norm", 0, None), (10, 192, 97, 97), torch.float32, False, PassConfig(1, 2048, 1, 8)),
        (("instance_norm", 0, "silu"), (1, 640, 24, 608), torch.float32, True, PassConfig(64, 8, 20, 2, 3)),
        (("instance_norm", 0, None), (1, 640, 24, 608), torch.float32, True, PassConfig(64, 8, 28, 2, 3)),
        (("batch_norm", 0, None), (121, 1280, 3, 8), torch.float16, True, PassConfig(64, 16, 6, 2, 3)),  # no repeats
        (("group_norm", 1, "relu"), (62, 1275, 9, 9), torch.float16, True, PassConfig(128, 4, 3, 1, 3)),
        (("group_norm", 3, None), (90, 555, 8, 8), torch.bfloat16, True, PassConfig(128, 4, 2, 1, 3)),
        (("group_norm", 1, "gelu"), (67, 1973, 3, 3), torch.float32, True, PassConfig(64, 8, 1, 1, 1)),
        (("group_norm", 4, "relu"), (17, 8, 24, 24, 24), torch.float32, False, PassConfig(1, 512, 9, 2, 3)),
        (("group_norm", 5, "relu"), (100, 475, 12, 12), torch.bfloat16, True, PassConfig(128, 4, 5, 1, 3)),
        (("instance_norm", 0, None), (17, 539, 137, 41), torch.float16, True, PassConfig(64, 8, 88, 1, 3)),  # fewer
    ],
)  # fmt: skip
def test_the_passes_of_drawn_shapes_that_were_measured(
    called: tuple[Family, int, str | None], shape: tuple[int, ...], dtype: torch.dtype, last: bool,
    reduction: PassConfig,
) -> None:  # fmt: skip
    family, groups, activation = called
    memory = torch.channels_last if last else torch.contiguous_format
    x = torch.empty(shape, dtype=dtype, device="meta").contiguous(memory_format=memory)
    problem = backward_problem(norm_of(family, groups, activation=resolve(activation)), BackwardOperands(x, x, x, x))
    assert passes_for(tiled(problem)).reduction == reduction


def test_the_backward_of_samples_of_few_rows() -> None:
    """batch_norm of (34, 2048, 3, 3, 3) with scale and shift, whose samples have 27 rows each."""
    x = torch.empty(34, 2048, 3, 9, dtype=torch.bfloat16, device="meta").contiguous(memory_format=torch.channels_last)
    scale = torch.empty(34, 2048, dtype=torch.bfloat16, device="meta")
    given = BackwardOperands(x, x, x, x, scale=scale, shift=scale)
    problem = backward_problem(norm_of("batch_norm", activation=resolve("gelu")), given)
    assert passes_for(tiled(problem)).reduction == PassConfig(128, 4, 7, 1, 3)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("names", [("pre_add",), ("post_add",), ("pre_add", "post_add")])
def test_the_sums_around_an_evaluation_are_fused(
    names: tuple[str, ...], last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where an instance that adds nothing runs the evaluation alone."""
    monkeypatch.setattr(instances, "unavailable", lambda: None)
    memory = torch.channels_last if last else torch.contiguous_format
    x = torch.empty(16, 64, 56, 56, dtype=torch.bfloat16).contiguous(memory_format=memory)
    one = torch.ones(64)
    operands = Operands(x, mean=one, var=one)
    norm = norm_of("batch_norm", training=False)
    sums = Sums(**dict.fromkeys(names, x))
    summed = replace(sum_forward_problem(norm, operands, sums, False), device="cuda")
    assert choice.default(replace(summed, added=None)) is (instances.TILES if last else instances.FLAT)
    assert choice.default(summed).supports(summed) is None

    class Tuned:
        """A file whose choice for the evaluation adds nothing."""

        def find(self, problem: Problem, found: object) -> tuple[Instance, None]:
            return instances.FLAT, None

    monkeypatch.setattr(choice, "tuned_file", Tuned)
    assert choice.choose(replace(summed, added=None)).instance is instances.FLAT
    assert choice.choose(summed).instance.supports(summed) is None
