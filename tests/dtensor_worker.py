"""The processes of test_dtensor.py: each makes every call of dtensor_cases.py and leaves what it got in a file.

``python dtensor_worker.py FOLDER cpu|cuda WORLD_SIZE...``; the processes of each world size meet in FOLDER.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from distributed_worker import error_of, in_processes, meet
from dtensor_cases import CASES, Case, call, drawn, results
from torch import Tensor
from torch._functorch import config as functorch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

import fusednorm
import fusednorm.ops
from fusednorm import nn

Found = dict[str, Any]


def spread(case: Case, mesh: DeviceMesh) -> dict[str, Tensor]:
    """The case's tensors on the mesh; each rank cuts its own part."""
    rank, found = len(case.shape), {}
    placed = dict(case.placed)
    for name, whole in drawn(case).items():
        placements: list[Any] = [Replicate()] * mesh.ndim
        if name in placed:
            placements[-1] = Shard(placed[name])
        elif name in ("input", "grad"):
            axes = [None if name == "grad" and each == "partial" else each for each in case.placements]
            if "partial" in axes:  # the sum over the ranks is the whole
                part = whole.to(mesh.device_type) * (2 if mesh.get_rank() == 0 else -1 / (mesh.size() - 1))
                found[name] = DTensor.from_local(part, mesh, [Partial()], run_check=False)
                continue
            placements = [Replicate() if axis is None else Shard(int(axis) % rank) for axis in axes]
        found[name] = distribute_tensor(whole.to(mesh.device_type), mesh, placements, src_data_rank=None)
    return found


def described(tensor: Any) -> str:
    return " ".join(map(str, tensor.placements))


def gathered(found: dict[str, Tensor]) -> Found:
    """Each result's whole, and where it lay."""
    return {name: (tensor.full_tensor().detach().cpu(), described(tensor)) for name, tensor in found.items()}


def chain(case: Case, tensors: dict[str, Tensor]) -> Tensor:
    """One graph of several families, statistics that are merged and that are not, and running ones."""
    y = fusednorm.group_norm(tensors["input"], 3, tensors["weight"], tensors["bias"], activation="silu")
    y = fusednorm.batch_norm(y, tensors["running_mean"], tensors["running_var"], tensors["weight"], training=True)
    return fusednorm.layer_norm(y, (4,)) + fusednorm.rms_norm(y, (5, 4))  # type: ignore[no-any-return]


def compiled(mesh: DeviceMesh) -> list[tuple[Found, Found]]:
    """Results of compiled calls beside eager ones; the backend runs what torch.compile traced."""
    pairs, kept = [], functorch
    norm = torch.compile(fusednorm.rms_norm, fullgraph=True, backend="aot_eager")
    with torch.inference_mode():
        x = distribute_tensor(torch.arange(24.0).view(3, 2, 4), mesh, [Shard(1)], src_data_rank=None)
        pairs.append(tuple({"output": run(x, (2, 4))} for run in (fusednorm.rms_norm, norm)))
    group = torch.compile(fusednorm.group_norm, fullgraph=True, backend="aot_eager")
    for size in (4, 8):  # the second size is a symbol to the compiler
        x = distribute_tensor(torch.arange(15.0 * size).view(3, size, 5), mesh, [Shard(1)], src_data_rank=None)
        pairs.append(tuple({"output": run(x, (5,))} for run in (fusednorm.rms_norm, norm)))
        pairs.append(tuple({"output": run(x, 2)} for run in (fusednorm.group_norm, group)))
    assert kept.enable_autograd_cache  # the ranks have one graph
    case = Case((2,), (2,), "batch_norm", (2, 6, 5, 4), running=True)
    traced, alone = (torch.compile(each, fullgraph=True, backend="aot_eager") for each in (chain, call))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pairs.append(tuple(results(case, spread(case, mesh), run) for run in (chain, traced)))
    assert sum("the graphs of the ranks differ" in str(each.message) for each in caught) == 1
    assert not kept.enable_autograd_cache
    case = Case((2,), (2,), "group_norm", (2, 6, 1, 4), 3)  # of which the second rank has nothing
    pairs.append(tuple(results(case, spread(case, mesh), run) for run in (call, alone)))
    return [(gathered(eager), gathered(found)) for eager, found in pairs]


def modules(mesh: DeviceMesh) -> dict[str, tuple[Tensor, Tensor]]:
    """A module's output, gradients and buffers on the mesh, and of the same module in one process."""
    torch.manual_seed(0)
    x = torch.randn(4, 6, 5, 3) * torch.arange(1, 6)[:, None] + torch.arange(4)[:, None, None, None]
    found = {}
    for name, make, axis in (
        ("GroupNorm", lambda: nn.GroupNorm(3, 6, activation="silu"), 2),
        ("BatchNorm2d", lambda: nn.BatchNorm2d(6), 0),
        ("SyncBatchNorm", lambda: nn.SyncBatchNorm(6, momentum=None), 0),
        ("InstanceNorm2d", lambda: nn.InstanceNorm2d(6, affine=True, track_running_stats=True), 3),
        ("LayerNorm", lambda: nn.LayerNorm((5, 3)), 2),
        ("RMSNorm", lambda: nn.RMSNorm(3), 0),
    ):
        alone, shared = make(), distribute_module(make(), mesh)
        alone.__class__ = nn.BatchNorm2d if name == "SyncBatchNorm" else type(alone)  # of this process's own
        one, other = x.clone().requires_grad_(), distribute_tensor(x, mesh, [Shard(axis)], src_data_rank=None)
        other.requires_grad_()
        for module, input in ((alone, one), (shared, other)):
            module(input, post_add=input).square().sum().backward()
        pairs = [(other.grad, one.grad)]
        pairs += [(b.grad, a.grad) for a, b in zip(alone.parameters(), shared.parameters(), strict=True)]
        pairs += list(zip(shared.buffers(), alone.buffers(), strict=True))
        found[name] = [(a.full_tensor() if isinstance(a, DTensor) else a, b) for a, b in pairs]
    return found


def errors(mesh: DeviceMesh, rank: int, world_size: int) -> dict[str, str]:
    """What each mistake gives on this rank. The last is a call that a rank does not make."""
    last = rank == world_size - 1
    whole = torch.randn(2, 6, 6, 4)
    x = distribute_tensor(whole, mesh, [Shard(2)], src_data_rank=None)

    def group(input: Any, *arguments: Any, **keywords: Any) -> str:
        return error_of(lambda: fusednorm.group_norm(input, 3, *arguments, **keywords))

    def wrong(axis: int) -> DTensor:
        part = x.to_local()[:, :, : 1 if last else None]
        return DTensor.from_local(part, mesh, [Shard(axis)], run_check=False, shape=x.shape, stride=x.stride())

    with implicit_replication():
        taken = group(x, torch.ones(6))
    found = {
        "implicit": taken,
        "plain weight": group(x, torch.ones(6)),
        "plain input": group(whole, distribute_tensor(torch.ones(6), mesh, [Replicate()])),
        "local shape": group(wrong(2)),
        "eps": group(x, eps=1e-3 if last else 1e-5),
        "shape": group(distribute_tensor(whole[: 1 + last], mesh, [Shard(2)], src_data_rank=None)),
        "placement": group(distribute_tensor(whole, mesh, [Shard(2 + last)], src_data_rank=None)),
        "nothing": group(x),
        "distributed": error_of(lambda: fusednorm.distributed.group_norm(x, 3, shard_dim=2)),
        "function": error_of(lambda: (fusednorm.rms_norm if last else fusednorm.layer_norm)(x, (6, 4), eps=1e-5)),
        "rows": error_of(lambda: fusednorm.ops.layer_norm_forward(x, (4,), None, None, 1e-5)),
    }
    some = DeviceMesh(mesh.device_type, list(range(world_size - 1)))
    found["no member"] = group(distribute_tensor(whole, some, [Shard(2)], src_data_rank=None))
    impatient = DeviceMesh.from_group(dist.new_group(timeout=timedelta(seconds=1)), mesh.device_type)
    flat = init_device_mesh(mesh.device_type, (1, world_size))
    there = distribute_tensor(torch.ones(6), flat, [Replicate(), Replicate()], src_data_rank=None)
    found["other mesh"] = group(x, there)
    if not last:
        found["no call"] = group(distribute_tensor(whole, impatient, [Shard(2)], src_data_rank=None))
    return found


def mesh_of(case: Case, world_size: int, device: str) -> tuple[int, ...]:
    """The case's mesh; GPUs, of which three are rare, make the cases of three ranks in any number."""
    return (world_size,) if device == "cuda" and len(case.mesh) == 1 else case.mesh


def rank_main(rank: int, world_size: int, folder: Path, device: str) -> None:
    meet(rank, world_size, folder, device)
    found: Found = {}
    meshes: dict[tuple[int, ...], DeviceMesh] = {}
    for name, case in CASES.items():
        shape = mesh_of(case, world_size, device)
        if torch.Size(shape).numel() == world_size:
            mesh = meshes.setdefault(shape, init_device_mesh(device, shape))
            found[name] = [gathered(results(case, spread(case, mesh))) for _ in range(2)]
    if device == "cpu":
        if world_size == 2:
            found["compiled"] = compiled(init_device_mesh(device, (2,)))
        if world_size == 3:
            found["modules"] = modules(meshes[(3,)])
            found["errors"] = errors(meshes[(3,)], rank, world_size)
        if world_size == 4:
            found["fsdp"] = fully_sharded(init_device_mesh(device, (2, 2), mesh_dim_names=("data", "model")))
    torch.save(found, folder / f"rank{rank}of{world_size}.pt")
    dist.barrier()  # nobody leaves while another waits for its timeout
    dist.destroy_process_group()


def fully_sharded(mesh: DeviceMesh) -> list[tuple[Tensor, Tensor]]:
    """Gradients of a LayerNorm under FSDP2 over one mesh dimension, whose tokens the other spreads; and their judge."""
    torch.manual_seed(0)
    x = torch.randn(4, 6, 8) * torch.arange(1, 7)[:, None]
    alone = nn.LayerNorm(8)
    shared = distribute_module(nn.LayerNorm(8), mesh["model"])
    fully_shard(shared, mesh=mesh["data"])
    part = x.chunk(2)[mesh["data"].get_local_rank()]
    shared(distribute_tensor(part, mesh["model"], [Shard(1)], src_data_rank=None)).square().sum().backward()
    (alone(x).square().sum() / 2).backward()  # FSDP averages over the data
    pairs = zip(shared.parameters(), alone.parameters(), strict=True)
    return [(one.grad.full_tensor(), other.grad) for one, other in pairs]


def main(folder: Path, device: str, world_sizes: list[int]) -> int:
    """How many processes failed."""
    torch.set_num_threads(1)
    # The imports and the kernels are loaded once, before the processes part.
    load: Callable[..., Any] = torch.compile(lambda x: x + 1, backend="aot_eager")
    if 2 in world_sizes and device == "cpu":
        load(torch.ones(2))
    for case in CASES.values():
        results(case, drawn(case))
    return in_processes(rank_main, folder, device, world_sizes)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], [int(size) for size in sys.argv[3:]]))
