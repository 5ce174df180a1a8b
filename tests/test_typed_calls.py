"""Calls return what their types say."""

from __future__ import annotations

import pytest
import torch
import typed_calls
from torch import Tensor


@pytest.mark.parametrize(("name", "count"), [("norms", 1), ("pairs", 2), ("triples", 3)])
def test_calls_return_what_their_types_say(name: str, count: int) -> None:
    for found in getattr(typed_calls, name)(torch.randn(2, 4, 3, 5), torch.tensor(0.5)):
        results = (found,) if isinstance(found, Tensor) else found
        assert len(results) == count
        assert all(isinstance(one, Tensor) for one in results)


def test_an_argument_that_is_known_later() -> None:
    x = torch.randn(2, 4, 3, 5)
    assert isinstance(typed_calls.known_later(x, False), Tensor)
    assert len(typed_calls.known_later(x, True)) == 2
