"""Graphs as JSON: their declarations, under a version, and read back with every value checked.

    {"format": "fusednorm.graph", "version": 1, "name": ..., "device": "cpu", "io_data_type": "float32", ...,
     "tensors": [{"uid": 1, "name": "x", "dims": [..], "strides": [..], "dtype": "float32", "virtual": false}, ...],
     "nodes": [{"kind": "groupnorm", "name": ..., "inputs": {"x": 0}, "outputs": {"y": 1}, "attributes": {..}}, ...],
     "plan": "fused:cpu.planes"}

Nodes name tensors by their place in the list. Inferred values are left out, and inferred again. Reading makes numbers,
words, lists and dicts, and nothing else: no code in a file can run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fusednorm.dtypes import dtype_name
from fusednorm.graph.errors import GraphError, GraphFormatError
from fusednorm.text import MOST_BYTES, read_bytes

if TYPE_CHECKING:
    from fusednorm.graph.graph import Graph

FORMAT = "fusednorm.graph"
VERSION = 1
_DTYPES = ("io_data_type", "intermediate_data_type", "compute_data_type")


def to_json(graph: Graph) -> str:
    """The graph's text, stable for equal graphs."""
    return json.dumps(as_dict(graph), indent=1, allow_nan=False) + "\n"


def as_dict(graph: Graph) -> dict[str, Any]:
    place = {tensor: index for index, tensor in enumerate(graph.tensors)}
    tensors = []
    for tensor in graph.tensors:
        declared = tensor.declared | {"name": tensor.name or None}
        entry = {
            key: declared[key] for key in ("uid", "name", "dims", "strides", "value") if declared.get(key) is not None
        }
        if "dtype" in declared:
            entry["dtype"] = dtype_name(declared["dtype"])
        tensors.append(entry | {"virtual": tensor.is_virtual})
    nodes = [
        {
            "kind": node.kind.name,
            "name": node.name,
            "inputs": {port: place[tensor] for port, tensor in node.inputs.items()},
            "outputs": {port: place[tensor] for port, tensor in node.outputs.items()},
            "attributes": {key: value for key, value in node.attributes.items() if value is not None},
        }
        for node in graph.nodes
    ]
    return {
        "format": FORMAT,
        "version": VERSION,
        "name": graph.name,
        "device": graph.declared_device.type,
        **{key: dtype_name(getattr(graph, key)) for key in _DTYPES},
        "tensors": tensors,
        "nodes": nodes,
        "plan": graph._plan.name if graph._plan is not None else graph.saved_plan,
    }


def read(path: str | Path) -> str:
    """The text of a file; raises GraphFormatError where it cannot be a graph, OSError as open does."""
    return decoded(read_bytes(path), str(path))


def decoded(content: bytes, where: str) -> str:
    """The text of a graph's bytes; raises GraphFormatError where it cannot be a graph."""
    if len(content) > MOST_BYTES:
        raise GraphFormatError(f"{where}: more than {MOST_BYTES} bytes; expected a graph of at most as many")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise GraphFormatError(f"{where}: it is no UTF-8 text ({error}); save the graph again") from None


def from_json(text: str, device: torch.device | str | None = None) -> Graph:
    """The graph of a text; raises GraphFormatError, which names the place of the mistake."""
    from fusednorm.graph.graph import Graph

    root = _Place(_parse(text), "the file")
    if root.get("format", str) != FORMAT:
        raise root.wrong(f"format is {root.value['format']!r}; expected {FORMAT!r}; it is no saved graph")
    version = root.get("version", int)
    if version > VERSION:
        raise GraphFormatError(
            f"the saved graph has version {version} and this fusednorm reads up to {VERSION}; install a newer "
            "fusednorm, or save the graph again with this one"
        )
    if version < 1:
        raise root.wrong(f"version is {version}; expected 1 to {VERSION}")
    saved = root.get("device", str)
    if device is None and saved not in ("cpu", "cuda"):
        raise root.wrong(f"device is {saved!r}; expected 'cpu' or 'cuda'; give device=...")
    try:
        dtypes = [root.get(key, str) for key in _DTYPES]
        graph = Graph(*dtypes, name=root.get("name", str), device=saved if device is None else device)
        tensors = [_tensor(graph, entry) for entry in root.entries("tensors")]
        for entry in root.entries("nodes"):
            _node(graph, entry, tensors)
    except GraphFormatError:
        raise
    except GraphError as error:
        raise GraphFormatError(*f"the saved graph is damaged: {error}".split("\n  ")) from None
    plan = root.value.get("plan")
    if plan is not None and not isinstance(plan, str):
        raise root.wrong(f"plan is {plan!r}; expected a name or null")
    graph.saved_plan = plan if graph.declared_device.type == saved else None  # another device has other kernels
    return graph


class _Place:
    """A dict of a file with its place in it, for messages."""

    def __init__(self, value: Any, where: str) -> None:
        self.value, self.where = value, where
        if not isinstance(value, dict):
            raise self.wrong(f"it is {_kind(value)}; expected an object")

    def wrong(self, message: str) -> GraphFormatError:
        return GraphFormatError(f"the saved graph is damaged at {self.where}: {message}")

    def get(self, key: str, kind: type) -> Any:
        if key not in self.value:
            raise self.wrong(f"{key} is missing")
        value = self.value[key]
        if not isinstance(value, kind) or isinstance(value, bool) is not (kind is bool):
            raise self.wrong(f"{key} is {_kind(value)}; expected {kind.__name__}")
        return value

    def entries(self, key: str) -> list[_Place]:
        return [_Place(value, f"{key}[{index}]") for index, value in enumerate(self.get(key, list))]

    def only(self, *keys: str) -> None:
        unknown = [key for key in self.value if key not in keys]
        if unknown:
            raise self.wrong(f"{', '.join(unknown)} is unknown; expected {', '.join(keys)}")


def _kind(value: Any) -> str:
    return "null" if value is None else f"a {type(value).__name__}"


def _tensor(graph: Graph, entry: _Place) -> Any:
    entry.only("uid", "name", "dims", "strides", "dtype", "value", "virtual")
    given = {key: entry.value.get(key) for key in ("dims", "strides", "dtype", "uid", "name", "value")}
    for key in ("dims", "strides"):
        if given[key] is not None and not isinstance(given[key], list):
            raise entry.wrong(f"{key} is {_kind(given[key])}; expected a list")
    return graph.tensor(**given, is_virtual=entry.get("virtual", bool))


def _node(graph: Graph, entry: _Place, tensors: list[Any]) -> None:
    entry.only("kind", "name", "inputs", "outputs", "attributes")
    ports: list[dict[str, Any]] = []
    for key in ("inputs", "outputs"):
        found = {}
        for port, place in entry.get(key, dict).items():
            if not isinstance(place, int) or isinstance(place, bool) or not 0 <= place < len(tensors):
                raise entry.wrong(f"{key}.{port} is {place!r}; expected the place of a tensor, 0 to {len(tensors) - 1}")
            found[port] = tensors[place]
        ports.append(found)
    attributes = entry.get("attributes", dict)
    for key, value in attributes.items():
        if not isinstance(value, (str, int, float, list)):
            raise entry.wrong(f"attributes.{key} is {_kind(value)}; expected a number, a word or a list of sizes")
    reserved = {"kind", "inputs", "outputs", "name"} & set(attributes)
    if reserved:
        raise entry.wrong(f"attributes.{', '.join(sorted(reserved))} is unknown")
    graph.add_node(entry.get("kind", str), *ports, name=entry.get("name", str), **attributes)


def _parse(text: str) -> Any:
    def refuse(token: str) -> Any:
        raise ValueError(f"{token} is no number")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("a key is there twice")
        return found

    if not isinstance(text, str):
        raise GraphFormatError(f"a graph is read from text, and this is {_kind(text)}")
    try:
        return json.loads(text, parse_constant=refuse, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise GraphFormatError(f"the saved graph is no JSON that a graph could be: {error}; save it again") from None
