"""The operations that can be profiled on their own, by name, and the Problem of a workload in one direction."""

from __future__ import annotations

from dataclasses import dataclass

from fusednorm import dispatch
from fusednorm.activations import resolve
from fusednorm.bench.workloads import Inputs, Workload
from fusednorm.problem import Direction, Family, Problem


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
    activation = resolve(workload.activation)
    if direction in ("forward", "inference"):
        return dispatch.forward_problem(
            inputs.input,
            inputs.weight,
            inputs.bias,
            inputs.scale,
            inputs.shift,
            workload.family,
            workload.groups,
            workload.channel_dim,
            activation,
            inference=direction == "inference",
        )
    return dispatch.backward_problem(
        inputs.grad_output,
        inputs.input,
        inputs.weight,
        inputs.bias,
        inputs.scale,
        inputs.shift,
        workload.family,
        workload.groups,
        workload.channel_dim,
        activation,
        workload.training,
        direction=direction,
    )
