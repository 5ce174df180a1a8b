"""Memory of any order: what is read in place, what is copied first, and the strides of what comes back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from cpu_support import activation_for, faults, in_memory, run, same_bits
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import fusednorm
from fusednorm import choice, dispatch, ops
from fusednorm.bench.workloads import LayoutName, Workload, draw
from fusednorm.norm import Family, norm_of
from fusednorm.operands import BackwardOperands, Operands
from fusednorm.problem import Problem
from fusednorm.problems import backward_problem, forward_problem


@dataclass(frozen=True)
class Memory:
    """Where a tensor's elements lie, as :func:`cpu_support.in_memory` takes it, and whether that is native.

    ``padding`` elements follow each run of the fastest dimension. ``output`` are the dimensions of the output from the
    slowest to the fastest, by default the input's.
    """

    shape: tuple[int, ...]
    order: tuple[int, ...]
    steps: tuple[int, ...] | None = None
    offset: int = 0
    native: bool = True
    output: tuple[int, ...] | None = None
    layout: LayoutName = "nchw"
    padding: int = 0

    def place(self, values: Tensor) -> Tensor:
        fastest, size = self.order[-1], values.shape[self.order[-1]]
        padded = torch.nn.functional.pad(values.movedim(fastest, -1), (0, self.padding), value=torch.nan)
        placed = in_memory(padded.movedim(-1, fastest), self.order, self.steps, self.offset)
        return placed.narrow(fastest, 0, size)

    @property
    def output_strides(self) -> tuple[int, ...]:
        return dense_strides(self.shape, self.output or self.order)


def dense_strides(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    strides, step = [0] * len(shape), 1
    for axis in reversed(order):
        strides[axis] = step
        step *= max(1, shape[axis])
    return tuple(strides)


IMAGE = (3, 8, 5, 6)
FORMS: dict[str, Memory] = {
    "contiguous": Memory(IMAGE, (0, 1, 2, 3)),
    "contiguous at an offset": Memory(IMAGE, (0, 1, 2, 3), offset=7),
    "width padded": Memory(IMAGE, (0, 1, 2, 3), native=False, padding=2),
    "samples sliced": Memory(IMAGE, (0, 1, 2, 3), (2, 1, 1, 1)),
    "channels sliced": Memory(IMAGE, (0, 1, 2, 3), (1, 2, 1, 1)),
    "height sliced": Memory(IMAGE, (0, 1, 2, 3), (1, 1, 2, 1), native=False),
    "width sliced": Memory(IMAGE, (0, 1, 2, 3), (1, 1, 1, 2), native=False),
    "height and width exchanged": Memory(IMAGE, (0, 1, 3, 2)),
    "exchanged, channels sliced": Memory(IMAGE, (0, 1, 3, 2), (1, 3, 1, 1)),
    "samples and channels exchanged": Memory(IMAGE, (1, 0, 2, 3)),
    "samples expanded": Memory(IMAGE, (0, 1, 2, 3), (0, 1, 1, 1)),
    "channels expanded": Memory(IMAGE, (0, 1, 2, 3), (1, 0, 1, 1), native=False),
    "positions expanded": Memory(IMAGE, (0, 1, 2, 3), (1, 1, 0, 0), native=False),
    "samples fastest": Memory(IMAGE, (1, 2, 3, 0), native=False),
    "channels_last": Memory(IMAGE, (0, 2, 3, 1)),
    "channels_last at an offset": Memory(IMAGE, (0, 2, 3, 1), offset=3),
    "channels_last, channels padded": Memory(IMAGE, (0, 2, 3, 1), padding=5),
    "channels_last, samples sliced": Memory(IMAGE, (0, 2, 3, 1), (2, 1, 1, 1)),
    "channels_last, width sliced": Memory(IMAGE, (0, 2, 3, 1), (1, 1, 1, 2)),
    "channels_last, height sliced": Memory(IMAGE, (0, 2, 3, 1), (1, 1, 2, 1), native=False, output=(0, 1, 2, 3)),
    "channels_last, channels strided": Memory(IMAGE, (0, 2, 3, 1), (1, 2, 1, 1), native=False, output=(0, 1, 2, 3)),
    "channels_last, exchanged": Memory(IMAGE, (0, 3, 2, 1)),
    "channels_last, samples in between": Memory(IMAGE, (2, 3, 0, 1)),
    "one channel, strided": Memory((3, 1, 5), (0, 1, 2), (1, 1, 2)),
    "one position, strided channels": Memory((3, 8, 1, 1), (0, 1, 2, 3), (1, 2, 1, 1)),
    "one sample": Memory((1, 8, 5, 6), (0, 2, 3, 1)),
    "rank 2": Memory((5, 8), (0, 1)),
    "rank 2, strided": Memory((5, 8), (0, 1), (1, 2)),
    "rank 2, transposed": Memory((5, 8), (1, 0)),
    "rank 3, tokens": Memory((2, 8, 9), (0, 2, 1)),
    "rank 5, channels_last": Memory((2, 4, 3, 2, 5), (0, 2, 3, 4, 1)),
    "rank 6": Memory((2, 4, 3, 2, 2, 3), (0, 1, 5, 2, 4, 3)),
    "NHWC": Memory(IMAGE, (0, 1, 2, 3), layout="channel_dim=-1"),
    "NHWC, channels sliced": Memory(IMAGE, (0, 1, 2, 3), (1, 1, 1, 2), layout="channel_dim=-1", native=False),
    "NHWC, width sliced": Memory(IMAGE, (0, 1, 2, 3), (1, 1, 2, 1), layout="channel_dim=-1"),
    "NHWC, channels padded": Memory(IMAGE, (0, 1, 2, 3), layout="channel_dim=-1", padding=5),
    "NHWC in channels_first memory": Memory(IMAGE, (0, 3, 1, 2), layout="channel_dim=-1"),
    "NHWC, channels_first, sliced": Memory(IMAGE, (0, 3, 1, 2), (2, 1, 1, 2), layout="channel_dim=-1"),
}
ROW_FORMS: dict[str, Memory] = {
    "contiguous": Memory((4, 3, 10), (0, 1, 2)),
    "rows sliced": Memory((4, 3, 10), (0, 1, 2), (1, 2, 1)),
    "rows padded": Memory((4, 3, 10), (0, 1, 2), padding=6),
    "outer rows sliced": Memory((4, 3, 10), (0, 1, 2), (2, 1, 1)),
    "elements sliced": Memory((4, 3, 10), (0, 1, 2), (1, 1, 2)),
    "rows exchanged": Memory((4, 3, 10), (1, 0, 2)),
    "rows expanded": Memory((4, 3, 10), (0, 1, 2), (0, 0, 1), output=(0, 1, 2)),
    "transposed": Memory((4, 3, 10), (2, 0, 1)),
    "elements expanded": Memory((4, 3, 10), (0, 1, 2), (1, 1, 0), native=False),
}


def workload_of(memory: Memory, family: Family) -> Workload:
    """The workload whose input has the shape of the memory; Workload's own shape has the channels second."""
    shape = memory.shape
    if memory.layout == "channel_dim=-1":
        shape = (shape[0], shape[-1], *shape[1:-1])
    groups = {"group_norm": max(1, shape[1] // 2), "layer_norm": 1, "rms_norm": 1}.get(family, 0)
    return Workload(family, shape, groups, layout=memory.layout)


def run_in(
    memory: Memory, family: Family, grad_memory: Memory | None = None
) -> tuple[Workload, Any, dict[str, Tensor]]:
    """The workload, its inputs placed in memory, and the results of the instance that is chosen for them."""
    workload = workload_of(memory, family)
    inputs = draw(workload)
    grad_output = inputs.grad_output if grad_memory is None else grad_memory.place(inputs.grad_output)
    inputs = replace(inputs, input=memory.place(inputs.input), grad_output=grad_output)
    problem = problem_of(workload, inputs.input)
    workload = replace(workload, activation=activation_for(choice.choose(problem).name))
    return workload, inputs, run(workload, inputs)


def problem_of(workload: Workload, x: Tensor, grad_output: Tensor | None = None) -> Problem:
    norm = norm_of(workload.family, workload.groups, workload.channel_dim)
    if grad_output is None:
        return forward_problem(norm, Operands(x))
    return backward_problem(norm, BackwardOperands(grad_output, x, x, x))


CASES = [
    (form, family)
    for form, memory in FORMS.items()
    for family in ("group_norm", "batch_norm", "instance_norm")
    if family != "instance_norm" or (len(memory.shape) > 2 and memory.shape[-1] > 1)  # one position has no variance
]
ROW_CASES = [(form, family) for form in ROW_FORMS for family in ("layer_norm", "rms_norm")]


@pytest.mark.parametrize(("form", "family"), CASES)
def test_values_from_any_memory(form: str, family: Family) -> None:
    workload, inputs, results = run_in(FORMS[form], family)
    assert faults(workload, inputs, results) == []


@pytest.mark.parametrize(("form", "family"), ROW_CASES)
def test_values_of_rows_from_any_memory(form: str, family: Family) -> None:
    workload, inputs, results = run_in(ROW_FORMS[form], family)
    assert faults(workload, inputs, results) == []


@pytest.mark.parametrize(("form", "family"), [*CASES, *ROW_CASES])
def test_output_and_grad_input_have_the_strides_of_the_fake(form: str, family: Family) -> None:
    memory = (ROW_FORMS if family in ("layer_norm", "rms_norm") else FORMS)[form]
    workload, inputs, results = run_in(memory, family)
    with FakeTensorMode() as mode:
        fake = ops.empty_output(mode.from_tensor(inputs.input), family, workload.groups, workload.channel_dim)
    assert results["output"].stride() == results["grad_input"].stride() == fake.stride()


def significant(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Strides that mean something: a dimension of one element has none."""
    return [stride for size, stride in zip(shape, strides, strict=True) if size > 1]


@pytest.mark.parametrize("form", FORMS)
def test_output_keeps_the_memory_order(form: str) -> None:
    memory = FORMS[form]
    _, _, results = run_in(memory, "group_norm")
    assert significant(memory.shape, results["output"].stride()) == significant(memory.shape, memory.output_strides)


@pytest.mark.parametrize(("form", "family"), [*CASES, *ROW_CASES])
def test_what_is_copied_is_what_the_problem_says(form: str, family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan receives the caller's own memory, except for the tensors that ``copies`` names."""
    memory = (ROW_FORMS if family in ("layer_norm", "rms_norm") else FORMS)[form]
    seen = spy_on_plans(monkeypatch)
    workload, inputs, _ = run_in(memory, family)
    problem = problem_of(workload, inputs.input, inputs.grad_output)
    assert ("input" not in problem.copies) == memory.native
    own = {name: getattr(inputs, name).data_ptr() for name in ("input", "grad_output")}
    assert {name for name, address in seen if address != own[name]} == set(problem.copies)
    assert [name for name, _ in seen] == ["input", "grad_output", "input"]


def spy_on_plans(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The tensors that plans are called with, by name and address."""
    seen: list[tuple[str, int]] = []
    choose = choice.choose

    class Spy:
        def __init__(self, instance: Any) -> None:
            self.instance = instance

        def plan(self, problem: Problem) -> Callable[..., Any]:
            plan = self.instance.plan(problem)

            def run(operands: Any, *arguments: Any) -> Any:
                names = ("grad_output", "input") if problem.backward else ("input",)
                seen.extend((name, getattr(operands, name).data_ptr()) for name in names)
                return plan(operands, *arguments)

            return run

        def __getattr__(self, name: str) -> Any:
            return getattr(self.instance, name)

    monkeypatch.setattr(dispatch, "_plans", {})
    monkeypatch.setattr(dispatch, "choose", lambda *arguments: Spy(choose(*arguments)))
    return seen


# --- gradients ---

GRADIENT_FORMS: dict[str, Memory] = {
    "contiguous": Memory(IMAGE, (0, 1, 2, 3)),
    "channels_last": Memory(IMAGE, (0, 2, 3, 1)),
    "height and width exchanged": Memory(IMAGE, (0, 1, 3, 2)),
    "samples fastest": Memory(IMAGE, (1, 2, 3, 0)),
    "width sliced": Memory(IMAGE, (0, 1, 2, 3), (1, 1, 1, 2)),
    "channels sliced": Memory(IMAGE, (0, 1, 2, 3), (1, 2, 1, 1)),
    "samples expanded": Memory(IMAGE, (0, 1, 2, 3), (0, 1, 1, 1)),
    "positions expanded": Memory(IMAGE, (0, 1, 2, 3), (1, 1, 0, 0)),
    "samples and channels expanded": Memory(IMAGE, (0, 1, 2, 3), (0, 0, 1, 1)),
}


@pytest.mark.parametrize("family", ["group_norm", "batch_norm"])
@pytest.mark.parametrize("gradient", GRADIENT_FORMS)
@pytest.mark.parametrize("form", ["contiguous", "channels_last", "height and width exchanged", "samples fastest"])
def test_a_gradient_in_any_memory(form: str, gradient: str, family: Family) -> None:
    workload, inputs, results = run_in(FORMS[form], family, GRADIENT_FORMS[gradient])
    assert faults(workload, inputs, results) == []
    dense = replace(inputs, grad_output=inputs.grad_output.contiguous())
    expected = run(workload, dense)
    assert [name for name in results if not same_bits(results[name], expected[name])] == []


@pytest.mark.parametrize("gradient", ["rows sliced", "elements sliced", "rows expanded", "transposed"])
@pytest.mark.parametrize("form", ["contiguous", "transposed"])
def test_a_gradient_of_rows_in_any_memory(form: str, gradient: str) -> None:
    workload, inputs, results = run_in(ROW_FORMS[form], "layer_norm", ROW_FORMS[gradient])
    assert faults(workload, inputs, results) == []


def test_gradient_of_a_sum() -> None:
    """Its gradient is one number, expanded over every dimension."""
    x, weight = torch.randn(IMAGE, requires_grad=True), torch.randn(8, requires_grad=True)
    y = fusednorm.group_norm(x, 4, weight)
    expected = torch.autograd.grad(y, [x, weight], torch.ones_like(y), retain_graph=True)
    y.sum().backward()
    assert all(same_bits(leaf.grad, gradient) for leaf, gradient in zip([x, weight], expected, strict=True))


def test_a_strided_gradient_in_the_order_of_the_input_is_not_copied() -> None:
    for order, steps in [((0, 1, 2, 3), (2, 1, 1, 1)), ((0, 1, 2, 3), (0, 2, 1, 1)), ((0, 2, 3, 1), (1, 1, 1, 2))]:
        dense, strided = Memory(IMAGE, order), Memory(IMAGE, order, steps)
        workload = workload_of(dense, "group_norm")
        drawn = draw(workload)
        problem = problem_of(workload, dense.place(drawn.input), strided.place(drawn.grad_output))
        assert problem.copies == ()


def test_a_gradient_without_elements_is_not_copied() -> None:
    """Its strides mean nothing, whatever torch gave it."""
    x, grad_output = torch.empty(0, 8, 5, 6), torch.empty(0, 5, 6, 8).movedim(-1, 1)
    assert problem_of(Workload("group_norm", (0, 8, 5, 6), 4), x, grad_output).copies == ()


def test_gradients_of_the_parameters_alone_from_an_input_that_is_copied() -> None:
    x = torch.randn(8, 6, 5, 4).permute(3, 0, 1, 2)  # samples fastest
    weight, bias, grad_output = torch.randn(8), torch.randn(8), torch.randn(x.shape)
    _, mean, rstd = ops.group_norm_forward(x, 2, weight, bias, 1e-5)
    call = (grad_output, x, mean, rstd, 2, weight, bias)
    parts, whole = ops.group_norm_backward_gamma_beta(*call), ops.group_norm_backward(*call)
    assert all(same_bits(part, gradient) for part, gradient in zip(parts, whole[1:], strict=True))


@pytest.mark.parametrize("instance", ["reference", "cpu.planes"])
def test_results_of_an_input_that_is_copied_in_memory_of_the_caller(instance: str) -> None:
    x = torch.randn(8, 6, 5, 4).permute(3, 0, 1, 2)  # samples fastest
    norm, operands = norm_of("group_norm", 2), Operands(x)
    plan = dispatch.make_plan(forward_problem(norm, operands), instance)
    right = plan(operands)
    out, mean_out, rstd_out = (torch.full_like(each, torch.nan) for each in (right.output, right.mean, right.rstd))
    found = plan(operands, False, out, mean_out, rstd_out)
    for given, result, expected in (
        (out, found.output, right.output), (mean_out, found.mean, right.mean), (rstd_out, found.rstd, right.rstd),
    ):  # fmt: skip
        assert result is given
        assert same_bits(given, expected)
    backward = BackwardOperands(torch.randn(x.shape), x, mean_out, rstd_out)
    plan, wanted = dispatch.make_plan(backward_problem(norm, backward), instance), (True, *(False,) * 4)
    assert plan(backward, wanted, out).input is out
    assert same_bits(out, plan(backward, wanted).input)


def test_an_input_that_is_copied_has_statistics_unless_nobody_wants_them() -> None:
    operands = Operands(torch.randn(8, 6, 5, 4).permute(3, 0, 1, 2))
    plan = dispatch.make_plan(forward_problem(norm_of("group_norm", 2), operands), "cpu.planes")
    assert plan(operands).rstd is not None
    assert plan(operands, False).rstd is None


def test_a_copy_lies_on_the_device_of_its_tensor() -> None:
    x = torch.empty(2, 8, 5, 6, device="meta")
    statistic, turned = x.new_empty(2, 4), x.mT.contiguous().mT
    operands = BackwardOperands(turned, x, statistic, statistic)
    plan = dispatch.make_plan(backward_problem(norm_of("group_norm", 4), operands), "reference")
    assert plan(operands, (True, *(False,) * 4)).input.device == x.device


@pytest.mark.parametrize("strides", [(0, 2, 1, 1), (4, 2, 7, 1), (1, 2, 0, 1)])
def test_strides_along_one_element_are_the_fakes_too(strides: tuple[int, ...]) -> None:
    x = torch.randn(8).as_strided((1, 2, 1, 2), strides)
    with FakeTensorMode() as mode:
        fake = ops.empty_output(mode.from_tensor(x), "instance_norm", 0, 1)
    assert fusednorm.instance_norm(x).stride() == fake.stride() == strides


def test_memory_with_holes_is_read_by_its_strides_alone() -> None:
    """in_memory puts NaN between the elements, so the tests above would see a read beside them."""
    placed = in_memory(torch.ones(2, 3), steps=(2, 2), offset=1)
    block = placed.as_strided((placed.untyped_storage().nbytes() // 4,), (1,), 0)
    assert block.isnan().sum() == block.numel() - 6
    assert placed.isfinite().all()


@pytest.mark.parametrize("gap", ["input", "grad_output"])
def test_batch_norm_of_samples_with_a_gap_between_them(gap: str) -> None:
    """Channels last, all but one row of each sample's positions, so that the samples are not as one."""
    workload = Workload("batch_norm", (4, 8, 5, 6), layout="nhwc")
    inputs = draw(workload)
    block = torch.full((4, 7, 6, 8), torch.nan).permute(0, 3, 1, 2)
    inputs = replace(inputs, **{gap: block[:, :, 1:6].copy_(getattr(inputs, gap))})
    assert faults(workload, inputs, run(workload, inputs, "cpu.slabs_split")) == []


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
@pytest.mark.parametrize("copied", ["input", "grad_output"])
def test_what_is_copied_keeps_its_dtype(copied: str, dtype: str) -> None:
    workload = Workload("group_norm", (2, 8, 5, 6), 4, dtype)
    inputs = draw(workload)
    turned = getattr(inputs, copied).mT.contiguous().mT  # positions in neither memory order
    inputs = replace(inputs, **{copied: turned})
    assert faults(workload, inputs, run(workload, inputs)) == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_long_strided_rows_and_columns_are_summed_in_chunks(dtype: torch.dtype) -> None:
    """One element after the other loses 100 roundings of float64 over 1e5 of them."""
    values = (torch.randn(1, 300_000, dtype=torch.float64) + 3).to(dtype)
    unit = torch.finfo(dtype).eps
    row = values[:, ::2]
    _, mean, rstd = fusednorm.ops.layer_norm_forward(row, row.shape[1:], None, None, 1e-5)
    column = values.reshape(3, -1).t()
    _, means, rstds = fusednorm.ops.batch_norm_training(column, None, None, None, None, 0.1, 1e-5)
    for strided, axis, found, inverse in ((row, 1, mean, rstd), (column, 0, means, rstds)):
        exact = strided.numpy().astype(np.longdouble)
        variance = exact.var(axis)
        assert np.abs(found.flatten().numpy() - exact.mean(axis)).max() <= 4 * unit * 3
        assert np.abs(inverse.flatten().numpy() * np.sqrt(variance + np.longdouble(1e-5)) - 1).max() <= 4 * unit


@pytest.mark.parametrize("instance", ["reference", None])
def test_an_empty_input_of_strides_that_are_copied(instance: str | None) -> None:
    """The shape of an empty gradient is the input's, and that of one nobody asked for says nothing."""
    x = torch.empty(2, 1, 0, 2).expand(2, 6, 0, 2)
    weight = torch.randn(6)
    statistics = torch.zeros(6)
    for mask in ((True, True, False, False, False), (False, True, False, False, False)):
        with nullcontext() if instance is None else choice.use_instance(instance):
            gradients = ops.norm_backward(
                torch.empty_like(x), x, statistics, statistics, weight, None, None, None, "batch_norm", 0, 1, "", 0.0,
                True, mask,
            )  # fmt: skip
        assert not mask[0] or gradients[0].shape == x.shape
        assert torch.equal(gradients[1], torch.zeros(6))
