"""Kernels that may start before the one before them has ended wait for its results, by the code compiled for Hopper."""

from __future__ import annotations

from typing import Any

import pytest

triton = pytest.importorskip("triton")

from triton_support import CASES, KERNELS, TARGETS, Made, branches, capabilities, operations, source  # noqa: E402

WAIT, DEPENDENTS, STORE = "griddepcontrol.wait", "griddepcontrol.launch_dependents", "st.global"
OPERATIONS = operations(capabilities("sm_90"), CASES)
#: Launches that follow another one of their call, and launches that another one follows.
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


def test_all_kernels_of_several_launches() -> None:
    """Those that are alone in their calls neither wait nor are waited for."""
    alone = {
        "whole_forward",
        "flat_forward",
        "held_forward",
        "rows_forward",
        "positions_forward",
        "positions_sum_forward",
        "whole_sum_forward",
        "held_sum_forward",
        "move_statistics",
    }
    assert set(_names(FOLLOWING)) | set(_names(FOLLOWED)) == KERNELS - alone


def test_only_what_follows_is_launched_early() -> None:
    for operation in OPERATIONS:
        early = [made.launch.options.get("launch_pdl", False) for made in operation]
        assert early == [False, *[True] * (len(early) - 1)]


@pytest.mark.parametrize("kernel", _names(FOLLOWING))
def test_waits_before_it_stores(kernel: str) -> None:
    for made in _each_branch(FOLLOWING, kernel):
        code = _code(made)
        assert WAIT in code, made.launch.constants
        assert STORE in code
        assert code.index(WAIT) < code.index(STORE), made.launch.constants


def test_waits_for_a_sum_that_the_launch_before_stores() -> None:
    reading = [made for made in FOLLOWING if made.launch.constants.get("STORED")]
    assert reading
    for made in _each_branch(reading, "sum_apply"):
        code = _code(made)
        assert code.index(WAIT) < code.index("ld.global"), made.launch.constants


@pytest.mark.parametrize("kernel", _names(FOLLOWED))
def test_lets_the_next_one_start(kernel: str) -> None:
    for made in _each_branch(FOLLOWED, kernel):
        assert DEPENDENTS in _code(made), made.launch.constants
