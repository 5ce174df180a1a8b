"""What a rank's input is of the whole, which the ranks hold along one dimension, and what they agree about first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fusednorm import arguments
from fusednorm.activations import Activation, resolve
from fusednorm.distributed.agreement import Facts, agree
from fusednorm.distributed.collective import exchange_device
from fusednorm.distributed.moments import Units
from fusednorm.distributed.synchronized import Inspection
from fusednorm.dtypes import dtype_name
from fusednorm.gate import is_dtensor
from fusednorm.operands import Operands

#: What the sharded dimension is to the norm. "rows" are dimensions that are neither normalized nor the first.
Part = Literal["samples", "channels", "positions", "rows", "normalized"]

_OWN = "size along shard_dim"  # in which ranks may differ
_REMEDY = (
    "give every rank the same arguments, and inputs and parameters that differ along shard_dim alone and require grad "
    "on all ranks or on none; an empty input is allowed"
)


def axis_of(function: str, input: Any, shard_dim: Any) -> int:
    """``shard_dim`` from 0, for any input; :func:`check_axis` refuses what is no dimension of it."""
    if shard_dim is None:
        raise ValueError(
            f"{function}: shard_dim is None in a group of several processes; expected the input's dimension that is "
            "spread over them, such as 2"
        )
    arguments.check_integer(function, "shard_dim", shard_dim)
    dims = input.dim() if isinstance(input, Tensor) else 0
    return int(shard_dim) + dims if shard_dim < 0 else int(shard_dim)


def check_axis(function: str, input: Tensor, shard_dim: int | None) -> None:
    arguments.check_input(function, input, 1)
    if is_dtensor(input):
        raise TypeError(
            f"{function}: input is a DTensor, which says itself where its parts are; call fusednorm."
            f"{function.rpartition('.')[2]}"
        )
    if shard_dim is None or not -input.dim() <= shard_dim < input.dim():
        raise ValueError(
            f"{function}: shard_dim is {shard_dim} for an input of shape {tuple(input.shape)}; expected a dimension "
            f"from {-input.dim()} to {input.dim() - 1}"
        )


def channel_part(input: Any, axis: int, channel_dim: Any) -> Part:
    """The part of a family that has channels, for any arguments."""
    channel_axis = input.dim() - 1 if channel_dim == -1 and isinstance(input, Tensor) else 1
    return "samples" if axis == 0 else "channels" if axis == channel_axis else "positions"


def row_part(input: Any, axis: int, normalized_shape: Any, channel_dim: Any) -> Part:
    """The part of layer_norm and rms_norm, for any arguments."""
    if channel_dim == 1:
        normalized = axis == 1
    else:  # what is no shape is taken for one of one dimension, so that this rank refuses it where the others exchange
        dims = len(normalized_shape) if isinstance(normalized_shape, (tuple, list)) else 1
        normalized = isinstance(input, Tensor) and axis >= input.dim() - dims
    return "normalized" if normalized else "samples" if axis == 0 else "rows"


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's place: the sizes of all ranks along the dimension ``axis``, and where this rank's part begins."""

    axis: int
    sizes: list[int]
    first: int

    @property
    def whole(self) -> int:
        return sum(self.sizes)

    def elements(self, input: Tensor) -> int:
        """The elements of the whole."""
        return prod(input.shape[: self.axis]) * self.whole * prod(input.shape[self.axis + 1 :])


#: The kinds of calls about which the ranks of a group have agreed, where agreeing each time would wait for a GPU, each
#: with this rank's place in the whole where such calls need it.
_agreed: WeakKeyDictionary[Any, dict[str, Shard | None]] = WeakKeyDictionary()


def together(function: str, group: Any, axis: int, check: Callable[[], Facts]) -> Shard:
    """Check this rank's arguments by ``check``, which tells the facts and the size of ``axis`` among them, and agree.

    Whatever is wrong with them, the rank takes part in the exchange, since the other ranks would wait for it.
    """
    refusal: Exception | None = None
    facts, own = None, 0
    try:
        facts = check()
        own = facts.pop(_OWN)
    except Exception as error:
        refusal = error
    try:
        sizes = agree(function, facts, own, exchange_device(group), group, _REMEDY)
    except RuntimeError:
        if refusal is None:
            raise
    if refusal is not None:
        raise refusal
    return Shard(axis, sizes, sum(sizes[: torch.distributed.get_rank(group)]))


def agrees_once(group: Any) -> bool:
    """Whether the ranks agree once about calls of a kind: only a GPU's memory could carry a header, for which the host
    would wait."""
    return exchange_device(group).type == "cuda"


def together_once(
    function: str, group: Any, axis: int, input: Tensor, check: Callable[[], Facts], sizes: bool = False
) -> Shard | None:
    """:func:`together`, but once for calls of a kind, of a whole with elements, where the group :func:`agrees_once`.
    From the second such call on it is None, or with ``sizes``, which says that the call needs the sizes of all ranks,
    those that they had. Then calls of a kind have the same size of this rank.

    Ranks whose calls differ later on send a header and moments. The transport's watchdog ends that after the group's
    timeout, as it ends calls that a rank does not make.
    """
    if not agrees_once(group):
        return together(function, group, axis, check)
    known = _agreed.setdefault(group, {})
    if known:
        kind = _kind(function, check(), sizes)
        if kind in known:
            return known[kind]
    kinds: list[str] = []

    def checked() -> Facts:
        facts = check()
        kinds.append(_kind(function, facts, sizes))
        return facts

    shard = together(function, group, axis, checked)
    if shard.elements(input):
        known[kinds[0]] = shard if sizes else None
    return shard


def _kind(function: str, facts: Facts, sizes: bool) -> str:
    """What calls have alike about which the ranks agree once."""
    return repr((function, {name: value for name, value in facts.items() if sizes or name != _OWN}))


def facts_of(operands: Operands, axis: int, eps: float, activation: str | Activation | None, **others: Any) -> Facts:
    """What the ranks must have alike, of checked arguments, and the input's own size along the dimension ``axis``."""
    input = operands.input
    names = ("input", "weight", "bias", "scale", "shift")
    present = {name: value for name in names if (value := getattr(operands, name)) is not None}
    wanted = [name for name, value in present.items() if value.requires_grad and torch.is_grad_enabled()]
    found = resolve(activation)
    shape = ", ".join("*" if each == axis else str(size) for each, size in enumerate(input.shape))
    facts: Facts = {
        _OWN: input.shape[axis],
        "shape": f"({shape})",
        "dtype": dtype_name(input.dtype),
        "device": input.device.type,
        "operands": " ".join(present),
        "gradients for": " ".join(wanted) or "nothing",
        "eps": repr(float(eps)),
        "activation": "none" if found is None else found.name,
        "activation's parameter": "none" if found is None else repr(found.parameter),
    }
    return facts | {name: str(value) for name, value in others.items()}


def refuse_one_element(function: str, what: str) -> None:
    raise ValueError(
        f"{function}: the inputs of all ranks have 1 element for each {what} together, so its variance is 0; expected "
        "more than 1; use more samples or larger inputs, or evaluation mode where the family has one"
    )


def refusing_one_element(
    function: str, what: str, units: Units, input: Tensor, shard: Shard | None
) -> Inspection | None:
    """What looks at the counts of all ranks, where the sizes of their parts are not known and the whole may have one
    element under each statistic: then no rank has more than one, and every rank looks."""
    statistics = units.channels // units.group_channels * (1 if units.over_samples else input.shape[0])
    if shard is not None or input.numel() > statistics:
        return None

    def inspect(parts: Tensor) -> bool:
        elements = int(parts[:, -1].sum())
        if elements == 1:
            refuse_one_element(function, what)
        return elements > 0

    return inspect
