"""The backward of short rows: how many rows, warps, programs and steps in flight."""

from __future__ import annotations

import pytest
import torch
from triton_config_support import problems_of

from fusednorm.activations import resolve
from fusednorm.backends.triton.config.rows import holding_rows_pays, rows_backward_for
from fusednorm.backends.triton.config.units import held_units
from fusednorm.norm import Family, norm_of
from fusednorm.operands import BackwardOperands
from fusednorm.problems import backward_problem


def _configuration(
    family: Family, activation: str | None, shape: tuple[int, int], dtype: torch.dtype
) -> tuple[int, int, int, int]:
    x = torch.empty(shape, dtype=dtype, device="meta")
    norm = norm_of(family, 1, activation=resolve(activation))
    config = rows_backward_for(backward_problem(norm, BackwardOperands(x, x, x, x)))
    return config.rows, config.warps, config.programs, config.stages


@pytest.mark.parametrize(
    ("family", "activation", "shape", "dtype", "expected"),
    [
        ("layer_norm", None, (4690, 128), torch.bfloat16, (8, 1, 1056, 1)),
        ("rms_norm", "silu", (1565, 128), torch.bfloat16, (4, 1, 1056, 1)),
        ("rms_norm", "silu", (4690, 128), torch.bfloat16, (8, 1, 1056, 1)),
        ("layer_norm", None, (14065, 64), torch.float32, (16, 1, 1056, 1)),
        ("rms_norm", "relu", (11309, 30), torch.float32, (32, 1, 1056, 1)),
        ("rms_norm", "relu", (6961, 112), torch.float32, (8, 1, 1056, 1)),
        ("layer_norm", None, (1585, 192), torch.bfloat16, (4, 1, 1056, 1)),
        ("layer_norm", None, (18753, 32), torch.bfloat16, (32, 1, 1056, 1)),
        ("layer_norm", None, (9375, 57), torch.bfloat16, (16, 1, 1056, 1)),
        ("layer_norm", None, (9375, 58), torch.bfloat16, (16, 2, 1056, 1)),
        ("layer_norm", None, (3906, 57), torch.bfloat16, (8, 1, 1056, 1)),
        ("layer_norm", None, (2343, 251), torch.bfloat16, (4, 2, 1056, 1)),
        ("layer_norm", None, (4687, 121), torch.bfloat16, (8, 1, 1056, 1)),
        ("rms_norm", "silu", (4687, 121), torch.bfloat16, (8, 2, 1056, 1)),
        ("rms_norm", "silu", (9375, 57), torch.float32, (16, 2, 1056, 1)),
        ("layer_norm", None, (4687, 121), torch.float32, (8, 1, 1056, 1)),
        ("layer_norm", None, (976, 201), torch.float32, (4, 2, 1056, 1)),
        ("rms_norm", "silu", (976, 250), torch.bfloat16, (2, 1, 1056, 1)),
        ("layer_norm", None, (117187, 250), torch.bfloat16, (1, 1, 4224, 1)),
        ("layer_norm", None, (15625, 251), torch.bfloat16, (2, 1, 2929, 4)),
        ("layer_norm", None, (234375, 121), torch.bfloat16, (2, 1, 4224, 1)),
        ("layer_norm", None, (36293, 62), torch.float32, (32, 4, 528, 1)),
        ("rms_norm", "silu", (36293, 62), torch.float32, (16, 4, 528, 1)),
        ("layer_norm", None, (78128, 32), torch.float32, (16, 2, 528, 4)),
        ("layer_norm", None, (312503, 16), torch.float32, (32, 1, 2112, 4)),
        ("layer_norm", None, (201615, 124), torch.float32, (2, 1, 1056, 4)),
        ("layer_norm", "silu", (127121, 118), torch.float32, (2, 1, 2112, 3)),
        ("layer_norm", None, (39065, 64), torch.float32, (4, 1, 1056, 4)),
        ("layer_norm", "silu", (156253, 96), torch.float32, (2, 1, 2112, 3)),
        ("layer_norm", None, (26044, 96), torch.float32, (2, 1, 1056, 4)),
        ("rms_norm", None, (66967, 224), torch.float32, (2, 1, 1056, 3)),
        ("layer_norm", None, (66967, 192), torch.float32, (1, 1, 2112, 3)),
        ("layer_norm", None, (9768, 256), torch.float32, (2, 1, 528, 4)),
        ("rms_norm", "silu", (9768, 256), torch.float32, (1, 1, 1056, 4)),
        ("rms_norm", None, (5259, 160), torch.float16, (2, 1, 1056, 3)),
        ("rms_norm", None, (50000, 192), torch.bfloat16, (2, 1, 1584, 4)),
        ("layer_norm", None, (19534, 128), torch.bfloat16, (2, 1, 1056, 4)),
        ("layer_norm", None, (390628, 128), torch.bfloat16, (2, 1, 2112, 4)),
        ("layer_norm", None, (39065, 128), torch.bfloat16, (2, 1, 1056, 4)),
        ("layer_norm", "silu", (56253, 80), torch.bfloat16, (2, 1, 2112, 4)),
        ("layer_norm", None, (104169, 24), torch.bfloat16, (8, 1, 1056, 4)),
        ("layer_norm", None, (18336, 60), torch.bfloat16, (4, 1, 1056, 3)),
        ("layer_norm", None, (41669, 60), torch.bfloat16, (4, 1, 2112, 3)),
        ("layer_norm", None, (20164, 124), torch.bfloat16, (2, 1, 1056, 3)),
        ("rms_norm", "silu", (9923, 252), torch.bfloat16, (1, 1, 1056, 4)),
        ("layer_norm", "silu", (117190, 256), torch.bfloat16, (1, 1, 2112, 4)),
        ("layer_norm", None, (17860, 252), torch.bfloat16, (1, 1, 2112, 4)),
        ("layer_norm", None, (500003, 28), torch.bfloat16, (32, 4, 528, 4)),
        # Beside these, where the rules that they gave end.
        ("layer_norm", None, (8448, 128), torch.bfloat16, (8, 1, 1056, 1)),
        ("layer_norm", None, (8449, 128), torch.bfloat16, (2, 1, 1056, 4)),
        ("rms_norm", "silu", (4224, 128), torch.bfloat16, (4, 1, 1056, 1)),
        ("rms_norm", "silu", (4225, 128), torch.bfloat16, (8, 1, 1056, 1)),
        ("layer_norm", None, (1536, 128), torch.bfloat16, (8, 1, 1056, 1)),
        ("layer_norm", None, (1535, 128), torch.bfloat16, (8, 2, 264, 3)),
        ("layer_norm", None, (30000, 13), torch.float16, (32, 1, 4224, 1)),
        ("layer_norm", None, (60000, 8), torch.float16, (64, 1, 2112, 3)),
        ("layer_norm", None, (4000000, 16), torch.float32, (32, 1, 2112, 4)),
        ("layer_norm", None, (20000, 60), torch.bfloat16, (4, 1, 1056, 3)),
        ("layer_norm", None, (117187, 160), torch.bfloat16, (1, 1, 2112, 4)),
        ("layer_norm", None, (117187, 157), torch.bfloat16, (2, 1, 4224, 1)),
        ("rms_norm", None, (15000, 192), torch.float32, (1, 1, 1056, 4)),
    ],
)
def test_the_configurations_of_short_rows(
    family: Family,
    activation: str | None,
    shape: tuple[int, int],
    dtype: torch.dtype,
    expected: tuple[int, int, int, int],
) -> None:
    assert _configuration(family, activation, shape, dtype) == expected


@pytest.mark.parametrize(("rows", "held"), [(767, True), (768, False), (1000, False)])
def test_some_short_rows_leave_sums_of_all_their_rows(rows: int, held: bool) -> None:
    problem = problems_of("rms_norm", 1, (rows, 250))[1]
    seen = held_units(problem)
    assert seen is not None
    assert holding_rows_pays(problem, seen) == held
