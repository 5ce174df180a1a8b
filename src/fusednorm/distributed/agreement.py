"""Whether the ranks of a group make the same call, before they exchange tensors whose sizes follow from it.

A transport that is given tensors of different sizes hangs, crashes or mixes their values. So the first call of a module
over a group exchanges a header of fixed size, which every rank can send whatever its arguments are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusednorm.distributed.collective import gather
from fusednorm.dtypes import DTYPES, dtype_name

#: The codes of dtypes in a header, from 1; 0 is any other dtype.
_DTYPES = tuple(sorted(map(dtype_name, DTYPES)))
_FIELDS = ("channels", "dtype", "gradient for the input")


def header(refused: bool, channels: int, input: Any) -> list[int]:
    """What every rank must have alike, as numbers; the first says whether this rank refuses its own arguments."""
    dtype = dtype_name(input.dtype) if isinstance(input, Tensor) else ""
    code = _DTYPES.index(dtype) + 1 if dtype in _DTYPES else 0
    differentiable = isinstance(input, Tensor) and input.requires_grad and torch.is_grad_enabled()
    return [int(refused), channels, code, int(differentiable)]


def check_agreement(function: str, own: list[int], device: torch.device, group: Any) -> None:
    """Exchange headers once; RuntimeError on every rank where they differ or where a rank refuses its arguments."""
    rows = gather(function, torch.tensor(own, dtype=torch.int64, device=device), group).tolist()
    refusing = [rank for rank, row in enumerate(rows) if row[0]]
    if refusing:
        refuse_peers(function, refusing)
    if any(row != rows[0] for row in rows):
        ranks = "; ".join(f"rank {rank}: {_described(row)}" for rank, row in enumerate(rows))
        raise RuntimeError(
            f"{function}: the ranks of the group do not make the same call: {ranks}; give every rank a module of the "
            "same channels and an input of the same dtype that requires grad on all ranks or on none; an empty input "
            "is allowed"
        )


def refuse_peers(function: str, ranks: list[int]) -> None:
    raise RuntimeError(
        f"{function}: rank {', '.join(map(str, ranks))} of the group refused its arguments, and no rank has a result; "
        "its own error says why"
    )


def _described(row: list[int]) -> str:
    values = (row[1], _DTYPES[row[2] - 1] if row[2] else "another dtype", "yes" if row[3] else "no")
    return ", ".join(f"{name} {value}" for name, value in zip(_FIELDS, values, strict=True))
