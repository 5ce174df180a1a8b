"""Private names of torch, Triton and Numba: each exists and does what its use needs, and what happens without it."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import re
import subprocess
import sys
import textwrap
import threading
import tomllib
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from importlib.metadata import version
from operator import attrgetter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fusednorm
from fusednorm import autograd
from fusednorm.private import lookup, numba_names, torch_names, triton_names

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "fusednorm"
LIBRARIES = ("torch", "triton", "numba", "llvmlite")
DOTTED = re.compile(r"\w+(\.\w+)+")
GETTERS = ("getattr", "setattr", "hasattr", "delattr", "attrgetter")
#: Submodules whose whole content is undocumented.
UNDOCUMENTED = ("numba.core", "triton.backends", "triton.compiler", "triton.runtime", "triton.experimental")


# --- where the names stand ---


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in name.split("."))


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def own_names(trees: dict[Path, ast.Module]) -> set[str]:
    """Every private name that the package itself defines."""
    found: set[str] = set()
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
                found.add(node.attr)
    return {name for name in found if name.startswith("_")}


def foreign_names(tree: ast.Module, own: set[str]) -> Iterator[str]:
    """What a module uses of the libraries that is private or undocumented."""
    for node in ast.walk(tree):
        used: list[str] = []
        if isinstance(node, ast.Import):
            used = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            used = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and DOTTED.fullmatch(node.value):
            used = [node.value]
        for name in used:
            if name.split(".")[0] in LIBRARIES and (is_private(name) or name.startswith(UNDOCUMENTED)):
                yield name
        if isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            if (is_private(node.attr) and node.attr not in own) or text.startswith((*UNDOCUMENTED, "torch._C")):
                yield text
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in GETTERS:
            texts = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
            yield from (text for text in texts if isinstance(text, str) and is_private(text) and text not in own)


def test_every_private_name_stands_in_the_three_modules() -> None:
    trees = {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    own = own_names(trees)
    found = {
        f"{path.relative_to(PACKAGE)}: {name}"
        for path, tree in trees.items()
        if path.parent != PACKAGE / "private"
        for name in foreign_names(tree, own)
    }
    assert found - {"fused_module.py: sys._getframe", "distributed/modules.py: sys._getframe"} == set()  # Python's own


@pytest.mark.parametrize(
    "line",
    [
        "import torch._functorch.config",
        "from torch._C import _len_torch_dispatch_stack",
        "from torch.nn.modules.batchnorm import _BatchNorm",
        "import numba.core.registry",
        "from triton.backends.nvidia import driver",
        "torch._C._cuda_getDevice()",
        "f(torch._C)",
        "gradient._is_zerotensor()",
        "getattr(context, '_internal_codegen', None)",
        "numba.core.config.OPT = 3",
        "import_module('torch._dynamo')",
    ],
)
def test_the_search_for_private_names_sees(line: str) -> None:
    assert list(foreign_names(ast.parse(line), set()))


def test_no_library_that_is_loaded_late_comes_with_the_names() -> None:
    program = (
        "import sys\nfrom fusednorm.private import numba_names, torch_names, triton_names\n"
        "print(sorted({'triton', 'numba', 'llvmlite', 'onnx', 'onnxscript', 'typer'} & set(sys.modules)))"
    )
    assert run(program).stdout.strip() == "[]"


def test_the_tested_versions_begin_with_the_lower_bounds() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = "\n".join([*project["dependencies"], *project["optional-dependencies"]["triton"]])
    bounds = dict(re.findall(r"^(\w+)>=([\d.]+)", required, re.MULTILINE))
    assert {name: oldest for name, (oldest, _) in lookup.TESTED.items()} == {name: bounds[name] for name in LIBRARIES}


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "PYTHONPATH": str(ROOT / "src")},
    )


# --- taking a name away ---


class Without:
    """A module or class without one of its names, which may be an attribute of an attribute."""

    def __init__(self, owner: Any, name: str) -> None:
        self._owner, self._name = owner, name

    def __getattr__(self, name: str) -> Any:
        first, _, rest = self._name.partition(".")
        if name != first:
            return getattr(self._owner, name)
        if not rest:
            raise AttributeError(name)
        return Without(getattr(self._owner, name), rest)


def take_away(monkeypatch: pytest.MonkeyPatch, *paths: str) -> None:
    """What is looked up from here on finds no ``module:name`` of these."""

    def without(module: str) -> Any:
        found: Any = import_module(module)
        for path in paths:
            if path.partition(":")[0] == module:
                found = Without(found, path.partition(":")[2])
        return found

    monkeypatch.setattr(lookup, "import_module", without)


def names_without(monkeypatch: pytest.MonkeyPatch, *paths: str) -> ModuleType:
    """torch_names as it is where torch lacks these names."""
    with monkeypatch.context() as patch:
        take_away(patch, *paths)
        for path in paths:
            module, _, name = path.partition(":")
            if module in ("torch.autograd.forward_ad", "torch.autograd.profiler"):
                patch.delattr(import_module(module), name)
        spec = importlib.util.spec_from_file_location("torch_names_without", torch_names.__file__)
        assert spec is not None
        assert spec.loader is not None
        found = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
    return found


def substitute(monkeypatch: pytest.MonkeyPatch, *paths: str) -> None:
    """The whole package as it is where torch lacks these names."""
    found = names_without(monkeypatch, *paths)
    changed = 0
    for name, original in vars(torch_names).items():
        other = getattr(found, name, original)  # torch.compile adds names of its own to a module that it traced
        if name.startswith("__") or other is original or getattr(original, "__module__", "") == torch_names.__name__:
            continue
        changed += 1
        for module_name, module in list(sys.modules.items()):
            if module_name.startswith("fusednorm") and vars(module).get(name) is original:
                monkeypatch.setattr(module, name, other)
    assert changed >= len(paths)


# --- what works with each name and without ---


@pytest.fixture
def tensors() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(size, generator=generator) for size in ((2, 8, 5, 6), (8,), (8,)))
    return x, weight, bias


def ours(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return fusednorm.group_norm(x, 4, weight, bias)


def theirs(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return nn.functional.group_norm(x, 4, weight, bias)


def _gradients(call: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> Any:
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    return torch.autograd.grad(call(*leaves).square().sum(), leaves)


def _second_gradients(call: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> Any:
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    (first,) = torch.autograd.grad(call(*leaves).pow(3).sum(), leaves[:1], create_graph=True)
    return torch.autograd.grad(first.square().sum(), leaves)


def _batched_gradients(call: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> Any:
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    directions = torch.stack([torch.ones_like(tensors[0]), tensors[0].flip(0)])
    return torch.autograd.grad(call(*leaves), leaves, directions, is_grads_batched=True)


def _vmap(call: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> Any:
    return torch.func.vmap(call, in_dims=(0, None, None))(torch.stack([tensors[0], tensors[0] + 1]), *tensors[1:])


def _jvp(call: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> Any:
    return torch.func.jvp(call, tensors, tuple(tensor.flip(0) for tensor in tensors))


def _dual(call: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> Any:
    forward_ad = torch.autograd.forward_ad
    with forward_ad.dual_level():
        return tuple(forward_ad.unpack_dual(call(forward_ad.make_dual(tensors[0], tensors[0].flip(0)), *tensors[1:])))


def _traced(call: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)  # torch's own functions look at sizes
        return torch.jit.trace(call, tensors, check_trace=False)(tensors[0] + 1, *tensors[1:])


def _profiled(call: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> Any:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True):
        return call(*tensors)


def _zero_gradient(call: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> Any:
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    output = call(*leaves)
    return torch.autograd.grad(output, leaves, torch._efficientzerotensor(output.shape))


SCENARIOS: dict[str, Callable[..., Any]] = {
    "forward": lambda call, tensors: call(*tensors),
    "gradients": _gradients,
    "gradients of gradients": _second_gradients,
    "batched gradients": _batched_gradients,
    "gradients of nothing": _zero_gradient,
    "vmap": _vmap,
    "jvp": _jvp,
    "dual numbers": _dual,
    "a trace": _traced,
    "a profile": _profiled,
}
OPTIONAL = (
    "torch._C:_len_torch_dispatch_stack",
    "torch._C:_is_torch_function_mode_enabled",
    "torch._C:_are_functorch_transforms_active",
    "torch._C:_get_tracing_state",
    "torch.autograd.forward_ad:_current_level",
    "torch.autograd.profiler:_is_profiler_enabled",
    "torch._C._functorch:is_legacy_batchedtensor",
    "torch:Tensor._is_zerotensor",
    "torch._C:_disabled_torch_function_impl",
    "torch._C:_set_grad_enabled",
    "torch._C._autograd:_top_saved_tensors_default_hooks",
)


@pytest.mark.parametrize("missing", [(), *((path,) for path in OPTIONAL), OPTIONAL], ids=lambda paths: "+".join(paths))
def test_results_are_torchs_with_and_without(
    missing: tuple[str, ...], tensors: tuple[Tensor, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = {name: scenario(theirs, tensors) for name, scenario in SCENARIOS.items()}
    expected["gradients of nothing"] = tuple(map(torch.zeros_like, tensors))  # torch reads memory that is not there
    if missing:
        substitute(monkeypatch, *(path for path in missing if "_disabled_" not in path))
    for name, scenario in SCENARIOS.items():
        torch.testing.assert_close(scenario(ours, tensors), expected[name], rtol=1e-4, atol=1e-4, msg=name)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("missing", [(), OPTIONAL[:1], OPTIONAL[1:2], OPTIONAL[3:4]], ids=lambda paths: "+".join(paths))
def test_modes_see_the_operator_with_and_without(
    missing: tuple[str, ...], tensors: tuple[Tensor, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing:
        substitute(monkeypatch, *missing)
    seen: list[str] = []

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    class Function(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    for mode in (Dispatch, Function):
        seen.clear()
        with mode():
            ours(*tensors)
        assert any("norm_forward" in name for name in seen), mode


# --- torch: who listens ---


class Nothing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class NoFunction(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_the_stack_of_dispatch_modes() -> None:
    assert torch_names.dispatch_modes() == 0
    with Nothing(), Nothing():
        assert torch_names.dispatch_modes() == 2


def test_a_function_mode() -> None:
    assert not torch_names.function_modes()
    with NoFunction():
        assert torch_names.function_modes()


def test_a_transform_of_torch_func() -> None:
    seen: list[bool] = [torch_names.transforms_active()]
    torch.func.vmap(lambda x: seen.append(torch_names.transforms_active()) or x)(torch.zeros(2))
    assert seen == [False, True]


def test_a_trace() -> None:
    seen: list[bool] = [bool(torch_names.tracing_state())]
    torch.jit.trace(
        lambda x: seen.append(bool(torch_names.tracing_state())) or x + 1, torch.zeros(2), check_trace=False
    )
    assert seen[:2] == [False, True]


def test_all_that_disturbs() -> None:
    x, seen = torch.zeros(2), dict[str, tuple[bool, bool]]()

    def note(name: str) -> None:
        seen[name] = torch_names.undisturbed(x), torch_names.transformed()

    note("nothing")
    with Nothing():
        note("dispatch mode")
    with NoFunction():
        note("function mode")
    with torch.autograd.forward_ad.dual_level():
        note("dual level")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True):
        note("profiler")
    torch.func.vmap(lambda y: note("vmap") or y)(x)
    torch.jit.trace(lambda y: note("trace") or y + 1, x, check_trace=False)
    note("nothing again")
    assert seen == {
        "nothing": (True, False),
        "dispatch mode": (False, False),
        "function mode": (False, False),
        "dual level": (False, True),
        "profiler": (False, False),
        "vmap": (False, True),
        "trace": (False, False),
        "nothing again": (True, False),
    }
    assert not torch_names.undisturbed(torch.zeros(2, device="meta"))


@pytest.mark.parametrize("path", OPTIONAL[:6])
def test_what_cannot_be_asked_is_assumed(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without = names_without(monkeypatch, path)
    x = torch.zeros(2)
    if path.endswith("_get_tracing_state"):
        assert without.undisturbed(x)
        seen: list[bool] = []
        torch.jit.trace(lambda y: seen.append(without.undisturbed(y)) or y + 1, x, check_trace=False)
        assert seen[0] is False
    else:
        assert not without.undisturbed(x)
    assert without.transformed() is path.endswith(("_are_functorch_transforms_active", "_current_level"))


# --- torch: tensors and autograd ---


@pytest.mark.parametrize("missing", [False, True])
def test_a_tensor_of_the_older_vmap(missing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    path = "torch._C._functorch:is_legacy_batchedtensor"
    asked = names_without(monkeypatch, path).is_batched if missing else torch_names.is_batched
    seen: list[bool] = []

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            seen.append(asked(gradient))
            return 2 * gradient

    x = torch.zeros(3, requires_grad=True)
    torch.autograd.grad(Double.apply(x), x, torch.ones(3))
    torch.autograd.grad(Double.apply(x), x, torch.eye(3), is_grads_batched=True)
    assert seen == [False, True]
    assert not asked(torch.zeros(0))


@pytest.mark.parametrize("missing", [False, True])
def test_a_zero_without_memory(missing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = (names_without(monkeypatch, "torch:Tensor._is_zerotensor") if missing else torch_names).is_zerotensor
    assert asked(torch._efficientzerotensor(3))
    assert not asked(torch.zeros(3))
    assert not asked(torch.zeros(0))


def test_a_subclass_that_is_treated_as_a_plain_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain(Tensor):
        __torch_function__ = torch_names.no_torch_function

    assert type(Plain([1.0]) + 1) is Tensor
    assert not torch.overrides.has_torch_function((Plain([1.0]),))
    without = names_without(monkeypatch, "torch._C:_disabled_torch_function_impl")
    assert without.no_torch_function is torch_names.no_torch_function


def test_below_autograd_the_operators_own_kernel_runs() -> None:
    calls: list[str] = []
    with torch.library._scoped_library("fusednorm_test_below", "DEF") as scoped:
        scoped.define("twice(Tensor x) -> Tensor")
        scoped.impl("twice", lambda x: calls.append("cpu") or 2 * x, "CPU")
        operator = torch.ops.fusednorm_test_below.twice.default

        def at_autograd(x: Tensor) -> Tensor:
            calls.append("autograd")
            with torch_names.below_autograd():
                return operator(x)

        scoped.impl("twice", at_autograd, "Autograd")
        operator(torch.ones(2, requires_grad=True))
    assert calls == ["autograd", "cpu"]


def test_without_the_way_below_autograd_the_import_says_which_versions_have_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ImportError) as error:
        names_without(monkeypatch, "torch._C:_AutoDispatchBelowAutograd")
    oldest, newest = lookup.TESTED["torch"]
    assert str(error.value) == (
        f"fusednorm uses torch._C._AutoDispatchBelowAutograd, which torch {version('torch')} does not have; fusednorm "
        f"is tested with torch {oldest} to {newest}"
    )


@pytest.mark.parametrize("missing", [False, True])
def test_recording_is_switched(missing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    names = names_without(monkeypatch, "torch._C:_set_grad_enabled") if missing else torch_names
    try:
        names.set_grad_enabled(False)
        assert not torch.is_grad_enabled()
    finally:
        names.set_grad_enabled(True)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("missing", [False, True])
def test_hooks_of_saved_tensors_are_seen(missing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    path = "torch._C._autograd:_top_saved_tensors_default_hooks"
    names = names_without(monkeypatch, path) if missing else torch_names
    assert (names.saved_tensors_hooks(False) is None) != missing
    with torch.autograd.graph.save_on_cpu():
        assert names.saved_tensors_hooks(False) is not None


#: Whether Function has an ``apply`` in Python, around the one in C: torch 2.15 has not.
OWN_APPLY = vars(torch.autograd.Function)["apply"] is not vars(torch._C._FunctionBase)["apply"]


def test_the_short_apply_computes_what_apply_does(monkeypatch: pytest.MonkeyPatch) -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, power: int) -> Tensor:
            ctx.save_for_backward(x)
            return x**power

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            (x,) = ctx.saved_tensors
            return 2 * x * gradient, None

    short = torch_names.short_apply(Square)
    assert (short != Square.apply) is OWN_APPLY
    x = torch.tensor([1.0, 3.0], requires_grad=True)
    assert torch.equal(short(x, 2), x**2)
    assert torch.equal(torch.autograd.grad(short(x, 2).sum(), x)[0], 2 * x)

    class Function:
        """As torch.autograd.Function would be without a base that has the method."""

        @classmethod
        def apply(cls) -> str:
            return "apply"

    monkeypatch.setattr(torch.autograd, "Function", Function)
    assert torch_names.short_apply(type("Norm", (Function,), {}))() == "apply"


def test_the_short_backward_is_the_functions() -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x**2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            (x,) = ctx.saved_tensors
            return 2 * x * gradient

    x = torch.tensor([1.0, 3.0], requires_grad=True)
    longer: Any = Square.apply(x)
    assert torch.equal(torch.autograd.grad(longer.sum(), x, create_graph=True)[0], 2 * x)
    torch_names.short_backward(Square)
    y: Any = Square.apply(x)
    assert y.grad_fn.apply.__func__ is Square.backward
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert torch.equal(first, 2 * x)
    assert torch.equal(torch.autograd.grad(first.sum(), x)[0], torch.full_like(x, 2))
    torch_names.short_backward(type("Function", (), {}))  # without torch's class of nodes nothing happens


def test_the_library_starts_its_function_the_short_way() -> None:
    assert autograd._apply == torch_names.short_apply(autograd.Normalization)
    assert (autograd._apply != autograd.Normalization.apply) is OWN_APPLY


# --- torch: export ---


def test_both_tables_hold_the_op() -> None:
    op = torch.ops.fusednorm.norm_forward.default
    assert torch._decomp.decomposition_table[op] is fusednorm.decompositions()[op]
    assert op in torch._decomp.meta_table


@pytest.mark.parametrize("missing", ["decomposition_table", "meta_table"])
def test_without_one_of_the_tables_the_other_stays_as_it_is(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    op = object()
    take_away(monkeypatch, f"torch._decomp:{missing}")
    torch_names.offer_decomposition(op, lambda: None, lambda: None)
    assert op not in torch._decomp.decomposition_table
    assert op not in torch._decomp.meta_table


# --- torch: calls that repeat ---


def test_guards_are_torchs_own_and_pass_their_trial() -> None:
    assert torch_names._guards is torch._C._dynamo.guards.TensorGuards
    check = torch_names.guard([torch.zeros(2, 3), torch.zeros(3)])
    assert check is not None
    assert check(torch.ones(2, 3), torch.ones(3))
    assert not check(torch.ones(3, 2), torch.ones(3))
    assert not check(torch.ones(2, 3), torch.ones(3, dtype=torch.float64))


def test_without_guards_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert names_without(monkeypatch, "torch._C._dynamo.guards:TensorGuards").guard([torch.zeros(3)]) is None


def test_what_no_guard_sees_is_seen() -> None:
    assert not torch_names.watched()
    with TorchDispatchMode():
        assert torch_names.watched()
    with TorchFunctionMode():
        assert torch_names.watched()
    with torch.autograd.forward_ad.dual_level():
        assert torch_names.watched()
    with torch.autograd.profiler.profile():
        assert torch_names.watched()
    assert not torch_names.watched()


@pytest.mark.parametrize("missing", [False, True])
def test_the_short_allocation_on_a_cpu(missing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    path = "torch._C._dynamo.guards:_empty_strided_cpu"
    names = names_without(monkeypatch, path) if missing else torch_names
    assert (names.empty_strided_cpu is torch._C._dynamo.guards._empty_strided_cpu) is not missing
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        empty = names.empty_strided_cpu((2, 3), (1, 2), dtype)
        assert (empty.shape, empty.stride(), empty.dtype) == ((2, 3), (1, 2), dtype)
        assert empty.device.type == "cpu"
        assert not empty.is_inference()
    with torch.inference_mode():
        assert names.empty_strided_cpu((2, 3), (1, 2), torch.float32).is_inference()


# --- torch: CUDA ---

CUDA_NAMES = (
    "torch._C:_cuda_getDevice",
    "torch._C:_cuda_getCurrentRawStream",
    "torch._C._dynamo.guards:_empty_strided_cuda",
)


def test_names_for_cuda_are_torchs_own_where_it_was_built_with_cuda() -> None:
    built = torch.version.cuda is not None
    assert (torch_names.current_device is torch.cuda.current_device) is not built
    assert (torch_names.current_raw_stream is torch_names._current_stream) is not built
    assert torch_names.empty_strided_cuda is torch._C._dynamo.guards._empty_strided_cuda


@pytest.mark.gpu
@pytest.mark.parametrize("missing", [False, True])
def test_the_current_device_and_its_stream(missing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    names = names_without(monkeypatch, *CUDA_NAMES) if missing else torch_names
    assert names.current_device() == torch.cuda.current_device()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert names.current_raw_stream(torch.cuda.current_device()) == stream.cuda_stream


@pytest.mark.gpu
def test_the_short_allocation() -> None:
    assert torch_names.empty_strided_cuda is not None
    short = torch_names.empty_strided_cuda((2, 3), (1, 2), torch.float16)
    assert (short.shape, short.stride(), short.dtype) == ((2, 3), (1, 2), torch.float16)
    assert short.get_device() == torch.cuda.current_device()


def test_without_the_short_allocation_torchs_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from fusednorm.backends.triton.plans import base

    without = names_without(monkeypatch, *CUDA_NAMES)
    assert without.current_device is torch.cuda.current_device
    streams = {3: SimpleNamespace(cuda_stream=99)}
    monkeypatch.setattr(torch.cuda, "current_stream", streams.__getitem__)
    assert without.current_raw_stream(3) == 99
    monkeypatch.setattr(base, "empty_strided_cuda", without.empty_strided_cuda)
    asked: list[Any] = []
    monkeypatch.setattr(torch, "empty_strided", lambda *shape, **options: asked.append((shape, options)))
    base.allocator("cuda")((2, 3), (1, 2), torch.float16)
    assert asked == [(((2, 3), (1, 2)), {"dtype": torch.float16, "device": "cuda"})]


# --- torch: storages ---


def test_owners_of_a_storage_are_counted() -> None:
    tensor = torch.empty(4)
    storage = tensor.untyped_storage()
    count = torch_names.storage_use_count(torch_names.storage_handle(storage))
    view = tensor[1:]
    assert torch_names.storage_use_count(torch_names.storage_handle(storage)) == count + 1
    del view
    assert torch_names.storage_use_count(torch_names.storage_handle(storage)) == count


def version_of(package: Any) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", package.__version__)[:2])


def test_memory_moves_from_storage_to_storage() -> None:
    if version_of(torch) < (2, 12):
        assert torch_names.swap_memory is None
        pytest.skip("torch 2.11 cannot: no memory is kept there")
    full, empty = torch.empty(4), torch.empty(0)
    address = full.data_ptr()
    torch_names.swap_memory(empty.untyped_storage(), full.untyped_storage())
    assert (empty.untyped_storage().data_ptr(), empty.untyped_storage().nbytes()) == (address, 16)
    assert full.untyped_storage().nbytes() == 0


@pytest.mark.parametrize("path", ["torch._C:_storage_Use_Count", "torch:UntypedStorage._swap_data_ptr_"])
def test_no_memory_is_kept_without(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from fusednorm.backends.cpu import memory

    without = names_without(monkeypatch, path)
    monkeypatch.setattr(memory, "swap_memory", without.swap_memory)
    monkeypatch.setattr(memory, "_COUNTERS", (without.storage_use_count, memory._COUNTERS[1]))
    assert memory._idle_counts.__wrapped__() is None


# --- torch: modules ---


def test_the_bases_that_torchs_tools_ask_for() -> None:
    for kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm):
        assert issubclass(kind, torch_names.BatchNormBase)
    for kind in (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d):
        assert issubclass(kind, torch_names.InstanceNormBase)
    for kind in (nn.GroupNorm, nn.InstanceNorm2d, nn.Conv2d):
        assert not issubclass(kind, torch_names.BatchNormBase)


def test_checks_of_an_inputs_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for rank, kind in enumerate((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), 2):
        assert torch_names.unbatched_rank(kind)(kind(3)) == rank
        with pytest.raises(ValueError, match="expected"):
            torch_names.input_check(kind)(kind(3), torch.zeros([1] * (rank + 2)))
        monkeypatch.delattr(kind, "_get_no_batch_dim")
        monkeypatch.delattr(kind, "_check_input_dim")
    for kind in (nn.InstanceNorm1d.__mro__[1], nn.BatchNorm1d.__mro__[2]):
        for name in ("_get_no_batch_dim", "_check_input_dim"):
            monkeypatch.delattr(kind, name, raising=False)
    for rank, kind in enumerate((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), 2):
        assert torch_names.unbatched_rank(kind)(kind(3)) == rank
        torch_names.input_check(kind)(kind(3), torch.zeros([1] * (rank + 2)))


def test_the_bases_are_found_without_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    bases = torch_names.BatchNormBase, torch_names.InstanceNormBase
    monkeypatch.delattr("torch.nn.modules.batchnorm._BatchNorm")
    without = names_without(monkeypatch)
    assert (without.BatchNormBase, without.InstanceNormBase) == bases


def test_scripting_asks_the_module() -> None:
    class Asked(Exception):  # noqa: N818
        pass

    def answer(module: nn.Module) -> None:
        raise Asked

    module = type("Module", (nn.Module,), {torch_names.SCRIPT_HOOK: answer})()
    with pytest.raises(Asked):
        torch.jit.script(module)


def test_hooks_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not torch_names.has_hooks(nn.ReLU())
    for register in ("register_forward_hook", "register_forward_pre_hook"):
        module = nn.ReLU()
        handle = getattr(module, register)(lambda *arguments: None)
        assert torch_names.has_hooks(module)
        handle.remove()
        assert not torch_names.has_hooks(module)
    handle = nn.modules.module.register_module_forward_hook(lambda *arguments: None)
    try:
        assert torch_names.has_hooks(nn.ReLU())
    finally:
        handle.remove()
    monkeypatch.delattr("torch.nn.modules.module._has_any_global_hook")
    assert torch_names.has_hooks(nn.ReLU())


def test_a_trace_without_the_names_of_hooks_keeps_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Sequential(fusednorm.nn.GroupNorm(2, 4, activation="relu"))
    x = torch.randn(2, 4, 3)
    traced = {}
    for name in ("with", "without"):
        traced[name] = torch.fx.symbolic_trace(module)
        torch.testing.assert_close(traced[name](x), module(x))
        monkeypatch.setattr("fusednorm.interop.has_hooks", lambda module: True)
    kinds = {name: [node.op for node in graph.graph.nodes] for name, graph in traced.items()}
    assert "call_module" in kinds["with"]
    assert "call_function" in kinds["without"]


def test_the_table_of_fusions(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.ao.quantization  # noqa: F401

    methods = torch_names.fuser_methods(sys.modules)
    assert methods is not None
    assert (nn.Conv2d, nn.BatchNorm2d, nn.ReLU) in methods
    assert torch_names.fuser_methods({}) is None
    assert torch_names.fuser_methods({"torch.ao.quantization.fuser_method_mappings": SimpleNamespace()}) is None


FOLDING = {(module, name.removeprefix("_get_mkldnn_classes.<locals>.")) for module, name in torch_names.FOLDS}


@pytest.mark.parametrize("name", sorted(FOLDING | torch_names.COMPARISONS), ids=".".join)
def test_a_function_of_torch_that_takes_modules_apart_is_known(name: tuple[str, str]) -> None:
    function = attrgetter(name[1])(import_module(name[0]))
    code = inspect.unwrap(getattr(function, "__func__", function)).__code__
    assert (name[0], code.co_qualname) in {*torch_names.FOLDS, *torch_names.COMPARISONS}
    assert "eps" in code.co_names


def test_the_refusal_of_distributed_data_parallel_is_known() -> None:
    module, name = torch_names.DDP_REFUSAL
    code = attrgetter(name)(import_module(module)).__code__
    assert code.co_qualname == name
    assert "SyncBatchNorm" in code.co_names


def test_a_fold_along_the_last_dimension_is_one_of_the_folds() -> None:
    assert torch_names.FOLD_ALONG_THE_LAST in torch_names.FOLDS


# --- torch: what else ---


def test_buffers_are_kept_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._functorch.config as config

    with config.patch(donated_buffer=True):  # restores what was there before, which monkeypatch does not
        torch_names.keep_buffers()
        assert config.donated_buffer is False
    with monkeypatch.context() as without:  # other tests' fixtures look for it
        without.setitem(sys.modules, "torch._functorch.config", None)
        torch_names.keep_buffers()


def test_choices_of_configurations_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.config as config

    with torch_names.unkept_autotuning():
        assert config.autotune_local_cache is False
    assert config.autotune_local_cache is True
    with monkeypatch.context() as without:  # other tests' fixtures look for it
        without.setitem(sys.modules, "torch._inductor.config", None)
        with torch_names.unkept_autotuning():
            pass


def test_operators_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    ones = torch.ones(2)
    with torch_names.watch_operators(lambda *told: seen.append(told)):
        result = torch.mul(ones, other=2.0)
    ((function, arguments, results),) = seen
    assert function is torch.ops.aten.mul.Tensor
    assert arguments[0] is ones
    assert results is result
    monkeypatch.setitem(sys.modules, "torch.utils._python_dispatch", None)
    with torch_names.watch_operators(lambda *told: seen.append(told)):
        torch.mul(ones, 2.0)
    assert len(seen) == 1


def test_a_fresh_cache_of_compiled_code_is_another_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.utils as utils

    folder = "TORCHINDUCTOR_CACHE_DIR"
    before = os.environ.get(folder)
    with torch_names.fresh_compiler_cache():
        assert os.environ[folder] != before
    assert os.environ.get(folder) == before
    monkeypatch.delattr(utils, "fresh_cache")  # before 2.8
    with torch_names.fresh_compiler_cache():
        assert os.environ[folder] != before
    monkeypatch.setitem(sys.modules, "torch._inductor.utils", None)
    with torch_names.fresh_compiler_cache():
        assert os.environ.get(folder) == before


def test_torchs_openmp_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.get_num_threads()
    found = torch_names.openmp_libraries()
    assert found
    home = Path(torch.__file__).resolve().parent
    assert found[0].startswith((str(home), str(home) + ".libs"))

    def unreadable(path: Path) -> str:
        raise OSError

    monkeypatch.setattr(Path, "read_text", unreadable)
    assert torch_names.openmp_libraries() == []


# --- Numba and llvmlite ---


@pytest.fixture
def numba() -> Any:
    return pytest.importorskip("numba")


def test_functions_without_wrappers_and_inlined(numba: Any) -> None:
    def double(x: float) -> float:
        return 2.0 * x

    def ir(**options: Any) -> str:
        compiled = numba.njit("float64(float64)", **options)(double)
        (text,) = compiled.inspect_llvm().values()
        return str(text)

    plain, unwrapped = ir(), ir(**numba_names.UNWRAPPED)
    assert plain.count("\ndefine ") == 3
    assert unwrapped.count("\ndefine ") == 1
    assert "alwaysinline" in ir(**numba_names.INLINED)
    assert "alwaysinline" not in plain


def test_a_kernel_that_needs_numbas_runtime_is_refused(numba: Any) -> None:
    import numpy as np

    from fusednorm.backends.cpu.compiler import assemble

    def allocates(size: int) -> float:
        return np.ones(size).sum()

    compiled = numba.cfunc("float64(int64)")(allocates)
    with pytest.raises(RuntimeError, match="needs Numba's runtime"):
        assemble(compiled.inspect_llvm(), compiled.native_name)


def test_what_a_callback_without_a_result_returns(numba: Any) -> None:
    compiled = numba.cfunc("void(int64)")(lambda x: None)
    assert re.search(
        rf"define [^@]*\b{numba_names.VOID_RESULT} @{re.escape(compiled.native_name)}\(", compiled.inspect_llvm()
    )


def test_the_settings_are_numbas_defaults(numba: Any) -> None:
    program = "\n".join(
        [
            "from numba.core import config",
            "from fusednorm.private.numba_names import OPTIMIZATION, SETTINGS",
            "assert getattr(config, OPTIMIZATION) == 3",
            "print({name: (getattr(config, name), value) for name, value in SETTINGS.items()",
            "       if getattr(config, name) != value})",
        ]
    )
    done = run(program)
    assert done.stdout.strip() == "{}", done.stderr


class Interruption(Exception):  # noqa: N818
    pass


def test_own_settings_hold_inside_and_nowhere_else(numba: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from numba.core import config, registry
    from numba.core.compiler_lock import global_compiler_lock
    from numba.core.types import functions

    context = registry.cpu_target.target_context
    monkeypatch.setattr(config, "BOUNDSCHECK", 1)
    monkeypatch.setattr(config, "OPT", type(config.OPT)(0))
    monkeypatch.setattr(config, "DUMP_IR", 1)
    generator, call_type = context._internal_codegen, functions.BaseFunction.get_call_type
    with suppress(Interruption), numba_names.own_settings():
        assert (config.BOUNDSCHECK, config.OPT, config.DUMP_IR) == (None, 3, 0)
        assert context._internal_codegen is not generator
        assert isinstance(context._internal_codegen, type(generator))
        assert "get_abi_sizeof" in vars(context)
        assert functions.BaseFunction.get_call_type is not call_type
        assert global_compiler_lock.is_locked()
        raise Interruption
    assert "get_abi_sizeof" not in vars(context)
    assert functions.BaseFunction.get_call_type is call_type
    assert (config.BOUNDSCHECK, config.OPT, config.DUMP_IR) == (1, 0, 1)
    assert context._internal_codegen is generator
    assert not global_compiler_lock.is_locked()


def test_another_thread_compiles_after(numba: Any) -> None:
    from numba.core.compiler_lock import global_compiler_lock

    entered = threading.Event()

    def compile_something() -> None:
        with global_compiler_lock:
            entered.set()

    thread = threading.Thread(target=compile_something)
    with numba_names.own_settings():
        thread.start()
        assert not entered.wait(0.2)
    thread.join(60)
    assert entered.is_set()


@pytest.mark.parametrize(
    "path",
    [
        "numba.core.compiler_lock:global_compiler_lock",
        "numba.core.registry:cpu_target.target_context",
        "numba.core.registry:cpu_target.target_context.get_abi_sizeof",
        "numba.core.codegen:JITCPUCodegen",
        "numba.core.types.functions:BaseFunction",
        "numba.core.types.functions:BaseFunction.get_call_type",
        "numba.core.compiler:Compiler",
    ],
)
def test_kernels_compile_without(path: str, numba: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from fusednorm.backends.cpu import compiler

    made = (numba_names._code_generator, numba_names.pipeline)
    for function in made:
        function.cache_clear()
    take_away(monkeypatch, path)
    with pytest.raises(ImportError):
        lookup.find(*path.split(":"))
    try:
        symbol, code = compiler._compile(compiler.Kernel("affine", "given", "float32"))
    finally:
        for function in made:
            function.cache_clear()
    assert symbol.encode() in code


def test_where_numba_optimizes_kernels_compile(numba: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from fusednorm.backends.cpu import compiler

    def found(module: str, name: str, *substitute: Any) -> Any:
        return None if name == "JITCPUCodegen._library_class" else lookup.find(module, name, *substitute)

    monkeypatch.setattr(numba_names, "find", found)
    numba_names._code_generator.cache_clear()
    try:
        symbol, code = compiler._compile(compiler.Kernel("affine", "given", "float32"))
    finally:
        numba_names._code_generator.cache_clear()
    assert symbol.encode() in code


def choosing(scale: float, absent: bool) -> Callable[[int, float], float]:
    """A function with what those of kernels have: loops, tuples, branches, operators, a constant condition."""

    def chosen(n: int, x: float) -> float:
        if absent:
            return 0.0
        total, other = 0.0, 1
        for part in range(2):
            start, stop = (part, n) if part else (min(n, 3), max(n // 2, 1))
            for i in range(start, stop, 2):
                total += x * i / (other + 1) if i % 3 and i != n else -x
                other = i
        return total * scale

    return chosen


def numbered(ir: str) -> list[str]:
    """The lines of an IR without the numbers that Numba gives to functions, in some order."""
    lines = (line for line in ir.splitlines() if "constant [" not in line)
    return sorted(re.sub(r"(B\d+)?v\d+|(globals\.|0x)[0-9a-f]+|\d{6,}|_3c\w*_3e", "", line) for line in lines)


@pytest.mark.parametrize("absent", [False, True])
def test_needless_passes_and_what_is_looked_up_once_change_nothing(numba: Any, absent: bool) -> None:
    def ir(pipeline: Any) -> list[str]:
        function = numba.njit(pipeline_class=pipeline, error_model="numpy", **numba_names.UNWRAPPED)(
            choosing(0.5, absent)
        )
        compiled = numba.cfunc("float64(int64, float64)", pipeline_class=pipeline, error_model="numpy")(
            lambda n, x: function(n, x)
        )
        return numbered(compiled.inspect_llvm())

    with numba_names.own_settings():
        short = ir(numba_names.pipeline())
    with numba_names._own_code_generator():
        assert ir(None) == short
    assert len(short) > 100 or absent


def test_the_functions_of_a_kernel_stay_apart_until_all_are_there(numba: Any) -> None:
    """They are inlined and optimized as a whole."""

    @numba.njit("float64(float64)", **numba_names.UNWRAPPED)
    def double(x: float) -> float:
        return 2.0 * x

    def calls() -> int:
        compiled = numba.cfunc("float64(float64)")(lambda x: double(x) + 1.0)
        return len(re.findall(rf" call [^@]*@[^(]*{double.__name__}", compiled.inspect_llvm()))

    assert calls() == 0
    with numba_names.own_settings():
        assert calls() == 1


def test_the_passes_that_are_left_out_are_numbas(numba: Any) -> None:
    """One that has another name would run again: no error, but time."""
    from numba.core import typed_passes, untyped_passes

    for name in numba_names.NEEDLESS:
        assert hasattr(untyped_passes, name) or hasattr(typed_passes, name), name


def test_kernels_get_no_machine_code_of_numbas_and_the_programs_functions_do(numba: Any) -> None:
    """Also functions of both, as Numba's own are: what one generator has compiled, the other one links."""

    @numba.njit("int64(int64)", **numba_names.UNWRAPPED)
    def shared(x: int) -> int:
        return x + 40

    with numba_names.own_settings():
        inside = numba.cfunc("int64(int64)")(lambda x: shared(min(x, 2)))
    assert inside.address == 0
    assert f"@{inside.native_name}(" in inside.inspect_llvm()
    assert numba.njit("int64(int64)")(lambda x: shared(min(x, 2)))(3) == 42


def test_without_numbas_settings_the_error_names_the_versions(numba: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    take_away(monkeypatch, "numba.core:config")
    oldest, newest = lookup.TESTED["numba"]
    with (
        pytest.raises(ImportError, match=rf"numba.core.config, which numba .* tested with numba {oldest} to {newest}"),
        numba_names.own_settings(),
    ):
        pass


def test_llvm_takes_the_bfloat_type() -> None:
    llvm = pytest.importorskip("llvmlite.binding")
    from llvmlite import ir

    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(ir.IntType(16), [ir.FloatType()]), "narrow")
    builder = ir.IRBuilder(function.append_basic_block())
    builder.ret(builder.bitcast(builder.fptrunc(function.args[0], numba_names.bfloat()), ir.IntType(16)))
    assert "fptrunc float" in str(module)
    llvm.parse_assembly(str(module)).verify()
    assert numba_names.bfloat() == numba_names.bfloat()
    assert numba_names.bfloat() != ir.HalfType()


def test_values_and_types_in_intrinsics(numba: Any) -> None:
    from llvmlite import ir
    from numba.core.registry import cpu_target

    context = cpu_target.target_context
    assert numba_names.ir_type(context, numba.types.float32) == ir.FloatType()
    assert isinstance(numba_names.ir_type(context, numba.types.CPointer(numba.types.float32)), ir.PointerType)
    assert isinstance(numba_names.void_value(context), ir.Constant)


def test_the_cache_of_kernels_depends_on_the_names_of_numba(
    numba: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from fusednorm.backends.cpu import compiler

    changed = tmp_path / "numba_names.py"
    changed.write_text(Path(numba_names.__file__).read_text() + "\n")
    digest = compiler._digest.__wrapped__()
    monkeypatch.setattr(compiler, "_NUMBA_NAMES_FILE", str(changed))
    assert compiler._digest.__wrapped__() != digest


# --- Triton ---


def test_launch_options_are_known_to_the_compilers() -> None:
    pytest.importorskip("triton")
    from triton.backends.amd.compiler import HIPOptions
    from triton.backends.nvidia.compiler import CUDAOptions

    assert hasattr(CUDAOptions, triton_names.FP_FUSION)
    assert hasattr(HIPOptions, triton_names.FP_FUSION)
    assert CUDAOptions.launch_pdl is False
    assert triton_names.DEPENDENT_LAUNCH == "launch_pdl"


class Run:
    """A launcher in Python around one that would be in C."""

    global_scratch_size = profile_scratch_size = 0

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []

    def launch(self, *arguments: Any) -> None:
        self.launched.append(arguments)

    def __call__(self, x: int, y: int, z: int, stream: Any, function: Any, *arguments: Any) -> None:
        self.launch(x, y, z, stream, function, *arguments)


class Shorter(Run):
    """Takes no hooks."""

    def __call__(self, x: int, y: int, z: int, stream: Any, function: Any, metadata: Any) -> None:  # type: ignore[override]
        self.launch(x, y, z, stream, function, metadata)


@pytest.mark.parametrize(
    "compiled",
    [
        SimpleNamespace(function=1, packed_metadata=()),
        SimpleNamespace(run=Run(), packed_metadata=()),
        SimpleNamespace(run=Run(), function=1),
        SimpleNamespace(run=Shorter(), function=1, packed_metadata=()),
    ],
    ids=["run", "function", "packed_metadata", "parameters"],
)
def test_without_a_way_to_start_a_kernel_triton_launches_each_time(compiled: Any) -> None:
    from fusednorm.backends.triton.launch import Launch

    assert triton_names.start_of(compiled, 7, [16], ()) is None
    asked: list[Any] = []

    class Kernel:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *arguments, **options: asked.append(arguments) or compiled

    launch = Launch(Kernel(), 7, (3,), {"SIZE": 4}, warps=4)
    x = torch.zeros(4)
    for _ in range(3):
        launch(x)
    assert [arguments[1:] for arguments in asked] == [(3,)] * 3
    assert launch.starts == {}


# --- all at once, from the first import on ---


def test_the_package_imports_and_works_without_any_optional_name() -> None:
    program = textwrap.dedent(
        f"""
        import sys, types
        sys.path.insert(0, {str(ROOT / "tests")!r})
        package = sys.modules["fusednorm"] = types.ModuleType("fusednorm")
        package.__path__ = [{str(PACKAGE)!r}]
        from importlib import import_module
        import torch
        from fusednorm.private import lookup
        class Nowhere:
            "Has the one name that has no substitute."
            _AutoDispatchBelowAutograd = torch._C._AutoDispatchBelowAutograd
        lookup.import_module = lambda module: Nowhere if module.startswith("torch") else import_module(module)
        from fusednorm.private import torch_names
        del sys.modules["fusednorm"]
        import fusednorm
        from fusednorm.backends.cpu import memory
        assert fusednorm.private.torch_names is torch_names if hasattr(fusednorm, "private") else True
        x = torch.randn(2, 8, 5, 6, requires_grad=True)
        weight = torch.randn(8, requires_grad=True)
        ours = fusednorm.group_norm(x, 4, weight)
        theirs = torch.nn.functional.group_norm(x, 4, weight)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            torch.autograd.grad(ours.pow(3).sum(), (x, weight)), torch.autograd.grad(theirs.pow(3).sum(), (x, weight)),
            rtol=1e-3, atol=1e-3,
        )
        fusednorm.nn.BatchNorm2d(8)(x)
        print(torch_names.swap_memory, torch_names.empty_strided_cuda, memory.describe())
        """
    )
    done = run(program)
    assert done.stdout.startswith("None None none: this torch cannot"), done.stderr
