"""What validation infers, and that every malformed graph is one clear error of the graph's own class."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graph_support import described

from fusednorm.graph import Graph, InvalidGraphError

# --- inference ---


def test_dims_strides_and_dtypes_are_inferred() -> None:
    graph = Graph(torch.bfloat16)
    x = graph.tensor((2, 8, 4, 5), (160, 1, 40, 8))
    scale = graph.tensor((1, 8, 1, 1))
    z, mean, inv_variance = graph.groupnorm(x, scale, num_groups=4)
    y = graph.pointwise("silu", z).set_output()
    mean.set_output()
    dx, dscale, dbias = graph.groupnorm_backward(z, x, scale, mean, inv_variance, num_groups=4)
    dx.set_output()
    graph.validate()
    assert (z.dims, z.strides, z.dtype, z.is_virtual) == ((2, 8, 4, 5), (160, 1, 40, 8), torch.float32, True)
    assert (y.dims, y.strides, y.dtype) == ((2, 8, 4, 5), (160, 1, 40, 8), torch.bfloat16)
    assert (mean.dims, mean.dtype) == ((2, 4, 1, 1), torch.float32)
    assert (dscale.dims, dscale.dtype) == ((1, 8, 1, 1), torch.bfloat16)
    assert dbias.dims == (1, 8, 1, 1)
    assert (dx.strides, dx.dtype) == (x.strides, torch.bfloat16)
    assert [tensor.uid for tensor in graph.tensors] == list(range(1, 10))
    assert len({tensor.name for tensor in graph.tensors}) == 9


def test_uids_that_were_declared_are_kept_and_others_go_around_them() -> None:
    graph = Graph(torch.float32)
    x, y = graph.tensor((2, 4, 3), uid=2), graph.tensor((2, 4, 3))
    graph.pointwise("add", x, y).set_output().set_uid(7)
    graph.validate()
    assert [tensor.uid for tensor in graph.tensors] == [2, 1, 7]


def test_broadcast_and_statistic_dims() -> None:
    graph = Graph(torch.float32)
    a, b = graph.tensor((2, 1, 3)), graph.tensor((1, 4, 3))
    y = graph.pointwise("add", a, b).set_output()
    x = graph.tensor((5, 3, 8))
    _, mean, _ = graph.layernorm(x, graph.tensor((1, 1, 8)))
    mean.set_output()
    _, other, _ = graph.layernorm(x, normalized_shape=(3, 8))
    other.set_output()
    graph.validate()
    assert y.dims == (2, 4, 3)
    assert mean.dims == (5, 3, 1)
    assert other.dims == (5, 1, 1)


def test_a_change_after_validation_is_inferred_anew() -> None:
    graph = described("norm_activation").validate()
    y = next(tensor for tensor in graph.tensors if tensor.name == "y")
    graph.tensors[0].set_dims((4, 8, 3, 3))
    graph.validate()
    assert y.dims == (4, 8, 3, 3)
    assert y.strides == (72, 9, 3, 1)


# --- mistakes, each with node and port, value, expectation and remedy ---


def _norm(graph: Graph, dims: tuple[int, ...] = (2, 8, 4, 4), **attributes: Any) -> Any:
    return graph.groupnorm(graph.tensor(dims, name="x"), **({"num_groups": 4} | attributes))


def _wrong_groups(graph: Graph) -> None:
    _norm(graph, num_groups=3)[0].set_output()


def _wrong_scale(graph: Graph) -> None:
    graph.groupnorm(graph.tensor((2, 8, 4, 4)), graph.tensor((4,), name="gamma"), num_groups=4)[0].set_output()


def _half_statistics(graph: Graph) -> None:
    _norm(graph)[1].set_output().set_dtype(torch.float16)


def _two_spreads(graph: Graph) -> None:
    x, c = graph.tensor((2, 8, 4, 4)), [graph.tensor((8,)) for _ in range(3)]
    graph.batchnorm_inference(x, c[0], c[1], variance=c[2]).set_output()


def _one_running(graph: Graph) -> None:
    graph.batchnorm(graph.tensor((2, 8, 4, 4)), prev_running_mean=graph.tensor((8,)))[0].set_output()


def _one_element(graph: Graph) -> None:
    graph.instancenorm(graph.tensor((2, 8, 1, 1)))[0].set_output()


def _no_output(graph: Graph) -> None:
    _norm(graph)


def _idle_node(graph: Graph) -> None:
    z = _norm(graph)[0].set_output()
    graph.pointwise("relu", z, name="idle")


def _dangling(graph: Graph) -> None:
    graph.pointwise("relu", graph.tensor((2, 3), is_virtual=True, name="ghost")).set_output()


def _no_dims(graph: Graph) -> None:
    graph.pointwise("relu", graph.tensor(name="shapeless")).set_output()


def _two_names(graph: Graph) -> None:
    graph.pointwise("add", graph.tensor((2, 3), name="same"), graph.tensor((2, 3), name="same")).set_output()


def _mixed(graph: Graph) -> None:
    graph.pointwise("add", graph.tensor((2, 3)), graph.tensor((2, 3), dtype="float16")).set_output()


def _shared_memory(graph: Graph) -> None:
    graph.pointwise("relu", graph.tensor((2, 3))).set_output().set_strides((1, 1))


def _trailing(graph: Graph) -> None:
    graph.layernorm(graph.tensor((4, 6)), normalized_shape=(4,))[0].set_output()


def _phase(graph: Graph) -> None:
    x, s = graph.tensor((2, 8, 4, 4)), [graph.tensor((2, 4)) for _ in range(2)]
    inputs = {"x": x, "mean": s[0], "inv_variance": s[1]}
    graph.add_node("groupnorm", inputs, num_groups=4).outputs["y"].set_output()


def _foreign(graph: Graph) -> None:
    graph.pointwise("relu", Graph(torch.float32).tensor((2, 3))).set_output()


def _missing_port(graph: Graph) -> None:
    x, statistics = graph.tensor((2, 8, 4)), [graph.tensor((2, 4)) for _ in range(2)]
    inputs = {"x": x, "mean": statistics[0], "inv_variance": statistics[1]}
    graph.add_node("groupnorm_backward", inputs, num_groups=4).outputs["dx"].set_output()


def _epsilon(graph: Graph) -> None:
    _norm(graph, epsilon=float("nan"))[0].set_output()


MISTAKES: dict[Callable[[Graph], None], str] = {
    _wrong_groups: r"node groupnorm, port x: the 8 channels.*num_groups=3; expected a divisor of 8; change num_groups",
    _wrong_scale: r"port scale: tensor 'gamma' has dims \(4,\); expected \(1, 8, 1, 1\) or \(8,\);",
    _half_statistics: r"port mean: .*float16; expected float32 or float64",
    _two_spreads: r"node batchnorm_inference: both variance and inv_variance are given; expected one of the two",
    _one_running: r"node batchnorm: one of prev_running_mean.*expected both or neither",
    _one_element: r"node instancenorm.*one element for each statistic; expected more than one",
    _no_output: r"graph: no tensor is an output; expected at least one; set_output",
    _idle_node: r"node idle \(relu\): y are virtual and nothing reads them",
    _dangling: r"tensor 'ghost': it is virtual, and no node writes it; expected a node that writes it",
    _no_dims: r"tensor 'shapeless': it has no dims and is read by node relu, port x",
    _two_names: r"name 'same' is also that of tensor 'same' \(uid 1\); expected a name of its own",
    _mixed: r"node add: a is float32, b is float16; expected one dtype",
    _shared_memory: r"strides \(1, 1\), so that elements share memory",
    _trailing: r"the normalized dims \(4,\) are not the last of x's \(4, 6\)",
    _phase: r"mean and inv_variance are given in the training phase; expected the inference phase",
    _foreign: r"node relu, port x: the tensor belongs to another graph",
    _missing_port: r"node groupnorm_backward, port dy: it is not connected; expected a data tensor; give dy=",
    _epsilon: r"epsilon is nan; expected a finite number",
}


@pytest.mark.parametrize("build", MISTAKES, ids=lambda build: build.__name__.lstrip("_"))
def test_a_mistake_is_reported_with_its_place_value_and_remedy(build: Callable[[Graph], None]) -> None:
    graph = Graph(torch.float32)
    build(graph)
    with pytest.raises(InvalidGraphError) as error:
        graph.validate()
    assert re.search(MISTAKES[build], str(error.value))
    assert len(error.value.mistakes) == 1, str(error.value)


def test_every_mistake_is_reported_at_once() -> None:
    graph = Graph(torch.float32)
    _wrong_groups(graph)
    _one_running(graph)
    with pytest.raises(InvalidGraphError) as error:
        graph.validate()
    assert len(error.value.mistakes) == 2


def test_what_cannot_be_written_down_is_refused_there() -> None:
    graph = Graph(torch.float32)
    x = graph.tensor((2, 8, 4))
    refused: list[Callable[[], Any]] = [
        lambda: graph.add_node("convolution", {"x": x}),
        lambda: graph.add_node("relu", {"z": x}),
        lambda: graph.add_node("relu", {"x": torch.zeros(2)}),  # type: ignore[dict-item]
        lambda: graph.add_node("relu", {"x": x}, alpha=1.0),
        lambda: graph.pointwise("softmax", x),
        lambda: graph.pointwise("add", x),
        lambda: graph.tensor("24"),  # type: ignore[arg-type]
        lambda: graph.tensor((2, 3), dtype=torch.int32),
        lambda: graph.tensor((2, 3), uid="one"),  # type: ignore[arg-type]
        lambda: graph.tensor_like([1.0]),  # type: ignore[arg-type]
        lambda: Graph("float8"),
    ]
    for call in refused:
        with pytest.raises(InvalidGraphError, match="expected"):
            call()
