"""Gradients: against finite differences, twice, of any strides, of parts, and under torch's transforms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._vmap_internals import _vmap
from torch.autograd import forward_ad
from torch.autograd.functional import hessian, jacobian
from torch.utils.checkpoint import checkpoint

import fusednorm
from fusednorm import gate, ops
from fusednorm.norm import FAMILIES
from fusednorm.operands import BackwardOperands, Operands

SHAPE = (2, 4, 3, 2)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def double(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def case(family: str, modulated: bool = True) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """A call of a family with silu as a function of its tensors, and float64 tensors for it."""
    extra: dict[str, Any] = {"activation": "silu", "eps": 1e-3}
    modulation = [double(2, 4), double(2, 4)] if modulated else []

    def fused(tensors: tuple[Tensor, ...]) -> dict[str, Any]:
        return {**extra, "scale": tensors[0], "shift": tensors[1]} if tensors else extra

    if family == "group_norm":
        return (lambda x, w, b, *m: fusednorm.group_norm(x, 2, w, b, **fused(m))), [
            double(*SHAPE), double(4), double(4), *modulation]  # fmt: skip
    if family == "instance_norm":
        return (lambda x, w, b, *m: fusednorm.instance_norm(x, weight=w, bias=b, **fused(m))), [
            double(*SHAPE), double(4), double(4), *modulation]  # fmt: skip
    if family == "batch_norm":
        return (lambda x, w, b, *m: fusednorm.batch_norm(x, None, None, w, b, True, **fused(m))), [
            double(*SHAPE), double(4), double(4), *modulation]  # fmt: skip
    if family == "layer_norm":
        return (lambda x, w, b: fusednorm.layer_norm(x, (3, 2), w, b, **extra)), [
            double(*SHAPE), double(3, 2), double(3, 2)]  # fmt: skip
    return (lambda x, w: fusednorm.rms_norm(x, (3, 2), w, **extra)), [double(*SHAPE), double(3, 2)]


@pytest.mark.parametrize("family", FAMILIES)
def test_gradcheck(family: str) -> None:
    assert torch.autograd.gradcheck(*case(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_gradgradcheck(family: str) -> None:
    assert torch.autograd.gradgradcheck(*case(family, modulated=family == "group_norm"))


def test_gradgradcheck_of_channel_dim_and_of_inference() -> None:
    x, weight, bias = double(2, 3, 4), double(4), double(4)
    assert torch.autograd.gradgradcheck(
        lambda *t: fusednorm.group_norm(t[0], 2, *t[1:], activation="gelu", channel_dim=-1), (x, weight, bias)
    )
    mean, var = torch.randn(4, dtype=torch.float64), torch.rand(4, dtype=torch.float64) + 0.5
    assert torch.autograd.gradgradcheck(
        lambda *t: fusednorm.batch_norm(t[0], mean, var, *t[1:], activation="tanh"), (double(2, 4, 3), weight, bias)
    )


def test_the_backward_op_differentiates_in_its_mean_and_rstd() -> None:
    x, weight, bias, dy = double(2, 4, 3), double(4), double(4), double(2, 4, 3)
    mean, rstd = double(2, 2), (torch.rand(2, 2, dtype=torch.float64) + 0.5).requires_grad_()

    def backward(*tensors: Tensor) -> tuple[Tensor, ...]:
        dy, x, mean, rstd, weight, bias = tensors
        return ops.group_norm_backward(dy, x, mean, rstd, 2, weight, bias, activation="silu")  # type: ignore[return-value]

    tensors = dy, x, mean, rstd, weight, bias
    assert torch.autograd.gradcheck(backward, tensors)
    for place in range(len(tensors)):  # of each alone, the others being constants
        alone = tuple(each if place == index else each.detach() for index, each in enumerate(tensors))
        assert torch.autograd.gradcheck(backward, alone)


def test_a_gradient_penalty_is_torchs() -> None:
    x, weight, bias = torch.randn(2, 8, 5, requires_grad=True), torch.randn(8, requires_grad=True), torch.randn(8)

    def penalty(norm: Callable[[], Tensor]) -> tuple[Tensor, ...]:
        (gradient,) = torch.autograd.grad(norm().square().sum(), x, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), (x, weight))

    ours = penalty(lambda: fusednorm.group_norm(x, 4, weight, bias, activation="silu"))
    theirs = penalty(lambda: F.silu(F.group_norm(x, 4, weight, bias)))
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-2)


# Gradients of shape (2, 8, 4, 6) that do not have the output's strides.
GRADIENTS: dict[str, Callable[[], Tensor]] = {
    "expanded from one": lambda: torch.randn(()).expand(2, 8, 4, 6),
    "expanded channels": lambda: torch.randn(2, 1, 4, 6).expand(-1, 8, -1, -1),
    "expanded positions": lambda: torch.randn(2, 8, 1, 1).expand(-1, -1, 4, 6),
    "permuted": lambda: torch.randn(6, 4, 8, 2).permute(3, 2, 1, 0),
    "channels_last": lambda: torch.randn(2, 8, 4, 6).to(memory_format=torch.channels_last),
    "contiguous": lambda: torch.randn(2, 8, 4, 6),
    "sliced": lambda: torch.randn(2, 16, 4, 12)[:, ::2, :, ::2],
    "offset": lambda: torch.randn(3, 8, 4, 6)[1:],
    "negated": lambda: torch._neg_view(torch.randn(2, 8, 4, 6)),
}


@pytest.mark.parametrize("last", [False, True], ids=["x contiguous", "x channels_last"])
@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("family", ["group_norm", "batch_norm"])
def test_a_gradient_of_any_strides(family: str, name: str, last: bool) -> None:
    x, dy = torch.randn(2, 8, 4, 6), GRADIENTS[name]()
    if last:
        x = x.to(memory_format=torch.channels_last)
    weight, bias = torch.randn(8, requires_grad=True), torch.randn(8, requires_grad=True)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    if family == "group_norm":
        output = fusednorm.group_norm(ours, 4, weight, bias, activation="silu")
        expected = F.silu(F.group_norm(theirs, 4, weight, bias))
    else:
        output = fusednorm.batch_norm(ours, None, None, weight, bias, True, activation="silu")
        expected = F.silu(F.batch_norm(theirs, None, None, weight, bias, True))
    got = torch.autograd.grad(output, (ours, weight, bias), dy)
    wanted = torch.autograd.grad(expected, (theirs, weight, bias), dy.clone().resolve_neg())
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_a_gradient_of_any_strides_for_layer_norm() -> None:
    for name, make in GRADIENTS.items():
        x, weight = torch.randn(2, 8, 4, 6, requires_grad=True), torch.randn(6, requires_grad=True)
        dy = make()
        got = torch.autograd.grad(fusednorm.layer_norm(x, (6,), weight), (x, weight), dy)
        wanted = torch.autograd.grad(F.layer_norm(x, (6,), weight), (x, weight), dy.clone())
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


def test_sum_backward() -> None:
    x = torch.randn(2, 8, 4, requires_grad=True)
    fusednorm.group_norm(x, 4, activation="silu").sum().backward()
    (expected,) = torch.autograd.grad(F.silu(F.group_norm(x, 4)).sum(), x)
    torch.testing.assert_close(x.grad, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("wanted", range(5))
def test_only_what_is_needed_is_asked_of_the_backend(wanted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from fusednorm import dispatch

    masks: list[tuple[bool, ...]] = []
    run_backward = dispatch.backward

    def spy(*arguments: Any) -> Any:
        masks.append(tuple(arguments[-1]))
        return run_backward(*arguments)

    monkeypatch.setattr(dispatch, "backward", spy)
    call, tensors = case("group_norm")
    leaves = [tensor.detach() for tensor in tensors]
    leaves[wanted].requires_grad_()
    (gradient,) = torch.autograd.grad(call(*leaves).sum(), leaves[wanted])
    assert masks == [tuple(index == wanted for index in range(5))]
    torch.testing.assert_close(gradient, torch.autograd.grad(call(*tensors).sum(), tensors[wanted])[0])


def test_the_saved_statistics_carry_no_gradient() -> None:
    x = torch.randn(2, 8, 4, requires_grad=True)
    output, mean, rstd = ops.group_norm_forward(x, 4, None, None, 1e-5)
    assert output.requires_grad
    assert not mean.requires_grad
    assert not rstd.requires_grad


def test_no_grad_and_inference_mode_build_no_graph() -> None:
    x = torch.randn(2, 8, 4, requires_grad=True)
    expected = fusednorm.group_norm(x, 4)
    with torch.no_grad():
        output = fusednorm.group_norm(x, 4)
    assert output.grad_fn is None
    assert torch.equal(output, expected)
    with torch.inference_mode():
        output = fusednorm.group_norm(x.clone(), 4)
    assert output.is_inference()
    assert torch.equal(output, expected.detach())


def test_an_input_changed_after_the_forward_is_an_error() -> None:
    x = torch.randn(2, 8, 4)
    weight = torch.randn(8, requires_grad=True)
    output = fusednorm.group_norm(x, 4, weight)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_a_checkpointed_call() -> None:
    x, weight = torch.randn(2, 8, 4, requires_grad=True), torch.randn(8, requires_grad=True)
    call = lambda x: fusednorm.group_norm(x, 4, weight, activation="silu")  # noqa: E731
    got = torch.autograd.grad(checkpoint(call, x, use_reentrant=False).square().sum(), (x, weight))
    assert all(map(torch.equal, got, torch.autograd.grad(call(x).square().sum(), (x, weight))))


@pytest.mark.parametrize("family", FAMILIES)
def test_transforms_of_torch_func(family: str) -> None:
    call, tensors = case(family, modulated=False)
    x, *parameters = (tensor.detach() for tensor in tensors)
    loss = lambda x: call(x, *parameters).square().sum()  # noqa: E731
    y = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(y), y)
    torch.testing.assert_close(torch.func.grad(loss)(x), expected)
    batch = torch.stack([x, 2 * x + 1])
    one_by_one = torch.stack([call(each, *parameters) for each in batch])
    torch.testing.assert_close(torch.vmap(lambda x: call(x, *parameters))(batch), one_by_one)
    tangent = torch.randn_like(x)
    _, product = torch.func.jvp(loss, (x,), (tangent,))
    torch.testing.assert_close(product, (expected * tangent).sum())


def test_forward_mode() -> None:
    call, tensors = case("group_norm")
    x, *parameters = (tensor.detach() for tensor in tensors)
    tangent = torch.randn_like(x)
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(call(forward_ad.make_dual(x, tangent), *parameters))
    _, expected = torch.func.jvp(lambda x: call(x, *parameters), (x,), (tangent,))
    assert dual.tangent is not None
    torch.testing.assert_close(dual.tangent, expected)


def test_lazily_negated_tensors() -> None:
    x = torch._neg_view(torch.randn(2, 8, 4))  # as torch.conj(c).imag is, but dense
    assert x.is_neg()
    torch.testing.assert_close(fusednorm.group_norm(x, 4), F.group_norm(x.resolve_neg(), 4))
    weight = torch._neg_view(torch.randn(8))
    torch.testing.assert_close(
        fusednorm.group_norm(x, 4, weight), F.group_norm(x.resolve_neg(), 4, weight.resolve_neg())
    )
    mean, var = torch._neg_view(torch.randn(8)), torch.rand(8) + 0.5
    x = torch.randn(2, 8, 4)
    torch.testing.assert_close(fusednorm.batch_norm(x, mean, var), F.batch_norm(x, mean.resolve_neg(), var))


def test_lazily_negated_parameters_and_saved_statistics() -> None:
    x, weight = (
        torch.nn.Parameter(torch._neg_view(torch.randn(2, 8, 4))),
        torch.nn.Parameter(torch._neg_view(torch.randn(8))),
    )
    expected = F.group_norm(x.resolve_neg(), 4, weight.resolve_neg())
    torch.testing.assert_close(fusednorm.group_norm(x, 4, weight), expected)
    dy = torch.randn(2, 8, 4)
    _, mean, rstd = (tensor.detach() for tensor in fusednorm.ops.group_norm_forward(x, 4, weight, None, 1e-5))
    negated = torch._neg_view(-mean), torch._neg_view(-rstd)
    got = fusednorm.ops.group_norm_backward(dy, x, *negated, 4, weight, None)
    wanted = torch.autograd.grad(expected, (x, weight), dy)
    torch.testing.assert_close(got[:2], wanted)


@pytest.mark.parametrize(
    ("kind", "straight"), [(Operands, gate.straight_forward), (BackwardOperands, gate.straight_backward)]
)
def test_a_call_goes_straight_to_its_backend_where_each_tensor_is_plain(kind: Any, straight: Any) -> None:
    """A kernel would read a lazily negated one with the wrong sign."""
    tensors = dict.fromkeys((field.name for field in fields(kind)), torch.randn(8))
    assert straight(kind(**tensors))
    for name in ("weight", "bias", "scale", "shift", "mean"):
        assert straight(kind(**{**tensors, name: None})), name
    for name in tensors:
        assert not straight(kind(**{**tensors, name: torch._neg_view(torch.randn(8))})), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_half_precision_beside_fp32_parameters(family: str, dtype: torch.dtype) -> None:
    call, tensors = case(family, modulated=False)
    half = [tensors[0].detach().to(dtype), *(tensor.detach().float() for tensor in tensors[1:])]
    judge = [tensor.double().requires_grad_() for tensor in half]
    for tensor in half:
        tensor.requires_grad_()
    dy = torch.randn(SHAPE).to(dtype)
    got = torch.autograd.grad(call(*half), half, dy)
    wanted = torch.autograd.grad(call(*judge), judge, dy.double())
    for tensor, mine, expected in zip(half, got, wanted, strict=True):
        assert mine.dtype == tensor.dtype
        tolerance = 4 * torch.finfo(mine.dtype).eps * (1 + expected.abs().max().item())
        torch.testing.assert_close(mine.double(), expected, rtol=0, atol=max(tolerance, 1e-5))


def few(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A call with few outputs, for a jacobian of few rows."""
    return lambda *tensors: call(*tensors).flatten()[::9]


def test_batched_gradients_of_what_is_given_and_of_channel_dim() -> None:
    x, weight, bias = double(2, 3, 4), double(4), double(4)
    mean, var = torch.randn(3, dtype=torch.float64), torch.rand(3, dtype=torch.float64) + 0.5
    calls: list[Callable[..., Tensor]] = [
        lambda *t: fusednorm.group_norm(t[0], 2, *t[1:], activation="gelu", channel_dim=-1),
        lambda *t: fusednorm.batch_norm(t[0], mean, var, t[1][:3], t[2][:3], activation="tanh"),
        lambda *t: fusednorm.instance_norm(t[0], mean, var, t[1][:3], t[2][:3], False),
    ]
    for call in calls:
        assert torch.autograd.gradcheck(
            call, (x, weight, bias), check_batched_grad=True, check_forward_ad=True, check_batched_forward_grad=True
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_batched_gradients(family: str) -> None:
    call, tensors = case(family)
    output = call(*tensors)
    gradients = torch.randn(3, *output.shape, dtype=output.dtype)
    one_by_one = [torch.autograd.grad(output, tensors, each, retain_graph=True) for each in gradients]
    expected = tuple(torch.stack(each) for each in zip(*one_by_one, strict=True))
    for create_graph in (False, True):
        got = torch.autograd.grad(
            output, tensors, gradients, is_grads_batched=True, retain_graph=True, create_graph=create_graph
        )
        torch.testing.assert_close(got, expected)
    got = torch.vmap(lambda each: torch.autograd.grad(output, tensors, each, retain_graph=True))(gradients)
    torch.testing.assert_close(got, expected)


def test_batched_gradients_on_the_reference() -> None:
    call, tensors = case("group_norm")
    with fusednorm.use_instance("reference"):
        output = call(*tensors)
        gradients = torch.randn(3, *output.shape, dtype=output.dtype)
        got = torch.autograd.grad(output, tensors, gradients, is_grads_batched=True, retain_graph=True)
    torch.testing.assert_close([each[1] for each in got], list(torch.autograd.grad(output, tensors, gradients[1])))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [SHAPE, (0, 4, 3, 2), (2, 3, 2, 4)], ids=["plain", "empty", "transposed"])
def test_batched_gradients_of_other_inputs(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape).to(dtype)
    x = (x if shape[1] == 4 else x.movedim(-1, 1)).requires_grad_()
    weight = torch.randn(4, requires_grad=True)
    output = fusednorm.group_norm(x, 2, weight)
    gradients = torch.randn(3, *x.shape).to(dtype)
    got = torch.autograd.grad(output, (x, weight), gradients, is_grads_batched=True, retain_graph=True)
    assert [each.dtype for each in got] == [dtype, torch.float32]
    for index, each in enumerate(gradients):
        expected = torch.autograd.grad(output, (x, weight), each, retain_graph=True)
        torch.testing.assert_close(tuple(one[index] for one in got), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("family", FAMILIES)
def test_vectorized_derivatives(family: str) -> None:
    call, tensors = case(family, modulated=False)
    inputs = tuple(tensor.detach() for tensor in tensors)
    rows, every = few(call), tuple(range(len(inputs)))
    expected = jacobian(rows, inputs)
    torch.testing.assert_close(jacobian(rows, inputs, vectorize=True), expected)
    torch.testing.assert_close(jacobian(rows, inputs, vectorize=True, strategy="forward-mode"), expected)
    torch.testing.assert_close(torch.func.jacrev(rows, every)(*inputs), expected)
    torch.testing.assert_close(torch.func.jacfwd(rows, every)(*inputs), expected)
    loss = lambda *tensors: rows(*tensors).square().sum()  # noqa: E731
    torch.testing.assert_close(hessian(loss, inputs, vectorize=True), hessian(loss, inputs))


@pytest.mark.parametrize("family", FAMILIES)
def test_gradcheck_batched(family: str) -> None:
    call, tensors = case(family, modulated=False)
    assert torch.autograd.gradcheck(
        call, tensors, check_batched_grad=True, check_forward_ad=True, check_batched_forward_grad=True
    )


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_older_vmap_of_a_forward(family: str, which: int) -> None:
    call, tensors = case(family, modulated=False)
    inputs = [tensor.detach() for tensor in tensors]
    batch = torch.stack([inputs[which], 2 * inputs[which] + 1])
    of_one = lambda each: call(*inputs[:which], each, *inputs[which + 1 :])  # noqa: E731
    torch.testing.assert_close(_vmap(of_one)(batch), torch.stack([of_one(each) for each in batch]))


def test_vectorized_calls_of_the_backward_kernels() -> None:
    x, weight, bias, mean = double(2, 4, 3), double(4), double(4), double(2, 2)
    dy, rstd = double(2, 4, 3), (torch.rand(2, 2, dtype=torch.float64) + 0.5).requires_grad_()

    def backward(*tensors: Tensor) -> Any:
        dy, x, mean, rstd, weight, bias = tensors
        return ops.group_norm_backward(dy, x, mean, rstd, 2, weight, bias, activation="silu")

    assert torch.autograd.gradcheck(backward, (dy, x, mean, rstd, weight, bias), check_batched_grad=True)
    rest = [tensor.detach() for tensor in (x, mean, rstd, weight, bias)]
    batch = torch.randn(3, 2, 4, 3, dtype=torch.float64)
    expected = tuple(map(torch.stack, zip(*(backward(each, *rest) for each in batch), strict=True)))
    for vmap in (_vmap, torch.vmap):
        torch.testing.assert_close(vmap(lambda each: backward(each, *rest))(batch), expected)
