"""Gluon's language over numpy: the kernels of hopper.resident run as Python, a thread to each of their blocks.

It knows what these kernels use of the language. It checks what a GPU does not: that each load and store lies in its
tensor, and how often each byte is stored. Shared memory begins as NaN, and a copy arrives when it is awaited.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import triton

from fusednorm.backends import hopper

MODULES = (
    "exchange", "elements", "moments", "chunks", "leaders", "rows", "claims", "resident", "resident_backward",
    "slab_tiles", "slabs", "slabs_backward",
)  # fmt: skip
KEY = np.uint32(0xFFBADBAD)
PACKAGE, LANGUAGE = "fusednorm.backends.hopper.kernels", "fusednorm.private.gluon_names"
#: Seconds that a block waits for another one's numbers at most.
PATIENCE = 60

_block = threading.local()


class Type:
    """A dtype of the language."""

    def __init__(self, dtype: Any) -> None:
        self.numpy = np.dtype(dtype)
        self.primitive_bitwidth = 8 * self.numpy.itemsize


class PointerType:
    def __init__(self, element_ty: Type) -> None:
        self.element_ty = element_ty


TYPES = {name: Type(name) for name in ("int16", "int32", "int64", "uint32", "float16", "float32", "float64")}


def plain(value: Any) -> Any:
    return value.array if isinstance(value, Value) else value


def _like(value: Any, array: Any) -> Any:
    """A number as the language takes it beside an array: in the array's dtype."""
    value = plain(value)
    if isinstance(value, float) and array.dtype.kind in "iu":
        return np.float32(value)
    return array.dtype.type(value) if isinstance(value, (bool, int, float)) else np.asarray(value)


def _quotient(dividend: Any, divisor: Any) -> Any:
    """Rounded towards zero, as the language divides."""
    return (np.sign(dividend) * np.sign(divisor) * (np.abs(dividend) // np.abs(divisor))).astype(dividend.dtype)


class Value:
    """A tensor or a scalar."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, array: Any) -> None:
        self.array = np.asarray(array)

    @property
    def shape(self) -> list[int]:
        return list(self.array.shape)

    def to(self, to: Type, bitcast: bool = False) -> Value:
        if bitcast:
            return Value(np.ascontiguousarray(self.array).view(to.numpy).reshape(self.array.shape))
        return Value(self.array.astype(to.numpy))

    def __getitem__(self, index: Any) -> Value:
        return Value(self.array[index])

    def __bool__(self) -> bool:
        return bool(self.array)

    def __index__(self) -> int:
        return int(self.array)

    def __neg__(self) -> Value:
        return Value(-self.array)


def _define(name: str, operation: Callable[[Any, Any], Any], reflected: bool) -> None:
    def straight(self: Value, other: Any) -> Value:
        return Value(operation(self.array, _like(other, self.array)))

    def reversed_(self: Value, other: Any) -> Value:
        return Value(operation(_like(other, self.array), self.array))

    setattr(Value, f"__{name}__", straight)
    if reflected:
        setattr(Value, f"__r{name}__", reversed_)


for _name, _operation in {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "truediv": np.divide, "floordiv": _quotient,
    "mod": lambda dividend, divisor: dividend - _quotient(dividend, divisor) * divisor, "and": np.bitwise_and,
    "or": np.bitwise_or, "lshift": np.left_shift, "rshift": np.right_shift,
}.items():  # fmt: skip
    _define(_name, _operation, reflected=True)
for _name, _operation in {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
}.items():  # fmt: skip
    _define(_name, _operation, reflected=False)


class Memory:
    """The bytes of a tensor, and how often each was stored."""

    def __init__(self, array: Any) -> None:
        self.array = np.ascontiguousarray(array)
        self.bytes = self.array.reshape(-1).view(np.uint8)
        self.stores = np.zeros(self.bytes.size, np.int32)


class Pointer:
    """Addresses in a memory, of elements of a dtype."""

    def __init__(self, memory: Memory, element: Type, offset: Any = 0) -> None:
        self.memory, self.element, self.offset = memory, element, np.asarray(offset, np.int64)

    @property
    def dtype(self) -> PointerType:
        return PointerType(self.element)

    def to(self, to: Any, bitcast: bool = False) -> Any:
        return Pointer(self.memory, to.element_ty, self.offset) if bitcast else Value(self.offset)

    def __add__(self, elements: Any) -> Pointer:
        step = np.asarray(plain(elements), np.int64) * self.element.numpy.itemsize
        return Pointer(self.memory, self.element, self.offset + step)

    def places(self, mask: Any, shape: tuple[int, ...] = ()) -> tuple[Any, Any, Any]:
        """The elements of the memory, which of the addresses have one, and the elements' places."""
        size = self.element.numpy.itemsize
        there = np.asarray(True if mask is None else plain(mask), bool)
        shape = np.broadcast_shapes(self.offset.shape, there.shape, shape)
        there = np.broadcast_to(there, shape)
        places = np.broadcast_to(self.offset, shape)[there]
        assert not (places % size).any()
        assert not places.size or (places.min() >= 0 and places.max() + size <= self.memory.bytes.size)
        elements = self.memory.bytes[: self.memory.bytes.size // size * size].view(self.element.numpy)
        return elements, there, places // size


def _load(pointer: Pointer, mask: Any = None, other: Any = None) -> Value:
    elements, there, places = pointer.places(mask)
    found = np.zeros(there.shape, elements.dtype)
    if other is None:
        found.reshape(-1).view(np.uint8).fill(0xFF)
    else:
        found[...] = other
    found[there] = elements[places]
    return Value(found)


def _store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    value = np.asarray(plain(value))
    elements, there, places = pointer.places(mask, value.shape)
    elements[places] = np.broadcast_to(value, there.shape)[there]
    size = elements.dtype.itemsize
    for byte in range(size):
        np.add.at(pointer.memory.stores, places * size + byte, 1)


_claims = threading.Lock()


def _atomic_add(pointer: Pointer, value: Any, mask: Any = True, sem: str = "", scope: str = "") -> Value:
    """What was there, of one address."""
    with _claims:
        found = _load(pointer, mask, 0)
        _store(pointer, found + plain(value), mask)
    return found


class Shared:
    """Shared memory."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def index(self, place: Any) -> Shared:
        return Shared(self.array[int(plain(place))])

    def load(self, _layout: Any) -> Value:
        return Value(self.array.copy())

    def store(self, value: Value) -> None:
        self.array[...] = value.array


def _allocate(element: Type, shape: Sequence[int], _layout: Any) -> Shared:
    array = np.zeros(shape, element.numpy)
    array.reshape(-1).view(np.uint8).fill(0xFF)
    return Shared(array)


def _async_load(slot: Shared, pointer: Pointer, mask: Any = None) -> None:
    _block.begun.append((slot, _load(pointer, mask, 0)))


def _commit_group() -> None:
    _block.groups.append(_block.begun)
    _block.begun = []


def _wait_group(left: int) -> None:
    while len(_block.groups) > left:
        for slot, value in _block.groups.pop(0):
            slot.store(value)


class Layout:
    def __init__(self, *arguments: Any) -> None:
        self.parent = arguments[-1] if isinstance(arguments[-1], Layout) else None


def _where(condition: Any, one: Any, other: Any) -> Value:
    first, second = plain(one), plain(other)
    if isinstance(one, Value) != isinstance(other, Value):
        first, second = (first, _like(other, first)) if isinstance(one, Value) else (_like(one, second), second)
    return Value(np.where(plain(condition), first, second))


def _of_two(operation: Any) -> Callable[[Any, Any], Value]:
    return lambda one, other: Value(operation(np.asarray(plain(one)), _like(other, np.asarray(plain(one)))))


def _fma(one: Any, other: Any, more: Any) -> Value:
    first, second, third = (np.asarray(plain(value), np.float64) for value in (one, other, more))
    return Value((first * second + third).astype(np.float32))


def _high_product(one: Any, other: Any) -> Value:
    product = np.asarray(plain(one)).astype(np.uint64) * np.asarray(plain(other)).astype(np.uint64)
    return Value((product >> np.uint64(32)).astype(np.uint32))


def _sum(value: Value, axis: int) -> Value:
    return Value(value.array.sum(axis, dtype=value.array.dtype))


def _reduce(values: tuple[Value, ...], axis: int, combine: Callable[..., tuple[Value, ...]]) -> tuple[Value, ...]:
    """Halves are combined until one is left."""
    found = [np.moveaxis(value.array, axis, 0) for value in values]
    while len(found[0]) > 1:
        half = len(found[0]) // 2
        halves = [Value(each[:half]) for each in found] + [Value(each[half:]) for each in found]
        found = [value.array for value in combine(*halves)]
    return tuple(Value(each[0]) for each in found)


def _joined(one: Value, other: Value) -> Value:
    return Value(np.stack(np.broadcast_arrays(one.array, other.array), -1))


def _jit(function: Any = None, **_options: Any) -> Any:
    return function if function is not None else lambda decorated: decorated


LANGUAGE_NAMES: dict[str, Any] = TYPES | {
    "bfloat16": None,
    "pointer_type": PointerType,
    "constexpr": lambda value=None: value,
    "BlockedLayout": Layout,
    "SliceLayout": Layout,
    "SwizzledSharedLayout": Layout,
    "arange": lambda first, end, _layout: Value(np.arange(first, end, dtype=np.int32)),
    "where": _where,
    "minimum": _of_two(np.fmin),  # of a number and what is none, the number
    "maximum": _of_two(np.fmax),
    "fma": _fma,
    "umulhi": _high_product,
    "load": _load,
    "store": _store,
    "sum": _sum,
    "reduce": _reduce,
    "atomic_add": _atomic_add,
    "zeros": lambda shape, dtype, _layout: Value(np.zeros(shape, dtype.numpy)),
    "full": lambda shape, value, dtype, _layout: Value(np.full(shape, value, dtype.numpy)),
    "to_tensor": lambda value: Value(np.float32(value) if isinstance(value, float) else np.int32(value)),
    "cast": lambda value, dtype: Value(np.asarray(plain(value)).astype(dtype.numpy)),
    "join": _joined,
    "split": lambda value: (Value(value.array[..., 0]), Value(value.array[..., 1])),
    "permute": lambda value, order: Value(value.array.transpose(order)),
    "broadcast": lambda one, other: tuple(map(Value, np.broadcast_arrays(one.array, other.array))),
    "reshape": lambda value, shape: Value(value.array.reshape(shape)),
    "convert_layout": lambda value, _layout, **_options: value,
    "div_rn": lambda total, count: Value((np.asarray(plain(total)) / np.asarray(plain(count))).astype(np.float32)),
    "static_range": range,
    "program_id": lambda _axis: Value(np.int32(_block.place)),
    "num_programs": lambda _axis: Value(np.int32(_block.count)),
    "num_warps": lambda: _block.warps,
    "allocate_shared_memory": _allocate,
}


class Exchange:
    """``exchange.py``: blocks that wait are woken by those that publish."""

    def __init__(self) -> None:
        self.changed, self.broken = threading.Condition(), False

    def publish(self, pointer: Pointer, first: Any, second: Any, mask: Any = None) -> None:
        with self.changed:
            first, second = (np.asarray(plain(value), np.float32).view(np.uint32) ^ KEY for value in (first, second))
            _store(pointer, Value(first.astype(np.int64) | second.astype(np.int64) << 32), mask)
            self.changed.notify_all()

    def peek(self, pointer: Pointer) -> Value:
        return _load(pointer)

    def settle(self, _packets: Value, pointer: Pointer) -> tuple[Value, ...]:
        def there() -> bool:
            return self.broken or bool((_load(pointer).array != 0).all())

        with self.changed:
            assert self.changed.wait_for(there, PATIENCE), "blocks wait for one another"
            assert not self.broken, "another block failed"
            found = _load(pointer).array
        halves = (found & 0xFFFFFFFF).astype(np.uint32), (found >> 32 & 0xFFFFFFFF).astype(np.uint32)
        return tuple(Value((each ^ KEY).view(np.float32)) for each in halves)

    def fail(self) -> None:
        with self.changed:
            self.broken = True
            self.changed.notify_all()


def _halves(words: Value) -> tuple[Value, Value]:
    halves = np.ascontiguousarray(words.array).view(np.float16).reshape(*words.array.shape, 2).astype(np.float32)
    return Value(halves[..., 0]), Value(halves[..., 1])


def _words_of(values: Value, _layout: Any, dtype: Type) -> Value:
    return Value(np.ascontiguousarray(values.array.astype(dtype.numpy)).view(np.int32))


def _inverse_deviation(variance: Value, eps: Value) -> Value:
    return Value((1.0 / np.sqrt(variance.array.astype(np.float64) + eps.array)).astype(np.float32))


@contextmanager
def _language() -> Iterator[None]:
    """Modules that are imported inside have this language, and are forgotten afterwards."""
    ours = {
        "gl": SimpleNamespace(**LANGUAGE_NAMES), "gluon": SimpleNamespace(jit=_jit), "async_load": _async_load,
        "commit_group": _commit_group, "wait_group": _wait_group,
    }  # fmt: skip
    language = ModuleType(LANGUAGE)
    for name, value in ours.items():
        setattr(language, name, value)
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in sys.modules if name.startswith(PACKAGE)]:
            patch.delitem(sys.modules, name)
        patch.setitem(sys.modules, LANGUAGE, language)
        patch.setattr(hopper, "kernels", None, raising=False)  # which the imports set
        patch.setattr(triton, "constexpr_function", lambda function: function)
        yield
        for name in [name for name in sys.modules if name.startswith(PACKAGE)]:
            del sys.modules[name]


class Kernels:
    """The kernels, by name."""

    def __init__(self) -> None:
        self.exchange, self.language = Exchange(), SimpleNamespace(**LANGUAGE_NAMES)
        ours = {
            "publish": self.exchange.publish, "peek": self.exchange.peek, "settle": self.exchange.settle,
            "_halves": _halves, "words_of": _words_of, "inverse_deviation": _inverse_deviation,
        }  # fmt: skip
        with _language():
            self.modules = {name: importlib.import_module(f"{PACKAGE}.{name}") for name in MODULES}
        for module in self.modules.values():
            for name, value in ours.items():
                if hasattr(module, name):
                    setattr(module, name, value)

    def run(self, name: str, blocks: int, warps: int, arguments: Sequence[Any], **constants: Any) -> None:
        """A launch of so many blocks, which run at the same time."""
        kernel = next(getattr(module, name) for module in self.modules.values() if hasattr(module, name))
        errors = list[Exception]()
        self.exchange.broken = False

        def work(place: int) -> None:
            _block.place, _block.count, _block.warps, _block.begun, _block.groups = place, blocks, warps, [], []
            try:
                with np.errstate(all="ignore"):
                    kernel(*arguments, **constants)
            except Exception as error:  # The others may wait for this block.
                errors.append(error)
                self.exchange.fail()

        threads = [threading.Thread(target=work, args=(place,)) for place in range(blocks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]


def scalars_of(numbers: Sequence[int | float]) -> list[Value]:
    """The numbers that a kernel gets by value, as its signature has them: 32 bits of each."""
    return [
        Value(
            np.float32(number)
            if isinstance(number, float)
            else np.uint32(number)
            if number >= 1 << 31
            else np.int32(number)
        )
        for number in numbers
    ]
