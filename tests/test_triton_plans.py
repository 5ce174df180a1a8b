"""What the plans of the Triton backend launch, and where, seen without a GPU; their results are the interpreter's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from triton_support import Made

from fusednorm.backends.triton import instances
from fusednorm.backends.triton.config.kinds import PassConfig, RowsBackwardConfig, TilesConfig
from fusednorm.backends.triton.config.tiles import passes_for, tiled
from fusednorm.backends.triton.instances import COLUMNS, FLAT, HELD, MOST_HELD, ROWS, TILES, WHOLE
from fusednorm.backends.triton.launch import Launch
from fusednorm.backends.triton.plans import base
from fusednorm.formats import Quantized
from fusednorm.instance import Instance
from fusednorm.norm import Family, Norm, norm_of
from fusednorm.operands import BackwardOperands, Operands, Sums
from fusednorm.private.triton_names import DEPENDENT_LAUNCH
from fusednorm.problem import Problem
from fusednorm.problems import (
    backward_direction,
    backward_problem,
    forward_problem,
    sum_backward_problem,
    sum_forward_problem,
)

# --- the samples of batch_norm as one ---


def _batch_norm(shape: tuple[int, ...] = (4, 8, 5, 6), modulated: bool = False) -> Problem:
    x = torch.empty(shape, device="meta")
    if x.dim() == 4:
        x = x.to(memory_format=torch.channels_last)
    scale = torch.empty(shape[:2], device="meta") if modulated else None
    return backward_problem(norm_of("batch_norm"), BackwardOperands(x, x, x, x, None, None, scale, scale))


def test_samples_that_follow_at_the_step_of_positions_are_one() -> None:
    one = _batch_norm().folded
    assert (one.view.samples, one.view.spatial, one.view.channels) == (1, 120, 8)
    for layout in (one.layout, one.output_layout, one.grad_layout):
        assert layout is not None
        assert (layout.spatial, layout.channel) == (8, 1)


def test_samples_of_one_position_are_one_at_any_step() -> None:
    """Each tensor keeps its own step between samples, as that of the positions."""
    problem = _batch_norm((4, 8))
    assert problem.grad_layout is not None
    one = replace(problem, grad_layout=replace(problem.grad_layout, sample=24)).folded
    assert (one.view.samples, one.view.spatial) == (1, 4)
    assert [layout.spatial for layout in (one.layout, one.output_layout, one.grad_layout) if layout] == [8, 8, 24]


@pytest.mark.parametrize("name", ["layout", "output_layout", "grad_layout"])
def test_samples_with_a_gap_between_them_stay_apart(name: str) -> None:
    """In any of the three tensors."""
    problem = _batch_norm()
    layout = getattr(problem, name)
    apart = replace(problem, **{name: replace(layout, sample=layout.sample + 8)})
    assert apart.folded is apart


@pytest.mark.parametrize("name", ["layout", "output_layout", "grad_layout"])
def test_planes_with_a_gap_between_them_make_no_rows(name: str) -> None:
    """In any of the three tensors."""
    problem = _batch_norm((4, 8, 5))
    layout = getattr(problem, name)
    assert problem.spread is not None
    assert replace(problem, **{name: replace(layout, channel=layout.channel + 8)}).spread is None


def test_tiles_are_those_of_the_view_that_the_plan_takes() -> None:
    """Samples that follow one another share a program's tiles; samples apart have programs of their own."""
    problem = _batch_norm((64, 8, 5, 6))
    assert problem.layout.sample == 30 * problem.layout.spatial
    together = passes_for(problem.folded).reduction
    apart = passes_for(replace(problem, layout=replace(problem.layout, sample=1000)).folded).reduction
    assert together.tiles * together.positions > 30
    assert (apart.tiles - 1) * apart.positions < 30


def test_what_differs_between_samples_keeps_them_apart() -> None:
    x = torch.empty(4, 8, 5, 6, device="meta").to(memory_format=torch.channels_last)
    for problem in (
        _batch_norm(modulated=True),
        forward_problem(norm_of("instance_norm"), Operands(x)),
        forward_problem(norm_of("batch_norm"), Operands(x.contiguous())),
    ):
        assert problem.folded is problem


# --- what an instance refuses ---


def test_rows_refuse_a_norm_that_returns_a_variance(monkeypatch: pytest.MonkeyPatch) -> None:
    """instance_norm of one channel and position is made of rows, whose kernels keep no variance."""
    monkeypatch.setattr(instances, "_common", lambda problem: None)
    problem = forward_problem(norm_of("instance_norm"), Operands(torch.empty(3, 1, 1, device="meta")))
    assert "variance" in (ROWS.supports(problem) or "")


def _forward(
    family: Family,
    shape: tuple[int, ...],
    groups_or_dims: int = 0,
    last: bool = False,
    dtype: torch.dtype = torch.float32,
    **of: Any,
) -> Problem:
    x = torch.empty(shape, dtype=dtype, device="meta")
    x = x.to(memory_format=torch.channels_last) if last else x
    return forward_problem(norm_of(family, groups_or_dims, **of), Operands(x))


def _summed(family: Family, shape: tuple[int, ...], groups_or_dims: int = 0) -> Problem:
    x = torch.empty(shape, device="meta")
    sums = Sums(pre_add=x, post_add=x)
    return sum_forward_problem(norm_of(family, groups_or_dims), Operands(x), sums, True)


def _of_numbers(family: Family, shape: tuple[int, ...], groups_or_dims: int = 0) -> Problem:
    """A backward that makes the gradient of a pre_add (N, C)."""
    x = torch.empty(shape, device="meta")
    operands = BackwardOperands(x, x, x, x)
    return sum_backward_problem(norm_of(family, groups_or_dims), operands, "backward", None, False, grad_numbers=True)


def _apart(problem: Problem, name: str = "layout", **further: int) -> Problem:
    """The problem with one tensor's steps so much longer."""
    of: Any = problem if name in ("layout", "output_layout") else problem.added
    layout = getattr(of, name)
    longer = replace(of, **{name: replace(layout, **{step: getattr(layout, step) + n for step, n in further.items()})})
    return longer if of is problem else replace(problem, added=longer)


@pytest.mark.parametrize(
    ("instance", "problem", "words"),
    [
        (WHOLE, _apart(_forward("group_norm", (2, 8, 4, 4), 2), channel=8), "do not follow"),
        (WHOLE, _apart(_forward("group_norm", (2, 8, 4, 4), 2), "output_layout", channel=8), "do not follow"),
        (WHOLE, _apart(_summed("group_norm", (2, 8, 4, 4), 2), "pre_layout", channel=8), "do not follow"),
        (WHOLE, _apart(_summed("group_norm", (2, 8, 4, 4), 2), "post_layout", channel=8), "do not follow"),
        (ROWS, _apart(_forward("layer_norm", (5, 24), 1), channel=1), "do not follow"),
        (ROWS, _apart(_forward("layer_norm", (5, 24), 1), "output_layout", channel=1), "do not follow"),
        (ROWS, _apart(_summed("layer_norm", (5, 24), 1), "pre_layout", channel=1), "do not follow"),
        (ROWS, _apart(_summed("layer_norm", (5, 24), 1), "post_layout", channel=1), "do not follow"),
        (ROWS, _forward("group_norm", (5, 24), 3), "takes rows"),
        (ROWS, _apart(_forward("instance_norm", (5, 24, 9)), sample=8), "takes rows"),
        (ROWS, _apart(_forward("instance_norm", (5, 24, 9)), "output_layout", sample=8), "takes rows"),
        (ROWS, _forward("instance_norm", (1, 8, 3, 3), last=True), "takes rows"),
        (ROWS, replace(_forward("layer_norm", (5, 24), 1), quantized=Quantized("int8", True)), "until its scale"),
        (TILES, replace(_forward("layer_norm", (5, 24), 1), quantized=Quantized("int8", False)), "8 bits"),
        (HELD, replace(_forward("layer_norm", (5, 24), 1), quantized=Quantized("int8", False)), "8 bits"),
        (COLUMNS, replace(_forward("layer_norm", (2, 8, 3, 3)), quantized=Quantized("int8", False)), "8 bits"),
        (COLUMNS, _forward("layer_norm", (2, 8, 3, 3), training=False), "single positions"),
        (FLAT, _forward("group_norm", (2, 8, 3, 3), 2, training=False), "the samples have their own"),
        (HELD, _forward("instance_norm", (2, 3, MOST_HELD), dtype=torch.float64), "holds units"),
        (HELD, _of_numbers("group_norm", (2, 8, 3, 3), 2), "no gradient of a number"),
        (TILES, _of_numbers("batch_norm", (2, 8, 3, 3)), "no gradient of a number"),
        (TILES, _batch_norm((1, 8)), "only the reference"),
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "name", ""),
)
def test_an_unsupported_problem_is_told_why(
    instance: Instance, problem: Problem, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instances, "_elsewhere", lambda problem: None)
    assert words in (instance.supports(problem) or "")


# --- statistics that nobody wants ---


@pytest.mark.parametrize("instance", [WHOLE, ROWS, TILES])
def test_statistics_that_nobody_wants_have_no_memory(instance: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch needs none, nor do tiles whose partials every program merges for itself."""
    monkeypatch.setattr(Launch, "__call__", lambda launch, *tensors: None)
    monkeypatch.setattr(instances, "_common", lambda problem: None)
    operands = Operands(torch.empty(4, 64, device="meta"))
    results = instance.plan(forward_problem(norm_of("layer_norm", 1), operands))(operands, False)
    assert (results.mean, results.rstd, results.var) == (None,) * 3


def test_given_statistics_of_nothing_are_widened() -> None:
    """The variance and eps have a sum that float16 does not hold."""
    mean, var = torch.zeros(8, dtype=torch.float16), torch.full((8,), 60000.0, dtype=torch.float16)
    operands = Operands(torch.empty(0, 8, 5, dtype=torch.float16), mean=mean, var=var)
    norm = norm_of("batch_norm", eps=1e4, training=False)
    results = TILES.plan(forward_problem(norm, operands))(operands)
    torch.testing.assert_close(results.rstd, torch.full((8,), 70000.0).rsqrt())


# --- how many programs ---


@pytest.mark.parametrize("rows", [1, 7, 64, 1000, 4099])
def test_a_program_has_units_of_its_own(rows: int) -> None:
    """As few programs as take all units."""
    x = torch.empty(rows, 48, device="meta")
    launch = WHOLE.plan(forward_problem(norm_of("layer_norm", 1), Operands(x))).launch
    assert (launch.programs - 1) * launch.constants["BLOCK_U"] < rows <= launch.programs * launch.constants["BLOCK_U"]


def test_each_pass_has_tiles_of_its_own() -> None:
    x = torch.empty(2, 8, 100, device="meta")
    norm, config = norm_of("group_norm", 2), TilesConfig(PassConfig(2, 16, 2, 1), PassConfig(4, 32, 1, 2))
    forward = TILES.plan(forward_problem(norm, Operands(x)), config)
    backward = TILES.plan(backward_problem(norm, BackwardOperands(x, x, x, x)), config)
    _, gradients = backward.prepare(False, False)
    reads, writes = config.reduction, config.output
    for launch, each in ((backward.reduce, reads), (forward.apply, writes), (gradients, writes)):
        assert (launch.constants["BLOCK_C"], launch.constants["BLOCK_S"]) == (each.channels, each.positions)
        assert launch.options["num_warps"] == each.warps
    # A group of one run of memory is one channel to the statistics.
    assert forward.moments.programs == 2 * 1 * -(-400 // 32)
    assert backward.reduce.programs == 2 * 4 * -(-100 // 32)
    assert forward.apply.programs == gradients.programs == 2 * 2 * -(-100 // 32)


# --- tensors of another device than the current one ---


class Devices:
    """A current device, as torch.cuda.device would set it, and the devices on which launches happened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, current: int) -> None:
        self.current, self.launched, self.entered = current, [], 0
        monkeypatch.setattr(base, "current_device", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "device", self.enter)
        monkeypatch.setattr(Launch, "__call__", lambda launch, *tensors: self.launched.append(self.current))
        monkeypatch.setattr(instances, "_common", lambda problem: None)

    @contextmanager
    def enter(self, device: torch.device) -> Iterator[None]:
        assert device.type == "meta"
        before, self.current = self.current, OWN
        self.entered += 1
        try:
            yield
        finally:
            self.current = before


#: What get_device() says of the tensors that stand in for a GPU's here.
OWN = torch.empty(0, device="meta").get_device()


@pytest.mark.parametrize("current", [OWN, OWN + 3])
@pytest.mark.parametrize(
    ("instance", "shape"), [(TILES, (4, 64)), (WHOLE, (4, 64)), (ROWS, (4, 64)), (ROWS, (4, 20000))]
)
def test_launches_happen_on_the_device_of_the_tensors(
    instance: Any, shape: tuple[int, ...], current: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = Devices(monkeypatch, current)
    x = torch.empty(shape, device="meta")
    weight = torch.empty(shape[-1], device="meta")
    norm, operands = norm_of("layer_norm", 1), Operands(x, weight, weight)
    plan = instance.plan(forward_problem(norm, operands))
    plan.on_gpu = True
    results = plan(operands)
    if instance is not WHOLE:
        given = BackwardOperands(x, x, results.mean, results.rstd, weight, weight)
        plan = instance.plan(backward_problem(norm, given))
        plan.on_gpu = True
        plan(given, (True, True, True, False, False))
    assert devices.launched
    assert set(devices.launched) == {OWN}
    assert devices.current == current
    assert (devices.entered > 0) is (current != OWN)  # entering costs the host 2 us


@pytest.mark.parametrize("current", [OWN, OWN + 3])
def test_memory_of_the_caller_is_used_on_any_device(current: int, monkeypatch: pytest.MonkeyPatch) -> None:
    Devices(monkeypatch, current)
    x = torch.empty(4, 8, 5, 6, device="meta")
    out, mean_out, rstd_out = torch.empty_like(x), x.new_empty(4, 2), x.new_empty(4, 2)
    norm, operands = norm_of("group_norm", 2), Operands(x)
    plan = TILES.plan(forward_problem(norm, operands))
    plan.on_gpu = True
    results = plan(operands, False, out, mean_out, rstd_out)
    assert (results.output is out, results.mean is mean_out, results.rstd is rstd_out) == (True,) * 3
    given = BackwardOperands(x, x, mean_out, rstd_out)
    plan = TILES.plan(backward_problem(norm, given))
    plan.on_gpu = True
    assert plan(given, (True, False, False, False, False), out).input is out


def test_memory_is_allocated_on_the_device_of_the_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU by the function that takes the least of the host."""
    monkeypatch.setattr(base, "empty_strided_cuda", allocate := object())
    x = torch.empty(4, 8, 5, 6, device="meta")
    problem = forward_problem(norm_of("group_norm", 2), Operands(x))
    assert base.Plan(problem).workspace(3).device == x.device
    assert base.Plan(replace(problem, device="cuda")).allocate is allocate


# --- what a device can do ---


@pytest.mark.parametrize(
    ("available", "hip", "interpret", "capability", "abilities"),
    [
        pytest.param(True, None, "", (9, 0), (True, True, 3), id="Hopper"),
        pytest.param(True, None, "0", (12, 0), (True, True, 3), id="after Hopper"),
        pytest.param(True, None, "", (8, 9), (True, False, 3), id="before Hopper"),
        pytest.param(True, "7.1", "", (9, 4), (False, False, 2), id="AMD"),
        pytest.param(True, None, "1", (9, 0), (False, False, 2), id="the interpreter"),
        pytest.param(False, None, "", (9, 0), (False, False, 2), id="no GPU"),
    ],
)
def test_abilities_of_a_device(
    available: bool,
    hip: str | None,
    interpret: str,
    capability: tuple[int, int],
    abilities: tuple[bool, bool, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    assert (base.approximates(), base.overlaps(), base.stages(3)) == abilities
    assert base.stages(1) == 1


@pytest.mark.parametrize(("second", "overlaps"), [((9, 0), True), ((10, 0), True), ((8, 0), False)])
def test_kernels_start_early_where_all_devices_can(
    second: tuple[int, int], overlaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan of one runs on another."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=0: ((9, 0), second)[device])
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setenv("TRITON_INTERPRET", "")
    assert base.overlaps() is overlaps


# --- how many launches a call has, each of which starts before the one before it has ended ---

#: A problem, what its backward wants, and the launches of a forward and of a backward.
LAUNCHES: list[tuple[Any, Any, tuple[int, ...], bool, tuple[bool, ...], int, int]] = [
    (TILES, norm_of("group_norm", 2), (2, 8, 64), True, (True,) * 5, 2, 2),
    (TILES, norm_of("group_norm", 2), (4096, 8, 64), True, (True,) * 5, 3, 4),
    (TILES, norm_of("batch_norm", training=False), (2, 8, 64), True, (True,) * 5, 1, 3),
    (TILES, norm_of("batch_norm", training=False), (2, 8, 64), True, (True, *(False,) * 4), 1, 1),
    (TILES, norm_of("group_norm", 2), (2, 8, 1 << 12), True, (True,) * 5, 2, 2),
    (TILES, norm_of("group_norm", 2), (2, 8, 1 << 20), True, (True,) * 5, 2, 3),
    (TILES, norm_of("batch_norm"), (1024, 8, 64), True, (True,) * 5, 3, 3),
    (ROWS, norm_of("layer_norm", 1), (4, 64), False, (True, True, True, False, False), 1, 1),
    (ROWS, norm_of("layer_norm", 1), (4096, 64), False, (True, True, True, False, False), 1, 2),
    (
        ROWS, norm_of("layer_norm", 1), (40, 20000), False, (True, True, True, False, False),
        1, 3,
    ),
    (ROWS, norm_of("layer_norm", 1), (40, 20000), False, (False, True, True, False, False), 0, 2),
    (HELD, norm_of("instance_norm"), (4, 8, 64), True, (True,) * 5, 1, 1),
    (HELD, norm_of("instance_norm"), (400, 8, 64), True, (True,) * 5, 1, 2),
    (HELD, norm_of("instance_norm"), (4096, 8, 64), True, (True,) * 5, 1, 3),
    (HELD, norm_of("batch_norm"), (4, 8, 64), False, (True, True, True, False, False), 1, 1),
]  # fmt: skip


@pytest.mark.parametrize(("instance", "norm", "shape", "modulated", "wanted", "forward", "backward"), LAUNCHES)
def test_launches_of_a_call(
    instance: Any,
    norm: Norm,
    shape: tuple[int, ...],
    modulated: bool,
    wanted: Any,
    forward: int,
    backward: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched: list[bool] = []
    monkeypatch.setattr(base, "overlaps", lambda: True)
    monkeypatch.setattr(
        Launch, "__call__", lambda launch, *tensors: launched.append(launch.options.get(DEPENDENT_LAUNCH, False))
    )
    monkeypatch.setattr(instances, "_common", lambda problem: None)
    x = torch.empty(shape, device="meta")
    weight = torch.empty(shape[-1] if norm.row_family else shape[1], device="meta")
    scale = torch.empty(shape[:2], device="meta") if modulated else None
    operands = Operands(x, weight, weight, scale, scale)
    if not norm.training:
        operands.mean = operands.var = weight
    if forward:
        results = instance.plan(forward_problem(norm, operands))(operands)
        assert launched == [True] * forward
        launched.clear()
        mean, rstd = results.mean, results.rstd
    else:
        mean = rstd = torch.empty(shape[0], 1, device="meta")
    given = BackwardOperands(x, x, mean, rstd, weight, weight, scale, scale)
    instance.plan(backward_problem(norm, given, backward_direction(wanted)))(given, wanted)
    assert launched == [True] * backward


@pytest.mark.parametrize(
    ("instance", "family", "shape", "summed", "early"),
    [
        (ROWS, "layer_norm", (32768, 1024), False, False),
        (ROWS, "layer_norm", (32768, 1024), True, False),
        (ROWS, "rms_norm", (8192, 320), False, False),
        (ROWS, "rms_norm", (600, 800), False, True),  # 0.9 MB
        (ROWS, "layer_norm", (200, 4096), False, True),  # a step to a program
        (ROWS, "layer_norm", (200, 4096), True, True),
        (HELD, "layer_norm", (32768, 384), False, False),
        (HELD, "layer_norm", (1000, 384), False, True),
    ],
)
def test_programs_of_many_steps_start_on_empty_multiprocessors(
    instance: Any, family: Any, shape: tuple[int, ...], summed: bool, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next kernel starts early all the same."""
    monkeypatch.setattr(base, "overlaps", lambda: True)
    norm = norm_of(family, 1)
    x = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    weight, statistics = torch.empty(shape[-1], device="meta"), torch.empty(shape[0], 1, device="meta")
    given = BackwardOperands(x, x, statistics if norm.has_mean else None, statistics, weight, None)
    found = sum_backward_problem(norm, given, "backward", None, True) if summed else backward_problem(norm, given)
    launch = instance.plan(found).backward
    assert launch.options.get(DEPENDENT_LAUNCH, False) is early
    assert launch.constants["OVERLAP"] is True


@pytest.mark.parametrize(("programs", "early"), [(500, True), (250, False)])
def test_two_steps_are_many(programs: int, early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "overlaps", lambda: True)
    x, rstd = torch.empty(500, 4096, dtype=torch.bfloat16, device="meta"), torch.empty(500, 1, device="meta")
    problem = backward_problem(norm_of("rms_norm", 1), BackwardOperands(x, x, None, rstd))
    launch = ROWS.plan(problem, RowsBackwardConfig(1, 4, programs)).backward
    assert launch.programs == programs
    assert launch.options.get(DEPENDENT_LAUNCH, False) is early


# --- given statistics ---


class Recorder(TorchDispatchMode):
    """The names of the torch operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("statistics", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_given_statistics_cost_one_launch_and_no_operator_of_torch(
    dtype: torch.dtype, statistics: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[tuple[Tensor | None, ...]] = []
    monkeypatch.setattr(Launch, "__call__", lambda launch, *tensors: launched.append(tensors))
    x, weight, mean, var = (
        torch.empty(4, 8, 5, 6),
        torch.empty(8),
        torch.empty(8, dtype=dtype),
        torch.empty(8).to(dtype),
    )
    operands = Operands(x, weight, mean=mean, var=var)
    plan = TILES.plan(forward_problem(norm_of("batch_norm", training=False), operands))
    with Recorder() as called:
        results = plan(operands, statistics)
    assert called.names == ["empty_strided"] * (3 if statistics else 1)
    ((given_x, given_y, *_, given_mean, given_var),) = launched
    assert (given_x is x, given_y is results.output, given_mean is mean, given_var is var) == (True,) * 4
    saved = (results.mean, results.rstd, results.var)
    assert [None if tensor is None else tensor.dtype for tensor in saved] == [
        torch.float32 if statistics else None, torch.float32 if statistics else None, None,
    ]  # fmt: skip


# --- the positions of batch_norm as channels ---


def _spreads(x: torch.Tensor, training: bool = True) -> bool:
    return tiled(forward_problem(norm_of("batch_norm", training=training), Operands(x))).layout.order == "channels_last"


def test_short_planes_of_many_samples_are_spread() -> None:
    x = torch.empty(256, 32, 7, 7, dtype=torch.bfloat16, device="meta")
    assert _spreads(x)
    assert _spreads(x, training=False)
    assert _spreads(x[:, 8:])
    assert _spreads(torch.empty(64, 32, 1025, dtype=torch.bfloat16, device="meta"))
    odd = x.as_strided(x.shape, (1569, 49, 7, 1))
    few = torch.empty(8, 2048, 7, 7, dtype=torch.bfloat16, device="meta")
    for apart in (few, x[:, :1], odd, torch.empty(512, 32, 32, 32, device="meta")):
        assert not _spreads(apart)
    assert not _spreads(torch.empty(64, 32, 10001, dtype=torch.bfloat16, device="meta"))


# --- alignment ---


@pytest.mark.parametrize(
    ("shape", "strides", "found"),
    [
        ((2, 64, 8, 8), None, 8),
        ((2, 100, 65, 65), (422500, 1, 6500, 100), 4),  # channels_last
        ((2, 64, 8, 8), (4098, 64, 8, 1), 2),
        ((2, 64, 7, 7), None, 1),
        ((2, 64, 64), (128, 1, 1), 1),  # channels that overlap, as unfold makes them
        ((2, 57, 8, 8), (4096, 1, 512, 64), 1),
        ((1, 64, 8, 8), (3, 64, 8, 1), 8),  # nothing is one sample further
    ],
)
def test_runs_begin_and_end_at_multiples_of_the_alignment(
    shape: tuple[int, ...], strides: tuple[int, ...] | None, found: int
) -> None:
    x = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    if strides is not None:
        x = x.as_strided(shape, strides)
    plan = TILES.plan(forward_problem(norm_of("instance_norm"), Operands(x)))
    assert plan.moments.constants["ALIGN"] == found


@pytest.mark.parametrize("odd", [None, "layout", "output_layout", "grad_layout"])
@pytest.mark.parametrize(("instance", "size"), [(WHOLE, 60), (ROWS, 60), (ROWS, 20004), (TILES, 60)])
def test_each_tensor_has_its_own_step_between_rows_and_the_alignment_divides_it(
    instance: Any, size: int, odd: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Made] = []
    monkeypatch.setattr(Launch, "__call__", lambda launch, *tensors: made.append(Made(launch, tensors)))
    monkeypatch.setattr(instances, "_common", lambda problem: None)
    x, statistic = (torch.empty(8, count, dtype=torch.bfloat16, device="meta") for count in (size, 1))
    forward, backward = Operands(x), BackwardOperands(x, x, statistic, statistic)
    norm = norm_of("layer_norm", 1)
    gaps = {"layout": 4, "output_layout": 12, "grad_layout": 20}  # each step is then a multiple of 8
    if odd is not None:
        gaps[odd] = 2
    for operands, problem in ((forward, forward_problem(norm, forward)), (backward, backward_problem(norm, backward))):
        layouts = {name: getattr(problem, name) for name in gaps}
        apart = {name: one and replace(one, sample=size + gaps[name]) for name, one in layouts.items()}
        if not (problem.backward and instance is WHOLE):
            arguments = ((True, *(False,) * 4),) if problem.backward else ()
            instance.plan(replace(problem, **apart))(operands, *arguments)
    assert made
    steps = {"x": "layout", "y": "output_layout", "dx": "output_layout", "dy": "grad_layout"}
    for each in made:
        found = {name: each.numbers[f"{name}_sample"] for name in steps if f"{name}_sample" in each.numbers}
        assert found == {name: size + gaps[steps[name]] for name in found}
        assert all(run % each.numbers.get("ALIGN", 1) == 0 for run in (size, *found.values()))
