"""Every instance of one operation: checked against fp64, timed beside the plain copy.

A forward writes into an output that is kept, as the copy does; a backward allocates its gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusednorm import choice
from fusednorm.bench.judging import Judge, Results, compute_saved_statistics, gradients_by_name
from fusednorm.bench.memory import require
from fusednorm.bench.operations import Operation, problem_of_workload
from fusednorm.bench.results import Status
from fusednorm.bench.runner import COPY, Progress, first_line, measure_those_that_run, silent, status_of, workload_needs
from fusednorm.bench.workloads import Init, Inputs, Workload, draw
from fusednorm.instance import Candidate
from fusednorm.machine.description import name_of
from fusednorm.machine.limits import TRANSFERS, limit_calls
from fusednorm.machine.timing import Calls, Timer, timer_for
from fusednorm.operands import Gradients
from fusednorm.problem import Problem

GRADIENTS = ("grad_input", "grad_weight", "grad_bias", "grad_scale", "grad_shift")


@dataclass(frozen=True)
class InstanceResult:
    """One instance: "ok", "wrong" (beyond the tolerance), "failed" (it raised) or "skipped" (it cannot run this).

    ``ms`` is the median time of a call, on a GPU the device's; ``host_ms`` is the host's beside it. ``method`` says how
    ``ms`` was taken, see :class:`~fusednorm.machine.timing.Timing`.
    """

    instance: str
    config: dict[str, Any]
    status: Status
    note: str = ""
    error: float | None = None
    allowed: float | None = None
    ms: float | None = None
    gigabytes_per_second: float | None = None
    copy_fraction: float | None = None
    host_ms: float | None = None
    method: str = ""


@dataclass(frozen=True)
class Profile:
    """The instances of one operation on one problem; ``best`` is the fastest that is right."""

    operation: str
    workload: str
    device: str
    bytes: int
    flops: int
    copy_ms: float | None
    results: tuple[InstanceResult, ...]

    @property
    def best(self) -> InstanceResult | None:
        timed = [result for result in self.results if result.status == "ok" and result.ms is not None]
        return min(timed, key=lambda result: result.ms or 0.0, default=None)

    @property
    def ok(self) -> bool:
        return not any(result.status in ("wrong", "failed") for result in self.results)


@dataclass(frozen=True)
class _Run:
    """One plan on one set of inputs."""

    call: Callable[[], Any]

    def results(self) -> Results:
        found = self.call()
        if isinstance(found, Gradients):
            named = gradients_by_name(found)
        else:
            named = {"output": found.output, "mean": found.mean, "rstd": found.rstd}
        return {name: tensor for name, tensor in named.items() if tensor is not None}


def _wanted(operation: Operation, inputs: Inputs) -> list[bool]:
    present = inputs.named_leaves()
    wanted = {"backward_data": GRADIENTS[:1], "backward_gamma_beta": GRADIENTS[1:]}.get(operation.direction, GRADIENTS)
    return [name in present and name in wanted for name in GRADIENTS]


def _run(plan: Any, operation: Operation, inputs: Inputs, mean: Tensor | None, rstd: Tensor | None) -> _Run:
    if operation.direction in ("forward", "inference"):
        return _Run(partial(plan, inputs.operands, True, torch.empty_like(inputs.input)))
    assert rstd is not None
    return _Run(partial(plan, inputs.backward_operands(mean, rstd), _wanted(operation, inputs)))


@dataclass(frozen=True)
class _Setting:
    """What all instances share: operation, problem, sets of inputs with a mean and rstd saved for each, and judge."""

    operation: Operation
    problem: Problem
    sets: Sequence[Inputs]
    saved: Sequence[tuple[Tensor | None, Tensor | None]]
    judge: Judge | None

    def attempt(self, candidate: Candidate) -> tuple[InstanceResult, Calls]:
        """The result of one instance before it is timed, and its calls where it may be."""
        describe = partial(InstanceResult, candidate.instance.name, config_of(candidate.instance))
        if candidate.reason is not None:
            return describe("skipped", candidate.reason), ()
        try:
            plan = candidate.instance.plan(self.problem)
            runs = [
                _run(plan, self.operation, inputs, *given) for inputs, given in zip(self.sets, self.saved, strict=True)
            ]
            got = runs[0].results()
            verdict = None if self.judge is None else self.judge.check(got)
        except Exception as error:  # One broken instance must not hide the others.
            return describe(status_of(error), first_line(error)), ()
        calls = [run.call for run in runs]
        if verdict is None:
            return describe("ok"), calls
        if verdict.fault is not None:
            return describe("wrong", verdict.fault, verdict.error, verdict.allowed), ()
        return describe("ok", "", verdict.error, verdict.allowed), calls


def _prepare(
    operation: Operation, workload: Workload, init: Init, verify: bool, device: str, timer: Timer, progress: Progress
) -> _Setting:
    progress("drawing inputs")
    count = timer.input_sets(TRANSFERS[operation.direction] * workload.bytes_per_transfer)
    needed = workload_needs(workload, operation.direction, 1, count, verify)
    remedy = "give a smaller shape" + (", or --no-verify" if verify else "")
    require(needed, device, f"{operation.name} of {workload.key}", remedy)
    sets = [draw(workload, init, seed, device) for seed in range(count)]
    problem = problem_of_workload(operation.direction, workload, sets[0])
    saved: list[tuple[Tensor | None, Tensor | None]] = [(None, None)] * len(sets)
    if problem.backward:
        saved = [compute_saved_statistics(workload, inputs) for inputs in sets]
    judge = None
    if verify:
        progress("computing the fp64 result")
        judge = Judge(workload, sets[0], operation.direction, *saved[0], wants_statistics=True)
    return _Setting(operation, problem, sets, saved, judge)


def profile(
    operation: Operation,
    workload: Workload,
    *,
    init: Init = "normal",
    verify: bool = True,
    time: bool = True,
    device: str = "cpu",
    timer: Timer | None = None,
    progress: Progress = silent,
) -> Profile:
    """Tries every instance of the operation; an instance that fails its check is not timed."""
    timer = timer or timer_for(device)
    with timer.session():
        setting = _prepare(operation, workload, init, verify, device, timer, progress)
        results: dict[str, InstanceResult] = {}
        admitted: dict[str, Calls] = {}
        for candidate in choice.instances(setting.problem):
            name = candidate.instance.name
            progress(f"checking {name}")
            results[name], calls = setting.attempt(candidate)
            if calls:
                admitted[name] = calls
        copy_ms = None
        if time:
            progress("timing")
            copy_ms = _time(setting, timer, admitted, results)
    problem = setting.problem
    name = name_of(device)
    return Profile(operation.name, workload.key, name, problem.bytes, problem.flops, copy_ms, tuple(results.values()))


def _time(setting: _Setting, timer: Timer, admitted: dict[str, Calls], results: dict[str, InstanceResult]) -> float:
    """Writes the times of the admitted instances into their results; returns the copy's time in ms."""
    transferred = [inputs.transferred for inputs in setting.sets]
    calls = {**admitted, COPY: limit_calls(setting.operation.direction, transferred)}
    timings, failed = measure_those_that_run(timer, calls)
    for name, error in failed.items():
        results[name] = replace(results[name], status=status_of(error), note=first_line(error))
    right = [name for name in admitted if name in timings]
    host = timer.host_seconds({name: admitted[name][0] for name in right})
    copy_ms = timings[COPY].ms
    for name in right:
        ms = timings[name].ms
        results[name] = replace(
            results[name],
            ms=ms,
            gigabytes_per_second=setting.problem.bytes / ms / 1e6,
            copy_fraction=copy_ms / ms,
            host_ms=host[name] * 1e3 if name in host else None,
            method=timings[name].method,
        )
    return copy_ms


def config_of(instance: Any) -> dict[str, Any]:
    """An instance's configuration as a dictionary of plain values; empty for none."""
    config = instance.config
    return asdict(config) if config is not None and is_dataclass(config) and not isinstance(config, type) else {}
