"""Execution plans: every combination of instances for the operations of a graph, in heuristic order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product

import torch

from fusednorm.choice import choose, forced, instances
from fusednorm.dtypes import compute_dtype, dtype_name
from fusednorm.graph.calls import NormProblem, fits, problem_of_operation
from fusednorm.graph.fusion import Operation, OperationGraph
from fusednorm.graph.logs import logger_of
from fusednorm.graph.lowering import Lowering, Program
from fusednorm.graph.nodes import Node
from fusednorm.graph.tensors import TensorAttributes
from fusednorm.problem import Problem
from fusednorm.text import printable

logger = logger_of(__name__)

MOST_COMBINATIONS = 32  # of supported instances for one operation graph, the first in heuristic order
TORCH = "torch"  # the name of a plan that has pointwise nodes alone


@dataclass(eq=False)
class ExecutionPlan:
    """One way to run a graph.

    ``reason`` is None, or why the plan cannot run here. ``accumulation`` is the dtype in which statistics and sums are
    accumulated. ``deterministic`` says that the same tensors give the same bits. ``notes`` say where virtual tensors
    are kept, and what is converted or copied.
    """

    name: str
    operations: OperationGraph
    instances: tuple[str, ...]
    reason: str | None
    accumulation: str
    deterministic: bool = True
    notes: tuple[str, ...] = ()
    program: Program | None = None

    def build(self, pack: Sequence[TensorAttributes], device: torch.device) -> Program:
        """Load or compile the kernels and lay out the workspace; done once."""
        if self.program is None:
            program = Lowering(pack, device).program(self.operations.operations, self.instances)
            self.notes = (*self.notes, *program.notes)
            self.program = program
            logger.info("built plan %s: %d bytes of workspace", self.name, program.workspace_bytes)
        return self.program

    def __str__(self) -> str:
        return printable(self.name if self.reason is None else f"{self.name}: {self.reason}", keep="")


@dataclass(frozen=True)
class _Choice:
    """An operation with the instances that can run it, the default first, and why the others cannot."""

    operation: Operation
    found: NormProblem
    supported: tuple[str, ...]
    refused: tuple[tuple[str, str], ...]


def why_not(operation: Operation, device: torch.device) -> str | None:
    """Why the instance that runs a norm alone does not compute in the same call what is around it; None if it does."""
    found = problem_of_operation(operation, device)
    if not fits(operation, found):
        return "the strides of its tensors are not those that its kernels read and write"
    name = forced() or choose(alone(found.problem)).name
    return next((one.reason for one in instances(found.problem) if one.instance.name == name), None)


def alone(problem: Problem) -> Problem:
    """The problem without what is added, which chooses the instance."""
    return problem if problem.added is None else replace(problem, added=None)


def _choice(operation: Operation, device: torch.device, compute: torch.dtype) -> _Choice:
    found = problem_of_operation(operation, device)
    named = forced()
    if named is not None:
        reason = next(one.reason for one in instances(found.problem) if one.instance.name == named)
        candidates = {named: reason}
    else:
        candidates = {one.instance.name: one.reason for one in instances(found.problem)}
    accumulated = compute_dtype(found.dtype)
    if torch.promote_types(accumulated, compute) != accumulated:
        narrow = f"accumulates in {dtype_name(accumulated)} for {dtype_name(found.dtype)} data"
        wanted = f"compute_data_type is {dtype_name(compute)}; declare the data {dtype_name(compute)}"
        candidates = {name: reason or f"{narrow}, {wanted}" for name, reason in candidates.items()}
    supported = [name for name, reason in candidates.items() if reason is None]
    if named is None and supported:
        default = choose(alone(found.problem)).name
        supported.sort(key=lambda name: (name != default, name == "reference"))
    refused = [(name, reason) for name, reason in candidates.items() if reason is not None]
    return _Choice(operation, found, tuple(supported), tuple(refused))


def create_plans(
    graphs: Sequence[tuple[str, OperationGraph]], device: torch.device, compute: torch.dtype
) -> list[ExecutionPlan]:
    """The plans of each operation graph, each with the prefix of its plans' names: those that can run first."""
    plans = [plan for prefix, operations in graphs for plan in _plans(prefix, operations, device, compute)]
    return sorted(plans, key=lambda plan: plan.reason is not None)


def _plans(
    prefix: str, operations: OperationGraph, device: torch.device, compute: torch.dtype
) -> Iterator[ExecutionPlan]:
    norms = [operation for operation in operations.operations if operation.is_norm]
    choices = [_choice(operation, device, compute) for operation in norms]
    accumulation = dtype_name(max((compute_dtype(one.found.dtype) for one in choices), key=str, default=compute))
    notes = tuple(_notes(operations))

    def plan(names: Sequence[str], reason: str | None) -> ExecutionPlan:
        # Torch sums in an order that depends on the number of threads; the library's kernels do not.
        exact = "reference" not in names
        more = () if exact else ("the reference's sums may depend on the number of threads",)
        name = prefix + ("+".join(names) or TORCH)
        return ExecutionPlan(name, operations, tuple(names), reason, accumulation, exact, notes + more)

    if all(choice.supported for choice in choices):
        ranked = sorted(
            product(*(enumerate(choice.supported) for choice in choices)),
            key=lambda names: sum(rank for rank, _ in names),
        )
        if len(ranked) > MOST_COMBINATIONS:
            logger.info("%d combinations of instances; the first %d are plans", len(ranked), MOST_COMBINATIONS)
        for combination in islice(ranked, MOST_COMBINATIONS):
            yield plan([name for _, name in combination], None)
    for index, choice in enumerate(choices):
        for name, reason in choice.refused:
            names = [other.supported[0] if other.supported else name for other in choices]
            names[index] = name
            yield plan(names, f"{choice.operation.label}: {name} {reason}")


def _notes(operations: OperationGraph) -> Iterator[str]:
    """Where each virtual tensor is kept, and in which dtype."""
    present = {tensor for one in operations.operations for tensor in [*one.read, *one.outputs.values()]}
    for operation in operations.operations:
        if not operation.is_norm or len(operation.nodes) == 1:
            continue
        kept = dtype_name(compute_dtype(problem_of_operation(operation, torch.device("cpu")).dtype))
        for tensor in _inner(operation.nodes):
            if tensor not in present:
                assert tensor.dtype is not None
                declared = dtype_name(tensor.dtype)
                yield f"{tensor.name}: in registers as {kept}" + ("" if declared == kept else f", not as {declared}")
    for operation in operations.operations:
        for tensor in operation.outputs.values():
            if tensor.is_virtual:
                assert tensor.dtype is not None
                yield f"{tensor.name}: in the workspace as {dtype_name(tensor.dtype)}"


def _inner(nodes: Sequence[Node]) -> list[TensorAttributes]:
    """The tensors that one node of a fused operation hands to another."""
    read = {tensor for node in nodes for tensor in node.inputs.values()}
    return [tensor for node in nodes for tensor in node.outputs.values() if tensor in read]
