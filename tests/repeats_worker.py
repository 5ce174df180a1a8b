"""The processes of test_distributed_repeats.py: calls that repeat, by Triton's kernels in its interpreter, over gloo.

``python repeats_worker.py FOLDER cpu WORLD_SIZE...``, with TRITON_INTERPRET=1; the processes meet in FOLDER.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from distributed_worker import in_processes, meet
from interpreter_support import hasten
from torch import Tensor

import fusednorm
from fusednorm import dispatch, distributed
from fusednorm.distributed import repeats
from fusednorm.nn import SyncBatchNorm

#: These modules ask whether a group agrees once about calls of a kind, as one over NCCL alone does. The package has
#: functions of the modules' names.
ASKING = ("sharding", "functional", "rows")
Made = tuple[Callable[..., Tensor], list[Tensor], list[Tensor]]


def _parameters(*shape: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.rand(shape, generator=generator).add(0.5).requires_grad_() for _ in range(2)]


def _group(rank: int, ranks: int) -> Made:
    parameters = _parameters(8)
    return lambda x: distributed.group_norm(x, 4, *parameters, activation="silu", shard_dim=2), parameters, []


def _instance(rank: int, ranks: int) -> Made:
    parameters = _parameters(8)
    call = lambda x: distributed.instance_norm(x, None, None, *parameters, shard_dim=2)  # noqa: E731
    return call, parameters, []


def _batch(rank: int, ranks: int) -> Made:
    mean, var = torch.zeros(8), torch.ones(8)
    return lambda x: distributed.batch_norm(x, mean, var, training=True, shard_dim=2), [], [mean, var]


def _layer(rank: int, ranks: int) -> Made:
    rows = sum(2 + each for each in range(ranks))
    weight, bias = _parameters(2 + rank, 4)
    call = lambda x: distributed.layer_norm(x, (rows, 4), weight, bias, shard_dim=2)  # noqa: E731
    return call, [weight, bias], []


def _module(rank: int, ranks: int) -> Made:
    module = SyncBatchNorm(8, activation="relu")
    buffers = [module.running_mean, module.running_var, module.num_batches_tracked]
    return module, list(module.parameters()), buffers  # type: ignore[return-value]


def _strided(rank: int, ranks: int) -> Made:
    """Running statistics that no kernel may write to."""
    module = SyncBatchNorm(8)
    module.running_mean, module.running_var = torch.zeros(8, 2)[:, 0], torch.ones(8, 2)[:, 1]
    return module, list(module.parameters()), [module.running_mean, module.running_var, module.num_batches_tracked]  # type: ignore[list-item]


MAKES = {
    "group": _group, "instance": _instance, "batch": _batch, "layer": _layer, "module": _module, "strided": _strided,
}  # fmt: skip


def steps(make: Callable[[int, int], Made], rank: int, ranks: int, keeps: bool) -> tuple[list[list[Tensor]], int]:
    """What five calls leave, and how many of them were repeats."""
    call, parameters, buffers = make(rank, ranks)
    found, before = [], repeated.count
    for seed in range(5):
        if not keeps:
            repeats._calls.clear()
        x = torch.randn(2, 8, 2 + rank, 4, generator=torch.Generator().manual_seed(7 * seed + rank)).requires_grad_()
        output = call(x)
        grads = torch.autograd.grad(output, [x, *parameters], torch.cos(output.detach()))
        found.append([each.detach().clone() for each in (output, *grads, *buffers)])
    return found, repeated.count - before


class _Counted:
    """``Repeat.output``, counting the calls that it makes."""

    def __init__(self) -> None:
        self.count, self.function = 0, repeats.Repeat.output

    def __get__(self, owner: Any, kind: Any) -> Callable[..., Tensor | None]:
        def output(*arguments: Any) -> Tensor | None:
            found = self.function(owner, *arguments)
            self.count += found is not None
            return found

        return output


repeated = _Counted()


def others() -> dict[str, tuple[bool, str]]:
    """Whether calls that differ from a kept one in one thing repeat it, and what they raise."""
    w, b = _parameters(8)
    x = torch.randn(2, 8, 2, 4).requires_grad_()

    def call(x: Tensor = x, w: Tensor | None = w, eps: Any = 1e-5, groups: Any = 4, dim: Any = 2, **fused: Any) -> None:
        distributed.group_norm(x, groups, w, b, eps, shard_dim=dim, **fused)

    for _ in range(3):
        call()
    wide = torch.randn(2, 8, 2, 8)[..., ::2].requires_grad_()
    tries: dict[str, Callable[[], Any]] = {
        "same": call,
        "eps": lambda: call(eps=1e-3),
        "groups": lambda: call(groups=2),
        "shape": lambda: call(torch.randn(2, 8, 3, 4).requires_grad_()),
        "strides": lambda: call(wide),
        "frozen": lambda: call(x.detach()),
        "no weight": lambda: call(w=None),
        "activation": lambda: call(activation="relu"),
        "weight of 7": lambda: call(w=torch.ones(7, requires_grad=True)),
        "groups 4.0": lambda: call(groups=4.0),
        "eps as text": lambda: call(eps="small"),
    }
    found = {}
    for name, one in tries.items():
        before, error = repeated.count, ""
        try:
            one()
        except Exception as raised:
            error = type(raised).__name__
        found[name] = (repeated.count > before, error)
    before = repeated.count
    with torch.no_grad():
        call()
    found["no gradients"] = (repeated.count > before, "")
    return found


def wanted() -> list[list[Tensor]]:
    """The gradients of the weight alone, and of weight and scale, one after the other and in the other order: a plan
    makes what is wanted, whatever it has made before."""
    generator = torch.Generator().manual_seed(3)
    x, grad, scale = (torch.randn(shape, generator=generator) for shape in ((3, 8, 5), (3, 8, 5), (3, 8)))
    found = []
    for order in ((False, True), (True, False)):
        dispatch._plans.clear()
        repeats._calls.clear()
        grads = {}
        for both in order:
            input, weight, s = x.clone().requires_grad_(), torch.ones(8).requires_grad_(), scale.clone()
            y = distributed.batch_norm(
                input, None, None, weight, training=True, scale=s.requires_grad_(both), shard_dim=0
            )
            grads[both] = torch.autograd.grad(y, [input, weight, s] if both else [input, weight], grad)
        found.append([*grads[False], *grads[True]])
    return found


def profiled() -> tuple[bool, int]:
    """Whether kernels run a call that a profiler watches, and how many of four such calls are repeats, which it would
    not see."""
    before, ran = repeated.count, []
    whole = sys.modules["fusednorm.distributed.whole"]
    run = whole.normalize_fused

    def noted(*arguments: Any) -> Any:
        found = run(*arguments)
        ran.append(found is not None)
        return found

    whole.normalize_fused = noted  # type: ignore[attr-defined]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        for _ in range(4):
            distributed.group_norm(torch.ones(2, 8, 3, 5), 2, shard_dim=2)
    whole.normalize_fused = run  # type: ignore[attr-defined]
    return ran == [True] * 4, repeated.count - before


def rank_main(rank: int, world_size: int, folder: Path, device: str) -> None:
    meet(rank, world_size, folder, device)
    repeats.Repeat.output = repeated  # type: ignore[assignment, method-assign]
    found: dict[str, Any] = {}
    with fusednorm.use_instance("triton.tiles"):
        found["compared"] = [steps(MAKES[name], rank, world_size, True)[1] for name in ("group", "batch", "layer")]
    for name in ASKING:
        sys.modules[f"fusednorm.distributed.{name}"].agrees_once = lambda group: True  # type: ignore[attr-defined]
    sys.modules["fusednorm.distributed.batch_norm"]._reads_counts = lambda input, channels: False  # type: ignore[attr-defined]
    with fusednorm.use_instance("triton.tiles"):
        for name, make in MAKES.items():
            found[name] = [steps(make, rank, world_size, keeps) for keeps in (True, False)]
        found["others"] = others()
        found["profiled"] = profiled()
        found["wanted"] = wanted()
    torch.save(found, folder / f"rank{rank}of{world_size}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    hasten()
    sys.exit(in_processes(rank_main, Path(sys.argv[1]), sys.argv[2], [int(size) for size in sys.argv[3:]]))
