"""Every kind of node and every pattern: right in every dtype and layout, fused or not; the functional API's bits."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from graph_support import GRAPHS, NODES, PATTERNS, described, run
from interpreter_support import interpreted
from torch import Tensor

import fusednorm
from fusednorm import ops
from fusednorm.graph import KINDS, Graph
from fusednorm.graph.nodes import PORT_OF_GRADIENT, by_operand
from fusednorm.operands import BackwardOperands, Gradients, Operands

DTYPES = (torch.float64, torch.float16, torch.float32, torch.bfloat16)
LAYOUTS = ("nchw", "nhwc")
NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in DTYPES}


def layout_for(name: str, dtype: torch.dtype) -> str:
    """Each graph meets each dtype and each layout, and each dtype each layout, in half of all cases.

    A kernel belongs to a dtype and a layout, and has tests of its own for every value of both. Which of them a graph
    passes on is no matter of how they meet. Graphs that are fused to one kernel have it in the same layouts.
    """
    return LAYOUTS[(DTYPES.index(dtype) + ("batchnorm" not in name)) % 2]


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
@pytest.mark.parametrize("name", GRAPHS)
def test_every_graph_verifies(name: str, dtype: torch.dtype) -> None:
    graph = described(name, dtype, layout_for(name, dtype))
    pack = run(graph)
    found = graph.verify(pack)
    assert found.ok, found
    assert set(found.verdicts) == {tensor.name for tensor in graph.outputs}


def test_the_graphs_have_every_kind_of_node() -> None:
    used = {node.kind.name for name in GRAPHS for node in described(name).nodes}
    assert used | {"mul"} == set(KINDS)


def test_every_port_of_a_norm_is_one_operand_of_the_library() -> None:
    operands = {field.name for kind in (Operands, BackwardOperands) for field in fields(kind)}
    for kind in KINDS.values():
        if kind.family is None:
            continue
        named = by_operand({port.name: port for port in kind.inputs})
        running = {port.name for port in kind.inputs if port.name.startswith("prev_running_")}
        assert len(named) == len(kind.inputs) - len(running), kind.name
        assert set(named) <= operands - {"scale", "shift"}, kind.name
        assert ("weight" in named) == any(port.name == "scale" for port in kind.inputs)
        if kind.operation == "backward":
            assert {port.name for port in kind.outputs} <= set(PORT_OF_GRADIENT.values())
    assert set(PORT_OF_GRADIENT) <= {field.name for field in fields(Gradients)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=NAMES.get)
@pytest.mark.parametrize("name", PATTERNS)
def test_every_plan_of_every_pattern_verifies(name: str, dtype: torch.dtype) -> None:
    layout = layout_for(name, dtype)
    graph = described(name, dtype, layout).build()
    for plan in graph.plans:
        if plan.reason is None:
            again = described(name, dtype, layout)
            assert again.verify(run(again, plan.name)), plan.name


@pytest.mark.gpu
@pytest.mark.parametrize("name", GRAPHS)
def test_every_graph_verifies_on_a_gpu(name: str) -> None:
    for dtype in DTYPES:
        for layout in ("nchw", "nhwc"):
            graph = described(name, dtype, layout, device="cuda")
            found = graph.verify(run(graph))
            assert found.ok, (name, dtype, layout, str(found))
            again = described(name, dtype, layout, device="cuda").build()
            pack = run(graph)
            for plan in again.plans:
                if plan.reason is None:
                    again.build_plans(plan.name)
                    again.execute(pack)
                    assert again.verify(pack), (name, dtype, layout, plan.name)


@pytest.mark.gpu
def test_a_gpu_gives_the_functional_bits() -> None:
    pack = run(described("norm_activation", torch.bfloat16, "nhwc", device="cuda"))
    scale, bias = pack["scale"].flatten(), pack["bias"].flatten()
    assert _same(pack["y"], fusednorm.group_norm(pack["x"], 4, scale, bias, activation="silu"))


#: Every norm of the graphs in the interpreter, by each instance of triton in turn: an instance may run alone what its
#: supports() lets through, and not what the choice would have picked.
INTERPRETED = """
import json
import fusednorm
import torch
from fusednorm.backends.triton.instances import INSTANCES
from fusednorm.graph.errors import UnsupportedGraphError
from graph_support import PATTERNS, described, run
NODES = [kind + "norm" + how for kind in ("batch", "group", "instance", "layer", "rms") for how in ("", "_backward")]
GIVEN = ["batchnorm_inference", *(kind + "norm_given" for kind in ("group", "instance", "layer", "rms"))]
found, counts = [], {}
for instance in INSTANCES:
    for name in (*NODES, *GIVEN, *PATTERNS):
        for layout in ("nchw", "nhwc"):
            with fusednorm.use_instance(instance.name):
                graph = described(name, torch.float32, layout, (2, 8, 3, 5))
                try:
                    verification = graph.verify(run(graph))
                except UnsupportedGraphError:
                    continue
            counts[instance.name] = counts.get(instance.name, 0) + 1
            found += [] if verification.ok else [(instance.name, name, layout, str(verification))]
print(json.dumps([found, counts]))
"""


def test_every_norm_of_the_graphs_on_every_triton_instance_in_the_interpreter() -> None:
    triton = pytest.importorskip("triton")
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8):
        pytest.skip("the interpreter of triton < 3.8 fails with numpy >= 2.4")
    found, counts = interpreted(INTERPRETED)
    assert found == []
    assert set(counts) == {f"triton.{one}" for one in ("tiles", "whole", "held", "rows", "columns", "flat")}


# --- the functional API's bits ---


def _same(one: Tensor, other: Tensor | None) -> bool:
    assert other is not None
    return one.dtype == other.dtype and torch.equal(one.flatten(), other.flatten())


def _flat(tensor: Tensor) -> Tensor:
    return tensor.flatten()


def described_in(name: str, dtype: torch.dtype) -> Graph:
    return described(name, dtype, layout_for(name, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
class TestSameBits:
    def test_groupnorm_and_silu(self, dtype: torch.dtype) -> None:
        pack = run(described_in("norm_activation", dtype))
        x, scale, bias = pack["x"], _flat(pack["scale"]), _flat(pack["bias"])
        y, mean, rstd = ops.group_norm_forward(x, 4, scale, bias, 1e-5, activation="silu")
        assert _same(pack["y"], y)
        assert _same(pack["y"], fusednorm.group_norm(x, 4, scale, bias, activation="silu"))
        assert _same(pack["mean"], mean)
        assert _same(pack["inv_variance"], rstd)
        assert pack["y"].stride() == y.stride()

    def test_groupnorm_backward_through_silu(self, dtype: torch.dtype) -> None:
        pack = run(described_in("activation_backward_norm_backward", dtype))
        x, scale, bias = pack["x"], _flat(pack["scale"]), _flat(pack["bias"])
        _, mean, rstd = ops.group_norm_forward(x, 4, scale, bias, 1e-5, activation="silu")
        expected = ops.group_norm_backward(pack["dy"], x, mean, rstd, 4, scale, bias, activation="silu")
        for port, gradient in zip(("dx", "dscale", "dbias"), expected, strict=True):
            assert _same(pack[port], gradient), port

    def test_batchnorm_chain(self, dtype: torch.dtype) -> None:
        pack = run(described_in("batchnorm_chain", dtype))
        x, scale, bias, mean, rstd = (pack[name] for name in ("x", "scale", "bias", "mean", "inv_variance"))
        expected = ops.batch_norm_backward(
            pack["dy"], x, _flat(mean), _flat(rstd), _flat(scale), _flat(bias), activation="relu"
        )
        for port, gradient in zip(("dx", "dscale", "dbias"), expected, strict=True):
            assert _same(pack[port], gradient), port

    def test_batchnorm_training_and_running_statistics(self, dtype: torch.dtype) -> None:
        pack = run(described_in("batchnorm", dtype))
        running = [_flat(pack[f"prev_running_{what}"]).clone() for what in ("mean", "variance")]
        y, mean, rstd = ops.batch_norm_training(
            pack["x"], _flat(pack["scale"]), _flat(pack["bias"]), *running, 0.3, 1e-5
        )
        expected = {"y": y, "mean": mean, "inv_variance": rstd}
        expected |= {"next_running_mean": running[0], "next_running_variance": running[1]}
        for port, tensor in expected.items():
            assert _same(pack[port], tensor), port

    def test_batchnorm_inference_with_variance(self, dtype: torch.dtype) -> None:
        pack = run(described_in("batchnorm_inference_variance", dtype))
        parameters = [_flat(pack[name]) for name in ("mean", "variance", "scale", "bias")]
        assert _same(pack["y"], fusednorm.batch_norm(pack["x"], *parameters, eps=1e-5))

    def test_the_other_families(self, dtype: torch.dtype) -> None:
        pack = run(described_in("layernorm", dtype))
        shape = tuple(pack["scale"].shape)
        assert _same(pack["y"], fusednorm.layer_norm(pack["x"], shape, pack["scale"], pack["bias"]))
        pack = run(described_in("rmsnorm", dtype))
        assert _same(pack["y"], fusednorm.rms_norm(pack["x"], shape, pack["scale"], eps=1e-5))
        pack = run(described_in("instancenorm", dtype))
        scale, bias = _flat(pack["scale"]), _flat(pack["bias"])
        assert _same(pack["y"], fusednorm.instance_norm(pack["x"], weight=scale, bias=bias))


def test_a_given_inverse_deviation_of_large_numbers_is_the_kernels() -> None:
    """The variance, 1e50, is beyond float32."""
    graph = Graph(torch.float32)
    x, mean, spread = graph.tensor((2, 8, 5, 6), name="x"), *(graph.tensor((8,), name=one) for one in ("mean", "rstd"))
    graph.batchnorm_inference(x, mean, inv_variance=spread).set_output().set_name("y")
    values = 1e25 * torch.randn(2, 8, 5, 6)
    pack = {"x": values, "mean": torch.zeros(8), "rstd": torch.full((8,), 1e-25), "y": torch.empty_like(values)}
    graph.build().execute(pack)
    torch.testing.assert_close(pack["y"], values * 1e-25)


def test_parts_of_a_backward_are_the_kernels_of_parts() -> None:
    pack = run(described("groupnorm_backward_data"))
    statistics = [pack["mean"], pack["inv_variance"]]
    scale = _flat(pack["scale"])
    assert _same(pack["dx"], ops.group_norm_backward_data(pack["dy"], pack["x"], *statistics, 4, scale, None))
    pack = run(described("groupnorm_backward_gamma_beta"))
    expected = ops.group_norm_backward_gamma_beta(pack["dy"], pack["x"], *statistics, 4, scale, scale)
    assert _same(pack["dscale"], expected[0])
    assert _same(pack["dbias"], expected[1])


def test_every_instance_by_name_gives_its_own_bits() -> None:
    for name in ("cpu.planes", "cpu.planes_split", "reference"):
        pack = run(described("norm_activation"), f"fused:{name}")
        with fusednorm.use_instance(name):
            y = fusednorm.group_norm(pack["x"], 4, _flat(pack["scale"]), _flat(pack["bias"]), activation="silu")
        assert _same(pack["y"], y), name


# --- dtypes and strides between nodes ---


def test_node_by_node_keeps_a_virtual_tensor_in_the_intermediate_dtype() -> None:
    graph = described("norm_activation", torch.bfloat16)
    pack = run(graph, "unfused:cpu.planes")
    z, _, _ = ops.group_norm_forward(pack["x"].float(), 4, _flat(pack["scale"]), _flat(pack["bias"]), 1e-5)
    assert _same(pack["y"], torch.nn.functional.silu(z).bfloat16())
    assert graph.get_workspace_size() >= 2 * z.numel() * 4  # z, and before it x converted or behind it y unrounded
    assert any("groupnorm.y: in the workspace as float32" in note for note in graph.plan.notes)


def test_a_narrow_intermediate_dtype_rounds_only_node_by_node() -> None:
    graph = described("norm_activation", torch.bfloat16, intermediate=torch.bfloat16)
    fused = run(graph)
    alone = run(described("norm_activation", torch.bfloat16, intermediate=torch.bfloat16), "unfused:cpu.planes")
    assert not torch.equal(fused["y"], alone["y"])
    assert any("in registers as float32, not as bfloat16" in note for note in graph.plan.notes)


def test_a_wider_intermediate_dtype_is_not_fused() -> None:
    graph = described("norm_activation", torch.float32, intermediate=torch.float64)
    pack = run(graph)
    assert graph.plan.name == "cpu.planes"
    assert "registers hold float32" in graph.explain().not_fused[0].reason
    assert graph.verify(pack)


def test_a_gradient_wider_than_its_parameter_is_not_rounded_on_the_way() -> None:
    graph = Graph(torch.bfloat16)
    x, dy = graph.tensor((4, 8, 5, 5), name="x"), graph.tensor((4, 8, 5, 5), name="dy")
    scale = graph.tensor((8,), name="scale")
    mean, rstd = graph.tensor((4, 2), dtype="float32", name="mean"), graph.tensor((4, 2), dtype="float32", name="rstd")
    _, dscale, _ = graph.groupnorm_backward(dy, x, scale, mean, rstd, num_groups=2)
    dscale.set_output().set_name("dscale").set_dtype(torch.float32)
    pack = run(graph)
    assert not torch.equal(pack["dscale"].bfloat16().float(), pack["dscale"])
    assert graph.verify(pack)


def test_results_in_float64_of_intermediates_in_float32() -> None:
    """A norm that reads such a tensor computes in float32; one that reads a float64 input does not."""
    graph = Graph(torch.float64)
    x, r = graph.tensor((2, 4, 3), name="x"), graph.tensor((2, 4, 3), name="r")
    z, *_ = graph.instancenorm(graph.pointwise("add", x, r), phase="inference")
    graph.pointwise("relu", z).set_output().set_name("y")
    plain = Graph(torch.float64)
    y, *_ = plain.instancenorm(plain.tensor((2, 4, 3), name="x"), phase="inference")
    y.set_output().set_name("y")
    for seed in range(20):
        for plan in ("unfused:cpu.planes", "unfused:reference"):
            assert graph.verify(run(graph, plan, seed)), (seed, plan)
        pack = run(plain, seed=seed)
        assert plain.verify(pack)
        pack["y"] += 1e-9
        assert not plain.verify(pack)


def test_inputs_of_any_strides_and_results_of_others() -> None:
    base = torch.randn(4, 5, 6, 16)
    for x in (base.permute(0, 3, 1, 2), base[..., ::2].permute(0, 3, 2, 1), base[:1].expand(4, 5, 6, 16)):
        graph = Graph(torch.float32)
        z, _, _ = graph.groupnorm(graph.tensor_like(x, name="x"), num_groups=1, phase="inference")
        y = graph.pointwise("relu", z).set_output().set_name("y")
        graph.validate()
        assert y.strides == fusednorm.group_norm(x, 1).stride()
        result = torch.empty_strided(x.shape, y.strides)
        graph.build().execute({"x": x, "y": result})
        assert torch.equal(result, fusednorm.group_norm(x, 1, activation="relu"))
        y.set_strides(torch.empty(x.shape).transpose(0, 1).contiguous().transpose(0, 1).stride())
        graph.build()
        other = torch.empty_strided(x.shape, y.strides)
        graph.execute({"x": x, "y": other})
        assert torch.equal(result, other)


def test_an_empty_batch() -> None:
    for name in NODES:
        graph = described(name, dims=(0, 8, 5, 6))
        assert graph.verify(run(graph)), name


def test_ranks_other_than_four() -> None:
    for dims in ((6, 8), (3, 8, 7), (2, 8, 3, 4, 5)):
        for name in ("batchnorm", "batchnorm_chain", "norm_activation", "layernorm_backward"):
            if len(dims) == 2 and name == "layernorm_backward":
                continue
            graph = described(name, dims=dims)
            assert graph.verify(run(graph)), (name, dims)


def test_statistics_alone() -> None:
    graph = Graph(torch.bfloat16)
    _, mean, _ = graph.groupnorm(graph.tensor((2, 8, 4, 4), name="x"), num_groups=4)
    mean.set_output().set_name("mean").set_dtype(torch.float64)
    pack = run(graph)
    assert graph.verify(pack)
    _, expected, _ = ops.group_norm_forward(pack["x"], 4, None, None, 1e-5)
    assert torch.equal(pack["mean"].view(2, 4), expected.double())


def test_without_scale_and_bias() -> None:
    graph = Graph(torch.float32)
    x, dy = graph.tensor((2, 8, 5, 5), name="x"), graph.tensor((2, 8, 5, 5), name="dy")
    z, mean, rstd = graph.groupnorm(x, num_groups=4)
    dz = graph.pointwise("leaky_relu_backward", dy, z, parameter=0.2)
    dx, dscale, dbias = graph.groupnorm_backward(dz, x, None, mean, rstd, num_groups=4)
    assert dscale is None
    assert dbias is None
    dx.set_output().set_name("dx")
    pack = run(graph)
    assert graph.verify(pack)
    activation = fusednorm.Activation("leaky_relu", 0.2)
    _, mean, rstd = ops.group_norm_forward(pack["x"], 4, None, None, 1e-5)
    expected = ops.group_norm_backward_data(pack["dy"], pack["x"], mean, rstd, 4, None, None, activation=activation)
    assert _same(pack["dx"], expected)
