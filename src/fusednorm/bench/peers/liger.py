"""Liger-Kernel: its Triton group_norm, layer_norm and rms_norm, with torch's activation after them."""

from __future__ import annotations

from liger_kernel.ops import LigerGroupNormFunction, LigerLayerNormFunction, LigerRMSNormFunction
from torch import Tensor

from fusednorm.activations import resolve
from fusednorm.bench.contenders import TORCH_ACTIVATIONS, Prepared, prepared_torch
from fusednorm.bench.judging import Asked
from fusednorm.bench.workloads import EPS, Inputs, Workload
from fusednorm.tolerance import PEER


def _norm(workload: Workload, inputs: Inputs) -> Tensor:
    x, weight, bias = inputs.input, inputs.weight, inputs.bias
    if workload.family == "group_norm":
        found: Tensor = LigerGroupNormFunction.apply(x, weight, bias, workload.shape[1], workload.groups, EPS)
    elif workload.family == "layer_norm":
        found = LigerLayerNormFunction.apply(x, weight, bias, EPS)
    else:
        # No offset on the weight, statistics in fp32, and the gradient not written over grad_output.
        found = LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "llama", False)
    return found


class Liger:
    """Liger-Kernel's autograd functions."""

    name = "liger"
    allowance = PEER

    def refusal(self, workload: Workload, asked: Asked) -> str | None:
        if workload.family not in ("group_norm", "layer_norm", "rms_norm"):
            return f"liger has no {workload.family}"
        if workload.row_family and workload.groups != 1:
            return "liger normalizes one dimension"
        if workload.modulated or workload.layout == "channel_dim=-1":
            return "liger takes no scale, shift or channel_dim"
        return None

    def prepare(self, workload: Workload, inputs: Inputs, asked: Asked) -> Prepared:
        activation = resolve(workload.activation)
        apply = None if activation is None else TORCH_ACTIVATIONS[activation.name]

        def run(inputs: Inputs) -> Tensor:
            z = _norm(workload, inputs)
            return z if apply is None else apply(z)

        return prepared_torch(run, inputs, asked)
