"""Runs the suite of devices: one process for each, over NCCL on GPUs and gloo on CPUs; checks, then times in turns."""

from __future__ import annotations

import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from fusednorm.bench.devices.catalog import ALONE, CONTENDERS, EXCHANGE, GPUS_ALONE, LIMITS, DeviceJob, Prepared
from fusednorm.bench.devices.rows import DeviceRow
from fusednorm.bench.forms.measuring import FACTOR, ROUNDINGS, relative_error
from fusednorm.bench.runner import first_line, status_of
from fusednorm.distributed.collective import gather
from fusednorm.machine.description import available_cores
from fusednorm.machine.timing import in_turns, timer_for, turns_within

SAMPLE_SECONDS = 0.02
FEWEST_SAMPLES, MOST_SAMPLES = 5, 41
#: A graph holds calls of so many seconds, which the ranks' different beginnings do not count beside.
GRAPH_SECONDS, MOST_ROUNDS = 5e-3, 16
_TIMEOUT = timedelta(minutes=5)

Call = Callable[[int], Any]  # of the set of inputs


def counts_of(asked: Sequence[int], device: str) -> list[int]:
    """How many devices to run on: those asked for, or 1, 2 and 4 as far as there are so many.

    Raises ValueError for more GPUs than there are; processes may share the cores of a CPU.
    """
    there = torch.cuda.device_count() if device == "cuda" else available_cores()
    if device == "cuda" and any(count > there for count in asked):
        raise ValueError(f"--devices: {max(asked)} is more than the {there} GPUs of this machine")
    return sorted(set(asked)) or [count for count in (1, 2, 4) if count <= max(there, 1)]


def run_devices(jobs: Sequence[DeviceJob], count: int, device: str, seconds: float) -> list[DeviceRow]:
    """The rows of all jobs on so many devices.

    Raises torch.multiprocessing.ProcessRaisedException where a process fails; the others end with it.
    """
    with tempfile.TemporaryDirectory() as folder:
        arguments = (count, device, folder, tuple(jobs), seconds)
        spawn(_process, arguments, nprocs=count)
        return [DeviceRow(**row) for row in json.loads((Path(folder) / "rows.json").read_text())]


def _process(rank: int, count: int, device: str, folder: str, jobs: Sequence[DeviceJob], seconds: float) -> None:
    if device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(max(1, available_cores() // count))
    backend, meeting = "nccl" if device == "cuda" else "gloo", f"file://{folder}/meeting"
    dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=count, timeout=_TIMEOUT)
    try:
        with timer_for(device).session():  # what a graph is captured on
            rows = [row for job in jobs for row in _run(job, rank, count, device, seconds)]
        if rank == 0:
            (Path(folder) / "rows.json").write_text(json.dumps([asdict(row) for row in rows]))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _run(job: DeviceJob, rank: int, count: int, device: str, seconds: float) -> list[DeviceRow]:
    """The rows of one job, alike on every rank."""
    spread, shape = job.spread, job.spread.part(device, count)
    row = DeviceRow(
        spread.name, spread.scaling, count, "x".join(map(str, shape)), job.dtype, job.layout, job.direction, "", "ok"
    )
    rows: dict[str, DeviceRow] = {}
    calls: dict[str, Call] = {}
    sets = [_draw(job, shape, device, seed) for seed in range(_sets(job, shape, device))]
    for name, prepare in spread.contenders.items():
        rows[name] = replace(row, contender=name, **_checked(job, name, rank, count, device))
        if rows[name].status == "ok":
            calls[name] = _call(job, prepare(shape[1], device), sets)
    if count > 1:
        rows[EXCHANGE] = replace(row, contender=EXCHANGE)
        calls[EXCHANGE] = _exchange(job, shape, device)
    else:
        rows.pop(ALONE), calls.pop(ALONE, None)  # one device has no other to exchange with
    times = _timed(calls, device, seconds)
    replays = _replayed(calls, len(sets), times, seconds) if device == "cuda" else {}
    for name, ms in times.items():
        rows[name] = replace(rows[name], ms=ms, replay_ms=replays.get(name), method="calls")
    return [rows[name] for name in CONTENDERS if name in rows]


# --- what is computed ---


@dataclass(frozen=True)
class _Inputs:
    input: Tensor
    grad: Tensor


def _laid(job: DeviceJob, tensor: Tensor) -> Tensor:
    image = job.layout == "nhwc" and tensor.dim() == 4
    return tensor.contiguous(memory_format=torch.channels_last) if image else tensor


def _draw(job: DeviceJob, shape: Sequence[int], device: str, seed: int) -> _Inputs:
    generator = torch.Generator(device).manual_seed(seed)
    dtype = getattr(torch, job.dtype)
    return _Inputs(*(_laid(job, torch.randn(shape, generator=generator, device=device).to(dtype)) for _ in range(2)))


def _sets(job: DeviceJob, shape: Sequence[int], device: str) -> int:
    """How many sets of inputs a call rotates through: on a GPU so many that none is left in the L2."""
    if device != "cuda":
        return 1
    from fusednorm.machine.gpu_timing import sets_beyond

    size = math.prod(shape) * getattr(torch, job.dtype).itemsize
    return sets_beyond(torch.cuda.get_device_properties().L2_cache_size, size, most_sets=8)


def _results(job: DeviceJob, prepared: Prepared, input: Tensor, grad: Tensor) -> list[Tensor]:
    """The output, or in forward_backward the gradients of input and parameters."""
    if job.direction == "forward":
        with torch.no_grad():
            return [prepared.call(input)]
    return list(torch.autograd.grad(prepared.call(input), [input, *prepared.parameters], grad))


def _call(job: DeviceJob, prepared: Prepared, sets: Sequence[_Inputs]) -> Call:
    learns = job.direction == "forward_backward"
    inputs = [prepared.placed(one.input).detach().requires_grad_(learns) for one in sets]
    grads = [prepared.placed(one.grad) for one in sets]
    return lambda turn: _results(job, prepared, inputs[turn % len(sets)], grads[turn % len(sets)])


def _exchange(job: DeviceJob, shape: tuple[int, ...], device: str) -> Call:
    forward, backward = job.spread.exchanged(shape)
    sizes = (forward,) if job.direction == "forward" else (forward, backward)
    sent = [torch.zeros(size, dtype=torch.float64, device=device) for size in sizes]
    return lambda turn: [gather(EXCHANGE, values, dist.group.WORLD) for values in sent]


# --- what it has to be ---


def _checked(job: DeviceJob, name: str, rank: int, count: int, device: str) -> dict[str, Any]:
    """The worst error of a contender on any rank, at a small shape; or why it is not timed.

    Each rank has another mean and scale, which a norm of its part alone would not show.
    """
    if name in LIMITS:
        return {}
    if device == "cpu" and name in GPUS_ALONE:
        return {"status": "skipped", "note": "it runs on GPUs alone"}
    found = _check(job, name, rank, count, device)
    every: list[dict[str, Any]] = [{} for _ in range(count)]
    dist.all_gather_object(every, found)
    failed = [each for each in every if each.get("status", "ok") != "ok"]
    return failed[0] if failed else max(every, key=lambda each: each["error"])


def _check(job: DeviceJob, name: str, rank: int, count: int, device: str) -> dict[str, Any]:
    spread = job.spread
    parts = [_draw(job, spread.small, device, seed=place) for place in range(count)]
    inputs = [_laid(job, (1 + place) * one.input + 2 * place) for place, one in enumerate(parts)]
    try:
        prepared = spread.contenders[name](spread.small[1], device)
        own, grad = (prepared.placed(each) for each in (inputs[rank], parts[rank].grad))
        results = _results(job, prepared, own.detach().requires_grad_(), grad)[:1]
        got = [prepared.part(each) for each in results]
    except ModuleNotFoundError as missing:
        return {"status": "skipped", "note": first_line(missing)}
    except Exception as failure:  # a result of the bench, not the end of it
        return {"status": status_of(failure), "note": first_line(failure)}
    exact, rough = (
        _whole(job, inputs, [one.grad for one in parts], rank, dtype)
        for dtype in (torch.float64, getattr(torch, job.dtype))
    )
    error, eps = relative_error(got, [exact]), torch.finfo(getattr(torch, job.dtype)).eps
    allowed = FACTOR * relative_error([rough], [exact]) + ROUNDINGS * eps
    if error <= allowed:
        return {"error": error, "allowed": allowed}
    return {
        "status": "wrong", "error": error, "allowed": allowed, "note": f"error {error:.2e} exceeds {allowed:.2e}",
    }  # fmt: skip


def _whole(job: DeviceJob, inputs: list[Tensor], grads: list[Tensor], rank: int, dtype: torch.dtype) -> Tensor:
    """This rank's part of the output, or of the gradient of the input, from the whole in one process."""
    spread = job.spread
    leaves = [each.to(dtype).requires_grad_() for each in inputs]
    x = torch.cat(leaves, spread.axis)
    weight, bias = (fill(x.shape[1], dtype=dtype, device=x.device) for fill in (torch.ones, torch.zeros))
    y = spread.reference(x, weight, bias)
    if job.direction == "forward":
        return y.detach().split(inputs[0].shape[spread.axis], spread.axis)[rank]
    return torch.autograd.grad(y, leaves[rank], torch.cat(grads, spread.axis).to(dtype))[0]


# --- how long it takes ---


def _timed(calls: dict[str, Call], device: str, seconds: float) -> dict[str, float]:
    """Milliseconds per call: the median of samples in turns, each that of the slowest rank.

    Every rank makes the same calls in the same order, so what the ranks measured decides for all of them.
    """
    for call in calls.values():
        for turn in range(3):
            call(turn)
    first = _slowest([_sample(call, 3, device) for call in calls.values()], device)
    each = dict(zip(calls, first, strict=True))
    repeats = {name: max(1, math.ceil(SAMPLE_SECONDS / max(one, 1e-9))) for name, one in each.items()}
    turns = {
        name: turns_within(seconds, repeats[name] * one, FEWEST_SAMPLES, MOST_SAMPLES) for name, one in each.items()
    }
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for name in in_turns(turns):
        samples[name].append(_sample(calls[name], repeats[name], device))
    return {name: statistics.median(_slowest(taken, device)) * 1e3 for name, taken in samples.items()}


def _replayed(calls: dict[str, Call], sets: int, times: dict[str, float], seconds: float) -> dict[str, float]:
    """Milliseconds per call in a replayed graph, as :func:`_timed`, of what every rank could capture."""
    from fusednorm.machine.gpu_timing import Run, captured

    runs: dict[str, Run | None] = {}
    for name, call in calls.items():
        rounds = min(MOST_ROUNDS, math.ceil(GRAPH_SECONDS / (sets * times[name] * 1e-3)))
        dist.barrier()
        try:
            runs[name] = captured([partial(call, turn) for turn in range(sets)], rounds)
        except RuntimeError:
            runs[name] = None
        if _slowest([float(runs[name] is None)], "cuda")[0]:
            del runs[name]
    samples: dict[str, list[float]] = {name: [] for name in runs}
    each = {name: times[name] * 1e-3 * run.calls for name, run in runs.items() if run is not None}
    turns = {name: 1 + turns_within(seconds, one, FEWEST_SAMPLES, MOST_SAMPLES) for name, one in each.items()}
    for name in in_turns(turns):
        run = runs[name]
        assert run is not None
        dist.barrier()
        samples[name].append(run.sample())
    # The first replay uploads the graph.
    return {name: statistics.median(_slowest(taken[1:], "cuda")) * 1e3 for name, taken in samples.items()}


def _slowest(values: list[float], device: str) -> list[float]:
    """Each value's largest on any rank."""
    if not values:
        return values
    shared = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(shared, dist.ReduceOp.MAX)
    return shared.tolist()


def _sample(call: Call, repeats: int, device: str) -> float:
    """Seconds per call of calls one after the other, which all ranks begin together."""
    dist.barrier()
    if device == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for turn in range(repeats):
            call(turn)
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3 / repeats
    begun = time.perf_counter()
    for turn in range(repeats):
        call(turn)
    return (time.perf_counter() - begun) / repeats
