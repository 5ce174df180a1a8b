"""The operation graph: which nodes run as one operation of the library, which do not, and why.

An operation is a norm with what is fused into it, or a pointwise node. The patterns:

- the sum before a norm, the norm, and a modulation, a sum and an activation behind it (:mod:`.surroundings`): one call
  of the library. An activation alone is in every forward kernel. A sum is fused where the norm's own instance adds, as
  in the functional API; else the nodes run one by one.
- an activation's backward, then a norm's backward: the backward kernels recompute z from x and the statistics. So z
  must come from a norm of the same x, scale and statistics: a forward in this graph, or a norm with given statistics,
  as in hipDNN's batchnorm inference + activation backward + batchnorm backward. That norm runs only if something else
  needs it. Where a tensor was added to z, the kernel gives its gradient, dz, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from fusednorm.activations import Activation
from fusednorm.dtypes import compute_dtype, dtype_name
from fusednorm.graph.nodes import Node, by_operand, groups_or_dims_of
from fusednorm.graph.surroundings import Before, Behind, Wiring, follow, sum_before
from fusednorm.graph.tensors import TensorAttributes

COMPOSED = "this plan composes sums of torch's operators"


@dataclass(frozen=True, eq=False)
class Operation:
    """A norm or a pointwise ``node``, all ``nodes`` that run with it, and the tensors that are read and written.

    ``inputs`` and ``outputs`` are those of the node's ports; ``added`` are the tensors of the nodes around a norm, by
    the library's names: pre_add, pre_gate, scale, shift, post_add, out_scale. Among a norm's outputs are also ``sum``,
    which it normalizes with a pre_add, and ``row_scale``; y is that of ``quantize`` where this is a node behind it.
    """

    node: Node
    nodes: tuple[Node, ...]
    inputs: Mapping[str, TensorAttributes]
    outputs: Mapping[str, TensorAttributes]
    activation: Activation | None = None
    added: Mapping[str, TensorAttributes] = field(default_factory=dict)
    quantize: Node | None = None

    @property
    def surrounded(self) -> bool:
        """Whether a norm takes in more than an activation."""
        return bool(self.added) or self.quantize is not None

    @property
    def read(self) -> list[TensorAttributes]:
        """Every tensor that it reads, once."""
        return list(dict.fromkeys((*self.inputs.values(), *self.added.values())))

    @property
    def label(self) -> str:
        return " + ".join(node.name for node in self.nodes)

    @property
    def operands(self) -> dict[str, TensorAttributes]:
        """The inputs of a norm by the library's names of its operands."""
        return by_operand(self.inputs)

    @property
    def is_norm(self) -> bool:
        return self.node.kind.family is not None


@dataclass(frozen=True)
class Remark:
    """Whether some nodes were fused into one operation, and why or why not."""

    nodes: str
    fused: bool
    reason: str

    def __str__(self) -> str:
        return f"{self.nodes}: {'fused' if self.fused else 'not fused'}, {self.reason}"


@dataclass(frozen=True)
class OperationGraph:
    """The operations in the order in which they run, and remarks on fusion."""

    operations: tuple[Operation, ...]
    remarks: tuple[Remark, ...]

    @property
    def fused(self) -> bool:
        return any(remark.fused for remark in self.remarks)

    @property
    def added(self) -> bool:
        """Whether some norm is surrounded."""
        return any(operation.surrounded for operation in self.operations)


def node_by_node(order: Sequence[Node]) -> OperationGraph:
    """Every node on its own."""
    return OperationGraph(_needed([_alone(node) for node in order]), ())


#: None where the library computes an operation with what was added in one call, or why not.
WhyNot = Callable[[Operation], str | None]


def fuse(order: Sequence[Node], why_not: WhyNot) -> OperationGraph:
    """The nodes, in topological order, with every pattern fused that the library's kernels have."""
    search = _Search(order, why_not)
    search.backwards()
    search.forwards()
    operations = [search.replaced.get(node) or _alone(node) for node in order if node not in search.absorbed]
    return OperationGraph(_needed(_sorted(operations)), tuple(search.remarks))


def composed(_: Operation) -> str:
    """The reason for which no operation adds anything in a plan of composed sums."""
    return COMPOSED


def _alone(node: Node) -> Operation:
    return Operation(node, (node,), node.inputs, node.outputs, node.activation)


def _sorted(operations: list[Operation]) -> list[Operation]:
    """The operations with each behind those that it reads from, else in their order."""
    maker = {tensor: operation for operation in operations for tensor in operation.outputs.values()}
    ordered: dict[Operation, None] = {}
    left = operations[::-1]
    while left:
        waits = [maker[tensor] for tensor in left[-1].read if tensor in maker and maker[tensor] not in ordered]
        if waits:
            left += waits
        else:
            ordered[left.pop()] = None
    return list(ordered)


def _needed(operations: list[Operation]) -> tuple[Operation, ...]:
    """The operations on which an output depends, each with only the results that are outputs or read."""
    kept: list[Operation] = []
    read: set[TensorAttributes] = set()
    for operation in reversed(operations):
        outputs = {
            port: tensor for port, tensor in operation.outputs.items() if not tensor.is_virtual or tensor in read
        }
        if outputs:
            read |= set(operation.read)
            kept.append(replace(operation, outputs=outputs))
    return tuple(reversed(kept))


class _Search(Wiring):
    def __init__(self, order: Sequence[Node], why_not: WhyNot) -> None:
        super().__init__(order)
        self.order, self.why_not = order, why_not
        self.replaced: dict[Node, Operation] = {}
        self.remarks: list[Remark] = []

    def remark(self, nodes: Sequence[Node], reason: str, fused: bool = False) -> None:
        self.remarks.append(Remark(" + ".join(node.name for node in nodes), fused, reason))

    # --- activation backward + norm backward ---

    def backwards(self) -> None:
        for node in self.order:
            if node.kind.operation != "backward":
                continue
            pointwise = self.producer.get(node.inputs["dy"])
            if pointwise is None or pointwise.kind.operation != "activation_backward":
                continue
            origin, post_add = self._origin(pointwise)
            reason = self._why_no_backward(node, pointwise, origin, post_add)
            if reason is not None:
                self.remark((pointwise, node), reason)
                continue
            assert origin is not None
            operation = self._backward(node, pointwise, origin, post_add)
            reason = self.why_not(operation) if post_add is not None else None
            if reason is not None:
                self.remark((pointwise, node), reason)
                continue
            self.absorbed.add(pointwise)
            self.read_with |= dict.fromkeys(operation.nodes, operation.read)
            z = pointwise.inputs["x"]
            if z.is_virtual and all(reader in self.absorbed for reader in self.readers[z]):
                operation = replace(operation, nodes=(origin, pointwise, node))
            self.replaced[node] = operation
            self.remark(operation.nodes, "one backward kernel that recomputes z from x and the statistics", fused=True)

    def _origin(self, pointwise: Node) -> tuple[Node | None, TensorAttributes | None]:
        """The node that makes z, and what is added to z before the activation, whose backward ``pointwise`` is."""
        maker = self.producer.get(pointwise.inputs["x"])
        if maker is not None and maker.kind.name == "add":
            for z, other in ((maker.inputs["a"], maker.inputs["b"]), (maker.inputs["b"], maker.inputs["a"])):
                norm = self.producer.get(z)
                if norm is not None and norm.outputs.get("y") is z and other.dims == z.dims and norm.kind.family:
                    return norm, other
        return maker, None

    def _backward(self, node: Node, pointwise: Node, origin: Node, post_add: TensorAttributes | None) -> Operation:
        inputs, outputs = {**node.inputs, "dy": pointwise.inputs["dy"]}, {**node.outputs}
        if "bias" in origin.inputs:
            inputs["bias"] = origin.inputs["bias"]
        added = {} if post_add is None else {"post_add": post_add}
        if post_add is not None:
            outputs["dz"] = pointwise.outputs["dx"]
        return Operation(node, (pointwise, node), inputs, outputs, pointwise.activation, added)

    def _why_no_backward(
        self, node: Node, pointwise: Node, origin: Node | None, post_add: TensorAttributes | None
    ) -> str | None:
        dz = pointwise.outputs["dx"]
        others = [reader.name for reader in self.readers[dz] if reader is not node]
        if post_add is None and not dz.is_virtual:
            return f"{dz.name} is an output, and the kernel does not write it"
        if post_add is None and others:
            return f"{dz.name} is also read by {', '.join(others)}"
        if post_add is not None and (others or not dz.is_virtual) and dz.dtype != node.inputs["x"].dtype:
            assert dz.dtype is not None
            return f"{dz.name} is declared {dtype_name(dz.dtype)}, and the kernel rounds it to the dtype of x"
        if self.depends((tensor for port, tensor in node.inputs.items() if port != "dy"), [pointwise]):
            return f"{node.name} reads what follows from {dz.name}"
        if origin is None:
            z = pointwise.inputs["x"].name
            return f"the kernel recomputes z and cannot read {z}; apply the norm with given statistics in this graph"
        if origin.kind.family is None or origin.kind.operation == "backward":
            return f"z comes from {origin.name}, which the kernel cannot recompute; it must be a norm's"
        x = node.inputs["x"]
        assert x.dims is not None
        view, origins = ((one.kind.family, groups_or_dims_of(one, x.dims)) for one in (node, origin))
        same_scale = origin.inputs.get("scale") is node.inputs.get("scale")
        if origin.inputs["x"] is not x or view != origins or not same_scale:
            return f"z comes from {origin.name}, whose family, x or scale is not that of {node.name}"
        for port in ("mean", "inv_variance"):
            statistic = origin.inputs.get(port) or origin.outputs.get(port)
            if port in node.inputs and statistic is not node.inputs[port]:
                return f"{origin.name} and {node.name} have not the same {port}"
        return _too_wide((pointwise.inputs["x"], dz), x)

    # --- a norm and what stands around it ---

    def forwards(self) -> None:
        for node in self.order:
            z = node.outputs.get("y")
            if node.kind.operation not in ("forward", "inference") or z is None or not self._is_needed(node):
                continue
            chains = list(follow(node, z, self))
            before = sum_before(node, self)
            reasons = []
            for operation in self._candidates(node, before, chains[::-1]):
                reason = self._why_no_forward(operation, z)
                if reason is None:
                    self._take(operation)
                    break
                reasons.append((operation.nodes, reason))
            for nodes, reason in reasons[:1]:
                self.remark(nodes, reason)
            self._beyond(node, before, chains)

    def _is_needed(self, node: Node) -> bool:
        return any(not result.is_virtual or self.readers_left(result) for result in node.outputs.values())

    def _candidates(self, node: Node, before: Before | None, chains: Sequence[Behind]) -> Iterable[Operation]:
        """Operations around a norm, those of the most nodes first."""
        found = [
            self._surrounded(node, one, behind)
            for behind in chains
            for one in ((before, None) if before else (None,))
            if one is not None or behind.nodes
        ]
        return sorted(found, key=lambda operation: -len(operation.nodes))

    def _surrounded(self, node: Node, before: Before | None, behind: Behind) -> Operation:
        inputs, outputs = {**node.inputs}, {**node.outputs, "y": behind.result}
        added, nodes = {**behind.added}, (node, *behind.nodes)
        if before is not None:
            inputs["x"], outputs["sum"] = before.x, before.total
            added |= before.added
            nodes = (*before.nodes, *nodes)
        quantize = behind.quantize
        activation = None if behind.activation is None else behind.activation.activation
        if quantize is not None and "scale" in quantize.inputs:
            added["out_scale"] = quantize.inputs["scale"]
        elif quantize is not None:
            outputs["row_scale"] = quantize.outputs["scale"]
        return Operation(node, nodes, inputs, outputs, activation, added, quantize)

    def _take(self, operation: Operation) -> None:
        self.absorbed |= {one for one in operation.nodes if one is not operation.node}
        self.replaced[operation.node] = operation
        self.read_with |= dict.fromkeys(operation.nodes, operation.read)
        kernel = "one forward kernel" + (" that makes the sum" if "sum" in operation.outputs else "")
        self.remark(operation.nodes, f"{kernel}; z stays in registers", fused=True)

    def _why_no_forward(self, operation: Operation, z: TensorAttributes) -> str | None:
        added, x = operation.added, operation.inputs["x"]
        if self.depends(added.values(), operation.nodes):
            return "what is added follows from the norm itself"
        total = operation.outputs.get("sum")
        if total is not None and total.dtype != x.dtype:
            assert total.dtype is not None and x.dtype is not None
            kept = dtype_name(x.dtype)
            return f"{total.name} is declared {dtype_name(total.dtype)}, and the kernel rounds the sum to {kept}"
        inner = [tensor for one in operation.nodes for tensor in one.outputs.values()]
        inner = [tensor for tensor in inner if tensor not in operation.outputs.values()]
        return _too_wide((z, *inner), x) or (self.why_not(operation) if operation.surrounded else None)

    # --- what follows a norm, and is not fused with it ---

    def _beyond(self, node: Node, before: Before | None, chains: Sequence[Behind]) -> None:
        """Remarks on the nodes that read what is behind a norm, where nothing could be fused with them."""
        last = chains[-1]
        if last.activation is not None or last.quantize is not None:
            return
        readers = self.readers_left(last.result)
        for reader in readers:
            if reader.kind.operation == "activation":
                names = ", ".join(one.name for one in readers)
                name = last.result.name
                read = f"{name} is read by {names}"
                written = f"{name} is an output, and the kernel does not write it"
                self.remark((node, *last.nodes, reader), read if last.result.is_virtual else written)
            elif reader.kind.operation == "arithmetic" and (before is None or reader not in before.nodes):
                self.remark((node, *last.nodes, reader), self._why_no_arithmetic(reader, last))

    def _why_no_arithmetic(self, reader: Node, last: Behind) -> str:
        if reader.kind.name == "mul":
            return "the kernels multiply by 1 + scale, a virtual add of scale and a tensor of value 1, for each sample"
        if not last.result.is_virtual or len(self.readers_left(last.result)) > 1:
            return f"{last.result.name} is needed by itself"
        return "the kernels add a tensor of x's dims, once, or a shift for each sample"


def _too_wide(tensors: Sequence[TensorAttributes], x: TensorAttributes) -> str | None:
    """Why registers of the accumulation dtype cannot hold virtual tensors of a wider dtype; None where they can."""
    assert x.dtype is not None
    accumulation = compute_dtype(x.dtype)
    for tensor in tensors:
        assert tensor.dtype is not None
        if tensor.is_virtual and torch.promote_types(tensor.dtype, accumulation) != accumulation:
            kept = dtype_name(accumulation)
            return f"{tensor.name} is declared {dtype_name(tensor.dtype)}, and the kernel's registers hold {kept}"
    return None
