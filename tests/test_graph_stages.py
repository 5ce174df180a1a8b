"""The stages in and out of order, plans by name, what is fused, and the tuning cache."""

from __future__ import annotations

import doctest
import json
import logging
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from graph_support import DIMS, GRAPHS, PATTERNS, described, run

import fusednorm
from fusednorm.graph import (
    STAGES,
    Graph,
    StageError,
    TensorAttributes,
    UnknownPlanError,
    UnsupportedGraphError,
    draw,
)
from fusednorm.graph import graph as graph_module
from fusednorm.graph import tensors as tensors_module
from fusednorm.graph.tuning import cache_directory

# --- stages ---

CALLS: dict[str, Callable[[Graph], Any]] = {
    **{stage: lambda graph, stage=stage: getattr(graph, stage)() for stage in STAGES},
    "execute": lambda graph: graph.execute({}),
    "get_workspace_size": lambda graph: graph.get_workspace_size(),
    "autotune": lambda graph: graph.autotune({}),
    "reference": lambda graph: graph.reference({}),
    "verify": lambda graph: graph.verify({}),
    "explain": lambda graph: graph.explain(),
    "plans": lambda graph: graph.plans,
    "plan": lambda graph: graph.plan,
}
NEEDS = {
    "build_operation_graph": "validate",
    "create_execution_plans": "build_operation_graph",
    "check_support": "create_execution_plans",
    "build_plans": "check_support",
    "execute": "build_plans",
    "get_workspace_size": "build_plans",
    "autotune": "check_support",
    "reference": "build_operation_graph",
    "verify": "build_operation_graph",
    "explain": "build_operation_graph",
    "plans": "create_execution_plans",
    "plan": "build_plans",
}


@pytest.mark.parametrize("what", NEEDS)
def test_a_stage_out_of_order_names_the_one_that_is_missing(what: str) -> None:
    graph = described("norm_activation")
    for stage in STAGES[: STAGES.index(NEEDS[what])]:
        with pytest.raises(StageError, match=f"{what} needs the stage {NEEDS[what]}"):
            CALLS[what](graph)
        getattr(graph, stage)()


def test_a_change_starts_over() -> None:
    graph = described("norm_activation").build()
    pack = draw(graph)
    graph.tensors[-1].set_output(False)
    with pytest.raises(StageError, match="execute needs the stage build_plans, and the last one that ran is none"):
        graph.execute(pack)


def test_stages_can_be_repeated() -> None:
    graph = described("norm_activation").build()
    graph.create_execution_plans()
    with pytest.raises(StageError, match="build_plans"):
        graph.execute({})
    graph.check_support()
    graph.build_plans("unfused:reference")
    assert graph.plan.name == "unfused:reference"


# --- plans ---


def test_every_combination_of_instances_is_a_plan_the_default_first() -> None:
    graph = described("norm_activation").build()
    names = [plan.name for plan in graph.plans if plan.reason is None]
    instances = ("cpu.planes", "cpu.planes_split", "reference")
    assert names == [f"{prefix}:{one}" for prefix in ("fused", "unfused") for one in instances]
    chosen = fusednorm.explain(fusednorm.group_norm, torch.empty(DIMS), 4, activation="silu").instance
    assert graph.plan.name == f"fused:{chosen}"
    two = described("activation_backward_norm_backward").build()
    assert {"fused:cpu.planes+cpu.planes_split", "fused:reference+cpu.planes"} <= {plan.name for plan in two.plans}


def test_check_support_says_why_not_for_every_plan() -> None:
    graph = described("norm_activation")
    graph.validate().build_operation_graph().create_execution_plans()
    reasons = graph.check_support()
    assert set(reasons) == {plan.name for plan in graph.plans}
    assert reasons["fused:cpu.planes"] is None
    assert "needs channels_last" in str(reasons["fused:cpu.slabs"])


def test_an_unknown_plan_and_one_that_cannot_run_are_errors_and_nothing_falls_back() -> None:
    graph = described("norm_activation").build()
    with pytest.raises(UnknownPlanError, match=r"'best' does not exist; expected one of fused:cpu\.planes, "):
        graph.build_plans("best")
    with pytest.raises(UnsupportedGraphError, match=r"'fused:cpu\.slabs' cannot run: .*needs channels_last"):
        graph.build_plans("fused:cpu.slabs")


def test_a_forced_instance_is_the_only_one() -> None:
    with fusednorm.use_instance("cpu.planes_split"):
        graph = described("norm_activation").build()
    assert [plan.name for plan in graph.plans] == ["fused:cpu.planes_split", "unfused:cpu.planes_split"]


def test_a_precision_that_no_kernel_has_is_refused() -> None:
    graph = Graph(torch.float32, compute_data_type=torch.float64)
    graph.groupnorm(graph.tensor((2, 8, 4)), num_groups=4)[0].set_output()
    with pytest.raises(UnsupportedGraphError, match=r"accumulates in float32 for float32 data, compute_data_type is"):
        graph.build()


def test_numeric_notes() -> None:
    graph = described("norm_activation", torch.float64).build()
    assert graph.plan.accumulation == "float64"
    assert graph.plan.deterministic
    graph.build_plans("fused:reference")
    assert not graph.plan.deterministic
    assert described("norm_activation", torch.bfloat16).build().plan.accumulation == "float32"


def test_examples_in_the_docstrings() -> None:
    for module in (graph_module, tensors_module):
        results = doctest.testmod(module)
        assert results.attempted > 0
        assert results.failed == 0


# --- fusion ---

FUSED = {
    "norm_activation": ["groupnorm + silu"],
    "norm_add_activation": ["groupnorm + add + silu"],
    "activation_backward_norm_backward": ["groupnorm + silu", "silu_backward + groupnorm_backward"],
    "saved_backward": ["groupnorm + silu_backward + groupnorm_backward"],
    "batchnorm_chain": ["batchnorm_inference + relu_backward + batchnorm_backward"],
}


@pytest.mark.parametrize("name", PATTERNS)
def test_what_is_fused(name: str) -> None:
    graph = described(name).build()
    assert [operation.label for operation in graph.explain().operations] == FUSED[name]
    statistics = name == "activation_backward_norm_backward"  # mean and inv_variance, from one node to the other
    assert graph.get_workspace_size() == (256 + 32 if statistics else 0)
    assert graph.plan.name.startswith("fused:")


def test_an_addition_that_the_instance_cannot_make_is_not_fused_and_explained() -> None:
    graph = Graph(torch.float32)
    z, _, _ = graph.groupnorm(graph.tensor(DIMS, name="x"), num_groups=4)
    channels, positions = DIMS[1], DIMS[2] * DIMS[3]
    last = (channels * positions, 1, DIMS[3] * channels, channels)
    total = graph.pointwise("add", z, graph.tensor(DIMS, last, name="residual"))
    graph.pointwise("silu", total).set_output().set_name("y")
    pack = run(graph)
    assert [one.label for one in graph.explain().operations] == ["groupnorm", "add", "silu"]
    assert "memory order" in graph.explain().not_fused[0].reason
    assert graph.verify(pack)
    assert graph.get_workspace_size() == prod(DIMS) * 4  # z alone: the sum is formed where the result goes


def test_a_virtual_tensor_with_another_reader_is_not_fused_away() -> None:
    graph = Graph(torch.float32)
    z, _, _ = graph.groupnorm(graph.tensor((2, 8, 4, 4), name="x"), num_groups=4)
    graph.pointwise("silu", z).set_output().set_name("y")
    graph.pointwise("relu", z).set_output().set_name("other")
    pack = run(graph)
    assert "read by silu, relu" in graph.explain().not_fused[0].reason
    assert graph.verify(pack)


def test_outputs_between_nodes_and_foreign_origins_are_not_fused() -> None:
    graph = described("norm_activation")
    z = graph.nodes[0].outputs["y"].set_output()
    pack = run(graph)
    assert f"{z.name} is an output" in graph.explain().not_fused[0].reason
    assert graph.verify(pack)

    graph = Graph(torch.float32)
    x, dy, z = (graph.tensor((2, 8, 4, 4), name=name) for name in ("x", "dy", "z"))
    mean, rstd = graph.tensor((8,), name="mean"), graph.tensor((8,), name="inv_variance")
    dz = graph.pointwise("silu_backward", dy, z)
    graph.batchnorm_backward(dz, x, None, mean, rstd)[0].set_output().set_name("dx")
    pack = run(graph)
    assert "cannot read z" in graph.explain().not_fused[0].reason
    assert graph.verify(pack)


def test_other_statistics_are_not_fused() -> None:
    graph = Graph(torch.float32)
    x, dy = graph.tensor((2, 8, 4, 4), name="x"), graph.tensor((2, 8, 4, 4), name="dy")
    names = ("mean", "inv_variance", "other_mean", "variance")
    mean, rstd, other, variance = (graph.tensor((8,), name=name) for name in names)
    z = graph.batchnorm_inference(x, other, variance=variance)
    dz = graph.pointwise("silu_backward", dy, z)
    graph.batchnorm_backward(dz, x, None, mean, rstd)[0].set_output().set_name("dx")
    pack = run(graph)
    assert "have not the same mean" in graph.explain().not_fused[0].reason
    assert graph.verify(pack)


def another_scale(graph: Graph, x: TensorAttributes, dy: TensorAttributes) -> TensorAttributes:
    mean, rstd, scale, other = (graph.tensor((8,), name=name) for name in ("mean", "inv_variance", "scale", "other"))
    z = graph.batchnorm_inference(x, mean, rstd, other)
    return graph.batchnorm_backward(graph.pointwise("silu_backward", dy, z), x, scale, mean, rstd)[0]


def another_family(graph: Graph, x: TensorAttributes, dy: TensorAttributes) -> TensorAttributes:
    z, _, rstd = graph.layernorm(x, normalized_shape=(4,))
    return graph.rmsnorm_backward(graph.pointwise("silu_backward", dy, z), x, None, rstd, normalized_shape=(4,))[0]


def a_number_for_each_channel(graph: Graph, x: TensorAttributes, dy: TensorAttributes) -> TensorAttributes:
    z, mean, rstd, _, _ = graph.batchnorm(x)
    total = graph.pointwise("add", z, graph.tensor((1, 8, 1, 1), name="r"))
    return graph.batchnorm_backward(graph.pointwise("silu_backward", dy, total), x, None, mean, rstd)[0]


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (another_scale, "whose family, x or scale is not that of batchnorm_backward"),
        (another_family, "whose family, x or scale is not that of rmsnorm_backward"),
        (a_number_for_each_channel, "z comes from add, which the kernel cannot recompute"),
    ],
)
def test_another_origin_with_the_same_statistics_is_not_fused(build: Callable[..., Any], reason: str) -> None:
    graph = Graph(torch.float32)
    x, dy = graph.tensor((2, 8, 4, 4), name="x"), graph.tensor((2, 8, 4, 4), name="dy")
    build(graph, x, dy).set_output().set_name("dx")
    pack = run(graph)
    assert any(reason in remark.reason for remark in graph.explain().not_fused)
    assert graph.verify(pack)


def test_explain_and_mermaid_are_text_for_people() -> None:
    graph = described("batchnorm_chain").build()
    text = str(graph.explain())
    for words in ("fused", "(chosen)", "workspace  0 bytes", "accumulates in float32", "in registers as float32"):
        assert words in text
    picture = described("norm_activation").to_mermaid()
    assert picture.startswith("---\n")
    assert "flowchart TD" in picture
    assert '-->|"scale"|' in picture
    named = Graph(torch.float32, name='a "quoted" <name>')
    named.pointwise("relu", named.tensor((2, 3), name='x"]; click')).set_output()
    assert '"x#quot;]; click 2x3"' in named.to_mermaid()


# --- tuning ---


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of rankings of its own; the kernels that other tests compiled stay loaded in this process."""
    described("norm_activation").build("unfused:cpu.planes_split")
    described("norm_activation").build("fused:cpu.planes_split")
    monkeypatch.setenv("FUSEDNORM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("fusednorm.graph.tuning.SECONDS", 1e-4)
    return cache_directory()


def test_autotune_ranks_keeps_the_ranking_and_reads_it_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = described("norm_activation").build()
    pack = draw(graph)
    seconds = graph.autotune(pack)
    assert set(seconds) == {plan.name for plan in graph.plans if plan.reason is None}
    assert list(seconds.values()) == sorted(seconds.values())
    assert graph.plan.name == next(iter(seconds)) == graph.plans[0].name
    graph.execute(pack)
    assert graph.verify(pack)
    (file,) = cache.iterdir()
    assert [entry["plan"] for entry in json.loads(file.read_text())["ranking"]] == list(seconds)

    monkeypatch.setattr("fusednorm.graph.tuning.measure", None)  # a second timing would fail
    again = described("norm_activation").build()
    assert again.autotune(draw(again)) == seconds
    tuned = described("norm_activation").validate().build_operation_graph().create_execution_plans("tuned")
    assert [plan.name for plan in tuned.plans][: len(seconds)] == list(seconds)


def test_a_damaged_ranking_is_ignored_with_a_warning(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    graph = described("norm_activation").build()
    seconds = graph.autotune(draw(graph))
    (file,) = cache.iterdir()
    good = file.read_text()
    half, other = good[: len(good) // 2], good.replace("fused:cpu.planes", "fused:nothing")
    for damage in ("", half, "[]", other, "\x00", '{"version": 1}'):
        file.write_text(damage)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "fusednorm"):
            again = described("norm_activation").build()
            assert set(again.autotune(draw(again))) == set(seconds)
        assert "damaged tuning cache file" in caplog.text
        assert set(json.loads(file.read_text())) == {"version", "graph", "ranking"}


def test_a_cache_that_cannot_be_written_is_no_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = cache.parent / "file"
    blocked.write_text("")
    monkeypatch.setenv("FUSEDNORM_CACHE_DIR", str(blocked))
    graph = described("norm_activation").build()
    assert graph.autotune(draw(graph))


def test_other_graphs_have_other_rankings(cache: Path) -> None:
    for dims in ((2, 8, 5, 6), (2, 8, 5, 7)):
        graph = described("norm_activation", dims=dims).build()
        graph.autotune(draw(graph))
    assert len(list(cache.iterdir())) == 2


def test_every_graph_has_a_plan_on_the_reference() -> None:
    for name in GRAPHS:
        graph = described(name).validate().build_operation_graph().create_execution_plans()
        reasons = graph.check_support()
        assert any(reason is None for reason in reasons.values()), name
