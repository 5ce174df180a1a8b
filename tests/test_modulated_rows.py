"""layer_norm and rms_norm with scale and shift, with the instances of the CPU and Triton's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from drawn_judge import same_bits
from interpreter_support import interpreted
from torch import Tensor

import fusednorm
from fusednorm import nn
from fusednorm.backends.cpu.instances import COLUMNS, ROWS
from fusednorm.backends.reference import VALUES
from fusednorm.norm import norm_of
from fusednorm.operands import BackwardOperands, Operands
from fusednorm.problems import backward_problem, forward_problem
from fusednorm.strides import is_dense
from fusednorm.tolerance import judge

FAMILIES = ("layer_norm", "rms_norm")
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
#: One activation to a dtype, so that few kernels are compiled.
ACTIVATED = {torch.float32: "silu", torch.float64: None, torch.float16: None, torch.bfloat16: "silu"}
PARAMETERS = ("weight", "bias", "scale", "shift")
EPS = 1e-5
#: A gradient of fewer values is drawn several times: plain torch may hit a single value by luck, to its last bit.
VALUES_JUDGED = 16
pytestmark = pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.:FutureWarning")  # of torch's own
Tensors = dict[str, Tensor]

#: Shapes of the input, the number of normalized dimensions, and shapes of scale and shift.
FORMS: dict[str, tuple[tuple[int, ...], int, tuple[int, ...], tuple[int, ...]]] = {
    "a row a sample": ((3, 7, 40), 1, (3, 40), (3, 40)),
    "with the dimensions of the input": ((3, 7, 40), 1, (3, 1, 40), (3, 1, 40)),
    "many positions": ((2, 300, 24), 1, (2, 24), (2, 24)),
    "one for all": ((3, 7, 40), 1, (40,), (1, 1, 40)),
    "tokens": ((3, 7, 40), 1, (3, 7, 40), (3, 7, 40)),
    "samples and tokens": ((3, 7, 40), 1, (3, 40), (3, 7, 40)),
    "frames": ((2, 3, 5, 33), 1, (2, 3, 1, 33), (2, 3, 1, 33)),
    "two dimensions of positions": ((2, 3, 5, 33), 1, (2, 33), (2, 1, 1, 33)),
    "not the first": ((2, 3, 5, 33), 1, (1, 3, 1, 33), (1, 3, 1, 33)),
    "the last alone": ((2, 5, 33), 1, (1, 5, 33), (1, 1, 33)),
    "of one element": ((3, 7, 40), 1, (3, 7, 1), (3, 1)),
    "a number": ((3, 7, 40), 1, (), (1,)),
    "a matrix": ((9, 130), 1, (9, 130), (9, 130)),
    "a vector": ((33,), 1, (33,), (33,)),
    "a vector for a matrix": ((9, 130), 1, (130,), (1, 130)),
    "several dimensions": ((3, 5, 4, 6), 2, (3, 1, 4, 6), (3, 5, 1, 6)),
    "all dimensions": ((4, 6), 2, (4, 6), (6,)),
    "long rows": ((2, 3, 2050), 1, (2, 2050), (2, 2050)),
    "one position": ((5, 1, 17), 1, (5, 17), (5, 1, 17)),
    "one sample": ((1, 70, 17), 1, (1, 17), (1, 17)),
}


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, offset: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) + offset).to(dtype)


def given(
    family: str,
    shape: Sequence[int],
    dims: int,
    scale: Sequence[int],
    shift: Sequence[int],
    dtype: torch.dtype = torch.float32,
    offset: float = 0.0,
    seed: int = 0,
) -> Tensors:
    parameter = shape[len(shape) - dims :]
    tensors = {"input": drawn(*shape, dtype=dtype, seed=seed, offset=offset)}
    tensors["weight"] = drawn(*parameter, dtype=dtype, seed=seed + 1)
    if family == "layer_norm":
        tensors["bias"] = drawn(*parameter, dtype=dtype, seed=seed + 2)
    tensors |= {"scale": drawn(*scale, dtype=dtype, seed=seed + 3), "shift": drawn(*shift, dtype=dtype, seed=seed + 4)}
    return tensors | {"grad_output": drawn(*shape, dtype=dtype, seed=seed + 5)}


def called(family: str, tensors: Tensors, dims: int, activation: Any = None, channel_dim: int = -1) -> Tensor:
    x = tensors["input"]
    shape = (x.shape[1],) if channel_dim == 1 else tuple(x.shape[x.dim() - dims :])
    weight, bias, scale, shift = (tensors.get(name) for name in PARAMETERS)
    parts: dict[str, Any] = {"activation": activation, "channel_dim": channel_dim, "scale": scale, "shift": shift}
    if family == "rms_norm":
        return fusednorm.rms_norm(x, shape, weight, EPS, **parts)
    return fusednorm.layer_norm(x, shape, weight, bias, EPS, **parts)


def formula(family: str, tensors: Tensors, dims: int, activation: str | None = None, channel_dim: int = -1) -> Tensor:
    """The same in plain operations of torch, in the dtype of the tensors."""
    x = tensors["input"].movedim(1, -1) if channel_dim == 1 else tensors["input"]
    axes = tuple(range(-dims, 0))
    if family == "layer_norm":
        x = x - x.mean(axes, keepdim=True)
    xhat = x * (x.square().mean(axes, keepdim=True) + EPS).rsqrt()
    weight, bias, scale, shift = (tensors.get(name) for name in PARAMETERS)
    factor = 1.0 if scale is None else 1.0 + across(scale, x, dims)
    z = xhat * ((1.0 if weight is None else weight) * factor)
    z = z + ((0.0 if bias is None else bias) * factor + (0.0 if shift is None else across(shift, x, dims)))
    y = z if activation is None else VALUES[activation](z, 1.0)
    return y.movedim(-1, 1) if channel_dim == 1 else y


def across(modulation: Tensor, x: Tensor, dims: int) -> Tensor:
    if modulation.dim() == 2 and x.dim() > dims:
        return modulation.reshape(modulation.shape[0], *[1] * (x.dim() - 2), modulation.shape[1])
    return modulation


def differentiated(run: Callable[[Tensors], Tensor], tensors: Tensors, wanted: Sequence[str] | None = None) -> Tensors:
    """The output and the gradients, by autograd."""
    names = [name for name in ("input", *PARAMETERS) if name in tensors and (wanted is None or name in wanted)]
    leaves = {name: tensors[name].detach().requires_grad_() for name in names}
    output = run({**tensors, **leaves})
    found = torch.autograd.grad(output, list(leaves.values()), tensors["grad_output"]) if leaves else ()
    return {"output": output.detach()} | {f"grad_{name}": one for name, one in zip(names, found, strict=True)}


def faults(
    family: str, tensors: Tensors, found: Tensors, dims: int = 1, activation: str | None = None, channel_dim: int = -1
) -> list[str]:
    """What is wrong with results, by the rule of tolerance.py."""
    return faults_of(family, [(tensors, found)], dims, activation, channel_dim)


def faults_of(
    family: str,
    draws: list[tuple[Tensors, Tensors]],
    dims: int = 1,
    activation: str | None = None,
    channel_dim: int = -1,
) -> list[str]:
    """What is wrong with the results of several draws of one form, judged together."""

    def by_formula(dtype: torch.dtype) -> Tensors:
        exact = [{name: tensor.to(dtype) for name, tensor in tensors.items()} for tensors, _ in draws]
        return stacked([differentiated(lambda t: formula(family, t, dims, activation, channel_dim), e) for e in exact])

    wanted, plain, given = by_formula(torch.float64), by_formula(torch.float32), stacked([each for each, _ in draws])
    x = given["input"].double()
    axes = (2,) if channel_dim == 1 else tuple(range(-dims, 0))
    offset = 1.0
    if x.numel():
        mean = x.mean(axes, keepdim=True)
        offset = max(1.0, float((mean.abs() * (x.sub(mean).square().mean(axes, keepdim=True) + EPS).rsqrt()).max()))
    words = []
    for name, got in stacked([each for _, each in draws]).items():
        like = given["input" if name == "output" else name.removeprefix("grad_")]
        if got.dtype != like.dtype or got.shape != like.shape:
            words.append(f"{name}: {got.dtype} {tuple(got.shape)}")
        if got.dtype == torch.float64 and given["input"].dtype != torch.float64:
            got = got.float()  # computed in float32, as the plain formula
        terms = max(1, x.numel() // max(1, got.numel()))
        fault = judge(got, wanted[name], plain[name], offset=offset, terms=terms).fault
        words += [] if fault is None else [f"{name}: {fault}"]
    return words


def stacked(draws: list[Tensors]) -> Tensors:
    return {name: torch.stack([each[name] for each in draws]) for name in draws[0]}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_results_are_right(family: str, dtype: torch.dtype) -> None:
    for name, (shape, dims, scale, shift) in FORMS.items():
        for offset in (0.0, 1000.0):
            draws = []
            for draw in range(max(1, VALUES_JUDGED // min(prod(scale), prod(shift)))):
                tensors = given(family, shape, dims, scale, shift, dtype, offset, seed=10 * draw)
                found = differentiated(lambda t, d=dims: called(family, t, d, ACTIVATED[dtype]), tensors)  # type: ignore[misc]
                assert found["output"].stride() == found["grad_input"].stride() == tensors["input"].stride()
                draws.append((tensors, found))
            assert faults_of(family, draws, dims, ACTIVATED[dtype]) == [], (name, offset)


@pytest.mark.parametrize("family", FAMILIES)
def test_operands_may_be_absent_or_of_another_dtype(family: str) -> None:
    for dtype, present in (
        (torch.float64, PARAMETERS), (torch.bfloat16, ("weight", "scale")), (torch.float16, ("bias", "shift")),
        (torch.float32, ("scale",)), (torch.bfloat16, ("shift",)), (torch.float16, ("weight", "bias", "scale")),
    ):  # fmt: skip
        for shape, scale in (((3, 7, 40), (3, 40)), ((3, 7, 600), (3, 7, 600))):
            tensors = given(family, shape, 1, scale, scale)
            for name in PARAMETERS:
                if name in tensors and name not in present:
                    del tensors[name]
                elif name in tensors:
                    tensors[name] = tensors[name].to(dtype)
            found = differentiated(lambda t: called(family, t, 1, "silu"), tensors)
            assert faults(family, tensors, found, 1, "silu") == [], (dtype, present)


def test_the_operands_have_dtypes_of_their_own() -> None:
    tensors = given("layer_norm", (3, 7, 40), 1, (3, 40), (3, 40), torch.bfloat16)
    for name, dtype in zip(PARAMETERS, (torch.float32, torch.float16, torch.float64, torch.bfloat16), strict=True):
        tensors[name] = tensors[name].to(dtype)
    found = differentiated(lambda t: called("layer_norm", t, 1), tensors)
    assert faults("layer_norm", tensors, found) == []


@pytest.mark.parametrize(
    "wanted", [(), ("input",), ("scale",), ("weight", "shift"), ("bias", "scale", "input")], ids=str
)
def test_some_gradients_alone(wanted: tuple[str, ...]) -> None:
    tensors = given("layer_norm", (3, 7, 40), 1, (3, 40), (3, 40))
    whole = differentiated(lambda t: called("layer_norm", t, 1), tensors)
    found = differentiated(lambda t: called("layer_norm", t, 1), tensors, wanted)
    assert set(found) == {"output", *(f"grad_{name}" for name in wanted)}
    for name, one in found.items():
        torch.testing.assert_close(one, whole[name])


def last(tensor: Tensor) -> Tensor:
    """The same values with the channels of each position side by side."""
    return tensor.movedim(1, -1).contiguous().movedim(-1, 1)


@pytest.mark.parametrize("order", [Tensor.contiguous, last], ids=["first", "last"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_channels_of_images(family: str, dtype: torch.dtype, order: Callable[[Tensor], Tensor]) -> None:
    for shape in ((3, 40, 5, 7), (2, 24, 130), (2, 33, 1, 1), (5, 9), (1, 70, 3, 4, 5), (3, 20, 40, 41)):
        plain = given(family, (shape[0], *shape[2:], shape[1]), 1, shape[:2], shape[:2], dtype)
        moved = {name: order(plain[name].movedim(-1, 1)) for name in ("input", "grad_output")}
        tensors = {**plain, **moved}
        found = differentiated(lambda t: called(family, t, 1, ACTIVATED[dtype], 1), tensors)
        assert faults(family, tensors, found, 1, ACTIVATED[dtype], 1) == [], shape
        assert found["output"].stride() == found["grad_input"].stride() == tensors["input"].stride()


MEMORY: dict[str, Callable[[Tensor], Tensor]] = {
    "tokens of a sequence": lambda x: torch.cat((x, x), 1)[:, : x.shape[1]],
    "elements of a row": lambda x: torch.cat((x, x), -1)[..., : x.shape[-1]],
    "every second element": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "positions before samples": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "elements before positions": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "samples last": lambda x: x.permute(1, 2, 0).contiguous().permute(2, 0, 1),
    "expanded samples": lambda x: x[:1].expand(x.shape),
    "expanded positions": lambda x: x[:, :1].expand(x.shape),
}


@pytest.mark.parametrize("name", MEMORY)
def test_any_strides(name: str) -> None:
    """Of the input, of the gradient, and of both; the output of a dense input has its strides."""
    for modulation in ((3, 40), (3, 7, 40), (40,)):
        for first in (MEMORY[name], Tensor.contiguous):
            for second in (MEMORY[name], Tensor.contiguous):
                tensors = given("layer_norm", (3, 7, 40), 1, modulation, modulation)
                tensors |= {"input": first(tensors["input"]), "grad_output": second(tensors["grad_output"])}
                found = differentiated(lambda t: called("layer_norm", t, 1), tensors)
                assert faults("layer_norm", tensors, found) == [], (modulation, first, second)
                if is_dense(tensors["input"]):
                    assert found["output"].stride() == tensors["input"].stride()


def test_scale_and_shift_of_any_strides() -> None:
    base = given("layer_norm", (3, 7, 40), 1, (3, 40), (3, 40))
    packed = drawn(3, 6, 40, seed=9)
    for scale, shift in (
        (packed[:, 1], packed[:, 4]), (packed[:1, 0].expand(3, 40), packed[:, :1, :1].expand(3, 1, 40)),
        (drawn(40, 3).t(), drawn(3, 80)[:, ::2]), (torch.zeros(()).expand(3, 40), packed[:, 2]),
    ):  # fmt: skip
        tensors = {**base, "scale": scale, "shift": shift}
        found = differentiated(lambda t: called("layer_norm", t, 1), tensors)
        assert faults("layer_norm", tensors, found) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_empty_inputs(family: str) -> None:
    for shape in ((0, 7, 40), (3, 0, 40), (3, 7, 0), (0, 0, 0)):
        tensors = given(family, shape, 1, (shape[0], shape[2]), (shape[0], 1, shape[2]))
        found = differentiated(lambda t: called(family, t, 1), tensors)
        assert found["output"].shape == found["grad_input"].shape == shape
        assert all(not one.count_nonzero() for name, one in found.items() if name.startswith("grad"))


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_one_element(family: str) -> None:
    tensors = given(family, (3, 7, 1), 1, (3, 1), (3, 1))
    assert faults(family, tensors, differentiated(lambda t: called(family, t, 1), tensors)) == []


def test_a_nan_stays_in_its_row_and_sample() -> None:
    tensors = given("layer_norm", (3, 9, 40), 1, (3, 40), (3, 40))
    clean = differentiated(lambda t: called("layer_norm", t, 1), tensors)
    poisoned = tensors["input"].clone()
    poisoned[1, 4, 17] = float("nan")
    found = differentiated(lambda t: called("layer_norm", t, 1), {**tensors, "input": poisoned})
    outside = torch.ones(3, 9, dtype=torch.bool)
    outside[1, 4] = False
    for name in ("output", "grad_input"):
        assert same_bits(found[name][outside], clean[name][outside])
    for name in ("grad_scale", "grad_shift"):
        assert same_bits(found[name][[0, 2]], clean[name][[0, 2]])
    assert found["grad_scale"][1].isnan().all()


@pytest.mark.parametrize("order", [Tensor.contiguous, last], ids=["first", "last"])
def test_the_bits_depend_on_no_number_of_threads(order: Callable[[Tensor], Tensor]) -> None:
    tensors = given("layer_norm", (3, 40, 41, 96), 1, (3, 96), (3, 96))
    moved = {name: order(tensors[name].movedim(-1, 1)) for name in ("input", "grad_output")}
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3, 1):
            torch.set_num_threads(threads)
            found.append(differentiated(lambda t: called("layer_norm", t, 1, "silu", 1), {**tensors, **moved}))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(same_bits(found[0][name], other[name]) for name in found[0])


# --- derivatives, transforms and compilers ---


@pytest.mark.parametrize("family", FAMILIES)
def test_second_derivatives(family: str) -> None:
    for shape, scale, channel_dim in (((2, 3, 4), (2, 4), -1), ((2, 3, 4), (2, 3, 1), -1), ((2, 4, 3), (2, 4), 1)):
        tensors = given(family, shape, 1, scale, scale, torch.float64)
        if channel_dim == 1:
            tensors |= {name: drawn(4, dtype=torch.float64) for name in ("weight", "bias") if name in tensors}
        names = [name for name in ("input", *PARAMETERS) if name in tensors]

        def run(*leaves: Tensor, channel_dim: int = channel_dim, names: list[str] = names) -> Tensor:
            return called(family, dict(zip(names, leaves, strict=True)), 1, "gelu", channel_dim)

        inputs = tuple(tensors[name].requires_grad_() for name in names)
        assert torch.autograd.gradcheck(run, inputs, check_batched_grad=True)
        assert torch.autograd.gradgradcheck(run, inputs)


def test_functorch() -> None:
    tensors = given("layer_norm", (4, 3, 5, 8), 1, (4, 3, 8), (4, 3, 8))
    x, scale, shift = tensors["input"], tensors["scale"], tensors["shift"]

    def run(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return fusednorm.layer_norm(x, (8,), tensors["weight"], tensors["bias"], scale=scale, shift=shift)

    mapped = torch.func.vmap(run)(x, scale, shift)
    torch.testing.assert_close(mapped, torch.stack([run(*one) for one in zip(x, scale, shift, strict=True)]))
    torch.testing.assert_close(
        torch.func.vmap(run, (None, 0, None))(x[0], scale, shift[0])[1], run(x[0], scale[1], shift[0])
    )
    found = torch.func.grad(lambda scale: run(x[0], scale, shift[0]).square().sum())(scale[0])
    leaf = scale[0].detach().requires_grad_()
    (expected,) = torch.autograd.grad(run(x[0], leaf, shift[0]).square().sum(), leaf)
    torch.testing.assert_close(found, expected)
    _, tangent = torch.func.jvp(lambda scale: run(x[0], scale, shift[0]), (scale[0],), (scale[1],))
    assert tangent.shape == x[0].shape


@pytest.mark.parametrize("family", FAMILIES)
def test_the_registered_op(family: str) -> None:
    for x, channel_dim in (
        (drawn(2, 5, 6), -1),
        (drawn(2, 3, 5, 6), -1),
        (drawn(2, 8, 6)[:, :5], -1),
        (drawn(2, 6, 5), 1),
    ):
        weight, bias = drawn(6, seed=1), None if family == "rms_norm" else drawn(6, seed=2)
        scale, shift = drawn(2, 6, seed=3), drawn(2, 6, seed=4)
        rest = (None, None, family, 0, channel_dim, EPS, "silu", 1.0)
        torch.library.opcheck(torch.ops.fusednorm.norm_forward.default, (x, weight, bias, scale, shift, *rest))
        leaves = [None if one is None else one.detach().requires_grad_() for one in (x, weight, bias, scale, shift)]
        torch.library.opcheck(torch.ops.fusednorm.norm_forward.default, (*leaves, *rest))


def test_the_op_takes_no_modulation_of_trailing_dimensions() -> None:
    x = drawn(2, 5, 6)
    run, rest = torch.ops.fusednorm.norm_forward, (None, None, None, "layer_norm")
    with pytest.raises(ValueError, match="scale is given to layer_norm over 1 trailing dimensions"):
        run(x, None, None, drawn(2, 6), *rest, 1, 1, EPS, "", 0.0)
    with pytest.raises(ValueError, match=r"scale has shape \(2, 5\)"):
        run(x, None, None, drawn(2, 5), *rest, 0, -1, EPS, "", 0.0)


class Block(torch.nn.Module):
    """adaLN of a small transformer, and the channels of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.condition = torch.nn.Linear(6, 24)
        self.first, self.second = nn.LayerNorm(6, elementwise_affine=False), nn.RMSNorm(6, 1e-6, activation="silu")
        self.image = nn.LayerNorm2d(6)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        scale, shift, other, third = self.condition(c).chunk(4, -1)
        y = self.second(self.first(x, scale=scale, shift=shift) + x, scale=other)
        return self.image(y.transpose(1, 2), scale=scale, shift=third)  # type: ignore[no-any-return]


def test_under_torch_compile() -> None:
    block = Block()
    compiled = torch.compile(block, fullgraph=True)
    for batch in (2, 3, 4):
        grads = []
        for call in (block, compiled):
            x, c = (drawn(batch, *shape).requires_grad_() for shape in ((5, 6), (6,)))
            y = call(x, c)
            grads.append((y, *torch.autograd.grad(y.square().sum(), (x, c, *block.parameters()))))
        for one, other in zip(*grads, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_exported() -> None:
    block, arguments = Block().eval(), (drawn(2, 5, 6), drawn(2, 6, seed=1))
    program = torch.export.export(block, arguments)
    torch.testing.assert_close(program.module()(*arguments), block(*arguments))
    plain = program.run_decompositions(fusednorm.decompositions())
    assert not any("fusednorm" in str(node.target) for node in plain.graph.nodes)
    torch.testing.assert_close(plain.module()(*arguments), block(*arguments))


# --- calls ---


def test_calls_that_repeat() -> None:
    """The shorter way of calls like earlier ones takes the scale and shift of each call."""
    for shape, scale in (((3, 7, 40), (3, 40)), ((3, 7, 40), (3, 7, 40)), ((2, 3, 5, 33), (2, 3, 1, 33))):
        for seed in range(4):
            tensors = {name: one + seed for name, one in given("layer_norm", shape, 1, scale, scale).items()}
            found = differentiated(lambda t: called("layer_norm", t, 1), tensors)
            assert faults("layer_norm", tensors, found) == []
            assert torch.equal(called("layer_norm", tensors, 1), found["output"])
            bare = {name: one for name, one in tensors.items() if name not in ("scale", "shift")}
            found = differentiated(lambda t: called("layer_norm", t, 1), bare)
            assert faults("layer_norm", bare, found) == []


def test_instances_and_explain() -> None:
    x, scale = drawn(2, 5, 24), drawn(2, 24)
    found = fusednorm.explain(fusednorm.layer_norm, x, (24,), scale=scale)
    assert (found.instance, found.copies, found.problem.statistics_shape) == ("cpu.rows", (), (2, 5))
    for direction in ("forward", "backward"):
        able = fusednorm.instances(fusednorm.rms_norm, x, (24,), shift=scale, direction=direction)
        assert [one.instance.name for one in able if one.reason is None] == ["cpu.rows", "reference"]
    image = drawn(2, 24, 5, 7)
    assert fusednorm.explain(fusednorm.layer_norm, image, (24,), scale=scale, channel_dim=1).instance == "cpu.columns"
    assert (
        fusednorm.explain(fusednorm.layer_norm, last(image), (24,), scale=scale, channel_dim=1).instance == "cpu.rows"
    )


@pytest.mark.parametrize("order", [Tensor.contiguous, last], ids=["first", "last"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_configurations_of_the_cpu_are_right(direction: str, order: Callable[[Tensor], Tensor]) -> None:
    """Of every size of blocks and of segments, in samples that are cut unevenly."""
    tensors = given("layer_norm", (3, 9, 211, 96), 1, (3, 96), (3, 96))
    tensors |= {name: order(tensors[name].movedim(-1, 1)) for name in ("input", "grad_output")}
    norm = norm_of("layer_norm", 0)
    parameters = [tensors[name] for name in PARAMETERS]
    forward = Operands(tensors["input"], *parameters)
    instance: Any = COLUMNS if order is Tensor.contiguous else ROWS
    made = instance.plan(forward_problem(norm, forward))(forward)
    backward = BackwardOperands(tensors["grad_output"], tensors["input"], made.mean, made.rstd, *parameters)
    problem = forward_problem(norm, forward) if direction == "forward" else backward_problem(norm, backward)
    configs = instance.configs(problem)
    assert len(configs) > 1 or direction == "forward"
    for config in configs:
        plan = instance.plan(problem, config)
        if direction == "forward":
            found = {"output": plan(forward).output}
        else:
            gradients = plan(backward, (True,) * 5)
            found = {f"grad_{name}": getattr(gradients, name) for name in ("input", *PARAMETERS)}
        assert faults("layer_norm", tensors, found, channel_dim=1) == [], config


INTERPRETED = """
import json
import torch
from test_modulated_rows import EPS, PARAMETERS, faults, given
from fusednorm.backends.triton.config.kinds import (
    ColumnsBackwardConfig, PositionsConfig, RowsBackwardConfig, StepsConfig
)
from fusednorm.backends.triton.instances import ROWS, choose
from fusednorm.norm import norm_of
from fusednorm.operands import BackwardOperands, Operands
from fusednorm.problems import backward_problem, forward_problem

found = []


def check(family, shape, dtype, activation, memory, modulated, instance=None, forward=None, backward=None):
    tensors = given(family, shape, 1, (shape[0], shape[-1]), (shape[0], shape[-1]), dtype)
    for name in ("input", "grad_output") if memory == "first" else ("input",) if memory == "sliced" else ():
        one = tensors[name]
        wide = torch.cat((one, one), 1)[:, : shape[1]]
        tensors[name] = one.transpose(1, 2).contiguous().transpose(1, 2) if memory == "first" else wide
    if not modulated:
        del tensors["scale"], tensors["shift"]
    parameters = [tensors.get(name) for name in PARAMETERS]
    norm, operands = norm_of(family, 0, -1, EPS, activation), Operands(tensors["input"], *parameters)
    problem = forward_problem(norm, operands)
    made = (instance or choose(problem)).plan(problem, forward)(operands)
    gradient = BackwardOperands(tensors["grad_output"], operands.input, made.mean, made.rstd, *parameters)
    problem = backward_problem(norm, gradient)
    gradients = (instance or choose(problem)).plan(problem, backward)(gradient, (True,) * 5)
    names = [name for name in ("input", *PARAMETERS) if name in tensors]
    results = {"output": made.output} | {f"grad_{name}": getattr(gradients, name) for name in names}
    words = faults(family, tensors, results, 1, activation)
    found.extend(f"{family} {shape} {memory} {modulated} {backward}: {one}" for one in words)


for memory in ("dense", "sliced", "first"):
    for modulated in (True, False):
        check("layer_norm", (2, 5, 12), torch.float32, "silu", memory, modulated)
        check("rms_norm", (3, 4, 33), torch.float16, None, memory, modulated)
for memory, modulated in (("dense", True), ("sliced", True), ("sliced", False)):
    shape, step = (2, 7, 12), StepsConfig(8, 1)
    for backward in (
        RowsBackwardConfig(2, 1, 4), RowsBackwardConfig(1, 1, 3, reload=True), ColumnsBackwardConfig(8, 1, 4, 8, 3, 1)
    ):
        check("layer_norm", shape, torch.float32, None, memory, modulated, ROWS, step, backward)
check("layer_norm", (5, 1, 12), torch.float64, None, "dense", True)
steps = PositionsConfig(4, 8, 1)
check("layer_norm", (2, 9, 12), torch.float32, "silu", "first", True, None, steps, steps)
for shape in ((0, 5, 12), (2, 0, 12)):
    check("layer_norm", shape, torch.float32, None, "dense", True)
print(json.dumps(found))
"""


def test_triton_in_the_interpreter() -> None:
    """Whole rows, rows in steps, long rows by columns, and channels_first; rows of one stride and of two."""
    pytest.importorskip("triton")
    assert interpreted(INTERPRETED) == []


@pytest.mark.parametrize(
    ("shape", "scale", "words"),
    [
        ((2, 5, 6), (5, 6), r"scale has shape \(5, 6\); expected one that broadcasts .* such as \(2, 6\)"),
        ((2, 5, 6), (2, 5), r"scale has shape \(2, 5\)"),
        ((2, 5, 6), (2, 5, 6, 1), r"scale has shape \(2, 5, 6, 1\)"),
        ((2, 5, 6), (2, 4, 6), r"scale has shape \(2, 4, 6\)"),
        ((6,), (1, 6), r"scale has shape \(1, 6\)"),
    ],
)
def test_shapes_that_do_not_fit(shape: tuple[int, ...], scale: tuple[int, ...], words: str) -> None:
    for function in (fusednorm.layer_norm, fusednorm.rms_norm):
        with pytest.raises(ValueError, match=words):
            function(drawn(*shape), shape[-1:], scale=drawn(*scale))
        with pytest.raises(ValueError, match=words.replace("scale", "shift")):
            function(drawn(*shape), shape[-1:], shift=drawn(*scale))


def test_arguments_that_do_not_fit() -> None:
    x = drawn(2, 5, 6)
    with pytest.raises(TypeError, match="scale is a float; expected"):
        fusednorm.layer_norm(x, (6,), scale=1.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"shift has dtype torch\.int64; expected float64"):
        fusednorm.rms_norm(x, (6,), shift=torch.ones(2, 6, dtype=torch.int64))
    with pytest.raises(ValueError, match="scale is on meta and input on cpu"):
        fusednorm.layer_norm(x, (6,), scale=torch.ones(2, 6, device="meta"))
    with pytest.raises(ValueError, match=r"scale has shape \(2, 1\); expected \(2, 5\), \(N, C\)"):
        fusednorm.layer_norm(x, (5,), scale=drawn(2, 1), channel_dim=1)
    with pytest.raises(ValueError, match="normalized_shape is"):
        fusednorm.layer_norm(x, (5,), scale=drawn(2, 6))


# --- modules ---


def test_modules() -> None:
    x, scale, shift = drawn(2, 5, 6), drawn(2, 6, seed=1), drawn(2, 6, seed=2)
    for module in (nn.LayerNorm(6), nn.LayerNorm(6, elementwise_affine=False), nn.RMSNorm(6, 1e-6)):
        right = module(x) * (1 + scale[:, None]) + shift[:, None]
        for other in (module, copy.deepcopy(module)):
            torch.testing.assert_close(other(x, scale=scale, shift=shift), right)
        with torch.autocast("cpu", torch.bfloat16):
            assert module(x, scale=scale, shift=shift).dtype == torch.float32
            assert module(x.bfloat16(), scale=scale, shift=shift).dtype == torch.bfloat16
    image = drawn(2, 6, 3, 4)
    module = nn.LayerNorm2d(6)
    right = module(image) * (1 + scale[..., None, None]) + shift[..., None, None]
    torch.testing.assert_close(module(image, scale=scale, shift=shift), right)


def test_modules_under_torch_fx() -> None:
    block, arguments = Block(), (drawn(2, 5, 6), drawn(2, 6, seed=1))
    graph = torch.fx.symbolic_trace(block)
    assert [node.target for node in graph.graph.nodes if node.op == "call_module"][1:] == ["first", "second", "image"]
    torch.testing.assert_close(graph(*arguments), block(*arguments))
    alone = torch.fx.symbolic_trace(nn.LayerNorm(6))
    torch.testing.assert_close(alone(arguments[0]), F.layer_norm(arguments[0], (6,)))
