"""SyncBatchNorm in 2, 3 and 4 processes on one machine, against the whole in one process and in float64.

The processes of each world size start once and make the calls of all cases; the tests judge what they left.
"""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from distributed_cases import CASES, CHANNELS, Case, draw, laid_out, modulation, parameters, plain
from torch import Tensor

import fusednorm
from fusednorm import nn
from fusednorm.distributed import SyncBatchNorm, convert_sync_batchnorm_
from fusednorm.distributed.batch_norm import _reads_counts
from fusednorm.distributed.moments import merge_in_order, moments_of
from fusednorm.tolerance import judge, offset_of

WORKER = Path(__file__).with_name("distributed_worker.py")
WORLD_SIZES = (2, 3, 4)
EPS = 1e-5
ACTIVATIONS = {None: lambda z: z, "relu": F.relu, "silu": F.silu, "gelu": F.gelu}
Found = list[dict[str, Any]]


def run(folder: Path, device: str, *world_sizes: int, worker: Path = WORKER) -> Path:
    """Where each rank of each world size has left what it found."""
    command = [sys.executable, str(worker), str(folder), device, *map(str, world_sizes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder


def load(folder: Path, world_size: int) -> Found:
    """What each rank found."""
    return [torch.load(folder / f"rank{rank}of{world_size}.pt") for rank in range(world_size)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("ranks"), "cpu", *WORLD_SIZES)


@pytest.fixture(scope="module", params=WORLD_SIZES, ids="{} ranks".format)
def ranks(request: pytest.FixtureRequest, folder: Path) -> Found:
    return load(folder, request.param)


def whole(case: Case, members: list[int], world_size: int, dtype: torch.dtype) -> dict[str, Any]:
    """The same training in one process, in torch's operators; a list has one entry for each member."""
    values = parameters(case) if case.affine else (torch.ones(CHANNELS), torch.zeros(CHANNELS))
    running_mean, running_var = torch.zeros(CHANNELS, dtype=dtype), torch.ones(CHANNELS, dtype=dtype)
    for step in range(case.steps):
        drawn = [draw(case, rank, world_size, step) for rank in members]
        inputs = [plain(case, input).to(dtype).requires_grad_() for input, _ in drawn]
        # Parameters of each member's own: the gradients are those of its samples.
        weights = [values[0].to(dtype).clone().requires_grad_() for _ in members]
        biases = [values[1].to(dtype).clone().requires_grad_() for _ in members]
        scales, shifts = zip(*(modulated(case, rank, world_size, dtype) for rank in members), strict=True)
        x = torch.cat(inputs)
        mean = x.mean((0, 2, 3), keepdim=True)
        var = (x - mean).square().mean((0, 2, 3), keepdim=True)
        outputs = [
            ACTIVATIONS[case.activation](
                ((input - mean) * (var + EPS).rsqrt() * weight.view(1, -1, 1, 1) + bias.view(1, -1, 1, 1))
                * (1 + scale[:, :, None, None])
                + shift[:, :, None, None]
            )
            for input, weight, bias, scale, shift in zip(inputs, weights, biases, scales, shifts, strict=True)
        ]
        grads = [plain(case, grad).to(dtype) for _, grad in drawn]
        torch.autograd.backward(outputs, grads)
        count = x.numel() // x.shape[1]
        share = 1 / (step + 1) if case.momentum is None else case.momentum
        unbiased = var.detach().flatten() * (count / (count - 1))
        running_mean = (1 - share) * running_mean + share * mean.detach().flatten()
        running_var = (1 - share) * running_var + share * unbiased
    return {
        "output": [laid_out(case, output.detach()) for output in outputs],
        "input": [laid_out(case, input.grad) for input in inputs if input.grad is not None],
        "weight": [weight.grad for weight in weights],
        "bias": [bias.grad for bias in biases],
        "scale": [scale.grad for scale in scales],
        "shift": [shift.grad for shift in shifts],
        "running_mean": [running_mean] * len(members),
        "running_var": [running_var] * len(members),
        "mean": mean.detach().flatten(),
        "rstd": (var.detach().flatten() + EPS).rsqrt(),
        "count": count,
    }


def modulated(case: Case, rank: int, world_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A rank's scale and shift, which are zeros where the call has none."""
    scale, shift = (each.to(dtype) * case.modulated for each in modulation(case, rank, world_size))
    return scale.requires_grad_(), shift.requires_grad_()


def check_results(ranks: Found, name: str) -> None:
    """Every rank's results are within the rule of those of the whole."""
    case, world_size = CASES[name], len(ranks)
    for rank, found in enumerate(ranks):
        members = case.members(rank, world_size)
        place = members.index(rank)
        exact = whole(case, members, world_size, torch.float64)
        rough = whole(case, members, world_size, torch.float32)
        offset = offset_of(exact["mean"], exact["rstd"])
        got = found[name][0]
        keys = ("output", "input", "weight", "bias", "running_mean", "running_var")
        for key in (*keys, "scale", "shift") if case.modulated else keys:
            if (case.frozen and key == "input") or (not case.affine and key in ("weight", "bias")):
                assert got[key] is None
                continue
            spread = 1 / float(exact["rstd"].min()) if key == "running_mean" else 0.0
            verdict = judge(
                got[key], exact[key][place], rough[key][place], offset=offset, terms=exact["count"], spread=spread
            )
            assert verdict.ok, f"rank {rank}, {key}: {verdict.fault}"
        assert int(got["num_batches_tracked"]) == case.steps
        assert got["output"].dtype == case.dtype
        assert got["running_mean"].dtype == torch.float32
        if got["output"].numel():
            assert got["output_strides"] == draw(case, rank, world_size, 0)[0].stride()


@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_the_whole_in_one_process(ranks: Found, name: str) -> None:
    check_results(ranks, name)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch.cuda.is_available() is False")
@pytest.mark.parametrize("count", [2, 4])
def test_ranks_over_nccl(tmp_path: Path, count: int) -> None:
    ranks = load(run(tmp_path, "cuda", count), count)
    for name in CASES:
        check_results(ranks, name)
    for found in ranks[1:]:
        assert torch.equal(ranks[0]["same"][0], found["same"][0])


@pytest.mark.parametrize("name", CASES)
def test_statistics_have_the_same_bits_on_every_rank(ranks: Found, name: str) -> None:
    for rank, found in enumerate(ranks):
        first = ranks[CASES[name].members(rank, len(ranks))[0]]
        for key in ("running_mean", "running_var"):
            assert torch.equal(found[name][0][key], first[name][0][key])


@pytest.mark.parametrize("name", CASES)
def test_two_runs_have_the_same_bits(ranks: Found, name: str) -> None:
    for found in ranks:
        one, other = found[name]
        for key, value in one.items():
            assert torch.equal(value, other[key]) if isinstance(value, Tensor) else value == other[key]


def test_sums_of_the_backward_have_the_same_bits_on_every_rank(ranks: Found) -> None:
    for found in ranks:
        for gradient in found["same"]:
            assert torch.equal(gradient, ranks[0]["same"][0])


@pytest.mark.parametrize("name", ["relu", "far_relu"])
def test_the_backward_takes_the_relu_of_the_outputs(ranks: Found, name: str) -> None:
    case = CASES[name]
    for rank, found in enumerate(ranks):
        got, (_, grad) = found[name][0], draw(case, rank, len(ranks), case.steps - 1)
        torch.testing.assert_close(got["bias"], (grad * (got["output"] > 0)).sum((0, 2, 3)), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_evaluation_is_batch_norms(ranks: Found, name: str) -> None:
    case = CASES[name]
    for rank, found in enumerate(ranks):
        got = found[name][0]
        module = nn.BatchNorm2d(
            CHANNELS,
            affine=case.affine,
            activation=case.activation,
            channel_dim=-1 if case.layout == "channel_dim" else 1,
        ).eval()
        if case.affine:
            module.weight, module.bias = (torch.nn.Parameter(value) for value in parameters(case))
        module.running_mean, module.running_var = got["running_mean"], got["running_var"]
        with torch.no_grad():
            expected = module(draw(case, rank, len(ranks), case.steps - 1)[0])
        assert torch.equal(got["evaluated"], expected)


def test_distributed_data_parallel_averages_the_gradients(folder: Path) -> None:
    ranks = load(folder, 2)
    mean = torch.stack([found["averaged"][1] for found in ranks]).mean(0)
    for found in ranks:
        torch.testing.assert_close(found["averaged"][0], mean)


def test_sums_around_the_module_are_torchs_own(folder: Path) -> None:
    for found in load(folder, 2):
        for one, other in found["summed"]:
            torch.testing.assert_close(one, other)


def errors(ranks: Found, mistake: str) -> tuple[list[str], str]:
    """The errors of the ranks that did nothing wrong, and that of the last, which made the mistake."""
    words = [found["errors"][mistake] for found in ranks]
    return words[:-1], words[-1]


@pytest.mark.parametrize(
    ("mistake", "detail"),
    [
        ("channels of the module", "channels 7"),
        ("dtype", "dtype float64"),
        ("grad", "gradient for the input yes"),
    ],
)
def test_ranks_that_disagree_all_say_so(ranks: Found, mistake: str, detail: str) -> None:
    others, last = errors(ranks, mistake)
    for words in [*others, last]:
        assert words.startswith("RuntimeError: SyncBatchNorm: the ranks of the group do not make the same call")
        assert f"rank {len(ranks) - 1}: " in words
        assert detail in words


REFUSED = ("refused at the first call", "refused later", "no tensor", "sum refused")


@pytest.mark.parametrize("mistake", [*REFUSED, "channel_dim", "num_features", "running_mean", "meta of one"])
def test_a_rank_that_refuses_its_input_stops_all(ranks: Found, mistake: str) -> None:
    if mistake == "meta of one" and len(ranks) > 2:
        pytest.skip("two processes try it: it loads much in each")
    others, last = errors(ranks, mistake)
    for words in others:
        assert f"RuntimeError: SyncBatchNorm: rank {len(ranks) - 1} of the group refused its arguments" in words
    if mistake == "no tensor":
        assert last.startswith("TypeError: SyncBatchNorm: input is a NoneType")
    elif mistake == "sum refused":
        assert last.startswith("ValueError: SyncBatchNorm: return_sum is True and pre_add is None")
    elif mistake not in REFUSED:
        words = {
            "channel_dim": "channel_dim is 5; expected 1",
            "num_features": "num_features is 7, and the ranks of the group agreed on 6 channels",
            "running_mean": "running_mean is one number for all channels",
            "meta of one": "is on cpu",
        }
        assert last.startswith("ValueError: SyncBatchNorm: ")
        assert words[mistake] in last
    else:
        assert "ValueError: SyncBatchNorm: input of shape (3, 5, 4) has 5 channels in dimension 1" in last


def test_ranks_go_on_after_an_error(ranks: Found) -> None:
    for found in ranks:
        assert found["errors"]["none"] == found["errors"]["none again"] == found["errors"]["changed"] == ""
        assert found["errors"]["updates"] == "2"


def test_calls_are_counted_without_running_statistics_too(ranks: Found) -> None:
    for found in ranks:
        assert found["errors"]["updates of nothing"] == "3"


def test_one_element_in_all_inputs_is_an_error_on_every_rank(ranks: Found) -> None:
    for found in ranks:
        assert "ValueError: SyncBatchNorm: the inputs of all ranks have 1 element" in found["errors"]["one element"]
        assert found["errors"]["no element"] == ""


def test_a_module_on_meta_exchanges_nothing(folder: Path) -> None:
    assert [found["errors"]["meta"] for found in load(folder, 2)] == ["", ""]


def test_a_process_outside_of_the_group_is_told(ranks: Found) -> None:
    for found in ranks[1:]:
        assert "is not a member of the process group" in found["errors"]["no member"]


def test_a_rank_that_does_not_call_is_an_error_within_the_timeout(ranks: Found) -> None:
    for found in ranks[:-1]:
        assert "RuntimeError: SyncBatchNorm: the exchange with the other" in found["errors"]["no call"]


# --- in one process ---


@pytest.mark.parametrize("keywords", [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}])
def test_one_process_without_a_group_is_batch_norm(keywords: dict[str, Any]) -> None:
    ours, plain_module = (
        SyncBatchNorm(6, activation="relu", **keywords),
        nn.BatchNorm2d(6, activation="relu", **keywords),
    )
    x = torch.randn(3, 6, 4, 5)
    for training in (True, True, False):
        mine, expected = x.clone().requires_grad_(), x.clone().requires_grad_()
        one, other = ours.train(training)(mine), plain_module.train(training)(expected)
        one.square().sum().backward()
        other.square().sum().backward()
        assert torch.equal(one, other)
        assert mine.grad is not None
        assert expected.grad is not None
        assert torch.equal(mine.grad, expected.grad)
    for key, value in ours.state_dict().items():
        assert torch.equal(value, plain_module.state_dict()[key])


def test_a_merge_of_parts_is_the_whole() -> None:
    parts = [torch.randn(size, 5, dtype=torch.float64) * (size + 1) + 100 * size for size in (4, 0, 1, 7)]
    packed = [
        moments_of(len(part), *((part.mean(0), part.var(0, correction=0)) if len(part) else torch.zeros(2, 5))).packed()
        for part in parts
    ]
    moments, everything = merge_in_order(torch.stack(packed), 5), torch.cat(parts)
    assert float(moments.count) == 12
    torch.testing.assert_close(moments.mean, everything.mean(0))
    torch.testing.assert_close(moments.var(), everything.var(0, correction=0))
    torch.testing.assert_close(moments.unbiased_var(), everything.var(0))


def test_a_rank_of_a_gpu_reads_the_counts_where_it_has_one_element_or_none() -> None:
    """The whole may have one element then, which every rank refuses."""
    for samples, reads in ((0, True), (1, True), (2, False)):
        assert _reads_counts(torch.empty(samples, 8, device="meta"), 8) is reads
        assert _reads_counts(torch.empty(samples, 8), 8)


def test_a_model_is_converted_in_place() -> None:
    shared = torch.nn.BatchNorm2d(4)
    model = torch.nn.Sequential(
        shared, torch.nn.ReLU(), shared, nn.BatchNorm1d(3, activation="silu", channel_dim=-1),
        torch.nn.SyncBatchNorm(2, process_group="kept"), torch.nn.GroupNorm(2, 4),
    ).eval()  # fmt: skip
    before = list(model)
    assert convert_sync_batchnorm_(model) is model
    assert list(model) == before
    for index in (0, 3, 4):
        assert type(model[index]) is SyncBatchNorm
        assert not model[index].training
    assert model[3].activation == nn.BatchNorm1d(3, activation="silu").activation
    assert model[3].channel_dim == -1
    assert model[4].process_group == "kept"
    assert type(model[5]) is torch.nn.GroupNorm
    assert torch.equal(model[0](torch.ones(1, 4, 2, 2)), torch.nn.BatchNorm2d(4).eval()(torch.ones(1, 4, 2, 2)))


def test_the_model_itself_is_converted() -> None:
    module = torch.nn.BatchNorm2d(4)
    assert nn.SyncBatchNorm.convert_sync_batchnorm(module, "group") is module
    assert type(module) is nn.SyncBatchNorm
    assert module.process_group == "group"
    other = torch.nn.SyncBatchNorm(4, process_group="its own")
    assert convert_sync_batchnorm_(other, "given").process_group == "given"


class Special(torch.nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 1


def test_a_forward_of_its_own_is_left_with_a_warning() -> None:
    model = torch.nn.Sequential(Special(4))
    with pytest.warns(UserWarning, match="0 is a Special, which has a forward of its own"):
        convert_sync_batchnorm_(model)
    assert type(model[0]) is Special


def test_what_cannot_be_converted() -> None:
    with pytest.raises(ValueError, match="0 is a LazyBatchNorm2d without parameters"):
        convert_sync_batchnorm_(torch.nn.Sequential(torch.nn.LazyBatchNorm2d()))
    with pytest.raises(TypeError, match="model is a int; expected a"):
        convert_sync_batchnorm_(3)  # type: ignore[type-var]


def test_copies_agree_anew() -> None:
    module = SyncBatchNorm(4, activation="relu")
    module._agreed = (lambda: None), 4
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert other._agreed is None
        assert repr(other) == repr(module)
        assert other.activation == module.activation


def test_its_names() -> None:
    assert nn.SyncBatchNorm is SyncBatchNorm
    assert fusednorm.convert_sync_batchnorm_ is nn.convert_sync_batchnorm_ is convert_sync_batchnorm_


def test_it_is_torchs_class() -> None:
    assert issubclass(nn.SyncBatchNorm, torch.nn.SyncBatchNorm)
    assert list(SyncBatchNorm(4).state_dict()) == list(torch.nn.SyncBatchNorm(4).state_dict())
    with pytest.raises(ValueError, match="rank 1"):
        SyncBatchNorm(4)(torch.randn(4))
