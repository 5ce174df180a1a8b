"""The functions of fusednorm.distributed in 2, 3 and 4 processes on one machine, against the whole in one process.

The processes of each world size start once and make the calls of all cases; the tests judge what they left.
"""

from __future__ import annotations

import doctest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from spread_cases import CASES, PARAMETERS, Case, draw, own, parameters, running
from test_distributed import WORLD_SIZES, Found, load, run
from torch import Tensor

import fusednorm
from fusednorm import distributed
from fusednorm.distributed import sharding, synchronized
from fusednorm.distributed.moments import Moments, Units, moments_of
from fusednorm.distributed.whole import normalize_channels, with_summed_gradients
from fusednorm.operands import Operands, Statistics
from fusednorm.tolerance import judge, offset_of

WORKER = Path(__file__).with_name("spread_worker.py")
EPS = 1e-5
MOMENTUM = 0.3
ACTIVATIONS: dict[str | None, Callable[[Tensor], Tensor]] = {
    None: lambda z: z, "relu": F.relu, "silu": F.silu, "gelu": F.gelu,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("ranks"), "cpu", *WORLD_SIZES, worker=WORKER)


@pytest.fixture(scope="module", params=WORLD_SIZES, ids="{} ranks".format)
def ranks(request: pytest.FixtureRequest, folder: Path) -> Found:
    return load(folder, request.param)


def moments(case: Case, x: Tensor) -> tuple[Tensor, Tensor]:
    """mean and biased variance of the whole, that broadcast against it; rms_norm has a mean of 0."""
    grouped, reduced = x, case.reduced
    if case.num_groups:
        grouped = x.unflatten(case.channel_axis, (case.num_groups, -1))
        after = [dim + (dim > case.channel_axis) for dim in reduced]
        reduced = [*after, case.channel_axis + 1]
    mean = grouped.mean(reduced, keepdim=True)
    if case.family == "rms_norm":
        mean = torch.zeros_like(mean)
    var = (grouped - mean).square().mean(reduced, keepdim=True)
    if case.num_groups:
        mean, var = (
            each.expand(*each.shape[: case.channel_axis + 1], grouped.shape[case.channel_axis + 1],
                        *each.shape[case.channel_axis + 2 :]).flatten(case.channel_axis, case.channel_axis + 1)
            for each in (mean, var)
        )  # fmt: skip
    return mean, var


def shaped(case: Case, name: str, value: Tensor) -> Tensor:
    """A parameter that broadcasts against the input."""
    axes = case.axes(name)
    return value.reshape([value.shape[axes.index(dim)] if dim in axes else 1 for dim in range(len(case.shape))])


def affine(case: Case, xhat: Tensor, operands: dict[str, Tensor]) -> Tensor:
    values = {name: shaped(case, name, value) for name, value in operands.items()}
    factor = 1 + values["scale"] if "scale" in values else 1.0
    z = xhat * (values["weight"] * factor if "weight" in values else factor)
    if "bias" in values:
        z = z + values["bias"] * factor
    return z + values["shift"] if "shift" in values else z


def whole(case: Case, world_size: int, dtype: torch.dtype) -> dict[str, Any]:
    """The same call in one process, in torch's operators; each entry has a list of what each rank should have."""
    drawn = [draw(case, rank, world_size) for rank in range(world_size)]
    inputs = [input.to(dtype).requires_grad_() for input, _ in drawn]
    x = torch.cat(inputs, case.axis)
    mean, var = moments(case, x)
    statistics = running(case, world_size)
    found: dict[str, Any] = {}
    if statistics is not None:
        found["running_mean"], found["running_var"] = moved(case, statistics, mean, var, x)
        if not case.training:
            shape = [-1 if dim == case.channel_axis else 1 for dim in range(x.dim())]
            mean, var = (each.to(dtype).reshape(shape) for each in statistics)
    xhats = ((x - mean) * (var + EPS).rsqrt()).split(case.sizes[world_size], case.axis)
    values = parameters(case, world_size)
    # Each rank's own parameters, so that each has the gradients of its part.
    operands = [
        {
            name: own(case, value, case.axes(name), rank, world_size).to(dtype).clone().requires_grad_()
            for name, value in values.items()
        }
        for rank in range(world_size)
    ]
    outputs = [ACTIVATIONS[case.activation](affine(case, *each)) for each in zip(xhats, operands, strict=True)]
    torch.autograd.backward(outputs, [grad.to(dtype) for _, grad in drawn])
    found["output"] = [output.detach() for output in outputs]
    found["input"] = [input.grad for input in inputs]
    for name in values:
        grads = [each[name].grad for each in operands]
        found[name] = [sum(grads)] * world_size if shares(case, name) else grads
    found["mean"], found["rstd"] = mean.detach(), (var.detach() + EPS).rsqrt()
    found["terms"] = x.numel()
    return found


def moved(case: Case, statistics: tuple[Tensor, Tensor], mean: Tensor, var: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The running statistics after the call."""
    if not case.training:
        return statistics
    count = x.numel() // mean.numel()
    channels = [dim for dim in range(x.dim()) if dim != case.channel_axis]
    new = mean.detach().mean(channels), var.detach().mean(channels) * (count / (count - 1))
    return tuple((1 - MOMENTUM) * old.to(x.dtype) + MOMENTUM * each for old, each in zip(statistics, new, strict=True))  # type: ignore[return-value]


def shares(case: Case, name: str) -> bool:
    """Whether all ranks have the same parameter, with the sum of the gradients."""
    return case.axis not in case.axes(name) and case.axis != 0


def check_results(ranks: Found, name: str) -> None:
    """Every rank's results are within the rule of those of the whole."""
    case, world_size = CASES[name], len(ranks)
    exact = whole(case, world_size, torch.float64)
    rough = whole(case, world_size, torch.float32)
    offset = offset_of(exact["mean"], exact["rstd"])
    for rank, found in enumerate(ranks):
        got = found[name][0]
        for key in ("output", "input", *case.operands):
            if key in case.frozen:
                assert got[key] is None
                continue
            verdict = judge(got[key], exact[key][rank], rough[key][rank], offset=offset, terms=exact["terms"])
            assert verdict.ok, f"rank {rank}, {key}: {verdict.fault}"
        for key in ("running_mean", "running_var") if case.running else ():
            expected, plain = (own(case, each[key], [case.channel_axis], rank, world_size) for each in (exact, rough))
            spread = 1 / float(exact["rstd"].min()) if key == "running_mean" else 0.0
            verdict = judge(got[key], expected.double(), plain, offset=offset, terms=exact["terms"], spread=spread)
            assert verdict.ok, f"rank {rank}, {key}: {verdict.fault}"
        input = draw(case, rank, world_size)[0]
        assert got["output"].dtype == case.dtype
        if input.numel():
            assert got["output_strides"] == input.stride()


@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_the_whole_in_one_process(ranks: Found, name: str) -> None:
    check_results(ranks, name)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch.cuda.is_available() is False")
@pytest.mark.parametrize("count", [2, 4])
def test_ranks_over_nccl(tmp_path: Path, count: int) -> None:
    ranks = load(run(tmp_path, "cuda", count, worker=WORKER), count)
    for name in CASES:
        check_results(ranks, name)


@pytest.mark.parametrize("name", CASES)
def test_what_all_ranks_share_has_the_same_bits_on_each(ranks: Found, name: str) -> None:
    case = CASES[name]
    keys = [key for key in case.operands if shares(case, key) and key not in case.frozen]
    if case.running and case.axis != case.channel_axis:
        keys += ["running_mean", "running_var"]
    for found in ranks:
        for key in keys:
            assert torch.equal(found[name][0][key], ranks[0][name][0][key])


@pytest.mark.parametrize("name", CASES)
def test_two_runs_have_the_same_bits(ranks: Found, name: str) -> None:
    for found in ranks:
        one, other = found[name]
        for key, value in one.items():
            assert torch.equal(value, other[key]) if isinstance(value, Tensor) else value == other[key]


def test_a_group_of_some_ranks_has_the_results_of_so_many_alone(folder: Path) -> None:
    alone = load(folder, 2)
    for rank, found in enumerate(load(folder, 4)):
        assert len(found["pairs"]) == 4
        for name, one in found["pairs"].items():
            for key, value in alone[rank // 2][name][0].items():
                assert torch.equal(value, one[key]) if isinstance(value, Tensor) else value == one[key]


@pytest.mark.parametrize(
    ("mistake", "others", "last"),
    [
        ("dtype", "dtype float32", "dtype float64"),
        ("shape", "shape (2, 6, *, 4)", "shape (2, 6, *, 3)"),
        ("rank", "shape (2, 6, *, 4)", "shape (2, 6, *)"),
        ("num_groups", "num_groups 3", "num_groups 2"),
        ("eps", "eps 1e-05", "eps 0.001"),
        ("activation", "activation relu, activation's parameter 0.0", "activation silu, activation's parameter 1.0"),
        ("weight", "operands input", "operands input weight"),
        ("grad", "gradients for nothing", "gradients for input"),
        ("shard_dim", "shape (2, 6, *, 4)", "shape (2, 6, 4, *)"),
        ("momentum", "momentum 0.1", "momentum 1.1"),
        ("function", "function distributed.layer_norm", "function distributed.rms_norm"),
    ],
)
def test_ranks_that_disagree_all_say_so(ranks: Found, mistake: str, others: str, last: str) -> None:
    for found in ranks:
        words = found["errors"][mistake]
        assert words.startswith("RuntimeError: distributed.")
        assert "the ranks of the group do not make the same call" in words
        assert f"rank 0: {others}; " in words
        assert f"rank {len(ranks) - 1}: {last}; give every rank" in words


@pytest.mark.parametrize(
    ("mistake", "error"),
    [
        ("refused dtype", "TypeError: distributed.group_norm: input has dtype torch.int64; expected"),
        ("no tensor", "TypeError: distributed.group_norm: input is a NoneType; expected"),
        ("refused weight", "ValueError: distributed.group_norm: weight has shape (5,); expected (6,)"),
        ("refused dim", "ValueError: distributed.group_norm: shard_dim is 7 for an input of shape (2, 6, 3, 4)"),
        ("refused activation", "ValueError: activation: 'none such' is unknown"),
        ("refused normalized_shape", "ValueError: distributed.rms_norm: normalized_shape is (5, 4)"),
        ("no shape", "TypeError: distributed.layer_norm: normalized_shape is a int"),
        ("rows", "ValueError: distributed.layer_norm: weight has shape (5,); expected (4,)"),
    ],
)
def test_a_rank_that_refuses_its_arguments_stops_all(ranks: Found, mistake: str, error: str) -> None:
    *others, last = (found["errors"][mistake] for found in ranks)
    assert last.startswith(error)
    for words in others:
        assert words.startswith("RuntimeError: distributed.")
        assert f"rank {len(ranks) - 1} of the group refused its arguments" in words


@pytest.mark.parametrize(
    ("mistake", "error"),
    [
        ("num_groups of all", "ValueError: distributed.group_norm: the 6 channels of all processes cannot be divided"),
        ("channels of all", "of all processes cannot be divided into num_groups=5 equal groups"),
        ("no groups", "cannot be divided into num_groups=0"),
        ("no shard_dim", "ValueError: distributed.group_norm: shard_dim is None in a group of several processes"),
        ("no integer", "TypeError: distributed.group_norm: shard_dim is a float; expected an int"),
        ("one element", "ValueError: distributed.group_norm: the inputs of all ranks have 1 element for each group"),
        ("one position", "have 1 element for each sample and channel together"),
        ("one of the batch", "have 1 element for each channel together"),
        ("normalized_shape", "ValueError: distributed.layer_norm: the sizes of all processes along dimension 3 are [4"),
        (
            "vmap",
            "RuntimeError: distributed.group_norm: torch.func's transforms, forward-mode AD and is_grads",
        ),
        ("twice", "RuntimeError: trying to differentiate twice a function that was marked with @once_differentiable"),
    ],
)
def test_what_is_wrong_on_all_ranks(ranks: Found, mistake: str, error: str) -> None:
    for found in ranks:
        assert error in found["errors"][mistake]


@pytest.mark.parametrize("call", ["nothing", "nothing at all", "no element of a row", "size of the sharded", "changed"])
def test_ranks_go_on_after_an_error(ranks: Found, call: str) -> None:
    assert [found["errors"][call] for found in ranks] == [""] * len(ranks)


def test_a_process_outside_of_the_group_is_told(ranks: Found) -> None:
    assert ranks[0]["errors"]["alone"] == "True"
    for found in ranks[1:]:
        assert "is not a member of the process group" in found["errors"]["no member"]


def test_a_rank_that_does_not_call_is_an_error_within_the_timeout(ranks: Found) -> None:
    for found in ranks[:-1]:
        assert "RuntimeError: distributed.group_norm: the exchange with the other" in found["errors"]["no call"]


# --- in one process ---


@pytest.mark.parametrize(
    ("family", "arguments", "keywords"),
    [
        ("group_norm", (3,), {"scale": torch.ones(2, 6), "shard_dim": 2}),
        ("instance_norm", (), {"channel_dim": 1}),
        ("batch_norm", (None, None), {"training": True}),
        ("batch_norm", (torch.zeros(6), torch.ones(6)), {"shard_dim": 1}),
        ("layer_norm", ((5,),), {"weight": torch.ones(5), "shard_dim": -1}),
        ("layer_norm", ((6,),), {"channel_dim": 1}),
        ("rms_norm", ((4, 5),), {"eps": 1e-3}),
    ],
)
def test_one_process_without_a_group_is_the_plain_function(
    family: str, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> None:
    x = torch.randn(2, 6, 4, 5)
    plain = {name: value for name, value in keywords.items() if name != "shard_dim"}
    found = getattr(distributed, family)(x, *arguments, activation="relu", **keywords)
    assert torch.equal(found, getattr(fusednorm, family)(x, *arguments, activation="relu", **plain))


@pytest.mark.parametrize(("size", "first", "channels"), [(1, 0, 6), (2, 0, 6), (3, 1, 4), (3, 5, 1), (6, 2, 0)])
def test_units_merge_a_ranks_channels(size: int, first: int, channels: int) -> None:
    units = Units(6, group_channels=size, first=first)
    values = torch.randn(2, channels, 7, dtype=torch.float64) * 3 + 10
    part = moments_of(7, values.mean(2), (values - values.mean(2, keepdim=True)).square().mean(2))
    found = units.merge(part)
    for place in range(6 // size):
        start, stop = (min(max(edge - first, 0), channels) for edge in (place * size, (place + 1) * size))
        elements = values[:, start:stop].flatten(1)
        assert found.count.expand(found.mean.shape)[0, place] == elements.shape[1]
        if elements.numel():
            torch.testing.assert_close(found.mean[:, place], elements.mean(1))
            torch.testing.assert_close(found.var()[:, place], elements.var(1, correction=0))
            spread = units.spread(found.mean, channels)
            assert torch.equal(spread[:, start:stop], found.mean[:, place, None].expand(2, stop - start))


def test_units_merge_equal_numbers_exactly() -> None:
    values = torch.full((3, 7), 0.1, dtype=torch.float64)
    for units in (Units(7, over_samples=True), Units(7, group_channels=7)):
        found = units.merge(Moments(torch.tensor([3.0], dtype=torch.float64), values, torch.zeros_like(values)))
        assert bool((found.mean == 0.1).all())
        assert bool((found.m2 == 0).all())


@pytest.mark.parametrize(("elements", "mean", "var"), [(0.0, 5.0, 2.0), (4.0, 2.5, 5 / 3)])
def test_running_statistics_that_no_kernel_takes_stay_where_there_are_no_elements(
    elements: float, mean: float, var: float
) -> None:
    """The host does not read the count that a device's kernel finds."""

    class Kernels:
        def merge_moments(self, *arguments: Any) -> Statistics:
            count = torch.tensor(elements, dtype=torch.float64)
            return Statistics(torch.zeros(3), torch.ones(3), torch.ones(3), count)

    running = synchronized.Running(torch.full((6,), 5.0)[::2], torch.full((3,), 2.0), 0.5, torch.tensor(7))
    synchronized.merged_by_kernels(Kernels(), torch.zeros(2, 7), (3,), EPS, torch.float32, running)  # type: ignore[arg-type]
    torch.testing.assert_close(running.mean, torch.full((3,), mean))
    torch.testing.assert_close(running.var, torch.full((3,), var))
    assert running.counter == 8


def test_gradients_of_16_bits_are_summed_before_they_are_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 rounds 1 + 2^-9 to 1, and has their difference."""
    monkeypatch.setattr(
        synchronized, "gather", lambda function, values, group: torch.stack((values, -torch.ones_like(values)))
    )
    weight, bias = torch.ones(2, 4, dtype=torch.bfloat16)
    operands = Operands(torch.ones(3, 4, dtype=torch.bfloat16), weight.requires_grad_(), bias)
    summed, kept, *_ = with_summed_gradients("alone", None, operands)
    assert summed is not None
    assert kept is bias
    summed.backward(torch.full((4,), 1 + 2.0**-9).to(summed.dtype))
    assert weight.grad is not None
    assert weight.grad.tolist() == [2.0**-9] * 4
    with torch.no_grad():
        assert with_summed_gradients("alone", None, operands)[0] is weight


@pytest.mark.parametrize(("samples", "moved"), [(0, 1.0), (2, 1.5)])
def test_running_statistics_move_by_samples_where_a_rank_has_any(
    samples: int, moved: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed.functional, "gather", lambda function, values, group: values.unsqueeze(0))
    running_mean, running_var = torch.ones(2, 3)
    averages = torch.full((2, 3), 2.0, dtype=torch.float64) * (samples > 0)
    distributed.functional._move_by_samples(
        "alone", None, torch.ones(samples, 3, 4), averages, running_mean, running_var, 0.5
    )
    assert running_mean.tolist() == running_var.tolist() == [moved] * 3


def test_the_exchange_of_a_backward_runs_beside_a_pass_over_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def begin_sum(function: str, values: Tensor, groups: Any) -> Callable[[], Tensor]:
        seen.append("sent")

        def arrive() -> Tensor:
            seen.append("arrived")
            return values

        return arrive

    direct = synchronized._direct
    monkeypatch.setattr(synchronized, "gather", lambda function, values, group: values.unsqueeze(0))
    monkeypatch.setattr(synchronized, "begin_sum", begin_sum)
    monkeypatch.setattr(synchronized, "_direct", lambda *arguments: seen.append("a pass") or direct(*arguments))
    x = torch.randn(1, 6, 4).requires_grad_()
    operands = Operands(x, torch.ones(6))
    y = normalize_channels("alone", [None], operands, Units(6, group_channels=2), False, EPS, "relu", 1).output
    (found,) = torch.autograd.grad(y.square().sum(), x)
    assert seen == ["sent", "a pass", "arrived"]
    (expected,) = torch.autograd.grad(fusednorm.group_norm(x, 3, activation="relu").square().sum(), x)
    torch.testing.assert_close(found, expected)


def test_calls_of_a_kind_agree_once_where_a_header_would_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a call knows of the sizes of the others belongs to this rank's own size too."""
    sent: list[int] = []

    def together(function: str, group: Any, axis: int, check: Callable[[], dict[str, Any]]) -> sharding.Shard:
        sent.append(check().pop(sharding._OWN))
        return sharding.Shard(axis, [sent[-1], 3], 0)

    monkeypatch.setattr(sharding, "together", together)
    monkeypatch.setattr(sharding, "exchange_device", lambda group: torch.device("cuda"))
    group = lambda: None  # noqa: E731 (any object that has weak references)

    def call(size: int, eps: float, sizes: bool) -> sharding.Shard | None:
        x = torch.ones(2, size)

        def check() -> dict[str, Any]:
            return sharding.facts_of(Operands(x), 1, eps, None)

        return sharding.together_once("alone", group, 1, x, check, sizes)

    assert [call(size, 1e-5, False) is None for size in (4, 4, 5)] == [False, True, True]
    assert call(4, 1e-3, False) is not None
    assert [shard.sizes for shard in (call(size, 1e-5, True) for size in (4, 4, 5, 4)) if shard] == [
        [4, 3], [4, 3], [5, 3], [4, 3]
    ]  # fmt: skip
    assert sent == [4, 4, 4, 5]


def test_one_element_is_refused_where_the_sizes_of_the_others_are_not_known() -> None:
    """A rank with more than one element under a statistic has nothing to look at."""
    assert sharding.refusing_one_element("alone", "group", Units(6, group_channels=2), torch.empty(1, 6), None) is None
    inspect = sharding.refusing_one_element("alone", "group", Units(6), torch.empty(1, 6), None)
    assert inspect is not None
    counts = [torch.tensor([[0.0, count], [0.0, other]]) for count, other in ((0, 0), (1, 1), (1, 0))]
    assert [inspect(each) for each in counts[:2]] == [False, True]
    with pytest.raises(ValueError, match="have 1 element for each group together"):
        inspect(counts[2])


def test_the_examples_in_the_docstrings() -> None:
    results = doctest.testmod(distributed.functional, extraglobs={"torch": torch})
    assert results.attempted >= 10
    assert results.failed == 0


def test_every_parameter_is_a_case() -> None:
    assert {name for case in CASES.values() for name in case.operands} == set(PARAMETERS)
