"""The one collective that everything here stands on: each rank's values, in the order of the ranks.

A group is one process group, or several whose product holds the whole: the ranks of a device mesh that share a
statistic. Values go over one group after the other, so that each rank merges the same values in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from fusednorm.private.torch_names import is_batched, traced_all_gather, traced_wait, transformed


def exchange_device(group: Any) -> torch.device:
    """A device whose tensors the group can exchange, whatever tensors a call is given: the CPU where it can."""
    if "cpu:" in dist.get_backend_config(group):  # such as cpu:gloo,cuda:nccl
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def active_group(function: str, group: Any) -> Any:
    """The process group that a call runs over: ``group``, or the default one for None; None where there is one process.

    Raises ValueError where this process is not a member of ``group``.
    """
    if not dist.is_available() or not dist.is_initialized():
        return None
    found = dist.group.WORLD if group is None else group
    if found == dist.GroupMember.NON_GROUP_MEMBER or dist.get_rank(found) < 0:
        raise ValueError(
            f"{function}: this process, rank {dist.get_rank()}, is not a member of the process group; give each "
            "process a group that it belongs to, or None for all processes"
        )
    return found if dist.get_world_size(found) > 1 else None


@cache
def _all_gather() -> Callable[..., Any]:
    """torch's gather into one tensor. torch 2.15 renames it, and warns at each call by the old name."""
    found: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return found


#: How many ranks a group has, and its backends, such as "cpu:gloo,cuda:nccl": torch takes 5 us to say so.
_groups: WeakKeyDictionary[Any, tuple[int, str]] = WeakKeyDictionary()


def _size_and_backends(group: Any) -> tuple[int, str]:
    known = _groups.get(group)
    if known is None:
        known = _groups[group] = (dist.get_world_size(group), str(dist.get_backend(group)))
    return known


def gather(function: str, values: Tensor, group: Any) -> Tensor:
    """The ``values`` of every rank, of shape (ranks, *values.shape)."""
    return begin_gather(function, values, group, overlaps=False)()


def begin_gather(function: str, values: Tensor, group: Any, overlaps: bool = True) -> Callable[[], Tensor]:
    """Start to exchange ``values``; the result waits for those of every rank, of shape (ranks, *values.shape).

    Without ``overlaps`` the exchange runs on the device's own stream, which spares the events between two.

    It is an all_gather and not an all_reduce, since the order of an all_reduce's additions depends on the transport and
    on the number of values: each rank adds for itself, in the order of the ranks.

    Raises RuntimeError where the transport fails, as it does after the group's timeout if a rank makes no such call.
    """
    if transformed() or is_batched(values):
        raise RuntimeError(
            f"{function}: torch.func's transforms, forward-mode AD and is_grads_batched are not supported where "
            "processes exchange statistics; call it outside of them"
        )
    values = values.contiguous()
    if type(values) is not Tensor:  # a fake or functional tensor, of which a tracer makes a graph
        pending = traced_all_gather(values.unsqueeze(0), group)
        return lambda: traced_wait(pending)
    ranks, backends = _size_and_backends(group)
    gathered = torch.empty((ranks, *values.shape), dtype=values.dtype, device=values.device)
    overlaps = overlaps and not torch.compiler.is_compiling()
    try:
        if ("nccl" if values.is_cuda else "gloo") in backends:
            # NCCL would gather a list into a buffer of its own, and copy each rank's part out of it.
            work = _all_gather()(gathered.view(-1), values.view(-1), group, async_op=overlaps)
        else:
            work = dist.all_gather(list(gathered.unbind(0)), values, group, async_op=overlaps)
    except RuntimeError as error:
        raise _failed(function, ranks, error) from error

    def finish() -> Tensor:
        try:
            if work is not None:
                work.wait()  # a CUDA stream waits for it, and the host does not
        except RuntimeError as error:
            raise _failed(function, ranks, error) from error
        return gathered

    return finish


def _failed(function: str, ranks: int, error: RuntimeError) -> RuntimeError:
    return RuntimeError(
        f"{function}: the exchange with the other {ranks - 1} processes of the group failed; every rank of a group "
        f"makes the same calls in the same order, within the group's timeout; the transport says: {error}"
    )


def begin_sum(function: str, values: Tensor, groups: Sequence[Any]) -> Callable[[], Tensor]:
    """Start to sum ``values`` over the ranks of all ``groups``; the result waits for the sum.

    What runs on the device before that overlaps with the exchange over the first group.
    """
    first, *others = groups
    arrive = begin_gather(function, values, first)

    def finish() -> Tensor:
        total = sum_in_rank_order(arrive())
        for group in others:
            total = sum_in_rank_order(gather(function, total, group))
        return total

    return finish


def sum_in_rank_order(gathered: Tensor) -> Tensor:
    """The sum over the ranks; ``gathered.sum(0)`` may add in an order that depends on the device and the shape."""
    total = gathered[0].clone()
    for part in gathered[1:]:
        total += part
    return total
