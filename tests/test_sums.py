"""The sums around a norm: pre_add, pre_gate, return_sum and post_add, in all families, against autograd in float64."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import pytest
import torch
from drawn_judge import same_bits
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fusednorm
from fusednorm import dispatch, nn
from fusednorm.backends.cpu.instances import ROWS
from fusednorm.backends.reference import VALUES
from fusednorm.instance import CompilationError
from fusednorm.norm import norm_of
from fusednorm.operands import Operands, Sums
from fusednorm.problems import sum_forward_problem
from fusednorm.tolerance import OURS, Allowance, judge

pytestmark = pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.:FutureWarning")  # of torch's own

FAMILIES = ("group_norm", "instance_norm", "layer_norm", "rms_norm", "batch_norm")
#: The families, and layer_norm over channels.
FORMS = (*FAMILIES, "layer_norm over channels")
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
#: One activation to a dtype, so that few kernels are compiled.
ACTIVATED = {torch.float32: "silu", torch.float64: "gelu", torch.float16: None, torch.bfloat16: "silu"}
EPS = 1e-5


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def channels_last(tensor: Tensor) -> Tensor:
    return tensor.movedim(1, -1).contiguous().movedim(-1, 1)


def rows(form: str) -> bool:
    return form in ("layer_norm", "rms_norm")


def normalize(form: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, **keywords: Any) -> Any:
    """The public function of a form."""
    if form == "group_norm":
        return fusednorm.group_norm(x, 3, weight, bias, EPS, **keywords)
    if form == "instance_norm":
        return fusednorm.instance_norm(x, None, None, weight, bias, eps=EPS, **keywords)
    if form == "batch_norm":
        return fusednorm.batch_norm(x, None, None, weight, bias, True, eps=EPS, **keywords)
    if form == "rms_norm":
        return fusednorm.rms_norm(x, x.shape[-1:], weight, EPS, **keywords)
    if form == "layer_norm over channels":
        return fusednorm.layer_norm(x, x.shape[1:2], weight, bias, EPS, channel_dim=1, **keywords)
    return fusednorm.layer_norm(x, x.shape[-1:], weight, bias, EPS, **keywords)


def wide_norm(form: str, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The norm by plain operators, in the dtype of x."""
    shape, moved = x.shape, x
    if form == "group_norm":
        moved, axes = x.reshape(shape[0], 3, -1), (2,)
    elif form == "layer_norm over channels":
        axes = (1,)
    else:
        positions = tuple(range(2, x.dim()))
        axes = (-1,) if rows(form) else (0, *positions) if form == "batch_norm" else positions
    mean = torch.zeros(()) if form == "rms_norm" else moved.mean(axes, keepdim=True)
    var = (moved - mean).square().mean(axes, keepdim=True)
    xhat = ((moved - mean) * (var + EPS).rsqrt()).reshape(shape)
    aligned = (-1,) if rows(form) else (1, -1, *(1,) * (x.dim() - 2))
    z = xhat * weight.reshape(aligned)
    return z if form == "rms_norm" else z + bias.reshape(aligned)


class Rounded(torch.autograd.Function):
    """To a dtype and back: the value, and with ``both`` its gradient too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, both: bool) -> Tensor:
        ctx.dtype, ctx.both = dtype, both
        return x.to(dtype).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        return grad.to(ctx.dtype).to(grad.dtype) if ctx.both else grad, None, None


@dataclass(frozen=True)
class Case:
    """A call's form, activation and tensors. ``fused_backward`` is False where torch's operators make the gradients of
    a fused forward, so that z is rounded there. ``returns_sum``: where there is one before the norm."""

    form: str
    activation: str | None
    tensors: dict[str, Tensor]
    fused_backward: bool = True
    returns_sum: bool = True

    @property
    def x(self) -> Tensor:
        return self.tensors["input"]

    @property
    def fused(self) -> bool:
        """Whether one kernel does it all, so that nothing but s is rounded on the way."""
        same = all(one.dtype == self.x.dtype for name, one in self.tensors.items() if name in ("pre_add", "post_add"))
        planes = self.form in ("group_norm", "instance_norm", "batch_norm") and prod(self.x.shape[2:]) > 128
        return same and (rows(self.form) or planes)

    def leaves(self) -> dict[str, Tensor]:
        none = ("grad_output", "grad_sum") + (("bias",) if self.form == "rms_norm" else ())
        return {name: t.detach().requires_grad_() for name, t in self.tensors.items() if name not in none}

    def collected(self, leaves: dict[str, Tensor], y: Tensor, s: Tensor | None, dtype: Any = None) -> dict[str, Tensor]:
        outputs, grads = [y], [self.tensors["grad_output"]]
        if s is not None:
            outputs, grads = [y, s], [*grads, self.tensors["grad_sum"]]
        grads = [grad.to(one.dtype) for grad, one in zip(grads, outputs, strict=True)]
        found = torch.autograd.grad(outputs, list(leaves.values()), grads)
        results = {"output": y.detach()} | ({} if s is None else {"sum": s.detach()})
        return results | {f"grad_{name}": one for name, one in zip(leaves, found, strict=True)}

    def run(self) -> dict[str, Tensor]:
        """What the library gives, with all gradients."""
        leaves = self.leaves()
        sums = {name: one for name, one in leaves.items() if name not in ("input", "weight", "bias")}
        summed = "pre_add" in sums and self.returns_sum
        found = normalize(
            self.form, leaves["input"], leaves["weight"], leaves.get("bias"), activation=self.activation,
            return_sum=summed, **sums,
        )  # fmt: skip
        y, s = found if summed else (found, None)
        return self.collected(leaves, y, s)

    def formula(self, dtype: torch.dtype, intermediates: bool = False) -> dict[str, Tensor]:
        """The same by plain operators in a wide dtype with s rounded, and with ``intermediates`` z and its sum too,
        as where the call is composed."""
        leaves = {name: one.detach().to(dtype).requires_grad_() for name, one in self.leaves().items()}
        x, own = leaves["input"], self.x.dtype
        s = x

        def small(operand: Tensor) -> Tensor:
            if operand.dim() != 2 or x.dim() == 2:
                return operand
            ones = (1,) * (x.dim() - 2)
            return operand.reshape((len(operand), *ones, -1) if rows(self.form) else (*operand.shape, *ones))

        if "pre_add" in leaves:
            added = small(leaves["pre_add"])
            if "pre_gate" in leaves:
                gate = small(leaves["pre_gate"]).expand(x.shape)  # the products of its gradient are rounded
                added = added * (Rounded.apply(gate, own, True) if intermediates else gate)
            s = x + added
            s = Rounded.apply(s, own, intermediates)
        z = wide_norm(self.form, s, leaves["weight"], leaves.get("bias", torch.zeros(())))
        if intermediates:
            z = Rounded.apply(z, own, True)
        if "post_add" in leaves:
            z = z + leaves["post_add"]
            if intermediates:
                z = Rounded.apply(z, own, True)
        y = z if self.activation is None else VALUES[self.activation](z, 1.0)
        return self.collected(leaves, y, s if "pre_add" in leaves and self.returns_sum else None)

    def faults(self, found: dict[str, Tensor]) -> list[str]:
        expected, plain = self.formula(torch.float64), self.formula(torch.float32)
        chosen = self.formula(torch.float64, intermediates=True)
        texts = []
        for name, one in found.items():
            like = self.x if name in ("output", "sum") else self.tensors[name.removeprefix("grad_")]
            assert one.dtype == like.dtype, name
            assert one.shape == like.shape, name
            terms = max(1, prod(self.x.shape) // max(1, one.numel()))
            # A gate's gradients are made of the rounded gradient of s, by torch, which adds up that of planes too.
            by_torch = ("grad_pre_add", "grad_pre_gate", *(() if rows(self.form) else ("grad_input",)))
            fused = self.fused and name not in by_torch and (self.fused_backward or name in ("output", "sum"))
            allowance = Allowance(roundings=2.0) if one.dtype == torch.float64 else OURS
            if name == "grad_pre_gate" and one.numel() == 1:
                allowance = Allowance(factor=4.0, roundings=2.0)  # of one number the plain error is luck
            rounded = None if fused else chosen[name]
            spread = 0.0
            if name == "grad_pre_add" and one.numel() < self.x.numel():  # of instance_norm it is 0, a sum that is not
                spread = (terms * expected["grad_input"].square().mean()).sqrt().item()
            verdict = judge(
                one, expected[name], plain[name], allowance, terms=terms, spread=spread, intermediate=rounded
            )
            if verdict.fault:
                texts.append(f"{name}: {verdict.fault}")
        return texts


def case(
    form: str,
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    *names: str,
    activation: str | None = None,
    order: Callable[[Tensor], Tensor] = Tensor.contiguous,
) -> Case:
    size = shape[-1] if rows(form) else shape[1]
    small = (shape[0], size)
    shapes = {"pre_add": shape, "small_add": small, "pre_gate": small, "scalar_gate": (), "post_add": shape}
    tensors = {"input": order(drawn(*shape, dtype=dtype)), "weight": drawn(size, seed=1), "bias": drawn(size, seed=2)}
    for seed, name in enumerate(names, 3):
        kept = {"small_add": "pre_add", "scalar_gate": "pre_gate"}.get(name, name)
        tensors[kept] = drawn(*shapes[name], dtype=dtype, seed=seed)
    tensors["grad_output"], tensors["grad_sum"] = (drawn(*shape, dtype=dtype, seed=seed) for seed in (8, 9))
    return Case(form, activation, tensors)


SHAPES = [(3, 6, 35), (2, 9, 5, 7), (5, 3, 33), (6, 12, 13, 11)]
GIVEN = [
    ("pre_add",),
    ("post_add",),
    ("pre_add", "post_add"),
    ("pre_add", "pre_gate"),
    ("pre_add", "scalar_gate", "post_add"),
]
#: A dtype is a matter of how tensors are read, summed and rounded: float32 meets every sum, the others each kind of
#: rounding.
GIVEN_IN = {torch.float32: GIVEN, torch.bfloat16: GIVEN[-2:], torch.float16: GIVEN[-1:], torch.float64: GIVEN[-1:]}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_results_are_right(form: str, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        for names in GIVEN_IN[dtype]:
            one = case(form, shape, dtype, *names, activation=ACTIVATED[dtype])
            assert one.faults(one.run()) == [], (shape, names)


@pytest.mark.parametrize("form", [form for form in FORMS if not rows(form)])
def test_a_sum_per_sample_and_channel(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusednorm.sum_gradients.LEAST_SUMMED", 0)  # as of large images
    for dtype in (torch.float32, torch.bfloat16):
        for names in (("small_add",), ("small_add", "pre_gate"), ("small_add", "post_add")):
            one = case(form, (2, 9, 5, 7), dtype, *names, activation="silu", order=channels_last)
            assert one.faults(one.run()) == []
    x, t = drawn(2, 5, 7, 9), drawn(2, 9)
    if form in ("group_norm", "batch_norm"):
        last = {"group_norm": (3,), "batch_norm": (None, None, None, None, True)}[form]
        run = getattr(fusednorm, form)
        found = run(x, *last, channel_dim=-1, pre_add=t)
        torch.testing.assert_close(found, run(x + t[:, None, None, :], *last, channel_dim=-1))


def test_the_gradient_of_wider_numbers_is_not_rounded_to_the_inputs_dtype() -> None:
    x, numbers = torch.randn(2, 8, 5, 6).bfloat16().requires_grad_(), torch.randn(2, 8, requires_grad=True)
    y = fusednorm.group_norm(x, 2, pre_add=numbers, activation="silu")
    of_x, of_numbers = torch.autograd.grad(y, (x, numbers), torch.randn_like(y))
    torch.testing.assert_close(of_numbers, of_x.float().sum((2, 3)))


@pytest.mark.parametrize("form", FORMS)
def test_operands_of_other_dtypes(form: str) -> None:
    names = ("pre_add", "pre_gate", "post_add")
    for dtype, other in (
        (torch.float16, torch.float32), (torch.bfloat16, torch.float16), (torch.float32, torch.bfloat16),
        (torch.float32, torch.float64), (torch.float64, torch.float32),
    ):  # fmt: skip
        one = case(form, (3, 6, 35), dtype, *names, activation="silu")
        one.tensors.update({name: one.tensors[name].to(other) for name in names})
        assert one.faults(one.run()) == [], (dtype, other)


MEMORY: dict[str, Callable[[Tensor], Tensor]] = {
    "channels_last": channels_last,
    "sliced": lambda x: torch.cat((x, x), -1)[..., : x.shape[-1]],
    "every second": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "expanded": lambda x: x[:, :, :1].expand(x.shape),
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
}


@pytest.mark.parametrize("name", MEMORY)
def test_any_strides(name: str) -> None:
    """Of the input, of what is added, of both; s and y have the memory order of the output of a plain call."""
    for form in FORMS:
        for first in (MEMORY[name], Tensor.contiguous):
            for second in (MEMORY[name], Tensor.contiguous):
                one = case(form, (3, 6, 4, 5), torch.float32, "pre_add", "post_add", activation="silu")
                tensors = one.tensors
                tensors["input"] = first(tensors["input"])
                for added in ("pre_add", "post_add", "grad_sum"):
                    tensors[added] = second(tensors[added])
                assert one.faults(one.run()) == []
                x, weight, bias = tensors["input"], tensors["weight"], tensors["bias"]
                plain = normalize(form, x, weight, bias, activation="silu")
                sums = {"pre_add": tensors["pre_add"], "post_add": tensors["post_add"]}
                y, s = normalize(form, x, weight, bias, activation="silu", return_sum=True, **sums)
                assert y.stride() == s.stride() == plain.stride(), form


@pytest.mark.parametrize("trailing", [(7,), (7, 1)])
def test_gates_of_rows_whose_elements_lie_apart(trailing: tuple[int, ...]) -> None:
    dims = tuple(range(-len(trailing), 0))
    x, r = (drawn(7, 12, seed=seed)[:, ::2].t().reshape(2, 3, *trailing) for seed in range(2))
    for gate in (drawn(2, 3, *(1,) * len(trailing)), drawn(*trailing), torch.tensor(0.5)):
        s = x + gate * r
        for given in (x, x[0]), (x.contiguous(), x[0].contiguous()):
            y = fusednorm.layer_norm(given[0], trailing, pre_add=r, pre_gate=gate)
            torch.testing.assert_close(y, torch.nn.functional.layer_norm(s, trailing))
            own = gate[0] if gate.dim() > len(trailing) else gate
            y = fusednorm.rms_norm(given[1], trailing, eps=EPS, pre_add=r[0], pre_gate=own)
            torch.testing.assert_close(y, s[0] * (s[0].square().mean(dims, keepdim=True) + EPS).rsqrt())


def test_gates_of_one_channel() -> None:
    """batch_norm of (N, 1) shares its statistics among samples, but not its gates."""
    one = case("batch_norm", (32, 1), torch.float32, "pre_add", "pre_gate")
    assert one.faults(one.run()) == []
    x, r, gate, given = drawn(32, 1), drawn(32, 1, seed=1), drawn(32, 1, seed=2), (torch.zeros(1), torch.ones(1))
    y = fusednorm.instance_norm(x, *given, None, None, False, pre_add=r, pre_gate=gate)
    torch.testing.assert_close(y, torch.nn.functional.batch_norm(x + gate * r, *given))


@pytest.mark.parametrize("form", FORMS)
def test_an_empty_batch(form: str) -> None:
    one = case(form, (0, 6, 5), torch.float32, "pre_add", "pre_gate", "post_add", activation="silu")
    found = one.run()
    assert found["output"].shape == found["sum"].shape == found["grad_input"].shape == (0, 6, 5)
    assert not found["grad_weight"].count_nonzero()


@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_any_subset(form: str) -> None:
    whole = case(form, (3, 6, 5), torch.float32, "pre_add", "pre_gate", "post_add", activation="silu")
    full = whole.run()
    names = ("input", "weight", "pre_add", "pre_gate", "post_add")
    for chosen in (("input",), ("pre_add",), ("pre_gate",), ("post_add",), ("weight",), ("pre_add", "weight")):
        given = {name: one.detach().requires_grad_(name in chosen) for name, one in whole.tensors.items()}
        sums = {name: given[name] for name in names[2:]}
        bias = None if form == "rms_norm" else given["bias"]
        y, s = normalize(form, given["input"], given["weight"], bias, activation="silu", return_sum=True, **sums)
        assert s.requires_grad == bool({"input", "pre_add", "pre_gate"} & set(chosen))
        outputs = [(y, whole.tensors["grad_output"])]
        if s.requires_grad:
            outputs.append((s, whole.tensors["grad_sum"]))
        leaves = [given[name] for name in chosen]
        grads = torch.autograd.grad([one for one, _ in outputs], leaves, [grad for _, grad in outputs])
        for name, grad in zip(chosen, grads, strict=True):
            torch.testing.assert_close(grad, full[f"grad_{name}"])


@pytest.mark.parametrize("form", FORMS)
def test_only_the_sum_is_differentiated(form: str) -> None:
    x, r = drawn(3, 6, 5).requires_grad_(), drawn(3, 6, 5, seed=1).requires_grad_()
    _, s = normalize(form, x, None, None, activation="silu", pre_add=r, return_sum=True)
    first, second = torch.autograd.grad(s.sum(), (x, r))
    assert torch.equal(first, torch.ones_like(x))
    assert torch.equal(second, torch.ones_like(x))
    y, _ = normalize(form, x, None, None, activation="silu", pre_add=r, return_sum=True)
    torch.autograd.grad(y.square().sum(), (x, r))


@pytest.mark.parametrize("form", FORMS)
def test_second_derivatives(form: str) -> None:
    shape = (2, 3, 4)
    x, r, p = (drawn(*shape, dtype=torch.float64, seed=seed).requires_grad_() for seed in range(3))
    size = 4 if rows(form) else 3
    weight, gate = (drawn(*dims, dtype=torch.float64, seed=5).requires_grad_() for dims in ((size,), (2, size)))

    def run(x: Tensor, r: Tensor, p: Tensor, gate: Tensor, weight: Tensor) -> Any:
        sums = {"pre_add": r, "pre_gate": gate, "post_add": p}
        return normalize(form, x, weight, None, activation="gelu", return_sum=True, **sums)

    assert torch.autograd.gradcheck(run, (x, r, p, gate, weight), check_batched_grad=True)
    assert torch.autograd.gradgradcheck(run, (x, r, p, gate, weight))


@pytest.mark.parametrize("form", FORMS)
def test_functorch(form: str) -> None:
    x, r, p = (drawn(4, 2, 3, 5, seed=seed) for seed in range(3))

    def run(x: Tensor, r: Tensor, p: Tensor) -> Any:
        return normalize(form, x, None, None, activation="silu", pre_add=r, post_add=p, return_sum=True)

    def loss(x: Tensor, r: Tensor, p: Tensor) -> Tensor:
        y, s = run(x, r, p)
        total: Tensor = y.square().sum() + s.sin().sum()
        return total

    y, s = torch.func.vmap(run)(x, r, p)
    for k in range(4):
        torch.testing.assert_close((y[k], s[k]), run(x[k], r[k], p[k]))
    y, _ = torch.func.vmap(run, (None, 0, 0))(x[0], r, p)
    torch.testing.assert_close(y[1], run(x[0], r[1], p[1])[0])
    y, _ = torch.func.vmap(run, (None, None, 0))(x[0], r[0], p)
    torch.testing.assert_close(y[1], run(x[0], r[0], p[1])[0])
    leaves = [one[0].clone().requires_grad_() for one in (x, r, p)]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    torch.testing.assert_close(torch.func.grad(loss, (0, 1, 2))(x[0], r[0], p[0]), expected)
    _, tangent = torch.func.jvp(loss, (x[0], r[0], p[0]), (x[1], r[1], p[1]))
    by_hand = sum((one * other[1]).sum() for one, other in zip(expected, (x, r, p), strict=True))
    torch.testing.assert_close(tangent, by_hand)


@pytest.mark.parametrize("form", FORMS)
def test_autocast_keeps_the_inputs_dtype(form: str) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        for dtype in (torch.float32, torch.bfloat16):
            x, r = drawn(3, 6, 5, dtype=dtype), drawn(3, 6, 5, dtype=dtype, seed=1)
            y, s = normalize(form, x, None, None, activation="silu", pre_add=r, post_add=r, return_sum=True)
            assert y.dtype == s.dtype == dtype


@pytest.mark.parametrize("form", FORMS)
def test_tensors_that_are_one_another(form: str) -> None:
    """What is added may be the input itself; nothing that was given changes, and s is a tensor of its own."""
    x = drawn(3, 6, 5).requires_grad_()
    before = x.detach().clone()
    y, s = normalize(form, x, None, None, activation="silu", pre_add=x, post_add=x, return_sum=True)
    assert torch.equal(x, before)
    assert torch.equal(s, 2 * x)
    assert len({one.untyped_storage().data_ptr() for one in (x, y, s)}) == 3
    expected = torch.nn.functional.silu(wide_norm(form, 2 * x, torch.ones(()), torch.zeros(())) + x)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(
        torch.autograd.grad(y.sin().sum(), x), torch.autograd.grad(expected.sin().sum(), x), atol=2e-5, rtol=1e-4
    )
    zero = torch.zeros_like(x)
    for grads in (torch.no_grad, torch.enable_grad):
        with grads():
            _, s = normalize(form, x, None, None, activation="silu", pre_add=zero, return_sum=True)
            assert torch.equal(s, x)
            assert s.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("form", FORMS)
def test_the_same_bits_every_time(form: str) -> None:
    one = case(form, (8, 12, 333), torch.bfloat16, "pre_add", "pre_gate", "post_add", activation="silu")
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 1):
            torch.set_num_threads(count)
            results.append(one.run())
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        for name, value in other.items():
            if name != "grad_pre_gate":  # torch's own sum
                assert same_bits(value, results[0][name]), name


@pytest.mark.parametrize("form", FORMS)
def test_checkpoints_and_hooks_of_saved_tensors(form: str) -> None:
    x, r, p = (drawn(3, 6, 5, seed=seed).requires_grad_() for seed in range(3))

    def run(x: Tensor, r: Tensor, p: Tensor) -> Tensor:
        y, s = normalize(form, x, None, None, activation="silu", pre_add=r, post_add=p, return_sum=True)
        total: Tensor = y.square().sum() + s.sin().sum()
        return total

    expected = torch.autograd.grad(run(x, r, p), (x, r, p))
    for reentrant in (False, True):
        for one in (x, r, p):
            one.grad = None
        checkpoint(run, x, r, p, use_reentrant=reentrant).backward()
        torch.testing.assert_close([x.grad, r.grad, p.grad], list(expected))
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: seen.append(tensor) or tensor.clone(), lambda t: t):
        loss = run(x, r, p)
    torch.testing.assert_close(torch.autograd.grad(loss, (x, r, p)), expected)
    assert seen


# --- fused ---


def test_gates_of_every_shape() -> None:
    """Those that rows share one after the other are fused, the others composed."""
    x, r = drawn(3, 4, 5, 37), drawn(3, 4, 5, 37, seed=1)
    norm = norm_of("layer_norm", 1)
    for shape, fused in (
        ((), True), ((1,), True), ((37,), True), ((3, 37), True), ((3, 1, 1, 37), True), ((3, 4, 1, 37), True),
        ((3, 4, 5, 1), True), ((3, 1, 1, 1), True), ((3, 4, 5, 37), True), ((5, 37), False), ((4, 1, 37), False),
        ((3, 1, 5, 1), False),
    ):  # fmt: skip
        gate = drawn(*shape, seed=2)
        aligned = gate[:, None, None, :] if shape == (3, 37) else gate
        problem = sum_forward_problem(norm, Operands(x), Sums(r, gate), True)
        assert (ROWS.supports(problem) is None) == fused, shape
        leaves = [one.clone().requires_grad_() for one in (x, r, gate)]
        others = [one.clone().requires_grad_() for one in (x, r, aligned)]
        y, s = fusednorm.layer_norm(leaves[0], (37,), pre_add=leaves[1], pre_gate=leaves[2], return_sum=True)
        total = others[0] + others[2] * others[1]
        expected = torch.nn.functional.layer_norm(total, (37,))
        torch.testing.assert_close((y, s), (expected, total))
        found = torch.autograd.grad(y.sin().sum() + s.sum(), leaves)
        wanted = torch.autograd.grad(expected.sin().sum() + total.sum(), others)
        torch.testing.assert_close((*found[:2], found[2].reshape(wanted[2].shape)), wanted)


def test_gates_of_rows_of_two_dimensions() -> None:
    """A gate that has one of the two in full is no row's."""
    x, r = drawn(6, 4, 16), drawn(6, 4, 16, seed=1)
    for shape in ((1, 4, 16), (6, 1, 1), (1, 1, 16), (6, 1, 16), (6, 4, 1)):
        gate = drawn(*shape, seed=2)
        y, s = fusednorm.layer_norm(x, (4, 16), pre_add=r, pre_gate=gate, return_sum=True)
        total = x + gate * r
        torch.testing.assert_close((y, s), (torch.nn.functional.layer_norm(total, (4, 16)), total))


@pytest.mark.parametrize("form", ["layer_norm", "rms_norm"])
def test_rows_longer_than_a_chunk_and_few_or_many(form: str) -> None:
    for shape in ((2, 9001), (300, 4097), (1, 1, 20), (700, 3)):
        one = case(form, shape, torch.float32, "pre_add", "post_add", activation="silu")
        if form == "layer_norm" and shape[-1] == 3:
            continue  # three deviations are a hard case of the norm alone
        assert one.faults(one.run()) == [], shape
        names = ("pre_add", "post_add")
        given = {name: one.tensors[name] for name in names}
        bias = None if form == "rms_norm" else one.tensors["bias"]
        arguments = (form, one.x, one.tensors["weight"], bias)
        y, s = normalize(*arguments, activation="silu", return_sum=True, **given)
        assert same_bits(normalize(*arguments, activation="silu", **given), y)  # s is nobody's, and lies in a row
        assert torch.equal(s, one.x + given["pre_add"])


@pytest.mark.parametrize("form", ["group_norm", "instance_norm", "batch_norm"])
def test_planes(form: str) -> None:
    """Numbers per channel, gates, modulation, sliced inputs, and an s that nobody keeps."""
    wide = case(form, (4, 6, 13, 11), torch.float32, "small_add", "pre_gate", "post_add", activation="silu")
    assert wide.faults(wide.run()) == []
    x, r, p = (drawn(4, 12, 13, 11, seed=seed)[:, ::2] for seed in range(3))
    scale, shift, t, gate = (drawn(4, 6, seed=seed) for seed in range(3, 7))
    modulation = {"scale": scale, "shift": shift}
    for sums in ({"pre_add": r}, {"pre_add": t, "pre_gate": gate, "post_add": p}, {"pre_add": r, "pre_gate": gate}):
        leaves = [one.clone().requires_grad_() for one in (x, scale, shift, *sums.values())]
        given = dict(zip(sums, leaves[3:], strict=True))
        y, s = normalize(
            form, leaves[0], None, None, activation="silu", scale=leaves[1], shift=leaves[2], return_sum=True, **given
        )
        added = given["pre_add"] if given["pre_add"].dim() == 4 else given["pre_add"][:, :, None, None]
        total = leaves[0] + (added * given["pre_gate"][:, :, None, None] if "pre_gate" in given else added)
        z = normalize(form, total, None, None, scale=leaves[1], shift=leaves[2])
        expected = torch.nn.functional.silu(z + given["post_add"] if "post_add" in given else z)
        torch.testing.assert_close((y, s), (expected, total))
        found, wanted = (torch.autograd.grad(one.sin().sum(), leaves) for one in (y, expected))
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
        plain = normalize(form, x, None, None, activation="silu", **modulation, **sums)
        assert same_bits(plain, y.detach())


def test_rows_of_two_dimensional_inputs() -> None:
    """group_norm of (N, C) is a norm of rows, in groups."""
    x, r, p, gate = (drawn(40, 36, seed=seed).requires_grad_() for seed in range(4))
    for sums in ({"pre_add": r}, {"pre_add": r, "pre_gate": gate, "post_add": p}):
        y = fusednorm.group_norm(x, 4, activation="silu", **sums)
        total = x + r * (gate if len(sums) > 1 else 1)
        expected = torch.nn.functional.silu(torch.nn.functional.group_norm(total, 4) + (p if len(sums) > 1 else 0))
        torch.testing.assert_close(y, expected)
        leaves = (x, *sums.values())
        found, wanted = (torch.autograd.grad(one.sin().sum(), leaves) for one in (y, expected))
        torch.testing.assert_close(found, wanted)


def refuse(*_: Any) -> Any:
    raise AssertionError("torch's operators form a sum")


@pytest.mark.parametrize("form", ["group_norm", "instance_norm", "batch_norm"])
def test_images_in_channels_last(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel adds s and takes its statistics, and one the rest; backward where an activation meets post_add. Few
    channels make rows of several positions; samples are cut into slabs, and lie apart."""
    monkeypatch.setattr("fusednorm.sums.around", refuse)
    monkeypatch.setattr("fusednorm.sum_gradients._composed_backward", refuse)
    every_second = lambda x: channels_last(x.repeat_interleave(2, 0))[::2]  # noqa: E731
    whole, small = ("pre_add", "post_add"), ("small_add", "pre_gate")
    for shape, dtype, names in (
        ((4, 12, 13, 11), torch.float32, whole), ((2, 99, 37, 38), torch.bfloat16, whole),
        ((4, 12, 13, 11), torch.float32, small), ((2, 99, 37, 38), torch.float32, small),
    ):  # fmt: skip
        for order in (channels_last, every_second):
            one = case(form, shape, dtype, *names, activation="silu", order=order)
            added = {name: channels_last(one.tensors[name]) for name in names if name in whole}
            one.tensors.update(added)
            assert one.faults(one.run()) == [], (shape, names)


@pytest.mark.parametrize("order", [Tensor.contiguous, channels_last])
def test_evaluation_is_one_call(order: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    x, r, p = (order(drawn(3, 6, 9, 14, seed=seed)) for seed in range(3))
    t, gate, scale = (drawn(3, 6, seed=seed) for seed in range(3, 6))
    mean, var, weight = drawn(6, seed=6), drawn(6, seed=7).square() + 0.5, drawn(6, seed=8)
    cases = []
    for sums in (
        {"post_add": p}, {"pre_add": t, "post_add": p}, {"pre_add": r, "pre_gate": gate},
    ):  # fmt: skip
        wide = {name: one.double() for name, one in sums.items()}
        s = x.double()
        if "pre_add" in wide:
            added = wide["pre_add"] if sums["pre_add"] is r else wide["pre_add"][:, :, None, None]
            s = s + (added * gate.double()[:, :, None, None] if "pre_gate" in wide else added)
        z = fusednorm.batch_norm(s, mean.double(), var.double(), weight.double(), scale=scale.double())
        cases.append((sums, torch.nn.functional.silu(z + wide.get("post_add", 0)), s))
    monkeypatch.setattr("fusednorm.sums.around", refuse)
    for sums, expected, s in cases:
        kept = "pre_add" in sums
        given = x, mean, var, weight
        found = fusednorm.batch_norm(*given, activation="silu", scale=scale, return_sum=kept, **sums)
        y, total = found if kept else (found, None)
        torch.testing.assert_close(y, expected.float())
        assert y.stride() == x.stride()
        if kept:
            torch.testing.assert_close(total, s.float())
            y = fusednorm.batch_norm(*given, activation="silu", scale=scale, **sums)
            assert same_bits(y, found[0])


def test_which_instances_fuse() -> None:
    x, r = drawn(6, 40), drawn(6, 40, seed=1)
    reasons = {one.instance.name: one.reason for one in fusednorm.instances(fusednorm.layer_norm, x, (40,), pre_add=r)}
    assert reasons["cpu.rows"] is None
    assert reasons["reference"] == "adds nothing before or behind the norm"
    half = drawn(6, 40, dtype=torch.float16)
    found = fusednorm.instances(fusednorm.layer_norm, x, (40,), post_add=half)
    reasons = {one.instance.name: one.reason for one in found}
    assert reasons["cpu.slabs"] == "post_add has not the input's shape, dtype and memory order"
    assert reasons["cpu.rows"] == "post_add has not the input's shape, dtype and memory order"
    fused = fusednorm.explain(fusednorm.layer_norm, x, (40,), pre_add=r, return_sum=True)
    assert fused.composed is None
    assert fused.instance == "cpu.rows"
    assert "fused      pre_add\n" in str(fused)
    short, statistics = drawn(16, 300, 4, 4), (None, None, None, None, True)
    composed = fusednorm.explain(fusednorm.batch_norm, short, *statistics, pre_add=drawn(16, 300), post_add=short)
    assert composed.composed == "adds no number per sample and channel to blocks of channels"
    assert "composed   pre_add, post_add by torch's operators: cpu.slabs adds no number" in str(composed)
    image = drawn(2, 6, 5)
    tiles = fusednorm.explain(fusednorm.group_norm, image, 3, pre_add=image, post_add=image)
    assert (tiles.instance, tiles.composed) == ("cpu.planes", None)
    large = drawn(4, 6, 12, 12)
    planes = fusednorm.explain(fusednorm.group_norm, large, 3, pre_add=drawn(4, 6), pre_gate=drawn(4, 6))
    assert (planes.instance, planes.composed) == ("cpu.planes", None)
    last = fusednorm.explain(fusednorm.group_norm, channels_last(large), 3, pre_add=channels_last(large))
    assert (last.instance, last.composed) == ("cpu.slabs", None)
    assert planes.bytes == fusednorm.explain(fusednorm.group_norm, large, 3).bytes
    plain = fusednorm.explain(fusednorm.group_norm, image, 3)
    assert fused.bytes - fusednorm.explain(fusednorm.layer_norm, x, (40,)).bytes == 2 * x.nbytes
    assert tiles.bytes - plain.bytes == 2 * image.nbytes


def test_an_instance_that_is_asked_for_runs_the_norm() -> None:
    x, r = drawn(6, 40).requires_grad_(), drawn(6, 40, seed=1).requires_grad_()
    results = []
    for name in ("cpu.rows", "reference", "cpu.slabs"):
        with fusednorm.use_instance(name):
            y, s = fusednorm.layer_norm(x, (40,), pre_add=r, post_add=x, activation="silu", return_sum=True)
        results.append((y, s, *torch.autograd.grad(y.sin().sum() + s.sum(), (x, r))))
    torch.testing.assert_close(results[0], results[1])
    torch.testing.assert_close(results[0], results[2])


def test_a_kernel_that_cannot_be_compiled(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(self: Any, problem: Any, config: Any = None) -> Any:
        raise CompilationError("no kernel today")

    monkeypatch.setattr(type(ROWS), "plan", refuse)
    monkeypatch.setattr(dispatch, "_plans", {})
    x = drawn(6, 41)
    torch.testing.assert_close(fusednorm.layer_norm(x, (41,), pre_add=x), fusednorm.layer_norm(2 * x, (41,)))
    assert "no kernel today; calls that need it are composed of torch's sums" in caplog.text
    with fusednorm.use_instance("cpu.rows"), pytest.raises(CompilationError):
        fusednorm.layer_norm(x, (41,), pre_add=x)


# --- statistics, modules ---


def test_given_statistics_and_running_ones() -> None:
    x, r, p = (drawn(4, 6, 5, seed=seed) for seed in range(3))
    for function in (fusednorm.batch_norm, fusednorm.instance_norm):
        found, expected = ([torch.zeros(6), torch.ones(6)] for _ in range(2))
        for training in (True, True, False):
            y, s = function(
                x, *found, None, None, training, 0.3, pre_add=r, post_add=p, activation="silu", return_sum=True
            )
            z = function(x + r, *expected, None, None, training, 0.3)
            torch.testing.assert_close(y, torch.nn.functional.silu(z + p))
            torch.testing.assert_close(s, x + r)
            torch.testing.assert_close(found, expected)


MODULES: dict[str, Callable[[], torch.nn.Module]] = {
    "group_norm": lambda: nn.GroupNorm(3, 6, activation="silu"),
    "instance_norm": lambda: nn.InstanceNorm1d(6, affine=True, track_running_stats=True, activation="silu"),
    "layer_norm": lambda: nn.LayerNorm(5, activation="silu"),
    "rms_norm": lambda: nn.RMSNorm(5, activation="silu"),
    "batch_norm": lambda: nn.BatchNorm1d(6, activation="silu"),
    "layer_norm over channels": lambda: nn.LayerNorm2d(6, activation="silu"),
    "sync_batch_norm": lambda: nn.SyncBatchNorm(6, activation="silu"),
}


@pytest.mark.parametrize("form", MODULES)
def test_modules(form: str) -> None:
    """In training and in evaluation, copies too, beside the module without an activation and torch's sums."""
    x, r, p, gate = drawn(3, 6, 5), drawn(3, 6, 5, seed=1), drawn(3, 6, 5, seed=2), drawn(3, 5 if rows(form) else 6)
    module = MODULES[form]()
    plain = copy.deepcopy(module)
    plain.activation = None  # type: ignore[assignment]
    gated = gate[:, None, :] if rows(form) else gate[:, :, None]
    for training in (True, False):
        module.train(training)
        plain.train(training)
        twin = copy.deepcopy(module)
        for one in (module, twin):
            y, s = one(x, pre_add=r, pre_gate=gate, post_add=p, return_sum=True)
            torch.testing.assert_close(s, x + gated * r)
        expected = torch.nn.functional.silu(plain(s) + p)
        torch.testing.assert_close(y, expected)
        for (name, one), other in zip(module.state_dict().items(), plain.state_dict().values(), strict=True):
            torch.testing.assert_close(one, other, msg=name)
        torch.testing.assert_close(module.eval()(x, post_add=p), torch.nn.functional.silu(plain.eval()(x) + p))


def test_a_sample_without_its_batch_dimension() -> None:
    module = nn.InstanceNorm1d(6, activation="silu")
    x, r, t = drawn(6, 5), drawn(6, 5, seed=1), drawn(6, seed=2)
    y, s = module(x, pre_add=r, return_sum=True)
    torch.testing.assert_close((y, s), (module(x + r), x + r))
    torch.testing.assert_close(module(x, pre_add=t), module(x + t[:, None]))
    torch.testing.assert_close(module(x, pre_add=r, pre_gate=t), module(x + t[:, None] * r))
    torch.testing.assert_close(module(x, pre_add=r, pre_gate=torch.tensor(0.5)), module(x + 0.5 * r))


class Residual(torch.nn.Module):
    """A block as in a transformer and one as in a ResNet."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.first, self.second = MODULES[form](), MODULES[form]()

    def forward(self, x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        y, s = self.first(x, pre_add=r, return_sum=True)
        return self.second(y * 2, post_add=s), s


@pytest.mark.parametrize("form", ["rms_norm", "batch_norm"])
def test_under_torch_compile(form: str) -> None:
    block = Residual(form)
    twin = copy.deepcopy(block)
    x, r = (drawn(3, 6, 5, seed=seed).requires_grad_() for seed in range(2))
    results = []
    for call in (block, torch.compile(twin, fullgraph=True)):
        y, s = call(x, r)
        results.append((y, s, *torch.autograd.grad(y.square().sum() + s.sum(), (x, r))))
    torch.testing.assert_close(results[1], results[0])
    for one, other in zip(block.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(one, other)


def test_dynamo_sees_plain_sums_and_one_op() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward  # type: ignore[no-any-return]

    x = drawn(2, 6, 5)

    def run(x: Tensor) -> Any:
        return fusednorm.group_norm(x, 3, activation="silu", pre_add=x, post_add=x, return_sum=True)

    torch.testing.assert_close(torch.compile(run, backend=backend, fullgraph=True)(x), run(x))
    names = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert sum("norm_forward" in name for name in names) == 1
    assert sum("built-in function add" in name for name in names) == 2


@pytest.mark.parametrize("form", ["group_norm", "layer_norm", "batch_norm"])
def test_exported_programs(form: str) -> None:
    block = Residual(form).eval()
    x, r = drawn(3, 6, 5), drawn(3, 6, 5, seed=1)
    program = torch.export.export(block, (x, r))
    torch.testing.assert_close(program.module()(x, r), block(x, r))
    plain = program.run_decompositions(fusednorm.decompositions())
    assert not any("fusednorm" in str(node.target) for node in plain.graph.nodes)
    torch.testing.assert_close(plain.module()(x, r), block(x, r))


@pytest.mark.parametrize("form", MODULES)
def test_fx_records_one_call(form: str) -> None:
    block = Residual(form).eval()
    traced = torch.fx.symbolic_trace(block)
    x, r = drawn(3, 6, 5), drawn(3, 6, 5, seed=1)
    calls = [node for node in traced.graph.nodes if node.op == "call_module"]
    assert [sorted(node.kwargs) for node in calls] == [["pre_add", "return_sum"], ["post_add"]]
    torch.testing.assert_close(traced(x, r), block(x, r))


def test_fx_records_the_functions() -> None:
    x, r = drawn(3, 6, 5), drawn(3, 6, 5, seed=1)
    for form in FORMS:
        traced = torch.fx.symbolic_trace(FUNCTIONS[form])
        torch.testing.assert_close(traced(x, r), FUNCTIONS[form](x, r))
        (call,) = [node for node in traced.graph.nodes if node.op == "call_function"]
        assert set(call.kwargs) >= {"pre_add", "post_add"}, form


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "group_norm": lambda x, r: fusednorm.group_norm(x, 3, pre_add=r, post_add=r, activation="silu"),
    "instance_norm": lambda x, r: fusednorm.instance_norm(x, pre_add=r, post_add=r, activation="silu"),
    "layer_norm": lambda x, r: fusednorm.layer_norm(x, (5,), pre_add=r, post_add=r, activation="silu"),
    "rms_norm": lambda x, r: fusednorm.rms_norm(x, (5,), pre_add=r, post_add=r, activation="silu"),
    "batch_norm": lambda x, r: fusednorm.batch_norm(
        x, None, None, training=True, pre_add=r, post_add=r, activation="silu"
    ),
    "layer_norm over channels": lambda x, r: fusednorm.layer_norm(
        x, (6,), channel_dim=1, pre_add=r, post_add=r, activation="silu"
    ),
}


def test_errors() -> None:
    x = drawn(2, 6, 5)
    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, "return_sum is True and pre_add is None; expected pre_add", {"return_sum": True}),
        (ValueError, "pre_gate is given and pre_add is None", {"pre_gate": drawn(2, 6)}),
        (ValueError, r"pre_add has shape .*; expected \(2, 6, 5\).*\(N, C\) = \(2, 6\)", {"pre_add": drawn(2, 5)}),
        (ValueError, r"post_add has shape \(2, 6\); expected \(2, 6, 5\)", {"post_add": drawn(2, 6)}),
        (
            ValueError, r"pre_gate has shape \(3, 5\); expected \(2, 6\), a scalar tensor",
            {"pre_add": x, "pre_gate": drawn(3, 5)},
        ),
        (TypeError, "pre_add is a float; expected a torch.Tensor", {"pre_add": 1.0}),
        (TypeError, "pre_gate is a float; expected a torch.Tensor", {"pre_add": x, "pre_gate": 0.5}),
        (TypeError, "post_add is a int; expected a torch.Tensor", {"post_add": 1}),
        (TypeError, "return_sum is a int; expected a bool", {"pre_add": x, "return_sum": 1}),
        (TypeError, "pre_add has dtype torch.int64; expected float64", {"pre_add": x.long()}),
        (ValueError, "post_add is on meta and input on cpu", {"post_add": x.to("meta")}),
    ]  # fmt: skip
    for kind, text, keywords in cases:
        with pytest.raises(kind, match=f"group_norm: {text}"):
            fusednorm.group_norm(x, 3, **keywords)
    with pytest.raises(ValueError, match=r"layer_norm: pre_add has shape \(2, 5\); expected \(2, 6, 5\), the shape of"):
        fusednorm.layer_norm(x, (5,), pre_add=drawn(2, 5))
    with pytest.raises(ValueError, match="instance_norm: return_sum is True"):
        fusednorm.instance_norm(x, torch.zeros(6), torch.ones(6), use_input_stats=False, return_sum=True)
    with pytest.raises(ValueError, match="batch_norm: return_sum is True"):
        nn.BatchNorm1d(6)(x, return_sum=True)


@pytest.mark.parametrize("form", FORMS)
def test_calls_without_sums_after_calls_with_them(form: str) -> None:
    """A call that repeats is of the same operands."""
    x, r = drawn(3, 6, 5), drawn(3, 6, 5, seed=1)
    plain, summed = wide_norm(form, x, *ONE), wide_norm(form, x + r, *ONE)
    for sums, expected in 4 * [({}, plain), ({"pre_add": r}, summed), ({"post_add": r}, plain + r)]:
        y = normalize(form, x, None, None, activation="silu", **sums)
        torch.testing.assert_close(y, torch.nn.functional.silu(expected))


ONE = (torch.ones(()), torch.zeros(()))


def test_a_backward_under_compiled_autograd() -> None:
    x, r, p = (drawn(6, 40, seed=seed).requires_grad_() for seed in range(3))

    def grads() -> list[Tensor | None]:
        x.grad = r.grad = p.grad = None
        y, s = fusednorm.layer_norm(x, (40,), pre_add=r, post_add=p, return_sum=True, activation="silu")
        (y.square().sum() + s.sin().sum()).backward()
        return [x.grad, r.grad, p.grad]

    expected = grads()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        found = grads()
    torch.testing.assert_close(found, expected)


def test_the_backward_of_relu_keeps_no_shortcut(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the output, as that of torch's relu does: a shortcut that nobody else keeps is freed, or changed."""
    monkeypatch.setattr("fusednorm.sums.around", refuse)
    x, p = (drawn(4, 6, 33, 35, seed=seed).requires_grad_() for seed in range(2))

    def gradients(y: Tensor, **keywords: Any) -> Any:
        return torch.autograd.grad(y.sin().sum(), (x, p), **keywords)

    def expected() -> Tensor:
        return torch.relu(fusednorm.group_norm(x, 3) + p)

    shortcut = p * 1
    freed = weakref.ref(shortcut)
    y = fusednorm.group_norm(x, 3, activation="relu", post_add=shortcut)
    del shortcut
    assert freed() is None
    changed = p * 1
    other = fusednorm.group_norm(x, 3, activation="relu", post_add=changed)
    changed.mul_(2)
    for one in (y, other):
        torch.testing.assert_close(gradients(one), gradients(expected()))
    y = fusednorm.group_norm(x, 3, activation="relu", post_add=p)
    found, wanted = (
        torch.autograd.grad(sum(slope.cos().sum() for slope in gradients(one, create_graph=True)), (x, p))
        for one in (y, expected())
    )
    torch.testing.assert_close(found, wanted)


def test_a_profiler_sees_what_runs_without_it() -> None:
    """The call by the family's name and one backward, no sums of torch's."""
    x, h, weight = (torch.randn(shape, requires_grad=True) for shape in ((5, 64), (5, 64), (64,)))

    def call() -> None:
        y, s = fusednorm.rms_norm(x, (64,), weight, pre_add=h, return_sum=True)
        torch.autograd.grad((y, s), (x, h, weight), (torch.ones_like(y), torch.ones_like(s)))

    call()
    with torch.autograd.profiler.profile() as profile:
        call()
    names = [event.name for event in profile.function_events]
    assert names.count("fusednorm::rms_norm") == 1
    assert any("SummedNormalizationBackward" in name for name in names)
    assert not any(name in ("aten::add", "aten::add_") for name in names)
