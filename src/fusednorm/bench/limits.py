"""What this machine can do at best: a plain copy of the same bytes, and the flops of a matrix product.

The limit of a forward is y.copy_(x) (one read, one write); that of a backward torch.add(x, dy, out=z) (two reads, one
write). Buffers are fp32 whatever the workload's dtype, because only their bytes count. The backward of gamma and beta
reads two tensors and writes none: it is held against the copy too, which it may beat where a write costs more.
"""

from __future__ import annotations

from functools import cache

import torch

from fusednorm.bench.timing import Call, Calls, timer_for
from fusednorm.problem import Direction

# The reads and writes of one element in each direction.
TRANSFERS: dict[str, int] = {
    "forward": 2,
    "inference": 2,
    "backward": 3,
    "backward_data": 3,
    "backward_gamma_beta": 2,
    "forward_backward": 5,
}


def _buffer(nbytes: int, device: str) -> torch.Tensor:
    return torch.ones(max(1, nbytes // 4), dtype=torch.float32, device=device)


def copy_call(nbytes: int, device: str = "cpu") -> Call:
    """A copy of ``nbytes``: one read and one write of them."""
    source, target = _buffer(nbytes, device), _buffer(nbytes, device)
    return lambda: target.copy_(source)


def add_call(nbytes: int, device: str = "cpu") -> Call:
    """A sum of two tensors of ``nbytes`` each into a third."""
    first, second, target = (_buffer(nbytes, device) for _ in range(3))
    return lambda: torch.add(first, second, out=target)


def limit_call(direction: Direction | str, nbytes: int, device: str = "cpu") -> Call:
    """The plain operation with the transfers of a direction; ``nbytes`` is the size of one tensor."""
    if direction == "forward_backward":
        copy, add = copy_call(nbytes, device), add_call(nbytes, device)
        return lambda: (copy(), add())
    return add_call(nbytes, device) if TRANSFERS[direction] == 3 else copy_call(nbytes, device)


def limit_calls(direction: Direction | str, nbytes: int, sets: int, device: str = "cpu") -> Calls:
    """The limit on as many sets of buffers as a timer rotates through."""
    return [limit_call(direction, nbytes, device) for _ in range(sets)]


@cache
def _copy_bandwidth(device: str, threads: int, nbytes: int) -> float:
    timer = timer_for(device)
    timing = timer.measure({"copy": limit_calls("forward", nbytes, timer.input_sets(2 * nbytes), device)})
    return 2 * nbytes / timing["copy"].median


def copy_bandwidth(nbytes: int, device: str = "cpu") -> float:
    """Bytes per second (read plus written) of a copy of about ``nbytes``; measured once per process and threads.

    Sizes are taken to the next power of two between 1 MB and 256 MB: below, a call's own cost would be measured.
    """
    size = 1 << max(20, min(28, (max(1, nbytes) - 1).bit_length()))
    return _copy_bandwidth(device, torch.get_num_threads(), size)


@cache
def _peak_flops(device: str, threads: int, dtype: torch.dtype) -> float:
    size = 1024
    left, right, out = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(3))
    timer = timer_for(device)
    timing = timer.measure({"matmul": [lambda: torch.mm(left, right, out=out)] * timer.input_sets(out.nbytes * 3)})
    return 2 * size**3 / timing["matmul"].median


def peak_flops(compute_dtype: str, device: str = "cpu") -> float:
    """Flops per second of a matrix product in the compute dtype, an fma counted as two; measured once per process."""
    return _peak_flops(device, torch.get_num_threads(), getattr(torch, compute_dtype))
