"""Which calls with sums around a norm are one kernel on the CPU, forward and backward, and that they are right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from drawn_judge import same_bits
from test_sums import channels_last, drawn, refuse
from torch import Tensor

import fusednorm
from fusednorm import dispatch
from fusednorm.backends.cpu import instances
from fusednorm.norm import norm_of
from fusednorm.operands import Operands, Sums
from fusednorm.problems import sum_forward_problem

Tensors = dict[str, Tensor]
#: Relative to the largest value of a result: s and the result are rounded, sums lose a little.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 3e-6, torch.bfloat16: 2e-2}


def given(shape: tuple[int, ...], *names: str, order: Callable[[Tensor], Tensor] = Tensor.contiguous) -> Tensors:
    """Tensors of the input's shape, in its order, and of (N, C), where C is the last dimension of three or the second
    of more."""
    small = (shape[0], shape[-1] if len(shape) == 3 else shape[1])
    shapes = {"pre_gate": small, "scale": small, "shift": small, "number": small}
    tensors = {"input": order(drawn(*shape))}
    for seed, name in enumerate(names, 1):
        one = drawn(*shapes[name], seed=seed) if name in shapes else order(drawn(*shape, seed=seed))
        tensors["pre_add" if name == "number" else name] = one
    return tensors


def called(function: str, tensors: Tensors, *arguments: Any, **keywords: Any) -> dict[str, Tensor]:
    """Results and gradients, of y and of s where there is a pre_add."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
    kept = "pre_add" in tensors
    parts = {name: leaf for name, leaf in leaves.items() if name != "input"}
    found = getattr(fusednorm, function)(leaves["input"], *arguments, **keywords, **parts, return_sum=kept)
    results = dict(zip(("output", "sum"), found, strict=True)) if kept else {"output": found}
    # Gradients that lie as the results do: another order would be copied.
    grads = [torch.empty_like(one).copy_(drawn(*one.shape, seed=9 + k)) for k, one in enumerate(results.values())]
    slopes = torch.autograd.grad(list(results.values()), list(leaves.values()), grads)
    return {name: one.detach() for name, one in results.items()} | dict(zip(leaves, slopes, strict=True))


def faults(
    monkeypatch: pytest.MonkeyPatch, function: str, tensors: Tensors, *arguments: Any, **keywords: Any
) -> list[str]:
    """What is wrong with a call that is to be fused, against the composed one in float64 of the same numbers. Calls
    have silu, so that they share kernels with one another and with other tests."""
    dtype, plans = tensors["input"].dtype, []
    wide = {name: tensor.double() for name, tensor in tensors.items()}
    widened = [one.double() if isinstance(one, Tensor) else one for one in arguments]
    with fusednorm.use_instance("reference"):
        expected = called(function, wide, *widened, **keywords)

    def noted(key: Any, problem: Any) -> Any:
        plans.append(make(key, problem))
        assert plans[0] is not None, "the forward is composed"
        return plans[-1]

    make = dispatch._sum_plan
    with monkeypatch.context() as patched:
        patched.setattr(dispatch, "_plans", {})
        patched.setattr(dispatch, "_sum_plan", noted)
        found = called(function, tensors, *arguments, **keywords)
        threads = torch.get_num_threads()
        torch.set_num_threads(3 - min(threads, 2))
        again = called(function, tensors, *arguments, **keywords)
        torch.set_num_threads(threads)
    wrong = [] if plans and plans[-1] is not None else [f"is composed: {plans}"]
    by_torch = {"pre_gate"} | ({"pre_add"} if tensors.get("pre_add", tensors["input"]).dim() == 2 else set())
    if plans[-1] is not None and plans[-1].problem.gated_backward:
        by_torch = set()
    changed = {name for name in found if not same_bits(found[name], again[name])} - by_torch
    wrong += [f"{name} depends on the number of threads" for name in changed]
    for name, right in expected.items():
        error = ((found[name].double() - right).abs().max() / right.abs().max()).item()
        if not error <= TOLERANCE[dtype]:
            wrong.append(f"{name} is off by {error:.1e}")
    return wrong


def some_tokens(tensor: Tensor) -> Tensor:
    """The same values as a part of longer sequences."""
    return torch.cat((tensor, tensor), 1)[:, : tensor.shape[1]]


@pytest.mark.parametrize("order", [Tensor.contiguous, some_tokens])
def test_rows_of_samples(order: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """adaLN: x + gate h, layer_norm, scale and shift of samples, and the sum. The gradients of gate and h are made by
    the kernel of the others."""
    for names in (
        ("post_add", "scale"), ("pre_add", "pre_gate", "scale", "shift"),
        ("pre_add", "pre_gate", "post_add", "scale", "shift"),
    ):  # fmt: skip
        tensors = given((2, 37, 40), *names, order=order)
        if "pre_gate" in names:
            monkeypatch.setattr("fusednorm.sum_gradients._behind_sum", refuse)
        assert faults(monkeypatch, "layer_norm", tensors, (40,), activation="silu") == [], names


@pytest.mark.parametrize(
    ("shape", "gate", "scale"),
    [
        ((2, 5000, 24), (2, 1, 24), None),
        ((2, 5000, 24), (24,), (2, 1, 24)),
        ((2, 5000, 24), (2, 1, 1), (2, 1, 24)),
        ((2, 40, 9, 24), (2, 40, 1, 24), (2, 1, 1, 24)),
        ((2, 40, 9, 24), (), (2, 40, 1, 24)),
        ((2, 40, 9, 24), (2, 40, 1, 1), None),
    ],
)
def test_segments_of_gated_rows(
    shape: tuple[int, ...], gate: tuple[int, ...], scale: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gates of more, as many and fewer rows than share a scale; the gradients of a gate, of pre_add, and of both."""
    monkeypatch.setattr("fusednorm.sum_gradients._behind_sum", refuse)
    tensors = {"x": drawn(*shape), "pre_add": drawn(*shape, seed=1), "pre_gate": drawn(*gate, seed=2)}
    tensors["pre_gate"] = tensors["pre_gate"].bfloat16()
    tensors["weight"] = drawn(24, seed=3)
    if scale is not None:
        tensors["scale"] = drawn(*scale, seed=4)

    def run(wanted: set[str], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        t = {name: one.to(dtype or one.dtype).requires_grad_(name in wanted) for name, one in tensors.items()}
        if dtype is None:
            y = fusednorm.rms_norm(t["x"], (24,), t["weight"], 1e-6, scale=t.get("scale"), pre_add=t["pre_add"],
                                   pre_gate=t["pre_gate"])  # fmt: skip
        else:
            total = t["x"] + t["pre_gate"] * t["pre_add"]
            y = torch.nn.functional.rms_norm(total, (24,), t["weight"], 1e-6) * (1 + t.get("scale", 0))
        names = sorted(wanted)
        found = torch.autograd.grad(y, [t[name] for name in names], drawn(*shape, seed=5).to(y.dtype))
        return dict(zip(names, found, strict=True))

    expected = run(set(tensors), torch.float64)
    for wanted in (set(tensors), {"pre_gate"}, {"pre_add", "weight"}):
        for name, found in run(wanted).items():
            limit = 2e-2 if name == "pre_gate" else 2e-5
            torch.testing.assert_close(found.double(), expected[name], rtol=limit, atol=limit * 10)
            assert found.dtype == tensors[name].dtype


def test_rows_of_two_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    """s is dense, and so is the copy of post_add that the backward reads."""
    tensors = given((2, 37, 40), "pre_add", "post_add", order=some_tokens)
    assert faults(monkeypatch, "rms_norm", tensors, (40,), activation="silu") == []


def test_positions_of_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms over the channels of channels_last are norms of rows, also with gates and a scale of samples."""
    for names in (("pre_add", "post_add"), ("pre_add", "pre_gate"), ("pre_add", "pre_gate", "scale")):
        tensors = given((2, 12, 5, 7), *names, order=channels_last)
        assert faults(monkeypatch, "layer_norm", tensors, (12,), channel_dim=1, activation="silu") == [], names
    tensors["pre_gate"] = drawn(2, 1, 5, 7)
    assert faults(monkeypatch, "layer_norm", tensors, (12,), channel_dim=1, activation="silu") == []


def test_gates_that_no_rows_share_are_composed() -> None:
    """One of every element lies channel by channel; (N, C) is a number for each channel of a sample."""
    x, r, whole, few = (*(channels_last(drawn(2, 12, 5, 7, seed=seed)) for seed in range(3)), drawn(2, 12))
    for scale in (None, drawn(2, 12, seed=4)):
        for added, gate in ((r, whole), (few, None), (few, few)):
            keywords = {"scale": scale, "channel_dim": 1, "return_sum": True}
            y, s = fusednorm.layer_norm(x, (12,), pre_add=added, pre_gate=gate, **keywords)
            spread = [one[:, :, None, None] if one is few else one for one in (added, gate)]
            total = x + spread[0] * (1 if gate is None else spread[1])
            torch.testing.assert_close(s, total)
            torch.testing.assert_close(y, fusednorm.layer_norm(total, (12,), channel_dim=1, scale=scale))


def test_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms over the channels of channels_first: numbers per channel, gates, modulation, and an s that nobody keeps."""
    for names in (("pre_add", "pre_gate", "post_add", "scale", "shift"), ("number",)):
        tensors = given((3, 12, 9, 14), *names)
        arguments = (12,), drawn(12, seed=20)
        assert faults(monkeypatch, "rms_norm", tensors, *arguments, channel_dim=1, activation="silu") == [], names
        kept = fusednorm.rms_norm(tensors["input"], *arguments, channel_dim=1, **given_parts(tensors), return_sum=True)
        alone = fusednorm.rms_norm(tensors["input"], *arguments, channel_dim=1, **given_parts(tensors))
        assert same_bits(alone, kept[0])


def given_parts(tensors: Tensors) -> Any:
    return {name: tensor for name, tensor in tensors.items() if name != "input"}


SPLIT = (3, 8, 53, 54)  # units of group_norm in 2 groups, and of batch_norm, are few enough to be split
PLANES = (3, 8, 13, 11)


SHORT, SHORTEST = (3, 8, 5, 5), (3, 96, 2, 2)  # of which tiles take many
LONG = (8, 64, 3, 3)  # whose units would be rows without the sums


@pytest.mark.parametrize(
    ("shape", "gate"), [(SPLIT, ()), (PLANES, ("pre_gate",)), (SHORT, ()), (SHORTEST, ("pre_gate",)), (LONG, ())]
)
def test_planes(shape: tuple[int, ...], gate: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Units that one thread takes, and units in pieces, with the gradient of s too."""
    for names in (("pre_add", *gate, "post_add"), ("number",)):
        tensors = given(shape, *names, "weight")
        tensors["weight"] = drawn(shape[1], seed=20)
        found = faults(monkeypatch, "group_norm", tensors, 2, activation="silu")
        found += faults(monkeypatch, "batch_norm", tensors, None, None, training=True, activation="silu")
        assert found == [], names


@pytest.mark.parametrize(
    ("function", "shape", "arguments", "order"),
    [
        ("layer_norm", (37, 40), ((40,),), Tensor.contiguous),
        ("layer_norm", (3, 12, 9, 14), ((12,),), Tensor.contiguous),
        ("group_norm", PLANES, (2,), Tensor.contiguous),
        ("group_norm", SHORT, (2,), Tensor.contiguous),
        ("group_norm", SPLIT, (2,), Tensor.contiguous),
        ("group_norm", PLANES, (2,), channels_last),
    ],
)
def test_the_output_of_relu_tells_its_derivative(
    function: str,
    shape: tuple[int, ...],
    arguments: tuple[Any, ...],
    order: Callable[[Tensor], Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows, columns, planes, tiles, pieces and slabs."""
    keywords = {"channel_dim": 1} if function == "layer_norm" and len(shape) > 2 else {}
    tensors = given(shape, "post_add", order=order)
    assert faults(monkeypatch, function, tensors, *arguments, activation="relu", **keywords) == []


def test_units_that_no_cache_holds_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instances, "KEPT_ELEMENTS", 100)
    tensors = given(PLANES, "pre_add", "post_add", "weight")
    tensors["weight"] = drawn(8, seed=20)
    assert faults(monkeypatch, "group_norm", tensors, 2, activation="silu") == []


def test_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """channels_last with the gradient of s, alone and with that of post_add."""
    for names in (("pre_add",), ("pre_add", "post_add")):
        for function, arguments in (("group_norm", (2,)), ("batch_norm", (None, None, None, None, True))):
            tensors = given(PLANES, *names, order=channels_last)
            assert faults(monkeypatch, function, tensors, *arguments, activation="silu") == [], (function, names)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("order", [Tensor.contiguous, channels_last])
@pytest.mark.parametrize("shape", [PLANES, SPLIT, SHORT, (2, 6, 30, 20), (2, 1030, 5, 6)])
def test_a_sum_that_nobody_keeps_gives_the_same_output(
    shape: tuple[int, ...], order: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    """Whether it is made twice, lies in a thread's own room or in memory: planes whole and in pieces, tiles, and slabs
    of rows of several positions, and of more channels than are summed at a time."""
    for names in (("pre_add",), ("pre_add", "pre_gate"), ("number",), ("number", "post_add")):
        tensors = {name: one.to(dtype) for name, one in given(shape, *names, order=order).items()}
        x = tensors.pop("input")
        kept, s = fusednorm.group_norm(x, 2, activation="silu", **tensors, return_sum=True)
        found = fusednorm.group_norm(x, 2, activation="silu", **tensors)
        if dtype == torch.bfloat16 or order is channels_last:
            assert torch.equal(found, kept), names
        torch.testing.assert_close(found, kept, rtol=1e-6, atol=1e-6)  # another loop may sum in another order
        before = tensors["pre_add"] if "pre_add" in names else tensors["pre_add"][:, :, None, None]
        gate = tensors["pre_gate"].float()[:, :, None, None] if "pre_gate" in tensors else 1.0
        torch.testing.assert_close(s, (x.float() + gate * before.float()).to(dtype), rtol=1e-6, atol=1e-6)
        composed = fusednorm.group_norm(
            s, 2, activation="silu", **{k: v for k, v in tensors.items() if k == "post_add"}
        )
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
        torch.testing.assert_close(kept, composed, rtol=tolerance, atol=tolerance)


def test_a_sum_of_32_bits_that_nobody_keeps_is_made_twice() -> None:
    """Not one of 16 bits, whose numbers would be rounded twice, nor in slabs one of tensors with several steps."""
    norm = norm_of("group_norm", 2)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x, wide = drawn(*SPLIT).to(dtype), drawn(3, 16, 53, 54).to(dtype)
        for instance, order in ((instances.PLANES_SPLIT, Tensor.contiguous), (instances.SLABS, channels_last)):
            for pre, apart in ((x, False), (wide, True)):
                sums = Sums(pre_add=order(pre)[:, :8])
                plan: Any = instance.plan(sum_forward_problem(norm, Operands(order(x)), sums, False))
                kept = dtype == torch.bfloat16 or (apart and order is channels_last)
                assert plan.keeps_sum == kept, (dtype, instance.name, apart)


def test_short_planes_of_batch_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """In slabs of blocks of channels, in which a number per sample and channel has no place."""
    tensors = given((16, 300, 4, 4), "pre_add", "post_add")
    assert faults(monkeypatch, "batch_norm", tensors, None, None, training=True, activation="silu") == []
    arguments = fusednorm.batch_norm, tensors["input"], None, None, None, None, True
    composed = fusednorm.explain(*arguments, pre_add=drawn(16, 300))
    assert composed.composed == "adds no number per sample and channel to blocks of channels"


@pytest.mark.parametrize("order", [Tensor.contiguous, channels_last])
def test_frozen_batch_norm(order: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """By given statistics with gradients, as detectors train."""
    statistics = drawn(8, seed=20), drawn(8, seed=21).square() + 0.5
    for names, shape in ((("pre_add", "pre_gate", "post_add"), PLANES), (("number", "post_add"), SHORT)):
        tensors = given(shape, *names, order=order)
        assert faults(monkeypatch, "batch_norm", tensors, *statistics, activation="silu") == [], names


def test_frozen_batch_norm_is_twice_differentiable() -> None:
    wide = [drawn(8, seed=20).double(), drawn(8, seed=21).square().double() + 0.5]
    x, p, r = (drawn(2, 8, 2, 2, seed=seed).double().requires_grad_() for seed in range(3))

    def run(x: Tensor, p: Tensor, r: Tensor) -> Any:
        return fusednorm.batch_norm(x, *wide, activation="silu", pre_add=r, post_add=p)

    assert torch.autograd.gradgradcheck(run, (x, p, r))
