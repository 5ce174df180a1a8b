"""Models in which something beside the activation may see a norm's result: convert_ changes none of their results."""

from __future__ import annotations

import functools
import random
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from convert_support import Acting, Inner, Parts, fused
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusednorm

IMAGE = (2, 8, 5, 6)


pytestmark = pytest.mark.usefixtures("seeded_reference")


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Acting()


class CallsTheActivation(Around):
    def forward(self, x: Tensor) -> Tensor:
        return self.block.act(-self.block(x))


class AsksForAMethod(Around):
    mode = "tensor"

    def forward(self, x: Tensor) -> Any:
        return getattr(self, f"forward_{self.mode}")(x)

    def forward_tensor(self, x: Tensor) -> Tensor:
        return self.block(x) + self.block.norm(x)


class HoldsAMethod(Around):
    def __init__(self) -> None:
        super().__init__()
        self.run = self._both

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)

    def _both(self, x: Tensor) -> Tensor:
        return self.block(x) + self.block.norm(x)


class AsksForAChild(Around):
    name = "block"

    def forward(self, x: Tensor) -> Any:
        return self.block(x) + getattr(self, self.name).norm(x)


class HoldsAPartial(Around):
    def __init__(self) -> None:
        super().__init__()
        self.tap = partial(checkpoint, self.block.norm, use_reentrant=False)

    def forward(self, x: Tensor) -> Any:
        return self.block(x) + self.tap(x)


class Tap:
    def __init__(self, block: Acting) -> None:
        self.block = block

    def __call__(self, x: Tensor) -> Any:
        return self.block.norm(x)


class HoldsAnObject(Around):
    def __init__(self) -> None:
        super().__init__()
        self.tap = Tap(self.block)

    def forward(self, x: Tensor) -> Any:
        return self.block(x) + self.tap(x)


def applied(x: Tensor, module: nn.Module) -> Any:
    return module(x)


class HoldsANamedArgument(HoldsAnObject):
    def __init__(self) -> None:
        super().__init__()
        self.tap: Any = partial(applied, module=self.block.norm)


class HoldsAPartialOfAnObject(HoldsAnObject):
    def __init__(self) -> None:
        super().__init__()
        self.tap: Any = partial(Tap(self.block))


class Pair(nn.Module):
    """Only a trace shows what is behind the norm."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.act = Inner(), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.body(x))


class CallsTheActivationOfATrace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair()

    def forward(self, x: Tensor) -> Tensor:
        x = self.pair(x)
        return self.pair.act(-x) if x.sum() != 12345.0 else x


def with_the_norm(forward: Callable[..., Tensor]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def wrapped(self: Any, x: Tensor) -> Any:
        return forward(self, x) + self.norm(x)

    return wrapped


class Decorated(Parts):
    @with_the_norm
    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(x))


class OfABase(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.norm(x))


class CallsItsBase(OfABase):
    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.norm(x)) + super().forward(x)


class Optional(Parts):
    def forward(self, x: Tensor, mask: Any = None) -> Tensor:
        h = self.norm(x)
        if isinstance(mask, Tensor):
            h = h * 3
        return self.act(h)


class ByChance(Parts):
    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        if torch.rand(()) < 0.5:
            h = h + 1
        return self.act(h)


class ByTheValueOfChance(Parts):
    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        if torch.rand(()).item() < 0.5:
            h = h + 1
        return self.act(h)


class ByPythonsChance(Parts):
    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        if random.random() < 0.9:
            h = h + 1
        return self.act(h)


@pytest.mark.parametrize(
    "kind",
    [
        CallsTheActivation, AsksForAMethod, HoldsAMethod, AsksForAChild, HoldsAPartial, HoldsAnObject, Decorated,
        CallsItsBase, ByChance, ByPythonsChance, ByTheValueOfChance, HoldsANamedArgument,
        HoldsAPartialOfAnObject, CallsTheActivationOfATrace,
    ],
)  # fmt: skip
def test_results_stay(kind: type[nn.Module]) -> None:
    model, x = kind(), torch.randn(IMAGE)

    def result() -> Any:
        torch.manual_seed(0)
        random.seed(1)
        return model(x)

    expected = result()
    for number in range(6):  # a trace may see any of the numbers that chance gives
        torch.manual_seed(number)
        random.seed(number)
        before = random.getstate()
        assert not fused(fusednorm.convert_(model))
        assert random.getstate() == before
        torch.testing.assert_close(result(), expected)
        fusednorm.revert_(model)


def test_the_type_of_an_optional_argument() -> None:
    model, x, mask = Optional(), torch.randn(IMAGE), torch.ones(1)
    expected = model(x, mask)
    assert not fusednorm.convert_(model).fused
    torch.testing.assert_close(model(x, mask), expected)


class Keeps(Parts):
    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        self.kept = [h]
        return self.act(h)


class KeepsByName(Parts):
    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        self.kept = {0: h}
        return self.act(h)


class KeepsInTheEnd(Parts):
    def forward(self, x: Tensor) -> Tensor:
        try:
            x = self.norm(x)
            return self.act(x)
        finally:
            self.kept = [x]


@pytest.mark.parametrize("kind", [Keeps, KeepsByName, KeepsInTheEnd])
def test_what_a_forward_keeps_stays(kind: type[nn.Module]) -> None:
    model, x = kind(), torch.randn(IMAGE)
    model(x)
    expected = model.kept[0]
    fusednorm.convert_(model)
    model(x)
    torch.testing.assert_close(model.kept[0], expected)


def test_a_forward_that_was_put_into_a_module() -> None:
    def both(self: Any, x: Tensor) -> Any:
        h = self.norm(x)
        return self.act(h) + h

    for model in (nn.Sequential(Acting()), Acting()):
        block: Any = model if isinstance(model, Acting) else model[0]
        block.forward = types.MethodType(both, block)
        x = torch.randn(IMAGE)
        expected = model(x)
        assert not fusednorm.convert_(model).fused
        torch.testing.assert_close(model(x), expected)


def test_a_forward_that_was_put_into_a_module_which_only_a_trace_shows() -> None:
    def both(self: Any, x: Tensor) -> Any:
        h = self.body(x)
        return self.act(h) + h

    model, x = Pair(), torch.randn(IMAGE)
    model.forward = types.MethodType(both, model)  # type: ignore[method-assign]
    expected = model(x)
    assert not fusednorm.convert_(model).fused
    torch.testing.assert_close(model(x), expected)


class ActsTwice(Parts):
    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(x)) * self.act(x)


def test_an_activation_that_stays_may_be_called_by_others() -> None:
    class CallsIt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = ActsTwice()

        def forward(self, x: Tensor) -> Tensor:
            return self.block.act(self.block(x))

    model, x = CallsIt(), torch.randn(IMAGE)
    expected = model(x)
    assert list(fused(fusednorm.convert_(model))) == ["block.norm"]
    torch.testing.assert_close(model(x), expected)


def test_a_decorator_that_names_no_module_hides_nothing() -> None:
    def noted(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(forward)
        def wrapped(self: Any, *arguments: Any) -> Tensor:
            return forward(self, *arguments)

        return wrapped

    class Noted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.act = nn.GroupNorm(4, 8), nn.SiLU()

        @noted
        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.norm(x))

    model, x = Noted(), torch.randn(IMAGE)
    expected = model(x)
    assert list(fused(fusednorm.convert_(model))) == ["norm"]
    torch.testing.assert_close(model(x), expected)


def test_a_converted_models_class_makes_unconverted_models() -> None:
    """As for an average of weights, or from a registry that subclasses enter by themselves."""
    registry: dict[str, type[nn.Module]] = {}

    class Registered(OfABase):
        def __init_subclass__(cls) -> None:
            registry[cls.__name__] = cls

    class Model(Registered):
        pass

    model, x = Model(), torch.randn(IMAGE)
    expected = model(x)
    assert fusednorm.convert_(model).fused
    assert type(model) is not Model
    for other in (type(model)(), registry["Model"]()):
        other.load_state_dict(model.state_dict())
        assert type(other) is Model
        torch.testing.assert_close(other(x), expected)
        assert fusednorm.convert_(other).fused
        torch.testing.assert_close(other(x), expected)


@pytest.mark.parametrize("slope", [torch.tensor(0.2), float("inf"), float("nan")], ids=str)
def test_a_parameter_that_no_kernel_takes(slope: Any) -> None:
    model, x = nn.Sequential(nn.GroupNorm(4, 8), nn.LeakyReLU(slope)), torch.randn(IMAGE)
    expected = model(x)
    assert not fusednorm.convert_(model).fused
    torch.testing.assert_close(model(x), expected, equal_nan=True)
