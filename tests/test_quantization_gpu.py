"""Quantized outputs on a GPU: every dtype, format and instance against float64; conversions, tools, determinism."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from quantization_support import OUT_DTYPES, bits, drawn, error_of_float32, faults, hard_numbers, name_of, wide
from torch import Tensor

import fusednorm
from fusednorm.backends import reference
from fusednorm.choice import all_instances, choose
from fusednorm.formats import Quantized
from fusednorm.norm import Family, norm_of
from fusednorm.operands import Operands
from fusednorm.problems import quantized_problem

pytestmark = pytest.mark.gpu

E4M3, E5M2, INT8 = OUT_DTYPES
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
#: Of these, the last one is too long for one program: it goes to the reference, or under a given scale in steps.
SIZES = (1, 3, 1001, 4096, 12288, 40000)


def normalize(family: Family, x: Tensor, weight: Tensor, bias: Tensor | None, **keywords: Any) -> Any:
    if family == "rms_norm":
        return fusednorm.rms_norm(x, x.shape[-1:], weight, 1e-5, **keywords)
    return fusednorm.layer_norm(x, x.shape[-1:], weight, bias, 1e-5, **keywords)


def operands(family: Family, dtype: torch.dtype, rows: int, size: int) -> tuple[Tensor, Tensor, Tensor | None]:
    weight, bias = drawn(size, seed=1, device="cuda"), drawn(size, seed=2, device="cuda")
    return drawn(rows, size, dtype=dtype, device="cuda"), weight, None if family == "rms_norm" else bias


@pytest.mark.parametrize("out_dtype", OUT_DTYPES, ids=name_of)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("family", ["layer_norm", "rms_norm"])
def test_numerics(family: Family, dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    for rows, size in ((37, size) for size in SIZES):
        x, weight, bias = operands(family, dtype, rows, size)
        y = wide(family, x, weight, bias)
        error = error_of_float32(family, x, weight, bias, y)
        q, scale = normalize(family, x, weight, bias, out_dtype=out_dtype)
        assert scale.shape == (rows, 1)
        assert faults(q, scale, y, error, True) == [], size
        out_scale = torch.tensor(0.013, device="cuda")
        for instance in ("triton.whole", "triton.rows"):
            norm, quantized = norm_of(family, 1, 1, 1e-5), Quantized(name_of(out_dtype), False)
            problem = quantized_problem(norm, Operands(x, weight, bias), None, quantized)
            if named_instance(instance).supports(problem) is not None:
                continue
            with fusednorm.use_instance(instance):
                given = normalize(family, x, weight, bias, out_dtype=out_dtype, out_scale=out_scale)
            assert faults(given, out_scale, y, error, False) == [], (size, instance)


def named_instance(name: str) -> Any:
    return next(instance for instance in all_instances() if instance.name == name)


def test_which_instance_runs() -> None:
    for size, by_row, name in (
        (4096, True, "triton.whole"), (4096, False, "triton.whole"), (40000, True, "reference"),
        (40000, False, "triton.rows"),
    ):  # fmt: skip
        x = torch.empty(64, size, dtype=torch.bfloat16, device="cuda")
        problem = quantized_problem(norm_of("rms_norm", 1), Operands(x), None, Quantized("int8", by_row))
        assert choose(problem).name == name


@pytest.mark.parametrize("out_dtype", OUT_DTYPES, ids=name_of)
def test_both_conversions_round_every_number_as_torch_does(out_dtype: torch.dtype) -> None:
    from quantization_kernel import codes

    name, values = name_of(out_dtype), hard_numbers(out_dtype)
    right = reference.codes(values, Quantized(name, True))
    own = torch.cuda.get_device_capability() >= (8, 9) and torch.version.hip is None and out_dtype is not INT8
    for native in (False, True) if own else (False,):
        found = codes(values.cuda(), name, native).cpu()
        same = (found == bits(right)) | right.float().isnan()
        assert same.all(), native
        assert found.view(out_dtype).float()[right.float().isnan()].isnan().all()


@pytest.mark.parametrize("out_dtype", OUT_DTYPES, ids=name_of)
def test_special_numbers(out_dtype: torch.dtype) -> None:
    x = drawn(4, 1000, device="cuda")
    x[0, 3], x[1, 7], x[2] = torch.nan, torch.inf, 0.0
    q, scale = fusednorm.rms_norm(x, (1000,), out_dtype=out_dtype)
    with fusednorm.use_instance("reference"):
        right, right_scale = fusednorm.rms_norm(x, (1000,), out_dtype=out_dtype)
    torch.testing.assert_close(scale, right_scale, equal_nan=True)
    assert torch.equal(q[:3].float().nan_to_num(7.0), right[:3].float().nan_to_num(7.0))


def several(x: Tensor, h: Tensor, weight: Tensor, scale: Tensor, out_scale: Tensor) -> tuple[Tensor, ...]:
    first = fusednorm.rms_norm(x, (512,), weight, 1e-6, out_dtype=E4M3, pre_add=h, return_sum=True)
    second = fusednorm.layer_norm(x, (512,), weight, activation="silu", out_dtype=INT8, out_scale=out_scale)
    third = fusednorm.layer_norm(x, (512,), weight, scale=scale, out_dtype=E5M2, out_scale="row")
    return (*first, second, *third)


def arguments() -> tuple[Tensor, ...]:
    x, h = (drawn(2, 50, 512, dtype=torch.bfloat16, seed=seed, device="cuda") for seed in (0, 1))
    weight, scale = drawn(512, seed=2, device="cuda"), drawn(2, 512, seed=3, device="cuda")
    return x, h, weight, scale, torch.tensor(0.03, device="cuda")


def assert_same(found: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> None:
    for one, other in zip(found, right, strict=True):
        assert (one.dtype, one.stride()) == (other.dtype, other.stride())
        assert torch.equal(one.float(), other.float())


def test_it_is_deterministic_under_torch_compile_and_in_a_graph() -> None:
    given = arguments()
    right = several(*given)
    assert_same(several(*given), right)
    assert_same(torch.compile(several, fullgraph=True)(*given), right)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = several(*given)
    graph.replay()
    torch.cuda.synchronize()
    assert_same(found, right)


@pytest.mark.parametrize("made", [lambda x: x.transpose(0, 1), lambda x: x[:, ::2], lambda x: x[..., :257]])
def test_strides(made: Any) -> None:
    x = made(drawn(6, 8, 512, dtype=torch.bfloat16, device="cuda"))
    q, scale = fusednorm.rms_norm(x, x.shape[-1:], None, 1e-5, out_dtype=INT8)
    y = wide("rms_norm", x.contiguous().flatten(0, 1), None, None).unflatten(0, x.shape[:2])
    assert faults(q, scale, y, 1e-5, True) == []
    assert scale.shape == (*x.shape[:-1], 1)
