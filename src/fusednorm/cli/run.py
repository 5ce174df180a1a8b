"""fusednorm run: a saved graph, executed and verified on drawn inputs."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer

from fusednorm.cli import output
from fusednorm.graph import Graph, GraphError, draw


def run(
    graph_path: Annotated[Path, typer.Argument(help="A file of Graph.save, or - for stdin.", metavar="GRAPH.json")],
    plan: Annotated[str, typer.Option(help="The plan to run; by default the saved one, or the first.")] = "",
    device: Annotated[str, typer.Option(help="cpu or cuda; by default the saved one.")] = "",
    seed: Annotated[int, typer.Option(help="Of the drawn inputs.")] = 0,
    tune: Annotated[bool, typer.Option("--tune", help="Time every plan and run the fastest.")] = False,
    time: Annotated[bool, typer.Option("--time", help="Time the plan.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout.")] = False,
) -> None:
    """Executes a saved graph on drawn inputs and verifies every output against float64; exit code 1 if one is wrong."""
    try:
        graph = _load(graph_path, device)
        graph.build(plan or None)
        pack = draw(graph, seed)
        workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device=graph.device)
    except (GraphError, OSError) as error:
        raise typer.BadParameter(str(error)) from None
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
        typer.echo(str(graph.explain()))
        for name, value in seconds.items():
            typer.echo(f"  tuned      {name}: {value * 1e3:.4g} ms")
        if measured is not None:
            typer.echo(f"  time       {measured * 1e3:.4g} ms")
        typer.echo(str(found))
    if not found.ok:
        raise typer.Exit(output.CHECK_FAILED)


def _load(path: Path, device: str) -> Graph:
    if str(path) == "-":
        return Graph.from_json(sys.stdin.read(), device=device or None)
    return Graph.load(path, device=device or None)


def _time(graph: Graph, pack: dict[str, torch.Tensor], workspace: torch.Tensor) -> float:
    from torch.utils.benchmark import Timer

    names = {"graph": graph, "pack": pack, "workspace": workspace}
    timer = Timer("graph.execute(pack, workspace)", globals=names, num_threads=torch.get_num_threads())
    return float(timer.blocked_autorange(min_run_time=0.2).median)
