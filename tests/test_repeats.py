"""Calls that repeat: which are taken for an earlier one, and that whatever a guard does not see is asked."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fusednorm
from fusednorm import repeats
from fusednorm.private import torch_names


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


class Taken:
    """How many forwards and backwards were taken for earlier ones."""

    def __init__(self) -> None:
        self.forwards = self.backwards = 0

    def reset(self) -> None:
        self.forwards = self.backwards = 0


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Taken:
    counts = Taken()
    forward, backward = repeats.Forward.__init__, repeats.Backward.__init__

    def count(kept: Any, name: str) -> None:
        run = kept.run

        def counted(*arguments: Any, **options: Any) -> Any:
            setattr(counts, name, getattr(counts, name) + 1)
            return run(*arguments, **options)

        kept.run = counted

    def make_forward(self: Any, *arguments: Any) -> None:
        forward(self, *arguments)
        count(self, "forwards")

    def make_backward(self: Any, *arguments: Any) -> None:
        backward(self, *arguments)
        count(self, "backwards")

    monkeypatch.setattr(repeats.Forward, "__init__", make_forward)
    monkeypatch.setattr(repeats.Backward, "__init__", make_backward)
    return counts


def data(*shape: int, **options: Any) -> Tensor:
    return torch.randn(*shape, **options)


def layer(x: Tensor, weight: Any = None, bias: Any = None) -> Tensor:
    return fusednorm.layer_norm(x, (8,), weight, bias, activation="silu")


def plain(x: Tensor, weight: Any = None, bias: Any = None) -> Tensor:
    return F.silu(F.layer_norm(x, (8,), weight, bias))


def known(*tensors: Tensor) -> None:
    """Make the call often enough, its backward too, that the next is taken for it."""
    for _ in range(4):
        output = layer(*tensors)
        if output.requires_grad:
            output.backward(torch.ones_like(output))
    for tensor in tensors:
        tensor.grad = None


CALLS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "layer_norm": (layer, plain, ((5, 8), (8,), (8,))),
    "layer_norm alone": (layer, plain, ((5, 8),)),
    "layer_norm without bias": (layer, plain, ((5, 8), (8,))),
    "layer_norm without weight": (lambda x, b: layer(x, None, b), lambda x, b: plain(x, None, b), ((5, 8), (8,))),
    "rms_norm": (
        lambda x, w: fusednorm.rms_norm(x, (8,), w),
        lambda x, w: F.rms_norm(x, (8,), w),
        ((5, 8), (8,)),
    ),
    "group_norm": (
        lambda x, w, b: fusednorm.group_norm(x, 4, w, b),
        lambda x, w, b: F.group_norm(x, 4, w, b),
        ((2, 8, 3, 3), (8,), (8,)),
    ),
    "modulated group_norm": (
        lambda x, w, b, s, t: fusednorm.group_norm(x, 4, w, b, scale=s, shift=t),
        lambda x, w, b, s, t: F.group_norm(x, 4, w, b) * (1 + s[..., None]) + t[..., None],
        ((2, 8, 9), (8,), (8,), (2, 8), (2, 8)),
    ),
    "instance_norm": (
        lambda x, w, b: fusednorm.instance_norm(x, weight=w, bias=b),
        lambda x, w, b: F.instance_norm(x, weight=w, bias=b),
        ((2, 8, 9), (8,), (8,)),
    ),
    "channels_last": (
        lambda x, w, b: fusednorm.group_norm(x, 4, w, b, channel_dim=-1),
        lambda x, w, b: F.group_norm(x.movedim(-1, 1), 4, w, b).movedim(1, -1),
        ((2, 3, 3, 8), (8,), (8,)),
    ),
}


@pytest.mark.parametrize("differentiable", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_repeats_gives_what_a_first_one_gives(name: str, differentiable: bool, taken: Taken) -> None:
    ours, theirs, shapes = CALLS[name]
    for number in range(6):
        tensors = [data(*shape, requires_grad=differentiable) for shape in shapes]
        got, wanted = ours(*tensors), theirs(*tensors)
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
        assert got.requires_grad is differentiable
        assert taken.forwards == max(0, number - 1)
        if differentiable:
            dy = data(*got.shape)
            gradients = torch.autograd.grad(got, tensors, dy), torch.autograd.grad(wanted, tensors, dy)
            torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-4)
            assert taken.backwards == max(0, number - 2)


@pytest.mark.parametrize("differentiable", [False, True])
@pytest.mark.parametrize("batch", [True, False])
def test_an_evaluation_that_repeats(batch: bool, differentiable: bool, taken: Taken) -> None:
    for _ in range(5):
        x, mean, var, weight = data(3, 8, 5), data(8), data(8).abs() + 0.5, data(8, requires_grad=differentiable)
        if batch:
            got = fusednorm.batch_norm(x, mean, var, weight)
        else:
            got = fusednorm.instance_norm(x, mean, var, weight, use_input_stats=False)
        wanted = F.batch_norm(x, mean, var, weight)
        torch.testing.assert_close(got, wanted)
        if differentiable:
            var.fill_(7)  # the backward uses what the forward was given
            dy = data(3, 8, 5)
            xhat = (x - mean[:, None]) * (wanted / weight[:, None] / (x - mean[:, None])).detach()
            (gradient,) = torch.autograd.grad(got, weight, dy)
            torch.testing.assert_close(gradient, (dy * xhat).sum((0, 2)), rtol=1e-3, atol=1e-4)
    assert taken.forwards == 3
    assert taken.backwards == (2 if differentiable else 0)


@pytest.mark.parametrize("momentum", [0.3, None])
@pytest.mark.parametrize("differentiable", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_training_that_repeats(
    dtype: torch.dtype, differentiable: bool, momentum: float | None, taken: Taken
) -> None:
    ours = fusednorm.nn.BatchNorm1d(8, momentum=momentum, dtype=dtype)
    theirs = torch.nn.BatchNorm1d(8, momentum=momentum, dtype=dtype)
    for _ in range(5):
        x, dy = data(8, 8, 5, dtype=dtype), data(8, 8, 5, dtype=dtype)
        with torch.set_grad_enabled(differentiable):
            got, wanted = ours(x), theirs(x)
        tolerance = {"rtol": 3e-2, "atol": 3e-2} if dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(got, wanted, **tolerance)
        torch.testing.assert_close(list(ours.buffers()), list(theirs.buffers()), **tolerance)
        if differentiable:
            got, wanted = torch.autograd.grad(got, ours.weight, dy), torch.autograd.grad(wanted, theirs.weight, dy)
            torch.testing.assert_close(got, wanted, **tolerance)
    assert (taken.forwards, taken.backwards) == (3, 2 if differentiable else 0)


def test_a_training_without_running_statistics_that_repeats(taken: Taken) -> None:
    for _ in range(4):
        x, dy = data(3, 8, 5, requires_grad=True), data(3, 8, 5)
        got, wanted = fusednorm.batch_norm(x, None, None, training=True), F.batch_norm(x, None, None, training=True)
        torch.testing.assert_close(got, wanted)
        torch.testing.assert_close(torch.autograd.grad(got, x, dy), torch.autograd.grad(wanted, x, dy))
    assert (taken.forwards, taken.backwards) == (2, 1)


def test_running_statistics_are_checked_in_a_call_that_is_known() -> None:
    x, mean, var = data(3, 8, 5), data(8), data(8).abs()
    for _ in range(3):
        fusednorm.batch_norm(x, mean, var, training=True)
    with pytest.raises(ValueError, match="running_var is None"):
        fusednorm.batch_norm(x, mean, None, training=True)
    with pytest.raises(ValueError, match="running_mean is None"):
        fusednorm.batch_norm(x, None, var, training=True)
    with pytest.raises(ValueError, match="requires grad"):
        fusednorm.batch_norm(x, mean.clone().requires_grad_(), var, training=True)
    with pytest.raises(TypeError, match="momentum is a str"):
        fusednorm.batch_norm(x, mean, var, training=True, momentum="0.1")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="running_mean has shape"):
        fusednorm.batch_norm(x, mean[:4], var, training=True)


def test_every_operand_that_may_be_absent_has_a_place_in_the_key(taken: Taken) -> None:
    x, weight, bias = data(5, 8), data(8), data(8)
    for _ in range(3):
        for operands in ((weight, bias), (weight, None), (None, bias), (None, None)):
            torch.testing.assert_close(layer(x, *operands), plain(x, *operands))
    assert taken.forwards == 4


def test_parts_of_the_gradients(taken: Taken) -> None:
    tensors = [data(5, 8, requires_grad=True), data(8, requires_grad=True), data(8, requires_grad=True)]
    dy = data(5, 8)
    for _ in range(4):
        for place, tensor in enumerate(tensors):
            (got,) = torch.autograd.grad(layer(*tensors), tensor, dy)
            (wanted,) = torch.autograd.grad(plain(*tensors), tensor, dy)
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5, msg=str(place))
    assert taken.backwards > 0


def test_frozen_parameters_get_no_gradients(taken: Taken) -> None:
    for _ in range(5):
        x, weight, bias = data(5, 8), data(8, requires_grad=True), data(8)
        layer(x, weight, bias).sum().backward()
        assert x.grad is bias.grad is None
        assert weight.grad is not None
    assert taken.backwards == 2


# --- what guards see ---


def changed_strides(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


@pytest.mark.parametrize(
    "change",
    [
        changed_strides,
        torch._neg_view,
        Tensor.double,
        lambda x: x.clone().requires_grad_(),
        lambda x: Parameter(x),
        lambda x: x[:1].expand(5, 8),
    ],
)
def test_an_input_of_other_metadata_is_another_call(change: Callable[[Tensor], Tensor], taken: Taken) -> None:
    x, weight = data(5, 8), data(8)
    known(x, weight)
    taken.reset()
    other = change(x)
    assert other.shape == x.shape
    torch.testing.assert_close(layer(other, weight), plain(other, weight.to(other.dtype)))
    assert taken.forwards == 0


@pytest.mark.parametrize("change", [torch._neg_view, Tensor.double, Parameter, lambda w: w.repeat(2)[::2]])
def test_a_weight_of_other_metadata_is_another_call(change: Callable[[Tensor], Tensor], taken: Taken) -> None:
    x, weight = data(5, 8), data(8)
    known(x, weight)
    taken.reset()
    other = change(weight)
    for _ in range(3):
        torch.testing.assert_close(layer(x, other), plain(x, other.float()))
    assert taken.forwards <= 2


def test_a_module_that_is_converted_in_place(taken: Taken) -> None:
    module, theirs = fusednorm.nn.LayerNorm(8), torch.nn.LayerNorm(8)
    x = data(5, 8)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float32):
        module, theirs, x = module.to(dtype), theirs.to(dtype), x.to(dtype)
        for _ in range(4):
            torch.testing.assert_close(module(x), theirs(x))
    assert taken.forwards == 2 + 3 + 3 + 4


def test_gradients_that_are_switched_on_and_off(taken: Taken) -> None:
    x, weight = data(5, 8), data(8, requires_grad=True)
    known(x, weight)
    taken.reset()
    with torch.no_grad():
        assert layer(x, weight).grad_fn is None
    assert layer(x, weight).grad_fn is not None
    assert taken.forwards == 2
    weight.requires_grad_(False)
    assert layer(x, weight).grad_fn is None
    assert taken.forwards == 2
    with torch.inference_mode():
        for _ in range(3):
            output = layer(x, weight)
            assert output.is_inference()
    assert not layer(x, weight).is_inference()


def test_inference_tensors(taken: Taken) -> None:
    weight = data(8)
    with torch.inference_mode():
        x = data(5, 8)
        known(x, weight)
        assert layer(x, weight).is_inference()
    taken.reset()
    output = layer(x.clone(), weight)
    assert not output.is_inference()
    assert taken.forwards == 0


def test_autocast_changes_nothing() -> None:
    x, weight = data(5, 8), data(8)
    known(x, weight)
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(layer(x, weight), layer(x, weight))
            assert layer(x, weight).dtype is torch.float32


def test_transforms_of_a_call_that_is_known() -> None:
    x, weight = data(5, 8), data(8)
    known(x, weight)
    batch = data(3, 5, 8)
    one_by_one = torch.stack([plain(each, weight) for each in batch])
    torch.testing.assert_close(torch.vmap(lambda x: layer(x, weight))(batch), one_by_one)
    torch.testing.assert_close(torch.vmap(lambda y: layer(x, weight) + y)(batch), plain(x, weight) + batch)
    gradient = torch.func.grad(lambda x: layer(x, weight).square().sum())(x)
    torch.testing.assert_close(gradient, torch.func.grad(lambda x: plain(x, weight).square().sum())(x))
    tangent = data(5, 8)
    got = torch.func.jvp(lambda x: layer(x, weight), (x,), (tangent,))
    torch.testing.assert_close(got, torch.func.jvp(lambda x: plain(x, weight), (x,), (tangent,)))
    got = torch.func.functionalize(lambda x: layer(x, weight))(x)
    torch.testing.assert_close(got, plain(x, weight))
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, tangent), weight))
    assert dual.tangent is not None


def test_batched_gradients_of_a_call_that_is_known() -> None:
    x, weight = data(5, 8, requires_grad=True), data(8, requires_grad=True)
    known(x, weight)
    gradients = data(3, 5, 8)
    got = torch.autograd.grad(layer(x, weight), (x, weight), gradients, is_grads_batched=True)
    wanted = torch.autograd.grad(plain(x, weight), (x, weight), gradients, is_grads_batched=True)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


# --- what guards do not see ---


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Operators, Functions])
def test_modes_see_a_call_that_is_known(mode: type[Any]) -> None:
    x, weight = data(5, 8), data(8)
    known(x, weight)
    with mode() as watching:
        layer(x, weight)
    assert any("norm_forward" in name for name in watching.seen)


def test_a_mode_sees_a_backward_that_is_known() -> None:
    x, weight = data(5, 8, requires_grad=True), data(8)
    known(x, weight)
    output = layer(x, weight)
    with Operators() as watching:
        output.backward(torch.ones_like(output))
    assert any("norm_backward" in name for name in watching.seen)


def test_fake_tensors_and_traces() -> None:
    x, weight = data(5, 8), data(8)
    known(x, weight)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert type(layer(x, weight)) is not Tensor
    graph = make_fx(lambda x: layer(x, weight))(x)
    assert "norm_forward" in graph.code
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(lambda x: layer(x, weight), (x,))
    other = data(5, 8)
    torch.testing.assert_close(traced(other), plain(other, weight))


def test_a_profiler_sees_a_call_that_is_known() -> None:
    x, weight = data(5, 8), data(8)
    known(x, weight)
    with torch.autograd.profiler.profile() as profile:
        layer(x, weight)
    assert any("norm_forward" in event.name for event in profile.function_events)
    x.requires_grad_()
    known(x, weight)
    output = layer(x, weight)
    with torch.autograd.profiler.profile() as profile:
        output.backward(torch.ones_like(output))
    assert any("norm_backward" in event.name for event in profile.function_events)


def test_a_graph_of_a_call_that_is_known() -> None:
    x, weight = data(5, 8), data(8)
    known(x, weight)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    for _ in range(3):
        x = data(5, 8)
        torch.testing.assert_close(compiled(x, weight), plain(x, weight))


class Watched(Tensor):
    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is fusednorm.layer_norm:
            return "seen"
        return super().__torch_function__(function, types, args, kwargs or {})


def test_a_subclass_gets_a_call_that_is_known() -> None:
    x, weight = data(5, 8), data(8)
    known(x, weight)
    assert layer(x.as_subclass(Watched), weight) == "seen"
    assert layer(x, weight.as_subclass(Watched)) == "seen"


def test_the_instance_that_is_asked_for_runs(taken: Taken) -> None:
    x, weight = data(5, 8), data(8)
    known(x, weight)
    taken.reset()
    with fusednorm.use_instance("reference"):
        layer(x, weight)
        assert taken.forwards == 0
    with fusednorm.use_instance("triton.rows"), pytest.raises(RuntimeError, match="cannot run"):
        layer(x, weight)
    x = data(5, 8, requires_grad=True)
    known(x, weight)
    output = layer(x, weight)
    taken.reset()
    with fusednorm.use_instance("triton.rows"), pytest.raises(RuntimeError, match="cannot run"):
        output.backward(torch.ones_like(output))
    assert taken.backwards == 0


def test_a_backward_by_another_instance_than_its_forwards_is_not_kept(taken: Taken) -> None:
    x = data(5, 8, requires_grad=True)
    for _ in range(3):
        with fusednorm.use_instance("reference"):
            output = layer(x)
        output.backward(torch.ones_like(output))
    with fusednorm.use_instance("reference"):
        layer(x).backward(torch.ones_like(output))
    assert (taken.forwards, taken.backwards) == (2, 0)


def test_hooks_see_what_a_call_that_is_known_saves() -> None:
    x, weight = data(5, 8, requires_grad=True), data(8, requires_grad=True)
    known(x, weight)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        output = layer(x, weight)
        layer(x, weight)
    assert len(saved) == 2 * 4
    assert [len(forwards) for forwards in repeats._calls.values()] == [1]
    (got,) = torch.autograd.grad(output.sum(), x)
    torch.testing.assert_close(got, torch.autograd.grad(plain(x, weight).sum(), x)[0])
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor[:2]):
        output = layer(x, weight)
    with pytest.raises((RuntimeError, ValueError)):
        output.sum().backward()


def test_a_checkpoint_of_a_call_that_becomes_known() -> None:
    for reentrant in (False, True):
        for _ in range(5):
            x, weight = data(5, 8, requires_grad=True), data(8, requires_grad=True)
            output = checkpoint(layer, x, weight, use_reentrant=reentrant)
            assert isinstance(output, Tensor)
            got = torch.autograd.grad(output.sum(), (x, weight)) if not reentrant else None
            if got is None:
                output.sum().backward()
                got = x.grad, weight.grad
            torch.testing.assert_close(got, torch.autograd.grad(plain(x, weight).sum(), (x, weight)))


def test_second_derivatives_of_a_call_that_is_known() -> None:
    tensors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 8), (8,), (8,))]
    known(*tensors)
    assert torch.autograd.gradcheck(layer, tensors)
    assert torch.autograd.gradgradcheck(layer, tensors)
    dy = torch.ones(3, 8, dtype=torch.float64)
    (first,) = torch.autograd.grad(layer(*tensors), tensors[0], dy, create_graph=True)
    (wanted,) = torch.autograd.grad(plain(*tensors), tensors[0], dy, create_graph=True)
    second = [torch.autograd.grad(gradient.square().sum(), tensors) for gradient in (first, wanted)]
    torch.testing.assert_close(*second)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor(1.0).expand(5, 8),
        lambda: data(8, 5).t(),
        lambda: torch._neg_view(data(5, 8)),
        lambda: torch._efficientzerotensor((5, 8)),
        lambda: data(10, 8)[::2],
    ],
)
def test_gradients_of_any_kind_for_a_call_that_is_known(make: Callable[[], Tensor]) -> None:
    x, weight = data(5, 8, requires_grad=True), data(8, requires_grad=True)
    known(x, weight)
    for _ in range(3):
        dy = make()
        got = torch.autograd.grad(layer(x, weight), (x, weight), dy)
        wanted = torch.autograd.grad(plain(x, weight), (x, weight), dy.clone().resolve_neg())
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_one_graph_goes_back_twice(taken: Taken) -> None:
    x, weight = data(5, 8, requires_grad=True), data(8, requires_grad=True)
    known(x, weight)
    output = layer(x, weight).sum()
    first, second = (torch.autograd.grad(output, (x, weight), retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))


def test_a_saved_tensor_that_was_changed_is_an_error() -> None:
    x, weight = data(5, 8), data(8, requires_grad=True)
    known(x, weight)
    output = layer(x, weight)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_a_saved_tensor_that_got_other_data(taken: Taken) -> None:
    x, weight = data(5, 8, requires_grad=True), data(8, requires_grad=True)
    known(x, weight)
    output = layer(x, weight)
    taken.reset()
    x.data = changed_strides(x.data)
    torch.autograd.grad(output, (x, weight), torch.ones(5, 8))
    assert taken.backwards == 0


# --- arguments ---


def test_mistakes_are_found_in_a_call_that_is_known() -> None:
    x, weight = data(2, 8, 3), data(8)
    for _ in range(3):
        fusednorm.group_norm(x, 1, weight)
    with pytest.raises(TypeError, match="num_groups is a bool"):
        fusednorm.group_norm(x, True, weight)
    with pytest.raises(TypeError, match="num_groups is a float"):
        fusednorm.group_norm(x, 1.0, weight)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="weight has shape"):
        fusednorm.group_norm(x, 1, data(7))
    with pytest.raises(TypeError, match="weight is a int"):
        fusednorm.group_norm(x, 1, 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"torch\.strided"):
        fusednorm.group_norm(x, 1, weight.to_sparse())
    with pytest.raises(ValueError, match="is on meta"):
        fusednorm.group_norm(x, 1, weight.to("meta"))
    with pytest.raises(TypeError, match="dtype"):
        fusednorm.group_norm(x, 1, weight.long())
    with pytest.raises(TypeError, match="sparse"):
        fusednorm.group_norm(x.to_sparse(), 1, weight)


def test_nested_tensors_do_not_reach_a_guard() -> None:
    x, weight = data(5, 8), data(8)
    known(x, weight)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor([data(5, 8)])
    with pytest.raises(TypeError, match="nested"):
        layer(nested, weight)
    with pytest.raises((TypeError, RuntimeError)):
        layer(x, nested)


def test_an_eps_that_is_a_tensor_is_read_each_time() -> None:
    x, eps = data(5, 8), torch.tensor(1e-5)
    for value in (1e-5, 1e-5, 1e-5, 3.0):
        eps.fill_(value)
        got = fusednorm.layer_norm(x, (8,), eps=eps)  # type: ignore[arg-type]
        torch.testing.assert_close(got, F.layer_norm(x, (8,), eps=value))


@pytest.mark.parametrize("shape", [[8], torch.Size((8,)), (8,)])
def test_every_form_of_the_normalized_shape(shape: Any) -> None:
    for _ in range(4):
        x = data(5, 8)
        torch.testing.assert_close(fusednorm.layer_norm(x, shape), F.layer_norm(x, (8,)))


def test_an_activation_is_known_by_what_it_is_and_not_by_where_it_was() -> None:
    x = data(5, 8)
    for number in range(200):
        slope = number / 7
        got = fusednorm.layer_norm(x, (8,), activation=fusednorm.Activation("leaky_relu", slope))
        torch.testing.assert_close(got, F.leaky_relu(F.layer_norm(x, (8,)), slope))
        gc.collect(0)


def test_one_tensor_as_two_operands(taken: Taken) -> None:
    x, weight = data(5, 8), data(8)
    for _ in range(12):
        torch.testing.assert_close(layer(x, weight, weight), plain(x, weight, weight))
    assert taken.forwards == 0
    assert all(len(each) <= repeats.MOST_GUARDS for each in repeats._calls.values())


# --- bounds, threads, and torch without guards ---


def test_the_calls_that_are_kept_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "MOST_CALLS", 4)
    for _ in range(3):
        for size in range(1, 10):
            x = data(size, 8)
            torch.testing.assert_close(fusednorm.rms_norm(x, (8,)), F.rms_norm(x, (8,)))
            assert len(repeats._calls) <= 4


def test_the_guards_of_a_call_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "MOST_GUARDS", 3)
    for _ in range(3):
        for step in range(1, 10):
            x = data(4, 8 * step)[:, ::step]
            torch.testing.assert_close(fusednorm.rms_norm(x, (8,)), F.rms_norm(x, (8,)))
    ((forwards),) = repeats._calls.values()
    assert len(forwards) == 3


def test_threads_share_a_call(taken: Taken) -> None:
    weight = data(8, requires_grad=True)
    wrong: list[str] = []

    def work(number: int) -> None:
        x = torch.full((64, 8), float(number)) + torch.arange(8.0)
        x.requires_grad_()
        expected = plain(x, weight)
        (gradient,) = torch.autograd.grad(expected.square().sum(), x)
        for _ in range(100):
            output = layer(x, weight)
            (got,) = torch.autograd.grad(output.square().sum(), x)
            if not torch.allclose(output, expected, atol=1e-4) or not torch.allclose(got, gradient, atol=1e-3):
                wrong.append(f"thread {number}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert taken.backwards > 0


def test_the_number_of_threads_changes_no_result() -> None:
    x, weight = data(64, 1024), data(1024)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3, 1, 2, 3):
            torch.set_num_threads(count)
            results.append(fusednorm.rms_norm(x, (1024,), weight))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(result, results[0]) for result in results)


def test_without_guards_every_call_is_checked(taken: Taken, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_names, "_guards", None)
    x, weight = data(5, 8), data(8)
    for _ in range(12):
        torch.testing.assert_close(layer(x, weight), plain(x, weight))
    assert taken.forwards == 0


class Careless:
    """A guard that takes every tensor."""

    def __init__(self, *tensors: Tensor, **options: Any) -> None:
        pass

    def check(self, *tensors: Tensor) -> bool:
        return True


class Unknown:
    """A guard of another signature."""

    def __init__(self, tensors: Any) -> None:
        pass


@pytest.mark.parametrize("other", [Careless, Unknown])
def test_a_guard_that_fails_its_trial_is_not_used(other: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch_names._guards_work()
    monkeypatch.setattr(torch_names, "_guards", other)
    torch_names._guards_work.cache_clear()
    try:
        assert torch_names.guard([data(5, 8)]) is None
    finally:
        torch_names._guards_work.cache_clear()


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_the_trial_of_guards_in_every_mode(mode: Callable[[], Any]) -> None:
    torch_names._guards_work.cache_clear()
    with mode():
        assert torch_names._guards_work()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled_autograd_of_a_call_that_is_known() -> None:
    weight = data(8, requires_grad=True)
    known(data(5, 8, requires_grad=True), weight)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        for _ in range(4):
            x = data(5, 8, requires_grad=True)
            weight.grad = None
            layer(x, weight).square().sum().backward()
            y, other = x.detach().requires_grad_(), weight.detach().requires_grad_()
            with torch._dynamo.compiled_autograd._disable():
                wanted = torch.autograd.grad(plain(y, other).square().sum(), (y, other))
            torch.testing.assert_close((x.grad, weight.grad), wanted)


@pytest.mark.parametrize("shape", [(300, 512), (1, 20000), (60, 80, 3, 3)])
def test_repeated_calls_of_several_threads_or_large_workspace_have_the_same_bits(shape: tuple[int, ...]) -> None:
    """Rows shared by threads; one row with converted parameters; more statistics than are discarded."""
    x, dtype = torch.randn(shape), torch.float16 if shape[0] == 1 else torch.float32
    x = x.to(dtype).requires_grad_()
    images = len(shape) == 4
    parameters = [torch.randn(shape[1], dtype=dtype).requires_grad_() for _ in range(2)]
    dy = torch.randn(shape, dtype=dtype)

    def call() -> list[Tensor]:
        if images:
            y = fusednorm.instance_norm(x, None, None, *parameters)
        else:
            y = fusednorm.layer_norm(x, shape[1:], *parameters)
        with torch.no_grad():
            without = fusednorm.instance_norm(x, None, None, *parameters) if images else y
        return [y, without, *torch.autograd.grad(y, (x, *parameters), dy)]

    first = call()
    for _ in range(3):
        assert all(map(torch.equal, call(), first))
