"""The errors of calls that are compiled."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index

import torch

_is_compiling = torch.compiler.is_dynamo_compiling
Kind = type[ValueError] | type[TypeError] | type[RuntimeError]
KINDS: dict[str, Kind] = {kind.__name__: kind for kind in (ValueError, TypeError, RuntimeError)}
_NAMES = {kind: name for name, kind in KINDS.items()}  # Dynamo of torch 2.11 takes no ``__name__`` of a builtin class


def refusal(words: str, kind: Kind = ValueError) -> Exception:
    """The error of a call, to raise. While Dynamo traces, an op raises it in place of the caller, and the compilation
    ends with TorchRuntimeError and these words, as it does for errors of torch's operators.

    Code in which Dynamo sees an exception it gives up: it runs that code uncompiled ever after, also by arguments that
    are right.
    """
    if _is_compiling():
        torch.ops.fusednorm.refuse(_NAMES[kind], words)
    return kind(words)


def sizes(shape: Sequence[int]) -> tuple[int, ...]:
    """A shape in the words of an error: while Dynamo traces, of numbers, since it formats no tuple of symbols."""
    return tuple(index(size) for size in shape)
