"""Bad input: each error names the argument, what came, what was expected; nothing is computed or allocated before."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import fusednorm
from fusednorm import nn, ops

X = torch.randn(2, 8, 4)
C = torch.ones(8)
NC = torch.zeros(2, 8)
IMAGE = torch.randn(2, 8, 4, 4)
META = C.to("meta")
SCALARS = torch.ones(2, 4)  # the mean and rstd of four groups
SPARSE = X.to_sparse()
with warnings.catch_warnings(action="ignore"):  # torch's own: both kinds of tensor are prototypes or deprecated
    QUANTIZED = torch._empty_affine_quantized([2, 8, 4], scale=0.1, zero_point=0, dtype=torch.qint8)
    NESTED = torch.nested.nested_tensor([torch.randn(8, 4), torch.randn(8, 3)])
    JAGGED = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)], layout=torch.jagged)
    MASKED = torch.masked.masked_tensor(X, X > 0)
GRAD = torch.zeros(8, requires_grad=True)

gn, inorm, ln = fusednorm.group_norm, fusednorm.instance_norm, fusednorm.layer_norm
rms, bn = fusednorm.rms_norm, fusednorm.batch_norm

# A call, the error, and words that it must hold: the argument, the value, what was expected.
CASES: dict[str, tuple[Callable[[], Any], type[Exception], tuple[str, ...]]] = {
    "channels not divisible": (lambda: gn(X, 3), ValueError, ("num_groups=3", "8 channels", "divisor")),
    "no groups": (lambda: gn(X, 0), ValueError, ("num_groups is 0", "at least 1")),
    "negative groups": (lambda: gn(X, -2), ValueError, ("num_groups is -2",)),
    "groups of another type": (lambda: gn(X, 2.0), TypeError, ("num_groups", "float", "int")),  # type: ignore[arg-type]
    "groups a bool": (lambda: gn(X, True), TypeError, ("num_groups", "bool", "int")),
    "a size a float": (lambda: ln(X, (8, 4.0)), TypeError, ("normalized_shape[1]", "float", "int")),  # type: ignore[list-item]
    "a size a bool": (lambda: rms(X, (True,)), TypeError, ("normalized_shape[0]", "bool", "int")),
    "channel_dim a word": (lambda: ln(X, (8,), channel_dim="1"), TypeError, ("channel_dim", "str", "int")),  # type: ignore[arg-type]
    "wrong channel_dim": (lambda: gn(X, 4, channel_dim=-1, weight=C), ValueError, ("weight", "(8,)", "(4,)")),
    "unknown channel_dim": (lambda: gn(X, 4, channel_dim=2), ValueError, ("channel_dim is 2", "1", "-1")),
    "short weight": (lambda: gn(X, 4, C[:7]), ValueError, ("weight", "(7,)", "(8,)")),
    "long bias": (lambda: gn(X, 4, C, torch.ones(9)), ValueError, ("bias", "(9,)", "(8,)")),
    "weight of rank 2": (lambda: gn(X, 4, C[None]), ValueError, ("weight", "(1, 8)", "reshape((8,))")),
    "weight a list": (lambda: gn(X, 4, [1.0] * 8), TypeError, ("weight", "list", "Tensor")),  # type: ignore[arg-type]
    "weight an int tensor": (lambda: gn(X, 4, C.int()), TypeError, ("weight", "int32", "float32")),
    "weight sparse": (lambda: gn(X, 4, C.to_sparse()), TypeError, ("weight", "sparse_coo", "to_dense")),
    "scale without samples": (lambda: gn(X, 4, scale=C), ValueError, ("scale", "(8,)", "(2, 8)")),
    "shift with positions": (lambda: gn(X, 4, shift=NC[..., None]), ValueError, ("shift", "(2, 8, 1)", "reshape")),
    "rank 1": (lambda: gn(C, 4), ValueError, ("input", "(8,)", "rank 1", "unsqueeze")),
    "no tensor": (lambda: gn([1.0], 1), TypeError, ("input", "list", "Tensor")),  # type: ignore[arg-type]
    "integer": (lambda: gn(X.long(), 4), TypeError, ("input", "int64", ".float()")),
    "bool": (lambda: ln(X.bool(), (4,)), TypeError, ("input", "torch.bool")),
    "complex": (lambda: gn(X.to(torch.complex64), 4), TypeError, ("input", "complex64", "view_as_real")),
    "float8": (lambda: gn(X.to(torch.float8_e4m3fn), 4), TypeError, ("input", "float8_e4m3fn")),
    "quantized": (lambda: gn(QUANTIZED, 4), TypeError, ("input", "qint8", "dequantize")),
    "sparse": (lambda: gn(SPARSE, 4), TypeError, ("input", "sparse_coo", "to_dense")),
    "nested": (lambda: gn(NESTED, 4), TypeError, ("input", "nested", "to_padded_tensor")),
    "mixed devices": (lambda: gn(X, 4, META), ValueError, ("weight", "meta", "cpu", "one device")),
    "mixed devices, scale": (lambda: gn(X, 4, scale=NC.to("meta")), ValueError, ("scale", "meta", "cpu")),
    "mixed devices, gate": (lambda: gn(X, 4, pre_add=X, pre_gate=NC.to("meta")), ValueError, ("pre_gate is on meta",)),
    "unknown activation": (lambda: gn(X, 4, activation="mish"), ValueError, ("activation", "'mish'", "silu")),
    "activation of another type": (lambda: gn(X, 4, activation=torch.relu), TypeError, ("activation", "name")),  # type: ignore[arg-type]
    "activation without a parameter": (lambda: fusednorm.Activation("relu", 2.0), ValueError, ("relu", "2.0")),
    "batch eps negative": (lambda: bn(X, C, C, eps=-1e-5), ValueError, ("eps is -1e-05", "at least 0")),
    "eps of a gradient": (lambda: gn(X, 4, eps=GRAD.sum()), TypeError, ("eps requires grad", "eps.item()")),
    "eps a string": (lambda: gn(X, 4, eps="1e-5"), TypeError, ("eps", "str", "number")),  # type: ignore[arg-type]
    "one element, group": (lambda: gn(torch.ones(1, 4), 4), ValueError, ("(1, 4)", "1 element", "group")),
    "one element, instance": (lambda: inorm(X[..., :1]), ValueError, ("(2, 8, 1)", "1 element")),
    "one element, batch": (lambda: bn(X[:1, :, 0], None, None, training=True), ValueError, ("(1, 8)", "1 element")),
    "batch eps 0 in training": (lambda: bn(X, None, None, None, None, True, eps=0.0), ValueError, ("eps is 0.0",)),
    "no running statistics": (lambda: bn(X, None, None), ValueError, ("running_mean", "None", "(8,)")),
    "half the running statistics": (lambda: bn(X, C, None, training=True), ValueError, ("running_var", "both")),
    "instance without statistics": (lambda: inorm(X, use_input_stats=False), ValueError, ("running_mean", "None")),
    "short running_mean": (lambda: bn(X, C[:4], C), ValueError, ("running_mean", "(4,)", "(8,)")),
    "running_mean of one number": (
        lambda: bn(X, torch.zeros(1).expand(8), C, training=True), ValueError, ("running_mean", "one number for all")),
    "running_var requires grad": (lambda: bn(X, C, GRAD), ValueError, ("running_var", "requires grad", "detach")),
    "momentum None": (lambda: bn(X, C, C, training=True, momentum=None), TypeError, ("momentum", "NoneType")),  # type: ignore[arg-type]
    "normalized_shape": (lambda: ln(X, (8,)), ValueError, ("normalized_shape is (8,)", "(2, 8, 4)", "(4,)")),
    "normalized_shape empty": (lambda: rms(X, ()), ValueError, ("normalized_shape is ()", "(4,)")),
    "normalized_shape too long": (lambda: ln(X, (1, 2, 8, 4)), ValueError, ("normalized_shape", "(1, 2, 8, 4)")),
    "normalized_shape an int": (lambda: ln(X, 4), TypeError, ("normalized_shape", "int", "(4,)")),  # type: ignore[arg-type]
    "layer weight": (lambda: ln(X, (8, 4), C), ValueError, ("weight", "(8,)", "(8, 4)")),
    "layer of rank 0": (lambda: ln(torch.tensor(1.0), (1,)), ValueError, ("input", "rank 0")),
    "gradient of another shape": (
        lambda: ops.group_norm_backward(X[:1], X, SCALARS, SCALARS, 4, C, C), ValueError, ("grad_output", "(2, 8, 4)")),
    "gradient of another dtype": (
        lambda: ops.group_norm_backward(X.double(), X, SCALARS, SCALARS, 4, C, C), TypeError, ("float64",)),
    "statistics of another shape": (
        lambda: ops.group_norm_backward_data(X, X, SCALARS, SCALARS, 2, C, C), ValueError, ("mean", "(2, 2)")),
    "rstd of another shape": (
        lambda: ops.rms_norm_backward(X, X, torch.ones(16), (4,), None), ValueError, ("rstd", "(16,)", "(16, 1)")),
    "8 bits of a gradient": (
        lambda: rms(GRAD, (8,), out_dtype=torch.int8, out_scale="row"), RuntimeError, ("out_dtype", "requires grad")),
    "channels of a module": (lambda: nn.GroupNorm(3, 8), ValueError, ("8", "3")),
    "groups of a module": (lambda: nn.GroupNorm(0, 8), ValueError, ("num_groups is 0",)),
    "activation of a module": (lambda: nn.LayerNorm(8, activation="mish"), ValueError, ("activation", "'mish'")),
    "channel_dim of a module": (lambda: nn.BatchNorm1d(8, channel_dim=0), ValueError, ("channel_dim is 0",)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_error_names_the_argument_the_value_and_what_was_expected(case: str) -> None:
    call, kind, words = CASES[case]
    with pytest.raises(kind) as caught:
        call()
    for word in words:
        assert word in str(caught.value)


#: Tensors that Dynamo does not trace, and activations, whose errors know no torch.
UNTRACED = "weight sparse", "quantized", "sparse", "nested", "unknown activation", "activation of another type"
#: Calls whose errors keep their class, since torch or code that knows no torch raises them.
RAISED = "activation without a parameter", "channels of a module", "groups of a module", "activation of a module"
#: Calls that are right, of each function.
RIGHT: dict[str, Callable[..., Any]] = {
    "gn": lambda compiled: compiled(X, 4),
    "inorm": lambda compiled: compiled(X),
    "ln": lambda compiled: compiled(X, (4,)),
    "rms": lambda compiled: compiled(X, (4,)),
    "bn": lambda compiled: compiled(X, None, None, training=True),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("case", [case for case in CASES if case not in UNTRACED])
def test_a_compiled_call_gives_the_words_and_compiles_when_it_is_right_again(case: str, dynamic: bool) -> None:
    call, kind, words = CASES[case]
    with pytest.raises(kind if case in RAISED else torch._dynamo.exc.TorchRuntimeError) as caught:
        torch.compile(call, backend="eager", dynamic=dynamic)()
    for word in words:
        assert word in str(caught.value)
    function = call.__code__.co_names[0]
    if function in RIGHT:
        RIGHT[function](torch.compile(globals()[function], backend="eager", fullgraph=True, dynamic=dynamic))


def test_a_wrong_call_between_right_ones_costs_no_graph() -> None:
    graphs = []
    call = torch.compile(lambda x, weight: gn(x, 2, weight), backend=lambda graph, _: graphs.append(graph) or graph)
    for batch in (2, 3, 4):
        call(IMAGE[:1].expand(batch, 8, 4, 4), C)
    made = len(graphs)
    with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match=r"weight has shape \(8,\); expected \(7,\)"):
        call(IMAGE[:, :7], C)
    call(IMAGE[:1].expand(5, 8, 4, 4), C)
    assert len(graphs) == made


# A call of a tensor that may be of any class, by the name under which its errors speak of the tensor.
CALLS_OF_ANY: dict[str, list[Callable[[Any], Any]]] = {
    "input": [
        lambda x: gn(x, 4),
        inorm,
        lambda x: ln(x, (8,)),
        lambda x: ln(x, (8,), scale=NC),
        lambda x: ln(x, (8,), pre_add=x),
        lambda x: ln(x, (8,), out_dtype=torch.int8, out_scale="row"),
        lambda x: rms(x, (8,)),
        lambda x: bn(x, None, None, training=True),
        nn.RMSNorm(8),
    ],
    "weight": [lambda x: gn(X, 4, x), lambda x: ln(X, (4,), x)],
    "scale": [lambda x: gn(X, 4, scale=x), lambda x: ln(X, (4,), scale=x)],
    "running_mean": [lambda x: bn(X, x, x)],
    "pre_add": [lambda x: gn(X, 4, pre_add=x)],
    "pre_gate": [lambda x: ln(X, (4,), pre_add=X, pre_gate=x)],
    "post_add": [lambda x: gn(X, 4, post_add=x)],
}
OTHER_TENSORS = {
    "jagged": (JAGGED, "is a nested tensor; expected a dense one"),
    "nested": (NESTED, "is a nested tensor; expected a dense one"),
    "masked": (MASKED, "is a MaskedTensor; expected a dense tensor"),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", OTHER_TENSORS)
def test_a_tensor_that_holds_no_number_for_each_element_is_refused_as_every_operand(kind: str, compiled: bool) -> None:
    other, words = OTHER_TENSORS[kind]
    for name, calls in CALLS_OF_ANY.items():
        for call in calls:
            with pytest.raises(TypeError, match=f"_norm: {name} {words}"):
                (torch.compile(call, backend="eager") if compiled else call)(other)


def test_the_rows_of_a_jagged_tensor() -> None:
    """What the error of a jagged input tells the caller to do."""
    with pytest.raises(TypeError) as caught:
        rms(JAGGED, (8,))
    remedy = "torch.nested.nested_tensor_from_jagged(rms_norm(input.values(), ...), input.offsets())"
    assert remedy in str(caught.value)
    found = torch.nested.nested_tensor_from_jagged(rms(JAGGED.values(), (8,)), JAGGED.offsets())
    for one, rows in zip(found.unbind(), JAGGED.unbind(), strict=True):
        torch.testing.assert_close(one, torch.nn.functional.rms_norm(rows, (8,)))


class Recorder(TorchDispatchMode):
    """Notes every operator that runs inside."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


SHORT, THIN = C[:7], X[..., :1]  # views are made here: only what the library runs may be seen


@pytest.mark.parametrize(
    "call",
    [
        lambda: gn(IMAGE, 3),
        lambda: gn(IMAGE, 4, SHORT),
        lambda: gn(IMAGE, 4, activation="mish"),
        lambda: bn(IMAGE, C, C, training=True, eps=0.0),
        lambda: bn(IMAGE, SHORT, SHORT, training=True),
        lambda: inorm(THIN),
        lambda: ln(IMAGE, (3,)),
    ],
)
def test_nothing_runs_before_an_error(call: Callable[[], Tensor]) -> None:
    with Recorder() as recorder, pytest.raises(ValueError, match=r"expected|choose"):
        call()
    assert recorder.seen == []


def test_the_recorder_sees_what_runs() -> None:
    with Recorder() as recorder:
        gn(IMAGE, 4)
    assert any("norm_forward" in name for name in recorder.seen)


def test_num_groups_may_be_a_numpy_integer() -> None:
    np = pytest.importorskip("numpy")
    assert torch.equal(gn(X, np.int64(4)), gn(X, 4))


def test_the_error_comes_through_a_compiled_function() -> None:
    compiled = torch.compile(lambda x: gn(x, 3), backend="eager")
    with pytest.raises(Exception, match="num_groups=3"):
        compiled(X)


@pytest.mark.parametrize(
    "x", [torch.ones(1, 8, 1, 1), torch.ones(2, 7, 4, 4), torch.ones(2, 8, 4, 4).long()], ids=["K=1", "channels", "int"]
)
@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_failing_call_updates_nothing(x: Tensor, momentum: float | None) -> None:
    for norm in (nn.BatchNorm2d(8, momentum=momentum), nn.InstanceNorm2d(8, track_running_stats=True)):
        before = {name: value.clone() for name, value in norm.state_dict().items()}
        with pytest.raises((ValueError, TypeError)):
            norm(x)
        for name, value in norm.state_dict().items():
            assert torch.equal(value, before[name]), name


def test_a_failing_backend_updates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("no memory")

    norm = nn.BatchNorm2d(8)
    before = {name: value.clone() for name, value in norm.state_dict().items()}
    monkeypatch.setattr("fusednorm.dispatch.forward", fail)
    with pytest.raises(RuntimeError, match="no memory"):
        norm(IMAGE)
    assert all(torch.equal(value, before[name]) for name, value in norm.state_dict().items())


# --- numbers that are equal to ints ---

#: Calls of a size or a dimension, and a good one.
INTEGERS: dict[str, tuple[Callable[[Any], Any], int]] = {
    "num_groups": (lambda one: gn(X, one), 1),
    "group_norm": (lambda one: gn(X, 4, channel_dim=one), 1),
    "instance_norm": (lambda one: inorm(X, channel_dim=one), 1),
    "batch_norm": (lambda one: bn(X, None, None, training=True, channel_dim=one), 1),
    "layer_norm": (lambda one: ln(X, (8,), channel_dim=one), 1),
    "a row": (lambda one: ln(X, (one,)), 4),
    "rows": (lambda one: rms(X, (8, one)), 4),
    "modulated rows": (lambda one: ln(X, (one,), scale=torch.ones(2, 4)), 4),
}


@pytest.mark.parametrize(("call", "good"), INTEGERS.values(), ids=INTEGERS)
def test_what_is_equal_to_an_int_is_none_whatever_was_called_before(call: Callable[[Any], Any], good: int) -> None:
    expected = call(good)
    for same in (good, good, np.int64(good)):
        torch.testing.assert_close(call(same), expected)
    for wrong in (float(good), np.float32(good), *([True] if good == 1 else [])):
        with pytest.raises(TypeError, match=f"is a {type(wrong).__name__}; expected an int"):
            call(wrong)


def test_sizes_of_a_tracer_are_ints() -> None:
    graph = make_fx(lambda x: ln(gn(x, x.shape[1] // 2), x.shape[1:]), tracing_mode="symbolic")(X)
    torch.testing.assert_close(graph(X), ln(gn(X, 4), (8, 4)))
