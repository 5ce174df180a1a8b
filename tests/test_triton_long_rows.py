"""Rows of channels_last with as many positions as fit, which a backward reads: which problems have them, and what the
kernel makes of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from interpreter_support import interpreted

from fusednorm.activations import resolve
from fusednorm.backends.triton.config.kinds import PassConfig
from fusednorm.backends.triton.config.lists import passes
from fusednorm.backends.triton.config.long_rows import MOST_ROWS, read_by_long_rows
from fusednorm.backends.triton.config.tiles import other_reads, passes_for, tiled
from fusednorm.norm import Family, norm_of
from fusednorm.operands import BackwardOperands
from fusednorm.problem import Problem
from fusednorm.problems import backward_problem, sum_backward_problem

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def backward_of(family: Family, groups: int, activation: str | None, x: torch.Tensor) -> Problem:
    norm = norm_of(family, groups, activation=resolve(activation))
    return tiled(backward_problem(norm, BackwardOperands(x, x, x, x)))


def last(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    memory = torch.channels_last if len(shape) == 4 else torch.contiguous_format
    return torch.empty(shape, dtype=dtype, device="meta").contiguous(memory_format=memory)


# Rows of 2 KB by 4 warps where the input is small or has few channels, else of 4 KB by 8.
MEASURED = [
    (("batch_norm", 0, "silu"), last(65536, 33), PassConfig(1024, 1, 7, 4, 4, long=True)),
    (("batch_norm", 0, None), last(80000, 20), PassConfig(1024, 1, 7, 4, 4, long=True)),
    (("batch_norm", 0, "silu"), last(80000, 20), PassConfig(1024, 1, 7, 4, 4, long=True)),
    (("batch_norm", 0, None), last(40000, 25, dtype=FP32), PassConfig(512, 1, 8, 4, 4, long=True)),
    (("instance_norm", 0, None), last(3, 203, 256, 256), PassConfig(2048, 1, 94, 8, 4, long=True)),
    (("instance_norm", 0, None), last(3, 203, 300, 300), PassConfig(2048, 1, 128, 8, 4, long=True)),
    (("batch_norm", 0, None), last(9, 75, 80, 80, dtype=FP32), PassConfig(1024, 1, 19, 8, 4, long=True)),
    (("group_norm", 3, None), last(53, 6, 256, 256, dtype=FP16), PassConfig(1024, 1, 33, 4, 4, long=True)),
    (("instance_norm", 0, "gelu_tanh"), last(105, 30, 133, 133), PassConfig(1024, 1, 111, 4, 4, long=True)),
    (("instance_norm", 0, "silu"), last(31, 6, 29739, 1), PassConfig(1024, 1, 11, 4, 4, long=True)),
    (("group_norm", 5, None), last(24, 65, 157, 111), PassConfig(2048, 1, 67, 8, 4, long=True)),
    (("batch_norm", 0, "silu"), last(122, 90, 231, 1, dtype=FP16), PassConfig(1024, 1, 9, 4, 4, long=True)),
    (("group_norm", 1, "gelu"), last(13, 2, 32, 3192), PassConfig(1024, 1, 10, 4, 4, long=True)),
    (("instance_norm", 0, None), last(16, 64, 64, 64, dtype=FP32), PassConfig(1024, 1, 16, 8, 4, long=True)),
    (("batch_norm", 0, None), last(39, 96, 112, 112), PassConfig(2048, 1, 89, 8, 4, long=True)),
    # Tiles were faster.
    (("batch_norm", 0, None), last(1, 3, 341, 342), PassConfig(4, 256, 1, 2)),
    (("batch_norm", 0, None), last(40000, 10, dtype=FP16), PassConfig(16, 64, 1, 1)),
    (("batch_norm", 0, None), last(40000, 25, dtype=FP16), PassConfig(32, 128, 1, 4)),
    (("instance_norm", 0, None), last(12, 203, 64, 64), PassConfig(64, 8, 16, 1, 3)),
    (("batch_norm", 0, "silu"), last(4, 128, 327, 329), PassConfig(64, 16, 51, 2, 3)),
    (("instance_norm", 0, "silu"), last(4, 348, 268, 269), PassConfig(64, 8, 128, 1, 3)),
]


@pytest.mark.parametrize(("called", "x", "reduction"), MEASURED)
def test_the_rows_that_were_measured(
    called: tuple[Family, int, str | None], x: torch.Tensor, reduction: PassConfig
) -> None:
    assert passes_for(backward_of(*called, x)).reduction == reduction


# What each rule says just before it ends, and behind that: lanes, positions at once, warps and stages of long rows, or
# None.
ENDS = [
    # A smooth activation's from 256 KB on, others' from 2 MB, or 4 MB of more than 64 channels, or 24 MB of 128.
    ("silu", last(21846, 6), (1024, 2, 4, 1)),
    ("silu", last(21845, 6), None),
    (None, last(65536, 16), (1024, 1, 4, 4)),
    (None, last(65535, 16), None),
    (None, last(16384, 64), (1024, 1, 4, 4)),
    (None, last(16383, 64), None),
    (None, last(29960, 70), (1024, 1, 4, 4)),
    (None, last(29959, 70), None),
    (None, last(32767, 70, dtype=FP32), (512, 1, 4, 4)),
    (None, last(89878, 140), (2048, 1, 8, 4)),
    (None, last(89877, 140), None),
    ("silu", last(89877, 140), None),
    # 64 divides more than 64 channels, and more than 256.
    ("silu", last(200000, 192), None),
    ("silu", last(200000, 252), (2048, 1, 8, 4)),
    ("silu", last(200000, 260), None),
    # Rows are short where the input is small, or has few channels.
    (None, last(131072, 36), (1024, 1, 4, 4)),
    (None, last(131073, 36), (2048, 1, 8, 4)),
    (None, last(117964, 40), (1024, 1, 4, 4)),
    (None, last(117965, 40), (2048, 1, 8, 4)),
    ("silu", last(91751, 40), (2048, 1, 8, 4)),
    ("silu", last(91750, 40), (1024, 1, 4, 4)),
    ("silu", last(58983, 40, dtype=FP32), (1024, 1, 8, 4)),
    ("silu", last(58982, 40, dtype=FP32), (512, 1, 4, 4)),
    (None, last(1000000, 32), (1024, 1, 4, 4)),
    (None, last(1000000, 33), (2048, 1, 8, 4)),
    # Two rows at once where they are few.
    ("silu", last(660 * 64, 16), (1024, 2, 4, 1)),
    ("silu", last(660 * 64 + 1, 16), (1024, 1, 4, 4)),
    # The other row where one is not full, and tiles where neither is.
    ("gelu", last(40000, 67), (2048, 1, 8, 4)),
    (None, last(65536, 87), None),
    (None, last(200000, 131), None),
    # Samples of few rows, and those that do not begin at 16 bytes, gaps between positions, and numbers of 64 bits.
    ("silu", last(200, 48, 13, 13), (1024, 1, 4, 4)),
    ("silu", last(200, 48, 7, 7), None),
    ("silu", torch.empty_strided((8, 20, 100, 100), (200008, 1, 2000, 20), dtype=BF16, device="meta"), (1024, 1, 4, 4)),
    ("silu", torch.empty_strided((8, 20, 100, 100), (200004, 1, 2000, 20), dtype=BF16, device="meta"), None),
    ("silu", last(40000, 48)[:, :40], None),
    ("silu", last(40000, 40, dtype=FP64), None),
    ("silu", torch.empty(4, 40, 100, 100, dtype=BF16, device="meta"), None),
]


@pytest.mark.parametrize(("activation", "x", "expected"), ENDS)
def test_where_long_rows_end(
    activation: str | None, x: torch.Tensor, expected: tuple[int, int, int, int] | None
) -> None:
    family: Family = "instance_norm" if x.ndim == 4 else "batch_norm"
    one = passes_for(backward_of(family, 0, activation, x)).reduction
    assert ((one.channels, one.positions, one.warps, one.stages) if one.long else None) == expected


def test_a_post_add_with_gaps_leaves_no_long_rows() -> None:
    """Rows of its pass hold one position each."""
    x, apart = (
        last(4, 40, 100, 100),
        torch.empty(4, 100, 100, 48, dtype=BF16, device="meta")[..., :40].permute(0, 3, 1, 2),
    )
    norm, saved = norm_of("instance_norm", 0, activation=resolve("relu")), torch.empty(4, 40, device="meta")
    for post_add, long in ((x, True), (apart, False)):
        problem = sum_backward_problem(norm, BackwardOperands(x, x, saved, saved), "backward", post_add, False)
        assert passes_for(tiled(problem)).reduction.long == long


def test_the_programs_of_a_large_input_sum_no_more_rows_than_rounding_allows() -> None:
    reduction = passes_for(backward_of("batch_norm", 0, None, last(64, 48, 1024, 1024))).reduction
    assert reduction.long
    assert reduction.tiles <= MOST_ROWS


def test_the_fullest_multiprocessor_has_few_rows() -> None:
    """Of 229 samples of 17 rows a program to each would leave some multiprocessors with one, and others with two."""
    reduction = passes_for(backward_of("group_norm", 1, "silu", last(229, 16, 33, 33))).reduction
    assert reduction == PassConfig(1024, 1, 6, 4, 4, long=True)


def test_an_input_without_elements_has_none() -> None:
    for x in (last(0, 40), last(4, 0, 9, 9)):
        problem = backward_of("batch_norm", 0, "silu", x)
        assert not any(one.long for one in (passes_for(problem).reduction, *read_by_long_rows(problem)))


@pytest.mark.parametrize("channels", [33, 640])
def test_tuning_tries_tiles_and_long_rows(channels: int) -> None:
    problem = backward_of("group_norm", 1, None, last(4, channels, 221, 222))
    default = passes_for(problem)
    listed = passes(problem, default, other_reads(problem, default))
    assert {one.reduction.long for one in listed} == {True, False}
    assert not any(one.output.long for one in listed)
    assert listed[0] == default


CODE = """
import json

import torch
from fusednorm.backends.triton import runs
from fusednorm.backends.triton.config.kinds import PassConfig, TilesConfig
from fusednorm.backends.triton.instances import TILES
from fusednorm.bench.workloads import Workload
from test_configs import wrong

runs.REPEATED, runs.REPEATED_GROUPS = (0, 0), 0  # small inputs have rows of several positions too
found, count, ways = [], 0, []
for lanes, positions, tiles, stages, family, shape, groups, dtype, activation, modulated in DRAWN:
    workload = Workload(family, shape, groups, dtype, "nhwc", activation, modulated)
    config = TilesConfig(PassConfig(lanes, positions, tiles, 1, stages, long=LONG), PassConfig(16, 8, 2, 1))
    plans = []

    def configs(problem):
        plans.append(TILES.plan(problem, config))
        return [config]

    tried, faults = wrong(TILES, workload, "backward", configs)
    count += tried
    found += faults
    constants = plans[0].reduce.constants
    ways.append([constants["REPEAT"], constants["ACROSS"], constants["FOLD"]])
print(json.dumps([count, found, ways]))
"""


LONG = [
    (64, 1, 3, 3, "group_norm", (2, 12, 9, 13), 3, "float16", "silu", True),
    (64, 2, 2, 1, "group_norm", (3, 5, 7, 9), 1, "float32", "gelu", False),
    (32, 1, 2, 3, "instance_norm", (3, 3, 7, 9), 0, "float16", None, False),
    (128, 4, 1, 1, "batch_norm", (5, 7, 6, 5), 0, "float16", "relu", False),
    (128, 1, 4, 2, "batch_norm", (2, 20, 9, 8), 0, "float32", None, True),
    (64, 1, 2, 2, "instance_norm", (2, 33, 5, 5), 0, "float32", "silu", False),
    (16, 1, 2, 2, "group_norm", (2, 40, 5, 5), 5, "float32", None, False),
    (64, 2, 2, 2, "batch_norm", (333, 1), 0, "float32", "silu", False),
    (64, 1, 2, 2, "batch_norm", (333, 2), 0, "float16", "silu", False),
]
#: Samples of few rows, of several positions and of one, all of them in one program or in several.
FEW = [
    (128, 4, 2, 3, "group_norm", (3, 35, 8, 9), 5, "float16", "silu", True),
    (128, 4, 3, 3, "instance_norm", (4, 27, 9, 9), 0, "float16", None, False),
    (128, 4, 3, 3, "batch_norm", (3, 33, 9, 9), 0, "float16", "relu", True),
    (128, 4, 7, 3, "batch_norm", (3, 144, 3, 9), 0, "float16", "gelu", True),
    (64, 8, 1, 1, "group_norm", (3, 99, 3, 3), 1, "float32", "gelu", False),
]


# The positions of a row, whether rows are those of the whole tensor, and whether their sums are one channel's.
WAYS = [
    *([positions, True, True] for positions in (4, 12, 8, 16)),
    [6, False, True],
    *([1, False, False] for _ in range(2)),
    *([positions, True, True] for positions in (64, 32)),
]


def of_drawn(drawn: list[Any], long: bool) -> Any:
    return interpreted(f"DRAWN, LONG = {drawn!r}, {long}\n{CODE}")


def test_long_rows_are_right() -> None:
    """Rows within a sample and across samples, full and not, at once and in steps, and rows of one position."""
    count, found, ways = of_drawn(LONG, True)
    assert found == []
    assert count == len(ways)
    assert ways == WAYS


def test_few_rows_are_right() -> None:
    """Rows within a sample and across samples, whole and not."""
    count, found, ways = of_drawn(FEW, False)
    assert found == []
    assert count == len(FEW)
    assert ways == [[8, False, False], [8, True, False], [8, True, False], [1, False, False], [1, False, False]]
