"""triton.flat: which evaluations it takes, which of them it gets, and how it divides."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from fusednorm.activations import resolve
from fusednorm.backends.triton import instances
from fusednorm.backends.triton.config.flat import flat_for, most_width
from fusednorm.backends.triton.config.kinds import FlatConfig
from fusednorm.backends.triton.config.tiles import passes_for, tiled
from fusednorm.backends.triton.instances import FLAT, TILES
from fusednorm.backends.triton.plans.flat import divisor
from fusednorm.norm import norm_of
from fusednorm.operands import Operands
from fusednorm.problem import Problem
from fusednorm.problems import forward_problem

BF16, FP32 = torch.bfloat16, torch.float32


def evaluation(
    shape: tuple[int, ...], dtype: torch.dtype = BF16, last: bool = False, modulated: bool = False, **changes: Any
) -> Problem:
    x = torch.empty(shape, dtype=dtype, device="meta")
    x = x.to(memory_format=torch.channels_last) if last else x
    given = torch.empty(shape[1], device="meta")
    scale = torch.empty(shape[:2], device="meta") if modulated else None
    operands = Operands(changes.get("input", x), given, given, scale, scale, given, given)
    activation = resolve(changes.get("activation"))
    return forward_problem(norm_of("batch_norm", training=False, activation=activation), operands)


@pytest.fixture(autouse=True)
def _on_any_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instances, "_common", lambda problem: None)


def test_it_takes_dense_evaluations_alone() -> None:
    assert FLAT.supports(evaluation((4, 6, 5, 5))) is None
    assert FLAT.supports(evaluation((4, 6, 5, 5), last=True)) is None
    assert FLAT.supports(evaluation((4, 6))) is None
    training = forward_problem(norm_of("batch_norm"), Operands(torch.empty(4, 6, 5, 5, device="meta")))
    assert FLAT.supports(training) == "the statistics are not given"
    whole = torch.empty(4, 8, 5, 5, dtype=BF16, device="meta")
    for apart in (whole[:, :6], whole[::2]):
        assert "do not follow one another" in str(FLAT.supports(evaluation(tuple(apart.shape), input=apart)))
    assert FLAT.supports(evaluation((1, 6, 5, 5), input=whole[:1, :6])) is None  # one sample, whatever its stride
    assert "32 bits" in str(FLAT.supports(evaluation((1 << 11, 1 << 10, 1 << 10))))


@pytest.mark.parametrize(
    ("problem", "flat"),
    [
        (evaluation((10, 171, 29, 8), last=True, modulated=True), True),
        (evaluation((64, 77), modulated=True), True),
        (evaluation((2000, 999)), False),
        (evaluation((30000, 500), modulated=True), True),
        (evaluation((17, 2414, 27), FP32, modulated=True), True),
        (evaluation((17, 2414, 81), FP32, modulated=True), False),
        (evaluation((30000, 500)), False),
        (evaluation((65, 118, 112, 112), FP32, last=True), True),
        (evaluation((16, 256, 56, 56)), True),
        (evaluation((32, 512, 28, 28), last=True), False),
        (evaluation((20, 300, 45, 45), FP32), True),
        (evaluation((64, 128, 31, 31), FP32, last=True, modulated=True), False),
        (evaluation((100, 2048, 7, 7)), False),
        (evaluation((65536, 14)), True),
        (evaluation((25103, 79), FP32), False),
        (evaluation((25103, 78), FP32), True),
        (evaluation((65536, 29), FP32, modulated=True), True),
        (evaluation((65536, 29), modulated=True), False),
        (evaluation((25103, 79), FP32, modulated=True), False),
        (evaluation((65536, 29), FP32), False),
        (evaluation((62, 66, 17, 17), last=True), True),
        (evaluation((2306, 537)), False),  # vectors of single elements, each with a channel of its own
        (evaluation((128, 129, 8, 8), last=True), False),
        (evaluation((59, 23, 27, 27)), False),  # and long planes of these
        (evaluation((8, 64, 11, 121)), False),
        (evaluation((16, 64, 11, 11)), True),
        (evaluation((125, 6, 31, 27), FP32), True),
        (evaluation((7, 253, 37, 37), FP32), False),
        (evaluation((3, 229, 56, 56), FP32, last=True), False),
        (evaluation((64, 129, 91, 1), FP32, last=True), True),  # of some size
        (evaluation((12, 301, 15, 15), FP32, last=True, modulated=True), True),
        (evaluation((30, 501, 40, 1), last=True), False),
    ],
)
def test_which_evaluations_go_in_the_order_of_memory(problem: Problem, flat: bool) -> None:
    assert instances.choose(problem) is (FLAT if flat else TILES)


def test_tiles_of_an_evaluation_of_some_size_are_on_four_warps() -> None:
    output = passes_for(tiled(evaluation((4000, 384)))).output
    assert (output.channels, output.positions, output.tiles, output.warps) == (128, 16, 1, 4)


@pytest.mark.parametrize("last", [False, True])
def test_vectors_make_up_the_tensor(last: bool) -> None:
    for shape in ((3, 5, 7, 9), (2, 6, 5, 5), (4, 64, 7, 7), (1, 8, 1, 1), (8, 16, 32, 32)):
        for dtype in (BF16, FP32):
            problem = evaluation(shape, dtype, last)
            config = flat_for(problem)
            assert problem.view.numel % config.width == 0
            assert config.width <= most_width(problem)
            assert config.vectors >= 32 * config.warps


def test_vectors_of_several_channels_are_short() -> None:
    """Each of their elements has a load for each of its numbers."""
    assert flat_for(evaluation((16, 100, 9, 9))).width == 2
    assert flat_for(evaluation((16, 100, 16, 16))).width == 8
    assert flat_for(evaluation((6, 24, 5, 5), FP32, last=True, modulated=True, activation="gelu")).width == 1
    assert flat_for(evaluation((6, 24, 5, 5), FP32, last=True, modulated=True)).width == 2
    assert flat_for(evaluation((20, 500, 35, 1), last=True)) == FlatConfig(128, 4, 4)
    assert flat_for(evaluation((20, 500, 70, 1), last=True)) == FlatConfig(256, 4, 4)
    assert flat_for(evaluation((30000, 500), modulated=True)).width == 4  # which divides the channels
    assert flat_for(evaluation((65, 118, 112, 112), FP32, last=True)).width == 2
    assert flat_for(evaluation((65, 117, 112, 112), FP32, last=True)).width == 4


def test_threads_of_short_vectors_have_several() -> None:
    assert flat_for(evaluation((65536, 5))) == FlatConfig(128, 8, 4)
    assert flat_for(evaluation((40000, 5))) == FlatConfig(256, 2, 8)
    assert flat_for(evaluation((2000, 384))) == FlatConfig(128, 4, 4)
    assert flat_for(evaluation((2000, 128), FP32, modulated=True)) == FlatConfig(128, 2, 4)
    assert flat_for(evaluation((65536, 29), FP32, modulated=True)) == FlatConfig(128, 2, 4)
    assert flat_for(evaluation((65536, 29), FP32)).width == 4
    assert flat_for(evaluation((20000, 29), FP32, modulated=True)).width == 4
    assert flat_for(evaluation((30, 100, 20, 20), last=True, modulated=True)) == FlatConfig(256, 4, 4)
    assert flat_for(evaluation((16, 256, 56, 56))) == FlatConfig(128, 8, 4)
    assert flat_for(evaluation((4, 64, 33, 33), activation="silu")) == FlatConfig(256, 2, 8)
    assert flat_for(evaluation((64, 129, 91, 1), FP32, last=True)) == FlatConfig(256, 2, 4)
    assert flat_for(evaluation((43, 769, 23, 1), FP32, last=True)) == FlatConfig(256, 1, 4)


@pytest.mark.parametrize(("shape", "tiles"), [((40000, 50), 1), ((100, 512, 7, 7), 1), ((64, 256, 56, 56), 2)])
def test_programs_of_large_evaluations_write_two_tiles(shape: tuple[int, ...], tiles: int) -> None:
    assert TILES.configs(evaluation(shape, last=len(shape) == 4))[0].output.tiles == tiles


def test_a_quotient_is_a_product_and_a_shift() -> None:
    random = Random(0)
    for number in (1, 2, 3, 5, 7, 12, 49, 255, 256, 257, 10007, (1 << 20) - 1, (1 << 31) - 1):
        same, factor, shift = divisor(number)
        assert same == number
        assert factor < 1 << 32
        near = [k * number + one for k in (1, 2, 1000) for one in (-1, 0, 1)]
        for value in (*near, 0, (1 << 31) - 1, *(random.randrange(1 << 31) for _ in range(2000))):
            if 0 <= value < 1 << 31:
                assert (2 * value * factor >> 32) >> shift == value // number, (value, number)
