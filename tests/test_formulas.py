"""Formulas in the place of calls in compiled graphs on a CPU: what they compute, and when they are chosen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_compile import case, same_gradients
from test_compiled import codes_of
from torch import Tensor
from torch._functorch import config as functorch
from torch._inductor import config

import fusednorm
from fusednorm import nn
from fusednorm.backends import reference
from fusednorm.choice import use_instance
from fusednorm.inductor import formula
from fusednorm.inductor.neighbours import CALLED_BYTES, calls_pay
from fusednorm.norm import FAMILIES, Norm, norm_of
from fusednorm.operands import BackwardOperands, Operands
from fusednorm.problems import backward_problem, forward_problem
from fusednorm.tolerance import judge, offset_of


@pytest.fixture
def fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CI", "1")  # where Inductor refuses what it lets pass elsewhere
    torch.manual_seed(0)
    torch.compiler.reset()
    with config.patch(fx_graph_cache=False), functorch.patch(enable_autograd_cache=False):
        yield
    torch.compiler.reset()


compiles = pytest.mark.usefixtures("fresh_compiler")

# --- what is computed ---

NORMS = [
    norm_of(family, groups, channel_dim, 1e-5, activation, training)
    for family, groups in (
        ("group_norm", 4),
        ("instance_norm", 0),
        ("batch_norm", 0),
        ("layer_norm", 2),
        ("rms_norm", 1),
    )
    for channel_dim in (1, -1)
    for activation in (None, "silu")
    for training in (True, False)
    if (training or family == "batch_norm") and (channel_dim == 1 or groups in (0, 4))
]


def drawn(norm: Norm, mean: float) -> tuple[Operands, Tensor]:
    """Operands of a norm, and a gradient."""
    torch.manual_seed(0)
    x = torch.randn(3, 8, 5, 8) + mean
    size = x.shape[-norm.num_dims :] if norm.row_family else (8,)
    given = (None, None) if norm.training else (torch.randn(8), torch.rand(8) + 0.5)
    return Operands(x, torch.randn(size), torch.randn(size), None, None, *given), torch.randn_like(x)


def wide(operands: Operands) -> Operands:
    return Operands(*(None if tensor is None else tensor.double() for tensor in operands.tensors()))


@pytest.mark.parametrize("mean", [0.0, 1000.0])
@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: norm.text)
def test_a_formula_keeps_the_rule_of_tolerance(norm: Norm, mean: float) -> None:
    operands, dy = drawn(norm, mean)
    got, plain = formula.forward(norm, operands), reference.forward(norm, operands)
    expected = reference.forward(norm, wide(operands), compute_dtype=torch.float64)
    offset = offset_of(expected.mean, expected.rstd)
    for name in ("output", "rstd", "var"):
        tensor = getattr(got, name)
        if tensor is not None:
            verdict = judge(tensor, getattr(expected, name), getattr(plain, name), offset=offset, terms=120)
            assert verdict.ok, f"{name}: {verdict.fault}"
    saved = BackwardOperands(dy, operands.input, plain.mean, plain.rstd, operands.weight, operands.bias, None, None)
    doubled = BackwardOperands(*(None if one is None else one.double() for one in saved.tensors()))
    gradients, plainly = formula.backward(norm, saved), reference.backward(norm, saved)
    exact = reference.backward(norm, doubled, compute_dtype=torch.float64)
    for name in ("input", "weight", "bias"):
        parts = (getattr(found, name) for found in (gradients, exact, plainly))
        verdict = judge(*parts, offset=offset, terms=120)
        assert verdict.ok, f"{name}: {verdict.fault}"


# --- what is chosen ---


def test_small_tensors_are_formulas() -> None:
    def pays(family: Any, *shape: int) -> bool:
        norm = norm_of(family, {"group_norm": 4, "layer_norm": 1, "rms_norm": 1}.get(family, 0))
        x = torch.empty(shape)
        forward = forward_problem(norm, Operands(x, None, None, None, None, None, None))
        mean = torch.empty(forward.statistics_shape)
        backward = backward_problem(norm, BackwardOperands(x, x, mean, mean, None, None, None, None))
        assert calls_pay(forward) == calls_pay(backward)
        return calls_pay(forward)

    positions = CALLED_BYTES // (4 * 8)
    for family in FAMILIES:
        assert not pays(family, 1, 8, positions - 1)
        assert pays(family, 1, 8, positions)


@compiles
@pytest.mark.parametrize("family", FAMILIES)
def test_a_small_norm_is_no_call(family: str) -> None:
    call, tensors = case(family)
    for code in codes_of(call, *tensors)[1]:
        assert "fusednorm.compiled" not in code
        assert "norm_forward(" not in code
        assert "norm_backward(" not in code


@compiles
def test_gradients_of_rows_behind_which_the_output_is_transposed() -> None:
    """torch 2.13 vectorizes such loops over rows, and keeps the derivative of the activation for one of them."""

    def call(x: Tensor) -> Tensor:
        return fusednorm.rms_norm(x, (40,), activation="silu").t().contiguous() * 2

    x = torch.randn(24, 40, requires_grad=True)
    same_gradients(torch.compile(call, fullgraph=True), call, [x])
    with torch.no_grad():
        (code,) = codes_of(call, x)[1]
    assert "fusednorm.compiled" not in code, "without a backward the formula is right, and faster"


@compiles
def test_a_large_norm_is_a_call() -> None:
    call = lambda x: fusednorm.group_norm(x, 4)  # noqa: E731
    x = torch.randn(2, 8, 32, CALLED_BYTES // (2 * 8 * 32 * 4), requires_grad=True)
    forward, backward = codes_of(call, x)[1]
    assert forward.count("fusednorm.compiled.call_forward(") == 1
    assert backward.count("fusednorm.compiled.call_backward(") == 1


@compiles
def test_a_large_norm_of_what_is_computed_for_it_alone_is_no_call_without_a_backward() -> None:
    """A residual stream has another reader, so it is in memory anyway; groups of channels_last are calls throughout."""
    x = torch.randn(2, 64, 32, CALLED_BYTES // (2 * 64 * 32 * 4))

    def kept(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x * 2
        return fusednorm.group_norm(x, 4), x

    def calls(function: Any, *tensors: Tensor) -> list[int]:
        return [code.count("fusednorm.compiled.call_") for code in codes_of(function, *tensors)[1]]

    computed = lambda x: fusednorm.group_norm(x * 2, 4)  # noqa: E731
    assert calls(computed, x) == [0]
    assert calls(kept, x) == [1]
    assert calls(computed, x.to(memory_format=torch.channels_last)) == [1]
    assert calls(lambda x: fusednorm.batch_norm(x * 2, None, None, training=True), x) == [0]
    assert calls(computed, x.clone().requires_grad_()) == [1, 1]


@compiles
def test_an_instance_that_is_asked_for_is_called() -> None:
    with use_instance("cpu.planes"):
        (forward,) = codes_of(lambda x: fusednorm.group_norm(x, 4), torch.randn(2, 8, 4, 6))[1]
    assert "call_forward(" in forward


@compiles
def test_a_size_that_is_a_symbol_is_called() -> None:
    (forward,) = codes_of(lambda x: fusednorm.group_norm(x, 4), torch.randn(2, 8, 4, 6), dynamic=True)[1]
    assert "call_forward(" in forward


@compiles
def test_forward_and_backward_compute_what_torchs_functions_do_in_as_many_loops() -> None:
    """Between its neighbours a norm is the kernels that torch's own function would be."""
    x, weight, bias = (torch.randn(size, requires_grad=True) for size in ((4, 16, 32), 32, 32))
    kernels = []
    for function in (fusednorm.layer_norm, torch.nn.functional.layer_norm):
        codes = codes_of(lambda *t, f=function: f(t[0] + 1, (32,), *t[1:]).relu() * 2, x, weight, bias)[1]  # type: ignore[misc]
        kernels.append([code.count("async_compile.cpp_pybinding(") for code in codes])
    assert kernels[0] == kernels[1]


@compiles
def test_batch_norm_and_relu_have_the_loops_of_torchs_functions() -> None:
    """The derivative of the relu is read from the output; from z it would be a tensor in a loop of its own."""
    loops = []
    torchs = torch.nn.Sequential(torch.nn.BatchNorm2d(64), torch.nn.ReLU())
    for norm in (nn.BatchNorm2d(64, activation="relu"), torchs):
        network = torch.nn.Sequential(torch.nn.Conv2d(8, 64, 1), norm, torch.nn.Conv2d(64, 8, 1))
        codes = codes_of(network, torch.randn(4, 8, 16, 16))[1]
        loops.append([code.count("for(int64_t") for code in codes])
    assert loops[0] == loops[1]


@compiles
@pytest.mark.parametrize("activation", [None, "silu"])
def test_group_norm_between_convolutions_transposes_nothing(activation: str | None) -> None:
    """Its loops run in the order of the convolutions' results, not in that of the groups' dimensions."""
    network = torch.nn.Sequential(
        torch.nn.Conv2d(8, 64, 1), nn.GroupNorm(4, 64, activation=activation), torch.nn.Conv2d(64, 8, 1)
    )
    x = torch.randn(2, 8, 16, 16).to(memory_format=torch.channels_last).requires_grad_()
    codes = codes_of(network.to(memory_format=torch.channels_last), x)[1]
    assert len(codes) == 2
    for code in codes:
        assert "fusednorm.compiled" not in code
        assert "transpose_mxn" not in code


# --- the results of compiled code ---


@compiles
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_network_between_convolutions(order: torch.memory_format, dtype: torch.dtype) -> None:
    network = torch.nn.Sequential(
        torch.nn.Conv2d(8, 16, 3), nn.GroupNorm(4, 16, activation="silu"), torch.nn.Conv2d(16, 16, 3),
        nn.InstanceNorm2d(16, affine=True, activation="gelu"),
    ).to(dtype)  # fmt: skip
    x = torch.randn(2, 8, 12, 12, dtype=dtype).to(memory_format=order)
    result, (forward, _) = codes_of(network, x)
    rounding = {"rtol": 0.02, "atol": 0.02} if dtype is torch.bfloat16 else {}  # of what lies between the four
    torch.testing.assert_close(result, network(x), **rounding)
    assert "fusednorm.compiled" not in forward


@compiles
def test_running_statistics() -> None:
    ours, theirs = nn.BatchNorm2d(8), torch.nn.BatchNorm2d(8)
    compiled = torch.compile(ours, fullgraph=True)
    for _ in range(3):
        x = (torch.randn(4, 8, 5, 6) * 3 + 1).requires_grad_()
        same_gradients(compiled, theirs, [x])
    assert int(ours.num_batches_tracked) == 3
    torch.testing.assert_close(dict(ours.named_buffers()), dict(theirs.named_buffers()))
    torch.testing.assert_close(torch.compile(ours.eval(), fullgraph=True)(x), theirs.eval()(x))


@compiles
def test_a_gradient_is_zero_where_the_relu_is() -> None:
    """A backward makes z of the same operations as the forward, also where the mean is large."""
    call = torch.compile(lambda x, w, b: fusednorm.group_norm(x, 4, w, b, activation="relu"), fullgraph=True)
    x, weight = (torch.randn(1, 64, 7) + 1e4), torch.randn(64)
    bias = torch.zeros(64, requires_grad=True)
    output = call(x, weight, bias)
    (gradient,) = torch.autograd.grad(output.sum(), bias)
    assert torch.equal(gradient, (output > 0).sum((0, 2)).float())
