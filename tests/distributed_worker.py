"""The processes of test_distributed.py: each makes every call of distributed_cases.py and leaves what it got in a file.

``python distributed_worker.py FOLDER cpu|cuda WORLD_SIZE...``; the processes of each world size meet in FOLDER.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from distributed_cases import CASES, CHANNELS, Case, draw, modulation, parameters
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from fusednorm.nn import SyncBatchNorm

Found = dict[str, Any]


def module_of(case: Case, group: Any) -> SyncBatchNorm:
    module = SyncBatchNorm(
        CHANNELS, momentum=case.momentum, affine=case.affine, process_group=group, activation=case.activation,
        channel_dim=-1 if case.layout == "channel_dim" else 1,
    )  # fmt: skip
    if case.affine:
        weight, bias = parameters(case)
        module.weight, module.bias = torch.nn.Parameter(weight), torch.nn.Parameter(bias)
    return module


def trained(case: Case, rank: int, world_size: int, group: Any, device: str) -> Found:
    """The results of the last step, and the running statistics."""
    module = module_of(case, group).to(device)
    around: Found = {}
    if case.modulated:
        scale, shift = (tensor.to(device).requires_grad_() for tensor in modulation(case, rank, world_size))
        around = {"scale": scale, "shift": shift}
    for step in range(case.steps):
        input, grad = (tensor.to(device) for tensor in draw(case, rank, world_size, step))
        input.requires_grad_(not case.frozen)
        module.zero_grad()
        output = module(input, **around)
        if output.requires_grad:
            output.backward(grad)
    found = {
        "output": output.detach(),
        "output_strides": output.stride(),
        "input": input.grad,
        "weight": None if module.weight is None else module.weight.grad,
        "bias": None if module.bias is None else module.bias.grad,
        "running_mean": module.running_mean,
        "running_var": module.running_var,
        "num_batches_tracked": module.num_batches_tracked,
        "evaluated": module.eval()(input).detach(),
    } | {name: value.grad for name, value in around.items()}
    return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in found.items()}


def same_on_every_rank(device: str) -> Tensor:
    """The gradient of an input that all ranks have alike: it has the same bits only if the exchanged sums have."""
    module = SyncBatchNorm(CHANNELS, activation="silu").to(device)
    generator = torch.Generator().manual_seed(7)
    input = (torch.randn(5, CHANNELS, 7, generator=generator) * 3 + 10).to(device).requires_grad_()
    module(input).backward(torch.randn(5, CHANNELS, 7, generator=generator).to(device))
    assert input.grad is not None
    return input.grad.cpu()


def summed(rank: int) -> list[tuple[Tensor, Tensor]]:
    """Results with sums around the module, each beside that of torch's sums around another."""
    first, second = (SyncBatchNorm(CHANNELS, activation=activation) for activation in ("relu", None))
    generator = torch.Generator().manual_seed(rank)
    x, r, p = (torch.randn(2 + rank, CHANNELS, 4, generator=generator).requires_grad_() for _ in range(3))
    y, s = first(x, pre_add=r, post_add=p, return_sum=True)
    expected = torch.relu(second(x + r) + p)
    one, other = (torch.autograd.grad(each.square().sum(), (x, r, p)) for each in (y, expected))
    pairs = [(y.detach(), expected.detach()), (s.detach(), (x + r).detach()), *zip(one, other, strict=True)]
    return [*pairs, (first.running_var, second.running_var)]


def averaged(rank: int) -> tuple[Tensor, Tensor]:
    """The gradient of weight under DistributedDataParallel, which averages, and without it."""
    gradients = []
    for parallel in (True, False):
        module = SyncBatchNorm(CHANNELS, activation="relu")
        x = torch.randn(2 + rank, CHANNELS, 4, generator=torch.Generator().manual_seed(rank))
        model = DistributedDataParallel(torch.nn.Sequential(module)) if parallel else module
        model(x).square().sum().backward()
        assert module.weight.grad is not None
        gradients.append(module.weight.grad)
    return gradients[0], gradients[1]


def error_of(call: Callable[[], Any]) -> str:
    """The error of a call as "Kind: words"; "" where there is none."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def change_in_place(module: SyncBatchNorm, x: Tensor) -> None:
    """An output is nobody's view: the caller changes it in place, as a sum behind the norm does."""
    x = x.clone().requires_grad_()
    scale = torch.rand(x.shape[:2])
    for y in (module(x), module(x, scale=scale), module(x, scale=scale, post_add=torch.ones_like(x))):
        y.add_(1).sum().backward()


def errors(rank: int, world_size: int) -> dict[str, str]:
    """What each mistake of one rank gives on this rank. The last is a call that a rank does not make."""
    last = rank == world_size - 1
    x = torch.randn(3, CHANNELS, 4)
    found = {}
    found["channels of the module"] = error_of(lambda: SyncBatchNorm(CHANNELS + last)(torch.randn(3, CHANNELS + last)))
    found["dtype"] = error_of(lambda: SyncBatchNorm(CHANNELS)(x.double() if last else x))
    found["grad"] = error_of(lambda: SyncBatchNorm(CHANNELS)(x.clone().requires_grad_(last)))
    found["refused at the first call"] = error_of(lambda: SyncBatchNorm(CHANNELS)(x[:, 1:] if last else x))
    module = SyncBatchNorm(CHANNELS)
    found["none"] = error_of(lambda: module(x))
    found["refused later"] = error_of(lambda: module(x[:, 1:] if last else x))
    found["no tensor"] = error_of(lambda: module(None if last else x))
    found["sum refused"] = error_of(lambda: module(x, return_sum=last))
    other = SyncBatchNorm(CHANNELS)
    other(x)
    for name, good, bad in (
        ("channel_dim", 1, 5), ("num_features", CHANNELS, CHANNELS + 1),
        ("running_mean", torch.zeros(CHANNELS), torch.zeros(1).expand(CHANNELS)),
    ):  # fmt: skip
        setattr(other, name, bad if last else good)
        found[name] = error_of(lambda: other(x))
        setattr(other, name, good)
    found["changed"] = error_of(lambda: change_in_place(other, x))
    found["none again"] = error_of(lambda: module(x))
    found["updates"] = str(int(module.num_batches_tracked))
    counted = SyncBatchNorm(CHANNELS)
    counted.running_mean = counted.running_var = None
    for _ in range(3):
        counted(x)
    found["updates of nothing"] = str(int(counted.num_batches_tracked))
    found["one element"] = error_of(lambda: module(torch.randn(int(last), CHANNELS)))
    found["no element"] = error_of(lambda: module(torch.randn(0, CHANNELS)))
    if world_size == 2:  # the first operator on meta loads sympy, as torch.compile does
        found["meta of one"] = error_of(lambda: module(x.to("meta") if last else x))
        found["meta"] = error_of(lambda: SyncBatchNorm(CHANNELS, device="meta")(x.to("meta")))
    some = dist.new_group([0])
    if rank:
        found["no member"] = error_of(lambda: SyncBatchNorm(CHANNELS, process_group=some)(x))
    impatient = dist.new_group(timeout=timedelta(seconds=1))
    late = SyncBatchNorm(CHANNELS, process_group=impatient)
    late(x)
    if not last:
        found["no call"] = error_of(lambda: late(x))
    return found


def meet(rank: int, world_size: int, folder: Path, device: str) -> None:
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        if world_size > torch.cuda.device_count():
            # NCCL refuses two ranks of one host on one GPU; ranks of several hosts meet over sockets.
            os.environ |= {"NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{folder}/meeting{world_size}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )


def rank_main(rank: int, world_size: int, folder: Path, device: str) -> None:
    meet(rank, world_size, folder, device)
    by_parity = [dist.new_group(list(range(parity, world_size, 2))) for parity in (0, 1)]
    groups = {True: by_parity[rank % 2], False: None}
    found: Found = {
        name: [trained(case, rank, world_size, groups[case.subgroup], device) for _ in range(2)]
        for name, case in CASES.items()
    }
    found["same"] = [same_on_every_rank(device) for _ in range(2)]
    if device == "cpu":
        if world_size == 2:  # it loads torch.compile, which takes seconds in each process
            found["averaged"] = averaged(rank)
            found["summed"] = summed(rank)
        found["errors"] = errors(rank, world_size)
    torch.save(found, folder / f"rank{rank}of{world_size}.pt")
    dist.barrier()  # nobody leaves while another waits for its timeout
    dist.destroy_process_group()


def main(folder: Path, device: str, world_sizes: list[int]) -> int:
    """How many processes failed."""
    torch.set_num_threads(1)
    # The import of torch takes longer than all calls: it and the kernels are loaded once, before the processes part.
    SyncBatchNorm(CHANNELS)(torch.randn(2, CHANNELS, requires_grad=True)).sum().backward()
    return in_processes(rank_main, folder, device, world_sizes)


def in_processes(run: Callable[[int, int, Path, str], None], folder: Path, device: str, world_sizes: list[int]) -> int:
    """``run`` of every rank of each world size; how many processes failed."""
    # CUDA survives no fork, nor does autograd of a torch that was built with it.
    context = multiprocessing.get_context("fork" if device == "cpu" and torch.version.cuda is None else "spawn")
    failed = 0
    for world_size in world_sizes:
        processes = [context.Process(target=run, args=(rank, world_size, folder, device)) for rank in range(world_size)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        failed += sum(process.exitcode != 0 for process in processes)
    return failed


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], [int(size) for size in sys.argv[3:]]))
