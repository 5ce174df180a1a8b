"""hopper.rows and hopper.row_parts on a GPU: numerics against fp64, every configuration, strides, containment, the same
bits, and blocks that wait for one another."""

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
from fusednorm.backends.hopper.instances import ROW_PARTS, ROWS, processors, unavailable
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
#: The same in parts, and rows that begin anywhere in a vector: ends before the first whole vector, behind the last one,
#: both, and none; teams without a row, parts without a vector, and rows of nearly nothing but ends.
PARTS = [
    (264, 4096), (9, 16392), (1, 65536), (70, 40000), (1, 20001), (7, 16387), (31, 50002), (530, 5003), (40, 10050),
    (17, 100007), (300, 17), (2, 33), (3000, 1029),
]  # fmt: skip


def drawn(*shape: int, dtype: torch.dtype = torch.float32, offset: float = 0.0) -> Tensor:
    return (torch.randn(shape, device="cuda", dtype=torch.float64) + offset).to(dtype)


def operands(family: str, shape: tuple[int, int], dtype: torch.dtype, offset: float = 0.0) -> dict[str, Tensor]:
    names = ["weight"] if family == "rms_norm" else ["weight", "bias"]
    given = {"input": drawn(*shape, dtype=dtype, offset=offset), "grad_output": drawn(*shape, dtype=dtype)}
    return given | {name: drawn(shape[1]) for name in names}


def results(
    family: Any, given: dict[str, Tensor], activation: str | None = None, config: Any = None, instance: Any = ROWS
) -> dict[str, Tensor]:
    """The reference's output, and the gradients of an instance."""
    norm, x = norm_of(family, 1, eps=EPS, activation=resolve(activation)), given["input"]
    parameters = given.get("weight"), given.get("bias")
    forward = Operands(x, *parameters)
    found = dispatch.make_plan(forward_problem(norm, forward), "reference")(forward)
    backward = BackwardOperands(given["grad_output"], x, found.mean, found.rstd, *parameters)
    gradients = instance.plan(backward_problem(norm, backward, "backward"), config)(backward, ALL)
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("shape", PARTS, ids=str)
def test_gradients_in_parts_are_right(shape: tuple[int, int], family: str, dtype: torch.dtype) -> None:
    for activation, offset in ((None, 0.0), ("silu", 0.0), (None, 1000.0)):
        given = operands(family, shape, dtype, offset)
        found = results(family, given, activation, instance=ROW_PARTS)
        assert faults(family, given, found, activation) == [], (activation, offset)


@pytest.mark.parametrize(
    ("instance", "size"), [(ROWS, 1000), (ROW_PARTS, 1001)], ids=lambda each: getattr(each, "name", "")
)
@pytest.mark.parametrize("activation", [name for name in FORMULAS if name != "silu"])
def test_activations(activation: str, instance: Any, size: int) -> None:
    for dtype in DTYPES:
        given = operands("layer_norm", (140, size), dtype)
        found = results("layer_norm", given, activation, instance=instance)
        assert faults("layer_norm", given, found, activation) == [], dtype


@pytest.mark.parametrize(
    ("instance", "shape"),
    [(ROWS, (500, 6168)), (ROWS, (7, 8)), (ROWS, (270, 8192)), (ROW_PARTS, (500, 6171)), (ROW_PARTS, (7, 40000))],
    ids=str,
)
def test_every_configuration_gives_the_result_of_the_first(instance: Any, shape: tuple[int, int]) -> None:
    """Up to a rounding: configurations add in different orders."""
    given = operands("layer_norm", shape, torch.float32, 3.0)
    norm, x = norm_of("layer_norm", 1, eps=EPS), given["input"]
    like = x.mean(1, keepdim=True)
    problem = backward_problem(norm, BackwardOperands(x, x, like, like, given["weight"], given["bias"]), "backward")
    expected = results("layer_norm", given, instance=instance)
    assert len(instance.configs(problem)) > 1
    for config in instance.configs(problem):
        for name, found in results("layer_norm", given, config=config, instance=instance).items():
            torch.testing.assert_close(found, expected[name], rtol=1e-4, atol=1e-4)


def test_the_instances_get_long_rows_by_themselves() -> None:
    x = drawn(16 * processors(), 12288, dtype=torch.bfloat16)
    for family in (fusednorm.layer_norm, fusednorm.rms_norm):
        assert fusednorm.explain(family, x, (12288,), direction="backward").instance == "hopper.rows"
    assert fusednorm.explain(fusednorm.layer_norm, x[:, :8192], (8192,), direction="backward").instance == "triton.rows"
    odd = drawn(1000, 12289, dtype=torch.bfloat16)
    assert fusednorm.explain(fusednorm.layer_norm, odd, (12289,), direction="backward").instance == "hopper.row_parts"


def test_parts_of_larger_tensors_and_an_input_between_16_bytes() -> None:
    block = drawn(300, 4800, dtype=torch.bfloat16)
    for part in (block[:, 8:2056], block[::2, :4096]):
        given = operands("layer_norm", (part.shape[0], part.shape[1]), torch.bfloat16) | {"input": part.contiguous()}
        shifted = torch.empty(part.numel() + 1, device="cuda", dtype=part.dtype)[1:].view(part.shape).copy_(part)
        for instance in (ROWS, ROW_PARTS):
            expected = results("layer_norm", given, instance=instance)
            for other in (part, shifted):
                for name, found in results("layer_norm", given | {"input": other}, instance=instance).items():
                    torch.testing.assert_close(found, expected[name])


def test_rows_of_a_larger_tensor_that_begin_anywhere_in_a_vector() -> None:
    """Rows of the input lie 8 elements farther apart than those of the gradients."""
    part = drawn(301, 4809, dtype=torch.bfloat16)[:, :4801]
    given = operands("layer_norm", (301, 4801), torch.bfloat16)
    expected = results("layer_norm", given | {"input": part.contiguous()}, instance=ROW_PARTS)
    for name, found in results("layer_norm", given | {"input": part}, instance=ROW_PARTS).items():
        torch.testing.assert_close(found, expected[name])


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("instance", "size"), [(ROWS, 1000), (ROW_PARTS, 1003)], ids=lambda each: getattr(each, "name", "")
)
def test_what_is_not_finite_stays_in_its_row(value: float, instance: Any, size: int) -> None:
    given = operands("layer_norm", (300, size), torch.bfloat16)
    expected = results("layer_norm", given, instance=instance)["grad_input"]
    for place in (77, 0, size - 1):
        given["input"][140] = 1.0
        given["input"][140, place] = value
        found = results("layer_norm", given, instance=instance)["grad_input"]
        assert found[140].isnan().all()
        found[140] = expected[140]
        assert torch.equal(found, expected)


@pytest.mark.parametrize(("instance", "shape"), [(ROWS, (2000, 12288)), (ROW_PARTS, (700, 30001))], ids=str)
def test_the_same_bits_each_time(instance: Any, shape: tuple[int, int]) -> None:
    given = operands("layer_norm", shape, torch.bfloat16)
    expected = results("layer_norm", given, "silu", instance=instance)
    for _ in range(20):
        found = results("layer_norm", given, "silu", instance=instance)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
