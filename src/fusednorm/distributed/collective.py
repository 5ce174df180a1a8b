"""The one collective that everything here stands on: each rank's values, in the order of the ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


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


def gather(function: str, values: Tensor, group: Any) -> Tensor:
    """The ``values`` of every rank, of shape (ranks, *values.shape).

    It is an all_gather and not an all_reduce, since the order of an all_reduce's additions depends on the transport and
    on the number of values: each rank adds for itself, in the order of the ranks.

    Raises RuntimeError where the transport fails, as it does after the group's timeout if a rank makes no such call.
    """
    ranks = dist.get_world_size(group)
    values = values.contiguous()
    gathered = torch.empty((ranks, *values.shape), dtype=values.dtype, device=values.device)
    try:
        if values.is_cuda and "nccl" in str(dist.get_backend(group)):
            # NCCL would gather a list into a buffer of its own, and copy each rank's part out of it.
            dist.all_gather_into_tensor(gathered.view(-1), values.view(-1), group)
        else:
            dist.all_gather(list(gathered.unbind(0)), values, group)
    except RuntimeError as error:
        raise RuntimeError(
            f"{function}: the exchange with the other {ranks - 1} processes of the group failed; every rank of a group "
            f"makes the same calls in the same order, within the group's timeout; the transport says: {error}"
        ) from error
    return gathered


def sum_in_rank_order(gathered: Tensor) -> Tensor:
    """The sum over the ranks; ``gathered.sum(0)`` may add in an order that depends on the device and the shape."""
    total = gathered[0].clone()
    for part in gathered[1:]:
        total += part
    return total
