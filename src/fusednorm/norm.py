"""Norm: what a call computes, whatever its tensors. Every layer hands on this one frozen, interned value.

This module is pure Python: it imports neither torch nor a kernel language.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, cast

from fusednorm.activations import ALIASES, FORMULAS, Activation, resolve

Family = Literal["group_norm", "instance_norm", "layer_norm", "rms_norm", "batch_norm"]
FAMILIES: tuple[Family, ...] = ("group_norm", "instance_norm", "layer_norm", "rms_norm", "batch_norm")
#: The families that normalize trailing dimensions, or the channels of each position; the others have channels.
ROW_FAMILIES: tuple[Family, ...] = ("layer_norm", "rms_norm")

#: So many Norms are kept, and then forgotten together, so that a program with a new eps at each call does not grow
#: without end.
MOST_NORMS = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """A normalization without its tensors: family, what is normalized together, eps, activation.

    ``num_groups`` is group_norm's number of groups, ``num_dims`` the number of trailing dimensions that layer_norm and
    rms_norm normalize, or 0 where they normalize ``channel_dim``; each is 0 elsewhere. ``channel_dim`` is 1 or -1.
    ``training`` is False where the caller gives the statistics, which are constants in the backward: batch_norm's
    evaluation. instance_norm with running statistics is that evaluation too.

    :func:`norm_of` makes one object of equal values, so a Norm is compared and hashed by identity.
    """

    family: Family
    num_groups: int
    num_dims: int
    channel_dim: int
    eps: float
    activation: Activation | None
    training: bool

    def __reduce__(self) -> tuple[Any, ...]:
        """Copied and unpickled as the one object that it is."""
        family, groups_or_dims, channel_dim, eps, _, _ = self.op_arguments
        return norm_of, (family, groups_or_dims, channel_dim, eps, self.activation, self.training)

    @property
    def row_family(self) -> bool:
        """True where trailing dimensions are normalized, and there is no channel dimension."""
        return self.num_dims > 0

    @property
    def per_position(self) -> bool:
        """True for layer_norm and rms_norm over the channels of (N, C, *) or (N, *, C): each position has statistics of
        its own, and scale and shift are those of its sample."""
        return self.num_dims == 0 and self.family in ROW_FAMILIES

    @property
    def channel_axis(self) -> int:
        """The dimension of the channels; for trailing dimensions the last, along which a gate of (B, K) lies."""
        return -1 if self.row_family else self.channel_dim

    @property
    def per_batch(self) -> bool:
        """True for batch_norm, whose statistics run over the samples too."""
        return self.family == "batch_norm"

    @property
    def has_mean(self) -> bool:
        """False for rms_norm, which subtracts no mean."""
        return self.family != "rms_norm"

    @property
    def has_variance(self) -> bool:
        """True where the forward returns the variance, which updates the running variance."""
        return self.training and self.family in ("batch_norm", "instance_norm")

    @property
    def smooth(self) -> bool:
        """True where there is an activation whose derivative takes arithmetic of its own, as relu's does not."""
        return self.activation is not None and not self.activation.told

    @property
    def activation_flops(self) -> int:
        """The operations of the activation for each element; 0 where there is none."""
        return 0 if self.activation is None else self.activation.flops

    @property
    def activation_parameter(self) -> float:
        """The activation's number (silu's beta, leaky_relu's slope); 0 where it has none."""
        activation = self.activation
        return 0.0 if activation is None or activation.parameter is None else activation.parameter

    @property
    def op_arguments(self) -> tuple[str, int, int, float, str, float]:
        """The last six arguments of the op ``norm_forward``; :func:`norm_of_op` is the inverse."""
        activation = self.activation
        return (
            self.family, self.num_groups or self.num_dims, self.channel_dim, self.eps,
            "" if activation is None else activation.name, self.activation_parameter,
        )  # fmt: skip

    @property
    def text(self) -> str:
        """The norm as one word, for graphs that are kept on disk; :func:`norm_of_text` is the inverse."""
        return "|".join((*map(str, self.op_arguments), str(int(self.training))))


_interned: dict[tuple[object, ...], Norm] = {}


def _remember(key: tuple[object, ...], norm: Norm) -> Norm:
    if len(_interned) >= MOST_NORMS:
        _interned.clear()
    _interned[key] = norm
    return norm


def norm_of(
    family: Family,
    groups_or_dims: int = 0,
    channel_dim: int = 1,
    eps: float = 1e-5,
    activation: str | Activation | None = None,
    training: bool = True,
) -> Norm:
    """The one Norm of a call. ``groups_or_dims`` is the number of groups for group_norm, the number of normalized
    trailing dimensions for layer_norm and rms_norm, 0 where they normalize ``channel_dim``, and 0 for the others.

    Raises ValueError or TypeError for an activation that does not exist.
    """
    key = (family, groups_or_dims, channel_dim, eps, activation, training)
    try:
        found = _interned.get(key)
    except TypeError:  # an argument cannot be hashed
        resolve(activation)
        raise
    if found is None:
        # An equal number of another type makes no second Norm.
        same = (family, int(groups_or_dims), int(channel_dim), float(eps), resolve(activation), bool(training))
        found = _remember(key, _interned.get(same) or _remember(same, traced_norm(*same)))
    return found


def norm_of_op(
    family: Family,
    groups_or_dims: int,
    channel_dim: int,
    eps: float,
    name: str,
    activation_parameter: float,
    training: bool,
) -> Norm:
    """The Norm that an op's arguments mean; ``name`` is the activation's, "" for none."""
    key = (family, groups_or_dims, channel_dim, eps, name, activation_parameter, training)
    try:
        found = _interned.get(key)
    except TypeError:  # a tracer's symbol cannot be hashed
        activation = activation_of(name, activation_parameter)
        return traced_norm(family, groups_or_dims, channel_dim, eps, activation, training)
    if found is None:
        activation = activation_of(name, activation_parameter)
        found = _remember(key, norm_of(family, groups_or_dims, channel_dim, eps, activation, training))
    return found


@lru_cache(MOST_NORMS)
def norm_of_text(text: str) -> Norm:
    """The Norm of a :attr:`Norm.text`."""
    family, groups_or_dims, channel_dim, eps, name, parameter, training = text.split("|")
    return norm_of_op(
        cast(Family, family), int(groups_or_dims), int(channel_dim), float(eps), name, float(parameter), training == "1"
    )


def traced_norm(
    family: Family, groups_or_dims: int, channel_dim: int, eps: float, activation: Activation | None, training: bool
) -> Norm:
    """A Norm that is not interned: a tracer's numbers may be symbols, which cannot be hashed."""
    groups, dims = (0, groups_or_dims) if family in ROW_FAMILIES else (groups_or_dims, 0)
    return Norm(family, groups, dims, channel_dim, eps, activation, training)


def activation_of(name: str, activation_parameter: float) -> Activation | None:
    """The Activation that an op's two arguments mean; None for the name ""."""
    if not name:
        return None
    formula = FORMULAS.get(ALIASES.get(name, name))
    return Activation(name, activation_parameter if formula is not None and formula.parameter else None)
