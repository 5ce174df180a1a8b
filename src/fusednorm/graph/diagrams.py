"""A graph for people: what was fused, what was not and why, and the picture as Mermaid text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusednorm.dtypes import dtype_name
from fusednorm.graph.fusion import Operation, Remark
from fusednorm.graph.nodes import Node
from fusednorm.graph.plans import ExecutionPlan
from fusednorm.graph.tensors import TensorAttributes
from fusednorm.text import printable


@dataclass(frozen=True)
class Explanation:
    """A graph's operations, fusions and plans; ``print`` it, or read the fields. ``plan`` is the built one, or None."""

    graph: str
    operations: tuple[Operation, ...]
    remarks: tuple[Remark, ...]
    plans: tuple[ExecutionPlan, ...]
    plan: ExecutionPlan | None

    @property
    def fused(self) -> tuple[Remark, ...]:
        return tuple(remark for remark in self.remarks if remark.fused)

    @property
    def not_fused(self) -> tuple[Remark, ...]:
        return tuple(remark for remark in self.remarks if not remark.fused)

    def __str__(self) -> str:
        lines = [f"graph {self.graph}"]
        lines += [f"  runs       {operation.label}" for operation in self.operations]
        for remark in self.remarks:
            lines.append(f"  {'fused' if remark.fused else 'not fused':<10} {remark.nodes}: {remark.reason}")
        for plan in self.plans:
            chosen = " (chosen)" if plan is self.plan else ""
            lines.append(f"  plan       {plan.name}{chosen}" + (f": no, {plan.reason}" if plan.reason else ""))
        if self.plan is not None:
            bits = "the same bits for the same tensors" if self.plan.deterministic else "not promised the same bits"
            lines.append(f"  numerics   accumulates in {self.plan.accumulation}; {bits}")
            lines += [f"  numerics   {note}" for note in self.plan.notes]
            if self.plan.program is not None:
                lines.append(f"  workspace  {self.plan.program.workspace_bytes} bytes")
        return "\n".join(printable(line, keep="") for line in lines)


def _quoted(text: str) -> str:
    """A label that Mermaid takes as text, whatever is in it."""
    text = printable(text.replace("\n", " "), keep="")
    return '"' + text.replace("#", "#35;").replace('"', "#quot;").replace("<", "#lt;") + '"'


def _details(tensor: TensorAttributes) -> str:
    words = [tensor.name]
    if tensor.dims is not None:
        words.append("x".join(map(str, tensor.dims)))
    if tensor.dtype is not None:
        words.append(dtype_name(tensor.dtype))
    return " ".join(words)


def mermaid(name: str, nodes: Sequence[Node], tensors: Sequence[TensorAttributes]) -> str:
    """A flowchart: boxes are nodes, rounded ones the tensors from outside; virtual tensors are labels of edges."""
    lines = ["---", "title: " + _quoted(name), "---", "flowchart TD"]
    number = {node: index for index, node in enumerate(nodes)}
    outside = {tensor: f"t{index}" for index, tensor in enumerate(tensors) if not tensor.is_virtual}
    makers = {tensor: node for node in nodes for tensor in node.outputs.values()}
    lines += [f"  {key}({_quoted(_details(tensor))})" for tensor, key in outside.items()]
    for node, index in number.items():
        facts = [f"{key}={value}" for key, value in node.attributes.items() if value is not None]
        label = " ".join([str(node), *facts])
        lines.append(f"  n{index}[{_quoted(label)}]")
        for port, tensor in node.inputs.items():
            if tensor in outside:
                lines.append(f"  {outside[tensor]} -->|{_quoted(port)}| n{index}")
            elif tensor in makers:
                lines.append(f"  n{number[makers[tensor]]} -.->|{_quoted(f'{_details(tensor)} as {port}')}| n{index}")
        lines += [f"  n{index} -->|{_quoted(port)}| {outside[t]}" for port, t in node.outputs.items() if t in outside]
    return "\n".join(lines) + "\n"
