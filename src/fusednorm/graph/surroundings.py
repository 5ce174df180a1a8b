"""What stands around a norm in a graph, as far as one call of the library computes it with the norm.

    s = x + gate · r        z = norm(s)        m = z · (scale + 1) + shift        y = phi(m + residual)

Before the norm stands an ``add`` of a tensor, or of a ``mul`` by a gate. Behind it stand a ``mul`` by 1 + scale, an
``add`` of a shift, an ``add`` of a tensor of x's dims, and an activation, in this order, each of them or not. The 1 is
a tensor with that ``value``. Behind layernorm and rmsnorm of the last dim a quantizing node may follow.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fusednorm.graph.nodes import Node, groups_or_dims_of
from fusednorm.graph.tensors import Dims, TensorAttributes
from fusednorm.norm import ROW_FAMILIES

Tensors = Mapping[str, TensorAttributes]


class Wiring:
    """Which node writes each tensor and which nodes read it; ``absorbed`` nodes run as a part of others."""

    def __init__(self, order: Sequence[Node]) -> None:
        self.producer = {tensor: node for node in order for tensor in node.outputs.values()}
        self.readers: dict[TensorAttributes, list[Node]] = {}
        for node in order:
            for tensor in node.inputs.values():
                self.readers.setdefault(tensor, []).append(node)
        self.absorbed: set[Node] = set()
        self.read_with: dict[Node, Sequence[TensorAttributes]] = {}  # by the operation of a node

    def readers_left(self, tensor: TensorAttributes) -> list[Node]:
        return [reader for reader in self.readers.get(tensor, []) if reader not in self.absorbed]

    def made_by(self, tensor: TensorAttributes, kind: str) -> Node | None:
        """The node of this kind that writes a tensor, unless it runs as a part of another."""
        node = self.producer.get(tensor)
        return node if node is not None and node.kind.name == kind and node not in self.absorbed else None

    def inner(self, tensor: TensorAttributes, kind: str) -> Node | None:
        """The same of a virtual tensor that one node alone reads."""
        alone = tensor.is_virtual and len(self.readers.get(tensor, [])) == 1
        return self.made_by(tensor, kind) if alone else None

    def depends(self, tensors: Iterable[TensorAttributes], nodes: Iterable[Node]) -> bool:
        """Whether one of the tensors follows from a result of one of the nodes."""
        sought, seen, left = set(nodes), set(), list(tensors)
        while left:
            maker = self.producer.get(left.pop())
            if maker in sought:
                return True
            if maker is not None and maker not in seen:
                seen.add(maker)
                left += self.read_with.get(maker, list(maker.inputs.values()))
        return False


@dataclass(frozen=True)
class Before:
    """The sum before a norm: ``x`` and what is ``added`` to it give ``total``, by ``nodes``."""

    nodes: tuple[Node, ...]
    x: TensorAttributes
    added: Tensors
    total: TensorAttributes


def sum_before(norm: Node, wiring: Wiring) -> Before | None:
    """The sum that a norm reads as its x; None where it reads no sum."""
    total = norm.inputs["x"]
    add = wiring.made_by(total, "add")
    if add is None or total.dims is None:
        return None
    orders = (add.inputs["a"], add.inputs["b"]), (add.inputs["b"], add.inputs["a"])
    found = [_added(x, other, total, wiring) for x, other in orders if x.dims == total.dims]
    # Of two tensors of x's dims the second is added, but a product is always what is added.
    best = max((one for one in found if one is not None), key=lambda one: len(one.added), default=None)
    return best and replace(best, nodes=(*best.nodes, add))


def _added(x: TensorAttributes, other: TensorAttributes, total: TensorAttributes, wiring: Wiring) -> Before | None:
    """x + other; None where no call adds an ``other`` of its dims."""
    mul = wiring.inner(other, "mul")
    if mul is not None:
        for gate, tensor in ((mul.inputs["a"], mul.inputs["b"]), (mul.inputs["b"], mul.inputs["a"])):
            if _is_addable(tensor, total):
                return Before((mul,), x, {"pre_add": tensor, "pre_gate": gate}, total)
    return Before((), x, {"pre_add": other}, total) if _is_addable(other, total) else None


def _is_addable(tensor: TensorAttributes, x: TensorAttributes) -> bool:
    assert tensor.dims is not None and x.dims is not None
    return tensor.value is None and tensor.dims in (x.dims, plane_dims(x.dims))


def plane_dims(dims: Dims) -> Dims:
    """The dims of one number for each sample and channel."""
    return (*dims[:2], *(1,) * (len(dims) - 2))


@dataclass(frozen=True)
class Behind:
    """The nodes behind a norm, up to ``result``, with the tensors that they bring under the library's names.
    ``activation`` and ``quantize`` are the last of them where there are such."""

    result: TensorAttributes
    nodes: tuple[Node, ...] = ()
    added: Tensors = field(default_factory=dict)
    activation: Node | None = None
    quantize: Node | None = None

    def then(self, *nodes: Node, **added: TensorAttributes) -> Behind:
        result = nodes[-1].outputs["y"]
        return replace(self, result=result, nodes=(*self.nodes, *nodes), added={**self.added, **added})


def follow(norm: Node, z: TensorAttributes, wiring: Wiring) -> Iterator[Behind]:
    """Everything that one call could compute behind a norm whose result is z: nothing, one node, two, ..."""
    found: Behind | None = Behind(z)
    while found is not None:
        yield found
        readers = wiring.readers_left(found.result)
        alone = found.result.is_virtual and len(readers) == 1 and found.quantize is None
        found = _next(norm, found, readers[0], wiring) if alone else None


def _next(norm: Node, found: Behind, reader: Node, wiring: Wiring) -> Behind | None:
    """What was found with the next node, where one call computes that too."""
    if reader.kind.operation == "quantize":
        quantizes = _is_of_rows(norm) and "post_add" not in found.added
        return replace(found.then(reader), quantize=reader) if quantizes else None
    if found.activation is not None:
        return None
    if reader.kind.operation == "activation":
        return replace(found.then(reader), activation=reader)
    if reader.kind.operation != "arithmetic":
        return None
    operand = reader.inputs["b" if reader.inputs["a"] is found.result else "a"]
    if operand is found.result or operand.value is not None:
        return None
    x, first = norm.inputs["x"], not found.added
    if reader.kind.name == "mul":
        factor = one_plus(operand, wiring) if first else None
        if factor is None or not _modulates(norm, factor[1], x):
            return None
        return found.then(factor[0], reader, scale=factor[1])
    if operand.dims == x.dims:
        return None if "post_add" in found.added else found.then(reader, post_add=operand)
    modulated = first or set(found.added) == {"scale"}
    return found.then(reader, shift=operand) if modulated and _modulates(norm, operand, x) else None


def _is_of_rows(norm: Node) -> bool:
    """Whether a norm is over the last dim alone and keeps no statistics, as those with an output of 8 bits are."""
    dims = norm.inputs["x"].dims
    if norm.kind.family not in ROW_FAMILIES or dims is None or "inv_variance" in norm.inputs:
        return False
    kept = any(tensor is not norm.outputs["y"] and not tensor.is_virtual for tensor in norm.outputs.values())
    return groups_or_dims_of(norm, dims) == 1 and not kept


def one_plus(tensor: TensorAttributes, wiring: Wiring) -> tuple[Node, TensorAttributes] | None:
    """The node that writes 1 + scale for a single reader, and the scale."""
    add = wiring.inner(tensor, "add")
    if add is not None:
        for one, scale in ((add.inputs["a"], add.inputs["b"]), (add.inputs["b"], add.inputs["a"])):
            if one.value == 1.0:
                return add, scale
    return None


def _modulates(norm: Node, tensor: TensorAttributes, x: TensorAttributes) -> bool:
    """Whether a tensor has the dims of a scale or shift: numbers for samples and channels, or, of a norm of trailing
    dims, whatever broadcasts."""
    assert tensor.dims is not None and x.dims is not None
    if norm.kind.family in ROW_FAMILIES:
        return "inv_variance" not in norm.inputs
    return tensor.dims == plane_dims(x.dims)
