"""A workload's forward as an ONNX model, for the runtimes that read one.

Channels-first workloads use the native operators; channels-last ones, and batch_norm in training, are composed from
ReduceMean on the 4-D view. The arithmetic is in fp32 between casts, because the runtimes have few 16-bit CPU kernels;
the parameters are fp32 constants, as in an exported model.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from onnx import ModelProto, TensorProto, helper, numpy_helper
from torch import Tensor

from fusednorm.activations import resolve
from fusednorm.bench.peers.arrays import to_array_order, view_of_array
from fusednorm.bench.workloads import EPS, Inputs, Workload

ELEMENT_TYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
_ONE_NODE = {"relu": "Relu", "sigmoid": "Sigmoid", "tanh": "Tanh", "hardswish": "HardSwish"}
# The first operator set with RMSNormalization.
OPSET = 23


class _Graph:
    """The nodes and constants of a model, under generated names."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def constant(self, values: Any, dtype: Any = np.float32) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.ascontiguousarray(values, dtype), name))
        return name

    def add(self, operator: str, *inputs: str, **attributes: Any) -> str:
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, list(inputs), [name], **attributes))
        return name


def refusal(workload: Workload, forward: bool) -> str | None:
    """Why a workload has no model, or None."""
    if not forward:
        return "no backward"
    if workload.dtype not in ELEMENT_TYPES:
        return f"the models are for {', '.join(ELEMENT_TYPES)}"
    return None


def _native(graph: _Graph, x: str, workload: Workload, inputs: Inputs) -> str:
    weight = graph.constant(inputs.weight.float().numpy())
    bias = [] if inputs.bias is None else [graph.constant(inputs.bias.float().numpy())]
    if workload.family == "group_norm":
        return graph.add("GroupNormalization", x, weight, *bias, num_groups=workload.groups, epsilon=EPS)
    if workload.family == "instance_norm":
        return graph.add("InstanceNormalization", x, weight, *bias, epsilon=EPS)
    if workload.family == "batch_norm":
        assert inputs.mean is not None and inputs.var is not None
        given = [graph.constant(tensor.float().numpy()) for tensor in (inputs.mean, inputs.var)]
        return graph.add("BatchNormalization", x, weight, *bias, *given, epsilon=EPS)
    operator = "LayerNormalization" if workload.family == "layer_norm" else "RMSNormalization"
    return graph.add(operator, x, weight, *bias, axis=-workload.groups, epsilon=EPS)


def _composed(graph: _Graph, x: str, workload: Workload, inputs: Inputs) -> str:
    view = view_of_array(workload)
    shape = to_array_order(inputs.input, workload).shape

    def parameter(tensor: Tensor) -> str:
        return graph.constant(tensor.float().reshape(view.parameter).numpy())

    values = graph.add("Reshape", x, graph.constant(view.shape, np.int64))
    axes = graph.constant(view.axes, np.int64)
    if workload.training:
        mean = graph.add("ReduceMean", values, axes, keepdims=1)
        centred = graph.add("Sub", values, mean)
        var = graph.add("ReduceMean", graph.add("Mul", centred, centred), axes, keepdims=1)
    else:
        assert inputs.mean is not None and inputs.var is not None
        centred = graph.add("Sub", values, parameter(inputs.mean))
        var = parameter(inputs.var)
    std = graph.add("Sqrt", graph.add("Add", var, graph.constant(EPS)))
    z = graph.add("Mul", graph.add("Div", centred, std), parameter(inputs.weight))
    if inputs.bias is not None:
        z = graph.add("Add", z, parameter(inputs.bias))
    return graph.add("Reshape", z, graph.constant(tuple(shape), np.int64))


def _activated(graph: _Graph, z: str, workload: Workload) -> str:
    activation = resolve(workload.activation)
    if activation is None:
        return z
    if activation.name == "silu":
        return graph.add("Mul", z, graph.add("Sigmoid", z))
    if activation.name in ("gelu", "gelu_tanh"):
        return graph.add("Gelu", z, approximate="tanh" if activation.name == "gelu_tanh" else "none")
    if activation.name == "leaky_relu":
        return graph.add("LeakyRelu", z, alpha=activation.parameter)
    return graph.add(_ONE_NODE[activation.name], z)


def build(workload: Workload, inputs: Inputs) -> ModelProto:
    """The model: input "x" and output "y" in the workload's dtype and layout."""
    graph = _Graph()
    element = ELEMENT_TYPES[workload.dtype]
    x = "x" if workload.dtype == "float32" else graph.add("Cast", "x", to=TensorProto.FLOAT)
    native = workload.layout != "nhwc" and not (workload.family == "batch_norm" and workload.training)
    z = (_native if native else _composed)(graph, x, workload, inputs)
    if inputs.scale is not None and inputs.shift is not None:
        ones = [1] * (len(workload.shape) - 2)
        samples, channels = inputs.scale.shape
        last = workload.layout == "nhwc" or workload.row_family
        broadcast = (samples, *ones, channels) if last else (samples, channels, *ones)
        factor = graph.constant((1 + inputs.scale.float()).reshape(broadcast).numpy())
        shift = graph.constant(inputs.shift.float().reshape(broadcast).numpy())
        z = graph.add("Add", graph.add("Mul", z, factor), shift)
    z = _activated(graph, z, workload)
    graph.nodes.append(helper.make_node("Cast", [z], ["y"], to=element))
    shape = tuple(to_array_order(inputs.input, workload).shape)
    body = helper.make_graph(
        graph.nodes,
        "norm",
        [helper.make_tensor_value_info("x", element, shape)],
        [helper.make_tensor_value_info("y", element, shape)],
        graph.constants,
    )
    # The IR version that goes with OPSET: a newer onnx would write one that an older runtime refuses.
    return helper.make_model(body, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=11)


def to_numpy(tensor: Tensor) -> Any:
    """A view as numpy, which has no bf16: such a tensor becomes its bits as uint16."""
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def from_numpy(array: Any, dtype: torch.dtype) -> Tensor:
    """A copy in torch of a runtime's result; a bf16 result comes as its bits."""
    copied = torch.from_numpy(np.array(array))
    return copied.view(torch.bfloat16) if dtype == torch.bfloat16 else copied
