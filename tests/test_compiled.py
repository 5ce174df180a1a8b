"""What torch.compile's default backend makes of calls on a CPU: graphs without autograd's kernels, and their caches."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_compile import case, same_gradients
from torch import Tensor
from torch._functorch import config as functorch
from torch._inductor import config, ir
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.lowering import lowerings
from torch._inductor.utils import run_and_get_code

import fusednorm
from fusednorm import compiled, inductor, nn
from fusednorm.inductor import formulas, lowering, passes
from fusednorm.norm import FAMILIES, norm_of, norm_of_text
from fusednorm.private.inductor_names import JOINT_SLOT, KEPT_CODE, PASS_SLOT, Nodes

ROOT = Path(__file__).parents[1]
OPS = torch.ops.fusednorm


@pytest.fixture(autouse=True)
def fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CI", "1")  # where Inductor refuses what it lets pass elsewhere
    torch.manual_seed(0)
    torch.compiler.reset()
    # Calls, whatever they cost; formulas are in test_formulas.py.
    monkeypatch.setattr(formulas, "calls_pay", lambda problem, neighbours: True)
    slots = {PASS_SLOT: None, JOINT_SLOT: None}
    with config.patch(fx_graph_cache=False, **slots), functorch.patch(enable_autograd_cache=False):
        yield
    torch.compiler.reset()


def codes_of(call: Callable[..., Any], *tensors: Any, **options: Any) -> tuple[Any, list[str]]:
    """The result of a compiled call, its backward run too, and the code of its graphs."""

    def both() -> Any:
        result = torch.compile(call, fullgraph=True, **options)(*tensors)
        if isinstance(result, Tensor) and result.requires_grad:
            result.sum().backward()
        return result

    result, codes = run_and_get_code(both)
    return result, codes


@pytest.mark.parametrize("family", FAMILIES)
def test_a_graph_calls_functions_and_no_op(family: str) -> None:
    call, tensors = case(family)
    forward, backward = codes_of(call, *tensors)[1]
    assert forward.count("fusednorm.compiled.call_forward(") == 1
    assert backward.count("fusednorm.compiled.call_backward(") == 1
    assert "norm_forward(" not in forward
    assert "norm_backward(" not in backward


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dynamic", [None, True])
def test_results_and_gradients_are_those_of_eager_mode(family: str, dynamic: bool | None) -> None:
    call, tensors = case(family)
    surrounded = lambda *tensors: call(tensors[0] * 2, *tensors[1:]).sin()  # noqa: E731
    made = torch.compile(surrounded, fullgraph=True, dynamic=dynamic)
    same_gradients(made, surrounded, tensors)
    if dynamic:
        same_gradients(made, surrounded, [torch.randn(5, 8, 3, 6, requires_grad=True), *tensors[1:]])


@pytest.mark.parametrize(
    "order",
    [
        lambda x: x.to(memory_format=torch.channels_last),
        lambda x: x[:, :, :, ::2],
        lambda x: x.transpose(2, 3),
        lambda x: x[:1].expand(2, -1, -1, -1),
    ],
    ids=["channels_last", "sliced", "transposed", "expanded"],
)
def test_strides(order: Callable[[Tensor], Tensor]) -> None:
    call, (x, weight, bias) = case("group_norm")
    x = order(x.detach()).detach().requires_grad_()
    same_gradients(torch.compile(call, fullgraph=True), call, [x, weight, bias])


@pytest.mark.parametrize("dynamic", [None, True])
def test_between_convolutions_nothing_is_copied_into_another_order(dynamic: bool | None) -> None:
    """Inductor has convolutions write channels_last, whatever the order of the trace, and calls take it as it is."""
    network = torch.nn.Sequential(
        torch.nn.Conv2d(8, 16, 3), nn.GroupNorm(4, 16, activation="silu"), torch.nn.Conv2d(16, 16, 3)
    )
    x = torch.randn(2, 8, 16, 16)
    result, (forward, backward) = codes_of(network, x, dynamic=dynamic)
    torch.testing.assert_close(result, network(x))
    for code in (forward, backward):
        calls = [line for line in code.splitlines() if "fusednorm.compiled.call_" in line]
        copies = [line for line in code.splitlines() if "cpp_fused" in line and "norm" in line]
        assert len(calls) == 1
        assert copies == []


def test_statistics_are_asked_for_where_a_backward_needs_them() -> None:
    call, tensors = case("group_norm")
    (forward, _) = codes_of(call, *tensors)[1]
    assert ", True)" in forward.partition("call_forward(")[2].partition("\n")[0]
    with torch.no_grad():
        (forward,) = codes_of(call, *tensors)[1]
    assert ", False)" in forward.partition("call_forward(")[2].partition("\n")[0]


def test_running_statistics() -> None:
    ours, theirs = nn.BatchNorm2d(8), torch.nn.BatchNorm2d(8)
    made = torch.compile(ours, fullgraph=True)
    for _ in range(3):
        x = torch.randn(4, 8, 3, 5)
        torch.testing.assert_close(made(x), theirs(x))
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())


def test_an_empty_result_that_a_graph_uses() -> None:
    """A program may call the op itself, and return what is empty."""
    x, weight = torch.randn(2, 8, 4), torch.randn(8)

    def forward(x: Tensor) -> Any:
        return OPS.norm_forward(x, weight, None, None, None, None, None, "group_norm", 4, 1, 1e-5, "", 0.0)

    def backward(x: Tensor, mean: Tensor, rstd: Tensor) -> Any:
        mask = [True, False, True, False, False]
        arguments = (x, x, mean, rstd, weight, None, None, None)
        return OPS.norm_backward(*arguments, "group_norm", 4, 1, "", 0.0, True, mask)

    results, (code,) = codes_of(forward, x)
    torch.testing.assert_close(results, forward(x))
    assert "norm_forward" in code.partition("def call(")[2]
    statistics = results[1:3]
    gradients, (code,) = codes_of(backward, x, *statistics)
    torch.testing.assert_close(gradients, backward(x, *statistics))
    assert "norm_backward" in code.partition("def call(")[2]


def test_an_eps_that_is_a_symbol() -> None:
    x = torch.randn(2, 8, 4)
    made = torch.compile(lambda x, eps: fusednorm.group_norm(x, 4, eps=eps), fullgraph=True, dynamic=True)
    for eps in (1e-5, 0.5, 0.7):
        torch.testing.assert_close(made(x, eps), fusednorm.group_norm(x, 4, eps=eps))


def test_the_lean_ops_compute_what_the_others_do() -> None:
    norm = norm_of("rms_norm", 1, activation="silu")
    x, weight = torch.randn(6, 8), torch.randn(8)
    operands = (x, weight, None, None, None, None, None)
    expected = OPS.norm_forward(*operands, *norm.op_arguments)
    torch.testing.assert_close(OPS.compiled_forward(*operands, norm.text, True), expected)
    output, mean, rstd, var = compiled.call_forward(*operands, norm.text, False)
    torch.testing.assert_close(output, expected[0])
    assert mean is rstd is var is None
    torch.library.opcheck(OPS.compiled_forward.default, (*operands, norm.text, True))
    saved = (x, x, expected[1], expected[2], weight, None, None, None)
    mask = [True, True, False, False, False]
    found = OPS.compiled_backward(*saved, norm.text, mask)
    family, dims, channel_dim, _, name, parameter = norm.op_arguments
    torch.testing.assert_close(found, OPS.norm_backward(*saved, family, dims, channel_dim, name, parameter, True, mask))
    torch.library.opcheck(OPS.compiled_backward.default, (*saved, norm.text, mask))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_norm_as_text(family: Any) -> None:
    norm = norm_of(family, 4 if family == "group_norm" else 1, -1, 0.1 + 0.2, "leaky_relu", family != "batch_norm")
    assert norm_of_text(norm.text) is norm


# --- the pass ---


class Own(CustomGraphPass):
    """A pass of the program's own."""

    def __init__(self, identity: Any = "own") -> None:
        self.identity, self.seen = identity, 0

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.seen += len(graph.find_nodes(op="call_function", target=OPS.norm_forward.default))

    def uuid(self) -> Any:
        return self.identity


def test_a_pass_of_the_programs_own_runs_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "_installed", set())
    call, tensors = case("group_norm")
    own = Own()
    with config.patch({PASS_SLOT: own}):
        forward, _ = codes_of(call, *tensors)[1]
        installed = getattr(config, PASS_SLOT)
        passes.install(config)
        assert getattr(config, PASS_SLOT) is installed
    assert own.seen == 1
    assert "call_forward(" in forward
    assert installed.uuid()[1] == "own"


def test_a_pass_that_takes_the_place_later_keeps_it() -> None:
    """torch's cache of whole graphs was asked by then, so code that calls ours could outlive a change of it."""
    call, tensors = case("group_norm")
    codes_of(call, *tensors)
    torch.compiler.reset()
    own = Own()
    forward, _ = codes_of(call, *tensors, options={PASS_SLOT: own})[1]
    assert own.seen == 1
    assert "torch.ops.fusednorm.norm_forward.default(" in forward


def test_the_identity_of_the_pass(tmp_path: Path) -> None:
    plain = passes.LeanOps().uuid()
    assert plain == passes.LeanOps().uuid()
    assert passes.LeanOps(Own(None)).uuid() is None
    assert passes.LeanOps(lambda graph: None).uuid() is None
    with fusednorm.use_instance("reference"):
        forced = passes.LeanOps().uuid()
    (tmp_path / "tuned.json").write_text("{}")
    with fusednorm.use_tuned(tmp_path / "tuned.json"):
        tuned = passes.LeanOps().uuid()
        (tmp_path / "tuned.json").write_text("{ }")
        changed = passes.LeanOps().uuid()
    assert len({plain, forced, tuned, changed}) == 4


def test_nothing_is_prepared_where_inductor_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:  # and not while the compiler is reset, which would load the module again
        patch.delitem(sys.modules, "torch._inductor.config")
        inductor.prepare()
    assert getattr(config, PASS_SLOT) is None


# --- torch without one of the names ---


@pytest.mark.parametrize(
    "name", ["FallbackKernel", "get_stride_order", "ir_node_to_tensor", "ExternKernel.require_stride_order"]
)
def test_without_a_name_graphs_call_the_ops(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, _, attribute = name.rpartition(".")
    monkeypatch.delattr(getattr(ir, owner) if owner else ir, attribute)
    assert inductor.described().startswith(f"calls of the operators: fusednorm uses torch._inductor.ir.{name}")
    lowering.register.__wrapped__()  # says so, and raises nothing


@pytest.mark.parametrize("forgets", [False, True])
def test_what_torch_forgets_of_cpp_wrapper_is_said(forgets: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "FORGETS", forgets)
    assert inductor.described().startswith("launches in the generated code on GPUs")
    assert ("a backward calls the operators where cpp_wrapper" in inductor.described()) == forgets


@pytest.mark.parametrize("cpp", [False, True])
@pytest.mark.parametrize("kept", [False, True])
def test_cpp_code_launches_only_kernels_whose_code_is_kept(cpp: bool, kept: bool) -> None:
    nodes = Nodes()
    nodes.current = SimpleNamespace(graph=SimpleNamespace(cpp_wrapper=cpp))
    with config.patch({KEPT_CODE: kept}):
        assert nodes.can_launch() == (kept or not cpp)


def test_an_op_without_a_lowering_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    for op in (OPS.compiled_forward.default, OPS.compiled_backward.default):
        monkeypatch.delitem(lowerings, op, raising=False)
    monkeypatch.setattr(passes, "register", lambda: None)
    call, tensors = case("group_norm")
    forward, backward = codes_of(call, *tensors)[1]
    assert "torch.ops.fusednorm.compiled_forward.default(" in forward
    assert "torch.ops.fusednorm.compiled_backward.default(" in backward
    for op in (OPS.compiled_forward.default, OPS.compiled_backward.default):  # Inductor now has fallbacks for them
        lowerings.pop(op, None)
    lowering.register.cache_clear()


def test_without_a_place_for_a_pass_graphs_keep_the_differentiable_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "loaded_config", lambda: None)
    assert inductor.described() == "calls of the operators: Inductor's configuration has no place for a pass"
    call, tensors = case("group_norm")
    forward, backward = codes_of(call, *tensors)[1]
    assert "torch.ops.fusednorm.norm_forward.default(" in forward
    assert "torch.ops.fusednorm.norm_backward.default(" in backward


def test_a_lowering_that_fails_becomes_a_call(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """In a release of torch in which a name of Inductor means something else."""

    def fails(*arguments: Any) -> Any:
        raise TypeError("of another meaning")

    monkeypatch.setattr(lowering.Lowering, "inlined", fails)
    call, tensors = case("group_norm")
    forward, _ = codes_of(call, *tensors)[1]
    assert "call_forward(" in forward
    assert "compiled_forward is a call in the compiled graph: of another meaning" in caplog.text


# --- caches, and code for other processes ---

PROGRAM = """
import torch
from torch._dynamo.utils import counters
import fusednorm

x, weight = torch.randn(2, 8, 4, requires_grad=True), torch.randn(8, requires_grad=True)
call = torch.compile(lambda x, w: fusednorm.group_norm(x, 4, w, activation="silu"), fullgraph=True)
call(x, weight).sum().backward()
found = counters["inductor"]
print(found["fxgraph_cache_hit"], found["fxgraph_cache_miss"], found["fxgraph_cache_bypass"])
"""


def counted(cache: Path, sources: Path) -> str:
    """The hits, misses and bypasses of a process's two graphs."""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache), "PYTHONPATH": str(sources)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_second_process_starts_warm_and_changed_sources_never_find_old_code(tmp_path: Path) -> None:
    cache, sources = tmp_path / "cache", tmp_path / "src"
    shutil.copytree(ROOT / "src", sources, ignore=shutil.ignore_patterns("__pycache__"))
    assert counted(cache, sources) == "0 2 0"
    assert counted(cache, sources) == "2 0 0"
    with (sources / "fusednorm" / "text.py").open("a") as file:
        file.write("# changed\n")
    assert counted(cache, sources) == "0 2 0"


class Packaged(torch.nn.Module):
    """Norms with an activation, with sums before and behind, and modulated."""

    def __init__(self) -> None:
        super().__init__()
        self.group, self.batch = nn.GroupNorm(4, 8, activation="silu"), nn.BatchNorm2d(8, activation="relu")
        self.rows = nn.RMSNorm(6)

    def forward(self, x: torch.Tensor, h: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        y, s = self.group(x, pre_add=h, return_sum=True)
        return self.rows(self.batch(y, post_add=s), scale=scale[:, None, None], shift=scale[:, None, None])


def tensors_of(batch: int, device: str) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(batch, *sizes, device=device) for sizes in ((8, 4, 6), (8, 4, 6), (6,)))


def skip_where_torch_loads_no_package(device: str, folder: Path) -> None:
    """A process that loads a package of torch alone died on a GPU with torch 2.11, in torch's loader."""
    code = f"""
import torch
model, x = torch.nn.Linear(4, 4).to({device!r}), torch.ones(2, 4).to({device!r})
program = torch.export.export(model, (x,))
path = torch._inductor.aoti_compile_and_package(program, package_path={str(folder / "plain.pt2")!r})
torch._inductor.aoti_load_package(path)(x)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True)
    if done.returncode < 0:
        pytest.skip(f"torch's loader of packages dies of signal {-done.returncode} here")


@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.:FutureWarning")  # of torch's own
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_package_of_aot_inductor_with_a_dynamic_batch_runs_in_another_process(tmp_path: Path, device: str) -> None:
    if device == "cuda":
        skip_where_torch_loads_no_package(device, tmp_path)
    network = Packaged().eval().to(device)
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(network, tensors_of(2, device), dynamic_shapes=({0: batch},) * 3)
    path = torch._inductor.aoti_compile_and_package(
        program,
        package_path=str(tmp_path / "network.pt2"),
        inductor_configs={"aot_inductor.compile_wrapper_opt_level": "O0"},  # half of the test's time
    )
    tensors = tensors_of(5, device)
    expected = network(*tensors).detach()
    torch.testing.assert_close(torch._inductor.aoti_load_package(path)(*tensors), expected)
    torch.save((tensors, expected), tmp_path / "tensors.pt")
    other = f"""
import torch, fusednorm
tensors, expected = torch.load({str(tmp_path / "tensors.pt")!r})
torch.testing.assert_close(torch._inductor.aoti_load_package({path!r})(*tensors), expected)
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    subprocess.run([sys.executable, "-c", other], check=True, capture_output=True, env=environment)
