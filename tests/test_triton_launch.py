"""The short way to start a compiled kernel, against launchers of the forms that Triton's releases have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

from fusednorm.backends.triton.launch import _start

STREAM, FUNCTION, METADATA = 99, 11, (4, 1)
TAIL = (128, 32, True, "value")


class Launcher:
    """Passes its arguments on to ``launch`` as Triton 3.6 does."""

    global_scratch_size = profile_scratch_size = 0

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def launch(self, *arguments: Any) -> None:
        self.calls.append(arguments)

    def __call__(self, x: int, y: int, z: int, stream: Any, function: Any, *arguments: Any) -> None:
        self.launch(x, y, z, stream, function, False, True, None, None, *arguments)


class Nested(Launcher):
    """As Triton 3.9 does: the kernel's own arguments in one tuple, behind a description of them."""

    def __call__(self, x: int, y: int, z: int, stream: Any, function: Any, *arguments: Any) -> None:
        *metadata, a, b, c = arguments[:4]
        self.launch(x, y, z, stream, function, False, True, *metadata, a, b, c, None, None, b"in", b"ii", arguments[4:])


class Scratch(Launcher):
    """A kernel that needs memory of its own for each launch."""

    global_scratch_size = 16

    def __call__(self, x: int, y: int, z: int, stream: Any, function: Any, *arguments: Any) -> None:
        self.launch(x, y, z, stream, function, len(self.calls), *arguments)


class Unknown(Launcher):
    """Some other form."""

    def __call__(self, *arguments: Any) -> None:
        self.launch({"arguments": arguments})


@pytest.mark.parametrize("kind", [Launcher, Nested, Scratch, Unknown])
def test_starts_as_the_launcher_itself_does(kind: type[Launcher]) -> None:
    ours, official = kind(), kind()
    start = _start(SimpleNamespace(run=ours, function=FUNCTION, packed_metadata=METADATA), 7, [16, None, 32], TAIL)
    assert ours.calls == []
    for addresses in ([48, None, 64], [80, None, 96]):
        start(STREAM, addresses)
        official(7, 1, 1, STREAM, FUNCTION, METADATA, None, None, None, *addresses, *TAIL)
    assert ours.calls == official.calls


def test_what_a_launch_passes_on_is_seen_without_launching() -> None:
    run = Launcher()
    _start(SimpleNamespace(run=run, function=FUNCTION, packed_metadata=METADATA), 7, [16], TAIL)
    assert "launch" not in vars(run)
    assert run.calls == []
