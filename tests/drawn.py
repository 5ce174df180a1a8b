"""A search among drawn cases: every family, direction, dtype, memory and magnitude against plain float64 formulas.

    python tests/drawn.py --cases 100000 --seed 1 --jobs 2
    python tests/drawn.py --cases 5000 --seed 1 --jobs 12 --device cuda
    python tests/drawn.py --cases 100 --seed 1 --device interpreter
    python tests/drawn.py --seed 1 --case 4711

The interpreter runs Triton's kernels on the CPU, a few small cases a second.
A case is a function of (seed, index, device). Of each call it is checked that the results are right (drawn_judge.py),
that nothing it was given has changed, and that nothing outside its tensors was read, which is NaN. Some are also run
again, with another number of threads, after a call of the same shape with other operands, or with NaN in one unit: the
bits must stay, in that last one those of the other units. A find is a line that ends in the command to repeat it. A
process that dies is a find too, and the search goes on after it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import IO

import torch
from drawn_calls import GRADIENTS, Inputs, Results, call, make, place, threads
from drawn_cases import Case, Draw, draw_case, short, shows
from drawn_formulas import Spec
from drawn_judge import Judge, other_units, same_bits

POOL = 150  # geometries on a GPU, where each compiles kernels
SECONDS = 240  # a case that takes longer hangs


def refused(case: Case) -> bool:
    """Whether the library says that it refuses this shape: one element for each statistic in all."""
    spec, entry = case.spec, case.entry
    elements = prod(spec.shape)
    if spec.family == "group_norm":
        return elements == spec.groups and case.direction != "norm_backward"
    if not spec.training or spec.rows or entry == "ops_backward":
        return False
    if spec.family == "instance_norm":
        return spec.dims[3] == 1
    return elements > 0 and elements == spec.dims[1]


def undefined(spec: Spec, judge: Judge) -> bool:
    """Whether a deviation of 0 without eps, or a negative eps beside a variance like it, leaves nothing to compare."""
    if spec.eps > 0 or not spec.training or "rstd" not in judge.expected.results:
        return False
    rstd = judge.expected.results["rstd"]
    return bool((~rstd.isfinite()).any()) or bool((rstd > 10.0 / max(abs(spec.eps), 1e-12) ** 0.5).any())


def judged(case: Case, spec: Spec, inputs: Inputs, results: Results) -> tuple[list[str], int]:
    """The faults of a call's results, and how many were soft."""
    shown = results["output"] if case.entry in ("autograd", "module") and shows(spec, case.dtype, case.entry) else None
    judge = Judge(spec, inputs.tensors, case.dtype, shown)
    faults = []
    if undefined(spec, judge):
        return [], 0
    for name, result in results.items():
        like = (
            inputs.tensors["input" if name == "output" else name.removeprefix("grad_")]
            if name not in ("mean", "rstd")
            else None
        )
        if like is not None and result.dtype != like.dtype:
            faults.append(f"{name}: dtype {result.dtype}, expected {like.dtype}")
    found = judge.faults(results)
    faults += [f"{fault.name}: {fault.text}" for fault in found if not fault.soft]
    faults += [f"{name} was written to" for name in inputs.changed()]
    return faults, sum(fault.soft for fault in found)


def differing(first: Results, second: Results) -> list[str]:
    return [name for name in first if not same_bits(first[name], second[name])]


def contained(case: Case, spec: Spec, inputs: Inputs, clean: Results, device: str) -> list[str]:
    """Poisons one unit of the input and names the per-element results that changed elsewhere."""
    draw = Draw(f"{case.seed}/{case.index}/poison")
    unit = [draw.randrange(size) for size in spec.dims]
    made = inputs.tensors["input"].double().cpu()
    outside = other_units(spec, unit)
    inside = spec.from_view(~outside)
    places = inside.nonzero().tolist()
    for _ in range(draw.randint(1, 3)):
        made[tuple(draw.choice(places))] = draw.choice([float("nan"), float("inf"), -float("inf"), 3e38])
    operand = case.operands["input"]
    poisoned, _ = place(made, operand.dtype, operand.placement, device)
    results = call(case, spec, Inputs({**inputs.tensors, "input": poisoned}, {}))
    outside = outside.to(device)
    return [
        name
        for name in ("output", "grad_input")
        if name in clean and not same_bits(spec.to_view(results[name])[outside], spec.to_view(clean[name])[outside])
    ]


def run_case(case: Case, device: str, tally: Counter[str]) -> list[str]:
    """What is wrong with a case, each as a sentence."""
    spec = case.spec
    device = "cpu" if device == "interpreter" else device
    with threads(case.threads):
        inputs = make(case, case.operands, spec, device)
        try:
            results = call(case, spec, inputs)
        except (ValueError, TypeError) as error:
            if refused(case) or (spec.eps < 0 and "eps" in str(error)):
                tally["refused"] += 1
                return []
            return [f"{type(error).__name__}: {str(error).splitlines()[0]}"]
        if refused(case):
            return ["one element for each statistic was not refused"]
        found, soft = judged(case, spec, inputs, results)
        tally["soft"] += soft
        for check in sorted(case.checks):
            tally[check] += 1
        if "repeat" in case.checks:
            found += [f"{name} has other bits the second time" for name in differing(results, call(case, spec, inputs))]
        if "threads" in case.checks:
            with threads(3 - case.threads):
                again = call(case, spec, inputs)
            found += [f"{name} has other bits with {3 - case.threads} threads" for name in differing(results, again)]
        if "between" in case.checks:
            other = replace(spec, eps=case.extra_eps)
            between = replace(
                case, operands=case.extra, wanted=tuple(name for name in GRADIENTS if name in case.extra), spec=other
            )
            if (
                case.entry != "module"
                or ("weight" in case.extra) == ("bias" in case.extra)
                or spec.family == "rms_norm"
            ):
                second = make(between, case.extra, other, device)
                try:
                    faults, soft = judged(between, other, second, call(between, other, second))
                    found += [f"with other operands {fault} [{between.describe()}]" for fault in faults]
                except ValueError as error:
                    if other.eps >= 0 or "eps" not in str(error):
                        raise
            changed = differing(results, call(case, spec, inputs))
            found += [f"{name} has other bits after a call with other operands" for name in changed]
        if "contain" in case.checks and inputs.tensors["input"].numel():
            found += [
                f"{name} changed outside the unit that was poisoned"
                for name in contained(case, spec, inputs, results, device)
            ]
    return found


# --- the search ---


def command(seed: int, index: int, device: str, pool: int) -> str:
    more = f" --pool {pool}" if pool not in (0, POOL) else ""
    return f"python tests/drawn.py --seed {seed} --case {index} --device {device}{more}"


def run_index(seed: int, index: int, device: str, pool: int, tally: Counter[str]) -> list[str]:
    """The lines of one case's finds; counts what it was."""
    case = draw_case(seed, index, device, pool)
    tally["cases"] += 1
    evaluation = "" if case.spec.training else " (evaluation)"
    tally[f"family {case.spec.family}{evaluation}"] += 1
    tally[f"direction {case.direction}"] += 1
    tally[f"entry {case.entry}"] += 1
    tally[f"dtype {short(case.dtype)}"] += 1
    tally[f"activation {case.spec.activation}"] += 1
    try:
        faults = run_case(case, device, tally)
    except Exception as error:
        if device == "cuda" and ("CUDA" in str(error) or "illegal" in str(error)):
            raise
        where = error.__traceback__
        while where is not None and where.tb_next is not None:
            where = where.tb_next
        at = f" in {Path(where.tb_frame.f_code.co_filename).name}:{where.tb_lineno}" if where else ""
        faults = [f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}{at}"]
    if faults:
        tally["finds"] += 1
    repeat = command(seed, index, device, pool)
    return [f"FIND {case.describe()} | {fault} | {repeat}" for fault in faults]


def indices(cases: int, start: int, pool: int, worker: int, workers: int) -> list[int]:
    """A worker's cases; those of one geometry follow one another in one process, which compiles it once."""
    mine = [index for index in range(start, start + cases) if (index % pool if pool else index) % workers == worker]
    return sorted(mine, key=lambda index: (index % pool, index)) if pool else mine


def work(arguments: argparse.Namespace) -> None:
    """A worker: one JSON line before each case, one for each find, and the counts at the end."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # memory that a kernel forgot shows as NaN
    torch.set_num_threads(1)
    mine = indices(arguments.cases, arguments.start, arguments.pool, arguments.worker, arguments.jobs)
    for position, index in enumerate(mine):
        if position < arguments.skip:
            continue
        print(json.dumps({"position": position, "index": index}), flush=True)
        tally: Counter[str] = Counter()
        finds = run_index(arguments.seed, index, arguments.device, arguments.pool, tally)
        print(json.dumps({"tally": tally, "finds": finds}), flush=True)


class Worker(threading.Thread):
    """A process that works, watched: what it dies of is a find, and a new one goes on after it."""

    def __init__(
        self, number: int, arguments: argparse.Namespace, report: Callable[[str], None], script: str = __file__
    ) -> None:
        super().__init__(daemon=True)
        self.number, self.arguments, self.report, self.script = number, arguments, report, script
        self.tally: Counter[str] = Counter()
        self.position, self.index = -1, -1
        self.since = time.monotonic()
        self.done = False

    def run(self) -> None:
        while not self.done:
            self._process()

    def _process(self) -> None:
        given = self.arguments
        same = {name: getattr(given, name) for name in ("cases", "start", "seed", "jobs", "device", "pool")}
        options = {**same, "worker": self.number, "skip": self.position + 1}
        flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2")}
        process = subprocess.Popen(
            [sys.executable, self.script, *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert process.stdout is not None
        assert process.stderr is not None
        errors: list[str] = []
        collector = threading.Thread(target=self._collect, args=(process.stderr, errors), daemon=True)
        collector.start()
        clock = threading.Timer(SECONDS, process.kill)
        first = self.position
        for line in process.stdout:
            clock.cancel()
            read = json.loads(line)
            if "index" in read:
                self.position, self.index = read["position"], read["index"]
                clock = threading.Timer(SECONDS, process.kill)
                clock.daemon = True
                clock.start()
            else:
                self.tally.update(read["tally"])
                for find in read["finds"]:
                    self.report(find)
        clock.cancel()
        status = process.wait()
        collector.join()
        process.stdout.close()
        process.stderr.close()
        if status == 0:
            self.done = True
            return
        self.tally.update({"cases": 1, "finds": 1, "processes that died": 1})
        words = " ".join([line for line in errors if line.strip()][-1:])[:200]
        repeat = command(given.seed, self.index, given.device, given.pool)
        self.report(f"FIND the process ended with {status}: {words} | {repeat}")
        if self.position == first:  # it dies before its first case, and would for ever
            self.done = True

    @staticmethod
    def _collect(stream: IO[str], lines: list[str]) -> None:
        for line in stream:
            lines.append(line.rstrip())
            del lines[:-20]


def counted(tally: Counter[str], seconds: float) -> str:
    lines = [f"{tally['cases']} cases, {tally['finds']} with finds, in {seconds:.0f} s"]
    for kind in ("family", "direction", "entry", "dtype", "activation"):
        parts = [
            f"{name.removeprefix(kind + ' ')} {count}"
            for name, count in sorted(tally.items())
            if name.startswith(kind + " ")
        ]
        lines.append(f"  {kind}: " + ", ".join(parts))
    rest = ("repeat", "threads", "between", "contain", "refused", "soft", "processes that died")
    lines.append("  besides: " + ", ".join(f"{name} {tally[name]}" for name in rest))
    return "\n".join(lines)


def search(arguments: argparse.Namespace) -> int:
    lock, began = threading.Lock(), time.monotonic()

    def report(line: str) -> None:
        with lock:
            print(line, flush=True)

    workers = [Worker(number, arguments, report) for number in range(arguments.jobs)]
    for worker in workers:
        worker.start()
    last = began
    while any(worker.is_alive() for worker in workers):
        time.sleep(0.2)
        if time.monotonic() - last > 60:
            last = time.monotonic()
            so_far = sum(worker.tally["cases"] for worker in workers)
            print(f"{so_far} cases after {last - began:.0f} s", file=sys.stderr, flush=True)
    tally: Counter[str] = Counter()
    for worker in workers:
        tally.update(worker.tally)
    print(counted(tally, time.monotonic() - began))
    return 1 if tally["finds"] else 0


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--start", type=int, default=0, help="the first index")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--device", choices=["cpu", "cuda", "interpreter"], default="cpu")
    parser.add_argument("--pool", type=int, help=f"geometries to draw from, 0 for new ones each time; on cuda {POOL}")
    parser.add_argument("--case", type=int, help="run this one alone, and say what it is")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--skip", type=int, default=0, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.device == "interpreter":
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    if chosen.pool is None:
        chosen.pool = POOL if chosen.device == "cuda" else 0
    return chosen


def main() -> int:
    arguments = parsed()
    if arguments.worker is not None:
        work(arguments)
        return 0
    if arguments.case is None:
        return search(arguments)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    case = draw_case(arguments.seed, arguments.case, arguments.device, arguments.pool)
    print(case.describe(), case.operands, case.wanted, case.instances, sorted(case.checks), case.form, sep="\n  ")
    finds = run_index(arguments.seed, arguments.case, arguments.device, arguments.pool, Counter())
    print("\n".join(finds) or "right")
    return 1 if finds else 0


if __name__ == "__main__":
    sys.exit(main())
