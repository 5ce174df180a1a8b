"""Sums and biases before a norm in a compiled graph: which of them its own kernels make, and that results stay right.

The passes are for a GPU. Here they take tensors on the CPU, where the ops are calls.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import default_partition, make_boxed_func
from test_compile import same_gradients
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.fx import Graph, GraphModule

import fusednorm
from fusednorm.inductor import biases
from fusednorm.inductor.passes import differentiable, replace

OPS, aten = torch.ops.fusednorm, torch.ops.aten
FORWARD, SUM_FORWARD = OPS.compiled_forward.default, OPS.compiled_sum_forward.default


class Compiler:
    """A backend that runs our passes as Inductor does, and then the graphs op by op; ``graphs`` are the forwards."""

    def __init__(self) -> None:
        self.graphs: list[Graph] = []
        self.joined = False

    def __call__(self, module: GraphModule, examples: Any) -> Any:
        return aot_autograd(fw_compiler=self.forward, bw_compiler=self.backward, partition_fn=self.partition)(
            module, examples
        )

    def joint(self, graph: Graph) -> None:
        for node, _, arguments in differentiable(graph):
            biases.drop_bias(graph, node, arguments[-2])

    def partition(self, module: GraphModule, *arguments: Any, **keywords: Any) -> Any:
        self.joint(module.graph)
        self.joined = True
        return default_partition(module, *arguments, **keywords)

    def forward(self, module: GraphModule, examples: Any) -> Any:
        if not self.joined:
            self.joint(module.graph)
        self.graphs.append(module.graph)
        return self.backward(module, examples)

    def backward(self, module: GraphModule, examples: Any) -> Any:
        replace(module.graph)
        module.graph.eliminate_dead_code()
        module.graph.lint()
        module.recompile()
        return make_boxed_func(module)

    def nodes(self, target: Any) -> list[Any]:
        (graph,) = self.graphs
        return graph.find_nodes(op="call_function", target=target)


@pytest.fixture(autouse=True)
def of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.manual_seed(0)
    torch.compiler.reset()
    monkeypatch.setattr(biases, "DEVICE", "cpu")
    yield
    torch.compiler.reset()


def drawn(*shape: int, dtype: torch.dtype = torch.float64, last: bool = False) -> Tensor:
    tensor = torch.randn(shape, dtype=dtype)
    return (tensor.to(memory_format=torch.channels_last) if last else tensor).requires_grad_()


def compiled(call: Callable[..., Any], tensors: list[Tensor], train: bool, **options: Any) -> Compiler:
    """The graphs of a call, whose results and gradients are those of eager mode."""
    compiler = Compiler()
    made = torch.compile(call, fullgraph=True, backend=compiler, **options)
    if train:
        same_gradients(made, call, tensors)
    else:
        tensors = [tensor.detach() for tensor in tensors]
        torch.testing.assert_close(made(*tensors), call(*tensors), rtol=1e-10, atol=1e-10)
    return compiler


def norm(s: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return fusednorm.group_norm(s, 4, w, b, activation="silu")


def convolved(x: Tensor, a: Tensor, q: Tensor) -> Tensor:
    return F.conv2d(x, a, q, padding=1)


IMAGE, LIKE, KERNEL, CHANNELS = (3, 4, 6, 5), (3, 8, 6, 5), (8, 4, 3, 3), (8,)
#: Sums that one op makes, whether it returns them too, and the shapes of their tensors but weight and bias.
SUMS: dict[str, tuple[Callable[..., Any], bool, list[tuple[int, ...]]]] = {
    "a bias": (lambda w, b, *t: norm(convolved(*t), w, b), False, [IMAGE, KERNEL, CHANNELS]),
    "a bias of volumes": (
        lambda w, b, x, a, q: norm(F.conv3d(x, a, q), w, b), False, [(2, 4, 4, 5, 3), (8, 4, 2, 2, 2), CHANNELS],
    ),
    "a bias of a transposed convolution": (
        lambda w, b, x, a, q: norm(F.conv_transpose2d(x, a, q, stride=2), w, b), False, [IMAGE, (4, 8, 2, 2), CHANNELS],
    ),
    "numbers of samples": (
        lambda w, b, e, *t: norm(convolved(*t) + e[:, :, None, None], w, b), False, [(3, 8), IMAGE, KERNEL, CHANNELS],
    ),
    "numbers of all samples": (
        lambda w, b, e, x: norm(e[None, :, None, None] + x, w, b), False, [CHANNELS, LIKE],
    ),
    "numbers of channels": (lambda w, b, e, x: norm(x + e[:, None, None], w, b), False, [CHANNELS, LIKE]),
    "a tensor and a bias": (
        lambda w, b, y, *t: norm(y + convolved(*t), w, b), False, [LIKE, IMAGE, KERNEL, CHANNELS],
    ),
    "two biases": (
        lambda w, b, y, a, p, *t: norm(convolved(y, a, p) + convolved(*t), w, b), False,
        [IMAGE, KERNEL, CHANNELS, IMAGE, KERNEL, CHANNELS],
    ),
    "two tensors": (lambda w, b, x, y: norm(x + y, w, b), False, [LIKE, LIKE]),
    "a sum that is read": (
        lambda w, b, y, *t: (lambda s: norm(s, w, b) + s.sin())(y + convolved(*t)), True,
        [LIKE, IMAGE, KERNEL, CHANNELS],
    ),
    "a convolution that is read": (
        lambda w, b, *t: (lambda s: norm(s, w, b) + s.sin())(convolved(*t)), True, [IMAGE, KERNEL, CHANNELS],
    ),
}  # fmt: skip


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("name", SUMS)
def test_sums_are_made_by_the_norm(name: str, last: bool, train: bool) -> None:
    call, read, shapes = SUMS[name]
    tensors = [drawn(*CHANNELS), drawn(*CHANNELS), *(drawn(*shape, last=last and len(shape) == 4) for shape in shapes)]
    compiler = compiled(call, tensors, train)
    (node,) = compiler.nodes(SUM_FORWARD)
    assert compiler.nodes(FORWARD) == []
    assert all(convolution.args[2] is None for convolution in compiler.nodes(aten.convolution.default))
    assert node.args[-1] == [train, train or read]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_16_bits_are_no_further_from_float64(dtype: torch.dtype) -> None:
    call, _, shapes = SUMS["two biases"]
    tensors = [drawn(*shape, dtype=dtype).detach() for shape in (CHANNELS, CHANNELS, *shapes)]
    expected = call(*(tensor.double() for tensor in tensors))
    found = torch.compile(call, fullgraph=True, backend=Compiler())(*tensors)
    assert (found - expected).abs().max() <= 1.5 * (call(*tensors) - expected).abs().max()


#: Sums that stay what they are: their tensors' shapes, and options of torch.compile.
LEFT: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]], dict[str, Any]]] = {
    "read before the norm": (
        lambda w, b, x, y: (lambda s: norm(s, w * s.mean(), b))(x + y), [LIKE, LIKE], {},
    ),
    "of a term that is computed": (lambda w, b, x, y: norm(x.sin() + y, w, b), [LIKE, LIKE], {}),
    "of a view of one": (
        lambda w, b, x, y: norm(x.sin().transpose(2, 3) + y, w, b), [(3, 8, 5, 6), LIKE], {},
    ),
    "with a factor": (lambda w, b, x, y: norm(torch.add(x, y, alpha=2), w, b), [LIKE, LIKE], {}),
    "of a tensor and itself": (lambda w, b, x: norm(x + x, w, b), [LIKE], {}),
    "with one number": (lambda w, b, x: norm(x + 1, w, b), [LIKE], {}),
    "with a number for each position": (lambda w, b, x, y: norm(x + y, w, b), [LIKE, (6, 5)], {}),
    "of rows": (
        lambda w, b, x, y: fusednorm.layer_norm(x + y, (8,), w, b), [(4, 6, 8), (4, 6, 8)], {},
    ),
    "of channels at each position": (
        lambda w, b, x, y: fusednorm.layer_norm(x + y, (8,), w, b, channel_dim=1), [LIKE, LIKE], {},
    ),
    "of points": (lambda w, b, x, y: norm(x + y, w, b), [(4, 8), (4, 8)], {}),
    "of sizes that are not known": (lambda w, b, x, y: norm(x + y, w, b), [LIKE, LIKE], {"dynamic": True}),
    "of an evaluation": (
        lambda w, b, m, v, x, y: fusednorm.batch_norm(x + y, m, v * v, w, b, False),
        [CHANNELS, CHANNELS, LIKE, LIKE], {},
    ),
    "with a bias that somebody else's term has": (
        lambda w, b, x, *t: (lambda c: (norm(x + c, w, b), c.sin()))(convolved(*t)),
        [LIKE, IMAGE, KERNEL, CHANNELS], {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_other_sums_are_left(name: str) -> None:
    call, shapes, options = LEFT[name]
    tensors = [drawn(*shape) for shape in (CHANNELS, CHANNELS, *shapes)]
    compiler = compiled(call, tensors, False, **options)
    assert compiler.nodes(SUM_FORWARD) == []
    assert len([node for node in compiler.graphs[0].nodes if node.target in (FORWARD, OPS.norm_forward.default)]) == 1


def test_a_sum_of_two_dtypes_is_left() -> None:
    tensors = [drawn(8), drawn(8), drawn(*LIKE), drawn(*LIKE, dtype=torch.float32)]
    compiler = compiled(lambda w, b, x, y: norm(x + y, w, b), tensors, False)
    assert compiler.nodes(SUM_FORWARD) == []


def test_a_sum_of_any_number_of_samples_is_left() -> None:
    tensors = [drawn(8).detach(), drawn(8).detach(), drawn(*LIKE).detach(), drawn(*LIKE).detach()]
    for tensor in tensors[2:]:
        torch._dynamo.mark_dynamic(tensor, 0)
    compiler = Compiler()
    torch.compile(lambda w, b, x, y: norm(x + y, w, b), fullgraph=True, backend=compiler)(*tensors)
    assert compiler.nodes(SUM_FORWARD) == []


# --- biases that norms take away ---


CENTRED: dict[str, Callable[..., Any]] = {
    "instance_norm": lambda w, b, s: fusednorm.instance_norm(s, weight=w, bias=b, activation="leaky_relu"),
    "batch_norm": lambda w, b, s: fusednorm.batch_norm(s, None, None, w, b, True, activation="relu"),
    "group_norm": lambda w, b, s: fusednorm.group_norm(s, 8, w, b, activation="silu"),
}


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("family", CENTRED)
def test_norms_of_channels_take_biases_away(family: str, train: bool) -> None:
    def call(w: Tensor, b: Tensor, x: Tensor, a: Tensor, q: Tensor) -> Tensor:
        return CENTRED[family](w, b, convolved(x, a, q))

    compiler = compiled(call, [drawn(*shape) for shape in (CHANNELS, CHANNELS, IMAGE, KERNEL, CHANNELS)], train)
    assert compiler.nodes(SUM_FORWARD) == []
    assert [node.args[2] for node in compiler.nodes(aten.convolution.default)] == [None]


def test_biases_are_taken_away_from_any_number_of_samples() -> None:
    tensors = [drawn(*shape).detach() for shape in (CHANNELS, CHANNELS, IMAGE, KERNEL, CHANNELS)]
    torch._dynamo.mark_dynamic(tensors[2], 0)
    compiler = Compiler()
    call = lambda w, b, *t: CENTRED["instance_norm"](w, b, convolved(*t))  # noqa: E731
    torch.compile(call, fullgraph=True, backend=compiler)(*tensors)
    assert [node.args[2] for node in compiler.nodes(aten.convolution.default)] == [None]


def test_other_devices_keep_biases_and_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(biases, "DEVICE", "cuda")
    tensors = [drawn(*shape) for shape in (CHANNELS, CHANNELS, IMAGE, KERNEL, CHANNELS)]
    compiler = compiled(lambda w, b, *t: CENTRED["instance_norm"](w, b, convolved(*t)), tensors, True)
    assert compiler.nodes(SUM_FORWARD) == []
    assert [node.args[2] is None for node in compiler.nodes(aten.convolution.default)] == [False]


def test_running_statistics_are_of_the_input_with_its_bias() -> None:
    def call(w: Tensor, b: Tensor, m: Tensor, v: Tensor, *t: Tensor) -> Tensor:
        return fusednorm.batch_norm(convolved(*t), m, v, w, b, True)

    tensors = [drawn(*shape).detach() for shape in (CHANNELS, CHANNELS, IMAGE, KERNEL, CHANNELS)]
    w, b, *t = tensors
    moved = []
    compiler = Compiler()
    for run in (call, torch.compile(call, fullgraph=True, backend=compiler)):
        running = torch.zeros(8, dtype=torch.float64), torch.ones(8, dtype=torch.float64)
        run(w, b, *running, *t)
        moved.append(running)
    torch.testing.assert_close(*moved, rtol=1e-10, atol=1e-10)
    assert [node.args[2] for node in compiler.nodes(aten.convolution.default)] == [None]
    assert compiler.nodes(SUM_FORWARD) == []


def test_what_has_no_bias_loses_none() -> None:
    """A convolution without one, and a tensor that no convolution made."""

    def call(w: Tensor, b: Tensor, x: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        m, v = torch.zeros(8, dtype=x.dtype), torch.ones(8, dtype=x.dtype)
        y = fusednorm.batch_norm(F.conv2d(x, a), m, v, w, b, True)
        return fusednorm.instance_norm(y.sin(), weight=w), m

    compiler = compiled(call, [drawn(*shape) for shape in (CHANNELS, CHANNELS, IMAGE, KERNEL)], False)
    assert len(compiler.nodes(FORWARD)) == 2


@pytest.mark.parametrize(
    ("call", "norms"),
    [
        (lambda w, b, *t: (lambda s: CENTRED["instance_norm"](w, b, s) + s)(convolved(*t)), 1),
        (lambda w, b, *t: (lambda s: CENTRED["instance_norm"](w, b, s) + norm(s, w, b))(convolved(*t)), 2),
        (lambda w, b, *t: fusednorm.rms_norm(convolved(*t), (8,), w, channel_dim=1), 1),
        (lambda w, b, *t: fusednorm.batch_norm(convolved(*t), w, b * b, w, b, False), 1),
    ],
    ids=["read", "of two norms", "without a mean", "of an evaluation"],
)  # fmt: skip
def test_biases_that_somebody_sees_stay(call: Callable[..., Any], norms: int) -> None:
    compiler = compiled(call, [drawn(*shape) for shape in (CHANNELS, CHANNELS, IMAGE, KERNEL, CHANNELS)], False)
    assert len(compiler.nodes(FORWARD)) + len(compiler.nodes(SUM_FORWARD)) == norms


def test_the_gradient_of_a_bias_that_is_taken_away_is_zero() -> None:
    """torch sums the gradient of a convolution's output in a graph for a GPU."""
    graph, meta = Graph(), torch.empty(3, 8, 6, 5)
    gradient, input, mean, rstd = (graph.placeholder(name) for name in ("gradient", "input", "mean", "rstd"))
    input.meta["val"] = meta
    operands = gradient, input, mean, rstd, None, None, None, None
    of_norm = "instance_norm", 0, 1, "", 0.0, True, [True, *[False] * 4]
    backward = graph.call_function(OPS.norm_backward.default, (*operands, *of_norm))
    grad = graph.call_function(operator.getitem, (backward, 0))
    grad.meta["val"] = meta
    sums = []
    for dims in ([0, 2, 3], [2, 3], [0, 1, 2, 3]):
        sums.append(graph.call_function(aten.sum.dim_IntList, (grad, dims)))
        sums[-1].meta["val"] = meta.sum(dims)
    output = graph.output(tuple(sums))
    biases.drop_bias(graph, backward, "instance_norm|0|1|0.0||0.0|1")
    first, *others = output.args[0]
    assert (first.target, first.args) == (aten.full.default, ([8], 0.0))
    made = first.target(*first.args, **first.kwargs)
    assert (made.dtype, made.device, made.is_pinned()) == (meta.dtype, meta.device, False)
    assert [node.target for node in others] == [aten.sum.dim_IntList] * 2
