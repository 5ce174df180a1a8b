"""What all plans share: allocation, parameters in the compute dtype, the order of arguments.

A plan is a problem with its kernels loaded, its geometry written and its workspace sized. It is made once per problem
and called many times from any thread; what a call does in Python is its host cost.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fusednorm.activations import FORMULAS
from fusednorm.backends.cpu.compiler import Function, Kernel, load
from fusednorm.backends.cpu.geometry import geometry
from fusednorm.backends.cpu.memory import SMALLEST, empty_strided
from fusednorm.backends.cpu.threads import parallel_for
from fusednorm.operands import BackwardOperands, Gradients, Operands, Results, Wanted
from fusednorm.problem import DTYPE_BYTES, Problem

CPU = torch.device("cpu")  # named in every allocation: torch's default device may be another
DISCARDED = 4096  # statistics at most that a plan keeps room for, when nobody asks for them


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


class Plan:
    """What all plans share: dtypes, geometry, kernels by name, allocation."""

    module: str

    def __init__(self, problem: Problem, pieces: int = 1, piece: int | None = None) -> None:
        self.problem = problem
        self.dtype: torch.dtype = getattr(torch, problem.dtype)
        self.compute: torch.dtype = getattr(torch, problem.compute_dtype)
        self.parameter, self.eps = problem.norm.activation_parameter, problem.norm.eps
        view = problem.view
        self.geometry = geometry(problem, pieces, view.spatial if piece is None else piece)
        self.address = self.geometry.ctypes.data
        self.samples, self.channels = view.samples, view.channels
        self.statistics = problem.num_statistics
        self.tensor_bytes = view.numel * DTYPE_BYTES[problem.dtype]
        shape = problem.statistics_shape
        self.statistics_shape = shape
        self.shape, self.strides = torch.Size(problem.shape), problem.output_strides
        self.tasks = view.samples * pieces
        # For a dense input empty_like is the same and 0.4 us faster, but knows no kept blocks.
        self.like_input = problem.dense and self.tensor_bytes < SMALLEST

    def kernel(self, function: str, *, activated: bool = True, module: str | None = None) -> Function:
        """A kernel; one that no activation enters is shared by all of them."""
        activation = self.problem.norm.activation
        module = module or self.module
        if activation is None or not activated:
            return load(Kernel(module, function, self.problem.dtype))
        parametric = activation.parameter != FORMULAS[activation.name].default
        return load(Kernel(module, function, self.problem.dtype, activation.name, parametric))

    def dense(self, tensor: Tensor) -> Tensor:
        """A weight, bias, scale, shift or statistic as the kernels read it: contiguous, in the compute dtype."""
        if tensor.dtype is self.compute and tensor.is_contiguous():
            return tensor
        return tensor.to(self.compute).contiguous()

    def parameters(self, *tensors: Tensor | None) -> tuple[list[Tensor | None], list[int]]:
        """Parameters as the kernels read them, to be held until the kernels are done, and their addresses."""
        compute = self.compute
        held = [
            tensor if tensor is None or (tensor.dtype is compute and tensor.is_contiguous()) else self.dense(tensor)
            for tensor in tensors
        ]
        return held, [0 if tensor is None else tensor.data_ptr() for tensor in held]

    def workspace(self, *counts: int) -> tuple[Tensor, list[int]]:
        """One block of float64 for several arrays of so many elements, and their addresses."""
        total = sum(counts)
        if 8 * total < SMALLEST:
            block = torch.empty(total, dtype=torch.float64, device=CPU)
        else:
            block = empty_strided(torch.Size((total,)), (1,), torch.float64)
        addresses, offset = [], block.data_ptr()
        for count in counts:
            addresses.append(offset)
            offset += 8 * count
        return block, addresses

    def output(self, input: Tensor) -> Tensor:
        if self.like_input:
            return torch.empty_like(input)
        return empty_strided(self.shape, self.strides, self.dtype)


class ForwardPlan(Plan):
    """A :class:`~fusednorm.instance.ForwardPlan`."""

    def __init__(self, problem: Problem, pieces: int = 1, piece: int | None = None) -> None:
        super().__init__(problem, pieces, piece)
        self.has_variance = problem.norm.has_variance
        self.given: Function | None = None
        if problem.direction == "inference":
            self.given = self.kernel("given", activated=False, module="affine")
        # Statistics that nobody asked for go here, from every thread, and are never read: 2 us for small inputs.
        self.discarded = torch.empty(
            3 * self.statistics if self.statistics <= DISCARDED else 0, dtype=self.compute, device=CPU
        )
        step = self.discarded.element_size() * self.statistics
        self.discard = tuple(self.discarded.data_ptr() + i * step for i in range(3))

    def __call__(
        self,
        operands: Operands,
        statistics: bool = True,
        out: Tensor | None = None,
        mean_out: Tensor | None = None,
        rstd_out: Tensor | None = None,
    ) -> Results:
        input, mean, var, eps = operands.input, operands.mean, operands.var, self.eps
        output = self.output(input) if out is None else out
        saved_mean, saved_rstd = mean_out, rstd_out
        variance = None
        saved = self.discard
        if statistics or self.statistics > DISCARDED:
            if saved_rstd is None:
                saved_rstd = torch.empty(self.statistics_shape, dtype=self.compute, device=CPU)
            if saved_mean is None and self.problem.norm.has_mean:
                saved_mean = torch.empty_like(saved_rstd)
            if self.has_variance:
                variance = torch.empty_like(saved_rstd)
            saved = (_address(saved_mean), saved_rstd.data_ptr(), _address(variance))
        if self.tensor_bytes == 0:
            for tensor in (saved_mean, saved_rstd, variance):
                if tensor is not None:
                    tensor.zero_()
            return Results(output, saved_mean, saved_rstd, variance)
        held, parameters = self.parameters(operands.weight, operands.bias, operands.scale, operands.shift)
        data = (input.data_ptr(), output.data_ptr())
        if self.given is None:
            self.run(data, saved, parameters, eps)
        else:
            assert mean is not None and var is not None
            stats, (address,) = self.workspace(2 * self.statistics)
            kernel = self.given
            if var.dtype is torch.float64:  # in float32 its square root could be 0 or infinite
                kernel = self.kernel("given_wide", activated=False, module="affine")
                mean, var = mean.double().contiguous(), var.contiguous()
            else:
                mean, var = self.dense(mean), self.dense(var)
            given = (mean.data_ptr(), var.data_ptr(), address, *saved[:2], self.address, eps)
            parallel_for(kernel, given, self.statistics, 16 * self.statistics)
            self.apply(data, address, parameters)
        return Results(output, saved_mean, saved_rstd, variance)

    def run(self, data: Sequence[int], saved: Sequence[int], parameters: Sequence[int], eps: float) -> None:
        raise NotImplementedError

    def apply(self, data: Sequence[int], stats: int, parameters: Sequence[int]) -> None:
        raise NotImplementedError


class BackwardPlan(Plan):
    """A :class:`~fusednorm.instance.BackwardPlan`."""

    def __init__(self, problem: Problem, pieces: int = 1, piece: int | None = None) -> None:
        super().__init__(problem, pieces, piece)
        self.wants_input = problem.direction != "backward_gamma_beta"
        self.load_gradients()

    def load_gradients(self) -> None:
        self.parameter_gradients = self.kernel("parameter_gradients", activated=False, module="affine")

    def __call__(self, operands: BackwardOperands, wanted: Wanted, out: Tensor | None = None) -> Gradients:
        input, grad_output = operands.input, operands.grad_output
        compute = self.compute
        grad_input = None
        if self.wants_input:
            grad_input = self.output(input) if out is None else out
        originals = (operands.weight, operands.bias, operands.scale, operands.shift)
        grads = [
            torch.empty(tensor.shape, dtype=compute, device=CPU) if tensor is not None and want else None
            for tensor, want in zip(originals, wanted[1:], strict=True)
        ]
        if self.tensor_bytes == 0:
            for grad in grads:
                if grad is not None:
                    grad.zero_()
        else:
            held, addresses = self.parameters(
                *originals, operands.mean if self.problem.norm.has_mean else None, operands.rstd
            )
            data = (grad_output.data_ptr(), input.data_ptr(), _address(grad_input))
            stored = [int(grad is not None) for grad in grads]
            self.run(data, addresses[4:], addresses[:4], [_address(grad) for grad in grads], stored)
        for i, tensor in enumerate(originals):
            grad = grads[i]
            if grad is not None and tensor is not None and tensor.dtype is not compute:
                grads[i] = grad.to(tensor.dtype)
        return Gradients(grad_input, *grads)

    def run(
        self,
        data: Sequence[int],
        saved: Sequence[int],
        parameters: Sequence[int],
        grads: list[int],
        wanted: list[int],
    ) -> None:
        raise NotImplementedError

    def finish(self, sums: int, parameters: Sequence[int], grads: list[int], wanted: list[int]) -> None:
        """The gradients of the parameters from p and q per (n, c)."""
        if any(wanted):
            arguments = (sums, *parameters[:3], *grads, self.address, *wanted)
            parallel_for(self.parameter_gradients, arguments, self.channels, 16 * self.samples * self.channels)
