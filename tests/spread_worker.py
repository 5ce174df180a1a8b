"""The processes of test_spread.py: each makes every call of spread_cases.py and leaves what it got in a file.

``python spread_worker.py FOLDER cpu|cuda WORLD_SIZE...``; the processes of each world size meet in FOLDER.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from distributed_worker import error_of, in_processes, meet
from spread_cases import CASES, Case, draw, own, parameters, running
from torch import Tensor

import fusednorm
from fusednorm import distributed

Found = dict[str, Any]
EPS = 1e-5
MOMENTUM = 0.3
#: The cases that two pairs of four ranks make too, each pair as two ranks alone.
PAIRED = ("group, height", "group, cut", "instance, samples", "layer, tokens")


def call(
    case: Case, input: Tensor, operands: dict[str, Tensor], statistics: Any, world_size: int, group: Any
) -> Tensor:
    function: Callable[..., Tensor] = getattr(distributed, case.family)
    keywords: dict[str, Any] = {"eps": EPS, "activation": case.activation, "shard_dim": case.shard_dim, "group": group}
    keywords |= operands
    if case.family in ("layer_norm", "rms_norm"):
        whole = case.whole(world_size)
        keywords["normalized_shape"] = whole[-case.num_dims :] if case.num_dims else whole[1:2]
        return function(input, channel_dim=-1 if case.num_dims else 1, **keywords)
    if case.family == "group_norm":
        keywords["num_groups"] = case.num_groups
    else:
        keywords["training" if case.family == "batch_norm" else "use_input_stats"] = case.training
        keywords["running_mean"], keywords["running_var"] = statistics or (None, None)
        keywords["momentum"] = MOMENTUM
    return function(input, channel_dim=case.channel_dim, **keywords)


def results(case: Case, rank: int, world_size: int, device: str, group: Any = None) -> Found:
    input, grad = (tensor.to(device) for tensor in draw(case, rank, world_size))
    input.requires_grad_("input" not in case.frozen)
    operands = {
        name: own(case, value, case.axes(name), rank, world_size).to(device, copy=True)
        for name, value in parameters(case, world_size).items()
    }
    for name, value in operands.items():
        value.requires_grad_(name not in case.frozen)
    statistics = running(case, world_size)
    if statistics is not None:
        statistics = [
            own(case, value, [case.channel_axis], rank, world_size).to(device, copy=True) for value in statistics
        ]
    output = call(case, input, operands, statistics, world_size, group)
    output.backward(grad)
    found = {"output": output.detach(), "output_strides": output.stride(), "input": input.grad}
    found |= {name: value.grad for name, value in operands.items()}
    if statistics is not None:
        found["running_mean"], found["running_var"] = statistics
    return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in found.items()}


def change_in_place(x: Tensor) -> None:
    """An output is nobody's view, and the caller may change it."""
    x, weight, scale = x.clone().requires_grad_(), torch.ones(6, requires_grad=True), torch.rand(x.shape[:2])
    last = x.detach().movedim(1, -1).contiguous().requires_grad_()
    for output in (
        distributed.group_norm(x, 3, weight, shard_dim=2),
        distributed.group_norm(x, 1, shard_dim=1),
        distributed.group_norm(last, 3, channel_dim=-1, shard_dim=1),
        distributed.instance_norm(x, weight=weight, shard_dim=2),
        distributed.batch_norm(x, None, None, training=True, scale=scale, shard_dim=0),
        distributed.layer_norm(x, (4 * torch.distributed.get_world_size(),), shard_dim=-1),
    ):
        output.add_(1).sum().backward()


def errors(rank: int, world_size: int) -> dict[str, str]:
    """What each mistake of one rank gives on this rank. The last is a call that a rank does not make."""
    last = rank == world_size - 1
    x = torch.randn(2, 6, 3, 4)

    def group(input: Any, groups: Any = 3, shard_dim: Any = 2, **keywords: Any) -> str:
        return error_of(lambda: distributed.group_norm(input, groups, shard_dim=shard_dim, **keywords))

    found = {
        "dtype": group(x.double() if last else x),
        "shape": group(x[:, :, :, :3] if last else x),
        "rank": group(x[..., 0] if last else x),
        "size of the sharded": group(x[:, :, :2] if last else x),
        "num_groups": group(x, 2 if last else 3),
        "eps": group(x, eps=1e-3 if last else 1e-5),
        "activation": group(x, activation="silu" if last else "relu"),
        "weight": group(x, weight=torch.ones(6) if last else None),
        "grad": group(x.clone().requires_grad_(last)),
        "shard_dim": group(x.transpose(2, 3) if last else x, shard_dim=3 if last else 2),
        "refused dtype": group(x.long() if last else x),
        "no tensor": group(None if last else x),
        "refused weight": group(x, weight=torch.ones(5 if last else 6)),
        "refused dim": group(x, shard_dim=7 if last else 2),
        "refused activation": group(x, activation="none such" if last else None),
        "num_groups of all": group(x, 4),
        "channels of all": group(x, 5, 1),
        "no groups": group(x, 0),
        "no shard_dim": group(x, shard_dim=None),
        "no integer": group(x, shard_dim=2.0),
        "one element": group(torch.randn(1, 6, int(last)), 6),
        "one position": error_of(lambda: distributed.instance_norm(torch.randn(2, 6, int(last)), shard_dim=2)),
        "one of the batch": error_of(
            lambda: distributed.batch_norm(torch.randn(int(last), 6), None, None, training=True, shard_dim=0)
        ),
        "momentum": error_of(
            lambda: distributed.batch_norm(
                x, torch.zeros(6), torch.ones(6), training=True, shard_dim=0, momentum=0.1 + last
            )
        ),
        "normalized_shape": error_of(lambda: distributed.layer_norm(x, (4 * world_size + 1,), shard_dim=-1)),
        "refused normalized_shape": error_of(
            lambda: distributed.rms_norm(x, (5, 4 * world_size) if last else (3, 4 * world_size), shard_dim=-1)
        ),
        "function": error_of(
            lambda: (distributed.rms_norm if last else distributed.layer_norm)(
                x, (4 * world_size,), eps=1e-5, shard_dim=-1
            )
        ),
        "no shape": error_of(
            lambda: distributed.layer_norm(x, 4 * world_size if last else (4 * world_size,), shard_dim=-1)  # type: ignore[arg-type]
        ),
        "changed": error_of(lambda: change_in_place(x)),
        "vmap": error_of(lambda: torch.vmap(lambda each: distributed.group_norm(each, 3, shard_dim=2))(x[None])),
        "rows": error_of(
            lambda: distributed.layer_norm(x, (4,), torch.ones(5 if last else 4, requires_grad=True), shard_dim=2)
        ),
        "nothing": group(x),
        "nothing at all": group(x[:, :, :0]),
        "no element of a row": error_of(lambda: distributed.layer_norm(x[:0], (4 * world_size,), shard_dim=-1)),
        "twice": error_of(lambda: twice(x)),
    }
    some = dist.new_group([0])
    if rank:
        found["no member"] = group(x, group=some)
    elif world_size > 1:
        found["alone"] = str(
            torch.equal(distributed.group_norm(x, 3, group=some), distributed.group_norm(x, 3, shard_dim=0))
        )
    impatient = dist.new_group(timeout=timedelta(seconds=1))
    group(x, group=impatient)
    if not last:
        found["no call"] = group(x, group=impatient)
    return found


def twice(x: Tensor) -> None:
    x = x.clone().requires_grad_()
    y = distributed.group_norm(x, 3, shard_dim=2)
    (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    first.sum().backward()


def rank_main(rank: int, world_size: int, folder: Path, device: str) -> None:
    meet(rank, world_size, folder, device)
    found: Found = {name: [results(case, rank, world_size, device) for _ in range(2)] for name, case in CASES.items()}
    if world_size == 4:
        pairs = [dist.new_group([parity, parity + 2]) for parity in (0, 1)]
        found["pairs"] = {name: results(CASES[name], rank // 2, 2, device, pairs[rank % 2]) for name in PAIRED}
    if device == "cpu":
        found["errors"] = errors(rank, world_size)
    torch.save(found, folder / f"rank{rank}of{world_size}.pt")
    dist.barrier()  # nobody leaves while another waits for its timeout
    dist.destroy_process_group()


def main(folder: Path, device: str, world_sizes: list[int]) -> int:
    """How many processes failed."""
    torch.set_num_threads(1)
    # The import of torch takes longer than all calls: it and most kernels are loaded once, before the processes part.
    for case in CASES.values():
        results(replace(case, sizes={1: (6,)}), 0, 1, device="cpu")
        if case.family != "rms_norm" and case.num_dims == 0:
            x = draw(replace(case, sizes={1: (6,)}), 0, 1)[0].requires_grad_()
            one = torch.ones(x.shape[1], requires_grad=True)
            fusednorm.batch_norm(x, one.detach(), one.detach(), one, one, activation=case.activation).sum().backward()
    return in_processes(rank_main, folder, device, world_sizes)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], [int(size) for size in sys.argv[3:]]))
