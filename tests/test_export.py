"""torch.export: programs with our op, and decomposed into torch's own; AOTInductor packages in fresh processes."""

from __future__ import annotations

import copy
import doctest
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram

import fusednorm
from fusednorm import export, nn, ops
from fusednorm.activations import FORMULAS
from fusednorm.tolerance import PEER, judge

SOURCES = str(Path(__file__).parents[1] / "src")
pytestmark = pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.:FutureWarning")  # of torch's own


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


class Function(torch.nn.Module):
    """A function of tensors as a module, which is what torch.export takes."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: Tensor) -> Any:
        return self.function(*tensors)


def network() -> torch.nn.Module:
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3),
        nn.GroupNorm(4, 8, activation="silu"),
        nn.BatchNorm2d(8, activation="relu"),
        nn.InstanceNorm2d(8, affine=True),
        nn.LayerNorm(6, activation="gelu"),
        nn.RMSNorm(6),
    )
    return model.eval()


def decomposed(model: torch.nn.Module, *tensors: Tensor, **options: Any) -> ExportedProgram:
    return torch.export.export(model, tensors, **options).run_decompositions(fusednorm.decompositions())


def op_names(program: ExportedProgram) -> list[str]:
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    return [target.name() for target in targets if hasattr(target, "name")]  # a getitem is no op


def fault(function: Any, tensors: tuple[Tensor, ...], got: Tensor) -> str | None:
    with fusednorm.use_instance("reference"):
        expected = function(*(tensor.double() for tensor in tensors))
        plain = function(*(tensor.float() for tensor in tensors))
    return judge(got, expected, plain, PEER).fault


def run(program: str, *blocked: str) -> str:
    """What a program prints in a process of its own, in which these packages cannot be imported."""
    block = f"import sys\nfor name in {blocked}: sys.modules[name] = None\n"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", block + program],
        capture_output=True, text=True, env=os.environ | {"PYTHONPATH": SOURCES}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# --- programs with our op ---


def test_a_saved_program_runs_in_a_process_that_imports_fusednorm(tmp_path: Path) -> None:
    model, x = network(), torch.randn(2, 3, 8, 8)
    program = torch.export.export(model, (x,))
    assert op_names(program).count("fusednorm::norm_forward") == 5
    torch.export.save(program, tmp_path / "network.pt2")
    torch.save((x, model(x).detach()), tmp_path / "tensors.pt")
    run(f"""
import torch, fusednorm
x, expected = torch.load({str(tmp_path / "tensors.pt")!r})
program = torch.export.load({str(tmp_path / "network.pt2")!r})
torch.testing.assert_close(program.module()(x).detach(), expected, rtol=0, atol=0)
""")


# --- programs of torch's own ops ---


def test_a_decomposed_program_holds_torchs_ops_alone() -> None:
    program = decomposed(network(), torch.randn(2, 3, 8, 8))
    names = [name.removeprefix("aten::") for name in op_names(program)]
    assert names == [
        "conv2d", "group_norm", "silu", "_native_batch_norm_legit_no_training", "relu", "instance_norm", "layer_norm",
        "gelu", "rms_norm",
    ]  # fmt: skip


def test_a_decomposed_program_runs_where_fusednorm_is_not_installed(tmp_path: Path) -> None:
    model, x = network(), torch.randn(2, 3, 8, 8)
    torch.export.save(decomposed(model, x), tmp_path / "network.pt2")
    torch.save((x, model(x).detach()), tmp_path / "tensors.pt")
    program = f"""
import torch
x, expected = torch.load({str(tmp_path / "tensors.pt")!r})
program = torch.export.load({str(tmp_path / "network.pt2")!r})
torch.testing.assert_close(program.module()(x).detach(), expected)
"""
    run(program, "fusednorm", "numba")


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_the_table_joins_torchs_own(memory_format: torch.memory_format) -> None:
    """Whose rms_norm adds eps in place where it takes an input for channels_last."""
    table = torch.export.default_decompositions()
    table.update(fusednorm.decompositions())
    model, x = network(), torch.randn(2, 3, 8, 8).to(memory_format=memory_format)
    program = torch.export.export(model, (x,)).run_decompositions(table)
    assert "fusednorm::norm_forward" not in op_names(program)
    torch.testing.assert_close(program.module()(x), model(x))


@pytest.mark.parametrize("activation", FORMULAS)
def test_every_activation_is_torchs(activation: str) -> None:
    x = torch.randn(2, 8, 5)
    call = lambda x: fusednorm.group_norm(x, 4, activation=activation)  # noqa: E731
    program = decomposed(Function(call), x)
    assert op_names(program) == ["aten::group_norm", f"aten::{activation.removesuffix('_tanh')}"]
    assert fault(call, (x,), program.module()(x)) is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("channel_dim", [1, -1])
def test_modulation_in_other_dtypes(dtype: torch.dtype, channel_dim: int) -> None:
    x = torch.randn((2, 8, 4, 6) if channel_dim == 1 else (2, 4, 6, 8)).to(dtype)
    weight, bias, scale, shift = (torch.randn(shape).to(dtype) for shape in ((8,), (8,), (2, 8), (2, 8)))

    def call(x: Tensor, weight: Tensor, bias: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return fusednorm.group_norm(
            x, 4, weight, bias, activation="silu", channel_dim=channel_dim, scale=scale, shift=shift
        )

    tensors = (x, weight, bias, scale, shift)
    got = decomposed(Function(call), *tensors).module()(*tensors)
    assert got.dtype == dtype
    assert fault(call, tensors, got) is None


def test_parameters_of_another_dtype_are_not_rounded_to_the_inputs() -> None:
    x, weight = torch.randn(2, 8, 5).bfloat16(), 1 + torch.rand(8) / 256  # all between two neighbours in bfloat16
    call = lambda x, weight: fusednorm.group_norm(x, 4, weight)  # noqa: E731
    got = decomposed(Function(call), x, weight).module()(x, weight)
    assert op_names(decomposed(Function(call), x, weight)) == ["aten::_to_copy", "aten::group_norm", "aten::_to_copy"]
    assert fault(call, (x, weight), got) is None


def test_statistics_that_a_program_uses_are_computed() -> None:
    x, weight, bias = torch.randn(2, 8, 5), torch.randn(8), torch.randn(8)
    for call in (
        lambda x, w, b: ops.group_norm_forward(x, 4, w, b, 1e-5),
        lambda x, w, b: ops.layer_norm_forward(x, (5,), None, None, 1e-5),
        lambda x, w, b: ops.rms_norm_forward(x, (5,), None, 1e-5),
        lambda x, w, b: ops.layer_norm_forward(x, (8,), w, b, 1e-5, channel_dim=1),
        lambda x, w, b: ops.rms_norm_forward(x, (8,), w, 1e-5, channel_dim=1),
    ):
        tensors = (x, weight, bias)
        torch.testing.assert_close(decomposed(Function(call), *tensors).module()(*tensors), call(*tensors))


def test_a_given_mean_that_a_program_returns_is_a_copy() -> None:
    x, mean, var = torch.randn(2, 8, 5), torch.randn(8), torch.rand(8)
    norm = ("batch_norm", 0, 1, 1e-5, "", 0.0)
    call = lambda x, mean, var: ops.norm_forward(x, None, None, None, None, mean, var, *norm)[1]  # noqa: E731
    got, expected = (each(x, mean, var) for each in (decomposed(Function(call), x, mean, var).module(), call))
    mean.zero_()
    torch.testing.assert_close(got, expected)
    assert expected.any()


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.InstanceNorm1d])
def test_running_statistics_move_as_in_eager_mode(kind: type[torch.nn.Module]) -> None:
    model, x = kind(8, track_running_stats=True), torch.randn(4, 8, 5)
    program = decomposed(model, x).module()
    torch.testing.assert_close(program(x), model(x))
    torch.testing.assert_close(program.state_dict(), model.state_dict())


ORDERS = {
    "contiguous": lambda x: x,
    "channels_last": lambda x: x.to(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "sliced": lambda x: x[:, :, :, ::2],
}


@pytest.mark.parametrize("tracks", [True, False])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_a_decomposed_program_trains(tracks: bool, activation: str | None) -> None:
    norm = nn.BatchNorm2d(8, track_running_stats=tracks, activation=activation)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), norm)
    x = torch.randn(4, 3, 6, 6)
    program = torch.export.export(copy.deepcopy(model), (x,)).run_decompositions(fusednorm.decompositions())
    trained = program.module()
    for each in (model, trained):
        for _ in range(2):
            each(x).square().sum().backward()
    gradients = [{name: value.grad for name, value in each.named_parameters()} for each in (model, trained)]
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(dict(trained.named_buffers()), dict(model.named_buffers()))
    assert not any(buffer.requires_grad for buffer in trained.buffers())


@pytest.mark.parametrize(
    ("family", "order"),
    [
        (family, order)
        for family in ("group_norm", "instance_norm", "batch_norm", "layer_norm", "layer_norm of channels")
        for order in ORDERS
        if (family, order) != ("batch_norm", "transposed")  # torch's own fake has other strides than its kernel
    ],
)
def test_the_order_of_memory_stays(family: str, order: str) -> None:
    x = ORDERS[order](torch.randn(2, 8, 4, 6))
    calls = {
        "group_norm": lambda x: fusednorm.group_norm(x, 4),
        "instance_norm": lambda x: fusednorm.instance_norm(x),
        "batch_norm": lambda x: fusednorm.batch_norm(x, None, None, training=True),
        "layer_norm": lambda x: fusednorm.layer_norm(x, x.shape[-1:]),
        "layer_norm of channels": lambda x: fusednorm.layer_norm(x, (8,), channel_dim=1),
    }
    got, expected = decomposed(Function(calls[family]), x).module()(x), calls[family](x)
    assert got.stride() == expected.stride()
    torch.testing.assert_close(got, expected)


def test_a_view_of_channels_behind_the_positions() -> None:
    x = torch.randn(2, 4, 6, 8)
    call = lambda x: fusednorm.group_norm(x, 4, channel_dim=-1).view(-1, 8)  # noqa: E731
    torch.testing.assert_close(decomposed(Function(call), x).module()(x), call(x))


@pytest.mark.parametrize("family", ["group_norm", "instance_norm", "batch_norm", "layer_norm", "rms_norm"])
def test_dynamic_shapes(family: str) -> None:
    calls = {
        "group_norm": lambda x: fusednorm.group_norm(x, 4, activation="silu", channel_dim=-1),
        "instance_norm": lambda x: fusednorm.instance_norm(x),
        "batch_norm": lambda x: fusednorm.batch_norm(x, None, None, training=True),
        "layer_norm": lambda x: fusednorm.layer_norm(x, x.shape[-1:]),
        "rms_norm": lambda x: fusednorm.rms_norm(x, x.shape[-2:]),
    }
    shapes = {"tensors": ({0: Dim("batch"), 1: Dim("height")},)}
    program = decomposed(Function(calls[family]), torch.randn(2, 6, 5, 8), dynamic_shapes=shapes).module()
    for shape in ((5, 7, 5, 8), (3, 2, 5, 8)):
        x = torch.randn(shape)
        torch.testing.assert_close(program(x), calls[family](x))


def test_fakes_of_symbolic_sizes_come_from_the_op_and_not_from_its_decomposition() -> None:
    x = torch.randn(2, 8, 4, 6).transpose(2, 3).contiguous().transpose(2, 3)
    program = torch.export.export(
        Function(lambda x: fusednorm.layer_norm(x, (6,))), (x,), dynamic_shapes={"tensors": ({0: Dim("batch")},)}
    )
    (output,) = [node for node in program.graph.nodes if node.target is torch.ops.fusednorm.norm_forward.default]
    assert output.meta["val"][0].stride() == x.stride()
    assert output.meta["val"][3].numel() == 0  # the decomposition would have no other


def test_batch_norm_without_the_core_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "batch_norm_of_given", None)
    model, x = nn.BatchNorm1d(8, activation="relu").eval(), torch.randn(4, 8, 5)
    torch.testing.assert_close(decomposed(model, x).module()(x), model(x))


def test_the_example_of_the_docstring() -> None:
    results = doctest.testmod(export)
    assert results.attempted
    assert not results.failed


# --- AOTInductor ---


def test_a_package_of_a_decomposed_program_runs_without_fusednorm(tmp_path: Path) -> None:
    model, x = nn.GroupNorm(4, 8, activation="silu"), torch.randn(2, 8, 4, 6)
    package = torch._inductor.aoti_compile_and_package(
        decomposed(model, x),
        package_path=str(tmp_path / "network.pt2"),
        inductor_configs={"aot_inductor.compile_wrapper_opt_level": "O0"},  # half of the test's time
    )
    torch.save((x, model(x).detach()), tmp_path / "tensors.pt")
    program = f"""
import torch
x, expected = torch.load({str(tmp_path / "tensors.pt")!r})
torch.testing.assert_close(torch._inductor.aoti_load_package({package!r})(x), expected)
"""
    run(program, "fusednorm", "numba")
