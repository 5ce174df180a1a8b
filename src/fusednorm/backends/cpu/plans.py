"""Plans: a problem with its kernels loaded, its geometry written and its workspace sized, ready to be called.

A plan is made once per problem and called many times from any thread; what a call does in Python is its host cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusednorm.backends.cpu.compiler import Kernel, load
from fusednorm.backends.cpu.geometry import geometry
from fusednorm.backends.cpu.memory import empty_strided
from fusednorm.backends.cpu.threads import parallel_for
from fusednorm.problem import DTYPE_BYTES, Layout, Problem, View

Forward = tuple[Tensor, Tensor, Tensor, Tensor]
Backward = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]

SLAB_COEFFICIENTS = 5  # per (n, c), as slabs.COEFFICIENTS: that module needs Numba


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


class Plan:
    """What all plans share: dtypes, geometry, kernels by name, allocation."""

    module: str

    def __init__(self, problem: Problem, pieces: int = 1, piece: int | None = None) -> None:
        self.problem = problem
        self.dtype: torch.dtype = getattr(torch, problem.dtype)
        self.compute: torch.dtype = getattr(torch, problem.compute_dtype)
        self.parameter = problem.activation.parameter if problem.activation else 0.0
        view = problem.view
        self.geometry = geometry(problem, pieces, view.spatial if piece is None else piece)
        self.address = self.geometry.ctypes.data
        self.samples, self.channels = view.samples, view.channels
        self.statistics = problem.statistics
        self.tensor_bytes = view.numel * DTYPE_BYTES[problem.dtype]
        shape = (view.channels,) if problem.per_batch else (view.samples, view.groups)
        self.statistics_shape = shape
        self.shape, self.strides = torch.Size(problem.shape), problem.output_strides
        self.tasks = view.samples * pieces

    def kernel(self, function: str, *, activated: bool = True, module: str | None = None) -> Callable[..., None]:
        """A kernel; one that no activation enters is shared by all of them."""
        activation = self.problem.activation
        name = activation.name if activation and activated else None
        return load(Kernel(module or self.module, function, self.problem.dtype, name))

    def parameter_tensor(self, tensor: Tensor | None) -> Tensor | None:
        """A weight, bias, scale or shift as the kernels read it: dense, in the compute dtype."""
        if tensor is None or (tensor.dtype is self.compute and tensor.is_contiguous()):
            return tensor
        return tensor.to(self.compute).contiguous()

    def workspace(self, *counts: int) -> tuple[Tensor, list[int]]:
        """One block of float64 for several arrays of so many elements, and their addresses."""
        block = torch.empty(sum(counts), dtype=torch.float64)
        addresses, offset = [], block.data_ptr()
        for count in counts:
            addresses.append(offset)
            offset += 8 * count
        return block, addresses

    def output(self, out: Tensor | None = None) -> Tensor:
        return empty_strided(self.shape, self.strides, self.dtype) if out is None else out


class ForwardPlan(Plan):
    """(input, weight, bias, scale, shift, mean, var, eps, out) -> (output, mean, rstd, var)."""

    def __init__(self, problem: Problem, pieces: int = 1, piece: int | None = None) -> None:
        super().__init__(problem, pieces, piece)
        self.has_mean = not problem.rms
        self.has_variance = problem.family in ("batch_norm", "instance_norm") and problem.direction == "forward"
        self.given: Callable[..., None] | None = None
        if problem.direction == "inference":
            self.given = self.kernel("given", activated=False, module="affine")

    def __call__(
        self,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        scale: Tensor | None,
        shift: Tensor | None,
        mean: Tensor | None,
        var: Tensor | None,
        eps: float,
        out: Tensor | None = None,
    ) -> Forward:
        compute, shape = self.compute, self.statistics_shape
        output = self.output(out)
        saved_mean = torch.empty(shape if self.has_mean else (0,), dtype=compute)
        saved_rstd = torch.empty(shape, dtype=compute)
        variance = torch.empty(shape if self.has_variance else (0,), dtype=compute)
        if output.numel() == 0:
            return output, saved_mean.zero_(), saved_rstd.zero_(), variance.zero_()
        weight, bias = self.parameter_tensor(weight), self.parameter_tensor(bias)
        scale, shift = self.parameter_tensor(scale), self.parameter_tensor(shift)
        data = (input.data_ptr(), output.data_ptr())
        saved = (saved_mean.data_ptr(), saved_rstd.data_ptr(), variance.data_ptr())
        parameters = (_address(weight), _address(bias), _address(scale), _address(shift))
        if self.given is None:
            self.run(data, saved, parameters, eps)
        else:
            assert mean is not None and var is not None
            given_mean, given_var = self.parameter_tensor(mean), self.parameter_tensor(var)
            stats, (address,) = self.workspace(2 * self.statistics)
            self.given(_address(given_mean), _address(given_var), address, *saved[:2], self.address, eps)
            self.apply(data, address, parameters)
        return output, saved_mean, saved_rstd, variance

    def run(self, data: tuple[int, ...], saved: tuple[int, ...], parameters: tuple[int, ...], eps: float) -> None:
        raise NotImplementedError

    def apply(self, data: tuple[int, ...], stats: int, parameters: tuple[int, ...]) -> None:
        raise NotImplementedError


class BackwardPlan(Plan):
    """(grad_output, input, mean, rstd, weight, bias, scale, shift, output_mask) -> five gradients."""

    def __init__(self, problem: Problem, pieces: int = 1, piece: int | None = None) -> None:
        super().__init__(problem, pieces, piece)
        self.wants_input = problem.direction != "backward_gamma_beta"
        self.load_gradients()

    def load_gradients(self) -> None:
        self.parameter_gradients = self.kernel("parameter_gradients", activated=False, module="affine")

    def __call__(
        self,
        grad_output: Tensor,
        input: Tensor,
        mean: Tensor,
        rstd: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        scale: Tensor | None,
        shift: Tensor | None,
        output_mask: Sequence[bool],
    ) -> Backward:
        compute = self.compute
        grad_input = self.output() if self.wants_input else input.new_empty(0)
        originals = (weight, bias, scale, shift)
        grads = [
            torch.empty(tensor.shape if tensor is not None and wanted else (0,), dtype=compute)
            for tensor, wanted in zip(originals, output_mask[1:], strict=True)
        ]
        if input.numel() == 0:
            for grad in grads:
                grad.zero_()
        else:
            weight, bias = self.parameter_tensor(weight), self.parameter_tensor(bias)
            scale, shift = self.parameter_tensor(scale), self.parameter_tensor(shift)
            mean, rstd = self.parameter_tensor(mean), self.parameter_tensor(rstd)  # type: ignore[assignment]
            data = (grad_output.data_ptr(), input.data_ptr(), grad_input.data_ptr())
            parameters = (_address(weight), _address(bias), _address(scale), _address(shift))
            wanted = [int(grad.numel() > 0) for grad in grads]
            self.run(data, (mean.data_ptr(), rstd.data_ptr()), parameters, [grad.data_ptr() for grad in grads], wanted)
        results = [
            grad if tensor is None or tensor.dtype is compute else grad.to(tensor.dtype)
            for grad, tensor in zip(grads, originals, strict=True)
        ]
        return grad_input, results[0], results[1], results[2], results[3]

    def run(
        self,
        data: tuple[int, ...],
        saved: tuple[int, ...],
        parameters: tuple[int, ...],
        grads: list[int],
        wanted: list[int],
    ) -> None:
        raise NotImplementedError

    def finish(self, sums: int, parameters: tuple[int, ...], grads: list[int], wanted: list[int]) -> None:
        """The gradients of the parameters from p and q per (n, c)."""
        if any(wanted):
            arguments = (sums, *parameters[:3], *grads, self.address, *wanted)
            parallel_for(self.parameter_gradients, arguments, self.channels, 16 * self.samples * self.channels)


# --- channels_first ---


class PlanesForward(ForwardPlan):
    module = "planes"

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.forward = self.kernel("forward")

    def run(self, data: tuple[int, ...], saved: tuple[int, ...], parameters: tuple[int, ...], eps: float) -> None:
        arguments = (*data, *saved, *parameters, self.address, eps, self.parameter)
        parallel_for(self.forward, arguments, self.statistics, self.tensor_bytes)


class PlanesSplitForward(ForwardPlan):
    module = "planes"

    def __init__(self, problem: Problem, pieces: int, piece: int) -> None:
        super().__init__(problem, pieces, piece)
        self.tasks = problem.view.samples * problem.view.channels * pieces
        if self.given is None:
            self.moments = self.kernel("moments", activated=False)
            self.finalize = self.kernel("statistics", activated=False)
        self.apply_pieces = self.kernel("apply")

    def run(self, data: tuple[int, ...], saved: tuple[int, ...], parameters: tuple[int, ...], eps: float) -> None:
        block, (partials, stats) = self.workspace(2 * self.tasks, 2 * self.statistics)
        parallel_for(self.moments, (data[0], partials, self.address), self.tasks, self.tensor_bytes)
        arguments = (partials, stats, *saved, self.address, eps)
        parallel_for(self.finalize, arguments, self.statistics, 16 * self.tasks)
        self.apply(data, stats, parameters)

    def apply(self, data: tuple[int, ...], stats: int, parameters: tuple[int, ...]) -> None:
        arguments = (*data, stats, *parameters, self.address, self.parameter)
        parallel_for(self.apply_pieces, arguments, self.tasks, 2 * self.tensor_bytes)


class PlanesBackward(BackwardPlan):
    module = "planes"

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.backward = self.kernel("backward")

    def run(
        self,
        data: tuple[int, ...],
        saved: tuple[int, ...],
        parameters: tuple[int, ...],
        grads: list[int],
        wanted: list[int],
    ) -> None:
        block, (sums,) = self.workspace(2 * self.samples * self.channels)
        arguments = (*data, *saved, *parameters, sums, self.address, self.parameter)
        parallel_for(self.backward, arguments, self.statistics, 2 * self.tensor_bytes)
        self.finish(sums, parameters, grads, wanted)


class PlanesSplitBackward(BackwardPlan):
    module = "planes"

    def __init__(self, problem: Problem, pieces: int, piece: int) -> None:
        super().__init__(problem, pieces, piece)
        self.tasks = problem.view.samples * problem.view.channels * pieces
        self.reduce, self.input_gradient = self.kernel("reduce"), self.kernel("input_gradient")
        self.combine = self.kernel("combine", activated=False)

    def run(
        self,
        data: tuple[int, ...],
        saved: tuple[int, ...],
        parameters: tuple[int, ...],
        grads: list[int],
        wanted: list[int],
    ) -> None:
        counts = (2 * self.tasks, 2 * self.samples * self.channels, 2 * self.statistics)
        block, (partials, sums, totals) = self.workspace(*counts)
        tail = (self.address, self.parameter)
        parallel_for(
            self.reduce, (*data[:2], *saved, *parameters, partials, *tail), self.tasks, 2 * self.tensor_bytes
        )
        arguments = (partials, *parameters, sums, totals, self.address)
        parallel_for(self.combine, arguments, self.statistics, 16 * self.tasks)
        if self.wants_input:
            arguments = (*data, *saved, *parameters, totals, *tail)
            parallel_for(self.input_gradient, arguments, self.tasks, 2 * self.tensor_bytes)
        self.finish(sums, parameters, grads, wanted)


# --- channels_last ---


def folded(problem: Problem) -> View | None:
    """batch_norm without modulation as one sample of N * S positions, where the samples follow at a fixed step."""
    view, layouts = problem.view, (problem.layout, problem.output_layout, problem.grad_layout)
    if not problem.per_batch or problem.modulated:
        return None
    for layout in layouts:
        if layout is not None and view.samples > 1 and view.spatial > 1:
            if layout.sample != view.spatial * layout.spatial:
                return None
    return View(1, view.groups, view.group_channels, view.samples * view.spatial)


def fold(problem: Problem, view: View) -> Problem:
    """The problem in its folded view: with one position a sample, the step between samples is the step of positions."""
    from dataclasses import replace

    def step(layout: Layout | None) -> Layout | None:
        if layout is None or problem.view.spatial > 1:
            return layout
        return replace(layout, spatial=layout.sample)

    layout = step(problem.layout)
    assert layout is not None
    return replace(
        problem,
        view=view,
        layout=layout,
        output_layout=step(problem.output_layout),
        grad_layout=step(problem.grad_layout),
    )


#: A step of the whole-sample order takes samples of about this many bytes, so that its four calls cost little.
STEP_BYTES = 1 << 18


class SlabsForward(ForwardPlan):
    """Statistics, coefficients and output: each of all samples, or ``whole`` all of a few samples at a time."""

    module = "slabs"

    def __init__(self, problem: Problem, pieces: int, piece: int, whole: bool) -> None:
        super().__init__(problem, pieces, piece)
        self.pieces, self.whole = pieces, whole
        if self.given is None:
            self.moments = self.kernel("moments", activated=False)
            self.finalize = self.kernel("statistics", activated=False)
        self.coefficients = self.kernel("coefficients", activated=False)
        self.apply_slabs = self.kernel("apply")

    def run(self, data: tuple[int, ...], saved: tuple[int, ...], parameters: tuple[int, ...], eps: float) -> None:
        channels, units = self.channels, self.statistics
        counts = (2 * self.tasks * channels, 2 * units, SLAB_COEFFICIENTS * self.samples * channels)
        block, (partials, stats, coefficients) = self.workspace(*counts)
        moments = (data[0], partials, self.address)
        finalize = (partials, stats, *saved, self.address, eps)
        if not self.whole:
            parallel_for(self.moments, moments, self.tasks, self.tensor_bytes)
            parallel_for(self.finalize, finalize, units, 16 * self.tasks * channels)
            self.apply(data, stats, parameters)
            return
        prepare = (stats, coefficients, *parameters, self.address)
        apply = (*data, coefficients, self.address, self.parameter)
        groups, pieces = units // self.samples, self.pieces

        def samples(start: int, stop: int) -> None:
            self.moments(*moments, start * pieces, stop * pieces)
            self.finalize(*finalize, start * groups, stop * groups)
            self.coefficients(*prepare, start, stop)
            self.apply_slabs(*apply, start * pieces, stop * pieces)

        parallel_for(_in_steps(samples, self), (), self.samples, self.tensor_bytes)

    def apply(self, data: tuple[int, ...], stats: int, parameters: tuple[int, ...]) -> None:
        count = self.samples * self.channels
        block, (coefficients,) = self.workspace(SLAB_COEFFICIENTS * count)
        parallel_for(self.coefficients, (stats, coefficients, *parameters, self.address), self.samples, 32 * count)
        arguments = (*data, coefficients, self.address, self.parameter)
        parallel_for(self.apply_slabs, arguments, self.tasks, 2 * self.tensor_bytes)


def _in_steps(samples: Callable[[int, int], None], plan: Plan) -> Callable[[int, int], None]:
    step = max(1, STEP_BYTES * plan.samples // plan.tensor_bytes)

    def run(start: int, stop: int) -> None:
        for first in range(start, stop, step):
            samples(first, min(first + step, stop))

    return run


class SlabsBackward(BackwardPlan):
    """p and q, coefficients and grad_input: each of all samples, or ``whole`` all of a few samples at a time."""

    module = "slabs"

    def __init__(self, problem: Problem, pieces: int, piece: int, whole: bool) -> None:
        super().__init__(problem, pieces, piece)
        self.pieces, self.whole = pieces, whole
        self.recall = self.kernel("recall", activated=False)
        self.coefficients = self.kernel("coefficients", activated=False)
        self.reduce, self.input_gradient = self.kernel("reduce"), self.kernel("input_gradient")
        self.combine = self.kernel("combine", activated=False)
        self.gradient_coefficients = self.kernel("gradient_coefficients", activated=False)

    def run(
        self,
        data: tuple[int, ...],
        saved: tuple[int, ...],
        parameters: tuple[int, ...],
        grads: list[int],
        wanted: list[int],
    ) -> None:
        count, units = self.samples * self.channels, self.statistics
        counts = (2 * self.tasks * self.channels, 2 * units, 2 * count, SLAB_COEFFICIENTS * count)
        block, (partials, stats, sums, coefficients) = self.workspace(*counts)
        tail = (self.address, self.parameter)
        recall = (*saved, stats, self.address)
        prepare = (stats, coefficients, *parameters, self.address)
        reduce = (*data[:2], coefficients, partials, *tail)
        combine = (partials, stats, sums, self.address)
        finalize = (sums, stats, coefficients, *parameters, self.address)
        gradient = (*data, coefficients, *tail)
        parallel_for(self.recall, recall, units, 16 * units)
        parallel_for(self.coefficients, prepare, self.samples, 32 * count)
        if self.whole:
            groups, pieces = units // self.samples, self.pieces

            def samples(start: int, stop: int) -> None:
                self.reduce(*reduce, start * pieces, stop * pieces)
                self.combine(*combine, start, stop)
                if self.wants_input:
                    self.gradient_coefficients(*finalize, start * groups, stop * groups)
                    self.input_gradient(*gradient, start * pieces, stop * pieces)

            parallel_for(_in_steps(samples, self), (), self.samples, 2 * self.tensor_bytes)
        else:
            parallel_for(self.reduce, reduce, self.tasks, 2 * self.tensor_bytes)
            parallel_for(self.combine, combine, self.samples, 16 * self.tasks * self.channels)
            if self.wants_input:
                parallel_for(self.gradient_coefficients, finalize, units, 16 * count)
                parallel_for(self.input_gradient, gradient, self.tasks, 2 * self.tensor_bytes)
        self.finish(sums, parameters, grads, wanted)


# --- one position per channel ---


def _constants(plan: Plan) -> tuple[Tensor, Tensor]:
    """The weight and the bias of a problem that has none: the row kernels always read both."""
    return torch.ones(plan.channels, dtype=plan.compute), torch.zeros(plan.channels, dtype=plan.compute)


class RowsForward(ForwardPlan):
    module = "rows"

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.forward, self.constants = self.kernel("forward"), _constants(self)
        self.ones, self.zeros = (tensor.data_ptr() for tensor in self.constants)

    def run(self, data: tuple[int, ...], saved: tuple[int, ...], parameters: tuple[int, ...], eps: float) -> None:
        weight, bias = parameters[0] or self.ones, parameters[1] or self.zeros
        arguments = (*data, *saved[:2], weight, bias, self.address, eps, self.parameter)
        parallel_for(self.forward, arguments, self.samples, self.tensor_bytes)


class RowsBackward(BackwardPlan):
    module = "rows"

    def __init__(self, problem: Problem, segments: int, rows: int) -> None:
        super().__init__(problem, segments, rows)
        self.segments, self.constants = segments, _constants(self)
        self.ones, self.zeros = (tensor.data_ptr() for tensor in self.constants)
        self.full, self.data_only = self.kernel("backward"), self.kernel("backward_data")

    def load_gradients(self) -> None:
        self.parameter_gradients = self.kernel("parameter_gradients", activated=False)

    def run(
        self,
        data: tuple[int, ...],
        saved: tuple[int, ...],
        parameters: tuple[int, ...],
        grads: list[int],
        wanted: list[int],
    ) -> None:
        weight, bias = parameters[0] or self.ones, parameters[1] or self.zeros
        summing = any(wanted)
        count = 2 * self.segments * self.channels if summing else 0
        block, (sums, partials) = self.workspace(count, count)
        arguments: tuple[Any, ...] = (*data, *saved, weight, bias, sums, partials, self.address, self.parameter)
        backward = self.full if summing else self.data_only
        parallel_for(backward, arguments, self.segments, 2 * self.tensor_bytes)
        if summing:
            arguments = (partials, *grads[:2], self.address, *wanted[:2], self.segments)
            parallel_for(self.parameter_gradients, arguments, self.channels, 8 * count)
