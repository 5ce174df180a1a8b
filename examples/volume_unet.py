"""Train a 3-D U-Net on a volume that is spread over processes by its depth, and compare with the volume in one process.

A volume that does not fit one device is cut into slabs, of any thickness. Convolutions then need a plane of each
neighbour's slab, and a GroupNorm needs the statistics of the whole, which ``fusednorm.distributed.group_norm`` takes
with ``shard_dim=2``. All else is each process's own.

    python examples/volume_unet.py --processes 3 --steps 20

The network learns to find balls in noise whose brightness changes along the depth, so that each slab has statistics of
its own. It ends with exit code 1 if the losses of the two trainings are further apart than rounding takes them.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from torch import Tensor, nn

import fusednorm

DEPTH, HEIGHT, WIDTH = 22, 32, 32
BALLS = 12
RATE = 0.2
#: How far apart two losses may be, relatively: each step takes rounding along.
MOST_DIFFERENCE = 1e-3


class Halo(torch.autograd.Function):
    """(N, C, D, H, W) with a plane of either neighbour along D, of zeros at the ends of the volume.

    The backward gives the gradients of those planes back to the neighbours, who add them.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor) -> Tensor:
        before, after = exchange(input[:, :, :1], input[:, :, -1:])
        return torch.cat((before, input, after), 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (grad,) = grads
        before, after = exchange(grad[:, :, :1], grad[:, :, -1:])
        own = grad[:, :, 1:-1].clone()
        own[:, :, :1] += before
        own[:, :, -1:] += after
        return own


def exchange(to_previous: Tensor, to_next: Tensor) -> tuple[Tensor, Tensor]:
    """What the previous and the next process send here, zeros where there is none, as they get these tensors."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    from_previous, from_next = torch.zeros_like(to_previous), torch.zeros_like(to_next)
    work = []
    for neighbour, sent, received in ((rank - 1, to_previous, from_previous), (rank + 1, to_next, from_next)):
        if 0 <= neighbour <= last:
            work += [dist.P2POp(dist.isend, sent.contiguous(), neighbour), dist.P2POp(dist.irecv, received, neighbour)]
    for each in dist.batch_isend_irecv(work) if work else ():
        each.wait()
    return from_previous, from_next


class Conv(nn.Conv3d):
    """A 3x3x3 convolution of a slab. Along the depth the neighbours' planes are its padding."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, 3, padding=(0, 1, 1), bias=False)

    def forward(self, input: Tensor) -> Tensor:
        spread = dist.is_initialized()
        return super().forward(Halo.apply(input) if spread else F.pad(input, (0, 0, 0, 0, 1, 1)))


class Norm(nn.GroupNorm):
    """GroupNorm and SiLU by the statistics of the whole volume. In one process it is fusednorm.group_norm."""

    def forward(self, input: Tensor) -> Tensor:
        return fusednorm.distributed.group_norm(
            input, self.num_groups, self.weight, self.bias, self.eps, activation="silu", shard_dim=2
        )


class UNet(nn.Module):
    """Two resolutions of height and width; the depth, which is spread, keeps its own."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Sequential(Conv(1, width), Norm(4, width), Conv(width, width), Norm(4, width))
        self.coarse = nn.Sequential(Conv(width, 2 * width), Norm(4, 2 * width), Conv(2 * width, width), Norm(4, width))
        self.last = nn.Sequential(Conv(2 * width, width), Norm(4, width), nn.Conv3d(width, 1, 1))

    def forward(self, volume: Tensor) -> Tensor:
        fine = self.first(volume)
        coarse = self.coarse(F.avg_pool3d(fine, (1, 2, 2)))
        result: Tensor = self.last(torch.cat((fine, F.interpolate(coarse, scale_factor=(1.0, 2.0, 2.0))), 1))
        return result


def draw() -> tuple[Tensor, Tensor]:
    """A volume (1, 1, D, H, W), brighter and noisier the deeper, and where its balls are."""
    generator = torch.Generator().manual_seed(0)
    grid = torch.stack(torch.meshgrid(*(torch.arange(size) for size in (DEPTH, HEIGHT, WIDTH)), indexing="ij"))
    centres = torch.rand(BALLS, 3, generator=generator) * torch.tensor([DEPTH, HEIGHT, WIDTH])
    distances = (grid[None] - centres.view(BALLS, 3, 1, 1, 1)).square().sum(1).sqrt()
    inside = (distances < 4).any(0).float()
    depth = torch.linspace(0, 1, DEPTH).view(-1, 1, 1)
    noise = torch.randn(DEPTH, HEIGHT, WIDTH, generator=generator)
    return ((inside + 0.3 * noise) * (1 + 2 * depth) + 5 * depth)[None, None], inside[None, None]


def slab(volume: Tensor, rank: int, processes: int) -> Tensor:
    """A process's part of the depth: the last has the remainder too."""
    thickness = DEPTH // processes
    return volume[:, :, rank * thickness : None if rank == processes - 1 else (rank + 1) * thickness].contiguous()


def train(volume: Tensor, inside: Tensor, steps: int) -> list[float]:
    """The loss of the whole at each step; every process starts from the same weights."""
    torch.manual_seed(0)
    network = UNet()
    optimizer = torch.optim.SGD(network.parameters(), RATE)
    # group_norm's parameters have the gradients of the whole on each process. A convolution's are those of its slab.
    norms = [module for module in network.modules() if isinstance(module, Norm)]
    summed = {id(parameter) for norm in norms for parameter in norm.parameters()}
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        # A sum of the slab over the elements of the whole: the sum over the processes is the mean.
        error = F.binary_cross_entropy_with_logits(network(volume), inside, reduction="sum") / (DEPTH * HEIGHT * WIDTH)
        error.backward()
        loss = error.detach()
        if dist.is_initialized():
            for parameter in network.parameters():
                if id(parameter) not in summed and parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
            dist.all_reduce(loss)
        optimizer.step()
        losses.append(float(loss))
    return losses


def process(rank: int, processes: int, folder: str, steps: int) -> None:
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=processes)
    volume, inside = (slab(each, rank, processes) for each in draw())
    losses = train(volume, inside, steps)
    if rank == 0:
        torch.save(losses, Path(folder) / "losses.pt")
    dist.barrier()
    dist.destroy_process_group()


def main(
    processes: Annotated[int, typer.Option(min=1, max=DEPTH, help="processes, each with a slab of the volume")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="steps of training")] = 20,
) -> None:
    """Train a 3-D U-Net on a volume in slabs, and on the whole in one process."""
    torch.set_num_threads(1)
    torch.optim.SGD(UNet().parameters(), RATE)  # loads torch's compiler, for seconds: once, before the processes part
    # They part before this process computes anything: threads of a library do not survive a fork.
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        team = [context.Process(target=process, args=(rank, processes, folder, steps)) for rank in range(processes)]
        for each in team:
            each.start()
        for each in team:
            each.join()
        if any(each.exitcode for each in team):
            raise typer.Exit(1)
        spread = torch.load(Path(folder) / "losses.pt")
    whole = train(*draw(), steps)
    typer.echo(f"step  {processes} slabs   one process")
    for step, (one, other) in enumerate(zip(spread, whole, strict=True)):
        typer.echo(f"{step:4}  {one:.6f}  {other:.6f}")
    difference = max(abs(one - other) / other for one, other in zip(spread, whole, strict=True))
    typer.echo(f"largest difference {difference:.1e}")
    if difference > MOST_DIFFERENCE:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
