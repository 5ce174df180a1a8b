"""The processes of test_distributed_fused.py on GPUs: forward and backward in a CUDA graph, over NCCL.

``python graphs_worker.py FOLDER cuda WORLD_SIZE...``; the processes meet in FOLDER.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from distributed_worker import in_processes, meet
from torch import Tensor

from fusednorm import distributed
from fusednorm.nn import SyncBatchNorm

Call = Callable[[Tensor], Tensor]


def _module(device: torch.device) -> tuple[Call, list[Tensor], list[Tensor]]:
    module = SyncBatchNorm(16, activation="relu").to(device)
    assert module.running_mean is not None
    assert module.running_var is not None
    return module, list(module.parameters()), [module.running_mean, module.running_var]


def _group(device: torch.device) -> tuple[Call, list[Tensor], list[Tensor]]:
    weight, bias = (torch.rand(16, device=device).add(0.5).requires_grad_() for _ in range(2))
    return (
        lambda x: distributed.group_norm(x, 4, weight, bias, activation="silu", shard_dim=2),
        [weight, bias],
        [],
    )


def _cut(device: torch.device) -> tuple[Call, list[Tensor], list[Tensor]]:
    """One group, of whose channels each rank has another number."""
    return lambda x: distributed.group_norm(x.transpose(1, 2).contiguous(), 1, shard_dim=1).transpose(1, 2), [], []


def _rows(device: torch.device) -> tuple[Call, list[Tensor], list[Tensor]]:
    """Rows, of whose elements each rank has another number."""
    own, size = 4 + dist.get_rank(), sum(4 + rank for rank in range(dist.get_world_size()))
    weight = torch.rand(own, 20, device=device).add(0.5).requires_grad_()
    return lambda x: distributed.layer_norm(x, (size, 20), weight, shard_dim=2), [weight], []


def _batch(device: torch.device) -> tuple[Call, list[Tensor], list[Tensor]]:
    mean, var = torch.zeros(16, device=device), torch.ones(16, device=device)
    return lambda x: distributed.batch_norm(x, mean, var, training=True, shard_dim=2), [], [mean, var]


def replayed(make: Callable[[torch.device], Any], rank: int) -> tuple[list[Tensor], list[Tensor]]:
    """What a replay leaves, and what the same eager call gives: output, gradients and running statistics."""
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(rank)
    shape = (3, 16, 4 + rank, 20)
    x = torch.zeros(shape, device=device, dtype=torch.bfloat16).requires_grad_()
    first, second, grad = (torch.randn(shape, device=device).mul(1 + rank).add(rank).to(x.dtype) for _ in range(3))
    torch.manual_seed(0)  # parameters that all ranks have alike
    call, parameters, buffers = make(device)
    start = [buffer.clone() for buffer in buffers]

    def step() -> list[Tensor]:
        output = call(x)
        return [output, *torch.autograd.grad(output, [x, *parameters], grad)]

    def fill(values: Tensor) -> None:
        with torch.no_grad():
            x.copy_(values)
            for buffer, value in zip(buffers, start, strict=True):
                buffer.copy_(value)

    fill(first)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # ranks agree here, and kernels are compiled
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog asks for events meanwhile
        results = step()
    fill(second)
    graph.replay()
    got = [tensor.detach().clone() for tensor in (*results, *buffers)]
    fill(second)
    expected = [tensor.detach().clone() for tensor in (*step(), *buffers)]
    torch.cuda.synchronize()
    return [tensor.cpu() for tensor in got], [tensor.cpu() for tensor in expected]


def rank_main(rank: int, world_size: int, folder: Path, device: str) -> None:
    meet(rank, world_size, folder, device)
    makes = {
        "SyncBatchNorm": _module, "group_norm": _group, "batch_norm": _batch, "cut": _cut, "layer_norm": _rows,
    }  # fmt: skip
    found = {name: replayed(make, rank) for name, make in makes.items()}
    torch.save(found, folder / f"rank{rank}of{world_size}.pt")
    dist.barrier()
    # A graph that holds collectives outlives no communicator.
    torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(in_processes(rank_main, Path(sys.argv[1]), sys.argv[2], [int(size) for size in sys.argv[3:]]))
