"""fusednorm run: a saved graph, executed and verified on drawn inputs."""

from __future__ import annotations

import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer

from fusednorm.bench.memory import require
from fusednorm.cli import output
from fusednorm.graph import Graph, draw
from fusednorm.graph.serialization import decoded
from fusednorm.graph.tensors import extent
from fusednorm.machine.description import resolve_device
from fusednorm.text import MOST_BYTES


def run(
    graph_path: Annotated[Path, typer.Argument(help="A file of Graph.save, or - for stdin.", metavar="GRAPH.json")],
    plan: Annotated[
        str, typer.Option(help="The plan to run; by default the saved one, or the first.", callback=output.not_empty)
    ] = "",
    device: Annotated[str, typer.Option(help="cpu or cuda; by default the saved one.", callback=output.not_empty)] = "",
    seed: Annotated[int, typer.Option(help="Of the drawn inputs.", min=-(2**63), max=2**64 - 1)] = 0,
    tune: Annotated[bool, typer.Option("--tune", help="Time every plan and run the fastest.")] = False,
    time: Annotated[bool, typer.Option("--time", help="Time the plan.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout.")] = False,
) -> None:
    """Executes a saved graph on drawn inputs and verifies every output against float64; exit code 1 if one is wrong."""
    graph = _load(graph_path, _device(device))
    graph.validate()
    _require_memory(graph)
    graph.build(plan or None)
    pack = draw(graph, seed)
    workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device=graph.device)
    seconds = graph.autotune(pack, workspace) if tune else {}
    if tune:
        workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device=graph.device)
    graph.execute(pack, workspace)
    found = graph.verify(pack)
    measured = _time(graph, pack, workspace) if time else None
    if as_json:
        verdicts = {name: asdict(verdict) for name, verdict in found.verdicts.items()}
        result = {"graph": graph.name, "plan": graph.plan.name, "ok": found.ok, "outputs": verdicts}
        output.print_json(result | {"seconds": measured, "tuned": seconds})
    else:
        output.emit(str(graph.explain()))
        for name, value in seconds.items():
            output.emit(f"  tuned      {name}: {value * 1e3:.4g} ms")
        if measured is not None:
            output.emit(f"  time       {measured * 1e3:.4g} ms")
        output.emit(str(found))
    if not found.ok:
        raise typer.Exit(output.CHECK_FAILED)


def _load(path: Path, device: str | None) -> Graph:
    if str(path) == "-":
        return Graph.from_json(decoded(sys.stdin.buffer.read(MOST_BYTES + 1), "stdin"), device=device)
    return Graph.load(path, device=device)


def _device(text: str) -> str | None:
    """A device on which drawn tensors can be computed, read back and judged: the CPU, or a GPU that is there."""
    if not text:
        return None
    found = re.fullmatch(r"cpu|cuda(?::(\d{1,4}))?", text, re.ASCII)
    if found is None:
        raise typer.BadParameter(f"device: {text!r} is unknown; expected cpu, cuda or cuda:N")
    with output.usage_errors():
        resolve_device("cpu" if text == "cpu" else "cuda")
    if found[1] is not None and int(found[1]) >= torch.cuda.device_count():
        raise typer.BadParameter(f"device: {text!r} is not there; torch finds {torch.cuda.device_count()} GPUs")
    return text


def _require_memory(graph: Graph) -> None:
    """Refuses a graph too large for its device, or for the host, where inputs are drawn and outputs judged."""
    sizes = {one: extent(one.dims, one.strides) for one in graph.tensors if one.dims and one.strides}
    stored = sum(size * (4 if one.dtype is None else one.dtype.itemsize) for one, size in sizes.items())
    made = {tensor for node in graph.nodes for tensor in node.outputs.values()}
    # The judge keeps each result three times, in float64, in float64 from rounded tensors and in float32, and the
    # intermediates of the reference.
    judging = 28 * sum(size for one, size in sizes.items() if one in made) + 40 * max(sizes.values(), default=0)
    on_host = graph.device.type == "cpu"
    require(judging + (stored if on_host else 0), "cpu", f"graph {graph.name!r} with its judge", "use smaller tensors")
    if not on_host:
        require(stored, str(graph.device), f"graph {graph.name!r}", "use smaller tensors")


def _time(graph: Graph, pack: dict[str, torch.Tensor], workspace: torch.Tensor) -> float:
    from torch.utils.benchmark import Timer

    names = {"graph": graph, "pack": pack, "workspace": workspace}
    timer = Timer("graph.execute(pack, workspace)", globals=names, num_threads=torch.get_num_threads())
    return float(timer.blocked_autorange(min_run_time=0.2).median)
