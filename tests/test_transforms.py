"""torch.func's vmap and grad: equal to the calls one by one, and by the kernels where the batch folds away."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import fusednorm
from fusednorm import nn
from fusednorm.backends import reference

BATCH, SAMPLES, CHANNELS = 3, 2, 6
STATISTICS = torch.linspace(-1, 1, CHANNELS), torch.linspace(0.5, 1.5, CHANNELS)

Call = Callable[..., Tensor]
#: Calls of input, weight, bias, scale and shift; rows take no modulation.
CALLS: dict[str, Call] = {
    "group_norm": lambda x, w, b, s, t: fusednorm.group_norm(x, 3, w, b, activation="silu", scale=s, shift=t),
    "instance_norm": lambda x, w, b, s, t: fusednorm.instance_norm(
        x, None, None, w, b, activation="gelu", scale=s, shift=t
    ),
    "instance_norm, evaluation": lambda x, w, b, s, t: fusednorm.instance_norm(
        x, *STATISTICS, w, b, False, scale=s, shift=t
    ),
    "batch_norm": lambda x, w, b, s, t: fusednorm.batch_norm(
        x, None, None, w, b, training=True, activation="tanh", scale=s, shift=t
    ),
    "batch_norm, evaluation": lambda x, w, b, s, t: fusednorm.batch_norm(x, *STATISTICS, w, b, scale=s, shift=t),
    "layer_norm over channels": lambda x, w, b, s, t: fusednorm.layer_norm(
        x, (CHANNELS,), w, b, activation="silu", channel_dim=1
    ),
    "group_norm, channels last": lambda x, w, b, s, t: fusednorm.group_norm(
        x.movedim(1, -1), 3, w, b, channel_dim=-1, activation="silu", scale=s, shift=t
    ),
    "layer_norm": lambda x, w, b, s, t: fusednorm.layer_norm(x.movedim(1, -1), (CHANNELS,), w, b, activation="silu"),
    "rms_norm": lambda x, w, b, s, t: fusednorm.rms_norm(x.movedim(1, -1), (CHANNELS,), w),
}
ROWS = ("layer_norm over channels", "layer_norm", "rms_norm")


def tensors(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(SAMPLES, CHANNELS, 4, 3), (CHANNELS,), (CHANNELS,), (SAMPLES, CHANNELS), (SAMPLES, CHANNELS)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def batches(*places: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The tensors, those at ``places`` with a batch in front."""
    return [
        torch.stack([tensor + 0.3 * member * torch.randn_like(tensor) for member in range(BATCH)])
        if place in places
        else tensor
        for place, tensor in enumerate(tensors(dtype))
    ]


def dims_of(places: tuple[int, ...]) -> tuple[int | None, ...]:
    return tuple(0 if place in places else None for place in range(5))


def one_by_one(call: Callable[..., Any], given: list[Tensor], places: tuple[int, ...]) -> list[Any]:
    members = [
        call(*(tensor[member] if place in places else tensor for place, tensor in enumerate(given)))
        for member in range(BATCH)
    ]
    if isinstance(members[0], Tensor):
        return [torch.stack(members)]
    return [torch.stack(each) for each in zip(*members, strict=True)]


@pytest.fixture
def reference_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was computed by the reference."""
    found: list[str] = []

    def recorded(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def record(*arguments: Any, **keywords: Any) -> Any:
            found.append(name)
            return run(*arguments, **keywords)

        return record

    for name in ("forward", "backward"):
        monkeypatch.setattr(reference, name, recorded(name, getattr(reference, name)))
    return found


@pytest.mark.parametrize("places", [(0,), (0, 3), (0, 1, 2), (0, 1, 2, 3, 4), (1,), (3, 4)], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_vmap(name: str, places: tuple[int, ...], reference_calls: list[str]) -> None:
    given = batches(*places)
    (expected,) = one_by_one(CALLS[name], given, places)
    reference_calls.clear()
    torch.testing.assert_close(vmap(CALLS[name], dims_of(places))(*given), expected)
    if name in ROWS and {1, 2} & set(places):
        assert set(reference_calls) == {"forward"}
    else:
        assert not reference_calls


@pytest.mark.parametrize("dim", [1, 2, -1])
@pytest.mark.parametrize("name", CALLS)
def test_a_batch_in_another_dimension(name: str, dim: int) -> None:
    given = batches(0)
    (expected,) = one_by_one(CALLS[name], given, (0,))
    moved = [given[0].movedim(0, dim), *given[1:]]
    found = vmap(CALLS[name], (dim, None, None, None, None), out_dims=dim)(*moved)
    torch.testing.assert_close(found, expected.movedim(0, dim))


@pytest.mark.parametrize("places", [(0,), (0, 1, 2, 3, 4)], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_gradients_of_single_examples(name: str, places: tuple[int, ...], reference_calls: list[str]) -> None:
    def loss(*tensors: Tensor) -> Tensor:
        output = CALLS[name](*tensors)
        return (output * torch.linspace(-1, 1, output.numel()).view(output.shape)).sum()

    wanted = tuple(range(2 if name == "rms_norm" else 3 if name in ROWS else 5))
    gradients = grad(loss, wanted)
    given = batches(*places)
    expected = one_by_one(gradients, given, places)
    reference_calls.clear()
    torch.testing.assert_close(list(vmap(gradients, dims_of(places))(*given)), expected)
    if name not in ROWS:
        assert not reference_calls


@pytest.mark.parametrize("place", [1, 2, 3, 4], ids=["weight", "bias", "scale", "shift"])
@pytest.mark.parametrize("name", CALLS)
def test_a_parameters_gradients_of_single_examples(name: str, place: int) -> None:
    gradients = grad(lambda *tensors: CALLS[name](*tensors).pow(3).sum(), (place,))
    given = batches(0)
    torch.testing.assert_close(
        list(vmap(gradients, dims_of((0,)))(*given)), one_by_one(gradients, given, (0,)), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("name", CALLS)
def test_the_inputs_gradients_of_single_examples(name: str, reference_calls: list[str]) -> None:
    gradients = grad(lambda *tensors: CALLS[name](*tensors).square().sum())
    given = batches(0)
    expected = one_by_one(gradients, given, (0,))
    reference_calls.clear()
    torch.testing.assert_close([vmap(gradients, dims_of((0,)))(*given)], expected)
    assert not reference_calls


@pytest.mark.parametrize("name", CALLS)
def test_a_gradient_of_a_vmap(name: str, reference_calls: list[str]) -> None:
    """By torch.func, and by autograd around it."""
    given = batches(0)

    def loss(*tensors: Tensor) -> Tensor:
        return vmap(CALLS[name], dims_of((0,)))(*tensors).pow(3).sum()

    wanted = (0, 1)
    leaves = [tensor.clone().requires_grad_(place in wanted) for place, tensor in enumerate(given)]
    expected = torch.autograd.grad(
        sum(CALLS[name](each, *leaves[1:]).pow(3).sum() for each in leaves[0]), [leaves[0], leaves[1]]
    )
    reference_calls.clear()
    torch.testing.assert_close(grad(loss, wanted)(*given), expected, rtol=1e-4, atol=1e-4)
    found = torch.autograd.grad(loss(*leaves), [leaves[0], leaves[1]])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert not reference_calls


@pytest.mark.parametrize("name", CALLS)
def test_nested_batches(name: str) -> None:
    given = tensors()
    x = torch.randn(4, BATCH, *given[0].shape)
    weights = torch.randn(BATCH, CHANNELS)
    rest = given[2:]
    found = vmap(vmap(CALLS[name], (0, 0, None, None, None)), (0, None, None, None, None))(x, weights, *rest)
    expected = torch.stack(
        [torch.stack([CALLS[name](x[i, j], weights[j], *rest) for j in range(BATCH)]) for i in range(4)]
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", CALLS)
def test_second_derivatives(name: str) -> None:
    given = [tensor.double() for tensor in tensors()]

    def loss(x: Tensor, weight: Tensor) -> Tensor:
        return CALLS[name](x, weight, *given[2:]).pow(3).sum()

    def product(x: Tensor, weight: Tensor) -> Tensor:
        first, second = grad(loss, (0, 1))(x, weight)
        return first.square().sum() + second.square().sum()

    x, weight = (tensor.clone().requires_grad_() for tensor in given[:2])
    first = torch.autograd.grad(loss(x, weight), (x, weight), create_graph=True)
    expected = torch.autograd.grad(sum(each.square().sum() for each in first), (x, weight))
    torch.testing.assert_close(grad(product, (0, 1))(*given[:2]), expected, rtol=1e-3, atol=1e-3)
    batch = torch.stack([given[0], 0.5 * given[0] + 1])
    found = vmap(grad(product), (0, None))(batch, given[1])
    for each, one in zip(batch, found, strict=True):
        torch.testing.assert_close(grad(product)(each, given[1]), one, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", CALLS)
def test_derivatives_of_gradients_of_single_examples(name: str) -> None:
    """The weight's gradient of each example, whose batch does not fold where rows are normalized, and its own
    derivatives, of which the statistics have a part."""
    given = [tensor.double() for tensor in tensors()]
    batch = torch.stack([given[0], 0.5 * given[0] + 1])

    def loss(x: Tensor, weight: Tensor) -> Tensor:
        return CALLS[name](x, weight, *given[2:]).pow(3).sum()

    def penalty(batch: Tensor, weight: Tensor) -> Tensor:
        return vmap(grad(loss, 1), (0, None))(batch, weight).square().sum()

    leaves = batch.clone().requires_grad_(), given[1].clone().requires_grad_()
    firsts = [torch.autograd.grad(loss(x, leaves[1]), leaves[1], create_graph=True)[0] for x in leaves[0]]
    expected = torch.autograd.grad(sum(first.square().sum() for first in firsts), leaves)
    torch.testing.assert_close(grad(penalty, (0, 1))(batch, given[1]), expected)
    torch.testing.assert_close(torch.autograd.grad(penalty(*leaves), leaves), expected)


def test_jacobians_and_hessians() -> None:
    x, weight = torch.randn(2, 4, 3, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    call = lambda x: fusednorm.group_norm(x, 2, weight, activation="silu")  # noqa: E731
    torch.testing.assert_close(jacrev(call)(x), jacfwd(call)(x))
    loss = lambda x: call(x).pow(3).sum()  # noqa: E731
    torch.testing.assert_close(hessian(loss)(x), jacrev(jacrev(loss))(x))
    output, pull_back = vjp(call, x)
    tangent = torch.randn_like(x)
    _, pushed = jvp(call, (x,), (tangent,))
    torch.testing.assert_close((pull_back(torch.ones_like(output))[0] * tangent).sum(), pushed.sum())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_dtypes(dtype: torch.dtype) -> None:
    given = batches(0, dtype=dtype)
    given[1] = given[1].float()
    call = CALLS["group_norm"]
    found = vmap(call, dims_of((0,)))(*given)
    assert found.dtype is dtype
    torch.testing.assert_close(found, torch.stack([call(each, *given[1:]) for each in given[0]]), rtol=0, atol=0)
    gradients = vmap(grad(lambda *t: call(*t).float().square().sum(), (0, 1)), dims_of((0,)))(*given)
    assert [each.dtype for each in gradients] == [dtype, torch.float32]


@pytest.mark.parametrize("name", [name for name in CALLS if name != "batch_norm"])  # which needs samples
def test_empty_samples(name: str) -> None:
    given = tensors()
    given[0] = given[0].new_empty(BATCH, 0, CHANNELS, 4, 3)
    given[3] = given[4] = torch.empty(0, CHANNELS)
    found = vmap(CALLS[name], dims_of((0,)))(*given)
    assert found.shape[:2] == (BATCH, 0)


def test_channels_last_is_kept() -> None:
    x = torch.randn(BATCH, SAMPLES, 4, 3, CHANNELS).movedim(-1, 2)
    found = vmap(lambda each: fusednorm.group_norm(each, 3))(x)
    assert found.stride() == x.stride()
    torch.testing.assert_close(found, torch.stack([fusednorm.group_norm(each, 3) for each in x]))


def test_modulated_rows_that_lie_in_no_order() -> None:
    """vmap does not say whether a member of a batch is channels_last."""
    x, scale = torch.randn(BATCH, 2, 3, 4, 5).transpose(2, 3), torch.randn(5)

    def call(each: Tensor) -> Tensor:
        return fusednorm.layer_norm(each, (5,), scale=scale)

    torch.testing.assert_close(vmap(call)(x), torch.stack([call(each) for each in x]))


def test_gradients_by_the_statistics_of_each_member() -> None:
    x, w, b, s, t = tensors(torch.float64)
    means = torch.randn(BATCH, CHANNELS, dtype=torch.float64)
    variances = torch.rand(BATCH, CHANNELS, dtype=torch.float64) + 0.5

    def gradients(mean: Tensor, var: Tensor) -> Any:
        def loss(x: Tensor, s: Tensor) -> Tensor:
            return fusednorm.batch_norm(x, mean, var, w, b, scale=s, shift=t, activation="tanh").pow(2).sum()

        return grad(loss, (0, 1))(x, s)

    for places in ((0, 1), (0,), (1,)):
        given = [each if place in places else each[0] for place, each in enumerate((means, variances))]
        found = vmap(gradients, dims_of(places)[:2])(*given)
        torch.testing.assert_close(list(found), one_by_one(gradients, given, places))


def test_members_with_parameters_of_their_own_may_be_viewed_as_torchs() -> None:
    for size in (1, 3):
        x, weight = torch.randn(size, 5, 16, 3, 4), torch.randn(size, 16)
        for spatial in (x, x[..., 0]):
            flat = torch.vmap(lambda member, w: fusednorm.group_norm(member, 4, w).view(-1))(spatial, weight)
            expected = torch.vmap(lambda member, w: F.group_norm(member, 4, w).view(-1))(spatial, weight)
            torch.testing.assert_close(flat, expected)


def test_an_ensemble_of_modules() -> None:
    """torch.func.stack_module_state: each member has parameters of its own."""
    torch.manual_seed(0)

    def member() -> torch.nn.Module:
        blocks = [torch.nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8, activation="silu"), torch.nn.Flatten()]
        return torch.nn.Sequential(*blocks, torch.nn.Linear(8 * 4, 8), nn.LayerNorm(8))

    members = [member() for _ in range(BATCH)]
    parameters, buffers = torch.func.stack_module_state(members)
    x = torch.randn(5, 3, 4, 4)

    def call(parameters: Any, buffers: Any) -> Any:
        return functional_call(members[0], (parameters, buffers), (x,))

    torch.testing.assert_close(vmap(call)(parameters, buffers), torch.stack([each(x) for each in members]))
    found = grad(lambda parameters: vmap(call)(parameters, buffers).pow(3).sum())(parameters)
    for each in members:
        each(x).pow(3).sum().backward()
    for name, gradient in found.items():
        expected = torch.stack([each.get_parameter(name).grad for each in members])  # type: ignore[misc]
        torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-3)


def test_a_graph_of_a_transform() -> None:
    x, weight = torch.randn(BATCH, 2, 8, 3), torch.randn(8)
    call = vmap(grad(lambda x, w: fusednorm.group_norm(x, 4, w, activation="silu").pow(3).sum()), (0, None))
    for mode in ("real", "fake", "symbolic"):
        graph = make_fx(call, tracing_mode=mode)(x, weight)
        torch.testing.assert_close(graph(2 * x, weight), call(2 * x, weight), rtol=1e-4, atol=1e-4)
    made = torch.compile(call, fullgraph=True)
    torch.testing.assert_close(made(x, weight), call(x, weight), rtol=1e-4, atol=1e-4)


def test_running_statistics_are_refused_as_torch_refuses_them() -> None:
    x = torch.randn(BATCH, 4, 3, 5)
    for function in (F.batch_norm, fusednorm.batch_norm):
        mean, var = torch.zeros(3), torch.ones(3)
        with pytest.raises(RuntimeError):
            vmap(partial(function, running_mean=mean, running_var=var, training=True))(x)
