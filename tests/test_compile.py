"""torch.compile without a graph break, forward and backward, with dynamic shapes, and torch.export."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusednorm
from fusednorm import nn, ops
from fusednorm.norm import FAMILIES


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def case(family: str, *batch: int) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """A call of a family as a function of its tensors, and tensors for it."""
    x = torch.randn(*(batch or (2, 8, 4, 6)))
    size = x.shape[-1:] if family in ("layer_norm", "rms_norm") else x.shape[1:2]
    weight, bias = torch.randn(size), torch.randn(size)
    calls: dict[str, Callable[..., Tensor]] = {
        "group_norm": lambda x, w, b: fusednorm.group_norm(x, 4, w, b, activation="silu"),
        "instance_norm": lambda x, w, b: fusednorm.instance_norm(x, weight=w, bias=b, activation="gelu"),
        "batch_norm": lambda x, w, b: fusednorm.batch_norm(x, None, None, w, b, True, activation="relu"),
        "layer_norm": lambda x, w, b: fusednorm.layer_norm(x, x.shape[-1:], w, b),
        "rms_norm": lambda x, w: fusednorm.rms_norm(x, x.shape[-1:], w),
    }
    tensors = [x, weight] if family == "rms_norm" else [x, weight, bias]
    return calls[family], [tensor.requires_grad_() for tensor in tensors]


def same_gradients(compiled: Callable[..., Tensor], call: Callable[..., Tensor], tensors: list[Tensor]) -> None:
    output, expected = compiled(*tensors), call(*tensors)
    assert output.stride() == expected.stride()
    torch.testing.assert_close(output, expected)
    dy = torch.randn_like(expected)
    got = torch.autograd.grad(output, tensors, dy)
    torch.testing.assert_close(got, torch.autograd.grad(expected, tensors, dy))


@pytest.mark.parametrize("family", FAMILIES)
def test_forward_and_backward_with_dynamic_shapes(family: str) -> None:
    call, tensors = case(family)
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    same_gradients(compiled, call, tensors)
    for shape in ((3, 8, 5, 6), (5, 8, 3, 6)):
        same_gradients(compiled, call, [torch.randn(shape, requires_grad=True), *tensors[1:]])


def test_modulated_rows_with_dynamic_shapes() -> None:
    """Dynamo does not sort the strides of a dynamic shape."""

    def call(x: Tensor, scale: Tensor) -> Tensor:
        return fusednorm.layer_norm(x.transpose(1, 2), (8,), scale=scale, activation="silu")

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in ((2, 4, 5, 8), (3, 6, 7, 8)):
        same_gradients(compiled, call, [torch.randn(shape, requires_grad=True), torch.randn(8, requires_grad=True)])


def test_a_gate_with_dynamic_shapes() -> None:
    """Dynamo finds no symbol in a tuple of numbers, even where it knows the symbol's value."""
    x, gate = torch.randn(8, 4, 4, 6), torch.randn(1, 4, 1, 1)

    def call(x: Tensor, gate: Tensor) -> Tensor:
        return fusednorm.layer_norm(x, (4, 6), pre_add=x, pre_gate=gate)

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="eager")
    torch.testing.assert_close(compiled(x, gate), call(x, gate))


@pytest.mark.parametrize("family", ["group_norm", "layer_norm"])
def test_inductor(family: str) -> None:
    call, tensors = case(family)
    surrounded = lambda *tensors: call(tensors[0] * 2, *tensors[1:]).sin()  # noqa: E731
    same_gradients(torch.compile(surrounded, fullgraph=True), surrounded, tensors)


@pytest.mark.parametrize(
    "order",
    [
        lambda x: x.to(memory_format=torch.channels_last),
        lambda x: x[:, :, :, ::2],
        lambda x: x.transpose(2, 3),
        lambda x: x[:1].expand(2, -1, -1, -1),
    ],
    ids=["channels_last", "sliced", "transposed", "expanded"],
)
def test_strides(order: Callable[[Tensor], Tensor]) -> None:
    call, (x, weight, bias) = case("group_norm")
    x = order(x.detach()).detach().requires_grad_()
    same_gradients(torch.compile(call, fullgraph=True, backend="aot_eager"), call, [x, weight, bias])


def test_modulation_and_channel_dim() -> None:
    x, tokens = torch.randn(2, 5, 8, requires_grad=True), torch.randn(2, 16, requires_grad=True)

    def call(x: Tensor, tokens: Tensor) -> Tensor:
        scale, shift = tokens.chunk(2, dim=1)
        return fusednorm.group_norm(x, 4, scale=scale, shift=shift, channel_dim=-1, activation="silu")

    same_gradients(torch.compile(call, fullgraph=True, backend="aot_eager"), call, [x, tokens])


@pytest.mark.parametrize("momentum", [0.3, None])
def test_a_module_with_running_statistics(momentum: float | None) -> None:
    ours, theirs = nn.BatchNorm2d(8, momentum=momentum), torch.nn.BatchNorm2d(8, momentum=momentum)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    for _ in range(3):
        x = torch.randn(4, 8, 3, 5)
        torch.testing.assert_close(compiled(x), theirs(x))
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())


def test_the_kernels_of_ops() -> None:
    x, weight, bias = torch.randn(2, 8, 5), torch.randn(8), torch.randn(8)

    def both(x: Tensor) -> tuple[Any, ...]:
        y, mean, rstd = ops.group_norm_forward(x, 4, weight, bias, 1e-5, activation="silu")
        return y, ops.group_norm_backward(y, x, mean, rstd, 4, weight, bias, activation="silu")

    torch.testing.assert_close(torch.compile(both, fullgraph=True, backend="aot_eager")(x), both(x))


def test_the_graphs_hold_one_op_each() -> None:
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    graphs: list[list[str]] = []

    def keep(module: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append([str(node.target) for node in module.graph.nodes if node.op == "call_function"])
        return make_boxed_func(module.forward)

    call, tensors = case("group_norm")
    compiled = torch.compile(call, fullgraph=True, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep))
    compiled(*tensors).backward(torch.ones_like(tensors[0]))
    forward, backward = ([name for name in graph if "fusednorm" in name or "aten" in name] for graph in graphs)
    assert forward == ["fusednorm.norm_forward.default"]
    assert backward == ["fusednorm.norm_backward.default"]


@pytest.mark.parametrize("strict", [True, False])
def test_export_with_a_dynamic_batch(strict: bool) -> None:
    network = torch.nn.Sequential(nn.BatchNorm2d(8, activation="silu"), nn.GroupNorm(4, 8), nn.LayerNorm(6)).eval()
    x = torch.randn(2, 8, 4, 6)
    shapes = ({0: torch.export.Dim("batch", min=2)},)
    program = torch.export.export(network, (x,), dynamic_shapes=shapes, strict=strict)
    names = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert names.count("fusednorm.norm_forward.default") == 3
    other = torch.randn(5, 8, 4, 6)
    torch.testing.assert_close(program.module()(other), network(other))


def test_a_compiled_vmap_is_right_or_an_error() -> None:
    x = torch.randn(3, 2, 8, 4)
    compiled = torch.compile(torch.vmap(lambda x: fusednorm.group_norm(x, 4)), backend="aot_eager")
    expected = torch.stack([F.group_norm(each, 4) for each in x])
    try:
        output = compiled(x)
    except Exception:
        return
    torch.testing.assert_close(output, expected)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # of torch's own intermediate results
def test_a_backward_under_compiled_autograd() -> None:
    call, tensors = case("group_norm")
    expected = torch.autograd.grad(call(*tensors).square().sum(), tensors)
    loss = call(*tensors).square().sum()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        loss.backward()
    torch.testing.assert_close([tensor.grad for tensor in tensors], list(expected))


def test_eps_as_a_dynamic_number_and_a_default_device() -> None:
    x = torch.randn(2, 8, 4)
    compiled = torch.compile(
        lambda x, eps: fusednorm.group_norm(x, 4, eps=eps), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for eps in (1e-5, 0.5, 0.7):
        torch.testing.assert_close(compiled(x, eps), fusednorm.group_norm(x, 4, eps=eps))
    module = nn.BatchNorm1d(8, activation="relu").eval()
    with torch.device("cpu"):  # a function mode around the compiled call
        torch.testing.assert_close(torch.compile(module, fullgraph=True, backend="aot_eager")(x), module(x))
    module.eps = 0.5
    torch.testing.assert_close(torch.compile(module, fullgraph=True, backend="aot_eager")(x), module(x))
