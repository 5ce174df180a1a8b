"""Convolutions of volumes in a compiled graph: which get channels_last, and that results stay right.

The pass is for a GPU. Here it takes tensors on the CPU, where the graphs run op by op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor.config
import torch.nn.functional as F
from test_compile import same_gradients
from test_summing import Compiler
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch.fx import Graph, GraphModule

import fusednorm
from fusednorm.inductor import gradients, volumes
from fusednorm.inductor.passes import replace
from fusednorm.private import inductor_names

aten, LAST = torch.ops.aten, torch.channels_last_3d
CONVOLUTIONS, DTYPES = (aten.convolution.default, aten.convolution_backward.default), volumes.DTYPES


class InOrder(Compiler):
    """Makes the graphs that Inductor gets on a GPU; ``all`` are the forward, and then the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[Graph] = []

    def joint(self, graph: Graph) -> None:
        pass

    def backward(self, module: GraphModule, examples: Any) -> Any:
        replace(module.graph)
        gradients.make_dense(module.graph)
        volumes.place_last(module.graph)
        self.all.append(module.graph)
        return super().backward(module, examples)


def as_cudnn(input: Tensor, weight: Tensor, backend: Any) -> torch.memory_format:
    """The order of a convolution's result."""
    last = any(suggest_memory_format(tensor) == LAST for tensor in (input, weight))
    return LAST if last else torch.contiguous_format


@pytest.fixture(autouse=True)
def of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.manual_seed(0)
    torch.compiler.reset()
    for module in (volumes, gradients):
        monkeypatch.setattr(module, "DEVICE", "cpu")
    monkeypatch.setattr(volumes, "DTYPES", (torch.float64,))
    monkeypatch.setattr(volumes, "orders_convolutions", lambda: True)
    monkeypatch.setattr(torch._C, "_conv_determine_backend_memory_format", as_cudnn)
    yield
    torch.compiler.reset()


def compiled(call: Callable[..., Any], *shapes: tuple[int, ...], dynamic: bool | None = None) -> list[Graph]:
    """The graphs of a call, whose results and gradients are those of eager mode."""
    compiler = InOrder()
    made = torch.compile(call, fullgraph=True, backend=compiler, dynamic=dynamic)
    same_gradients(made, call, [drawn(*one) for one in shapes])
    return compiler.all


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).requires_grad_()


def arguments(graph: Graph) -> list[Tensor]:
    """What the convolutions of a graph take: input and weight, and in a backward the gradient before them."""
    return [
        argument.meta["val"]
        for node in graph.nodes
        if node.target in CONVOLUTIONS
        for argument in node.args[: volumes.TENSORS[node.target]]
    ]


def in_last(tensor: Tensor) -> bool:
    return tensor.is_contiguous(memory_format=LAST)


def norm(x: Tensor) -> Tensor:
    return fusednorm.instance_norm(x, activation="leaky_relu")


VOLUME, KERNEL = (2, 4, 3, 5, 4), (4, 4, 3, 3, 3)


def chain(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return F.conv3d(norm(F.conv3d(x, a, padding=1)), b, padding=1)


def test_convolutions_around_a_norm_get_channels_last() -> None:
    forward, backward = compiled(chain, VOLUME, KERNEL, KERNEL)
    assert all(in_last(tensor) for graph in (forward, backward) for tensor in arguments(graph))
    # The caller's tensors are copied, and nothing between the convolutions.
    copies = [node for node in forward.nodes if node.target is aten.clone.default]
    assert [copy.args[0].op for copy in copies] == ["placeholder"] * 3


def test_a_volume_of_one_channel_gets_strides_alone() -> None:
    """They say in which order the convolution returns its result, and reads the gradient of that."""
    graphs = compiled(chain, (2, 1, 3, 5, 4), (4, 1, 3, 3, 3), KERNEL)
    for graph in graphs:
        (relabelled,) = graph.find_nodes(op="call_function", target=aten.as_strided.default)
        assert relabelled.args[0].op == "placeholder"
        assert relabelled.meta["val"].stride() == (60, 1, 20, 4, 1)
        (reader,) = relabelled.users
        assert reader.target in CONVOLUTIONS
    first, second = graphs[0].find_nodes(op="call_function", target=aten.convolution.default)
    assert in_last(first.meta["val"])
    assert in_last(second.meta["val"])


@pytest.mark.parametrize("part", [lambda x: x[1:], lambda x: x[1:].clone()])
def test_no_view_gets_other_strides(part: Callable[[Tensor], Tensor]) -> None:
    """It begins behind its memory's beginning, a copy too once Inductor has taken that away."""
    graphs = compiled(lambda x, a, b: chain(part(x), a, b), (3, 1, 3, 5, 4), (4, 1, 3, 3, 3), KERNEL)
    assert not graphs[0].find_nodes(op="call_function", target=aten.as_strided.default)


@pytest.mark.parametrize(("dtype", "moves"), [(torch.float64, True), (torch.float32, False)])
def test_a_conversion_is_no_view(dtype: torch.dtype, moves: bool) -> None:
    graph = Graph()
    given = graph.placeholder("given")
    part = graph.call_function(aten.slice.Tensor, (given, 0, 1))
    converted = graph.call_function(torch.ops.prims.convert_element_type.default, (part, dtype))
    given.meta["val"], part.meta["val"], converted.meta["val"] = (
        torch.ones(3),
        torch.ones(2),
        torch.ones(2, dtype=dtype),
    )
    assert [volumes._is_no_view(node) for node in (given, part, converted)] == [True, False, moves]


def test_one_channel_with_holes_is_copied() -> None:
    """Tensors that are parts of the caller's."""

    def call(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return chain(x[:, :1], a[:, ::2], b)

    forward, _ = compiled(call, (2, 2, 3, 5, 4), (4, 2, 3, 3, 3), KERNEL)
    assert all(in_last(tensor) for tensor in arguments(forward))


def test_parts_and_transposed_convolutions() -> None:
    def call(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        y = norm(F.conv3d(x, a, padding=1, stride=2))
        return norm(F.conv3d(torch.cat([F.conv_transpose3d(y, b, stride=2), x], 1), torch.cat([a, a], 1), padding=1))

    forward, backward = compiled(call, (2, 4, 4, 6, 4), KERNEL, (4, 4, 2, 2, 2))
    assert all(in_last(tensor) for graph in (forward, backward) for tensor in arguments(graph))


#: Calls whose convolutions keep the order of the program, and the shapes of input and weights.
KEPT: dict[str, tuple[Callable[..., Any], tuple[int, ...], tuple[int, ...]]] = {
    "no norm of ours": (
        lambda x, a, b: F.conv3d(F.leaky_relu(F.conv3d(x, a, padding=1)), b, padding=1), VOLUME, KERNEL,
    ),
    "groups of channels": (
        lambda x, a, b: F.conv3d(norm(F.conv3d(x, a, padding=1, groups=2)), b, padding=1), VOLUME, (4, 2, 3, 3, 3),
    ),
    "a norm of rows, as in a transformer of patches": (
        lambda x, a, b: fusednorm.layer_norm(F.conv3d(F.conv3d(x, a), b), (2, 2)), (2, 4, 6, 6, 6), KERNEL,
    ),
    "a view that channels_last does not have": (
        lambda x, a, b: norm(F.conv3d(F.conv3d(x, a, padding=1), b, padding=1)).view(2, 12, 20), VOLUME, KERNEL,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_convolutions_that_keep_their_order(name: str) -> None:
    call, input, kernel = KEPT[name]
    graphs = compiled(call, input, kernel, KERNEL)
    # The gradient of a view is one that any tensor has.
    for graph in graphs[:1] if name.startswith("a view") else graphs:
        assert not any(in_last(tensor) for tensor in arguments(graph))
        assert not any(node.kwargs.get("memory_format") for node in graph.nodes)


def test_others_than_16_bits_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(volumes, "DTYPES", DTYPES)
    for graph in compiled(chain, VOLUME, KERNEL, KERNEL):
        assert not any(in_last(tensor) for tensor in arguments(graph))


def test_sizes_that_are_not_known() -> None:
    for graph in compiled(chain, VOLUME, KERNEL, KERNEL, dynamic=True):
        assert not any(node.kwargs.get("memory_format") for node in graph.nodes)

    def chosen(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        y = chain(x, a, b)
        return y[y > 0]

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for graph in compiled(chosen, VOLUME, KERNEL, KERNEL)[:1]:
            assert not any(node.kwargs.get("memory_format") for node in graph.nodes)


def test_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (volumes, gradients):
        monkeypatch.setattr(module, "DEVICE", "cuda")
    call = lambda x, a, b: norm(torch.cat([chain(x, a, b), F.conv3d(x, a, padding=1)], 1))  # noqa: E731
    for graph in compiled(call, VOLUME, KERNEL, KERNEL):
        assert not any(node.target is aten.clone.default for node in graph.nodes)


IMAGE, PAIR = (2, 4, 6, 5), (4, 4, 3, 3)


@pytest.mark.parametrize(
    ("call", "copies"),
    [
        (lambda x, a: fusednorm.group_norm(torch.cat([F.conv2d(x, a), F.conv2d(x, a)], 1), 4), 2),
        (lambda x, a: fusednorm.group_norm(torch.cat([F.conv2d(x, a), F.conv2d(x, a)], 0), 4), 0),  # parts are dense
        (lambda x, a: F.conv2d(fusednorm.group_norm(x, 4), a).sum((2, 3), keepdim=True), 0),  # an expanded gradient
    ],
)
def test_gradients_of_parts_are_dense(call: Callable[..., Tensor], copies: int) -> None:
    _, backward = compiled(call, IMAGE, PAIR)
    found = [node for node in backward.nodes if node.target is aten.clone.default]
    assert len(found) == copies
    for copy in found:
        assert copy.args[0].target is aten.slice.Tensor
        assert copy.meta["val"].stride() == (48, 12, 3, 1)


def test_what_the_program_forbids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(volumes, "orders_convolutions", lambda: False)
    for graph in compiled(chain, VOLUME, KERNEL, KERNEL):
        assert not any(in_last(tensor) for tensor in arguments(graph))


@pytest.mark.parametrize("lost", ["convolution", "norm"])
def test_a_graph_whose_values_are_not_known(lost: str) -> None:
    """Such as one whose weights another pass has made constants."""
    forward, _ = compiled(chain, VOLUME, KERNEL, KERNEL)
    for node in [node for node in forward.nodes if node.target is aten.clone.default]:
        node.replace_all_uses_with(node.args[0])
        forward.erase_node(node)
    before = str(forward)
    (norm_node,) = [node for node in forward.nodes if node.target in volumes.NORMS]
    (weight, *_) = [node.args[1] for node in forward.nodes if node.target in CONVOLUTIONS]
    del (weight if lost == "convolution" else norm_node.args[0]).meta["val"]
    volumes.place_last(forward)
    assert str(forward) == before


def test_volumes_in_channels_last_are_left_alone() -> None:
    tensors = [drawn(*shape) for shape in (VOLUME, KERNEL, KERNEL)]
    compiler = InOrder()
    made = torch.compile(chain, fullgraph=True, backend=compiler)
    made(*[one.detach().to(memory_format=LAST) for one in tensors])
    (forward,) = compiler.all
    assert not any(node.target is aten.clone.default for node in forward.nodes)


def test_who_may_order_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    assert inductor_names.orders_convolutions()
    with torch._inductor.config.patch(layout_optimization=False):
        assert not inductor_names.orders_convolutions()
    with torch.backends.cudnn.flags(enabled=False):
        assert not inductor_names.orders_convolutions()
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not inductor_names.orders_convolutions()
