"""The dtypes that a tensor may have, and the one in which a kernel computes."""

from __future__ import annotations

import torch

DTYPES = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})


def dtype_name(dtype: torch.dtype) -> str:
    """The name without "torch.", such as "float32"."""
    return str(dtype).removeprefix("torch.")


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the accumulation and of the saved statistics: fp32, and fp64 for fp64 input."""
    return torch.float64 if dtype == torch.float64 else torch.float32
