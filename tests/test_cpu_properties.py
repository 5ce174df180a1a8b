"""Properties that hold for any shape, memory, dtype and instance; hypothesis looks for what breaks them."""

from __future__ import annotations

from dataclasses import replace

import torch
from cpu_support import DTYPES, activation_for, activations_for, backward, faults, forward, in_memory, run
from hypothesis import assume, given, note
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from fusednorm import choice, ops
from fusednorm.bench.judging import Results
from fusednorm.bench.operations import problem_of_workload
from fusednorm.bench.workloads import INITS, Inputs, Workload, draw
from fusednorm.norm import FAMILIES
from fusednorm.problem import Problem
from fusednorm.problems import forward_problem

MOST_ELEMENTS = 4000


@st.composite
def shapes(draw: st.DrawFn, least_rank: int = 2) -> tuple[int, ...]:
    rank = draw(st.integers(least_rank, 5))
    sizes = st.integers(1, 9) | st.sampled_from([16, 17, 33])
    shape: list[int] = []
    for _ in range(rank):
        size, elements = draw(sizes), 1
        for known in shape:
            elements *= known
        shape.append(size if size * elements <= MOST_ELEMENTS else 1)
    return tuple(shape)


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """A workload without activation: which ones may be compiled depends on the instance."""
    family = draw(st.sampled_from(FAMILIES))
    dtype = draw(st.sampled_from(DTYPES))
    weight_dtype = draw(st.sampled_from([None, "float32", dtype]))
    if family in ("layer_norm", "rms_norm"):
        shape = draw(shapes(1))
        return Workload(family, shape, draw(st.integers(1, len(shape))), dtype, weight_dtype=weight_dtype)
    shape = draw(shapes())
    divisors = [count for count in range(1, shape[1] + 1) if shape[1] % count == 0]
    groups = draw(st.sampled_from(divisors)) if family == "group_norm" else 0
    layout = draw(st.sampled_from(["nchw", "nhwc", "channel_dim=-1"]))
    return Workload(family, shape, groups, dtype, layout, modulated=draw(st.booleans()), weight_dtype=weight_dtype)


@st.composite
def memories(draw: st.DrawFn, values: torch.Tensor) -> torch.Tensor:
    """The values as they lie, or in any order with any steps."""
    if draw(st.booleans()):
        return values
    order = draw(st.permutations(range(values.dim())))
    steps = [draw(st.sampled_from([1, 1, 1, 2, 3])) for _ in order]
    return in_memory(values, order, steps, draw(st.sampled_from([0, 1, 5])))


@st.composite
def cases(draw_: st.DrawFn) -> tuple[Workload, Inputs, str]:
    """A workload that leaves more than one element under each statistic, its inputs, and an instance for them."""
    workload = draw_(workloads())
    init = draw_(st.sampled_from(INITS))
    inputs = draw(workload, init, seed=draw_(st.integers(0, 99)))
    inputs = replace(
        inputs, input=draw_(memories(inputs.input)), grad_output=draw_(memories(inputs.grad_output))
    )  # fmt: skip
    problem = problem_of(workload, inputs)
    assume(problem.reduced > 1)
    # grad_output's strides may be those of another view of the rows.
    both = problem, problem_of_workload("backward", replace(workload, activation=None), inputs)
    forward_able, able = ([one.instance.name for one in choice.instances(each) if one.reason is None] for each in both)
    names = [name for name in able if name.startswith("cpu.") and name in forward_able]
    assume(names)
    instance = draw_(st.sampled_from(names))
    activation = draw_(st.sampled_from(activations_for(instance, workload.dtype)[:2]))
    # A kink turns a rounding of z into a jump of a gradient, which no tolerance allows.
    if activation in ("relu", "leaky_relu", "hardswish"):
        activation = activation_for(instance, workload.dtype)
    note(f"{instance}, {problem.layout}, copies {problem.copies}")
    return replace(workload, activation=activation), inputs, instance


def problem_of(workload: Workload, inputs: Inputs) -> Problem:
    return forward_problem(replace(workload, activation=None).norm, inputs.operands)


@given(cases())
def test_results_are_the_references(case: tuple[Workload, Inputs, str]) -> None:
    workload, inputs, instance = case
    results = run(workload, inputs, instance)
    assert faults(workload, inputs, judged(workload, results)) == []


def judged(workload: Workload, results: Results) -> Results:
    """The gradient of an fp64 weight beside another input is accumulated in fp32, and judged as that."""
    if workload.dtype == "float64":
        return results
    return {name: value.float() if value.dtype == torch.float64 else value for name, value in results.items()}


@given(cases())
def test_strides_are_the_fakes(case: tuple[Workload, Inputs, str]) -> None:
    workload, inputs, instance = case
    results = run(workload, inputs, instance)
    with FakeTensorMode() as mode:
        fake = ops.empty_output(
            mode.from_tensor(inputs.input), workload.family, workload.groups, workload.channel_dim
        )  # fmt: skip
    assert results["output"].stride() == results["grad_input"].stride() == fake.stride()


@given(cases())
def test_arguments_are_only_read(case: tuple[Workload, Inputs, str]) -> None:
    workload, inputs, instance = case
    tensors = [value for value in vars(inputs).values() if value is not None]
    before = [tensor.clone() for tensor in tensors]
    run(workload, inputs, instance)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(tensors, before, strict=True))


@given(cases(), st.data())
def test_a_sample_does_not_depend_on_the_others(case: tuple[Workload, Inputs, str], data: st.DataObject) -> None:
    """Output and grad_input of one sample are the same bits alone and among others, but for batch_norm."""
    workload, inputs, instance = case
    assume(workload.family != "batch_norm" and workload.shape[0] > 1)
    assume(not workload.row_family or workload.groups < len(workload.shape))
    sample = data.draw(st.integers(0, workload.shape[0] - 1))
    part = slice(sample, sample + 1)
    alone = replace(
        inputs,
        input=inputs.input[part],
        grad_output=inputs.grad_output[part],
        scale=None if inputs.scale is None else inputs.scale[part],
        shift=None if inputs.shift is None else inputs.shift[part],
    )
    one = replace(workload, shape=(1, *workload.shape[1:]))
    # Without the other samples the memory may fit another order, and with it another way to sum.
    assume(problem_of(one, alone).layout.order == problem_of(workload, inputs).layout.order)
    assume(problem_of(one, alone).copies == problem_of(workload, inputs).copies)
    together, apart = run(workload, inputs, instance), run(one, alone, instance)
    for name in ("output", "grad_input"):
        assert torch.equal(together[name][part], apart[name]), name


@given(cases())
def test_scaling_the_gradient_by_two_scales_all_gradients_by_two(case: tuple[Workload, Inputs, str]) -> None:
    """The backward is linear in grad_output, and a power of two commutes with every rounding but underflow."""
    workload, inputs, instance = case
    statistics = forward(workload, inputs, instance)
    doubled = replace(inputs, grad_output=inputs.grad_output * 2)
    assume(bool(doubled.grad_output.isfinite().all()) and workload.dtype != "float16")
    once = backward(workload, inputs, statistics["mean"], statistics["rstd"], instance)
    twice = backward(workload, doubled, statistics["mean"], statistics["rstd"], instance)
    assert [name for name, value in once.items() if not torch.equal(value * 2, twice[name])] == []
