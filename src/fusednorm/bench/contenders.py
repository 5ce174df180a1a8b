"""Contenders, which run a workload: fusednorm, torch eager, torch.compile, and the installed peers.

A contender says why it cannot run a workload (:meth:`Contender.refusal`), prepares a call that takes no arguments, and
turns the call's result into torch tensors of the input's shape, to be checked before the call is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

import fusednorm
from fusednorm import dispatch
from fusednorm.activations import resolve
from fusednorm.bench.judging import Asked, Results
from fusednorm.bench.workloads import EPS, Inputs, Workload
from fusednorm.choice import forced
from fusednorm.machine.timing import Call
from fusednorm.private.torch_names import keep_buffers
from fusednorm.problems import forward_problem
from fusednorm.tolerance import OURS, PEER, Allowance


@dataclass(frozen=True)
class Prepared:
    """A call without arguments, and a function from its return value to named tensors.

    ``public`` calls the public function whose host time is reported too: for a backward the forward that records it;
    None for the call itself.
    """

    call: Call
    results: Callable[[Any], Results]
    public: Call | None = None


class Contender(Protocol):
    """One way to run a workload."""

    name: str
    allowance: Allowance

    def refusal(self, workload: Workload, asked: Asked) -> str | None:
        """Why it cannot run the workload in this direction, or None."""

    def prepare(self, workload: Workload, inputs: Inputs, asked: Asked) -> Prepared:
        """A call on these inputs."""


def arguments(workload: Workload, inputs: Inputs) -> tuple[Any, ...]:
    """The positional arguments, the same for torch.nn.functional's functions and ours."""
    x, weight, bias = inputs.input, inputs.weight, inputs.bias
    if workload.family == "group_norm":
        return x, workload.groups, weight, bias, EPS
    if workload.family == "instance_norm":
        return x, None, None, weight, bias, True, 0.1, EPS
    if workload.family == "layer_norm":
        return x, workload.parameter_shape, weight, bias, EPS
    if workload.family == "rms_norm":
        return x, workload.parameter_shape, weight, EPS
    return x, inputs.mean, inputs.var, weight, bias, workload.training, 0.1, EPS


def fused_arguments(workload: Workload, inputs: Inputs) -> dict[str, Any]:
    """The keyword arguments that only our functions have."""
    found: dict[str, Any] = {}
    if workload.activation is not None:
        found["activation"] = workload.activation
    if workload.modulated:
        found |= {"scale": inputs.scale, "shift": inputs.shift}
    if workload.channel_dim != 1:
        found["channel_dim"] = workload.channel_dim
    return found


def modulation_shape(workload: Workload) -> tuple[int, ...]:
    """The shape in which scale and shift broadcast against the input."""
    samples, ones = workload.shape[0], (1,) * (len(workload.shape) - 2)
    return (samples, *ones, workload.shape[-1]) if workload.row_family else (samples, workload.shape[1], *ones)


TORCH_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "hardswish": F.hardswish,
    "leaky_relu": F.leaky_relu,
}


def torch_norm(workload: Workload) -> Callable[[Inputs], Tensor]:
    """The workload in torch's own functions, as a user of torch writes it."""
    norm = getattr(F, workload.family)
    activation = resolve(workload.activation)
    apply = None if activation is None else TORCH_ACTIVATIONS[activation.name]
    broadcast = modulation_shape(workload)

    def run(inputs: Inputs) -> Tensor:
        z: Tensor = norm(*arguments(workload, inputs))
        if inputs.scale is not None and inputs.shift is not None:
            z = z * (1 + inputs.scale.reshape(broadcast)) + inputs.shift.reshape(broadcast)
        return z if apply is None else apply(z)

    return run


def _output(result: Tensor) -> Results:
    return {"output": result}


def _with_gradients(run: Callable[[Inputs], Tensor], inputs: Inputs) -> Prepared:
    """A forward and the gradients of everything that has one."""
    leaves = inputs.requiring_grad()
    named = leaves.named_leaves()
    wanted = tuple(named.values())

    def call() -> tuple[Tensor, ...]:
        output = run(leaves)
        return (output, *torch.autograd.grad(output, wanted, leaves.grad_output))

    return Prepared(call, lambda result: dict(zip(("output", *named), result, strict=True)))


def _backward_alone(run: Callable[[Inputs], Tensor], inputs: Inputs) -> Prepared:
    """The gradients of everything that has one, of a forward that is kept: the third, as in a program's later steps,
    since from the third on a call is known (repeats.py)."""
    leaves = inputs.requiring_grad()
    named = leaves.named_leaves()
    wanted = tuple(named.values())
    for _ in range(3):
        output = run(leaves)
    return Prepared(
        lambda: torch.autograd.grad(output, wanted, leaves.grad_output, retain_graph=True),
        lambda result: dict(zip(named, result, strict=True)),
        lambda: run(leaves),
    )


def prepared_torch(run: Callable[[Inputs], Tensor], inputs: Inputs, asked: Asked) -> Prepared:
    """A differentiable function of the inputs, in the direction asked for."""
    if asked == "forward_backward":
        return _with_gradients(run, inputs)
    if asked == "backward":
        return _backward_alone(run, inputs)
    return Prepared(lambda: run(inputs), _output)


class FusedNorm:
    """The public function, allocating its output."""

    name = "fusednorm"
    allowance = OURS

    def refusal(self, workload: Workload, asked: Asked) -> str | None:
        return None

    def prepare(self, workload: Workload, inputs: Inputs, asked: Asked) -> Prepared:
        function = getattr(fusednorm, workload.family)

        def run(inputs: Inputs) -> Tensor:
            result: Tensor = function(*arguments(workload, inputs), **fused_arguments(workload, inputs))
            return result

        return prepared_torch(run, inputs, asked)


class FusedNormPreallocated:
    """The forward into a kept output, as the plain copy writes."""

    name = "fusednorm out="
    allowance = OURS

    def refusal(self, workload: Workload, asked: Asked) -> str | None:
        return None if asked == "forward" else "only the forward takes a preallocated output"

    def prepare(self, workload: Workload, inputs: Inputs, asked: Asked) -> Prepared:
        norm, operands, out = workload.norm, inputs.operands, torch.empty_like(inputs.input)
        plan = dispatch.make_plan(forward_problem(norm, operands), forced())
        run = partial(plan, operands, True, out)
        return Prepared(run, lambda result: {"output": out})


class Eager:
    """torch.nn.functional."""

    name = "eager"
    allowance = PEER

    def refusal(self, workload: Workload, asked: Asked) -> str | None:
        if workload.channel_dim != 1:
            return "torch's functions take no channel_dim"
        if asked != "forward" and workload.row_family and self.corrupts_memory(workload):
            return "torch's backward writes out of bounds (pytorch/pytorch#192016)"
        return None

    def corrupts_memory(self, workload: Workload) -> bool:
        """Whether torch's backward on a GPU takes the size of the last normalized dimension for that of them all."""
        rows = prod(workload.shape) // prod(workload.parameter_shape)
        return torch.cuda.is_available() and rows > 1 << 16 and len(workload.parameter_shape) > 1

    def prepare(self, workload: Workload, inputs: Inputs, asked: Asked) -> Prepared:
        return prepared_torch(torch_norm(workload), inputs, asked)


class Compiled(Eager):
    """torch.compile of torch.nn.functional, specialized to the shape; compiled once for all directions of a workload.

    Its backward may not reuse saved tensors as scratch (donated buffers), since each call runs it on the same tensors.
    """

    name = "compile"

    def __init__(self) -> None:
        self._compiled: tuple[Workload, Callable[[Inputs], Tensor]] | None = None

    def corrupts_memory(self, workload: Workload) -> bool:
        return False  # the compiled backward is Inductor's own

    def prepare(self, workload: Workload, inputs: Inputs, asked: Asked) -> Prepared:
        if self._compiled is None or self._compiled[0] != workload:
            # Many workloads pass through one process: without the reset they would share one limit of recompilations.
            torch.compiler.reset()
            self._compiled = workload, torch.compile(torch_norm(workload), fullgraph=True, dynamic=False)
        function = self._compiled[1]
        if asked != "forward":
            keep_buffers()
            function(inputs.requiring_grad())
        return prepared_torch(function, inputs, asked)


def available(names: Collection[str] = (), device: str = "cpu") -> tuple[list[Contender], dict[str, str]]:
    """The contenders of these names (none given: all) that run on the device, and why the others are missing.

    Only the requested peers are imported. Raises ValueError for an unknown name.
    """
    from fusednorm.bench import peers

    own: list[Contender] = [FusedNorm(), FusedNormPreallocated(), Eager(), Compiled()]
    known = [*(one.name for one in own), *peers.PEERS]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"contender: {', '.join(unknown)} unknown; expected {', '.join(known)}")
    # On a GPU an allocation costs nothing, so a kept output is measured only on request.
    found = [one for one in own if one.name in names or not (names or (device != "cpu" and one is own[1]))]
    missing: dict[str, str] = {}
    for name, peer in peers.PEERS.items():
        if names and name not in names:
            continue
        if device != peer.device:
            missing[name] = f"measured on {peer.device} only"
            continue
        try:
            found.append(peer.load())
        except ModuleNotFoundError as error:
            missing[name] = f"not installed ({error.name or error})"
        except Exception as error:  # A peer that is built for other versions may raise anything.
            missing[name] = f"cannot be imported ({type(error).__name__}: {error})"
    return found, missing
