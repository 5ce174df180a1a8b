"""Operands in dtypes of their own: read and written by the kernels, without copies, and each gradient rounded once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from cpu_support import CHANNELS_LAST, DTYPES, INSTANCES, layout_for, run, same_bits
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fusednorm
from fusednorm import dispatch
from fusednorm.backends.cpu import compiler, threads
from fusednorm.bench.judging import Results
from fusednorm.bench.workloads import Inputs, Workload, draw
from fusednorm.choice import use_instance
from fusednorm.norm import norm_of
from fusednorm.operands import BackwardOperands, Operands
from fusednorm.problems import backward_problem, forward_problem

ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "detach"}
COMPUTE = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float32, "bfloat16": torch.float32}
#: Each dtype beside each other one, in the order of weight, bias, scale and shift.
MIXED = (
    ("float32", "float32", "float32", "float32"),
    ("bfloat16", "bfloat16", "bfloat16", "bfloat16"),
    ("float16", "bfloat16", "float64", "float32"),
    ("float64", "float32", "float16", "bfloat16"),
    ("bfloat16", "float64", "float32", "float16"),
)


def workload_for(instance: str, dtype: str) -> Workload:
    if instance == "cpu.rows":
        return Workload("layer_norm", (9, 45), 1, dtype=dtype)  # type: ignore[arg-type]
    return Workload(
        "group_norm", (2, 24, 7, 5), 8, dtype=dtype, modulated=True, layout=layout_for(instance)  # type: ignore[arg-type]
    )  # fmt: skip


def with_dtypes(inputs: Inputs, dtypes: tuple[str, ...]) -> Inputs:
    names = ("weight", "bias", "scale", "shift")
    operands = {name: getattr(inputs, name) for name in names}
    return replace(
        inputs,
        **{
            name: None if operand is None else operand.to(getattr(torch, dtype))
            for (name, operand), dtype in zip(operands.items(), dtypes, strict=True)
        },
    )


# --- the same numbers in another dtype ---


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("instance", INSTANCES)
def test_an_operand_is_read_as_its_number_in_the_compute_dtype(instance: str, dtype: str) -> None:
    """Every result has the bits that converted operands give, but for the dtypes of their gradients."""
    workload = workload_for(instance, dtype)
    drawn = draw(workload)
    for dtypes in MIXED:
        inputs = with_dtypes(drawn, dtypes)
        # A float64 operand is first rounded to float32 beside a narrower input.
        wide = with_dtypes(inputs, (str(COMPUTE[dtype]).removeprefix("torch."),) * 4)
        results, expected = run(workload, inputs, instance), run(workload, wide, instance)
        for name in ("output", "mean", "rstd", "grad_input"):
            assert same_bits(results[name], expected[name]), (name, dtypes)
        for name in ("weight", "bias", "scale", "shift"):
            operand, gradient = getattr(inputs, name), results[f"grad_{name}"]
            if operand is not None:
                assert gradient.dtype is operand.dtype, (name, dtypes)
                rounded = expected[f"grad_{name}"].to(operand.dtype)
                torch.testing.assert_close(gradient, rounded, rtol=2 * _precision(operand.dtype, dtype), atol=0)


def _precision(operand: torch.dtype, dtype: str) -> float:
    return max(torch.finfo(operand).eps, torch.finfo(COMPUTE[dtype]).eps)


# --- without copies ---


class Recorder(TorchDispatchMode):
    """The names of the operators of torch that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(function._schema.name.removeprefix("aten::"))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("instance", INSTANCES)
def test_a_call_converts_and_copies_nothing(instance: str, dtype: str) -> None:
    workload = workload_for(instance, dtype)
    drawn = draw(workload)
    for dtypes in MIXED:
        inputs = with_dtypes(drawn, dtypes)
        norm, operands = workload.norm, inputs.operands
        forward = dispatch.make_plan(forward_problem(norm, operands), instance)
        results = forward(operands)
        given = inputs.backward_operands(results.mean, results.rstd)
        backward = dispatch.make_plan(backward_problem(norm, given), instance)
        with Recorder() as recorder:
            forward(operands)
            backward(given, (True,) * 5)
        assert recorder.names <= ALLOCATIONS


@pytest.mark.parametrize("statistics", DTYPES)
@pytest.mark.parametrize("instance", ["cpu.planes_split", "cpu.slabs_split"])
def test_given_statistics_are_read_in_their_dtype(instance: str, statistics: str) -> None:
    x = torch.randn(2, 6, 5, 7)
    if instance in CHANNELS_LAST:
        x = x.contiguous(memory_format=torch.channels_last)
    mean, var = (torch.rand(2, 6) + 0.5).to(getattr(torch, statistics))
    operands = Operands(x, mean=mean, var=var)
    plan = dispatch.make_plan(forward_problem(norm_of("batch_norm", training=False), operands), instance)
    with Recorder() as recorder:
        output = plan(operands).output
    assert recorder.names <= ALLOCATIONS
    expected = torch.nn.functional.batch_norm(x.double(), mean.double(), var.double())
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)


def test_no_kernel_is_compiled_for_the_dtypes_of_the_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel that converts serves all of them where loops run along the operands."""
    monkeypatch.setattr(compiler, "_loaded", {})
    monkeypatch.setattr(dispatch, "_plans", {})
    loaded = []
    for dtypes in MIXED:
        for instance in INSTANCES:
            workload = workload_for(instance, "float16")
            run(workload, with_dtypes(draw(workload), dtypes), instance)
        loaded.append({kernel for kernel in compiler._loaded if kernel.dtype == "float16"})
    for before, after in pairwise(loaded):
        assert {kernel.function for kernel in after - before} <= {"widen", "widen_own"}


# --- rounded once ---


def rounded(values: np.ndarray, dtype: torch.dtype) -> Tensor:
    """The nearest numbers of a dtype, ties to even: torch rounds float64 to float32 first."""
    if dtype is torch.float16:
        return torch.from_numpy(values.astype(np.float16))
    if dtype is torch.bfloat16:
        _, exponents = np.frexp(values)
        steps = np.maximum(exponents, -125) - 8
        return torch.from_numpy(np.ldexp(np.rint(np.ldexp(values, -steps)), steps)).bfloat16()
    return torch.from_numpy(values).to(dtype)


def summands(dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of float32 at and near the ties of a dtype, and tiny ones that move their sums off or onto the ties."""
    rng = np.random.default_rng(0)
    bits = {torch.float16: 11, torch.bfloat16: 8}.get(dtype, 24)
    exponents = rng.integers(-140 if dtype is torch.bfloat16 else -20, 15, 2048)
    ties = np.ldexp(2 * rng.integers(2 ** (bits - 1), 2**bits, 2048) + 1, exponents - bits)
    first = (ties * rng.choice([-1.0, 1.0], 2048)).astype(np.float32)
    second = (first * rng.choice([-(2.0**-30), 0.0, 2.0**-30, 2.0**-22], 2048)).astype(np.float32)
    return first, second


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("instance", INSTANCES)
def test_a_gradient_is_rounded_once(instance: str, dtype: torch.dtype) -> None:
    """From the sum over samples in float64: by way of float32, a sum just beyond a tie would be rounded as a tie."""
    first, second = summands(dtype)
    # Segments of rows are summed in float32, and so are four samples or more of short planes, which are rows.
    samples, last = (64, 63) if instance == "cpu.rows" else (2, 1)
    grad_output = torch.zeros(samples, 2048, 1 if instance == "cpu.rows" else 2)
    grad_output[0, :, 0], grad_output[last, :, 0] = torch.from_numpy(first), torch.from_numpy(second)
    x = torch.randn(grad_output.shape)
    family, groups = ("layer_norm", 2) if instance == "cpu.rows" else ("group_norm", 32)
    if instance in CHANNELS_LAST:
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
        grad_output = grad_output.transpose(1, 2).contiguous().transpose(1, 2)
    shape = (2048, 1) if instance == "cpu.rows" else (2048,)
    weight, bias = torch.ones(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
    statistics = torch.zeros(samples * groups if instance != "cpu.rows" else samples)
    with use_instance(instance):
        gradient = dispatch.backward(
            norm_of(family, groups),  # type: ignore[arg-type]
            BackwardOperands(grad_output, x, statistics, statistics + 1, weight, bias),
            (True, True, True, False, False),
        ).bias
    assert gradient is not None
    expected = rounded(first.astype(np.float64) + second.astype(np.float64), dtype)
    assert torch.equal(gradient.flatten(), expected)


# --- frames, which calls use one after the other ---


@pytest.fixture(autouse=True)
def restored_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("instance", INSTANCES)
def test_calls_at_once_have_a_frame_each(instance: str) -> None:
    workload = workload_for(instance, "bfloat16")
    drawn = [with_dtypes(draw(workload, seed=seed), ("bfloat16",) * 4) for seed in range(4)]
    expected = [run(workload, inputs, instance) for inputs in drawn]
    start = threading.Barrier(len(drawn))

    def work(index: int) -> list[str]:
        start.wait()
        return [
            name
            for _ in range(50)
            for name, value in run(workload, drawn[index], instance).items()
            if not same_bits(value, expected[index][name])
        ]

    with ThreadPoolExecutor(len(drawn)) as pool:
        assert [name for names in pool.map(work, range(len(drawn))) for name in names] == []


def test_a_frame_serves_any_number_of_threads_after_any_other() -> None:
    """What a worker keeps grows with the number of threads; the frame of the call before has room for its own."""
    workload = Workload("group_norm", (4, 32, 24, 24), 8, dtype="float16", activation="silu")
    inputs = draw(workload)
    results: list[Results] = []
    for count in (1, 3, 2, 5, 1):
        torch.set_num_threads(count)
        results.append(run(workload, inputs, "cpu.planes"))
    for result in results[1:]:
        assert all(same_bits(value, results[0][name]) for name, value in result.items())


@pytest.mark.parametrize("size", [100, 6000, 12000, 40000])
def test_calls_that_repeat_have_the_workspace_that_they_need(size: int) -> None:
    """A first call releases the frame that a call of the short way takes, with its workspace or without: here it holds
    the parameters, of which one thread keeps more than several do."""
    x, weight, bias = torch.randn(1, size).half(), torch.randn(size).half(), torch.randn(size).half()
    expected = fusednorm.layer_norm(x, (size,), weight.float(), bias.float())
    for _ in range(6):
        assert torch.equal(fusednorm.layer_norm(x, (size,), weight, bias), expected)


def test_the_frame_of_an_interrupted_call_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 24, 4201)
    operands = Operands(x)
    plan: Any = dispatch.make_plan(forward_problem(norm_of("group_norm", 8), operands), "cpu.planes")
    plan(operands)
    assert len(plan.idle) == 1

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    torch.set_num_threads(2)
    monkeypatch.setattr(threads, "_parallel", interrupt)
    with pytest.raises(KeyboardInterrupt):
        plan(operands)
    assert plan.idle == []
    monkeypatch.undo()
    y = plan(operands).output
    assert torch.equal(y, fusednorm.group_norm(x, 8))
