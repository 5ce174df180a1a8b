"""The configurations that instances list: few, distinct, the default first, and each one right."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from cpu_support import INSTANCES, layout_for
from interpreter_support import interpreted

from fusednorm import choice
from fusednorm.backends.triton import instances as triton_instances
from fusednorm.backends.triton.config.flat import flat_for
from fusednorm.backends.triton.config.held import held_for
from fusednorm.backends.triton.config.kinds import PassConfig, RowsBackwardConfig, TilesConfig
from fusednorm.backends.triton.config.lists import MOST_CONFIGS, MOST_ELEMENTS, SHARED_BYTES, passes, rows_backwards
from fusednorm.backends.triton.config.rows import (
    by_columns,
    columns_backward_for,
    plane_rows_backward_for,
    rows_backward_for,
    rows_forward_for,
)
from fusednorm.backends.triton.config.tiles import passes_for, tiled
from fusednorm.backends.triton.config.units import held_units
from fusednorm.backends.triton.config.whole import whole_forward_for
from fusednorm.backends.triton.runs import power_of_two
from fusednorm.bench.judging import Judge, compute_saved_statistics, gradients_by_name
from fusednorm.bench.operations import problem_of_workload
from fusednorm.bench.workloads import Workload, draw
from fusednorm.norm import Family, norm_of
from fusednorm.operands import BackwardOperands, Operands
from fusednorm.problem import DTYPE_BYTES, Problem
from fusednorm.problems import backward_problem, forward_problem

# --- Triton's lists, as pure functions of the problem ---

SHAPES: tuple[tuple[Family, int, tuple[int, ...]], ...] = (
    ("group_norm", 32, (2, 320, 64, 64)),
    ("group_norm", 8, (1, 512, 256, 256)),
    ("group_norm", 3, (2, 12, 5, 7)),
    ("batch_norm", 0, (128, 60, 7, 7)),
    ("instance_norm", 0, (2, 32, 128, 128)),
    ("layer_norm", 1, (131072, 128)),
    ("layer_norm", 1, (16384, 4096)),
    ("layer_norm", 1, (5, 300)),
    ("rms_norm", 1, (4096, 16384)),
    ("layer_norm", 1, (64, 70000)),
)


def problems() -> Iterator[Problem]:
    for family, groups, shape in SHAPES:
        for dtype in (torch.bfloat16, torch.float32, torch.float64):
            for last in (False, True) if len(shape) == 4 else (False,):
                x = torch.empty(shape, dtype=dtype, device="meta")
                x = x.to(memory_format=torch.channels_last) if last else x
                norm = norm_of(family, groups)
                yield forward_problem(norm, Operands(x))
                yield backward_problem(norm, BackwardOperands(x, x, x, x))
                if family == "batch_norm":
                    yield forward_problem(norm_of(family, training=False), Operands(x))


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Problem, tuple[Any, ...]]]:
    """Each Triton instance with each problem that it supports, and its configurations."""
    monkeypatch.setattr(triton_instances, "_common", lambda problem: None)
    return [
        (instance, problem, tuple(instance.configs(problem)))
        for problem in problems()
        for instance in triton_instances.INSTANCES
        if instance.supports(problem) is None
    ]


def test_lists_begin_with_the_choice_of_the_heuristics_and_are_short(listed: list[Any]) -> None:
    for instance, problem, configs in listed:
        heuristics = {
            "triton.whole": whole_forward_for,
            "triton.flat": flat_for,
            "triton.tiles": lambda problem: passes_for(tiled(problem)),
            "triton.held": lambda problem: held_for(problem, held_units(problem)),
            "triton.rows": (
                rows_forward_for
                if not problem.backward
                else plane_rows_backward_for
                if problem.view.spatial > 1
                else columns_backward_for if by_columns(problem) else rows_backward_for
            ),
        }  # fmt: skip
        assert configs[0] == heuristics[instance.name](problem)
        assert len(configs) == len(set(configs)) <= MOST_CONFIGS


def test_lists_offer_a_choice_where_there_is_one(listed: list[Any]) -> None:
    few = [(instance.name, problem.shape) for instance, problem, configs in listed if len(configs) < 5]
    # One unit that fills the registers, rows shorter than the shortest step, and no positions to share out.
    assert {name for name, _ in few} <= {"triton.whole", "triton.held", "triton.rows", "triton.tiles"}
    assert max(len(configs) for _, _, configs in listed) > 30
    image = [
        len(configs)
        for instance, problem, configs in listed
        if problem.shape == (2, 320, 64, 64) and instance.name == "triton.tiles"
    ]
    assert min(image) >= 30


def test_every_number_is_one_that_triton_takes(listed: list[Any]) -> None:
    """Powers of two where Triton needs them, warps that a GPU has, and tiles that registers and shared memory hold."""
    for _, problem, configs in listed:
        wide = 2 if problem.dtype == "float64" else 1
        for config in configs[1:]:
            for name in ("warps", "row_warps", "units", "elements", "row_elements", "rows"):
                number = getattr(config, name, 1)
                assert number == power_of_two(number) >= 1, (name, config)
                assert "warps" not in name or number <= 16
            assert getattr(config, "programs", 1) >= 1
            if isinstance(config, TilesConfig):
                for one in (config.reduction, config.output):
                    elements = one.channels * one.positions
                    assert all(number == power_of_two(number) for number in (one.channels, one.positions, one.warps))
                    assert elements * wide <= MOST_ELEMENTS
                    assert min(one.channels, one.positions, one.tiles, one.warps, one.stages) >= 1
                    assert one.stages * elements * DTYPE_BYTES[problem.dtype] <= SHARED_BYTES or one.stages == 1


def test_a_forward_of_channels_first_reads_one_tile_a_program(listed: list[Any]) -> None:
    """Its kernel for moments has no loop over tiles."""
    for _, problem, configs in listed:
        if tiled(problem).layout.order == "channels_first" and problem.direction == "forward":
            assert all(one.reduction.tiles == 1 for one in configs if isinstance(one, TilesConfig))


def test_a_pass_that_a_direction_leaves_out_is_not_varied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_instances, "_common", lambda problem: None)
    x = torch.empty(2, 320, 64, 64, device="meta")
    inference = forward_problem(norm_of("batch_norm", training=False), Operands(x))
    assert len({one.reduction for one in triton_instances.TILES.configs(inference)}) == 1
    parameters = backward_problem(norm_of("batch_norm"), BackwardOperands(x, x, x, x), "backward_gamma_beta")
    assert len({one.output for one in triton_instances.TILES.configs(parameters)}) == 1


def test_lists_follow_the_default_that_they_are_given() -> None:
    """So a change of the heuristics changes the list with it."""
    x = torch.empty(4096, 1024, dtype=torch.bfloat16, device="meta")
    problem = backward_problem(norm_of("layer_norm", 1), BackwardOperands(x, x, x, x))
    default = RowsBackwardConfig(4, 4, 200, stages=2)
    found = rows_backwards(problem, default)
    assert found[0] == default
    assert {replace(default, programs=programs) for programs in (132, 264, 528)} <= set(found)
    x = torch.empty(9000, 112, dtype=torch.bfloat16, device="meta")
    problem = backward_problem(norm_of("rms_norm", 1), BackwardOperands(x, x, x, x))
    found = rows_backwards(problem, RowsBackwardConfig(1, 1, 2112))
    one_step = RowsBackwardConfig(8, 1, 1125), RowsBackwardConfig(16, 2, 563), RowsBackwardConfig(8, 2, 1125)
    assert set(one_step) <= set(found)
    assert RowsBackwardConfig(4, 1, 2250) not in found  # more programs than one step is for
    assert RowsBackwardConfig(2, 1, 2112) in found  # 16 warps to a multiprocessor
    x = torch.empty(600, 400, dtype=torch.bfloat16, device="meta")
    problem = backward_problem(norm_of("rms_norm", 1), BackwardOperands(x, x, x, x))
    assert RowsBackwardConfig(2, 1, 300) not in rows_backwards(problem, RowsBackwardConfig(1, 1, 528))  # longer rows
    tiles = TilesConfig(PassConfig(4, 8, 2, 1, 3), PassConfig(4, 8, 2, 1))
    assert passes(tiled(problem), tiles)[0] == tiles


# --- every listed configuration is right ---

CODE = """
import json

import torch
from fusednorm.backends.triton.config import rows
from fusednorm.backends.triton.config.kinds import ColumnsBackwardConfig, PassConfig, RowsBackwardConfig, TilesConfig
from fusednorm.backends.triton.config.tiles import tiled
from fusednorm.backends.triton.config.lists import columns_backwards, passes, rows_backwards
from fusednorm.backends.triton.instances import FLAT, HELD, ROWS, TILES, WHOLE
from fusednorm.bench.workloads import Workload
from test_configs import wrong

rows.MOST_ROW = 200
# Lists around tiny configurations, so that tiny problems have several tiles, steps and programs.
def small(problem):
    one_tile = problem.layout.order == "channels_first" and not problem.backward
    return TilesConfig(PassConfig(4, 16, 1 if one_tile else 2, 1, 3), PassConfig(4, 16, 2, 1))

around = {
    TILES: lambda problem: passes(tiled(problem), small(tiled(problem))),
    ROWS: lambda problem: (
        columns_backwards(problem, ColumnsBackwardConfig(64, 4, 4, 64, 2, 2)) if rows.by_columns(problem)
        else rows_backwards(problem, RowsBackwardConfig(2, 2, 2))
    ),
}
cases = (
    (WHOLE, True, "group_norm", (2, 12, 4, 4), 4, "float32", "nchw"),
    (WHOLE, True, "layer_norm", (9, 100), 1, "float16", "nchw"),
    (HELD, True, "group_norm", (3, 12, 3, 3), 4, "float16", "nhwc"),
    (HELD, True, "batch_norm", (3, 20, 3, 3), 0, "float32", "nchw"),
    (TILES, True, "group_norm", (1, 4, 5, 7), 2, "float32", "nchw"),
    (TILES, True, "group_norm", (1, 12, 5, 7), 3, "float16", "nhwc"),
    (ROWS, True, "layer_norm", (9, 150), 1, "float16", "nchw"),
    (ROWS, True, "rms_norm", (2, 210), 1, "float32", "nchw"),
    (FLAT, True, "batch_norm", (3, 10, 5, 7), 0, "float32", "nchw"),
    (FLAT, True, "batch_norm", (3, 12, 5, 7), 0, "float16", "nhwc"),
)
if EXHAUSTIVE:
    cases += (
        (TILES, True, "group_norm", (2, 12, 5, 7), 3, "float32", "nchw"),
        (TILES, False, "group_norm", (1, 8, 9, 16), 2, "float32", "nchw"),
        (TILES, False, "group_norm", (1, 8, 9, 16), 2, "float32", "nhwc"),
        (TILES, False, "batch_norm", (2, 5, 9, 8), 0, "float64", "nhwc"),
        (TILES, False, "instance_norm", (1, 6, 9, 16), 0, "float32", "nhwc"),
        (ROWS, True, "layer_norm", (5, 2500), 1, "float32", "nchw"),
        (ROWS, False, "rms_norm", (9, 150), 1, "float32", "nchw"),
        (ROWS, False, "rms_norm", (5, 330), 1, "float32", "nchw"),
    )
found, count = [], 0
for instance, own, family, shape, groups, dtype, layout in cases:
    training = instance is not FLAT
    workload = Workload(family, shape, groups, dtype, layout, "silu", not training, training)
    for direction in ("inference",) if not training else ("forward",) if instance is WHOLE else ("forward", "backward"):
        own_list = own or (instance is ROWS and direction == "forward")
        configs = instance.configs if own_list else around[instance]
        step = 1 if EXHAUSTIVE else 4
        tried, faults = wrong(instance, workload, direction, lambda problem: configs(problem)[::step])
        count += tried
        found += faults
print(json.dumps([count, found]))
"""


def wrong(instance: Any, workload: Workload, direction: Any, configs: Any = None) -> tuple[int, list[str]]:
    """How many configurations of an instance there are, and what is wrong with the results of any."""
    inputs = draw(workload)
    problem = problem_of_workload(direction, workload, inputs)
    mean, rstd = compute_saved_statistics(workload, inputs)
    judge = Judge(workload, inputs, direction, mean, rstd, wants_statistics=True)
    found = []
    listed = (configs or instance.configs)(problem)
    for config in listed:
        plan = instance.plan(problem, config)
        if problem.backward:
            named = gradients_by_name(plan(inputs.backward_operands(mean, rstd), (True,) * 5))
        else:
            results = plan(inputs.operands, True, torch.full_like(inputs.input, torch.nan))
            named = {"output": results.output, "mean": results.mean, "rstd": results.rstd}
        verdict = judge.check({name: tensor for name, tensor in named.items() if tensor is not None})
        if verdict.fault is not None:
            found.append(f"{instance.name} {workload.key} {direction} {config}: {verdict.fault}")
    return len(listed), found


def in_the_interpreter(exhaustive: bool) -> tuple[int, list[str]]:
    triton = pytest.importorskip("triton")
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8) and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip("triton < 3.8 with numpy >= 2.4")
    count, faults = interpreted(f"EXHAUSTIVE = {exhaustive}\n{CODE}")
    return count, faults


def test_listed_configurations_of_triton_are_right_in_the_interpreter() -> None:
    """Every fourth of each kind of kernel."""
    count, faults = in_the_interpreter(exhaustive=False)
    assert faults == []
    assert count > 30


@pytest.mark.exhaustive
def test_every_listed_configuration_of_triton_is_right_in_the_interpreter() -> None:
    count, faults = in_the_interpreter(exhaustive=True)
    assert faults == []
    assert count > 400


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("instance", INSTANCES)
def test_every_listed_configuration_of_the_cpu_is_right(instance: str, direction: Any) -> None:
    """On shapes that the smallest and the largest pieces, slabs and segments divide unequally."""
    rows = instance == "cpu.rows"
    shape: tuple[int, ...] = (300, 40) if rows else (1, 2, 300, 301)
    workload = Workload("layer_norm" if rows else "group_norm", shape, 1, layout=layout_for(instance))
    (one,) = [found for found in choice.all_instances() if found.name == instance]
    count, faults = wrong(one, workload, direction)
    assert faults == []
    one_way = instance == "cpu.planes" or (rows and direction == "forward")
    assert (count == 1) if one_way else (count >= 3)
