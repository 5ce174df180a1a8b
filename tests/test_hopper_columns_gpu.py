"""hopper.columns on a GPU: numerics against fp64, every configuration, strides, containment, the same bits."""

from __future__ import annotations

import math

import pytest
import torch
from drawn_formulas import Spec
from drawn_judge import Judge
from torch import Tensor

import fusednorm
from fusednorm.activations import FORMULAS
from fusednorm.backends.hopper.instances import COLUMNS, unavailable
from fusednorm.norm import norm_of
from fusednorm.operands import BackwardOperands, Operands
from fusednorm.problems import backward_problem, forward_problem

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(unavailable() is not None, reason=f"no Hopper GPU: {unavailable()}"),
]
NAME, EPS = "hopper.columns", 1e-5
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: Whole steps and blocks, uneven ones, one vector, one channel, many channels, several dimensions.
SHAPES = [(2, 320, 16, 32), (3, 100, 9, 8), (5, 33, 8), (2, 1, 24), (2, 1500, 40), (1, 96, 3, 4, 26), (7, 256, 104)]


def drawn(*shape: int, dtype: torch.dtype = torch.float32, offset: float = 0.0) -> Tensor:
    return (torch.randn(shape, device="cuda", dtype=torch.float64) + offset).to(dtype)


def operands(
    family: str, shape: tuple[int, ...], dtype: torch.dtype, offset: float, modulated: bool
) -> dict[str, Tensor]:
    names = ["weight"] if family == "rms_norm" else ["weight", "bias"]
    given = {"input": drawn(*shape, dtype=dtype, offset=offset), "grad_output": drawn(*shape, dtype=dtype)}
    given |= {name: drawn(shape[1]) for name in names}
    return given | ({name: drawn(*shape[:2]) for name in ("scale", "shift")} if modulated else {})


def results(family: str, given: dict[str, Tensor], activation: str | None) -> dict[str, Tensor]:
    """The output and all gradients, of this instance alone."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in given.items() if name != "grad_output"}
    x, grad_output = leaves["input"], given["grad_output"]
    keywords = {name: leaves[name] for name in leaves if name != "input"}
    call = getattr(fusednorm, family)
    with fusednorm.use_instance(NAME):
        y = call(x, (x.shape[1],), eps=EPS, activation=activation, channel_dim=1, **keywords)
        found = torch.autograd.grad(y, list(leaves.values()), grad_output)
    return {"output": y.detach()} | {f"grad_{name}": one for name, one in zip(leaves, found, strict=True)}


def faults(family: str, given: dict[str, Tensor], found: dict[str, Tensor], activation: str | None) -> list[str]:
    x = given["input"]
    parameter = FORMULAS[activation].default if activation else 0.0
    spec = Spec(family, tuple(x.shape), 0, 1, True, EPS, activation, parameter or 0.0)
    return [
        f"{fault.name}: {fault.text}" for fault in Judge(spec, given, x.dtype, None).faults(found) if not fault.soft
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_are_right(shape: tuple[int, ...], family: str, dtype: torch.dtype) -> None:
    for activation, offset, modulated in ((None, 0.0, False), ("silu", 0.0, True), (None, 1000.0, False)):
        given = operands(family, shape, dtype, offset, modulated)
        assert faults(family, given, results(family, given, activation), activation) == [], (activation, offset)


@pytest.mark.parametrize("activation", [name for name in FORMULAS if name != "silu"])
def test_activations(activation: str) -> None:
    for dtype in DTYPES:
        given = operands("layer_norm", (2, 70, 40), dtype, 0.0, False)
        assert faults("layer_norm", given, results("layer_norm", given, activation), activation) == [], dtype


@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_every_configuration_gives_the_result_of_the_first(shape: tuple[int, ...]) -> None:
    """Up to a rounding of the statistics: configurations add in different orders."""
    given = operands("layer_norm", shape, torch.float32, 3.0, False)
    x, dy, weight, bias = (given[name] for name in ("input", "grad_output", "weight", "bias"))
    norm, forward = norm_of("layer_norm", 0, 1, 1e-5), Operands(x, weight, bias)
    problem = forward_problem(norm, forward)
    expected = COLUMNS.plan(problem)(forward)
    assert len(COLUMNS.configs(problem)) > 20
    for config in COLUMNS.configs(problem):
        found = COLUMNS.plan(problem, config)(forward)
        for name in ("output", "mean", "rstd"):
            torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-5, atol=1e-5)
    backward = BackwardOperands(dy, x, expected.mean, expected.rstd, weight, bias)
    problem, wanted = backward_problem(norm, backward), (True, True, True, False, False)
    gradients = COLUMNS.plan(problem)(backward, wanted)
    for config in COLUMNS.configs(problem):
        found = COLUMNS.plan(problem, config)(backward, wanted)
        for name in ("input", "weight", "bias"):
            torch.testing.assert_close(getattr(found, name), getattr(gradients, name), rtol=1e-4, atol=1e-4)


def test_the_instance_gets_norms_over_channels_by_itself() -> None:
    x = drawn(2, 96, 32, 32, dtype=torch.bfloat16)
    for direction in ("forward", "backward"):
        assert fusednorm.explain(fusednorm.layer_norm, x, (96,), channel_dim=1, direction=direction).instance == NAME
    odd = drawn(2, 96, 7, 7, dtype=torch.bfloat16)
    assert fusednorm.explain(fusednorm.layer_norm, odd, (96,), channel_dim=1).instance == "triton.columns"


def test_parts_of_larger_tensors_and_an_input_between_16_bytes() -> None:
    block = drawn(3, 80, 9, 48, dtype=torch.bfloat16)
    for part in (block[:, 8:72], block[:, ::2], block[1:, :, 2:7], block.flatten(2)[..., 8:320]):
        shifted = torch.empty(part.numel() + 1, device="cuda", dtype=part.dtype)[1:].view(part.shape).copy_(part)
        shape = (part.shape[1],)
        with fusednorm.use_instance(NAME):
            expected = fusednorm.layer_norm(part.contiguous(), shape, channel_dim=1)
            assert torch.equal(fusednorm.layer_norm(part, shape, channel_dim=1), expected)
            found = fusednorm.layer_norm(shifted, shape, channel_dim=1)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_its_position(value: float) -> None:
    x = drawn(2, 100, 8, 8, dtype=torch.bfloat16)
    with fusednorm.use_instance(NAME):
        expected = fusednorm.layer_norm(x, (100,), channel_dim=1)
        x[1, 7, 3, 4] = value
        found = fusednorm.layer_norm(x, (100,), channel_dim=1)
    assert found[1, :, 3, 4].isnan().all()
    found[1, :, 3, 4] = expected[1, :, 3, 4]
    assert torch.equal(found, expected)


@pytest.mark.parametrize("number", [1234567.0, -1e30])
def test_of_equal_numbers_nothing_is_left(number: float) -> None:
    """The mean of large numbers is rounded, and the squares of the distances to it would overflow."""
    x = torch.full((2, 63, 40), number, device="cuda")
    with fusednorm.use_instance(NAME):
        assert torch.equal(fusednorm.layer_norm(x, (63,), channel_dim=1), torch.zeros_like(x))


def test_the_same_bits_each_time() -> None:
    given = operands("layer_norm", (8, 192, 64, 64), torch.bfloat16, 0.0, True)
    expected = results("layer_norm", given, "silu")
    for _ in range(20):
        found = results("layer_norm", given, "silu")
        assert all(torch.equal(found[name], expected[name]) for name in expected)
