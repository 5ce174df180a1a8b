"""layer_norm and rms_norm over the channels of (N, C, *), in both memory orders, with every instance of the CPU."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from drawn_formulas import Spec
from drawn_judge import Judge, same_bits
from interpreter_support import interpreted
from torch import Tensor

import fusednorm
from fusednorm import Activation, nn, ops
from fusednorm.activations import FORMULAS
from fusednorm.backends.cpu.instances import COLUMNS
from fusednorm.backends.reference import VALUES
from fusednorm.norm import norm_of, norm_of_text
from fusednorm.operands import BackwardOperands, Operands
from fusednorm.problems import backward_problem, forward_problem
from fusednorm.tuning import key_of

FAMILIES = ("layer_norm", "rms_norm")
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
#: One activation to a dtype, so that few kernels are compiled.
ACTIVATED = {torch.float32: "silu", torch.float64: "gelu", torch.float16: None, torch.bfloat16: "silu"}


def last(tensor: Tensor) -> Tensor:
    """The same values with the channels of each position side by side."""
    return tensor.movedim(1, -1).contiguous().movedim(-1, 1)


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, offset: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) + offset).to(dtype)


def normalized(
    family: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5, activation: Any = None
) -> Tensor:
    shape = (x.shape[1],)
    if family == "rms_norm":
        return fusednorm.rms_norm(x, shape, weight, eps, activation=activation, channel_dim=1)
    return fusednorm.layer_norm(x, shape, weight, bias, eps, activation=activation, channel_dim=1)


def plain(family: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5) -> Tensor:
    """torch's own, with the channels moved behind the positions and back."""
    moved, shape = x.movedim(1, -1), (x.shape[1],)
    y = F.rms_norm(moved, shape, weight, eps) if family == "rms_norm" else F.layer_norm(moved, shape, weight, bias, eps)
    return y.movedim(-1, 1)


def results(family: str, tensors: dict[str, Tensor], activation: str | None) -> dict[str, Tensor]:
    """The output and all gradients, by autograd."""
    leaves = {name: tensors[name].detach().requires_grad_() for name in ("input", "weight", "bias") if name in tensors}
    y = normalized(family, leaves["input"], leaves.get("weight"), leaves.get("bias"), activation=activation)
    found = torch.autograd.grad(y, list(leaves.values()), tensors["grad_output"])
    return {"output": y.detach()} | {f"grad_{name}": one for name, one in zip(leaves, found, strict=True)}


def operands(
    family: str, shape: Sequence[int], dtype: torch.dtype, order: Callable[[Tensor], Tensor], offset: float = 0.0
) -> dict[str, Tensor]:
    names = ("weight",) if family == "rms_norm" else ("weight", "bias")
    given = {name: drawn(shape[1], seed=place + 2) for place, name in enumerate(names)}
    x = order(drawn(*shape, dtype=dtype, offset=offset))
    return {"input": x, "grad_output": order(drawn(*shape, dtype=dtype, seed=1)), **given}


def faults(family: str, tensors: dict[str, Tensor], found: dict[str, Tensor], activation: str | None) -> list[str]:
    parameter = FORMULAS[activation].default if activation else 0.0
    x = tensors["input"]
    spec = Spec(family, tuple(x.shape), 0, 1, True, 1e-5, activation, parameter or 0.0)
    return [f"{fault.name}: {fault.text}" for fault in Judge(spec, tensors, x.dtype, None).faults(found)]


SHAPES = [(3, 40, 5, 7), (2, 24, 130), (2, 70, 3, 4, 5), (5, 9), (2, 33, 1, 1), (1, 2, 3), (2, 700, 6), (1, 3, 700)]


@pytest.mark.parametrize("order", [Tensor.contiguous, last], ids=["first", "last"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_results_are_right(family: str, dtype: torch.dtype, order: Callable[[Tensor], Tensor]) -> None:
    for shape in SHAPES:
        for offset in (0.0, 1000.0):
            tensors = operands(family, shape, dtype, order, offset)
            found = results(family, tensors, ACTIVATED[dtype])
            assert faults(family, tensors, found, ACTIVATED[dtype]) == [], (shape, offset)
            assert found["output"].stride() == found["grad_input"].stride() == tensors["input"].stride()


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_may_be_absent_or_of_another_dtype(family: str) -> None:
    for dtype, weighted, biased in (
        (torch.float64, True, True), (torch.bfloat16, True, False), (torch.float16, False, True), (None, False, False)
    ):  # fmt: skip
        tensors = operands(family, (2, 24, 5, 7), torch.float32, Tensor.contiguous)
        for name, wanted in (("weight", weighted), ("bias", biased)):
            if not wanted:
                tensors.pop(name, None)
            elif name in tensors:
                tensors[name] = tensors[name].to(dtype)
        assert faults(family, tensors, results(family, tensors, "silu"), "silu") == []


@pytest.mark.parametrize("family", FAMILIES)
def test_an_activation_with_a_parameter(family: str) -> None:
    x, weight = drawn(2, 24, 5, 7), drawn(24, seed=1)
    for beta in (1.0, 1.702):
        found = normalized(family, x, weight, None, activation=Activation("silu", beta))
        torch.testing.assert_close(found, VALUES["silu"](plain(family, x, weight, None), beta))


MEMORY: dict[str, Callable[[Tensor], Tensor]] = {
    "sliced channels": lambda x: torch.cat((x, x), 1)[:, : x.shape[1]],
    "sliced positions": lambda x: torch.cat((x, x), 3)[..., : x.shape[3]],
    "transposed positions": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "samples last": lambda x: x.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2),
    "channels before samples": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "last, sliced samples": lambda x: last(torch.cat((x, x), 2))[:, :, : x.shape[2]],
    "last, sliced channels": lambda x: last(torch.cat((x, x), 1))[:, : x.shape[1]],
    "every second channel": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "expanded samples": lambda x: x[:1].expand(x.shape),
    "expanded channels": lambda x: x[:, :1].expand(x.shape),
    "expanded positions": lambda x: x[..., :1].expand(x.shape),
    "one value": lambda x: x[:1, :1, :1, :1].expand(x.shape),
}


@pytest.mark.parametrize("name", MEMORY)
def test_any_strides(name: str) -> None:
    """Of the input, of the gradient, and of both."""
    for family in FAMILIES:
        for first in (MEMORY[name], Tensor.contiguous, last):
            for second in (MEMORY[name], Tensor.contiguous):
                tensors = operands(family, (2, 24, 5, 7), torch.float32, Tensor.contiguous)
                tensors |= {"input": first(tensors["input"]), "grad_output": second(tensors["grad_output"])}
                found = results(family, tensors, None)
                assert faults(family, tensors, found, None) == []


def test_nothing_is_copied_that_fits_a_memory_order() -> None:
    x, norm = drawn(2, 24, 5, 7), norm_of("layer_norm", 0)
    for name, copies in (
        ("sliced channels", ()), ("sliced positions", ("input",)), ("transposed positions", ("input",)),
        ("channels before samples", ()), ("last, sliced samples", ()), ("last, sliced channels", ()),
        ("every second channel", ()), ("expanded samples", ()), ("expanded positions", ("input",)),
    ):  # fmt: skip
        assert forward_problem(norm, Operands(MEMORY[name](x))).copies == copies, name
    for tensor in (x, last(x), drawn(2, 3, 4, 5, 6), last(drawn(2, 3, 4, 5, 6))):
        assert forward_problem(norm, Operands(tensor)).copies == ()
    other = backward_problem(norm, BackwardOperands(last(x), x, x, x))
    assert other.copies == ("grad_output",)


@pytest.mark.parametrize("family", FAMILIES)
def test_empty_inputs_and_single_elements(family: str) -> None:
    for shape in ((0, 4, 3, 3), (2, 4, 0), (2, 0, 3), (0, 0, 0)):
        tensors = operands(family, shape, torch.float32, Tensor.contiguous)
        found = results(family, tensors, None)
        assert found["output"].shape == found["grad_input"].shape == shape
        assert all(not one.count_nonzero() for name, one in found.items() if name.startswith("grad"))
    for shape in ((3, 1, 4, 5), (1, 1, 1), (4, 1), (2, 5, 1)):
        for order in (Tensor.contiguous, last):
            tensors = operands(family, shape, torch.float32, order)
            assert faults(family, tensors, results(family, tensors, None), None) == []


@pytest.mark.parametrize("order", [Tensor.contiguous, last], ids=["first", "last"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_nan_stays_in_its_position(family: str, order: Callable[[Tensor], Tensor]) -> None:
    tensors = operands(family, (3, 40, 9, 11), torch.float32, order)
    clean = results(family, tensors, "silu")
    for value in (float("nan"), float("inf"), 3e38):
        poisoned = tensors["input"].clone()
        poisoned[1, 17, 4, 6] = value
        found = results(family, {**tensors, "input": poisoned}, "silu")
        outside = torch.ones(3, 9, 11, dtype=torch.bool)
        outside[1, 4, 6] = False
        for name in ("output", "grad_input"):
            assert same_bits(found[name].movedim(1, -1)[outside], clean[name].movedim(1, -1)[outside])
    assert not normalized(family, poisoned.fill_(float("nan")), None, None).isfinite().any()


@pytest.mark.parametrize("order", [Tensor.contiguous, last], ids=["first", "last"])
def test_the_bits_depend_on_no_number_of_threads(order: Callable[[Tensor], Tensor]) -> None:
    tensors = operands("layer_norm", (3, 96, 40, 41), torch.float32, order)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3, 1):
            torch.set_num_threads(threads)
            found.append(results("layer_norm", tensors, "silu"))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(same_bits(found[0][name], other[name]) for name in found[0])


def test_equal_channels_give_a_mean_without_rounding() -> None:
    x = torch.full((2, 40, 5, 7), 0.1)
    y, mean, _ = ops.layer_norm_forward(x, (40,), None, None, 0.0, channel_dim=1)
    assert torch.equal(mean, torch.full((2, 35), 0.1))
    del y


@pytest.mark.parametrize("order", [Tensor.contiguous, last], ids=["first", "last"])
def test_statistics_have_an_element_for_each_position(order: Callable[[Tensor], Tensor]) -> None:
    x = order(drawn(2, 24, 3, 5))
    _, mean, rstd = ops.layer_norm_forward(x, (24,), None, None, 1e-5, channel_dim=1)
    torch.testing.assert_close(mean, x.mean(1).flatten(1))
    torch.testing.assert_close(rstd, (x.var(1, unbiased=False) + 1e-5).rsqrt().flatten(1))
    _, rstd = ops.rms_norm_forward(x, (24,), None, 1e-5, channel_dim=1)
    torch.testing.assert_close(rstd, (x.square().mean(1) + 1e-5).rsqrt().flatten(1))
    dy, weight, bias = order(drawn(2, 24, 3, 5, seed=1)), drawn(24, seed=2), drawn(24, seed=3)
    whole = ops.layer_norm_backward(dy, x, mean, rstd, (24,), weight, bias, channel_dim=1)
    data = ops.layer_norm_backward_data(dy, x, mean, rstd, (24,), weight, bias, channel_dim=1)
    parts = ops.layer_norm_backward_gamma_beta(dy, x, mean, rstd, (24,), weight, bias, channel_dim=1)
    assert all(same_bits(one, other) for one, other in zip(whole, (data, *parts), strict=True))  # type: ignore[arg-type]


# --- derivatives, transforms and compilers ---


@pytest.mark.parametrize("order", [Tensor.contiguous, last], ids=["first", "last"])
@pytest.mark.parametrize("family", FAMILIES)
def test_second_derivatives(family: str, order: Callable[[Tensor], Tensor]) -> None:
    x = order(drawn(2, 3, 2, 2, dtype=torch.float64)).requires_grad_()
    weight, bias = (drawn(3, dtype=torch.float64, seed=seed).requires_grad_() for seed in (1, 2))
    inputs = (x, weight) if family == "rms_norm" else (x, weight, bias)

    def run(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return normalized(family, x, weight, bias, activation="gelu")

    assert torch.autograd.gradcheck(run, inputs, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(run, inputs)


def test_functorch() -> None:
    x, weight, bias = drawn(4, 2, 3, 5), drawn(3, seed=1), drawn(3, seed=2)

    def run(x: Tensor) -> Tensor:
        return normalized("layer_norm", x, weight, bias)

    torch.testing.assert_close(torch.func.vmap(run)(x), torch.stack([run(one) for one in x]))
    torch.testing.assert_close(torch.func.vmap(run, 2, 2)(x.movedim(0, 2)), torch.func.vmap(run)(x).movedim(0, 2))
    _, tangent = torch.func.jvp(run, (x[0],), (x[1],))
    _, expected = torch.func.jvp(lambda x: plain("layer_norm", x, weight, bias), (x[0],), (x[1],))
    torch.testing.assert_close(tangent, expected)
    hessian = torch.func.hessian(lambda x: run(x).square().sum())(x[0, :1, :, :2])
    assert hessian.shape == (1, 3, 2, 1, 3, 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_registered_op(family: str) -> None:
    for x in (drawn(2, 6, 3, 5), last(drawn(2, 6, 3, 5)), drawn(2, 6, 5, 3).transpose(2, 3), drawn(2, 12, 5)[:, ::2]):
        weight, bias = drawn(6, seed=1), None if family == "rms_norm" else drawn(6, seed=2)
        arguments = (x, weight, bias, None, None, None, None, family, 0, 1, 1e-5, "silu", 1.0)
        torch.library.opcheck(torch.ops.fusednorm.norm_forward.default, arguments)
        leaf = (x.detach().requires_grad_(), weight.requires_grad_(), *arguments[2:])
        torch.library.opcheck(torch.ops.fusednorm.norm_forward.default, leaf)


def test_the_ops_refuse_what_fits_no_channels() -> None:
    x, weight = drawn(2, 6, 3), drawn(6)
    run = torch.ops.fusednorm.norm_forward
    rest = (None, None, None, "layer_norm", 0)
    with pytest.raises(ValueError, match=r"weight has shape \(6,\); expected \(3,\)"):
        run(x, weight, None, None, *rest, -1, 1e-5, "", 0.0)
    with pytest.raises(ValueError, match=r"scale has shape \(2, 3\); expected \(2, 6\)"):
        run(x, weight, None, x[:, 0], *rest, 1, 1e-5, "", 0.0)
    with pytest.raises(ValueError, match=r"weight has shape \(3,\)"):
        run(x, weight[:3], None, None, *rest, 1, 1e-5, "", 0.0)
    # Exported programs have channel_dim=1 where trailing dimensions are normalized.
    trailing = run(x, drawn(3), None, None, *rest[:-1], 1, 1, 1e-5, "", 0.0)[0]
    torch.testing.assert_close(trailing, F.layer_norm(x, (3,), drawn(3)))


def test_under_torch_compile() -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.LayerNorm2d(6, activation="silu"), nn.RMSNorm(6, 1e-6, channel_dim=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).relu() + x)  # type: ignore[no-any-return]

    block = Block()
    compiled = torch.compile(block, fullgraph=True)
    for x in (drawn(2, 6, 3, 5), last(drawn(2, 6, 3, 5))):
        grads = []
        for call in (block, compiled):
            leaf = x.detach().requires_grad_()
            y = call(leaf)
            assert y.stride() == x.stride()
            grads.append((y, *torch.autograd.grad(y.square().sum(), (leaf, *block.parameters()))))
        for one, other in zip(*grads, strict=True):
            torch.testing.assert_close(one, other)


# --- rows across memory ---


@pytest.mark.parametrize("modulated", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_that_lie_across_memory_are_channels_of_positions(family: str, modulated: bool) -> None:
    """Tokens of an image, flattened and transposed without a copy: the numbers of a row are as far apart as an image's
    channels."""
    shape, channels = (2, 24, 5, 7), 24
    image, weight = drawn(*shape), drawn(channels, seed=1)
    tokens = image.flatten(2).transpose(1, 2)
    grad_output = drawn(*tokens.shape, seed=2)
    keywords = {name: drawn(2, channels, seed=place + 3) for place, name in enumerate(("scale", "shift")) if modulated}
    call: Any = getattr(fusednorm, family)
    for x in (tokens, image.permute(0, 2, 3, 1)):
        found = fusednorm.explain(call, x, (channels,), weight, **keywords)
        assert (found.instance, found.copies) == ("cpu.columns", ())
        results = []
        for each in (x, x.contiguous()):
            leaves = [one.detach().requires_grad_() for one in (each, weight, *keywords.values())]
            options = dict(zip(keywords, leaves[2:], strict=True))
            y = call(leaves[0], (channels,), leaves[1], **options)
            assert y.stride() == each.stride()
            gradients = grad_output.view(x.shape), torch.empty_like(x).copy_(grad_output.view(x.shape))
            results += [(y, *torch.autograd.grad(y, leaves, one, retain_graph=True)) for one in gradients]
        for one in results[1:]:
            torch.testing.assert_close(one, results[0], rtol=1e-5, atol=1e-5)


def test_a_shortcut_behind_rows_that_fit_no_memory_order() -> None:
    """The output is no view of another tensor, to which autograd would not let the shortcut be added."""
    whole = drawn(2, 24, 98)
    rows, shortcut = whole[:, :, ::2].transpose(1, 2).requires_grad_(), drawn(2, 49, 24, seed=1)
    y = fusednorm.layer_norm(rows, (24,), post_add=shortcut)
    torch.testing.assert_close(y, F.layer_norm(rows, (24,)) + shortcut)


# --- calls ---


def test_calls_that_repeat_are_of_one_channel_dim() -> None:
    x = drawn(3, 6, 6).requires_grad_()
    weight = drawn(6, seed=1).requires_grad_()
    right = F.layer_norm(x, (6,), weight), plain("layer_norm", x, weight, None)
    for _ in range(4):
        for channel_dim, expected in zip((-1, 1), right, strict=True):
            y = fusednorm.layer_norm(x, (6,), weight, channel_dim=channel_dim)
            torch.testing.assert_close(y, expected)
            one = torch.autograd.grad(y.sin().sum(), (x, weight))
            other = torch.autograd.grad(expected.sin().sum(), (x, weight), retain_graph=True)
            torch.testing.assert_close(one, other)
            with torch.no_grad():
                assert torch.equal(fusednorm.layer_norm(x, (6,), weight, channel_dim=channel_dim), y)


def test_instances_and_explain() -> None:
    x = drawn(2, 24, 5, 7)
    for tensor, name in ((x, "cpu.columns"), (last(x), "cpu.rows"), (drawn(4, 24), "cpu.rows")):
        found = fusednorm.explain(fusednorm.layer_norm, tensor, (24,), channel_dim=1)
        assert (found.instance, found.copies) == (name, ())
    assert fusednorm.explain(fusednorm.rms_norm, last(x), (24,), channel_dim=1).instance == "cpu.rows"
    problem = fusednorm.explain(fusednorm.layer_norm, last(x), (24,), channel_dim=1).problem
    assert (problem.num_statistics, problem.reduced, problem.statistics_shape) == (70, 24, (2, 35))
    problem = fusednorm.explain(fusednorm.layer_norm, x, (24,), channel_dim=1).problem
    assert (problem.num_statistics, problem.reduced, problem.parameter_shape) == (70, 24, (24,))
    for tensor in (x, last(x)):
        for direction in ("forward", "backward"):
            able = [
                one.instance.name
                for one in fusednorm.instances(fusednorm.layer_norm, tensor, (24,), channel_dim=1, direction=direction)
                if one.reason is None
            ]
            assert able == (["cpu.columns"] if tensor is x else ["cpu.slabs", "cpu.slabs_split", "cpu.rows"]) + [
                "reference"
            ]


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_configurations_of_the_cpu_are_right(direction: str) -> None:
    """Of every size of blocks, in a sample that is cut unevenly."""
    tensors = operands("layer_norm", (3, 96, 9, 211), torch.float32, Tensor.contiguous)
    x, dy, weight, bias = (tensors[name] for name in ("input", "grad_output", "weight", "bias"))
    norm = norm_of("layer_norm", 0)
    y, mean, rstd = ops.layer_norm_forward(x, (96,), weight, bias, 1e-5, channel_dim=1)
    forward, backward = Operands(x, weight, bias), BackwardOperands(dy, x, mean, rstd, weight, bias)
    problem = forward_problem(norm, forward) if direction == "forward" else backward_problem(norm, backward)
    configs = COLUMNS.configs(problem)
    assert len({config.positions(problem) for config in configs}) == len(configs) > 2
    for config in configs:
        plan: Any = COLUMNS.plan(problem, config)
        if direction == "forward":
            found = {"output": plan(forward).output}
        else:
            gradients = plan(backward, (True, True, True, False, False))
            found = {f"grad_{name}": getattr(gradients, name) for name in ("input", "weight", "bias")}
        assert faults("layer_norm", tensors, found, None) == []
    del y


INTERPRETED = """
import json
import torch
from test_channel_norms import faults, operands
from fusednorm.backends.triton.config.kinds import PositionsConfig
from fusednorm.backends.triton.instances import COLUMNS
from fusednorm.norm import norm_of
from fusednorm.operands import BackwardOperands, Operands
from fusednorm.problems import backward_problem, forward_problem

found = []
cases = [("layer_norm", torch.float32, "silu"), ("rms_norm", torch.float16, None), ("layer_norm", torch.float64, None)]
for family, dtype, activation in cases:
    norm = norm_of(family, 0, activation=activation)
    for shape, config in (
        ((2, 12, 3, 5), None), ((2, 12, 3, 5), PositionsConfig(8, 8, 1)), ((1, 5, 2), None),
    ):
        for offset in (0.0, 1000.0):
            given = operands(family, shape, dtype, torch.Tensor.contiguous, offset)
            x, dy, weight, bias = (given.get(name) for name in ("input", "grad_output", "weight", "bias"))
            forward = Operands(x, weight, bias)
            made = COLUMNS.plan(forward_problem(norm, forward), config)(forward)
            backward = BackwardOperands(dy, x, made.mean, made.rstd, weight, bias)
            plan = COLUMNS.plan(backward_problem(norm, backward), config)
            gradients = plan(backward, (True, True, True, False, False))
            results = {"output": made.output, "grad_input": gradients.input, "grad_weight": gradients.weight}
            if bias is not None:
                results["grad_bias"] = gradients.bias
            found += [f"{family} {shape} {config}: {one}" for one in faults(family, given, results, activation)]
print(json.dumps(found))
"""


def test_triton_columns_in_the_interpreter() -> None:
    """With all channels in a tile, and in steps over them."""
    pytest.importorskip("triton")
    assert interpreted(INTERPRETED) == []


def test_keys_of_tuned_choices_tell_the_norms_apart() -> None:
    x = drawn(4, 6, 6)
    keys = {
        key_of(forward_problem(norm, Operands(tensor)))
        for norm in (norm_of("layer_norm", 0), norm_of("layer_norm", 1), norm_of("rms_norm", 0))
        for tensor in (x, last(x))
    }
    assert len(keys) == 6


def test_the_norm() -> None:
    norm = norm_of("layer_norm", 0, eps=1e-6, activation="silu")
    assert (norm.per_position, norm.row_family, norm.num_dims) == (True, False, 0)
    assert norm_of_text(norm.text) is norm
    assert pickle.loads(pickle.dumps(norm)) is norm
    assert not norm_of("layer_norm", 1).per_position
    assert not norm_of("batch_norm").per_position


@pytest.mark.parametrize(
    ("shape", "normalized_shape", "channel_dim", "words"),
    [
        ((2, 6, 3), (3,), 1, r"expected the size of its dimension 1, \(6,\)"),
        ((2, 6, 3), (6, 3), 1, r"expected the size of its dimension 1, \(6,\)"),
        ((6,), (6,), 1, "of rank 1; expected rank 2 or more"),
        ((2, 6, 3), (6,), 0, "channel_dim is 0; expected 1"),
        ((2, 6, 3), (6,), -1, "expected the sizes of its last dimensions"),
    ],
)
def test_arguments_that_do_not_fit(
    shape: tuple[int, ...], normalized_shape: tuple[int, ...], channel_dim: int, words: str
) -> None:
    for function in (fusednorm.layer_norm, fusednorm.rms_norm):
        with pytest.raises(ValueError, match=words):
            function(drawn(*shape), normalized_shape, channel_dim=channel_dim)


# --- modules ---


def test_layer_norm_2d_is_the_one_of_the_field() -> None:
    ours = nn.LayerNorm2d(24)
    assert (ours.eps, tuple(ours.state_dict())) == (1e-6, ("weight", "bias"))
    assert isinstance(ours, torch.nn.LayerNorm)
    ours.load_state_dict({"weight": drawn(24, seed=1), "bias": drawn(24, seed=2)})
    for x in (drawn(2, 24, 5, 7), last(drawn(2, 24, 5, 7))):
        # As ConvNeXt and SAM write it.
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)
        right = ours.weight[:, None, None] * ((x - u) / torch.sqrt(s + ours.eps)) + ours.bias[:, None, None]
        torch.testing.assert_close(ours(x), right)
    assert tuple(nn.LayerNorm2d(4, bias=False).state_dict()) == ("weight",)
    assert tuple(nn.LayerNorm2d(4, affine=False).state_dict()) == ()
    assert repr(nn.LayerNorm2d(4, activation="gelu")).startswith("LayerNorm2d((4,), eps=1e-06")
    assert repr(nn.LayerNorm2d(4, activation="gelu")).endswith("activation=gelu, channel_dim=1)")


def test_modules_of_channels() -> None:
    x = drawn(2, 6, 3, 4, 5)
    for module, right in (
        (nn.RMSNorm(6, 1e-6, channel_dim=1), plain("rms_norm", x, None, None, 1e-6)),
        (nn.RMSNorm(6, channel_dim=1), plain("rms_norm", x, None, None, torch.finfo(torch.float32).eps)),
        (nn.LayerNorm(6, channel_dim=1), plain("layer_norm", x, None, None)),
    ):
        torch.testing.assert_close(module(x), right)
        for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert torch.equal(other(x), module(x))
        assert "channel_dim=1" in repr(module)
        graph = torch.fx.symbolic_trace(torch.nn.Sequential(module))
        assert torch.equal(graph(x), module(x))
    assert "channel_dim" not in repr(nn.LayerNorm(6))
    for kind in (nn.LayerNorm, nn.RMSNorm):
        with pytest.raises(ValueError, match="expected the number of channels alone"):
            kind((6, 3), channel_dim=1)


def test_a_converted_layer_norm_keeps_its_trailing_dimensions() -> None:
    model = torch.nn.Sequential(torch.nn.LayerNorm(6))
    x = drawn(2, 6, 6)
    right = model(x)
    fusednorm.convert_(model)
    assert model[0].channel_dim == -1
    torch.testing.assert_close(model(x), right)
