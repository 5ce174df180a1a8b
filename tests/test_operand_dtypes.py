"""What one call has learnt serves no other: operands of any dtype, absent or there, unaligned or not, in any order.

A plan and its compiled kernels are kept between calls. Each call here differs from those before it in the dtypes of its
operands alone, so that whatever is kept under too few facts meets the wrong tensor.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch
from cpu_support import faults, in_memory, run
from torch import Tensor

import fusednorm
from fusednorm.bench.workloads import Inputs, Workload, draw
from fusednorm.choice import use_instance

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = (None, torch.float64, torch.float32, torch.float16, torch.bfloat16)
#: Each meets other kernels: tiles that merge their statistics, rows, tiny units, and statistics over the samples.
WORKLOADS = (
    Workload("group_norm", (2, 64, 8, 8), 8, dtype="bfloat16", modulated=True, activation="silu"),
    Workload("group_norm", (2, 64, 8, 8), 8, dtype="float32", layout="nhwc", modulated=True),
    Workload("batch_norm", (4, 6, 5, 5), dtype="float16", modulated=True),
    Workload("layer_norm", (5, 96), 1, dtype="float16"),
)


def combinations(count: int) -> Iterator[tuple[torch.dtype | None, ...]]:
    """Dtypes of weight, bias, scale and shift, each next to many others; the same ones each time."""
    everything = list(product(DTYPES, repeat=4))
    random.Random(0).shuffle(everything)
    # The order that once wrote past the end of a gradient: float32 operands, then 16-bit ones.
    yield (torch.float32,) * 4
    yield (torch.bfloat16,) * 4
    yield from everything[:count]


def converted(tensor: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    return None if tensor is None or dtype is None else tensor.to(dtype)


def with_dtypes(inputs: Inputs, dtypes: tuple[torch.dtype | None, ...]) -> Inputs:
    operands = (inputs.weight, inputs.bias, inputs.scale, inputs.shift)
    weight, bias, scale, shift = map(converted, operands, dtypes)
    return replace(inputs, weight=weight, bias=bias, scale=scale, shift=shift)  # type: ignore[arg-type]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.key)
def test_any_dtypes_one_call_after_the_other(workload: Workload, device: str) -> None:
    drawn = draw(workload, device=device)
    for dtypes in combinations(24):
        inputs = with_dtypes(drawn, dtypes)
        results = run(workload, inputs)
        operands = {"grad_weight": inputs.weight, "grad_bias": inputs.bias}
        operands |= {"grad_scale": inputs.scale, "grad_shift": inputs.shift}
        for name, operand in operands.items():
            if operand is not None:
                assert results[name].dtype is operand.dtype, (name, dtypes)
                assert results[name].shape == operand.shape, (name, dtypes)
        # A float64 parameter's gradient is summed in float32 beside a narrower input, and is judged as that.
        present = {
            name: result.float() if result.dtype == torch.float64 else result for name, result in results.items()
        }
        assert faults(workload, inputs, present) == [], dtypes


@pytest.mark.parametrize("device", DEVICES)
def test_the_modulation_keeps_its_precision(device: str) -> None:
    """A float32 scale and shift beside a 16-bit input are not rounded to 16 bits."""
    x = torch.randn(4, 32, 16, 16, device=device).bfloat16()
    scale, shift = torch.randn(2, 4, 32, device=device)
    weight = torch.randn(32, device=device, requires_grad=True)
    dy = torch.randn_like(x)
    fusednorm.group_norm(x, 8, weight, scale=scale, shift=shift).backward(dy)
    exact = x.double().reshape(4, 8, -1)
    exact = (exact - exact.mean(2, keepdim=True)) / (exact.var(2, correction=0, keepdim=True) + 1e-5).sqrt()
    expected = ((1 + scale.double())[:, :, None, None] * dy.double() * exact.reshape(x.shape)).sum((0, 2, 3))
    assert weight.grad is not None
    assert float((weight.grad - expected).norm() / expected.norm()) < 1e-6


@pytest.mark.parametrize("device", DEVICES)
def test_statistics_of_any_dtype(device: str) -> None:
    """mean and rstd that the caller gives, and running statistics, one dtype after the other."""
    x, dy = torch.randn(2, 3, 8, 7, 7, device=device)
    _, mean, rstd = fusednorm.ops.group_norm_forward(x, 2, None, None, 1e-5)
    expected = fusednorm.ops.group_norm_backward_data(dy, x, mean, rstd, 2, None, None)
    running = torch.rand(2, 8, device=device) + 0.5
    normalized = fusednorm.batch_norm(x, *running)
    for dtype, tolerance in ((torch.float64, 1e-6), (torch.bfloat16, 2e-2), (torch.float32, 1e-6), (torch.half, 2e-3)):
        got = fusednorm.ops.group_norm_backward_data(dy, x, mean.to(dtype), rstd.to(dtype), 2, None, None)
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
        got = fusednorm.batch_norm(x, *running.to(dtype))
        torch.testing.assert_close(got, normalized, rtol=tolerance, atol=4 * tolerance)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("instance", [None, "tiles", "rows", "whole"])
def test_unaligned_after_aligned(instance: str | None, device: str) -> None:
    """A kernel compiled for aligned addresses never gets another, and the other way round."""
    if device == "cpu" and instance is not None:
        pytest.skip("the CPU's loads need no alignment")
    name = None if instance is None else f"triton.{instance}"
    values = torch.randn(6, 256).half()
    exact = values.double()
    exact = (exact - exact.mean(1, keepdim=True)) / (exact.var(1, correction=0, keepdim=True) + 1e-5).sqrt()
    for offset in (0, 1, 0, 3, 8, 5, 0):
        x = in_memory(values, offset=offset + 8).to(device) if device == "cpu" else placed(values, offset, device)
        if name is None:
            y = fusednorm.layer_norm(x, (256,))
        else:
            with use_instance(name):
                y = fusednorm.layer_norm(x, (256,))
        torch.testing.assert_close(y.cpu().double(), exact, rtol=2e-3, atol=2e-3)


def placed(values: Tensor, offset: int, device: str) -> Tensor:
    """The same values on a device, so many elements behind an aligned address, between NaN."""
    block = torch.full((offset + values.numel() + 16,), torch.nan, dtype=values.dtype, device=device)
    block[offset : offset + values.numel()] = values.flatten().to(device)
    return block[offset : offset + values.numel()].view(values.shape)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("last", [False, True])
def test_any_eps_one_call_after_the_other(last: bool, device: str) -> None:
    x = torch.randn(2, 16, 9, 9, device=device)
    if last:
        x = x.contiguous(memory_format=torch.channels_last)
    groups = x.double().reshape(2, 4, -1)
    mean, var = groups.mean(2, keepdim=True), groups.var(2, correction=0, keepdim=True)
    for eps in (1e-5, 1.0, 0.0, 1e-2, 1e-5):
        expected = ((groups - mean) / (var + eps).sqrt()).reshape(x.shape)
        torch.testing.assert_close(fusednorm.group_norm(x, 4, eps=eps).double(), expected, rtol=1e-5, atol=1e-5)
        # With given statistics eps is added to the variance that the caller gave.
        given = torch.rand(16, device=device, dtype=torch.float64) + 0.1
        normalized = fusednorm.batch_norm(x, given.float(), given.float(), eps=eps).double()
        exact = (x.double() - given[:, None, None]) / (given + eps).sqrt()[:, None, None]
        torch.testing.assert_close(normalized, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_a_float64_variance_that_float32_does_not_hold(size: float, last: bool, device: str) -> None:
    """Its inverse root is what normalizes, and float32 holds that."""
    values = torch.randn(2, 4, 5, 5, device=device, dtype=torch.float64)
    x = (values * size).float()
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    mean = torch.zeros(4, device=device, dtype=torch.float64)
    y = fusednorm.batch_norm(x, mean, torch.full_like(mean, size**2), eps=0.0)
    torch.testing.assert_close(y.double(), values, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_equal_numbers_have_no_variance(device: str) -> None:
    """However large they are, and however their mean is rounded on the way: rstd is eps**-1/2, the output the bias."""
    for value, shape in ((0.1, (2, 6, 7, 5)), (5.3e12, (2, 6, 9)), (8.1e17, (3, 6, 5)), (0.3, (1, 6, 60, 60))):
        x = torch.full(shape, value, device=device)
        bias = torch.randn(6, device=device)
        for layout in (x, x.transpose(1, -1).contiguous().transpose(1, -1)):
            output, _, rstd = fusednorm.ops.group_norm_forward(layout, 2, None, bias, 1e-5)
            torch.testing.assert_close(rstd, torch.full_like(rstd, 1e-5**-0.5), rtol=1e-6, atol=0)
            expected = bias.reshape(-1, *[1] * (len(shape) - 2)).expand(shape)
            torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5 * (1 if value > 1 else 10))
