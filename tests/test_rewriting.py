"""torch's own norms in compiled models: what is rewritten and what is left, with torch's results and gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch._functorch import config as functorch
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

import fusednorm
from fusednorm.chains import POSITIONS
from fusednorm.equivalents import FUNCTIONS
from fusednorm.rewriting import NORMS, rewrite


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.manual_seed(0)
    torch.compiler.reset()
    with config.patch(fx_graph_cache=False), functorch.patch(enable_autograd_cache=False):
        yield
    torch.compiler.reset()


def compiled(model: Any, **options: Any) -> tuple[Any, Any]:
    """A compiled model, and the pass that rewrites it."""
    rewrite = fusednorm.compile_pass(**({"devices": ("cpu",)} | options))
    return torch.compile(model, fullgraph=True, options={"pre_grad_custom_pass": rewrite}), rewrite


def rewritten(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    """A backend of torch.compile that rewrites a graph and makes no code of it, which takes seconds."""
    rewrite(module.graph, ("cpu",))
    module.recompile()
    return aot_eager(module, inputs)


def summary(rewrite: Any) -> list[tuple[str, str | None, bool]]:
    """The function, the activation, and whether it was rewritten, of each norm that the pass has seen."""
    return [(one.function, one.activation, one.reason is None) for one in rewrite.report]


def same_training(model: nn.Module, x: Tensor) -> Any:
    """A training step of a model in float64, compiled with the pass, against torch's; the pass."""
    model, x = model.double(), x.double()
    other = copy.deepcopy(model)
    made, rewrite = compiled(model)
    results = []
    for call, owner in ((made, model), (other, other)):
        leaf = x.clone().requires_grad_()
        y = call(leaf)
        y.square().sum().backward()
        results.append((y, leaf.grad, [parameter.grad for parameter in owner.parameters()], owner.state_dict()))
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-10)
    return rewrite


def test_a_network() -> None:
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8), nn.SiLU(), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
        nn.InstanceNorm2d(8, affine=True), nn.LeakyReLU(0.2), nn.LayerNorm(6), nn.GELU(approximate="tanh"),
        nn.RMSNorm(6, eps=1e-6), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1),
    )  # fmt: skip
    rewrite = same_training(network, torch.randn(2, 3, 8, 8))
    assert summary(rewrite) == [
        ("group_norm", "silu", True),
        ("batch_norm", "relu", True),
        ("instance_norm", "leaky_relu", True),
        ("layer_norm", "gelu_tanh", True),
        ("rms_norm", None, True),
        ("batch_norm", None, True),
    ]


def test_an_evaluation_and_channels_last() -> None:
    network = nn.Sequential(nn.BatchNorm2d(8), nn.Hardswish(), nn.GroupNorm(4, 8), nn.Sigmoid()).eval()
    x = torch.randn(2, 8, 5, 5).to(memory_format=torch.channels_last)
    made, rewrite = compiled(network)
    with torch.no_grad():
        torch.testing.assert_close(made(x), network(x))
    assert summary(rewrite) == [("batch_norm", "hardswish", True), ("group_norm", "sigmoid", True)]


@pytest.mark.parametrize(
    ("call", "activation"),
    [
        (lambda x: F.group_norm(x, 4).relu(), "relu"),
        (lambda x: torch.tanh(F.group_norm(x, 4)), "tanh"),
        (lambda x: F.relu_(F.group_norm(x, 4)), "relu"),
        (lambda x: F.gelu(F.group_norm(x, 4)), "gelu"),
        (lambda x: F.leaky_relu(F.group_norm(x, num_groups=4), 0.3), "leaky_relu"),
        (lambda x: F.group_norm(x, 4) + 1, None),
        (lambda x: F.softplus(F.group_norm(x, 4)), None),
    ],
)
def test_activations(call: Callable[[Tensor], Tensor], activation: str | None) -> None:
    x = torch.randn(2, 8, 5)
    made, rewrite = compiled(call)
    torch.testing.assert_close(made(x), call(x))
    assert summary(rewrite) == [("group_norm", activation, True)]


def test_an_output_that_others_read_keeps_its_activation_apart() -> None:
    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.group_norm(x, 4)
        return F.silu(y), y

    def in_place(x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.group_norm(x, 4)
        return F.relu(y, inplace=True), y

    def mutated(x: Tensor) -> Tensor:
        y = F.group_norm(x, 4)
        y.add_(1)
        return F.relu(y)

    x = torch.randn(2, 8, 5)
    for call in (both, in_place, mutated):
        made, rewrite = compiled(call)
        torch.testing.assert_close(made(x), call(x))
        assert summary(rewrite) == [("group_norm", None, True)]


def _images(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return F.silu(F.group_norm(x, 4) * (1 + scale[:, :, None]) + shift[:, :, None])


def _late(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    y = F.group_norm(x, 4)
    factor = (scale * 2).unsqueeze(-1) + 1.0
    return shift.sin().unsqueeze(-1).add(factor * y)


def _without_shift(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return torch.mul(F.batch_norm(x, None, None, training=True), torch.add(scale[:, :, None], 1)) - shift[:, :, None]


def _tokens(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    x = x.mT
    return F.gelu(F.layer_norm(x, x.shape[-1:]) * (1 + scale[:, None]) + shift[:, None])


def _tokens_by_themselves(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    x = x.mT
    return F.rms_norm(x, x.shape[-1:]) * (1 + x.sin()) + shift[:, None]


@pytest.mark.parametrize(
    ("call", "activation"),
    [(_images, "silu"), (_late, None), (_without_shift, None), (_tokens, "gelu"), (_tokens_by_themselves, None)],
)
def test_modulation(call: Callable[..., Tensor], activation: str | None) -> None:
    drawn = [torch.randn(2, 8, 5), torch.randn(2, 8), torch.randn(2, 8)]
    inputs, others = ([one.double().requires_grad_() for one in drawn] for _ in range(2))
    made, rewrite = compiled(call)
    y, expected = made(*inputs), call(*others)
    torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-10)
    gradients = (
        torch.autograd.grad(one.square().sum(), given, allow_unused=True)
        for one, given in ((y, inputs), (expected, others))
    )
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-10)
    assert [(one.activation, one.modulated) for one in rewrite.report] == [(activation, True)]


def test_what_is_no_modulation_of_ours_stays_torchs() -> None:
    def two(x: Tensor, scale: Tensor) -> Tensor:
        return F.group_norm(x, 4) * (2 + scale[:, :, None])

    def positions(x: Tensor, scale: Tensor) -> Tensor:
        return F.group_norm(x, 4) * (1 + x)

    def aligned_right(x: Tensor, scale: Tensor) -> Tensor:
        return F.layer_norm(x.mT, (8,)) * (1 + scale[0])

    def wider(x: Tensor, scale: Tensor) -> Tensor:
        return F.group_norm(x, 4) * (1 + scale[:, :, None].double())

    def seen(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        y = F.group_norm(x, 4)
        return y * (1 + scale[:, :, None]), y

    def overwritten(x: Tensor, scale: Tensor) -> Tensor:
        x = x * 2
        y = F.group_norm(x, 4)
        x.zero_()
        return y * (1 + scale[:, :, None]) + x

    def added_to(x: Tensor, scale: Tensor) -> Tensor:
        x = x * 2
        y = F.group_norm(x, 4)
        x += 1
        return y * (1 + scale[:, :, None])

    x, scale = torch.randn(2, 8, 5), torch.randn(2, 8)
    for call in (two, positions, aligned_right, wider, seen, overwritten, added_to):
        made, rewrite = compiled(call)
        torch.testing.assert_close(made(x, scale), call(x, scale), rtol=1e-5, atol=1e-5)
        assert [(one.reason, one.modulated) for one in rewrite.report] == [(None, False)], call


def _scale_overwritten(x: Tensor, scale: Tensor, mean: Tensor) -> Tensor:
    scale = scale * 1
    factor, base = 1 + scale, scale.view(-1)
    base.zero_()
    return F.silu(F.group_norm(x, 4) * factor)


def _scale_without_gradient(x: Tensor, scale: Tensor, mean: Tensor) -> Tensor:
    with torch.no_grad():
        factor = 1 + scale
    return F.group_norm(x, 4) * factor + scale


def _statistics_seen(x: Tensor, scale: Tensor, mean: Tensor) -> Tensor:
    statistics = mean.view(1, 8)
    y = F.batch_norm(x, mean, mean + 9, training=True)
    seen = statistics * 2
    return F.relu(y * (1 + scale)) + seen.unsqueeze(-1)


def _statistics_added(x: Tensor, scale: Tensor, mean: Tensor) -> Tensor:
    return F.instance_norm(x, mean, mean + 9) * (1 + scale) + mean.view(1, 8, 1).expand(2, 8, 1)


@pytest.mark.parametrize(
    "call",
    [_scale_overwritten, _scale_without_gradient, _statistics_seen, _statistics_added],
    ids=lambda call: call.__name__,
)
def test_values_that_change_before_the_one_call_would_read_them(call: Callable[..., Tensor]) -> None:
    drawn = [torch.randn(2, 8, 5).double(), torch.randn(2, 8, 1).double(), torch.randn(8).double()]
    results = []
    for function in (torch.compile(call, backend=rewritten), call):
        x, scale, mean = (one.clone() for one in drawn)
        x.requires_grad_()
        scale.requires_grad_()
        y = function(x, scale, mean)
        gradients = torch.autograd.grad(y.square().sum(), (x, scale), allow_unused=True, materialize_grads=True)
        results.append((y, mean, *gradients))
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-10)


def test_an_activation_that_autograd_does_not_record() -> None:
    def call(x: Tensor) -> Tensor:
        y = F.group_norm(x, 4)
        with torch.no_grad():
            return F.relu(y)

    x = torch.randn(2, 8, 5, requires_grad=True)
    y = torch.compile(call, backend=rewritten)(x)
    assert not y.requires_grad
    torch.testing.assert_close(y, call(x))


def test_a_norm_that_torch_promotes() -> None:
    """As autocast does on a GPU, around a graph that does not show it."""
    graph = torch.fx.Graph()
    norm = graph.call_function(F.layer_norm, (graph.placeholder("x"), (8,)))
    graph.output(norm)
    norm.args[0].meta["example_value"] = torch.empty(2, 8, dtype=torch.bfloat16)
    norm.meta["example_value"] = torch.empty(2, 8)
    (found,) = rewrite(graph, ("cpu",))
    assert found.reason == "torch's result is no tensor of its input's dtype, torch.bfloat16"


def test_an_input_that_is_overwritten_after_the_norm() -> None:
    def call(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x * 2
        y = F.group_norm(x, 4)
        x.zero_()
        return F.silu(y), x

    x = torch.randn(2, 8, 5)
    made, _ = compiled(call)
    torch.testing.assert_close(made(x), call(x))


@pytest.mark.parametrize("inside", [True, False])
def test_autocast_is_torchs(inside: bool) -> None:
    network = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.SiLU())

    def call(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return network(x)

    x = torch.randn(4, 8)
    made, rewrite = compiled(call if inside else network)
    with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
        got, expected = made(x), (call if inside else network)(x)
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2)
    assert [one.reason is not None and one.reason.startswith("autocast") for one in rewrite.report] == [True]


def test_other_devices_are_left() -> None:
    x = torch.randn(2, 8, 5)
    made, rewrite = compiled(lambda x: F.group_norm(x, 4), devices=("cuda",))
    torch.testing.assert_close(made(x), F.group_norm(x, 4))
    assert [one.reason for one in rewrite.report] == ["it runs on cpu, and the pass is for cuda"]


def test_a_model_with_hooks_and_shared_modules() -> None:
    norm, seen = nn.GroupNorm(4, 8), []
    network = nn.Sequential(norm, nn.SiLU(), norm)
    norm.register_forward_hook(lambda module, inputs, output: output * 2)
    x = torch.randn(2, 8, 5)
    made, rewrite = compiled(network)
    torch.testing.assert_close(made(x), network(x))
    assert summary(rewrite) == [("group_norm", None, True)] * 2  # the hook stands between norm and activation
    assert seen == []


def test_a_dynamic_batch() -> None:
    network = nn.Sequential(nn.GroupNorm(4, 8), nn.SiLU())
    rewrite = fusednorm.compile_pass(devices=("cpu",))
    made = torch.compile(network, fullgraph=True, dynamic=True, options={"pre_grad_custom_pass": rewrite})
    for samples in (2, 3, 5):
        x = torch.randn(samples, 8, 5)
        torch.testing.assert_close(made(x), network(x))
    assert set(summary(rewrite)) == {("group_norm", "silu", True)}  # torch runs passes twice over a dynamic graph


def test_a_momentum_and_an_eps_that_are_symbols() -> None:
    norm = nn.BatchNorm1d(8)
    other = copy.deepcopy(norm)
    made = torch.compile(norm, backend=rewritten, fullgraph=True, dynamic=True)
    for momentum, eps in ((0.1, 1e-5), (0.3, 0.1), (0.7, 0.5)):
        x = torch.randn(2, 8, 5)
        for one in (norm, other):
            one.momentum, one.eps = momentum, eps
        torch.testing.assert_close(made(x), other(x))
        torch.testing.assert_close(norm.state_dict(), other.state_dict())


class Own(CustomGraphPass):
    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.seen += len(graph.find_nodes(op="call_function", target=F.group_norm))

    def uuid(self) -> Any:
        return "own"


def test_a_pass_of_the_programs_own() -> None:
    own = Own()
    made, rewrite = compiled(lambda x: F.group_norm(x, 4), before=own)
    made(torch.randn(2, 8, 5))
    assert own.seen == 1
    assert rewrite.uuid()[1] == "own"
    assert fusednorm.compile_pass().uuid() == fusednorm.compile_pass().uuid()
    assert fusednorm.compile_pass().uuid() != fusednorm.compile_pass(devices=("cpu",)).uuid()
    assert fusednorm.compile_pass(lambda graph: None).uuid() is None


def test_the_tables_name_functions_of_one_signature() -> None:
    import inspect

    for torchs, ours in NORMS.items():
        if torchs is torch.rms_norm:  # Python does not know its signature, which is that of F.rms_norm
            continue
        theirs = list(inspect.signature(torchs).parameters)
        assert list(inspect.signature(ours).parameters)[: len(theirs)] == theirs
    for name in (*FUNCTIONS.values(), *POSITIONS):
        fusednorm.Activation(name)


# --- what views expect ---

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "layer_norm of tokens": lambda x: F.layer_norm(x.permute(0, 2, 3, 1), (24,)).view(2, -1),
    "layer_norm of transposed samples": lambda x: F.layer_norm(x.transpose(0, 1), (5, 7)).view(24, -1),
    "rms_norm behind pointwise operations": lambda x: (2 * F.rms_norm(x.permute(0, 2, 3, 1), (24,))).cos().view(2, -1),
    "group_norm of turned images": lambda x: F.group_norm(x.transpose(2, 3), 4).view(2, 24 * 35),
    "group_norm with an activation": lambda x: F.silu(F.group_norm(x.transpose(2, 3), 4)).view(2, -1),
    "instance_norm": lambda x: F.instance_norm(x.transpose(0, 1)).view_as(torch.empty(24, 70)),
    "a view as another dtype": lambda x: F.group_norm(x, 4).view(torch.int32),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_of_an_output_in_another_order_of_memory(name: str) -> None:
    """torch's outputs are contiguous here, and a view of them compiles."""
    x = torch.randn(2, 24, 5, 7)
    call = torch.compile(VIEWS[name], backend=rewritten, fullgraph=True)
    found, expected = call(x), VIEWS[name](x)
    if expected.dtype == torch.int32:
        found, expected = found.view(torch.float32), expected.view(torch.float32)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


IN_PLACE: dict[str, Callable[[Tensor], Any]] = {
    "view": lambda y: y.view(y.shape[0], -1).mul_(2),
    "reshape": lambda y: y.reshape(y.shape[0], -1).mul_(2),
    "flatten": lambda y: y.flatten(1)[:, 0].fill_(7),
    "contiguous": lambda y: y.contiguous().add_(1),
    "as_strided": lambda y: y.as_strided(y.shape[:1], y.stride()[:1]).add_(1),
}


@pytest.mark.parametrize("change", IN_PLACE)
@pytest.mark.parametrize(
    ("shape", "norm"),
    [
        ((2, 6, 8), lambda x: F.group_norm(x.transpose(1, 2), 4)),
        ((2, 6, 8), lambda x: F.silu(F.group_norm(input=x.transpose(1, 2), num_groups=2))),
        ((2, 6, 8), lambda x: F.layer_norm(x.permute(1, 0, 2), (8,))),
        ((2, 16, 8), lambda x: F.group_norm(x[:, ::2], 4)),
        ((2, 8, 1), lambda x: F.group_norm(x.expand(2, 8, 5), 4)),
        ((2, 3, 5, 8), lambda x: F.instance_norm(x.permute(0, 3, 1, 2))),
    ],
)
def test_what_is_changed_through_a_view_of_an_output_is_changed(
    shape: tuple[int, ...], norm: Callable[[Tensor], Tensor], change: str
) -> None:
    def call(x: Tensor) -> Tensor:
        y = norm(x)
        IN_PLACE[change](y)
        return y

    x = torch.randn(shape)
    expected, found = call(x), torch.compile(call, backend=rewritten, fullgraph=True)(x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert found.stride() == expected.stride()


@pytest.mark.parametrize("rows", [False, True])
def test_images_in_channels_last_are_not_copied(rows: bool) -> None:
    module = torch.fx.symbolic_trace((lambda x: F.layer_norm(x, (3,))) if rows else (lambda x: F.group_norm(x, 4)))
    for x, copied in (
        (torch.randn(2, 8, 3, 3).contiguous(memory_format=torch.channels_last), rows),
        (torch.randn(2, 8, 3, 3, 3).contiguous(memory_format=torch.channels_last_3d), rows),
        (torch.randn(4, 8, 3, 3)[::2], False),
        (torch.randn(2, 3, 8).transpose(1, 2), True),
        (torch.randn(2, 3, 8, 3).transpose(1, 2), True),
    ):
        graph = copy.deepcopy(module.graph)
        for node in graph.nodes:
            node.meta["example_value"] = x if node.op == "placeholder" else x.contiguous()
        rewrite(graph, ("cpu",))
        assert any(node.target == "contiguous" for node in graph.nodes) == copied


def _assigned(y: Tensor) -> Tensor:
    y.view(2, -1)[0] = 7.0
    return y * 2


SEEN: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "the result": (lambda y: y, True),
    "a view of it": (lambda y: y.transpose(1, 2)[0], True),
    "a sum": (lambda y: y + 1, False),
    "a reshape that is read": (lambda y: y.reshape(2, -1) * 2, False),
    "a change of the result itself": (lambda y: y.mul_(2) * 2, False),
    "a change of a view of it": (lambda y: y[0].mul_(2) * 2, False),
    "a change of a reshape": (lambda y: y.flatten(1).mul_(2) * 2, True),
    "a change of a view of a reshape": (lambda y: y.reshape(2, -1)[0].add_(2) * 2, True),
    "an activation in place of a reshape": (lambda y: F.relu(y.view(2, -1), inplace=True) * 2, True),
    "another activation in place of a reshape": (lambda y: F.silu(y.view(2, -1), True) * 2, True),
    "an assignment to a reshape": (_assigned, True),
    "numbers as others": (lambda y: y.view(torch.int32) * 2, True),
    "a change of a reshape of a cast": (lambda y: y.to(y.dtype).flatten(1).mul_(2) * 2, True),
    "a cast": (lambda y: y.to(torch.float64).flatten() * 2, False),
}


@pytest.mark.parametrize("what", SEEN)
def test_instance_norm_of_channels_last_is_contiguous_where_that_is_seen(what: str) -> None:
    """torch's is contiguous, which the convolutions behind it turn back."""
    function, seen = SEEN[what]
    copies: list[bool] = []

    def backend(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        made = rewritten(module, inputs)
        copies.append(any(node.target == "contiguous" for node in module.graph.nodes))
        return made

    x = torch.randn(2, 8, 3, 5).contiguous(memory_format=torch.channels_last)

    def call(x: Tensor) -> Tensor:
        return function(F.instance_norm(x))

    found, expected = torch.compile(call, backend=backend, fullgraph=True)(x), call(x)
    if what != "numbers as others":
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert copies == [seen]


def test_an_order_that_torch_keeps_in_its_graphs_is_kept() -> None:
    x = torch.randn(2, 3, 5, 8)
    call = torch.compile(lambda x: F.batch_norm(x.transpose(1, 2), None, None, training=True), backend=rewritten)
    assert call(x).stride() == x.transpose(1, 2).stride()


@pytest.mark.parametrize("norm", [lambda x: F.layer_norm(x, (3,)), lambda x: F.group_norm(x, 4)])
def test_a_batch_whose_size_depends_on_data(norm: Callable[[Tensor], Tensor]) -> None:
    x, chosen = torch.randn(6, 8, 3), torch.tensor([True, False, True, True, False, True])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        made, rewrite = compiled(lambda x, chosen: F.silu(norm(x[chosen])))
        torch.testing.assert_close(made(x, chosen), F.silu(norm(x[chosen])), rtol=1e-4, atol=1e-5)
    assert {one.reason for one in rewrite.report} == {None}


def test_a_norm_in_forward_mode_is_left() -> None:
    def call(x: Tensor) -> Tensor:
        return torch.func.jvp(lambda z: F.silu(F.group_norm(z, 4)), (x,), (2 * x,))[1]

    x = torch.randn(2, 8, 3)
    made, rewrite = compiled(call)
    torch.testing.assert_close(made(x), call(x))
    assert ["forward-mode" in str(one.reason) for one in rewrite.report] == [True]


@pytest.mark.parametrize(
    "activation", [F.silu, F.relu, lambda z: F.leaky_relu(z, 0.2), lambda z: F.gelu(z, approximate="tanh")]
)
def test_a_norm_in_a_branch(activation: Callable[[Tensor], Tensor]) -> None:
    """A branch of torch.cond is code, in which an activation must have a name."""

    def call(x: Tensor) -> Tensor:
        return torch.cond(
            x.sum() > 0, lambda x: activation(F.group_norm(x, 4)), lambda x: activation(F.layer_norm(x, (3,))), (x,)
        )

    x = torch.randn(2, 8, 3)
    made, rewrite = compiled(call)
    for each in (x, -x):
        torch.testing.assert_close(made(each), call(each), rtol=1e-4, atol=1e-5)
    assert {one.reason for one in rewrite.report} == {None}


def test_rows_that_lie_apart_are_contiguous_behind_their_norm() -> None:
    """As torch's are, so that linear layers take them as they are."""
    x = torch.randn(2, 24, 35)
    call = torch.compile(lambda x: F.layer_norm(x.transpose(1, 2), (24,)), backend=rewritten, fullgraph=True)
    assert call(x).is_contiguous()
