"""The Hopper backend on a GPU: numerics against fp64, the same bits, graphs, streams, containment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from cpu_support import ACTIVATIONS, EVERYTHING, backward, faults, forward
from test_triton_sums_gpu import plans_made
from torch import Tensor
from torch.nn import functional

import fusednorm
from fusednorm.backends.hopper import instances
from fusednorm.backends.hopper.instances import INSTANCES, RESIDENT, SLABS, unavailable
from fusednorm.bench.operations import problem_of_workload
from fusednorm.bench.workloads import Init, Inputs, Workload, draw
from fusednorm.choice import named
from fusednorm.norm import Family
from fusednorm.operands import BackwardOperands, Operands
from fusednorm.problem import Problem

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(unavailable() is not None, reason=f"no Hopper GPU: {unavailable()}"),
]
NAME = "hopper.resident"
#: Units in one wave, in several, and across waves; tiles within channels, across them, and many channels to a tile. In
#: the backward tiles that channels fill, or not, and chunks whose tiles are of one channel or several.
WORKLOADS = (
    Workload("group_norm", (2, 64, 64, 64), 8),
    Workload("group_norm", (37, 64, 40, 52), 4),
    Workload("group_norm", (300, 96, 28, 30), 12, modulated=True),
    Workload("group_norm", (5, 48, 1304, 8), 3),
    Workload("group_norm", (7, 640, 4, 10), 32),
    Workload("group_norm", (3, 16, 512, 512), 2),
    Workload("instance_norm", (9, 50, 16, 16, 31)),
    Workload("instance_norm", (2, 11, 1000, 1000), modulated=True),
    Workload("group_norm", (70, 24, 64, 64), 8, modulated=True),
    Workload("group_norm", (9, 20, 128, 64), 4),
    Workload("group_norm", (1, 6, 1000, 1024), 1),
)
#: Channels of all samples: tiles within planes, across two of them, and many planes to a tile.
BATCHES = (
    Workload("batch_norm", (5, 16, 64, 128)),
    Workload("batch_norm", (32, 24, 56, 56)),
    Workload("batch_norm", (7, 33, 40, 52)),
    Workload("batch_norm", (300, 16, 4, 10)),
    Workload("batch_norm", (3, 16, 512, 512)),
    Workload("batch_norm", (9, 50, 16, 16, 31)),
    Workload("batch_norm", (1, 40, 1000, 64)),
    Workload("batch_norm", (700, 3, 1, 8)),
)
#: Planes that are no whole number of vectors, of which the backward alone runs: several tiles to a plane and one, in
#: one wave, in several, and with a leader; channels of all samples.
SHIFTED = (
    Workload("group_norm", (2, 64, 63, 65), 8),
    Workload("group_norm", (37, 64, 41, 53), 4),
    Workload("group_norm", (300, 96, 27, 31), 12, modulated=True),
    Workload("group_norm", (3, 16, 513, 511), 2),
    Workload("group_norm", (7, 640, 3, 7), 32),
    Workload("instance_norm", (9, 50, 17, 15, 31)),
    Workload("instance_norm", (2, 11, 999, 1001), modulated=True),
    Workload("batch_norm", (5, 16, 63, 127)),
    Workload("batch_norm", (32, 24, 57, 57)),
    Workload("batch_norm", (300, 16, 5, 11)),
    Workload("batch_norm", (9, 50, 16, 17, 31)),
    Workload("batch_norm", (700, 3, 1, 18)),
)
#: Whole slabs to a wave, and slabs across waves; pieces of each size, uneven chunks, lanes that no channel has, one
#: chunk, many groups, long slabs.
SLAB_WORKLOADS = tuple(
    replace(workload, layout="nhwc")
    for workload in (
        Workload("group_norm", (20, 256, 32, 32), 32),
        Workload("group_norm", (37, 128, 40, 53), 32, modulated=True),
        Workload("group_norm", (9, 320, 31, 33), 32),
        Workload("group_norm", (2, 96, 9, 40, 64), 4),
        Workload("instance_norm", (5, 72, 30, 31), modulated=True),
        Workload("group_norm", (300, 640, 4, 5), 32),
        Workload("group_norm", (70, 24, 64, 65), 3, modulated=True),
        Workload("group_norm", (1, 256, 200, 251), 16),
        Workload("group_norm", (3, 64, 200, 201), 1),
        Workload("group_norm", (2, 128, 256, 256), 32),
    )
)
DTYPES = ("bfloat16", "float16", "float32")


def name_of(workload: Workload) -> str:
    return SLABS.name if workload.layout == "nhwc" else NAME


def check(workload: Workload, init: Init = "normal") -> None:
    """The forward, or that of tiles where the instance has none, and the backward where it has one."""
    inputs, name = draw(workload, init, device="cuda"), name_of(workload)
    instance = next(one for one in INSTANCES if one.name == name)
    forwards = instance.supports(problem_of_workload("forward", workload, inputs)) is None
    results = forward(workload, inputs, name if forwards else "triton.tiles")
    assert faults(workload, inputs, results, "forward") == [], (workload.key, init)
    if instance.supports(problem_of_workload("backward", workload, inputs)) is None:
        results |= backward(workload, inputs, results["mean"], results["rstd"], name)
        assert faults(workload, inputs, results) == [], (workload.key, init)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("workload", WORKLOADS + BATCHES + SHIFTED + SLAB_WORKLOADS, ids=lambda workload: workload.key)
def test_numerics(workload: Workload, dtype: str) -> None:
    check(replace(workload, dtype=dtype, activation="silu"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: str | None, dtype: str) -> None:
    for workload in (WORKLOADS[1], WORKLOADS[-2], BATCHES[2], SHIFTED[0], SHIFTED[9], SLAB_WORKLOADS[1]):
        check(replace(workload, activation=activation, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("init", ["offset", "zeros", "large"])
def test_hard_inputs(init: Init, dtype: str) -> None:
    for workload in (*WORKLOADS[1:4], *WORKLOADS[-3:], *BATCHES[1:4], *SHIFTED[1:4], *SHIFTED[-3:]):
        check(replace(workload, dtype=dtype), init)
    for workload in (*SLAB_WORKLOADS[:3], *SLAB_WORKLOADS[-3:]):
        check(replace(workload, dtype=dtype), init)


def _inputs(workload: Workload) -> tuple[Inputs, Operands]:
    inputs = draw(workload, "normal", device="cuda")
    return inputs, Operands(inputs.input, inputs.weight, inputs.bias, inputs.scale, inputs.shift)


@pytest.mark.parametrize("workload", WORKLOADS + BATCHES + SLAB_WORKLOADS, ids=lambda workload: workload.key)
def test_every_configuration_gives_the_result_of_the_first(workload: Workload) -> None:
    """Up to a rounding of the statistics: configurations add in different orders."""
    workload = replace(workload, dtype="float32")
    inputs, operands = _inputs(workload)
    problem = problem_of_workload("forward", workload, inputs)
    instance = SLABS if workload.layout == "nhwc" else RESIDENT
    configs: Sequence[Any] = instance.configs(problem)
    expected = instance.plan(problem)(operands)
    for config in configs[1:][:: max(1, len(configs) // 12)]:
        found = instance.plan(problem, config)(operands)
        torch.testing.assert_close(found.output, expected.output, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.mean, expected.mean, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found.rstd, expected.rstd, rtol=2e-6, atol=0)


@pytest.mark.parametrize(
    "workload",
    WORKLOADS[1:4] + BATCHES[2:3] + SHIFTED[1:3] + SHIFTED[8:10] + SLAB_WORKLOADS[:2] + SLAB_WORKLOADS[4:5],
    ids=lambda workload: workload.key,
)
def test_every_configuration_of_a_backward_gives_the_result_of_the_first(workload: Workload) -> None:
    workload = replace(workload, dtype="float32", activation="silu")
    inputs, operands = _inputs(workload)
    problem = problem_of_workload("forward", workload, inputs)
    forward = named(problem, "triton.tiles").plan(problem)(operands)
    given = BackwardOperands(
        inputs.grad_output, inputs.input, forward.mean, forward.rstd, inputs.weight, inputs.bias, inputs.scale,
        inputs.shift,
    )  # fmt: skip
    problem = problem_of_workload("backward", workload, inputs)
    instance = SLABS if workload.layout == "nhwc" else RESIDENT
    configs: Sequence[Any] = instance.configs(problem)
    assert len({(one.vectors, one.tiles) for one in configs}) > 3
    expected = instance.plan(problem)(given, EVERYTHING)
    for config in configs[1:][:: max(1, len(configs) // 12)]:
        found = instance.plan(problem, config)(given, EVERYTHING)
        for name in ("input", "weight", "bias", "scale", "shift"):
            if getattr(expected, name) is not None:
                torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-4, atol=1e-4)


def _call(shape: tuple[int, ...], groups: int, last: bool = False) -> Callable[[], Tensor]:
    """The forward and the backward of a call that gets the instance by itself, as one tensor."""
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    x = x.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format).requires_grad_()
    weight, bias = (torch.randn(shape[1], device="cuda", requires_grad=True) for _ in range(2))
    for direction in ("forward", "backward"):
        found = fusednorm.explain(fusednorm.group_norm, x, groups, weight, bias, activation="silu", direction=direction)
        assert found.instance == (SLABS.name if last else NAME)

    def call() -> Tensor:
        output = fusednorm.group_norm(x, groups, weight, bias, activation="silu")
        gradients = torch.autograd.grad(output, (x, weight, bias), output.detach())
        return torch.cat([tensor.detach().float().flatten() for tensor in (output, *gradients)])

    return call


@pytest.mark.parametrize("last", [False, True])
def test_a_large_call_gives_the_same_bits_each_time(last: bool) -> None:
    call = _call((24, 256, 64, 64), 32, last)
    expected = call()
    assert all(torch.equal(call(), expected) for _ in range(200))


@pytest.mark.parametrize("last", [False, True])
def test_a_graph_that_is_replayed_gives_the_same_bits_each_time(last: bool) -> None:
    call = _call((24, 256, 64, 64), 32, last)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # autograd's first call on a stream is not for a graph
        expected = call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = [call() for _ in range(3)]
    for _ in range(200):
        graph.replay()
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(one, expected) for one in found)


def test_streams_that_run_at_the_same_time_do_not_disturb_one_another() -> None:
    shapes = [(16, 256, 64, 64), (64, 128, 64, 64), (12, 64, 128, 256), (9, 96, 256, 128)]
    calls = [_call(shape, 16) for shape in shapes] + [_call((16, 256, 64, 64), 16, last=True)]
    expected = [call() for call in calls]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in calls]
    found: list[list[Tensor]] = [[] for _ in calls]
    for _ in range(20):
        for call, stream, results in zip(calls, streams, found, strict=True):
            with torch.cuda.stream(stream):
                results[:] = [*results[-2:], call()]
    torch.cuda.synchronize()
    for results, one in zip(found, expected, strict=True):
        assert all(torch.equal(result, one) for result in results)


@pytest.mark.parametrize("name", [NAME, SLABS.name])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_unit(value: float, name: str) -> None:
    x = torch.randn(37, 64, 40, 52, device="cuda", dtype=torch.bfloat16)
    if name == SLABS.name:
        x = x.contiguous(memory_format=torch.channels_last)
    with fusednorm.use_instance(name):
        expected = fusednorm.group_norm(x, 4)
        x[5, 20, 3, 4] = value
        found = fusednorm.group_norm(x, 4)
    assert found[5, 16:32].isnan().all()
    found[5, 16:32] = expected[5, 16:32]
    assert torch.equal(found, expected)


@pytest.mark.parametrize("norm", ["group_norm", "batch_norm"])
def test_what_is_not_finite_stays_in_its_unit_where_vectors_have_elements_of_two(norm: Family) -> None:
    """Also where it is the first element of a plane, or the last, beside another unit's."""
    workload = Workload(norm, (9, 64, 41, 53), 4 * (norm == "group_norm"), "bfloat16", activation="silu")
    inputs = draw(workload, device="cuda")
    made = forward(workload, inputs, "triton.tiles")

    def gradient() -> Tensor:
        return backward(workload, inputs, made["mean"], made["rstd"], NAME)["grad_input"]

    expected = gradient()
    for place in ((0, 0), (40, 52)):
        kept = inputs.grad_output.clone()
        inputs.grad_output[(5, 17, *place)] = float("nan")
        found = gradient()
        inputs.grad_output.copy_(kept)
        poisoned = (slice(None), 17) if norm == "batch_norm" else (5, slice(16, 32))
        assert found[poisoned].isnan().all()
        found[poisoned] = expected[poisoned]
        assert torch.equal(found, expected)


def test_a_batch_of_a_larger_one_and_an_input_between_16_bytes() -> None:
    block = torch.randn(37, 80, 40, 52, device="cuda", dtype=torch.bfloat16)
    part = block[:, 8:72]
    shifted = torch.empty(part.numel() + 1, device="cuda", dtype=torch.bfloat16)[1:].view(part.shape).copy_(part)
    with fusednorm.use_instance(NAME):
        expected = fusednorm.group_norm(part.contiguous(), 4, activation="silu")
        assert torch.equal(fusednorm.group_norm(part, 4, activation="silu"), expected)
        found = fusednorm.group_norm(shifted, 4, activation="silu")
    torch.testing.assert_close(found, expected)


def test_channels_of_a_larger_image_of_channels_last() -> None:
    block = torch.randn(12, 96, 40, 52, device="cuda", dtype=torch.bfloat16).contiguous(
        memory_format=torch.channels_last
    )
    part = block[:, 16:80]
    with fusednorm.use_instance(SLABS.name):
        expected = fusednorm.group_norm(part.contiguous(memory_format=torch.channels_last), 4, activation="silu")
        assert torch.equal(fusednorm.group_norm(part, 4, activation="silu"), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_large_batch_norm_moves_running_statistics(dtype: torch.dtype) -> None:
    x = torch.randn(40, 256, 64, 56, device="cuda").mul_(3).add_(2).to(dtype)
    assert fusednorm.explain(fusednorm.batch_norm, x, None, None, training=True).instance == NAME
    ours, theirs = (module(256).cuda() for module in (fusednorm.nn.BatchNorm2d, torch.nn.BatchNorm2d))
    for _ in range(3):
        ours(x)
        theirs(x.float())
    torch.testing.assert_close(ours.running_mean, theirs.running_mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.running_var, theirs.running_var, rtol=1e-5, atol=0)


# --- sums around the norm ---


def norm_of_test(t: dict[str, Tensor], groups: int, x: Tensor, **keywords: Any) -> Any:
    """group_norm, or batch_norm where there are no groups."""
    if groups:
        return fusednorm.group_norm(x, groups, t["weight"], t["bias"], **keywords)
    return fusednorm.batch_norm(x, None, None, t["weight"], t["bias"], True, **keywords)


def plain_norm(t: dict[str, Tensor], groups: int, x: Tensor) -> Tensor:
    """The same by torch."""
    if groups:
        return torch.nn.functional.group_norm(x, groups, t["weight"], t["bias"])
    return torch.nn.functional.batch_norm(x, None, None, t["weight"], t["bias"], True)


@pytest.fixture
def reads_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """hopper.resident and hopper.slabs run whatever they can, of any size."""
    default = instances.choose

    def able(problem: Problem) -> Any:
        return next((one for one in (RESIDENT, SLABS) if one.supports(problem) is None), None) or default(problem)

    monkeypatch.setattr(instances, "choose", able)


@pytest.mark.parametrize(
    "added", [("pre_add",), ("numbers",), ("pre_add", "pre_gate"), ("pre_add", "post_add")], ids=str
)
@pytest.mark.parametrize(
    ("shape", "groups", "dtype", "last"),
    [
        ((13, 64, 192, 128), 16, torch.bfloat16, False),
        ((9, 48, 100, 76), 3, torch.float16, False),
        ((70, 640, 4, 10), 32, torch.float32, False),
        ((3, 16, 512, 512), 2, torch.bfloat16, False),
        ((300, 96, 28, 30), 12, torch.float32, False),
        ((32, 24, 56, 56), 0, torch.bfloat16, False),
        ((300, 16, 4, 10), 0, torch.float16, False),
        ((5, 16, 64, 128), 0, torch.float32, False),
        ((8, 128, 96, 128), 32, torch.bfloat16, True),
        ((7, 320, 31, 33), 32, torch.float16, True),
        ((5, 64, 67, 61), 8, torch.float32, True),
        ((3, 48, 200, 211), 6, torch.bfloat16, True),
    ],
    ids=str,
)
@pytest.mark.usefixtures("reads_once")
def test_a_sum_before_a_large_norm_is_made_in_the_one_read(
    shape: tuple[int, ...],
    groups: int,
    dtype: torch.dtype,
    last: bool,
    added: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chunks that fill units and others, tiles within channels, across two, and across many; slabs of whole lanes and
    of others."""
    sizes = {"x": shape, "pre_add": shape, "numbers": shape[:2], "pre_gate": shape[:2], "post_add": shape}
    sizes = {name: size for name, size in sizes.items() if name == "x" or name in added}
    sizes |= {"weight": shape[1:2], "bias": shape[1:2]}
    form = torch.channels_last if last else torch.contiguous_format
    t = {name: (torch.randn(size, device="cuda") + 1).to(dtype) for name, size in sizes.items()}
    t = {name: (one.contiguous(memory_format=form) if one.dim() == 4 else one) for name, one in t.items()}
    t = {name: one.requires_grad_() for name, one in t.items()}
    grads = [torch.randn(shape, device="cuda").to(dtype).contiguous(memory_format=form) for _ in range(2)]
    made = plans_made(monkeypatch)
    # Of millions of float32 numbers some lie within a rounding of 0, where relu's slope is 0 or 1 by chance.
    activation = "silu" if dtype == torch.float32 else "relu"

    def ours(t: dict[str, Tensor], return_sum: bool) -> Any:
        sums = {"pre_add": t["numbers"] if "numbers" in t else t["pre_add"], "return_sum": return_sum}
        sums |= {name: t[name] for name in ("pre_gate", "post_add") if name in t}
        return norm_of_test(t, groups, t["x"], activation=activation, **sums)

    def total(t: dict[str, Tensor]) -> Tensor:
        s = t["pre_add"] if "pre_add" in t else t["numbers"][:, :, None, None]
        return t["x"] + (s * t["pre_gate"][:, :, None, None] if "pre_gate" in t else s)

    def plain(t: dict[str, Tensor], s: Tensor) -> tuple[Tensor, Tensor]:
        z = plain_norm(t, groups, s)
        return getattr(functional, activation)(z + t["post_add"] if "post_add" in t else z), s

    outputs = ours(t, True)
    found = [*(one.detach() for one in outputs), *torch.autograd.grad(outputs, list(t.values()), grads)]
    assert made[0] == ("SlabsSumForward" if last else "ResidentSumForward")
    with torch.no_grad():
        assert torch.equal(ours(t, False), outputs[0])  # nothing keeps the sum
    assert all(torch.equal(one, other) for one, other in zip(ours(t, True), outputs, strict=True))

    wide = {name: one.detach().double().requires_grad_() for name, one in t.items()}
    s = total(wide)
    right = plain(wide, s + (outputs[1].double() - s).detach())
    expected = [*(one.detach() for one in right)]
    expected += torch.autograd.grad(right, list(wide.values()), [one.double() for one in grads])
    outputs = plain(t, total(t))
    theirs = [*(one.detach() for one in outputs), *torch.autograd.grad(outputs, list(t.values()), grads)]
    finfo = torch.finfo(dtype)
    torch.testing.assert_close(found[1].double(), s.detach(), rtol=finfo.eps, atol=finfo.tiny * finfo.eps)
    for name, one, other, value in zip(["y", "s", *t], found, theirs, expected, strict=True):
        error, plain_error = ((each.double() - value).square().mean().sqrt() for each in (one, other))
        floor = finfo.eps * value.square().mean().sqrt() / 2
        assert error <= 1.5 * plain_error + floor, name


@pytest.mark.parametrize(
    ("shape", "groups", "dtype", "activation"),
    [
        ((13, 64, 192, 128), 16, torch.bfloat16, "relu"),
        ((37, 64, 64, 128), 4, torch.float16, "leaky_relu"),
        ((13, 64, 192, 128), 16, torch.float32, "silu"),
        ((5, 48, 512, 24), 3, torch.float32, "relu"),
        ((3, 16, 512, 512), 2, torch.bfloat16, "relu"),
        ((32, 24, 56, 56), 0, torch.bfloat16, "relu"),
        ((300, 16, 4, 10), 0, torch.float32, "silu"),
        ((5, 16, 64, 128), 0, torch.float16, "leaky_relu"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("reads_once")
def test_a_sum_behind_a_large_norm_is_added_in_the_one_read(
    shape: tuple[int, ...], groups: int, dtype: torch.dtype, activation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"x": shape, "post_add": shape, "weight": shape[1:2], "bias": shape[1:2]}
    t = {name: (torch.randn(size, device="cuda") + 1).to(dtype).requires_grad_() for name, size in sizes.items()}
    grad = torch.randn(shape, device="cuda").to(dtype)
    made = plans_made(monkeypatch)

    def run() -> list[Tensor]:
        y = norm_of_test(t, groups, t["x"], activation=activation, post_add=t["post_add"])
        return [y.detach(), *torch.autograd.grad(y, list(t.values()), grad)]

    def plain(t: dict[str, Tensor]) -> Tensor:
        z = plain_norm(t, groups, t["x"]) + t["post_add"]
        y: Tensor = getattr(torch.nn.functional, activation)(z)
        return y

    wide = {name: one.detach().double().requires_grad_() for name, one in t.items()}
    right, theirs = plain(wide), plain(t)
    # Of millions of numbers some lie within a rounding of 0, where relu's slope is 0 or 1 by chance.
    grad[(plain_norm(wide, groups, wide["x"]) + wide["post_add"]).abs() < torch.finfo(dtype).eps] = 0.0
    found = run()
    assert made == ["ResidentSumForward", "ResidentSumBackward"]
    for _ in range(5):
        assert all(torch.equal(one, other) for one, other in zip(found, run(), strict=True))
    expected = [right.detach(), *torch.autograd.grad(right, list(wide.values()), grad.double())]
    others = [theirs.detach(), *torch.autograd.grad(theirs, list(t.values()), grad)]
    for name, one, other, value in zip(["y", *t], found, others, expected, strict=True):
        ours, plain_error = ((each.double() - value).square().mean().sqrt() for each in (one, other))
        floor = torch.finfo(dtype).eps * value.square().mean().sqrt() / 2
        assert ours <= 1.5 * plain_error + floor, name
