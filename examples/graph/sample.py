"""What the samples share: their options, the stages with a word on each, verification and timing."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from fusednorm.graph import Graph, GraphError, TensorAttributes, channels_last_strides, draw

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
LAYOUTS = ("nchw", "nhwc")
SHOWN = 10  # values of each result


@dataclass(frozen=True)
class Case:
    """One run of a sample: dims in NCHW order whatever the layout, the dtype of the data, the memory order."""

    dims: tuple[int, ...]
    dtype: torch.dtype
    layout: str
    groups: int

    def data(self, graph: Graph, name: str) -> TensorAttributes:
        """A tensor of the dims in the layout."""
        strides = channels_last_strides(self.dims) if self.layout == "nhwc" else None
        return graph.tensor(self.dims, strides, self.dtype, name=name)

    def channels(self, graph: Graph, name: str) -> TensorAttributes:
        """A float32 tensor of one element per channel: (1, C, 1, 1)."""
        return graph.tensor((1, self.dims[1], *[1] * (len(self.dims) - 2)), dtype=torch.float32, name=name)

    def per_group(self, graph: Graph, name: str) -> TensorAttributes:
        """A float32 tensor of one element per sample and group."""
        return graph.tensor((self.dims[0], self.groups), dtype=torch.float32, name=name)


Describe = Callable[[Graph, Case], None]


def run(
    title: str,
    describe: Describe,
    dims: Sequence[int],
    groups: int = 0,
    arguments: Sequence[str] | None = None,
) -> int:
    """Runs a sample in each dtype and layout asked for; the exit code is 1 where a verification failed."""
    parser = argparse.ArgumentParser(description=title)
    shape = ",".join(map(str, dims))
    parser.add_argument("--dims", default=shape, help=f"sizes in NCHW order, whatever the layout (default {shape})")
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="only this one; may be repeated")
    parser.add_argument("--layout", choices=LAYOUTS, action="append", help="only this one; may be repeated")
    parser.add_argument("--verify", action=argparse.BooleanOptionalAction, default=True, help="against float64")
    parser.add_argument("--time", action="store_true", help="the median time of an execution")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    if groups:
        parser.add_argument("--groups", type=int, default=groups, help=f"number of groups (default {groups})")
    options = parser.parse_args(arguments)
    try:
        sizes = tuple(int(size) for size in options.dims.split(","))
    except ValueError:
        parser.error(f"--dims: {options.dims!r} is no list of sizes; write them as {shape}")
    wrong = 0
    for dtype, layout in product(options.dtype or DTYPES, options.layout or LAYOUTS):
        case = Case(sizes, DTYPES[dtype], layout, getattr(options, "groups", 0))
        print(f"Running {title}, {dtype}, {layout}, dims {sizes}")
        try:
            wrong += not _run(title, describe, case, options)
        except GraphError as error:
            parser.error(str(error))
    verdict = "done" if not options.verify else f"done, {wrong} failed" if wrong else "verified"
    print(f"All runs of {title} {verdict}.")
    return int(wrong > 0)


def _run(title: str, describe: Describe, case: Case, options: argparse.Namespace) -> bool:
    graph = Graph(case.dtype, torch.float32, torch.float32, name=title, device=options.device)
    describe(graph, case)

    graph.validate()
    print("  validated")
    graph.build_operation_graph()
    print(f"  operation graph built: {', '.join(one.label for one in graph.explain().operations)}")
    graph.create_execution_plans()
    print(f"  execution plans created: {len(graph.plans)}")
    reasons = graph.check_support()
    print(f"  support checked: {sum(reason is None for reason in reasons.values())} can run")
    graph.build_plans()
    print(f"  plan built: {graph.plan.name}, workspace {graph.get_workspace_size()} bytes")

    pack = draw(graph)
    workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device=graph.device)
    graph.execute(pack, workspace)
    print("  executed")
    for tensor in graph.outputs:
        print(f"  first values of {tensor.name}: {_first(pack[tensor.name])}")
    if options.time:
        names = {"graph": graph, "pack": pack, "workspace": workspace}
        timer = Timer("graph.execute(pack, workspace)", globals=names, num_threads=torch.get_num_threads())
        print(f"  time {timer.blocked_autorange(min_run_time=0.2).median * 1e3:.4g} ms")
    if not options.verify:
        return True
    found = graph.verify(pack)
    print(f"  {found}")
    return found.ok


def _first(tensor: Tensor) -> str:
    return " ".join(f"{value:.5g}" for value in tensor.flatten()[:SHOWN].tolist())


def main(title: str, describe: Describe, dims: Sequence[int], groups: int = 0) -> None:
    """The entry point of a sample's script."""
    sys.exit(run(title, describe, dims, groups))
