"""Every CPU instance at the edges: constant groups, NaN and infinity, nothing to do, one element, and huge strides."""

from __future__ import annotations

import mmap
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from cpu_support import (
    CHANNELS_FIRST,
    CHANNELS_LAST,
    DTYPES,
    INSTANCES,
    activation_for,
    activations_for,
    backward,
    faults,
    forward,
    layout_for,
    run,
    same_bits,
)
from drawn_calls import threads
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import fusednorm
from fusednorm import choice, dispatch, ops
from fusednorm.backends import reference
from fusednorm.backends.cpu.geometry import SPANS, by_vectors, geometry, in_tiles, in_vectors, repeat, tile
from fusednorm.backends.cpu.instances import PLANES, PLANES_SPLIT, ROWS, SLABS, SLABS_SPLIT, Segments, choose
from fusednorm.backends.cpu.plans import base
from fusednorm.backends.cpu.plans.rows import FewRowsBackward, SampleRowsBackward, SampleRowsForward
from fusednorm.bench.operations import problem_of_workload
from fusednorm.bench.workloads import EPS, Workload, draw
from fusednorm.norm import Family, norm_of
from fusednorm.operands import BackwardOperands, Operands
from fusednorm.problem import Problem
from fusednorm.problems import backward_problem, forward_problem

NAN, INF = float("nan"), float("inf")


def small_workload(instance: str, dtype: str = "float32", activation: str | None = None) -> Workload:
    """Groups of two channels, or rows."""
    if instance == "cpu.rows":
        return Workload("layer_norm", (4, 3, 37), 1, dtype, activation=activation)
    return Workload("group_norm", (4, 8, 5, 9), 4, dtype, layout_for(instance), activation)


@pytest.mark.parametrize("value", [3.1, -12345.678, 1e-30, 0.0])
@pytest.mark.parametrize("instance", INSTANCES)
def test_a_constant_group(instance: str, value: float) -> None:
    """Its variance is 0, so rstd is eps to the power of -1/2, and the output is that of the bias."""
    workload = small_workload(instance, activation=activation_for(instance))
    drawn = draw(workload)
    inputs = replace(drawn, input=torch.full_like(drawn.input, value))
    results = run(workload, inputs, instance)
    torch.testing.assert_close(results["rstd"], torch.full_like(results["rstd"], EPS**-0.5), rtol=1e-6, atol=0)
    assert faults(workload, inputs, results) == []


@pytest.mark.parametrize("value", [1e37, -3e38])
@pytest.mark.parametrize(
    ("shape", "groups", "last"),
    [
        ((6, 127, 1), 127, False),
        ((2, 8, 5), 8, False),
        ((40, 8, 16), 8, False),
        ((40, 8, 80), 8, False),
        ((2, 64, 32), 8, False),
        ((2, 8, 33, 33), 4, False),
        ((2, 8, 33, 33), 4, True),
        ((2, 64, 2, 2), 8, True),
        ((5, 7), None, False),
        ((5, 64), None, False),
        ((3, 20000), None, False),
        ((2, 40, 9, 9), 0, False),
        ((4, 6, 5), -1, False),
        ((4, 3, 40, 40), -1, False),
    ],
)
def test_a_constant_whose_sums_exceed_float32(
    shape: tuple[int, ...], groups: int | None, last: bool, value: float
) -> None:
    """The pivot of a unit is the mean of some of its elements, and their sum may be infinite. Then it is one of them,
    and of no neighbouring unit, whose elements have the other sign: 3e38 and -3e38 are infinitely far apart."""
    x = torch.full(shape, value)
    signs = 1 - 2 * (torch.arange(x.numel()) % 2).float()
    if groups is None:
        x *= signs[: shape[0]].view(-1, 1)
    elif groups == 0:
        x *= signs[: shape[2] * shape[3]].view(1, 1, *shape[2:])
    elif groups < 0:
        x *= signs[: shape[1]].view(1, -1, *[1] * (len(shape) - 2))
    else:
        x.view(shape[0] * groups, -1).mul_(signs[: shape[0] * groups].view(-1, 1))
    if last:
        x = x.contiguous(memory_format=torch.channels_last)
    x.requires_grad_()
    if groups is None:
        y = fusednorm.layer_norm(x, shape[1:])
    elif groups == 0:
        y = fusednorm.layer_norm(x, (shape[1],), channel_dim=1)
    elif groups < 0:
        y = fusednorm.batch_norm(x, None, None, training=True)
    else:
        y = fusednorm.group_norm(x, groups)
    y.sum().backward()
    assert torch.equal(y, torch.zeros_like(y))
    assert torch.equal(x.grad, torch.zeros_like(x))


@pytest.mark.parametrize("shape", [(257, 4), (257, 4, 2, 3)])
@pytest.mark.parametrize("value", [0.3, -999.7, 1 / 3])
def test_a_constant_channel_of_many_samples_in_float64(value: float, shape: tuple[int, ...]) -> None:
    """A shift keeps the samples apart: 257 statistics are combined, of points one element each."""
    x = torch.full(shape, value, dtype=torch.float64)
    if len(shape) == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    shift = torch.zeros(257, 4, dtype=torch.float64)
    y, mean, _ = ops.batch_norm_training(x, None, None, None, None, 0.1, 1e-5, shift=shift)
    assert torch.equal(mean, torch.full((4,), value, dtype=torch.float64))
    assert not y.any()
    for spoilt in (NAN, INF):
        x[100, 2] = spoilt
        y, mean, _ = ops.batch_norm_training(x, None, None, None, None, 0.1, 1e-5, shift=shift)
        assert torch.equal(mean.isfinite(), torch.tensor([True, True, False, True]))
        assert y[:, 2].isnan().all()


# --- NaN and infinity ---


def struck(workload: Workload) -> tuple[tuple[int, ...], tuple[slice, ...]]:
    """One place in the input, and the group that it belongs to."""
    if workload.row_family:
        return (1, 2, 30), (slice(1, 2), slice(2, 3), slice(None))
    if workload.family == "batch_norm":
        return (1, 4, 0, 3), (slice(None), slice(4, 5))
    return (1, 4, 0, 3), (slice(1, 2), slice(4, 6))


def holds(mask: Tensor, region: tuple[slice, ...]) -> bool:
    """Whether a mask is true in the region and nowhere else."""
    expected = torch.zeros_like(mask)
    expected[region] = True
    return torch.equal(mask, expected)


def channels_of(workload: Workload, region: tuple[slice, ...]) -> tuple[slice, ...]:
    return region[2:] if workload.row_family else region[1:]


FAMILY_CASES = [(instance, "group_norm") for instance in INSTANCES] + [
    ("cpu.planes", "batch_norm"),
    ("cpu.planes_split", "batch_norm"),
    ("cpu.slabs_split", "batch_norm"),
]


def family_workload(instance: str, family: Family) -> Workload:
    workload = small_workload(instance, activation=activation_for(instance))
    return replace(workload, family=family) if family == "batch_norm" else workload


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize(("instance", "family"), FAMILY_CASES)
def test_nan_and_infinity_fill_their_group_and_no_other(instance: str, family: Family, value: float) -> None:
    workload = family_workload(instance, family)
    place, region = struck(workload)
    clean = draw(workload)
    spoilt = replace(clean, input=clean.input.clone())
    spoilt.input[place] = value
    expected, results = run(workload, clean, instance), run(workload, spoilt, instance)
    for name in ("output", "grad_input"):
        assert holds(results[name].isnan(), region), name
        results[name][region] = expected[name][region]
        assert same_bits(results[name], expected[name]), name
    channels = channels_of(workload, region)
    # Without an activation the gradient of the bias does not depend on the input.
    for name in ("grad_weight",) if workload.activation is None else ("grad_weight", "grad_bias"):
        assert holds(results[name].isnan(), channels), name
        results[name][channels] = expected[name][channels]
        assert same_bits(results[name], expected[name]), name
    assert int(results["rstd"].isnan().sum()) == 1


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize(("instance", "family"), FAMILY_CASES)
def test_a_spoilt_gradient_fills_its_group_and_no_other(instance: str, family: Family, value: float) -> None:
    workload = family_workload(instance, family)
    place, region = struck(workload)
    clean = draw(workload)
    spoilt = replace(clean, grad_output=clean.grad_output.clone())
    spoilt.grad_output[place] = value
    expected, results = run(workload, clean, instance), run(workload, spoilt, instance)
    assert holds(~results["grad_input"].isfinite(), region)
    results["grad_input"][region] = expected["grad_input"][region]
    assert same_bits(results["grad_input"], expected["grad_input"])
    channel = place[2:] if workload.row_family else place[1:2]
    for name in ("grad_weight", "grad_bias"):
        assert torch.equal((~results[name].isfinite()).nonzero(), torch.tensor([channel])), name


@pytest.mark.parametrize(
    ("instance", "dtype", "activation"),
    [
        (instance, dtype, activation)
        for instance in INSTANCES
        for dtype in DTYPES
        for activation in activations_for(instance, dtype)
    ],
)
def test_a_nan_with_a_payload_stays_a_nan(instance: str, dtype: str, activation: str | None) -> None:
    """All bits set, as poisoned memory has it: arithmetic on the bits of a float could make a number of it."""
    workload = small_workload(instance, dtype, activation)
    place, region = struck(workload)
    inputs = draw(workload)
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    inputs.input.view(integers[inputs.input.element_size()])[place] = -1
    results = run(workload, inputs, instance)
    assert holds(results["output"].isnan(), region)
    assert holds(results["grad_input"].isnan(), region)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("instance", INSTANCES)
def test_finite_numbers_whose_squares_are_infinite_have_an_infinite_variance(instance: str, dtype: str) -> None:
    workload = small_workload(instance, dtype)
    drawn = draw(workload)
    large = drawn.input.new_tensor(torch.finfo(drawn.input.dtype).max).sqrt() * 1e3
    results = forward(workload, replace(drawn, input=torch.copysign(large, drawn.input)), instance)
    assert torch.equal(results["rstd"], torch.zeros_like(results["rstd"]))
    assert results["output"].isfinite().all()


@pytest.mark.parametrize("instance", INSTANCES)
def test_what_exceeds_fp16_is_infinite(instance: str) -> None:
    """As in torch: values that round beyond the largest number, and only those, become infinite."""
    workload = small_workload(instance, "float16", activation_for(instance, "float16"))
    drawn = draw(workload)
    weight = torch.full(workload.parameter_shape, torch.finfo(torch.float16).max / 2)
    inputs = replace(drawn, weight=weight, bias=torch.zeros_like(weight))
    results = forward(workload, inputs, instance)
    assert faults(workload, inputs, results, "forward") == []
    assert results["output"].isinf().any()
    assert results["output"].isfinite().any()


# --- every element written, nothing to do, one element ---


@pytest.mark.parametrize("instance", INSTANCES)
def test_every_element_of_a_large_output_is_written(instance: str) -> None:
    """Large outputs come from kept blocks; these are filled with NaN in tests as torch.empty is."""
    shape = (1031, 1021) if instance == "cpu.rows" else (2, 6, 90001)
    family: Family = "layer_norm" if instance == "cpu.rows" else "group_norm"
    workload = Workload(
        family, shape, 1 if instance == "cpu.rows" else 3, layout=layout_for(instance),
        activation=activation_for(instance),
    )  # fmt: skip
    inputs = draw(workload)
    for _ in range(2):  # the second time in the memory of the first
        results = run(workload, inputs, instance)
        assert all(bool(results[name].isfinite().all()) for name in ("output", "grad_input"))
        del results


EMPTY_SHAPES = [(0, 8, 5), (0, 8), (2, 0, 5), (2, 8, 0), (2, 8, 0, 3), (2, 8, 3, 0), (0, 8, 0), (2, 0)]


@pytest.mark.parametrize("channel_dim", [1, -1])
@pytest.mark.parametrize("family", ["group_norm", "instance_norm", "batch_norm"])
@pytest.mark.parametrize("shape", EMPTY_SHAPES, ids=str)
def test_nothing_to_normalize(shape: tuple[int, ...], family: Family, channel_dim: int) -> None:
    x = torch.empty(shape)
    assert_empty(x.movedim(1, -1) if channel_dim == -1 else x, family, channel_dim, shape[1])


@pytest.mark.parametrize(("shape", "trailing"), [((0, 8), 1), ((3, 0), 1), ((0, 0), 1), ((3, 0, 4), 2), ((0,), 1)])
@pytest.mark.parametrize("family", ["layer_norm", "rms_norm"])
def test_no_rows_or_rows_of_nothing(shape: tuple[int, ...], trailing: int, family: Family) -> None:
    assert_empty(torch.empty(shape), family, 1, shape[len(shape) - trailing :], trailing)


def test_a_slice_without_channels() -> None:
    assert_empty(torch.empty(2, 4, 8)[..., :0], "group_norm", -1, 0)


@pytest.mark.parametrize("shape", [(0, 8, 5), (2, 8, 0)])
def test_given_statistics_are_results_where_there_is_nothing_to_normalize(shape: tuple[int, ...]) -> None:
    given_mean, given_var = torch.randn(8), torch.rand(8)
    call = ("batch_norm", 0, 1)
    norm = norm_of(*call, training=False)
    problem = forward_problem(norm, Operands(torch.empty(shape), None, None, None, None, given_mean, given_var))
    activation = norm_of(*call, activation=activation_for(choice.choose(problem).name)).op_arguments[-2:]
    y, mean, rstd, _ = ops.norm_forward(
        torch.empty(shape), None, None, None, None, given_mean, given_var, *call, EPS, *activation
    )
    assert y.shape == shape
    assert torch.equal(mean, given_mean)
    torch.testing.assert_close(rstd, (given_var + EPS).rsqrt())


def assert_empty(
    x: Tensor, family: Family, channel_dim: int, parameter_shape: int | tuple[int, ...], groups: int = 1
) -> None:
    """An output with the fake's strides, and gradients of zero."""
    weight = torch.ones(parameter_shape)
    bias = None if family == "rms_norm" else torch.zeros(parameter_shape)
    call = (family, groups, channel_dim)
    problem = forward_problem(norm_of(*call), Operands(x, weight, bias))
    activation = norm_of(*call, activation=activation_for(choice.choose(problem).name)).op_arguments[-2:]
    y, mean, rstd, _ = ops.norm_forward(x, weight, bias, None, None, None, None, *call, EPS, *activation)
    with FakeTensorMode() as mode:
        fake = ops.empty_output(mode.from_tensor(x), *call)
    assert (y.shape, y.stride()) == (fake.shape, fake.stride())
    mask = (True, True, bias is not None, False, False)
    gradients = ops.norm_backward(y, x, mean, rstd, weight, bias, None, None, *call, *activation, True, mask)
    assert gradients[0].shape == x.shape
    assert torch.equal(gradients[1], torch.zeros_like(weight))
    assert bias is None or torch.equal(gradients[2], torch.zeros_like(bias))


@pytest.mark.parametrize("instance", ["cpu.rows", "cpu.slabs", "cpu.slabs_split", "cpu.planes", "cpu.planes_split"])
def test_one_element_for_each_statistic(instance: str) -> None:
    """xhat is 0: the output is the bias's, weight and input have no gradient, and no instance refuses in silence."""
    activation = activation_for(instance)
    workload = Workload("group_norm", (5, 33), 33, activation=activation)
    inputs = draw(workload)
    if instance in CHANNELS_FIRST:
        inputs = replace(inputs, input=torch.randn(5, 66)[:, ::2])
    results = forward(workload, inputs, instance)
    with pytest.raises(RuntimeError, match="one element"):
        backward(workload, inputs, results["mean"], results["rstd"], instance)
    results |= backward(workload, inputs, results["mean"], results["rstd"])
    assert inputs.bias is not None
    expected = inputs.bias if activation is None else reference.VALUES[activation](inputs.bias, 1.0)
    torch.testing.assert_close(results["output"], expected.expand(5, 33), rtol=1e-6, atol=1e-7)
    assert results["grad_weight"].abs().max() == 0
    assert results["grad_input"].abs().max() == 0


# --- far apart in memory ---


def sparse(shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """fp16 zeros so far apart that an offset needs more than 32 bits; untouched pages take no memory."""
    elements = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python names it from 3.13 on
    block = mmap.mmap(-1, 2 * elements, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    return torch.from_numpy(np.frombuffer(block, np.float16)).as_strided(shape, strides)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory without reservation is Linux's")
@pytest.mark.parametrize("strides", [(2**31 + 24, 2**28 + 8, 1), (2**31 + 24, 1, 2**25 + 8)], ids=str)
def test_offsets_beyond_32_bits(strides: tuple[int, ...]) -> None:
    shape = (2, 8, 50)
    x, grad_output = sparse(shape, strides), sparse(shape, strides)
    instances = CHANNELS_FIRST if strides[2] == 1 else CHANNELS_LAST
    for instance in instances:
        workload = Workload("group_norm", shape, 4, "float16", activation=activation_for(instance, "float16"))
        drawn = draw(workload)
        inputs = replace(drawn, input=x.copy_(drawn.input), grad_output=grad_output.copy_(drawn.grad_output))
        assert faults(workload, inputs, run(workload, inputs, instance)) == []


@pytest.mark.parametrize("instance", ["reference", "cpu.slabs"])
def test_gradients_of_no_positions_are_zero_beside_a_nan(instance: str) -> None:
    """A sum of no terms is 0, whatever the parameters hold."""
    parameters = [torch.full(shape, torch.nan, requires_grad=True) for shape in ((4,), (4,), (2, 4), (2, 4))]
    weight, bias, scale, shift = parameters
    x = torch.empty(2, 4, 0)
    with fusednorm.use_instance(instance):
        y = fusednorm.group_norm(x, 2, weight, bias, scale=scale, shift=shift, activation="silu")
        for gradient in torch.autograd.grad(y.sum(), parameters):
            assert not gradient.any()


# --- few channels: positions of channels_last together in a row ---


@pytest.mark.parametrize("positions", [2, 8, 129, 2100])
@pytest.mark.parametrize(
    ("family", "channels", "groups"),
    [
        ("group_norm", 3, 1), ("group_norm", 4, 2), ("instance_norm", 5, 0), ("batch_norm", 16, 0),
        ("batch_norm", 2, 0), ("group_norm", 33, 1), ("group_norm", 38, 19), ("instance_norm", 19, 0),
        ("batch_norm", 64, 0),
    ],
)  # fmt: skip
def test_few_channels(family: Family, channels: int, groups: int, positions: int) -> None:
    """Lengths that rows of several positions, and their sums, divide, and others."""
    shape, modulated = (3, channels, positions), family != "batch_norm"
    workload = Workload(family, shape, groups, "float32", "nhwc", "silu", modulated=modulated)
    inputs = draw(workload)
    instances = ("cpu.slabs_split",) if family == "batch_norm" else ("cpu.slabs_split", "cpu.slabs")
    for instance in instances:
        assert faults(workload, inputs, run(workload, inputs, instance)) == []


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize(("channels", "groups"), [(70, 10), (75, 75), (2063, 1), (2064, 43)])
@pytest.mark.parametrize("positions", [2, 9, 16, 17])
def test_few_positions(positions: int, channels: int, groups: int, dtype: str) -> None:
    """Whole vectors of channels and others, up to the positions whose mean is the pivot and more, one of which lies
    apart: of one group these are no run."""
    workload = Workload("group_norm", (3, channels, positions), groups, dtype, "nhwc", "relu")
    inputs = draw(workload)
    apart = torch.empty(3, 2 * positions, channels, dtype=inputs.input.dtype)[:, ::2].mT
    inputs = replace(inputs, input=apart.copy_(inputs.input))
    for instance in ("cpu.slabs", "cpu.slabs_split"):
        assert faults(workload, inputs, run(workload, inputs, instance)) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_variance_of_equal_numbers_at_few_positions_is_zero(dtype: torch.dtype) -> None:
    value = torch.linspace(900, 1100, 40).to(dtype)
    x = value.expand(2, 7, 40).contiguous().mT
    results = dispatch.forward(norm_of("instance_norm", eps=2.0**-40), Operands(x))
    assert results.rstd is not None
    assert torch.equal(results.rstd, torch.full_like(results.rstd, 2.0**20))
    assert torch.equal(results.output, torch.zeros_like(x))


def test_positions_that_do_not_follow_one_another_are_rows_alone() -> None:
    norm, x = norm_of("instance_norm"), torch.empty(2, 3, 64, device="meta")
    dense, apart = torch.empty(2, 64, 3, device="meta").mT, torch.empty(2, 64, 4, device="meta").mT[:, :3]
    wide = torch.empty(2, 64, 65, device="meta").mT
    assert repeat(forward_problem(norm, Operands(dense))) == 8
    assert repeat(forward_problem(norm, Operands(torch.empty(2, 6400, 3, device="meta").mT))) == 128
    assert repeat(forward_problem(norm, Operands(torch.empty(2, 640, 33, device="meta").mT))) == 8
    for other in (x, apart, wide):
        assert repeat(forward_problem(norm, Operands(other))) == 1
    problem = forward_problem(norm, Operands(dense))
    assert repeat(replace(problem, grad_layout=replace(problem.layout, spatial=5))) == 1


# --- batch_norm's short planes: blocks of channels by the samples ---


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize(
    "shape",
    [(16, 40, 3, 5), (20, 7, 9, 9), (3, 128, 2, 2), (17, 1, 16, 8), (600, 130, 2), (33, 1026, 1, 3), (16, 33, 127)],
)
def test_short_planes_of_batch_norm(shape: tuple[int, ...], dtype: str) -> None:
    """Blocks of one channel, of some and of all, samples of one slab and of several."""
    workload = Workload("batch_norm", shape, 0, dtype, "nchw", "relu")
    inputs = draw(workload)
    assert faults(workload, inputs, run(workload, inputs, "cpu.slabs")) == []


TILED = [
    Workload("instance_norm", (3, 200, 3, 3), 0, "float32", "nchw", "silu", modulated=True),
    Workload("instance_norm", (2, 41, 5), 0, "float16", "nchw", "silu"),
    Workload("instance_norm", (5, 9, 61), 0, "float32", "nchw", "silu"),
    Workload("instance_norm", (1, 1200, 2), 0, "float32", "nchw", modulated=True),
    Workload("group_norm", (4, 60, 7, 7), 20, "float16", "nchw", "silu"),
    Workload("group_norm", (7, 56, 1, 5), 4, "float32", "nchw"),
    Workload("group_norm", (2, 700, 3), 2, "float32", "nchw", "silu"),
    Workload("group_norm", (3, 30, 3, 2, 2), 10, "float64", "nchw"),
    Workload("batch_norm", (3, 130, 3, 5), 0, "float32", "nchw", "silu", modulated=True),
    Workload("batch_norm", (2, 97, 13), 0, "float64", "nchw"),
    Workload("batch_norm", (67, 70, 3, 3), 0, "bfloat16", "nchw", "gelu", modulated=True),
    Workload("batch_norm", (130, 40, 2), 0, "float32", "nchw", modulated=True),
]  # fmt: skip


VECTORS = [
    Workload("group_norm", (2, 1100, 17), 2, "float32", "nchw"),
    Workload("group_norm", (3, 40, 7, 7), 4, "float16", "nchw", "silu"),
    Workload("group_norm", (2, 30, 3, 3, 3), 2, "float64", "nchw", "relu"),
    Workload("group_norm", (3, 24, 16), 8, "bfloat16", "nchw", modulated=True),
    Workload("instance_norm", (3, 20, 9, 9), 0, "bfloat16", "nchw"),
    Workload("batch_norm", (9, 13, 31), 0, "float32", "nchw", "silu", modulated=True),
    Workload("group_norm", (3, 24, 9, 9), 3, "float32", "nchw", modulated=True),
]  # fmt: skip


AS_ROWS = [
    Workload("group_norm", (5, 96, 3, 3), 8, "float32", "nchw"),
    Workload("group_norm", (70, 32, 4, 5), 4, "float32", "nchw"),
    Workload("group_norm", (70, 32, 4, 4), 4, "float32", "nchw", "gelu"),
    Workload("group_norm", (19, 130, 3, 3), 2, "bfloat16", "nchw", "silu"),
    Workload("group_norm", (4, 64, 2, 3, 2), 16, "float64", "nchw", "relu"),
    Workload("group_norm", (6, 40, 3, 3), 4, "float16", "nchw", "relu"),
    Workload("group_norm", (6, 40, 5, 5), 20, "float32", "nchw"),
    Workload("group_norm", (130, 24, 4, 4), 12, "bfloat16", "nchw"),
]  # fmt: skip


#: Whose backward takes planes together by vectors: planes of whole vectors and of others, of one unit and of a few, of
#: more units than go together, and of several samples.
TOGETHER = [
    Workload("instance_norm", (6, 40, 5, 5), 0, "float32", "nchw"),
    Workload("instance_norm", (13, 24, 4, 4), 0, "bfloat16", "nchw"),
    Workload("instance_norm", (3, 19, 16, 16), 0, "float16", "nchw"),
    Workload("instance_norm", (2, 17, 9, 9), 0, "float64", "nchw", modulated=True),
    Workload("group_norm", (70, 1, 7, 7), 1, "float32", "nchw"),
    Workload("group_norm", (9, 12, 7, 7), 6, "float32", "nchw", modulated=True),
    Workload("group_norm", (11, 6, 6, 6), 2, "bfloat16", "nchw"),
    Workload("group_norm", (4, 28, 11, 11), 7, "float16", "nchw"),
    Workload("instance_norm", (6, 40, 5, 5), 0, "float32", "nchw", "leaky_relu"),
    Workload("instance_norm", (13, 24, 4, 4), 0, "bfloat16", "nchw", "silu"),
    Workload("instance_norm", (3, 19, 16, 16), 0, "float16", "nchw", "gelu"),
    Workload("instance_norm", (2, 17, 4, 4), 0, "float64", "nchw", "tanh", modulated=True),
    Workload("group_norm", (9, 12, 7, 7), 6, "float32", "nchw", "silu", modulated=True),
    Workload("group_norm", (11, 6, 6, 6), 2, "bfloat16", "nchw", "relu"),
    Workload("batch_norm", (6, 40, 3, 3, 3), 0, "float32", "nchw", "relu"),
    Workload("batch_norm", (3, 35, 9, 9), 0, "float16", "nchw", "gelu"),
    Workload("batch_norm", (4, 18, 5, 5), 0, "float64", "nchw", "silu"),
    Workload("batch_norm", (70, 17, 7, 7), 0, "float32", "nchw"),
    Workload("batch_norm", (5, 19, 4, 4), 0, "bfloat16", "nchw"),
]  # fmt: skip


def _backward_of(workload: Workload) -> Problem:
    inputs = draw(workload)
    results = forward(workload, inputs)
    return backward_problem(workload.norm, inputs.backward_operands(results["mean"], results["rstd"]))


@pytest.mark.parametrize("workload", TOGETHER, ids=lambda workload: workload.key)
def test_the_backward_of_units_of_a_few_vectors_takes_them_together(workload: Workload) -> None:
    problem = _backward_of(workload)
    assert by_vectors(problem)
    shorter = replace(problem, view=replace(problem.view, spatial=15))
    longer = replace(problem, view=replace(problem.view, spatial=257))
    several = replace(problem, view=replace(problem.view, group_channels=5))
    if workload.family == "batch_norm":
        several = replace(problem, scale_dtype="float32")
    assert not any(map(by_vectors, (shorter, longer, several)))


@pytest.mark.parametrize(
    ("family", "groups", "dtype", "longest"),
    [
        ("instance_norm", 0, "float32", {None: 256, "relu": 144, "silu": 144}),
        ("instance_norm", 0, "bfloat16", {None: 256, "relu": 256}),
        ("instance_norm", 0, "float64", {None: 100, "silu": 16}),
        ("group_norm", 10, "float32", {None: 144, "relu": 81}), ("group_norm", 10, "float16", {None: 256, "silu": 144}),
        ("batch_norm", 0, "float32", {None: 100, "relu": 64}), ("batch_norm", 0, "bfloat16", {None: 144, "relu": 100}),
        ("batch_norm", 0, "float64", {None: 49, "relu": 27}),
    ],
)  # fmt: skip
def test_how_long_planes_a_backward_takes_together(
    family: Family, groups: int, dtype: str, longest: dict[str | None, int]
) -> None:
    for activation, length in longest.items():
        for planes, together in ((length, True), (length + 1, False)):
            workload = Workload(
                family, (4, 40 if family != "group_norm" else 20, planes), groups, dtype, "nchw", activation
            )
            assert by_vectors(_backward_of(workload)) is together


@pytest.mark.parametrize("activation", [None, "silu"])
def test_each_gradient_of_short_planes_of_batch_norm_alone(activation: str | None) -> None:
    """The kernel makes the parameters' gradients too, in their own dtypes."""
    x, grad = torch.randn(6, 21, 5, 5, requires_grad=True), torch.randn(6, 21, 5, 5)
    weight, bias = torch.randn(21).half().requires_grad_(), torch.randn(21, dtype=torch.float64).requires_grad_()

    def gradients(*leaves: Tensor) -> tuple[Tensor, ...]:
        y = fusednorm.batch_norm(x, None, None, weight, bias, True, activation=activation)
        return torch.autograd.grad(y, leaves, grad)

    together = gradients(x, weight, bias)
    assert [gradient.dtype for gradient in together] == [torch.float32, torch.float16, torch.float64]
    for gradient, leaf in zip(together, (x, weight, bias), strict=True):
        assert torch.equal(gradients(leaf)[0], gradient)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3 - min(threads, 2))
        assert all(map(torch.equal, gradients(x, weight, bias), together))
    finally:
        torch.set_num_threads(threads)


def test_sums_of_short_planes_of_many_samples_do_not_drift() -> None:
    """A lane that added all of a channel in float32 would be off by 1e-4."""
    x, grad, ones = torch.randn(20000, 1, 16), torch.full((20000, 1, 16), 0.1), torch.ones(1)
    operands = BackwardOperands(grad, x, torch.zeros(1), ones, ones, ones, None, None)
    problem = backward_problem(norm_of("batch_norm"), operands)
    assert by_vectors(problem)
    found = PLANES.plan(problem)(operands, ALL)
    assert found.bias is not None
    torch.testing.assert_close(found.bias.double(), grad.double().sum((0, 2)), rtol=5e-6, atol=0)


def test_a_backward_of_very_many_samples_keeps_no_planes_of_them_all() -> None:
    problem = _backward_of(Workload("batch_norm", (4, 16, 4, 4), 0, "float32", "nchw", "silu"))
    for samples, together in ((1023, True), (1024, False)):
        assert by_vectors(replace(problem, view=replace(problem.view, samples=samples))) is together


@pytest.mark.parametrize(("size", "grad_size"), [(1e18, 1e25), (1e-18, 1e-25)])
@pytest.mark.parametrize(("shape", "groups"), [((6, 8, 49), 8), ((9, 4, 36), 2)])
def test_sums_of_planes_that_are_taken_together_of_extreme_inputs(
    shape: tuple[int, ...], groups: int, size: float, grad_size: float
) -> None:
    """A deviation by the gradient, or by rstd twice, is beyond float32."""
    plain, grad = torch.randn(shape), torch.randn(shape)
    weight, bias = torch.ones(shape[1], requires_grad=True), torch.zeros(shape[1], requires_grad=True)

    def gradients(size: float, grad_size: float) -> list[Tensor]:
        x = (plain * size).requires_grad_()
        y = fusednorm.group_norm(x, groups, weight, bias, 0.0)
        grad_input, *others = torch.autograd.grad(y, (x, weight, bias), grad * grad_size)
        return [grad_input / grad_size * size, *(gradient / grad_size for gradient in others)]

    for found, expected in zip(gradients(size, grad_size), gradients(1.0, 1.0), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_units_of_few_planes_that_rows_take_are_not_taken_together() -> None:
    workload = Workload("group_norm", (130, 24, 4, 4), 12, "float32", "nchw")
    inputs = draw(workload)
    results = forward(workload, inputs)
    problem = backward_problem(workload.norm, inputs.backward_operands(results["mean"], results["rstd"]))
    assert not by_vectors(problem)
    assert by_vectors(replace(problem, view=replace(problem.view, spatial=33)))
    assert not by_vectors(replace(problem, view=replace(problem.view, spatial=145)))


OF_SEVERAL_SAMPLES = [
    Workload("group_norm", (130, 1, 9), 1, "float32", "nchw"),
    Workload("group_norm", (131, 1, 9), 1, "bfloat16", "nchw", "silu"),
    Workload("group_norm", (50, 4, 4), 1, "float32", "nchw", "silu"),
    Workload("group_norm", (61, 3, 5), 3, "float32", "nchw", modulated=True),
    Workload("group_norm", (45, 6, 2, 2), 2, "float64", "nchw", "relu", modulated=True),
    Workload("group_norm", (40, 2, 3, 3), 2, "bfloat16", "nchw"),
    Workload("group_norm", (70, 1, 20), 1, "float16", "nchw", "relu"),
    Workload("group_norm", (23, 5, 17), 5, "float32", "nchw", "silu", modulated=True),
    Workload("instance_norm", (19, 7, 5), 0, "float32", "nchw"),
]  # fmt: skip


SHORT_SAMPLES = [
    Workload("group_norm", (40, 2, 3, 3), 1, "float32", "nhwc"),
    Workload("group_norm", (17, 30, 7, 7), 1, "bfloat16", "nhwc", "silu"),
    Workload("group_norm", (90, 8, 3, 3), 1, "float32", "nhwc", "gelu"),
    Workload("group_norm", (16, 3, 2, 2, 2), 1, "float16", "nhwc", "relu"),
    Workload("group_norm", (35, 600, 2), 1, "float64", "nhwc"),
]  # fmt: skip


@pytest.mark.parametrize("offset", [0.0, 1000.0])
@pytest.mark.parametrize("workload", SHORT_SAMPLES, ids=lambda workload: workload.key)
def test_short_samples_of_channels_last_are_rows(workload: Workload, offset: float) -> None:
    """Of groups shorter than a vector and of longer ones, and with sums of several segments."""
    inputs = draw(workload)
    inputs.input.add_(offset)
    results = run(workload, inputs, "cpu.slabs")
    assert faults(workload, inputs, results) == []
    forwards = forward_problem(workload.norm, inputs.operands)
    backwards = backward_problem(workload.norm, inputs.backward_operands(results["mean"], results["rstd"]))
    assert isinstance(SLABS.plan(forwards), SampleRowsForward)
    assert isinstance(SLABS.plan(backwards), SampleRowsBackward)
    for other in (
        replace(forwards, view=replace(forwards.view, samples=15)),
        replace(forwards, view=replace(forwards.view, spatial=1537 // workload.shape[1] + 1)),
    ):
        assert not isinstance(SLABS.plan(other), SampleRowsForward)


@pytest.mark.parametrize("parameters", ["none", "weight", "bias"])
@pytest.mark.parametrize("last", [False, True])
def test_short_samples_without_a_weight_or_bias(last: bool, parameters: str) -> None:
    memory = torch.channels_last if last else torch.contiguous_format
    x = torch.randn(40, 3, 3, 3).contiguous(memory_format=memory).requires_grad_()
    weight = torch.randn(3, requires_grad=True) if parameters == "weight" else None
    bias = torch.randn(3, requires_grad=True) if parameters == "bias" else None
    leaves = [tensor for tensor in (x, weight, bias) if tensor is not None]
    grad = torch.randn_like(x)
    found = torch.autograd.grad(fusednorm.group_norm(x, 1, weight, bias), leaves, grad)
    one, zero = torch.ones(3), torch.zeros(3)  # torch's backward fails with a bias and no weight
    y = torch.nn.functional.group_norm(x, 1, one if weight is None else weight, zero if bias is None else bias)
    expected = torch.autograd.grad(y, leaves, grad)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("shape", [(70, 1, 9), (50, 4, 4), (37, 1, 20), (33, 3, 17), (40, 2, 9)])
def test_samples_that_are_taken_together_have_the_bits_of_each(shape: tuple[int, ...], activation: str | None) -> None:
    """The planes of several samples are tiles or vectors as those of one. Samples that do not touch are taken one by
    one, and so are planes, if each sample has but one."""
    whole = torch.randn(shape[0], shape[1] + 1, shape[2])
    weight, bias = torch.randn(shape[1]), torch.randn(shape[1])

    def outputs(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        y = fusednorm.group_norm(x, 1, weight, bias, activation=activation)
        return y.detach(), torch.autograd.grad(y, x, torch.full_like(y, 0.3))[0]

    apart = whole[:, : shape[1]]
    one_by_one = [outputs(apart[n : n + 1].contiguous()) for n in range(shape[0])]
    expected = tuple(map(torch.cat, zip(*one_by_one, strict=True)))
    for x in (apart, apart.contiguous()) if shape[1] > 1 else (apart.contiguous(),):
        y, grad_input = outputs(x)
        assert torch.equal(y, expected[0])
        torch.testing.assert_close(grad_input, expected[1], rtol=1e-4, atol=1e-6)
    assert geometry(forward_problem(norm_of("group_norm", 1), Operands(apart.contiguous())), 1, 1)[SPANS] == 1
    assert geometry(forward_problem(norm_of("group_norm", 1), Operands(apart)), 1, 1)[SPANS] == (shape[1] == 1)


@pytest.mark.parametrize("offset", [0.0, 1000.0])
@pytest.mark.parametrize(
    "workload", TILED + VECTORS + AS_ROWS + TOGETHER + OF_SEVERAL_SAMPLES, ids=lambda workload: workload.key
)
def test_short_planes(workload: Workload, offset: float) -> None:
    """In tiles: units of part of a tile, of one and of several; tiles that end with a sample, and last ones with fewer
    planes. By vectors: planes of whole vectors and of others; units of more planes than a block's, and with dz kept for
    the workers. As rows: groups of whole vectors and of others, of more than go together, and sums of several parts."""
    inputs = draw(workload)
    inputs.input.add_(offset)
    assert faults(workload, inputs, run(workload, inputs, "cpu.planes")) == []


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("length", range(2, 18))
def test_units_of_every_length_below_a_vector(length: int, dtype: str) -> None:
    """Whole vectors of units and some more, whose bits do not depend on their place: a thread has the first or last."""
    workload = Workload("instance_norm", (1, 38, length), 0, dtype, "nchw", "relu")
    inputs = draw(workload)
    assert faults(workload, inputs, run(workload, inputs, "cpu.planes")) == []
    rows = inputs.input.detach()
    with torch.no_grad():
        whole = fusednorm.instance_norm(rows)
        parts = [fusednorm.instance_norm(rows[:, c : c + 2]) for c in range(0, 38, 2)]
    assert torch.equal(whole, torch.cat(parts, 1))


@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("length", [16, 17, 31, 32, 33, 49, 64, 81, 100, 200, 256])
def test_planes_of_a_few_vectors(length: int, dtype: str, activation: str | None) -> None:
    """Sixteen of a sample and some more, far from 0, whose bits do not depend on their place or their distance from one
    another; one of equal numbers, one with an outlier in front."""
    workload = Workload("instance_norm", (2, 37, length), 0, dtype, "nchw", activation, modulated=True)
    inputs = draw(workload)
    inputs.input.detach().add_(30)[0, 1], inputs.input.detach()[0, 2, 0] = 0.1, 1e4
    assert faults(workload, inputs, run(workload, inputs, "cpu.planes")) == []
    x = inputs.input.detach()
    apart = torch.empty(2, 37, length + 3, dtype=x.dtype)[..., :length].copy_(x)
    with torch.no_grad():
        whole = fusednorm.instance_norm(x, activation=activation)
        parts = [fusednorm.instance_norm(x[:, c : c + 2], activation=activation) for c in range(0, 37, 2)]
        assert torch.equal(whole, torch.cat(parts, 1))
        assert torch.equal(whole, fusednorm.instance_norm(apart, activation=activation))
        swapped = x.transpose(0, 1).contiguous().transpose(0, 1)
        assert torch.equal(whole, fusednorm.instance_norm(swapped, activation=activation))
        bare = fusednorm.instance_norm(x)
    assert torch.count_nonzero(bare[0, 1]) == 0


#: Whose backward in two passes keeps dz: slabs of one sample, of several to each of two workers and parts of a sample,
#: of more channels than are summed at a time, of rows of several positions, and of channels_first that is read as
#: channels_last; pieces of planes, whole ones and the last of a plane, of one channel and of samples' ones.
KEPT = [
    Workload("group_norm", (2, 40, 191, 193), 10, "bfloat16", "nhwc", "silu"),
    Workload("group_norm", (16, 64, 32, 32), 32, "float32", "nhwc", "silu"),
    Workload("group_norm", (1, 64, 33, 31), 32, "bfloat16", "nhwc", "silu"),
    Workload("group_norm", (70, 48, 3, 3), 4, "float32", "nhwc", "gelu", modulated=True),
    Workload("group_norm", (3, 1100, 5, 7), 10, "float16", "nhwc", "silu"),
    Workload("instance_norm", (9, 5, 20, 21), 0, "float32", "nhwc", "gelu_tanh"),
    Workload("batch_norm", (9, 6, 31, 29), 0, "bfloat16", "nhwc", "silu"),
    Workload("batch_norm", (4, 70, 9, 11), 0, "float64", "nhwc", "tanh", modulated=True),
    Workload("batch_norm", (16, 520, 8, 8), 0, "float32", "nchw", "silu"),
    Workload("batch_norm", (2000, 24), 0, "float32", "nchw", "gelu"),
    Workload("group_norm", (2, 3, 301, 303), 1, "bfloat16", "nchw", "gelu"),
    Workload("batch_norm", (3, 2, 257, 129), 0, "float32", "nchw", "silu", modulated=True),
    Workload("instance_norm", (1, 5, 7, 11), 0, "float64", "nchw", "tanh"),
    Workload("group_norm", (1, 33, 3, 5), 3, "float16", "nchw", "silu"),
]  # fmt: skip
ALL = (True, True, True, True, True)


@pytest.mark.parametrize("workload", KEPT, ids=lambda workload: workload.key)
def test_backwards_of_two_passes_that_keep_dz(workload: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = draw(workload)
    results = forward(workload, inputs)
    operands = inputs.backward_operands(results["mean"], results["rstd"])
    problem = backward_problem(workload.norm, operands)
    instances = [instance for instance in (SLABS, SLABS_SPLIT, PLANES_SPLIT) if instance.supports(problem) is None]
    assert instances
    for instance in instances:
        plan = instance.plan(problem)
        with monkeypatch.context() as patch:
            for size in (2, 4, 8):
                patch.setitem(base.MOST_KEPT, size, 0)
            twice = instance.plan(problem)
            assert not twice.keeps_dz()
        assert plan.keeps_dz()
        with threads(2):
            kept = plan(operands, ALL)
        made = twice(operands, ALL)
        for name in ("input", "weight", "bias", "scale", "shift"):
            torch.testing.assert_close(getattr(kept, name), getattr(made, name), rtol=1e-5, atol=1e-5)
        assert faults(workload, inputs, run(workload, inputs, instance.name)) == []


def test_which_backwards_keep_dz() -> None:
    for layout, instance in (("nhwc", SLABS_SPLIT), ("nchw", PLANES_SPLIT)):
        for dtype, activation, spatial, expected in (
            ("float32", "silu", 1 << 14, True), ("float32", "silu", (1 << 14) + 1, False),
            ("bfloat16", "silu", 1 << 17, True), ("bfloat16", "silu", (1 << 17) + 1, False),
            ("float32", None, 64, False), ("float32", "relu", 64, False),
        ):  # fmt: skip
            problem = _backward_of(Workload("group_norm", (1, 64, 4, 4), 32, dtype, layout, activation))
            plan = instance.plan(replace(problem, view=replace(problem.view, spatial=spatial)))
            assert plan.keeps_dz() is expected


@pytest.mark.parametrize(
    ("family", "groups", "shape", "dtype", "together"),
    [
        ("instance_norm", 0, (2, 6, 15), torch.float32, False), ("instance_norm", 0, (2, 6, 4, 4), torch.float32, True),
        ("instance_norm", 0, (2, 6, 100), torch.float32, True), ("instance_norm", 0, (2, 6, 101), torch.float32, False),
        ("instance_norm", 0, (2, 6, 16, 16), torch.float16, True), ("group_norm", 6, (2, 6, 64), torch.float64, True),
        ("instance_norm", 0, (2, 6, 65), torch.float64, False), ("group_norm", 3, (2, 6, 64), torch.float32, False),
        ("instance_norm", 0, (2, 6, 257), torch.bfloat16, False), ("batch_norm", 0, (1, 6, 64), torch.float32, False),
    ],
)  # fmt: skip
def test_what_planes_a_forward_takes_together(
    family: Family, groups: int, shape: tuple[int, ...], dtype: torch.dtype, together: bool
) -> None:
    problem = forward_problem(norm_of(family, groups), Operands(torch.empty(shape, dtype=dtype)))
    assert by_vectors(problem) is together


@pytest.mark.parametrize("workload", TILED, ids=lambda workload: workload.key)
def test_a_tile_has_several_short_planes(workload: Workload) -> None:
    problem = forward_problem(workload.norm, draw(workload).operands)
    assert in_tiles(problem)
    assert tile(problem)[0] > 1


@pytest.mark.parametrize("workload", VECTORS, ids=lambda workload: workload.key)
def test_the_backward_of_longer_planes_is_by_vectors(workload: Workload) -> None:
    inputs = draw(workload)
    results = forward(workload, inputs)
    operands = inputs.backward_operands(results["mean"], results["rstd"])
    assert not in_tiles(backward_problem(workload.norm, operands))


@pytest.mark.parametrize("workload", AS_ROWS, ids=lambda workload: workload.key)
def test_the_backward_of_short_planes_of_several_samples_is_by_rows(workload: Workload) -> None:
    inputs = draw(workload)
    results = forward(workload, inputs)
    problem = backward_problem(workload.norm, inputs.backward_operands(results["mean"], results["rstd"]))
    assert isinstance(PLANES.plan(problem), SampleRowsBackward)
    few = replace(problem, view=replace(problem.view, samples=3))
    assert not isinstance(PLANES.plan(few), SampleRowsBackward)


@pytest.mark.parametrize(
    ("shape", "dtype", "activation", "by_rows"),
    [
        ((8, 32, 4, 4), "float32", "relu", False), ((8, 32, 4, 4), "bfloat16", "relu", True),
        ((8, 32, 5, 5), "float32", "silu", False), ((8, 32, 4, 8), "float32", None, True),
        ((8, 32, 3, 11), "float32", None, False), ((8, 128, 4, 4), "float16", "relu", False),
    ],
)  # fmt: skip
def test_what_planes_are_rows_to_a_backward(
    shape: tuple[int, ...], dtype: str, activation: str | None, by_rows: bool
) -> None:
    workload = Workload("group_norm", shape, 8, dtype, "nchw", activation)
    inputs = draw(workload)
    results = forward(workload, inputs)
    problem = backward_problem(workload.norm, inputs.backward_operands(results["mean"], results["rstd"]))
    assert isinstance(PLANES.plan(problem), SampleRowsBackward) == by_rows


@pytest.mark.parametrize(
    ("family", "shape", "groups", "dtype", "activation", "together"),
    [
        ("group_norm", (40, 320), 8, "float32", None, True), ("group_norm", (40, 320), 8, "float32", "silu", True),
        ("group_norm", (40, 2048), 8, "float32", None, True), ("group_norm", (40, 320), 8, "bfloat16", None, False),
        ("layer_norm", (400, 128), 1, "bfloat16", "silu", True), ("layer_norm", (400, 128), 1, "float32", None, True),
        ("layer_norm", (400, 128), 1, "float32", "relu", False),
        ("layer_norm", (16000, 100), 1, "float32", None, False),
        ("layer_norm", (22500, 70), 1, "float32", "gelu", True), ("layer_norm", (400, 128), 1, "float64", None, False),
        ("layer_norm", (400, 128), 1, "float16", "relu", False), ("layer_norm", (400, 300), 1, "bfloat16", None, False),
    ],
)  # fmt: skip
def test_what_rows_a_backward_takes_together(
    family: Family, shape: tuple[int, ...], groups: int, dtype: str, activation: str | None, together: bool
) -> None:
    workload = Workload(family, shape, groups, dtype, activation=activation)
    inputs = draw(workload)
    results = forward(workload, inputs)
    problem = backward_problem(workload.norm, inputs.backward_operands(results["mean"], results["rstd"]))
    assert in_vectors(problem) == together
    assert faults(workload, inputs, run(workload, inputs, "cpu.rows")) == []


def test_tiles_take_planes_that_touch_and_any_plane_by_itself() -> None:
    norm, whole = norm_of("instance_norm"), torch.empty(2, 66, 4, 4)
    assert tile(forward_problem(norm, Operands(whole))) == (32, 32)
    assert tile(forward_problem(norm, Operands(whole[:, ::2]))) == (1, 1)
    assert in_tiles(forward_problem(norm, Operands(whole[:, ::2])))
    assert not in_tiles(forward_problem(norm, Operands(torch.empty(2, 66, 9, 9))))


@pytest.mark.parametrize(
    ("groups", "shape", "dtype", "tiled"),
    [
        (0, (2, 66, 8, 8), torch.bfloat16, True), (0, (2, 66, 9, 9), torch.bfloat16, False),
        (0, (2, 66, 8, 8), torch.float32, True), (0, (2, 66, 7, 11), torch.float32, False),
        (33, (2, 66, 5, 6), torch.float32, True), (33, (2, 66, 6, 6), torch.float32, False),
        (33, (2, 66, 3, 4), torch.bfloat16, True), (33, (2, 66, 6, 6), torch.bfloat16, False),
        (0, (0, 66, 8, 8), torch.float32, True), (0, (2, 66, 0, 8), torch.float32, False),
    ],
)  # fmt: skip
def test_the_units_of_a_forward_that_tiles_take(
    groups: int, shape: tuple[int, ...], dtype: torch.dtype, tiled: bool
) -> None:
    norm = norm_of("group_norm", groups) if groups else norm_of("instance_norm")
    assert in_tiles(forward_problem(norm, Operands(torch.empty(shape, dtype=dtype)))) == tiled


@pytest.mark.parametrize(
    ("shape", "dtype", "tiled"),
    [
        ((8, 66, 8, 8), torch.float32, True), ((8, 66, 7, 11), torch.float32, False),
        ((6, 66, 6, 6), torch.float32, False), ((6, 66, 6, 6), torch.bfloat16, True),
        ((6, 66, 5, 6), torch.float32, True), ((6, 66, 7, 11), torch.bfloat16, False),
    ],
)  # fmt: skip
def test_the_planes_of_batch_norm_that_tiles_take(shape: tuple[int, ...], dtype: torch.dtype, tiled: bool) -> None:
    assert in_tiles(forward_problem(norm_of("batch_norm"), Operands(torch.empty(shape, dtype=dtype)))) == tiled


def test_short_planes_of_other_strides() -> None:
    """Samples with others between them; a channel's planes apart, which make no rows; weight and bias of any dtype."""
    norm, whole = norm_of("batch_norm", eps=1e-3), torch.randn(40, 66, 4, 4)
    weight, bias = torch.rand(66, dtype=torch.float64), torch.randn(66).half()
    for x, possible in ((whole[::2], True), (whole[:, ::2], False)):
        x = x.detach().requires_grad_()
        parameters = [p[: x.shape[1]].clone().requires_grad_() for p in (weight, bias)]
        asked = forward_problem(norm, Operands(x, *parameters))
        assert (SLABS.supports(asked) is None) == possible
        assert (choose(asked) is SLABS) == possible
        y = fusednorm.batch_norm(x, None, None, *parameters, training=True, eps=1e-3, activation="tanh")
        right = torch.nn.functional.batch_norm(
            x.double(), None, None, *(p.double() for p in parameters), True, eps=1e-3
        )
        torch.testing.assert_close(y.double(), right.tanh(), rtol=1e-5, atol=1e-5)
        dy = torch.randn_like(y)
        found = torch.autograd.grad(y, (x, *parameters), dy)
        exact = torch.autograd.grad(right.tanh(), (x, *parameters), dy.double())
        for one, other in zip(found, exact, strict=True):
            torch.testing.assert_close(one.double(), other.double(), rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize(
    ("shape", "groups", "dtype", "activation", "few"),
    [
        ((6, 8196), 3, "bfloat16", "silu", True),
        ((7, 8196), 3, "bfloat16", "silu", False),
        ((6, 8190), 3, "bfloat16", "silu", False),
        ((24, 4098), 3, "float32", "relu", True),
        ((25, 4098), 3, "float32", None, False),
        ((24, 2400), 3, "float32", None, False),
        ((70, 8196), 3, "float32", None, True),
        ((129, 8196), 3, "float32", None, False),
        ((96, 8196), 3, "float16", None, True),
        ((97, 8196), 3, "float16", None, False),
        ((4, 4098), 3, "float16", None, False),
        ((24, 8196), 3, "bfloat16", "relu", False),
        ((24, 12300), 3, "bfloat16", "relu", True),
        ((9, 8448), 132, "float32", None, False),
        ((65, 32800), 1, "float16", None, False),
        ((65, 32800), 1, "float32", None, False),
        ((96, 8192), 1, "bfloat16", None, True),
    ],
)
def test_few_long_rows(shape: tuple[int, ...], groups: int, dtype: str, activation: str | None, few: bool) -> None:
    """Backward by blocks of channels, of which some have parts of two groups, and of more rows than float32 sums."""
    workload = Workload("group_norm", shape, groups, dtype, "nchw", activation)
    inputs = draw(workload)
    plan = ROWS.plan(problem_of_workload("backward", workload, inputs))
    assert isinstance(plan, FewRowsBackward) == few
    if few:
        assert faults(workload, inputs, run(workload, inputs)) == []


@pytest.mark.parametrize(
    ("shape", "dtype", "segments"),
    [
        ((500, 4096), torch.bfloat16, 16),
        ((216, 65536), torch.float32, 16),
        ((60, 16384), torch.float16, 15),
        ((20, 8192), torch.bfloat16, 5),
        ((2000, 1024), torch.bfloat16, 61),
        ((4000, 3072), torch.bfloat16, 63),
    ],
)
def test_segments_of_rows_leave_few_sums(shape: tuple[int, int], dtype: torch.dtype, segments: int) -> None:
    """Of 32 rows, where there are 16 of them, since each leaves two rows of float64; of four rows at least."""
    x, statistic = torch.empty(shape, dtype=dtype, device="meta"), torch.empty(shape[0], 1, device="meta")
    operands = BackwardOperands(x, x, statistic, statistic, x[0], x[0])
    problem = replace(backward_problem(norm_of("layer_norm", 1), operands), device="cpu")
    assert -(-shape[0] // Segments().size(problem)) == segments


@pytest.mark.parametrize(("shape", "groups"), [((33, 24), 4), ((5, 300), 3)])
def test_points_with_scale_and_shift_are_rows(shape: tuple[int, ...], groups: int) -> None:
    """A row of several groups has its sample's modulation; gradients of few channels, and of many, of one sample."""
    workload = Workload("group_norm", shape, groups, "float32", "nchw", modulated=True)
    inputs = draw(workload)
    assert choose(forward_problem(workload.norm, inputs.operands)) is ROWS
    assert faults(workload, inputs, run(workload, inputs)) == []


def test_planes_that_are_long_or_few_or_make_short_rows_stay_planes() -> None:
    norm = norm_of("batch_norm")
    for shape, instance in (
        ((16, 64, 4, 4), SLABS), ((16, 64, 12, 12), PLANES), ((3, 64, 4, 4), PLANES), ((32, 487, 5, 5), PLANES),
        ((16, 64, 1, 1), SLABS_SPLIT),
    ):  # fmt: skip
        assert choose(forward_problem(norm, Operands(torch.empty(shape)))) is instance
