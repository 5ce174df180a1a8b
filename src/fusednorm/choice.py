"""Which instance runs a problem, and in which configuration: the named one, the tuned one, or the default.

The default is a pure function of the problem. Tuned choices come from a file (tuning.py), where a program opts in.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from fusednorm.backends import reference
from fusednorm.instance import (
    Backend,
    Candidate,
    CompilationError,
    Instance,
    MoveRunning,
    Plan,
    Ranks,
    SpreadBackwardPlan,
    SpreadForwardPlan,
)
from fusednorm.problem import Problem
from fusednorm.tuning import TunedFile, file_of_environment, opened


class Selection(NamedTuple):
    """What a program asks for in place of the defaults: an instance by its name, and a file of tuned choices."""

    instance: str | None
    tuned: TunedFile | None


_of_environment = file_of_environment()
_default = None if _of_environment is None else Selection(None, _of_environment)
_selection: ContextVar[Selection | None] = ContextVar("fusednorm_selection", default=_default)
#: Returns the Selection of this context, or None where there is nothing but the defaults. One look-up, so that a call
#: finds its plan as fast as without tuning.
selection = _selection.get


def lost(file: TunedFile | None) -> bool:
    """Whether a forward's context had this file of tuned choices, and this one asks for nothing. Autograd runs the
    backward of a GPU's tensors in a thread of its own, whose context is empty."""
    return file is not None and selection() is _default and tuned_file() is not file


def forced() -> str | None:
    """The name that :func:`use_instance` asks for in this context, or None."""
    selected = selection()
    return None if selected is None else selected.instance


def tuned_file() -> TunedFile | None:
    """The file of tuned choices that is active in this context, or None."""
    selected = selection()
    return None if selected is None else selected.tuned


@dataclass(frozen=True, slots=True)
class Choice:
    """An instance and the configuration in which it runs a problem, None for its default.

    ``tuned`` is the file that the configuration comes from.
    """

    instance: Instance
    config: Any = None
    tuned: TunedFile | None = None

    @property
    def name(self) -> str:
        return self.instance.name

    def plan(self, problem: Problem) -> Plan:
        return self.instance.plan(problem, self.config)


def all_instances() -> tuple[Instance, ...]:
    """Every instance of every backend, the fastest backends first."""
    from fusednorm.backends.cpu.instances import INSTANCES
    from fusednorm.backends.hopper.instances import INSTANCES as HOPPER
    from fusednorm.backends.triton.instances import INSTANCES as TRITON

    return (*HOPPER, *TRITON, *INSTANCES, reference.INSTANCE)


def instances(problem: Problem) -> list[Candidate]:
    """Every instance, each with the reason why it cannot run the problem, or None."""
    return [Candidate(instance, instance.supports(problem)) for instance in all_instances()]


def named(problem: Problem, name: str) -> Instance:
    """The instance of a name.

    Raises ValueError for a name that does not exist and RuntimeError where the instance cannot run the problem.
    """
    for instance in all_instances():
        if instance.name == name:
            reason = instance.supports(problem)
            if reason is not None:
                raise RuntimeError(f"the instance {name!r} cannot run this problem: {reason}")
            return instance
    known = ", ".join(instance.name for instance in all_instances())
    raise ValueError(f"instance: {name!r} does not exist; expected one of {known}")


def default(problem: Problem, alone: bool = True) -> Instance:
    """The instance that the heuristics choose: a pure function of the problem.

    A call that is not ``alone``, since its launches become part of generated code, gets none of those that are not for
    that. Sums around a norm are fused by the instance that runs the norm, where it can; those of an evaluation by
    another one that can, where it cannot. The gradients of a product before the norm are made by an instance that can,
    where there is one.
    """
    if problem.constant:
        return reference.INSTANCE
    if problem.gated_backward:
        return _first_that_can(problem) or default(replace(problem, added=None), alone=False)
    if problem.added is not None and problem.quantized is None:
        if alone and problem.device == "cuda":
            from fusednorm.backends.hopper import instances as hopper

            found = hopper.choose(problem)
            if found is not None:
                return found
        plain = default(replace(problem, added=None), alone=False)
        if problem.direction == "inference" and plain.supports(problem) is not None:
            return _first_that_can(problem) or plain
        return plain
    if problem.quantized is not None:
        quantizing = _first_that_can(problem)
        assert quantizing is not None
        return quantizing
    if problem.device == "cpu":
        from fusednorm.backends.cpu import instances as cpu

        if cpu.unavailable() is None:
            chosen: Instance = cpu.choose(problem)
            return chosen
    elif problem.device == "cuda":
        from fusednorm.backends.hopper import instances as hopper
        from fusednorm.backends.triton import instances as triton

        if triton.unavailable() is None:
            return (hopper.choose(problem) if alone else None) or triton.choose(problem)
    return reference.INSTANCE


def _first_that_can(problem: Problem) -> Instance | None:
    return next((instance for instance in all_instances() if instance.supports(problem) is None), None)


def choose(problem: Problem, name: str | None = None, alone: bool = True) -> Choice:
    """The instance that runs a problem, with its configuration.

    It is the named instance; without a name the one of the active file of tuned choices, and where that has none for
    the problem, the :func:`default`. A named instance has the tuned configuration where the file's choice is that
    instance. Raises as :func:`named` does.
    """
    plain = problem if problem.added is None else replace(problem, added=None)
    instance = None if name is None else named(plain, name)
    file = tuned_file()
    if file is not None and problem.quantized is None:
        found = file.find(plain, all_instances())
        fuses = found is not None and (problem.direction != "inference" or found[0].supports(problem) is None)
        if found is not None and fuses and instance in (None, found[0]):
            return Choice(*found, file)
    return Choice(instance or default(problem, alone))


def spread(problem: Problem, name: str | None = None) -> SpreadForwardPlan | SpreadBackwardPlan | None:
    """The plan of a process's part of an input that is spread over several; None where no instance has one, or where
    the ``name`` of another one is given."""
    if problem.device != "cuda" and name is None:
        return None
    from fusednorm.backends.triton.instances import TILES

    return TILES.spread(problem) if name in (None, TILES.name) else None


def ranks(device: str) -> Ranks | None:
    """What merges the vectors of all ranks on a device; None where torch's operators do."""
    from fusednorm.backends.triton.instances import TILES, unavailable

    return _rank_kernels() if (device == "cuda" or forced() == TILES.name) and unavailable() is None else None


@cache
def _rank_kernels() -> Ranks:
    from fusednorm.backends.triton.plans.spread import RankKernels

    return RankKernels()


def moving(device: str, dtype: Any) -> MoveRunning | None:
    """What moves running statistics on a device by statistics of a dtype; None where torch's operators do."""
    name = forced()
    if device == "cuda" or name is not None:
        from fusednorm.backends.triton.instances import TILES, unavailable

        if device == "cuda" or name == TILES.name:
            return _move_running() if unavailable() is None else None
    return _move_running_on_cpu(dtype) if device == "cpu" and (name is None or name.startswith("cpu.")) else None


@cache
def _move_running() -> MoveRunning:
    from fusednorm.backends.triton.plans.running import MoveRunning as Kernel

    return Kernel()


@cache
def _move_running_on_cpu(dtype: Any) -> MoveRunning | None:
    from fusednorm.backends.cpu.instances import unavailable

    if unavailable() is not None:
        return None
    from fusednorm.backends.cpu.plans.running import MoveRunning as Kernel

    try:
        return Kernel(dtype)
    except CompilationError:
        return None


@contextmanager
def use_instance(name: str) -> Iterator[None]:
    """Run every call inside on the instance of this name; a call that it cannot run raises, nothing falls back.

    >>> import fusednorm, torch
    >>> with fusednorm.use_instance("reference"):
    ...     y = fusednorm.group_norm(torch.randn(2, 8, 4), 4)
    """
    known = [instance.name for instance in all_instances()]
    if name not in known:
        raise ValueError(f"use_instance: {name!r} does not exist; expected one of {', '.join(known)}")
    with as_selected(Selection(name, tuned_file())):
        yield


@contextmanager
def use_tuned(path: str | Path | None = None) -> Iterator[None]:
    """Run every call inside, and its backward, as ``fusednorm tune`` found it fastest on this device, where the file
    says so.

    Args:
        path: the file that ``fusednorm tune --file`` wrote; by default the one that ``fusednorm tune`` writes without
            it. A file that is missing, damaged or from another version or device is ignored with a warning.

    An instance that :func:`use_instance` asks for, around it or inside it, runs all the same.

    >>> import fusednorm, torch
    >>> with fusednorm.use_tuned("tuned.json"):
    ...     y = fusednorm.group_norm(torch.randn(2, 8, 4), 4)
    """
    with as_selected(Selection(forced(), opened(path))):
        yield


@contextmanager
def as_selected(selected: Selection) -> Iterator[None]:
    token = _selection.set(selected)
    try:
        yield
    finally:
        _selection.reset(token)


def backends() -> list[Backend]:
    """Every backend, with the reason why it cannot run here, or None, and with details such as caches."""
    from fusednorm.backends.cpu import instances as cpu

    reason = cpu.unavailable()
    details = {}
    if reason is None:
        from fusednorm.backends.cpu import compiler, memory

        details = compiler.describe_caches() | {"buffer cache": memory.describe()}
    from fusednorm.backends.hopper import instances as hopper
    from fusednorm.backends.triton import instances as triton

    return [
        Backend("hopper", hopper.unavailable(), {"runs": "channels_first, read once"}),
        Backend("triton", triton.unavailable(), {"AMD": "compiled and interpreted in the tests, not run"}),
        Backend("cpu", reason, details),
        Backend("reference", None, {"runs": "any device, in plain torch"}),
    ]
