"""What all plans share: allocation, parameters as the kernels read them, the order of arguments."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fusednorm.activations import FORMULAS
from fusednorm.backends.triton.kernels.activations import activation
from fusednorm.backends.triton.launch import Launch, Scalars
from fusednorm.problem import Problem
from fusednorm.tensors import packed_strides

Forward = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
Backward = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
#: mean, rstd and variance, each where the problem has it and somebody wants it.
Saved = tuple[Tensor | None, Tensor | None, Tensor | None]
#: The mean and variance of each channel in place of the input's own, in their own dtypes; None without them.
Given = tuple[Tensor | None, Tensor | None]


def approximates() -> bool:
    """Whether the device has the instructions of approximate activations: NVIDIA's have, the interpreter has not."""
    return torch.version.hip is None and torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"


def stages(most: int) -> int:
    """Tiles in flight together: NVIDIA's copies to shared memory need no registers for them, AMD's loads do."""
    return most if approximates() else min(most, 2)


def overlaps() -> bool:
    """Whether a kernel may start before the one before it has ended: on NVIDIA from Hopper on."""
    return approximates() and torch.cuda.get_device_capability() >= (9, 0)


def allocator(device: str) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]:
    """torch.empty_strided on the current device, by the short way that Inductor's code takes where torch has it.

    A call has three to five allocations: each took 0.8 us of the host in place of 2.2.
    """
    if device == "cuda":
        try:
            from torch._C._dynamo.guards import _empty_strided_cuda  # type: ignore[attr-defined]
        except ImportError:
            pass
        else:
            short: Callable[..., Tensor] = _empty_strided_cuda
            return short
    return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device)


class Plan:
    """Dtypes, shapes, the activation's functions, allocation."""

    def __init__(self, problem: Problem) -> None:
        self.dtype: torch.dtype = getattr(torch, problem.dtype)
        self.compute: torch.dtype = getattr(torch, problem.compute_dtype)
        view, used = problem.view, problem.activation
        self.shape, self.strides, self.allocate = problem.shape, problem.output_strides, allocator(problem.device)
        self.on_gpu = problem.device == "cuda"
        self.rms, self.empty = problem.rms, view.numel == 0
        self.value, self.derivative = activation(used.name if used else None, problem.dtype, approximates())
        self.overlap = {"OVERLAP": overlaps()}
        self.activation_parameter = float(used.parameter or 0.0) if used else 0.0
        default = FORMULAS[used.name].default if used else 0.0
        #: The constant of a kernel's activation: its default parameter, or None for a value given at run time.
        self.compiled_parameter = {"PARAMETER": default if self.activation_parameter == default else None}

    def workspace(self, elements: int) -> Tensor:
        return self.allocate((elements,), (1,), self.compute)

    def elsewhere(self, input: Tensor) -> bool:
        return self.on_gpu and input.get_device() != torch._C._cuda_getDevice()


def contiguous(tensor: Tensor | None) -> Tensor | None:
    """A parameter as the kernels read it."""
    return tensor if tensor is None or tensor.is_contiguous() else tensor.contiguous()


def contiguous_in(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A statistic as the kernels read it: its dtype is not part of the problem."""
    if tensor is None or (tensor.dtype is dtype and tensor.is_contiguous()):
        return tensor
    return tensor.to(dtype).contiguous()


def _on_its_device(call: Any, tensor: Tensor, arguments: tuple[Any, ...]) -> Any:
    with torch.cuda.device(tensor.device):
        return call(*arguments)


class ForwardPlan(Plan):
    """(input, weight, bias, scale, shift, mean, var, eps, out, statistics, saved_in) -> (output, mean, rstd, var).

    ``keeps_statistics``: the kernels pass the statistics through memory whether the caller wants them or not.
    """

    keeps_statistics: bool

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.prepared: tuple[float, tuple[Launch, ...]] | None = None
        self.has_variance = problem.family in ("batch_norm", "instance_norm") and problem.direction == "forward"
        view = problem.view
        self.saved_shape = (view.channels,) if problem.per_batch else (view.samples, view.groups)
        self.saved_strides = packed_strides(self.saved_shape)

    def saved(self) -> Tensor:
        return self.allocate(self.saved_shape, self.saved_strides, self.compute)

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
        statistics: bool = True,
        saved_in: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> Forward:
        if self.elsewhere(input):
            arguments = (input, weight, bias, scale, shift, mean, var, eps, out, statistics, saved_in)
            return _on_its_device(self, input, arguments)
        output = self.allocate(self.shape, self.strides, self.dtype) if out is None else out
        saved_mean = saved_rstd = saved_var = None
        if statistics or self.keeps_statistics:
            saved_mean, saved_rstd = saved_in
            if saved_rstd is None:
                saved_rstd = self.saved()
            if saved_mean is None and not self.rms:
                saved_mean = self.saved()
            saved_var = self.saved() if self.has_variance else None
        if not self.empty:
            parameters = contiguous(weight), contiguous(bias), contiguous(scale), contiguous(shift)
            given = contiguous(mean), contiguous(var)
            self.run(input, output, parameters, given, (saved_mean, saved_rstd, saved_var), eps)
        elif mean is None or var is None:
            for tensor in (saved_mean, saved_rstd, saved_var):
                if tensor is not None:
                    tensor.zero_()
        elif saved_mean is not None and saved_rstd is not None:
            saved_mean.copy_(mean)
            saved_rstd.copy_((var.double() + eps).rsqrt())
        return output, saved_mean, saved_rstd, saved_var

    def launches(self, eps: float) -> tuple[Launch, ...]:
        """The launches with an eps. Those of the last one are kept; another eps costs the host time, and compiles
        nothing, since eps is an argument of the kernels."""
        prepared = self.prepared
        if prepared is None or prepared[0] != eps:
            prepared = self.prepared = (eps, self.prepare(float(eps)))
        return prepared[1]

    def prepare(self, eps: float) -> tuple[Launch, ...]:
        raise NotImplementedError

    def run(
        self,
        x: Tensor,
        y: Tensor,
        parameters: Sequence[Tensor | None],
        given: Given,
        saved: Saved,
        eps: float,
    ) -> None:
        raise NotImplementedError


class OneLaunchForward(ForwardPlan):
    """A forward of one launch, whose constants are what the plan knows of the problem, and its tile."""

    keeps_statistics = False

    def __init__(
        self, problem: Problem, kernel: Any, programs: int, scalars: Scalars, tile: Mapping[str, int | None], warps: int
    ) -> None:
        super().__init__(problem)
        self.kernel, self.programs, self.scalars, self.warps = kernel, programs, scalars, warps
        self.constants = {"RMS": self.rms, "VALUE": self.value, **self.compiled_parameter, **tile}

    def prepare(self, eps: float) -> tuple[Launch, ...]:
        scalars = (*self.scalars, eps, self.activation_parameter)
        return (Launch(self.kernel, self.programs, scalars, self.constants, self.warps),)


class BackwardPlan(Plan):
    """(grad_output, input, mean, rstd, weight, bias, scale, shift, output_mask, out) -> five gradients or None."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.wants_input = problem.direction != "backward_gamma_beta"
        view, shape = problem.view, problem.parameter_shape
        parameter = shape, packed_strides(shape)
        modulation = (view.samples, view.channels), (view.channels, 1)
        #: The shape, strides and dtype of each parameter's gradient, by the problem that the kernels were made for.
        self.gradients_of = tuple(
            None if dtype is None else (*like, getattr(torch, dtype))
            for like, dtype in (
                (parameter, problem.weight_dtype), (parameter, problem.bias_dtype),
                (modulation, problem.scale_dtype), (modulation, problem.shift_dtype),
            )
        )  # fmt: skip

    def __call__(
        self,
        grad_output: Tensor,
        input: Tensor,
        mean: Tensor | None,
        rstd: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        scale: Tensor | None,
        shift: Tensor | None,
        output_mask: Sequence[bool],
        out: Tensor | None = None,
    ) -> Backward:
        if self.elsewhere(input):
            arguments = (grad_output, input, mean, rstd, weight, bias, scale, shift, output_mask, out)
            return _on_its_device(self, input, arguments)
        grad_input = None
        if self.wants_input:
            grad_input = self.allocate(self.shape, self.strides, self.dtype) if out is None else out
        grads = [
            self.allocate(*like) if like is not None and wanted else None
            for like, wanted in zip(self.gradients_of, output_mask[1:], strict=True)
        ]
        if not self.empty:
            parameters = contiguous(weight), contiguous(bias), contiguous(scale), contiguous(shift)
            saved = (None if self.rms else contiguous_in(mean, self.compute), contiguous_in(rstd, self.compute))
            self.run((grad_output, input), grad_input, saved, parameters, grads)
        else:
            for grad in grads:
                if grad is not None:
                    grad.zero_()
        return grad_input, grads[0], grads[1], grads[2], grads[3]

    def run(
        self,
        data: tuple[Tensor, Tensor],
        dx: Tensor | None,
        saved: tuple[Tensor | None, Tensor | None],
        parameters: Sequence[Tensor | None],
        grads: Sequence[Tensor | None],
    ) -> None:
        raise NotImplementedError
