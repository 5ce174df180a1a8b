"""What the code of other packages does not show by itself, by the qualified names of their classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from fusednorm.equivalents import qualified_name

#: For a class, the norms that are followed by the activation behind an ``if``, and when that holds. A branch of the
#: ``if`` that ends otherwise is one that such a block does not take. No package is imported for it.
ADAPTERS: dict[str, dict[str, Callable[[Any], bool]]] = {
    # The branch "scale_shift" modulates between norm2 and the activation.
    "diffusers.models.resnet.ResnetBlock2D": {"norm2": lambda block: block.time_embedding_norm == "default"},
}

#: For a class, the norms before which a sum stands that runs only when this holds.
SUMS: dict[str, dict[str, Callable[[Any], bool]]] = {
    "diffusers.models.resnet.ResnetBlock2D": {
        "norm2": lambda block: block.time_embedding_norm == "default" and block.time_emb_proj is not None
    },
}


def sum_runs(block: nn.Module, norm: str) -> bool:
    """Whether this block runs the sums that its class has before a norm, as far as an adapter knows."""
    condition = SUMS.get(qualified_name(type(block)), {}).get(norm)
    return condition is None or condition(block)


def branch_is_known(block: nn.Module, norm: str) -> bool:
    """Whether an adapter says that this block takes a branch that ends with the norm."""
    adapter = ADAPTERS.get(qualified_name(type(block)), {}).get(norm)
    return adapter is not None and adapter(block)
