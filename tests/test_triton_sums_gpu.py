"""Sums around norms in Triton's kernels on a GPU: which calls are fused, numerics against fp64, determinism."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_sums import Case, case, channels_last, normalize
from torch import Tensor

import fusednorm
from fusednorm import dispatch

pytestmark = pytest.mark.gpu


class FusedCase(Case):
    """Nothing but s is rounded on the way."""

    fused = True


def plans_made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The classes of the plans of sums that are made from now on."""
    made: list[str] = []
    kept = dispatch._sum_plan

    def noted(key: Any, problem: Any) -> Any:
        plan = kept(key, problem)
        made.append(type(plan).__name__)
        return plan

    monkeypatch.setattr(dispatch, "_plans", {})
    monkeypatch.setattr(dispatch, "_sum_plan", noted)
    return made


SUMS = (("pre_add",), ("pre_add", "pre_gate"), ("pre_add", "scalar_gate", "post_add"), ("post_add",))


@pytest.mark.parametrize("names", SUMS, ids="+".join)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("form", "shape"),
    [
        ("rms_norm", (4096, 4096)),
        ("layer_norm", (8, 512, 768)),
        ("layer_norm", (3000, 64)),
        ("layer_norm", (1200, 1439)),
        ("rms_norm", (600, 8192)),
        ("layer_norm", (400, 12000)),
    ],
)
def test_sums_around_rows(
    form: str, shape: tuple[int, ...], dtype: torch.dtype, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = case(form, shape, dtype, *names, activation="silu" if "post_add" in names else None)
    tensors = {name: tensor.cuda() for name, tensor in one.tensors.items()}
    one = replace(one, tensors=tensors, fused_backward=shape[-1] <= 8192 or "post_add" not in names)
    made = plans_made(monkeypatch)
    assert one.faults(one.run()) == []
    assert made[0] == "WholeSumForward"
    if shape[-1] <= 8192:
        gated = "scalar_gate" in names or ("pre_gate" in names and len(shape) > 2)  # not a gate to each row
        made = [name for name in made if name != "NoneType"]
        assert made[1:] in ([["RowsGatedBackward"]] if gated else [["RowsSumBackward"], ["HeldSumBackward"]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(2, 4096, 1152), (4, 300, 3072), (2, 8, 256, 768)])
def test_sums_around_modulated_rows(
    shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """adaLN's chain: s = x + gate h, layer_norm, scale and shift."""
    per_sample = (shape[0], *(1,) * (len(shape) - 2), shape[-1])
    sizes = {"x": shape, "h": shape, "gate": per_sample, "scale": per_sample, "shift": per_sample}
    t = {name: torch.randn(size, device="cuda").to(dtype).requires_grad_() for name, size in sizes.items()}
    dy, ds = (torch.randn(shape, device="cuda").to(dtype) for _ in range(2))

    def plain(t: dict[str, Tensor], rounded: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        s = rounded(t["x"] + t["gate"] * t["h"])
        z = torch.nn.functional.layer_norm(s, shape[-1:], eps=1e-6)
        return z * (1 + t["scale"]) + t["shift"], s

    made = plans_made(monkeypatch)
    outputs = fusednorm.layer_norm(
        t["x"], shape[-1:], eps=1e-6, scale=t["scale"], shift=t["shift"], pre_add=t["h"], pre_gate=t["gate"],
        return_sum=True,
    )  # fmt: skip
    found = [*outputs, *torch.autograd.grad(outputs, list(t.values()), [dy, ds])]
    assert made == ["WholeSumForward", "RowsGatedBackward"]
    wide = {name: one.detach().double().requires_grad_() for name, one in t.items()}
    right = plain(wide, lambda s: s + (s.to(dtype) - s).detach())
    expected = [*right, *torch.autograd.grad(right, list(wide.values()), [dy.double(), ds.double()])]
    torchs = plain(t, lambda s: s)
    theirs = [*torchs, *torch.autograd.grad(torchs, list(t.values()), [dy, ds])]
    for name, one, other, value in zip(["y", "s", *t], found, theirs, expected, strict=True):
        ours, plain_error = ((each.double() - value).square().mean().sqrt() for each in (one, other))
        floor = torch.finfo(dtype).eps * value.square().mean().sqrt() / 2
        assert ours <= 1.5 * plain_error + floor, name


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("form", "shape"),
    [
        ("batch_norm", (32, 64, 56, 56)),
        ("batch_norm", (64, 256, 14, 14)),
        ("batch_norm", (16, 512, 7, 7)),
        ("batch_norm", (128, 192, 7, 7)),
        ("group_norm", (4, 96, 64, 64)),
        ("group_norm", (8, 96, 51, 51)),
        ("group_norm", (16, 192, 8, 8)),
        ("instance_norm", (4, 33, 50, 51)),
    ],
)
def test_post_add_of_images(
    form: str, shape: tuple[int, ...], dtype: torch.dtype, last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = channels_last if last else Tensor.contiguous
    one = case(form, shape, dtype, "post_add", activation="relu", order=order)
    tensors = {name: tensor.cuda() for name, tensor in one.tensors.items()}
    one = replace(one, tensors={**tensors, "post_add": order(tensors["post_add"])})
    made = plans_made(monkeypatch)
    assert one.faults(one.run()) == []
    forwards = ("TilesSumForward", "HeldSumForward", "WholeSumForward")
    assert len(made) == 2
    assert made[0] in forwards
    assert made[1] in ("TilesSumBackward", "HeldSumBackward", "ResidentSumBackward")


@pytest.mark.parametrize("form", ["batch_norm", "group_norm", "instance_norm"])
def test_pre_add_of_small_images(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for order in (channels_last, Tensor.contiguous):
        one = case(form, (8, 96, 8, 8), torch.bfloat16, "pre_add", "post_add", activation="silu", order=order)
        tensors = {name: tensor.cuda() for name, tensor in one.tensors.items()}
        for name in ("pre_add", "post_add"):
            tensors[name] = order(tensors[name])
        one = replace(one, tensors=tensors)
        made = plans_made(monkeypatch)
        assert one.faults(one.run()) == []
        assert made[0] in ("HeldSumForward", "WholeSumForward")


def around_images(
    form: str, shape: tuple[int, ...], dtype: torch.dtype, order: Callable[[Tensor], Tensor], names: tuple[str, ...]
) -> FusedCase:
    """A case on the GPU whose sums of the input's shape have its memory order."""
    one = case(form, shape, dtype, *names, activation="silu", order=order)
    tensors = {name: tensor.cuda() for name, tensor in one.tensors.items()}
    around = {name: order(tensors[name]) for name in ("pre_add", "post_add", "grad_sum") if name in tensors}
    return FusedCase(form, one.activation, {**tensors, **around})


def without_gradients(one: Case) -> Tensor:
    """The output of a call that keeps no s."""
    around = {name: one.tensors[name] for name in ("pre_add", "pre_gate", "post_add") if name in one.tensors}
    with torch.no_grad():
        y: Tensor = normalize(
            one.form, one.x, one.tensors["weight"], one.tensors["bias"], activation=one.activation, **around
        )
    return y


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("names", [("pre_add",), ("pre_add", "pre_gate", "post_add"), ("small_add", "post_add")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("form", "shape"),
    [
        ("group_norm", (4, 96, 128, 128)),
        ("group_norm", (8, 96, 51, 51)),
        ("instance_norm", (2, 33, 250, 251)),
        ("batch_norm", (32, 64, 56, 56)),
    ],
)
def test_pre_add_of_large_images(
    form: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    names: tuple[str, ...],
    last: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pass for the moments stores s, and the pass for the output waits for it; without gradients both make it."""
    one = around_images(form, shape, dtype, channels_last if last else Tensor.contiguous, names)
    made = plans_made(monkeypatch)
    found = one.run()
    assert one.faults(found) == []
    forward, backward = (name for name in made if name != "NoneType")
    assert forward == "TilesSumForward"
    assert backward in ("TilesSumBackward", "ResidentSumBackward")
    for _ in range(10):
        assert torch.equal(one.run()["output"], found["output"])
        assert torch.equal(without_gradients(one), found["output"])


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("names", [("small_add",), ("small_add", "post_add")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("form", "shape"),
    [
        ("group_norm", (4, 96, 128, 128)),
        ("group_norm", (8, 96, 51, 51)),
        ("group_norm", (24, 96, 160, 160)),  # by hopper.resident, where there is one
        ("instance_norm", (2, 33, 250, 251)),
    ],
)
def test_gradients_of_numbers(
    form: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    names: tuple[str, ...],
    last: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The backward makes the gradient of a pre_add (N, C), with the same bits every time."""
    one = around_images(form, shape, dtype, channels_last if last else Tensor.contiguous, names)
    one = replace(one, returns_sum=False)
    made = plans_made(monkeypatch)
    found = one.run()
    assert one.faults(found) == []
    kinds = [name for name in made if name != "NoneType"]
    assert len(kinds) == 2
    assert kinds[1] in ("TilesSumBackward", "ResidentSumBackward")
    assert torch.equal(one.run()["grad_pre_add"], found["grad_pre_add"])


@pytest.mark.parametrize("names", [("pre_add",), ("small_add", "pre_gate", "post_add")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(8, 96, 56, 56), (2, 2048, 9, 9)])
def test_sums_around_norms_over_channels(
    shape: tuple[int, ...], dtype: torch.dtype, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = around_images("layer_norm over channels", shape, dtype, Tensor.contiguous, names)
    made = plans_made(monkeypatch)
    found = one.run()
    assert one.faults(found) == []
    assert [name for name in made if name != "NoneType"] == ["ColumnsSumForward", "ColumnsSumBackward"]
    assert torch.equal(without_gradients(one), found["output"])


@pytest.mark.parametrize("last", [False, True])
def test_post_add_of_an_evaluation(last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = torch.channels_last if last else torch.contiguous_format
    x, p = (torch.randn(16, 64, 56, 56, device="cuda").bfloat16().to(memory_format=memory) for _ in range(2))
    mean, var = torch.randn(64, device="cuda"), torch.rand(64, device="cuda") + 0.5
    made = plans_made(monkeypatch)
    found = fusednorm.batch_norm(x, mean, var, activation="relu", post_add=p)
    z = torch.nn.functional.batch_norm(x.double(), mean.double(), var.double())
    torch.testing.assert_close(found, torch.relu(z + p).bfloat16(), rtol=1e-2, atol=1e-2)
    assert made == ["TilesSumForward"]


def test_sums_by_the_same_bits() -> None:
    one = case("layer_norm", (4, 1024, 768), torch.bfloat16, "pre_add", "pre_gate", "post_add", activation="silu")
    one = replace(one, tensors={name: tensor.cuda() for name, tensor in one.tensors.items()})
    first = one.run()
    for _ in range(20):
        again = one.run()
        assert all(torch.equal(first[name], again[name]) for name in first)
