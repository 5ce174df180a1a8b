"""Calls over processes that repeat, without their checks: what they give, and which calls are none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from repeats_worker import MAKES
from test_distributed import Found
from test_distributed_fused import in_interpreter


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return in_interpreter(tmp_path_factory.mktemp("ranks"), Path(__file__).with_name("repeats_worker.py"))


@pytest.mark.parametrize("name", MAKES)
def test_a_repeat_has_the_bits_of_a_first_call(ranks: Found, name: str) -> None:
    for found in ranks:
        (kept, repeats), (fresh, none) = found[name]
        # The first call is noted, the second one kept; the module's first call agrees. What no kernel may write to is
        # never kept.
        assert repeats == (0 if name == "strided" else 3)
        assert none == 0
        for got, expected in zip(kept, fresh, strict=True):
            for one, other in zip(got, expected, strict=True):
                assert torch.equal(one, other)


def test_running_statistics_of_any_strides_move_alike(ranks: Found) -> None:
    """A kernel writes to contiguous memory alone."""
    for found in ranks:
        (dense, _), _ = found["module"]
        (strided, _), _ = found["strided"]
        for one, other in zip(dense, strided, strict=True):
            for got, expected in zip(other[-3:], one[-3:], strict=True):
                torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(
    ("change", "repeats", "error"),
    [
        ("same", True, ""),
        ("eps", False, ""),
        ("groups", False, ""),
        ("shape", False, ""),
        ("strides", False, ""),
        ("frozen", False, ""),
        ("no weight", False, ""),
        ("activation", False, ""),
        ("no gradients", False, ""),
        ("weight of 7", False, "ValueError"),
        ("groups 4.0", False, "TypeError"),
        ("eps as text", False, "TypeError"),
    ],
)
def test_a_call_that_differs_is_no_repeat(ranks: Found, change: str, repeats: bool, error: str) -> None:
    for found in ranks:
        assert found["others"][change] == (repeats, error)


def test_a_profiler_sees_the_kernels_that_run_without_it(ranks: Found) -> None:
    for found in ranks:
        assert found["profiled"] == (True, 0)


def test_a_plan_makes_the_gradients_that_are_wanted(ranks: Found) -> None:
    for found in ranks:
        for one, other in zip(*found["wanted"], strict=True):
            assert torch.isfinite(one).all()
            assert torch.equal(one, other)


def test_calls_that_ranks_compare_each_time_are_no_repeats(ranks: Found) -> None:
    """Over a group that can carry tensors of the CPU, as gloo's."""
    for found in ranks:
        assert found["compared"] == [0, 0, 0]
