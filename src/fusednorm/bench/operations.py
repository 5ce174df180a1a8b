"""The operations that can be profiled on their own, by name, and the Problem of a workload in one direction."""

from __future__ import annotations

from dataclasses import dataclass

from fusednorm.bench.workloads import Inputs, Workload
from fusednorm.norm import Family
from fusednorm.problem import Direction, Problem
from fusednorm.problems import backward_problem, forward_problem


@dataclass(frozen=True)
class Operation:
    """A family in one direction."""

    name: str
    family: Family
    direction: Direction


def _operations() -> dict[str, Operation]:
    suffixes: dict[str, Direction] = {
        "fwd": "forward",
        "bwd": "backward",
        "bwd_data": "backward_data",
        "bwd_gamma_beta": "backward_gamma_beta",
    }
    families: tuple[Family, ...] = ("group_norm", "layer_norm", "rms_norm", "instance_norm")
    found = [
        Operation(f"{family.replace('_', '')}_{suffix}", family, direction)
        for family in families
        for suffix, direction in suffixes.items()
    ]
    found += [
        Operation("batchnorm_inference", "batch_norm", "inference"),
        Operation("batchnorm_training", "batch_norm", "forward"),
        Operation("batchnorm_bwd", "batch_norm", "backward"),
    ]
    return {operation.name: operation for operation in found}


OPERATIONS = _operations()


def problem_of_workload(direction: Direction, workload: Workload, inputs: Inputs) -> Problem:
    """The Problem that dispatch sees for a workload in one direction on these inputs."""
    if direction in ("forward", "inference"):
        return forward_problem(workload.norm, inputs.operands)
    return backward_problem(workload.norm, inputs.backward_operands(None, inputs.weight), direction)
