"""ONNX Runtime's CPU provider."""

from __future__ import annotations

from typing import Any

import onnxruntime
import torch
import torch.utils.dlpack
from torch import Tensor

from fusednorm.bench.contenders import Prepared
from fusednorm.bench.judging import Asked
from fusednorm.bench.peers import onnx_model
from fusednorm.bench.peers.arrays import from_array_order, to_array_order
from fusednorm.bench.workloads import Inputs, Workload
from fusednorm.tolerance import PEER


class OnnxRuntime:
    """An inference session; the output is allocated by the session's arena."""

    name = "onnxruntime"
    allowance = PEER

    def refusal(self, workload: Workload, asked: Asked) -> str | None:
        return onnx_model.refusal(workload, asked == "forward")

    def prepare(self, workload: Workload, inputs: Inputs, asked: Asked) -> Prepared:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3
        # Its threads would otherwise keep spinning into the next contender's turn.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        session = onnxruntime.InferenceSession(
            onnx_model.build(workload, inputs).SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        tensor = to_array_order(inputs.input, workload)
        value = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(
            onnx_model.to_numpy(tensor), onnx_model.ELEMENT_TYPES[workload.dtype]
        )
        binding = session.io_binding()
        binding.bind_ortvalue_input("x", value)

        # The session borrows the tensor's memory, so the call keeps it alive.
        def call(borrowed: tuple[Any, ...] = (tensor, value)) -> Any:
            binding.bind_output("y", "cpu")
            session.run_with_iobinding(binding)
            return binding

        def results(result: Any) -> dict[str, Tensor]:
            found = result.get_outputs()[0]
            # numpy has no bf16; dlpack has.
            output = (
                torch.utils.dlpack.from_dlpack(found).clone()
                if workload.dtype == "bfloat16"
                else onnx_model.from_numpy(found.numpy(), inputs.input.dtype)
            )
            return {"output": from_array_order(output, workload)}

        return Prepared(call, results)
