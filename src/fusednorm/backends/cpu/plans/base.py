"""What all plans share: allocation, the frames of calls, and what a call writes into one.

A plan is a problem with its kernels loaded, its geometry written and its workspace sized. It is made once per problem
and called many times from any thread; what a call does in Python is its host cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusednorm.activations import FORMULAS
from fusednorm.backends.cpu.compiler import Kernel, load
from fusednorm.backends.cpu.frame import LINES, Frame, keep_room, template, writer
from fusednorm.backends.cpu.geometry import (
    COSTLY_FLOPS,
    DTYPE_CODES,
    KEPT_WORKER,
    REPEAT,
    SHARED,
    WANT_VARIANCE,
    geometry,
)
from fusednorm.backends.cpu.memory import SMALLEST, empty_strided
from fusednorm.backends.cpu.threads import Loop, Program
from fusednorm.operands import BackwardOperands, Gradients, Operands, Results, Wanted, no_memory
from fusednorm.private.torch_names import empty_strided_cpu
from fusednorm.problem import DTYPE_BYTES, Problem
from fusednorm.strides import contiguous, packed_strides

CPU = torch.device("cpu")  # named in every allocation: torch's default device may be another
DISCARDED = 4096  # a plan keeps room for at most so many statistics that nobody asks for
#: Bytes of a workspace that is small: a frame keeps it between calls in any case; and of one of calls of a single
#: thread, of which few shapes need as much: layer_norm of 1 x 8192 in bfloat16 takes 6.5 us, and 9.1 with room of its
#: own each time.
KEPT_ROOM, KEPT_SERIAL_ROOM = 1 << 15, 1 << 17
#: Units of at most so many elements keep dz of an activation with an exponential.
KEPT_ELEMENTS = 1 << 20
#: The most elements of which dz is kept, by the bytes of one. On an AMD processor group_norm of (1, 128, 64, 64) with
#: silu takes 255 us in two threads in float32 with dz kept, and 320 with dz made twice, in bfloat16 263 and 385, with
#: gelu 345 and 516, of (4, 320, 56, 56) in bfloat16 with silu 1880 and 2550, but in float32 2920 and 2310.
MOST_KEPT = {2: 1 << 23, 4: 1 << 20, 8: 1 << 20}
#: Channels at least whose parameters' gradients a thread makes at a time, in vector code, and shares of them at most.
FEWEST_CHANNELS, MOST_SHARES = 64, 64
#: Bytes that are read in the time that a kernel takes to begin a row or plane, about 5 ns, and the operations of an
#: activation for which a byte is.
ROW_BYTES, FLOPS_OF_A_BYTE = 64, 16
NOTHING: Wanted = (False, False, False, False, False)
CODES: dict[torch.dtype, int] = {getattr(torch, dtype): code for dtype, code in DTYPE_CODES.items() if dtype}

FORWARD, FORWARD_PLACE = writer("y", "shift")
GIVEN, GIVEN_PLACE = writer("given_mean", "given_mean_dtype")
GIVEN_VARIANCE, GIVEN_VARIANCE_PLACE = writer("given_variance", "given_variance_dtype")
BACKWARD, BACKWARD_PLACE = writer("x", "grad_shift")


def put_given(frame: Frame, operands: Operands) -> tuple[Tensor, Tensor]:
    """Write the given mean and variance into a frame; the tensors are to be held until the kernels are done."""
    mean, var = operands.mean, operands.var
    assert mean is not None and var is not None
    mean, var = mean.contiguous(), var.contiguous()
    GIVEN(frame.words, GIVEN_PLACE, mean.data_ptr() or no_memory(mean), CODES[mean.dtype])
    GIVEN_VARIANCE(frame.words, GIVEN_VARIANCE_PLACE, var.data_ptr() or no_memory(var), CODES[var.dtype])
    return mean, var


def _like(operand: Tensor) -> Tensor:
    """A gradient's memory: scale and shift of points are as large as the input."""
    return empty_strided(operand.shape, operand.stride(), operand.dtype)


def in_lines(size: int) -> int:
    """So many bytes in whole pairs of cache lines. A line that two cores write goes to and fro: the backward of
    group_norm of (20000, 320) in 8 groups with silu in float32 takes 4.5 ms on two cores, and 9.5 where what each keeps
    shares a line with what the other does."""
    return -(-size // LINES) * LINES


class Plan:
    """What all plans share: dtypes, geometry, kernels by name, frames, allocation."""

    module: str
    program: Program
    #: Ones and zeros that kernels read for absent operands, kept alive.
    constant_operands: list[Tensor]

    def __init__(
        self, problem: Problem, pieces: int = 1, piece: int | None = None, made_for: Problem | None = None
    ) -> None:
        """``problem`` is what kernels see of the problem that the plan is ``made_for``."""
        self.problem = problem
        made_for = made_for or problem
        self.dtype: torch.dtype = getattr(torch, problem.dtype)
        self.compute: torch.dtype = getattr(torch, problem.compute_dtype)
        view = problem.view
        self.geometry = geometry(problem, pieces, view.spatial if piece is None else piece)
        if made_for.modulated and not problem.modulated and made_for.view.spatial > 1:
            self.geometry[REPEAT] = 1  # positions of two samples, whose scale and shift differ, make no row
        self.has_variance = made_for.norm.has_variance
        self.shared = made_for.norm.per_batch and not problem.norm.per_batch
        self.geometry[WANT_VARIANCE], self.geometry[SHARED] = self.has_variance, self.shared
        self.samples, self.channels = view.samples, view.channels
        self.num_statistics = problem.num_statistics
        self.tensor_bytes = view.numel * DTYPE_BYTES[problem.dtype]
        self.statistics_shape = made_for.statistics_shape
        self.shape, self.strides = torch.Size(problem.shape), problem.output_strides
        self.tasks = view.samples * pieces
        self.work_bytes = self._work_bytes()
        # For a dense input empty_like gives the same strides 0.4 us faster, but it takes no kept blocks.
        self.like_input = problem.dense and self.tensor_bytes < SMALLEST
        #: Arguments that are the same in all calls.
        self.constants = {
            "geometry": self.geometry.ctypes.data,
            "activation_parameter": problem.norm.activation_parameter,
        }
        self.workspace: dict[str, int] = {}  # where arrays start in the workspace, in bytes
        self.room, self.room_per_thread = 0, 0  # bytes of workspace
        self.idle: list[Frame] = []

    def _work_bytes(self) -> int:
        """The bytes of float32 or float64 that a kernel without an activation reads in about the time that a pass over
        the input takes: 16 bits take as long as float32."""
        rows = self.samples * self.channels
        if self.problem.view.spatial == 1 or self.problem.norm.per_position:
            rows = self.num_statistics
        size = self.problem.view.numel * DTYPE_BYTES[self.problem.compute_dtype]
        return size + size * self.problem.norm.activation_flops // FLOPS_OF_A_BYTE + ROW_BYTES * rows

    def kernel(self, function: str, *, activated: bool = True, module: str | None = None) -> int:
        """A kernel's address. A kernel that is not ``activated`` is shared by all activations."""
        activation = self.problem.norm.activation
        module = module or self.module
        if activation is None or not activated:
            return load(Kernel(module, function, self.problem.dtype))
        parametric = activation.parameter != FORMULAS[activation.name].default
        return load(Kernel(module, function, self.problem.dtype, activation.name, parametric))

    def loop(self, kernel: int, tasks: int, work_bytes: int, prepare: int = 0) -> Loop:
        return Loop(((kernel, 1),), tasks, work_bytes, prepare=prepare)

    def reserve(self, **counts: int) -> None:
        """Reserve arrays of so many float64 elements in the workspace, under the names of kernels' arguments."""
        for name, count in counts.items():
            self.workspace[name] = self.room
            self.room += in_lines(8 * count)

    def keep_for_workers(self, elements: int) -> None:
        """Each worker has room for so many elements of the compute dtype."""
        size = DTYPE_BYTES[self.problem.compute_dtype]
        self.room_per_thread = in_lines(elements * size)
        self.geometry[KEPT_WORKER] = self.room_per_thread // size

    def frame(self, threads: int) -> Frame:
        """A frame that no other call has, with workspace for so many threads."""
        try:
            frame = self.idle.pop()
        except IndexError:
            frame = Frame(template(self.constants))
        room = self.room + threads * self.room_per_thread
        if frame.room < room:
            frame.make_room(room, self.workspace)
        return frame

    def release(self, frame: Frame) -> None:
        """Keep a frame for another call.

        A call that raises does not release its frame, since a thread may still write to it.
        """
        if frame.room > self.kept_room and not keep_room(frame, self.idle):
            frame.drop_room()
        self.idle.append(frame)

    @property
    def kept_room(self) -> int:
        """The workspace that a frame keeps between calls, however much all keep."""
        return KEPT_SERIAL_ROOM if self.program.serial else KEPT_ROOM

    def is_short(self, operands: Sequence[Tensor | None]) -> bool:
        """True where a call with operands like these only allocates and runs its kernels."""
        return 0 < self.tensor_bytes < SMALLEST and all(each is None or each.is_contiguous() for each in operands)

    def start_and_finish(self) -> tuple[Callable[[], tuple[Frame, int]], Callable[[Frame, int], None]]:
        """``start()`` gives a frame and a number of threads, ``finish(frame, threads)`` runs the kernels and releases
        the frame. One thread with little workspace needs neither asked, which saves 1 us."""
        program, idle, new_frame, release = self.program, self.idle, self.frame, self.release
        if not program.serial or self.room + self.room_per_thread > self.kept_room:

            def start() -> tuple[Frame, int]:
                threads = program.threads()
                return new_frame(threads), threads

            def finish(frame: Frame, threads: int) -> None:
                program.run(frame, threads)
                release(frame)

            return start, finish
        run_serially, loops = program.run_serially, program.whole_address

        def start_serially() -> tuple[Frame, int]:
            try:
                return idle.pop(), 1
            except IndexError:
                return new_frame(1), 1

        def finish_serially(frame: Frame, threads: int) -> None:
            run_serially(frame.address, loops)
            idle.append(frame)

        return start_serially, finish_serially

    def output(self, input: Tensor) -> Tensor:
        if self.like_input:
            return torch.empty_like(input)
        return empty_strided(self.shape, self.strides, self.dtype)


class ForwardPlan(Plan):
    """A :class:`~fusednorm.instance.ForwardPlan`."""

    def __init__(
        self, problem: Problem, pieces: int = 1, piece: int | None = None, made_for: Problem | None = None
    ) -> None:
        super().__init__(problem, pieces, piece, made_for)
        self.has_mean, self.eps = problem.norm.has_mean, problem.norm.eps
        self.few = self.num_statistics <= DISCARDED
        # Every thread writes statistics that nobody asked for here, and none reads them. It saves small inputs 2 us.
        shape = (3 if self.few else 0, *self.statistics_shape)
        self.discarded = torch.empty(shape, dtype=self.compute, device=CPU)
        self.discard = tuple(statistic.data_ptr() for statistic in self.discarded)
        # empty_like is 0.5 us faster than empty.
        self.like_statistic = self.discarded[0] if self.few else None
        self.given = problem.direction == "inference"
        # Given statistics are results even where there is nothing to normalize.
        self.empty = self.tensor_bytes == 0 and not (self.given and self.num_statistics)
        loops = self.loops()
        if self.given:
            self.reserve(stats=2 * self.num_statistics)
            given = self.kernel("given", activated=False, module="affine")
            loops = [self.loop(given, self.num_statistics, 16 * self.num_statistics), *loops]
        self.program = Program(loops)

    def loops(self) -> list[Loop]:
        """The loops of a call, with their workspace reserved; ``stats`` holds given statistics before they run."""
        raise NotImplementedError

    def statistic(self) -> Tensor:
        if self.like_statistic is not None:
            return torch.empty_like(self.like_statistic)
        return torch.empty(self.statistics_shape, dtype=self.compute, device=CPU)

    def __call__(
        self,
        operands: Operands,
        statistics: bool = True,
        out: Tensor | None = None,
        mean_out: Tensor | None = None,
        rstd_out: Tensor | None = None,
    ) -> Results:
        input = operands.input
        output = self.output(input) if out is None else out
        variance = None
        if statistics or not self.few or mean_out is not None or rstd_out is not None:
            if rstd_out is None:
                rstd_out = self.statistic()
            if mean_out is None and self.has_mean:
                mean_out = self.statistic()
            if self.has_variance:
                variance = self.statistic()
            saved = (
                0 if mean_out is None else mean_out.data_ptr(), rstd_out.data_ptr(),
                0 if variance is None else variance.data_ptr(),
            )  # fmt: skip
        else:
            saved = self.discard
        if self.empty:
            for tensor in (mean_out, rstd_out, variance):
                if tensor is not None:
                    tensor.zero_()
            return Results(output, mean_out, rstd_out, variance)
        # Operands are held until the kernels are done.
        weight, bias = contiguous(operands.weight), contiguous(operands.bias)
        scale, shift = contiguous(operands.scale), contiguous(operands.shift)
        threads = self.program.threads()
        frame = self.frame(threads)
        FORWARD(
            frame.words, FORWARD_PLACE, output.data_ptr(), *saved, self.eps, input.data_ptr() or no_memory(input),
            0 if weight is None else weight.data_ptr() or no_memory(weight),
            0 if bias is None else bias.data_ptr() or no_memory(bias),
            0 if scale is None else scale.data_ptr() or no_memory(scale),
            0 if shift is None else shift.data_ptr() or no_memory(shift),
        )  # fmt: skip
        if self.given:
            _held = put_given(frame, operands)
        self.program.run(frame, threads)
        self.release(frame)
        return Results(output, mean_out, rstd_out, variance)

    def short(self, operands: Operands) -> Callable[..., Any] | None:
        """A forward of tensors with the metadata of these: ``run(*tensors)`` gives the output, which is ``out`` if that
        is given, and with ``saves`` the output and one tensor of mean, rstd and variance, without those that the norm
        does not have. None where a call does more than allocate and run its kernels."""
        if not self.is_short(operands.tensors()[1:]):
            return None
        allocate, (start, finish), few = empty_strided_cpu, self.start_and_finish(), self.few
        shape, strides, dtype, eps, given = tuple(self.shape), self.strides, self.dtype, self.eps, self.given
        saved_shape, compute = (self.has_mean + 1 + self.has_variance, *self.statistics_shape), self.compute
        saved_strides = packed_strides(saved_shape)
        row = saved_strides[0] * compute.itemsize
        to_rstd, has_variance = row if self.has_mean else 0, self.has_variance
        no_mean, no_rstd, no_variance = self.discard if few else (0, 0, 0)
        mean_code = var_code = 0
        if given:
            assert operands.mean is not None and operands.var is not None
            mean_code, var_code = CODES[operands.mean.dtype], CODES[operands.var.dtype]

        def run(
            input: Tensor, weight: Any, bias: Any, scale: Any, shift: Any, mean: Any, var: Any, saves: bool = False,
            out: Tensor | None = None,
        ) -> Any:  # fmt: skip
            output = allocate(shape, strides, dtype) if out is None else out
            if saves or not few:
                statistics = allocate(saved_shape, saved_strides, compute)
                mean_out = statistics.data_ptr()
                rstd = mean_out + to_rstd
                variance = rstd + row if has_variance else no_variance
            else:
                mean_out, rstd, variance = no_mean, no_rstd, no_variance
            frame, threads = start()
            FORWARD(
                frame.words, FORWARD_PLACE, output.data_ptr(), mean_out, rstd, variance, eps,
                input.data_ptr() or no_memory(input),
                0 if weight is None else weight.data_ptr() or no_memory(weight),
                0 if bias is None else bias.data_ptr() or no_memory(bias),
                0 if scale is None else scale.data_ptr() or no_memory(scale),
                0 if shift is None else shift.data_ptr() or no_memory(shift),
            )  # fmt: skip
            if given:
                GIVEN(frame.words, GIVEN_PLACE, mean.data_ptr() or no_memory(mean), mean_code)
                GIVEN_VARIANCE(frame.words, GIVEN_VARIANCE_PLACE, var.data_ptr() or no_memory(var), var_code)
            finish(frame, threads)
            return (output, statistics) if saves else output

        return run


class BackwardPlan(Plan):
    """A :class:`~fusednorm.instance.BackwardPlan`."""

    def __init__(
        self, problem: Problem, pieces: int = 1, piece: int | None = None, made_for: Problem | None = None
    ) -> None:
        super().__init__(problem, pieces, piece, made_for)
        self.wants_input = problem.direction != "backward_gamma_beta"
        operands = (problem.weight_dtype, problem.bias_dtype, problem.scale_dtype, problem.shift_dtype)
        self.sums_parameters = problem.direction != "backward_data" and any(operands)
        self.program = Program(self.loops())

    def loops(self) -> list[Loop]:
        """The loops of a call, with their workspace reserved."""
        raise NotImplementedError

    def _work_bytes(self) -> int:
        """Those of one of the two tensors that a backward reads, a pass over which takes half as long again."""
        return super()._work_bytes() * 3 // 4

    def keeps(self, elements: int, most: int = KEPT_ELEMENTS) -> bool:
        """Whether units of so many elements keep dz between two passes: that moves 8 bytes per element in cache."""
        activation = self.problem.norm.activation
        return activation is not None and activation.derivative_flops > COSTLY_FLOPS and elements <= most

    def variant(self, keeps: bool) -> str:
        """What is behind the name of a kernel that takes dz through both passes."""
        return "_kept" if keeps else ""

    def parameter_loops(self) -> list[Loop]:
        """The loop, if any, that makes the parameters' gradients from p and q per (n, c)."""
        if not self.sums_parameters:
            return []
        if self.shared:
            return self.unit_loops()
        kernel = self.kernel("parameter_gradients", activated=False, module="affine")
        share = max(FEWEST_CHANNELS, -(-self.channels // MOST_SHARES))
        return [Loop(((kernel, 1),), self.channels, 16 * self.samples * self.channels, share)]

    def unit_loops(self) -> list[Loop]:
        """The loop that makes the gradients of weight and bias from p and q where a unit has its own."""
        kernel = self.kernel("shared_gradients", activated=False, module="slabs_backward")
        return [self.loop(kernel, self.num_statistics, 16 * self.samples * self.channels)]

    def __call__(self, operands: BackwardOperands, wanted: Wanted, out: Tensor | None = None) -> Gradients:
        input = operands.input
        grad_input = None
        if self.wants_input:
            grad_input = self.output(input) if out is None else out
        # Operands are held until the kernels are done; a gradient has its operand's dtype.
        weight, bias = contiguous(operands.weight), contiguous(operands.bias)
        scale, shift = contiguous(operands.scale), contiguous(operands.shift)
        _, wants_weight, wants_bias, wants_scale, wants_shift = wanted if self.sums_parameters else NOTHING
        grad_weight = _like(weight) if weight is not None and wants_weight else None
        grad_bias = _like(bias) if bias is not None and wants_bias else None
        grad_scale = _like(scale) if scale is not None and wants_scale else None
        grad_shift = _like(shift) if shift is not None and wants_shift else None
        if self.tensor_bytes == 0:
            for grad in (grad_weight, grad_bias, grad_scale, grad_shift):
                if grad is not None:
                    grad.zero_()
            return Gradients(grad_input, grad_weight, grad_bias, grad_scale, grad_shift)
        mean = contiguous(operands.mean) if self.problem.norm.has_mean else None
        rstd, grad_output = operands.rstd.contiguous(), operands.grad_output
        mean_address, mean_dtype = (0, 0) if mean is None else (mean.data_ptr(), CODES[mean.dtype])
        threads = self.program.threads()
        frame = self.frame(threads)
        BACKWARD(
            frame.words, BACKWARD_PLACE, input.data_ptr() or no_memory(input),
            0 if weight is None else weight.data_ptr() or no_memory(weight),
            0 if bias is None else bias.data_ptr() or no_memory(bias),
            0 if scale is None else scale.data_ptr() or no_memory(scale),
            0 if shift is None else shift.data_ptr() or no_memory(shift),
            mean_address, mean_dtype, rstd.data_ptr(), CODES[rstd.dtype],
            grad_output.data_ptr() or no_memory(grad_output), 0 if grad_input is None else grad_input.data_ptr(),
            0 if grad_weight is None else grad_weight.data_ptr(), 0 if grad_bias is None else grad_bias.data_ptr(),
            0 if grad_scale is None else grad_scale.data_ptr(), 0 if grad_shift is None else grad_shift.data_ptr(),
        )  # fmt: skip
        self.program.run(frame, threads)
        self.release(frame)
        return Gradients(grad_input, grad_weight, grad_bias, grad_scale, grad_shift)

    def short(self, operands: BackwardOperands, wanted: Wanted) -> Callable[..., tuple[Tensor | None, ...]] | None:
        """A backward of tensors with the metadata of these, whose statistics a short forward saved; it gives the
        gradients as autograd's Function returns them. None as there."""
        o = operands
        if not self.is_short((o.weight, o.bias, o.scale, o.shift)) or o.rstd.dtype is not self.compute:
            return None
        allocate, (start, finish) = empty_strided_cpu, self.start_and_finish()
        shape, strides, dtype, wants_input = tuple(self.shape), self.strides, self.dtype, self.wants_input
        code = CODES[self.compute]
        has_mean = self.problem.norm.has_mean
        to_rstd = o.rstd.data_ptr() - o.mean.data_ptr() if has_mean and o.mean is not None else 0
        _, *wants = wanted if self.sums_parameters else NOTHING
        like_weight, like_bias, like_scale, like_shift = (
            (tuple(operand.shape), operand.stride(), operand.dtype) if operand is not None and wants_it else None
            for operand, wants_it in zip((o.weight, o.bias, o.scale, o.shift), wants, strict=True)
        )

        def run(
            grad_output: Tensor, input: Tensor, weight: Any, bias: Any, scale: Any, shift: Any, statistics: Tensor
        ) -> tuple[Tensor | None, ...]:
            grad_input = allocate(shape, strides, dtype) if wants_input else None
            grad_weight = None if like_weight is None else allocate(*like_weight)
            grad_bias = None if like_bias is None else allocate(*like_bias)
            grad_scale = None if like_scale is None else allocate(*like_scale)
            grad_shift = None if like_shift is None else allocate(*like_shift)
            saved = statistics.data_ptr()
            frame, threads = start()
            BACKWARD(
                frame.words, BACKWARD_PLACE, input.data_ptr() or no_memory(input),
                0 if weight is None else weight.data_ptr() or no_memory(weight),
                0 if bias is None else bias.data_ptr() or no_memory(bias),
                0 if scale is None else scale.data_ptr() or no_memory(scale),
                0 if shift is None else shift.data_ptr() or no_memory(shift),
                saved if has_mean else 0, code, saved + to_rstd, code,
                grad_output.data_ptr() or no_memory(grad_output), 0 if grad_input is None else grad_input.data_ptr(),
                0 if grad_weight is None else grad_weight.data_ptr(), 0 if grad_bias is None else grad_bias.data_ptr(),
                0 if grad_scale is None else grad_scale.data_ptr(), 0 if grad_shift is None else grad_shift.data_ptr(),
            )  # fmt: skip
            finish(frame, threads)
            return grad_input, grad_weight, grad_bias, grad_scale, grad_shift, None

        return run
