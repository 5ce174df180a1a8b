"""Runs workloads: every contender is checked against fp64, and those that are right are timed side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fusednorm.bench.contenders import Contender, Prepared
from fusednorm.bench.judging import Asked, Judge
from fusednorm.bench.limits import limit_calls
from fusednorm.bench.results import Row, row_of
from fusednorm.bench.timing import Calls, Timer, timer_for
from fusednorm.bench.workloads import Init, Inputs, Workload, draw
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
    count = timer.input_sets(3 * workload.bytes_per_transfer)
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
    progress(f"{workload.key} {asked}: timing")
    calls: dict[str, Calls] = {name: [one.call for one in prepared] for name, (prepared, _) in admitted.items()}
    calls[COPY] = limit_calls(asked, workload.bytes_per_transfer, count, device)
    timings = timer.measure(calls)
    copy_ms = timings[COPY].ms
    for name, timing in timings.items():
        verdict = admitted[name][1] if name in admitted else None
        rows[name] = row_of(
            workload,
            asked,
            name,
            "ok",
            ms=timing.ms,
            copy_ms=copy_ms,
            host_ms=None if timing.host is None else timing.host * 1e3,
            error=verdict.error if verdict else None,
            allowed=verdict.allowed if verdict else None,
        )
    order = [*(contender.name for contender in contenders), COPY]
    return [rows[name] for name in order]
