"""The Triton backend on a GPU: numerics against fp64, determinism, containment, graphs, streams, compile, size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from cpu_support import ACTIVATIONS, DTYPES, backward, faults, forward, run
from torch import Tensor

import fusednorm
from fusednorm.bench.operations import problem_of_workload
from fusednorm.bench.workloads import Init, Inputs, LayoutName, Workload, draw
from fusednorm.choice import instances
from fusednorm.norm import norm_of
from fusednorm.operands import BackwardOperands, Operands
from fusednorm.problem import Direction
from fusednorm.problems import backward_problem, forward_problem

pytestmark = pytest.mark.gpu

WORKLOADS = (
    Workload("group_norm", (2, 64, 17, 19), 8),
    Workload("group_norm", (3, 24, 8, 8), 8, modulated=True),
    Workload("group_norm", (1, 256, 64, 64), 1),
    Workload("group_norm", (2, 96, 33), 32),
    Workload("group_norm", (5, 12), 4),
    Workload("group_norm", (1, 32, 128, 128), 32),
    Workload("instance_norm", (2, 7, 5, 9, 11)),
    Workload("instance_norm", (1, 3, 200, 200)),
    Workload("batch_norm", (4, 33, 14, 14)),
    Workload("batch_norm", (64, 40)),
    Workload("batch_norm", (8, 64, 28, 28), training=False),
    Workload("layer_norm", (37, 768), 1),
    Workload("layer_norm", (3, 5, 100), 2),
    Workload("layer_norm", (2, 50000), 1),
    Workload("rms_norm", (9, 4096), 1),
    Workload("rms_norm", (300, 100), 1),
)
LAYOUTS: tuple[LayoutName, ...] = ("nchw", "nhwc", "channel_dim=-1")


def able(workload: Workload, inputs: Inputs, direction: Direction) -> set[str | None]:
    """The instances for GPUs that can run the workload in this direction, and None for the default one."""
    candidates = instances(problem_of_workload(direction, workload, inputs))
    gpu = ("triton.", "hopper.")
    return {None, *(c.instance.name for c in candidates if c.reason is None and c.instance.name.startswith(gpu))}


def check(workload: Workload, init: Init = "normal") -> None:
    """Every instance for GPUs that can run the workload, and the default one."""
    inputs = draw(workload, init, device="cuda")
    if not workload.training:
        for name in able(workload, inputs, "inference"):
            assert faults(workload, inputs, forward(workload, inputs, name), "inference") == [], (workload.key, name)
        return
    forwards, backwards = able(workload, inputs, "forward"), able(workload, inputs, "backward")
    for name in forwards | backwards:
        results = forward(workload, inputs, name if name in forwards else None)
        back = name if name in backwards else None
        results |= backward(workload, inputs, results["mean"], results["rstd"], back)
        assert faults(workload, inputs, results) == [], (workload.key, init, name)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.key)
def test_numerics(workload: Workload, dtype: str, layout: LayoutName) -> None:
    if workload.row_family and layout != "nchw":
        pytest.skip("rows have one layout")
    check(replace(workload, dtype=dtype, layout=layout, activation="silu"))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_activations(dtype: str, activation: str | None) -> None:
    check(Workload("group_norm", (2, 64, 15, 16), 8, dtype=dtype, activation=activation))


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("init", ["offset", "large", "integer"])
def test_hard_data(init: Init, dtype: str, layout: LayoutName) -> None:
    for family, groups in (("group_norm", 4), ("batch_norm", 0), ("layer_norm", 1)):
        shape = (16, 512) if family == "layer_norm" else (2, 16, 60, 60)
        check(Workload(family, shape, groups, dtype=dtype, layout=layout), init)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("last", [False, True])
def test_units_of_equal_numbers(last: bool, dtype: torch.dtype) -> None:
    """The mean of equal numbers of 16 bits is that number, by every instance, so that x - mean is 0."""
    norms: list[tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = [
        (lambda x: fusednorm.group_norm(x, 8), (2, 24, 9, 40)),
        (lambda x: fusednorm.group_norm(x, 32), (2, 320, 24, 40)),
        (lambda x: fusednorm.group_norm(x, 8), (1, 64, 7, 7)),
        (fusednorm.instance_norm, (3, 24, 31, 40)),
        (lambda x: fusednorm.batch_norm(x, None, None, training=True), (6, 24, 9, 40)),
        (lambda x: fusednorm.batch_norm(x, None, None, training=True), (1, 2, 6, 63)),
        (lambda x: fusednorm.layer_norm(x, (48,), channel_dim=1), (2, 48, 9, 40)),
        (lambda x: fusednorm.layer_norm(x, (1400,)), (20, 1400)),
        (lambda x: fusednorm.layer_norm(x, (3000,)), (300, 3000)),
    ]
    names = {"triton.whole", "triton.held", "triton.rows", "triton.columns", "triton.tiles"}
    names |= {"hopper.resident", "hopper.slabs", "hopper.columns"}
    ran = set()
    for norm, shape in norms:
        x = torch.full(shape, -1000.0, device="cuda", dtype=dtype)
        if last and len(shape) == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        for name in names:
            try:
                with fusednorm.use_instance(name):
                    y = norm(x)
            except RuntimeError:  # this one does not take it
                continue
            ran.add(name)
            assert not y.any(), (name, shape)
    of_hopper = {name for name in names if name.startswith("hopper")}
    other = {"hopper.resident", "hopper.columns", "triton.columns"} if last else {"hopper.slabs"}
    hopper = torch.cuda.get_device_capability() >= (9, 0)
    assert ran == names - other - (set() if hopper else of_hopper)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_bitwise_over_100_repetitions(layout: LayoutName) -> None:
    workload = Workload("group_norm", (2, 320, 64, 64), 32, dtype="bfloat16", layout=layout, activation="silu")
    inputs = draw(workload, device="cuda")
    first = run(workload, inputs)
    for _ in range(100):
        again = run(workload, inputs)
        assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_nan_stays_in_its_group(layout: LayoutName) -> None:
    workload = Workload("group_norm", (2, 64, 40, 40), 8, layout=layout, activation="silu")
    inputs = draw(workload, device="cuda")
    clean = run(workload, inputs)
    inputs.input[1, 9, 3, 3] = float("nan")
    for name in (None, "triton.tiles"):
        dirty = run(workload, inputs, name)
        for result in ("output", "grad_input"):
            bad = dirty[result].isnan().reshape(2, 8, 8, -1)
            assert bad[1, 1].all()
            assert bad.sum() == bad[1, 1].sum()
        assert clean["output"].isfinite().all()


def test_gradient_of_any_strides() -> None:
    x = torch.randn(2, 64, 16, 16, device="cuda", requires_grad=True)
    for grad in (
        torch.randn((), device="cuda").expand(2, 64, 16, 16),
        torch.randn(2, 16, 16, 64, device="cuda").permute(0, 3, 1, 2),
    ):
        ours = torch.autograd.grad(fusednorm.group_norm(x, 8), x, grad)[0]
        torch.testing.assert_close(ours, torch.autograd.grad(torch.nn.functional.group_norm(x, 8), x, grad)[0])


def test_graph_capture() -> None:
    x = torch.randn(2, 64, 32, 32, device="cuda")
    weight, bias = torch.randn(2, 64, device="cuda")
    fusednorm.group_norm(x, 8, weight, bias, activation="silu")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = fusednorm.group_norm(x, 8, weight, bias, activation="silu")
    x.normal_()
    graph.replay()
    assert torch.equal(y, fusednorm.group_norm(x, 8, weight, bias, activation="silu"))


def test_calls_in_a_row() -> None:
    """Kernels that start before the ones before them have ended read what those wrote."""
    xs = [torch.randn(2, 64, 32, 32, device="cuda", requires_grad=True) for _ in range(8)]

    def chain(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x
        for _ in range(6):
            y = fusednorm.group_norm(y, 4, activation="silu")
        return y.detach(), torch.autograd.grad(y, x, x.detach())[0]

    expected = [chain(x) for x in xs]
    for x in xs:
        chain(x)
    torch.cuda.synchronize()
    results = [chain(x) for _ in range(20) for x in xs]
    for place, (y, gradient) in enumerate(results):
        assert torch.equal(y, expected[place % 8][0])
        assert torch.equal(gradient, expected[place % 8][1])


def test_streams() -> None:
    inputs = [torch.randn(4, 64, 64, 64, device="cuda") for _ in range(4)]
    expected = [fusednorm.group_norm(x, 8) for x in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    for _ in range(20):
        results = []
        for x, stream in zip(inputs, streams, strict=True):
            with torch.cuda.stream(stream):
                results.append(fusednorm.group_norm(x, 8))
        torch.cuda.synchronize()
        assert all(map(torch.equal, results, expected))


def test_compile_fullgraph() -> None:
    norm = fusednorm.nn.GroupNorm(8, 64, activation="silu").cuda()
    x = torch.randn(2, 64, 16, 16, device="cuda", requires_grad=True)
    compiled = torch.compile(norm, fullgraph=True)
    y = compiled(x)
    assert torch.equal(y, norm(x))
    gradient = torch.autograd.grad(y.sum(), x)[0]
    assert torch.equal(gradient, torch.autograd.grad(norm(x).sum(), x)[0])


def test_compile_dynamic_shapes() -> None:
    norm = fusednorm.nn.GroupNorm(8, 64, activation="silu").cuda()
    compiled = torch.compile(norm, fullgraph=True, dynamic=True)
    for size in (12, 16, 21):
        x = torch.randn(2, 64, size, size + 1, device="cuda", requires_grad=True)
        assert torch.equal(compiled(x), norm(x))
        gradient = torch.autograd.grad(compiled(x).sum(), x)[0]
        assert torch.equal(gradient, torch.autograd.grad(norm(x).sum(), x)[0])


def test_more_than_2_31_elements() -> None:
    x = torch.randn(1, 2, (1 << 30) + 8, device="cuda", dtype=torch.bfloat16)
    y = fusednorm.group_norm(x, 1)
    tail = x[..., -8:].double()
    torch.testing.assert_close(y[..., -8:].double(), tail, rtol=1e-2, atol=1e-2)
    gradient = fusednorm.ops.group_norm_backward(x, x, torch.zeros(1, 1).cuda(), torch.ones(1, 1).cuda(), 1, None, None)
    assert float(gradient[0][..., -8:].abs().max()) < 0.1


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_peak_memory(layout: torch.memory_format) -> None:
    """Forward and backward with the activation take no more than torch's group norm alone."""
    x = torch.randn(2, 320, 128, 128, device="cuda", dtype=torch.bfloat16).contiguous(memory_format=layout)
    leaves = (x.requires_grad_(), *(torch.randn(320, device="cuda").bfloat16().requires_grad_() for _ in range(2)))
    grad = torch.randn_like(x)

    def peak(norm: Callable[[], torch.Tensor]) -> int:
        torch.autograd.grad(norm(), leaves, grad)
        torch.cuda.reset_peak_memory_stats()
        torch.autograd.grad(norm(), leaves, grad)
        return torch.cuda.max_memory_allocated()

    ours = peak(lambda: fusednorm.group_norm(x, 32, *leaves[1:], activation="silu"))
    assert ours <= 1.001 * peak(lambda: torch.nn.functional.group_norm(x, 32, *leaves[1:]))


def test_every_instance_says_why_not() -> None:
    x = torch.empty(2, 64, 300, 300, device="cuda")
    problems = (
        forward_problem(norm_of("group_norm", 8), Operands(x)),
        backward_problem(norm_of("group_norm", 8), BackwardOperands(x, x, x, x)),
    )
    for problem in problems:
        able = ("triton.tiles", "hopper.resident", "reference")
        assert all(c.reason for c in instances(problem) if c.instance.name not in able)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("workload", [WORKLOADS[0], WORKLOADS[8], WORKLOADS[11], WORKLOADS[13]], ids=lambda w: w.key)
def test_tensors_of_another_device_than_the_current_one(workload: Workload) -> None:
    """Every instance launches on the device of its tensors, whose memory the current one may not reach."""
    inputs = draw(workload, device="cuda:1")
    forwards, backwards = able(workload, inputs, "forward"), able(workload, inputs, "backward")
    for name in forwards | backwards:
        front, back = (name if name in names else None for names in (forwards, backwards))
        found = []
        for current in (0, 1, 0):
            with torch.cuda.device(current):
                results = forward(workload, inputs, front)
                found.append(results | backward(workload, inputs, results["mean"], results["rstd"], back))
                assert torch.cuda.current_device() == current
        assert all(tensor.get_device() == 1 for tensor in found[0].values())
        assert faults(workload, inputs, found[0]) == []
        for other in found[1:]:
            assert all(torch.equal(found[0][key], other[key]) for key in other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics_of_training(momentum: float | None, dtype: torch.dtype) -> None:
    """In buffers of both dtypes, over calls that repeat, and in a replayed graph."""
    ours, theirs = (
        module(700, momentum=momentum, device="cuda", dtype=dtype)
        for module in (fusednorm.nn.BatchNorm2d, torch.nn.BatchNorm2d)
    )
    x = torch.randn(6, 700, 9, 9, device="cuda").to(dtype) * 3 + 1
    for step in range(4):
        for module in (ours, theirs):
            module(x * (step + 1))
    wide = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {}
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), **wide)
    if momentum is None:
        return
    before = ours.num_batches_tracked.item()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours(x)
    for _ in range(3):
        graph.replay()
        theirs(x)
    assert ours.num_batches_tracked.item() == before + 3
    torch.testing.assert_close(ours.running_mean, theirs.running_mean, **wide)


def test_running_statistics_move_in_one_launch() -> None:
    module = fusednorm.nn.BatchNorm2d(64, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(4, 64, 7, 7, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        module(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        module(x)
        torch.cuda.synchronize()
    kernels = [event.name for event in profile.events() if event.device_type.name == "CUDA"]
    # Before them the profiler may see what filled the module's tensors.
    assert kernels[kernels.index("held_forward") :] == ["held_forward", "move_statistics"], kernels
