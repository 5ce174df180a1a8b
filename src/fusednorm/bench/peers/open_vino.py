"""OpenVINO's CPU plugin, from the same ONNX model."""

from __future__ import annotations

from typing import Any

import openvino
import torch
from torch import Tensor

from fusednorm.bench.contenders import Prepared
from fusednorm.bench.judging import Asked
from fusednorm.bench.peers import onnx_model
from fusednorm.bench.peers.arrays import from_array_order, to_array_order
from fusednorm.bench.workloads import Inputs, Workload
from fusednorm.tolerance import PEER

ELEMENT_TYPES = {"float32": openvino.Type.f32, "float16": openvino.Type.f16, "bfloat16": openvino.Type.bf16}


class OpenVino:
    """An inference request, which keeps its output tensor from call to call."""

    name = "openvino"
    allowance = PEER

    def refusal(self, workload: Workload, asked: Asked) -> str | None:
        return onnx_model.refusal(workload, asked == "forward")

    def prepare(self, workload: Workload, inputs: Inputs, asked: Asked) -> Prepared:
        core = openvino.Core()
        model = core.read_model(onnx_model.build(workload, inputs).SerializeToString())
        compiled = core.compile_model(
            model,
            "CPU",
            {
                "INFERENCE_NUM_THREADS": torch.get_num_threads(),
                "PERFORMANCE_HINT": "LATENCY",
                "INFERENCE_PRECISION_HINT": "f32",
                "ENABLE_CPU_PINNING": False,
            },
        )
        request = compiled.create_infer_request()
        array = onnx_model.to_numpy(to_array_order(inputs.input, workload))
        tensor = openvino.Tensor(array, array.shape, ELEMENT_TYPES[workload.dtype])
        request.set_input_tensor(tensor)

        # The request borrows the array's memory, so the call keeps it alive.
        def call(borrowed: Any = array) -> Any:
            request.infer()
            return request

        def results(result: Any) -> dict[str, Tensor]:
            found = result.get_output_tensor(0)
            bits = found.data.view("uint16") if workload.dtype == "bfloat16" else found.data
            return {"output": from_array_order(onnx_model.from_numpy(bits, inputs.input.dtype), workload)}

        return Prepared(call, results)
