"""Runs workloads: every contender is checked against fp64, and those that are right are timed side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fusednorm.bench.contenders import Contender, Eager, Prepared
from fusednorm.bench.judging import Asked, Judge
from fusednorm.bench.limits import TRANSFERS, limit_calls
from fusednorm.bench.operations import problem_of
from fusednorm.bench.results import Row, row_of
from fusednorm.bench.timing import Calls, Timer, timer_for
from fusednorm.bench.workloads import Init, Inputs, Workload, draw
from fusednorm.problem import Direction
from fusednorm.tolerance import Verdict

COPY = "copy"
Progress = Callable[[str], None]


def silent(message: str) -> None:
    pass


def first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]


def _admit(
    contender: Contender, workload: Workload, asked: Asked, judge: Judge, sets: Sequence[Inputs]
) -> tuple[Row | None, list[Prepared], Verdict | None]:
    """The prepared calls of a contender that is right, or the row that says why it is not timed."""
    refusal = contender.refusal(workload, asked)
    if refusal is not None:
        return row_of(workload, asked, contender.name, "skipped", note=refusal), [], None
    try:
        prepared = [contender.prepare(workload, inputs, asked) for inputs in sets]
        verdict = judge.check(prepared[0].results(prepared[0].call()), contender.allowance)
    except Exception as error:  # A peer's own failure is a result of the bench, not the end of it.
        return row_of(workload, asked, contender.name, "failed", note=first_line(error)), [], None
    if not verdict.ok:
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
) -> list[Row]:
    """One row per contender on one workload, and one for the plain copy.

    A contender that fails its check against fp64 is reported as "wrong" and never timed.
    """
    timer = timer or timer_for(device)
    with timer.session():
        count = timer.input_sets(TRANSFERS[asked] * workload.bytes_per_transfer)
        sets = [draw(workload, init, seed, device) for seed in range(count)]
        judge = Judge(workload, sets[0], asked)
        rows: dict[str, Row] = {}
        admitted: dict[str, tuple[list[Prepared], Verdict]] = {}
        for contender in contenders:
            progress(f"{workload.key} {asked}: checking {contender.name}")
            refused, prepared, verdict = _admit(contender, workload, asked, judge, sets)
            if refused is not None:
                rows[contender.name] = refused
            elif verdict is not None:
                admitted[contender.name] = prepared, verdict
        del judge
        progress(f"{workload.key} {asked}: timing")
        measured = _measure(workload, asked, {name: prepared for name, (prepared, _) in admitted.items()}, sets, timer)
    flops = flops_of(workload, asked, sets[0])
    for name, values in measured.items():
        if name in admitted:
            verdict = admitted[name][1]
            values |= {"error": verdict.error, "allowed": verdict.allowed}
        rows[name] = row_of(workload, asked, name, "ok", flops=flops, **values)
    order = [*(contender.name for contender in contenders), COPY]
    return [rows[name] for name in order]


def flops_of(workload: Workload, asked: Asked, inputs: Inputs) -> int:
    """The floating-point operations of a workload in one direction."""
    forward: Direction = "forward" if workload.training else "inference"
    directions: tuple[Direction, ...] = {"forward": (forward,), "forward_backward": (forward, "backward")}.get(
        asked, ("backward",)
    )
    return sum(problem_of(direction, workload, inputs).flops for direction in directions)


def _measure(
    workload: Workload, asked: Asked, admitted: Mapping[str, list[Prepared]], sets: Sequence[Inputs], timer: Timer
) -> dict[str, dict[str, Any]]:
    """The times of all contenders and of the plain copy, as the fields of their rows."""
    calls: dict[str, Calls] = {name: [one.call for one in prepared] for name, prepared in admitted.items()}
    calls[COPY] = limit_calls(asked, sets)
    whole = asked == "forward_backward"
    timings = timer.measure(calls, whole)
    found: dict[str, dict[str, Any]] = {
        name: {"ms": timing.ms, "copy_ms": timings[COPY].ms, "method": timing.method}
        for name, timing in timings.items()
    }
    if not timer.asynchronous:
        return found
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
    return found
