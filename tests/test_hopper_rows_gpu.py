"""hopper.rows on a GPU: numerics against fp64, every configuration, strides, containment, the same bits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from test_hopper_columns_gpu import EPS, faults
from torch import Tensor

import fusednorm
from fusednorm import dispatch
from fusednorm.activations import FORMULAS, resolve
from fusednorm.backends.hopper.instances import ROWS, processors, unavailable
from fusednorm.norm import norm_of
from fusednorm.operands import BackwardOperands, Operands
from fusednorm.problems import backward_problem, forward_problem

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(unavailable() is not None, reason=f"no Hopper GPU: {unavailable()}"),
]
ALL = (True, True, True, False, False)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: Whole steps and turns, uneven ones, one vector, one row, fewer rows than blocks, a row to each block and one more.
SHAPES = [(264, 4096), (500, 6168), (7, 8), (1, 2048), (133, 8192), (270, 40)]
LONG = [(270, 16384), (133, 9000)]


def drawn(*shape: int, dtype: torch.dtype = torch.float32, offset: float = 0.0) -> Tensor:
    return (torch.randn(shape, device="cuda", dtype=torch.float64) + offset).to(dtype)


def operands(family: str, shape: tuple[int, int], dtype: torch.dtype, offset: float = 0.0) -> dict[str, Tensor]:
    names = ["weight"] if family == "rms_norm" else ["weight", "bias"]
    given = {"input": drawn(*shape, dtype=dtype, offset=offset), "grad_output": drawn(*shape, dtype=dtype)}
    return given | {name: drawn(shape[1]) for name in names}


def results(
    family: Any, given: dict[str, Tensor], activation: str | None = None, config: Any = None
) -> dict[str, Tensor]:
    """The reference's output, and the gradients of this instance."""
    norm, x = norm_of(family, 1, eps=EPS, activation=resolve(activation)), given["input"]
    parameters = given.get("weight"), given.get("bias")
    forward = Operands(x, *parameters)
    found = dispatch.make_plan(forward_problem(norm, forward), "reference")(forward)
    backward = BackwardOperands(given["grad_output"], x, found.mean, found.rstd, *parameters)
    gradients = ROWS.plan(backward_problem(norm, backward, "backward"), config)(backward, ALL)
    names = [name for name in ("input", "weight", "bias") if name in given]
    return {"output": found.output} | {f"grad_{name}": getattr(gradients, name) for name in names}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("shape", [*SHAPES, *LONG], ids=str)
def test_gradients_are_right(shape: tuple[int, int], family: str, dtype: torch.dtype) -> None:
    if dtype == torch.float32 and shape in LONG:
        pytest.skip("rows of 32 bits do not fit")
    for activation, offset in ((None, 0.0), ("silu", 0.0), (None, 1000.0)):
        given = operands(family, shape, dtype, offset)
        assert faults(family, given, results(family, given, activation), activation) == [], (activation, offset)


@pytest.mark.parametrize("activation", [name for name in FORMULAS if name != "silu"])
def test_activations(activation: str) -> None:
    for dtype in DTYPES:
        given = operands("layer_norm", (140, 1000), dtype)
        assert faults("layer_norm", given, results("layer_norm", given, activation), activation) == [], dtype


@pytest.mark.parametrize("shape", [(500, 6168), (7, 8), (270, 8192)], ids=str)
def test_every_configuration_gives_the_result_of_the_first(shape: tuple[int, int]) -> None:
    """Up to a rounding: configurations add in different orders."""
    given = operands("layer_norm", shape, torch.float32, 3.0)
    norm, x = norm_of("layer_norm", 1, eps=EPS), given["input"]
    like = x.mean(1, keepdim=True)
    problem = backward_problem(norm, BackwardOperands(x, x, like, like, given["weight"], given["bias"]), "backward")
    expected = results("layer_norm", given)
    assert len(ROWS.configs(problem)) > 1
    for config in ROWS.configs(problem):
        for name, found in results("layer_norm", given, config=config).items():
            torch.testing.assert_close(found, expected[name], rtol=1e-4, atol=1e-4)


def test_the_instance_gets_long_rows_by_itself() -> None:
    x = drawn(8 * processors(), 12288, dtype=torch.bfloat16)
    for family in (fusednorm.layer_norm, fusednorm.rms_norm):
        assert fusednorm.explain(family, x, (12288,), direction="backward").instance == "hopper.rows"
    assert fusednorm.explain(fusednorm.layer_norm, x[:, :8192], (8192,), direction="backward").instance == "triton.rows"


def test_parts_of_larger_tensors_and_an_input_between_16_bytes() -> None:
    block = drawn(300, 4800, dtype=torch.bfloat16)
    for part in (block[:, 8:2056], block[::2, :4096]):
        given = operands("layer_norm", (part.shape[0], part.shape[1]), torch.bfloat16) | {"input": part.contiguous()}
        shifted = torch.empty(part.numel() + 1, device="cuda", dtype=part.dtype)[1:].view(part.shape).copy_(part)
        expected = results("layer_norm", given)
        for other in (part, shifted):
            for name, found in results("layer_norm", given | {"input": other}).items():
                torch.testing.assert_close(found, expected[name])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_its_row(value: float) -> None:
    given = operands("layer_norm", (300, 1000), torch.bfloat16)
    expected = results("layer_norm", given)["grad_input"]
    given["input"][140, 77] = value
    found = results("layer_norm", given)["grad_input"]
    assert found[140].isnan().all()
    found[140] = expected[140]
    assert torch.equal(found, expected)


def test_the_same_bits_each_time() -> None:
    given = operands("layer_norm", (2000, 12288), torch.bfloat16)
    expected = results("layer_norm", given, "silu")
    for _ in range(20):
        found = results("layer_norm", given, "silu")
        assert all(torch.equal(found[name], expected[name]) for name in expected)
