"""Kernels start before the one before them has ended, and wait for its results, by the code compiled for Hopper."""

from __future__ import annotations

from typing import Any

import pytest

triton = pytest.importorskip("triton")

from triton_support import CASES, KERNELS, TARGETS, Made, branches, capabilities, operations, source  # noqa: E402

WAIT, DEPENDENTS = "griddepcontrol.wait", "griddepcontrol.launch_dependents"
LOAD, STORE = "ld.global", "st.global"
OPERATIONS = operations(capabilities("sm_90"), CASES)
#: The first launches of calls, launches that follow another one of their call, and those that another one follows.
FIRST = [operation[0] for operation in OPERATIONS]
FOLLOWING = [made for operation in OPERATIONS for made in operation[1:]]
FOLLOWED = [made for operation in OPERATIONS for made in operation[:-1]]


def _each_branch(launches: list[Made], kernel: str) -> list[Made]:
    """Launches of a kernel that between them take all the branches that such launches take, but for the dtypes'."""
    found: list[Made] = []
    taken: set[Any] = set()
    for made in launches:
        deciding = {branch for branch in branches(made) if branch[-1] in (True, False, None)}
        if made.kernel == kernel and not deciding <= taken:
            found.append(made)
            taken |= deciding
    return found


def _names(launches: list[Made]) -> list[str]:
    return sorted({made.kernel for made in launches})


def _code(made: Made) -> str:
    compiled = triton.compile(source(made), target=TARGETS["sm_90"], options=made.launch.options)
    code: str = compiled.asm["ptx"]
    return code


def _check_wait(launches: list[Made], kernel: str, *later: str) -> None:
    """A kernel waits and stores, and does nothing of this before it waits."""
    for made in _each_branch(launches, kernel):
        code = _code(made)
        assert WAIT in code, made.launch.constants
        assert STORE in code
        for instruction in later:
            assert instruction not in code[: code.index(WAIT)], made.launch.constants


def test_kernels_start_early_but_for_large_ones_of_many_steps() -> None:
    assert set(_names(FIRST)) | set(_names(FOLLOWING)) == KERNELS
    early = [made for made in (*FIRST, *FOLLOWING) if made.launch.options.get("launch_pdl")]
    late = [made for made in FIRST if not made.launch.options.get("launch_pdl")]
    assert set(_names(early)) == KERNELS - {"held_samples_backward"}  # of which no case is small
    assert set(_names(late)) == {"held_samples_backward", "rows_backward", "rows_gated_backward", "rows_sum_backward"}
    assert len(early) + len(late) == len(FIRST) + len(FOLLOWING)  # what follows is early


@pytest.mark.parametrize("kernel", _names(FIRST))
def test_the_first_of_a_call_waits_before_it_loads_or_stores(kernel: str) -> None:
    """What runs before it may be any kernel, and have made any of its arguments."""
    _check_wait(FIRST, kernel, LOAD, STORE, DEPENDENTS)


def test_kernels_that_mostly_follow_another_one_may_be_the_first() -> None:
    """Where statistics are given, or nothing but the parameters' gradients is wanted."""
    assert {"apply", "gradients", "points_apply", "points_gradients", "columns_backward"} <= set(_names(FIRST))


@pytest.mark.parametrize("kernel", _names(FOLLOWING))
def test_waits_before_it_stores(kernel: str) -> None:
    _check_wait(FOLLOWING, kernel, STORE)


def test_waits_for_a_sum_that_the_launch_before_stores() -> None:
    reading = [made for made in FOLLOWING if made.launch.constants.get("STORED")]
    assert reading
    _check_wait(reading, "sum_apply", LOAD)


@pytest.mark.parametrize("kernel", _names(FOLLOWED))
def test_lets_the_next_one_start(kernel: str) -> None:
    for made in _each_branch(FOLLOWED, kernel):
        assert DEPENDENTS in _code(made), made.launch.constants
