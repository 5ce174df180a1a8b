"""Every CPU instance against the reference in float64: families, shapes, dtypes, activations, parameters, values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from cpu_support import (
    CHANNELS_FIRST,
    CHANNELS_LAST,
    DTYPES,
    EVERYTHING,
    INSTANCES,
    activation_for,
    activations_for,
    backward,
    faults,
    forward,
    layout_for,
    run,
    same_bits,
    with_activation,
)
from torch import Tensor

import fusednorm
from fusednorm import ops
from fusednorm.activations import Activation
from fusednorm.backends import reference
from fusednorm.bench.workloads import EPS, Init, Inputs, Workload, draw
from fusednorm.choice import instances, use_instance
from fusednorm.norm import Family, norm_of
from fusednorm.operands import Operands
from fusednorm.problems import forward_problem

CHANNEL_FAMILIES: tuple[Family, ...] = ("group_norm", "instance_norm", "batch_norm")

# Names say what a shape reaches; groups are those of group_norm.
SHAPES: dict[str, tuple[tuple[int, ...], int]] = {
    "three positions, 33 channels": ((2, 33, 3), 11),
    "49 positions, rank 4": ((3, 6, 7, 7), 2),
    "one channel": ((2, 1, 50), 1),
    "a group per channel": ((2, 3, 5, 11), 3),
    "one group": ((2, 33, 19), 1),
    "rank 6": ((2, 4, 3, 2, 3, 5), 2),
    "more than a chunk of 4096": ((1, 3, 4100), 1),
    "more than a piece of 16384": ((2, 3, 16400), 3),
    "more channels than a tile of 512": ((2, 513, 9), 27),
    "tiles and several slabs": ((1, 513, 23, 17), 3),
}
ROW_WORKLOADS = (
    Workload("layer_norm", (37, 65), 1),
    Workload("layer_norm", (5, 4, 6, 30), 3),
    Workload("layer_norm", (3, 2, 3, 2, 1, 5), 2),
    Workload("layer_norm", (7,), 1),
    Workload("layer_norm", (2, 4100), 1),
    Workload("layer_norm", (400, 35), 1),  # segments of 33 rows
    Workload("rms_norm", (37, 65), 1),
    Workload("rms_norm", (5, 4, 6, 30), 2),
    Workload("rms_norm", (2, 4100), 1),
    Workload("group_norm", (70, 33), 3),
    Workload("group_norm", (5, 1028), 1),
)
MANY_ROWS = (Workload("layer_norm", (4500, 7), 1), Workload("rms_norm", (4500, 7), 1))  # segments of 71 rows


def shape_workloads(instance: str) -> Iterator[tuple[str, Workload]]:
    """The workloads of one instance, with a name for each."""
    if instance not in CHANNELS_FIRST:
        for workload in ROW_WORKLOADS:
            yield workload.key, workload
    if instance == "cpu.rows":
        for workload in MANY_ROWS:
            yield workload.key, workload
        return
    for family in CHANNEL_FAMILIES:
        if instance == "cpu.slabs" and family == "batch_norm":
            continue
        for index, (name, (shape, groups)) in enumerate(SHAPES.items()):
            layout = "channel_dim=-1" if instance in CHANNELS_LAST and index % 2 else layout_for(instance)
            if layout != "nchw" and shape[1] == 1:
                continue  # one channel is the channels_first order
            yield f"{family}, {name}", Workload(family, shape, groups, layout=layout, modulated=index % 3 == 1)


@pytest.mark.parametrize(
    ("instance", "workload"),
    [
        pytest.param(instance, workload, id=f"{instance}: {name}")
        for instance in INSTANCES
        for name, workload in shape_workloads(instance)
    ],
)
def test_shapes(instance: str, workload: Workload) -> None:
    workload = with_activation(workload, activation_for(instance))
    inputs = draw(workload)
    assert faults(workload, inputs, run(workload, inputs, instance)) == []


def small_workload(instance: str, dtype: str = "float32", family: Family = "group_norm", **parts: Any) -> Workload:
    """A few odd-sized groups in the order of the instance."""
    if instance == "cpu.rows":
        return Workload("layer_norm", (7, 3, 37), 1, dtype, **parts)
    return Workload(family, (3, 8, 5, 9), 4, dtype, layout_for(instance), **parts)


@pytest.mark.parametrize(
    ("instance", "dtype", "activation"),
    [
        (instance, dtype, activation)
        for instance in INSTANCES
        for dtype in DTYPES
        for activation in activations_for(instance, dtype)
    ],
)
def test_each_dtype_with_each_activation(instance: str, dtype: str, activation: str | None) -> None:
    workload = small_workload(instance, dtype, modulated=instance != "cpu.rows", activation=activation)
    inputs = draw(workload)
    assert faults(workload, inputs, run(workload, inputs, instance)) == []


@pytest.mark.parametrize("init", ["offset", "large", "zeros", "integer"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("instance", INSTANCES)
def test_values(instance: str, dtype: str, init: Init) -> None:
    """A mean of 1000 standard deviations, |x| up to 1e4, constant groups, and few distinct values."""
    workload = small_workload(instance, dtype, activation=activation_for(instance, dtype))
    inputs = draw(workload, init)
    assert faults(workload, inputs, run(workload, inputs, instance)) == []


@pytest.mark.parametrize("instance", INSTANCES)
def test_a_large_mean_over_many_chunks(instance: str) -> None:
    """1000 standard deviations from zero, in sizes where partial statistics are merged."""
    workload = Workload("group_norm", (2, 6, 20000), 2, layout=layout_for(instance))
    if instance == "cpu.rows":
        workload = Workload("layer_norm", (3, 9000), 1)
    workload = with_activation(workload, activation_for(instance))
    inputs = draw(workload, "offset")
    assert faults(workload, inputs, run(workload, inputs, instance)) == []


@pytest.mark.parametrize("instance", INSTANCES)
def test_a_mean_that_drifts(instance: str) -> None:
    """The pivot is the mean of a chunk's beginning, which here is far from the mean of all."""
    workload = Workload("group_norm", (2, 4, 9000), 2, layout=layout_for(instance))
    if instance == "cpu.rows":
        workload = Workload("layer_norm", (3, 9000), 1)
    workload = with_activation(workload, activation_for(instance))
    inputs = draw(workload)
    ramp = torch.linspace(0, 1000, 9000).reshape(1, *[1] * (inputs.input.dim() - 2), 9000)
    inputs = replace(inputs, input=(inputs.input + ramp).clone(memory_format=torch.preserve_format))
    assert faults(workload, inputs, run(workload, inputs, instance)) == []


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("length", [200, 256, 257, 371, 1024, 1025])
def test_rows_and_planes_up_to_those_that_chunks_take(length: int, dtype: str) -> None:
    """With means that drift, and bits that depend on no other row; of equal numbers the variance is 0."""
    for workload in (
        Workload("layer_norm", (23, length), 1, dtype),
        Workload("rms_norm", (6, length), 1, dtype, activation="silu"),
        Workload("instance_norm", (3, 7, length), 0, dtype, "nchw"),
        Workload("group_norm", (5, 6, length // 3), 2, dtype, "nchw", "relu"),
    ):
        inputs = draw(workload)
        ramp = torch.linspace(0, 100, workload.shape[-1])
        inputs = replace(inputs, input=(inputs.input + ramp).to(inputs.input.dtype))
        assert faults(workload, inputs, run(workload, inputs)) == []
    rows = torch.randn(23, length, dtype=torch.float64).add_(30).to(getattr(torch, dtype))
    rows[5] = 0.1
    with torch.no_grad():
        whole = fusednorm.layer_norm(rows, (length,))
        assert torch.equal(whole, torch.cat([fusednorm.layer_norm(row, (length,)) for row in rows.split(1)]))
    assert torch.count_nonzero(whole[5]) == 0


# --- tensors beyond the cache ---


@pytest.mark.parametrize("family", CHANNEL_FAMILIES)
@pytest.mark.parametrize("shape", [(8, 32, 48, 48), (4, 96, 41, 40), (2, 1030, 18, 18)])
def test_rows_of_a_tensor_beyond_the_cache(family: Family, shape: tuple[int, ...]) -> None:
    """Of rows that are not taken by four there are repeated ones, ones of one position, and long ones, which are."""
    workload = Workload(family, shape, 2, "float32", "nhwc", "relu")
    inputs = draw(workload)
    assert faults(workload, inputs, run(workload, inputs)) == []


# --- given statistics ---


@pytest.mark.parametrize("modulated", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("instance", ["cpu.planes_split", "cpu.slabs_split"])
def test_inference(instance: str, dtype: str, modulated: bool) -> None:
    activation = activation_for(instance, dtype)
    workload = small_workload(instance, dtype, "batch_norm", activation=activation, modulated=modulated, training=False)
    inputs = draw(workload)
    assert faults(workload, inputs, forward(workload, inputs, instance), "inference") == []


@pytest.mark.parametrize("modulated", [False, True])
@pytest.mark.parametrize("instance", ["cpu.planes", "cpu.planes_split", "cpu.slabs_split"])
def test_backward_of_inference_takes_the_statistics_as_constants(instance: str, modulated: bool) -> None:
    parts: dict[str, Any] = {"modulated": modulated, "training": False}
    workload = small_workload(instance, "float32", "batch_norm", activation=activation_for(instance), **parts)
    inputs = draw(workload)
    assert inputs.mean is not None
    assert inputs.var is not None
    results = {"mean": inputs.mean, "rstd": (inputs.var + EPS).rsqrt()}
    results |= backward(workload, inputs, results["mean"], results["rstd"], instance)
    assert faults(workload, inputs, results, "backward") == []


@pytest.mark.parametrize("instance", ["cpu.planes_split", "cpu.slabs_split"])
def test_inference_with_one_element_for_each_channel(instance: str) -> None:
    shape, activation = (1, 6, 1), activation_for(instance)
    workload = Workload("batch_norm", shape, activation=activation, training=False)
    inputs = draw(workload)
    if instance in CHANNELS_FIRST:  # with one position, only strided channels are not a row
        inputs = replace(inputs, input=torch.randn(1, 12, 1)[:, ::2])
    assert faults(workload, inputs, forward(workload, inputs, instance), "inference") == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("shape", "activation"),
    [((9, 24, 3, 3), "silu"), ((11, 521, 2), None), ((8, 6, 4, 2, 1), "relu"), ((5, 40, 9), None)],
)
def test_inference_over_short_planes_as_rows(shape: tuple[int, ...], activation: str | None, dtype: str) -> None:
    """A row has the planes of all channels, or of a block of them, each with its channel's numbers."""
    workload = Workload("batch_norm", shape, dtype=dtype, activation=activation, training=False, weight_dtype="float32")
    inputs = draw(workload)
    assert faults(workload, inputs, forward(workload, inputs, "cpu.slabs_split"), "inference") == []


def test_inference_over_short_planes_adds_behind_the_norm() -> None:
    x, post = torch.randn(2, 10, 24, 3, 3, generator=torch.Generator().manual_seed(0)).unbind(0)
    mean, var, weight, bias = torch.rand(4, 24, generator=torch.Generator().manual_seed(1)).unbind(0)
    with fusednorm.use_instance("cpu.slabs_split"):
        found = fusednorm.batch_norm(x, mean, var, weight, bias, False, activation="relu", post_add=post)
    plain = torch.nn.functional.batch_norm(x.double(), mean.double(), var.double(), weight.double(), bias.double())
    torch.testing.assert_close(found, torch.relu(plain + post).float())


@pytest.mark.parametrize("instance", ["cpu.slabs", "cpu.slabs_split"])
def test_long_groups_of_single_positions_lose_no_digits_in_float64(instance: str) -> None:
    """The mean of equal numbers is that number, and the variance of 65536 is rounded a few times."""
    with fusednorm.use_instance(instance):
        equal = fusednorm.group_norm(torch.full((1, 131072), 0.8806308072990687, dtype=torch.float64), 4)
        signs = torch.rand(3, 131072, generator=torch.Generator().manual_seed(1), dtype=torch.float64) > 0.45
        x = torch.where(signs, 1.7e38, -1.7e38).double()
        found = fusednorm.group_norm(x, 2)
    assert equal.abs().max() <= 1e-13
    units = x.view(3, 2, -1)
    centred = units - units.mean(2, keepdim=True)
    right = (centred / centred.square().mean(2, keepdim=True).sqrt()).view_as(x)
    torch.testing.assert_close(found, right, rtol=1e-15, atol=0)


@pytest.mark.parametrize("instance", ["cpu.slabs", "cpu.slabs_split"])
def test_small_deviations_beside_large_ones_count_in_float64(instance: str) -> None:
    """Two of 65536 channels deviate by 1, and any 512 others by so little that their squares round away."""
    x = torch.full((1, 65536), (0.9 * 2.0**-52 / 512) ** 0.5, dtype=torch.float64)
    x[:, :2] = 1.0
    x[:, 1::2] *= -1
    with fusednorm.use_instance(instance):
        found = fusednorm.group_norm(torch.cat((x, x), 1), 2, eps=0.0)
    squares = sum(map(Fraction, x.square()[0].tolist()))
    torch.testing.assert_close(found[0, 0].item(), float(65536 / squares) ** 0.5, rtol=1e-15, atol=0)


@pytest.mark.parametrize("dtype", ["float64", "float16"])
@pytest.mark.parametrize("instance", ["cpu.planes_split", "cpu.slabs_split"])
def test_given_statistics_of_another_dtype(instance: str, dtype: str) -> None:
    workload = small_workload(instance, family="batch_norm", activation=activation_for(instance), training=False)
    inputs = draw(workload)
    assert inputs.mean is not None
    assert inputs.var is not None
    given = getattr(torch, dtype)
    inputs = replace(inputs, mean=inputs.mean.to(given), var=inputs.var.to(given))
    assert faults(workload, inputs, forward(workload, inputs, instance), "inference") == []


# --- parameters ---


@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("instance", ["cpu.planes", "cpu.slabs", "cpu.rows"])
def test_weights_of_any_dtype(instance: str, dtype: str, weight_dtype: str) -> None:
    workload = small_workload(instance, dtype, activation=activation_for(instance, dtype), weight_dtype=weight_dtype)
    inputs = draw(workload)
    results = run(workload, inputs, instance)
    names = ("grad_weight", "grad_bias")
    assert all(results[name].dtype == getattr(torch, weight_dtype) for name in names)
    if weight_dtype == "float64" != dtype:  # the accumulation is fp32: judge it as that
        results |= {name: results[name].float() for name in names}
    assert faults(workload, inputs, results) == []


@pytest.mark.parametrize("absent", ["weight", "bias", "scale", "shift", "weight bias", "weight bias scale shift"])
@pytest.mark.parametrize("instance", INSTANCES)
def test_absent_parameters(instance: str, absent: str) -> None:
    workload = small_workload(instance, activation=activation_for(instance), modulated=instance != "cpu.rows")
    inputs = replace(draw(workload), **dict.fromkeys(absent.split()))
    results = run(workload, inputs, instance)
    assert faults(workload, inputs, results) == []
    assert all(results[f"grad_{name}"].numel() == 0 for name in absent.split())


@pytest.mark.parametrize("instance", INSTANCES)
def test_parameters_in_strided_memory(instance: str) -> None:
    workload = small_workload(instance, activation=activation_for(instance), modulated=instance != "cpu.rows")
    inputs = draw(workload)
    named = ("weight", "bias", "scale", "shift")
    strided = {name: spread(tensor) for name in named if (tensor := getattr(inputs, name)) is not None}
    results, expected = run(workload, replace(inputs, **strided), instance), run(workload, inputs, instance)
    assert [name for name, value in results.items() if not same_bits(value, expected[name])] == []


def spread(tensor: Tensor) -> Tensor:
    """The same values, every second element of a larger tensor that is NaN elsewhere."""
    wide = torch.full((*tensor.shape[:-1], 2 * tensor.shape[-1]), torch.nan, dtype=tensor.dtype)
    wide[..., ::2] = tensor
    return wide[..., ::2]


@pytest.mark.parametrize(
    ("instance", "dtype", "activation"),
    [
        ("cpu.planes_split", "float32", Activation("silu", 1.702)),
        ("cpu.planes", "bfloat16", Activation("silu", -0.5)),
        ("cpu.rows", "float32", Activation("leaky_relu", 0.3)),
        ("cpu.slabs", "bfloat16", Activation("leaky_relu", 0.0)),
        ("cpu.planes", "float64", Activation("leaky_relu", 0.1)),
        ("cpu.slabs_split", "float64", Activation("silu", 0.3)),
    ],
)
def test_parameter_of_an_activation(instance: str, dtype: str, activation: Activation) -> None:
    workload = with_activation(small_workload(instance, dtype), activation)
    inputs = draw(workload)
    assert faults(workload, inputs, run(workload, inputs, instance)) == []


# --- parts of the backward ---


@pytest.mark.parametrize(
    ("instance", "wanted"),
    [(instance, wanted) for instance in INSTANCES for wanted in range(3 if instance == "cpu.rows" else 5)],
)
def test_one_gradient_alone(instance: str, wanted: int) -> None:
    workload = small_workload(instance, activation=activation_for(instance), modulated=instance != "cpu.rows")
    inputs = draw(workload)
    results = forward(workload, inputs, instance)
    mask = tuple(place == wanted for place in range(5))
    gradients = backward(workload, inputs, results["mean"], results["rstd"], instance, mask)
    (name,) = [name for name, value in gradients.items() if value.numel()]
    assert list(gradients).index(name) == wanted
    everything = results | backward(workload, inputs, results["mean"], results["rstd"], instance, EVERYTHING)
    assert faults(workload, inputs, everything | {name: gradients[name]}) == []


@pytest.mark.parametrize(
    ("instance", "family"),
    [(instance, "instance_norm") for instance in (*CHANNELS_FIRST, *CHANNELS_LAST)]
    + [(instance, "batch_norm") for instance in (*CHANNELS_FIRST, "cpu.slabs_split")],
)
def test_the_variance_for_running_statistics(instance: str, family: Family) -> None:
    workload = Workload(family, (3, 8, 5, 9), layout=layout_for(instance))
    x = draw(workload, "offset").input
    arguments: Any = (None, None, None, None, None, None, family, 0, 1, EPS)
    with use_instance(instance):
        var = ops.norm_forward(x, *arguments, activation_for(instance) or "", 1.0)[3]
    expected = reference.forward(norm_of(family, eps=EPS), Operands(x), compute_dtype=torch.float64).var
    assert expected is not None
    torch.testing.assert_close(var, expected.float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(2, 1, 3), (1, 2, 17), (5, 3, 5), (4, 6, 10), (3, 8, 33), (2, 4, 100)], ids=str)
def test_equal_elements_have_their_mean_and_no_variance(shape: tuple[int, ...], dtype: torch.dtype, last: bool) -> None:
    """A mean that is one rounding off leaves a variance of 1e-26 at 1000 in float64."""
    for seed in range(8):
        number = (torch.randn((), generator=torch.Generator().manual_seed(seed), dtype=torch.float64) - 1000).to(dtype)
        x = number.expand(shape).contiguous()
        operands = Operands(x.movedim(1, -1).contiguous().movedim(-1, 1) if last else x)
        problem = forward_problem(norm_of("batch_norm"), operands)
        found = [each.instance for each in instances(problem) if each.reason is None]
        assert len(found) >= 2
        for instance in found:
            results = instance.plan(problem)(operands)
            assert torch.equal(results.var, torch.zeros_like(results.var)), instance.name
            assert torch.equal(results.mean, number.expand_as(results.mean)), instance.name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_subnormal_results_are_rounded_and_not_lost(dtype: torch.dtype) -> None:
    """Some processors convert to bfloat16 with an instruction that takes subnormal numbers for zero."""
    info = torch.finfo(dtype)
    units = 4.0 if dtype == torch.float32 else 0.51  # of the least number; in float32 the affine is subnormal as well
    x = torch.linspace(-3, 3, 64, dtype=torch.float64).reshape(2, 4, 8).to(dtype)
    weight = torch.full((4,), info.tiny / 8)
    exact = x.double().reshape(2, 2, 16)
    exact = (exact - exact.mean(2, keepdim=True)) / (exact.var(2, correction=0, keepdim=True) + 1e-5).sqrt()
    expected = exact.reshape(x.shape) * weight.double()[:, None]
    for layout in (x, x.mT.contiguous().mT):
        got = fusednorm.group_norm(layout, 2, weight).double()
        assert float((got - expected).abs().max()) <= units * info.tiny * info.eps
        assert int(torch.count_nonzero(got)) > 56


# --- long sums ---

#: A number that float32 adds without error while the sum is below 1024, and from there on as 1.
UNEVEN = 1.0 + 2.0**-14


def _of_long_sums(instance: str) -> tuple[Workload, Inputs]:
    """Thousands of rows to each sum that one task makes, and gradients that are all alike."""
    if instance == "cpu.rows":
        workload = Workload("layer_norm", (64 * 4096, 8), 1)
    else:
        workload = Workload("group_norm", (1, 8, 128, 128), 8, layout="nhwc")
    inputs = draw(workload)
    inputs.grad_output.fill_(UNEVEN)
    return workload, inputs


@pytest.mark.parametrize("instance", [*CHANNELS_LAST, "cpu.rows"])
def test_a_long_sum_of_gradients_is_as_exact_as_short_ones(instance: str) -> None:
    workload, inputs = _of_long_sums(instance)
    assert faults(workload, inputs, run(workload, inputs, instance), "backward_gamma_beta") == []


@pytest.mark.parametrize("instance", CHANNELS_LAST)
def test_a_long_sum_of_deviations_is_as_exact_as_short_ones(instance: str) -> None:
    """The first sixteenth of the positions, whose mean the others deviate from, is 0."""
    workload, inputs = _of_long_sums(instance)
    inputs.input.fill_(UNEVEN)
    inputs.input[:, :, :8] = 0.0
    assert faults(workload, inputs, forward(workload, inputs, instance), "forward") == []


def test_bfloat16_results_are_rounded_to_the_nearest() -> None:
    """Every exponent, ties, both zeros, infinities and NaN, against rounding by integers; with a rstd of 1."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (1 << 14,), generator=generator, dtype=torch.int64)
    bits[: 1 << 12] &= ~0x7F800000  # subnormal
    bits[1 << 11 : 1 << 13] = bits[1 << 11 : 1 << 13] & ~0xFFFF | 0x8000  # ties
    bits[-8:] = torch.tensor([0, -(2**31), 0x7F800000, -0x800000, 0x7FFFFFFF, -1, 1, 0x7F7FFFFF])
    weight = bits.to(torch.int32).view(torch.float32)
    x = torch.ones(3, len(weight), 2, dtype=torch.bfloat16)
    zero, one = torch.zeros_like(weight), torch.ones_like(weight)
    for channel_dim, values in ((1, x), (-1, x.mT.contiguous())):
        y = fusednorm.batch_norm(values, zero, one, weight, eps=0.0, channel_dim=channel_dim)
        got = (y if channel_dim == 1 else y.mT)[1, :, 1]
        odd = bits >> 16 & 1
        expected = (bits + 0x7FFF + odd >> 16).to(torch.int16).view(torch.bfloat16)
        expected = torch.where(weight.isnan(), torch.nan, expected)
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
        signed = ~weight.isnan() & (weight != 0)  # -0 + 0 is 0
        assert torch.equal(got.signbit()[signed], weight.signbit()[signed])
