"""A hundred thousand launches of each kernel whose blocks wait for one another, as graphs that are replayed while a
second process keeps the GPU busy: none hangs, and none makes another bit. It takes some minutes:
``pytest -m 'gpu and exhaustive' tests/test_hopper_launches_gpu.py``."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cpu_support import EVERYTHING
from torch import Tensor

from fusednorm.backends.hopper.instances import RESIDENT, ROW_PARTS, SLABS, unavailable
from fusednorm.bench.operations import problem_of_workload
from fusednorm.bench.workloads import Workload, draw
from fusednorm.choice import named
from fusednorm.operands import BackwardOperands, Operands
from fusednorm.problem import Direction

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.exhaustive,
    pytest.mark.skipif(unavailable() is not None, reason=f"no Hopper GPU: {unavailable()}"),
]
#: Launches of a kernel, of a graph, and which of a graph's results are compared: each one in so many.
LAUNCHES, IN_A_GRAPH, COMPARED = 100_000, 100, 10
BUSY = """
import torch
x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
print("busy", flush=True)
while True:
    for _ in range(20):
        x = torch.tanh(x @ x)
    torch.cuda.synchronize()
"""
IMAGES = Workload("group_norm", (12, 256, 64, 64), 32, "bfloat16", activation="silu")
LAST = Workload("group_norm", (12, 256, 64, 64), 32, "bfloat16", "nhwc", "silu")
#: Units of one chunk and many, which leaders merge and which every block does, groups, channels and rows.
CASES: tuple[tuple[str, Direction, Workload], ...] = (
    (RESIDENT.name, "forward", IMAGES),
    (RESIDENT.name, "backward", IMAGES),
    (RESIDENT.name, "backward", Workload("batch_norm", (24, 128, 64, 65), 0, "bfloat16", activation="relu")),
    (SLABS.name, "forward", LAST),
    (SLABS.name, "backward", LAST),
    (SLABS.name, "backward", Workload("group_norm", (1, 512, 128, 128), 32, "bfloat16", "nhwc")),
    (ROW_PARTS.name, "backward", Workload("rms_norm", (300, 16387), 1, "bfloat16")),
)


@pytest.fixture(scope="module")
def busy() -> Iterator[subprocess.Popen[str]]:
    """A process that multiplies matrices on the GPU all the time."""
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "busy\n"
            yield process
        finally:
            process.kill()


def call_of(name: str, direction: Direction, workload: Workload) -> Callable[[], list[Tensor]]:
    """What runs an instance once, for all results that there are."""
    inputs = draw(workload, device="cuda")
    operands = Operands(inputs.input, inputs.weight, inputs.bias)
    problem = problem_of_workload("forward", workload, inputs)
    made = named(problem, name if direction == "forward" else "reference").plan(problem)
    if direction == "forward":
        return lambda: there(made(operands), "output", "mean", "rstd")
    saved = made(operands)
    given = BackwardOperands(inputs.grad_output, inputs.input, saved.mean, saved.rstd, inputs.weight, inputs.bias)
    problem = problem_of_workload("backward", workload, inputs)
    plan = named(problem, name).plan(problem)
    return lambda: there(plan(given, EVERYTHING), "input", "weight", "bias")


def there(results: Any, *names: str) -> list[Tensor]:
    return [tensor for name in names if (tensor := getattr(results, name)) is not None]


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


@pytest.mark.parametrize(("name", "direction", "workload"), CASES, ids=lambda value: getattr(value, "key", value))
def test_launches_beside_a_busy_process_end_with_the_same_bits(
    name: str, direction: Direction, workload: Workload, busy: subprocess.Popen[str]
) -> None:
    call = call_of(name, direction, workload)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        expected = [bits(tensor).clone() for tensor in call()]
    torch.cuda.synchronize()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for turn in range(IN_A_GRAPH):
            found = call()
            if turn % COMPARED == 0:
                for one, other in zip(found, expected, strict=True):
                    wrong += (bits(one) != other).any()
    for _ in range(LAUNCHES // IN_A_GRAPH):
        graph.replay()
    torch.cuda.synchronize()
    assert wrong.item() == 0
    assert busy.poll() is None  # it was busy to the end
