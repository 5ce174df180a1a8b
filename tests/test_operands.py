"""The registered ops called past the public functions: each operand is checked, in the kernel and in the fake."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import fusednorm
from fusednorm import ops
from fusednorm.norm import FAMILIES

X = torch.randn(2, 8, 4, 6)
C, NC = torch.ones(8), torch.zeros(2, 8)
with warnings.catch_warnings(action="ignore"):  # torch's own: both kinds of tensor are prototypes or deprecated
    QUANTIZED = torch._empty_affine_quantized([2, 8, 4, 6], scale=0.1, zero_point=0, dtype=torch.qint8)
    NESTED = torch.nested.nested_tensor([torch.randn(8, 4, 6), torch.randn(8, 3, 6)])

FORWARD: dict[str, Any] = {
    "input": X, "weight": C, "bias": C, "scale": None, "shift": None, "mean": None, "var": None,
    "family": "group_norm", "num_groups": 4, "channel_dim": 1, "eps": 1e-5, "activation": "silu", "parameter": 1.0,
}  # fmt: skip
STATISTICS = {"group_norm": (2, 4), "instance_norm": (2, 8), "batch_norm": (8,)}
BACKWARD: dict[str, Any] = {
    "grad_output": X, "input": X, "mean": torch.zeros(2, 4), "rstd": torch.ones(2, 4), "weight": C, "bias": C,
    "scale": None, "shift": None, "family": "group_norm", "num_groups": 4, "channel_dim": 1, "activation": "silu",
    "parameter": 1.0, "training": True, "output_mask": [True] * 5,
}  # fmt: skip
LAYER = {"family": "layer_norm", "num_groups": 2, "weight": torch.ones(4, 6), "bias": None}
ROWS = torch.ones(16, 1)
LAYER_BACKWARD = {**LAYER, "mean": ROWS, "rstd": ROWS}
RMS_BACKWARD = {**LAYER_BACKWARD, "family": "rms_norm", "mean": torch.empty(0)}
BATCH = {"family": "batch_norm", "num_groups": 0}

# What is changed of a good call, and words that the error must hold.
Wrong = dict[str, tuple[dict[str, Any], tuple[str, ...]]]
BOTH: Wrong = {
    "short weight": ({"weight": torch.ones(2)}, ("weight", "(2,)", "(8,)")),
    "empty bias": ({"bias": torch.ones(0)}, ("bias", "(0,)", "(8,)")),
    "short scale": ({"scale": torch.ones(2, 2)}, ("scale", "(2, 2)", "(2, 8)")),
    "shift of one sample": ({"shift": torch.ones(1, 8)}, ("shift", "(1, 8)", "(2, 8)")),
    "integer weight": ({"weight": C.int()}, ("weight", "int32")),
    "complex weight": ({"weight": C.to(torch.complex64)}, ("weight", "complex64")),
    "sparse weight": ({"weight": C.to_sparse()}, ("weight", "sparse")),
    "weight on meta": ({"weight": torch.ones(8, device="meta", requires_grad=True)}, ("weight", "meta")),
    "weight in the last dimension": ({"channel_dim": -1, "num_groups": 2}, ("weight", "(8,)", "(6,)")),
    "no such family": ({"family": "group"}, ("'group'", "group_norm")),
    "no groups": ({"num_groups": 0}, ("num_groups is 0", "at least 1")),
    "negative groups": ({"num_groups": -4}, ("num_groups is -4",)),
    "no divisor": ({"num_groups": 3}, ("num_groups=3", "divisor")),
    "channel_dim 0": ({"channel_dim": 0}, ("channel_dim is 0",)),
    "channel_dim 7": ({"channel_dim": 7}, ("channel_dim is 7",)),
    "no such activation": ({"activation": "mish"}, ("'mish'", "silu")),
    "an infinite slope": ({"activation": "leaky_relu", "parameter": float("inf")}, ("inf", "finite")),
    "weight of another layer": ({**LAYER, "weight": torch.ones(24)}, ("weight", "(24,)", "(4, 6)")),
    "weight of dimensions for last channels": (
        {**LAYER, "num_groups": 0, "channel_dim": -1}, ("weight", "(4, 6)", "(6,)")
    ),
    "weight of dimensions for channels": ({**LAYER, "num_groups": 0}, ("weight", "(4, 6)", "(8,)")),
    "negative trailing dimensions": ({**LAYER, "num_groups": -1}, ("num_groups is -1", "trailing")),
    "too many trailing dimensions": ({**LAYER, "num_groups": 5}, ("num_groups is 5", "trailing")),
    "a scale of rows": ({**LAYER, "scale": NC}, ("scale", "layer_norm")),
}  # fmt: skip
OF_FORWARD: Wrong = {
    **BOTH,
    "input of rank 1": ({"input": C, "weight": None, "bias": None}, ("input", "(8,)", "rank 1")),
    "scalar rows": ({**LAYER, "input": torch.tensor(1.0), "weight": None}, ("input", "rank 0")),
    "integer input": ({"input": X.int()}, ("input", "int32")),
    "quantized input": ({"input": QUANTIZED}, ("input", "qint8")),
    "half the statistics": ({**BATCH, "mean": C}, ("var is None", "both or neither")),
    "short statistics": ({**BATCH, "mean": C[:2], "var": C[:2]}, ("mean", "(2,)", "(8,)")),
    "short variance": ({**BATCH, "mean": C, "var": C[:2]}, ("var", "(2,)", "(8,)")),
    "integer statistics": ({**BATCH, "mean": C.int(), "var": C}, ("mean", "int32")),
    "statistics of groups": ({"mean": C, "var": C}, ("mean", "group_norm", "None")),
    "statistics of rows": ({**LAYER, "mean": C, "var": C}, ("mean", "layer_norm", "None")),
}
OF_BACKWARD: Wrong = {
    **{name: case for name, case in BOTH.items() if "trailing" not in name and "layer" not in name},
    "half gradient": ({"grad_output": X.half()}, ("grad_output", "float16", "float32")),
    "short gradient": ({"grad_output": X[:1]}, ("grad_output", "(1, 8, 4, 6)", "(2, 8, 4, 6)")),
    "gradient of other positions": ({"grad_output": X.transpose(2, 3)}, ("grad_output", "(2, 8, 6, 4)")),
    "gradient on meta": ({"grad_output": X.to("meta")}, ("grad_output", "meta")),
    "short mean": ({"mean": torch.zeros(2)}, ("mean", "(2,)", "(2, 4)")),
    "empty mean": ({"mean": torch.empty(0)}, ("mean", "(0,)", "(2, 4)")),
    "rstd of channels": ({"rstd": torch.ones(2, 8)}, ("rstd", "(2, 8)", "(2, 4)")),
    "integer rstd": ({"rstd": torch.ones(2, 4).int()}, ("rstd", "int32")),
    "rstd on meta": ({"rstd": torch.ones(2, 4, device="meta")}, ("rstd", "meta")),
    "statistics of groups for a batch": ({**BATCH}, ("mean", "(2, 4)", "(8,)")),
    "statistics without rows": ({**LAYER_BACKWARD, "rstd": torch.ones(1, 16)}, ("rstd", "(1, 16)", "(16, 1)")),
    "rms with another mean": ({**RMS_BACKWARD, "mean": torch.ones(3)}, ("mean", "(3,)", "(0,)")),
    "rms without rstd": ({**RMS_BACKWARD, "rstd": torch.empty(0)}, ("rstd", "(0,)", "(16, 1)")),
    "short weight of rows": ({**LAYER_BACKWARD, "weight": torch.ones(2)}, ("weight", "(2,)", "(4, 6)")),
    "constants of groups": ({"training": False}, ("training is False", "group_norm", "batch_norm")),
    "short mask": ({"output_mask": [True, False]}, ("output_mask", "2", "5")),
    "long mask": ({"output_mask": [True] * 6}, ("output_mask", "6", "5")),
}
CASES = [
    *((name, FORWARD | case[0], case[1]) for name, case in OF_FORWARD.items()),
    *((name, BACKWARD | case[0], case[1]) for name, case in OF_BACKWARD.items()),
]
IDS = [f"{'backward' if 'rstd' in call else 'forward'} {name}" for name, call, _ in CASES]


def op_of(call: dict[str, Any]) -> Any:
    return getattr(torch.ops.fusednorm, "norm_backward" if "rstd" in call else "norm_forward").default


def function_of(call: dict[str, Any]) -> Callable[..., Any]:
    function: Callable[..., Any] = ops.norm_backward if "rstd" in call else ops.norm_forward
    return function


def refused(function: Callable[..., Any], arguments: list[Any], words: tuple[str, ...]) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        function(*arguments)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(("name", "call", "words"), CASES, ids=IDS)
def test_a_wrong_operand_is_refused(name: str, call: dict[str, Any], words: tuple[str, ...]) -> None:
    refused(op_of(call), list(call.values()), words)
    refused(function_of(call), list(call.values()), words)


@pytest.mark.parametrize(("name", "call", "words"), CASES, ids=IDS)
def test_a_wrong_operand_is_refused_with_gradients_in_play(
    name: str, call: dict[str, Any], words: tuple[str, ...]
) -> None:
    given = call | {"input": call["input"].detach().clone()}
    if given["input"].is_floating_point():
        given["input"].requires_grad_()
    refused(op_of(call), list(given.values()), words)


@pytest.mark.parametrize(("name", "call", "words"), CASES, ids=IDS)
def test_the_fake_refuses_it_too(name: str, call: dict[str, Any], words: tuple[str, ...]) -> None:
    if "quantized" in name:
        return  # a fake tensor cannot be quantized
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(value) if isinstance(value, Tensor) else value for value in call.values()]
        refused(op_of(call), fake, words)


def test_a_compiled_and_an_exported_graph_refuse_it() -> None:
    class Net(torch.nn.Module):
        def forward(self, x: Tensor, weight: Tensor) -> Tensor:
            output: Tensor = op_of(FORWARD)(x, weight, *list(FORWARD.values())[2:])[0]
            return output

    with pytest.raises(Exception, match=r"weight has shape \(2,\); expected \(8,\)"):
        torch.compile(Net(), fullgraph=True, backend="eager")(X, torch.ones(2))
    program = torch.export.export(Net(), (X, C)).module()
    for node in program.graph.nodes:  # an edit: a weight of two elements
        if node.op == "call_function" and "norm_forward" in str(node.target):
            with program.graph.inserting_before(node):
                short = program.graph.call_function(torch.ops.aten.slice.Tensor, (node.args[1], 0, 0, 2))
            node.args = (node.args[0], short, *node.args[2:])
    program.recompile()
    with pytest.raises(ValueError, match=r"weight has shape \(2,\); expected \(8,\)"):
        program(X, C)


def test_no_dense_tensor() -> None:
    for input in (NESTED, X.to_sparse(), X.to_mkldnn()):
        with pytest.raises((TypeError, NotImplementedError)):
            op_of(FORWARD)(input, *list(FORWARD.values())[1:])
        with pytest.raises(TypeError, match="input"):
            ops.norm_forward(input, *list(FORWARD.values())[1:])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_statistics_of_any_dtype_are_converted(dtype: torch.dtype) -> None:
    mean, rstd = torch.randn(2, 4).to(dtype), torch.rand(2, 4).to(dtype)
    call = BACKWARD | {"mean": mean, "rstd": rstd, "output_mask": [True, True, True, False, False]}
    expected = op_of(call)(*(call | {"mean": mean.float(), "rstd": rstd.float()}).values())
    torch.testing.assert_close(op_of(call)(*call.values()), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_good_call_passes(family: str) -> None:
    trailing = family in ("layer_norm", "rms_norm")
    shape = (4, 6) if trailing else (8,)
    parameters = {"weight": torch.randn(shape), "bias": None if family == "rms_norm" else torch.randn(shape)}
    groups = {"group_norm": 4, "layer_norm": 2, "rms_norm": 2}.get(family, 0)
    call = FORWARD | parameters | {"family": family, "num_groups": groups}
    output, mean, rstd, _ = op_of(call)(*call.values())
    back = BACKWARD | parameters | {"family": family, "num_groups": groups, "mean": mean, "rstd": rstd}
    wanted = op_of(back)(*back.values())
    got = ops.norm_backward(*(back | ({"mean": None} if family == "rms_norm" else {})).values())
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(ops.norm_forward(*call.values())[0], output)


def test_the_public_functions_do_not_pay_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("forward_norm", "backward_norm"):
        for module in ("library", "autograd"):
            monkeypatch.setattr(f"fusednorm.{module}.{name}", lambda *_, name=name: calls.append(name))
    x = X.clone().requires_grad_()
    fusednorm.group_norm(x, 4, C, C).sum().backward()
    assert calls == []


def test_the_ops_under_transforms() -> None:
    def loss(x: Tensor) -> Tensor:
        output: Tensor = op_of(FORWARD)(x, *list(FORWARD.values())[1:])[0]
        return output.square().sum()

    x = X.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(x), x)
    torch.testing.assert_close(torch.func.grad(loss)(X), expected, rtol=1e-4, atol=1e-4)
    tangent = torch.randn_like(X)
    _, product = torch.func.jvp(loss, (X,), (tangent,))
    torch.testing.assert_close(product, (expected * tangent).sum(), rtol=1e-3, atol=1e-3)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.unpack_dual(loss(torch.autograd.forward_ad.make_dual(X, tangent)))
    torch.testing.assert_close(dual.tangent, product)


def test_the_ops_under_vmap() -> None:
    x, gradients, weights = torch.randn(3, 2, 8, 4, 6), torch.randn(3, 2, 8, 4, 6), torch.randn(8, 3)
    rest, given = list(FORWARD.values())[2:], list(BACKWARD.values())

    def forward(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        results: tuple[Tensor, ...] = op_of(FORWARD)(x, weight, *rest)
        return results[:3]

    def backward(gradient: Tensor) -> tuple[Tensor, ...]:
        results: tuple[Tensor, ...] = op_of(BACKWARD)(gradient, *given[1:])
        return results[:3]

    expected = tuple(map(torch.stack, zip(*map(forward, x, weights.T), strict=True)))
    torch.testing.assert_close(torch.vmap(forward, (0, 1))(x, weights), expected)
    expected = tuple(map(torch.stack, zip(*map(backward, gradients), strict=True)))
    torch.testing.assert_close(torch.vmap(backward)(gradients), expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match=r"weight has shape \(3,\); expected \(8,\)"):
        torch.vmap(forward, (0, 0))(torch.randn(8, 2, 8, 4, 6), weights)
    leaf = X.clone().requires_grad_()
    torch.vmap(forward, (None, 1))(leaf, weights)[0].square().sum().backward()
    (wanted,) = torch.autograd.grad(sum(forward(leaf, weight)[0].square().sum() for weight in weights.T), leaf)  # type: ignore[arg-type]
    torch.testing.assert_close(leaf.grad, wanted, rtol=1e-4, atol=1e-4)


def test_an_alias_keeps_its_parameter() -> None:
    called = {**FORWARD, "activation": "swish", "parameter": 2.0}
    expected = fusednorm.group_norm(X, 4, C, C, activation=fusednorm.Activation("swish", 2.0))
    for function in (op_of(called), function_of(called)):
        torch.testing.assert_close(function(*called.values())[0], expected)


@pytest.mark.parametrize("call", [FORWARD, BACKWARD], ids=["forward", "backward"])
def test_a_parameter_of_none_is_refused(call: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"norm_\w+: parameter is None; expected a number"):
        function_of(call)(*(call | {"parameter": None}).values())
