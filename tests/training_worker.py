"""The two processes of test_training.py's parallel part: each trains a network and leaves what it became.

``python training_worker.py FOLDER ddp|fsdp``; the processes meet in FOLDER.
"""

from __future__ import annotations

import multiprocessing
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from training_network import SAMPLES, STEPS, batch, network, step

WORLD = 2


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def work(rank: int, folder: Path, kind: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=60))
    model = network()
    if kind == "ddp":
        trained: torch.nn.Module = DistributedDataParallel(model)
    else:
        mesh = dist.init_device_mesh("cpu", (WORLD,))
        for block in model:
            if list(block.parameters()):
                fully_shard(block, mesh=mesh)
        trained = fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    share = slice(rank * SAMPLES // WORLD, (rank + 1) * SAMPLES // WORLD)
    for count in range(STEPS):
        images, targets = batch(count)
        step(trained, optimizer, images[share], targets[share])
    state = {name: whole(tensor).detach().clone() for name, tensor in model.state_dict().items()}
    torch.save(state, folder / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=work, args=(rank, Path(sys.argv[1]), sys.argv[2])) for rank in range(WORLD)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in processes))
