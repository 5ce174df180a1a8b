"""Graphs on disk: the same bits in another process, and a clear error for whatever is damaged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from graph_support import GRAPHS, described, run
from hypothesis import given, settings
from hypothesis import strategies as st

from fusednorm.graph import Graph, GraphFormatError, UnsupportedGraphError, draw

SOURCES = str(Path(__file__).parents[1] / "src")


@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_is_the_same_after_a_round_trip(name: str) -> None:
    graph = described(name, torch.bfloat16, "nhwc")
    text = graph.to_json()
    again = Graph.from_json(text)
    assert again.to_json() == text
    pack, other = run(graph), run(again)
    assert set(pack) == set(other)
    assert all(torch.equal(pack[one], other[one]) for one in pack)
    assert [tensor.uid for tensor in graph.tensors] == [tensor.uid for tensor in again.tensors]


def test_the_chosen_plan_is_saved_and_taken_again(tmp_path: Path) -> None:
    graph = described("norm_activation").build("unfused:cpu.planes_split")
    graph.save(tmp_path / "graph.json")
    again = Graph.load(tmp_path / "graph.json")
    assert again.saved_plan == "unfused:cpu.planes_split"
    assert again.build().plan.name == "unfused:cpu.planes_split"
    assert again.build("fused:cpu.planes").plan.name == "fused:cpu.planes"


def test_another_process_gives_the_same_bits(tmp_path: Path) -> None:
    graph = described("activation_backward_norm_backward", torch.bfloat16, "nhwc").build()
    pack = draw(graph)
    graph.execute(pack)
    graph.save(tmp_path / "graph.json")
    torch.save(pack, tmp_path / "pack.pt")
    program = """
import sys, torch
from fusednorm.graph import Graph
graph = Graph.load(sys.argv[1]).build()
pack = torch.load(sys.argv[2])
expected = {tensor.name: pack[tensor.name].clone() for tensor in graph.outputs}
for name in expected:
    pack[name].zero_()
graph.execute(pack)
assert all(torch.equal(pack[name], tensor) for name, tensor in expected.items())
print(graph.plan.name, len(expected))
"""
    arguments = [sys.executable, "-c", program, str(tmp_path / "graph.json"), str(tmp_path / "pack.pt")]
    environment = {**os.environ, "PYTHONPATH": SOURCES}
    done = subprocess.run(arguments, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [graph.plan.name, "4"]


def test_a_device_can_take_the_place_of_the_saved_one() -> None:
    text = described("add", device="cuda").to_json()
    assert Graph.from_json(text, device="cpu").device == torch.device("cpu")
    planned = described("add").build().to_json()
    assert Graph.from_json(planned, device="cpu").saved_plan == "torch"
    assert Graph.from_json(planned, device="meta").saved_plan is None
    if not torch.cuda.is_available():
        with pytest.raises(UnsupportedGraphError, match="torch finds no GPU; give device='cpu'"):
            Graph.from_json(text).build()


# --- damage ---


def _set(*path: Any, value: Any) -> Any:
    def damage(data: dict[str, Any]) -> None:
        place: Any = data
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value

    return damage


DAMAGED = {
    "newer": (_set("version", value=2), "has version 2 and this fusednorm reads up to 1; install a newer"),
    "no version": (_set("version", value=0), "version is 0; expected 1 to 1"),
    "version as text": (_set("version", value="1"), "version is a str; expected int"),
    "other format": (_set("format", value="onnx"), "format is 'onnx'; expected 'fusednorm.graph'"),
    "no nodes": (lambda data: data.pop("nodes"), "at the file: nodes is missing"),
    "no list": (_set("tensors", value={}), "tensors is a dict; expected list"),
    "dims": (_set("tensors", 0, "dims", value="2,8"), r"tensors\[0\]: dims is a str; expected a list"),
    "nested dims": (_set("tensors", 0, "dims", value=[[1]]), "a sequence of ints"),
    "dtype": (_set("tensors", 0, "dtype", value="__import__('os')"), "dtype is .*expected float64"),
    "virtual": (_set("tensors", 0, "virtual", value=1), "virtual is a int; expected bool"),
    "field": (_set("tensors", 0, "code", value="print()"), r"tensors\[0\]: code is unknown"),
    "kind": (_set("nodes", 0, "kind", value="exec"), "the kind 'exec' does not exist"),
    "place": (_set("nodes", 0, "inputs", "x", value=99), r"nodes\[0\]: inputs.x is 99; expected the place of a tensor"),
    "bool place": (_set("nodes", 0, "inputs", "x", value=True), "inputs.x is True"),
    "port": (_set("nodes", 0, "inputs", "w", value=0), "there is no input 'w'"),
    "attribute": (_set("nodes", 0, "attributes", "num_groups", value={"a": 1}), "attributes.num_groups is a dict"),
    "reserved": (_set("nodes", 0, "attributes", "outputs", value=1), "attributes.outputs is unknown"),
    "device": (_set("device", value="tpu:x"), "device is 'tpu:x'; expected 'cpu' or 'cuda'"),
    "plan": (_set("plan", value=["x"]), "expected a name or null"),
}


@pytest.mark.parametrize("how", DAMAGED)
def test_a_damaged_graph_is_an_error_that_says_where(how: str) -> None:
    data = json.loads(described("norm_activation").to_json())
    damage, message = DAMAGED[how]
    damage(data)
    with pytest.raises(GraphFormatError, match=message):
        Graph.from_json(json.dumps(data))


def test_what_is_no_json_of_a_graph() -> None:
    text = described("norm_activation").to_json()
    broken = [text[:-20], text.replace("1e-05", "NaN"), text.replace('"format"', '"name"')]
    for damaged in ("", "{", "[]", "null", "NaN", "[" * 100_000, *broken):
        with pytest.raises(GraphFormatError):
            Graph.from_json(damaged)


def test_files_that_cannot_be_graphs(tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(GraphFormatError, match="no UTF-8"):
        Graph.load(path)
    with pytest.raises(FileNotFoundError):
        Graph.load(tmp_path / "missing.json")


@settings(max_examples=300)
@given(name=st.sampled_from(sorted(GRAPHS)), data=st.data())
def test_a_changed_character_is_a_format_error_or_another_graph(name: str, data: st.DataObject) -> None:
    text = described(name).to_json()
    place = data.draw(st.integers(0, len(text) - 1))
    changed = text[:place] + data.draw(st.sampled_from(list('0-9"{}[],:xnN \\'))) + text[place + 1 :]
    try:
        graph = Graph.from_json(changed)
    except GraphFormatError:
        return
    assert isinstance(graph, Graph)
