"""Compiled graphs on a GPU: right in every mode, in launches alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_summing import SUMS
from torch import Tensor
from torch._inductor import config
from torch._inductor.utils import run_and_get_code

import fusednorm
from fusednorm.tolerance import judge

pytestmark = pytest.mark.gpu

BF16, LAST = torch.bfloat16, torch.channels_last
Call = Callable[..., Tensor]
#: A call of ours, the same by torch's functions, and the shapes of the tensors.
CALLS: dict[str, tuple[Call, Call, tuple[tuple[int, ...], ...]]] = {
    "group_norm": (
        lambda x, w, b: fusednorm.group_norm(x, 32, w, b, activation="silu"),
        lambda x, w, b: F.silu(F.group_norm(x, 32, w, b)),
        ((4, 64, 32, 32), (64,), (64,)),
    ),
    "instance_norm": (
        lambda x, w, b: fusednorm.instance_norm(x, weight=w, bias=b, activation="leaky_relu"),
        lambda x, w, b: F.leaky_relu(F.instance_norm(x, weight=w, bias=b)),
        ((4, 64, 32, 32), (64,), (64,)),
    ),
    "batch_norm": (
        lambda x, w, b: fusednorm.batch_norm(x, None, None, w, b, True, activation="relu"),
        lambda x, w, b: F.relu(F.batch_norm(x, None, None, w, b, True)),
        ((8, 64, 28, 28), (64,), (64,)),
    ),
    "layer_norm": (
        lambda x, w, b: fusednorm.layer_norm(x, (1024,), w, b),
        lambda x, w, b: F.layer_norm(x, (1024,), w, b),
        ((4096, 1024), (1024,), (1024,)),
    ),
    "rms_norm": (
        lambda x, w: fusednorm.rms_norm(x, (1024,), w, 1e-6),
        lambda x, w: F.rms_norm(x, (1024,), w, 1e-6),
        ((4096, 1024), (1024,)),
    ),
}


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.manual_seed(0)
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def step(call: Call, tensors: list[Tensor], dy: Tensor) -> list[Tensor]:
    torch.compiler.cudagraph_mark_step_begin()
    y = call(*tensors)
    return [result.detach().clone() for result in (y, *torch.autograd.grad(y, tensors, dy))]


def drawn(shapes: tuple[tuple[int, ...], ...], last: bool) -> list[Tensor]:
    tensors = [torch.randn(shape, device="cuda", dtype=BF16) for shape in shapes]
    if last:
        tensors[0] = tensors[0].to(memory_format=LAST)
    return [tensor.requires_grad_() for tensor in tensors]


def faults(ours: Call, theirs: Call, tensors: list[Tensor]) -> list[str]:
    """What is worse than torch's functions with float32 statistics are, by the rule of tolerance.py."""
    dy = torch.randn_like(tensors[0])
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    plain = [tensor.detach().float().requires_grad_() for tensor in tensors]
    exact, torchs = step(theirs, wide, dy.double()), step(theirs, plain, dy.float())
    found = []
    for place, (got, right, other) in enumerate(zip(step(ours, tensors, dy), exact, torchs, strict=True)):
        terms = 1 if place < 2 else tensors[0].numel() // right.numel()
        verdict = judge(got, right, other, terms=terms)
        if not verdict.ok:
            found.append(f"{place}: {verdict.fault}")
    return found


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_results_and_gradients(name: str, last: bool, mode: str) -> None:
    ours, theirs, shapes = CALLS[name]
    if last and len(shapes[0]) != 4:
        pytest.skip("rows have one memory order")
    made = torch.compile(ours, fullgraph=True, mode=mode)
    tensors = drawn(shapes, last)
    for _ in range(3):  # a graph is captured, and replayed
        assert faults(made, theirs, tensors) == []


@pytest.mark.parametrize("settings", [{}, {"cpp_wrapper": True}, {"max_autotune": True}])
def test_launches_alone(settings: dict[str, Any], caplog: Any) -> None:
    ours, theirs, shapes = CALLS["group_norm"]
    tensors = drawn(shapes, True)
    with config.patch(settings), caplog.at_level("INFO", "fusednorm.inductor"):
        made = torch.compile(ours, fullgraph=True)
        found, codes = run_and_get_code(lambda: faults(made, theirs, tensors))
    assert found == []
    assert not any("fusednorm::" in code or "ops.fusednorm" in code for code in codes)
    assert not any("call_forward(" in code or "call_backward(" in code for code in codes)
    assert "is a call in the compiled graph" not in caplog.text


@pytest.mark.parametrize("dynamic", [None, True])
def test_cpp_wrapper_as_an_option(dynamic: bool | None) -> None:
    """torch before 2.13 forgets it for the backward, which then calls the op."""
    ours, theirs, shapes = CALLS["group_norm"]
    made = torch.compile(ours, fullgraph=True, dynamic=dynamic, options={"cpp_wrapper": True})
    assert faults(made, theirs, drawn(shapes, True)) == []


def test_dynamic_shapes_compile_once() -> None:
    ours, theirs, shapes = CALLS["group_norm"]
    counters = torch._dynamo.utils.counters
    counters.clear()
    made = torch.compile(ours, fullgraph=True, dynamic=True)
    for samples in (2, 3, 5):
        assert faults(made, theirs, drawn(((samples, 64, 16, 16), *shapes[1:]), False)) == []
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize(
    ("last", "train", "mode"), [(True, True, "default"), (False, False, "default"), (True, False, "reduce-overhead")]
)
@pytest.mark.parametrize("name", SUMS)
def test_sums_before_a_norm(name: str, last: bool, train: bool, mode: str) -> None:
    call, _, shapes = SUMS[name]
    tensors = drawn(((8,), (8,), *shapes), False)
    if last:
        tensors = [one.detach().to(memory_format=LAST).requires_grad_() if one.dim() == 4 else one for one in tensors]
    assert_near_eager(call, tensors, train, mode)


def assert_near_eager(call: Call, tensors: list[Tensor], train: bool, mode: str) -> None:
    """As near to float64 as eager calls of the same tensors are, but for a factor of 2; the result in the same strides.

    Gradients are in those that autograd brings into the order of the parameter."""
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    if train:
        dy = torch.randn_like(call(*tensors))
        run = lambda call, tensors: step(call, tensors, dy.to(tensors[0].dtype))  # noqa: E731
    else:
        run = lambda call, tensors: [call(*(tensor.detach() for tensor in tensors))]  # noqa: E731
    compiled = torch.compile(call, fullgraph=True, mode=mode)
    run(compiled, tensors)
    found = run(compiled, tensors), run(call, tensors), run(call, wide)
    assert found[0][0].stride() == found[1][0].stride()
    for got, eager, right in zip(*found, strict=True):
        nearest = torch.finfo(BF16).eps * right.abs().max()
        assert (got - right).abs().max() <= 2 * (eager - right).abs().max() + nearest


def down_and_up(x: Tensor, a: Tensor, q: Tensor, b: Tensor, c: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """A level of a 3-D U-Net."""

    def norm(x: Tensor, name: str) -> Tensor:
        return fusednorm.instance_norm(x, weight=w, bias=v, activation=name)

    x = norm(F.conv3d(x, a, q, padding=1), "leaky_relu")
    y = norm(F.conv3d(x, b, stride=2, padding=1), "silu")
    y = torch.cat([F.conv_transpose3d(y, c, q, stride=2), x], 1)
    return norm(F.conv3d(y, torch.cat([b, b], 1), padding=1), "leaky_relu")


@pytest.mark.parametrize(("channels", "last"), [(1, False), (8, False), (8, True)])
@pytest.mark.parametrize(("train", "mode"), [(True, "default"), (False, "default"), (True, "reduce-overhead")])
def test_convolutions_of_volumes(channels: int, last: bool, train: bool, mode: str) -> None:
    size = (16,)
    shapes = ((2, channels, 8, 16, 12), (16, channels, 3, 3, 3), size, (16, 16, 3, 3, 3), (16, 16, 2, 2, 2), size, size)
    tensors = drawn(shapes, False)
    if last:
        order = torch.channels_last_3d
        tensors = [one.detach().to(memory_format=order).requires_grad_() if one.dim() == 5 else one for one in tensors]
    assert_near_eager(down_and_up, tensors, train, mode)


def test_biases_that_a_norm_takes_away() -> None:
    def call(x: Tensor, a: Tensor, q: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return fusednorm.instance_norm(F.conv2d(x, a, q), weight=w, bias=b)

    tensors = drawn(((4, 16, 32, 32), (32, 16, 3, 3), (32,), (32,), (32,)), True)
    dy = torch.randn_like(call(*tensors))
    (_, codes) = run_and_get_code(lambda: step(torch.compile(call, fullgraph=True), tensors, dy))
    assert "bias=None" in codes[0]
    found, right = step(torch.compile(call, fullgraph=True), tensors, dy), step(call, tensors, dy)
    assert found[3].count_nonzero() == 0
    for place in (0, 1, 2, 4, 5):
        torch.testing.assert_close(found[place], right[place], rtol=2e-2, atol=2e-2 * right[place].abs().max().item())
