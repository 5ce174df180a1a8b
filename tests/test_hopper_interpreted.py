"""The kernels of hopper.resident and hopper.slabs without a GPU, as Python over numpy: their results and sums against
fp64, each element stored once, nothing read or stored outside of a tensor, on spreads of units over few blocks."""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from gluon_interpreter import TYPES, Kernels, Memory, Pointer, Value, plain, scalars_of

from fusednorm.activations import resolve
from fusednorm.backends.hopper.config import resident as config
from fusednorm.backends.hopper.config import slabs
from fusednorm.backends.hopper.config.resident import ResidentConfig, spread
from fusednorm.backends.hopper.config.slabs import SlabsConfig
from fusednorm.backends.hopper.instances import RESIDENT, SLABS
from fusednorm.backends.hopper.plans.resident import ResidentBackward, ResidentForward, ResidentSumBackward
from fusednorm.backends.hopper.plans.slabs import SlabsBackward, SlabsForward
from fusednorm.norm import Family, norm_of
from fusednorm.operands import BackwardOperands, Operands
from fusednorm.problem import Problem
from fusednorm.problems import backward_problem, forward_problem, sum_backward_problem

EPS = 1e-5


@functools.cache
def kernels() -> Kernels:
    return Kernels()


@dataclass(frozen=True)
class Case:
    """A norm of groups, or of batches where there are none, on so many multiprocessors."""

    shape: tuple[int, ...]
    groups: int
    config: ResidentConfig
    processors: int = 2
    dtype: torch.dtype = torch.float32
    activation: str | None = "silu"
    modulated: bool = False
    around: str | None = None

    def problem(self, backward: bool) -> Problem:
        samples, channels = self.shape[:2]
        family: Family = "group_norm" if self.groups else "batch_norm"
        norm = norm_of(family, self.groups, eps=EPS, activation=resolve(self.activation))
        with torch.device("meta"):
            input, parameter = torch.empty(self.shape, dtype=self.dtype), torch.empty(channels)
            statistic = torch.empty(samples, self.groups) if self.groups else torch.empty(channels)
            scale = torch.empty(samples, channels) if self.modulated else None
        if not backward:
            return forward_problem(norm, Operands(input, parameter, parameter, scale, scale))
        operands = BackwardOperands(input, input, statistic, statistic, parameter, parameter, scale, scale)
        if self.around is None:
            return backward_problem(norm, operands, "backward")
        behind = input if self.around == "behind" else None
        numbers = {"grad_numbers": True} if self.around == "numbers" else {}
        return sum_backward_problem(norm, operands, "backward", behind, self.around == "grad_sum", **numbers)


class Values:
    """What a case computes, in fp64, as (samples, channels, positions)."""

    def __init__(self, case: Case) -> None:
        generator, (samples, channels) = np.random.default_rng(7), case.shape[:2]
        self.like = (samples, channels, prod(case.shape[2:]))
        self.element = np.dtype(np.float16 if case.dtype == torch.float16 else np.float32)

        def drawn(shape: tuple[int, ...], dtype: Any, around: float = 0.0, spread: float = 1.0) -> Any:
            return (generator.standard_normal(shape) * spread + around).astype(dtype)

        self.x, self.dy, self.behind, self.more = (
            drawn(self.like, self.element, 0.5 if first else 0.0) for first in (True, False, False, False)
        )
        self.weight, self.bias = drawn((channels,), np.float32, 1.0, 0.3), drawn((channels,), np.float32, 0.0, 0.3)
        self.scale = drawn(self.like[:2], np.float32, 0.0, 0.3) if case.modulated else None
        self.shift = drawn(self.like[:2], np.float32, 0.0, 0.3) if case.modulated else None
        self.case, groups = case, case.groups or channels
        x = self.x.astype(np.float64)
        axes = (2, 3) if case.groups else (0, 2, 3)

        def by_unit(values: Any) -> Any:
            """The means of units, as they lie in memory, and at each channel."""
            means = values.reshape(samples, groups, channels // groups, -1).mean(axes, keepdims=True)
            wide = np.broadcast_to(means, (samples, groups, channels // groups, 1)).reshape(samples, channels, 1)
            return means.reshape(-1), wide

        self.by_unit = by_unit
        self.mean, mean = by_unit(x)
        self.variance, variance = by_unit((x - mean) ** 2)
        self.rstd = 1.0 / np.sqrt(variance + EPS)
        self.xhat = (x - mean) * self.rstd
        self.gain, offsets = self.weight[None, :, None].astype(np.float64), self.bias[None, :, None].astype(np.float64)
        if self.scale is not None and self.shift is not None:
            factor = 1.0 + self.scale[:, :, None]
            self.gain, offsets = self.gain * factor, offsets * factor + self.shift[:, :, None]
        self.z = self.xhat * self.gain + offsets
        if case.around == "behind":
            self.z = self.z + self.behind

    def activated(self) -> Any:
        return _value(self.case.activation, self.z)

    def dz(self) -> Any:
        return self.dy.astype(np.float64) * _slope(self.case.activation, self.z)

    def gradient(self) -> Any:
        g = self.dz() * self.gain
        made = self.rstd * (g - self.by_unit(g)[1] - self.xhat * self.by_unit(g * self.xhat)[1])
        return made + self.more if self.case.around == "grad_sum" else made


def _value(activation: str | None, z: Any) -> Any:
    if activation == "relu":
        return np.maximum(z, 0.0)
    return z if activation is None else z / (1.0 + np.exp(-z))


def _slope(activation: str | None, z: Any) -> Any:
    if activation == "relu":
        return (z > 0.0).astype(np.float64)
    if activation is None:
        return np.ones_like(z)
    sigmoid = 1.0 / (1.0 + np.exp(-z))
    return sigmoid * (1.0 + z * (1.0 - sigmoid))


def _of_kernels(formula: Any, activation: str | None) -> Any:
    return lambda z, _alpha: Value(formula(activation, np.asarray(plain(z), np.float64)).astype(np.float32))


def _launched(plan: Any, name: str, arrays: dict[str, Any], **formulas: Any) -> dict[str, Memory]:
    """The launch of a plan over arrays, of which some are None."""
    memories = {name: Memory(array) for name, array in arrays.items() if array is not None}
    names = {np.dtype(np.float16): "float16", np.dtype(np.float32): "float32", np.dtype(np.int64): "int64"}
    arguments: list[Any] = [
        None if array is None else Pointer(memories[place], TYPES[names[array.dtype]])
        for place, array in arrays.items()
    ]
    constants = {key: value for key, value in plan.launch.constants.items() if key != "OVERLAP"}
    arguments += scalars_of(plan.launch.scalars)
    kernels().run(name, plan.blocks, plan.config.warps, arguments, **constants | formulas)
    return memories


def _empty(shape: tuple[int, ...], dtype: Any) -> Any:
    return np.full(shape, np.nan, dtype)


def _close(found: Any, expected: Any, tolerance: float) -> None:
    assert np.abs(found.astype(np.float64) - expected).max() <= tolerance * max(1.0, np.abs(expected).max())


def _tolerance(case: Case) -> float:
    return 5e-3 if case.dtype == torch.float16 else 3e-5


def check_backward(case: Case) -> bytes:
    """The bits of grad_input and of the sums of its tiles."""
    problem, values = case.problem(backward=True), Values(case)
    reason = RESIDENT.supports(problem)
    assert reason is None or reason.startswith("runs on cuda")
    assert spread(problem, case.config, case.processors) is not None
    made = ResidentBackward if case.around is None else ResidentSumBackward
    plan: Any = made(problem, case.config, case.processors)
    total, sums = plan.partials.total, 3 if case.around == "numbers" else 2
    behind = values.behind if case.around == "behind" else None
    if plan.launch.constants["TOLD"] and behind is not None:
        behind = values.activated().astype(values.element)
    arrays = {
        "dy": values.dy, "x": values.x, "dx": _empty(values.like, values.element), "weight": values.weight,
        "bias": values.bias, "scale": values.scale, "shift": values.shift, "mean": values.mean.astype(np.float32),
        "rstd": (1.0 / np.sqrt(values.variance + EPS)).astype(np.float32),
        "partials": _empty((sums, total), np.float32), "packets": np.zeros(plan.words, np.int64),
        "grad_sum": values.more if case.around == "grad_sum" else None, "behind": behind,
        "grad_behind": None if behind is None else _empty(values.like, values.element),
    }  # fmt: skip
    slope = _of_kernels(_slope, case.activation)
    memories = _launched(plan, "resident_backward", arrays, DERIVATIVE=slope)
    _close(memories["dx"].array, values.gradient(), _tolerance(case))
    assert set(memories["dx"].stores) == {1}
    if behind is not None:
        _close(memories["grad_behind"].array, values.dz(), _tolerance(case))
        assert set(memories["grad_behind"].stores) == {1}
    of_channels = (2,) if case.groups else (0, 2)
    channels = values.like[1] * (values.like[0] if case.groups else 1)
    partials = memories["partials"].array.reshape(sums, channels, -1).astype(np.float64).sum(2)
    for found, terms in zip(partials, (values.dz(), values.dz() * values.xhat, values.xhat), strict=False):
        _close(found, terms.sum(of_channels).reshape(-1), 4 * _tolerance(case))
    return memories["dx"].array.tobytes() + memories["partials"].array.tobytes()


def forward_arrays(values: Values, plan: Any) -> dict[str, Any]:
    units = values.mean.size
    return {
        "x": values.x, "y": _empty(values.like, values.element), "weight": values.weight, "bias": values.bias,
        "scale": values.scale, "shift": values.shift, "mean": _empty((units,), np.float32),
        "rstd": _empty((units,), np.float32), "var": _empty((units,), np.float32),
        "packets": np.zeros(plan.words, np.int64), "before": None, "numbers": None, "behind": None, "total": None,
    }  # fmt: skip


def check_forward(case: Case) -> bytes:
    """The bits of the results and the statistics."""
    problem, values = case.problem(backward=False), Values(case)
    plan = ResidentForward(problem, case.config, case.processors)
    arrays = forward_arrays(values, plan)
    value = _of_kernels(_value, case.activation)
    memories = _launched(plan, "resident_forward", arrays, VALUE=value)
    _close(memories["y"].array, values.activated(), _tolerance(case))
    assert set(memories["y"].stores) == {1}
    _close(memories["mean"].array, values.mean, 1e-6)
    _close(memories["var"].array, values.variance, 1e-6)
    return b"".join(memories[name].array.tobytes() for name in ("y", "mean", "rstd"))


def check_slabs(shape: tuple[int, ...], groups: int, config: SlabsConfig, processors: int, dtype: torch.dtype) -> bytes:
    """A forward of channels_last, of values that are those of channels_first in another order."""
    case = Case(shape, groups, ResidentConfig(512, 4, 1, 2, 4), dtype=dtype)
    values, (samples, channels) = Values(case), shape[:2]
    with torch.device("meta"):
        input = torch.empty(shape, dtype=dtype).contiguous(memory_format=torch.channels_last)
        parameter = torch.empty(channels)
    norm = norm_of("group_norm", groups, eps=EPS, activation=resolve("silu"))
    problem = forward_problem(norm, Operands(input, parameter, parameter))
    assert SLABS.supports(problem) in (None, "runs on cuda, the tensor is on meta")
    plan: Any = SlabsForward(problem, config, processors)
    units = samples * groups
    arrays = {
        "x": np.ascontiguousarray(values.x.transpose(0, 2, 1)),
        "y": _empty((samples, values.like[2], channels), values.element), "weight": values.weight, "bias": values.bias,
        "scale": None, "shift": None, "mean": _empty((units,), np.float32), "rstd": _empty((units,), np.float32),
        "var": _empty((units,), np.float32), "packets": np.zeros(plan.words, np.int64), "before": None,
        "numbers": None, "behind": None, "total": None,
    }  # fmt: skip
    memories = _launched(plan, "slabs_forward", arrays, VALUE=_of_kernels(_value, "silu"))
    _close(memories["y"].array.transpose(0, 2, 1), values.activated(), _tolerance(case))
    for name in ("y", "mean", "var"):
        assert set(memories[name].stores) == {1}, name
    _close(memories["mean"].array, values.mean, 1e-6)
    _close(memories["var"].array, values.variance, 1e-6)
    return b"".join(memories[name].array.tobytes() for name in ("y", "mean", "rstd"))


def slabs_backward_problem(case: Case) -> Problem:
    samples, channels = case.shape[:2]
    with torch.device("meta"):
        input = torch.empty(case.shape, dtype=case.dtype).contiguous(memory_format=torch.channels_last)
        parameter, statistic = torch.empty(channels), torch.empty(samples, case.groups)
        scale = torch.empty(samples, channels) if case.modulated else None
    norm = norm_of("group_norm", case.groups, eps=EPS, activation=resolve(case.activation))
    operands = BackwardOperands(input, input, statistic, statistic, parameter, parameter, scale, scale)
    return backward_problem(norm, operands, "backward")


def slabs_backward_arrays(values: Values, plan: Any) -> dict[str, Any]:
    samples, channels, positions = values.like
    return {
        "dy": np.ascontiguousarray(values.dy.transpose(0, 2, 1)),
        "x": np.ascontiguousarray(values.x.transpose(0, 2, 1)),
        "dx": _empty((samples, positions, channels), values.element), "weight": values.weight, "bias": values.bias,
        "scale": values.scale, "shift": values.shift, "mean": values.mean.astype(np.float32),
        "rstd": (1.0 / np.sqrt(values.variance + EPS)).astype(np.float32),
        "partials": _empty((2, plan.partials.total), np.float32), "packets": np.zeros(plan.words, np.int64),
    }  # fmt: skip


def check_slabs_backward(case: Case) -> bytes:
    """A backward of channels_last, of values that are those of channels_first in another order."""
    problem, values = slabs_backward_problem(case), Values(case)
    assert SLABS.supports(problem) in (None, "runs on cuda, the tensor is on meta")
    plan: Any = SlabsBackward(problem, case.config, case.processors)
    arrays = slabs_backward_arrays(values, plan)
    memories = _launched(plan, "slabs_backward", arrays, DERIVATIVE=_of_kernels(_slope, case.activation))
    _close(memories["dx"].array.transpose(0, 2, 1), values.gradient(), _tolerance(case))
    for name in ("dx", "partials"):
        assert set(memories[name].stores) == {1}, name
    samples, channels = case.shape[:2]
    partials = memories["partials"].array.reshape(2, samples, -1, channels).astype(np.float64).sum(2)
    for found, terms in zip(partials, (values.dz(), values.dz() * values.xhat), strict=True):
        _close(found, terms.sum(2), 4 * _tolerance(case))
    return memories["dx"].array.tobytes() + memories["partials"].array.tobytes()


ONE, LATE, TWO = (
    ResidentConfig(512, 4, 1, 2, 4),
    ResidentConfig(256, 2, 1, 3, 3),
    ResidentConfig(128, 1, 2, 1, 2),
)
THREE, MANY = ResidentConfig(256, 4, 3, 1, 4), ResidentConfig(512, 2, 1, 1, 6)


def name_of(case: Case) -> str:
    config = case.config
    sizes = "x".join(map(str, case.shape))
    return f"{sizes} {case.groups} {config.vectors}x{config.tiles} {config.lag} {case.around or ''}"


@pytest.mark.parametrize(
    "case",
    [
        Case((3, 8, 64, 24), 4, ONE, activation="relu"),
        Case((3, 8, 64, 24), 4, LATE, dtype=torch.float16, modulated=True),
        Case((5, 12, 20, 26), 3, TWO),
        Case((2, 6, 64, 60), 2, THREE, modulated=True),
        Case((7, 8, 32, 32), 8, MANY, processors=1),
        Case((2, 4, 64, 48), 2, ResidentConfig(128, 1, 3, 1, 3), modulated=True),  # full chunks of three tiles
        Case((1, 4, 64, 64), 1, ONE, processors=40),  # one wave
        Case((1, 12, 96, 96), 1, ResidentConfig(128, 4, 1, 2, 4), processors=90),  # with a leader
        Case((4, 6, 24, 30), 0, ONE),
        Case((9, 5, 12, 14), 0, TWO, activation=None),
        Case((40, 6, 4, 10), 0, LATE, dtype=torch.float16),
    ],
    ids=name_of,
)  # fmt: skip
def test_forward_and_backward(case: Case) -> None:
    check_forward(case)
    check_backward(case)


@pytest.mark.parametrize(
    "case",
    [
        Case((3, 8, 37, 53), 4, ONE),
        Case((3, 8, 37, 53), 4, LATE, dtype=torch.float16, activation="relu", modulated=True),
        Case((2, 6, 41, 43), 2, THREE, dtype=torch.float16),
        Case((5, 12, 19, 27), 3, TWO),
        Case((7, 8, 31, 33), 8, MANY, processors=1),
        Case((1, 4, 63, 65), 1, ONE, processors=40),
        Case((1, 6, 101, 111), 1, ResidentConfig(128, 2, 1, 2, 4), processors=110),  # with a leader
        Case((2, 40, 3, 7), 8, ONE, dtype=torch.float16),  # two vectors of each channel, or one
        Case((4, 6, 23, 29), 0, ONE, activation=None),
        Case((9, 5, 11, 13), 0, TWO, processors=3, dtype=torch.float16),
        Case((40, 6, 3, 11), 0, LATE, processors=14),
        Case((2, 3, 3, 683), 3, ONE),  # 512 vectors and an element, of which some have 511 whole ones
        Case((2, 3, 1, 2053), 3, ONE),  # of which some have an empty second tile
        Case((4, 4, 47, 47), 0, THREE, dtype=torch.float16, activation="relu"),  # a chunk has a tile more than a unit
    ],
    ids=name_of,
)  # fmt: skip
def test_a_backward_of_planes_that_begin_between_vectors(case: Case) -> None:
    check_backward(case)


@pytest.mark.parametrize(
    "case",
    [
        Case((3, 8, 24, 26), 4, ONE, around="grad_sum"),
        Case((3, 8, 24, 26), 4, THREE, dtype=torch.float16, around="behind", activation="relu"),
        Case((3, 8, 24, 30), 2, LATE, around="behind"),
        Case((5, 16, 4, 10), 8, TWO, around="numbers"),
        Case((3, 8, 64, 24), 4, MANY, dtype=torch.float16, around="numbers", processors=1),
        Case((4, 6, 24, 30), 0, ONE, around="behind", activation="relu"),
        Case((4, 6, 24, 30), 0, TWO, around="grad_sum"),
    ],
    ids=name_of,
)
def test_a_backward_with_sums_around_the_norm(case: Case) -> None:
    check_backward(case)


@pytest.mark.parametrize(
    "chosen",
    [ResidentConfig(512, 2, 2, 1, 6), ResidentConfig(256, 4, 1, 2, 4), ResidentConfig(512, 4, 4, 1, 3)],
    ids=str,
)
def test_a_mean_far_from_0_is_rounded_about_once(chosen: ResidentConfig) -> None:
    """Of chunks that fill units, and of others. With the roundings of a sum of chunks and of its quotient it would err
    by 0.7 units in the last place in the mean, and 2 at most."""
    case = Case((12, 24, 64, 64), 8, chosen, processors=3)
    values = Values(case)
    values.x += np.float32(1000.0)
    plan = ResidentForward(case.problem(backward=False), chosen, case.processors)
    arrays = forward_arrays(values, plan)
    memories = _launched(plan, "resident_forward", arrays, VALUE=_of_kernels(_value, "silu"))
    expected = values.x.astype(np.float64).reshape(96, -1)
    errors = (memories["mean"].array - expected.mean(1)) / np.spacing(np.float32(1000.0))
    assert np.abs(errors).max() < 1.25
    assert np.sqrt((errors**2).mean()) < 0.45
    assert np.abs(memories["var"].array / expected.var(1) - 1.0).max() < 1e-5


@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize("chosen", [ResidentConfig(512, 4, 1, 2, 4), ResidentConfig(128, 2, 1, 2, 4)], ids=["", "led"])
def test_what_is_not_finite_stays_in_its_unit(
    monkeypatch: pytest.MonkeyPatch, value: float, chosen: ResidentConfig
) -> None:
    """The deviation of its unit is no number, and others are what they are."""
    if chosen.vectors == 128:
        monkeypatch.setattr(config, "MANY_PARTS", 2)
    case = Case((3, 4, 40, 60), 2, chosen, processors=5)
    values, problem = Values(case), case.problem(backward=False)
    values.x[1, 2, 77] = value
    plan = ResidentForward(problem, chosen, case.processors)
    assert plan.launch.constants["LEAD"] is (chosen.vectors == 128)
    arrays = forward_arrays(values, plan)
    memories = _launched(plan, "resident_forward", arrays, VALUE=_of_kernels(_value, "silu"))
    others = [0, 1, 2, 4, 5]
    _close(memories["mean"].array[others], values.mean[others], 1e-6)
    _close(memories["var"].array[others], values.variance[others], 1e-6)
    assert np.isnan([memories["var"].array[3], memories["rstd"].array[3]]).all()
    assert not np.isfinite(memories["mean"].array[3])
    results = memories["y"].array.reshape(6, -1)
    assert np.isnan(results[3]).all()
    assert np.isfinite(results[others]).all()


@pytest.mark.parametrize("positions", [520, 2049])  # of 2049 some planes have a vector less than a tile
def test_a_slope_that_is_no_number_beyond_a_plane_does_not_count(positions: int) -> None:
    """Far from its mean silu's slope is the product of 0 and an infinity."""
    case = Case((1, 4, positions), 2, ONE)
    problem = case.problem(backward=True)
    assert not ResidentBackward(problem, case.config, 2).launch.constants["FULL"]
    generator = np.random.default_rng(7)
    dy = generator.standard_normal((1, 4, positions)).astype(np.float32)
    x = np.full((1, 4, positions), 3e38, np.float32)
    plan = ResidentBackward(problem, case.config, 2)
    statistics, ones = np.full(2, 3e38, np.float32), np.ones(4, np.float32)
    arrays = {
        "dy": dy, "x": x, "dx": _empty((1, 4, positions), np.float32), "weight": ones, "bias": ones, "scale": None,
        "shift": None, "mean": statistics, "rstd": np.full(2, 316.0, np.float32),
        "partials": _empty((2, plan.partials.total), np.float32), "packets": np.zeros(plan.words, np.int64),
        "grad_sum": None, "behind": None, "grad_behind": None,
    }  # fmt: skip
    memories = _launched(plan, "resident_backward", arrays, DERIVATIVE=_of_kernels(_slope, "silu"))
    assert np.isfinite(memories["dx"].array).all()
    assert np.isfinite(memories["partials"].array).all()


def test_a_slope_that_is_no_number_beyond_a_slab_does_not_count() -> None:
    """Where there is no position there are zeros, and the slope at zero is the product of 0 and an infinity here."""
    case = Case((2, 8, 6, 9), 2, SlabsConfig(128, 1, 1, 1, 4, 4), 4)
    problem, values = slabs_backward_problem(case), Values(case)
    values.x[...] = 3e38
    plan: Any = SlabsBackward(problem, case.config, case.processors)
    assert not plan.launch.constants["EVEN"]
    arrays = slabs_backward_arrays(values, plan)
    arrays["mean"], arrays["rstd"] = np.full(4, 3e38, np.float32), np.full(4, 316.0, np.float32)
    memories = _launched(plan, "slabs_backward", arrays, DERIVATIVE=_of_kernels(_slope, "silu"))
    assert np.isfinite(memories["dx"].array).all()
    assert np.isfinite(memories["partials"].array).all()


def test_a_copy_that_is_not_awaited_has_not_arrived() -> None:
    """What the interpreter is for: it finds a kernel that counts its copies wrongly."""
    module = kernels().modules["resident_backward"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "wait_group", lambda _left: None)
        with pytest.raises(AssertionError):
            check_backward(Case((3, 8, 37, 53), 4, ONE))


@pytest.mark.parametrize(
    ("shape", "groups", "config", "processors"),
    [
        ((6, 64, 24, 24), 8, SlabsConfig(128, 1, 2, 1, 4, 8), 6),
        ((6, 64, 24, 24), 8, SlabsConfig(128, 1, 2, 2, 4, 8), 5),
        (
            (9, 64, 25, 27),
            16,
            SlabsConfig(256, 2, 1, 2, 3, 8),
            8,
        ),  # nearly as many chunks as blocks
        ((9, 64, 25, 27), 16, SlabsConfig(256, 2, 1, 1, 3, 8), 8),
        ((2, 96, 17, 19), 12, SlabsConfig(128, 1, 1, 1, 4, 16), 50),  # one wave
        ((5, 24, 20, 22), 3, SlabsConfig(256, 2, 2, 2, 2, 8), 6),  # vectors that do not fill the lanes
        ((4, 64, 20, 23), 64, SlabsConfig(256, 2, 1, 1, 4, 8), 9),  # of each channel
        ((4, 80, 20, 22), 8, SlabsConfig(512, 4, 1, 2, 3, 16), 10),  # pieces of 2 channels
    ],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("leads", [False, True], ids=["", "led"])
def test_slabs(
    monkeypatch: pytest.MonkeyPatch,
    shape: tuple[int, ...],
    groups: int,
    config: SlabsConfig,
    processors: int,
    dtype: torch.dtype,
    leads: bool,
) -> None:
    if leads:
        monkeypatch.setattr(slabs, "MOST_READ", 2)
    check_slabs(shape, groups, config, processors, dtype)


@pytest.mark.parametrize(
    "case",
    [
        Case((6, 64, 24, 24), 8, SlabsConfig(128, 1, 1, 1, 4, 8), 10),
        Case((6, 64, 24, 24), 64, SlabsConfig(256, 2, 1, 2, 4, 8), 5, activation=None),  # of each channel
        Case((9, 64, 25, 27), 16, SlabsConfig(256, 2, 2, 1, 3, 8), 8, torch.float16, modulated=True),
        Case((4, 64, 25, 27), 64, SlabsConfig(256, 2, 1, 1, 3, 8), 8, torch.float16),
        Case((2, 96, 17, 19), 12, SlabsConfig(128, 1, 1, 1, 4, 16), 50, torch.float16),  # one wave
        Case((5, 24, 20, 22), 3, SlabsConfig(256, 2, 1, 2, 2, 8), 8),  # vectors that do not fill the lanes
        Case((5, 40, 20, 22), 2, SlabsConfig(512, 2, 1, 1, 2, 8), 6, torch.float16, activation="relu"),  # 5 vectors
        Case((4, 80, 20, 22), 8, SlabsConfig(512, 4, 1, 1, 3, 16), 5, torch.float16),  # pieces of 2 channels
    ],
    ids=name_of,
)  # fmt: skip
@pytest.mark.parametrize("leads", [False, True], ids=["", "led"])
def test_a_backward_in_slabs(monkeypatch: pytest.MonkeyPatch, case: Case, leads: bool) -> None:
    if leads:
        monkeypatch.setattr(slabs, "MOST_READ", 2)
    check_slabs_backward(case)


@pytest.mark.parametrize("ahead", [False, True], ids=["one is late", "one is ahead"])
@pytest.mark.parametrize(
    ("name", "lag", "leads"),
    [("forward", 1, False), ("forward", 2, False), ("forward", 2, True), ("backward", 1, False), ("backward", 2, False),
     ("backward", 2, True), ("slabs", 1, False), ("slabs", 1, True), ("slabs", 2, True), ("slabs_backward", 1, False),
     ("slabs_backward", 1, True), ("slabs_backward", 2, True)],
)  # fmt: skip
def test_blocks_of_any_speed_make_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, name: str, lag: int, leads: bool, ahead: bool
) -> None:
    """Seven units have as many chunks each as there are blocks. A block that is ahead of all others has more than one
    chunk of the second unit, and waits for the others' there; without one that is late the others do its share."""
    if leads:
        monkeypatch.setattr(config, "MANY_PARTS", 2)
        monkeypatch.setattr(slabs, "MOST_READ", 2)
    module = kernels().modules["resident" if name == "forward" else "resident_backward" if name == "backward" else name]
    claimed, blocks, units = module.claimed, 12, 7
    counts, changed = [0] * blocks, threading.Condition()

    def paced(*arguments: Any) -> Any:
        place = int(plain(kernels().language.program_id(0)))
        _, last_unit, all_units, *_ = arguments
        with changed:
            counts[place] += bool(last_unit < all_units)
            changed.notify_all()
            if ahead and place > 0:  # until the first one cannot go on: a leader leads one chunk ahead of its results
                assert changed.wait_for(lambda: counts[0] >= (lag if leads else lag + 1), 60)
            if not ahead and place == blocks - 1:  # each of the others claims once in vain
                assert changed.wait_for(lambda: sum(counts[:-1]) == (units - 1) * blocks + blocks - 1, 60)
        return claimed(*arguments)

    def run() -> bytes:
        counts[:] = [0] * blocks
        if name == "slabs":
            place = SlabsConfig(128, 1, 1, lag, 4, 8)
            return check_slabs((units, 64, 12, 16), 8, place, 3, torch.float16)
        if name == "slabs_backward":
            place = SlabsConfig(128, 1, 1, lag, 4, 8)
            return check_slabs_backward(Case((units, 64, 12, 16), 8, place, 3, torch.float16))
        check = check_forward if name == "forward" else check_backward
        return check(Case((units, 2, 96, 64), 1, ResidentConfig(256, 2, 1, lag, 4), processors=3))

    expected = run()
    monkeypatch.setattr(module, "claimed", paced)
    assert run() == expected
    assert sum(counts) == units * blocks
