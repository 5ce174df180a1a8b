"""What all plans share: allocation, operands as the kernels read them, and the calls of the contract."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fusednorm.activations import FORMULAS
from fusednorm.backends.triton.kernels.activations import activation
from fusednorm.backends.triton.launch import Scalars, prepared, recording
from fusednorm.backends.triton.plans.short import short_backward, short_forward, taped
from fusednorm.backends.triton.tape import taping
from fusednorm.instance import Move
from fusednorm.operands import BackwardOperands, Gradients, Operands, Results, Wanted
from fusednorm.private.torch_names import current_device, empty_strided_cuda
from fusednorm.problem import DTYPE_BYTES, Problem
from fusednorm.strides import contiguous, packed_strides

#: Bytes of an input up to which kernels of several steps to a program gain by an early start.
EARLY_BYTES = 1 << 20

#: Tensors of which some may be absent: (weight, bias, scale, shift), or their gradients.
Tensors = Sequence[Tensor | None]
#: Where a forward stores mean, rstd and variance, each None where it is not stored.
Saved = tuple[Tensor | None, Tensor | None, Tensor | None]
#: The mean and variance that the caller gives in place of the input's own, in any dtype; None where there are none.
Given = tuple[Tensor | None, ...]


def approximates() -> bool:
    """Whether activations may use approximate instructions: on NVIDIA, and not in the interpreter."""
    return torch.version.hip is None and torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"


def stages(most: int) -> int:
    """Tiles in flight together: NVIDIA copies them to shared memory, AMD loads them into registers, so two there."""
    return most if approximates() else min(most, 2)


def overlaps() -> bool:
    """Whether a kernel may start before the one before it has ended: on NVIDIA from Hopper on, by our own launches. A
    plan may run on any of the devices, so all of them have to be such."""
    if recording() or not approximates():
        return False
    return all(torch.cuda.get_device_capability(device) >= (9, 0) for device in range(torch.cuda.device_count()))


def converts() -> bool:
    """Whether the GPU converts to the float8 dtypes by itself: NVIDIA's from sm_89 on."""
    return approximates() and torch.cuda.get_device_capability() >= (8, 9)


def codes_of(problem: Problem) -> dict[str, Any]:
    """The constants of a kernel that stores an output of 8 bits: its format, or None, and whether the GPU converts."""
    quantized = problem.quantized
    return {"OUT": quantized and quantized.dtype, "NATIVE": quantized is not None and converts()}


def allocator(device: str) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]:
    """torch.empty_strided on the current device; by the function of Inductor's generated code, where torch has it.

    That function takes 0.8 us of the host, torch.empty_strided 2.2, and a call allocates three to five times.
    """
    if device == "cuda" and empty_strided_cuda is not None and not recording():
        return empty_strided_cuda
    return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device)


class Plan:
    """Dtypes, shapes, the activation's functions, allocation."""

    def __init__(self, problem: Problem) -> None:
        self.dtype: torch.dtype = getattr(torch, problem.dtype)
        self.compute: torch.dtype = getattr(torch, problem.compute_dtype)
        view, used = problem.view, problem.norm.activation
        self.shape, self.strides, self.allocate = problem.shape, problem.output_strides, allocator(problem.device)
        #: Whether the current device is asked for, which must be that of the tensors.
        self.on_gpu = problem.device == "cuda" and not recording()
        self.rms, self.empty = not problem.norm.has_mean, view.numel == 0
        self.value, self.derivative = activation(used.name if used else None, problem.dtype, approximates())
        self.overlap = {"OVERLAP": overlaps()}
        self.eps, self.activation_parameter = problem.norm.eps, problem.norm.activation_parameter
        default = FORMULAS[used.name].default if used else 0.0
        #: The activation's parameter where it is the default, which is compiled in; None where it is an argument.
        self.alpha = {"ALPHA": default if self.activation_parameter == default else None}

    def workspace(self, elements: int, dtype: torch.dtype | None = None, zeroed: bool = False) -> Tensor:
        """Memory for the kernels of one call, in the compute dtype where no other is given."""
        made = self.allocate((elements,), (1,), dtype or self.compute)
        if zeroed:
            made.zero_()
        tape = taping()
        if tape is not None:
            tape.allocated(made, zeroed)
        return made

    def elsewhere(self, input: Tensor) -> bool:
        return self.on_gpu and input.get_device() != current_device()

    def taped(self, make: Callable[..., Sequence[Tensor | None]], input: Tensor) -> Callable[..., Any]:
        """``make``, which runs this plan on tensors with the metadata of one call's, of which ``input`` is one: by the
        launches of its first call."""
        return make if self.empty else taped(self, make, input.get_device())


def starts_early(problem: Problem, steps: int) -> bool:
    """Whether a kernel, each program of which takes so many steps, starts before the one before it on the stream has
    ended. The backward of layer_norm on (32768, 1024) in bf16, on four programs of one warp to a multiprocessor, takes
    77 us so, and 53 where it starts on empty multiprocessors, (104857, 320) 82 and 57, (8193, 1024) in fp32 42 and 28,
    rms_norm of (87381, 384) in bf16 69 and 54: programs that come while others end presumably lie unevenly, and those
    of the fullest multiprocessor end last. Programs of more warps lose less: layer_norm of (58240, 48) in fp16 with
    relu takes 13.2 us on four warps, and 11.8, of (53760, 128) with leaky_relu on eight 21.5 and 20.2. Programs of one
    step gain: of 54 drawn calls of 1 to 100 MB none takes 3 % longer than without any early start, some a fifth less.
    """
    return steps == 1 or problem.view.numel * DTYPE_BYTES[problem.dtype] <= EARLY_BYTES


def contiguous_in(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A statistic as the kernels read it; the caller may give it in any dtype."""
    if tensor is None or (tensor.dtype is dtype and tensor.is_contiguous()):
        return tensor
    return tensor.to(dtype).contiguous()


class ForwardPlan(Plan):
    """A :class:`~fusednorm.instance.ForwardPlan`.

    ``keeps_statistics``: one kernel stores the statistics and another one reads them, whether the caller wants them or
    not.
    """

    keeps_statistics: bool

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.has_variance = problem.norm.has_variance
        self.saved_shape = problem.statistics_shape
        self.saved_strides = packed_strides(self.saved_shape)

    def saved(self) -> Tensor:
        return self.allocate(self.saved_shape, self.saved_strides, self.compute)

    def __call__(
        self,
        operands: Operands,
        statistics: bool = True,
        out: Tensor | None = None,
        mean_out: Tensor | None = None,
        rstd_out: Tensor | None = None,
    ) -> Results:
        o, mean, var = operands, operands.mean, operands.var
        if self.elsewhere(o.input):
            with torch.cuda.device(o.input.device):
                return self(operands, statistics, out, mean_out, rstd_out)
        output = self.allocate(self.shape, self.strides, self.dtype) if out is None else out
        saved_var: Tensor | None = None
        if statistics or self.keeps_statistics:
            if rstd_out is None:
                rstd_out = self.saved()
            if mean_out is None and not self.rms:
                mean_out = self.saved()
            saved_var = self.saved() if self.has_variance else None
        if not self.empty:
            parameters = contiguous(o.weight), contiguous(o.bias), contiguous(o.scale), contiguous(o.shift)
            self.run(o.input, output, parameters, (contiguous(mean), contiguous(var)), (mean_out, rstd_out, saved_var))
        elif mean is None or var is None:
            for tensor in (mean_out, rstd_out, saved_var):
                if tensor is not None:
                    tensor.zero_()
        else:
            if mean_out is not None:
                mean_out.copy_(mean)
            if rstd_out is not None:
                rstd_out.copy_((var.double() + self.eps).rsqrt())
        return Results(output, mean_out, rstd_out, saved_var)

    def short(self, operands: Operands) -> Callable[..., Any] | None:
        """The forward of tensors with the metadata of these; None where a call does more than allocate and launch."""
        return self.short_moving(operands, None)

    def short_moving(self, operands: Operands, moves: Move | None) -> Callable[..., Any] | None:
        """The same, which then ``moves`` running statistics, that are given as mean and var."""
        repeats = not self.empty and all(each is None or each.is_contiguous() for each in operands.tensors()[1:])
        return short_forward(self, operands, moves) if repeats else None

    def run(self, x: Tensor, y: Tensor, parameters: Tensors, given: Given, saved: Saved) -> None:
        """Launch the kernels."""
        raise NotImplementedError


class OneLaunchForward(ForwardPlan):
    """A forward of one launch."""

    keeps_statistics = False

    def __init__(
        self, problem: Problem, kernel: Any, programs: int, scalars: Scalars, tile: Mapping[str, Any], warps: int
    ) -> None:
        super().__init__(problem)
        constants = {**self.overlap, "RMS": self.rms, "VALUE": self.value, **self.alpha, **tile}
        self.launch = prepared(kernel, programs, (*scalars, self.eps, self.activation_parameter), constants, warps)


class BackwardPlan(Plan):
    """A :class:`~fusednorm.instance.BackwardPlan`."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.wants_input = problem.direction != "backward_gamma_beta"
        view, shape = problem.view, problem.parameter_shape
        parameter = shape, packed_strides(shape)
        modulation = (view.samples, view.channels), (view.channels, 1)
        #: The shape, strides and dtype of each parameter's gradient; None for a parameter that the problem has not.
        self.gradients_of = tuple(
            None if dtype is None else (*like, getattr(torch, dtype))
            for like, dtype in (
                (parameter, problem.weight_dtype), (parameter, problem.bias_dtype),
                (modulation, problem.scale_dtype), (modulation, problem.shift_dtype),
            )
        )  # fmt: skip

    def __call__(self, operands: BackwardOperands, wanted: Wanted, out: Tensor | None = None) -> Gradients:
        o = operands
        if self.elsewhere(o.input):
            with torch.cuda.device(o.input.device):
                return self(operands, wanted, out)
        grad_input = None
        if self.wants_input:
            grad_input = self.allocate(self.shape, self.strides, self.dtype) if out is None else out
        grads = [
            self.allocate(*like) if like is not None and want else None
            for like, want in zip(self.gradients_of, wanted[1:], strict=True)
        ]
        if not self.empty:
            parameters = contiguous(o.weight), contiguous(o.bias), contiguous(o.scale), contiguous(o.shift)
            saved = (None if self.rms else contiguous_in(o.mean, self.compute), contiguous_in(o.rstd, self.compute))
            self.run((o.grad_output, o.input), grad_input, saved, parameters, grads)
        else:
            for grad in grads:
                if grad is not None:
                    grad.zero_()
        return Gradients(grad_input, *grads)

    def short(self, operands: BackwardOperands, wanted: Wanted) -> Callable[..., tuple[Tensor | None, ...]] | None:
        """The backward of tensors with the metadata of these, whose statistics a short forward saved; None as there."""
        repeats = not self.empty and all(each is None or each.is_contiguous() for each in operands.tensors()[2:])
        return short_backward(self, operands, wanted) if repeats else None

    def run(self, data: Tensors, dx: Tensor | None, saved: Tensors, parameters: Tensors, grads: Tensors) -> None:
        """Launch the kernels on ``data``, grad_output and input, with the ``saved`` mean and rstd."""
        raise NotImplementedError
