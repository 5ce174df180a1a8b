"""Which instance runs a problem, asked for by name or chosen, and the plans that are kept; few tests run a kernel."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from itertools import count, product
from typing import Any

import pytest
import torch
from cpu_support import INSTANCES, activation_for, same_bits
from torch import Tensor

import fusednorm
from fusednorm import choice, dispatch, ops
from fusednorm.activations import Activation
from fusednorm.backends import reference
from fusednorm.backends.cpu import compiler
from fusednorm.backends.cpu import instances as cpu
from fusednorm.choice import choose, instances, use_instance
from fusednorm.formats import Quantized
from fusednorm.norm import FAMILIES, ROW_FAMILIES, Family, norm_of
from fusednorm.operands import BackwardOperands, Gated, Operands, Sums
from fusednorm.problem import DIRECTIONS, DTYPE_BYTES, Order, Problem, View, dense_layout
from fusednorm.problems import forward_problem

FIRST: Order = "channels_first"
LAST: Order = "channels_last"


VIEW = View(4, 32, 2, 100)


def problem(view: View = VIEW, order: Order = FIRST, family: Family = "group_norm", **changes: Any) -> Problem:
    layout = dense_layout(view, order)
    norm = norm_of(family, int(family in ROW_FAMILIES))
    made = Problem(norm, "forward", view, layout, "float32", output_layout=layout)
    return replace(made, **changes)


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(kernel: compiler.Kernel) -> None:
        raise AssertionError(f"the kernel {kernel.name} was loaded")

    monkeypatch.setattr(compiler, "load", refuse)
    monkeypatch.setattr("fusednorm.backends.cpu.plans.base.load", refuse)


# --- the choice ---

ROW = View(64, 1, 1024, 1)
BATCH: dict[str, Any] = {"family": "batch_norm"}

CHOICES: list[tuple[str, Problem, str]] = [
    ("many groups", problem(View(2, 32, 10, 4096)), "cpu.planes"),
    ("few groups, large", problem(View(1, 8, 64, 65536)), "cpu.planes_split"),
    ("few groups, small", problem(View(1, 8, 4, 64)), "cpu.planes"),
    ("one group, large", problem(View(1, 1, 64, 65536)), "cpu.planes_split"),
    ("16 groups, large", problem(View(1, 16, 4, 65536)), "cpu.planes"),
    ("few groups of short planes", problem(View(4, 1, 1024, 33)), "cpu.planes"),
    ("few groups of short planes, backward", problem(View(4, 1, 1024, 33), direction="backward"), "cpu.planes"),
    ("one group of short planes", problem(View(1, 1, 2048, 81)), "cpu.planes"),
    ("one group of short planes, backward", problem(View(1, 1, 2048, 81), direction="backward"), "cpu.planes_split"),
    ("few large groups of short planes", problem(View(4, 1, 8192, 33)), "cpu.planes_split"),
    ("15 groups, beyond the cache of a core", problem(View(1, 15, 16, 65536)), "cpu.planes_split"),
    ("8 groups in the caches", problem(View(1, 8, 32, 9216)), "cpu.planes"),
    ("7 groups in the caches", problem(View(1, 7, 32, 9216)), "cpu.planes_split"),
    ("5 groups in the caches, backward", problem(View(5, 1, 3, 43681), direction="backward"), "cpu.planes"),
    ("4 groups in the caches, backward", problem(View(4, 1, 3, 43681), direction="backward"), "cpu.planes_split"),
    ("one group of 256 KB", problem(View(1, 1, 1, 65536)), "cpu.planes"),
    ("one group beyond 256 KB", problem(View(1, 1, 1, 65537)), "cpu.planes_split"),
    ("one group of 256 KB in fp16", problem(View(1, 1, 1, 131072), dtype="float16"), "cpu.planes"),
    ("the same in fp32", problem(View(1, 1, 1, 131072)), "cpu.planes_split"),
    ("backward", problem(View(2, 32, 10, 4096), direction="backward"), "cpu.planes"),
    ("backward, few groups", problem(View(1, 8, 64, 65536), direction="backward_data"), "cpu.planes_split"),
    ("instance_norm", problem(View(2, 32, 1, 4096), family="instance_norm"), "cpu.planes"),
    ("batch_norm", problem(View(8, 256, 1, 3136), **BATCH), "cpu.planes"),
    ("batch_norm, few channels", problem(View(8, 3, 1, 65536), **BATCH), "cpu.planes_split"),
    ("batch_norm, inference", problem(View(8, 256, 1, 3136), direction="inference", **BATCH), "cpu.planes_split"),
    ("channels_last, small", problem(View(2, 8, 4, 64), LAST), "cpu.slabs"),
    ("channels_last, 8 samples of 3 MB", problem(View(8, 32, 8, 3136), LAST), "cpu.slabs"),
    ("channels_last, 7 samples", problem(View(7, 32, 8, 3136), LAST), "cpu.slabs_split"),
    ("channels_last, 8 samples of 5 MB", problem(View(8, 32, 8, 5120), LAST), "cpu.slabs_split"),
    ("channels_last, one large sample", problem(View(1, 32, 4, 65536), LAST), "cpu.slabs_split"),
    ("channels_last, batch_norm", problem(View(2, 8, 1, 64), LAST, **BATCH), "cpu.slabs_split"),
    ("channels_last, inference", problem(View(2, 8, 1, 64), LAST, direction="inference", **BATCH), "cpu.slabs_split"),
    ("layer_norm", problem(ROW, LAST, family="layer_norm"), "cpu.rows"),
    ("rms_norm, backward", problem(ROW, LAST, family="rms_norm", direction="backward"), "cpu.rows"),
    ("layer_norm of a transposed tensor", problem(ROW, FIRST, family="layer_norm"), "cpu.planes"),
    ("one long row at a step", problem(View(1, 1, 300_000, 1), FIRST, family="layer_norm"), "cpu.planes"),
    ("one element under a statistic", problem(View(64, 8, 1, 1), LAST, direction="backward"), "reference"),
    ("group_norm of a matrix", problem(View(64, 8, 16, 1), LAST), "cpu.rows"),
    ("group_norm of a matrix, modulated", problem(View(64, 8, 16, 1), LAST, scale_dtype="float32"), "cpu.rows"),
    ("batch_norm of a matrix", problem(View(64, 128, 1, 1), LAST, **BATCH), "cpu.slabs_split"),
    ("another device", problem(device="cuda"), "reference"),
    ("a meta tensor", problem(device="meta"), "reference"),
]


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize(("asked", "name"), [pytest.param(*row[1:], id=row[0]) for row in CHOICES])
def test_choice(asked: Problem, name: str) -> None:
    assert choose(asked).name == name


def every_problem() -> Iterator[Problem]:
    views = [View(4, 3, 2, 10), View(1, 1, 64, 65536), View(16, 32, 4, 4096), View(5, 4, 2, 1), View(1, 1, 1, 1)]
    for family, direction, view, order, modulated in product(FAMILIES, DIRECTIONS, views, (FIRST, LAST), (True, False)):
        rows = family in ("layer_norm", "rms_norm")
        if direction == "inference" and family != "batch_norm":
            continue
        if rows and (modulated or view.spatial > 1):
            continue
        if family != "group_norm" and not rows:
            view = View(view.samples, view.channels, 1, view.spatial)
        for dtype in DTYPE_BYTES:
            yield problem(
                view, order, family, direction=direction, dtype=dtype, scale_dtype="float32" if modulated else None
            )


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize(
    ("points", "channels", "slabs"),
    [(268, 320, 1), (2000, 512, 8), (3000, 960, 24), (11125, 1280, 58), (60000, 96, 23)],
)
def test_slabs_are_few_beside_their_rows(points: int, channels: int, slabs: int) -> None:
    x = torch.empty(points, channels)
    seen = forward_problem(norm_of("batch_norm"), Operands(x)).folded
    assert -(-seen.view.spatial // cpu.slabs_for(seen).rows(seen)) == slabs


def test_what_is_chosen_can_run_the_problem() -> None:
    problems = list(every_problem())
    assert len(problems) > 1000
    assert [asked for asked in problems if choose(asked).instance.supports(asked) is not None] == []
    assert {choose(asked).name for asked in problems} == {*INSTANCES, "reference"}
    assert [asked for asked in problems if (choose(asked).name == "reference") != asked.constant] == []


def test_the_choice_is_a_function_of_the_problem_alone() -> None:
    problems, before = list(every_problem()), torch.get_num_threads()
    chosen = [choose(asked).name for asked in problems]
    torch.set_num_threads(7)
    try:
        assert [choose(replace(asked)).name for asked in reversed(problems)] == chosen[::-1]
    finally:
        torch.set_num_threads(before)


def test_without_the_cpu_backend_the_reference_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "unavailable", lambda: "numba is not installed")
    assert choose(problem()).name == "reference"
    assert {one.reason for one in instances(problem()) if one.instance.name != "reference"} >= {
        "numba is not installed"
    }


# --- who can run what, and why not ---


def test_instances_lists_every_instance_once_the_reference_last() -> None:
    found = instances(problem())
    names = [candidate.instance.name for candidate in found]
    assert [name for name in names if name.startswith("cpu.")] == [*INSTANCES, "cpu.columns"]
    assert names[-1] == "reference"
    assert len(set(names)) == len(names)
    assert [candidate.reason for candidate in found if candidate.instance.name == "reference"] == [None]


def test_configurations_are_frozen_dataclasses() -> None:
    """The default first, each once; None alone where there is nothing to choose."""
    for asked in every_problem():
        for candidate in instances(asked):
            if candidate.reason is None:
                configs = candidate.instance.configs(asked)
                assert len(set(configs)) == len(configs) > 0
                assert configs == (None,) or all(map(is_dataclass, configs))


REASONS: list[tuple[str, Problem, str]] = [
    ("cpu.planes", problem(order=LAST), "needs channels_first, the tensor is channels_last"),
    ("cpu.planes_split", problem(order=LAST), "needs channels_first, the tensor is channels_last"),
    ("cpu.slabs", problem(), "needs channels_last, the tensor is channels_first"),
    ("cpu.slabs_split", problem(), "needs channels_last, the tensor is channels_first"),
    ("cpu.slabs", problem(order=LAST, **BATCH), "over the samples"),
    ("cpu.planes", problem(direction="inference", **BATCH), "cpu.planes_split applies the given ones"),
    ("cpu.slabs", problem(order=LAST, direction="inference", **BATCH), "cpu.slabs_split applies the given ones"),
    ("cpu.rows", problem(order=LAST), "needs one position per channel, there are 100"),
    ("cpu.rows", problem(View(4, 8, 2, 1), LAST, **BATCH), "not those of single rows"),
    ("cpu.rows", problem(View(4, 8, 2, 1), FIRST), "needs channels_last"),
    *((name, problem(View(4, 8, 2, 1), order, device="cuda"), "runs on cpu, the tensor is on cuda")
      for name, order in [("cpu.planes", FIRST), ("cpu.planes_split", FIRST), ("cpu.slabs", LAST),
                          ("cpu.slabs_split", LAST), ("cpu.rows", LAST)]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "asked", "words"), REASONS)
def test_an_instance_says_why_not(name: str, asked: Problem, words: str) -> None:
    (reason,) = [candidate.reason for candidate in instances(asked) if candidate.instance.name == name]
    assert reason is not None
    assert words in reason


@pytest.mark.parametrize(("name", "asked", "words"), REASONS)
def test_a_name_that_cannot_run_the_problem_is_an_error(name: str, asked: Problem, words: str) -> None:
    with pytest.raises(RuntimeError, match=f"{name}.*{words}"):
        choose(asked, name)


def test_an_unknown_name_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"'cpu.fast' does not exist; expected one of .*cpu.planes, .*reference"):
        choose(problem(), "cpu.fast")


def test_backends_says_what_it_found() -> None:
    found = {backend.name: backend for backend in choice.backends()}
    assert found["cpu"].available is None
    assert found["reference"].available is None
    assert set(found["cpu"].details) == {"kernel cache", "buffer cache"}


# --- use_instance ---


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the instances that plans are made of, with no plan made before."""
    names: list[str] = []

    def spy(asked: Problem, name: str | None = None) -> Any:
        instance = choose(asked, name)
        names.append(instance.name)
        return instance

    monkeypatch.setattr(dispatch, "_plans", {})
    monkeypatch.setattr(dispatch, "choose", spy)
    return names


def normalize(x: Tensor | None = None, **extra: Any) -> Tensor:
    return fusednorm.group_norm(torch.ones(2, 8, 9) if x is None else x, 4, **extra)


def test_use_instance_is_obeyed_and_then_forgotten(chosen: list[str]) -> None:
    normalize()
    with use_instance("reference"):
        normalize()
    with use_instance("cpu.planes"):
        normalize()
    normalize()
    assert chosen == ["cpu.planes", "reference", "cpu.planes"]  # the last call found the first one's plan


def test_use_instance_nests(chosen: list[str]) -> None:
    with use_instance("reference"):
        with use_instance("cpu.planes_split"):
            normalize(activation=activation_for("cpu.planes_split"))
        normalize()
    assert chosen == ["cpu.planes_split", "reference"]


def test_use_instance_ends_with_an_exception(chosen: list[str]) -> None:
    with pytest.raises(KeyError), use_instance("reference"):
        raise KeyError
    normalize()
    assert chosen == ["cpu.planes"]


def test_use_instance_is_obeyed_by_the_backward(chosen: list[str]) -> None:
    with use_instance("cpu.planes_split"):
        x = torch.randn(2, 8, 9, requires_grad=True)
        normalize(x, activation=activation_for("cpu.planes_split")).sum().backward()
    assert chosen == ["cpu.planes_split", "cpu.planes_split"]


def test_use_instance_never_falls_back(chosen: list[str]) -> None:
    with (
        use_instance("cpu.slabs"),
        pytest.raises(RuntimeError, match=r"'cpu\.slabs' cannot run this problem: needs chan"),
    ):
        normalize()
    assert chosen == []
    assert dispatch._plans == {}


def test_use_instance_does_not_reach_other_threads(chosen: list[str]) -> None:
    with use_instance("reference"):
        other = threading.Thread(target=normalize)
        other.start()
        other.join()
    assert chosen == ["cpu.planes"]


def test_use_instance_refuses_a_name_at_once() -> None:
    with pytest.raises(ValueError, match=r"use_instance: 'cpu.fast' does not exist"), use_instance("cpu.fast"):
        pass


# --- plans ---


def test_a_plan_is_made_once(chosen: list[str]) -> None:
    x = torch.randn(2, 8, 9, requires_grad=True)
    for _ in range(3):
        normalize(x).sum().backward()
    assert chosen == ["cpu.planes", "cpu.planes"]  # forward and backward


WEIGHT, MODULATION = torch.ones(8), torch.ones(2, 8)
VARIANTS: dict[str, Callable[[], Any]] = {
    "shape": lambda: normalize(torch.ones(2, 8, 10)),
    "strides": lambda: normalize(torch.ones(2, 9, 8).movedim(-1, 1)),
    "dtype": lambda: normalize(torch.ones(2, 8, 9, dtype=torch.float16)),
    "number of groups": lambda: fusednorm.group_norm(torch.ones(2, 8, 9), 2),
    "channel_dim": lambda: fusednorm.group_norm(torch.ones(2, 8, 8), 4, channel_dim=-1),
    "family": lambda: fusednorm.instance_norm(torch.ones(2, 8, 9)),
    "activation": lambda: normalize(activation="relu"),
    "parameter of the activation": lambda: normalize(activation=Activation("leaky_relu", 0.5)),
    "weight": lambda: normalize(weight=WEIGHT),
    "dtype of the weight": lambda: normalize(weight=WEIGHT.double()),
    "bias": lambda: normalize(bias=WEIGHT),
    "scale": lambda: normalize(scale=MODULATION),
    "shift": lambda: normalize(shift=MODULATION),
    "given statistics": lambda: fusednorm.batch_norm(torch.ones(2, 8, 9), WEIGHT, WEIGHT),
}


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    """The plans that are kept, none at first; all are the reference's, so that no kernel is compiled."""
    kept: dict[Any, Any] = {}
    monkeypatch.setattr(dispatch, "_plans", kept)
    monkeypatch.setattr(dispatch, "choose", lambda *_: reference.INSTANCE)
    return kept


def test_a_forward_plan_depends_on_all_that_its_kernel_does(plans: dict[Any, Any]) -> None:
    # What the variants differ from, each in one thing.
    normalize()
    normalize(torch.ones(2, 8, 8))
    normalize(activation=Activation("leaky_relu", 0.25))
    fusednorm.batch_norm(torch.ones(2, 8, 9), None, None, training=True)
    for number, (name, variant) in enumerate(VARIANTS.items(), len(plans) + 1):
        for _ in range(2):
            variant()
        assert len(plans) == number, name


def test_a_backward_plan_depends_on_all_that_its_kernel_does(plans: dict[Any, Any]) -> None:
    x, weight = torch.randn(2, 8, 9), torch.ones(8)
    mean, rstd = torch.zeros(2, 4), torch.ones(2, 4)
    batch_mean, batch_rstd = torch.zeros(8), torch.ones(8)
    everything, data, parameters = (True,) * 5, (True, *(False,) * 4), (False, *(True,) * 4)
    group: Any = ("group_norm", 4, 1, "", 0.0, True)
    batch: Any = ("batch_norm", 0, 1, "", 0.0)
    none: Any = (None, None, None)
    last = torch.randn(2, 9, 8).movedim(-1, 1)
    calls: list[tuple[Any, ...]] = [
        (x, x, mean, rstd, weight, *none, *group, everything),
        (x, x, mean, rstd, weight, *none, *group, data),
        (x, x, mean, rstd, weight, *none, *group, parameters),
        (last, x, mean, rstd, weight, *none, *group, everything),
        (x, last, mean, rstd, weight, *none, *group, everything),
        (x, x, mean, rstd, weight.half(), *none, *group, everything),
        (x, x, mean, rstd, None, *none, *group, everything),
        (x, x, mean, rstd, weight, None, torch.ones(2, 8), None, *group, everything),
        (x, x, batch_mean, batch_rstd, weight, *none, *batch, True, everything),
        (x, x, batch_mean, batch_rstd, weight, *none, *batch, False, everything),
    ]
    for number, call in enumerate(calls, 1):
        for _ in range(2):
            ops.norm_backward(*call)
        assert len(plans) == number


X, STATISTIC = torch.empty(2, 8, 9), torch.empty(2, 4)
#: The facts of a call, each of which some plan depends on.
CALL: dict[str, Any] = {
    "norm": norm_of("group_norm", 4), "wanted": (True,) * 5, "quantized": Quantized("int8", False),
    "input": X, "weight": WEIGHT, "bias": WEIGHT, "scale": MODULATION, "shift": MODULATION,
    "mean": STATISTIC, "rstd": STATISTIC, "grad_output": X,
    "pre_add": X, "pre_gate": MODULATION, "pre_bias": WEIGHT, "post_add": X,
    "keeps_sum": True, "grad_sum": True, "wants_pre_add": True, "grad_numbers": True,
}  # fmt: skip
#: More samples change no stride.
SAMPLES, STRIDES = torch.empty_strided((3, 8, 9), X.stride()), torch.empty(2, 9, 8).movedim(-1, 1)
#: What each of them may be instead.
OTHERS: dict[str, tuple[Any, ...]] = {
    "norm": (norm_of("group_norm", 2), norm_of("group_norm", 8), norm_of("group_norm", 4, eps=1.0)),
    "wanted": ((True, *(False,) * 4), (False, *(True,) * 4)),
    "quantized": (Quantized("int8", True), Quantized("float8_e5m2", False)),
    "input": (SAMPLES, STRIDES, X.double(), X.to("meta")),
    "grad_output": (STRIDES,),
    **dict.fromkeys(("weight", "bias", "pre_bias"), (None, WEIGHT.double())),
    **dict.fromkeys(("scale", "shift", "pre_gate"), (None, MODULATION.double())),
    **dict.fromkeys(("pre_add", "post_add"), (None, SAMPLES, STRIDES, X.double())),
    **dict.fromkeys(("keeps_sum", "grad_sum", "wants_pre_add", "grad_numbers"), (False,)),
}


def part(kind: Any, call: dict[str, Any]) -> Any:
    """The operands of this kind that are the call's."""
    return kind(**{one.name: call[one.name] for one in fields(kind) if one.name in call})


def sum_backward_plan(call: dict[str, Any]) -> Any:
    gated = None if call["pre_gate"] is None else part(Gated, call)
    around = call["post_add"], call["grad_sum"], gated, call["grad_numbers"]
    return dispatch.sum_backward_plan(call["norm"], part(BackwardOperands, call), call["wanted"], *around)


AHEAD = ("norm", "input", "weight", "bias", "scale", "shift")
BACK = (*AHEAD, "grad_output")
#: The kinds of plans, and what each depends on.
KINDS: dict[str, tuple[Callable[[dict[str, Any]], Any], tuple[str, ...]]] = {
    "forward": (lambda call: dispatch.forward_plan(call["norm"], part(Operands, call)), AHEAD),
    "backward": (
        lambda call: dispatch.backward_plan(call["norm"], part(BackwardOperands, call), call["wanted"]),
        (*BACK, "wanted"),
    ),
    "spread forward": (lambda call: dispatch.spread_forward_plan(call["norm"], part(Operands, call)), AHEAD),
    "spread backward": (
        lambda call: dispatch.spread_backward_plan(call["norm"], part(BackwardOperands, call)), BACK,
    ),
    "forward with sums": (
        lambda call: dispatch.sum_forward_plan(
            call["norm"], part(Operands, call), part(Sums, call), call["keeps_sum"]
        ),
        (*AHEAD, "pre_add", "pre_gate", "pre_bias", "post_add", "keeps_sum"),
    ),
    "backward with sums": (
        sum_backward_plan,
        (*BACK, "wanted", "pre_add", "pre_gate", "wants_pre_add", "post_add", "grad_sum", "grad_numbers"),
    ),
    "quantized": (
        lambda call: dispatch.quantized_plan(call["norm"], part(Operands, call), None, call["quantized"]),
        (*AHEAD, "quantized"),
    ),
    "quantized with sums": (
        lambda call: dispatch.quantized_plan(call["norm"], part(Operands, call), part(Sums, call), call["quantized"]),
        (*AHEAD, "quantized", "pre_add", "pre_gate"),
    ),
}  # fmt: skip


def test_each_fact_of_a_call_has_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing runs: a plan is its own number, which a call by the same facts gets again."""
    numbers, expected = count(), count()
    monkeypatch.setattr(dispatch, "_plans", {})
    monkeypatch.setattr(dispatch, "make_plan", lambda *_: next(numbers))
    monkeypatch.setattr(dispatch, "spread", lambda *_: next(numbers))
    monkeypatch.setattr(dispatch, "_sum_plan", lambda key, _: dispatch._kept(key, next(numbers)))
    file: Any = object()
    for kind, (plan, facts) in KINDS.items():
        first = next(expected)
        assert plan(CALL) == first, kind
        for name in facts:
            for other in OTHERS[name]:
                assert plan(CALL | {name: other}) == next(expected), (kind, name)
        with use_instance("reference"):
            assert plan(CALL) == next(expected), kind
        if not kind.startswith("spread"):  # of which nothing is tuned
            with choice.as_selected(choice.Selection(None, file)):
                assert plan(CALL) == next(expected), kind
        assert plan(CALL) == first, kind


@pytest.mark.parametrize("wants", [False, True])
def test_what_is_wanted_reaches_the_plan(wants: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x, statistic, found = torch.empty(2, 8, 9), torch.empty(2, 4), []
    monkeypatch.setattr(dispatch, "_plans", {})
    monkeypatch.setattr(dispatch, "make_plan", lambda *_: lambda operands, wanted: found.append(wanted))
    wanted = (True, wants, not wants, False, False)
    dispatch.forward(norm_of("group_norm", 4), Operands(x), wants)
    dispatch.backward(norm_of("group_norm", 4), BackwardOperands(x, x, statistic, statistic), wanted)
    assert found == [wants, wanted]


def test_each_eps_has_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 8, 9)
    monkeypatch.setattr(dispatch, "_plans", {})
    together = [normalize(x, eps=eps) for eps in (1e-5, 1.0, 1e-5)]
    assert len(dispatch._plans) == 2
    dispatch._plans.clear()
    assert same_bits(together[1], normalize(x, eps=1.0))
    assert same_bits(together[2], together[0])
    assert not same_bits(together[1], together[0])


def test_the_number_of_plans_is_bounded(plans: dict[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "MOST_PLANS", 8)
    for positions in range(2, 40):
        normalize(torch.ones(1, 8, positions))
        assert 1 <= len(plans) <= 8


def test_threads_may_clear_the_plans_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "MOST_PLANS", 2)
    monkeypatch.setattr(dispatch, "_plans", {})
    inputs = [torch.randn(2, 8, 9 + i) for i in range(4)]
    expected, wrong = [normalize(x) for x in inputs], []

    def work(offset: int) -> None:
        for turn in range(60):
            i = (turn + offset) % len(inputs)
            if not same_bits(normalize(inputs[i]), expected[i]):
                wrong.append(i)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert wrong == []


# --- into memory of the caller ---


@pytest.mark.parametrize("strided", [False, True])
def test_out_receives_the_output(strided: bool) -> None:
    x = torch.randn(2, 8, 5, 12)[..., ::2] if strided else torch.randn(2, 8, 5, 6)
    out = torch.empty_like(normalize(x))
    problem = forward_problem(norm_of("group_norm", 4), Operands(x))
    assert dispatch.make_plan(problem)(Operands(x), out=out).output is out
    assert same_bits(out, normalize(x))
