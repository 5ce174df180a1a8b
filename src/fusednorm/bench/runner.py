"""Runs workloads: checks every contender against fp64, and times the right ones side by side."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from fusednorm.bench.contenders import Contender, Eager, Prepared, available
from fusednorm.bench.judging import Asked, Judge
from fusednorm.bench.memory import NotEnoughMemoryError, is_out_of_memory, require, workload_bytes
from fusednorm.bench.operations import problem_of_workload
from fusednorm.bench.results import Row, Status, row_of
from fusednorm.bench.workloads import Init, Inputs, Workload, draw
from fusednorm.machine.limits import TRANSFERS, limit_calls
from fusednorm.machine.timing import Calls, Timer, Timing, timer_for
from fusednorm.problem import Direction
from fusednorm.tolerance import Verdict

COPY = "copy"
Progress = Callable[[str], None]


def silent(message: str) -> None:
    pass


def first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]


def status_of(error: Exception) -> Status:
    """The status of a contender that raised: "skipped" for want of memory, which says nothing of its results."""
    return "skipped" if is_out_of_memory(error) else "failed"


def measure_those_that_run(
    timer: Timer, calls: Mapping[str, Calls], whole: bool = False
) -> tuple[dict[str, Timing], dict[str, Exception]]:
    """The times of the contenders that can be called again and again, and the exceptions of the others.

    A call that was right once may fail later, on another set of inputs or for want of memory. To wrap the timed calls
    would cost time, so after a failure each contender is tried alone.
    """
    failed: dict[str, Exception] = {}
    while True:
        left = {name: sets for name, sets in calls.items() if name not in failed}
        try:
            return timer.measure(left, whole), failed
        except Exception:
            alone = {name: _raised(timer, sets) for name, sets in left.items()}
            found = {name: raised for name, raised in alone.items() if raised is not None}
            if COPY in found or not found:
                raise
            failed |= found


def host_times(timer: Timer, calls: Mapping[str, Calls]) -> dict[str, dict[str, Any]]:
    """``call_ms`` and ``host_ms`` of each contender as its row has them; empty where the device is the host."""
    if not timer.asynchronous or not calls:
        return {}
    host = timer.host_seconds({name: sets[0] for name, sets in calls.items()})
    whole = timer.measure(calls, whole=True)
    return {name: {"call_ms": whole[name].ms, "host_ms": host[name] * 1e3} for name in calls}


def _raised(timer: Timer, sets: Calls) -> Exception | None:
    """The exception that a contender raises when it is measured alone, or None."""
    try:
        timer.measure({"alone": sets})
    except Exception as error:
        return error
    return None


def workload_needs(workload: Workload, asked: Asked, contenders: int, sets: int, judged: bool = True) -> int:
    """About the bytes that a workload takes with all its contenders."""
    backward = asked not in ("forward", "inference")
    return workload_bytes(workload, sets=sets, contenders=contenders, backward=backward, judged=judged)


def _admit(
    contender: Contender, workload: Workload, asked: Asked, judge: Judge | None, sets: Sequence[Inputs]
) -> tuple[Row | None, list[Prepared], Verdict | None]:
    """The prepared calls and verdict of a contender that is right, or the row that says why it is not timed.

    Without a judge every contender that runs counts as right, without a verdict.
    """
    try:
        refusal = contender.refusal(workload, asked)
        if refusal is not None:
            return row_of(workload, asked, contender.name, "skipped", note=refusal), [], None
        prepared = [contender.prepare(workload, inputs, asked) for inputs in sets]
        results = prepared[0].results(prepared[0].call())
        verdict = None if judge is None else judge.check(results, contender.allowance)
    except Exception as error:  # A peer's own failure is a result of the bench, not the end of it.
        return row_of(workload, asked, contender.name, status_of(error), note=first_line(error)), [], None
    if verdict is not None and not verdict.ok:
        row = row_of(
            workload, asked, contender.name, "wrong", note=verdict.fault, error=verdict.error, allowed=verdict.allowed
        )
        return row, [], None
    return None, prepared, verdict


def run_workload(
    workload: Workload,
    asked: Asked,
    contenders: Sequence[Contender],
    *,
    init: Init = "normal",
    timer: Timer | None = None,
    device: str = "cpu",
    progress: Progress = silent,
    judged: bool = True,
) -> list[Row]:
    """One row per contender on one workload, and one for the plain copy.

    A contender that fails its check against fp64 is reported as "wrong" and never timed; ``judged`` False leaves the
    check out, which for a large tensor takes longer than the timing.
    """
    timer = timer or timer_for(device)
    with timer.session():
        count = timer.input_sets(TRANSFERS[asked] * workload.bytes_per_transfer)
        try:
            require(workload_needs(workload, asked, len(contenders), count, judged), device, workload.key)
        except NotEnoughMemoryError as error:  # The other workloads of a suite may fit.
            names = [*(contender.name for contender in contenders), COPY]
            return [row_of(workload, asked, name, "skipped", note=str(error)) for name in names]
        sets = [draw(workload, init, seed, device) for seed in range(count)]
        judge = Judge(workload, sets[0], asked) if judged else None
        rows: dict[str, Row] = {}
        admitted: dict[str, tuple[list[Prepared], Verdict | None]] = {}
        for contender in contenders:
            progress(f"{workload.key} {asked}: checking {contender.name}")
            refused, prepared, verdict = _admit(contender, workload, asked, judge, sets)
            if refused is not None:
                rows[contender.name] = refused
            else:
                admitted[contender.name] = prepared, verdict
        del judge
        progress(f"{workload.key} {asked}: timing")
        right = {name: prepared for name, (prepared, _) in admitted.items()}
        measured, failed = _measure(workload, asked, right, sets, timer)
    flops = flops_of(workload, asked, sets[0])
    for name, values in measured.items():
        verdict = admitted[name][1] if name in admitted else None
        if verdict is not None:
            values |= {"error": verdict.error, "allowed": verdict.allowed}
        rows[name] = row_of(workload, asked, name, "ok", flops=flops, **values)
    for name, raised in failed.items():
        rows[name] = row_of(workload, asked, name, status_of(raised), note=first_line(raised))
    order = [*(contender.name for contender in contenders), COPY]
    return [rows[name] for name in order]


def call_once(job: tuple[Workload, Asked], names: Collection[str], device: str) -> None:
    """Call each of these contenders once, which compiles its kernels."""
    workload, asked = job
    require(workload_needs(workload, asked, 1, 1, judged=False), device, workload.key)
    inputs = draw(workload, "normal", 0, device)
    for contender in available(names, device)[0]:
        with suppress(Exception):
            if contender.refusal(workload, asked) is None:
                contender.prepare(workload, inputs, asked).call()


def flops_of(workload: Workload, asked: Asked, inputs: Inputs) -> int:
    """The floating-point operations of a workload in one direction."""
    forward: Direction = "forward" if workload.training else "inference"
    directions: tuple[Direction, ...] = {"forward": (forward,), "forward_backward": (forward, "backward")}.get(
        asked, ("backward",)
    )
    return sum(problem_of_workload(direction, workload, inputs).flops for direction in directions)


def _measure(
    workload: Workload, asked: Asked, admitted: Mapping[str, list[Prepared]], sets: Sequence[Inputs], timer: Timer
) -> tuple[dict[str, dict[str, Any]], dict[str, Exception]]:
    """The times of the contenders and the plain copy, as fields of their rows, and the exceptions of the others."""
    calls: dict[str, Calls] = {name: [one.call for one in prepared] for name, prepared in admitted.items()}
    calls[COPY] = limit_calls(asked, [inputs.transferred for inputs in sets])
    whole = asked == "forward_backward"
    timings, failed = measure_those_that_run(timer, calls, whole)
    admitted = {name: prepared for name, prepared in admitted.items() if name in timings}
    calls = {name: sets for name, sets in calls.items() if name in timings}
    found: dict[str, dict[str, Any]] = {
        name: {"ms": timing.ms, "copy_ms": timings[COPY].ms, "method": timing.method}
        for name, timing in timings.items()
    }
    if not timer.asynchronous:
        return found, failed
    public = {name: prepared[0].public or prepared[0].call for name, prepared in admitted.items()}
    for name, seconds in timer.host_seconds(public).items():
        found[name]["host_ms"] = seconds * 1e3
    if asked == "forward":
        for name, timing in timer.measure(calls, whole=True).items():
            found[name]["call_ms"] = timing.ms
    if whole:
        plain = replace(workload, activation=None)
        limit = None
        if Eager().refusal(plain, asked) is None:
            limit = timer.peak_bytes(Eager().prepare(plain, sets[0], asked).call)
        for name, prepared in admitted.items():
            found[name] |= {"peak_bytes": timer.peak_bytes(prepared[0].call), "plain_peak_bytes": limit}
    return found, failed
