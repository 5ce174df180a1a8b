"""layer_norm and rms_norm with an 8-bit output, against float64 and against torch's own conversions."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from quantization_support import (
    OUT_DTYPES,
    bits,
    drawn,
    error_of_float32,
    faults,
    hard_numbers,
    name_of,
    wide,
)
from torch import Tensor

import fusednorm
from fusednorm import dispatch
from fusednorm.backends import reference
from fusednorm.choice import choose
from fusednorm.formats import FORMATS, LEAST_AMAX, Quantized
from fusednorm.norm import Family, norm_of
from fusednorm.operands import Operands, Sums
from fusednorm.problems import quantized_problem

FAMILIES: tuple[Family, ...] = ("layer_norm", "rms_norm")
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
SIZES = (1, 3, 1001, 4096, 12288)
E4M3, E5M2, INT8 = OUT_DTYPES


def normalize(family: Family, x: Tensor, weight: Tensor | None, bias: Tensor | None, **keywords: Any) -> Any:
    if family == "rms_norm":
        return fusednorm.rms_norm(x, x.shape[-1:], weight, 1e-5, **keywords)
    return fusednorm.layer_norm(x, x.shape[-1:], weight, bias, 1e-5, **keywords)


def parameters(family: Family, size: int) -> tuple[Tensor, Tensor | None]:
    return drawn(size, seed=1), None if family == "rms_norm" else drawn(size, seed=2)


@pytest.mark.parametrize("out_dtype", OUT_DTYPES, ids=name_of)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("family", FAMILIES)
def test_scales_of_rows(family: Family, dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    for size in SIZES:
        x, (weight, bias) = drawn(5, size, dtype=dtype), parameters(family, size)
        q, scale = normalize(family, x, weight, bias, out_dtype=out_dtype)
        assert (q.dtype, q.shape, scale.dtype, scale.shape) == (out_dtype, x.shape, torch.float32, (5, 1))
        y = wide(family, x, weight, bias)
        assert faults(q, scale, y, error_of_float32(family, x, weight, bias, y), True) == []


@pytest.mark.parametrize(
    ("dtype", "out_dtype"),
    [(torch.float32, each) for each in OUT_DTYPES]
    + [(torch.float64, INT8), (torch.float16, E5M2), (torch.bfloat16, E4M3)],
    ids=name_of,
)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_given_scale(family: Family, dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    for size in SIZES:
        x, (weight, bias) = drawn(5, size, dtype=dtype), parameters(family, size)
        out_scale = torch.tensor(0.013, dtype=torch.float64)
        q = normalize(family, x, weight, bias, out_dtype=out_dtype, out_scale=out_scale)
        y = wide(family, x, weight, bias)
        error = error_of_float32(family, x, weight, bias, y)
        assert faults(q, out_scale.float(), y, error, False) == []


@pytest.mark.parametrize("out_dtype", OUT_DTYPES, ids=name_of)
def test_the_reference(out_dtype: torch.dtype) -> None:
    x, (weight, bias) = drawn(4, 7, 100), parameters("layer_norm", 100)
    y = wide("layer_norm", x, weight, bias)
    error = error_of_float32("layer_norm", x, weight, bias, y)
    with fusednorm.use_instance("reference"):
        q, scale = normalize("layer_norm", x, weight, bias, out_dtype=out_dtype, out_scale="row")
        given = normalize("layer_norm", x, weight, bias, out_dtype=out_dtype, out_scale=torch.tensor([0.02]))
    assert scale.shape == (4, 7, 1)
    assert faults(q, scale, y, error, True) == []
    assert faults(given, torch.tensor(0.02), y, error, False) == []


# --- the rounding ---


@pytest.mark.parametrize("out_dtype", OUT_DTYPES, ids=name_of)
def test_the_cpu_rounds_every_number_as_torch_does(out_dtype: torch.dtype) -> None:
    numba = pytest.importorskip("numba")
    from numba import types
    from numba.extending import intrinsic

    from fusednorm.backends.cpu.kernels.codes import narrowing

    narrow = narrowing(FORMATS[name_of(out_dtype)])

    @intrinsic
    def code(typing_context: Any, v: Any) -> Any:
        return types.uint8(types.float32), lambda context, builder, signature, given: narrow(builder, given[0])

    @numba.njit
    def every(values: Any, codes: Any) -> None:
        for k in range(values.size):
            codes[k] = code(values[k])

    values = hard_numbers(out_dtype)
    found = torch.empty(values.shape, dtype=torch.uint8)
    every(values.numpy(), found.numpy())
    assert torch.equal(found, bits(reference.codes(values, Quantized(name_of(out_dtype), True))))


@pytest.mark.parametrize("out_dtype", [E4M3, E5M2], ids=name_of)
def test_the_reference_saturates_where_torch_may_not(out_dtype: torch.dtype) -> None:
    values = hard_numbers(out_dtype)
    largest = torch.finfo(out_dtype).max
    inside = values.abs() <= largest
    found = reference.codes(values, Quantized(name_of(out_dtype), True))
    assert torch.equal(bits(found[inside]), bits(values[inside].to(out_dtype)))
    outside = ~inside & ~values.isnan()
    assert torch.equal(found[outside].float(), largest * values[outside].sign())
    assert found[values.isnan()].float().isnan().all()


def test_int8_rounds_to_even_and_saturates() -> None:
    values = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.5, 1e9, -127.5, -128.4, -129.0, -1e9, torch.nan])
    found = reference.codes(values, Quantized("int8", False))
    assert found.tolist() == [0, 2, 2, 0, -2, 126, 127, 127, -128, -128, -128, -128, 0]


# --- numbers that are none, and rows of zeros ---


@pytest.mark.parametrize("instance", ["cpu.rows", "reference"])
@pytest.mark.parametrize("out_dtype", OUT_DTYPES, ids=name_of)
def test_special_numbers(out_dtype: torch.dtype, instance: str) -> None:
    """A NaN or an infinity stays in its row, whose scale is NaN; a row of zeros has the least scale."""
    x = drawn(5, 40)
    x[0, 3], x[1, 7], x[2] = torch.nan, torch.inf, 0.0
    with fusednorm.use_instance(instance):
        q, scale = fusednorm.rms_norm(x, (40,), out_dtype=out_dtype)
        given = fusednorm.rms_norm(x, (40,), out_dtype=out_dtype, out_scale=torch.tensor(0.1))
    assert scale[:2].isnan().all()
    assert scale[2:].isfinite().all()
    assert scale[2] == torch.tensor(LEAST_AMAX) / FORMATS[name_of(out_dtype)].largest
    assert (q[2].float() == 0).all()
    nans = torch.zeros(5, 40, dtype=torch.bool)
    if out_dtype is not INT8:
        nans[:2] = True
    assert torch.equal(q.float().isnan(), nans)
    nans[1] = False
    if out_dtype is not INT8:
        nans[1, 7] = True  # inf · rstd, which is inf · 0; the others are 0
    assert torch.equal(given.float().isnan(), nans)


@pytest.mark.parametrize("instance", ["cpu.rows", "reference"])
@pytest.mark.parametrize("out_dtype", OUT_DTYPES, ids=name_of)
def test_an_infinite_output(out_dtype: torch.dtype, instance: str) -> None:
    """It saturates under a given scale; a row's own scale is inf."""
    x, weight = drawn(2, 40), torch.ones(40)
    weight[5] = torch.inf
    x[:, 5] = torch.tensor([1.0, -1.0])
    with fusednorm.use_instance(instance):
        _, scale = fusednorm.rms_norm(x, (40,), weight, out_dtype=out_dtype)
        given = fusednorm.rms_norm(x, (40,), weight, out_dtype=out_dtype, out_scale=torch.tensor(0.1)).float()
    form = FORMATS[name_of(out_dtype)]
    assert scale.isposinf().all()
    assert given[:, 5].tolist() == [form.largest, -form.most_negative]


# --- shapes, strides, determinism ---


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (2, 0, 8)])
def test_empty(shape: tuple[int, ...]) -> None:
    for instance in ("cpu.rows", "reference"):
        with fusednorm.use_instance(instance):
            q, scale = fusednorm.layer_norm(torch.empty(shape), shape[-1:], out_dtype=INT8)
            given = fusednorm.layer_norm(torch.empty(shape), shape[-1:], out_dtype=INT8, out_scale=torch.tensor(1.0))
        assert q.shape == given.shape == shape
        assert scale.shape == (*shape[:-1], 1)
        assert (scale > 0).all()


def test_several_normalized_dimensions_have_one_scale() -> None:
    x, weight = drawn(2, 3, 4, 5), drawn(4, 5, seed=1)
    q, scale = fusednorm.rms_norm(x, (4, 5), weight, 1e-5, out_dtype=INT8)
    flat = fusednorm.rms_norm(x.flatten(2), (20,), weight.flatten(), 1e-5, out_dtype=INT8)
    assert scale.shape == (2, 3, 1, 1)
    assert torch.equal(q.flatten(2), flat[0])
    assert torch.equal(scale.flatten(2), flat[1])


@pytest.mark.parametrize(
    "made",
    [
        lambda x: x.transpose(0, 1),
        lambda x: x[:, ::2],
        lambda x: x[..., :24],
        lambda x: x[..., ::2],
        lambda x: x.movedim(-1, 0),
        lambda x: x[:1].expand(4, -1, -1),
        lambda x: x.unflatten(-1, (2, 3, 8))[:, :, :, 1],
    ],
    ids=["transposed", "every other row", "part of rows", "steps in rows", "columns", "expanded", "packed heads"],
)
def test_strides(made: Any) -> None:
    """The results are those of a contiguous input; q has the strides of the norm's own output."""
    x = made(drawn(4, 6, 48))
    q, scale = fusednorm.rms_norm(x, x.shape[-1:], out_dtype=E4M3)
    right, right_scale = fusednorm.rms_norm(x.contiguous(), x.shape[-1:], out_dtype=E4M3)
    torch.testing.assert_close(scale, right_scale, rtol=4e-7, atol=0.0)
    assert (bits(q) != bits(right)).float().mean() < 0.01  # ties, where another kernel's sum differs in its last digit
    assert scale.is_contiguous()
    assert q.stride() == fusednorm.rms_norm(x, x.shape[-1:]).stride()


def test_it_is_deterministic_whatever_the_number_of_threads() -> None:
    x = drawn(300, 1001)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 1):
            torch.set_num_threads(threads)
            results.append(fusednorm.layer_norm(x, (1001,), out_dtype=E4M3))
    finally:
        torch.set_num_threads(before)
    for q, scale in results[1:]:
        assert torch.equal(bits(q), bits(results[0][0]))
        assert torch.equal(scale, results[0][1])


# --- sums, modulation, activations ---


def test_the_order_of_the_results() -> None:
    x, h, weight = drawn(3, 24), drawn(3, 24, seed=3), drawn(24, seed=1)
    for keywords in ({}, {"scale": drawn(24, seed=4)}):
        q, scale, s = fusednorm.rms_norm(x, (24,), weight, out_dtype=INT8, pre_add=h, return_sum=True, **keywords)
        given, total = fusednorm.rms_norm(
            x, (24,), weight, out_dtype=INT8, out_scale=torch.tensor(0.1), pre_add=h, return_sum=True, **keywords
        )
        assert torch.equal(s, x + h)
        assert torch.equal(total, x + h)
        alone, alone_scale = fusednorm.rms_norm(x + h, (24,), weight, out_dtype=INT8, **keywords)
        assert torch.equal(q, alone)
        assert torch.equal(scale, alone_scale)
        without = fusednorm.rms_norm(x, (24,), weight, out_dtype=INT8, pre_add=h, **keywords)
        assert torch.equal(without[0], q)
        assert len(without) == 2
        assert given.dtype == INT8


@pytest.mark.parametrize(
    ("dtype", "out_dtype", "by_row"), [(torch.bfloat16, INT8, True), (torch.float16, E4M3, False)], ids=str
)
@pytest.mark.parametrize("gate", [None, (), (2, 33), (2, 5, 33)], ids=str)
def test_a_fused_sum_is_the_sum_that_is_quantized(
    dtype: torch.dtype, out_dtype: torch.dtype, by_row: bool, gate: tuple[int, ...] | None
) -> None:
    x, h, weight = drawn(2, 5, 33, dtype=dtype), drawn(2, 5, 33, dtype=dtype, seed=3), drawn(33, seed=1)
    sums = Sums(h, None if gate is None else drawn(*gate, seed=5), None, True)
    quantized = Quantized(name_of(out_dtype), by_row)
    problem = quantized_problem(norm_of("rms_norm", 1, 1, 1e-6), Operands(x, weight), sums, quantized)
    assert choose(problem).name == "cpu.rows"
    out_scale = "row" if by_row else torch.tensor(0.05)
    *found, s = fusednorm.rms_norm(
        x, (33,), weight, 1e-6, out_dtype=out_dtype, out_scale=out_scale, **sums.keywords()
    )  # fmt: skip
    alone = fusednorm.rms_norm(s, (33,), weight, 1e-6, out_dtype=out_dtype, out_scale=out_scale)
    for got, right in zip(found, alone if by_row else (alone,), strict=True):
        assert torch.equal(got.float(), right.float())
    assert torch.equal(s, fusednorm.rms_norm(x, (33,), weight, 1e-6, **sums.keywords())[1])


def test_a_lazily_negated_scale_beside_a_sum() -> None:
    x, h = drawn(3, 24), drawn(3, 24, seed=1)
    call = partial(fusednorm.rms_norm, x, (24,), out_dtype=INT8, pre_add=h)
    negated, given = (call(out_scale=scale) for scale in (torch._neg_view(torch.tensor(-0.02)), torch.tensor(0.02)))
    assert torch.equal(negated, given)


@pytest.mark.parametrize("shape", [(2, 24), (2, 1, 24), (2, 5, 24), (24,)], ids=str)
def test_modulated_rows(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, and of a gated sum, which the same kernel makes."""
    x, scale, shift = drawn(2, 5, 24), drawn(*shape, seed=3), drawn(*shape, seed=4)
    call = partial(fusednorm.layer_norm, scale=scale, shift=shift, out_dtype=E4M3)
    q, found = call(x, (24,), None, None, 1e-5)
    y = wide("layer_norm", x, None, None, scale=scale.double(), shift=shift.double())
    assert found.shape == (2, 5, 1)
    assert faults(q, found, y, 1e-5, True) == []
    monkeypatch.delattr("fusednorm.quantization.before")
    h, gate = drawn(2, 5, 24, seed=5), drawn(2, 24, seed=6)
    *summed, s = call(x, (24,), pre_add=h, pre_gate=gate, return_sum=True)
    torch.testing.assert_close(s, x + gate[:, None] * h)
    assert all(torch.equal(one.float(), other.float()) for one, other in zip(summed, call(s, (24,)), strict=True))


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_activations_come_before_the_rounding(activation: str) -> None:
    x, weight = drawn(6, 50, dtype=torch.bfloat16), drawn(50, seed=1)
    q, scale = fusednorm.rms_norm(x, (50,), weight, 1e-5, activation=activation, out_dtype=INT8)
    assert faults(q, scale, wide("rms_norm", x, weight, None, activation=activation), 1e-4, True) == []


# --- modules ---


@pytest.mark.parametrize("kind", [fusednorm.nn.LayerNorm, fusednorm.nn.RMSNorm])
def test_modules(kind: Any) -> None:
    norm, x, h = kind(24, activation="silu").requires_grad_(False), drawn(3, 24), drawn(3, 24, seed=1)
    q, scale, s = norm(x, pre_add=h, return_sum=True, out_dtype=INT8)
    y = norm(s)
    assert (q.dtype, scale.shape) == (INT8, (3, 1))
    assert ((q * scale - y).abs() <= 0.501 * scale).all()
    assert norm(x, out_dtype=E4M3, out_scale=torch.tensor(0.1)).dtype == E4M3


def test_torch_fx_records_a_quantizing_module_as_one_call() -> None:
    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = fusednorm.nn.RMSNorm(24).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            q, scale = self.norm(x, out_dtype=INT8)
            return q * scale

    network, x = Network(), drawn(3, 24)
    traced = torch.fx.symbolic_trace(network)
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["norm"]
    assert torch.equal(traced(x), network(x))


# --- gradients, tools, errors ---


def test_it_has_no_backward() -> None:
    x = drawn(3, 8).requires_grad_()
    for given in ({"input": x}, {"input": x.detach(), "out_scale": torch.tensor(0.1, requires_grad=True)}):
        with pytest.raises(RuntimeError, match="an 8-bit output has no backward"):
            fusednorm.rms_norm(normalized_shape=(8,), out_dtype=INT8, **given)
    for off in (torch.no_grad(), torch.inference_mode()):
        with off:
            assert fusednorm.rms_norm(x, (8,), out_dtype=INT8)[0].dtype == INT8


def several(x: Tensor, h: Tensor, weight: Tensor, scale: Tensor, out_scale: Tensor) -> tuple[Tensor, ...]:
    """Quantizing calls of every kind."""
    first = fusednorm.rms_norm(x, (24,), weight, 1e-6, out_dtype=E4M3, pre_add=h, return_sum=True)
    second = fusednorm.layer_norm(x, (24,), weight, activation="silu", out_dtype=INT8, out_scale=out_scale)
    third = fusednorm.layer_norm(x, (24,), weight, scale=scale, out_dtype=E5M2, out_scale="row")
    return (*first, second, *third)


def arguments(batch: int = 2) -> tuple[Tensor, ...]:
    half = torch.float16
    x, h = drawn(batch, 5, 24, dtype=half), drawn(batch, 5, 24, dtype=half, seed=1)
    return x, h, drawn(24, seed=2), drawn(batch, 24, seed=3), torch.tensor(0.03)


def assert_same(found: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> None:
    for one, other in zip(found, right, strict=True):
        assert (one.dtype, one.stride()) == (other.dtype, other.stride())
        assert torch.equal(one.float(), other.float())


@pytest.mark.parametrize("dynamic", [False, True])
def test_under_torch_compile(dynamic: bool) -> None:
    torch.compiler.reset()
    compiled = torch.compile(several, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for batch in (2, 3):
        given = arguments(batch)
        assert_same(compiled(*given), several(*given))


def test_under_inductor() -> None:
    torch.compiler.reset()
    given = arguments()
    assert_same(torch.compile(several, fullgraph=True)(*given), several(*given))


@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.:FutureWarning")
def test_under_torch_export() -> None:
    class Network(torch.nn.Module):
        def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
            return several(*given)

    given = arguments()
    program = torch.export.export(Network(), given)
    assert_same(program.module()(*given), several(*given))
    plain = program.run_decompositions(fusednorm.decompositions())
    assert not [node for node in plain.graph.nodes if "fusednorm" in str(node.target)]
    for one, other in zip(plain.module()(*given), several(*given), strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=0.3, atol=0.02)


@pytest.mark.parametrize("out_scale", [None, torch.tensor(0.1)])
def test_the_op(out_scale: Tensor | None) -> None:
    op = torch.ops.fusednorm.norm_quantized.default
    given = (drawn(3, 8), drawn(8), None, None, None, out_scale, "rms_norm", 1, 1, 1e-5, "", 0.0)
    torch.library.opcheck(op, (*given, "int8"))
    with pytest.raises(TypeError, match=r"expected one of torch\.float8_e4m3fn"):
        op(*given, "float6")
    with pytest.raises(ValueError, match=r"norm_quantized: out_scale .*expected one element"):
        op(*given[:5], torch.ones(4), *given[6:], "int8")


def test_under_vmap() -> None:
    x = drawn(3, 4, 8)
    q, scale = torch.vmap(lambda row: fusednorm.rms_norm(row, (8,), out_dtype=INT8))(x)
    right, right_scale = fusednorm.rms_norm(x, (8,), out_dtype=INT8)
    torch.testing.assert_close(scale, right_scale)
    assert (q.int() - right.int()).abs().max() <= 1


def test_meta_tensors() -> None:
    q, scale = fusednorm.rms_norm(torch.empty(3, 8, device="meta"), (8,), out_dtype=E4M3)
    assert (q.dtype, q.shape, scale.shape) == (E4M3, (3, 8), (3, 1))


@pytest.mark.parametrize(
    ("keywords", "kind", "words"),
    [
        (
            {"out_dtype": torch.float16},
            ValueError,
            "expected one of torch.float8_e4m3fn, torch.float8_e5m2, torch.int8",
        ),
        ({"out_dtype": "int8"}, TypeError, "expected one of torch.float8_e4m3fn"),
        ({"out_scale": torch.tensor(1.0)}, ValueError, "out_dtype is None"),
        ({"out_scale": "row"}, ValueError, "out_dtype is None"),
        ({"out_dtype": INT8, "out_scale": 0.1}, TypeError, "expected a scalar tensor"),
        ({"out_dtype": INT8, "out_scale": "column"}, TypeError, "'row'"),
        ({"out_dtype": INT8, "out_scale": torch.ones(4)}, ValueError, "expected one element"),
        ({"out_dtype": INT8, "out_scale": torch.tensor(1)}, TypeError, "int64"),
        ({"out_dtype": INT8, "post_add": torch.ones(2, 8)}, ValueError, "post_add"),
        ({"out_dtype": INT8, "channel_dim": 1, "shape": (8,)}, ValueError, "over trailing dimensions quantize"),
        ({"out_dtype": INT8, "pre_add": torch.ones(2, 7)}, ValueError, "pre_add"),
        ({"out_dtype": INT8, "return_sum": True}, ValueError, "return_sum"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_errors(keywords: dict[str, Any], kind: type[Exception], words: str) -> None:
    shape = keywords.pop("shape", (8,))
    with pytest.raises(kind, match=words):
        fusednorm.layer_norm(torch.ones(2, 8), shape, **keywords)


def test_other_families_say_who_quantizes() -> None:
    op = torch.ops.fusednorm.norm_quantized.default
    with pytest.raises(ValueError, match="layer_norm and rms_norm over trailing dimensions quantize"):
        op(torch.ones(2, 8), None, None, None, None, None, "group_norm", 2, 1, 1e-5, "", 0.0, "int8")


def test_a_plan_is_made_once() -> None:
    x, norm, quantized = drawn(3, 8), norm_of("rms_norm", 1), Quantized("int8", True)
    first = dispatch.quantized_plan(norm, Operands(x), None, quantized)
    assert dispatch.quantized_plan(norm, Operands(x.clone()), None, quantized) is first
    assert dispatch.quantized_plan(norm, Operands(x), None, Quantized("int8", False)) is not first


def test_explain_says_what_is_quantized() -> None:
    found = fusednorm.explain(fusednorm.rms_norm, drawn(4, 8), (8,), out_dtype=INT8, pre_add=drawn(4, 8))
    assert (found.instance, found.composed) == ("cpu.rows", None)
    assert "float32 to int8 by row" in str(found)
    given = {"out_dtype": INT8, "out_scale": torch.tensor(1.0), "scale": drawn(4, 8)}
    assert "by a given scale" in str(fusednorm.explain(fusednorm.rms_norm, drawn(4, 8), (8,), **given))


def test_bytes_count_an_output_of_8_bits() -> None:
    x = drawn(4, 256, dtype=torch.bfloat16)
    problem = quantized_problem(norm_of("rms_norm", 1), Operands(x), None, Quantized("int8", True))
    assert problem.bytes == 4 * 256 * (2 + 1) + 4 * 4 + 4 * 4
