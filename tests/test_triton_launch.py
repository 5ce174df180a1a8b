"""Which calls share a compiled kernel, and the short way to start one, against launchers as Triton's releases have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from fusednorm.backends.triton import launch as launches
from fusednorm.backends.triton.launch import Launch
from fusednorm.private.triton_names import start_of

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
    start = start_of(SimpleNamespace(run=ours, function=FUNCTION, packed_metadata=METADATA), 7, [16, None, 32], TAIL)
    assert ours.calls == []
    for addresses in ([48, None, 64], [80, None, 96]):
        start(STREAM, addresses)
        official(7, 1, 1, STREAM, FUNCTION, METADATA, None, None, None, *addresses, *TAIL)
    assert ours.calls == official.calls


@pytest.mark.parametrize("kind", [Launcher, Nested])
def test_a_launcher_of_a_known_form_works_out_nothing_again(
    kind: type[Launcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = kind()
    start = start_of(SimpleNamespace(run=run, function=FUNCTION, packed_metadata=METADATA), 7, [16, None, 32], TAIL)
    monkeypatch.setattr(kind, "__call__", None)
    start(STREAM, [48, None, 64])
    assert len(run.calls) == 1


def test_what_a_launch_passes_on_is_seen_without_launching() -> None:
    run = Launcher()
    start_of(SimpleNamespace(run=run, function=FUNCTION, packed_metadata=METADATA), 7, [16], TAIL)
    assert "launch" not in vars(run)
    assert run.calls == []


class Kernel:
    """Stands in for a kernel that Triton compiles at its first launch, anew each time that it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.compiled: list[Launcher] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **options: Any) -> Any:
            self.asked.append((grid, arguments, options))
            self.compiled.append(Launcher())
            return SimpleNamespace(run=self.compiled[-1], function=len(self.compiled), packed_metadata=METADATA)

        return launch

    @property
    def started(self) -> list[int]:
        """How often each compiled kernel was started after its first launch."""
        return [len(launcher.calls) for launcher in self.compiled]


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> int:
    """The current stream of the tensors' device, which torch may not know."""
    streams = {_at(0).get_device(): STREAM}
    monkeypatch.setattr(launches, "current_raw_stream", streams.__getitem__)
    return STREAM


def _at(offset: int, dtype: torch.dtype = torch.float16) -> Tensor:
    """A tensor so many bytes behind a multiple of 16."""
    block = torch.zeros(64, dtype=torch.uint8)
    start = -block.data_ptr() % 16 + offset
    return block[start : start + 16].view(dtype)


FIRST = (_at(0), None, _at(0), _at(0))
#: What differs from FIRST in one tensor, so that a kernel compiled for FIRST may read it wrongly.
OTHERS: dict[str, tuple[Tensor | None, ...]] = {
    "the first is unaligned": (_at(2), None, _at(0), _at(0)),
    "the third is unaligned": (_at(0), None, _at(8), _at(0)),
    "the last is unaligned": (_at(0), None, _at(0), _at(14)),
    "two are unaligned": (_at(0), None, _at(4), _at(4)),
    "all are unaligned": (_at(2), None, _at(2), _at(2)),
    "all but the first are None": (_at(0), None, None, None),
    "the last is None": (_at(0), None, _at(0), None),
    "none is None": (_at(0), _at(0), _at(0), _at(0)),
    "another is None": (_at(0), _at(0), None, _at(0)),
    "another is unaligned, and another None": (_at(0), _at(2), None, _at(0)),
    "the first is of a wider dtype": (_at(0, torch.float32), None, _at(0), _at(0)),
    "the last is of a dtype as wide": (_at(0), None, _at(0), _at(0, torch.bfloat16)),
    "all are of another dtype": (_at(0, torch.float64), None, _at(0, torch.float64), _at(0, torch.float64)),
}


def _launch(kernel: Kernel) -> Launch:
    return Launch(kernel, 7, (128, 32), {"MASKED": True, "NAME": "value"}, warps=2)


def test_the_first_call_goes_through_triton(stream: int) -> None:
    kernel = Kernel()
    _launch(kernel)(*FIRST)
    ((grid, arguments, options),) = kernel.asked
    assert grid == (7, 1, 1)
    assert all(one is other for one, other in zip(arguments, (*FIRST, 128, 32), strict=True))
    assert {"MASKED": True, "NAME": "value", "num_warps": 2}.items() <= options.items()
    assert kernel.started == [0]


def test_later_calls_start_what_it_compiled_with_their_own_tensors(stream: int) -> None:
    kernel = Kernel()
    launch = _launch(kernel)
    launch(*FIRST)
    for tensors in ((_at(0), None, _at(0), _at(0)), FIRST):
        launch(*tensors)
        addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        official = Launcher()
        official(7, 1, 1, stream, 1, METADATA, None, None, None, *addresses, 128, 32, True, "value")
        assert kernel.compiled[0].calls[-1:] == official.calls
    assert len(kernel.asked) == 1
    assert kernel.started == [2]


@pytest.mark.parametrize("how", OTHERS)
def test_another_case_is_compiled_for_itself(how: str, stream: int) -> None:
    kernel = Kernel()
    launch = _launch(kernel)
    launch(*FIRST)
    launch(*OTHERS[how])
    assert len(kernel.asked) == 2
    launch(*OTHERS[how])
    launch(*FIRST)
    launch(*FIRST)
    assert len(kernel.asked) == 2
    assert kernel.started == [2, 1]


def test_every_case_has_a_kernel_of_its_own(stream: int) -> None:
    kernel = Kernel()
    launch = _launch(kernel)
    for count in (1, 2):
        for tensors in (FIRST, *OTHERS.values()):
            launch(*tensors)
        assert kernel.started == [count - 1] * (1 + len(OTHERS))


def test_an_unaligned_tensor_is_not_taken_for_one_that_is_followed_by_none(stream: int) -> None:
    kernel = Kernel()
    launch = _launch(kernel)
    launch(_at(2), _at(0), None)
    launch(_at(0), None, _at(2))
    assert len(kernel.asked) == 2


def test_nothing_is_kept_of_what_compiles_nothing() -> None:
    """The interpreter returns no kernel: each call goes through it."""
    asked: list[Any] = []
    kernel = type("Interpreted", (), {"__getitem__": lambda self, grid: lambda *a, **k: asked.append(a)})()
    launch = _launch(kernel)
    launch(*FIRST)
    launch(*FIRST)
    assert len(asked) == 2


@pytest.mark.parametrize("constants", [{}, {"OVERLAP": False}, {"OVERLAP": True}])
def test_a_kernel_that_waits_starts_early(constants: dict[str, bool]) -> None:
    kernel = Kernel()
    Launch(kernel, 1, (), constants, warps=4)(*FIRST)
    assert kernel.asked[0][2].get("launch_pdl", False) is constants.get("OVERLAP", False)


def test_a_kernel_that_needs_empty_multiprocessors_does_not_start_early() -> None:
    kernel = Kernel()
    Launch(kernel, 1, (), {"OVERLAP": True}, warps=4, early=False)(*FIRST)
    assert kernel.asked[0][2]["OVERLAP"] is True  # the next one may
    assert "launch_pdl" not in kernel.asked[0][2]


def test_each_device_has_a_kernel_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the stream of the device where the tensors lie."""
    monkeypatch.setattr(launches, "current_raw_stream", lambda device: 100 + device)

    def tensor(device: int) -> Any:
        return SimpleNamespace(get_device=lambda: device, data_ptr=lambda: 64, dtype=torch.float32)

    kernel = Kernel()
    launch = _launch(kernel)
    for device in (0, 1, 0, 1):
        launch(tensor(device))
    assert kernel.started == [1, 1]
    assert [launcher.calls[0][3] for launcher in kernel.compiled] == [100, 101]


def test_the_compiler_fuses_no_product_of_its_own_accord() -> None:
    kernel = Kernel()
    _launch(kernel)(*FIRST)
    assert kernel.asked[0][2]["enable_fp_fusion"] is False


def test_a_tensor_without_memory_is_not_launched() -> None:
    freed = torch.randn(4)
    freed.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="has no memory"):
        Launch(None, 1, (), {}, 4)(torch.randn(4), freed)
