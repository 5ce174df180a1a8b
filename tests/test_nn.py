"""The modules beside torch's: constructors, state, training over several steps, and what a module lives through."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fusednorm
from fusednorm import nn

BATCH = {"BatchNorm1d": (4, 8, 5), "BatchNorm2d": (4, 8, 3, 4), "BatchNorm3d": (4, 8, 2, 3, 4)}
INSTANCE = {name.replace("Batch", "Instance"): shape for name, shape in BATCH.items()}
MODULES: dict[str, tuple[tuple[Any, ...], tuple[int, ...]]] = {
    "GroupNorm": ((4, 8), (2, 8, 3, 4)),
    "LayerNorm": (((3, 4),), (2, 8, 3, 4)),
    "RMSNorm": ((4,), (2, 8, 3, 4)),
    **{name: ((8,), shape) for name, shape in {**BATCH, **INSTANCE}.items()},
}


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def pair(name: str, *arguments: Any, **keywords: Any) -> tuple[Any, Any]:
    """Ours and torch's, in the same random state."""
    ours, theirs = (getattr(module, name)(*arguments, **keywords) for module in (nn, torch.nn))
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


@pytest.mark.parametrize("name", MODULES)
def test_constructor_is_torchs(name: str) -> None:
    ours = inspect.signature(getattr(nn, name).__init__).parameters
    theirs = inspect.signature(getattr(torch.nn, name).__init__).parameters
    shared = [each for each in theirs.values() if each.kind is not each.KEYWORD_ONLY]
    positional = [each for each in ours.values() if each.kind is each.POSITIONAL_OR_KEYWORD]
    assert [(each.name, each.default) for each in positional] == [(each.name, each.default) for each in shared]
    for each in theirs.values():
        if each.kind is each.KEYWORD_ONLY:  # passes through the options
            module = getattr(nn, name)(*MODULES[name][0], **{each.name: each.default})
            assert isinstance(module, getattr(torch.nn, name))


@pytest.mark.parametrize("name", MODULES)
def test_values_state_and_gradients_are_torchs(name: str) -> None:
    arguments, shape = MODULES[name]
    ours, theirs = pair(name, *arguments)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(shape)
    for training in (True, False):
        ours.train(training)
        theirs.train(training)
        mine, expected = x.clone().requires_grad_(), x.clone().requires_grad_()
        torch.testing.assert_close(ours(mine), theirs(expected))
        ours(mine).square().sum().backward()
        theirs(expected).square().sum().backward()
        torch.testing.assert_close(mine.grad, expected.grad, rtol=1e-4, atol=1e-4)
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MODULES)
def test_activation_repr_copies_and_pickles(name: str) -> None:
    arguments, shape = MODULES[name]
    module = getattr(nn, name)(*arguments, activation="silu")
    plain = getattr(nn, name)(*arguments)
    assert repr(plain) == repr(getattr(torch.nn, name)(*arguments))
    assert repr(module) == repr(plain)[:-1] + ", activation=silu)"
    x = torch.randn(shape)
    module.eval()
    plain.eval()
    expected = module(x)
    torch.testing.assert_close(expected, F.silu(plain(x)))
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    copies = [copy.copy(module), copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
    copies.append(torch.load(buffer, weights_only=False))
    for each in copies:
        assert torch.equal(each(x), expected)
        assert repr(each) == repr(module)


def test_repr_shows_a_parameter_and_the_channel_dim() -> None:
    module = nn.GroupNorm(4, 8, activation=fusednorm.Activation("leaky_relu", 0.2), channel_dim=-1)
    assert "activation=Activation(name='leaky_relu', parameter=0.2), channel_dim=-1" in repr(module)


@pytest.mark.parametrize("name", MODULES)
def test_built_on_meta(name: str) -> None:
    arguments, shape = MODULES[name]
    module = getattr(nn, name)(*arguments, device="meta", activation="relu")
    assert {tensor.device.type for tensor in module.state_dict().values()} <= {"meta"}
    assert module(torch.empty(shape, device="meta")).shape == shape
    with torch.device("meta"):
        module = getattr(nn, name)(*arguments)
    real = module.to_empty(device="cpu")
    real.reset_parameters()
    assert real(torch.randn(shape)).isfinite().all()


@pytest.mark.parametrize("name", [*BATCH, *INSTANCE, "GroupNorm"])
def test_channel_dim(name: str) -> None:
    arguments, shape = MODULES[name]
    keywords = {} if name == "GroupNorm" else {"affine": True, "track_running_stats": True}
    ours, theirs = pair(name, *arguments, **keywords)
    last = getattr(nn, name)(*arguments, channel_dim=-1, **keywords)
    last.load_state_dict(theirs.state_dict())
    x = torch.randn(shape)
    torch.testing.assert_close(last(x.movedim(1, -1)).movedim(-1, 1), theirs(x))
    ours(x)
    for key, value in last.state_dict().items():
        torch.testing.assert_close(value, theirs.state_dict()[key])
        torch.testing.assert_close(ours.state_dict()[key], theirs.state_dict()[key])


@pytest.mark.parametrize("keywords", [{}, {"momentum": None}, {"momentum": 0.3, "affine": False}])
@pytest.mark.parametrize("name", BATCH)
def test_batch_norm_trains_as_torchs(name: str, keywords: dict[str, Any]) -> None:
    ours, theirs = pair(name, 8, **keywords)
    for step in range(4):
        x = torch.randn(BATCH[name]) * (step + 1) + step
        torch.testing.assert_close(ours(x), theirs(x))
        for (key, one), other in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
            torch.testing.assert_close(one, other, msg=lambda text, key=key: f"{key}: {text}")
    x = torch.randn(BATCH[name])
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))
    assert int(ours.num_batches_tracked) == 4


def test_batch_norm_without_running_statistics() -> None:
    ours, theirs = pair("BatchNorm2d", 8, track_running_stats=False)
    assert set(ours.state_dict()) == {"weight", "bias"}
    x = torch.randn(4, 8, 3, 3)
    for training in (True, False):
        torch.testing.assert_close(ours.train(training)(x), theirs.train(training)(x))


def test_batch_norm_that_stops_tracking_keeps_its_buffers() -> None:
    ours, theirs = pair("BatchNorm2d", 8)
    ours.track_running_stats = theirs.track_running_stats = False
    x = torch.randn(4, 8, 3, 3)
    for training in (True, False):
        torch.testing.assert_close(ours.train(training)(x), theirs.train(training)(x))
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)
    assert int(ours.num_batches_tracked) == int(theirs.num_batches_tracked) == 0


def test_batch_norm_of_half_precision_buffers_with_a_cumulative_average() -> None:
    module = nn.BatchNorm2d(8, momentum=None, dtype=torch.bfloat16)
    for _ in range(3):
        module(torch.randn(4, 8, 3, 3).bfloat16() + 2)
    torch.testing.assert_close(module.running_mean, torch.full((8,), 2.0).bfloat16(), rtol=0.2, atol=0.5)


@pytest.mark.parametrize("name", INSTANCE)
def test_instance_norm_tracks_as_torchs(name: str) -> None:
    ours, theirs = pair(name, 8, affine=True, track_running_stats=True)
    for step in range(3):
        x = torch.randn(INSTANCE[name]) + step
        torch.testing.assert_close(ours(x), theirs(x))
    x = torch.randn(INSTANCE[name])
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())


@pytest.mark.parametrize("changed", [{"momentum": None}, {"track_running_stats": False}], ids=str)
def test_instance_norm_that_stops_tracking_keeps_its_buffers(changed: dict[str, Any]) -> None:
    """A momentum of None is no cumulative average, but a share of 0, as in torch."""
    ours, theirs = pair("InstanceNorm2d", 8, track_running_stats=True)
    theirs.running_mean.normal_()
    ours.load_state_dict(theirs.state_dict())
    for module in (ours, theirs):
        vars(module).update(changed)
    x = torch.randn(4, 8, 3, 3)
    for training in (False, True):
        torch.testing.assert_close(ours.train(training)(x), theirs.train(training)(x))
        torch.testing.assert_close(ours.state_dict(), theirs.state_dict())


@pytest.mark.parametrize("channel_dim", [1, -1])
@pytest.mark.parametrize("name", INSTANCE)
def test_instance_norm_of_one_sample_without_its_dimension(name: str, channel_dim: int) -> None:
    module = getattr(nn, name)(8, affine=True, channel_dim=channel_dim)
    x = torch.randn(INSTANCE[name][1:])
    given = x if channel_dim == 1 else x.movedim(0, -1)
    output = module(given)
    assert output.shape == given.shape
    torch.testing.assert_close(output if channel_dim == 1 else output.movedim(-1, 0), getattr(torch.nn, name)(8)(x))


MODULATED = {
    "GroupNorm": nn.GroupNorm(4, 8, activation="silu"),
    "BatchNorm2d": nn.BatchNorm2d(8, activation="silu"),
    "BatchNorm2d, evaluation": nn.BatchNorm2d(8, activation="silu").eval(),
    "InstanceNorm2d": nn.InstanceNorm2d(8, affine=True, activation="silu"),
}


class Modulated(torch.nn.Module):
    def __init__(self, norm: torch.nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> Any:
        return self.norm(x, scale=scale, shift=shift, pre_add=x)


@pytest.mark.parametrize("name", MODULATED)
def test_modules_modulate(name: str) -> None:
    norm = copy.deepcopy(MODULATED[name]).requires_grad_(True)
    plain = copy.deepcopy(norm)
    plain.activation = None
    x, scale, shift = torch.randn(3, 8, 4, 5), torch.randn(3, 8), torch.randn(3, 8)
    expected = F.silu(plain(x + x) * (1 + scale)[..., None, None] + shift[..., None, None])
    torch.testing.assert_close(Modulated(norm)(x, scale, shift), expected)
    traced = torch.fx.symbolic_trace(Modulated(norm))
    assert [node.op for node in traced.graph.nodes].count("call_module") == 1
    torch.testing.assert_close(traced(x, scale, shift), expected)
    if name == "BatchNorm2d":
        assert int(norm.num_batches_tracked) == 2
    if name == "InstanceNorm2d":
        torch.testing.assert_close(norm(x[0], scale=scale[0], shift=shift[0], pre_add=x[0]), expected[0])


@pytest.mark.parametrize("name", ["GroupNorm", "BatchNorm2d"])
def test_a_module_that_modulates_is_traced_alone(name: str) -> None:
    norm, x = MODULATED[name], torch.randn(3, 8, 4, 5)
    torch.testing.assert_close(torch.fx.symbolic_trace(copy.deepcopy(norm))(x), copy.deepcopy(norm)(x))


def test_instance_norm_of_other_channels() -> None:
    x = torch.randn(2, 4, 6)
    with pytest.warns(UserWarning, match="expected num_features=8"):
        output = nn.InstanceNorm1d(8)(x)
    torch.testing.assert_close(output, F.instance_norm(x))
    for keywords in ({"affine": True}, {"track_running_stats": True}):
        with pytest.raises(ValueError, match="4 channels in dimension 1; expected num_features=8"):
            nn.InstanceNorm1d(8, **keywords)(x)


@pytest.mark.parametrize("name", [*BATCH, *INSTANCE])
def test_wrong_rank(name: str) -> None:
    with pytest.raises(ValueError, match=r"expected .*D input"):
        getattr(nn, name)(8)(torch.randn(2, 8, 2, 2, 2, 2))


def test_a_torch_module_may_take_our_class() -> None:
    module = torch.nn.GroupNorm(4, 8)
    x = torch.randn(2, 8, 4)
    expected = module(x)
    module.__class__ = nn.GroupNorm
    torch.testing.assert_close(module(x), expected)


def test_autocast_in_a_network_of_bf16_activations() -> None:
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8, activation="silu"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert network(torch.randn(2, 3, 6, 6)).dtype == torch.bfloat16


# --- rows whose numbers lie apart ---


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_outputs_of_tokens_of_an_image_are_contiguous_as_torchs(name: str) -> None:
    """What adds them to the result of a linear layer would else read across memory, and the layers behind copy them."""
    image, residual = torch.randn(2, 24, 5, 7), torch.randn(2, 24, 5, 7)
    ours, theirs = getattr(nn, name)(24), getattr(torch.nn, name)(24)
    for seen in (lambda x: x.flatten(2).transpose(1, 2), lambda x: x.permute(0, 2, 3, 1)):
        x, h = seen(image), seen(residual)
        results = []
        for module in (ours, theirs):
            leaf = x.detach().requires_grad_()
            y = module(leaf)
            assert y.is_contiguous()
            results.append((y, *torch.autograd.grad(y.square().sum(), (leaf, *module.parameters()))))
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        y, s = ours(x, pre_add=h, return_sum=True)
        assert y.is_contiguous()
        assert s.is_contiguous()
        assert torch.equal(s, x + h)
        assert ours(x, scale=torch.ones(2, 24)).is_contiguous()
        assert ours(x, post_add=h).is_contiguous()
        compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
        assert compiled(x).is_contiguous()
        torch.testing.assert_close(compiled(x), ours(x))


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_nested_rows_that_lie_apart_are_refused_in_our_words(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # nested tensors of torch.strided are a prototype
        nested = torch.nested.nested_tensor([torch.randn(8, 4), torch.randn(8, 3)]).transpose(1, 2)
    assert not nested.is_contiguous()
    with pytest.raises(TypeError, match="is a nested tensor; expected a dense one"):
        getattr(nn, name)(8)(nested)


def test_rows_side_by_side_keep_their_order() -> None:
    """Rows that lie along memory are not copied, whatever order they have."""
    x = torch.randn(4, 3, 16).transpose(0, 1)
    assert nn.LayerNorm(16)(x).stride() == x.stride()
    image = torch.randn(2, 8, 4, 4)
    assert nn.LayerNorm2d(8)(image).stride() == image.stride()
    channels_last = image.to(memory_format=torch.channels_last)
    for norm in (nn.LayerNorm2d(8), nn.RMSNorm(8, channel_dim=1)):
        assert norm(channels_last).stride() == channels_last.stride()
