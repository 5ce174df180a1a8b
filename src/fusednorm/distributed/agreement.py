"""Whether the ranks of a group make the same call, before they exchange tensors whose sizes follow from it.

A transport that is given tensors of different sizes hangs, crashes or mixes their values. So the ranks first exchange a
header of fixed size, which every rank can send whatever its arguments are: the first call of a module over a group, and
each call of the functions.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from fusednorm.distributed.collective import gather

#: What every rank must have alike, by the words of an error. What JSON can hold keeps its value.
Facts = dict[str, Any]

#: More than any facts take, those of a tensor of 64 dimensions included.
_BYTES = 2048


def agree(
    function: str, facts: Facts | None, own: int, device: torch.device, group: Any, remedy: str = ""
) -> list[int]:
    """Exchange headers once; the number ``own`` of every rank, in the order of the ranks.

    ``facts`` is None on a rank that refuses its arguments. Raises RuntimeError on every rank where functions or facts
    differ or a rank refuses its arguments.
    """
    if facts is not None:
        facts = {"function": function, **facts}
    found = _decoded(gather(function, _encoded([facts, own], device), group))
    refusing = [rank for rank, (each, _) in enumerate(found) if each is None]
    if refusing:
        refuse_peers(function, refusing)
    every = [each for each, _ in found]
    names = [name for name in every[0] if any(each.get(name) != every[0][name] for each in every)]
    if names or any(each.keys() != every[0].keys() for each in every):
        ranks = "; ".join(f"rank {rank}: {_described(each, names)}" for rank, each in enumerate(every))
        raise RuntimeError(f"{function}: the ranks of the group do not make the same call: {ranks}; {remedy}")
    return [number for _, number in found]


def refuse_peers(function: str, ranks: list[int]) -> None:
    raise RuntimeError(
        f"{function}: rank {', '.join(map(str, ranks))} of the group refused its arguments, and no rank has a result; "
        "its own error says why"
    )


def _encoded(value: Any, device: torch.device) -> Tensor:
    text = bytearray(json.dumps(value).encode().ljust(_BYTES))
    return torch.frombuffer(text, dtype=torch.uint8).to(device)


def _decoded(rows: Tensor) -> list[Any]:
    """The value of each row. torch writes into memory of Python's: tolist would make a number of each byte, 80 us."""
    text = bytearray(rows.numel())
    torch.frombuffer(text, dtype=torch.uint8).copy_(rows.flatten())
    return [json.loads(text[start : start + _BYTES]) for start in range(0, len(text), _BYTES)]


def _described(facts: Facts, names: list[str]) -> str:
    return ", ".join(f"{name} {facts[name]}" for name in names or facts if name in facts)
