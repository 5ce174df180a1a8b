"""Models whose code hides from reading and tracing what becomes of a norm's result: convert_ changes none of their
results, and nothing else of them."""

from __future__ import annotations

import copy
import types
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from convert_support import converted, fused, left, summed
from torch import Tensor, nn

import fusednorm

IMAGE = (2, 8, 5, 6)


pytestmark = pytest.mark.usefixtures("seeded_reference")


# --- two norms in one sum ---


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(8, 8, 1), nn.GroupNorm(4, 8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 1), nn.GroupNorm(2, 8)
        self.act = nn.ReLU()


class InStatements(Two):
    def forward(self, x: Tensor) -> Tensor:
        a = self.norm1(self.conv1(x))
        b = self.norm2(self.conv2(x))
        return F.relu(a + b)


class InBoth(Two):
    def forward(self, x: Tensor) -> Tensor:
        a = self.norm1(self.conv1(x))
        return self.act(a + self.norm2(self.conv2(x)))


class InMoreStatements(Two):
    def forward(self, x: Tensor) -> Tensor:
        a = self.conv1(x)
        a = self.norm1(a)
        b = self.conv2(x)
        b = self.norm2(b)
        return self.act(a + b)


@pytest.mark.parametrize("kind", [InStatements, InBoth, InMoreStatements])
def test_one_of_two_norms_takes_their_sum(kind: type[Two]) -> None:
    report = converted(kind(), torch.randn(IMAGE))
    assert len(fused(report)) == len(summed(report)) == 1
    (reason,) = left(report).values()
    assert reason.startswith("not fused: another norm takes 'a + ")
    assert reason.endswith(f" of {kind.__name__}.forward")


# --- names that fusednorm's modules have ---


class ActsItself(nn.BatchNorm2d):
    def __init__(self) -> None:
        super().__init__(8)
        self.activation = nn.PReLU()


class HasParameter(nn.BatchNorm2d):
    def __init__(self) -> None:
        super().__init__(8)
        self.channel_dim = nn.Parameter(torch.zeros(()))


@pytest.mark.parametrize(("kind", "name"), [(ActsItself, "activation"), (HasParameter, "channel_dim")])
def test_a_norm_whose_child_or_parameter_has_a_name_of_fusednorms(kind: type[nn.Module], name: str) -> None:
    model = nn.Sequential(kind())
    keys = list(model.state_dict())
    report = fusednorm.convert_(model)
    assert left(report)["0"] == f"it has an attribute {name!r}, which fusednorm's module has too"
    assert list(model.state_dict()) == keys
    assert type(model[0]) is kind


# --- what a trace must not change ---


class Traced(nn.Module):
    """Only a trace shows what is behind the norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.BatchNorm2d(8), nn.ReLU()])

    def both(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


class Follows(Traced):
    """A moving average of weights, as in contrastive learning."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = nn.Conv2d(8, 8, 1)
        self.fast = nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Any:
        for slow, fast in zip(self.slow.parameters(), self.fast.parameters(), strict=True):
            slow.data = slow.data * 0.5 + fast.data * 0.5
        return self.both(self.slow(x))


class Scales(Follows):
    def forward(self, x: Tensor) -> Any:
        for slow in self.slow.parameters():
            slow.data.mul_(0.5)
        return self.both(self.slow(x))


class CountsInABuffer(Traced):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        for buffer in self.buffers(recurse=False):
            buffer.add_(1)
        return self.both(x)


@pytest.mark.parametrize("kind", [Follows, Scales, CountsInABuffer])
def test_converting_changes_no_state(kind: type[nn.Module]) -> None:
    model = kind()
    before = copy.deepcopy(model.state_dict())
    fusednorm.convert_(model)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


class Notes(Traced):
    """Attributes that a forward changes: a tensor, collections in collections, objects."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.calls = torch.zeros(1), Counter(all=0)
        self.cache: dict[str, dict[str, Any]] = {"last": {}}
        self.last = types.SimpleNamespace(x=None)

    def forward(self, x: Tensor) -> Any:
        self.calls["all"] += 1
        before = self.last.x
        self.cache["last"]["x"] = self.last.x = x
        return self.both(x) if before is None else self.both(x) + before


class CountsInATensor(Traced):
    def __init__(self) -> None:
        super().__init__()
        self.step = torch.zeros(1)

    def forward(self, x: Tensor) -> Any:
        self.step += 1
        return self.both(x)


def test_converting_leaves_attributes_as_they_were() -> None:
    notes, counts = Notes(), CountsInATensor()
    fusednorm.convert_(notes)
    assert notes.calls == {"all": 0}
    assert notes.cache == {"last": {}}
    assert notes.last.x is None
    assert type(notes(torch.randn(IMAGE))) is Tensor
    fusednorm.convert_(counts)
    assert counts.step.tolist() == [0]


class Refers(Traced):
    def __init__(self, other: Any) -> None:
        super().__init__()
        self.other = other
        self.more = {"in": [other], "of": types.SimpleNamespace(other=other)}
        self.function = lambda: other

    def forward(self, x: Tensor) -> Any:
        return self.both(x) if self.other is None else self.other(x)


def test_weak_proxies_of_what_is_gone() -> None:
    """Such a proxy raises at any question."""
    other = Runner(None)
    model = Refers(weakref.proxy(other))
    del other
    assert "layers.0" in {entry.path for entry in fusednorm.convert_(model).converted}


class StopsInBetween(Traced):
    def forward(self, x: Tensor) -> Any:
        torch.set_grad_enabled(False)
        if x.mean() > 100:
            return x
        torch.set_grad_enabled(True)
        return self.both(x)


def test_converting_leaves_the_mode_of_autograd() -> None:
    fusednorm.convert_(StopsInBetween())
    assert torch.is_grad_enabled()


class ByNumpysChance(Traced):
    def forward(self, x: Tensor) -> Any:
        h = self.layers[0](x)
        return self.layers[1](h + 1 if np.random.rand() < 0.5 else h)


class ByItsOwnChance(Traced):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Any:
        h = self.layers[0](x)
        return self.layers[1](h + 1 if torch.rand(1, generator=self.generator).item() < 0.5 else h)


def test_chance_of_other_generators() -> None:
    own = ByItsOwnChance()
    for number in range(4):
        np.random.seed(number)
        before = np.random.get_state()[1].tolist()  # type: ignore[index]
        assert not fused(fusednorm.convert_(ByNumpysChance()))
        assert np.random.get_state()[1].tolist() == before  # type: ignore[index]
        state = own.generator.manual_seed(number).get_state()
        assert not fused(fusednorm.convert_(own))
        assert torch.equal(own.generator.get_state(), state)


# --- paths that a trace does not take ---


class LooksUp(Traced):
    def forward(self, batch: dict[str, Tensor]) -> Any:
        h = self.layers[0](batch["x"])
        return self.layers[1](h if batch.get("mask") is None else h * 3)


class LooksUpByName(Traced):
    def forward(self, x: Tensor, **more: Tensor) -> Any:
        h = self.layers[0](x)
        mask = more.get("mask")
        if mask is not None:
            h = h * 3
        return self.layers[1](h)


class AsksForATensor(Traced):
    def forward(self, x: Any) -> Any:
        h = self.layers[0](x)
        return self.layers[1](h * 3 if isinstance(x, Tensor) else h)


class AsksForOneOfTwo(Traced):
    def forward(self, x: Tensor, a: Any = None, b: Any = None) -> Any:
        h = self.layers[0](x)
        return self.layers[1](h * 3 if a is not None and b is None else h)


class AsksForTwoOfThree(Traced):
    def forward(self, x: Tensor, a: Any = None, b: Any = None, c: Any = None) -> Any:
        h = self.layers[0](x)
        return self.layers[1](h * 3 if a is not None and b is not None and c is None else h)


class UnderAutocast(Traced):
    def forward(self, x: Tensor) -> Any:
        h = self.layers[0](x)
        with torch.autocast("cpu", torch.bfloat16):
            return self.layers[1](h)


class WithoutGradients(Traced):
    def forward(self, x: Tensor) -> Any:
        h = self.layers[0](x)
        with torch.no_grad():
            return self.layers[1](h)


class AsksForGradients(Traced):
    def forward(self, x: Tensor) -> Any:
        h = self.layers[0](x)
        return self.layers[1](h if torch.is_grad_enabled() else h + 1)


@pytest.mark.parametrize(
    ("kind", "more", "named"),
    [
        (LooksUp, (), {}),
        (LooksUpByName, (), {"mask": torch.ones(1)}),
        (AsksForATensor, (), {}),
        (AsksForOneOfTwo, (torch.ones(1),), {}),
        (AsksForTwoOfThree, (torch.ones(1), torch.ones(1)), {}),
        (UnderAutocast, (), {}),
        (WithoutGradients, (), {}),
        (AsksForGradients, (), {}),
    ],
)
def test_paths_that_no_trace_takes(kind: type[nn.Module], more: tuple[Any, ...], named: dict[str, Any]) -> None:
    model, x = kind().eval(), torch.randn(IMAGE)
    given: Any = {"x": x, "mask": x} if kind is LooksUp else x

    def result() -> Any:
        with torch.set_grad_enabled(kind is not AsksForGradients):
            return model(given, *more, **named)

    expected = result()
    assert not fused(fusednorm.convert_(model))
    found = result()
    torch.testing.assert_close(found, expected)
    assert found.requires_grad == expected.requires_grad


# --- who looks at an activation, or changes it ---


class Layers(nn.Module):
    def __init__(self, collection: Callable[..., nn.Module] = nn.Sequential) -> None:
        super().__init__()
        layers = [nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU()]
        self.features = collection(*layers) if collection is nn.Sequential else collection(layers)


class Features(Layers):
    """Results behind each activation, as for a perceptual loss."""

    def forward(self, x: Tensor) -> Any:
        taps = []
        for layer in self.features:  # type: ignore[union-attr]
            x = layer(x)
            if isinstance(layer, nn.ReLU):
                taps.append(x)
        return torch.stack([x, *taps])


class AsksForOthers(Layers):
    def forward(self, x: Tensor) -> Any:
        for layer in self.features:  # type: ignore[union-attr]
            x = layer(x * 1) if isinstance(layer, (nn.Conv2d, nn.Linear)) else layer(x)
        return x


class AsksForASlope(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.BatchNorm2d(8), nn.LeakyReLU(0.3))

    def forward(self, x: Tensor) -> Any:
        return self.block(x) * self.block[1].negative_slope


class Anneals(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act, self.slope = nn.BatchNorm2d(8), nn.LeakyReLU(0.3), 0.5

    def forward(self, x: Tensor) -> Any:
        self.act.negative_slope = self.slope
        return self.act(self.norm(x))


class Swaps(Anneals):
    def forward(self, x: Tensor) -> Any:
        self.act = nn.Tanh()  # type: ignore[assignment]
        return self.act(self.norm(x))


@pytest.mark.parametrize("kind", [Features, partial(Features, nn.ModuleList), AsksForASlope, Anneals, Swaps])
def test_an_activation_that_code_looks_at_or_changes_stays(kind: Callable[[], nn.Module]) -> None:
    assert not fused(converted(kind(), torch.randn(IMAGE)))


def test_a_question_that_an_identity_answers_alike_keeps_nothing() -> None:
    for collection in (nn.Sequential, nn.ModuleList):
        assert set(fused(converted(AsksForOthers(collection), torch.randn(IMAGE)))) == {"features.1"}


# --- callers that no reading of methods by their names finds ---


class Hidden(nn.Module):
    """A block of which the norm is called once more."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.conv = nn.Sequential(nn.BatchNorm2d(8), nn.ReLU()), nn.Conv2d(8, 8, 1)

    def once_more(self, x: Tensor) -> Any:
        return self.block(x) + self.block[0](x)


def noted(forward: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(self: Any, *arguments: Any) -> Any:  # without functools.wraps
        return forward(self, *arguments)

    return wrapper


class Wrapped(Hidden):
    @noted
    def forward(self, x: Tensor) -> Any:
        return self.block(x) + self.block[0](x)


class AsLambda(Hidden):
    forward = lambda self, x: self.block(x) + self.block[0](x)  # noqa: E731


def without_source() -> type[nn.Module]:
    names: dict[str, Any] = {"Hidden": Hidden, "__name__": __name__}
    code = "class Unread(Hidden):\n    def forward(self, x):\n        return self.block(x) + self.block[0](x)\n"
    exec(code, names)
    kind: type[nn.Module] = names["Unread"]
    return kind


class KeepsASlice(Hidden):
    def __init__(self) -> None:
        super().__init__()
        self.taps = [self.block[:1]]

    def forward(self, x: Tensor) -> Any:
        return self.block(x) + self.taps[0](x)


class KeepsSteps(Hidden):
    def __init__(self) -> None:
        super().__init__()
        self.steps = [self.once_more]

    def __deepcopy__(self, memo: Any) -> Any:  # a copy has steps of its own
        made = type(self)().train(self.training)
        made.load_state_dict(self.state_dict())
        return made

    def forward(self, x: Tensor) -> Any:
        for step in self.steps:
            x = step(x)
        return x


class KeepsPartials(KeepsSteps):
    def __init__(self) -> None:
        super().__init__()
        self.steps = [partial(self.once_more)]


class KeepsClosures(KeepsSteps):
    def __init__(self) -> None:
        super().__init__()
        norm = self.block[0]
        self.taps = {"norm": lambda x: norm(x)}

    def forward(self, x: Tensor) -> Any:
        return self.block(x) + self.taps["norm"](x)


class HooksAnother(KeepsSteps):
    def __init__(self) -> None:
        super().__init__()
        norm = self.block[0]
        self.conv.register_forward_hook(lambda module, given, result: norm(result))

    def forward(self, x: Tensor) -> Any:
        return self.block(self.conv(x))


class Runner:
    def __init__(self, model: Any) -> None:
        self.model = model

    def run(self, x: Tensor) -> Any:
        return self.model.block[0](x)


class MakesARunner(Hidden):
    def forward(self, x: Tensor) -> Any:
        return self.block(x) + Runner(self).run(x)


class KeepsARunner(Hidden):
    def __init__(self) -> None:
        super().__init__()
        self.runner = Runner(self)

    def forward(self, x: Tensor) -> Any:
        return self.block(x) + self.runner.run(x)


class HasATable(Hidden):
    def _tap(self, x: Tensor) -> Any:
        return self.block[0](x)

    table: ClassVar[Any] = {"tap": _tap}

    def forward(self, x: Tensor) -> Any:
        return self.block(x) + self.table["tap"](self, x)


class Backwards(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.BatchNorm2d(8), nn.ReLU())

    def __iter__(self) -> Any:
        return iter([*self._modules.values()][::-1])


@pytest.mark.parametrize(
    "kind",
    [
        Wrapped, AsLambda, without_source(), KeepsASlice, KeepsSteps, KeepsPartials, KeepsClosures, HooksAnother,
        MakesARunner, KeepsARunner, HasATable, Backwards,
    ],
)  # fmt: skip
def test_a_norm_that_hidden_code_calls_too(kind: type[nn.Module]) -> None:
    model, x = kind().eval(), torch.randn(IMAGE)
    expected = model(x)
    assert not fused(fusednorm.convert_(model))
    torch.testing.assert_close(model(x), expected)


class MadeBefore(nn.Module):
    """Copies and pickles pass on what a class's __new__ takes, which a class made from it would lose."""

    def __new__(cls, channels: int) -> Any:
        return super().__new__(cls)

    def __getnewargs__(self) -> tuple[int]:
        return (8,)

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Any:
        return F.relu(self.norm(x))


def test_a_class_whose_copies_pass_on_arguments_is_not_edited() -> None:
    model, x = MadeBefore(8).eval(), torch.randn(IMAGE)
    assert left(fusednorm.convert_(model))["norm"] == "not fused: MadeBefore has a way of its own to be pickled"
    torch.testing.assert_close(copy.deepcopy(model)(x), model(x))


class OneNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(8)


class AsksForItsClass(OneNorm):
    def forward(self, x: Tensor) -> Any:
        y = F.relu(self.norm(x))
        return y * 2 if type(self) is AsksForItsClass else y


class CountsInItsClass(OneNorm):
    calls = 0

    def forward(self, x: Tensor) -> Any:
        type(self).calls += 1
        return F.relu(self.norm(x))


@pytest.mark.parametrize("kind", [AsksForItsClass, CountsInItsClass])
def test_a_class_that_asks_for_itself_is_not_edited(kind: type[nn.Module]) -> None:
    report = converted(kind(), torch.randn(IMAGE))
    assert left(report)["norm"] == f"not fused: {kind.__name__}.forward asks for the class that it is in"


class Base(OneNorm):
    def forward(self, x: Tensor) -> Any:
        return F.silu(self.norm(x))


class StandsInForItsBase(Base):
    def forward(self, x: Tensor) -> Any:
        return F.relu(self.norm(x))


def test_a_method_of_a_base_that_nothing_calls_is_not_read() -> None:
    report = converted(StandsInForItsBase(), torch.randn(IMAGE))
    assert fused(report) == {"norm": "relu, the code of StandsInForItsBase"}


def test_scripted_models_are_refused_with_what_works() -> None:
    model = torch.jit.trace(nn.Sequential(nn.BatchNorm2d(8)).eval(), torch.randn(IMAGE))
    with pytest.raises(ValueError, match=r"call convert_ first, and then torch\.jit\.trace$"):
        fusednorm.convert_(model)


def test_asking_for_an_attribute_runs_no_code_of_a_module() -> None:
    class Deprecates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.BatchNorm2d(8), nn.ReLU())

        def __getattr__(self, name: str) -> Any:
            if name == "patch_size":
                raise AssertionError("asked for")
            return super().__getattr__(name)

        def forward(self, x: Tensor) -> Any:
            for module in self.modules():
                if isinstance(module, nn.Conv2d) and hasattr(module, "patch_size"):
                    x = x + 1
            return self.block(x)

    assert set(fused(fusednorm.convert_(Deprecates()))) == {"block.0"}
