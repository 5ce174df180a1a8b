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
from test_sums import Case, case, channels_last, drawn, normalize, rows
from fusednorm.backends.triton import instances
from fusednorm.backends.triton.config.kinds import RowsBackwardConfig, WholeConfig



class Fused(Case):
    # Nothing but s is rounded on the way.

    fused = True


def fused(one, order=torch.Tensor.contiguous):
    ordered = {name: order(one.tensors[name]) for name in ("pre_add", "post_add") if name in one.tensors}
    return Fused(one.form, one.activation, {**one.tensors, **ordered})


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
    return found, [name for name in plans if name != "NoneType"]  # images have no plan that makes a gate's gradient
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
    ("rms_norm", (2, 4, 64), half, None, ("pre_add", "pre_gate", "post_add")),
    ("layer_norm", (2, 4, 48), double, "tanh", ("pre_add", "pre_gate", "post_add")),
    ("layer_norm", (9, 387), half, "silu", ("pre_add", "post_add")),
    ("layer_norm", (9, 387), half, None, ("pre_add",)),
]:
    one = case(form, shape, dtype, *names, activation=activation)
    results, kinds = run("triton.rows", one)
    faults += [(form, shape, names, fault) for fault in one.faults(results)]
    made.append([form, shape, names, kinds])
print(json.dumps([faults, made]))
"""
    )
    faults, made = found
    assert faults == []
    for form, shape, names, kinds in made:
        gated = "scalar_gate" in names or ("pre_gate" in names and len(shape) > 2)  # not a gate to each row
        assert kinds == ["WholeSumForward", "RowsGatedBackward" if gated else "RowsSumBackward"], (form, names)


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


def call(t, activation, wanted=None):
    t = {name: one.detach().requires_grad_(wanted is None or name in wanted) for name, one in t.items()}
    y, s = fusednorm.layer_norm(
        t["x"], t["x"].shape[-1:], t["weight"], t["bias"], 1e-5, activation=activation, scale=t["scale"],
        shift=t["shift"], pre_add=t["h"], pre_gate=t.get("gate"), post_add=t.get("post"), return_sum=True,
    )
    return t, y, s


faults, made = [], []
chosen = instances.rows_gated_backward_for
few, again = RowsBackwardConfig(2, 1, 4), RowsBackwardConfig(1, 1, 4, reload=True)
# The shapes of the gate, of scale and shift, and whether there is a post_add.
for shape, gate, modulation, post, dtype in [
    ((2, 5, 48), (2, 1, 48), (2, 1, 48), False, half),
    ((2, 5, 48), None, (2, 1, 48), False, half),
    ((2, 5, 33), (2, 5, 1), (2, 1, 33), True, single),
    ((2, 3, 4, 40), (2, 3, 1, 40), (2, 3, 1, 40), True, single),
    ((2, 3, 4, 40), (2, 1, 1, 40), (2, 3, 1, 40), False, single),
    ((2, 3, 4, 40), (1,), (2, 1, 1, 40), False, double),
    ((2, 3, 4, 40), (40,), (2, 1, 1, 40), False, single),
    ((2, 3, 4, 40), (2, 3, 1, 1), (2, 1, 1, 40), False, single),
    ((2, 3, 4, 40), (3, 1, 40), (1, 1, 1, 40), False, single),
    ((6, 40), (6, 40), (6, 40), True, single),
]:
    t = {
        "x": drawn(*shape, dtype=dtype), "h": drawn(*shape, dtype=dtype, seed=1),
        "weight": drawn(shape[-1], dtype=dtype, seed=2), "bias": drawn(shape[-1], dtype=dtype, seed=3),
        "scale": drawn(*modulation, dtype=dtype, seed=4), "shift": drawn(*modulation, dtype=dtype, seed=5),
    }
    if gate is not None:
        t["gate"] = drawn(*gate, dtype=single if dtype == half else half, seed=6)
    if post:
        t["post"] = drawn(*shape, dtype=dtype, seed=7)
    dy, ds = drawn(*shape, dtype=dtype, seed=8), drawn(*shape, dtype=dtype, seed=9)
    activation = "silu" if post else None
    wide, *right = formula(t, activation)
    expected = [*right, *torch.autograd.grad(right, list(wide.values()), [dy.double(), ds.double()])]
    config = (chosen, lambda problem: few, lambda problem: again)[len(made) % 3]
    instances.rows_gated_backward_for = config
    dispatch._plans.clear()
    plans.clear()
    with fusednorm.use_instance("triton.rows"):
        leaves, *outputs = call(t, activation)
        results = [*outputs, *torch.autograd.grad(outputs, list(leaves.values()), [dy, ds])]
        if gate == (2, 1, 48):  # each factor of the product alone, with another memory order of the gradient of s
            for name in ("h", "gate"):
                leaves, *outputs = call(t, activation, [name])
                (alone,) = torch.autograd.grad(outputs, [leaves[name]], [dy, ds.mT.contiguous().mT])
                if not torch.equal(alone, results[2 + list(t).index(name)]):
                    faults.append((shape, gate, name, "alone"))
    made.append([shape, gate, plans[:2]])
    for name, one, value in zip(["y", "s", *t], results, expected, strict=True):
        eps = max({half: 6e-3, single: 2e-5, double: 1e-12}[each] for each in (dtype, one.dtype))
        bound = eps * max(1.0, value.abs().max().item())
        if one.shape != value.shape or (one.double() - value).abs().max() > bound:
            faults.append((shape, gate, name, (one.double() - value).abs().max().item()))
print(json.dumps([faults, made]))
"""
    )
    faults, made = found
    assert faults == []
    for shape, gate, kinds in made:
        fused = gate != [3, 1, 40]  # its rows do not follow one another
        backward = "RowsSumBackward" if gate is None else "RowsGatedBackward"
        backward = "NoneType" if gate == [2, 5, 1] else backward  # too few rows share it
        assert kinds == (["WholeSumForward", backward] if fused else ["NoneType"]), (shape, gate)


def test_tiles() -> None:
    """Sums before and behind the norms of tiles, in every memory order and kind of tile, with gradients of s. Without
    gradients s is not stored but made twice, with the same bits. Where dz is stored as it is, the second pass of a
    backward reads neither grad_output nor post_add."""
    found = interpreted(
        PRELUDE
        + """
import inspect
from drawn_judge import same_bits
from fusednorm.backends.triton import runs
from fusednorm.backends.triton.config import tiles
from fusednorm.backends.triton.config.kinds import PassConfig, TilesConfig
from fusednorm.backends.triton.launch import Launch

runs.REPEATED = 0, 0  # small tensors have rows of several positions too, and planes across samples
tiles.SPREAD_ELEMENTS = 0
launch, hidden = Launch.__call__, []


def hiding(self, *tensors):
    launch(self, *tensors)
    if self.kernel.__name__ == "sum_reduce":
        pointers = dict(zip(inspect.signature(self.kernel.fn).parameters, tensors))
        if (pointers["p_grad_behind"] is not None) != stored:
            faults.append((form, shape, names, "dz is stored or not"))
        for tensor in (pointers["p_dy"], pointers["p_behind"]) if stored else ():
            hidden.append((tensor, tensor.clone()))
            tensor.fill_(float("nan"))
    while hidden and self.kernel.__name__ == "sum_gradients":
        tensor, content = hidden.pop()
        tensor.copy_(content)


Launch.__call__ = hiding
faults, made = [], []
chosen = dict(passes_for=instances.passes_for)
positions = dict(passes_for=lambda seen: TilesConfig(PassConfig(16, 2, 2, stages=2), PassConfig(16, 4, 2)))
small = dict(
    passes_for=lambda seen: TilesConfig(PassConfig(1, 32, 3 if seen.backward else 1, stages=2), PassConfig(2, 32, 2))
)
long = dict(
    passes_for=lambda seen: TilesConfig(
        PassConfig(64, 2, 2, 1, stages=2, long=True) if seen.backward else PassConfig(16, 2, 2), PassConfig(16, 4, 2)
    )
)
contiguous, both = torch.Tensor.contiguous, ("pre_add", "post_add")
for form, shape, dtype, activation, order, config, names in [
    ("group_norm", (2, 6, 9, 13), single, "silu", contiguous, chosen, ("pre_add",)),
    ("group_norm", (2, 6, 9, 13), single, "silu", contiguous, chosen, ("pre_add", "pre_gate")),
    ("group_norm", (2, 6, 11, 11), half, "relu", contiguous, small, both),
    ("group_norm", (2, 6, 11, 11), half, "gelu", contiguous, small, ("small_add", "post_add")),
    ("instance_norm", (2, 3, 9, 7), half, "silu", channels_last, chosen, ("post_add",)),
    ("batch_norm", (3, 5, 9, 7), single, "relu", contiguous, chosen, ("small_add", "pre_gate", "post_add")),
    ("batch_norm", (3, 5, 9, 7), half, "relu", channels_last, chosen, both),
    ("batch_norm", (3, 5, 9, 7), half, "relu", channels_last, chosen, ("small_add", "post_add")),
    ("batch_norm", (20, 6, 4, 3), single, "relu", contiguous, chosen, both),
    ("batch_norm", (20, 6, 4, 3), single, "relu", contiguous, chosen, ("small_add", "post_add")),
    ("batch_norm", (3, 5, 9, 7), double, "tanh", contiguous, small, ("post_add",)),
    ("group_norm", (3, 6, 5, 13), half, "relu", channels_last, positions, both),
    ("group_norm", (2, 12, 9, 4), half, "silu", channels_last, positions, ("small_add", "post_add")),
    ("batch_norm", (3, 5, 9, 7), half, "relu", channels_last, long, both),
    ("group_norm", (3, 6, 5, 13), single, "silu", channels_last, long, ("small_add", "post_add")),
]:
    vars(instances).update(config)
    stored = "post_add" in names and (dtype != half or activation == "relu")
    one = fused(case(form, shape, dtype, *names, activation=activation, order=order), order)
    results, kinds = run("triton.tiles", one)
    faults += [(form, shape, names, fault) for fault in one.faults(results)]
    if "pre_add" in one.tensors:
        with torch.no_grad(), fusednorm.use_instance("triton.tiles"):
            around = {name: one.tensors[name] for name in ("pre_add", "pre_gate", "post_add") if name in one.tensors}
            y = normalize(form, one.x, one.tensors["weight"], one.tensors["bias"], activation=activation, **around)
        if not same_bits(y, results["output"]):
            faults.append((form, shape, names, "other bits"))
    made.append([form, shape, kinds])
print(json.dumps([faults, made]))
"""
    )
    faults, made = found
    assert faults == []
    for form, shape, kinds in made:
        assert kinds == ["TilesSumForward", "TilesSumBackward"], (form, shape)


def test_gradients_of_numbers() -> None:
    """The gradient of a pre_add (N, C) is made of the sums of dz and xhat over each tile, without those outside of the
    tensor, in every memory order and kind of tile."""
    found = interpreted(
        PRELUDE
        + """
from fusednorm import sum_gradients
from fusednorm.backends.triton import runs
from fusednorm.backends.triton.config.kinds import PassConfig, TilesConfig
from fusednorm.backends.triton.launch import Launch

runs.REPEATED = 0, 0  # small tensors have rows of several positions too
sum_gradients.LEAST_NUMBERED = 0
launch, launched, faults, made = Launch.__call__, [], [], []


def noting(self, *tensors):
    launched.append(self.kernel.__name__)
    launch(self, *tensors)


Launch.__call__ = noting
chosen = dict(passes_for=instances.passes_for)
small = dict(
    passes_for=lambda seen: TilesConfig(PassConfig(1, 32, 3 if seen.backward else 1, stages=2), PassConfig(2, 32, 2))
)
positions = dict(passes_for=lambda seen: TilesConfig(PassConfig(16, 2, 2, stages=2), PassConfig(16, 4, 2)))
contiguous, numbers = torch.Tensor.contiguous, ("small_add",)
for form, shape, dtype, activation, order, config, names in [
    ("group_norm", (2, 6, 9, 13), single, "silu", contiguous, chosen, numbers),
    ("group_norm", (2, 6, 11, 11), half, "silu", contiguous, small, numbers),
    ("group_norm", (2, 6, 8, 16), single, None, contiguous, small, numbers),
    ("group_norm", (3, 6, 11, 11), double, "tanh", contiguous, small, ("small_add", "post_add")),
    ("group_norm", (3, 6, 5, 13), single, "silu", channels_last, chosen, numbers),
    ("group_norm", (3, 6, 5, 13), single, "silu", channels_last, positions, ("small_add", "post_add")),
    ("group_norm", (2, 12, 9, 4), half, "silu", channels_last, positions, numbers),
    ("instance_norm", (2, 3, 9, 7), single, "gelu", contiguous, chosen, numbers),
    ("instance_norm", (2, 3, 9, 7), single, None, channels_last, positions, numbers),
    ("batch_norm", (3, 5, 9, 7), single, "relu", contiguous, chosen, numbers),
]:
    vars(instances).update(config)
    one = replace(fused(case(form, shape, dtype, *names, activation=activation, order=order), order), returns_sum=False)
    one.tensors["input"] += 1.0  # so that what lies outside of the tensor would be seen
    launched.clear()
    results, kinds = run("triton.tiles", one)
    faults += [(form, shape, names, fault) for fault in one.faults(results)]
    made.append([form, names[1:], kinds, launched.count("gradients_of_numbers")])

launched.clear()
one = case("group_norm", (2, 6, 9, 13), single, "small_add")
run("triton.tiles", one)  # with a gradient of the sum, which belongs to the gradient of the numbers too
with_sum = launched.count("gradients_of_numbers")
sum_gradients.LEAST_NUMBERED = 1 << 20
run("triton.tiles", replace(one, returns_sum=False))
faults += [name for name in launched if name == "gradients_of_numbers"]

sum_gradients.LEAST_NUMBERED = 0
sizes = (2, 6, 9, 7), (2, 6), (6,), (2, 6)
x, t, w, s = (drawn(*size, seed=seed).requires_grad_() for seed, size in enumerate(sizes))
with fusednorm.use_instance("triton.tiles"):
    y = fusednorm.group_norm(x, 3, w, scale=s, shift=t, activation="silu", pre_add=t)
    (found,) = torch.autograd.grad(y.square().sum(), [t])
wx, wt, ww, ws = (each.detach().double().requires_grad_() for each in (x, t, w, s))
z = torch.nn.functional.group_norm(wx + wt[:, :, None, None], 3, ww) * (1 + ws[:, :, None, None]) + wt[:, :, None, None]
(right,) = torch.autograd.grad(torch.nn.functional.silu(z).square().sum(), [wt])
error = ((found - right).abs().max() / right.abs().max()).item()
print(json.dumps([faults, made, with_sum, error]))
"""
    )
    faults, made, with_sum, error = found
    assert faults == []
    for form, behind, kinds, launched in made:
        one_kernel = form != "batch_norm"
        backward = ["TilesSumBackward"] if one_kernel or behind else []
        assert kinds == ["TilesSumForward", *backward], form
        assert launched == int(one_kernel), form
    assert with_sum == 0
    assert error < 1e-6


def test_held_units() -> None:
    """Sums before and behind the norms of units of any memory order in registers."""
    found = interpreted(
        PRELUDE
        + """
faults, made = [], []
contiguous, both = torch.Tensor.contiguous, ("pre_add", "post_add")
for form, shape, dtype, activation, order, names in [
    ("batch_norm", (3, 5, 4, 3), single, "relu", contiguous, ("post_add",)),
    ("batch_norm", (3, 5, 4, 3), single, "relu", contiguous, both),
    ("batch_norm", (6, 7), half, None, contiguous, both),
    ("batch_norm", (3, 20, 3, 4), single, "tanh", channels_last, both),
    ("group_norm", (5, 12, 4, 3), half, "gelu", channels_last, both),
    ("group_norm", (2, 12, 5, 7), single, "silu", contiguous, both),
    ("instance_norm", (3, 40, 5, 3), double, "silu", channels_last, both),
    ("rms_norm", (5, 24), half, "silu", contiguous, both),
    ("layer_norm", (5, 24), single, None, contiguous, ("pre_add",)),
    ("group_norm", (2, 12, 5, 7), single, "silu", contiguous, ("small_add",)),
    ("group_norm", (5, 12, 4, 3), single, "silu", channels_last, ("small_add", "pre_gate", "post_add")),
    ("instance_norm", (3, 5, 3, 7), single, None, contiguous, ("small_add",)),
    ("instance_norm", (3, 5, 3, 7), single, "silu", channels_last, ("pre_add", "pre_gate", "post_add")),
    ("batch_norm", (3, 5, 4, 3), single, "relu", contiguous, ("small_add", "post_add")),
    ("batch_norm", (6, 7), half, None, contiguous, ("pre_add", "pre_gate")),
    ("batch_norm", (3, 20, 3, 4), single, "tanh", channels_last, ("small_add", "post_add")),
]:
    one = fused(case(form, shape, dtype, *names, activation=activation, order=order), order)
    results, kinds = run("triton.held", one)
    faults += [(form, shape, fault) for fault in one.faults(results)]
    made.append([form, shape, kinds])
print(json.dumps([faults, made]))
"""
    )
    faults, made = found
    assert faults == []
    for form, shape, kinds in made:
        assert kinds == ["HeldSumForward", "HeldSumBackward"], (form, shape)


def test_columns() -> None:
    """Sums around the norms over the channels of channels_first, whose tiles hold all channels or walk over them."""
    found = interpreted(
        PRELUDE
        + """
from fusednorm.backends.triton.config.kinds import PositionsConfig

faults, made = [], []
held = instances.columns_for
form, shape, both = "layer_norm over channels", (2, 6, 5, 4), ("pre_add", "post_add")
for dtype, activation, walks, names in [
    (single, "silu", False, both),
    (single, "silu", True, ("pre_add", "pre_gate", "post_add")),
    (half, None, False, ("small_add", "pre_gate")),
    (half, "gelu", True, ("small_add",)),
    (double, "tanh", True, ("post_add",)),
]:
    instances.columns_for = (lambda problem: PositionsConfig(8, 4, 1)) if walks else held
    one = fused(case(form, shape, dtype, *names, activation=activation))
    results, kinds = run("triton.columns", one)
    faults += [(walks, names, fault) for fault in one.faults(results)]
    made.append([names, kinds])
print(json.dumps([faults, made]))
"""
    )
    faults, made = found
    assert faults == []
    for names, kinds in made:
        assert kinds == ["ColumnsSumForward", "ColumnsSumBackward"], names


def test_forwards_alone() -> None:
    """Units in one piece of memory, and evaluations of batch_norm; s is not kept where nobody wants it."""
    found = interpreted(
        PRELUDE
        + """
from fusednorm.backends.triton.config.kinds import PositionsConfig

far = []
for form, shape, names in [
    ("group_norm", (2, 12, 3, 3), ("pre_add", "post_add")),
    ("group_norm", (2, 6, 5, 7), ("pre_add", "pre_gate", "post_add")),
    ("group_norm", (2, 6, 5, 7), ("small_add",)),
    ("instance_norm", (3, 5, 3, 7), ("small_add", "pre_gate")),
    ("instance_norm", (3, 5, 3, 7), ("pre_add", "post_add")),
    ("layer_norm", (5, 100), ("pre_add", "post_add")),
]:
    one = case(form, shape, single, *names, activation="silu")
    right = one.formula(torch.float64)["output"]
    dispatch._plans.clear()
    none = ("input", "weight", "bias", "grad_output", "grad_sum")
    around = {name: tensor for name, tensor in one.tensors.items() if name not in none}
    with torch.no_grad(), fusednorm.use_instance("triton.whole"):
        y = normalize(form, one.x, one.tensors["weight"], one.tensors["bias"], activation="silu", **around)
    far.append((y.double() - right).abs().max().item())
mean, var = drawn(6), drawn(6, seed=1).abs() + 0.5
for order in (torch.Tensor.contiguous, channels_last):
    dispatch._plans.clear()
    x, n, p = order(drawn(3, 6, 5, 7)), drawn(3, 6, seed=3), order(drawn(3, 6, 5, 7, seed=2))
    with fusednorm.use_instance("triton.tiles"):
        y, s = fusednorm.batch_norm(x, mean, var, activation="relu", pre_add=n, post_add=p, return_sum=True)
    right = torch.nn.functional.batch_norm(x.double() + n[:, :, None, None], mean.double(), var.double()) + p
    far += [(y - right.relu()).abs().max().item(), (s - x - n[:, :, None, None]).abs().max().item()]
x, wider = drawn(2, 6, 5, 7), drawn(2, 6, 9, 7, seed=2)
p = wider[:, :, :5]  # whose planes lie further apart
right = torch.relu(torch.nn.functional.group_norm(x.double(), 3) + p)
for name in ("triton.whole", "triton.held", "triton.tiles"):
    with fusednorm.use_instance(name):
        far.append((fusednorm.group_norm(x, 3, activation="relu", post_add=p) - right).abs().max().item())
for one, other in ((x, p), (p, x)):
    with fusednorm.use_instance("triton.tiles"):
        y, s = fusednorm.group_norm(one, 3, pre_add=other, return_sum=True)
    far += [(y - torch.nn.functional.group_norm(x + p, 3)).abs().max().item(), (s - (x + p)).abs().max().item()]
instances.MOST_WHOLE = 16  # longer planes of triton.rows go in tiles
with fusednorm.use_instance("triton.rows"):
    y = fusednorm.instance_norm(x, pre_add=x, post_add=x)
far.append((y - torch.nn.functional.instance_norm(2 * x) - x).abs().max().item())
right = (x + p) * ((x + p).square().mean(1, keepdim=True) + 1e-5).rsqrt()
for config in (instances.columns_for, lambda problem: PositionsConfig(8, 4, 1)):
    instances.columns_for = config
    dispatch._plans.clear()
    with fusednorm.use_instance("triton.columns"):
        y, s = fusednorm.rms_norm(p, (6,), eps=1e-5, channel_dim=1, pre_add=x, return_sum=True)
    far += [(y - right).abs().max().item(), (s - (x + p)).abs().max().item()]
p = order(drawn(3, 6, 5, 7, seed=2))
leaf = order(drawn(3, 6, 5, 7)).requires_grad_()
with fusednorm.use_instance("triton.tiles"):
    y = fusednorm.batch_norm(leaf, mean, var, activation="relu", post_add=p)
    (slope,) = torch.autograd.grad(y.sum(), leaf)
far.append((slope - (y > 0) * (var + 1e-5).rsqrt()[:, None, None]).abs().max().item())
x, h, n = channels_last(drawn(2, 6, 5, 7)), channels_last(drawn(2, 6, 5, 7, seed=1)), drawn(2, 6, seed=2)
wide = n[:, :, None, None]
for added, right in (({"pre_add": h, "pre_gate": n}, x + wide * h), ({"pre_add": n}, x + wide)):
    with fusednorm.use_instance("triton.whole"):  # rows that are the positions of images
        y, s = fusednorm.rms_norm(x, (6,), eps=1e-5, channel_dim=1, scale=n, return_sum=True, **added)
    far += [(s - right).abs().max().item()]
    right = right * (right.square().mean(1, keepdim=True) + 1e-5).rsqrt() * (1 + wide)
    far += [(y - right).abs().max().item()]
print(json.dumps([far, plans]))
"""
    )
    far, kinds = found
    assert [one for one in far if not one < 1e-5] == []  # a NaN is none that is below
    apart = ["NoneType", "HeldSumForward", *["TilesSumForward"] * 4, *["ColumnsSumForward"] * 2]
    apart += ["TilesSumForward", "TilesSumBackward", "WholeSumForward", "NoneType"]
    assert kinds == [*["WholeSumForward"] * 6, *["TilesSumForward"] * 2, *apart]


def test_biases_of_planes() -> None:
    """The bias of a convolution, alone or beside what else is added, in the sum's own memory or in the input's."""
    found = interpreted(
        """
import json
from itertools import cycle

import torch
from fusednorm.activations import resolve
from fusednorm.backends import reference
from fusednorm.backends.triton import instances
from fusednorm.compiled import sum_of
from fusednorm.norm import norm_of
from fusednorm.operands import Operands, Sums
from fusednorm.problems import sum_forward_problem

torch.manual_seed(0)
half, single, double = torch.float16, torch.float32, torch.float64
faults, made, turns = [], [], cycle([(False, False), (True, False), (True, True)])
SHAPES = [(2, 8, 5, 7), (3, 5, 33), (2, 12, 3, 4, 5)]
for number, shape in enumerate(SHAPES):
    for last in (False, True):
        x, h = torch.randn(shape, dtype=double), torch.randn(shape, dtype=double)
        if last:  # the channels last in memory
            x, h = (t.movedim(1, -1).contiguous().movedim(-1, 1) for t in (x, h))
        w, b, q, n = (torch.randn(size, dtype=double) for size in (shape[1], shape[1], shape[1], shape[:2]))
        q *= 16  # so that a rounding of s is seen
        for kind, pre_add in (("bias", None), ("numbers", n), ("one number", n[:1].expand(shape[:2])), ("like", h)):
            family = ("group_norm", "instance_norm", "batch_norm")[len(made) % 3]
            groups = 1 if shape[1] % 2 else 2
            norm = norm_of(family, groups if family == "group_norm" else 0, 1, 1e-5, resolve("silu"), True)
            dtype = (single, half, double)[number % 3]
            cast = lambda t: None if t is None else t.to(dtype)
            given = Operands(cast(x), cast(w), cast(b))
            sums = Sums(cast(pre_add), pre_bias=torch.stack((cast(q), cast(w)), 1)[:, 0])  # numbers that lie apart
            s = sum_of(*(None if t is None else t.to(double) for t in (given.input, sums.pre_add, sums.pre_bias)))
            for instance in (instances.TILES, instances.HELD):
                keeps, in_place = next(turns)
                exact = s.to(dtype).double() if keeps else s  # what is no result is not rounded
                right = reference.forward(norm, Operands(exact, given.weight.double(), given.bias.double()))
                problem = sum_forward_problem(norm, given, sums, keeps)
                assert instance.supports(problem) is None
                copy = given.input.clone(memory_format=torch.preserve_format)
                out = copy if in_place else None
                plan = instance.plan(problem)
                found = plan(Operands(copy, given.weight, given.bias), sums, sum_out=out)
                far = (found.output - right.output).abs().max() / right.output.abs().max()
                far = max(far, (found.mean - right.mean).abs().max())
                if keeps:
                    far = max(far, (found.sum.double() - exact).abs().max() / s.abs().max())
                made.append(type(plan).__name__)
                if not far < {half: 6e-4, single: 1e-5, double: 1e-12}[dtype]:
                    faults.append([shape, last, kind, family, instance.name, keeps, in_place, float(far)])
                assert (found.sum is not None) == keeps and (not in_place or found.sum is copy)
others = [one.supports(problem) for one in (instances.WHOLE, instances.ROWS, instances.COLUMNS)]
rows = Operands(torch.randn(4, 6), None, None)
rows = sum_forward_problem(norm_of("group_norm", 1, 1, 1e-5, None, True), rows, Sums(pre_bias=torch.randn(6)), False)
others += [instances.TILES.supports(rows)]
print(json.dumps([faults, sorted({*made}), others]))
"""
    )
    faults, kinds, others = found
    assert faults == []
    assert kinds == ["HeldSumForward", "TilesSumForward"]
    assert all(others)
