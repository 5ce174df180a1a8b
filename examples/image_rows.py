"""The norms of a VAE's decoder over an image that is cut by its rows: by the whole's statistics, and by an average.

A decoder of large images is run on several devices, each with some rows of the image. Its GroupNorms then need the
statistics of the whole. Several projects average what each device finds,

    mean = average of the parts' means          var = average of the parts' variances

which forgets how far the parts' means are apart: var = average of the parts' variances + variance of the parts' means.
Where parts look alike the two agree; the sky and the ground of a photograph do not. ``shard_dim=2`` is all that
``fusednorm.distributed.group_norm`` needs to have the statistics of the whole, in one exchange of a few kilobytes.

    python examples/image_rows.py --processes 4

It prints the error of both at each resolution of the decoder, as a part of the output's length, and ends with exit code
1 if that of fusednorm is more than rounding.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from torch import Tensor

import fusednorm

#: The channels, and the rows and columns, of each resolution: a quarter of Stable Diffusion's widths.
LEVELS = ((128, 32), (128, 64), (64, 128), (32, 256))
GROUPS = 32
EPS = 1e-6
#: The largest error that rounding explains.
MOST_ERROR = 1e-5


def features(channels: int, size: int) -> Tensor:
    """What a decoder has inside: random channels of a picture that is bright above and dark below."""
    generator = torch.Generator().manual_seed(size)
    height = torch.linspace(1, -1, size)[:, None]
    picture = height + 0.3 * torch.randn(1, 3, size, size, generator=generator)
    return F.conv2d(picture, torch.randn(channels, 3, 3, 3, generator=generator), padding=1)


def by_the_whole(rows: Tensor) -> Tensor:
    result: Tensor = fusednorm.distributed.group_norm(rows, GROUPS, eps=EPS, activation="silu", shard_dim=2)
    return result


def by_an_average(rows: Tensor) -> Tensor:
    """The formula to compare with."""
    grouped = rows.unflatten(1, (GROUPS, -1))
    statistics = torch.stack((grouped.mean((2, 3, 4)), grouped.var((2, 3, 4), correction=0)))
    dist.all_reduce(statistics)
    mean, var = (statistics / dist.get_world_size())[..., None, None, None]
    return F.silu(((grouped - mean) * (var + EPS).rsqrt()).flatten(1, 2))


NORMS = {"fusednorm": by_the_whole, "average": by_an_average}


def process(rank: int, processes: int, folder: str) -> None:
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=processes)
    parts = [features(*level).tensor_split(processes, 2)[rank] for level in LEVELS]
    found = {name: [norm(part) for part in parts] for name, norm in NORMS.items()}
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def in_processes(processes: int) -> dict[str, list[Tensor]]:
    """The outputs of each norm at each resolution, put together from the rows of all processes."""
    # They part before this process computes anything: threads of a library do not survive a fork.
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        team = [context.Process(target=process, args=(rank, processes, folder)) for rank in range(processes)]
        for each in team:
            each.start()
        for each in team:
            each.join()
        if any(each.exitcode for each in team):
            raise typer.Exit(1)
        found = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(processes)]
    return {
        name: [torch.cat([parts[name][level] for parts in found], 2) for level in range(len(LEVELS))] for name in NORMS
    }


def main(
    processes: Annotated[int, typer.Option(min=1, max=LEVELS[0][1], help="processes, each with some rows")] = 4,
) -> None:
    """Normalize an image in rows by the statistics of the whole, and by the average of its parts'."""
    torch.set_num_threads(1)
    found = in_processes(processes)
    typer.echo(f"{'channels':>8} {'size':>9}   error of fusednorm   of the average")
    worst = 0.0
    for level, (channels, size) in enumerate(LEVELS):
        exact = F.silu(F.group_norm(features(channels, size).double(), GROUPS, eps=EPS))
        ours, theirs = (float((found[name][level] - exact).norm() / exact.norm()) for name in NORMS)
        typer.echo(f"{channels:8} {f'{size}x{size}':>9}   {ours:18.1e}   {theirs:14.1%}")
        worst = max(worst, ours)
    if worst > MOST_ERROR:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
