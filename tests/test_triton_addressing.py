"""The masks of an axis, whatever the compiler is told of its length, and the bounds of rows, alone or of several
positions."""

from __future__ import annotations

import re
from typing import Any

import pytest
from interpreter_support import interpreted

triton = pytest.importorskip("triton")

from triton_support import TARGETS, Case, capabilities, operations, source  # noqa: E402

from fusednorm.backends.triton.instances import HELD, WHOLE  # noqa: E402
from fusednorm.backends.triton.runs import leading_bits  # noqa: E402


def test_a_length_has_its_places() -> None:
    code = """
    import json
    from triton_addressing import wrong_masks
    print(json.dumps(wrong_masks(70)))
    """
    assert interpreted(code) == []


def test_rows_of_several_positions_are_whole_within_a_sample() -> None:
    code = """
    import json
    from triton_addressing import wrong_rows
    small = [wrong_rows(3, positions, 8, span, 6) for positions in range(8, 60, 5) for span in (1, 2, 5)]
    large = wrong_rows(3, (1 << 30) + 1, 8, 1 << 26, 4)  # more than 2**31 elements
    print(json.dumps([*small, large]))
    """
    assert interpreted(code) == [[]] * 34


def test_windows_of_rows_end_with_the_last_row() -> None:
    code = """
    import json
    from triton_addressing import wrong_lanes
    lengths = (9, 9), (21, 21), (21, 24), (24, 24), (24, 27)
    print(json.dumps([wrong_lanes(*row, window) for row in lengths for window in (1, 8)]))
    """
    assert interpreted(code) == [[]] * 10


def test_partials_of_rows_end_with_the_last_row() -> None:
    """Of three rows, which a program with four takes."""
    code = """
    import json
    import torch
    from fusednorm.backends.triton.instances import TILES
    from fusednorm.norm import norm_of
    from fusednorm.operands import Operands
    from fusednorm.problems import forward_problem
    x = torch.randn(3, 40)
    plan = TILES.spread(forward_problem(norm_of("layer_norm", 1), Operands(x)))
    partials = torch.full((2 * plan.total + 5,), 7.0)
    plan.moments(x, partials)
    print(json.dumps([plan.rows.tile["BLOCK_S"], plan.total, partials[2 * plan.total :].tolist()]))
    """
    assert interpreted(code) == [4, 3, [7.0] * 5]


def test_leading_bits_are_those_of_the_last_place() -> None:
    assert [leading_bits(343, 512, bits) for bits in (1, 2, 3)] == [0b1, 0b10, 0b101]
    assert leading_bits(512, 512, 3) == 0b111
    assert leading_bits(257, 512, 3) == 0b100
    assert [leading_bits(length, block, 3) for length, block in ((1, 1), (2, 2), (3, 4), (4, 4))] == [0, 1, 2, 3]


@pytest.mark.parametrize(("instance", "masked"), [(WHOLE, 4), (HELD, 8)])
def test_loads_within_a_length_have_no_mask_and_others_are_none(instance: Any, masked: int) -> None:
    """Of the 32 loads that a thread has for two units of 343 elements in 512 lanes 8 never happen, and of the others
    only those of the eighth, or quarter, in which the length ends depend on it."""
    case = Case("instance_norm", 0, (15, 2048, 343), instance=instance)
    ((made,), *_) = operations(capabilities("sm_90"), [case])
    assert made.launch.options["num_warps"] == 1
    assert made.launch.constants["BLOCK_U"] == 2
    code = triton.compile(source(made), target=TARGETS["sm_90"], options=made.launch.options).asm["ptx"]
    known = dict(re.findall(r"mov\.pred\s+(%p\d+), (-1|0);", code))
    predicates = [known.get(name) for name in re.findall(r"@(%p\d+) ld\.global", code)]
    assert len(predicates) == 32
    assert predicates.count("0") == 8
    assert predicates.count(None) == masked
