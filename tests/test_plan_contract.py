"""The plans of every instance against what instance.py promises: on the CPU, in Triton's interpreter, on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from interpreter_support import interpreted
from plan_contract import (
    CHECKS,
    EVERYTHING,
    SUBJECTS,
    Subject,
    _backward_operands,
    _operands,
    _plan,
    another_device,
    faults,
    wanted_or_not,
)

from fusednorm.activations import Activation
from fusednorm.backends.cpu import frame as frames
from fusednorm.backends.cpu.compiler import Kernel
from fusednorm.backends.cpu.frame import Frame, template
from fusednorm.backends.cpu.plans import base
from fusednorm.choice import all_instances, instances, named
from fusednorm.norm import norm_of
from fusednorm.operands import BackwardOperands, Operands
from fusednorm.problems import backward_problem, forward_problem

GPU = [subject for subject in SUBJECTS if subject.instance.startswith(("triton.", "hopper."))]
CPU = [subject for subject in SUBJECTS if subject not in GPU]


def name_of(value: object) -> str:
    if isinstance(value, Subject):
        return f"{value.instance}-{value.norm.family}"
    return getattr(value, "__name__", str(value))


def test_every_instance_is_a_subject() -> None:
    assert {subject.instance for subject in SUBJECTS} == {instance.name for instance in all_instances()}


@pytest.mark.parametrize("check", CHECKS, ids=name_of)
@pytest.mark.parametrize("subject", CPU, ids=name_of)
def test_on_the_cpu(subject: Subject, check: Callable[[Subject], object]) -> None:
    assert faults(check, subject) == []  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_of_another_dtype(dtype: torch.dtype) -> None:
    for subject in CPU:
        for check in CHECKS:
            assert faults(check, replace(subject, dtype=dtype)) == []


@pytest.mark.parametrize("shape", [(3, 4, 1), (3, 1, 1)], ids=str)
def test_a_variance_where_the_norm_has_one(shape: tuple[int, ...]) -> None:
    """instance_norm of one position is made of rows, whose kernels keep no variance."""
    operands = Operands(torch.randn(shape))
    problem = forward_problem(norm_of("instance_norm"), operands)
    for candidate in instances(problem):
        if candidate.reason is None:
            for _ in range(3):  # the memory of a result that nobody wrote holds anything
                garbage = torch.full((3, shape[1]), 7.0)
                del garbage
                found = candidate.instance.plan(problem)(operands)
                assert found.var is not None, candidate.instance.name
                assert torch.equal(found.var, torch.zeros_like(found.var)), candidate.instance.name


def test_a_plan_returns_no_gradient_beyond_its_direction() -> None:
    """A backward_data of the CPU sums no parameters' gradients, whatever the call wants."""
    for subject in CPU:
        if subject.instance == "reference":
            continue
        operands = _backward_operands(subject, _operands(subject))
        plan = _plan(subject, operands, (True, False, False, False, False))
        found = plan(operands, EVERYTHING)
        assert found.input is not None
        assert (found.weight, found.bias, found.scale, found.shift) == (None,) * 4, subject.instance


INTERPRETED = """
import json
from dataclasses import replace
from typing import Any
from plan_contract import CHECKS, SUBJECTS, faults, unaligned_addresses
triton = [subject for subject in SUBJECTS if subject.instance.startswith("triton.")]
small = [replace(one, shape=(2, 4, 3, 3) if len(one.shape) == 4 else (3, 20)) for one in triton]
checks = [check for check in CHECKS if check is not unaligned_addresses]  # of which an interpreter knows nothing
print(json.dumps([fault for subject in small for check in checks for fault in faults(check, subject)]))
"""


def test_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    assert interpreted(INTERPRETED) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch.cuda.is_available() is False")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("subject", GPU, ids=name_of)
def test_on_a_gpu(subject: Subject, dtype: torch.dtype) -> None:
    if dtype == torch.float64 and subject.instance.startswith("hopper."):
        pytest.skip("computes in float32")
    for check in CHECKS:
        assert faults(check, replace(subject, device="cuda", dtype=dtype)) == []


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("subject", GPU, ids=name_of)
def test_on_another_gpu_than_the_current(subject: Subject) -> None:
    assert faults(another_device, subject) == []


def test_a_frame_of_the_cpu_is_one_calls_alone_and_has_room_for_its_threads() -> None:
    """Also a frame that a call of fewer threads used before."""
    operands = _operands(CPU[0])
    plan = _plan(CPU[0], operands)
    plan(operands)
    plan.room, plan.room_per_thread = 64, 80
    frame = plan.frame(1)
    assert frame.room == 64 + 80
    plan.release(frame)
    again, other = plan.frame(3), plan.frame(1)
    assert again is frame
    assert other is not frame
    assert (again.room, other.room) == (64 + 3 * 80, 64 + 80)


def _frame(room: int) -> Frame:
    frame = Frame(template({}))
    frame.make_room(room, {})
    return frame


def test_the_large_workspaces_of_all_plans_are_kept_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "LARGE_ROOMS", 1 << 20)
    frames.drop_rooms()
    one, other = list[Frame](), list[Frame]()  # the idle frames of two plans
    kept = [_frame(1 << 18) for _ in range(4)]
    for frame, idle in zip(kept, (one, other, one, other), strict=True):
        assert frames.keep_room(frame, idle)
        idle.append(frame)
    used = one.pop()
    another = _frame(1 << 18)
    assert frames.keep_room(another, one)  # the fifth: those of both plans go, but not the one in use
    assert (one, other) == ([], [])
    assert (used.room, used.kept) == (1 << 18, False)
    assert frames.keep_room(used, one)
    used.make_room(1 << 19, {})
    assert not used.kept  # it is another workspace
    assert not frames.keep_room(_frame((1 << 20) + 8), one)
    monkeypatch.setattr(frames, "LARGE_ROOMS", 1 << 26)
    assert not frames.keep_room(_frame(frames.SMALLEST), one)  # the memory of large outputs keeps it
    monkeypatch.setattr(frames, "limit", lambda: 0)
    assert not frames.keep_room(_frame(1 << 18), one)
    frames.drop_rooms()


def test_a_call_takes_the_large_workspace_of_an_earlier_one() -> None:
    operands = _operands(CPU[0])
    plan = _plan(CPU[0], operands)
    plan.room = base.KEPT_SERIAL_ROOM + 8
    plan(operands)
    (frame,) = plan.idle
    block = frame.block
    assert frame.room > plan.kept_room
    plan(operands)
    assert plan.idle == [frame]
    assert frame.block is block
    frames.drop_rooms()
    assert plan.idle == []


@pytest.mark.parametrize("shape", [(1, 3, 16), (2, 2, 256), (8, 4, 64)], ids=str)
def test_a_small_call_of_whole_samples_has_a_small_workspace(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape).transpose(1, 2)
    rstd = torch.ones(shape[0], 8)
    forward = forward_problem(norm_of("group_norm", 8), Operands(x))
    backward = backward_problem(norm_of("group_norm", 8), BackwardOperands(x, x, rstd, rstd))
    for problem in (forward, backward):
        plan: Any = named(problem, "cpu.slabs").plan(problem)
        assert plan.room + plan.room_per_thread <= base.KEPT_ROOM


def test_no_cache_line_has_the_room_of_two_workers() -> None:
    """Nor that of a worker and of all: what one core writes there the other would wait for."""
    kept = 0
    for subject in CPU:
        norm = replace(subject.norm, activation=Activation("silu"))
        operands = _operands(subject)
        for one in (operands, _backward_operands(subject, operands)):
            plan = _plan(replace(subject, norm=norm), one)
            if not isinstance(plan, base.Plan):  # the reference's
                continue
            for bytes_before in (*plan.workspace.values(), plan.room, plan.room_per_thread):
                assert bytes_before % base.LINES == 0, subject
            kept += "kept" in plan.workspace and plan.room_per_thread > 0
    assert kept >= 4


def test_kernels_that_apply_no_activation_are_shared_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Kernel] = []
    monkeypatch.setattr(base, "load", lambda kernel: loaded.append(kernel) or 1)
    for subject in CPU:
        dims = subject.norm.num_groups or subject.norm.num_dims
        norm = norm_of(subject.norm.family, dims, activation=Activation("silu"))
        subject = replace(subject, norm=norm)
        operands = _operands(subject)
        _plan(subject, operands)
        _plan(subject, _backward_operands(subject, operands))
        if subject.evaluates:
            _plan(replace(subject, norm=norm_of("batch_norm", activation=Activation("silu"), training=False)), operands)
    activated = {kernel.function for kernel in loaded if kernel.activation == "silu"}
    forward, backward = (
        {"forward", "apply"},
        {"backward", "backward_grouped", "backward_kept", "columns", "reduce", "reduce_kept"},
    )
    assert activated == forward | backward
    assert {"given", "moments", "statistics", "coefficients"} <= {kernel.function for kernel in loaded}


def test_more_statistics_than_a_plan_of_the_cpu_keeps_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "DISCARDED", 1)
    for subject in CPU:
        assert faults(wanted_or_not, subject) == []
