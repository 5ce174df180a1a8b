"""Every instance of one operation, in its default configuration or in all: checked against fp64, timed beside the copy.

A forward writes into an output that is kept, as the copy does; a backward allocates its gradients. Many configurations
are first timed briefly, a few of them side by side, and then the fastest beside the default and the plain copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
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
from fusednorm.instance import Candidate, Plan
from fusednorm.machine.description import name_of
from fusednorm.machine.limits import TRANSFERS, limit_calls
from fusednorm.machine.timing import Calls, Timer, timer_for
from fusednorm.operands import Gradients
from fusednorm.problem import Problem
from fusednorm.tuning import described, key_of

#: At most so many are timed side by side, each with results of its own in memory.
GROUP = 8
#: The fastest of many that are timed once more, beside the default.
FINALISTS = 4
GRADIENTS = ("grad_input", "grad_weight", "grad_bias", "grad_scale", "grad_shift")


@dataclass(frozen=True)
class InstanceResult:
    """One instance: "ok", "wrong" (beyond the tolerance), "failed" (it raised) or "skipped" (it cannot run this).

    ``config`` is its configuration; ``default`` says that the heuristics choose this instance in it. ``ms`` is the
    median time of a call, on a GPU the device's; ``host_ms`` is the host's beside it. ``method`` says how ``ms`` was
    taken, see :class:`~fusednorm.machine.timing.Timing`.
    """

    instance: str
    config: dict[str, Any] | None
    default: bool
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
    """The instances of one operation on one problem; ``best`` is the fastest that is right.

    ``problem`` is the text under which a tuned choice is kept.
    """

    operation: str
    workload: str
    problem: str
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
    def default(self) -> InstanceResult | None:
        """The choice of the heuristics."""
        return next((result for result in self.results if result.default), None)

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

    def trials(self, every_config: bool) -> Iterator[tuple[Candidate, Any, bool]]:
        """Each instance with a configuration, and whether the heuristics choose the two."""
        default = choice.default(self.problem).name
        for candidate in choice.instances(self.problem):
            configs: Sequence[Any] = (None,)
            if candidate.reason is None:
                configs = candidate.instance.configs(self.problem)
            for place, config in enumerate(configs if every_config else configs[:1]):
                yield candidate, config, place == 0 and candidate.instance.name == default

    def runs(self, plan: Plan, count: int) -> list[_Run]:
        """The plan on each of the first sets of inputs, a forward with an output for each."""
        sets = zip(self.sets[:count], self.saved[:count], strict=True)
        return [_run(plan, self.operation, inputs, *given) for inputs, given in sets]

    def attempt(self, candidate: Candidate, config: Any, default: bool) -> tuple[InstanceResult, Plan | None]:
        """The result of an instance before it is timed, and its plan where it may be."""
        describe = partial(InstanceResult, candidate.instance.name, described(config), default)
        if candidate.reason is not None:
            return describe("skipped", candidate.reason), None
        try:
            plan = candidate.instance.plan(self.problem, config)
            got = self.runs(plan, 1)[0].results()
            verdict = None if self.judge is None else self.judge.check(got)
        except Exception as error:  # One broken instance must not hide the others.
            return describe(status_of(error), first_line(error)), None
        if verdict is None:
            return describe("ok"), plan
        if verdict.fault is not None:
            return describe("wrong", verdict.fault, verdict.error, verdict.allowed), None
        return describe("ok", "", verdict.error, verdict.allowed), plan


def _prepare(
    operation: Operation,
    workload: Workload,
    init: Init,
    verify: bool,
    device: str,
    timer: Timer,
    progress: Progress,
    side_by_side: int,
) -> _Setting:
    progress("drawing inputs")
    count = timer.input_sets(TRANSFERS[operation.direction] * workload.bytes_per_transfer)
    needed = workload_needs(workload, operation.direction, side_by_side, count, verify)
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
    every_config: bool = False,
    device: str = "cpu",
    timer: Timer | None = None,
    screening: Timer | None = None,
    progress: Progress = silent,
) -> Profile:
    """Tries every instance of the operation; an instance that fails its check is not timed.

    ``every_config`` tries each instance in all its configurations. ``screening`` is the timer of the first round where
    there are many, and ``timer`` that of the last.
    """
    timer = timer or timer_for(device)
    with timer.session():
        setting = _prepare(operation, workload, init, verify, device, timer, progress, GROUP if every_config else 1)
        results: dict[str, InstanceResult] = {}
        plans: dict[str, Plan] = {}
        for candidate, config, default in setting.trials(every_config):
            name = candidate.instance.name if config is None else f"{candidate.instance.name} {config}"
            progress(f"checking {name}")
            results[name], plan = setting.attempt(candidate, config, default)
            if plan is not None:
                plans[name] = plan
        copy_ms = None
        if time:
            progress("timing")
            copy_ms = _time(setting, timer, screening or timer, plans, results)
    problem = setting.problem
    name, found = name_of(device), tuple(results.values())
    return Profile(operation.name, workload.key, key_of(problem), name, problem.bytes, problem.flops, copy_ms, found)


def _time(
    setting: _Setting,
    timer: Timer,
    screening: Timer,
    plans: dict[str, Plan],
    results: dict[str, InstanceResult],
) -> float:
    """Writes the times of plans into their results; returns the copy's time in ms."""
    names = list(plans)
    if len(names) > GROUP:
        for start in range(0, len(names), GROUP):
            _measure(setting, screening, {name: plans[name] for name in names[start : start + GROUP]}, results)
        ranked = sorted((ms, name) for name in names if (ms := results[name].ms) is not None)
        fastest = {name for _, name in ranked[:FINALISTS]}
        names = [name for name in names if name in fastest or (results[name].default and results[name].ms is not None)]
    transferred = [inputs.transferred for inputs in setting.sets]
    copies = limit_calls(setting.operation.direction, transferred)
    copy_ms = _measure(setting, timer, {name: plans[name] for name in names}, results, copies)
    for name, result in results.items():
        if result.ms is not None:
            speed = setting.problem.bytes / result.ms / 1e6
            results[name] = replace(result, gigabytes_per_second=speed, copy_fraction=copy_ms / result.ms)
    return copy_ms


def _measure(
    setting: _Setting, timer: Timer, plans: dict[str, Plan], results: dict[str, InstanceResult], copies: Calls = ()
) -> float:
    """Writes the times of plans, measured side by side, into their results; returns the copies' time in ms.

    The host's time is measured where there are copies, which belong to the last round.
    """
    calls: dict[str, Calls] = {COPY: copies} if copies else {}
    failed: dict[str, Exception] = {}
    for name, plan in plans.items():
        try:
            calls[name] = [run.call for run in setting.runs(plan, len(setting.sets))]
        except Exception as error:  # for want of memory
            failed[name] = error
    timings, failed_later = measure_those_that_run(timer, calls)
    for name, raised in (failed | failed_later).items():
        results[name] = replace(results[name], status=status_of(raised), note=first_line(raised), ms=None)
    right = [name for name in plans if name in timings]
    host = timer.host_seconds({name: calls[name][0] for name in right}) if copies else {}
    for name in right:
        host_ms = host[name] * 1e3 if name in host else None
        results[name] = replace(results[name], ms=timings[name].ms, host_ms=host_ms, method=timings[name].method)
    return timings[COPY].ms if copies else 0.0


@dataclass(frozen=True)
class Trial:
    """One configuration of one instance on one workload, for another process to try."""

    operation: Operation
    workload: Workload
    instance: str
    config: Any


def trials_of(operation: Operation, workload: Workload, device: str) -> list[Trial]:
    """What :func:`profile` tries with ``every_config``."""
    require(workload_needs(workload, operation.direction, 1, 1, judged=False), device, workload.key)
    problem = problem_of_workload(operation.direction, workload, draw(workload, "zeros", 0, device))
    setting = _Setting(operation, problem, (), (), None)
    tried = ((candidate, config) for candidate, config, _ in setting.trials(True) if candidate.reason is None)
    return [Trial(operation, workload, candidate.instance.name, config) for candidate, config in tried]


def run_once(trial: Trial, device: str) -> None:
    """Run a trial once, which compiles its kernels and leaves them on disk for other processes."""
    require(workload_needs(trial.workload, trial.operation.direction, 1, 1, judged=False), device, trial.workload.key)
    inputs = draw(trial.workload, "zeros", 0, device)
    problem = problem_of_workload(trial.operation.direction, trial.workload, inputs)
    rstd = torch.ones(problem.statistics_shape, dtype=getattr(torch, problem.compute_dtype), device=device)
    mean = rstd if problem.norm.has_mean else None
    _run(choice.named(problem, trial.instance).plan(problem, trial.config), trial.operation, inputs, mean, rstd).call()
