"""Problems of norms of empty tensors, whose configurations tests look at."""

from __future__ import annotations

import torch

from fusednorm.norm import Family, norm_of
from fusednorm.operands import BackwardOperands, Operands
from fusednorm.problem import Problem
from fusednorm.problems import backward_problem, forward_problem


def problems_of(
    family: Family, groups: int, shape: tuple[int, ...], last: bool = False, dtype: torch.dtype = torch.bfloat16
) -> tuple[Problem, Problem]:
    """The forward and the backward of a norm without parameters."""
    memory = torch.channels_last if last else torch.contiguous_format
    x = torch.empty(shape, dtype=dtype, device="meta").contiguous(memory_format=memory)
    norm = norm_of(family, groups)
    return forward_problem(norm, Operands(x)), backward_problem(norm, BackwardOperands(x, x, x, x))


def group_norms(shape: tuple[int, ...], groups: int, dtype: torch.dtype, last: bool) -> tuple[Problem, Problem]:
    return problems_of("group_norm", groups, shape, last, dtype)
