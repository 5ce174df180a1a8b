"""Code that reaches into a model past the forwards that convert_ judges by, and what a trace must not leave behind."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from convert_support import Acting, converted, fused, left
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import fusednorm

IMAGE = (2, 8, 5, 6)


pytestmark = pytest.mark.usefixtures("seeded_reference")


def features() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(8, 8, 1), nn.GroupNorm(4, 8), nn.SiLU(), nn.Conv2d(8, 8, 1))


class Taps(nn.Module):
    """Code that takes a Sequential apart; ``trusted`` depends on values, so that no trace shows what happens."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.blocks = features(), nn.ModuleList([features()])
        self.inner = Acting()

    def forward(self, x: Tensor) -> Tensor:
        trusted = float(x.detach().sum()) != 12345.0
        return self.tap(x) if trusted else x

    def tap(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Iterates(Taps):
    def tap(self, x: Tensor) -> Tensor:
        taps = []
        for _, layer in enumerate(self.features):
            x = layer(x)
            taps.append(x)
        return torch.cat(taps)


class Slices(Taps):
    def tap(self, x: Tensor) -> Tensor:
        stem = self.features[:2]
        return stem(x) * self.features[2:](x)


class Indexes(Taps):
    def tap(self, x: Tensor) -> Tensor:
        return sum((block[1](x) for block in self.blocks), self.blocks[0](x))


class Views(Taps):
    def tap(self, x: Tensor) -> Tensor:
        layers = [layer for _, layer in self.features.named_children()]
        x = layers[0](x)
        return layers[1](x) * x


class Reaches(Taps):
    def tap(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.inner.norm(x)


class Named(Taps):
    def tap(self, x: Tensor) -> Tensor:
        return getattr(self.inner, "".join(["no", "rm"]))(x) + self.inner(x)


class Below(Taps):
    def tap(self, x: Tensor) -> Tensor:
        norms = [module for module in self.modules() if isinstance(module, nn.GroupNorm)]
        return self.inner(x) * norms[-1](x)


class ByPath(Taps):
    def tap(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.get_submodule("inner.norm")(x)


class Pops(Taps):
    def tap(self, x: Tensor) -> Tensor:
        layers = [*self.features]
        x = layers.pop(0)(x)
        return layers.pop(0)(x) * x


def second_of(conv: Any, norm: Any, x: Tensor) -> Tensor:
    return norm(x)


class Spreads(Taps):
    def tap(self, x: Tensor) -> Tensor:
        return self.features(x) * second_of(*self.features[:2], x)


def of_features(tap: Callable[[Any, Tensor], Tensor]) -> type[Taps]:
    """A class whose code gives a norm of ``features`` to code that nobody reads."""
    return type(tap.__name__, (Taps,), {"tap": tap})


@of_features
def Checkpointed(self: Any, x: Tensor) -> Tensor:  # noqa: N802
    for layer in self.features:
        x = -checkpoint(layer, x, use_reentrant=False)
    return x


@of_features
def Mapped(self: Any, x: Tensor) -> Tensor:  # noqa: N802
    return self.features(x) * next(map(self.features[1], [x]))


@of_features
def Collected(self: Any, x: Tensor) -> Tensor:  # noqa: N802
    layers: list[Any] = []
    layers.extend(self.features)
    return self.features(x) * layers[1](x)


@of_features
def Stored(self: Any, x: Tensor) -> Tensor:  # noqa: N802
    layers = {}
    layers["norm"] = self.features[1]
    return self.features(x) * layers["norm"](x)


@of_features
def Keyed(self: Any, x: Tensor) -> Tensor:  # noqa: N802
    layers = {name: layer for name, layer in self.features.named_children() if layer is not None}
    return self.features(x) * layers["1"](x)


@of_features
def Added(self: Any, x: Tensor) -> Tensor:  # noqa: N802
    layers = list(self.features) + list(self.features)
    return self.features(x) * layers[1](x)


@of_features
def Returned(self: Any, x: Tensor) -> Tensor:  # noqa: N802
    def layer(place: int) -> Any:
        return self.features[place]

    return self.features(x) * layer(1)(x)


@of_features
def Matched(self: Any, x: Tensor) -> Tensor:  # noqa: N802
    match list(self.features):
        case [_, norm, *_]:
            return self.features(x) * norm(x)
    return x


@of_features
def Given(self: Any, x: Tensor) -> Tensor:  # noqa: N802
    def run(value: Tensor, layer: Any = self.features[1]) -> Tensor:
        return layer(value)

    return self.features(x) * run(x)


@of_features
def Applied(self: Any, x: Tensor) -> Tensor:  # noqa: N802
    seen: list[Tensor] = []
    handle = self.features[1].register_forward_hook(lambda module, inputs, output: seen.append(output))
    x = self.features(x)
    handle.remove()
    return seen[0] * x


UNREAD = (Checkpointed, Mapped, Collected, Stored, Keyed, Added, Returned, Matched, Given, Applied)


class Casts(Taps):
    def tap(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.inner.norm.to(x.dtype).eval()(x)


class Holds(Taps):
    def tap(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        for module in self.children():
            if isinstance(module, Acting):
                y = y * module.norm(x)
        return y


def past_the_block(block: Any, x: Tensor) -> Tensor:
    return first_of(block)(x)


def first_of(block: Any) -> Any:
    return block.norm


class Helped(Taps):
    """A function that gets the whole model, and gives a part of it to another."""

    def tap(self, x: Tensor) -> Tensor:
        return helped(self, x)


def helped(model: Any, x: Tensor) -> Tensor:
    y: Tensor = model.inner(x)
    return y * past_the_block(model.inner, x)


class Handed(Taps):
    """A method that gets a sequence."""

    def tap(self, x: Tensor) -> Tensor:
        return self.features(x) * self.run(x, *[0], layers=self.features)

    def run(self, x: Tensor, *more: int, layers: Any) -> Tensor:
        for layer in layers[:2]:
            x = layer(x)
        return x


class HandedOn(Taps):
    def tap(self, x: Tensor) -> Tensor:
        return self.features(x) * partial(self.run, self.features)(x)

    @staticmethod
    def run(layers: Any, x: Tensor) -> Tensor:
        y: Tensor = layers[1](x)
        return y


class Reduces(Taps):
    def tap(self, x: Tensor) -> Tensor:
        return functools.reduce(lambda total, layer: total + layer(x), self.features, x)


class Maps(Taps):
    def tap(self, x: Tensor) -> Tensor:
        taps = []

        def step(layer: nn.Module) -> Tensor:
            taps.append(layer(x))
            return x * len(taps)

        return sum(map(step, self.features)) * sum(taps)


class First(nn.Sequential):
    @property
    def first(self) -> Any:
        return self[0]

    @cached_property
    def second(self) -> Any:
        return self[1]


class AsksAProperty(Taps):
    def __init__(self) -> None:
        super().__init__()
        self.features = First(nn.GroupNorm(4, 8), nn.SiLU(), nn.GroupNorm(4, 8), nn.SiLU())

    def tap(self, x: Tensor) -> Tensor:
        return self.features(x) * self.features.first(x)


class Delegates(Taps):
    def __getattr__(self, name: str) -> Any:
        modules = self.__dict__["_modules"]
        return modules[name] if name in modules else getattr(modules["inner"], name)

    def tap(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x) * self.norm(x)
        return y


class KeepsElsewhere(Taps):
    """Collections and objects that torch does not know, and a function made around the model."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = {"first": SimpleNamespace(norms=[self.inner.norm])}

    def tap(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x) * self.kept["first"].norms[0](x)
        return y


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        (Below, "inner.norm"),
        (ByPath, "inner.norm"),
        (Helped, "inner.norm"),
        (Handed, "features.1"),
        (HandedOn, "features.1"),
        (Reduces, "features.1"),
        (Maps, "features.1"),
        (AsksAProperty, "features.0"),
        (Delegates, "inner.norm"),
        (KeepsElsewhere, "inner.norm"),
    ],
)
def test_a_norm_that_is_reached_by_detours_keeps_its_activation_apart(kind: type[Taps], path: str) -> None:
    report = converted(kind(), torch.randn(IMAGE))
    assert left(report)[path].endswith("calls the norm as well")
    assert path not in fused(report)


def test_a_function_that_a_module_keeps_calls_what_it_was_made_around() -> None:
    class Kept(Taps):
        run: Callable[[Tensor], Tensor]

        def tap(self, x: Tensor) -> Tensor:
            return self.inner(x) * self.run(x)

    model = Kept()
    model.run = lambda x: model.inner.norm(x)
    assert "inner.norm" not in fused(fusednorm.convert_(model))


class Past(nn.Module):
    """A class that calls its own norm in another way too."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.norm(x)) + self.norm.forward(x)


class PastByName(Past):
    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.norm(x)) + self.by_name(x, "norm")

    def by_name(self, x: Tensor, name: str) -> Tensor:
        return getattr(self, name)(x)


class PastInSequence(nn.Sequential):
    """A Sequential with a method of its own, which a forward elsewhere calls."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act = nn.GroupNorm(4, 8), nn.SiLU()

    def raw(self, x: Tensor) -> Tensor:
        return self.norm(x)


class PastByProperty(Past):
    @property
    def first(self) -> nn.Module:
        return self.norm

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.norm(x)) + self.first(x)


class PastTheCall(Acting):
    """What a trace shows is the forward."""

    def __call__(self, x: Tensor) -> Any:
        return super().__call__(x) * self.norm(x)


class RunsTheForward(Acting):
    """A trace does not show a forward that is not called by its module."""

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm.__call__(x)) * self.norm.forward(x)


class AsksForTheClass(Acting):
    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(x)) if isinstance(self.act, nn.SiLU) and isinstance(self.norm, nn.GroupNorm) else x


@pytest.mark.parametrize("kind", [PastByProperty, PastTheCall, RunsTheForward, AsksForTheClass])
def test_a_class_whose_activation_stays(kind: type[nn.Module]) -> None:
    assert not converted(kind(), torch.randn(IMAGE)).fused


class Reads(nn.Module):
    """Code that reads an attribute of the activation, which an Identity does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act = nn.GroupNorm(4, 8), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.norm(x))
        return y * 2 if self.act.inplace else y


def test_an_activation_whose_attributes_are_read_keeps_its_place() -> None:
    model = Reads()
    assert fused(converted(model, torch.randn(IMAGE))) == {"norm": "silu, the code of Reads"}
    assert type(model.act) is nn.SiLU


class Caller(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = PastInSequence()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) * self.body.raw(x)


class Whole(Taps):
    """Sequences that are called as a whole, one after the other."""

    def tap(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks[:1]):
            x = block(x) + i
        modes = [layer.training for layer in self.features.children()]
        return self.features(x) * len(modes)

    def unused(self, x: Tensor) -> Any:
        """No forward leads here."""
        return [layer(x) for layer in self.features]


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        (Iterates, "features.1"),
        (Slices, "features.1"),
        (Indexes, "blocks.0.1"),
        (Views, "features.1"),
        (Reaches, "inner.norm"),
        (Pops, "features.1"),
        (Spreads, "features.1"),
        *((kind, "features.1") for kind in UNREAD),
        (Casts, "inner.norm"),
        (Holds, "inner.norm"),
        (Named, "inner.norm"),
    ],
)
def test_a_norm_that_other_code_calls_too_keeps_its_activation_apart(kind: type[Taps], path: str) -> None:
    report = converted(kind(), torch.randn(IMAGE))
    assert left(report)[path] == f"not fused: {kind.__name__}.tap calls the norm as well"
    assert path not in fused(report)


@pytest.mark.parametrize(
    ("model", "path", "caller"),
    [
        (Past(), "norm", "Past.forward"),
        (PastByName(), "norm", "PastByName.by_name"),
        (Caller(), "body.norm", "PastInSequence.raw"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_norm_that_its_own_class_calls_in_another_way(model: nn.Module, path: str, caller: str) -> None:
    report = converted(copy.deepcopy(model), torch.randn(IMAGE))
    assert left(report)[path] == f"not fused: {caller} calls the norm as well"


class Hooked(Acting):
    """Calls on what is attached to modules, as the dtype of diffusers' models makes: no calls of the modules."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).to(self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        for name, module in self.named_modules():
            if hasattr(module, "registry"):
                return module.registry.get_hook(name)
        for module in self.modules():
            if hasattr(module, "registry"):
                return module.registry.get_hook()
        return torch.float64


def test_calls_on_what_is_attached_to_a_module() -> None:
    assert set(fused(converted(Hooked(), torch.randn(IMAGE)))) == {"norm"}


def halved(x: Tensor) -> Tensor:
    return x.to(torch.float64).reshape(x.shape) / 2


class Checkpoints(Taps):
    """A function that gets a module, and whose result no reading shows to be a tensor, as in diffusers' blocks."""

    checkpoint: Any = None

    def tap(self, x: Tensor) -> Tensor:
        for block in [self.inner]:
            x = self.checkpoint(block, x) if self.checkpoint else block(x)
            x, y = halved(x), x.flatten(1)
        return x + y.view(x.shape)


def test_methods_of_tensors_that_may_hold_a_module_for_all_that_is_read() -> None:
    assert "inner.norm" in fused(converted(Checkpoints(), torch.randn(IMAGE)))


def test_sequences_that_are_called_as_a_whole_are_fused() -> None:
    assert {"features.1", "blocks.0.1"} <= set(fused(converted(Whole(), torch.randn(IMAGE))))


class Plain(nn.Module):
    """A loop that a trace follows."""

    def __init__(self) -> None:
        super().__init__()
        self.features = features()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.features:
            x = layer(x)
        return x


def test_a_trace_shows_that_a_loop_over_a_sequence_is_safe() -> None:
    assert fused(converted(Plain(), torch.randn(IMAGE))) == {"features.1": "silu, the only user in a trace"}


class Keeps(Plain):
    """A forward that keeps what it computed."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = super().forward(x)
        self.kept.append(self.last)
        return self.last


def test_a_trace_leaves_nothing_in_a_model_and_runs_no_hooks() -> None:
    seen: list[Any] = []
    model = nn.Sequential(Keeps(), nn.Conv2d(8, 8, 1))
    model[0].register_forward_hook(lambda module, inputs, output: seen.append(output))
    report = fusednorm.convert_(model)
    assert list(fused(report)) == ["0.features.1"]
    assert (seen, model[0].kept, model[0].last) == ([], [], None)


class Squared(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.square()


class Shared(nn.Module):
    """One activation for all, so that the class is rewritten."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act, self.scale = nn.GroupNorm(4, 8), nn.SiLU(), nn.Parameter(torch.ones(8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.act(self.norm(x)) * self.scale)


@pytest.mark.parametrize("place", ["norm", ""])
def test_a_parametrization_since_the_conversion_is_removed_before_reverting(place: str) -> None:
    model, x = Shared(), torch.randn(IMAGE)
    expected = model(x)
    fusednorm.convert_(model)
    module, name = model.get_submodule(place), "weight" if place else "scale"
    parametrize.register_parametrization(module, name, Squared())
    with pytest.raises(ValueError, match=rf"revert_: {place or 'the model'!r} has become a Parametrized"):
        fusednorm.revert_(model)
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)
    parametrize.remove_parametrizations(module, name)
    fusednorm.revert_(model)
    assert [type(each) for each in model.modules()] == [Shared, nn.GroupNorm, nn.SiLU]
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)


def test_a_parametrized_block_keeps_its_code() -> None:
    model, x = Shared(), torch.randn(IMAGE)
    parametrize.register_parametrization(model, "scale", Squared())
    expected = model(x)
    assert not fusednorm.convert_(model).fused
    parametrize.remove_parametrizations(model, "scale")
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)


def in_sequence() -> nn.Module:
    return nn.Sequential(nn.GroupNorm(4, 8), nn.SiLU())


@pytest.mark.parametrize(("make", "part"), [(in_sequence, 0), (in_sequence, 1), (Shared, 0)])
def test_a_part_that_shares_a_fold_with_the_rest_is_not_reverted(make: Any, part: int) -> None:
    model, x = make(), torch.randn(IMAGE)
    fusednorm.convert_(model)
    expected = model(x)
    with pytest.raises(ValueError, match="'the model' shares what convert_ fused with a module outside of this model"):
        fusednorm.revert_(list(model.children())[part])
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
    fusednorm.revert_(copy.deepcopy(nn.ModuleList([model, copy.deepcopy(model)])))
