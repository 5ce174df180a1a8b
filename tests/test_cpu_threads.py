"""Threads and forks: the same bits from any number of threads, from many callers at once, and in a forked child."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from cpu_support import activation_for, fresh_process, in_child, layout_for, needs_fork, run, same_bits
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import fusednorm
from fusednorm import dispatch, ops
from fusednorm.backends.cpu import compiler, threads
from fusednorm.backends.cpu.frame import Frame, template
from fusednorm.backends.cpu.plans import base
from fusednorm.backends.cpu.plans.rows import RowsForward
from fusednorm.bench.judging import Results
from fusednorm.bench.workloads import Inputs, Workload, draw
from fusednorm.choice import choose
from fusednorm.norm import norm_of
from fusednorm.operands import BackwardOperands, Operands
from fusednorm.problems import backward_problem, forward_problem

# More than a thread takes alone, in more units, pieces, slabs or rows than there are threads.
WORKLOADS = {
    "cpu.planes": Workload("group_norm", (3, 24, 4201), 8, modulated=True),
    "cpu.planes_split": Workload("group_norm", (1, 3, 150_001), 1, modulated=True),
    "cpu.slabs": Workload("group_norm", (9, 24, 29, 41), 8, layout="nhwc", modulated=True),
    "cpu.slabs_split": Workload("group_norm", (2, 24, 21001), 8, layout="nhwc", modulated=True),
    "cpu.rows": Workload("layer_norm", (701, 391), 1),
}
OVER_SAMPLES = {
    name: Workload("batch_norm", (7, 24, 1801), layout=layout_for(name))
    for name in ("cpu.planes", "cpu.planes_split", "cpu.slabs_split")
}
CASES = [*WORKLOADS.items(), *OVER_SAMPLES.items()]
case_ids = [f"{name}-{workload.family}" for name, workload in CASES]


@cache
def prepared(instance: str, family: str) -> tuple[Workload, Inputs, Results]:
    """A workload, its inputs, and what one thread makes of them."""
    workload = next(one for name, one in CASES if (name, one.family) == (instance, family))
    workload = replace(workload, activation=activation_for(instance))
    inputs = draw(workload)
    with_threads(1)
    return workload, inputs, run(workload, inputs, instance)


def differing(results: Results, expected: Results) -> list[str]:
    return [name for name, value in results.items() if not same_bits(value, expected[name])]


def with_threads(count: int) -> None:
    torch.set_num_threads(count)


@pytest.fixture(autouse=True)
def restored_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["OpenMP", "own threads"])
def team(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both kinds of threads; the library's own serve forked children and systems without OpenMP."""
    if request.param == "own threads":
        monkeypatch.setattr(threads, "openmp", lambda: None)
    elif threads.openmp() is None:
        pytest.skip("torch has loaded no OpenMP library here")
    return str(request.param)


# --- the number of threads ---


@pytest.mark.parametrize(("instance", "workload"), CASES, ids=case_ids)
def test_any_number_of_threads_gives_the_same_bits(instance: str, workload: Workload, team: str) -> None:
    workload, inputs, expected = prepared(instance, workload.family)
    for count in (2, 3, 5, 2, 1):
        with_threads(count)
        assert differing(run(workload, inputs, instance), expected) == [], count


@pytest.fixture
def teams(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the teams that are started."""
    sizes: list[int] = []
    found = threads.openmp()
    if found is None:
        pytest.skip("torch has loaded no OpenMP library here")

    def spy(function: int, data: int, size: int, flags: int) -> None:
        sizes.append(size)
        found.parallel(function, data, size, flags)

    monkeypatch.setattr(threads, "openmp", lambda: found._replace(parallel=spy))
    return sizes


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize(("instance", "workload"), CASES, ids=case_ids)
def test_torchs_number_of_threads_is_obeyed(instance: str, workload: Workload, count: int, teams: list[int]) -> None:
    workload, inputs, _ = prepared(instance, workload.family)
    with_threads(count)
    run(workload, inputs, instance)
    assert teams
    assert set(teams) == {count}


@pytest.mark.parametrize(("instance", "workload"), CASES, ids=case_ids)
def test_one_thread_starts_no_team(instance: str, workload: Workload, teams: list[int]) -> None:
    workload, inputs, _ = prepared(instance, workload.family)
    with_threads(1)
    run(workload, inputs, instance)
    assert teams == []


def test_a_small_input_starts_no_team(teams: list[int]) -> None:
    with_threads(2)
    fusednorm.group_norm(torch.randn(2, 8, 9), 4)
    assert teams == []


def test_the_work_of_rows_and_activations_counts(teams: list[int]) -> None:
    """Planes of 3 elements take longer to begin than to read, and an exponential longer than its element."""
    with_threads(2)
    x = torch.randn(60, 512, dtype=torch.bfloat16)
    fusednorm.layer_norm(x, (512,))
    assert teams == []
    fusednorm.layer_norm(x, (512,), activation="gelu")
    assert teams == [2]
    fusednorm.instance_norm(torch.randn(17, 603, 3, dtype=torch.bfloat16))
    assert teams == [2, 2]


def test_own_threads_are_no_more_than_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "openmp", lambda: None)
    monkeypatch.setattr(threads, "_pool", None)
    workload, inputs, _ = prepared("cpu.planes", "group_norm")
    before = set(threading.enumerate())
    with_threads(3)
    for _ in range(5):
        run(workload, inputs, "cpu.planes")
    assert len(set(threading.enumerate()) - before) <= 2


# --- shares of the tasks ---


def claims_of(
    tasks: int, count: int, share: int = 0, meet: threading.Barrier | None = None, work: int = 1 << 30
) -> list[list[int]]:
    """(worker, start, stop) of each share of a loop in the order of the claims. With ``meet`` each worker waits there
    in its first share."""
    claims: list[list[int]] = []
    met = set[int]()

    @ctypes.CFUNCTYPE(None, *[ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64])
    def kernel(_: int, start: int, stop: int, worker: int) -> None:
        claims.append([worker, start, stop])
        if meet is not None and worker not in met:
            met.add(worker)
            meet.wait(30)

    address = ctypes.cast(kernel, ctypes.c_void_p).value or 0
    loop = threads.Loop([(address, 1)], tasks, work, share)
    threads.Program([loop]).run(Frame(template({})), count)
    return claims


@pytest.mark.parametrize("work", [1 << 18, 1 << 30])
@pytest.mark.parametrize("share", [0, 1, 3])
@pytest.mark.parametrize(("tasks", "count"), [(1, 2), (2, 3), (7, 2), (64, 3), (100, 4), (5, 8), (33, 1)])
def test_every_task_is_done_once(tasks: int, count: int, share: int, work: int, team: str) -> None:
    done = [task for _, start, stop in claims_of(tasks, count, share, work=work) for task in range(start, stop)]
    assert sorted(done) == list(range(tasks))


@pytest.mark.parametrize(("work", "shares"), [((1 << 20) - 1, 1), (1 << 20, 4)])
def test_each_thread_takes_its_part_of_a_small_loop_at_once(work: int, shares: int, team: str) -> None:
    assert len(claims_of(32, 2, work=work)) == 2 * shares


@pytest.mark.parametrize(
    ("rows", "dtype", "backward", "serial"),
    [
        (128, torch.float32, False, True),
        (192, torch.float32, False, False),
        (128, torch.bfloat16, False, True),
        (160, torch.bfloat16, False, False),  # which takes as long as float32
        (96, torch.float32, True, True),
        (128, torch.float32, True, False),
    ],
)
def test_a_small_loop_over_rows_is_one_threads(rows: int, dtype: torch.dtype, backward: bool, serial: bool) -> None:
    norm, x, given = norm_of("layer_norm", 1), torch.ones(rows, 512, dtype=dtype), torch.ones(rows)
    problem = forward_problem(norm, Operands(x))
    if backward:
        problem = backward_problem(norm, BackwardOperands(x, x, given, given))
    assert choose(problem).plan(problem).program.serial is serial


@pytest.mark.parametrize(("shape", "serial"), [((1, 160, 16, 16), True), ((1, 256, 20, 20), False)])
def test_a_small_evaluation_is_one_threads(shape: tuple[int, ...], serial: bool) -> None:
    given = torch.ones(shape[1])
    problem = forward_problem(norm_of("batch_norm", training=False), Operands(torch.ones(shape), mean=given, var=given))
    assert choose(problem).plan(problem).program.serial is serial


@pytest.mark.parametrize(("tasks", "count"), [(8, 2), (9, 2), (100, 3)])
def test_each_thread_begins_with_its_own_range(tasks: int, count: int, team: str) -> None:
    claims = claims_of(tasks, count, meet=threading.Barrier(count))
    first = {worker: next(start for each, start, _ in claims if each == worker) for worker in range(count)}
    assert first == {worker: worker * tasks // count for worker in range(count)}


def test_a_thread_takes_the_range_of_one_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "openmp", lambda: None)
    monkeypatch.setattr(threads, "_helpers", lambda count: Nobody())
    done = [task for _, start, stop in claims_of(30, 4) for task in range(start, stop)]
    assert done == list(range(30))


class Nobody:
    """Threads of which none comes."""

    def submit(self, *_: object) -> None:
        raise RuntimeError


# --- the room that each worker has ---


@pytest.fixture
def third(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """One thread does each loop that three share, as the third of them: the plan of each loop in which workers have
    room, and whether the room of the other two was left alone."""
    plans, seen = dict[int, base.Plan](), list[tuple[str, bool]]()
    make = base.Plan.frame

    def frame_of(plan: base.Plan, count: int) -> Frame:
        frame = make(plan, count)
        plans[frame.address] = plan
        return frame

    def alone(frame: Frame, count: int, share: int, loop: int) -> None:
        plan = plans[frame.address]
        block = torch.empty(0, dtype=torch.uint8) if frame.block is None else frame.block.view(torch.uint8)
        others = block[plan.room : plan.room + 2 * plan.room_per_thread]
        others.fill_(165)
        threads._HEAD.pack_into(frame.words, 0, frame.clear_claims(count), 2, share, loop, count, 0)
        threads._drive()[0](frame.address)
        if plan.room_per_thread:
            seen.append((f"{type(plan).__name__} {plan.module}", bool((others == 165).all())))

    monkeypatch.setattr(dispatch, "_plans", {})
    monkeypatch.setattr(base.Plan, "frame", frame_of)
    monkeypatch.setattr(threads, "_parallel", alone)
    return seen


@pytest.mark.parametrize(
    ("plan", "workload"),
    [
        ("PlanesBackward planes", Workload("group_norm", (6, 24, 4201), 8)),
        ("PlanesBackward planes", Workload("instance_norm", (3, 3000, 5, 5))),  # by the kernel of tiles
        ("SampleRowsBackward rows", Workload("group_norm", (20, 512, 3, 3), 32)),
        ("SampleRowsBackward rows", Workload("group_norm", (400, 60, 4, 4), 1, layout="nhwc", activation="silu")),
        ("PointRowsBackward point_rows", Workload("group_norm", (500, 600), 2, modulated=True)),
        ("RowsBackward rows", Workload("layer_norm", (2000, 75), 1)),  # sixteen together
        ("RowsBackward rows", Workload("layer_norm", (700, 1000), 1)),
        ("RowsBackward rows", Workload("layer_norm", (700, 1000), 1, "bfloat16")),  # with parameters of its own
        ("SlabsBackward slabs_backward", Workload("group_norm", (64, 64, 9, 9), 8, layout="nhwc")),
    ],
)
def test_a_worker_writes_in_its_own_room(plan: str, workload: Workload, third: list[tuple[str, bool]]) -> None:
    workload = replace(workload, activation="silu")
    inputs = draw(workload)
    with_threads(1)
    expected = run(workload, inputs)
    assert third == []
    with_threads(3)
    assert differing(run(workload, inputs), expected) == []
    assert (plan, True) in third
    assert [name for name, alone in third if not alone] == []


@pytest.mark.parametrize(
    ("plan", "shape", "dtype", "call"),
    [
        (
            "ColumnsBackward columns", (6, 32, 40, 40), torch.float32,
            lambda x: fusednorm.layer_norm(x, (32,), channel_dim=1, activation="silu"),
        ),
        (
            "PlanesSplitSumBackward planes", (1, 3, 150_001), torch.float32,
            lambda x: fusednorm.group_norm(x, 1, post_add=x.detach(), activation="silu"),
        ),
        (
            "PlanesSumForward sums", (6, 24, 4201), torch.bfloat16,
            lambda x: fusednorm.group_norm(x.detach(), 8, pre_add=x.detach()) * x,
        ),
        (
            "RowsQuantizedForward rows", (400, 1000), torch.float32,
            lambda x: fusednorm.layer_norm(x.detach(), (1000,), out_dtype=torch.int8)[0] * x,
        ),
    ],
)  # fmt: skip
def test_a_worker_writes_in_its_own_room_what_only_some_calls_have(
    plan: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    call: Callable[[Tensor], Tensor],
    third: list[tuple[str, bool]],
) -> None:
    x = torch.randn(shape, dtype=dtype, requires_grad=True)

    def results() -> tuple[Tensor, Tensor]:
        y = call(x)
        return y, torch.autograd.grad(y, x, torch.ones_like(y))[0]

    with_threads(1)
    expected = results()
    with_threads(3)
    assert all(map(same_bits, results(), expected))
    assert (plan, True) in third
    assert [name for name, alone in third if not alone] == []


# --- many callers ---


def test_python_threads_call_the_same_problem_at_once(team: str) -> None:
    prepared("cpu.planes", "group_norm")
    assert together([("cpu.planes", "group_norm")] * 4, repeats=6) == []


def test_python_threads_call_different_problems_at_once(team: str) -> None:
    calls = [(name, workload.family) for name, workload in CASES]
    for call in calls:
        prepared(*call)
    assert together(calls, repeats=3) == []


def together(calls: list[tuple[str, str]], repeats: int) -> list[str]:
    """Each call in a thread of its own, all at once; the names of results with other bits than one thread gives."""
    start = threading.Barrier(len(calls))

    def work(instance: str, family: str) -> list[str]:
        workload, inputs, expected = prepared(instance, family)
        with_threads(2)  # OpenMP keeps the number per thread
        start.wait()
        return [name for _ in range(repeats) for name in differing(run(workload, inputs, instance), expected)]

    with ThreadPoolExecutor(len(calls)) as pool:
        return [name for names in pool.map(lambda call: work(*call), calls) for name in names]


def test_the_first_calls_of_a_process_come_from_many_threads() -> None:
    """Nothing that is made at the first use, the driver or a kernel, is made twice."""
    found = fresh_process(
        """
        import json, sys, threading, torch, fusednorm
        from fusednorm.backends.cpu import threads
        sys.setswitchinterval(1e-5)
        x, faults, start = torch.randn(3, 24, 4201), [], threading.Barrier(8)
        torch.set_num_threads(2)

        def work(i):
            torch.set_num_threads(2)
            start.wait()
            try:
                threads._drive() if i % 2 else fusednorm.group_norm(x, 8)
            except BaseException as error:
                faults.append(repr(error))

        workers = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        [worker.start() for worker in workers]
        [worker.join() for worker in workers]
        print(json.dumps(faults))
        """
    )
    assert found == []


def test_many_threads_load_a_new_kernel_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiled: list[compiler.Kernel] = []
    compile_kernel = compiler._compile

    def spy(kernel: compiler.Kernel) -> tuple[str, bytes]:
        compiled.append(kernel)
        return compile_kernel(kernel)

    monkeypatch.setenv("FUSEDNORM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiler, "_loaded", {})
    monkeypatch.setattr(compiler, "_compile", spy)
    kernel = compiler.Kernel("slabs_backward", "recall", "float32")
    start = threading.Barrier(6)

    def work(_: int) -> int:
        start.wait()
        return compiler.load(kernel)

    with ThreadPoolExecutor(6) as pool:
        addresses = list(pool.map(work, range(6)))
    assert compiled == [kernel]
    assert len(set(addresses)) == 1


# --- forks ---


def same_in_this_process(instance: str, family: str) -> bool:
    workload, inputs, expected = prepared(instance, family)
    return differing(run(workload, inputs, instance), expected) == []


@needs_fork
@pytest.mark.parametrize(("instance", "workload"), CASES, ids=case_ids)
def test_a_forked_child_computes_the_same_bits(instance: str, workload: Workload) -> None:
    prepared(instance, workload.family)
    with_threads(2)
    assert same_in_this_process(instance, workload.family)
    assert in_child(lambda: same_in_this_process(instance, workload.family))
    assert same_in_this_process(instance, workload.family), "the parent after the fork"


@needs_fork
def test_a_child_of_a_child_computes_the_same_bits() -> None:
    prepared("cpu.planes", "group_norm")
    with_threads(2)

    def work() -> bool:
        return same_in_this_process("cpu.planes", "group_norm") and in_child(
            lambda: same_in_this_process("cpu.planes", "group_norm")
        )

    assert in_child(work)


@needs_fork
def test_a_fork_amid_calls_of_other_threads(team: str) -> None:
    workload, inputs, _ = prepared("cpu.planes", "group_norm")
    with_threads(2)
    stop = threading.Event()

    def keep_calling() -> None:
        with_threads(2)
        while not stop.is_set():
            run(workload, inputs, "cpu.planes")

    callers = [threading.Thread(target=keep_calling) for _ in range(2)]
    for caller in callers:
        caller.start()
    try:
        assert all(in_child(lambda: same_in_this_process("cpu.planes", "group_norm")) for _ in range(6))
    finally:
        stop.set()
        for caller in callers:
            caller.join()


@needs_fork
def test_a_fork_amid_a_compilation_in_another_thread(tmp_path: Path) -> None:
    """The compiler's locks, ours and those of Numba and LLVM, must be free in the child."""
    found = fresh_process(
        """
        import json, os, signal, threading, time
        from numba.core.compiler_lock import global_compiler_lock
        from fusednorm.backends.cpu import compiler

        compile_kernel, inside = compiler._compile, threading.Event()

        def slowly(kernel):
            with global_compiler_lock:
                inside.set()
                time.sleep(0.5)
                return compile_kernel(kernel)

        compiler._compile = slowly
        kernels = [compiler.Kernel("slabs_backward", "recall", dtype) for dtype in ("float32", "float64")]
        other = threading.Thread(target=compiler.load, args=kernels[:1])
        other.start()
        inside.wait()
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            compiler.load(kernels[1])
            os._exit(0)
        other.join()
        print(json.dumps(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
        """,
        FUSEDNORM_CACHE_DIR=tmp_path,
    )
    assert found == 0


class Normalized(Dataset[torch.Tensor]):
    """Items that are normalized in the worker."""

    def __init__(self, items: torch.Tensor) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> torch.Tensor:
        return fusednorm.group_norm(self.items[index, None], 8)[0]


@needs_fork
def test_data_loader_workers_after_use() -> None:
    items = torch.randn(6, 24, 4201)
    with_threads(2)
    normalized = Normalized(items)
    expected = torch.stack([normalized[index] for index in range(len(items))])
    loader = DataLoader(normalized, batch_size=2, num_workers=2, multiprocessing_context="fork")
    assert same_bits(torch.cat(list(loader)), expected)


# --- the end of a call, and of the process ---


def test_an_interrupted_call_waits_for_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """They write to memory that the caller frees; a KeyboardInterrupt may arrive in the main thread alone."""
    running = threading.Event()
    finished: list[bool] = []

    def drive(data: int) -> None:
        if threading.current_thread() is threading.main_thread():
            running.wait()
            raise KeyboardInterrupt
        running.set()
        time.sleep(0.3)
        finished.append(True)

    monkeypatch.setattr(threads, "openmp", lambda: None)
    monkeypatch.setattr(threads, "_drive", lambda: (drive, 0))
    with_threads(2)
    with pytest.raises(KeyboardInterrupt):
        fusednorm.group_norm(torch.randn(3, 24, 4201), 8)
    assert finished == [True]


def test_a_call_interrupted_as_it_starts_threads_waits_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads that it has started write to memory that the caller frees."""
    finished: list[bool] = []

    def drive(data: int) -> None:
        time.sleep(0.3)
        finished.append(True)

    pool = ThreadPoolExecutor(1)
    starts = iter([lambda: pool])

    def team(count: int) -> ThreadPoolExecutor:
        start = next(starts, None)
        if start is None:
            raise KeyboardInterrupt
        return start()

    monkeypatch.setattr(threads, "openmp", lambda: None)
    monkeypatch.setattr(threads, "_drive", lambda: (drive, 0))
    monkeypatch.setattr(threads, "_helpers", team)
    with_threads(3)
    with pytest.raises(KeyboardInterrupt):
        fusednorm.group_norm(torch.randn(3, 24, 4201), 8)
    assert finished == [True]
    pool.shutdown()


AT_THE_END = """
    import atexit, json, os, threading, torch, fusednorm
    from fusednorm.backends.cpu import threads
    if os.environ["TEAM"] == "own threads":
        threads.openmp = lambda: None
    torch.set_num_threads(2)
    x = torch.randn(3, 24, 4201)
    expected = fusednorm.group_norm(x, 8)
    done = []

    def later():
        threading.main_thread().join()
        done.append(torch.equal(fusednorm.group_norm(x, 8), expected))

    def at_exit():
        done.append(torch.equal(fusednorm.group_norm(x, 8), expected))
        print(json.dumps(done), flush=True)

    atexit.register(at_exit)
    threading.Thread(target=later).start()
"""


def test_calls_after_the_main_thread_has_ended(team: str) -> None:
    """Python starts no threads then, but a thread that outlives the main one may call, and a function of atexit."""
    assert fresh_process(AT_THE_END, TEAM=team) == [True, True]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_what_a_worker_keeps_is_its_own(dtype: torch.dtype) -> None:
    """The backward of 16-bit inputs keeps dz of a unit between its passes, in memory that each worker has."""
    x, grad_output = torch.randn(8, 64, 48, 48).to(dtype), torch.randn(8, 64, 48, 48).to(dtype)
    weight, bias = torch.randn(64), torch.randn(64)
    _, mean, rstd = ops.group_norm_forward(x, 32, weight, bias, 1e-5, activation="silu")
    before = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3, 2):
            torch.set_num_threads(count)
            results.append(ops.group_norm_backward(grad_output, x, mean, rstd, 32, weight, bias, activation="silu"))
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        assert all(torch.equal(one, other) for one, other in zip(result, results[0], strict=True))


#: Calls whose workers convert weight and bias of rows for themselves: alone, of one of the two, behind what they keep.
CONVERTING: dict[str, Callable[[dict[str, Tensor]], Sequence[Tensor]]] = {
    "layer_norm": lambda t: [fusednorm.layer_norm(t["x"], (1500,), t["w"], t["b"])],
    "layer_norm of float32": lambda t: [fusednorm.layer_norm(t["x"].float(), (1500,), t["w"], t["b"].double())],
    "a weight alone": lambda t: [fusednorm.layer_norm(t["x"], (1500,), t["w"])],
    "a bias alone": lambda t: [fusednorm.layer_norm(t["x"], (1500,), None, t["b"])],
    "rms_norm": lambda t: [fusednorm.rms_norm(t["x"], (1500,), t["w"])],
    "kept dz": lambda t: [fusednorm.layer_norm(t["x"], (1500,), t["w"], t["b"], activation="gelu")],
    "a sum": lambda t: fusednorm.rms_norm(t["x"], (1500,), t["w"], pre_add=t["h"], return_sum=True),
    "a sum that nobody keeps": lambda t: [fusednorm.rms_norm(t["x"], (1500,), t["w"], pre_add=t["h"])],
    "group_norm": lambda t: [fusednorm.group_norm(t["x"], 3, t["w"], t["b"], activation="silu")],
}


@pytest.mark.parametrize("name", CONVERTING)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_each_worker_converts_the_parameters_of_rows(name: str, dtype: torch.dtype) -> None:
    """With the same results as those of parameters that need no conversion, by any number of threads."""
    t = {key: torch.randn(301, 1500).to(dtype) for key in ("x", "h")}
    t |= {key: torch.randn(1500).to(dtype) for key in ("w", "b")}

    def results(parameters: torch.dtype, count: int, wanted: str) -> list[Tensor]:
        with_threads(count)
        leaves = {key: one.to(parameters) if key in "wb" else one for key, one in t.items()}
        leaves = {key: one.detach().requires_grad_(key in wanted) for key, one in leaves.items()}
        outputs = CONVERTING[name](leaves)
        if not wanted:
            return list(outputs)
        into = [leaves[key] for key in wanted]
        found = torch.autograd.grad(outputs, into, [one.cos() for one in outputs], allow_unused=True)
        return [one for one in (*outputs, *found) if one is not None]

    for wanted in ("", "xh"):
        expected = results(torch.float32, 1, wanted)
        for count in (1, 2, 3):
            found = results(dtype, count, wanted)
            assert all(torch.equal(one, right) for one, right in zip(found, expected, strict=True)), (wanted, count)
    expected = results(dtype, 1, "xwb")  # the gradients of parameters are rounded to their dtype
    for count in (2, 3):
        found = results(dtype, count, "xwb")
        assert all(torch.equal(one, right) for one, right in zip(found, expected, strict=True)), count


def test_converted_rows_are_quantized_by_their_own_scale() -> None:
    x, weight = torch.randn(301, 1500).bfloat16(), torch.randn(1500).bfloat16()
    with_threads(1)
    expected = fusednorm.rms_norm(x, (1500,), weight.float(), 1e-6, out_dtype=torch.int8)
    for count in (1, 2, 3):
        with_threads(count)
        found = fusednorm.rms_norm(x, (1500,), weight, 1e-6, out_dtype=torch.int8)
        assert all(torch.equal(one, right) for one, right in zip(found, expected, strict=True))


@pytest.mark.parametrize("parameters", [torch.bfloat16, torch.float32], ids=str)
def test_which_rows_have_converted_parameters(parameters: torch.dtype) -> None:
    """Those of another dtype than the computation's: by each worker, not in a loop before that of the rows."""
    x, weight = torch.randn(301, 1500).bfloat16(), torch.randn(1500).to(parameters)
    plan = dispatch.forward_plan(norm_of("rms_norm", 1, eps=1e-6), Operands(x, weight))
    assert isinstance(plan, RowsForward)
    assert [loop.prepare != 0 for loop in plan.program.loops] == [parameters != torch.float32]
    assert (plan.room_per_thread > 0) == (parameters != torch.float32)
