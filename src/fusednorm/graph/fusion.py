"""The operation graph: which nodes run as one operation of the library, which do not, and why.

An operation is a norm with what is fused into it, or a pointwise node. The patterns:

- norm, then an activation: the forward kernels apply it to z in registers.
- an activation's backward, then a norm's backward: the backward kernels recompute z from x and the statistics. So z
  must come from a norm of the same x, scale and statistics: a forward in this graph, or a norm with given statistics,
  as in hipDNN's batchnorm inference + activation backward + batchnorm backward. That norm runs only if something else
  needs it.
- norm, add, activation: not one kernel; the add and the activation run in the memory of the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from fusednorm.activations import Activation
from fusednorm.dtypes import compute_dtype, dtype_name
from fusednorm.graph.nodes import Node, by_operand, groups_or_dims_of
from fusednorm.graph.tensors import TensorAttributes

NO_POST_ADD = "the kernels have no addition between the norm and the activation"


@dataclass(frozen=True, eq=False)
class Operation:
    """A norm or a pointwise ``node``, all ``nodes`` that run with it, and the tensors that are read and written."""

    node: Node
    nodes: tuple[Node, ...]
    inputs: Mapping[str, TensorAttributes]
    outputs: Mapping[str, TensorAttributes]
    activation: Activation | None = None

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


def node_by_node(order: Sequence[Node]) -> OperationGraph:
    """Every node on its own."""
    return OperationGraph(_needed([_alone(node) for node in order]), ())


def fuse(order: Sequence[Node]) -> OperationGraph:
    """The nodes, in topological order, with every pattern fused that the library's kernels have."""
    search = _Search(order)
    search.backwards()
    search.forwards()
    operations = [search.replaced.get(node) or _alone(node) for node in order if node not in search.absorbed]
    return OperationGraph(_needed(operations), tuple(search.remarks))


def _alone(node: Node) -> Operation:
    return Operation(node, (node,), node.inputs, node.outputs, node.activation)


def _needed(operations: list[Operation]) -> tuple[Operation, ...]:
    """The operations on which an output depends, each with only the results that are outputs or read."""
    kept: list[Operation] = []
    read: set[TensorAttributes] = set()
    for operation in reversed(operations):
        outputs = {
            port: tensor for port, tensor in operation.outputs.items() if not tensor.is_virtual or tensor in read
        }
        if outputs:
            read |= set(operation.inputs.values())
            kept.append(replace(operation, outputs=outputs))
    return tuple(reversed(kept))


class _Search:
    def __init__(self, order: Sequence[Node]) -> None:
        self.order = order
        self.producer = {tensor: node for node in order for tensor in node.outputs.values()}
        self.readers: dict[TensorAttributes, list[Node]] = {}
        for node in order:
            for tensor in node.inputs.values():
                self.readers.setdefault(tensor, []).append(node)
        self.absorbed: set[Node] = set()
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
            origin = self.producer.get(pointwise.inputs["x"])
            reason = self._why_no_backward(node, pointwise, origin)
            if reason is not None:
                self.remark((pointwise, node), reason)
                continue
            assert origin is not None
            inputs = {**node.inputs, "dy": pointwise.inputs["dy"]}
            if "bias" in origin.inputs:
                inputs["bias"] = origin.inputs["bias"]
            self.absorbed.add(pointwise)
            operation = Operation(node, (pointwise, node), inputs, node.outputs, pointwise.activation)
            z = pointwise.inputs["x"]
            if z.is_virtual and all(reader in self.absorbed for reader in self.readers[z]):
                operation = replace(operation, nodes=(origin, pointwise, node))
            self.replaced[node] = operation
            self.remark(operation.nodes, "one backward kernel that recomputes z from x and the statistics", fused=True)

    def _why_no_backward(self, node: Node, pointwise: Node, origin: Node | None) -> str | None:
        dz = pointwise.outputs["dx"]
        if not dz.is_virtual:
            return f"{dz.name} is an output, and the kernel does not write it"
        others = [reader.name for reader in self.readers[dz] if reader is not node]
        if others:
            return f"{dz.name} is also read by {', '.join(others)}"
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

    # --- norm + activation ---

    def forwards(self) -> None:
        for node in self.order:
            if node.kind.operation not in ("forward", "inference"):
                continue
            z = node.outputs.get("y")
            readers = [reader for reader in self.readers.get(z, []) if reader not in self.absorbed] if z else []
            activations = [reader for reader in readers if reader.kind.operation == "activation"]
            if z is not None and activations:
                reason = self._why_no_forward(node, z, readers)
                if reason is None:
                    self._fuse_forward(node, activations[0])
                else:
                    self.remark((node, activations[0]), reason)
            for reader in readers:
                if reader.kind.operation == "arithmetic":
                    self._arithmetic(node, reader)

    def _fuse_forward(self, node: Node, activation: Node) -> None:
        outputs = {**node.outputs, "y": activation.outputs["y"]}
        self.absorbed.add(activation)
        nodes = (node, activation)
        self.replaced[node] = Operation(node, nodes, node.inputs, outputs, activation.activation)
        self.remark(nodes, "one forward kernel; z stays in registers", fused=True)

    def _why_no_forward(self, node: Node, z: TensorAttributes, readers: Sequence[Node]) -> str | None:
        if not z.is_virtual:
            return f"{z.name} is an output, and the kernel does not write it"
        if len(readers) > 1:
            return f"{z.name} is read by {', '.join(reader.name for reader in readers)}"
        return _too_wide((z,), node.inputs["x"])

    def _arithmetic(self, node: Node, reader: Node) -> None:
        result = reader.outputs["y"]
        after = [one for one in self.readers.get(result, []) if one.kind.operation == "activation"]
        if reader.kind.name == "add" and after:
            self.remark((node, reader, after[0]), f"{NO_POST_ADD}; they run after the norm")
        else:
            self.remark((node, reader), f"the kernels have no {reader.kind.name} with a tensor")


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
