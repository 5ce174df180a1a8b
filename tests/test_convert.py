"""convert_ and revert_: which module becomes which, what stays, and what is refused."""

from __future__ import annotations

import copy
import doctest
import io
import pickle
from typing import Any

import pytest
import torch
from convert_support import (
    BatchNormAct2d,
    Block,
    ChangedLayerNorm,
    FP32LayerNorm,
    Functional,
    LayerNorm2d,
    TimmLayerNorm,
    TimmRmsNorm,
    converted,
    fused,
    left,
)
from torch import fx, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrizations

import fusednorm
from fusednorm import convert
from fusednorm.convert import classes
from fusednorm.convert.tree import WRAPPERS
from fusednorm.fused_module import FusedBatchNorm, FusedModule

IMAGE = (2, 8, 3, 4)
MODULES: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "GroupNorm": (nn.GroupNorm(4, 8), IMAGE),
    "LayerNorm": (nn.LayerNorm((3, 4)), IMAGE),
    "RMSNorm": (nn.RMSNorm(4), IMAGE),
    "BatchNorm1d": (nn.BatchNorm1d(8), (4, 8, 5)),
    "BatchNorm2d": (nn.BatchNorm2d(8, momentum=None), IMAGE),
    "BatchNorm3d": (nn.BatchNorm3d(8, affine=False), (2, 8, 2, 3, 4)),
    "InstanceNorm1d": (nn.InstanceNorm1d(8), (4, 8, 5)),
    "InstanceNorm2d": (nn.InstanceNorm2d(8, track_running_stats=True), IMAGE),
    "InstanceNorm3d": (nn.InstanceNorm3d(8, affine=True), (2, 8, 2, 3, 4)),
}


pytestmark = pytest.mark.usefixtures("seeded_reference")


@pytest.mark.parametrize("name", MODULES)
def test_each_class_becomes_ours(name: str) -> None:
    norm, shape = MODULES[name]
    model = nn.Sequential(copy.deepcopy(norm), nn.SiLU())
    report = converted(model, torch.randn(shape))
    assert type(model[0]) is getattr(fusednorm.nn, name)
    assert type(model[1]) is nn.Identity
    assert [entry.path for entry in report.converted] == ["0"]
    assert fused(report) == {"0": "silu, the next module"}


def test_the_table_has_every_module() -> None:
    public = {kind for kind in vars(fusednorm.nn).values() if isinstance(kind, type) and kind.__name__[0] != "_"}
    modules = {kind for kind in public if issubclass(kind, FusedModule)} - {FusedModule, FusedBatchNorm}
    modules -= {fusednorm.nn.LayerNorm2d}  # torch has no such class
    assert modules == {*classes.COUNTERPARTS.values(), fusednorm.nn.SyncBatchNorm}
    assert {kind.__name__ for kind in classes.COUNTERPARTS} == set(MODULES)


def test_synchronized_batch_norms_have_a_converter_of_their_own() -> None:
    report = fusednorm.convert_(nn.Sequential(nn.SyncBatchNorm(8), fusednorm.nn.SyncBatchNorm(8)))
    assert [(entry.path, "convert_sync_batchnorm_" in entry.reason) for entry in report.left] == [("0", True)]


def test_a_model_that_is_a_norm() -> None:
    model = nn.GroupNorm(4, 8)
    assert str(converted(model, torch.randn(IMAGE))).startswith("1 norms converted, 0 activations fused, 0 left\n")
    assert type(model) is fusednorm.nn.GroupNorm


def test_the_objects_stay() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, dtype=torch.float64), nn.ReLU()).eval()
    _, norm, act = model
    objects = {key: value for key, value in model.state_dict(keep_vars=True).items() if key.startswith("1.")}
    fusednorm.convert_(model)
    assert model[1] is norm
    assert not norm.training
    assert not model[2].training
    assert all(model.state_dict(keep_vars=True)[key] is value for key, value in objects.items())
    model.train()
    fusednorm.revert_(model)
    assert model[1] is norm
    assert model[2] is act
    assert act.training
    assert type(norm) is nn.BatchNorm2d


def test_an_optimizer_goes_on() -> None:
    model, x = Block(), torch.randn(IMAGE)
    other = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(each.parameters(), 0.1, momentum=0.9) for each in (model, other)]
    for step in range(3):
        if step == 1:
            fusednorm.convert_(model)
        for each, optimizer in zip((model, other), optimizers, strict=True):
            optimizer.zero_grad()
            each(x).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=1e-3, atol=1e-4)


def test_shared_norms_and_tied_weights() -> None:
    norm = nn.GroupNorm(4, 8)
    tied = nn.GroupNorm(4, 8)
    tied.weight = norm.weight
    model = nn.Sequential(norm, nn.SiLU(), tied, nn.SiLU(), nn.Sequential(norm, nn.ReLU()))
    report = converted(model, torch.randn(IMAGE))
    assert model[0] is model[4][0] is norm
    assert tied.weight is norm.weight
    assert left(report) == {"0": "not fused: the norm is used at 2 places"}
    assert fused(report) == {"2": "silu, the next module"}


def test_a_block_at_two_places_is_fused_once() -> None:
    block = nn.Sequential(nn.GroupNorm(4, 8), nn.SiLU())
    report = converted(nn.Sequential(block, nn.Conv2d(8, 8, 1), block), torch.randn(IMAGE))
    assert fused(report) == {"0.0": "silu, the next module"}


def test_hooks_of_a_norm_stay() -> None:
    model = nn.Sequential(nn.GroupNorm(4, 8), nn.SiLU(), nn.GroupNorm(4, 8), nn.SiLU())
    model[0].register_forward_hook(lambda module, inputs, output: output * 2)
    model[2].register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
    report = converted(model, torch.randn(IMAGE))
    assert "hooks of the norm see its output" in left(report)["0"]
    assert list(fused(report)) == ["2"]


def test_hooks_for_all_modules_see_what_they_saw() -> None:
    model, seen = nn.Sequential(nn.GroupNorm(4, 8), nn.SiLU(), Net()), []
    handle = register_module_forward_hook(lambda module, inputs, output: seen.append(output))
    try:
        report = fusednorm.convert_(model)
    finally:
        handle.remove()
    assert not report.fused
    assert not seen
    assert "hooks for all modules see the norm's output" in left(report)["0"]


@pytest.mark.parametrize(
    "register", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"]
)
def test_an_activation_with_hooks_stays(register: str) -> None:
    model = nn.Sequential(nn.GroupNorm(4, 8), nn.SiLU())
    getattr(model[1], register)(lambda *arguments: None)
    report = converted(model, torch.randn(IMAGE))
    assert left(report) == {"0": "not fused: the activation behind it, SiLU, has hooks"}
    assert type(model[1]) is nn.SiLU


class Renamed(nn.LayerNorm):
    """Another constructor, and nothing else."""

    scale = 1.0

    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=1e-3)


class Styled(Renamed):
    style, eps = "fine", 1.0


class Acting(nn.LayerNorm):
    activation = "silu"


class ActingByItself(Acting):
    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.activation = "relu"


class Overriding(nn.LayerNorm):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + 1


class Extended(nn.LayerNorm):
    def extra_repr(self) -> str:
        return "mine"


SUBCLASSES = [Renamed(4), TimmLayerNorm(4), TimmRmsNorm(4), FP32LayerNorm(4)]


@pytest.mark.parametrize("norm", SUBCLASSES, ids=lambda norm: type(norm).__name__)
def test_subclasses_that_rename_or_cast(norm: nn.Module) -> None:
    norm = copy.deepcopy(norm)
    converted(norm, torch.randn(2, 3, 4))
    assert type(norm) in (fusednorm.nn.LayerNorm, fusednorm.nn.RMSNorm)


class Reader(nn.Module):
    """A model that asks its norm for what the norm's class says."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.norm(input) * self.norm.scale * len(self.norm.style)


def test_constants_of_a_class_stay_in_the_norm() -> None:
    model, x = Reader(Styled(4)), torch.randn(3, 4)
    expected = model(x)
    before = set(vars(model.norm))
    assert len(fusednorm.convert_(model).converted) == 1
    assert model.norm.eps == 1e-3
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert (each.norm.style, each.norm.scale) == ("fine", 1.0)
        torch.testing.assert_close(each(x), expected)
    fusednorm.revert_(model)
    assert type(model.norm) is Styled
    assert set(vars(model.norm)) == before


def buffered() -> nn.Module:
    norm = nn.LayerNorm(4)
    norm.register_buffer("channel_dim", torch.zeros(1))
    return norm


@pytest.mark.parametrize(
    ("norm", "what"),
    [
        (Acting(4), "a constant 'activation'"),
        (ActingByItself(4), "an attribute 'activation'"),
        (buffered(), "an attribute 'channel_dim'"),
    ],
)
def test_a_name_that_fusednorm_reads_too(norm: nn.Module, what: str) -> None:
    model, kind = nn.Sequential(norm), type(norm)
    reason = left(fusednorm.convert_(model))["0"]
    assert reason.endswith(f"has {what}, which fusednorm's module has too")
    assert type(model[0]) is kind


def test_a_norm_over_channels() -> None:
    model = nn.Sequential(LayerNorm2d(8), nn.GELU())
    assert fused(converted(model, torch.randn(IMAGE))) == {"0": "gelu, the next module"}
    assert type(model[0]) is fusednorm.nn.LayerNorm2d
    assert fusednorm.convert_(model) == fusednorm.Report()


def hooked(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda *arguments: None)
    return module


def with_a_child(norm: nn.Module) -> nn.Module:
    norm.add_module("extra", nn.Identity())
    return norm


def replaced() -> nn.Module:
    norm = nn.LayerNorm(4)
    norm.forward = lambda input: input  # type: ignore[method-assign]
    return norm


ALONE: dict[str, tuple[nn.Module, str]] = {
    "overriding": (Overriding(4), "overrides forward"),
    "extended": (Extended(4), "adds to LayerNorm more than a constructor"),
    "another forward": (ChangedLayerNorm(4), "is not the one that fusednorm knows"),
    "synchronized": (nn.SyncBatchNorm(4), "fusednorm.convert_sync_batchnorm_ converts it"),
    "lazy": (nn.LazyBatchNorm2d(), "it is lazy; call the model once first"),
    "parametrized": (parametrizations.weight_norm(nn.LayerNorm((3, 4))), "it is parametrized"),
    "replaced": (replaced(), "its forward was replaced in the module itself"),
}


@pytest.mark.parametrize("name", ALONE)
def test_what_is_left_alone(name: str) -> None:
    norm, reason = ALONE[name]
    kind = type(norm)
    model = nn.Sequential(nn.Identity(), norm, nn.ReLU())
    report = fusednorm.convert_(model)
    assert type(model[1]) is kind
    assert type(model[2]) is nn.ReLU
    assert not report.converted
    assert reason in left(report)["1"]


def test_a_norm_and_an_activation_in_one() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), BatchNormAct2d(8), BatchNormAct2d(8, nn.SiLU()))
    report = converted(model, torch.randn(2, 3, 5, 6))
    assert fused(report) == {"1": "relu, in the class itself", "2": "silu, in the class itself"}
    assert type(model[1]) is fusednorm.nn.BatchNorm2d
    plain = nn.Sequential(BatchNormAct2d(8, nn.Identity()), nn.ReLU())
    assert not converted(plain, torch.randn(IMAGE)).fused


@pytest.mark.parametrize(
    ("norm", "options", "reason"),
    [
        (BatchNormAct2d(8), {"activations": False}, "a norm and an activation in one, and activations=False"),
        (BatchNormAct2d(8, nn.Mish()), {}, "runs Mish, which has no fused form"),
        (BatchNormAct2d(8, None, nn.Dropout(0.1)), {}, "runs a Dropout between the norm and the activation"),
        (BatchNormAct2d(8, None, hooked(nn.Identity())), {}, "runs a Identity between the norm and the activation"),
        (with_a_child(BatchNormAct2d(8)), {}, "has other children than drop and act"),
    ],
)
def test_a_norm_and_an_activation_that_stay_one(norm: nn.Module, options: dict[str, Any], reason: str) -> None:
    report = fusednorm.convert_(nn.Sequential(norm), **options)
    assert reason in left(report)["0"]
    assert type(norm) is BatchNormAct2d


def test_without_activations_and_again_with() -> None:
    model = nn.Sequential(nn.GroupNorm(4, 8), nn.SiLU())
    report = converted(model, torch.randn(IMAGE), activations=False)
    assert not report.fused
    assert type(model[1]) is nn.SiLU
    assert fusednorm.convert_(model) == fusednorm.Report()


def test_what_is_ours_already_stays() -> None:
    model = nn.Sequential(fusednorm.nn.GroupNorm(4, 8, activation="relu"), nn.SiLU())
    before = str(model)
    assert fusednorm.convert_(model) == fusednorm.Report()
    fusednorm.revert_(model)
    assert str(model) == before


def test_the_filter_decides_for_each_norm() -> None:
    seen = []

    def is_first(path: str, module: nn.Module) -> bool:
        seen.append(path)
        assert isinstance(module, nn.GroupNorm)
        return path == "0"

    model = nn.Sequential(nn.GroupNorm(4, 8), nn.SiLU(), nn.GroupNorm(4, 8), nn.SiLU())
    report = converted(model, torch.randn(IMAGE), filter_fn=is_first)
    assert seen == ["0", "2"]
    assert [entry.path for entry in report.converted] == ["0"]
    assert left(report) == {"2": "filter_fn says no"}
    assert type(model[3]) is nn.SiLU


@pytest.mark.parametrize("wanted", ["0", "1"])
def test_the_filter_has_to_want_a_shared_norm_at_each_of_its_paths(wanted: str) -> None:
    norm = nn.GroupNorm(4, 8)
    model = nn.Sequential(norm, norm)
    report = converted(model, torch.randn(IMAGE), filter_fn=lambda path, _: path == wanted)
    assert left(report) == {"0": "filter_fn says no"}
    assert type(norm) is nn.GroupNorm


def refused() -> dict[str, nn.Module]:
    compiled = nn.Sequential(nn.GroupNorm(4, 8))
    compiled[0].compile(backend="eager")
    return {
        "torch.compile": torch.compile(nn.GroupNorm(4, 8), backend="eager"),
        "Module.compile": nn.Sequential(nn.GroupNorm(4, 8), compiled),
        "DistributedDataParallel": wrapper("DistributedDataParallel", "torch.nn.parallel.distributed"),
        "fully_shard": wrapper("FSDPModule", "torch.distributed.fsdp"),
        "torch.jit.script": torch.jit.trace(nn.ReLU(), torch.randn(IMAGE)),
    }


def wrapper(name: str, module: str) -> nn.Module:
    """A module of a class with that base: the real ones need a process group."""
    return nn.Sequential(
        nn.GroupNorm(4, 8), type("Wrapped", (type(name, (nn.Sequential,), {"__module__": module}),), {})()
    )


@pytest.mark.parametrize("function", [fusednorm.convert_, fusednorm.revert_], ids=["convert_", "revert_"])
def test_wrapped_and_compiled_models_are_refused(function: Any) -> None:
    for what, model in refused().items():
        kinds = [type(module) for module in model.modules()]
        with pytest.raises(ValueError, match=f"{function.__name__}: the model cannot change any more.*{what}"):
            function(model)
        assert [type(module) for module in model.modules()] == kinds
    with pytest.raises(TypeError, match="model is a list; expected a torch"):
        function([])


def test_a_programs_own_class_may_have_the_name_of_a_wrapper() -> None:
    model = wrapper("FSDPModule", "models.torch")
    assert len(fusednorm.convert_(model).converted) == 1


def test_a_filter_that_is_no_function() -> None:
    with pytest.raises(TypeError, match="filter_fn is a str; expected None or a function of a path and a norm"):
        fusednorm.convert_(nn.GroupNorm(4, 8), filter_fn="norm1")  # type: ignore[arg-type]


def test_distributed_and_sharded_wrappers_have_the_names_that_are_looked_for() -> None:
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    names = {kind.__name__ for kind in (FSDPModule, FullyShardedDataParallel, DistributedDataParallel)}
    assert names <= set(WRAPPERS)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8), nn.GELU(approximate="tanh"))
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = Functional()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_copies_and_pickles_of_a_converted_model() -> None:
    model, x = Net().eval(), torch.randn(2, 3, 6, 7)
    report = fusednorm.convert_(model)
    assert (len(report.fused), len(report.summed)) == (10, 3)
    expected = model(x)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = [pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)]
    for each in (copy.copy(model), copy.deepcopy(model), *loaded):
        torch.testing.assert_close(each(x), expected)
        assert isinstance(each.blocks[0], Block)
        assert fusednorm.convert_(each) == fusednorm.Report()
    fusednorm.revert_(loaded[0])
    assert [type(module) for module in loaded[0].modules()] == [type(module) for module in Net().modules()]
    torch.testing.assert_close(loaded[0](x), expected, rtol=1e-4, atol=1e-4)


def test_a_converted_model_compiles_and_traces() -> None:
    model, x = Net().eval(), torch.randn(2, 3, 6, 7)
    fusednorm.convert_(model)
    expected = model(x)
    try:
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), expected, rtol=1e-4, atol=1e-4)
    finally:
        torch.compiler.reset()
    torch.testing.assert_close(fx.symbolic_trace(model)(x), expected)


def test_a_state_dict_goes_both_ways() -> None:
    model, other = Net(), Net()
    fusednorm.convert_(model)
    other.load_state_dict(model.state_dict())
    model.load_state_dict(other.state_dict())


def test_a_report_is_a_table() -> None:
    model = nn.Sequential(nn.GroupNorm(4, 8), nn.LeakyReLU(0.2), Overriding(4))
    lines = str(fusednorm.convert_(model)).splitlines()
    assert lines[0] == "1 norms converted, 1 activations fused, 1 left"
    assert [line.split()[:2] for line in lines[3:]] == [["converted", "0"], ["fused", "0"], ["left", "2"]]
    assert "leaky_relu(0.2), the next module" in lines[4]
    assert str(fusednorm.Report()) == "0 norms converted, 0 activations fused, 0 left"


def test_the_examples_in_the_docstrings() -> None:
    results = doctest.testmod(convert)
    assert results.attempted > 0
    assert results.failed == 0
