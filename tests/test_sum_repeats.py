"""Calls with sums around the norm that repeat: they give the bits of first ones, and whatever watches sees them."""

from __future__ import annotations

import gc
import itertools
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_repeats import Functions, Operators, Taken
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import fusednorm
from fusednorm import repeats, sum_autograd, sum_repeats
from fusednorm.functional import counted_batch_norm


@pytest.fixture(autouse=True)
def seed(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(sum_repeats, "_calls", {})


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Taken:
    counts = Taken()
    forward, backward = sum_repeats.SummedForward.__init__, sum_autograd.SummedBackward.__init__

    def counted(run: Callable[..., Any], name: str) -> Callable[..., Any]:
        def counting(*arguments: Any) -> Any:
            setattr(counts, name, getattr(counts, name) + 1)
            return run(*arguments)

        return counting

    def make_forward(self: Any, *arguments: Any) -> None:
        forward(self, *arguments)
        self.make = counted(self.make, "forwards")

    def make_backward(self: Any, *arguments: Any) -> None:
        backward(self, *arguments)
        self.run = counted(self.run, "backwards")

    monkeypatch.setattr(sum_repeats.SummedForward, "__init__", make_forward)
    monkeypatch.setattr(sum_autograd.SummedBackward, "__init__", make_backward)
    return counts


#: The tensors of a call by name, of a size at which no chance equality hides a mistake.
ROWS: dict[str, tuple[int, ...]] = {"input": (5, 8), "weight": (8,), "bias": (8,), "pre_add": (5, 8)}
IMAGES: dict[str, tuple[int, ...]] = {
    "input": (2, 8, 5, 5), "weight": (8,), "bias": (8,), "scale": (2, 8), "shift": (2, 8), "pre_add": (2, 8, 5, 5),
    "numbers": (2, 8), "pre_gate": (2, 8), "post_add": (2, 8, 5, 5),
}  # fmt: skip


class Call:
    """A public function with what is around its norm, and the tensors that it takes."""

    def __init__(self, function: str, names: str, activation: str | None = None, **options: Any) -> None:
        self.function, self.activation, self.options = function, activation, options
        self.last = options.pop("last", False)
        self.shapes = ROWS if function in ("layer_norm", "rms_norm") else IMAGES
        self.names = ["input", *names.split()]

    def data(self, **options: Any) -> dict[str, Tensor]:
        made = {}
        for name in self.names:
            tensor = torch.randn(self.shapes[name])
            if self.last and tensor.dim() == 4:
                tensor = tensor.contiguous(memory_format=torch.channels_last)
            made[name] = tensor.requires_grad_(options.get("requires_grad", False))
        return made

    def __call__(self, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """The output, and s where it is asked for."""
        given = {"pre_add" if name == "numbers" else name: tensor for name, tensor in tensors.items()}
        given |= {"activation": self.activation, **self.options}  # type: ignore[dict-item]
        function = getattr(fusednorm, self.function)
        if self.function in ("layer_norm", "rms_norm"):
            found = function(given.pop("input"), (8,), **given)
        elif self.function == "group_norm":
            found = function(given.pop("input"), 4, **given)
        elif self.function == "batch_norm":
            found = function(given.pop("input"), given.pop("mean", None), given.pop("var", None), **given)
        else:
            found = function(**given)
        return found if isinstance(found, tuple) else (found, None)


CALLS = {
    "rms_norm of a sum": Call("rms_norm", "weight pre_add"),
    "rms_norm and the sum": Call("rms_norm", "weight pre_add", return_sum=True),
    "layer_norm of a sum": Call("layer_norm", "weight bias pre_add", "silu"),
    "layer_norm and the sum": Call("layer_norm", "weight bias pre_add", return_sum=True),
    "group_norm of images": Call("group_norm", "weight bias pre_add post_add", "silu", return_sum=True),
    "group_norm before a sum": Call("group_norm", "weight bias post_add", "relu"),
    "group_norm without an activation": Call("group_norm", "weight bias post_add"),
    "group_norm of numbers": Call("group_norm", "weight bias numbers", "silu"),
    "group_norm of gated": Call("group_norm", "weight bias pre_add pre_gate", "silu", return_sum=True),
    "modulated group_norm": Call("group_norm", "weight bias scale shift pre_add", "silu"),
    "group_norm in channels_last": Call("group_norm", "weight bias pre_add post_add", "gelu", last=True),
    "instance_norm": Call("instance_norm", "weight bias post_add", "leaky_relu"),
    "instance_norm alone": Call("instance_norm", "post_add", "silu"),
    "batch_norm": Call("batch_norm", "weight bias post_add", "relu", training=True),
    "batch_norm in channels_last": Call("batch_norm", "weight bias post_add", "relu", training=True, last=True),
}  # fmt: skip


def steps(call: Call, tensors: dict[str, Tensor], gradients: tuple[Tensor | None, Tensor | None]) -> list[Tensor]:
    y, s = call(tensors)
    found = [y.detach()] if s is None else [y.detach(), s.detach()]
    pairs = [(each, dy) for each, dy in zip((y, s), gradients, strict=True) if each is not None and dy is not None]
    outputs = [(each, dy) for each, dy in pairs if each.requires_grad]
    needed = [tensor for tensor in tensors.values() if tensor.requires_grad]
    if needed and outputs:
        every = torch.autograd.grad([each for each, _ in outputs], needed, [dy for _, dy in outputs], allow_unused=True)
        found += [each for each in every if each is not None]
    return found


def first(call: Call, *arguments: Any) -> list[Tensor]:
    """What a call gives that nothing is known of."""
    known = dict(sum_repeats._calls)
    sum_repeats._calls.clear()
    found = steps(call, *arguments)
    sum_repeats._calls.clear()
    sum_repeats._calls.update(known)
    return found


def known(call: Call, **options: Any) -> dict[str, Tensor]:
    """Make the call often enough, its backward too, that the next is taken for it."""
    tensors = call.data(**options)
    for _ in range(4):
        y, s = call(tensors)
        if y.requires_grad:
            torch.autograd.backward(y if s is None else (y + s), torch.ones_like(y))
    for tensor in tensors.values():
        tensor.grad = None
    return tensors


@pytest.mark.parametrize("differentiable", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_repeats_gives_what_a_first_one_gives(name: str, differentiable: bool, taken: Taken) -> None:
    call = CALLS[name]
    for number in range(6):
        tensors = call.data(requires_grad=differentiable)
        dy, ds = torch.randn_like(tensors["input"]), torch.randn_like(tensors["input"])
        taken.reset()
        got = steps(call, tensors, (dy, ds))
        assert (taken.forwards, taken.backwards) == (number >= 2, differentiable and number >= 3)
        wanted = first(call, tensors, (dy, ds))
        assert len(got) == len(wanted) > (2 if differentiable else 0)
        assert all(map(torch.equal, got, wanted))


@pytest.mark.parametrize("name", ["layer_norm and the sum", "group_norm of gated"])
def test_every_part_of_the_gradients(name: str, taken: Taken) -> None:
    """Of the output alone, of s alone, of both; for each operand alone, with the others frozen."""
    call = CALLS[name]
    for needed in (*call.names, None):
        for with_y, with_s in ((True, False), (False, True), (True, True)):
            for _ in range(4):
                tensors = call.data()
                for key, tensor in tensors.items():
                    tensor.requires_grad_(needed in (key, None))
                upstream = [torch.randn_like(tensors["input"]) if each else None for each in (with_y, with_s)]
                got, wanted = steps(call, tensors, tuple(upstream)), first(call, tensors, tuple(upstream))  # type: ignore[arg-type]
                assert len(got) == len(wanted) >= 2
                assert all(map(torch.equal, got, wanted)), (needed, with_y, with_s)
    assert taken.forwards > 0
    assert taken.backwards > 0


@pytest.mark.parametrize("momentum", [0.3, None])
@pytest.mark.parametrize("differentiable", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_running_statistics(training: bool, differentiable: bool, momentum: float | None, taken: Taken) -> None:
    ours = fusednorm.nn.BatchNorm2d(8, momentum=momentum, activation="relu").train(training)
    theirs = torch.nn.BatchNorm2d(8, momentum=momentum).train(training)
    for _ in range(5):
        x, h, dy = (torch.randn(3, 8, 4, 4) for _ in range(3))
        with torch.set_grad_enabled(differentiable):
            got, wanted = ours(x, post_add=h), torch.relu(theirs(x) + h)
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(list(ours.buffers()), list(theirs.buffers()), rtol=1e-4, atol=1e-5)
        if differentiable:
            gradients = torch.autograd.grad(got, ours.weight, dy), torch.autograd.grad(wanted, theirs.weight, dy)
            torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-4)
    assert (taken.forwards, taken.backwards) == (3, 2 if differentiable else 0)


def test_running_statistics_have_new_versions() -> None:
    module = fusednorm.nn.BatchNorm2d(8)
    x, h = torch.randn(3, 8, 4, 4), torch.randn(3, 8, 4, 4)
    for _ in range(4):
        versions = [buffer._version for buffer in module.buffers()]
        module(x, post_add=h)
        assert all(buffer._version > version for buffer, version in zip(module.buffers(), versions, strict=True))


def test_statistics_that_are_given_to_instance_norm(taken: Taken) -> None:
    for _ in range(4):
        x, h, mean, var = torch.randn(3, 8, 5), torch.randn(3, 8, 5), torch.randn(8), torch.rand(8) + 0.5
        got = fusednorm.instance_norm(x, mean, var, use_input_stats=False, activation="silu", post_add=h)
        wanted = torch.nn.functional.silu(torch.nn.functional.batch_norm(x, mean, var) + h)
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    assert taken.forwards == 2


def test_every_operand_that_may_be_absent_has_a_place_in_the_key(taken: Taken) -> None:
    names = "weight", "bias", "pre_add", "pre_gate", "post_add"
    every = Call("group_norm", " ".join(names)).data()
    subsets = [
        chosen
        for size in range(len(names) + 1)
        for chosen in itertools.combinations(names, size)
        if "post_add" in chosen or ("pre_add" in chosen and "pre_gate" in chosen)
        if "pre_gate" not in chosen or "pre_add" in chosen
    ]
    for _ in range(3):
        for chosen in subsets:
            call = Call("group_norm", " ".join(chosen), "silu")
            tensors = {name: every[name] for name in call.names}
            got, wanted = steps(call, tensors, (None, None)), first(call, tensors, (None, None))
            assert all(map(torch.equal, got, wanted)), chosen
    assert taken.forwards == len(subsets)


def test_s_is_asked_for_or_not(taken: Taken) -> None:
    alone, both = CALLS["rms_norm of a sum"], CALLS["rms_norm and the sum"]
    tensors = alone.data()
    for _ in range(4):
        y, s = alone(tensors)
        z, t = both(tensors)
        assert s is None
        assert t is not None
        assert torch.equal(t, tensors["input"] + tensors["pre_add"])
        assert torch.equal(y, z)
    assert taken.forwards == 4


def test_gradients_that_are_switched_on_and_off(taken: Taken) -> None:
    call = CALLS["rms_norm and the sum"]
    tensors = known(call, requires_grad=True)
    for _ in range(3):
        with torch.no_grad():
            y, s = call(tensors)
        assert y.grad_fn is None
        assert s is not None
        assert s.grad_fn is None
        y, s = call(tensors)
        assert y.grad_fn is not None
        assert s is not None
        assert s.grad_fn is not None
        with torch.inference_mode():
            y, s = call(tensors)
            assert y.is_inference()
    assert taken.forwards > 4
    kept = [forward for forwards in sum_repeats._calls.values() for forward in forwards]
    assert {forward.differentiable for forward in kept} == {False, True}  # without gradients nobody keeps s
    tensors = {name: tensor.detach() for name, tensor in tensors.items()}
    tensors["weight"].requires_grad_()
    for _ in range(4):
        y, s = call(tensors)
        assert s is not None
        assert (y.requires_grad, s.requires_grad) == (True, False)


# --- what guards see ---


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.t().contiguous().t(),
        torch._neg_view,
        Tensor.double,
        lambda x: x.clone().requires_grad_(),
        lambda x: torch.nn.Parameter(x),
        lambda x: x[:1].expand(5, 8),
    ],
)
@pytest.mark.parametrize("which", ["input", "pre_add"])
def test_a_tensor_of_other_metadata_is_another_call(
    which: str, change: Callable[[Tensor], Tensor], taken: Taken
) -> None:
    call = CALLS["layer_norm and the sum"]
    tensors = known(call)
    taken.reset()
    other = {**tensors, which: change(tensors[which])}
    y, s = call(other)
    assert taken.forwards == 0
    assert s is not None
    wanted = other["input"] + other["pre_add"]
    torch.testing.assert_close(s, wanted.to(s.dtype).resolve_neg())
    wanted = torch.nn.functional.layer_norm(s, (8,), tensors["weight"].to(s.dtype), tensors["bias"].to(s.dtype))
    torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor(1.0).expand(2, 8, 5, 5),
        lambda: torch.randn(2, 8, 5, 5).contiguous(memory_format=torch.channels_last),
        lambda: torch._neg_view(torch.randn(2, 8, 5, 5)),
        lambda: torch._efficientzerotensor((2, 8, 5, 5)),
        lambda: torch.randn(4, 8, 5, 5)[::2],
    ],
)
@pytest.mark.parametrize("name", ["group_norm of images", "group_norm before a sum"])
def test_gradients_of_any_kind(name: str, make: Callable[[], Tensor]) -> None:
    call = CALLS[name]
    tensors = known(call, requires_grad=True)
    for _ in range(4):
        dy = make()
        copy = dy.clone().resolve_neg()
        for gradients in ((dy, None), (torch.randn(2, 8, 5, 5), dy), (dy, torch.randn(2, 8, 5, 5))):
            dense = tuple(copy if each is dy else each for each in gradients)
            got, wanted = steps(call, tensors, gradients), first(call, tensors, dense)  # type: ignore[arg-type]
            for a, b in zip(got, wanted, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_gradient_of_another_order_is_copied_once(taken: Taken, monkeypatch: pytest.MonkeyPatch) -> None:
    call = CALLS["group_norm before a sum"]
    tensors = known(call, requires_grad=True)
    dy = torch.randn(2, 8, 5, 5).contiguous(memory_format=torch.channels_last)
    taken.reset()
    copies, copy = [], Tensor.copy_

    def counted(self: Tensor, *arguments: Any) -> Tensor:
        copies.append(self.shape)
        return copy(self, *arguments)

    for number in range(1, 4):
        y, _ = call(tensors)
        with monkeypatch.context() as patch:
            patch.setattr(Tensor, "copy_", counted)
            torch.autograd.grad(y, tensors["input"], dy)
        assert len(copies) == number
    assert (taken.forwards, taken.backwards) == (3, 0)


def test_one_tensor_as_two_operands(taken: Taken) -> None:
    x = torch.randn(5, 8)
    for _ in range(6):
        y, s = fusednorm.rms_norm(x, (8,), pre_add=x, return_sum=True)
        assert torch.equal(s, x + x)
        torch.testing.assert_close(y, torch.nn.functional.rms_norm(x + x, (8,)), rtol=1e-4, atol=1e-5)
    assert taken.forwards == 0
    assert all(len(each) <= repeats.MOST_GUARDS for each in sum_repeats._calls.values())


def test_nested_tensors_do_not_reach_a_guard() -> None:
    call = CALLS["layer_norm and the sum"]
    tensors = known(call)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor([torch.randn(5, 8)])
    for name in ("input", "pre_add", "weight"):
        with pytest.raises((TypeError, RuntimeError, ValueError)):
            call({**tensors, name: nested})


def test_a_saved_tensor_that_was_changed_is_an_error() -> None:
    call = CALLS["group_norm before a sum"]
    tensors = known(call, requires_grad=True)
    x = tensors["input"].detach()
    y, _ = call({**tensors, "input": x})
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# --- what guards do not see ---


@pytest.mark.parametrize("mode", [Operators, Functions])
def test_modes_see_a_call_that_is_known(mode: type[Any]) -> None:
    call = CALLS["layer_norm and the sum"]
    tensors = known(call)
    with mode() as watching:
        call(tensors)
    assert any("norm_forward" in name for name in watching.seen)
    assert any("add" in name for name in watching.seen)


def test_a_mode_sees_a_backward_that_is_known() -> None:
    call = CALLS["layer_norm and the sum"]
    y, s = call(known(call, requires_grad=True))
    with Operators() as watching:
        torch.autograd.backward((y, s), (torch.ones_like(y), torch.ones_like(y)))
    assert any("norm_backward" in name for name in watching.seen)


def test_a_profiler_sees_a_call_that_is_known() -> None:
    call = CALLS["layer_norm and the sum"]
    tensors = known(call)
    with torch.autograd.profiler.profile() as profile:
        call(tensors)
    assert any("fusednorm::layer_norm" in event.name for event in profile.function_events)


def test_a_trace_and_a_graph_of_a_call_that_is_known() -> None:
    call = CALLS["layer_norm and the sum"]
    tensors = known(call)
    assert "norm_forward" in make_fx(lambda x: call({**tensors, "input": x})[0])(tensors["input"]).code
    compiled = torch.compile(lambda x: call({**tensors, "input": x})[0], backend="eager", fullgraph=True)
    for _ in range(3):
        x = torch.randn(5, 8)
        torch.testing.assert_close(compiled(x), call({**tensors, "input": x})[0], rtol=1e-4, atol=1e-5)


def test_transforms_and_batched_gradients_of_a_call_that_is_known() -> None:
    call = CALLS["layer_norm and the sum"]
    for tensors in (known(call), call.data()):
        batch = torch.randn(3, 5, 8)
        for _ in range(4):  # calls under a transform are not kept either
            got = torch.vmap(lambda x, tensors=tensors: call({**tensors, "input": x})[0])(batch)
        one_by_one = torch.stack([call({**tensors, "input": x})[0] for x in batch])
        torch.testing.assert_close(got, one_by_one, rtol=1e-4, atol=1e-5)
        sum_repeats._calls.clear()
    tensors = known(call, requires_grad=True)
    (y, _), gradients = call(tensors), torch.randn(3, 5, 8)
    got = torch.autograd.grad(y, tensors["input"], gradients, is_grads_batched=True, retain_graph=True)[0]
    alone = [torch.autograd.grad(y, tensors["input"], each, retain_graph=True)[0] for each in gradients]
    one_by_one = torch.stack(alone)
    torch.testing.assert_close(got, one_by_one, rtol=1e-4, atol=1e-5)


def test_hooks_and_checkpoints_of_a_call_that_is_known() -> None:
    call = CALLS["layer_norm and the sum"]
    tensors = known(call, requires_grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        y, _ = call(tensors)
    assert len(saved) > 3
    wanted = torch.autograd.grad(call(tensors)[0].sum(), tensors["input"])
    torch.testing.assert_close(torch.autograd.grad(y.sum(), tensors["input"]), wanted)
    for _ in range(3):
        y = checkpoint(lambda x: call({**tensors, "input": x})[0], tensors["input"], use_reentrant=False)
        assert isinstance(y, Tensor)
        torch.testing.assert_close(torch.autograd.grad(y.sum(), tensors["input"]), wanted)


@pytest.mark.parametrize("name", ["layer_norm and the sum", "group_norm before a sum"])
def test_second_derivatives_of_a_call_that_is_known(name: str) -> None:
    call = CALLS[name]
    tensors = known(call, requires_grad=True)
    dy = torch.randn_like(tensors["input"])
    for calls in (call, lambda tensors: (first_output(call, tensors), None)):
        (gradient,) = torch.autograd.grad(calls(tensors)[0], tensors["input"], dy, create_graph=True)
        second = torch.autograd.grad(gradient.square().sum(), tensors["input"])
        if calls is call:
            wanted = second
    torch.testing.assert_close(second, wanted)
    double = {name: tensor.detach().double().requires_grad_() for name, tensor in tensors.items()}
    for _ in range(3):
        assert torch.autograd.gradcheck(lambda x: call({**double, "input": x})[0], (double["input"],))


def first_output(call: Call, tensors: dict[str, Tensor]) -> Tensor:
    sum_repeats._calls.clear()
    return call(tensors)[0]


def test_one_graph_goes_back_twice() -> None:
    call = CALLS["layer_norm and the sum"]
    tensors = known(call, requires_grad=True)
    y, s = call(tensors)
    assert s is not None
    found = [torch.autograd.grad((y + s).sum(), list(tensors.values()), retain_graph=True) for _ in range(2)]
    assert all(map(torch.equal, *found))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled_autograd_of_a_call_that_is_known() -> None:
    call = CALLS["layer_norm and the sum"]
    tensors = known(call, requires_grad=True)
    wanted = torch.autograd.grad(call(tensors)[0].square().sum(), list(tensors.values()))
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        for _ in range(3):
            for tensor in tensors.values():
                tensor.grad = None
            call(tensors)[0].square().sum().backward()
            got = tuple(tensor.grad for tensor in tensors.values())
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_the_instance_that_is_asked_for_runs(taken: Taken) -> None:
    call = CALLS["layer_norm and the sum"]
    tensors = known(call, requires_grad=True)
    taken.reset()
    with fusednorm.use_instance("reference"):
        call(tensors)
    assert taken.forwards == 0
    y, s = call(tensors)
    taken.reset()
    with fusednorm.use_instance("triton.rows"), pytest.raises(RuntimeError, match="cannot run"):
        torch.autograd.backward((y, s), (torch.ones_like(y), torch.ones_like(y)))
    assert taken.backwards == 0


def test_a_backward_that_no_instance_fuses_is_not_kept(taken: Taken, monkeypatch: pytest.MonkeyPatch) -> None:
    call = CALLS["group_norm before a sum"]
    tensors, dy = call.data(requires_grad=True), torch.randn(2, 8, 5, 5)
    wanted = steps(call, tensors, (dy, None))
    monkeypatch.setattr("fusednorm.dispatch.sum_backward_plan", lambda *_: None)
    for _ in range(5):
        for got, other in zip(steps(call, tensors, (dy, None)), wanted, strict=True):
            torch.testing.assert_close(got, other, rtol=1e-4, atol=1e-5)
    assert (taken.forwards, taken.backwards) == (4, 0)


def test_what_no_gradient_needs_is_freed() -> None:
    call = CALLS["group_norm of gated"]
    for _ in range(4):
        tensors = call.data(requires_grad=True)
        for name in ("pre_gate", "pre_add"):
            tensors[name].requires_grad_(False)
        y, _ = call(tensors)
        added = weakref.ref(tensors.pop("pre_add"))
        gc.collect()
        assert added() is None
        assert y.grad_fn is not None


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_is_known_keeps_no_tensor(name: str) -> None:
    call = CALLS[name]
    for _ in range(5):
        tensors = call.data(requires_grad=True)
        dys = torch.randn(tensors["input"].shape), torch.randn(tensors["input"].shape)
        found = steps(call, tensors, dys)
        seen = [weakref.ref(each) for each in (*tensors.values(), *dys, *found)]
        del tensors, dys, found
        gc.collect()
        assert [each() for each in seen if each() is not None] == []


# --- arguments, bounds and threads ---


def test_an_eps_that_is_a_tensor_is_read_each_time() -> None:
    x, h, eps = torch.randn(5, 8), torch.randn(5, 8), torch.tensor(1e-5)
    for value in (1e-5, 1e-5, 1e-5, 3.0):
        eps.fill_(value)
        got = fusednorm.layer_norm(x, (8,), eps=eps, pre_add=h)  # type: ignore[arg-type]
        torch.testing.assert_close(got, torch.nn.functional.layer_norm(x + h, (8,), eps=value))


def test_a_counter_without_running_statistics(taken: Taken) -> None:
    counter = torch.tensor(0)
    for number in range(1, 5):
        x, h = torch.randn(3, 8, 4, 4), torch.randn(3, 8, 4, 4)
        counted_batch_norm(x, None, None, counter, None, None, True, 0.1, 1e-5, None, 1, post_add=h)
        assert counter.item() == number
    assert taken.forwards == 2


def test_mistakes_are_found_in_a_call_that_is_known() -> None:
    call = CALLS["layer_norm and the sum"]
    tensors = known(call)
    with pytest.raises(ValueError, match="pre_add has shape"):
        call({**tensors, "pre_add": torch.randn(4, 8)})
    with pytest.raises(TypeError, match="pre_add is a int"):
        call({**tensors, "pre_add": 3})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="is on meta"):
        call({**tensors, "pre_add": torch.randn(5, 8, device="meta")})
    with pytest.raises(TypeError, match="sparse"):
        call({**tensors, "pre_add": tensors["pre_add"].to_sparse()})


def test_the_calls_and_guards_that_are_kept_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "MOST_CALLS", 4)
    monkeypatch.setattr(repeats, "MOST_GUARDS", 3)
    for _ in range(3):
        for size in range(1, 10):
            x = torch.randn(size, 8)
            got = fusednorm.rms_norm(x, (8,), pre_add=2 * x)
            torch.testing.assert_close(got, torch.nn.functional.rms_norm(3 * x, (8,)), rtol=1e-4, atol=1e-5)
            assert len(sum_repeats._calls) <= 4
    sum_repeats._calls.clear()
    for _ in range(3):
        for step in range(1, 10):
            x = torch.randn(4, 8 * step)[:, ::step]
            fusednorm.rms_norm(x, (8,), pre_add=torch.randn(4, 8))
    assert all(len(forwards) <= 3 for forwards in sum_repeats._calls.values())
    monkeypatch.setattr(sum_autograd, "MOST_GUARDS", 3)
    call = CALLS["rms_norm of a sum"]
    tensors = known(call, requires_grad=True)
    for step in range(1, 10):
        dy = torch.randn(5, 8 * step)[:, ::step]
        got, wanted = steps(call, tensors, (dy, None)), first(call, tensors, (dy.contiguous(), None))
        assert all(map(torch.equal, got, wanted))
    kept = [forward for forwards in sum_repeats._calls.values() for forward in forwards]
    assert max(len(backwards) for forward in kept for backwards in forward.call.backwards.values()) <= 3


def test_threads_share_a_call(taken: Taken) -> None:
    call = CALLS["layer_norm and the sum"]
    shared = call.data(requires_grad=True)
    wrong: list[str] = []

    def work(number: int) -> None:
        x = (torch.full((5, 8), float(number)) + torch.arange(8.0)).requires_grad_()
        tensors = {**shared, "input": x}
        wanted, dy = x + shared["pre_add"], torch.ones(5, 8)
        for _ in range(100):
            y, s = call(tensors)
            assert s is not None
            (gradient,) = torch.autograd.grad([y, s], x, [torch.zeros(5, 8), dy])
            if not torch.equal(s, wanted) or not torch.allclose(gradient, dy):
                wrong.append(f"thread {number}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert taken.backwards > 0
