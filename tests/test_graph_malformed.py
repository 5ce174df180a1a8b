"""Malformed graphs, drawn: each is one clear error of the graph's own class, and none is a crash."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graph_support import GRAPHS, described
from hypothesis import given, settings
from hypothesis import strategies as st

from fusednorm.graph import Graph, GraphError, InvalidGraphError
from fusednorm.graph.serialization import as_dict


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
    tensor["dims"] = draft.choose.choice([[], [-1, *tensor["dims"][1:]], [*tensor["dims"], 3, 7]])
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
    """Two dtypes among a node's tensors from outside; one that is no float where there is one such tensor alone."""
    made = {place for node in draft.nodes for place in node["outputs"].values()}
    outside = [
        [place for port, place in node["inputs"].items() if port in ("x", "dy", "a", "b") and place not in made]
        for node in draft.nodes
    ]
    pairs = [places for places in outside if len(set(places)) > 1]
    if pairs:
        draft.tensors[draft.choose.choice(pairs)[0]]["dtype"] = "float16"
        return
    place = draft.choose.choice([place for places in outside for place in places])
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
    wrong = {"num_groups": [0, -4, 3, 1.5, "4", None, True], "epsilon": [float("inf"), "small", float("nan"), None]}
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
    mutations=st.lists(st.sampled_from(MUTATIONS), min_size=1, max_size=3, unique=True),
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
