"""Runs a job with both contenders: checks each against a wider dtype, then measures those that are right side by side.

Weights are in the job's dtype throughout (no autocast). Both contenders have the same weights, inputs and optimizer.
Where the time to compile is measured, nothing is taken from a cache on disk; what fusednorm's own kernels took to
compile in an earlier job of the process, where a compiled model calls them as they are, is not paid again. Where it is
not measured, other processes may have compiled the job before (:func:`compile_step`).
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusednorm.bench.memory import is_out_of_memory
from fusednorm.bench.models.catalog import Job
from fusednorm.bench.models.norms import OURS as OUR_NORMS
from fusednorm.bench.models.norms import TORCH as TORCH_NORMS
from fusednorm.bench.models.norms import Norms
from fusednorm.bench.models.rows import ModelRow, model_row
from fusednorm.bench.models.step import Mode, Step
from fusednorm.bench.precompile import precompile
from fusednorm.bench.runner import Progress, first_line, silent, status_of
from fusednorm.inductor import prepare
from fusednorm.machine.timing import in_turns, turns_within
from fusednorm.private.torch_names import fresh_compiler_cache

TORCH, OURS = "torch", "fusednorm"
CONTENDERS: dict[str, Norms] = {TORCH: TORCH_NORMS, OURS: OUR_NORMS}
# An error may be this many times torch's in the same mode, and some roundings of float32 sums.
FACTOR, ROUNDINGS = 2.0, 16.0
SAMPLE_SECONDS = 0.05
LEAST_SAMPLES, MOST_SAMPLES = 5, 25
SEED = 0


def run_job(
    job: Job,
    mode: Mode,
    *,
    device: str,
    seconds: float = 1.0,
    ours_first: bool = False,
    cold: bool = True,
    progress: Progress = silent,
) -> list[ModelRow]:
    """The rows of torch and of fusednorm; ``ours_first`` says who compiles first, which is the slower place.

    ``cold`` measures how long that takes; else code is taken from where an earlier compilation has kept it.
    """
    release(device)
    try:
        progress(f"{job.key} {mode}: reference")
        state, inputs, target = _problem(job, device)
        expected = _expected(job, state, inputs, target, device)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return [model_row(job, mode, name, "skipped", first_line(error)) for name in CONTENDERS]
    rows: dict[str, ModelRow] = {}
    steps: dict[str, Step] = {}
    for name in (OURS, TORCH) if ours_first else (TORCH, OURS):
        progress(f"{job.key} {mode}: first step of {name}")
        row = model_row(job, mode, name, "ok")
        try:
            _make_workspaces(job, state, inputs, target, device)
            network = _network(job, CONTENDERS[name], state, job.dtype, device)
            step = Step(network, inputs, target, job.model.classes, mode)
            rows[name] = replace(row, **_first_runs(step, expected, device, cold))
            steps[name] = step
        except Exception as error:  # What cannot be compiled is a result of the bench, not the end of it.
            rows[name] = replace(row, status=status_of(error), note=first_line(error))
    del expected
    rows = _judged(rows)
    progress(f"{job.key} {mode}: timing")
    right = {name: steps[name] for name in CONTENDERS if rows[name].status == "ok"}
    for name, measured in step_times(right, seconds, device).items():
        rows[name] = replace(rows[name], **measured)
    return [rows[name] for name in CONTENDERS]


def compile_step(task: tuple[Job, Mode, str], device: str, threads: int) -> None:
    """Runs a contender on a job once, so that its code is kept on disk, for processes with so many threads."""
    job, mode, name = task
    torch.set_num_threads(threads)  # the code for a CPU is for a number of them
    release(device)
    state, inputs, target = _problem(job, device)
    network = _network(job, CONTENDERS[name], state, job.dtype, device)
    step = Step(network, inputs, target, job.model.classes, mode)
    prepare()  # the keys of kept code hold fusednorm's pass, those of torch's contender too
    step.results()


def compile_ahead(
    jobs: Sequence[Job],
    modes: Sequence[Mode],
    processes: int,
    device: str,
    progress: Progress,
    seconds: float | None = None,
) -> None:
    """Compiles every job in every mode, in so many processes at once, or those begun within so many seconds."""
    steps = [(job, mode, name) for job in jobs for mode in modes for name in CONTENDERS]
    tasks = [step for step in steps if step[1:] != ("eager", TORCH)]
    run = partial(compile_step, device=device, threads=torch.get_num_threads())
    precompile(run, tasks, progress, processes, seconds)


def release(device: str) -> None:
    """Forgets what was compiled before, and gives its memory back."""
    torch.compiler.reset()
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()


def warm_compiler(device: str, dtype: str) -> None:
    """Compiles one small network, so that no contender waits for the imports and processes of the first compilation."""
    for norms in CONTENDERS.values():
        network = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), norms.group_norm(4, 8, activation="silu"))
        network.to(device, getattr(torch, dtype))
        images = torch.ones(2, 3, 16, 16, dtype=getattr(torch, dtype), device=device)
        Step(network, (images,), torch.zeros(2, 8, 14, 14, device=device), 0, "default")()


Problem = tuple[dict[str, Any], tuple[Tensor, ...], Tensor | None]


def _problem(job: Job, device: str) -> Problem:
    """The weights, inputs and target of a job, the same each time on the same kind of device."""
    generator = torch.Generator(device).manual_seed(SEED)
    with torch.random.fork_rng([] if device == "cpu" else [torch.cuda.current_device()]):
        torch.manual_seed(SEED)
        with torch.device(device):
            network = job.model.network(TORCH_NORMS).to(getattr(torch, job.dtype))
    drawn = (one.draw(generator) for one in job.model.inputs)
    inputs = tuple(_in_format(job, _in_dtype(one, job.dtype)) for one in drawn)
    if job.direction == "inference":
        return network.state_dict(), inputs, None
    with torch.no_grad():
        shape = network.eval()(*inputs).shape
    if job.model.classes:
        labels = (shape[0], *shape[2:])
        target = torch.randint(job.model.classes, labels, generator=generator, device=device)
    else:
        target = torch.randn(shape, generator=generator, device=device)
    return network.state_dict(), inputs, target


def _in_dtype(tensor: Tensor, dtype: str) -> Tensor:
    """The tensor in another dtype, unless it holds whole numbers."""
    return tensor.to(getattr(torch, dtype)) if tensor.is_floating_point() else tensor


def _in_format(job: Job, tensor: Tensor) -> Tensor:
    """The tensor in the layout of the job if it is an image."""
    image = job.model.images and tensor.dim() == len(job.model.inputs[0].shape)
    return tensor.contiguous(memory_format=job.model.memory_format(job.layout)) if image else tensor


def _network(job: Job, norms: Norms, state: Mapping[str, Any], dtype: str, device: str) -> torch.nn.Module:
    """The model with these norms and a copy of the weights, in the layout of the job."""
    with torch.device("meta"):
        network = job.model.network(norms)
    network = network.to(getattr(torch, dtype)).to_empty(device=device)
    network.load_state_dict(state)
    if job.layout == "nhwc":
        network.to(memory_format=job.model.memory_format(job.layout))  # type: ignore[call-overload]
    return network


def _expected(
    job: Job, state: Mapping[str, Any], inputs: Sequence[Tensor], target: Tensor | None, device: str
) -> list[Tensor]:
    """The results in a wider dtype: float64, and float32 for 16-bit jobs, whose errors are ten thousand times its own.

    In float64 the attention of the largest models takes a GPU's whole memory, and a convolution minutes.
    """
    wide = "float64" if job.dtype in ("float32", "float64") else "float32"
    network = _network(job, TORCH_NORMS, state, wide, device)
    widened = tuple(_in_dtype(one, wide) for one in inputs)
    with _exact_convolutions():
        return Step(network, widened, target, job.model.classes, "eager").results()


def _make_workspaces(
    job: Job, state: Mapping[str, Any], inputs: tuple[Tensor, ...], target: Tensor | None, device: str
) -> None:
    """Let cuDNN and cuBLAS make the workspaces of their first calls, with which no contender is to be charged.

    Before each contender: one that records CUDA graphs gives cuBLAS's workspaces back.
    """
    network = _network(job, TORCH_NORMS, state, job.dtype, device)
    Step(network, inputs, target, job.model.classes, "eager").results()


@contextmanager
def _exact_convolutions() -> Iterator[None]:
    """cuDNN's float32 without TF32, which has the mantissa of float16."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def _first_runs(step: Step, expected: Sequence[Tensor], device: str, cold: bool) -> dict[str, Any]:
    """The error, the seconds of the first run of a compiled network where it is ``cold``, and the peak memory of the
    runs after it."""
    found: dict[str, Any] = {}
    held = 0 if device == "cpu" else torch.cuda.memory_allocated()
    _synchronize(device)
    start = time.perf_counter()
    compiles = cold and step.mode != "eager"
    with fresh_compiler_cache() if compiles else nullcontext():
        results = step.results()
        _synchronize(device)
    if compiles:
        found["compile_s"] = time.perf_counter() - start
    found["error"] = relative_error(results, expected)
    del results
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(3):  # CUDA graphs are recorded in the second run of all, and allocate nothing later
        step()
    _synchronize(device)
    if device != "cpu":
        found["peak_bytes"] = torch.cuda.max_memory_allocated() - held
    return found


def relative_error(got: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The length of the difference as a part of the length of what is expected, over all tensors together.

    Not of each by itself: the gradient of a bias before InstanceNorm is nothing but rounding.
    """
    if [one.shape for one in got] != [one.shape for one in expected]:
        return math.inf
    wrong = math.fsum(float((one - other).square().sum()) for one, other in zip(got, expected, strict=True))
    return math.sqrt(wrong / math.fsum(float(one.square().sum()) for one in expected))


def _judged(rows: Mapping[str, ModelRow]) -> dict[str, ModelRow]:
    """The rows with fusednorm's error held against torch's; torch's has to be finite."""
    found = dict(rows)
    for name, row in rows.items():
        if row.error is None:
            continue
        allowed = math.inf
        theirs = rows[TORCH].error
        if name == OURS and theirs is not None and math.isfinite(theirs):
            allowed = FACTOR * theirs + ROUNDINGS * torch.finfo(torch.float32).eps
            found[name] = replace(row, allowed=allowed)
        if not (row.error <= allowed and math.isfinite(row.error)):
            note = f"error {row.error:.2e}" + (f" exceeds {allowed:.2e}" if math.isfinite(allowed) else "")
            found[name] = replace(found[name], status="wrong", note=note)
    return found


def step_times(steps: Mapping[str, Step], seconds: float, device: str) -> dict[str, dict[str, Any]]:
    """The median times of steps that take turns, as fields of their rows.

    A sample is as many steps as make it long against the clock, after one that is not timed: another contender ran
    before. The host's time is of one more step, on a device that has nothing to do.
    """
    lengths = {name: _seconds(step, 2, device) / 2 for name, step in steps.items()}
    counts = {name: max(1, math.ceil(SAMPLE_SECONDS / length)) for name, length in lengths.items()}
    turns = {
        name: turns_within(seconds, (counts[name] + 2) * length, LEAST_SAMPLES, MOST_SAMPLES)
        for name, length in lengths.items()
    }
    times: dict[str, list[float]] = {name: [] for name in steps}
    host: dict[str, list[float]] = {name: [] for name in steps}
    for name in in_turns(turns):
        step = steps[name]
        step()
        times[name].append(_seconds(step, counts[name], device) / counts[name])
        if device != "cpu":
            start = time.perf_counter()
            step()
            host[name].append(time.perf_counter() - start)
    found: dict[str, dict[str, Any]] = {name: {"ms": statistics.median(values) * 1e3} for name, values in times.items()}
    for name, values in host.items():
        if values:
            found[name]["host_ms"] = statistics.median(values) * 1e3
    return found


def _seconds(step: Step, count: int, device: str) -> float:
    """The seconds of so many steps, from an idle device to an idle device."""
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(count):
        step()
    _synchronize(device)
    return time.perf_counter() - start


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()
