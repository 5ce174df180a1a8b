"""From operations to a program: steps over slots, with what is virtual placed in one workspace.

A slot is a position in the list of tensors that a program runs on: first the tensors of the variant pack, then those of
the workspace, last None for what is absent. Everything that does not depend on the data is done here, once.

A norm runs in one dtype, the widest of its data ports, because the kernels write what they read; a tensor of another
dtype is converted through the workspace. A result whose strides are not those that the kernel writes goes the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from fusednorm import dispatch
from fusednorm.dtypes import dtype_name
from fusednorm.graph import pointwise
from fusednorm.graph.fusion import Operation
from fusednorm.graph.nodes import group_count
from fusednorm.graph.tensors import Dims, TensorAttributes, same_strides
from fusednorm.graph.workspace import Scratch, place
from fusednorm.norm import norm_of
from fusednorm.operands import BackwardOperands, Operands, Results, Wanted
from fusednorm.problem import Problem
from fusednorm.problems import backward_direction, backward_problem, forward_problem
from fusednorm.running import move_running

Values = list[Any]


@dataclass(frozen=True)
class Step:
    """One launch: its name, and what it does with the slots."""

    label: str
    run: Callable[[Values], Any]


@dataclass(frozen=True)
class Program:
    """What a built plan executes."""

    pack: tuple[TensorAttributes, ...]
    scratch: tuple[Scratch, ...]
    steps: tuple[Step, ...]
    workspace_bytes: int
    notes: tuple[str, ...]


@dataclass(frozen=True)
class NormProblem:
    """The problem of a norm operation, and the dtype that it runs in."""

    problem: Problem
    dtype: torch.dtype
    wanted: Wanted = (False, False, False, False, False)


def _meta_of(tensor: TensorAttributes, dtype: torch.dtype | None) -> Tensor:
    assert tensor.dims is not None and tensor.strides is not None
    converted = dtype is not None and dtype != tensor.dtype
    strides = converted_strides(tensor) if converted else tensor.strides
    return torch.empty_strided(tensor.dims, strides, dtype=dtype or tensor.dtype, device="meta")


def _meta(tensor: TensorAttributes | None, dtype: torch.dtype | None = None) -> Tensor | None:
    return None if tensor is None else _meta_of(tensor, dtype)


def converted_strides(tensor: TensorAttributes) -> Dims:
    """The strides of a converted copy: the tensor's own where it is dense."""
    assert tensor.dims is not None and tensor.strides is not None
    strides: Dims = torch.empty_like(torch.empty_strided(tensor.dims, tensor.strides, device="meta")).stride()
    return strides


def _widest(tensors: Sequence[TensorAttributes | None]) -> torch.dtype:
    dtypes = [tensor.dtype for tensor in tensors if tensor is not None and tensor.dtype is not None]
    return reduce(torch.promote_types, dtypes)


def problem_of(operation: Operation, device: torch.device) -> NormProblem:
    """The problem that the instances of a norm operation are asked about."""
    given, results = operation.inputs, operation.outputs
    x, scale, bias = given["x"], given.get("scale"), given.get("bias")
    kind = operation.node.kind
    assert kind.family is not None and x.dims is not None
    groups_or_dims = group_count(operation.node, x.dims)
    if kind.operation != "backward":
        dtype = _widest([x, results.get("y")])
        given_statistics = kind.operation == "inference" or "inv_variance" in given
        # The kernels take the variance: eps is in an inverse deviation already.
        eps = 0.0 if given_statistics and "variance" not in given else float(operation.node.attributes["epsilon"])
        norm = norm_of(kind.family, groups_or_dims, 1, eps, operation.activation, not given_statistics)
        problem = forward_problem(norm, Operands(_meta_of(x, dtype), _meta(scale), _meta(bias)))
        return NormProblem(replace(problem, device=device.type), dtype)
    dtype = _widest([given["dy"], x, results.get("dx")])
    wanted = ("dx" in results, "dscale" in results, "dbias" in results, False, False)
    weight = _meta(scale, None if not wanted[1] else _widest([scale, results["dscale"]]))
    offset = _meta(bias, None if not wanted[2] or bias is None else _widest([bias, results["dbias"]]))
    if wanted[2] and bias is None:
        offset = _meta(results["dbias"])
    dy, none = _meta_of(given["dy"], dtype), torch.empty(0, device="meta")
    norm = norm_of(kind.family, groups_or_dims, 1, 0.0, operation.activation)
    operands = BackwardOperands(dy, _meta_of(x, dtype), none, none, weight, offset)
    problem = backward_problem(norm, operands, backward_direction(wanted))
    return NormProblem(replace(problem, device=device.type), dtype, wanted)


@dataclass
class Lowering:
    """The program of some operations, each norm on the instance of its name."""

    pack: Sequence[TensorAttributes]
    device: torch.device
    scratch: list[Scratch] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    slots: dict[TensorAttributes, int] = field(default_factory=dict)

    def program(self, operations: Sequence[Operation], instances: Sequence[str]) -> Program:
        self.slots = {tensor: slot for slot, tensor in enumerate(self.pack)}
        self.share(operations)
        names = iter(instances)
        for operation in operations:
            if not operation.is_norm:
                self.pointwise(operation)
            elif operation.node.kind.operation == "backward":
                self.backward(operation, next(names))
            else:
                self.forward(operation, next(names))
        size = place(self.scratch)
        return Program(tuple(self.pack), tuple(self.scratch), tuple(self.steps), size, tuple(self.notes))

    def share(self, operations: Sequence[Operation]) -> None:
        """Let a pointwise operation work in the memory of its result where what it reads is of no more use."""
        made = {tensor: operation for operation in operations for tensor in operation.outputs.values()}
        read = [tensor for operation in operations for tensor in set(operation.inputs.values())]
        for operation in reversed(operations):
            if operation.is_norm:
                continue
            (result,) = operation.outputs.values()
            for tensor in operation.inputs.values():
                maker = made.get(tensor)
                spare = tensor.is_virtual and maker is not None and not maker.is_norm and read.count(tensor) == 1
                if spare and (tensor.dims, tensor.strides, tensor.dtype) == (result.dims, result.strides, result.dtype):
                    self.slots[tensor] = self.slot(result)
                    break

    # --- slots ---

    def slot(self, tensor: TensorAttributes | None) -> int:
        if tensor is None:
            return -1  # the last of the values, which is None
        if tensor not in self.slots:
            assert tensor.dims is not None and tensor.strides is not None and tensor.dtype is not None
            self.slots[tensor] = self.temporary(tensor.dims, tensor.strides, tensor.dtype)
        return self.slots[tensor]

    def temporary(self, dims: Dims, strides: Dims, dtype: torch.dtype) -> int:
        slot = len(self.pack) + len(self.scratch)
        self.scratch.append(Scratch(slot, dims, strides, dtype))
        return slot

    def emit(self, label: str, run: Callable[[Values], Any], *slots: int) -> None:
        for slot in slots:
            if slot >= len(self.pack):
                scratch = self.scratch[slot - len(self.pack)]
                scratch.first = len(self.steps) if scratch.first < 0 else scratch.first
                scratch.last = len(self.steps)
        self.steps.append(Step(label, run))

    def converted(self, tensor: TensorAttributes, dtype: torch.dtype) -> int:
        """The slot of a tensor in a dtype, converted through the workspace where it has another."""
        source = self.slot(tensor)
        if tensor.dtype == dtype:
            return source
        assert tensor.dims is not None
        target = self.temporary(tensor.dims, converted_strides(tensor), dtype)
        self.copy(f"{tensor.name} to {dtype_name(dtype)}", source, target)
        return target

    def copy(self, what: str, source: int, target: int) -> None:
        self.notes.append(f"{what}: a pass of its own")
        self.emit(f"convert {what}", lambda values: values[target].copy_(values[source]), source, target)

    def written(self, tensor: TensorAttributes, strides: Dims, dtype: torch.dtype) -> tuple[int, bool]:
        """Where a kernel writes a result, and whether it must be copied from there to its tensor."""
        assert tensor.dims is not None and tensor.strides is not None
        if tensor.dtype == dtype and same_strides(tensor.dims, tensor.strides, strides):
            return self.slot(tensor), False
        return self.temporary(tensor.dims, strides, dtype), True

    def finish(self, tensor: TensorAttributes, source: int) -> None:
        assert tensor.dtype is not None
        self.copy(f"{tensor.name} as {dtype_name(tensor.dtype)} in its strides", source, self.slot(tensor))

    # --- operations ---

    def forward(self, operation: Operation, instance: str) -> None:
        found = problem_of(operation, self.device)
        plan = dispatch.make_plan(found.problem, instance)
        given, results = operation.inputs, operation.outputs
        self.note_copies(operation, found.problem)
        x = self.converted(given["x"], found.dtype)
        weight, bias = self.slot(given.get("scale")), self.slot(given.get("bias"))
        y, copied = -1, False
        if "y" in results:
            y, copied = self.written(results["y"], found.problem.output_strides, found.dtype)
        label = f"{operation.label} on {instance}"
        used = [x, weight, bias, y]
        if found.problem.direction == "inference":
            given_statistics, reads = self.given_statistics(operation, found.problem)

            def run(values: Values) -> None:
                mean, var = given_statistics(values)
                operands = Operands(values[x], values[weight], values[bias], mean=mean, var=var)
                plan(operands, False, values[y])

            used += reads
        elif set(results) <= {"y"}:

            def run(values: Values) -> None:
                plan(Operands(values[x], values[weight], values[bias]), False, values[y])

        else:
            mean, rstd, keep, writes = self.kept_statistics(operation, found.problem)

            def run(values: Values) -> None:
                operands = Operands(values[x], values[weight], values[bias])
                kept = plan(operands, True, values[y], values[mean], values[rstd])
                if keep is not None:
                    keep(values, kept)

            used += writes
        self.emit(label, run, *used)
        if copied:
            self.finish(results["y"], y)

    def given_statistics(
        self, operation: Operation, problem: Problem
    ) -> tuple[Callable[[Values], tuple[Tensor, Tensor]], list[int]]:
        """How to get the mean and variance of a norm with given statistics; the kernels take the variance."""
        given = operation.inputs
        mean, inverse, variance = (self.slot(given.get(port)) for port in ("mean", "inv_variance", "variance"))
        if variance >= 0:
            return lambda values: (values[mean], values[variance]), [mean, variance]
        # In float64 the square overflows for no float32, and its inverse root is the number that was given.
        if mean >= 0:
            return lambda values: (values[mean], values[inverse].double().pow(-2)), [mean, inverse]
        zero = torch.zeros(problem.num_statistics, dtype=getattr(torch, problem.compute_dtype), device=self.device)
        return lambda values: (zero, values[inverse].double().pow(-2)), [inverse]

    def kept_statistics(
        self, operation: Operation, problem: Problem
    ) -> tuple[int, int, Callable[[Values, Results], None] | None, list[int]]:
        """The slots into which the kernels write mean and rstd, what is done with the statistics, and all its slots."""
        given, results = operation.inputs, operation.outputs
        direct, writes = [-1, -1], []
        for index, (port, name) in enumerate((("mean", "mean"), ("inv_variance", "rstd"))):
            tensor = results.get(port)
            if tensor is not None and tensor.dtype == getattr(torch, problem.compute_dtype):
                direct[index] = self.slot(tensor)
            elif tensor is not None:
                writes.append((name, self.slot(tensor), tensor.dims or ()))
        # The mean moves by the mean, the variance by the unbiased variance of the batch.
        count = problem.reduced if problem.view.numel else 0
        momentum = float(operation.node.attributes.get("momentum", 0.0)) if count else 0.0
        moves = []
        for name, what, factor in (("mean", "mean", 1.0), ("var", "variance", count / max(count - 1, 1))):
            target = results.get(f"next_running_{what}")
            if target is not None:
                source = self.slot(given[f"prev_running_{what}"])
                moves.append((name, source, self.slot(target), target.dims or (), factor))

        def keep(values: Values, kept: Results) -> None:
            for name, slot, dims in writes:
                values[slot].copy_(getattr(kept, name).view(dims))
            for name, source, target, dims, factor in moves:
                statistic = getattr(kept, name).view(dims)
                if name == "var":
                    statistic = statistic * factor
                running, result = values[source], values[target]
                if running.dtype is statistic.dtype and result.dtype is statistic.dtype:
                    torch.lerp(running, statistic, momentum, out=result)
                else:
                    move_running(result.copy_(running), statistic, momentum)

        touched = [slot for _, slot, _ in writes] + [slot for one in moves for slot in one[1:3]]
        touched += [slot for slot in direct if slot >= 0]
        return direct[0], direct[1], keep if writes or moves else None, touched

    def backward(self, operation: Operation, instance: str) -> None:
        found = problem_of(operation, self.device)
        problem, wanted = found.problem, found.wanted
        plan = dispatch.make_plan(problem, instance)
        given, results = operation.inputs, operation.outputs
        self.note_copies(operation, problem)
        dy, x = self.converted(given["dy"], found.dtype), self.converted(given["x"], found.dtype)
        mean, rstd = self.slot(given.get("mean")), self.slot(given["inv_variance"])
        dx, copied = -1, False
        if wanted[0]:
            dx, copied = self.written(results["dx"], problem.output_strides, found.dtype)
        parameters = [
            self.parameter(given.get("scale"), problem.weight_dtype),
            self.parameter(given.get("bias"), problem.bias_dtype),
        ]
        if wanted[2] and "bias" not in given:
            # dbias = sum dy needs no bias, but the kernels give a gradient only to what they were given.
            dims, dtype = results["dbias"].dims, results["dbias"].dtype
            assert dims is not None
            zero = torch.zeros(dims, dtype=dtype, device=self.device)
            parameters[1] = lambda values: zero
        weight, bias = parameters
        writes = [
            (name, self.slot(results[port]), results[port].dims or ())
            for name, port in (("weight", "dscale"), ("bias", "dbias"))
            if port in results
        ]

        def run(values: Values) -> None:
            operands = BackwardOperands(
                values[dy], values[x], values[mean], values[rstd], weight(values), bias(values)
            )  # fmt: skip
            gradients = plan(operands, wanted, values[dx])
            for name, slot, dims in writes:
                values[slot].copy_(getattr(gradients, name).view(dims))

        inputs = [dy, x, mean, rstd, self.slot(given.get("scale")), self.slot(given.get("bias")), dx]
        self.emit(f"{operation.label} on {instance}", run, *inputs, *(slot for _, slot, _ in writes))
        if copied:
            self.finish(results["dx"], dx)

    def parameter(self, tensor: TensorAttributes | None, dtype: str | None) -> Callable[[Values], Tensor | None]:
        """A scale or bias in the dtype of the problem, which is that of its gradient where that is wider."""
        slot = self.slot(tensor)
        if tensor is None or dtype is None or tensor.dtype == getattr(torch, dtype):
            return lambda values: values[slot]
        wide = getattr(torch, dtype)
        return lambda values: values[slot].to(wide)

    def note_copies(self, operation: Operation, problem: Problem) -> None:
        for name in problem.copies:
            self.notes.append(f"{operation.label}: {name} is copied first, its strides fit no memory order")

    def pointwise(self, operation: Operation) -> None:
        node = operation.node
        (result,) = operation.outputs.values()
        operands = list(operation.inputs.values())
        assert result.dims is not None and result.strides is not None
        dtype = _widest([*operands, result])
        if node.kind.operation == "arithmetic":
            # torch computes in the widest dtype of the operands, so only a wider result needs one of them converted.
            slots = [self.slot(tensor) for tensor in operands]
            if _widest(operands) != dtype:
                slots[0] = self.converted(operands[0], dtype)
            call, out, copied = pointwise.arithmetic(node.kind.name), self.slot(result), False
        else:
            activation = node.activation
            assert activation is not None
            slots = [self.converted(tensor, dtype) for tensor in operands]
            out, copied = self.written(result, result.strides, dtype)
            call = pointwise.value(activation) if len(slots) == 1 else pointwise.gradient(activation)
        if len(slots) == 1:
            one = slots[0]
            self.emit(f"{node.name} in torch", lambda values: call(values[one], values[out]), *slots, out)
        else:
            one, other = slots
            run = lambda values: call(values[one], values[other], values[out])  # noqa: E731
            self.emit(f"{node.name} in torch", run, *slots, out)
        if copied:
            self.finish(result, out)
