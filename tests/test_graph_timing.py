"""What the graph API may cost in Python, and what fusing must gain."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from graph_support import described

import fusednorm
from fusednorm.graph import Graph, draw
from fusednorm.machine.timing import CpuTimer

SOURCES = str(Path(__file__).parents[1] / "src")
LARGE = (8, 256, 56, 56)


def _within(limit: float, one: Callable[[], object], other: Callable[[], object]) -> bool:
    """Whether ``one`` takes at most so many times as long as ``other``, in turns; once of three times, as the machine
    may be busy."""
    timer = CpuTimer(seconds=0.3)

    def ratio() -> float:
        timings = timer.measure({"one": [one], "other": [other]})
        return timings["one"].median / timings["other"].median

    return any(ratio() <= limit for _ in range(3))


@pytest.mark.timing
def test_execute_costs_at_most_half_more_than_the_functional_call() -> None:
    dims, groups = (1, 32, 8, 8), 8
    graph = described("norm_activation", dims=dims)
    for tensor in graph.outputs:
        tensor.set_output(tensor.name == "y")
    for node in graph.nodes:
        if "num_groups" in node.attributes:
            node.attributes["num_groups"] = groups
    pack = draw(graph.build())
    x, scale, bias = pack["x"], pack["scale"].flatten(), pack["bias"].flatten()
    call = lambda: fusednorm.group_norm(x, groups, scale, bias, activation="silu")  # noqa: E731
    assert _within(1.5, lambda: graph.execute(pack), call)


@pytest.mark.timing
def test_a_backward_costs_at_most_half_more_than_the_functional_call() -> None:
    graph = described("saved_backward", dims=(1, 32, 8, 8)).build()
    pack = draw(graph)
    x, scale, bias = pack["x"], pack["scale"].flatten(), pack["bias"].flatten()
    call = lambda: fusednorm.ops.group_norm_backward(  # noqa: E731
        pack["dy"], x, pack["mean"], pack["inv_variance"], 4, scale, bias, activation="silu"
    )
    assert _within(1.5, lambda: graph.execute(pack), call)


@pytest.mark.timing
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("name", ["norm_activation", "saved_backward", "batchnorm_chain"])
def test_a_fused_plan_is_half_again_as_fast_as_node_by_node(name: str, layout: str) -> None:
    """With four groups where the workload has 32: fewer units, which the fused kernels like less."""
    fused, alone = (described(name, torch.float32, layout, LARGE).build() for _ in range(2))
    alone.build_plans(next(plan.name for plan in alone.plans if plan.name.startswith("unfused:")))
    pack = draw(fused)
    other = dict(pack)

    def with_workspace(graph: Graph) -> Callable[[], None]:
        workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8)
        return lambda: graph.execute(other, workspace)

    assert _within(1 / 1.5, with_workspace(fused), with_workspace(alone))


def test_importing_fusednorm_imports_no_graph_and_the_graph_no_kernel_language() -> None:
    program = """
import sys, torch, fusednorm
assert not any(name.startswith("fusednorm.graph") for name in sys.modules)
graph = fusednorm.graph.Graph(torch.float32)
graph.pointwise("relu", graph.tensor((2, 3))).set_output()
graph.validate()
assert not {"numba", "llvmlite", "triton", "typer", "rich"} & set(sys.modules), set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True, env={"PYTHONPATH": SOURCES})
