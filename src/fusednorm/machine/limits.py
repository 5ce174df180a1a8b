"""The limits of this machine: the speed of a plain copy of the same bytes, and of a matrix product.

The limit of a forward is y.copy_(x) (one read, one write), the limit of a backward torch.add(x, dy, out=z) (two reads,
one write). On a GPU they run on the contenders' own inputs, on a CPU on fp32 buffers of the same bytes, since there
torch's sum of 16-bit values is bound by their conversion. The backward of gamma and beta reads two tensors and writes
none: its limit is the copy, which it may beat where a write costs more than a read.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from fusednorm import problem
from fusednorm.machine.timing import Call, Calls, timer_for
from fusednorm.problem import Direction

# The reads and writes of one element in each direction.
TRANSFERS: dict[str, int] = {**problem.TRANSFERS, "forward_backward": 5}


def _call_on(direction: Direction | str, first: Tensor, second: Tensor) -> Call:
    target = torch.empty_like(first)

    def copy() -> Tensor:
        return target.copy_(first)

    def add() -> Tensor:
        return torch.add(first, second, out=target)

    if direction == "forward_backward":
        return lambda: (copy(), add())
    return add if TRANSFERS[direction] == 3 else copy


def _buffer(nbytes: int, device: str) -> Tensor:
    return torch.ones(max(1, nbytes // 4), dtype=torch.float32, device=device)


def copy_calls(nbytes: int, sets: int, device: str = "cpu") -> Calls:
    """Copies of ``nbytes``, each byte read once and written once, on ``sets`` buffers for a timer to rotate through."""
    buffers = [_buffer(nbytes, device) for _ in range(sets)]
    return [_call_on("forward", buffer, buffer) for buffer in buffers]


def limit_calls(direction: Direction | str, pairs: Sequence[tuple[Tensor, Tensor]]) -> Calls:
    """The plain operation with the transfers of a direction, for each pair of an input and its gradient."""
    calls = []
    for first, second in pairs:
        if first.device.type == "cpu":
            first, second = (_buffer(first.nbytes, "cpu") for _ in range(2))
        calls.append(_call_on(direction, first, second))
    return calls


@cache
def _copy_bandwidth(device: str, threads: int, nbytes: int) -> float:
    timer = timer_for(device)
    timing = timer.measure({"copy": copy_calls(nbytes, timer.input_sets(2 * nbytes), device)})
    return 2 * nbytes / timing["copy"].median


def copy_bandwidth(nbytes: int, device: str = "cpu") -> float:
    """Bytes per second (read plus written) of a copy of about ``nbytes``; measured once per process and threads.

    Sizes are taken to the next power of two between 1 MB and 256 MB: below, a call's own cost would be measured.
    """
    size = 1 << max(20, min(28, (max(1, nbytes) - 1).bit_length()))
    return _copy_bandwidth(device, torch.get_num_threads(), size)


@cache
def _peak_flops(device: str, threads: int, dtype: torch.dtype) -> float:
    size = 1024 if device == "cpu" else 4096  # a product that fills the device
    left, right, out = (torch.rand(size, size, dtype=dtype, device=device) for _ in range(3))
    timing = timer_for(device).measure({"matmul": [lambda: torch.mm(left, right, out=out)]})
    return 2 * size**3 / timing["matmul"].median


def peak_flops(compute_dtype: str, device: str = "cpu") -> float:
    """Flops per second of a matrix product in the compute dtype, an fma counted as two; measured once per process."""
    return _peak_flops(device, torch.get_num_threads(), getattr(torch, compute_dtype))
