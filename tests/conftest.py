"""What every test runs under: poisoned memory, repeatable property tests, and a word where a GPU is missing."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator

# cuBLAS is deterministic only with a fixed workspace, and reads this when CUDA starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# Several workers share the cores, and OpenMP reads this when torch starts: a thread without work leaves its core to
# others instead of spinning, which is a fifth of the time of large tensors.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Inductor compiles in the process itself: each of the pool that it starts otherwise imports torch. So does the process
# that it starts to see whether the vector instructions that the processor reports can be used.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

import pytest
import torch
from hypothesis import settings

# A first example may compile a kernel, so no deadline. The same examples are drawn each time, so that a change fails
# for what it did. ``--hypothesis-profile=new`` draws new ones, of which a few exceed a tolerance by little: it stands
# on the error of the plain result, which among a few small values may be small by chance.
settings.register_profile("same", deadline=None, max_examples=30, print_blob=True, derandomize=True, database=None)
settings.register_profile("new", deadline=None, max_examples=30, print_blob=True)
settings.load_profile("same")


#: Files that come first, in this order: long ones, with which a worker that gets them last would end alone. One worker
#: of two compiles most kernels of the CPU in the first file while the other has files that need none of them.
LONG = ("graph_nodes", "triton_compile", "triton_interpreter", "plan_contract", "cpu_edges")
#: Files that come last: their processes, in step, would each compile the kernels that other files leave in the cache.
LATE = ("dtensor", "spread", "distributed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(LONG, -len(LONG))} | dict.fromkeys(LATE, 1)
    items.sort(key=lambda item: places.get(item.path.stem.removeprefix("test_"), 0))
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a GPU: torch.cuda.is_available() is False")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    """What lives until the end, the items and all modules, is nothing for the garbage collector to look through.

    It looks 140 times as rarely for cycles as by default: compilers make objects by the million, few of them in cycles.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


@pytest.fixture(autouse=True)
def poisoned_empty(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Memory from torch.empty and its kin holds NaN (the largest value for integers), so an unwritten element shows.

    Tests that measure time run without: filling the memory would be part of what they measure.
    """
    if request.node.get_closest_marker("timing"):
        yield
        return
    if request.node.get_closest_marker("gpu") and torch.cuda.is_available():
        poison_plans(monkeypatch)
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
    torch.utils.deterministic.fill_uninitialized_memory = filled


@pytest.fixture(autouse=True)
def first_compilation() -> None:
    """No test compiles code that Dynamo has given up, for an error that an earlier test raised in it."""
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()


@pytest.fixture(autouse=True)
def first_calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test takes a call for one that an earlier test made, with plans that it has replaced since."""
    from fusednorm import repeats
    from fusednorm.backends.cpu.plans import base
    from fusednorm.private import torch_names

    monkeypatch.setattr(repeats, "_calls", {})
    if not request.node.get_closest_marker("timing"):
        monkeypatch.setattr(base, "empty_strided_cpu", torch_names._empty_strided)  # the short way fills nothing


def poison_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's plans allocate by torch.empty_strided: the short way that they take otherwise fills nothing."""
    from fusednorm import dispatch
    from fusednorm.backends.triton.plans import base

    def allocator(device: str) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]:
        return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device)

    monkeypatch.setattr(base, "allocator", allocator)
    monkeypatch.setattr(dispatch, "_plans", {})


@pytest.fixture
def seeded_reference() -> Iterator[None]:
    """The reference runs, which compiles nothing, from the same random numbers: what kernels compute is tested
    elsewhere."""
    import fusednorm

    torch.manual_seed(0)
    with fusednorm.use_instance("reference"):
        yield
