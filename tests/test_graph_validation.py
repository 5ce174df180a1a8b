"""What validation infers, and that every malformed graph is one clear error of the graph's own class."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graph_support import GRAPHS, described
from hypothesis import given, settings
from hypothesis import strategies as st

from fusednorm.graph import Graph, GraphError, InvalidGraphError
from fusednorm.graph.serialization import as_dict

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
    _norm(graph, epsilon=-1.0)[0].set_output()


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
    _epsilon: r"epsilon is -1.0; expected a number of at least 0",
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


# --- malformed graphs, drawn ---


class Draft:
    """A right graph as data, which a mutation spoils."""

    def __init__(self, name: str, dtype: torch.dtype, choose: random.Random) -> None:
        data = as_dict(described(name, dtype))
        self.dtype, self.choose = dtype, choose
        self.tensors: list[dict[str, Any]] = data["tensors"]
        self.nodes: list[dict[str, Any]] = data["nodes"]

    def node(self) -> dict[str, Any]:
        return self.choose.choice(self.nodes)

    def read(self) -> dict[str, Any]:
        """A declared tensor that some node reads."""
        made = {place for node in self.nodes for place in node["outputs"].values()}
        places = [place for node in self.nodes for place in node["inputs"].values() if place not in made]
        return self.tensors[self.choose.choice(places)]

    def build(self) -> Graph:
        graph = Graph(self.dtype, name="malformed")
        tensors = [
            graph.tensor(
                one.get("dims"), one.get("strides"), one.get("dtype"), uid=one.get("uid"), name=one.get("name"),
                is_virtual=one["virtual"],
            )
            for one in self.tensors
        ]  # fmt: skip
        for node in self.nodes:
            ports = [{port: tensors[place] for port, place in node[side].items()} for side in ("inputs", "outputs")]
            graph.add_node(node["kind"], *ports, name=node["name"], **node["attributes"])
        return graph


def _drop_port(draft: Draft) -> None:
    node = draft.node()
    required = [port for port in node["inputs"] if port in ("x", "dy", "a", "b")]
    del node["inputs"][draft.choose.choice(required)]


def _wrong_dims(draft: Draft) -> None:
    tensor = draft.read()
    tensor.pop("strides", None)
    tensor["dims"] = draft.choose.choice([[], [3, *tensor["dims"]], [-1, *tensor["dims"][1:]], [*tensor["dims"], 3, 7]])
    if len(tensor["dims"]) > 1 and len(draft.nodes[0]["inputs"]) == 1:
        tensor["dims"] = []  # alone, a pointwise operand may have any dims


def _wrong_strides(draft: Draft) -> None:
    tensor = draft.read()
    tensor["strides"] = draft.choose.choice([[1], [-1] * len(tensor["dims"]), [1] * (len(tensor["dims"]) + 1)])
    if tensor["strides"] == [1] and len(tensor["dims"]) == 1:
        tensor["strides"] = [-1]


def _cycle(draft: Draft) -> None:
    node = draft.node()
    port = draft.choose.choice([port for port in node["inputs"] if port in ("x", "dy", "a", "b")])
    node["inputs"][port] = next(iter(node["outputs"].values()))


def _same_uid(draft: Draft) -> None:
    for tensor in draft.choose.sample(draft.tensors, 2):
        tensor["uid"] = 5


def _same_name(draft: Draft) -> None:
    for tensor in draft.choose.sample(draft.tensors, 2):
        tensor["name"] = "twin"


def _dangling_virtual(draft: Draft) -> None:
    draft.read()["virtual"] = True


def _unused_tensor(draft: Draft) -> None:
    draft.tensors.append({"name": "unused", "dims": [2, 3], "virtual": draft.choose.random() < 0.5})


def _dtype_mix(draft: Draft) -> None:
    data = [place for node in draft.nodes for port, place in node["inputs"].items() if port in ("x", "dy", "a", "b")]
    made = {place for node in draft.nodes for place in node["outputs"].values()}
    place = draft.choose.choice([place for place in data if place not in made])
    draft.tensors[place]["dtype"] = draft.choose.choice(["int64", "float8", "", "complex64"])


def _two_writers(draft: Draft) -> None:
    node = draft.node()
    draft.nodes.append({**node, "name": "second"})


def _same_node_name(draft: Draft) -> None:
    outputs = {"y": len(draft.tensors)}
    draft.tensors.append({"name": "extra", "virtual": False})
    extra = {"kind": "relu", "name": draft.node()["name"], "inputs": {"x": 0}, "outputs": outputs, "attributes": {}}
    draft.nodes.append(extra)


def _no_outputs(draft: Draft) -> None:
    for node in draft.nodes:
        for place in node["outputs"].values():
            draft.tensors[place]["virtual"] = True


def _wrong_attribute(draft: Draft) -> None:
    node = draft.node()
    wrong = {"num_groups": [0, -4, 3, 1.5, "4", None, True], "epsilon": [-1.0, "small", float("nan"), None]}
    wrong |= {"momentum": [2.0, -0.1, "0.1"], "phase": ["train", 1], "parameter": [float("inf"), "one"]}
    wrong["normalized_shape"] = [(7,), "30", (0,), (-1,), ()]
    known = [name for name in wrong if name in node["attributes"]]
    if not known:
        node["attributes"]["alpha"] = 1.0
        return
    name = draft.choose.choice(known)
    node["attributes"][name] = draft.choose.choice(wrong[name])


def _unknown(draft: Draft) -> None:
    node = draft.node()
    if draft.choose.random() < 0.5:
        node["kind"] = draft.choose.choice(["conv", "", "softmax", "batch_norm"])
    else:
        node["inputs"]["gamma"] = next(iter(node["inputs"].values()))


def _declared_result(draft: Draft) -> None:
    place = draft.choose.choice(list(draft.node()["outputs"].values()))
    draft.tensors[place]["dims"] = [11, 13]


MUTATIONS = (
    _drop_port, _wrong_dims, _wrong_strides, _cycle, _same_uid, _same_name, _dangling_virtual, _unused_tensor,
    _dtype_mix, _two_writers, _same_node_name, _no_outputs, _wrong_attribute, _unknown, _declared_result,
)  # fmt: skip


@settings(max_examples=1000)
@given(
    name=st.sampled_from(sorted(GRAPHS)),
    mutations=st.lists(st.sampled_from(MUTATIONS), min_size=1, max_size=3),
    seed=st.integers(0, 2**32),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_a_malformed_graph_is_one_clear_error(
    name: str, mutations: list[Callable[[Draft], None]], seed: int, dtype: torch.dtype
) -> None:
    draft = Draft(name, dtype, random.Random(seed))
    mutations[0](draft)
    for mutation in mutations[1:]:  # more of them may meet what the first has already taken away
        try:
            mutation(draft)
        except (IndexError, KeyError, ValueError, StopIteration):
            continue
    with pytest.raises(InvalidGraphError) as error:
        draft.build().validate()
    assert error.value.mistakes
    for mistake in error.value.mistakes:
        assert mistake.where
        assert mistake.value
        assert mistake.expected
        assert mistake.remedy
    assert "expected" in str(error.value)


@settings(max_examples=200)
@given(
    name=st.sampled_from(sorted(GRAPHS)),
    edits=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 12)), min_size=1, max_size=4),
)
def test_rewired_graphs_are_right_or_a_graph_error(name: str, edits: list[tuple[int, int, int]]) -> None:
    draft = Draft(name, torch.float32, random.Random(0))
    for first, second, third in edits:
        node = draft.nodes[first % len(draft.nodes)]
        ports = sorted(node["inputs"])
        node["inputs"][ports[second % len(ports)]] = third % len(draft.tensors)
    try:
        graph = draft.build().build()
    except GraphError:
        return
    assert graph.plan.reason is None
