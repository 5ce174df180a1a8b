"""Whatever the shape, the heuristics choose numbers that a GPU takes. Triton's interpreter asks for none of them."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from math import prod
from random import Random
from typing import Any

import pytest
import torch

from fusednorm.backends.hopper import instances as hopper_instances
from fusednorm.backends.triton import instances as triton_instances
from fusednorm.backends.triton.runs import power_of_two
from fusednorm.choice import default
from fusednorm.norm import Family, norm_of
from fusednorm.operands import BackwardOperands, Operands
from fusednorm.problem import Direction, Problem
from fusednorm.problems import backward_problem, forward_problem

DRAWS = 10_000
FAMILIES: tuple[Family, ...] = ("group_norm", "instance_norm", "batch_norm", "layer_norm", "rms_norm")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MOST_WARPS = 32
#: What the kernels pass to tl.arange or to the compiler.
WARPS = ("warps", "row_warps")
POWERS = (*WARPS, "units", "samples", "rows", "elements", "row_elements", "channels", "positions", "width")
MEMORY = {4: torch.channels_last, 5: torch.channels_last_3d}


def problem_of(
    family: Family,
    groups: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    last: bool = False,
    activation: str | None = None,
    modulated: bool = False,
    direction: Direction = "forward",
) -> Problem:
    x = torch.empty(shape, dtype=dtype, device="meta")
    if last and len(shape) in MEMORY:
        x = x.contiguous(memory_format=MEMORY[len(shape)])
    channels = shape[-groups:] if family in ("layer_norm", "rms_norm") else shape[1:2]
    weight = x.new_empty(channels)
    scale = x.new_empty((shape[0], *channels)) if modulated else None
    statistics = None
    if direction == "inference":
        statistics = x.new_empty(shape[1], dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    norm = norm_of(family, groups, training=direction != "inference", activation=activation)
    if direction.startswith("backward"):
        problem = backward_problem(norm, BackwardOperands(x, x, x, x, weight, None, scale, scale), direction)
    else:
        problem = forward_problem(norm, Operands(x, weight, None, scale, scale, statistics, statistics))
    return replace(problem, device="cuda")


def size(random: Random, most: int) -> int:
    """A number as likely between 2 and 4 as between 200 and 400, short ranges as likely as long ones."""
    return min(most, int(2 ** (random.random() * random.choice((2, 4, 8, 11)))))


def drawn_problem(random: Random) -> Problem:
    family = random.choice(FAMILIES)
    if family in ("layer_norm", "rms_norm"):
        shape = (*(size(random, 300) for _ in range(random.randint(1, 3))), size(random, 70000))
        groups = random.randint(1, min(2, len(shape) - 1))
    else:
        groups = size(random, 64) if family == "group_norm" else 0
        channels = max(1, groups) * size(random, 1024 if groups == 0 else 64)
        shape = (size(random, 128), channels, *(size(random, 64) for _ in range(random.randint(0, 3))))
    return problem_of(
        family,
        groups,
        shape,
        random.choice(DTYPES),
        last=random.random() < 0.5,
        activation=random.choice((None, "silu", "relu", "gelu")),
        modulated=random.random() < 0.3,
        direction=random.choice(
            ("forward", "backward", "backward_data", "backward_gamma_beta")
            + (("inference",) if family == "batch_norm" else ())
        ),
    )


def refused(config: Any) -> list[tuple[str, int]]:
    """The numbers of a configuration that no GPU takes."""
    found = []
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            found += refused(value)
        elif field.name in POWERS:
            most = MOST_WARPS if field.name in WARPS else value
            found += [] if 1 <= value == power_of_two(value) <= most else [(field.name, value)]
    return found


@pytest.fixture
def instances(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """All that a Hopper GPU would have."""
    monkeypatch.setattr(triton_instances, "unavailable", lambda *_: None)
    monkeypatch.setattr(hopper_instances, "unavailable", lambda *_: None)
    return [*triton_instances.INSTANCES, *hopper_instances.INSTANCES]


def choices(instances: list[Any], problem: Problem) -> list[tuple[str, Any]]:
    supporting = [instance for instance in instances if instance.supports(problem) is None]
    return [(instance.name, config) for instance in supporting for config in instance.configs(problem)[:1]]


def test_numbers_of_drawn_problems(instances: list[Any]) -> None:
    random, chosen = Random(20261126), set()
    for _ in range(DRAWS):
        problem = drawn_problem(random)
        if prod(problem.shape) < 2:
            continue
        for name, config in choices(instances, problem):
            chosen.add(name)
            assert not refused(config), (problem, name, config)
    assert chosen == {instance.name for instance in instances}


@pytest.mark.parametrize(
    ("family", "groups", "shape", "dtype", "direction"),
    [
        # Rows of two elements, which are fewer than a warp's lanes.
        ("group_norm", 47, (7, 94, 1, 1), torch.float32, "backward"),
        ("group_norm", 5, (2, 10), torch.bfloat16, "backward"),
        # The units of one sample that share a program: three times 256.
        ("instance_norm", 0, (1, 832, 64), torch.float32, "forward"),
        ("instance_norm", 0, (1, 768, 64), torch.bfloat16, "backward"),
    ],
)
def test_numbers_of_problems_that_had_others(
    instances: list[Any],
    family: Family,
    groups: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    direction: Direction,
) -> None:
    problem = problem_of(family, groups, shape, dtype, last=True, activation="silu", direction=direction)
    found = choices(instances, problem)
    assert found
    assert not any(refused(config) for _, config in found), found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("direction", ["forward", "backward", "backward_data", "backward_gamma_beta", "inference"])
def test_empty_and_tiny_tensors_have_an_instance(
    family: Family, direction: Direction, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And each instance says whether it takes them, for Hopper too."""
    for instances in (hopper_instances, triton_instances):
        monkeypatch.setattr(instances, "unavailable", lambda: None)
    rows = family in ("layer_norm", "rms_norm")
    if direction == "inference" and family != "batch_norm":
        return
    shapes: list[tuple[int, ...]] = [(0, 5), (3, 0), (2, 0, 4), (1, 1), (2, 4, 0), (0, 4, 3, 3), (2, 4, 0, 3)]
    shapes += [(0,), (1,)] if rows else [(1, 1, 1), (1, 1, 2, 2, 1), (2, 1, 1, 1)]
    for shape in shapes:
        for dtype in DTYPES:
            for last in (False, True):
                problem = problem_of(family, 1 if rows or shape[1] else 0, shape, dtype, last, direction=direction)
                for instance in (*hopper_instances.INSTANCES, *triton_instances.INSTANCES):
                    instance.supports(problem)
                chosen = default(problem)
                assert chosen.supports(problem) is None, (shape, dtype, last)
