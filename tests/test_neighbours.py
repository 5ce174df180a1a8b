"""The choice between our kernels and torch's own formula in a compiled graph, and what it sees of the graph."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from fusednorm import dispatch
from fusednorm.activations import Activation
from fusednorm.inductor import native
from fusednorm.inductor.native import has_formula, is_differentiable
from fusednorm.inductor.neighbours import Neighbours, neighbours_of, ours_pay, training_pays, transposed_behind
from fusednorm.norm import norm_of
from fusednorm.operands import BackwardOperands, Gradients, Operands
from fusednorm.problem import Problem
from fusednorm.problems import backward_problem, forward_problem

ALONE, BEFORE, AFTER, BOTH = Neighbours(), Neighbours(before=2), Neighbours(after=2), Neighbours(2, 2)
SMALL, LARGE = (2, 64, 16, 16), (16, 320, 64, 64)


def problem(
    family: str, shape: tuple[int, ...], *, last: bool = False, given: bool = False, backward: bool = False
) -> Problem:
    memory = torch.channels_last if last else torch.contiguous_format
    x = torch.empty(shape, dtype=torch.bfloat16, device="meta", memory_format=memory)
    groups = 32 if family == "group_norm" else 1 if family in ("layer_norm", "rms_norm") else 0
    norm = norm_of(family, groups, training=not given)  # type: ignore[arg-type]
    if backward:
        return backward_problem(norm, BackwardOperands(x, x, x, x))
    return forward_problem(norm, Operands(x))


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("shape", [SMALL, LARGE])
def test_a_norm_of_planes_alone_is_ours(shape: tuple[int, ...], last: bool) -> None:
    for family in ("group_norm", "instance_norm", "batch_norm"):
        assert ours_pay(problem(family, LARGE, last=last), ALONE)


def test_what_inductor_fuses_counts_against_us() -> None:
    planes, last = problem("group_norm", LARGE), problem("group_norm", LARGE, last=True)
    assert not ours_pay(planes, AFTER)
    assert not ours_pay(planes, BOTH)
    assert ours_pay(last, BEFORE)
    assert not ours_pay(last, BOTH)


@pytest.mark.parametrize("family", ["layer_norm", "rms_norm"])
def test_rows_are_inductors_next_to_anything(family: str) -> None:
    for rows in (128, 8192, 131072):
        for neighbours in (BEFORE, AFTER, Neighbours(before=1), Neighbours(after=1)):
            assert not ours_pay(problem(family, (rows, 1024)), neighbours)
    assert ours_pay(problem(family, (16384, 4096)), ALONE)
    assert not ours_pay(problem(family, (128, 1024)), ALONE)  # no more than a launch either way


def test_given_statistics_are_pointwise() -> None:
    for shape in (SMALL, LARGE):
        assert not ours_pay(problem("batch_norm", shape, given=True), ALONE)


def test_a_backward_is_ours() -> None:
    assert ours_pay(problem("layer_norm", (128, 1024), backward=True), BOTH)


def test_an_input_that_we_would_copy_is_inductors() -> None:
    x = torch.empty(8, 64, 320, device="meta").transpose(1, 2)
    assert not ours_pay(forward_problem(norm_of("layer_norm", 1), Operands(x)), ALONE)


def test_more_neighbours_never_speak_for_us() -> None:
    for family in ("group_norm", "layer_norm", "rms_norm", "batch_norm"):
        for samples in (1, 16, 256):
            for last in (False, True):
                seen = problem(family, (samples, 64, 32, 32), last=last)
                choices = [ours_pay(seen, Neighbours(n // 2, (n + 1) // 2)) for n in range(5)]
                assert choices == sorted(choices, reverse=True)


@pytest.mark.parametrize(
    ("family", "given", "statistics", "expected"),
    [
        ("layer_norm", False, True, True),
        ("rms_norm", False, True, True),
        ("group_norm", False, False, True),
        ("group_norm", False, True, False),  # torch rounds the statistics to the input's dtype
        ("instance_norm", False, False, False),
        ("batch_norm", False, False, False),  # its variance updates the running one
        ("batch_norm", True, False, True),
        ("batch_norm", True, True, False),
    ],
)
def test_what_torch_has_a_formula_for(family: str, given: bool, statistics: bool, expected: bool) -> None:
    assert has_formula(problem(family, SMALL, given=given), statistics) is expected


def test_operands_without_a_formula() -> None:
    x, w = torch.empty(2, 32, 4, device="meta"), torch.empty(32, device="meta")
    norm = norm_of("group_norm", 4)
    assert has_formula(forward_problem(norm, Operands(x, w, w)), False)
    assert not has_formula(forward_problem(norm, Operands(x, w, w, torch.empty(2, 32, device="meta"))), False)
    assert not has_formula(forward_problem(norm, Operands(x, w.half(), w)), False)
    assert not has_formula(forward_problem(norm_of("group_norm", 4, -1), Operands(x.transpose(1, 2))), False)


@pytest.mark.parametrize(
    ("family", "shape", "activation"),
    [
        ("layer_norm", (6, 40), Activation("silu", 1.7)),
        ("layer_norm", (2, 3, 40), "hardswish"),
        ("rms_norm", (6, 40), "gelu_tanh"),
        ("group_norm", (2, 8, 5, 3), "silu"),
        ("instance_norm", (2, 8, 5, 3), Activation("leaky_relu", 0.3)),
        ("batch_norm", (2, 8, 5, 3), "relu"),
        *(("layer_norm", (6, 40), name) for name in ("gelu", "sigmoid", "tanh")),
    ],
)
def test_torchs_formula_computes_what_ours_does(family: Any, shape: tuple[int, ...], activation: Any) -> None:
    """The statistics too, which our backward takes."""
    torch.manual_seed(0)
    rows, given = family in ("layer_norm", "rms_norm"), family == "batch_norm"
    x = torch.randn(shape)
    size = shape[-1:] if rows else shape[1:2]
    weight, bias = torch.randn(size), None if family == "rms_norm" else torch.randn(size)
    mean, var = (torch.randn(size), torch.rand(size) + 0.5) if given else (None, None)
    norm = norm_of(family, 4 if family == "group_norm" else int(rows), activation=activation, training=not given)
    operands = Operands(x, weight, bias, None, None, mean, var)
    got, expected = native.run(forward_problem(norm, operands), operands), dispatch.forward(norm, operands)
    torch.testing.assert_close(got.output, expected.output)
    for ours, torchs in ((expected.mean, got.mean), (expected.rstd, got.rstd)):
        if torchs is not None:
            torch.testing.assert_close(torchs, ours)
    assert (got.rstd is not None) == rows


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("family", ["layer_norm", "rms_norm"])
def test_torchs_formula_of_a_backward_computes_what_ours_does(family: Any, affine: bool) -> None:
    torch.manual_seed(0)
    x, dy = torch.randn(6, 2, 4, 16), torch.randn(6, 2, 4, 16)
    weight = torch.randn(4, 16) if affine else None
    bias = torch.randn(4, 16) if affine and family == "layer_norm" else None
    norm = norm_of(family, 2)
    saved = dispatch.forward(norm, Operands(x, weight, bias))
    assert saved.rstd is not None
    operands = BackwardOperands(dy, x, saved.mean, saved.rstd, weight, bias)
    wanted = (True, affine, bias is not None, False, False)
    problem = backward_problem(norm, operands)

    def present(found: Gradients) -> list[Tensor]:
        return [one for one in (found.input, found.weight, found.bias) if one is not None]

    def formula(dy: Tensor) -> list[Tensor]:
        return present(native.run_backward(problem, replace(operands, grad_output=dy), wanted))

    # torch's rms_norm has a backward of one function only where Inductor takes that apart.
    got = make_fx(formula, decomposition_table=select_decomp_table())(dy)(dy)
    expected = present(dispatch.backward(norm, operands, wanted))
    assert len(got) == len(expected) == sum(wanted)
    for torchs, ours in zip(got, expected, strict=True):
        torch.testing.assert_close(torchs, ours)


def test_both_directions_are_torchs_where_it_has_both() -> None:
    x, w = torch.randn(8, 16), torch.randn(16)

    def has(family: Any, x: Tensor = x, w: Tensor | None = w, activation: Any = None, **more: Tensor) -> bool:
        dims = 4 if family == "group_norm" else 1
        return is_differentiable(forward_problem(norm_of(family, dims, activation=activation), Operands(x, w, **more)))

    assert has("layer_norm")
    assert has("rms_norm")
    assert has("rms_norm", w=None)
    assert not has("rms_norm", bias=w)
    assert not has("layer_norm", activation=Activation("silu"))
    assert not has("layer_norm", w=w.double())
    assert not has("group_norm")


def test_rows_in_training_are_ours_where_parameters_have_gradients() -> None:
    """And where the rows lie in memory as they are computed."""

    def pays(call: Callable[[Tensor], Tensor], w: Tensor | None) -> bool:
        graph = make_fx(call, tracing_mode="fake")(torch.randn(4, 8, 16)).graph
        (source,) = graph.output_node().all_input_nodes
        x = torch.randn(4, 8, 16)
        return training_pays(forward_problem(norm_of("layer_norm", 1), Operands(x, w)), source)

    w = torch.randn(16)
    assert pays(lambda x: x + 1, w)
    assert not pays(lambda x: x + 1, None)
    assert not pays(lambda x: (x + 1).transpose(0, 1), w)
    assert not pays(lambda x: (x + 1).permute(1, 0, 2).view(8, 4, 4, 4), w)
    assert pays(lambda x: (x + 1).transpose(0, 1).contiguous(), w)


def test_units_that_a_program_holds_cost_one_read() -> None:
    """Between a sum and a product, which Inductor would fuse."""
    medium, one = problem("group_norm", (16, 1280, 16, 16), last=True), Neighbours(before=1, after=1)
    for name in ("triton.held", "triton.whole"):
        assert ours_pay(medium, one, name)
    for name in ("", "triton.tiles"):
        assert not ours_pay(medium, one, name)
    assert not ours_pay(problem("layer_norm", (128, 1024)), ALONE, "triton.whole")  # a row's cost is what it was


def test_a_transposition_before_a_convolution_counts_against_us() -> None:
    planes, last = problem("group_norm", LARGE), problem("group_norm", LARGE, last=True)
    convolved = Neighbours(convolved=True)
    assert ours_pay(planes, convolved)
    assert transposed_behind(planes, convolved) == Neighbours(after=2, convolved=True)
    assert not ours_pay(planes, transposed_behind(planes, convolved))
    for same, neighbours in ((planes, BEFORE), (last, convolved), (problem("group_norm", (16, 320, 1, 1)), convolved)):
        assert transposed_behind(same, neighbours) is neighbours


def found(call: Callable[[Tensor, Callable[[Tensor], Tensor]], object], *shape: int) -> Neighbours:
    """The neighbours of the norm in a graph, of a matrix or of this shape."""

    def norm(x: Tensor) -> Tensor:
        arguments = (x, None, None, None, None, None, None, norm_of("layer_norm", 1).text, False)
        output: Tensor = torch.ops.fusednorm.compiled_forward(*arguments)[0]
        return output

    graph = make_fx(lambda x: call(x, norm), tracing_mode="fake")(torch.randn(shape or (4, 8))).graph
    (node,) = graph.find_nodes(op="call_function", target=torch.ops.fusednorm.compiled_forward.default)
    assert all(user.target is operator.getitem for user in node.users)
    return neighbours_of(node)


def test_neighbours_in_a_graph() -> None:
    assert found(lambda x, norm: norm(x)) == Neighbours(0, 0)
    assert found(lambda x, norm: norm(x @ x.T)) == Neighbours(0, 0)
    assert found(lambda x, norm: norm(x + 1)) == Neighbours(2, 0)
    assert found(lambda x, norm: norm(x) * 2) == Neighbours(0, 2)
    assert found(lambda x, norm: (norm(x.exp()) @ x.T) + 1) == Neighbours(2, 0)

    def residual(x: Tensor, norm: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        total = x + 1
        return norm(total) @ x.T, total

    assert found(residual) == Neighbours(1, 0)

    def both(x: Tensor, norm: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        y = norm(x)
        return y @ x.T, y.sin()

    assert found(both) == Neighbours(0, 1)

    def images(x: Tensor, norm: Callable[[Tensor], Tensor]) -> Tensor:
        return torch.conv2d(norm(x), x)

    assert found(images, 2, 3, 4, 4) == Neighbours(convolved=True)
    assert found(lambda x, norm: torch.conv1d(norm(x), x), 2, 3, 4) == Neighbours()
