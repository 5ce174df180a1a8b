"""Every Triton kernel at small shapes in Triton's interpreter on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
from interpreter_support import interpreted

triton = pytest.importorskip("triton")

CODE = '''
import json
from fractions import Fraction
from itertools import cycle, product

import torch

import fusednorm
from fusednorm import choice, dispatch, ops
from fusednorm.norm import norm_of
from fusednorm.operands import BackwardOperands, Operands
from fusednorm.problems import backward_direction, backward_problem, forward_problem

from cpu_support import backward, faults, forward
from fusednorm.backends import reference
from fusednorm.backends.triton import instances, runs
from fusednorm.backends.triton.config import rows, tiles as tiled_passes
from fusednorm.backends.triton.config.kinds import (
    ColumnsBackwardConfig, HeldConfig, PassConfig, RowsBackwardConfig, StepsConfig, TilesConfig,
)
from fusednorm.backends.triton.config.tiles import tiled
from fusednorm.backends.triton.plans import tiles
from fusednorm.bench.workloads import Workload, draw

# Small steps and few programs, so that short rows need several steps, and a program several rows: the interpreter takes
# seconds for long ones. `chosen` is what the heuristic chooses.
choices = (
    "held_for", "rows_forward_for", "plane_rows_backward_for", "rows_backward_for", "columns_backward_for",
    "passes_for",
)
chosen = {name: getattr(instances, name) for name in choices}
small = {
    **chosen,
    "rows_forward_for": lambda problem: StepsConfig(32, 4),
    "plane_rows_backward_for": lambda problem: StepsConfig(32, 4),
    "rows_backward_for": lambda problem: RowsBackwardConfig(2, 4, 2),
    "columns_backward_for": lambda problem: ColumnsBackwardConfig(64, 4, 12, 32, 2, 4),
}
again = {**small, "rows_backward_for": lambda problem: RowsBackwardConfig(1, 4, 2, reload=True)}
one_row = {**small, "rows_backward_for": lambda problem: RowsBackwardConfig(1, 4, 3)}
# Of two tiles to a chunk, and several chunks: planes that begin at windows, and rows of several positions.
planes = {
    **chosen,
    "passes_for": lambda problem: TilesConfig(
        PassConfig(1, 32, 3 if problem.backward else 1, stages=2), PassConfig(2, 32, 2)
    ),
}


def whole_group(problem):
    """Whether the pass for the moments takes a group of channels_last for one channel."""
    return not problem.backward and runs.for_moments(problem).view != problem.view


positions = {**chosen, "passes_for": lambda problem: TilesConfig(PassConfig(16, 2, 2, stages=2), PassConfig(16, 4, 2))}
walking = {**chosen, "held_for": lambda problem, seen: HeldConfig(2, 2, samples=4, steps=3 if problem.backward else 1)}
within = {
    **chosen,
    "passes_for": lambda problem: TilesConfig(
        PassConfig(1, 64) if whole_group(problem) else PassConfig(16, 8, 2, stages=2), PassConfig(2, 16, 2)
    ),
}
rows.MOST_ROW = 200
runs.REPEATED = 0, 0
runs.SHORTEST_WINDOWED_ROW = 32
tiles.MOST_SUMMED, tiles.FOLDED = 40, 16
found = []
for instance, family, shape, groups, dtype, layout, activation, modulated, configs in (
    ("triton.tiles", "group_norm", (2, 12, 5, 7), 3, "float32", "nchw", "silu", True, chosen),
    ("triton.tiles", "group_norm", (2, 3, 7, 9), 1, "float32", "nhwc", "silu", True, chosen),
    ("triton.tiles", "group_norm", (3, 5, 7, 11), 1, "float16", "nhwc", None, False, chosen),
    ("triton.tiles", "group_norm", (2, 12, 5, 7), 3, "float64", "nhwc", "gelu", True, chosen),
    ("triton.tiles", "batch_norm", (3, 5, 4, 4), 0, "float32", "nhwc", "tanh", False, chosen),
    ("triton.tiles", "batch_norm", (3, 5, 4, 4), 0, "float32", "nchw", "gelu_tanh", False, chosen),
    ("triton.tiles", "batch_norm", (20, 6, 4, 3), 0, "float32", "nchw", "silu", False, chosen),
    ("triton.tiles", "batch_norm", (45, 6), 0, "float32", "nchw", "silu", True, chosen),
    ("triton.tiles", "batch_norm", (44, 6), 0, "float16", "nchw", "silu", True, positions),
    ("triton.tiles", "batch_norm", (45, 33), 0, "float16", "nchw", None, True, positions),
    ("triton.held", "group_norm", (23, 15), 3, "float32", "nchw", "silu", True, walking),
    ("triton.held", "group_norm", (17, 6, 3), 2, "float16", "nchw", None, False, walking),
    ("triton.held", "group_norm", (17, 6, 2, 2), 2, "float32", "nhwc", "relu", True, walking),
    ("triton.held", "instance_norm", (15, 3, 5), 0, "float32", "nchw", "silu", True, walking),
    ("triton.tiles", "instance_norm", (2, 3, 5, 5, 5), 0, "float16", "nchw", "leaky_relu", False, chosen),
    ("triton.tiles", "group_norm", (2, 160, 3, 3), 2, "float16", "nchw", None, False, chosen),
    ("triton.tiles", "layer_norm", (3, 77), 1, "float32", "rows", "silu", False, chosen),
    ("triton.tiles", "group_norm", (42, 12), 3, "float32", "nchw", None, True, chosen),
    ("triton.tiles", "group_norm", (2, 6, 7, 9), 3, "float16", "nchw", "silu", True, chosen),
    ("triton.tiles", "group_norm", (2, 4, 11, 11), 2, "float16", "nchw", "silu", True, planes),
    ("triton.tiles", "batch_norm", (2, 3, 7, 13), 0, "float16", "nchw", "relu", False, planes),
    ("triton.tiles", "instance_norm", (3, 2, 51), 0, "float16", "nchw", None, False, planes),
    ("triton.tiles", "group_norm", (2, 10, 9, 4), 5, "float16", "nhwc", "silu", True, positions),
    ("triton.tiles", "group_norm", (1, 10, 9, 8), 1, "float16", "nhwc", None, False, within),
    ("triton.tiles", "instance_norm", (1, 33, 5, 7), 0, "float32", "nhwc", "gelu", False, positions),
    ("triton.tiles", "batch_norm", (3, 5, 9, 7), 0, "float32", "nhwc", None, False, chosen),
    ("triton.tiles", "group_norm", (2, 3, 5, 13), 3, "float16", "nhwc", "silu", True, positions),
    ("triton.tiles", "group_norm", (2, 6, 5, 7), 2, "float16", "nhwc", None, False, positions),
    ("triton.tiles", "instance_norm", (3, 3, 5, 7), 0, "float32", "nhwc", "gelu", False, within),
    ("triton.tiles", "group_norm", (3, 5, 5, 13), 1, "float16", "nhwc", None, False, chosen),
    ("triton.held", "batch_norm", (3, 5, 4, 3), 0, "float32", "nchw", "silu", True, chosen),
    ("triton.held", "batch_norm", (5, 7, 3, 3), 0, "float32", "nchw", "silu", False, chosen),
    ("triton.held", "batch_norm", (6, 7), 0, "float16", "nchw", None, True, chosen),
    ("triton.held", "batch_norm", (7, 1, 3, 3), 0, "float32", "nhwc", "leaky_relu", False, chosen),
    ("triton.held", "group_norm", (33, 6, 4, 16), 3, "float32", "nchw", "silu", True, chosen),
    ("triton.held", "group_norm", (2, 12, 5, 7), 3, "float32", "nchw", "silu", True, chosen),
    ("triton.held", "group_norm", (5, 12, 4, 3), 3, "float16", "nhwc", "gelu", True, chosen),
    ("triton.held", "group_norm", (60, 12), 3, "float32", "nchw", None, False, chosen),
    ("triton.held", "batch_norm", (3, 5, 4, 4), 0, "float64", "nchw", "gelu_tanh", False, chosen),
    ("triton.held", "batch_norm", (3, 20, 3, 4), 0, "float32", "nhwc", "tanh", False, chosen),
    ("triton.held", "batch_norm", (3, 20, 3, 4), 0, "float32", "nhwc", "silu", True, chosen),
    ("triton.held", "batch_norm", (5, 7, 3, 3), 0, "float16", "nhwc", None, True, chosen),
    ("triton.held", "batch_norm", (2, 1, 5, 2), 0, "float64", "nhwc", "silu", True, chosen),
    ("triton.held", "instance_norm", (3, 40, 5, 3), 0, "float32", "nhwc", "silu", True, chosen),
    ("triton.held", "rms_norm", (5, 24), 1, "float16", "rows", None, False, chosen),
    ("triton.rows", "layer_norm", (5, 24), 1, "float32", "rows", "hardswish", False, chosen),
    ("triton.rows", "rms_norm", (5, 24), 1, "float32", "rows", None, False, small),
    ("triton.rows", "layer_norm", (5, 100), 1, "float16", "rows", None, False, small),
    ("triton.rows", "layer_norm", (9, 96), 1, "float64", "rows", "silu", False, small),
    ("triton.rows", "layer_norm", (6, 5, 20), 2, "float32", "rows", "silu", False, small),
    ("triton.rows", "layer_norm", (9, 131), 1, "float16", "rows", "silu", False, one_row),
    ("triton.rows", "layer_norm", (5, 100), 1, "float16", "rows", None, False, again),
    ("triton.rows", "rms_norm", (5, 50), 1, "float64", "rows", "silu", False, again),
    ("triton.rows", "layer_norm", (5, 330), 1, "float16", "rows", "silu", False, small),
    ("triton.rows", "rms_norm", (3, 160), 1, "float64", "rows", None, False, small),
    ("triton.rows", "instance_norm", (3, 5, 10, 10), 0, "float32", "nchw", "silu", True, small),
    ("triton.rows", "instance_norm", (2, 3, 7, 9), 0, "float16", "nchw", None, False, small),
    ("triton.rows", "group_norm", (2, 4, 8, 8), 4, "float64", "nchw", "gelu", False, small),
    ("triton.rows", "instance_norm", (1, 5, 9, 9), 0, "float32", "nchw", "silu", True, small),
    ("triton.rows", "instance_norm", (4, 2, 3, 7), 0, "float16", "nchw", "leaky_relu", False, small),
    ("triton.whole", "layer_norm", (5, 100), 1, "float32", "rows", "hardswish", False, chosen),
    ("triton.whole", "rms_norm", (5, 24), 1, "float16", "rows", None, False, chosen),
    ("triton.whole", "group_norm", (2, 12, 3, 3), 4, "float32", "nchw", "silu", True, chosen),
    ("triton.whole", "group_norm", (2, 12, 3, 3), 1, "float32", "nchw", None, False, chosen),
    ("triton.whole", "group_norm", (2, 12, 4, 4), 2, "float16", "nchw", None, False, chosen),
    ("triton.whole", "instance_norm", (3, 5, 3, 7), 0, "float32", "nchw", "silu", True, chosen),
):
    vars(instances).update(configs)
    dispatch._plans.clear()
    workload = Workload(family, shape, groups, dtype=dtype, layout=layout, activation=activation, modulated=modulated)
    inputs = draw(workload)
    results = forward(workload, inputs, instance)
    back = "reference" if instance == "triton.whole" else instance
    results |= backward(workload, inputs, results["mean"], results["rstd"], back)
    found += [(instance, workload.key, fault) for fault in faults(workload, inputs, results)]


def exact(x, weight, bias, eps, mean=None, var=None):
    """The output and 1 / deviation in float64, over dimensions 1 and up of (N, K), or of given statistics of dim 1."""
    x = x.double()
    if mean is None:
        var, mean = torch.var_mean(x, 1, correction=0, keepdim=True)
    rstd = (var.double() + eps).rsqrt()
    return (x - mean.double()) * rstd * weight + bias, rstd


def differ(place, results, expected):
    """What is further from float64 than float32 explains."""
    return [
        (place, name)
        for name, result, value in zip(("output", "rstd"), results, expected, strict=True)
        if not torch.allclose(result.double().reshape(value.shape), value, rtol=1e-5, atol=1e-5)
    ]


# Plans of each kind with one eps after another; triton.tiles with partials merged by all programs, and by a
# launch of their own.
eps_ignored = []
vars(instances).update(small)
x, weight, bias = torch.randn(3, 100), torch.rand(100), torch.randn(100)
for merged in (512, 0):
    tiles.merged = lambda problem: merged
    dispatch._plans.clear()
    for name in ("triton.whole", "triton.rows", "triton.tiles"):
        with fusednorm.use_instance(name):
            for eps in (0.5, 1e-5, 0.125, 0.5):
                y, mean, rstd, _ = ops.norm_forward(
                    x, weight, bias, None, None, None, None, "layer_norm", 1, 1, eps, "", 0.0
                )
                eps_ignored += differ((name, merged, eps), (y, rstd), exact(x, weight, bias, eps))

# Given statistics, whose variance is as small as eps or smaller.
given_eps_ignored = []
x, mean, var = torch.randn(40, 6), torch.randn(6), torch.tensor([0.0, 1e-6, 0.1, 0.5, 1.0, 7.0])
weight, bias = torch.rand(6), torch.randn(6)
with fusednorm.use_instance("triton.tiles"):
    for eps in (0.5, 1e-3, 0.125, 0.5):
        y, _, rstd, _ = ops.norm_forward(x, weight, bias, None, None, mean, var, "batch_norm", 0, 1, eps, "", 0.0)
        given_eps_ignored += differ(eps, (y, rstd), exact(x, weight, bias, eps, mean, var))


def activated(z, activation, parameter):
    return z * torch.sigmoid(parameter * z) if activation == "silu" else torch.where(z > 0, z, parameter * z)


# In float64 eps and the activation's parameter keep their digits; what torch takes for eps is taken.
imprecise = []
torch.manual_seed(1)
x, dy = torch.randn(2, 4, 5, dtype=torch.float64), torch.randn(2, 4, 5, dtype=torch.float64)
for name in ("triton.whole", "triton.tiles"):
    for eps in (0.1, 1e-3 / 3, -0.5, float("nan"), float("inf"), 0, True):
        for activation, parameter in (("silu", 1.1), ("silu", 1.0), ("leaky_relu", -0.3), ("leaky_relu", 0.01)):
            called = ("instance_norm", 0, 1, eps, activation, parameter)
            with fusednorm.use_instance(name):
                y, mean, rstd, _ = ops.norm_forward(x, None, None, None, None, None, None, *called)
            right = (x.var(2, correction=0) + eps).rsqrt()
            z = (x - x.mean(2, keepdim=True)) * right[..., None]
            value = activated(z, activation, parameter)
            if not torch.allclose(y, value, rtol=1e-12, atol=1e-12, equal_nan=True):
                imprecise.append((name, eps, activation, parameter))
            if eps == 0.1 and name == "triton.tiles":
                z.requires_grad_()
                value = activated(z, activation, parameter)
                (dz,) = torch.autograd.grad(value, z, dy)
                xhat = z.detach()
                dx = right[..., None] * (dz - dz.mean(2, True) - xhat * (dz * xhat).mean(2, True))
                with fusednorm.use_instance(name):
                    found_dx = ops.norm_backward(
                        dy, x, mean, rstd, None, None, None, None, "instance_norm", 0, 1, activation, parameter, True,
                        (True, False, False, False, False),
                    )[0]
                if not torch.allclose(found_dx, dx, rtol=1e-11, atol=1e-11):
                    imprecise.append((name, "backward", activation, parameter))

# A NaN stays in its row, although windows hold elements of the rows beside it.
vars(instances).update(one_row)
dispatch._plans.clear()
x, dy = torch.randn(9, 131).half(), torch.randn(9, 131).half()
x[4], dy[6] = float("nan"), float("inf")
mean, rstd = x.float().mean(1, keepdim=True), x.float().std(1, keepdim=True).reciprocal()
with fusednorm.use_instance("triton.rows"):
    found_dx = ops.norm_backward(
        dy, x, mean, rstd, torch.rand(131), None, None, None, "layer_norm", 1, 1, "", 0.0, True,
        (True, False, False, False, False),
    )[0]
leaks = [row for row in range(9) if found_dx[row].isfinite().all() == (row in (4, 6))]

# Samples of the input that lie further apart than those of the output, and alike in their windows; or channels.
strided = []


def samples_apart(x):
    step = x[0].numel()
    return torch.empty(len(x) * (step + 8), dtype=x.dtype).as_strided(x.shape, (step + 8, *x.stride()[1:])).copy_(x)


def channels_apart(x):
    return torch.stack((x, torch.full_like(x, float("nan"))), 2)[:, :, 0]


for name, shape, configs, called, spread in (
    ("triton.tiles", (2, 3, 7, 9), planes, ("instance_norm", 0, 1), samples_apart),
    ("triton.rows", (9, 131), one_row, ("layer_norm", 1, 1), samples_apart),
    ("triton.rows", (2, 3, 7, 9), small, ("instance_norm", 0, 1), channels_apart),
):
    vars(instances).update(configs)
    dispatch._plans.clear()
    x = torch.randn(shape).half()
    apart = spread(x)
    dy = torch.randn(shape).half()
    found_two = []
    with fusednorm.use_instance(name):
        for one in (x, apart):
            y, mean, rstd, _ = ops.norm_forward(one, None, None, None, None, None, None, *called, 1e-3, "", 0.0)
            wanted = (True, False, False, False, False)
            dx = ops.norm_backward(dy, one, mean, rstd, None, None, None, None, *called, "", 0.0, True, wanted)[0]
            found_two.append((y, dx))
    for label, dense, other in zip(("output", "grad_input"), *found_two):
        if not torch.equal(dense, other):
            strided.append((name, label))

# Given statistics of every dtype, and not contiguous, beside inputs of every dtype. The output is that of the mean and
# rstd that are kept, to the bit, as a backward recomputes it.
given_faults = []
def rounded_once(*factors):
    parts = [tensor.tolist() for tensor in map(torch.flatten, torch.broadcast_tensors(*factors))]
    exact = [float(Fraction(a) * Fraction(b) + Fraction(c)) for a, b, c in zip(*parts)]
    return torch.tensor(exact, dtype=torch.float64).view(factors[0].shape).to(factors[0].dtype)
dtypes = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
shapes = cycle((((3, 6, 5, 7), False), ((3, 6, 5, 7), True), ((40, 6), True)))
for (dtype, kind), (shape, last) in zip(product(dtypes, dtypes), shapes):
    compute = torch.float64 if dtype is torch.float64 else torch.float32
    x = torch.randn(shape).to(dtype)
    if last and x.dim() == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    mean, var = torch.randn(12).to(kind)[::2], (torch.rand(12) + 0.1).to(kind)[::2]
    with fusednorm.use_instance("triton.tiles"):
        called = (x, weight, bias, None, None, mean, var, "batch_norm", 0, 1, 1e-3, "", 0.0)
        y, saved_mean, saved_rstd, _ = ops.norm_forward(*called)
        norm = norm_of("batch_norm", eps=1e-3, training=False)
        alone = dispatch.forward(norm, Operands(*called[:7]), wants_statistics=False)
    view = (-1,) + (1,) * (x.dim() - 2)
    rstd = (var.double() + 1e-3).rsqrt()
    if not torch.equal(saved_mean, mean.to(compute)) or saved_rstd.dtype is not compute:
        given_faults.append(("mean", str(dtype), str(kind), shape, last))
    limit = 3e-7 if compute is torch.float32 else 1e-15
    if not torch.allclose(saved_rstd.double(), rstd, rtol=limit, atol=0):
        given_faults.append(("rstd", str(dtype), str(kind), shape, last))
    gain = weight.to(compute) * saved_rstd
    z = (x.to(compute) - saved_mean.view(view)) * gain.view(view) + bias.to(compute).view(view)
    # The interpreter rounds to bfloat16 otherwise than torch, and from Triton 3.9 on its tl.fma rounds only once.
    near = dtype is torch.bfloat16 and torch.allclose(y.float(), z.float(), 2**-7)
    once = rounded_once(x.to(compute) - saved_mean.view(view), gain.view(view), bias.to(compute).view(view))
    if not (near or torch.equal(y, z.to(dtype)) or torch.equal(y, once.to(dtype))):
        given_faults.append(("output", str(dtype), str(kind), shape, last))
    if not torch.equal(alone.output, y) or alone.mean is not None or alone.rstd is not None:
        given_faults.append(("alone", str(dtype), str(kind), shape, last))

# A variance beyond float32 whose root is not, and a subnormal one.
x = torch.randn(4, 3, 5)
for var in (torch.tensor([1e60, 1e-60, 4.0], dtype=torch.float64), torch.tensor([1e-40, 1e38, 4.0])):
    with fusednorm.use_instance("triton.tiles"):
        y, _, rstd, _ = ops.norm_forward(
            x, None, None, None, None, torch.zeros(3).to(var), var, "batch_norm", 0, 1, 0.0, "", 0.0
        )
    right = var.double().rsqrt()
    if not torch.allclose(rstd.double(), right, rtol=1e-6, atol=0):
        given_faults.append(("extreme", rstd.tolist()))
    if not torch.allclose(y.double(), x.double() * right.view(1, 3, 1), rtol=1e-6, atol=0):
        given_faults.append(("extreme output", rstd.tolist()))
    with fusednorm.use_instance("triton.tiles"):
        empty, mean, rstd, _ = ops.norm_forward(
            x[:0], None, None, None, None, torch.ones(3).to(var), var, "batch_norm", 0, 1, 0.0, "", 0.0
        )
    if not (torch.equal(mean, torch.ones(3)) and torch.allclose(rstd.double(), right, rtol=1e-6, atol=0)):
        given_faults.append(("empty", rstd.tolist()))

# batch_norm with its positions as channels: in training and evaluation, each set of gradients.
tiled_passes.SPREAD_ELEMENTS = 0
spread_faults = []
x, dy = torch.randn(2, 20, 6, 4, 3).add(3).unbind()
for training, affine in product((True, False), repeat=2):
    norm = norm_of("batch_norm", activation="silu", training=training)
    weight, bias = (torch.randn(6), torch.randn(6)) if affine else (None, None)
    operands = Operands(x, weight, bias, None, None, *((None, None) if training else (torch.randn(6), torch.rand(6))))
    problem = forward_problem(norm, operands)
    results, expected = (one.plan(problem)(operands) for one in (instances.TILES, reference.INSTANCE))
    names = ("output", "mean", "rstd", "var")
    pairs = [(training, affine, name, getattr(results, name), getattr(expected, name)) for name in names]
    for wanted in product((True, False), (affine, False), (affine, False)):
        wanted += (False, False)
        given = BackwardOperands(dy, x, expected.mean, expected.rstd, weight, bias, None, None)
        problem = backward_problem(norm, given, backward_direction(wanted))
        assert tiled(problem).layout.order == "channels_last"
        got, right = (one.plan(problem)(given, wanted) for one in (instances.TILES, reference.INSTANCE))
        names = ("input", "weight", "bias")
        pairs += [(training, affine, wanted, name, getattr(got, name), getattr(right, name)) for name in names]
    for *place, one, other in pairs:
        if (one is None) != (other is None) or (
            one is not None and not torch.allclose(one, other, rtol=1e-4, atol=1e-4)
        ):
            spread_faults.append(place)

# Where a weight is infinite, a bounded activation still has gradients of weight and bias: rows and units that a program
# does not have must not add a NaN to them.
vars(instances).update(chosen)
dispatch._plans.clear()
infinite = []
for name, family, shape, channel_dim in (
    ("triton.rows", "rms_norm", (5, 7), -1), ("triton.rows", "layer_norm", (5, 7), -1),
    ("triton.rows", "layer_norm", (3, 5, 7, 3), 1), ("triton.columns", "rms_norm", (3, 5, 7, 3), 1),
    ("triton.columns", "layer_norm", (3, 5, 7, 3), 1), ("triton.held", "rms_norm", (5, 7), -1),
    ("triton.held", "group_norm", (5, 7), 1), ("triton.held", "group_norm", (3, 7, 2, 3), 1),
    ("triton.tiles", "group_norm", (3, 7, 2, 3), 1), ("triton.tiles", "batch_norm", (5, 7), 1),
):
    x = 1 + torch.randn(shape)
    if name == "triton.rows" and len(shape) > 2:
        x = x.contiguous(memory_format=torch.channels_last)
    weight, bias = torch.ones(shape[1]), torch.zeros(shape[1])
    weight[3] = float("inf")
    norm = norm_of(family, 0 if len(shape) > 2 and "group" not in family else 1, channel_dim, activation="sigmoid")
    operands = Operands(x, weight, None if family == "rms_norm" else bias)
    saved = reference.INSTANCE.plan(forward_problem(norm, operands))(operands, True)
    given = BackwardOperands(torch.ones_like(x), x, saved.mean, saved.rstd, weight, operands.bias, None, None)
    problem = backward_problem(norm, given)
    wanted = (True, True, family != "rms_norm", False, False)
    got = choice.named(problem, name).plan(problem)(given, wanted)
    right = reference.INSTANCE.plan(problem)(given, wanted)
    for part in ("weight", "bias")[: 1 + wanted[2]]:
        if not torch.allclose(getattr(got, part), getattr(right, part), rtol=1e-4, atol=1e-4, equal_nan=True):
            infinite.append((name, family, shape, part))

# Where dz is 0, the gradient of a point's scale is, however large weight xhat is.
x, weight, zeros = 1e20 * torch.randn(5, 7), torch.full((7,), 1e30), torch.zeros(5, 7)
norm = norm_of("batch_norm", activation="sigmoid", training=False)
given = BackwardOperands(torch.ones_like(x), x, torch.zeros(7), torch.ones(7), weight, torch.zeros(7), zeros, zeros)
problem = backward_problem(norm, given)
got = choice.named(problem, "triton.tiles").plan(problem)(given, (True,) * 5)
if not torch.equal(got.scale, zeros):
    infinite.append("points")

faults_found = {"spread": spread_faults, "kernels": found, "eps": eps_ignored, "given eps": given_eps_ignored}
faults_found |= {"leaks": leaks, "strided": strided, "imprecise": imprecise, "given": given_faults}
print(json.dumps({**faults_found, "infinite": infinite}))
'''

OLD = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8)


@pytest.mark.skipif(OLD and np.lib.NumpyVersion(np.__version__) >= "2.4.0", reason="triton < 3.8 with numpy >= 2.4")
def test_every_kernel() -> None:
    found = interpreted(CODE)
    assert found == {
        "spread": [], "kernels": [], "eps": [], "given eps": [], "leaks": [], "strided": [], "imprecise": [],
        "given": [], "infinite": [],
    }  # fmt: skip
