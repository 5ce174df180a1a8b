"""From operations to a program: steps over slots, with the virtual tensors in one workspace.

A program runs on a list of tensors, and a slot is a position in it: first come the tensors of the variant pack, then
those of the workspace, the numbers that the graph has, last None, for an absent tensor. All that does not depend on the
data is done here, once.

A kernel writes the dtype that it reads, so a norm runs in the widest dtype of its data ports; a tensor of another dtype
is converted through the workspace. So is a result in other strides than the kernel writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fusednorm import dispatch
from fusednorm.dtypes import dtype_name
from fusednorm.graph import pointwise
from fusednorm.graph.calls import (
    NormProblem,
    call_of,
    converted_strides,
    lies,
    norm_of_forward,
    problem_of_operation,
    viewed,
    widest,
)
from fusednorm.graph.fusion import Operation
from fusednorm.graph.nodes import PORT_OF_GRADIENT, by_operand
from fusednorm.graph.tensors import Dims, TensorAttributes, same_strides
from fusednorm.graph.workspace import Scratch, place
from fusednorm.operands import BackwardOperands, Operands, Results
from fusednorm.problem import Problem
from fusednorm.running import update_running

Values = list[Any]


@dataclass(frozen=True)
class Step:
    """One step: its name, and a function that runs it on the tensors by slot."""

    label: str
    run: Callable[[Values], Any]


@dataclass(frozen=True)
class Program:
    """The steps that a built plan executes, and the tensors on which they run."""

    pack: tuple[TensorAttributes, ...]
    scratch: tuple[Scratch, ...]
    steps: tuple[Step, ...]
    workspace_bytes: int
    notes: tuple[str, ...]
    constants: tuple[Tensor, ...] = ()


@dataclass
class Lowering:
    """The program of some operations, each norm on the instance of its name."""

    pack: Sequence[TensorAttributes]
    device: torch.device
    scratch: list[Scratch] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    slots: dict[TensorAttributes, int] = field(default_factory=dict)
    constants: list[Tensor] = field(default_factory=list)

    def program(self, operations: Sequence[Operation], instances: Sequence[str]) -> Program:
        self.slots = {tensor: slot for slot, tensor in enumerate(self.pack)}
        self.share(operations)
        names = iter(instances)
        for operation in operations:
            if operation.node.kind.operation == "quantize":
                self.quantize(operation)
            elif not operation.is_norm:
                self.pointwise(operation)
            elif operation.node.kind.operation == "backward":
                self.backward(operation, next(names))
            elif operation.quantize is not None:
                self.quantized(operation, next(names))
            else:
                self.forward(operation, next(names))
        size = place(self.scratch)
        constants = tuple(self.constants[::-1])
        return Program(tuple(self.pack), tuple(self.scratch), tuple(self.steps), size, tuple(self.notes), constants)

    def share(self, operations: Sequence[Operation]) -> None:
        """Let a pointwise operation read from the memory of its result, where nothing else reads that operand."""
        made = {tensor: operation for operation in operations for tensor in operation.outputs.values()}
        read = [tensor for operation in operations for tensor in operation.read]
        for operation in reversed(operations):
            if operation.is_norm or operation.node.kind.operation == "quantize":
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
        if tensor.value is not None:
            return self.constant(tensor)
        if tensor not in self.slots:
            assert tensor.dims is not None and tensor.strides is not None and tensor.dtype is not None
            self.slots[tensor] = self.temporary(tensor.dims, tensor.strides, tensor.dtype)
        return self.slots[tensor]

    def constant(self, tensor: TensorAttributes) -> int:
        """The slot of a number: numbers stand before the None, counted from the end."""
        assert tensor.value is not None and tensor.dims is not None
        if tensor not in self.slots:
            self.constants.append(torch.full(tensor.dims, tensor.value, dtype=tensor.dtype, device=self.device))
            self.slots[tensor] = -1 - len(self.constants)
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
        """The slot into which a kernel writes a result, and whether it must be copied from there to its tensor."""
        assert tensor.dims is not None and tensor.strides is not None
        if tensor.dtype == dtype and same_strides(tensor.dims, tensor.strides, strides):
            return self.slot(tensor), False
        return self.temporary(tensor.dims, strides, dtype), True

    def finish(self, tensor: TensorAttributes, source: int) -> None:
        assert tensor.dtype is not None
        self.copy(f"{tensor.name} as {dtype_name(tensor.dtype)} in its strides", source, self.slot(tensor))

    # --- operations ---

    def forward(self, operation: Operation, instance: str) -> None:
        found = problem_of_operation(operation, self.device)
        plan = dispatch.make_plan(found.problem, instance)
        given, results = operation.operands, operation.outputs
        self.note_copies(operation, found.problem)
        x = self.converted(given["input"], found.dtype)
        weight, bias = self.slot(given.get("weight")), self.slot(given.get("bias"))
        y, copied = -1, False
        if "y" in results and operation.surrounded and lies(results["y"], found):
            y = self.slot(results["y"])
        elif "y" in results:
            y, copied = self.written(results["y"], found.problem.output_strides, found.dtype)
        label = f"{operation.label} on {instance}"
        used = [x, weight, bias, y]
        if operation.added:
            run, reads = self.surrounded(operation, found, plan, (x, weight, bias, y))
            used += reads
        elif found.problem.direction == "inference":
            read_statistics, reads = self.bind_given_statistics(operation, found.problem)

            def run(values: Values) -> None:
                mean, var = read_statistics(values)
                operands = Operands(values[x], values[weight], values[bias], mean=mean, var=var)
                plan(operands, False, values[y])

            used += reads
        elif set(results) <= {"y"}:
            short: Any = None  # the plan's short form, once a call has had tensors, or the plan itself

            def whole(*tensors: Any, out: Tensor | None) -> None:
                plan(Operands(*tensors), False, out)

            def run(values: Values) -> None:
                nonlocal short
                given = values[x], values[weight], values[bias], None, None, None, None
                if short is None:
                    short = (plan.short(Operands(*given)) if hasattr(plan, "short") else None) or whole
                short(*given, out=values[y])

        else:
            mean, rstd, keep, writes = self.bind_kept_statistics(operation, found.problem)

            def run(values: Values) -> None:
                operands = Operands(values[x], values[weight], values[bias])
                kept = plan(operands, True, values[y], values[mean], values[rstd])
                if keep is not None:
                    keep(values, kept)

            used += writes
        self.emit(label, run, *used)
        if copied:
            self.finish(results["y"], y)

    def surrounded(
        self, operation: Operation, found: NormProblem, plan: Any, slots: tuple[int, int, int, int]
    ) -> tuple[Callable[[Values], None], list[int]]:
        """A function that runs a forward with what is around it, and the slots that it touches beyond the given ones,
        which are those of x, weight, bias and y."""
        x, weight, bias, y = slots
        added = {name: self.slot(tensor) for name, tensor in operation.added.items()}
        shape, norm = found.shape, norm_of_forward(operation, operation.operands["input"].dims or ())
        total = self.slot(operation.outputs.get("sum"))
        read_statistics, keep, touched = None, None, [total, *added.values()]
        if found.problem.direction == "inference":
            read_statistics, reads = self.bind_given_statistics(operation, found.problem)
            touched += reads
        else:
            _, _, keep, writes = self.bind_kept_statistics(operation, found.problem, in_place=False)
            touched += writes

        def run(values: Values) -> None:
            operands = Operands(values[x], values[weight], values[bias])
            if read_statistics is not None:
                operands.mean, operands.var = read_statistics(values)
            call = call_of(norm, operands, {name: values[slot] for name, slot in added.items()})
            out = viewed(values[y], shape)
            if call.sums is None:
                kept = plan(call.operands, keep is not None, out)
            else:
                kept = plan(call.operands, call.sums, keep is not None, out, viewed(values[total], shape))
            if keep is not None:
                keep(values, kept)

        return run, touched

    def quantized(self, operation: Operation, instance: str) -> None:
        """A norm of rows whose output is quantized."""
        found = problem_of_operation(operation, self.device)
        plan = dispatch.make_plan(found.problem, instance)
        self.note_copies(operation, found.problem)
        given, results, shape = operation.operands, operation.outputs, found.shape
        x, norm = self.converted(given["input"], found.dtype), norm_of_forward(operation, given["input"].dims or ())
        weight, bias = self.slot(given.get("weight")), self.slot(given.get("bias"))
        added = {name: self.slot(tensor) for name, tensor in operation.added.items()}
        out_scale = added.pop("out_scale", -1)
        y, scale, total = (self.slot(results.get(port)) for port in ("y", "row_scale", "sum"))

        def run(values: Values) -> None:
            operands = Operands(values[x], values[weight], values[bias])
            call = call_of(norm, operands, {name: values[slot] for name, slot in added.items()})
            into = Results(viewed(values[y], shape), sum=viewed(values[total], shape), scale=values[scale])  # type: ignore[arg-type]
            plan(call.operands, call.sums, values[out_scale], into)

        used = [x, weight, bias, out_scale, y, scale, total, *added.values()]
        self.emit(f"{operation.label} on {instance}", run, *used)

    def quantize(self, operation: Operation) -> None:
        node, quantized = operation.node, operation.node.quantized
        assert quantized is not None
        x, given = self.slot(operation.inputs["x"]), self.slot(operation.inputs.get("scale"))
        y, scale = (self.slot(operation.outputs.get(port)) for port in ("y", "scale"))
        call = pointwise.quantize(quantized)
        run = lambda values: call(values[x], values[given], values[y], values[scale])  # noqa: E731
        self.emit(f"{node.name} in torch", run, x, given, y, scale)

    def bind_given_statistics(
        self, operation: Operation, problem: Problem
    ) -> tuple[Callable[[Values], tuple[Tensor, Tensor]], list[int]]:
        """A function that reads the given mean and variance, which the kernels take, and the slots that it reads."""
        given = operation.operands
        mean, rstd, var = (self.slot(given.get(name)) for name in ("mean", "rstd", "var"))
        if var >= 0:
            return lambda values: (values[mean], values[var]), [mean, var]
        # In float64 no float32's square overflows, and the kernel's rsqrt gives back the number that was given.
        if mean >= 0:
            return lambda values: (values[mean], values[rstd].double().pow(-2)), [mean, rstd]
        zero = torch.zeros(problem.num_statistics, dtype=getattr(torch, problem.compute_dtype), device=self.device)
        return lambda values: (zero, values[rstd].double().pow(-2)), [rstd]

    def bind_kept_statistics(
        self, operation: Operation, problem: Problem, in_place: bool = True
    ) -> tuple[int, int, Callable[[Values, Results], None] | None, list[int]]:
        """The slots into which the kernels write mean and rstd ``in_place``, a function that stores all other
        statistics, and all slots that this touches."""
        given, results = operation.inputs, operation.outputs
        direct, writes = [-1, -1], []
        for index, name in enumerate(("mean", "rstd")):
            tensor = by_operand(results).get(name)
            if tensor is not None and in_place and tensor.dtype == getattr(torch, problem.compute_dtype):
                direct[index] = self.slot(tensor)
            elif tensor is not None:
                writes.append((name, self.slot(tensor), tensor.dims or ()))
        # The running mean moves towards the batch's mean, the running variance towards its unbiased variance.
        elements = problem.reduced if problem.view.numel else 0
        momentum = float(operation.node.attributes.get("momentum", 0.0))
        moves = []
        for what in ("mean", "variance"):
            target = results.get(f"next_running_{what}")
            if target is not None:
                moves.append((self.slot(given[f"prev_running_{what}"]), self.slot(target), target.dims or ()))

        def keep(values: Values, kept: Results) -> None:
            for name, slot, dims in writes:
                values[slot].copy_(getattr(kept, name).view(dims))
            moved = [values[target].copy_(values[source]) for source, target, _ in moves]
            if moved and elements:
                assert kept.mean is not None and kept.var is not None
                (running_mean, running_var), ((*_, dims), (*_, var_dims)) = moved, moves
                update_running(
                    running_mean, running_var, kept.mean.view(dims), kept.var.view(var_dims), elements, momentum
                )

        touched = [slot for _, slot, _ in writes] + [slot for one in moves for slot in one[:2]]
        touched += [slot for slot in direct if slot >= 0]
        return direct[0], direct[1], keep if writes or moves else None, touched

    def backward(self, operation: Operation, instance: str) -> None:
        found = problem_of_operation(operation, self.device)
        problem, wanted = found.problem, found.wanted
        plan = dispatch.make_plan(problem, instance)
        given, results = operation.operands, operation.outputs
        self.note_copies(operation, problem)
        dy, x = self.converted(given["grad_output"], found.dtype), self.converted(given["input"], found.dtype)
        mean, rstd = self.slot(given.get("mean")), self.slot(given["rstd"])
        dx, copied = -1, False
        if "dx" in results:
            dx, copied = self.written(results["dx"], problem.output_strides, found.dtype)
        post_add, dz = self.slot(operation.added.get("post_add")), self.slot(results.get("dz"))
        weight = self.parameter(given.get("weight"), problem.weight_dtype)
        bias = self.parameter(given.get("bias"), problem.bias_dtype)
        if wanted[2] and "bias" not in given:
            # dbias = sum dy needs no bias, but the kernels give a gradient only to a tensor that they were given.
            zero = torch.zeros(results["dbias"].dims or (), dtype=results["dbias"].dtype, device=self.device)
            bias = lambda values: zero  # noqa: E731
        writes = [
            (name, self.slot(results[port]), results[port].dims or ())
            for name, port in PORT_OF_GRADIENT.items()
            if name != "input" and port in results
        ]

        def run(values: Values) -> None:
            operands = BackwardOperands(values[dy], values[x], values[mean], values[rstd], weight(values), bias(values))
            if post_add < 0:
                gradients = plan(operands, wanted, values[dx])
            else:
                gradients, _ = plan(operands, wanted, values[post_add], None, None, values[dx], values[dz])
            for name, slot, dims in writes:
                values[slot].copy_(getattr(gradients, name).view(dims))

        used = [dy, x, mean, rstd, self.slot(given.get("weight")), self.slot(given.get("bias")), dx, post_add, dz]
        self.emit(f"{operation.label} on {instance}", run, *used, *(slot for _, slot, _ in writes))
        if copied:
            self.finish(results["dx"], dx)

    def parameter(self, tensor: TensorAttributes | None, dtype: str | None) -> Callable[[Values], Tensor | None]:
        """A function that reads a weight or bias in the problem's dtype, the wider of its own and its gradient's."""
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
        dtype = widest([*operands, result])
        if node.kind.operation == "arithmetic":
            # torch computes in the widest dtype of the operands; only for a wider result is an operand converted.
            slots = [self.slot(tensor) for tensor in operands]
            if widest(operands) != dtype:
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
