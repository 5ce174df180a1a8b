"""torch.onnx.export gives ONNX's standard nodes, which compute in a runtime what the model computes in eager mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fusednorm
from fusednorm import nn
from fusednorm.activations import FORMULAS, Activation
from fusednorm.tolerance import PEER, judge

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
ml_dtypes = pytest.importorskip("ml_dtypes")

from onnx.reference import ReferenceEvaluator  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.:FutureWarning"),  # of torch's own
    pytest.mark.filterwarnings("ignore:# The axis name. batch will not be used:UserWarning"),  # a second time
]

Call = Callable[..., Tensor]


# --- a model of many calls, exported once ---


class Calls(torch.nn.Module):
    def __init__(self, calls: Sequence[Call]) -> None:
        super().__init__()
        self.calls = calls

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(call(*tensors) for call in self.calls)


def tensors(dtype: torch.dtype = torch.float32, samples: int = 2, height: int = 4) -> tuple[Tensor, ...]:
    """x of (N, 8, H, 6), weight, bias, mean and var of (8,), scale and shift of (N, 8), and a row of (6,)."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    found = drawn(samples, 8, height, 6) + 0.5, drawn(8), drawn(8), drawn(8), drawn(8).square() + 0.5
    return tuple(tensor.to(dtype) for tensor in (*found, drawn(samples, 8), drawn(samples, 8), drawn(6)))


def to_numpy(tensor: Tensor) -> Any:
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return tensor.detach().numpy()


class Exported:
    """An ONNX program of calls, and what a runtime makes of it."""

    def __init__(self, calls: dict[str, Call], given: Sequence[Tensor], opset: int = 23, **options: Any) -> None:
        self.calls, self.given = calls, given
        model = Calls(list(calls.values())).eval()
        self.program = torch.onnx.export(
            model, tuple(given), dynamo=True, opset_version=opset, verbose=False, **options
        )
        self.bytes = self.program.model_proto.SerializeToString()
        self.results: dict[str, Tensor] | None = None

    def run(self, given: Sequence[Tensor]) -> dict[str, Tensor]:
        """The results by ONNX Runtime, by ONNX's own evaluator where the runtime lacks a kernel for the dtype."""
        names = [value.name for value in self.program.model_proto.graph.input]
        inputs = {name: to_numpy(tensor) for name, tensor in zip(names, given, strict=True)}
        if given[0].dtype in (torch.bfloat16, torch.float64):
            outputs = ReferenceEvaluator(self.program.model_proto).run(None, inputs)
        else:
            options = onnxruntime.SessionOptions()
            options.log_severity_level = 4
            options.intra_op_num_threads = 1
            outputs = onnxruntime.InferenceSession(self.bytes, options).run(None, inputs)
        dtype = torch.float64 if given[0].dtype == torch.bfloat16 else given[0].dtype
        return {
            name: torch.from_numpy(np.array(output, dtype=str(dtype).removeprefix("torch."))).to(given[0].dtype)
            for name, output in zip(self.calls, outputs, strict=True)
        }

    def nodes(self, name: str) -> list[str]:
        """The types of the nodes that lead to a result, in alphabetical order."""
        found, todo = [], [self.program.model.graph.outputs[list(self.calls).index(name)]]
        while todo:
            producer = todo.pop().producer()
            if producer is not None and producer not in found:
                found.append(producer)
                todo += [value for value in producer.inputs if value is not None]
        return sorted(node.op_type for node in found if node.op_type != "Identity")

    def fault(self, name: str, given: Sequence[Tensor] | None = None) -> str | None:
        """What is wrong with a result; the judge is the call in float64, as the reference computes it."""
        if given is None and self.results is None:
            self.results = self.run(self.given)
        given, results = (self.given, self.results) if given is None else (given, self.run(given))
        assert results is not None
        return judged(self.calls[name], given, results[name])


def judged(call: Call, given: Sequence[Tensor], got: Tensor) -> str | None:
    with fusednorm.use_instance("reference"):
        expected = call(*(tensor.double() for tensor in given))
        plain = call(*(tensor.float() for tensor in given))
    # A node keeps epsilon in float32, and some compute the statistics of float64 inputs in float32.
    got = got.float() if got.dtype == torch.float64 else got
    return judge(got, expected.detach(), plain.detach(), PEER).fault


# --- what comes out ---

GROUP = lambda x, w, b, *_: fusednorm.group_norm(x, 4, w, b)  # noqa: E731
SILU = ["Mul", "Sigmoid"]

#: Each call of (x, weight, bias, mean, var, scale, shift, row), and the nodes that it gives.
CASES: dict[str, tuple[Call, list[str]]] = {
    "group_norm": (GROUP, ["GroupNormalization"]),
    "group_norm, no weight and bias": (
        lambda x, *_: fusednorm.group_norm(x, 4),
        ["ConstantOfShape", "ConstantOfShape", "GroupNormalization"],
    ),
    "group_norm, no bias": (
        lambda x, w, *_: fusednorm.group_norm(x, 4, w),
        ["ConstantOfShape", "GroupNormalization"],
    ),
    "group_norm, silu": (
        lambda x, w, b, *_: fusednorm.group_norm(x, 4, w, b, activation="silu"),
        ["GroupNormalization", *SILU],
    ),
    "group_norm, rank 2": (
        lambda x, w, b, *_: fusednorm.group_norm(x.mean((2, 3)), 4, w, b),
        ["GroupNormalization", "ReduceMean", "Squeeze", "Unsqueeze"],
    ),
    "group_norm, rank 3": (
        lambda x, w, b, *_: fusednorm.group_norm(x.mean(2), 4, w, b),
        ["GroupNormalization", "ReduceMean"],
    ),
    "group_norm, rank 5": (
        lambda x, w, b, *_: fusednorm.group_norm(x.unsqueeze(2), 4, w, b),
        ["GroupNormalization", "Unsqueeze"],
    ),
    "group_norm, modulated": (
        lambda x, w, b, m, v, scale, shift, _: fusednorm.group_norm(x, 4, w, b, scale=scale, shift=shift),
        ["Add", "Add", "GroupNormalization", "Mul", "Reshape", "Reshape"],
    ),
    "group_norm, shifted": (
        lambda x, w, b, m, v, scale, shift, _: fusednorm.group_norm(x, 4, w, b, shift=shift),
        ["Add", "GroupNormalization", "Reshape"],
    ),
    "group_norm, channels last": (
        lambda *t: fusednorm.group_norm(t[0], 3, t[7], t[7], channel_dim=-1),
        ["GroupNormalization", "Transpose", "Transpose"],
    ),
    "instance_norm": (
        lambda x, w, b, *_: fusednorm.instance_norm(x, weight=w, bias=b),
        ["InstanceNormalization"],
    ),
    "instance_norm, no weight and bias": (lambda x, *_: fusednorm.instance_norm(x), ["InstanceNormalization"]),
    "instance_norm, given statistics": (
        lambda x, w, b, mean, var, *_: fusednorm.instance_norm(x, mean, var, w, b, use_input_stats=False),
        ["BatchNormalization"],
    ),
    "batch_norm": (
        lambda x, w, b, mean, var, *_: fusednorm.batch_norm(x, mean, var, w, b, activation="relu"),
        ["BatchNormalization", "Relu"],
    ),
    "batch_norm, no weight and bias": (
        lambda x, w, b, mean, var, *_: fusednorm.batch_norm(x, mean, var),
        ["BatchNormalization"],
    ),
    "batch_norm, own statistics": (
        lambda x, w, b, *_: fusednorm.batch_norm(x, None, None, w, b, True),
        ["BatchNormalization", "Div", "Mul", "ReduceMean", "ReduceMean", "ReduceSum", "Reshape", "Sub"],
    ),
    "batch_norm, rank 2": (
        lambda x, w, b, mean, var, *_: fusednorm.batch_norm(x.mean((2, 3)), mean, var, w, b),
        ["BatchNormalization", "ReduceMean"],
    ),
    "layer_norm": (lambda *t: fusednorm.layer_norm(t[0], (6,), t[7], t[7]), ["LayerNormalization"]),
    "layer_norm, no weight, two dimensions": (
        lambda x, *_: fusednorm.layer_norm(x, x.shape[-2:]),
        ["LayerNormalization"],
    ),
    "layer_norm of channels": (
        lambda x, w, b, *_: fusednorm.layer_norm(x, w.shape, w, b, channel_dim=1),
        ["LayerNormalization", "Transpose", "Transpose"],
    ),
    "layer_norm of channels, modulated": (
        lambda x, w, b, m, v, scale, shift, _: fusednorm.layer_norm(
            x, w.shape, w, b, channel_dim=1, scale=scale, shift=shift
        ),
        ["Add", "Add", "LayerNormalization", "Mul", "Reshape", "Reshape", "Transpose", "Transpose"],
    ),
    "layer_norm, modulated": (
        lambda x, w, b, m, v, scale, shift, _: fusednorm.layer_norm(
            x.movedim(1, -1), (8,), w, b, scale=scale, shift=shift
        ),
        ["Add", "Add", "LayerNormalization", "Mul", "Reshape", "Reshape", "Transpose"],
    ),
    "rms_norm of frames, shifted": (
        lambda x, w, b, m, v, scale, shift, row: fusednorm.rms_norm(x, (6,), row, shift=shift[..., None, None] * row),
        ["Add", "Mul", "RMSNormalization", "Reshape", "Reshape", "Reshape", "Unsqueeze"],
    ),
    "rms_norm": (lambda *t: fusednorm.rms_norm(t[0], (6,), t[7]), ["RMSNormalization"]),
    "rms_norm, no weight": (lambda x, *_: fusednorm.rms_norm(x, (6,)), ["RMSNormalization"]),
    "group_norm of a sum, silu": (
        lambda x, w, b, m, v, t, *_: fusednorm.group_norm(x, 4, w, b, pre_add=t, activation="silu"),
        ["Add", "GroupNormalization", "Mul", "Reshape", "Sigmoid"],
    ),
    "batch_norm and a shortcut, relu": (
        lambda x, w, b, mean, var, *_: fusednorm.batch_norm(x, mean, var, w, b, post_add=x, activation="relu"),
        ["Add", "BatchNormalization", "Relu"],
    ),
    "layer_norm of a gated sum": (
        lambda *t: fusednorm.layer_norm(t[0], (6,), t[7], t[7], pre_add=t[0], pre_gate=t[7]),
        ["Add", "LayerNormalization", "Mul", "Reshape"],
    ),
}

ACTIVATIONS: dict[str, list[str]] = {
    "silu": SILU,
    "relu": ["Relu"],
    "gelu": ["Gelu"],
    "gelu_tanh": ["Gelu"],
    "sigmoid": ["Sigmoid"],
    "tanh": ["Tanh"],
    "hardswish": ["HardSwish"],
    "leaky_relu": ["LeakyRelu"],
}

#: The families, each once, and the rest of what the operands may be.
FEW = (
    "group_norm",
    "instance_norm",
    "batch_norm",
    "layer_norm",
    "rms_norm",
    "group_norm, modulated",
    "rms_norm, no weight",
)


def some() -> dict[str, Call]:
    return {name: CASES[name][0] for name in FEW}


def activated(activation: str | Activation) -> Call:
    return lambda x, w, b, *_: fusednorm.instance_norm(x, weight=w, bias=b, activation=activation)


@pytest.fixture(scope="module")
def families() -> Exported:
    return Exported({name: call for name, (call, _) in CASES.items()}, tensors())


@pytest.mark.parametrize("name", CASES)
def test_a_call_gives_its_standard_nodes_and_its_values(families: Exported, name: str) -> None:
    assert families.nodes(name) == CASES[name][1]
    assert families.fault(name) is None


@pytest.fixture(scope="module")
def activations() -> Exported:
    parametric = {
        "silu(1.702)": activated(Activation("silu", 1.702)),
        "leaky_relu(0.2)": activated(Activation("leaky_relu", 0.2)),
    }
    return Exported({name: activated(name) for name in ACTIVATIONS} | parametric, tensors())


@pytest.mark.parametrize("name", FORMULAS)
def test_an_activation_gives_its_standard_nodes_and_its_values(activations: Exported, name: str) -> None:
    assert activations.nodes(name) == sorted(["InstanceNormalization", *ACTIVATIONS[name]])
    assert activations.fault(name) is None


@pytest.mark.parametrize(
    ("name", "nodes"), [("silu(1.702)", ["Mul", "Mul", "Sigmoid"]), ("leaky_relu(0.2)", ["LeakyRelu"])]
)
def test_an_activation_keeps_its_parameter(activations: Exported, name: str, nodes: list[str]) -> None:
    assert activations.nodes(name) == ["InstanceNormalization", *nodes]
    assert activations.fault(name) is None


# --- dtypes ---


@pytest.fixture(scope="module", params=["float16", "bfloat16", "float64"])
def typed(request: pytest.FixtureRequest) -> Exported:
    return Exported(some(), tensors(getattr(torch, request.param)))


def test_every_call_in_other_dtypes(typed: Exported) -> None:
    assert {name: fault for name in FEW if (fault := typed.fault(name))} == {}


def test_statistics_of_other_dtypes_are_float32(typed: Exported) -> None:
    own = [node for node in typed.program.model.graph if node.op_type in ("GroupNormalization", "LayerNormalization")]
    assert own
    assert {node.attributes["stash_type"].value for node in own} == {onnx.TensorProto.FLOAT}
    # InstanceNormalization does not say in which dtype it computes statistics, so it gets float32.
    wide = [node for node in typed.program.model.graph if node.op_type == "InstanceNormalization"]
    assert {node.inputs[0].dtype.bitwidth for node in wide} <= {32, 64}


def test_operands_of_several_dtypes_are_cast_to_the_computations() -> None:
    x, *others = tensors()
    exported = Exported({"group_norm": GROUP}, (x.half(), *others), 21)
    assert exported.nodes("group_norm") == ["Cast", "Cast", "GroupNormalization"]
    assert exported.fault("group_norm") is None


# --- operator sets ---


@pytest.mark.parametrize(
    ("opset", "group", "rms"),
    [
        (18, "InstanceNormalization", "ReduceMean"),
        (20, "InstanceNormalization", "ReduceMean"),
        (21, "GroupNormalization", "ReduceMean"),
        (24, "GroupNormalization", "RMSNormalization"),
    ],
)
def test_an_operator_set_without_a_node_gets_smaller_ones(opset: int, group: str, rms: str) -> None:
    calls = {name: CASES[name][0] for name in ("group_norm, silu", "rms_norm")}
    exported = Exported(calls, tensors(), opset)
    assert exported.program.model_proto.opset_import[0].version == opset
    assert group in exported.nodes("group_norm, silu")
    assert rms in exported.nodes("rms_norm")
    assert [exported.fault(name) for name in calls] == [None, None]


# --- orders of memory ---


@pytest.mark.parametrize("opset", [18, 23])
def test_each_order_of_memory(opset: int) -> None:
    """torch.rms_norm has another formula for what it takes for channels_last, which programs cannot hold."""
    wide = torch.randn(2, 8, 6, 10).to(memory_format=torch.channels_last)
    given = {
        "channels_last": torch.randn(2, 8, 6, 5).to(memory_format=torch.channels_last),
        "channels_last in 3-D": torch.randn(2, 8, 3, 4, 5).to(memory_format=torch.channels_last_3d),
        "a slice of it": wide[..., :5],
        "one channel": torch.randn(2, 1, 6, 5).to(memory_format=torch.channels_last),
        "one position": torch.randn(2, 8, 1, 1),
        "permuted": torch.randn(5, 2, 6, 8).permute(1, 3, 2, 0),
        "every second element": torch.randn(2, 8, 6, 10)[..., ::2],
    }
    families: dict[str, Call] = {
        "rms_norm": lambda x: fusednorm.rms_norm(x, x.shape[-1:], activation="silu"),
        "rms_norm of two": lambda x: fusednorm.rms_norm(x, x.shape[-2:], torch.full(x.shape[-2:], 2.0)),
        "rms_norm over channels": lambda x: fusednorm.rms_norm(x, x.shape[1:2], channel_dim=1),
        "layer_norm": lambda x: fusednorm.layer_norm(x, x.shape[-1:]),
        "group_norm": lambda x: fusednorm.group_norm(x, 1, activation="silu"),
    }

    def one(family: Call, place: int) -> Call:
        return lambda *tensors: family(tensors[place])

    calls = {f"{name}, {order}": one(family, i) for name, family in families.items() for i, order in enumerate(given)}
    exported = Exported(calls, tuple(given.values()), opset)
    assert {name: fault for name in calls if (fault := exported.fault(name))} == {}


# --- dynamic shapes ---


@pytest.fixture(scope="module")
def dynamic() -> Exported:
    batch, height = torch.export.Dim("batch"), torch.export.Dim("height")
    shapes = ({0: batch, 2: height}, None, None, None, None, {0: batch}, {0: batch}, None)
    return Exported(some(), tensors(), dynamic_shapes=(shapes,))


@pytest.mark.parametrize(("samples", "height"), [(5, 7), (1, 3)])
def test_batch_and_positions_may_be_dynamic(dynamic: Exported, samples: int, height: int) -> None:
    given = tensors(samples=samples, height=height)
    results = dynamic.run(given)
    faults = {name: judged(dynamic.calls[name], given, results[name]) for name in FEW}
    assert {name: fault for name, fault in faults.items() if fault} == {}


# --- whole models ---


def network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3),
        nn.GroupNorm(4, 8, activation="silu"),
        nn.BatchNorm2d(8, activation="relu"),
        nn.InstanceNorm2d(8, affine=True),
        nn.LayerNorm(6, activation="gelu"),
        nn.RMSNorm(6),
    ).eval()


def outputs_of(program: Any, x: Tensor) -> Tensor:
    (output,) = onnxruntime.InferenceSession(program.model_proto.SerializeToString()).run(
        None, {program.model_proto.graph.input[0].name: x.numpy()}
    )
    return torch.from_numpy(output)


def test_a_model_of_modules() -> None:
    model, x = network(), torch.randn(2, 3, 8, 8)
    program = torch.onnx.export(model, (x,), dynamo=True, opset_version=23, verbose=False)
    names = [node.op_type for node in program.model.graph]
    assert names == [
        "Conv", "GroupNormalization", "Sigmoid", "Mul", "BatchNormalization", "Relu", "InstanceNormalization",
        "LayerNormalization", "Gelu", "RMSNormalization",
    ]  # fmt: skip
    torch.testing.assert_close(outputs_of(program, x), model(x).detach())


# torch 2.11 reads a file so.
@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning:torch.export.pt2_archive._package")
def test_an_exported_program_from_a_file(tmp_path: Path) -> None:
    model, x = network(), torch.randn(2, 3, 8, 8)
    torch.export.save(torch.export.export(model, (x,)), tmp_path / "network.pt2")
    loaded = torch.export.load(tmp_path / "network.pt2")
    program = torch.onnx.export(loaded, (x,), dynamo=True, opset_version=21, verbose=False)
    torch.testing.assert_close(outputs_of(program, x), model(x).detach())


@pytest.mark.filterwarnings("ignore:Exporting a model while it is in training mode:UserWarning")
def test_a_batch_norm_in_training_normalizes_by_its_input() -> None:
    model, x = nn.BatchNorm2d(8).train(), torch.randn(4, 8, 3, 5)
    program = torch.onnx.export(model, (x,), dynamo=True, opset_version=21, verbose=False)
    torch.testing.assert_close(outputs_of(program, x), torch.nn.functional.batch_norm(x, None, None, training=True))


class Quantized(torch.nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        with_scales = fusednorm.layer_norm(x, (16,), out_dtype=torch.int8, out_scale="row")
        fp8 = fusednorm.rms_norm(x, (16,), out_dtype=torch.float8_e4m3fn, out_scale=torch.tensor(0.02))
        return *with_scales, fp8


def test_quantized_outputs_come_from_the_nodes_of_their_norms() -> None:
    x = torch.randn(3, 16)
    program = torch.onnx.export(Quantized().eval(), (x,), dynamo=True, opset_version=23, verbose=False)
    assert {"LayerNormalization", "RMSNormalization"} <= {node.op_type for node in program.model.graph}
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
    found = [torch.from_numpy(output) for output in session.run(None, {session.get_inputs()[0].name: x.numpy()})]
    codes, scales, fp8 = Quantized()(x)
    assert int((found[0].int() - codes.int()).abs().max()) <= 1
    torch.testing.assert_close(found[1], scales)
    assert (
        int((found[2].int() - fp8.view(torch.uint8).int()).abs().max()) <= 1
    )  # the next number, which has the next code
