"""Sums and modulation around the norms of graphs: one call, of the functional API's bits, where there is one."""

from __future__ import annotations

import pytest
import torch
from graph_support import run

import fusednorm
from fusednorm.graph import Graph, GraphFormatError, InvalidGraphError, TensorAttributes, channels_last_strides

IMAGES, ROWS = (2, 8, 9, 10), (3, 6, 40)
Tensors = dict[str, torch.Tensor]


def images(dtype: torch.dtype = torch.float32, device: str = "cpu") -> Graph:
    """act(norm(x + gate r) + residual), whose sum and mean are outputs too."""
    graph = Graph(dtype, device=device)
    x, r, residual = (graph.tensor(IMAGES, name=name) for name in ("x", "r", "residual"))
    gate = graph.tensor((2, 8, 1, 1), name="gate")
    s = graph.pointwise("add", x, graph.pointwise("mul", gate, r)).set_output().set_name("s")
    scale, bias = (graph.tensor((8,), name=name) for name in ("scale", "bias"))
    z, mean, _ = graph.groupnorm(s, scale, bias, num_groups=4)
    mean.set_output().set_name("mean")
    graph.pointwise("silu", graph.pointwise("add", z, residual)).set_output().set_name("y")
    return graph


def rows(dtype: torch.dtype = torch.float32, device: str = "cpu") -> Graph:
    """rms_norm of the residual stream, which goes on."""
    graph = Graph(dtype, device=device)
    x, r = (graph.tensor(ROWS, name=name) for name in ("x", "r"))
    s = graph.pointwise("add", x, r).set_output().set_name("s")
    graph.rmsnorm(s, graph.tensor(ROWS[-1:], name="scale"), phase="inference")[0].set_output().set_name("y")
    return graph


def modulated(dtype: torch.dtype = torch.float32, device: str = "cpu") -> Graph:
    """adaLN: layer_norm(x) (1 + s) + t, s and t for each sample."""
    graph = Graph(dtype, device=device)
    s, t = (graph.tensor((ROWS[0], 1, ROWS[-1]), name=name) for name in ("s", "t"))
    z, _, rstd = graph.layernorm(graph.tensor(ROWS, name="x"), normalized_shape=ROWS[-1:])
    rstd.set_output().set_name("rstd")
    product = graph.pointwise("mul", z, graph.pointwise("add", s, graph.tensor(value=1.0)))
    graph.pointwise("add", product, t).set_output().set_name("y")
    return graph


def modulated_images(dtype: torch.dtype = torch.float32, device: str = "cpu") -> Graph:
    """A shift alone, and an activation; the norm with given statistics."""
    graph = Graph(dtype, device=device)
    x, shift = graph.tensor(IMAGES, name="x"), graph.tensor((2, 8, 1, 1), name="shift")
    mean, variance = (graph.tensor((8,), dtype="float32", name=name) for name in ("mean", "variance"))
    z = graph.batchnorm_inference(x, mean, variance=variance)
    graph.pointwise("relu", graph.pointwise("add", shift, z)).set_output().set_name("y")
    return graph


def quantized(dtype: torch.dtype = torch.float32, device: str = "cpu") -> Graph:
    """rms_norm of a sum, to e4m3 with the scales of rows."""
    graph = Graph(dtype, device=device)
    x, r = (graph.tensor(ROWS, name=name) for name in ("x", "r"))
    s = graph.pointwise("add", x, r).set_output().set_name("s")
    z, _ = graph.rmsnorm(s, graph.tensor(ROWS[-1:], name="scale"))
    y, scale = graph.block_scale_quantize(z, dtype=torch.float8_e4m3fn)
    y.set_output().set_name("y")
    scale.set_output().set_name("row_scale")
    return graph


def quantized_modulated(dtype: torch.dtype = torch.float32, device: str = "cpu") -> Graph:
    """adaLN, to int8 with a scale that the graph has."""
    graph = Graph(dtype, device=device)
    s = graph.tensor((ROWS[0], 1, ROWS[-1]), name="s")
    z, _, _ = graph.layernorm(graph.tensor(ROWS, name="x"), normalized_shape=ROWS[-1:])
    product = graph.pointwise("mul", z, graph.pointwise("add", s, graph.tensor(value=1.0)))
    graph.quantize(product, graph.tensor(value=0.02), dtype="int8").set_output().set_name("y")
    return graph


def of_images(pack: Tensors) -> Tensors:
    y, s = fusednorm.group_norm(
        pack["x"], 4, pack["scale"], pack["bias"], activation="silu", pre_add=pack["r"],
        pre_gate=pack["gate"].view(2, 8), return_sum=True, post_add=pack["residual"],
    )  # fmt: skip
    return {"y": y, "s": s}


def of_rows(pack: Tensors) -> Tensors:
    y, s = fusednorm.rms_norm(pack["x"], ROWS[-1:], pack["scale"], 1e-5, pre_add=pack["r"], return_sum=True)
    return {"y": y, "s": s}


def of_modulated(pack: Tensors) -> Tensors:
    return {"y": fusednorm.layer_norm(pack["x"], ROWS[-1:], scale=pack["s"], shift=pack["t"])}


def of_modulated_images(pack: Tensors) -> Tensors:
    given = pack["x"], pack["mean"], pack["variance"]
    return {"y": fusednorm.batch_norm(*given, activation="relu", shift=pack["shift"].view(2, 8))}


def of_quantized(pack: Tensors) -> Tensors:
    y, scale, s = fusednorm.rms_norm(
        pack["x"], ROWS[-1:], pack["scale"], 1e-5, pre_add=pack["r"], return_sum=True, out_dtype=torch.float8_e4m3fn
    )
    return {"y": y, "row_scale": scale, "s": s}


def of_quantized_modulated(pack: Tensors) -> Tensors:
    one = torch.tensor(0.02, device=pack["x"].device)
    return {"y": fusednorm.layer_norm(pack["x"], ROWS[-1:], scale=pack["s"], out_dtype=torch.int8, out_scale=one)}


FORMS = {
    "images": (images, of_images),
    "rows": (rows, of_rows),
    "modulated": (modulated, of_modulated),
    "modulated_images": (modulated_images, of_modulated_images),
    "quantized": (quantized, of_quantized),
    "quantized_modulated": (quantized_modulated, of_quantized_modulated),
}


@pytest.mark.parametrize("form", FORMS)
def test_what_stands_around_a_norm_is_one_call_of_the_same_bits(form: str) -> None:
    build, call = FORMS[form]
    graph = build()
    pack = run(graph)
    assert graph.plan.name.startswith("fused:"), graph.explain()
    assert len(graph.explain().operations) == 1, graph.explain()
    assert graph.get_workspace_size() == 0
    for name, tensor in call(pack).items():
        assert torch.equal(pack[name], tensor), name
    assert graph.verify(pack), graph.verify(pack)


@pytest.mark.parametrize("form", FORMS)
def test_every_plan_of_a_norm_with_its_surroundings_verifies(form: str) -> None:
    graph = FORMS[form][0](torch.bfloat16 if form.startswith("modulated") else torch.float32)
    names = [plan.name for plan in graph.build().plans if plan.reason is None]
    assert {name.split(":")[0] for name in names} == {"fused", "composed", "unfused"}
    for name in names:
        assert graph.verify(run(graph, name)), name


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_every_plan_of_a_norm_with_its_surroundings_verifies_on_a_gpu(form: str) -> None:
    build, call = FORMS[form]
    for dtype in (torch.float32, torch.bfloat16):
        graph = build(dtype, "cuda")
        for plan in graph.build().plans:
            if plan.reason is None:
                pack = run(graph, plan.name)
                assert graph.verify(pack), (dtype, plan.name)
        pack = run(graph)
        for name, tensor in call(pack).items():
            assert torch.equal(pack[name], tensor), (dtype, name)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_a_shortcut_is_a_part_of_the_backward(layout: str) -> None:
    """A ResNet block's end in training: dz is the gradient of the shortcut, and dx follows from it."""
    strides = channels_last_strides(IMAGES) if layout == "nhwc" else None
    graph = Graph(torch.float32)
    x, r, dy = (graph.tensor(IMAGES, strides, name=name) for name in ("x", "r", "dy"))
    scale, bias = (graph.tensor((8,), name=name) for name in ("scale", "bias"))
    z, mean, rstd, _, _ = graph.batchnorm(x, scale, bias)
    total = graph.pointwise("add", z, r)
    graph.pointwise("silu", total).set_output().set_name("y")
    dz = graph.pointwise("silu_backward", dy, total).set_output().set_name("dr")
    for name, tensor in zip(("dx", "dscale", "dbias"), graph.batchnorm_backward(dz, x, scale, mean, rstd), strict=True):
        tensor.set_output().set_name(name)
    names = [plan.name for plan in graph.build().plans if plan.reason is None]
    assert {name.split(":")[0] for name in names} == {"fused", "composed", "unfused"}
    for name in names:
        assert graph.verify(run(graph, name)), name
    pack = run(graph)
    assert [one.label for one in graph.explain().operations] == [
        "batchnorm + add + silu", "silu_backward + batchnorm_backward",
    ]  # fmt: skip
    leaves = {name: pack[name].clone().requires_grad_() for name in ("x", "r", "scale", "bias")}
    given = leaves["x"], None, None, leaves["scale"], leaves["bias"], True
    y = fusednorm.batch_norm(*given, activation="silu", post_add=leaves["r"])
    found = torch.autograd.grad(y, list(leaves.values()), pack["dy"])
    for name, gradient in zip(leaves, found, strict=True):
        assert torch.equal(pack[f"d{name}"], gradient), name


def test_a_shortcuts_gradient_that_the_kernel_would_round_is_not_fused() -> None:
    graph = Graph(torch.bfloat16)
    x, r, dy = (graph.tensor(IMAGES, name=name) for name in ("x", "r", "dy"))
    z, mean, rstd, _, _ = graph.batchnorm(x)
    dz = graph.pointwise("silu_backward", dy, graph.pointwise("add", z, r))
    dz.set_name("dz")  # float32, as virtual tensors are
    graph.pointwise("relu", dz).set_output().set_name("y")
    graph.batchnorm_backward(dz, x, None, mean, rstd)[0].set_output().set_name("dx")
    pack = run(graph)
    reasons = [remark.reason for remark in graph.explain().not_fused]
    assert "dz is declared float32, and the kernel rounds it to the dtype of x" in reasons
    assert graph.verify(pack)


def test_a_sum_that_the_kernel_would_round_is_not_fused() -> None:
    graph = images(torch.bfloat16)
    graph.nodes[1].outputs["y"].set_output(False)  # float32, as virtual tensors are
    pack = run(graph)
    reasons = [remark.reason for remark in graph.explain().not_fused]
    assert "s is declared float32, and the kernel rounds the sum to bfloat16" in reasons
    assert len(graph.explain().operations) == 5  # the norm runs in float32, and the residual is bfloat16
    assert graph.verify(pack)


def test_a_product_wider_than_the_kernels_registers_is_not_fused() -> None:
    graph = modulated()
    graph.nodes[2].outputs["y"].set_name("product").set_dtype(torch.float64)
    pack = run(graph)
    reasons = [remark.reason for remark in graph.explain().not_fused]
    assert "product is declared float64, and the kernel's registers hold float32" in reasons
    assert graph.verify(pack)


def test_a_residual_that_is_the_sum_itself_is_added_behind() -> None:
    graph = Graph(torch.float32)
    s = graph.pointwise("add", graph.tensor(ROWS, name="x"), graph.tensor(ROWS, name="r"))
    z, _, _ = graph.layernorm(s, normalized_shape=ROWS[-1:])
    graph.pointwise("add", s, z).set_output().set_name("y")
    pack = run(graph)
    assert [one.label for one in graph.explain().operations] == ["add", "layernorm + add_1"]
    assert graph.verify(pack)


def crossed() -> Graph:
    """Two norms, each of which adds what follows from the other's mean."""
    graph = Graph(torch.float32)
    x, other, t = (graph.tensor(IMAGES, name=name) for name in ("x", "other", "t"))
    (z, mean, _), (z2, mean2, _) = graph.instancenorm(x), graph.instancenorm(other)
    graph.pointwise("add", z, graph.pointwise("add", t, mean2)).set_output().set_name("y")
    graph.pointwise("add", z2, graph.pointwise("add", t, mean)).set_output().set_name("y2")
    return graph


def test_operations_that_would_wait_for_each_other_are_not_fused() -> None:
    graph = crossed()
    pack = run(graph)
    assert sum(len(one.nodes) > 1 for one in graph.explain().operations) == 1
    assert any("follows from the norm itself" in remark.reason for remark in graph.explain().not_fused)
    assert graph.verify(pack)


def test_an_operation_waits_for_what_it_adds() -> None:
    graph = Graph(torch.float32)
    x, other = (graph.tensor(IMAGES, name=name) for name in ("x", "other"))
    z, _, _ = graph.groupnorm(x, num_groups=2)
    residual = graph.pointwise("relu", other)  # behind the norm in the order of nodes
    graph.pointwise("add", z, residual).set_output().set_name("y")
    assert graph.verify(run(graph))
    assert [one.label for one in graph.explain().operations] == ["relu", "groupnorm + add"]


def test_a_shortcuts_gradient_in_the_workspace_has_memory_beside_that_of_dx() -> None:
    """Both are results of one kernel, and dz is read when dx no longer is."""
    graph = Graph(torch.float32)
    x, r, dy = (graph.tensor(IMAGES, name=name) for name in ("x", "r", "dy"))
    z, mean, rstd, _, _ = graph.batchnorm(x)
    dz = graph.pointwise("silu_backward", dy, graph.pointwise("add", z, r))
    dx = graph.batchnorm_backward(dz, x, None, mean, rstd)[0]
    product = graph.pointwise("mul", dx, r).set_output().set_name("product")
    graph.pointwise("mul", dz, product).set_output().set_name("of_dz")
    pack = run(graph)
    assert [one.label for one in graph.explain().operations] == [
        "batchnorm + add", "batchnorm + silu_backward + batchnorm_backward", "mul", "mul_1",
    ]  # fmt: skip
    assert graph.verify(pack)


def test_a_sum_in_the_workspace_has_memory_beside_what_is_read_after_it() -> None:
    graph = Graph(torch.float32)
    x, r, w = (graph.tensor(ROWS, name=name) for name in ("x", "r", "w"))
    scale = graph.tensor(ROWS[-1:], name="scale")
    other, _ = graph.rmsnorm(w, scale)
    s = graph.pointwise("add", x, r)
    z, _ = graph.rmsnorm(s, scale)
    y, row_scale = graph.block_scale_quantize(z, dtype=torch.float8_e4m3fn)
    y.set_output().set_name("y")
    row_scale.set_output().set_name("row_scale")
    product = graph.pointwise("mul", other, row_scale).set_output().set_name("product")
    graph.pointwise("mul", s, product).set_output().set_name("of_sum")
    pack = run(graph)
    assert [one.label for one in graph.explain().operations] == [
        "rmsnorm", "add + rmsnorm_1 + block_scale_quantize", "mul", "mul_1",
    ]  # fmt: skip
    assert graph.verify(pack)


def test_a_factor_that_is_not_one_plus_a_scale_is_explained() -> None:
    graph = Graph(torch.float32)
    z, _, _ = graph.groupnorm(graph.tensor(IMAGES, name="x"), num_groups=2)
    graph.pointwise("mul", z, graph.tensor((2, 8, 1, 1), name="factor")).set_output().set_name("y")
    assert graph.verify(run(graph))
    assert "multiply by 1 + scale" in graph.explain().not_fused[0].reason


# --- 8 bits ---


def test_eight_bits_are_outputs_of_quantizing_nodes_alone() -> None:
    graph = Graph(torch.float32)
    x = graph.tensor((4, 8), name="x")
    graph.quantize(x, graph.tensor((8,), name="scale"), dtype="int8").set_output().set_name("y")
    with pytest.raises(InvalidGraphError, match=r"'scale' has dims \(8,\); expected one element; use block_scale"):
        graph.build()
    with pytest.raises(InvalidGraphError, match="dtype is 'int4'; expected one of float8_e4m3fn, float8_e5m2, int8"):
        Graph.from_json(quantized().to_json().replace('"dtype": "float8_e4m3fn"', '"dtype": "int4"')).build()
    graph = Graph(torch.float32)
    graph.pointwise("relu", graph.tensor((4, 8), dtype="int8", name="x")).set_output()
    with pytest.raises(InvalidGraphError, match="it is int8; expected a floating dtype"):
        graph.build()
    graph = quantized()
    graph.nodes[-1].outputs["y"].set_dtype("int8")
    with pytest.raises(InvalidGraphError, match="it is int8; expected float8_e4m3fn; leave its dtype out"):
        graph.build()


def test_what_is_added_behind_a_norm_is_not_quantized_with_it() -> None:
    graph = Graph(torch.float32)
    x, r = (graph.tensor(ROWS, name=name) for name in ("x", "r"))
    z, _ = graph.rmsnorm(x, graph.tensor(ROWS[-1:], name="scale"))
    graph.quantize(graph.pointwise("add", z, r), graph.tensor(value=0.02), dtype="int8").set_output().set_name("y")
    assert [one.label for one in graph.build().explain().operations] == ["rmsnorm + add", "quantize"]
    assert graph.verify(run(graph))


def test_a_norm_that_keeps_its_statistics_is_quantized_by_a_node_of_its_own() -> None:
    graph = quantized()
    graph.nodes[1].outputs["inv_variance"].set_output().set_name("rstd")
    assert graph.verify(run(graph))
    assert [one.label for one in graph.explain().operations] == ["add + rmsnorm", "block_scale_quantize"]


def test_wrong_codes_are_found() -> None:
    graph = quantized_modulated()
    pack = run(graph)
    pack["y"][0, 0, 0] += 1
    assert not graph.verify(pack)


# --- tensors with a value ---


def halved(**given: object) -> tuple[Graph, TensorAttributes]:
    graph = Graph(torch.bfloat16)
    half = graph.tensor(value=0.5, **given)  # type: ignore[arg-type]
    graph.pointwise("mul", graph.tensor((2, 3, 4), name="x"), half).set_output().set_name("y")
    return graph, half


def test_a_value_is_the_graphs_own() -> None:
    graph, half = halved()
    again = Graph.from_json(graph.to_json())
    for one in (graph, again):
        pack = run(one)
        assert set(pack) == {"x", "y"}
        assert torch.equal(pack["y"], pack["x"] * 0.5)
        assert one.verify(pack)
    assert half.value == 0.5


def test_a_value_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidGraphError, match="value is 'one'; expected a finite number"):
        Graph(torch.float32).tensor(value="one")  # type: ignore[arg-type]
    with pytest.raises(InvalidGraphError, match=r"has a value and dims \(2, 1\); expected one element"):
        halved(dims=(2, 1))[0].build()
    graph = Graph(torch.float32)
    one = graph.tensor(value=1.0)
    graph.pointwise("relu", one).set_output()
    graph.quantize(one, graph.tensor(value=0.02), dtype="int8").set_output()
    words = "has a value and is read by node {}, port x; expected a reader add"
    with pytest.raises(InvalidGraphError, match=f"(?s){words.format('relu')}.*{words.format('quantize')}"):
        graph.build()
    with pytest.raises(GraphFormatError, match="value"):
        Graph.from_json(halved()[0].to_json().replace("0.5", '"half"'))
