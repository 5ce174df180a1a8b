"""The tensors of one execution: found by uid, name or graph tensor, and checked before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from fusednorm.dtypes import dtype_name
from fusednorm.graph.errors import VariantPackError
from fusednorm.graph.tensors import TensorAttributes, extent, same_strides
from fusednorm.private.torch_names import guard
from fusednorm.strides import is_dense

VariantPack = Mapping[Any, Tensor]

MOST_GUARDS = 8  # that one reader makes; of tensors in more forms each is checked in Python


class PackReader:
    """Turns variant packs into the tensors of a graph, in the order of ``tensors``."""

    def __init__(self, graph: str, tensors: Sequence[TensorAttributes], outputs: int, device: torch.device) -> None:
        """The last ``outputs`` of the tensors are outputs."""
        self.graph, self.tensors, self.device = graph, tuple(tensors), device
        self.slots: dict[Any, int] = {}
        for slot, tensor in enumerate(tensors):
            self.slots |= {tensor: slot, tensor.uid: slot, tensor.name: slot}
        self.expected = [
            (slot, torch.Size(tensor.dims or ()), tensor.strides, tensor.dtype) for slot, tensor in enumerate(tensors)
        ]
        self.empty: list[Any] = [None] * len(self.tensors)
        self.outputs = range(len(self.tensors) - outputs, len(self.tensors))
        #: Whether tensors have the metadata of those that were found right, in one call; None before.
        self.known: Callable[..., bool] | None = None
        self.guards = MOST_GUARDS
        self.apart: list[int] = []  # addresses of the last tensors found apart; their sizes never change
        self.beside: tuple[int, ...] = ()  # that of the last workspace found apart from them, and theirs
        self.bytes = [
            extent(tensor.dims or (), tensor.strides or ()) * (tensor.dtype.itemsize if tensor.dtype else 0)
            for tensor in tensors
        ]

    def read(self, pack: VariantPack, *, outputs: bool = True) -> list[Any]:
        """The tensors by slot; without ``outputs`` the outputs may be absent, as None."""
        values = self.empty.copy()
        slots = self.slots
        try:
            for key, value in pack.items():
                values[slots[key]] = value
        except (KeyError, TypeError, AttributeError):
            self.refuse_keys(pack)
        complete = len(pack) == len(values)
        if not (outputs and complete and self.knows(values)):
            self.check(pack, values, complete, outputs)
        if outputs:
            addresses = [tensor.data_ptr() for tensor in values]
            if addresses != self.apart:
                self.check_apart(values)
                self.apart = addresses
        return values

    def knows(self, values: Sequence[Any]) -> bool:
        """Whether the tensors are like those of an earlier call: classes, sizes, strides, dtypes, devices, dispatch
        keys, and whether they require gradients."""
        known = self.known
        if known is None:
            return False
        for tensor in values:
            # A guard aborts the process for a nested tensor.
            if (type(tensor) is not Tensor and type(tensor) is not Parameter) or tensor.is_nested:
                return False
        return known(*values)

    def check(self, pack: VariantPack, values: Sequence[Any], complete: bool, outputs: bool) -> None:
        """Every tensor is what was declared, and all are there; without ``outputs`` these may be absent."""
        device, slot = self.device, 0
        try:
            for slot, dims, strides, dtype in self.expected:
                tensor = values[slot]
                if (
                    (type(tensor) is Tensor or type(tensor) is Parameter)
                    and tensor.shape == dims
                    and tensor.stride() == strides
                    and tensor.dtype is dtype
                    and tensor.device == device
                    and not tensor.is_neg()
                ):
                    continue
                complete = False
                if tensor is not None:
                    self.refuse(slot, tensor)
        except VariantPackError:
            raise
        except RuntimeError as error:  # sparse and nested tensors have no strides, or no sizes
            where = f"graph {self.graph!r}, tensor {self.tensors[slot].name!r}"
            raise VariantPackError(f"{where}: {error}; expected a dense torch.Tensor") from None
        if not complete:
            self.refuse_count(pack, values, outputs)
        if outputs:
            for slot in self.outputs:
                if values[slot].requires_grad:
                    self.refuse_gradient(slot)
            if self.guards:  # each takes as long as some calls
                self.guards -= 1
                self.known = guard(values)

    def check_apart(self, values: Sequence[Tensor]) -> None:
        """No output shares memory with another tensor."""
        spans = self.spans(values)
        for one in self.outputs:
            for other in range(one):
                first, last = max(spans[one][0], spans[other][0]), min(spans[one][1], spans[other][1])
                if first < last and _share_memory(values[one], values[other]):
                    self.refuse_overlap(other, one)

    def check_workspace(self, values: Sequence[Tensor], workspace: Tensor, size: int) -> None:
        """The bytes of a workspace that are used share no memory with a tensor."""
        begin = workspace.data_ptr()
        beside = begin, *(tensor.data_ptr() for tensor in values)
        if beside == self.beside:
            return
        for tensor, (first, last) in zip(values, self.spans(values), strict=True):
            if max(first, begin) < min(last, begin + size) and _share_memory(tensor, workspace[:size]):
                self.refuse_workspace(next(slot for slot, each in enumerate(values) if each is tensor))
        self.beside = beside

    def spans(self, values: Sequence[Tensor]) -> list[tuple[int, int]]:
        """Where the tensors begin and end in memory."""
        return [(tensor.data_ptr(), tensor.data_ptr() + size) for tensor, size in zip(values, self.bytes, strict=True)]

    # --- errors ---

    def refuse_workspace(self, slot: int) -> NoReturn:
        raise VariantPackError(
            f"graph {self.graph!r}: the workspace and the tensor {self.tensors[slot].name!r} share memory; expected a "
            "workspace in memory of its own"
        )

    def refuse_overlap(self, one: int, other: int) -> NoReturn:
        names = f"{self.tensors[one].name!r} and {self.tensors[other].name!r}"
        raise VariantPackError(
            f"graph {self.graph!r}: the tensors {names} share memory; expected an output in memory of its own; "
            "give it another tensor"
        )

    def refuse_gradient(self, slot: int) -> NoReturn:
        raise VariantPackError(
            f"graph {self.graph!r}, tensor {self.tensors[slot].name!r}: it requires gradients; expected an output that "
            "autograd does not follow; give tensor.detach()"
        )

    def refuse_keys(self, pack: Any) -> NoReturn:
        if not isinstance(pack, Mapping):
            raise VariantPackError(
                f"graph {self.graph!r}: the variant pack is a {type(pack).__name__}; expected a dict from uid, name or "
                "tensor of the graph to a torch tensor"
            ) from None
        unknown = [repr(key) for key in pack if not _hashable(key) or key not in self.slots]
        known = ", ".join(f"{tensor.name} (uid {tensor.uid})" for tensor in self.tensors)
        raise VariantPackError(
            f"graph {self.graph!r}: the variant pack has {', '.join(unknown)}; expected {known}; "
            "virtual tensors are the graph's own, and stay out of it"
        ) from None

    def refuse_count(self, pack: VariantPack, values: Sequence[Any], outputs: bool) -> None:
        wanted = self.expected if outputs else self.expected[: self.outputs.start]
        missing = [self.tensors[slot] for slot, *_ in wanted if values[slot] is None]
        if missing:
            names = ", ".join(f"{tensor.name} (uid {tensor.uid})" for tensor in missing)
            raise VariantPackError(
                f"graph {self.graph!r}: the variant pack lacks {names}; expected a tensor for each input and output"
            )
        if len(pack) > sum(value is not None for value in values):
            raise VariantPackError(
                f"graph {self.graph!r}: the variant pack names a tensor twice, by uid and by name; expected it once"
            )

    def refuse(self, slot: int, tensor: Any) -> None:
        expected = self.tensors[slot]
        assert expected.dims is not None and expected.strides is not None and expected.dtype is not None
        where = f"graph {self.graph!r}, tensor {expected.name!r} (uid {expected.uid})"
        if type(tensor) is not Tensor and type(tensor) is not Parameter:
            raise VariantPackError(f"{where}: it is a {type(tensor).__name__}; expected a plain torch.Tensor")
        if tensor.dtype is not expected.dtype:
            raise VariantPackError(
                f"{where}: dtype {dtype_name(tensor.dtype)}; expected {dtype_name(expected.dtype)}; convert it, or "
                "declare the tensor so"
            )
        if tensor.device != self.device:
            raise VariantPackError(
                f"{where}: it is on {tensor.device}; expected {self.device}; move it, or make the graph for its device"
            )
        if tensor.layout is not torch.strided:
            raise VariantPackError(f"{where}: layout {tensor.layout}; expected a dense torch.Tensor; use to_dense()")
        if tuple(tensor.shape) != expected.dims:
            raise VariantPackError(f"{where}: dims {tuple(tensor.shape)}; expected {expected.dims}")
        if not same_strides(expected.dims, tensor.stride(), expected.strides):
            raise VariantPackError(
                f"{where}: strides {tensor.stride()}; expected {expected.strides}; declare the tensor with "
                "graph.tensor_like, or copy it into that memory order"
            )
        if tensor.is_neg():
            raise VariantPackError(f"{where}: its values are negated lazily; expected plain memory; use resolve_neg()")


class _Bytes:
    """A tensor's memory as numpy describes it; nothing is read."""

    def __init__(self, tensor: Tensor) -> None:
        size = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size for stride in tensor.stride()),
            "typestr": f"|V{size}",
            "data": (tensor.data_ptr(), False),
        }


def _share_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors whose ranges of memory meet share a byte; True where that is too hard to find out."""
    if is_dense(one) and is_dense(other):
        return True
    try:
        return np.shares_memory(np.asarray(_Bytes(one)), np.asarray(_Bytes(other)), max_work=1 << 20)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def _hashable(key: Any) -> bool:
    try:
        hash(key)
    except TypeError:
        return False
    return True
