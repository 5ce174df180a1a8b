"""What the code of a rewritten class calls for a sum and the norm before or behind it.

Both functions compute what the class's own code computes, whatever the terms are: one call of the norm where they fit
it and the tensors are large, and torch's sum beside the norm elsewhere.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, fx, nn

from fusednorm.equivalents import activated

#: Below so many bytes a call with a sum costs more than it saves: on two cores of an AMD EPYC a group_norm of 80 KB
#: with pre_add takes 58 us and the two calls 23 us; of 10 MB 1.4 ms and 2.3 ms.
LEAST_BYTES = 1 << 21


def sum_behind(norm: Any, input: Any, term: Any, in_place: bool = False) -> Any:
    """phi(norm(input) + term), with the activation of the norm; ``in_place`` keeps the shape and dtype of the first."""
    if _traced(input, term) or _fits(input, term, term):
        return norm(input, post_add=term)
    total = _without_activation(norm, input)
    if in_place:
        total += term
    else:
        total = total + term
    return activated(total, norm.activation)


def sum_before(norm: Any, input: Any, term: Any) -> Any:
    """norm(input + term)."""
    if not _traced(input, term):
        numbers = _numbers_of_channels(norm, input, term)
        if _fits(input, term, term if numbers is None else input):
            return norm(input, pre_add=term if numbers is None else numbers)
    return norm(input + term)


def _without_activation(norm: Any, input: Any) -> Any:
    """norm(input), by the module itself where Dynamo traces it, which cannot copy it, and else by a copy with the same
    parameters, buffers and hooks, since other threads may call the module."""
    activation = norm.activation
    bare = norm if torch.compiler.is_dynamo_compiling() else copy.copy(norm)
    bare.activation = None
    result = bare(input)
    bare.activation = activation
    return result


def _traced(*terms: Any) -> bool:
    """Whether torch.fx records the calls: a Proxy does not know its shape."""
    return any(isinstance(term, fx.Proxy) for term in terms)


def _fits(input: Any, term: Any, spread: Any) -> bool:
    if not isinstance(input, Tensor) or not isinstance(term, Tensor):
        return False
    if spread.shape != input.shape or term.dtype != input.dtype or term.device != input.device:
        return False
    return torch.compiler.is_compiling() or input.nbytes >= LEAST_BYTES  # a graph needs no guard on the size


def _numbers_of_channels(norm: nn.Module, input: Any, term: Any) -> Tensor | None:
    """A term of shape (N, C, 1, ..., 1) as (N, C), where the norm takes numbers of samples and channels."""
    if norm.channel_dim != 1 or not isinstance(input, Tensor) or not isinstance(term, Tensor):
        return None
    channels = input.shape[:2]
    if input.dim() < 3 or term.shape != (*channels, *[1] * (input.dim() - 2)) or isinstance(norm, _ROWS):
        return None
    return term.flatten(1)


_ROWS = (nn.LayerNorm, nn.RMSNorm)
