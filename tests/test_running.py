"""Running statistics: the kernel that moves them, where it may run, and what torch's operators do elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from interpreter_support import interpreted
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fusednorm
from fusednorm import choice, running
from fusednorm.choice import moving
from fusednorm.instance import CompilationError

MOVED = """
import json, torch
from fusednorm.backends.triton.plans.running import MoveRunning
generator = torch.Generator().manual_seed(5)
normal = lambda channels: torch.randn(channels, generator=generator, dtype=torch.float64)
move, found = MoveRunning(), []
for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
    for channels in (1, 7, 300, 512):
        for share in (0.1, 0.9, 1.0, torch.tensor(0.25)):
            compute = torch.promote_types(dtype, torch.float32)
            mean, var = normal(channels).to(compute), normal(channels).abs().to(compute)
            # The last element is none of the buffers'.
            buffers = [normal(channels + 1).to(dtype) for _ in range(2)]
            counter = torch.tensor(41)
            statistics = mean.double(), var.double() * 1.5
            wanted, sizes = [], []
            for buffer, statistic in zip(buffers, statistics):
                moved = buffer.to(torch.float64, copy=True)
                sizes.append(moved[:channels].abs() + statistic.abs())
                moved[:channels] += float(share) * (statistic - moved[:channels])
                wanted.append(moved)
            move(buffers[0][:channels], buffers[1][:channels], mean, var, 1.5, share, counter)
            move(torch.zeros(channels), torch.zeros(channels), mean, var, 1.5, share, None)
            differences = [(b.double() - w)[:channels].abs() for b, w in zip(buffers, wanted)]
            errors = [(each / size).max().item() for each, size in zip(differences, sizes)]
            kept = all(b[-1] == w[-1] for b, w in zip(buffers, wanted))
            arrives = float(share) == 1 and dtype.itemsize > 2
            exact = not arrives or all(torch.equal(b[:-1], s.to(dtype)) for b, s in zip(buffers, statistics))
            limit = torch.finfo(dtype).eps * (2 if dtype is torch.float64 else 1)  # what is wanted is rounded too
            found.append((max(errors) / limit, counter.item(), kept, exact))
print(json.dumps(found))
"""


def test_moves_by_the_share_and_rounds_once() -> None:
    found = interpreted(MOVED)
    assert len(found) == 4 * 4 * 4
    for error, counter, kept, exact in found:
        assert error <= 1.0
        assert counter == 42
        assert kept
        assert exact  # a share of 1 gives the statistic


class Modes(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class Dispatches(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The calls of a kernel that does nothing."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(running, "moving", lambda device, dtype: lambda *arguments: calls.append(arguments))
    return calls


def _statistics() -> dict[str, Tensor]:
    return {name: torch.rand(8) for name in ("running_mean", "running_var", "mean", "var")}


def _update(momentum: float | Tensor = 0.1, **changed: Tensor) -> dict[str, Tensor]:
    tensors = {**_statistics(), "counter": torch.tensor(3), **changed}
    running.update_running(**tensors, elements=10, momentum=momentum)  # type: ignore[arg-type]
    return tensors


@pytest.mark.parametrize("momentum", [0.1, torch.tensor(0.1)])
def test_a_kernel_moves_plain_tensors(moves: list[Any], momentum: float | Tensor) -> None:
    tensors = _update(momentum)
    ((mean, var, *_, factor, share, counter),) = moves
    assert (mean, var, counter) == (tensors["running_mean"], tensors["running_var"], tensors["counter"])
    assert factor == 10 / 9
    assert share is momentum


def test_autograd_sees_what_a_kernel_wrote(moves: list[Any]) -> None:
    tensors = _update()
    assert [tensors[name]._version for name in ("running_mean", "running_var", "counter")] == [1, 1, 1]


def _inference() -> Tensor:
    with torch.inference_mode():
        return torch.rand(8)


SHUT: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[], AbstractContextManager[Any]]]] = {
    "function mode": (dict, Modes),
    "dispatch mode": (dict, Dispatches),
    "strided": (lambda: {"running_var": torch.rand(16)[::2]}, nullcontext),
    "strided statistics": (lambda: {"mean": torch.rand(16)[::2]}, nullcontext),
    "a strided variance": (lambda: {"var": torch.rand(16)[::2]}, nullcontext),
    "lazily negated": (lambda: {"running_mean": torch.zeros(8, dtype=torch.complex64).conj().imag}, nullcontext),
    "inference": (lambda: {"running_mean": _inference()}, torch.inference_mode),
    "requires grad": (lambda: {"running_mean": torch.rand(8, requires_grad=True)}, torch.no_grad),
    "a counter of floats": (lambda: {"counter": torch.tensor(3.0)}, nullcontext),
    "a share of integers": (lambda: {"momentum": torch.tensor(1)}, nullcontext),
}


@pytest.mark.parametrize("name", SHUT)
def test_operators_move_others(moves: list[Any], name: str) -> None:
    changed, mode = SHUT[name]
    with mode():
        tensors = {**_statistics(), "counter": torch.tensor(3), "momentum": 0.25, **changed()}
        before = {key: each.detach().clone() for key, each in tensors.items() if isinstance(each, Tensor)}
        running.update_running(**tensors, elements=10)
    assert moves == []
    share = float(tensors["momentum"])
    for key, statistic in (("running_mean", before["mean"]), ("running_var", before["var"] * (10 / 9))):
        wanted = before[key] + share * (statistic - before[key])
        torch.testing.assert_close(tensors[key].detach(), wanted)
    assert tensors["counter"].item() == 4


@pytest.mark.parametrize("share", [0.1, torch.tensor(0.1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_operators_round_once(dtype: torch.dtype, share: float | Tensor) -> None:
    buffer, statistic = torch.rand(300).to(dtype), torch.rand(300)
    wanted = torch.lerp(buffer.float(), statistic, share).to(dtype)
    running.move_running(buffer, statistic, share)
    assert torch.equal(buffer, wanted)


def test_one_buffer_for_both_moves_twice(moves: list[Any]) -> None:
    both, mean, var = torch.zeros(8), torch.ones(8), torch.full((8,), 9.0)
    running.update_running(both, both, mean, var, 10, 0.5)
    assert moves == []
    torch.testing.assert_close(both, torch.full((8,), 5.25))


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 1.0, torch.tensor(0.25)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_kernel_of_a_cpu_moves_by_the_share_and_rounds_once(dtype: torch.dtype, share: float | Tensor) -> None:
    for compute in (torch.float32, torch.float64):
        move = moving("cpu", compute)
        assert move is not None
        for channels in (1, 7, 300):
            mean, var = torch.randn(channels, dtype=compute), torch.rand(channels, dtype=compute)
            buffers = [torch.randn(channels + 1).to(dtype) for _ in range(2)]  # the last element is none of theirs
            before, counter = [buffer.double().clone() for buffer in buffers], torch.tensor(41)
            move(buffers[0][:channels], buffers[1][:channels], mean, var, 1.5, share, counter)
            move(torch.zeros(channels), torch.zeros(channels), mean, var, 1.5, share, None)
            for old, new, statistic in zip(before, buffers, (mean.double(), 1.5 * var.double()), strict=True):
                wanted = old[:channels] + float(share) * (statistic - old[:channels])
                size = old[:channels].abs() + statistic.abs()
                assert ((new[:channels].double() - wanted).abs() <= torch.finfo(dtype).eps * size).all()
                assert new[-1] == old[-1]
                if share == 1.0 and dtype.itemsize > 2:
                    assert torch.equal(new[:channels], statistic.to(dtype))
            assert counter.item() == 42


def test_which_instance_is_asked_for_says_what_moves_on_a_cpu() -> None:
    assert moving("cpu", torch.float32) is not None
    assert moving("meta", torch.float32) is None
    with fusednorm.use_instance("cpu.planes"):
        assert moving("cpu", torch.float32) is not None
    with fusednorm.use_instance("reference"):
        assert moving("cpu", torch.float32) is None


def test_without_the_kernel_operators_move(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(kernel: Any) -> int:
        raise CompilationError("as if Numba were broken")

    monkeypatch.setattr("fusednorm.backends.cpu.plans.running.load", fail)
    choice._move_running_on_cpu.cache_clear()
    try:
        tensors = _update()
        assert tensors["counter"].item() == 4
        assert moving("cpu", torch.float32) is None
    finally:
        choice._move_running_on_cpu.cache_clear()


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_module_that_repeats_moves_as_torchs_does(dtype: torch.dtype, momentum: float | None) -> None:
    ours = fusednorm.nn.BatchNorm1d(7, momentum=momentum).to(dtype)
    theirs = torch.nn.BatchNorm1d(7, momentum=momentum).double()
    for _ in range(6):
        x = (3 * torch.randn(9, 7) + 2).to(dtype)
        versions = ours.running_mean._version, ours.running_var._version
        ours(x.requires_grad_())
        theirs(x.detach().double())
        assert ours.running_mean._version > versions[0]
        assert ours.running_var._version > versions[1]
        assert ours.num_batches_tracked == theirs.num_batches_tracked
        for name in ("running_mean", "running_var"):
            wanted = getattr(theirs, name)
            close = {"rtol": 1e-5, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 4e-2, "atol": 4e-2}
            torch.testing.assert_close(getattr(ours, name).double(), wanted, **close)
