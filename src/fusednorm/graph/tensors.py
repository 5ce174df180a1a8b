"""The tensors of a graph: their declared attributes, and those that validation inferred."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite, prod
from numbers import Integral, Real
from typing import Any

import torch

from fusednorm.dtypes import dtype_name
from fusednorm.formats import FORMATS
from fusednorm.graph.errors import InvalidGraphError, Mistake
from fusednorm.problem import DTYPE_BYTES
from fusednorm.strides import packed_strides

Dims = tuple[int, ...]
DTYPE_NAMES = ", ".join(DTYPE_BYTES)


def as_dtype(value: torch.dtype | str, where: str, *others: str) -> torch.dtype:
    """A floating dtype, or one of the ``others``, from itself or its name, such as "bfloat16"."""
    name = value.removeprefix("torch.") if isinstance(value, str) else str(value).removeprefix("torch.")
    if not isinstance(value, (str, torch.dtype)) or name not in (*DTYPE_BYTES, *others):
        mistake = Mistake(where, f"dtype is {value!r}", DTYPE_NAMES, "give one of these, e.g. torch.float16")
        raise InvalidGraphError(where, [mistake])
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _as_ints(value: Sequence[int], where: str, what: str) -> Dims:
    if isinstance(value, Sequence) and not isinstance(value, str):
        entries = tuple(value)
        if all(isinstance(entry, Integral) and not isinstance(entry, bool) for entry in entries):
            return tuple(int(entry) for entry in entries)
    mistake = Mistake(where, f"{what} are {value!r}", "a sequence of ints", f"give {what} such as (8, 256, 56, 56)")
    raise InvalidGraphError(where, [mistake])


def _as_number(value: Any, where: str) -> float:
    if isinstance(value, Real) and not isinstance(value, bool) and isfinite(value):
        return float(value)
    raise InvalidGraphError(where, [Mistake(where, f"value is {value!r}", "a finite number", "give one such as 1.0")])


def channels_last_strides(dims: Sequence[int]) -> Dims:
    """The strides of a tensor of dims (N, C, *) whose channels lie next to each other: NHWC in memory.

    >>> channels_last_strides((2, 8, 4, 4))
    (128, 1, 32, 8)
    """
    channels, *positions = dims[1:]
    inner = [size * max(channels, 1) for size in packed_strides(positions)]
    return (max(channels, 1) * max(prod(positions), 1), 1, *inner)


def same_strides(dims: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two strides mean the same memory; the stride of a dimension of one element means nothing."""
    return 0 in dims or all(size == 1 or a == b for size, a, b in zip(dims, one, other, strict=True))


def extent(dims: Sequence[int], strides: Sequence[int]) -> int:
    """The elements from the first to the last, both included; 0 for no elements."""
    return 0 if 0 in dims else 1 + sum((size - 1) * stride for size, stride in zip(dims, strides, strict=True))


def overlaps_itself(dims: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements may share memory, as in an expanded tensor."""
    reach = 0
    for stride, size in sorted((stride, size) for size, stride in zip(dims, strides, strict=True) if size > 1):
        if stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


class TensorAttributes:
    """A tensor of a graph: dims, strides, dtype, uid and name, virtual or not.

    ``Graph.validate`` infers what is not declared. A virtual tensor lives inside the graph, and a tensor with a
    ``value`` is a number that the graph has; the variant pack gives any other at execution. The setters return the
    tensor, so that they chain; each takes the graph back to its first stage.
    """

    def __init__(
        self,
        changed: Callable[[], None],
        *,
        dims: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
        dtype: torch.dtype | str | None = None,
        uid: int | None = None,
        name: str | None = None,
        is_virtual: bool = False,
        value: float | None = None,
    ) -> None:
        self._changed = changed
        self._declared: dict[str, Any] = {}
        self._inferred: dict[str, Any] = {}
        self._virtual = bool(is_virtual)
        self._declare(dims=dims, strides=strides, dtype=dtype, uid=uid, name=name, value=value)

    @property
    def uid(self) -> int | None:
        """The number by which a variant pack may name it; set by validation unless declared."""
        return self._value("uid")

    @property
    def name(self) -> str:
        """The name by which a variant pack may name it."""
        return self._value("name") or ""

    @property
    def dims(self) -> Dims | None:
        return self._value("dims")

    @property
    def strides(self) -> Dims | None:
        return self._value("strides")

    @property
    def dtype(self) -> torch.dtype | None:
        return self._value("dtype")

    @property
    def value(self) -> float | None:
        """The number that the graph itself gives to a tensor of one element; None for any other."""
        found: float | None = self._value("value")
        return found

    @property
    def is_virtual(self) -> bool:
        return self._virtual

    @property
    def declared(self) -> dict[str, Any]:
        """The attributes that were declared and not inferred."""
        return dict(self._declared)

    def set_output(self, is_output: bool = True) -> TensorAttributes:
        """Make it an output, which the variant pack holds, or virtual again."""
        self._virtual = not is_output
        self._changed()
        return self

    def set_name(self, name: str) -> TensorAttributes:
        return self._declare(name=name)

    def set_uid(self, uid: int) -> TensorAttributes:
        return self._declare(uid=uid)

    def set_dims(self, dims: Sequence[int]) -> TensorAttributes:
        return self._declare(dims=dims)

    def set_strides(self, strides: Sequence[int]) -> TensorAttributes:
        return self._declare(strides=strides)

    def set_dtype(self, dtype: torch.dtype | str) -> TensorAttributes:
        return self._declare(dtype=dtype)

    def infer(self, **values: Any) -> None:
        """Keep values that validation worked out; a declared value takes precedence."""
        self._inferred.update(values)

    def forget(self, *kept: str) -> None:
        """Drop the inferred values, but for the named ones."""
        self._inferred = {name: value for name, value in self._inferred.items() if name in kept}

    def _value(self, name: str) -> Any:
        value = self._declared.get(name)
        return self._inferred.get(name) if value is None else value

    def _declare(self, **values: Any) -> TensorAttributes:
        given = {name: value for name, value in values.items() if value is not None}
        where = f"tensor {given.get('name', self.name)!r}"
        for what in ("dims", "strides"):
            if what in given:
                given[what] = _as_ints(given[what], where, what)
        if "dtype" in given:
            given["dtype"] = as_dtype(given["dtype"], where, *FORMATS)
        if "uid" in given and (not isinstance(given["uid"], int) or isinstance(given["uid"], bool)):
            raise InvalidGraphError(where, [Mistake(where, f"uid is {given['uid']!r}", "an int", "give a number")])
        if "value" in given:
            given["value"] = _as_number(given["value"], where)
        if "name" in given and (not isinstance(given["name"], str) or not given["name"]):
            raise InvalidGraphError(where, [Mistake(where, f"name is {given['name']!r}", "words", "give a name")])
        self._declared.update(given)
        if given:
            self._changed()
        return self

    def __repr__(self) -> str:
        dtype = None if self.dtype is None else dtype_name(self.dtype)
        kind = "virtual, " if self.is_virtual else ""
        return f"TensorAttributes({self.name!r}, uid={self.uid}, {kind}dims={self.dims}, {self.strides}, {dtype})"
