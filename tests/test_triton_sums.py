"""Sums around norms in Triton's kernels, run by its interpreter: which calls are fused, and that they are right."""

from __future__ import annotations

import pytest
from interpreter_support import interpreted

pytest.importorskip("triton")

#: What every piece of code begins with: ``plans`` has the class of each plan that was made.
PRELUDE = """
import json
from functools import partial
from dataclasses import replace

import torch
import fusednorm
from fusednorm import dispatch
from test_sums import Case, case, channels_last, drawn, rows
from fusednorm.backends.triton import instances
from fusednorm.backends.triton.config.kinds import RowsBackwardConfig, WholeConfig

half, single, double = torch.float16, torch.float32, torch.float64
plans = []
kept = dispatch._sum_plan


def noted(key, problem):
    plan = kept(key, problem)
    plans.append(type(plan).__name__)
    return plan


dispatch._sum_plan = noted


def run(instance, one):
    dispatch._plans.clear()
    plans.clear()
    with fusednorm.use_instance(instance):
        found = one.run()
    return found, list(plans)
"""


def test_rows() -> None:
    """One kernel forward and one backward, of every dtype, with sums before the norm, behind it, and both."""
    found = interpreted(
        PRELUDE
        + """
faults, made = [], []
SUMS = [
    ("pre_add",), ("post_add",), ("pre_add", "post_add"), ("pre_add", "pre_gate"),
    ("pre_add", "scalar_gate", "post_add"),
]
for form, shape, dtype, activation, names in [
    *(("layer_norm", (3, 6, 35), single, "silu", names) for names in SUMS),
    *(("rms_norm", (5, 130), half, "gelu", names) for names in SUMS),
    ("rms_norm", (3, 2, 64), half, None, ("pre_add", "pre_gate", "post_add")),
    ("layer_norm", (2, 3, 48), double, "tanh", ("pre_add", "pre_gate", "post_add")),
    ("layer_norm", (9, 387), half, "silu", ("pre_add", "post_add")),
    ("layer_norm", (9, 387), half, None, ("pre_add",)),
]:
    one = case(form, shape, dtype, *names, activation=activation)
    results, kinds = run("triton.rows", one)
    faults += [(form, shape, names, fault) for fault in one.faults(results)]
    made.append([form, names, kinds])
print(json.dumps([faults, made]))
"""
    )
    faults, made = found
    assert faults == []
    for form, names, kinds in made:
        assert kinds == ["WholeSumForward", "RowsSumBackward"], (form, names)


def test_rows_of_samples() -> None:
    """A scale and a shift of samples beside the sums, as in adaLN: in one kernel forward and one backward."""
    found = interpreted(
        PRELUDE
        + """
def formula(t, activation):
    wide = {name: one.detach().double().requires_grad_() for name, one in t.items()}
    x, trailing = wide["x"], t["x"].shape[-1:]
    s = x + wide["gate"] * wide["h"] if "gate" in wide else x + wide["h"]
    s = s + (s.to(t["x"].dtype) - s).detach()
    z = torch.nn.functional.layer_norm(s, trailing, wide["weight"], wide["bias"], 1e-5)
    z = z * (1 + wide["scale"]) + wide["shift"]
    if "post" in wide:
        z = z + wide["post"]
    y = torch.nn.functional.silu(z) if activation else z
    return wide, y, s


def call(t, activation):
    t = {name: one.detach().requires_grad_() for name, one in t.items()}
    y, s = fusednorm.layer_norm(
        t["x"], t["x"].shape[-1:], t["weight"], t["bias"], 1e-5, activation=activation, scale=t["scale"],
        shift=t["shift"], pre_add=t["h"], pre_gate=t.get("gate"), post_add=t.get("post"), return_sum=True,
    )
    return t, y, s


faults, made = [], []
# The shapes of the gate, of scale and shift, and whether there is a post_add.
for shape, gate, modulation, post, dtype in [
    ((2, 5, 48), (2, 1, 48), (2, 1, 48), False, half),
    ((2, 5, 48), None, (2, 1, 48), False, half),
    ((2, 5, 33), (2, 5, 1), (2, 1, 33), True, single),
    ((2, 3, 4, 40), (2, 3, 1, 40), (2, 3, 1, 40), True, single),
    ((2, 3, 4, 40), (2, 1, 1, 40), (2, 3, 1, 40), False, single),
    ((2, 3, 4, 40), (1,), (2, 1, 1, 40), False, double),
    ((2, 3, 4, 40), (3, 1, 40), (1, 1, 1, 40), False, single),
    ((6, 40), (6, 40), (6, 40), True, single),
]:
    t = {
        "x": drawn(*shape, dtype=dtype), "h": drawn(*shape, dtype=dtype, seed=1),
        "weight": drawn(shape[-1], dtype=dtype, seed=2), "bias": drawn(shape[-1], dtype=dtype, seed=3),
        "scale": drawn(*modulation, dtype=dtype, seed=4), "shift": drawn(*modulation, dtype=dtype, seed=5),
    }
    if gate is not None:
        t["gate"] = drawn(*gate, dtype=dtype, seed=6)
    if post:
        t["post"] = drawn(*shape, dtype=dtype, seed=7)
    dy, ds = drawn(*shape, dtype=dtype, seed=8), drawn(*shape, dtype=dtype, seed=9)
    activation = "silu" if post else None
    wide, *right = formula(t, activation)
    expected = [*right, *torch.autograd.grad(right, list(wide.values()), [dy.double(), ds.double()])]
    dispatch._plans.clear()
    plans.clear()
    with fusednorm.use_instance("triton.rows"):
        leaves, *outputs = call(t, activation)
        results = [*outputs, *torch.autograd.grad(outputs, list(leaves.values()), [dy, ds])]
    made.append([shape, gate, list(plans)])
    for name, one, value in zip(["y", "s", *t], results, expected, strict=True):
        bound = {half: 6e-3, single: 2e-5, double: 1e-12}[dtype] * max(1.0, value.abs().max().item())
        if one.shape != value.shape or (one.double() - value).abs().max() > bound:
            faults.append((shape, gate, name, (one.double() - value).abs().max().item()))
print(json.dumps([faults, made]))
"""
    )
    faults, made = found
    assert faults == []
    for shape, gate, kinds in made:
        fused = gate != [3, 1, 40]  # its rows do not follow one another
        assert kinds == (["WholeSumForward", "RowsSumBackward"] if fused else ["NoneType"]), (shape, gate)


def test_tiles() -> None:
    """post_add behind the norms of tiles, in every memory order and kind of tile, with gradients of s."""
    found = interpreted(
        PRELUDE
        + """
from fusednorm.backends.triton.config.kinds import PassConfig, TilesConfig

faults, made = [], []
chosen = dict(passes_for=instances.passes_for)
small = dict(
    passes_for=lambda seen: TilesConfig(PassConfig(1, 32, 3 if seen.backward else 1, stages=2), PassConfig(2, 32, 2))
)
for form, shape, dtype, activation, order, config in [
    ("group_norm", (2, 6, 9, 13), single, "silu", torch.Tensor.contiguous, chosen),
    ("group_norm", (2, 6, 11, 11), half, "silu", torch.Tensor.contiguous, small),
    ("group_norm", (2, 6, 11, 11), half, "gelu", channels_last, chosen),
    ("instance_norm", (2, 3, 9, 7), half, "silu", channels_last, chosen),
    ("batch_norm", (3, 5, 9, 7), single, "relu", torch.Tensor.contiguous, chosen),
    ("batch_norm", (3, 5, 9, 7), half, "relu", channels_last, chosen),
    ("batch_norm", (20, 6, 4, 3), single, "relu", torch.Tensor.contiguous, chosen),
    ("batch_norm", (3, 5, 9, 7), double, "tanh", torch.Tensor.contiguous, small),
]:
    vars(instances).update(config)
    one = case(form, shape, dtype, "post_add", activation=activation, order=order)
    one.tensors["post_add"] = order(one.tensors["post_add"])
    results, kinds = run("triton.tiles", one)
    faults += [(form, shape, fault) for fault in one.faults(results)]
    made.append([form, shape, kinds])
print(json.dumps([faults, made]))
"""
    )
    faults, made = found
    assert faults == []
    for form, shape, kinds in made:
        assert kinds == ["TilesSumForward", "TilesSumBackward"], (form, shape)
