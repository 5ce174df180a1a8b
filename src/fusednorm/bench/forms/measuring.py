"""Runs forms: checks every contender against a wider dtype, and times those that are right side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fusednorm.bench.forms.catalog import FORMS, Form, Outputs, Tensors
from fusednorm.bench.forms.rows import FormDirection, FormRow
from fusednorm.bench.forms.traffic import one_call_bytes, several_calls_bytes
from fusednorm.bench.runner import Progress, first_line, host_times, measure_those_that_run, silent, status_of
from fusednorm.machine.timing import Calls, Timer

EAGER, COMPILE, COMPOSED, FUSED = "torch eager", "torch.compile", "several calls", "one call"
CONTENDERS = (EAGER, COMPILE, COMPOSED, FUSED)
#: An error may be this many times torch's, which rounds between its calls, and some roundings of the dtype.
FACTOR, ROUNDINGS = 1.5, 2.0

Call = Callable[[Tensors], Outputs]


@dataclass(frozen=True)
class FormJob:
    """A form in a dtype and a direction."""

    form: Form
    dtype: str
    direction: FormDirection

    @property
    def key(self) -> str:
        return f"{self.form.name} {self.dtype} {self.form.layout} {self.direction}"

    def judged(self, results: Sequence[Tensor]) -> Outputs:
        """The outputs, or the gradients, as numbers that have an error."""
        return self.form.judged(tuple(results)) if self.direction == "forward" else tuple(results)


@dataclass(frozen=True)
class _Inputs:
    """The tensors of a form, and the gradients of its outputs where it is differentiated."""

    tensors: Tensors
    grads: Outputs | None

    def wide(self) -> _Inputs:
        wide = {name: tensor.detach().double() for name, tensor in self.tensors.items()}
        if self.grads is None:
            return _Inputs(wide, None)
        leaves = {name: tensor.requires_grad_() for name, tensor in wide.items()}
        return _Inputs(leaves, tuple(grad.double() for grad in self.grads))

    def run(self, call: Call) -> list[Tensor]:
        """The outputs, or the gradients of all tensors."""
        if self.grads is None:
            with torch.no_grad():
                return list(call(self.tensors))
        return list(torch.autograd.grad(call(self.tensors), list(self.tensors.values()), self.grads))


def run_form(
    job: FormJob, *, timer: Timer, device: str, shape: Sequence[int] = (), progress: Progress = silent
) -> list[FormRow]:
    """A row for each contender; ``shape`` is the input's, by default the form's own for the device."""
    form, given = job.form, tuple(shape) or job.form.shapes[device]
    row = FormRow(form.name, "x".join(map(str, given)), job.dtype, form.layout, job.direction, "", "ok")
    calls = _contenders(form)
    moved = _moved(job, given)
    rows: dict[str, FormRow] = {}
    with timer.session():
        first = _draw(job, given, device, 0)
        size = sum(tensor.numel() * tensor.element_size() for tensor in first.tensors.values())
        sets = [first, *(_draw(job, given, device, seed) for seed in range(1, timer.input_sets(size)))]
        expected = job.judged(first.wide().run(form.torch))
        for name, call in calls.items():
            progress(f"{job.key}: checking {name}")
            rows[name] = replace(row, contender=name, bytes=moved.get(name, 0), **_checked(job, first, call, expected))
        del expected
        _judge(rows, torch.finfo(getattr(torch, job.dtype)).eps)
        progress(f"{job.key}: timing")
        right: dict[str, Calls] = {
            name: [_bound(inputs, call) for inputs in sets] for name, call in calls.items() if rows[name].status == "ok"
        }
        timings, failed = measure_those_that_run(timer, right)
        whole = host_times(timer, {name: right[name] for name in timings})
    for name, timing in timings.items():
        measured = whole.get(name, {})
        rows[name] = replace(rows[name], ms=timing.ms, method=timing.method, note=timing.note, **measured)
    for name, raised in failed.items():
        rows[name] = replace(rows[name], status=status_of(raised), note=first_line(raised))
    return [rows[name] for name in CONTENDERS]


def call_form_once(job: tuple[int, str, FormDirection], device: str) -> None:
    """Call each contender of a form of the catalog, by its place there, once, which compiles its kernels."""
    place, dtype, direction = job
    form = FORMS[place]
    inputs = _draw(FormJob(form, dtype, direction), form.shapes[device], device, 0)
    for call in _contenders(form).values():
        with suppress(Exception):
            inputs.run(call)


def _contenders(form: Form) -> dict[str, Call]:
    torch.compiler.reset()
    compiled = torch.compile(form.torch, dynamic=False)
    return {EAGER: form.torch, COMPILE: compiled, COMPOSED: form.composed, FUSED: form.one_call}


def _moved(job: FormJob, shape: tuple[int, ...]) -> dict[str, int]:
    asked = job.form, shape, job.dtype, job.direction == "forward_backward"
    return {COMPOSED: several_calls_bytes(*asked), FUSED: one_call_bytes(*asked)}


def _bound(inputs: _Inputs, call: Call) -> Callable[[], Any]:
    return lambda: inputs.run(call)


def _draw(job: FormJob, shape: tuple[int, ...], device: str, seed: int) -> _Inputs:
    generator = torch.Generator(device).manual_seed(seed)
    dtype, form = getattr(torch, job.dtype), job.form
    tensors: dict[str, Tensor] = {}
    for name, one in form.operands(shape).items():
        drawn = torch.randn(one, generator=generator, device=device).to(dtype)
        if form.layout == "nhwc" and drawn.dim() == 4:
            drawn = drawn.contiguous(memory_format=torch.channels_last)
        tensors[name] = drawn
    if job.direction == "forward":
        return _Inputs(tensors, None)
    with torch.no_grad():
        outputs = form.torch(tensors)
    grads = tuple(torch.randn(one.shape, generator=generator, device=device).to(one) for one in outputs)
    if form.layout == "nhwc":
        grads = tuple(grad.contiguous(memory_format=torch.channels_last) for grad in grads)
    return _Inputs({name: tensor.requires_grad_() for name, tensor in tensors.items()}, grads)


def _checked(job: FormJob, inputs: _Inputs, call: Call, expected: Sequence[Tensor]) -> dict[str, Any]:
    """The error of a contender, or what it raised: a result of the bench, not the end of it."""
    try:
        return {"error": relative_error(job.judged(inputs.run(call)), expected)}
    except Exception as error:
        return {"status": status_of(error), "note": first_line(error)}


def relative_error(got: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest error of a result, each as a part of the length of what is expected."""
    if [one.shape for one in got] != [one.shape for one in expected]:
        return math.inf
    errors = [float((one - right).norm() / right.norm()) for one, right in zip(got, expected, strict=True)]
    return max(errors) if all(map(math.isfinite, errors)) else math.inf


def _judge(rows: dict[str, FormRow], eps: float) -> None:
    """Hold the errors of fusednorm's contenders against torch's."""
    theirs = rows[EAGER].error
    for name in (COMPOSED, FUSED):
        error = rows[name].error
        if error is None or theirs is None or not math.isfinite(theirs):
            continue
        allowed = FACTOR * theirs + ROUNDINGS * eps
        rows[name] = replace(rows[name], allowed=allowed)
        if not error <= allowed:
            rows[name] = replace(rows[name], status="wrong", note=f"error {error:.2e} exceeds {allowed:.2e}")
