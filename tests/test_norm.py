"""One Norm of equal values, from a call's arguments and from an op's, and the facts that it knows."""

from __future__ import annotations

from typing import Any

import pytest

from fusednorm import norm as norms
from fusednorm.activations import Activation
from fusednorm.norm import FAMILIES, Family, activation_of, norm_of, norm_of_op, traced_norm

#: Arguments of norm_of, and the same values as an op's arguments.
BOTH: list[tuple[tuple[Any, ...], tuple[Any, ...]]] = [
    (("group_norm", 4, 1, 1e-5, None, True), ("group_norm", 4, 1, 1e-5, "", 0.0, True)),
    (("group_norm", 4, -1, 1e-5, None, True), ("group_norm", 4, -1, 1e-5, "", 0.0, True)),
    (("group_norm", 2, 1, 1e-5, None, True), ("group_norm", 2, 1, 1e-5, "", 0.0, True)),
    (("layer_norm", 2, 1, 1e-3, None, True), ("layer_norm", 2, 1, 1e-3, "", 0.0, True)),
    (("rms_norm", 1, 1, 1e-3, "relu", True), ("rms_norm", 1, 1, 1e-3, "relu", 0.0, True)),
    (("batch_norm", 0, 1, 1e-3, "silu", False), ("batch_norm", 0, 1, 1e-3, "silu", 1.0, False)),
    (("batch_norm", 0, 1, 1e-3, "silu", True), ("batch_norm", 0, 1, 1e-3, "silu", 1.0, True)),
    (
        ("instance_norm", 0, 1, 1e-3, Activation("leaky_relu", 0.5), True),
        ("instance_norm", 0, 1, 1e-3, "leaky_relu", 0.5, True),
    ),
]


@pytest.fixture
def interned(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    """The Norms that are kept, none at first."""
    kept: dict[Any, Any] = {}
    monkeypatch.setattr(norms, "_interned", kept)
    return kept


@pytest.mark.parametrize("ops_first", [False, True])
@pytest.mark.usefixtures("interned")
def test_equal_values_are_one_norm(ops_first: bool) -> None:
    found = []
    for call, op in BOTH:
        one, other = (norm_of_op(*op), norm_of(*call)) if ops_first else (norm_of(*call), norm_of_op(*op))
        assert one is other
        assert (norm_of(*call), norm_of_op(*op)) == (one, one)
        assert one.op_arguments == op[:-1]
        family, groups_or_dims, channel_dim, eps, _, training = call
        assert (one.family, one.channel_dim, one.eps, one.training) == (family, channel_dim, eps, training)
        rows = family in ("layer_norm", "rms_norm")
        assert (one.num_groups, one.num_dims) == ((0, groups_or_dims) if rows else (groups_or_dims, 0))
        found.append(one)
    assert len(set(found)) == len(BOTH)


@pytest.mark.usefixtures("interned")
def test_a_number_of_another_type_makes_no_second_norm() -> None:
    one = norm_of("group_norm", 4, 1, 1.0, "silu", True)
    other: Any = norm_of("group_norm", 4.0, True, 1, Activation("silu", 1.0), 1)  # type: ignore[arg-type]
    assert other is one
    types = [type(value) for value in (one.num_groups, one.channel_dim, one.eps, one.training)]
    assert types == [int, int, float, bool]


def test_what_is_known_is_looked_up(interned: dict[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call and each op looks its Norm up: nothing is resolved or made again."""
    before = [(norm_of(*call), norm_of_op(*op)) for call, op in BOTH]
    for name in ("resolve", "activation_of", "traced_norm", "_remember"):
        monkeypatch.setattr(norms, name, None)
    assert [(norm_of(*call), norm_of_op(*op)) for call, op in BOTH] == before


@pytest.mark.parametrize("make", [norm_of, lambda *a: norm_of_op(*a[:4], "", 0.0, True)])
def test_the_number_of_norms_is_bounded(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    class Counted(dict[Any, Any]):
        def __setitem__(self, key: Any, value: Any) -> None:
            super().__setitem__(key, value)
            sizes.append(len(self))

    monkeypatch.setattr(norms, "_interned", Counted())
    monkeypatch.setattr(norms, "MOST_NORMS", 8)
    for groups in range(1, 40):
        make("group_norm", groups, 1, 1e-5)
    assert max(sizes) == 8


class Symbol(int):
    """A tracer's number."""

    __hash__ = None  # type: ignore[assignment]


def test_a_symbol_is_kept_nowhere(interned: dict[Any, Any]) -> None:
    symbol = Symbol(4)
    for family in FAMILIES:
        norm = norm_of_op(family, symbol, -1, 0.5, "leaky_relu", 0.25, False)
        rows = family in ("layer_norm", "rms_norm")
        assert (norm.num_dims if rows else norm.num_groups) is symbol
        assert (norm.num_groups if rows else norm.num_dims) == 0
        assert (norm.family, norm.channel_dim, norm.eps, norm.training) == (family, -1, 0.5, False)
        assert norm.activation == Activation("leaky_relu", 0.25)
    assert interned == {}


def test_an_activation_that_cannot_be_hashed() -> None:
    activation: Any = ["silu"]
    with pytest.raises(TypeError, match="activation"):
        norm_of("group_norm", 4, activation=activation)


@pytest.mark.parametrize(
    ("name", "parameter", "activation"),
    [
        ("", 0.5, None),
        ("silu", 0.5, Activation("silu", 0.5)),
        ("relu", 0.5, Activation("relu", None)),
        ("leaky_relu", 0.25, Activation("leaky_relu", 0.25)),
    ],
)
def test_the_activation_of_an_op(name: str, parameter: float, activation: Activation | None) -> None:
    assert activation_of(name, parameter) == activation


def test_defaults() -> None:
    assert norm_of("batch_norm") is norm_of("batch_norm", 0, 1, 1e-5, None, True)


@pytest.mark.parametrize(
    ("family", "training", "facts"),
    [
        ("group_norm", True, (False, False, True, False)),
        ("instance_norm", True, (False, False, True, True)),
        ("instance_norm", False, (False, False, True, False)),
        ("layer_norm", True, (True, False, True, False)),
        ("rms_norm", True, (True, False, False, False)),
        ("batch_norm", True, (False, True, True, True)),
        ("batch_norm", False, (False, True, True, False)),
    ],
)
def test_facts(family: Family, training: bool, facts: tuple[bool, ...]) -> None:
    norm = traced_norm(family, 1, 1, 1e-5, None, training)
    assert (norm.row_family, norm.per_batch, norm.has_mean, norm.has_variance) == facts
