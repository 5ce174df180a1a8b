"""Which instance runs a problem: the named one, or the default, a pure function of the problem."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from fusednorm.backends import reference
from fusednorm.instance import Backend, Candidate, Instance
from fusednorm.problem import Problem

_forced: ContextVar[str | None] = ContextVar("fusednorm_instance", default=None)
#: Returns the name that :func:`use_instance` asks for in this context, or None.
forced = _forced.get


def all_instances() -> tuple[Instance, ...]:
    """Every instance of every backend, the fastest backends first."""
    from fusednorm.backends.cpu.instances import INSTANCES
    from fusednorm.backends.triton.instances import INSTANCES as TRITON

    return (*TRITON, *INSTANCES, reference.INSTANCE)


def instances(problem: Problem) -> list[Candidate]:
    """Every instance, each with the reason why it cannot run the problem, or None."""
    return [Candidate(instance, instance.supports(problem)) for instance in all_instances()]


def choose(problem: Problem, name: str | None = None) -> Instance:
    """The instance that runs a problem: the named one, or the default, a pure function of the problem.

    Raises ValueError for a name that does not exist and RuntimeError where the named instance cannot run the problem.
    """
    if name is not None:
        for instance in all_instances():
            if instance.name == name:
                reason = instance.supports(problem)
                if reason is not None:
                    raise RuntimeError(f"the instance {name!r} cannot run this problem: {reason}")
                return instance
        known = ", ".join(instance.name for instance in all_instances())
        raise ValueError(f"instance: {name!r} does not exist; expected one of {known}")
    if problem.constant:
        return reference.INSTANCE
    if problem.device == "cpu":
        from fusednorm.backends.cpu import instances as cpu

        if cpu.unavailable() is None:
            chosen: Instance = cpu.choose(problem)
            return chosen
    elif problem.device == "cuda":
        from fusednorm.backends.triton import instances as triton

        if triton.unavailable() is None:
            chosen = triton.choose(problem)
            return chosen
    return reference.INSTANCE


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
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


def backends() -> list[Backend]:
    """Every backend, with the reason why it cannot run here, or None, and with details such as caches."""
    from fusednorm.backends.cpu import instances as cpu

    reason = cpu.unavailable()
    details = {}
    if reason is None:
        from fusednorm.backends.cpu import compiler, memory

        details = compiler.describe_caches() | {"buffer cache": memory.describe()}
    from fusednorm.backends.triton import instances as triton

    return [
        Backend("triton", triton.unavailable(), {"AMD": "compiled and interpreted in the tests, not run"}),
        Backend("cpu", reason, details),
        Backend("reference", None, {"runs": "any device, in plain torch"}),
    ]
