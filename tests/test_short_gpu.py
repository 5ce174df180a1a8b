"""The short forms of plans on a GPU: calls that repeat give the bits of first ones, and make the launches of a tape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton")

import torch
from torch import Tensor, nn

import fusednorm
from fusednorm import repeats, sum_repeats

if torch.cuda.is_available():  # its modules need a driver
    from fusednorm.backends.triton import tape

pytestmark = pytest.mark.gpu

#: The module, the input's shape, its dtype, and whether it is channels_last.
CALLS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], torch.dtype, bool]] = {
    "layer_norm": (lambda: fusednorm.nn.LayerNorm(256), (8, 64, 256), torch.bfloat16, False),
    "rows of odd lengths": (lambda: fusednorm.nn.LayerNorm(255), (8, 63, 255), torch.float16, False),
    "few long rows": (lambda: fusednorm.nn.RMSNorm(24576), (100, 24576), torch.bfloat16, False),
    "long rows": (lambda: fusednorm.nn.RMSNorm(12288), (2000, 12288), torch.bfloat16, False),
    "double rows": (lambda: fusednorm.nn.LayerNorm(52, activation="gelu"), (30, 52), torch.float64, False),
    "group_norm": (lambda: fusednorm.nn.GroupNorm(32, 64, activation="silu"), (8, 64, 14, 14), torch.bfloat16, False),
    "channels_last": (lambda: fusednorm.nn.GroupNorm(32, 64), (8, 64, 14, 14), torch.bfloat16, True),
    "on the chip": (lambda: fusednorm.nn.GroupNorm(32, 320), (4, 320, 128, 128), torch.bfloat16, False),
    "slabs": (lambda: fusednorm.nn.GroupNorm(32, 512), (4, 512, 128, 128), torch.bfloat16, True),
    "instance_norm": (lambda: fusednorm.nn.InstanceNorm2d(64, affine=True), (8, 64, 33, 31), torch.float32, False),
    "batch_norm": (lambda: fusednorm.nn.BatchNorm2d(64, activation="relu"), (8, 64, 14, 14), torch.bfloat16, False),
    "large batch_norm": (lambda: fusednorm.nn.BatchNorm2d(64), (8, 64, 56, 56), torch.bfloat16, True),
    "cumulative batch_norm": (lambda: fusednorm.nn.BatchNorm2d(64, momentum=None), (8, 64, 9, 9), torch.float32, False),
    "evaluation": (lambda: fusednorm.nn.BatchNorm2d(64).eval(), (8, 64, 14, 14), torch.bfloat16, False),
    "channels of images": (lambda: fusednorm.nn.LayerNorm2d(96), (8, 96, 56, 56), torch.bfloat16, False),
}  # fmt: skip


def _step(module: nn.Module, x: Tensor, dy: Tensor, buffers: dict[str, Tensor]) -> list[Tensor]:
    module.load_state_dict(buffers)
    x = x.detach().requires_grad_()
    y = module(x)
    gradients = torch.autograd.grad(y, (x, *module.parameters()), dy)
    moved = [value.clone() for value in module.state_dict().values()]
    with torch.no_grad():
        return [y.detach(), module(x), *gradients, *moved, *module.state_dict().values()]


def _counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many replays there were."""
    replays, replay = [0], tape.Replay.__call__

    def counted(self: Any, *arguments: Any) -> None:
        replays[0] += 1
        replay(self, *arguments)

    monkeypatch.setattr(tape.Replay, "__call__", counted)
    return replays


def _data(shape: tuple[int, ...], dtype: torch.dtype, last: bool, offset: int) -> Tensor:
    flat = torch.randn(torch.Size(shape).numel() + offset, device="cuda", dtype=dtype)[offset:]
    if last:  # dense, and not at 16 bytes where there is an offset
        n, c, h, w = shape
        return flat.view(n, h, w, c).permute(0, 3, 1, 2)
    return flat.view(shape)


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_repeats_gives_the_bits_of_a_first_one(
    name: str, offset: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, shape, dtype, last = CALLS[name]
    torch.manual_seed(0)
    module = make().to("cuda", dtype)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    buffers = {key: value.clone() for key, value in module.state_dict().items()}
    monkeypatch.setattr(repeats, "_calls", {})
    replays = _counted(monkeypatch)

    for number in range(6):
        x, dy = _data(shape, dtype, last, offset), _data(shape, dtype, last, offset)
        replays[0] = 0
        got = _step(module, x, dy, buffers)
        assert replays[0] == (3 if number >= 3 and not offset else replays[0])
        known = repeats._calls.copy()
        repeats._calls.clear()
        wanted = _step(module, x, dy, buffers)
        repeats._calls.clear()
        repeats._calls.update(known)
        assert all(map(torch.equal, got, wanted))


#: The same with what is around the norm, and how many calls of three are made by a tape: a forward with a backward, and
#: one without.
SUMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], torch.dtype, bool, str, int]] = {
    "rms_norm and the sum": (
        lambda: fusednorm.nn.RMSNorm(1024), (8, 64, 1024), torch.bfloat16, False, "pre_add return_sum", 3,
    ),
    "group_norm of numbers": (
        lambda: fusednorm.nn.GroupNorm(32, 64, activation="silu"), (8, 64, 32, 32), torch.bfloat16, True, "numbers", 3,
    ),
    "many numbers": (
        lambda: fusednorm.nn.GroupNorm(32, 320, activation="silu"), (4, 320, 64, 64), torch.bfloat16, False, "numbers",
        3,
    ),
    "on the chip": (
        lambda: fusednorm.nn.GroupNorm(32, 320, activation="silu"), (4, 320, 128, 128), torch.bfloat16, False,
        "pre_add post_add return_sum", 3,
    ),
    "slabs": (
        lambda: fusednorm.nn.GroupNorm(32, 512), (4, 512, 128, 128), torch.bfloat16, True, "pre_add return_sum", 3,
    ),
    "a gate": (
        lambda: fusednorm.nn.GroupNorm(32, 64), (8, 64, 32, 32), torch.float32, False, "pre_add pre_gate", 1,
    ),
    "instance_norm": (
        lambda: fusednorm.nn.InstanceNorm2d(64, affine=True, activation="gelu"), (8, 64, 33, 31), torch.float32, False,
        "post_add", 3,
    ),
    "batch_norm": (
        lambda: fusednorm.nn.BatchNorm2d(64, activation="relu"), (8, 64, 14, 14), torch.bfloat16, True, "post_add", 3,
    ),
    "large batch_norm": (
        lambda: fusednorm.nn.BatchNorm2d(64, activation="relu"), (16, 64, 56, 56), torch.bfloat16, False, "post_add", 3,
    ),
    "cumulative batch_norm": (
        lambda: fusednorm.nn.BatchNorm2d(64, momentum=None), (8, 64, 9, 9), torch.float32, False, "post_add", 3,
    ),
    "evaluation": (
        lambda: fusednorm.nn.BatchNorm2d(64, activation="relu").eval(), (8, 64, 14, 14), torch.bfloat16, False,
        "post_add", 3,
    ),
}  # fmt: skip


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("name", SUMS)
def test_a_call_with_sums_that_repeats_gives_the_bits_of_a_first_one(
    name: str, offset: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, shape, dtype, last, names, taped = SUMS[name]
    torch.manual_seed(0)
    module = make().to("cuda", dtype)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    buffers = {key: value.clone() for key, value in module.state_dict().items()}
    monkeypatch.setattr(sum_repeats, "_calls", {})
    replays = _counted(monkeypatch)

    def data(kind: str = "") -> Tensor:
        if kind in ("numbers", "pre_gate"):
            return torch.randn(shape[:2], device="cuda", dtype=dtype)
        return _data(shape, dtype, last, offset)

    def step(x: Tensor, added: dict[str, Any], dys: list[Tensor]) -> list[Tensor]:
        module.load_state_dict(buffers)
        x, added = x.detach().requires_grad_(), {key: each.detach().requires_grad_() for key, each in added.items()}
        keywords = {**added, "return_sum": True} if "return_sum" in names else added
        found = module(x, **keywords)
        ys = found if isinstance(found, tuple) else (found,)
        gradients = torch.autograd.grad(ys, (x, *added.values(), *module.parameters()), dys[: len(ys)])
        moved = [value.clone() for value in module.state_dict().values()]
        with torch.no_grad():
            found = module(x, **keywords)
        plain = found if isinstance(found, tuple) else (found,)
        return [*(y.detach() for y in ys), *plain, *gradients, *moved, *module.state_dict().values()]

    for number in range(6):
        x, dys = data(), [data(), data()]
        added = {key.replace("numbers", "pre_add"): data(key) for key in names.split() if key != "return_sum"}
        replays[0] = 0
        got = step(x, added, dys)
        assert replays[0] == (taped if number >= 4 and not offset else replays[0])
        known = sum_repeats._calls.copy()
        sum_repeats._calls.clear()
        wanted = step(x, added, dys)
        sum_repeats._calls.clear()
        sum_repeats._calls.update(known)
        assert all(map(torch.equal, got, wanted))


def test_a_replay_takes_part_in_a_cuda_graph() -> None:
    module = fusednorm.nn.BatchNorm2d(64, activation="relu", device="cuda")
    x, dy = torch.randn(8, 64, 9, 9, device="cuda", requires_grad=True), torch.randn(8, 64, 9, 9, device="cuda")

    def step() -> list[Tensor]:
        y = module(x)
        gradients = torch.autograd.grad(y, (x, *module.parameters()), dy)
        return [y.detach(), *gradients]  # no graph outlives its step, whose stream another step would meet

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(5):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    counted = module.num_batches_tracked.item()
    for _ in range(3):
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
        graph.replay()
        before = [each.clone() for each in results]
        assert all(map(torch.equal, before, step()))
    assert module.num_batches_tracked.item() == counted + 6


def test_a_backward_in_another_thread_and_stream_repeats() -> None:
    module, stream = fusednorm.nn.LayerNorm(256, device="cuda"), torch.cuda.Stream()
    x = torch.randn(64, 256, device="cuda", requires_grad=True)
    wanted: list[Tensor] = []
    for _ in range(6):
        with torch.cuda.stream(stream):
            (module(x) ** 2).sum().backward()
        torch.cuda.synchronize()
        found = [x.grad, *(parameter.grad for parameter in module.parameters())]
        wanted = wanted or [each.clone() for each in found if each is not None]
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True) if a is not None)
        x.grad = None
        module.zero_grad()
