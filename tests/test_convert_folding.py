"""Which activations convert_ folds into norms, by what evidence, and which it leaves and why."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from convert_support import (
    ADN,
    Block,
    Bottleneck,
    Decoder,
    Functional,
    Inner,
    OnlyInTraining,
    Outer,
    ResnetBlock2D,
    Seen,
    Sums,
    SumsApart,
    UnetBasicBlock,
    UnetResBlock,
    Untraceable,
    converted,
    fused,
    left,
    summed,
)
from torch import nn

import fusednorm
from fusednorm.activations import FORMULAS, Activation
from fusednorm.convert import rewriting, sums
from fusednorm.convert.source import Edit, Place
from fusednorm.equivalents import FUNCTIONS, NAMED_MODULES, function_activation, module_activation

IMAGE = (2, 8, 5, 6)
TRACED = "the only user in a trace"


pytestmark = pytest.mark.usefixtures("seeded_reference")


# --- activations ---

MODULES: list[tuple[nn.Module, Activation]] = [
    (nn.SiLU(), Activation("silu")),
    (nn.ReLU(inplace=True), Activation("relu")),
    (nn.GELU(), Activation("gelu")),
    (nn.GELU(approximate="tanh"), Activation("gelu_tanh")),
    (nn.Sigmoid(), Activation("sigmoid")),
    (nn.Tanh(), Activation("tanh")),
    (nn.Hardswish(), Activation("hardswish")),
    (nn.LeakyReLU(0.3), Activation("leaky_relu", 0.3)),
]


def test_every_activation_has_its_module() -> None:
    assert {activation.name for _, activation in MODULES} == set(FORMULAS)
    assert {FORMULAS[name].parameter for name in FUNCTIONS.values()} == {None, "beta", "negative_slope"}


@pytest.mark.parametrize(("act", "activation"), MODULES, ids=[activation.name for _, activation in MODULES])
def test_modules_in_a_sequence(act: nn.Module, activation: Activation) -> None:
    assert module_activation(act) == activation
    model = nn.Sequential(nn.GroupNorm(4, 8), copy.deepcopy(act), nn.Conv2d(8, 8, 1))
    assert list(fused(converted(model, torch.randn(IMAGE)))) == ["0"]
    assert model[0].activation == activation


@pytest.mark.parametrize("function", FUNCTIONS, ids=range(len(FUNCTIONS)))  # a text may hold an address
def test_functions_compute_what_they_are_taken_for(function: Any) -> None:
    x = torch.randn(4, 8, dtype=torch.float64)
    activation = function_activation(function, {})
    module = fusednorm.nn.BatchNorm1d(8, affine=False, eps=0.0, activation=activation).double().eval()
    torch.testing.assert_close(module(x), function(x.clone()))


def test_functions_with_options() -> None:
    assert function_activation(F.leaky_relu, {"negative_slope": 0.5, "inplace": True}) == Activation("leaky_relu", 0.5)
    assert function_activation(F.gelu, {"approximate": "tanh"}) == Activation("gelu_tanh")
    assert function_activation(F.gelu, {"approximate": "other"}) is None
    assert function_activation(F.silu, {"beta": 2.0, "unknown": 1}) is None
    assert function_activation(F.elu, {}) is None
    assert function_activation([], {}) is None


def test_classes_of_other_packages() -> None:
    for name, make in NAMED_MODULES.items():
        kind = type(name.rpartition(".")[2], (nn.Module,), {"__module__": name.rpartition(".")[0], "alpha": 1.5})
        assert module_activation(kind()) == make(kind())
    assert module_activation(type("SiLU", (nn.SiLU,), {})()) is None


@pytest.mark.parametrize("act", [nn.Mish(), nn.PReLU(), nn.ReLU6()], ids=lambda act: type(act).__name__)
def test_activations_without_a_fused_form(act: nn.Module) -> None:
    report = converted(nn.Sequential(nn.GroupNorm(4, 8), act), torch.randn(IMAGE))
    assert f"{type(act).__name__}, has no fused form" in left(report)["0"]


def test_an_activation_whose_forward_was_replaced_stays() -> None:
    act, x = nn.ReLU(), torch.randn(IMAGE)
    act.forward = lambda input: 2 * F.relu(input)  # type: ignore[method-assign]
    model = nn.Sequential(nn.GroupNorm(4, 8), act)
    expected = model(x)
    assert not fusednorm.convert_(model).fused
    assert_same(model(x), expected)


# --- nn.Sequential ---


def test_a_sequence_looks_past_identities() -> None:
    model = nn.Sequential(nn.GroupNorm(4, 8), nn.Identity(), nn.SiLU(), nn.SiLU())
    assert fused(converted(model, torch.randn(IMAGE))) == {"0": "silu, the next module"}
    assert [type(module) for module in model] == [fusednorm.nn.GroupNorm, nn.Identity, nn.Identity, nn.SiLU]


def test_a_shared_activation_of_sequences_stays() -> None:
    act = nn.ReLU()
    report = converted(nn.Sequential(nn.GroupNorm(4, 8), act, nn.GroupNorm(4, 8), act), torch.randn(IMAGE))
    assert left(report) == dict.fromkeys("02", "not fused: the activation behind it, ReLU, is used at 2 places")


@pytest.mark.parametrize(
    ("ordering", "reason"), [("NA", ""), ("NDA", "a dropout stands between it and the activation"), ("AN", None)]
)
def test_monais_adn(ordering: str, reason: str | None) -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 1), ADN(ordering))
    report = converted(model.eval(), torch.randn(IMAGE)) if reason == "" else fusednorm.convert_(model)
    assert fused(report) == ({"1.N": "leaky_relu(0.1), the next module"} if reason == "" else {})
    assert left(report) == ({"1.N": f"not fused: {reason}"} if reason else {})
    assert list(dict(model[1].named_children())) == list(ordering)


# --- the code of a class ---


def test_a_shared_activation_goes_into_both_norms() -> None:
    model = Block()
    report = converted(model, torch.randn(IMAGE))
    assert fused(report) == {"bn1": "relu, the code of Block", "bn2": "relu, the code of Block"}
    assert type(model.relu) is nn.ReLU
    assert (type(model).__name__, isinstance(model, Block)) == ("Block", True)


def test_functions_in_the_code() -> None:
    report = converted(Functional(), torch.randn(IMAGE))
    assert [entry.reason.partition(",")[0] for entry in report.fused] == [
        "silu", "relu", "leaky_relu(0.2)", "tanh", "gelu_tanh",
    ]  # fmt: skip


def test_results_that_something_else_sees() -> None:
    report = converted(Seen(), torch.randn(IMAGE))
    assert not report.fused


def test_a_class_is_rewritten_once_and_names_its_lines() -> None:
    first, second = Block(), Block()
    fusednorm.convert_(first)
    fusednorm.convert_(second)
    assert type(first) is type(second)
    places = [edit.place for edit in rewriting.origin(type(first))[1]]
    assert {place.method for place in places} == {"forward"}
    texts = ["out += identity", "self.bn2(out)", "self.relu(out)", "self.relu(out)"]
    assert sorted(place.text for place in places) == texts
    assert type(first).forward.__code__.co_firstlineno == Block.forward.__code__.co_firstlineno


def test_a_source_that_changed_is_an_error_when_a_copy_is_made() -> None:
    edit = Edit(Place("forward", 3, 14, "self.relu(other)"), "leave out")
    with pytest.raises(RuntimeError, match=r"cannot be loaded.*Block.forward has no self.relu\(other\) at its place"):
        rewriting._make(Block, frozenset({edit}))


def without_source() -> nn.Module:
    space: dict[str, Any] = {"nn": nn, "__name__": "made"}
    lines = ["class Made(nn.Module):", " def forward(self, x):", "  return self.act(self.norm(x))"]
    exec("\n".join(lines), space)
    return with_norm(space["Made"]())


def with_norm(model: nn.Module) -> nn.Module:
    model.norm, model.act = nn.GroupNorm(4, 8), nn.SiLU()
    return model


class Decorated(nn.Module):
    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(self.norm(x))


class Reduced(nn.Module):
    def __reduce__(self) -> Any:
        return super().__reduce__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(self.norm(x))


class Base(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(self.norm(x))


class Derived(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1


class WithSuper(nn.Module):
    def extra_repr(self) -> str:
        return "mine"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        repr(super())
        return F.silu(self.norm(x))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (without_source(), "the source of Made is not at hand"),
        (with_norm(Decorated()), "Decorated.forward is decorated"),
        (with_norm(Reduced()), "Reduced has a way of its own to be pickled"),
        (with_norm(Derived()), "Derived.forward has no F.silu(self.norm(x)) at its place"),
    ],
    ids=["no source", "decorated", "pickled", "overridden"],
)
def test_code_that_cannot_be_rewritten(model: nn.Module, reason: str) -> None:
    report = fusednorm.convert_(model)
    assert reason in left(report)["norm"]
    assert not report.fused


def test_a_method_that_calls_super_is_rewritten() -> None:
    model = with_norm(WithSuper())
    x = torch.randn(IMAGE)
    expected = model(x)
    assert list(fused(fusednorm.convert_(model))) == ["norm"]
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)


def test_norms_of_one_block_folded_in_two_conversions() -> None:
    model, x = Functional(), torch.randn(IMAGE)
    expected = model(x)
    fusednorm.convert_(model, filter_fn=lambda path, norm: path == "norm1")
    assert len(fusednorm.convert_(model).fused) == 4
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)
    fusednorm.revert_(model)
    assert type(model) is Functional


# --- sums ---


@pytest.fixture(params=[0, 1 << 30], ids=["one call", "beside the norm"])
def size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways in which a sum that the code leaves to the norm is computed."""
    monkeypatch.setattr(sums, "LEAST_BYTES", request.param)


@pytest.mark.usefixtures("size")
def test_sums_in_every_form() -> None:
    behind, before = "before the activation, the code of Sums", "before the norm, the code of Sums"
    assert summed(converted(Sums(), torch.randn(IMAGE))) == {
        "norm1": f"y += self.conv(x), {behind}",
        "norm2": f"x + z, {behind}",
        "norm3": f"self.norm3(z) + x, {behind}",
        "norm4": f"y + z, {behind}",
        "norm8": f"y += x, {behind}",
        "norm5": f"x + y, {before}",
        "norm6": f"y + x[:, :, :1, :1], {before}",
        "norm7": f"y + 0.5, {before}",
    }


@pytest.mark.parametrize("hooked", [False, True])
def test_an_identity_with_hooks_sees_what_it_saw(hooked: bool) -> None:
    identity, seen = nn.Identity(), []
    if hooked:
        identity.register_forward_hook(lambda module, inputs, output: seen.append(output))
    model, x = nn.Sequential(nn.GroupNorm(4, 8), identity, nn.SiLU()), torch.randn(IMAGE)
    expected = model[0](x)
    assert list(fused(fusednorm.convert_(model))) == ([] if hooked else ["0"])
    model(x)
    for output in seen:
        torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("hooked", [False, True])
def test_what_hooks_may_hold_stays_before_what_may_change_it(hooked: bool) -> None:
    """The norm would run behind the downsampling, and a hook of the convolution may have given it the norm's input."""
    block = Block()
    block.downsample = nn.Conv2d(8, 8, 1)
    if hooked:
        block.conv2.register_forward_hook(lambda module, inputs, output: None)
    assert list(summed(converted(block, torch.randn(IMAGE)))) == ([] if hooked else ["bn2"])


class RunsWithoutIt(nn.Module):
    """A statement between norm and sum that runs because its attribute is None."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(8, 8, 1), nn.GroupNorm(4, 8), nn.SiLU()
        self.scale: nn.Module | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.conv(x))
        if self.scale is None:
            y = y * 2
        y = y + x
        return self.act(y)


def test_a_branch_that_runs_where_its_attribute_is_none_keeps_the_sum() -> None:
    report = converted(RunsWithoutIt(), torch.randn(IMAGE))
    assert not summed(report)
    assert not fused(report)


@pytest.mark.usefixtures("size")
@pytest.mark.parametrize(("block", "norm"), [(Block, "bn2"), (Bottleneck, "bn3"), (UnetResBlock, "norm2")])
def test_shortcuts_of_torchvision_timm_and_monai(block: Callable[[], nn.Module], norm: str) -> None:
    report = converted(block(), torch.randn(IMAGE))
    assert list(summed(report)) == [norm]
    assert norm in fused(report)


def test_sums_that_stay_beside_their_norms() -> None:
    assert not summed(converted(SumsApart().double(), torch.randn(IMAGE, dtype=torch.float64)))


def test_a_branch_that_was_not_taken_raises_later() -> None:
    model = Bottleneck()
    fusednorm.convert_(model)
    model.se = nn.Identity()
    with pytest.raises(RuntimeError, match=r"self.se was None when the model was converted; revert_ the model"):
        model(torch.randn(IMAGE))


def test_hooks_see_the_sum_before_a_norm() -> None:
    model = Sums()
    model.norm5.register_forward_pre_hook(lambda module, inputs: None)
    assert list(summed(fusednorm.convert_(model))) == ["norm1", "norm2", "norm3", "norm4", "norm8", "norm6", "norm7"]


TERMS: list[Any] = [
    torch.randn(IMAGE),
    torch.randn(8, 1, 1),
    torch.randn(2, 8, 1, 1),
    torch.randn(IMAGE, dtype=torch.float64),
    torch.ones(IMAGE, dtype=torch.int64),
    0.5,
]


@pytest.mark.usefixtures("size")
@pytest.mark.parametrize("term", TERMS, ids=["alike", "broadcast", "channels", "float64", "int64", "number"])
def test_whatever_torch_adds(term: Any) -> None:
    x, norm = torch.randn(IMAGE), fusednorm.nn.GroupNorm(4, 8, activation="relu")
    z = F.group_norm(x, 4)
    assert_same(sums.sum_behind(norm, x, term), F.relu(z + term))
    assert_same(sums.sum_behind(norm, x, term, True), F.relu(z + term).to(x.dtype))
    assert_same(sums.sum_before(norm, x, term), F.relu(F.group_norm(x + term, 4)))
    rows = fusednorm.nn.LayerNorm(6)
    assert_same(sums.sum_before(rows, x, term), F.layer_norm(x + term, (6,)))


def test_a_sum_that_fits_no_call_compiles_once() -> None:
    norm = fusednorm.nn.GroupNorm(4, 8, activation="relu")
    x, term = torch.randn(IMAGE), torch.randn(8, 1, 1)
    compiled = torch.compile(lambda x, term: sums.sum_behind(norm, x, term), fullgraph=True, backend="aot_eager")
    for stance in ("default", "fail_on_recompile"):
        with torch.compiler.set_stance(stance):
            assert_same(compiled(x, term), F.relu(F.group_norm(x, 4) + term))
    assert norm.activation == Activation("relu")


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_trace_of_a_block_with_sums() -> None:
    model, x = Sums().eval(), torch.randn(IMAGE)
    expected = model(x)
    fusednorm.convert_(model)
    torch.testing.assert_close(torch.fx.symbolic_trace(model, {"condition": True})(x), expected, rtol=1e-4, atol=1e-4)


# --- as in other packages ---


class Resnet(nn.Module):
    """A block of diffusers with its embedding as a part of the input."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.block = ResnetBlock2D(kind)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x, x[:, 0, 0, :])


@pytest.mark.parametrize(("kind", "norms"), [("default", ["norm1", "norm2"]), ("scale_shift", ["norm1"])])
def test_diffusers_resnet_block(kind: str, norms: list[str]) -> None:
    model = Resnet(kind)
    report = converted(model, torch.randn(IMAGE))
    assert list(fused(report)) == [f"block.{norm}" for norm in norms]
    text = "hidden_states + temb, before the norm, the code of ResnetBlock2D"
    assert summed(report) == ({"block.norm2": text} if kind == "default" else {})
    assert type(model.block.nonlinearity) is nn.SiLU


def test_diffusers_heads_timms_bottlenecks_and_monais_blocks() -> None:
    x = torch.randn(IMAGE)
    assert list(fused(converted(Decoder(), x))) == ["conv_norm_out"]
    assert list(fused(converted(Bottleneck(), x))) == ["bn1", "bn2", "bn3"]
    assert list(fused(converted(UnetBasicBlock(), x))) == ["norm1", "norm2"]


# --- a trace ---


def test_a_trace_sees_through_modules() -> None:
    model = Outer()
    assert fused(converted(model, torch.randn(IMAGE))) == {"body.norm": f"silu, {TRACED}"}
    assert type(model.act) is nn.Identity


def test_a_trace_of_a_part() -> None:
    assert fused(converted(Untraceable(), torch.randn(IMAGE))) == {"outer.body.norm": f"silu, {TRACED}"}


def test_a_trace_has_to_hold_in_training_and_evaluation() -> None:
    assert not converted(OnlyInTraining(), torch.randn(IMAGE)).fused


def test_a_trace_leaves_shared_activations_and_hooks() -> None:
    shared = nn.SiLU()
    report = converted(nn.Sequential(Outer(shared), Outer(shared)), torch.randn(IMAGE))
    assert not report.fused
    hooked = Outer()
    hooked.act.register_forward_hook(lambda *arguments: None)
    assert left(converted(hooked, torch.randn(IMAGE)))["body.norm"].endswith("SiLU, has hooks")


class Noisy(nn.Module):
    """A forward with side effects, which a trace must not have."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.act = Inner(), nn.SiLU()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return self.act(self.body(x)) + torch.rand(8, 1, 1)


def test_a_trace_changes_nothing() -> None:
    model = Noisy()
    torch.manual_seed(3)
    report = fusednorm.convert_(model)
    after = torch.rand(3)
    torch.manual_seed(3)
    assert torch.equal(after, torch.rand(3))
    assert list(fused(report)) == ["body.norm"]
    assert float(model.calls) == 0
    assert model.training
