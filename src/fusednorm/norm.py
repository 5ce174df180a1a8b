"""What a call computes, whatever its tensors: one frozen, interned value that every layer hands on.

This module is pure Python: it imports neither torch nor a kernel language.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from fusednorm.activations import ALIASES, FORMULAS, Activation, resolve

Family = Literal["group_norm", "instance_norm", "layer_norm", "rms_norm", "batch_norm"]
FAMILIES: tuple[Family, ...] = ("group_norm", "instance_norm", "layer_norm", "rms_norm", "batch_norm")
#: The families that normalize trailing dimensions; the others have a channel dimension.
ROW_FAMILIES = ("layer_norm", "rms_norm")

#: So many calls are remembered, that is, forgotten together: a program that changes eps at every call stays small.
MOST_NORMS = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """A normalization as such: its family, what is normalized together, eps, and the activation.

    ``num_groups`` is group_norm's number of groups, ``num_dims`` the number of trailing dimensions that layer_norm and
    rms_norm normalize; each is 0 elsewhere. ``channel_dim`` is 1 or -1. ``training`` is False where the statistics are
    given to the call, and constants in its backward: batch_norm's evaluation, and instance_norm's with running
    statistics, which is the same.

    Equal values are one object (:func:`norm_of` makes them), so that a Norm is compared and hashed by its identity.
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
        return self.family in ROW_FAMILIES

    @property
    def per_batch(self) -> bool:
        """True where the statistics run over the samples too (batch_norm)."""
        return self.family == "batch_norm"

    @property
    def has_mean(self) -> bool:
        """False for rms_norm, which subtracts no mean."""
        return self.family != "rms_norm"

    @property
    def has_variance(self) -> bool:
        """True where the forward returns the variance, by which running statistics move."""
        return self.training and self.family in ("batch_norm", "instance_norm")

    @property
    def activation_parameter(self) -> float:
        """The activation's parameter; 0 where there is none."""
        activation = self.activation
        return 0.0 if activation is None or activation.parameter is None else activation.parameter

    @property
    def op_arguments(self) -> tuple[str, int, int, float, str, float]:
        """The call as the op ``norm_forward`` takes it; :func:`norm_of_op` is the inverse."""
        activation = self.activation
        return (
            self.family, self.num_groups or self.num_dims, self.channel_dim, self.eps,
            "" if activation is None else activation.name, self.activation_parameter,
        )  # fmt: skip


_interned: dict[Any, Norm] = {}


def _remember(key: Any, norm: Norm) -> Norm:
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
    trailing dimensions for layer_norm and rms_norm, and 0 for the others.

    Raises ValueError or TypeError for an activation that does not exist.
    """
    key = (family, groups_or_dims, channel_dim, eps, activation, training)
    try:
        found = _interned.get(key)
    except TypeError:  # of what cannot be hashed
        resolve(activation)
        raise
    if found is None:
        # Numbers of other types, which are equal, make no other Norm.
        same = (family, int(groups_or_dims), int(channel_dim), float(eps), resolve(activation), bool(training))
        found = _remember(key, _interned.get(same) or _remember(same, traced_norm(*same)))
    return found


def norm_of_op(
    family: Family, groups_or_dims: int, channel_dim: int, eps: float, name: str, parameter: float, training: bool
) -> Norm:
    """The Norm that an op's arguments mean; the activation's name is "" for none."""
    key = (family, groups_or_dims, channel_dim, eps, name, parameter, training)
    try:
        found = _interned.get(key)
    except TypeError:  # a symbol of a tracer
        return traced_norm(family, groups_or_dims, channel_dim, eps, activation_of(name, parameter), training)
    if found is None:
        activation = activation_of(name, parameter)
        found = _remember(key, norm_of(family, groups_or_dims, channel_dim, eps, activation, training))
    return found


def traced_norm(
    family: Family, groups_or_dims: int, channel_dim: int, eps: float, activation: Activation | None, training: bool
) -> Norm:
    """A Norm that is not interned, for a tracer, whose numbers may be symbols."""
    groups, dims = (0, groups_or_dims) if family in ROW_FAMILIES else (groups_or_dims, 0)
    return Norm(family, groups, dims, channel_dim, eps, activation, training)


def activation_of(name: str, parameter: float) -> Activation | None:
    """The activation that an op's two arguments mean."""
    if not name:
        return None
    formula = FORMULAS.get(ALIASES.get(name, name))
    return Activation(name, parameter if formula is not None and formula.parameter else None)
