"""The two processes of test_training.py's parallel part: each trains networks and leaves what they became in a file.

``python training_worker.py FOLDER cpu WORLD_SIZE...``; the processes meet in FOLDER.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from distributed_worker import in_processes, meet
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from training_network import SAMPLES, STEPS, batch, network, step, trained

KINDS = ("ddp", "fsdp")


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(rank: int, world_size: int, device: str, kind: str) -> dict[str, Tensor]:
    """The state of a network that each rank has trained with its share of the samples."""
    model = network()
    if kind == "ddp":
        parallel: torch.nn.Module = DistributedDataParallel(model)
    else:
        mesh = dist.init_device_mesh(device, (world_size,))
        for block in model:
            if list(block.parameters()):
                fully_shard(block, mesh=mesh)
        parallel = fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    share = slice(rank * SAMPLES // world_size, (rank + 1) * SAMPLES // world_size)
    for count in range(STEPS):
        images, targets = batch(count)
        step(parallel, optimizer, images[share], targets[share])
    return {name: whole(tensor).detach().clone() for name, tensor in model.state_dict().items()}


def rank_main(rank: int, world_size: int, folder: Path, device: str) -> None:
    meet(rank, world_size, folder, device)
    found = {kind: train(rank, world_size, device, kind) for kind in KINDS}
    torch.save(found, folder / f"rank{rank}of{world_size}.pt")
    dist.barrier()
    dist.destroy_process_group()


def main(folder: Path, device: str, world_sizes: list[int]) -> int:
    """How many processes failed."""
    torch.set_num_threads(1)
    trained(network())  # the imports and the kernels are loaded once, before the processes part
    return in_processes(rank_main, folder, device, world_sizes)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], [int(size) for size in sys.argv[3:]]))
