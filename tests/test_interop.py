"""The modules in torch's own tools: each keeps the activation or is refused with a remedy."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.ao.quantization import fuse_modules, fuse_modules_qat, get_default_qat_qconfig, prepare_qat
from torch.fx.experimental.optimization import fuse
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.shape_prop import ShapeProp
from torch.nn.utils import parametrize
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval
from torch.overrides import TorchFunctionMode
from torch.utils.mkldnn import to_mkldnn

import fusednorm
from fusednorm import interop, nn

IMAGE = (2, 8, 3, 4)
MODULES: dict[str, tuple[Callable[..., torch.nn.Module], tuple[int, ...]]] = {
    "GroupNorm": (lambda **options: nn.GroupNorm(4, 8, **options), IMAGE),
    "LayerNorm": (lambda **options: nn.LayerNorm((3, 4), **options), IMAGE),
    "RMSNorm": (lambda **options: nn.RMSNorm(4, **options), IMAGE),
    "BatchNorm1d": (lambda **options: nn.BatchNorm1d(8, **options), (4, 8, 5)),
    "BatchNorm2d": (lambda **options: nn.BatchNorm2d(8, **options), IMAGE),
    "BatchNorm2d cumulative": (lambda **options: nn.BatchNorm2d(8, momentum=None, **options), IMAGE),
    "BatchNorm3d": (lambda **options: nn.BatchNorm3d(8, **options), (2, 8, 2, 3, 4)),
    "InstanceNorm1d": (lambda **options: nn.InstanceNorm1d(8, **options), (4, 8, 5)),
    "InstanceNorm2d": (lambda **options: nn.InstanceNorm2d(8, track_running_stats=True, **options), IMAGE),
    "InstanceNorm3d": (lambda **options: nn.InstanceNorm3d(8, affine=True, **options), (2, 8, 2, 3, 4)),
}
CONVOLUTIONS = {1: torch.nn.Conv1d, 2: torch.nn.Conv2d, 3: torch.nn.Conv3d}


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def lived_in(norm: Any) -> Any:
    """A batch norm with statistics and parameters as after training, in evaluation mode."""
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    return norm.eval()


# --- tracing ---


class Net(torch.nn.Module):
    def __init__(self, norm: torch.nn.Module) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(norm)

    def forward(self, x):  # type: ignore[no-untyped-def]  # torch.fx pickles no annotation that is a string
        return self.body(x * 2).sin()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("name", MODULES)
def test_a_traced_model_holds_one_call_of_the_module(name: str, activation: str | None, training: bool) -> None:
    make, shape = MODULES[name]
    net = Net(make(activation=activation)).train(training)
    before, x = copy.deepcopy(net), torch.randn(shape)
    traced = fx.symbolic_trace(net)
    assert [str(node.target) for node in traced.graph.nodes if node.op == "call_module"] == ["body.0"]
    assert all(map(torch.equal, net.state_dict().values(), before.state_dict().values())), "tracing runs nothing"
    torch.testing.assert_close(traced(x), before(x))
    torch.testing.assert_close(net.state_dict(), before.state_dict())
    traced.recompile()
    copies = [pickle.loads(pickle.dumps(traced)), fx.symbolic_trace(traced), fx.Transformer(traced).transform()]
    expected = net.eval()(x)
    for each in copies:
        torch.testing.assert_close(each.eval()(x), expected)
    ShapeProp(traced.eval()).propagate(x)
    assert [node.meta["tensor_meta"].shape for node in traced.graph.nodes][-1] == x.shape


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", MODULES)
def test_a_traced_module(name: str, training: bool) -> None:
    make, shape = MODULES[name]
    module = make(activation="silu").train(training)
    before = copy.deepcopy(module)
    traced = fx.symbolic_trace(module)
    assert all(map(torch.equal, module.state_dict().values(), before.state_dict().values())), "tracing runs nothing"
    for each in (copy.deepcopy(traced), pickle.loads(pickle.dumps(traced))):
        reference = copy.deepcopy(before)
        for _ in range(3):
            x = torch.randn(shape)
            torch.testing.assert_close(each(x), reference(x))
        state = reference.state_dict()
        for key, value in each.state_dict().items():
            torch.testing.assert_close(value, state[key])


@pytest.mark.parametrize("activation", ["silu", "relu"])  # one with a parameter and one without
@pytest.mark.parametrize("name", MODULES)
def test_hooks_of_a_traced_module_run_once(name: str, activation: str) -> None:
    make, shape = MODULES[name]
    module = make(activation=activation).eval()
    module.register_forward_hook(lambda module, inputs, output: output * 2)
    module.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
    net, x = Net(module).eval(), torch.randn(shape)
    for each in (fx.symbolic_trace(net), pickle.loads(pickle.dumps(fx.symbolic_trace(net)))):
        torch.testing.assert_close(each(x), net(x))


def test_traced_functions() -> None:
    leaky = fusednorm.Activation("leaky_relu", 0.2)

    def call(x, weight):  # type: ignore[no-untyped-def]
        one = fusednorm.group_norm(x, 4, weight, activation=leaky) + fusednorm.layer_norm(x, (4,), activation="silu")
        two = fusednorm.rms_norm(x, (4,)) + fusednorm.instance_norm(x, weight=weight)
        return one + two + fusednorm.batch_norm(x, None, None, weight, training=True, eps=1e-3)

    traced = fx.symbolic_trace(call)
    recorded = [node.target for node in traced.graph.nodes if getattr(node.target, "__module__", "") == gn.__module__]
    names = ["group_norm", "layer_norm", "rms_norm", "instance_norm", "batch_norm"]
    assert recorded == [getattr(fusednorm, name) for name in names]
    x, weight = torch.randn(IMAGE), torch.randn(8)
    for each in (traced, pickle.loads(pickle.dumps(traced))):
        torch.testing.assert_close(each(x, weight), call(x, weight))
    of_weight = fx.symbolic_trace(lambda weight: fusednorm.group_norm(torch.ones(2, 8, 4), 4, weight))
    torch.testing.assert_close(of_weight(weight), fusednorm.group_norm(torch.ones(2, 8, 4), 4, weight))


gn = fusednorm.group_norm


# --- functions seen by torch's protocol ---


class Seen(torch.Tensor):
    functions: list[Any] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.functions.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


FUNCTIONS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "group_norm": lambda lib, x, w: lib.group_norm(x, 4, w),
    "instance_norm": lambda lib, x, w: lib.instance_norm(x, weight=w),
    "layer_norm": lambda lib, x, w: lib.layer_norm(x, (8,), w),
    "rms_norm": lambda lib, x, w: lib.rms_norm(x, (8,), w),
    "batch_norm": lambda lib, x, w: lib.batch_norm(x, None, None, w, training=True),
}


@pytest.mark.parametrize("which", ["input", "weight"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_subclass_sees_the_function(name: str, which: str) -> None:
    x, weight = torch.randn(2, 8, 8), torch.randn(8)
    expected = FUNCTIONS[name](F, x, weight)
    operands = (x.as_subclass(Seen), weight) if which == "input" else (x, weight.as_subclass(Seen))
    Seen.functions.clear()
    output = FUNCTIONS[name](fusednorm, *operands)
    assert Seen.functions == [getattr(fusednorm, name)]
    assert type(output) is Seen
    torch.testing.assert_close(output.as_subclass(Tensor), expected)


def of_input(name: str, weight: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: FUNCTIONS[name](fusednorm, x, weight)


def test_a_function_mode_sees_the_op() -> None:
    seen: list[str] = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    x, weight = torch.randn(2, 8, 8), torch.randn(8)
    for name, call in FUNCTIONS.items():
        with Mode():
            output = call(fusednorm, x, weight)
        assert seen[-1] == "fusednorm.norm_forward.default"
        torch.testing.assert_close(output, FUNCTIONS[name](F, x, weight))
        with Mode():
            traced = fx.symbolic_trace(of_input(name, weight))
        torch.testing.assert_close(traced(x), output)


@pytest.mark.parametrize("pre_dispatch", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_make_fx_records_the_op(name: str, pre_dispatch: bool) -> None:
    x, weight = torch.randn(2, 8, 8), torch.randn(8)
    traced = make_fx(lambda x: FUNCTIONS[name](fusednorm, x, weight), pre_dispatch=pre_dispatch)(x)
    assert "fusednorm.norm_forward.default" in [str(node.target) for node in traced.graph.nodes]
    y = torch.randn(2, 8, 8)
    torch.testing.assert_close(traced(y), FUNCTIONS[name](fusednorm, y, weight))


# --- folding ---


def without(norm: Any) -> Any:
    """As the error says: the activation as a module of its own."""
    plain = copy.deepcopy(norm)
    plain.activation = None
    return plain


@pytest.mark.parametrize("rank", CONVOLUTIONS)
def test_folding_into_a_convolution(rank: int) -> None:
    convolution, x = CONVOLUTIONS[rank](3, 8, 2).eval(), torch.randn(2, 3, *[5] * rank)
    kind = getattr(nn, f"BatchNorm{rank}d")
    norm = lived_in(kind(8))
    torch.testing.assert_close(fuse_conv_bn_eval(convolution, norm)(x), norm(convolution(x)), rtol=1e-4, atol=1e-4)
    active = lived_in(kind(8, activation="relu"))
    for each in (active, copy.deepcopy(active), pickle.loads(pickle.dumps(active))):
        for function in (fuse_conv_bn_eval, torch.nn.utils.fuse_conv_bn_eval):
            with pytest.raises(RuntimeError, match="would drop its activation 'relu'; set the module's activation to"):
                function(convolution, each)
    folded = torch.nn.Sequential(fuse_conv_bn_eval(convolution, without(active)), torch.nn.ReLU())
    torch.testing.assert_close(folded(x), active(convolution(x)), rtol=1e-4, atol=1e-4)
    with pytest.raises(RuntimeError, match="dimension 1 for the channels; this module has channel_dim=-1"):
        fuse_conv_bn_eval(convolution, kind(8, channel_dim=-1).eval())


@pytest.mark.parametrize("channel_dim", [1, -1])
def test_folding_into_a_linear_layer(channel_dim: int) -> None:
    linear, x = torch.nn.Linear(5, 8).eval(), torch.randn(4, 5)
    norm = lived_in(nn.BatchNorm1d(8, channel_dim=channel_dim))
    torch.testing.assert_close(fuse_linear_bn_eval(linear, norm)(x), norm(linear(x)), rtol=1e-4, atol=1e-4)
    with pytest.raises(RuntimeError, match="would drop its activation 'silu'"):
        fuse_linear_bn_eval(linear, lived_in(nn.BatchNorm1d(8, channel_dim=channel_dim, activation="silu")))


def test_folding_of_a_torch_module_that_took_our_class() -> None:
    convolution, norm = torch.nn.Conv2d(3, 8, 3).eval(), lived_in(torch.nn.BatchNorm2d(8))
    x = torch.randn(2, 3, 5, 5)
    expected = norm(convolution(x))
    norm.__class__ = nn.BatchNorm2d
    torch.testing.assert_close(norm(convolution(x)), expected)
    torch.testing.assert_close(fuse_conv_bn_eval(convolution, norm)(x), expected, rtol=1e-4, atol=1e-4)
    assert fx.symbolic_trace(Net(norm))(expected).shape == expected.shape
    norm.activation = fusednorm.Activation("relu")
    with pytest.raises(RuntimeError, match="would drop its activation"):
        fuse_conv_bn_eval(convolution, norm)


@pytest.mark.parametrize("name", MODULES)
def test_eps_is_an_attribute_as_in_torch(name: str) -> None:
    module: Any = MODULES[name][0](activation="relu", eps=0.25)
    assert module.eps == 0.25
    assert vars(module)["eps"] == 0.25
    x = torch.randn(MODULES[name][1])
    before = module(x)
    module.eps = 4.0
    assert module.eps == 4.0
    assert not torch.equal(module(x), before)
    empty = type(module).__new__(type(module))
    torch.nn.Module.__init__(empty)
    assert not hasattr(empty, "eps")

    class Reader(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = module

        def forward(self, x: Tensor) -> Tensor:
            return x * self.norm.eps

    compiled = torch.compile(Reader(), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), x * 4)
    torch.compiler.reset()


def test_conversion_to_torchs_synchronized_module() -> None:
    convert = torch.nn.SyncBatchNorm.convert_sync_batchnorm
    norm = lived_in(nn.BatchNorm2d(8, eps=0.3))
    converted = convert(torch.nn.Sequential(norm))[0]
    assert type(converted) is torch.nn.SyncBatchNorm
    assert converted.eps == 0.3
    assert converted.weight is norm.weight
    for options, words in (
        ({"activation": "silu"}, "drop its activation 'silu'"),
        ({"channel_dim": -1}, "drop channel_dim=-1"),
    ):
        with pytest.raises(RuntimeError, match=f"{words}; call fusednorm.convert_sync_batchnorm_"):
            convert(torch.nn.Sequential(nn.BatchNorm2d(8, **options)))


def test_mkldnn_modules() -> None:
    with pytest.raises(RuntimeError, match="drop its activation 'relu'"):
        to_mkldnn(torch.nn.Sequential(lived_in(nn.BatchNorm2d(8, activation="relu"))))


@pytest.mark.parametrize("activation", [None, "relu", "silu"])
def test_fusion_of_a_traced_model(activation: str | None) -> None:
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), lived_in(nn.BatchNorm2d(8, activation=activation))).eval()
    x = torch.randn(2, 3, 5, 5)
    torch.testing.assert_close(fuse(net)(x), net(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("which", ["norm1", "norm2"])
@pytest.mark.parametrize("norm_first", [True, False])
def test_the_transformer_layer_that_reads_its_norms_weights(norm_first: bool, which: str) -> None:
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True, norm_first=norm_first).eval()
    x = torch.randn(2, 5, 16)
    for activation in ("tanh", None):
        setattr(layer, which, nn.LayerNorm(16, activation=activation))
        layer.eval()
        with torch.no_grad():
            output = layer(x)
        torch.testing.assert_close(output, layer(x.clone().requires_grad_()).detach(), rtol=1e-4, atol=1e-5)


# --- quantization ---


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("followed", [False, True])
@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("rank", CONVOLUTIONS)
def test_fuse_modules(rank: int, activation: str | None, followed: bool, training: bool) -> None:
    norm = lived_in(getattr(nn, f"BatchNorm{rank}d")(8, activation=activation))
    modules = [CONVOLUTIONS[rank](3, 8, 2), norm, *([torch.nn.ReLU()] if followed else [])]
    net, x = torch.nn.Sequential(*modules).train(training), torch.randn(2, 3, *[5] * rank)
    calls: list[str] = []
    norm.register_forward_hook(lambda *_: calls.append("hook"))
    reference = copy.deepcopy(net)
    fused = (fuse_modules_qat if training else fuse_modules)(net, [str(index) for index in range(len(modules))])
    torch.testing.assert_close(fused(x), reference(x), rtol=1e-3, atol=1e-4)
    expected = ("ConvBn" if training else "Conv") + ("ReLU" if activation or followed else "") + f"{rank}d"
    assert type(fused[0]).__name__ == expected
    assert all(type(each) is torch.nn.Identity for each in fused[1:])


def test_a_module_that_fusing_made_torchs_has_what_torchs_has() -> None:
    plain = interop.as_torch(nn.BatchNorm2d(4, eps=1e-3, activation="relu"), torch.nn.BatchNorm2d)
    assert type(plain) is torch.nn.BatchNorm2d
    assert vars(plain).keys() == vars(torch.nn.BatchNorm2d(4)).keys()
    assert plain.eps == 1e-3


def test_fuse_modules_of_other_patterns() -> None:
    linear = torch.nn.Sequential(torch.nn.Linear(5, 8), lived_in(nn.BatchNorm1d(8))).eval()
    x = torch.randn(4, 5)
    torch.testing.assert_close(fuse_modules(linear, ["0", "1"])(x), linear(x), rtol=1e-4, atol=1e-4)
    transposed = torch.nn.Sequential(torch.nn.ConvTranspose2d(3, 8, 3), lived_in(nn.BatchNorm2d(8))).eval()
    x = torch.randn(2, 3, 5, 5)
    torch.testing.assert_close(fuse_modules(transposed, ["0", "1"])(x), transposed(x), rtol=1e-4, atol=1e-4)
    pair = torch.nn.Sequential(nn.BatchNorm2d(3), torch.nn.ReLU()).eval()
    torch.testing.assert_close(fuse_modules(pair, ["0", "1"])(x), pair(x))


@pytest.mark.parametrize("function", [fuse_modules, fuse_modules_qat])
@pytest.mark.parametrize(
    ("modules", "words"),
    [
        (lambda: (torch.nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, activation="silu")), "drop its activation 'silu'"),
        (
            lambda: (torch.nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, activation="silu"), torch.nn.ReLU()),
            "drop its activation 'silu'",
        ),
        (lambda: (nn.BatchNorm2d(8, activation="gelu"), torch.nn.ReLU()), "drop its activation 'gelu'"),
        (lambda: (torch.nn.Linear(3, 8), nn.BatchNorm1d(8, activation="relu")), "drop its activation 'relu'"),
        (lambda: (torch.nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, channel_dim=-1)), "channel_dim=-1"),
    ],
)
def test_fuse_modules_refuses_what_it_would_drop(function: Any, modules: Any, words: str) -> None:
    net = torch.nn.Sequential(*modules()).train(function is fuse_modules_qat)
    with pytest.raises(RuntimeError, match=words):
        function(net, [str(index) for index in range(len(net))])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # torch's own of its quantization
def test_quantization_aware_training() -> None:
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, activation="relu")).train()
    fused = fuse_modules_qat(net, ["0", "1"])
    fused.qconfig = get_default_qat_qconfig("x86")
    prepared = prepare_qat(fused)
    assert (prepared(torch.randn(2, 3, 5, 5)) >= 0).all()


# --- scripting, parametrizations ---


@pytest.mark.parametrize("name", MODULES)
def test_scripting_is_refused_with_a_remedy(name: str) -> None:
    module = MODULES[name][0]()
    for model in (module, torch.nn.Sequential(torch.nn.Sequential(module))):
        with pytest.raises(RuntimeError, match=rf"cannot compile fusednorm's {type(module).__name__}.*torch.jit.trace"):
            torch.jit.script(model)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # that checks of shapes are not part of the trace
def test_a_jit_trace() -> None:
    model = torch.nn.Sequential(nn.GroupNorm(4, 8, activation="silu"), lived_in(nn.BatchNorm2d(8, activation="relu")))
    traced = torch.jit.trace(model, (torch.randn(IMAGE),))
    buffer = io.BytesIO()
    torch.jit.save(traced, buffer)
    buffer.seek(0)
    x = torch.randn(3, 8, 5, 5)
    for each in (traced, torch.jit.load(buffer)):
        torch.testing.assert_close(each(x), model(x))


def test_a_parametrized_weight() -> None:
    class Square(torch.nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight.square() + 1

    ours, theirs = nn.GroupNorm(4, 8, activation="silu"), torch.nn.GroupNorm(4, 8)
    for module in (ours, theirs):
        parametrize.register_parametrization(module, "weight", Square())
    x = torch.randn(IMAGE)
    torch.testing.assert_close(ours(x), F.silu(theirs(x)))
    ours(x).sum().backward()
    assert ours.parametrizations.weight.original.grad is not None
