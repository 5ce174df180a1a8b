"""The code that Inductor generates for an H200 which is not there: its launches, and what else it calls."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from inductor_cases import CASES, NATIVE, NATIVE_BACKWARD  # noqa: E402
from inductor_support import Generated, all_generated  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.runtime import driver  # noqa: E402
from triton_support import CASES as LAUNCHES  # noqa: E402
from triton_support import KERNELS, TARGETS, Made, capabilities, operations, specialization  # noqa: E402

from fusednorm.activations import FORMULAS  # noqa: E402
from fusednorm.backends.triton import inlined, launch  # noqa: E402
from fusednorm.backends.triton.kernels import activations, tiles_backward  # noqa: E402
from fusednorm.private.inductor_names import FORGETS  # noqa: E402


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Generated]:
    return all_generated(tmp_path_factory.mktemp("fake_cuda"))


PLANES, ROWS = ["moments_of_planes", "apply"], ["moments_of_rows", "finalize", "apply"]
BACK, BACK_LAST = ["reduce", "gradients"], ["reduce", "combine", "gradients"]
#: The kernels of ours that each case launches, forward and backward.
EXPECTED = {
    "group_norm": [PLANES, BACK],
    "group_norm channels_last": [ROWS, BACK_LAST],
    "group_norm inference": [PLANES],
    "group_norm small": [["held_forward"], ["held_backward"]],
    "batch_norm": [["moments_of_planes", "finalize", "apply"], BACK_LAST],
    "batch_norm channels_last": [ROWS, BACK_LAST],
    "batch_norm inference": [[]],
    "layer_norm": [[], ["rows_backward", "combine"]],
    "rms_norm": [[], ["rows_backward", "combine"]],
    "layer_norm of channels": [["positions_forward"], ["positions_backward", "combine"]],
    "layer_norm of channels_last": [["whole_forward"], ["rows_backward", "combine"]],
    "adaLN": [["whole_forward"], ["rows_backward", "combine"]],
    "packed heads": [[], ["rows_backward", "combine"]],
    "forced": [["rows_forward"]],
    "instance_norm": [PLANES, BACK],
    "float64": [["held_forward"], ["held_backward", "combine"]],
    "convolutions": [ROWS, BACK_LAST],
    "gradient of a sum": [ROWS, BACK_LAST],
    "twice": [[*PLANES, *PLANES]],
    "max_autotune": [PLANES, BACK],
}
#: Cases around which Inductor has kernels of its own, and how many at most, forward and backward.
WITH_OTHERS = {
    "batch_norm": [2, 0],  # the running mean and the running variance
    "batch_norm channels_last": [2, 0],
    "gradient of a sum": [2, 1],  # the sum, and the gradient, which is one number everywhere
    "batch_norm inference": [1],  # torch's own formula, which is as fast alone and fuses with its neighbours
    "packed heads": [1, 1],  # the gradient of the slice
    "layer_norm": [1, 0],
    "rms_norm": [1, 0],
    "convolutions": [4, 1],  # what the fake convolution needs in channels_last, and the result in channels_first
}


@pytest.mark.parametrize("name", EXPECTED)
def test_calls_become_launches(name: str, found: dict[str, Generated]) -> None:
    generated = found[name]
    assert generated.words == []
    assert generated.ours() == EXPECTED[name]
    others = [len([kernel for kernel in graph if kernel.startswith("triton")]) for graph in generated.launches()]
    allowed = WITH_OTHERS.get(name, [0] * len(others))
    assert all(count <= most for count, most in zip(others, allowed, strict=True)), others
    if name != "convolutions":
        assert not any(generated.calls())


#: The kernels of ours, forward and backward, and how many of Inductor's own there are at most. The fake convolution
#: needs its weight, and in some builds of torch its tensors, in another order of memory.
SUM_ROWS = ["sum_moments_of_rows", "finalize", "sum_apply"]
SUMMED = {
    "a bias": [SUM_ROWS],
    "a bias in training": [SUM_ROWS, BACK_LAST],
    "numbers of samples": [["held_sum_forward"]],
    "a residual that goes on": [SUM_ROWS],
    "a sum of the caller's": [["sum_moments_of_planes", "sum_apply"]],
    "norms of channels": [ROWS, BACK_LAST],
    "a product": [ROWS],
}


@pytest.mark.parametrize("name", SUMMED)
def test_sums_become_part_of_a_norm(name: str, found: dict[str, Generated]) -> None:
    generated = found[name]
    assert generated.words == []
    assert generated.ours() == SUMMED[name]
    forward = generated.codes[0]
    assert forward.count("bias=None") == (name != "a sum of the caller's")
    sums = [kernel for kernel in generated.launches()[0] if "add" in kernel or "mul" in kernel]
    assert len(sums) == (name == "a product")
    if name == "a residual that goes on":  # the sum takes the place of what the convolution made
        (launch,) = re.findall(r"sum_moments_of_rows_\d+\.run\((.*?)\)\n", forward)
        (made,) = re.findall(r"(\w+) = extern_kernels\.convolution\(", forward)
        assert launch.split(", ").count(made) == 2
    if name == "a sum of the caller's":  # whose memory stays as it is
        (launch,) = re.findall(r"sum_moments_of_planes_\d+\.run\((.*?)\)\n", forward)
        tensors = [one for one in launch.split(", ") if one.startswith(("arg", "buf"))]
        assert len({*tensors}) == len(tensors) == 4
    if name == "norms of channels":
        assert not any(kernel.startswith(("triton_red", "triton_per")) for kernel in generated.launches()[1])


def test_no_tensor_is_transposed_between_convolutions(found: dict[str, Generated]) -> None:
    """Inductor gives convolutions channels_last, and the norm between them takes it and leaves it."""
    forward, backward = found["convolutions"].launches()
    assert [name.startswith("fusednorm") for name in forward] == [False] * 3 + [True] * 3 + [False]
    assert [name.startswith("fusednorm") for name in backward][-3:] == [True] * 3
    assert len(backward) <= 4  # the fake convolution of some builds of torch gives a gradient in channels_first


JOINED = ["a concatenation", "a concatenation in training"]


@pytest.mark.parametrize("name", JOINED)
def test_a_concatenation_takes_the_order_of_convolutions(name: str, found: dict[str, Generated]) -> None:
    """torch 2.11 takes one for channels_first, so that a norm of it would be transposed before the next convolution."""
    generated = found[name]
    assert generated.words == []
    assert generated.ours()[0] == ROWS
    strides = re.findall(r"empty_strided_cuda\(\(2, 960, 64, 64\), \((.*?)\)", generated.bodies()[0])
    assert {*strides} == {"3932160, 1, 61440, 960"}


def test_rows_between_convolutions_stay_rows(found: dict[str, Generated]) -> None:
    """Their second dimension is none of channels."""
    generated = found["rows between convolutions"]
    assert generated.words == []
    assert generated.ours() == [["rows_forward"]]
    assert re.findall(r"empty_strided_cuda\(\(2, 64, 64, 320\), \((.*?)\)", generated.bodies()[0])[0] == (
        "1310720, 20480, 320, 1"
    )


def test_convolutions_of_volumes_get_channels_last(found: dict[str, Generated]) -> None:
    """And what the caller gets keeps its strides: Inductor copies the result, and no more than the caller gave."""
    generated = found["volumes"]
    assert generated.words == []
    assert generated.ours() == [ROWS, BACK_LAST]
    forward, backward = generated.launches()
    others = [[name for name in graph if name.startswith("triton")] for graph in (forward, backward)]
    assert len(others[0]) == 3 + 1
    assert len(others[1]) <= 4 + 3
    result = re.findall(r"return \((\w+), ", generated.codes[0])[0]
    assert f"{result} = empty_strided_cuda((2, 64, 16, 64, 64), (4194304, 65536, 4096, 64, 1)" in generated.codes[0]


def test_a_part_of_volumes_of_one_channel_keeps_its_place(found: dict[str, Generated]) -> None:
    """The second and third of three, which torch 2.11 would take for the first and second if it gave them strides."""
    generated = found["a part of volumes of one channel"]
    assert generated.words == []
    pattern = r"extern_kernels\.convolution\(reinterpret_tensor\(primals_1, \(2, 1, 16, 64, 64\), \(.*?\), (\d+)\)"
    assert re.findall(pattern, generated.bodies()[0]) == ["65536"]


def test_no_convolution_copies_a_slice_of_a_gradient(found: dict[str, Generated]) -> None:
    _, backward = found["a concatenation in training"].bodies()
    gradients = re.findall(r"convolution_backward\.default\((\w+)", backward)
    assert len(gradients) == 3
    assert not any(gradient.startswith("reinterpret_tensor") for gradient in gradients)


def test_equal_calls_share_their_kernels(found: dict[str, Generated]) -> None:
    (code,) = found["twice"].codes
    assert code.count("async_compile.triton(") == 2
    assert found["twice"].bodies()[0].count(".run(") == 4


@pytest.mark.parametrize(
    ("name", "expected"), [("cpp_wrapper as a setting", [PLANES, BACK]), ("AOTInductor", [PLANES])]
)
def test_cpp_code_launches_too(name: str, expected: list[list[str]], found: dict[str, Generated]) -> None:
    generated = found[name]
    assert generated.words == []
    assert generated.cpp_launches() == expected
    assert not any("ops.fusednorm" in code or "fusednorm::" in code for code in generated.codes)


def test_cpp_code_calls_the_op_where_torch_can_launch_nothing(found: dict[str, Generated]) -> None:
    """torch before 2.13 forgets for a backward that cpp_wrapper is an option of torch.compile."""
    generated = found["cpp_wrapper"]
    if not FORGETS:
        assert generated.words == []
        assert generated.cpp_launches() == [PLANES, BACK]
        return
    (word,) = generated.words
    assert "compiled_backward is a call in the compiled graph: torch forgets" in word
    assert generated.cpp_launches() == [PLANES, []]
    assert '"torch.ops.fusednorm.compiled_backward.default"' in generated.codes[1]
    assert "call_backward" not in generated.codes[1]


@pytest.mark.parametrize(
    ("name", "reason"),
    [("dynamic", "a size is not known"), ("one element a statistic", "it runs on the instance reference")],
)
def test_what_no_launch_can_hold_is_a_call_of_a_function(name: str, reason: str, found: dict[str, Generated]) -> None:
    generated = found[name]
    assert any(reason in word for word in generated.words)
    assert generated.calls()[-1] == ["fusednorm.compiled.call_backward"]


def test_nothing_is_allocated_that_no_kernel_takes(found: dict[str, Generated]) -> None:
    for name in EXPECTED:
        for body in found[name].bodies():
            launches = [line for line in body.splitlines() if ".run(" in line]
            for buffer, size in re.findall(r"(buf\d+) = empty_strided_cuda\((\(.*?\)),", body):
                taken = any(re.search(rf"\b{buffer}\b", line) for line in launches)
                assert taken or (name in ("rms_norm", "packed heads") and size == "(0, )"), (name, buffer)


def test_no_argument_but_addresses(found: dict[str, Generated]) -> None:
    for name in EXPECTED:
        for source in found[name].kernels().values():
            (signature,) = re.findall(r"'signature': (\{.*?\})", source)
            assert all(kind.startswith("*") for kind in ast.literal_eval(signature).values())


def test_the_generated_kernels_compile(
    found: dict[str, Generated], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each generated module, as Inductor loads it, for sm_90, without products fused by the compiler, into a kernel
    that Inductor's own launcher takes."""
    launcher = pytest.importorskip("torch._inductor.runtime.triton_heuristics").StaticTritonCompileResult
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    kernels: dict[str, str] = {}
    for name in EXPECTED:
        kernels |= found[name].kernels()
    assert {"fusednorm_apply", "fusednorm_gradients", "fusednorm_rows_backward"} <= kernels.keys()
    for name, source in kernels.items():
        (tmp_path / f"{name}.py").write_text(source)
        spec = importlib.util.spec_from_file_location(name, tmp_path / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        kernel = getattr(module, name)
        meta, (config,) = kernel.triton_meta, kernel.configs
        assert meta["enable_fp_fusion"] is False
        code = ASTSource(kernel.fn, meta["signature"], meta["constants"], meta["configs"][0])
        options = {"num_warps": config.num_warps, "enable_fp_fusion": False}
        compiled = triton.compile(code, target=TARGETS["sm_90"], options=options)
        assert compiled.asm["cubin"]
        meta = {**meta, "device_type": "cuda", "device": 0}
        static = launcher.can_statically_launch(compiled, kernel.inductor_meta, meta, kernel.heuristic_type)
        assert static.arg_tys == "O" * len(meta["signature"])
        assert static.name == compiled.metadata.name


@pytest.mark.parametrize("named", [True, False])
def test_kernels_are_started_as_inductors_own(named: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    hints = pytest.importorskip("torch._inductor.runtime.hints")
    if not named:
        monkeypatch.delattr(hints, "HeuristicType")
    kernel = SimpleNamespace(triton_meta={}, heuristic_type="of a user")
    inlined.as_written({"kernel": kernel, "other": None})
    assert kernel.triton_meta == {"enable_fp_fusion": False}
    assert (kernel.heuristic_type != "of a user") == named


@pytest.mark.parametrize("name", NATIVE)
def test_torchs_own_formula_is_what_torchs_functions_become(name: str, found: dict[str, Generated]) -> None:
    """Where Inductor fuses more than we save: the same kernels, with the same loads and stores."""
    ours, torchs = found[name], found[f"torch's {name}"]
    assert ours.words == []
    for graph in range(2 if name in NATIVE_BACKWARD else 1):
        assert not any(kernel.startswith("fusednorm") for kernel in ours.launches()[graph])
        assert len(ours.launches()[graph]) == len(torchs.launches()[graph])
        assert ours.fused()[graph] == torchs.fused()[graph]


# --- entries: a launch as a kernel of its own ---


def _launches() -> list[Made]:
    able = capabilities("sm_90")._replace(overlaps=False)
    return [made for operation in operations(able, LAUNCHES) for made in operation]


def _argument(node: ast.expr) -> Any:
    """The value of an argument in an entry's source: a number with its type, a constant, or a name as text."""
    if isinstance(node, ast.Call):
        assert ast.unparse(node.func) == "tl.full"
        shape, number, dtype = node.args
        assert ast.literal_eval(shape) == ()
        return ast.literal_eval(number), ast.unparse(dtype)
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)


def test_entries_hand_on_what_launches_do() -> None:
    for made in _launches():
        entry, given = inlined.entry(made.launch, made.tensors)
        function = ast.parse(entry.src).body[0]
        assert isinstance(function, ast.FunctionDef)
        assert [argument.arg for argument in function.args.args] == list(given)
        (statement,) = function.body
        assert isinstance(statement, ast.Expr)
        call = statement.value
        assert isinstance(call, ast.Call)
        signature = inspect.signature(made.launch.kernel.fn)
        named = {word.arg: _argument(word.value) for word in call.keywords}
        bound = signature.bind(*map(_argument, call.args), **named).arguments  # type: ignore[arg-type]
        names, pointers = list(signature.parameters), len(made.tensors)
        for name, tensor in zip(names, made.tensors, strict=False):
            assert bound[name] == (None if tensor is None else name)
            assert tensor is None or given[name] is tensor
        for name, number in zip(names[pointers:], made.launch.scalars, strict=False):
            dtype = "float64" if isinstance(number, float) else "int32" if abs(number) < 2**31 else "int64"
            assert bound[name] in ((number, f"tl.{dtype}"), 1 if number == 1 else None)
        for name, value in made.launch.constants.items():
            if isinstance(value, triton.JITFunction):
                value = f"activations.{activations.name_of(value)}"
            assert bound[name] == value


#: torch takes all pointers of a named tuple for written where one is: these are read alone.
TAKEN_FOR_WRITTEN = {name: {"p_partials", "p_folded", "p_scale"} for name in ("combine", "fold", "gradients")}
TAKEN_FOR_WRITTEN |= {
    "whole_sum_forward": {"p_before", "p_gate", "p_behind"},
    "held_sum_forward": {"p_before", "p_behind"},
    "rows_sum_backward": {"p_behind", "p_grad_total"},
    "rows_gated_backward": {"p_behind", "p_grad_total", "p_gate", "p_before"},
    "held_sum_backward": {"p_behind", "p_grad_total"},
    "sum_gradients": {"p_partials", "p_scale", "p_behind", "p_grad_total"},
}


def test_what_is_taken_for_written_is_not() -> None:
    stores = re.findall(r"tl\.store\(([\w.]+)", inspect.getsource(tiles_backward))
    assert {"grads.weight", "p_totals", "p_folded", "p_partials"} <= set(stores)
    for kernel, body in re.findall(r"\ndef (\w+)(.*?)(?=\n@triton)", inspect.getsource(tiles_backward), re.DOTALL):
        assert "tl.store(partials" not in body
        assert "tl.store(parameters" not in body
        assert ("tl.store(p_partials" in body) == (kernel == "reduce_chunk")


# Triton 3.9 says so where torch analyzes a kernel, and torch takes an error for writes to everything.
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset:UserWarning")
def test_entries_say_what_kernels_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's own analysis finds it in the kernels themselves."""
    wrap = pytest.importorskip("torch._higher_order_ops.triton_kernel_wrap")
    if not hasattr(wrap, "identify_accessed_tensors"):
        pytest.skip("torch before 2.12 has its analysis under another name")
    monkeypatch.setattr(driver, "_active", SimpleNamespace(get_current_target=lambda: TARGETS["sm_90"]))
    seen: set[Any] = set()
    for made in _launches():
        entry, given = inlined.entry(made.launch, made.tensors)
        stored = set(inlined.written(made.launch, given))
        assert set(re.findall(r"tl\.store\((\w+),", inspect.getsource(entry.fn))) == stored
        assert set(re.findall(r"tl\.load\((\w+)\)", inspect.getsource(entry.fn))) == given.keys() - stored
        branches = (made.kernel, tuple(given), made.launch.constants.get("MERGE"))
        if branches not in seen:
            seen.add(branches)
            arguments = specialization(made)[0]
            found = wrap.identify_accessed_tensors(made.launch.kernel, arguments, {}).read_writes
            missed = {access.name for access in found.writes} - stored
            assert missed <= TAKEN_FOR_WRITTEN.get(made.kernel, set()), branches
    assert {kernel for kernel, *_ in seen} == KERNELS == inlined.WRITES.keys()


@pytest.mark.parametrize("name", [None, *FORMULAS])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("nvidia", [True, False])
def test_activations_are_found_by_their_names(name: str | None, dtype: str, nvidia: bool) -> None:
    for function in activations.activation(name, dtype, nvidia):
        assert getattr(activations, activations.name_of(function)) is function


@pytest.mark.parametrize("name", ["nothing", "silu__slope__float32__any", "sulu__value__float32__any", "__path__"])
def test_other_names_are_no_activations(name: str) -> None:
    with pytest.raises(AttributeError, match="has no attribute"):
        getattr(activations, name)


def test_a_recorded_plan_launches_nothing() -> None:
    seen: list[Any] = []
    with launch.recorded(lambda made, tensors: seen.append((made, tensors))):
        assert launch.recording()
        made = launch.prepared(None, 1, (), {"OVERLAP": False}, 4)
        x = torch.ones(1)
        made(x, None)
    assert not launch.recording()
    assert seen == [(made, (x, None))]
    with pytest.raises(AssertionError, match="recorded"):
        made(x)
    assert type(launch.prepared(None, 1, (), {}, 4)) is launch.Launch


def test_every_case_is_looked_at() -> None:
    looked = {*EXPECTED, "dynamic", "one element a statistic", *NATIVE, *(f"torch's {name}" for name in NATIVE)}
    looked |= {
        "cpp_wrapper",
        "cpp_wrapper as a setting",
        "AOTInductor",
        "volumes",
        "rows between convolutions",
        "a part of volumes of one channel",
        *SUMMED,
        *JOINED,
    }
    assert looked == CASES.keys()
