"""The short forms of plans, for calls that repeat (repeats.py, sum_repeats.py): the launches of a call, from a tape.

A short form takes tensors whose metadata are those of the call that it was made for. The first call of a kind goes
through the plan, on a tape, and so does each call that the tape's launches do not fit: with tensors that do not begin
at 16 bytes, or on a device that is not the current one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusednorm.backends.triton.tape import Replay, Tape, on_tape
from fusednorm.instance import Move
from fusednorm.operands import BackwardOperands, Operands, Wanted, no_memory
from fusednorm.private.torch_names import current_device
from fusednorm.private.triton_names import TOO_MANY_BLOCKS
from fusednorm.strides import packed_strides

#: What launches take for aligned, in bytes.
ALIGNED = 16
Optional = Tensor | None


def short_forward(plan: Any, operands: Operands, moves: Move | None) -> Callable[..., Any]:
    """``run(*tensors)`` gives the output, and with ``saves`` the output and one tensor of mean, rstd and variance,
    without those that the norm does not have. ``moves`` moves running statistics, which are then given as mean and
    var, and a counter; such calls save."""
    device, on_gpu, allocate = operands.input.get_device(), plan.on_gpu, plan.allocate
    written, compute = (plan.shape, plan.strides, plan.dtype), plan.compute
    given, stored = moves is None and operands.mean is not None, plan.keeps_statistics
    present = (not plan.rms, True, plan.has_variance)
    saved_shape = (sum(present), *plan.saved_shape)
    saved_strides = _padded(plan.saved_shape, compute)
    rows = [number * saved_strides[0] * compute.itemsize for number in range(saved_shape[0])]
    replays: dict[bool, Replay | None] = {}  # by whether the statistics are wanted

    def run(
        input: Tensor, weight: Optional, bias: Optional, scale: Optional, shift: Optional, mean: Optional,
        var: Optional, saves: bool = False, counter: Optional = None,
    ) -> Any:  # fmt: skip
        tensors = (input, weight, bias, scale, shift, mean, var, counter)
        addresses = None if on_gpu and current_device() != device else _addresses(tensors)
        replay = replays.get(saves)
        if replay is None or addresses is None:
            return by_plan(tensors, saves, addresses is not None and saves not in replays)
        output = allocate(*written)
        addresses.append(output.data_ptr())
        if saves or stored:
            statistics = allocate(saved_shape, saved_strides, compute)
            first = statistics.data_ptr()
            addresses += [first + row for row in rows]
        try:
            replay(device, addresses)
        except RuntimeError as error:
            if TOO_MANY_BLOCKS not in str(error):
                raise
            del replays[saves]  # the plan goes another way from now on
            return by_plan(tensors, saves, False)
        return (output, statistics) if saves else output

    def by_plan(tensors: tuple[Any, ...], saves: bool, tapes: bool) -> Any:
        input, weight, bias, scale, shift, mean, var, counter = tensors
        own, tape, statistics = (mean, var) if given else (), Tape(), None
        saved: tuple[Optional, Optional] = (None, None)
        if saves:
            statistics = torch.empty_strided(saved_shape, saved_strides, dtype=compute, device=input.device)
            saved = (None, statistics[0]) if plan.rms else (statistics[0], statistics[1])
        with on_tape(tape):
            results = plan(Operands(input, weight, bias, scale, shift, *own), saves, None, *saved)
            if moves is not None:
                moves(mean, var, results.mean, results.var, counter)
        every = results.mean, results.rstd, results.var
        kept = [each for each, there in zip(every, present, strict=True) if there]
        if tapes:
            replays[saves] = tape.replay((*_there(tensors), results.output, *_there(kept)), allocate)
        if statistics is None:
            return results.output
        if plan.has_variance:
            statistics[2].copy_(results.var)
        return results.output, statistics

    return run


def short_backward(plan: Any, operands: BackwardOperands, wanted: Wanted) -> Callable[..., tuple[Optional, ...]]:
    """``run(*tensors, statistics)``, with the statistics that a short forward saved, gives the gradients as autograd's
    Function returns them."""
    device, on_gpu, allocate = operands.input.get_device(), plan.on_gpu, plan.allocate
    mean, rstd = operands.mean, operands.rstd
    rows = (0,) if mean is None else (0, rstd.data_ptr() - mean.data_ptr())
    data = (plan.shape, plan.strides, plan.dtype) if plan.wants_input else None
    others = zip(plan.gradients_of, wanted[1:], strict=True)
    made = data, *(like if like is not None and wants else None for like, wants in others)
    replays: list[Replay | None] = []  # of a call, once there was one

    def run(
        grad_output: Tensor, input: Tensor, weight: Optional, bias: Optional, scale: Optional, shift: Optional,
        statistics: Tensor,
    ) -> tuple[Optional, ...]:  # fmt: skip
        tensors = (grad_output, input, weight, bias, scale, shift)
        addresses = None if on_gpu and current_device() != device else _addresses(tensors)
        replay = replays[0] if replays else None
        if replay is None or addresses is None:
            return by_plan(tensors, statistics, addresses is not None and not replays)
        first = statistics.data_ptr()
        addresses += [first + row for row in rows]
        gradients = [None if like is None else allocate(*like) for like in made]
        addresses += [gradient.data_ptr() for gradient in gradients if gradient is not None]
        try:
            replay(device, addresses)
        except RuntimeError as error:
            if TOO_MANY_BLOCKS not in str(error):
                raise
            del replays[:]
            return by_plan(tensors, statistics, False)
        return (*gradients, None)

    def by_plan(tensors: tuple[Any, ...], statistics: Tensor, tapes: bool) -> tuple[Optional, ...]:
        grad_output, input, *parameters = tensors
        saved = (None, statistics[0]) if plan.rms else (statistics[0], statistics[1])
        tape = Tape()
        with on_tape(tape):
            found = plan(BackwardOperands(grad_output, input, *saved, *parameters), wanted)
        gradients = found.input, found.weight, found.bias, found.scale, found.shift
        if tapes:
            replays.append(tape.replay((*_there(tensors), *_there(saved), *_there(gradients)), allocate))
        return (*gradients, None)

    return run


def taped(plan: Any, make: Callable[..., Sequence[Optional]], device: int) -> Callable[..., Sequence[Optional]]:
    """``run(*tensors)`` gives what ``make(*tensors)`` gives by the plan: new tensors, and Nones. ``make`` does nothing
    else than to allocate and to launch."""
    on_gpu, allocate = plan.on_gpu, plan.allocate
    replays: list[tuple[Replay | None, list[Any]]] = []  # of a call, once there was one, and what it made

    def run(*tensors: Optional) -> Sequence[Optional]:
        addresses = None if on_gpu and current_device() != device else _addresses(tensors)
        if addresses is None:
            return make(*tensors)
        if not replays:
            return first(tensors)
        replay, likes = replays[0]
        if replay is None:
            return make(*tensors)
        made = [None if like is None else allocate(*like) for like in likes]
        addresses += [each.data_ptr() for each in made if each is not None]
        try:
            replay(device, addresses)
        except RuntimeError as error:
            if TOO_MANY_BLOCKS not in str(error):
                raise
            replays.clear()  # the plan goes another way from now on
            return make(*tensors)
        return made

    def first(tensors: tuple[Optional, ...]) -> Sequence[Optional]:
        tape = Tape()
        with on_tape(tape):
            made = make(*tensors)
        likes = [None if each is None else (tuple(each.shape), each.stride(), each.dtype) for each in made]
        replays.append((tape.replay((*_there(tensors), *_there(made)), allocate), likes))
        return made

    return run


def _there(tensors: Sequence[Optional]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


def _addresses(tensors: Sequence[Optional]) -> list[int | None] | None:
    """The addresses of the tensors that are there, behind a None, as a replay takes them; None where one of them is not
    aligned."""
    found: list[int | None] = [None]
    together = 0
    for tensor in tensors:
        if tensor is not None:
            address = tensor.data_ptr() or no_memory(tensor)
            together |= address
            found.append(address)
    return None if together % ALIGNED else found


def _padded(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, ...]:
    """The strides of several tensors of a shape in one, each of which begins at a multiple of 16 bytes."""
    strides, vector = packed_strides(shape), ALIGNED // dtype.itemsize
    elements = shape[0] * strides[0]
    return -(-elements // vector) * vector, *strides
