"""What the tests of the CPU backend share: runs by instance, memory of any order, and which kernels may be compiled.

A kernel takes 0.3 to 1.4 s to compile, and one exists for each (function, dtype, activation): 11 functions that an
activation enters, 4 dtypes and 9 activations would be 400 kernels. So each dtype meets each activation once, on one
of the instances, and each instance meets every dtype and every activation (:func:`activations_for`). What is tested
beyond that keeps to these cells.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fusednorm
from fusednorm import ops
from fusednorm.activations import Activation
from fusednorm.backends.cpu.instances import INSTANCES as CPU_INSTANCES
from fusednorm.bench.judging import Asked, Judge, Results
from fusednorm.bench.workloads import EPS, Inputs, LayoutName, Workload
from fusednorm.choice import use_instance
from fusednorm.problem import DTYPE_BYTES

#: But that of norms with statistics for each position, whose tests are in test_channel_norms.py.
INSTANCES = tuple(instance.name for instance in CPU_INSTANCES if instance.name != "cpu.columns")
CHANNELS_FIRST = ("cpu.planes", "cpu.planes_split")
CHANNELS_LAST = ("cpu.slabs", "cpu.slabs_split")
DTYPES = tuple(DTYPE_BYTES)
#: The smooth ones first: those are what most tests run, since a kink turns a rounding of z into a jump of a gradient.
ACTIVATIONS = (None, "silu", "gelu", "gelu_tanh", "relu", "sigmoid", "tanh", "leaky_relu", "hardswish")
#: Instances of one column share the kernels that an activation enters.
_COLUMN = {
    "cpu.planes": 0, "cpu.planes_split": 1, "cpu.slabs": 2, "cpu.slabs_split": 2, "cpu.rows": 3, "cpu.columns": 3,
}  # fmt: skip
_ROW = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 3}

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
EVERYTHING = (True, True, True, True, True)
GRADIENTS = ("grad_input", "grad_weight", "grad_bias", "grad_scale", "grad_shift")


def activations_for(instance: str, dtype: str) -> list[str | None]:
    """The activations that tests run on an instance in a dtype; the first is smooth."""
    return [
        name for place, name in enumerate(ACTIVATIONS) if (place - _COLUMN[instance] + _ROW[dtype]) % len(_ROW) == 0
    ]


def activation_for(instance: str, dtype: str = "float32") -> str | None:
    return activations_for(instance, dtype)[0]


def layout_for(instance: str) -> LayoutName:
    return "nhwc" if instance in CHANNELS_LAST else "nchw"


def forward(workload: Workload, inputs: Inputs, instance: str | None = None) -> Results:
    """The output and the statistics, on the instance of a name or on the default one."""
    name, parameter = _activation(workload)
    with nullcontext() if instance is None else use_instance(instance):
        output, mean, rstd, _ = ops.norm_forward(
            inputs.input, inputs.weight, inputs.bias, inputs.scale, inputs.shift, inputs.mean, inputs.var,
            workload.family, workload.groups, workload.channel_dim, EPS, name, parameter,
        )  # fmt: skip
    return {"output": output, "mean": rstd.new_empty(0) if mean is None else mean, "rstd": rstd}


def backward(
    workload: Workload,
    inputs: Inputs,
    mean: Tensor,
    rstd: Tensor,
    instance: str | None = None,
    mask: Sequence[bool] = EVERYTHING,
) -> Results:
    """The gradients by name; one that is not wanted, or whose parameter is absent, is empty."""
    name, parameter = _activation(workload)
    with nullcontext() if instance is None else use_instance(instance):
        gradients = ops.norm_backward(
            inputs.grad_output, inputs.input, mean, rstd, inputs.weight, inputs.bias, inputs.scale, inputs.shift,
            workload.family, workload.groups, workload.channel_dim, name, parameter, workload.training, mask,
        )  # fmt: skip
    return dict(zip(GRADIENTS, gradients, strict=True))


def run(workload: Workload, inputs: Inputs, instance: str | None = None) -> Results:
    """Forward and backward, both on the instance."""
    results = forward(workload, inputs, instance)
    return results | backward(workload, inputs, results["mean"], results["rstd"], instance)


def _activation(workload: Workload) -> tuple[str, float]:
    return workload.norm.op_arguments[-2:]


def faults(workload: Workload, inputs: Inputs, results: Results, asked: Asked = "forward_backward") -> list[str]:
    """What the project's rule finds wrong in results."""
    mean, rstd = (results["mean"], results["rstd"]) if asked.startswith("backward") else (None, None)
    judge = Judge(workload, inputs, asked, mean, rstd, wants_statistics=True)
    return [verdict.fault for verdict in judge.verdicts(results).values() if verdict.fault]


def with_activation(workload: Workload, activation: str | Activation | None) -> Workload:
    return replace(workload, activation=activation)


def in_memory(
    values: Tensor, order: Sequence[int] | None = None, steps: Sequence[int] | None = None, offset: int = 0
) -> Tensor:
    """The same values elsewhere: ``order`` from the slowest dimension to the fastest, every ``steps``-th element.

    A step of 0 expands: the values are those of index 0. What lies between the elements is NaN.
    """
    rank = values.dim()
    order = range(rank) if order is None else order
    steps = [1] * rank if steps is None else steps
    sizes = [max(1, values.shape[axis] * steps[axis]) for axis in order]
    block = torch.full((offset + prod(sizes),), torch.nan, dtype=values.dtype)
    strides = [0] * rank
    stride = 1
    for axis, size in zip(reversed(order), reversed(sizes), strict=True):
        strides[axis] = stride * steps[axis]
        stride *= size
    placed = block.as_strided(values.shape, strides, offset)
    for axis, step in enumerate(steps):
        if step == 0:
            values = values.narrow(axis, 0, min(1, values.shape[axis]))
    block.as_strided(values.shape, strides, offset).copy_(values)
    return placed


_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Equal as bits, a NaN equal to itself; by numpy, because torch's own threads hang in a forked child."""
    return first.shape == second.shape and _bytes(first) == _bytes(second)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().view(_INTEGERS[tensor.element_size()]).numpy().tobytes()


def in_child(work: Callable[[], bool], seconds: int = 60) -> bool:
    """What work returns in a forked child; False where it raises, and where it hangs the alarm ends it."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(seconds)
            # Torch's own operators use OpenMP for large tensors, and hang in a forked child.
            torch.utils.deterministic.fill_uninitialized_memory = False
            code = 0 if work() else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def process_environment(**changes: str | Path) -> dict[str, str]:
    """The environment of a process that imports this fusednorm."""
    changes = {"PYTHONPATH": Path(fusednorm.__file__).parents[1], **changes}
    return {**os.environ, **{name: str(value) for name, value in changes.items()}}


def fresh_process(code: str, **changes: str | Path) -> Any:
    """Run code in a new process, with changes to its environment, and read the JSON that it prints last."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=process_environment(**changes),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
