"""The processes of test_distributed_fused.py: calls of distributed_cases.py and spread_cases.py by Triton's kernels in
its interpreter, over gloo.

``python fused_worker.py FOLDER cpu WORLD_SIZE...``, with TRITON_INTERPRET=1; the processes meet in FOLDER.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import distributed_cases
import distributed_worker
import dtensor_cases
import dtensor_worker
import spread_cases
import spread_worker
import torch
import torch.distributed as dist
from interpreter_support import hasten
from torch.distributed.device_mesh import init_device_mesh

import fusednorm
from fusednorm.backends.triton.config.kinds import SpreadRowsConfig
from fusednorm.backends.triton.plans import spread_rows
from fusednorm.distributed import rows, whole
from fusednorm.distributed.fused import normalize_fused

#: An empty rank, each order of memory, float64, running statistics by a number and by a tensor, no gradient. The
#: interpreter truncates to bfloat16.
MODULES = ("modulated", "double", "cumulative", "frozen")
#: The same for shared parameters and units of groups; one element of a statistic on each rank; groups that are cut, and
#: rows whose elements the ranks have in parts.
FUNCTIONS = (
    "group, width, channels_last",
    "group, one position each",
    "instance, NHWC",
    "batch, height, modulated",
    "batch, samples, modulated",
    "group, cut",
    "layer, elements",
    "layer, two dims",
    "rms, double",
)
#: Rows with a scale and a shift, across memory and along it.
DTENSORS = ("layer, channels", "layer, channels last")


def run_by_kernels(*arguments: Any, **keywords: Any) -> Any:
    found = normalize_fused(*arguments, **keywords)
    assert found is not None, "no kernel ran the call"
    return found


def rank_main(rank: int, world_size: int, folder: Path, device: str) -> None:
    distributed_worker.meet(rank, world_size, folder, device)
    whole.normalize_fused = rows.normalize_fused = run_by_kernels  # type: ignore[attr-defined]
    # Rows in several chunks of several steps, and their gradients in several shares of several steps.
    spread_rows.spread_rows_for = lambda problem, rows, last: SpreadRowsConfig(2, 2, 1)  # type: ignore[attr-defined]
    spread_rows.spread_rows_programs = lambda: 6  # type: ignore[attr-defined]
    found = {}
    with fusednorm.use_instance("triton.tiles"):
        for name in MODULES:
            case = distributed_cases.CASES[name]
            found[name] = [distributed_worker.trained(case, rank, world_size, None, device)]
        for name in FUNCTIONS:
            with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved):  # which are checked
                found[name] = [spread_worker.results(spread_cases.CASES[name], rank, world_size, device)]
        mesh = init_device_mesh(device, (world_size,))
        found["DTensors"] = {}
        for name in DTENSORS:
            one = dtensor_cases.CASES[name]
            results = dtensor_cases.results(one, dtensor_worker.spread(one, mesh))
            found["DTensors"][name] = [dtensor_worker.gathered(results)] * 2  # what two runs would leave
    torch.save(found, folder / f"rank{rank}of{world_size}.pt")
    dist.barrier()
    dist.destroy_process_group()


def main(folder: Path, device: str, world_sizes: list[int]) -> int:
    """How many processes failed."""
    torch.set_num_threads(1)
    hasten()
    return distributed_worker.in_processes(rank_main, folder, device, world_sizes)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], [int(size) for size in sys.argv[3:]]))
